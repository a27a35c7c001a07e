/* cut_shim.h - tables around a backend's that leave out, or put on the wrong stream, one kind of edge of what is
 * executed while it is armed. What is planned and declared stays as it is: the ledgers of plans cannot know.
 *
 * A backend that does not look at what it is given (host) is watched by the shim: every call that is passed on is told
 * to an order (order.h) first, as the cuda backend does itself. Streams can be slowed down, each by a level that a seed
 * draws. One team at a time; what is armed is changed between commands of the team only. */
#ifndef QE_TESTS_CUT_SHIM_H
#define QE_TESTS_CUT_SHIM_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "qeffect/backend.h"
#include "qeffect/order.h"

typedef enum cut_role { CUT_NOBODY, CUT_CALLER, CUT_COMPUTE, CUT_SEND, CUT_RECV, CUT_ASTRAY, CUT_ROLES } cut_role;

typedef enum cut_kind {
    CUT_NONE,
    CUT_ENTER,
    CUT_EXIT,
    CUT_JOIN_RECV,
    CUT_JOIN_SEND,
    CUT_REUSE_SEND,
    CUT_REUSE_RECV,
    CUT_FOLD,
    CUT_COMMIT,
    CUT_DRAIN,
    CUT_LANE,
    CUT_KINDS
} cut_kind;

typedef struct cut_row {
    const char *name, *words;
    cut_role waiter, recorder; /* of the waits that are left out; CUT_NOBODY: it is something else */
} cut_row;

static const cut_row cut_rows[CUT_KINDS] = {
    [CUT_NONE] = {"none", "all edges are there", CUT_NOBODY, CUT_NOBODY},
    [CUT_ENTER] = {"enter", "compute does not wait for the caller's load", CUT_COMPUTE, CUT_CALLER},
    [CUT_EXIT] = {"exit", "the caller's read does not wait for compute", CUT_CALLER, CUT_COMPUTE},
    [CUT_JOIN_RECV] = {"join recv", "compute does not wait for what is received", CUT_COMPUTE, CUT_RECV},
    [CUT_JOIN_SEND] = {"join send", "a send does not wait for what compute makes", CUT_SEND, CUT_COMPUTE},
    [CUT_REUSE_SEND] = {"reuse send", "compute does not wait for the send that reads the slot", CUT_COMPUTE, CUT_SEND},
    [CUT_REUSE_RECV] = {"reuse recv", "a receive does not wait for compute that reads the slot", CUT_RECV, CUT_COMPUTE},
    [CUT_FOLD] = {"fold", "folds go to a stream that nothing waits for", CUT_NOBODY, CUT_NOBODY},
    [CUT_COMMIT] = {"commit", "optimizer steps go to a stream that nothing waits for", CUT_NOBODY, CUT_NOBODY},
    [CUT_DRAIN] = {"drain", "the host reads norms and losses without waiting for compute", CUT_NOBODY, CUT_NOBODY},
    [CUT_LANE] = {"lane", "a stream that joined a recording does not come back", CUT_NOBODY, CUT_NOBODY},
};

typedef struct cut_device cut_device;

typedef struct cut_stream {
    cut_device *device;
    qe_stream *inner;
    cut_role role;
    uint32_t place; /* in device->order */
    void *slow;     /* of the hook that delays */
} cut_stream;

typedef struct cut_event {
    qe_event *inner;
    cut_role recorder;
    int planned; /* an event of the plan; else one that a recording made for its lanes */
    uint32_t place;
} cut_event;

typedef struct cut_declared {
    struct cut_declared *next;
    const qe_op *op;
    size_t count;
    qe_range ranges[]; /* [count] */
} cut_declared;

typedef struct cut_touched {
    qe_range *ranges;
    size_t count, capacity;
} cut_touched;

typedef struct cut_graph {
    cut_device *device;
    qe_graph *inner;
    cut_touched touched;
} cut_graph;

enum { CUT_BUCKETS = 4096, CUT_DEVICES_MAX = 8 };

