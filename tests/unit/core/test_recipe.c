/* The fold of delayed scaling, case by case and against a second implementation that keeps the history in Transformer
 * Engine's own layout (row 0 recorded in place) and copies instead of moving. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/prng.h"
#include "qeffect/fp8.h"
#include "qeffect/recipe.h"

enum { LENGTH_MAX = 1024 };

static const uint32_t lengths[] = {1, 2, 3, 16, 257, 1024};
static const int32_t margins[] = {-2, 0, 2, 3};
static const float maxima[] = {448.0F, 57344.0F};

typedef struct world {
    float history[LENGTH_MAX];
    qe_scale_state scale;
    qe_recipe recipe;
} world;

static world make_world(uint32_t length, int32_t margin, qe_amax_algorithm algorithm, float format_max) {
    world w = {
        .scale = {.scale = 1.0F, .history_length = length, .format_max = format_max},
        .recipe = {.kind = QE_RECIPE_DELAYED, .history_length = length, .margin = margin, .amax_algorithm = algorithm},
    };
    return w;
}

/* What quantizing a tensor does to the state: NaN aside, the largest stays. Tests plant NaN by hand. */
static void record(world *w, float amax) {
    if (amax > w->scale.amax) w->scale.amax = amax;
}

static void fold(world *w) {
    w->scale.history = w->history; /* the world may have been copied */
    qe_scale_fold(&w->scale, &w->recipe);
}

static void fold_amax(world *w, float amax) {
    w->scale.amax = amax;
    fold(w);
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* ---- the second implementation ---- */

typedef struct reference {
    uint32_t length;
    float row[LENGTH_MAX]; /* row[0] is being recorded */
    float scale;
} reference;

static void reference_fold(reference *r, int margin, int most_recent, double format_max) {
    float before[LENGTH_MAX];
    memcpy(before, r->row, sizeof before);
    uint32_t n = r->length;
    float newest = before[0];
    float amax = 0.0F;
    if (!(newest == 0.0F)) {
        amax = newest;
        for (uint32_t i = n - 1; i >= 1; i--) amax = fmaxf(before[i], amax);
        for (uint32_t i = 1; i + 1 < n; i++) r->row[i] = before[i + 1];
        if (n >= 2) r->row[n - 1] = newest;
        r->row[0] = 0.0F;
    }
    if (most_recent) amax = newest;
    if (fpclassify(amax) == FP_NAN || fpclassify(amax) == FP_INFINITE || amax <= 0.0F) return;
    float numerator = (float)(format_max * ldexp(1.0, -margin)); /* a power of two: exact */
    /* Correctly rounded fp32 division: double has more than twice the bits. */
    float quotient = (float)((double)numerator / (double)amax);
    r->scale = isinf(quotient) ? FLT_MAX : quotient;
}

/* One amax in a mix of the kinds that matter. Those that rule a whole window (Inf, FLT_MAX) are rarer the longer the
 * window is, or the scale would never move. */
static float random_amax(const qe_prng *prng, uint64_t index, uint32_t length) {
    uint64_t bits = qe_prng_u64(prng, index);
    float spread = ldexpf(1.0F + (float)(bits % 4096U) / 4096.0F, (int)((bits >> 20) % 60U) - 30);
    int ruling = (bits >> 48) % (1U + length / 8U) == 0;
    switch ((bits >> 40) % 16U) {
    case 0:
    case 1: return 0.0F;
    case 2: return ruling ? INFINITY : spread;
    case 3: return NAN;
    case 4: return 1e-40F;
    case 5: return ruling ? FLT_MAX : spread;
    default: return spread;
    }
}

static void compare(const world *w, const reference *r) {
    assert_int_equal(bits_of(w->scale.scale), bits_of(r->scale));
    assert_true(w->scale.amax == 0.0F);
    assert_int_equal(memcmp(w->history, r->row, r->length * sizeof(float)), 0);
}

static void run_sequence(uint32_t length, int32_t margin, qe_amax_algorithm algorithm, float format_max) {
    world w = make_world(length, margin, algorithm, format_max);
    reference r = {.length = length, .scale = 1.0F};
    qe_prng prng = qe_prng_make(length * 16U + (uint32_t)(margin + 8), algorithm == QE_AMAX_MAX ? "max" : "recent");
    unsigned moves = 0;
    for (uint64_t i = 0; i < 3U * length + 8U; i++) {
        float amax = random_amax(&prng, i, length);
        float before = w.scale.scale;
        r.row[0] = amax;
        reference_fold(&r, margin, algorithm == QE_AMAX_MOST_RECENT, (double)format_max);
        fold_amax(&w, amax);
        compare(&w, &r);
        if (w.scale.scale != before) moves++;
    }
    assert_true(moves >= 3);
}

static void random_sequences_fold_as_the_second_implementation_does(void **state) {
    (void)state;
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++)
        for (size_t m = 0; m < sizeof margins / sizeof margins[0]; m++)
            for (size_t f = 0; f < 2; f++) {
                run_sequence(lengths[l], margins[m], QE_AMAX_MAX, maxima[f]);
                run_sequence(lengths[l], margins[m], QE_AMAX_MOST_RECENT, maxima[f]);
            }
}

