/* block.cuh - for kernels whose blocks are rows or pieces of a vector: how many threads, sums over a block in an order
 * that depends on the number of threads alone, bf16 pairs. */
#ifndef QE_CUDA_BLOCK_CUH
#define QE_CUDA_BLOCK_CUH

#include <cuda_bf16.h>

#include "backend/cuda/launch.cuh"

constexpr uint32_t QE_CUDA_WARP = 32, QE_CUDA_WARPS_MAX = 32;

/* Whole warps, at least one and at most `most` threads. */
static inline uint32_t qe_cuda_threads(uint64_t wanted, uint32_t most) {
    const uint64_t whole = static_cast<uint64_t>(pieces_of(wanted ? wanted : 1, QE_CUDA_WARP)) * QE_CUDA_WARP;
    return whole < most ? static_cast<uint32_t>(whole) : most;
}

__device__ __forceinline__ float qe_bf16_low(uint32_t pair) {
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float qe_bf16_high(uint32_t pair) {
    return __uint_as_float(pair & 0xFFFF0000u);
}

__device__ __forceinline__ uint32_t qe_bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

/* Sum over the block, the same value in every thread: lanes by halves, then warps by halves.
 * Requires: all threads take part; whole warps. */
__device__ __forceinline__ double qe_block_sum(double value) {
    __shared__ double of_warp[QE_CUDA_WARPS_MAX];
    for (uint32_t half = QE_CUDA_WARP / 2; half > 0; half /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, half);
    const uint32_t lane = threadIdx.x % QE_CUDA_WARP, warps = blockDim.x / QE_CUDA_WARP;
    __syncthreads(); /* an earlier sum may still be read */
    if (lane == 0) of_warp[threadIdx.x / QE_CUDA_WARP] = value;
    __syncthreads();
    value = lane < warps ? of_warp[lane] : 0.0;
    for (uint32_t half = QE_CUDA_WARP / 2; half > 0; half /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, half);
    return value;
}

/* Past the first cache: a kernel on another stream may have written it just now. */
__device__ __forceinline__ uint64_t qe_word_now(const uint64_t *word) {
    return *reinterpret_cast<const volatile uint64_t *>(word);
}

#endif
