/* lower_decoder.c - one decoder layer: eight forward ops, eight input-gradient ops, four weight-gradient ops. */
#include <stddef.h>
#include "base/assert.h"
#include "model/model.h"

typedef struct layer_places {
    qe_saved_layout at;
    char *saved; /* slot I */
} layer_places;

static layer_places places_of(const qe_lowering *lowering, uint32_t decoder) {
    const qe_frame *frame = lowering->frame;
    uint64_t begin = qe_saved_begin(lowering->model, frame->stage, frame->stages, decoder);
    int with_input = qe_saved_with_input(frame->stage, lowering->first, decoder);
    return (layer_places){qe_saved_layout_of(lowering->model, begin, with_input), frame->slot[QE_SLOT_I].at};
}

static void *saved(const layer_places *places, uint64_t offset_bytes) {
    return qe_at(places->saved, offset_bytes);
}

static void *scratch(const qe_lowering *lowering, uint64_t offset_bytes) {
    return qe_at(lowering->frame->work, offset_bytes);
}

/* The quantized tensor retained, its scale used and recorded. */
static void retained_effects(qe_effects *effects, const qe_lowering *lowering, uint32_t decoder, int linear, int role) {
    if (lowering->frame->training)
        qe_effects_borrow(effects, lowering->frame, role == QE_SCALE_X ? QE_SLOT_X : QE_SLOT_Y, 1);
    qe_effects_scale(effects, lowering->frame, qe_weight_linear(lowering->model, decoder, linear), role);
}

/* ... and what a product takes of it, in scratch. */
static void quantized_effects(qe_effects *effects, const qe_lowering *lowering, uint32_t decoder, int linear,
                              int role) {
    qe_effects_work(effects, lowering->frame);
    retained_effects(effects, lowering, decoder, linear, role);
}

/* Of every product that is not a weight's gradient: its operand lies in scratch. */
static void product_effects(qe_effects *effects, const qe_lowering *lowering, uint32_t weight, int layouts) {
    qe_effects_work(effects, lowering->frame);
    qe_effects_workspace(effects, lowering->frame);
    qe_effects_cache_use(effects, lowering->model, lowering->frame, weight, layouts);
}

static qe_status norm_quantize(const qe_lowering *lowering, uint32_t decoder, int gain, const void *x,
                               qe_slot_kind x_slot, float *rstd) {
    const qe_model *model = lowering->model;
    const qe_frame *frame = lowering->frame;
    int linear = gain == QE_GAIN_INPUT ? QE_LINEAR_QKV : QE_LINEAR_GATE_UP;
    uint32_t weight = qe_weight_gain(model, decoder, gain);
    qe_op op = {.kind = QE_OP_NORM_QUANTIZE};
    op.args.norm = (qe_args_norm){
        .x = x,
        .gain = frame->weights[weight].master,
        .rstd = rstd,
        .target = qe_lowering_target(lowering, decoder, linear, QE_SCALE_X),
        .epsilon = model->config.norm_epsilon,
        .rows = model->tokens,
        .hidden = model->config.hidden,
    };
    qe_effects effects = {.count = 0};
    if (x_slot != QE_SLOT_I) qe_effects_borrow(&effects, frame, x_slot, 0);
    qe_effects_borrow(&effects, frame, QE_SLOT_I, 1);
    qe_effects_weight_read(&effects, frame, weight);
    quantized_effects(&effects, lowering, decoder, linear, QE_SCALE_X);
    return qe_lowering_emit(lowering, &op, &effects);
}

static qe_args_linear linear_args(const qe_lowering *lowering, uint32_t decoder, int linear, const void *residual,
                                  void *y) {
    const qe_model *model = lowering->model;
    return (qe_args_linear){
        .x = qe_lowering_target(lowering, decoder, linear, QE_SCALE_X).operand,
        .w = qe_lowering_weight(lowering, qe_weight_linear(model, decoder, linear), 0),
        .residual = residual,
        .y = y,
        .rows = model->tokens,
        .in = qe_linear_in(model, linear),
        .out = qe_linear_out(model, linear),
        .accumulation = model->config.accumulation[0],
        .workspace = lowering->frame->workspace,
    };
}

/* Does the operand of a forward product have its inverse scale where its retained tensor has it? */
static int shares_scale_x(const qe_lowering *lowering) {
    return lowering->frame->training && qe_model_takes_fp8(lowering->model);
}

