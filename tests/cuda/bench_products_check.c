/* bench_products_check.c - every form of product against sums in double; the same bits from a second run, from a graph,
 * and from a gradient that is set and one that is added to zeros; choices kept in a file. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/further.h"
#include "cuda/bench_products.h"
#include "qeffect/fp8.h"
#include "qeffect/limits.h"

typedef struct form {
    const char *name;
    qe_op_kind kind;
    qe_format first, second;
    uint8_t accumulation;
    uint32_t rows, in, out;
    int adds;  /* a residual, or a gradient that holds something */
    int block; /* weight gradient of codes that share scales down columns */
    double sum_tolerance; /* of the sum of magnitudes: what the accumulator may lose */
} form;

/* Hopper adds 8-bit products in some 14 bits; `split` promotes partial sums to fp32. */
#define FAST (1.0 / 512)
#define SPLIT (1.0 / 2048)
#define WIDE (1.0 / (1 << 16))
#define EXACT (1.0 / (1 << 19))
#define E4 QE_FORMAT_E4M3
#define E5 QE_FORMAT_E5M2
#define BF QE_FORMAT_BF16
#define FP QE_FORMAT_FP32
#define DI QE_OP_LINEAR_INPUT_GRAD
#define DW QE_OP_LINEAR_WEIGHT_GRAD

static const form FORMS[] = {
    {"forward fast", QE_OP_LINEAR, E4, E4, QE_ACCUMULATE_FAST, 80, 112, 144, 0, 0, FAST},
    {"forward split", QE_OP_LINEAR, E4, E4, QE_ACCUMULATE_SPLIT, 80, 112, 144, 0, 0, SPLIT},
    {"forward fast, residual", QE_OP_LINEAR, E4, E4, QE_ACCUMULATE_FAST, 80, 112, 144, 1, 0, FAST},
    {"forward fast, long sum", QE_OP_LINEAR, E4, E4, QE_ACCUMULATE_FAST, 64, 8192, 64, 1, 0, FAST},
    {"forward split, long sum", QE_OP_LINEAR, E4, E4, QE_ACCUMULATE_SPLIT, 64, 8192, 64, 1, 0, SPLIT},
    {"input grad split", DI, E5, E4, QE_ACCUMULATE_SPLIT, 80, 112, 144, 0, 0, SPLIT},
    {"input grad fast", DI, E5, E4, QE_ACCUMULATE_FAST, 80, 112, 144, 0, 0, FAST},
    {"weight grad split, set", DW, E5, E4, QE_ACCUMULATE_SPLIT, 160, 112, 144, 0, 0, SPLIT},
    {"weight grad split, add", DW, E5, E4, QE_ACCUMULATE_SPLIT, 160, 112, 144, 1, 0, SPLIT},
    {"weight grad fast, add", DW, E5, E4, QE_ACCUMULATE_FAST, 160, 112, 144, 1, 0, FAST},
    {"weight grad split, long", DW, E5, E4, QE_ACCUMULATE_SPLIT, 8192, 64, 64, 1, 0, SPLIT},
    {"weight grad split, tiles", DW, E5, E4, QE_ACCUMULATE_SPLIT, 400, 528, 784, 1, 0, SPLIT},
    {"weight grad split, many", DW, E5, E4, QE_ACCUMULATE_SPLIT, 144, 2064, 2192, 1, 0, SPLIT},
    {"weight grad fast, many", DW, E5, E4, QE_ACCUMULATE_FAST, 144, 2064, 2192, 1, 0, FAST},
    {"weight grad of blocks", DW, E4, E4, QE_ACCUMULATE_SPLIT, 272, 112, 144, 1, 1, WIDE},
    {"bf16 forward", QE_OP_LINEAR, BF, BF, 0, 80, 112, 144, 0, 0, WIDE},
    {"bf16 forward, residual", QE_OP_LINEAR, BF, BF, 0, 80, 112, 144, 1, 0, WIDE},
    {"bf16 forward, odd sizes", QE_OP_LINEAR, BF, BF, 0, 33, 72, 40, 0, 0, WIDE},
    {"bf16 input grad", DI, BF, BF, 0, 80, 112, 144, 0, 0, WIDE},
    {"bf16 weight grad, set", DW, BF, BF, 0, 160, 112, 144, 0, 0, WIDE},
    {"bf16 weight grad, add", DW, BF, BF, 0, 160, 112, 144, 1, 0, WIDE},
    {"fp32 forward, residual", QE_OP_LINEAR, FP, FP, 0, 80, 112, 144, 1, 0, EXACT},
    {"fp32 input grad", DI, FP, FP, 0, 80, 112, 144, 0, 0, EXACT},
    {"fp32 weight grad, add", DW, FP, FP, 0, 160, 112, 144, 1, 0, EXACT},
};

