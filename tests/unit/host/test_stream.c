/* Streams of the host backend: order, events, errors, draining, and many items under many threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "qeffect/host.h"

/* A transport that tells the test when an op ran, and lets it hold a stream back. */
struct qe_channel {
    atomic_int *gate; /* recv waits until it is 1; NULL: does not wait */
    uint64_t *log;    /* send appends its number; written by one thread at a time, ordered by what is tested */
    uint64_t *log_count;
    qe_status answer;
};

static void nap_us(long us) { nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL); }

static qe_status probe_send(qe_channel *channel, const void *bytes_at, size_t bytes) {
    (void)bytes;
    if (channel->log) channel->log[(*channel->log_count)++] = *(const uint64_t *)bytes_at;
    return channel->answer;
}

static qe_status probe_recv(qe_channel *channel, void *bytes_at, size_t bytes) {
    (void)bytes_at;
    (void)bytes;
    while (channel->gate && !atomic_load(channel->gate)) nap_us(100);
    return channel->answer;
}

static const qe_comm_ops probe = {.size = sizeof(qe_comm_ops), .name = "probe", .send = probe_send, .recv = probe_recv};

static qe_op transfer(qe_op_kind kind, qe_channel *channel, uint64_t *number) {
    return (qe_op){.kind = kind, .args.transfer = {.channel = channel, .bytes_at = number, .bytes = sizeof *number}};
}

static qe_op copy(const void *from, void *to, size_t bytes) {
    return (qe_op){.kind = QE_OP_COPY, .args.copy = {.from = from, .to = to, .bytes = bytes}};
}

static const qe_backend *host;
static qe_device *device;

static int device_open(void **state) {
    (void)state;
    qe_error error;
    host = qe_host_backend();
    if (host->open(&device, &error) != QE_OK) return -1;
    qe_host_set_comm(device, &probe);
    return 0;
}

static int device_close(void **state) {
    (void)state;
    host->close(device);
    return 0;
}

static qe_stream *stream_of(const char *name) {
    qe_stream *stream = NULL;
    assert_int_equal(host->stream->create(device, name, &stream, NULL), QE_OK);
    return stream;
}

static qe_event *event_of(void) {
    qe_event *event = NULL;
    assert_int_equal(host->stream->event_create(device, &event, NULL), QE_OK);
    return event;
}

static void ops_of_a_stream_run_in_the_order_of_submission(void **state) {
    (void)state;
    enum { COUNT = 20000 }; /* more than the ring holds, so the submitter meets a full one */
    uint64_t *log = calloc(COUNT, sizeof *log), *numbers = calloc(COUNT, sizeof *numbers), log_count = 0;
    qe_op *ops = calloc(COUNT, sizeof *ops);
    qe_channel channel = {.log = log, .log_count = &log_count};
    qe_stream *stream = stream_of("order");
    for (uint64_t i = 0; i < COUNT; ++i) {
        numbers[i] = i;
        ops[i] = transfer(QE_OP_SEND, &channel, &numbers[i]);
        assert_int_equal(host->stream->submit(stream, &ops[i]), QE_OK);
    }
    assert_int_equal(host->stream->sync(stream, NULL), QE_OK);
    assert_int_equal(log_count, COUNT);
    for (uint64_t i = 0; i < COUNT; ++i) assert_int_equal(log[i], i);
    host->stream->destroy(stream);
    free(log);
    free(numbers);
    free(ops);
}

static void a_wait_holds_later_work_until_the_recorded_work_is_done(void **state) {
    (void)state;
    qe_stream *first = stream_of("first"), *second = stream_of("second");
    qe_event *event = event_of();
    atomic_int gate = 0;
    uint64_t source = 42, middle = 0, result = 0, nothing = 0;
    qe_channel held = {.gate = &gate};
    qe_op hold = transfer(QE_OP_RECV, &held, &nothing);
    qe_op produce = copy(&source, &middle, sizeof middle), consume = copy(&middle, &result, sizeof result);
    host->stream->submit(first, &hold);
    host->stream->submit(first, &produce);
    host->stream->record(first, event);
    host->stream->wait(second, event);
    host->stream->submit(second, &consume);
    nap_us(20000);
    atomic_store(&gate, 1);
    assert_int_equal(host->stream->sync(second, NULL), QE_OK);
    assert_int_equal(result, 42);
    host->stream->destroy(first);
    host->stream->destroy(second);
    host->stream->event_destroy(event);
}

static void a_wait_is_bound_to_the_last_record_before_it(void **state) {
    (void)state;
    qe_stream *first = stream_of("first"), *second = stream_of("second");
    qe_event *event = event_of();
    atomic_int gate = 0;
    uint64_t source = 1, result = 0, nothing = 0;
    qe_channel held = {.gate = &gate};
    qe_op hold = transfer(QE_OP_RECV, &held, &nothing), note = copy(&source, &result, sizeof result);
    host->stream->record(first, event);
    host->stream->wait(second, event);
    host->stream->submit(first, &hold);
    host->stream->record(first, event); /* later: must not hold the wait that was submitted already */
    host->stream->submit(second, &note);
    assert_int_equal(host->stream->sync(second, NULL), QE_OK);
    assert_int_equal(result, 1);
    atomic_store(&gate, 1);
    assert_int_equal(host->stream->event_sync(event, NULL), QE_OK);
    host->stream->destroy(first);
    host->stream->destroy(second);
    host->stream->event_destroy(event);
}

