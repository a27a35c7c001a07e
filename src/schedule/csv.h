/* csv.h - what the files that read and write PyTorch's CSV share. */
#ifndef SCHEDULE_CSV_H
#define SCHEDULE_CSV_H

#include "qeffect/schedule.h"

enum { QE_CSV_CELL_BYTES = 96 }; /* no cell that means something is longer: a pair of the largest indices has 36 */

/* Kinds of actions behind qe_action_kind: those that move data and compute nothing. */
typedef enum qe_csv_kind {
    QE_CSV_SEND_F = QE_ACTION_KINDS,
    QE_CSV_RECV_F,
    QE_CSV_SEND_B,
    QE_CSV_RECV_B,
    QE_CSV_UNSHARD, /* the last three are of a stage and of no microbatch */
    QE_CSV_RESHARD,
    QE_CSV_REDUCE_GRAD,
    QE_CSV_KINDS
} qe_csv_kind;

/* "SEND_F", or "F" and so on. */
const char *qe_csv_kind_word(uint32_t kind);

/* What a cell holds: one action, or the two of an OVERLAP_F_B, which compute. */
typedef struct qe_csv_cell {
    qe_action action[2]; /* `kind` may be a qe_csv_kind; no row and column yet */
    uint32_t count;
} qe_csv_cell;

/* Reads a cell without the spaces around it; changes the text. NULL, or what was expected instead of what is there. */
const char *qe_csv_cell_parse(char *text, qe_csv_cell *cell_out);

/* An action that moves data, where it stands in a file. */
typedef struct qe_csv_move {
    qe_action action; /* `kind` is a qe_csv_kind */
    uint32_t rank;    /* of its row */
    uint32_t before;  /* index of the first action of the schedule that stands behind it */
} qe_csv_move;

/* Judges the moves of a file against its schedule, as PyTorch's runtime would run them: docs/schedules.md. A schedule
 * that is not valid in itself is left to its own check, and so are its moves.
 * Requires:   moves in the order of the file.
 * On failure: QE_CONTRACT with the place, the action and the reason, for people; QE_ERROR_MEMORY. */
qe_status qe_csv_moves_check(const qe_schedule *schedule, const qe_csv_move *moves, uint32_t move_count,
                             const char *path, qe_error *error_out);

#endif