/* A matrix on the host as the op's tensor says, and what its elements mean. */
typedef struct matrix {
    uint32_t rows, columns;
    double *values; /* [rows, columns], whatever lies transposed */
    qe_qtensor tensor; /* on the device */
} matrix;

static int is_code(qe_format format) { return format == E4 || format == E5; }

static void element_store(void *at, uint64_t index, qe_format format, float value) {
    if (is_code(format))
        ((uint8_t *)at)[index] = qe_fp8_encode(format, value);
    else if (format == BF)
        ((uint16_t *)at)[index] = qe_bf16_encode(value);
    else
        ((float *)at)[index] = value;
}

static double element_load(const void *at, uint64_t index, qe_format format) {
    if (is_code(format)) return (double)qe_fp8_decode(format, ((const uint8_t *)at)[index]);
    if (format == BF) return (double)qe_bf16_decode(((const uint16_t *)at)[index]);
    return (double)((const float *)at)[index];
}

/* The inverse scale of an element: of the whole matrix, or powers of two down columns. */
static float inverse_at(int block, float whole, uint32_t row, uint32_t column) {
    if (!block) return whole;
    return ldexpf(1.0f, -(int)((row / QE_BLOCK * 3 + column) % 5) - 2);
}

static matrix matrix_make(bench *b, qe_format format, uint32_t rows, uint32_t columns, int transposed, int block,
                          uint64_t seed) {
    const uint64_t count = (uint64_t)rows * columns;
    const float whole = is_code(format) ? 1.0f / (seed % 2 ? 37.3f : 19.7f) : 1.0f;
    const uint32_t bands = (rows + QE_BLOCK - 1) / QE_BLOCK;
    matrix m = {.rows = rows, .columns = columns, .values = calloc(count, sizeof(double))};
    char *stored = calloc(count, sizeof(float));
    float *scales = calloc(block ? (uint64_t)bands * columns : 1, sizeof(float));
    for (uint32_t row = 0; row < rows; ++row)
        for (uint32_t column = 0; column < columns; ++column) {
            const float inverse = inverse_at(block, whole, row, column);
            const uint64_t at = transposed ? (uint64_t)column * rows + row : (uint64_t)row * columns + column;
            const float value = bench_random(seed, (uint64_t)row * columns + column);
            element_store(stored, at, format, is_code(format) ? value / inverse : value);
            m.values[(uint64_t)row * columns + column] = element_load(stored, at, format) * (double)inverse;
            scales[block ? (uint64_t)(row / QE_BLOCK) * columns + column : 0] = inverse;
        }
    m.tensor = (qe_qtensor){.codes = bench_upload(b, stored, count * qe_format_bytes(format)),
                            .rows = rows, .columns = columns, .format = (uint8_t)format,
                            .blocking = block ? QE_BLOCKING_COLUMN : QE_BLOCKING_TENSOR,
                            .transposed = (uint8_t)transposed};
    if (is_code(format))
        m.tensor.scale_inv = bench_upload(b, scales, (block ? (uint64_t)bands * columns : 1) * sizeof(float));
    free(stored);
    free(scales);
    return m;
}

static void matrix_free(matrix *m) {
    free(m->values);
    bench_free(m->tensor.codes);
    bench_free(m->tensor.scale_inv);
}

/* One form with its operands, its op, and what is right. */
typedef struct world {
    const form *f;
    matrix first, second; /* x and w; dy and w; dy and x */
    void *scratch_x, *scratch_dy;
    uint32_t m, n, k;
    qe_format result_format;
    double *right, *magnitude; /* [m, n] */
    void *added_host;          /* [m, n] in the result's format; zeros where nothing is added */
    void *added, *result;      /* on the device */
    uint64_t result_bytes;
    qe_op op;
} world;

