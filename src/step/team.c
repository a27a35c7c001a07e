/* team.c - the ranks of one process: threads that wait for a command, and the state that the caller may see. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/lock.h"
#include "step/capture.h"

static void *rank_main(void *opaque) {
    qe_rank *rank = opaque;
    qe_team *team = rank->team;
    uint64_t seen = 0;
    for (;;) {
        pthread_mutex_lock(&team->mutex);
        while (team->round == seen) pthread_cond_wait(&team->wake, &team->mutex);
        seen = team->round;
        qe_team_command command = team->command;
        pthread_mutex_unlock(&team->mutex);
        if (command == QE_COMMAND_STEP) qe_rank_step(rank);
        if (command == QE_COMMAND_EVALUATE) qe_rank_evaluate(rank);
        if (command == QE_COMMAND_COPY) qe_rank_copy(rank);
        pthread_mutex_lock(&team->mutex);
        team->finished++;
        pthread_cond_signal(&team->done);
        pthread_mutex_unlock(&team->mutex);
        if (command == QE_COMMAND_QUIT) return NULL;
    }
}

void qe_team_command_all(qe_team *team, qe_team_command command) {
    pthread_mutex_lock(&team->mutex);
    team->command = command;
    team->finished = 0;
    team->round++;
    pthread_cond_broadcast(&team->wake);
    uint32_t started = 0;
    for (uint32_t i = 0; i < team->rank_count; i++) started += team->ranks[i].started != 0;
    while (team->finished < started) pthread_cond_wait(&team->done, &team->mutex);
    pthread_mutex_unlock(&team->mutex);
}

static qe_status rank_create(qe_team *team, uint32_t index, const qe_plan *train, const qe_plan *evaluate,
                             qe_error *error_out) {
    qe_rank *rank = &team->ranks[index];
    rank->team = team;
    rank->index = index;
    qe_program_init(&rank->history);
    QE_TRY(team->options.backend->open(&rank->device, error_out));
    if (team->options.opened != NULL) team->options.opened(rank->device, team->options.opened_context);
    qe_status status = qe_rank_allocate(rank, error_out);
    if (status == QE_OK) status = qe_binding_create(rank, &rank->train, train, error_out);
    if (status == QE_OK) status = qe_binding_create(rank, &rank->evaluate, evaluate, error_out);
    QE_TRY(status);
    if (pthread_create(&rank->thread, NULL, rank_main, rank) != 0)
        return qe_error_set(error_out, QE_ERROR_IO, "raise the limit on threads or use fewer ranks",
                            "no thread for rank %u", index);
    rank->started = 1;
    return QE_OK;
}

static void rank_destroy(qe_rank *rank) {
    if (rank->team == NULL) return;
    if (rank->started) pthread_join(rank->thread, NULL);
    if (rank->device == NULL) return;
    qe_binding_destroy(rank, &rank->train);
    qe_binding_destroy(rank, &rank->evaluate);
    qe_rank_release(rank);
    qe_program_deinit(&rank->history);
    rank->team->options.backend->close(rank->device);
}

static int team_locks(qe_team *team) {
    int refused = qe_lock_init(&team->mutex, &team->wake, NULL);
    if (refused) return refused;
    refused = pthread_cond_init(&team->done, NULL);
    if (refused) qe_lock_deinit(&team->mutex, &team->wake);
    return refused;
}

qe_status qe_team_create(const qe_plan *train, const qe_plan *evaluate, const qe_team_options *options,
                         qe_team **team_out, qe_error *error_out) {
    QE_ASSERT(train != NULL || evaluate != NULL);
    qe_team *team = calloc(1, sizeof *team);
    if (team == NULL || team_locks(team) != 0) {
        free(team);
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a team");
    }
    team->plan = train != NULL ? train : evaluate;
    team->options = *options;
    team->rank_count = team->plan->ranks;
    team->edit_rank = QE_NONE;
    team->ranks = calloc(team->rank_count, sizeof *team->ranks);
    qe_status status = team->ranks == NULL
                           ? qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for %u ranks", team->rank_count)
                           : QE_OK;
    for (uint32_t i = 0; status == QE_OK && i < team->rank_count; i++)
        status = rank_create(team, i, train, evaluate, error_out);
    if (status != QE_OK) {
        qe_team_destroy(team);
        return status;
    }
    *team_out = team;
    return QE_OK;
}

void qe_team_destroy(qe_team *team) {
    if (team == NULL) return;
    if (team->ranks != NULL) qe_team_command_all(team, QE_COMMAND_QUIT);
    for (uint32_t i = 0; team->ranks != NULL && i < team->rank_count; i++) rank_destroy(&team->ranks[i]);
    free(team->ranks);
    pthread_cond_destroy(&team->done);
    qe_lock_deinit(&team->mutex, &team->wake);
    free(team);
}

qe_rank *qe_team_owner(const qe_team *team, uint32_t weight) {
    const qe_plan *plan = team->plan;
    return &team->ranks[plan->stage_rank[plan->model_ops->weight_stage(plan->model, weight, plan->stages)]];
}

static void touch(qe_binding *binding, uint32_t weight) {
    if (binding->plan == NULL) return;
    uint32_t object = binding->rank_plan->places[weight].weight_object;
    qe_ledger_touch(binding->ledger, object, qe_ledger_counter(binding->ledger, object) + 1);
}

qe_status qe_team_whole(const qe_team *team, qe_error *error_out) {
    if (!team->torn) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_DEVICE, "make a new team and go on from the last checkpoint",
                        "a step failed while it was being committed; the weights are of two steps");
}

qe_status qe_team_parameter_write(qe_team *team, uint32_t index, const float *values, qe_error *error_out) {
    QE_TRY(qe_team_whole(team, error_out));
    const qe_parameter *parameter = team->plan->model_ops->parameter(team->plan->model, index);
    qe_rank *rank = qe_team_owner(team, parameter->weight);
    size_t count = (size_t)parameter->rows * parameter->columns;
    float *to = rank->places[parameter->weight].master + (size_t)parameter->row_begin * parameter->columns;
    QE_TRY(team->options.backend->memory->write(rank->device, to, values, count * sizeof *values, error_out));
    rank->has_caches = 0;
    rank->caches_unsealed = 1;
    touch(&rank->train, parameter->weight);
    touch(&rank->evaluate, parameter->weight);
    rank->words_stale = 1;
    return QE_OK;
}

qe_status qe_team_parameter_read(qe_team *team, uint32_t index, float *values_out, qe_error *error_out) {
    QE_TRY(qe_team_whole(team, error_out));
    const qe_parameter *parameter = team->plan->model_ops->parameter(team->plan->model, index);
    const qe_rank *rank = qe_team_owner(team, parameter->weight);
    const float *from = rank->places[parameter->weight].master + (size_t)parameter->row_begin * parameter->columns;
    size_t count = (size_t)parameter->rows * parameter->columns;
    return team->options.backend->memory->read(rank->device, values_out, from, count * sizeof *values_out, error_out);
}

/* The cause of a failed round: a breach first, then an operating error, then "interrupted" of those who were woken. */
static qe_status outcome(qe_team *team, qe_step_result *result_out, qe_error *error_out) {
    qe_status worst = QE_OK;
    const qe_rank *cause = NULL;
    uint32_t committed = 0;
    result_out->violation_rank = QE_NONE;
    for (uint32_t i = 0; i < team->rank_count; i++) {
        const qe_rank *rank = &team->ranks[i];
        int weight_new = rank->status == QE_CONTRACT            ? 3
                         : rank->status == QE_ERROR_INTERRUPTED ? 1
                         : rank->status == QE_OK                ? 0
                                                                : 2;
        int weight_old = worst == QE_CONTRACT ? 3 : worst == QE_ERROR_INTERRUPTED ? 1 : worst == QE_OK ? 0 : 2;
        team->torn |= rank->torn;
        committed += rank->committed != 0;
        if (weight_new > weight_old) worst = rank->status, cause = rank;
        if (rank->violations.count > 0 && result_out->violation_rank == QE_NONE) {
            result_out->violation_rank = i;
            result_out->violations = rank->violations;
        }
    }
    if (worst == QE_OK) return QE_OK;
    team->torn |= committed > 0; /* a transport that failed one rank behind a meeting that the others held */
    team->options.comm->reset(team->options.world);
    if (error_out != NULL && worst != QE_CONTRACT) {
        *error_out = cause->error;
        if (error_out->status == QE_OK)
            qe_error_set(error_out, worst, NULL, "rank %u gave the step up: %s", cause->index, qe_status_name(worst));
    }
    return worst;
}

