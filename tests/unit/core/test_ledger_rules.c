/* test_ledger_rules.c - for every rule of the ledger: the right program is accepted, the same program with one fault
 * is refused with exactly that rule, the ledger is byte for byte what it was, and the right item still goes through. */
#include "core_program.h"

#include <stdlib.h>

#include "core/ledger_state.h"

/* A fault: after `before` right items (without `skipped`), the item `at` is submitted with its effects changed. */
typedef struct fault {
    const char *rule;
    uint32_t before, skipped, at;
    uint32_t count;         /* effects of the wrong submission; 0: those of the item as they are */
    qe_effect effects[4];
} fault;

static const fault faults[] = {
    {"scale.epoch", ITEM_F0, QE_NONE, ITEM_F0, 1, {SCALE_EFFECT(USE, 1)}},
    {"scale.epoch", ITEM_F0, QE_NONE, ITEM_F0, 1, {SCALE_EFFECT(RECORD, 1)}},
    {"scale.epoch", ITEM_FOLD, QE_NONE, ITEM_FOLD, 1, {SCALE_EFFECT(FOLD, 1)}},
    {"scale.busy", ITEM_F1, QE_NONE, ITEM_FOLD, 0, {{0}}},
    {"scale.twice", ITEM_DONE, QE_NONE, ITEM_FOLD, 0, {{0}}},
    {"slot.stale", ITEM_W1, QE_NONE, ITEM_W1, 1, {SLOT_EFFECT(BORROW, 1, 1, 0)}},
    {"slot.stale", ITEM_F0, QE_NONE, ITEM_F0, 1, {SLOT_EFFECT(ACQUIRE, 2, 0, 0)}},
    {"slot.live", ITEM_W0, QE_NONE, ITEM_F1, 0, {{0}}},
    {"slot.empty", ITEM_F0, QE_NONE, ITEM_W0, 0, {{0}}},
    {"slot.twice", ITEM_F1, QE_NONE, ITEM_W0, 1, {SLOT_EFFECT(RELEASE, 1, 0, 0)}},
    {"slot.owner", ITEM_W0, QE_NONE, ITEM_W0, 1, {SLOT_EFFECT(BORROW, 1, 1, 0)}},
    {"weight.version", ITEM_FILL, QE_NONE, ITEM_FILL, 1, {WEIGHT_EFFECT(READ, 1)}},
    {"weight.version", ITEM_FOLD, QE_NONE, ITEM_FILL, 1, {WEIGHT_EFFECT(READ, 0)}},
    {"weight.twice", ITEM_FOLD, QE_NONE, ITEM_COMMIT, 0, {{0}}},
    {"weight.untaken", ITEM_TAKE, QE_NONE, ITEM_COMMIT, 0, {{0}}},
    {"cache.empty", ITEM_FILL, QE_NONE, ITEM_F0, 0, {{0}}},
    {"cache.stale", ITEM_FOLD, QE_NONE, ITEM_F0, 1, {CACHE_EFFECT(USE, 1, 0, 0)}},
    {"cache.stale", ITEM_FILL, QE_NONE, ITEM_FILL, 1, {CACHE_EFFECT(FILL, 1, 1, 0)}},
    {"cache.scale", ITEM_F0, QE_NONE, ITEM_F0, 1, {CACHE_EFFECT(USE, 1, 0, 1)}},
    {"cache.recipe", ITEM_F0, QE_NONE, ITEM_F0, 1,
     {{.kind = QE_EFFECT_CACHE_USE, .object = CACHE, .layouts = 1, .recipe = 2}}},
    {"cache.layout", ITEM_F0, QE_NONE, ITEM_F0, 1, {CACHE_EFFECT(USE, 5, 0, 0)}},
    {"grad.twice", ITEM_F1, QE_NONE, ITEM_W0, 1, {DEPOSIT(0, 0)}},
    {"grad.order", ITEM_F0, QE_NONE, ITEM_W1, 1, {DEPOSIT(1, 1)}},
    {"grad.set", ITEM_W0, QE_NONE, ITEM_W0, 1, {DEPOSIT(0, 0)}},
    {"grad.set", ITEM_W1, QE_NONE, ITEM_W1, 1, {DEPOSIT(1, 1)}},
    {"grad.taken", ITEM_COMMIT, QE_NONE, ITEM_TAKE, 0, {{0}}},
    {"grad.taken", ITEM_COMMIT, QE_NONE, ITEM_W1, 1, {DEPOSIT(1, 0)}},
    {"grad.missing", ITEM_W1, QE_NONE, ITEM_TAKE, 0, {{0}}},
    {"buffer.bounds", ITEM_F0, QE_NONE, ITEM_F0, 1, {BUFFER_EFFECT(READ, HALF, BUFFER_BYTES + 1, 0)}},
    {"buffer.bounds", ITEM_F0, QE_NONE, ITEM_F0, 1, {BUFFER_EFFECT(READ, HALF, HALF - 1, 0)}},
    {"buffer.unwritten", ITEM_LOAD, QE_NONE, ITEM_F0, 1, {BUFFER_EFFECT(READ, 0, HALF, 0)}},
    {"buffer.version", ITEM_F0, QE_NONE, ITEM_F0, 1, {BUFFER_EFFECT(READ, 0, HALF, 2)}},
    {"sync.enter", ITEM_F0, ITEM_ENTER, ITEM_F0, 0, {{0}}},
    {"sync.exit", ITEM_STORE, ITEM_EXIT, ITEM_STORE, 0, {{0}}},
    {"sync.side", ITEM_SEND, ITEM_SIDE, ITEM_SEND, 0, {{0}}},
    {"sync.host", ITEM_HOST, ITEM_SYNC, ITEM_HOST, 0, {{0}}},
    {"sync.event", ITEM_LOADED, QE_NONE, ITEM_ENTER, 0, {{0}}},
};
enum { FAULTS = sizeof faults / sizeof faults[0] };

