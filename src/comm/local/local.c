/* local.c - ranks as threads of one process.
 *
 * A channel has one message at a time and no buffer: the sender offers its pointer, the receiver copies from it.
 *
 *   EMPTY --send--> OFFERED --recv copies--> TAKEN --send returns--> EMPTY
 *                      '-------abort, send withdraws-------------------^
 *
 * The copy is made under the channel's lock, so that an aborted sender cannot take its bytes back in the middle. */
#include "qeffect/local.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/lock.h"
#include "qeffect/limits.h"

enum channel_state { CHANNEL_EMPTY, CHANNEL_OFFERED, CHANNEL_TAKEN };

struct qe_channel {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum channel_state state;
    const void *offer; /* the sender's bytes while OFFERED */
    size_t offer_bytes;
    qe_status result; /* the sender's answer while TAKEN */
    uint32_t from_rank, to_rank, lane;
    qe_world *world;
    qe_channel *next;
};

/* What one rank brought to the meeting that is being held. */
typedef struct meet_seat {
    const double *values; /* [count] */
    double *gathered;     /* [ranks * count] */
    size_t count;
    qe_status mine;
    int taken;
} meet_seat;

struct qe_world {
    pthread_mutex_t lock; /* channel list and the meeting */
    pthread_cond_t met;
    atomic_int aborted;
    uint32_t ranks;
    uint32_t seated;
    uint64_t meeting; /* meetings held so far */
    qe_status worst;  /* of the last meeting held */
    qe_channel *channels;
    meet_seat seats[]; /* [ranks] */
};

qe_status qe_local_world_create(uint32_t ranks, qe_world **world_out, qe_error *error_out) {
    if (ranks < 1 || ranks > QE_RANKS_MAX)
        return qe_error_set(error_out, QE_ERROR_LIMIT, "use a number of ranks within that range",
                            "%u ranks in one process; 1 to %d are possible", ranks, QE_RANKS_MAX);
    qe_world *world = calloc(1, sizeof *world + ranks * sizeof world->seats[0]);
    if (!world || qe_lock_init(&world->lock, &world->met, NULL) != 0) {
        free(world);
        return qe_error_set(error_out, QE_ERROR_MEMORY, "free memory and try again",
                            "no memory for a world of %u ranks", ranks);
    }
    atomic_init(&world->aborted, 0);
    world->ranks = ranks;
    *world_out = world;
    return QE_OK;
}

void qe_local_world_destroy(qe_world *world) {
    if (!world) return;
    QE_ASSERT(world->seated == 0 || atomic_load(&world->aborted));
    for (qe_channel *channel = world->channels; channel;) {
        qe_channel *next = channel->next;
        qe_lock_deinit(&channel->lock, &channel->changed);
        free(channel);
        channel = next;
    }
    qe_lock_deinit(&world->lock, &world->met);
    free(world);
}

/* Requires: world->lock is held. */
static qe_channel *channel_find(const qe_world *world, uint32_t from_rank, uint32_t to_rank, uint32_t lane) {
    for (qe_channel *channel = world->channels; channel; channel = channel->next)
        if (channel->from_rank == from_rank && channel->to_rank == to_rank && channel->lane == lane) return channel;
    return NULL;
}

/* Requires: world->lock is held. NULL: no memory. */
static qe_channel *channel_add(qe_world *world, uint32_t from_rank, uint32_t to_rank, uint32_t lane) {
    qe_channel *channel = calloc(1, sizeof *channel);
    if (!channel || qe_lock_init(&channel->lock, &channel->changed, NULL) != 0) {
        free(channel);
        return NULL;
    }
    channel->from_rank = from_rank;
    channel->to_rank = to_rank;
    channel->lane = lane;
    channel->world = world;
    channel->next = world->channels;
    world->channels = channel;
    return channel;
}

static qe_status local_channel_open(qe_world *world, uint32_t from_rank, uint32_t to_rank, uint32_t lane,
                                    qe_channel **channel_out, qe_error *error_out) {
    if (from_rank >= world->ranks || to_rank >= world->ranks || from_rank == to_rank)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "a channel joins two different ranks of the world",
                            "a channel from rank %u to rank %u in a world of %u ranks", from_rank, to_rank,
                            world->ranks);
    pthread_mutex_lock(&world->lock);
    qe_channel *channel = channel_find(world, from_rank, to_rank, lane);
    if (!channel) channel = channel_add(world, from_rank, to_rank, lane);
    pthread_mutex_unlock(&world->lock);
    if (!channel)
        return qe_error_set(error_out, QE_ERROR_MEMORY, "free memory and try again", "no memory for a channel");
    *channel_out = channel;
    return QE_OK;
}

static int channel_aborted(const qe_channel *channel) {
    return atomic_load_explicit(&channel->world->aborted, memory_order_acquire);
}

