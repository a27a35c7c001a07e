/* grad_norm.cu - the sum of squares of a gradient in fp64: a thread in order, then lanes, warps and blocks by halves.
 * The order depends on `count` alone; it is not the host's. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/block.cuh"

namespace {

/* Block b of a number of blocks that depends on `count` alone. */

constexpr uint32_t NORM_THREADS = 256;
constexpr uint32_t NORM_WIDTH = 4; /* neighbours that one thread takes: 16 bytes */
constexpr uint32_t NORM_UNROLL = 4;
constexpr uint32_t NORM_BLOCK = NORM_THREADS * NORM_WIDTH * NORM_UNROLL; /* elements that are worth a block */
constexpr uint32_t NORM_BLOCKS_MAX = QE_NORM_PARTIALS;

template <bool IS_ALIGNED>
__device__ __forceinline__ float4 norm_load(const float *grad, uint64_t piece) {
    const float *at = grad + piece * NORM_WIDTH;
    return IS_ALIGNED ? *reinterpret_cast<const float4 *>(at) : make_float4(at[0], at[1], at[2], at[3]);
}

__device__ __forceinline__ double norm_add(double sum, float4 value) {
    sum = fma((double)value.x, (double)value.x, sum); /* the square of a float is exact in double */
    sum = fma((double)value.y, (double)value.y, sum);
    sum = fma((double)value.z, (double)value.z, sum);
    return fma((double)value.w, (double)value.w, sum);
}

template <bool IS_ALIGNED>
__global__ void __launch_bounds__(NORM_THREADS) norm_blocks(const float *grad, uint64_t count, double *sums) {
    const uint64_t pieces = count / NORM_WIDTH, stride = (uint64_t)gridDim.x * NORM_THREADS;
    uint64_t piece = (uint64_t)blockIdx.x * NORM_THREADS + threadIdx.x;
    double sum = 0.0;
    for (; piece + (NORM_UNROLL - 1) * stride < pieces; piece += NORM_UNROLL * stride) {
        float4 value[NORM_UNROLL];
#pragma unroll
        for (uint32_t k = 0; k < NORM_UNROLL; ++k) value[k] = norm_load<IS_ALIGNED>(grad, piece + (uint64_t)k * stride);
#pragma unroll
        for (uint32_t k = 0; k < NORM_UNROLL; ++k) sum = norm_add(sum, value[k]);
    }
    for (; piece < pieces; piece += stride) sum = norm_add(sum, norm_load<IS_ALIGNED>(grad, piece));
    if (blockIdx.x == 0 && threadIdx.x < count % NORM_WIDTH) {
        const double value = (double)grad[pieces * NORM_WIDTH + threadIdx.x];
        sum = fma(value, value, sum);
    }
    sum = qe_block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(NORM_BLOCKS_MAX) norm_end(const double *partials, uint32_t count, double *sum_out) {
    const double sum = qe_block_sum(threadIdx.x < count ? partials[threadIdx.x] : 0.0);
    if (threadIdx.x == 0) *sum_out = sum;
}

} // namespace

qe_status qe_cuda_grad_norm(const qe_args_grad_norm *args, cudaStream_t stream) {
    const uint64_t wanted = pieces_of(args->count, NORM_BLOCK);
    const uint32_t blocks = wanted < 1 ? 1 : wanted < NORM_BLOCKS_MAX ? (uint32_t)wanted : NORM_BLOCKS_MAX;
    double *sums = blocks == 1 ? args->sum : args->partials;
    const auto kernel = is_aligned(args->grad) ? norm_blocks<true> : norm_blocks<false>;
    const qe_status status = launch(kernel, blocks, NORM_THREADS, 0, 0, stream, args->grad, args->count, sums);
    if (status != QE_OK || blocks == 1) return status;
    return launch(norm_end, 1, NORM_BLOCKS_MAX, 0, 0, stream, args->partials, blocks, args->sum);
}
