/* The same program gives the same bits: losses of every step and the state at the end, for every schedule that keeps
 * the order of accumulation, any number of stages and ranks, caches on and off, gradients in place or copied, contracts
 * on or off. What they are held against is the baseline: one microbatch at a time on one rank, nothing reused. */
#include "step_world.h"

#include <math.h>

#include "step/team.h"

enum { STEPS = SANITIZED ? 4 : 12, MICROBATCHES = 8 };

typedef struct run {
    double loss[STEPS], norm[STEPS];
    world_hash hash;
} run;

static void train(world *w, run *out) {
    for (int step = 0; step < STEPS; step++) {
        out->loss[step] = world_step(w, 0);
        out->norm[step] = w->result.gradient_norm;
        assert_true(isfinite(out->loss[step]));
    }
    out->hash = world_state(w);
}

static run run_of(const world_options *options) {
    world w;
    run result;
    world_open(&w, options);
    train(&w, &result);
    world_close(&w);
    return result;
}

static void assert_same(const run *a, const run *b, const world_options *options) {
    for (int step = 0; step < STEPS; step++) {
        if (a->loss[step] == b->loss[step] && a->norm[step] == b->norm[step]) continue;
        print_error("%s on %u ranks, %u chunks, %s: step %d: loss %.17g against %.17g, norm %.17g against %.17g\n",
                    options->baseline ? "baseline" : options->schedule, options->ranks, options->chunks,
                    qe_recipe_name(options->recipe), step + 1, b->loss[step], a->loss[step], b->norm[step],
                    a->norm[step]);
        fail();
    }
    assert_string_equal(a->hash.text, b->hash.text);
}

typedef struct shape {
    const char *schedule;
    uint32_t ranks, chunks;
} shape;

static const shape shapes[] = {
    {"gpipe", 1, 1}, {"gpipe", 2, 1}, {"gpipe", 4, 1},       {"1f1b", 1, 1},        {"1f1b", 2, 1},
    {"1f1b", 3, 1}, /* 1, 1 and 2 layers */
    {"1f1b", 4, 1},  {"zbh1", 1, 1},  {"zbh1", 2, 1},        {"zbh1", 3, 1},        {"zbh1", 4, 1},
    {"interleaved", 2, 2}, {"interleaved", 1, 4}, {"interleaved", 1, 3},
    {"zbh2", 1, 1}, {"zbh2", 3, 1}, {"zbh2", 4, 1}, {"interleaved-zb", 2, 2}, {"interleaved-zb", 1, 3},
    {"zbv", 1, 2}, {"zbv", 2, 2}, {"1f1b-v", 1, 2}, {"1f1b-v", 2, 2},
    {"v-half", 1, 2}, {"v-half", 2, 2}, {"v-min", 1, 2}, {"v-min", 2, 2},
    {"dualpipev", 1, 2}, {"dualpipev", 2, 2},
};

static void all_shapes_agree(qe_recipe_kind recipe) {
    world_options baseline = {.recipe = recipe, .baseline = 1, .ranks = 1, .chunks = 1, .microbatches = MICROBATCHES};
    run expected = run_of(&baseline);
    if (!SANITIZED) assert_true(expected.loss[STEPS - 1] < 0.9 * expected.loss[0]); /* it learns */
    for (uint32_t stages = 2; stages <= 4; stages++) {
        baseline.chunks = stages;
        run cut = run_of(&baseline);
        assert_same(&expected, &cut, &baseline);
    }
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        world_options options = {.recipe = recipe, .schedule = shapes[i].schedule, .ranks = shapes[i].ranks,
                                 .chunks = shapes[i].chunks, .microbatches = MICROBATCHES};
        run eager = run_of(&options);
        assert_same(&expected, &eager, &options);
    }
}

