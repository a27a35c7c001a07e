/* bench_steps.c - times whole training steps. All variants are open at once and take turns, a round of steps each, so
 * that a slow minute of the machine slows all of them; ratios are taken within a round, medians over rounds. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/seconds.h"
#include "cli/bench.h"

/* Fills caches, page tables and the queues of threads; two, because the first step quantizes with the first scales. */
enum { WARM_UP_STEPS = 2 };

QE_STATIC_ASSERT((int)QE_BENCH_DELAYED == (int)QE_RECIPE_DELAYED && (int)QE_BENCH_FP32 == (int)QE_RECIPE_FP32,
                 "the first variants are the recipes");

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double qe_bench_median(double *values, size_t count) {
    QE_ASSERT(count > 0);
    qsort(values, count, sizeof *values, by_value);
    return count % 2 == 1 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

double qe_bench_steps_seconds(const qe_bench_steps *bench, qe_bench_variant variant) {
    memcpy(bench->scratch, bench->round_s[variant], bench->rounds * sizeof *bench->scratch);
    return qe_bench_median(bench->scratch, bench->rounds);
}

qe_bench_spread qe_bench_steps_ratio(const qe_bench_steps *bench, qe_bench_variant over, qe_bench_variant under) {
    size_t rounds = bench->rounds;
    for (size_t i = 0; i < rounds; i++) bench->scratch[i] = bench->round_s[over][i] / bench->round_s[under][i];
    double median = qe_bench_median(bench->scratch, rounds); /* sorts */
    return (qe_bench_spread){
        .low = bench->scratch[rounds / 4], .median = median, .high = bench->scratch[rounds - 1 - rounds / 4]};
}

static void settings_of(qe_bench_variant variant, const qe_settings *configured, qe_settings *settings_out) {
    *settings_out = *configured;
    settings_out->train.mode = variant == QE_BENCH_BASELINE   ? QE_TRAIN_BASELINE
                               : variant == QE_BENCH_CAPTURED ? QE_TRAIN_CAPTURED
                                                              : QE_TRAIN_EAGER;
    if (variant == QE_BENCH_UNCHECKED) settings_out->contracts.mode = QE_CONTRACTS_SETTING_OFF;
    if (variant <= QE_BENCH_FP32) settings_out->recipe.kind = (qe_recipe_kind)variant;
}

/* The text is read once; the first session owns it. */
static qe_status open_variant(qe_bench_steps *bench, qe_bench_variant variant, const qe_settings *configured,
                              qe_error *error_out) {
    qe_settings settings;
    qe_session *session = &bench->session[variant];
    settings_of(variant, configured, &settings);
    qe_session_options options = {.training = 1, .data = variant == 0};
    qe_status status = qe_session_open(session, &settings, &options, error_out);
    if (status == QE_CONTRACT)
        return qe_error_set(error_out, status, "qeffect train names the rule", "the configured schedule cannot run");
    QE_TRY(status);
    session->dataset = bench->session[0].dataset;
    bench->next_step[variant] = 1;
    bench->round_s[variant] = calloc(bench->rounds, sizeof *bench->round_s[variant]);
    if (bench->round_s[variant] == NULL)
        return qe_error_set(error_out, QE_ERROR_MEMORY, "ask for fewer pairs", "no memory for the times");
    return qe_session_initialize(session, error_out);
}

static qe_status run_steps(qe_bench_steps *bench, qe_bench_variant variant, uint64_t steps, double *step_s_out,
                           qe_error *error_out) {
    qe_step_result result;
    double begin = qe_seconds_now();
    for (uint64_t i = 0; i < steps; i++) {
        uint64_t step = bench->next_step[variant]++;
        qe_status status = qe_session_step(&bench->session[variant], step, &result, error_out);
        int broken = status == QE_CONTRACT || (status == QE_OK && result.violation_rank != QE_NONE);
        if (broken || (status == QE_OK && result.vetoed))
            return qe_error_set(error_out, QE_CONTRACT, "qeffect train on the same configuration shows it",
                                "step %llu of a timed run %s", (unsigned long long)step,
                                result.vetoed ? "is not finite" : "breaks a rule");
        QE_TRY(status);
    }
    *step_s_out = (qe_seconds_now() - begin) / (double)steps;
    return QE_OK;
}

/* Every round begins with another variant: no one always runs behind the same neighbour. */
static qe_status run_round(qe_bench_steps *bench, uint64_t round, uint64_t steps, qe_error *error_out) {
    for (uint64_t turn = 0; turn < QE_BENCH_VARIANTS; turn++) {
        qe_bench_variant variant = (qe_bench_variant)((turn + round) % QE_BENCH_VARIANTS);
        QE_TRY(run_steps(bench, variant, steps, &bench->round_s[variant][round], error_out));
    }
    return QE_OK;
}

static void tell(int terminal, uint64_t round, uint64_t rounds) {
    if (!terminal) return;
    fprintf(stderr, "\r\033[K");
    if (round <= rounds) fprintf(stderr, "round %llu/%llu", (unsigned long long)round, (unsigned long long)rounds);
    fflush(stderr);
}

qe_status qe_bench_steps_measure(qe_bench_steps *bench, const qe_settings *settings, uint64_t steps, uint64_t rounds,
                                 int terminal, qe_error *error_out) {
    double ignored;
    memset(bench, 0, sizeof *bench);
    bench->rounds = rounds;
    bench->configured = (qe_bench_variant)settings->recipe.kind;
    bench->scratch = calloc(rounds, sizeof *bench->scratch);
    if (bench->scratch == NULL)
        return qe_error_set(error_out, QE_ERROR_MEMORY, "ask for fewer pairs", "no memory for the times");
    for (int v = 0; v < QE_BENCH_VARIANTS; v++) QE_TRY(open_variant(bench, (qe_bench_variant)v, settings, error_out));
    bench->tokens_per_step = (uint64_t)bench->session[0].sequences_per_step * settings->model.sequence;
    for (int v = 0; v < QE_BENCH_VARIANTS; v++)
        QE_TRY(run_steps(bench, (qe_bench_variant)v, WARM_UP_STEPS, &ignored, error_out));
    qe_status status = QE_OK;
    for (uint64_t round = 0; status == QE_OK && round < rounds; round++) {
        tell(terminal, round + 1, rounds);
        status = run_round(bench, round, steps, error_out);
    }
    tell(terminal, rounds + 1, rounds);
    return status;
}

void qe_bench_steps_deinit(qe_bench_steps *bench) {
    for (int v = QE_BENCH_VARIANTS; v-- > 0;) {
        if (v > 0) bench->session[v].dataset = NULL;
        qe_session_close(&bench->session[v]);
        free(bench->round_s[v]);
    }
    free(bench->scratch);
    memset(bench, 0, sizeof *bench);
}
