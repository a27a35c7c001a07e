/* attention_own.h - causal attention of our own, forward and backward, for Hopper and heads of 64 or 128 elements: its
 * bits do not depend on the order in which blocks are done. README.md says how and what it costs in accuracy.
 * Thread: any; an object is read only once it is made. */
#ifndef QE_CUDA_ATTENTION_OWN_H
#define QE_CUDA_ATTENTION_OWN_H

#include <cuda_runtime_api.h>

#include "qeffect/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What launches need to know; made once per process and device. */
typedef struct qe_attention_own {
    void *encode; /* the driver's cuTensorMapEncodeTiled; NULL: there is none */
    uint32_t multiprocessors;
} qe_attention_own;

/* Gets the kernels ready on the current device. Capture: forbidden.
 * On failure: QE_ERROR_UNSUPPORTED: this driver or device has not what they need. */
qe_status qe_attention_own_open(qe_attention_own *own_out);
/* Is this shape one of those that it computes? Touches no device. */
int qe_attention_own_takes(const qe_args_attention_backward *args);
/* Bytes of device memory that one run of this shape needs, aligned to 256. Requires: it is taken. */
uint64_t qe_attention_own_bytes(const qe_args_attention_backward *args);
/* Queues it. Requires: it is taken; `workspace` has so many bytes and nothing else uses them meanwhile.
 * Capture: recorded. On failure: QE_ERROR_ARGUMENT: an address that is no multiple of 16; QE_ERROR_DEVICE. */
qe_status qe_attention_own_run(const qe_attention_own *own, const qe_args_attention_backward *args, void *workspace,
                               cudaStream_t stream);

/* The same of forward, which needs no workspace. Its target is filled as QE_OP_QUANTIZE fills it.
 * On failure: as above, and what quantizing may return. */
int qe_attention_forward_takes(const qe_args_attention *args);
/* Does its kernel make the target's codes, too? Else quantizing is a kernel behind it: the same bits. Depends on the
 * shape, the target, and whose bytes overlap. Touches no device. Requires: it is taken. */
int qe_attention_forward_quantizes(const qe_args_attention *args);
qe_status qe_attention_forward_run(const qe_attention_own *own, const qe_args_attention *args, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
