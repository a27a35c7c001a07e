/* layout.c - where everything of one microbatch lies: in slots I, X, Y and in the scratch of the compute stream.
 * Only this file computes offsets; plan and step only learn the totals. */
#include <stddef.h>
#include "base/align.h"
#include "base/assert.h"
#include "model/model.h"

static uint64_t take(uint64_t *end, uint64_t bytes) {
    uint64_t begin = *end;
    *end = qe_aligned(begin + bytes);
    return begin;
}

static uint64_t floats(uint64_t rows, uint64_t columns) {
    return rows * columns * sizeof(float);
}

char *qe_at(char *base, uint64_t offset_bytes) {
    return base == NULL ? NULL : base + offset_bytes;
}

uint32_t qe_linear_in(const qe_model *model, int linear) {
    switch (linear) {
        case QE_LINEAR_O: return model->config.heads * model->head_dim;
        case QE_LINEAR_DOWN: return model->config.ffn;
        default: return model->config.hidden;
    }
}

uint32_t qe_linear_out(const qe_model *model, int linear) {
    switch (linear) {
        case QE_LINEAR_QKV: return model->qkv_columns;
        case QE_LINEAR_GATE_UP: return 2 * model->config.ffn;
        default: return model->config.hidden;
    }
}

uint64_t qe_activation_bytes(const qe_model *model, uint64_t rows, uint64_t columns) {
    return rows * columns * (model->config.numerics.activation == QE_FORMAT_BF16 ? 2 : sizeof(float));
}

int qe_model_takes_codes(const qe_model *model) {
    return model->config.numerics.operands == QE_OPERANDS_CODES;
}

int qe_model_takes_fp8(const qe_model *model) {
    return qe_model_takes_codes(model) &&
           (model->recipe.kind == QE_RECIPE_DELAYED || model->recipe.kind == QE_RECIPE_CURRENT);
}

static uint32_t widest(const qe_model *model) {
    uint32_t most = model->config.hidden;
    for (int linear = 0; linear < QE_LINEARS; linear++) {
        if (qe_linear_in(model, linear) > most) most = qe_linear_in(model, linear);
        if (qe_linear_out(model, linear) > most) most = qe_linear_out(model, linear);
    }
    return most;
}

/* The largest of: partial sums of a gain's gradient, of a gradient's norm, and the losses of rows. */
static uint64_t partial_bytes(const qe_model *model) {
    if (!qe_model_takes_codes(model)) return 0;
    uint64_t bytes = floats(QE_GAIN_PARTIALS, model->config.hidden);
    if (bytes < QE_NORM_PARTIALS * sizeof(double)) bytes = QE_NORM_PARTIALS * sizeof(double);
    return bytes < model->tokens * sizeof(double) ? model->tokens * sizeof(double) : bytes;
}

static uint64_t attention_scratch_bytes(const qe_model *model) {
    if (qe_model_takes_codes(model)) return 0; /* the backend's own */
    return qe_attention_scratch_floats(model->config.sequence, model->head_dim) * sizeof(float);
}

qe_work_layout qe_work_layout_of(const qe_model *model) {
    qe_work_layout work = {0};
    uint64_t values = (uint64_t)model->tokens * widest(model);
    uint64_t wide = qe_activation_bytes(model, model->tokens, widest(model));
    uint64_t residual = qe_activation_bytes(model, model->tokens, model->config.hidden);
    work.partials = take(&work.bytes, partial_bytes(model)); /* first: the step's own sums use the beginning too */
    work.operand = take(&work.bytes, values * qe_format_bytes(qe_model_operand_format(model, 0)));
    uint64_t beside = qe_model_takes_fp8(model) ? (uint64_t)model->tokens * model->config.hidden : values;
    work.operand_beside = take(&work.bytes, beside * qe_format_bytes(qe_model_operand_format(model, 1)));
    work.operand_scale = take(&work.bytes, sizeof(float));
    work.operand_scale_beside = take(&work.bytes, sizeof(float));
    work.product = take(&work.bytes, wide);
    work.product_wide = take(&work.bytes, wide);
    work.grad[0] = take(&work.bytes, residual);
    work.grad[1] = take(&work.bytes, residual);
    work.attention = take(&work.bytes, attention_scratch_bytes(model));
    return work;
}

