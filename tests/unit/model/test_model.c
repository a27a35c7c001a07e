/* The model from outside: names and shapes of the Hugging Face Llama layout, initial values, sizes that fit, learning
 * rate and AdamW constants against their formulas. */
#include "step_world.h"

#include <math.h>

static const qe_recipe plain = {.kind = QE_RECIPE_FP32};

static qe_model *make(const qe_model_config *config) {
    qe_model *model;
    qe_error error = {0};
    must(qe_model_create(config, &plain, &model, &error), &error, "model");
    return model;
}

static const qe_model_config config = {.layers = 12, .hidden = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 64,
                                       .sequence = 16, .sequences = 1, .rope_theta = 1e4f, .norm_epsilon = 1e-5f};

static const qe_parameter *named(const qe_model *model, const char *name, uint32_t *index_out) {
    for (uint32_t i = 0; i < qe_model_parameter_count(model); i++)
        if (strcmp(qe_model_parameter(model, i)->name, name) == 0) {
            if (index_out != NULL) *index_out = i;
            return qe_model_parameter(model, i);
        }
    fail_msg("no parameter %s", name);
    return NULL;
}

static uint64_t expect(const qe_model *model, const char *name, uint32_t rows, uint32_t columns) {
    const qe_parameter *parameter = named(model, name, NULL);
    assert_int_equal(parameter->vector, rows == 0);
    assert_int_equal(parameter->rows, rows == 0 ? 1 : rows);
    assert_int_equal(parameter->columns, columns);
    return (uint64_t)(rows == 0 ? 1 : rows) * columns;
}

static void parameters_have_the_names_and_shapes_of_the_hugging_face_layout(void **state) {
    (void)state;
    static const struct {
        const char *name;
        uint32_t rows, columns; /* rows 0: a vector */
    } in_layer[] = {
        {"self_attn.q_proj", 32, 32}, {"self_attn.k_proj", 16, 32}, {"self_attn.v_proj", 16, 32},
        {"self_attn.o_proj", 32, 32}, {"mlp.gate_proj", 48, 32},    {"mlp.up_proj", 48, 32},
        {"mlp.down_proj", 32, 48},    {"input_layernorm", 0, 32},   {"post_attention_layernorm", 0, 32},
    };
    qe_model *model = make(&config);
    uint64_t scalars = expect(model, "model.embed_tokens.weight", 64, 32);
    scalars += expect(model, "model.norm.weight", 0, 32);
    scalars += expect(model, "lm_head.weight", 64, 32);
    uint32_t count = 3;
    for (uint32_t layer = 0; layer < config.layers; layer++)
        for (size_t i = 0; i < sizeof in_layer / sizeof in_layer[0]; i++, count++) {
            char name[QE_NAME_BYTES];
            snprintf(name, sizeof name, "model.layers.%u.%s.weight", layer, in_layer[i].name);
            scalars += expect(model, name, in_layer[i].rows, in_layer[i].columns);
        }
    assert_int_equal(qe_model_parameter_count(model), count);
    assert_int_equal(qe_model_scalar_count(model), scalars);
    for (uint32_t i = 1; i < count; i++)
        assert_true(strcmp(qe_model_parameter(model, i - 1)->name, qe_model_parameter(model, i)->name) < 0);
    qe_model_destroy(model);
}

/* Every row of every weight belongs to one parameter. */
static void parameters_tile_the_weights(void **state) {
    (void)state;
    qe_model *model = make(&config);
    const qe_model_ops *ops = qe_model_table();
    uint8_t covered[256];
    for (uint32_t weight = 0; weight < ops->weight_count(model); weight++) {
        memset(covered, 0, sizeof covered);
        assert_true(ops->weight(model, weight)->rows <= sizeof covered);
        for (uint32_t i = 0; i < ops->parameter_count(model); i++) {
            const qe_parameter *parameter = ops->parameter(model, i);
            if (parameter->weight != weight) continue;
            assert_int_equal(parameter->columns, ops->weight(model, weight)->columns);
            for (uint32_t row = 0; row < parameter->rows; row++) covered[parameter->row_begin + row]++;
        }
        for (uint32_t row = 0; row < ops->weight(model, weight)->rows; row++) assert_int_equal(covered[row], 1);
    }
    qe_model_destroy(model);
}

static float *values_of(const qe_model *model, const char *name, uint64_t seed, size_t *count_out) {
    uint32_t index;
    const qe_parameter *parameter = named(model, name, &index);
    *count_out = (size_t)parameter->rows * parameter->columns;
    float *values = malloc(*count_out * sizeof *values);
    assert_non_null(values);
    qe_model_initialize(model, index, seed, values);
    return values;
}

