/* rank.c - one step on one rank (drawn in step.h). What outlives the step is written only after every rank has said,
 * at the second meeting, that its commits and folds break no rule. */
#include <math.h>
#include <string.h>
#include <time.h>
#include "base/assert.h"
#include "step/guard.h"

static uint32_t object_named(const qe_program *program, const char *name) {
    for (uint32_t i = 0; i < program->object_count; i++)
        if (strcmp(program->objects[i].name, name) == 0) return i;
    return QE_NONE;
}

/* What the device found in the calls that were made, where no declaration told of it. */
static void note_breach(qe_rank *rank, const qe_binding *binding) {
    qe_breach breach;
    if (!rank->team->options.backend->breach(rank->device, &breach) || rank->violations.count > 0) return;
    const qe_program *program = &binding->rank_plan->program;
    rank->violations.count = rank->violations.total = 1;
    rank->violations.record[0] = (qe_violation){.rule = breach.rule,
                                                .item = QE_NONE,
                                                .other_item = QE_NONE,
                                                .object = object_named(program, breach.object),
                                                .stream = QE_NONE,
                                                .microbatch = QE_NONE,
                                                .count = 1};
    qe_error_set(&rank->error, QE_CONTRACT, "restore the edge between the two streams", "%s", breach.text);
}

/* Sets the outcome and wakes everybody who waits for this rank. Work that was given to streams is finished first. */
static void give_up(qe_rank *rank, qe_binding *binding, qe_status status) {
    rank->status = status;
    if (status == QE_CONTRACT) note_breach(rank, binding);
    const qe_team_options *options = &rank->team->options;
    options->comm->abort(options->world);
    qe_error ignored; /* transfers that were woken by the abort say so; the cause is in rank->status */
    qe_binding_drain(rank, binding, &ignored);
}

/* The amax of a step that is not committed is dropped with it. */
static void drop_amaxes(qe_rank *rank) {
    static const float none = 0.0f;
    qe_error ignored; /* a device that cannot be written is broken: its steps fail */
    qe_breach same;   /* work that went astray may still hold them: no new fault, and nothing was recorded there */
    for (uint32_t weight = 0; weight < rank->team->plan->weight_count; weight++)
        for (int role = 0; role < QE_SCALE_ROLES; role++)
            if (rank->places[weight].scale[role] != NULL)
                (void)qe_rank_write(rank, &rank->places[weight].scale[role]->amax, &none, sizeof none, &ignored);
    (void)rank->team->options.backend->breach(rank->device, &same);
}

static int contracts_on(const qe_rank *rank) {
    return rank->team->options.contracts != QE_CONTRACTS_OFF;
}

static int observes(const qe_rank *rank) {
    return rank->team->options.contracts == QE_CONTRACTS_OBSERVE;
}

/* Of what only a guard saw no submission tells. */
static void keep_history(qe_rank *rank, const qe_binding *binding) {
    if (!rank->ledger_told) return;
    qe_error ignored; /* without memory for the history the records still say what happened */
    qe_ledger_history(binding->ledger, &rank->history, &ignored);
}

static void abort_step(qe_rank *rank, qe_binding *binding) {
    keep_history(rank, binding);
    if (contracts_on(rank)) {
        qe_ledger_counts(binding->ledger, &rank->certified, &rank->judged);
        qe_ledger_step_abort(binding->ledger);
    }
    rank->has_caches = 0;
    rank->words_stale = 1;
    drop_amaxes(rank);
}

static qe_status begin(qe_rank *rank, qe_binding *binding) {
    const qe_batch *batch = rank->team->batch;
    const qe_plan *plan = binding->plan;
    rank->status = QE_OK;
    rank->vetoed = rank->committed = 0;
    rank->certified = rank->judged = rank->gradient_copies = rank->actions_ns = rank->commit_ns = 0;
    memset(&rank->violations, 0, sizeof rank->violations);
    qe_program_deinit(&rank->history);
    memset(&rank->error, 0, sizeof rank->error);
    size_t tokens = plan->model_ops->tokens(plan->model);
    for (size_t m = 0; m < plan->microbatches; m++) {
        memcpy(binding->staging + 2 * m * tokens, batch->tokens + m * tokens, tokens * sizeof(int32_t));
        memcpy(binding->staging + (2 * m + 1) * tokens, batch->targets + m * tokens, tokens * sizeof(int32_t));
    }
    rank->ledger_told = 0;
    if (contracts_on(rank)) qe_ledger_step_begin(binding->ledger);
    if (rank->caches_unsealed) QE_TRY(qe_rank_unseal_caches(rank));
    return qe_guard_begin(rank, binding);
}

