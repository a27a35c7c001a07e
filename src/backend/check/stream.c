/* stream.c - a stream is a thread that runs what it is given, in order, on the inner device; ops are judged while
 * nothing else of the device runs but transfers. */
#include <stdlib.h>
#include <string.h>

#include "backend/check/check.h"
#include "base/assert.h"

static void wait_changed(qe_device *device) { pthread_cond_wait(&device->changed, &device->lock); }

void qe_check_note(qe_stream *stream, const qe_error *error) {
    if (stream->failure.status == QE_OK) stream->failure = *error;
}

static int is_transfer(const qe_op *op) { return op->kind == QE_OP_SEND || op->kind == QE_OP_RECV; }

/* The other end may be behind in its own order: the device goes on meanwhile. */
static void transfer(qe_stream *stream, const qe_op *op) {
    qe_device *device = stream->device;
    qe_error error = {.status = QE_OK};
    stream->flying = (qe_range){.at = op->args.transfer.bytes_at, .bytes = op->args.transfer.bytes};
    device->counts.transfers++;
    pthread_mutex_unlock(&device->lock);
    const qe_status status = device->inner_backend->run(device->inner, op, &error);
    pthread_mutex_lock(&device->lock);
    stream->flying.bytes = 0;
    if (status != QE_OK) qe_check_note(stream, &error);
}

static qe_status run_op(const check_run *run, qe_error *error_out) {
    return run->device->inner_backend->run(run->device->inner, run->op, error_out);
}

qe_status qe_check_op(qe_device *device, const qe_op *op, qe_error *error_out) {
    const check_declaration *declared = qe_check_find(device, op);
    if (!declared)
        return qe_error_set(error_out, QE_ERROR_DEVICE, "declare what it touches when it is bound",
                            "%s (layer %u) declared nothing", qe_op_name(op->kind), op->layer);
    while (device->passing > 0) wait_changed(device);
    const check_run run = {.run = run_op, .device = device, .op = op};
    device->counts.ops++;
    return qe_check_judge(&run, declared, error_out);
}

static void run_item(qe_stream *stream, const check_item *item) {
    qe_error error = {.status = QE_OK};
    switch (item->kind) {
    case ITEM_WAIT:
        while (item->what.progress->done < item->position) wait_changed(stream->device);
        break;
    case ITEM_LAUNCH: qe_check_launch_now(stream, item->what.graph); break;
    case ITEM_OP:
        if (is_transfer(item->what.op))
            transfer(stream, item->what.op);
        else if (qe_check_op(stream->device, item->what.op, &error) != QE_OK)
            qe_check_note(stream, &error);
        break;
    }
}

static void *stream_main(void *argument) {
    qe_stream *stream = argument;
    qe_device *device = stream->device;
    pthread_mutex_lock(&device->lock);
    for (;;) {
        while (stream->progress->done == stream->given && !stream->stop) wait_changed(device);
        if (stream->progress->done == stream->given) break;
        run_item(stream, &stream->items[stream->progress->done % CHECK_ITEMS]);
        stream->progress->done++;
        pthread_cond_broadcast(&device->changed);
    }
    pthread_mutex_unlock(&device->lock);
    return NULL;
}

void qe_check_put(qe_stream *stream, check_item item) {
    while (stream->given - stream->progress->done == CHECK_ITEMS) wait_changed(stream->device);
    stream->items[stream->given++ % CHECK_ITEMS] = item;
    pthread_cond_broadcast(&stream->device->changed);
}

static qe_stream *stream_allocate(qe_device *device) {
    qe_stream *stream = calloc(1, sizeof *stream);
    if (!stream) return NULL;
    stream->device = device;
    stream->progress = calloc(1, sizeof *stream->progress);
    if (stream->progress) return stream;
    free(stream);
    return NULL;
}

static void stream_free(qe_stream *stream) {
    free(stream->progress);
    free(stream);
}

static void stream_attach(qe_stream *stream) {
    qe_device *device = stream->device;
    pthread_mutex_lock(&device->lock);
    stream->next = device->streams;
    device->streams = stream;
    stream->progress->next = device->progresses;
    device->progresses = stream->progress;
    pthread_mutex_unlock(&device->lock);
}

static qe_status check_stream_create(qe_device *device, const char *name, qe_stream **stream_out,
                                     qe_error *error_out) {
    QE_TRY(qe_check_wrapped(device, error_out));
    qe_stream *stream = stream_allocate(device);
    if (!stream) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for stream '%s'", name);
    const qe_stream_ops *ops = device->inner_backend->stream;
    const qe_status status = ops->create(device->inner, name, &stream->inner, error_out);
    if (status != QE_OK) {
        stream_free(stream);
        return status;
    }
    if (pthread_create(&stream->thread, NULL, stream_main, stream) != 0) {
        ops->destroy(stream->inner);
        stream_free(stream);
        return qe_error_set(error_out, QE_ERROR_IO, "raise the limit of threads (ulimit -u) or use fewer ranks",
                            "the system refused a thread for stream '%s'", name);
    }
    stream_attach(stream);
    *stream_out = stream;
    return QE_OK;
}

