/* generate.h - the rows of the named orders, for generate.c. */
#ifndef SCHEDULE_GENERATE_H
#define SCHEDULE_GENERATE_H

#include "qeffect/schedule.h"

/* Where the next action of one rank goes. */
typedef struct qe_row {
    qe_action *next;
    const qe_schedule_request *request;
    uint32_t rank;
    int folded; /* the second chunk runs back over the ranks: a V */
} qe_row;

/* PyTorch's rounds: a round takes at least `ranks` microbatches through all chunks. Requires: microbatches >= ranks. */
static inline uint32_t qe_schedule_rounds(uint32_t ranks, uint32_t microbatches) { return microbatches / ranks; }

/* The stage of a rank's chunk. */
static inline uint32_t qe_row_stage(const qe_row *row, uint32_t chunk) {
    uint32_t ranks = row->request->ranks;
    return row->folded && chunk == 1 ? 2 * ranks - 1 - row->rank : chunk * ranks + row->rank;
}

void qe_row_sequential(qe_row *to);
void qe_row_gpipe(qe_row *to);
void qe_row_looped_bfs(qe_row *to);
void qe_row_1f1b(qe_row *to);
void qe_row_interleaved(qe_row *to);
void qe_row_zbh1(qe_row *to);
void qe_row_zbh2(qe_row *to);
void qe_row_interleaved_zb(qe_row *to);
void qe_row_zbv(qe_row *to);
void qe_row_dualpipe(qe_row *to);
void qe_row_dualpipev(qe_row *to);
/* The rows of all ranks, one behind the other: each depends on the others. On failure: QE_ERROR_MEMORY. */
qe_status qe_rows_1f1b_v(const qe_schedule_request *request, qe_action *actions, qe_error *error_out);
qe_status qe_rows_v_half(const qe_schedule_request *request, qe_action *actions, qe_error *error_out);
qe_status qe_rows_v_min(const qe_schedule_request *request, qe_action *actions, qe_error *error_out);

#endif
