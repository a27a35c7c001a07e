/* test_ledger_issue.c - the certified way: nothing is allocated, a step costs nanoseconds per op, states are those of
 * the full way, and a cell that is not as certified is found and named. */
#include "core_program.h"

#include <malloc.h>
#include <stdlib.h>
#include <time.h>

#include "core/ledger_state.h"

/* Counts every allocation of the process. The sanitizers bring their own allocator, which then goes uncounted. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define COUNTS_ALLOCATIONS 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define COUNTS_ALLOCATIONS 0
#endif
#endif
#ifndef COUNTS_ALLOCATIONS
#define COUNTS_ALLOCATIONS 1
#endif

static unsigned long allocations;
#if COUNTS_ALLOCATIONS
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);
void *malloc(size_t bytes) {
    allocations++;
    return __libc_malloc(bytes);
}
void *calloc(size_t count, size_t bytes) {
    allocations++;
    return __libc_calloc(count, bytes);
}
void *realloc(void *old, size_t bytes) {
    allocations++;
    return __libc_realloc(old, bytes);
}
#endif

/* A program as wide as a real rank's: layers of weights, caches, scales and slots, several microbatches. */
enum { LAYERS = 24, MICROBATCHES = 8 };
enum { OF_SCALE, OF_WEIGHT, OF_CACHE, OF_GRAD, OF_SLOT_A, OF_SLOT_B, PER_LAYER };

static uint32_t object_of(uint32_t layer, uint32_t which) { return layer * PER_LAYER + which; }

static void add_layer(qe_program *program, uint32_t layer) {
    uint32_t weight = object_of(layer, OF_WEIGHT);
    const qe_object objects[PER_LAYER] = {
        [OF_SCALE] = {.name = "scale", .kind = QE_OBJECT_SCALE, .due = MICROBATCHES},
        [OF_WEIGHT] = {.name = "weight", .kind = QE_OBJECT_WEIGHT},
        [OF_CACHE] = {.name = "cache", .kind = QE_OBJECT_CACHE, .weight = weight, .scale = object_of(layer, OF_SCALE)},
        [OF_GRAD] = {.name = "grad", .kind = QE_OBJECT_GRAD, .weight = weight, .due = MICROBATCHES},
        [OF_SLOT_A] = {.name = "a", .kind = QE_OBJECT_SLOT},
        [OF_SLOT_B] = {.name = "b", .kind = QE_OBJECT_SLOT},
    };
    for (uint32_t i = 0; i < PER_LAYER; i++)
        assert_int_equal(must_add_object(program, objects[i]), object_of(layer, i));
}

#define EFFECT(k, which, ...) {.kind = QE_EFFECT_##k, .object = object_of(layer, which), __VA_ARGS__}

static void add_forward(qe_program *program, uint32_t layer, uint32_t mb, uint32_t work) {
    OP(program, 0, mb, "forward", EFFECT(CACHE_USE, OF_CACHE, .layouts = 1), EFFECT(SCALE_USE, OF_SCALE),
       EFFECT(SCALE_RECORD, OF_SCALE), EFFECT(SLOT_ACQUIRE, OF_SLOT_A, .version = mb + 1, .microbatch = mb),
       EFFECT(SLOT_BORROW, OF_SLOT_A, .version = mb + 1, .microbatch = mb, .write = 1),
       EFFECT(SLOT_ACQUIRE, OF_SLOT_B, .version = mb + 1, .microbatch = mb),
       {.kind = QE_EFFECT_BUFFER_WRITE, .object = work, .end = 64},
       {.kind = QE_EFFECT_BUFFER_READ, .object = work, .end = 64});
}

static void add_backward(qe_program *program, uint32_t layer, uint32_t mb, uint32_t work) {
    OP(program, 0, mb, "backward", EFFECT(CACHE_USE, OF_CACHE, .layouts = 2),
       EFFECT(SLOT_BORROW, OF_SLOT_A, .version = mb + 1, .microbatch = mb),
       EFFECT(SLOT_RELEASE, OF_SLOT_A, .version = mb + 1, .microbatch = mb),
       EFFECT(SLOT_RELEASE, OF_SLOT_B, .version = mb + 1, .microbatch = mb),
       EFFECT(GRAD_DEPOSIT, OF_GRAD, .microbatch = mb, .write = mb == 0),
       {.kind = QE_EFFECT_BUFFER_WRITE, .object = work, .end = 64},
       {.kind = QE_EFFECT_BUFFER_READ, .object = work, .end = 64});
}

