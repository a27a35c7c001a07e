/* The simulator: the golden table and the bubble rates of the papers, transfers, pairs, optimizers, what is refused. */
#include <math.h>
#include <time.h>
#include "qeffect/simulate.h"
#include "unit/schedule/support.h"

static void assert_near(double found, double expected, double tolerance, const char *what) {
    if (!(fabs(found - expected) <= tolerance)) fail_msg("%s: found %.6f, expected %.6f", what, found, expected);
}

/* One simulation with the same cost for every stage. */
static qe_simulation simulated(const qe_schedule *schedule, qe_stage_cost cost, double latency) {
    qe_simulation_request request = {.schedule = schedule, .costs = &cost, .cost_count = 1, .latency = latency};
    qe_simulation simulation = {0};
    qe_error error = {0};
    if (qe_simulation_run(&request, &simulation, &error) != QE_OK) fail_msg("%s", error.message);
    return simulation;
}

/* Bubbles in units of F of a whole rank; -1: not published. */
typedef struct bubbles {
    double makespan, stage;
} bubbles;

typedef struct golden {
    const char *name;
    uint32_t ranks, chunks, microbatches;
    double peak;     /* in microbatches of a whole rank */
    uint32_t weight; /* most pending W, in chunks */
    bubbles even, uneven, hops; /* F=I=W=1; F, I, W = 1, 1.2, 0.7; F=I=W=1 and a hop of 0.1 */
} golden;

#define UNKNOWN {-1, -1}
static const golden GOLDEN[] = {
    {"gpipe", 4, 1, 12, 12, 0, {9, 9}, UNKNOWN, UNKNOWN},
    {"gpipe", 8, 1, 24, 24, 0, {21, 21}, {20.3, 20.3}, {22.4, 22.4}},
    {"1f1b", 4, 1, 12, 4, 0, {9, 9}, UNKNOWN, UNKNOWN},
    {"1f1b", 8, 1, 24, 8, 0, {21, 21}, {20.3, 20.3}, {26.4, 26.4}},
    {"interleaved", 4, 2, 12, 5.5, 0, {4.5, 4.5}, UNKNOWN, UNKNOWN},
    {"interleaved", 8, 2, 24, 11.5, 0, {10.5, 10.5}, {10.15, -1}, {13.5, -1}},
    {"interleaved", 4, 3, 12, 5, 0, {3, 3}, UNKNOWN, UNKNOWN},
    {"interleaved", 8, 3, 24, 31.0 / 3, 0, {7, 7}, {20.3 / 3, -1}, {11.6, -1}},
    {"zbh1", 4, 1, 12, 4, 4, {3, 3}, UNKNOWN, UNKNOWN},
    {"zbh1", 8, 1, 24, 8, 8, {7, 7}, {10.5, -1}, {9.8, -1}},
    {"zbh2", 4, 1, 12, 7, 7, {3, 0}, UNKNOWN, UNKNOWN},
    {"zbh2", 8, 1, 24, 15, 15, {7, 0}, {7, 5.6}, {7.7, 1.4}},
    {"interleaved-zb", 4, 2, 12, 4, 4, {1.5, 1.5}, UNKNOWN, UNKNOWN},
    {"interleaved-zb", 8, 2, 24, 8, 8, {3.5, 3.5}, {5.25, -1}, {7.1, -1}},
    {"zbv", 4, 2, 12, 4, 7, {1.5, 0}, UNKNOWN, UNKNOWN},
    {"zbv", 8, 2, 24, 8, 15, {3.5, 0}, {4.2, 3.5}, {6.8, 4.0}},
    {"1f1b-v", 4, 2, 12, 3, 0, {7.5, 7.5}, UNKNOWN, UNKNOWN},
    {"1f1b-v", 8, 2, 24, 6, 0, {16.5, 16.5}, {17.4, -1}, {26.5, -1}},
};

static void assert_bubbles(const golden *row, const qe_schedule *schedule, qe_stage_cost cost, double latency,
                           bubbles expected) {
    qe_simulation found = simulated(schedule, cost, latency);
    if (expected.makespan >= 0) assert_near(found.makespan_bubble, expected.makespan, 1e-9, row->name);
    if (expected.stage >= 0) assert_near(found.stage_bubble, expected.stage, 1e-9, row->name);
    qe_simulation_deinit(&found);
}

static uint32_t most_pending(const qe_simulation *simulation) {
    uint32_t most = 0;
    for (uint32_t rank = 0; rank < simulation->ranks_count; rank++) {
        if (simulation->ranks[rank].peak[QE_KEEP_W] > most) most = simulation->ranks[rank].peak[QE_KEEP_W];
    }
    return most;
}

