/* mutate_memory.c - faults of what only traces hold: memory that is handed out again, random draws; and of recordings.
 * Of memory precedence.c has every byte; draws and recordings are said here. */
#include <string.h>

#include "adversary/adversary.h"

#define SET(a) bit_of(QE_EFFECT_##a)

/* ---- memory ---- */

static int is_memory(const mutant *m) { return m->step->single; }

/* An op of a trace of memory; draws are apart. */
static int pick_op(mutant *m, uint32_t *at) {
    return is_memory(m) && pick_item(m, QE_ITEM_OP, at) &&
           m->list.entries[*at].effects[0].kind != QE_EFFECT_RNG_DRAW;
}

static int op_dropped(mutant *m) {
    uint32_t at;
    if (!pick_op(m, &at)) return 0;
    sequence_remove(&m->list, at);
    return 1;
}

static int op_duplicated(mutant *m) {
    uint32_t at;
    if (!pick_op(m, &at)) return 0;
    entry e = m->list.entries[at];
    sequence_insert(&m->list, at + 1 + dice_below(m->dice, m->list.count - at), &e);
    return 1;
}

static int op_moved(mutant *m) {
    uint32_t at;
    if (!pick_op(m, &at)) return 0;
    uint32_t to = dice_below(m->dice, m->list.count);
    if (to == at) return 0;
    m->kind = to < at ? FAULT_EARLY : FAULT_LATE;
    sequence_move(&m->list, at, to);
    return 1;
}

static int other_buffer(mutant *m) {
    uint32_t at;
    if (!pick_op(m, &at)) return 0;
    qe_effect *effect = &m->list.entries[at].effects[0];
    uint32_t object = dice_below(m->dice, m->step->program.object_count);
    if (m->step->program.objects[object].kind != QE_OBJECT_BUFFER || object == effect->object) return 0;
    effect->object = object;
    effect->end = m->step->program.objects[object].bytes;
    effect->begin = 0;
    return 1;
}

/* ---- draws ---- */

static int pick_draw(mutant *m, int again, place *at) {
    return pick_effect(m, QE_EFFECT_RNG_DRAW, at) && effect_at(&m->list, *at)->write == again;
}

static int draw_moved(mutant *m) {
    place at;
    if (!pick_draw(m, 0, &at)) return 0;
    effect_at(&m->list, at)->version += dice_one_in(m->dice, 2) ? 1 : (uint64_t)0 - 1;
    return predict(m, at.entry, bit_of(QE_RULE_RNG_FROZEN));
}

/* Draws of a trace have offsets of their own, so no other one can be meant. */
static int draw_split(mutant *m) {
    place at;
    if (!pick_draw(m, 1, &at)) return 0;
    qe_effect *effect = effect_at(&m->list, at);
    switch (dice_below(m->dice, 3)) {
    case 0: effect->end++; break;
    case 1: effect->microbatch += 3; break; /* a trace has microbatches 0, 1, 2 */
    default: effect->version += 1000;
    }
    return predict(m, at.entry, bit_of(QE_RULE_RNG_SPLIT));
}

/* The next draw begins where this one would have; unless what it drew is wanted again before. */
static int draw_dropped(mutant *m) {
    place at, next;
    if (!pick_draw(m, 0, &at)) return 0;
    qe_effect dropped = *effect_at(&m->list, at);
    sequence_drop_effect(&m->list, at.entry, at.effect);
    for (next = at; find_next(&m->step->right, next, dropped.object, SET(RNG_DRAW), &next);) {
        const qe_effect *effect = effect_at(&m->step->right, next);
        if (!effect->write) return predict(m, next.entry, bit_of(QE_RULE_RNG_FROZEN));
        if (effect->version == dropped.version) return predict(m, next.entry, bit_of(QE_RULE_RNG_SPLIT));
    }
    return predict(m, NOWHERE, 0);
}

static int draw_again(mutant *m) {
    place at;
    if (!pick_draw(m, 0, &at)) return 0;
    insert_effect(m, at.entry + 1, at, effect_at(&m->step->right, at));
    return predict(m, at.entry + 1, bit_of(QE_RULE_RNG_FROZEN));
}

