/* algorithm.h - the algorithms that a product can have, whoever made them: cuBLASLt's, ours, CUTLASS's where
 * the build has them.
 * Thread: one at a time per object. */
#ifndef QE_CUDA_ALGORITHM_H
#define QE_CUDA_ALGORITHM_H

#include "backend/cuda/further.h"
#include "backend/cuda/lt.h"

enum { QE_ALGORITHMS_MAX = QE_LT_CANDIDATES_MAX + QE_FURTHER_CANDIDATES_MAX };

typedef enum qe_families { QE_FAMILIES_ALL, QE_FAMILIES_LT } qe_families;

/* What they are launched with. */
typedef struct qe_solver {
    cublasLtHandle_t handle;
    void *workspace; /* [QE_LT_WORKSPACE_BYTES] */
    qe_further further;
} qe_solver;

/* cuBLASLt's best guess first, the others last and ready to launch. Capture: forbidden.
 * On failure: QE_ERROR_UNSUPPORTED when there is none. */
qe_status qe_algorithm_candidates(qe_solver *solver, const qe_product *product, const qe_lt_problem *problem,
                                  qe_families families, qe_algorithm candidates_out[QE_ALGORITHMS_MAX],
                                  uint32_t *count_out, qe_error *error_out);
/* Does this build on this device take the algorithm? Gets it ready. Capture: forbidden.
 * On failure: QE_ERROR_UNSUPPORTED in words. */
qe_status qe_algorithm_check(qe_solver *solver, const qe_product *product, const qe_lt_problem *problem,
                             const qe_algorithm *algorithm, uint64_t *workspace_bytes_out, qe_error *error_out);
/* Queues it. Requires: checked, or a candidate. Capture: recorded. */
qe_status qe_algorithm_launch(const qe_solver *solver, const qe_product *product, const qe_lt_problem *problem,
                              const qe_product_data *data, const qe_algorithm *algorithm, cudaStream_t stream,
                              qe_error *error_out);

#endif
