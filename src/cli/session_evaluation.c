/* session_evaluation.c - see session_evaluation.h. */
#include "cli/session_evaluation.h"

#include <stdlib.h>
#include <string.h>

const qe_plan_options qe_evaluation_options = {.forward_only = 1, .cache_weights = 1, .reuse_slots = 1,
                                               .share_slots = 1};

qe_status qe_evaluation_schedule(const qe_schedule *schedule, qe_schedule *out, qe_error *error_out) {
    uint32_t actions = schedule->rank_begin[schedule->ranks], kept = 0;
    *out = (qe_schedule){.ranks = schedule->ranks,
                         .stages = schedule->stages,
                         .microbatches = schedule->microbatches,
                         .reversed = schedule->reversed};
    out->rank_begin = calloc(schedule->ranks + 1u, sizeof *out->rank_begin);
    out->stage_rank = calloc(schedule->stages, sizeof *out->stage_rank);
    out->actions = calloc(actions + 1u, sizeof *out->actions);
    if (!out->rank_begin || !out->stage_rank || !out->actions) {
        qe_schedule_deinit(out);
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the evaluation schedule");
    }
    memcpy(out->stage_rank, schedule->stage_rank, schedule->stages * sizeof *out->stage_rank);
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) {
        for (uint32_t i = schedule->rank_begin[rank]; i < schedule->rank_begin[rank + 1]; i++)
            if (schedule->actions[i].kind == QE_ACTION_F) {
                out->actions[kept] = schedule->actions[i];
                out->actions[kept++].paired = 0; /* the B that it was paired with is not there */
            }
        out->rank_begin[rank + 1] = kept;
    }
    return QE_OK;
}
