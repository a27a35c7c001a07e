/* gemm.c - matrix products of one device: which algorithm each shape has, and running it. The workspace is the op's:
 * who plans products knows which of them may run at once. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/algorithm.h"
#include "backend/cuda/choices.h"
#include "backend/cuda/fused.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/product_kernels.h"
#include "backend/cuda/products.h"
#include "backend/cuda/tune.h"
#include "base/assert.h"

enum { IDENTITY_BYTES = 64, PLANS_FIRST = 16 };

QE_STATIC_ASSERT(sizeof(qe_algorithm) == sizeof((qe_cuda_choice *)0)->words, "an algorithm is a choice's words");
QE_STATIC_ASSERT(QE_PRODUCT_KEY_BYTES == sizeof((qe_cuda_choice *)0)->key, "keys fit");

typedef struct plan {
    qe_product product;
    qe_lt_problem problem;
    uint8_t loaded; /* its kernels are on the device, so that it may be captured */
} plan;

/* fp32 products are made here before they are rounded to bf16. */
typedef struct wide_block {
    struct wide_block *next;
    void *at;
    uint64_t bytes;
} wide_block;

struct qe_cuda_gemm {
    qe_solver solver;     /* its workspace is that of the product at hand */
    void *own;            /* workspace for ops that give none; NULL until there is one */
    qe_families families; /* whose candidates tuning tries */
    cudaStream_t stream;  /* the caller's, for tuning */
    qe_cuda_fused *fused; /* products with what is made of their results */
    wide_block *wide;    /* the largest first; smaller ones live on, because graphs may name them */
    plan *plans;         /* [count], choices [count] beside them */
    qe_cuda_choice *choices;
    uint32_t count, capacity;
    char identity[IDENTITY_BYTES];
};

/* --- life ------------------------------------------------------------------------------------------------------- */

static void identity_compose(char identity[IDENTITY_BYTES]) {
    const size_t version = cublasLtGetVersion();
    (void)snprintf(identity, IDENTITY_BYTES, "cuBLASLt %zu.%zu.%zu", version / 10000, version / 100 % 100,
                   version % 100);
}

qe_status qe_cuda_gemm_create(cudaStream_t aside, qe_cuda_gemm **gemm_out, qe_error *error_out) {
    qe_cuda_gemm *gemm = calloc(1, sizeof *gemm);
    if (!gemm) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for matrix products");
    const cublasStatus_t opened = cublasLtCreate(&gemm->solver.handle);
    if (opened != CUBLAS_STATUS_SUCCESS) {
        free(gemm);
        return qe_lt_error(opened, "opening the library", error_out);
    }
    gemm->stream = aside;
    identity_compose(gemm->identity);
    const qe_status status = qe_cuda_fused_create(aside, &gemm->fused, error_out);
    if (status != QE_OK)
        qe_cuda_gemm_destroy(gemm);
    else
        *gemm_out = gemm;
    return status;
}

void qe_cuda_gemm_keep(qe_cuda_gemm *gemm, uint32_t count) {
    for (; gemm->count > count; --gemm->count) qe_lt_problem_destroy(&gemm->plans[gemm->count - 1].problem);
}

void qe_cuda_gemm_destroy(qe_cuda_gemm *gemm) {
    if (!gemm) return;
    qe_cuda_gemm_keep(gemm, 0);
    for (wide_block *block = gemm->wide, *next; block; block = next) {
        next = block->next;
        (void)cudaFree(block->at);
        free(block);
    }
    (void)cudaFree(gemm->own);
    if (gemm->solver.handle) (void)cublasLtDestroy(gemm->solver.handle);
    qe_cuda_fused_destroy(gemm->fused);
    free(gemm->plans);
    free(gemm->choices);
    free(gemm);
}

void qe_cuda_gemm_lt_only(qe_cuda_gemm *gemm) { gemm->families = QE_FAMILIES_LT; }