static qe_status linear_forward(const qe_lowering *lowering, uint32_t decoder, int linear, const void *residual,
                                qe_slot_kind residual_slot, void *y, qe_slot_kind y_slot) {
    const qe_frame *frame = lowering->frame;
    qe_op op = {.kind = QE_OP_LINEAR};
    op.args.linear = linear_args(lowering, decoder, linear, residual, y);
    qe_effects effects = {.count = 0};
    product_effects(&effects, lowering, qe_weight_linear(lowering->model, decoder, linear), QE_LAYOUT_OPERAND);
    if (shares_scale_x(lowering)) qe_effects_borrow(&effects, frame, QE_SLOT_X, 0);
    if (residual_slot != y_slot) qe_effects_borrow(&effects, frame, residual_slot, 0);
    qe_effects_borrow(&effects, frame, y_slot, 1);
    return qe_lowering_emit(lowering, &op, &effects);
}

/* Tables of cosines, then sines (qe_model_ops.constant_fill). */
static qe_args_rope rope_args(const qe_lowering *lowering, void *qkv) {
    const qe_model *model = lowering->model;
    const float *cosine = (const float *)(const void *)lowering->frame->constants;
    return (qe_args_rope){
        .qkv = qkv,
        .cosine = cosine,
        .sine = cosine == NULL ? NULL : cosine + (size_t)model->config.sequence * (model->head_dim / 2),
        .rows = model->tokens,
        .sequence = model->config.sequence,
        .heads = model->config.heads,
        .kv_heads = model->config.kv_heads,
        .head_dim = model->head_dim,
    };
}

/* Queries, keys and values as attention takes them. */
static qe_status linear_rope(const qe_lowering *lowering, uint32_t decoder, const layer_places *places) {
    void *qkv = saved(places, places->at.qkv);
    const qe_args_linear linear = linear_args(lowering, decoder, QE_LINEAR_QKV, NULL, qkv);
    const qe_args_rope rope = rope_args(lowering, qkv);
    qe_op op = {.kind = QE_OP_LINEAR_ROPE};
    op.args.linear_rope = (qe_args_linear_rope){
        .x = linear.x,
        .w = linear.w,
        .y = qkv,
        .workspace = linear.workspace,
        .cosine = rope.cosine,
        .sine = rope.sine,
        .rows = linear.rows,
        .in = linear.in,
        .sequence = rope.sequence,
        .heads = rope.heads,
        .kv_heads = rope.kv_heads,
        .head_dim = rope.head_dim,
        .accumulation = linear.accumulation,
    };
    qe_effects effects = {.count = 0};
    product_effects(&effects, lowering, qe_weight_linear(lowering->model, decoder, QE_LINEAR_QKV), QE_LAYOUT_OPERAND);
    if (shares_scale_x(lowering)) qe_effects_borrow(&effects, lowering->frame, QE_SLOT_X, 0);
    qe_effects_borrow(&effects, lowering->frame, QE_SLOT_I, 1);
    return qe_lowering_emit(lowering, &op, &effects);
}

/* A backward that takes the result again finds it in the slot. */
static void *attended(const qe_lowering *lowering, const layer_places *places) {
    return qe_model_takes_codes(lowering->model) ? saved(places, places->at.attended)
                                                 : scratch(lowering, lowering->work.product);
}

/* A backend that takes codes keeps its own. */
static void *attention_scratch(const qe_lowering *lowering) {
    return qe_model_takes_codes(lowering->model) ? NULL : scratch(lowering, lowering->work.attention);
}

static qe_status attention(const qe_lowering *lowering, uint32_t decoder, const layer_places *places) {
    const qe_model *model = lowering->model;
    qe_op op = {.kind = QE_OP_ATTENTION};
    op.args.attention = (qe_args_attention){
        .qkv = saved(places, places->at.qkv),
        .lse = saved(places, places->at.lse),
        .out = attended(lowering, places),
        .scratch = attention_scratch(lowering),
        .sequences = model->config.sequences,
        .sequence = model->config.sequence,
        .heads = model->config.heads,
        .kv_heads = model->config.kv_heads,
        .head_dim = model->head_dim,
        .deterministic = !model->config.attention_any_order,
        .target = qe_lowering_target(lowering, decoder, QE_LINEAR_O, QE_SCALE_X),
    };
    qe_effects effects = {.count = 0};
    qe_effects_borrow(&effects, lowering->frame, QE_SLOT_I, 1);
    quantized_effects(&effects, lowering, decoder, QE_LINEAR_O, QE_SCALE_X);
    return qe_lowering_emit(lowering, &op, &effects);
}

/* The product of gate and up, and swiglu of it as the next product takes it: slot X holds the scale of the one and all
 * of the other. */