qe_saved_layout qe_saved_layout_of(const qe_model *model, uint64_t begin, int with_input) {
    const qe_model_config *c = &model->config;
    uint64_t tokens = model->tokens;
    qe_saved_layout saved = {.end = begin};
    saved.input = take(&saved.end, with_input ? qe_activation_bytes(model, tokens, c->hidden) : 0);
    saved.rstd_input = take(&saved.end, floats(tokens, 1));
    saved.qkv = take(&saved.end, qe_activation_bytes(model, tokens, model->qkv_columns));
    uint64_t attended = qe_activation_bytes(model, tokens, c->heads * model->head_dim);
    saved.attended = /* backward of a library takes the result too */
        take(&saved.end, qe_model_takes_codes(model) ? attended : 0);
    saved.lse = take(&saved.end, floats(tokens, c->heads));
    saved.residual = take(&saved.end, qe_activation_bytes(model, tokens, c->hidden));
    saved.rstd_post = take(&saved.end, floats(tokens, 1));
    saved.gate_up = take(&saved.end, qe_activation_bytes(model, tokens, 2ull * c->ffn));
    return saved;
}

static uint64_t retained_scale_count(const qe_model *model, uint32_t columns) {
    switch (model->recipe.kind) {
        case QE_RECIPE_BLOCK: return (uint64_t)((model->tokens + QE_BLOCK - 1) / QE_BLOCK) * columns;
        case QE_RECIPE_DELAYED:
        case QE_RECIPE_CURRENT: return 1;
        default: return 0;
    }
}

qe_retained_layout qe_retained_layout_of(const qe_model *model, uint64_t begin, uint32_t columns, qe_format format) {
    qe_retained_layout retained = {.end = begin};
    retained.codes = take(&retained.end, (uint64_t)model->tokens * columns * qe_format_bytes(format));
    retained.scale_inv = take(&retained.end, retained_scale_count(model, columns) * sizeof(float));
    return retained;
}

void qe_stage_decoders(const qe_model *model, uint32_t stage, uint32_t stages, uint32_t *first_out,
                       uint32_t *last_out) {
    QE_ASSERT(stage < stages);
    *first_out = (uint32_t)((uint64_t)model->config.layers * stage / stages);
    *last_out = (uint32_t)((uint64_t)model->config.layers * (stage + 1) / stages);
}

int qe_saved_with_input(uint32_t stage, uint32_t first, uint32_t decoder) {
    return decoder != first || stage == 0; /* the embedding writes into its successor's input */
}

/* All decoders of a stage are alike but for the first, whose input may lie elsewhere. */
uint64_t qe_saved_begin(const qe_model *model, uint32_t stage, uint32_t stages, uint32_t decoder) {
    uint32_t first, last;
    qe_stage_decoders(model, stage, stages, &first, &last);
    if (decoder == first) return 0;
    uint64_t head = qe_saved_layout_of(model, 0, qe_saved_with_input(stage, first, first)).end;
    return head + (decoder - first - 1ull) * qe_saved_layout_of(model, 0, 1).end;
}

qe_format qe_model_format(const qe_model *model, int gradient) {
    switch (model->recipe.kind) {
        case QE_RECIPE_BF16: return QE_FORMAT_BF16;
        case QE_RECIPE_FP32: return QE_FORMAT_FP32;
        case QE_RECIPE_BLOCK: return QE_FORMAT_E4M3;
        default: return gradient ? QE_FORMAT_E5M2 : QE_FORMAT_E4M3; /* HYBRID */
    }
}

qe_format qe_model_operand_format(const qe_model *model, int gradient) {
    if (!qe_model_takes_codes(model)) return QE_FORMAT_FP32;
    return model->recipe.kind == QE_RECIPE_BLOCK ? QE_FORMAT_BF16 : qe_model_format(model, gradient);
}

/* Slot X keeps the inputs of the linears, slot Y the gradients of their outputs, decoder by decoder. */
static uint64_t retained_end(const qe_model *model, uint64_t begin, int linear, qe_slot_kind kind) {
    int gradient = kind == QE_SLOT_Y;
    uint32_t columns = gradient ? qe_linear_out(model, linear) : qe_linear_in(model, linear);
    return qe_retained_layout_of(model, begin, columns, qe_model_format(model, gradient)).end;
}