static qe_status local_send(qe_channel *channel, const void *bytes_at, size_t bytes) {
    qe_status status = QE_ERROR_INTERRUPTED;
    pthread_mutex_lock(&channel->lock);
    if (!channel_aborted(channel)) {
        QE_ASSERT(channel->state == CHANNEL_EMPTY); /* one sender: its last message was taken before it returned */
        channel->offer = bytes_at;
        channel->offer_bytes = bytes;
        channel->state = CHANNEL_OFFERED;
        pthread_cond_broadcast(&channel->changed);
        while (channel->state == CHANNEL_OFFERED && !channel_aborted(channel))
            pthread_cond_wait(&channel->changed, &channel->lock);
        if (channel->state == CHANNEL_TAKEN) status = channel->result;
        channel->state = CHANNEL_EMPTY;
    }
    pthread_mutex_unlock(&channel->lock);
    return status;
}

static qe_status local_recv(qe_channel *channel, void *bytes_at, size_t bytes) {
    qe_status status = QE_ERROR_INTERRUPTED;
    pthread_mutex_lock(&channel->lock);
    while (channel->state != CHANNEL_OFFERED && !channel_aborted(channel))
        pthread_cond_wait(&channel->changed, &channel->lock);
    if (!channel_aborted(channel)) {
        status = channel->offer_bytes == bytes ? QE_OK : QE_ERROR_DEVICE;
        if (status == QE_OK && bytes > 0) memcpy(bytes_at, channel->offer, bytes);
        channel->result = status;
        channel->state = CHANNEL_TAKEN;
        pthread_cond_broadcast(&channel->changed);
    }
    pthread_mutex_unlock(&channel->lock);
    return status;
}

/* The last rank to sit down does the work for all, while the others wait: no memory of the world's own is needed and
 * nobody's table can vanish. Requires: world->lock is held, every seat is taken. */
static void meet_hold(qe_world *world) {
    qe_status worst = QE_OK;
    const size_t count = world->seats[0].count;
    for (uint32_t from = 0; from < world->ranks; ++from) {
        meet_seat *seat = &world->seats[from];
        QE_ASSERT(seat->count == count);
        if (seat->mine > worst) worst = seat->mine;
        for (uint32_t to = 0; count > 0 && to < world->ranks; ++to)
            memcpy(world->seats[to].gathered + from * count, seat->values, count * sizeof(double));
        seat->taken = 0;
    }
    world->worst = worst;
    world->seated = 0;
    ++world->meeting;
    pthread_cond_broadcast(&world->met);
}

static qe_status local_meet(qe_world *world, uint32_t rank, qe_status mine, const double *values, size_t count,
                            double *gathered, qe_status *worst_out) {
    QE_ASSERT(rank < world->ranks);
    pthread_mutex_lock(&world->lock);
    if (atomic_load(&world->aborted)) {
        pthread_mutex_unlock(&world->lock);
        return QE_ERROR_INTERRUPTED;
    }
    QE_ASSERT(!world->seats[rank].taken);
    world->seats[rank] = (meet_seat){values, gathered, count, mine, 1};
    const uint64_t meeting = world->meeting;
    if (++world->seated == world->ranks) meet_hold(world);
    while (world->meeting == meeting && !atomic_load(&world->aborted)) pthread_cond_wait(&world->met, &world->lock);
    /* A meeting that was held counts, even if the world was aborted after it. The next one cannot overwrite `worst`
     * before this rank has read it, because it needs this rank. */
    const int held = world->meeting != meeting;
    if (held) *worst_out = world->worst;
    pthread_mutex_unlock(&world->lock);
    return held ? QE_OK : QE_ERROR_INTERRUPTED;
}

static void local_abort(qe_world *world) {
    pthread_mutex_lock(&world->lock);
    atomic_store(&world->aborted, 1);
    pthread_cond_broadcast(&world->met);
    for (qe_channel *channel = world->channels; channel; channel = channel->next) {
        pthread_mutex_lock(&channel->lock);
        pthread_cond_broadcast(&channel->changed);
        pthread_mutex_unlock(&channel->lock);
    }
    pthread_mutex_unlock(&world->lock);
}

static void local_reset(qe_world *world) {
    pthread_mutex_lock(&world->lock);
    for (qe_channel *channel = world->channels; channel; channel = channel->next) {
        pthread_mutex_lock(&channel->lock);
        channel->state = CHANNEL_EMPTY;
        pthread_mutex_unlock(&channel->lock);
    }
    for (uint32_t rank = 0; rank < world->ranks; ++rank) world->seats[rank].taken = 0;
    world->seated = 0;
    atomic_store(&world->aborted, 0);
    pthread_mutex_unlock(&world->lock);
}

const qe_comm_ops *qe_local_comm(void) {
    static const qe_comm_ops table = {
        .size = sizeof(qe_comm_ops),
        .name = "local",
        .channel_open = local_channel_open,
        .send = local_send,
        .recv = local_recv,
        .meet = local_meet,
        .abort = local_abort,
        .reset = local_reset,
    };
    return &table;
}
