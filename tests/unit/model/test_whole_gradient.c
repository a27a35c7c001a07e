/* The gradient of the whole model against central differences of a forward pass of our own, in double, written from the
 * formulas of the Llama layout and from nothing of src/. The model's gradient is read off an optimizer step whose
 * constants make it: with beta 0 and a huge epsilon, AdamW moves a weight by a multiple of its gradient. */
#include "step_world.h"

#include <math.h>

enum { SAMPLES = 24, TENSORS_MAX = 64, TOKENS = 24 };

static const qe_model_config config = {.layers = 3, .hidden = 24, .heads = 6, .kv_heads = 2, .ffn = 40, .vocab = 29,
                                       .sequence = 12, .sequences = 2, .rope_theta = 500.0f, .norm_epsilon = 1e-5f};
enum { HIDDEN = 24, HEADS = 6, KV = 2, HEAD = 4, FFN = 40, VOCAB = 29, SEQUENCE = 12, LAYERS = 3 };

typedef struct values {
    double *of[TENSORS_MAX];
    const qe_model *model;
} values;

static const double *find(const values *v, const char *format, int layer) {
    char name[QE_NAME_BYTES];
    snprintf(name, sizeof name, format, layer);
    for (uint32_t i = 0; i < qe_model_parameter_count(v->model); i++)
        if (strcmp(qe_model_parameter(v->model, i)->name, name) == 0) return v->of[i];
    fail_msg("no parameter %s", name);
    return NULL;
}

static const double *in_layer(const values *v, const char *what, int layer) {
    char format[QE_NAME_BYTES];
    snprintf(format, sizeof format, "model.layers.%%d.%s.weight", what);
    return find(v, format, layer);
}

static void rms_norm(const double *x, const double *gain, double *y) {
    double squares = 0;
    for (int i = 0; i < HIDDEN; i++) squares += x[i] * x[i];
    double scale = 1 / sqrt(squares / HIDDEN + (double)config.norm_epsilon);
    for (int i = 0; i < HIDDEN; i++) y[i] = x[i] * scale * gain[i];
}

static void product(const double *x, const double *w, int in, int out, double *y) {
    for (int o = 0; o < out; o++) {
        y[o] = 0;
        for (int i = 0; i < in; i++) y[o] += w[o * in + i] * x[i];
    }
}

/* Half-split: dimension i turns with dimension i + HEAD / 2. */
static void rotate(double *head, int at) {
    for (int i = 0; i < HEAD / 2; i++) {
        double angle = at * pow((double)config.rope_theta, -2.0 * i / HEAD), a = head[i], b = head[i + HEAD / 2];
        head[i] = a * cos(angle) - b * sin(angle);
        head[i + HEAD / 2] = b * cos(angle) + a * sin(angle);
    }
}

static void attend(const double (*q)[HEADS * HEAD], const double (*k)[KV * HEAD], const double (*v)[KV * HEAD], int at,
                   int head, double *out) {
    double weights[SEQUENCE], sum = 0;
    int shared = head / (HEADS / KV);
    for (int t = 0; t <= at; t++) {
        double dot = 0;
        for (int i = 0; i < HEAD; i++) dot += q[at][head * HEAD + i] * k[t][shared * HEAD + i];
        weights[t] = exp(dot / sqrt(HEAD));
        sum += weights[t];
    }
    for (int i = 0; i < HEAD; i++) {
        out[i] = 0;
        for (int t = 0; t <= at; t++) out[i] += weights[t] / sum * v[t][shared * HEAD + i];
    }
}

