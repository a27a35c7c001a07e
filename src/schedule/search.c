/* search.c - tries orders and keeps the best: the named ones, the papers' heuristic, and orders made under policies
 * that are bent as long as it helps; then the best is improved along its critical path. */
#include "schedule/search.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "schedule/order.h"
#include "schedule/search_exact.h"
#include "schedule/search_improve.h"
#include "schedule/search_problem.h"

enum {
    /* Actions looked at while policies are tried and bent, and while the best order is improved; each takes some tens
     * of nanoseconds, so a search is over in seconds whatever its size. */
    POLICY_WORK = 32 << 20,
    IMPROVE_WORK = 32 << 20,
};

typedef struct search {
    const qe_search_request *request;
    qe_search_problem *problem; /* of the placement that is searched */
    qe_search_lists *lists;
    double *ends;               /* room for [4][stages][microbatches] */
    double *waited;             /* [ranks] */
    qe_action *queue;           /* [stages][microbatches] */
    uint32_t *labels;           /* [3][stages] */
    uint32_t *cap, *best_cap;   /* [ranks] */
    qe_search_policy policy;    /* of the best listed order; cap NULL or best_cap */
    qe_search_score listed;     /* its score */
    qe_schedule scratch, best;  /* of this placement */
    qe_search_score score;      /* of the best; value INFINITY: there is none */
    qe_simulation simulation;
    qe_search_result *out;
    uint8_t origin, improved;
    uint64_t work;
} search;

/* ---- what an order is worth ---- */

static qe_status measure(search *on, const qe_schedule *schedule, qe_search_score *score_out, qe_error *error_out) {
    on->work += schedule->rank_begin[schedule->ranks];
    on->out->tried++;
    return qe_search_measure(on->problem, schedule, &on->simulation, score_out, error_out);
}

static void copy(const qe_schedule *from, qe_schedule *to) {
    memcpy(to->rank_begin, from->rank_begin, (from->ranks + 1u) * sizeof *to->rank_begin);
    memcpy(to->actions, from->actions, from->rank_begin[from->ranks] * sizeof *to->actions);
}

static void keep_better(search *on, const qe_schedule *schedule, qe_search_score score, qe_search_origin origin) {
    if (!qe_search_is_better(score, on->score, on->problem->grain)) return;
    on->score = score;
    on->origin = (uint8_t)origin;
    copy(schedule, &on->best);
}

/* ---- named orders ---- */

/* Are the gradients of each stage added in microbatch order? */
static int ascends(const qe_schedule *schedule, uint32_t *next) {
    memset(next, 0, schedule->stages * sizeof *next);
    for (uint32_t i = 0; i < schedule->rank_begin[schedule->ranks]; i++) {
        const qe_action *action = &schedule->actions[i];
        if (action->kind != QE_ACTION_W && action->kind != QE_ACTION_B) continue;
        if (action->microbatch != next[action->stage]++) return 0;
    }
    return 1;
}

/* Gives the k-th F of a stage to microbatch k, and so on. Microbatches are alike, so what the k-th one needs has come
 * no later than before, and as much is kept. Of the named orders only looped-bfs asks for it. */
static void relabel(qe_schedule *schedule, uint32_t *next) {
    memset(next, 0, QE_SEARCH_KINDS * (size_t)schedule->stages * sizeof *next);
    for (uint32_t i = 0; i < schedule->rank_begin[schedule->ranks]; i++) {
        qe_action *action = &schedule->actions[i];
        uint32_t kind = action->kind == QE_ACTION_B ? QE_ACTION_I : action->kind;
        action->microbatch = next[kind * schedule->stages + action->stage]++;
    }
}

/* Full backwards as I and W, one behind the other; pairs stay, as their halves belong together. */
static void split(const qe_schedule *from, qe_schedule *to) {
    qe_action *next = to->actions;
    for (uint32_t rank = 0; rank < from->ranks; rank++) {
        uint32_t begin = from->rank_begin[rank];
        for (uint32_t i = begin; i < from->rank_begin[rank + 1]; i++) {
            qe_action action = from->actions[i];
            int half = action.paired || (i > begin && from->actions[i - 1].paired);
            *next++ = action;
            if (action.kind != QE_ACTION_B || half) continue;
            next[-1].kind = QE_ACTION_I;
            *next = action;
            next++->kind = QE_ACTION_W;
        }
        to->rank_begin[rank + 1] = (uint32_t)(next - to->actions);
    }
}

