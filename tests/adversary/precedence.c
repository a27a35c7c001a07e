/* precedence.c - what comes before what, kept as plain sets of items: no clocks, no ranges, no code of the ledger.
 * Bytes are cut into cells at every border that any effect of the program names, and each cell has its own history.
 * Judges the order of all accesses, and what memory holds; versions of other objects are the operators' business. What
 * is recorded is not judged: it happens where the graph is launched. */
#include <stdlib.h>
#include <string.h>

#include "adversary/adversary.h"

enum { RECORDED_MAX = 64 };

typedef struct cell {
    uint32_t write; /* last item that wrote, or QE_NONE */
    uint32_t *reads, read_count, read_capacity; /* items since */
    uint32_t writes, step; /* of the step */
    uint32_t owner;        /* buffer that lies here, where addresses are told */
    int written;
} cell;

typedef struct recorded {
    qe_effect effects[RECORDED_MAX];
    uint32_t count;
} recorded;

typedef struct walk {
    const qe_program *program;
    uint32_t words, step, item;
    uint64_t *stream, *host, *event, *before, *launched, *known; /* sets of items */
    uint8_t *recorded_event, *there;
    uint32_t *born;
    uint64_t *pledged;
    uint32_t recording_graph[QE_PROGRAM_STREAMS_MAX]; /* graph + 1, or 0 */
    uint32_t recording[QE_PROGRAM_STREAMS_MAX], *event_recording, recordings; /* numbered from 1; 0: none */
    recorded *graphs;
    uint64_t *borders;
    uint32_t border_count;
    cell *cells;
    uint64_t rules;
    int replays;
} walk;

static uint64_t base_of(const qe_program *program, uint32_t object) {
    const qe_object *o = &program->objects[object];
    return o->kind == QE_OBJECT_BUFFER && o->address > 0 ? o->address : (uint64_t)(object + 1) << 40;
}

