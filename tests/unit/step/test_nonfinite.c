/* What is not finite: a loss that vetoes its step, amaxes that overflow, and the amax of a step that did not happen.
 * Scales are looked at from inside; nobody outside can see them. */
#include "step_world.h"

#include <float.h>
#include <math.h>

#include "step/team.h"

enum { STEPS = 12 };

static int names(const world *w, uint32_t parameter, const char *name) {
    return strcmp(qe_model_parameter(w->model, parameter)->name, name) == 0;
}

/* Sets `count` leading values of a parameter; the old ones go to kept_out (NULL: are lost). */
static void overwrite(world *w, const char *name, size_t count, float value, float *kept_out) {
    for (uint32_t i = 0; i < qe_model_parameter_count(w->model); i++) {
        const qe_parameter *parameter = qe_model_parameter(w->model, i);
        if (!names(w, i, name)) continue;
        size_t all = (size_t)parameter->rows * parameter->columns;
        float *values = malloc(all * sizeof *values);
        assert_non_null(values);
        assert_true(count <= all);
        must(qe_team_parameter_read(w->team, i, values, &w->error), &w->error, name);
        if (kept_out != NULL) memcpy(kept_out, values, count * sizeof *values);
        for (size_t k = 0; k < count; k++) values[k] = value;
        must(qe_team_parameter_write(w->team, i, values, &w->error), &w->error, name);
        free(values);
        return;
    }
    fail_msg("no parameter %s", name);
}

static void restore(world *w, const char *name, size_t count, const float *kept) {
    for (size_t i = 0; i < qe_model_parameter_count(w->model); i++) {
        const qe_parameter *parameter = qe_model_parameter(w->model, (uint32_t)i);
        if (!names(w, (uint32_t)i, name)) continue;
        float *values = malloc((size_t)parameter->rows * parameter->columns * sizeof *values);
        assert_non_null(values);
        must(qe_team_parameter_read(w->team, (uint32_t)i, values, &w->error), &w->error, name);
        memcpy(values, kept, count * sizeof *values);
        must(qe_team_parameter_write(w->team, (uint32_t)i, values, &w->error), &w->error, name);
        free(values);
    }
}

static world_hash undisturbed(const world_options *options) {
    world w;
    world_open(&w, options);
    while (w.step <= STEPS) world_step(&w, 0);
    world_hash hash = world_state(&w);
    world_close(&w);
    return hash;
}

static void expect_no_amax(const world *w) {
    const int delayed = qe_model_table()->recipe(w->model)->kind == QE_RECIPE_DELAYED; /* no other keeps scales */
    for (uint32_t rank = 0; rank < w->plan->ranks; rank++) {
        const qe_scale_state *scales = w->team->ranks[rank].scales;
        assert_int_equal(scales != NULL, delayed);
        for (uint32_t i = 0; delayed && i < w->plan->weight_count * QE_SCALE_ROLES; i++)
            assert_true(scales[i].amax == 0.0f);
    }
}

/* A step on a batch that the undisturbed run never sees. */
static void expect_veto(world *w) {
    world_hash before = world_state(w);
    uint64_t step = w->step;
    w->step = 900 + step;
    must(world_try_step(w, 0), &w->error, "vetoed step");
    assert_true(w->result.vetoed);
    assert_int_equal(w->step, 900 + step);
    w->step = step;
    assert_false(isfinite(w->result.loss) && isfinite(w->result.gradient_norm));
    assert_int_equal(w->result.violations.count, 0);
    assert_string_equal(world_state(w).text, before.text);
    expect_no_amax(w);
}

static void a_loss_that_is_not_finite_vetoes_the_step_and_leaves_no_trace(void **state) {
    (void)state;
    for (int recipe = 0; recipe <= QE_RECIPE_FP32; recipe++)
        for (uint32_t ranks = 1; ranks <= 2; ranks++) {
            world_options options = {.recipe = (qe_recipe_kind)recipe, .schedule = "zbh1", .ranks = ranks};
            world_hash expected = undisturbed(&options);
            world w;
            world_open(&w, &options);
            while (w.step <= STEPS) {
                if (w.step == 1 || w.step == 4) {
                    must(qe_team_inject(w.team, QE_RULE_STEP_NONFINITE, &w.error), &w.error, "inject");
                    expect_veto(&w);
                }
                world_step(&w, 0);
            }
            assert_string_equal(world_state(&w).text, expected.text);
            world_close(&w);
        }
}