static void initial_values_depend_on_the_seed_and_the_name_alone(void **state) {
    (void)state;
    static const char *const name = "model.layers.1.mlp.up_proj.weight";
    qe_model_config other_config = config;
    other_config.vocab = 99;
    other_config.layers = 3; /* other indices */
    other_config.ffn = 96;   /* more rows behind the same ones */
    qe_model *model = make(&config), *other = make(&other_config);
    size_t count, other_count;
    float *a = values_of(model, name, 1, &count), *b = values_of(other, name, 1, &other_count);
    assert_int_equal(other_count, 2 * count);
    assert_memory_equal(a, b, count * sizeof *a);
    float *seed = values_of(model, name, 2, &count);
    float *layer = values_of(model, "model.layers.2.mlp.up_proj.weight", 1, &count);
    assert_memory_not_equal(a, seed, count * sizeof *a);
    assert_memory_not_equal(a, layer, count * sizeof *a);
    free(a), free(b), free(seed), free(layer);
    qe_model_destroy(model);
    qe_model_destroy(other);
}

static void expect_spread(const qe_model *model, const char *name, double deviation) {
    size_t count;
    float *values = values_of(model, name, 5, &count);
    double sum = 0, squares = 0;
    for (size_t i = 0; i < count; i++) sum += values[i], squares += (double)values[i] * values[i];
    double n = (double)count, spread = sqrt(squares / n);
    assert_true(fabs(sum / n) < 5 * deviation / sqrt(n));
    assert_true(fabs(spread / deviation - 1) < 5 / sqrt(2 * n));
    free(values);
}

static void initial_values_spread_as_they_should(void **state) {
    (void)state;
    qe_model_config wide = config;
    wide.hidden = 128;
    wide.ffn = 256;
    qe_model *model = make(&wide);
    expect_spread(model, "model.embed_tokens.weight", 0.02);
    expect_spread(model, "lm_head.weight", 0.02);
    expect_spread(model, "model.layers.3.self_attn.k_proj.weight", 0.02);
    expect_spread(model, "model.layers.3.self_attn.o_proj.weight", 0.02 / sqrt(24));
    expect_spread(model, "model.layers.3.mlp.down_proj.weight", 0.02 / sqrt(24));
    size_t count;
    float *gain = values_of(model, "model.layers.3.input_layernorm.weight", 5, &count);
    for (size_t i = 0; i < count; i++) assert_true(gain[i] == 1.0f);
    free(gain);
    qe_model_destroy(model);
}

static void stages_are_whole_ascending_and_differ_by_a_layer_at_most(void **state) {
    (void)state;
    const qe_model_ops *ops = qe_model_table();
    qe_model *model = make(&config);
    for (uint32_t stages = 1; stages <= config.layers; stages++) {
        uint32_t layers[64] = {0}, last = 0, first_gain = 0;
        for (uint32_t weight = 0; weight < ops->weight_count(model); weight++) {
            uint32_t stage = ops->weight_stage(model, weight, stages);
            assert_true(stage < stages);
            assert_true(stage >= last);
            last = stage;
            first_gain = strstr(ops->weight(model, weight)->name, "input_layernorm") != NULL;
            layers[stage] += first_gain;
        }
        uint32_t least = UINT32_MAX, most = 0;
        for (uint32_t stage = 0; stage < stages; stage++) {
            if (layers[stage] < least) least = layers[stage];
            if (layers[stage] > most) most = layers[stage];
        }
        assert_true(least >= 1);
        assert_true(most - least <= 1);
    }
    qe_model_destroy(model);
}

static void refuses(uint32_t qe_model_config_offset, uint32_t value, const char *word) {
    qe_model_config wrong = config;
    memcpy((char *)&wrong + qe_model_config_offset, &value, sizeof value);
    qe_model *model = NULL;
    qe_error error = {0};
    assert_int_equal(qe_model_create(&wrong, &plain, &model, &error), QE_ERROR_ARGUMENT);
    assert_null(model);
    if (strstr(error.message, word) == NULL) fail_msg("'%s' does not say %s", error.message, word);
}

static void sizes_that_do_not_fit_are_refused_by_name(void **state) {
    (void)state;
    refuses(offsetof(qe_model_config, layers), 0, "layers");
    refuses(offsetof(qe_model_config, vocab), 0, "vocab");
    refuses(offsetof(qe_model_config, sequences), 0, "sequences");
    refuses(offsetof(qe_model_config, ffn), (1u << 24) + 1, "ffn");
    refuses(offsetof(qe_model_config, heads), 5, "5 heads");
    refuses(offsetof(qe_model_config, heads), 32, "32 heads"); /* a head of one */
    refuses(offsetof(qe_model_config, kv_heads), 3, "3 key-value heads");
    refuses(offsetof(qe_model_config, kv_heads), 8, "8 key-value heads");
}

