/* generate_small.c - small right programs with every kind of object: layers and microbatches in random order on random
 * streams, slots from a pool, an edge of some kind wherever two accesses need one, and some that nobody needs. */
#include <stdlib.h>
#include <string.h>

#include "adversary/adversary.h"

enum { LAYERS_MAX = 3, MICROBATCHES_MAX = 4, STREAMS = 5, EVENTS = 6, ITEMS_MAX = 1024, WORDS = ITEMS_MAX / 64 };
enum { ON_CALLER, ON_COMPUTE, ON_SEND, ON_SIDE, ON_HOST };
enum { IN_BYTES = 64, OUT_BYTES = 8, WORK_BYTES = 96 };

typedef struct layer {
    uint32_t scale_x, scale_w, weight, cache, grad, gain;
    uint32_t slot_x[MICROBATCHES_MAX], slot_y[MICROBATCHES_MAX]; /* pools */
    uint32_t pool, uses;
    uint8_t recipe;
    /* by microbatch: pool index and generation that it holds */
    uint32_t held_x[MICROBATCHES_MAX], held_y[MICROBATCHES_MAX];
} layer;

typedef struct small {
    step *s;
    dice *d;
    uint32_t layers, microbatches;
    layer layer[LAYERS_MAX];
    uint32_t in, out, work, graph, graph_buffer;
    uint64_t generation[256]; /* by object */
    uint8_t busy[256];
    uint8_t done[MICROBATCHES_MAX]; /* phases of a microbatch that are over */
    uint64_t known[STREAMS][WORDS], host[WORDS]; /* items that come before whatever is next there */
} small;

static uint32_t add_object(small *w, qe_object object, const char *name, uint32_t number) {
    uint32_t index;
    snprintf(object.name, sizeof object.name, "%s%u", name, number);
    MUST(qe_program_add_object(&w->s->program, &object, &index, NULL) == QE_OK);
    MUST(index < 256);
    return index;
}

static uint64_t begin_counter(small *w) { return dice_one_in(w->d, 2) ? dice_below(w->d, 4) : 0; }

static void add_layer(small *w, uint32_t number) {
    layer *l = &w->layer[number];
    int counts = !dice_one_in(w->d, 4);
    l->uses = dice_one_in(w->d, 4) ? 2 : 1;
    l->recipe = (uint8_t)dice_below(w->d, 5);
    l->pool = 1 + dice_below(w->d, w->microbatches);
    l->scale_x = add_object(w, (qe_object){.kind = QE_OBJECT_SCALE, .due = counts ? w->microbatches : 0,
                                           .counter = begin_counter(w)}, "x", number);
    l->scale_w = add_object(w, (qe_object){.kind = QE_OBJECT_SCALE, .due = (uint32_t)counts,
                                           .counter = begin_counter(w)}, "w", number);
    l->weight = add_object(w, (qe_object){.kind = QE_OBJECT_WEIGHT, .counter = begin_counter(w)}, "weight", number);
    l->gain = add_object(w, (qe_object){.kind = QE_OBJECT_WEIGHT, .counter = begin_counter(w)}, "gain", number);
    l->cache = add_object(w, (qe_object){.kind = QE_OBJECT_CACHE, .weight = l->weight,
                                         .scale = dice_one_in(w->d, 4) ? QE_NONE : l->scale_w}, "cache", number);
    l->grad = add_object(w, (qe_object){.kind = QE_OBJECT_GRAD, .weight = l->weight,
                                        .due = w->microbatches * l->uses}, "grad", number);
    for (uint32_t i = 0; i < l->pool; i++) {
        l->slot_x[i] = add_object(w, (qe_object){.kind = QE_OBJECT_SLOT, .counter = begin_counter(w)}, "X",
                                  10 * number + i);
        l->slot_y[i] = add_object(w, (qe_object){.kind = QE_OBJECT_SLOT, .counter = begin_counter(w)}, "Y",
                                  10 * number + i);
    }
}

