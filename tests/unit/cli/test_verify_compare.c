/* The judge of `qeffect verify`, alone: where two rows part, and when twelve steps were no test. The commands are a
 * program and no library, so this test compiles the one file it is about. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/verify_compare.c"

enum { TENSORS = 4 };

typedef struct rows {
    qe_verify_outcome baseline, row;
    qe_verify_tensor of_baseline[TENSORS], of_row[TENSORS];
} rows;

static void fill(qe_verify_outcome *outcome, qe_verify_tensor *tensors) {
    static const char *const names[TENSORS] = {"a.weight", "b.weight", "b.x.scale", "b.x.history"};
    memset(outcome, 0, sizeof *outcome);
    memset(tensors, 0, TENSORS * sizeof *tensors);
    outcome->tensors = tensors;
    outcome->tensor_count = TENSORS;
    outcome->exercise.zero_microbatch = 1;
    snprintf(outcome->hash, sizeof outcome->hash, "%032d", 7);
    for (uint64_t i = 0; i < TENSORS; i++) {
        snprintf(tensors[i].name, sizeof tensors[i].name, "%s", names[i]);
        for (uint64_t step = 0; step < QE_VERIFY_STEPS; step++) tensors[i].digest[step] = (qe_hash128){i, step};
    }
    tensors[2].kind = QE_STATE_SCALE;
    tensors[3].kind = QE_STATE_HISTORY;
    tensors[2].hooked = tensors[3].hooked = 1;
    for (int step = 0; step < QE_VERIFY_STEPS; step++) {
        static const float scales[QE_VERIFY_STEPS] = {4, 2, 2, 2, 2, 2, 2, 2, 2, 8, 8, 4};
        outcome->loss[step] = 5.0 - step;
        outcome->norm[step] = 1.0;
        tensors[2].largest[step] = scales[step];
        tensors[3].largest[step] = step >= 3 && step < 7 ? INFINITY : 1.0f;
    }
}

static rows *equal_rows(void) {
    static rows r;
    fill(&r.baseline, r.of_baseline);
    fill(&r.row, r.of_row);
    return &r;
}

static void equal_rows_have_no_difference(void **state) {
    (void)state;
    rows *r = equal_rows();
    assert_int_equal(qe_verify_compare(&r->baseline, &r->row).step, 0);
}

static void the_first_step_and_the_first_tensor_are_named_and_the_others_counted(void **state) {
    (void)state;
    rows *r = equal_rows();
    r->of_row[3].digest[5].low ^= 1;
    r->of_row[1].digest[5].high ^= 1;
    r->of_row[0].digest[6].low ^= 1; /* later */
    qe_verify_difference found = qe_verify_compare(&r->baseline, &r->row);
    assert_int_equal(found.step, 6);
    assert_string_equal(found.what, "b.weight");
    assert_string_equal(found.tensor, "b.weight");
    assert_int_equal(found.tensors, 2);
}

static void a_loss_comes_before_the_tensors_of_its_step_and_both_are_named(void **state) {
    (void)state;
    rows *r = equal_rows();
    r->row.loss[3] = 9;
    r->of_row[2].digest[3].low ^= 1;
    qe_verify_difference found = qe_verify_compare(&r->baseline, &r->row);
    assert_int_equal(found.step, 4);
    assert_string_equal(found.what, "loss");
    assert_string_equal(found.tensor, "b.x.scale");
    assert_true(found.expected == r->baseline.loss[3] && found.found == 9);
}

static void zero_and_minus_zero_are_different_bits(void **state) {
    (void)state;
    rows *r = equal_rows();
    r->baseline.norm[0] = 0.0;
    r->row.norm[0] = -0.0;
    qe_verify_difference found = qe_verify_compare(&r->baseline, &r->row);
    assert_int_equal(found.step, 1);
    assert_string_equal(found.what, "gradient norm");
}

static void another_list_of_tensors_or_another_hash_is_a_difference(void **state) {
    (void)state;
    rows *r = equal_rows();
    r->row.tensor_count--;
    assert_int_equal(qe_verify_compare(&r->baseline, &r->row).step, 1);
    r = equal_rows();
    snprintf(r->of_row[1].name, sizeof r->of_row[1].name, "c.weight");
    assert_string_equal(qe_verify_compare(&r->baseline, &r->row).what, "b.weight");
    r = equal_rows();
    r->row.hash[0] = 'f';
    assert_string_equal(qe_verify_compare(&r->baseline, &r->row).what, "state_hash");
}

static int exercised(rows *r) {
    qe_verify_exercise_judge(&r->baseline);
    return qe_verify_exercised(&r->baseline.exercise);
}

static void a_scale_that_rises_and_falls_around_an_inf_is_a_test(void **state) {
    (void)state;
    rows *r = equal_rows();
    assert_true(exercised(r));
    assert_int_equal(r->baseline.exercise.scales, 1);
    r = equal_rows();
    r->baseline.tensor_count = 2; /* nothing is delayed */
    assert_true(exercised(r));
}

static void a_scale_that_never_rose_or_never_fell_is_named(void **state) {
    (void)state;
    for (int sign = -1; sign <= 1; sign++) {
        rows *r = equal_rows();
        for (int step = 0; step < QE_VERIFY_STEPS; step++)
            r->of_baseline[2].largest[step] = 100.0f + (float)(sign * (step > 5));
        assert_false(exercised(r));
        assert_string_equal(r->baseline.exercise.still, "b.x.scale");
        assert_int_equal(r->baseline.exercise.rose, sign > 0);
        assert_int_equal(r->baseline.exercise.fell, sign < 0);
    }
}

static void an_inf_that_did_not_come_did_not_go_or_came_elsewhere_is_no_test(void **state) {
    (void)state;
    rows *r = equal_rows();
    r->of_baseline[3].largest[3] = 1;
    assert_false(exercised(r));
    r = equal_rows();
    r->of_baseline[3].largest[QE_VERIFY_STEPS - 1] = INFINITY;
    assert_false(exercised(r));
    r = equal_rows();
    r->of_baseline[2].largest[3] = 1; /* the scale followed it */
    assert_false(exercised(r));
    r = equal_rows();
    r->of_baseline[3].hooked = 0;
    assert_false(exercised(r));
    r = equal_rows();
    r->of_baseline[3].single = 1; /* a history of one never holds what was folded */
    for (int step = 0; step < QE_VERIFY_STEPS; step++) r->of_baseline[3].largest[step] = 0;
    assert_true(exercised(r));
    r = equal_rows();
    r->baseline.exercise.zero_microbatch = 0;
    assert_false(exercised(r));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_rows_have_no_difference),
        cmocka_unit_test(the_first_step_and_the_first_tensor_are_named_and_the_others_counted),
        cmocka_unit_test(a_loss_comes_before_the_tensors_of_its_step_and_both_are_named),
        cmocka_unit_test(zero_and_minus_zero_are_different_bits),
        cmocka_unit_test(another_list_of_tensors_or_another_hash_is_a_difference),
        cmocka_unit_test(a_scale_that_rises_and_falls_around_an_inf_is_a_test),
        cmocka_unit_test(a_scale_that_never_rose_or_never_fell_is_named),
        cmocka_unit_test(an_inf_that_did_not_come_did_not_go_or_came_elsewhere_is_no_test),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
