/* costs.h - what times and sizes a simulation and a search take. */
#ifndef SCHEDULE_COSTS_H
#define SCHEDULE_COSTS_H

#include "qeffect/simulate.h"

/* Largest time, size or factor: a step's sums, and products of two, stay finite by far, so that no figure is ever
 * infinite or not a number. */
#define QE_COST_MAX 1e30

/* 0 to QE_COST_MAX; not what is not a number. */
int qe_is_cost(double value);
/* Judges everything of a request but its schedule.
 * On failure: QE_ERROR_ARGUMENT: a cost is no cost, a transfer's size / the bandwidth is none, or cost_count is neither
 *             1 nor `stages`. */
qe_status qe_costs_check(const qe_simulation_request *request, uint32_t stages, qe_error *error_out);

#endif
