/* swiglu.c - y = silu(gate) * up, silu(g) = g * s with s = 1 / (1 + e^-g). Backward: dup = dy * silu(g),
 * dgate = dy * up * s * (1 + g * (1 - s)). */
#include "backend/host/kernels/table.h"
#include "backend/host/kernels/quantizer.h"
#include "base/assert.h"

static void swiglu_row(const float *gate, const float *up, size_t ffn, float *y) {
    KERNEL_VECTOR
    for (size_t i = 0; i < ffn; ++i) y[i] = gate[i] / (1.0f + exp_lane(-gate[i])) * up[i];
}

static void swiglu_backward_row(const float *gate, const float *up, const float *dy, size_t ffn, float *dgate,
                                float *dup) {
    KERNEL_VECTOR
    for (size_t i = 0; i < ffn; ++i) {
        const float g = gate[i], d = dy[i], u = up[i];
        const float s = 1.0f / (1.0f + exp_lane(-g));
        dgate[i] = d * u * (s * (1.0f + g * (1.0f - s)));
        dup[i] = d * (g * s);
    }
}

void KERNEL(swiglu_quantize)(const qe_args_swiglu *args) {
    const size_t ffn = args->ffn, chunk = quantizer_chunk(ffn);
    const float *gate_up = args->gate_up;
    float *y = args->target.operand.codes ? args->target.operand.codes : args->decoded_scratch;
    quantizer q;
    QE_ASSERT(y);
    KERNEL(quantizer_begin)(&q, &args->target, args->rows, ffn, 0);
    for (size_t row = 0; row < args->rows; row += chunk) {
        const size_t count = args->rows - row < chunk ? args->rows - row : chunk;
        for (size_t i = row; i < row + count; ++i)
            swiglu_row(gate_up + i * 2 * ffn, gate_up + i * 2 * ffn + ffn, ffn, y + i * ffn);
        KERNEL(quantizer_rows)(&q, y + row * ffn, row, count);
    }
    KERNEL(quantizer_end)(&q, y);
}

void KERNEL(swiglu_backward_quantize)(const qe_args_swiglu_backward *args) {
    const size_t ffn = args->ffn, chunk = quantizer_chunk(2 * ffn);
    const float *gate_up = args->gate_up, *dy = args->dy;
    float *all = args->dgate_up;
    quantizer q;
    KERNEL(quantizer_begin)(&q, &args->target, args->rows, 2 * ffn, 0);
    for (size_t row = 0; row < args->rows; row += chunk) {
        const size_t count = args->rows - row < chunk ? args->rows - row : chunk;
        for (size_t i = row; i < row + count; ++i) {
            const float *gate = gate_up + i * 2 * ffn;
            float *dgate = all + i * 2 * ffn;
            swiglu_backward_row(gate, gate + ffn, dy + i * ffn, ffn, dgate, dgate + ffn);
        }
        KERNEL(quantizer_rows)(&q, all + row * 2 * ffn, row, count);
    }
    KERNEL(quantizer_end)(&q, all);
}
