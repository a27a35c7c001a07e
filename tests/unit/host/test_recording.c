/* Recordings of the host backend: everything that cannot become a graph is refused by name, and streams, events and
 * memory are then as they were. */
#include "graphs.h"

static qe_device *stranger; /* another device, with a stream and an event */
static qe_stream *strange_stream;
static qe_event *strange_event, *outside_event, *ended_event, *block_event;
static void *block; /* of the device's memory */
static char host_bytes[8];

/* Each does the wrong thing while streams[0] records behind its first op, and returns what that call returned. */
typedef qe_status (*spoiler)(diamond *d, qe_error *error);

static qe_status lane_is_forgotten(diamond *d, qe_error *error) {
    (void)error;
    record(d->streams[0], d->forked);
    wait_for(d->streams[1], d->forked);
    submit(d->streams[1], &d->ops[1]);
    return QE_OK;
}
static qe_status lane_works_on(diamond *d, qe_error *error) {
    lane_is_forgotten(d, error);
    record(d->streams[1], d->joined[1]);
    wait_for(d->streams[0], d->joined[1]);
    submit(d->streams[1], &d->ops[1]);
    return QE_OK;
}
static qe_status lane_comes_back_to_a_lane_only(diamond *d, qe_error *error) {
    lane_is_forgotten(d, error);
    record(d->streams[1], d->joined[1]);
    wait_for(d->streams[0], d->joined[1]);
    wait_for(d->streams[2], d->joined[1]);
    submit(d->streams[2], &d->ops[2]);
    record(d->streams[2], d->joined[2]);
    wait_for(d->streams[1], d->joined[2]);
    return QE_OK;
}
static qe_status wait_for_outside(diamond *d, qe_error *error) {
    (void)error;
    return host->stream->wait(d->streams[0], outside_event);
}
static qe_status lane_waits_for_outside(diamond *d, qe_error *error) {
    (void)error;
    record(d->streams[0], d->forked);
    wait_for(d->streams[1], d->forked);
    return host->stream->wait(d->streams[1], outside_event);
}
static qe_status wait_for_own_past(diamond *d, qe_error *error) {
    (void)error;
    return host->stream->wait(d->streams[0], block_event);
}
static qe_status wait_for_ended_recording(diamond *d, qe_error *error) {
    (void)error;
    return host->stream->wait(d->streams[0], ended_event);
}
static qe_status recordings_meet(diamond *d, qe_error *error) {
    begin(d->streams[1]);
    record(d->streams[1], d->joined[1]);
    const qe_status status = host->stream->wait(d->streams[0], d->joined[1]);
    assert_int_equal(host->stream->submit(d->streams[1], &d->ops[1]), QE_ERROR_ARGUMENT);
    qe_graph *graph = NULL;
    assert_int_equal(host->graph->end(d->streams[1], &graph, error), QE_ERROR_ARGUMENT);
    assert_non_null(strstr(error->message, "another recording"));
    assert_null(graph);
    return status;
}
static qe_status sync_inside(diamond *d, qe_error *error) { return host->stream->sync(d->streams[0], error); }
static qe_status sync_of_a_lane(diamond *d, qe_error *error) {
    record(d->streams[0], d->forked);
    wait_for(d->streams[1], d->forked);
    return host->stream->sync(d->streams[1], error);
}
static qe_status sync_beside(diamond *d, qe_error *error) { return host->stream->sync(d->streams[2], error); }
static qe_status event_sync_inside(diamond *d, qe_error *error) {
    record(d->streams[0], d->forked);
    return host->stream->event_sync(d->forked, error);
}
static qe_status event_sync_beside(diamond *d, qe_error *error) {
    (void)d;
    return host->stream->event_sync(outside_event, error);
}
static qe_status alloc_inside(diamond *d, qe_error *error) {
    (void)d;
    void *address = NULL;
    const qe_status status = host->memory->alloc(device, 64, &address, error);
    assert_null(address);
    return status;
}
static qe_status release_inside(diamond *d, qe_error *error) {
    (void)d;
    (void)error;
    host->memory->release(device, block);
    block = NULL;
    return QE_OK;
}
static qe_status write_inside(diamond *d, qe_error *error) {
    (void)d;
    const qe_status status = host->memory->write(device, block, "changed", 8, error);
    assert_memory_equal(block, "as it is", 8);
    return status;
}
static qe_status read_inside(diamond *d, qe_error *error) {
    (void)d;
    const qe_status status = host->memory->read(device, host_bytes, block, 8, error);
    assert_int_equal(host_bytes[0], 0);
    return status;
}
static qe_status end_by_a_lane(diamond *d, qe_error *error) {
    record(d->streams[0], d->forked);
    wait_for(d->streams[1], d->forked);
    qe_graph *graph = NULL;
    const qe_status status = host->graph->end(d->streams[1], &graph, error);
    assert_null(graph);
    return status;
}
static qe_status launch_inside(diamond *d, qe_error *error) {
    (void)error;
    return host->graph->launch(d->graph, d->streams[0]);
}
static qe_status lane_is_destroyed(diamond *d, qe_error *error) {
    lane_is_forgotten(d, error);
    host->stream->destroy(d->streams[1]);
    d->streams[1] = stream_of("second again");
    return QE_OK;
}
static qe_status record_of_a_strange_event(diamond *d, qe_error *error) {
    (void)error;
    return host->stream->record(d->streams[0], strange_event);
}
static qe_status join_of_a_strange_stream(diamond *d, qe_error *error) {
    (void)error;
    record(d->streams[0], d->forked);
    return host->stream->wait(strange_stream, d->forked);
}
static qe_status one_stream_too_many(diamond *d, qe_error *error) {
    (void)error;
    qe_stream *more[16];
    qe_status status = QE_OK;
    record(d->streams[0], d->forked);
    for (int i = 0; i < 16; ++i) {
        more[i] = stream_of("more");
        assert_int_equal(status, QE_OK);
        status = host->stream->wait(more[i], d->forked);
    }
    for (int i = 0; i < 16; ++i) host->stream->destroy(more[i]);
    return status;
}
static qe_status a_step_too_many(diamond *d, qe_error *error) {
    (void)error;
    qe_status status = QE_OK;
    long steps = 1;
    while ((status = host->stream->submit(d->streams[0], &d->ops[0])) == QE_OK) ++steps;
    assert_int_equal(steps, 1 << 20);
    return status;
}

