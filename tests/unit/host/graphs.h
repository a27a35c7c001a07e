/* graphs.h - a small world for tests of recorded graphs: ops that compute without atomics on three streams, calls that
 * must succeed, and allocations that are counted and made to fail. */
#ifndef QE_TEST_HOST_GRAPHS_H
#define QE_TEST_HOST_GRAPHS_H

#include <errno.h>
#include <stdatomic.h>
#include <time.h>

#include "devices.h"

/* The sanitizers bring their own allocator; there, allocations are not counted and none is made to fail. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define COUNTS_ALLOCATIONS 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define COUNTS_ALLOCATIONS 0
#endif
#endif
#ifndef COUNTS_ALLOCATIONS
#define COUNTS_ALLOCATIONS 1
#endif

static atomic_long fail_in = -1; /* allocations until one fails; below 0: none does */
static atomic_long taken, live;  /* blocks taken so far; taken and not given back */

#if COUNTS_ALLOCATIONS
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
extern void __libc_free(void *block);

static inline int fails(void) {
    if (atomic_load(&fail_in) < 0 || atomic_fetch_sub(&fail_in, 1) > 0) return 0;
    errno = ENOMEM;
    return 1;
}

static inline int takes(void) {
    if (fails()) return 0;
    atomic_fetch_add(&taken, 1);
    atomic_fetch_add(&live, 1);
    return 1;
}

void *malloc(size_t bytes) { return takes() ? __libc_malloc(bytes) : NULL; }
void *calloc(size_t count, size_t bytes) { return takes() ? __libc_calloc(count, bytes) : NULL; }
void *aligned_alloc(size_t alignment, size_t bytes) { return takes() ? __libc_memalign(alignment, bytes) : NULL; }
void *realloc(void *old, size_t bytes) {
    if (!takes()) return NULL;
    atomic_fetch_sub(&live, old != NULL);
    return __libc_realloc(old, bytes);
}
void free(void *block) {
    atomic_fetch_sub(&live, block != NULL);
    __libc_free(block);
}
#endif

/* The n-th allocation from now on fails; -1: none. */
static inline void allocation_fail(long nth) { atomic_store(&fail_in, nth); }
static inline long blocks_taken(void) { return atomic_load(&taken); }
static inline long blocks_live(void) { return atomic_load(&live); }

/* A transport whose ops compute, without atomics: a missing edge is a race that ThreadSanitizer sees, a wrong order is
 * a wrong number that the assertions see. */
struct qe_channel {
    uint64_t *cell, factor; /* send: cell = factor * cell + what it is given */
    atomic_int *gate;       /* recv waits until it is 1; NULL: does not wait */
    qe_status answer;
};

static inline void nap_us(long us) { nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL); }

static inline qe_status probe_send(qe_channel *channel, const void *bytes_at, size_t bytes) {
    (void)bytes;
    if (channel->cell) *channel->cell = channel->factor * *channel->cell + *(const uint64_t *)bytes_at;
    return channel->answer;
}

static inline qe_status probe_recv(qe_channel *channel, void *bytes_at, size_t bytes) {
    (void)bytes_at;
    (void)bytes;
    while (channel->gate && !atomic_load(channel->gate)) nap_us(100);
    return channel->answer;
}

static const qe_comm_ops probe = {.size = sizeof(qe_comm_ops), .name = "probe", .send = probe_send, .recv = probe_recv};

static const qe_backend *host;
static qe_device *device;

static inline int device_open(void **state) {
    (void)state;
    host = qe_host_backend();
    if (host->open(&device, NULL) != QE_OK) return -1;
    qe_host_set_comm(device, &probe);
    return 0;
}

static inline int device_close(void **state) {
    (void)state;
    host->close(device);
    return 0;
}

static inline qe_op fuse(qe_channel *channel, uint64_t *number) {
    return (qe_op){.kind = QE_OP_SEND,
                   .args.transfer = {.channel = channel, .bytes_at = number, .bytes = sizeof *number}};
}

static inline qe_op hold(qe_channel *channel, uint64_t *number) {
    return (qe_op){.kind = QE_OP_RECV,
                   .args.transfer = {.channel = channel, .bytes_at = number, .bytes = sizeof *number}};
}

static inline qe_op copy(const void *from, void *to, size_t bytes) {
    return (qe_op){.kind = QE_OP_COPY, .args.copy = {.from = from, .to = to, .bytes = bytes}};
}

