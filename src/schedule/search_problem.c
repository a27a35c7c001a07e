/* search_problem.c - a placement with its times, what it needs at least, and what no order can beat. */
#include "schedule/search_problem.h"

#include <math.h>
#include <stdlib.h>

#include "base/arena.h"
#include "base/assert.h"
#include "schedule/costs.h"

#define ROUNDING 1e-12 /* of sums of sizes, in parts of the limit */
#define GRAIN 1e-9     /* of times, in parts of the longest */

static const char *const PLACEMENTS[QE_SEARCH_PLACEMENTS] = {"any", "linear", "looped", "v"};

int qe_search_admits(const qe_search_request *request, qe_search_placement placement) {
    if (request->placement != QE_SEARCH_ANY && request->placement != placement) return 0;
    return (placement == QE_SEARCH_LINEAR) == (request->chunks == 1);
}

static qe_status check_sizes(const qe_search_request *request, qe_error *error_out) {
    static const char *const what[] = {"ranks", "chunks", "microbatches"};
    static const uint32_t most[] = {QE_SEARCH_RANKS_MAX, QE_CHUNKS_MAX, QE_MICROBATCHES_MAX};
    uint32_t value[] = {request->ranks, request->chunks, request->microbatches};
    for (int i = 0; i < 3; i++) {
        if (value[i] >= 1 && value[i] <= most[i]) continue;
        return qe_error_set(error_out, value[i] == 0 ? QE_ERROR_ARGUMENT : QE_ERROR_LIMIT, NULL,
                            "%s is %u; a search takes 1 to %u", what[i], value[i], most[i]);
    }
    uint64_t stages = (uint64_t)request->ranks * request->chunks;
    uint64_t actions = stages * request->microbatches * QE_SEARCH_KINDS;
    if (stages <= QE_STAGES_MAX && actions <= QE_SEARCH_ACTIONS_MAX) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_LIMIT, "use fewer microbatches, chunks or ranks, or a named order",
                        "this is a search over %llu actions of %llu stages; at most %d and %d are taken",
                        (unsigned long long)actions, (unsigned long long)stages, QE_SEARCH_ACTIONS_MAX, QE_STAGES_MAX);
}

static qe_status check_placement(const qe_search_request *request, qe_error *error_out) {
    if (request->placement >= QE_SEARCH_PLACEMENTS || request->metric > QE_SEARCH_STAGE) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "a placement or metric that search.h does not name");
    }
    if (request->placement == QE_SEARCH_LINEAR && request->chunks != 1) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "use 1 chunk, or the placement looped or v",
                            "%u chunks on each rank; linear has 1", request->chunks);
    }
    if (request->placement > QE_SEARCH_LINEAR && request->chunks == 1) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "use 2 chunks, or the placement linear",
                            "1 chunk on each rank; %s has several", PLACEMENTS[request->placement]);
    }
    return QE_OK;
}

static qe_status check_times(const qe_search_request *request, qe_error *error_out) {
    QE_TRY(qe_costs_check(&request->times, request->ranks * request->chunks, error_out));
    if (isfinite(request->memory_limit) && request->memory_limit >= 0.0) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, "use 0 for none", "the memory limit is negative or not a number");
}

qe_status qe_search_request_check(const qe_search_request *request, qe_error *error_out) {
    QE_TRY(check_sizes(request, error_out));
    QE_TRY(check_placement(request, error_out));
    return check_times(request, error_out);
}

/* ---- the problem ---- */

static uint32_t rank_of(const qe_search_request *request, qe_search_placement placement, uint32_t stage) {
    uint32_t at = stage % request->ranks, back = placement == QE_SEARCH_V && (stage / request->ranks) % 2 == 1;
    return back ? request->ranks - 1 - at : at;
}

static const qe_stage_cost *cost_of(const qe_search_request *request, uint32_t stage) {
    return &request->times.costs[request->times.cost_count == 1 ? 0 : stage];
}

static double hop(const qe_search_request *request, double size) {
    return request->times.latency + (request->times.bandwidth > 0.0 ? size / request->times.bandwidth : 0.0);
}

static void fill_stage(qe_search_problem *problem, qe_search_placement placement, uint32_t stage) {
    const qe_search_request *request = problem->request;
    const qe_stage_cost *cost = cost_of(request, stage);
    uint32_t rank = rank_of(request, placement, stage);
    qe_search_stage *out = &problem->stage[stage];
    *out = (qe_search_stage){.rank = rank,
                             .taken = cost->keep[QE_KEEP_I] + cost->keep[QE_KEEP_X] + cost->keep[QE_KEEP_W],
                             .freed_by_input = cost->keep[QE_KEEP_I],
                             .freed_by_weight = cost->keep[QE_KEEP_X] + cost->keep[QE_KEEP_W]};
    for (int kind = 0; kind < QE_SEARCH_KINDS; kind++) out->time[kind] = cost->time[kind];
    if (stage + 1 < problem->stages && rank_of(request, placement, stage + 1) != rank) {
        out->forward = hop(request, cost->output);
    }
    if (stage > 0 && rank_of(request, placement, stage - 1) != rank) out->backward = hop(request, cost->gradient);
}

