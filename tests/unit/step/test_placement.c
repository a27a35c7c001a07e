/* Where gradients are accumulated: both ways have the same bits under every schedule, and copies are counted. */
#include "step_world.h"

enum { STEPS = 4 };

static const struct {
    const char *schedule;
    uint32_t ranks, chunks;
} pipelines[] = {
    {"gpipe", 2, 1}, {"1f1b", 2, 1}, {"interleaved", 2, 2}, {"zbh1", 2, 1},  {"zbh2", 2, 1}, {"interleaved-zb", 2, 2},
    {"zbv", 2, 2},   {"v-half", 2, 2}, {"v-min", 2, 2},     {"1f1b-v", 2, 2}, {"dualpipev", 2, 2}, {"looped-bfs", 2, 2},
};

/* The state after some steps, and how many copies each of them made. */
static world_hash train(const world_options *options, uint64_t *copies_out) {
    world w;
    world_open(&w, options);
    for (int i = 0; i < STEPS; i++) {
        world_step(&w, 0);
        if (i == 0) *copies_out = w.result.gradient_copies;
        assert_int_equal(w.result.gradient_copies, *copies_out);
    }
    world_hash hash = world_state(&w);
    world_close(&w);
    return hash;
}

/* 4 layers of 4 linears and 2 gains, embedding, last gain, head. */
enum { WEIGHTS = 1 + 4 * 6 + 2, MICROBATCHES = 4 };

static void copies_change_no_bit_under_any_schedule(void **state) {
    (void)state;
    const qe_capture captures[] = {QE_CAPTURE_NONE, QE_CAPTURE_LAYER, QE_CAPTURE_ACTION, QE_CAPTURE_STEP};
    for (size_t p = 0; p < sizeof pipelines / sizeof *pipelines; p++)
        for (size_t c = 0; c < sizeof captures / sizeof *captures; c++) {
            world_options options = {.schedule = pipelines[p].schedule, .ranks = pipelines[p].ranks,
                                     .chunks = pipelines[p].chunks, .microbatches = MICROBATCHES,
                                     .capture = captures[c]};
            uint64_t copies;
            world_hash direct = train(&options, &copies);
            assert_int_equal(copies, 0);
            options.copy = 1;
            assert_string_equal(direct.text, train(&options, &copies).text);
            assert_int_equal(copies, WEIGHTS * MICROBATCHES);
        }
}

/* At 16 rows OpenBLAS rounds each product's sum once before it is added, as a device does at any size. */
static void a_product_that_is_set_apart_and_added_has_the_same_bits_where_the_backend_rounds_so(void **state) {
    (void)state;
    const qe_capture captures[] = {QE_CAPTURE_NONE, QE_CAPTURE_ACTION, QE_CAPTURE_STEP};
    for (size_t c = 0; c < sizeof captures / sizeof *captures; c++) {
        world_options options = {.schedule = "zbh1", .ranks = 2, .microbatches = MICROBATCHES, .capture = captures[c]};
        uint64_t copies;
        world_hash direct = train(&options, &copies);
        options.copy = options.apart = 1;
        assert_string_equal(direct.text, train(&options, &copies).text);
        assert_int_equal(copies, WEIGHTS * MICROBATCHES);
    }
}

/* What is set apart is the same for every microbatch, so one graph serves the first and the others. */
static void a_graph_that_owns_its_gradient_serves_the_first_microbatch_too(void **state) {
    (void)state;
    uint32_t graphs[2];
    for (int apart = 0; apart < 2; apart++) {
        world w;
        world_options options = {.copy = 1, .apart = apart, .capture = QE_CAPTURE_ACTION};
        world_open(&w, &options);
        graphs[apart] = qe_team_captured(w.team, 0).graphs;
        world_close(&w);
    }
    assert_int_equal(graphs[1] + 1, graphs[0]);
}

static void a_plan_counts_in_and_out(void **state) {
    (void)state;
    for (int apart = 0; apart < 2; apart++) {
        world w;
        world_options options = {.copy = 1, .apart = apart};
        uint32_t in = 0, out = 0;
        world_open(&w, &options);
        const qe_rank_plan *plan = &w.plan->rank[0];
        for (uint32_t u = 0; u < plan->unit_count; u++) {
            in += plan->units[u].kind == QE_UNIT_GRAD_IN;
            out += plan->units[u].kind == QE_UNIT_GRAD_OUT;
        }
        uint32_t moved = apart ? 1 + 4 * 2 + 1 : WEIGHTS; /* what no product makes is moved both ways */
        assert_int_equal(out, WEIGHTS * MICROBATCHES);
        assert_int_equal(in, moved * (MICROBATCHES - 1)); /* the first one sets */
        world_close(&w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copies_change_no_bit_under_any_schedule),
        cmocka_unit_test(a_product_that_is_set_apart_and_added_has_the_same_bits_where_the_backend_rounds_so),
        cmocka_unit_test(a_graph_that_owns_its_gradient_serves_the_first_microbatch_too),
        cmocka_unit_test(a_plan_counts_in_and_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
