/* session_search.c - searches the schedule of a run. The search counts what microbatches keep; the plan counts the
 * memory of slots, which may be more. So an order that does not fit is searched again under a smaller limit. */
#include "cli/session_search.h"

#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "cli/session_evaluation.h"
#include "cli/times.h"
#include "qeffect/memory.h"
#include "qeffect/search.h"

enum { TRIES = 8 };
#define STEP 0.999 /* of the limit that would do if the plan needed as much more as before */

QE_STATIC_ASSERT((int)QE_STAGES_SETTING_V == (int)QE_SEARCH_V, "the setting names the placements");

typedef struct seeker {
    const qe_settings *settings;
    const qe_model *model;
    const qe_plan_options *plan;
    int evaluates; /* a plan for evaluation takes memory, too */
    qe_schedule shape;
    qe_times times;
    uint64_t most_bytes; /* that the slots of a rank may take; 0: no limit */
} seeker;

/* What the slots of a rank take, and what they may. */
typedef struct room {
    uint64_t slot_bytes, most_bytes;
} room;

static qe_status make_shape(seeker *on, qe_error *error_out) {
    const qe_settings_pipeline *p = &on->settings->pipeline;
    qe_schedule_request request = {.name = "sequential", .ranks = p->ranks, .chunks = p->chunks,
                                   .microbatches = p->microbatches};
    return qe_schedule_generate(&request, &on->shape, error_out);
}

/* Times are numbers and commas; a file's name has something else in it. */
static int is_list(const char *text) { return text[strspn(text, "0123456789.,+-eE ")] == '\0'; }

static qe_status read_times(seeker *on, qe_error *error_out) {
    static const char *const keys[] = {"pipeline.times", NULL};
    const char *text = on->settings->pipeline.times;
    int is_file = !is_list(text);
    qe_status status = is_file ? qe_times_load(text, &on->shape, 1.0, &on->times, error_out)
                               : qe_times_parse(text, &on->shape, 1.0, &on->times, error_out);
    if (is_file && status == QE_ERROR_IO) /* which may be a slip in a list */
        (void)snprintf(error_out->remedy, sizeof error_out->remedy,
                       "pipeline.times takes F,I,W[,C] of a rank, such as 1,1.2,0.7,0.1, or a file as bench --json "
                       "writes it");
    return status == QE_ERROR_ARGUMENT ? qe_settings_blame(on->settings, keys, error_out) : status;
}

/* A stage's slots by life, in bytes. What waits for a transfer counts with what it is kept beside. */
static void measure_slots(const seeker *on) {
    const qe_model_ops *ops = qe_model_table();
    for (uint32_t stage = 0; stage < on->shape.stages; stage++) {
        double bytes[QE_SLOT_KINDS];
        for (int kind = 0; kind < QE_SLOT_KINDS; kind++) {
            bytes[kind] = (double)ops->slot_bytes(on->model, stage, on->shape.stages, (qe_slot_kind)kind);
        }
        double *keep = on->times.costs[stage].keep;
        keep[QE_KEEP_I] = bytes[QE_SLOT_I] + bytes[QE_SLOT_IN_F];
        keep[QE_KEEP_X] = bytes[QE_SLOT_X];
        keep[QE_KEEP_W] = bytes[QE_SLOT_Y];
    }
}

static qe_status make_plan(const seeker *on, const qe_schedule *schedule, const qe_plan_options *options,
                           qe_plan **plan_out, qe_error *error_out) {
    qe_violations violations;
    qe_counterexample counterexample = {0};
    qe_status status = qe_plan_create(schedule, qe_model_table(), on->model, options, plan_out, &violations,
                                      &counterexample, error_out);
    qe_counterexample_deinit(&counterexample);
    return status;
}

static qe_status make_training(const seeker *on, const qe_schedule *schedule, qe_plan **plan_out,
                               qe_error *error_out) {
    qe_plan_options options = *on->plan;
    /* the baseline runs an order of its own, and the limit is not about it */
    options.reuse_slots = options.share_slots = 1;
    return make_plan(on, schedule, &options, plan_out, error_out);
}

/* NULL where nothing is evaluated. */
static qe_status make_evaluation(const seeker *on, const qe_schedule *schedule, qe_plan **plan_out,
                                 qe_error *error_out) {
    qe_schedule forwards;
    *plan_out = NULL;
    if (!on->evaluates) return QE_OK;
    QE_TRY(qe_evaluation_schedule(schedule, &forwards, error_out));
    qe_status status = make_plan(on, &forwards, &qe_evaluation_options, plan_out, error_out);
    qe_schedule_deinit(&forwards);
    return status;
}

/* train.memory_limit is about everything: what a rank takes beside its training slots is taken off. */
static room room_of(const seeker *on, const qe_plan *training, const qe_plan *evaluation, uint32_t rank) {
    room at = {training->rank[rank].slot_bytes, on->settings->pipeline.memory_limit_bytes};
    uint64_t most = on->settings->train.memory_limit_bytes;
    if (at.most_bytes == 0) at.most_bytes = UINT64_MAX;
    if (most == 0) return at;
    qe_memory_ledger ledger = qe_memory_foretell(training, evaluation, rank);
    uint64_t rest = qe_memory_ledger_total(&ledger) - at.slot_bytes;
    uint64_t left = most > rest ? most - rest : 0;
    if (left < at.most_bytes) at.most_bytes = left;
    return at;
}

static int is_tighter(const room *a, const room *b) {
    return (double)a->slot_bytes * (double)b->most_bytes > (double)b->slot_bytes * (double)a->most_bytes;
}

