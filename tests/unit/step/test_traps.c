/* Every rule that a plan can break: one fault is planted in a running step, and what follows is held against step.h:
 * the verdict is that rule, nothing changed, the history tells the same offline, and training goes on as if nothing
 * had been. Schedule rules are the plan's (plan/test_certificate.c), step.nonfinite is in test_veto.c. */
#include "step_world.h"

#include <time.h>

#include "step/team.h"

typedef struct trap_case {
    world_options options;
    uint64_t step; /* the step that is disturbed */
} trap_case;

enum { STEPS_AFTER = 2 };

/* Only one rank: no second stream of its own beside compute. Later steps: every byte was written in the first one, but
 * for what belongs to other ranks. */
static int is_out_of_reach(qe_rule rule, const trap_case *at) {
    if (rule == QE_RULE_SYNC_SIDE) return at->options.ranks == 1;
    if (rule == QE_RULE_BUFFER_UNWRITTEN) return at->options.ranks == 1 && at->step > 1;
    return 0;
}

static world_hash undisturbed(const trap_case *at) {
    world w;
    world_open(&w, &at->options);
    while (w.step < at->step + STEPS_AFTER) world_step(&w, 0);
    world_hash hash = world_state(&w);
    world_close(&w);
    return hash;
}

static void history_tells_the_same(world *w, qe_rule rule) {
    qe_program history;
    qe_violations violations;
    qe_error error = {0};
    qe_program_init(&history);
    must(qe_team_history(w->team, w->result.violation_rank, &history, &error), &error, "history");
    assert_int_equal(qe_program_judge(&history, &violations, &error), QE_CONTRACT);
    assert_true(violations.count > 0);
    assert_string_equal(qe_rule_id(violations.record[0].rule), qe_rule_id(rule));
    qe_program_deinit(&history);
}

static void disturb(const trap_case *at, qe_rule rule, const world_hash *expected) {
    world w;
    world_open(&w, &at->options);
    while (w.step < at->step) world_step(&w, 0);
    world_hash before = world_state(&w);
    qe_error error = {0};
    qe_status status = qe_team_inject(w.team, rule, &error);
    if (is_out_of_reach(rule, at)) {
        assert_int_equal(status, QE_ERROR_UNSUPPORTED);
        world_close(&w);
        return;
    }
    must(status, &error, qe_rule_id(rule));
    status = world_try_step(&w, 0);
    assert_int_equal(status, QE_CONTRACT);
    assert_true(w.result.violations.count > 0);
    assert_int_not_equal(w.result.violation_rank, QE_NONE);
    assert_string_equal(qe_rule_id(w.result.violations.record[0].rule), qe_rule_id(rule));
    assert_string_equal(world_state(&w).text, before.text);
    history_tells_the_same(&w, rule);
    while (w.step < at->step + STEPS_AFTER) world_step(&w, 0);
    assert_string_equal(world_state(&w).text, expected->text);
    world_close(&w);
}

static void disturb_all(const trap_case *at) {
    world_hash expected = undisturbed(at);
    for (int rule = QE_RULE_SCALE_EPOCH; rule <= QE_RULE_SYNC_EVENT; rule++) disturb(at, (qe_rule)rule, &expected);
}

static void every_rule_traps_in_the_first_step_of_one_rank(void **state) {
    (void)state;
    disturb_all(&(trap_case){{.ranks = 1}, 1});
}

static void every_rule_traps_in_a_later_step_of_one_rank(void **state) {
    (void)state;
    disturb_all(&(trap_case){{.ranks = 1}, 3});
}

static void every_rule_traps_in_the_first_step_of_two_ranks(void **state) {
    (void)state;
    disturb_all(&(trap_case){{.ranks = 2, .schedule = "zbh1"}, 1});
}

static void every_rule_traps_in_a_later_step_of_two_ranks(void **state) {
    (void)state;
    disturb_all(&(trap_case){{.ranks = 2, .schedule = "zbh1"}, 3});
}

