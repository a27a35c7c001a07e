/* plan.c - makes and certifies a plan: schedule check, one program per rank, ledger, deadlock. */
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "plan/build.h"

enum { SHARING_WORTH = 100 }; /* a hundredth of the slots' memory */

const qe_pool *qe_rank_plan_pool(const qe_rank_plan *rank, uint32_t stage, qe_slot_kind kind) {
    for (uint32_t i = 0; i < rank->pool_count; i++)
        if (rank->pools[i].stage == stage && rank->pools[i].kind == kind) return &rank->pools[i];
    return NULL;
}

void qe_plan_resolve_slot(const qe_plan *plan, uint32_t stage, qe_slot_kind kind, uint32_t *stage_out,
                          qe_slot_kind *kind_out) {
    *stage_out = stage;
    *kind_out = kind;
    if (kind == QE_SLOT_OUT_F && stage + 1 < plan->stages && plan->stage_rank[stage + 1] == plan->stage_rank[stage]) {
        *stage_out = stage + 1;
        *kind_out = QE_SLOT_IN_F;
    } else if (kind == QE_SLOT_OUT_B && stage > 0 && plan->stage_rank[stage - 1] == plan->stage_rank[stage]) {
        *stage_out = stage - 1;
        *kind_out = QE_SLOT_IN_B;
    }
}

int qe_plan_adds_apart(const qe_plan *plan, uint32_t weight) {
    const qe_weight_info *info = plan->model_ops->weight(plan->model, weight);
    return plan->options.placement == QE_GRADIENT_COPY && plan->options.sums_apart &&
           info->deposited_by == QE_ACTION_W && qe_weight_uses(info) == 1;
}

int qe_plan_fills_ahead(const qe_plan *plan, const qe_rank_plan *rank, uint32_t weight) {
    const qe_weight_place *place = &rank->places[weight];
    const qe_plan_options *options = &plan->options;
    return options->fill_ahead && options->cache_weights && !options->forward_only && place->cache_object != QE_NONE &&
           place->scale_object[QE_SCALE_W] != QE_NONE;
}

void qe_plan_frame_objects(const qe_plan *plan, const qe_rank_plan *rank, const qe_unit *unit, qe_frame *frame) {
    frame->apart = plan->options.placement == QE_GRADIENT_COPY && plan->options.sums_apart;
    frame->work_object = rank->work_object;
    frame->work_bytes = plan->model_ops->work_bytes(plan->model);
    frame->workspace_object = rank->workspace_object;
    frame->workspace_bytes = plan->model_ops->workspace_bytes(plan->model);
    frame->tokens_object = rank->tokens_object;
    frame->loss_object = rank->loss_object;
    for (int kind = 0; kind < QE_SLOT_KINDS; kind++) {
        qe_slot_place *place = &frame->slot[kind];
        place->object = QE_NONE;
        if (unit->slot[kind] == QE_NONE) continue;
        uint32_t stage;
        qe_slot_kind resolved;
        qe_plan_resolve_slot(plan, unit->stage, (qe_slot_kind)kind, &stage, &resolved);
        const qe_pool *pool = qe_rank_plan_pool(rank, stage, resolved);
        QE_ASSERT(pool != NULL);
        place->object = pool->objects[unit->slot[kind]];
        place->generation = unit->generation[kind];
        place->stage = pool->stage;
    }
}

static void rank_plan_deinit(qe_rank_plan *rank) {
    qe_program_deinit(&rank->program);
    for (uint32_t i = 0; i < rank->pool_count; i++) {
        free(rank->pools[i].objects);
        free(rank->pools[i].regions);
    }
    free(rank->pools);
    free(rank->regions);
    free(rank->places);
    free(rank->units);
    free(rank->item_op);
    free(rank->item_unit);
    memset(rank, 0, sizeof *rank);
}

static void build_deinit(qe_build *build) {
    if (build->pool_states != NULL) qe_build_pools_deinit(build);
    free(build->pool_states);
    qe_build_edges_deinit(build);
    free(build->drafts);
    free(build->effects);
    free(build->waits);
    free(build->filled);
    free(build->deposited);
    free(build->tallied);
}