static void add_world(small *w) {
    static const char *const names[STREAMS] = {"caller", "compute", "send", "side", "host"};
    static const qe_stream_role roles[STREAMS] = {QE_STREAM_CALLER, QE_STREAM_COMPUTE, QE_STREAM_COMM,
                                                  QE_STREAM_COMPUTE, QE_STREAM_HOST};
    qe_program *p = &w->s->program;
    for (int i = 0; i < STREAMS; i++) MUST(qe_program_add_stream(p, names[i], roles[i], NULL, NULL) == QE_OK);
    for (int i = 0; i < EVENTS; i++) qe_program_add_event(p);
    w->in = add_object(w, (qe_object){.kind = QE_OBJECT_BUFFER, .bytes = IN_BYTES * w->microbatches}, "in", 0);
    w->out = add_object(w, (qe_object){.kind = QE_OBJECT_BUFFER, .bytes = OUT_BYTES * w->microbatches}, "out", 0);
    w->work = add_object(w, (qe_object){.kind = QE_OBJECT_BUFFER, .bytes = WORK_BYTES,
                                        .counter = dice_below(w->d, 2)}, "work", 0);
    w->graph = add_object(w, (qe_object){.kind = QE_OBJECT_GRAPH, .counter = begin_counter(w)}, "graph", 0);
    w->graph_buffer = add_object(w, (qe_object){.kind = QE_OBJECT_BUFFER, .bytes = 32}, "graph_buffer", 0);
    for (uint32_t l = 0; l < w->layers; l++) add_layer(w, l);
}

static uint32_t put(small *w, qe_item item, const char *label, const qe_effect *effects, uint32_t count) {
    entry e = {.item = item};
    if (label != NULL) MUST(qe_program_add_label(&w->s->program, label, &e.item.label, NULL) == QE_OK);
    e.item.effect_count = (uint8_t)count;
    e.source = w->s->right.count;
    if (count > 0) memcpy(e.effects, effects, count * sizeof *effects);
    MUST(e.source < ITEMS_MAX);
    sequence_insert(&w->s->right, e.source, &e);
    return e.source;
}

static void merge(uint64_t *into, const uint64_t *from) {
    for (int i = 0; i < WORDS; i++) into[i] |= from[i];
}

static void put_plain(small *w, qe_item_kind kind, uint32_t stream, uint32_t event) {
    put(w, (qe_item){.kind = (uint8_t)kind, .stream = stream, .event = event, .microbatch = QE_NONE}, NULL, NULL, 0);
}

/* From here on `to` comes behind what `from` was given. */
static void put_edge(small *w, uint32_t from, uint32_t to) {
    uint32_t event = dice_below(w->d, EVENTS), way = dice_below(w->d, 20);
    if (from == ON_HOST) return; /* whatever its host did is known to everybody */
    if (to == ON_HOST || way == 0) {
        put_plain(w, QE_ITEM_SYNC_STREAM, from, 0);
        merge(w->host, w->known[from]);
    } else if (way == 1) {
        put_plain(w, QE_ITEM_SYNC_DEVICE, 0, 0);
        for (int s = 0; s < STREAMS; s++) merge(w->host, w->known[s]);
    } else {
        put_plain(w, QE_ITEM_RECORD, from, event);
        merge(w->known[from], w->host);
        put_plain(w, way == 2 ? QE_ITEM_SYNC_EVENT : QE_ITEM_WAIT, way == 2 ? 0 : to, event);
        merge(way == 2 ? w->host : w->known[to], w->known[from]);
    }
}

