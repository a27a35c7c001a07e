/* run.c - runs a schedule in thought, under a transport, until nothing moves. One cursor per rank and one byte per
 * (stage, microbatch): rows are looked at, never copied, so that a stream of any length runs in little memory.
 *
 * Everything here only ever makes more possible (a result stays there, a buffer is freed once and for all), so the
 * order in which ranks are advanced does not matter: what stops, stops in every real run too. docs/schedules.md states
 * the rules of each transport. */
#include "schedule/run.h"

#include <stdlib.h>

#include "base/assert.h"

static void list_rank(qe_run *run, uint32_t rank) {
    if (run->listed[rank]) return;
    run->listed[rank] = 1;
    run->ready[run->ready_count++] = rank;
}

static uint8_t *pair_of(const qe_run *run, uint32_t stage, uint32_t microbatch) {
    return &run->did[(size_t)stage * run->source->microbatches + microbatch];
}

/* ---- units ---- */

static void load_unit(qe_run *run, uint32_t rank) {
    qe_run_rank *at = &run->rank[rank];
    at->unit_count = 0;
    if (at->next == qe_source_row_count(run->source, rank)) return;
    at->unit[0] = qe_source_at(run->source, rank, at->next);
    at->unit_count = qe_source_unit_count(run->source, rank, at->next, &at->unit[0]);
    if (at->unit_count == 2) at->unit[1] = qe_source_at(run->source, rank, at->next + 1);
}

static int input_there(const qe_run *run, uint32_t rank, const qe_action *action) {
    uint32_t producer = qe_source_producer(run->source, action);
    if (producer == QE_NONE) return 1;
    qe_lane lane = qe_action_lane(action);
    int by_message = !run->direct && qe_source_receives(run->source, rank, action);
    return (*pair_of(run, producer, action->microbatch) & (by_message ? qe_did_arrive(lane) : qe_did_run(lane))) != 0;
}

/* What the second of a pair needs of its own stage; of every other action the row has shown it to be there. */
static int own_there(const qe_run *run, const qe_action *action) {
    if (action->kind == QE_ACTION_F) return 1;
    qe_lane lane = action->kind == QE_ACTION_W ? QE_LANE_B : QE_LANE_F;
    return (*pair_of(run, action->stage, action->microbatch) & qe_did_run(lane)) != 0;
}

static int can_run(const qe_run *run, uint32_t rank) {
    const qe_run_rank *at = &run->rank[rank];
    if (at->unit_count == 0 || at->due != 0 || !input_there(run, rank, &at->unit[0])) return 0;
    return at->unit_count == 1 || (input_there(run, rank, &at->unit[1]) && own_there(run, &at->unit[1]));
}

/* The message it came by is used up: its buffer is free. */
static void use_message(qe_run *run, uint32_t rank, const qe_action *action) {
    if (!qe_source_receives(run->source, rank, action)) return;
    qe_edge *edge = &run->edge[qe_run_edge_in(run, action)];
    edge->used++;
    list_rank(run, edge->from);
}

/* Does the rank stand before the action that uses the result of `action`? */
static int stands_before_use(const qe_run *run, uint32_t rank, const qe_action *action) {
    const qe_run_rank *at = &run->rank[rank];
    for (uint32_t i = 0; i < at->unit_count; i++) {
        if (at->unit[i].microbatch != action->microbatch || at->unit[i].kind == QE_ACTION_W) continue;
        if (qe_action_lane(&at->unit[i]) != qe_action_lane(action)) continue;
        if (qe_source_producer(run->source, &at->unit[i]) == action->stage) return 1;
    }
    return 0;
}

static void run_action(qe_run *run, uint32_t rank, const qe_action *action) {
    if (action->kind == QE_ACTION_W) return;
    *pair_of(run, action->stage, action->microbatch) |= qe_did_run(qe_action_lane(action));
    if (run->transport.capacity > 0) use_message(run, rank, action);
    uint32_t to = qe_source_to(run->source, action);
    if (to != QE_NONE && to != rank && stands_before_use(run, to, action)) list_rank(run, to);
}

