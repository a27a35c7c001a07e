/* ledger_record.c - what is written down about a breach. Records of one submission stand in the order of the rules;
 * a fact that shows twice in one submission (two ranges of a buffer, a borrow beside its acquire) is one record. */
#include <string.h>

#include "base/assert.h"
#include "core/ledger_state.h"

static int same_fact(const qe_violation *a, const qe_violation *b) {
    return a->rule == b->rule && a->object == b->object && a->other_item == b->other_item && a->item == b->item;
}

/* Labels of the ops are compared, not the ops: an op that races in every iteration is one record with a count. */
static int same_label(const qe_program *program, uint32_t a, uint32_t b) {
    if (a == QE_NONE || b == QE_NONE) return a == b;
    const qe_item *first = &program->items[a], *second = &program->items[b];
    if (first->kind != second->kind) return 0;
    switch ((qe_item_kind)first->kind) {
    case QE_ITEM_OP: return first->label == second->label && first->stream == second->stream;
    case QE_ITEM_RECORD:
    case QE_ITEM_WAIT: return first->event == second->event && first->stream == second->stream;
    case QE_ITEM_SYNC_EVENT: return first->event == second->event && first->rank == second->rank;
    case QE_ITEM_SYNC_STREAM: return first->stream == second->stream;
    case QE_ITEM_SYNC_DEVICE: return first->rank == second->rank;
    case QE_ITEM_STEP_BEGIN:
    case QE_ITEM_STEP_END:
    case QE_ITEM_DESTROY:
    case QE_ITEM_KINDS: break;
    }
    return 1;
}

static int same_breach(const qe_program *program, const qe_violation *a, const qe_violation *b) {
    return a->rule == b->rule && a->object == b->object && same_label(program, a->item, b->item) &&
           same_label(program, a->other_item, b->other_item);
}

/* Returns 1 when an earlier submission did the same, and counts it there. */
static int merge(const qe_judgement *judgement, const qe_violation *violation) {
    qe_violations *violations = judgement->violations;
    if (!judgement->ledger->foreign) return 0;
    for (uint32_t i = 0; i < judgement->first_record; i++) {
        if (!same_breach(judgement->ledger->program, &violations->record[i], violation)) continue;
        violations->record[i].count++;
        return 1;
    }
    return 0;
}

static void insert(qe_violations *violations, uint32_t first, const qe_violation *violation) {
    uint32_t at = violations->count;
    while (at > first && violations->record[at - 1].rule > violation->rule) at--;
    if (at == QE_VIOLATIONS_MAX) return;
    uint32_t end = violations->count < QE_VIOLATIONS_MAX ? violations->count : QE_VIOLATIONS_MAX - 1;
    QE_ASSERT(at <= end);
    memmove(&violations->record[at + 1], &violations->record[at], (end - at) * sizeof *violation);
    violations->record[at] = *violation;
    violations->count = end + 1;
}

void qe_judgement_report(qe_judgement *judgement, uint32_t effect_index, const qe_finding *finding,
                         const qe_access *other) {
    qe_violations *violations = judgement->violations;
    const qe_item *item = judgement->item;
    QE_ASSERT(finding->rule != QE_RULE_NONE);
    QE_ASSERT(finding->rule < QE_RULE_COUNT);
    qe_violation violation = {.rule = finding->rule, .item = judgement->index, .other_item = QE_NONE,
                              .object = QE_NONE, .stream = item->stream, .stage = item->stage,
                              .microbatch = item->microbatch, .expected = finding->expected,
                              .found = finding->found, .count = 1};
    if (other != NULL && other->clock > 0) violation.other_item = other->item;
    if (effect_index != QE_NONE) {
        violation.object = judgement->effects[effect_index].object;
        judgement->bad |= 1u << effect_index;
    }
    for (uint32_t i = judgement->first_record; i < violations->count; i++)
        if (same_fact(&violations->record[i], &violation)) return;
    violations->total++;
    if (!merge(judgement, &violation)) insert(violations, judgement->first_record, &violation);
}