/* Faults that show when the step ends: `skipped` never came; or `at` came with other effects. */
static const fault end_faults[] = {
    {"scale.unfolded", ITEM_COUNT, ITEM_FOLD, QE_NONE, 0, {{0}}},
    {"scale.lost", ITEM_F1, QE_NONE, QE_NONE, 0, {{0}}},
    {"slot.leak", ITEM_COUNT, ITEM_W1, ITEM_W1, 1, {DEPOSIT(1, 0)}},
    {"grad.missing", ITEM_COMMIT, ITEM_TAKE, QE_NONE, 0, {{0}}},
};
enum { END_FAULTS = sizeof end_faults / sizeof end_faults[0] };

static qe_ledger *open_certified(const qe_program *program) {
    qe_ledger *ledger;
    qe_violations violations;
    qe_error error;
    assert_int_equal(qe_ledger_create(program, &ledger, &error), QE_OK);
    assert_int_equal(qe_ledger_certify(ledger, &violations, &error), QE_OK);
    assert_int_equal(violations.total, 0);
    return ledger;
}

static void issue(qe_ledger *ledger, uint32_t index) {
    qe_violations violations;
    qe_status status = qe_ledger_issue(ledger, index, &violations);
    if (status != QE_OK) print_error("item %u: %s\n", index, qe_rule_id(violations.record[0].rule));
    assert_int_equal(status, QE_OK);
}

static unsigned char *image_of(const qe_ledger *ledger, size_t *length_out) {
    *length_out = qe_ledger_image(ledger, NULL, 0);
    unsigned char *bytes = malloc(*length_out);
    assert_non_null(bytes);
    assert_int_equal(qe_ledger_image(ledger, bytes, *length_out), *length_out);
    return bytes;
}

static qe_status submit_wrong(qe_ledger *ledger, const fault *wrong, qe_violations *violations) {
    const qe_program *program = ledger->program;
    qe_item item = program->items[wrong->at];
    const qe_effect *effects = &program->effects[item.first_effect];
    if (wrong->count > 0) {
        item.effect_count = (uint8_t)wrong->count;
        effects = wrong->effects;
    }
    return qe_ledger_submit(ledger, &item, effects, wrong->at, violations);
}

