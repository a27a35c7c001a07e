/* inject.c - plants one fault for `train --inject`: an edit of what a rank submits, chosen by judging edited programs
 * offline until one breaks exactly the wanted rule first. No rule is special-cased in the running step. */
#include <string.h>
#include "base/assert.h"
#include "step/team.h"

/* Which edits are worth trying for a rule. */
typedef struct recipe_for_rule {
    qe_rule rule;
    qe_edit_kind kind;
    int effect_kind; /* only items with such an effect; -1: any */
    void (*alter)(qe_effect *effect);
} recipe_for_rule;

static void later_version(qe_effect *effect) {
    effect->version += 1;
}
static void earlier_version(qe_effect *effect) {
    effect->version -= 1;
}
static void later_epoch(qe_effect *effect) {
    effect->epoch += 1;
}
static void other_recipe(qe_effect *effect) {
    effect->recipe = (uint8_t)(effect->recipe == 0 ? 1 : 0);
}
static void more_layouts(qe_effect *effect) {
    effect->layouts = (uint8_t)(effect->layouts | 0x80);
}
static void next_microbatch(qe_effect *effect) {
    effect->microbatch += 1;
}
static void other_beta(qe_effect *effect) {
    effect->write = !effect->write;
}
static void past_the_end(qe_effect *effect) {
    effect->end += (uint64_t)1 << 40;
}

static const recipe_for_rule recipes[] = {
    {QE_RULE_SCALE_EPOCH, QE_EDIT_ALTER, QE_EFFECT_SCALE_USE, later_version},
    {QE_RULE_SCALE_BUSY, QE_EDIT_EARLY, QE_EFFECT_SCALE_FOLD, NULL},
    {QE_RULE_SCALE_TWICE, QE_EDIT_REPEAT, QE_EFFECT_SCALE_FOLD, NULL},
    {QE_RULE_SCALE_UNFOLDED, QE_EDIT_SKIP, QE_EFFECT_SCALE_FOLD, NULL},
    {QE_RULE_SCALE_LOST, QE_EDIT_SKIP, QE_EFFECT_SCALE_RECORD, NULL},
    {QE_RULE_SLOT_STALE, QE_EDIT_ALTER, QE_EFFECT_SLOT_BORROW, earlier_version},
    {QE_RULE_SLOT_LIVE, QE_EDIT_SKIP, QE_EFFECT_SLOT_RELEASE, NULL},
    {QE_RULE_SLOT_EMPTY, QE_EDIT_EARLY, QE_EFFECT_SLOT_BORROW, NULL},
    {QE_RULE_SLOT_TWICE, QE_EDIT_REPEAT, QE_EFFECT_SLOT_RELEASE, NULL},
    {QE_RULE_SLOT_OWNER, QE_EDIT_ALTER, QE_EFFECT_SLOT_BORROW, next_microbatch},
    {QE_RULE_SLOT_LEAK, QE_EDIT_SKIP, QE_EFFECT_SLOT_RELEASE, NULL},
    {QE_RULE_WEIGHT_VERSION, QE_EDIT_ALTER, QE_EFFECT_WEIGHT_READ, later_version},
    {QE_RULE_WEIGHT_TWICE, QE_EDIT_REPEAT, QE_EFFECT_WEIGHT_COMMIT, NULL},
    {QE_RULE_WEIGHT_UNTAKEN, QE_EDIT_SKIP, QE_EFFECT_GRAD_TAKE, NULL},
    {QE_RULE_CACHE_EMPTY, QE_EDIT_SKIP, QE_EFFECT_CACHE_FILL, NULL},
    {QE_RULE_CACHE_STALE, QE_EDIT_SKIP, QE_EFFECT_CACHE_FILL, NULL},
    {QE_RULE_CACHE_STALE, QE_EDIT_ALTER, QE_EFFECT_CACHE_USE, later_version},
    {QE_RULE_CACHE_SCALE, QE_EDIT_ALTER, QE_EFFECT_CACHE_USE, later_epoch},
    {QE_RULE_CACHE_RECIPE, QE_EDIT_ALTER, QE_EFFECT_CACHE_USE, other_recipe},
    {QE_RULE_CACHE_LAYOUT, QE_EDIT_ALTER, QE_EFFECT_CACHE_USE, more_layouts},
    {QE_RULE_GRAD_TWICE, QE_EDIT_REPEAT, QE_EFFECT_GRAD_DEPOSIT, NULL},
    {QE_RULE_GRAD_ORDER, QE_EDIT_ALTER, QE_EFFECT_GRAD_DEPOSIT, next_microbatch},
    {QE_RULE_GRAD_SET, QE_EDIT_ALTER, QE_EFFECT_GRAD_DEPOSIT, other_beta},
    {QE_RULE_GRAD_TAKEN, QE_EDIT_REPEAT, QE_EFFECT_GRAD_TAKE, NULL},
    {QE_RULE_GRAD_MISSING, QE_EDIT_SKIP, QE_EFFECT_GRAD_DEPOSIT, NULL},
    {QE_RULE_BUFFER_BOUNDS, QE_EDIT_ALTER, QE_EFFECT_BUFFER_READ, past_the_end},
    {QE_RULE_BUFFER_UNWRITTEN, QE_EDIT_SKIP, QE_EFFECT_BUFFER_WRITE, NULL},
    {QE_RULE_BUFFER_VERSION, QE_EDIT_SKIP, QE_EFFECT_BUFFER_WRITE, NULL},
    {QE_RULE_BUFFER_VERSION, QE_EDIT_ALTER, QE_EFFECT_BUFFER_READ, later_version},
    {QE_RULE_SYNC_ENTER, QE_EDIT_SKIP, -1, NULL},
    {QE_RULE_SYNC_EXIT, QE_EDIT_SKIP, -1, NULL},
    {QE_RULE_SYNC_SIDE, QE_EDIT_SKIP, -1, NULL},
    {QE_RULE_SYNC_EVENT, QE_EDIT_SKIP, -1, NULL},
    {QE_RULE_SYNC_HOST, QE_EDIT_INSERT, QE_EFFECT_BUFFER_WRITE, NULL},
};

