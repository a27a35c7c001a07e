/* recipe.c - names of recipes, and the fold of delayed scaling: Transformer Engine's bulk update, one slot.
 * Here `amax` is row 0 of Transformer Engine's history (the row being recorded), so history[0] stays 0. */
#include "qeffect/recipe.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "base/assert.h"

static const char *const names[] = {
    [QE_RECIPE_DELAYED] = "delayed", [QE_RECIPE_CURRENT] = "current", [QE_RECIPE_BLOCK] = "block",
    [QE_RECIPE_BF16] = "bf16",       [QE_RECIPE_FP32] = "fp32",
};

enum { NAME_COUNT = sizeof names / sizeof names[0] };

const char *qe_recipe_name(qe_recipe_kind kind) {
    return (size_t)kind < NAME_COUNT ? names[kind] : "unknown";
}

int qe_recipe_from_name(const char *name, qe_recipe_kind *kind_out) {
    for (size_t i = 0; i < NAME_COUNT; i++) {
        if (strcmp(name, names[i]) != 0) continue;
        *kind_out = (qe_recipe_kind)i;
        return 0;
    }
    return -1;
}

/* NaN loses against any number. Not fmaxf: glibc's returns NaN when one side is a signalling NaN, the device's does
 * not. */
static float larger(float left, float right) {
    return right > left || isnan(left) ? right : left;
}

/* Largest of the row now recorded and the rows kept. The oldest kept row (index 1) still counts: it leaves with
 * this very roll. */
static float window_amax(const qe_scale_state *state, float last) {
    float amax = last;
    for (uint32_t i = 1; i < state->history_length; i++) amax = larger(amax, state->history[i]);
    return amax;
}

static void history_roll(qe_scale_state *state, float last) {
    uint32_t length = state->history_length;
    float *history = state->history;
    if (length > 2) memmove(&history[1], &history[2], (length - 2) * sizeof *history);
    if (length > 1) history[length - 1] = last;
    history[0] = 0.0F;
}

static float next_scale(const qe_scale_state *state, const qe_recipe *recipe, float amax) {
    float scaled_max = state->format_max * powf(2.0F, (float)-recipe->margin);
    float scale = isfinite(amax) && amax > 0.0F ? scaled_max / amax : state->scale;
    return isinf(scale) ? FLT_MAX : scale;
}

void qe_scale_fold(qe_scale_state *state, const qe_recipe *recipe) {
    QE_ASSERT(state->history_length >= 1);
    QE_ASSERT(recipe->kind == QE_RECIPE_DELAYED);
    float last = state->amax;
    state->epoch++;
    if (last == 0.0F) return; /* nothing recorded: neither history nor scale move. NaN is unequal to 0 and goes on. */
    float amax = recipe->amax_algorithm == QE_AMAX_MAX ? window_amax(state, last) : last;
    history_roll(state, last);
    state->scale = next_scale(state, recipe, amax);
    state->amax = 0.0F;
}
