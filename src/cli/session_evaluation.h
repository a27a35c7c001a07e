/* session_evaluation.h - what an evaluation runs, given the order that trains. */
#ifndef QE_CLI_SESSION_EVALUATION_H
#define QE_CLI_SESSION_EVALUATION_H

#include "qeffect/plan.h"

extern const qe_plan_options qe_evaluation_options;

/* A copy of a schedule with only its forwards. Owns: the caller deinits *out. */
qe_status qe_evaluation_schedule(const qe_schedule *schedule, qe_schedule *out, qe_error *error_out);

#endif