static int lives_here(const search *on, const qe_schedule *schedule) {
    if (schedule->reversed > 0) return 0;
    for (uint32_t stage = 0; stage < schedule->stages; stage++) {
        if (schedule->stage_rank[stage] != on->problem->stage[stage].rank) return 0;
    }
    return 1;
}

static void note_named(search *on, const char *name, double value) {
    if (isinf(value) || (on->out->named != NULL && on->out->named_value <= value)) return;
    on->out->named = name;
    on->out->named_value = value;
}

static qe_status judge_named(search *on, const char *name, qe_schedule *schedule, qe_error *error_out) {
    qe_search_score score;
    if (!ascends(schedule, on->labels)) relabel(schedule, on->labels);
    QE_TRY(measure(on, schedule, &score, error_out));
    note_named(on, name, score.value);
    keep_better(on, schedule, score, QE_SEARCH_NAMED);
    split(schedule, &on->scratch);
    QE_TRY(measure(on, &on->scratch, &score, error_out));
    keep_better(on, &on->scratch, score, QE_SEARCH_NAMED);
    return QE_OK;
}

static qe_status try_named(search *on, const char *name, qe_error *error_out) {
    qe_schedule schedule;
    qe_schedule_request request = {.name = name, .ranks = on->problem->ranks, .chunks = on->problem->chunks,
                                   .microbatches = on->problem->microbatches};
    qe_status status = qe_schedule_generate(&request, &schedule, error_out);
    if (status == QE_ERROR_ARGUMENT || status == QE_ERROR_LIMIT) return QE_OK; /* not for these sizes */
    if (status != QE_OK) return status;
    if (lives_here(on, &schedule)) status = judge_named(on, name, &schedule, error_out);
    qe_schedule_deinit(&schedule);
    return status;
}

static qe_status try_all_named(search *on, qe_error *error_out) {
    for (uint32_t i = 0; qe_schedule_name(i) != NULL; i++) QE_TRY(try_named(on, qe_schedule_name(i), error_out));
    return QE_OK;
}

/* ---- made orders ---- */

static void lay_rows(const search *on, qe_schedule *schedule) {
    for (uint32_t rank = 0; rank <= on->problem->ranks; rank++) {
        schedule->rank_begin[rank] = rank * on->problem->row_count;
    }
}

static qe_status try_zero_bubble(search *on, qe_error *error_out) {
    if (on->problem->chunks != 1) return QE_OK;
    lay_rows(on, &on->scratch);
    for (uint32_t bits = 0; bits < QE_SEARCH_SWITCHES; bits++) {
        qe_search_switches switches = {bits & 1, (bits >> 1) & 1, (bits >> 2) & 1};
        qe_search_score score;
        if (!qe_search_zero_bubble(on->problem, &switches, on->ends, on->scratch.actions)) continue;
        QE_TRY(measure(on, &on->scratch, &score, error_out));
        keep_better(on, &on->scratch, score, QE_SEARCH_ZERO_BUBBLE);
    }
    return QE_OK;
}

/* What the ranks waited is allowed to them again, as long as the longest wait becomes shorter by it. */
static qe_status try_switches_v(search *on, const qe_search_v_switches *switches, qe_error *error_out) {
    const double *allowed = NULL;
    for (double before = INFINITY;;) {
        qe_search_score score;
        double longest = qe_search_zero_bubble_v(on->problem, switches, allowed, on->ends, on->queue,
                                                 on->scratch.actions, on->waited);
        if (longest < 0.0) return QE_OK;
        QE_TRY(measure(on, &on->scratch, &score, error_out));
        keep_better(on, &on->scratch, score, QE_SEARCH_ZERO_BUBBLE);
        if (longest >= before - on->problem->grain) return QE_OK;
        before = longest;
        allowed = on->waited;
    }
}

static qe_status try_zero_bubble_v(search *on, qe_error *error_out) {
    if (!on->problem->is_v) return QE_OK;
    lay_rows(on, &on->scratch);
    for (uint32_t bits = 0; bits < QE_SEARCH_V_SWITCHES; bits++) {
        qe_search_v_switches switches = {bits & 1, (bits >> 1) & 1};
        QE_TRY(try_switches_v(on, &switches, error_out));
    }
    return QE_OK;
}