static int draw_for_another(mutant *m) {
    place at, next;
    if (!pick_draw(m, 0, &at)) return 0;
    qe_effect *effect = effect_at(&m->list, at);
    effect->microbatch += 3;
    for (next = at; find_next(&m->step->right, next, effect->object, SET(RNG_DRAW), &next);) {
        const qe_effect *other = effect_at(&m->step->right, next);
        if (other->write && other->version == effect->version)
            return predict(m, next.entry, bit_of(QE_RULE_RNG_SPLIT));
    }
    return predict(m, NOWHERE, 0);
}

/* ---- recordings ---- */

typedef struct recording {
    place begin, capture;
    uint32_t stream, other; /* one that does not take part */
} recording;

static int pick_recording(mutant *m, recording *r) {
    const qe_program *p = &m->step->program;
    if (!pick_effect(m, QE_EFFECT_GRAPH_CAPTURE, &r->capture)) return 0;
    uint32_t graph = effect_at(&m->list, r->capture)->object;
    if (!find_previous(&m->list, r->capture, graph, SET(GRAPH_BEGIN), &r->begin)) return 0;
    r->stream = m->list.entries[r->capture.entry].item.stream;
    r->other = (r->stream + 1 + dice_below(m->dice, p->stream_count - 1)) % p->stream_count;
    return p->streams[r->other].role == QE_STREAM_COMM || p->streams[r->other].role == QE_STREAM_COMPUTE;
}

/* An event that nobody waits for from `at` on before it is recorded again. */
static int free_event(const mutant *m, uint32_t at, uint32_t but, uint32_t *event_out) {
    for (uint32_t event = 0; event < m->step->program.event_count; event++) {
        uint32_t i = at;
        for (; i < m->list.count; i++) {
            const qe_item *item = &m->list.entries[i].item;
            if (item->kind >= QE_ITEM_RECORD && item->kind <= QE_ITEM_SYNC_EVENT && item->event == event) break;
        }
        *event_out = event;
        if (event != but && (i == m->list.count || m->list.entries[i].item.kind == QE_ITEM_RECORD)) return 1;
    }
    return 0;
}

static void put_plain(mutant *m, uint32_t at, qe_item_kind kind, uint32_t stream, uint32_t event) {
    entry e = {.item = {.kind = (uint8_t)kind, .stream = stream, .event = event, .microbatch = QE_NONE},
               .source = QE_NONE, .changed = 1};
    sequence_insert(&m->list, at, &e);
}

static void put_op(mutant *m, uint32_t at, uint32_t like, uint32_t stream, const qe_effect *effect) {
    entry e = m->step->right.entries[like];
    e.source = QE_NONE;
    e.changed = 1;
    e.item.stream = stream;
    e.item.effect_count = effect != NULL;
    if (effect != NULL) e.effects[0] = *effect;
    sequence_insert(&m->list, at, &e);
}

static uint32_t within(mutant *m, const recording *r) {
    return r->begin.entry + 1 + dice_below(m->dice, r->capture.entry - r->begin.entry);
}

static int waits_for_outside(mutant *m) {
    recording r;
    if (!pick_recording(m, &r)) return 0;
    for (uint32_t i = 0; i < r.begin.entry; i++) {
        const qe_item *item = &m->step->right.entries[i].item;
        if (item->kind != QE_ITEM_RECORD || dice_one_in(m->dice, 3)) continue;
        uint32_t at = within(m, &r);
        put_plain(m, at, QE_ITEM_WAIT, r.stream, item->event);
        return predict(m, at, bit_of(QE_RULE_SYNC_CAPTURE));
    }
    return 0;
}

static int host_waits_for_recording(mutant *m) {
    recording r;
    if (!pick_recording(m, &r)) return 0;
    uint32_t at = within(m, &r);
    put_plain(m, at, dice_one_in(m->dice, 2) ? QE_ITEM_SYNC_STREAM : QE_ITEM_SYNC_DEVICE, r.stream, 0);
    return predict(m, at, bit_of(QE_RULE_SYNC_CAPTURE));
}

