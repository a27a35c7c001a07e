/* ops.c - see ops.h. */
#include "backend/te/ops.h"

#include "backend/cuda/kernels.h"
#include "backend/cuda/product.h"
#include "backend/cuda/substitute.h"
#include "backend/te/attention.h"
#include "base/assert.h"

/* Rows and columns that its fused kernels and 8-bit products take without padding. */
enum { WHOLE = 16 };

static int is_code(uint8_t format) { return format == QE_FORMAT_E4M3 || format == QE_FORMAT_E5M2; }

/* --- what is taken ---------------------------------------------------------------------------------------------- */

/* Codes of one scale as the product of a TN form wants them, or bf16 values by rows, however they are wanted. fp32
 * would be multiplied as TF32 there; block scaling's codes are decoded first. */
static int takes_operand(const qe_qtensor *operand, int transposed) {
    if (operand->format == QE_FORMAT_BF16) return !operand->transposed;
    return is_code(operand->format) && operand->blocking == QE_BLOCKING_TENSOR && operand->transposed == transposed;
}

static int takes_weight_grad(const qe_args_linear_weight_grad *args) {
    return !qe_product_decodes(args) && takes_operand(&args->x, 1) && takes_operand(&args->dy, 1);
}

/* It makes codes by rows, and their transpose beside them; the two share the word of the inverse scale. */
static int takes_codes(const qe_quantize_target *target, uint32_t rows, uint32_t columns) {
    const qe_qtensor *operand = &target->operand, *retained = &target->retained;
    if (!is_code(target->format) || rows % WHOLE != 0 || columns % WHOLE != 0) return 0;
    if (operand->codes == NULL || operand->transposed || operand->scale_inv == NULL) return 0;
    return retained->codes == NULL || (retained->transposed && retained->scale_inv == operand->scale_inv);
}

/* Under a scale that is there beforehand. */
static int takes_scaled(const qe_quantize_target *target, uint32_t rows, uint32_t columns) {
    return target->recipe == QE_RECIPE_DELAYED && takes_codes(target, rows, columns);
}

static int takes_target(const qe_quantize_target *target, uint32_t rows, uint32_t columns) {
    return (target->recipe == QE_RECIPE_DELAYED || target->recipe == QE_RECIPE_CURRENT) &&
           takes_codes(target, rows, columns);
}

int qe_te_takes(const qe_op *op) {
    const qe_op_args *args = &op->args;
    switch ((int)op->kind) {
        case QE_OP_LINEAR: return takes_operand(&args->linear.x, 0) && takes_operand(&args->linear.w, 0);
        case QE_OP_LINEAR_INPUT_GRAD:
            return takes_operand(&args->linear_input_grad.dy, 0) && takes_operand(&args->linear_input_grad.w, 1);
        case QE_OP_LINEAR_WEIGHT_GRAD: return takes_weight_grad(&args->linear_weight_grad);
        case QE_OP_QUANTIZE:
            return takes_target(&args->quantize.target, args->quantize.rows, args->quantize.columns);
        case QE_OP_QUANTIZE_WEIGHT:
            return takes_target(&args->quantize_weight.target, args->quantize_weight.rows,
                                args->quantize_weight.columns);
        case QE_OP_SWIGLU_QUANTIZE: return takes_scaled(&args->swiglu.target, args->swiglu.rows, args->swiglu.ffn);
        case QE_OP_SWIGLU_BACKWARD_QUANTIZE:
            return args->swiglu_backward.target.retained.codes != NULL &&
                   takes_scaled(&args->swiglu_backward.target, args->swiglu_backward.rows, args->swiglu_backward.ffn);
        case QE_OP_ATTENTION:
        case QE_OP_ATTENTION_BACKWARD: return qe_te_attention_takes(op);
        default: return 0;
    }
}

/* --- arguments -------------------------------------------------------------------------------------------------- */

static qe_te_tensor values(const void *at, uint32_t rows, uint32_t columns, qe_format format) {
    return (qe_te_tensor){.by_rows = (void *)(uintptr_t)at, .rows = rows, .columns = columns,
                          .format = (uint8_t)format};
}

static qe_te_tensor operand_of(const qe_qtensor *tensor) {
    return (qe_te_tensor){.by_rows = tensor->transposed ? NULL : tensor->codes,
                          .by_columns = tensor->transposed ? tensor->codes : NULL,
                          .scale_inv = is_code(tensor->format) ? tensor->scale_inv : NULL,
                          .rows = tensor->rows, .columns = tensor->columns, .format = tensor->format};
}

