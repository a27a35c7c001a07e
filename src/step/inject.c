/* inject.c - plants one fault for `train --inject`: an edit of what a rank submits, chosen by trying edits on a ledger
 * of its own until one breaks exactly the wanted rule first. A trial and the fault go the same way (issue.c), so no
 * rule is special-cased in the running step. */
#include <string.h>
#include "base/assert.h"
#include "step/team.h"

/* Which edits are worth trying for a rule. */
typedef struct recipe_for_rule {
    qe_rule rule;
    qe_edit_kind kind;
    int effect_kind; /* only items with such an effect; or ANY_WAIT, ANY_RECORD */
    int from_back; /* some faults show only at the end of a step: a leak, a missing deposit */
    void (*alter)(const qe_rank_plan *plan, qe_edit *edit);
} recipe_for_rule;

enum { ANY_WAIT = -1, ANY_RECORD = -2 };
enum { TRIES_MAX = 24 }; /* a trial takes about a millisecond; the recipes hit in the first few */

static void later_version(const qe_rank_plan *plan, qe_edit *edit) {
    (void)plan;
    edit->effect.version += 1;
}
static void earlier_version(const qe_rank_plan *plan, qe_edit *edit) {
    (void)plan;
    edit->effect.version -= 1;
}
static void later_epoch(const qe_rank_plan *plan, qe_edit *edit) {
    (void)plan;
    edit->effect.epoch += 1;
}
static void other_recipe(const qe_rank_plan *plan, qe_edit *edit) {
    (void)plan;
    edit->effect.recipe = (uint8_t)(edit->effect.recipe == 0 ? 1 : 0);
}
static void more_layouts(const qe_rank_plan *plan, qe_edit *edit) {
    (void)plan;
    edit->effect.layouts = (uint8_t)(edit->effect.layouts | 0x80);
}
static void next_microbatch(const qe_rank_plan *plan, qe_edit *edit) {
    (void)plan;
    edit->effect.microbatch += 1;
}
static void next_owner(const qe_rank_plan *plan, qe_edit *edit) {
    later_version(plan, edit);
    next_microbatch(plan, edit);
}
static void other_beta(const qe_rank_plan *plan, qe_edit *edit) {
    (void)plan;
    edit->effect.write = !edit->effect.write;
}
static void past_the_end(const qe_rank_plan *plan, qe_edit *edit) {
    (void)plan;
    edit->effect.end += (uint64_t)1 << 40;
}
static void host_reads(const qe_rank_plan *plan, qe_edit *edit) {
    edit->stream = plan->stream_host;
    edit->effect.kind = QE_EFFECT_BUFFER_READ;
}
/* Bytes of norms that belong to other ranks are never written. */
static void host_reads_all(const qe_rank_plan *plan, qe_edit *edit) {
    host_reads(plan, edit);
    edit->effect.begin = 0;
    edit->effect.end = plan->program.objects[edit->effect.object].bytes;
}

