/* test_parked.c - ranks that send and receive in right but wild orders, over a device that does what it is given at
 * once. Nothing may be queued before what it waits for, so that is a run of the real one: a message that comes early,
 * late or twice shows in the bytes, and what waits for ever in the time. Needs no GPU: the calls of the runtime that
 * the files under test make are replaced here. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "backend/cuda/device.h"
#include "backend/cuda/flags.h"
#include "backend/cuda/kernels.h"
#include "base/assert.h"
#include "base/prng.h"
#include "checked.h"
#include "qeffect/local.h"

enum {
    RANKS = 4,
    ROUNDS = 400,
    MESSAGES = 60, /* of a round, between any ranks */
    ABORTED_EVERY = 7,
    SECONDS_MAX = 120, /* it takes two */
};

static atomic_int wrong_waits, wrong_values, checks, marks;
/* Copies that nobody waited for yet, and those for which no other stream would wait: on the default stream. */
static atomic_int copies_under_way, copies_by_default;

/* --- a device that runs everything at once ------------------------------------------------------------------------ */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    (void)flags;
    *stream = malloc(1);
    return *stream == NULL ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    free(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    (void)stream;
    atomic_store(&copies_under_way, 0);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    (void)flags;
    *event = calloc(1, sizeof(atomic_int)); /* whether it was recorded */
    return *event == NULL ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    (void)stream;
    atomic_store((atomic_int *)event, 1);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    (void)stream, (void)flags;
    if (!atomic_load((atomic_int *)event)) atomic_fetch_add(&wrong_waits, 1);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    (void)event;
    return cudaSuccess;
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t code) {
    (void)code;
    return "an error";
}
cudaError_t cudaMalloc(void **at, size_t bytes) {
    *at = calloc(1, bytes);
    return *at == NULL ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFree(void *at) {
    free(at);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **at, size_t bytes, unsigned int flags) {
    (void)flags;
    return cudaMalloc(at, bytes);
}
cudaError_t cudaFreeHost(void *at) { return cudaFree(at); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    atomic_fetch_add(stream == NULL ? &copies_by_default : &copies_under_way, 1);
    memcpy(to, from, bytes);
    return cudaSuccess;
}
/* As the runtime has it: on the default stream, and under way when it returns. */
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, NULL);
}

qe_status qe_cuda_start(qe_error *error_out) {
    (void)error_out;
    return QE_OK;
}
qe_status qe_cuda_copy(const void *from, void *to, uint64_t bytes, cudaStream_t stream) {
    (void)stream;
    memcpy(to, from, bytes);
    return QE_OK;
}
qe_status qe_cuda_flag_take(int *word, const int *aborted, cudaStream_t stream) {
    (void)word, (void)aborted, (void)stream;
    return QE_OK;
}
qe_status qe_cuda_flag_give(int *word, cudaStream_t stream) {
    (void)word, (void)stream;
    return QE_OK;
}
/* The only op here but transfers: what a copy would read is what it would write. */
qe_status qe_cuda_op_queue(qe_device *device, const qe_op *op, cudaStream_t stream) {
    (void)device, (void)stream;
    const qe_args_copy *args = &op->args.copy;
    if (memcmp(args->to, args->from, args->bytes) != 0) atomic_fetch_add(&wrong_values, 1);
    atomic_fetch_add(&checks, 1);
    return QE_OK;
}
qe_status qe_cuda_watch_op(qe_device *device, uint32_t stream, const qe_op *op) {
    (void)device, (void)stream, (void)op;
    return QE_OK;
}
qe_status qe_cuda_claim_begin(qe_graph *graph) {
    (void)graph;
    return QE_OK;
}
qe_status qe_cuda_claim_end(qe_graph *graph, const qe_op *op) {
    (void)graph, (void)op;
    return QE_OK;
}
void qe_cuda_timeline_begin(cuda_timeline *timeline, const char *name, const char *stream_name, cudaStream_t stream) {
    (void)timeline, (void)name, (void)stream_name, (void)stream;
}
void qe_cuda_timeline_end(cuda_timeline *timeline, cudaStream_t stream) {
    (void)timeline, (void)stream;
    atomic_fetch_add(&marks, 1);
}
qe_status qe_cuda_graph_queue(qe_graph *graph, qe_stream *stream) {
    (void)graph, (void)stream;
    return QE_OK;
}

/* --- ranks -------------------------------------------------------------------------------------------------------- */

