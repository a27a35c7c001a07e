/* ledger_issue.c - the two ways in. The certified way compares the few cells that the next item of the program finds
 * with what it found when it was certified, and stores what it left; nothing else is touched. Anything else departs. */
#include <string.h>

#include "base/assert.h"
#include "core/effect.h"
#include "core/ledger_state.h"

/* Keeps an accepted departed submission for qe_ledger_history. */
static void log_item(qe_ledger *ledger, const qe_item *item, const qe_effect *effects) {
    uint32_t count = item->effect_count;
    if (ledger->log_count == ledger->log_capacity || ledger->log_effect_count + count > ledger->log_effect_capacity) {
        ledger->log_lost++;
        return;
    }
    ledger->log[ledger->log_count++] = (qe_log_entry){*item, ledger->log_effect_count};
    if (count > 0) memcpy(&ledger->log_effects[ledger->log_effect_count], effects, count * sizeof *effects);
    ledger->log_effect_count += count;
}

static void keep_refused(qe_ledger *ledger, const qe_item *item, const qe_effect *effects) {
    QE_ASSERT(item->effect_count <= QE_EFFECTS_MAX);
    ledger->refused = QE_REFUSED_ITEM;
    ledger->refused_item = *item;
    if (item->effect_count > 0) memcpy(ledger->refused_effects, effects, item->effect_count * sizeof *effects);
}

static qe_status depart(qe_ledger *ledger, const qe_item *item, const qe_effect *effects, uint32_t index,
                        qe_violations *violations_out) {
    if (!ledger->departed) qe_ledger_order_build(ledger);
    qe_status status = qe_ledger_judge(ledger, item, effects, index, ledger->observes, violations_out);
    int goes_on = status == QE_OK || (status == QE_CONTRACT && ledger->observes);
    if (status == QE_CONTRACT && !goes_on) keep_refused(ledger, item, effects);
    if (!goes_on) return status;
    ledger->observed += status == QE_CONTRACT;
    ledger->departed = 1;
    ledger->judged_count++;
    log_item(ledger, item, effects);
    QE_LEDGER_VALID(ledger);
    return status;
}

static qe_status depart_planned(qe_ledger *ledger, uint32_t index, qe_violations *violations_out) {
    const qe_item *item = &ledger->program->items[index];
    const qe_effect *effects = item->effect_count > 0 ? &ledger->program->effects[item->first_effect] : NULL;
    return depart(ledger, item, effects, index, violations_out);
}

qe_status qe_ledger_issue(qe_ledger *ledger, uint32_t index, qe_violations *violations_out) {
    QE_ASSERT(ledger->certified);
    QE_ASSERT(ledger->phase == QE_LEDGER_OPEN);
    QE_ASSERT(index < ledger->program->item_count);
    violations_out->count = 0;
    violations_out->total = 0;
    if (ledger->departed || index != ledger->cursor) return depart_planned(ledger, index, violations_out);
    const qe_compiled compiled = ledger->compiled[index];
    const qe_cell_op *op = &ledger->cell_ops[compiled.first];
    const qe_cell_op *stores = op + compiled.compares, *end = stores + compiled.stores;
    uint64_t *cells = ledger->cells, differences = 0;
    for (; op < stores; op++) differences |= cells[op->cell] ^ (cells[op->base] + op->delta);
    if (differences != 0) return depart_planned(ledger, index, violations_out);
    for (; op < end; op++) cells[op->cell] = cells[op->base] + op->delta;
    ledger->cursor++;
    ledger->certified_count++;
    return QE_OK;
}

qe_status qe_ledger_submit(qe_ledger *ledger, const qe_item *item, const qe_effect *effects, uint32_t op_index,
                           qe_violations *violations_out) {
    QE_ASSERT(ledger != NULL);
    QE_ASSERT(ledger->phase == QE_LEDGER_OPEN);
    QE_ASSERT(violations_out != NULL);
    violations_out->count = 0;
    violations_out->total = 0;
    QE_TRY(qe_program_check_item(ledger->program, item, effects, item->effect_count, NULL));
    for (uint32_t i = 0; i < item->effect_count; i++)
        if (qe_effect_only_in_traces(&effects[i])) return QE_ERROR_UNSUPPORTED;
    if (op_index != QE_NONE && op_index >= ledger->program->item_count) return QE_ERROR_ARGUMENT;
    return depart(ledger, item, effects, op_index, violations_out);
}