static void delayed_scaling_gives_the_bits_of_the_baseline_on_every_schedule(void **state) {
    (void)state;
    all_shapes_agree(QE_RECIPE_DELAYED);
}
static void current_scaling_gives_the_bits_of_the_baseline_on_every_schedule(void **state) {
    (void)state;
    all_shapes_agree(QE_RECIPE_CURRENT);
}
static void block_scaling_gives_the_bits_of_the_baseline_on_every_schedule(void **state) {
    (void)state;
    all_shapes_agree(QE_RECIPE_BLOCK);
}
static void bf16_gives_the_bits_of_the_baseline_on_every_schedule(void **state) {
    (void)state;
    all_shapes_agree(QE_RECIPE_BF16);
}
static void fp32_gives_the_bits_of_the_baseline_on_every_schedule(void **state) {
    (void)state;
    all_shapes_agree(QE_RECIPE_FP32);
}

/* Backward from the last microbatch: sums in another order, so other bits, but one set of them for all ways to run. */
static void backward_in_reverse_gives_bits_of_its_own_for_any_ranks_and_chunks(void **state) {
    (void)state;
    static const shape looped[] = {{"looped-bfs", 2, 2}, {"looped-bfs", 1, 1}, {"looped-bfs", 1, 3},
                                   {"looped-bfs", 4, 1}, {"looped-bfs", 2, 2}};
    for (int recipe = 0; recipe <= QE_RECIPE_FP32; recipe++) {
        world_options options = {.recipe = (qe_recipe_kind)recipe, .baseline = 1, .microbatches = MICROBATCHES};
        run baseline = run_of(&options), first = {0};
        for (size_t i = 0; i < sizeof looped / sizeof looped[0]; i++) {
            options = (world_options){.recipe = (qe_recipe_kind)recipe, .schedule = looped[i].schedule,
                                      .ranks = looped[i].ranks, .chunks = looped[i].chunks,
                                      .microbatches = MICROBATCHES};
            run looped_run = run_of(&options);
            if (i == 0) first = looped_run;
            assert_same(&first, &looped_run, &options);
        }
        assert_true(first.loss[0] == baseline.loss[0]); /* nothing was summed backward yet */
        assert_string_not_equal(first.hash.text, baseline.hash.text);
    }
}

static void recipes_differ_and_all_learn(void **state) {
    (void)state;
    run runs[QE_RECIPE_FP32 + 1];
    for (int recipe = 0; recipe <= QE_RECIPE_FP32; recipe++) {
        runs[recipe] = run_of(&(world_options){.recipe = (qe_recipe_kind)recipe, .ranks = 2});
        for (int other = 0; other < recipe; other++)
            assert_string_not_equal(runs[recipe].hash.text, runs[other].hash.text);
    }
}

/* Cache, slots, placement and contracts one by one, against the run with everything on. */
static void what_only_saves_time_or_space_changes_no_bit(void **state) {
    (void)state;
    static const world_options variants[] = {
        {.no_cache = 1}, {.no_reuse = 1}, {.copy = 1}, {.contracts = QE_CONTRACTS_OFF},
        {.contracts = QE_CONTRACTS_OBSERVE}, {.no_cache = 1, .no_reuse = 1, .copy = 1, .contracts = QE_CONTRACTS_OFF},
    };
    for (int recipe = 0; recipe <= QE_RECIPE_FP32; recipe++) {
        world_options plain = {.recipe = (qe_recipe_kind)recipe, .schedule = "zbh1", .ranks = 2, .microbatches = 6};
        run expected = run_of(&plain);
        for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
            world_options options = variants[i];
            options.recipe = plain.recipe;
            options.schedule = plain.schedule;
            options.ranks = plain.ranks;
            options.microbatches = plain.microbatches;
            run varied = run_of(&options);
            assert_same(&expected, &varied, &options);
        }
    }
}

