/* cross_entropy.c - loss += log(sum e^(z - max)) + max - z[target], rows in order, in double; the sum of exponentials
 * is a 16-lane float sum. Backward: z becomes (softmax - onehot) * gradient_scale; a row that is not counted, 0. */
#include <math.h>

#include "backend/host/kernels/table.h"
#include "backend/host/kernels/level.h"

enum { CHUNK = 1024 }; /* exponentials kept on the stack when the logits must stay */

/* Sum of e^(z - most). Exponentials go to `kept` [count], or nowhere if it is NULL. */
static float exponentials(const float *z, size_t count, float most, float *kept) {
    float chunk[CHUNK], sum = 0.0f;
    for (size_t at = 0; at < count; at += CHUNK) {
        const size_t width = count - at < CHUNK ? count - at : CHUNK;
        float *to = kept ? kept + at : chunk;
        KERNEL_VECTOR
        for (size_t i = 0; i < width; ++i) to[i] = exp_lane(z[at + i] - most);
        sum += row_sum(to, width);
    }
    return sum;
}

static void row_scale(float *row, size_t count, float factor) {
    KERNEL_VECTOR
    for (size_t i = 0; i < count; ++i) row[i] *= factor;
}

/* Returns the row's loss. */
static double loss_row(const qe_args_cross_entropy *args, size_t row) {
    const size_t vocab = args->vocab;
    float *z = (float *)args->logits + row * vocab;
    const int32_t target = args->targets[row];
    if (target < 0) {
        if (args->backward) memset(z, 0, vocab * sizeof(float));
        return 0.0;
    }
    const float most = row_max(z, vocab), at_target = z[target];
    const float sum = exponentials(z, vocab, most, args->backward ? z : NULL);
    if (args->backward) {
        row_scale(z, vocab, args->gradient_scale / sum);
        z[target] -= args->gradient_scale;
    }
    return log((double)sum) + ((double)most - (double)at_target);
}

void KERNEL(cross_entropy)(const qe_args_cross_entropy *args) {
    double loss = 0.0;
    for (size_t row = 0; row < args->rows; ++row) loss += loss_row(args, row);
    *args->loss = loss;
}
