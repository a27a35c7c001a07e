/* cycle.c - why a run stopped: the shortest cycle of things that wait for each other through the first stuck action.
 *
 * A thing is an action, the send of its result or the receive of its input; in a rendezvous both ends are one thing,
 * named as the send. Where things stand behind each other (rows, queues, edges) each waits for all before it, not
 * only for the one in front, so that a cycle names only what matters. Every chain is swept once, so the walk is linear
 * in what it reaches. Like the run, it looks at rows and never copies them; it keeps what it has reached in a hash. */
#include "schedule/run.h"

#include <stdlib.h>

#include "base/assert.h"

typedef struct thing {
    uint32_t rank, index;
    uint8_t part; /* qe_part */
} thing;

typedef struct reached {
    thing what;
    uint8_t wait;       /* why the one it came from waits for it */
    uint32_t slot;      /* its place in the hash */
    uint32_t came_from; /* index in the walk's queue */
} reached;

/* A breadth-first walk over "waits for", from queue[0] until something that waits for it. */
typedef struct walk {
    const qe_run *run;
    uint32_t *place;        /* [QE_LANES * stages * microbatches] row index of F, and of I or B */
    uint64_t *row_begin;    /* [ranks + 1] actions before the row */
    uint32_t *message_begin, *sender_at, *user_at; /* by edge: row indices of its messages' actions, in row order */
    uint32_t *row_swept, *queue_swept, *batch_swept, *edge_swept;
    reached *queue;
    uint32_t queued, queue_capacity, next;
    uint32_t *slot;         /* [slot_count] hash of what is reached: index in the queue + 1 */
    uint32_t slot_count;
    int failed;             /* no memory */
    int closed;             /* found: queue[closing] waits for queue[0] */
    uint32_t closing;
    uint8_t closing_wait;
} walk;

/* ---- places ---- */

static uint32_t *place_of(const walk *on, qe_lane lane, uint32_t stage, uint32_t microbatch) {
    return &on->place[((size_t)lane * on->run->source->stages + stage) * on->run->source->microbatches + microbatch];
}

/* Counts first (with `fill` 0, behind each edge's end), then writes. Edges' messages are in row order at both ends. */
static void note_messages(walk *on, uint32_t rank, uint32_t index, const qe_action *action, uint32_t *sent,
                          uint32_t *used) {
    uint32_t edge = qe_run_edge(on->run, action);
    if (edge != QE_NONE) {
        if (on->sender_at != NULL) on->sender_at[on->message_begin[edge] + sent[edge]] = index;
        sent[edge]++;
    }
    if (!qe_source_receives(on->run->source, rank, action)) return;
    edge = qe_run_edge_in(on->run, action);
    if (on->user_at != NULL) on->user_at[on->message_begin[edge] + used[edge]] = index;
    used[edge]++;
}

static void read_rows(walk *on, uint32_t *sent, uint32_t *used) {
    const qe_source *source = on->run->source;
    for (uint32_t rank = 0; rank < source->ranks; rank++) {
        for (uint32_t i = 0; i < qe_source_row_count(source, rank); i++) {
            qe_action action = qe_source_at(source, rank, i);
            if (action.kind == QE_ACTION_W) continue;
            *place_of(on, qe_action_lane(&action), action.stage, action.microbatch) = i;
            if (on->run->transport.capacity > 0) note_messages(on, rank, i, &action, sent, used);
        }
    }
}

