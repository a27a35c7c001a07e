/* quantize.c - rounding, amax, codes and decoded values in one pass over the tensor (two where the scale depends on
 * it). The amax is a maximum of integers, so its order is free; everything else is elementwise. */
#include "backend/host/kernels/table.h"
#include "backend/host/kernels/codec.h"
#include "backend/host/kernels/quantizer.h"
#include "base/assert.h"
#include "qeffect/fp8.h"
#include "qeffect/limits.h"

/* One run of values that share a scale. codes or decoded may be NULL; decoded may be x. Returns the amax's bits. */
KERNEL_INLINE int32_t span_of(qe_format format, int with_codes, int with_decoded, const float *x, size_t count,
                              float scale, float scale_inv, uint8_t *codes, float *decoded) {
    int32_t amax = 0;
    KERNEL_VECTOR
    for (size_t i = 0; i < count; ++i) {
        const float value = x[i];
        const int32_t magnitude = amax_bits(value);
        float rounded;
        const uint32_t code = fp8_round(format, value * scale, &rounded);
        if (with_codes) codes[i] = (uint8_t)code;
        if (with_decoded) decoded[i] = rounded * scale_inv;
        amax = amax > magnitude ? amax : magnitude;
    }
    return amax;
}

static int32_t span_amax(const float *x, size_t count) {
    int32_t amax = 0;
    KERNEL_VECTOR
    for (size_t i = 0; i < count; ++i) {
        const int32_t magnitude = amax_bits(x[i]);
        amax = amax > magnitude ? amax : magnitude;
    }
    return amax;
}

#define SPAN_FORMAT(format, name)                                                                           \
    static int32_t span_##name##_both(const float *x, size_t n, float s, float inv, uint8_t *c, float *d) { \
        return span_of(format, 1, 1, x, n, s, inv, c, d);                                                   \
    }                                                                                                       \
    static int32_t span_##name##_codes(const float *x, size_t n, float s, float inv, uint8_t *c) {          \
        return span_of(format, 1, 0, x, n, s, inv, c, NULL);                                                \
    }                                                                                                       \
    static int32_t span_##name##_decoded(const float *x, size_t n, float s, float inv, float *d) {          \
        return span_of(format, 0, 1, x, n, s, inv, NULL, d);                                                \
    }
SPAN_FORMAT(QE_FORMAT_E4M3, e4m3)
SPAN_FORMAT(QE_FORMAT_E5M2, e5m2)

static int32_t span(uint8_t format, const float *x, size_t count, float scale, float scale_inv, uint8_t *codes,
                    float *decoded) {
    const int is_e4m3 = format == QE_FORMAT_E4M3;
    if (codes && decoded)
        return (is_e4m3 ? span_e4m3_both : span_e5m2_both)(x, count, scale, scale_inv, codes, decoded);
    if (codes) return (is_e4m3 ? span_e4m3_codes : span_e5m2_codes)(x, count, scale, scale_inv, codes);
    if (decoded) return (is_e4m3 ? span_e4m3_decoded : span_e5m2_decoded)(x, count, scale, scale_inv, decoded);
    return span_amax(x, count);
}

static void bf16_span(const float *x, size_t count, uint16_t *codes, float *decoded) {
    if (codes && decoded) {
        KERNEL_VECTOR
        for (size_t i = 0; i < count; ++i) {
            const uint32_t code = bf16_round(x[i]);
            codes[i] = (uint16_t)code;
            decoded[i] = bf16_value(code);
        }
    } else if (codes) {
        KERNEL_VECTOR
        for (size_t i = 0; i < count; ++i) codes[i] = (uint16_t)bf16_round(x[i]);
    } else if (decoded) {
        KERNEL_VECTOR
        for (size_t i = 0; i < count; ++i) decoded[i] = bf16_value(bf16_round(x[i]));
    }
}

static void fp32_span(const float *x, size_t count, float *codes, float *decoded) {
    if (codes && codes != x) memcpy(codes, x, count * sizeof(float));
    if (decoded && decoded != x) memcpy(decoded, x, count * sizeof(float));
}

