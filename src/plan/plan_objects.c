/* plan_objects.c - the streams, weights and buffers that a rank's program names. */
#include <stdio.h>
#include <string.h>
#include "base/assert.h"
#include "plan/build.h"

static qe_status add_object(qe_build *build, const qe_object *object, uint32_t *index_out) {
    return qe_program_add_object(&build->out->program, object, index_out, build->error);
}

static qe_status add_buffer(qe_build *build, const char *name, uint64_t bytes, uint32_t *index_out) {
    qe_object object = {.kind = QE_OBJECT_BUFFER, .bytes = bytes, .weight = QE_NONE, .scale = QE_NONE};
    snprintf(object.name, sizeof object.name, "%s", name);
    return add_object(build, &object, index_out);
}

static qe_object named(qe_object_kind kind, const char *name, const char *suffix) {
    qe_object object = {.kind = kind, .weight = QE_NONE, .scale = QE_NONE};
    int length = snprintf(object.name, sizeof object.name, "%s%s", name, suffix);
    QE_ASSERT(length < (int)sizeof object.name);
    return object;
}

/* How often a weight is quantized in a step: once, or before every forward and every input gradient. */
static uint32_t fills_per_step(const qe_build *build) {
    const qe_plan *plan = build->plan;
    if (plan->options.cache_weights) return 1;
    return plan->options.forward_only ? plan->microbatches : 2 * plan->microbatches;
}

static qe_status add_scales(qe_build *build, const qe_weight_info *info, qe_weight_place *place) {
    static const char *const suffix[QE_SCALE_ROLES] = {".x", ".w", ".dy"};
    const qe_plan *plan = build->plan;
    if (!info->scaled || plan->model_ops->recipe(plan->model)->kind != QE_RECIPE_DELAYED) return QE_OK;
    for (int role = 0; role < QE_SCALE_ROLES; role++) {
        qe_object scale = named(QE_OBJECT_SCALE, info->name, suffix[role]);
        if (!plan->options.forward_only) scale.due = role == QE_SCALE_W ? fills_per_step(build) : plan->microbatches;
        QE_TRY(add_object(build, &scale, &place->scale_object[role]));
    }
    return QE_OK;
}

static qe_status add_weight(qe_build *build, uint32_t index) {
    const qe_plan *plan = build->plan;
    const qe_weight_info *info = plan->model_ops->weight(plan->model, index);
    qe_weight_place *place = &build->out->places[index];
    qe_object weight = named(QE_OBJECT_WEIGHT, info->name, "");
    QE_TRY(add_object(build, &weight, &place->weight_object));
    if (!plan->options.forward_only) {
        qe_object grad = named(QE_OBJECT_GRAD, info->name, ".grad");
        grad.weight = place->weight_object;
        grad.due = plan->microbatches * qe_weight_uses(info);
        QE_TRY(add_object(build, &grad, &place->grad_object));
    }
    if (!info->quantized) return QE_OK;
    QE_TRY(add_scales(build, info, place));
    qe_object cache = named(QE_OBJECT_CACHE, info->name, ".cache");
    cache.weight = place->weight_object;
    cache.scale = place->scale_object[QE_SCALE_W];
    return add_object(build, &cache, &place->cache_object);
}

static qe_status add_weights(qe_build *build) {
    const qe_plan *plan = build->plan;
    for (uint32_t index = 0; index < plan->weight_count; index++) {
        qe_weight_place *place = &build->out->places[index];
        memset(place, 0, sizeof *place);
        place->weight_object = place->grad_object = place->cache_object = QE_NONE;
        for (int role = 0; role < QE_SCALE_ROLES; role++) place->scale_object[role] = QE_NONE;
        uint32_t stage = plan->model_ops->weight_stage(plan->model, index, plan->stages);
        if (plan->stage_rank[stage] == build->rank) QE_TRY(add_weight(build, index));
    }
    return QE_OK;
}

/* One word per gradient: those that a stage deposits in one action lie side by side. */
static qe_status add_tallies(qe_build *build) {
    static const int by[] = {QE_ACTION_I, QE_ACTION_W};
    const qe_plan *plan = build->plan;
    qe_rank_plan *out = build->out;
    out->deposits_object = QE_NONE;
    if (plan->options.forward_only) return QE_OK;
    for (int b = 0; b < 2; b++)
        for (uint32_t stage = 0; stage < plan->stages; stage++)
            for (uint32_t w = 0; plan->stage_rank[stage] == build->rank && w < plan->weight_count; w++)
                if (plan->model_ops->weight(plan->model, w)->deposited_by == by[b] &&
                    plan->model_ops->weight_stage(plan->model, w, plan->stages) == stage)
                    out->places[w].tally = out->tally_count++;
    return add_buffer(build, "deposits", out->tally_count * sizeof(uint64_t), &out->deposits_object);
}

qe_status qe_build_objects(qe_build *build) {
    const qe_plan *plan = build->plan;
    qe_rank_plan *out = build->out;
    QE_TRY(qe_program_add_stream(&out->program, "compute", QE_STREAM_COMPUTE, &out->stream_compute, build->error));
    QE_TRY(qe_program_add_stream(&out->program, "caller", QE_STREAM_CALLER, &out->stream_caller, build->error));
    QE_TRY(qe_program_add_stream(&out->program, "host", QE_STREAM_HOST, &out->stream_host, build->error));
    uint64_t tokens = 2ull * plan->model_ops->tokens(plan->model) * sizeof(int32_t) * plan->microbatches;
    QE_TRY(add_buffer(build, "work", plan->model_ops->work_bytes(plan->model), &out->work_object));
    uint64_t workspace = plan->model_ops->workspace_bytes(plan->model);
    out->workspace_object = QE_NONE;
    if (workspace > 0) QE_TRY(add_buffer(build, "workspace", workspace, &out->workspace_object));
    QE_TRY(add_buffer(build, "tokens", tokens, &out->tokens_object));
    QE_TRY(add_buffer(build, "loss", plan->microbatches * sizeof(double), &out->loss_object));
    QE_TRY(add_buffer(build, "norms", plan->weight_count * sizeof(double), &out->norms_object));
    out->scratch_object = QE_NONE;
    if (plan->options.placement == QE_GRADIENT_COPY)
        QE_TRY(add_buffer(build, "grad_scratch", plan->weight_count,
                          &out->scratch_object)); /* one byte stands for a weight */
    QE_TRY(add_weights(build));
    return add_tallies(build);
}
