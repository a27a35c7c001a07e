/* bench_actions.c - how long F, I and W of each stage take: what a search for a schedule begins with. The stages of the
 * configured pipeline run on one rank, one microbatch after the other, so that nothing runs beside an action and
 * nothing is waited for; an action lasts from the end of the one before it to its own. */
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "cli/bench.h"
#include "cli/stopwatch.h"

enum { STEPS = 7, MICROBATCHES = 4 }; /* the first step warms up, and the first microbatch of each step */

typedef struct actions_bench {
    qe_session session;
    qe_stopwatch watch;
    qe_bench_stage *out; /* [stages] */
    double *samples;     /* [stages][QE_STOPWATCH_KINDS][STEPS * MICROBATCHES] */
    uint32_t stages, count;
} actions_bench;

static qe_settings settings_of(const qe_settings *configured, uint32_t stages) {
    qe_settings settings = *configured;
    settings.pipeline = (qe_settings_pipeline){.schedule = "sequential", .ranks = 1, .chunks = stages,
                                               .microbatches = MICROBATCHES,
                                               .cache_weights = configured->pipeline.cache_weights,
                                               .placement = configured->pipeline.placement};
    settings.train.mode = QE_TRAIN_EAGER;
    settings.contracts.mode = QE_CONTRACTS_SETTING_OFF;
    return settings;
}

/* The end of what the rank did before. Forwards go down the stages, backwards up. */
static uint64_t begin_ns(const qe_stopwatch *watch, uint32_t stage, uint32_t m, qe_action_kind kind) {
    uint32_t last = watch->stages - 1;
    if (kind == QE_ACTION_W) return qe_stopwatch_end_ns(watch, stage, m, QE_ACTION_I);
    if (kind == QE_ACTION_F && stage > 0) return qe_stopwatch_end_ns(watch, stage - 1, m, QE_ACTION_F);
    if (kind == QE_ACTION_F) return qe_stopwatch_end_ns(watch, 0, m - 1, QE_ACTION_W);
    return stage == last ? qe_stopwatch_end_ns(watch, last, m, QE_ACTION_F)
                         : qe_stopwatch_end_ns(watch, stage + 1, m, QE_ACTION_W);
}

static double *samples_of(const actions_bench *b, uint32_t stage, int kind) {
    return b->samples + ((size_t)stage * QE_STOPWATCH_KINDS + (size_t)kind) * STEPS * MICROBATCHES;
}

static void take_samples(actions_bench *b) {
    for (uint32_t m = 1; m < MICROBATCHES; m++, b->count++) {
        for (uint32_t stage = 0; stage < b->stages; stage++) {
            for (int kind = 0; kind < QE_STOPWATCH_KINDS; kind++) {
                uint64_t end = qe_stopwatch_end_ns(&b->watch, stage, m, (qe_action_kind)kind);
                uint64_t begin = begin_ns(&b->watch, stage, m, (qe_action_kind)kind);
                QE_ASSERT(end >= begin);
                samples_of(b, stage, kind)[b->count] = 1e-6 * (double)(end - begin);
            }
        }
    }
}

static qe_status run_steps(actions_bench *b, qe_error *error_out) {
    qe_step_result result;
    for (uint64_t step = 1; step <= STEPS; step++) {
        QE_TRY(qe_session_step(&b->session, step, &result, error_out));
        if (result.vetoed) {
            return qe_error_set(error_out, QE_CONTRACT, "qeffect train on the same configuration shows it",
                                "step %llu of a timed run is not finite", (unsigned long long)step);
        }
        if (step > 1) take_samples(b);
    }
    for (uint32_t stage = 0; stage < b->stages; stage++) {
        for (int kind = 0; kind < QE_STOPWATCH_KINDS; kind++) {
            b->out[stage].ms[kind] = qe_bench_median(samples_of(b, stage, kind), b->count);
        }
    }
    return QE_OK;
}

static qe_status open_actions(actions_bench *b, const qe_settings *configured, qe_dataset *dataset,
                              qe_error *error_out) {
    qe_settings settings = settings_of(configured, b->stages);
    qe_session_options options = {.training = 1, .watch = &b->watch};
    b->samples = calloc((size_t)b->stages * QE_STOPWATCH_KINDS * STEPS * MICROBATCHES, sizeof *b->samples);
    if (b->samples == NULL) {
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the times of actions");
    }
    QE_TRY(qe_stopwatch_init(&b->watch, b->stages, MICROBATCHES, error_out));
    QE_TRY(qe_session_open(&b->session, &settings, &options, error_out));
    b->session.dataset = dataset;
    return qe_session_initialize(&b->session, error_out);
}

qe_status qe_bench_actions_measure(const qe_settings *settings, uint32_t stages, qe_dataset *dataset,
                                   qe_bench_stage *stages_out, qe_error *error_out) {
    actions_bench b = {.out = stages_out, .stages = stages};
    QE_ASSERT(stages <= QE_CHUNKS_MAX);
    qe_status status = open_actions(&b, settings, dataset, error_out);
    if (status == QE_OK) status = run_steps(&b, error_out);
    b.session.dataset = NULL; /* the caller's */
    qe_session_close(&b.session);
    qe_stopwatch_deinit(&b.watch);
    free(b.samples);
    return status;
}