static qe_status linear_swiglu(const qe_lowering *lowering, uint32_t decoder, const layer_places *places) {
    qe_op op = {.kind = QE_OP_LINEAR};
    op.args.linear = linear_args(lowering, decoder, QE_LINEAR_GATE_UP, NULL, saved(places, places->at.gate_up));
    op.args.linear.decoded_scratch = scratch(lowering, lowering->work.product);
    op.args.linear.target = qe_lowering_target(lowering, decoder, QE_LINEAR_DOWN, QE_SCALE_X);
    qe_effects effects = {.count = 0};
    product_effects(&effects, lowering, qe_weight_linear(lowering->model, decoder, QE_LINEAR_GATE_UP),
                    QE_LAYOUT_OPERAND);
    qe_effects_borrow(&effects, lowering->frame, QE_SLOT_I, 1);
    retained_effects(&effects, lowering, decoder, QE_LINEAR_DOWN, QE_SCALE_X);
    return qe_lowering_emit(lowering, &op, &effects);
}

qe_status qe_lower_decoder_forward(const qe_lowering *lowering, uint32_t decoder) {
    layer_places places = places_of(lowering, decoder);
    const void *input = qe_lowering_input(lowering, decoder);
    qe_slot_kind input_slot = qe_lowering_input_slot(lowering, decoder);
    void *residual = saved(&places, places.at.residual);
    QE_TRY(norm_quantize(lowering, decoder, QE_GAIN_INPUT, input, input_slot, saved(&places, places.at.rstd_input)));
    QE_TRY(linear_rope(lowering, decoder, &places));
    QE_TRY(attention(lowering, decoder, &places));
    QE_TRY(linear_forward(lowering, decoder, QE_LINEAR_O, input, input_slot, residual, QE_SLOT_I));
    QE_TRY(norm_quantize(lowering, decoder, QE_GAIN_POST, residual, QE_SLOT_I, saved(&places, places.at.rstd_post)));
    QE_TRY(linear_swiglu(lowering, decoder, &places));
    return linear_forward(lowering, decoder, QE_LINEAR_DOWN, residual, QE_SLOT_I, qe_lowering_output(lowering, decoder),
                          qe_lowering_output_slot(lowering, decoder));
}

/* The gradient that arrives, as the last linear's products take it. */
static qe_status quantize_dy(const qe_lowering *lowering, uint32_t decoder, const void *dy, int dy_slot) {
    qe_op op = {.kind = QE_OP_QUANTIZE};
    qe_quantize_target target = qe_lowering_target(lowering, decoder, QE_LINEAR_DOWN, QE_SCALE_DY);
    op.args.quantize = (qe_args_quantize){
        .x = dy, .rows = target.retained.rows, .columns = target.retained.columns, .target = target};
    qe_effects effects = {.count = 0};
    if (dy_slot != QE_SLOT_KINDS) qe_effects_borrow(&effects, lowering->frame, (qe_slot_kind)dy_slot, 0);
    quantized_effects(&effects, lowering, decoder, QE_LINEAR_DOWN, QE_SCALE_DY);
    return qe_lowering_emit(lowering, &op, &effects);
}

static qe_args_linear_input_grad input_grad_args(const qe_lowering *lowering, uint32_t decoder, int linear) {
    const qe_model *model = lowering->model;
    return (qe_args_linear_input_grad){
        .dy = qe_lowering_target(lowering, decoder, linear, QE_SCALE_DY).operand,
        .w = qe_lowering_weight(lowering, qe_weight_linear(model, decoder, linear), 1),
        .dx = scratch(lowering, lowering->work.product),
        .rows = model->tokens,
        .in = qe_linear_in(model, linear),
        .out = qe_linear_out(model, linear),
        .accumulation = model->config.accumulation[1],
        .workspace = lowering->frame->workspace,
    };
}

static void input_grad_effects(qe_effects *effects, const qe_lowering *lowering, uint32_t decoder, int linear,
                               const qe_args_linear_input_grad *args) {
    product_effects(effects, lowering, qe_weight_linear(lowering->model, decoder, linear),
                    args->w.transposed ? QE_LAYOUT_CODES : QE_LAYOUT_OPERAND);
}

static qe_status linear_input_grad(const qe_lowering *lowering, uint32_t decoder, int linear) {
    qe_op op = {.kind = QE_OP_LINEAR_INPUT_GRAD};
    op.args.linear_input_grad = input_grad_args(lowering, decoder, linear);
    qe_effects effects = {.count = 0};
    input_grad_effects(&effects, lowering, decoder, linear, &op.args.linear_input_grad);
    if (qe_model_takes_fp8(lowering->model)) qe_effects_borrow(&effects, lowering->frame, QE_SLOT_Y, 0);
    return qe_lowering_emit(lowering, &op, &effects);
}