static int has_effect(const qe_program *program, const qe_item *item, int kind, uint32_t *index_out) {
    for (uint32_t i = 0; i < item->effect_count; i++)
        if (program->effects[item->first_effect + i].kind == kind) {
            *index_out = i;
            return 1;
        }
    return 0;
}

static qe_status copy_item(const qe_program *program, uint32_t index, const qe_edit *edit, qe_program *out,
                           qe_error *error_out) {
    const qe_item *item = &program->items[index];
    qe_effect effects[QE_EFFECTS_MAX];
    if (item->effect_count > 0)
        memcpy(effects, &program->effects[item->first_effect], item->effect_count * sizeof *effects);
    if (edit->kind == QE_EDIT_ALTER && edit->item == index) effects[edit->effect_index] = edit->effect;
    return qe_program_add_item(out, item, effects, item->effect_count, NULL, error_out);
}

static qe_status copy_tables(const qe_program *program, qe_program *out, qe_error *error_out) {
    uint32_t index;
    for (uint32_t i = 0; i < program->object_count; i++)
        QE_TRY(qe_program_add_object(out, &program->objects[i], &index, error_out));
    for (uint32_t i = 0; i < program->stream_count; i++)
        QE_TRY(qe_program_add_stream(out, program->streams[i].name, program->streams[i].role, &index, error_out));
    for (uint32_t i = 0; i < program->label_count; i++)
        QE_TRY(qe_program_add_label(out, program->labels[i].text, &index, error_out));
    while (out->event_count < program->event_count) qe_program_add_event(out);
    return QE_OK;
}

static qe_status bracket(qe_program *out, qe_item_kind kind, qe_error *error_out) {
    qe_item item = {.kind = (uint8_t)kind, .microbatch = QE_NONE, .event = QE_NONE};
    return qe_program_add_item(out, &item, NULL, 0, NULL, error_out);
}

static qe_status copy_edited(const qe_program *program, uint32_t index, const qe_edit *edit, uint32_t host_stream,
                             qe_program *out, qe_error *error_out) {
    if (edit->kind == QE_EDIT_EARLY && edit->at == index) QE_TRY(copy_item(program, edit->item, edit, out, error_out));
    if (edit->kind == QE_EDIT_INSERT && edit->at == index) {
        qe_item item = {.kind = QE_ITEM_OP,
                        .stream = host_stream,
                        .microbatch = QE_NONE,
                        .event = QE_NONE,
                        .label = program->items[edit->item].label};
        QE_TRY(qe_program_add_item(out, &item, &edit->effect, 1, NULL, error_out));
    }
    int moved = edit->kind == QE_EDIT_SKIP || edit->kind == QE_EDIT_EARLY;
    if (moved && edit->item == index) return QE_OK;
    QE_TRY(copy_item(program, index, edit, out, error_out));
    if (edit->kind == QE_EDIT_REPEAT && edit->item == index) return copy_item(program, index, edit, out, error_out);
    return QE_OK;
}