/* Remembers the policy where its order is the best of all policies' so far. */
static qe_status try_policy(search *on, const qe_search_policy *policy, int *better_out, qe_error *error_out) {
    qe_search_score score;
    *better_out = 0;
    lay_rows(on, &on->scratch);
    on->work += on->problem->ranks * (uint64_t)on->problem->row_count; /* making them */
    double expected = qe_search_lists_make(on->lists, policy, on->scratch.actions);
    if (expected > on->listed.value + on->problem->grain) return QE_OK;
    QE_TRY(measure(on, &on->scratch, &score, error_out));
    keep_better(on, &on->scratch, score, QE_SEARCH_LISTED);
    *better_out = qe_search_is_better(score, on->listed, on->problem->grain);
    if (!*better_out) return QE_OK;
    on->listed = score;
    on->policy = *policy;
    if (policy->cap == NULL) return QE_OK;
    if (policy->cap != on->best_cap) memcpy(on->best_cap, policy->cap, on->problem->ranks * sizeof *on->best_cap);
    on->policy.cap = on->best_cap;
    return QE_OK;
}

/* Most F ahead, from the first rank to the last, in microbatches of a whole rank: `flat` + `steep` times the ranks
 * from here on. */
typedef struct shape {
    double flat, steep;
} shape;

static const shape SHAPES[] = {{0, 1}, {0, 2}, {0, 1.5}, {0.5, 0.5}, {0.5, 1}, {0, 0.5}, {0.5, 0}, {1, 0}, {2, 0}};
enum { SHAPE_COUNT = sizeof SHAPES / sizeof SHAPES[0] };

static void set_caps(const search *on, const shape *as, uint32_t *cap) {
    for (uint32_t rank = 0; rank < on->problem->ranks; rank++) {
        double whole = as->flat * on->problem->ranks + as->steep * (on->problem->ranks - rank);
        double chunks = ceil(whole * on->problem->chunks);
        cap[rank] = chunks < 1.0 ? 1 : (uint32_t)chunks;
    }
}

/* How W go into gaps: the least part that takes one, and how far a rank may rather wait: a part of the way from the
 * bound to the best order; negative: not at all. */
typedef struct filling {
    double fill, wait;
} filling;

static const filling FILLINGS[] = {{0, -1}, {0.5, -1}, {2, -1}, {0, 0}, {0, 0.5}, {0, 1}};
enum { FILLING_COUNT = sizeof FILLINGS / sizeof FILLINGS[0] };

static double target_of(const search *on, double wait) {
    if (wait < 0.0 || isinf(on->score.value)) return 0.0;
    return on->problem->bound + wait * (on->score.value - on->problem->bound);
}

static qe_status try_fillings(search *on, qe_search_policy policy, qe_error *error_out) {
    int better;
    for (size_t i = 0; i < FILLING_COUNT && on->work < POLICY_WORK; i++) {
        policy.fill = FILLINGS[i].fill;
        policy.target = target_of(on, FILLINGS[i].wait);
        QE_TRY(try_policy(on, &policy, &better, error_out));
    }
    return QE_OK;
}

static qe_status try_policies(search *on, qe_error *error_out) {
    uint32_t preferences = on->problem->chunks == 1 ? 2 : 8;
    for (uint32_t i = 0; i <= SHAPE_COUNT; i++) {
        if (i > 0) set_caps(on, &SHAPES[i - 1], on->cap);
        for (uint32_t bits = 0; bits < preferences; bits++) {
            qe_search_policy policy = {.forward_first = bits & 1, .forward_early = (bits >> 1) & 1,
                                       .backward_early = (bits >> 2) & 1, .cap = i == 0 ? NULL : on->cap};
            QE_TRY(try_fillings(on, policy, error_out));
        }
    }
    return QE_OK;
}

