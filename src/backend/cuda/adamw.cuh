/* adamw.cuh - one step of AdamW on one value: PyTorch's, every operation rounded on its own. And how a weight's witness
 * word tells of a commit under way: while the weight is being written the word names no version; every block counts
 * itself in and out in its upper bits, and the last one out turns all of it into version + 1. A guard that looks
 * meanwhile fires. */
#ifndef QE_CUDA_ADAMW_CUH
#define QE_CUDA_ADAMW_CUH

#include <cuda_runtime.h>

#include "qeffect/op.h"

constexpr uint32_t ADAMW_COUNT_SHIFT = 40; /* of the witness: versions lie below 2^40, twice the blocks above */
constexpr uint64_t ADAMW_BLOCKS_MAX = (1u << 23) - 1;

struct adamw_factors {
    float keep, gradient_scale, lerp1, beta2, rest2, root_correction2, epsilon, step_size;
};

__device__ __forceinline__ adamw_factors factors_of(const qe_adamw *step, int decay) {
    adamw_factors f;
    f.keep = decay ? __fsub_rn(1.0f, __fmul_rn(step->learning_rate, step->weight_decay)) : 1.0f;
    f.gradient_scale = step->gradient_scale;
    f.lerp1 = __fsub_rn(1.0f, step->beta1);
    f.beta2 = step->beta2;
    f.rest2 = __fsub_rn(1.0f, step->beta2);
    f.root_correction2 = __fsqrt_rn(step->bias_correction2);
    f.epsilon = step->epsilon;
    f.step_size = __fdiv_rn(step->learning_rate, step->bias_correction1);
    return f;
}

__device__ __forceinline__ void adamw_one(const adamw_factors &f, float grad, float &weight, float &moment1,
                                          float &moment2) {
    const float g = __fmul_rn(grad, f.gradient_scale);
    const float m = __fadd_rn(moment1, __fmul_rn(f.lerp1, __fsub_rn(g, moment1)));
    const float v = __fadd_rn(__fmul_rn(moment2, f.beta2), __fmul_rn(__fmul_rn(f.rest2, g), g));
    const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), f.root_correction2), f.epsilon);
    moment1 = m;
    moment2 = v;
    weight = __fsub_rn(__fmul_rn(weight, f.keep), __fmul_rn(f.step_size, __fdiv_rn(m, denominator)));
}

/* Counts a block in or out; returns what the word was. */
__device__ __forceinline__ uint64_t witness_count(uint64_t *witness, uint64_t add) {
    return atomicAdd(reinterpret_cast<unsigned long long *>(witness), (unsigned long long)add);
}

__device__ __forceinline__ void witness_enter(uint64_t *witness) {
    if (threadIdx.x == 0) witness_count(witness, 1ull << ADAMW_COUNT_SHIFT);
}

/* All writes of the block are seen before its count. The thread that counts the last block out calls `last` with the
 * next version, then makes the word that version. */
template <typename Last>
__device__ __forceinline__ void witness_leave(uint64_t *witness, Last last) {
    const uint64_t one = 1ull << ADAMW_COUNT_SHIFT, all = 2ull * gridDim.x * gridDim.y;
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    const uint64_t before = witness_count(witness, one);
    if ((before >> ADAMW_COUNT_SHIFT) + 1 != all) return;
    __threadfence();
    last((before & (one - 1)) + 1);
    witness_count(witness, 1 - all * one);
}

#endif
