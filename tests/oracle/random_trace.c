/* random_trace.c - grows a trace item by item. The oracle says which candidates are right, so that a trace lives for a
 * while; what breaks a rule is kept seldom, and then a few items follow that nobody asks for. */
#include "oracle/random_trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "oracle/oracle.h"

enum { LENGTH_MIN = 6, TRIES_PER_ITEM = 12, TAIL_MAX = 6, EFFECTS_OF_ONE = 3, EVENTS = 3, STREAMS = 6 };

static const struct {
    qe_stream_role role;
    uint8_t order;
    uint16_t rank;
} streams[STREAMS] = {
    {QE_STREAM_COMPUTE, QE_STREAM_SEPARATE, 0}, {QE_STREAM_COMM, QE_STREAM_SEPARATE, 0},
    {QE_STREAM_CALLER, QE_STREAM_LEGACY, 0},    {QE_STREAM_COMPUTE, QE_STREAM_BLOCKING, 0},
    {QE_STREAM_HOST, QE_STREAM_SEPARATE, 0},    {QE_STREAM_COMPUTE, QE_STREAM_SEPARATE, 1},
};

enum { SCALE_DUE, SCALE_FREE, WEIGHT, CACHE, CACHE_BARE, GRAD, GRAD_ORDERED, SLOT, SLOT_PLACED, RNG, GRAPH, GRAPH_TOO };
static const qe_object objects[] = {
    [SCALE_DUE] = {.name = "S", .kind = QE_OBJECT_SCALE, .counter = 2, .due = 2},
    [SCALE_FREE] = {.name = "T", .kind = QE_OBJECT_SCALE},
    [WEIGHT] = {.name = "w", .kind = QE_OBJECT_WEIGHT, .counter = 1},
    [CACHE] = {.name = "q", .kind = QE_OBJECT_CACHE, .weight = WEIGHT, .scale = SCALE_DUE, .key_version = 1,
               .key_epoch = 2, .layouts = 1},
    [CACHE_BARE] = {.name = "p", .kind = QE_OBJECT_CACHE, .weight = WEIGHT, .scale = QE_NONE},
    [GRAD] = {.name = "g", .kind = QE_OBJECT_GRAD, .weight = WEIGHT, .due = 1},
    [GRAD_ORDERED] = {.name = "h", .kind = QE_OBJECT_GRAD, .weight = QE_NONE},
    [SLOT] = {.name = "X", .kind = QE_OBJECT_SLOT},
    [SLOT_PLACED] = {.name = "Y", .kind = QE_OBJECT_SLOT, .counter = 3, .bytes = 4, .address = 200},
    [RNG] = {.name = "R", .kind = QE_OBJECT_RNG, .counter = 7},
    [GRAPH] = {.name = "G", .kind = QE_OBJECT_GRAPH, .counter = 1},
    [GRAPH_TOO] = {.name = "H", .kind = QE_OBJECT_GRAPH},
    {.name = "b", .kind = QE_OBJECT_BUFFER, .bytes = 16},
    {.name = "c", .kind = QE_OBJECT_BUFFER, .bytes = 8, .counter = QE_BUFFER_WRITTEN},
    {.name = "block", .kind = QE_OBJECT_BUFFER, .bytes = 8, .address = 64, .counter = QE_BUFFER_WRITTEN},
    {.name = "low", .kind = QE_OBJECT_BUFFER, .bytes = 4, .address = 64, .counter = QE_BUFFER_ABSENT},
    {.name = "high", .kind = QE_OBJECT_BUFFER, .bytes = 6, .address = 66, .counter = QE_BUFFER_ABSENT},
    {.name = "alias", .kind = QE_OBJECT_BUFFER, .bytes = 8, .address = 196},
};
enum { OBJECTS = sizeof objects / sizeof objects[0] };
static const qe_deposit order[] = {{GRAD_ORDERED, 1, 0}, {GRAD_ORDERED, 0, 1}, {GRAD_ORDERED, 0, 0}};

static void must(qe_status status) {
    if (status == QE_OK) return;
    fprintf(stderr, "no memory for a random trace\n");
    exit(1);
}

static void add_world(qe_program *program) {
    char name[QE_NAME_BYTES];
    qe_program_init(program);
    for (int s = 0; s < STREAMS; s++) {
        snprintf(name, sizeof name, "s%d", s);
        must(qe_program_add_stream(program, name, streams[s].role, NULL, NULL));
        program->streams[s].order = streams[s].order;
        program->streams[s].rank = streams[s].rank;
    }
    for (int e = 0; e < EVENTS; e++) qe_program_add_event(program);
    for (int i = 0; i < OBJECTS; i++) must(qe_program_add_object(program, &objects[i], NULL, NULL));
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++)
        must(qe_program_add_deposit(program, &order[i], NULL));
}

