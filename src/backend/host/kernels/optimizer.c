/* optimizer.c - the sum of squares of a gradient, and AdamW as PyTorch computes it (decay first, lerp, addcmul,
 * addcdiv), on fp32 masters. */
#include <math.h>

#include "backend/host/kernels/table.h"
#include "backend/host/kernels/level.h"

/* 16 double lanes over the whole array, lane i % 16, halves added at the end. */
void KERNEL(grad_norm)(const qe_args_grad_norm *args) {
    const float *grad = args->grad;
    double sums[LANES] = {0};
    uint64_t at = 0;
    for (; at + LANES <= args->count; at += LANES)
        for (int lane = 0; lane < LANES; ++lane) {
            const double value = (double)grad[at + (uint64_t)lane];
            sums[lane] += value * value;
        }
    for (int lane = 0; at < args->count; ++at, ++lane) sums[lane] += (double)grad[at] * (double)grad[at];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    *args->sum = sums[0];
}

/* What all elements share. */
typedef struct adamw_factors {
    float keep, gradient_scale, lerp1, beta2, rest2, root_correction2, epsilon, step_size;
} adamw_factors;

static adamw_factors factors_of(const qe_adamw *step, int decay) {
    return (adamw_factors){
        .keep = decay ? 1.0f - step->learning_rate * step->weight_decay : 1.0f,
        .gradient_scale = step->gradient_scale,
        .lerp1 = 1.0f - step->beta1,
        .beta2 = step->beta2,
        .rest2 = 1.0f - step->beta2,
        .root_correction2 = sqrtf(step->bias_correction2),
        .epsilon = step->epsilon,
        .step_size = step->learning_rate / step->bias_correction1,
    };
}

void KERNEL(adamw)(const qe_args_adamw *args) {
    const adamw_factors f = factors_of(args->step, args->decay);
    float *weight = args->weight, *moment1 = args->moment1, *moment2 = args->moment2;
    const float *grad = args->grad;
    KERNEL_VECTOR
    for (uint64_t i = 0; i < args->count; ++i) {
        const float g = grad[i] * f.gradient_scale;
        const float m = moment1[i] + f.lerp1 * (g - moment1[i]);
        const float v = moment2[i] * f.beta2 + f.rest2 * g * g;
        const float denominator = sqrtf(v) / f.root_correction2 + f.epsilon;
        moment1[i] = m;
        moment2[i] = v;
        weight[i] = weight[i] * f.keep - f.step_size * (m / denominator);
    }
}
