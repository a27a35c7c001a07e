/* test_numerical_errors.c - the numbers that NVIDIA's guide to CUDA graphs prints in its catalogue of silent errors
 * (docs/reports.md, N01 to N15), computed by recorded graphs of the host: the wrong one where the fault is left in, the
 * right one where it is cured. Beside each, the trace of the fault is refused and the trace of the cure is not. */
#include "graphs.h"

#include <stdio.h>
#include <string.h>

#include "qeffect/trace.h"

static qe_stream *stream;

static int world_open(void **state) {
    if (device_open(state) != 0) return -1;
    stream = stream_of("compute");
    return 0;
}

static int world_close(void **state) {
    host->stream->destroy(stream);
    return device_close(state);
}

/* The first rule that a trace breaks. */
static qe_rule verdict_of(const char *name) {
    char path[256];
    qe_program program;
    qe_violations violations;
    snprintf(path, sizeof path, "tests/traces/nvidia_%s.qet", name);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    qe_program_init(&program);
    assert_int_equal(qe_trace_read(file, path, &program, NULL), QE_OK);
    fclose(file);
    qe_status status = qe_program_judge(&program, &violations, NULL);
    qe_program_deinit(&program);
    return status == QE_OK ? QE_RULE_NONE : violations.record[0].rule;
}

static void assert_trapped(const char *fault, qe_rule rule, const char *cure) {
    assert_int_equal(verdict_of(fault), rule);
    assert_int_equal(verdict_of(cure), QE_RULE_NONE);
}

/* A graph of some ops on the stream. */
static qe_graph *graph_of(const qe_op *ops, int count) {
    begin(stream);
    for (int i = 0; i < count; i++) submit(stream, &ops[i]);
    return end(stream);
}

static void replay(qe_graph *graph) {
    launch(graph, stream);
    sync_with(stream);
}

static void run(const qe_op *op) {
    submit(stream, op);
    sync_with(stream);
}

/* N02: a branch asks whether it is captured. */
static qe_op signed_copy(int captured, const int64_t *plus, const int64_t *minus, int64_t *y) {
    return copy(captured ? minus : plus, y, sizeof *y);
}

static void code_that_asks_whether_it_is_captured_gives_minus_three_instead_of_three(void **state) {
    (void)state;
    int64_t plus = 3, minus = -3, y = 0;
    qe_op eager = signed_copy(0, &plus, &minus, &y), captured = signed_copy(1, &plus, &minus, &y);
    run(&eager);
    assert_int_equal(y, 3);
    qe_graph *wrong = graph_of(&captured, 1), *right = graph_of(&eager, 1);
    replay(wrong);
    assert_int_equal(y, -3);
    replay(right);
    assert_int_equal(y, 3);
    host->graph->destroy(wrong);
    host->graph->destroy(right);
    assert_trapped("02_capture_aware_code", QE_RULE_GRAPH_MODE, "02_right");
}

/* N08: the copy's source of the host is gone; its bytes are somebody else's number by then. */
static void a_source_that_is_gone_gives_somebody_elses_number_instead_of_three(void **state) {
    (void)state;
    uint64_t source = 3, y = 0;
    qe_op op = copy(&source, &y, sizeof y);
    qe_graph *graph = graph_of(&op, 1);
    replay(graph);
    assert_int_equal(y, 3);
    source = 94457301632419u; /* given back, and handed to who writes this */
    replay(graph);
    assert_int_equal(y, 94457301632419u);
    host->graph->destroy(graph);
    assert_trapped("08_host_source_gone", QE_RULE_BUFFER_FREED, "08_right");
}

/* N09: three outputs are collected from one place. */
static void outputs_of_one_place_sum_to_fifteen_instead_of_eight(void **state) {
    (void)state;
    static const uint64_t inputs[] = {1, 2, 5};
    uint64_t x = 0, y = 0, kept[3];
    const uint64_t *collected[3];
    qe_op op = copy(&x, &y, sizeof y);
    qe_graph *graph = graph_of(&op, 1);
    for (int i = 0; i < 3; i++) {
        x = inputs[i];
        replay(graph);
        collected[i] = &y;
        kept[i] = y;
    }
    assert_int_equal(*collected[0] + *collected[1] + *collected[2], 15);
    assert_int_equal(kept[0] + kept[1] + kept[2], 8);
    host->graph->destroy(graph);
    assert_trapped("09_output_reused", QE_RULE_SLOT_STALE, "09_right");
}

/* N10: a counter of the host was 4 when it was captured; counted on the device, it counts. */
static void a_counter_of_the_host_stays_four(void **state) {
    (void)state;
    static const uint8_t ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    uint8_t hits[8] = {0};
    uint64_t counter = 4, on_device = 4, one = 1, sum = 0;
    qe_op op = copy(ones, hits, counter);
    qe_graph *graph = graph_of(&op, 1);
    counter++;
    replay(graph);
    for (int i = 0; i < 8; i++) sum += hits[i];
    assert_int_equal(sum, 4);
    assert_int_equal(counter, 5);
    qe_channel add = {.cell = &on_device, .factor = 1};
    qe_op count = fuse(&add, &one);
    qe_graph *right = graph_of(&count, 1);
    replay(right);
    assert_int_equal(on_device, 5);
    host->graph->destroy(graph);
    host->graph->destroy(right);
    assert_trapped("10_host_state", QE_RULE_GRAPH_CONSTANT, "10_right");
}

