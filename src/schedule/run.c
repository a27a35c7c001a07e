/* run.c - runs a schedule in thought, and where it stops, finds the shortest circle of actions that wait for each
 * other. An action waits for every earlier one in its row, and F(s, m) for F(s-1, m), I and B(s, m) for I or
 * B(s+1, m). Channels add nothing to this: docs/schedules.md says why, the world test tries it. */
#include "schedule/order.h"

#include <stdlib.h>

#include "base/assert.h"

/* done[r]: the first action of rank r that has not run. */
typedef struct runner {
    const qe_schedule *schedule;
    const qe_order_index *index;
    uint32_t done[QE_SCHEDULE_RANKS_MAX];
} runner;

static const qe_action *action_at(const runner *run, uint32_t index) { return &run->schedule->actions[index]; }

static uint32_t rank_of(const runner *run, uint32_t index) {
    return qe_schedule_rank(run->schedule, action_at(run, index)->stage, action_at(run, index)->microbatch);
}

/* F or I/B of a neighbouring stage, same microbatch; QE_NONE beyond the ends of the pipeline. */
static uint32_t neighbour(const runner *run, const uint32_t *table, int64_t stage, uint32_t microbatch) {
    if (stage < 0 || stage >= run->schedule->stages) return QE_NONE;
    return table[(size_t)stage * run->schedule->microbatches + microbatch];
}

/* The action of another stage whose result this one needs. */
static uint32_t needs(const runner *run, uint32_t index) {
    const qe_action *action = action_at(run, index);
    if (action->kind == QE_ACTION_W) return QE_NONE;
    if (action->kind == QE_ACTION_F) {
        return neighbour(run, run->index->forward, (int64_t)action->stage - 1, action->microbatch);
    }
    return neighbour(run, run->index->backward, (int64_t)action->stage + 1, action->microbatch);
}

/* The action of another stage that needs this one's result. */
static uint32_t feeds(const runner *run, uint32_t index) {
    const qe_action *action = action_at(run, index);
    if (action->kind == QE_ACTION_W) return QE_NONE;
    if (action->kind == QE_ACTION_F) {
        return neighbour(run, run->index->forward, (int64_t)action->stage + 1, action->microbatch);
    }
    return neighbour(run, run->index->backward, (int64_t)action->stage - 1, action->microbatch);
}

static int has_run(const runner *run, uint32_t index) { return index < run->done[rank_of(run, index)]; }

static int can_run(const runner *run, uint32_t index) {
    uint32_t needed = needs(run, index);
    return needed == QE_NONE || has_run(run, needed);
}

/* Ranks that may have something to do, each at most once. */
typedef struct ready_ranks {
    uint32_t rank[QE_SCHEDULE_RANKS_MAX], count;
    uint8_t listed[QE_SCHEDULE_RANKS_MAX];
} ready_ranks;

static void list_rank(ready_ranks *ready, uint32_t rank) {
    if (ready->listed[rank]) return;
    ready->listed[rank] = 1;
    ready->rank[ready->count++] = rank;
}

/* Runs the rank until it waits; whoever stood still for one of its actions is listed. */
static void run_rank(runner *run, uint32_t rank, ready_ranks *ready) {
    while (run->done[rank] < run->schedule->rank_begin[rank + 1] && can_run(run, run->done[rank])) {
        uint32_t fed = feeds(run, run->done[rank]++);
        if (fed != QE_NONE && run->done[rank_of(run, fed)] == fed) list_rank(ready, rank_of(run, fed));
    }
}

static void run_all(runner *run) {
    ready_ranks ready = {.count = 0};
    for (uint32_t rank = 0; rank < run->schedule->ranks; rank++) {
        run->done[rank] = run->schedule->rank_begin[rank];
        list_rank(&ready, rank);
    }
    while (ready.count > 0) {
        uint32_t rank = ready.rank[--ready.count];
        ready.listed[rank] = 0;
        run_rank(run, rank, &ready);
    }
}

static uint32_t count_stuck(const runner *run) {
    uint32_t stuck = 0;
    for (uint32_t rank = 0; rank < run->schedule->ranks; rank++) {
        stuck += run->schedule->rank_begin[rank + 1] - run->done[rank];
    }
    return stuck;
}

