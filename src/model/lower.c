/* lower.c - an action of a stage as ops with effects: dispatch, addresses, and the effect helpers. */
#include <stddef.h>
#include "base/assert.h"
#include "model/model.h"

static qe_effect *add(qe_effects *effects, qe_effect_kind kind, uint32_t object) {
    QE_ASSERT(effects->count < QE_EFFECTS_MAX);
    QE_ASSERT(object != QE_NONE);
    qe_effect *effect = &effects->list[effects->count++];
    *effect = (qe_effect){.kind = (uint8_t)kind, .object = object};
    return effect;
}

void qe_effects_borrow(qe_effects *effects, const qe_frame *frame, qe_slot_kind kind, int write) {
    const qe_slot_place *slot = &frame->slot[kind];
    qe_effect *effect = add(effects, QE_EFFECT_SLOT_BORROW, slot->object);
    effect->write = write != 0;
    effect->version = slot->generation;
    /* A stage hands its results to a neighbour on the same rank by writing into the neighbour's slot. */
    effect->stage = slot->stage;
    effect->microbatch = frame->microbatch;
}

void qe_effects_buffer(qe_effects *effects, uint32_t object, int write, uint64_t begin, uint64_t end) {
    qe_effect *effect = add(effects, write ? QE_EFFECT_BUFFER_WRITE : QE_EFFECT_BUFFER_READ, object);
    effect->begin = begin;
    effect->end = end;
}

void qe_effects_work(qe_effects *effects, const qe_frame *frame) {
    qe_effects_buffer(effects, frame->work_object, 1, 0, frame->work_bytes);
}

void qe_effects_workspace(qe_effects *effects, const qe_frame *frame) {
    if (frame->workspace_bytes > 0)
        qe_effects_buffer(effects, frame->workspace_object, 1, 0, frame->workspace_bytes);
}

void qe_effects_weight_read(qe_effects *effects, const qe_frame *frame, uint32_t weight) {
    add(effects, QE_EFFECT_WEIGHT_READ, frame->weights[weight].weight_object);
}

qe_recipe_kind qe_weight_recipe(const qe_model *model, uint32_t weight) {
    return model->weights[weight].scaled ? model->recipe.kind : QE_RECIPE_BF16;
}

static void cache_key(qe_effect *effect, const qe_model *model, uint32_t weight, int layouts) {
    effect->layouts = (uint8_t)layouts;
    effect->recipe = (uint8_t)qe_weight_recipe(model, weight);
}

void qe_effects_cache_use(qe_effects *effects, const qe_model *model, const qe_frame *frame, uint32_t weight,
                          int layouts) {
    cache_key(add(effects, QE_EFFECT_CACHE_USE, frame->weights[weight].cache_object), model, weight, layouts);
}

void qe_effects_cache_fill(qe_effects *effects, const qe_model *model, const qe_frame *frame, uint32_t weight) {
    qe_effect *effect = add(effects, QE_EFFECT_CACHE_FILL, frame->weights[weight].cache_object);
    cache_key(effect, model, weight, QE_LAYOUT_OPERAND | QE_LAYOUT_CODES);
    effect->version = frame->ahead; /* the commit has made the next one */
    if (frame->weights[weight].scale_object[QE_SCALE_W] != QE_NONE) effect->epoch = frame->ahead;
}

void qe_effects_scale(qe_effects *effects, const qe_frame *frame, uint32_t weight, int role) {
    uint32_t object = frame->weights[weight].scale_object[role];
    if (object == QE_NONE) return; /* this recipe keeps no hidden scale */
    add(effects, QE_EFFECT_SCALE_USE, object)->version = frame->ahead;
    if (frame->training && !frame->ahead) add(effects, QE_EFFECT_SCALE_RECORD, object);
}

void qe_effects_deposit(qe_effects *effects, const qe_frame *frame, uint32_t weight) {
    qe_effect *effect = add(effects, QE_EFFECT_GRAD_DEPOSIT, frame->weights[weight].grad_object);
    effect->write = frame->set;
    effect->microbatch = frame->microbatch;
}

int qe_lowering_is_first_stage(const qe_lowering *lowering) {
    return lowering->frame->stage == 0;
}

int qe_lowering_is_last_stage(const qe_lowering *lowering) {
    return lowering->frame->stage + 1 == lowering->frame->stages;
}

qe_slot_kind qe_lowering_input_slot(const qe_lowering *lowering, uint32_t decoder) {
    return qe_saved_with_input(lowering->frame->stage, lowering->first, decoder) ? QE_SLOT_I : QE_SLOT_IN_F;
}

