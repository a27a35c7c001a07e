/* An edge that is planned and declared, but left out of what is executed, is trapped whoever wins the race: each kind
 * of edge in turn, by an order (order.h) that hears every call. tests/cuda/check_gpu.c asks the same of a GPU. */
#include "cut_check.h"

enum {
    RUNS = SANITIZED ? 3 : 100,
    RUNS_CAPTURED = SANITIZED ? 1 : 4,
    STEPS = SANITIZED ? 20 : 60,
    SEEDS = 500,
    DELAY_BYTES = FINDS_RACES ? 64 << 10 : 4 << 20,
    DELAY_OPS = 256,
};

/* A stream of the host is slow where it copies: up to a millisecond. */
typedef struct slow_stream {
    qe_op copy[DELAY_OPS + 1];
    char *to;
} slow_stream;

static char zeros[DELAY_BYTES];

static void slow_create(cut_stream *stream) {
    slow_stream *slow = cut_alloc(sizeof *slow);
    slow->to = cut_alloc(DELAY_BYTES);
    for (uint64_t i = 0; i <= DELAY_OPS; i++) {
        slow->copy[i] = (qe_op){.kind = QE_OP_COPY};
        slow->copy[i].args.copy =
            (qe_args_copy){.from = zeros, .to = slow->to, .bytes = i * (DELAY_BYTES / DELAY_OPS)};
    }
    stream->slow = slow;
}

static void slow_down(cut_stream *stream, uint64_t ns) {
    if (stream->slow == NULL) slow_create(stream);
    const uint64_t bytes_per_ns = 4, piece = DELAY_BYTES / DELAY_OPS;
    uint64_t pieces = ns * bytes_per_ns / piece;
    const slow_stream *slow = stream->slow;
    assert_int_equal(qe_host_backend()->stream->submit(stream->inner, &slow->copy[pieces % (DELAY_OPS + 1)]), QE_OK);
}

static void slow_end(cut_stream *stream) {
    slow_stream *slow = stream->slow;
    if (slow == NULL) return;
    free(slow->to);
    free(slow);
}

static void opened(qe_device *device, const void *context) {
    world_opened(cut_device_of(device)->inner, context);
}

static const qe_backend *shim(int watches) {
    const qe_backend *backend = cut_backend(qe_host_backend(), watches);
    cut.delay = slow_down;
    cut.delay_end = slow_end;
    return backend;
}

static world_options options_of(const char *schedule, uint32_t ranks, uint32_t chunks, qe_capture capture,
                                qe_contracts contracts) {
    return (world_options){.schedule = schedule, .ranks = ranks, .chunks = chunks, .capture = capture,
                           .contracts = contracts, .evaluates = 1, .opened = opened,
                           .backend = shim(contracts != QE_CONTRACTS_OFF)};
}

/* Other schedules and modes have the same bits. */
static cut_reference reference;

static int reference_setup(void **state) {
    (void)state;
    world w;
    world_options options = options_of("gpipe", 2, 1, QE_CAPTURE_NONE, QE_CONTRACTS_OFF);
    cut_world_open(&w, &options);
    cut_reference_make(&w, RUNS + 2, STEPS, &reference);
    world_close(&w);
    return 0;
}

static int reference_teardown(void **state) {
    (void)state;
    cut_reference_free(&reference);
    return 0;
}

static void assert_trapped(const cut_tally *tally, cut_kind kind, uint32_t runs) {
    if (tally->dropped == 0) return; /* no such edge */
    if (tally->trapped != runs || tally->unchanged != runs || tally->went_on != runs)
        print_error("%s: %u runs, %u trapped, %u unchanged, %u went on\n", cut_rows[kind].name, tally->runs,
                    tally->trapped, tally->unchanged, tally->went_on);
    assert_int_equal(tally->runs, runs);
    assert_int_equal(tally->trapped, runs);
    assert_int_equal(tally->unchanged, runs);
    assert_int_equal(tally->went_on, runs);
}

static void assert_rule(const cut_tally *tally, qe_rule rule) {
    assert_true(tally->dropped > 0);
    for (int other = 0; other < QE_RULE_COUNT; other++)
        if (tally->rules[other] > 0 && other != (int)rule)
            print_error("%s in %u runs, not %s\n", qe_rule_id((qe_rule)other), tally->rules[other], qe_rule_id(rule));
    assert_int_equal(tally->rules[rule], tally->runs);
}

