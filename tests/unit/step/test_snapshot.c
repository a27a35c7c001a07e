/* A snapshot, put into another team, makes it go on with the same bits; nothing ephemeral comes with it. */
#include "qeffect/host.h"
#include "qeffect/snapshot.h"
#include "step_world.h"

enum { BEFORE = 3, AFTER = 6 };

static qe_snapshot *snapshot_of(world *w) {
    qe_snapshot *snapshot = NULL;
    must(qe_snapshot_create(w->team, &snapshot, &w->error), &w->error, "snapshot");
    must(qe_team_snapshot_take(w->team, snapshot, &w->error), &w->error, "take");
    return snapshot;
}

static void put(world *w, const qe_snapshot *snapshot) {
    must(qe_team_snapshot_put(w->team, snapshot, &w->error), &w->error, "put");
}

static world world_after(const world_options *options, int steps) {
    world w;
    world_open(&w, options);
    for (int i = 0; i < steps; i++) world_step(&w, 0);
    return w;
}

/* A team whose weights are of another seed, so that nothing of the run is there but what is put. */
static void open_stranger(world *w, const world_options *options) {
    world_open(w, options);
    world_initialize(w, 99);
}

static void goes_on(const world_options *from, const world_options *to) {
    world one = world_after(from, BEFORE), other;
    world_hash expected[AFTER];
    double losses[AFTER];
    qe_snapshot *snapshot = snapshot_of(&one);
    for (int i = 0; i < AFTER - BEFORE; i++) {
        losses[i] = world_step(&one, 0);
        expected[i] = world_state(&one);
    }
    open_stranger(&other, to);
    put(&other, snapshot);
    other.step = BEFORE + 1;
    for (int i = 0; i < AFTER - BEFORE; i++) {
        double loss = world_step(&other, 0);
        assert_memory_equal(&loss, &losses[i], sizeof loss);
        assert_string_equal(world_state(&other).text, expected[i].text);
    }
    qe_snapshot_destroy(snapshot);
    world_close(&one);
    world_close(&other);
}

static void every_recipe_goes_on_in_every_mode_over_other_stages_and_schedules(void **state) {
    (void)state;
    static const qe_recipe_kind recipes[] = {QE_RECIPE_DELAYED, QE_RECIPE_CURRENT, QE_RECIPE_BLOCK, QE_RECIPE_BF16,
                                             QE_RECIPE_FP32};
    static const world_options ways[] = {
        {.ranks = 1},
        {.ranks = 2, .schedule = "zbh1", .capture = QE_CAPTURE_ACTION},
        {.ranks = 4, .schedule = "1f1b", .capture = QE_CAPTURE_STEP},
        {.ranks = 2, .chunks = 2, .schedule = "interleaved", .capture = QE_CAPTURE_LAYER},
        {.ranks = 2, .baseline = 1},
    };
    enum { WAYS = sizeof ways / sizeof *ways };
    for (size_t r = 0; r < sizeof recipes / sizeof *recipes; r++)
        for (size_t way = 0; way < WAYS; way++) {
            world_options from = ways[way], to = ways[(way + 1) % WAYS];
            from.recipe = to.recipe = recipes[r];
            goes_on(&from, &to);
        }
}

static void a_snapshot_holds_what_was_there_when_it_was_taken(void **state) {
    (void)state;
    world_options options = {.ranks = 2};
    world w = world_after(&options, BEFORE);
    world_hash then = world_state(&w);
    qe_snapshot *snapshot = snapshot_of(&w);
    world_step(&w, 0);
    assert_string_not_equal(world_state(&w).text, then.text);
    put(&w, snapshot); /* back in the same team: a rollback */
    assert_string_equal(world_state(&w).text, then.text);
    qe_snapshot_destroy(snapshot);
    world_close(&w);
}

static uint64_t count_of(const qe_snapshot *snapshot, uint32_t weight, int role) {
    for (uint32_t i = 0; i < snapshot->count_count; i++)
        if (snapshot->counts[i].weight == weight && snapshot->counts[i].role == role) return snapshot->counts[i].count;
    fail_msg("no counter of weight %u, role %d", weight, role);
    return 0;
}