static void world_sizes(world *w) {
    const form *f = w->f;
    w->m = f->kind == DW ? f->out : f->rows;
    w->n = f->kind == QE_OP_LINEAR ? f->out : f->in;
    w->k = f->kind == QE_OP_LINEAR ? f->in : f->kind == DI ? f->out : f->rows;
    w->result_format = f->kind == DW ? FP : BF;
    w->result_bytes = (uint64_t)w->m * w->n * qe_format_bytes(w->result_format);
}

static void world_operands(bench *b, world *w) {
    const form *f = w->f;
    const int code = is_code(f->first) && !f->block;
    if (f->kind == QE_OP_LINEAR) {
        w->first = matrix_make(b, f->first, f->rows, f->in, 0, 0, 1);
        w->second = matrix_make(b, f->second, f->out, f->in, 0, 0, 2);
    } else if (f->kind == DI) {
        w->first = matrix_make(b, f->first, f->rows, f->out, 0, 0, 3);
        w->second = matrix_make(b, f->second, f->out, f->in, code, 0, 4);
    } else {
        w->first = matrix_make(b, f->first, f->rows, f->out, code, f->block, 5);
        w->second = matrix_make(b, f->second, f->rows, f->in, code, f->block, 6);
    }
}

/* Element of the product's first factor [m, k] and of its second [k, n]. */
static double first_at(const world *w, uint32_t i, uint32_t l) {
    return w->f->kind == DW ? w->first.values[(uint64_t)l * w->m + i] : w->first.values[(uint64_t)i * w->k + l];
}
static double second_at(const world *w, uint32_t l, uint32_t j) {
    return w->f->kind == QE_OP_LINEAR ? w->second.values[(uint64_t)j * w->k + l]
                                      : w->second.values[(uint64_t)l * w->n + j];
}

static void world_right(world *w) {
    for (uint32_t i = 0; i < w->m; ++i)
        for (uint32_t j = 0; j < w->n; ++j) {
            const uint64_t at = (uint64_t)i * w->n + j;
            double sum = 0.0, magnitude = 0.0;
            for (uint32_t l = 0; l < w->k; ++l) {
                const double term = first_at(w, i, l) * second_at(w, l, j);
                sum += term;
                magnitude += fabs(term);
            }
            const double added = element_load(w->added_host, at, w->result_format);
            w->right[at] = sum + added;
            w->magnitude[at] = magnitude + fabs(added);
        }
}

static qe_op world_op(const world *w, int adds) {
    const form *f = w->f;
    qe_op op = {.kind = f->kind};
    if (f->kind == QE_OP_LINEAR)
        op.args.linear = (qe_args_linear){.x = w->first.tensor, .w = w->second.tensor,
                                          .residual = adds ? w->added : NULL, .y = w->result, .rows = f->rows,
                                          .in = f->in, .out = f->out, .accumulation = f->accumulation};
    else if (f->kind == DI)
        op.args.linear_input_grad = (qe_args_linear_input_grad){
            .dy = w->first.tensor, .w = w->second.tensor, .dx = w->result, .rows = f->rows, .in = f->in, .out = f->out,
            .accumulation = f->accumulation};
    else
        op.args.linear_weight_grad = (qe_args_linear_weight_grad){
            .x = w->second.tensor, .dy = w->first.tensor, .scratch_x = w->scratch_x, .scratch_dy = w->scratch_dy,
            .grad = w->result, .rows = f->rows, .in = f->in, .out = f->out, .set = !adds,
            .accumulation = f->accumulation};
    return op;
}

static void world_init(bench *b, world *w, const form *f) {
    *w = (world){.f = f};
    world_sizes(w);
    world_operands(b, w);
    const uint64_t count = (uint64_t)w->m * w->n;
    w->right = calloc(count, sizeof(double));
    w->magnitude = calloc(count, sizeof(double));
    w->added_host = calloc(count, sizeof(float));
    for (uint64_t i = 0; i < count && f->adds; ++i)
        element_store(w->added_host, i, w->result_format, 4.0f * bench_random(7, i));
    world_right(w);
    w->added = bench_upload(b, w->added_host, w->result_bytes);
    w->result = bench_alloc(b, w->result_bytes);
    w->scratch_x = f->block ? bench_alloc(b, 2 * (uint64_t)f->rows * f->in) : NULL;
    w->scratch_dy = f->block ? bench_alloc(b, 2 * (uint64_t)f->rows * f->out) : NULL;
    w->op = world_op(w, f->adds);
}

