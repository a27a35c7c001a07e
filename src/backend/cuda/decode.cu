/* decode.cu - from codes and inverse scales back to bf16 values: value * scale_inv, exact where the scale is a power of
 * two. Any blocking; four columns a thread where the shape allows. */
#include "backend/cuda/codec.cuh"
#include "backend/cuda/kernels.h"
#include "backend/cuda/tall.cuh"
#include "qeffect/limits.h"

struct decode_job {
    qe_qtensor tensor;
    uint16_t *values; /* [rows, columns] bf16 */
};

enum { DECODE_THREADS = 256, DECODE_BLOCKS_MAX = 8192 };

DEVICE float decode_inverse(const qe_qtensor &tensor, uint32_t row, uint32_t column) {
    const uint32_t across = (tensor.columns + QE_BLOCK - 1) / QE_BLOCK;
    switch (tensor.blocking) {
        case QE_BLOCKING_ROW: return tensor.scale_inv[static_cast<size_t>(row) * across + column / QE_BLOCK];
        case QE_BLOCKING_COLUMN: return tensor.scale_inv[static_cast<size_t>(row / QE_BLOCK) * tensor.columns + column];
        case QE_BLOCKING_TILE:
            return tensor.scale_inv[static_cast<size_t>(row / QE_BLOCK) * across + column / QE_BLOCK];
        default: return tensor.scale_inv[0];
    }
}

KERNEL void __launch_bounds__(DECODE_THREADS) decode_any_kernel(const __grid_constant__ decode_job job) {
    const qe_qtensor &tensor = job.tensor;
    const uint8_t *codes = static_cast<const uint8_t *>(tensor.codes);
    const uint64_t count = static_cast<uint64_t>(tensor.rows) * tensor.columns;
    for (uint64_t i = blockIdx.x * static_cast<uint64_t>(DECODE_THREADS) + threadIdx.x; i < count;
         i += static_cast<uint64_t>(DECODE_THREADS) * gridDim.x) {
        const uint32_t row = static_cast<uint32_t>(i / tensor.columns),
                       column = static_cast<uint32_t>(i % tensor.columns);
        const uint64_t from = tensor.transposed ? static_cast<uint64_t>(column) * tensor.rows + row : i;
        const float value = decode1(tensor.format, codes[from]);
        job.values[i] = static_cast<uint16_t>(bf16_code(mul(value, decode_inverse(tensor, row, column))));
    }
}

/* 128x1 blocks by rows: eight columns of up to 16 rows a thread, which share their inverse scales. */
enum { DECODE_ROWS = 16 };

KERNEL void __launch_bounds__(DECODE_THREADS) decode_columns_kernel(const __grid_constant__ decode_job job) {
    const qe_qtensor &tensor = job.tensor;
    const uint32_t column = (blockIdx.x * DECODE_THREADS + threadIdx.x) * 8, first = block_down() * DECODE_ROWS;
    if (column >= tensor.columns || first >= tensor.rows) return;
    float inverse[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) inverse[k] = decode_inverse(tensor, first, column + k);
#pragma unroll 4
    for (uint32_t row = first; row < first + DECODE_ROWS && row < tensor.rows; ++row) {
        const size_t at = static_cast<size_t>(row) * tensor.columns + column;
        const uint2 codes = *reinterpret_cast<const uint2 *>(static_cast<const uint8_t *>(tensor.codes) + at);
        float v[8];
#pragma unroll
        for (int k = 0; k < 8; ++k)
            v[k] = mul(decode1(tensor.format, (k < 4 ? codes.x : codes.y) >> (k % 4 * 8) & 0xFFu), inverse[k]);
        *reinterpret_cast<uint4 *>(job.values + at) = pack8(v);
    }
}

extern "C" qe_status qe_cuda_decode(const qe_qtensor *tensor, void *values, cudaStream_t stream) {
    decode_job job = {};
    job.tensor = *tensor;
    job.values = static_cast<uint16_t *>(values);
    if (tensor->blocking == QE_BLOCKING_COLUMN && !tensor->transposed && tensor->columns % 8 == 0 &&
        is_aligned(values) && is_aligned(tensor->codes)) {
        const dim3 grid =
            tall_grid(pieces_of(tensor->columns, DECODE_THREADS * 8), pieces_of(tensor->rows, DECODE_ROWS));
        return launch(decode_columns_kernel, grid, DECODE_THREADS, 1, 0, stream, job);
    }
    const uint32_t needed = pieces_of(static_cast<uint64_t>(tensor->rows) * tensor->columns, DECODE_THREADS);
    const uint32_t most = DECODE_BLOCKS_MAX, blocks = needed < most ? needed : most;
    return launch(decode_any_kernel, dim3(blocks), DECODE_THREADS, 1, 0, stream, job);
}
