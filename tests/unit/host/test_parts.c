/* An op with a target leaves what its two parts leave when they are given one behind the other, to the last byte, in
 * every recipe. The parts are written out here, so this is also what qe_op_parts is held to. */
#include "devices.h"

enum { ROWS = 131, HIDDEN = 45, FFN = 77 };

/* Everything a quantized tensor is. */
static void assert_same_tensor(const quantized *a, const quantized *b, uint32_t columns) {
    const size_t count = (size_t)ROWS * columns;
    assert_same_bits(decoded_of(a), decoded_of(b), count * sizeof(float));
    assert_same_bits(a->target.retained.codes, b->target.retained.codes, count * sizeof(float));
    if (a->target.retained.scale_inv != NULL)
        assert_same_bits(a->target.retained.scale_inv, b->target.retained.scale_inv, (count + 1) * sizeof(float));
    assert_int_equal(bits_from(a->amax), bits_from(b->amax));
}

static void assert_made(const quantized *q) {
    float largest = 0.0f;
    for (size_t i = 0; i < (size_t)ROWS; ++i) largest = fmaxf(largest, fabsf(decoded_of(q)[i]));
    assert_true(largest > 0.0f);
}

static void for_each_recipe(void (*check)(uint8_t recipe, uint8_t format, int level)) {
    static const uint8_t cases[][2] = {{QE_RECIPE_DELAYED, QE_FORMAT_E4M3}, {QE_RECIPE_DELAYED, QE_FORMAT_E5M2},
                                       {QE_RECIPE_CURRENT, QE_FORMAT_E5M2}, {QE_RECIPE_BLOCK, QE_FORMAT_E4M3},
                                       {QE_RECIPE_BF16, QE_FORMAT_BF16},    {QE_RECIPE_FP32, QE_FORMAT_FP32}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i)
        for (int level = 0; level < LEVELS; ++level) check(cases[i][0], cases[i][1], level);
}

/* with_operand: 0 as in an op whose result is only retained: swiglu decodes into its scratch then. */
static void linear_case(uint8_t recipe, uint8_t format, int level, int with_operand) {
    float *x = random_floats(ROWS * HIDDEN, 1.0f, 1), *w = random_floats(2 * FFN * HIDDEN, 0.7f, 2);
    float *y[2] = {floats_of(ROWS * 2 * FFN), floats_of(ROWS * 2 * FFN)}, *scratch = floats_of(ROWS * FFN);
    quantized made[2];
    for (int i = 0; i < 2; ++i) {
        quantized_init(&made[i], recipe, format, ROWS, FFN, 0);
        made[i].scale = 3.0f;
    }
    qe_quantize_target target[2] = {made[0].target, made[1].target};
    for (int i = 0; i < 2 && !with_operand; ++i) target[i].operand.codes = NULL;
    qe_op op = {.kind = QE_OP_LINEAR,
                .args.linear = {.x = plain(x, ROWS, HIDDEN), .w = plain(w, 2 * FFN, HIDDEN), .y = y[0], .rows = ROWS,
                                .in = HIDDEN, .out = 2 * FFN, .decoded_scratch = scratch, .target = target[0]}};
    op_run(level, &op);
    op.args.linear.y = y[1];
    op.args.linear.target = (qe_quantize_target){0};
    op_run(level, &op);
    op = (qe_op){.kind = QE_OP_SWIGLU_QUANTIZE,
                 .args.swiglu = {.gate_up = y[1], .rows = ROWS, .ffn = FFN, .decoded_scratch = scratch,
                                 .target = target[1]}};
    op_run(level, &op);
    assert_same_bits(y[0], y[1], ROWS * 2 * FFN * sizeof(float));
    assert_same_tensor(&made[0], &made[1], FFN);
    if (with_operand) assert_made(&made[0]);
    quantized_deinit(&made[0]);
    quantized_deinit(&made[1]);
    free(x), free(w), free(y[0]), free(y[1]), free(scratch);
}

static void check_linear(uint8_t recipe, uint8_t format, int level) {
    linear_case(recipe, format, level, 1);
    linear_case(recipe, format, level, 0);
}

static void a_product_and_swiglu_in_one_op_are_the_two_apart(void **state) {
    (void)state;
    for_each_recipe(check_linear);
}

