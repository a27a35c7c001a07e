/* test_history.c - what a ledger saw, as a program: the world at the step's beginning, every submission once, the
 * refused one last; judged on its own it breaks the same rule at the same place and no other. */
#include "core_program.h"

#include <stdlib.h>

#include "core/ledger_state.h"

enum { BYTES = 256, VIEW_BYTES = 64, BLOCK_AT = 4096, VIEW_BEGIN = 64 };
enum { BLOCK, VIEW, WHOLE, OTHER_KIND };

#define RANGE(k, which, b, e) {.kind = QE_EFFECT_BUFFER_##k, .object = which, .begin = b, .end = e}

/* A block, a view of its second quarter, a buffer whose place is not told, and an object that is no buffer. */
static void make_world(qe_program *program) {
    qe_program_init(program);
    must_add_object(program, (qe_object){.name = "block", .kind = QE_OBJECT_BUFFER, .bytes = BYTES,
                                         .address = BLOCK_AT});
    must_add_object(program, (qe_object){.name = "view", .kind = QE_OBJECT_BUFFER, .bytes = VIEW_BYTES,
                                         .address = BLOCK_AT + VIEW_BEGIN});
    must_add_object(program, (qe_object){.name = "whole", .kind = QE_OBJECT_BUFFER, .bytes = BYTES});
    must_add_object(program, (qe_object){.name = "scale", .kind = QE_OBJECT_SCALE, .counter = 3});
    assert_int_equal(qe_program_add_stream(program, "compute", QE_STREAM_COMPUTE, NULL, NULL), QE_OK);
    assert_int_equal(qe_program_add_stream(program, "host", QE_STREAM_HOST, NULL, NULL), QE_OK);
    assert_int_equal(qe_program_add_label(program, "op", NULL, NULL), QE_OK);
}

static qe_ledger *ledger_of(const qe_program *program) {
    qe_ledger *ledger;
    assert_int_equal(qe_ledger_create(program, &ledger, NULL), QE_OK);
    return ledger;
}

static qe_status submit(qe_ledger *ledger, qe_effect effect, qe_violations *violations) {
    qe_item item = {.kind = QE_ITEM_OP, .microbatch = QE_NONE, .effect_count = 1};
    return qe_ledger_submit(ledger, &item, &effect, QE_NONE, violations);
}

static void must_submit(qe_ledger *ledger, qe_effect effect) {
    qe_violations violations;
    assert_int_equal(submit(ledger, effect, &violations), QE_OK);
}

static void end_step(qe_ledger *ledger) {
    qe_violations violations;
    assert_int_equal(qe_ledger_step_end(ledger, &violations), QE_OK);
}

static qe_program history_of(const qe_ledger *ledger) {
    qe_program history;
    qe_program_init(&history);
    assert_int_equal(qe_ledger_history(ledger, &history, NULL), QE_OK);
    return history;
}

/* A refusal, and what the history of the step says of it: that alone, at the end. */
static void assert_refused(qe_ledger *ledger, qe_effect effect, qe_rule rule, uint64_t expected) {
    qe_violations refused, told;
    assert_int_equal(submit(ledger, effect, &refused), QE_CONTRACT);
    assert_int_equal(refused.record[0].rule, rule);
    assert_int_equal(refused.record[0].expected, expected);
    qe_program history = history_of(ledger);
    assert_int_equal(qe_program_judge(&history, &told, NULL), QE_CONTRACT);
    assert_int_equal(told.total, 1);
    assert_int_equal(told.record[0].rule, rule);
    assert_int_equal(told.record[0].expected, expected);
    assert_int_equal(told.record[0].item, history.item_count - 1);
    qe_program_deinit(&history);
}