static const struct wrong {
    spoiler does;
    qe_status said; /* by the call itself */
    qe_status ended;
    const char *message; /* part of what end says */
    int is_uncounted;    /* it makes threads or gives memory back: its blocks are not those of the recording alone */
} wrongs[] = {
    {lane_is_forgotten, QE_OK, QE_ERROR_ARGUMENT, "stream 'second' joined the recording and did not come back", 0},
    {lane_works_on, QE_OK, QE_ERROR_ARGUMENT, "stream 'second' joined the recording and did not come back", 0},
    {lane_comes_back_to_a_lane_only, QE_OK, QE_ERROR_ARGUMENT, "stream 'third' joined", 0},
    {wait_for_outside, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "event recorded outside the recording", 0},
    {lane_waits_for_outside, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "stream 'second' waited while it recorded", 0},
    {wait_for_own_past, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "event recorded outside the recording", 0},
    {wait_for_ended_recording, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "event recorded outside the recording", 0},
    {recordings_meet, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "event of another recording", 0},
    {sync_inside, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "a sync of stream 'origin' while", 0},
    {sync_of_a_lane, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "a sync of stream 'second' while", 0},
    {sync_beside, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "a sync of stream 'third' while", 0},
    {event_sync_inside, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "a sync of an event while", 0},
    {event_sync_beside, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "a sync of an event while", 0},
    {alloc_inside, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "an allocation of memory while", 0},
    {release_inside, QE_OK, QE_ERROR_ARGUMENT, "a release of memory while", 1},
    {write_inside, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "a write by the host while", 0},
    {read_inside, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "a read by the host while", 0},
    {end_by_a_lane, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "stream 'second' joined the recording and ended it", 0},
    {launch_inside, QE_ERROR_UNSUPPORTED, QE_ERROR_UNSUPPORTED, "a graph was launched on stream 'origin'", 0},
    {lane_is_destroyed, QE_OK, QE_ERROR_ARGUMENT, "stream 'second' was destroyed", 1},
    {record_of_a_strange_event, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "an event of another device", 0},
    {join_of_a_strange_stream, QE_ERROR_ARGUMENT, QE_ERROR_ARGUMENT, "stream 'strange' was given", 0},
    {one_stream_too_many, QE_ERROR_LIMIT, QE_ERROR_LIMIT, "stream 'more' would be one more than the 16", 1},
    {a_step_too_many, QE_ERROR_LIMIT, QE_ERROR_LIMIT, "more than 1048576 steps", 0},
};

