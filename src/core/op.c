/* op.c - the words for ops, and what of an op is another one. */
#include "qeffect/op.h"

#include <stddef.h>

#include "base/assert.h"

const char *qe_op_name(qe_op_kind kind) {
    static const char *const names[QE_OP_KINDS] = {
        [QE_OP_EMBED] = "embed",
        [QE_OP_EMBED_BACKWARD] = "embed_backward",
        [QE_OP_NORM] = "norm",
        [QE_OP_NORM_QUANTIZE] = "norm_quantize",
        [QE_OP_NORM_BACKWARD] = "norm_backward",
        [QE_OP_QUANTIZE] = "quantize",
        [QE_OP_QUANTIZE_WEIGHT] = "quantize_weight",
        [QE_OP_LINEAR] = "linear",
        [QE_OP_LINEAR_INPUT_GRAD] = "linear_input_grad",
        [QE_OP_LINEAR_WEIGHT_GRAD] = "linear_weight_grad",
        [QE_OP_ROPE] = "rope",
        [QE_OP_ROPE_BACKWARD_QUANTIZE] = "rope_backward_quantize",
        [QE_OP_ATTENTION] = "attention",
        [QE_OP_ATTENTION_BACKWARD] = "attention_backward",
        [QE_OP_SWIGLU_QUANTIZE] = "swiglu_quantize",
        [QE_OP_SWIGLU_BACKWARD_QUANTIZE] = "swiglu_backward_quantize",
        [QE_OP_CROSS_ENTROPY] = "cross_entropy",
        [QE_OP_COPY] = "copy",
        [QE_OP_ACCUMULATE] = "accumulate",
        [QE_OP_GRAD_NORM] = "grad_norm",
        [QE_OP_ADAMW] = "adamw",
        [QE_OP_FOLD] = "fold",
        [QE_OP_STAMP] = "stamp",
        [QE_OP_TALLY] = "tally",
        [QE_OP_GUARD] = "guard",
        [QE_OP_SEND] = "send",
        [QE_OP_RECV] = "recv",
        [QE_OP_DELAY] = "delay",
    };
    QE_ASSERT(kind < QE_OP_KINDS);
    return names[kind];
}

int qe_attention_backward_quantizes(const qe_args_attention_backward *args) {
    return args->target.operand.codes != NULL || args->target.retained.codes != NULL;
}

qe_args_rope qe_attention_backward_rope(const qe_args_attention_backward *args) {
    return (qe_args_rope){
        .qkv = args->dqkv,
        .cosine = args->cosine,
        .sine = args->sine,
        .rows = args->sequences * args->sequence,
        .sequence = args->sequence,
        .heads = args->heads,
        .kv_heads = args->kv_heads,
        .head_dim = args->head_dim,
        .target = args->target,
    };
}
