/* plan_units.c - the units of one step on one rank, in the order in which they are submitted.
 *
 *   load | (receives one action ahead, fill, F / I / W, sends) ... | take | commit, fold | read
 *
 * Receives are posted one action before the action that needs them, so that a transfer hides behind it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "plan/build.h"

int qe_build_grow(void **array, uint32_t count, uint32_t *capacity, size_t element_bytes) {
    if (count < *capacity) return 0;
    uint32_t wanted = *capacity == 0 ? 256 : 2 * *capacity;
    void *grown = realloc(*array, wanted * element_bytes);
    if (grown == NULL) return -1;
    *array = grown;
    *capacity = wanted;
    return 0;
}

static qe_status no_memory(qe_build *build) {
    return qe_error_set(build->error, QE_ERROR_MEMORY, "use fewer microbatches or stages",
                        "no memory for the plan of rank %u", build->rank);
}

static qe_status add_effect(qe_build *build, const qe_effect *effect) {
    if (qe_build_grow((void **)&build->effects, build->effect_count, &build->effect_capacity, sizeof *build->effects) !=
        0)
        return no_memory(build);
    build->effects[build->effect_count++] = *effect;
    return QE_OK;
}

qe_status qe_build_draft(qe_build *build, const char *label, const qe_effect *effects, uint32_t count) {
    const qe_unit *unit = &build->out->units[build->current_unit];
    if (qe_build_grow((void **)&build->drafts, build->draft_count, &build->draft_capacity, sizeof *build->drafts) != 0)
        return no_memory(build);
    qe_draft draft = {
        .unit = build->current_unit, .op = build->out->op_count, .event = QE_NONE, .first_effect = build->effect_count};
    draft.item = (qe_item){.kind = QE_ITEM_OP,
                           .stage = unit->stage,
                           .microbatch = unit->microbatch,
                           .stream = unit->stream,
                           .event = QE_NONE};
    QE_TRY(qe_program_add_label(&build->out->program, label, &draft.item.label, build->error));
    for (uint32_t i = 0; i < count; i++) QE_TRY(add_effect(build, &effects[i]));
    draft.effect_count = count;
    build->drafts[build->draft_count++] = draft;
    build->out->op_count++;
    return QE_OK;
}

static uint32_t weight_of_grad(const qe_build *build, uint32_t object) {
    uint32_t weight = 0;
    while (build->out->places[weight].grad_object != object) weight++;
    return weight;
}

static qe_status sink_op(void *context, const qe_op *op, const qe_effect *effects, uint32_t count) {
    qe_build *build = context;
    qe_effect all[QE_EFFECTS_MAX];
    uint32_t all_count = count;
    QE_ASSERT(count < QE_EFFECTS_MAX);
    if (count > 0) memcpy(all, effects, count * sizeof *effects); /* an op without effects has no list */
    for (uint32_t i = 0; i < count; i++) {
        if (effects[i].kind != QE_EFFECT_GRAD_DEPOSIT) continue;
        uint32_t weight = weight_of_grad(build, effects[i].object);
        build->tallied[build->out->places[weight].tally]++;
        /* A copied gradient is accumulated in scratch, not where it lives. */
        if (build->out->scratch_object == QE_NONE) continue;
        QE_ASSERT(all_count < QE_EFFECTS_MAX);
        all[all_count++] = (qe_effect){.object = build->out->scratch_object,
                                       .kind = QE_EFFECT_BUFFER_WRITE,
                                       .begin = weight,
                                       .end = weight + 1u};
    }
    return qe_build_draft(build, qe_op_name(op->kind), all, all_count);
}

static qe_status open_unit(qe_build *build, qe_unit_kind kind, uint32_t stage, uint32_t microbatch, uint32_t stream) {
    qe_rank_plan *out = build->out;
    if (qe_build_grow((void **)&out->units, out->unit_count, &out->unit_capacity, sizeof *out->units) != 0)
        return no_memory(build);
    qe_unit *unit = &out->units[out->unit_count];
    *unit = (qe_unit){.kind = (uint8_t)kind,
                      .stage = (uint16_t)stage,
                      .microbatch = microbatch,
                      .stream = stream,
                      .weight = QE_NONE,
                      .peer = QE_NONE,
                      .first_op = out->op_count};
    memset(unit->slot, 0xff, sizeof unit->slot);
    build->current_unit = out->unit_count++;
    return QE_OK;
}

