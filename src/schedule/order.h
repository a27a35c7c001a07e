/* order.h - what the files of this room share. */
#ifndef QE_SCHEDULE_ORDER_H
#define QE_SCHEDULE_ORDER_H

#include "qeffect/schedule.h"

/* Zeroed arrays for sizes->ranks, ->stages and `action_count` actions; sizes' own pointers are ignored.
 * Owns: the caller frees with qe_schedule_deinit. */
qe_status qe_schedule_allocate(const qe_schedule *sizes, uint32_t action_count, qe_schedule *schedule_out,
                               qe_error *error_out);

/* Everything that qe_schedule_generate refuses but the number of actions, which only what is stored must obey. */
qe_status qe_schedule_request_check(const qe_schedule_request *request, qe_error *error_out);

/* The rank whose row holds the action, by place and not by stage. */
uint32_t qe_schedule_action_rank(const qe_schedule *schedule, uint32_t action_index);

/* Shape, placement, counts and order on each rank.
 * On failure: QE_CONTRACT with *counterexample_out filled (owned by the caller), or an operating error. */
qe_status qe_schedule_check_rows(const qe_schedule *schedule, qe_counterexample *counterexample_out,
                                 qe_error *error_out);

/* Fills *counterexample_out with a copy of `cited`. On failure: QE_ERROR_MEMORY; else QE_CONTRACT, the verdict. */
qe_status qe_counterexample_set(qe_counterexample *counterexample_out, const qe_counterexample *facts,
                                const qe_cited *cited, uint32_t cited_count, qe_error *error_out);

#endif