static void check_input_grad(uint8_t recipe, uint8_t format, int level) {
    float *dy = random_floats(ROWS * HIDDEN, 1.0f, 3), *w = random_floats(HIDDEN * FFN, 0.7f, 4);
    float *gate_up = random_floats(ROWS * 2 * FFN, 9.0f, 5), *dx[2] = {floats_of(ROWS * FFN), floats_of(ROWS * FFN)};
    float *dgate_up = floats_of(ROWS * 2 * FFN);
    quantized made[2];
    for (int i = 0; i < 2; ++i) quantized_init(&made[i], recipe, format, ROWS, 2 * FFN, 0);
    qe_op op = {.kind = QE_OP_LINEAR_INPUT_GRAD,
                .args.linear_input_grad = {.dy = plain(dy, ROWS, HIDDEN), .w = plain(w, HIDDEN, FFN), .dx = dx[0],
                                           .rows = ROWS, .in = FFN, .out = HIDDEN, .gate_up = gate_up,
                                           .dgate_up = dgate_up, .target = made[0].target}};
    op_run(level, &op);
    op.args.linear_input_grad.dx = dx[1];
    op.args.linear_input_grad.target = (qe_quantize_target){0};
    op_run(level, &op);
    op = (qe_op){.kind = QE_OP_SWIGLU_BACKWARD_QUANTIZE,
                 .args.swiglu_backward = {.gate_up = gate_up, .dy = dx[1], .dgate_up = dgate_up, .rows = ROWS,
                                          .ffn = FFN, .target = made[1].target}};
    op_run(level, &op);
    assert_same_tensor(&made[0], &made[1], 2 * FFN);
    assert_made(&made[0]);
    quantized_deinit(&made[0]);
    quantized_deinit(&made[1]);
    free(dy), free(w), free(gate_up), free(dx[0]), free(dx[1]), free(dgate_up);
}

static void a_product_back_through_swiglu_in_one_op_is_the_two_apart(void **state) {
    (void)state;
    for_each_recipe(check_input_grad);
}

enum { HEADS = 3, DIM = 8, OUT = HEADS * DIM, COLUMNS = 3 * OUT };

static qe_op attention_op(float *qkv, float *out, float *lse, float *scratch) {
    return (qe_op){.kind = QE_OP_ATTENTION,
                   .args.attention = {.qkv = qkv, .out = out, .lse = lse, .scratch = scratch, .sequences = 1,
                                      .sequence = ROWS, .heads = HEADS, .kv_heads = HEADS, .head_dim = DIM,
                                      .deterministic = 1}};
}

static void check_attention(uint8_t recipe, uint8_t format, int level) {
    float *qkv = random_floats(ROWS * COLUMNS, 1.0f, 6), *out[2] = {floats_of(ROWS * OUT), floats_of(ROWS * OUT)};
    float *lse = floats_of(ROWS * HEADS), *scratch = floats_of(qe_attention_scratch_floats(ROWS, DIM));
    quantized made[2];
    for (int i = 0; i < 2; ++i) quantized_init(&made[i], recipe, format, ROWS, OUT, 0);
    qe_op op = attention_op(qkv, out[0], lse, scratch);
    op.args.attention.target = made[0].target;
    op_run(level, &op);
    op = attention_op(qkv, out[1], lse, scratch);
    op_run(level, &op);
    op = (qe_op){.kind = QE_OP_QUANTIZE,
                 .args.quantize = {.x = out[1], .rows = ROWS, .columns = OUT, .target = made[1].target}};
    op_run(level, &op);
    assert_same_bits(out[0], out[1], ROWS * OUT * sizeof(float));
    assert_same_tensor(&made[0], &made[1], OUT);
    assert_made(&made[0]);
    quantized_deinit(&made[0]);
    quantized_deinit(&made[1]);
    free(qkv), free(out[0]), free(out[1]), free(lse), free(scratch);
}

static void attention_and_its_quantization_in_one_op_are_the_two_apart(void **state) {
    (void)state;
    for_each_recipe(check_attention);
}

static qe_op backward_op(const qe_op *forward, float *dout, float *dqkv) {
    const qe_args_attention *a = &forward->args.attention;
    return (qe_op){.kind = QE_OP_ATTENTION_BACKWARD,
                   .args.attention_backward = {.qkv = a->qkv, .lse = a->lse, .dout = dout, .dqkv = dqkv,
                                               .scratch = a->scratch, .sequences = 1, .sequence = ROWS,
                                               .heads = HEADS, .kv_heads = HEADS, .head_dim = DIM,
                                               .deterministic = 1}};
}