/* The best policy with one cap more or less, or those of all ranks up to one. */
static qe_status bend_caps(search *on, int *better_out, qe_error *error_out) {
    uint32_t ranks = on->problem->ranks;
    *better_out = 0;
    if (on->policy.cap == NULL) return QE_OK;
    for (uint32_t i = 0; i < 4 * ranks && on->work < POLICY_WORK; i++) {
        int better, more = i & 1, many = (i >> 1) & 1;
        uint32_t last = i / 4;
        memcpy(on->cap, on->best_cap, ranks * sizeof *on->cap);
        for (uint32_t rank = many ? 0 : last; rank <= last; rank++) {
            if (more) on->cap[rank]++;
            else if (on->cap[rank] > 1) on->cap[rank]--;
        }
        qe_search_policy policy = on->policy;
        policy.cap = on->cap;
        QE_TRY(try_policy(on, &policy, &better, error_out));
        *better_out |= better;
    }
    return QE_OK;
}

static qe_status bend_target(search *on, int *better_out, qe_error *error_out) {
    static const double waits[] = {0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5};
    *better_out = 0;
    for (size_t i = 0; i < sizeof waits / sizeof waits[0] && on->work < POLICY_WORK; i++) {
        int better;
        qe_search_policy policy = on->policy;
        policy.target = target_of(on, waits[i]);
        QE_TRY(try_policy(on, &policy, &better, error_out));
        *better_out |= better;
    }
    return QE_OK;
}

static qe_status bend(search *on, qe_error *error_out) {
    for (int better = 1; better && on->work < POLICY_WORK;) {
        int caps, target;
        QE_TRY(bend_target(on, &target, error_out));
        QE_TRY(bend_caps(on, &caps, error_out));
        better = caps || target;
    }
    return QE_OK;
}

static qe_status improve(search *on, qe_error *error_out) {
    qe_search_score before = on->score;
    QE_TRY(qe_search_improve(on->problem, &on->best, &on->simulation, IMPROVE_WORK, &on->score, &on->out->tried,
                             error_out));
    on->improved = (uint8_t)qe_search_is_better(on->score, before, on->problem->grain);
    return QE_OK;
}

/* Nothing can be better. */
static int is_done(const search *on) { return on->score.value <= on->problem->bound + on->problem->grain; }

static qe_status try_all_orders(search *on, qe_error *error_out) {
    qe_search_score score;
    if (!qe_search_exact_takes(on->problem)) return QE_OK;
    qe_search_verdict verdict = qe_search_exact(on->problem, on->score.value, on->scratch.actions);
    if (verdict.found) {
        lay_rows(on, &on->scratch);
        QE_TRY(measure(on, &on->scratch, &score, error_out));
        keep_better(on, &on->scratch, score, QE_SEARCH_EXACT);
    }
    if (verdict.proved) on->problem->bound = on->score.value;
    return QE_OK;
}

static qe_status run(search *on, qe_error *error_out) {
    static qe_status (*const parts[])(search *, qe_error *) = {try_all_named, try_zero_bubble, try_zero_bubble_v,
                                                               try_policies, bend, improve, try_all_orders};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0] && !is_done(on); i++) QE_TRY(parts[i](on, error_out));
    return QE_OK;
}

/* ---- a placement ---- */

static qe_status take_memory(search *on, qe_error *error_out) {
    const qe_search_problem *problem = on->problem;
    qe_schedule sizes = {.ranks = problem->ranks, .stages = problem->stages, .microbatches = problem->microbatches};
    uint32_t actions = problem->ranks * problem->row_count;
    on->ends = calloc(4 * (size_t)problem->stages * problem->microbatches, sizeof *on->ends);
    on->waited = calloc(problem->ranks, sizeof *on->waited);
    on->queue = calloc((size_t)problem->stages * problem->microbatches, sizeof *on->queue);
    on->labels = calloc(QE_SEARCH_KINDS * (size_t)problem->stages, sizeof *on->labels);
    on->cap = calloc(problem->ranks, sizeof *on->cap);
    on->best_cap = calloc(problem->ranks, sizeof *on->best_cap);
    if (on->ends == NULL || on->waited == NULL || on->queue == NULL || on->labels == NULL || on->cap == NULL ||
        on->best_cap == NULL) {
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to search a schedule");
    }
    QE_TRY(qe_search_lists_create(problem, &on->lists, error_out));
    QE_TRY(qe_schedule_allocate(&sizes, actions, &on->scratch, error_out));
    QE_TRY(qe_schedule_allocate(&sizes, actions, &on->best, error_out));
    for (uint32_t stage = 0; stage < problem->stages; stage++) {
        on->scratch.stage_rank[stage] = on->best.stage_rank[stage] = problem->stage[stage].rank;
    }
    return QE_OK;
}

