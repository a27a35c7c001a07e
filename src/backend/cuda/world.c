/* world.c - ranks as threads of one process, messages as copies on the device.
 *
 * A channel is a mailbox and two words, `full` and `free`. Both ends queue and go on; the order is made on the device,
 * so a message may be part of a captured graph:
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

/* A GPU has 32 connections, and a stream that shares one with a stream that waits for a message waits too. A rank has
 * a compute, a caller's and an aside stream, and two for each edge with a neighbour. */
enum { RANKS_ON_A_GPU_MAX = 4 };

struct qe_channel {
    qe_world *world;
    uint32_t from_rank, to_rank, lane;
    char *mailbox; /* device */
    uint64_t mailbox_bytes;
    int *words; /* device [WORDS] */
    qe_channel *next;
};

struct qe_world {
    qe_world *local; /* what meets */
    pthread_mutex_t lock;
    int *aborted; /* page-locked: kernels look at it */
    qe_channel *channels;
};

qe_status qe_cuda_world_create(uint32_t ranks, qe_world **world_out, qe_error *error_out) {
    void *word = NULL;
    if (ranks > RANKS_ON_A_GPU_MAX)
        return qe_error_set(error_out, QE_ERROR_LIMIT, "use pipeline.chunks for more stages, or --device host",
                            "%u ranks on one GPU; at most %d can wait for each other's messages", ranks,
                            RANKS_ON_A_GPU_MAX);
    QE_TRY(qe_cuda_start(error_out));
    qe_world *world = calloc(1, sizeof *world);
    if (world == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a world");
    qe_status status = qe_local_world_create(ranks, &world->local, error_out);
    if (status == QE_OK)
        status = qe_cuda_check(cudaHostAlloc(&word, sizeof(int), cudaHostAllocPortable), "page-locked memory",
                               error_out);
    if (status != QE_OK) {
        qe_local_world_destroy(world->local);
        free(world);
        return status;
    }
    world->aborted = word;
    *world->aborted = 0;
    pthread_mutex_init(&world->lock, NULL);
    *world_out = world;
    return QE_OK;
}

void qe_cuda_world_destroy(qe_world *world) {
    if (world == NULL) return;
    for (qe_channel *channel = world->channels; channel != NULL;) {
        qe_channel *next = channel->next;
        (void)cudaFree(channel->mailbox);
        (void)cudaFree(channel->words);
        free(channel);
        channel = next;
    }
    (void)cudaFreeHost(world->aborted);
    qe_local_world_destroy(world->local);
    pthread_mutex_destroy(&world->lock);
    free(world);
}

/* Requires: world->lock is held. */
static qe_channel *channel_find(qe_world *world, uint32_t from_rank, uint32_t to_rank, uint32_t lane) {
    for (qe_channel *channel = world->channels; channel != NULL; channel = channel->next)
        if (channel->from_rank == from_rank && channel->to_rank == to_rank && channel->lane == lane) return channel;
    return NULL;
}

static qe_status channel_rewind(const qe_channel *channel, qe_error *error_out) {
    static const int empty[WORDS] = {[WORD_FULL] = 0, [WORD_FREE] = 1};
    return qe_cuda_check(cudaMemcpy(channel->words, empty, sizeof empty, cudaMemcpyHostToDevice), "a channel",
                         error_out);
}

static qe_status channel_add(qe_world *world, qe_channel like, qe_channel **channel_out, qe_error *error_out) {
    void *words = NULL;
    qe_channel *channel = malloc(sizeof *channel);
    if (channel == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a channel");
    *channel = like;
    qe_status status = qe_cuda_check(cudaMalloc(&words, WORDS * sizeof(int)), "a channel", error_out);
    channel->words = words;
    if (status == QE_OK) status = channel_rewind(channel, error_out);
    if (status != QE_OK) {
        (void)cudaFree(words);
        free(channel);
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
static qe_status flags_load(const qe_channel *channel, qe_error *error_out) {
    cudaStream_t stream = NULL;
    QE_TRY(qe_cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream", error_out));
    qe_status status = qe_cuda_flag_give(&channel->words[WORD_FULL], stream);
    if (status == QE_OK) status = qe_cuda_flag_take(&channel->words[WORD_FULL], channel->world->aborted, stream);
    void *other = NULL;
    cudaError_t code = cudaMalloc(&other, channel->mailbox_bytes);
    if (code == cudaSuccess && status == QE_OK)
        status = qe_cuda_copy(other, channel->mailbox, channel->mailbox_bytes, stream);
    if (code == cudaSuccess) code = cudaStreamSynchronize(stream);
    (void)cudaFree(other);
    (void)cudaStreamDestroy(stream);
    return status == QE_OK ? qe_cuda_check(code, "a channel", error_out) : status;
}

qe_status qe_cuda_channel_prepare(qe_channel *channel, uint64_t bytes, qe_error *error_out) {
    void *mailbox = NULL;
    qe_status status = QE_OK;
    pthread_mutex_lock(&channel->world->lock);
    if (channel->mailbox != NULL && channel->mailbox_bytes != bytes)
        status = qe_error_set(error_out, QE_ERROR_ARGUMENT, "both ends must name the same number of bytes",
                              "a message of %llu bytes on a channel for %llu", (unsigned long long)bytes,
                              (unsigned long long)channel->mailbox_bytes);
    if (channel->mailbox == NULL) {
        status = qe_cuda_check(cudaMalloc(&mailbox, bytes), "a mailbox", error_out);
        channel->mailbox = mailbox;
        channel->mailbox_bytes = bytes;
        if (status == QE_OK) status = flags_load(channel, error_out);
    }
    pthread_mutex_unlock(&channel->world->lock);
    return status;
}

qe_status qe_cuda_channel_queue(qe_channel *channel, qe_op_kind kind, void *at, uint64_t bytes, cudaStream_t stream,
                                const int **aborted_out) {
    int sends = kind == QE_OP_SEND;
    *aborted_out = channel->world->aborted;
    QE_TRY(qe_cuda_flag_take(&channel->words[sends ? WORD_FREE : WORD_FULL], channel->world->aborted, stream));
    void *from = sends ? at : channel->mailbox, *to = sends ? channel->mailbox : at;
    QE_TRY(qe_cuda_copy(from, to, bytes, stream));
    return qe_cuda_flag_give(&channel->words[sends ? WORD_FULL : WORD_FREE], stream);
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
    return qe_local_comm()->meet(world->local, rank, mine, values, count, gathered, worst_out);
}

static void world_abort(qe_world *world) {
    *(volatile int *)world->aborted = 1;
    qe_local_comm()->abort(world->local);
}

static void world_reset(qe_world *world) {
    qe_error ignored; /* a device that cannot be written fails the next step in words */
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
