/* simulate.c - runs a schedule with times. As in run.c every rank goes on until it waits, and whoever waits is woken by
 * what it waits for; nothing is sorted by time. A rank's actions run in the order of its row, so its start depends only
 * on the end of the one before it and on the arrival of its input, both known when it is its turn. Transfers of
 * one direction between two ranks all leave from one row, so their queue is in order as well. */
#include "qeffect/simulate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/assert.h"
#include "schedule/costs.h"

#define NOT_YET (-1.0) /* all times are >= 0 */

/* A direction of a stage's boundary. */
typedef struct hop {
    uint32_t stage;  /* where it leads; QE_NONE beyond the ends of the pipeline */
    uint32_t link;   /* index in runner.links; QE_NONE within a rank */
    double transfer; /* time on the link */
} hop;

typedef struct stage_state {
    const qe_stage_cost *cost;
    uint32_t rank;
    hop forward, backward;
} stage_state;

/* A direction between two ranks; transfers on it queue. */
typedef struct link {
    double free_at;
    uint32_t to;   /* rank */
    uint32_t next; /* another link from the same rank; QE_NONE: the last */
} link;

typedef struct rank_state {
    uint32_t next, end; /* indices of actions: the first that has not run, and behind the last */
    uint32_t links;     /* head of its list */
    uint32_t kept[QE_KEEPS];
    double free_at, kept_size, optimizer;
    uint8_t listed;
} rank_state;

typedef struct runner {
    const qe_simulation_request *request;
    const qe_schedule *schedule;
    qe_simulation *out;
    stage_state *stages;  /* [directions][stages] */
    rank_state *ranks;    /* [ranks] */
    link *links;          /* [directions][2 * stages] */
    uint32_t link_count;
    uint32_t *ready;      /* [ranks] that may have something to do */
    uint32_t ready_count;
    double *arrival[2];   /* [stages * microbatches] of the input of F and of I or B; NOT_YET */
    int training;         /* 0: nothing is kept for a backward that never comes */
} runner;

/* ---- requests ---- */

static qe_status check_indices(const qe_schedule *schedule, qe_error *error_out) {
    for (uint32_t i = 0; i < schedule->rank_begin[schedule->ranks]; i++) {
        const qe_action *action = &schedule->actions[i];
        if (action->stage < schedule->stages && action->microbatch < schedule->microbatches &&
            action->kind < QE_ACTION_KINDS) continue;
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "let qe_schedule_check judge it first",
                            "action %u is of stage %u, microbatch %u; the schedule has %u and %u", i, action->stage,
                            action->microbatch, schedule->stages, schedule->microbatches);
    }
    return QE_OK;
}

static int has_backward(const qe_schedule *schedule) {
    for (uint32_t i = schedule->rank_begin[schedule->ranks]; i > 0; i--) {
        if (schedule->actions[i - 1].kind != QE_ACTION_F) return 1;
    }
    return 0;
}

/* ---- memory ---- */

/* Where each array lies in the block. */
typedef struct places {
    size_t rank_results, start, end, stages, ranks, links, ready, arrival;
} places;

/* Microbatches that run the other way meet every stage on another rank. */
static uint32_t directions(const qe_schedule *schedule) { return schedule->reversed > 0 ? 2 : 1; }

static qe_arena measure(const qe_schedule *schedule, places *places_out) {
    qe_arena arena = {0};
    size_t actions = schedule->rank_begin[schedule->ranks], pairs = (size_t)schedule->stages * schedule->microbatches;
    size_t stages = (size_t)directions(schedule) * schedule->stages;
    places_out->rank_results = qe_arena_add_array(&arena, schedule->ranks, sizeof(qe_simulated_rank), QE_ALIGN_BYTES);
    places_out->start = qe_arena_add_array(&arena, actions, sizeof(double), QE_ALIGN_BYTES);
    places_out->end = qe_arena_add_array(&arena, actions, sizeof(double), QE_ALIGN_BYTES);
    places_out->stages = qe_arena_add_array(&arena, stages, sizeof(stage_state), QE_ALIGN_BYTES);
    places_out->ranks = qe_arena_add_array(&arena, schedule->ranks, sizeof(rank_state), QE_ALIGN_BYTES);
    places_out->links = qe_arena_add_array(&arena, 2 * stages, sizeof(link), QE_ALIGN_BYTES);
    places_out->ready = qe_arena_add_array(&arena, schedule->ranks, sizeof(uint32_t), QE_ALIGN_BYTES);
    places_out->arrival = qe_arena_add_array(&arena, 2 * pairs, sizeof(double), QE_ALIGN_BYTES);
    return arena;
}

