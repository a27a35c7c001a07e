/* world.c - ranks as threads of one process, messages as copies on the device.
 *
 * A channel is a mailbox. An end is queued only behind the other one's turn before it (parked.c), so events make the
 * order. A recorded graph may be launched before its neighbour's; there the order is made on the device, by two words,
 * `full` and `free`, and kernels that wait for them:
 *
 *   send:  take free -> copy into the mailbox -> give full      recv:  take full -> copy out of it -> give free
 *
 * Meetings, and who woke whom, are the local transport's. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include "backend/cuda/device.h"
#include "backend/cuda/flags.h"
#include "base/assert.h"
#include "qeffect/local.h"

enum { WORD_FULL, WORD_FREE, WORDS };

/* A GPU has 32 connections, and a graph that shares one with a graph that waits for a message waits too. A rank has a
 * compute, a caller's and an aside stream, and two for each edge with a neighbour; the world has one. */
enum { RANKS_ON_A_GPU_MAX = 4 };

struct qe_channel {
    qe_world *world;
    uint32_t from_rank, to_rank, lane;
    char *mailbox; /* device */
    uint64_t mailbox_bytes;
    int *words; /* device [WORDS] */
    cudaEvent_t filled, freed; /* behind the last send and the last receipt */
    uint64_t sent, received; /* that are queued; with world->lock */
    qe_channel *next;
};

struct qe_world {
    qe_world *local; /* what meets */
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint64_t moves; /* of all channels, and aborts */
    qe_device *devices[RANKS_ON_A_GPU_MAX]; /* that parked a transfer; NULL: none did */
    int *aborted; /* page-locked: kernels look at it */
    cudaStream_t aside; /* words are written on it, and awaited: ranks' streams do not wait for the default one */
    qe_channel *channels;
};

/* What it has of the device. */
static qe_status world_fill(qe_world *world, qe_error *error_out) {
    void *word = NULL;
    QE_TRY(qe_cuda_host_taken(cudaHostAlloc(&word, sizeof(int), cudaHostAllocPortable), sizeof(int), error_out));
    const qe_status status =
        qe_cuda_check(cudaStreamCreateWithFlags(&world->aside, cudaStreamNonBlocking), "a stream", error_out);
    if (status != QE_OK) {
        (void)cudaFreeHost(word);
        return status;
    }
    world->aborted = word;
    *world->aborted = 0;
    return QE_OK;
}