static int waits_for_recorded(mutant *m) {
    recording r;
    uint32_t event;
    if (!pick_recording(m, &r) || !free_event(m, r.capture.entry, QE_NONE, &event)) return 0;
    put_plain(m, r.capture.entry, QE_ITEM_RECORD, r.stream, event);
    put_plain(m, r.capture.entry + 2, QE_ITEM_WAIT, r.other, event);
    return predict(m, r.capture.entry + 2, bit_of(QE_RULE_SYNC_CAPTURE));
}

/* Leaves: another stream joins, works, and comes back or not. */
static int leaves(mutant *m, int comes_back) {
    recording r;
    uint32_t fork, join, at;
    if (!pick_recording(m, &r) || !free_event(m, r.capture.entry, QE_NONE, &fork)) return 0;
    if (!free_event(m, r.capture.entry, fork, &join)) return 0;
    at = r.capture.entry;
    put_plain(m, at, QE_ITEM_RECORD, r.stream, fork);
    put_plain(m, at + 1, QE_ITEM_WAIT, r.other, fork);
    put_op(m, at + 2, r.capture.entry, r.other, NULL);
    if (!comes_back) return predict(m, at + 3, bit_of(QE_RULE_GRAPH_UNJOINED));
    put_plain(m, at + 3, QE_ITEM_RECORD, r.other, join);
    put_plain(m, at + 4, QE_ITEM_WAIT, r.stream, join);
    return predict(m, NOWHERE, 0);
}
static int leaves_for_good(mutant *m) { return leaves(m, 0); }
static int leaves_and_returns(mutant *m) { return leaves(m, 1); }

/* Two branches of one recording write the same bytes. */
static int branches_race(mutant *m) {
    recording r;
    place write;
    uint32_t fork;
    if (!pick_recording(m, &r)) return 0;
    for (write = (place){r.begin.entry + 1, 0}; write.entry < r.capture.entry; write.entry++) {
        const entry *e = &m->step->right.entries[write.entry];
        if (e->item.stream == r.stream && e->item.effect_count == 1 && e->effects[0].kind == QE_EFFECT_BUFFER_WRITE)
            break;
    }
    if (write.entry == r.capture.entry || !free_event(m, write.entry, QE_NONE, &fork)) return 0;
    qe_effect effect = *effect_at(&m->step->right, write);
    put_plain(m, write.entry, QE_ITEM_RECORD, r.stream, fork);
    put_plain(m, write.entry + 1, QE_ITEM_WAIT, r.other, fork);
    put_op(m, write.entry + 2, write.entry, r.other, &effect);
    return predict(m, write.entry + 3, bit_of(QE_RULE_SYNC_SIDE));
}

const fault_operator memory_operators[] = {
    {"work on memory dropped", FAULT_DROP, op_dropped, 1},
    {"work on memory duplicated", FAULT_DUPLICATE, op_duplicated, 1},
    {"work on memory moved", FAULT_EARLY, op_moved, 1},
    {"work on another buffer", FAULT_OWNER, other_buffer, 1},
    {"draw from elsewhere", FAULT_STALE, draw_moved, 1},
    {"draw again that is not the same", FAULT_STALE, draw_split, 1},
    {"draw dropped", FAULT_DROP, draw_dropped, 1},
    {"draw duplicated", FAULT_DUPLICATE, draw_again, 1},
    {"draw for another microbatch", FAULT_OWNER, draw_for_another, 1},
    {"recording waits for what is outside", FAULT_RECORDING, waits_for_outside, 0},
    {"the host waits for a recording", FAULT_RECORDING, host_waits_for_recording, 0},
    {"outside waits for what is recorded", FAULT_RECORDING, waits_for_recorded, 0},
    {"a stream leaves a recording for good", FAULT_RECORDING, leaves_for_good, 1},
    {"a stream leaves a recording and returns", FAULT_HARMLESS, leaves_and_returns, 0},
    {"two branches of a recording race", FAULT_RECORDING, branches_race, 1},
    {"recording waits for what is outside", FAULT_RECORDING, waits_for_outside, 0}, /* twice: they fit seldom */
    {"two branches of a recording race", FAULT_RECORDING, branches_race, 1},
};
const uint32_t memory_operator_count = sizeof memory_operators / sizeof *memory_operators;