/* Only buffers need the lists of messages. On failure: 0. */
static int list_messages(walk *on) {
    uint32_t edges = on->run->edge_count;
    uint32_t *count = calloc(2 * ((size_t)edges + 1), sizeof *count);
    on->message_begin = calloc((size_t)edges + 1, sizeof *on->message_begin);
    if (count == NULL || on->message_begin == NULL) goto free_count;
    read_rows(on, count, count + edges + 1);
    for (uint32_t e = 0; e < edges; e++) {
        on->message_begin[e + 1] = on->message_begin[e] + count[e];
        count[e] = count[edges + 1 + e] = 0;
    }
    on->sender_at = calloc((size_t)on->message_begin[edges] + 1, sizeof *on->sender_at);
    on->user_at = calloc((size_t)on->message_begin[edges] + 1, sizeof *on->user_at);
    if (on->sender_at != NULL && on->user_at != NULL) read_rows(on, count, count + edges + 1);
free_count:
    free(count);
    return on->sender_at != NULL && on->user_at != NULL;
}

/* The number of a message on its edge. */
static uint32_t number_of(const walk *on, uint32_t edge, uint32_t index) {
    uint32_t low = on->message_begin[edge], high = on->message_begin[edge + 1];
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (on->sender_at[middle] <= index) low = middle;
        else high = middle;
    }
    QE_ASSERT(on->sender_at[low] == index);
    return low - on->message_begin[edge];
}

/* ---- the walk ---- */

static int same_thing(thing a, thing b) { return a.rank == b.rank && a.index == b.index && a.part == b.part; }

/* The slot of a thing, or the free one where it belongs. */
static uint32_t *slot_of(const walk *on, thing what) {
    uint64_t key = (on->row_begin[what.rank] + what.index) * 3 + what.part;
    uint64_t at = key * 0x9E3779B97F4A7C15U >> 20;
    for (;; at++) {
        uint32_t *slot = &on->slot[at & (on->slot_count - 1)];
        if (*slot == 0 || same_thing(on->queue[*slot - 1].what, what)) return slot;
    }
}

static int grow(walk *on) {
    uint32_t capacity = on->queue_capacity == 0 ? 1024 : 2 * on->queue_capacity;
    reached *queue = realloc(on->queue, capacity * sizeof *queue);
    if (queue != NULL) on->queue = queue;
    uint32_t *slot = calloc(2 * (size_t)capacity, sizeof *slot);
    if (queue == NULL || slot == NULL) {
        free(slot);
        on->failed = 1;
        return 0;
    }
    free(on->slot);
    on->slot = slot;
    on->slot_count = 2 * capacity;
    on->queue_capacity = capacity;
    for (uint32_t i = 0; i < on->queued; i++) {
        uint32_t *at = slot_of(on, on->queue[i].what);
        *at = i + 1;
        on->queue[i].slot = (uint32_t)(at - slot);
    }
    return 1;
}

static void reach(walk *on, thing what, qe_wait wait) {
    if (on->closed || on->failed) return;
    if (on->queued > 0 && same_thing(what, on->queue[0].what)) {
        on->closed = 1;
        on->closing = on->next;
        on->closing_wait = (uint8_t)wait;
        return;
    }
    if (on->queued == on->queue_capacity && !grow(on)) return;
    uint32_t *slot = slot_of(on, what);
    if (*slot != 0) return;
    on->queue[on->queued++] = (reached){
        .what = what, .wait = (uint8_t)wait, .slot = (uint32_t)(slot - on->slot), .came_from = on->next};
    *slot = on->queued;
}

/* ---- what waits for what; only what has not happened is reached ---- */

static void reach_run(walk *on, uint32_t rank, uint32_t index, qe_wait wait) {
    if (index >= on->run->rank[rank].next) reach(on, (thing){rank, index, QE_PART_RUN}, wait);
}

static int buffered_queues(const qe_run *run) {
    return run->transport.sends == QE_SENDS_SINGLE && run->transport.communicators == QE_COMMUNICATORS_ONE &&
           run->transport.capacity > 0;
}

static void reach_send(walk *on, uint32_t rank, uint32_t index, qe_wait wait) {
    qe_action action = qe_source_at(on->run->source, rank, index);
    if (qe_run_edge(on->run, &action) == QE_NONE) return;
    if (qe_run_did(on->run, action.stage, action.microbatch, qe_did_send(qe_action_lane(&action)))) return;
    reach(on, (thing){rank, index, QE_PART_SEND}, wait);
}