static qe_status take_memory(runner *run, qe_error *error_out) {
    const qe_schedule *schedule = run->schedule;
    qe_simulation *out = run->out;
    places at;
    qe_arena arena = measure(schedule, &at);
    if (arena.overflowed || arena.total_bytes > out->memory_bytes) {
        void *block;
        qe_status status = qe_arena_allocate(&arena, &block, error_out);
        if (status != QE_OK) return status;
        free(out->memory);
        out->memory = block;
        out->memory_bytes = arena.total_bytes;
    }
    char *block = out->memory;
    out->ranks = (qe_simulated_rank *)(block + at.rank_results);
    out->start = (double *)(block + at.start);
    out->end = (double *)(block + at.end);
    run->stages = (stage_state *)(block + at.stages);
    run->ranks = (rank_state *)(block + at.ranks);
    run->links = (link *)(block + at.links);
    run->ready = (uint32_t *)(block + at.ready);
    run->arrival[0] = (double *)(block + at.arrival);
    run->arrival[1] = run->arrival[0] + (size_t)schedule->stages * schedule->microbatches;
    return QE_OK;
}

/* ---- before the first action ---- */

static uint32_t link_between(runner *run, uint32_t from, uint32_t to) {
    for (uint32_t i = run->ranks[from].links; i != QE_NONE; i = run->links[i].next) {
        if (run->links[i].to == to) return i;
    }
    run->links[run->link_count] = (link){.to = to, .next = run->ranks[from].links};
    run->ranks[from].links = run->link_count;
    return run->link_count++;
}

static hop hop_between(runner *run, uint32_t from, uint32_t to, uint32_t microbatch, double size) {
    uint32_t from_rank = qe_schedule_rank(run->schedule, from, microbatch);
    uint32_t to_rank = qe_schedule_rank(run->schedule, to, microbatch);
    hop between = {.stage = to, .link = QE_NONE};
    if (from_rank == to_rank || from_rank == QE_NONE || to_rank == QE_NONE) return between;
    between.link = link_between(run, from_rank, to_rank);
    between.transfer = run->request->bandwidth > 0.0 ? size / run->request->bandwidth : 0.0;
    return between;
}

static stage_state *state_of(const runner *run, uint32_t stage, uint32_t microbatch) {
    int reversed = microbatch >= run->schedule->microbatches - run->schedule->reversed;
    return &run->stages[(reversed ? run->schedule->stages : 0) + stage];
}

/* The stages as a microbatch meets them. */
static void prepare_stages_for(runner *run, uint32_t microbatch) {
    const qe_schedule *schedule = run->schedule;
    for (uint32_t stage = 0; stage < schedule->stages; stage++) {
        stage_state *state = state_of(run, stage, microbatch);
        *state = (stage_state){.cost = &run->request->costs[run->request->cost_count == 1 ? 0 : stage],
                               .rank = qe_schedule_rank(schedule, stage, microbatch),
                               .forward = {.stage = QE_NONE},
                               .backward = {.stage = QE_NONE}};
        if (state->rank != QE_NONE) run->ranks[state->rank].optimizer += state->cost->optimizer;
        if (stage + 1 < schedule->stages) {
            state->forward = hop_between(run, stage, stage + 1, microbatch, state->cost->output);
        }
        if (stage > 0) state->backward = hop_between(run, stage, stage - 1, microbatch, state->cost->gradient);
    }
}

static void prepare_stages(runner *run) {
    prepare_stages_for(run, 0);
    if (directions(run->schedule) > 1) prepare_stages_for(run, run->schedule->microbatches - 1);
}

