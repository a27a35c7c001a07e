/* bench_deposits.h - what it costs to copy gradients, foretold from kernels alone: the products that deposit, the moves
 * and the additions of a step, at the same sizes and with the same algorithms, on memory of their own. */
#ifndef QE_CLI_BENCH_DEPOSITS_H
#define QE_CLI_BENCH_DEPOSITS_H

#include "cli/bench_run.h"

typedef struct qe_bench_deposits {
    double copies_ms;  /* that the copies of a step take, behind products */
    double read_bytes; /* that products read which add to a gradient, and do not where they set a copy */
    double reads_ms;   /* that this takes */
} qe_bench_deposits;

/* Times `turns` turns of `samples` samples each, as steps are timed, with the run's rest before every sample. On a GPU
 * a step of the run goes ahead in every sample: its state moves on.
 * Requires: `run` is open, under placement copy.
 * On failure: an operating error; QE_CONTRACT as its steps. Thread: the run's. */
qe_status qe_bench_deposits_measure(qe_bench_run *run, uint64_t samples, uint64_t turns,
                                    qe_bench_deposits *deposits_out, qe_error *error_out);

#endif
