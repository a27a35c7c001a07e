/* search.h - finds an order for given times and memory: the schedule `auto`.
 *
 * Candidates are all named orders that live on the placement asked for and fit, the heuristic family of the
 * zero-bubble papers' automatic scheduler, and orders made action by action under many policies; the best of them are
 * improved along their critical path. Everything is measured by simulate.h, so nothing that is returned is worse than
 * any candidate. docs/schedules.md tells more. */
#ifndef QEFFECT_SEARCH_H
#define QEFFECT_SEARCH_H

#include "qeffect/certificate.h"
#include "qeffect/simulate.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    QE_SEARCH_RANKS_MAX = 256,         /* whoever acts next is found by looking at all ranks */
    QE_SEARCH_ACTIONS_MAX = 1 << 20,   /* F, I and W of all stages: some seconds for each hundred candidates */
};

/* Where stages live. */
typedef enum qe_search_placement {
    QE_SEARCH_ANY,    /* whichever of the others is best */
    QE_SEARCH_LINEAR, /* one stage on each rank */
    QE_SEARCH_LOOPED, /* stage s on rank s mod P, several on each */
    QE_SEARCH_V,      /* down the ranks and back up, and so on: s mod P or P-1 - s mod P in turn; several on each */
    QE_SEARCH_PLACEMENTS
} qe_search_placement;

/* What is made small. */
typedef enum qe_search_metric {
    QE_SEARCH_MAKESPAN, /* the end of the last rank: what counts where the optimizer waits for all ranks */
    QE_SEARCH_STAGE,    /* the longest span of a rank: the stage bubble of the zero-bubble papers */
} qe_search_metric;

typedef struct qe_search_request {
    uint32_t ranks, chunks, microbatches;
    uint8_t placement; /* qe_search_placement */
    uint8_t metric;    /* qe_search_metric */
    double memory_limit; /* most that a rank may keep, in the unit of the costs' `keep`; 0: no limit */
    /* Times and rules; `schedule` is not looked at, cost_count is 1 or ranks * chunks. */
    qe_simulation_request times;
} qe_search_request;

/* What the result began as. */
typedef enum qe_search_origin {
    QE_SEARCH_NAMED,       /* a named order */
    QE_SEARCH_ZERO_BUBBLE, /* the papers' heuristic */
    QE_SEARCH_LISTED,      /* action by action under a policy */
    QE_SEARCH_EXACT,       /* the best of all orders */
} qe_search_origin;

typedef struct qe_search_result {
    qe_schedule schedule; /* owned; adds the gradients of each stage in microbatch order */
    double makespan, span, work, peak_kept; /* as in qe_simulation */
    double value;         /* makespan or span, as the metric says */
    double bound;         /* no order on any placement asked for has a smaller one; equal to value: it is best */
    double named_value;   /* of the best named order that fits; 0: none does */
    const char *named;    /* its name; NULL */
    uint8_t placement;    /* qe_search_placement, not ANY */
    uint8_t origin;       /* qe_search_origin */
    uint8_t improved;     /* it was changed along its critical path */
    uint32_t tried;       /* orders that were measured */
} qe_search_result;

/* Requires:   nothing; the same request always gets the same answer.
 * Ensures:    the schedule is certified (qe_schedule_certify: single rendezvous sends, ascending gradients) and keeps
 *             no more than the limit; value <= that of every named order on the placement that fits. `dualpipe` has
 *             every stage on two ranks and is none of them.
 * On failure: QE_ERROR_ARGUMENT: sizes, times or a placement that do not go together; a memory limit that no order
 *             obeys, with the least that one does. QE_ERROR_LIMIT: more than can be searched. QE_ERROR_MEMORY.
 * Owns: the caller frees *result_out with deinit. Thread: any. */
qe_status qe_schedule_search(const qe_search_request *request, qe_search_result *result_out, qe_error *error_out);
/* Deinit of a zeroed result is a no-op. */
void qe_search_result_deinit(qe_search_result *result);

#ifdef __cplusplus
}
#endif
#endif