static void check_attention_backward(uint8_t recipe, uint8_t format, int level) {
    float *qkv = random_floats(ROWS * COLUMNS, 1.0f, 7), *out = floats_of(ROWS * OUT), *lse = floats_of(ROWS * HEADS);
    float *scratch = floats_of(qe_attention_scratch_floats(ROWS, DIM)), *dout = random_floats(ROWS * OUT, 1.0f, 8);
    float *dqkv = floats_of(ROWS * COLUMNS), *turns = random_floats(ROWS * DIM, 1.0f, 9);
    quantized made[2];
    for (int i = 0; i < 2; ++i) quantized_init(&made[i], recipe, format, ROWS, COLUMNS, 0);
    const qe_op forward = attention_op(qkv, out, lse, scratch);
    op_run(level, &forward);
    qe_op op = backward_op(&forward, dout, dqkv);
    op.args.attention_backward.cosine = turns;
    op.args.attention_backward.sine = turns + ROWS * DIM / 2;
    op.args.attention_backward.target = made[0].target;
    op_run(level, &op);
    op = backward_op(&forward, dout, dqkv);
    op_run(level, &op);
    op = (qe_op){.kind = QE_OP_ROPE_BACKWARD_QUANTIZE,
                 .args.rope = {.qkv = dqkv, .cosine = turns, .sine = turns + ROWS * DIM / 2, .rows = ROWS,
                               .sequence = ROWS, .heads = HEADS, .kv_heads = HEADS, .head_dim = DIM,
                               .target = made[1].target}};
    op_run(level, &op);
    assert_same_tensor(&made[0], &made[1], COLUMNS);
    assert_made(&made[0]);
    quantized_deinit(&made[0]);
    quantized_deinit(&made[1]);
    free(qkv), free(out), free(lse), free(scratch), free(dout), free(dqkv), free(turns);
}

static void attention_back_through_rope_in_one_op_is_the_two_apart(void **state) {
    (void)state;
    for_each_recipe(check_attention_backward);
}

/* No recipe is in it: what is rotated is a plain product's result. */
static void a_product_and_rope_in_one_op_are_the_two_apart(void **state) {
    (void)state;
    enum { KV = 2, HEAD = 10, WIDTH = (HEADS + 2 * KV) * HEAD, SEQUENCE = 43 };
    float *x = random_floats(ROWS * HIDDEN, 1.0f, 10), *w = random_floats(WIDTH * HIDDEN, 0.7f, 11);
    float *turns = random_floats(SEQUENCE * HEAD, 1.0f, 12), *y[2] = {floats_of(ROWS * WIDTH), floats_of(ROWS * WIDTH)};
    const float *sine = turns + SEQUENCE * HEAD / 2;
    for (int level = 0; level < LEVELS; ++level) {
        qe_op op = {.kind = QE_OP_LINEAR_ROPE,
                    .args.linear_rope = {.x = plain(x, ROWS, HIDDEN), .w = plain(w, WIDTH, HIDDEN), .y = y[0],
                                         .cosine = turns, .sine = sine, .rows = ROWS, .in = HIDDEN,
                                         .sequence = SEQUENCE, .heads = HEADS, .kv_heads = KV, .head_dim = HEAD}};
        op_run(level, &op);
        op = (qe_op){.kind = QE_OP_LINEAR,
                     .args.linear = {.x = plain(x, ROWS, HIDDEN), .w = plain(w, WIDTH, HIDDEN), .y = y[1],
                                     .rows = ROWS, .in = HIDDEN, .out = WIDTH}};
        op_run(level, &op);
        const float unturned = y[1][WIDTH];
        op = (qe_op){.kind = QE_OP_ROPE,
                     .args.rope = {.qkv = y[1], .cosine = turns, .sine = sine, .rows = ROWS, .sequence = SEQUENCE,
                                   .heads = HEADS, .kv_heads = KV, .head_dim = HEAD}};
        op_run(level, &op);
        assert_same_bits(y[0], y[1], ROWS * WIDTH * sizeof(float));
        assert_true(unturned != y[1][WIDTH]);
    }
    free(x), free(w), free(turns), free(y[0]), free(y[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_product_and_swiglu_in_one_op_are_the_two_apart),
        cmocka_unit_test(a_product_back_through_swiglu_in_one_op_is_the_two_apart),
        cmocka_unit_test(attention_and_its_quantization_in_one_op_are_the_two_apart),
        cmocka_unit_test(attention_back_through_rope_in_one_op_is_the_two_apart),
        cmocka_unit_test(a_product_and_rope_in_one_op_are_the_two_apart),
    };
    return cmocka_run_group_tests(tests, devices_open, devices_close);
}
