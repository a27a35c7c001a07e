/* attention.h - attention through Transformer Engine, where every query's head has a head of keys of its own. A shape
 * has its workspace, and a plan of cuDNN's that Transformer Engine keeps for each thread: both are made before work is
 * recorded. */
#ifndef QE_TE_ATTENTION_H
#define QE_TE_ATTENTION_H

#include "backend/te/ops.h"

int qe_te_attention_takes(const qe_op *op);
/* Builds the plan and takes the workspace, once per shape. Capture: forbidden. */
qe_status qe_te_attention_prepare(qe_te_context *te, const qe_op *op, qe_error *error_out);
/* This thread gets a plan for each shape that is prepared. */
qe_status qe_te_attention_record(const qe_te_context *te, qe_error *error_out);
/* Requires: prepared, where the stream is captured. */
qe_status qe_te_attention_queue(qe_te_context *te, const qe_op *op, cudaStream_t stream, qe_error *error_out);
void qe_te_attention_free(qe_te_context *te);

#endif