static void attention_block(const values *v, int layer, double (*x)[HIDDEN]) {
    static double q[SEQUENCE][HEADS * HEAD], k[SEQUENCE][KV * HEAD], value[SEQUENCE][KV * HEAD];
    double normed[HIDDEN], mixed[HEADS * HEAD], out[HIDDEN];
    for (int t = 0; t < SEQUENCE; t++) {
        rms_norm(x[t], in_layer(v, "input_layernorm", layer), normed);
        product(normed, in_layer(v, "self_attn.q_proj", layer), HIDDEN, HEADS * HEAD, q[t]);
        product(normed, in_layer(v, "self_attn.k_proj", layer), HIDDEN, KV * HEAD, k[t]);
        product(normed, in_layer(v, "self_attn.v_proj", layer), HIDDEN, KV * HEAD, value[t]);
        for (int h = 0; h < HEADS; h++) rotate(&q[t][h * HEAD], t);
        for (int h = 0; h < KV; h++) rotate(&k[t][h * HEAD], t);
    }
    for (int t = 0; t < SEQUENCE; t++) {
        for (int h = 0; h < HEADS; h++) attend(q, k, value, t, h, &mixed[h * HEAD]);
        product(mixed, in_layer(v, "self_attn.o_proj", layer), HEADS * HEAD, HIDDEN, out);
        for (int i = 0; i < HIDDEN; i++) x[t][i] += out[i];
    }
}

static void feed_forward_block(const values *v, int layer, double *x) {
    double normed[HIDDEN], gate[FFN], up[FFN], out[HIDDEN];
    rms_norm(x, in_layer(v, "post_attention_layernorm", layer), normed);
    product(normed, in_layer(v, "mlp.gate_proj", layer), HIDDEN, FFN, gate);
    product(normed, in_layer(v, "mlp.up_proj", layer), HIDDEN, FFN, up);
    for (int i = 0; i < FFN; i++) gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
    product(gate, in_layer(v, "mlp.down_proj", layer), FFN, HIDDEN, out);
    for (int i = 0; i < HIDDEN; i++) x[i] += out[i];
}

static double sequence_loss(const values *v, const int32_t *tokens, const int32_t *targets) {
    double x[SEQUENCE][HIDDEN], normed[HIDDEN], logits[VOCAB], loss = 0;
    const double *table = find(v, "model.embed_tokens.weight", 0);
    for (int t = 0; t < SEQUENCE; t++) memcpy(x[t], &table[tokens[t] * HIDDEN], sizeof x[t]);
    for (int layer = 0; layer < LAYERS; layer++) {
        attention_block(v, layer, x);
        for (int t = 0; t < SEQUENCE; t++) feed_forward_block(v, layer, x[t]);
    }
    for (int t = 0; t < SEQUENCE; t++) {
        double sum = 0;
        rms_norm(x[t], find(v, "model.norm.weight", 0), normed);
        product(normed, find(v, "lm_head.weight", 0), HIDDEN, VOCAB, logits);
        for (int i = 0; i < VOCAB; i++) sum += exp(logits[i]);
        loss += log(sum) - logits[targets[t]];
    }
    return loss;
}

static double mean_loss(const values *v, const world *w) {
    double loss = 0;
    uint32_t all = w->microbatches * w->tokens;
    for (uint32_t at = 0; at < all; at += SEQUENCE)
        loss += sequence_loss(v, w->batch_tokens + at, w->batch_targets + at);
    return loss / all;
}

/* Weights large enough that every part of the model bends, gains that are not 1. */
static void start_bent(world *w, values *v) {
    v->model = w->model;
    assert_true(qe_model_parameter_count(w->model) <= TENSORS_MAX);
    for (uint32_t i = 0; i < qe_model_parameter_count(w->model); i++) {
        const qe_parameter *parameter = qe_model_parameter(w->model, i);
        size_t count = (size_t)parameter->rows * parameter->columns;
        float *start = malloc(count * sizeof *start);
        v->of[i] = malloc(count * sizeof *v->of[i]);
        assert_non_null(start);
        assert_non_null(v->of[i]);
        qe_model_initialize(w->model, i, 3, start);
        for (size_t k = 0; k < count; k++) {
            start[k] *= parameter->vector ? 1.0f + 0.2f * sinf((float)(k + i)) : 12.0f;
            v->of[i][k] = start[k];
        }
        must(qe_team_parameter_write(w->team, i, start, &w->error), &w->error, parameter->name);
        free(start);
    }
}