static uint64_t input_offset(const qe_lowering *lowering, uint32_t decoder) {
    const qe_frame *frame = lowering->frame;
    if (qe_lowering_input_slot(lowering, decoder) == QE_SLOT_IN_F) return 0;
    if (decoder == lowering->model->config.layers) return qe_head_input(lowering->model, frame->stages);
    uint64_t begin = qe_saved_begin(lowering->model, frame->stage, frame->stages, decoder);
    return qe_saved_layout_of(lowering->model, begin, 1).input;
}

const void *qe_lowering_input(const qe_lowering *lowering, uint32_t decoder) {
    const qe_slot_place *slot = &lowering->frame->slot[qe_lowering_input_slot(lowering, decoder)];
    return qe_at(slot->at, input_offset(lowering, decoder));
}

static int hands_over(const qe_lowering *lowering, uint32_t decoder) {
    return decoder + 1 == lowering->last && !qe_lowering_is_last_stage(lowering);
}

qe_slot_kind qe_lowering_output_slot(const qe_lowering *lowering, uint32_t decoder) {
    return hands_over(lowering, decoder) ? QE_SLOT_OUT_F : QE_SLOT_I;
}

void *qe_lowering_output(const qe_lowering *lowering, uint32_t decoder) {
    if (hands_over(lowering, decoder)) return lowering->frame->slot[QE_SLOT_OUT_F].at;
    return qe_at(lowering->frame->slot[QE_SLOT_I].at, input_offset(lowering, decoder + 1));
}

/* The residual gradient alternates between two scratch places; decoder d finds its dy where decoder d+1 left dx. */
static void *scratch_grad(const qe_lowering *lowering, uint32_t decoder) {
    return qe_at(lowering->frame->work, lowering->work.grad[decoder % 2]);
}

const void *qe_lowering_dy(const qe_lowering *lowering, uint32_t decoder, int *slot_out) {
    int arrives = hands_over(lowering, decoder);
    *slot_out = arrives ? QE_SLOT_IN_B : QE_SLOT_KINDS;
    return arrives ? lowering->frame->slot[QE_SLOT_IN_B].at : scratch_grad(lowering, decoder + 1);
}

void *qe_lowering_dx(const qe_lowering *lowering, uint32_t decoder, int *slot_out) {
    int leaves = decoder == lowering->first && !qe_lowering_is_first_stage(lowering);
    *slot_out = leaves ? QE_SLOT_OUT_B : QE_SLOT_KINDS;
    return leaves ? lowering->frame->slot[QE_SLOT_OUT_B].at : scratch_grad(lowering, decoder);
}

qe_qtensor qe_lowering_weight(const qe_lowering *lowering, uint32_t weight, int transposed) {
    const qe_model *model = lowering->model;
    const qe_weight_place *place = &lowering->frame->weights[weight];
    const qe_weight_info *info = &model->weights[weight];
    qe_qtensor tensor = {.rows = info->rows, .columns = info->columns, .format = QE_FORMAT_FP32};
    if (!info->quantized) {
        tensor.codes = place->master;
        return tensor;
    }
    int fp8 = info->scaled && qe_model_takes_fp8(model);
    tensor.transposed = fp8 && transposed;
    tensor.codes = tensor.transposed ? place->cache_codes : place->cache_operand;
    tensor.scale_inv = fp8 ? place->cache_scale_inv : NULL;
    tensor.format = (uint8_t)(info->scaled ? qe_model_operand_format(model, 0) : QE_FORMAT_BF16);
    return tensor;
}

/* An op that multiplies by it makes the next operand too, maybe while others of its threads still read this one. */
static int lies_beside(int linear, int gradient) {
    return linear == (gradient ? QE_LINEAR_DOWN : QE_LINEAR_GATE_UP);
}

/* What a product takes at once: in scratch, with the retained tensor's inverse scale where it has one. */
static qe_qtensor operand_of(const qe_lowering *lowering, int linear, const qe_qtensor *retained, int gradient) {
    const qe_model *model = lowering->model;
    const qe_work_layout *work = &lowering->work;
    int beside = lies_beside(linear, gradient);
    qe_qtensor operand = {.codes = qe_at(lowering->frame->work, beside ? work->operand_beside : work->operand),
                          .rows = retained->rows,
                          .columns = retained->columns,
                          .format = (uint8_t)qe_model_operand_format(model, gradient)};
    if (!qe_model_takes_fp8(model)) return operand;
    operand.scale_inv = retained->scale_inv;
    if (!lowering->frame->training)
        operand.scale_inv = (float *)(void *)qe_at(lowering->frame->work,
                                                   beside ? work->operand_scale_beside : work->operand_scale);
    return operand;
}

