/* graph.c - stream capture, judged before it may run. */
#include <stdlib.h>
#include "backend/cuda/device.h"
#include "base/assert.h"

static void graph_free(qe_graph *graph) {
    if (graph == NULL) return;
    if (graph->executable != NULL) (void)cudaGraphExecDestroy(graph->executable);
    if (graph->graph != NULL) (void)cudaGraphDestroy(graph->graph);
    free(graph->claims);
    free(graph->touched);
    free(graph);
}

static qe_status graph_begin(qe_stream *stream, qe_error *error_out) {
    qe_device *device = stream->device;
    if (device->recording != NULL)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "the device records already");
    if (device->substitute.record != NULL) QE_TRY(device->substitute.record(device->substitute.context, error_out));
    qe_graph *graph = calloc(1, sizeof *graph);
    if (graph == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a graph");
    qe_cuda_parked_settle_all(device); /* what was given before is not recorded */
    /* Thread-local: what other ranks' threads do with their devices does not concern this capture. */
    qe_status status = qe_cuda_check(cudaStreamBeginCapture(stream->stream, cudaStreamCaptureModeThreadLocal),
                                     "the beginning of a capture", error_out);
    if (status != QE_OK) {
        graph_free(graph);
        return status;
    }
    graph->device = device;
    graph->origin = stream;
    graph->before = device->failure;
    device->failure.status = QE_OK;
    device->recording = graph;
    return QE_OK;
}

/* Stops the capture; the runtime gives the graph, or nothing where the capture is invalid. */
static cudaError_t capture_stop(qe_graph *graph) {
    graph->device->recording = NULL;
    graph->device->failure = graph->before;
    return cudaStreamEndCapture(graph->origin->stream, &graph->graph);
}

static void graph_abandon(qe_stream *stream) {
    qe_graph *graph = stream->device->recording;
    if (graph == NULL) return;
    (void)capture_stop(graph);
    (void)cudaGetLastError();
    graph_free(graph);
}

/* 0: nobody can say. */
static size_t free_now(void) {
    size_t free_bytes = 0, total = 0;
    if (cudaMemGetInfo(&free_bytes, &total) == cudaSuccess) return free_bytes;
    (void)cudaGetLastError();
    return 0;
}

/* Memory that instantiation takes is seen as what is missing afterwards; the driver gives it out in large pieces, so
 * small graphs may show none. */
static qe_status instantiate(qe_graph *graph, qe_error *error_out) {
    const size_t before = free_now();
    QE_TRY(qe_cuda_check(cudaGraphInstantiate(&graph->executable, graph->graph, 0), "instantiating a graph",
                         error_out));
    QE_TRY(qe_cuda_check(cudaGraphUpload(graph->executable, graph->device->aside), "uploading a graph", error_out));
    QE_TRY(qe_cuda_check(cudaStreamSynchronize(graph->device->aside), "uploading a graph", error_out));
    const size_t after = free_now(), bytes = after > 0 && before > after ? before - after : 0;
    graph->info = (qe_graph_info){.ops = graph->ops, .lanes = 1, .bytes = bytes};
    return QE_OK;
}

static qe_status memsets_replace(qe_graph *graph, qe_error *error_out) {
    const qe_status status = qe_cuda_memsets_replace(graph->graph);
    if (status == QE_OK) return QE_OK;
    const cudaError_t code = cudaGetLastError();
    const char *why = status == QE_ERROR_MEMORY ? "no memory" : "one has an edge that no kernel could have";
    return qe_error_set(error_out, status, NULL, "memsets of a graph: %s",
                        code != cudaSuccess ? cudaGetErrorString(code) : why);
}

static qe_status graph_end(qe_stream *stream, qe_graph **graph_out, qe_error *error_out) {
    qe_graph *graph = stream->device->recording;
    if (graph == NULL || graph->origin != stream)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "stream '%s' began no recording", stream->name);
    qe_status status = qe_cuda_check(capture_stop(graph), "the end of a capture", error_out);
    if (status == QE_ERROR_DEVICE) status = QE_ERROR_ARGUMENT;
    if (status == QE_ERROR_ARGUMENT && error_out != NULL) error_out->status = status;
    if (graph->refusal.status != QE_OK) { /* it came first, and may be why the capture is not whole */
        status = graph->refusal.status;
        if (error_out != NULL) *error_out = graph->refusal;
    }
    if (status == QE_OK) status = qe_cuda_graph_judge(graph, error_out);
    if (status == QE_OK) status = qe_cuda_watch_graph(graph, error_out);
    if (status == QE_OK) status = memsets_replace(graph, error_out);
    if (status == QE_OK) status = instantiate(graph, error_out);
    if (status != QE_OK) {
        graph_free(graph);
        return status;
    }
    free(graph->claims);
    graph->claims = NULL;
    *graph_out = graph;
    return QE_OK;
}

qe_status qe_cuda_graph_queue(qe_graph *graph, qe_stream *stream) {
    cuda_timeline *timeline = graph->device->timeline;
    if (timeline != NULL) qe_cuda_timeline_begin(timeline, "graph", stream->name, stream->stream);
    cudaError_t code = cudaGraphLaunch(graph->executable, stream->stream);
    if (timeline != NULL) qe_cuda_timeline_end(timeline, stream->stream);
    return qe_cuda_queued(graph->device, code, "the launch of a graph");
}

static qe_status graph_launch(qe_graph *graph, qe_stream *stream) {
    if (graph->device != stream->device) return QE_ERROR_ARGUMENT;
    QE_TRY(qe_cuda_watch_launch(graph, stream->place));
    return qe_cuda_stream_give(stream, (cuda_command){.kind = CUDA_COMMAND_LAUNCH, .graph = graph});
}

static void graph_destroy(qe_graph *graph) {
    if (graph != NULL && graph->device->parked > 0) qe_cuda_parked_settle_all(graph->device); /* its launch, maybe */
    graph_free(graph);
}

static qe_graph_info graph_info(const qe_graph *graph) {
    return graph->info;
}

const qe_graph_ops qe_cuda_graphs = {
    .size = sizeof(qe_graph_ops),
    .begin = graph_begin,
    .end = graph_end,
    .abandon = graph_abandon,
    .launch = graph_launch,
    .destroy = graph_destroy,
    .info = graph_info,
};
