/* The check device by itself: declarations, streams, events, graphs and refusals, with copies as ops. */
#include "check_world.h"

enum { FLOATS = 64 };

typedef struct bench {
    const qe_backend *check;
    qe_device *device;
    qe_stream *stream, *other;
    float *a, *b, *c;
    qe_error error;
} bench;

static void bench_open(bench *t) {
    *t = (bench){.check = qe_check_backend()};
    const qe_memory_ops *memory = t->check->memory;
    must(t->check->open(&t->device, &t->error), &t->error, "open");
    must(qe_check_wrap(t->device, qe_host_backend(), NULL, &t->error), &t->error, "wrap");
    float **arrays[] = {&t->a, &t->b, &t->c};
    for (int i = 0; i < 3; i++) {
        void *address;
        float values[FLOATS];
        for (int v = 0; v < FLOATS; v++) values[v] = (float)(100 * i + v);
        must(memory->alloc(t->device, sizeof values, &address, &t->error), &t->error, "alloc");
        assert_int_equal((uintptr_t)address % QE_ALIGN_BYTES, 0);
        must(memory->write(t->device, address, values, sizeof values, &t->error), &t->error, "write");
        *arrays[i] = address;
    }
    must(t->check->stream->create(t->device, "one", &t->stream, &t->error), &t->error, "stream");
    must(t->check->stream->create(t->device, "two", &t->other, &t->error), &t->error, "stream");
}

static void bench_close(bench *t) {
    t->check->stream->destroy(t->stream);
    t->check->stream->destroy(t->other);
    t->check->memory->release(t->device, t->a);
    t->check->memory->release(t->device, t->b);
    t->check->memory->release(t->device, t->c);
    t->check->close(t->device);
}

static qe_op copy_of(float *to, const float *from, size_t count) {
    qe_op op = {.kind = QE_OP_COPY, .layer = 7};
    op.args.copy = (qe_args_copy){.from = from, .to = to, .bytes = count * sizeof *to};
    return op;
}

/* Declares a copy of `reads` and `writes` floats. */
static void declare_copy(bench *t, const qe_op *op, size_t reads, size_t writes) {
    const qe_range ranges[] = {
        {.at = (void *)(uintptr_t)op->args.copy.from, .bytes = reads * 4, .read = 1, .object = "source"},
        {.at = op->args.copy.to, .bytes = writes * 4, .write = 1, .object = "target", .part = "all"}};
    must(t->check->declare(t->device, op, ranges, 2, &t->error), &t->error, "declare");
}

static qe_status run_on(bench *t, const qe_op *op) {
    assert_int_equal(t->check->stream->submit(t->stream, op), QE_OK);
    return t->check->stream->sync(t->stream, &t->error);
}

static void fails_with(bench *t, qe_status status, const char *words) {
    assert_int_equal(status, QE_ERROR_DEVICE);
    if (strstr(t->error.message, words) == NULL) fail_msg("'%s' does not say '%s'", t->error.message, words);
    assert_int_equal(t->check->stream->sync(t->stream, NULL), QE_OK); /* said once; the stream goes on */
}

static void a_declared_op_runs_as_if_it_had_run_once(void **state) {
    (void)state;
    bench t;
    bench_open(&t);
    qe_op op = copy_of(t.b, t.a, FLOATS);
    declare_copy(&t, &op, FLOATS, FLOATS);
    must(run_on(&t, &op), &t.error, "copy");
    assert_memory_equal(t.a, t.b, FLOATS * sizeof(float));
    assert_true(t.c[1] == 201.0f);
    assert_int_equal(qe_check_counts(t.device).ops, 1);
    must(t.check->run(t.device, &op, &t.error), &t.error, "run");
    assert_int_equal(qe_check_counts(t.device).ops, 2);
    bench_close(&t);
}

static void an_op_without_a_declaration_fails_and_does_not_run(void **state) {
    (void)state;
    bench t;
    bench_open(&t);
    qe_op op = copy_of(t.b, t.a, FLOATS);
    fails_with(&t, run_on(&t, &op), "copy (layer 7) declared nothing");
    assert_true(t.b[1] == 101.0f);
    declare_copy(&t, &op, FLOATS, FLOATS);
    must(t.check->declare(t.device, &op, NULL, 0, &t.error), &t.error, "forget");
    fails_with(&t, run_on(&t, &op), "copy (layer 7) declared nothing");
    bench_close(&t);
}

static void an_undeclared_write_is_taken_back(void **state) {
    (void)state;
    bench t;
    bench_open(&t);
    qe_op op = copy_of(t.b, t.a, FLOATS);
    declare_copy(&t, &op, FLOATS, FLOATS - 1);
    fails_with(&t, run_on(&t, &op), "wrote what it did not declare to write: byte 2 behind the end of target (all)");
    assert_true(t.b[FLOATS - 1] == 163.0f); /* 63.0f differs from it first in its third byte */
    bench_close(&t);
}