static qe_unit *unit_now(qe_build *build) {
    return &build->out->units[build->current_unit];
}

static void close_unit(qe_build *build) {
    qe_unit *unit = unit_now(build);
    unit->op_count = build->out->op_count - unit->first_op;
    QE_ASSERT(unit->op_count > 0);
}

/* Puts a release behind the other effects of the unit's last op. */
static qe_status release_slot(qe_build *build, qe_slot_kind kind) {
    qe_unit *unit = unit_now(build);
    if (unit->slot[kind] == QE_NONE) return QE_OK;
    qe_effect effect;
    QE_TRY(qe_build_slot_effect(build, unit, kind, QE_EFFECT_SLOT_RELEASE, 0, &effect));
    QE_TRY(add_effect(build, &effect)); /* the last op's effects are the last of all */
    build->drafts[build->draft_count - 1].effect_count++;
    QE_ASSERT(build->drafts[build->draft_count - 1].effect_count <= QE_EFFECTS_MAX);
    qe_build_release(build, unit, kind);
    return QE_OK;
}

static uint32_t bits(qe_slot_kind a) {
    return 1u << a;
}

/* What a unit acquires and releases, as bit sets of slot kinds. */
static void claims(const qe_build *build, qe_unit_kind kind, uint32_t *acquired, uint32_t *released) {
    *acquired = *released = 0;
    if (kind == QE_UNIT_F) {
        *acquired = bits(QE_SLOT_I) | bits(QE_SLOT_X) | bits(QE_SLOT_OUT_F);
        if (build->plan->options.forward_only) *released = bits(QE_SLOT_I) | bits(QE_SLOT_X) | bits(QE_SLOT_IN_F);
    } else if (kind == QE_UNIT_I) {
        *acquired = bits(QE_SLOT_Y) | bits(QE_SLOT_OUT_B);
        *released = bits(QE_SLOT_I) | bits(QE_SLOT_IN_F) | bits(QE_SLOT_IN_B);
    } else if (kind == QE_UNIT_W) {
        *released = bits(QE_SLOT_X) | bits(QE_SLOT_Y);
    }
}

static qe_status tally_run(qe_build *build, uint32_t first, uint32_t end) {
    qe_effect effect = {.object = build->out->deposits_object,
                        .kind = QE_EFFECT_BUFFER_WRITE,
                        .begin = first * sizeof(uint64_t),
                        .end = end * sizeof(uint64_t)};
    QE_TRY(qe_build_draft(build, qe_op_name(QE_OP_TALLY), &effect, 1));
    unit_now(build)->tally_count++;
    for (uint32_t word = first; word < end; word++) build->tallied[word]--;
    return QE_OK;
}

/* What the unit deposited is counted behind it, a run of neighbouring words at a time; a weight that is used more than
 * once counts once for each. */
static qe_status tally_deposits(qe_build *build) {
    uint32_t words = build->out->tally_count;
    for (uint32_t first = 0; first < words;) {
        uint32_t end = first;
        while (end < words && build->tallied[end]) end++;
        if (end == first) first++;
        else QE_TRY(tally_run(build, first, end));
    }
    return QE_OK;
}

static qe_status lower_unit(qe_build *build, qe_phase phase) {
    const qe_plan *plan = build->plan;
    qe_unit *unit = unit_now(build);
    qe_frame frame = {.stage = unit->stage,
                      .stages = plan->stages,
                      .microbatch = unit->microbatch,
                      .training = !plan->options.forward_only,
                      .set = unit->set,
                      .weights = build->out->places};
    qe_plan_frame_objects(plan, build->out, unit, &frame);
    qe_sink sink = {.context = build, .op = sink_op};
    QE_TRY(plan->model_ops->lower(plan->model, &frame, phase, &sink));
    QE_TRY(tally_deposits(build));
    close_unit(build);
    return QE_OK;
}

