/* fused_race.h - is one kernel faster than the parts it does, in turns on random data, long enough that what either
 * draws counts? */
#ifndef QE_CUDA_FUSED_RACE_H
#define QE_CUDA_FUSED_RACE_H

#include "backend/cuda/fused.h"

#ifdef __cplusplus
extern "C" {
#endif

/* *is_whole_out = 1: `whole` was no slower, or there is no memory to race with.
 * Ensures:    the device memory it took is free again.
 * On failure: QE_ERROR_MEMORY (of the host), QE_ERROR_DEVICE.
 * Capture:    forbidden. */
qe_status qe_fused_race(const qe_op *op, const qe_fused_apart *whole, const qe_fused_apart *apart, cudaStream_t stream,
                        int *is_whole_out, qe_error *error_out);

#ifdef __cplusplus
}
#endif
#endif
