/* check_gpu_planted.c - faults planted inside of a recording: the graph is refused at its end, whatever was declared
 * elsewhere. Each has a twin without the fault, which is accepted and runs. */
#include "cuda/check_gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/device.h"

enum { BYTES = 4096 };

typedef struct bench {
    qe_device *device;
    qe_stream *compute, *side;
    qe_event *out, *back;
    char *bytes[3];
    qe_op first, second; /* copy 0 -> 1, copy 1 -> 2 */
} bench;

static const qe_backend *cuda(void) { return qe_cuda_backend(); }

static void require(qe_status status, const qe_error *error, const char *what) {
    if (status == QE_OK) return;
    fprintf(stderr, "%s: %s\n", what, error->message);
    exit(EXIT_FAILURE);
}

static void copy_declare(bench *b, qe_op *op, char *from, char *to) {
    qe_error error = {0};
    const qe_range ranges[] = {{.at = from, .bytes = BYTES, .read = 1, .object = "slot"},
                               {.at = to, .bytes = BYTES, .write = 1, .object = "slot"}};
    *op = (qe_op){.kind = QE_OP_COPY};
    op->args.copy = (qe_args_copy){.from = from, .to = to, .bytes = BYTES};
    require(cuda()->declare(b->device, op, ranges, 2, &error), &error, "declare");
}

static void bench_open(bench *b) {
    qe_error error = {0};
    memset(b, 0, sizeof *b);
    require(cuda()->open(&b->device, &error), &error, "open");
    require(cuda()->stream->create(b->device, "compute", &b->compute, &error), &error, "stream");
    require(cuda()->stream->create(b->device, "side", &b->side, &error), &error, "stream");
    require(cuda()->stream->event_create(b->device, &b->out, &error), &error, "event");
    require(cuda()->stream->event_create(b->device, &b->back, &error), &error, "event");
    for (int i = 0; i < 3; i++)
        require(cuda()->memory->alloc(b->device, BYTES, (void **)&b->bytes[i], &error), &error, "memory");
    copy_declare(b, &b->first, b->bytes[0], b->bytes[1]);
    copy_declare(b, &b->second, b->bytes[1], b->bytes[2]);
}

static void bench_close(bench *b) {
    for (int i = 0; i < 3; i++) cuda()->memory->release(b->device, b->bytes[i]);
    cuda()->stream->event_destroy(b->out);
    cuda()->stream->event_destroy(b->back);
    cuda()->stream->destroy(b->compute);
    cuda()->stream->destroy(b->side);
    cuda()->close(b->device);
}

/* Behind the backend's back. */
static qe_status plant_node(const bench *b) {
    return cudaMemsetAsync(b->bytes[2], 0, BYTES, b->compute->stream) == cudaSuccess ? QE_OK : QE_ERROR_DEVICE;
}

static qe_status edge(const bench *b, qe_stream *from, qe_stream *to, qe_event *event) {
    qe_status status = cuda()->stream->record(from, event);
    (void)b;
    return status == QE_OK ? cuda()->stream->wait(to, event) : status;
}

static qe_status two_copies(const bench *b, qe_stream *second_on) {
    qe_status status = cuda()->stream->submit(b->compute, &b->first);
    return status == QE_OK ? cuda()->stream->submit(second_on, &b->second) : status;
}

static qe_status nothing_planted(const bench *b) { return two_copies(b, b->compute); }

static qe_status node_between(const bench *b) {
    qe_status status = cuda()->stream->submit(b->compute, &b->first);
    if (status == QE_OK) status = plant_node(b);
    return status == QE_OK ? cuda()->stream->submit(b->compute, &b->second) : status;
}

static qe_status node_behind(const bench *b) {
    qe_status status = two_copies(b, b->compute);
    return status == QE_OK ? plant_node(b) : status;
}

