/* v_grid.h - slots of time on the ranks of a V: what the orders that are arranged for all ranks at once work on. */
#ifndef SCHEDULE_V_GRID_H
#define SCHEDULE_V_GRID_H

#include "qeffect/schedule.h"

/* What a slot does. F1, I1 and W1 are of the stage on the way back. */
typedef enum qe_v_kind { F0, F1, I1, I0, W1, W0, QE_V_KINDS, EMPTY = QE_V_KINDS } qe_v_kind;

/* A microbatch takes six slots of a rank: F, I and W on both of its stages. */
enum { QE_V_PERIOD = 6 };

typedef struct qe_v_grid {
    uint32_t ranks, microbatches, length;
    uint8_t *slot;    /* [ranks][length] of qe_v_kind */
    uint32_t *held;   /* [ranks][length]: F without their W behind the slot */
    uint32_t *end;    /* [ranks][QE_V_KINDS][microbatches]: one behind the slot of what has its final place, else 0 */
    uint32_t *placed; /* [ranks][QE_V_KINDS]: how many of them have it */
    uint32_t peak;    /* the most that a rank holds */
} qe_v_grid;

/* All slots empty, nothing held. Owns: the caller closes; a failed open leaves nothing to close. */
qe_status qe_v_grid_open(const qe_schedule_request *request, uint32_t length, qe_v_grid *grid_out,
                         qe_error *error_out);
void qe_v_grid_close(qe_v_grid *grid);

static inline uint8_t *qe_v_grid_slots(const qe_v_grid *grid, uint32_t rank) {
    return grid->slot + (size_t)rank * grid->length;
}

static inline uint32_t *qe_v_grid_held(const qe_v_grid *grid, uint32_t rank) {
    return grid->held + (size_t)rank * grid->length;
}

static inline uint32_t *qe_v_grid_end(const qe_v_grid *grid, uint32_t rank, qe_v_kind kind, uint32_t microbatch) {
    return &grid->end[((size_t)rank * QE_V_KINDS + kind) * grid->microbatches + microbatch];
}

/* The next microbatch of this kind on this rank; takes it. */
static inline uint32_t qe_v_grid_take(qe_v_grid *grid, uint32_t rank, qe_v_kind kind) {
    return grid->placed[(size_t)rank * QE_V_KINDS + kind]++;
}

/* Puts all microbatches of a kind, one per period, the first into slot `first`. */
void qe_v_grid_repeat(qe_v_grid *grid, uint32_t rank, qe_v_kind kind, uint32_t first);
/* Fills `held` and `peak` from the slots. */
void qe_v_grid_hold(qe_v_grid *grid);
/* The earliest empty slot from `from` on, or `at`; with `two`, one whose successor is empty too. */
uint32_t qe_v_grid_gap(const qe_v_grid *grid, uint32_t rank, uint32_t from, uint32_t at, int two);
/* As qe_v_grid_gap for an F, which must not be held where its rank is at the peak already. */
uint32_t qe_v_grid_forward_gap(const qe_v_grid *grid, uint32_t rank, uint32_t from, uint32_t at);
/* The rows of all ranks in the order of the slots. `kinds` says what a slot is written as; QE_ACTION_KINDS: not. */
void qe_v_grid_write(const qe_v_grid *grid, const uint8_t kinds[static QE_V_KINDS], int forward_only, qe_action *next);

#endif