static int needs_edge(const small *w, uint32_t stream, const qe_effect *effects, uint32_t count, uint32_t earlier) {
    const entry *other = &w->s->right.entries[earlier];
    uint64_t bits = (w->known[stream][earlier / 64] | w->host[earlier / 64]) >> (earlier % 64);
    if (other->item.kind != QE_ITEM_OP || other->item.stream == stream || (bits & 1)) return 0;
    for (uint32_t i = 0; i < other->item.effect_count; i++)
        for (uint32_t k = 0; k < count; k++)
            if (effects_conflict(&other->effects[i], &effects[k])) return 1;
    return 0;
}

static void put_op(small *w, uint32_t stream, uint32_t microbatch, const char *label, const qe_effect *effects,
                   uint32_t count) {
    for (uint32_t i = w->s->right.count; i > 0; i--)
        if (needs_edge(w, stream, effects, count, i - 1)) put_edge(w, w->s->right.entries[i - 1].item.stream, stream);
    if (dice_one_in(w->d, 12)) put_edge(w, dice_below(w->d, ON_HOST), stream); /* nobody needs it */
    qe_item item = {.kind = QE_ITEM_OP, .stream = stream, .microbatch = microbatch};
    merge(w->known[stream], w->host);
    uint32_t at = put(w, item, label, effects, count);
    w->known[stream][at / 64] |= (uint64_t)1 << (at % 64);
    if (stream == ON_HOST) merge(w->host, w->known[stream]);
}

static uint32_t any_stream(small *w) {
    static const uint8_t likely[] = {ON_COMPUTE, ON_COMPUTE, ON_COMPUTE, ON_COMPUTE, ON_SIDE, ON_SEND, ON_CALLER};
    return dice_one_in(w->d, 40) ? ON_HOST : likely[dice_below(w->d, sizeof likely)];
}

static qe_effect versioned(qe_effect_kind kind, uint32_t object, uint64_t version) {
    return (qe_effect){.kind = (uint8_t)kind, .object = object, .version = version};
}
static qe_effect owned(small *w, qe_effect_kind kind, uint32_t slot, uint32_t l, uint32_t m, int write) {
    return (qe_effect){.kind = (uint8_t)kind, .object = slot, .version = w->generation[slot], .stage = (uint16_t)l,
                       .microbatch = m, .write = write != 0};
}
static qe_effect cached(const layer *l, qe_effect_kind kind, uint8_t layouts) {
    return (qe_effect){.kind = (uint8_t)kind, .object = l->cache, .layouts = layouts, .recipe = l->recipe};
}
static qe_effect bytes(qe_effect_kind kind, uint32_t buffer, uint64_t begin, uint64_t end, uint64_t version) {
    return (qe_effect){.kind = (uint8_t)kind, .object = buffer, .begin = begin, .end = end, .version = version};
}

/* A free slot of a pool, or 0. */
static int take_slot(small *w, const uint32_t *pool, uint32_t count, uint32_t *held) {
    uint32_t first = dice_below(w->d, count);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = pool[(first + i) % count];
        if (w->busy[slot]) continue;
        w->busy[slot] = 1;
        w->generation[slot]++;
        *held = slot;
        return 1;
    }
    return 0;
}

static int forward(small *w, uint32_t m) {
    for (uint32_t i = 0; i < w->layers; i++) {
        uint32_t free_slots = 0;
        for (uint32_t k = 0; k < w->layer[i].pool; k++) free_slots += !w->busy[w->layer[i].slot_x[k]];
        if (free_slots == 0) return 0;
    }
    for (uint32_t i = 0; i < w->layers; i++) {
        layer *l = &w->layer[i];
        MUST(take_slot(w, l->slot_x, l->pool, &l->held_x[m]));
        uint32_t x = l->held_x[m];
        qe_effect effects[] = {versioned(QE_EFFECT_WEIGHT_READ, l->gain, 0), cached(l, QE_EFFECT_CACHE_USE, 1),
                               versioned(QE_EFFECT_SCALE_USE, l->scale_x, 0),
                               versioned(QE_EFFECT_SCALE_RECORD, l->scale_x, 0),
                               owned(w, QE_EFFECT_SLOT_ACQUIRE, x, i, m, 0),
                               owned(w, QE_EFFECT_SLOT_BORROW, x, i, m, 1),
                               bytes(QE_EFFECT_BUFFER_WRITE, w->work, 0, WORK_BYTES / 2, 0),
                               bytes(QE_EFFECT_BUFFER_READ, w->in, m * IN_BYTES, (m + 1) * IN_BYTES, 1)};
        put_op(w, any_stream(w), m, "forward", effects, sizeof effects / sizeof *effects - (i > 0));
    }
    return 1;
}

