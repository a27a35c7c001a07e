/* norm.c - RMSNorm. y = (x * rstd) * gain with rstd = 1 / sqrt(mean(x^2) + epsilon); the mean is a 16-lane sum.
 * Backward: with n = x * rstd, dx = residual + rstd * (dy * gain - n * mean(dy * gain * n)), gain_grad = sum over rows,
 * in order, of dy * n. */
#include <math.h>

#include "backend/host/kernels/table.h"
#include "backend/host/kernels/quantizer.h"
#include "base/assert.h"

static float norm_row(const float *x, const float *gain, size_t hidden, float epsilon, float *y) {
    const float rstd = 1.0f / sqrtf(row_dot(x, x, hidden) / (float)hidden + epsilon);
    KERNEL_VECTOR
    for (size_t i = 0; i < hidden; ++i) y[i] = (x[i] * rstd) * gain[i];
    return rstd;
}

static void norm_rows(const qe_args_norm *args, size_t row, size_t count, float *y) {
    const float *x = args->x;
    for (size_t end = row + count; row < end; ++row) {
        const size_t at = row * args->hidden;
        args->rstd[row] = norm_row(x + at, args->gain, args->hidden, args->epsilon, y + at);
    }
}

void KERNEL(norm)(const qe_args_norm *args) { norm_rows(args, 0, args->rows, args->y); }

void KERNEL(norm_quantize)(const qe_args_norm *args) {
    const size_t chunk = quantizer_chunk(args->hidden);
    float *y = args->target.operand.codes;
    quantizer q;
    QE_ASSERT(y);
    KERNEL(quantizer_begin)(&q, &args->target, args->rows, args->hidden, 0);
    for (size_t row = 0; row < args->rows; row += chunk) {
        const size_t count = args->rows - row < chunk ? args->rows - row : chunk;
        norm_rows(args, row, count, y);
        KERNEL(quantizer_rows)(&q, y + row * args->hidden, row, count);
    }
    KERNEL(quantizer_end)(&q, y);
}

enum { GAIN_COLUMNS = 64 }; /* sums of one pass over the rows: four of the widest registers */

static void gain_columns(const qe_args_norm_backward *args, size_t column, size_t count) {
    float sums[GAIN_COLUMNS] = {0};
    for (size_t row = 0; row < args->rows; ++row) {
        const size_t at = row * args->hidden + column;
        const float *dy = (const float *)args->dy + at, *x = (const float *)args->x + at;
        const float rstd = args->rstd[row];
        KERNEL_VECTOR
        for (size_t i = 0; i < count; ++i) sums[i] += dy[i] * (x[i] * rstd);
    }
    float *grad = args->gain_grad + column;
    for (size_t i = 0; i < count; ++i) grad[i] = args->set ? sums[i] : grad[i] + sums[i];
}

static void gain_backward(const qe_args_norm_backward *args) {
    size_t column = 0;
    for (; column + GAIN_COLUMNS <= args->hidden; column += GAIN_COLUMNS) gain_columns(args, column, GAIN_COLUMNS);
    if (column < args->hidden) gain_columns(args, column, args->hidden - column);
}

static void row_backward(const qe_args_norm_backward *args, size_t row) {
    const size_t hidden = args->hidden, at = row * hidden;
    const float *dy = (const float *)args->dy + at, *x = (const float *)args->x + at, *gain = args->gain;
    const float *residual = args->residual ? (const float *)args->residual + at : NULL;
    float *dx = (float *)args->dx + at;
    const float rstd = args->rstd[row];
    const float mean = row_dot3(dy, gain, x, hidden) * rstd / (float)hidden;
    if (residual) {
        KERNEL_VECTOR
        for (size_t i = 0; i < hidden; ++i) dx[i] = residual[i] + rstd * (dy[i] * gain[i] - x[i] * rstd * mean);
    } else {
        KERNEL_VECTOR
        for (size_t i = 0; i < hidden; ++i) dx[i] = rstd * (dy[i] * gain[i] - x[i] * rstd * mean);
    }
}

void KERNEL(norm_backward)(const qe_args_norm_backward *args) {
    if (args->gain_grad) gain_backward(args); /* first: dx may be written over dy */
    for (size_t row = 0; row < args->rows; ++row) row_backward(args, row);
    const qe_quantize_target *target = &args->target;
    if (!target->operand.codes && !target->retained.codes) return;
    KERNEL(quantize)(&(qe_args_quantize){args->dx, args->rows, args->hidden, *target});
}