qe_status qe_edit_apply(const qe_program *program, const qe_edit *edit, uint32_t host_stream, qe_program *edited_out,
                        qe_error *error_out) {
    QE_TRY(copy_tables(program, edited_out, error_out));
    QE_TRY(bracket(edited_out, QE_ITEM_STEP_BEGIN, error_out));
    for (uint32_t i = 0; i < program->item_count; i++)
        QE_TRY(copy_edited(program, i, edit, host_stream, edited_out, error_out));
    return bracket(edited_out, QE_ITEM_STEP_END, error_out);
}

static qe_rule verdict_of(const qe_program *program, const qe_edit *edit, uint32_t host_stream, qe_error *error_out) {
    qe_program edited;
    qe_violations violations = {0};
    qe_program_init(&edited);
    qe_status status = qe_edit_apply(program, edit, host_stream, &edited, error_out);
    if (status == QE_OK) status = qe_program_judge(&edited, &violations, error_out);
    qe_program_deinit(&edited);
    return status == QE_CONTRACT && violations.count > 0 ? violations.record[0].rule : QE_RULE_NONE;
}

/* Completes an edit of one kind at item `index`; 0: this item offers none. */
static int propose(const qe_program *program, const recipe_for_rule *recipe, uint32_t index, qe_edit *edit_out) {
    const qe_item *item = &program->items[index];
    uint32_t effect = 0;
    *edit_out = (qe_edit){.kind = recipe->kind, .item = index};
    if (recipe->effect_kind < 0) return item->kind == QE_ITEM_WAIT || item->kind == QE_ITEM_RECORD;
    if (item->kind != QE_ITEM_OP || !has_effect(program, item, recipe->effect_kind, &effect)) return 0;
    edit_out->effect_index = effect;
    edit_out->effect = program->effects[item->first_effect + effect];
    if (recipe->alter != NULL) recipe->alter(&edit_out->effect);
    if (recipe->kind == QE_EDIT_INSERT) {
        edit_out->effect.kind = QE_EFFECT_BUFFER_READ;
        edit_out->at = index + 1;
    }
    /* Early: to the front of the actions, behind the load and the first fill. */
    if (recipe->kind == QE_EDIT_EARLY)
        edit_out->at = index > program->item_count / 2 ? program->item_count / 2 : index / 2;
    return 1;
}

static qe_rule first_match(const qe_program *program, const recipe_for_rule *recipe, uint32_t host_stream,
                           qe_edit *edit_out, qe_error *error_out) {
    enum { TRIES_MAX = 400 }; /* a judgement takes about a millisecond */
    int tries = 0;
    for (uint32_t index = 0; index < program->item_count && tries < TRIES_MAX; index++) {
        if (!propose(program, recipe, index, edit_out)) continue;
        tries++;
        if (verdict_of(program, edit_out, host_stream, error_out) == recipe->rule) return recipe->rule;
    }
    return QE_RULE_NONE;
}

/* Some faults show only at the end of a step (a leak, a missing deposit): they are looked for from the back as well. */
static qe_rule last_match(const qe_program *program, const recipe_for_rule *recipe, uint32_t host_stream,
                          qe_edit *edit_out, qe_error *error_out) {
    enum { TRIES_MAX = 400 };
    int tries = 0;
    for (uint32_t index = program->item_count; index-- > 0 && tries < TRIES_MAX;) {
        if (!propose(program, recipe, index, edit_out)) continue;
        tries++;
        if (verdict_of(program, edit_out, host_stream, error_out) == recipe->rule) return recipe->rule;
    }
    return QE_RULE_NONE;
}

static int search(qe_team *team, const recipe_for_rule *recipe, qe_error *error_out) {
    for (uint32_t rank = 0; rank < team->rank_count; rank++) {
        const qe_rank_plan *plan = team->ranks[rank].train.rank_plan;
        qe_edit edit;
        if (first_match(&plan->program, recipe, plan->stream_host, &edit, error_out) != recipe->rule &&
            last_match(&plan->program, recipe, plan->stream_host, &edit, error_out) != recipe->rule)
            continue;
        team->edit = edit;
        team->edit_rank = rank;
        team->edit_rule = recipe->rule;
        return 1;
    }
    return 0;
}

qe_status qe_team_inject(qe_team *team, qe_rule rule, qe_error *error_out) {
    if (team->ranks[0].train.plan == NULL)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL,
                            "a team without a training plan has no step to disturb");
    if (rule == QE_RULE_STEP_NONFINITE) {
        team->edit_rule = rule;
        return QE_OK;
    }
    for (size_t i = 0; i < sizeof recipes / sizeof *recipes; i++)
        if (recipes[i].rule == rule && search(team, &recipes[i], error_out)) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                        "try another schedule or recipe: some rules need several ranks, or delayed scaling",
                        "no single edit of this plan breaks %s first", qe_rule_id(rule));
}