static int backward(small *w, uint32_t m) {
    for (uint32_t i = 0; i < w->layers; i++) {
        uint32_t free_slots = 0;
        for (uint32_t k = 0; k < w->layer[i].pool; k++) free_slots += !w->busy[w->layer[i].slot_y[k]];
        if (free_slots == 0) return 0;
    }
    for (uint32_t i = w->layers; i-- > 0;) {
        layer *l = &w->layer[i];
        MUST(take_slot(w, l->slot_y, l->pool, &l->held_y[m]));
        uint32_t x = l->held_x[m], y = l->held_y[m];
        qe_effect effects[] = {owned(w, QE_EFFECT_SLOT_ACQUIRE, y, i, m, 0),
                               owned(w, QE_EFFECT_SLOT_BORROW, x, i, m, 0),
                               cached(l, QE_EFFECT_CACHE_USE, 2), owned(w, QE_EFFECT_SLOT_BORROW, y, i, m, 1),
                               bytes(QE_EFFECT_BUFFER_WRITE, w->work, WORK_BYTES / 4, WORK_BYTES, 0)};
        put_op(w, any_stream(w), m, "input_grad", effects, sizeof effects / sizeof *effects);
    }
    return 1;
}

static int weight_grads(small *w, uint32_t m) {
    for (uint32_t i = w->layers; i-- > 0;) {
        layer *l = &w->layer[i];
        uint32_t x = l->held_x[m], y = l->held_y[m], count = 0;
        int first = count_effects(&w->s->right, l->grad, QE_EFFECT_GRAD_DEPOSIT) == 0;
        qe_effect effects[8];
        effects[count++] = owned(w, QE_EFFECT_SLOT_BORROW, x, i, m, 0);
        effects[count++] = owned(w, QE_EFFECT_SLOT_BORROW, y, i, m, 0);
        for (uint16_t use = 0; use < l->uses; use++)
            effects[count++] = (qe_effect){.kind = QE_EFFECT_GRAD_DEPOSIT, .object = l->grad, .microbatch = m,
                                           .use = use, .write = first && use == 0};
        effects[count++] = owned(w, QE_EFFECT_SLOT_RELEASE, x, i, m, 0);
        effects[count++] = owned(w, QE_EFFECT_SLOT_RELEASE, y, i, m, 0);
        if (i == 0) effects[count++] = bytes(QE_EFFECT_BUFFER_WRITE, w->out, m * OUT_BYTES, (m + 1) * OUT_BYTES, 0);
        put_op(w, any_stream(w), m, "weight_grad", effects, count);
        w->busy[x] = w->busy[y] = 0;
    }
    return 1;
}

static void microbatches(small *w) {
    static int (*const phases[])(small *, uint32_t) = {forward, backward, weight_grads};
    for (uint32_t left = 3 * w->microbatches; left > 0;) {
        uint32_t m = dice_below(w->d, w->microbatches);
        if (w->done[m] == 3 || !phases[w->done[m]](w, m)) continue;
        w->done[m]++;
        left--;
    }
}

