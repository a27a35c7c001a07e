/* lower_ends.c - what stands around the decoders: weight caches, embedding, final norm, head and loss (fp32, or bf16
 * where activations are). */
#include <stddef.h>
#include "base/assert.h"
#include "model/model.h"

static void *scratch(const qe_lowering *lowering, uint64_t offset_bytes) {
    return qe_at(lowering->frame->work, offset_bytes);
}

static void *in_slot(const qe_lowering *lowering, qe_slot_kind kind, uint64_t offset_bytes) {
    return qe_at(lowering->frame->slot[kind].at, offset_bytes);
}

/* Sums on their way; the host needs no place for them. */
static void *partials(const qe_lowering *lowering) {
    return qe_model_takes_codes(lowering->model) ? scratch(lowering, lowering->work.partials) : NULL;
}

/* The codes of a weight's cache: by rows as they always were, or the transpose that input gradients take. */
static qe_qtensor kept_codes(const qe_model *model, const qe_weight_place *place, uint32_t weight) {
    const qe_weight_info *info = &model->weights[weight];
    qe_recipe_kind recipe = qe_weight_recipe(model, weight);
    qe_qtensor codes = {.codes = place->cache_codes,
                        .scale_inv = place->cache_scale_inv,
                        .rows = info->rows,
                        .columns = info->columns,
                        .format = (uint8_t)qe_model_format(model, 0)};
    codes.blocking = recipe == QE_RECIPE_BLOCK ? QE_BLOCKING_TILE : QE_BLOCKING_TENSOR;
    codes.transposed = qe_model_takes_fp8(model) && info->scaled;
    return codes;
}

static qe_status fill_one(const qe_lowering *lowering, uint32_t weight) {
    const qe_model *model = lowering->model;
    const qe_frame *frame = lowering->frame;
    const qe_weight_place *place = &frame->weights[weight];
    const qe_weight_info *info = &model->weights[weight];
    qe_scale_state *state = place->scale[QE_SCALE_W];
    qe_op op = {.kind = QE_OP_QUANTIZE_WEIGHT};
    op.args.quantize_weight = (qe_args_quantize_weight){
        .w = place->master,
        .rows = info->rows,
        .columns = info->columns,
        .weight_witness = place->witness,
        .scale_epoch = state == NULL ? NULL : &state->epoch,
        .key = place->cache_key,
        .target =
            {
                .recipe = (uint8_t)qe_weight_recipe(model, weight),
                .format = (uint8_t)(info->scaled ? qe_model_format(model, 0) : QE_FORMAT_BF16),
                .scale = state == NULL ? NULL : &state->scale,
                .amax = state == NULL || !frame->training || frame->ahead ? NULL : &state->amax,
                .operand = qe_lowering_weight(lowering, weight, 0),
                .retained = kept_codes(model, place, weight),
            },
    };
    qe_effects effects = {.count = 0};
    if (!frame->ahead) qe_effects_weight_read(&effects, frame, weight);
    qe_effects_cache_fill(&effects, model, frame, weight);
    qe_effects_scale(&effects, frame, weight, QE_SCALE_W);
    return qe_lowering_emit(lowering, &op, &effects);
}

qe_status qe_lower_fill(const qe_lowering *lowering) {
    if (lowering->frame->ahead) return fill_one(lowering, lowering->frame->ahead_weight);
    for (uint32_t decoder = lowering->first; decoder < lowering->last; decoder++)
        for (int linear = 0; linear < QE_LINEARS; linear++)
            QE_TRY(fill_one(lowering, qe_weight_linear(lowering->model, decoder, linear)));
    uint32_t head = qe_weight_head(lowering->model);
    if (!qe_lowering_is_last_stage(lowering) || !lowering->model->weights[head].quantized) return QE_OK;
    return fill_one(lowering, head);
}