static const recipe_for_rule recipes[] = {
    {QE_RULE_SCALE_EPOCH, QE_EDIT_ALTER, QE_EFFECT_SCALE_USE, 0, later_version},
    {QE_RULE_SCALE_BUSY, QE_EDIT_EARLY, QE_EFFECT_SCALE_FOLD, 0, NULL},
    {QE_RULE_SCALE_BUSY, QE_EDIT_DROP, QE_EFFECT_SCALE_RECORD, 0, NULL},
    {QE_RULE_SCALE_TWICE, QE_EDIT_REPEAT, QE_EFFECT_SCALE_FOLD, 0, NULL},
    {QE_RULE_SCALE_UNFOLDED, QE_EDIT_SKIP, QE_EFFECT_SCALE_FOLD, 0, NULL},
    {QE_RULE_SCALE_UNFOLDED, QE_EDIT_DROP, QE_EFFECT_SCALE_FOLD, 0, NULL}, /* commits miss a weight's fold before */
    {QE_RULE_SCALE_LOST, QE_EDIT_FORGET, QE_EFFECT_SCALE_RECORD, 1, NULL},
    {QE_RULE_SLOT_STALE, QE_EDIT_ALTER, QE_EFFECT_SLOT_BORROW, 0, earlier_version},
    {QE_RULE_SLOT_LIVE, QE_EDIT_DROP, QE_EFFECT_SLOT_RELEASE, 0, NULL},
    {QE_RULE_SLOT_LIVE, QE_EDIT_INSERT, QE_EFFECT_SLOT_ACQUIRE, 0, next_owner},
    {QE_RULE_SLOT_EMPTY, QE_EDIT_EARLY, QE_EFFECT_SLOT_BORROW, 0, NULL},
    {QE_RULE_SLOT_TWICE, QE_EDIT_INSERT, QE_EFFECT_SLOT_RELEASE, 0, NULL},
    {QE_RULE_SLOT_OWNER, QE_EDIT_ALTER, QE_EFFECT_SLOT_BORROW, 0, next_microbatch},
    {QE_RULE_SLOT_LEAK, QE_EDIT_DROP, QE_EFFECT_SLOT_RELEASE, 1, NULL},
    {QE_RULE_WEIGHT_VERSION, QE_EDIT_ALTER, QE_EFFECT_WEIGHT_READ, 0, later_version},
    {QE_RULE_WEIGHT_TWICE, QE_EDIT_REPEAT, QE_EFFECT_WEIGHT_COMMIT, 0, NULL},
    {QE_RULE_WEIGHT_UNTAKEN, QE_EDIT_DROP, QE_EFFECT_GRAD_TAKE, 0, NULL},
    {QE_RULE_CACHE_EMPTY, QE_EDIT_SKIP, QE_EFFECT_CACHE_FILL, 0, NULL},
    {QE_RULE_CACHE_STALE, QE_EDIT_SKIP, QE_EFFECT_CACHE_FILL, 0, NULL},
    {QE_RULE_CACHE_STALE, QE_EDIT_ALTER, QE_EFFECT_CACHE_USE, 0, later_version},
    {QE_RULE_CACHE_SCALE, QE_EDIT_ALTER, QE_EFFECT_CACHE_USE, 0, later_epoch},
    {QE_RULE_CACHE_RECIPE, QE_EDIT_ALTER, QE_EFFECT_CACHE_USE, 0, other_recipe},
    {QE_RULE_CACHE_LAYOUT, QE_EDIT_ALTER, QE_EFFECT_CACHE_USE, 0, more_layouts},
    {QE_RULE_GRAD_TWICE, QE_EDIT_REPEAT, QE_EFFECT_GRAD_DEPOSIT, 0, NULL},
    {QE_RULE_GRAD_ORDER, QE_EDIT_ALTER, QE_EFFECT_GRAD_DEPOSIT, 0, next_microbatch},
    {QE_RULE_GRAD_SET, QE_EDIT_ALTER, QE_EFFECT_GRAD_DEPOSIT, 0, other_beta},
    {QE_RULE_GRAD_TAKEN, QE_EDIT_REPEAT, QE_EFFECT_GRAD_TAKE, 0, NULL},
    {QE_RULE_GRAD_MISSING, QE_EDIT_DROP, QE_EFFECT_GRAD_DEPOSIT, 1, NULL},
    {QE_RULE_BUFFER_BOUNDS, QE_EDIT_ALTER, QE_EFFECT_BUFFER_READ, 0, past_the_end},
    {QE_RULE_BUFFER_UNWRITTEN, QE_EDIT_SKIP, QE_EFFECT_BUFFER_WRITE, 0, NULL},
    {QE_RULE_BUFFER_UNWRITTEN, QE_EDIT_INSERT, QE_EFFECT_BUFFER_WRITE, 1, host_reads_all},
    {QE_RULE_BUFFER_VERSION, QE_EDIT_SKIP, QE_EFFECT_BUFFER_WRITE, 0, NULL},
    {QE_RULE_BUFFER_VERSION, QE_EDIT_ALTER, QE_EFFECT_BUFFER_READ, 0, later_version},
    {QE_RULE_SYNC_ENTER, QE_EDIT_SKIP, ANY_WAIT, 0, NULL},
    {QE_RULE_SYNC_EXIT, QE_EDIT_SKIP, ANY_WAIT, 1, NULL},
    {QE_RULE_SYNC_SIDE, QE_EDIT_SKIP, ANY_WAIT, 0, NULL},
    {QE_RULE_SYNC_EVENT, QE_EDIT_SKIP, ANY_RECORD, 0, NULL},
    {QE_RULE_SYNC_HOST, QE_EDIT_INSERT, QE_EFFECT_BUFFER_WRITE, 0, host_reads},
};

static int find_effect(const qe_program *program, const qe_item *item, int kind, uint32_t *index_out) {
    for (uint32_t i = 0; i < item->effect_count; i++)
        if (program->effects[item->first_effect + i].kind == kind) {
            *index_out = i;
            return 1;
        }
    return 0;
}

/* An op that another rank waits for is submitted once and at its place, whatever it declares. */
static int keeps_peers_waiting(const qe_program *program, const qe_item *item, qe_edit_kind kind) {
    int moves = kind == QE_EDIT_SKIP || kind == QE_EDIT_REPEAT || kind == QE_EDIT_EARLY;
    return moves && program->streams[item->stream].role == QE_STREAM_COMM;
}

