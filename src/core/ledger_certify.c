/* ledger_certify.c - proves a program before anything runs: two steps in a row, so that what a step leaves behind is
 * what the next one needs. A ledger of its own is judged, so the certified one stays as it was. */
#include <string.h>

#include "base/assert.h"
#include "core/ledger_state.h"

/* The second step is compiled: by then every cache and buffer is in the state that all later steps find. */
static qe_status run_item(qe_ledger *ledger, qe_ledger *judged, uint32_t index, int compile,
                          qe_violations *violations, qe_error *error_out) {
    const qe_item *item = &judged->program->items[index];
    const qe_effect *effects = item->effect_count > 0 ? &judged->program->effects[item->first_effect] : NULL;
    qe_object_state before[QE_EFFECTS_MAX];
    for (uint32_t i = 0; i < item->effect_count; i++) before[i] = judged->state[effects[i].object];
    qe_status status = qe_ledger_judge(judged, item, effects, index, 1, violations);
    if (status != QE_OK && status != QE_CONTRACT)
        return qe_error_set(error_out, status, NULL, "no memory to judge item %u", index);
    return compile ? qe_compile_item(ledger, judged, index, before, error_out) : QE_OK;
}

static qe_status run_step(qe_ledger *ledger, qe_ledger *judged, int compile, qe_violations *violations,
                          qe_error *error_out) {
    qe_ledger_step_begin(judged);
    qe_ledger_order_build(judged);
    judged->departed = 1;
    for (uint32_t i = 0; i < judged->program->item_count; i++)
        QE_TRY(run_item(ledger, judged, i, compile, violations, error_out));
    qe_ledger_judge_end(judged, QE_NONE, violations);
    if (violations->total > 0) {
        qe_ledger_step_abort(judged);
        return QE_CONTRACT;
    }
    qe_violations none;
    qe_status status = qe_ledger_step_end(judged, &none);
    QE_ASSERT(status == QE_OK);
    return QE_OK;
}

static qe_status run_steps(qe_ledger *ledger, qe_ledger *judged, qe_violations *violations, qe_error *error_out) {
    QE_TRY(qe_compile_begin(ledger, error_out));
    QE_TRY(run_step(ledger, judged, 0, violations, error_out));
    return run_step(ledger, judged, 1, violations, error_out);
}

qe_status qe_ledger_certify(qe_ledger *ledger, qe_violations *violations_out, qe_error *error_out) {
    QE_ASSERT(ledger != NULL);
    QE_ASSERT(ledger->phase == QE_LEDGER_IDLE);
    QE_ASSERT(violations_out != NULL);
    violations_out->count = 0;
    violations_out->total = 0;
    qe_ledger *judged;
    QE_TRY(qe_ledger_open(ledger->program, 0, &judged, error_out));
    qe_status status = run_steps(ledger, judged, violations_out, error_out);
    qe_ledger_destroy(judged);
    ledger->certified = status == QE_OK;
    if (status == QE_CONTRACT)
        return qe_error_set(error_out, status, NULL, "the program breaks %s and cannot be certified",
                            qe_rule_id(violations_out->record[0].rule));
    return status;
}
