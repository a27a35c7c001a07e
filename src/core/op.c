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
        [QE_OP_LINEAR_ROPE] = "linear_rope",
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

static int is_made(const qe_quantize_target *target) {
    return target->operand.codes != NULL || target->retained.codes != NULL;
}

int qe_attention_backward_quantizes(const qe_args_attention_backward *args) {
    return is_made(&args->target);
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

static const qe_quantize_target *target_of(const qe_op *op) {
    switch ((int)op->kind) {
        case QE_OP_LINEAR: return &op->args.linear.target;
        case QE_OP_LINEAR_INPUT_GRAD: return &op->args.linear_input_grad.target;
        case QE_OP_ATTENTION: return &op->args.attention.target;
        case QE_OP_ATTENTION_BACKWARD: return &op->args.attention_backward.target;
        case QE_OP_NORM_BACKWARD: return &op->args.norm_backward.target;
        default: return NULL; /* what else has a target cannot do without */
    }
}

static int has_target(const qe_op *op) {
    const qe_quantize_target *target = target_of(op);
    return target != NULL && is_made(target);
}

/* The norm's backward is one thing with a target, too. */
static int is_double(const qe_op *op) {
    return op->kind == QE_OP_LINEAR_ROPE || (op->kind != QE_OP_NORM_BACKWARD && has_target(op));
}

static void linear_split(qe_args_linear *first, qe_op *second) {
    second->kind = QE_OP_SWIGLU_QUANTIZE;
    second->args.swiglu = (qe_args_swiglu){
        .gate_up = first->y,
        .rows = first->rows,
        .ffn = first->out / 2,
        .decoded_scratch = first->decoded_scratch,
        .target = first->target,
    };
    first->decoded_scratch = NULL;
    first->target = (qe_quantize_target){0};
}

static void input_grad_split(qe_args_linear_input_grad *first, qe_op *second) {
    second->kind = QE_OP_SWIGLU_BACKWARD_QUANTIZE;
    second->args.swiglu_backward = (qe_args_swiglu_backward){
        .gate_up = first->gate_up,
        .dy = first->dx,
        .dgate_up = first->dgate_up,
        .rows = first->rows,
        .ffn = first->in,
        .target = first->target,
    };
    first->gate_up = NULL;
    first->dgate_up = NULL;
    first->target = (qe_quantize_target){0};
}

static void attention_split(qe_args_attention *first, qe_op *second) {
    second->kind = QE_OP_QUANTIZE;
    second->args.quantize = (qe_args_quantize){
        .x = first->out,
        .rows = first->sequences * first->sequence,
        .columns = first->heads * first->head_dim,
        .target = first->target,
    };
    first->target = (qe_quantize_target){0};
}

static void attention_backward_split(qe_args_attention_backward *first, qe_op *second) {
    second->kind = QE_OP_ROPE_BACKWARD_QUANTIZE;
    second->args.rope = qe_attention_backward_rope(first);
    first->cosine = NULL;
    first->sine = NULL;
    first->target = (qe_quantize_target){0};
}

static void linear_rope_split(qe_op *first, qe_op *second) {
    const qe_args_linear_rope whole = first->args.linear_rope;
    first->kind = QE_OP_LINEAR;
    first->args = (qe_op_args){.linear = {
                                   .x = whole.x,
                                   .w = whole.w,
                                   .y = whole.y,
                                   .workspace = whole.workspace,
                                   .rows = whole.rows,
                                   .in = whole.in,
                                   .out = (whole.heads + 2 * whole.kv_heads) * whole.head_dim,
                                   .accumulation = whole.accumulation,
                               }};
    second->kind = QE_OP_ROPE;
    second->args.rope = (qe_args_rope){
        .qkv = whole.y,
        .cosine = whole.cosine,
        .sine = whole.sine,
        .rows = whole.rows,
        .sequence = whole.sequence,
        .heads = whole.heads,
        .kv_heads = whole.kv_heads,
        .head_dim = whole.head_dim,
    };
}

uint32_t qe_op_parts(const qe_op *op, qe_op parts_out[QE_OP_PARTS_MAX]) {
    parts_out[0] = *op;
    if (!is_double(op)) return 1;
    parts_out[1] = (qe_op){.layer = op->layer, .per_microbatch = op->per_microbatch};
    qe_op_args *first = &parts_out[0].args;
    switch ((int)op->kind) {
        case QE_OP_LINEAR: linear_split(&first->linear, &parts_out[1]); break;
        case QE_OP_LINEAR_ROPE: linear_rope_split(&parts_out[0], &parts_out[1]); break;
        case QE_OP_LINEAR_INPUT_GRAD: input_grad_split(&first->linear_input_grad, &parts_out[1]); break;
        case QE_OP_ATTENTION: attention_split(&first->attention, &parts_out[1]); break;
        default: attention_backward_split(&first->attention_backward, &parts_out[1]); break;
    }
    return 2;
}

const char *qe_op_title(const qe_op *op) {
    if (!has_target(op)) return qe_op_name(op->kind);
    switch ((int)op->kind) {
        case QE_OP_LINEAR: return "linear_swiglu_quantize";
        case QE_OP_LINEAR_INPUT_GRAD: return "linear_input_grad_swiglu_quantize";
        case QE_OP_ATTENTION: return "attention_quantize";
        case QE_OP_NORM_BACKWARD: return "norm_backward_quantize";
        default: return "attention_backward_rope_quantize";
    }
}
