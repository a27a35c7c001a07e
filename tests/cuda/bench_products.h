/* bench_products.h - what the parts of bench_products share: a stream, memory, one way to run an op eagerly or out of
 * a graph, and a verdict per part. A part that fails says so and the next one runs. */
#ifndef QE_TESTS_BENCH_PRODUCTS_H
#define QE_TESTS_BENCH_PRODUCTS_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "backend/cuda/attention_choice.h"
#include "backend/cuda/product.h"
#include "backend/cuda/products.h"

typedef struct bench {
    qe_cuda_gemm *first, *tuned;  /* the heuristic's first candidates; the fastest ones */
    qe_cuda_gemm *lt;             /* the fastest of cuBLASLt's */
    qe_cuda_attention *attention; /* NULL: no cuDNN */
    cudaStream_t stream;
    uint32_t failures;
    double sustained; /* seconds that a measurement lasts; 0: bursts */
    double started, seconds_max; /* no new measurement begins after so many seconds */
} bench;

/* What runs an op: a product of `gemm`, or attention where gemm is NULL. */
typedef struct runner {
    bench *b;
    qe_cuda_gemm *gemm;
    int tune;
    const char *name; /* NULL: "tuned" or "first" */
} runner;

double bench_now(void); /* seconds */
int bench_late(const bench *b);
/* Prints "FAIL: ..." and counts it. */
void bench_fail(bench *b, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Device memory; NULL (and a failure said) where there is none. bench_free takes NULL. */
void *bench_alloc(bench *b, uint64_t bytes);
void *bench_upload(bench *b, const void *host, uint64_t bytes);
void bench_free(void *at);

/* Products with one algorithm chosen; NULL where that was refused and the failure said. */
qe_cuda_gemm *bench_chosen(bench *b, const qe_product *product, const qe_algorithm *algorithm);

/* A copy of `b` whose attention has this algorithm for the op's shape; NULL attention where that was refused and the
 * failure said. Its failures are added by bench_attention_close. */
bench bench_attention_open(bench *b, const qe_op *op, qe_attention_algorithm algorithm);
void bench_attention_close(bench *b, bench *with);

/* 1 where it was done, 0 where a failure was said. */
int bench_prepare(const runner *r, const qe_op *op);
int bench_run(const runner *r, const qe_op *op);
int bench_sync(bench *b);
/* The same ops, captured; NULL where that failed. */
cudaGraphExec_t bench_capture(const runner *r, const qe_op *ops, uint32_t count, uint32_t repeats);
/* Microseconds of one op: `ops` in turn, out of a graph, median of several launches. Negative: failed. */
double bench_time(const runner *r, const qe_op *ops, uint32_t count);

void bench_check_products(bench *b);  /* against sums in double */
void bench_check_choices(bench *b, const char *path); /* written, read, honoured, refused */
void bench_check_attention(bench *b); /* against sums in double */
void bench_time_products(bench *b, int only_shape);
void bench_time_attention(bench *b, int only_shape);
void bench_time_gradients(bench *b, int only_shape); /* gradients: cuBLASLt's best and each other kernel */

/* The layers whose figures are asked for. */
typedef struct bench_shape {
    const char *name;
    uint32_t tokens, hidden, ffn, heads, kv_heads, head_dim;
} bench_shape;
enum { BENCH_SHAPES = 4 };
extern const bench_shape bench_shapes[BENCH_SHAPES];

/* A repeatable number near a normal distribution. */
float bench_random(uint64_t seed, uint64_t index);

#endif