static void prepare_ranks(runner *run) {
    for (uint32_t rank = 0; rank < run->schedule->ranks; rank++) {
        run->ranks[rank] = (rank_state){.next = run->schedule->rank_begin[rank],
                                        .end = run->schedule->rank_begin[rank + 1],
                                        .links = QE_NONE,
                                        .listed = 1};
        run->out->ranks[rank] = (qe_simulated_rank){0};
        run->ready[rank] = run->schedule->ranks - 1 - rank; /* a stack: rank 0 goes first */
    }
    run->ready_count = run->schedule->ranks;
}

/* What enters at the ends of the pipeline is there from the beginning. */
static void prepare_arrivals(runner *run) {
    size_t microbatches = run->schedule->microbatches, pairs = run->schedule->stages * microbatches;
    for (size_t i = 0; i < 2 * pairs; i++) run->arrival[0][i] = NOT_YET;
    for (size_t m = 0; m < microbatches; m++) run->arrival[0][m] = 0.0;
}

/* ---- actions ---- */

static size_t pair_of(const runner *run, uint32_t stage, uint32_t microbatch) {
    return (size_t)stage * run->schedule->microbatches + microbatch;
}

static int is_forward(const qe_action *action) { return action->kind == QE_ACTION_F; }

static double input_arrival(const runner *run, const qe_action *action) {
    if (action->kind == QE_ACTION_W) return 0.0;
    return run->arrival[!is_forward(action)][pair_of(run, action->stage, action->microbatch)];
}

static void wake(runner *run, uint32_t rank) {
    if (rank == QE_NONE) return; /* nobody has the stage: nobody waits for it */
    rank_state *state = &run->ranks[rank];
    if (state->listed || state->next == state->end) return;
    state->listed = 1;
    run->ready[run->ready_count++] = rank;
}

static double arrival_over(runner *run, const hop *over, double end) {
    if (over->link == QE_NONE) return end;
    link *on = &run->links[over->link];
    double begin = end > on->free_at ? end : on->free_at;
    on->free_at = begin + over->transfer;
    return on->free_at + run->request->latency;
}

/* Sends the result of an action that ended. The loss hands the last stage its own F back. */
static void release(runner *run, const qe_action *action, double end) {
    if (action->kind == QE_ACTION_W) return;
    const stage_state *from = state_of(run, action->stage, action->microbatch);
    const hop *over = is_forward(action) ? &from->forward : &from->backward;
    if (over->stage != QE_NONE) {
        size_t at = pair_of(run, over->stage, action->microbatch);
        run->arrival[!is_forward(action)][at] = arrival_over(run, over, end);
        wake(run, state_of(run, over->stage, action->microbatch)->rank);
    } else if (is_forward(action)) {
        run->arrival[1][pair_of(run, action->stage, action->microbatch)] = end;
    }
}

static void take_up(rank_state *rank, const qe_stage_cost *cost, qe_keep keep) {
    rank->kept[keep]++;
    rank->kept_size += cost->keep[keep];
}

static void give_back(rank_state *rank, const qe_stage_cost *cost, qe_keep keep) {
    rank->kept[keep]--;
    rank->kept_size -= cost->keep[keep];
}

static void note_peak(const rank_state *rank, qe_simulated_rank *result) {
    for (int keep = 0; keep < QE_KEEPS; keep++) {
        if (rank->kept[keep] > result->peak[keep]) result->peak[keep] = rank->kept[keep];
    }
    if (rank->kept_size > result->peak_kept) result->peak_kept = rank->kept_size;
}

/* An action holds what it consumes until its end, so the peak is noted before anything is given back. */
static void follow_memory(const runner *run, rank_state *rank, qe_simulated_rank *result, const qe_action *action) {
    const qe_stage_cost *cost = state_of(run, action->stage, action->microbatch)->cost;
    int kind = action->kind, last = kind == QE_ACTION_W || kind == QE_ACTION_B;
    int splits = kind == QE_ACTION_B && run->request->backward_splits;
    if (kind == QE_ACTION_F) {
        take_up(rank, cost, QE_KEEP_I);
        take_up(rank, cost, QE_KEEP_X);
    }
    if (kind == QE_ACTION_I || splits) take_up(rank, cost, QE_KEEP_W);
    note_peak(rank, result);
    if (kind == QE_ACTION_I || kind == QE_ACTION_B || !run->training) give_back(rank, cost, QE_KEEP_I);
    if (kind == QE_ACTION_W || splits) give_back(rank, cost, QE_KEEP_W);
    if (last || !run->training) give_back(rank, cost, QE_KEEP_X);
}

