/* stopwatch.h - a model's table with a look at the clock behind every action: when F, I and W of each stage ended. */
#ifndef QE_CLI_STOPWATCH_H
#define QE_CLI_STOPWATCH_H

#include "qeffect/model.h"
#include "qeffect/plan.h"

enum { QE_STOPWATCH_KINDS = 3 }; /* F, I, W: a B is an I, then a W */

typedef struct qe_stopwatch {
    const qe_model *model;  /* whose actions they are */
    uint32_t stages, microbatches;
    uint64_t (*spans_ns)[2]; /* [stages][microbatches][QE_STOPWATCH_KINDS] of each look, of the last step; owned */
} qe_stopwatch;

/* Sizes come from the caller, the model when it is known. On failure: QE_ERROR_MEMORY. Owns: the caller deinits it
 * behind the plans and teams that use it. */
qe_status qe_stopwatch_init(qe_stopwatch *watch, uint32_t stages, uint32_t microbatches, qe_error *error_out);
void qe_stopwatch_deinit(qe_stopwatch *watch);
/* The table of the built-in model, for which `model` is a qe_stopwatch. The looks run on the host's streams only. */
const qe_model_ops *qe_stopwatch_table(void);
/* When an action of the last step ended, in nanoseconds of the monotonic clock. kind: F, I or W. */
uint64_t qe_stopwatch_end_ns(const qe_stopwatch *watch, uint32_t stage, uint32_t microbatch, qe_action_kind kind);

#endif