/* Takes the slots and makes the unit's first op: their witness words go up by one. */
static qe_status acquire_slots(qe_build *build, uint32_t acquired) {
    qe_effect effects[QE_STAMP_MAX];
    uint32_t count = 0;
    for (int slot = 0; slot < QE_SLOT_KINDS; slot++) {
        if (!(acquired & bits((qe_slot_kind)slot))) continue;
        QE_TRY(qe_build_acquire(build, unit_now(build), (qe_slot_kind)slot));
        if (unit_now(build)->slot[slot] == QE_NONE) continue;
        QE_ASSERT(count < QE_STAMP_MAX);
        QE_TRY(qe_build_slot_effect(build, unit_now(build), (qe_slot_kind)slot, QE_EFFECT_SLOT_ACQUIRE, 0,
                                    &effects[count++]));
    }
    if (count == 0) return QE_OK;
    unit_now(build)->stamped = 1;
    return qe_build_draft(build, qe_op_name(QE_OP_STAMP), effects, count);
}

static qe_status compute_unit(qe_build *build, qe_unit_kind kind, const qe_action *action, int set) {
    uint32_t acquired, released;
    claims(build, kind, &acquired, &released);
    QE_TRY(open_unit(build, kind, action->stage, action->microbatch, build->out->stream_compute));
    unit_now(build)->set = set != 0;
    for (int slot = 0; slot < QE_SLOT_KINDS; slot++)
        if (!(acquired & bits((qe_slot_kind)slot)) && slot != QE_SLOT_OUT_F && slot != QE_SLOT_OUT_B)
            qe_build_attach(build, unit_now(build), (qe_slot_kind)slot);
    QE_TRY(acquire_slots(build, acquired));
    QE_TRY(lower_unit(build, kind == QE_UNIT_F ? QE_PHASE_F : kind == QE_UNIT_I ? QE_PHASE_I : QE_PHASE_W));
    for (int slot = 0; slot < QE_SLOT_KINDS; slot++)
        if (released & bits((qe_slot_kind)slot)) QE_TRY(release_slot(build, (qe_slot_kind)slot));
    return QE_OK;
}

static qe_status fill_unit(qe_build *build, uint32_t stage) {
    if (build->plan->options.cache_weights && build->filled[stage]) return QE_OK;
    build->filled[stage] = 1;
    QE_TRY(open_unit(build, QE_UNIT_FILL, stage, QE_NONE, build->out->stream_compute));
    return lower_unit(build, QE_PHASE_FILL);
}

/* Moves one weight's gradient to scratch or back (placement copy). */
static qe_status copy_unit(qe_build *build, qe_unit_kind kind, const qe_action *action, uint32_t weight, int set) {
    int adds = kind == QE_UNIT_GRAD_OUT && !set && qe_plan_adds_apart(build->plan, weight);
    QE_TRY(open_unit(build, kind, action->stage, action->microbatch, build->out->stream_compute));
    unit_now(build)->weight = weight;
    unit_now(build)->set = set != 0;
    qe_effect effect = {.object = build->out->scratch_object, .begin = weight, .end = weight + 1u};
    effect.kind = kind == QE_UNIT_GRAD_IN ? QE_EFFECT_BUFFER_WRITE : QE_EFFECT_BUFFER_READ;
    QE_TRY(qe_build_draft(build, kind == QE_UNIT_GRAD_IN ? "grad_in" : adds ? "grad_add" : "grad_out", &effect,
                          1));
    close_unit(build);
    return QE_OK;
}

static qe_status copies(qe_build *build, qe_unit_kind kind, const qe_action *action, int deposited_by, int set) {
    const qe_plan *plan = build->plan;
    if (plan->options.placement != QE_GRADIENT_COPY || (kind == QE_UNIT_GRAD_IN && set)) return QE_OK;
    for (uint32_t weight = 0; weight < plan->weight_count; weight++) {
        if (plan->model_ops->weight_stage(plan->model, weight, plan->stages) != action->stage) continue;
        if (plan->model_ops->weight(plan->model, weight)->deposited_by != deposited_by) continue;
        if (kind == QE_UNIT_GRAD_IN && qe_plan_adds_apart(plan, weight)) continue;
        QE_TRY(copy_unit(build, kind, action, weight, set));
    }
    return QE_OK;
}

