/* timed.h - a model whose actions take given times and compute nothing. Planned, certified and run like any other, it
 * shows what a schedule costs on real streams and transports: `qeffect simulate --measured`. */
#ifndef QEFFECT_TIMED_H
#define QEFFECT_TIMED_H

#include "qeffect/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qe_timed_model qe_timed_model;

/* What one stage takes; a B is its I, then its W. */
typedef struct qe_timed_stage {
    uint64_t forward_ns, input_ns, weight_ns;
} qe_timed_stage;

/* Requires:   stages > 0, microbatches > 0.
 * On failure: QE_ERROR_MEMORY. Owns: the caller destroys it, behind the plans and teams that use it. Thread: any. */
qe_status qe_timed_model_create(const qe_timed_stage *stages, uint32_t stage_count, uint32_t microbatches,
                                qe_timed_model **model_out, qe_error *error_out);
void qe_timed_model_destroy(qe_timed_model *model);

/* The table by which plan and step know it; the `model` argument of its functions is a qe_timed_model. */
const qe_model_ops *qe_timed_model_table(void);

/* When an action of the last step ran, in nanoseconds of the monotonic clock. A B lasts from the beginning of its I
 * to the end of its W.
 * Requires:   a step was run and has ended. */
typedef struct qe_timed_span {
    uint64_t begin_ns, end_ns;
} qe_timed_span;
qe_timed_span qe_timed_model_span(const qe_timed_model *model, const qe_action *action);

#ifdef __cplusplus
}
#endif
#endif
