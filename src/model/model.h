/* model.h - inside of the model room: the layer list and where everything lies in slots and scratch. */
#ifndef QE_MODEL_MODEL_H
#define QE_MODEL_MODEL_H

#include "qeffect/model.h"

/* Model layers: 0 is the embedding, 1..layers the decoder layers, layers+1 the final norm and head. */
enum { QE_LINEAR_QKV, QE_LINEAR_O, QE_LINEAR_GATE_UP, QE_LINEAR_DOWN, QE_LINEARS };
enum { QE_GAIN_INPUT, QE_GAIN_POST, QE_GAINS };

struct qe_model {
    qe_model_config config;
    qe_recipe recipe;
    uint32_t head_dim, qkv_columns, tokens;
    uint32_t weight_count, parameter_count;
    qe_weight_info *weights;
    qe_parameter *parameters; /* sorted by name */
};

/* Byte offsets in the scratch of the compute stream. */
typedef struct qe_work_layout {
    uint64_t operand; /* [T, widest] the quantized operand of the next product */
    uint64_t operand_beside; /* of a product whose op makes the next operand: [T, hidden]; and the second operand of a
                                weight gradient, where it is decoded: [T, widest] */
    uint64_t operand_scale, operand_scale_beside; /* [1] inverse scales of operands that are not retained */
    uint64_t product; /* [T, widest] result of a product */
    uint64_t product_wide; /* [T, widest] gradient before it is quantized */
    uint64_t grad[2]; /* [T, hidden] gradient of the residual stream, in turns */
    uint64_t attention; /* scratch of one head */
    uint64_t partials; /* sums on their way */
    uint64_t bytes;
} qe_work_layout;
qe_work_layout qe_work_layout_of(const qe_model *model);

/* Offsets of one decoder layer in slot I; `input` is unused where the input lies in IN_F. */
typedef struct qe_saved_layout {
    uint64_t input, rstd_input, qkv, attended, lse, residual, rstd_post, gate_up, end;
} qe_saved_layout;
qe_saved_layout qe_saved_layout_of(const qe_model *model, uint64_t begin, int with_input);

/* A retained quantized tensor at an offset of slot X or Y: codes, then inverse scales. */
typedef struct qe_retained_layout {
    uint64_t codes, scale_inv, end;
} qe_retained_layout;
qe_retained_layout qe_retained_layout_of(const qe_model *model, uint64_t begin, uint32_t columns, qe_format format);

/* Input and output widths of a linear. */
uint32_t qe_linear_in(const qe_model *model, int linear);
uint32_t qe_linear_out(const qe_model *model, int linear);

/* Weight indices. */
uint32_t qe_weight_embed(void);
uint32_t qe_weight_gain(const qe_model *model, uint32_t decoder, int gain);
uint32_t qe_weight_linear(const qe_model *model, uint32_t decoder, int linear);
uint32_t qe_weight_final_gain(const qe_model *model);
uint32_t qe_weight_head(const qe_model *model);

/* Decoder layers [first, last) of a stage. */
void qe_stage_decoders(const qe_model *model, uint32_t stage, uint32_t stages, uint32_t *first_out, uint32_t *last_out);

/* Format of quantized activations (forward) or gradients (backward); and of what products take of them. */
qe_format qe_model_format(const qe_model *model, int gradient);
qe_format qe_model_operand_format(const qe_model *model, int gradient);
/* Products take codes: rows for one, the transpose for the other. */
int qe_model_takes_codes(const qe_model *model);
/* ... of 8 bits. */
int qe_model_takes_fp8(const qe_model *model);
/* How a weight's cache is filled: the model's recipe for linears of decoders, bf16 for the head. */
qe_recipe_kind qe_weight_recipe(const qe_model *model, uint32_t weight);
/* Bytes of an activation. */
uint64_t qe_activation_bytes(const qe_model *model, uint64_t rows, uint64_t columns);

/* Offset in slot I of decoder `index_in_stage`, and of the head behind the last. */
uint64_t qe_saved_begin(const qe_model *model, uint32_t stage, uint32_t stages, uint32_t decoder);
/* Does the layer right behind `decoder`'s predecessor keep its own input in slot I (not in IN_F)? */
int qe_saved_with_input(uint32_t stage, uint32_t first, uint32_t decoder);
uint64_t qe_retained_begin(const qe_model *model, uint32_t stage, uint32_t stages, uint32_t decoder, int linear,
                           qe_slot_kind kind);

/* Head layout: in slot I [input?][rstd], in slot X [xn][logits]. */
uint64_t qe_head_input(const qe_model *model, uint32_t stages);
uint64_t qe_head_rstd(const qe_model *model, uint32_t stages);
uint64_t qe_head_normed(const qe_model *model, uint32_t stages);
uint64_t qe_head_logits(const qe_model *model, uint32_t stages);

