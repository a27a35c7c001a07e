/* Bytes by kind: what is foretold from plans is what the memory table is then asked for, under every schedule. */
#include "step_world.h"

#include <stdatomic.h>

#include "qeffect/memory.h"

static _Atomic uint64_t asked_bytes; /* of the memory table, all ranks */

static qe_status counting_alloc(qe_device *device, size_t bytes, void **address_out, qe_error *error_out) {
    atomic_fetch_add(&asked_bytes, bytes);
    return qe_host_backend()->memory->alloc(device, bytes, address_out, error_out);
}

static const struct {
    const char *schedule;
    uint32_t ranks, chunks;
} pipelines[] = {
    {"gpipe", 2, 1}, {"1f1b", 4, 1}, {"interleaved", 2, 2}, {"zbh1", 4, 1},   {"zbh2", 2, 1}, {"interleaved-zb", 2, 2},
    {"zbv", 2, 2},   {"v-half", 2, 2}, {"v-min", 2, 2},     {"1f1b-v", 2, 2}, {"dualpipev", 2, 2}, {"looped-bfs", 2, 2},
};

static void open_counted(world *w, world_options *options, qe_backend *backend, qe_memory_ops *memory) {
    *backend = *qe_host_backend();
    *memory = *backend->memory;
    memory->alloc = counting_alloc;
    backend->memory = memory;
    options->backend = backend;
    atomic_store(&asked_bytes, 0);
    world_open(w, options);
}

/* Exact but for guards, which are counted when they are taken. */
static void hold(const world *w, int guards) {
    uint64_t foretold_bytes = 0, graph_bytes = 0;
    for (uint32_t rank = 0; rank < w->plan->ranks; rank++) {
        qe_memory_ledger foretold = qe_memory_foretell(w->plan, w->evaluation, rank);
        qe_memory_ledger taken = qe_team_memory_ledger(w->team, rank);
        graph_bytes += taken.bytes[QE_MEMORY_GRAPHS];
        assert_true(guards == (taken.bytes[QE_MEMORY_GRAPHS] > 0));
        foretold.bytes[QE_MEMORY_GRAPHS] = taken.bytes[QE_MEMORY_GRAPHS];
        assert_memory_equal(&foretold, &taken, sizeof foretold);
        foretold_bytes += qe_memory_ledger_total(&foretold);
    }
    assert_int_equal(foretold_bytes, atomic_load(&asked_bytes));
    assert_true(graph_bytes * 20 < foretold_bytes); /* of a model whose widest matrix has a few thousand values */
}

static void what_is_foretold_is_what_is_taken(void **state) {
    (void)state;
    const qe_recipe_kind recipes[] = {QE_RECIPE_DELAYED, QE_RECIPE_BLOCK, QE_RECIPE_BF16};
    for (size_t p = 0; p < sizeof pipelines / sizeof *pipelines; p++)
        for (int variant = 0; variant < 6; variant++) {
            world w;
            qe_backend backend;
            qe_memory_ops memory;
            world_options options = {.schedule = pipelines[p].schedule, .ranks = pipelines[p].ranks,
                                     .chunks = pipelines[p].chunks, .microbatches = 8, .recipe = recipes[variant % 3],
                                     .copy = variant == 1, .no_reuse = variant == 2, .evaluates = variant == 3,
                                     .capture = variant == 4 ? QE_CAPTURE_ACTION : QE_CAPTURE_NONE};
            open_counted(&w, &options, &backend, &memory);
            hold(&w, variant == 4);
            uint64_t before = atomic_load(&asked_bytes);
            for (int i = 0; i < 2; i++) world_step(&w, 0);
            assert_int_equal(before, atomic_load(&asked_bytes)); /* all is taken at the beginning: the peak */
            world_close(&w);
        }
}

static uint64_t slots_of(const char *schedule, uint32_t microbatches, uint32_t rank) {
    world w;
    world_options options = {.schedule = schedule, .ranks = 4, .microbatches = microbatches};
    memset(&w, 0, sizeof w);
    qe_schedule made;
    w.model = world_model(&options);
    world_schedule(&options, 0, &made);
    w.plan = world_plan(&made, w.model, &options, 0);
    qe_schedule_deinit(&made);
    qe_memory_ledger ledger = qe_memory_foretell(w.plan, NULL, rank);
    uint64_t bytes =
        ledger.bytes[QE_MEMORY_SLOTS_I] + ledger.bytes[QE_MEMORY_SLOTS_W] + ledger.bytes[QE_MEMORY_BOUNDARY];
    assert_int_equal(bytes, w.plan->rank[rank].slot_bytes);
    qe_plan_destroy(w.plan);
    qe_model_destroy(w.model);
    return bytes;
}

static void slots_for_64_microbatches_are_those_for_8(void **state) {
    (void)state;
    const char *const schedules[] = {"1f1b", "zbh1"};
    for (int s = 0; s < 2; s++)
        for (uint32_t rank = 0; rank < 4; rank++)
            assert_int_equal(slots_of(schedules[s], 64, rank), slots_of(schedules[s], 8, rank));
}

static void a_limit_is_held_exactly_and_its_refusal_says_what_lowers_it(void **state) {
    (void)state;
    world w;
    qe_error error = {0};
    world_options options = {.schedule = "gpipe", .ranks = 2, .microbatches = 8};
    world_open(&w, &options);
    uint64_t most = 0;
    for (uint32_t rank = 0; rank < 2; rank++) {
        qe_memory_ledger ledger = qe_memory_foretell(w.plan, NULL, rank);
        if (qe_memory_ledger_total(&ledger) > most) most = qe_memory_ledger_total(&ledger);
    }
    must(qe_memory_check(w.plan, NULL, most, &error), &error, "the limit");
    assert_int_equal(qe_memory_check(w.plan, NULL, most - 1, &error), QE_ERROR_ARGUMENT);
    assert_non_null(strstr(error.remedy, "fewer microbatches live"));
    assert_int_equal(qe_memory_check(w.plan, NULL, 1000, &error), QE_ERROR_ARGUMENT);
    assert_non_null(strstr(error.remedy, "more ranks"));
    assert_non_null(strstr(error.message, "masters"));
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_foretold_is_what_is_taken),
        cmocka_unit_test(slots_for_64_microbatches_are_those_for_8),
        cmocka_unit_test(a_limit_is_held_exactly_and_its_refusal_says_what_lowers_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
