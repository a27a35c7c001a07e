/* cuda.h - the cuda backend: one Hopper GPU per rank (or one for several), streams, events and CUDA graphs behind the
 * tables of backend.h; cuBLASLt, CUTLASS or ours for products, cuDNN or ours for attention, own fused kernels for
 * the rest. Activations are bf16, operands are FP8 codes by rows and transposed (QE_OPERANDS_CODES).
 *
 * Built only with -DQE_CUDA=ON. Environment: QE_CUDNN names libcudnn.so.9 where the loader does not find it. */
#ifndef QEFFECT_CUDA_H
#define QEFFECT_CUDA_H

#include "qeffect/backend.h"
#include "qeffect/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The table; immutable, valid for the life of the process.
 * open fails with QE_ERROR_UNSUPPORTED where there is no GPU, one without FP8 (below compute capability 9.0), a driver
 * older than the runtime, or no cuDNN; the message says which, and the way out. */
const qe_backend *qe_cuda_backend(void);

/* How a device chooses and what it does beside the work. Before its first stream. */
typedef struct qe_cuda_options {
    int tune;                  /* 1: what has a choice is timed once per shape, products, attention and ops of two
                                  parts; 0 (the default): none is, and products take the library's first choice */
    const char *choices_path;  /* NULL, or a file of choices: read where it is there; what is chosen beyond it is timed
                                  and added to it. Devices of one run share one file, so they choose alike. */
    int honour;                /* 1: the file must be there, and a shape that it does not name is refused */
    const char *timeline_path; /* NULL, or where a Chrome timeline of the last ops and graphs goes at the close */
    uint64_t delay_max_ns;     /* > 0: up to so much is waited before every op, pseudo-randomly: tests of ordering */
    uint64_t delay_seed;
    int watch;                 /* 1: what streams are really given is judged (order.h) */
    int nvtx;                  /* 1: an NVTX range around every op that is submitted */
} qe_cuda_options;

/* Requires: no op was prepared yet; choices_path outlives the device. On failure: QE_ERROR_IO, QE_ERROR_CONFIG (a line
 * of the file), QE_ERROR_UNSUPPORTED (a choice that this library and device refuse). Capture: forbidden. */
qe_status qe_cuda_configure(qe_device *device, const qe_cuda_options *options, qe_error *error_out);

/* Bytes of device memory that are free and that there are; bytes that this device object has taken, and in how many
 * calls; what went away while ops were prepared: code of kernels, which the driver loads when they are first used and
 * keeps whatever the model, and attention's workspace. */
typedef struct qe_cuda_memory {
    uint64_t free_bytes, total_bytes, taken_bytes, allocations, code_bytes, attention_bytes;
} qe_cuda_memory;
qe_cuda_memory qe_cuda_memory_of(qe_device *device);

/* What the device runs at now, as the driver's management library tells. 0: it does not, *clocks_out stays. The first
 * call opens that library; a later one takes some tens of microseconds. Thread: the device's. Capture: allowed. */
typedef struct qe_cuda_clocks {
    uint32_t sm_mhz, memory_mhz, temperature_c;
    double power_w;
} qe_cuda_clocks;
int qe_cuda_clocks_of(qe_device *device, qe_cuda_clocks *clocks_out);

/* The in-process transport between ranks on GPUs: a message is a device-to-device copy through a mailbox, ordered by
 * flags in device memory, so that it may be captured. Meetings are the local transport's. */
qe_status qe_cuda_world_create(uint32_t ranks, qe_world **world_out, qe_error *error_out);
void qe_cuda_world_destroy(qe_world *world);
const qe_comm_ops *qe_cuda_comm(void);

#ifdef __cplusplus
}
#endif
#endif