static void make_wide_program(qe_program *program) {
    qe_program_init(program);
    for (uint32_t layer = 0; layer < LAYERS; layer++) add_layer(program, layer);
    uint32_t work = must_add_object(program, (qe_object){.name = "work", .kind = QE_OBJECT_BUFFER, .bytes = 64});
    assert_int_equal(qe_program_add_stream(program, "compute", QE_STREAM_COMPUTE, NULL, NULL), QE_OK);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        OP(program, 0, QE_NONE, "fill", EFFECT(WEIGHT_READ, OF_WEIGHT), EFFECT(CACHE_FILL, OF_CACHE, .layouts = 3));
    for (uint32_t mb = 0; mb < MICROBATCHES; mb++) {
        for (uint32_t layer = 0; layer < LAYERS; layer++) add_forward(program, layer, mb, work);
        for (uint32_t layer = LAYERS; layer-- > 0;) add_backward(program, layer, mb, work);
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        OP(program, 0, QE_NONE, "norm", EFFECT(GRAD_TAKE, OF_GRAD));
        OP(program, 0, QE_NONE, "adamw", EFFECT(WEIGHT_COMMIT, OF_WEIGHT), EFFECT(SCALE_FOLD, OF_SCALE));
    }
}

static qe_ledger *certify(const qe_program *program) {
    qe_ledger *ledger;
    qe_violations violations;
    qe_error error = {0};
    assert_int_equal(qe_ledger_create(program, &ledger, &error), QE_OK);
    qe_status status = qe_ledger_certify(ledger, &violations, &error);
    if (status != QE_OK) print_error("%s, item %u\n", error.message, violations.record[0].item);
    assert_int_equal(status, QE_OK);
    return ledger;
}

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void run_step(qe_ledger *ledger, uint32_t items) {
    qe_violations violations;
    qe_ledger_step_begin(ledger);
    for (uint32_t i = 0; i < items; i++)
        if (qe_ledger_issue(ledger, i, &violations) != QE_OK) fail_msg("item %u", i);
    assert_int_equal(qe_ledger_step_end(ledger, &violations), QE_OK);
}

