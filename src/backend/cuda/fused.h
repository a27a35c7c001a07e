/* fused.h - ops of two parts (qe_op_parts) that a kernel of ours can do whole: a product, and what is made of its
 * result on the way out. Each shape is run whole or apart, as a race on random data said, or the file of choices; whole
 * where there was neither. Bits are the same either way.
 * Thread: one at a time per object. */
#ifndef QE_CUDA_FUSED_H
#define QE_CUDA_FUSED_H

#include <cuda_runtime_api.h>

#include "backend/cuda/products.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qe_cuda_fused qe_cuda_fused;

/* Queues an op as its parts: what one kernel races against. */
typedef struct qe_fused_apart {
    qe_status (*queue)(void *context, const qe_op *op, cudaStream_t stream);
    void *context;
} qe_fused_apart;

/* `aside`: as of products. */
qe_status qe_cuda_fused_create(cudaStream_t aside, qe_cuda_fused **fused_out, qe_error *error_out);
void qe_cuda_fused_destroy(qe_cuda_fused *fused);
/* Chooses the way of an op's shape where none is chosen yet and a kernel takes it: by a race against `apart`, or whole
 * where that is NULL. *chosen_out: the choice that was made, else NULL.
 * Requires: the op's parts are prepared. Capture: forbidden.
 * On failure: QE_ERROR_MEMORY, QE_ERROR_DEVICE. */
qe_status qe_cuda_fused_prepare(qe_cuda_fused *fused, const qe_op *op, const qe_fused_apart *apart,
                                const qe_cuda_choice **chosen_out, qe_error *error_out);
/* Could an op of this kind be run whole, given a target? */
int qe_cuda_fused_is(qe_op_kind kind);
/* Could it be? Depends on the shape, and on which addresses are NULL and which bytes overlap. */
int qe_cuda_fused_fits(const qe_cuda_fused *fused, const qe_op *op);
/* Is this op run whole? 0 where nothing was prepared or chosen. Depends on the choice besides. */
int qe_cuda_fused_takes(const qe_cuda_fused *fused, const qe_op *op);
/* Queues it. Requires: it is taken. Capture: recorded. On failure: as qe_cuda_own_refused. */
qe_status qe_cuda_fused_run(const qe_cuda_fused *fused, const qe_op *op, cudaStream_t stream, qe_error *error_out);
uint32_t qe_cuda_fused_choices(const qe_cuda_fused *fused, const qe_cuda_choice **choices_out);
/* Takes a choice from a file. On failure: QE_ERROR_FORMAT: names no op of two parts; QE_ERROR_UNSUPPORTED: this build
 * or device has no such way, for that shape or at all; QE_ERROR_ARGUMENT: another was chosen; QE_ERROR_MEMORY. */
qe_status qe_cuda_fused_choose(qe_cuda_fused *fused, const qe_cuda_choice *choice, qe_error *error_out);
/* Forgets all choices but the first `count`. */
void qe_cuda_fused_keep(qe_cuda_fused *fused, uint32_t count);
/* gemm.c: of products' device; lives as long. */
qe_cuda_fused *qe_cuda_gemm_fused(const qe_cuda_gemm *gemm);

#ifdef __cplusplus
}
#endif
#endif