static void an_undeclared_read_is_narrowed_to_its_first_byte(void **state) {
    (void)state;
    bench t;
    bench_open(&t);
    qe_op op = copy_of(t.b, t.a, FLOATS);
    declare_copy(&t, &op, FLOATS - 2, FLOATS);
    /* 62.0f after 162.0f: two zero bytes come first, and poison in a byte that stays as it was is no sign. */
    fails_with(&t, run_on(&t, &op),
               "read what it did not declare to read: byte 2 behind the end of source; it changes byte 250 of target");
    bench_close(&t);
}

static void streams_wait_for_events_in_the_order_of_submission(void **state) {
    (void)state;
    bench t;
    bench_open(&t);
    const qe_stream_ops *ops = t.check->stream;
    qe_event *event;
    must(ops->event_create(t.device, &event, &t.error), &t.error, "event");
    qe_op forth = copy_of(t.b, t.a, FLOATS), on = copy_of(t.c, t.b, FLOATS), back = copy_of(t.a, t.c, FLOATS);
    declare_copy(&t, &forth, FLOATS, FLOATS);
    declare_copy(&t, &on, FLOATS, FLOATS);
    declare_copy(&t, &back, FLOATS, FLOATS);
    for (int round = 0; round < 300; round++) { /* more than a queue holds */
        assert_int_equal(ops->submit(t.stream, &forth), QE_OK);
        assert_int_equal(ops->record(t.stream, event), QE_OK);
        assert_int_equal(ops->wait(t.other, event), QE_OK);
        assert_int_equal(ops->submit(t.other, &on), QE_OK);
        assert_int_equal(ops->submit(t.other, &back), QE_OK);
        assert_int_equal(ops->record(t.other, event), QE_OK);
        assert_int_equal(ops->wait(t.stream, event), QE_OK);
    }
    must(ops->event_sync(event, &t.error), &t.error, "event sync");
    assert_true(t.c[1] == 1.0f);
    assert_int_equal(qe_check_counts(t.device).ops, 900);
    ops->event_destroy(event);
    bench_close(&t);
}

static void a_graph_is_held_to_what_all_its_ops_declared(void **state) {
    (void)state;
    for (int broken = 0; broken < 2; broken++) {
        bench t;
        bench_open(&t);
        qe_graph *graph;
        qe_op first = copy_of(t.b, t.a, FLOATS), second = copy_of(t.c, t.b, FLOATS);
        declare_copy(&t, &first, FLOATS, FLOATS);
        declare_copy(&t, &second, FLOATS, broken ? FLOATS - 1 : FLOATS);
        must(t.check->graph->begin(t.stream, &t.error), &t.error, "begin");
        assert_int_equal(t.check->stream->submit(t.stream, &first), QE_OK);
        assert_int_equal(t.check->stream->submit(t.stream, &second), QE_OK);
        must(t.check->graph->end(t.stream, &graph, &t.error), &t.error, "end");
        assert_true(t.b[1] == 101.0f); /* recorded, not run */
        assert_int_equal(t.check->graph->launch(graph, t.stream), QE_OK);
        qe_status status = t.check->stream->sync(t.stream, &t.error);
        if (broken)
            fails_with(&t, status, "a graph of 2 ops that begins with copy (layer 7) wrote what it did not declare");
        else
            must(status, &t.error, "launch");
        assert_true(t.c[1] == 1.0f);
        assert_true(t.c[FLOATS - 1] == (broken ? 263.0f : 63.0f));
        assert_int_equal(qe_check_counts(t.device).graphs, 1);
        t.check->graph->destroy(graph);
        bench_close(&t);
    }
}

