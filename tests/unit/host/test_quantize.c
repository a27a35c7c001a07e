/* Quantization at every level against the one-value codec, and the block recipe against plain loops. */
#include "devices.h"

enum { CHUNK = 4096 };

/* codes, decoded values and amax of `x` under the delayed recipe, one value at a time. */
static void check_delayed(int level, qe_format format, float scale, const float *x, uint32_t count) {
    quantized q;
    quantized_init(&q, QE_RECIPE_DELAYED, (uint8_t)format, 1, count, 0);
    q.scale = scale;
    q.amax = 0.25f;
    qe_op op = {.kind = QE_OP_QUANTIZE, .args.quantize = {.x = x, .rows = 1, .columns = count, .target = q.target}};
    op_run(level, &op);
    const uint8_t *codes = q.target.retained.codes;
    const float scale_inv = qe_scale_inverse(scale);
    float amax = 0.25f;
    for (uint32_t i = 0; i < count; ++i) {
        const uint8_t code = qe_fp8_encode(format, x[i] * scale);
        const float value = qe_fp8_decode(format, code) * scale_inv;
        if (codes[i] != code || bits_from(decoded_of(&q)[i]) != bits_from(value))
            fail_msg("%s %d: %08x * %g: code %02x, not %02x; decoded %08x, not %08x", level_names[level], format,
                     bits_from(x[i]), (double)scale, codes[i], code, bits_from(decoded_of(&q)[i]), bits_from(value));
        if (fabsf(x[i]) > amax) amax = fabsf(x[i]);
    }
    assert_int_equal(bits_from(q.amax), bits_from(amax));
    assert_int_equal(bits_from(q.target.retained.scale_inv[0]), bits_from(scale_inv));
    quantized_deinit(&q);
}

static void every_bf16_value_quantizes_as_the_codec_says_at_every_level(void **state) {
    (void)state;
    float *x = floats_of(65536);
    for (uint32_t i = 0; i < 65536; ++i) x[i] = float_from(i << 16);
    const float scales[] = {1.0f, 0.37f, 1024.0f};
    for (int level = 0; level < LEVELS; ++level)
        for (int i = 0; i < 3; ++i) {
            check_delayed(level, QE_FORMAT_E4M3, scales[i], x, 65536);
            check_delayed(level, QE_FORMAT_E5M2, scales[i], x, 65536);
        }
    free(x);
}

static void random_bit_patterns_quantize_as_the_codec_says_at_every_level(void **state) {
    (void)state;
    enum { COUNT = 1 << 19 };
    float *x = floats_of(COUNT);
    uint64_t seed = 5;
    for (uint32_t i = 0; i < COUNT; ++i) x[i] = float_from(random_bits(&seed));
    for (int level = 0; level < LEVELS; ++level) {
        check_delayed(level, QE_FORMAT_E4M3, 1.0f, x, COUNT);
        check_delayed(level, QE_FORMAT_E5M2, 3.3f, x, COUNT);
    }
    /* Every rounding decision: all mantissas near the boundaries of the range that the formats cover. */
    for (uint32_t i = 0; i < COUNT; ++i) x[i] = float_from(0x36000000u + (random_bits(&seed) % 0x13000000u));
    for (int level = 0; level < LEVELS; ++level) {
        check_delayed(level, QE_FORMAT_E4M3, 1.0f, x, COUNT);
        check_delayed(level, QE_FORMAT_E5M2, 1.0f, x, COUNT);
    }
    free(x);
}

