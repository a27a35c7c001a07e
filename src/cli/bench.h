/* bench.h - what the files of `qeffect bench` share. Every figure of a report comes from one run of one process, so
 * that ratios compare like with like: whatever else the machine does falls on both sides. */
#ifndef QE_CLI_BENCH_H
#define QE_CLI_BENCH_H

#include "cli/session.h"

enum {
    QE_BENCH_STEPS_MAX = 10000, /* steps of one round: a round is over within minutes */
    QE_BENCH_PAIRS_MAX = 1000,
    QE_BENCH_SHAPES_MAX = 5 /* linears of the model: qkv, out, gate_up, down, head */
};

/* What takes turns. The first five are the recipes in the order of qe_recipe_kind; the others run the configured. */
typedef enum qe_bench_variant {
    QE_BENCH_DELAYED,
    QE_BENCH_CURRENT,
    QE_BENCH_BLOCK,
    QE_BENCH_BF16,
    QE_BENCH_FP32,
    QE_BENCH_BASELINE,
    QE_BENCH_UNCHECKED,
    QE_BENCH_CAPTURED,
    QE_BENCH_VARIANTS
} qe_bench_variant;

/* Sessions that are open side by side, and how long their steps took. */
typedef struct qe_bench_steps {
    qe_session session[QE_BENCH_VARIANTS];
    uint64_t next_step[QE_BENCH_VARIANTS];
    double *round_s[QE_BENCH_VARIANTS]; /* [rounds] seconds of one step, mean of a round */
    double *scratch; /* [rounds] */
    uint64_t rounds;
    qe_bench_variant configured; /* the recipe of the configuration */
    uint64_t tokens_per_step;
} qe_bench_steps;

/* Opens every variant of `settings` and times `rounds` rounds of `steps` steps of each in turn.
 * Owns: deinit it either way. On failure: an operating error, or QE_CONTRACT with a message. */
qe_status qe_bench_steps_measure(qe_bench_steps *bench, const qe_settings *settings, uint64_t steps, uint64_t rounds,
                                 int terminal, qe_error *error_out);
void qe_bench_steps_deinit(qe_bench_steps *bench);
/* Seconds of a step, median over rounds. */
double qe_bench_steps_seconds(const qe_bench_steps *bench, qe_bench_variant variant);
/* Ratio of two variants, taken within each round: median and quartiles over rounds. A machine that is busy with other
 * things shows in the quartiles. */
typedef struct qe_bench_spread {
    double low, median, high;
} qe_bench_spread;
qe_bench_spread qe_bench_steps_ratio(const qe_bench_steps *bench, qe_bench_variant over, qe_bench_variant under);

/* The ledger's own time on the plan that the configured recipe trains with. */
typedef struct qe_bench_contracts {
    uint64_t items_per_step, ops_per_step; /* all ranks */
    double check_ns; /* one certified item: median over blocks of items, ledger in the cache */
    double check_cold_ns; /* the same, mean of a step whose ledger was driven out of the near caches before */
    double judge_ns; /* one item by full judgement */
    double step_check_us; /* begin, all items, end; all ranks one after the other; cold */
} qe_bench_contracts;
qe_status qe_bench_contracts_measure(const qe_plan *plan, qe_bench_contracts *contracts_out, qe_error *error_out);

/* Recorded graphs of the size of an action, with ops that do nothing: what is left is the cost of replay. */
typedef struct qe_bench_graphs {
    uint64_t ops, words;  /* of the graph; of its two guards together */
    double launch_ns;     /* the submitter's time for arming and launching one */
    double seal_ns;       /* comparing its ops with what was recorded */
    double replay_ns;     /* both: host time of a replay beyond its ops */
    double eager_ns;      /* the submitter's time for the same ops one by one */
    double node_ns;       /* one op inside, start to end */
    double guard_ns;      /* both guards */
} qe_bench_graphs;
qe_status qe_bench_graphs_measure(qe_bench_graphs *graphs_out, qe_error *error_out);

/* Kernels alone on the calling thread, at the model's sizes. */
typedef struct qe_bench_quantize {
    const char *what;
    uint32_t rows, columns;
    double gelements_per_s, copy_gelements_per_s; /* copy: as many floats by memcpy, in turn with it */
    double ratio; /* of the two rates, median of pairs */
} qe_bench_quantize;
enum { QE_BENCH_QUANTIZE_ROWS = 4, QE_BENCH_PRODUCTS = 3 };
typedef struct qe_bench_linear {
    const char *name;
    uint32_t rows, in, out;
    double gflops[QE_BENCH_PRODUCTS]; /* forward, input gradient, weight gradient */
} qe_bench_linear;
typedef struct qe_bench_kernels {
    qe_bench_quantize quantize[QE_BENCH_QUANTIZE_ROWS];
    qe_bench_linear linear[QE_BENCH_SHAPES_MAX];
} qe_bench_kernels;
qe_status qe_bench_kernels_measure(const qe_settings *settings, qe_bench_kernels *kernels_out, qe_error *error_out);

/* One stage's F, I and W, as the host runs them: medians over microbatches and steps. */
typedef struct qe_bench_stage {
    double ms[3];
} qe_bench_stage;
/* Requires: stages of the configured pipeline, at most QE_CHUNKS_MAX; an open dataset. */
qe_status qe_bench_actions_measure(const qe_settings *settings, uint32_t stages, qe_dataset *dataset,
                                   qe_bench_stage *stages_out, qe_error *error_out);

/* Median of values; they are sorted. Requires: count > 0. */
double qe_bench_median(double *values, size_t count);

#endif
