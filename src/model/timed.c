/* timed.c - a model that sleeps. Each stage has one weight of one number, so that deposits, takes and commits are
 * there as in training, and every slot is there and smaller than a page. */
#include "qeffect/timed.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "model/model.h"

enum { SPAN_WORDS = 2, TIMED_KINDS = 3 }; /* F, I, W: the kinds that ops are made for */

struct qe_timed_model {
    uint32_t stages, microbatches;
    qe_timed_stage *times;    /* [stages] */
    uint64_t *spans;          /* [stages, microbatches, TIMED_KINDS, SPAN_WORDS] */
    uint64_t *fill_spans;     /* [stages, SPAN_WORDS] */
    qe_weight_info *weights;  /* [stages] */
    qe_parameter *parameters; /* [stages] */
};

QE_STATIC_ASSERT(QE_ACTION_F == 0 && QE_ACTION_I == 1 && QE_ACTION_W == 2, "kinds of action index the spans");

static uint64_t *span_of(const qe_timed_model *model, uint32_t stage, uint32_t microbatch, int kind) {
    QE_ASSERT(stage < model->stages);
    QE_ASSERT(microbatch < model->microbatches);
    size_t pair = (size_t)stage * model->microbatches + microbatch;
    return model->spans + (pair * TIMED_KINDS + (size_t)kind) * SPAN_WORDS;
}

/* Names sort as stages do: QE_STAGES_MAX has four digits. */
static void describe(qe_timed_model *model, uint32_t stage) {
    model->weights[stage] = (qe_weight_info){
        .rows = 1, .columns = 1, .stage_layer = stage, .deposited_by = QE_ACTION_W};
    model->parameters[stage] = (qe_parameter){.weight = stage, .rows = 1, .columns = 1};
    (void)snprintf(model->weights[stage].name, QE_NAME_BYTES, "stage.%04u", stage);
    (void)snprintf(model->parameters[stage].name, QE_NAME_BYTES, "stage.%04u", stage);
}