/* out = 2 x, where a library multiplies on its own stream, joined or not. */
static uint64_t multiplied_by_a_library(int joins) {
    uint64_t x = 3, product = 0, out = 1;
    qe_channel by = {.cell = &product, .factor = 2};
    qe_op multiply = fuse(&by, &x), body = copy(&product, &out, sizeof out);
    qe_stream *library = stream_of("library");
    qe_event *fork = event_of(), *join = event_of();
    begin(stream);
    record(stream, fork);
    if (joins) wait_for(library, fork);
    submit(library, &multiply);
    if (joins) record(library, join);
    if (joins) wait_for(stream, join);
    submit(stream, &body);
    qe_graph *graph = end(stream);
    sync_with(library);
    product = 0; /* whatever ran while it was captured */
    replay(graph);
    host->graph->destroy(graph);
    host->stream->destroy(library);
    host->stream->event_destroy(fork);
    host->stream->event_destroy(join);
    return out;
}

static void an_op_on_a_stream_that_never_joined_is_missing_and_the_result_is_zero(void **state) {
    (void)state;
    assert_int_equal(multiplied_by_a_library(0), 0);
    assert_int_equal(multiplied_by_a_library(1), 3);
    assert_trapped("11_library_on_its_own_stream", QE_RULE_SYNC_SIDE, "11_right");
}

/* N13: y2 = 2 + the first graph's output, which lies where the second graph puts its own. */
static void two_graphs_of_one_pool_give_three_instead_of_four(void **state) {
    (void)state;
    uint64_t one = 1, two = 2, pool = 0, y = 0;
    qe_op first = copy(&two, &pool, sizeof pool), second = copy(&one, &pool, sizeof pool);
    qe_channel plus = {.cell = &y, .factor = 1};
    qe_op use = fuse(&plus, &pool);
    qe_graph *graphs[] = {graph_of(&first, 1), graph_of(&second, 1)};
    y = 2;
    replay(graphs[0]);
    replay(graphs[1]);
    run(&use);
    assert_int_equal(y, 3);
    y = 2;
    replay(graphs[0]);
    run(&use);
    replay(graphs[1]);
    assert_int_equal(y, 4);
    for (int i = 0; i < 2; i++) host->graph->destroy(graphs[i]);
    assert_trapped("13_shared_pool", QE_RULE_SLOT_LIVE, "13_right");
}

/* N14: three microbatches x = 2, 3, 4 with y = x * x; a forward keeps x twice, a backward adds both and uses the second
 * place as scratch. Captured f0 b0 f1 b1 f2 b2, the second keeps where the first did. */
enum { MICROBATCHES = 3 };
typedef struct pooled {
    uint64_t x[MICROBATCHES], gradient[MICROBATCHES], pool[4], zero;
    qe_channel plus[MICROBATCHES];
    qe_graph *forward[MICROBATCHES], *backward[MICROBATCHES];
} pooled;

static void pooled_init(pooled *p) {
    static const int places[MICROBATCHES] = {0, 0, 2};
    *p = (pooled){.x = {2, 3, 4}};
    for (int i = 0; i < MICROBATCHES; i++) {
        uint64_t *kept = &p->pool[places[i]];
        p->plus[i] = (qe_channel){.cell = &p->gradient[i], .factor = 1};
        qe_op f[] = {copy(&p->x[i], &kept[0], sizeof *kept), copy(&p->x[i], &kept[1], sizeof *kept)};
        qe_op b[] = {copy(&kept[0], &p->gradient[i], sizeof *kept), fuse(&p->plus[i], &kept[1]),
                     copy(&p->zero, &kept[1], sizeof *kept)};
        p->forward[i] = graph_of(f, 2);
        p->backward[i] = graph_of(b, 3);
    }
}

/* "f0 f1 b0": launches in this order. */
static void pooled_replay(const pooled *p, const char *order) {
    for (const char *at = order; *at != '\0'; at += at[2] == ' ' ? 3 : 2)
        replay(at[0] == 'f' ? p->forward[at[1] - '0'] : p->backward[at[1] - '0']);
}

static void assert_gradients(const pooled *p, uint64_t first, uint64_t second, uint64_t third) {
    assert_int_equal(p->gradient[0], first);
    assert_int_equal(p->gradient[1], second);
    assert_int_equal(p->gradient[2], third);
}

static void another_order_of_replays_gives_gradients_of_six_three_eight_instead_of_four_six_eight(void **state) {
    (void)state;
    pooled p;
    pooled_init(&p);
    pooled_replay(&p, "f0 f1 b0 f2 b1 b2");
    assert_gradients(&p, 6, 3, 8);
    pooled_replay(&p, "f0 b0 f1 b1 f2 b2");
    assert_gradients(&p, 4, 6, 8);
    for (int i = 0; i < MICROBATCHES; i++) {
        host->graph->destroy(p.forward[i]);
        host->graph->destroy(p.backward[i]);
    }
    assert_trapped("14_replay_order", QE_RULE_SLOT_LIVE, "14_right");
    assert_trapped("14_replayed", QE_RULE_SLOT_LIVE, "14_right");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(code_that_asks_whether_it_is_captured_gives_minus_three_instead_of_three),
        cmocka_unit_test(a_source_that_is_gone_gives_somebody_elses_number_instead_of_three),
        cmocka_unit_test(outputs_of_one_place_sum_to_fifteen_instead_of_eight),
        cmocka_unit_test(a_counter_of_the_host_stays_four),
        cmocka_unit_test(an_op_on_a_stream_that_never_joined_is_missing_and_the_result_is_zero),
        cmocka_unit_test(two_graphs_of_one_pool_give_three_instead_of_four),
        cmocka_unit_test(another_order_of_replays_gives_gradients_of_six_three_eight_instead_of_four_six_eight),
    };
    return cmocka_run_group_tests(tests, world_open, world_close);
}
