/* The checker on small schedules, each with one fault, and on large ones, with a watch. */
#include "unit/schedule/support.h"

#include <time.h>

typedef struct fault {
    const char *csv;
    qe_rule rule;
    const char *text;
} fault;

static const fault FAULTS[] = {
    {"0F0,0B0,1B0\n1F0\n", QE_RULE_SCHEDULE_PLACE,
     "schedule.place: stage 1 lives on one rank only: 1B0 (row 1, cell 3) is on rank 0, "
     "1F0 (row 2, cell 1) on rank 1."},
    {"0F0,0B0\n2F0,2B0\n", QE_RULE_SCHEDULE_PLACE,
     "schedule.place: no rank has stage 1, though stages run from 0 to 2."},
    {"4095F0\n", QE_RULE_SCHEDULE_PLACE, "schedule.place: no rank has stage 0, though stages run from 0 to 4095."},
    {"0F0,0F1,0B0,0F1,0B1\n", QE_RULE_SCHEDULE_DUPLICATE,
     "schedule.duplicate: 0F1 (row 1, cell 4) repeats 0F1 (row 1, cell 2); every action is due once."},
    {"0F0,0I0,0B0,0W0\n", QE_RULE_SCHEDULE_DUPLICATE,
     "schedule.duplicate: 0B0 (row 1, cell 3) repeats 0I0 (row 1, cell 2); B already consists of I and W."},
    {"0F0,0B0,0W0\n", QE_RULE_SCHEDULE_DUPLICATE,
     "schedule.duplicate: 0W0 (row 1, cell 3) repeats 0B0 (row 1, cell 2); B already consists of I and W."},
    {"0F0,0F1,0B0\n", QE_RULE_SCHEDULE_MISSING,
     "schedule.missing: 0B1 is due and absent (or I and W in its place); every stage takes every microbatch once."},
    {"0F0,0F1,0B0,0I1\n", QE_RULE_SCHEDULE_MISSING,
     "schedule.missing: 0W1 is due and absent; every stage takes every microbatch once."},
    {"0F0,0F1,0B0,0W1\n", QE_RULE_SCHEDULE_MISSING,
     "schedule.missing: 0I1 is due and absent; every stage takes every microbatch once."},
    {"0F0,0B0\n1B0\n", QE_RULE_SCHEDULE_MISSING,
     "schedule.missing: 1F0 is due and absent; every stage takes every microbatch once."},
    {"0F0,0F65535\n", QE_RULE_SCHEDULE_MISSING,
     "schedule.missing: 0F1 is due and absent; every stage takes every microbatch once."},
    {"0F0,0F1\n1F0\n", QE_RULE_SCHEDULE_MISSING,
     "schedule.missing: 1F1 is due and absent; every stage takes every microbatch once."},
    {"0B0,0F0\n", QE_RULE_SCHEDULE_ORDER,
     "schedule.order: 0B0 (row 1, cell 1) needs 0F0 (row 1, cell 2), which comes after it on the same rank."},
    {"0F0,0W0,0I0\n", QE_RULE_SCHEDULE_ORDER,
     "schedule.order: 0W0 (row 1, cell 2) needs 0I0 (row 1, cell 3), which comes after it on the same rank."},
    {"0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", QE_RULE_SCHEDULE_CYCLE,
     "schedule.cycle: 4 actions wait for each other, and 6 never run. 0B0 (row 1, cell 2) needs the result of 1B0 (row "
     "2, cell 3), which comes after 1F1 (row 2, cell 2), which needs the result of 0F1 (row 1, cell 3), which comes "
     "after 0B0 (row 1, cell 2)."},
    {"1F0,0F0,1B0,0B0\n", QE_RULE_SCHEDULE_CYCLE,
     "schedule.cycle: 2 actions wait for each other, and 4 never run. 1F0 (row 1, cell 1) needs the result of 0F0 (row "
     "1, cell 2), which comes after 1F0 (row 1, cell 1)."},
};