static void world_deinit(world *w) {
    matrix_free(&w->first);
    matrix_free(&w->second);
    bench_free(w->scratch_x);
    bench_free(w->scratch_dy);
    bench_free(w->added);
    bench_free(w->result);
    free(w->right);
    free(w->magnitude);
    free(w->added_host);
}

/* What the result holds before: the gradient that is added to, else NaN in every byte. */
static void result_reset(const bench *b, const world *w, int zero) {
    if (zero)
        (void)cudaMemsetAsync(w->result, 0, w->result_bytes, b->stream);
    else if (w->f->kind == DW && w->f->adds)
        (void)cudaMemcpyAsync(w->result, w->added, w->result_bytes, cudaMemcpyDeviceToDevice, b->stream);
    else
        (void)cudaMemsetAsync(w->result, 0xFF, w->result_bytes, b->stream);
}

static int result_read(bench *b, const world *w, void *host) {
    if (!bench_sync(b)) return 0;
    return cudaMemcpy(host, w->result, w->result_bytes, cudaMemcpyDeviceToHost) == cudaSuccess;
}

static void result_judge(bench *b, const world *w, const runner *r, const void *got) {
    const double unit = w->result_format == BF ? 1.0 / 256 : 1.0 / (1 << 22);
    double worst = 0.0, square = 0.0, right = 0.0;
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < (uint64_t)w->m * w->n; ++i) {
        const double value = element_load(got, i, w->result_format), off = fabs(value - w->right[i]);
        const double rounding = unit * fabs(w->right[i]);
        if (!(off <= rounding + w->f->sum_tolerance * w->magnitude[i])) ++wrong;
        if (off - rounding > worst * w->magnitude[i]) worst = (off - rounding) / w->magnitude[i];
        square += off * off;
        right += w->right[i] * w->right[i];
    }
    printf("  %-24s %-5s relative %.2e, beyond rounding %.1e of the sum of magnitudes (allowed %.1e)\n", w->f->name,
           r->name ? r->name : r->tune ? "tuned" : "first", sqrt(square / right), worst, w->f->sum_tolerance);
    if (wrong || !(square >= 0.0))
        bench_fail(b, "%s: %llu of %u elements are wrong", w->f->name, (unsigned long long)wrong, w->m * w->n);
}

static void again_judge(bench *b, const world *w, const void *once, void *again, const char *how) {
    if (!result_read(b, w, again) || memcmp(once, again, w->result_bytes) != 0)
        bench_fail(b, "%s: other bits %s", w->f->name, how);
}

static void graph_check(const runner *r, const world *w, const void *once, void *again) {
    cudaGraphExec_t graph = bench_capture(r, &w->op, 1, 1);
    if (!graph) return;
    for (int i = 0; i < 2; ++i) {
        result_reset(r->b, w, 0);
        (void)cudaGraphLaunch(graph, r->b->stream);
        again_judge(r->b, w, once, again, "out of a graph");
    }
    (void)cudaGraphExecDestroy(graph);
}

/* Setting a gradient and adding to zeros are one sum. */
static void zero_check(const runner *r, const world *w, void *once, void *again) {
    const qe_op set = world_op(w, 0), add = world_op(w, 1);
    result_reset(r->b, w, 0);
    if (!bench_run(r, &set) || !result_read(r->b, w, once)) return;
    result_reset(r->b, w, 1);
    if (!bench_run(r, &add)) return;
    again_judge(r->b, w, once, again, "set and added to zeros");
}

static void form_check(const runner *r, const world *w) {
    char *once = calloc(1, w->result_bytes), *again = calloc(1, w->result_bytes);
    if (bench_prepare(r, &w->op)) {
        result_reset(r->b, w, 0);
        if (bench_run(r, &w->op) && result_read(r->b, w, once)) {
            result_judge(r->b, w, r, once);
            result_reset(r->b, w, 0);
            if (bench_run(r, &w->op)) again_judge(r->b, w, once, again, "in a second run");
            graph_check(r, w, once, again);
            if (w->f->kind == DW) zero_check(r, w, once, again);
        }
    }
    free(once);
    free(again);
}