/* Of the rank whose slots have the least room. */
static qe_status find_room(const seeker *on, const qe_schedule *schedule, room *room_out, qe_error *error_out) {
    qe_plan *training = NULL, *evaluation = NULL;
    QE_TRY(make_training(on, schedule, &training, error_out));
    qe_status status = make_evaluation(on, schedule, &evaluation, error_out);
    for (uint32_t rank = 0; status == QE_OK && rank < training->ranks; rank++) {
        room at = room_of(on, training, evaluation, rank);
        if (rank == 0 || is_tighter(&at, room_out)) *room_out = at;
    }
    qe_plan_destroy(training);
    qe_plan_destroy(evaluation);
    return status;
}

/* Weights are spread alike whatever the order, so any of them tells about how much is left for slots. */
static qe_status limit_slots(seeker *on, qe_error *error_out) {
    static const char *const limits[] = {"train.memory_limit", NULL};
    room any;
    if (on->settings->train.memory_limit_bytes == 0 && on->settings->pipeline.memory_limit_bytes == 0) return QE_OK;
    QE_TRY(find_room(on, &on->shape, &any, error_out));
    on->most_bytes = any.most_bytes;
    if (on->most_bytes > 0) return QE_OK;
    qe_error_set(error_out, QE_ERROR_ARGUMENT, "spread the weights over more ranks, or use a smaller model",
                 "train.memory_limit = %llu bytes; a rank takes as much without any slot",
                 (unsigned long long)on->settings->train.memory_limit_bytes);
    return qe_settings_blame(on->settings, limits, error_out);
}

/* The best order under a limit; *room_out of its plan where there is a limit at all. */
static qe_status search_under(seeker *on, double limit, qe_search_result *result_out, room *room_out,
                              qe_error *error_out) {
    const qe_settings_pipeline *p = &on->settings->pipeline;
    qe_search_request request = {
        .ranks = p->ranks, .chunks = p->chunks, .microbatches = p->microbatches, .placement = (uint8_t)p->stages,
        .memory_limit = limit,
        .times = {.costs = on->times.costs, .cost_count = on->shape.stages, .latency = on->times.hop,
                  .release = QE_RELEASE_OP, .gradient_early = 1}};
    QE_TRY(qe_schedule_search(&request, result_out, error_out));
    *room_out = (room){0};
    if (on->most_bytes == 0) return QE_OK;
    qe_status status = find_room(on, &result_out->schedule, room_out, error_out);
    if (status != QE_OK) qe_search_result_deinit(result_out);
    return status;
}

static qe_status search_within(seeker *on, qe_schedule *schedule_out, qe_error *error_out) {
    room best = {.slot_bytes = UINT64_MAX};
    double limit = (double)on->most_bytes;
    qe_status status = QE_OK;
    for (int i = 0; i < TRIES && status == QE_OK; i++) {
        qe_search_result result = {0};
        room at;
        status = search_under(on, limit, &result, &at, error_out);
        if (status == QE_OK && at.slot_bytes <= at.most_bytes) {
            *schedule_out = result.schedule;
            return QE_OK;
        }
        qe_search_result_deinit(&result);
        if (status != QE_OK) break;
        if (at.slot_bytes < best.slot_bytes) best = at;
        limit *= STEP * (double)at.most_bytes / (double)at.slot_bytes;
    }
    if (best.slot_bytes == UINT64_MAX) return status; /* even the search has refused the limit, and says why */
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL,
                        "slots may take %llu bytes of a rank; the least that was found is %llu bytes",
                        (unsigned long long)best.most_bytes, (unsigned long long)best.slot_bytes);
}

/* No order obeys the limit: the other one, where there are two, may be any. */
static qe_status blame_limit(const seeker *on, qe_error *error_out) {
    int is_of_slots = on->most_bytes == on->settings->pipeline.memory_limit_bytes;
    const char *limits[] = {is_of_slots ? "pipeline.memory_limit" : "train.memory_limit", NULL};
    (void)snprintf(error_out->remedy, sizeof error_out->remedy, "Raise %s%s, or use smaller microbatches.", limits[0],
                   is_of_slots ? "" : ", of which weights and the rest leave this to slots");
    return qe_settings_blame(on->settings, limits, error_out);
}

/* Too large for a search or a plan. */
static qe_status blame_sizes(const seeker *on, qe_error *error_out) {
    static const char *const sizes[] = {"pipeline.microbatches", "pipeline.ranks", "pipeline.chunks", NULL};
    return qe_settings_blame(on->settings, sizes, error_out);
}

qe_status qe_session_search(const qe_settings *settings, const qe_model *model, const qe_plan_options *plan,
                            int evaluates, qe_schedule *schedule_out, qe_error *error_out) {
    seeker on = {.settings = settings, .model = model, .plan = plan, .evaluates = evaluates};
    qe_status status = make_shape(&on, error_out);
    if (status == QE_OK) status = read_times(&on, error_out);
    if (status == QE_OK) measure_slots(&on);
    if (status == QE_OK) status = limit_slots(&on, error_out);
    if (status == QE_OK) {
        status = search_within(&on, schedule_out, error_out);
        if (status == QE_ERROR_ARGUMENT && on.most_bytes > 0) status = blame_limit(&on, error_out);
    }
    if (status == QE_ERROR_LIMIT) status = blame_sizes(&on, error_out);
    qe_times_deinit(&on.times);
    qe_schedule_deinit(&on.shape);
    return status;
}
