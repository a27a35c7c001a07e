/* ops.h - which ops Transformer Engine runs, and their arguments in its words. */
#ifndef QE_TE_OPS_H
#define QE_TE_OPS_H

#include <cuda_runtime_api.h>
#include "backend/te/shim.h"
#include "qeffect/backend.h"

/* What Transformer Engine gives a product on Hopper under PyTorch: 32 MiB and room to align. A heuristic chooses by it,
 * so it is theirs, and as large wherever an op's workspace lies: an address is rounded up beforehand. */
enum { QE_TE_WORKSPACE_BYTES = (32 << 20) + 1024, QE_TE_WORKSPACE_ALIGN_BYTES = 256 };

typedef struct qe_te_attention_plan qe_te_attention_plan; /* attention.h */

typedef struct qe_te_context {
    qe_te_library *library;
    qe_device *device;
    void *workspace; /* [QE_TE_WORKSPACE_BYTES] for products that bring none; NULL until there is one */
    float *scratch;  /* [2] scale and amax between the kernels of an op; ops run on the device's compute stream */
    qe_te_attention_plan *attention; /* of every shape that was prepared */
    void *attention_state; /* [QE_TE_ATTENTION_STATE_BYTES] zeroes; NULL until attention is prepared */
} qe_te_context;

/* Is the op's kernel Transformer Engine's? Where it is not, the cuda backend runs its own. Ops come in their parts
 * (qe_op_parts): here nothing has a target that could do without. */
int qe_te_takes(const qe_op *op);
/* On failure: QE_ERROR_UNSUPPORTED, in words, for a product that no matrix unit computes. */
qe_status qe_te_prepare(void *context, const qe_op *op, qe_error *error_out);
qe_status qe_te_record(void *context, qe_error *error_out);
qe_status qe_te_queue(void *context, const qe_op *op, cudaStream_t stream, qe_error *error_out);

#endif
