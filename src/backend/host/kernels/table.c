/* table.c - the kernels of this level, by name. */
#include "backend/host/kernels/table.h"

#define LEVEL_NAME_TEXT(level) #level
#define LEVEL_NAME(level) LEVEL_NAME_TEXT(level)

extern const host_kernels KERNEL(kernels);

const host_kernels KERNEL(kernels) = {
    .name = LEVEL_NAME(QE_LEVEL),
    .embed = KERNEL(embed),
    .embed_backward = KERNEL(embed_backward),
    .norm = KERNEL(norm),
    .norm_quantize = KERNEL(norm_quantize),
    .norm_backward = KERNEL(norm_backward),
    .quantize = KERNEL(quantize),
    .quantize_weight = KERNEL(quantize_weight),
    .decode = KERNEL(decode),
    .rope = KERNEL(rope),
    .rope_backward_quantize = KERNEL(rope_backward_quantize),
    .attention = KERNEL(attention),
    .attention_backward = KERNEL(attention_backward),
    .swiglu_quantize = KERNEL(swiglu_quantize),
    .swiglu_backward_quantize = KERNEL(swiglu_backward_quantize),
    .cross_entropy = KERNEL(cross_entropy),
    .grad_norm = KERNEL(grad_norm),
    .adamw = KERNEL(adamw),
};
