/* device.h - inside of the cuda backend: what a device, a stream, an event and a graph are. */
#ifndef QE_CUDA_DEVICE_H
#define QE_CUDA_DEVICE_H

#include <cuda_runtime_api.h>
#include "backend/cuda/kernels.h"
#include "backend/cuda/products.h"
#include "backend/cuda/substitute.h"
#include "qeffect/cuda.h"
#include "qeffect/limits.h"
#include "qeffect/order.h"

typedef struct cuda_declaration cuda_declaration;

struct qe_device {
    int ordinal;
    qe_cuda_gemm *gemm;
    qe_cuda_attention *attention; /* NULL until attention is prepared */
    qe_cuda_substitute substitute; /* `takes` is NULL: all ops are run here */
    cudaStream_t aside; /* for ops that run at once */
    qe_keep_piece *keeping; /* device [keeping_capacity] */
    size_t keeping_capacity;
    cudaEvent_t kept;      /* behind the copies */
    void *staging;         /* page-locked, on the way to the host */
    cudaStream_t fetching; /* of another thread: what was kept goes to the host */
    /* What ops may touch, by the address of the op (declare.c). */
    cuda_declaration **declarations;
    uint64_t declaration_count, declaration_capacity;
    int tune, nvtx, honours; /* honours: no shape is chosen beyond what the file says */
    const char *choices_path;
    struct cuda_clocks *clocks; /* NULL: nobody asked */
    struct cuda_timeline *timeline; /* NULL: none is kept */
    qe_order *order; /* what streams were really given; NULL: nobody watches */
    qe_breach breach; /* the first that was found */
    int breached;
    uint64_t delay_max_ns, delay_state;
    uint64_t taken_bytes, allocations, code_bytes;
    struct qe_graph *recording; /* one at a time: a rank captures on its own thread */
    uint32_t streams;
    uint32_t parked; /* of all streams */
    qe_stream *first_stream; /* all that live */
    uint64_t *loaded; /* hashes of ops whose kernels were loaded (run.c) */
    uint32_t loaded_count, loaded_capacity;
    char identity[200];
    qe_error failure; /* of the first op that could not be queued since the last sync */
};

/* What streams are given. */
typedef enum cuda_command_kind {
    CUDA_COMMAND_OP,
    CUDA_COMMAND_RECORD,
    CUDA_COMMAND_WAIT,
    CUDA_COMMAND_LAUNCH,
} cuda_command_kind;

typedef struct cuda_command {
    cuda_command_kind kind;
    uint64_t record; /* RECORD, WAIT: which one of its event */
    union {
        const qe_op *op;
        qe_event *event;
        qe_graph *graph;
    };
} cuda_command;

/* A rank runs ahead of its neighbours by this many commands of a stream at most: thousands of messages; 24 KiB. */
enum { CUDA_PARKED_MAX = 1024 };

struct qe_stream {
    qe_device *device;
    cudaStream_t stream;
    char name[QE_NAME_BYTES];
    uint32_t place; /* in device->order */
    uint32_t users; /* who created it under this name */
    qe_stream *next;
    int transfers; /* has sent or received since the last sync */
    const int *aborted; /* of the transport it went through; NULL: none */
    cuda_command parked[CUDA_PARKED_MAX]; /* a ring (parked.c) */
    uint32_t parked_first, parked_count;
};

struct qe_event {
    qe_device *device;
    cudaEvent_t event;
    uint32_t place; /* in device->order */
    uint64_t given, recorded; /* records that were asked for; the last one that is queued */
};

/* A node of a captured graph and the op that made it. */
typedef struct cuda_claim {
    cudaGraphNode_t node;
    const qe_op *op;
    uint32_t given; /* by which submission of the recording: an op may be given twice */
} cuda_claim;

struct qe_graph {
    qe_device *device;
    qe_stream *origin;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cuda_claim *claims; /* while it is recorded and judged */
    uint64_t claim_count, claim_capacity;
    uint32_t ops;
    qe_range *touched; /* what its ops touch, all together: for device->order */
    size_t touched_count;
    qe_error refusal; /* what first made the recording invalid; status QE_OK where nothing did */
    qe_error before;  /* device->failure when it began, which is told at the next sync, whatever becomes of this */
    qe_graph_info info;
};

/* Before the first call of the runtime. On failure: QE_ERROR_UNSUPPORTED: no driver, too old a one, no GPU. */
qe_status qe_cuda_start(qe_error *error_out);
void qe_cuda_clocks_close(struct cuda_clocks *clocks); /* NULL is allowed */
/* kept.c: keep and fetch of the table of memory, and the end of what they hold. */
qe_status qe_cuda_memory_keep(qe_device *device, const qe_keep_range *ranges, size_t count, qe_error *error_out);
qe_status qe_cuda_memory_fetch(qe_device *device, void *to_host, const void *kept, size_t bytes, qe_error *error_out);
void qe_cuda_keeping_close(qe_device *device);