static qe_status deposit_unit(qe_build *build, qe_unit_kind kind, const qe_action *action) {
    int by = kind == QE_UNIT_I ? QE_ACTION_I : QE_ACTION_W;
    uint8_t *deposited = &build->deposited[action->stage * 2u + (by == QE_ACTION_W)];
    int set = !*deposited;
    *deposited = 1;
    QE_TRY(copies(build, QE_UNIT_GRAD_IN, action, by, set));
    QE_TRY(compute_unit(build, kind, action, set));
    return copies(build, QE_UNIT_GRAD_OUT, action, by, set);
}

static qe_status receive(qe_build *build, qe_slot_kind slot) {
    qe_effect effect;
    QE_TRY(acquire_slots(build, bits(slot)));
    QE_TRY(qe_build_slot_effect(build, unit_now(build), slot, QE_EFFECT_SLOT_BORROW, 1, &effect));
    return qe_build_draft(build, qe_op_name(QE_OP_RECV), &effect, 1);
}

static qe_status send(qe_build *build, qe_slot_kind slot) {
    qe_effect effect;
    qe_build_attach(build, unit_now(build), slot);
    QE_TRY(qe_build_slot_effect(build, unit_now(build), slot, QE_EFFECT_SLOT_BORROW, 0, &effect));
    QE_TRY(qe_build_draft(build, qe_op_name(QE_OP_SEND), &effect, 1));
    return release_slot(build, slot);
}

static qe_status transfer_unit(qe_build *build, qe_unit_kind kind, qe_edge *edge, uint32_t stage, uint32_t microbatch) {
    int incoming = kind == QE_UNIT_RECV_F || kind == QE_UNIT_RECV_B;
    qe_slot_kind slot = kind == QE_UNIT_RECV_F   ? QE_SLOT_IN_F
                        : kind == QE_UNIT_RECV_B ? QE_SLOT_IN_B
                        : kind == QE_UNIT_SEND_F ? QE_SLOT_OUT_F
                                                 : QE_SLOT_OUT_B;
    QE_TRY(open_unit(build, kind, stage, microbatch, edge->stream));
    unit_now(build)->peer = edge->peer;
    QE_TRY(incoming ? receive(build, slot) : send(build, slot));
    close_unit(build);
    return QE_OK;
}

/* Posts what comes before message (stage, microbatch) on its edge, and the message. */
static qe_status post_until(qe_build *build, qe_edge *edge, uint32_t stage, uint32_t microbatch) {
    for (uint32_t i = edge->posted; i < edge->message_count; i++)
        if (edge->messages[i].stage == stage && edge->messages[i].microbatch == microbatch) {
            for (; edge->posted <= i; edge->posted++) {
                const qe_message *message = &edge->messages[edge->posted];
                uint32_t consumer = edge->backward ? message->stage - 1u : message->stage + 1u;
                QE_TRY(transfer_unit(build, edge->backward ? QE_UNIT_RECV_B : QE_UNIT_RECV_F, edge, consumer,
                                     message->microbatch));
            }
            return QE_OK;
        }
    return QE_OK; /* posted before */
}

static qe_status receive_for(qe_build *build, const qe_action *action) {
    const qe_plan *plan = build->plan;
    if (action->kind == QE_ACTION_F && action->stage > 0 && plan->stage_rank[action->stage - 1] != build->rank)
        return post_until(build, qe_build_edge(build, plan->stage_rank[action->stage - 1], 0, 0), action->stage - 1u,
                          action->microbatch);
    int backward = action->kind == QE_ACTION_I || action->kind == QE_ACTION_B;
    if (backward && action->stage + 1u < plan->stages && plan->stage_rank[action->stage + 1] != build->rank)
        return post_until(build, qe_build_edge(build, plan->stage_rank[action->stage + 1], 1, 0), action->stage + 1u,
                          action->microbatch);
    return QE_OK;
}

static qe_status forward(qe_build *build, const qe_action *action) {
    const qe_plan *plan = build->plan;
    QE_TRY(fill_unit(build, action->stage));
    QE_TRY(compute_unit(build, QE_UNIT_F, action, 0));
    if (action->stage + 1u == plan->stages || plan->stage_rank[action->stage + 1] == build->rank) return QE_OK;
    qe_edge *edge = qe_build_edge(build, plan->stage_rank[action->stage + 1], 0, 1);
    return transfer_unit(build, QE_UNIT_SEND_F, edge, action->stage, action->microbatch);
}

