/* recipe.h - how tensors are quantized, and the hidden scaling state that delayed scaling carries.
 * Arithmetic: docs/numerics.md. Source of delayed scaling: Transformer Engine's bulk update kernel
 * (common/recipe/delayed_scaling.cu), of block scaling: its Float8BlockScaling recipe. */
#ifndef QEFFECT_RECIPE_H
#define QEFFECT_RECIPE_H

#include <stdint.h>
#include "qeffect/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum qe_format { QE_FORMAT_E4M3, QE_FORMAT_E5M2, QE_FORMAT_BF16, QE_FORMAT_FP32 } qe_format;

typedef enum qe_recipe_kind {
    QE_RECIPE_DELAYED, /* per-tensor scale from a history of amaxes */
    QE_RECIPE_CURRENT, /* per-tensor scale from this tensor's amax */
    QE_RECIPE_BLOCK,   /* 1x128 activations and gradients, 128x128 weights, E4M3, power-of-two scales */
    QE_RECIPE_BF16,    /* operands rounded to bf16 */
    QE_RECIPE_FP32,    /* operands as they are */
} qe_recipe_kind;

typedef enum qe_amax_algorithm { QE_AMAX_MAX, QE_AMAX_MOST_RECENT } qe_amax_algorithm;

typedef struct qe_recipe {
    qe_recipe_kind kind;
    uint32_t history_length;          /* delayed: 1..QE_HISTORY_MAX */
    int32_t margin;                   /* delayed: the scale is divided by 2^margin; -64..64 */
    qe_amax_algorithm amax_algorithm; /* delayed */
} qe_recipe;

/* Hidden state of one tensor role under delayed scaling. The caller owns `history` (history_length floats, the
 * newest at index history_length-1 after a fold, index 0 is the current row and is 0 between folds). */
typedef struct qe_scale_state {
    float scale;             /* multiplies a tensor before it is rounded; 1 at first */
    float amax;              /* largest |x| recorded since the last fold; step-local, never hashed */
    float *history;          /* [history_length] */
    uint32_t history_length;
    float format_max;        /* 448 or 57344 */
    uint64_t epoch;          /* folds so far: the witness of what `scale` stands for; never hashed */
} qe_scale_state;

/* amax -> history -> next scale, bit for bit Transformer Engine's bulk update (te.md 1.2): an amax of 0 is a no-op,
 * NaN counts as recorded, an Inf in the window freezes the scale, an infinite scale becomes FLT_MAX. amax is 0 after.
 * Requires:   state->history_length >= 1, recipe->kind == QE_RECIPE_DELAYED.
 * Thread:     one per state. Capture: recorded. */
void qe_scale_fold(qe_scale_state *state, const qe_recipe *recipe);

/* 448, 57344, or 0 for formats without a scale. */
float qe_format_max(qe_format format);
/* Bytes of one element. */
uint32_t qe_format_bytes(qe_format format);

/* "delayed" ... <-> QE_RECIPE_DELAYED ...; returns 0 on success, -1 for an unknown name. */
const char *qe_recipe_name(qe_recipe_kind kind);
int qe_recipe_from_name(const char *name, qe_recipe_kind *kind_out);

#ifdef __cplusplus
}
#endif
#endif