void KERNEL(quantizer_begin)(quantizer *q, const qe_quantize_target *target, size_t rows, size_t columns,
                             int is_weight) {
    *q = (quantizer){.target = target, .rows = rows, .columns = columns, .is_weight = is_weight, .scale = 1.0f};
    if (target->recipe == QE_RECIPE_DELAYED) q->scale = *target->scale;
    q->scale_inv = qe_scale_inverse(q->scale);
}

/* `count` values from the `at`-th on, of the recipes that need one scale known beforehand. */
static void quantizer_span(quantizer *q, const float *x, size_t at, size_t count) {
    const qe_quantize_target *target = q->target;
    float *decoded = target->operand.codes ? (float *)target->operand.codes + at : NULL;
    void *codes = target->retained.codes;
    if (target->recipe == QE_RECIPE_BF16) {
        bf16_span(x, count, codes ? (uint16_t *)codes + at : NULL, decoded);
    } else if (target->recipe == QE_RECIPE_FP32) {
        fp32_span(x, count, codes ? (float *)codes + at : NULL, decoded);
    } else {
        const int32_t amax =
            span(target->format, x, count, q->scale, q->scale_inv, codes ? (uint8_t *)codes + at : NULL, decoded);
        q->amax = q->amax > amax ? q->amax : amax;
    }
}