static void odd_lengths_and_missing_outputs_give_the_same_values(void **state) {
    (void)state;
    for (int level = 0; level < LEVELS; ++level)
        for (uint32_t count = 1; count < 150; ++count) {
            float *x = random_floats(count, 500.0f, count);
            check_delayed(level, count % 2 ? QE_FORMAT_E4M3 : QE_FORMAT_E5M2, 0.9f, x, count);
            quantized whole, part;
            quantized_init(&whole, QE_RECIPE_DELAYED, QE_FORMAT_E4M3, 1, count, 0);
            quantized_init(&part, QE_RECIPE_DELAYED, QE_FORMAT_E4M3, 1, count, 0);
            qe_op op = {.kind = QE_OP_QUANTIZE, .args.quantize = {x, 1, count, whole.target}};
            op_run(level, &op);
            op.args.quantize.target = part.target;
            op.args.quantize.target.operand.codes = NULL;
            op_run(level, &op);
            op.args.quantize.target.operand.codes = part.target.operand.codes;
            op.args.quantize.target.retained.codes = NULL;
            op.args.quantize.target.amax = NULL;
            op_run(level, &op);
            assert_same_bits(whole.target.retained.codes, part.target.retained.codes, count);
            assert_same_bits(decoded_of(&whole), decoded_of(&part), count * sizeof(float));
            assert_int_equal(bits_from(whole.amax), bits_from(part.amax));
            quantized_deinit(&whole);
            quantized_deinit(&part);
            free(x);
        }
}

static void decode_gives_every_code_its_value_at_every_level(void **state) {
    (void)state;
    uint8_t codes[256];
    float scale_inv = 0.3f;
    for (int i = 0; i < 256; ++i) codes[i] = (uint8_t)i;
    /* dy' x with x = 1: the product of one row is the decoded row itself. */
    float one = 1.0f, scratch_x[1], scratch_dy[256], grad[256];
    for (int level = 0; level < LEVELS; ++level)
        for (int format = QE_FORMAT_E4M3; format <= QE_FORMAT_E5M2; ++format) {
            qe_op op = {.kind = QE_OP_LINEAR_WEIGHT_GRAD};
            op.args.linear_weight_grad =
                (qe_args_linear_weight_grad){.x = {&one, NULL, 1, 1, QE_FORMAT_FP32, QE_BLOCKING_TENSOR},
                                             .dy = {codes, &scale_inv, 1, 256, (uint8_t)format, QE_BLOCKING_TENSOR},
                                             .scratch_x = scratch_x,
                                             .scratch_dy = scratch_dy,
                                             .grad = grad,
                                             .rows = 1,
                                             .in = 1,
                                             .out = 256,
                                             .set = 1};
            op_run(level, &op);
            for (int i = 0; i < 256; ++i) {
                const float value = qe_fp8_decode((qe_format)format, (uint8_t)i) * scale_inv;
                if (isnan(value))
                    assert_true(isnan(scratch_dy[i]));
                else
                    assert_int_equal(bits_from(scratch_dy[i]), bits_from(value));
            }
        }
}

static void bf16_and_fp32_keep_what_the_codec_keeps(void **state) {
    (void)state;
    enum { COUNT = 70000 };
    float *x = floats_of(COUNT);
    uint64_t seed = 9;
    for (uint32_t i = 0; i < COUNT; ++i) x[i] = float_from(random_bits(&seed));
    for (int level = 0; level < LEVELS; ++level) {
        quantized half, full;
        quantized_init(&half, QE_RECIPE_BF16, QE_FORMAT_BF16, 7, COUNT / 7, 0);
        quantized_init(&full, QE_RECIPE_FP32, QE_FORMAT_FP32, 7, COUNT / 7, 0);
        qe_op op = {.kind = QE_OP_QUANTIZE, .args.quantize = {x, 7, COUNT / 7, half.target}};
        op_run(level, &op);
        op.args.quantize.target = full.target;
        op_run(level, &op);
        for (uint32_t i = 0; i < COUNT; ++i) {
            const uint16_t code = qe_bf16_encode(x[i]);
            assert_int_equal(((uint16_t *)half.target.retained.codes)[i], code);
            assert_int_equal(bits_from(decoded_of(&half)[i]), bits_from(qe_bf16_decode(code)));
        }
        assert_same_bits(decoded_of(&full), x, COUNT * sizeof(float));
        assert_same_bits(full.target.retained.codes, x, COUNT * sizeof(float));
        quantized_deinit(&half);
        quantized_deinit(&full);
    }
    free(x);
}