static void every_step_of_a_plan_goes_the_certified_way(void **state) {
    (void)state;
    world w;
    world_open(&w, &(world_options){.schedule = "zbh1", .ranks = 2, .evaluates = 1});
    uint64_t items = 0;
    for (uint32_t rank = 0; rank < w.plan->ranks; rank++) items += w.plan->rank[rank].program.item_count;
    for (int step = 0; step < 4; step++) {
        world_step(&w, 0);
        assert_int_equal(w.result.certified, items);
        assert_int_equal(w.result.judged, 0);
    }
    world_close(&w);
}

static void evaluate(world *w, double *losses_out) {
    world_batch(w, 1000, 0);
    qe_batch batch = {w->batch_tokens, w->batch_targets};
    must(qe_team_evaluate(w->team, &batch, losses_out, NULL, 0, 0, &w->result, &w->error), &w->error, "evaluation");
    assert_int_equal(w->result.violations.count, 0);
}

static void evaluation_between_steps_changes_nothing(void **state) {
    (void)state;
    for (int recipe = 0; recipe <= QE_RECIPE_FP32; recipe++) {
        world_options options = {.recipe = (qe_recipe_kind)recipe, .ranks = 2, .evaluates = 1};
        run expected = run_of(&options);
        world w;
        world_open(&w, &options);
        double first[WORLD_MICROBATCHES_MAX], again[WORLD_MICROBATCHES_MAX];
        evaluate(&w, first); /* also before the first step */
        for (int step = 0; step < STEPS; step++) {
            world_hash before = world_state(&w);
            evaluate(&w, first);
            evaluate(&w, again);
            assert_memory_equal(first, again, w.microbatches * sizeof *first);
            assert_string_equal(world_state(&w).text, before.text);
            assert_true(world_step(&w, 0) == expected.loss[step]);
        }
        assert_string_equal(world_state(&w).text, expected.hash.text);
        world_close(&w);
    }
}

/* The loss of a step is that of its batch before the weights move. */
static void evaluation_of_a_batch_gives_the_loss_that_the_step_will_give(void **state) {
    (void)state;
    world w;
    world_open(&w, &(world_options){.recipe = QE_RECIPE_CURRENT, .schedule = "zbh1", .ranks = 2, .evaluates = 1});
    for (int step = 0; step < 3; step++) {
        double losses[WORLD_MICROBATCHES_MAX], sum = 0;
        world_batch(&w, w.step, 0);
        qe_batch batch = {w.batch_tokens, w.batch_targets};
        must(qe_team_evaluate(w.team, &batch, losses, NULL, 0, 0, &w.result, &w.error), &w.error, "evaluation");
        for (uint32_t m = 0; m < w.microbatches; m++) sum += losses[m];
        assert_true(world_step(&w, 0) == sum / ((double)w.microbatches * w.tokens));
    }
    world_close(&w);
}

static void the_state_hash_tells_one_bit_of_one_parameter(void **state) {
    (void)state;
    world w;
    world_open(&w, &(world_options){.ranks = 2});
    world_step(&w, 0);
    world_hash before = world_state(&w);
    for (uint32_t i = 0; i < qe_model_parameter_count(w.model); i++) {
        const qe_parameter *parameter = qe_model_parameter(w.model, i);
        size_t count = (size_t)parameter->rows * parameter->columns;
        float *values = malloc(count * sizeof *values);
        assert_non_null(values);
        must(qe_team_parameter_read(w.team, i, values, &w.error), &w.error, parameter->name);
        uint32_t bits;
        memcpy(&bits, &values[count - 1], sizeof bits);
        bits ^= 1u;
        memcpy(&values[count - 1], &bits, sizeof bits);
        must(qe_team_parameter_write(w.team, i, values, &w.error), &w.error, parameter->name);
        assert_string_not_equal(world_state(&w).text, before.text);
        bits ^= 1u;
        memcpy(&values[count - 1], &bits, sizeof bits);
        must(qe_team_parameter_write(w.team, i, values, &w.error), &w.error, parameter->name);
        assert_string_equal(world_state(&w).text, before.text);
        free(values);
    }
    world_close(&w);
}

