/* test_te.c - the te backend: what Transformer Engine throws comes back in words, which ops it is given, and, on a
 * GPU, its products.
 *
 *   test_te   exit status 0, 1 when something does not hold, 77 where there is no Transformer Engine or no GPU; what
 *             needs no GPU is held first */
#include <cmocka.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/te/ops.h"
#include "qeffect/cuda.h"
#include "qeffect/te.h"
#include "te_products.h"

enum { SKIPPED = 77, PATH_BYTES = 512 };

/* Never followed: Transformer Engine refuses before it looks. */
static void *const somewhere = (void *)(uintptr_t)4096;

static qe_te_tensor activation(uint32_t rows, uint32_t columns) {
    return (qe_te_tensor){.by_rows = somewhere, .rows = rows, .columns = columns, .format = QE_FORMAT_BF16};
}

static qe_te_tensor codes(uint32_t rows, uint32_t columns) {
    return (qe_te_tensor){.by_rows = somewhere, .by_columns = somewhere, .scale = somewhere, .amax = somewhere,
                          .scale_inv = somewhere, .rows = rows, .columns = columns, .format = QE_FORMAT_E4M3};
}

static void must_say(qe_status status, const qe_error *error, const char *words) {
    if (status != QE_ERROR_DEVICE || strstr(error->message, words) == NULL)
        printf("status %d, \"%s\", and not: %s\n", (int)status, error->message, words);
    assert_int_equal(status, QE_ERROR_DEVICE);
    assert_non_null(strstr(error->message, "Transformer Engine"));
    assert_non_null(strstr(error->message, words));
}

static void what_is_thrown_comes_back_in_words(const qe_te_library *library) {
    qe_error error = {0};
    const qe_te_tensor values = activation(16, 32), wide = activation(16, 64), narrow = activation(16, 48);
    const qe_te_tensor to = codes(16, 48), none = {.rows = 16, .columns = 32, .format = QE_FORMAT_E4M3};
    must_say(qe_te_quantize(library, &values, &to, NULL, &error), &error, "shapes do not match");
    must_say(qe_te_quantize(library, &values, &none, NULL, &error), &error, "need to be allocated");
    must_say(qe_te_swiglu(library, &wide, &to, NULL, &error), &error, "Wrong output shape");
    must_say(qe_te_swiglu_backward(library, &values, &narrow, &to, NULL, &error), &error, "Wrong dimension");
    qe_te_product product = {.a = values, .b = narrow, .result = values, .turn_a = 1};
    must_say(qe_te_multiply(library, &product, NULL, &error), &error, "incompatible dimensions");
    product.b = values, product.a.by_rows = NULL;
    must_say(qe_te_multiply(library, &product, NULL, &error), &error, "");
    assert_int_equal(qe_te_quantize(library, &values, &to, NULL, NULL), QE_ERROR_DEVICE); /* and without a place */
    puts("te: what is thrown comes back as a status");
}

static void a_library_that_is_not_there_is_refused_in_words(void) {
    qe_te_library *library = NULL;
    qe_error error = {0};
    assert_int_equal(qe_te_library_open("/nowhere/libtransformer_engine.so", &library, &error), QE_ERROR_UNSUPPORTED);
    assert_true(library == NULL);
    assert_non_null(strstr(error.message, "/nowhere/libtransformer_engine.so"));
    assert_true(error.remedy[0] != 0);
}

/* --- which ops ------------------------------------------------------------------------------------------------- */

static qe_op quantize_op(qe_recipe_kind recipe) {
    qe_op op = {.kind = QE_OP_QUANTIZE};
    qe_args_quantize *args = &op.args.quantize;
    *args = (qe_args_quantize){.x = somewhere, .rows = 64, .columns = 128};
    args->target = (qe_quantize_target){.recipe = (uint8_t)recipe, .format = QE_FORMAT_E4M3, .scale = somewhere};
    args->target.operand = (qe_qtensor){.codes = somewhere, .scale_inv = somewhere, .rows = 64, .columns = 128,
                                        .format = QE_FORMAT_E4M3};
    args->target.retained = args->target.operand;
    args->target.retained.transposed = 1;
    return op;
}

