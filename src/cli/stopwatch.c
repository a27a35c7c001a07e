/* stopwatch.c - passes everything on to the built-in model and puts an op of no duration behind each action. */
#include "cli/stopwatch.h"

#include <stdlib.h>
#include <string.h>
#include "base/assert.h"

QE_STATIC_ASSERT(QE_ACTION_F == 0 && QE_ACTION_I == 1 && QE_ACTION_W == 2, "kinds of action index the looks");

qe_status qe_stopwatch_init(qe_stopwatch *watch, uint32_t stages, uint32_t microbatches, qe_error *error_out) {
    *watch = (qe_stopwatch){.stages = stages, .microbatches = microbatches};
    watch->spans_ns = calloc((size_t)stages * microbatches * QE_STOPWATCH_KINDS, sizeof *watch->spans_ns);
    if (watch->spans_ns != NULL) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the times of actions");
}

void qe_stopwatch_deinit(qe_stopwatch *watch) {
    free(watch->spans_ns);
    *watch = (qe_stopwatch){0};
}

static uint64_t *span_of(const qe_stopwatch *watch, uint32_t stage, uint32_t microbatch, uint32_t kind) {
    QE_ASSERT(stage < watch->stages);
    QE_ASSERT(microbatch < watch->microbatches);
    return watch->spans_ns[((size_t)stage * watch->microbatches + microbatch) * QE_STOPWATCH_KINDS + kind];
}

uint64_t qe_stopwatch_end_ns(const qe_stopwatch *watch, uint32_t stage, uint32_t microbatch, qe_action_kind kind) {
    QE_ASSERT(kind <= QE_ACTION_W);
    return span_of(watch, stage, microbatch, kind)[1];
}

static const void *inner(const void *watch) { return ((const qe_stopwatch *)watch)->model; }

static uint32_t weight_count(const void *watch) { return qe_model_table()->weight_count(inner(watch)); }

static const qe_weight_info *weight(const void *watch, uint32_t index) {
    return qe_model_table()->weight(inner(watch), index);
}

static uint32_t weight_stage(const void *watch, uint32_t index, uint32_t stages) {
    return qe_model_table()->weight_stage(inner(watch), index, stages);
}

static uint32_t stages_max(const void *watch) { return qe_model_table()->stages_max(inner(watch)); }

static uint64_t slot_bytes(const void *watch, uint32_t stage, uint32_t stages, qe_slot_kind kind) {
    return qe_model_table()->slot_bytes(inner(watch), stage, stages, kind);
}

static uint64_t work_bytes(const void *watch) { return qe_model_table()->work_bytes(inner(watch)); }
static uint64_t workspace_bytes(const void *watch) { return qe_model_table()->workspace_bytes(inner(watch)); }

static uint64_t constant_bytes(const void *watch) { return qe_model_table()->constant_bytes(inner(watch)); }

static void constant_fill(const void *watch, void *host_out) {
    qe_model_table()->constant_fill(inner(watch), host_out);
}

static uint64_t cache_code_bytes(const void *watch, uint32_t index) {
    return qe_model_table()->cache_code_bytes(inner(watch), index);
}

static uint64_t cache_operand_bytes(const void *watch, uint32_t index) {
    return qe_model_table()->cache_operand_bytes(inner(watch), index);
}

static uint64_t cache_scale_count(const void *watch, uint32_t index) {
    return qe_model_table()->cache_scale_count(inner(watch), index);
}

static uint32_t parameter_count(const void *watch) { return qe_model_table()->parameter_count(inner(watch)); }

static const qe_parameter *parameter(const void *watch, uint32_t index) {
    return qe_model_table()->parameter(inner(watch), index);
}

static uint32_t tokens(const void *watch) { return qe_model_table()->tokens(inner(watch)); }

static const qe_recipe *recipe(const void *watch) { return qe_model_table()->recipe(inner(watch)); }

/* Ops of a stream run in order, so an op behind an action sees its end. */
static qe_status lower(const void *opaque, const qe_frame *frame, qe_phase phase, const qe_sink *sink) {
    const qe_stopwatch *watch = opaque;
    QE_TRY(qe_model_table()->lower(watch->model, frame, phase, sink));
    if (phase == QE_PHASE_FILL || !frame->training) return QE_OK;
    uint32_t kind = phase == QE_PHASE_F ? QE_ACTION_F : phase == QE_PHASE_I ? QE_ACTION_I : QE_ACTION_W;
    qe_op look = {.kind = QE_OP_DELAY, .per_microbatch = 1};
    look.args.delay = (qe_args_delay){.span_ns = span_of(watch, frame->stage, frame->microbatch, kind)};
    return sink->op(sink->context, &look, NULL, 0);
}

const qe_model_ops *qe_stopwatch_table(void) {
    static const qe_model_ops table = {
        .size = sizeof(qe_model_ops),
        .weight_count = weight_count,
        .weight = weight,
        .weight_stage = weight_stage,
        .stages_max = stages_max,
        .slot_bytes = slot_bytes,
        .work_bytes = work_bytes,
        .workspace_bytes = workspace_bytes,
        .constant_bytes = constant_bytes,
        .constant_fill = constant_fill,
        .cache_code_bytes = cache_code_bytes,
        .cache_operand_bytes = cache_operand_bytes,
        .cache_scale_count = cache_scale_count,
        .parameter_count = parameter_count,
        .parameter = parameter,
        .tokens = tokens,
        .recipe = recipe,
        .lower = lower,
    };
    return &table;
}