static uint64_t next(uint64_t *seed) {
    uint64_t z = (*seed += 0x9e3779b97f4a7c15u); /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static uint32_t below(uint64_t *seed, uint32_t bound) { return (uint32_t)(next(seed) % bound); }
static int one_in(uint64_t *seed, uint32_t times) { return below(seed, times) == 0; }

/* A version as a program has it: from the object's first counter; now and then one that is off by one. */
static uint64_t version_of(const oracle *o, uint64_t *seed, uint32_t object, uint32_t stream) {
    uint64_t version = oracle_counter(o, object, stream) - objects[object].counter;
    return one_in(seed, 24) ? version + (one_in(seed, 2) ? 1 : UINT64_MAX) : version;
}

static void choose_range(uint64_t *seed, qe_effect *e) {
    uint32_t bytes = (uint32_t)objects[e->object].bytes;
    e->end = bytes;
    if (e->kind > QE_EFFECT_BUFFER_WRITE || one_in(seed, 2)) return;
    e->begin = below(seed, bytes);
    e->end = e->begin + below(seed, bytes + (one_in(seed, 16) ? 4 : 1) - (uint32_t)e->begin);
    if (!one_in(seed, 4)) return;
    e->end = e->begin + 1 + below(seed, 2);
    e->rows = 2 + below(seed, 3);
    e->pitch = below(seed, 5);
}

static void choose_buffer(uint64_t *seed, qe_effect *e) {
    static const uint8_t lives[] = {QE_EFFECT_BUFFER_ALLOC, QE_EFFECT_BUFFER_FREE, QE_EFFECT_BUFFER_TAKE,
                                    QE_EFFECT_BUFFER_DROP, QE_EFFECT_BUFFER_PLEDGE};
    e->kind = one_in(seed, 2) ? QE_EFFECT_BUFFER_READ : QE_EFFECT_BUFFER_WRITE;
    if (one_in(seed, 3)) e->kind = lives[below(seed, sizeof lives)];
    choose_range(seed, e);
    if (e->kind == QE_EFFECT_BUFFER_READ && one_in(seed, 8)) e->version = 1 + below(seed, 2);
}

static void choose_cache(const oracle *o, uint64_t *seed, uint32_t stream, qe_effect *e) {
    uint32_t scale = objects[e->object].scale;
    e->kind = one_in(seed, 2) ? QE_EFFECT_CACHE_FILL : QE_EFFECT_CACHE_USE;
    e->version = version_of(o, seed, WEIGHT, stream);
    e->epoch = scale != QE_NONE ? version_of(o, seed, scale, stream) : below(seed, 8) / 7;
    e->layouts = (uint8_t)(e->kind == QE_EFFECT_CACHE_FILL && one_in(seed, 2) ? 3 : 1 + one_in(seed, 8));
    e->recipe = (uint8_t)one_in(seed, 16);
}

static void choose_graph(const oracle *o, uint64_t *seed, uint32_t stream, qe_effect *e) {
    static const uint8_t kinds[] = {QE_EFFECT_GRAPH_BEGIN, QE_EFFECT_GRAPH_CAPTURE, QE_EFFECT_GRAPH_LAUNCH};
    e->kind = kinds[below(seed, sizeof kinds)];
    if (e->kind != QE_EFFECT_GRAPH_BEGIN) e->version = version_of(o, seed, e->object, stream);
    if (e->kind == QE_EFFECT_GRAPH_CAPTURE) e->version++;
    if (e->kind != QE_EFFECT_GRAPH_LAUNCH || !one_in(seed, 4)) return;
    e->use = (uint16_t)below(seed, QE_FROZEN_KINDS);
    e->end = (uint64_t)one_in(seed, 8);
}

static void choose_slot(const oracle *o, uint64_t *seed, uint32_t stream, qe_effect *e) {
    e->kind = (uint8_t)(QE_EFFECT_SLOT_ACQUIRE + below(seed, 3));
    e->version = version_of(o, seed, e->object, stream) + (e->kind == QE_EFFECT_SLOT_ACQUIRE);
    e->write = (uint8_t)(e->kind == QE_EFFECT_SLOT_BORROW && one_in(seed, 3));
    e->stage = (uint16_t)one_in(seed, 24);
}

static qe_effect random_effect(const oracle *o, uint64_t *seed, const qe_item *op) {
    qe_effect e = {.object = below(seed, OBJECTS - (one_in(seed, 16) ? 0 : 1))}; /* the last one is always refused */
    qe_object_kind kind = objects[e.object].kind;
    if (kind == QE_OBJECT_SLOT || kind == QE_OBJECT_GRAD || kind == QE_OBJECT_RNG)
        e.microbatch = one_in(seed, 16) ? QE_NONE : op->microbatch != QE_NONE ? op->microbatch : below(seed, 2);
    if (kind == QE_OBJECT_SCALE || kind == QE_OBJECT_WEIGHT || kind == QE_OBJECT_RNG)
        e.version = version_of(o, seed, e.object, op->stream);
    switch (kind) {
    case QE_OBJECT_SCALE: e.kind = (uint8_t)(QE_EFFECT_SCALE_USE + below(seed, 3)); break;
    case QE_OBJECT_SLOT: choose_slot(o, seed, op->stream, &e); break;
    case QE_OBJECT_WEIGHT: e.kind = one_in(seed, 3) ? QE_EFFECT_WEIGHT_COMMIT : QE_EFFECT_WEIGHT_READ; break;
    case QE_OBJECT_CACHE: choose_cache(o, seed, op->stream, &e); break;
    case QE_OBJECT_GRAD:
        e.kind = one_in(seed, 3) ? QE_EFFECT_GRAD_TAKE : QE_EFFECT_GRAD_DEPOSIT;
        if (e.kind == QE_EFFECT_GRAD_TAKE) e.microbatch = 0;
        else e.write = (uint8_t)below(seed, 2), e.use = (uint16_t)one_in(seed, 3);
        break;
    case QE_OBJECT_BUFFER: choose_buffer(seed, &e); break;
    case QE_OBJECT_GRAPH: choose_graph(o, seed, op->stream, &e); break;
    case QE_OBJECT_RNG:
        e.kind = QE_EFFECT_RNG_DRAW;
        e.end = 1 + below(seed, 2);
        e.write = (uint8_t)one_in(seed, 3);
        if (e.write) e.version -= e.end;
        break;
    case QE_OBJECT_KINDS: break;
    }
    return e;
}

/* Most work stays on one stream for a while: else everything races with everything. */
static qe_item random_item(const oracle *o, uint64_t *seed, uint32_t home, qe_effect *effects_out) {
    static const uint8_t others[] = {QE_ITEM_RECORD, QE_ITEM_RECORD, QE_ITEM_WAIT, QE_ITEM_WAIT, QE_ITEM_SYNC_EVENT,
                                     QE_ITEM_SYNC_STREAM, QE_ITEM_SYNC_DEVICE, QE_ITEM_STEP_BEGIN, QE_ITEM_STEP_END,
                                     QE_ITEM_DESTROY};
    qe_item item = {.kind = QE_ITEM_OP, .microbatch = one_in(seed, 4) ? QE_NONE : below(seed, 2)};
    item.stream = one_in(seed, 4) ? below(seed, STREAMS) : home;
    if (one_in(seed, 3)) item.kind = others[below(seed, sizeof others)];
    item.event = below(seed, EVENTS);
    if (item.kind == QE_ITEM_SYNC_EVENT || item.kind == QE_ITEM_SYNC_DEVICE) item.rank = (uint16_t)one_in(seed, 8);
    if (item.kind == QE_ITEM_OP) item.effect_count = (uint8_t)(1 + below(seed, EFFECTS_OF_ONE));
    for (int i = 0; i < item.effect_count; i++) effects_out[i] = random_effect(o, seed, &item);
    return item;
}

static void add(qe_program *program, qe_item item, const qe_effect *effects) {
    if (item.kind == QE_ITEM_OP) must(qe_program_add_label(program, "op", &item.label, NULL));
    must(qe_program_add_item(program, &item, effects, item.effect_count, NULL, NULL));
}

static void take_back(qe_program *program) {
    program->item_count--;
    program->effect_count = program->items[program->item_count].first_effect;
}

/* Is what breaks a rule kept? The seldomer it comes up by itself, the sooner. */
static int is_kept(uint64_t *seed, int rule) {
    switch (rule) {
    case QE_RULE_NONE: return 1;
    case QE_RULE_SLOT_EMPTY:
    case QE_RULE_CACHE_EMPTY:
    case QE_RULE_GRAD_ORDER:
    case QE_RULE_GRAD_MISSING:
    case QE_RULE_SYNC_EVENT:
    case QE_RULE_SLOT_ALIAS:
    case QE_RULE_BUFFER_FREED:
    case QE_RULE_BUFFER_LIVE: return one_in(seed, 1024);
    case QE_RULE_SYNC_REUSE:
    case QE_RULE_GRAPH_UNJOINED:
    case QE_RULE_GRAPH_MODE:
    case QE_RULE_GRAPH_ADDRESS:
    case QE_RULE_GRAPH_CONSTANT: return one_in(seed, 2);
    default: return one_in(seed, 40);
    }
}

void random_trace(qe_program *program, uint64_t seed) {
    qe_effect effects[EFFECTS_OF_ONE];
    add_world(program);
    oracle *o = oracle_open(program, RANDOM_ITEMS_MAX);
    uint32_t length = LENGTH_MIN + below(&seed, RANDOM_ITEMS_MAX - TAIL_MAX - LENGTH_MIN);
    uint32_t home = 0, tail = 0;
    int rule = QE_RULE_NONE;
    for (uint32_t tries = 0; rule == QE_RULE_NONE && program->item_count < length && tries < TRIES_PER_ITEM * length;
         tries++) {
        oracle_mark mark = oracle_here(o);
        if (one_in(&seed, 12)) home = below(&seed, STREAMS);
        qe_item item = random_item(o, &seed, home, effects);
        add(program, item, effects);
        rule = oracle_next(o)->rule;
        if (is_kept(&seed, rule)) continue;
        take_back(program);
        oracle_back(o, &mark);
        rule = QE_RULE_NONE;
    }
    if (rule != QE_RULE_NONE) tail = below(&seed, TAIL_MAX);
    for (; tail > 0; tail--) {
        qe_item item = random_item(o, &seed, home, effects);
        add(program, item, effects);
    }
    oracle_close(o);
}