static const float epsilon = 1e6f, magnification = 1e3f;

static qe_adamw plain_descent(const void *context, double norm) {
    (void)context;
    (void)norm;
    return (qe_adamw){.learning_rate = epsilon * magnification, .epsilon = epsilon, .bias_correction1 = 1,
                      .bias_correction2 = 1, .gradient_scale = 1};
}

/* The gradient of one tensor, from where the step took it. */
static void gradient_of(world *w, const values *v, uint32_t index, double *gradient_out) {
    const qe_parameter *parameter = qe_model_parameter(w->model, index);
    size_t count = (size_t)parameter->rows * parameter->columns;
    float *moved = malloc(count * sizeof *moved);
    assert_non_null(moved);
    must(qe_team_parameter_read(w->team, index, moved, &w->error), &w->error, parameter->name);
    for (size_t k = 0; k < count; k++) gradient_out[k] = (v->of[index][k] - (double)moved[k]) / (double)magnification;
    free(moved);
}

static double difference(const values *v, const world *w, uint32_t index, size_t at) {
    const double step = 1e-4;
    double kept = v->of[index][at];
    v->of[index][at] = kept + step;
    double above = mean_loss(v, w);
    v->of[index][at] = kept - step;
    double below = mean_loss(v, w);
    v->of[index][at] = kept;
    return (above - below) / (2 * step);
}

static void compare(world *w, const values *v, uint32_t index, double *worst_out) {
    const qe_parameter *parameter = qe_model_parameter(w->model, index);
    size_t count = (size_t)parameter->rows * parameter->columns;
    double *gradient = malloc(count * sizeof *gradient), largest = 0;
    assert_non_null(gradient);
    gradient_of(w, v, index, gradient);
    for (size_t k = 0; k < count; k++) largest = fmax(largest, fabs(gradient[k]));
    assert_true(largest > 1e-6);
    uint32_t state = index + 1;
    int samples = SANITIZED ? SAMPLES / 4 : SAMPLES;
    for (int sample = 0; sample < samples; sample++) {
        state = state * 1664525u + 1013904223u;
        size_t at = (state >> 8) % count;
        double expected = difference(v, w, index, at), error = fabs(gradient[at] - expected) / largest;
        if (error > *worst_out) *worst_out = error;
        if (error > 2e-5)
            print_error("%s[%zu]: %.9g, expected %.9g\n", parameter->name, at, gradient[at], expected);
        assert_true(error <= 2e-5);
    }
    free(gradient);
}

static void the_gradient_of_the_whole_model_is_that_of_its_formulas(void **state) {
    (void)state;
    world w;
    values v;
    world_open(&w, &(world_options){.config = &config, .recipe = QE_RECIPE_FP32, .schedule = "zbh1", .ranks = 2,
                                    .microbatches = 2});
    assert_int_equal(w.tokens, TOKENS);
    start_bent(&w, &v);
    world_batch(&w, 1, 0);
    qe_batch batch = {w.batch_tokens, w.batch_targets};
    qe_step_optimizer optimizer = {plain_descent, NULL};
    must(qe_team_step(w.team, &batch, &optimizer, &w.result, &w.error), &w.error, "step");
    double expected = mean_loss(&v, &w), worst = 0;
    assert_true(fabs(w.result.loss - expected) < 2e-6 * expected);
    for (uint32_t i = 0; i < qe_model_parameter_count(w.model); i++) compare(&w, &v, i, &worst);
    print_message("loss %.9f, ours %.9f; largest error %.1e of a tensor's largest gradient\n", w.result.loss, expected,
                  worst);
    for (uint32_t i = 0; i < qe_model_parameter_count(w.model); i++) free(v.of[i]);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_gradient_of_the_whole_model_is_that_of_its_formulas),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