static int propose_edge(const qe_item *item, const recipe_for_rule *recipe) {
    return item->kind == (recipe->effect_kind == ANY_WAIT ? QE_ITEM_WAIT : QE_ITEM_RECORD);
}

/* Completes an edit of the recipe's kind at item `index`; 0: this item offers none. */
static int propose(const qe_rank_plan *plan, const recipe_for_rule *recipe, uint32_t index, qe_edit *edit_out) {
    const qe_program *program = &plan->program;
    const qe_item *item = &program->items[index];
    *edit_out = (qe_edit){.kind = recipe->kind, .item = index, .stream = item->stream};
    if (recipe->effect_kind < 0) return propose_edge(item, recipe);
    if (item->kind != QE_ITEM_OP || !find_effect(program, item, recipe->effect_kind, &edit_out->effect_index)) return 0;
    if (keeps_peers_waiting(program, item, recipe->kind)) return 0;
    edit_out->effect = program->effects[item->first_effect + edit_out->effect_index];
    if (recipe->alter != NULL) recipe->alter(plan, edit_out);
    if (recipe->kind == QE_EDIT_INSERT) edit_out->at = index + 1;
    if (recipe->kind == QE_EDIT_EARLY) edit_out->at = index / 2;
    /* A commit or fold comes early only if it comes while there still are actions. */
    if (recipe->kind == QE_EDIT_EARLY && edit_out->at > plan->take_begin) edit_out->at = plan->take_begin / 2;
    return edit_out->at < program->item_count;
}

/* A trial: a rank's training plan, with a ledger of its own in the state in which the rank's ledger is. */
typedef struct fault_trial {
    qe_rank *rank;
    qe_binding binding;
    int empty_caches;
} fault_trial;

/* Every item as planned. */
static void run_clean_step(qe_ledger *ledger, uint32_t item_count) {
    qe_violations none;
    qe_status status = QE_OK;
    qe_ledger_step_begin(ledger);
    for (uint32_t i = 0; i < item_count && status == QE_OK; i++) status = qe_ledger_issue(ledger, i, &none);
    if (status == QE_OK) status = qe_ledger_step_end(ledger, &none);
    QE_ASSERT(status == QE_OK);
}

static void trial_end(fault_trial *trial) {
    qe_ledger_destroy(trial->binding.ledger);
    trial->binding.ledger = NULL;
}

/* Before the first step nothing is written and every cache is empty; later that is so only of caches after an abort. */
static qe_status trial_begin(fault_trial *trial, qe_error *error_out) {
    const qe_program *program = trial->binding.program;
    const qe_rank *rank = trial->rank;
    if (trial->binding.ledger == NULL || !rank->has_stepped) {
        trial_end(trial);
        QE_TRY(qe_ledger_create(program, &trial->binding.ledger, error_out));
        qe_violations none;
        QE_TRY(qe_ledger_certify(trial->binding.ledger, &none, error_out));
    }
    if (rank->has_stepped) run_clean_step(trial->binding.ledger, program->item_count);
    if (rank->has_stepped && trial->empty_caches) {
        qe_ledger_step_begin(trial->binding.ledger);
        qe_ledger_step_abort(trial->binding.ledger);
    }
    return QE_OK;
}

/* The rule that the edit breaks first, or QE_RULE_NONE. */
static qe_status trial_run(fault_trial *trial, const qe_edit *edit, qe_rule *rule_out, qe_error *error_out) {
    qe_rank *rank = trial->rank;
    qe_team *team = rank->team;
    QE_TRY(trial_begin(trial, error_out));
    team->edit = *edit;
    team->edit_rank = rank->index;
    memset(&rank->violations, 0, sizeof rank->violations);
    qe_ledger_step_begin(trial->binding.ledger);
    qe_status status = qe_binding_issue(rank, &trial->binding, 0, trial->binding.rank_plan->program.item_count, 1, 0);
    if (status == QE_OK && rank->violations.count == 0)
        status = qe_ledger_step_check(trial->binding.ledger, &rank->violations);
    *rule_out = rank->violations.count > 0 ? rank->violations.record[0].rule : QE_RULE_NONE;
    memset(&rank->violations, 0, sizeof rank->violations);
    qe_ledger_step_abort(trial->binding.ledger);
    team->edit_rank = QE_NONE;
    if (status == QE_OK || status == QE_CONTRACT) return QE_OK;
    return qe_error_set(error_out, status, NULL, "a trial of a fault ended with: %s", qe_status_name(status));
}

