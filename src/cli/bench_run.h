/* bench_run.h - training steps of a model made for measuring: random weights and tokens, no data, no evaluation. */
#ifndef QE_CLI_BENCH_RUN_H
#define QE_CLI_BENCH_RUN_H

#include "cli/bench.h"
#include "cli/bench_layer.h"
#include "cli/session.h"

enum { QE_BENCH_RUN_STEPS_MAX = 1000 };

/* What is trained, by name. */
typedef struct qe_bench_shape {
    const char *name; /* "1.1b" */
    uint32_t layers, hidden, ffn, heads, kv_heads, vocab;
    uint32_t sequence, sequences; /* tokens of a window, windows of a microbatch */
    const char *schedule;
    uint32_t ranks, microbatches;
} qe_bench_shape;

/* The defaults with this shape in place, captured, a graph per action; then what the command line says over it. Returns
 * an exit status. */
int qe_bench_shape_settings(qe_cli *cli, const qe_bench_shape *shape, qe_settings *settings_out);

typedef struct qe_bench_run {
    qe_session session;
    uint64_t next_step;
    double open_s;              /* plan, memory, algorithms, graphs */
    qe_step_result last;
    double step_s[QE_BENCH_RUN_STEPS_MAX]; /* of steps that were measured, in turn */
    uint64_t actions_ns[QE_BENCH_RUN_STEPS_MAX], commit_ns[QE_BENCH_RUN_STEPS_MAX];
    uint32_t measured;
    uint64_t rest_ms; /* before every step; 0: none */
} qe_bench_run;

/* Opens, fills, and runs two steps that are not measured. Owns: close it either way. */
qe_status qe_bench_run_open(qe_bench_run *run, const qe_settings *settings, qe_device_kind device,
                            qe_error *error_out);
/* One step that is not measured. On failure: QE_CONTRACT too where it breaks a rule or is not finite. */
qe_status qe_bench_run_step(qe_bench_run *run, qe_error *error_out);
/* Runs and measures more steps. On failure: as a step that is not measured. */
qe_status qe_bench_run_steps(qe_bench_run *run, uint64_t steps, qe_error *error_out);
void qe_bench_run_close(qe_bench_run *run);

/* Medians of what was measured. Requires: some. */
double qe_bench_run_step_ms(const qe_bench_run *run);
double qe_bench_run_actions_ms(const qe_bench_run *run);
double qe_bench_run_commit_ms(const qe_bench_run *run);

/* A folder of this process for a file of algorithms, so that all sessions of one command choose alike, and its path in
 * settings->train.algorithms; nothing where the settings name one, or the device has no choice. */
typedef struct qe_bench_choices {
    char folder[64];
} qe_bench_choices;
qe_status qe_bench_choices_open(qe_bench_choices *choices, qe_device_kind device, qe_settings *settings,
                                qe_error *error_out);
void qe_bench_choices_close(qe_bench_choices *choices);

/* A large product's and a large copy's rate on this device, taken now. */
qe_status qe_bench_run_ceilings(qe_device_kind device, qe_bench_ceilings *ceilings_out, qe_error *error_out);

#endif