static void a_nan_in_a_weight_vetoes_and_its_repair_goes_on_with_the_same_bits(void **state) {
    (void)state;
    static const char *const name = "model.norm.weight";
    for (uint32_t ranks = 1; ranks <= 2; ranks++) {
        world_options options = {.schedule = "1f1b", .ranks = ranks};
        world_hash expected = undisturbed(&options);
        world w;
        world_open(&w, &options);
        while (w.step < 5) world_step(&w, 0);
        float kept[4] = {0};
        overwrite(&w, name, 4, NAN, kept);
        expect_veto(&w);
        expect_veto(&w);
        restore(&w, name, 4, kept);
        while (w.step <= STEPS) world_step(&w, 0);
        assert_string_equal(world_state(&w).text, expected.text);
        world_close(&w);
    }
}

/* Products of such weights overflow to Inf, and Inf - Inf is NaN: what comes out is finite, or the step is vetoed. */
static void huge_weights_end_in_a_finite_loss_or_a_veto(void **state) {
    (void)state;
    static const char *const inside = "model.layers.1.mlp.gate_proj.weight";
    for (int recipe = 0; recipe <= QE_RECIPE_FP32; recipe++) {
        world w;
        world_open(&w, &(world_options){.recipe = (qe_recipe_kind)recipe, .ranks = 2});
        world_step(&w, 0);
        overwrite(&w, inside, 32, FLT_MAX, NULL);
        for (int step = 0; step < 4; step++) {
            world_hash before = world_state(&w);
            must(world_try_step(&w, 0), &w.error, "step");
            if (w.result.vetoed) {
                assert_string_equal(world_state(&w).text, before.text);
                expect_no_amax(&w);
            } else {
                assert_true(isfinite(w.result.loss));
                assert_true(isfinite(w.result.gradient_norm));
            }
        }
        world_close(&w);
    }
}

typedef struct scale_log {
    float last;
    int rose, fell;
} scale_log;

static qe_scale_state *scale_at(const world *w, uint32_t weight, int role) {
    const qe_model_ops *ops = w->plan->model_ops;
    uint32_t rank = w->plan->stage_rank[ops->weight_stage(w->model, weight, w->plan->stages)];
    return w->team->ranks[rank].places[weight].scale[role];
}

static void note_scales(const world *w, scale_log *log) {
    for (uint32_t weight = 0; weight < w->plan->weight_count; weight++)
        for (int role = 0; role < QE_SCALE_ROLES; role++) {
            const qe_scale_state *scale = scale_at(w, weight, role);
            scale_log *entry = &log[weight * QE_SCALE_ROLES + (uint32_t)role];
            if (scale == NULL) continue;
            assert_true(isfinite(scale->scale) && scale->scale > 0);
            if (entry->last != 0 && scale->scale > entry->last) entry->rose++;
            if (entry->last != 0 && scale->scale < entry->last) entry->fell++;
            entry->last = scale->scale;
        }
}

/* Weights swell and shrink from step to step, so that no scale of the twelve steps stands still or only falls. */
static void swell(world *w) {
    static const float factors[STEPS] = {1, 3, 1, 1, 0.2f, 1, 1, 1, 1, 3, 1, 1};
    float factor = factors[w->step - 1];
    for (uint32_t i = 0; factor != 1 && i < qe_model_parameter_count(w->model); i++) {
        const qe_parameter *parameter = qe_model_parameter(w->model, i);
        size_t count = (size_t)parameter->rows * parameter->columns;
        float *values = malloc(count * sizeof *values);
        assert_non_null(values);
        must(qe_team_parameter_read(w->team, i, values, &w->error), &w->error, parameter->name);
        for (size_t k = 0; k < count; k++) values[k] *= factor;
        must(qe_team_parameter_write(w->team, i, values, &w->error), &w->error, parameter->name);
        free(values);
    }
}

