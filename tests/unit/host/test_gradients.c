/* Every unquantized op: forward against plain loops in double, backward against central differences through them. The
 * tolerances are relative to the largest element: a few rounding errors of fp32 (6e-8), more where sums are long. */
#include "reference.h"

/* ---- norm ---- */
enum { NORM_ROWS = 5, NORM_HIDDEN = 37, NORM_COUNT = NORM_ROWS * NORM_HIDDEN };

typedef struct norm_case {
    const double *x, *gain, *dy;
    int by_gain; /* the function's argument is the gain, not x */
} norm_case;

static double norm_scalar(const double *at, const void *context) {
    const norm_case *c = context;
    double y[NORM_COUNT];
    reference_norm(c->by_gain ? c->x : at, c->by_gain ? at : c->gain, NORM_ROWS, NORM_HIDDEN, 1e-5, y);
    return dot(y, c->dy, NORM_COUNT);
}

static void norm_agrees_with_its_formula_and_central_differences(void **state) {
    (void)state;
    float *x = random_floats(NORM_COUNT, 2.0f, 1), *gain = random_floats(NORM_HIDDEN, 1.5f, 2);
    float *dy = random_floats(NORM_COUNT, 1.0f, 3), *residual = random_floats(NORM_COUNT, 1.0f, 4);
    float y[NORM_COUNT], rstd[NORM_ROWS], dx[NORM_COUNT], gain_grad[NORM_HIDDEN];
    double *x2 = doubles_from(x, NORM_COUNT), *gain2 = doubles_from(gain, NORM_HIDDEN);
    double *dy2 = doubles_from(dy, NORM_COUNT);
    double y2[NORM_COUNT], dx2[NORM_COUNT], gain_grad2[NORM_HIDDEN];
    norm_case c = {x2, gain2, dy2, 0};
    reference_norm(x2, gain2, NORM_ROWS, NORM_HIDDEN, 1e-5, y2);
    central_differences(norm_scalar, &c, x2, NORM_COUNT, dx2);
    c.by_gain = 1;
    central_differences(norm_scalar, &c, gain2, NORM_HIDDEN, gain_grad2);
    for (int i = 0; i < NORM_COUNT; ++i) dx2[i] += (double)residual[i];
    for (int level = 0; level < LEVELS; ++level) {
        qe_op forward = {.kind = QE_OP_NORM,
                         .args.norm = {.x = x,
                                       .gain = gain,
                                       .rstd = rstd,
                                       .y = y,
                                       .epsilon = 1e-5f,
                                       .rows = NORM_ROWS,
                                       .hidden = NORM_HIDDEN}};
        qe_op backward = {
            .kind = QE_OP_NORM_BACKWARD,
            .args.norm_backward = {.dy = dy, .x = x, .rstd = rstd, .gain = gain, .residual = residual, .dx = dx,
                                   .gain_grad = gain_grad, .rows = NORM_ROWS, .hidden = NORM_HIDDEN, .set = 1}};
        op_run(level, &forward);
        op_run(level, &backward);
        assert_close("norm", y, y2, NORM_COUNT, 1e-6);
        assert_close("norm dx", dx, dx2, NORM_COUNT, 2e-6);
        assert_close("norm gain", gain_grad, gain_grad2, NORM_HIDDEN, 2e-6);
        backward.args.norm_backward.set = 0; /* adds a second time; and dx over the residual itself */
        memcpy(dx, residual, sizeof dx);
        backward.args.norm_backward.residual = dx;
        op_run(level, &backward);
        assert_close("norm dx in place", dx, dx2, NORM_COUNT, 2e-6);
        for (int i = 0; i < NORM_HIDDEN; ++i) gain_grad[i] *= 0.5f;
        assert_close("norm gain added", gain_grad, gain_grad2, NORM_HIDDEN, 2e-6);
    }
    free(x), free(gain), free(dy), free(residual), free(x2), free(gain2), free(dy2);
}