/* The second copy reads what the first wrote; both streams take part in the recording and come back. */
static qe_status pair_without_order(const bench *b) {
    qe_status status = edge(b, b->compute, b->side, b->out);
    if (status == QE_OK) status = two_copies(b, b->side);
    return status == QE_OK ? edge(b, b->side, b->compute, b->back) : status;
}

static qe_status pair_with_order(const bench *b) {
    qe_status status = cuda()->stream->submit(b->compute, &b->first);
    if (status == QE_OK) status = edge(b, b->compute, b->side, b->out);
    if (status == QE_OK) status = cuda()->stream->submit(b->side, &b->second);
    return status == QE_OK ? edge(b, b->side, b->compute, b->back) : status;
}

/* The second copy may begin when the first one's blocks say so, and not only when they are done. */
static qe_status programmatic_edge(const bench *b) {
    enum cudaStreamCaptureStatus state;
    const cudaGraphNode_t *nodes = NULL;
    size_t count = 0;
    cudaGraphEdgeData early[1] = {{.from_port = cudaGraphKernelNodePortProgrammatic}};
    cudaGraphNode_t behind[1];
    early[0].type = cudaGraphDependencyTypeProgrammatic;
    qe_status status = cuda()->stream->submit(b->compute, &b->first);
    if (status != QE_OK) return status;
    const cudaStream_t stream = b->compute->stream;
    if (cudaStreamGetCaptureInfo(stream, &state, NULL, NULL, &nodes, NULL, &count) != cudaSuccess || count != 1)
        return QE_ERROR_DEVICE;
    behind[0] = nodes[0];
    if (cudaStreamUpdateCaptureDependencies(stream, behind, early, 1, cudaStreamSetCaptureDependencies) != cudaSuccess)
        return QE_ERROR_DEVICE;
    return cuda()->stream->submit(b->compute, &b->second);
}

static qe_status lane_that_stays_away(const bench *b) {
    qe_status status = edge(b, b->compute, b->side, b->out);
    return status == QE_OK ? two_copies(b, b->side) : status;
}

static qe_status op_outside(const bench *b) { return two_copies(b, b->side); }

static void try_graph(bench *b, qe_status (*give)(const bench *b), planted *planted_out) {
    qe_error error = {0};
    qe_graph *graph = NULL;
    require(cuda()->graph->begin(b->compute, &error), &error, "begin");
    qe_status given = give(b), ended = cuda()->graph->end(b->compute, &graph, &error);
    planted_out->refused = ended != QE_OK;
    if (ended != QE_OK) snprintf(planted_out->words, sizeof planted_out->words, "%s", error.message);
    if (ended == QE_OK && given == QE_OK) require(cuda()->graph->launch(graph, b->compute), &error, "launch");
    require(cuda()->stream->sync(b->compute, &error), &error, "sync");
    require(cuda()->stream->sync(b->side, &error), &error, "sync");
    if (ended == QE_OK) cuda()->graph->destroy(graph);
}

uint32_t planted_graphs(planted *graphs_out) {
    static const struct {
        const char *what;
        int refusal_due;
        qe_status (*give)(const bench *b);
    } cases[] = {
        {"nothing planted", 0, nothing_planted},
        {"a node between two ops that no op made", 1, node_between},
        {"a node behind the last op that no op made", 1, node_behind},
        {"two ops that touch the same bytes, without an order", 1, pair_without_order},
        {"the same two ops, ordered by an event", 0, pair_with_order},
        {"the same two ops, ordered by a programmatic edge", 1, programmatic_edge},
        {"a stream that joined and does not come back", 1, lane_that_stays_away},
        {"an op on a stream that takes no part", 1, op_outside},
    };
    bench b;
    bench_open(&b);
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        graphs_out[i] = (planted){.what = cases[i].what, .refusal_due = cases[i].refusal_due};
        try_graph(&b, cases[i].give, &graphs_out[i]);
    }
    bench_close(&b);
    return sizeof cases / sizeof *cases;
}
