/* search.h - what the files of the search share: the problem on one placement, and who makes rows for it. */
#ifndef QE_SCHEDULE_SEARCH_H
#define QE_SCHEDULE_SEARCH_H

#include "qeffect/search.h"

/* Kinds of the rows that are made here: F, I, W. */
enum { QE_SEARCH_KINDS = 3 };

/* One stage. What a microbatch keeps is taken with its F as a whole: the search may think a row keeps a little more
 * than it does, never less. */
typedef struct qe_search_stage {
    double time[QE_SEARCH_KINDS];
    double forward, backward; /* from the end of F (I) to the next (previous) stage's having its result */
    double taken, freed_by_input, freed_by_weight;
    uint32_t rank;
} qe_search_stage;

/* A placement with its times. */
typedef struct qe_search_problem {
    const qe_search_request *request;
    uint32_t ranks, chunks, stages, microbatches;
    uint32_t row_count;           /* actions of a rank */
    qe_search_stage *stage;       /* [stages] */
    uint32_t *stage_of;           /* [ranks * chunks] stages of each rank, ascending */
    double *work, *head;          /* [ranks] all of its actions; the earliest start of its first */
    double limit;                 /* INFINITY: none */
    double grain;                 /* times that differ by less are the same */
    double bound;                 /* of the metric */
    int is_v;                     /* two stages on each rank, down and back up */
} qe_search_problem;

/* How rows are made action by action. */
typedef struct qe_search_policy {
    uint8_t forward_first;  /* where an F and an I could both run */
    uint8_t forward_early;  /* of several F: 0 of the last stage, 1 of the first */
    uint8_t backward_early; /* of several I: 0 of the last stage, 1 of the first */
    double fill;            /* W goes into a gap of at least this part of its time; above 1: never into a smaller one */
    double target;          /* a rank rather waits than puts W into a smaller gap, as long as it can still end by
                             * this (QE_SEARCH_STAGE: have this span); 0: not so */
    const uint32_t *cap;    /* [ranks] most F that wait for their I; NULL: as many as memory takes */
} qe_search_policy;

typedef struct qe_search_lists qe_search_lists; /* room for making rows */

qe_status qe_search_lists_create(const qe_search_problem *problem, qe_search_lists **lists_out, qe_error *error_out);
void qe_search_lists_destroy(qe_search_lists *lists);
/* Makes the rows of all ranks, one behind the other, row_count each. Returns the metric, as it is where transfers do
 * not queue; INFINITY: it came to no end. */
double qe_search_lists_make(qe_search_lists *lists, const qe_search_policy *policy, qe_action *rows_out);

/* The zero-bubble papers' heuristic, for one stage on each rank. */
typedef struct qe_search_switches {
    uint8_t wait_before_first; /* forwards go on ahead although a gap is left before the first I */
    uint8_t backward_first;    /* a forward waits where the next rank is behind */
    uint8_t fill_all;          /* W also goes into gaps that would not make the largest wait of all ranks longer */
} qe_search_switches;
enum { QE_SEARCH_SWITCHES = 8 };

/* 1: made, as above; 0: it does not fit. Requires: chunks == 1; ends [3][stages][microbatches] is room. */
int qe_search_zero_bubble(const qe_search_problem *problem, const qe_search_switches *switches, double *ends,
                          qe_action *rows_out);

/* Their heuristic for two stages on each rank of a V. */
typedef struct qe_search_v_switches {
    uint8_t fill_forward, fill_backward; /* W also go into smaller gaps, before an F, before an I down */
} qe_search_v_switches;
enum { QE_SEARCH_V_SWITCHES = 4 };

/* As above. `allowed` [ranks] is what the ranks waited the time before, or NULL; ends [4][ranks][microbatches] and
 * queue [ranks][2 * microbatches] are room. Returns the longest wait, and waited_out [ranks]; negative: it does not
 * fit.
 * Requires: chunks == 2, a V. */
double qe_search_zero_bubble_v(const qe_search_problem *problem, const qe_search_v_switches *switches,
                               const double *allowed, double *ends, qe_action *queue, qe_action *rows_out,
                               double *waited_out);

#endif