static void current_scaling_takes_its_scale_from_the_tensor_itself(void **state) {
    (void)state;
    const float peaks[] = {0.0f, 3.0f, INFINITY, NAN, 1e-42f};
    for (int level = 0; level < LEVELS; ++level)
        for (int peak = 0; peak < 5; ++peak) {
            float *x = random_floats(300, peak == 0 ? 0.0f : peak == 4 ? 1e-43f : 2.0f, 3);
            x[117] = peaks[peak];
            float amax = 0.0f;
            for (int i = 0; i < 300; ++i)
                if (fabsf(x[i]) > amax) amax = fabsf(x[i]);
            const float scale = qe_scale_from_amax(amax, 57344.0f, 0);
            quantized q;
            quantized_init(&q, QE_RECIPE_CURRENT, QE_FORMAT_E5M2, 3, 100, 0);
            qe_op op = {.kind = QE_OP_QUANTIZE, .args.quantize = {x, 3, 100, q.target}};
            op_run(level, &op);
            assert_int_equal(bits_from(q.target.retained.scale_inv[0]), bits_from(qe_scale_inverse(scale)));
            for (int i = 0; i < 300; ++i)
                assert_int_equal(((uint8_t *)q.target.retained.codes)[i], qe_fp8_encode(QE_FORMAT_E5M2, x[i] * scale));
            quantized_deinit(&q);
            free(x);
        }
}

/* The scale of every element's block of `tall` x `wide`, edges cut; plain loops. [rows, columns], the caller frees. */
static float *block_scales(const float *x, uint32_t rows, uint32_t columns, uint32_t tall, uint32_t wide) {
    float *scales = floats_of((size_t)rows * columns);
    for (uint32_t top = 0; top < rows; top += tall)
        for (uint32_t left = 0; left < columns; left += wide) {
            float amax = 0.0f;
            for (uint32_t r = top; r < rows && r < top + tall; ++r)
                for (uint32_t c = left; c < columns && c < left + wide; ++c)
                    amax = fmaxf(amax, fabsf(x[r * columns + c]));
            for (uint32_t r = top; r < rows && r < top + tall; ++r)
                for (uint32_t c = left; c < columns && c < left + wide; ++c)
                    scales[r * columns + c] = qe_scale_from_amax(amax, 448.0f, 1);
        }
    return scales;
}

static void check_block(int level, uint32_t rows, uint32_t columns, int is_weight) {
    float *x = random_floats((size_t)rows * columns, 1.0f, rows * 1000 + columns);
    for (uint32_t i = 0; i < rows * columns; ++i) x[i] *= float_from((100 + i * 7 % 50) << 23); /* blocks differ */
    quantized q;
    quantized_init(&q, QE_RECIPE_BLOCK, QE_FORMAT_E4M3, rows, columns, is_weight);
    qe_op op = {.kind = QE_OP_QUANTIZE, .args.quantize = {x, rows, columns, q.target}};
    if (is_weight) op = (qe_op){.kind = QE_OP_QUANTIZE_WEIGHT, .args.quantize_weight = {x, rows, columns, q.target}};
    op_run(level, &op);
    const uint8_t *codes = q.target.retained.codes;
    const uint32_t across = (columns + 127) / 128;
    float *keeps = block_scales(x, rows, columns, 128, is_weight ? 128 : 1);
    float *uses = block_scales(x, rows, columns, is_weight ? 128 : 1, 128);
    for (uint32_t row = 0; row < rows; ++row)
        for (uint32_t column = 0; column < columns; ++column) {
            const uint32_t at = row * columns + column;
            const float kept = keeps[at], used = uses[at];
            const float inverse =
                q.target.retained
                    .scale_inv[is_weight ? row / 128 * across + column / 128 : row / 128 * columns + column];
            assert_int_equal(bits_from(inverse), bits_from(1.0f / kept));
            assert_int_equal(codes[at], qe_fp8_encode(QE_FORMAT_E4M3, x[at] * kept));
            const float decoded = qe_fp8_decode(QE_FORMAT_E4M3, qe_fp8_encode(QE_FORMAT_E4M3, x[at] * used)) / used;
            assert_int_equal(bits_from(decoded_of(&q)[at]), bits_from(decoded));
        }
    free(keeps);
    free(uses);
    free(x);
    quantized_deinit(&q);
}

