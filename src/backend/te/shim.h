/* shim.h - what is used of Transformer Engine's C API, with a face that C can hold: headers that are C++, structs by
 * value and exceptions stay in shim.cpp. Every function that reports a status catches all that is thrown.
 * On failure: QE_ERROR_DEVICE with Transformer Engine's own words; nothing of ours was changed. It throws while it
 *             looks at its arguments, or when a launch was refused.
 * Capture:    recorded; nothing is allocated on the device.
 * Thread:     any; Transformer Engine keeps a handle of cuBLASLt for each (qe_te_thread_enter). */
#ifndef QE_TE_SHIM_H
#define QE_TE_SHIM_H

#include "qeffect/op.h"
#include "qeffect/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qe_te_library qe_te_library;

/* A matrix as Transformer Engine sees it. */
typedef struct qe_te_tensor {
    void *by_rows;      /* [rows, columns]; NULL: not there */
    void *by_columns;   /* [columns, rows]; NULL: not there */
    const float *scale; /* of a result of 8 bits */
    float *amax;        /* raised; NULL: not recorded */
    float *scale_inv;   /* 8 bits: written with a result's codes, read with an operand's */
    uint32_t rows, columns;
    uint8_t format; /* qe_format */
} qe_te_tensor;

/* In Transformer Engine's words, which are cuBLAS's: result = op(a) op(b) (+ result), matrices by columns, so `a` is
 * our second operand. */
typedef struct qe_te_product {
    qe_te_tensor a, b, result;
    uint8_t turn_a, turn_b;
    uint8_t adds;
    uint8_t accumulation; /* qe_accumulation */
    void *workspace;
    uint64_t workspace_bytes;
} qe_te_product;

/* More sequences are left to the cuda backend: it bounds the state below. */
enum { QE_TE_SEQUENCES_MAX = 4096, QE_TE_ATTENTION_STATE_BYTES = 2 * sizeof(int64_t) + 4 * QE_TE_SEQUENCES_MAX };

/* Causal attention of rows q, k, v with as many heads each. Backward: out and lse are read. */
typedef struct qe_te_attention {
    const void *qkv; /* [sequences, sequence, 3, heads, head_dim] bf16 */
    void *out;       /* [sequences, sequence, heads, head_dim] bf16 */
    float *lse;      /* [sequences, heads, sequence] */
    const void *dout;
    void *dqkv;
    void *state;     /* [QE_TE_ATTENTION_STATE_BYTES] zeroes */
    void *workspace;
    uint64_t workspace_bytes;
    uint32_t sequences, sequence, heads, head_dim;
    uint8_t backward, deterministic;
} qe_te_attention;

/* What is needed of the library at `path`. Owns: the caller closes it; the library stays loaded.
 * On failure: QE_ERROR_UNSUPPORTED: it, or what it stands on, cannot be loaded, or lacks a function. */
qe_status qe_te_library_open(const char *path, qe_te_library **library_out, qe_error *error_out);
void qe_te_library_close(qe_te_library *library);

/* Makes what Transformer Engine keeps for each thread, where this one has none yet. Before a capture: a handle takes
 * memory of the device. */
qe_status qe_te_thread_enter(const qe_te_library *library, qe_error *error_out);

/* stream: a cudaStream_t. from, gate_up, dy: bf16 (or fp32, `from`); to: 8 bits, by rows, and by columns as well where
 * that is there. */
qe_status qe_te_quantize(const qe_te_library *library, const qe_te_tensor *from, const qe_te_tensor *to, void *stream,
                         qe_error *error_out);
/* The scale is made from the largest |from| first. to->scale and to->amax are scratch, and both are written. */
qe_status qe_te_quantize_current(const qe_te_library *library, const qe_te_tensor *from, const qe_te_tensor *to,
                                 void *stream, qe_error *error_out);
qe_status qe_te_swiglu(const qe_te_library *library, const qe_te_tensor *gate_up, const qe_te_tensor *to, void *stream,
                       qe_error *error_out);
/* Requires: `to` is there both by rows and by columns. */
qe_status qe_te_swiglu_backward(const qe_te_library *library, const qe_te_tensor *dy, const qe_te_tensor *gate_up,
                                const qe_te_tensor *to, void *stream, qe_error *error_out);
qe_status qe_te_multiply(const qe_te_library *library, const qe_te_product *product, void *stream, qe_error *error_out);
/* Builds cuDNN's plan for this thread where it has none yet; runs nothing. Ensures: *workspace_bytes_out > 0. */
qe_status qe_te_attention_plan_build(const qe_te_library *library, const qe_te_attention *attention,
                                     uint64_t *workspace_bytes_out, qe_error *error_out);
/* Requires: workspace of as many bytes as building said. */
qe_status qe_te_attention_run(const qe_te_library *library, const qe_te_attention *attention, void *stream,
                              qe_error *error_out);

#ifdef __cplusplus
}
#endif
#endif
