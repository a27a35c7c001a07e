/* search_improve.c - makes an order better by small changes. Only what lies on the critical path holds the end up, and
 * of that only what stands directly behind another action of its row and starts when that ends: there the two change
 * places, or the first one moves behind more of them. */
#include "schedule/search_improve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

enum { JUMPS = 3 }; /* places that an action moves at once: 1, 2, 4 */

qe_status qe_search_measure(const qe_search_problem *problem, const qe_schedule *schedule, qe_simulation *simulation,
                            qe_search_score *score_out, qe_error *error_out) {
    qe_simulation_request request = problem->request->times;
    request.schedule = schedule;
    *score_out = (qe_search_score){INFINITY, INFINITY};
    qe_status status = qe_simulation_run(&request, simulation, error_out);
    if (status == QE_CONTRACT) return QE_OK;
    if (status != QE_OK) return status;
    if (simulation->peak_kept > problem->limit) return QE_OK;
    int stage = problem->request->metric == QE_SEARCH_STAGE;
    score_out->value = stage ? simulation->span : simulation->makespan;
    score_out->rest = 0.0;
    for (uint32_t rank = 0; rank < problem->ranks; rank++) {
        const qe_simulated_rank *at = &simulation->ranks[rank];
        score_out->rest += at->end - (stage ? at->begin : 0.0);
    }
    return QE_OK;
}

typedef struct improver {
    const qe_search_problem *problem;
    qe_schedule *schedule;
    qe_simulation *simulation; /* of the schedule as it is, unless a trial failed last */
    qe_search_score *score;
    uint32_t *place;  /* [3][stages][microbatches] index of each F, I or B, and W */
    uint32_t *path;   /* indices of the critical actions, the last one first */
    uint32_t path_count;
    uint64_t work, work_most;
    uint32_t *tried;
} improver;

static uint32_t *place_of(const improver *on, uint32_t kind, uint32_t stage, uint32_t microbatch) {
    uint32_t lane = kind == QE_ACTION_B ? QE_ACTION_I : kind;
    size_t stages = on->problem->stages;
    return &on->place[(lane * stages + stage) * on->problem->microbatches + microbatch];
}

static void note_places(improver *on) {
    for (uint32_t i = 0; i < on->schedule->rank_begin[on->schedule->ranks]; i++) {
        const qe_action *action = &on->schedule->actions[i];
        *place_of(on, action->kind, action->stage, action->microbatch) = i;
    }
}

/* The action whose result another one needs; QE_NONE: none, or it is that of its own row's past anyway. */
static uint32_t producer_of(const improver *on, const qe_action *action) {
    if (action->kind == QE_ACTION_W) return QE_NONE;
    if (action->kind == QE_ACTION_F) {
        return action->stage == 0 ? QE_NONE : *place_of(on, QE_ACTION_F, action->stage - 1U, action->microbatch);
    }
    if (action->stage + 1U == on->problem->stages) return QE_NONE;
    return *place_of(on, QE_ACTION_I, action->stage + 1U, action->microbatch);
}

static uint32_t rank_at(const improver *on, uint32_t index) {
    return on->problem->stage[on->schedule->actions[index].stage].rank;
}

static uint32_t worst_rank(const improver *on) {
    uint32_t worst = 0;
    double most = -1.0;
    for (uint32_t rank = 0; rank < on->problem->ranks; rank++) {
        const qe_simulated_rank *at = &on->simulation->ranks[rank];
        double value = at->end - (on->problem->request->metric == QE_SEARCH_STAGE ? at->begin : 0.0);
        if (value > most) {
            most = value;
            worst = rank;
        }
    }
    return worst;
}

/* From the end that counts back to the beginning: through the row while an action starts when the one before it ends,
 * else to the action whose result it waited for. */
static void trace_path(improver *on) {
    uint32_t at = on->schedule->rank_begin[worst_rank(on) + 1] - 1;
    on->path_count = 0;
    while (at != QE_NONE) {
        on->path[on->path_count++] = at;
        uint32_t first = on->schedule->rank_begin[rank_at(on, at)];
        int waited = at == first || on->simulation->end[at - 1] < on->simulation->start[at] - on->problem->grain;
        at = waited ? producer_of(on, &on->schedule->actions[at]) : at - 1;
    }
}