/* Every kind of edge, without and with delays. Returns how many kinds the plan has. */
static int all_trapped(const world_options *options, uint32_t runs) {
    world w;
    int kinds = 0;
    cut_world_open(&w, options);
    for (int kind = CUT_ENTER; kind < CUT_KINDS; kind++) {
        if (cut_is_recorded((cut_kind)kind, options->capture) || kind == CUT_LANE) continue;
        for (int delayed = 0; delayed < 2; delayed++) {
            cut_tally tally = cut_trap_runs(&w, &reference, (cut_kind)kind, runs, delayed);
            assert_trapped(&tally, (cut_kind)kind, runs);
            kinds += !delayed && tally.dropped > 0;
            if (kind == CUT_ENTER) assert_rule(&tally, QE_RULE_SYNC_ENTER);
            if (kind == CUT_EXIT) assert_rule(&tally, QE_RULE_SYNC_EXIT);
            if (kind == CUT_DRAIN) assert_rule(&tally, QE_RULE_SYNC_HOST);
            if (kind > CUT_EXIT && kind < CUT_DRAIN && tally.dropped > 0) assert_rule(&tally, QE_RULE_SYNC_SIDE);
        }
    }
    world_close(&w);
    return kinds;
}

static void every_edge_that_is_left_out_is_trapped_in_every_run(void **state) {
    (void)state;
    world_options options = options_of("gpipe", 2, 1, QE_CAPTURE_NONE, QE_CONTRACTS_TRAP);
    assert_int_equal(all_trapped(&options, RUNS), CUT_LANE - CUT_ENTER);
}

static void other_schedules_are_no_different(void **state) {
    (void)state;
    static const struct {
        const char *schedule;
        uint32_t ranks, chunks;
        int kinds; /* one rank sends to nobody */
    } ways[] = {{"1f1b", 2, 1, 9}, {"zbh1", 2, 1, 9}, {"interleaved", 1, 2, 5}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        world_options options =
            options_of(ways[i].schedule, ways[i].ranks, ways[i].chunks, QE_CAPTURE_NONE, QE_CONTRACTS_TRAP);
        assert_int_equal(all_trapped(&options, RUNS_CAPTURED), ways[i].kinds);
    }
}

static void edges_outside_of_recordings_are_trapped_in_every_mode(void **state) {
    (void)state;
    static const struct {
        qe_capture capture;
        int kinds; /* whose edges are not recorded */
    } modes[] = {{QE_CAPTURE_LAYER, 7}, {QE_CAPTURE_ACTION, 7}, {QE_CAPTURE_STEP, 3}};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        world_options options = options_of("gpipe", 2, 1, modes[i].capture, QE_CONTRACTS_TRAP);
        assert_int_equal(all_trapped(&options, RUNS_CAPTURED), modes[i].kinds);
    }
}

static void a_recording_with_an_op_that_does_not_come_back_is_refused(void **state) {
    (void)state;
    static const cut_kind kinds[] = {CUT_FOLD, CUT_COMMIT, CUT_LANE};
    world w;
    world_options options = options_of("1f1b", 2, 1, QE_CAPTURE_STEP, QE_CONTRACTS_TRAP);
    cut_world_open(&w, &options);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        cut_tally tally = cut_capture_runs(&w, &reference, kinds[i], RUNS_CAPTURED);
        assert_trapped(&tally, kinds[i], RUNS_CAPTURED);
        assert_true(tally.dropped > 0);
    }
    world_close(&w);
}

static void nothing_is_trapped_where_no_edge_is_missing(void **state) {
    (void)state;
    static const qe_capture modes[] = {QE_CAPTURE_NONE, QE_CAPTURE_ACTION, QE_CAPTURE_STEP};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        world w;
        int same = 0;
        world_options options = options_of(i == 0 ? "zbh1" : "gpipe", 2, 1, modes[i], QE_CONTRACTS_TRAP);
        cut_world_open(&w, &options);
        assert_int_equal(cut_clean_run(&w, &reference, STEPS, &same), 0);
        assert_true(same);
        world_close(&w);
    }
}

static void without_contracts_every_edge_decides_the_bits(void **state) {
    (void)state;
    if (FINDS_RACES) skip(); /* these are races */
    world w;
    world_options options = options_of("gpipe", 2, 1, QE_CAPTURE_NONE, QE_CONTRACTS_OFF);
    cut_world_open(&w, &options);
    for (int kind = CUT_ENTER; kind < CUT_LANE; kind++) {
        uint32_t runs = 0;
        if (!cut_is_real(&w, &reference, (cut_kind)kind, SEEDS, &runs))
            fail_msg("%s: the same bits in %u runs", cut_rows[kind].name, runs);
        print_message("%-10s other bits in run %u\n", cut_rows[kind].name, runs);
    }
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_edge_that_is_left_out_is_trapped_in_every_run),
        cmocka_unit_test(other_schedules_are_no_different),
        cmocka_unit_test(edges_outside_of_recordings_are_trapped_in_every_mode),
        cmocka_unit_test(a_recording_with_an_op_that_does_not_come_back_is_refused),
        cmocka_unit_test(nothing_is_trapped_where_no_edge_is_missing),
        cmocka_unit_test(without_contracts_every_edge_decides_the_bits),
    };
    return cmocka_run_group_tests(tests, reference_setup, reference_teardown);
}
