/* The linear layer in FP8: y = Q(X) Q(W)', dX = Q(dY) Q(W), dW = Q(dY)' Q(X), each operand quantized on its own. Once
 * with operands whose products are exact in fp32, against integer arithmetic; once bit for bit against cblas called
 * directly on operands that this test decodes with the one-value codec. */
#include <dlfcn.h>

#include "devices.h"

typedef void sgemm_function(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                            const float *b, int ldb, float beta, float *c, int ldc);

enum { ROWS = 48, IN = 40, OUT = 56 };

/* One tensor of the layer: what was given, and what quantization must make of it. */
typedef struct operand {
    quantized q;
    float *given;
    float *expected; /* decode(encode(given * scale)) / scale, by the codec */
    size_t count;
} operand;

static operand operand_of(int level, uint32_t rows, uint32_t columns, qe_format format, float scale, float *given,
                          int is_weight) {
    operand o = {.given = given, .count = (size_t)rows * columns, .expected = floats_of((size_t)rows * columns)};
    quantized_init(&o.q, QE_RECIPE_DELAYED, (uint8_t)format, rows, columns, is_weight);
    o.q.scale = scale;
    o.q.target.scale = &scale;
    o.q.target.amax = NULL;
    qe_op op = {.kind = QE_OP_QUANTIZE, .args.quantize = {given, rows, columns, o.q.target}};
    if (is_weight)
        op = (qe_op){.kind = QE_OP_QUANTIZE_WEIGHT, .args.quantize_weight = {given, rows, columns, o.q.target}};
    op_run(level, &op);
    o.q.target.scale = NULL; /* it was this function's */
    for (size_t i = 0; i < o.count; ++i)
        o.expected[i] = qe_fp8_decode(format, qe_fp8_encode(format, given[i] * scale)) * qe_scale_inverse(scale);
    return o;
}

static void operand_free(operand *o) {
    quantized_deinit(&o->q);
    free(o->given);
    free(o->expected);
}

typedef struct layer {
    operand x, w, dy;
    float y[ROWS * OUT], dx[ROWS * IN], grad[OUT * IN], scratch_x[ROWS * IN], scratch_dy[ROWS * OUT];
} layer;

static void layer_run(layer *l, int level) {
    qe_op op = {.kind = QE_OP_LINEAR,
                .args.linear = {.x = l->x.q.target.operand, .w = l->w.q.target.operand, .y = l->y, .rows = ROWS,
                                .in = IN, .out = OUT}};
    op_run(level, &op);
    op = (qe_op){.kind = QE_OP_LINEAR_INPUT_GRAD,
                 .args.linear_input_grad = {.dy = l->dy.q.target.operand, .w = l->w.q.target.operand, .dx = l->dx,
                                            .rows = ROWS, .in = IN, .out = OUT}};
    op_run(level, &op);
    op = (qe_op){.kind = QE_OP_LINEAR_WEIGHT_GRAD,
                 .args.linear_weight_grad = {l->x.q.target.retained, l->dy.q.target.retained, l->scratch_x,
                                             l->scratch_dy, l->grad, NULL, ROWS, IN, OUT, 0}};
    op_run(level, &op);
}

/* Multiples of 1/8 below 4, most of which an 8-bit format must round; what it rounds to are still small dyadic
 * numbers, so that every product and every partial sum is exact in fp32. */
static float *dyadic_floats(size_t count, uint64_t seed) {
    float *values = floats_of(count);
    for (size_t i = 0; i < count; ++i) values[i] = (float)((int)(random_bits(&seed) % 63) - 31) / 8.0f;
    return values;
}

