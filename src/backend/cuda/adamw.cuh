/* adamw.cuh - one step of AdamW on one value: PyTorch's, every operation rounded on its own. And how a weight's witness
 * word tells of a commit under way: while the weight is being written the word names no version; every block counts
 * itself in and out in its upper bits, and the last one out turns all of it into version + 1. A guard that looks
 * meanwhile fires. */
#ifndef QE_CUDA_ADAMW_CUH
#define QE_CUDA_ADAMW_CUH

#include "backend/cuda/device.cuh"
#include "qeffect/op.h"

constexpr uint32_t ADAMW_COUNT_SHIFT = 40; /* of the witness: versions lie below 2^40, twice the blocks above */
constexpr uint64_t ADAMW_BLOCKS_MAX = (1u << 23) - 1;

struct adamw_factors {
    float keep, gradient_scale, lerp1, beta2, rest2, root_correction2, epsilon, step_size;
};

DEVICE adamw_factors factors_of(const qe_adamw *step, int decay) {
    adamw_factors f;
    f.keep = decay ? sub(1.0f, mul(step->learning_rate, step->weight_decay)) : 1.0f;
    f.gradient_scale = step->gradient_scale;
    f.lerp1 = sub(1.0f, step->beta1);
    f.beta2 = step->beta2;
    f.rest2 = sub(1.0f, step->beta2);
    f.root_correction2 = root(step->bias_correction2);
    f.epsilon = step->epsilon;
    f.step_size = quotient(step->learning_rate, step->bias_correction1);
    return f;
}

DEVICE void adamw_one(const adamw_factors &f, float grad, float &weight, float &moment1, float &moment2) {
    const float g = mul(grad, f.gradient_scale);
    const float m = add(moment1, mul(f.lerp1, sub(g, moment1)));
    const float v = add(mul(moment2, f.beta2), mul(mul(f.rest2, g), g));
    const float denominator = add(quotient(root(v), f.root_correction2), f.epsilon);
    moment1 = m;
    moment2 = v;
    weight = sub(mul(weight, f.keep), mul(f.step_size, quotient(m, denominator)));
}

DEVICE void witness_enter(uint64_t *witness) {
    if (threadIdx.x == 0) add_to_word(witness, 1ull << ADAMW_COUNT_SHIFT);
}

/* All writes of the block are seen before its count. The thread that counts the last block out calls `last` with the
 * next version, then makes the word that version. */
template <typename Last>
static METHOD void witness_leave(uint64_t *witness, Last last) {
    const uint64_t one = 1ull << ADAMW_COUNT_SHIFT, all = 2ull * gridDim.x * gridDim.y;
    block_barrier();
    if (threadIdx.x != 0) return;
    device_fence();
    const uint64_t before = add_to_word(witness, one);
    if ((before >> ADAMW_COUNT_SHIFT) + 1 != all) return;
    device_fence();
    last((before & (one - 1)) + 1);
    add_to_word(witness, 1 - all * one);
}

#endif
