/* op_layout.c - where the addresses lie in the arguments of each op: a graph's seal tells moved memory from a changed
 * constant with it. */
#include <stddef.h>

#include "base/assert.h"
#include "qeffect/op.h"

QE_STATIC_ASSERT(sizeof(qe_op_args) == QE_OP_RAW_WORDS * sizeof(uint64_t), "raw covers all arguments and no more");

enum { ADDRESSES_MAX = 15 };

#define AT(args, field) (uint16_t)(offsetof(args, field) + 1) /* + 1: 0 ends a list */
#define TENSOR(args, field) AT(args, field.codes), AT(args, field.scale_inv)
#define TARGET(args)                                                                                  \
    AT(args, target.scale), AT(args, target.amax), TENSOR(args, target.operand), TENSOR(args, target.retained)

static const uint16_t addresses[QE_OP_KINDS][ADDRESSES_MAX + 1] = {
    [QE_OP_EMBED] = {AT(qe_args_embed, tokens), AT(qe_args_embed, table), AT(qe_args_embed, y)},
    [QE_OP_EMBED_BACKWARD] = {AT(qe_args_embed_backward, tokens), AT(qe_args_embed_backward, dy),
                              AT(qe_args_embed_backward, grad)},
    [QE_OP_NORM] = {AT(qe_args_norm, x), AT(qe_args_norm, gain), AT(qe_args_norm, rstd), AT(qe_args_norm, y),
                    TARGET(qe_args_norm)},
    [QE_OP_NORM_QUANTIZE] = {AT(qe_args_norm, x), AT(qe_args_norm, gain), AT(qe_args_norm, rstd), AT(qe_args_norm, y),
                             TARGET(qe_args_norm)},
    [QE_OP_NORM_BACKWARD] = {AT(qe_args_norm_backward, dy), AT(qe_args_norm_backward, x),
                             AT(qe_args_norm_backward, rstd), AT(qe_args_norm_backward, gain),
                             AT(qe_args_norm_backward, residual), AT(qe_args_norm_backward, dx),
                             AT(qe_args_norm_backward, gain_grad), AT(qe_args_norm_backward, partials),
                             TARGET(qe_args_norm_backward)},
    [QE_OP_QUANTIZE] = {AT(qe_args_quantize, x), TARGET(qe_args_quantize)},
    [QE_OP_QUANTIZE_WEIGHT] = {AT(qe_args_quantize_weight, w), TARGET(qe_args_quantize_weight),
                               AT(qe_args_quantize_weight, weight_witness),
                               AT(qe_args_quantize_weight, scale_epoch), AT(qe_args_quantize_weight, key)},
    [QE_OP_LINEAR] = {TENSOR(qe_args_linear, x), TENSOR(qe_args_linear, w), AT(qe_args_linear, residual),
                      AT(qe_args_linear, y), AT(qe_args_linear, workspace), AT(qe_args_linear, decoded_scratch),
                      TARGET(qe_args_linear)},
    [QE_OP_LINEAR_INPUT_GRAD] = {TENSOR(qe_args_linear_input_grad, dy), TENSOR(qe_args_linear_input_grad, w),
                                 AT(qe_args_linear_input_grad, dx), AT(qe_args_linear_input_grad, workspace),
                                 AT(qe_args_linear_input_grad, gate_up), AT(qe_args_linear_input_grad, dgate_up),
                                 TARGET(qe_args_linear_input_grad)},
    [QE_OP_LINEAR_WEIGHT_GRAD] = {TENSOR(qe_args_linear_weight_grad, x), TENSOR(qe_args_linear_weight_grad, dy),
                                  AT(qe_args_linear_weight_grad, scratch_x), AT(qe_args_linear_weight_grad, scratch_dy),
                                  AT(qe_args_linear_weight_grad, grad), AT(qe_args_linear_weight_grad, workspace)},
    [QE_OP_ROPE] = {AT(qe_args_rope, qkv), AT(qe_args_rope, cosine), AT(qe_args_rope, sine), TARGET(qe_args_rope)},
    [QE_OP_LINEAR_ROPE] = {TENSOR(qe_args_linear_rope, x), TENSOR(qe_args_linear_rope, w), AT(qe_args_linear_rope, y),
                           AT(qe_args_linear_rope, workspace), AT(qe_args_linear_rope, cosine),
                           AT(qe_args_linear_rope, sine)},
    [QE_OP_ROPE_BACKWARD_QUANTIZE] = {AT(qe_args_rope, qkv), AT(qe_args_rope, cosine), AT(qe_args_rope, sine),
                                      TARGET(qe_args_rope)},
    [QE_OP_ATTENTION] = {AT(qe_args_attention, qkv), AT(qe_args_attention, out), AT(qe_args_attention, lse),
                         AT(qe_args_attention, scratch), TARGET(qe_args_attention)},
    [QE_OP_ATTENTION_BACKWARD] = {AT(qe_args_attention_backward, qkv), AT(qe_args_attention_backward, out),
                                  AT(qe_args_attention_backward, lse),
                                  AT(qe_args_attention_backward, dout), AT(qe_args_attention_backward, dqkv),
                                  AT(qe_args_attention_backward, scratch), AT(qe_args_attention_backward, cosine),
                                  AT(qe_args_attention_backward, sine), TARGET(qe_args_attention_backward)},
    [QE_OP_SWIGLU_QUANTIZE] = {AT(qe_args_swiglu, gate_up), AT(qe_args_swiglu, decoded_scratch),
                               TARGET(qe_args_swiglu)},
    [QE_OP_SWIGLU_BACKWARD_QUANTIZE] = {AT(qe_args_swiglu_backward, gate_up), AT(qe_args_swiglu_backward, dy),
                                        AT(qe_args_swiglu_backward, dgate_up), TARGET(qe_args_swiglu_backward)},
    [QE_OP_CROSS_ENTROPY] = {AT(qe_args_cross_entropy, logits), AT(qe_args_cross_entropy, targets),
                             AT(qe_args_cross_entropy, loss), AT(qe_args_cross_entropy, row_losses)},
    [QE_OP_COPY] = {AT(qe_args_copy, from), AT(qe_args_copy, to)},
    [QE_OP_ACCUMULATE] = {AT(qe_args_accumulate, from), AT(qe_args_accumulate, to)},
    [QE_OP_GRAD_NORM] = {AT(qe_args_grad_norm, grad), AT(qe_args_grad_norm, sum),
                         AT(qe_args_grad_norm, partials)},
    [QE_OP_ADAMW] = {AT(qe_args_adamw, weight), AT(qe_args_adamw, grad), AT(qe_args_adamw, moment1),
                     AT(qe_args_adamw, moment2), AT(qe_args_adamw, step), AT(qe_args_adamw, witness),
                     AT(qe_args_adamw, fault), TARGET(qe_args_adamw), AT(qe_args_adamw, scale_epoch),
                     AT(qe_args_adamw, key)},
    [QE_OP_FOLD] = {AT(qe_args_fold, states), AT(qe_args_fold, recipe), AT(qe_args_fold, fault)},
    [QE_OP_STAMP] = {AT(qe_args_stamp, words[0]), AT(qe_args_stamp, words[1]), AT(qe_args_stamp, words[2]),
                     AT(qe_args_stamp, words[3])},
    [QE_OP_TALLY] = {AT(qe_args_tally, words)},
    [QE_OP_GUARD] = {AT(qe_args_guard, words), AT(qe_args_guard, expected), AT(qe_args_guard, launch),
                     AT(qe_args_guard, fault)},
    [QE_OP_SEND] = {AT(qe_args_transfer, channel), AT(qe_args_transfer, bytes_at)},
    [QE_OP_RECV] = {AT(qe_args_transfer, channel), AT(qe_args_transfer, bytes_at)},
    [QE_OP_DELAY] = {AT(qe_args_delay, span_ns)},
};

int qe_op_is_address(qe_op_kind kind, uint32_t offset_bytes) {
    QE_ASSERT(kind < QE_OP_KINDS);
    for (int i = 0; i <= ADDRESSES_MAX && addresses[kind][i] != 0; i++)
        if (addresses[kind][i] - 1u == offset_bytes) return 1;
    return 0;
}