static qe_status rank_parts(qe_build *build) {
    QE_TRY(qe_build_objects(build));
    QE_TRY(qe_build_pools(build));
    QE_TRY(qe_build_edges(build));
    QE_TRY(qe_build_units(build));
    return qe_build_program(build);
}

/* How transfers are given memory. Each way is less likely to let streams wait for each other in a circle. */
typedef enum transfers { SHARED, APART, UNBOUNDED, TRANSFERS } transfers;

static qe_status rank_build(const qe_plan *plan, const qe_schedule *schedule, uint32_t rank, transfers how,
                            qe_sharing sharing, qe_rank_plan *out, qe_error *error_out) {
    qe_build build = {.plan = plan,
                      .schedule = schedule,
                      .rank = rank,
                      .out = out,
                      .unbounded_sends = how == UNBOUNDED,
                      .shares_boundary = how == SHARED,
                      .sharing = sharing,
                      .error = error_out};
    qe_program_init(&build.out->program);
    size_t pools = (size_t)plan->stages * QE_SLOT_KINDS;
    build.out->pools = calloc(pools, sizeof *build.out->pools);
    build.out->places = calloc(plan->weight_count, sizeof *build.out->places);
    build.pool_states = calloc(pools, sizeof *build.pool_states);
    build.filled = calloc(plan->stages, 1);
    build.deposited = calloc(plan->stages, 2);
    build.tallied = calloc(plan->weight_count + 1u, 1);
    qe_status status = QE_OK;
    if (!build.out->pools || !build.out->places || !build.pool_states || !build.filled || !build.deposited ||
        !build.tallied)
        status = qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the plan of rank %u", rank);
    if (status == QE_OK) status = rank_parts(&build);
    for (uint32_t i = 0; i < build.out->region_count; i++) build.out->slot_bytes += build.out->regions[i].bytes;
    build_deinit(&build);
    return status;
}

static int holds_one_stage(const qe_plan *plan, uint32_t rank) {
    uint32_t stages = 0;
    for (uint32_t stage = 0; stage < plan->stages; stage++) stages += plan->stage_rank[stage] == rank;
    return stages == 1;
}

/* Slots are handed out in program order, without looking ahead, so memory that is shared more may be more memory: a
 * small slot may have taken what a large one needs next. The least of all ways is taken, and sharing only where it is
 * worth the graphs that it may cost. */
static qe_status rank_create(qe_plan *plan, const qe_schedule *schedule, uint32_t rank, transfers how,
                             qe_error *error_out) {
    qe_rank_plan *best = &plan->rank[rank];
    QE_TRY(rank_build(plan, schedule, rank, how, QE_SHARING_NONE, best, error_out));
    for (int sharing = QE_SHARING_NONE + 1; plan->options.share_slots && sharing < QE_SHARINGS; sharing++) {
        qe_rank_plan other = {0};
        if (sharing == QE_SHARING_KIND && holds_one_stage(plan, rank)) continue; /* the same as none */
        qe_status status = rank_build(plan, schedule, rank, how, (qe_sharing)sharing, &other, error_out);
        int better = status == QE_OK && other.slot_bytes < best->slot_bytes - best->slot_bytes / SHARING_WORTH;
        rank_plan_deinit(better ? best : &other);
        if (better) *best = other;
        QE_TRY(status);
    }
    return QE_OK;
}

static qe_status ranks_create(qe_plan *plan, const qe_schedule *schedule, transfers how, qe_error *error_out) {
    for (uint32_t rank = 0; rank < plan->ranks; rank++) {
        rank_plan_deinit(&plan->rank[rank]);
        QE_TRY(rank_create(plan, schedule, rank, how, error_out));
    }
    return qe_plan_deadlock_check(plan, error_out);
}

static qe_status certify(const qe_plan *plan, qe_violations *violations_out, qe_error *error_out) {
    for (uint32_t rank = 0; rank < plan->ranks; rank++) {
        qe_ledger *ledger;
        QE_TRY(qe_ledger_create(&plan->rank[rank].program, &ledger, error_out));
        qe_status status = qe_ledger_certify(ledger, violations_out, error_out);
        qe_ledger_destroy(ledger);
        QE_TRY(status);
    }
    return QE_OK;
}