struct cut_device {
    qe_device *inner;
    uint32_t index;
    qe_order *order; /* NULL: the inner backend looks, or nobody does */
    qe_breach breach;
    int breached;
    cut_stream *astray; /* known to no team */
    qe_event *fork;     /* brings it into a recording */
    int recording, forked, bound, drained;
    uint64_t dropped; /* edges left out since the kind was armed */
    uint64_t random, delay_max_ns[CUT_ROLES];
    cut_touched recorded; /* by what is being recorded */
    cut_declared *declared[CUT_BUCKETS];
};

static struct cut_shim {
    const qe_backend *inner;
    qe_backend backend;
    qe_memory_ops memory;
    qe_stream_ops stream;
    qe_graph_ops graph;
    int watches; /* the shim tells orders */
    cut_kind armed;
    cut_device *devices[CUT_DEVICES_MAX]; /* that are open */
    void (*delay)(cut_stream *stream, uint64_t ns);
    void (*delay_end)(cut_stream *stream); /* frees `slow` */
} cut;

static inline cut_device *cut_device_of(qe_device *device) { return (cut_device *)(void *)device; }
static inline cut_stream *cut_stream_of(qe_stream *stream) { return (cut_stream *)(void *)stream; }
static inline cut_event *cut_event_of(qe_event *event) { return (cut_event *)(void *)event; }
static inline cut_graph *cut_graph_of(qe_graph *graph) { return (cut_graph *)(void *)graph; }

static inline void *cut_alloc(size_t bytes) {
    void *memory = calloc(1, bytes);
    QE_ASSERT(memory != NULL);
    return memory;
}

/* What is armed, from the next command of the team on. */
static inline void cut_arm(cut_kind kind) {
    cut.armed = kind;
    for (int i = 0; i < CUT_DEVICES_MAX; i++) {
        if (cut.devices[i] == NULL) continue;
        cut.devices[i]->drained = 0;
        cut.devices[i]->dropped = 0;
    }
}

static inline uint64_t cut_dropped(void) {
    uint64_t sum = 0;
    for (int i = 0; i < CUT_DEVICES_MAX; i++)
        if (cut.devices[i] != NULL) sum += cut.devices[i]->dropped;
    return sum;
}

