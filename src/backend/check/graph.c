/* graph.c - recordings are the inner backend's; what their ops may touch is gathered beside them, and a launch is
 * judged as one op. */
#include <stdlib.h>

#include "backend/check/check.h"
#include "base/assert.h"

static const qe_graph_ops *inner_graphs(const qe_device *device) { return device->inner_backend->graph; }

static void graph_free(qe_graph *graph) {
    free(graph->all.ranges);
    free((qe_op *)(uintptr_t)graph->all.op);
    free(graph);
}

/* The recording is over: streams run again. */
static void stop_recording(qe_device *device) {
    for (qe_stream *stream = device->streams; stream; stream = stream->next) stream->recording = 0;
    device->recording = NULL;
    device->recorder = NULL;
    pthread_cond_broadcast(&device->changed);
}

/* Events have the record they had before it. */
static void drop_recording(qe_device *device) {
    graph_free(device->recording);
    for (qe_event *event = device->events; event; event = event->next)
        if (event->inside == device->recording_number) event->inside = 0;
    stop_recording(device);
}

static qe_status begin_recording(qe_stream *stream, qe_error *error_out) {
    qe_device *device = stream->device;
    if (device->recording && !stream->recording)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "end the other recording first",
                            "the check backend records one graph at a time");
    if (device->recording) return inner_graphs(device)->begin(stream->inner, error_out); /* refused, in its words */
    qe_graph *graph = calloc(1, sizeof *graph);
    if (!graph) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a graph");
    const qe_status status = inner_graphs(device)->begin(stream->inner, error_out);
    if (status != QE_OK) {
        graph_free(graph);
        return status;
    }
    graph->device = device;
    device->recording = graph;
    device->recorder = stream;
    device->recording_number++;
    stream->recording = 1;
    return QE_OK;
}

static qe_status check_begin(qe_stream *stream, qe_error *error_out) {
    pthread_mutex_lock(&stream->device->lock);
    while (stream->device->passing > 0) pthread_cond_wait(&stream->device->changed, &stream->device->lock);
    const qe_status status = begin_recording(stream, error_out);
    pthread_mutex_unlock(&stream->device->lock);
    return status;
}

static qe_status first_op(qe_graph *graph, const qe_op *op) {
    if (graph->all.op || op->kind == QE_OP_GUARD) return QE_OK;
    qe_op *copy = malloc(sizeof *copy);
    if (!copy) return QE_ERROR_MEMORY;
    *copy = *op;
    graph->all.op = copy; /* what the graph is called by */
    return QE_OK;
}

qe_status qe_check_record_op(qe_stream *stream, const qe_op *op) {
    qe_device *device = stream->device;
    qe_graph *graph = device->recording;
    const check_declaration *declared = qe_check_find(device, op);
    if (op->kind == QE_OP_SEND || op->kind == QE_OP_RECV)
        graph->transfers = 1;
    else if (!declared)
        return QE_ERROR_ARGUMENT;
    QE_TRY(first_op(graph, op));
    if (declared) QE_TRY(qe_check_declaration_join(&graph->all, declared->ranges, declared->count, NULL));
    return device->inner_backend->stream->submit(stream->inner, op);
}

static qe_status end_recording(qe_stream *stream, qe_graph **graph_out, qe_error *error_out) {
    qe_device *device = stream->device;
    qe_graph *graph = device->recording, *ignored = NULL;
    if (!graph || stream != device->recorder) return inner_graphs(device)->end(stream->inner, &ignored, error_out);
    if (graph->spoiled) {
        inner_graphs(device)->abandon(stream->inner);
        drop_recording(device);
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "record the event inside, or wait before the recording",
                            "a stream that records waited for an event recorded outside");
    }
    const qe_status status = inner_graphs(device)->end(stream->inner, &graph->inner, error_out);
    if (status != QE_OK) {
        drop_recording(device);
        return status;
    }
    stop_recording(device);
    *graph_out = graph;
    return QE_OK;
}

static qe_status check_end(qe_stream *stream, qe_graph **graph_out, qe_error *error_out) {
    pthread_mutex_lock(&stream->device->lock);
    const qe_status status = end_recording(stream, graph_out, error_out);
    pthread_mutex_unlock(&stream->device->lock);
    return status;
}

static void check_abandon(qe_stream *stream) {
    pthread_mutex_lock(&stream->device->lock);
    if (stream->recording) {
        inner_graphs(stream->device)->abandon(stream->inner);
        drop_recording(stream->device);
    }
    pthread_mutex_unlock(&stream->device->lock);
}

static qe_status check_launch(qe_graph *graph, qe_stream *stream) {
    qe_status status = QE_OK;
    if (graph->device != stream->device) return QE_ERROR_ARGUMENT;
    pthread_mutex_lock(&stream->device->lock);
    if (stream->recording)
        status = inner_graphs(stream->device)->launch(graph->inner, stream->inner); /* refused */
    else
        qe_check_put(stream, (check_item){.kind = ITEM_LAUNCH, .what.graph = graph});
    pthread_mutex_unlock(&stream->device->lock);
    return status;
}

static qe_status run_graph(const check_run *run, qe_error *error_out) {
    const qe_status status = inner_graphs(run->device)->launch(run->graph->inner, run->stream->inner);
    if (status != QE_OK) return qe_error_set(error_out, status, NULL, "the launch of a graph was refused");
    return run->device->inner_backend->stream->sync(run->stream->inner, error_out);
}

/* Its transfers wait for other ranks: the device is not held meanwhile, and checks nothing. */
static qe_status pass_on(const check_run *run, qe_error *error_out) {
    qe_device *device = run->device;
    device->passing++;
    device->counts.launches++;
    pthread_mutex_unlock(&device->lock);
    const qe_status status = run_graph(run, error_out);
    pthread_mutex_lock(&device->lock);
    device->passing--;
    pthread_cond_broadcast(&device->changed);
    return status;
}

/* A launch syncs, which no recording of the device allows. */
void qe_check_launch_now(qe_stream *stream, qe_graph *graph) {
    qe_device *device = stream->device;
    qe_error error = {.status = QE_OK};
    const check_run run = {.run = run_graph, .device = device, .graph = graph, .stream = stream};
    while (device->recording || device->passing > 0) pthread_cond_wait(&device->changed, &device->lock);
    if (!graph->transfers) device->counts.graphs++;
    const qe_status status =
        graph->transfers ? pass_on(&run, &error) : qe_check_judge(&run, &graph->all, &error);
    if (status != QE_OK) qe_check_note(stream, &error);
}

static void check_destroy(qe_graph *graph) {
    if (!graph) return;
    inner_graphs(graph->device)->destroy(graph->inner);
    graph_free(graph);
}

static qe_graph_info check_info(const qe_graph *graph) { return inner_graphs(graph->device)->info(graph->inner); }

const qe_graph_ops qe_check_graphs = {
    .size = sizeof(qe_graph_ops),
    .begin = check_begin,
    .end = check_end,
    .abandon = check_abandon,
    .launch = check_launch,
    .destroy = check_destroy,
    .info = check_info,
};
