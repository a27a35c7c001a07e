/* quantizer.h - how an op that ends in a quantized tensor hands its rows over. Rows come in order, a chunk at a time
 * while they are in the first cache; recipes whose scale depends on the whole tensor quantize at the end.
 *
 *   quantizer_begin -> quantizer_rows ... -> quantizer_end */
#ifndef QE_HOST_KERNELS_QUANTIZER_H
#define QE_HOST_KERNELS_QUANTIZER_H

#include "backend/host/kernels/level.h"
#include "qeffect/op.h"

typedef struct quantizer {
    const qe_quantize_target *target;
    size_t rows, columns;
    int is_weight;          /* QE_RECIPE_BLOCK: tiles instead of rows and columns */
    float scale, scale_inv; /* delayed, current */
    int32_t amax;           /* bits of the largest |x| so far */
} quantizer;

void KERNEL(quantizer_begin)(quantizer *q, const qe_quantize_target *target, size_t rows, size_t columns,
                             int is_weight);
/* x: [count, columns], the rows from `row` on; may be the target's own `decoded` rows. */
void KERNEL(quantizer_rows)(quantizer *q, const float *x, size_t row, size_t count);
/* x: [rows, columns], all of it as it was handed over; may be the target's `decoded`. */
void KERNEL(quantizer_end)(quantizer *q, const float *x);

/* Rows of a chunk that stays in the first cache (16 KiB). */
KERNEL_INLINE size_t quantizer_chunk(size_t columns) {
    const size_t rows = 4096 / (columns ? columns : 1);
    return rows ? rows : 1;
}

#endif
