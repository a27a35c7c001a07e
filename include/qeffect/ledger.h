/* ledger.h - who holds which version of what, and what is ordered before what, on one rank.
 *
 * One ledger per rank, driven by the thread that submits. It never touches device memory; it counts. Two ways in:
 *   qe_ledger_issue  - the next item of the certified program: counters are compared, O(effects), no clocks.
 *   qe_ledger_submit - anything else: the full judgement with vector clocks. The first departure from the certified
 *                      order rebuilds the clocks by judging the items of this step that were issued before it.
 * Both check first and then apply: a refused submission leaves the ledger as it was (but see qe_ledger_observe).
 *
 *   IDLE --step_begin--> OPEN --issue/submit--> OPEN --step_end--> IDLE
 *                         '------step_abort------> IDLE (counters as at step_begin, but slot generations and weight
 *                                                  versions never fall; caches empty, slots free)          */
#ifndef QEFFECT_LEDGER_H
#define QEFFECT_LEDGER_H

#include "qeffect/program.h"
#include "qeffect/rule.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum qe_contracts { QE_CONTRACTS_TRAP, QE_CONTRACTS_OBSERVE, QE_CONTRACTS_OFF } qe_contracts;

typedef struct qe_ledger qe_ledger;

/* Builds the ledger of a program. All memory it will ever need is taken here, except when a program without a plan
 * splits buffers into more ranges than expected.
 * On failure: QE_ERROR_MEMORY; QE_ERROR_UNSUPPORTED where the program has what only a trace may have (program.h).
 * Requires: program outlives the ledger and does not change.
 * Owns:     the caller destroys the ledger. Thread: one. Capture: forbidden. */
qe_status qe_ledger_create(const qe_program *program, qe_ledger **ledger_out, qe_error *error_out);
void qe_ledger_destroy(qe_ledger *ledger);

/* Takes the program as certified: qe_ledger_issue may be used. Judges every item of one step twice in a row (so the
 * seam from step to step is covered) and returns the ledger to its state before.
 * On failure: QE_CONTRACT and the first violations in program order in *violations_out. */
qe_status qe_ledger_certify(qe_ledger *ledger, qe_violations *violations_out, qe_error *error_out);

/* Opens a step: versions count from here, and what streams did before is over (the host waited for them).
 * Requires:   IDLE. Allocates nothing. Capture: allowed. */
void qe_ledger_step_begin(qe_ledger *ledger);
/* Submits item `index` of the certified program as planned. Allocates nothing.
 * Requires:   certified; between step_begin and step_end.
 * On failure: QE_CONTRACT, records in *violations_out, ledger unchanged. Capture: allowed. */
qe_status qe_ledger_issue(qe_ledger *ledger, uint32_t index, qe_violations *violations_out);
/* Submits an item that is not the next one of the certified program. Versions in `effects` count from step_begin like
 * the program's. `op_index` is the program item it stands for, or QE_NONE. Otherwise as qe_ledger_issue, and
 * QE_ERROR_ARGUMENT where it names what does not exist, QE_ERROR_MEMORY where it splits buffers as the program does
 * not and there is no room for that. */
qe_status qe_ledger_submit(qe_ledger *ledger, const qe_item *item, const qe_effect *effects, uint32_t op_index,
                           qe_violations *violations_out);
/* Closes the step: slot.leak, scale.unfolded, grad.missing and their like are judged here, too.
 * On failure: QE_CONTRACT; the step stays open and must be aborted. */
qe_status qe_ledger_step_end(qe_ledger *ledger, qe_violations *violations_out);
/* Judges what step_end would judge, and leaves the step open: what is submitted so far is the whole step. */
qe_status qe_ledger_step_check(qe_ledger *ledger, qe_violations *violations_out);
/* Gives the step up: scales and gradients as at its beginning, slots free, caches empty; a weight that was committed
 * gets a new version, because bytes that were rolled back are made again and not kept.
 * Requires:   OPEN, the streams drained. */
void qe_ledger_step_abort(qe_ledger *ledger);

/* From now on a breach is told and the work counts as done: issue, submit and step_end return QE_CONTRACT and go on as
 * a trace is judged, what breaks a rule left out and the rest applied. step_end closes the step then; caches are empty
 * after a step with a breach, and its weights are of new versions. Requires: no open step. */
void qe_ledger_observe(qe_ledger *ledger);
/* Submissions of the current or last step that broke a rule under observe; breaches of its end are told by step_end. */
uint64_t qe_ledger_observed(const qe_ledger *ledger);

/* Epoch, generation, version or takes of an object, absolute. */
uint64_t qe_ledger_counter(const qe_ledger *ledger, uint32_t object);
/* Something outside the program changed the object: a checkpoint load, a rollback, a hand-made write. Weight versions
 * rise, scale epochs become `counter`, caches are emptied. Requires: no open step. */
void qe_ledger_touch(qe_ledger *ledger, uint32_t object, uint64_t counter);
/* Submissions of this step that went the certified way and the full way. */
void qe_ledger_counts(const qe_ledger *ledger, uint64_t *certified_out, uint64_t *judged_out);

/* Judges a whole program from its beginning, the way traces are judged: violations are recorded and judging goes on
 * with the offending effect not applied. Repeated equal violations are counted in the first.
 * On failure: QE_CONTRACT when *violations_out holds any; the first in program order is the verdict. */
qe_status qe_program_judge(const qe_program *program, qe_violations *violations_out, qe_error *error_out);

#ifdef __cplusplus
}
#endif
#endif
