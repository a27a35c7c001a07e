/* table.h - the kernels of one level; each is defined in the file of its family. */
#ifndef QE_HOST_KERNELS_TABLE_H
#define QE_HOST_KERNELS_TABLE_H

#include "backend/host/kernels.h"
#include "backend/host/kernels/level.h"

void KERNEL(embed)(const qe_args_embed *args);
void KERNEL(embed_backward)(const qe_args_embed_backward *args);
void KERNEL(norm)(const qe_args_norm *args);
void KERNEL(norm_quantize)(const qe_args_norm *args);
void KERNEL(norm_backward)(const qe_args_norm_backward *args);
void KERNEL(quantize)(const qe_args_quantize *args);
void KERNEL(quantize_weight)(const qe_args_quantize_weight *args);
void KERNEL(decode)(const qe_qtensor *tensor, float *decoded);
void KERNEL(rope)(const qe_args_rope *args);
void KERNEL(rope_backward_quantize)(const qe_args_rope *args);
void KERNEL(attention)(const qe_args_attention *args, host_sgemm *sgemm);
void KERNEL(attention_backward)(const qe_args_attention_backward *args, host_sgemm *sgemm);
void KERNEL(swiglu_quantize)(const qe_args_swiglu *args);
void KERNEL(swiglu_backward_quantize)(const qe_args_swiglu_backward *args);
void KERNEL(cross_entropy)(const qe_args_cross_entropy *args);
void KERNEL(grad_norm)(const qe_args_grad_norm *args);
void KERNEL(adamw)(const qe_args_adamw *args);

#endif