static qe_te_tensor target_of(const qe_quantize_target *target, uint32_t rows, uint32_t columns) {
    return (qe_te_tensor){.by_rows = target->operand.codes, .by_columns = target->retained.codes,
                          .scale = target->scale, .amax = target->amax, .scale_inv = target->operand.scale_inv,
                          .rows = rows, .columns = columns, .format = target->format};
}

/* --- runs ------------------------------------------------------------------------------------------------------- */

static void *align(void *workspace) {
    const uintptr_t mask = QE_TE_WORKSPACE_ALIGN_BYTES - 1;
    return (void *)(((uintptr_t)workspace + mask) & ~mask);
}

static qe_status multiply(const qe_te_context *te, qe_te_product *product, void *workspace, cudaStream_t stream,
                          qe_error *error_out) {
    if (workspace == NULL && te->workspace == NULL)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "a product without workspace was not prepared");
    product->workspace = align(workspace != NULL ? workspace : te->workspace);
    product->workspace_bytes = QE_TE_WORKSPACE_BYTES;
    return qe_te_multiply(te->library, product, stream, error_out);
}

static qe_status linear_queue(const qe_te_context *te, const qe_args_linear *args, cudaStream_t stream,
                              qe_error *error_out) {
    qe_te_product product = {.a = operand_of(&args->w), .b = operand_of(&args->x), .turn_a = 1,
                             .result = values(args->y, args->rows, args->out, QE_FORMAT_BF16),
                             .adds = args->residual != NULL, .accumulation = args->accumulation};
    const uint64_t bytes = (uint64_t)args->rows * args->out * qe_format_bytes(QE_FORMAT_BF16);
    if (args->residual != NULL && args->residual != args->y) /* its products add in place alone */
        QE_TRY(qe_cuda_copy(args->residual, args->y, bytes, stream));
    return multiply(te, &product, args->workspace, stream, error_out);
}

static qe_status input_grad_queue(const qe_te_context *te, const qe_args_linear_input_grad *args, cudaStream_t stream,
                                  qe_error *error_out) {
    qe_te_product product = {.a = operand_of(&args->w), .b = operand_of(&args->dy),
                             .result = values(args->dx, args->rows, args->in, QE_FORMAT_BF16),
                             .accumulation = args->accumulation};
    return multiply(te, &product, args->workspace, stream, error_out);
}

static qe_status weight_grad_queue(const qe_te_context *te, const qe_args_linear_weight_grad *args,
                                   cudaStream_t stream, qe_error *error_out) {
    qe_te_product product = {.a = operand_of(&args->x), .b = operand_of(&args->dy), .turn_b = 1,
                             .result = values(args->grad, args->out, args->in, QE_FORMAT_FP32),
                             .adds = !args->set, .accumulation = args->accumulation};
    return multiply(te, &product, args->workspace, stream, error_out);
}

static qe_status fill(const qe_te_context *te, const qe_te_tensor *from, const qe_quantize_target *target,
                      cudaStream_t stream, qe_error *error_out) {
    qe_te_tensor to = target_of(target, from->rows, from->columns);
    if (target->recipe == QE_RECIPE_DELAYED) return qe_te_quantize(te->library, from, &to, stream, error_out);
    to.scale = &te->scratch[0];
    to.amax = &te->scratch[1];
    return qe_te_quantize_current(te->library, from, &to, stream, error_out);
}

static qe_status quantize_queue(const qe_te_context *te, const qe_args_quantize *args, cudaStream_t stream,
                                qe_error *error_out) {
    const qe_te_tensor from = values(args->x, args->rows, args->columns, QE_FORMAT_BF16);
    return fill(te, &from, &args->target, stream, error_out);
}

/* The key that travels with a cached weight goes behind it; without a scale the epoch is 0. No commit vouches for what
 * this fill made, so a seal that one left goes first. */
static qe_status key_write(const qe_args_quantize_weight *args, cudaStream_t stream, qe_error *error_out) {
    _Static_assert(QE_KEY_SEAL == QE_KEY_EPOCH + 1, "one piece of memory is cleared");
    uint64_t *key = args->key;
    if (key == NULL) return QE_OK;
    const cudaError_t code = cudaMemsetAsync(&key[QE_KEY_EPOCH], 0, 2 * sizeof *key, stream);
    if (code != cudaSuccess)
        return qe_error_set(error_out, QE_ERROR_DEVICE, NULL, "the key of a cached weight: %s",
                            cudaGetErrorString(code));
    QE_TRY(qe_cuda_copy(args->weight_witness, &key[QE_KEY_VERSION], sizeof *key, stream));
    if (args->scale_epoch == NULL) return QE_OK;
    return qe_cuda_copy(args->scale_epoch, &key[QE_KEY_EPOCH], sizeof *key, stream);
}

