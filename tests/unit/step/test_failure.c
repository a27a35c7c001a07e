/* Whatever fails, nothing is half done: a team that cannot be made leaves nothing behind, a step that cannot be
 * finished leaves the state before it, and where a device fails in the middle of a commit the team says so and shows
 * nothing. */
#include "step_faults.h"
#include "step_world.h"

enum { STEPS = 4, CALLS_MAX = 4000 };

static const char *const schedule = "zbh1";

static world_hash undisturbed(const world_options *options) {
    world w;
    world_open(&w, options);
    while (w.step <= STEPS) world_step(&w, 0);
    world_hash hash = world_state(&w);
    world_close(&w);
    return hash;
}

/* Fails call after call while a team is made, until one is made. */
static void make_until_clean(const world_options *options, int places) {
    world w;
    world_prepare(&w, options);
    long nth = 1;
    for (;; nth++) {
        assert_true(nth < CALLS_MAX);
        w.team = NULL;
        memset(&w.error, 0, sizeof w.error);
        fault_arm(places, nth);
        qe_status status = world_team(&w, options);
        if (!atomic_load(&fault_happened)) {
            must(status, &w.error, "team");
            break;
        }
        assert_int_not_equal(status, QE_OK);
        assert_null(w.team);
        assert_non_null(strstr(w.error.message, "planted"));
    }
    fault_arm(0, 0);
    assert_true(nth > 1);
    world_initialize(&w, 7);
    while (w.step <= STEPS) world_step(&w, 0);
    world_options healthy = *options;
    healthy.backend = NULL;
    assert_string_equal(world_state(&w).text, undisturbed(&healthy).text);
    world_close(&w);
}

static void a_team_that_cannot_be_made_leaves_nothing_behind(void **state) {
    (void)state;
    fault_backend faulty;
    world_options options = {.schedule = schedule, .ranks = 2, .microbatches = 2, .evaluates = 1, .copy = 1};
    options.backend = fault_backend_init(&faulty);
    make_until_clean(&options, FAULT_OPEN | FAULT_CREATE);
    options.recipe = QE_RECIPE_BLOCK;
    make_until_clean(&options, FAULT_OPEN);
}

/* A step whose n-th call fails, for every n, on one team. Returns how many committed steps were torn. */
static int fail_every_call(const world_options *options, int places) {
    world_options healthy = *options;
    healthy.backend = NULL;
    world_hash expected = undisturbed(&healthy);
    int torn = 0;
    long nth = 1;
    world w;
    fault_arm(0, 0);
    world_open(&w, options);
    while (w.step < STEPS) world_step(&w, 0);
    for (;; nth++) {
        assert_true(nth < CALLS_MAX);
        world_hash before = world_state(&w);
        fault_arm(places, nth);
        qe_status status = world_try_step(&w, 0);
        int happened = atomic_load(&fault_happened);
        fault_arm(0, 0);
        if (!happened) {
            must(status, &w.error, "undisturbed step");
            break;
        }
        assert_int_equal(status, QE_ERROR_DEVICE);
        assert_true(w.error.message[0] != '\0');
        char hash[QE_STATE_HASH_BYTES];
        if (qe_team_state_hash(w.team, hash, &w.error) == QE_OK) {
            assert_string_equal(hash, before.text);
            continue;
        }
        torn++; /* refused, and so is everything else that would show or use the weights */
        assert_int_equal(w.error.status, QE_ERROR_DEVICE);
        assert_non_null(strstr(w.error.remedy, "checkpoint"));
        assert_int_equal(world_try_step(&w, 0), QE_ERROR_DEVICE);
        float value[1];
        assert_int_equal(qe_team_parameter_read(w.team, 0, value, &w.error), QE_ERROR_DEVICE);
        world_close(&w);
        fault_arm(0, 0);
        world_open(&w, options);
        while (w.step < STEPS) world_step(&w, 0);
    }
    assert_true(nth > 10);
    assert_string_equal(world_state(&w).text, expected.text);
    world_close(&w);
    return torn;
}

static void a_step_whose_submission_fails_is_given_up_or_the_team_is(void **state) {
    (void)state;
    fault_backend faulty;
    world_options options = {.schedule = schedule, .ranks = 2, .microbatches = 2};
    options.backend = fault_backend_init(&faulty);
    int torn = fail_every_call(&options, FAULT_RUN);
    assert_true(torn > 0);
    options.ranks = 1;
    options.contracts = QE_CONTRACTS_OFF;
    assert_true(fail_every_call(&options, FAULT_RUN) > 0);
}

static void a_step_whose_device_fails_is_given_up_or_the_team_is(void **state) {
    (void)state;
    fault_backend faulty;
    world_options options = {.schedule = schedule, .ranks = 2, .microbatches = 2};
    options.backend = fault_backend_init(&faulty);
    assert_true(fail_every_call(&options, FAULT_SYNC) > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_team_that_cannot_be_made_leaves_nothing_behind),
        cmocka_unit_test(a_step_whose_submission_fails_is_given_up_or_the_team_is),
        cmocka_unit_test(a_step_whose_device_fails_is_given_up_or_the_team_is),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
