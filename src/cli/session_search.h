/* session_search.h - pipeline.schedule: auto. */
#ifndef QE_CLI_SESSION_SEARCH_H
#define QE_CLI_SESSION_SEARCH_H

#include "qeffect/model.h"
#include "qeffect/plan.h"
#include "qeffect/settings.h"

/* The order that is best for pipeline.times among those whose plan, made with `plan`, keeps within
 * pipeline.memory_limit, and with all that a rank takes (the plan of an evaluation, too, where it `evaluates`) within
 * train.memory_limit, on every rank.
 * Requires:   checked settings whose schedule is auto.
 * On failure: as qe_schedule_search; QE_ERROR_ARGUMENT where no order is found that fits, with the least bytes that
 *             were; what reading the times says. Owns: the caller deinits *schedule_out. */
qe_status qe_session_search(const qe_settings *settings, const qe_model *model, const qe_plan_options *plan,
                            int evaluates, qe_schedule *schedule_out, qe_error *error_out);

#endif