static qe_status input_grad(qe_build *build, const qe_action *action) {
    const qe_plan *plan = build->plan;
    if (!plan->options.cache_weights) QE_TRY(fill_unit(build, action->stage));
    QE_TRY(deposit_unit(build, QE_UNIT_I, action));
    if (action->stage == 0 || plan->stage_rank[action->stage - 1] == build->rank) return QE_OK;
    qe_edge *edge = qe_build_edge(build, plan->stage_rank[action->stage - 1], 1, 1);
    return transfer_unit(build, QE_UNIT_SEND_B, edge, action->stage, action->microbatch);
}

static qe_status one_action(qe_build *build, const qe_action *action) {
    switch (action->kind) {
        case QE_ACTION_F: return forward(build, action);
        case QE_ACTION_I: return input_grad(build, action);
        case QE_ACTION_W: return deposit_unit(build, QE_UNIT_W, action);
        default: QE_TRY(input_grad(build, action)); return deposit_unit(build, QE_UNIT_W, action);
    }
}

static qe_status all_actions(qe_build *build) {
    const qe_schedule *schedule = build->schedule;
    uint32_t begin = schedule->rank_begin[build->rank], end = schedule->rank_begin[build->rank + 1];
    for (uint32_t i = begin; i < end; i++) {
        if (i == begin) QE_TRY(receive_for(build, &schedule->actions[i]));
        if (i + 1 < end) QE_TRY(receive_for(build, &schedule->actions[i + 1]));
        QE_TRY(one_action(build, &schedule->actions[i]));
    }
    return QE_OK;
}

static int owns_stage(const qe_build *build, uint32_t stage) {
    return build->plan->stage_rank[stage] == build->rank;
}

/* The caller writes tokens and targets; ranks without the first or last stage need none. */
static qe_status load_unit(qe_build *build) {
    if (!owns_stage(build, 0) && !owns_stage(build, build->plan->stages - 1)) return QE_OK;
    QE_TRY(open_unit(build, QE_UNIT_LOAD, 0, QE_NONE, build->out->stream_caller));
    qe_effect effect = {.object = build->out->tokens_object, .kind = QE_EFFECT_BUFFER_WRITE};
    effect.end = build->out->program.objects[effect.object].bytes;
    QE_TRY(qe_build_draft(build, "load_batch", &effect, 1));
    close_unit(build);
    return QE_OK;
}

static qe_status read_unit(qe_build *build) {
    if (!owns_stage(build, build->plan->stages - 1)) return QE_OK;
    QE_TRY(open_unit(build, QE_UNIT_READ, build->plan->stages - 1, QE_NONE, build->out->stream_caller));
    qe_effect effect = {.object = build->out->loss_object, .kind = QE_EFFECT_BUFFER_READ};
    effect.end = build->out->program.objects[effect.object].bytes;
    QE_TRY(qe_build_draft(build, "read_loss", &effect, 1));
    close_unit(build);
    return QE_OK;
}

static qe_status take_unit(qe_build *build, uint32_t weight, uint32_t stage) {
    QE_TRY(open_unit(build, QE_UNIT_TAKE, stage, QE_NONE, build->out->stream_compute));
    unit_now(build)->weight = weight;
    uint64_t scratch = build->out->program.objects[build->out->work_object].bytes;
    qe_effect effects[3] = {
        {.object = build->out->places[weight].grad_object, .kind = QE_EFFECT_GRAD_TAKE},
        {.object = build->out->norms_object,
         .kind = QE_EFFECT_BUFFER_WRITE,
         .begin = weight * sizeof(double),
         .end = (weight + 1) * sizeof(double)},
        {.object = build->out->work_object, .kind = QE_EFFECT_BUFFER_WRITE, .begin = 0, .end = scratch},
    };
    QE_TRY(qe_build_draft(build, qe_op_name(QE_OP_GRAD_NORM), effects, 3));
    close_unit(build);
    return QE_OK;
}

/* Effects of a commit, and of the fill that is part of it. */
typedef struct commit_effects {
    qe_effect list[QE_EFFECTS_MAX];
    uint32_t count;
} commit_effects;

