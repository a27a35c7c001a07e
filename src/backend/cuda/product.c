/* product.c - see product.h. A weight gradient has one choice for its first deposit (beta = 0) and for later ones
 * (beta = 1): so adding to a zeroed gradient and setting it are the same sums, wherever a plan places the deposit. */
#include "backend/cuda/product.h"

#include <stdio.h>
#include <string.h>

#include "base/assert.h"

static const char *const FORMAT_NAMES[] = {"e4m3", "e5m2", "bf16", "fp32"};
static const char *const ACCUMULATION_NAMES[] = {"fast", "split"};
/* cuBLAS's words for how its first and second operand (our second and first) lie. */
static const char *const FORM_NAMES[2][2] = {{"nt", "nn"}, {"tt", "tn"}}; /* [second_along][first_along] */

enum { CODE_MULTIPLE = 16 }; /* bytes: what the matrix unit loads at a time along k, and stores along n */

static int is_code(uint8_t format) { return format == QE_FORMAT_E4M3 || format == QE_FORMAT_E5M2; }

static int is_block(const qe_qtensor *tensor) {
    return is_code(tensor->format) && tensor->blocking != QE_BLOCKING_TENSOR;
}

int qe_product_decodes(const qe_args_linear_weight_grad *args) { return is_block(&args->x) || is_block(&args->dy); }

qe_format qe_product_result(const qe_product *product) {
    if (product->kind == QE_OP_LINEAR_WEIGHT_GRAD || product->first == QE_FORMAT_FP32) return QE_FORMAT_FP32;
    return QE_FORMAT_BF16;
}

static qe_product linear_product(const qe_args_linear *args) {
    return (qe_product){
        .m = args->rows, .n = args->out, .k = args->in,
        .first = args->x.format, .second = args->w.format,
        .first_along = !args->x.transposed, .second_along = !args->w.transposed,
        .accumulation = args->accumulation,
        /* fp32 products are rounded to bf16 by a kernel of ours, which adds the residual too */
        .adds = args->residual != NULL && args->x.format != QE_FORMAT_FP32,
    };
}

static qe_product input_grad_product(const qe_args_linear_input_grad *args) {
    return (qe_product){
        .m = args->rows, .n = args->in, .k = args->out,
        .first = args->dy.format, .second = args->w.format,
        .first_along = !args->dy.transposed, .second_along = args->w.transposed != 0,
        .accumulation = args->accumulation,
    };
}

static qe_product weight_grad_product(const qe_args_linear_weight_grad *args) {
    qe_product product = {.m = args->out, .n = args->in, .k = args->rows, .accumulation = args->accumulation,
                          .adds = 1};
    if (qe_product_decodes(args)) {
        product.first = product.second = QE_FORMAT_BF16;
        return product;
    }
    product.first = args->dy.format;
    product.second = args->x.format;
    product.first_along = args->dy.transposed != 0;
    product.second_along = args->x.transposed != 0;
    return product;
}

static qe_status code_check(const qe_product *product, qe_error *error_out) {
    if (product->first == QE_FORMAT_E5M2 && product->second == QE_FORMAT_E5M2)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "quantize one of the two to E4M3",
                            "no matrix unit multiplies two E5M2 matrices");
    if (!product->first_along || !product->second_along)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "retain 8-bit codes transposed where the product needs it",
                            "8-bit operands must lie along the dimension that the product sums over");
    if (product->m % CODE_MULTIPLE || product->n % CODE_MULTIPLE || product->k % CODE_MULTIPLE)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                            "choose sizes (hidden, ffn, heads, tokens of a microbatch) that are multiples of 16, or "
                            "the recipe bf16",
                            "8-bit products need multiples of %d, not %u x %u x %u", CODE_MULTIPLE, product->m,
                            product->n, product->k);
    return QE_OK;
}

static qe_status product_check(const qe_product *product, qe_error *error_out) {
    if (product->m == 0 || product->n == 0 || product->k == 0)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "an empty product: %u x %u x %u", product->m,
                            product->n, product->k);
    if (product->first > QE_FORMAT_FP32 || product->second > QE_FORMAT_FP32 ||
        product->accumulation > QE_ACCUMULATE_SPLIT)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "an unknown format or accumulation");
    if (is_code(product->first) && is_code(product->second)) return code_check(product, error_out);
    if (product->first != product->second)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "give both operands one width",
                            "a product of %s and %s", FORMAT_NAMES[product->first], FORMAT_NAMES[product->second]);
    return QE_OK;
}