static void blocks_and_edge_blocks_have_their_own_scales(void **state) {
    (void)state;
    const uint32_t shapes[][2] = {{128, 128}, {1, 1}, {130, 129}, {127, 300}, {260, 65}, {5, 128}};
    for (int level = 0; level < LEVELS; ++level)
        for (int i = 0; i < 6; ++i) {
            check_block(level, shapes[i][0], shapes[i][1], 0);
            check_block(level, shapes[i][0], shapes[i][1], 1);
        }
}

/* What decode makes of retained blocks, seen through the weight gradient's scratch. */
static void retained_blocks_decode_with_the_scale_of_their_block(void **state) {
    (void)state;
    enum { ROWS = 150, COLUMNS = 140 };
    float *x = random_floats(ROWS * COLUMNS, 3.0f, 8), *scratch = floats_of(ROWS * COLUMNS);
    float ones[ROWS], scratch_one[ROWS], grad[COLUMNS];
    for (int i = 0; i < ROWS; ++i) ones[i] = 1.0f;
    for (int level = 0; level < LEVELS; ++level)
        for (int is_weight = 0; is_weight < 2; ++is_weight) {
            quantized q;
            quantized_init(&q, QE_RECIPE_BLOCK, QE_FORMAT_E4M3, ROWS, COLUMNS, is_weight);
            qe_op fill = {.kind = QE_OP_QUANTIZE, .args.quantize = {x, ROWS, COLUMNS, q.target}};
            if (is_weight)
                fill = (qe_op){.kind = QE_OP_QUANTIZE_WEIGHT, .args.quantize_weight = {x, ROWS, COLUMNS, q.target}};
            op_run(level, &fill);
            qe_op op = {.kind = QE_OP_LINEAR_WEIGHT_GRAD};
            op.args.linear_weight_grad =
                (qe_args_linear_weight_grad){.x = {ones, NULL, ROWS, 1, QE_FORMAT_FP32, QE_BLOCKING_TENSOR},
                                             .dy = q.target.retained,
                                             .scratch_x = scratch_one,
                                             .scratch_dy = scratch,
                                             .grad = grad,
                                             .rows = ROWS,
                                             .in = 1,
                                             .out = COLUMNS,
                                             .set = 1};
            op_run(level, &op);
            float *scales = block_scales(x, ROWS, COLUMNS, 128, is_weight ? 128 : 1);
            for (uint32_t at = 0; at < ROWS * COLUMNS; ++at) {
                const uint8_t code = qe_fp8_encode(QE_FORMAT_E4M3, x[at] * scales[at]);
                assert_int_equal(bits_from(scratch[at]), bits_from(qe_fp8_decode(QE_FORMAT_E4M3, code) / scales[at]));
            }
            free(scales);
            quantized_deinit(&q);
        }
    free(x);
    free(scratch);
}

/* Bytes of retained codes, or of whatever a format keeps in their place. */
static void assert_same_quantized(const quantized *a, const quantized *b, size_t count) {
    const qe_qtensor *x = &a->target.retained, *y = &b->target.retained;
    assert_same_bits(decoded_of(a), decoded_of(b), count * sizeof(float));
    assert_same_bits(x->codes, y->codes, count * qe_format_bytes((qe_format)x->format));
    if (x->scale_inv) assert_same_bits(x->scale_inv, y->scale_inv, count * sizeof(float));
    assert_int_equal(bits_from(a->amax), bits_from(b->amax));
}