qe_status qe_cuda_world_create(uint32_t ranks, qe_world **world_out, qe_error *error_out) {
    if (ranks > RANKS_ON_A_GPU_MAX)
        return qe_error_set(error_out, QE_ERROR_LIMIT, "use pipeline.chunks for more stages, or --device host",
                            "%u ranks on one GPU; at most %d can wait for each other's messages", ranks,
                            RANKS_ON_A_GPU_MAX);
    QE_TRY(qe_cuda_start(error_out));
    qe_world *world = calloc(1, sizeof *world);
    if (world == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a world");
    qe_status status = qe_local_world_create(ranks, &world->local, error_out);
    if (status == QE_OK) status = world_fill(world, error_out);
    if (status != QE_OK) {
        qe_local_world_destroy(world->local);
        free(world);
        return status;
    }
    pthread_mutex_init(&world->lock, NULL);
    pthread_cond_init(&world->moved, NULL);
    *world_out = world;
    return QE_OK;
}

static void channel_free(qe_channel *channel) {
    (void)cudaFree(channel->words);
    if (channel->filled != NULL) (void)cudaEventDestroy(channel->filled);
    if (channel->freed != NULL) (void)cudaEventDestroy(channel->freed);
    free(channel);
}

void qe_cuda_world_destroy(qe_world *world) {
    if (world == NULL) return;
    for (qe_channel *channel = world->channels; channel != NULL;) {
        qe_channel *next = channel->next;
        (void)cudaFree(channel->mailbox);
        channel_free(channel);
        channel = next;
    }
    (void)cudaFreeHost(world->aborted);
    (void)cudaStreamDestroy(world->aside);
    qe_local_world_destroy(world->local);
    pthread_cond_destroy(&world->moved);
    pthread_mutex_destroy(&world->lock);
    free(world);
}

/* Requires: world->lock is held. */
static qe_channel *channel_find(qe_world *world, uint32_t from_rank, uint32_t to_rank, uint32_t lane) {
    for (qe_channel *channel = world->channels; channel != NULL; channel = channel->next)
        if (channel->from_rank == from_rank && channel->to_rank == to_rank && channel->lane == lane) return channel;
    return NULL;
}

static qe_status channel_rewind(qe_channel *channel, qe_error *error_out) {
    static const int empty[WORDS] = {[WORD_FULL] = 0, [WORD_FREE] = 1};
    const cudaStream_t aside = channel->world->aside;
    channel->sent = channel->received = 0;
    cudaError_t code = cudaMemcpyAsync(channel->words, empty, sizeof empty, cudaMemcpyHostToDevice, aside);
    if (code == cudaSuccess) code = cudaStreamSynchronize(aside);
    return qe_cuda_check(code, "a channel", error_out);
}

static qe_status channel_add(qe_world *world, qe_channel like, qe_channel **channel_out, qe_error *error_out) {
    void *words = NULL;
    qe_channel *channel = malloc(sizeof *channel);
    if (channel == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a channel");
    *channel = like;
    cudaError_t code = cudaMalloc(&words, WORDS * sizeof(int));
    channel->words = words;
    if (code == cudaSuccess) code = cudaEventCreateWithFlags(&channel->filled, cudaEventDisableTiming);
    if (code == cudaSuccess) code = cudaEventCreateWithFlags(&channel->freed, cudaEventDisableTiming);
    qe_status status = qe_cuda_check(code, "a channel", error_out);
    if (status == QE_OK) status = channel_rewind(channel, error_out);
    if (status != QE_OK) {
        channel_free(channel);
        return status;
    }
    channel->next = world->channels;
    world->channels = *channel_out = channel;
    return QE_OK;
}

static qe_status world_channel_open(qe_world *world, uint32_t from_rank, uint32_t to_rank, uint32_t lane,
                                    qe_channel **channel_out, qe_error *error_out) {
    pthread_mutex_lock(&world->lock);
    qe_status status = QE_OK;
    qe_channel *found = channel_find(world, from_rank, to_rank, lane);
    if (found != NULL)
        *channel_out = found;
    else
        status = channel_add(
            world, (qe_channel){.world = world, .from_rank = from_rank, .to_rank = to_rank, .lane = lane}, channel_out,
            error_out);
    pthread_mutex_unlock(&world->lock);
    return status;
}

/* Gives, takes and copies once: all kernels are loaded now, not while a rank waits for a message. */
static qe_status flags_load(const qe_channel *channel, cudaStream_t stream, qe_error *error_out) {
    qe_status status = qe_cuda_flag_give(&channel->words[WORD_FULL], stream);
    if (status == QE_OK) status = qe_cuda_flag_take(&channel->words[WORD_FULL], channel->world->aborted, stream);
    void *other = NULL;
    cudaError_t code = cudaMalloc(&other, channel->mailbox_bytes);
    if (code == cudaSuccess && status == QE_OK)
        status = qe_cuda_copy(other, channel->mailbox, channel->mailbox_bytes, stream);
    if (code == cudaSuccess) code = cudaStreamSynchronize(stream);
    (void)cudaFree(other);
    if (status != QE_OK) return qe_error_set(error_out, status, NULL, "the kernels of a channel could not be queued");
    return qe_cuda_taken(code, channel->mailbox_bytes, "a channel", error_out);
}

qe_status qe_cuda_channel_prepare(qe_channel *channel, uint64_t bytes, cudaStream_t aside, qe_error *error_out) {
    void *mailbox = NULL;
    qe_status status = QE_OK;
    pthread_mutex_lock(&channel->world->lock);
    if (channel->mailbox != NULL && channel->mailbox_bytes != bytes)
        status = qe_error_set(error_out, QE_ERROR_ARGUMENT, "both ends must name the same number of bytes",
                              "a message of %llu bytes on a channel for %llu", (unsigned long long)bytes,
                              (unsigned long long)channel->mailbox_bytes);
    if (channel->mailbox == NULL) {
        status = qe_cuda_taken(cudaMalloc(&mailbox, bytes), bytes, "a mailbox", error_out);
        channel->mailbox = mailbox;
        channel->mailbox_bytes = bytes;
        if (status == QE_OK) status = flags_load(channel, aside, error_out);
        if (status != QE_OK) { /* not taken for ready by who asks again */
            (void)cudaFree(channel->mailbox);
            channel->mailbox = NULL;
        }
    }
    pthread_mutex_unlock(&channel->world->lock);
    return status;
}

/* Into the mailbox, or out of it. */
static qe_status message_copy(const qe_channel *channel, int sends, void *at, uint64_t bytes, cudaStream_t stream) {
    return sends ? qe_cuda_copy(at, channel->mailbox, bytes, stream)
                 : qe_cuda_copy(channel->mailbox, at, bytes, stream);
}

qe_status qe_cuda_channel_queue(qe_channel *channel, qe_op_kind kind, void *at, uint64_t bytes, cudaStream_t stream,
                                const int **aborted_out) {
    int sends = kind == QE_OP_SEND;
    *aborted_out = channel->world->aborted;
    QE_TRY(qe_cuda_flag_take(&channel->words[sends ? WORD_FREE : WORD_FULL], channel->world->aborted, stream));
    QE_TRY(message_copy(channel, sends, at, bytes, stream));
    return qe_cuda_flag_give(&channel->words[sends ? WORD_FULL : WORD_FREE], stream);
}

qe_world *qe_cuda_channel_world(const qe_channel *channel) {
    return channel->world;
}

/* Requires: world->lock is held. */
static void world_move(qe_world *world) {
    world->moves++;
    pthread_cond_broadcast(&world->moved);
}

uint64_t qe_cuda_world_moves(qe_world *world) {
    pthread_mutex_lock(&world->lock);
    uint64_t moves = world->moves;
    pthread_mutex_unlock(&world->lock);
    return moves;
}

void qe_cuda_world_await(qe_world *world, uint64_t seen) {
    pthread_mutex_lock(&world->lock);
    while (world->moves == seen) pthread_cond_wait(&world->moved, &world->lock);
    pthread_mutex_unlock(&world->lock);
}

/* The other end's turn before this one is queued, so its event is of that turn. */
static qe_status end_queue(qe_channel *channel, int sends, void *at, uint64_t bytes, cudaStream_t stream) {
    cudaError_t code = cudaSuccess;
    if (channel->sent > 0) code = cudaStreamWaitEvent(stream, sends ? channel->freed : channel->filled, 0);
    if (code == cudaSuccess && message_copy(channel, sends, at, bytes, stream) != QE_OK) code = cudaErrorLaunchFailure;
    if (code == cudaSuccess) code = cudaEventRecord(sends ? channel->filled : channel->freed, stream);
    if (sends) channel->sent++;
    else channel->received++;
    return code == cudaSuccess ? QE_OK : QE_ERROR_DEVICE;
}

qe_status qe_cuda_channel_try(qe_device *device, const qe_op *op, cudaStream_t stream, int *is_queued_out,
                              const int **aborted_out) {
    qe_channel *channel = op->args.transfer.channel;
    qe_world *world = channel->world;
    qe_status status = QE_OK;
    int sends = op->kind == QE_OP_SEND;
    *aborted_out = world->aborted;
    pthread_mutex_lock(&world->lock);
    int is_aborted = *(volatile int *)world->aborted;
    *is_queued_out = is_aborted || (sends ? channel->sent == channel->received : channel->sent > channel->received);
    if (!*is_queued_out) world->devices[sends ? channel->from_rank : channel->to_rank] = device;
    if (*is_queued_out && !is_aborted) {
        status = end_queue(channel, sends, op->args.transfer.bytes_at, op->args.transfer.bytes, stream);
        world_move(world);
    }
    pthread_mutex_unlock(&world->lock);
    return status;
}

/* Messages are queued by the streams' own table, never from here. */
static qe_status world_send(qe_channel *channel, const void *bytes_at, size_t bytes) {
    (void)channel, (void)bytes_at, (void)bytes;
    return QE_ERROR_UNSUPPORTED;
}

static qe_status world_recv(qe_channel *channel, void *bytes_at, size_t bytes) {
    (void)channel, (void)bytes_at, (void)bytes;
    return QE_ERROR_UNSUPPORTED;
}

static qe_status world_meet(qe_world *world, uint32_t rank, qe_status mine, const double *values, size_t count,
                            double *gathered, qe_status *worst_out) {
    /* Whoever meets may have been told not to wait for its streams; its neighbours wait for what it gave them. */
    if (world->devices[rank] != NULL) qe_cuda_parked_settle_all(world->devices[rank]);
    world->devices[rank] = NULL;
    return qe_local_comm()->meet(world->local, rank, mine, values, count, gathered, worst_out);
}

static void world_abort(qe_world *world) {
    pthread_mutex_lock(&world->lock);
    *(volatile int *)world->aborted = 1;
    world_move(world);
    pthread_mutex_unlock(&world->lock);
    qe_local_comm()->abort(world->local);
}

static void world_reset(qe_world *world) {
    qe_error ignored; /* a device that cannot be written fails the next step in words */
    for (int rank = 0; rank < RANKS_ON_A_GPU_MAX; rank++) {
        /* What an aborted step left parked is dropped here, not in the next one. */
        if (*world->aborted && world->devices[rank] != NULL) qe_cuda_parked_settle_all(world->devices[rank]);
        world->devices[rank] = NULL;
    }
    for (qe_channel *channel = world->channels; channel != NULL; channel = channel->next)
        (void)channel_rewind(channel, &ignored);
    *(volatile int *)world->aborted = 0;
    qe_local_comm()->reset(world->local);
}

const qe_comm_ops *qe_cuda_comm(void) {
    static const qe_comm_ops table = {
        .size = sizeof(qe_comm_ops),
        .name = "cuda",
        .channel_open = world_channel_open,
        .send = world_send,
        .recv = world_recv,
        .meet = world_meet,
        .abort = world_abort,
        .reset = world_reset,
    };
    return &table;
}