static qe_status read_doubles(qe_rank *rank, double *to, const double *from, size_t count) {
    return qe_rank_read(rank, to, from, count * sizeof *to, &rank->error);
}

static int owns_last_stage(const qe_rank *rank, const qe_plan *plan) {
    return plan->stage_rank[plan->stages - 1] == rank->index;
}

/* Norms of local gradients by weight, then the sum of the losses in microbatch order; zero where another rank knows. */
static qe_status local_values(qe_rank *rank, qe_binding *binding) {
    const qe_plan *plan = binding->plan;
    QE_TRY(read_doubles(rank, rank->values, binding->norms, plan->weight_count)); /* others' stay 0 */
    rank->values[plan->weight_count] = 0;
    if (!owns_last_stage(rank, plan)) return QE_OK;
    QE_TRY(read_doubles(rank, binding->loss_host, binding->loss, plan->microbatches));
    double sum = 0;
    for (uint32_t m = 0; m < plan->microbatches; m++) sum += binding->loss_host[m];
    if (rank->team->edit_rule == QE_RULE_STEP_NONFINITE) sum = NAN; /* an armed fault */
    rank->values[plan->weight_count] = sum;
    return QE_OK;
}

/* Sums in the order of weights, whatever rank holds them: the norm does not depend on the number of ranks. */
static void global_values(qe_rank *rank, const qe_plan *plan) {
    size_t stride = plan->weight_count + 1u;
    double squares = 0;
    for (uint32_t weight = 0; weight < plan->weight_count; weight++) {
        uint32_t owner = plan->stage_rank[plan->model_ops->weight_stage(plan->model, weight, plan->stages)];
        squares += rank->gathered[owner * stride + weight];
    }
    rank->gradient_norm = sqrt(squares);
    rank->loss_sum = rank->gathered[plan->stage_rank[plan->stages - 1] * stride + plan->weight_count];
}

static qe_status meet(qe_rank *rank, qe_status mine, size_t count) {
    const qe_team_options *options = &rank->team->options;
    qe_status worst = mine;
    QE_TRY(options->comm->meet(options->world, rank->index, mine, rank->values, count, rank->gathered, &worst));
    return worst;
}