/* What a microbatch brings and leaves: tokens (slot I, first stage), targets (slot I, last stage), loss (slot X, last
 * stage). */
uint64_t qe_feed_tokens(const qe_model *model, uint32_t stages);
uint64_t qe_feed_targets(const qe_model *model, uint32_t stages);
uint64_t qe_head_loss(const qe_model *model, uint32_t stages);

/* Collects the effects of one op. */
typedef struct qe_effects {
    qe_effect list[QE_EFFECTS_MAX];
    uint32_t count;
} qe_effects;

/* Lowering state of one action. */
typedef struct qe_lowering {
    const qe_model *model;
    const qe_frame *frame;
    const qe_sink *sink;
    qe_work_layout work;
    uint32_t first, last; /* decoders of the stage */
    uint32_t layer; /* model layer that ops are emitted for */
} qe_lowering;

qe_status qe_lowering_emit(const qe_lowering *lowering, const qe_op *op, const qe_effects *effects);

void qe_effects_borrow(qe_effects *effects, const qe_frame *frame, qe_slot_kind kind, int write);
void qe_effects_work(qe_effects *effects, const qe_frame *frame);
/* Of a matrix product, where the backend asks for any. */
void qe_effects_workspace(qe_effects *effects, const qe_frame *frame);
void qe_effects_weight_read(qe_effects *effects, const qe_frame *frame, uint32_t weight);
/* layouts: QE_LAYOUT_OPERAND or QE_LAYOUT_CODES */
void qe_effects_cache_use(qe_effects *effects, const qe_model *model, const qe_frame *frame, uint32_t weight,
                          int layouts);
void qe_effects_cache_fill(qe_effects *effects, const qe_model *model, const qe_frame *frame, uint32_t weight);
void qe_effects_scale(qe_effects *effects, const qe_frame *frame, uint32_t weight, int role);
void qe_effects_deposit(qe_effects *effects, const qe_frame *frame, uint32_t weight);
void qe_effects_buffer(qe_effects *effects, uint32_t object, int write, uint64_t begin, uint64_t end);

/* A weight as forward products (transposed = 0) or input gradients (1) take it. */
qe_qtensor qe_lowering_weight(const qe_lowering *lowering, uint32_t weight, int transposed);
/* Where the quantized operand of a linear goes. role: QE_SCALE_X or QE_SCALE_DY. */
qe_quantize_target qe_lowering_target(const qe_lowering *lowering, uint32_t decoder, int linear, int role);

/* Copies of the batch into the slot, before everything else of F; and of the loss out of it, behind everything. */
qe_status qe_lower_feed(const qe_lowering *lowering);
qe_status qe_lower_collect(const qe_lowering *lowering);
qe_status qe_lower_fill(const qe_lowering *lowering);
qe_status qe_lower_embed_forward(const qe_lowering *lowering);
qe_status qe_lower_embed_backward(const qe_lowering *lowering, const void *dx);
qe_status qe_lower_head_forward(const qe_lowering *lowering);
qe_status qe_lower_head_input_grad(const qe_lowering *lowering, void *dx);
qe_status qe_lower_head_weight_grad(const qe_lowering *lowering);
qe_status qe_lower_decoder_forward(const qe_lowering *lowering, uint32_t decoder);
qe_status qe_lower_decoder_input_grad(const qe_lowering *lowering, uint32_t decoder);
qe_status qe_lower_decoder_weight_grad(const qe_lowering *lowering, uint32_t decoder);

/* Addresses of layer inputs, outputs and gradients of this action. */
const void *qe_lowering_input(const qe_lowering *lowering, uint32_t decoder); /* decoder == last: the head's input */
void *qe_lowering_output(const qe_lowering *lowering, uint32_t decoder);
qe_slot_kind qe_lowering_input_slot(const qe_lowering *lowering, uint32_t decoder);
qe_slot_kind qe_lowering_output_slot(const qe_lowering *lowering, uint32_t decoder);
/* Gradient arriving at the output of `decoder`,
and the one it hands to its input; *slot_out: QE_SLOT_KINDS = scratch. */
const void *qe_lowering_dy(const qe_lowering *lowering, uint32_t decoder, int *slot_out);
void *qe_lowering_dx(const qe_lowering *lowering, uint32_t decoder, int *slot_out);

/* Entry of the table (layout.c). */
uint64_t qe_model_slot_bytes(const void *model, uint32_t stage, uint32_t stages, qe_slot_kind kind);
/* Entry of the table (lower.c). */
qe_status qe_model_lower(const void *model, const qe_frame *frame, qe_phase phase, const qe_sink *sink);

int qe_lowering_is_first_stage(const qe_lowering *lowering);
int qe_lowering_is_last_stage(const qe_lowering *lowering);
char *qe_at(char *base, uint64_t offset_bytes); /* NULL stays NULL */

#endif