qe_status qe_team_step(qe_team *team, const qe_batch *batch, const qe_step_optimizer *optimizer,
                       qe_step_result *result_out, qe_error *error_out) {
    memset(result_out, 0, sizeof *result_out);
    result_out->violation_rank = QE_NONE;
    QE_TRY(qe_team_whole(team, error_out));
    team->batch = batch;
    team->optimizer = optimizer;
    qe_team_command_all(team, QE_COMMAND_STEP);
    qe_status status = outcome(team, result_out, error_out);
    const qe_plan *plan = team->ranks[0].train.plan;
    result_out->loss = team->ranks[0].loss_sum / ((double)plan->model_ops->tokens(plan->model) * plan->microbatches);
    result_out->gradient_norm = team->ranks[0].gradient_norm;
    result_out->vetoed = status == QE_OK && team->ranks[0].vetoed;
    for (uint32_t i = 0; i < team->rank_count; i++) {
        result_out->certified += team->ranks[i].certified;
        result_out->judged += team->ranks[i].judged;
        result_out->gradient_copies += team->ranks[i].gradient_copies;
        if (team->ranks[i].actions_ns > result_out->actions_ns) result_out->actions_ns = team->ranks[i].actions_ns;
        if (team->ranks[i].commit_ns > result_out->commit_ns) result_out->commit_ns = team->ranks[i].commit_ns;
    }
    team->edit_rank = QE_NONE; /* a fault is planted once */
    team->edit.kind = QE_EDIT_NONE;
    team->edit_rule = QE_RULE_NONE;
    return status;
}