static void a_wait_for_an_event_that_was_never_recorded_does_nothing(void **state) {
    (void)state;
    qe_stream *stream = stream_of("lonely");
    qe_event *event = event_of();
    uint64_t source = 9, result = 0;
    qe_op note = copy(&source, &result, sizeof result);
    assert_int_equal(host->stream->wait(stream, event), QE_OK);
    assert_int_equal(host->stream->event_sync(event, NULL), QE_OK);
    host->stream->submit(stream, &note);
    assert_int_equal(host->stream->sync(stream, NULL), QE_OK);
    assert_int_equal(result, 9);
    host->stream->destroy(stream);
    host->stream->event_destroy(event);
}

static void an_event_outlives_the_stream_that_recorded_it(void **state) {
    (void)state;
    qe_stream *first = stream_of("first"), *second = stream_of("second");
    qe_event *event = event_of();
    uint64_t source = 3, result = 0;
    qe_op note = copy(&source, &result, sizeof result);
    host->stream->submit(first, &note);
    host->stream->record(first, event);
    host->stream->destroy(first);
    assert_int_equal(host->stream->wait(second, event), QE_OK);
    assert_int_equal(host->stream->sync(second, NULL), QE_OK);
    assert_int_equal(host->stream->event_sync(event, NULL), QE_OK);
    assert_int_equal(result, 3);
    host->stream->destroy(second);
    host->stream->event_destroy(event);
}

static void sync_tells_the_first_failure_once_and_the_stream_goes_on(void **state) {
    (void)state;
    qe_stream *stream = stream_of("failing");
    uint64_t source = 5, result = 0, nothing = 0;
    qe_channel aborted = {.answer = QE_ERROR_INTERRUPTED}, broken = {.answer = QE_ERROR_DEVICE};
    qe_op first = transfer(QE_OP_RECV, &aborted, &nothing), second = transfer(QE_OP_RECV, &broken, &nothing);
    qe_op note = copy(&source, &result, sizeof result);
    qe_error error = {0};
    host->stream->submit(stream, &first);
    host->stream->submit(stream, &second);
    host->stream->submit(stream, &note);
    assert_int_equal(host->stream->sync(stream, &error), QE_ERROR_INTERRUPTED);
    assert_int_equal(error.status, QE_ERROR_INTERRUPTED);
    assert_non_null(strstr(error.message, "recv"));
    assert_int_equal(result, 5);
    assert_int_equal(host->stream->sync(stream, &error), QE_OK);
    host->stream->submit(stream, &second);
    assert_int_equal(host->stream->sync(stream, &error), QE_ERROR_DEVICE);
    host->stream->destroy(stream);
}

static void destroy_drains_first(void **state) {
    (void)state;
    qe_stream *stream = stream_of("drained");
    enum { COUNT = 500 };
    uint64_t values[COUNT + 1] = {7};
    qe_op ops[COUNT];
    for (int i = 0; i < COUNT; ++i) {
        ops[i] = copy(&values[i], &values[i + 1], sizeof values[0]);
        host->stream->submit(stream, &ops[i]);
    }
    host->stream->destroy(stream);
    assert_int_equal(values[COUNT], 7);
}

static void a_transfer_without_a_transport_is_an_error_and_not_a_crash(void **state) {
    (void)state;
    qe_device *bare = NULL;
    qe_error error = {0};
    uint64_t nothing = 0;
    assert_int_equal(host->open(&bare, &error), QE_OK);
    qe_op op = transfer(QE_OP_SEND, NULL, &nothing);
    assert_int_equal(host->run(bare, &op, &error), QE_ERROR_UNSUPPORTED);
    assert_non_null(strstr(error.message, "transport"));
    host->close(bare);
}

enum { STRESS_STREAMS = 3, STRESS_ROUNDS = 12000 }; /* 3 streams x 12000 x (op, wait, op) > 10^5 items */

/* A token goes round the streams, each adding its place; any missing edge is a race that ThreadSanitizer sees and a
 * wrong sum that the assertion sees. */