void KERNEL(quantizer_rows)(quantizer *q, const float *x, size_t row, size_t count) {
    if (q->target->recipe == QE_RECIPE_BLOCK) return;
    if (q->target->recipe == QE_RECIPE_CURRENT) {
        const int32_t amax = span_amax(x, count * q->columns);
        q->amax = q->amax > amax ? q->amax : amax;
        return;
    }
    quantizer_span(q, x, row * q->columns, count * q->columns);
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
static size_t blocks_of(size_t count) { return (count + QE_BLOCK - 1) / QE_BLOCK; }

static float block_scale(const qe_quantize_target *target, int32_t amax) {
    return qe_scale_from_amax(float_of((uint32_t)amax), qe_format_max((qe_format)target->format), 1);
}

/* decoded: each 1x128 block of a row has its own scale. */
static void block_rows(const quantizer *q, const float *x) {
    for (size_t row = 0; row < q->rows; ++row)
        for (size_t column = 0; column < q->columns; column += QE_BLOCK) {
            const size_t at = row * q->columns + column, count = smaller(QE_BLOCK, q->columns - column);
            const float scale = block_scale(q->target, span_amax(x + at, count));
            span(q->target->format, x + at, count, scale, qe_scale_inverse(scale), NULL,
                 (float *)q->target->operand.codes + at);
        }
}

/* Codes of one row of up to 128 columns, each with its own scale. */
KERNEL_INLINE void column_codes_of(qe_format format, const float *x, size_t count, const float *scales,
                                   uint8_t *codes) {
    KERNEL_VECTOR
    for (size_t i = 0; i < count; ++i) {
        float rounded;
        codes[i] = (uint8_t)fp8_round(format, x[i] * scales[i], &rounded);
    }
}

static void column_codes(uint8_t format, const float *x, size_t count, const float *scales, uint8_t *codes) {
    if (format == QE_FORMAT_E4M3)
        column_codes_of(QE_FORMAT_E4M3, x, count, scales, codes);
    else
        column_codes_of(QE_FORMAT_E5M2, x, count, scales, codes);
}

/* Up to 128 rows by 128 columns of 128x1 blocks; x and the tensor's arrays begin at the first of them. */
static void block_columns_tile(const quantizer *q, const float *x, size_t rows, size_t columns, uint8_t *codes,
                               float *scale_inv) {
    int32_t amax[QE_BLOCK] = {0};
    float scales[QE_BLOCK];
    for (size_t row = 0; row < rows; ++row)
        for (size_t i = 0; i < columns; ++i) {
            const int32_t magnitude = amax_bits(x[row * q->columns + i]);
            amax[i] = amax[i] > magnitude ? amax[i] : magnitude;
        }
    for (size_t i = 0; i < columns; ++i) {
        scales[i] = block_scale(q->target, amax[i]);
        scale_inv[i] = qe_scale_inverse(scales[i]);
    }
    for (size_t row = 0; row < rows; ++row)
        column_codes(q->target->format, x + row * q->columns, columns, scales, codes + row * q->columns);
}

/* retained: each 128x1 block of a column has its own scale. */
static void block_columns(const quantizer *q, const float *x) {
    const qe_qtensor *retained = &q->target->retained;
    QE_ASSERT(retained->blocking == QE_BLOCKING_COLUMN);
    for (size_t row = 0; row < q->rows; row += QE_BLOCK)
        for (size_t column = 0; column < q->columns; column += QE_BLOCK) {
            const size_t at = row * q->columns + column;
            block_columns_tile(q, x + at, smaller(QE_BLOCK, q->rows - row), smaller(QE_BLOCK, q->columns - column),
                               (uint8_t *)retained->codes + at,
                               retained->scale_inv + row / QE_BLOCK * q->columns + column);
        }
}

/* One 128x128 tile of a weight, codes and decoded with the same scale. Returns its inverse scale. */
static float block_tile(const quantizer *q, const float *x, size_t at, size_t rows, size_t columns) {
    int32_t amax = 0;
    for (size_t row = 0; row < rows; ++row) {
        const int32_t of_row = span_amax(x + at + row * q->columns, columns);
        amax = amax > of_row ? amax : of_row;
    }
    const float scale = block_scale(q->target, amax), scale_inv = qe_scale_inverse(scale);
    uint8_t *codes = q->target->retained.codes;
    float *decoded = q->target->operand.codes;
    for (size_t row = 0; row < rows; ++row, at += q->columns)
        span(q->target->format, x + at, columns, scale, scale_inv, codes ? codes + at : NULL,
             decoded ? decoded + at : NULL);
    return scale_inv;
}

static void block_tiles(const quantizer *q, const float *x) {
    const qe_qtensor *retained = &q->target->retained;
    for (size_t row = 0; row < q->rows; row += QE_BLOCK)
        for (size_t column = 0; column < q->columns; column += QE_BLOCK) {
            const float scale_inv = block_tile(q, x, row * q->columns + column, smaller(QE_BLOCK, q->rows - row),
                                               smaller(QE_BLOCK, q->columns - column));
            if (retained->codes)
                retained->scale_inv[row / QE_BLOCK * blocks_of(q->columns) + column / QE_BLOCK] = scale_inv;
        }
}

static void block_end(const quantizer *q, const float *x) {
    if (q->is_weight) {
        block_tiles(q, x);
        return;
    }
    if (q->target->retained.codes) block_columns(q, x); /* first: `operand` may be x itself */
    if (q->target->operand.codes) block_rows(q, x);
}

void KERNEL(quantizer_end)(quantizer *q, const float *x) {
    const qe_quantize_target *target = q->target;
    if (target->recipe == QE_RECIPE_BLOCK) {
        block_end(q, x);
        return;
    }
    if (target->recipe == QE_RECIPE_CURRENT) {
        q->scale = qe_scale_from_amax(float_of((uint32_t)q->amax), qe_format_max((qe_format)target->format), 0);
        q->scale_inv = qe_scale_inverse(q->scale);
        quantizer_span(q, x, 0, q->rows * q->columns);
    }
    if (target->retained.codes && target->retained.scale_inv) target->retained.scale_inv[0] = q->scale_inv;
    if (target->amax && float_of((uint32_t)q->amax) > *target->amax) *target->amax = float_of((uint32_t)q->amax);
}

static void quantize_all(const float *x, const qe_quantize_target *target, size_t rows, size_t columns, int is_weight) {
    quantizer q;
    KERNEL(quantizer_begin)(&q, target, rows, columns, is_weight);
    KERNEL(quantizer_rows)(&q, x, 0, rows);
    KERNEL(quantizer_end)(&q, x);
}

void KERNEL(quantize)(const qe_args_quantize *args) {
    quantize_all(args->x, &args->target, args->rows, args->columns, 0);
}

void KERNEL(quantize_weight)(const qe_args_quantize_weight *args) {
    quantize_all(args->w, &args->target, args->rows, args->columns, 1);
}
