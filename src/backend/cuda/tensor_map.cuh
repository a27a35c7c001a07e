/* tensor_map.cuh - how the copy engine is told where a tensor lies. */
#ifndef QE_CUDA_TENSOR_MAP_CUH
#define QE_CUDA_TENSOR_MAP_CUH

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>

typedef CUresult (*tensor_map_encoder)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                       const cuuint64_t *, const cuuint32_t *, const cuuint32_t *,
                                       CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill);

/* The driver's cuTensorMapEncodeTiled; NULL: it has none. */
static inline void *tensor_map_encoder_find() {
    constexpr unsigned int ENCODE_SINCE = 12000;
    cudaDriverEntryPointQueryResult found;
    void *encode = nullptr;
    const bool is_found = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, ENCODE_SINCE,
                                                           cudaEnableDefault, &found) == cudaSuccess &&
                          found == cudaDriverEntryPointSuccess;
    return is_found ? encode : nullptr;
}

struct tensor_axes {
    uint32_t count;
    cuuint64_t sizes[5], pitches[4]; /* pitches: bytes from one to the next, of all axes but the first */
    cuuint32_t box[5];
};

/* encode: the driver's cuTensorMapEncodeTiled. What lies outside is zeros, and is not written. */
static inline bool tensor_map_encode(void *encode, const void *at, CUtensorMapDataType type, const tensor_axes &axes,
                                     CUtensorMapSwizzle swizzle, CUtensorMap *map_out) {
    const cuuint32_t steps[] = {1, 1, 1, 1, 1};
    return reinterpret_cast<tensor_map_encoder>(encode)(
               map_out, type, axes.count, const_cast<void *>(at), axes.sizes, axes.pitches, axes.box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* bf16 [sequences, sequence, columns], boxes of 64 columns and `rows` rows in the 128-byte swizzle. */
static inline bool tensor_map_make(void *encode, const void *at, uint32_t sequences, uint32_t sequence,
                                   uint32_t columns, uint32_t rows, CUtensorMap *map_out) {
    const tensor_axes axes = {3,
                              {columns, sequence, sequences},
                              {columns * 2ull, static_cast<cuuint64_t>(columns) * sequence * 2},
                              {64, rows, 1}};
    return tensor_map_encode(encode, at, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, axes, CU_TENSOR_MAP_SWIZZLE_128B, map_out);
}

#endif