static qe_status read_logits(qe_team *team, float *logits_out, uint64_t offset_bytes, uint64_t bytes,
                             qe_error *error_out) {
    const qe_plan *plan = team->ranks[0].evaluate.plan;
    qe_rank *rank = &team->ranks[plan->stage_rank[plan->stages - 1]];
    const qe_pool *pool = qe_rank_plan_pool(rank->evaluate.rank_plan, plan->stages - 1, QE_SLOT_X);
    QE_ASSERT(pool != NULL);
    const char *slots = rank->evaluate.regions[pool->regions[0]];
    return team->options.backend->memory->read(rank->device, logits_out, slots + offset_bytes, bytes, error_out);
}

qe_status qe_team_evaluate(qe_team *team, const qe_batch *batch, double *losses_out, float *logits_out,
                           uint64_t logits_offset_bytes, uint64_t logits_bytes, qe_step_result *result_out,
                           qe_error *error_out) {
    const qe_plan *plan = team->ranks[0].evaluate.plan;
    QE_ASSERT(plan != NULL);
    memset(result_out, 0, sizeof *result_out);
    result_out->violation_rank = QE_NONE;
    QE_TRY(qe_team_whole(team, error_out));
    team->batch = batch;
    qe_team_command_all(team, QE_COMMAND_EVALUATE);
    QE_TRY(outcome(team, result_out, error_out));
    const qe_rank *last = &team->ranks[plan->stage_rank[plan->stages - 1]];
    if (losses_out != NULL) memcpy(losses_out, last->evaluate.loss_host, plan->microbatches * sizeof *losses_out);
    return logits_out == NULL ? QE_OK : read_logits(team, logits_out, logits_offset_bytes, logits_bytes, error_out);
}

qe_status qe_team_scale_amax(qe_team *team, uint32_t weight, int role, float amax, qe_error *error_out) {
    QE_TRY(qe_team_whole(team, error_out));
    int known = weight < team->plan->weight_count && role >= 0 && role < QE_SCALE_ROLES;
    qe_scale_state *state = known ? qe_team_owner(team, weight)->places[weight].scale[role] : NULL;
    if (state == NULL)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "weight %u keeps no scale of role %d", weight, role);
    qe_rank *rank = qe_team_owner(team, weight);
    float recorded;
    QE_TRY(qe_rank_read(rank, &recorded, &state->amax, sizeof recorded, error_out));
    return amax > recorded ? qe_rank_write(rank, &state->amax, &amax, sizeof amax, error_out) : QE_OK;
}

/* Copies of small arrays share the history's storage; ownership moves to the caller. */
qe_status qe_team_history(qe_team *team, uint32_t rank, qe_program *program_out, qe_error *error_out) {
    if (rank >= team->rank_count || team->ranks[rank].history.object_count == 0)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL,
                            "rank %u has no refused or observed step to tell of", rank);
    *program_out = team->ranks[rank].history;
    qe_program_init(&team->ranks[rank].history);
    return QE_OK;
}