qe_quantize_target qe_lowering_target(const qe_lowering *lowering, uint32_t decoder, int linear, int role) {
    const qe_frame *frame = lowering->frame;
    const qe_model *model = lowering->model;
    int gradient = role == QE_SCALE_DY;
    qe_slot_kind kind = gradient ? QE_SLOT_Y : QE_SLOT_X;
    uint32_t columns = gradient ? qe_linear_out(model, linear) : qe_linear_in(model, linear);
    uint64_t begin = qe_retained_begin(model, frame->stage, frame->stages, decoder, linear, kind);
    qe_retained_layout layout = qe_retained_layout_of(model, begin, columns, qe_model_format(model, gradient));
    qe_scale_state *state = frame->weights[qe_weight_linear(model, decoder, linear)].scale[role];
    qe_quantize_target target = {
        .recipe = (uint8_t)model->recipe.kind,
        .format = (uint8_t)qe_model_format(model, gradient),
        .scale = state == NULL ? NULL : &state->scale,
        .amax = state == NULL || !frame->training ? NULL : &state->amax,
        .retained = {.rows = model->tokens, .columns = columns, .format = (uint8_t)qe_model_format(model, gradient)},
    };
    target.retained.blocking = model->recipe.kind == QE_RECIPE_BLOCK ? QE_BLOCKING_COLUMN : QE_BLOCKING_TENSOR;
    target.retained.transposed = qe_model_takes_fp8(model) != 0;
    if (frame->training) { /* else nothing is retained past F */
        target.retained.codes = qe_at(frame->slot[kind].at, layout.codes);
        if (layout.scale_inv != layout.end)
            target.retained.scale_inv = (float *)(void *)qe_at(frame->slot[kind].at, layout.scale_inv);
    }
    target.operand = operand_of(lowering, linear, &target.retained, gradient);
    return target;
}

qe_status qe_lowering_emit(const qe_lowering *lowering, const qe_op *op, const qe_effects *effects) {
    qe_op placed = *op;
    placed.layer = (uint16_t)lowering->layer;
    return lowering->sink->op(lowering->sink->context, &placed, effects->list, effects->count);
}

/* The same lowering, for a model layer: 0 is the embedding, decoder d is d + 1. */
static qe_lowering at_layer(const qe_lowering *lowering, uint32_t layer) {
    qe_lowering moved = *lowering;
    moved.layer = layer;
    return moved;
}

static qe_status lower_forward(const qe_lowering *lowering) {
    qe_lowering head = at_layer(lowering, lowering->model->config.layers + 1);
    QE_TRY(qe_lower_feed(lowering));
    if (qe_lowering_is_first_stage(lowering)) QE_TRY(qe_lower_embed_forward(lowering));
    for (uint32_t decoder = lowering->first; decoder < lowering->last; decoder++) {
        qe_lowering layer = at_layer(lowering, decoder + 1);
        QE_TRY(qe_lower_decoder_forward(&layer, decoder));
    }
    if (qe_lowering_is_last_stage(lowering)) QE_TRY(qe_lower_head_forward(&head));
    return qe_lower_collect(&head);
}

static qe_status lower_input_grad(const qe_lowering *lowering) {
    qe_lowering head = at_layer(lowering, lowering->model->config.layers + 1);
    if (qe_lowering_is_last_stage(lowering))
        QE_TRY(qe_lower_head_input_grad(&head, scratch_grad(lowering, lowering->last)));
    for (uint32_t decoder = lowering->last; decoder-- > lowering->first;) {
        qe_lowering layer = at_layer(lowering, decoder + 1);
        QE_TRY(qe_lower_decoder_input_grad(&layer, decoder));
    }
    return qe_lowering_is_first_stage(lowering) ? qe_lower_embed_backward(lowering, scratch_grad(lowering, 0)) : QE_OK;
}

static qe_status lower_weight_grad(const qe_lowering *lowering) {
    qe_lowering head = at_layer(lowering, lowering->model->config.layers + 1);
    if (qe_lowering_is_last_stage(lowering)) QE_TRY(qe_lower_head_weight_grad(&head));
    for (uint32_t decoder = lowering->last; decoder-- > lowering->first;) {
        qe_lowering layer = at_layer(lowering, decoder + 1);
        QE_TRY(qe_lower_decoder_weight_grad(&layer, decoder));
    }
    return QE_OK;
}

qe_status qe_model_lower(const void *opaque, const qe_frame *frame, qe_phase phase, const qe_sink *sink) {
    const qe_model *model = opaque;
    qe_lowering lowering = {.model = model, .frame = frame, .sink = sink, .work = qe_work_layout_of(model)};
    qe_stage_decoders(model, frame->stage, frame->stages, &lowering.first, &lowering.last);
    QE_ASSERT(lowering.first < lowering.last);
    switch (phase) {
        case QE_PHASE_FILL: return qe_lower_fill(&lowering);
        case QE_PHASE_F: return lower_forward(&lowering);
        case QE_PHASE_I: return lower_input_grad(&lowering);
        case QE_PHASE_W: return lower_weight_grad(&lowering);
    }
    QE_ASSERT(0 && "a phase");
    return QE_OK;
}