/* The message that brings an action its input, as the thing that the receiving rank sees. */
static void reach_message(walk *on, uint32_t rank, uint32_t index, const qe_action *action, qe_wait wait) {
    uint32_t producer = qe_source_producer(on->run->source, action);
    qe_lane lane = qe_action_lane(action);
    if (qe_run_did(on->run, producer, action->microbatch, qe_did_arrive(lane))) return;
    if (buffered_queues(on->run)) reach(on, (thing){rank, index, QE_PART_RECEIVE}, wait);
    else {
        uint32_t sender = *place_of(on, lane, producer, action->microbatch);
        reach_send(on, qe_source_from(on->run->source, action), sender, wait);
    }
}

static void reach_input(walk *on, uint32_t rank, uint32_t index, qe_wait wait) {
    qe_action action = qe_source_at(on->run->source, rank, index);
    uint32_t producer = qe_source_producer(on->run->source, &action);
    if (producer == QE_NONE) return;
    uint32_t home = qe_source_from(on->run->source, &action);
    if (home != rank && !on->run->direct) reach_message(on, rank, index, &action, wait);
    else reach_run(on, home, *place_of(on, qe_action_lane(&action), producer, action.microbatch), wait);
}

static void sweep_row(walk *on, uint32_t rank, uint32_t end, qe_wait wait) {
    for (; on->row_swept[rank] < end; on->row_swept[rank]++) reach_run(on, rank, on->row_swept[rank], wait);
}

static void sweep_batches(walk *on, uint32_t rank, uint32_t end) {
    for (; on->batch_swept[rank] < end; on->batch_swept[rank]++) {
        reach_send(on, rank, on->batch_swept[rank], QE_WAIT_BATCH);
    }
}

/* Everything in a rank's queue before a number. */
static void sweep_queue(walk *on, uint32_t rank, uint32_t end) {
    for (; on->queue_swept[rank] < end; on->queue_swept[rank]++) {
        qe_queue_op op = qe_run_queue_op(on->run->source, rank, on->queue_swept[rank]);
        qe_action action = qe_source_at(on->run->source, rank, op.index);
        if (op.send) reach_send(on, rank, op.index, QE_WAIT_QUEUE);
        else if (qe_source_receives(on->run->source, rank, &action)) {
            reach_message(on, rank, op.index, &action, QE_WAIT_QUEUE);
        }
    }
}

static void waits_of_run(walk *on, uint32_t rank, uint32_t index) {
    const qe_source *source = on->run->source;
    uint32_t begin = qe_source_unit_begin(source, rank, index);
    qe_action action = qe_source_at(source, rank, begin);
    reach_input(on, rank, index, QE_WAIT_RESULT);
    if (begin == index && qe_source_unit_count(source, rank, index, &action) == 2) {
        qe_action second = qe_source_at(source, rank, index + 1);
        reach_input(on, rank, index + 1, QE_WAIT_PAIR);
        qe_lane own = second.kind == QE_ACTION_W ? QE_LANE_B : QE_LANE_F;
        if (second.kind != QE_ACTION_F) {
            reach_run(on, rank, *place_of(on, own, second.stage, second.microbatch), QE_WAIT_PAIR);
        }
    }
    if (on->run->transport.sends == QE_SENDS_BATCHED) sweep_batches(on, rank, begin);
    sweep_row(on, rank, index, QE_WAIT_ROW);
}

/* The buffer of a message: that of the message as many before it as there are buffers, once used. */
static void reach_buffer(walk *on, uint32_t edge, uint32_t index) {
    uint32_t number = number_of(on, edge, index), capacity = on->run->transport.capacity;
    if (number < capacity) return;
    uint32_t user = on->user_at[on->message_begin[edge] + number - capacity];
    reach_run(on, on->run->edge[edge].to, user, QE_WAIT_BUFFER);
}