static void flip(float *value) {
    uint32_t bits;
    memcpy(&bits, value, sizeof bits);
    bits ^= 1u;
    memcpy(value, &bits, sizeof bits);
}

static void expect_hashed(world *w, float *value, int hashed) {
    world_hash before = world_state(w);
    flip(value);
    int changed = strcmp(world_state(w).text, before.text) != 0;
    flip(value);
    assert_int_equal(changed, hashed);
    assert_string_equal(world_state(w).text, before.text);
}

/* From inside: nobody outside can change one of them alone. */
static void the_state_hash_covers_moments_and_scales_and_no_amax_or_gradient(void **state) {
    (void)state;
    world w;
    world_open(&w, &(world_options){.ranks = 2});
    world_step(&w, 0);
    for (uint32_t weight = 0; weight < w.plan->weight_count; weight++) {
        const qe_weight_info *info = w.plan->model_ops->weight(w.model, weight);
        uint32_t stage = w.plan->model_ops->weight_stage(w.model, weight, w.plan->stages);
        qe_rank *rank = &w.team->ranks[w.plan->stage_rank[stage]];
        size_t last = (size_t)info->rows * info->columns - 1;
        expect_hashed(&w, &rank->places[weight].master[last], 1);
        expect_hashed(&w, &rank->moment1[weight][last], 1);
        expect_hashed(&w, &rank->moment2[weight][last], 1);
        expect_hashed(&w, &rank->places[weight].grad[last], 0);
        for (int role = 0; role < QE_SCALE_ROLES && info->scaled; role++) {
            qe_scale_state *scale = rank->places[weight].scale[role];
            expect_hashed(&w, &scale->scale, 1);
            expect_hashed(&w, &scale->history[0], 1);
            expect_hashed(&w, &scale->history[scale->history_length - 1], 1);
            expect_hashed(&w, &scale->amax, 0);
        }
    }
    world_close(&w);
}

typedef struct visit_log {
    world *w;
    uint32_t seen[QE_STATE_HISTORY + 1], misplaced;
    qe_state_kind last;
} visit_log;

static void log_visit(void *context, const qe_state_tensor *tensor) {
    visit_log *log = context;
    uint32_t index = log->seen[tensor->kind]++;
    int is_scale = tensor->kind >= QE_STATE_SCALE;
    if (!is_scale && tensor->kind < log->last) log->misplaced++;
    if (is_scale != (tensor->role >= 0) || tensor->columns == 0) log->misplaced++;
    log->last = tensor->kind;
    if (is_scale) return;
    const qe_parameter *parameter = qe_model_parameter(log->w->model, index);
    size_t length = strlen(parameter->name), count = (size_t)parameter->rows * parameter->columns;
    if (strncmp(tensor->name, parameter->name, length) != 0) log->misplaced++;
    if ((tensor->name[length] == 0) != (tensor->kind == QE_STATE_PARAMETER)) log->misplaced++;
    if (tensor->kind != QE_STATE_PARAMETER) return;
    float *values = malloc(count * sizeof *values);
    assert_non_null(values);
    must(qe_team_parameter_read(log->w->team, index, values, &log->w->error), &log->w->error, parameter->name);
    assert_memory_equal(values, tensor->values, count * sizeof *values);
    free(values);
}

static void a_visit_of_the_state_shows_every_tensor_once_with_its_name_and_values(void **state) {
    (void)state;
    world w;
    world_open(&w, &(world_options){.ranks = 2});
    world_step(&w, 0);
    visit_log log = {.w = &w};
    must(qe_team_state_visit(w.team, log_visit, &log, &w.error), &w.error, "visit");
    uint32_t linears = 4 * 4; /* of four decoders */
    for (int kind = QE_STATE_PARAMETER; kind <= QE_STATE_MOMENT2; kind++)
        assert_int_equal(log.seen[kind], qe_model_parameter_count(w.model));
    assert_int_equal(log.seen[QE_STATE_SCALE], linears * QE_SCALE_ROLES);
    assert_int_equal(log.seen[QE_STATE_HISTORY], linears * QE_SCALE_ROLES);
    assert_int_equal(log.misplaced, 0);
    world_close(&w);
}

