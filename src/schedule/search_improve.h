/* search_improve.h - what an order is worth in a search, and how one is made better by small changes. */
#ifndef QE_SCHEDULE_SEARCH_IMPROVE_H
#define QE_SCHEDULE_SEARCH_IMPROVE_H

#include "schedule/search.h"

/* Less is better: the metric, then the sum of all ranks' ends (spans), where the next change may find room. */
typedef struct qe_search_score {
    double value, rest;
} qe_search_score;

static inline int qe_search_is_better(qe_search_score a, qe_search_score b, double grain) {
    if (a.value < b.value - grain) return 1;
    return a.value <= b.value && a.rest < b.rest - grain;
}

/* Value INFINITY: it stops before its end, or keeps more than the limit. Requires: a schedule on the problem's
 * placement. On failure: QE_ERROR_MEMORY. */
qe_status qe_search_measure(const qe_search_problem *problem, const qe_schedule *schedule, qe_simulation *simulation,
                            qe_search_score *score_out, qe_error *error_out);
/* Moves actions along the critical path as long as it helps and less than `work` actions have been looked at; counts
 * measured orders into *tried.
 * Ensures: actions of one kind and stage keep their order; *score is that of the schedule and no worse than before. */
qe_status qe_search_improve(const qe_search_problem *problem, qe_schedule *schedule, qe_simulation *simulation,
                            uint64_t work, qe_search_score *score, uint32_t *tried, qe_error *error_out);

#endif