/* ---- rope ---- */
enum { ROPE_ROWS = 6, ROPE_SEQUENCE = 3, ROPE_HEADS = 4, ROPE_KV = 2, ROPE_DIM = 10 };
enum { ROPE_COLUMNS = (ROPE_HEADS + 2 * ROPE_KV) * ROPE_DIM, ROPE_COUNT = ROPE_ROWS * ROPE_COLUMNS };

typedef struct rope_case {
    const float *cosine, *sine;
    const double *dy;
} rope_case;

static double rope_scalar(const double *at, const void *context) {
    const rope_case *c = context;
    double y[ROPE_COUNT];
    memcpy(y, at, sizeof y);
    reference_rope(y, c->cosine, c->sine, ROPE_ROWS, ROPE_SEQUENCE, ROPE_HEADS, ROPE_KV, ROPE_DIM);
    return dot(y, c->dy, ROPE_COUNT);
}

static void rope_turns_and_turns_back(void **state) {
    (void)state;
    float cosine[ROPE_SEQUENCE * ROPE_DIM / 2], sine[ROPE_SEQUENCE * ROPE_DIM / 2];
    for (int i = 0; i < ROPE_SEQUENCE * ROPE_DIM / 2; ++i) {
        cosine[i] = cosf((float)i * 0.7f);
        sine[i] = sinf((float)i * 0.7f);
    }
    float *start = random_floats(ROPE_COUNT, 1.0f, 5), *dy = random_floats(ROPE_COUNT, 1.0f, 6), work[ROPE_COUNT];
    double *start2 = doubles_from(start, ROPE_COUNT), *dy2 = doubles_from(dy, ROPE_COUNT), dx2[ROPE_COUNT];
    const rope_case c = {cosine, sine, dy2};
    central_differences(rope_scalar, &c, start2, ROPE_COUNT, dx2);
    reference_rope(start2, cosine, sine, ROPE_ROWS, ROPE_SEQUENCE, ROPE_HEADS, ROPE_KV, ROPE_DIM);
    for (int level = 0; level < LEVELS; ++level) {
        memcpy(work, start, sizeof work);
        qe_op op = {.kind = QE_OP_ROPE,
                    .args.rope = {work, cosine, sine, ROPE_ROWS, ROPE_SEQUENCE, ROPE_HEADS, ROPE_KV, ROPE_DIM, {0}}};
        op_run(level, &op);
        assert_close("rope", work, start2, ROPE_COUNT, 1e-6);
        quantized q;
        quantized_init(&q, QE_RECIPE_FP32, QE_FORMAT_FP32, ROPE_ROWS, ROPE_COLUMNS, 0);
        memcpy(work, dy, sizeof work);
        op.kind = QE_OP_ROPE_BACKWARD_QUANTIZE;
        op.args.rope.target = q.target;
        op_run(level, &op);
        assert_close("rope backward", work, dx2, ROPE_COUNT, 1e-6);
        assert_same_bits(decoded_of(&q), work, sizeof work);
        quantized_deinit(&q);
    }
    free(start), free(dy), free(start2), free(dy2);
}

/* ---- attention ---- */
typedef struct attention_case {
    size_t sequences, sequence, heads, kv_heads, head_dim;
    const double *dout;
    double *out;
} attention_case;

static double attention_scalar(const double *at, const void *context) {
    const attention_case *c = context;
    reference_attention(at, c->sequences, c->sequence, c->heads, c->kv_heads, c->head_dim, c->out, NULL);
    return dot(c->out, c->dout, c->sequences * c->sequence * c->heads * c->head_dim);
}