static world_hash twelve_eventful_steps(const world_options *options) {
    world w;
    world_open(&w, options);
    scale_log *log = calloc(w.plan->weight_count * QE_SCALE_ROLES, sizeof *log);
    assert_non_null(log);
    while (w.step <= STEPS) {
        swell(&w);
        if (w.step == 4) /* the hook: an amax of Inf in the middle of a history of four */
            for (int role = 0; role < QE_SCALE_ROLES; role++)
                must(qe_team_scale_amax(w.team, 4, role, INFINITY, &w.error), &w.error, "amax");
        assert_true(isfinite(world_step(&w, WORLD_ALL_ZERO)));
        expect_no_amax(&w);
        note_scales(&w, log);
    }
    for (uint32_t i = 0; i < w.plan->weight_count * QE_SCALE_ROLES; i++) {
        if (log[i].last == 0) continue;
        if (log[i].rose == 0 || log[i].fell == 0)
            print_error("scale %u of %s rose %d times and fell %d times\n", i % QE_SCALE_ROLES,
                        w.plan->model_ops->weight(w.model, i / QE_SCALE_ROLES)->name, log[i].rose, log[i].fell);
        assert_true(log[i].rose > 0);
        assert_true(log[i].fell > 0);
    }
    free(log);
    world_hash hash = world_state(&w);
    world_close(&w);
    return hash;
}

static void scales_that_rise_and_fall_around_an_infinite_amax_keep_the_bits(void **state) {
    (void)state;
    world_options baseline = {.baseline = 1, .ranks = 1};
    world_hash expected = twelve_eventful_steps(&baseline);
    static const world_options eager[] = {
        {.schedule = "gpipe", .ranks = 2}, {.schedule = "1f1b", .ranks = 3}, {.schedule = "zbh1", .ranks = 4},
        {.schedule = "interleaved", .ranks = 2, .chunks = 2},
        {.schedule = "zbh1", .ranks = 2, .no_cache = 1, .copy = 1},
    };
    for (size_t i = 0; i < sizeof eager / sizeof eager[0]; i++)
        assert_string_equal(twelve_eventful_steps(&eager[i]).text, expected.text);
}

static void an_amax_is_raised_only_where_a_scale_is_kept_and_never_lowered(void **state) {
    (void)state;
    world w;
    world_open(&w, &(world_options){.ranks = 2});
    must(qe_team_scale_amax(w.team, 3, QE_SCALE_DY, 5.0f, &w.error), &w.error, "amax");
    must(qe_team_scale_amax(w.team, 3, QE_SCALE_DY, 2.0f, &w.error), &w.error, "amax");
    assert_true(scale_at(&w, 3, QE_SCALE_DY)->amax == 5.0f);
    assert_int_equal(qe_team_scale_amax(w.team, 0, QE_SCALE_X, 1.0f, &w.error), QE_ERROR_ARGUMENT); /* embedding */
    assert_int_equal(qe_team_scale_amax(w.team, 3, QE_SCALE_ROLES, 1.0f, &w.error), QE_ERROR_ARGUMENT);
    assert_int_equal(qe_team_scale_amax(w.team, 3, -1, 1.0f, &w.error), QE_ERROR_ARGUMENT);
    assert_int_equal(qe_team_scale_amax(w.team, w.plan->weight_count, 0, 1.0f, &w.error), QE_ERROR_ARGUMENT);
    world_close(&w);
    world_open(&w, &(world_options){.recipe = QE_RECIPE_CURRENT});
    assert_int_equal(qe_team_scale_amax(w.team, 3, QE_SCALE_DY, 1.0f, &w.error), QE_ERROR_ARGUMENT);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_loss_that_is_not_finite_vetoes_the_step_and_leaves_no_trace),
        cmocka_unit_test(a_nan_in_a_weight_vetoes_and_its_repair_goes_on_with_the_same_bits),
        cmocka_unit_test(huge_weights_end_in_a_finite_loss_or_a_veto),
        cmocka_unit_test(scales_that_rise_and_fall_around_an_infinite_amax_keep_the_bits),
        cmocka_unit_test(an_amax_is_raised_only_where_a_scale_is_kept_and_never_lowered),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
