/* parked.c - what a stream was given and the GPU was not yet.
 *
 * A GPU has few connections (32 at most, how streams share them is not told), and each hands over its work in order.
 * Whatever waits on the GPU for work that is queued later, a message's kernel for its sender, say, can stand before
 * that very work in a connection, for ever. So nothing is queued here before what it waits for: a transfer whose other
 * end is not queued, and a wait for a record that is not, are parked in the stream with all that follows, and queued
 * when that has come. What is queued then is in an order that any sharing of connections can do.
 *
 * Only recordings are exempt, since nothing runs there: a message in a captured graph waits on the GPU (world.c). */
#include <stdlib.h>
#include "backend/cuda/device.h"
#include "base/assert.h"

static qe_status record_run(qe_stream *stream, const cuda_command *command) {
    qe_event *event = command->event;
    cudaError_t code = cudaEventRecord(event->event, stream->stream);
    if (stream->device->recording == NULL) event->recorded = command->record;
    return qe_cuda_queued(stream->device, code, "the record of an event");
}

static qe_status wait_run(qe_stream *stream, const cuda_command *command, int *is_run_out) {
    if (stream->device->recording == NULL && command->event->recorded < command->record) {
        *is_run_out = 0;
        return QE_OK;
    }
    return qe_cuda_queued(stream->device, cudaStreamWaitEvent(stream->stream, command->event->event, 0),
                          "the wait for an event");
}

static qe_status command_run(qe_stream *stream, const cuda_command *command, int *is_run_out) {
    *is_run_out = 1;
    switch (command->kind) {
        case CUDA_COMMAND_OP: return qe_cuda_stream_op(stream, command->op, is_run_out);
        case CUDA_COMMAND_RECORD: return record_run(stream, command);
        case CUDA_COMMAND_WAIT: return wait_run(stream, command, is_run_out);
        case CUDA_COMMAND_LAUNCH: return qe_cuda_graph_queue(command->graph, stream);
    }
    QE_ASSERT(!"a command of another kind");
    return QE_ERROR_ARGUMENT;
}

/* Queues what can be queued of one stream. Returns how many. */
static uint32_t stream_pump(qe_stream *stream) {
    qe_device *device = stream->device;
    uint32_t begin = stream->parked_count;
    int is_run = 1;
    while (stream->parked_count > 0) {
        qe_status status = command_run(stream, &stream->parked[stream->parked_first % CUDA_PARKED_MAX], &is_run);
        if (!is_run) break;
        stream->parked_first++;
        stream->parked_count--;
        device->parked--;
        /* The call that gave it has returned: told at the next sync, as what the GPU itself says. */
        if (status != QE_OK && device->failure.status == QE_OK)
            (void)qe_error_set(&device->failure, QE_ERROR_DEVICE, NULL, "stream '%s' could not be given its work",
                               stream->name);
    }
    return begin - stream->parked_count;
}

static void device_pump(qe_device *device) {
    for (uint32_t moved = 1; moved > 0 && device->parked > 0;) {
        moved = 0;
        for (qe_stream *stream = device->first_stream; stream != NULL; stream = stream->next)
            moved += stream_pump(stream);
    }
}

/* The transport that a parked transfer goes through; where something is parked, some stream begins with one: records
 * and waits were given in an order that ends. */
static qe_world *world_awaited(const qe_device *device) {
    for (const qe_stream *stream = device->first_stream; stream != NULL; stream = stream->next) {
        const cuda_command *head = &stream->parked[stream->parked_first % CUDA_PARKED_MAX];
        if (stream->parked_count == 0 || head->kind != CUDA_COMMAND_OP) continue;
        QE_ASSERT(head->op->kind == QE_OP_SEND || head->op->kind == QE_OP_RECV);
        return qe_cuda_channel_world(head->op->args.transfer.channel);
    }
    QE_ASSERT(!"streams that wait for each other");
    return NULL;
}

void qe_cuda_parked_settle(qe_stream *stream, uint32_t rest) {
    while (stream->parked_count > rest) {
        qe_world *world = world_awaited(stream->device);
        uint64_t seen = qe_cuda_world_moves(world);
        device_pump(stream->device);
        if (stream->parked_count > rest) qe_cuda_world_await(world, seen);
    }
}

void qe_cuda_parked_settle_all(qe_device *device) {
    for (qe_stream *stream = device->first_stream; stream != NULL; stream = stream->next)
        qe_cuda_parked_settle(stream, 0);
}

qe_status qe_cuda_stream_give(qe_stream *stream, cuda_command command) {
    int is_run = 0;
    qe_status status = QE_OK;
    if (stream->parked_count == 0) status = command_run(stream, &command, &is_run);
    if (is_run || status != QE_OK) {
        if (stream->device->parked > 0) device_pump(stream->device); /* others may have come meanwhile */
        return status;
    }
    QE_ASSERT(stream->device->recording == NULL);
    qe_cuda_parked_settle(stream, CUDA_PARKED_MAX - 1);
    stream->parked[(stream->parked_first + stream->parked_count) % CUDA_PARKED_MAX] = command;
    stream->parked_count++;
    stream->device->parked++;
    device_pump(stream->device);
    return QE_OK;
}