qe_cuda_fused *qe_cuda_gemm_fused(const qe_cuda_gemm *gemm) { return gemm->fused; }

const char *qe_cuda_gemm_identity(const qe_cuda_gemm *gemm) { return gemm->identity; }

uint32_t qe_cuda_gemm_choices(const qe_cuda_gemm *gemm, const qe_cuda_choice **choices_out) {
    *choices_out = gemm->choices;
    return gemm->count;
}

/* --- plans ------------------------------------------------------------------------------------------------------ */

static plan *plan_find(const qe_cuda_gemm *gemm, const qe_product *product) {
    for (uint32_t i = 0; i < gemm->count; ++i)
        if (memcmp(&gemm->plans[i].product, product, sizeof *product) == 0) return &gemm->plans[i];
    return NULL;
}

static qe_cuda_choice *choice_of(const qe_cuda_gemm *gemm, const plan *p) {
    return &gemm->choices[p - gemm->plans];
}

static qe_status room_for_one(qe_cuda_gemm *gemm, qe_error *error_out) {
    if (gemm->count < gemm->capacity) return QE_OK;
    const uint32_t capacity = gemm->capacity ? 2 * gemm->capacity : PLANS_FIRST;
    plan *plans = realloc(gemm->plans, capacity * sizeof *plans);
    if (plans) gemm->plans = plans;
    qe_cuda_choice *choices = plans ? realloc(gemm->choices, capacity * sizeof *choices) : NULL;
    if (!choices) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for choices of algorithms");
    gemm->choices = choices;
    gemm->capacity = capacity;
    return QE_OK;
}

/* The caller has made room; the problem changes hands. */
static plan *plan_add(qe_cuda_gemm *gemm, const qe_product *product, const qe_lt_problem *problem,
                      const qe_algorithm *algorithm, uint64_t workspace_bytes) {
    QE_ASSERT(gemm->count < gemm->capacity);
    plan *p = &gemm->plans[gemm->count];
    qe_cuda_choice *choice = &gemm->choices[gemm->count++];
    *p = (plan){.product = *product, .problem = *problem};
    memset(choice, 0, sizeof *choice);
    qe_product_key(product, choice->key);
    memcpy(choice->words, algorithm->words, sizeof choice->words);
    choice->workspace_bytes = workspace_bytes;
    return p;
}

/* Index of the candidate to take: the fastest, or the heuristic's first. */
static qe_status pick(const qe_cuda_gemm *gemm, const qe_product *product, const qe_lt_problem *problem,
                      const qe_algorithm *candidates, uint32_t count, int tune, uint32_t *index_out,
                      qe_error *error_out) {
    *index_out = 0;
    if (!tune || count == 1) return QE_OK;
    const qe_tune request = {.solver = &gemm->solver, .product = product, .problem = problem, .candidates = candidates,
                             .count = count, .stream = gemm->stream};
    return qe_tune_best(&request, index_out, error_out);
}

static qe_status plan_choose(qe_cuda_gemm *gemm, const qe_product *product, int tune, qe_error *error_out) {
    qe_algorithm candidates[QE_ALGORITHMS_MAX];
    qe_lt_problem problem;
    uint32_t count, index = 0;
    uint64_t bytes;
    QE_TRY(room_for_one(gemm, error_out));
    QE_TRY(qe_lt_problem_create(product, &problem, error_out));
    qe_status status = qe_algorithm_candidates(&gemm->solver, product, &problem, gemm->families, candidates, &count,
                                               error_out);
    if (status == QE_OK) status = pick(gemm, product, &problem, candidates, count, tune, &index, error_out);
    if (status == QE_OK)
        status = qe_algorithm_check(&gemm->solver, product, &problem, &candidates[index], &bytes, error_out);
    if (status != QE_OK)
        qe_lt_problem_destroy(&problem);
    else
        (void)plan_add(gemm, product, &problem, &candidates[index], bytes);
    return status;
}