/* One half of this microbatch's part of the batch: tokens (0) or targets (1). */
static qe_status feed_half(const qe_lowering *lowering, const int32_t *from, int half, uint64_t to_offset_bytes) {
    uint64_t bytes = lowering->model->tokens * sizeof(int32_t);
    uint64_t begin = ((uint64_t)lowering->frame->microbatch * 2 + (uint64_t)half) * bytes;
    qe_op op = {.kind = QE_OP_COPY, .per_microbatch = 1};
    op.args.copy = (qe_args_copy){.from = from, .to = in_slot(lowering, QE_SLOT_I, to_offset_bytes), .bytes = bytes};
    qe_effects effects = {.count = 0};
    qe_effects_buffer(&effects, lowering->frame->tokens_object, 0, begin, begin + bytes);
    effects.list[0].version = 1; /* this step's load, not the one before */
    qe_effects_borrow(&effects, lowering->frame, QE_SLOT_I, 1);
    return qe_lowering_emit(lowering, &op, &effects);
}

qe_status qe_lower_feed(const qe_lowering *lowering) {
    const qe_frame *frame = lowering->frame;
    if (qe_lowering_is_first_stage(lowering))
        QE_TRY(feed_half(lowering, frame->tokens, 0, qe_feed_tokens(lowering->model, frame->stages)));
    if (!qe_lowering_is_last_stage(lowering)) return QE_OK;
    return feed_half(lowering, frame->targets, 1, qe_feed_targets(lowering->model, frame->stages));
}

qe_status qe_lower_collect(const qe_lowering *lowering) {
    const qe_frame *frame = lowering->frame;
    if (!qe_lowering_is_last_stage(lowering)) return QE_OK;
    qe_op op = {.kind = QE_OP_COPY, .per_microbatch = 1};
    op.args.copy = (qe_args_copy){.from = in_slot(lowering, QE_SLOT_X, qe_head_loss(lowering->model, frame->stages)),
                                  .to = frame->loss,
                                  .bytes = sizeof(double)};
    qe_effects effects = {.count = 0};
    qe_effects_borrow(&effects, frame, QE_SLOT_X, 0);
    uint64_t begin = frame->microbatch * sizeof(double);
    qe_effects_buffer(&effects, frame->loss_object, 1, begin, begin + sizeof(double));
    return qe_lowering_emit(lowering, &op, &effects);
}

static const int32_t *fed(const qe_lowering *lowering, uint64_t offset_bytes) {
    return (const int32_t *)(const void *)qe_at(lowering->frame->slot[QE_SLOT_I].at, offset_bytes);
}

qe_status qe_lower_embed_forward(const qe_lowering *lowering) {
    const qe_model *model = lowering->model;
    const qe_frame *frame = lowering->frame;
    uint64_t begin = qe_saved_begin(model, frame->stage, frame->stages, lowering->first);
    qe_op op = {.kind = QE_OP_EMBED};
    op.args.embed = (qe_args_embed){
        .tokens = fed(lowering, qe_feed_tokens(model, frame->stages)),
        .table = frame->weights[qe_weight_embed()].master,
        .y = in_slot(lowering, QE_SLOT_I, qe_saved_layout_of(model, begin, 1).input),
        .tokens_count = model->tokens,
        .hidden = model->config.hidden,
    };
    qe_effects effects = {.count = 0};
    qe_effects_weight_read(&effects, frame, qe_weight_embed());
    qe_effects_borrow(&effects, frame, QE_SLOT_I, 1);
    return qe_lowering_emit(lowering, &op, &effects);
}

qe_status qe_lower_embed_backward(const qe_lowering *lowering, const void *dx) {
    const qe_model *model = lowering->model;
    const qe_frame *frame = lowering->frame;
    qe_op op = {.kind = QE_OP_EMBED_BACKWARD};
    op.args.embed_backward = (qe_args_embed_backward){
        .tokens = fed(lowering, qe_feed_tokens(model, frame->stages)),
        .dy = dx,
        .grad = frame->weights[qe_weight_embed()].grad,
        .tokens_count = model->tokens,
        .hidden = model->config.hidden,
        .vocab = model->config.vocab,
        .set = frame->set,
    };
    qe_effects effects = {.count = 0};
    qe_effects_borrow(&effects, frame, QE_SLOT_I, 0);
    qe_effects_work(&effects, frame);
    qe_effects_deposit(&effects, frame, qe_weight_embed());
    return qe_lowering_emit(lowering, &op, &effects);
}