static void assert_only(const qe_violations *violations, const char *rule) {
    assert_true(violations->count > 0);
    for (uint32_t i = 0; i < violations->count; i++) assert_string_equal(qe_rule_id(violations->record[i].rule), rule);
}

/* The dump of the ledger, judged on its own, gives the same first rule. */
static void assert_reproduced(const qe_ledger *ledger, const char *rule) {
    qe_program history;
    qe_violations violations;
    qe_program_init(&history);
    assert_int_equal(qe_ledger_history(ledger, &history, NULL), QE_OK);
    assert_int_equal(qe_program_judge(&history, &violations, NULL), QE_CONTRACT);
    assert_string_equal(qe_rule_id(violations.record[0].rule), rule);
    qe_program_deinit(&history);
}

static void start(qe_ledger *ledger, const fault *wrong, int steps_before) {
    qe_violations violations;
    for (int step = 0; step < steps_before; step++) {
        qe_ledger_step_begin(ledger);
        for (uint32_t i = 0; i < ITEM_COUNT; i++) issue(ledger, i);
        assert_int_equal(qe_ledger_step_end(ledger, &violations), QE_OK);
    }
    qe_ledger_step_begin(ledger);
    for (uint32_t i = 0; i < wrong->before; i++)
        if (i != wrong->skipped) issue(ledger, i);
}

static void check_fault(const qe_program *program, const fault *wrong, int steps_before) {
    qe_ledger *ledger = open_certified(program);
    qe_violations violations;
    size_t before_length, after_length;
    start(ledger, wrong, steps_before);
    unsigned char *before = image_of(ledger, &before_length);
    assert_int_equal(submit_wrong(ledger, wrong, &violations), QE_CONTRACT);
    assert_only(&violations, wrong->rule);
    unsigned char *after = image_of(ledger, &after_length);
    assert_int_equal(before_length, after_length);
    assert_memory_equal(before, after, before_length);
    assert_reproduced(ledger, wrong->rule);
    for (uint32_t i = wrong->before; i < ITEM_COUNT && wrong->skipped == QE_NONE; i++) issue(ledger, i);
    if (wrong->skipped == QE_NONE) assert_int_equal(qe_ledger_step_end(ledger, &violations), QE_OK);
    else qe_ledger_step_abort(ledger);
    free(before);
    free(after);
    qe_ledger_destroy(ledger);
}

static void every_fault_is_refused_with_its_rule_and_changes_nothing(void **state) {
    (void)state;
    qe_program program;
    make_right_program(&program);
    for (int i = 0; i < FAULTS; i++) {
        print_message("    %s\n", faults[i].rule);
        check_fault(&program, &faults[i], 0);
        /* Bytes and caches of the step before are still there, so two rules need a first step. */
        int first_only = strcmp(faults[i].rule, "buffer.unwritten") == 0;
        int stays_stale = strcmp(faults[i].rule, "cache.empty") == 0;
        if (!first_only && !stays_stale) check_fault(&program, &faults[i], 2);
    }
    qe_program_deinit(&program);
}

static void every_fault_is_refused_after_a_departure_too(void **state) {
    (void)state;
    qe_program program;
    make_right_program(&program);
    for (int i = 0; i < FAULTS; i++) {
        qe_ledger *ledger = open_certified(&program);
        qe_violations violations;
        qe_ledger_step_begin(ledger);
        qe_item nothing = {.kind = QE_ITEM_OP, .stream = COMPUTE, .microbatch = QE_NONE};
        assert_int_equal(qe_ledger_submit(ledger, &nothing, NULL, QE_NONE, &violations), QE_OK);
        for (uint32_t k = 0; k < faults[i].before; k++)
            if (k != faults[i].skipped) issue(ledger, k);
        size_t length, after_length;
        unsigned char *before = image_of(ledger, &length);
        assert_int_equal(submit_wrong(ledger, &faults[i], &violations), QE_CONTRACT);
        assert_only(&violations, faults[i].rule);
        unsigned char *after = image_of(ledger, &after_length);
        assert_int_equal(length, after_length);
        assert_memory_equal(before, after, length);
        assert_reproduced(ledger, faults[i].rule);
        free(before);
        free(after);
        qe_ledger_step_abort(ledger);
        qe_ledger_destroy(ledger);
    }
    qe_program_deinit(&program);
}

