/* accumulate.cu - one gradient added to another: what captured graphs do that own the memory they write. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/block.cuh"

namespace {

constexpr uint32_t THREADS = 256;
constexpr uint32_t WIDTH = 4;  /* neighbours that one thread takes: 16 bytes */
constexpr uint32_t UNROLL = 4; /* eight loads are under way */

__device__ __forceinline__ float4 sum_of(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

__global__ void __launch_bounds__(THREADS) accumulate_wide(const float4 *from, float4 *to, uint64_t pieces) {
    const uint64_t first = static_cast<uint64_t>(blockIdx.x) * THREADS * UNROLL + threadIdx.x;
    float4 a[UNROLL], b[UNROLL];
#pragma unroll
    for (uint32_t k = 0; k < UNROLL; ++k)
        if (first + k * THREADS < pieces) a[k] = from[first + k * THREADS], b[k] = to[first + k * THREADS];
#pragma unroll
    for (uint32_t k = 0; k < UNROLL; ++k)
        if (first + k * THREADS < pieces) to[first + k * THREADS] = sum_of(b[k], a[k]);
}

__global__ void __launch_bounds__(THREADS) accumulate_each(const float *from, float *to, uint64_t count) {
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i < count) to[i] = __fadd_rn(to[i], from[i]);
}

} // namespace

qe_status qe_cuda_accumulate(const qe_args_accumulate *args, cudaStream_t stream) {
    const bool wide = is_aligned(args->from) && is_aligned(args->to);
    const uint64_t pieces = wide ? args->count / WIDTH : 0, rest = args->count - pieces * WIDTH;
    if (pieces > 0) {
        const qe_status status = launch(accumulate_wide, pieces_of(pieces, THREADS * UNROLL), THREADS, 0, 0, stream,
                                        reinterpret_cast<const float4 *>(args->from),
                                        reinterpret_cast<float4 *>(args->to), pieces);
        if (status != QE_OK) return status;
    }
    if (rest == 0) return QE_OK;
    return launch(accumulate_each, pieces_of(rest, THREADS), THREADS, 0, 0, stream, args->from + pieces * WIDTH,
                  args->to + pieces * WIDTH, rest);
}
