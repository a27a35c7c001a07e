/* order.h - what the files of this room share. */
#ifndef QE_SCHEDULE_ORDER_H
#define QE_SCHEDULE_ORDER_H

#include "qeffect/schedule.h"

/* Zeroed arrays for sizes->ranks, ->stages and `action_count` actions; sizes' own pointers are ignored.
 * Owns: the caller frees with qe_schedule_deinit. */
qe_status qe_schedule_allocate(const qe_schedule *sizes, uint32_t action_count, qe_schedule *schedule_out,
                               qe_error *error_out);

/* The rank whose row holds the action, by place and not by stage. */
uint32_t qe_schedule_action_rank(const qe_schedule *schedule, uint32_t action_index);

/* Where the F and the I (or B) of every (stage, microbatch) stand: [stages * microbatches] action indices.
 * Without any backward action `backward` holds QE_NONE throughout. */
typedef struct qe_order_index {
    uint32_t *forward;
    uint32_t *backward;
} qe_order_index;

/* Runs the schedule in thought; a schedule that stops gets a counterexample of rule schedule.cycle.
 * Requires:   placement, counts and order on each rank hold; `index` describes the schedule.
 * On failure: QE_CONTRACT with *counterexample_out filled (owned by the caller), or QE_ERROR_MEMORY. */
qe_status qe_schedule_run(const qe_schedule *schedule, const qe_order_index *index,
                          qe_counterexample *counterexample_out, qe_error *error_out);

/* Fills *counterexample_out with a copy of `actions`. On failure: QE_ERROR_MEMORY; else QE_CONTRACT, the verdict. */
qe_status qe_counterexample_set(qe_counterexample *counterexample_out, const qe_counterexample *facts,
                                const uint32_t *actions, uint32_t action_count, qe_error *error_out);

#endif