static qe_status sink_fill(void *context, const qe_op *op, const qe_effect *effects, uint32_t count) {
    commit_effects *all = context;
    (void)op;
    QE_ASSERT(all->count + count <= QE_EFFECTS_MAX);
    memcpy(all->list + all->count, effects, count * sizeof *effects);
    all->count += count;
    return QE_OK;
}

static qe_status commit_unit(qe_build *build, uint32_t weight, uint32_t stage) {
    const qe_plan *plan = build->plan;
    QE_TRY(open_unit(build, QE_UNIT_COMMIT, stage, QE_NONE, build->out->stream_compute));
    unit_now(build)->weight = weight;
    commit_effects all = {.count = 1};
    all.list[0] = (qe_effect){.object = build->out->places[weight].weight_object, .kind = QE_EFFECT_WEIGHT_COMMIT};
    if (qe_plan_fills_ahead(plan, build->out, weight)) {
        qe_frame frame = {.stage = (uint16_t)stage, .stages = plan->stages, .training = 1,
                          .weights = build->out->places, .ahead = 1, .ahead_weight = weight};
        qe_sink sink = {.context = &all, .op = sink_fill};
        QE_TRY(plan->model_ops->lower(plan->model, &frame, QE_PHASE_FILL, &sink));
    }
    QE_TRY(qe_build_draft(build, qe_op_name(QE_OP_ADAMW), all.list, all.count));
    close_unit(build);
    return QE_OK;
}

enum { FOLDED_WEIGHTS_MAX = QE_EFFECTS_MAX / QE_SCALE_ROLES };

/* Scales of some weights in one launch. */
static qe_status close_fold(qe_build *build, const qe_effect *effects, uint32_t weights) {
    if (weights == 0) return QE_OK;
    unit_now(build)->weight_count = weights;
    QE_TRY(qe_build_draft(build, qe_op_name(QE_OP_FOLD), effects, weights * QE_SCALE_ROLES));
    close_unit(build);
    return QE_OK;
}

static qe_status fold_units(qe_build *build) {
    const qe_plan *plan = build->plan;
    qe_effect effects[QE_EFFECTS_MAX];
    uint32_t weights = 0;
    for (uint32_t weight = 0; weight < plan->weight_count; weight++) {
        const qe_weight_place *place = &build->out->places[weight];
        if (place->scale_object[QE_SCALE_X] == QE_NONE) continue; /* another rank's, or without scales */
        if (weights == 0) {
            uint32_t stage = plan->model_ops->weight_stage(plan->model, weight, plan->stages);
            QE_TRY(open_unit(build, QE_UNIT_FOLD, stage, QE_NONE, build->out->stream_compute));
            unit_now(build)->weight = weight;
        }
        for (int role = 0; role < QE_SCALE_ROLES; role++)
            effects[weights * QE_SCALE_ROLES + (uint32_t)role] =
                (qe_effect){.object = place->scale_object[role], .kind = QE_EFFECT_SCALE_FOLD};
        if (++weights < FOLDED_WEIGHTS_MAX) continue;
        QE_TRY(close_fold(build, effects, weights));
        weights = 0;
    }
    return close_fold(build, effects, weights);
}

static qe_status each_weight(qe_build *build, qe_status (*unit)(qe_build *, uint32_t, uint32_t)) {
    const qe_plan *plan = build->plan;
    for (uint32_t weight = 0; weight < plan->weight_count; weight++) {
        uint32_t stage = plan->model_ops->weight_stage(plan->model, weight, plan->stages);
        if (owns_stage(build, stage)) QE_TRY(unit(build, weight, stage));
    }
    return QE_OK;
}

/* Folds go first where commits quantize with the scales of the next step. */
static qe_status commit_units(qe_build *build) {
    int ahead = build->plan->options.fill_ahead;
    if (ahead) QE_TRY(fold_units(build));
    QE_TRY(each_weight(build, commit_unit));
    return ahead ? QE_OK : fold_units(build);
}

qe_status qe_build_units(qe_build *build) {
    QE_TRY(load_unit(build));
    QE_TRY(all_actions(build));
    build->take_begin = build->draft_count;
    if (!build->plan->options.forward_only) QE_TRY(each_weight(build, take_unit));
    build->commit_begin = build->draft_count;
    if (!build->plan->options.forward_only) {
        QE_TRY(commit_units(build));
    }
    build->exit_begin = build->draft_count;
    return read_unit(build);
}