/* keeps: what of the target is set; 1 the operand, 2 the retained codes. */
static void check_norm_backward(int level, uint8_t recipe, uint8_t format, int keeps) {
    enum { ROWS = 133, HIDDEN = 139, COUNT = ROWS * HIDDEN };
    float *dy = random_floats(COUNT, 1.0f, 1), *x = random_floats(COUNT, 2.0f, 2), *rstd = random_floats(ROWS, 1.0f, 3);
    float *gain = random_floats(HIDDEN, 1.5f, 4), *residual = random_floats(COUNT, 1.0f, 5);
    float *dx[2] = {floats_of(COUNT), floats_of(COUNT)}, *grad[2] = {floats_of(HIDDEN), floats_of(HIDDEN)};
    quantized q[2];
    for (int i = 0; i < 2; ++i) quantized_init(&q[i], recipe, format, ROWS, HIDDEN, 0);
    q[0].scale = q[1].scale = 3.7f;
    qe_op op = {.kind = QE_OP_NORM_BACKWARD,
                .args.norm_backward = {.dy = dy, .x = x, .rstd = rstd, .gain = gain, .residual = residual, .dx = dx[0],
                                       .gain_grad = grad[0], .rows = ROWS, .hidden = HIDDEN, .set = 1}};
    op_run(level, &op);
    qe_op quantize = {.kind = QE_OP_QUANTIZE,
                      .args.quantize = {.x = dx[0], .rows = ROWS, .columns = HIDDEN, .target = q[0].target}};
    if (!(keeps & 1)) quantize.args.quantize.target.operand.codes = NULL;
    if (!(keeps & 2)) quantize.args.quantize.target.retained.codes = NULL;
    op_run(level, &quantize);
    op.args.norm_backward.dx = dx[1];
    op.args.norm_backward.gain_grad = grad[1];
    op.args.norm_backward.target = quantize.args.quantize.target;
    op.args.norm_backward.target.operand.codes = keeps & 1 ? decoded_of(&q[1]) : NULL;
    op.args.norm_backward.target.retained.codes = keeps & 2 ? q[1].target.retained.codes : NULL;
    op.args.norm_backward.target.retained.scale_inv = q[1].target.retained.scale_inv;
    op.args.norm_backward.target.scale = q[1].target.scale;
    op.args.norm_backward.target.amax = q[1].target.amax;
    op_run(level, &op);
    assert_same_bits(dx[1], dx[0], COUNT * sizeof(float));
    assert_same_bits(grad[1], grad[0], HIDDEN * sizeof(float));
    assert_same_quantized(&q[1], &q[0], COUNT);
    for (int i = 0; i < 2; ++i) quantized_deinit(&q[i]), free(dx[i]), free(grad[i]);
    free(dy), free(x), free(rstd), free(gain), free(residual);
}

static void a_norms_gradient_quantized_at_once_has_the_bits_of_one_quantized_after(void **state) {
    (void)state;
    static const uint8_t kinds[][2] = {
        {QE_RECIPE_DELAYED, QE_FORMAT_E4M3}, {QE_RECIPE_DELAYED, QE_FORMAT_E5M2}, {QE_RECIPE_CURRENT, QE_FORMAT_E5M2},
        {QE_RECIPE_BLOCK, QE_FORMAT_E4M3},   {QE_RECIPE_BF16, QE_FORMAT_BF16},    {QE_RECIPE_FP32, QE_FORMAT_FP32},
    };
    for (int level = 0; level < LEVELS; ++level)
        for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; ++kind)
            for (int keeps = 1; keeps <= 3; ++keeps) check_norm_backward(level, kinds[kind][0], kinds[kind][1], keeps);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_bf16_value_quantizes_as_the_codec_says_at_every_level),
        cmocka_unit_test(random_bit_patterns_quantize_as_the_codec_says_at_every_level),
        cmocka_unit_test(odd_lengths_and_missing_outputs_give_the_same_values),
        cmocka_unit_test(decode_gives_every_code_its_value_at_every_level),
        cmocka_unit_test(bf16_and_fp32_keep_what_the_codec_keeps),
        cmocka_unit_test(current_scaling_takes_its_scale_from_the_tensor_itself),
        cmocka_unit_test(blocks_and_edge_blocks_have_their_own_scales),
        cmocka_unit_test(retained_blocks_decode_with_the_scale_of_their_block),
        cmocka_unit_test(a_norms_gradient_quantized_at_once_has_the_bits_of_one_quantized_after),
    };
    return cmocka_run_group_tests(tests, devices_open, devices_close);
}
