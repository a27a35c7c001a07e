/* measure.h - a schedule run for real, with actions that sleep: how long it takes on this machine's streams. */
#ifndef QE_CLI_MEASURE_H
#define QE_CLI_MEASURE_H

#include "cli/cli.h"
#include "qeffect/simulate.h"

enum {
    QE_MEASURE_STEPS_MAX = 1000,
    QE_MEASURE_LEAST_MS = 10, /* an action; the host wakes a sleeper up to a third of a millisecond late */
};

/* Runs `steps` steps and records the shortest: whatever else the machine does can only lengthen one.
 * Requires:   1 <= steps <= QE_MEASURE_STEPS_MAX; request's times are milliseconds, a B as long as its I and its W.
 * Ensures:    *measured holds its figures; makespans_out [steps] those of all, in order of time.
 * On failure: as qe_plan_create, with the counterexample in error_out's words; as qe_team_step.
 * Owns:       the caller deinits *measured. Thread: one caller. */
qe_status qe_measure(const qe_simulation_request *request, uint32_t steps, qe_simulation *measured,
                     double *makespans_out, qe_error *error_out);

#endif
