/* product_launch.cuh - what entries of the table of further.h that are products of ours have in common on the host. */
#ifndef QE_CUDA_PRODUCT_LAUNCH_CUH
#define QE_CUDA_PRODUCT_LAUNCH_CUH

#include "backend/cuda/further_tables.h"
#include "backend/cuda/launch.cuh"
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

/* Can tiles so many columns wide be counted, and the copy engine go there? */
static inline bool is_in_reach(const qe_product *product, uint32_t columns) {
    constexpr uint64_t TILES_MAX = 1u << 30;         /* counted in 32 bits, with room for a stride */
    constexpr uint32_t COORDINATE_MAX = 0x7FFFFFFFu; /* the copy engine's have a sign */
    const uint64_t tiles = static_cast<uint64_t>(pieces_of(product->m, ROWS)) * pieces_of(product->n, columns);
    return product->m <= COORDINATE_MAX && product->n <= COORDINATE_MAX && product->k <= COORDINATE_MAX &&
           tiles <= TILES_MAX;
}

template <typename Job>
static qe_status kernel_prepare(void (*kernel)(Job), uint32_t threads, uint32_t shared_bytes,
                                qe_further_device *device) {
    device->encode = tensor_map_encoder_find();
    if (device->encode != nullptr)
        device->clusters = static_cast<int>(clusters_at_work(kernel, threads, CLUSTER, shared_bytes));
    return device->clusters > 0 ? QE_OK : QE_ERROR_UNSUPPORTED;
}

/* As many clusters as are at work at a time, or as there are tiles. */
template <typename Job>
static qe_status tiles_launch(void (*kernel)(Job), const Job &j, uint32_t threads, uint32_t shared_bytes,
                              const qe_further_device *device, cudaStream_t stream) {
    const uint32_t tiles = j.tiles.down * j.tiles.across, most = static_cast<uint32_t>(device->clusters);
    return launch(kernel, dim3((tiles < most ? tiles : most) * CLUSTER), threads, CLUSTER, shared_bytes, stream, j);
}

} // namespace product_tiles

#endif
