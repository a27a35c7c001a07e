/* step_faults.h - a host backend whose n-th call fails, once. Calls are counted over all ranks, so which one it is may
 * differ from run to run; that every one of them is survived may not. */
#ifndef QE_TESTS_STEP_FAULTS_H
#define QE_TESTS_STEP_FAULTS_H

#include <stdatomic.h>

#include "qeffect/backend.h"
#include "qeffect/host.h"

typedef enum fault_place {
    FAULT_OPEN = 1,
    FAULT_CREATE = 2,
    FAULT_RUN = 4,
    FAULT_SYNC = 8,
    FAULT_BIND = 16, /* while ops are bound */
    FAULT_GRAPH = 32,
} fault_place;

static _Atomic int fault_places;   /* which calls count */
static _Atomic long fault_left;    /* calls until the one that fails; 0 or less: none will */
static _Atomic int fault_happened;

static inline void fault_arm(int places, long nth) {
    atomic_store(&fault_happened, 0);
    atomic_store(&fault_left, nth);
    atomic_store(&fault_places, places);
}

static inline int fault_now(fault_place place) {
    if (!(atomic_load(&fault_places) & (int)place)) return 0;
    if (atomic_fetch_sub(&fault_left, 1) != 1) return 0;
    atomic_store(&fault_happened, 1);
    return 1;
}

static inline qe_status fault_open(qe_device **device_out, qe_error *error_out) {
    if (fault_now(FAULT_OPEN)) return qe_error_set(error_out, QE_ERROR_DEVICE, NULL, "planted: open");
    return qe_host_backend()->open(device_out, error_out);
}

static inline qe_status fault_alloc(qe_device *device, size_t bytes, void **address_out, qe_error *error_out) {
    if (fault_now(FAULT_CREATE)) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "planted: alloc");
    return qe_host_backend()->memory->alloc(device, bytes, address_out, error_out);
}

static inline qe_status fault_write(qe_device *device, void *to, const void *from, size_t bytes, qe_error *error_out) {
    if (fault_now(FAULT_CREATE)) return qe_error_set(error_out, QE_ERROR_DEVICE, NULL, "planted: write");
    return qe_host_backend()->memory->write(device, to, from, bytes, error_out);
}

static inline qe_status fault_read(qe_device *device, void *to, const void *from, size_t bytes, qe_error *error_out) {
    if (fault_now(FAULT_SYNC)) return qe_error_set(error_out, QE_ERROR_DEVICE, NULL, "planted: read");
    return qe_host_backend()->memory->read(device, to, from, bytes, error_out);
}

static inline qe_status fault_stream(qe_device *device, const char *name, qe_stream **stream_out,
                                     qe_error *error_out) {
    if (fault_now(FAULT_CREATE)) return qe_error_set(error_out, QE_ERROR_IO, NULL, "planted: stream");
    return qe_host_backend()->stream->create(device, name, stream_out, error_out);
}

static inline qe_status fault_event(qe_device *device, qe_event **event_out, qe_error *error_out) {
    if (fault_now(FAULT_CREATE)) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "planted: event");
    return qe_host_backend()->stream->event_create(device, event_out, error_out);
}

static inline qe_status fault_submit(qe_stream *stream, const qe_op *op) {
    return fault_now(FAULT_RUN) ? QE_ERROR_DEVICE : qe_host_backend()->stream->submit(stream, op);
}
static inline qe_status fault_record(qe_stream *stream, qe_event *event) {
    return fault_now(FAULT_RUN) ? QE_ERROR_DEVICE : qe_host_backend()->stream->record(stream, event);
}
static inline qe_status fault_wait(qe_stream *stream, qe_event *event) {
    return fault_now(FAULT_RUN) ? QE_ERROR_DEVICE : qe_host_backend()->stream->wait(stream, event);
}

/* The work is done, and then said to have failed. */
static inline qe_status fault_sync(qe_stream *stream, qe_error *error_out) {
    qe_status status = qe_host_backend()->stream->sync(stream, error_out);
    if (status != QE_OK || !fault_now(FAULT_SYNC)) return status;
    return qe_error_set(error_out, QE_ERROR_DEVICE, NULL, "planted: sync");
}

static inline qe_status fault_event_sync(qe_event *event, qe_error *error_out) {
    if (fault_now(FAULT_SYNC)) return qe_error_set(error_out, QE_ERROR_DEVICE, NULL, "planted: event sync");
    return qe_host_backend()->stream->event_sync(event, error_out);
}

static inline qe_status fault_host_alloc(qe_device *device, size_t bytes, void **address_out, qe_error *error_out) {
    if (fault_now(FAULT_BIND)) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "planted: host alloc");
    return qe_host_backend()->memory->host_alloc(device, bytes, address_out, error_out);
}

static inline qe_status fault_prepare(qe_device *device, const qe_op *op, qe_error *error_out) {
    if (fault_now(FAULT_BIND)) return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, NULL, "planted: prepare");
    return qe_host_backend()->prepare(device, op, error_out);
}

static inline qe_status fault_declare(qe_device *device, const qe_op *op, const qe_range *ranges, size_t count,
                                      qe_error *error_out) {
    if (count > 0 && fault_now(FAULT_BIND)) /* to forget takes nothing and cannot fail */
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "planted: declare");
    return qe_host_backend()->declare(device, op, ranges, count, error_out);
}

static inline qe_status fault_graph_begin(qe_stream *stream, qe_error *error_out) {
    if (fault_now(FAULT_GRAPH)) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "planted: begin");
    return qe_host_backend()->graph->begin(stream, error_out);
}

/* A recording that cannot become a graph is dropped. */
static inline qe_status fault_graph_end(qe_stream *stream, qe_graph **graph_out, qe_error *error_out) {
    if (!fault_now(FAULT_GRAPH)) return qe_host_backend()->graph->end(stream, graph_out, error_out);
    qe_host_backend()->graph->abandon(stream);
    return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "planted: end");
}

static inline qe_status fault_launch(qe_graph *graph, qe_stream *stream) {
    return fault_now(FAULT_GRAPH) ? QE_ERROR_DEVICE : qe_host_backend()->graph->launch(graph, stream);
}

/* The tables are copied from the host's into storage of the caller. */
typedef struct fault_backend {
    qe_backend backend;
    qe_memory_ops memory;
    qe_stream_ops stream;
    qe_graph_ops graph;
} fault_backend;

static inline const qe_backend *fault_backend_init(fault_backend *faulty) {
    faulty->backend = *qe_host_backend();
    faulty->memory = *qe_host_backend()->memory;
    faulty->stream = *qe_host_backend()->stream;
    faulty->backend.open = fault_open;
    faulty->memory.alloc = fault_alloc;
    faulty->memory.write = fault_write;
    faulty->memory.read = fault_read;
    faulty->stream.create = fault_stream;
    faulty->stream.event_create = fault_event;
    faulty->stream.submit = fault_submit;
    faulty->stream.record = fault_record;
    faulty->stream.wait = fault_wait;
    faulty->stream.sync = fault_sync;
    faulty->graph = *qe_host_backend()->graph;
    faulty->memory.host_alloc = fault_host_alloc;
    faulty->stream.event_sync = fault_event_sync;
    faulty->backend.prepare = fault_prepare;
    faulty->backend.declare = fault_declare;
    faulty->graph.begin = fault_graph_begin;
    faulty->graph.end = fault_graph_end;
    faulty->graph.launch = fault_launch;
    faulty->backend.graph = &faulty->graph;
    faulty->backend.memory = &faulty->memory;
    faulty->backend.stream = &faulty->stream;
    return &faulty->backend;
}

#endif
