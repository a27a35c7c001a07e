/* bench_products_attention.c - attention forward and backward against sums in double on small shapes, and its time on
 * the shapes that are asked for. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/bench_products.h"
#include "qeffect/fp8.h"

typedef struct world {
    uint32_t sequences, sequence, heads, kv_heads, head_dim;
    uint64_t rows, row, out_row; /* tokens; elements of a row of qkv, of out */
    double *qkv, *dout;          /* what the bf16 inputs mean */
    double *out, *lse, *dqkv;    /* what is right */
    void *d_qkv, *d_out, *d_lse, *d_dout, *d_dqkv;
} world;

static double *values_make(uint64_t count, uint64_t seed, uint16_t *codes) {
    double *values = calloc(count, sizeof *values);
    for (uint64_t i = 0; i < count; ++i) {
        codes[i] = qe_bf16_encode(bench_random(seed, i));
        values[i] = (double)qe_bf16_decode(codes[i]);
    }
    return values;
}

/* --- what is right --------------------------------------------------------------------------------------------- */

typedef struct head {
    const double *q, *k, *v, *dout; /* of the sequence's first token */
    double *out, *lse, *dq, *dk, *dv;
    uint64_t row, out_row;
    uint32_t dim, sequence;
} head;

static head head_at(const world *w, uint32_t s, uint32_t h) {
    const uint32_t kv = h / (w->heads / w->kv_heads);
    const uint64_t q_at = s * w->sequence * w->row + h * w->head_dim;
    const uint64_t k_at = s * w->sequence * w->row + (w->heads + kv) * w->head_dim;
    const uint64_t v_at = k_at + (uint64_t)w->kv_heads * w->head_dim;
    const uint64_t out_at = s * w->sequence * w->out_row + h * w->head_dim;
    return (head){w->qkv + q_at,  w->qkv + k_at,  w->qkv + v_at, w->dout + out_at,
                  w->out + out_at, w->lse + ((uint64_t)s * w->heads + h) * w->sequence,
                  w->dqkv + q_at, w->dqkv + k_at, w->dqkv + v_at, w->row, w->out_row, w->head_dim, w->sequence};
}

static double dot(const double *left, const double *right, uint32_t count) {
    double sum = 0.0;
    for (uint32_t i = 0; i < count; ++i) sum += left[i] * right[i];
    return sum;
}

