/* costs.c - judges times and sizes before anything is added up. */
#include "schedule/costs.h"

#include <math.h>
#include <stddef.h>

int qe_is_cost(double value) { return value >= 0.0 && value <= QE_COST_MAX; }

static int is_good(const qe_stage_cost *cost) {
    int good = qe_is_cost(cost->optimizer) && qe_is_cost(cost->output) && qe_is_cost(cost->gradient);
    for (int kind = 0; kind < QE_ACTION_KINDS; kind++) good &= qe_is_cost(cost->time[kind]);
    for (int keep = 0; keep < QE_KEEPS; keep++) good &= qe_is_cost(cost->keep[keep]);
    return good;
}

static int has_transfers(const qe_stage_cost *cost, double bandwidth) {
    if (bandwidth == 0.0) return 1;
    return qe_is_cost(cost->output / bandwidth) && qe_is_cost(cost->gradient / bandwidth);
}

static qe_status refuse(qe_error *error_out, const char *what, uint32_t stage) {
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, "use times and sizes from 0 to 1e30, in larger units if need be",
                        "%s of stage %u is negative, not a number or above %g", what, stage, QE_COST_MAX);
}

static int has_common(const qe_simulation_request *request) {
    return qe_is_cost(request->latency) && qe_is_cost(request->pair) && qe_is_cost(request->meet) &&
           isfinite(request->bandwidth) && request->bandwidth >= 0.0;
}

qe_status qe_costs_check(const qe_simulation_request *request, uint32_t stages, qe_error *error_out) {
    if (request->costs == NULL || (request->cost_count != 1 && request->cost_count != stages)) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "give one cost, or one for each stage",
                            "found costs of %u stages, the schedule has %u", request->cost_count, stages);
    }
    if (!has_common(request)) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "use times and rates from 0 to 1e30",
                            "latency, bandwidth, pair or meet is negative, not a number or above %g", QE_COST_MAX);
    }
    for (uint32_t i = 0; i < request->cost_count; i++) {
        if (!is_good(&request->costs[i])) return refuse(error_out, "a cost", i);
        if (!has_transfers(&request->costs[i], request->bandwidth)) return refuse(error_out, "size / bandwidth", i);
    }
    return QE_OK;
}