static void the_learning_rate_warms_up_and_follows_a_cosine_down(void **state) {
    (void)state;
    qe_learning_rate rate = {.peak = 3e-3, .minimum = 3e-4, .warmup_steps = 50, .steps = 900};
    assert_float_equal(qe_learning_rate_at(&rate, 1), 3e-3 / 50, 1e-15);
    assert_float_equal(qe_learning_rate_at(&rate, 25), 1.5e-3, 1e-15);
    assert_float_equal(qe_learning_rate_at(&rate, 50), 3e-3, 1e-15);
    assert_float_equal(qe_learning_rate_at(&rate, 475), (3e-3 + 3e-4) / 2, 1e-15);
    assert_float_equal(qe_learning_rate_at(&rate, 900), 3e-4, 1e-15);
    assert_float_equal(qe_learning_rate_at(&rate, 5000), 3e-4, 1e-15);
    for (uint64_t step = 51; step <= 900; step++) {
        double now = qe_learning_rate_at(&rate, step);
        assert_true(now < qe_learning_rate_at(&rate, step - 1));
        double cosine = cos(3.14159265358979323846 * (double)(step - 50) / 850);
        assert_true(fabs(now - (3e-4 + 0.5 * (3e-3 - 3e-4) * (1 + cosine))) < 1e-12);
    }
}

/* No warmup, no decay, nothing at all: no division by zero. */
static void a_schedule_of_rates_may_be_empty(void **state) {
    (void)state;
    qe_learning_rate flat = {.peak = 1e-3, .minimum = 1e-4, .warmup_steps = 0, .steps = 10};
    assert_true(qe_learning_rate_at(&flat, 1) <= 1e-3 && qe_learning_rate_at(&flat, 1) > 9e-4);
    qe_learning_rate warm = {.peak = 1e-3, .minimum = 1e-4, .warmup_steps = 10, .steps = 10};
    assert_float_equal(qe_learning_rate_at(&warm, 10), 1e-3, 1e-15);
    assert_float_equal(qe_learning_rate_at(&warm, 11), 1e-4, 1e-15);
    qe_learning_rate none = {.peak = 1e-3, .minimum = 1e-4};
    assert_float_equal(qe_learning_rate_at(&none, 1), 1e-4, 1e-15);
}

static void adamw_constants_are_those_of_the_step(void **state) {
    (void)state;
    qe_optimizer optimizer = {.rate = {.peak = 1e-3, .minimum = 1e-4, .warmup_steps = 10, .steps = 100},
                              .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1, .clip_norm = 1.0};
    for (uint64_t step = 1; step <= 120; step += 7) {
        qe_adamw constants = qe_optimizer_step(&optimizer, step, 0.25);
        assert_true(constants.learning_rate == (float)qe_learning_rate_at(&optimizer.rate, step));
        assert_true(constants.bias_correction1 == (float)(1 - pow(0.9, (double)step)));
        assert_true(constants.bias_correction2 == (float)(1 - pow(0.95, (double)step)));
        assert_true(constants.beta1 == 0.9f && constants.beta2 == 0.95f);
        assert_true(constants.epsilon == 1e-8f && constants.weight_decay == 0.1f);
        assert_true(constants.gradient_scale == 1.0f); /* below the clip norm */
    }
    assert_true(qe_optimizer_step(&optimizer, 1, 4.0).gradient_scale == (float)(1.0 / (4.0 + 1e-6)));
    optimizer.clip_norm = 0;
    assert_true(qe_optimizer_step(&optimizer, 1, 4.0).gradient_scale == 1.0f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parameters_have_the_names_and_shapes_of_the_hugging_face_layout),
        cmocka_unit_test(parameters_tile_the_weights),
        cmocka_unit_test(initial_values_depend_on_the_seed_and_the_name_alone),
        cmocka_unit_test(initial_values_spread_as_they_should),
        cmocka_unit_test(stages_are_whole_ascending_and_differ_by_a_layer_at_most),
        cmocka_unit_test(sizes_that_do_not_fit_are_refused_by_name),
        cmocka_unit_test(the_learning_rate_warms_up_and_follows_a_cosine_down),
        cmocka_unit_test(a_schedule_of_rates_may_be_empty),
        cmocka_unit_test(adamw_constants_are_those_of_the_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