/* 0 gradients: forward only, where differences would take too long. */
static void check_attention(uint32_t sequences, uint32_t sequence, uint32_t heads, uint32_t kv_heads, uint32_t head_dim,
                            int gradients) {
    const size_t rows = (size_t)sequences * sequence, in = rows * (heads + 2 * kv_heads) * head_dim;
    const size_t outs = rows * heads * head_dim, marks = rows * heads;
    float *qkv = random_floats(in, 1.5f, sequence), *dout = random_floats(outs, 1.0f, 8), *out = floats_of(outs);
    float *lse = floats_of(marks), *dqkv = floats_of(in);
    float *scratch = floats_of(qe_attention_scratch_floats(sequence, head_dim));
    double *qkv2 = doubles_from(qkv, in), *dout2 = doubles_from(dout, outs), *out2 = doubles_of(outs);
    double *lse2 = doubles_of(marks), *dqkv2 = doubles_of(in);
    const attention_case c = {sequences, sequence, heads, kv_heads, head_dim, dout2, out2};
    if (gradients) central_differences(attention_scalar, &c, qkv2, in, dqkv2);
    reference_attention(qkv2, sequences, sequence, heads, kv_heads, head_dim, out2, lse2);
    for (int level = 0; level < LEVELS; ++level) {
        qe_op forward = {.kind = QE_OP_ATTENTION,
                         .args.attention = {qkv, out, lse, scratch, sequences, sequence, heads, kv_heads, head_dim}};
        qe_op backward = {
            .kind = QE_OP_ATTENTION_BACKWARD,
            .args.attention_backward = {.qkv = qkv, .lse = lse, .dout = dout, .dqkv = dqkv, .scratch = scratch,
                                        .sequences = sequences, .sequence = sequence, .heads = heads,
                                        .kv_heads = kv_heads, .head_dim = head_dim}};
        op_run(level, &forward);
        assert_close("attention", out, out2, outs, 2e-6);
        assert_close("attention lse", lse, lse2, marks, 2e-6);
        for (size_t i = 0; i < in; ++i) dqkv[i] = NAN; /* must all be written */
        op_run(level, &backward);
        if (gradients) assert_close("attention backward", dqkv, dqkv2, in, 5e-6);
    }
    free(qkv), free(dout), free(out), free(lse), free(dqkv), free(scratch);
    free(qkv2), free(dout2), free(out2), free(lse2), free(dqkv2);
}

static void attention_agrees_with_its_formula_and_central_differences(void **state) {
    (void)state;
    check_attention(1, 1, 1, 1, 2, 1);
    check_attention(2, 7, 4, 2, 6, 1);
    check_attention(1, 17, 3, 1, 8, 1);
    check_attention(1, 66, 2, 1, 4, 1); /* crosses a tile of queries */
    check_attention(2, 128, 4, 2, 32, 0);
    check_attention(1, 200, 2, 2, 16, 0);
}

/* Backward of several tiles against the plain formula (differences would take minutes here). */
static void attention_backward_agrees_with_its_formula_over_several_tiles(void **state) {
    (void)state;
    enum { S = 150, D = 16, COLUMNS = 3 * D };
    float *qkv = random_floats(S * COLUMNS, 1.5f, 1), *dout = random_floats(S * D, 1.0f, 2);
    float *dqkv = floats_of(S * COLUMNS);
    float *out = floats_of(S * D), *lse = floats_of(S), *scratch = floats_of(qe_attention_scratch_floats(S, D));
    double *expected = doubles_of(S * COLUMNS), p[S], dp[S];
    for (size_t r = 0; r < S; ++r) {
        double sum = 0.0, mean = 0.0;
        for (size_t j = 0; j <= r; ++j) {
            double score = 0.0;
            dp[j] = 0.0;
            for (size_t i = 0; i < D; ++i) {
                score += (double)qkv[r * COLUMNS + i] * (double)qkv[j * COLUMNS + D + i];
                dp[j] += (double)dout[r * D + i] * (double)qkv[j * COLUMNS + 2 * D + i];
            }
            sum += p[j] = exp(score / sqrt(D));
        }
        for (size_t j = 0; j <= r; ++j) mean += (p[j] /= sum) * dp[j];
        for (size_t j = 0; j <= r; ++j)
            for (size_t i = 0; i < D; ++i) {
                const double ds = p[j] * (dp[j] - mean) / sqrt(D);
                expected[r * COLUMNS + i] += ds * (double)qkv[j * COLUMNS + D + i];
                expected[j * COLUMNS + D + i] += ds * (double)qkv[r * COLUMNS + i];
                expected[j * COLUMNS + 2 * D + i] += p[j] * (double)dout[r * D + i];
            }
    }
    for (int level = 0; level < LEVELS; ++level) {
        qe_op forward = {.kind = QE_OP_ATTENTION, .args.attention = {qkv, out, lse, scratch, 1, S, 1, 1, D}};
        qe_op backward = {.kind = QE_OP_ATTENTION_BACKWARD,
                          .args.attention_backward = {.qkv = qkv, .lse = lse, .dout = dout, .dqkv = dqkv,
                                                      .scratch = scratch, .sequences = 1, .sequence = S, .heads = 1,
                                                      .kv_heads = 1, .head_dim = D}};
        op_run(level, &forward);
        op_run(level, &backward);
        assert_close("attention backward", dqkv, expected, S * COLUMNS, 5e-6);
    }
    free(qkv), free(dout), free(dqkv), free(out), free(lse), free(scratch), free(expected);
}