/* ---- named cases ---- */

/* Calls check for every history length, margin, algorithm and format. */
static void for_each_world(void (*check)(world *w)) {
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++)
        for (size_t m = 0; m < sizeof margins / sizeof margins[0]; m++)
            for (size_t f = 0; f < 2; f++)
                for (int algorithm = 0; algorithm < 2; algorithm++) {
                    world w = make_world(lengths[l], margins[m], (qe_amax_algorithm)algorithm, maxima[f]);
                    check(&w);
                }
}

static float expected_scale(const world *w, float amax) {
    return ldexpf(w->scale.format_max, -w->recipe.margin) / amax;
}

static void check_normal(world *w) {
    fold_amax(w, 3.0F);
    assert_true(w->scale.scale == expected_scale(w, 3.0F));
    uint32_t last = w->scale.history_length - 1;
    assert_true(w->history[last] == (last == 0 ? 0.0F : 3.0F));
    assert_true(w->history[0] == 0.0F && w->scale.amax == 0.0F);
}

static void a_normal_amax_gives_the_format_maximum_over_it_with_the_margin(void **state) {
    (void)state;
    for_each_world(check_normal);
}

static void check_zero(world *w) {
    fold_amax(w, 5.0F);
    world before = *w;
    fold_amax(w, 0.0F);
    assert_int_equal(bits_of(w->scale.scale), bits_of(before.scale.scale));
    assert_memory_equal(w->history, before.history, sizeof before.history);
}

static void a_zero_amax_moves_neither_history_nor_scale(void **state) {
    (void)state;
    for_each_world(check_zero);
    world fresh = make_world(16, 0, QE_AMAX_MAX, 448.0F);
    fold_amax(&fresh, 0.0F);
    assert_true(fresh.scale.scale == 1.0F);
}

static void check_tiny(world *w) {
    fold_amax(w, 1e-40F);
    assert_true(w->scale.scale == FLT_MAX);
}

static void a_tiny_amax_gives_the_largest_finite_scale(void **state) {
    (void)state;
    for_each_world(check_tiny);
}

static void check_first_infinity(world *w) {
    fold_amax(w, INFINITY);
    assert_true(w->scale.scale == 1.0F);
    if (w->scale.history_length > 1) assert_true(isinf(w->history[w->scale.history_length - 1]));
}

static void an_infinite_amax_keeps_the_scale_and_enters_the_history(void **state) {
    (void)state;
    for_each_world(check_first_infinity);
}

static void check_freeze(world *w) {
    if (w->recipe.amax_algorithm != QE_AMAX_MAX) return;
    fold_amax(w, 2.0F);
    float frozen = w->scale.scale;
    fold_amax(w, INFINITY);
    for (uint32_t i = 1; i < w->scale.history_length; i++) {
        assert_true(w->scale.scale == frozen);
        fold_amax(w, 8.0F);
    }
    assert_true(w->scale.scale == frozen);
    fold_amax(w, 8.0F);
    assert_true(w->scale.scale == expected_scale(w, 8.0F));
}

static void under_max_an_infinity_freezes_the_scale_for_exactly_as_many_folds_as_the_history_is_long(void **state) {
    (void)state;
    for_each_world(check_freeze);
}

