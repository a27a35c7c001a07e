/* linear_swiglu.h - a linear op whose result goes through swiglu and is quantized, as one kernel for Hopper: the bits
 * of cuBLASLt's product with fast accumulation and of swiglu.cu behind it.
 * Thread: any. */
#ifndef QE_CUDA_LINEAR_SWIGLU_H
#define QE_CUDA_LINEAR_SWIGLU_H

#include <cuda_runtime_api.h>

#include "backend/cuda/product_device.h"
#include "qeffect/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gets the kernel ready on the current device. Capture: forbidden.
 * On failure: QE_ERROR_UNSUPPORTED: this driver or device has not what it needs. */
qe_status qe_linear_swiglu_open(qe_product_device *own_out);
/* Is this op one of those that it computes? Touches no device. */
int qe_linear_swiglu_fits(const qe_args_linear *args);
/* Queues it. Requires: it fits. Capture: recorded. On failure: QE_ERROR_DEVICE. */
qe_status qe_linear_swiglu_run(const qe_product_device *own, const qe_args_linear *args, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