/* ---- swiglu ---- */
enum { GLU_ROWS = 3, GLU_FFN = 21 };

static double swiglu_scalar(const double *at, const void *context) {
    double y[GLU_ROWS * GLU_FFN];
    reference_swiglu(at, GLU_ROWS, GLU_FFN, y);
    return dot(y, context, GLU_ROWS * GLU_FFN);
}

static void swiglu_agrees_with_its_formula_and_central_differences(void **state) {
    (void)state;
    enum { IN = GLU_ROWS * 2 * GLU_FFN, OUT = GLU_ROWS * GLU_FFN };
    float *gate_up = random_floats(IN, 8.0f, 11), *dy = random_floats(OUT, 1.0f, 12), dgate_up[IN];
    double *gate_up2 = doubles_from(gate_up, IN), *dy2 = doubles_from(dy, OUT), y2[OUT], dgate_up2[IN];
    reference_swiglu(gate_up2, GLU_ROWS, GLU_FFN, y2);
    central_differences(swiglu_scalar, dy2, gate_up2, IN, dgate_up2);
    for (int level = 0; level < LEVELS; ++level) {
        quantized y, back;
        quantized_init(&y, QE_RECIPE_FP32, QE_FORMAT_FP32, GLU_ROWS, GLU_FFN, 0);
        quantized_init(&back, QE_RECIPE_FP32, QE_FORMAT_FP32, GLU_ROWS, 2 * GLU_FFN, 0);
        qe_op forward = {.kind = QE_OP_SWIGLU_QUANTIZE, .args.swiglu = {gate_up, GLU_ROWS, GLU_FFN, NULL, y.target}};
        qe_op backward = {.kind = QE_OP_SWIGLU_BACKWARD_QUANTIZE,
                          .args.swiglu_backward = {gate_up, dy, dgate_up, GLU_ROWS, GLU_FFN, back.target}};
        op_run(level, &forward);
        op_run(level, &backward);
        assert_close("swiglu", decoded_of(&y), y2, OUT, 1e-6);
        assert_close("swiglu backward", decoded_of(&back), dgate_up2, IN, 2e-6);
        quantized_deinit(&y);
        quantized_deinit(&back);
    }
    free(gate_up), free(dy), free(gate_up2), free(dy2);
}

