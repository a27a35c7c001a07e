/* bench_layer.h - figures of one layer. */
#ifndef QE_CLI_BENCH_LAYER_H
#define QE_CLI_BENCH_LAYER_H

#include "cli/layer.h"

/* Milliseconds of one turn: median and quartiles of samples that each cover about 50 ms. */
typedef struct qe_bench_figure {
    double median_ms, low_ms, high_ms;
    size_t samples;
    double seconds; /* how long it was sustained */
    double sm_mhz, power_w; /* medians meanwhile; 0: nobody knows */
} qe_bench_figure;

typedef struct qe_bench_op {
    qe_op_kind kind;
    const char *title; /* qe_op_title */
    char phase; /* 'F', 'I', 'W' */
    double us;  /* among others like it, in a graph */
    qe_layer_work work;
} qe_bench_op;

typedef struct qe_bench_layer {
    qe_bench_figure captured, eager;
    double launch_us, launch_low_us, launch_high_us; /* host time of a replay: median and quartiles */
    double guards_us;                                /* both */
    double capture_s;
    uint64_t graph_bytes; /* of one set's graph, as far as free memory shows it */
    qe_bench_op ops[QE_LAYER_OPS_MAX];
    uint32_t op_count;
} qe_bench_layer;

typedef struct qe_bench_ceilings {
    double product_flops; /* of a large square product, fast accumulation */
    double copy_bytes;    /* of a large copy, read and written */
    double sum_bytes;     /* qe_bench_run_ceilings alone: of a large addition onto something */
} qe_bench_ceilings;

qe_status qe_bench_layer_measure(qe_layer *layer, double seconds, int with_eager, qe_bench_layer *out,
                                 qe_error *error_out);
qe_status qe_bench_layer_ops(qe_layer *layer, qe_bench_layer *out, qe_error *error_out);
qe_status qe_bench_layer_ceilings(qe_layer *layer, qe_bench_ceilings *out, qe_error *error_out);
/* Requires: ops were timed. */
double qe_bench_layer_floor_ms(const qe_bench_layer *bench, const qe_bench_ceilings *ceilings);

#endif
