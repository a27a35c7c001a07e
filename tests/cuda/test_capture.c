/* test_capture.c - each call of the runtime that a recording makes fails in turn: the recording is refused in words
 * that name the cause, nothing of it is left, what failed before it is still told, and the next recording is whole.
 * Needs no GPU: the runtime is replaced here. Where a call fails, the capture goes on or is no longer valid; both are
 * tried, and so is a caller who abandons it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "backend/cuda/device.h"
#include "base/assert.h"

/* --- a runtime that fails where it is told to --------------------------------------------------------------------- */

enum { NODES_MAX = 64, STREAMS_MAX = 4 };

static struct {
    int calls, fails_at; /* of calls that can fail; counted from 1; 0: none fails */
    int invalidates; /* a call that fails ends the capture's validity */
    const char *failed; /* the call that did */
    cudaError_t last; /* as the runtime remembers it */
    int graphs, executables; /* that live */
    int launches; /* of graphs */
    int is_late; /* the other end of a transfer is not there yet */
    int captures, is_valid;
    size_t nodes, edges, from[NODES_MAX], to[NODES_MAX];
} now;

/* What captured work of a stream, or behind an event, waits for: the last node; 0: none. */
struct CUstream_st {
    size_t tail;
};
struct CUevent_st {
    size_t tail;
};

static cudaError_t called(const char *name) {
    if (++now.calls != now.fails_at) return cudaSuccess;
    now.failed = name;
    if (now.invalidates && now.captures) now.is_valid = 0;
    return now.last = cudaErrorUnknown;
}

#define CALLED(name)                          \
    do {                                      \
        const cudaError_t code = called(name); \
        if (code != cudaSuccess) return code; \
    } while (0)

static cudaGraphNode_t node(size_t number) { return (cudaGraphNode_t)(uintptr_t)number; }

static void edge_add(size_t from, size_t to) {
    QE_ASSERT(now.edges < NODES_MAX);
    now.from[now.edges] = from, now.to[now.edges++] = to;
}

cudaError_t cudaGetLastError(void) {
    const cudaError_t last = now.last;
    return now.last = cudaSuccess, last;
}
const char *cudaGetErrorString(cudaError_t code) { return code == cudaErrorUnknown ? "as planted" : "another"; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream_out, unsigned flags) {
    return (void)flags, *stream_out = calloc(1, sizeof **stream_out), cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return free(stream), cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    (void)stream;
    CALLED("cudaStreamSynchronize");
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event_out, unsigned flags) {
    return (void)flags, *event_out = calloc(1, sizeof **event_out), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return (void)event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    CALLED("cudaEventRecord");
    event->tail = stream->tail;
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    CALLED("cudaStreamWaitEvent");
    QE_ASSERT(stream->tail == 0 || event->tail > stream->tail); /* no stream here has two to wait for */
    stream->tail = event->tail;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    (void)mode, stream->tail = 0;
    QE_ASSERT(!now.captures);
    CALLED("cudaStreamBeginCapture");
    now.captures = now.is_valid = 1, now.nodes = now.edges = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph_out) {
    (void)stream, *graph_out = NULL;
    QE_ASSERT(now.captures);
    now.captures = 0;
    CALLED("cudaStreamEndCapture");
    if (!now.is_valid) return now.last = cudaErrorStreamCaptureInvalidated;
    return *graph_out = malloc(1), now.graphs++, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status_out,
                                     unsigned long long *id_out, cudaGraph_t *graph_out,
                                     const cudaGraphNode_t **dependencies_out, const cudaGraphEdgeData **data_out,
                                     size_t *count_out) {
    (void)stream, (void)id_out, (void)dependencies_out, (void)data_out, (void)count_out;
    CALLED("cudaStreamGetCaptureInfo");
    *status_out = now.is_valid ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
    *graph_out = now.is_valid ? (cudaGraph_t)&now : NULL;
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    (void)graph;
    CALLED("cudaGraphGetNodes");
    for (size_t i = 0; nodes != NULL && i < *count; i++) nodes[i] = node(i + 1);
    return *count = now.nodes, cudaSuccess;
}
cudaError_t cudaGraphGetEdges(cudaGraph_t graph, cudaGraphNode_t *from, cudaGraphNode_t *to, cudaGraphEdgeData *data,
                              size_t *count) {
    (void)graph;
    CALLED("cudaGraphGetEdges");
    for (size_t i = 0; from != NULL && i < *count; i++)
        from[i] = node(now.from[i]), to[i] = node(now.to[i]), data[i] = (cudaGraphEdgeData){0};
    return *count = now.edges, cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable_out, cudaGraph_t graph, unsigned long long flags) {
    (void)graph, (void)flags;
    CALLED("cudaGraphInstantiate");
    return *executable_out = malloc(1), now.executables++, cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream) {
    (void)executable, (void)stream;
    CALLED("cudaGraphUpload");
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    return (void)executable, (void)stream, now.launches++, cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    return free(executable), now.executables--, cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return free(graph), now.graphs--, cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *free_out, size_t *total_out) {
    CALLED("cudaMemGetInfo");
    return *free_out = 1000000 - 1000 * (size_t)now.executables, *total_out = 1000000, cudaSuccess;
}