static void bytes_of(const qe_program *program, const qe_effect *effect, uint64_t *begin, uint64_t *end) {
    const qe_object *o = &program->objects[effect->object];
    uint64_t base = base_of(program, effect->object);
    *begin = base + (o->kind == QE_OBJECT_BUFFER ? effect->begin : 0);
    *end = base + (o->kind == QE_OBJECT_BUFFER ? effect->end : 1);
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void cut(walk *o) {
    const qe_program *p = o->program;
    size_t count = 0, most = 2 * ((size_t)p->effect_count + p->object_count);
    o->borders = malloc((most + 1) * sizeof *o->borders);
    MUST(o->borders != NULL);
    for (uint32_t i = 0; i < p->object_count; i++) {
        qe_effect whole = {.object = i, .end = p->objects[i].bytes};
        bytes_of(p, &whole, &o->borders[count], &o->borders[count + 1]);
        count += 2;
    }
    for (uint32_t i = 0; i < p->effect_count; i++) {
        bytes_of(p, &p->effects[i], &o->borders[count], &o->borders[count + 1]);
        count += 2;
    }
    qsort(o->borders, count, sizeof *o->borders, by_value);
    for (size_t i = 0; i < count; i++)
        if (o->border_count == 0 || o->borders[i] != o->borders[o->border_count - 1])
            o->borders[o->border_count++] = o->borders[i];
    o->cells = calloc(o->border_count, sizeof *o->cells);
    MUST(o->cells != NULL);
    for (uint32_t i = 0; i < o->border_count; i++) o->cells[i].write = o->cells[i].owner = QE_NONE;
}

static uint32_t cell_at(const walk *o, uint64_t at) {
    const uint64_t *found = bsearch(&at, o->borders, o->border_count, sizeof at, by_value);
    MUST(found != NULL);
    return (uint32_t)(found - o->borders);
}

/* Cells [first, end) of an effect. */
static void cells_of(const walk *o, const qe_effect *effect, uint32_t *first, uint32_t *end) {
    uint64_t begin, stop;
    bytes_of(o->program, effect, &begin, &stop);
    *first = *end = 0;
    if (begin >= stop) return;
    *first = cell_at(o, begin);
    *end = cell_at(o, stop);
}

static uint64_t *set_of(const walk *o, uint64_t *sets, uint32_t index) { return &sets[(size_t)index * o->words]; }
static void add_all(const walk *o, uint64_t *to, const uint64_t *from) {
    for (uint32_t i = 0; i < o->words; i++) to[i] |= from[i];
}
static void become(const walk *o, uint64_t *to, const uint64_t *from) { memcpy(to, from, o->words * sizeof *to); }
static int holds(const uint64_t *set, uint32_t item) { return set[item / 64] >> (item % 64) & 1; }

static void open_walk(walk *o, const qe_program *program) {
    memset(o, 0, sizeof *o);
    o->program = program;
    o->words = program->item_count / 64 + 1;
    size_t set = o->words * sizeof(uint64_t), objects = program->object_count + 1u, events = program->event_count + 1u;
    o->stream = calloc(QE_PROGRAM_STREAMS_MAX, set);
    o->before = calloc(QE_PROGRAM_STREAMS_MAX, set);
    o->host = calloc(QE_RANKS_MAX, set);
    o->event = calloc(events, set);
    o->launched = calloc(objects, set);
    o->known = calloc(1, set);
    o->recorded_event = calloc(events, 1);
    o->event_recording = calloc(events, sizeof *o->event_recording);
    o->there = calloc(objects, 1);
    o->born = calloc(objects, sizeof *o->born);
    o->pledged = calloc(objects, sizeof *o->pledged);
    o->graphs = calloc(objects, sizeof *o->graphs);
    MUST(o->stream && o->before && o->host && o->event && o->launched && o->known && o->recorded_event && o->there);
    MUST(o->event_recording && o->born && o->pledged && o->graphs);
    cut(o);
}

static void close_walk(walk *o) {
    for (uint32_t i = 0; i < o->border_count; i++) free(o->cells[i].reads);
    free(o->cells);
    free(o->borders);
    free(o->stream);
    free(o->before);
    free(o->host);
    free(o->event);
    free(o->launched);
    free(o->known);
    free(o->recorded_event);
    free(o->event_recording);
    free(o->there);
    free(o->born);
    free(o->pledged);
    free(o->graphs);
}

/* A view of a block does not own it. */
static void place_buffers(walk *o) {
    for (uint32_t i = 0; i < o->program->object_count; i++) {
        const qe_object *object = &o->program->objects[i];
        if (object->kind != QE_OBJECT_BUFFER) continue;
        o->there[i] = object->counter != QE_BUFFER_ABSENT;
        uint32_t first, end;
        qe_effect whole = {.object = i, .end = object->bytes};
        cells_of(o, &whole, &first, &end);
        for (uint32_t c = first; c < end && o->there[i]; c++) {
            uint32_t owner = o->cells[c].owner;
            int wider = owner == QE_NONE || o->program->objects[owner].bytes < object->bytes;
            if (object->address > 0 && wider) o->cells[c].owner = i;
            if (object->counter == QE_BUFFER_WRITTEN) o->cells[c].written = 1;
        }
    }
}

static void break_rule(walk *o, unsigned rule) { o->rules |= bit_of(rule); }

static unsigned order_rule(qe_stream_role earlier, qe_stream_role later) {
    if (earlier == QE_STREAM_HOST || later == QE_STREAM_HOST) return QE_RULE_SYNC_HOST;
    if (earlier == QE_STREAM_CALLER && later != QE_STREAM_CALLER) return QE_RULE_SYNC_ENTER;
    if (earlier != QE_STREAM_CALLER && later == QE_STREAM_CALLER) return QE_RULE_SYNC_EXIT;
    return QE_RULE_SYNC_SIDE;
}

static void hold_against(walk *o, const qe_effect *effect, uint32_t other) {
    const qe_program *p = o->program;
    if (other == QE_NONE || holds(o->known, other)) return;
    if (effect_is(effect, QE_OBJECT_BUFFER) && other < o->born[effect->object]) break_rule(o, QE_RULE_SYNC_REUSE);
    else
        break_rule(o, order_rule(p->streams[p->items[other].stream].role, p->streams[p->items[o->item].stream].role));
}

static int reads_only(const qe_effect *effect) { return !effect_writes(effect); }

/* A write comes after the reads since the last write, or after that write where there are none; memory that was handed
 * out again comes after all its earlier users. */
static void judge_cell(walk *o, const qe_effect *effect, const cell *c) {
    if (!reads_only(effect))
        for (uint32_t i = 0; i < c->read_count; i++) hold_against(o, effect, c->reads[i]);
    int reused = effect_is(effect, QE_OBJECT_BUFFER) && c->write != QE_NONE && c->write < o->born[effect->object];
    if (reads_only(effect) || c->read_count == 0 || reused) hold_against(o, effect, c->write);
}

static int is_allocators(const qe_effect *effect) {
    return effect->kind == QE_EFFECT_BUFFER_TAKE || effect->kind == QE_EFFECT_BUFFER_DROP ||
           effect->kind == QE_EFFECT_BUFFER_PLEDGE;
}
static int begins_life(const qe_effect *effect) {
    return effect->kind == QE_EFFECT_BUFFER_ALLOC || effect->kind == QE_EFFECT_BUFFER_TAKE;
}
static int ends_life(const qe_effect *effect) {
    return effect->kind == QE_EFFECT_BUFFER_FREE || effect->kind == QE_EFFECT_BUFFER_DROP;
}

/* Was the cell written by this op, before effect k? */
static int wrote_itself(const walk *o, const qe_effect *effects, uint32_t k, uint32_t at) {
    for (uint32_t i = 0; i < k; i++) {
        uint32_t first, end;
        if (effects[i].kind != QE_EFFECT_BUFFER_WRITE) continue;
        cells_of(o, &effects[i], &first, &end);
        if (at >= first && at < end) return 1;
    }
    return 0;
}

static void judge_content(walk *o, const qe_effect *effects, uint32_t k, uint32_t at) {
    const cell *c = &o->cells[at];
    uint32_t writes = c->step == o->step ? c->writes : 0;
    if (wrote_itself(o, effects, k, at)) return;
    if (!c->written) break_rule(o, QE_RULE_BUFFER_UNWRITTEN);
    else if (effects[k].version != 0 && effects[k].version != writes) break_rule(o, QE_RULE_BUFFER_VERSION);
}

/* Is the buffer there, or not there, as the effect needs it? Then it becomes what the effect makes it. */
static int lives(walk *o, const qe_effect *effect) {
    if (!effect_is(effect, QE_OBJECT_BUFFER)) return 1;
    if (effect->end > o->program->objects[effect->object].bytes || effect->begin > effect->end) return 0;
    if (begins_life(effect) == o->there[effect->object]) {
        break_rule(o, begins_life(effect) ? QE_RULE_BUFFER_LIVE : QE_RULE_BUFFER_FREED);
        return 0;
    }
    if (begins_life(effect)) o->born[effect->object] = o->item;
    if (begins_life(effect)) o->there[effect->object] = 1;
    if (ends_life(effect)) o->there[effect->object] = 0;
    return 1;
}

static void judge_effect(walk *o, const qe_effect *effects, uint32_t k) {
    const qe_effect *effect = &effects[k];
    uint32_t first, end;
    if (effect_is(effect, QE_OBJECT_GRAPH) || effect->kind == QE_EFFECT_BUFFER_PLEDGE) return;
    cells_of(o, effect, &first, &end);
    for (uint32_t at = first; at < end; at++) {
        uint32_t owner = o->cells[at].owner;
        if (begins_life(effect) && owner != QE_NONE && owner != effect->object) break_rule(o, QE_RULE_BUFFER_LIVE);
        if (effect->kind == QE_EFFECT_BUFFER_READ) judge_content(o, effects, k, at);
        if (!is_allocators(effect)) judge_cell(o, effect, &o->cells[at]);
    }
}

static void add_read(cell *c, uint32_t item) {
    if (c->read_count > 0 && c->reads[c->read_count - 1] == item) return;
    if (c->read_count == c->read_capacity) {
        c->read_capacity = 2 * c->read_capacity + 4;
        c->reads = realloc(c->reads, c->read_capacity * sizeof *c->reads);
        MUST(c->reads != NULL);
    }
    c->reads[c->read_count++] = item;
}

/* The allocator waited for every stream that pledged, and so for all that comes before what they were given last. */
static void forgive(walk *o, cell *c, uint64_t pledged) {
    for (uint32_t s = 0; s < o->program->stream_count; s++) {
        if (!(pledged >> s & 1)) continue;
        const uint64_t *waited = set_of(o, o->stream, s);
        uint32_t kept = 0;
        if (c->write != QE_NONE && holds(waited, c->write)) c->write = QE_NONE;
        for (uint32_t i = 0; i < c->read_count; i++)
            if (!holds(waited, c->reads[i])) c->reads[kept++] = c->reads[i];
        c->read_count = kept;
    }
}

static void keep_in_cell(walk *o, const qe_effect *effect, cell *c) {
    if (begins_life(effect)) {
        c->owner = effect->object;
        c->written = 0;
        c->writes = 0;
    }
    if (ends_life(effect)) c->owner = QE_NONE;
    if (effect->kind == QE_EFFECT_BUFFER_DROP) forgive(o, c, o->pledged[effect->object]);
    if (is_allocators(effect)) return;
    if (reads_only(effect)) {
        add_read(c, o->item);
        return;
    }
    c->write = o->item;
    c->read_count = 0;
    if (effect->kind != QE_EFFECT_BUFFER_WRITE) return;
    c->writes = (c->step == o->step ? c->writes : 0) + 1;
    c->step = o->step;
    c->written = 1;
}

static void keep_effect(walk *o, const qe_effect *effect, uint32_t stream) {
    uint32_t first, end;
    if (effect_is(effect, QE_OBJECT_GRAPH)) return;
    if (effect->kind == QE_EFFECT_BUFFER_PLEDGE) {
        o->pledged[effect->object] |= bit_of((unsigned)stream);
        return;
    }
    cells_of(o, effect, &first, &end);
    for (uint32_t at = first; at < end; at++) keep_in_cell(o, effect, &o->cells[at]);
    if (effect->kind == QE_EFFECT_BUFFER_DROP) o->pledged[effect->object] = 0;
}

/* CUDA's default stream: it and the blocking streams of its rank take turns. */
static void know(walk *o, uint32_t stream) {
    const qe_stream_info *all = o->program->streams, *one = &all[stream];
    become(o, o->known, set_of(o, o->stream, stream));
    add_all(o, o->known, set_of(o, o->host, one->rank));
    for (uint32_t s = 0; s < o->program->stream_count; s++) {
        int legacy = one->order == QE_STREAM_LEGACY || all[s].order == QE_STREAM_LEGACY;
        int both = one->order != QE_STREAM_SEPARATE && all[s].order != QE_STREAM_SEPARATE;
        if (s != stream && legacy && both && all[s].rank == one->rank) add_all(o, o->known, set_of(o, o->stream, s));
    }
}

static void advance(walk *o, uint32_t stream) {
    const qe_stream_info *one = &o->program->streams[stream];
    become(o, set_of(o, o->stream, stream), o->known);
    if (one->role == QE_STREAM_HOST) become(o, set_of(o, o->host, one->rank), o->known);
}

static void record_op(walk *o, const qe_item *item, const qe_effect *effects) {
    recorded *graph = &o->graphs[o->recording_graph[item->stream] - 1];
    for (uint32_t k = 0; k < item->effect_count; k++) {
        if (!effect_is(&effects[k], QE_OBJECT_BUFFER)) continue;
        MUST(graph->count < RECORDED_MAX);
        graph->effects[graph->count++] = effects[k];
    }
}

static void end_recording(walk *o, uint32_t stream) {
    uint32_t ended = o->recording[stream];
    for (uint32_t s = 0; s < o->program->stream_count; s++) {
        if (o->recording[s] != ended) continue;
        o->recording[s] = o->recording_graph[s] = 0;
        if (o->replays) become(o, set_of(o, o->stream, s), set_of(o, o->before, s));
    }
}

static void begin_recording(walk *o, uint32_t stream, uint32_t number, uint32_t graph) {
    o->recording[stream] = number;
    o->recording_graph[stream] = graph;
    become(o, set_of(o, o->before, stream), set_of(o, o->stream, stream));
}

/* A stream that still takes part in a recording, or QE_NONE. */
static uint32_t taking_part(const walk *o, uint32_t number) {
    for (uint32_t s = 0; s < o->program->stream_count && number != 0; s++)
        if (o->recording[s] == number) return s;
    return QE_NONE;
}

static void launch(walk *o, uint32_t graph) {
    const recorded *r = &o->graphs[graph];
    add_all(o, o->known, set_of(o, o->launched, graph));
    for (uint32_t k = 0; k < r->count; k++) judge_effect(o, r->effects, k);
}

static void run_op(walk *o, const qe_item *item, const qe_effect *effects) {
    uint32_t bad = 0, stream = item->stream;
    know(o, stream);
    for (uint32_t k = 0; k < item->effect_count; k++)
        if (effects[k].kind == QE_EFFECT_GRAPH_LAUNCH) launch(o, effects[k].object);
    for (uint32_t k = 0; k < item->effect_count; k++)
        if (!lives(o, &effects[k])) bad |= 1u << k;
    for (uint32_t k = 0; k < item->effect_count; k++)
        if (!(bad >> k & 1)) judge_effect(o, effects, k);
    if (o->rules != 0) return;
    o->known[o->item / 64] |= (uint64_t)1 << (o->item % 64);
    for (uint32_t k = 0; k < item->effect_count; k++) {
        const recorded *r = &o->graphs[effects[k].object];
        for (uint32_t i = 0; effects[k].kind == QE_EFFECT_GRAPH_LAUNCH && i < r->count; i++)
            keep_effect(o, &r->effects[i], stream);
        if (!(bad >> k & 1)) keep_effect(o, &effects[k], stream);
        if (effects[k].kind == QE_EFFECT_GRAPH_LAUNCH) become(o, set_of(o, o->launched, effects[k].object), o->known);
    }
    advance(o, stream);
}

/* The legacy default stream would wait for a blocking stream that only records. */
static int stands_beside_recording(const walk *o, uint32_t stream) {
    const qe_stream_info *all = o->program->streams;
    for (uint32_t s = 0; s < o->program->stream_count && all[stream].order == QE_STREAM_LEGACY; s++) {
        int partner = s != stream && all[s].order != QE_STREAM_SEPARATE && all[s].rank == all[stream].rank;
        if (partner && o->recording[s] != 0) return 1;
    }
    return 0;
}

static void judge_op(walk *o, const qe_item *item) {
    const qe_effect *effects = item->effect_count > 0 ? &o->program->effects[item->first_effect] : NULL;
    if (stands_beside_recording(o, item->stream)) break_rule(o, QE_RULE_SYNC_CAPTURE);
    if (o->recording[item->stream] == 0 || !o->replays) run_op(o, item, effects);
    else record_op(o, item, effects);
    for (uint32_t k = 0; k < item->effect_count; k++) {
        if (effects[k].kind == QE_EFFECT_GRAPH_BEGIN) {
            o->graphs[effects[k].object].count = 0;
            begin_recording(o, item->stream, ++o->recordings, effects[k].object + 1);
        }
        if (effects[k].kind == QE_EFFECT_GRAPH_CAPTURE && o->recording[item->stream] != 0)
            end_recording(o, item->stream);
    }
}

/* A recording waits only for what is recorded with it; what it records is of no use outside, but to who joins. */
static int crosses_border(const walk *o, const qe_item *item) {
    uint32_t own = o->recording[item->stream], other = o->event_recording[item->event];
    if (own != 0) return other != own;
    return other != 0 && taking_part(o, other) == QE_NONE;
}

static void judge_wait(walk *o, const qe_item *item) {
    uint32_t with = taking_part(o, o->event_recording[item->event]);
    if (!o->recorded_event[item->event]) {
        break_rule(o, QE_RULE_SYNC_EVENT);
        return;
    }
    if (crosses_border(o, item)) {
        break_rule(o, QE_RULE_SYNC_CAPTURE);
        return;
    }
    if (with != QE_NONE && o->recording[item->stream] == 0)
        begin_recording(o, item->stream, o->recording[with], o->recording_graph[with]);
    know(o, item->stream);
    add_all(o, o->known, set_of(o, o->event, item->event));
    advance(o, item->stream);
}

static void judge_record(walk *o, const qe_item *item) {
    know(o, item->stream);
    become(o, set_of(o, o->event, item->event), o->known);
    become(o, set_of(o, o->stream, item->stream), o->known);
    o->recorded_event[item->event] = 1;
    o->event_recording[item->event] = o->recording[item->stream];
}

static int waits_for_recording(const walk *o, const qe_item *item, uint32_t rank) {
    if (item->kind == QE_ITEM_SYNC_STREAM)
        return o->recording[item->stream] != 0 || stands_beside_recording(o, item->stream);
    for (uint32_t s = 0; s < o->program->stream_count && item->kind == QE_ITEM_SYNC_DEVICE; s++)
        if (o->recording[s] != 0 && o->program->streams[s].rank == rank) return 1;
    return 0;
}

static void judge_sync(walk *o, const qe_item *item) {
    const qe_stream_info *streams = o->program->streams;
    uint32_t rank = item->kind == QE_ITEM_SYNC_STREAM ? streams[item->stream].rank : item->rank;
    if (item->kind == QE_ITEM_SYNC_EVENT && !o->recorded_event[item->event]) {
        break_rule(o, QE_RULE_SYNC_EVENT);
        return;
    }
    int event = item->kind == QE_ITEM_SYNC_EVENT && o->event_recording[item->event] != 0;
    if (event || waits_for_recording(o, item, rank)) {
        break_rule(o, QE_RULE_SYNC_CAPTURE);
        return;
    }
    if (item->kind == QE_ITEM_SYNC_EVENT) add_all(o, set_of(o, o->host, rank), set_of(o, o->event, item->event));
    if (item->kind == QE_ITEM_SYNC_STREAM) {
        know(o, item->stream);
        add_all(o, set_of(o, o->host, rank), o->known);
    }
    for (uint32_t s = 0; s < o->program->stream_count; s++)
        if (item->kind == QE_ITEM_SYNC_DEVICE && streams[s].rank == rank)
            add_all(o, set_of(o, o->host, rank), set_of(o, o->stream, s));
}

item_breach precedence_first(const qe_program *program, int replays) {
    walk o;
    open_walk(&o, program);
    o.replays = replays;
    place_buffers(&o);
    for (o.item = 0; o.item < program->item_count && o.rules == 0; o.item++) {
        const qe_item *item = &program->items[o.item];
        switch ((qe_item_kind)item->kind) {
        case QE_ITEM_OP: judge_op(&o, item); break;
        case QE_ITEM_RECORD: judge_record(&o, item); break;
        case QE_ITEM_WAIT: judge_wait(&o, item); break;
        case QE_ITEM_SYNC_EVENT:
        case QE_ITEM_SYNC_STREAM:
        case QE_ITEM_SYNC_DEVICE: judge_sync(&o, item); break;
        case QE_ITEM_DESTROY: o.recorded_event[item->event] = 0; break;
        case QE_ITEM_STEP_BEGIN:
        case QE_ITEM_STEP_END: o.step++; break;
        case QE_ITEM_KINDS: break;
        }
    }
    item_breach found = {o.rules != 0 ? o.item - 1 : program->item_count, o.rules};
    close_walk(&o);
    return found;
}