static void under_most_recent_an_infinity_freezes_the_scale_for_one_fold(void **state) {
    (void)state;
    world w = make_world(16, 0, QE_AMAX_MOST_RECENT, 448.0F);
    fold_amax(&w, 2.0F);
    fold_amax(&w, INFINITY);
    assert_true(w.scale.scale == 224.0F);
    fold_amax(&w, 8.0F);
    assert_true(w.scale.scale == 56.0F);
}

static void under_max_a_nan_counts_as_recorded_and_the_others_decide(void **state) {
    (void)state;
    world w = make_world(4, 0, QE_AMAX_MAX, 448.0F);
    fold_amax(&w, 4.0F); /* [0 0 0 4] */
    fold_amax(&w, 2.0F); /* [0 0 4 2] */
    fold_amax(&w, NAN);  /* [0 4 2 NaN] */
    assert_true(w.scale.scale == 112.0F);
    assert_true(w.history[1] == 4.0F && w.history[2] == 2.0F && isnan(w.history[3]));
    fold_amax(&w, 2.0F); /* the 4 leaves, but counts this once */
    assert_true(w.scale.scale == 112.0F);
    fold_amax(&w, 2.0F); /* window 2 NaN 2 2 */
    assert_true(w.scale.scale == 224.0F);
}

static void a_signalling_nan_in_the_history_is_dropped_like_any_other(void **state) {
    (void)state;
    world w = make_world(4, 0, QE_AMAX_MAX, 448.0F);
    uint32_t signalling = 0x7F800001U;
    memcpy(&w.history[2], &signalling, sizeof signalling);
    fold_amax(&w, 7.0F);
    assert_true(w.scale.scale == 64.0F);
}

static void check_lone_nan(world *w) {
    w->scale.scale = 3.0F;
    fold_amax(w, NAN);
    assert_true(w->scale.scale == 3.0F);
    if (w->scale.history_length > 1) assert_true(isnan(w->history[w->scale.history_length - 1]));
}

static void a_nan_alone_keeps_the_scale_under_both_algorithms(void **state) {
    (void)state;
    for_each_world(check_lone_nan);
}

static void under_most_recent_a_nan_keeps_the_scale_whatever_the_history_holds(void **state) {
    (void)state;
    world w = make_world(16, 0, QE_AMAX_MOST_RECENT, 448.0F);
    fold_amax(&w, 7.0F);
    fold_amax(&w, NAN);
    assert_true(w.scale.scale == 64.0F);
    assert_true(w.history[14] == 7.0F && isnan(w.history[15]));
}

static void the_largest_of_the_window_decides_under_max_until_it_leaves(void **state) {
    (void)state;
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
        world w = make_world(lengths[l], 0, QE_AMAX_MAX, 448.0F);
        fold_amax(&w, 14.0F);
        for (uint32_t i = 1; i < lengths[l]; i++) {
            fold_amax(&w, 7.0F);
            assert_true(w.scale.scale == 32.0F);
        }
        fold_amax(&w, 7.0F);
        assert_true(w.scale.scale == 64.0F);
    }
}

static void under_most_recent_only_the_newest_decides(void **state) {
    (void)state;
    world w = make_world(1024, 0, QE_AMAX_MOST_RECENT, 57344.0F);
    fold_amax(&w, 8.0F);
    fold_amax(&w, 2.0F);
    assert_true(w.scale.scale == 28672.0F);
    assert_true(w.history[1022] == 8.0F && w.history[1023] == 2.0F);
}

/* Lost records of gradient accumulation: the amax of all microbatches counts, not that of the last. */
static void bug_b05_three_microbatches_fold_to_their_largest_amax(void **state) {
    (void)state;
    world w = make_world(16, 0, QE_AMAX_MAX, 448.0F);
    const float amaxes[] = {4.0F, 7.0F, 2.0F};
    for (size_t i = 0; i < 3; i++) record(&w, amaxes[i]);
    fold(&w);
    assert_true(w.scale.scale == 64.0F);
    uint8_t code = qe_fp8_encode(QE_FORMAT_E4M3, 7.0F * w.scale.scale);
    assert_true(qe_fp8_decode(QE_FORMAT_E4M3, code) * qe_scale_inverse(w.scale.scale) == 7.0F);

    world last_wins = make_world(16, 0, QE_AMAX_MAX, 448.0F);
    fold_amax(&last_wins, amaxes[2]);
    assert_true(last_wins.scale.scale == 224.0F);
    code = qe_fp8_encode(QE_FORMAT_E4M3, 7.0F * last_wins.scale.scale);
    assert_true(qe_fp8_decode(QE_FORMAT_E4M3, code) * qe_scale_inverse(last_wins.scale.scale) == 2.0F);
}

