/* stream.c - streams and events. */
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "backend/cuda/device.h"
#include "base/assert.h"

static void stream_destroy(qe_stream *stream) {
    if (stream == NULL) return;
    qe_device *device = stream->device;
    qe_cuda_parked_settle(stream, 0);
    (void)cudaStreamSynchronize(stream->stream);
    device->streams--;
    if (--stream->users > 0) return;
    qe_stream **link = &device->first_stream;
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    (void)cudaStreamDestroy(stream->stream);
    free(stream);
}

/* A missing edge with the caller's stream has rules of its own. */
static qe_stream_role role_of(const char *name) {
    return strcmp(name, "caller") == 0 ? QE_STREAM_CALLER : QE_STREAM_COMPUTE;
}

static qe_status stream_make(qe_device *device, const char *name, qe_stream **stream_out, qe_error *error_out) {
    qe_stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for stream '%s'", name);
    qe_status status = qe_cuda_check(cudaStreamCreateWithFlags(&stream->stream, cudaStreamNonBlocking), name,
                                     error_out);
    if (status != QE_OK) {
        free(stream);
        return status;
    }
    stream->device = device;
    stream->next = device->first_stream;
    device->first_stream = stream;
    snprintf(stream->name, sizeof stream->name, "%s", name);
    *stream_out = stream;
    return QE_OK;
}

/* Training and evaluation take turns and name their streams alike, so they share them: a device has few connections,
 * and streams that share one wait for each other. */
static qe_status stream_create(qe_device *device, const char *name, qe_stream **stream_out, qe_error *error_out) {
    qe_status status = QE_OK;
    qe_stream *stream = device->first_stream;
    while (stream != NULL && strcmp(stream->name, name) != 0) stream = stream->next;
    if (stream == NULL) QE_TRY(stream_make(device, name, &stream, error_out));
    device->streams++;
    if (stream->users++ == 0 && device->order != NULL)
        status = qe_order_add_stream(device->order, name, role_of(name), &stream->place, error_out);
    if (status != QE_OK) {
        stream_destroy(stream);
        return status;
    }
    *stream_out = stream;
    return QE_OK;
}

static qe_status transfer_queue(qe_stream *stream, const qe_op *op, int *is_run_out) {
    const qe_args_transfer *args = &op->args.transfer;
    stream->transfers = 1;
    if (stream->device->recording == NULL)
        return qe_cuda_channel_try(stream->device, op, stream->stream, is_run_out, &stream->aborted);
    return qe_cuda_channel_queue(args->channel, op->kind, args->bytes_at, args->bytes, stream->stream,
                                 &stream->aborted);
}

static qe_status op_queue(qe_stream *stream, const qe_op *op, int *is_run_out) {
    if (op->kind == QE_OP_SEND || op->kind == QE_OP_RECV) return transfer_queue(stream, op, is_run_out);
    return qe_cuda_op_queue(stream->device, op, stream->stream);
}

/* An op of a recording failed. Where nobody put it in words, as with transfers, the runtime does. */
static void op_refused(const qe_device *device, const qe_op *op, qe_status status) {
    qe_error *refusal = &device->recording->refusal;
    if (refusal->status != QE_OK) return;
    if (device->failure.status != QE_OK) {
        *refusal = device->failure;
        return;
    }
    const cudaError_t code = cudaGetLastError();
    qe_error_set(refusal, status, NULL, "%s could not be queued: %s", qe_op_name(op->kind),
                 code == cudaSuccess ? "its kernels were refused" : cudaGetErrorString(code));
}

qe_status qe_cuda_stream_op(qe_stream *stream, const qe_op *op, int *is_run_out) {
    qe_device *device = stream->device;
    if (device->recording != NULL) QE_TRY(qe_cuda_claim_begin(device->recording));
    int marks = device->timeline != NULL && device->recording == NULL;
    if (device->nvtx) nvtxRangePushA(qe_op_name(op->kind));
    if (marks) qe_cuda_timeline_begin(device->timeline, qe_op_name(op->kind), stream->name, stream->stream);
    qe_status status = op_queue(stream, op, is_run_out);
    if (marks && *is_run_out) qe_cuda_timeline_end(device->timeline, stream->stream); /* else it is begun anew */
    if (status == QE_OK && device->recording != NULL) status = qe_cuda_claim_end(device->recording, op);
    if (status != QE_OK && device->recording != NULL) op_refused(device, op, status);
    if (device->nvtx) nvtxRangePop();
    return status;
}