static void what_was_written_in_part_before_the_step_is_told(void **state) {
    (void)state;
    qe_program program;
    make_world(&program);
    qe_ledger *ledger = ledger_of(&program);
    qe_ledger_step_begin(ledger);
    must_submit(ledger, (qe_effect)RANGE(WRITE, WHOLE, 32, 64));
    must_submit(ledger, (qe_effect)RANGE(WRITE, WHOLE, 128, 160));
    must_submit(ledger, (qe_effect)RANGE(WRITE, BLOCK, 48, 80));
    end_step(ledger);
    qe_ledger_step_begin(ledger);
    must_submit(ledger, (qe_effect)RANGE(READ, WHOLE, 32, 64));
    must_submit(ledger, (qe_effect)RANGE(READ, WHOLE, 140, 160));
    must_submit(ledger, (qe_effect)RANGE(READ, VIEW, 0, 16));
    must_submit(ledger, (qe_effect)RANGE(READ, BLOCK, 48, 80));
    assert_refused(ledger, (qe_effect)RANGE(READ, WHOLE, 40, 70), QE_RULE_BUFFER_UNWRITTEN, 64);
    assert_refused(ledger, (qe_effect)RANGE(READ, WHOLE, 31, 33), QE_RULE_BUFFER_UNWRITTEN, 31);
    assert_refused(ledger, (qe_effect)RANGE(READ, VIEW, 15, 17), QE_RULE_BUFFER_UNWRITTEN, 16);
    assert_refused(ledger, (qe_effect)RANGE(READ, BLOCK, 47, 48), QE_RULE_BUFFER_UNWRITTEN, 47);
    assert_refused(ledger, (qe_effect)RANGE(READ, BLOCK, 79, 81), QE_RULE_BUFFER_UNWRITTEN, 80);
    /* What this step writes was not there before it, and is when the next one begins. */
    must_submit(ledger, (qe_effect)RANGE(WRITE, WHOLE, 64, 128));
    must_submit(ledger, (qe_effect)RANGE(READ, WHOLE, 32, 160));
    assert_refused(ledger, (qe_effect)RANGE(READ, WHOLE, 100, 161), QE_RULE_BUFFER_UNWRITTEN, 160);
    end_step(ledger);
    qe_ledger_step_begin(ledger);
    must_submit(ledger, (qe_effect)RANGE(READ, WHOLE, 32, 160));
    assert_refused(ledger, (qe_effect)RANGE(READ, WHOLE, 0, 160), QE_RULE_BUFFER_UNWRITTEN, 0);
    qe_ledger_step_abort(ledger);
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

static void what_was_written_whole_before_the_step_needs_no_words(void **state) {
    (void)state;
    qe_program program;
    make_world(&program);
    qe_ledger *ledger = ledger_of(&program);
    qe_ledger_step_begin(ledger);
    must_submit(ledger, (qe_effect)RANGE(WRITE, BLOCK, 0, BYTES));
    must_submit(ledger, (qe_effect)RANGE(WRITE, WHOLE, 0, BYTES / 2));
    must_submit(ledger, (qe_effect)RANGE(WRITE, WHOLE, BYTES / 2, BYTES));
    end_step(ledger);
    qe_ledger_step_begin(ledger);
    must_submit(ledger, (qe_effect)RANGE(READ, VIEW, 0, VIEW_BYTES));
    qe_program history = history_of(ledger);
    for (uint32_t i = BLOCK; i <= WHOLE; i++) assert_int_equal(history.objects[i].counter, QE_BUFFER_WRITTEN);
    assert_int_equal(history.item_count, 2); /* the step's begin, and the read */
    qe_program_deinit(&history);
    qe_ledger_step_abort(ledger);
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

static void each_submission_of_the_step_stands_once(void **state) {
    (void)state;
    qe_program program;
    qe_violations violations;
    make_world(&program);
    qe_ledger *ledger = ledger_of(&program);
    qe_item begin = {.kind = QE_ITEM_STEP_BEGIN, .microbatch = QE_NONE};
    for (int step = 0; step < 3; step++) {
        qe_ledger_step_begin(ledger);
        qe_program history = history_of(ledger);
        assert_int_equal(history.item_count, 1);
        assert_int_equal(history.objects[OTHER_KIND].counter, 3 + step);
        qe_program_deinit(&history);
        must_submit(ledger, (qe_effect){.kind = QE_EFFECT_SCALE_USE, .object = OTHER_KIND});
        assert_int_equal(qe_ledger_submit(ledger, &begin, NULL, QE_NONE, &violations), QE_OK);
        must_submit(ledger, (qe_effect){.kind = QE_EFFECT_SCALE_FOLD, .object = OTHER_KIND});
        history = history_of(ledger);
        assert_int_equal(history.item_count, 3); /* a step has one beginning: the ledger's */
        assert_int_equal(history.items[0].kind, QE_ITEM_STEP_BEGIN);
        assert_int_equal(history.items[1].kind, QE_ITEM_OP);
        assert_int_equal(history.effect_count, 2);
        assert_int_equal(history.effects[0].kind, QE_EFFECT_SCALE_USE);
        assert_int_equal(history.effects[1].kind, QE_EFFECT_SCALE_FOLD);
        assert_int_equal(history.stream_count, 2);
        assert_string_equal(history.streams[1].name, "host");
        assert_int_equal(history.streams[1].role, QE_STREAM_HOST);
        assert_string_equal(history.labels[history.items[1].label].text, "op");
        assert_int_equal(qe_program_judge(&history, &violations, NULL), QE_OK);
        qe_program_deinit(&history);
        end_step(ledger);
    }
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

static void submissions_beyond_what_is_kept_are_counted_and_said(void **state) {
    (void)state;
    qe_program program, history;
    qe_error error = {0};
    make_world(&program);
    qe_ledger *ledger = ledger_of(&program);
    qe_ledger_step_begin(ledger);
    for (uint32_t i = 0; i < ledger->log_capacity; i++)
        must_submit(ledger, (qe_effect){.kind = QE_EFFECT_SCALE_USE, .object = OTHER_KIND});
    history = history_of(ledger);
    assert_int_equal(history.item_count, 1 + ledger->log_capacity);
    qe_program_deinit(&history);
    for (int i = 0; i < 2; i++) must_submit(ledger, (qe_effect){.kind = QE_EFFECT_SCALE_USE, .object = OTHER_KIND});
    qe_program_init(&history);
    assert_int_equal(qe_ledger_history(ledger, &history, &error), QE_ERROR_LIMIT);
    assert_non_null(strstr(error.message, "2 departed submissions"));
    assert_null(history.objects);
    end_step(ledger);
    qe_ledger_step_begin(ledger); /* a new step, and room again */
    history = history_of(ledger);
    assert_int_equal(history.item_count, 1);
    qe_program_deinit(&history);
    qe_ledger_step_abort(ledger);
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_written_in_part_before_the_step_is_told),
        cmocka_unit_test(what_was_written_whole_before_the_step_needs_no_words),
        cmocka_unit_test(each_submission_of_the_step_stands_once),
        cmocka_unit_test(submissions_beyond_what_is_kept_are_counted_and_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
