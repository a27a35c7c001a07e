/* lt.h - one product as cuBLASLt wants it: descriptors, candidates, one run. cuBLASLt's matrices are column-major, so
 * it is asked for the transpose: its A is our second operand, its B our first, its m our n.
 * Thread: one at a time per object. */
#ifndef QE_CUDA_LT_H
#define QE_CUDA_LT_H

#include <cublasLt.h>

#include "backend/cuda/product.h"
#include "qeffect/limits.h"

enum {
    QE_LT_CANDIDATES_MAX = 64,       /* the heuristic knows some ten to forty per shape */
    QE_LT_WORKSPACE_BYTES = 64 << 20 /* twice what NVIDIA recommends for Hopper; never grows, so graphs hold on */
};

typedef struct qe_lt_problem {
    cublasLtMatmulDesc_t description;
    cublasLtMatrixLayout_t a, b, d; /* what is added lies as the result */
} qe_lt_problem;

typedef struct qe_lt_run {
    const cublasLtMatmulAlgo_t *algorithm;
    void *workspace; /* [QE_LT_WORKSPACE_BYTES] */
    cudaStream_t stream;
} qe_lt_run;

/* Ensures: on failure *problem_out holds nothing. Owns: the caller destroys the problem. */
qe_status qe_lt_problem_create(const qe_product *product, qe_lt_problem *problem_out, qe_error *error_out);
void qe_lt_problem_destroy(qe_lt_problem *problem);
/* The heuristic's candidates, best guess first, without those whose bits depend on the order in which blocks finish.
 * On failure: QE_ERROR_UNSUPPORTED when there is none. */
qe_status qe_lt_candidates(cublasLtHandle_t handle, const qe_product *product, const qe_lt_problem *problem,
                           cublasLtMatmulAlgo_t candidates_out[QE_LT_CANDIDATES_MAX], uint32_t *count_out,
                           qe_error *error_out);
/* Does this library on this device take the algorithm? On failure: QE_ERROR_UNSUPPORTED with cuBLASLt's words. */
qe_status qe_lt_check(cublasLtHandle_t handle, const qe_lt_problem *problem, const cublasLtMatmulAlgo_t *algorithm,
                      uint64_t *workspace_bytes_out, qe_error *error_out);
/* Queues it. Capture: recorded. */
cublasStatus_t qe_lt_launch(cublasLtHandle_t handle, const qe_product *product, const qe_lt_problem *problem,
                            const qe_product_data *data, const qe_lt_run *run);
/* cuBLASLt's words for a failed call. */
qe_status qe_lt_error(cublasStatus_t status, const char *what, qe_error *error_out);

#endif