static double time_of(const runner *run, const qe_action *action) {
    return state_of(run, action->stage, action->microbatch)->cost->time[action->kind];
}

static void set_times(runner *run, uint32_t index, uint32_t count, double start, double end) {
    for (uint32_t i = index; i < index + count; i++) {
        run->out->start[i] = start;
        run->out->end[i] = end;
    }
}

/* The actions from `index` on that run as one: their start, or NOT_YET. */
static double start_of(const runner *run, const rank_state *rank, uint32_t index, uint32_t count) {
    double start = rank->free_at;
    for (uint32_t i = index; i < index + count; i++) {
        double arrival = input_arrival(run, &run->schedule->actions[i]);
        if (arrival < 0.0) return NOT_YET;
        if (arrival > start) start = arrival;
    }
    return start;
}

static double duration_of(const runner *run, uint32_t index, uint32_t count) {
    double duration = 0.0;
    for (uint32_t i = index; i < index + count; i++) duration += time_of(run, &run->schedule->actions[i]);
    return count > 1 && run->request->pair > 0.0 ? duration * run->request->pair : duration;
}

/* When the result of an action that runs alone from `start` to `end` can be sent. */
static double sent_of(const runner *run, const qe_action *action, double start, double end) {
    if (action->kind != QE_ACTION_B || !run->request->gradient_early) return end;
    double input = start + state_of(run, action->stage, action->microbatch)->cost->time[QE_ACTION_I];
    return input < end ? input : end;
}

/* Actions of the row that start together: 2 for a pair whose results are released at its end. */
static uint32_t run_together(const runner *run, const rank_state *rank) {
    int paired = run->request->release == QE_RELEASE_PAIR && run->schedule->actions[rank->next].paired;
    return paired && rank->next + 1 < rank->end ? 2 : 1;
}

/* Runs one action, or one pair; 0 when its input is not there. */
static int run_next(runner *run, rank_state *rank, qe_simulated_rank *result) {
    uint32_t index = rank->next, count = run_together(run, rank);
    double start = start_of(run, rank, index, count);
    if (start < 0.0) return 0;
    double duration = duration_of(run, index, count);
    if (index == run->schedule->rank_begin[rank - run->ranks]) result->begin = start;
    rank->free_at = start + duration;
    result->busy += duration;
    set_times(run, index, count, start, rank->free_at);
    for (uint32_t i = index; i < index + count; i++) {
        follow_memory(run, rank, result, &run->schedule->actions[i]);
        const qe_action *action = &run->schedule->actions[i];
        release(run, action, count > 1 ? rank->free_at : sent_of(run, action, start, rank->free_at));
    }
    rank->next += count;
    return 1;
}

static void run_all(runner *run) {
    while (run->ready_count > 0) {
        uint32_t index = run->ready[--run->ready_count];
        rank_state *rank = &run->ranks[index];
        while (rank->next < rank->end && run_next(run, rank, &run->out->ranks[index])) {}
        rank->listed = 0;
        run->out->ranks[index].end = rank->free_at;
    }
}

static qe_status check_finished(const runner *run, qe_error *error_out) {
    uint32_t stuck = 0;
    for (uint32_t rank = 0; rank < run->schedule->ranks; rank++) stuck += run->ranks[rank].end - run->ranks[rank].next;
    if (stuck == 0) return QE_OK;
    return qe_error_set(error_out, QE_CONTRACT, "qe_schedule_check says why", "%u actions of the schedule never run",
                        stuck);
}

/* ---- results ---- */

static double larger(double a, double b) { return a > b ? a : b; }

/* A rank whose optimizer waits for nobody is as late in the next step as in this one: its own period is the step's. */
static void follow_optimizers(runner *run) {
    qe_simulation *out = run->out;
    int all = run->request->sync == QE_SYNC_ALL;
    out->synchronised = all;
    for (uint32_t index = 0; index < run->schedule->ranks; index++) {
        qe_simulated_rank *rank = &out->ranks[index];
        rank->optimizer_begin = all ? out->makespan + run->request->meet : rank->end;
        rank->optimizer_end = rank->optimizer_begin + run->ranks[index].optimizer;
        out->step = larger(out->step, all ? rank->optimizer_end : rank->optimizer_end - rank->begin);
    }
}