/* Streams join and come back; what spoils a recording spoils it here too, and leaves nothing behind. */
static void recordings_join_fail_and_are_dropped_as_the_inner_ones_do(void **state) {
    (void)state;
    bench t;
    bench_open(&t);
    const qe_stream_ops *ops = t.check->stream;
    qe_event *fork, *join, *outside;
    qe_graph *graph = NULL;
    must(ops->event_create(t.device, &fork, &t.error), &t.error, "event");
    must(ops->event_create(t.device, &join, &t.error), &t.error, "event");
    must(ops->event_create(t.device, &outside, &t.error), &t.error, "event");
    qe_op first = copy_of(t.b, t.a, FLOATS), second = copy_of(t.c, t.b, FLOATS), strange = copy_of(t.a, t.c, FLOATS);
    declare_copy(&t, &first, FLOATS, FLOATS);
    declare_copy(&t, &second, FLOATS, FLOATS);
    assert_int_equal(ops->record(t.other, outside), QE_OK);

    must(t.check->graph->begin(t.stream, &t.error), &t.error, "begin");
    assert_int_equal(t.check->graph->begin(t.other, NULL), QE_ERROR_UNSUPPORTED);
    assert_int_equal(ops->submit(t.stream, &strange), QE_ERROR_ARGUMENT); /* declared nothing */
    assert_int_equal(ops->wait(t.stream, outside), QE_ERROR_ARGUMENT);
    assert_int_equal(t.check->graph->end(t.stream, &graph, NULL), QE_ERROR_ARGUMENT);
    must(t.check->graph->begin(t.stream, &t.error), &t.error, "begin");
    assert_int_equal(ops->sync(t.stream, NULL), QE_ERROR_ARGUMENT);
    t.check->graph->abandon(t.stream);

    must(t.check->graph->begin(t.stream, &t.error), &t.error, "begin");
    assert_int_equal(ops->submit(t.stream, &first), QE_OK);
    assert_int_equal(ops->record(t.stream, fork), QE_OK);
    assert_int_equal(ops->wait(t.other, fork), QE_OK);
    assert_int_equal(ops->submit(t.other, &second), QE_OK);
    assert_int_equal(ops->record(t.other, join), QE_OK);
    assert_int_equal(ops->wait(t.stream, join), QE_OK);
    must(t.check->graph->end(t.stream, &graph, &t.error), &t.error, "end");
    assert_int_equal(t.check->graph->info(graph).lanes, 2);
    assert_int_equal(t.check->graph->launch(graph, t.stream), QE_OK);
    must(ops->sync(t.stream, &t.error), &t.error, "launch");
    assert_true(t.c[1] == 1.0f);
    t.check->graph->destroy(graph);
    ops->event_destroy(fork);
    ops->event_destroy(join);
    ops->event_destroy(outside);
    bench_close(&t);
}

static void a_range_that_leaves_its_allocation_is_refused(void **state) {
    (void)state;
    bench t;
    bench_open(&t);
    qe_op op = copy_of(t.b, t.a, FLOATS);
    qe_range range = {.at = t.a + 1, .bytes = FLOATS * sizeof(float), .read = 1, .object = "a"};
    assert_int_equal(t.check->declare(t.device, &op, &range, 1, &t.error), QE_ERROR_ARGUMENT);
    assert_non_null(strstr(t.error.message, "256 bytes of a leave the 256 bytes"));
    bench_close(&t);
}

/* Freed memory of the host is not looked at any more: AddressSanitizer would say so. */
static void memory_of_the_host_is_looked_at_while_an_op_names_it(void **state) {
    (void)state;
    bench t;
    bench_open(&t);
    float *host = calloc(FLOATS, sizeof *host);
    assert_non_null(host);
    qe_op from_host = copy_of(t.a, host, FLOATS), op = copy_of(t.b, t.a, FLOATS);
    declare_copy(&t, &from_host, FLOATS - 1, FLOATS); /* it lies in no allocation: nothing is known of its last float */
    declare_copy(&t, &op, FLOATS, FLOATS);
    must(run_on(&t, &from_host), &t.error, "from the host");
    assert_true(t.a[1] == 0.0f);
    must(t.check->declare(t.device, &from_host, NULL, 0, &t.error), &t.error, "forget");
    free(host);
    must(run_on(&t, &op), &t.error, "copy");
    bench_close(&t);
}

static qe_status no_device(qe_device **device_out, qe_error *error_out) {
    (void)device_out;
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, NULL, "there is none");
}

static void a_device_that_wraps_nothing_refuses_all_calls(void **state) {
    (void)state;
    qe_device *device;
    qe_stream *stream;
    void *address;
    qe_error error = {0};
    const qe_backend *check = qe_check_backend();
    qe_backend inner = *qe_host_backend();
    inner.open = no_device;
    must(check->open(&device, &error), &error, "open");
    assert_int_equal(qe_check_wrap(device, &inner, NULL, &error), QE_ERROR_UNSUPPORTED);
    assert_string_equal(error.message, "there is none");
    memset(&error, 0, sizeof error);
    assert_int_equal(check->memory->alloc(device, 8, &address, &error), QE_ERROR_UNSUPPORTED);
    assert_string_equal(error.message, "there is none");
    assert_int_equal(check->stream->create(device, "s", &stream, &error), QE_ERROR_UNSUPPORTED);
    check->close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_declared_op_runs_as_if_it_had_run_once),
        cmocka_unit_test(an_op_without_a_declaration_fails_and_does_not_run),
        cmocka_unit_test(an_undeclared_write_is_taken_back),
        cmocka_unit_test(an_undeclared_read_is_narrowed_to_its_first_byte),
        cmocka_unit_test(streams_wait_for_events_in_the_order_of_submission),
        cmocka_unit_test(a_graph_is_held_to_what_all_its_ops_declared),
        cmocka_unit_test(recordings_join_fail_and_are_dropped_as_the_inner_ones_do),
        cmocka_unit_test(a_range_that_leaves_its_allocation_is_refused),
        cmocka_unit_test(memory_of_the_host_is_looked_at_while_an_op_names_it),
        cmocka_unit_test(a_device_that_wraps_nothing_refuses_all_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