static qe_status final_norm(const qe_lowering *lowering) {
    const qe_model *model = lowering->model;
    const qe_frame *frame = lowering->frame;
    uint32_t weight = qe_weight_final_gain(model);
    qe_op op = {.kind = QE_OP_NORM};
    op.args.norm = (qe_args_norm){
        .x = qe_lowering_input(lowering, lowering->last),
        .gain = frame->weights[weight].master,
        .rstd = in_slot(lowering, QE_SLOT_I, qe_head_rstd(model, frame->stages)),
        .y = in_slot(lowering, QE_SLOT_X, qe_head_normed(model, frame->stages)),
        .epsilon = model->config.norm_epsilon,
        .rows = model->tokens,
        .hidden = model->config.hidden,
    };
    qe_effects effects = {.count = 0};
    qe_effects_borrow(&effects, frame, QE_SLOT_I, 1);
    qe_effects_borrow(&effects, frame, QE_SLOT_X, 1);
    qe_effects_weight_read(&effects, frame, weight);
    return qe_lowering_emit(lowering, &op, &effects);
}

/* What the head's products take of the final norm, and of the logits' gradient. */
static qe_qtensor head_operand(const qe_lowering *lowering, uint64_t offset_bytes, uint32_t columns) {
    const qe_model *model = lowering->model;
    return (qe_qtensor){.codes = in_slot(lowering, QE_SLOT_X, offset_bytes),
                        .rows = model->tokens,
                        .columns = columns,
                        .format = qe_model_takes_codes(model) ? QE_FORMAT_BF16 : QE_FORMAT_FP32};
}

static qe_qtensor head_normed(const qe_lowering *lowering) {
    return head_operand(lowering, qe_head_normed(lowering->model, lowering->frame->stages),
                        lowering->model->config.hidden);
}

static qe_qtensor head_logits(const qe_lowering *lowering) {
    return head_operand(lowering, qe_head_logits(lowering->model, lowering->frame->stages),
                        lowering->model->config.vocab);
}

/* The head's weight is read as it is, or as its cache has it. */
static void head_weight_effect(qe_effects *effects, const qe_lowering *lowering) {
    uint32_t weight = qe_weight_head(lowering->model);
    if (lowering->model->weights[weight].quantized)
        qe_effects_cache_use(effects, lowering->model, lowering->frame, weight, QE_LAYOUT_OPERAND);
    else
        qe_effects_weight_read(effects, lowering->frame, weight);
}

static qe_status head_linear(const qe_lowering *lowering) {
    const qe_model *model = lowering->model;
    const qe_frame *frame = lowering->frame;
    qe_op op = {.kind = QE_OP_LINEAR};
    op.args.linear = (qe_args_linear){
        .x = head_normed(lowering),
        .w = qe_lowering_weight(lowering, qe_weight_head(model), 0),
        .y = in_slot(lowering, QE_SLOT_X, qe_head_logits(model, frame->stages)),
        .rows = model->tokens,
        .in = model->config.hidden,
        .out = model->config.vocab,
        .accumulation = model->config.accumulation[0],
        .workspace = frame->workspace,
    };
    qe_effects effects = {.count = 0};
    qe_effects_workspace(&effects, frame);
    qe_effects_borrow(&effects, frame, QE_SLOT_X, 1);
    head_weight_effect(&effects, lowering);
    return qe_lowering_emit(lowering, &op, &effects);
}

