/* fused_choice.c - see fused_choice.h. Words of parts apart are zeros: the product has a line of its own. */
#include "backend/cuda/fused_choice.h"

#include <stdio.h>
#include <string.h>

#include "base/assert.h"

static const char PREFIX[] = "fused ", BETWEEN[] = " to ";
static const char *const RESULT_NAMES[QE_FUSED_RESULTS] = {"e4m3", "e5m2", "rope"};
/* "QFUSEOWN" */
static const uint64_t TAG = 0x51465553454F574Eu;

static uint8_t result_of(const qe_op *op) {
    switch (op->kind) {
        case QE_OP_LINEAR: return op->args.linear.target.format;
        case QE_OP_LINEAR_ROPE: return QE_FUSED_ROPE;
        default: return op->args.linear_input_grad.target.format;
    }
}

void qe_fused_shape_of(const qe_op *op, const qe_product *product, qe_fused_shape *shape_out) {
    *shape_out = (qe_fused_shape){.product = *product, .result = result_of(op)};
    if (op->kind == QE_OP_LINEAR_ROPE) shape_out->head_dim = op->args.linear_rope.head_dim;
}

/* --- an op of a shape -------------------------------------------------------------------------------------------- */

enum { FIRST, FIRST_SCALE, SECOND, SECOND_SCALE, RESULT, SWIGLU, SCALE, CODES, CODES_SCALE, TURNED, TURNED_SCALE,
       COSINE, SINE };
/* More than any address space has bytes. */
enum { PLACE_BITS = 59 };

static void *place(int which) { return (void *)((uintptr_t)(which + 1) << PLACE_BITS); }

static qe_qtensor tensor(int which, uint8_t format, int is_transposed) {
    return (qe_qtensor){.codes = place(which), .scale_inv = place(which + 1), .format = format,
                        .transposed = (uint8_t)is_transposed};
}

static qe_quantize_target target_to(uint8_t format) {
    return (qe_quantize_target){.recipe = QE_RECIPE_DELAYED, .format = format, .scale = place(SCALE),
                                .operand = tensor(CODES, format, 0), .retained = tensor(TURNED, format, 1)};
}

/* Where nobody says how wide heads are: as wide as a kernel takes them, if the product has whole ones. */
static uint32_t head_of(const qe_fused_shape *shape) {
    enum { HEAD = 64 };
    if (shape->head_dim != 0) return shape->head_dim;
    return shape->product.n % HEAD == 0 ? HEAD : 1;
}

static qe_args_linear_rope rope_of(const qe_fused_shape *shape) {
    const qe_product *p = &shape->product;
    const uint32_t head = head_of(shape);
    return (qe_args_linear_rope){.x = tensor(FIRST, p->first, !p->first_along),
                                 .w = tensor(SECOND, p->second, !p->second_along), .y = place(RESULT),
                                 .cosine = place(COSINE), .sine = place(SINE), .rows = p->m, .in = p->k,
                                 .sequence = 1, .heads = p->n / head, .head_dim = head,
                                 .accumulation = p->accumulation};
}

void qe_fused_op_of(const qe_fused_shape *shape, qe_op *op_out) {
    const qe_product *p = &shape->product;
    if (shape->result == QE_FUSED_ROPE) {
        *op_out = (qe_op){.kind = QE_OP_LINEAR_ROPE};
        op_out->args.linear_rope = rope_of(shape);
        return;
    }
    const qe_qtensor first = tensor(FIRST, p->first, !p->first_along);
    const int is_forward = p->kind == QE_OP_LINEAR;
    const qe_qtensor second = tensor(SECOND, p->second, is_forward ? !p->second_along : p->second_along);
    QE_ASSERT(is_forward || p->kind == QE_OP_LINEAR_INPUT_GRAD);
    *op_out = (qe_op){.kind = (qe_op_kind)p->kind};
    if (is_forward)
        op_out->args.linear = (qe_args_linear){.x = first, .w = second, .y = place(RESULT), .rows = p->m, .in = p->k,
                                               .out = p->n, .accumulation = p->accumulation,
                                               .target = target_to(shape->result)};
    else
        op_out->args.linear_input_grad = (qe_args_linear_input_grad){
            .dy = first, .w = second, .dx = place(RESULT), .rows = p->m, .in = p->n, .out = p->k,
            .accumulation = p->accumulation, .gate_up = place(SWIGLU), .target = target_to(shape->result)};
}

