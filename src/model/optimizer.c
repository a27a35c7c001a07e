/* optimizer.c - learning rate and AdamW constants of a step. Computed in double, used in float. */
#include <math.h>
#include "qeffect/model.h"

double qe_learning_rate_at(const qe_learning_rate *rate, uint64_t step) {
    if (step <= rate->warmup_steps) return rate->peak * (double)step / (double)rate->warmup_steps;
    if (step >= rate->steps) return rate->minimum;
    double done = (double)(step - rate->warmup_steps) / (double)(rate->steps - rate->warmup_steps);
    return rate->minimum + (rate->peak - rate->minimum) * 0.5 * (1.0 + cos(done * acos(-1.0)));
}

qe_adamw qe_optimizer_step(const qe_optimizer *optimizer, uint64_t step, double gradient_norm) {
    double clip = 1.0;
    if (optimizer->clip_norm > 0)
        clip = fmin(1.0, optimizer->clip_norm / (gradient_norm + 1e-6)); /* as PyTorch's clip_grad_norm_ */
    return (qe_adamw){
        .learning_rate = (float)qe_learning_rate_at(&optimizer->rate, step),
        .beta1 = (float)optimizer->beta1,
        .beta2 = (float)optimizer->beta2,
        .epsilon = (float)optimizer->epsilon,
        .weight_decay = (float)optimizer->weight_decay,
        .bias_correction1 = (float)(1.0 - pow(optimizer->beta1, (double)step)),
        .bias_correction2 = (float)(1.0 - pow(optimizer->beta2, (double)step)),
        .gradient_scale = (float)clip,
    };
}
