/* embed.c - rows of a table, and their gradients, tokens in order. */
#include "backend/host/kernels/table.h"
#include "backend/host/kernels/level.h"

void KERNEL(embed)(const qe_args_embed *args) {
    const size_t hidden = args->hidden;
    for (size_t t = 0; t < args->tokens_count; ++t)
        memcpy((float *)args->y + t * hidden, args->table + (size_t)args->tokens[t] * hidden, hidden * sizeof(float));
}

void KERNEL(embed_backward)(const qe_args_embed_backward *args) {
    const size_t hidden = args->hidden;
    if (args->set) memset(args->grad, 0, args->vocab * hidden * sizeof(float));
    for (size_t t = 0; t < args->tokens_count; ++t) {
        float *to = args->grad + (size_t)args->tokens[t] * hidden;
        const float *from = (const float *)args->dy + t * hidden;
        KERNEL_VECTOR
        for (size_t i = 0; i < hidden; ++i) to[i] += from[i];
    }
}
