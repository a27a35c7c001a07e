/* session_peak.c - see session_peak.h. The two count apart: the plan walks the ops that it made, the simulation knows
 * the schedule and what a microbatch keeps on a stage. */
#include "cli/session_peak.h"

#include <stdlib.h>
#include "qeffect/simulate.h"

static const qe_slot_kind slots[QE_KEEPS] = {QE_SLOT_I, QE_SLOT_X, QE_SLOT_Y};

static void measure_stage(const qe_plan *plan, uint32_t stage, qe_stage_cost *cost) {
    const qe_rank_plan *rank = &plan->rank[plan->stage_rank[stage]];
    for (int kind = 0; kind < QE_ACTION_KINDS; kind++) cost->time[kind] = 1.0; /* what is kept depends on no time */
    for (int keep = 0; keep < QE_KEEPS; keep++) {
        const qe_pool *pool = qe_rank_plan_pool(rank, stage, slots[keep]);
        cost->keep[keep] = pool == NULL ? 0.0 : (double)pool->slot_bytes;
    }
}

static uint64_t placed_bytes(const qe_rank_plan *rank) {
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < rank->region_count; r++)
        for (int keep = 0; keep < QE_KEEPS; keep++)
            if (rank->regions[r].kind == slots[keep]) bytes += rank->regions[r].bytes;
    return bytes;
}

qe_status qe_session_peak_of(const qe_plan *plan, const qe_schedule *schedule, uint32_t rank,
                             qe_session_peak *peak_out, qe_error *error_out) {
    qe_simulation simulation = {0};
    qe_stage_cost *costs = calloc(plan->stages, sizeof *costs);
    if (costs == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to simulate the schedule");
    for (uint32_t stage = 0; stage < plan->stages; stage++) measure_stage(plan, stage, &costs[stage]);
    qe_simulation_request request = {.schedule = schedule, .costs = costs, .cost_count = plan->stages,
                                     .release = QE_RELEASE_OP, .gradient_early = 1, .backward_splits = 1};
    qe_status status = qe_simulation_run(&request, &simulation, error_out);
    if (status == QE_OK)
        *peak_out = (qe_session_peak){.placed_bytes = placed_bytes(&plan->rank[rank]),
                                      .live_bytes = plan->rank[rank].live_bytes,
                                      .simulated_bytes = (uint64_t)simulation.ranks[rank].peak_kept};
    qe_simulation_deinit(&simulation);
    free(costs);
    return status;
}
