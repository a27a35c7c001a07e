/* further_tables.h - the kernels, a table per file that is compiled. */
#ifndef QE_CUDA_FURTHER_TABLES_H
#define QE_CUDA_FURTHER_TABLES_H

#include "backend/cuda/further.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Weight gradients, E5M2 by E4M3 into fp32: partial sums promoted to fp32, and not. */
extern const qe_further_kernel qe_cutlass_split[], qe_cutlass_fast[];
extern const uint32_t qe_cutlass_split_count, qe_cutlass_fast_count;
/* Into bf16, split: of E5M2 by E4M3, and of E4M3. */
extern const qe_further_kernel qe_product_own[];
extern const uint32_t qe_product_own_count;
/* Weight gradients, split, of any codes by E4M3 into fp32. */
extern const qe_further_kernel qe_weight_grad_own[];
extern const uint32_t qe_weight_grad_own_count;

#ifdef __cplusplus
}
#endif
#endif
