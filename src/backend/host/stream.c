/* stream.c - a stream is a thread that runs what one submitter puts into a ring, in order.
 *
 *   submitter --ring, `submitted` rises--> thread --`done` rises--> waiters, syncs, the submitter when the ring is full
 *
 * A record puts nothing into the ring: it notes how much the stream has been given. A wait carries that note to another
 * stream's ring, so a later record of the same event cannot change what an earlier wait waits for. A stream that
 * records puts nothing into its ring: recording.c notes what it is given. */
#include <stdio.h>
#include <stdlib.h>

#include "backend/host/graph.h"
#include "backend/host/recording.h"
#include "base/assert.h"
#include "base/lock.h"

enum { RING_ROOM = 64 };    /* a submitter that met a full ring sleeps until this much is free, not for every item */
enum { THREAD_NAME_BYTES = 16 }; /* Linux keeps 15 characters */

static void failure_note(qe_stream *stream, qe_status status, qe_op_kind kind) {
    if (status == QE_OK) return;
    if (atomic_load_explicit(&stream->failure, memory_order_relaxed) != QE_OK) return;
    atomic_store_explicit(&stream->failed_kind, (int)kind, memory_order_relaxed);
    atomic_store_explicit(&stream->failure, status, memory_order_relaxed);
}

static void lane_run(qe_stream *stream, const ring_item *item) {
    qe_op_kind kind = QE_OP_KINDS;
    const qe_status status = qe_host_lane_run(stream->device, item->what.lane, item->position, &kind);
    failure_note(stream, status, kind);
}

static void *stream_main(void *argument) {
    qe_stream *stream = argument;
    for (uint64_t done = 0;; ++done) {
        qe_host_counter_wait(&stream->submitted, done + 1);
        const ring_item *item = &stream->ring[done % RING_ITEMS];
        const item_kind kind = item->kind;
        if (kind == ITEM_OP) failure_note(stream, qe_host_op_run(stream->device, item->what.op), item->what.op->kind);
        if (kind == ITEM_WAIT) qe_host_counter_wait(&item->what.progress->done, item->position);
        if (kind == ITEM_LANE) lane_run(stream, item);
        qe_host_counter_raise(&stream->progress->done, done + 1);
        if (kind == ITEM_STOP) return NULL;
    }
}

void qe_host_item_submit(qe_stream *stream, ring_item item) {
    const uint64_t given = stream->given;
    if (given - qe_host_counter_get(&stream->progress->done) >= RING_ITEMS)
        qe_host_counter_wait(&stream->progress->done, given + RING_ROOM - RING_ITEMS);
    stream->ring[given % RING_ITEMS] = item;
    stream->given = given + 1;
    qe_host_counter_raise(&stream->submitted, given + 1);
}

static void progress_attach(qe_device *device, host_progress *progress) {
    pthread_mutex_lock(&device->lock);
    progress->next = device->progresses;
    device->progresses = progress;
    ++device->streams;
    pthread_mutex_unlock(&device->lock);
}

static host_progress *progress_create(void) {
    host_progress *progress = calloc(1, sizeof *progress);
    if (progress && qe_host_counter_init(&progress->done) == 0) return progress;
    free(progress);
    return NULL;
}

static void progress_destroy(host_progress *progress) {
    if (!progress) return;
    qe_host_counter_deinit(&progress->done);
    free(progress);
}

static qe_stream *stream_allocate(qe_device *device, const char *name) {
    qe_stream *stream = calloc(1, sizeof *stream);
    if (!stream) return NULL;
    stream->progress = progress_create();
    if (!stream->progress || qe_host_counter_init(&stream->submitted) != 0) {
        progress_destroy(stream->progress);
        free(stream);
        return NULL;
    }
    atomic_init(&stream->failure, QE_OK);
    atomic_init(&stream->failed_kind, 0);
    stream->device = device;
    snprintf(stream->name, sizeof stream->name, "%s", name);
    return stream;
}

/* Everything but the progress, which the device may own. */
static void stream_free(qe_stream *stream) {
    qe_host_counter_deinit(&stream->submitted);
    free(stream);
}

static qe_status host_stream_create(qe_device *device, const char *name, qe_stream **stream_out, qe_error *error_out) {
    qe_stream *stream = stream_allocate(device, name);
    if (!stream)
        return qe_error_set(error_out, QE_ERROR_MEMORY, "free memory and try again", "no memory for stream '%s'", name);
    const int refused = pthread_create(&stream->thread, NULL, stream_main, stream);
    if (refused) {
        progress_destroy(stream->progress);
        stream_free(stream);
        return qe_error_set(error_out, QE_ERROR_IO,
                            "raise the limits of threads and memory (ulimit -u, -v) or use fewer ranks",
                            "the system refused a thread for stream '%s' (error %d)", name, refused);
    }
    char short_name[THREAD_NAME_BYTES];
    snprintf(short_name, sizeof short_name, "%s", name);
    pthread_setname_np(stream->thread, short_name);
    progress_attach(device, stream->progress);
    *stream_out = stream;
    return QE_OK;
}

