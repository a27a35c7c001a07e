/* lt.c - see lt.h. */
#include "backend/cuda/lt.h"
#include "backend/cuda/products.h"

#include <string.h>

#include "base/assert.h"

/* Everything in qe_product_data is aligned as every placement is. */
static const uint32_t ALIGN_BYTES = QE_ALIGN_BYTES;
/* Partial sums of a split k are kept in fp32 and added by a kernel of their own, in order. The other schemes are
 * refused: in place, blocks add in the order in which they finish; in the output's type, partial sums are rounded. */
static const uint32_t REDUCTION_SCHEMES = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

static const char REMEDY_MEMORY[] = QE_CUDA_LESS_MEMORY "; tuning needs memory too, and none with a file of choices "
                                    "(train.algorithms)";

qe_status qe_lt_error(cublasStatus_t status, const char *what, qe_error *error_out) {
    const qe_status ours = status == CUBLAS_STATUS_ALLOC_FAILED     ? QE_ERROR_MEMORY
                           : status == CUBLAS_STATUS_NOT_SUPPORTED ? QE_ERROR_UNSUPPORTED
                           : status == CUBLAS_STATUS_ARCH_MISMATCH ? QE_ERROR_UNSUPPORTED
                                                                   : QE_ERROR_DEVICE;
    return qe_error_set(error_out, ours, ours == QE_ERROR_MEMORY ? REMEDY_MEMORY : NULL, "cuBLASLt: %s: %s", what,
                        cublasLtGetStatusString(status));
}

const char *qe_cuda_why(cudaError_t code) {
    return code == cudaSuccess ? "it was refused, and the runtime does not say why" : cudaGetErrorString(code);
}

qe_status qe_cuda_failure(cudaError_t status, const char *what, qe_error *error_out) {
    const int is_memory = status == cudaErrorMemoryAllocation;
    (void)cudaGetLastError();
    return qe_error_set(error_out, is_memory ? QE_ERROR_MEMORY : QE_ERROR_DEVICE, is_memory ? REMEDY_MEMORY : NULL,
                        "%s: %s", what, qe_cuda_why(status));
}

static cudaDataType_t type_of(qe_format format) {
    switch (format) {
        case QE_FORMAT_E4M3: return CUDA_R_8F_E4M3;
        case QE_FORMAT_E5M2: return CUDA_R_8F_E5M2;
        case QE_FORMAT_BF16: return CUDA_R_16BF;
        case QE_FORMAT_FP32: return CUDA_R_32F;
    }
    return CUDA_R_32F;
}

static int is_code(uint8_t format) { return format == QE_FORMAT_E4M3 || format == QE_FORMAT_E5M2; }

static cublasStatus_t set_attribute(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute,
                                    const void *value, size_t bytes) {
    return cublasLtMatmulDescSetAttribute(description, attribute, value, bytes);
}

static cublasStatus_t description_create(const qe_product *product, cublasLtMatmulDesc_t *description_out) {
    const cublasOperation_t turn_a = product->second_along ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t turn_b = product->first_along ? CUBLAS_OP_N : CUBLAS_OP_T;
    const int8_t fast = is_code(product->first) && product->accumulation == QE_ACCUMULATE_FAST;
    /* pedantic: neither TF32 nor emulation, whatever the environment asks for */
    const cublasComputeType_t compute =
        product->first == QE_FORMAT_FP32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
    cublasLtMatmulDesc_t description;
    cublasStatus_t status = cublasLtMatmulDescCreate(&description, compute, CUDA_R_32F);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    status = set_attribute(description, CUBLASLT_MATMUL_DESC_TRANSA, &turn_a, sizeof turn_a);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = set_attribute(description, CUBLASLT_MATMUL_DESC_TRANSB, &turn_b, sizeof turn_b);
    if (status == CUBLAS_STATUS_SUCCESS && is_code(product->first))
        status = set_attribute(description, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast);
    if (status != CUBLAS_STATUS_SUCCESS) {
        (void)cublasLtMatmulDescDestroy(description);
        return status;
    }
    *description_out = description;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t layouts_create(const qe_product *product, qe_lt_problem *problem) {
    const uint64_t m = product->n, n = product->m, k = product->k; /* cuBLASLt's words */
    const cudaDataType_t a = type_of((qe_format)product->second), b = type_of((qe_format)product->first);
    const uint64_t a_rows = product->second_along ? k : m, a_columns = product->second_along ? m : k;
    const uint64_t b_rows = product->first_along ? k : n, b_columns = product->first_along ? n : k;
    cublasStatus_t status = cublasLtMatrixLayoutCreate(&problem->a, a, a_rows, a_columns, (int64_t)a_rows);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatrixLayoutCreate(&problem->b, b, b_rows, b_columns, (int64_t)b_rows);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatrixLayoutCreate(&problem->d, type_of(qe_product_result(product)), m, n, (int64_t)m);
    return status;
}

qe_status qe_lt_problem_create(const qe_product *product, qe_lt_problem *problem_out, qe_error *error_out) {
    qe_lt_problem problem = {0};
    cublasStatus_t status = description_create(product, &problem.description);
    if (status == CUBLAS_STATUS_SUCCESS) status = layouts_create(product, &problem);
    if (status != CUBLAS_STATUS_SUCCESS) {
        qe_lt_problem_destroy(&problem);
        return qe_lt_error(status, "describing a product", error_out);
    }
    *problem_out = problem;
    return QE_OK;
}

void qe_lt_problem_destroy(qe_lt_problem *problem) {
    if (problem->d) (void)cublasLtMatrixLayoutDestroy(problem->d);
    if (problem->b) (void)cublasLtMatrixLayoutDestroy(problem->b);
    if (problem->a) (void)cublasLtMatrixLayoutDestroy(problem->a);
    if (problem->description) (void)cublasLtMatmulDescDestroy(problem->description);
    memset(problem, 0, sizeof *problem);
}

static cublasStatus_t preference_fill(cublasLtMatmulPreference_t preference) {
    static const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const uint64_t bytes = QE_LT_WORKSPACE_BYTES;
    cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                                 &bytes, sizeof bytes);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                      &REDUCTION_SCHEMES, sizeof REDUCTION_SCHEMES);
    for (size_t i = 0; i < sizeof alignments / sizeof alignments[0] && status == CUBLAS_STATUS_SUCCESS; ++i)
        status = cublasLtMatmulPreferenceSetAttribute(preference, alignments[i], &ALIGN_BYTES, sizeof ALIGN_BYTES);
    return status;
}

