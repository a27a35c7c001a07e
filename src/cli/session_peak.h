/* session_peak.h - what microbatches keep at most: as the plan placed it, and as the simulation predicts it. */
#ifndef QE_CLI_SESSION_PEAK_H
#define QE_CLI_SESSION_PEAK_H

#include "qeffect/plan.h"

typedef struct qe_session_peak {
    uint64_t placed_bytes;    /* memory of slots I, X and Y */
    uint64_t live_bytes;      /* most of it that is held at once: the peak activation */
    uint64_t simulated_bytes; /* the simulation's peak for the same schedule */
} qe_session_peak;

/* Of one rank. On failure: as qe_simulation_run. Thread: any. */
qe_status qe_session_peak_of(const qe_plan *plan, const qe_schedule *schedule, uint32_t rank,
                             qe_session_peak *peak_out, qe_error *error_out);

#endif