static void sweep_edge(walk *on, uint32_t edge, uint32_t index) {
    uint32_t end = number_of(on, edge, index);
    for (; on->edge_swept[edge] < end; on->edge_swept[edge]++) {
        reach_send(on, on->run->edge[edge].from, on->sender_at[on->message_begin[edge] + on->edge_swept[edge]],
                   QE_WAIT_QUEUE);
    }
}

static uint32_t unit_last(const qe_source *source, uint32_t rank, uint32_t index) {
    qe_action action = qe_source_at(source, rank, index);
    if (qe_source_unit_begin(source, rank, index) != index) return index;
    return index + qe_source_unit_count(source, rank, index, &action) - 1;
}

static void waits_of_send(walk *on, uint32_t rank, uint32_t index) {
    const qe_run *run = on->run;
    const qe_source *source = run->source;
    qe_action action = qe_source_at(source, rank, index);
    uint32_t edge = qe_run_edge(run, &action), consumer = qe_source_consumer(source, &action);
    uint32_t to = run->edge[edge].to;
    uint32_t use = *place_of(on, qe_action_lane(&action), consumer, action.microbatch);
    reach_run(on, rank, run->transport.sends == QE_SENDS_BATCHED ? unit_last(source, rank, index) : index,
              QE_WAIT_SEND);
    if (run->transport.capacity > 0) reach_buffer(on, edge, index);
    if (run->transport.sends == QE_SENDS_BATCHED) {
        if (run->transport.capacity > 0) return;
        sweep_row(on, to, qe_source_unit_begin(source, to, use), QE_WAIT_POST);
    } else if (run->transport.communicators == QE_COMMUNICATORS_EDGE) {
        sweep_edge(on, edge, index);
    } else {
        sweep_queue(on, rank, qe_run_queue_number(source, rank, index, 1));
        if (run->transport.capacity == 0) sweep_queue(on, to, qe_run_queue_number(source, to, use, 0));
    }
}

static void waits_of_receive(walk *on, uint32_t rank, uint32_t index) {
    qe_action action = qe_source_at(on->run->source, rank, index);
    uint32_t producer = qe_source_producer(on->run->source, &action);
    uint32_t from = qe_source_from(on->run->source, &action);
    reach_send(on, from, *place_of(on, qe_action_lane(&action), producer, action.microbatch), QE_WAIT_RESULT);
    sweep_queue(on, rank, qe_run_queue_number(on->run->source, rank, index, 0));
}

static void walk_from(walk *on, thing start) {
    const qe_run *run = on->run;
    for (uint32_t rank = 0; rank < run->source->ranks; rank++) {
        uint32_t next = run->rank[rank].next;
        on->row_swept[rank] = next;
        on->batch_swept[rank] = next - run->rank[rank].last_count; /* only the last unit's sends can be due */
        on->queue_swept[rank] = run->rank[rank].queue_next;
    }
    for (uint32_t e = 0; e < run->edge_count; e++) on->edge_swept[e] = run->edge[e].sent;
    for (uint32_t i = 0; i < on->queued; i++) on->slot[on->queue[i].slot] = 0;
    on->queued = on->next = 0;
    on->closed = 0;
    reach(on, start, QE_WAIT_NONE);
    for (; on->next < on->queued && !on->closed && !on->failed; on->next++) {
        thing what = on->queue[on->next].what;
        if (what.part == QE_PART_RUN) waits_of_run(on, what.rank, what.index);
        else if (what.part == QE_PART_SEND) waits_of_send(on, what.rank, what.index);
        else waits_of_receive(on, what.rank, what.index);
    }
}

/* From the first rank that stopped on: not every stopped rank is part of a circle, it may wait for one elsewhere. A
 * circle of messages alone goes through the head of a queue. */