/* *edit_out is of kind QE_EDIT_NONE when no edit of the recipe breaks the rule first on this rank. */
static qe_status search_rank(fault_trial *trial, const recipe_for_rule *recipe, qe_edit *edit_out,
                             qe_error *error_out) {
    const qe_rank_plan *plan = trial->binding.rank_plan;
    uint32_t count = plan->program.item_count;
    int tries = 0;
    for (uint32_t i = 0; i < count && tries < TRIES_MAX; i++) {
        qe_rule rule;
        if (!propose(plan, recipe, recipe->from_back ? count - 1 - i : i, edit_out)) continue;
        tries++;
        QE_TRY(trial_run(trial, edit_out, &rule, error_out));
        if (rule == recipe->rule) return QE_OK;
    }
    edit_out->kind = QE_EDIT_NONE;
    return QE_OK;
}

static qe_status search(qe_team *team, const recipe_for_rule *recipe, qe_edit *edit_out, uint32_t *rank_out,
                        qe_error *error_out) {
    edit_out->kind = QE_EDIT_NONE;
    for (uint32_t index = 0; index < team->rank_count && edit_out->kind == QE_EDIT_NONE; index++) {
        qe_rank *rank = &team->ranks[index];
        fault_trial trial = {.rank = rank, .binding = rank->train};
        trial.binding.ledger = NULL;
        trial.binding.item_segment = NULL; /* what is tried are edits of single items */
        trial.empty_caches = !rank->has_caches || recipe->rule == QE_RULE_CACHE_EMPTY;
        qe_status status = search_rank(&trial, recipe, edit_out, error_out);
        trial_end(&trial);
        QE_TRY(status);
        *rank_out = index;
    }
    return QE_OK;
}

/* After the first step no cache is empty by itself. A weight that is written by hand loses its cache; what is planted
 * then is that nobody fills it again. */
static void empty_cache(qe_rank *rank, const qe_edit *edit) {
    const qe_program *program = &rank->train.rank_plan->program;
    uint32_t weight = program->objects[edit->effect.object].weight;
    qe_ledger_touch(rank->train.ledger, weight, qe_ledger_counter(rank->train.ledger, weight) + 1);
    rank->words_stale = 1;
}

static qe_status arm(qe_team *team, qe_rule rule, qe_error *error_out) {
    for (size_t i = 0; i < sizeof recipes / sizeof *recipes; i++) {
        qe_edit edit;
        uint32_t rank = 0;
        if (recipes[i].rule != rule) continue;
        QE_TRY(search(team, &recipes[i], &edit, &rank, error_out));
        if (edit.kind == QE_EDIT_NONE) continue;
        if (rule == QE_RULE_CACHE_EMPTY) empty_cache(&team->ranks[rank], &edit);
        team->edit = edit;
        team->edit_rank = rank;
        team->edit_rule = rule;
        return QE_OK;
    }
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                        "try another schedule, recipe or step: some rules need several ranks or delayed scaling",
                        "no single edit of this plan breaks %s first", qe_rule_id(rule));
}

/* A host value of a bound op changes behind the back of the graph that froze it. */
static int change_constant(qe_rank *rank) {
    for (uint32_t i = 0; i < rank->train.rank_plan->op_count; i++) {
        qe_op *op = &rank->train.ops[i];
        if (op->kind != QE_OP_NORM_QUANTIZE) continue;
        op->args.norm.epsilon *= 2.0f;
        return 1;
    }
    return 0;
}

/* Seals are broken by what changes around a graph, not by what is submitted. */
static qe_status break_seal(qe_team *team, qe_rule rule, qe_error *error_out) {
    if (team->options.capture == QE_CAPTURE_NONE)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "train with --mode captured",
                            "%s needs graphs, and this team runs eagerly", qe_rule_id(rule));
    if (rule == QE_RULE_GRAPH_ADDRESS) return qe_team_weight_move(team, 0, error_out);
    for (uint32_t i = 0; i < team->rank_count; i++)
        if (change_constant(&team->ranks[i])) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, NULL, "no op of this plan holds a constant to change");
}

qe_status qe_team_inject(qe_team *team, qe_rule rule, qe_error *error_out) {
    if (team->ranks[0].train.plan == NULL)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL,
                            "a team without a training plan has no step to disturb");
    if (rule == QE_RULE_STEP_NONFINITE) {
        team->edit_rule = rule;
        return QE_OK;
    }
    if (team->options.contracts == QE_CONTRACTS_OFF)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "turn contracts on",
                            "with contracts off nothing would stop the fault that breaks %s", qe_rule_id(rule));
    if (rule == QE_RULE_GRAPH_ADDRESS || rule == QE_RULE_GRAPH_CONSTANT) return break_seal(team, rule, error_out);
    return arm(team, rule, error_out);
}