static void every_rule_traps_without_caches_and_with_copied_gradients(void **state) {
    (void)state;
    disturb_all(&(trap_case){{.ranks = 2, .schedule = "gpipe", .no_cache = 1, .copy = 1}, 2});
}

static void a_rule_that_a_plan_cannot_break_is_refused_at_once(void **state) {
    (void)state;
    world w;
    world_open(&w, &(world_options){.recipe = QE_RECIPE_BF16});
    qe_error error = {0};
    for (int rule = QE_RULE_SCALE_EPOCH; rule <= QE_RULE_SCALE_LOST; rule++)
        assert_int_equal(qe_team_inject(w.team, (qe_rule)rule, &error), QE_ERROR_UNSUPPORTED);
    assert_int_equal(qe_team_inject(w.team, QE_RULE_SCHEDULE_CYCLE, &error), QE_ERROR_UNSUPPORTED);
    assert_non_null(strstr(error.message, "schedule.cycle"));
    world_step(&w, 0);
    world_close(&w);
}

static void a_fault_is_not_planted_where_nothing_would_stop_it(void **state) {
    (void)state;
    world w;
    world_open(&w, &(world_options){.contracts = QE_CONTRACTS_OFF});
    qe_error error = {0};
    assert_int_equal(qe_team_inject(w.team, QE_RULE_SLOT_STALE, &error), QE_ERROR_ARGUMENT);
    world_step(&w, 0);
    world_close(&w);
}

static void a_second_trap_right_behind_the_first_is_told_as_well(void **state) {
    (void)state;
    trap_case at = {{.ranks = 2, .schedule = "zbh1"}, 1};
    world_hash expected = undisturbed(&at);
    world w;
    world_open(&w, &at.options);
    static const qe_rule rules[] = {QE_RULE_SYNC_SIDE, QE_RULE_CACHE_EMPTY, QE_RULE_SLOT_LEAK, QE_RULE_CACHE_STALE,
                                    QE_RULE_GRAD_MISSING};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        must(qe_team_inject(w.team, rules[i], &w.error), &w.error, qe_rule_id(rules[i]));
        assert_int_equal(world_try_step(&w, 0), QE_CONTRACT);
        assert_string_equal(qe_rule_id(w.result.violations.record[0].rule), qe_rule_id(rules[i]));
        history_tells_the_same(&w, rules[i]);
    }
    while (w.step < at.step + STEPS_AFTER) world_step(&w, 0);
    assert_string_equal(world_state(&w).text, expected.text);
    world_close(&w);
}

/* Observed, an op that is skipped or comes early may race for good; whoever watches for races is right to stop. */
static int leaves_order(const qe_team *team) {
    return team->edit.kind == QE_EDIT_SKIP || team->edit.kind == QE_EDIT_EARLY;
}

/* The whole observed step, judged on its own, begins with the rule that a trap would have named. */
static void observe(const trap_case *at, qe_rule rule) {
    world w;
    trap_case observed = *at;
    observed.options.contracts = QE_CONTRACTS_OBSERVE;
    world_open(&w, &observed.options);
    while (w.step < at->step) world_step(&w, 0);
    qe_error error = {0};
    qe_status status = qe_team_inject(w.team, rule, &error);
    if (is_out_of_reach(rule, at)) {
        assert_int_equal(status, QE_ERROR_UNSUPPORTED);
        world_close(&w);
        return;
    }
    must(status, &error, qe_rule_id(rule));
    if (FINDS_RACES && leaves_order(w.team)) {
        world_close(&w);
        return;
    }
    world_hash before = world_state(&w);
    must(world_try_step(&w, 0), &w.error, qe_rule_id(rule));
    assert_false(w.result.vetoed);
    assert_string_not_equal(world_state(&w).text, before.text); /* committed */
    assert_int_not_equal(w.result.violation_rank, QE_NONE);
    assert_string_equal(qe_rule_id(w.result.violations.record[0].rule), qe_rule_id(rule));
    history_tells_the_same(&w, rule);
    world_step(&w, 0);
    assert_int_equal(w.result.violations.count, 0);
    assert_int_equal(qe_team_history(w.team, 0, &(qe_program){0}, &error), QE_ERROR_ARGUMENT);
    world_close(&w);
}