static qe_status stream_submit(qe_stream *stream, const qe_op *op) {
    QE_TRY(qe_cuda_watch_op(stream->device, stream->place, op));
    return qe_cuda_stream_give(stream, (cuda_command){.kind = CUDA_COMMAND_OP, .op = op});
}

static qe_status event_create(qe_device *device, qe_event **event_out, qe_error *error_out) {
    qe_event *event = calloc(1, sizeof *event);
    if (event == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for an event");
    qe_status status =
        qe_cuda_check(cudaEventCreateWithFlags(&event->event, cudaEventDisableTiming), "an event", error_out);
    if (status != QE_OK) {
        free(event);
        return status;
    }
    event->device = device;
    if (device->order != NULL) event->place = qe_order_add_event(device->order);
    *event_out = event;
    return QE_OK;
}

static void event_destroy(qe_event *event) {
    if (event == NULL) return;
    if (event->device->parked > 0) qe_cuda_parked_settle_all(event->device); /* some may wait for it */
    (void)cudaEventDestroy(event->event);
    free(event);
}

/* While a graph is recorded nothing runs. */
static int watched(const qe_device *device) {
    return device->order != NULL && device->recording == NULL;
}

/* What could not be queued is told at the next sync, or by the end of the recording. */
qe_status qe_cuda_queued(qe_device *device, cudaError_t code, const char *what) {
    if (code == cudaSuccess) return QE_OK;
    qe_error ignored, *told = device->recording != NULL ? &device->recording->refusal : &device->failure;
    return qe_cuda_check(code, what, told->status == QE_OK ? told : &ignored);
}

static qe_status stream_record(qe_stream *stream, qe_event *event) {
    if (watched(stream->device)) QE_TRY(qe_order_record(stream->device->order, stream->place, event->place));
    if (stream->device->recording == NULL) event->given++;
    return qe_cuda_stream_give(stream, (cuda_command){CUDA_COMMAND_RECORD, event->given, {.event = event}});
}

static qe_status stream_wait(qe_stream *stream, qe_event *event) {
    if (watched(stream->device)) QE_TRY(qe_order_wait(stream->device->order, stream->place, event->place));
    return qe_cuda_stream_give(stream, (cuda_command){CUDA_COMMAND_WAIT, event->given, {.event = event}});
}

static qe_status event_sync(qe_event *event, qe_error *error_out) {
    if (event->recorded < event->given) qe_cuda_parked_settle_all(event->device);
    return qe_cuda_check(cudaEventSynchronize(event->event), "an event", error_out);
}

static qe_status stream_sync(qe_stream *stream, qe_error *error_out) {
    qe_device *device = stream->device;
    qe_cuda_parked_settle(stream, 0);
    cudaError_t code = cudaStreamSynchronize(stream->stream);
    if (code != cudaSuccess) return qe_cuda_check(code, stream->name, error_out);
    if (watched(device)) QE_TRY(qe_order_sync(device->order, stream->place));
    if (device->failure.status != QE_OK) {
        device->failure.status = QE_ERROR_DEVICE; /* whatever it was for the call that queued it */
        if (error_out != NULL) *error_out = device->failure;
        device->failure.status = QE_OK;
        return QE_ERROR_DEVICE;
    }
    int interrupted = stream->transfers && stream->aborted != NULL && *(const volatile int *)stream->aborted;
    stream->transfers = 0;
    if (!interrupted) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_INTERRUPTED, NULL, "a transfer was interrupted: the transport was aborted");
}

const qe_stream_ops qe_cuda_streams = {
    .size = sizeof(qe_stream_ops),
    .create = stream_create,
    .destroy = stream_destroy,
    .submit = stream_submit,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .record = stream_record,
    .wait = stream_wait,
    .event_sync = event_sync,
    .sync = stream_sync,
};