static void check_stream_destroy(qe_stream *stream) {
    if (!stream) return;
    qe_device *device = stream->device;
    pthread_mutex_lock(&device->lock);
    stream->stop = 1;
    pthread_cond_broadcast(&device->changed);
    pthread_mutex_unlock(&device->lock);
    pthread_join(stream->thread, NULL);
    pthread_mutex_lock(&device->lock);
    qe_stream **link = &device->streams;
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    pthread_mutex_unlock(&device->lock);
    device->inner_backend->stream->destroy(stream->inner);
    free(stream); /* its progress is the device's */
}

static qe_status check_submit(qe_stream *stream, const qe_op *op) {
    qe_status status = QE_OK;
    pthread_mutex_lock(&stream->device->lock);
    if (stream->recording)
        status = qe_check_record_op(stream, op);
    else
        qe_check_put(stream, (check_item){.kind = ITEM_OP, .what.op = op});
    pthread_mutex_unlock(&stream->device->lock);
    return status;
}

static qe_status check_event_create(qe_device *device, qe_event **event_out, qe_error *error_out) {
    qe_event *event = calloc(1, sizeof *event);
    if (!event) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for an event");
    const qe_status status = device->inner_backend->stream->event_create(device->inner, &event->inner, error_out);
    if (status != QE_OK) {
        free(event);
        return status;
    }
    event->device = device;
    pthread_mutex_lock(&device->lock);
    event->next = device->events;
    device->events = event;
    pthread_mutex_unlock(&device->lock);
    *event_out = event;
    return QE_OK;
}

static void check_event_destroy(qe_event *event) {
    if (!event) return;
    qe_device *device = event->device;
    pthread_mutex_lock(&device->lock);
    qe_event **link = &device->events;
    while (*link != event) link = &(*link)->next;
    *link = event->next;
    device->inner_backend->stream->event_destroy(event->inner);
    pthread_mutex_unlock(&device->lock);
    free(event);
}

static qe_status check_record(qe_stream *stream, qe_event *event) {
    qe_status status = QE_OK;
    qe_device *device = stream->device;
    pthread_mutex_lock(&device->lock);
    if (stream->recording) {
        status = device->inner_backend->stream->record(stream->inner, event->inner);
        if (status == QE_OK) event->inside = device->recording_number;
    } else {
        event->inside = 0;
        event->progress = stream->progress;
        event->position = stream->given;
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}

/* A stream that waits for an event recorded inside joins the recording. The inner event knows no record outside. */
static qe_status wait_inside(qe_stream *stream, qe_event *event) {
    qe_graph *recording = stream->device->recording;
    if (!event->inside && event->progress) {
        recording->spoiled = 1;
        return QE_ERROR_ARGUMENT;
    }
    const qe_status status = stream->device->inner_backend->stream->wait(stream->inner, event->inner);
    if (status == QE_OK && recording && event->inside == stream->device->recording_number) stream->recording = 1;
    return status;
}

static qe_status check_wait(qe_stream *stream, qe_event *event) {
    qe_status status = QE_OK;
    pthread_mutex_lock(&stream->device->lock);
    if (stream->recording || event->inside)
        status = wait_inside(stream, event);
    else if (event->progress && event->progress != stream->progress)
        qe_check_put(stream, (check_item){ITEM_WAIT, event->position, {.progress = event->progress}});
    pthread_mutex_unlock(&stream->device->lock);
    return status;
}

static qe_status check_event_sync(qe_event *event, qe_error *error_out) {
    qe_status status = QE_OK;
    qe_device *device = event->device;
    pthread_mutex_lock(&device->lock);
    if (device->recording || event->inside)
        status = device->inner_backend->stream->event_sync(event->inner, error_out);
    else
        while (event->progress && event->progress->done < event->position) wait_changed(device);
    pthread_mutex_unlock(&device->lock);
    return status;
}

static qe_status check_sync(qe_stream *stream, qe_error *error_out) {
    qe_status status = QE_OK;
    qe_device *device = stream->device;
    pthread_mutex_lock(&device->lock);
    if (device->recording) {
        status = device->inner_backend->stream->sync(stream->inner, error_out);
    } else {
        while (stream->progress->done < stream->given) wait_changed(device);
        status = stream->failure.status;
        if (status != QE_OK && error_out) *error_out = stream->failure;
        stream->failure = (qe_error){.status = QE_OK};
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}

const qe_stream_ops qe_check_streams = {
    .size = sizeof(qe_stream_ops),
    .create = check_stream_create,
    .destroy = check_stream_destroy,
    .submit = check_submit,
    .event_create = check_event_create,
    .event_destroy = check_event_destroy,
    .record = check_record,
    .wait = check_wait,
    .event_sync = check_event_sync,
    .sync = check_sync,
};
