/* linear.c - y = x w', dx = dy w, grad (+)= dy' x. alpha is 1 and one call covers the whole matrix: what is added to
 * a gradient is the product's own accumulation (beta = 1), wherever the bytes lie. */
#include "backend/host/linear.h"

#include <string.h>

void qe_host_linear(const qe_args_linear *args, host_sgemm *sgemm) {
    const int rows = (int)args->rows, in = (int)args->in, out = (int)args->out;
    float beta = 0.0f;
    if (args->residual) {
        if (args->residual != args->y) memcpy(args->y, args->residual, sizeof(float) * args->rows * args->out);
        beta = 1.0f;
    }
    sgemm(HOST_ROW_MAJOR, HOST_NO_TRANSPOSE, HOST_TRANSPOSE, rows, out, in, 1.0f, args->x.codes, in, args->w.codes, in,
          beta, args->y, out);
}

void qe_host_linear_input_grad(const qe_args_linear_input_grad *args, host_sgemm *sgemm) {
    const int rows = (int)args->rows, in = (int)args->in, out = (int)args->out;
    sgemm(HOST_ROW_MAJOR, HOST_NO_TRANSPOSE, HOST_NO_TRANSPOSE, rows, in, out, 1.0f, args->dy.codes, out, args->w.codes,
          in, 0.0f, args->dx, in);
}

/* fp32 codes are the values already. */
static const float *values_of(const qe_qtensor *tensor, float *scratch, const host_kernels *kernels) {
    if (tensor->format == QE_FORMAT_FP32) return tensor->codes;
    kernels->decode(tensor, scratch);
    return scratch;
}

void qe_host_linear_weight_grad(const qe_args_linear_weight_grad *args, const host_kernels *kernels,
                                host_sgemm *sgemm) {
    const int rows = (int)args->rows, in = (int)args->in, out = (int)args->out;
    const float *x = values_of(&args->x, args->scratch_x, kernels);
    const float *dy = values_of(&args->dy, args->scratch_dy, kernels);
    sgemm(HOST_ROW_MAJOR, HOST_TRANSPOSE, HOST_NO_TRANSPOSE, out, in, rows, 1.0f, dy, out, x, in,
          args->set ? 0.0f : 1.0f, args->grad, in);
}