static void wrong_setup(diamond *d) {
    diamond_init(d);
    assert_int_equal(host->open(&stranger, NULL), QE_OK);
    assert_int_equal(host->stream->create(stranger, "strange", &strange_stream, NULL), QE_OK);
    assert_int_equal(host->stream->event_create(stranger, &strange_event, NULL), QE_OK);
    record(strange_stream, strange_event);
    assert_int_equal(host->memory->alloc(device, 8, &block, NULL), QE_OK);
    assert_int_equal(host->memory->write(device, block, "as it is", 8, NULL), QE_OK);
    outside_event = event_of();
    ended_event = event_of();
    block_event = event_of();
    record(d->streams[2], outside_event);
    record(d->streams[0], block_event);
    record(d->streams[2], d->forked); /* what events were before must be what they are after */
    begin(d->streams[0]);
    submit(d->streams[0], &d->ops[0]);
    record(d->streams[0], ended_event);
    d->graph = end(d->streams[0]);
}

static void wrong_teardown(diamond *d) {
    host->memory->release(device, block);
    block = NULL;
    host->stream->event_destroy(outside_event);
    host->stream->event_destroy(ended_event);
    host->stream->event_destroy(block_event);
    host->stream->event_destroy(strange_event);
    host->stream->destroy(strange_stream);
    host->close(stranger);
    diamond_deinit(d);
}

static void wrong_try(diamond *d, const struct wrong *wrong) {
    qe_graph *graph = NULL;
    qe_error error = {0};
    const long before = blocks_live();
    begin(d->streams[0]);
    submit(d->streams[0], &d->ops[0]);
    assert_int_equal(wrong->does(d, &error), wrong->said);
    if (wrong->said != QE_OK) assert_int_equal(host->stream->submit(d->streams[0], &d->ops[0]), wrong->ended);
    assert_int_equal(host->graph->end(d->streams[0], &graph, &error), wrong->ended);
    assert_null(graph);
    assert_int_equal(error.status, wrong->ended);
    if (!strstr(error.message, wrong->message)) fail_msg("'%s' is not in '%s'", wrong->message, error.message);
    assert_true(error.remedy[0] != 0);
    if (!wrong->is_uncounted) assert_int_equal(blocks_live(), before);
    assert_int_equal(host->graph->end(d->streams[0], &graph, &error), QE_ERROR_ARGUMENT);
    /* the event has its record outside again */
    assert_int_equal(host->stream->event_sync(d->forked, NULL), QE_OK);
    wait_for(d->streams[0], d->forked);
    assert_int_equal(d->x, 0);
}

static void whatever_spoils_a_recording_is_named_at_its_end_and_leaves_streams_that_run(void **state) {
    (void)state;
    static diamond d;
    for (size_t i = 0; i < sizeof wrongs / sizeof wrongs[0]; ++i) {
        wrong_setup(&d);
        wrong_try(&d, &wrongs[i]);
        for (int run = 0; run < 3; ++run) diamond_submit(&d);
        sync_with(d.streams[0]);
        assert_diamond(&d, 3);
        host->graph->destroy(d.graph);
        diamond_record(&d); /* and that can record */
        launch(d.graph, d.streams[0]);
        sync_with(d.streams[0]);
        assert_diamond(&d, 4);
        wrong_teardown(&d);
    }
}

static void only_the_first_cause_is_told(void **state) {
    (void)state;
    static diamond d;
    qe_graph *graph = NULL;
    qe_error error = {0};
    wrong_setup(&d);
    begin(d.streams[0]);
    assert_int_equal(alloc_inside(&d, &error), QE_ERROR_ARGUMENT);
    assert_int_equal(sync_inside(&d, &error), QE_ERROR_ARGUMENT);
    assert_int_equal(wait_for_outside(&d, &error), QE_ERROR_ARGUMENT);
    assert_int_equal(host->stream->record(d.streams[0], d.forked), QE_ERROR_ARGUMENT);
    assert_int_equal(launch_inside(&d, &error), QE_ERROR_ARGUMENT);
    assert_int_equal(host->graph->end(d.streams[0], &graph, &error), QE_ERROR_ARGUMENT);
    assert_non_null(strstr(error.message, "an allocation of memory"));
    wrong_teardown(&d);
}