static void assert_refused(const qe_schedule *schedule, qe_rule rule, const char *text) {
    qe_counterexample counterexample = {0};
    qe_error error = {0};
    char said[1024];
    assert_int_equal(qe_schedule_check(schedule, &counterexample, &error), QE_CONTRACT);
    assert_int_equal(error.status, QE_CONTRACT);
    assert_string_equal(error.message, text);
    assert_int_equal(counterexample.rule, rule);
    assert_int_equal(qe_counterexample_text(&counterexample, said, sizeof said), strlen(text));
    assert_string_equal(said, text);
    assert_int_equal(qe_counterexample_text(&counterexample, NULL, 0), strlen(text));
    char cut[10];
    assert_int_equal(qe_counterexample_text(&counterexample, cut, sizeof cut), strlen(text));
    assert_string_equal(cut, "schedule.");
    qe_counterexample_deinit(&counterexample);
    assert_int_equal(qe_schedule_check(schedule, NULL, NULL), QE_CONTRACT);
}

static void each_fault_is_refused_by_its_rule_and_told_with_its_place(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof FAULTS / sizeof FAULTS[0]; i++) {
        qe_schedule schedule = schedule_of(FAULTS[i].csv);
        assert_refused(&schedule, FAULTS[i].rule, FAULTS[i].text);
        qe_schedule_deinit(&schedule);
    }
}

static void what_others_write_and_what_can_run_is_certified(void **state) {
    (void)state;
    static const char *const good[] = {
        "0F0,0B0\n",
        "0F0,0F1,0F2\n1F0,1F1,1F2\n",                               /* an evaluation */
        "0F0,0F1,,0B0,0I1,0W1\n,1F0,1F1,1I0,1I1,1W1,1W0\n",         /* B, I and W mixed; W last first */
        "0F1,0F0,0B1,0B0\n1F1,1F0,1B0,1B1\n",                       /* another order of microbatches on each rank */
        "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n",                       /* V placement */
        "0F0,1F0,0F1,2F0,1F1,2B0,2F1,1B0,2B1,0B0,1B1,0B1\n",        /* three stages on one rank */
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        qe_schedule schedule = schedule_of(good[i]);
        qe_counterexample counterexample = {0};
        qe_error error = {0};
        if (qe_schedule_check(&schedule, &counterexample, &error) != QE_OK) fail_msg("%s: %s", good[i], error.message);
        assert_null(counterexample.cited);
        assert_int_equal(error.status, QE_OK);
        qe_schedule_deinit(&schedule);
    }
}

/* Rank 0 only waits for a circle of ranks 1 and 2: the circle is told, not the one who waits. */
static void a_rank_that_waits_for_a_circle_is_not_part_of_it(void **state) {
    (void)state;
    qe_schedule schedule = schedule_of("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1\n");
    assert_refused(&schedule, QE_RULE_SCHEDULE_CYCLE,
                   "schedule.cycle: 4 actions wait for each other, and 8 never run. 1B0 (row 2, cell 2) needs the "
                   "result of 2B0 (row 3, cell 3), which comes after 2F1 (row 3, cell 2), which needs the result of "
                   "1F1 (row 2, cell 3), which comes after 1B0 (row 2, cell 2).");
    qe_schedule_deinit(&schedule);
}

static void generated_actions_are_told_by_rank_and_number(void **state) {
    (void)state;
    qe_schedule schedule = generated("1f1b", 2, 1, 2);
    schedule.actions[3] = schedule.actions[2];
    assert_refused(&schedule, QE_RULE_SCHEDULE_DUPLICATE,
                   "schedule.duplicate: 0B0 (rank 0, action 4) repeats 0B0 (rank 0, action 3); "
                   "every action is due once.");
    qe_schedule_deinit(&schedule);
}