static inline qe_stream *stream_of(const char *name) {
    qe_stream *stream = NULL;
    assert_int_equal(host->stream->create(device, name, &stream, NULL), QE_OK);
    return stream;
}

static inline qe_event *event_of(void) {
    qe_event *event = NULL;
    assert_int_equal(host->stream->event_create(device, &event, NULL), QE_OK);
    return event;
}

static inline void begin(qe_stream *stream) { assert_int_equal(host->graph->begin(stream, NULL), QE_OK); }
static inline void submit(qe_stream *stream, const qe_op *op) {
    assert_int_equal(host->stream->submit(stream, op), QE_OK);
}
static inline void record(qe_stream *stream, qe_event *event) {
    assert_int_equal(host->stream->record(stream, event), QE_OK);
}
static inline void wait_for(qe_stream *stream, qe_event *event) {
    assert_int_equal(host->stream->wait(stream, event), QE_OK);
}
static inline void sync_with(qe_stream *stream) { assert_int_equal(host->stream->sync(stream, NULL), QE_OK); }
static inline void launch(qe_graph *graph, qe_stream *stream) {
    assert_int_equal(host->graph->launch(graph, stream), QE_OK);
}

static inline qe_graph *end(qe_stream *stream) {
    qe_graph *graph = NULL;
    qe_error error = {0};
    const qe_status status = host->graph->end(stream, &graph, &error);
    if (status != QE_OK) fail_msg("%s", error.message);
    assert_non_null(graph);
    return graph;
}

enum { LANES = 3 };

/* x = 3x + 1; on two other streams y = 5y + x and z = 7z + x; back on the first x = 11x + y, x = 13x + z. */
typedef struct diamond {
    uint64_t x, y, z, one;
    qe_channel channels[5];
    qe_op ops[5];
    qe_stream *streams[LANES];
    qe_event *forked, *joined[LANES];
    qe_graph *graph;
} diamond;

static inline void diamond_init(diamond *d) {
    memset(d, 0, sizeof *d);
    d->one = 1;
    uint64_t *cells[5] = {&d->x, &d->y, &d->z, &d->x, &d->x}, *numbers[5] = {&d->one, &d->x, &d->x, &d->y, &d->z};
    static const uint64_t factors[5] = {3, 5, 7, 11, 13};
    for (int i = 0; i < 5; ++i) {
        d->channels[i] = (qe_channel){.cell = cells[i], .factor = factors[i]};
        d->ops[i] = fuse(&d->channels[i], numbers[i]);
    }
    static const char *const names[LANES] = {"origin", "second", "third"};
    for (int i = 0; i < LANES; ++i) {
        d->streams[i] = stream_of(names[i]);
        d->joined[i] = event_of();
    }
    d->forked = event_of();
}

static inline void diamond_deinit(diamond *d) {
    host->graph->destroy(d->graph);
    for (int i = 0; i < LANES; ++i) {
        if (d->streams[i]) host->stream->destroy(d->streams[i]);
        host->stream->event_destroy(d->joined[i]);
    }
    host->stream->event_destroy(d->forked);
}

/* As it is submitted, be it recorded or run. */
static inline void diamond_submit(diamond *d) {
    submit(d->streams[0], &d->ops[0]);
    record(d->streams[0], d->forked);
    for (int lane = 1; lane < LANES; ++lane) {
        wait_for(d->streams[lane], d->forked);
        submit(d->streams[lane], &d->ops[lane]);
        record(d->streams[lane], d->joined[lane]);
    }
    for (int lane = 1; lane < LANES; ++lane) wait_for(d->streams[0], d->joined[lane]);
    submit(d->streams[0], &d->ops[3]);
    submit(d->streams[0], &d->ops[4]);
}

static inline void diamond_record(diamond *d) {
    begin(d->streams[0]);
    diamond_submit(d);
    d->graph = end(d->streams[0]);
}

/* The result of `times` runs, by the calling thread. */
static inline void assert_diamond(const diamond *d, int times) {
    uint64_t x = 0, y = 0, z = 0;
    for (int i = 0; i < times; ++i) {
        x = 3 * x + 1;
        y = 5 * y + x;
        z = 7 * z + x;
        x = 11 * x + y;
        x = 13 * x + z;
    }
    assert_int_equal(d->x, x);
    assert_int_equal(d->y, y);
    assert_int_equal(d->z, z);
}

#endif
