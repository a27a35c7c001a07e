/* product_kernels.h - what products need besides a library: rounding fp32 products to bf16, and, for tuning, random
 * operands and a comparison of bits. As in kernels.h: queued on `stream`, nothing allocated, may be captured;
 * QE_ERROR_DEVICE where a launch fails. */
#ifndef QE_CUDA_PRODUCT_KERNELS_H
#define QE_CUDA_PRODUCT_KERNELS_H

#include <cuda_runtime_api.h>
#include "qeffect/recipe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* to[i] = bf16(from[i] + residual[i]); residual (bf16) may be NULL and may equal `to`. */
qe_status qe_cuda_round(const float *from, const void *residual, void *to, uint64_t count, cudaStream_t stream);
/* Elements near a normal distribution, number i a function of (seed, i): deviation 64 for 8-bit formats (amax is then
 * near 256 whatever the size), 1 for the others. Never NaN or Inf. */
qe_status qe_cuda_random(qe_format format, void *to, uint64_t count, uint64_t seed, cudaStream_t stream);
/* *differs (on the device) becomes 1 where the bytes are not the same, else stays. Requires: 4-byte alignment. */
qe_status qe_cuda_compare(const void *one, const void *other, uint64_t bytes, uint32_t *differs, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
