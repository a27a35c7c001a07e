/* issue.c - submits a range of a rank's program: asks the ledger, then gives the work to the streams. An armed fault
 * changes what is submitted here and nowhere else. */
#include <string.h>
#include "base/assert.h"
#include "step/team.h"

static qe_status run_item(qe_rank *rank, qe_binding *binding, uint32_t index) {
    const qe_stream_ops *ops = rank->team->options.backend->stream;
    const qe_item *item = &binding->rank_plan->program.items[index];
    qe_stream *stream = binding->streams[item->stream];
    switch ((qe_item_kind)item->kind) {
        case QE_ITEM_RECORD: return ops->record(stream, binding->events[item->event]);
        case QE_ITEM_WAIT: return ops->wait(stream, binding->events[item->event]);
        case QE_ITEM_OP: return ops->submit(stream, &binding->ops[binding->rank_plan->item_op[index]]);
        default: QE_ASSERT(!"an item of a plan"); return QE_OK;
    }
}

/* Under `observe` a breach is noted and the work goes on; the first one of the step is kept. */
static qe_status judged(qe_rank *rank, qe_status status, const qe_violations *found) {
    if (status != QE_CONTRACT) return status;
    if (rank->violations.count == 0) rank->violations = *found;
    return rank->team->options.contracts == QE_CONTRACTS_OBSERVE ? QE_OK : QE_CONTRACT;
}

static qe_status judge_planned(qe_rank *rank, qe_binding *binding, uint32_t index) {
    qe_violations found;
    return judged(rank, qe_ledger_issue(binding->ledger, index, &found), &found);
}

static qe_status judge_edited(qe_rank *rank, qe_binding *binding, const qe_item *item, const qe_effect *effects,
                              uint32_t index) {
    qe_violations found;
    return judged(rank, qe_ledger_submit(binding->ledger, item, effects, index, &found), &found);
}

static qe_status submit_planned(qe_rank *rank, qe_binding *binding, uint32_t index, int judge, int run) {
    if (judge) QE_TRY(judge_planned(rank, binding, index));
    return run ? run_item(rank, binding, index) : QE_OK;
}

static qe_status submit_again(qe_rank *rank, qe_binding *binding, uint32_t index, int judge, int run) {
    const qe_program *program = &binding->rank_plan->program;
    const qe_item *item = &program->items[index];
    if (judge) QE_TRY(judge_edited(rank, binding, item, &program->effects[item->first_effect], index));
    return run ? run_item(rank, binding, index) : QE_OK;
}

static qe_status submit_altered(qe_rank *rank, qe_binding *binding, const qe_edit *edit, int judge, int run) {
    const qe_program *program = &binding->rank_plan->program;
    const qe_item *item = &program->items[edit->item];
    qe_effect effects[QE_EFFECTS_MAX];
    memcpy(effects, &program->effects[item->first_effect], item->effect_count * sizeof *effects);
    effects[edit->effect_index] = edit->effect;
    if (judge) QE_TRY(judge_edited(rank, binding, item, effects, edit->item));
    return run ? run_item(rank, binding, edit->item) : QE_OK;
}

static qe_status submit_host_access(qe_rank *rank, qe_binding *binding, const qe_edit *edit) {
    qe_item item = {.kind = QE_ITEM_OP,
                    .effect_count = 1,
                    .stream = binding->rank_plan->stream_host,
                    .microbatch = QE_NONE,
                    .event = QE_NONE};
    item.label = binding->rank_plan->program.items[edit->item].label;
    return judge_edited(rank, binding, &item, &edit->effect, QE_NONE);
}

/* The edit's share at place `index`; *handled: the planned item is not to be submitted as well. */
static qe_status submit_edit(qe_rank *rank, qe_binding *binding, uint32_t index, int judge, int run, int *handled) {
    const qe_edit *edit = &rank->team->edit;
    *handled = edit->kind != QE_EDIT_INSERT && edit->item == index && edit->kind != QE_EDIT_NONE;
    if (edit->kind == QE_EDIT_EARLY && edit->at == index) QE_TRY(submit_again(rank, binding, edit->item, judge, run));
    if (edit->kind == QE_EDIT_INSERT && edit->at == index && judge) return submit_host_access(rank, binding, edit);
    if (!*handled) return QE_OK;
    if (edit->kind == QE_EDIT_ALTER) return submit_altered(rank, binding, edit, judge, run);
    if (edit->kind != QE_EDIT_REPEAT) return QE_OK; /* skipped, or submitted earlier */
    QE_TRY(submit_planned(rank, binding, index, judge, run));
    return submit_again(rank, binding, index, judge, run);
}

qe_status qe_binding_issue(qe_rank *rank, qe_binding *binding, uint32_t begin, uint32_t end, int judge, int run) {
    judge = judge && rank->team->options.contracts != QE_CONTRACTS_OFF;
    int armed = rank->team->edit_rank == rank->index && binding == &rank->train;
    for (uint32_t index = begin; index < end; index++) {
        int handled = 0;
        if (armed) QE_TRY(submit_edit(rank, binding, index, judge, run, &handled));
        if (!handled) QE_TRY(submit_planned(rank, binding, index, judge, run));
    }
    return QE_OK;
}

qe_status qe_binding_drain(qe_rank *rank, qe_binding *binding, qe_error *error_out) {
    const qe_stream_ops *ops = rank->team->options.backend->stream;
    qe_status first = QE_OK;
    for (uint32_t i = 0; i < binding->rank_plan->program.stream_count; i++) {
        if (binding->streams[i] == NULL) continue;
        qe_status status = ops->sync(binding->streams[i], first == QE_OK ? error_out : NULL);
        if (first == QE_OK) first = status;
    }
    return first;
}