/* Each kernel that takes it, whether or not tuning would. */
static void further_check(bench *b, const world *w) {
    qe_algorithm candidates[QE_FURTHER_CANDIDATES_MAX];
    qe_product product;
    if (qe_product_of(&w->op, &product, NULL) != QE_OK) return;
    const uint32_t count = qe_further_candidates(&product, candidates);
    for (uint32_t i = 0; i < count; ++i) {
        char name[QE_FURTHER_NAME_BYTES];
        qe_further_name(&candidates[i], name);
        const runner r = {b, bench_chosen(b, &product, &candidates[i]), 0, name};
        if (r.gemm) form_check(&r, w);
        qe_cuda_gemm_destroy(r.gemm);
    }
}

void bench_check_products(bench *b) {
    const runner runners[] = {{b, b->first, 0, NULL}, {b, b->tuned, 1, NULL}};
    printf("products against sums in double\n");
    for (size_t i = 0; i < sizeof FORMS / sizeof FORMS[0]; ++i) {
        world w;
        world_init(b, &w, &FORMS[i]);
        if (w.result && w.added) {
            for (int tuned = 0; tuned < 2; ++tuned) form_check(&runners[tuned], &w);
            further_check(b, &w);
        }
        world_deinit(&w);
        fflush(stdout);
    }
}

/* --- choices ------------------------------------------------------------------------------------------------------ */

/* A kernel of another version, of a tile or a schedule that is not there. */
static void further_refused(bench *b) {
    const qe_product product = {.m = 256, .n = 256, .k = 256, .kind = DW, .first = E5, .second = E4,
                                .first_along = 1, .second_along = 1, .accumulation = QE_ACCUMULATE_SPLIT, .adds = 1};
    qe_algorithm candidates[QE_FURTHER_CANDIDATES_MAX];
    if (qe_further_candidates(&product, candidates) == 0) {
        printf("  there are no other kernels\n");
        return;
    }
    for (int word = 1; word <= 3; ++word) {
        qe_cuda_gemm *fresh = NULL;
        qe_error error = {0};
        qe_cuda_choice choice = {0};
        qe_product_key(&product, choice.key);
        memcpy(choice.words, candidates[0].words, sizeof choice.words);
        choice.words[word] += 7;
        if (qe_cuda_gemm_create(b->stream, &fresh, &error) != QE_OK) return;
        if (qe_cuda_gemm_choose(fresh, &choice, &error) != QE_ERROR_UNSUPPORTED)
            bench_fail(b, "a kernel that is not there was taken");
        qe_cuda_gemm_destroy(fresh);
    }
}

static void choices_compare(bench *b, qe_cuda_gemm *read) {
    const qe_cuda_choice *here, *there;
    const uint32_t count = qe_cuda_gemm_choices(b->tuned, &here);
    if (qe_cuda_gemm_choices(read, &there) != count || memcmp(here, there, count * sizeof *here) != 0)
        bench_fail(b, "choices differ after a file");
    qe_cuda_choice broken = here[0];
    qe_error error = {0};
    qe_cuda_gemm *fresh = NULL;
    memset(broken.words, 0x5A, sizeof broken.words);
    if (qe_cuda_gemm_create(b->stream, &fresh, &error) != QE_OK) return;
    if (qe_cuda_gemm_choose(fresh, &broken, &error) != QE_ERROR_UNSUPPORTED)
        bench_fail(b, "an impossible algorithm was taken");
    else
        printf("  refused as it should: %s\n", error.message);
    qe_cuda_gemm_destroy(fresh);
}

void bench_check_choices(bench *b, const char *path) {
    qe_error error = {0};
    qe_cuda_gemm *read = NULL;
    const qe_cuda_choice *ignored;
    printf("choices in %s\n", path);
    if (qe_cuda_gemm_choices(b->tuned, &ignored) == 0) return;
    if (qe_cuda_choices_write(b->tuned, NULL, path, &error) != QE_OK ||
        qe_cuda_gemm_create(b->stream, &read, &error) != QE_OK ||
        qe_cuda_choices_read(read, NULL, path, &error) != QE_OK)
        bench_fail(b, "choices: %s (line %u)", error.message, error.line);
    else
        choices_compare(b, read);
    further_refused(b);
    qe_cuda_gemm_destroy(read);
}