/* SplitMix64. */
static inline uint64_t cut_random(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* Every op waits for up to its stream's own time; compute has hundreds of ops a step, others a few. Seed 0: none. */
static inline void cut_delays(uint64_t seed) {
    static const uint64_t levels[] = {0, 1, 16, 256};
    enum { BASE_NS = 4000, COMPUTE_LEVELS = 3, LEVELS = 4 };
    for (uint32_t i = 0; i < CUT_DEVICES_MAX; i++) {
        cut_device *device = cut.devices[i];
        if (device == NULL) continue;
        device->random = seed * 1000 + i;
        for (int role = 0; role < CUT_ROLES; role++) {
            uint64_t level = cut_random(&device->random) % (role == CUT_COMPUTE ? COMPUTE_LEVELS : LEVELS);
            device->delay_max_ns[role] = seed == 0 ? 0 : levels[level] * BASE_NS;
        }
    }
}

static inline void cut_delay(cut_stream *stream) {
    uint64_t most = stream->device->delay_max_ns[stream->role];
    if (most == 0 || stream->device->recording) return;
    cut.delay(stream, cut_random(&stream->device->random) % (most + 1));
}

/* What may be touched, by the address of the op. */
static inline cut_declared **cut_declared_at(cut_device *device, const qe_op *op) {
    cut_declared **at = &device->declared[((uintptr_t)op >> 4) % CUT_BUCKETS];
    while (*at != NULL && (*at)->op != op) at = &(*at)->next;
    return at;
}

static inline void cut_declared_forget(cut_declared **at) {
    cut_declared *gone = *at;
    if (gone == NULL) return;
    *at = gone->next;
    free(gone);
}

static inline void cut_touched_add(cut_touched *touched, const qe_range *ranges, size_t count) {
    if (count == 0) return;
    if (touched->count + count > touched->capacity) {
        touched->capacity = 2 * (touched->count + count);
        touched->ranges = realloc(touched->ranges, touched->capacity * sizeof *ranges);
        QE_ASSERT(touched->ranges != NULL);
    }
    memcpy(touched->ranges + touched->count, ranges, count * sizeof *ranges);
    touched->count += count;
}

static inline qe_status cut_told(cut_device *device, qe_status status, const qe_breach *found) {
    if (status != QE_CONTRACT) return status;
    if (!device->breached) device->breach = *found;
    device->breached = 1;
    return QE_CONTRACT;
}

static inline qe_status cut_tell(cut_device *device, uint32_t stream, const char *what, const qe_range *ranges,
                                 size_t count) {
    qe_breach found;
    if (device->order == NULL || device->recording) return QE_OK;
    return cut_told(device, qe_order_access(device->order, stream, what, ranges, count, &found), &found);
}

static inline qe_status cut_tell_op(cut_stream *stream, const qe_op *op) {
    const cut_declared *declared = *cut_declared_at(stream->device, op);
    if (declared == NULL) return QE_OK;
    if (stream->device->recording) cut_touched_add(&stream->device->recorded, declared->ranges, declared->count);
    return cut_tell(stream->device, stream->place, qe_op_name(op->kind), declared->ranges, declared->count);
}

static inline qe_status cut_tell_host(cut_device *device, const void *at, size_t bytes, int write) {
    qe_range range = {.at = (void *)(uintptr_t)at, .bytes = bytes, .read = !write, .write = write != 0};
    return cut_tell(device, QE_NONE, "the host", &range, 1);
}

/* ---- devices ---- */

static inline qe_status cut_open(qe_device **device_out, qe_error *error_out) {
    qe_device *inner = NULL;
    uint32_t index = 0;
    QE_TRY(cut.inner->open(&inner, error_out));
    cut_device *device = cut_alloc(sizeof *device);
    while (cut.devices[index] != NULL) index++;
    QE_ASSERT(index < CUT_DEVICES_MAX);
    device->inner = inner;
    device->index = index;
    cut.devices[index] = device;
    *device_out = (qe_device *)(void *)device;
    return cut.watches ? qe_order_create(&device->order, error_out) : QE_OK;
}

static inline void cut_stream_free(cut_stream *stream) {
    cut.inner->stream->destroy(stream->inner);
    if (cut.delay_end != NULL) cut.delay_end(stream);
    free(stream);
}

static inline void cut_close(qe_device *opaque) {
    cut_device *device = cut_device_of(opaque);
    if (device->astray != NULL) cut_stream_free(device->astray);
    if (device->fork != NULL) cut.inner->stream->event_destroy(device->fork);
    cut.inner->close(device->inner);
    qe_order_destroy(device->order);
    for (int i = 0; i < CUT_BUCKETS; i++)
        while (device->declared[i] != NULL) cut_declared_forget(&device->declared[i]);
    free(device->recorded.ranges);
    cut.devices[device->index] = NULL;
    free(device);
}

static inline const char *cut_identity(const qe_device *device) {
    return cut.inner->identity(((const cut_device *)(const void *)device)->inner);
}
static inline qe_status cut_run(qe_device *device, const qe_op *op, qe_error *error_out) {
    return cut.inner->run(cut_device_of(device)->inner, op, error_out);
}
static inline qe_status cut_prepare(qe_device *device, const qe_op *op, qe_error *error_out) {
    return cut.inner->prepare(cut_device_of(device)->inner, op, error_out);
}

static inline int cut_breach(qe_device *opaque, qe_breach *breach_out) {
    cut_device *device = cut_device_of(opaque);
    if (!device->breached) return cut.inner->breach(device->inner, breach_out);
    *breach_out = device->breach;
    device->breached = 0;
    return 1;
}

static inline qe_status cut_declare(qe_device *opaque, const qe_op *op, const qe_range *ranges, size_t count,
                                    qe_error *error_out) {
    cut_device *device = cut_device_of(opaque);
    device->bound = 1;
    QE_TRY(cut.inner->declare(device->inner, op, ranges, count, error_out));
    if (device->order == NULL) return QE_OK;
    cut_declared **at = cut_declared_at(device, op);
    cut_declared_forget(at);
    if (count == 0) return QE_OK;
    cut_declared *declared = cut_alloc(sizeof *declared + count * sizeof *ranges);
    declared->op = op;
    declared->count = count;
    memcpy(declared->ranges, ranges, count * sizeof *ranges);
    declared->next = *at;
    *at = declared;
    return QE_OK;
}

/* ---- memory ---- */

static inline qe_status cut_memory_alloc(qe_device *device, size_t bytes, void **address_out, qe_error *error_out) {
    return cut.inner->memory->alloc(cut_device_of(device)->inner, bytes, address_out, error_out);
}
static inline void cut_memory_release(qe_device *device, void *address) {
    cut.inner->memory->release(cut_device_of(device)->inner, address);
}
static inline qe_status cut_host_alloc(qe_device *device, size_t bytes, void **address_out, qe_error *error_out) {
    return cut.inner->memory->host_alloc(cut_device_of(device)->inner, bytes, address_out, error_out);
}
static inline void cut_host_release(qe_device *device, void *address) {
    cut.inner->memory->host_release(cut_device_of(device)->inner, address);
}
static inline qe_status cut_write(qe_device *device, void *to, const void *from, size_t bytes, qe_error *error_out) {
    QE_TRY(cut_tell_host(cut_device_of(device), to, bytes, 1));
    return cut.inner->memory->write(cut_device_of(device)->inner, to, from, bytes, error_out);
}
static inline qe_status cut_read(qe_device *device, void *to, const void *from, size_t bytes, qe_error *error_out) {
    QE_TRY(cut_tell_host(cut_device_of(device), from, bytes, 0));
    return cut.inner->memory->read(cut_device_of(device)->inner, to, from, bytes, error_out);
}

/* ---- streams ---- */

static inline cut_role cut_role_of(const char *name) {
    static const struct {
        const char *prefix;
        cut_role role;
    } names[] = {{"caller", CUT_CALLER}, {"compute", CUT_COMPUTE}, {"send_", CUT_SEND}, {"recv_", CUT_RECV}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strncmp(name, names[i].prefix, strlen(names[i].prefix)) == 0) return names[i].role;
    return CUT_ASTRAY;
}

static inline qe_status cut_stream_add(cut_device *device, const char *name, cut_stream **stream_out,
                                       qe_error *error_out) {
    qe_stream *inner = NULL;
    qe_status status = cut.inner->stream->create(device->inner, name, &inner, error_out);
    if (status != QE_OK) return status;
    cut_stream *stream = cut_alloc(sizeof *stream);
    *stream = (cut_stream){.device = device, .inner = inner, .role = cut_role_of(name)};
    qe_stream_role role = stream->role == CUT_CALLER ? QE_STREAM_CALLER : QE_STREAM_COMPUTE;
    if (device->order != NULL) status = qe_order_add_stream(device->order, name, role, &stream->place, error_out);
    *stream_out = stream;
    return status;
}

static inline qe_status cut_stream_create(qe_device *opaque, const char *name, qe_stream **stream_out,
                                          qe_error *error_out) {
    cut_device *device = cut_device_of(opaque);
    cut_stream *stream = NULL;
    device->bound = 0;
    if (device->astray == NULL) {
        QE_TRY(cut_stream_add(device, "astray", &device->astray, error_out));
        QE_TRY(cut.inner->stream->event_create(device->inner, &device->fork, error_out));
    }
    QE_TRY(cut_stream_add(device, name, &stream, error_out));
    *stream_out = (qe_stream *)(void *)stream;
    return QE_OK;
}

static inline void cut_stream_destroy(qe_stream *stream) {
    if (stream != NULL) cut_stream_free(cut_stream_of(stream));
}

/* While a graph is recorded the stream has to take part in it: it leaves compute, and does not come back. */
static inline qe_status cut_stray(cut_stream *from) {
    cut_device *device = from->device;
    device->dropped++;
    if (!device->recording || device->forked) return QE_OK;
    device->forked = 1;
    QE_TRY(cut.inner->stream->record(from->inner, device->fork));
    return cut.inner->stream->wait(device->astray->inner, device->fork);
}

static inline int cut_goes_astray(const cut_stream *stream, const qe_op *op) {
    if (stream->role != CUT_COMPUTE) return 0;
    return (cut.armed == CUT_FOLD && op->kind == QE_OP_FOLD) || (cut.armed == CUT_COMMIT && op->kind == QE_OP_ADAMW);
}

static inline qe_status cut_submit(qe_stream *opaque, const qe_op *op) {
    cut_stream *stream = cut_stream_of(opaque);
    if (cut_goes_astray(stream, op)) {
        QE_TRY(cut_stray(stream));
        stream = stream->device->astray;
    }
    cut_delay(stream);
    QE_TRY(cut_tell_op(stream, op));
    return cut.inner->stream->submit(stream->inner, op);
}

static inline qe_status cut_event_create(qe_device *opaque, qe_event **event_out, qe_error *error_out) {
    cut_device *device = cut_device_of(opaque);
    qe_event *inner = NULL;
    QE_TRY(cut.inner->stream->event_create(device->inner, &inner, error_out));
    cut_event *event = cut_alloc(sizeof *event);
    event->inner = inner;
    event->planned = !device->bound; /* those of the plan are made before its ops are bound */
    if (device->order != NULL) event->place = qe_order_add_event(device->order);
    *event_out = (qe_event *)(void *)event;
    return QE_OK;
}

static inline void cut_event_destroy(qe_event *event) {
    if (event == NULL) return;
    cut.inner->stream->event_destroy(cut_event_of(event)->inner);
    free(event);
}

static inline int cut_is_told(const cut_device *device) { return device->order != NULL && !device->recording; }

static inline qe_status cut_record(qe_stream *opaque, qe_event *event) {
    cut_stream *stream = cut_stream_of(opaque);
    cut_event_of(event)->recorder = stream->role;
    if (cut_is_told(stream->device))
        QE_TRY(qe_order_record(stream->device->order, stream->place, cut_event_of(event)->place));
    return cut.inner->stream->record(stream->inner, cut_event_of(event)->inner);
}

static inline int cut_leaves_out(const cut_stream *waiter, const cut_event *event) {
    const cut_row *row = &cut_rows[cut.armed];
    if (cut.armed == CUT_LANE)
        return !event->planned && waiter->role == CUT_COMPUTE &&
               (event->recorder == CUT_SEND || event->recorder == CUT_RECV);
    return event->planned && row->waiter == waiter->role && row->recorder == event->recorder;
}

static inline qe_status cut_wait(qe_stream *opaque, qe_event *event) {
    cut_stream *stream = cut_stream_of(opaque);
    if (cut_leaves_out(stream, cut_event_of(event))) {
        stream->device->dropped++;
        return QE_OK;
    }
    if (cut_is_told(stream->device))
        QE_TRY(qe_order_wait(stream->device->order, stream->place, cut_event_of(event)->place));
    return cut.inner->stream->wait(stream->inner, cut_event_of(event)->inner);
}

static inline qe_status cut_event_sync(qe_event *event, qe_error *error_out) {
    return cut.inner->stream->event_sync(cut_event_of(event)->inner, error_out);
}

/* The first sync of compute since it was armed: whoever gives a step up has to be able to drain. */
static inline int cut_is_skipped(cut_stream *stream) {
    if (cut.armed != CUT_DRAIN || stream->role != CUT_COMPUTE || stream->device->drained) return 0;
    return stream->device->drained = 1;
}

static inline qe_status cut_sync(qe_stream *opaque, qe_error *error_out) {
    cut_stream *stream = cut_stream_of(opaque);
    if (cut_is_skipped(stream)) {
        stream->device->dropped++;
        return QE_OK;
    }
    qe_status status = cut.inner->stream->sync(stream->inner, error_out);
    if (cut_is_told(stream->device)) QE_TRY(qe_order_sync(stream->device->order, stream->place));
    return status;
}

/* Waits for what went astray. */
static inline void cut_settle(void) {
    qe_error ignored;
    for (int i = 0; i < CUT_DEVICES_MAX; i++)
        if (cut.devices[i] != NULL && cut.devices[i]->astray != NULL)
            (void)cut_sync((qe_stream *)(void *)cut.devices[i]->astray, &ignored);
}

/* ---- graphs ---- */

static inline qe_status cut_graph_begin(qe_stream *opaque, qe_error *error_out) {
    cut_stream *stream = cut_stream_of(opaque);
    QE_TRY(cut.inner->graph->begin(stream->inner, error_out));
    stream->device->recording = 1;
    stream->device->forked = 0;
    stream->device->recorded.count = 0;
    return QE_OK;
}

static inline qe_status cut_graph_end(qe_stream *opaque, qe_graph **graph_out, qe_error *error_out) {
    cut_stream *stream = cut_stream_of(opaque);
    qe_graph *inner = NULL;
    qe_status status = cut.inner->graph->end(stream->inner, &inner, error_out);
    stream->device->recording = 0;
    if (status != QE_OK) return status;
    cut_graph *graph = cut_alloc(sizeof *graph);
    graph->device = stream->device;
    graph->inner = inner;
    cut_touched_add(&graph->touched, stream->device->recorded.ranges, stream->device->recorded.count);
    *graph_out = (qe_graph *)(void *)graph;
    return QE_OK;
}

static inline void cut_graph_abandon(qe_stream *opaque) {
    cut_stream *stream = cut_stream_of(opaque);
    stream->device->recording = 0;
    cut.inner->graph->abandon(stream->inner);
}

static inline qe_status cut_graph_launch(qe_graph *opaque, qe_stream *on) {
    cut_graph *graph = cut_graph_of(opaque);
    cut_stream *stream = cut_stream_of(on);
    cut_delay(stream);
    QE_TRY(cut_tell(graph->device, stream->place, "graph", graph->touched.ranges, graph->touched.count));
    return cut.inner->graph->launch(graph->inner, stream->inner);
}

static inline void cut_graph_destroy(qe_graph *opaque) {
    cut_graph *graph = cut_graph_of(opaque);
    if (graph == NULL) return;
    cut.inner->graph->destroy(graph->inner);
    free(graph->touched.ranges);
    free(graph);
}

static inline qe_graph_info cut_graph_info(const qe_graph *graph) {
    return cut.inner->graph->info(((const cut_graph *)(const void *)graph)->inner);
}

/* The tables around `inner`; `watches`: the shim looks because inner does not. */
static inline const qe_backend *cut_backend(const qe_backend *inner, int watches) {
    cut.inner = inner;
    cut.watches = watches;
    cut.armed = CUT_NONE;
    cut.memory = (qe_memory_ops){sizeof(qe_memory_ops), cut_memory_alloc, cut_memory_release, cut_host_alloc,
                                 cut_host_release, cut_write, cut_read};
    cut.stream = (qe_stream_ops){sizeof(qe_stream_ops), cut_stream_create, cut_stream_destroy, cut_submit,
                                 cut_event_create, cut_event_destroy, cut_record, cut_wait, cut_event_sync, cut_sync};
    cut.graph = (qe_graph_ops){sizeof(qe_graph_ops), cut_graph_begin, cut_graph_end, cut_graph_abandon,
                               cut_graph_launch, cut_graph_destroy, cut_graph_info};
    cut.backend = (qe_backend){.size = sizeof(qe_backend), .name = inner->name, .numerics = inner->numerics,
                               .open = cut_open, .close = cut_close, .identity = cut_identity, .memory = &cut.memory,
                               .stream = &cut.stream, .graph = &cut.graph, .run = cut_run, .prepare = cut_prepare,
                               .breach = cut_breach, .declare = cut_declare};
    return &cut.backend;
}

#endif