static void epochs_are_restored_and_versions_never_fall(void **state) {
    (void)state;
    world_options options = {.ranks = 2, .capture = QE_CAPTURE_ACTION};
    world w = world_after(&options, BEFORE);
    qe_snapshot *then = snapshot_of(&w);
    uint32_t scaled = QE_NONE;
    for (uint32_t i = 0; i < then->count_count; i++)
        if (then->counts[i].role >= 0) scaled = then->counts[i].weight;
    assert_int_not_equal(scaled, QE_NONE);
    assert_int_equal(count_of(then, scaled, QE_SCALE_X), BEFORE);
    world_step(&w, 0);
    put(&w, then);
    qe_snapshot *now = snapshot_of(&w);
    assert_int_equal(count_of(now, scaled, QE_SCALE_X), BEFORE);
    assert_true(count_of(now, scaled, -1) > count_of(then, scaled, -1) + 1); /* the step's commit, and the rollback */
    qe_snapshot_destroy(now);
    world fresh;
    open_stranger(&fresh, &options);
    must(qe_team_snapshot_put(fresh.team, then, &fresh.error), &fresh.error, "put");
    now = snapshot_of(&fresh);
    assert_true(count_of(now, scaled, -1) >= count_of(then, scaled, -1));
    assert_int_equal(count_of(now, scaled, QE_SCALE_DY), BEFORE);
    qe_snapshot_destroy(now);
    qe_snapshot_destroy(then);
    world_close(&fresh);
    world_close(&w);
}

static void the_first_use_after_a_restart_must_be_filled(void **state) {
    (void)state;
    static const qe_capture captures[] = {QE_CAPTURE_NONE, QE_CAPTURE_ACTION};
    for (size_t i = 0; i < 2; i++) {
        world_options options = {.ranks = 2, .capture = captures[i]};
        world one = world_after(&options, BEFORE), other;
        qe_snapshot *snapshot = snapshot_of(&one);
        open_stranger(&other, &options);
        world_step(&other, 0); /* its caches are full, of other weights */
        put(&other, snapshot);
        world_hash before = world_state(&other);
        other.step = BEFORE + 1;
        must(qe_team_inject(other.team, QE_RULE_CACHE_EMPTY, &other.error), &other.error, "inject");
        assert_int_equal(world_try_step(&other, 0), QE_CONTRACT);
        assert_int_equal(other.result.violations.record[0].rule, QE_RULE_CACHE_EMPTY);
        assert_string_equal(world_state(&other).text, before.text);
        world_step(&one, 0);
        world_step(&other, 0); /* and the step that fills them goes on as if nothing had been */
        assert_string_equal(world_state(&other).text, world_state(&one).text);
        qe_snapshot_destroy(snapshot);
        world_close(&one);
        world_close(&other);
    }
}

static void what_is_of_another_model_is_refused_and_nothing_changes(void **state) {
    (void)state;
    world_options delayed = {.ranks = 2}, longer = {.ranks = 2, .history = 7},
                  current = {.ranks = 2, .recipe = QE_RECIPE_CURRENT};
    world w = world_after(&delayed, 1);
    world_hash before = world_state(&w);
    const world_options *others[] = {&longer, &current};
    for (size_t i = 0; i < 2; i++) {
        world other = world_after(others[i], 1);
        qe_snapshot *snapshot = snapshot_of(&other);
        assert_int_equal(qe_team_snapshot_put(w.team, snapshot, &w.error), QE_ERROR_ARGUMENT);
        assert_string_equal(world_state(&w).text, before.text);
        qe_snapshot_destroy(snapshot);
        world_close(&other);
    }
    world_close(&w);
}

/* Words of a team that stood at other versions and epochs are those of the snapshot before the first launch. */
static void guards_are_armed_anew(void **state) {
    (void)state;
    world_options options = {.ranks = 1, .capture = QE_CAPTURE_STEP};
    world one = world_after(&options, BEFORE), other;
    qe_snapshot *snapshot = snapshot_of(&one);
    open_stranger(&other, &options);
    for (int i = 0; i < BEFORE + 2; i++) world_step(&other, 0); /* its words stand elsewhere */
    put(&other, snapshot);
    other.step = BEFORE + 1;
    world_step(&one, 0);
    world_step(&other, 0);
    assert_string_equal(world_state(&other).text, world_state(&one).text);
    qe_snapshot_destroy(snapshot);
    world_close(&one);
    world_close(&other);
}

/* --- copies that are kept on the device ------------------------------------------------------------------------- */

enum { FETCHES_MAX = 2 }; /* that succeed before one fails, where one is to fail */
static int keep_fails, fetches_left = -1, kept_times;

