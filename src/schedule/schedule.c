/* schedule.c - the schedule as a value: its memory, the text of an action, and what each rank keeps at once. */
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

typedef struct keep {
    uint32_t activation, weight; /* retained now */
} keep;

static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* An action holds what it consumes until its end, so the peak is taken before anything is given back. */
static void follow_action(keep *now, uint8_t kind, qe_schedule_peak *peak) {
    if (kind == QE_ACTION_F) now->activation++;
    /* The pair of an I is one live pair on both sides of the hand-over, hence `live` is taken before it. */
    peak->live = larger(peak->live, now->activation + now->weight);
    if (kind == QE_ACTION_I) now->weight++;
    peak->activation = larger(peak->activation, now->activation);
    peak->weight = larger(peak->weight, now->weight);
    if (kind == QE_ACTION_I || kind == QE_ACTION_B) now->activation--;
    if (kind == QE_ACTION_W) now->weight--;
}

static int has_backward(const qe_schedule *schedule) {
    for (uint32_t i = 0; i < schedule->rank_begin[schedule->ranks]; i++) {
        if (schedule->actions[i].kind != QE_ACTION_F) return 1;
    }
    return 0;
}

void qe_schedule_peaks(const qe_schedule *schedule, qe_schedule_peak *peaks_out) {
    int training = has_backward(schedule);
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) {
        keep now = {0};
        qe_schedule_peak peak = {0};
        for (uint32_t i = schedule->rank_begin[rank]; i < schedule->rank_begin[rank + 1]; i++) {
            follow_action(&now, schedule->actions[i].kind, &peak);
            if (!training) now.activation--; /* nothing is kept for a backward that never comes */
        }
        QE_ASSERT(now.activation == 0);
        QE_ASSERT(now.weight == 0);
        peaks_out[rank] = peak;
    }
}
