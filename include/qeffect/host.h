/* host.h - the host backend: the reference for every op. Streams are threads; matrix products are OpenBLAS's, loaded
 * at run time; everything else is compiled for three instruction levels (portable, avx2, avx512) with the same bits,
 * and the highest that the processor has is chosen when a device is opened.
 *
 * Environment: OPENBLAS_CORETYPE chooses the BLAS kernels (default: SkylakeX or Haswell where the processor has what
 * they need, because OpenBLAS falls back to SSE3 on processors newer than itself). QE_HOST_LEVEL=portable|avx2|avx512
 * lowers the kernel level, never raises it. */
#ifndef QEFFECT_HOST_H
#define QEFFECT_HOST_H

#include "qeffect/backend.h"
#include "qeffect/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The table; immutable, valid for the life of the process.
 * open fails with QE_ERROR_UNSUPPORTED when OpenBLAS is missing or computes wrong products on this processor, and
 * with QE_ERROR_CONFIG when QE_HOST_LEVEL is not a level. The first open of a process loads OpenBLAS; it must not
 * run while another thread changes the environment. */
const qe_backend *qe_host_backend(void);

/* The transport that QE_OP_SEND and QE_OP_RECV of this device go through. Without one they fail with
 * QE_ERROR_UNSUPPORTED.
 * Requires: no stream of the device exists yet; `comm` outlives the device. Capture: forbidden. */
void qe_host_set_comm(qe_device *device, const qe_comm_ops *comm);

#ifdef __cplusplus
}
#endif
#endif