static void a_second_begin_is_refused_and_the_recording_goes_on(void **state) {
    (void)state;
    static diamond d;
    qe_error error = {0};
    diamond_init(&d);
    begin(d.streams[0]);
    assert_int_equal(host->graph->begin(d.streams[0], &error), QE_ERROR_ARGUMENT);
    assert_non_null(strstr(error.message, "stream 'origin' is recording already"));
    record(d.streams[0], d.forked);
    wait_for(d.streams[1], d.forked);
    assert_int_equal(host->graph->begin(d.streams[1], &error), QE_ERROR_ARGUMENT); /* it joined that recording */
    diamond_submit(&d);
    d.graph = end(d.streams[0]);
    launch(d.graph, d.streams[0]);
    sync_with(d.streams[0]);
    assert_diamond(&d, 1);
    diamond_deinit(&d);
}

static void an_end_without_a_begin_is_refused(void **state) {
    (void)state;
    qe_stream *stream = stream_of("idle");
    qe_graph *graph = NULL;
    qe_error error = {0};
    assert_int_equal(host->graph->end(stream, &graph, &error), QE_ERROR_ARGUMENT);
    assert_non_null(strstr(error.message, "stream 'idle' is not recording"));
    assert_null(graph);
    host->graph->abandon(stream);
    sync_with(stream);
    host->stream->destroy(stream);
}

static void an_event_recorded_inside_is_of_no_use_outside_until_it_is_recorded_again(void **state) {
    (void)state;
    static diamond d;
    qe_error error = {0};
    wrong_setup(&d);
    assert_int_equal(host->stream->wait(d.streams[1], ended_event), QE_ERROR_ARGUMENT);
    assert_int_equal(host->stream->event_sync(ended_event, &error), QE_ERROR_ARGUMENT);
    assert_non_null(strstr(error.message, "inside a recording"));
    begin(d.streams[0]); /* a recording that comes to nothing leaves it of no use */
    record(d.streams[0], ended_event);
    host->graph->abandon(d.streams[0]);
    assert_int_equal(host->stream->wait(d.streams[1], ended_event), QE_ERROR_ARGUMENT);
    record(d.streams[0], ended_event);
    wait_for(d.streams[1], ended_event);
    assert_int_equal(host->stream->event_sync(ended_event, NULL), QE_OK);
    for (int i = 0; i < LANES; ++i) sync_with(d.streams[i]);
    wrong_teardown(&d);
}

static void an_event_recorded_outside_meanwhile_belongs_to_no_recording(void **state) {
    (void)state;
    static diamond d;
    diamond_init(&d);
    begin(d.streams[0]);
    submit(d.streams[0], &d.ops[0]);
    record(d.streams[0], d.forked);
    record(d.streams[0], d.joined[0]);
    record(d.streams[1], d.forked); /* outside */
    wait_for(d.streams[2], d.forked);
    submit(d.streams[2], &d.ops[2]); /* so this runs, and joins nothing */
    host->stream->event_destroy(d.joined[0]);
    d.joined[0] = NULL;
    d.graph = end(d.streams[0]);
    assert_int_equal(host->graph->info(d.graph).ops, 1);
    assert_int_equal(host->stream->event_sync(d.forked, NULL), QE_OK);
    sync_with(d.streams[2]);
    diamond_deinit(&d);
}

static void an_abandoned_recording_leaves_nothing_whoever_abandons_it(void **state) {
    (void)state;
    static diamond d;
    diamond_init(&d);
    const long before = blocks_live();
    for (int by = 0; by < LANES; ++by) {
        begin(d.streams[0]);
        diamond_submit(&d);
        host->graph->abandon(d.streams[by]);
        assert_int_equal(blocks_live(), before);
    }
    diamond_submit(&d);
    sync_with(d.streams[0]);
    assert_diamond(&d, 1);
    begin(d.streams[0]);
    diamond_submit(&d);
    host->stream->destroy(d.streams[0]); /* the stream that records goes, and the recording with it */
    d.streams[0] = stream_of("origin again");
    diamond_submit(&d);
    sync_with(d.streams[0]);
    assert_diamond(&d, 2);
    diamond_deinit(&d);
}

