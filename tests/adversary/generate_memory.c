/* generate_memory.c - right traces of what only traces have: blocks that are handed out again, split and merged, in the
 * order of streams or by the host's allocator, pledges, draws and drawing again, default streams, two ranks. Grown item
 * by item: what wants an edge is tried again behind one, and else left out. */
#include <string.h>

#include "adversary/adversary.h"

enum { STREAMS_MAX = 5, EVENTS = 4, BLOCKS = 7, BLOCK_BYTES = 8, LENGTH_MIN = 12, LENGTH_MAX = 44, TRIES = 6 };
enum { PLAIN_BUFFER = BLOCKS, GENERATOR, OBJECTS };

typedef struct block {
    uint64_t at, bytes;
    qe_buffer_begin begin;
} block;

/* A block, the same again, its halves, one across them, and one apart. */
static const block blocks[BLOCKS] = {
    {4096, 8, QE_BUFFER_WRITTEN}, {4096, 8, QE_BUFFER_ABSENT}, {4096, 4, QE_BUFFER_ABSENT}, {4100, 4, QE_BUFFER_ABSENT},
    {4098, 4, QE_BUFFER_ABSENT}, {4096, 16, QE_BUFFER_ABSENT}, {4104, 8, QE_BUFFER_ABSENT}};

typedef struct memory {
    step *s;
    dice *d;
    uint32_t streams;
    uint64_t drawn;          /* offset of the next number */
    qe_effect draws[LENGTH_MAX];
    uint32_t draw_count;
} memory;

static void add_objects(memory *w) {
    char name[QE_NAME_BYTES];
    for (uint32_t i = 0; i < BLOCKS; i++) {
        qe_object o = {.kind = QE_OBJECT_BUFFER, .bytes = blocks[i].bytes, .address = blocks[i].at,
                       .counter = (uint64_t)blocks[i].begin, .weight = QE_NONE, .scale = QE_NONE};
        snprintf(o.name, sizeof o.name, "block%u", i);
        MUST(qe_program_add_object(&w->s->program, &o, NULL, NULL) == QE_OK);
    }
    qe_object plain = {.name = "plain", .kind = QE_OBJECT_BUFFER, .bytes = BLOCK_BYTES};
    qe_object rng = {.name = "rng", .kind = QE_OBJECT_RNG, .counter = dice_below(w->d, 100)};
    MUST(qe_program_add_object(&w->s->program, &plain, NULL, NULL) == QE_OK);
    MUST(qe_program_add_object(&w->s->program, &rng, NULL, NULL) == QE_OK);
    w->streams = 2 + dice_below(w->d, STREAMS_MAX - 1);
    int implicit = dice_one_in(w->d, 3), ranks = dice_one_in(w->d, 3);
    for (uint32_t i = 0; i < w->streams; i++) {
        static const qe_stream_role roles[] = {QE_STREAM_COMPUTE, QE_STREAM_CALLER, QE_STREAM_COMM, QE_STREAM_HOST};
        snprintf(name, sizeof name, "s%u", i);
        qe_stream_role role = i == 0 ? QE_STREAM_COMPUTE : roles[dice_below(w->d, 4)];
        MUST(qe_program_add_stream(&w->s->program, name, role, NULL, NULL) == QE_OK);
        qe_stream_info *stream = &w->s->program.streams[i];
        if (implicit && role != QE_STREAM_HOST)
            stream->order = i == 1 ? QE_STREAM_LEGACY : dice_one_in(w->d, 2) ? QE_STREAM_BLOCKING : QE_STREAM_SEPARATE;
        if (ranks && i > 1) stream->rank = (uint16_t)dice_below(w->d, 2);
    }
    for (int i = 0; i < EVENTS; i++) qe_program_add_event(&w->s->program);
}

static int is_right(const memory *w, uint64_t *rules) {
    qe_program program;
    uint32_t starts[2];
    unroll(w->s, NULL, 0, 1, 0, &program, starts);
    item_breach found = precedence_first(&program, 1);
    *rules = found.rules;
    qe_program_deinit(&program);
    return found.rules == 0;
}

static void put(memory *w, const entry *e) { sequence_insert(&w->s->right, w->s->right.count, e); }

static void put_plain(memory *w, qe_item_kind kind, uint32_t stream, uint32_t event) {
    entry e = {.item = {.kind = (uint8_t)kind, .stream = stream, .event = event, .microbatch = QE_NONE}};
    e.item.rank = w->s->program.streams[stream].rank;
    put(w, &e);
}