/* The shortest that I and W, or B, can be. */
static double backward_time(const qe_search_problem *problem, uint32_t stage) {
    const double *time = cost_of(problem->request, stage)->time;
    return fmin(time[QE_ACTION_I] + time[QE_ACTION_W], time[QE_ACTION_B]);
}

/* A rank works for so long and cannot begin before its first stage is reached; a microbatch goes all the way. Pairs may
 * make everything shorter. */
static void fill_bounds(qe_search_problem *problem) {
    double least_work[QE_SEARCH_RANKS_MAX] = {0};
    double arrival = 0.0, way = 0.0, longest = 0.0, most = 0.0, pair = problem->request->times.pair;
    for (uint32_t s = 0; s < problem->stages; s++) {
        const qe_search_stage *stage = &problem->stage[s];
        uint32_t chunk = s / problem->ranks;
        problem->stage_of[stage->rank * problem->chunks + chunk] = s;
        double backward = backward_time(problem, s);
        if (chunk == 0) problem->head[stage->rank] = arrival;
        arrival += stage->time[QE_ACTION_F] + stage->forward;
        way += stage->time[QE_ACTION_F] + stage->forward + stage->backward;
        way += s == 0 ? backward : fmin(backward, stage->time[QE_ACTION_I]);
        least_work[stage->rank] += problem->microbatches * (stage->time[QE_ACTION_F] + backward);
        for (int kind = 0; kind < QE_SEARCH_KINDS; kind++) {
            problem->work[stage->rank] += problem->microbatches * stage->time[kind];
            longest = fmax(longest, stage->time[kind]);
        }
    }
    int makespan = problem->request->metric == QE_SEARCH_MAKESPAN;
    for (uint32_t rank = 0; rank < problem->ranks; rank++) {
        most = fmax(most, least_work[rank] + (makespan ? problem->head[rank] : 0.0));
    }
    /* The way ends on the rank where it began, so it is part of a span, too. */
    problem->bound = fmax(most, way) * (pair > 0.0 && pair < 1.0 ? pair : 1.0);
    problem->grain = GRAIN * longest;
}

/* All F of a microbatch come before its first backward, so a rank keeps a whole one at least; with B that is all. */
static double least_limit(const qe_search_problem *problem) {
    double least = 0.0;
    for (uint32_t rank = 0; rank < problem->ranks; rank++) {
        double kept = 0.0;
        for (uint32_t c = 0; c < problem->chunks; c++) {
            const double *keep = cost_of(problem->request, problem->stage_of[rank * problem->chunks + c])->keep;
            kept += keep[QE_KEEP_I] + keep[QE_KEEP_X];
        }
        least = fmax(least, kept);
    }
    return least;
}

static qe_status allocate(const qe_search_request *request, qe_search_problem **problem_out, qe_error *error_out) {
    uint32_t stages = request->ranks * request->chunks;
    qe_arena arena = {0};
    size_t self = qe_arena_add(&arena, sizeof(qe_search_problem), QE_ALIGN_BYTES);
    size_t stage = qe_arena_add_array(&arena, stages, sizeof(qe_search_stage), QE_ALIGN_BYTES);
    size_t stage_of = qe_arena_add_array(&arena, stages, sizeof(uint32_t), QE_ALIGN_BYTES);
    size_t work = qe_arena_add_array(&arena, request->ranks, sizeof(double), QE_ALIGN_BYTES);
    size_t head = qe_arena_add_array(&arena, request->ranks, sizeof(double), QE_ALIGN_BYTES);
    void *block;
    QE_TRY(qe_arena_allocate(&arena, &block, error_out));
    char *bytes = block;
    qe_search_problem *problem = (qe_search_problem *)(bytes + self);
    *problem = (qe_search_problem){.request = request, .ranks = request->ranks, .chunks = request->chunks,
                                   .stages = stages, .microbatches = request->microbatches,
                                   .row_count = QE_SEARCH_KINDS * request->chunks * request->microbatches,
                                   .limit = INFINITY};
    problem->stage = (qe_search_stage *)(bytes + stage);
    problem->stage_of = (uint32_t *)(bytes + stage_of);
    problem->work = (double *)(bytes + work);
    problem->head = (double *)(bytes + head);
    *problem_out = problem;
    return QE_OK;
}

qe_status qe_search_problem_create(const qe_search_request *request, qe_search_placement placement,
                                   qe_search_problem **problem_out, double *least_out, qe_error *error_out) {
    qe_search_problem *problem;
    QE_TRY(allocate(request, &problem, error_out));
    for (uint32_t stage = 0; stage < problem->stages; stage++) fill_stage(problem, placement, stage);
    fill_bounds(problem);
    problem->is_v = placement == QE_SEARCH_V && request->chunks == 2;
    if (request->memory_limit > 0.0) problem->limit = request->memory_limit * (1.0 + ROUNDING);
    *least_out = least_limit(problem);
    if (*least_out > problem->limit) {
        qe_search_problem_destroy(problem);
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "no order keeps less than one whole microbatch on a rank",
                            "the memory limit is %g; the least that any order obeys is %.9g", request->memory_limit,
                            *least_out);
    }
    *problem_out = problem;
    return QE_OK;
}

void qe_search_problem_destroy(qe_search_problem *problem) { free(problem); }