static void a_target_is_taken_as_transformer_engine_writes_it(void) {
    qe_op op = quantize_op(QE_RECIPE_DELAYED);
    assert_true(qe_te_takes(&op));
    op.args.quantize.target.retained.codes = NULL; /* evaluation */
    assert_true(qe_te_takes(&op));
    op = quantize_op(QE_RECIPE_DELAYED);
    op.args.quantize.target.operand.codes = NULL; /* by columns alone */
    assert_false(qe_te_takes(&op));
    op = quantize_op(QE_RECIPE_DELAYED);
    op.args.quantize.target.retained.transposed = 0;
    assert_false(qe_te_takes(&op));
    op = quantize_op(QE_RECIPE_DELAYED);
    op.args.quantize.target.retained.scale_inv = somewhere + 64; /* two words */
    assert_false(qe_te_takes(&op));
    op = quantize_op(QE_RECIPE_DELAYED);
    op.args.quantize.columns = 120;
    assert_false(qe_te_takes(&op));
    op = quantize_op(QE_RECIPE_CURRENT);
    assert_true(qe_te_takes(&op));
    for (qe_recipe_kind recipe = QE_RECIPE_BLOCK; recipe <= QE_RECIPE_FP32; recipe++) {
        op = quantize_op(recipe);
        assert_false(qe_te_takes(&op));
    }
}

static void swiglu_is_taken_under_delayed_scaling(void) {
    for (qe_recipe_kind recipe = QE_RECIPE_DELAYED; recipe <= QE_RECIPE_FP32; recipe++) {
        const qe_op from = quantize_op(recipe);
        qe_op forward = {.kind = QE_OP_SWIGLU_QUANTIZE}, backward = {.kind = QE_OP_SWIGLU_BACKWARD_QUANTIZE};
        forward.args.swiglu.target = backward.args.swiglu_backward.target = from.args.quantize.target;
        assert_int_equal(qe_te_takes(&forward), recipe == QE_RECIPE_DELAYED);
        assert_int_equal(qe_te_takes(&backward), recipe == QE_RECIPE_DELAYED);
        backward.args.swiglu_backward.target.retained.codes = NULL;
        assert_false(qe_te_takes(&backward));
    }
}