static void what_a_step_owes_is_asked_at_its_end(void **state) {
    (void)state;
    qe_program program;
    make_right_program(&program);
    for (int i = 0; i < END_FAULTS; i++) {
        const fault *wrong = &end_faults[i];
        print_message("    %s\n", wrong->rule);
        qe_ledger *ledger = open_certified(&program);
        qe_violations violations;
        qe_ledger_step_begin(ledger);
        for (uint32_t k = 0; k < wrong->before; k++) {
            if (k != wrong->skipped) issue(ledger, k);
            else if (wrong->at != QE_NONE) assert_int_equal(submit_wrong(ledger, wrong, &violations), QE_OK);
        }
        assert_int_equal(qe_ledger_step_end(ledger, &violations), QE_CONTRACT);
        assert_reproduced(ledger, qe_rule_id(violations.record[0].rule));
        /* A step that is left early owes more than one thing. */
        int found = 0;
        for (uint32_t k = 0; k < violations.count; k++)
            if (strcmp(qe_rule_id(violations.record[k].rule), wrong->rule) == 0) found++;
        assert_int_equal(found, 1);
        if (wrong->before == ITEM_COUNT) assert_only(&violations, wrong->rule);
        qe_ledger_step_abort(ledger);
        assert_int_equal(qe_ledger_counter(ledger, SCALE), 0);
        qe_ledger_destroy(ledger);
    }
    qe_program_deinit(&program);
}

static void a_program_with_a_fault_is_not_certified(void **state) {
    (void)state;
    for (int i = 0; i < FAULTS; i++) {
        qe_program right, wrong;
        make_right_program(&right);
        qe_program_init(&wrong);
        add_objects(&wrong);
        for (uint32_t k = 0; k < ITEM_COUNT; k++) {
            const qe_item *item = &right.items[k];
            const char *label = item->kind == QE_ITEM_OP ? right.labels[item->label].text : NULL;
            if (k == faults[i].before) {
                const qe_item *at = &right.items[faults[i].at];
                const qe_effect *effects = faults[i].count ? faults[i].effects : &right.effects[at->first_effect];
                const char *at_label = at->kind == QE_ITEM_OP ? right.labels[at->label].text : NULL;
                must_add(&wrong, *at, at_label, effects, faults[i].count ? faults[i].count : at->effect_count);
            }
            if (k == faults[i].skipped) continue;
            must_add(&wrong, *item, label, &right.effects[item->first_effect], item->effect_count);
        }
        qe_ledger *ledger;
        qe_violations violations;
        assert_int_equal(qe_ledger_create(&wrong, &ledger, NULL), QE_OK);
        qe_status status = qe_ledger_certify(ledger, &violations, NULL);
        /* A deposit out of order is the order of a program that makes it: its other deposit is out of place then. */
        assert_int_equal(status, QE_CONTRACT);
        if (strcmp(faults[i].rule, "grad.order") != 0)
            assert_string_equal(qe_rule_id(violations.record[0].rule), faults[i].rule);
        assert_int_equal(qe_ledger_counter(ledger, SCALE), 0);
        qe_ledger_destroy(ledger);
        qe_program_deinit(&wrong);
        qe_program_deinit(&right);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_fault_is_refused_with_its_rule_and_changes_nothing),
        cmocka_unit_test(every_fault_is_refused_after_a_departure_too),
        cmocka_unit_test(what_a_step_owes_is_asked_at_its_end),
        cmocka_unit_test(a_program_with_a_fault_is_not_certified),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