static qe_status weight_queue(const qe_te_context *te, const qe_args_quantize_weight *args, cudaStream_t stream,
                              qe_error *error_out) {
    const qe_te_tensor from = values(args->w, args->rows, args->columns, QE_FORMAT_FP32);
    QE_TRY(fill(te, &from, &args->target, stream, error_out));
    return key_write(args, stream, error_out);
}

static qe_status swiglu_queue(const qe_te_context *te, const qe_args_swiglu *args, cudaStream_t stream,
                              qe_error *error_out) {
    const qe_te_tensor from = values(args->gate_up, args->rows, 2 * args->ffn, QE_FORMAT_BF16);
    const qe_te_tensor to = target_of(&args->target, args->rows, args->ffn);
    return qe_te_swiglu(te->library, &from, &to, stream, error_out);
}

static qe_status swiglu_backward_queue(const qe_te_context *te, const qe_args_swiglu_backward *args,
                                       cudaStream_t stream, qe_error *error_out) {
    const qe_te_tensor dy = values(args->dy, args->rows, args->ffn, QE_FORMAT_BF16);
    const qe_te_tensor gate_up = values(args->gate_up, args->rows, 2 * args->ffn, QE_FORMAT_BF16);
    const qe_te_tensor to = target_of(&args->target, args->rows, 2 * args->ffn);
    return qe_te_swiglu_backward(te->library, &dy, &gate_up, &to, stream, error_out);
}

/* A plan gives every product its workspace; who gives none, as measurements do, is lent one. */
static qe_status workspace_take(qe_te_context *te, const void *given, qe_error *error_out) {
    if (given != NULL || te->workspace != NULL) return QE_OK;
    return qe_cuda_memories.alloc(te->device, QE_TE_WORKSPACE_BYTES + QE_TE_WORKSPACE_ALIGN_BYTES, &te->workspace,
                                  error_out);
}

static qe_status product_prepare(qe_te_context *te, const qe_op *op, const void *workspace, qe_error *error_out) {
    qe_product product;
    QE_TRY(qe_product_of(op, &product, error_out));
    return workspace_take(te, workspace, error_out);
}

qe_status qe_te_prepare(void *context, const qe_op *op, qe_error *error_out) {
    const qe_op_args *args = &op->args;
    switch ((int)op->kind) {
        case QE_OP_LINEAR: return product_prepare(context, op, args->linear.workspace, error_out);
        case QE_OP_LINEAR_INPUT_GRAD:
            return product_prepare(context, op, args->linear_input_grad.workspace, error_out);
        case QE_OP_LINEAR_WEIGHT_GRAD:
            return product_prepare(context, op, args->linear_weight_grad.workspace, error_out);
        case QE_OP_ATTENTION:
        case QE_OP_ATTENTION_BACKWARD: return qe_te_attention_prepare(context, op, error_out);
        default: return QE_OK;
    }
}

qe_status qe_te_record(void *context, qe_error *error_out) {
    const qe_te_context *te = context;
    QE_TRY(qe_te_thread_enter(te->library, error_out));
    return qe_te_attention_record(te, error_out);
}

qe_status qe_te_queue(void *context, const qe_op *op, cudaStream_t stream, qe_error *error_out) {
    qe_te_context *te = context;
    const qe_op_args *args = &op->args;
    switch ((int)op->kind) {
        case QE_OP_LINEAR: return linear_queue(te, &args->linear, stream, error_out);
        case QE_OP_LINEAR_INPUT_GRAD: return input_grad_queue(te, &args->linear_input_grad, stream, error_out);
        case QE_OP_LINEAR_WEIGHT_GRAD: return weight_grad_queue(te, &args->linear_weight_grad, stream, error_out);
        case QE_OP_QUANTIZE: return quantize_queue(te, &args->quantize, stream, error_out);
        case QE_OP_QUANTIZE_WEIGHT: return weight_queue(te, &args->quantize_weight, stream, error_out);
        case QE_OP_SWIGLU_QUANTIZE: return swiglu_queue(te, &args->swiglu, stream, error_out);
        case QE_OP_SWIGLU_BACKWARD_QUANTIZE:
            return swiglu_backward_queue(te, &args->swiglu_backward, stream, error_out);
        case QE_OP_ATTENTION:
        case QE_OP_ATTENTION_BACKWARD: return qe_te_attention_queue(te, op, stream, error_out);
        default: break;
    }
    QE_ASSERT(!qe_te_takes(op));
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "%s is not Transformer Engine's", qe_op_name(op->kind));
}