/* A backward cut into nodes must not fold once per node: the window would move on and lose what it should keep. */
static void bug_b02_one_fold_per_step_keeps_the_amax_that_two_would_push_out(void **state) {
    (void)state;
    const float step_amax[] = {8.0F, 2.0F, 2.0F};
    world once = make_world(4, 0, QE_AMAX_MAX, 57344.0F);
    world per_node = once;
    for (size_t step = 0; step < 3; step++) {
        for (int node = 0; node < 2; node++) {
            record(&once, step_amax[step]);
            fold_amax(&per_node, step_amax[step]);
        }
        fold(&once);
    }
    assert_true(once.history[1] == 8.0F);
    assert_true(once.scale.scale == 7168.0F);
    fold_amax(&per_node, 2.0F);
    assert_true(per_node.scale.scale == 28672.0F);
}

static void recipes_are_found_by_the_names_they_give(void **state) {
    (void)state;
    const char *const names[] = {"delayed", "current", "block", "bf16", "fp32"};
    const qe_recipe_kind kinds[] = {QE_RECIPE_DELAYED, QE_RECIPE_CURRENT, QE_RECIPE_BLOCK, QE_RECIPE_BF16,
                                    QE_RECIPE_FP32};
    for (size_t i = 0; i < 5; i++) {
        qe_recipe_kind kind = i == 0 ? QE_RECIPE_FP32 : QE_RECIPE_DELAYED;
        assert_int_equal(qe_recipe_from_name(names[i], &kind), 0);
        assert_int_equal(kind, kinds[i]);
        assert_string_equal(qe_recipe_name(kind), names[i]);
    }
}

static void an_unknown_recipe_is_refused_and_nothing_is_written(void **state) {
    (void)state;
    const char *const names[] = {"", "Delayed", "delayed ", "fp8"};
    for (size_t i = 0; i < 4; i++) {
        qe_recipe_kind kind = QE_RECIPE_BLOCK;
        assert_int_equal(qe_recipe_from_name(names[i], &kind), -1);
        assert_int_equal(kind, QE_RECIPE_BLOCK);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_sequences_fold_as_the_second_implementation_does),
        cmocka_unit_test(a_normal_amax_gives_the_format_maximum_over_it_with_the_margin),
        cmocka_unit_test(a_zero_amax_moves_neither_history_nor_scale),
        cmocka_unit_test(a_tiny_amax_gives_the_largest_finite_scale),
        cmocka_unit_test(an_infinite_amax_keeps_the_scale_and_enters_the_history),
        cmocka_unit_test(under_max_an_infinity_freezes_the_scale_for_exactly_as_many_folds_as_the_history_is_long),
        cmocka_unit_test(under_most_recent_an_infinity_freezes_the_scale_for_one_fold),
        cmocka_unit_test(under_max_a_nan_counts_as_recorded_and_the_others_decide),
        cmocka_unit_test(a_signalling_nan_in_the_history_is_dropped_like_any_other),
        cmocka_unit_test(a_nan_alone_keeps_the_scale_under_both_algorithms),
        cmocka_unit_test(under_most_recent_a_nan_keeps_the_scale_whatever_the_history_holds),
        cmocka_unit_test(the_largest_of_the_window_decides_under_max_until_it_leaves),
        cmocka_unit_test(under_most_recent_only_the_newest_decides),
        cmocka_unit_test(bug_b05_three_microbatches_fold_to_their_largest_amax),
        cmocka_unit_test(bug_b02_one_fold_per_step_keeps_the_amax_that_two_would_push_out),
        cmocka_unit_test(recipes_are_found_by_the_names_they_give),
        cmocka_unit_test(an_unknown_recipe_is_refused_and_nothing_is_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