static qe_status cross_entropy(const qe_lowering *lowering) {
    const qe_model *model = lowering->model;
    const qe_frame *frame = lowering->frame;
    qe_op op = {.kind = QE_OP_CROSS_ENTROPY};
    op.args.cross_entropy = (qe_args_cross_entropy){
        .logits = in_slot(lowering, QE_SLOT_X, qe_head_logits(model, frame->stages)),
        .targets = fed(lowering, qe_feed_targets(model, frame->stages)),
        .loss = in_slot(lowering, QE_SLOT_X, qe_head_loss(model, frame->stages)),
        .row_losses = partials(lowering),
        .gradient_scale = frame->gradient_scale,
        .rows = model->tokens,
        .vocab = model->config.vocab,
        .backward = frame->training,
    };
    qe_effects effects = {.count = 0};
    if (qe_model_takes_codes(model)) qe_effects_work(&effects, frame);
    qe_effects_borrow(&effects, frame, QE_SLOT_I, 0);
    qe_effects_borrow(&effects, frame, QE_SLOT_X, 1);
    return qe_lowering_emit(lowering, &op, &effects);
}

qe_status qe_lower_head_forward(const qe_lowering *lowering) {
    QE_TRY(final_norm(lowering));
    QE_TRY(head_linear(lowering));
    return cross_entropy(lowering);
}

static qe_status head_product_grad(const qe_lowering *lowering) {
    const qe_model *model = lowering->model;
    const qe_frame *frame = lowering->frame;
    qe_op op = {.kind = QE_OP_LINEAR_INPUT_GRAD};
    op.args.linear_input_grad = (qe_args_linear_input_grad){
        .dy = head_logits(lowering),
        .w = qe_lowering_weight(lowering, qe_weight_head(model), 1),
        .dx = scratch(lowering, lowering->work.product),
        .rows = model->tokens,
        .in = model->config.hidden,
        .out = model->config.vocab,
        .accumulation = model->config.accumulation[1],
        .workspace = frame->workspace,
    };
    qe_effects effects = {.count = 0};
    qe_effects_workspace(&effects, frame);
    qe_effects_borrow(&effects, frame, QE_SLOT_X, 0);
    head_weight_effect(&effects, lowering);
    qe_effects_work(&effects, frame);
    return qe_lowering_emit(lowering, &op, &effects);
}

qe_status qe_lower_head_input_grad(const qe_lowering *lowering, void *dx) {
    const qe_model *model = lowering->model;
    const qe_frame *frame = lowering->frame;
    uint32_t weight = qe_weight_final_gain(model);
    QE_TRY(head_product_grad(lowering));
    qe_op op = {.kind = QE_OP_NORM_BACKWARD};
    op.args.norm_backward = (qe_args_norm_backward){
        .dy = scratch(lowering, lowering->work.product),
        .x = qe_lowering_input(lowering, lowering->last),
        .rstd = in_slot(lowering, QE_SLOT_I, qe_head_rstd(model, frame->stages)),
        .gain = frame->weights[weight].master,
        .dx = dx,
        .gain_grad = frame->weights[weight].grad,
        .partials = partials(lowering),
        .rows = model->tokens,
        .hidden = model->config.hidden,
        .set = frame->set,
    };
    qe_effects effects = {.count = 0};
    qe_effects_work(&effects, frame);
    qe_effects_borrow(&effects, frame, QE_SLOT_I, 0);
    qe_effects_weight_read(&effects, frame, weight);
    qe_effects_deposit(&effects, frame, weight);
    return qe_lowering_emit(lowering, &op, &effects);
}

qe_status qe_lower_head_weight_grad(const qe_lowering *lowering) {
    const qe_model *model = lowering->model;
    const qe_frame *frame = lowering->frame;
    uint32_t weight = qe_weight_head(model);
    qe_op op = {.kind = QE_OP_LINEAR_WEIGHT_GRAD};
    op.args.linear_weight_grad = (qe_args_linear_weight_grad){
        .x = head_normed(lowering),
        .dy = head_logits(lowering),
        .grad = frame->weights[weight].grad,
        .rows = model->tokens,
        .in = model->config.hidden,
        .out = model->config.vocab,
        .set = frame->set || frame->apart,
        .accumulation = model->config.accumulation[2],
        .workspace = frame->workspace,
    };
    qe_effects effects = {.count = 0};
    qe_effects_workspace(&effects, frame);
    qe_effects_borrow(&effects, frame, QE_SLOT_X, 0);
    qe_effects_deposit(&effects, frame, weight);
    return qe_lowering_emit(lowering, &op, &effects);
}
