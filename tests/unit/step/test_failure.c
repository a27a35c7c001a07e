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

/* What a transport says of its n-th call, or of the n-th meeting that all held, to one rank alone. */
static atomic_long sends_left, meetings_left;
static qe_world *_Atomic joined;

static qe_status faulty_open(qe_world *ranks, uint32_t from, uint32_t to, uint32_t lane, qe_channel **channel_out,
                             qe_error *error_out) {
    atomic_store(&joined, ranks);
    return qe_local_comm()->channel_open(ranks, from, to, lane, channel_out, error_out);
}

static qe_status faulty_send(qe_channel *channel, const void *bytes_at, size_t bytes) {
    if (atomic_fetch_sub(&sends_left, 1) != 1) return qe_local_comm()->send(channel, bytes_at, bytes);
    qe_local_comm()->abort(atomic_load(&joined));
    return QE_ERROR_DEVICE;
}

static qe_status faulty_meet(qe_world *ranks, uint32_t rank, qe_status mine, const double *values, size_t count,
                             double *gathered, qe_status *worst_out) {
    qe_status status = qe_local_comm()->meet(ranks, rank, mine, values, count, gathered, worst_out);
    return rank == 0 && atomic_fetch_sub(&meetings_left, 1) == 1 ? QE_ERROR_DEVICE : status;
}

static qe_comm_ops faulty_comm;

static void faulty_opened(qe_device *device, const void *context) {
    (void)context;
    qe_host_set_comm(device, &faulty_comm);
}

static void faulty_world(world *w) {
    faulty_comm = *qe_local_comm();
    faulty_comm.channel_open = faulty_open;
    faulty_comm.send = faulty_send;
    faulty_comm.meet = faulty_meet;
    world_options options = {.schedule = schedule, .ranks = 2, .microbatches = 2, .comm = &faulty_comm,
                             .opened = faulty_opened};
    world_open(w, &options);
    world_step(w, 0);
}

static void a_transport_that_fails_is_the_cause_and_not_whom_it_woke(void **state) {
    (void)state;
    world w;
    faulty_world(&w);
    for (long nth = 1; nth <= 4; nth++) { /* two microbatches, there and back */
        world_hash before = world_state(&w);
        atomic_store(&sends_left, nth);
        assert_int_equal(world_try_step(&w, 0), QE_ERROR_DEVICE);
        assert_int_equal(w.error.status, QE_ERROR_DEVICE);
        assert_string_equal(world_state(&w).text, before.text);
        world_step(&w, 0);
    }
    world_close(&w);
}

/* In the first of the two meetings nothing was written; behind the second the others commit. */
static void a_rank_that_lost_a_meeting_the_others_held_gives_the_step_up_or_the_team(void **state) {
    (void)state;
    world w;
    faulty_world(&w);
    world_hash before = world_state(&w);
    atomic_store(&meetings_left, 1);
    assert_int_equal(world_try_step(&w, 0), QE_ERROR_DEVICE);
    assert_string_equal(world_state(&w).text, before.text);
    world_step(&w, 0);
    char hash[QE_STATE_HASH_BYTES];
    atomic_store(&meetings_left, 2);
    assert_int_equal(world_try_step(&w, 0), QE_ERROR_DEVICE);
    assert_int_equal(qe_team_state_hash(w.team, hash, &w.error), QE_ERROR_DEVICE);
    assert_non_null(strstr(w.error.remedy, "checkpoint"));
    world_close(&w);
}

static void a_recording_that_fails_tells_its_own_cause(void **state) {
    (void)state;
    fault_backend faulty;
    static const struct {
        int place;
        qe_status status;
    } cases[] = {{FAULT_RUN, QE_ERROR_DEVICE}, {FAULT_GRAPH, QE_ERROR_MEMORY}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        world w;
        world_options options = {.schedule = schedule, .ranks = 2, .microbatches = 2, .capture = QE_CAPTURE_STEP};
        options.backend = fault_backend_init(&faulty);
        world_prepare(&w, &options);
        for (long nth = 1; nth < CALLS_MAX; nth++) {
            fault_arm(cases[i].place, nth);
            qe_status status = world_team(&w, &options);
            if (!atomic_load(&fault_happened)) break;
            assert_int_equal(status, cases[i].status);
            assert_int_equal(w.error.status, cases[i].status);
        }
        fault_arm(0, 0);
        assert_non_null(w.team);
        world_close(&w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_team_that_cannot_be_made_leaves_nothing_behind),
        cmocka_unit_test(a_step_whose_submission_fails_is_given_up_or_the_team_is),
        cmocka_unit_test(a_step_whose_device_fails_is_given_up_or_the_team_is),
        cmocka_unit_test(a_transport_that_fails_is_the_cause_and_not_whom_it_woke),
        cmocka_unit_test(a_rank_that_lost_a_meeting_the_others_held_gives_the_step_up_or_the_team),
        cmocka_unit_test(a_recording_that_fails_tells_its_own_cause),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
