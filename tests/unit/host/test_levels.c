/* Every kernel gives the same bits at every level. Products are BLAS's, whose core is one for the process, so attention
 * is compared too. Shapes are odd, so that tails of every width are met. */
#include "devices.h"

enum { OUTPUTS_MAX = 6 };

/* What an op wrote at one level. */
typedef struct outputs {
    void *at[OUTPUTS_MAX];
    size_t bytes[OUTPUTS_MAX];
    int count;
} outputs;

/* Runs `op` at each level with its outputs reset to `before`, and compares what is written with the first level's. */
static void check_levels(const qe_op *op, const outputs *out) {
    void *before[OUTPUTS_MAX], *first[OUTPUTS_MAX];
    for (int i = 0; i < out->count; ++i) {
        before[i] = malloc(out->bytes[i]);
        first[i] = malloc(out->bytes[i]);
        memcpy(before[i], out->at[i], out->bytes[i]);
    }
    for (int level = 0; level < LEVELS; ++level) {
        for (int i = 0; i < out->count; ++i) memcpy(out->at[i], before[i], out->bytes[i]);
        op_run(level, op);
        for (int i = 0; i < out->count && level > 0; ++i) assert_same_bits(out->at[i], first[i], out->bytes[i]);
        for (int i = 0; i < out->count && level == 0; ++i) memcpy(first[i], out->at[i], out->bytes[i]);
    }
    for (int i = 0; i < out->count; ++i) {
        assert_true(op->kind == QE_OP_COPY || memcmp(first[i], before[i], out->bytes[i]) != 0); /* it did write */
        free(before[i]);
        free(first[i]);
    }
}

static void outputs_add(outputs *out, void *at, size_t bytes) {
    assert_true(out->count < OUTPUTS_MAX);
    out->at[out->count] = at;
    out->bytes[out->count++] = bytes;
}

static void outputs_add_quantized(outputs *out, const quantized *q, size_t count) {
    const uint8_t format = q->target.retained.format;
    outputs_add(out, decoded_of(q), count * sizeof(float));
    outputs_add(out, q->target.retained.codes, count * qe_format_bytes((qe_format)format));
    if (q->target.retained.scale_inv) outputs_add(out, q->target.retained.scale_inv, count * sizeof(float));
}

/* Calls `check` for every recipe and format. */
static void for_each_recipe(void (*check)(uint8_t recipe, uint8_t format)) {
    check(QE_RECIPE_DELAYED, QE_FORMAT_E4M3);
    check(QE_RECIPE_DELAYED, QE_FORMAT_E5M2);
    check(QE_RECIPE_CURRENT, QE_FORMAT_E4M3);
    check(QE_RECIPE_BLOCK, QE_FORMAT_E4M3);
    check(QE_RECIPE_BF16, QE_FORMAT_BF16);
    check(QE_RECIPE_FP32, QE_FORMAT_FP32);
}

static void check_norm(uint8_t recipe, uint8_t format) {
    enum { ROWS = 133, HIDDEN = 139 };
    float *x = random_floats(ROWS * HIDDEN, 2.0f, 1), *gain = random_floats(HIDDEN, 2.0f, 2), *rstd = floats_of(ROWS);
    quantized q;
    quantized_init(&q, recipe, format, ROWS, HIDDEN, 0);
    outputs out = {.count = 0};
    outputs_add(&out, rstd, ROWS * sizeof(float));
    outputs_add_quantized(&out, &q, ROWS * HIDDEN);
    const qe_op op = {.kind = QE_OP_NORM_QUANTIZE, .args.norm = {x, gain, rstd, NULL, q.target, 1e-5f, ROWS, HIDDEN}};
    check_levels(&op, &out);
    quantized_deinit(&q);
    free(x), free(gain), free(rstd);
}

static void norm_quantize_is_the_same_at_every_level(void **state) {
    (void)state;
    for_each_recipe(check_norm);
}