/* An algorithm that cannot say splits nothing; tuning compares the bits of two runs as well. */
static int same_bits(const cublasLtMatmulAlgo_t *algorithm) {
    uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
    size_t written = 0;
    if (cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme,
                                             &written) != CUBLAS_STATUS_SUCCESS)
        return 1;
    return scheme == CUBLASLT_REDUCTION_SCHEME_NONE || scheme == REDUCTION_SCHEMES;
}

static cublasStatus_t heuristic(cublasLtHandle_t handle, const qe_lt_problem *problem,
                                cublasLtMatmulHeuristicResult_t *results, int *count_out) {
    cublasLtMatmulPreference_t preference;
    cublasStatus_t status = cublasLtMatmulPreferenceCreate(&preference);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    status = preference_fill(preference);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulAlgoGetHeuristic(handle, problem->description, problem->a, problem->b, problem->d,
                                                problem->d, preference, QE_LT_CANDIDATES_MAX, results, count_out);
    (void)cublasLtMatmulPreferenceDestroy(preference);
    return status;
}

qe_status qe_lt_candidates(cublasLtHandle_t handle, const qe_product *product, const qe_lt_problem *problem,
                           cublasLtMatmulAlgo_t candidates_out[QE_LT_CANDIDATES_MAX], uint32_t *count_out,
                           qe_error *error_out) {
    cublasLtMatmulHeuristicResult_t results[QE_LT_CANDIDATES_MAX];
    char key[QE_PRODUCT_KEY_BYTES];
    int found = 0;
    uint32_t count = 0;
    const cublasStatus_t status = heuristic(handle, problem, results, &found);
    if (status != CUBLAS_STATUS_SUCCESS && status != CUBLAS_STATUS_NOT_SUPPORTED)
        return qe_lt_error(status, "asking for algorithms", error_out);
    for (int i = 0; i < found; ++i)
        if (results[i].state == CUBLAS_STATUS_SUCCESS && results[i].workspaceSize <= QE_LT_WORKSPACE_BYTES &&
            same_bits(&results[i].algo))
            candidates_out[count++] = results[i].algo;
    qe_product_key(product, key);
    if (count == 0)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                            "8-bit products need compute capability 8.9 or newer; the recipes bf16 and fp32 do not",
                            "cuBLASLt has no reproducible algorithm for %s (%d found)", key, found);
    *count_out = count;
    return QE_OK;
}

qe_status qe_lt_check(cublasLtHandle_t handle, const qe_lt_problem *problem, const cublasLtMatmulAlgo_t *algorithm,
                      uint64_t *workspace_bytes_out, qe_error *error_out) {
    static const char *const remedy = "choose anew on this machine: leave the file of choices out";
    cublasLtMatmulHeuristicResult_t result = {0};
    const cublasStatus_t status = cublasLtMatmulAlgoCheck(handle, problem->description, problem->a, problem->b,
                                                          problem->d, problem->d, algorithm, &result);
    if (status != CUBLAS_STATUS_SUCCESS || result.state != CUBLAS_STATUS_SUCCESS)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, remedy, "cuBLASLt refuses the algorithm: %s",
                            cublasLtGetStatusString(status != CUBLAS_STATUS_SUCCESS ? status : result.state));
    if (result.workspaceSize > QE_LT_WORKSPACE_BYTES)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, remedy, "the algorithm wants %zu bytes of workspace, at "
                            "most %d are given", result.workspaceSize, QE_LT_WORKSPACE_BYTES);
    if (!same_bits(algorithm))
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, remedy, "the algorithm's bits depend on timing");
    *workspace_bytes_out = result.workspaceSize;
    return QE_OK;
}

cublasStatus_t qe_lt_launch(cublasLtHandle_t handle, const qe_product *product, const qe_lt_problem *problem,
                            const qe_product_data *data, const qe_lt_run *run) {
    const float alpha = 1.0f;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (is_code(product->first)) {
        status = set_attribute(problem->description, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &data->second_scale,
                               sizeof data->second_scale);
        if (status == CUBLAS_STATUS_SUCCESS)
            status = set_attribute(problem->description, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &data->first_scale,
                                   sizeof data->first_scale);
    }
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return cublasLtMatmul(handle, problem->description, &alpha, data->second, problem->a, data->first, problem->b,
                          &data->beta, data->added, problem->d, data->result, problem->d, run->algorithm,
                          run->workspace, QE_LT_WORKSPACE_BYTES, run->stream);
}
