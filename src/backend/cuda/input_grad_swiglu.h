/* input_grad_swiglu.h - an input gradient that goes back through swiglu and is quantized, as one kernel for Hopper: the
 * bits of cuBLASLt's product with split accumulation and of swiglu.cu's backward behind it.
 * Thread: any. */
#ifndef QE_CUDA_INPUT_GRAD_SWIGLU_H
#define QE_CUDA_INPUT_GRAD_SWIGLU_H

#include <cuda_runtime_api.h>

#include "backend/cuda/product_device.h"
#include "qeffect/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gets the kernels ready on the current device. Capture: forbidden.
 * On failure: QE_ERROR_UNSUPPORTED: this driver or device has not what they need. */
qe_status qe_input_grad_swiglu_open(qe_product_device *own_out);
/* Is this op one of those that they compute? Touches no device. */
int qe_input_grad_swiglu_fits(const qe_args_linear_input_grad *args);
/* Queues it; dx and dgate_up are not written. Requires: it fits. Capture: recorded. On failure: QE_ERROR_DEVICE. */
qe_status qe_input_grad_swiglu_run(const qe_product_device *own, const qe_args_linear_input_grad *args,
                                   cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