static void swiglu_of_extreme_gates_is_finite(void **state) {
    (void)state;
    float gate_up[8] = {-1e4f, 1e4f, -90.0f, 0.0f, 1.0f, 1.0f, 1.0f, 1.0f}, dy[4] = {1, 1, 1, 1}, dgate_up[8];
    for (int level = 0; level < LEVELS; ++level) {
        quantized y, back;
        quantized_init(&y, QE_RECIPE_FP32, QE_FORMAT_FP32, 1, 4, 0);
        quantized_init(&back, QE_RECIPE_FP32, QE_FORMAT_FP32, 1, 8, 0);
        qe_op forward = {.kind = QE_OP_SWIGLU_QUANTIZE, .args.swiglu = {gate_up, 1, 4, NULL, y.target}};
        qe_op backward = {.kind = QE_OP_SWIGLU_BACKWARD_QUANTIZE,
                          .args.swiglu_backward = {gate_up, dy, dgate_up, 1, 4, back.target}};
        op_run(level, &forward);
        op_run(level, &backward);
        assert_true(fabsf(decoded_of(&y)[0]) < 1e-30f);
        assert_true(decoded_of(&y)[1] == 1e4f);
        assert_true(decoded_of(&y)[3] == 0.0f);
        for (int i = 0; i < 8; ++i) assert_true(isfinite(dgate_up[i]));
        assert_true(dgate_up[1] == 1.0f);
        quantized_deinit(&y);
        quantized_deinit(&back);
    }
}

/* ---- cross-entropy ---- */
enum { CE_ROWS = 6, CE_VOCAB = 45, CE_COUNT = CE_ROWS * CE_VOCAB };

static double cross_entropy_scalar(const double *at, const void *context) {
    return reference_cross_entropy(at, context, CE_ROWS, CE_VOCAB);
}

static void cross_entropy_agrees_with_its_formula_and_central_differences(void **state) {
    (void)state;
    const int32_t targets[CE_ROWS] = {0, 44, 17, -1, 17, 3};
    float *logits = random_floats(CE_COUNT, 6.0f, 21), work[CE_COUNT];
    double *logits2 = doubles_from(logits, CE_COUNT), gradient2[CE_COUNT];
    const double loss2 = reference_cross_entropy(logits2, targets, CE_ROWS, CE_VOCAB);
    central_differences(cross_entropy_scalar, targets, logits2, CE_COUNT, gradient2);
    for (int i = 0; i < CE_COUNT; ++i) gradient2[i] *= 0.125;
    for (int level = 0; level < LEVELS; ++level) {
        double loss = -1.0;
        memcpy(work, logits, sizeof work);
        qe_op op = {.kind = QE_OP_CROSS_ENTROPY,
                    .args.cross_entropy = {.logits = work, .targets = targets, .loss = &loss,
                                           .gradient_scale = 0.125f, .rows = CE_ROWS, .vocab = CE_VOCAB}};
        op_run(level, &op);
        assert_true(fabs(loss - loss2) < 1e-6 * loss2);
        assert_same_bits(work, logits, sizeof work); /* evaluation leaves the logits */
        const double evaluated = loss;
        op.args.cross_entropy.backward = 1;
        op_run(level, &op);
        assert_true(loss == evaluated);
        assert_close("cross-entropy", work, gradient2, CE_COUNT, 1e-6);
        for (int i = 0; i < CE_VOCAB; ++i) assert_true(work[3 * CE_VOCAB + i] == 0.0f);
    }
    free(logits), free(logits2);
}

static void a_logit_that_is_not_finite_reaches_the_loss(void **state) {
    (void)state;
    const float bad[] = {NAN, INFINITY};
    const int32_t target = 3;
    for (int level = 0; level < LEVELS; ++level)
        for (int i = 0; i < 2; ++i)
            for (int at = 0; at < 40; at += 13) {
                float *logits = random_floats(40, 1.0f, 2);
                double loss = 0.0;
                logits[at] = bad[i];
                qe_op op = {.kind = QE_OP_CROSS_ENTROPY,
                            .args.cross_entropy = {.logits = logits, .targets = &target, .loss = &loss,
                                                   .gradient_scale = 1.0f, .rows = 1, .vocab = 40}};
                op_run(level, &op);
                assert_true(!isfinite(loss));
                free(logits);
            }
}

