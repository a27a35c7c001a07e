/* products.h - matrix products (cuBLASLt, CUTLASS, ours) and attention (cuDNN, ours): what needs a library, a choice of
 * algorithm and workspace. Choices are made once per shape, in `prepare`, and are state: docs/numerics.md.
 * Thread: one at a time per object. */
#ifndef QE_CUDA_PRODUCTS_H
#define QE_CUDA_PRODUCTS_H

#include <cuda_runtime_api.h>
#include "qeffect/op.h"
#include "qeffect/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What lowers how much of the device's memory is needed. */
#define QE_CUDA_LESS_MEMORY \
    "lower train.sequences, model.sequence or model.layers, have fewer microbatches live (pipeline.schedule=auto and " \
    "pipeline.memory_limit), or use another GPU"
/* The runtime's words; of cudaSuccess, that somebody else refused and does not say why. */
const char *qe_cuda_why(cudaError_t code);
/* Those words for a failed call: QE_ERROR_MEMORY or QE_ERROR_DEVICE. Takes the error back from the runtime. */
qe_status qe_cuda_failure(cudaError_t status, const char *what, qe_error *error_out);
/* device.c: how an allocation of memory of the device, or page-locked of the host, ended; cudaSuccess is QE_OK.
 * Where memory is short: how much was needed, how much there is, and what lowers it. what: NULL: no words. */
qe_status qe_cuda_taken(cudaError_t code, uint64_t bytes, const char *what, qe_error *error_out);
qe_status qe_cuda_host_taken(cudaError_t code, uint64_t bytes, qe_error *error_out);
/* Why a kernel of ours for a product or attention was not queued: what the runtime said last, or where it said nothing
 * what the launcher's status stands for; and the way out. */
qe_status qe_cuda_own_refused(qe_status status, cudaError_t last, const char *kernel, qe_error *error_out);

/* Products of one device. QE_OP_LINEAR: y = x w' (+ residual, C != D). QE_OP_LINEAR_INPUT_GRAD: dx = dy w.
 * QE_OP_LINEAR_WEIGHT_GRAD: grad (+)= dy' x into fp32 (retained codes of block scaling are decoded first).
 * 8-bit operands run as TN with scale pointers on the device; bf16 and fp32 operands in whatever form they lie. */
typedef struct qe_cuda_gemm qe_cuda_gemm;

/* One choice, in a form that can be kept in a file and honoured or refused later. */
typedef struct qe_cuda_choice {
    char key[96];      /* kind, shape, formats, accumulation, beta: "linear m2048 n6144 k4096 e4m3 e4m3 fast" */
    uint64_t words[8]; /* qe_algorithm: cublasLtMatmulAlgo_t, or a kernel of further.h */
    uint64_t workspace_bytes;
} qe_cuda_choice;

/* `aside`: the caller's stream that tuning may use, and wait for; it outlives what is created here. A stream of its own
 * would take one of the few connections that a GPU has (world.c). */
qe_status qe_cuda_gemm_create(cudaStream_t aside, qe_cuda_gemm **gemm_out, qe_error *error_out);
void qe_cuda_gemm_destroy(qe_cuda_gemm *gemm);
/* Chooses the algorithm for an op's shape where none is chosen yet: every candidate of the heuristic is timed on random
 * data (tune = 1), or the first is taken (tune = 0). Grows the workspace. Capture: forbidden. */
qe_status qe_cuda_gemm_prepare(qe_cuda_gemm *gemm, const qe_op *op, int tune, qe_error *error_out);
/* Requires: prepared (else the first candidate is taken, which may not happen while the stream is captured). */
qe_status qe_cuda_gemm_run(qe_cuda_gemm *gemm, const qe_op *op, cudaStream_t stream, qe_error *error_out);
uint32_t qe_cuda_gemm_choices(const qe_cuda_gemm *gemm, const qe_cuda_choice **choices_out);
/* Takes a choice from a file. On failure: QE_ERROR_UNSUPPORTED when this library and device refuse it. */
qe_status qe_cuda_gemm_choose(qe_cuda_gemm *gemm, const qe_cuda_choice *choice, qe_error *error_out);
/* Tuning tries cuBLASLt's candidates alone from now on: to compare the two. */
void qe_cuda_gemm_lt_only(qe_cuda_gemm *gemm);
/* "cuBLASLt 13.1.0" */
const char *qe_cuda_gemm_identity(const qe_cuda_gemm *gemm);

/* Causal grouped-query attention, forward and backward, through cuDNN (loaded at run time) or ours (attention_own.h):
 * a choice per shape. */
typedef struct qe_cuda_attention qe_cuda_attention;

/* `aside`: as of products. On failure: QE_ERROR_UNSUPPORTED where cuDNN is missing or too old: says what to install. */
qe_status qe_cuda_attention_create(cudaStream_t aside, qe_cuda_attention **attention_out, qe_error *error_out);
void qe_cuda_attention_destroy(qe_cuda_attention *attention);
/* QE_OP_ATTENTION or QE_OP_ATTENTION_BACKWARD: builds the plan for its shape, grows the workspace. What has no
 * algorithm yet gets the fastest on random data (tune = 1); else ours where it takes the shape and the order of sums is
 * fixed, and cuDNN's where not. Capture: forbidden. */
qe_status qe_cuda_attention_prepare(qe_cuda_attention *attention, const qe_op *op, int tune, qe_error *error_out);
qe_status qe_cuda_attention_run(qe_cuda_attention *attention, const qe_op *op, cudaStream_t stream,
                                qe_error *error_out);
/* Of all its workspaces. */
uint64_t qe_cuda_attention_bytes(const qe_cuda_attention *attention);
uint32_t qe_cuda_attention_choices(const qe_cuda_attention *attention, const qe_cuda_choice **choices_out);
/* Takes a choice from a file. On failure: QE_ERROR_UNSUPPORTED when this build, library or device refuse it. */
qe_status qe_cuda_attention_choose(qe_cuda_attention *attention, const qe_cuda_choice *choice, qe_error *error_out);
const char *qe_cuda_attention_identity(const qe_cuda_attention *attention);

/* A file of choices, a line each, with the library's version and the device's name; the rest of a line is the choice.
 * read: every line is honoured or the call is refused (QE_ERROR_CONFIG with the line, QE_ERROR_UNSUPPORTED). write:
 * beside, then renamed. */
qe_status qe_cuda_choices_read(qe_cuda_gemm *gemm, qe_cuda_attention *attention, const char *path,
                               qe_error *error_out);
qe_status qe_cuda_choices_write(const qe_cuda_gemm *gemm, const qe_cuda_attention *attention, const char *path,
                                qe_error *error_out);

#ifdef __cplusplus
}
#endif
#endif
