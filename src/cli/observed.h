/* observed.h - breaches that contracts.mode observe let pass: each kind once, with a count. */
#ifndef QE_CLI_OBSERVED_H
#define QE_CLI_OBSERVED_H

#include "cli/session.h"

enum { QE_OBSERVED_MAX = 64 }; /* kinds kept: who reads the 65th has enough to mend; the rest are counted */

/* One rule, broken on one object by one sort of op on one rank, in one sort of step. A trace may tell several of a kind
 * apart, by the other op: they are entries of their own, and the next step's are counted on them in the same order. */
typedef struct qe_observed_kind {
    uint32_t rank;
    const char *during; /* "training", "validation", "generation" */
    uint64_t first_step, last_step, count;
    qe_violation violation; /* of the first time; indices are of that step's history */
    char object[QE_NAME_BYTES], op[QE_NAME_BYTES]; /* empty where there is none */
    char text[QE_ERROR_TEXT_BYTES];
} qe_observed_kind;

typedef struct qe_observed {
    qe_observed_kind kinds[QE_OBSERVED_MAX];
    uint32_t kind_count;
    uint64_t steps, others; /* steps with a breach; breaches of kinds that were not kept */
    int traced;             /* contracts.trace holds the first of those steps */
    char untraced[QE_ERROR_TEXT_BYTES]; /* why it could not be written; empty where nothing went wrong */
} qe_observed;

/* Takes in what a step or an evaluation that went on has broken, as the judgement of its history tells it; the first
 * such step is written to contracts.trace. `result` is of that call. */
void qe_observed_note(qe_observed *observed, qe_session *session, const char *during, uint64_t step,
                      const qe_step_result *result);
/* For people, on standard error, with the command to go on with: nothing where nothing was observed. */
void qe_observed_print(const qe_observed *observed, const qe_session *session, const char *program_name);
/* [{"rank": ..., "step": ..., "count": ..., "rule": ..., "message": ...}]. The caller owns it. */
struct json_t;
struct json_t *qe_observed_json(const qe_observed *observed);

#endif