/* --- what stands beside the files under test ---------------------------------------------------------------------- */

qe_status qe_cuda_check(cudaError_t code, const char *what, qe_error *error_out) {
    if (code == cudaSuccess) return QE_OK;
    (void)cudaGetLastError();
    return qe_error_set(error_out, QE_ERROR_DEVICE, NULL, "%s: %s", what, cudaGetErrorString(code));
}

static cudaError_t launched(const char *name, cudaStream_t stream) {
    CALLED(name);
    if (!now.captures || !now.is_valid) return cudaSuccess;
    QE_ASSERT(now.nodes < NODES_MAX);
    now.nodes++;
    if (stream->tail != 0) edge_add(stream->tail, now.nodes);
    stream->tail = now.nodes;
    return cudaSuccess;
}

/* Two kernels. Words as run.c has them. */
qe_status qe_cuda_op_queue(qe_device *device, const qe_op *op, cudaStream_t stream) {
    for (int i = 0; i < 2; i++)
        if (launched("a launch", stream) != cudaSuccess) {
            if (device->failure.status != QE_OK) return QE_ERROR_DEVICE;
            return qe_error_set(&device->failure, QE_ERROR_DEVICE, NULL, "%s could not be queued: %s",
                                qe_op_name(op->kind), cudaGetErrorString(cudaGetLastError()));
        }
    return QE_OK;
}
/* Without words, as world.c. */
qe_status qe_cuda_channel_queue(qe_channel *channel, qe_op_kind kind, void *at, uint64_t bytes, cudaStream_t stream,
                                const int **aborted_out) {
    (void)channel, (void)kind, (void)at, (void)bytes, *aborted_out = NULL;
    for (int i = 0; i < 3; i++)
        if (launched("a launch of a transfer", stream) != cudaSuccess) return QE_ERROR_DEVICE;
    return QE_OK;
}
qe_status qe_cuda_memsets_replace(cudaGraph_t graph) {
    (void)graph;
    return called("a call of the memsets") == cudaSuccess ? QE_OK : QE_ERROR_DEVICE;
}

/* Outside a recording. */
qe_status qe_cuda_channel_try(qe_device *device, const qe_op *op, cudaStream_t stream, int *is_queued_out,
                              const int **aborted_out) {
    return (void)device, (void)op, (void)stream, *aborted_out = NULL, *is_queued_out = !now.is_late, QE_OK;
}
qe_world *qe_cuda_channel_world(const qe_channel *channel) { return (void)channel, NULL; }
uint64_t qe_cuda_world_moves(qe_world *world) { return (void)world, 0; }
void qe_cuda_world_await(qe_world *world, uint64_t seen) { (void)world, (void)seen, now.is_late = 0; }

/* Not called. */
void qe_cuda_timeline_begin(cuda_timeline *timeline, const char *name, const char *stream_name, cudaStream_t stream) {
    (void)timeline, (void)name, (void)stream_name, (void)stream;
}
void qe_cuda_timeline_end(cuda_timeline *timeline, cudaStream_t stream) { (void)timeline, (void)stream; }

/* --- a rank that records ------------------------------------------------------------------------------------------ */

static struct {
    qe_device device;
    struct CUstream_st aside;
    qe_stream *compute, *comm;
    qe_event *fork, *join;
    qe_op first, send, last;
} rank;

static char memory[8];