static void every_rule_is_observed_and_the_step_commits(void **state) {
    (void)state;
    const trap_case cases[] = {{{.ranks = 1}, 1}, {{.ranks = 1}, 3}, {{.ranks = 2, .schedule = "zbh1"}, 1},
                               {{.ranks = 2, .schedule = "zbh1"}, 3},
                               {{.ranks = 2, .schedule = "gpipe", .no_cache = 1, .copy = 1}, 2},
                               {{.ranks = 2, .schedule = "1f1b", .capture = QE_CAPTURE_STEP}, 2},
                               {{.ranks = 2, .schedule = "zbh1", .capture = QE_CAPTURE_ACTION}, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int rule = QE_RULE_SCALE_EPOCH; rule <= QE_RULE_SYNC_EVENT; rule++) observe(&cases[i], (qe_rule)rule);
}

static void under_observe_a_breach_is_noted_and_the_step_goes_on(void **state) {
    (void)state;
    world w;
    world_open(&w, &(world_options){.contracts = QE_CONTRACTS_OBSERVE});
    must(qe_team_inject(w.team, QE_RULE_WEIGHT_VERSION, &w.error), &w.error, "inject");
    assert_int_equal(world_try_step(&w, 0), QE_OK);
    assert_int_equal(w.result.violations.record[0].rule, QE_RULE_WEIGHT_VERSION);
    assert_int_equal(w.result.violation_rank, 0);
    world_step(&w, 0);
    assert_int_equal(w.result.violations.count, 0);
    world_close(&w);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void a_fault_is_found_within_a_second_in_a_plan_of_the_quickstarts_size(void **state) {
    (void)state;
    double slowest = 0;
    qe_rule slowest_rule = QE_RULE_NONE;
    world w;
    world_open(&w, &(world_options){.schedule = "zbh1", .ranks = 2, .microbatches = 8, .quickstart = 1});
    for (int rule = QE_RULE_SCALE_EPOCH; rule <= QE_RULE_SYNC_EVENT; rule++) {
        double begin = seconds();
        must(qe_team_inject(w.team, (qe_rule)rule, &w.error), &w.error, qe_rule_id((qe_rule)rule));
        double took = seconds() - begin;
        if (took > slowest) slowest = took, slowest_rule = (qe_rule)rule;
    }
    print_message("slowest search: %s, %.0f ms\n", qe_rule_id(slowest_rule), 1e3 * slowest);
    assert_true(slowest < (SANITIZED ? 30.0 : 1.0));
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_rule_traps_in_the_first_step_of_one_rank),
        cmocka_unit_test(every_rule_traps_in_a_later_step_of_one_rank),
        cmocka_unit_test(every_rule_traps_in_the_first_step_of_two_ranks),
        cmocka_unit_test(every_rule_traps_in_a_later_step_of_two_ranks),
        cmocka_unit_test(every_rule_traps_without_caches_and_with_copied_gradients),
        cmocka_unit_test(a_rule_that_a_plan_cannot_break_is_refused_at_once),
        cmocka_unit_test(a_fault_is_not_planted_where_nothing_would_stop_it),
        cmocka_unit_test(a_second_trap_right_behind_the_first_is_told_as_well),
        cmocka_unit_test(every_rule_is_observed_and_the_step_commits),
        cmocka_unit_test(under_observe_a_breach_is_noted_and_the_step_goes_on),
        cmocka_unit_test(a_fault_is_found_within_a_second_in_a_plan_of_the_quickstarts_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