static int run_unit(qe_run *run, uint32_t rank) {
    qe_run_rank *at = &run->rank[rank];
    if (!can_run(run, rank)) return 0;
    at->last_count = at->unit_count;
    for (uint8_t i = 0; i < at->last_count; i++) {
        at->last[i] = at->unit[i];
        run_action(run, rank, &at->last[i]);
        int leaves = run->transport.sends == QE_SENDS_BATCHED && qe_run_edge(run, &at->last[i]) != QE_NONE;
        if (leaves) at->due = (uint8_t)(at->due | 1U << i);
    }
    at->next += at->last_count;
    load_unit(run, rank);
    return 1;
}

/* ---- messages ---- */

static int has_room(const qe_run *run, const qe_edge *edge) {
    return edge->sent - edge->used < run->transport.capacity;
}

/* Single sends, an edge each: in the sender's order, into the edge's buffers. */
static void pass_edge(qe_run *run, uint32_t rank, uint32_t edge_index) {
    qe_edge *edge = &run->edge[edge_index];
    for (; edge->at < run->rank[rank].next; edge->at++) {
        qe_action action = qe_source_at(run->source, rank, edge->at);
        if (qe_run_edge(run, &action) != edge_index) continue;
        if (!has_room(run, edge)) return;
        qe_lane lane = qe_action_lane(&action);
        *pair_of(run, action.stage, action.microbatch) |= (uint8_t)(qe_did_send(lane) | qe_did_arrive(lane));
        edge->sent++;
        list_rank(run, edge->to);
    }
}

qe_queue_op qe_run_queue_op(const qe_source *source, uint32_t rank, uint32_t number) {
    uint32_t begin = qe_source_unit_begin(source, rank, number / 2);
    qe_action first = qe_source_at(source, rank, begin);
    uint32_t count = qe_source_unit_count(source, rank, begin, &first), step = number - 2 * begin;
    return (qe_queue_op){.index = begin + step % count, .send = step >= count};
}

uint32_t qe_run_queue_number(const qe_source *source, uint32_t rank, uint32_t index, int send) {
    uint32_t begin = qe_source_unit_begin(source, rank, index);
    qe_action first = qe_source_at(source, rank, begin);
    return begin + index + (send ? qe_source_unit_count(source, rank, begin, &first) : 0);
}

static int crosses(const qe_run *run, uint32_t rank, const qe_action *action, int send) {
    return send ? qe_run_edge(run, action) != QE_NONE : qe_source_receives(run->source, rank, action);
}

/* Moves the head of a rank's queue to the next send or receive, from queue_next on. */
static void load_queue(qe_run *run, uint32_t rank) {
    qe_run_rank *at = &run->rank[rank];
    uint32_t numbers = 2 * qe_source_row_count(run->source, rank);
    for (; at->queue_next < numbers; at->queue_next++) {
        qe_queue_op op = qe_run_queue_op(run->source, rank, at->queue_next);
        at->queue_action = qe_source_at(run->source, rank, op.index);
        if (!crosses(run, rank, &at->queue_action, op.send)) continue;
        at->queue_index = op.index;
        at->queue_send = (uint8_t)op.send;
        return;
    }
    at->queue_index = QE_NONE;
}

static void step_queue(qe_run *run, uint32_t rank) {
    run->rank[rank].queue_next++;
    load_queue(run, rank);
}

/* Are the heads of two queues the two ends of one message, and has its action run? */
static int heads_meet(const qe_run *run, uint32_t sender, uint32_t receiver) {
    const qe_run_rank *from = &run->rank[sender], *to = &run->rank[receiver];
    if (from->queue_index == QE_NONE || to->queue_index == QE_NONE || !from->queue_send || to->queue_send) return 0;
    if (from->queue_action.microbatch != to->queue_action.microbatch || from->queue_index >= from->next) return 0;
    if (qe_action_lane(&from->queue_action) != qe_action_lane(&to->queue_action)) return 0;
    return qe_source_producer(run->source, &to->queue_action) == from->queue_action.stage;
}

/* One communicator, rendezvous: both heads leave their queues together. */
static int pass_meeting(qe_run *run, uint32_t rank) {
    const qe_run_rank *at = &run->rank[rank];
    uint32_t other = at->queue_send ? qe_source_to(run->source, &at->queue_action)
                                    : qe_source_from(run->source, &at->queue_action);
    uint32_t sender = at->queue_send ? rank : other, receiver = at->queue_send ? other : rank;
    if (!heads_meet(run, sender, receiver)) return 0;
    const qe_action *sent = &run->rank[sender].queue_action;
    qe_lane lane = qe_action_lane(sent);
    *pair_of(run, sent->stage, sent->microbatch) |= (uint8_t)(qe_did_send(lane) | qe_did_arrive(lane));
    step_queue(run, sender);
    step_queue(run, receiver);
    list_rank(run, other);
    return 1;
}

