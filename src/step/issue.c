/* issue.c - submits a range of a rank's program: asks the ledger, then gives the work to the streams. An armed fault
 * changes what is submitted here and nowhere else. */
#include <string.h>
#include "base/assert.h"
#include "step/capture.h"
#include "step/team.h"

qe_status qe_binding_run_item(qe_rank *rank, qe_binding *binding, uint32_t index) {
    const qe_stream_ops *ops = rank->team->options.backend->stream;
    const qe_item *item = &binding->rank_plan->program.items[index];
    qe_stream *stream = binding->streams[item->stream];
    switch ((qe_item_kind)item->kind) {
        case QE_ITEM_RECORD: return ops->record(stream, binding->events[item->event]);
        case QE_ITEM_WAIT: return ops->wait(stream, binding->events[item->event]);
        case QE_ITEM_OP: return ops->submit(stream, &binding->ops[binding->rank_plan->item_op[index]]);
        default: QE_ASSERT(0 && "an item of a plan"); return QE_OK;
    }
}

/* Under `observe` a breach is noted and the work goes on; the first one of the step is kept. */
static qe_status judged(qe_rank *rank, qe_status status, const qe_violations *found) {
    if (status != QE_CONTRACT) return status;
    rank->ledger_told = 1;
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

/* A gradient comes back from scratch; that it went there is part of the same copy. */
static int is_copy_back(const qe_binding *binding, uint32_t index) {
    const qe_rank_plan *plan = binding->rank_plan;
    return plan->program.items[index].kind == QE_ITEM_OP &&
           plan->units[plan->item_unit[index]].kind == QE_UNIT_GRAD_OUT;
}

static qe_status submit_planned(qe_rank *rank, qe_binding *binding, uint32_t index, int judge, int run) {
    if (judge) QE_TRY(judge_planned(rank, binding, index));
    if (!run) return QE_OK;
    if (is_copy_back(binding, index)) rank->gradient_copies++;
    return qe_binding_run_item(rank, binding, index);
}

static qe_status submit_again(qe_rank *rank, qe_binding *binding, uint32_t index, int judge, int run) {
    const qe_program *program = &binding->rank_plan->program;
    const qe_item *item = &program->items[index];
    if (judge) QE_TRY(judge_edited(rank, binding, item, &program->effects[item->first_effect], index));
    return run ? qe_binding_run_item(rank, binding, index) : QE_OK;
}

static int is_forgotten(const qe_edit *edit, uint32_t index, uint32_t effect_index, const qe_effect *effect) {
    if (edit->kind != QE_EDIT_FORGET || effect->object != edit->effect.object) return 0;
    return index > edit->item || (index == edit->item && effect_index >= edit->effect_index);
}

/* What item `index` declares under the edit; returns 0 where that is what was planned. */
static int edited_effects(const qe_program *program, const qe_edit *edit, uint32_t index, qe_effect *effects_out,
                          uint32_t *count_out) {
    const qe_item *item = &program->items[index];
    int here = edit->item == index, changed = 0;
    *count_out = 0;
    for (uint32_t i = 0; i < item->effect_count; i++) {
        const qe_effect *effect = &program->effects[item->first_effect + i];
        int altered = here && edit->kind == QE_EDIT_ALTER && i == edit->effect_index;
        int dropped = here && edit->kind == QE_EDIT_DROP && i == edit->effect_index;
        dropped |= is_forgotten(edit, index, i, effect);
        changed |= altered || dropped;
        if (!dropped) effects_out[(*count_out)++] = altered ? edit->effect : *effect;
    }
    return changed;
}

static qe_status submit_declared(qe_rank *rank, qe_binding *binding, uint32_t index, int judge, int run) {
    qe_effect effects[QE_EFFECTS_MAX];
    uint32_t count;
    qe_item item = binding->rank_plan->program.items[index];
    if (!edited_effects(&binding->rank_plan->program, &rank->team->edit, index, effects, &count))
        return submit_planned(rank, binding, index, judge, run);
    item.effect_count = (uint8_t)count;
    if (judge) QE_TRY(judge_edited(rank, binding, &item, effects, index));
    return run ? qe_binding_run_item(rank, binding, index) : QE_OK;
}

/* Nothing runs: what matters of a planted access is that it was declared and is refused. */
static qe_status submit_inserted(qe_rank *rank, qe_binding *binding, const qe_edit *edit) {
    const qe_item *near = &binding->rank_plan->program.items[edit->item];
    qe_item item = {.kind = QE_ITEM_OP,
                    .effect_count = 1,
                    .stage = near->stage,
                    .microbatch = near->microbatch,
                    .stream = edit->stream,
                    .event = QE_NONE,
                    .label = near->label};
    return judge_edited(rank, binding, &item, &edit->effect, QE_NONE);
}

/* Item `index` as the armed edit has it. */
static qe_status submit_edited(qe_rank *rank, qe_binding *binding, uint32_t index, int judge, int run) {
    const qe_edit *edit = &rank->team->edit;
    if (edit->kind == QE_EDIT_EARLY && edit->at == index) QE_TRY(submit_again(rank, binding, edit->item, judge, run));
    if (edit->kind == QE_EDIT_INSERT && edit->at == index && judge) QE_TRY(submit_inserted(rank, binding, edit));
    int moved = edit->kind == QE_EDIT_SKIP || edit->kind == QE_EDIT_EARLY;
    if (moved && edit->item == index) return QE_OK;
    QE_TRY(submit_declared(rank, binding, index, judge, run));
    if (edit->kind == QE_EDIT_REPEAT && edit->item == index) return submit_again(rank, binding, index, judge, run);
    return QE_OK;
}

/* A launch is told to the ledger where it would be refused. Where the seal holds, the ops that it stands for say it
 * all, and the step stays on the certified way. The op that is not what it was gives the launch its name. */
static qe_status judge_seal(qe_rank *rank, qe_binding *binding, const qe_segment *segment) {
    qe_effect launch;
    uint32_t index = qe_segment_broken(binding, segment, &launch);
    if (index == QE_NONE) return QE_OK;
    qe_item item = binding->rank_plan->program.items[index];
    item.effect_count = 1;
    return judge_edited(rank, binding, &item, &launch, index);
}

/* A graph is judged whole before it is launched: its ops, then its seal. */
static qe_status submit_segment(qe_rank *rank, qe_binding *binding, const qe_segment *segment, int judge, int run) {
    for (uint32_t index = segment->first; judge && index < segment->end; index++)
        QE_TRY(judge_planned(rank, binding, index));
    if (judge) QE_TRY(judge_seal(rank, binding, segment));
    if (!run) return QE_OK;
    rank->gradient_copies += segment->gradient_copies;
    return qe_segment_launch(rank, binding, segment);
}

/* Work that departs from the plan cannot be replayed: the segment that an edit touches runs op by op. */
static int is_touched(const qe_edit *edit, const qe_segment *segment) {
    int item = edit->item >= segment->first && edit->item < segment->end;
    int at = edit->at >= segment->first && edit->at < segment->end;
    return item || at || edit->kind == QE_EDIT_FORGET;
}

qe_status qe_binding_issue(qe_rank *rank, qe_binding *binding, uint32_t begin, uint32_t end, int judge, int run) {
    judge = judge && rank->team->options.contracts != QE_CONTRACTS_OFF;
    const qe_edit *edit = &rank->team->edit;
    int armed = rank->team->edit_rank == rank->index && binding->plan == rank->train.plan;
    for (uint32_t index = begin; index < end; index++) {
        const qe_segment *segment = qe_binding_segment(binding, index);
        if (segment != NULL && !(armed && is_touched(edit, segment))) {
            QE_TRY(submit_segment(rank, binding, segment, judge, run));
            index = segment->end - 1;
            continue;
        }
        QE_TRY(armed ? submit_edited(rank, binding, index, judge, run)
                     : submit_planned(rank, binding, index, judge, run));
    }
    return QE_OK;
}

qe_status qe_binding_drain(qe_rank *rank, qe_binding *binding, qe_error *error_out) {
    const qe_stream_ops *ops = rank->team->options.backend->stream;
    qe_status first = QE_OK;
    for (uint32_t i = 0; i < binding->rank_plan->program.stream_count; i++) {
        if (binding->streams[i] == NULL) continue;
        int tells = first == QE_OK || first == QE_ERROR_INTERRUPTED; /* who was only woken has no cause to tell */
        qe_error error = {0};
        qe_status status = ops->sync(binding->streams[i], &error);
        if (status == QE_OK || !tells || status == first) continue;
        first = status;
        if (error_out != NULL) *error_out = error;
    }
    return first;
}
