/* search_problem.h - a placement with its times, made from a request. */
#ifndef QE_SCHEDULE_SEARCH_PROBLEM_H
#define QE_SCHEDULE_SEARCH_PROBLEM_H

#include "schedule/search.h"

/* Sizes, times, placement, limit. On failure: QE_ERROR_ARGUMENT, QE_ERROR_LIMIT with what would do. */
qe_status qe_search_request_check(const qe_search_request *request, qe_error *error_out);
/* Does the request admit the placement (not ANY) for its number of chunks? */
int qe_search_admits(const qe_search_request *request, qe_search_placement placement);
/* Requires: the request was checked and admits the placement. On failure: QE_ERROR_MEMORY; QE_ERROR_ARGUMENT: no order
 * on this placement obeys the limit, *least_out says which one would be obeyed. Owns: the caller destroys it. */
qe_status qe_search_problem_create(const qe_search_request *request, qe_search_placement placement,
                                   qe_search_problem **problem_out, double *least_out, qe_error *error_out);
void qe_search_problem_destroy(qe_search_problem *problem);

#endif
