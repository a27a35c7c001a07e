/* schedule.c - the schedule as a value: its memory, and the text of an action. */
#include "schedule/order.h"

#include <stdlib.h>

#include "base/assert.h"

QE_STATIC_ASSERT(QE_SCHEDULE_RANKS_MAX <= QE_STAGES_MAX, "every rank has a stage");
QE_STATIC_ASSERT(QE_STAGES_MAX <= UINT16_MAX, "a stage index is 16 bits in an action");

qe_status qe_schedule_allocate(const qe_schedule *sizes, uint32_t action_count, qe_schedule *schedule_out,
                               qe_error *error_out) {
    QE_ASSERT(action_count <= QE_SCHEDULE_ACTIONS_MAX);
    qe_schedule schedule = *sizes;
    schedule.rank_begin = calloc((size_t)schedule.ranks + 1, sizeof *schedule.rank_begin);
    schedule.stage_rank = calloc(schedule.stages, sizeof *schedule.stage_rank);
    schedule.actions = calloc(action_count, sizeof *schedule.actions);
    if (schedule.rank_begin == NULL || schedule.stage_rank == NULL || schedule.actions == NULL) {
        qe_schedule_deinit(&schedule);
        return qe_error_set(error_out, QE_ERROR_MEMORY, "use fewer microbatches, or free memory",
                            "no memory for a schedule of %u actions", action_count);
    }
    *schedule_out = schedule;
    return QE_OK;
}

void qe_schedule_deinit(qe_schedule *schedule) {
    free(schedule->rank_begin);
    free(schedule->stage_rank);
    free(schedule->actions);
    *schedule = (qe_schedule){0};
}

uint32_t qe_schedule_action_rank(const qe_schedule *schedule, uint32_t action_index) {
    QE_ASSERT(action_index < schedule->rank_begin[schedule->ranks]);
    uint32_t low = 0, high = schedule->ranks; /* the rank is in [low, high) */
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (schedule->rank_begin[middle] <= action_index) low = middle;
        else high = middle;
    }
    return low;
}

int qe_action_text(const qe_action *action, char *text, size_t capacity) {
    static const char letter[QE_ACTION_KINDS] = {'F', 'I', 'W', 'B'};
    QE_ASSERT(action->kind < QE_ACTION_KINDS);
    return snprintf(text, capacity, "%u%c%u", (unsigned)action->stage, letter[action->kind], action->microbatch);
}