static void norm_backward_is_the_same_at_every_level(void **state) {
    (void)state;
    enum { ROWS = 33, HIDDEN = 139 };
    float *x = random_floats(ROWS * HIDDEN, 2.0f, 1), *gain = random_floats(HIDDEN, 2.0f, 2);
    float *dx = floats_of(ROWS * HIDDEN);
    float *dy = random_floats(ROWS * HIDDEN, 1.0f, 3), *rstd = random_floats(ROWS, 1.0f, 4);
    float *grad = random_floats(HIDDEN, 1, 5);
    outputs out = {.count = 0};
    outputs_add(&out, dx, ROWS * HIDDEN * sizeof(float));
    outputs_add(&out, grad, HIDDEN * sizeof(float));
    for (uint8_t set = 0; set < 2; ++set) {
        const qe_op op = {.kind = QE_OP_NORM_BACKWARD,
                          .args.norm_backward = {.dy = dy, .x = x, .rstd = rstd, .gain = gain,
                                                 .residual = set ? dy : NULL, .dx = dx, .gain_grad = grad,
                                                 .rows = ROWS, .hidden = HIDDEN, .set = set}};
        memset(dx, 0, ROWS * HIDDEN * sizeof(float));
        check_levels(&op, &out);
    }
    free(x), free(gain), free(dx), free(dy), free(rstd), free(grad);
}

static void check_rope(uint8_t recipe, uint8_t format) {
    enum { ROWS = 50, SEQUENCE = 25, HEADS = 3, KV = 1, DIM = 26, COLUMNS = (HEADS + 2 * KV) * DIM };
    float *qkv = random_floats(ROWS * COLUMNS, 1.0f, 1), *cosine = random_floats(SEQUENCE * DIM / 2, 1.0f, 2);
    float *sine = random_floats(SEQUENCE * DIM / 2, 1.0f, 3);
    quantized q;
    quantized_init(&q, recipe, format, ROWS, COLUMNS, 0);
    qe_op op = {.kind = QE_OP_ROPE,
                .args.rope = {qkv, cosine, sine, ROWS, SEQUENCE, HEADS, KV, DIM, .target = q.target}};
    outputs out = {.count = 0};
    outputs_add(&out, qkv, ROWS * COLUMNS * sizeof(float));
    check_levels(&op, &out);
    op.kind = QE_OP_ROPE_BACKWARD_QUANTIZE;
    outputs_add_quantized(&out, &q, ROWS * COLUMNS);
    check_levels(&op, &out);
    quantized_deinit(&q);
    free(qkv), free(cosine), free(sine);
}

static void rope_is_the_same_at_every_level(void **state) {
    (void)state;
    for_each_recipe(check_rope);
}

static void check_swiglu(uint8_t recipe, uint8_t format) {
    enum { ROWS = 131, FFN = 77 };
    float *gate_up = random_floats(ROWS * 2 * FFN, 9.0f, 1), *dy = random_floats(ROWS * FFN, 1.0f, 2);
    float *dgate_up = floats_of(ROWS * 2 * FFN);
    quantized y, back;
    quantized_init(&y, recipe, format, ROWS, FFN, 0);
    quantized_init(&back, recipe, format, ROWS, 2 * FFN, 0);
    const qe_op forward = {.kind = QE_OP_SWIGLU_QUANTIZE, .args.swiglu = {gate_up, ROWS, FFN, NULL, y.target}};
    const qe_op backward = {.kind = QE_OP_SWIGLU_BACKWARD_QUANTIZE,
                            .args.swiglu_backward = {gate_up, dy, dgate_up, ROWS, FFN, back.target}};
    outputs out = {.count = 0}, out_back = {.count = 0};
    outputs_add_quantized(&out, &y, ROWS * FFN);
    check_levels(&forward, &out);
    outputs_add(&out_back, dgate_up, ROWS * 2 * FFN * sizeof(float));
    outputs_add_quantized(&out_back, &back, ROWS * 2 * FFN);
    check_levels(&backward, &out_back);
    quantized_deinit(&y);
    quantized_deinit(&back);
    free(gate_up), free(dy), free(dgate_up);
}

static void swiglu_is_the_same_at_every_level(void **state) {
    (void)state;
    for_each_recipe(check_swiglu);
}

