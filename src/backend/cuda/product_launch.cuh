/* product_launch.cuh - what products of ours, alone or with a second part, have in common on the host. */
#ifndef QE_CUDA_PRODUCT_LAUNCH_CUH
#define QE_CUDA_PRODUCT_LAUNCH_CUH

#include "backend/cuda/further_tables.h"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/product_device.h"
#include "backend/cuda/product_tiles.cuh"
#include "backend/cuda/tensor_map.cuh"

namespace product_tiles {

constexpr uint32_t SWIZZLE_BYTES = 128; /* a box's width in shared memory, where the matrix unit or a store reads it */

/* Row-major [rows, columns] in boxes; codes, bf16 or fp32, as elements have 1, 2 or 4 bytes. */
static inline bool map_make(void *encode, const void *at, uint32_t element_bytes, uint32_t rows, uint32_t columns,
                            uint32_t box_rows, CUtensorMap *map_out) {
    const tensor_axes axes = {2,
                              {columns, rows},
                              {static_cast<cuuint64_t>(columns) * element_bytes},
                              {SWIZZLE_BYTES / element_bytes, box_rows}};
    const CUtensorMapDataType type = element_bytes == 4   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    return tensor_map_encode(encode, at, type, axes, CU_TENSOR_MAP_SWIZZLE_128B, map_out);
}

/* Codes of one scale that lie as the copy engine reads them; of either format. */
static inline bool is_code(const qe_qtensor &tensor, bool is_transposed) {
    return tensor.blocking == QE_BLOCKING_TENSOR && (tensor.transposed != 0) == is_transposed &&
           tensor.scale_inv != nullptr && is_aligned(tensor.codes);
}

constexpr uint32_t COORDINATE_MAX = 0x7FFFFFFFu; /* the copy engine's have a sign */

/* Can tiles of a product [m, n] of k terms, so many columns wide, be counted, and the copy engine go there? */
static inline bool is_in_reach(uint64_t m, uint64_t n, uint64_t k, uint32_t columns) {
    constexpr uint64_t TILES_MAX = 1u << 30; /* counted in 32 bits, with room for a stride */
    return m <= COORDINATE_MAX && n <= COORDINATE_MAX && k <= COORDINATE_MAX &&
           static_cast<uint64_t>(pieces_of(m, ROWS)) * pieces_of(n, columns) <= TILES_MAX;
}

/* own_out: gets the driver's encoder and how many clusters are at work at a time. */
template <typename Job>
static qe_status kernel_open(void (*kernel)(Job), uint32_t threads, uint32_t shared_bytes,
                             qe_product_device *own_out) {
    void *encode = tensor_map_encoder_find();
    const uint32_t clusters = encode == nullptr ? 0 : clusters_at_work(kernel, threads, CLUSTER, shared_bytes);
    if (clusters == 0) {
        (void)cudaGetLastError();
        return QE_ERROR_UNSUPPORTED;
    }
    own_out->encode = encode;
    own_out->clusters = clusters;
    return QE_OK;
}

template <typename Job>
static qe_status kernel_prepare(void (*kernel)(Job), uint32_t threads, uint32_t shared_bytes,
                                qe_further_device *device) {
    device->encode = tensor_map_encoder_find();
    if (device->encode != nullptr)
        device->clusters = static_cast<int>(clusters_at_work(kernel, threads, CLUSTER, shared_bytes));
    return device->clusters > 0 ? QE_OK : QE_ERROR_UNSUPPORTED;
}

/* most: clusters that are at work at a time; fewer where there are fewer tiles. */
template <typename Job>
static qe_status tiles_launch(void (*kernel)(Job), const Job &j, uint32_t threads, uint32_t shared_bytes,
                              uint32_t most, cudaStream_t stream) {
    const uint32_t tiles = j.tiles.down * j.tiles.across;
    return launch(kernel, dim3((tiles < most ? tiles : most) * CLUSTER), threads, CLUSTER, shared_bytes, stream, j);
}

} // namespace product_tiles

#endif