static void add(double *to, const double *from, double factor, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

/* p[0..t] = the probabilities of query t; returns the log-sum-exp. */
static double probabilities(const head *h, uint32_t t, double *p) {
    double most = -INFINITY, sum = 0.0;
    for (uint32_t u = 0; u <= t; ++u) {
        p[u] = dot(h->q + t * h->row, h->k + u * h->row, h->dim) / sqrt((double)h->dim);
        if (p[u] > most) most = p[u];
    }
    for (uint32_t u = 0; u <= t; ++u) sum += p[u] = exp(p[u] - most);
    for (uint32_t u = 0; u <= t; ++u) p[u] /= sum;
    return most + log(sum);
}

static void query_right(const head *h, uint32_t t, double *p) {
    const double *dout = h->dout + t * h->out_row, factor = 1.0 / sqrt((double)h->dim);
    double *out = h->out + t * h->out_row, mean = 0.0;
    h->lse[t] = probabilities(h, t, p);
    for (uint32_t u = 0; u <= t; ++u) add(out, h->v + u * h->row, p[u], h->dim);
    for (uint32_t u = 0; u <= t; ++u) mean += p[u] * dot(dout, h->v + u * h->row, h->dim);
    for (uint32_t u = 0; u <= t; ++u) {
        const double ds = p[u] * (dot(dout, h->v + u * h->row, h->dim) - mean) * factor;
        add(h->dv + u * h->row, dout, p[u], h->dim);
        add(h->dk + u * h->row, h->q + t * h->row, ds, h->dim);
        add(h->dq + t * h->row, h->k + u * h->row, ds, h->dim);
    }
}

static void world_right(world *w) {
    double *p = calloc(w->sequence, sizeof *p);
    for (uint32_t s = 0; s < w->sequences; ++s)
        for (uint32_t n = 0; n < w->heads; ++n) {
            const head h = head_at(w, s, n);
            for (uint32_t t = 0; t < w->sequence; ++t) query_right(&h, t, p);
        }
    free(p);
}

/* --- checks ---------------------------------------------------------------------------------------------------- */

static void world_init(bench *b, world *w, uint32_t sequences, uint32_t sequence, uint32_t heads, uint32_t kv_heads,
                       uint32_t head_dim) {
    *w = (world){.sequences = sequences, .sequence = sequence, .heads = heads, .kv_heads = kv_heads,
                 .head_dim = head_dim, .rows = (uint64_t)sequences * sequence,
                 .row = (uint64_t)(heads + 2 * kv_heads) * head_dim, .out_row = (uint64_t)heads * head_dim};
    uint16_t *codes = calloc(w->rows * w->row, sizeof *codes);
    w->qkv = values_make(w->rows * w->row, 11, codes);
    w->d_qkv = bench_upload(b, codes, w->rows * w->row * sizeof *codes);
    w->dout = values_make(w->rows * w->out_row, 12, codes);
    w->d_dout = bench_upload(b, codes, w->rows * w->out_row * sizeof *codes);
    free(codes);
    w->out = calloc(w->rows * w->out_row, sizeof(double));
    w->lse = calloc(w->rows * heads, sizeof(double));
    w->dqkv = calloc(w->rows * w->row, sizeof(double));
    w->d_out = bench_alloc(b, 2 * w->rows * w->out_row);
    w->d_lse = bench_alloc(b, sizeof(float) * w->rows * heads);
    w->d_dqkv = bench_alloc(b, 2 * w->rows * w->row);
    world_right(w);
}

static void world_deinit(world *w) {
    double *const host[] = {w->qkv, w->dout, w->out, w->lse, w->dqkv};
    void *const device[] = {w->d_qkv, w->d_out, w->d_lse, w->d_dout, w->d_dqkv};
    for (size_t i = 0; i < sizeof host / sizeof host[0]; ++i) free(host[i]);
    for (size_t i = 0; i < sizeof device / sizeof device[0]; ++i) bench_free(device[i]);
}

static qe_op forward_op(const world *w) {
    return (qe_op){.kind = QE_OP_ATTENTION,
                   .args.attention = {.qkv = w->d_qkv, .out = w->d_out, .lse = w->d_lse, .sequences = w->sequences,
                                      .sequence = w->sequence, .heads = w->heads, .kv_heads = w->kv_heads,
                                      .head_dim = w->head_dim, .deterministic = 1}};
}

static qe_op backward_op(const world *w, int deterministic) {
    return (qe_op){.kind = QE_OP_ATTENTION_BACKWARD,
                   .args.attention_backward = {.qkv = w->d_qkv, .out = w->d_out, .lse = w->d_lse, .dout = w->d_dout,
                                               .dqkv = w->d_dqkv, .sequences = w->sequences, .sequence = w->sequence,
                                               .heads = w->heads, .kv_heads = w->kv_heads, .head_dim = w->head_dim,
                                               .deterministic = (uint8_t)deterministic}};
}

/* Columns [from, to) of a bf16 matrix against what is right. */
static void columns_judge(bench *b, const char *name, const uint16_t *got, const double *right, uint64_t rows,
                          uint64_t row, uint64_t from, uint64_t to) {
    double square = 0.0, whole = 0.0, worst = 0.0;
    for (uint64_t r = 0; r < rows; ++r)
        for (uint64_t c = from; c < to; ++c) {
            const double off = (double)qe_bf16_decode(got[r * row + c]) - right[r * row + c];
            square += off * off;
            whole += right[r * row + c] * right[r * row + c];
            if (!(fabs(off) <= worst)) worst = fabs(off);
        }
    const double relative = sqrt(square / whole);
    printf("    %-4s relative %.2e, worst %.2e\n", name, relative, worst);
    if (!(relative < 1e-2)) bench_fail(b, "attention: %s is wrong", name);
}

static void lse_judge(bench *b, const world *w) {
    const uint64_t count = w->rows * w->heads;
    float *got = calloc(count, sizeof *got);
    double worst = 0.0;
    (void)cudaMemcpy(got, w->d_lse, count * sizeof *got, cudaMemcpyDeviceToHost);
    for (uint64_t i = 0; i < count; ++i) {
        const double off = fabs((double)got[i] - w->lse[i]);
        if (!(off <= worst)) worst = off;
    }
    printf("    lse  worst %.2e\n", worst);
    if (!(worst < 1e-3)) bench_fail(b, "attention: the log-sum-exp is wrong");
    free(got);
}

/* Runs it once, twice, and out of a graph; all must have the same bits unless they need not. Returns the first. */
static uint16_t *bits_of(const runner *r, const qe_op *op, void *result, uint64_t bytes, int exact) {
    uint16_t *once = calloc(1, bytes), *again = calloc(1, bytes);
    cudaGraphExec_t graph = NULL;
    for (int i = 0; i < 3; ++i) {
        uint16_t *to = i == 0 ? once : again;
        (void)cudaMemsetAsync(result, 0xFF, bytes, r->b->stream);
        if (i == 2 && !(graph = bench_capture(r, op, 1, 1))) break;
        if (i == 2) (void)cudaGraphLaunch(graph, r->b->stream);
        if (i < 2 && !bench_run(r, op)) break;
        if (!bench_sync(r->b)) break;
        (void)cudaMemcpy(to, result, bytes, cudaMemcpyDeviceToHost);
        if (i == 0 || memcmp(once, again, bytes) == 0) continue;
        if (exact)
            bench_fail(r->b, "%s: other bits %s", qe_op_name(op->kind), i == 1 ? "in a second run" : "out of a graph");
        else
            printf("    other bits %s, as allowed\n", i == 1 ? "in a second run" : "out of a graph");
    }
    if (graph) (void)cudaGraphExecDestroy(graph);
    free(again);
    return once;
}

static void forward_judge(const runner *r, const world *w, const qe_op *op) {
    if (!bench_prepare(r, op)) return;
    uint16_t *got = bits_of(r, op, w->d_out, 2 * w->rows * w->out_row, 1);
    columns_judge(r->b, "out", got, w->out, w->rows, w->out_row, 0, w->out_row);
    lse_judge(r->b, w);
    free(got);
}

static void forward_check(bench *b, const world *w, qe_attention_algorithm algorithm) {
    const qe_op op = forward_op(w);
    bench with = bench_attention_open(b, &op, algorithm);
    const runner r = {&with, NULL, 0, NULL};
    printf("   forward, %s\n", algorithm == QE_ATTENTION_OWN ? "ours" : "cuDNN's");
    if (with.attention) forward_judge(&r, w, &op);
    bench_attention_close(b, &with);
}

static void backward_judge(const runner *r, const world *w, int deterministic) {
    const qe_op op = backward_op(w, deterministic);
    const uint64_t q = w->out_row, kv = (uint64_t)w->kv_heads * w->head_dim;
    if (!bench_prepare(r, &op)) return;
    uint16_t *got = bits_of(r, &op, w->d_dqkv, 2 * w->rows * w->row, deterministic);
    columns_judge(r->b, "dq", got, w->dqkv, w->rows, w->row, 0, q);
    columns_judge(r->b, "dk", got, w->dqkv, w->rows, w->row, q, q + kv);
    columns_judge(r->b, "dv", got, w->dqkv, w->rows, w->row, q + kv, q + 2 * kv);
    free(got);
}

static void backward_check(bench *b, const world *w, qe_attention_algorithm algorithm, int deterministic) {
    const qe_op op = backward_op(w, deterministic);
    bench with = bench_attention_open(b, &op, algorithm);
    const runner r = {&with, NULL, 0, NULL};
    printf("   backward%s, %s\n", deterministic ? "" : ", any order",
           algorithm == QE_ATTENTION_OWN ? "ours" : "cuDNN's");
    if (with.attention) backward_judge(&r, w, deterministic);
    bench_attention_close(b, &with);
}

/* On the bench's stream, which waits for no other. */
static void element_put(bench *b, void *at, uint16_t value) {
    const cudaError_t code = cudaMemcpyAsync(at, &value, sizeof value, cudaMemcpyHostToDevice, b->stream);
    if (code != cudaSuccess || !bench_sync(b)) bench_fail(b, "an element could not be written");
}

/* A row of dO that is no number makes this query's gradient, and those of all keys that it sees, no numbers; queries
 * before it keep theirs. */
static void nan_check(bench *b, const world *w) {
    const qe_op op = backward_op(w, 1);
    const uint64_t count = w->rows * w->row, at = (w->sequence / 2) * w->out_row;
    const uint16_t nan = 0x7FC0;
    uint16_t *got = calloc(count, sizeof *got), before = 0;
    bench with = bench_attention_open(b, &op, QE_ATTENTION_OWN);
    const runner r = {&with, NULL, 0, NULL};
    (void)cudaMemcpy(&before, (uint16_t *)w->d_dout + at, sizeof before, cudaMemcpyDeviceToHost);
    element_put(b, (uint16_t *)w->d_dout + at, nan);
    if (with.attention && bench_prepare(&r, &op) && bench_run(&r, &op) && bench_sync(&with)) {
        (void)cudaMemcpy(got, w->d_dqkv, count * sizeof *got, cudaMemcpyDeviceToHost);
        const uint64_t row = w->sequence / 2;
        const uint64_t kv = w->out_row, value = kv + (uint64_t)w->kv_heads * w->head_dim;
        if (!isnan(qe_bf16_decode(got[row * w->row])) || !isnan(qe_bf16_decode(got[row * w->row + kv])) ||
            !isnan(qe_bf16_decode(got[value])) || isnan(qe_bf16_decode(got[(row - 1) * w->row])))
            bench_fail(b, "attention: a gradient that is no number is lost or spreads");
    }
    element_put(b, (uint16_t *)w->d_dout + at, before);
    bench_attention_close(b, &with);
    free(got);
}

/* Both algorithms where ours takes the shape. */
static void case_check(bench *b, const world *w) {
    forward_check(b, w, QE_ATTENTION_CUDNN);
    backward_check(b, w, QE_ATTENTION_CUDNN, 1);
    backward_check(b, w, QE_ATTENTION_CUDNN, 0);
    if (w->head_dim != 64 && w->head_dim != 128) return;
    forward_check(b, w, QE_ATTENTION_OWN);
    backward_check(b, w, QE_ATTENTION_OWN, 1);
    nan_check(b, w);
}

void bench_check_attention(bench *b) {
    static const uint32_t cases[][5] = {{2, 192, 4, 2, 64},  {2, 192, 4, 2, 128}, {1, 256, 2, 2, 128},
                                        {2, 72, 4, 1, 64},   {2, 50, 4, 2, 32},   {1, 640, 8, 1, 128},
                                        {3, 320, 3, 1, 64}};
    printf("attention against sums in double\n");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        world w;
        printf("  %u sequences of %u, %u/%u heads of %u\n", cases[i][0], cases[i][1], cases[i][2], cases[i][3],
               cases[i][4]);
        world_init(b, &w, cases[i][0], cases[i][1], cases[i][2], cases[i][3], cases[i][4]);
        case_check(b, &w);
        world_deinit(&w);
        fflush(stdout);
    }
    qe_op refused = {.kind = QE_OP_ATTENTION, .args.attention = {.sequences = 1, .sequence = 64, .heads = 2,
                                                                .kv_heads = 2, .head_dim = 36}};
    qe_error error = {0};
    if (qe_cuda_attention_prepare(b->attention, &refused, 0, &error) != QE_ERROR_UNSUPPORTED)
        bench_fail(b, "heads of 36 elements were taken");
    else
        printf("  refused as it should: %s\n", error.message);
}
