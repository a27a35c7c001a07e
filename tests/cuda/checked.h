/* checked.h - what device.c says of the runtime's answers, for a test that has parts of this room without it. Included
 * once in a program. */
#ifndef QE_CUDA_CHECKED_H
#define QE_CUDA_CHECKED_H

#include "backend/cuda/device.h"

qe_status qe_cuda_check(cudaError_t code, const char *what, qe_error *error_out) {
    return code == cudaSuccess ? QE_OK : qe_error_set(error_out, QE_ERROR_DEVICE, NULL, "%s", what);
}
qe_status qe_cuda_taken(cudaError_t code, uint64_t bytes, const char *what, qe_error *error_out) {
    return (void)bytes, qe_cuda_check(code, what, error_out);
}
qe_status qe_cuda_host_taken(cudaError_t code, uint64_t bytes, qe_error *error_out) {
    return (void)bytes, qe_cuda_check(code, "memory of the host", error_out);
}

#endif