/* What the guards of this step's graphs saw. */
static qe_status guards(qe_rank *rank, qe_binding *binding) {
    qe_violations found = {0};
    qe_status status = qe_guard_verdict(rank, binding, &found);
    if (status != QE_CONTRACT || found.count == 0) return status; /* the device may refuse to let the host read */
    if (rank->violations.count == 0) rank->violations = found;
    return rank->team->options.contracts == QE_CONTRACTS_OBSERVE ? QE_OK : QE_CONTRACT;
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static qe_status actions(qe_rank *rank, qe_binding *binding) {
    uint64_t begin = now_ns();
    QE_TRY(qe_binding_issue(rank, binding, 0, binding->rank_plan->commit_begin, 1, 1));
    QE_TRY(qe_binding_drain(rank, binding, &rank->error));
    rank->actions_ns = now_ns() - begin;
    QE_TRY(guards(rank, binding));
    return local_values(rank, binding);
}

static qe_status check_end(qe_rank *rank, qe_binding *binding) {
    if (!contracts_on(rank) || observes(rank)) return QE_OK; /* an observed step ends whatever it owes */
    qe_status status = qe_ledger_step_check(binding->ledger, &rank->violations);
    rank->ledger_told |= status == QE_CONTRACT;
    return status;
}

/* Judges commits, folds and the end of the step before any of them runs. */
static qe_status judge_commit(qe_rank *rank, qe_binding *binding) {
    uint32_t end = binding->rank_plan->program.item_count;
    QE_TRY(qe_binding_issue(rank, binding, binding->rank_plan->commit_begin, end, 1, 0));
    return check_end(rank, binding);
}

/* Told only now: the trace of an observed step is the whole step. */
static void end_step(qe_rank *rank, qe_binding *binding) {
    qe_violations found;
    qe_status status = qe_ledger_step_end(binding->ledger, &found);
    QE_ASSERT(status == QE_OK || observes(rank));
    rank->ledger_told |= status == QE_CONTRACT;
    if (status == QE_CONTRACT && rank->violations.count == 0) rank->violations = found;
    rank->words_stale |= rank->violations.count > 0; /* the work was done, the ledger left it out */
    keep_history(rank, binding);
}

static qe_status run_commit(qe_rank *rank, qe_binding *binding) {
    qe_adamw constants = rank->team->optimizer->constants(rank->team->optimizer->context, rank->gradient_norm);
    /* With it copies of the state that a checkpoint keeps are taken: from here on the state changes. */
    QE_TRY(qe_rank_write(rank, rank->adamw, &constants, sizeof constants, &rank->error));
    uint32_t end = binding->rank_plan->program.item_count;
    uint64_t begin = now_ns();
    QE_TRY(qe_binding_issue(rank, binding, binding->rank_plan->commit_begin, end, 0, 1));
    QE_TRY(qe_binding_drain(rank, binding, &rank->error));
    rank->commit_ns = now_ns() - begin;
    QE_TRY(guards(rank, binding));
    if (contracts_on(rank)) {
        qe_ledger_counts(binding->ledger, &rank->certified, &rank->judged);
        end_step(rank, binding);
        rank->has_caches = rank->violations.count == 0;
    }
    return QE_OK;
}

void qe_rank_step(qe_rank *rank) {
    qe_binding *binding = &rank->train;
    qe_status status = begin(rank, binding);
    rank->has_stepped = 1;
    if (status == QE_OK) status = actions(rank, binding);
    if (status == QE_OK) status = meet(rank, QE_OK, binding->plan->weight_count + 1u);
    if (status == QE_OK) {
        global_values(rank, binding->plan);
        rank->vetoed = !isfinite(rank->loss_sum) || !isfinite(rank->gradient_norm);
        if (rank->vetoed) { /* the same on every rank: all saw the same numbers */
            abort_step(rank, binding);
            return;
        }
        status = judge_commit(rank, binding);
    }
    if (status == QE_OK) status = meet(rank, QE_OK, 0);
    if (status == QE_OK) {
        status = run_commit(rank, binding);
        rank->committed = status == QE_OK;
        rank->torn = status != QE_OK;
    }
    if (status == QE_OK) return;
    give_up(rank, binding, status);
    abort_step(rank, binding);
}

/* Weights and scales moved on in training; the evaluation ledger is told. */
static void follow_training(qe_rank *rank) {
    if (rank->train.plan == NULL) return;
    for (uint32_t weight = 0; weight < rank->team->plan->weight_count; weight++) {
        const qe_weight_place *here = &rank->evaluate.places[weight], *there = &rank->train.places[weight];
        if (here->weight_object == QE_NONE) continue;
        qe_ledger_touch(rank->evaluate.ledger, here->weight_object,
                        qe_ledger_counter(rank->train.ledger, there->weight_object));
        for (int role = 0; role < QE_SCALE_ROLES; role++)
            if (here->scale_object[role] != QE_NONE)
                qe_ledger_touch(rank->evaluate.ledger, here->scale_object[role],
                                qe_ledger_counter(rank->train.ledger, there->scale_object[role]));
    }
}

void qe_rank_evaluate(qe_rank *rank) {
    qe_binding *binding = &rank->evaluate;
    if (contracts_on(rank)) follow_training(rank);
    qe_status status = begin(rank, binding);
    uint32_t count = binding->rank_plan->program.item_count;
    if (status == QE_OK) status = qe_binding_issue(rank, binding, 0, count, 1, 1);
    if (status == QE_OK) status = qe_binding_drain(rank, binding, &rank->error);
    if (status == QE_OK) status = guards(rank, binding);
    if (status == QE_OK) status = check_end(rank, binding);
    if (status == QE_OK) status = meet(rank, QE_OK, 0);
    if (status == QE_OK && contracts_on(rank)) end_step(rank, binding);
    if (status == QE_OK) return;
    give_up(rank, binding, status);
    rank->words_stale = 1;
    keep_history(rank, binding);
    if (contracts_on(rank)) qe_ledger_step_abort(binding->ledger);
}