static void a_launch_that_a_recording_stream_would_have_to_run_is_refused(void **state) {
    (void)state;
    static diamond d;
    diamond_init(&d);
    diamond_record(&d);
    begin(d.streams[2]);
    assert_int_equal(host->graph->launch(d.graph, d.streams[0]), QE_ERROR_ARGUMENT);
    qe_graph *empty = end(d.streams[2]); /* which goes on */
    launch(d.graph, d.streams[0]);
    sync_with(d.streams[0]);
    assert_diamond(&d, 1);
    host->graph->destroy(empty);
    diamond_deinit(&d);
}

static void a_launch_on_another_device_is_refused(void **state) {
    (void)state;
    static diamond d;
    wrong_setup(&d);
    assert_int_equal(host->graph->launch(d.graph, strange_stream), QE_ERROR_ARGUMENT);
    wrong_teardown(&d);
}

/* One turn between two lanes. A stream that could not join is not recorded: what it is given next would run. */
static qe_status turn_submit(diamond *d) {
    qe_status status = host->stream->submit(d->streams[0], &d->ops[0]);
    if (status == QE_OK) status = host->stream->record(d->streams[0], d->forked);
    if (status == QE_OK) status = host->stream->wait(d->streams[1], d->forked);
    if (status == QE_OK) status = host->stream->submit(d->streams[1], &d->ops[1]);
    if (status == QE_OK) status = host->stream->record(d->streams[1], d->joined[1]);
    return status == QE_OK ? host->stream->wait(d->streams[0], d->joined[1]) : status;
}

/* A recording long enough to grow twice; QE_OK or the first refusal, which its end repeats. */
static qe_status long_recording(diamond *d, qe_graph **graph_out, qe_error *error) {
    qe_status status = host->graph->begin(d->streams[0], error);
    if (status != QE_OK) return status;
    for (int turn = 0; turn < 40 && status == QE_OK; ++turn) status = turn_submit(d);
    const qe_status ended = host->graph->end(d->streams[0], graph_out, error);
    if (status != QE_OK) assert_int_equal(ended, status);
    return ended;
}

static void whichever_allocation_of_a_recording_fails_it_says_so_and_leaves_nothing(void **state) {
    (void)state;
    if (!COUNTS_ALLOCATIONS) skip();
    static diamond d;
    diamond_init(&d);
    long failed = 0;
    for (qe_status status = QE_ERROR_MEMORY; status != QE_OK; ++failed) {
        qe_graph *graph = NULL;
        qe_error error = {0};
        const long before = blocks_live();
        allocation_fail(failed);
        status = long_recording(&d, &graph, &error);
        allocation_fail(-1);
        host->graph->destroy(graph);
        assert_int_equal(blocks_live(), before);
        assert_int_equal(status, error.status);
        if (status == QE_OK) break;
        assert_int_equal(status, QE_ERROR_MEMORY);
        assert_non_null(strstr(error.message, "no memory for"));
        d.x = d.y = d.z = 0;
        diamond_submit(&d);
        sync_with(d.streams[0]);
        assert_diamond(&d, 1);
    }
    assert_true(failed >= 5); /* the recording, its steps three times, the graph */
    diamond_deinit(&d);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whatever_spoils_a_recording_is_named_at_its_end_and_leaves_streams_that_run),
        cmocka_unit_test(only_the_first_cause_is_told),
        cmocka_unit_test(a_second_begin_is_refused_and_the_recording_goes_on),
        cmocka_unit_test(an_end_without_a_begin_is_refused),
        cmocka_unit_test(an_event_recorded_inside_is_of_no_use_outside_until_it_is_recorded_again),
        cmocka_unit_test(an_event_recorded_outside_meanwhile_belongs_to_no_recording),
        cmocka_unit_test(an_abandoned_recording_leaves_nothing_whoever_abandons_it),
        cmocka_unit_test(a_launch_that_a_recording_stream_would_have_to_run_is_refused),
        cmocka_unit_test(a_launch_on_another_device_is_refused),
        cmocka_unit_test(whichever_allocation_of_a_recording_fails_it_says_so_and_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, device_open, device_close);
}