static void sum_up(runner *run) {
    qe_simulation *out = run->out;
    out->ranks_count = run->schedule->ranks;
    out->actions_count = run->schedule->rank_begin[run->schedule->ranks];
    for (uint32_t i = 0; i < out->ranks_count; i++) {
        const qe_simulated_rank *rank = &out->ranks[i];
        out->makespan = larger(out->makespan, rank->end);
        out->span = larger(out->span, rank->end - rank->begin);
        out->work = larger(out->work, rank->busy);
        out->peak_kept = larger(out->peak_kept, rank->peak_kept);
    }
    out->makespan_bubble = larger(0.0, out->makespan - out->work); /* sums in another order round differently */
    out->stage_bubble = larger(0.0, out->span - out->work);
    follow_optimizers(run);
}

static void forget(qe_simulation *simulation) {
    *simulation = (qe_simulation){.memory = simulation->memory, .memory_bytes = simulation->memory_bytes};
}

static qe_status prepare(runner *run, qe_error *error_out) {
    forget(run->out);
    qe_status status = qe_costs_check(run->request, run->schedule->stages, error_out);
    if (status == QE_OK) status = check_indices(run->schedule, error_out);
    if (status == QE_OK) status = take_memory(run, error_out);
    if (status != QE_OK) return status;
    run->training = has_backward(run->schedule);
    prepare_ranks(run);
    prepare_stages(run);
    return QE_OK;
}

qe_status qe_simulation_run(const qe_simulation_request *request, qe_simulation *simulation, qe_error *error_out) {
    runner run = {.request = request, .schedule = request->schedule, .out = simulation};
    qe_status status = prepare(&run, error_out);
    if (status != QE_OK) return status;
    prepare_arrivals(&run);
    run_all(&run);
    status = check_finished(&run, error_out);
    if (status == QE_OK) sum_up(&run);
    else forget(simulation);
    return status;
}

static qe_status check_times(const qe_schedule *schedule, const double *start, const double *end, qe_error *error_out) {
    for (uint32_t i = 0; i < schedule->rank_begin[schedule->ranks]; i++) {
        if (qe_is_cost(start[i]) && qe_is_cost(end[i]) && start[i] <= end[i]) continue;
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "give times from the beginning of the step",
                            "action %u is from %g to %g", i, start[i], end[i]);
    }
    return QE_OK;
}

static void record_rank(runner *run, uint32_t index, const double *start, const double *end) {
    rank_state *rank = &run->ranks[index];
    qe_simulated_rank *result = &run->out->ranks[index];
    for (uint32_t i = rank->next; i < rank->end; i++) {
        run->out->start[i] = start[i];
        run->out->end[i] = end[i];
        result->begin = i == rank->next ? start[i] : result->begin;
        result->end = larger(result->end, end[i]);
        result->busy += end[i] - start[i];
        follow_memory(run, rank, result, &run->schedule->actions[i]);
    }
}

qe_status qe_simulation_record(const qe_simulation_request *request, const double *start, const double *end,
                               qe_simulation *simulation, qe_error *error_out) {
    runner run = {.request = request, .schedule = request->schedule, .out = simulation};
    qe_status status = prepare(&run, error_out);
    if (status == QE_OK) status = check_times(run.schedule, start, end, error_out);
    if (status != QE_OK) return status;
    for (uint32_t rank = 0; rank < run.schedule->ranks; rank++) record_rank(&run, rank, start, end);
    sum_up(&run);
    return QE_OK;
}

void qe_simulation_deinit(qe_simulation *simulation) {
    free(simulation->memory);
    *simulation = (qe_simulation){0};
}

qe_stage_cost qe_stage_cost_of(double forward, double input, double weight, double weight_share, uint32_t chunks) {
    QE_ASSERT(chunks > 0);
    double part = 1.0 / chunks;
    return (qe_stage_cost){
        .time = {forward * part, input * part, weight * part, (input + weight) * part},
        .keep = {(1.0 - weight_share) * part, weight_share * part, 0.0},
    };
}
