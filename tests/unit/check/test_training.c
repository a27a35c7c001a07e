/* The whole model under the check backend: every op of every recipe and schedule keeps to what it declared, and the
 * bits are those of the host. */
#include "check_world.h"

enum { STEPS = SANITIZED ? 1 : 2 };

static world_hash host_hash(world_options options) {
    world w;
    world_open(&w, &options);
    for (int step = 0; step < STEPS; step++) world_step(&w, 0);
    world_hash hash = world_state(&w);
    world_close(&w);
    return hash;
}

/* Trains under check; the counts are those of the training steps. */
static world_hash checked_hash(world_options options, qe_check_count *count_out, uint64_t *ops_out,
                               uint64_t *transfers_out) {
    world w;
    check_devices devices = {0};
    options = checked(options, &devices);
    world_open(&w, &options);
    for (int step = 0; step < STEPS; step++) world_step(&w, 0);
    world_hash hash = world_state(&w);
    *count_out = check_total(&devices);
    check_planned(&w, ops_out, transfers_out);
    world_close(&w);
    return hash;
}

static void trains_clean(world_options options) {
    qe_check_count count;
    uint64_t ops, transfers;
    world_hash seen = checked_hash(options, &count, &ops, &transfers);
    assert_string_equal(host_hash(options).text, seen.text);
    assert_int_equal(count.ops, STEPS * ops); /* every op was looked at */
    assert_int_equal(count.transfers, STEPS * transfers);
    assert_true(ops > 100);
    assert_int_equal(count.graphs + count.launches, 0);
}

static void schedules_of(qe_recipe_kind recipe) {
    trains_clean((world_options){.schedule = "1f1b", .ranks = 2, .recipe = recipe});
    trains_clean((world_options){.schedule = "zbh1", .ranks = 2, .recipe = recipe});
    trains_clean((world_options){.schedule = "interleaved", .ranks = 2, .chunks = 2, .recipe = recipe});
}

static void delayed_scaling_trains_clean_with_the_bits_of_the_host(void **state) {
    (void)state;
    schedules_of(QE_RECIPE_DELAYED);
}
static void current_scaling_trains_clean_with_the_bits_of_the_host(void **state) {
    (void)state;
    schedules_of(QE_RECIPE_CURRENT);
}
static void block_scaling_trains_clean_with_the_bits_of_the_host(void **state) {
    (void)state;
    schedules_of(QE_RECIPE_BLOCK);
}
static void bf16_trains_clean_with_the_bits_of_the_host(void **state) {
    (void)state;
    schedules_of(QE_RECIPE_BF16);
}
static void fp32_trains_clean_with_the_bits_of_the_host(void **state) {
    (void)state;
    schedules_of(QE_RECIPE_FP32);
}

static void the_baseline_and_every_policy_of_a_plan_train_clean(void **state) {
    (void)state;
    trains_clean((world_options){.baseline = 1});
    trains_clean((world_options){.schedule = "zbh1", .ranks = 2, .copy = 1});
    trains_clean((world_options){.schedule = "1f1b", .ranks = 2, .no_cache = 1, .no_reuse = 1});
}

/* Layers and actions are judged as one op; a whole step holds transfers and is passed on, as is its commit not. */
static void graphs_are_looked_at_as_one_op_unless_they_hold_transfers(void **state) {
    (void)state;
    const qe_capture units[] = {QE_CAPTURE_LAYER, QE_CAPTURE_ACTION, QE_CAPTURE_STEP};
    for (int unit = 0; unit < 3; unit++) {
        world_options options = {.schedule = "zbh1", .ranks = 2, .capture = units[unit]};
        qe_check_count count;
        uint64_t ops, transfers;
        world_hash seen = checked_hash(options, &count, &ops, &transfers);
        assert_string_equal(host_hash(options).text, seen.text);
        assert_true(count.graphs >= 2 * STEPS); /* at least the commit of each rank */
        assert_true(count.ops > 0);             /* the caller's copies stay outside */
        assert_int_equal(count.launches, units[unit] == QE_CAPTURE_STEP ? 2 * STEPS : 0);
        assert_int_equal(count.transfers, units[unit] == QE_CAPTURE_STEP ? 0 : STEPS * transfers);
    }
}

static void an_evaluation_is_clean_too(void **state) {
    (void)state;
    world w;
    double losses[2][WORLD_MICROBATCHES_MAX];
    for (int looked_at = 0; looked_at < 2; looked_at++) {
        check_devices devices = {0};
        world_options options = {.schedule = "1f1b", .ranks = 2, .evaluates = 1};
        if (looked_at) options = checked(options, &devices);
        world_open(&w, &options);
        world_batch(&w, 1, 0);
        qe_batch batch = {w.batch_tokens, w.batch_targets};
        must(qe_team_evaluate(w.team, &batch, losses[looked_at], NULL, 0, 0, &w.result, &w.error), &w.error,
             "evaluation");
        if (looked_at) assert_true(check_total(&devices).ops > 100);
        world_close(&w);
    }
    assert_memory_equal(losses[0], losses[1], 4 * sizeof(double));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(delayed_scaling_trains_clean_with_the_bits_of_the_host),
        cmocka_unit_test(current_scaling_trains_clean_with_the_bits_of_the_host),
        cmocka_unit_test(block_scaling_trains_clean_with_the_bits_of_the_host),
        cmocka_unit_test(bf16_trains_clean_with_the_bits_of_the_host),
        cmocka_unit_test(fp32_trains_clean_with_the_bits_of_the_host),
        cmocka_unit_test(the_baseline_and_every_policy_of_a_plan_train_clean),
        cmocka_unit_test(graphs_are_looked_at_as_one_op_unless_they_hold_transfers),
        cmocka_unit_test(an_evaluation_is_clean_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