static void attention_is_the_same_at_every_level(void **state) {
    (void)state;
    enum { S = 77, HEADS = 4, KV = 2, DIM = 12, COLUMNS = (HEADS + 2 * KV) * DIM, ROWS = 2 * S };
    float *qkv = random_floats(ROWS * COLUMNS, 2.0f, 1), *dout = random_floats(ROWS * HEADS * DIM, 1.0f, 2);
    float *y = floats_of(ROWS * HEADS * DIM), *lse = floats_of(ROWS * HEADS), *dqkv = floats_of(ROWS * COLUMNS);
    float *scratch = floats_of(qe_attention_scratch_floats(S, DIM));
    const qe_op forward = {.kind = QE_OP_ATTENTION, .args.attention = {qkv, y, lse, scratch, 2, S, HEADS, KV, DIM}};
    const qe_op backward = {.kind = QE_OP_ATTENTION_BACKWARD,
                            .args.attention_backward = {.qkv = qkv, .lse = lse, .dout = dout, .dqkv = dqkv,
                                                        .scratch = scratch, .sequences = 2, .sequence = S,
                                                        .heads = HEADS, .kv_heads = KV, .head_dim = DIM}};
    outputs out = {.count = 0}, out_back = {.count = 0};
    outputs_add(&out, y, ROWS * HEADS * DIM * sizeof(float));
    outputs_add(&out, lse, ROWS * HEADS * sizeof(float));
    check_levels(&forward, &out);
    outputs_add(&out_back, dqkv, ROWS * COLUMNS * sizeof(float));
    check_levels(&backward, &out_back);
    free(qkv), free(dout), free(y), free(lse), free(dqkv), free(scratch);
}

static void cross_entropy_is_the_same_at_every_level(void **state) {
    (void)state;
    enum { ROWS = 9, VOCAB = 2500 }; /* more than the kernel's chunk */
    float *logits = random_floats(ROWS * VOCAB, 10.0f, 1);
    int32_t targets[ROWS];
    double loss = 0.0;
    for (int i = 0; i < ROWS; ++i) targets[i] = i * 277;
    const qe_op op = {.kind = QE_OP_CROSS_ENTROPY,
                      .args.cross_entropy = {.logits = logits, .targets = targets, .loss = &loss,
                                             .gradient_scale = 0.01f, .rows = ROWS, .vocab = VOCAB, .backward = 1}};
    outputs out = {.count = 0};
    outputs_add(&out, logits, ROWS * VOCAB * sizeof(float));
    outputs_add(&out, &loss, sizeof loss);
    check_levels(&op, &out);
    free(logits);
}

static void the_optimizer_is_the_same_at_every_level(void **state) {
    (void)state;
    enum { COUNT = 1003 };
    const qe_adamw step = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.271f, 0.142625f, 0.7f};
    float *w = random_floats(COUNT, 1.0f, 1), *g = random_floats(COUNT, 1.0f, 2), *m = random_floats(COUNT, 1.0f, 3);
    float *v = random_floats(COUNT, 1.0f, 4);
    double sum = 0.0;
    for (int i = 0; i < COUNT; ++i) v[i] = fabsf(v[i]);
    outputs out = {.count = 0}, out_norm = {.count = 0};
    outputs_add(&out, w, COUNT * sizeof(float));
    outputs_add(&out, m, COUNT * sizeof(float));
    outputs_add(&out, v, COUNT * sizeof(float));
    const qe_op adamw = {.kind = QE_OP_ADAMW, .args.adamw = {w, g, m, v, COUNT, &step, 1}};
    check_levels(&adamw, &out);
    outputs_add(&out_norm, &sum, sizeof sum);
    const qe_op norm = {.kind = QE_OP_GRAD_NORM, .args.grad_norm = {g, COUNT, &sum}};
    check_levels(&norm, &out_norm);
    free(w), free(g), free(m), free(v);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norm_quantize_is_the_same_at_every_level),
        cmocka_unit_test(norm_backward_is_the_same_at_every_level),
        cmocka_unit_test(rope_is_the_same_at_every_level),
        cmocka_unit_test(swiglu_is_the_same_at_every_level),
        cmocka_unit_test(attention_is_the_same_at_every_level),
        cmocka_unit_test(cross_entropy_is_the_same_at_every_level),
        cmocka_unit_test(the_optimizer_is_the_same_at_every_level),
    };
    return cmocka_run_group_tests(tests, devices_open, devices_close);
}