static void find_cycle(walk *on) {
    const qe_run *run = on->run;
    int queues = run->transport.sends == QE_SENDS_SINGLE && run->transport.communicators == QE_COMMUNICATORS_ONE;
    for (uint32_t rank = 0; rank < run->source->ranks && !on->closed && !on->failed; rank++) {
        const qe_run_rank *at = &run->rank[rank];
        if (at->unit_count > 0) walk_from(on, (thing){rank, at->next, QE_PART_RUN});
        if (on->closed || on->failed || !queues || at->queue_index == QE_NONE) continue;
        uint32_t producer = qe_source_producer(run->source, &at->queue_action);
        thing head = {rank, at->queue_index, at->queue_send ? QE_PART_SEND : QE_PART_RECEIVE};
        if (!at->queue_send && run->transport.capacity == 0) { /* a rendezvous goes by the name of its send */
            head = (thing){qe_source_from(run->source, &at->queue_action),
                           *place_of(on, qe_action_lane(&at->queue_action), producer, at->queue_action.microbatch),
                           QE_PART_SEND};
        }
        walk_from(on, head);
    }
    QE_ASSERT(on->closed || on->failed); /* finitely many waits without an end hold a circle */
}

static qe_status cite_cycle(walk *on, qe_counterexample *counterexample_out, qe_error *error_out) {
    uint32_t length = 1;
    for (uint32_t at = on->closing; at != 0; at = on->queue[at].came_from) length++;
    qe_cited *cited = malloc(length * sizeof *cited);
    if (cited == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a counterexample");
    uint8_t wait = on->closing_wait;
    for (uint32_t at = on->closing, place = length; place-- > 0; at = on->queue[at].came_from) {
        const reached *step = &on->queue[at];
        cited[place] = qe_source_cite(on->run->source, step->what.rank, step->what.index);
        cited[place].part = step->what.part;
        cited[place].wait = wait;
        wait = step->wait;
    }
    *counterexample_out = (qe_counterexample){.rule = QE_RULE_SCHEDULE_CYCLE,
                                              .cited = cited,
                                              .cited_count = length,
                                              .found = qe_run_stuck(on->run),
                                              .ranks = on->run->source->ranks,
                                              .stages = on->run->source->stages,
                                              .microbatches = on->run->source->microbatches,
                                              .actions = on->run->source->actions};
    return QE_CONTRACT;
}

static int allocate(walk *on) {
    const qe_source *source = on->run->source;
    size_t ranks = source->ranks, pairs = (size_t)source->stages * source->microbatches;
    on->place = calloc(QE_LANES * pairs, sizeof *on->place);
    on->row_begin = calloc(ranks + 1, sizeof *on->row_begin);
    on->row_swept = calloc(3 * ranks + on->run->edge_count, sizeof *on->row_swept);
    if (on->place == NULL || on->row_begin == NULL || on->row_swept == NULL) return 0;
    on->queue_swept = on->row_swept + ranks;
    on->batch_swept = on->queue_swept + ranks;
    on->edge_swept = on->batch_swept + ranks;
    for (uint32_t rank = 0; rank < source->ranks; rank++) {
        on->row_begin[rank + 1] = on->row_begin[rank] + qe_source_row_count(source, rank);
    }
    if (on->run->transport.capacity > 0) return list_messages(on);
    read_rows(on, NULL, NULL);
    return 1;
}

qe_status qe_run_explain(const qe_run *run, qe_counterexample *counterexample_out, qe_error *error_out) {
    walk on = {.run = run};
    qe_status status = QE_ERROR_MEMORY;
    on.failed = !allocate(&on);
    if (!on.failed) find_cycle(&on);
    if (on.failed) (void)qe_error_set(error_out, status, NULL, "no memory for a counterexample");
    else status = cite_cycle(&on, counterexample_out, error_out);
    free(on.place);
    free(on.row_begin);
    free(on.row_swept);
    free(on.message_begin);
    free(on.sender_at);
    free(on.user_at);
    free(on.queue);
    free(on.slot);
    return status;
}
