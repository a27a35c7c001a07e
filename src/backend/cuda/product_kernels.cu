/* product_kernels.cu - see product_kernels.h. All three run over their elements with a grid's stride. */
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "backend/cuda/launch.cuh"
#include "backend/cuda/product_kernels.h"

enum { THREADS = 256, BLOCKS_MAX = 4096 /* fills any device; larger counts go round */ };

static unsigned blocks_for(uint64_t count) {
    const unsigned blocks = pieces_of(count, THREADS);
    return blocks < BLOCKS_MAX ? blocks : (unsigned)BLOCKS_MAX;
}

__device__ static uint64_t first_index(void) { return (uint64_t)blockIdx.x * THREADS + threadIdx.x; }
__device__ static uint64_t index_stride(void) { return (uint64_t)gridDim.x * THREADS; }

__global__ static void round_kernel(const float *from, const __nv_bfloat16 *residual, __nv_bfloat16 *to,
                                    uint64_t count) {
    for (uint64_t i = first_index(); i < count; i += index_stride()) {
        const float added = residual ? __fadd_rn(from[i], __bfloat162float(residual[i])) : from[i];
        to[i] = __float2bfloat16_rn(added);
    }
}

qe_status qe_cuda_round(const float *from, const void *residual, void *to, uint64_t count, cudaStream_t stream) {
    if (count == 0) return QE_OK;
    return launch(round_kernel, blocks_for(count), THREADS, 0, 0, stream, from, (const __nv_bfloat16 *)residual,
                  (__nv_bfloat16 *)to, count);
}

/* SplitMix64's mixing of a counter. */
__device__ static uint64_t mixed(uint64_t counter) {
    uint64_t z = counter * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* The sum of four uniform 16-bit numbers, brought to mean 0 and deviation 1: at most 3.5. */
__device__ static float near_normal(uint64_t seed, uint64_t i) {
    const uint64_t bits = mixed(mixed(seed + 1) ^ i);
    const uint64_t sum = (bits & 0xFFFF) + ((bits >> 16) & 0xFFFF) + ((bits >> 32) & 0xFFFF) + (bits >> 48);
    return ((float)sum / 65535.0f - 2.0f) * 1.7320508f;
}

template <typename element>
__device__ element encoded(float value);
template <>
__device__ float encoded<float>(float value) { return value; }
template <>
__device__ __nv_bfloat16 encoded<__nv_bfloat16>(float value) { return __float2bfloat16_rn(value); }
template <>
__device__ __nv_fp8_e4m3 encoded<__nv_fp8_e4m3>(float value) { return __nv_fp8_e4m3(64.0f * value); }
template <>
__device__ __nv_fp8_e5m2 encoded<__nv_fp8_e5m2>(float value) { return __nv_fp8_e5m2(64.0f * value); }

template <typename element>
__global__ static void random_kernel(element *to, uint64_t count, uint64_t seed) {
    for (uint64_t i = first_index(); i < count; i += index_stride()) to[i] = encoded<element>(near_normal(seed, i));
}

template <typename element>
static qe_status random_launch(element *to, uint64_t count, uint64_t seed, cudaStream_t stream) {
    return launch(random_kernel<element>, blocks_for(count), THREADS, 0, 0, stream, to, count, seed);
}

qe_status qe_cuda_random(qe_format format, void *to, uint64_t count, uint64_t seed, cudaStream_t stream) {
    switch (format) {
        case QE_FORMAT_E4M3: return random_launch((__nv_fp8_e4m3 *)to, count, seed, stream);
        case QE_FORMAT_E5M2: return random_launch((__nv_fp8_e5m2 *)to, count, seed, stream);
        case QE_FORMAT_BF16: return random_launch((__nv_bfloat16 *)to, count, seed, stream);
        case QE_FORMAT_FP32: return random_launch((float *)to, count, seed, stream);
    }
    return QE_ERROR_ARGUMENT;
}

__global__ static void compare_kernel(const uint32_t *one, const uint32_t *other, uint64_t words, uint32_t tail_mask,
                                      uint32_t *differs) {
    for (uint64_t i = first_index(); i < words; i += index_stride()) {
        const uint32_t mask = i + 1 == words ? tail_mask : 0xFFFFFFFFu;
        if ((one[i] ^ other[i]) & mask) *differs = 1;
    }
}

qe_status qe_cuda_compare(const void *one, const void *other, uint64_t bytes, uint32_t *differs, cudaStream_t stream) {
    const uint64_t words = (bytes + 3) / 4;
    const uint32_t tail_mask = bytes % 4 ? (1u << (8 * (bytes % 4))) - 1 : 0xFFFFFFFFu;
    if (words == 0) return QE_OK;
    return launch(compare_kernel, blocks_for(words), THREADS, 0, 0, stream, (const uint32_t *)one,
                  (const uint32_t *)other, words, tail_mask, differs);
}