/* Behind everybody: by events, or through the host. */
static void put_edges(memory *w, uint32_t stream) {
    const qe_stream_info *streams = w->s->program.streams;
    int by_host = dice_one_in(w->d, 6);
    for (uint32_t from = 0; from < w->streams; from++) {
        uint32_t event = dice_below(w->d, EVENTS);
        if (from == stream) continue;
        if (by_host && streams[from].rank == streams[stream].rank) put_plain(w, QE_ITEM_SYNC_STREAM, from, 0);
        if (by_host) continue;
        put_plain(w, QE_ITEM_RECORD, from, event);
        put_plain(w, QE_ITEM_WAIT, stream, event);
    }
}

static void draw_numbers(memory *w, entry *e) {
    qe_effect *effect = &e->effects[0];
    *effect = (qe_effect){.kind = QE_EFFECT_RNG_DRAW, .object = GENERATOR, .version = w->drawn,
                          .end = 1 + dice_below(w->d, 5), .microbatch = dice_below(w->d, 3)};
    if (w->draw_count > 0 && dice_one_in(w->d, 2)) {
        *effect = w->draws[dice_below(w->d, w->draw_count)];
        effect->write = 1;
    }
}

static void touch_bytes(memory *w, entry *e) {
    qe_effect *effect = &e->effects[0];
    uint32_t buffer = dice_below(w->d, BLOCKS + 1);
    uint64_t size = w->s->program.objects[buffer].bytes;
    static const uint8_t kinds[] = {QE_EFFECT_BUFFER_READ, QE_EFFECT_BUFFER_READ, QE_EFFECT_BUFFER_WRITE,
                                    QE_EFFECT_BUFFER_WRITE, QE_EFFECT_BUFFER_ALLOC, QE_EFFECT_BUFFER_FREE,
                                    QE_EFFECT_BUFFER_TAKE, QE_EFFECT_BUFFER_DROP, QE_EFFECT_BUFFER_PLEDGE};
    *effect = (qe_effect){.kind = kinds[dice_below(w->d, sizeof kinds)], .object = buffer, .end = size};
    if (effect->kind > QE_EFFECT_BUFFER_WRITE || dice_one_in(w->d, 2)) return;
    effect->begin = dice_below(w->d, (uint32_t)size);
    effect->end = effect->begin + 1 + dice_below(w->d, (uint32_t)(size - effect->begin));
}

static int put_op(memory *w) {
    entry e = {.item = {.kind = QE_ITEM_OP, .effect_count = 1, .stream = dice_below(w->d, w->streams)}};
    uint64_t rules;
    e.item.microbatch = QE_NONE;
    e.item.rank = w->s->program.streams[e.item.stream].rank;
    int draws = dice_one_in(w->d, 5);
    if (draws) draw_numbers(w, &e);
    else touch_bytes(w, &e);
    MUST(qe_program_add_label(&w->s->program, qe_effect_kind_name((qe_effect_kind)e.effects[0].kind), &e.item.label,
                              NULL) == QE_OK);
    uint32_t before = w->s->right.count;
    put(w, &e);
    int right = is_right(w, &rules);
    if (!right && rules < bit_of(QE_RULE_SYNC_EVENT) && rules >= bit_of(QE_RULE_SYNC_ENTER)) rules = 0;
    if (!right && (rules == 0 || rules == bit_of(QE_RULE_SYNC_REUSE))) {
        w->s->right.count = before;
        put_edges(w, e.item.stream);
        put(w, &e);
        right = is_right(w, &rules);
    }
    if (!right) w->s->right.count = before;
    if (right && draws && !e.effects[0].write) {
        w->draws[w->draw_count++] = e.effects[0];
        w->drawn += e.effects[0].end;
    }
    return right;
}

void generate_memory(step *s, dice *d) {
    step_init(s);
    memory w = {.s = s, .d = d};
    add_objects(&w);
    s->traces_only = s->single = 1;
    uint32_t length = LENGTH_MIN + dice_below(d, LENGTH_MAX - LENGTH_MIN);
    for (uint32_t i = 0; i < TRIES * length && s->right.count < length; i++) put_op(&w);
    snprintf(s->name, sizeof s->name, "memory S%u", w.streams);
    step_seal(s);
}