static qe_status plan_launch(const qe_cuda_gemm *gemm, plan *p, const qe_product_data *data, cudaStream_t stream,
                             qe_error *error_out) {
    qe_algorithm algorithm;
    memcpy(algorithm.words, choice_of(gemm, p)->words, sizeof algorithm.words);
    return qe_algorithm_launch(&gemm->solver, &p->product, &p->problem, data, &algorithm, stream, error_out);
}

/* Kernels are loaded when they are first used, which may not happen inside somebody's capture. So they are used here:
 * captured into a graph that never runs, on whatever addresses. */
static qe_status plan_load(const qe_cuda_gemm *gemm, plan *p, qe_error *error_out) {
    float *const anything = gemm->solver.workspace;
    const qe_product_data data = {anything, anything, anything, anything, anything, anything, 0.0f};
    cudaGraph_t graph = NULL;
    if (p->loaded) return QE_OK;
    cudaError_t device = cudaStreamBeginCapture(gemm->stream, cudaStreamCaptureModeRelaxed);
    if (device != cudaSuccess) return qe_cuda_failure(device, "loading a product's kernels", error_out);
    const qe_status status = plan_launch(gemm, p, &data, gemm->stream, error_out);
    device = cudaStreamEndCapture(gemm->stream, &graph);
    if (graph) (void)cudaGraphDestroy(graph);
    if (status != QE_OK) return status;
    if (device != cudaSuccess) return qe_cuda_failure(device, "loading a product's kernels", error_out);
    p->loaded = 1;
    return QE_OK;
}

/* Room for an fp32 product that will be rounded. */
static qe_status wide_grow(qe_cuda_gemm *gemm, const qe_product *product, qe_error *error_out) {
    const uint64_t bytes = sizeof(float) * product->m * product->n;
    if (product->first != QE_FORMAT_FP32 || product->kind == QE_OP_LINEAR_WEIGHT_GRAD) return QE_OK;
    if (gemm->wide && gemm->wide->bytes >= bytes) return QE_OK;
    wide_block *block = calloc(1, sizeof *block);
    if (!block) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a product's workspace");
    const cudaError_t device = cudaMalloc(&block->at, bytes);
    if (device != cudaSuccess) {
        free(block);
        return qe_cuda_taken(device, bytes, "an fp32 product before it is rounded", error_out);
    }
    block->bytes = bytes;
    block->next = gemm->wide;
    gemm->wide = block;
    return QE_OK;
}

static void *workspace_of(const qe_op *op) {
    switch (op->kind) {
        case QE_OP_LINEAR: return op->args.linear.workspace;
        case QE_OP_LINEAR_INPUT_GRAD: return op->args.linear_input_grad.workspace;
        default: return op->args.linear_weight_grad.workspace;
    }
}

/* What comes next works in the op's own; who gives none, as measurements do, is lent one. */
static qe_status workspace_take(qe_cuda_gemm *gemm, const qe_op *op, qe_error *error_out) {
    void *given = workspace_of(op);
    if (!given && !gemm->own) {
        const cudaError_t device = cudaMalloc(&gemm->own, QE_LT_WORKSPACE_BYTES);
        QE_TRY(qe_cuda_taken(device, QE_LT_WORKSPACE_BYTES, "workspace of matrix products", error_out));
    }
    gemm->solver.workspace = given ? given : gemm->own;
    return QE_OK;
}

qe_status qe_cuda_gemm_prepare(qe_cuda_gemm *gemm, const qe_op *op, int tune, qe_error *error_out) {
    qe_product product;
    QE_TRY(qe_product_of(op, &product, error_out));
    QE_TRY(workspace_take(gemm, op, error_out));
    QE_TRY(wide_grow(gemm, &product, error_out));
    if (!plan_find(gemm, &product)) QE_TRY(plan_choose(gemm, &product, tune, error_out));
    return plan_load(gemm, plan_find(gemm, &product), error_out);
}

