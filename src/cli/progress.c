/* progress.c - how far a run is. A terminal sees ten updates a second, a pipe a line every few seconds. */
#include "cli/progress.h"

#include <stdio.h>
#include "base/seconds.h"

static const double terminal_interval_s = 0.1, plain_interval_s = 5.0;

void qe_progress_begin(qe_progress *progress, int terminal, uint64_t first, uint64_t steps) {
    *progress = (qe_progress){.terminal = terminal, .first = first, .steps = steps, .begin_s = qe_seconds_now()};
}

void qe_progress_step(qe_progress *progress, uint64_t step, double loss, double tokens_per_s) {
    double now = qe_seconds_now();
    double interval = progress->terminal ? terminal_interval_s : plain_interval_s;
    if (step != progress->first && step != progress->steps && now - progress->printed_s < interval) return;
    progress->printed_s = now;
    double done = (double)(step - progress->first + 1);
    uint64_t left = (uint64_t)((now - progress->begin_s) / done * (double)(progress->steps - step) + 0.5);
    if (progress->terminal) fputs("\r\033[K", stderr);
    fprintf(stderr, "step %llu/%llu  loss %.4f  %.0f tokens/s  %llu:%02llu left", (unsigned long long)step,
            (unsigned long long)progress->steps, loss, tokens_per_s, (unsigned long long)(left / 60),
            (unsigned long long)(left % 60));
    if (!progress->terminal) fputc('\n', stderr);
    progress->line_open = progress->terminal;
    fflush(stderr);
}

void qe_progress_validation(qe_progress *progress, uint64_t step, double loss) {
    qe_progress_end(progress);
    fprintf(stderr, "step %llu  validation %.4f\n", (unsigned long long)step, loss);
    progress->validation = loss;
}

void qe_progress_end(qe_progress *progress) {
    if (progress->line_open) fputc('\n', stderr);
    progress->line_open = 0;
}
