/* verify_compare.c - where two rows part, and whether a baseline's steps were the test they must be. */
#include <math.h>
#include <string.h>
#include "cli/verify.h"

/* Bit for bit: 0 and -0 are two values here. */
static int same_bits(double a, double b) {
    return memcmp(&a, &b, sizeof a) == 0;
}

static int same_tensor(const qe_verify_tensor *a, const qe_verify_tensor *b, uint32_t step) {
    return strcmp(a->name, b->name) == 0 && a->digest[step].high == b->digest[step].high &&
           a->digest[step].low == b->digest[step].low;
}

static void name_it(qe_verify_difference *difference, uint32_t step, const char *what, double expected, double found) {
    if (difference->step != 0) return; /* the first stays */
    *difference = (qe_verify_difference){.step = step + 1, .expected = expected, .found = found};
    snprintf(difference->what, sizeof difference->what, "%s", what);
}

static void compare_tensors(const qe_verify_outcome *baseline, const qe_verify_outcome *outcome, uint32_t step,
                            qe_verify_difference *difference) {
    uint32_t both = baseline->tensor_count < outcome->tensor_count ? baseline->tensor_count : outcome->tensor_count;
    uint32_t different = 0;
    for (uint32_t i = 0; i < both; i++) {
        if (same_tensor(&baseline->tensors[i], &outcome->tensors[i], step)) continue;
        name_it(difference, step, baseline->tensors[i].name, 0, 0);
        if (different++ == 0)
            snprintf(difference->tensor, sizeof difference->tensor, "%s", baseline->tensors[i].name);
    }
    if (baseline->tensor_count != outcome->tensor_count) name_it(difference, step, "the list of tensors", 0, 0);
    if (difference->step != 0) difference->tensors = different;
}

qe_verify_difference qe_verify_compare(const qe_verify_outcome *baseline, const qe_verify_outcome *outcome) {
    qe_verify_difference difference = {0};
    for (uint32_t step = 0; step < QE_VERIFY_STEPS && difference.step == 0; step++) {
        double loss[] = {baseline->loss[step], outcome->loss[step]};
        double norm[] = {baseline->norm[step], outcome->norm[step]};
        if (!same_bits(loss[0], loss[1])) name_it(&difference, step, "loss", loss[0], loss[1]);
        if (!same_bits(norm[0], norm[1])) name_it(&difference, step, "gradient norm", norm[0], norm[1]);
        compare_tensors(baseline, outcome, step, &difference);
    }
    if (strcmp(baseline->hash, outcome->hash) != 0) /* digests and hash are over the same bytes */
        name_it(&difference, QE_VERIFY_STEPS - 1, "state_hash", 0, 0);
    return difference;
}

static void judge_scale(qe_verify_exercise *exercise, const qe_verify_tensor *scale) {
    int rose = 0, fell = 0;
    for (int step = 1; step < QE_VERIFY_STEPS; step++) {
        rose |= scale->largest[step] > scale->largest[step - 1];
        fell |= scale->largest[step] < scale->largest[step - 1];
    }
    exercise->scales++;
    exercise->rose += rose != 0;
    exercise->fell += fell != 0;
    if ((!rose || !fell) && exercise->still[0] == 0)
        snprintf(exercise->still, sizeof exercise->still, "%s", scale->name);
}

/* The Inf came to this history in its step, its scale did not move then, and it is forgotten in the end. */
static int judge_hooked(const qe_verify_tensor *scale, const qe_verify_tensor *history) {
    int at = QE_VERIFY_INFINITE_STEP - 1;
    return (history->single || isinf(history->largest[at])) && scale->largest[at] == scale->largest[at - 1] &&
           isfinite(history->largest[QE_VERIFY_STEPS - 1]);
}

static int has_infinity(const qe_verify_tensor *history) {
    for (int step = 0; step < QE_VERIFY_STEPS; step++)
        if (!isfinite(history->largest[step])) return 1;
    return 0;
}

void qe_verify_exercise_judge(qe_verify_outcome *baseline) {
    qe_verify_exercise *exercise = &baseline->exercise;
    int came = 0, elsewhere = 0;
    for (uint32_t i = 0; i < baseline->tensor_count; i++) {
        const qe_verify_tensor *tensor = &baseline->tensors[i];
        if (tensor->kind == QE_STATE_SCALE) judge_scale(exercise, tensor);
        if (tensor->kind != QE_STATE_HISTORY) continue;
        if (tensor->hooked) came = judge_hooked(tensor - 1, tensor); /* a history follows its scale */
        else elsewhere |= has_infinity(tensor);
    }
    exercise->infinite_amax = exercise->scales == 0 || (came && !elsewhere);
}

int qe_verify_exercised(const qe_verify_exercise *exercise) {
    return exercise->rose == exercise->scales && exercise->fell == exercise->scales && exercise->zero_microbatch &&
           exercise->infinite_amax;
}