static qe_status keep_on_host(qe_device *device, const qe_keep_range *ranges, size_t count, qe_error *error_out) {
    (void)device;
    kept_times++;
    if (keep_fails) return qe_error_set(error_out, QE_ERROR_DEVICE, NULL, "planted: keep");
    for (size_t i = 0; i < count; i++) memcpy(ranges[i].to, ranges[i].from, (size_t)ranges[i].bytes);
    return QE_OK;
}

static qe_status fetch_on_host(qe_device *device, void *to_host, const void *kept, size_t bytes, qe_error *error_out) {
    (void)device;
    if (fetches_left == 0) return qe_error_set(error_out, QE_ERROR_DEVICE, NULL, "planted: fetch");
    if (fetches_left > 0) fetches_left--;
    memcpy(to_host, kept, bytes);
    return QE_OK;
}

/* The host's backend, with copies as a device has them. */
static const qe_backend *keeping_backend(void) {
    static qe_memory_ops memory;
    static qe_backend backend;
    memory = *qe_host_backend()->memory;
    memory.keep = keep_on_host;
    memory.fetch = fetch_on_host;
    backend = *qe_host_backend();
    backend.memory = &memory;
    return &backend;
}

static void same_snapshots(const qe_snapshot *one, const qe_snapshot *other) {
    assert_int_equal(one->value_count, other->value_count);
    assert_memory_equal(one->values, other->values, (size_t)one->value_count * sizeof *one->values);
    assert_int_equal(one->count_count, other->count_count);
    for (uint32_t i = 0; i < one->count_count; i++) assert_int_equal(one->counts[i].count, other->counts[i].count);
}

static void what_is_kept_stays_as_it_was_while_steps_go_on(void **state) {
    (void)state;
    static const qe_recipe_kind recipes[] = {QE_RECIPE_DELAYED, QE_RECIPE_BF16};
    for (size_t r = 0; r < 2; r++) {
        world_options options = {.ranks = 2, .chunks = 2, .schedule = "interleaved", .recipe = recipes[r],
                                 .backend = keeping_backend()};
        world w = world_after(&options, BEFORE);
        qe_snapshot *plain = snapshot_of(&w), *kept = NULL;
        must(qe_snapshot_create(w.team, &kept, &w.error), &w.error, "snapshot");
        qe_snapshot_twin(w.team, kept);
        for (int again = 0; again < 2; again++) {
            must(qe_team_snapshot_take(w.team, plain, &w.error), &w.error, "take");
            kept_times = 0;
            must(qe_team_snapshot_take(w.team, kept, &w.error), &w.error, "take");
            assert_int_equal(kept_times, 2);
            world_step(&w, 0);
            must(qe_snapshot_fetch(kept, &w.error), &w.error, "fetch");
            same_snapshots(plain, kept);
        }
        qe_snapshot_destroy(kept);
        qe_snapshot_destroy(plain);
        world_close(&w);
    }
}

static void a_copy_that_fails_is_told_and_the_next_one_is_whole(void **state) {
    (void)state;
    world_options options = {.ranks = 1, .backend = keeping_backend()};
    world w = world_after(&options, BEFORE);
    qe_snapshot *plain = snapshot_of(&w), *kept = NULL;
    must(qe_snapshot_create(w.team, &kept, &w.error), &w.error, "snapshot");
    qe_snapshot_twin(w.team, kept);
    keep_fails = 1;
    assert_int_equal(qe_team_snapshot_take(w.team, kept, &w.error), QE_ERROR_DEVICE);
    keep_fails = 0;
    must(qe_team_snapshot_take(w.team, kept, &w.error), &w.error, "take");
    fetches_left = FETCHES_MAX;
    assert_int_equal(qe_snapshot_fetch(kept, &w.error), QE_ERROR_DEVICE);
    fetches_left = -1;
    world_step(&w, 0);
    must(qe_snapshot_fetch(kept, &w.error), &w.error, "fetch again");
    same_snapshots(plain, kept);
    qe_snapshot_destroy(kept);
    qe_snapshot_destroy(plain);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_recipe_goes_on_in_every_mode_over_other_stages_and_schedules),
        cmocka_unit_test(a_snapshot_holds_what_was_there_when_it_was_taken),
        cmocka_unit_test(epochs_are_restored_and_versions_never_fall),
        cmocka_unit_test(the_first_use_after_a_restart_must_be_filled),
        cmocka_unit_test(what_is_of_another_model_is_refused_and_nothing_changes),
        cmocka_unit_test(guards_are_armed_anew),
        cmocka_unit_test(what_is_kept_stays_as_it_was_while_steps_go_on),
        cmocka_unit_test(a_copy_that_fails_is_told_and_the_next_one_is_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