const qe_program *qe_team_program(const qe_team *team, uint32_t rank) {
    const qe_rank *r = &team->ranks[rank];
    return r->train.plan != NULL ? r->train.program : r->evaluate.program;
}

/* The old memory stays until the rank goes: graphs that were recorded with it may still be launched. */
static qe_status retire(qe_rank *rank, void *memory, qe_error *error_out) {
    void **grown = realloc(rank->retired, (rank->retired_count + 1u) * sizeof *grown);
    if (grown == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to move a weight");
    rank->retired = grown;
    rank->retired[rank->retired_count++] = memory;
    return QE_OK;
}

static qe_status copy_master(qe_rank *rank, void *to, const void *from, uint64_t bytes, qe_error *error_out) {
    void *host = malloc((size_t)bytes);
    if (host == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to move a weight");
    qe_status status = qe_rank_read(rank, host, from, bytes, error_out);
    if (status == QE_OK) status = qe_rank_write(rank, to, host, bytes, error_out);
    free(host);
    return status;
}

qe_status qe_team_weight_move(qe_team *team, uint32_t parameter, qe_error *error_out) {
    const qe_plan *plan = team->plan;
    uint32_t weight = plan->model_ops->parameter(plan->model, parameter)->weight;
    const qe_weight_info *info = plan->model_ops->weight(plan->model, weight);
    qe_rank *rank = qe_team_owner(team, weight);
    size_t bytes = (size_t)info->rows * info->columns * sizeof(float);
    float *moved = qe_rank_alloc(rank, QE_MEMORY_MASTERS, qe_rank_master_bytes(bytes), error_out);
    if (moved == NULL) return QE_ERROR_MEMORY;
    qe_status status = copy_master(rank, moved, rank->places[weight].master, qe_rank_master_bytes(bytes), error_out);
    if (status == QE_OK) status = retire(rank, rank->places[weight].master, error_out);
    if (status != QE_OK) {
        qe_rank_free(rank, moved);
        return status;
    }
    rank->places[weight].master = moved;
    rank->places[weight].witness = qe_rank_behind(moved, bytes);
    status = qe_binding_rebind(rank, &rank->train, error_out);
    return status == QE_OK ? qe_binding_rebind(rank, &rank->evaluate, error_out) : status;
}

qe_status qe_team_recapture(qe_team *team, qe_error *error_out) {
    for (uint32_t i = 0; i < team->rank_count; i++) {
        qe_binding *bindings[] = {&team->ranks[i].train, &team->ranks[i].evaluate};
        for (int b = 0; b < 2; b++) {
            if (bindings[b]->plan == NULL) continue;
            qe_binding_uncapture(&team->ranks[i], bindings[b]);
            QE_TRY(qe_binding_capture(&team->ranks[i], bindings[b], error_out));
            qe_binding_tell_captured(bindings[b]);
        }
    }
    return QE_OK;
}

qe_capture_use qe_team_captured(const qe_team *team, uint32_t rank) {
    const qe_binding *binding = team->ranks[rank].train.plan ? &team->ranks[rank].train : &team->ranks[rank].evaluate;
    qe_capture_use use = {
        .graphs = binding->graph_count, .segments = binding->segment_count, .seconds = binding->capture_s};
    for (uint32_t p = 0; p < binding->rank_plan->pool_count; p++)
        if (binding->rank_plan->pools[p].kind == QE_SLOT_I) use.slots += binding->rank_plan->pools[p].count;
    for (uint32_t g = 0; g < binding->graph_count; g++) {
        qe_graph_info info = team->options.backend->graph->info(binding->graphs[g].graph);
        use.ops += info.ops;
        use.bytes += info.bytes + binding->graphs[g].op_count * sizeof(qe_op);
    }
    return use;
}

qe_memory_use qe_team_memory(const qe_team *team, uint32_t rank) {
    const qe_rank *r = &team->ranks[rank];
    const qe_binding *binding = r->train.plan != NULL ? &r->train : &r->evaluate;
    return (qe_memory_use){.state_bytes = r->state_bytes,
                           .cache_bytes = r->cache_bytes,
                           .slot_bytes = binding->slot_bytes,
                           .scratch_bytes = binding->scratch_bytes};
}

qe_memory_ledger qe_team_memory_ledger(const qe_team *team, uint32_t rank) {
    return team->ranks[rank].taken;
}