static void the_golden_table_is_reproduced(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof GOLDEN / sizeof GOLDEN[0]; i++) {
        const golden *row = &GOLDEN[i];
        qe_schedule schedule = generated(row->name, row->ranks, row->chunks, row->microbatches);
        qe_stage_cost even = qe_stage_cost_of(1, 1, 1, 1, row->chunks);
        qe_simulation found = simulated(&schedule, even, 0);
        assert_near(found.peak_kept, row->peak, 1e-9, row->name);
        assert_int_equal(most_pending(&found), row->weight);
        print_message("%-14s P%u V%u M%-2u makespan bubble %5.2f, stage bubble %5.2f, peak %5.2f, pending W %u\n",
                      row->name, row->ranks, row->chunks, row->microbatches, found.makespan_bubble,
                      found.stage_bubble, found.peak_kept, most_pending(&found));
        qe_simulation_deinit(&found);
        assert_bubbles(row, &schedule, even, 0, row->even);
        assert_bubbles(row, &schedule, qe_stage_cost_of(1, 1.2, 0.7, 1, row->chunks), 0, row->uneven);
        assert_bubbles(row, &schedule, even, 0.1, row->hops);
        qe_schedule_deinit(&schedule);
    }
}

/* Profiles of arXiv 2401.10241, in ms of a whole rank, and the rates of its table. */
typedef struct profile {
    const char *model;
    uint32_t ranks, microbatches;
    double forward, input, weight, hop;
    double rate_1f1b, rate_h1, rate_h2; /* stage bubble / span */
    double makespan_h2;                 /* makespan bubble / makespan, by simulation; -1: not known */
} profile;

static const profile PROFILES[] = {
    {"1.5B", 8, 24, 18.522, 18.086, 9.337, .601, .2431, .1585, .1083, -1},
    {"1.5B", 8, 32, 18.513, 18.086, 9.331, .626, .1985, .1242, .0837, -1},
    {"6.2B", 8, 24, 29.718, 29.444, 19.927, .527, .2347, .1323, .0698, .1003},
    {"14.6B", 16, 48, 11.347, 11.248, 8.132, .377, .2552, .1397, .0672, .1065},
    {"28.3B", 32, 96, 10.419, 10.207, 7.715, .408, .2646, .1421, .0641, .1098},
};

static qe_simulation of_profile(const profile *row, const char *name) {
    qe_schedule schedule = generated(name, row->ranks, 1, row->microbatches);
    qe_stage_cost cost = qe_stage_cost_of(row->forward, row->input, row->weight, 0.4, 1);
    qe_simulation found = simulated(&schedule, cost, row->hop);
    qe_schedule_deinit(&schedule);
    return found;
}

static double stage_rate(const profile *row, const char *name) {
    qe_simulation found = of_profile(row, name);
    double rate = found.stage_bubble / found.span;
    qe_simulation_deinit(&found);
    return rate;
}

static void the_bubble_rates_of_the_zero_bubble_paper_are_reproduced(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof PROFILES / sizeof PROFILES[0]; i++) {
        const profile *row = &PROFILES[i];
        print_message("%-5s P%-2u M%-2u 1f1b %.4f, zbh1 %.4f, zbh2 %.4f\n", row->model, row->ranks,
                      row->microbatches, stage_rate(row, "1f1b"), stage_rate(row, "zbh1"), stage_rate(row, "zbh2"));
        assert_near(stage_rate(row, "1f1b"), row->rate_1f1b, 5e-5, "1f1b");
        assert_near(stage_rate(row, "zbh1"), row->rate_h1, 5e-5, "zbh1");
        assert_near(stage_rate(row, "zbh2"), row->rate_h2, 5e-5, "zbh2");
        qe_simulation found = of_profile(row, "zbh2");
        if (row->makespan_h2 >= 0) {
            assert_near(found.makespan_bubble / found.makespan, row->makespan_h2, 5e-5, "makespan of zbh2");
        }
        qe_simulation_deinit(&found);
    }
}

static void a_simulation_of_thousands_of_actions_takes_about_a_millisecond(void **state) {
    (void)state;
    qe_schedule schedule = generated("zbh1", 32, 1, 256);
    qe_stage_cost cost = qe_stage_cost_of(1, 1.1, 0.8, 0.4, 1);
    qe_simulation_request request = {.schedule = &schedule, .costs = &cost, .cost_count = 1, .latency = 0.1};
    qe_simulation simulation = {0};
    double best = 1e9;
    for (int turn = 0; turn < 50; turn++) {
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        assert_int_equal(qe_simulation_run(&request, &simulation, NULL), QE_OK);
        clock_gettime(CLOCK_MONOTONIC, &end);
        double ms = (double)(end.tv_sec - begin.tv_sec) * 1e3 + (double)(end.tv_nsec - begin.tv_nsec) * 1e-6;
        if (ms < best) best = ms;
    }
    print_message("zbh1 P32 M256: %u actions in %.2f ms\n", simulation.actions_count, best);
    assert_true(best < 50.0); /* sanitizers and busy machines are slow; the figure is for reading */
    qe_simulation_deinit(&simulation);
    qe_schedule_deinit(&schedule);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_golden_table_is_reproduced),
        cmocka_unit_test(the_bubble_rates_of_the_zero_bubble_paper_are_reproduced),
        cmocka_unit_test(a_simulation_of_thousands_of_actions_takes_about_a_millisecond),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