qe_status qe_timed_model_create(const qe_timed_stage *stages, uint32_t stage_count, uint32_t microbatches,
                                qe_timed_model **model_out, qe_error *error_out) {
    QE_ASSERT(stage_count > 0);
    QE_ASSERT(microbatches > 0);
    qe_timed_model *model = calloc(1, sizeof *model);
    if (model == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a timed model");
    model->stages = stage_count;
    model->microbatches = microbatches;
    model->times = calloc(stage_count, sizeof *model->times);
    model->weights = calloc(stage_count, sizeof *model->weights);
    model->parameters = calloc(stage_count, sizeof *model->parameters);
    model->spans = calloc((size_t)stage_count * microbatches, TIMED_KINDS * SPAN_WORDS * sizeof *model->spans);
    model->fill_spans = calloc(stage_count, SPAN_WORDS * sizeof *model->fill_spans);
    int whole = model->spans != NULL && model->fill_spans != NULL;
    if (!whole || model->times == NULL || model->weights == NULL || model->parameters == NULL) {
        qe_timed_model_destroy(model);
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a timed model of %u stages", stage_count);
    }
    for (uint32_t stage = 0; stage < stage_count; stage++) {
        model->times[stage] = stages[stage];
        describe(model, stage);
    }
    *model_out = model;
    return QE_OK;
}

void qe_timed_model_destroy(qe_timed_model *model) {
    if (model == NULL) return;
    free(model->times);
    free(model->weights);
    free(model->parameters);
    free(model->spans);
    free(model->fill_spans);
    free(model);
}

qe_timed_span qe_timed_model_span(const qe_timed_model *model, const qe_action *action) {
    int full = action->kind == QE_ACTION_B;
    const uint64_t *first = span_of(model, action->stage, action->microbatch, full ? QE_ACTION_I : action->kind);
    const uint64_t *last = full ? span_of(model, action->stage, action->microbatch, QE_ACTION_W) : first;
    return (qe_timed_span){first[0], last[1]};
}

/* ---- the table ---- */

static uint32_t weight_count(const void *model) { return ((const qe_timed_model *)model)->stages; }

static const qe_weight_info *weight(const void *opaque, uint32_t index) {
    const qe_timed_model *model = opaque;
    QE_ASSERT(index < model->stages);
    return &model->weights[index];
}

static uint32_t weight_stage(const void *model, uint32_t index, uint32_t stages) {
    QE_ASSERT(stages == weight_count(model));
    return index;
}

static const qe_parameter *parameter(const void *opaque, uint32_t index) {
    const qe_timed_model *model = opaque;
    QE_ASSERT(index < model->stages);
    return &model->parameters[index];
}

static uint64_t slot_bytes(const void *model, uint32_t stage, uint32_t stages, qe_slot_kind kind) {
    (void)model;
    if ((kind == QE_SLOT_IN_F || kind == QE_SLOT_OUT_B) && stage == 0) return 0;
    if ((kind == QE_SLOT_OUT_F || kind == QE_SLOT_IN_B) && stage + 1 == stages) return 0;
    return QE_ALIGN_BYTES;
}

static uint64_t one_line(const void *model) {
    (void)model;
    return QE_ALIGN_BYTES;
}

static void fill_line(const void *model, void *host_out) {
    (void)model;
    memset(host_out, 0, QE_ALIGN_BYTES);
}

static uint64_t no_cache(const void *model, uint32_t index) {
    (void)model;
    (void)index;
    return 0;
}

static uint64_t no_workspace(const void *model) {
    (void)model;
    return 0;
}

static uint32_t one_token(const void *model) {
    (void)model;
    return 1;
}

static const qe_recipe *recipe(const void *model) {
    static const qe_recipe plain = {.kind = QE_RECIPE_FP32};
    (void)model;
    return &plain;
}

/* ---- lowering ---- */

static void borrow(qe_effects *effects, const qe_frame *frame, qe_slot_kind kind, int write) {
    if (frame->slot[kind].object != QE_NONE) qe_effects_borrow(effects, frame, kind, write);
}

static void effects_of_forward(qe_effects *effects, const qe_frame *frame) {
    borrow(effects, frame, QE_SLOT_IN_F, 0);
    borrow(effects, frame, QE_SLOT_I, 1);
    borrow(effects, frame, QE_SLOT_X, 1);
    borrow(effects, frame, QE_SLOT_OUT_F, 1);
    qe_effects_weight_read(effects, frame, frame->stage);
    if (frame->stage + 1 < frame->stages) return;
    uint64_t begin = frame->microbatch * sizeof(double);
    qe_effects_buffer(effects, frame->loss_object, 1, begin, begin + sizeof(double));
}

static void effects_of_input_grad(qe_effects *effects, const qe_frame *frame) {
    borrow(effects, frame, QE_SLOT_IN_B, 0);
    borrow(effects, frame, QE_SLOT_I, 0);
    borrow(effects, frame, QE_SLOT_Y, 1);
    borrow(effects, frame, QE_SLOT_OUT_B, 1);
    qe_effects_weight_read(effects, frame, frame->stage);
}

static void effects_of_weight_grad(qe_effects *effects, const qe_frame *frame) {
    borrow(effects, frame, QE_SLOT_X, 0);
    borrow(effects, frame, QE_SLOT_Y, 0);
    qe_effects_deposit(effects, frame, frame->stage);
}

static qe_status emit(const qe_frame *frame, const qe_sink *sink, uint64_t *span_ns, uint64_t duration_ns,
                      const qe_effects *effects) {
    qe_op op = {.kind = QE_OP_DELAY, .layer = (uint16_t)frame->stage, .per_microbatch = 1};
    op.args.delay = (qe_args_delay){.duration_ns = duration_ns, .span_ns = span_ns};
    return sink->op(sink->context, &op, effects->list, effects->count);
}

/* No weight is cached: a fill takes no time, and is there because a plan has one. */
static qe_status lower_fill(const qe_timed_model *model, const qe_frame *frame, const qe_sink *sink) {
    qe_effects effects = {.count = 0};
    qe_effects_weight_read(&effects, frame, frame->stage);
    return emit(frame, sink, model->fill_spans + (size_t)frame->stage * SPAN_WORDS, 0, &effects);
}

static qe_status lower(const void *opaque, const qe_frame *frame, qe_phase phase, const qe_sink *sink) {
    const qe_timed_model *model = opaque;
    const qe_timed_stage *times = &model->times[frame->stage];
    if (phase == QE_PHASE_FILL) return lower_fill(model, frame, sink);
    qe_effects effects = {.count = 0};
    if (phase == QE_PHASE_F) effects_of_forward(&effects, frame);
    if (phase == QE_PHASE_I) effects_of_input_grad(&effects, frame);
    if (phase == QE_PHASE_W) effects_of_weight_grad(&effects, frame);
    int kind = phase == QE_PHASE_F ? QE_ACTION_F : phase == QE_PHASE_I ? QE_ACTION_I : QE_ACTION_W;
    uint64_t duration_ns[TIMED_KINDS] = {times->forward_ns, times->input_ns, times->weight_ns};
    return emit(frame, sink, span_of(model, frame->stage, frame->microbatch, kind), duration_ns[kind], &effects);
}

const qe_model_ops *qe_timed_model_table(void) {
    static const qe_model_ops table = {
        .size = sizeof(qe_model_ops),
        .weight_count = weight_count,
        .weight = weight,
        .weight_stage = weight_stage,
        .stages_max = weight_count,
        .slot_bytes = slot_bytes,
        .work_bytes = one_line,
        .workspace_bytes = no_workspace,
        .constant_bytes = one_line,
        .constant_fill = fill_line,
        .cache_code_bytes = no_cache,
        .cache_operand_bytes = no_cache,
        .cache_scale_count = no_cache,
        .parameter_count = weight_count,
        .parameter = parameter,
        .tokens = one_token,
        .recipe = recipe,
        .lower = lower,
    };
    return &table;
}