static void products_of_fp32_and_of_blocks_are_not_taken(void) {
    static const struct {
        uint8_t format, blocking, transposed, takes;
    } cases[] = {{QE_FORMAT_E4M3, QE_BLOCKING_TENSOR, 1, 1}, {QE_FORMAT_E5M2, QE_BLOCKING_TENSOR, 1, 1},
                 {QE_FORMAT_BF16, QE_BLOCKING_TENSOR, 0, 1}, {QE_FORMAT_E4M3, QE_BLOCKING_TENSOR, 0, 0},
                 {QE_FORMAT_FP32, QE_BLOCKING_TENSOR, 0, 0}, {QE_FORMAT_E4M3, QE_BLOCKING_COLUMN, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qe_op op = {.kind = QE_OP_LINEAR_WEIGHT_GRAD};
        qe_qtensor tensor = {.codes = somewhere, .rows = 64, .columns = 64, .format = cases[i].format,
                             .blocking = cases[i].blocking, .transposed = cases[i].transposed};
        op.args.linear_weight_grad = (qe_args_linear_weight_grad){.x = tensor, .dy = tensor, .rows = 64, .in = 64,
                                                                  .out = 64};
        assert_int_equal(qe_te_takes(&op), cases[i].takes);
    }
}

static void attention_is_taken_with_a_head_of_keys_for_each_of_queries(void) {
    static const struct {
        uint32_t sequence, heads, kv_heads, head_dim, takes;
    } cases[] = {{128, 8, 8, 64, 1}, {384, 8, 8, 128, 1}, {128, 8, 2, 64, 0}, {128, 8, 8, 96, 0}, {160, 8, 8, 64, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qe_op op = {.kind = QE_OP_ATTENTION}, back = {.kind = QE_OP_ATTENTION_BACKWARD};
        op.args.attention = (qe_args_attention){.sequences = 1, .sequence = cases[i].sequence, .heads = cases[i].heads,
                                                .kv_heads = cases[i].kv_heads, .head_dim = cases[i].head_dim};
        back.args.attention_backward = (qe_args_attention_backward){
            .out = somewhere, .sequences = 1, .sequence = cases[i].sequence, .heads = cases[i].heads,
            .kv_heads = cases[i].kv_heads, .head_dim = cases[i].head_dim};
        assert_int_equal(qe_te_takes(&op), cases[i].takes);
        assert_int_equal(qe_te_takes(&back), cases[i].takes);
    }
}

static void ops_without_a_kernel_of_its_kind_are_the_cuda_backends(void) {
    for (qe_op_kind kind = QE_OP_EMBED; kind < QE_OP_KINDS; kind++) {
        const qe_op op = {.kind = kind};
        const int products = kind >= QE_OP_LINEAR && kind <= QE_OP_LINEAR_WEIGHT_GRAD;
        assert_false(!products && qe_te_takes(&op)); /* and none without its addresses */
    }
}

/* --- */

static int gpu_open(qe_device **te_out, qe_device **cuda_out) {
    qe_error error = {0};
    if (qe_te_backend()->open(te_out, &error) != QE_OK) {
        printf("skipped what needs a GPU: %s\n", error.message);
        return 0;
    }
    assert_int_equal(qe_cuda_backend()->open(cuda_out, &error), QE_OK);
    printf("%s\n", qe_te_backend()->identity(*te_out));
    assert_non_null(strstr(qe_te_backend()->identity(*te_out), "te NVIDIA"));
    assert_non_null(strstr(qe_te_backend()->identity(*te_out), "Transformer Engine"));
    return 1;
}

static int gpu_checks(void) {
    qe_device *te = NULL, *cuda = NULL;
    if (!gpu_open(&te, &cuda)) return SKIPPED;
    products_of_whole_numbers_are_the_cuda_backends(te, cuda);
    a_product_has_the_same_bits_wherever_it_lies(te);
    a_captured_product_has_the_bits_of_an_eager_one(te);
    captured_attention_has_the_bits_of_an_eager_one(te);
    a_product_that_no_matrix_unit_computes_is_refused_in_words(te);
    what_is_thrown_gives_up_the_op_and_not_the_device(te);
    qe_cuda_backend()->close(cuda);
    qe_te_backend()->close(te);
    return 0;
}

static qe_te_library *library_of(const char *folder) {
    char path[PATH_BYTES];
    qe_te_library *library = NULL;
    qe_error error = {0};
    snprintf(path, sizeof path, "%s/transformer_engine/wheel_lib/libtransformer_engine.so", folder);
    if (qe_te_library_open(path, &library, &error) != QE_OK) printf("skipped: %s\n", error.message);
    return library;
}

int main(void) {
    const char *folder = getenv("QE_TE");
    setvbuf(stdout, NULL, _IOLBF, 0);
    a_target_is_taken_as_transformer_engine_writes_it();
    swiglu_is_taken_under_delayed_scaling();
    products_of_fp32_and_of_blocks_are_not_taken();
    attention_is_taken_with_a_head_of_keys_for_each_of_queries();
    ops_without_a_kernel_of_its_kind_are_the_cuda_backends();
    a_library_that_is_not_there_is_refused_in_words();
    qe_te_library *library = library_of(folder != NULL ? folder : QE_TE_FOLDER);
    if (library == NULL) return SKIPPED;
    what_is_thrown_comes_back_in_words(library);
    qe_te_library_close(library);
    return gpu_checks();
}
