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

/* Loads, or gives what an earlier call loaded (or why that failed), for one more caller whose products may run at the
 * same time as those of the others.
 * On failure: QE_ERROR_UNSUPPORTED, or QE_ERROR_MEMORY where one more would wait for memory for ever. Owns: the process
 * keeps the library; the caller leaves when it is done. Thread: any. */
qe_status qe_host_blas_join(const host_blas **blas_out, qe_error *error_out);
void qe_host_blas_leave(void);

#endif
