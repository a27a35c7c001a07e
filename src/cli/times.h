/* times.h - what actions take and keep, on a command line: --times and what goes with it. */
#ifndef QE_CLI_TIMES_H
#define QE_CLI_TIMES_H

#include "cli/cli.h"
#include "qeffect/simulate.h"

/* The options of every command that asks what a schedule costs; a part of its option table. */
#define QE_TIMES_OPTIONS                                                                                          \
    {"times", 0, "F,I,W[,C]", "times of a whole rank, and of a hop to another rank (default 1,1,1,0)", 0},        \
        {"stage-times", 0, "FILE", "a line F,I,W per stage instead, or what bench --json wrote", 0},              \
        {"weight-share", 0, "X", "part of what a microbatch keeps that is kept until W (default 1)", 0}, {        \
        "memory-limit", 0, "N", "most microbatches that a rank may keep, in whole ranks' worth", 0                \
    }

typedef struct qe_times {
    double hop;             /* latency of a transfer to another rank */
    double memory_limit;    /* in microbatches of a whole rank; 0: none */
    qe_stage_cost *costs;   /* [stages]; owned */
} qe_times;

/* A number of 0 or more from an option; `fallback` when absent. On failure prints usage text and returns -1. */
int qe_times_number(const qe_cli *cli, const char *name, double fallback, double *value_out);
/* The same for what cannot be 0, which stands for "not given" here as in the library's requests. */
int qe_times_positive(const qe_cli *cli, const char *name, double *value_out);
/* "F,I,W" or "F,I,W,C" of a whole rank, for the stages of a schedule; `share` of what is kept stays until W.
 * On failure: QE_ERROR_ARGUMENT, QE_ERROR_MEMORY. Owns: the caller deinits *times_out, which has no limit. */
qe_status qe_times_parse(const char *text, const qe_schedule *shape, double share, qe_times *times_out,
                         qe_error *error_out);
/* A file with a line F,I,W per stage, or a JSON document with "stage_times" as `bench --json` writes it.
 * On failure: also QE_ERROR_IO, QE_ERROR_FORMAT with the place. */
qe_status qe_times_load(const char *path, const qe_schedule *shape, double share, qe_times *times_out,
                        qe_error *error_out);
/* Reads the options for a schedule. Returns an exit status; it has printed what is wrong. Owns: the caller deinits
 * *times_out when the status is QE_EXIT_OK. */
int qe_times_read(const qe_cli *cli, const qe_schedule *schedule, qe_times *times_out);
/* Deinit of zeroed times is a no-op. */
void qe_times_deinit(qe_times *times);

#endif