static void host_stream_destroy(qe_stream *stream) {
    if (!stream) return;
    qe_host_recording_leave(stream);
    qe_host_item_submit(stream, (ring_item){.kind = ITEM_STOP});
    pthread_join(stream->thread, NULL);
    pthread_mutex_lock(&stream->device->lock);
    QE_ASSERT(stream->device->streams > 0);
    --stream->device->streams;
    pthread_mutex_unlock(&stream->device->lock);
    stream_free(stream);
}

static qe_status host_submit(qe_stream *stream, const qe_op *op) {
    if (stream->recording) return qe_host_recording_submit(stream, op);
    qe_host_item_submit(stream, (ring_item){.kind = ITEM_OP, .what.op = op});
    return QE_OK;
}

static event_state event_state_of(const qe_event *event) {
    return atomic_load_explicit(&event->state, memory_order_relaxed);
}

static qe_status host_event_create(qe_device *device, qe_event **event_out, qe_error *error_out) {
    qe_event *event = calloc(1, sizeof *event);
    if (!event || qe_lock_init(&event->lock, NULL, NULL) != 0) {
        free(event);
        return qe_error_set(error_out, QE_ERROR_MEMORY, "free memory and try again", "no memory for an event");
    }
    atomic_init(&event->state, EVENT_PLAIN);
    event->device = device;
    *event_out = event;
    return QE_OK;
}

static void host_event_destroy(qe_event *event) {
    if (!event) return;
    if (event_state_of(event) == EVENT_INSIDE) qe_host_recording_forget(event);
    pthread_mutex_destroy(&event->lock);
    free(event);
}

static qe_status host_record(qe_stream *stream, qe_event *event) {
    if (stream->recording) return qe_host_recording_record(stream, event);
    if (event_state_of(event) != EVENT_PLAIN) qe_host_recording_forget(event);
    pthread_mutex_lock(&event->lock);
    event->progress = stream->progress;
    event->position = stream->given;
    pthread_mutex_unlock(&event->lock);
    return QE_OK;
}

host_progress *qe_host_event_read(qe_event *event, uint64_t *position_out) {
    pthread_mutex_lock(&event->lock);
    host_progress *progress = event->progress;
    *position_out = event->position;
    pthread_mutex_unlock(&event->lock);
    return progress;
}

static qe_status host_wait(qe_stream *stream, qe_event *event) {
    if (stream->recording || event_state_of(event) != EVENT_PLAIN) return qe_host_recording_wait(stream, event);
    uint64_t position;
    host_progress *progress = qe_host_event_read(event, &position);
    if (!progress || progress == stream->progress) return QE_OK; /* its own past: the ring's order says it already */
    qe_host_item_submit(stream, (ring_item){.kind = ITEM_WAIT, .what.progress = progress, .position = position});
    return QE_OK;
}

static qe_status host_event_sync(qe_event *event, qe_error *error_out) {
    QE_TRY(qe_host_recording_forbid(event->device, "a sync of an event", NULL, error_out));
    if (event_state_of(event) != EVENT_PLAIN)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "record it again outside a recording",
                            "the event was last recorded inside a recording");
    uint64_t position;
    host_progress *progress = qe_host_event_read(event, &position);
    if (progress) qe_host_counter_wait(&progress->done, position);
    return QE_OK;
}

static qe_status host_sync(qe_stream *stream, qe_error *error_out) {
    QE_TRY(qe_host_recording_forbid(stream->device, "a sync", stream->name, error_out));
    qe_host_counter_wait(&stream->progress->done, stream->given);
    const qe_status failure = atomic_load_explicit(&stream->failure, memory_order_relaxed);
    if (failure == QE_OK) return QE_OK;
    const qe_op_kind kind = (qe_op_kind)atomic_load_explicit(&stream->failed_kind, memory_order_relaxed);
    atomic_store_explicit(&stream->failure, QE_OK, memory_order_relaxed);
    return qe_host_op_error(failure, kind, error_out);
}

const qe_stream_ops qe_host_streams = {
    .size = sizeof(qe_stream_ops),
    .create = host_stream_create,
    .destroy = host_stream_destroy,
    .submit = host_submit,
    .event_create = host_event_create,
    .event_destroy = host_event_destroy,
    .record = host_record,
    .wait = host_wait,
    .event_sync = host_event_sync,
    .sync = host_sync,
};