static void fills(small *w) {
    for (uint32_t i = 0; i < w->layers; i++) {
        const layer *l = &w->layer[i];
        qe_effect effects[] = {versioned(QE_EFFECT_WEIGHT_READ, l->weight, 0), cached(l, QE_EFFECT_CACHE_FILL, 3),
                               versioned(QE_EFFECT_SCALE_USE, l->scale_w, 0),
                               versioned(QE_EFFECT_SCALE_RECORD, l->scale_w, 0)};
        put_op(w, any_stream(w), QE_NONE, "fill", effects, sizeof effects / sizeof *effects);
    }
}

static void optimizer(small *w) {
    for (uint32_t i = 0; i < w->layers; i++) {
        const layer *l = &w->layer[i];
        put_op(w, any_stream(w), QE_NONE, "grad_norm", &(qe_effect){.kind = QE_EFFECT_GRAD_TAKE, .object = l->grad}, 1);
        qe_effect commits[] = {versioned(QE_EFFECT_WEIGHT_COMMIT, l->weight, 0),
                               versioned(QE_EFFECT_WEIGHT_COMMIT, l->gain, 0)};
        put_op(w, any_stream(w), QE_NONE, "adamw", commits, 2);
        qe_effect folds[] = {versioned(QE_EFFECT_SCALE_FOLD, l->scale_x, 0),
                             versioned(QE_EFFECT_SCALE_FOLD, l->scale_w, 0)};
        put_op(w, any_stream(w), QE_NONE, "fold", folds, 2);
    }
}

/* Captured and launched in every step: recorded on one stream, memory of its own. */
static void graph(small *w) {
    static const uint16_t frozen[] = {QE_FROZEN_NOTHING, QE_FROZEN_MODE, QE_FROZEN_ADDRESS, QE_FROZEN_CONSTANT};
    qe_effect begin = versioned(QE_EFFECT_GRAPH_BEGIN, w->graph, 0);
    qe_effect write = bytes(QE_EFFECT_BUFFER_WRITE, w->graph_buffer, 0, 32, 0);
    qe_effect capture = versioned(QE_EFFECT_GRAPH_CAPTURE, w->graph, 1);
    qe_effect launch = versioned(QE_EFFECT_GRAPH_LAUNCH, w->graph, 1);
    qe_item on_compute = {.kind = QE_ITEM_OP, .stream = ON_COMPUTE, .microbatch = QE_NONE};
    launch.use = frozen[dice_below(w->d, 4)];
    launch.begin = launch.end = launch.use == QE_FROZEN_NOTHING ? 0 : 1 + dice_below(w->d, 99);
    put(w, on_compute, "begin", &begin, 1);
    put(w, on_compute, "recorded", &write, 1);
    put(w, on_compute, "capture", &capture, 1);
    put(w, on_compute, "launch", &launch, 1);
}

void generate_small(step *s, dice *d) {
    small *w = calloc(1, sizeof *w);
    MUST(w != NULL);
    step_init(s);
    *w = (small){.s = s, .d = d, .layers = 1 + dice_below(d, LAYERS_MAX)};
    w->microbatches = 1 + dice_below(d, MICROBATCHES_MAX);
    add_world(w);
    int captures = dice_one_in(d, 2);
    qe_effect load = bytes(QE_EFFECT_BUFFER_WRITE, w->in, 0, w->microbatches * IN_BYTES, 0);
    qe_effect look = bytes(QE_EFFECT_BUFFER_READ, w->out, 0, w->microbatches * OUT_BYTES, 1);
    put_op(w, ON_CALLER, QE_NONE, "load", &load, 1);
    fills(w);
    if (captures) graph(w);
    microbatches(w);
    optimizer(w);
    put_op(w, ON_CALLER, QE_NONE, "read", &look, 1);
    if (dice_one_in(d, 2)) put_op(w, ON_HOST, QE_NONE, "look", &look, 1);
    snprintf(s->name, sizeof s->name, "small L%u M%u%s", w->layers, w->microbatches, captures ? " graph" : "");
    step_shuffle(s, d, dice_below(d, 2 * s->right.count));
    step_seal(s);
    free(w);
}
