/* progress.h - one moving line on a terminal, plain lines elsewhere; always standard error. */
#ifndef QE_CLI_PROGRESS_H
#define QE_CLI_PROGRESS_H

#include <stdint.h>

typedef struct qe_progress {
    int terminal, line_open;
    uint64_t first, steps; /* first: of this process, 1 where it goes on from nothing */
    double begin_s, printed_s;
    double validation; /* last validation loss, 0: none yet */
} qe_progress;

void qe_progress_begin(qe_progress *progress, int terminal, uint64_t first, uint64_t steps);
void qe_progress_step(qe_progress *progress, uint64_t step, double loss, double tokens_per_s);
void qe_progress_validation(qe_progress *progress, uint64_t step, double loss);
/* Leaves the moving line standing. May be called more than once. */
void qe_progress_end(qe_progress *progress);

#endif