static void certified_steps_allocate_nothing(void **state) {
    (void)state;
    qe_program program;
    make_wide_program(&program);
    qe_ledger *ledger = certify(&program);
    unsigned long before = allocations;
    for (int step = 0; step < 3; step++) run_step(ledger, program.item_count);
    assert_int_equal(allocations - before, 0);
    if (COUNTS_ALLOCATIONS) {
        before = allocations;
        void *volatile probe = malloc(1);
        free(probe);
        assert_int_equal(allocations - before, 1);
    }
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

static void departed_steps_of_the_programs_own_ranges_allocate_nothing(void **state) {
    (void)state;
    qe_program program;
    qe_violations violations;
    make_right_program(&program);
    qe_ledger *ledger = certify(&program);
    unsigned long before = allocations;
    qe_ledger_step_begin(ledger);
    qe_item nothing = {.kind = QE_ITEM_OP, .stream = COMPUTE, .microbatch = QE_NONE};
    assert_int_equal(qe_ledger_submit(ledger, &nothing, NULL, QE_NONE, &violations), QE_OK);
    for (uint32_t i = 0; i < program.item_count; i++)
        assert_int_equal(qe_ledger_issue(ledger, i, &violations), QE_OK);
    assert_int_equal(qe_ledger_step_end(ledger, &violations), QE_OK);
    assert_int_equal(allocations - before, 0);
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

static void a_certified_op_costs_nanoseconds(void **state) {
    (void)state;
    enum { SAMPLES = 101 };
    double per_op[SAMPLES];
    qe_program program;
    make_wide_program(&program);
    qe_ledger *ledger = certify(&program);
    uint32_t first = LAYERS, end = LAYERS + 2 * LAYERS * MICROBATCHES; /* ops with 7 and 8 effects */
    qe_violations violations;
    for (int sample = 0; sample < SAMPLES; sample++) {
        qe_ledger_step_begin(ledger);
        for (uint32_t i = 0; i < first; i++) (void)qe_ledger_issue(ledger, i, &violations);
        uint64_t begin = now_ns();
        for (uint32_t i = first; i < end; i++) (void)qe_ledger_issue(ledger, i, &violations);
        per_op[sample] = (double)(now_ns() - begin) / (double)(end - first);
        for (uint32_t i = end; i < program.item_count; i++) (void)qe_ledger_issue(ledger, i, &violations);
        assert_int_equal(qe_ledger_step_end(ledger, &violations), QE_OK);
    }
    qsort(per_op, SAMPLES, sizeof per_op[0], ascending);
    print_message("    certified op with 7.5 effects: %.1f ns median, %.1f best, %.1f worst\n", per_op[SAMPLES / 2],
                  per_op[0], per_op[SAMPLES - 1]);
    /* A bound that a loaded machine and a sanitizer meet too; the figure above is what counts. */
    assert_true(per_op[0] < 2000.0);
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

static void both_ways_leave_the_same_states(void **state) {
    (void)state;
    qe_program program;
    qe_violations violations;
    make_wide_program(&program);
    qe_ledger *certified = certify(&program), *judged = certify(&program);
    uint64_t ways[2];
    for (int step = 0; step < 3; step++) {
        qe_ledger_step_begin(certified);
        qe_ledger_step_begin(judged);
        for (uint32_t i = 0; i < program.item_count; i++) {
            const qe_item *item = &program.items[i];
            const qe_effect *effects = &program.effects[item->first_effect];
            assert_int_equal(qe_ledger_issue(certified, i, &violations), QE_OK);
            assert_int_equal(qe_ledger_submit(judged, item, effects, i, &violations), QE_OK);
            assert_memory_equal(certified->state, judged->state, program.object_count * sizeof(qe_object_state));
        }
        qe_ledger_counts(certified, &ways[0], &ways[1]);
        assert_int_equal(ways[0], program.item_count);
        assert_int_equal(ways[1], 0);
        qe_ledger_counts(judged, &ways[0], &ways[1]);
        assert_int_equal(ways[0], 0);
        assert_int_equal(ways[1], program.item_count);
        assert_int_equal(qe_ledger_step_end(certified, &violations), QE_OK);
        assert_int_equal(qe_ledger_step_end(judged, &violations), QE_OK);
    }
    assert_int_equal(qe_ledger_counter(certified, object_of(0, OF_WEIGHT)), 3);
    assert_int_equal(qe_ledger_counter(certified, object_of(0, OF_SLOT_A)), 3 * MICROBATCHES);
    qe_ledger_destroy(certified);
    qe_ledger_destroy(judged);
    qe_program_deinit(&program);
}

static void a_changed_state_is_found_and_named(void **state) {
    (void)state;
    static const struct {
        uint32_t object, before;
        uint64_t counter, word;
        const char *rule;
    } changes[] = {
        {SCALE, ITEM_F0, 1, 0, "scale.epoch"},
        {SLOT, ITEM_W0, 1, 0, "slot.stale"},
        {WEIGHT, ITEM_FILL, 1, 0, "weight.version"},
        {CACHE, ITEM_F0, 0, QE_CACHE_FILLED, "cache.empty"},
        {GRAD, ITEM_TAKE, 0, QE_GRAD_TAKEN, "grad.taken"},
    };
    qe_program program;
    make_right_program(&program);
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        qe_ledger *ledger = certify(&program);
        qe_violations violations;
        qe_ledger_step_begin(ledger);
        for (uint32_t k = 0; k < changes[i].before; k++)
            assert_int_equal(qe_ledger_issue(ledger, k, &violations), QE_OK);
        ledger->state[changes[i].object].counter += changes[i].counter;
        ledger->state[changes[i].object].word ^= changes[i].word;
        assert_int_equal(qe_ledger_issue(ledger, changes[i].before, &violations), QE_CONTRACT);
        assert_string_equal(qe_rule_id(violations.record[0].rule), changes[i].rule);
        assert_int_equal(violations.record[0].item, changes[i].before);
        qe_ledger_destroy(ledger);
    }
    qe_program_deinit(&program);
}

static void an_aborted_step_leaves_the_counters_of_the_step_before(void **state) {
    (void)state;
    qe_program program;
    qe_violations violations;
    make_right_program(&program);
    qe_ledger *ledger = certify(&program);
    run_step(ledger, program.item_count);
    for (uint32_t stop = 0; stop <= program.item_count; stop++) {
        uint64_t scale = qe_ledger_counter(ledger, SCALE), takes = qe_ledger_counter(ledger, GRAD);
        uint64_t weight = qe_ledger_counter(ledger, WEIGHT), slot = qe_ledger_counter(ledger, SLOT);
        qe_ledger_step_begin(ledger);
        for (uint32_t i = 0; i < stop; i++) assert_int_equal(qe_ledger_issue(ledger, i, &violations), QE_OK);
        qe_ledger_step_abort(ledger);
        assert_int_equal(qe_ledger_counter(ledger, SCALE), scale);
        assert_int_equal(qe_ledger_counter(ledger, GRAD), takes);
        assert_int_equal(qe_ledger_counter(ledger, WEIGHT), stop > ITEM_COMMIT ? weight + 2 : weight);
        assert_true(qe_ledger_counter(ledger, SLOT) >= slot);
        assert_int_equal(ledger->state[CACHE].word, 0);
        assert_int_equal(ledger->state[SLOT].word, 0);
        run_step(ledger, program.item_count);
    }
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

static void what_changes_between_steps_empties_caches_and_only_rises(void **state) {
    (void)state;
    qe_program program;
    make_right_program(&program);
    qe_ledger *ledger = certify(&program);
    run_step(ledger, program.item_count);
    qe_ledger_touch(ledger, WEIGHT, 7);
    assert_int_equal(qe_ledger_counter(ledger, WEIGHT), 7);
    assert_int_equal(ledger->state[CACHE].word, 0);
    qe_ledger_touch(ledger, WEIGHT, 3);
    assert_int_equal(qe_ledger_counter(ledger, WEIGHT), 8);
    qe_ledger_touch(ledger, SCALE, 5);
    assert_int_equal(qe_ledger_counter(ledger, SCALE), 5);
    run_step(ledger, program.item_count);
    assert_int_equal(qe_ledger_counter(ledger, WEIGHT), 9);
    assert_int_equal(qe_ledger_counter(ledger, SCALE), 6);
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

static void what_changes_beside_a_step_is_known_in_the_next_one(void **state) {
    (void)state;
    qe_program program;
    qe_violations violations;
    make_right_program(&program);
    qe_ledger *ledger = certify(&program);
    for (uint32_t object = SCALE; object <= CACHE; object++) { /* a cache is of its weight and of its scale */
        run_step(ledger, program.item_count);
        qe_ledger_touch(ledger, object, 9);
        int empties = object != SLOT;
        assert_int_equal(ledger->state[CACHE].word == 0, empties);
    }
    uint64_t slot = qe_ledger_counter(ledger, SLOT);
    assert_true(slot >= 9);
    qe_ledger_touch(ledger, SLOT, 3); /* generations never fall: an old handle must not fit again */
    assert_int_equal(qe_ledger_counter(ledger, SLOT), slot);
    qe_ledger_touch(ledger, GRAD, 11);
    assert_int_equal(qe_ledger_counter(ledger, GRAD), 11);
    qe_ledger_destroy(ledger);
    assert_int_equal(qe_ledger_create(&program, &ledger, NULL), QE_OK);
    qe_item item = {.kind = QE_ITEM_OP, .stream = COMPUTE, .effect_count = 1, .microbatch = QE_NONE};
    qe_effect read = BUFFER_EFFECT(READ, 0, BUFFER_BYTES, 0);
    qe_ledger_step_begin(ledger);
    assert_int_equal(qe_ledger_submit(ledger, &item, &read, QE_NONE, &violations), QE_CONTRACT);
    assert_int_equal(violations.record[0].rule, QE_RULE_BUFFER_UNWRITTEN);
    qe_ledger_step_abort(ledger);
    qe_ledger_touch(ledger, BUFFER, 0); /* somebody wrote it */
    qe_ledger_step_begin(ledger);
    assert_int_equal(qe_ledger_submit(ledger, &item, &read, QE_NONE, &violations), QE_OK);
    read.version = 1; /* and not in this step */
    assert_int_equal(qe_ledger_submit(ledger, &item, &read, QE_NONE, &violations), QE_CONTRACT);
    assert_int_equal(violations.record[0].rule, QE_RULE_BUFFER_VERSION);
    qe_ledger_step_abort(ledger);
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

static void what_a_certified_step_wrote_is_written_in_the_next_one(void **state) {
    (void)state;
    qe_program program;
    qe_violations violations;
    make_right_program(&program);
    qe_ledger *ledger = certify(&program);
    qe_item item = {.kind = QE_ITEM_OP, .stream = CALLER, .effect_count = 1, .microbatch = QE_NONE};
    qe_effect read = BUFFER_EFFECT(READ, 0, BUFFER_BYTES, 0);
    for (uint32_t issued = 0; issued < 2; issued++) {
        qe_ledger_step_begin(ledger);
        assert_int_equal(qe_ledger_submit(ledger, &item, &read, QE_NONE, &violations), issued ? QE_OK : QE_CONTRACT);
        qe_ledger_step_abort(ledger);
        if (issued) continue;
        qe_ledger_step_begin(ledger); /* the first op writes all of it */
        assert_int_equal(qe_ledger_issue(ledger, ITEM_LOAD, &violations), QE_OK);
        qe_ledger_step_abort(ledger);
    }
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

/* The order of a gradient's deposits is the program's own, from its very first effect on. */
static void the_first_and_the_last_effect_of_a_program_count_in_its_orders(void **state) {
    (void)state;
    enum { FIRST_GRAD, LAST_GRAD };
    qe_program program;
    qe_violations violations;
    qe_program_init(&program);
    for (int i = 0; i < 2; i++)
        must_add_object(&program, (qe_object){.name = "g", .kind = QE_OBJECT_GRAD, .weight = QE_NONE, .due = 2});
    assert_int_equal(qe_program_add_stream(&program, "s", QE_STREAM_COMPUTE, NULL, NULL), QE_OK);
#define CONTRIBUTION(which, mb, sets) \
    {.kind = QE_EFFECT_GRAD_DEPOSIT, .object = which, .microbatch = mb, .write = sets}
    OP(&program, 0, 1, "w", CONTRIBUTION(FIRST_GRAD, 1, 1));
    OP(&program, 0, 0, "w", CONTRIBUTION(FIRST_GRAD, 0, 0), CONTRIBUTION(LAST_GRAD, 3, 1));
    OP(&program, 0, 2, "w", CONTRIBUTION(LAST_GRAD, 2, 0));
    qe_ledger *ledger;
    assert_int_equal(qe_ledger_create(&program, &ledger, NULL), QE_OK);
    qe_item item = {.kind = QE_ITEM_OP, .effect_count = 1, .microbatch = QE_NONE};
    static const uint32_t order[2][2] = {{1, 0}, {3, 2}};
    for (uint32_t grad = FIRST_GRAD; grad <= LAST_GRAD; grad++) {
        qe_ledger_step_begin(ledger);
        qe_effect effect = CONTRIBUTION(grad, order[grad][1], 1);
        assert_int_equal(qe_ledger_submit(ledger, &item, &effect, QE_NONE, &violations), QE_CONTRACT);
        assert_int_equal(violations.record[0].rule, QE_RULE_GRAD_ORDER);
        assert_int_equal(violations.record[0].expected, order[grad][0]);
        for (uint32_t i = 0; i < 2; i++) {
            effect = (qe_effect)CONTRIBUTION(grad, order[grad][i], i == 0);
            assert_int_equal(qe_ledger_submit(ledger, &item, &effect, QE_NONE, &violations), QE_OK);
        }
        effect.microbatch = 7;
        assert_int_equal(qe_ledger_submit(ledger, &item, &effect, QE_NONE, &violations), QE_CONTRACT);
        assert_int_equal(violations.record[0].expected, QE_NONE);
        qe_ledger_step_abort(ledger);
    }
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

/* Departed submissions are held against each other where they act on versioned objects, too. */
static void what_departed_on_two_streams_needs_an_edge(void **state) {
    (void)state;
    qe_program program;
    qe_violations violations;
    make_right_program(&program);
    qe_ledger *ledger = certify(&program);
    qe_effect record = SCALE_EFFECT(RECORD, 0), again = record, fill = CACHE_EFFECT(FILL, 3, 0, 0);
    qe_effect use = CACHE_EFFECT(USE, 1, 0, 0);
    qe_item on_send = {.kind = QE_ITEM_OP, .stream = SEND, .effect_count = 1, .microbatch = QE_NONE};
    qe_item on_compute = on_send;
    on_compute.stream = COMPUTE;
    qe_ledger_step_begin(ledger);
    assert_int_equal(qe_ledger_submit(ledger, &on_send, &record, QE_NONE, &violations), QE_OK);
    assert_int_equal(qe_ledger_submit(ledger, &on_compute, &again, QE_NONE, &violations), QE_OK); /* they commute */
    assert_int_equal(qe_ledger_submit(ledger, &on_send, &fill, QE_NONE, &violations), QE_OK);
    assert_int_equal(qe_ledger_submit(ledger, &on_compute, &use, QE_NONE, &violations), QE_CONTRACT);
    assert_int_equal(violations.record[0].rule, QE_RULE_SYNC_SIDE);
    qe_ledger_step_abort(ledger);
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

static void an_event_of_the_step_before_has_no_record(void **state) {
    (void)state;
    qe_program program;
    qe_violations violations;
    make_right_program(&program);
    qe_ledger *ledger = certify(&program);
    qe_item record = {.kind = QE_ITEM_RECORD, .stream = SEND, .event = 2, .microbatch = QE_NONE}, wait = record;
    wait.kind = QE_ITEM_WAIT;
    wait.stream = COMPUTE;
    for (int step = 0; step < 2; step++) {
        qe_ledger_step_begin(ledger);
        assert_int_equal(qe_ledger_submit(ledger, &wait, NULL, QE_NONE, &violations), QE_CONTRACT);
        assert_int_equal(violations.record[0].rule, QE_RULE_SYNC_EVENT);
        assert_int_equal(qe_ledger_submit(ledger, &record, NULL, QE_NONE, &violations), QE_OK);
        assert_int_equal(qe_ledger_submit(ledger, &wait, NULL, QE_NONE, &violations), QE_OK);
        qe_ledger_step_abort(ledger);
    }
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

/* Nobody knows what an observed breach left: caches are empty, slots free, weights of new versions. */
static void a_step_that_was_observed_leaves_nothing_to_be_trusted(void **state) {
    (void)state;
    qe_program program;
    qe_violations violations;
    make_right_program(&program);
    qe_ledger *ledger = certify(&program);
    qe_ledger_observe(ledger);
    qe_item item = {.kind = QE_ITEM_OP, .stream = COMPUTE, .effect_count = 1, .microbatch = QE_NONE};
    qe_effect stale = WEIGHT_EFFECT(READ, 9), acquire = SLOT_EFFECT(ACQUIRE, 1, 0, 0);
    run_step(ledger, program.item_count);
    assert_int_equal(qe_ledger_counter(ledger, WEIGHT), 1);
    assert_int_equal(qe_ledger_observed(ledger), 0);
    assert_true(ledger->state[CACHE].word != 0); /* a right step leaves what it made */
    qe_ledger_step_begin(ledger);
    assert_int_equal(qe_ledger_submit(ledger, &item, &stale, QE_NONE, &violations), QE_CONTRACT);
    assert_int_equal(qe_ledger_submit(ledger, &item, &acquire, QE_NONE, &violations), QE_OK);
    assert_int_equal(qe_ledger_observed(ledger), 1);
    assert_int_equal(qe_ledger_step_end(ledger, &violations), QE_CONTRACT); /* the slot, and the gradient */
    assert_int_equal(violations.total, 2);
    assert_int_equal(qe_ledger_counter(ledger, WEIGHT), 2);
    assert_int_equal(ledger->state[CACHE].word, 0);
    assert_int_equal(ledger->state[SLOT].word, 0);
    qe_ledger_step_begin(ledger);
    assert_int_equal(qe_ledger_submit(ledger, &item, &stale, QE_NONE, &violations), QE_CONTRACT);
    for (uint32_t i = 0; i < program.item_count; i++)
        assert_int_equal(qe_ledger_issue(ledger, i, &violations), QE_OK);
    assert_int_equal(qe_ledger_step_end(ledger, &violations), QE_OK);
    assert_int_equal(qe_ledger_counter(ledger, WEIGHT), 3); /* its commit made the new version */
    assert_int_equal(ledger->state[CACHE].word, 0);
    run_step(ledger, program.item_count);
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

/* Behind a write of the whole buffer: some bytes that an op reads it wrote itself, the others it did not. */
static void where_the_own_writes_of_an_op_begin_and_end_counts(void **state) {
    (void)state;
    static const struct {
        uint64_t begin, end, version;
        qe_status status;
    } reads[] = {{0, 4, 1, QE_OK},      {4, 8, 2, QE_OK},       {8, 16, 1, QE_OK},
                 {0, 5, 1, QE_CONTRACT}, {3, 8, 2, QE_CONTRACT}, {4, 9, 2, QE_CONTRACT}, {7, 16, 1, QE_CONTRACT}};
    qe_program program;
    qe_violations violations;
    make_right_program(&program);
    qe_ledger *ledger = certify(&program);
    qe_item item = {.kind = QE_ITEM_OP, .stream = CALLER, .effect_count = 2, .microbatch = QE_NONE};
    for (size_t i = 0; i < sizeof reads / sizeof reads[0]; i++) {
        qe_effect effects[] = {BUFFER_EFFECT(WRITE, 4, 8, 0),
                               BUFFER_EFFECT(READ, reads[i].begin, reads[i].end, reads[i].version)};
        qe_ledger_step_begin(ledger);
        assert_int_equal(qe_ledger_issue(ledger, ITEM_LOAD, &violations), QE_OK);
        assert_int_equal(qe_ledger_submit(ledger, &item, effects, QE_NONE, &violations), reads[i].status);
        if (reads[i].status == QE_CONTRACT) assert_int_equal(violations.record[0].rule, QE_RULE_BUFFER_VERSION);
        qe_ledger_step_abort(ledger);
    }
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

static void all_breaches_of_a_program_are_told_when_it_is_certified(void **state) {
    (void)state;
    qe_program program;
    qe_violations violations;
    qe_error error = {0};
    qe_ledger *ledger;
    make_right_program(&program);
    program.effects[program.items[ITEM_W0].first_effect].version = 5;     /* slot.stale, and the release after it */
    program.effects[program.items[ITEM_W1].first_effect].version = 5;
    program.effects[program.items[ITEM_COMMIT].first_effect].version = 3; /* weight.version */
    assert_int_equal(qe_ledger_create(&program, &ledger, NULL), QE_OK);
    assert_int_equal(qe_ledger_certify(ledger, &violations, &error), QE_CONTRACT);
    assert_non_null(strstr(error.message, "breaks slot.stale and cannot be certified"));
    assert_int_equal(violations.record[0].rule, QE_RULE_SLOT_STALE);
    assert_int_equal(violations.record[0].item, ITEM_W0);
    int weights = 0, slots = 0; /* two ops of one name are two breaches: only a trace counts them as one */
    for (uint32_t i = 0; i < violations.count; i++) {
        weights += violations.record[i].rule == QE_RULE_WEIGHT_VERSION;
        slots += violations.record[i].rule == QE_RULE_SLOT_STALE && violations.record[i].object == SLOT;
        assert_int_equal(violations.record[i].count, 1);
    }
    assert_int_equal(weights, 1);
    assert_int_equal(slots, 2);
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

static void a_submission_that_names_nothing_real_is_an_argument_error(void **state) {
    (void)state;
    qe_program program;
    qe_violations violations;
    make_right_program(&program);
    qe_ledger *ledger = certify(&program);
    qe_ledger_step_begin(ledger);
    qe_effect effect = {.kind = QE_EFFECT_SCALE_USE, .object = SLOT};
    qe_item item = {.kind = QE_ITEM_OP, .stream = COMPUTE, .effect_count = 1, .microbatch = QE_NONE};
    assert_int_equal(qe_ledger_submit(ledger, &item, &effect, QE_NONE, &violations), QE_ERROR_ARGUMENT);
    effect.object = 99;
    assert_int_equal(qe_ledger_submit(ledger, &item, &effect, QE_NONE, &violations), QE_ERROR_ARGUMENT);
    effect.object = SCALE;
    item.stream = 9;
    assert_int_equal(qe_ledger_submit(ledger, &item, &effect, QE_NONE, &violations), QE_ERROR_ARGUMENT);
    item.stream = COMPUTE;
    assert_int_equal(qe_ledger_submit(ledger, &item, &effect, 999, &violations), QE_ERROR_ARGUMENT);
    assert_int_equal(qe_ledger_submit(ledger, &item, &effect, QE_NONE, &violations), QE_OK);
    qe_ledger_step_abort(ledger);
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

/* An op reads bytes that it wrote itself: its own writes count, byte by byte. */
static void what_an_op_wrote_itself_counts_as_a_write_of_the_step(void **state) {
    (void)state;
    static const struct {
        uint64_t begin, end, version;
        qe_rule rule;
    } reads[] = {{0, 8, 0, QE_RULE_NONE},           {0, 8, 1, QE_RULE_NONE},
                 {4, 8, 2, QE_RULE_NONE},           {0, 4, 2, QE_RULE_BUFFER_VERSION},
                 {0, 8, 2, QE_RULE_BUFFER_VERSION}, {0, 16, 0, QE_RULE_BUFFER_UNWRITTEN}};
    qe_program program;
    qe_violations violations;
    make_right_program(&program);
    qe_ledger *ledger = certify(&program);
    qe_item item = {.kind = QE_ITEM_OP, .stream = CALLER, .effect_count = 3, .microbatch = QE_NONE};
    for (size_t i = 0; i < sizeof reads / sizeof reads[0]; i++) {
        qe_effect effects[] = {BUFFER_EFFECT(WRITE, 0, 8, 0), BUFFER_EFFECT(WRITE, 4, 12, 0),
                               BUFFER_EFFECT(READ, reads[i].begin, reads[i].end, reads[i].version)};
        if (reads[i].end == 8 && reads[i].version == 1) effects[1].begin = 8;
        qe_ledger_step_begin(ledger);
        qe_status status = qe_ledger_submit(ledger, &item, effects, QE_NONE, &violations);
        assert_int_equal(status, reads[i].rule == QE_RULE_NONE ? QE_OK : QE_CONTRACT);
        if (status == QE_CONTRACT) assert_int_equal(violations.record[0].rule, reads[i].rule);
        qe_ledger_step_abort(ledger);
    }
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(certified_steps_allocate_nothing),
        cmocka_unit_test(departed_steps_of_the_programs_own_ranges_allocate_nothing),
        cmocka_unit_test(a_certified_op_costs_nanoseconds),
        cmocka_unit_test(both_ways_leave_the_same_states),
        cmocka_unit_test(a_changed_state_is_found_and_named),
        cmocka_unit_test(an_aborted_step_leaves_the_counters_of_the_step_before),
        cmocka_unit_test(what_changes_between_steps_empties_caches_and_only_rises),
        cmocka_unit_test(what_changes_beside_a_step_is_known_in_the_next_one),
        cmocka_unit_test(what_a_certified_step_wrote_is_written_in_the_next_one),
        cmocka_unit_test(the_first_and_the_last_effect_of_a_program_count_in_its_orders),
        cmocka_unit_test(what_departed_on_two_streams_needs_an_edge),
        cmocka_unit_test(an_event_of_the_step_before_has_no_record),
        cmocka_unit_test(a_step_that_was_observed_leaves_nothing_to_be_trusted),
        cmocka_unit_test(where_the_own_writes_of_an_op_begin_and_end_counts),
        cmocka_unit_test(all_breaches_of_a_program_are_told_when_it_is_certified),
        cmocka_unit_test(a_submission_that_names_nothing_real_is_an_argument_error),
        cmocka_unit_test(what_an_op_wrote_itself_counts_as_a_write_of_the_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