static void rank_make(void) {
    qe_error error;
    const qe_range range = {.at = memory, .bytes = sizeof memory, .read = 1, .write = 1};
    rank.device.aside = &rank.aside;
    QE_ASSERT(qe_order_create(&rank.device.order, &error) == QE_OK);
    QE_ASSERT(qe_cuda_streams.create(&rank.device, "compute", &rank.compute, &error) == QE_OK);
    QE_ASSERT(qe_cuda_streams.create(&rank.device, "comm", &rank.comm, &error) == QE_OK);
    QE_ASSERT(qe_cuda_streams.event_create(&rank.device, &rank.fork, &error) == QE_OK);
    QE_ASSERT(qe_cuda_streams.event_create(&rank.device, &rank.join, &error) == QE_OK);
    rank.first.kind = rank.last.kind = QE_OP_ACCUMULATE, rank.send.kind = QE_OP_SEND;
    QE_ASSERT(qe_cuda_declare(&rank.device, &rank.first, &range, 1, &error) == QE_OK);
    QE_ASSERT(qe_cuda_declare(&rank.device, &rank.send, &range, 1, &error) == QE_OK);
    QE_ASSERT(qe_cuda_declare(&rank.device, &rank.last, &range, 1, &error) == QE_OK);
}

static void rank_end(void) {
    qe_cuda_streams.event_destroy(rank.fork);
    qe_cuda_streams.event_destroy(rank.join);
    qe_cuda_streams.destroy(rank.compute);
    qe_cuda_streams.destroy(rank.comm);
    qe_order_destroy(rank.device.order);
    qe_cuda_declarations_free(&rank.device);
}

static qe_status give(void) {
    const qe_stream_ops *streams = &qe_cuda_streams;
    QE_TRY(streams->submit(rank.compute, &rank.first));
    QE_TRY(streams->record(rank.compute, rank.fork));
    QE_TRY(streams->wait(rank.comm, rank.fork));
    QE_TRY(streams->submit(rank.comm, &rank.send));
    QE_TRY(streams->record(rank.comm, rank.join));
    QE_TRY(streams->wait(rank.compute, rank.join));
    return streams->submit(rank.compute, &rank.last);
}

/* As src/step/capture.c: what fails is told by the end, in the status of the call that failed. */
static qe_status record(int abandons, qe_graph **graph_out, qe_error *error_out) {
    rank.compute->stream->tail = rank.comm->stream->tail = 0;
    QE_TRY(qe_cuda_graphs.begin(rank.compute, error_out));
    const qe_status status = give();
    if (status != QE_OK && abandons) {
        qe_cuda_graphs.abandon(rank.compute);
        return qe_error_set(error_out, status, NULL, "as planted, and abandoned");
    }
    const qe_status ended = qe_cuda_graphs.end(rank.compute, graph_out, error_out);
    if (status == QE_OK || status == ended) return ended;
    if (ended == QE_OK) qe_cuda_graphs.destroy(*graph_out);
    return qe_error_set(error_out, status, NULL, "nobody says why; the end says %s", qe_status_name(ended));
}

static int checked, failed;

static void check(int holds, const char *what, const qe_error *error) {
    checked++;
    failed += !holds;
    if (!holds)
        printf("FAILED %s, call %d (%s): %s\n", what, now.fails_at, now.failed != NULL ? now.failed : "none",
               error->message);
}

static void check_left(int graphs, const qe_error *error) {
    check(now.graphs == graphs && now.executables == graphs, "graphs that are left", error);
    check(!now.captures && rank.device.recording == NULL, "a capture that goes on", error);
    check(now.last == cudaSuccess, "an error that the runtime still remembers", error);
}

static void expect_whole(int fails_at) {
    qe_graph *graph = NULL;
    qe_error error = {0};
    now.calls = 0, now.fails_at = fails_at;
    check(record(0, &graph, &error) == QE_OK && graph != NULL, "a recording", &error);
    now.fails_at = 0;
    check_left(1, &error);
    if (graph == NULL) return;
    const qe_graph_info info = qe_cuda_graphs.info(graph);
    check(info.ops == 3 && now.nodes == 7 && info.bytes == (fails_at == 0 ? 1000 : 0), "what a graph holds", &error);
    check(qe_cuda_graphs.launch(graph, rank.compute) == QE_OK, "a launch", &error);
    check(qe_cuda_streams.sync(rank.compute, &error) == QE_OK, "a sync", &error);
    qe_cuda_graphs.destroy(graph);
    check_left(0, &error);
}