/* ---- embedding ---- */
static void embedding_copies_rows_and_adds_gradients_in_token_order(void **state) {
    (void)state;
    enum { VOCAB = 9, HIDDEN = 19, TOKENS = 30 };
    int32_t tokens[TOKENS];
    for (int t = 0; t < TOKENS; ++t) tokens[t] = t * 5 % 7; /* rows 7 and 8 are never used */
    float *table = random_floats(VOCAB * HIDDEN, 1.0f, 31), *dy = random_floats(TOKENS * HIDDEN, 1.0f, 32);
    float y[TOKENS * HIDDEN], grad[VOCAB * HIDDEN], expected[VOCAB * HIDDEN];
    for (int level = 0; level < LEVELS; ++level) {
        qe_op forward = {.kind = QE_OP_EMBED, .args.embed = {tokens, table, y, TOKENS, HIDDEN}};
        qe_op backward = {.kind = QE_OP_EMBED_BACKWARD,
                          .args.embed_backward = {tokens, dy, grad, TOKENS, HIDDEN, VOCAB, 1}};
        op_run(level, &forward);
        for (int t = 0; t < TOKENS; ++t)
            assert_same_bits(y + t * HIDDEN, table + tokens[t] * HIDDEN, HIDDEN * sizeof(float));
        memset(expected, 0, sizeof expected);
        for (int i = 0; i < VOCAB * HIDDEN; ++i) grad[i] = NAN;
        for (int pass = 0; pass < 2; ++pass) {
            for (int t = 0; t < TOKENS; ++t)
                for (int i = 0; i < HIDDEN; ++i) expected[tokens[t] * HIDDEN + i] += dy[t * HIDDEN + i];
            op_run(level, &backward);
            assert_same_bits(grad, expected, sizeof grad);
            backward.args.embed_backward.set = 0;
        }
    }
    free(table), free(dy);
}

/* ---- linear ---- */
static void linear_and_its_gradients_agree_with_plain_products(void **state) {
    (void)state;
    enum { ROWS = 19, IN = 23, OUT = 35 };
    float *x = random_floats(ROWS * IN, 1.0f, 41), *w = random_floats(OUT * IN, 1.0f, 42), y[ROWS * OUT], dx[ROWS * IN];
    float *dy = random_floats(ROWS * OUT, 1.0f, 43), *residual = random_floats(ROWS * OUT, 1.0f, 44), grad[OUT * IN];
    double *x2 = doubles_from(x, ROWS * IN), *w2 = doubles_from(w, OUT * IN), y2[ROWS * OUT], dx2[ROWS * IN] = {0};
    double grad2[OUT * IN] = {0};
    reference_linear(x2, w2, ROWS, IN, OUT, y2);
    for (int r = 0; r < ROWS; ++r)
        for (int o = 0; o < OUT; ++o)
            for (int i = 0; i < IN; ++i) {
                dx2[r * IN + i] += (double)dy[r * OUT + o] * w2[o * IN + i];
                grad2[o * IN + i] += (double)dy[r * OUT + o] * x2[r * IN + i];
            }
    qe_op op = {.kind = QE_OP_LINEAR,
                .args.linear = {.x = plain(x, ROWS, IN), .w = plain(w, OUT, IN), .y = y, .rows = ROWS, .in = IN,
                                .out = OUT}};
    op_run(0, &op);
    assert_close("linear", y, y2, ROWS * OUT, 1e-6);
    op.args.linear.residual = residual;
    op_run(0, &op);
    for (int i = 0; i < ROWS * OUT; ++i) y2[i] += (double)residual[i];
    assert_close("linear with residual", y, y2, ROWS * OUT, 1e-6);
    op = (qe_op){.kind = QE_OP_LINEAR_INPUT_GRAD,
                 .args.linear_input_grad = {.dy = plain(dy, ROWS, OUT), .w = plain(w, OUT, IN), .dx = dx, .rows = ROWS,
                                            .in = IN, .out = OUT}};
    op_run(0, &op);
    assert_close("linear input gradient", dx, dx2, ROWS * IN, 1e-6);
    op = (qe_op){.kind = QE_OP_LINEAR_WEIGHT_GRAD,
                 .args.linear_weight_grad = {.x = plain(x, ROWS, IN),
                                             .dy = plain(dy, ROWS, OUT),
                                             .grad = grad,
                                             .rows = ROWS,
                                             .in = IN,
                                             .out = OUT,
                                             .set = 1}};
    op_run(0, &op);
    assert_close("linear weight gradient", grad, grad2, OUT * IN, 1e-6);
    op.args.linear_weight_grad.set = 0;
    op_run(0, &op);
    for (int i = 0; i < OUT * IN; ++i) grad2[i] *= 2.0;
    assert_close("linear weight gradient added", grad, grad2, OUT * IN, 1e-6);
    free(x), free(w), free(dy), free(residual), free(x2), free(w2);
}

