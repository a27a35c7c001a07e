/* algorithm.c - see algorithm.h. */
#include "backend/cuda/algorithm.h"
#include "backend/cuda/products.h"

#include <string.h>

#include "base/assert.h"

QE_STATIC_ASSERT(sizeof(cublasLtMatmulAlgo_t) == sizeof(qe_algorithm), "an algorithm is eight words");

static cublasLtMatmulAlgo_t lt_of(const qe_algorithm *algorithm) {
    cublasLtMatmulAlgo_t lt;
    memcpy(&lt, algorithm->words, sizeof lt);
    return lt;
}

/* What this device cannot run is left out. */
static uint32_t further_append(qe_solver *solver, const qe_product *product, qe_algorithm *candidates) {
    qe_algorithm found[QE_FURTHER_CANDIDATES_MAX];
    const uint32_t count = qe_further_candidates(product, found);
    uint32_t taken = 0;
    for (uint32_t i = 0; i < count; ++i)
        if (qe_further_prepare(&solver->further, product, &found[i], NULL) == QE_OK) candidates[taken++] = found[i];
    return taken;
}

qe_status qe_algorithm_candidates(qe_solver *solver, const qe_product *product, const qe_lt_problem *problem,
                                  qe_families families, qe_algorithm candidates_out[QE_ALGORITHMS_MAX],
                                  uint32_t *count_out, qe_error *error_out) {
    cublasLtMatmulAlgo_t lt[QE_LT_CANDIDATES_MAX];
    uint32_t count = 0;
    const qe_status status = qe_lt_candidates(solver->handle, product, problem, lt, &count, error_out);
    if (status != QE_OK && status != QE_ERROR_UNSUPPORTED) return status;
    memcpy(candidates_out, lt, count * sizeof *lt);
    if (families == QE_FAMILIES_ALL) count += further_append(solver, product, candidates_out + count);
    if (count == 0) return status;
    *count_out = count;
    return QE_OK;
}

qe_status qe_algorithm_check(qe_solver *solver, const qe_product *product, const qe_lt_problem *problem,
                             const qe_algorithm *algorithm, uint64_t *workspace_bytes_out, qe_error *error_out) {
    if (qe_further_owns(algorithm)) {
        *workspace_bytes_out = 0;
        return qe_further_prepare(&solver->further, product, algorithm, error_out);
    }
    const cublasLtMatmulAlgo_t lt = lt_of(algorithm);
    return qe_lt_check(solver->handle, problem, &lt, workspace_bytes_out, error_out);
}

qe_status qe_cuda_own_refused(qe_status status, cudaError_t last, const char *kernel, qe_error *error_out) {
    if (last != cudaSuccess) return qe_cuda_failure(last, kernel, error_out);
    if (status == QE_ERROR_LIMIT)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "use fewer tokens in a microbatch, or smaller sizes",
                            "%s: it needs more blocks than a launch may have", kernel);
    if (status == QE_ERROR_ARGUMENT)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "have what is added lie where the result goes",
                            "%s: it adds nothing that lies elsewhere", kernel);
    return qe_error_set(error_out, QE_ERROR_DEVICE,
                        "have another algorithm chosen: leave the file of choices out, or train.algorithms empty",
                        "%s: the driver cannot tell the copy engine where its operands lie", kernel);
}

qe_status qe_algorithm_launch(const qe_solver *solver, const qe_product *product, const qe_lt_problem *problem,
                              const qe_product_data *data, const qe_algorithm *algorithm, cudaStream_t stream,
                              qe_error *error_out) {
    if (qe_further_owns(algorithm)) {
        char name[QE_FURTHER_NAME_BYTES];
        const qe_status status = qe_further_launch(&solver->further, product, data, algorithm, stream);
        if (status == QE_OK) return QE_OK;
        qe_further_name(algorithm, name);
        return qe_cuda_own_refused(status, cudaGetLastError(), name, error_out);
    }
    const cublasLtMatmulAlgo_t lt = lt_of(algorithm);
    const qe_lt_run run = {&lt, solver->workspace, stream};
    const cublasStatus_t status = qe_lt_launch(solver->handle, product, problem, data, &run);
    return status == CUBLAS_STATUS_SUCCESS ? QE_OK : qe_lt_error(status, "launching a product", error_out);
}
