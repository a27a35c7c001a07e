/* rope.c - rotary positions, half-split form: (a, b) = the halves of a head become (a cos - b sin, b cos + a sin).
 * Backward rotates the other way. */
#include "backend/host/kernels/table.h"
#include "backend/host/kernels/quantizer.h"

KERNEL_INLINE void head_rotate(float *head, const float *cosine, const float *sine, size_t half, int back) {
    float *lower = head, *upper = head + half;
    KERNEL_VECTOR
    for (size_t i = 0; i < half; ++i) {
        const float a = lower[i], b = upper[i], turn = back ? -sine[i] : sine[i];
        lower[i] = a * cosine[i] - b * turn;
        upper[i] = b * cosine[i] + a * turn;
    }
}

/* q and k heads stand side by side, so they are one run of heads. */
KERNEL_INLINE void rows_rotate(const qe_args_rope *args, size_t row, size_t count, int back) {
    const size_t half = args->head_dim / 2, turned = args->heads + args->kv_heads;
    const size_t columns = (size_t)(args->heads + 2 * args->kv_heads) * args->head_dim;
    float *qkv = args->qkv;
    for (size_t end = row + count; row < end; ++row) {
        const size_t at = row % args->sequence * half;
        for (size_t head = 0; head < turned; ++head)
            head_rotate(qkv + row * columns + head * args->head_dim, args->cosine + at, args->sine + at, half, back);
    }
}

void KERNEL(rope)(const qe_args_rope *args) { rows_rotate(args, 0, args->rows, 0); }

void KERNEL(rope_backward_quantize)(const qe_args_rope *args) {
    const size_t columns = (size_t)(args->heads + 2 * args->kv_heads) * args->head_dim;
    const size_t chunk = quantizer_chunk(columns);
    quantizer q;
    KERNEL(quantizer_begin)(&q, &args->target, args->rows, columns, 0);
    for (size_t row = 0; row < args->rows; row += chunk) {
        const size_t count = args->rows - row < chunk ? args->rows - row : chunk;
        rows_rotate(args, row, count, 1);
        KERNEL(quantizer_rows)(&q, (float *)args->qkv + row * columns, row, count);
    }
    KERNEL(quantizer_end)(&q, args->qkv);
}