/* ---- optimizer ---- */
static void adamw_is_pytorchs_arithmetic(void **state) {
    (void)state;
    enum { COUNT = 53 };
    const qe_adamw step = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f - 0.729f, 1.0f - 0.857375f, 0.5f};
    float *start = random_floats(COUNT, 1.0f, 51), *grad = random_floats(COUNT, 2.0f, 52);
    float *first = random_floats(COUNT, 0.5f, 53), *second = random_floats(COUNT, 0.5f, 54);
    double expected[2][COUNT];
    for (int i = 0; i < COUNT; ++i) {
        second[i] = fabsf(second[i]);
        const double g = (double)grad[i] * 0.5, m = 0.9 * (double)first[i] + 0.1 * g;
        const double v = 0.95 * (double)second[i] + 0.05 * g * g;
        const double update = 1e-3 * (m / (1.0 - 0.729)) / (sqrt(v / (1.0 - 0.857375)) + 1e-8);
        expected[0][i] = (double)start[i] - update;
        expected[1][i] = (double)start[i] * (1.0 - 1e-3 * 0.1) - update;
    }
    for (int level = 0; level < LEVELS; ++level)
        for (int decay = 0; decay < 2; ++decay) {
            float w[COUNT], m[COUNT], v[COUNT];
            memcpy(w, start, sizeof w);
            memcpy(m, first, sizeof m);
            memcpy(v, second, sizeof v);
            qe_op op = {.kind = QE_OP_ADAMW, .args.adamw = {w, grad, m, v, COUNT, &step, (uint8_t)decay}};
            op_run(level, &op);
            assert_close("adamw", w, expected[decay], COUNT, 2e-7);
            assert_true(fabs((double)m[7] - (0.9 * (double)first[7] + 0.05 * (double)grad[7])) < 1e-6);
        }
    free(start), free(grad), free(first), free(second);
}

static void grad_norm_sums_squares(void **state) {
    (void)state;
    for (uint64_t count = 0; count < 70; ++count) {
        float *grad = random_floats(count + 1, 3.0f, count);
        double expected = 0.0, sum = -1.0;
        for (uint64_t i = 0; i < count; ++i) expected += (double)grad[i] * (double)grad[i];
        for (int level = 0; level < LEVELS; ++level) {
            qe_op op = {.kind = QE_OP_GRAD_NORM, .args.grad_norm = {grad, count, &sum}};
            op_run(level, &op);
            assert_true(fabs(sum - expected) <= 1e-14 * expected);
        }
        free(grad);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norm_agrees_with_its_formula_and_central_differences),
        cmocka_unit_test(rope_turns_and_turns_back),
        cmocka_unit_test(attention_agrees_with_its_formula_and_central_differences),
        cmocka_unit_test(attention_backward_agrees_with_its_formula_over_several_tiles),
        cmocka_unit_test(swiglu_agrees_with_its_formula_and_central_differences),
        cmocka_unit_test(swiglu_of_extreme_gates_is_finite),
        cmocka_unit_test(cross_entropy_agrees_with_its_formula_and_central_differences),
        cmocka_unit_test(a_logit_that_is_not_finite_reaches_the_loss),
        cmocka_unit_test(embedding_copies_rows_and_adds_gradients_in_token_order),
        cmocka_unit_test(linear_and_its_gradients_agree_with_plain_products),
        cmocka_unit_test(adamw_is_pytorchs_arithmetic),
        cmocka_unit_test(grad_norm_sums_squares),
    };
    return cmocka_run_group_tests(tests, devices_open, devices_close);
}