/* Turns a code of the runtime into an error in words; cudaSuccess is QE_OK. */
qe_status qe_cuda_check(cudaError_t code, const char *what, qe_error *error_out);

/* run.c: queues an op. On failure QE_ERROR_DEVICE and device->failure says what. */
qe_status qe_cuda_op_queue(qe_device *device, const qe_op *op, cudaStream_t stream);
qe_status qe_cuda_op_prepare(qe_device *device, const qe_op *op, qe_error *error_out);

/* stream.c: tells device->failure, or the recording's refusal. And an op, now; *is_run_out = 0: it is a transfer whose
 * other end is not queued. */
qe_status qe_cuda_queued(qe_device *device, cudaError_t code, const char *what);
qe_status qe_cuda_stream_op(qe_stream *stream, const qe_op *op, int *is_run_out);
/* graph.c: a launch, now. */
qe_status qe_cuda_graph_queue(qe_graph *graph, qe_stream *stream);

/* parked.c: queues the command, or parks it until what it waits for is queued. */
qe_status qe_cuda_stream_give(qe_stream *stream, cuda_command command);
/* Returns when no more than `rest` commands of the stream are parked; none of any stream. Waits for other ranks. */
void qe_cuda_parked_settle(qe_stream *stream, uint32_t rest);
void qe_cuda_parked_settle_all(qe_device *device);

/* world.c: one end of a message. *aborted_out: the word that says whether the transport was aborted.
 * queue: for a recording; the GPU waits for the other end.
 * try: queues the end now, behind the other one; *is_queued_out = 0 where that is not queued yet. After an abort
 * nothing moves, and ends are dropped. */
qe_status qe_cuda_channel_prepare(qe_channel *channel, uint64_t bytes, cudaStream_t aside, qe_error *error_out);
qe_status qe_cuda_channel_queue(qe_channel *channel, qe_op_kind kind, void *at, uint64_t bytes, cudaStream_t stream,
                                const int **aborted_out);
qe_status qe_cuda_channel_try(qe_device *device, const qe_op *op, cudaStream_t stream, int *is_queued_out,
                              const int **aborted_out);
qe_world *qe_cuda_channel_world(const qe_channel *channel);
/* Counts what all ranks queue, and aborts; returns when it is another than the one that was seen. */
uint64_t qe_cuda_world_moves(qe_world *world);
void qe_cuda_world_await(qe_world *world, uint64_t seen);

/* timeline.c: marks around what a stream is given. Nothing happens without a timeline, or while a graph is recorded. */
typedef struct cuda_timeline cuda_timeline;
qe_status qe_cuda_timeline_create(const char *path, cuda_timeline **timeline_out, qe_error *error_out);
/* Writes the file, which is there from the creation on. Requires: the streams are idle. */
void qe_cuda_timeline_destroy(cuda_timeline *timeline);
void qe_cuda_timeline_begin(cuda_timeline *timeline, const char *name, const char *stream_name, cudaStream_t stream);
void qe_cuda_timeline_end(cuda_timeline *timeline, cudaStream_t stream);

/* watch.c: tells device->order, where somebody watches; while a graph is recorded nothing runs, so nothing is told. */
qe_status qe_cuda_watch_op(qe_device *device, uint32_t stream, const qe_op *op);
qe_status qe_cuda_watch_launch(const qe_graph *graph, uint32_t stream);
qe_status qe_cuda_watch_host(qe_device *device, void *at, size_t bytes, int write);
/* Collects what the ops of a recorded graph touch. */
qe_status qe_cuda_watch_graph(qe_graph *graph, qe_error *error_out);
int qe_cuda_breach(qe_device *device, qe_breach *breach_out);

/* declare.c */
qe_status qe_cuda_declare(qe_device *device, const qe_op *op, const qe_range *ranges, size_t count,
                          qe_error *error_out);
const qe_range *qe_cuda_declared(const qe_device *device, const qe_op *op, size_t *count_out);
void qe_cuda_declarations_free(qe_device *device);

/* claims.c: before and behind the submission of an op while a stream is captured; and the judgement of the whole
 * graph. On failure the recording is invalid: graph->refusal. */
qe_status qe_cuda_claim_begin(qe_graph *graph);
qe_status qe_cuda_claim_end(qe_graph *graph, const qe_op *op);
qe_status qe_cuda_graph_judge(qe_graph *graph, qe_error *error_out);

#endif
