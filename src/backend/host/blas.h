/* blas.h - OpenBLAS, loaded once per process after its kernels were chosen. */
#ifndef QE_HOST_BLAS_H
#define QE_HOST_BLAS_H

#include "backend/host/kernels.h"
#include "qeffect/status.h"

enum { HOST_BLAS_NAME_BYTES = 64 };

typedef struct host_blas {
    host_sgemm *sgemm;
    char name[HOST_BLAS_NAME_BYTES]; /* "openblas 0.3.21 SkylakeX" */
} host_blas;

/* Loads, or gives what an earlier call loaded (or why that failed).
 * On failure: QE_ERROR_UNSUPPORTED. Owns: the process. Thread: any. */
qe_status qe_host_blas_load(const host_blas **blas_out, qe_error *error_out);

#endif
