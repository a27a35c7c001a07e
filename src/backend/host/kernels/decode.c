/* decode.c - from codes and inverse scales back to floats: value * scale_inv, as the quantizer's `decoded`. */
#include "backend/host/kernels/table.h"
#include "backend/host/kernels/codec.h"
#include "qeffect/limits.h"

KERNEL_INLINE void run_of(qe_format format, const uint8_t *codes, size_t count, float scale_inv, float *decoded) {
    KERNEL_VECTOR
    for (size_t i = 0; i < count; ++i) decoded[i] = fp8_value(format, codes[i]) * scale_inv;
}

/* Codes that share an inverse scale. */
static void run(uint8_t format, const uint8_t *codes, size_t count, float scale_inv, float *decoded) {
    if (format == QE_FORMAT_E4M3)
        run_of(QE_FORMAT_E4M3, codes, count, scale_inv, decoded);
    else
        run_of(QE_FORMAT_E5M2, codes, count, scale_inv, decoded);
}

KERNEL_INLINE void columns_of(qe_format format, const uint8_t *codes, size_t count, const float *scale_inv,
                              float *decoded) {
    KERNEL_VECTOR
    for (size_t i = 0; i < count; ++i) decoded[i] = fp8_value(format, codes[i]) * scale_inv[i];
}

/* Codes of which each has its own inverse scale. */
static void columns(uint8_t format, const uint8_t *codes, size_t count, const float *scale_inv, float *decoded) {
    if (format == QE_FORMAT_E4M3)
        columns_of(QE_FORMAT_E4M3, codes, count, scale_inv, decoded);
    else
        columns_of(QE_FORMAT_E5M2, codes, count, scale_inv, decoded);
}

/* One row whose blocks of 128 columns have the inverse scales scale_inv[0], [1] ... */
static void row_blocks(uint8_t format, const uint8_t *codes, size_t count, const float *scale_inv, float *decoded) {
    for (size_t column = 0; column < count; column += QE_BLOCK) {
        const size_t width = count - column < QE_BLOCK ? count - column : QE_BLOCK;
        run(format, codes + column, width, scale_inv[column / QE_BLOCK], decoded + column);
    }
}

static void decode_fp8(const qe_qtensor *tensor, float *decoded) {
    const size_t width = tensor->columns, blocks = (width + QE_BLOCK - 1) / QE_BLOCK;
    const uint8_t *codes = tensor->codes;
    const float *inverse = tensor->scale_inv;
    if (tensor->blocking == QE_BLOCKING_TENSOR) {
        run(tensor->format, codes, tensor->rows * width, inverse[0], decoded);
        return;
    }
    for (size_t row = 0; row < tensor->rows; ++row, codes += width, decoded += width) {
        if (tensor->blocking == QE_BLOCKING_COLUMN)
            columns(tensor->format, codes, width, inverse + row / QE_BLOCK * width, decoded);
        else
            row_blocks(tensor->format, codes, width,
                       inverse + (tensor->blocking == QE_BLOCKING_TILE ? row / QE_BLOCK : row) * blocks, decoded);
    }
}

void KERNEL(decode)(const qe_qtensor *tensor, float *decoded) {
    const size_t count = (size_t)tensor->rows * tensor->columns;
    if (tensor->format == QE_FORMAT_FP32) {
        memcpy(decoded, tensor->codes, count * sizeof(float));
    } else if (tensor->format == QE_FORMAT_BF16) {
        const uint16_t *codes = tensor->codes;
        KERNEL_VECTOR
        for (size_t i = 0; i < count; ++i) decoded[i] = bf16_value(codes[i]);
    } else {
        decode_fp8(tensor, decoded);
    }
}