static void a_hundred_thousand_items_on_three_streams_keep_their_edges(void **state) {
    (void)state;
    qe_stream *streams[STRESS_STREAMS];
    qe_event *events[STRESS_STREAMS];
    uint64_t *cells = calloc(STRESS_STREAMS * STRESS_ROUNDS + 1, sizeof *cells), scratch[STRESS_STREAMS] = {0};
    qe_op *ops = calloc(2 * STRESS_STREAMS * STRESS_ROUNDS, sizeof *ops);
    for (int i = 0; i < STRESS_STREAMS; ++i) {
        streams[i] = stream_of("stress");
        events[i] = event_of();
    }
    cells[0] = 11;
    uint64_t op = 0, cell = 0;
    for (int round = 0; round < STRESS_ROUNDS; ++round)
        for (int i = 0; i < STRESS_STREAMS; ++i, ++cell) {
            const int before = (i + STRESS_STREAMS - 1) % STRESS_STREAMS;
            host->stream->wait(streams[i], events[before]);
            ops[op] = copy(&cells[cell], &scratch[i], sizeof scratch[0]);
            host->stream->submit(streams[i], &ops[op++]);
            ops[op] = copy(&scratch[i], &cells[cell + 1], sizeof scratch[0]);
            host->stream->submit(streams[i], &ops[op++]);
            host->stream->record(streams[i], events[i]);
        }
    for (int i = 0; i < STRESS_STREAMS; ++i) assert_int_equal(host->stream->sync(streams[i], NULL), QE_OK);
    assert_int_equal(cells[cell], 11);
    for (int i = 0; i < STRESS_STREAMS; ++i) {
        host->stream->destroy(streams[i]);
        host->stream->event_destroy(events[i]);
    }
    free(cells);
    free(ops);
}

static void memory_is_zeroed_aligned_and_copied(void **state) {
    (void)state;
    void *address = NULL;
    assert_int_equal(host->memory->alloc(device, 100, &address, NULL), QE_OK);
    assert_int_equal((uintptr_t)address % 64, 0);
    char bytes[100];
    assert_int_equal(host->memory->read(device, bytes, address, 100, NULL), QE_OK);
    for (int i = 0; i < 100; ++i) assert_int_equal(bytes[i], 0);
    assert_int_equal(host->memory->write(device, address, "hello", 6, NULL), QE_OK);
    assert_int_equal(host->memory->read(device, bytes, address, 6, NULL), QE_OK);
    assert_string_equal(bytes, "hello");
    host->memory->release(device, address);
    qe_error error;
    assert_int_equal(host->memory->alloc(device, SIZE_MAX - 3, &address, &error), QE_ERROR_MEMORY);
}

static void the_level_is_lowered_by_the_environment_and_told_by_the_identity(void **state) {
    (void)state;
    qe_device *low = NULL;
    qe_error error;
    setenv("QE_HOST_LEVEL", "portable", 1);
    assert_int_equal(host->open(&low, &error), QE_OK);
    assert_int_equal(strncmp(host->identity(low), "host portable openblas ", 23), 0);
    host->close(low);
    low = NULL;
    setenv("QE_HOST_LEVEL", "avx1024", 1);
    assert_int_equal(host->open(&low, &error), QE_ERROR_CONFIG);
    assert_null(low);
    unsetenv("QE_HOST_LEVEL");
}

static void a_thread_that_the_system_refuses_is_an_error_and_leaves_the_device_usable(void **state) {
    (void)state;
    pthread_attr_t usual, vast;
    qe_stream *stream = NULL;
    qe_error error = {0};
    assert_int_equal(pthread_getattr_default_np(&usual), 0);
    assert_int_equal(pthread_attr_init(&vast), 0);
    assert_int_equal(pthread_attr_setstacksize(&vast, (size_t)1 << 50), 0); /* more than an address space */
    assert_int_equal(pthread_setattr_default_np(&vast), 0);
    assert_int_equal(host->stream->create(device, "refused", &stream, &error), QE_ERROR_IO);
    assert_int_equal(pthread_setattr_default_np(&usual), 0);
    assert_null(stream);
    assert_non_null(strstr(error.message, "refused"));
    stream = stream_of("again");
    assert_int_equal(host->stream->sync(stream, NULL), QE_OK);
    host->stream->destroy(stream);
    pthread_attr_destroy(&vast);
    pthread_attr_destroy(&usual);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ops_of_a_stream_run_in_the_order_of_submission),
        cmocka_unit_test(a_wait_holds_later_work_until_the_recorded_work_is_done),
        cmocka_unit_test(a_wait_is_bound_to_the_last_record_before_it),
        cmocka_unit_test(a_wait_for_an_event_that_was_never_recorded_does_nothing),
        cmocka_unit_test(an_event_outlives_the_stream_that_recorded_it),
        cmocka_unit_test(sync_tells_the_first_failure_once_and_the_stream_goes_on),
        cmocka_unit_test(destroy_drains_first),
        cmocka_unit_test(a_transfer_without_a_transport_is_an_error_and_not_a_crash),
        cmocka_unit_test(a_hundred_thousand_items_on_three_streams_keep_their_edges),
        cmocka_unit_test(memory_is_zeroed_aligned_and_copied),
        cmocka_unit_test(a_thread_that_the_system_refuses_is_an_error_and_leaves_the_device_usable),
        cmocka_unit_test(the_level_is_lowered_by_the_environment_and_told_by_the_identity),
    };
    return cmocka_run_group_tests(tests, device_open, device_close);
}