typedef struct message {
    int from, to;
    uint64_t value, sent, got; /* what it should be; what is sent; what came */
    qe_op send, recv, check;
    qe_event *filled, *came;
} message;

typedef struct rank {
    int index, aborts, checks; /* checks: nobody aborts, so every message comes */
    uint64_t seed;
    qe_world *world;
    message *messages;
    qe_device device;
    qe_stream *compute, *out[RANKS], *in[RANKS];
    qe_status status;
} rank;

static qe_stream *stream_named(rank *r, const char *word, int other) {
    char name[32];
    qe_stream *stream = NULL;
    qe_error error;
    snprintf(name, sizeof name, "%s%d", word, other);
    QE_ASSERT(qe_cuda_streams.create(&r->device, name, &stream, &error) == QE_OK);
    return stream;
}

static qe_op transfer(rank *r, qe_op_kind kind, int from, int to, void *at) {
    qe_op op = {.kind = kind};
    qe_error error;
    op.args.transfer.bytes_at = at;
    op.args.transfer.bytes = sizeof(uint64_t);
    qe_channel *channel = NULL;
    QE_ASSERT(qe_cuda_comm()->channel_open(r->world, (uint32_t)from, (uint32_t)to, 0, &channel, &error) == QE_OK);
    QE_ASSERT(qe_cuda_channel_prepare(channel, sizeof(uint64_t), r->device.aside, &error) == QE_OK);
    op.args.transfer.channel = channel;
    return op;
}

/* The receipt may be given long before its turn: its stream waits alone. */
static void give_recv(rank *r, message *m) {
    qe_error error;
    m->recv = transfer(r, QE_OP_RECV, m->from, m->to, &m->got);
    m->check = (qe_op){.kind = QE_OP_COPY};
    m->check.args.copy.from = &m->value;
    m->check.args.copy.to = &m->got;
    m->check.args.copy.bytes = sizeof m->value;
    QE_ASSERT(qe_cuda_streams.event_create(&r->device, &m->came, &error) == QE_OK);
    QE_ASSERT(qe_cuda_streams.submit(r->in[m->from], &m->recv) == QE_OK);
    QE_ASSERT(qe_cuda_streams.record(r->in[m->from], m->came) == QE_OK);
}

static void give_use(rank *r, message *m) {
    QE_ASSERT(qe_cuda_streams.wait(r->compute, m->came) == QE_OK);
    if (r->checks) QE_ASSERT(qe_cuda_streams.submit(r->compute, &m->check) == QE_OK);
}

static void give_send(rank *r, message *m) {
    qe_error error;
    m->sent = m->value;
    m->send = transfer(r, QE_OP_SEND, m->from, m->to, &m->sent);
    QE_ASSERT(qe_cuda_streams.event_create(&r->device, &m->filled, &error) == QE_OK);
    QE_ASSERT(qe_cuda_streams.record(r->compute, m->filled) == QE_OK);
    QE_ASSERT(qe_cuda_streams.wait(r->out[m->to], m->filled) == QE_OK);
    QE_ASSERT(qe_cuda_streams.submit(r->out[m->to], &m->send) == QE_OK);
}

/* Sends and uses in the order of all messages; receipts run ahead of them by a random number of messages. */
static void give_all(rank *r) {
    int given = 0;
    for (int i = 0; i < MESSAGES; i++) {
        message *m = &r->messages[i];
        int ahead = i + (int)(qe_prng_u64(&(qe_prng){r->seed, (uint64_t)r->index}, (uint64_t)i) % MESSAGES);
        for (; given < MESSAGES && given <= ahead; given++)
            if (r->messages[given].to == r->index) give_recv(r, &r->messages[given]);
        if (r->aborts && i == MESSAGES / 2) {
            qe_cuda_comm()->abort(r->world);
            return;
        }
        if (m->to == r->index) give_use(r, m);
        if (m->from == r->index) give_send(r, m);
    }
}

static qe_status sync_all(rank *r) {
    qe_error error;
    qe_status status = qe_cuda_streams.sync(r->compute, &error);
    for (int other = 0; other < RANKS; other++) {
        qe_status one = qe_cuda_streams.sync(r->out[other], &error);
        qe_status two = qe_cuda_streams.sync(r->in[other], &error);
        if (status == QE_OK) status = one != QE_OK ? one : two;
    }
    return status;
}