/* One communicator, buffered: a send leaves for a free buffer, a receive takes what was sent. */
static int pass_buffered(qe_run *run, uint32_t rank) {
    qe_run_rank *at = &run->rank[rank];
    qe_lane lane = qe_action_lane(&at->queue_action);
    if (at->queue_send) {
        qe_edge *edge = &run->edge[qe_run_edge(run, &at->queue_action)];
        if (at->queue_index >= at->next || !has_room(run, edge)) return 0;
        *pair_of(run, at->queue_action.stage, at->queue_action.microbatch) |= qe_did_send(lane);
        edge->sent++;
        list_rank(run, edge->to);
    } else {
        uint8_t *pair = pair_of(run, qe_source_producer(run->source, &at->queue_action), at->queue_action.microbatch);
        if ((*pair & qe_did_send(lane)) == 0) return 0;
        *pair |= qe_did_arrive(lane);
    }
    step_queue(run, rank);
    return 1;
}

static void pass_queue(qe_run *run, uint32_t rank) {
    while (run->rank[rank].queue_index != QE_NONE) {
        int passed = run->transport.capacity > 0 ? pass_buffered(run, rank) : pass_meeting(run, rank);
        if (!passed) return;
    }
}

/* Batches: the result of sender's last[i] leaves, if its receive is posted or a buffer is free. */
static int pass_due(qe_run *run, uint32_t sender, uint32_t i) {
    qe_run_rank *from = &run->rank[sender];
    const qe_action *action = &from->last[i];
    uint32_t to = qe_source_to(run->source, action);
    qe_edge *edge = &run->edge[qe_run_edge(run, action)];
    if (run->transport.capacity > 0 ? !has_room(run, edge) : !stands_before_use(run, to, action)) return 0;
    qe_lane lane = qe_action_lane(action);
    *pair_of(run, action->stage, action->microbatch) |= (uint8_t)(qe_did_send(lane) | qe_did_arrive(lane));
    edge->sent++;
    from->due = (uint8_t)(from->due & ~(1U << i));
    list_rank(run, to);
    return 1;
}

/* The send whose receive is posted with `action`, if it waits. */
static void pass_input(qe_run *run, const qe_action *action) {
    uint32_t producer = qe_source_producer(run->source, action);
    if (producer == QE_NONE) return;
    uint32_t sender = qe_source_from(run->source, action);
    const qe_run_rank *from = &run->rank[sender];
    for (uint32_t i = 0; i < from->last_count; i++) {
        if (!(from->due & 1U << i) || from->last[i].microbatch != action->microbatch) continue;
        if (from->last[i].stage != producer || qe_action_lane(&from->last[i]) != qe_action_lane(action)) continue;
        if (pass_due(run, sender, i)) list_rank(run, sender);
    }
}

static void pass_batch(qe_run *run, uint32_t rank) {
    qe_run_rank *at = &run->rank[rank];
    for (uint32_t i = 0; i < at->last_count; i++) {
        if (at->due & 1U << i) (void)pass_due(run, rank, i);
    }
    if (run->transport.capacity > 0) return; /* buffers are filled in the sender's order, whoever asks */
    for (uint32_t i = 0; i < at->unit_count; i++) pass_input(run, &at->unit[i]);
}

static void pass_messages(qe_run *run, uint32_t rank) {
    if (run->direct) return;
    if (run->transport.sends == QE_SENDS_BATCHED) pass_batch(run, rank);
    else if (run->transport.communicators == QE_COMMUNICATORS_ONE) pass_queue(run, rank);
    else for (uint32_t e = run->edge_begin[rank]; e < run->edge_begin[rank + 1]; e++) pass_edge(run, rank, e);
}

/* ---- all together ---- */

static int by_ranks(const void *left, const void *right) {
    const qe_edge *a = left, *b = right;
    if (a->from != b->from) return a->from < b->from ? -1 : 1;
    return a->to < b->to ? -1 : a->to > b->to;
}