uint64_t qe_retained_begin(const qe_model *model, uint32_t stage, uint32_t stages, uint32_t decoder, int linear,
                           qe_slot_kind kind) {
    uint32_t first, last;
    qe_stage_decoders(model, stage, stages, &first, &last);
    uint64_t whole = 0, part = 0;
    for (int l = 0; l < QE_LINEARS; l++) whole = retained_end(model, whole, l, kind);
    for (int l = 0; l < linear; l++) part = retained_end(model, part, l, kind);
    return (decoder - first) * whole + part; /* every decoder is alike, and its end is aligned */
}

uint64_t qe_head_input(const qe_model *model, uint32_t stages) {
    return qe_saved_begin(model, stages - 1, stages, model->config.layers);
}

uint64_t qe_head_rstd(const qe_model *model, uint32_t stages) {
    return qe_aligned(qe_head_input(model, stages) + qe_activation_bytes(model, model->tokens, model->config.hidden));
}

uint64_t qe_head_normed(const qe_model *model, uint32_t stages) {
    return qe_retained_begin(model, stages - 1, stages, model->config.layers, 0, QE_SLOT_X);
}

uint64_t qe_head_logits(const qe_model *model, uint32_t stages) {
    return qe_aligned(qe_head_normed(model, stages) + qe_activation_bytes(model, model->tokens, model->config.hidden));
}

uint64_t qe_model_logits_offset_bytes(const qe_model *model, uint32_t stages) {
    return qe_head_logits(model, stages);
}

static uint64_t token_bytes(const qe_model *model) {
    return qe_aligned((uint64_t)model->tokens * sizeof(int32_t));
}

/* Tokens and targets are copied into the slot, so that one graph serves every microbatch that lands there. */
uint64_t qe_feed_tokens(const qe_model *model, uint32_t stages) {
    uint32_t first, last;
    qe_stage_decoders(model, 0, stages, &first, &last);
    return stages == 1 ? qe_feed_targets(model, 1) + token_bytes(model) : qe_saved_begin(model, 0, stages, last);
}

uint64_t qe_feed_targets(const qe_model *model, uint32_t stages) {
    return qe_aligned(qe_head_rstd(model, stages) + floats(model->tokens, 1));
}

uint64_t qe_head_loss(const qe_model *model, uint32_t stages) {
    return qe_aligned(qe_head_logits(model, stages) + qe_activation_bytes(model, model->tokens, model->config.vocab));
}

static uint64_t saved_bytes(const qe_model *model, uint32_t stage, uint32_t stages) {
    uint32_t first, last;
    qe_stage_decoders(model, stage, stages, &first, &last);
    if (stage == 0) return qe_feed_tokens(model, stages) + token_bytes(model);
    if (stage + 1 == stages) return qe_feed_targets(model, stages) + token_bytes(model);
    return qe_saved_begin(model, stage, stages, last);
}

static uint64_t retained_bytes(const qe_model *model, uint32_t stage, uint32_t stages, qe_slot_kind kind) {
    uint32_t first, last;
    qe_stage_decoders(model, stage, stages, &first, &last);
    if (kind == QE_SLOT_X && stage + 1 == stages) return qe_aligned(qe_head_loss(model, stages) + sizeof(double));
    return qe_retained_begin(model, stage, stages, last, 0, kind);
}

uint64_t qe_model_slot_bytes(const void *opaque, uint32_t stage, uint32_t stages, qe_slot_kind kind) {
    const qe_model *model = opaque;
    uint64_t boundary = qe_aligned(qe_activation_bytes(model, model->tokens, model->config.hidden));
    switch (kind) {
        case QE_SLOT_I: return saved_bytes(model, stage, stages);
        case QE_SLOT_X:
        case QE_SLOT_Y: return retained_bytes(model, stage, stages, kind);
        case QE_SLOT_IN_F:
        case QE_SLOT_OUT_B: return stage > 0 ? boundary : 0;
        case QE_SLOT_OUT_F:
        case QE_SLOT_IN_B: return stage + 1 < stages ? boundary : 0;
        default: return 0;
    }
}