static void *rank_main(void *opaque) {
    rank *r = opaque;
    r->device.timeline = opaque; /* that there is one is all that is looked at */
    r->compute = stream_named(r, "compute", 0);
    for (int other = 0; other < RANKS; other++) {
        r->out[other] = stream_named(r, "out", other);
        r->in[other] = stream_named(r, "in", other);
    }
    give_all(r);
    r->status = sync_all(r);
    for (int i = 0; i < MESSAGES; i++) {
        if (r->messages[i].to == r->index) qe_cuda_streams.event_destroy(r->messages[i].came);
        if (r->messages[i].from == r->index) qe_cuda_streams.event_destroy(r->messages[i].filled);
    }
    qe_cuda_streams.destroy(r->compute);
    for (int other = 0; other < RANKS; other++) {
        qe_cuda_streams.destroy(r->out[other]);
        qe_cuda_streams.destroy(r->in[other]);
    }
    return NULL;
}

static void messages_draw(message *messages, uint64_t seed) {
    qe_prng prng = qe_prng_make(seed, "messages");
    memset(messages, 0, MESSAGES * sizeof *messages);
    for (uint64_t i = 0; i < MESSAGES; i++) {
        messages[i].from = (int)(qe_prng_u64(&prng, 3 * i) % RANKS);
        messages[i].to = (messages[i].from + 1 + (int)(qe_prng_u64(&prng, 3 * i + 1) % (RANKS - 1))) % RANKS;
        messages[i].value = qe_prng_u64(&prng, 3 * i + 2);
    }
}

/* Returns how many ranks ended otherwise than they should. */
static int round_run(qe_world *world, uint64_t seed) {
    static message messages[MESSAGES];
    static rank ranks[RANKS];
    pthread_t threads[RANKS];
    int is_aborted = seed % ABORTED_EVERY == 0, failed = 0;
    messages_draw(messages, seed);
    const int marked = atomic_load(&marks);
    for (int i = 0; i < RANKS; i++) {
        ranks[i] = (rank){.index = i, .aborts = is_aborted && i == 0, .checks = !is_aborted, .seed = seed,
                          .world = world, .messages = messages};
        QE_ASSERT(pthread_create(&threads[i], NULL, rank_main, &ranks[i]) == 0);
    }
    for (int i = 0; i < RANKS; i++) {
        QE_ASSERT(pthread_join(threads[i], NULL) == 0);
        failed += ranks[i].status != (is_aborted ? QE_ERROR_INTERRUPTED : QE_OK);
        failed += ranks[i].device.parked != 0 || ranks[i].device.streams != 0;
    }
    qe_cuda_comm()->reset(world);
    /* A send, a receipt and a check of each: what is tried again and again while it is parked is no op that ran. */
    failed += !is_aborted && atomic_load(&marks) - marked != 3 * MESSAGES;
    return failed;
}

/* A channel's words are what it begins with before anybody is told that it is there, or that all begins anew: kernels
 * on streams that wait for no other look at them. Returns how many copies were not awaited. */
static int words_unawaited(void) {
    qe_world *world = NULL;
    qe_channel *channel = NULL;
    qe_error error;
    QE_ASSERT(qe_cuda_world_create(RANKS, &world, &error) == QE_OK);
    QE_ASSERT(qe_cuda_comm()->channel_open(world, 0, 1, 0, &channel, &error) == QE_OK);
    int unawaited = atomic_load(&copies_under_way);
    qe_cuda_comm()->reset(world);
    unawaited += atomic_load(&copies_under_way) + atomic_load(&copies_by_default);
    qe_cuda_world_destroy(world);
    return unawaited;
}

int main(void) {
    qe_world *world = NULL;
    qe_error error;
    int failed = 0;
    alarm(SECONDS_MAX);
    failed += words_unawaited();
    QE_ASSERT(qe_cuda_world_create(RANKS, &world, &error) == QE_OK);
    for (uint64_t seed = 1; seed <= ROUNDS; seed++) failed += round_run(world, seed);
    qe_cuda_world_destroy(world);
    printf("%d rounds of %d messages between %d ranks: %d messages were read, %d of them wrong; %d waits for nothing; "
           "%d ranks ended otherwise, or copies were not awaited\n",
           ROUNDS, MESSAGES, RANKS, atomic_load(&checks), atomic_load(&wrong_values), atomic_load(&wrong_waits),
           failed);
    return failed > 0 || atomic_load(&wrong_values) > 0 || atomic_load(&wrong_waits) > 0 || atomic_load(&checks) == 0;
}
