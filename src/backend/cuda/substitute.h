/* substitute.h - ops that another library runs in place of this backend's own kernels: how the te backend joins.
 * Memory, streams, events, graphs and their judgement stay this backend's. */
#ifndef QE_CUDA_SUBSTITUTE_H
#define QE_CUDA_SUBSTITUTE_H

#include <cuda_runtime_api.h>
#include "qeffect/backend.h"

/* A backend that is built on this one takes these as they are: its devices are this one's. */
extern const qe_memory_ops qe_cuda_memories;
extern const qe_stream_ops qe_cuda_streams;
extern const qe_graph_ops qe_cuda_graphs;

typedef struct qe_cuda_substitute {
    void *context;
    const char *backend, *library; /* both go into the device's identity; copied */
    /* Is this op run by the library? Depends on its shape and on which addresses are NULL, so it is the same answer in
     * every mode. An op that does two things is asked about, prepared and queued part by part (qe_op_parts). */
    int (*takes)(const qe_op *op);
    /* Once before an op is first queued. Capture: forbidden. */
    qe_status (*prepare)(void *context, const qe_op *op, qe_error *error_out);
    /* On the thread that is about to record: what the library keeps for each thread is made now. */
    qe_status (*record)(void *context, qe_error *error_out);
    /* Queues it. Allocates nothing. Capture: recorded. On failure: QE_ERROR_DEVICE with the library's words. */
    qe_status (*queue)(void *context, const qe_op *op, cudaStream_t stream, qe_error *error_out);
    void (*destroy)(void *context); /* when the device is closed, before its memory is gone */
} qe_cuda_substitute;

/* Before the device's first op. Owns: the device takes the context over. */
void qe_cuda_substitute_set(qe_device *device, const qe_cuda_substitute *substitute);

#endif