static void give_back(search *on) {
    free(on->ends);
    free(on->waited);
    free(on->queue);
    free(on->labels);
    free(on->cap);
    free(on->best_cap);
    if (on->lists != NULL) qe_search_lists_destroy(on->lists);
    qe_schedule_deinit(&on->scratch);
    qe_schedule_deinit(&on->best);
    qe_simulation_deinit(&on->simulation);
    if (on->problem != NULL) qe_search_problem_destroy(on->problem);
}

/* The best of this placement becomes the result where it is better than what is there. */
static void hand_over(search *on, qe_search_placement placement) {
    qe_search_result *out = on->out;
    out->bound = out->bound == 0.0 ? on->problem->bound : fmin(out->bound, on->problem->bound);
    if (isinf(on->score.value)) return;
    if (out->schedule.ranks > 0 && out->value <= on->score.value) return;
    qe_schedule_deinit(&out->schedule);
    out->schedule = on->best;
    on->best = (qe_schedule){0};
    out->value = on->score.value;
    out->placement = (uint8_t)placement;
    out->origin = on->origin;
    out->improved = on->improved;
}

static qe_status search_placement(const qe_search_request *request, qe_search_placement placement,
                                  qe_search_result *out, double *least_out, qe_error *error_out) {
    search on = {.request = request, .out = out, .score = {INFINITY, INFINITY}, .listed = {INFINITY, INFINITY}};
    qe_status status = qe_search_problem_create(request, placement, &on.problem, least_out, error_out);
    if (status == QE_OK) status = take_memory(&on, error_out);
    if (status == QE_OK) status = run(&on, error_out);
    if (status == QE_OK) hand_over(&on, placement);
    give_back(&on);
    return status;
}

/* ---- the search ---- */

static qe_status prove(const qe_search_result *result, qe_error *error_out) {
    qe_certificate_request rules = {.transport = {.release = QE_RELEASE_PAIR}, .gradients = QE_GRADIENTS_ASCENDING};
    qe_certificate certificate;
    qe_status status = qe_schedule_certify(&result->schedule, &rules, &certificate, NULL, error_out);
    QE_ASSERT(status != QE_CONTRACT); /* every candidate is valid by its making */
    if (status == QE_OK) qe_certificate_deinit(&certificate);
    return status;
}

static qe_status finish(const qe_search_request *request, qe_search_result *result, qe_error *error_out) {
    qe_simulation_request times = request->times;
    qe_simulation simulation = {0};
    times.schedule = &result->schedule;
    qe_status status = prove(result, error_out);
    if (status == QE_OK) status = qe_simulation_run(&times, &simulation, error_out);
    if (status == QE_OK) {
        result->makespan = simulation.makespan;
        result->span = simulation.span;
        result->work = simulation.work;
        result->peak_kept = simulation.peak_kept;
    }
    qe_simulation_deinit(&simulation);
    return status;
}

static qe_status search_all(const qe_search_request *request, qe_search_result *result, qe_error *error_out) {
    static const qe_search_placement all[] = {QE_SEARCH_LINEAR, QE_SEARCH_LOOPED, QE_SEARCH_V};
    qe_status refusal = QE_OK;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        double least;
        if (!qe_search_admits(request, all[i])) continue;
        qe_status status = search_placement(request, all[i], result, &least, error_out);
        if (status == QE_ERROR_ARGUMENT) refusal = status; /* another placement may do with this memory */
        else if (status != QE_OK) return status;
    }
    return result->schedule.ranks > 0 ? QE_OK : refusal;
}

qe_status qe_schedule_search(const qe_search_request *request, qe_search_result *result_out, qe_error *error_out) {
    qe_search_result result = {0};
    QE_TRY(qe_search_request_check(request, error_out));
    qe_status status = search_all(request, &result, error_out);
    if (status == QE_OK) status = finish(request, &result, error_out);
    if (status == QE_OK) *result_out = result;
    else qe_search_result_deinit(&result);
    return status;
}

void qe_search_result_deinit(qe_search_result *result) {
    qe_schedule_deinit(&result->schedule);
    *result = (qe_search_result){0};
}