/* The ranks at the ends of a stage's results in a flow; 0 where they stay on the rank or nobody needs them. */
static int ends_of(const qe_source *source, uint32_t flow, uint32_t stage, qe_edge *edge_out) {
    int turned = flow >= QE_LANES;
    if (turned ? source->reversed == 0 : source->reversed == source->microbatches) return 0;
    qe_action action = {.microbatch = turned ? source->microbatches - 1 : 0,
                        .stage = (uint16_t)stage,
                        .kind = flow % QE_LANES == QE_LANE_F ? QE_ACTION_F : QE_ACTION_I};
    *edge_out = (qe_edge){.from = qe_source_rank(source, stage, action.microbatch),
                          .to = qe_source_to(source, &action)};
    return edge_out->to != QE_NONE && edge_out->to != edge_out->from;
}

static void find_edges(qe_run *run) {
    const qe_source *source = run->source;
    uint32_t found = 0, kept = 0;
    for (uint32_t i = 0; i < QE_FLOWS * source->stages; i++) {
        found += (uint32_t)ends_of(source, i / source->stages, i % source->stages, &run->edge[found]);
    }
    qsort(run->edge, found, sizeof *run->edge, by_ranks);
    for (uint32_t i = 0; i < found; i++) {
        if (kept == 0 || by_ranks(&run->edge[kept - 1], &run->edge[i]) != 0) run->edge[kept++] = run->edge[i];
    }
    run->edge_count = kept;
    for (uint32_t rank = 0, e = 0; rank <= source->ranks; rank++) {
        while (e < kept && run->edge[e].from < rank) e++;
        run->edge_begin[rank] = e;
    }
    for (uint32_t i = 0; i < QE_FLOWS * source->stages; i++) {
        qe_edge ends;
        run->out_edge[i] = QE_NONE;
        if (!ends_of(source, i / source->stages, i % source->stages, &ends)) continue;
        const qe_edge *edge = bsearch(&ends, run->edge, kept, sizeof ends, by_ranks);
        QE_ASSERT(edge != NULL);
        run->out_edge[i] = (uint32_t)(edge - run->edge);
    }
}

static qe_status allocate(qe_run *run, qe_error *error_out) {
    size_t ranks = run->source->ranks, stages = run->source->stages, edges = QE_FLOWS * stages + 1;
    size_t pairs = stages * run->source->microbatches;
    /* The widest first, so that every part is aligned. */
    size_t bytes = edges * sizeof *run->edge + ranks * sizeof *run->rank + ranks * sizeof *run->ready +
                   (ranks + 1) * sizeof *run->edge_begin + QE_FLOWS * stages * sizeof *run->out_edge + ranks + pairs;
    char *memory = calloc(bytes, 1);
    if (memory == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to check a schedule");
    run->memory = memory;
    run->edge = (qe_edge *)memory;
    run->rank = (qe_run_rank *)(run->edge + edges);
    run->ready = (uint32_t *)(run->rank + ranks);
    run->edge_begin = run->ready + ranks;
    run->out_edge = run->edge_begin + ranks + 1;
    run->listed = (uint8_t *)(run->out_edge + QE_FLOWS * stages);
    run->did = run->listed + ranks;
    return QE_OK;
}
QE_STATIC_ASSERT(_Alignof(qe_edge) == 4 && _Alignof(qe_run_rank) == 4, "allocate puts them behind each other");

void qe_run_deinit(qe_run *run) {
    free(run->memory);
    *run = (qe_run){0};
}

uint64_t qe_run_stuck(const qe_run *run) {
    uint64_t stuck = 0;
    for (uint32_t rank = 0; rank < run->source->ranks; rank++) {
        stuck += qe_source_row_count(run->source, rank) - run->rank[rank].next;
    }
    return stuck;
}

qe_status qe_run_all(qe_run *run, const qe_source *source, const qe_transport *transport, qe_error *error_out) {
    *run = (qe_run){.source = source, .transport = *transport};
    run->direct = transport->sends == QE_SENDS_SINGLE && transport->communicators == QE_COMMUNICATORS_EDGE &&
                  transport->capacity == 0;
    QE_TRY(allocate(run, error_out));
    find_edges(run);
    for (uint32_t rank = source->ranks; rank-- > 0;) {
        load_unit(run, rank);
        load_queue(run, rank);
        list_rank(run, rank);
    }
    while (run->ready_count > 0) {
        uint32_t rank = run->ready[--run->ready_count];
        run->listed[rank] = 0;
        do pass_messages(run, rank);
        while (run_unit(run, rank));
    }
    return QE_OK;
}