qe_status qe_product_of(const qe_op *op, qe_product *product_out, qe_error *error_out) {
    qe_product product;
    switch (op->kind) {
        case QE_OP_LINEAR:
            product = linear_product(&op->args.linear);
            break;
        case QE_OP_LINEAR_INPUT_GRAD:
            product = input_grad_product(&op->args.linear_input_grad);
            break;
        case QE_OP_LINEAR_WEIGHT_GRAD:
            product = weight_grad_product(&op->args.linear_weight_grad);
            break;
        default:
            return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "%s is no matrix product", qe_op_name(op->kind));
    }
    product.kind = (uint8_t)op->kind;
    if (!is_code(product.first)) product.accumulation = QE_ACCUMULATE_SPLIT;
    const qe_status status = product_check(&product, error_out);
    if (status == QE_OK) *product_out = product;
    return status;
}

static void weight_grad_data(const qe_args_linear_weight_grad *args, qe_product_data *data) {
    const int decodes = qe_product_decodes(args);
    *data = (qe_product_data){
        .first = decodes ? args->scratch_dy : args->dy.codes,
        .second = decodes ? args->scratch_x : args->x.codes,
        .first_scale = decodes ? NULL : args->dy.scale_inv,
        .second_scale = decodes ? NULL : args->x.scale_inv,
        .added = args->grad,
        .result = args->grad,
        .beta = args->set ? 0.0f : 1.0f,
    };
}

void qe_product_data_of(const qe_op *op, qe_product_data *data_out) {
    if (op->kind == QE_OP_LINEAR) {
        const qe_args_linear *args = &op->args.linear;
        *data_out = (qe_product_data){args->x.codes, args->w.codes, args->x.scale_inv, args->w.scale_inv,
                                      args->residual ? args->residual : args->y, args->y,
                                      args->residual ? 1.0f : 0.0f};
    } else if (op->kind == QE_OP_LINEAR_INPUT_GRAD) {
        const qe_args_linear_input_grad *args = &op->args.linear_input_grad;
        *data_out = (qe_product_data){args->dy.codes, args->w.codes, args->dy.scale_inv, args->w.scale_inv,
                                      args->dx, args->dx, 0.0f};
    } else {
        weight_grad_data(&op->args.linear_weight_grad, data_out);
    }
}

void qe_product_key(const qe_product *product, char key[QE_PRODUCT_KEY_BYTES]) {
    (void)snprintf(key, QE_PRODUCT_KEY_BYTES, "%s m%u n%u k%u %s %s %s %s%s", qe_op_name((qe_op_kind)product->kind),
                   product->m, product->n, product->k, FORM_NAMES[product->second_along][product->first_along],
                   FORMAT_NAMES[product->first], FORMAT_NAMES[product->second],
                   ACCUMULATION_NAMES[product->accumulation], product->adds ? " add" : "");
}

static int word_index(const char *word, const char *const *words, int count) {
    for (int i = 0; i < count; ++i)
        if (strcmp(word, words[i]) == 0) return i;
    return -1;
}

static int kind_of(const char *word) {
    static const qe_op_kind kinds[] = {QE_OP_LINEAR, QE_OP_LINEAR_INPUT_GRAD, QE_OP_LINEAR_WEIGHT_GRAD};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; ++i)
        if (strcmp(word, qe_op_name(kinds[i])) == 0) return (int)kinds[i];
    return -1;
}

/* Takes the text apart without judging it: the caller writes what it found and compares. */
static int key_scan(const char *key, qe_product *product) {
    char kind[24], form[4], first[8], second[8], accumulation[8];
    if (sscanf(key, "%23s m%u n%u k%u %3s %7s %7s %7s", kind, &product->m, &product->n, &product->k, form, first,
               second, accumulation) != 8)
        return 0;
    const int found[] = {kind_of(kind), word_index(form, &FORM_NAMES[0][0], 4), word_index(first, FORMAT_NAMES, 4),
                         word_index(second, FORMAT_NAMES, 4), word_index(accumulation, ACCUMULATION_NAMES, 2)};
    for (size_t i = 0; i < sizeof found / sizeof found[0]; ++i)
        if (found[i] < 0) return 0;
    product->kind = (uint8_t)found[0];
    product->second_along = (uint8_t)(found[1] / 2);
    product->first_along = (uint8_t)(found[1] % 2);
    product->first = (uint8_t)found[2];
    product->second = (uint8_t)found[3];
    product->accumulation = (uint8_t)found[4];
    return 1;
}

qe_status qe_product_parse(const char *key, qe_product *product_out, qe_error *error_out) {
    static const char add[] = " add";
    const size_t length = strlen(key);
    qe_product product = {.adds = length > sizeof add && strcmp(key + length - (sizeof add - 1), add) == 0};
    char again[QE_PRODUCT_KEY_BYTES] = "";
    const int scanned = key_scan(key, &product);
    if (scanned) qe_product_key(&product, again);
    if (!scanned || strcmp(key, again) != 0)
        return qe_error_set(error_out, QE_ERROR_FORMAT, NULL,
                            "\"%s\" names no product, as \"linear m2048 n6144 k4096 tn e4m3 e4m3 fast\" does", key);
    QE_TRY(product_check(&product, error_out));
    *product_out = product;
    return QE_OK;
}
