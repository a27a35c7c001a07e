/* bench_products_time.c - times of the products and of attention in the layers that are asked for. Operands rotate, so
 * that none is warm in the cache. */
#include <stdio.h>
#include <string.h>

#include "backend/cuda/further.h"
#include "backend/cuda/product_kernels.h"
#include "cuda/bench_products.h"

enum { SETS_MAX = 12, PARTS_MAX = 6, ALIGN_BYTES = 256 };
static const uint64_t ROTATION_BYTES = 256ull << 20;

/* What a set of operands is made of: parts of random elements. */
typedef struct part {
    qe_format format;
    uint64_t count;
} part;

typedef struct rotation {
    char *arena;
    uint32_t sets, parts;
    void *at[SETS_MAX][PARTS_MAX];
} rotation;

static uint64_t padded(uint64_t bytes) { return (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES; }

static int rotation_init(bench *b, rotation *r, const part *parts, uint32_t count) {
    uint64_t set_bytes = 0;
    for (uint32_t i = 0; i < count; ++i) set_bytes += padded(parts[i].count * qe_format_bytes(parts[i].format));
    const uint64_t wanted = (ROTATION_BYTES + set_bytes - 1) / set_bytes;
    *r = (rotation){.sets = wanted > SETS_MAX ? SETS_MAX : (uint32_t)wanted, .parts = count};
    r->arena = bench_alloc(b, r->sets * set_bytes);
    char *at = r->arena;
    for (uint32_t s = 0; s < r->sets && at; ++s)
        for (uint32_t i = 0; i < count; ++i) {
            r->at[s][i] = at;
            (void)qe_cuda_random(parts[i].format, at, parts[i].count, s * PARTS_MAX + i, b->stream);
            at += padded(parts[i].count * qe_format_bytes(parts[i].format));
        }
    return r->arena != NULL && bench_sync(b);
}

/* --- products -------------------------------------------------------------------------------------------------- */

typedef struct layer_product {
    const char *name;
    uint32_t in, out;
    int residual;
} layer_product;

enum { PRODUCTS = 4 };
static void layer_products(const bench_shape *s, layer_product products[PRODUCTS]) {
    const uint32_t wide = s->heads * s->head_dim, qkv = (s->heads + 2 * s->kv_heads) * s->head_dim;
    products[0] = (layer_product){"qkv", s->hidden, qkv, 0};
    products[1] = (layer_product){"o", wide, s->hidden, 1};
    products[2] = (layer_product){"gate_up", s->hidden, 2 * s->ffn, 0};
    products[3] = (layer_product){"down", s->ffn, s->hidden, 1};
}

static qe_qtensor codes_at(void *at, float *scale, qe_format format, uint32_t rows, uint32_t columns, int transposed) {
    return (qe_qtensor){.codes = at, .scale_inv = scale, .rows = rows, .columns = columns, .format = (uint8_t)format,
                        .blocking = QE_BLOCKING_TENSOR, .transposed = (uint8_t)transposed};
}

/* Parts: first operand, second operand, result, residual. */
static uint32_t product_parts(qe_op_kind kind, const layer_product *p, uint32_t rows, part parts[PARTS_MAX]) {
    const uint64_t x = (uint64_t)rows * p->in, y = (uint64_t)rows * p->out, w = (uint64_t)p->in * p->out;
    if (kind == QE_OP_LINEAR) {
        parts[0] = (part){QE_FORMAT_E4M3, x};
        parts[1] = (part){QE_FORMAT_E4M3, w};
        parts[2] = (part){QE_FORMAT_BF16, y};
        parts[3] = (part){QE_FORMAT_BF16, y};
        return p->residual ? 4 : 3;
    }
    parts[0] = (part){QE_FORMAT_E5M2, y};
    parts[1] = (part){QE_FORMAT_E4M3, kind == QE_OP_LINEAR_INPUT_GRAD ? w : x};
    parts[2] = kind == QE_OP_LINEAR_INPUT_GRAD ? (part){QE_FORMAT_BF16, x} : (part){QE_FORMAT_FP32, w};
    return 3;
}

static qe_op product_op(qe_op_kind kind, const layer_product *p, uint32_t rows, uint8_t accumulation, void *const *at,
                        float *scale) {
    qe_op op = {.kind = kind};
    if (kind == QE_OP_LINEAR)
        op.args.linear = (qe_args_linear){.x = codes_at(at[0], scale, QE_FORMAT_E4M3, rows, p->in, 0),
                                          .w = codes_at(at[1], scale, QE_FORMAT_E4M3, p->out, p->in, 0),
                                          .residual = p->residual ? at[3] : NULL, .y = at[2], .rows = rows,
                                          .in = p->in, .out = p->out, .accumulation = accumulation};
    else if (kind == QE_OP_LINEAR_INPUT_GRAD)
        op.args.linear_input_grad = (qe_args_linear_input_grad){
            .dy = codes_at(at[0], scale, QE_FORMAT_E5M2, rows, p->out, 0),
            .w = codes_at(at[1], scale, QE_FORMAT_E4M3, p->out, p->in, 1),
            .dx = at[2], .rows = rows, .in = p->in, .out = p->out, .accumulation = accumulation};
    else
        op.args.linear_weight_grad = (qe_args_linear_weight_grad){
            .dy = codes_at(at[0], scale, QE_FORMAT_E5M2, rows, p->out, 1),
            .x = codes_at(at[1], scale, QE_FORMAT_E4M3, rows, p->in, 1),
            .grad = at[2], .rows = rows, .in = p->in, .out = p->out, .set = 0, .accumulation = accumulation};
    return op;
}

/* Microseconds with the heuristic's first algorithm and with the fastest; prints them. */
static void product_time(bench *b, qe_op_kind kind, const layer_product *p, uint32_t rows, uint8_t accumulation,
                         float *scale, double total[2]) {
    const char *const names[] = {"forward", "input grad", "weight grad"};
    const double operations = 2.0 * rows * p->in * p->out;
    const runner first = {b, b->first, 0, NULL}, tuned = {b, b->tuned, 1, NULL};
    part parts[PARTS_MAX];
    rotation r;
    qe_op ops[SETS_MAX];
    if (rotation_init(b, &r, parts, product_parts(kind, p, rows, parts))) {
        for (uint32_t s = 0; s < r.sets; ++s) ops[s] = product_op(kind, p, rows, accumulation, r.at[s], scale);
        const double began = bench_now();
        if (bench_prepare(&first, &ops[0]) && bench_prepare(&tuned, &ops[0])) {
            const double took = bench_now() - began, one = bench_time(&first, ops, r.sets),
                         best = bench_time(&tuned, ops, r.sets);
            printf("  %-8s %-11s %-5s first %8.1f us %6.0f TF/s   tuned %8.1f us %6.0f TF/s   x%.3f  (%.0f ms)\n",
                   p->name, names[kind - QE_OP_LINEAR], accumulation == QE_ACCUMULATE_FAST ? "fast" : "split", one,
                   operations / one * 1e-6, best, operations / best * 1e-6, one / best, 1e3 * took);
            total[0] += one;
            total[1] += best;
        }
    }
    bench_free(r.arena);
    fflush(stdout);
}

static void shape_time(bench *b, const bench_shape *s, float *scale) {
    layer_product products[PRODUCTS];
    layer_products(s, products);
    double sums[3][2][2] = {0}; /* kind, accumulation, first or tuned */
    printf("products of %s\n", s->name);
    for (int accumulation = QE_ACCUMULATE_FAST; accumulation <= QE_ACCUMULATE_SPLIT; ++accumulation)
        for (int kind = 0; kind < 3; ++kind)
            for (int i = 0; i < PRODUCTS; ++i) {
                if (bench_late(b)) {
                    printf("  out of time\n");
                    return;
                }
                product_time(b, (qe_op_kind)(QE_OP_LINEAR + kind), &products[i], s->tokens, (uint8_t)accumulation,
                             scale, sums[kind][accumulation]);
            }
    for (int tuned = 0; tuned < 2; ++tuned)
        printf("  %s: forward fast + gradients split %.3f ms, all fast %.3f ms\n", tuned ? "tuned" : "first",
               1e-3 * (sums[0][0][tuned] + sums[1][1][tuned] + sums[2][1][tuned]),
               1e-3 * (sums[0][0][tuned] + sums[1][0][tuned] + sums[2][0][tuned]));
    fflush(stdout);
}

void bench_time_products(bench *b, int only_shape) {
    const float scale_host = 1.0f / 64.0f;
    float *scale = bench_upload(b, &scale_host, sizeof scale_host);
    for (int i = 0; i < BENCH_SHAPES && scale; ++i)
        if (only_shape < 0 || only_shape == i) shape_time(b, &bench_shapes[i], scale);
    bench_free(scale);
}

/* --- gradients ------------------------------------------------------------------------------------------------- */

static double gradient_print(const char *name, double took, double operations) {
    printf("    %-44s %8.1f us %6.0f TF/s\n", name, took, operations / took * 1e-6);
    fflush(stdout);
    return took;
}

/* cuBLASLt's fastest, each other kernel, and what tuning makes of them. */
static void gradient_race(bench *b, const qe_op *ops, uint32_t sets, double operations) {
    const runner lt = {b, b->lt, 1, NULL}, tuned = {b, b->tuned, 1, NULL};
    qe_algorithm candidates[QE_FURTHER_CANDIDATES_MAX];
    qe_product product;
    double best = 0.0;
    if (!bench_prepare(&lt, &ops[0]) || qe_product_of(&ops[0], &product, NULL) != QE_OK) return;
    const double library = gradient_print("cuBLASLt's fastest", bench_time(&lt, ops, sets), operations);
    const uint32_t count = qe_further_candidates(&product, candidates);
    for (uint32_t i = 0; i < count; ++i) {
        char name[QE_FURTHER_NAME_BYTES];
        qe_further_name(&candidates[i], name);
        const runner r = {b, bench_chosen(b, &product, &candidates[i]), 0, name};
        if (r.gemm && bench_prepare(&r, &ops[0])) {
            const double took = gradient_print(name, bench_time(&r, ops, sets), operations);
            if (took > 0.0 && (best == 0.0 || took < best)) best = took;
        }
        qe_cuda_gemm_destroy(r.gemm);
    }
    if (best > 0.0) printf("    cuBLASLt's fastest / the others' fastest: %.3f\n", library / best);
    if (bench_prepare(&tuned, &ops[0])) (void)gradient_print("tuned", bench_time(&tuned, ops, sets), operations);
}

static void gradient_time(bench *b, qe_op_kind kind, const layer_product *p, uint32_t rows, uint8_t accumulation,
                          float *scale) {
    part parts[PARTS_MAX];
    rotation r;
    qe_op ops[SETS_MAX];
    printf("  %-8s %s [%u, %u] of %u tokens, %s\n", p->name, qe_op_name(kind), p->out, p->in, rows,
           accumulation == QE_ACCUMULATE_FAST ? "fast" : "split");
    if (rotation_init(b, &r, parts, product_parts(kind, p, rows, parts))) {
        for (uint32_t s = 0; s < r.sets; ++s) ops[s] = product_op(kind, p, rows, accumulation, r.at[s], scale);
        gradient_race(b, ops, r.sets, 2.0 * rows * p->in * p->out);
    }
    bench_free(r.arena);
}

void bench_time_gradients(bench *b, int only_shape) {
    const float scale_host = 1.0f / 64.0f;
    float *scale = bench_upload(b, &scale_host, sizeof scale_host);
    for (int accumulation = QE_ACCUMULATE_SPLIT; accumulation >= QE_ACCUMULATE_FAST; --accumulation)
        for (int i = 0; i < BENCH_SHAPES && scale; ++i) {
            layer_product products[PRODUCTS];
            if (only_shape >= 0 && only_shape != i) continue;
            layer_products(&bench_shapes[i], products);
            printf("gradients of %s\n", bench_shapes[i].name);
            for (int kind = QE_OP_LINEAR_INPUT_GRAD; kind <= QE_OP_LINEAR_WEIGHT_GRAD; ++kind)
                for (int p = 0; p < PRODUCTS && !bench_late(b); ++p)
                    gradient_time(b, (qe_op_kind)kind, &products[p], bench_shapes[i].tokens, (uint8_t)accumulation,
                                  scale);
        }
    bench_free(scale);
}

/* --- attention ------------------------------------------------------------------------------------------------- */

static qe_op attention_op(const bench_shape *s, void *const *at) {
    return (qe_op){.kind = QE_OP_ATTENTION,
                   .args.attention = {.qkv = at[0], .out = at[1], .lse = at[2], .sequences = 1, .sequence = s->tokens,
                                      .heads = s->heads, .kv_heads = s->kv_heads, .head_dim = s->head_dim,
                                      .deterministic = 1}};
}

static qe_op attention_backward_op(const bench_shape *s, void *const *at, int deterministic) {
    return (qe_op){.kind = QE_OP_ATTENTION_BACKWARD,
                   .args.attention_backward = {.qkv = at[0], .out = at[1], .lse = at[2], .dout = at[3], .dqkv = at[4],
                                               .sequences = 1, .sequence = s->tokens, .heads = s->heads,
                                               .kv_heads = s->kv_heads, .head_dim = s->head_dim,
                                               .deterministic = (uint8_t)deterministic}};
}

static uint64_t memory_free(void) {
    size_t available = 0, total = 0;
    (void)cudaMemGetInfo(&available, &total);
    return available;
}

static void attention_time(const runner *r, const char *name, const qe_op *ops, uint32_t sets, double operations) {
    const uint64_t before = memory_free();
    const double began = bench_now();
    if (!bench_prepare(r, &ops[0])) return;
    const double took = bench_now() - began, one = bench_time(r, ops, sets);
    printf("  %-24s %8.1f us %6.0f TF/s  (plan %.0f ms, %llu MiB more)\n", name, one, operations / one * 1e-6,
           1e3 * took, (unsigned long long)((before - memory_free()) >> 20));
}

static const struct {
    const char *name;
    int backward, deterministic;
    qe_attention_algorithm algorithm;
} attentions[] = {{"forward, cuDNN's", 0, 1, QE_ATTENTION_CUDNN},
                  {"forward, ours", 0, 1, QE_ATTENTION_OWN},
                  {"backward, cuDNN's", 1, 1, QE_ATTENTION_CUDNN},
                  {"cuDNN's, any order", 1, 0, QE_ATTENTION_CUDNN},
                  {"backward, ours", 1, 1, QE_ATTENTION_OWN}};
enum { ATTENTIONS = sizeof attentions / sizeof attentions[0] };

static void attention_shape_time(bench *b, const bench_shape *s) {
    const uint64_t t = s->tokens, row = (uint64_t)(s->heads + 2 * s->kv_heads) * s->head_dim;
    const uint64_t wide = (uint64_t)s->heads * s->head_dim;
    const part parts[] = {{QE_FORMAT_BF16, t * row}, {QE_FORMAT_BF16, t * wide}, {QE_FORMAT_FP32, t * s->heads},
                          {QE_FORMAT_BF16, t * wide}, {QE_FORMAT_BF16, t * row}};
    const double operations = 2.0 * (double)t * (double)t * (double)wide; /* causal: half of 4 */
    qe_op ops[SETS_MAX];
    rotation data;
    printf("attention of %s\n", s->name);
    if (rotation_init(b, &data, parts, sizeof parts / sizeof parts[0])) {
        for (int way = 0; way < ATTENTIONS; ++way) {
            const int backward = attentions[way].backward;
            for (uint32_t i = 0; i < data.sets; ++i)
                ops[i] = backward ? attention_backward_op(s, data.at[i], attentions[way].deterministic)
                                  : attention_op(s, data.at[i]);
            bench with = bench_attention_open(b, &ops[0], attentions[way].algorithm);
            const runner chosen = {&with, NULL, 0, NULL};
            if (with.attention)
                attention_time(&chosen, attentions[way].name, ops, data.sets, (backward ? 2.5 : 1.0) * operations);
            bench_attention_close(b, &with);
        }
    }
    bench_free(data.arena);
    fflush(stdout);
}

void bench_time_attention(bench *b, int only_shape) {
    for (int i = 0; i < BENCH_SHAPES; ++i)
        if ((only_shape < 0 || only_shape == i) && !bench_late(b)) attention_shape_time(b, &bench_shapes[i]);
}