/* Through the last linear and swiglu, quantized as the products of gate and up take it: slot Y holds the scale of the
 * one and all of the other. */
static qe_status swiglu_input_grad(const qe_lowering *lowering, uint32_t decoder, const layer_places *places) {
    qe_op op = {.kind = QE_OP_LINEAR_INPUT_GRAD};
    qe_args_linear_input_grad *args = &op.args.linear_input_grad;
    *args = input_grad_args(lowering, decoder, QE_LINEAR_DOWN);
    args->gate_up = saved(places, places->at.gate_up);
    args->dgate_up = scratch(lowering, lowering->work.product_wide);
    args->target = qe_lowering_target(lowering, decoder, QE_LINEAR_GATE_UP, QE_SCALE_DY);
    qe_effects effects = {.count = 0};
    input_grad_effects(&effects, lowering, decoder, QE_LINEAR_DOWN, args);
    qe_effects_borrow(&effects, lowering->frame, QE_SLOT_I, 0);
    retained_effects(&effects, lowering, decoder, QE_LINEAR_GATE_UP, QE_SCALE_DY);
    return qe_lowering_emit(lowering, &op, &effects);
}

typedef struct norm_places { /* gradient around and through a norm */
    const void *x, *residual;
    const float *rstd;
    void *dx;
    int x_slot, residual_slot, dx_slot; /* QE_SLOT_KINDS: scratch */
    int feeds; /* the linear whose output gradient dx is, quantized at once; QE_LINEARS: none */
} norm_places;

static void borrow_unless(qe_effects *effects, const qe_frame *frame, int kind, int write) {
    if (kind != QE_SLOT_KINDS && kind != QE_SLOT_I) qe_effects_borrow(effects, frame, (qe_slot_kind)kind, write);
}

static qe_status norm_backward(const qe_lowering *lowering, uint32_t decoder, int gain, const norm_places *at) {
    const qe_model *model = lowering->model;
    const qe_frame *frame = lowering->frame;
    uint32_t weight = qe_weight_gain(model, decoder, gain);
    qe_op op = {.kind = QE_OP_NORM_BACKWARD};
    op.args.norm_backward = (qe_args_norm_backward){
        .dy = scratch(lowering, lowering->work.product),
        .x = at->x,
        .rstd = at->rstd,
        .gain = frame->weights[weight].master,
        .residual = at->residual,
        .dx = at->dx,
        .gain_grad = frame->weights[weight].grad,
        .partials = qe_model_takes_codes(model) ? scratch(lowering, lowering->work.partials) : NULL,
        .rows = model->tokens,
        .hidden = model->config.hidden,
        .set = frame->set,
    };
    qe_effects effects = {.count = 0};
    if (at->feeds != QE_LINEARS) {
        op.args.norm_backward.target = qe_lowering_target(lowering, decoder, at->feeds, QE_SCALE_DY);
        quantized_effects(&effects, lowering, decoder, at->feeds, QE_SCALE_DY);
    } else
        qe_effects_work(&effects, frame);
    qe_effects_borrow(&effects, frame, QE_SLOT_I, 0);
    borrow_unless(&effects, frame, at->x_slot, 0);
    borrow_unless(&effects, frame, at->residual_slot, 0);
    borrow_unless(&effects, frame, at->dx_slot, 1);
    qe_effects_weight_read(&effects, frame, weight);
    qe_effects_deposit(&effects, frame, weight);
    return qe_lowering_emit(lowering, &op, &effects);
}

static qe_status attention_backward(const qe_lowering *lowering, uint32_t decoder, const layer_places *places) {
    const qe_model *model = lowering->model;
    const qe_args_rope rope = rope_args(lowering, NULL);
    qe_op op = {.kind = QE_OP_ATTENTION_BACKWARD};
    op.args.attention_backward = (qe_args_attention_backward){
        .qkv = saved(places, places->at.qkv),
        .out = qe_model_takes_codes(model) ? saved(places, places->at.attended) : NULL,
        .lse = saved(places, places->at.lse),
        .dout = scratch(lowering, lowering->work.product),
        .dqkv = scratch(lowering, lowering->work.product_wide),
        .scratch = attention_scratch(lowering),
        .cosine = rope.cosine,
        .sine = rope.sine,
        .sequences = model->config.sequences,
        .sequence = model->config.sequence,
        .heads = model->config.heads,
        .kv_heads = model->config.kv_heads,
        .head_dim = model->head_dim,
        .deterministic = !model->config.attention_any_order,
        .target = qe_lowering_target(lowering, decoder, QE_LINEAR_QKV, QE_SCALE_DY),
    };
    qe_effects effects = {.count = 0};
    qe_effects_borrow(&effects, lowering->frame, QE_SLOT_I, 0);
    quantized_effects(&effects, lowering, decoder, QE_LINEAR_QKV, QE_SCALE_DY);
    return qe_lowering_emit(lowering, &op, &effects);
}

