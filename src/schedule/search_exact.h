/* search_exact.h - the best of all orders, where they can all be looked at. */
#ifndef QE_SCHEDULE_SEARCH_EXACT_H
#define QE_SCHEDULE_SEARCH_EXACT_H

#include "schedule/search.h"

enum { QE_SEARCH_EXACT_MAX = 96 }; /* actions; larger problems rarely come to an end */

typedef struct qe_search_verdict {
    uint8_t found;  /* there is a better order; it was written */
    uint8_t proved; /* there is none better than that, or than what was to be beaten */
} qe_search_verdict;

/* Is the problem small, and does it leave nothing to rules that are not looked at here: transfers that queue, pairs or
 * full backwards that save time, sizes kept from I to W? */
int qe_search_exact_takes(const qe_search_problem *problem);
/* Looks for an order with a smaller metric than `value`. Requires: qe_search_exact_takes. */
qe_search_verdict qe_search_exact(const qe_search_problem *problem, double value, qe_action *rows_out);

#endif