/* before: what failed before the recording, and is told by the sync behind it. */
static void expect_refused(int fails_at, int abandons, const char *before) {
    qe_graph *graph = NULL;
    qe_error error = {0}, later = {0};
    now.calls = 0, now.fails_at = fails_at, now.failed = NULL;
    if (before != NULL) (void)qe_error_set(&rank.device.failure, QE_ERROR_DEVICE, NULL, "%s", before);
    const qe_status status = record(abandons, &graph, &error);
    check(status != QE_OK && graph == NULL, "a call that failed", &error);
    check(strstr(error.message, "as planted") != NULL, "the cause is not named", &error);
    check_left(0, &error);
    now.fails_at = 0;
    const qe_status told = qe_cuda_streams.sync(rank.compute, &later);
    check(before == NULL ? told == QE_OK : told == QE_ERROR_DEVICE && strcmp(later.message, before) == 0,
          "what failed before", &later);
}

/* Who destroys a graph whose launch waits for a message has it launched first. */
static void expect_parked_launch(void) {
    qe_graph *graph = NULL;
    qe_error error = {0};
    check(record(0, &graph, &error) == QE_OK, "a recording", &error);
    now.is_late = 1, now.launches = 0;
    check(qe_cuda_streams.submit(rank.compute, &rank.send) == QE_OK, "a transfer that waits", &error);
    check(qe_cuda_graphs.launch(graph, rank.compute) == QE_OK && now.launches == 0, "a launch behind it", &error);
    qe_cuda_graphs.destroy(graph);
    check(now.launches == 1 && rank.device.parked == 0, "it was launched while it lived", &error);
    check_left(0, &error);
    check(qe_cuda_streams.sync(rank.compute, &error) == QE_OK, "a sync", &error);
}

/* The status that a call returns and that of its error are one. */
static void expect_one_status(void) {
    static const qe_status queued[] = {QE_ERROR_MEMORY, QE_ERROR_ARGUMENT, QE_ERROR_UNSUPPORTED, QE_ERROR_DEVICE};
    for (size_t i = 0; i < sizeof queued / sizeof *queued; i++) {
        qe_error error = {0};
        (void)qe_error_set(&rank.device.failure, queued[i], "a way out", "an op of before");
        const qe_status told = qe_cuda_streams.sync(rank.compute, &error);
        check(told == QE_ERROR_DEVICE && error.status == told, "the status of a sync", &error);
        check(strcmp(error.message, "an op of before") == 0 && strcmp(error.remedy, "a way out") == 0, "its words",
              &error);
    }
}

/* Returns how many calls a recording makes. failed_out: the name of the one that fails. */
static int calls_of_recording(int fails_at, const char **failed_out) {
    qe_graph *graph = NULL;
    qe_error error;
    now.calls = 0, now.fails_at = fails_at, now.failed = NULL;
    if (record(0, &graph, &error) == QE_OK) qe_cuda_graphs.destroy(graph);
    rank.device.failure.status = QE_OK, now.last = cudaSuccess, now.fails_at = 0;
    *failed_out = now.failed;
    return now.calls;
}

static void expect_all_ways(int call) {
    enum { INVALIDATES = 1, ABANDONS = 2, FAILED_BEFORE = 4, WAYS = 8 };
    for (int way = 0; way < WAYS; way++) {
        now.invalidates = way & INVALIDATES;
        expect_refused(call, way & ABANDONS, way & FAILED_BEFORE ? "an op of before" : NULL);
        now.invalidates = 0;
        expect_whole(0);
    }
}

int main(void) {
    const char *name;
    rank_make();
    expect_whole(0);
    expect_parked_launch();
    expect_one_status();
    const int calls = calls_of_recording(0, &name);
    for (int call = 1; call <= calls; call++) {
        (void)calls_of_recording(call, &name);
        if (strcmp(name, "cudaMemGetInfo") == 0) /* it only says what is told to people */
            expect_whole(call);
        else
            expect_all_ways(call);
    }
    rank_end();
    printf("%d calls fail in turn: %d checks, %d failed\n", calls, checked, failed);
    return failed > 0;
}