static void an_fp8_linear_is_exactly_the_product_of_its_quantized_operands(void **state) {
    (void)state;
    for (int level = 0; level < LEVELS; ++level) {
        layer *l = calloc(1, sizeof *l);
        l->x = operand_of(level, ROWS, IN, QE_FORMAT_E4M3, 4.0f, dyadic_floats(ROWS * IN, 1), 0);
        l->w = operand_of(level, OUT, IN, QE_FORMAT_E4M3, 16.0f, dyadic_floats(OUT * IN, 2), 1);
        l->dy = operand_of(level, ROWS, OUT, QE_FORMAT_E5M2, 2.0f, dyadic_floats(ROWS * OUT, 3), 0);
        for (int i = 0; i < OUT * IN; ++i) l->grad[i] = 5.0f; /* an earlier deposit */
        layer_run(l, level);
        size_t rounded = 0;
        for (size_t i = 0; i < l->dy.count; ++i) rounded += l->dy.expected[i] != l->dy.given[i];
        assert_true(rounded > l->dy.count / 4); /* else nothing is tested */
        for (int r = 0; r < ROWS; ++r)
            for (int o = 0; o < OUT; ++o) {
                double sum = 0.0;
                for (int i = 0; i < IN; ++i)
                    sum += (double)l->x.expected[r * IN + i] * (double)l->w.expected[o * IN + i];
                assert_true((double)l->y[r * OUT + o] == sum);
            }
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < IN; ++i) {
                double sum = 0.0;
                for (int o = 0; o < OUT; ++o)
                    sum += (double)l->dy.expected[r * OUT + o] * (double)l->w.expected[o * IN + i];
                assert_true((double)l->dx[r * IN + i] == sum);
            }
        for (int o = 0; o < OUT; ++o)
            for (int i = 0; i < IN; ++i) {
                double sum = 5.0;
                for (int r = 0; r < ROWS; ++r)
                    sum += (double)l->dy.expected[r * OUT + o] * (double)l->x.expected[r * IN + i];
                assert_true((double)l->grad[o * IN + i] == sum);
            }
        operand_free(&l->x), operand_free(&l->w), operand_free(&l->dy);
        free(l);
    }
}

/* The library that the device loaded already, with the core that it chose. */
static sgemm_function *sgemm_of_the_process(void) {
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_NOLOAD);
    assert_non_null(library);
    void *symbol = dlsym(library, "cblas_sgemm");
    sgemm_function *sgemm;
    memcpy(&sgemm, &symbol, sizeof sgemm);
    assert_non_null(sgemm);
    return sgemm;
}

static void an_fp8_linear_is_bit_for_bit_blas_on_operands_decoded_by_the_codec(void **state) {
    (void)state;
    sgemm_function *sgemm = sgemm_of_the_process();
    for (int level = 0; level < LEVELS; ++level) {
        layer *l = calloc(1, sizeof *l);
        float *y = floats_of(ROWS * OUT), *dx = floats_of(ROWS * IN), *grad = random_floats(OUT * IN, 1.0f, 9);
        l->x = operand_of(level, ROWS, IN, QE_FORMAT_E4M3, 37.7f, random_floats(ROWS * IN, 3.0f, 1), 0);
        l->w = operand_of(level, OUT, IN, QE_FORMAT_E4M3, 811.3f, random_floats(OUT * IN, 0.5f, 2), 1);
        l->dy = operand_of(level, ROWS, OUT, QE_FORMAT_E5M2, 9e5f, random_floats(ROWS * OUT, 1e-2f, 3), 0);
        memcpy(l->grad, grad, sizeof l->grad);
        layer_run(l, level);
        sgemm(101, 111, 112, ROWS, OUT, IN, 1.0f, l->x.expected, IN, l->w.expected, IN, 0.0f, y, OUT);
        sgemm(101, 111, 111, ROWS, IN, OUT, 1.0f, l->dy.expected, OUT, l->w.expected, IN, 0.0f, dx, IN);
        sgemm(101, 112, 111, OUT, IN, ROWS, 1.0f, l->dy.expected, OUT, l->x.expected, IN, 1.0f, grad, IN);
        assert_same_bits(l->y, y, sizeof l->y);
        assert_same_bits(l->dx, dx, sizeof l->dx);
        assert_same_bits(l->grad, grad, sizeof l->grad);
        free(y), free(dx), free(grad);
        operand_free(&l->x), operand_free(&l->w), operand_free(&l->dy);
        free(l);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_fp8_linear_is_exactly_the_product_of_its_quantized_operands),
        cmocka_unit_test(an_fp8_linear_is_bit_for_bit_blas_on_operands_decoded_by_the_codec),
    };
    return cmocka_run_group_tests(tests, devices_open, devices_close);
}
