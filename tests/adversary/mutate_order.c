/* mutate_order.c - an edge is missing, comes too late, or is another one; work is given to another stream; somebody
 * looks who does not wait. Whether that matters is for precedence.c to say: where everything stays ordered by other
 * edges, the mutant is equivalent. */
#include <string.h>

#include "adversary/adversary.h"

static uint32_t other_stream(mutant *m, uint32_t stream) {
    uint32_t count = m->step->program.stream_count;
    return count < 2 ? stream : (stream + 1 + dice_below(m->dice, count - 1)) % count;
}

static int drop_item(mutant *m, qe_item_kind kind) {
    uint32_t at;
    if (!pick_item(m, kind, &at)) return 0;
    sequence_remove(&m->list, at);
    return 1;
}
static int drop_wait(mutant *m) { return drop_item(m, QE_ITEM_WAIT); }
static int drop_record(mutant *m) { return drop_item(m, QE_ITEM_RECORD); }
static int drop_sync(mutant *m) {
    static const qe_item_kind kinds[] = {QE_ITEM_SYNC_EVENT, QE_ITEM_SYNC_STREAM, QE_ITEM_SYNC_DEVICE};
    return drop_item(m, kinds[dice_below(m->dice, 3)]);
}

/* The wait stands behind the op that needs it. */
static int wait_late(mutant *m) {
    uint32_t at;
    if (!pick_item(m, QE_ITEM_WAIT, &at)) return 0;
    uint32_t stream = m->list.entries[at].item.stream;
    for (uint32_t to = at + 1; to < m->list.count; to++) {
        const qe_item *item = &m->list.entries[to].item;
        if (item->kind != QE_ITEM_OP || item->stream != stream) continue;
        sequence_move(&m->list, at, to);
        return 1;
    }
    return 0;
}

/* The record stands before the op that it is to cover. */
static int record_early(mutant *m) {
    uint32_t at;
    if (!pick_item(m, QE_ITEM_RECORD, &at)) return 0;
    uint32_t stream = m->list.entries[at].item.stream;
    for (uint32_t to = at; to-- > 0;) {
        const qe_item *item = &m->list.entries[to].item;
        if (item->kind != QE_ITEM_OP || item->stream != stream) continue;
        sequence_move(&m->list, at, to);
        return 1;
    }
    return 0;
}

static int other_event(mutant *m) {
    uint32_t at;
    if (m->step->program.event_count < 2) return 0;
    if (!pick_item(m, dice_one_in(m->dice, 2) ? QE_ITEM_WAIT : QE_ITEM_RECORD, &at)) return 0;
    uint32_t *event = &m->list.entries[at].item.event;
    *event = (*event + 1 + dice_below(m->dice, m->step->program.event_count - 1)) % m->step->program.event_count;
    m->list.entries[at].changed = 1;
    return 1;
}

static int on_another_stream(mutant *m, qe_item_kind kind) {
    uint32_t at;
    if (!pick_item(m, kind, &at)) return 0;
    const entry *e = &m->step->right.entries[at];
    for (uint32_t k = 0; k < e->item.effect_count; k++)
        if (effect_is(&e->effects[k], QE_OBJECT_GRAPH)) return 0; /* what is recorded moves with it: another fault */
    m->list.entries[at].item.stream = other_stream(m, e->item.stream);
    m->list.entries[at].changed = 1;
    return m->list.entries[at].item.stream != e->item.stream;
}
static int wait_on_another_stream(mutant *m) { return on_another_stream(m, QE_ITEM_WAIT); }
static int record_on_another_stream(mutant *m) { return on_another_stream(m, QE_ITEM_RECORD); }

/* A recorded op is part of its graph through its stream. */
static int op_on_another_stream(mutant *m) {
    for (uint32_t i = 0; i < m->list.count; i++)
        for (uint32_t k = 0; k < m->list.entries[i].item.effect_count; k++)
            if (m->list.entries[i].effects[k].kind == QE_EFFECT_GRAPH_BEGIN) return 0;
    return on_another_stream(m, QE_ITEM_OP);
}

static int destroyed(mutant *m) {
    uint32_t at;
    if (!pick_item(m, QE_ITEM_WAIT, &at)) return 0;
    entry e = m->step->right.entries[at];
    e.item.kind = QE_ITEM_DESTROY;
    e.source = QE_NONE;
    sequence_insert(&m->list, at, &e);
    return 1;
}

/* Bytes that somebody else touched before, by the host or by the caller. */
static int looks(mutant *m, qe_stream_role role) {
    place at;
    const qe_program *p = &m->step->program;
    uint32_t stream = 0;
    while (stream < p->stream_count && p->streams[stream].role != role) stream++;
    if (stream == p->stream_count) return 0;
    if (!pick_effect(m, dice_one_in(m->dice, 2) ? QE_EFFECT_BUFFER_READ : QE_EFFECT_BUFFER_WRITE, &at)) return 0;
    qe_effect effect = *effect_at(&m->step->right, at);
    effect.kind = dice_one_in(m->dice, 2) ? QE_EFFECT_BUFFER_READ : QE_EFFECT_BUFFER_WRITE;
    effect.version = 0;
    uint32_t to = at.entry + 1 + dice_below(m->dice, m->list.count - at.entry);
    insert_effect(m, to, at, &effect);
    m->list.entries[to].item.stream = stream;
    return 1;
}
static int host_looks(mutant *m) { return looks(m, QE_STREAM_HOST); }
static int caller_looks(mutant *m) { return looks(m, QE_STREAM_CALLER); }

const fault_operator order_operators[] = {
    {"wait dropped", FAULT_EDGE, drop_wait, 0},
    {"wait dropped", FAULT_EDGE, drop_wait, 0}, /* twice: the fault that is seen most */
    {"record dropped", FAULT_EDGE, drop_record, 0},
    {"sync dropped", FAULT_EDGE, drop_sync, 0},
    {"wait behind the op that needs it", FAULT_LATE, wait_late, 0},
    {"record before the op that it covers", FAULT_EARLY, record_early, 0},
    {"another event", FAULT_EDGE, other_event, 0},
    {"wait on another stream", FAULT_STREAM, wait_on_another_stream, 0},
    {"record on another stream", FAULT_STREAM, record_on_another_stream, 0},
    {"op on another stream", FAULT_STREAM, op_on_another_stream, 0},
    {"event destroyed", FAULT_EDGE, destroyed, 1},
    {"the host looks", FAULT_HOST, host_looks, 0},
    {"the caller looks", FAULT_HOST, caller_looks, 0},
};
const uint32_t order_operator_count = sizeof order_operators / sizeof *order_operators;