qe_status qe_cuda_gemm_choose(qe_cuda_gemm *gemm, const qe_cuda_choice *choice, qe_error *error_out) {
    qe_product product;
    qe_lt_problem problem;
    qe_algorithm algorithm;
    uint64_t bytes;
    QE_TRY(qe_product_parse(choice->key, &product, error_out));
    const plan *chosen = plan_find(gemm, &product);
    if (chosen && memcmp(choice_of(gemm, chosen)->words, choice->words, sizeof choice->words) == 0) return QE_OK;
    if (chosen)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "read the file before anything is prepared",
                            "%s has another algorithm already", choice->key);
    QE_TRY(room_for_one(gemm, error_out));
    memcpy(algorithm.words, choice->words, sizeof algorithm.words);
    QE_TRY(qe_lt_problem_create(&product, &problem, error_out));
    const qe_status status = qe_algorithm_check(&gemm->solver, &product, &problem, &algorithm, &bytes, error_out);
    if (status != QE_OK)
        qe_lt_problem_destroy(&problem);
    else
        (void)plan_add(gemm, &product, &problem, &algorithm, bytes);
    return status;
}

/* --- runs ------------------------------------------------------------------------------------------------------- */

static qe_status prepared_late(qe_cuda_gemm *gemm, const qe_op *op, cudaStream_t stream, qe_error *error_out) {
    enum cudaStreamCaptureStatus capturing;
    if (cudaStreamIsCapturing(stream, &capturing) != cudaSuccess) return QE_ERROR_DEVICE;
    if (capturing != cudaStreamCaptureStatusNone)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "prepare it before the recording begins",
                            "a product without an algorithm while the stream is recorded");
    return qe_cuda_gemm_prepare(gemm, op, 0, error_out);
}

static qe_status retained_decode(const qe_op *op, cudaStream_t stream) {
    const qe_args_linear_weight_grad *args = &op->args.linear_weight_grad;
    if (op->kind != QE_OP_LINEAR_WEIGHT_GRAD || !qe_product_decodes(args)) return QE_OK;
    if (!args->scratch_x || !args->scratch_dy) return QE_ERROR_ARGUMENT;
    QE_TRY(qe_cuda_decode(&args->x, args->scratch_x, stream));
    return qe_cuda_decode(&args->dy, args->scratch_dy, stream);
}

static qe_status rounded_run(const qe_cuda_gemm *gemm, plan *p, const qe_product_data *data, cudaStream_t stream,
                             qe_error *error_out) {
    qe_product_data wide = *data;
    wide.result = gemm->wide->at;
    wide.added = gemm->wide->at;
    wide.beta = 0.0f;
    QE_TRY(plan_launch(gemm, p, &wide, stream, error_out));
    return qe_cuda_round(wide.result, data->beta != 0.0f ? data->added : NULL, data->result,
                         (uint64_t)p->product.m * p->product.n, stream);
}

qe_status qe_cuda_gemm_run(qe_cuda_gemm *gemm, const qe_op *op, cudaStream_t stream, qe_error *error_out) {
    qe_product product;
    qe_product_data data;
    QE_TRY(qe_product_of(op, &product, error_out));
    plan *p = plan_find(gemm, &product);
    if (!p || !p->loaded) {
        QE_TRY(prepared_late(gemm, op, stream, error_out));
        p = plan_find(gemm, &product);
    }
    QE_TRY(workspace_take(gemm, op, error_out));
    QE_TRY(retained_decode(op, stream));
    qe_product_data_of(op, &data);
    if (product.first == QE_FORMAT_FP32 && product.kind != QE_OP_LINEAR_WEIGHT_GRAD)
        return rounded_run(gemm, p, &data, stream, error_out);
    return plan_launch(gemm, p, &data, stream, error_out);
}