static qe_status feed_forward_input_grad(const qe_lowering *lowering, uint32_t decoder, const layer_places *places,
                                         void *through) {
    int dy_slot;
    const void *dy = qe_lowering_dy(lowering, decoder, &dy_slot);
    norm_places norm = {
        .x = saved(places, places->at.residual),
        .x_slot = QE_SLOT_I,
        .rstd = saved(places, places->at.rstd_post),
        .residual = dy,
        .residual_slot = dy_slot,
        .dx = through,
        .dx_slot = QE_SLOT_KINDS,
        .feeds = QE_LINEAR_O,
    };
    QE_TRY(quantize_dy(lowering, decoder, dy, dy_slot));
    QE_TRY(swiglu_input_grad(lowering, decoder, places));
    QE_TRY(linear_input_grad(lowering, decoder, QE_LINEAR_GATE_UP));
    return norm_backward(lowering, decoder, QE_GAIN_POST, &norm);
}

static qe_status attention_input_grad(const qe_lowering *lowering, uint32_t decoder, const layer_places *places,
                                      const void *through) {
    norm_places norm = {
        .x = qe_lowering_input(lowering, decoder),
        .x_slot = (int)qe_lowering_input_slot(lowering, decoder),
        .rstd = saved(places, places->at.rstd_input),
        .residual = through,
        .residual_slot = QE_SLOT_KINDS,
        .feeds = QE_LINEARS,
    };
    norm.dx = qe_lowering_dx(lowering, decoder, &norm.dx_slot);
    QE_TRY(linear_input_grad(lowering, decoder, QE_LINEAR_O));
    QE_TRY(attention_backward(lowering, decoder, places));
    QE_TRY(linear_input_grad(lowering, decoder, QE_LINEAR_QKV));
    return norm_backward(lowering, decoder, QE_GAIN_INPUT, &norm);
}

qe_status qe_lower_decoder_input_grad(const qe_lowering *lowering, uint32_t decoder) {
    layer_places places = places_of(lowering, decoder);
    void *through =
        scratch(lowering, lowering->work.grad[decoder % 2]); /* where dx goes too, unless it leaves the stage */
    QE_TRY(feed_forward_input_grad(lowering, decoder, &places, through));
    return attention_input_grad(lowering, decoder, &places, through);
}

/* Codes that a product takes as they lie need no place to be decoded. */
static int decodes(const qe_model *model) {
    return !qe_model_takes_codes(model) || model->recipe.kind == QE_RECIPE_BLOCK;
}

static qe_status linear_weight_grad(const qe_lowering *lowering, uint32_t decoder, int linear) {
    const qe_model *model = lowering->model;
    const qe_frame *frame = lowering->frame;
    uint32_t weight = qe_weight_linear(model, decoder, linear);
    qe_op op = {.kind = QE_OP_LINEAR_WEIGHT_GRAD};
    op.args.linear_weight_grad = (qe_args_linear_weight_grad){
        .x = qe_lowering_target(lowering, decoder, linear, QE_SCALE_X).retained,
        .dy = qe_lowering_target(lowering, decoder, linear, QE_SCALE_DY).retained,
        .scratch_x = decodes(model) ? scratch(lowering, lowering->work.operand) : NULL,
        .scratch_dy = decodes(model) ? scratch(lowering, lowering->work.operand_beside) : NULL,
        .grad = frame->weights[weight].grad,
        .rows = model->tokens,
        .in = qe_linear_in(model, linear),
        .out = qe_linear_out(model, linear),
        .set = frame->set || frame->apart,
        .accumulation = model->config.accumulation[2],
        .workspace = frame->workspace,
    };
    qe_effects effects = {.count = 0};
    qe_effects_workspace(&effects, frame);
    qe_effects_borrow(&effects, frame, QE_SLOT_X, 0);
    qe_effects_borrow(&effects, frame, QE_SLOT_Y, 0);
    if (decodes(model)) qe_effects_work(&effects, frame);
    qe_effects_deposit(&effects, frame, weight);
    return qe_lowering_emit(lowering, &op, &effects);
}

qe_status qe_lower_decoder_weight_grad(const qe_lowering *lowering, uint32_t decoder) {
    for (int linear = QE_LINEARS; linear-- > 0;) QE_TRY(linear_weight_grad(lowering, decoder, linear));
    return QE_OK;
}