/* --- its name ---------------------------------------------------------------------------------------------------- */

static void key_format(const qe_fused_shape *shape, char *key, size_t bytes) {
    char product[QE_PRODUCT_KEY_BYTES], head[16] = "";
    qe_product_key(&shape->product, product);
    QE_ASSERT(shape->result < QE_FUSED_RESULTS);
    if (shape->head_dim != 0) (void)snprintf(head, sizeof head, " %u", shape->head_dim);
    const int length =
        snprintf(key, bytes, "%s%s%s%s%s", PREFIX, product, BETWEEN, RESULT_NAMES[shape->result], head);
    QE_ASSERT(length > 0 && (size_t)length < bytes);
}

static void words_make(qe_fused_way way, uint64_t words[8]) {
    memset(words, 0, 8 * sizeof *words);
    if (way == QE_FUSED_APART) return;
    words[0] = TAG;
    words[1] = QE_FUSED_REVISION;
}

void qe_fused_choice_make(const qe_fused_shape *shape, qe_fused_way way, qe_cuda_choice *choice_out) {
    memset(choice_out, 0, sizeof *choice_out);
    key_format(shape, choice_out->key, sizeof choice_out->key);
    words_make(way, choice_out->words);
}

int qe_fused_choice_is(const char *key) { return strncmp(key, PREFIX, sizeof PREFIX - 1) == 0; }

/* Takes apart what stands behind the last " to ", and cuts it off; judges no more than the result's name. */
static int result_cut(char *key, qe_fused_shape *shape) {
    char *at = NULL, name[8];
    for (char *next = strstr(key, BETWEEN); next; next = strstr(next + 1, BETWEEN)) at = next;
    if (!at || sscanf(at + sizeof BETWEEN - 1, "%7s %u", name, &shape->head_dim) < 1) return 0;
    *at = '\0';
    for (uint8_t i = 0; i < QE_FUSED_RESULTS; ++i) {
        if (strcmp(name, RESULT_NAMES[i]) != 0) continue;
        shape->result = i;
        return 1;
    }
    return 0;
}

/* Has an op of this shape a second part, and whole heads? */
static int is_possible(const qe_fused_shape *shape) {
    const qe_product *p = &shape->product;
    if (p->kind == QE_OP_LINEAR_WEIGHT_GRAD || p->adds) return 0;
    if (shape->result != QE_FUSED_ROPE) return shape->head_dim == 0;
    return p->kind == QE_OP_LINEAR && (shape->head_dim == 0 || p->n % shape->head_dim == 0);
}

static int key_parse(const char *key, qe_fused_shape *shape_out) {
    char product[QE_PRODUCT_KEY_BYTES] = "", again[QE_PRODUCT_KEY_BYTES];
    qe_fused_shape shape = {0};
    if (!qe_fused_choice_is(key) || strlen(key) >= sizeof product) return 0;
    memcpy(product, key + sizeof PREFIX - 1, strlen(key + sizeof PREFIX - 1));
    if (!result_cut(product, &shape)) return 0;
    if (qe_product_parse(product, &shape.product, NULL) != QE_OK || !is_possible(&shape)) return 0;
    key_format(&shape, again, sizeof again);
    if (strcmp(key, again) != 0) return 0;
    *shape_out = shape;
    return 1;
}

qe_status qe_fused_choice_parse(const qe_cuda_choice *choice, qe_fused_shape *shape_out, qe_fused_way *way_out,
                                qe_error *error_out) {
    if (!key_parse(choice->key, shape_out))
        return qe_error_set(error_out, QE_ERROR_FORMAT, "have the file written anew",
                            "\"%s\" names no op of two parts", choice->key);
    for (int i = QE_FUSED_APART; i <= QE_FUSED_WHOLE; ++i) {
        uint64_t words[8];
        words_make((qe_fused_way)i, words);
        if (memcmp(words, choice->words, sizeof words) != 0) continue;
        *way_out = (qe_fused_way)i;
        return QE_OK;
    }
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                        "choose anew with this build on this machine: leave the file of choices out",
                        "this build has no such way for %s", choice->key);
}