static qe_status sizes_check(const qe_schedule *schedule, const qe_model_ops *ops, const void *model,
                             qe_error *error_out) {
    uint32_t most = ops->stages_max(model);
    if (schedule->stages > most)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "use fewer ranks or chunks, or a model with more layers",
                            "%u stages for a model of %u layers; a stage needs a layer", schedule->stages, most);
    if (schedule->ranks > QE_RANKS_MAX)
        return qe_error_set(error_out, QE_ERROR_LIMIT, "use fewer ranks", "%u ranks; at most %d run in one process",
                            schedule->ranks, QE_RANKS_MAX);
    return QE_OK;
}

static qe_status plan_fill(qe_plan *plan, const qe_schedule *schedule, qe_violations *violations_out,
                           qe_error *error_out) {
    plan->rank = calloc(plan->ranks, sizeof *plan->rank);
    plan->stage_rank = malloc(plan->stages * sizeof *plan->stage_rank);
    if (plan->rank == NULL || plan->stage_rank == NULL)
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a plan of %u ranks", plan->ranks);
    memcpy(plan->stage_rank, schedule->stage_rank, plan->stages * sizeof *plan->stage_rank);
    qe_status status = QE_CONTRACT;
    for (int how = plan->options.share_slots ? SHARED : APART; status == QE_CONTRACT && how < TRANSFERS; how++)
        status = ranks_create(plan, schedule, (transfers)how, error_out);
    QE_TRY(status);
    return certify(plan, violations_out, error_out);
}

static qe_status both_ways_check(const qe_schedule *schedule, qe_error *error_out) {
    if (schedule->reversed == 0) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                        "use dualpipev, the same order on a V: it holds every weight once",
                        "a schedule that runs both ways (dualpipe) holds the weights of every stage on two ranks, "
                        "whose gradients would have to be added; that is not built");
}

static qe_status evaluation_check(const qe_schedule *schedule, const qe_plan_options *options, qe_error *error_out) {
    uint32_t count = options->forward_only ? schedule->rank_begin[schedule->ranks] : 0;
    for (uint32_t i = 0; i < count; i++) {
        if (schedule->actions[i].kind != QE_ACTION_F)
            return qe_error_set(error_out, QE_ERROR_ARGUMENT, "use a schedule of forwards alone, or plan for training",
                                "a plan for evaluation keeps nothing for backwards, and the schedule has them");
    }
    return QE_OK;
}

qe_status qe_plan_create(const qe_schedule *schedule, const qe_model_ops *ops, const void *model,
                         const qe_plan_options *options, qe_plan **plan_out, qe_violations *violations_out,
                         qe_counterexample *counterexample_out, qe_error *error_out) {
    memset(violations_out, 0, sizeof *violations_out);
    memset(counterexample_out, 0, sizeof *counterexample_out);
    QE_TRY(qe_schedule_check(schedule, counterexample_out, error_out));
    QE_TRY(both_ways_check(schedule, error_out));
    QE_TRY(sizes_check(schedule, ops, model, error_out));
    QE_TRY(evaluation_check(schedule, options, error_out));
    qe_plan *plan = calloc(1, sizeof *plan);
    if (plan == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a plan");
    plan->ranks = schedule->ranks;
    plan->stages = schedule->stages;
    plan->microbatches = schedule->microbatches;
    plan->weight_count = ops->weight_count(model);
    plan->options = *options;
    plan->model_ops = ops;
    plan->model = model;
    qe_status status = plan_fill(plan, schedule, violations_out, error_out);
    if (status != QE_OK) {
        qe_plan_destroy(plan);
        return status;
    }
    *plan_out = plan;
    return QE_OK;
}

void qe_plan_destroy(qe_plan *plan) {
    if (plan == NULL) return;
    for (uint32_t rank = 0; plan->rank != NULL && rank < plan->ranks; rank++) rank_plan_deinit(&plan->rank[rank]);
    free(plan->rank);
    free(plan->stage_rank);
    free(plan);
}