/* A breadth-first walk over "waits for", from `start` until something that waits for `start`. */
typedef struct walk {
    const runner *run;
    uint32_t start;
    uint32_t *came_from; /* [actions]; QE_NONE: not reached */
    uint32_t *queue;     /* [actions] */
    uint32_t queued;
    uint32_t swept[QE_SCHEDULE_RANKS_MAX]; /* actions of the row before this one are reached: keeps rows linear */
    uint32_t closing;             /* waits for start; QE_NONE until found */
} walk;

static int waits_for_start(const walk *on, uint32_t index) {
    if (needs(on->run, index) == on->start) return 1;
    return rank_of(on->run, index) == rank_of(on->run, on->start) && index > on->start;
}

static void reach(walk *on, uint32_t index, uint32_t from) {
    if (on->closing != QE_NONE || on->came_from[index] != QE_NONE) return;
    on->came_from[index] = from;
    on->queue[on->queued++] = index;
    if (index != on->start && waits_for_start(on, index)) on->closing = index;
}

static void reach_what_it_waits_for(walk *on, uint32_t index) {
    uint32_t needed = needs(on->run, index), rank = rank_of(on->run, index);
    if (needed != QE_NONE && !has_run(on->run, needed)) reach(on, needed, index);
    for (; on->swept[rank] < index; on->swept[rank]++) reach(on, on->swept[rank], index);
}

static void walk_from(walk *on, uint32_t start) {
    const qe_schedule *schedule = on->run->schedule;
    on->start = start;
    on->closing = QE_NONE;
    on->queued = 0;
    for (uint32_t i = 0; i < schedule->rank_begin[schedule->ranks]; i++) on->came_from[i] = QE_NONE;
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) on->swept[rank] = on->run->done[rank];
    reach(on, start, start);
    for (uint32_t next = 0; next < on->queued && on->closing == QE_NONE; next++) {
        reach_what_it_waits_for(on, on->queue[next]);
    }
}

/* From the first rank that stopped on: not every stopped rank is part of a circle, it may wait for one elsewhere. */
static void find_cycle(walk *on) {
    for (uint32_t rank = 0; rank < on->run->schedule->ranks; rank++) {
        if (on->run->done[rank] == on->run->schedule->rank_begin[rank + 1]) continue;
        walk_from(on, on->run->done[rank]);
        if (on->closing != QE_NONE) return;
    }
    QE_ASSERT(on->closing != QE_NONE); /* finitely many waits without an end hold a circle */
}

static qe_status refuse_cycle(walk *on, qe_counterexample *counterexample_out, qe_error *error_out) {
    qe_counterexample facts = {.rule = QE_RULE_SCHEDULE_CYCLE, .found = count_stuck(on->run)};
    uint32_t length = 1;
    for (uint32_t index = on->closing; index != on->start; index = on->came_from[index]) length++;
    uint32_t *cycle = on->queue; /* the walk is over, and a cycle is no longer than what it reached */
    QE_ASSERT(length <= on->queued);
    uint32_t place = length;
    for (uint32_t index = on->closing; place > 0; index = on->came_from[index]) cycle[--place] = index;
    QE_ASSERT(cycle[0] == on->start);
    return qe_counterexample_set(counterexample_out, &facts, cycle, length, error_out);
}

qe_status qe_schedule_run(const qe_schedule *schedule, const qe_order_index *index,
                          qe_counterexample *counterexample_out, qe_error *error_out) {
    runner run = {.schedule = schedule, .index = index};
    run_all(&run);
    if (count_stuck(&run) == 0) return QE_OK;
    size_t actions = schedule->rank_begin[schedule->ranks];
    uint32_t *memory = malloc(2 * actions * sizeof *memory);
    if (memory == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a counterexample");
    walk on = {.run = &run, .came_from = memory, .queue = memory + actions};
    find_cycle(&on);
    qe_status status = refuse_cycle(&on, counterexample_out, error_out);
    free(memory);
    return status;
}