/* Must `second` stand behind `first` in their row? */
static int is_bound(const qe_action *first, const qe_action *second) {
    if (first->paired || second->paired) return 1;
    if (first->stage != second->stage) return 0;
    if (first->kind == second->kind) return 1;
    if (first->kind == QE_ACTION_W || second->kind == QE_ACTION_F) return 0;
    return first->microbatch == second->microbatch;
}

static void rotate_right(qe_action *actions, uint32_t count) {
    qe_action last = actions[count - 1];
    memmove(actions + 1, actions, (count - 1) * sizeof *actions);
    actions[0] = last;
}

static void rotate_left(qe_action *actions, uint32_t count) {
    qe_action first = actions[0];
    memmove(actions, actions + 1, (count - 1) * sizeof *actions);
    actions[count - 1] = first;
}

/* Measures the schedule as it is now. 1: it is better, and stays. */
static qe_status judge(improver *on, int *better_out, qe_error *error_out) {
    qe_search_score score;
    on->work += on->schedule->rank_begin[on->schedule->ranks];
    (*on->tried)++;
    QE_TRY(qe_search_measure(on->problem, on->schedule, on->simulation, &score, error_out));
    *better_out = qe_search_is_better(score, *on->score, on->problem->grain);
    if (*better_out) *on->score = score;
    return QE_OK;
}

/* Moves the action at `index` `jump` places forward, or backward, in its row. */
static qe_status try_move(improver *on, uint32_t index, uint32_t jump, int back, int *better_out,
                          qe_error *error_out) {
    uint32_t rank = rank_at(on, index);
    uint32_t begin = on->schedule->rank_begin[rank], end = on->schedule->rank_begin[rank + 1];
    qe_action *actions = on->schedule->actions;
    *better_out = 0;
    if (back ? index < begin + jump : index + jump >= end) return QE_OK;
    for (uint32_t i = 1; i <= jump; i++) {
        if (back ? is_bound(&actions[index - i], &actions[index]) : is_bound(&actions[index], &actions[index + i])) {
            return QE_OK;
        }
    }
    qe_action *from = back ? &actions[index - jump] : &actions[index];
    back ? rotate_right(from, jump + 1) : rotate_left(from, jump + 1);
    qe_status status = judge(on, better_out, error_out);
    if (!*better_out) back ? rotate_left(from, jump + 1) : rotate_right(from, jump + 1);
    return status;
}

/* Tries to part two critical actions that stand one behind the other. */
static qe_status try_pair(improver *on, uint32_t second, int *better_out, qe_error *error_out) {
    *better_out = 0;
    for (int i = 0; i < JUMPS && !*better_out; i++) {
        QE_TRY(try_move(on, second - 1, 1u << i, 0, better_out, error_out));
        if (!*better_out && i > 0) QE_TRY(try_move(on, second, 1u << i, 1, better_out, error_out));
    }
    return QE_OK;
}

/* One walk along the path. 1: something became better. */
static qe_status walk(improver *on, int *better_out, qe_error *error_out) {
    note_places(on);
    trace_path(on);
    *better_out = 0;
    for (uint32_t i = 0; i + 1 < on->path_count && !*better_out && on->work < on->work_most; i++) {
        if (on->path[i] != on->path[i + 1] + 1 || rank_at(on, on->path[i]) != rank_at(on, on->path[i + 1])) continue;
        QE_TRY(try_pair(on, on->path[i], better_out, error_out));
    }
    return QE_OK;
}

qe_status qe_search_improve(const qe_search_problem *problem, qe_schedule *schedule, qe_simulation *simulation,
                            uint64_t work, qe_search_score *score, uint32_t *tried, qe_error *error_out) {
    improver on = {.problem = problem, .schedule = schedule, .simulation = simulation, .score = score,
                   .work_most = work, .tried = tried};
    size_t actions = (size_t)problem->ranks * problem->row_count;
    on.place = malloc(actions * sizeof *on.place);
    on.path = malloc(actions * sizeof *on.path);
    qe_status status = QE_OK;
    if (on.place == NULL || on.path == NULL) status = qe_error_set(error_out, QE_ERROR_MEMORY, NULL,
                                                                   "no memory to improve a schedule");
    if (status == QE_OK) status = qe_search_measure(problem, schedule, simulation, score, error_out);
    for (int better = 1; status == QE_OK && better && on.work < work;) status = walk(&on, &better, error_out);
    free(on.place);
    free(on.path);
    return status;
}