static void a_structure_that_is_no_schedule_is_an_argument_error(void **state) {
    (void)state;
    qe_error error = {0};
    qe_schedule schedule = generated("1f1b", 2, 1, 2);
    schedule.actions[1].kind = QE_ACTION_KINDS;
    assert_int_equal(qe_schedule_check(&schedule, NULL, &error), QE_ERROR_ARGUMENT);
    schedule.actions[1].kind = QE_ACTION_F;
    assert_int_equal(qe_schedule_check(&schedule, NULL, &error), QE_OK);
    schedule.rank_begin[1] = 9;
    assert_int_equal(qe_schedule_check(&schedule, NULL, &error), QE_ERROR_ARGUMENT);
    schedule.rank_begin[1] = 4;
    schedule.microbatches = 0;
    assert_int_equal(qe_schedule_check(&schedule, NULL, &error), QE_ERROR_ARGUMENT);
    schedule.microbatches = QE_MICROBATCHES_MAX + 1;
    assert_int_equal(qe_schedule_check(&schedule, NULL, &error), QE_ERROR_LIMIT);
    schedule.microbatches = 2;
    schedule.actions[3].microbatch = 2;
    assert_refused(&schedule, QE_RULE_SCHEDULE_PLACE,
                   "schedule.place: 0B2 (rank 0, action 4) is out of range: found 2, expected below 2.");
    schedule.actions[3].microbatch = 1;
    schedule.actions[3].stage = 2;
    assert_refused(&schedule, QE_RULE_SCHEDULE_PLACE,
                   "schedule.place: 2B1 (rank 0, action 4) is out of range: found 2, expected below 2.");
    schedule.actions[3].stage = 0;
    schedule.stage_rank[0] = 1;
    assert_refused(&schedule, QE_RULE_SCHEDULE_PLACE,
                   "schedule.place: stage 0 lives on one rank only: that is rank 1, "
                   "but 0F0 (rank 0, action 1) on rank 0.");
    qe_schedule_deinit(&schedule);
}

static double seconds(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static double time_check(const qe_schedule *schedule, qe_status expected) {
    qe_counterexample counterexample = {0};
    double begin = seconds();
    assert_int_equal(qe_schedule_check(schedule, &counterexample, NULL), expected);
    double took = seconds() - begin;
    if (expected == QE_CONTRACT) {
        assert_int_equal(counterexample.rule, QE_RULE_SCHEDULE_CYCLE);
        print_message("a cycle of %u actions, %u stuck: ", counterexample.cited_count, (unsigned)counterexample.found);
        qe_counterexample_deinit(&counterexample);
    }
    print_message("%u ranks, %u stages, %u microbatches, %u actions: %.1f ms\n", schedule->ranks, schedule->stages,
                  schedule->microbatches, schedule->rank_begin[schedule->ranks], 1e3 * took);
    return took;
}

static void swap(qe_action *a, qe_action *b) {
    qe_action kept = *a;
    *a = *b;
    *b = kept;
}

static void a_large_schedule_is_judged_in_far_less_than_a_second(void **state) {
    (void)state;
    qe_schedule schedule = generated("zbh1", 64, 1, 512);
    assert_true(time_check(&schedule, QE_OK) < 1.0);
    /* The last rank's backward of microbatch 0 behind its last forward: everybody else stops in warm-up. */
    uint32_t begin = schedule.rank_begin[63], end = schedule.rank_begin[64];
    for (uint32_t i = begin + 1; i < end - 1 && schedule.actions[i + 1].kind != QE_ACTION_W; i++) {
        swap(&schedule.actions[i], &schedule.actions[i + 1]);
    }
    assert_true(time_check(&schedule, QE_CONTRACT) < 1.0);
    qe_schedule_deinit(&schedule);
    schedule = generated("interleaved", 64, 8, 512);
    assert_true(time_check(&schedule, QE_OK) < 1.0);
    qe_schedule_deinit(&schedule);
}

static void cost_grows_with_the_actions_and_not_faster(void **state) {
    (void)state;
    qe_schedule small = generated("1f1b", 16, 1, 4096), large = generated("1f1b", 16, 1, 65536);
    double first = time_check(&small, QE_OK), second = time_check(&large, QE_OK);
    /* 16 times the actions; room for caches that no longer hold them and for a neighbour on the machine. */
    assert_true(second < 16 * 12 * (first > 0.001 ? first : 0.001));
    qe_schedule_deinit(&small);
    qe_schedule_deinit(&large);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_fault_is_refused_by_its_rule_and_told_with_its_place),
        cmocka_unit_test(what_others_write_and_what_can_run_is_certified),
        cmocka_unit_test(a_rank_that_waits_for_a_circle_is_not_part_of_it),
        cmocka_unit_test(generated_actions_are_told_by_rank_and_number),
        cmocka_unit_test(a_structure_that_is_no_schedule_is_an_argument_error),
        cmocka_unit_test(a_large_schedule_is_judged_in_far_less_than_a_second),
        cmocka_unit_test(cost_grows_with_the_actions_and_not_faster),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