/* The first norm of a zero row is 0 * rsqrt(epsilon) = 0, so with row 0 of the embedding zero a microbatch of word 0
 * is zero through the whole stack, and with it every amax that it records. */
static void zero_the_first_word(world *w) {
    for (uint32_t i = 0; i < qe_model_parameter_count(w->model); i++) {
        const qe_parameter *parameter = qe_model_parameter(w->model, i);
        if (strcmp(parameter->name, "model.embed_tokens.weight") != 0) continue;
        float *values = malloc((size_t)parameter->rows * parameter->columns * sizeof *values);
        assert_non_null(values);
        must(qe_team_parameter_read(w->team, i, values, &w->error), &w->error, parameter->name);
        memset(values, 0, parameter->columns * sizeof *values);
        must(qe_team_parameter_write(w->team, i, values, &w->error), &w->error, parameter->name);
        free(values);
    }
}

static run run_with_zero_microbatch(const world_options *options) {
    world w;
    run result;
    world_open(&w, options);
    for (int step = 0; step < STEPS; step++) {
        zero_the_first_word(&w); /* training moves it */
        result.loss[step] = world_step(&w, WORLD_ALL_ZERO);
        result.norm[step] = w.result.gradient_norm;
        assert_true(isfinite(result.loss[step]));
        assert_true(isfinite(result.norm[step]));
    }
    result.hash = world_state(&w);
    world_close(&w);
    return result;
}

static void a_microbatch_that_is_all_zero_keeps_the_losses_finite_and_the_bits(void **state) {
    (void)state;
    for (int recipe = 0; recipe <= QE_RECIPE_FP32; recipe++) {
        world_options baseline = {.recipe = (qe_recipe_kind)recipe, .baseline = 1, .ranks = 1};
        run expected = run_with_zero_microbatch(&baseline);
        world_options options = {.recipe = (qe_recipe_kind)recipe, .schedule = "zbh1", .ranks = 2};
        run eager = run_with_zero_microbatch(&options);
        assert_same(&expected, &eager, &options);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(delayed_scaling_gives_the_bits_of_the_baseline_on_every_schedule),
        cmocka_unit_test(current_scaling_gives_the_bits_of_the_baseline_on_every_schedule),
        cmocka_unit_test(block_scaling_gives_the_bits_of_the_baseline_on_every_schedule),
        cmocka_unit_test(bf16_gives_the_bits_of_the_baseline_on_every_schedule),
        cmocka_unit_test(fp32_gives_the_bits_of_the_baseline_on_every_schedule),
        cmocka_unit_test(backward_in_reverse_gives_bits_of_its_own_for_any_ranks_and_chunks),
        cmocka_unit_test(recipes_differ_and_all_learn),
        cmocka_unit_test(what_only_saves_time_or_space_changes_no_bit),
        cmocka_unit_test(every_step_of_a_plan_goes_the_certified_way),
        cmocka_unit_test(evaluation_between_steps_changes_nothing),
        cmocka_unit_test(evaluation_of_a_batch_gives_the_loss_that_the_step_will_give),
        cmocka_unit_test(the_state_hash_tells_one_bit_of_one_parameter),
        cmocka_unit_test(the_state_hash_covers_moments_and_scales_and_no_amax_or_gradient),
        cmocka_unit_test(a_visit_of_the_state_shows_every_tensor_once_with_its_name_and_values),
        cmocka_unit_test(a_microbatch_that_is_all_zero_keeps_the_losses_finite_and_the_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
