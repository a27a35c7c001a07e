/* memory.c - what a rank keeps from step to step: masters, moments, gradients, caches, scales. Allocated once. */
#include <stdlib.h>
#include <string.h>
#include "base/align.h"
#include "base/assert.h"
#include "step/team.h"

void *qe_rank_alloc(qe_rank *rank, qe_memory_kind kind, uint64_t bytes, qe_error *error_out) {
    void *address = NULL;
    if (bytes == 0) return NULL;
    qe_status status = rank->team->options.backend->memory->alloc(rank->device, (size_t)bytes, &address, error_out);
    if (status != QE_OK) return NULL;
    rank->taken.bytes[kind] += bytes;
    return address;
}

void *qe_rank_host_alloc(qe_rank *rank, uint64_t bytes, qe_error *error_out) {
    void *address = NULL;
    const qe_memory_ops *memory = rank->team->options.backend->memory;
    return memory->host_alloc(rank->device, (size_t)bytes, &address, error_out) == QE_OK ? address : NULL;
}

/* A part of an arena goes with the arena. */
static int is_piece(const qe_rank *rank, const void *address) {
    for (int kind = 0; kind < QE_MEMORY_KINDS; kind++) {
        const qe_arena *arena = &rank->arenas[kind];
        if (arena->memory == NULL || (const char *)address < arena->memory) continue;
        if ((const char *)address < arena->memory + arena->bytes) return 1;
    }
    return 0;
}

static void *piece(qe_rank *rank, qe_memory_kind kind, uint64_t bytes) {
    qe_arena *arena = &rank->arenas[kind];
    if (bytes == 0) return NULL;
    void *at = arena->memory + arena->placed;
    arena->placed += qe_memory_piece_bytes(bytes);
    QE_ASSERT(arena->placed <= arena->bytes);
    return at;
}

void qe_rank_free(qe_rank *rank, void *address) {
    if (address == NULL || is_piece(rank, address)) return;
    rank->team->options.backend->memory->release(rank->device, address);
}

void qe_rank_host_free(qe_rank *rank, void *address) {
    if (address != NULL) rank->team->options.backend->memory->host_release(rank->device, address);
}

qe_status qe_rank_write(qe_rank *rank, void *to, const void *from_host, uint64_t bytes, qe_error *error_out) {
    return rank->team->options.backend->memory->write(rank->device, to, from_host, (size_t)bytes, error_out);
}

qe_status qe_rank_read(qe_rank *rank, void *to_host, const void *from, uint64_t bytes, qe_error *error_out) {
    return rank->team->options.backend->memory->read(rank->device, to_host, from, (size_t)bytes, error_out);
}

/* Values, then a line of their own for the witness. */
uint64_t qe_rank_master_bytes(uint64_t value_bytes) {
    return qe_aligned(value_bytes) + QE_ALIGN_BYTES;
}

uint64_t *qe_rank_behind(void *values, uint64_t value_bytes) {
    return (uint64_t *)(void *)((char *)values + qe_rank_master_bytes(value_bytes) - QE_ALIGN_BYTES);
}

int qe_rank_owns(const qe_rank *rank, uint32_t weight) {
    const qe_plan *plan = rank->team->plan;
    return plan->stage_rank[plan->model_ops->weight_stage(plan->model, weight, plan->stages)] == rank->index;
}

static int has_gradients(const qe_rank *rank) {
    return rank->team->plan->options.forward_only == 0;
}

static void place_master(qe_rank *rank, uint32_t weight, uint64_t bytes) {
    qe_weight_place *place = &rank->places[weight];
    place->master = piece(rank, QE_MEMORY_MASTERS, qe_rank_master_bytes(bytes));
    place->witness = qe_rank_behind(place->master, bytes);
    rank->state_bytes += bytes;
    if (!has_gradients(rank)) return;
    place->grad = piece(rank, QE_MEMORY_GRADIENTS, bytes);
    rank->moment1[weight] = piece(rank, QE_MEMORY_MOMENTS, bytes);
    rank->moment2[weight] = piece(rank, QE_MEMORY_MOMENTS, bytes);
    rank->state_bytes += 3 * bytes;
}

static qe_status set_up_scale(qe_rank *rank, uint32_t weight, int role, const qe_recipe *recipe, qe_error *error_out) {
    size_t index = (size_t)weight * QE_SCALE_ROLES + (size_t)role;
    qe_scale_state state = {.scale = 1.0f, .history_length = recipe->history_length};
    state.format_max = qe_format_max(role == QE_SCALE_DY ? QE_FORMAT_E5M2 : QE_FORMAT_E4M3); /* HYBRID */
    state.history = rank->histories + index * recipe->history_length;
    rank->places[weight].scale[role] = &rank->scales[index];
    return qe_rank_write(rank, &rank->scales[index], &state, sizeof state, error_out);
}

static qe_status place_cache(qe_rank *rank, uint32_t weight, qe_error *error_out) {
    const qe_plan *plan = rank->team->plan;
    qe_weight_place *place = &rank->places[weight];
    uint64_t operand = plan->model_ops->cache_operand_bytes(plan->model, weight);
    uint64_t codes = plan->model_ops->cache_code_bytes(plan->model, weight);
    uint64_t scales = plan->model_ops->cache_scale_count(plan->model, weight) * sizeof(float);
    place->cache_operand = piece(rank, QE_MEMORY_CACHES, qe_rank_master_bytes(operand));
    place->cache_key = qe_rank_behind(place->cache_operand, operand);
    place->cache_codes = piece(rank, QE_MEMORY_CACHES, codes);
    place->cache_scale_inv = piece(rank, QE_MEMORY_CACHES, scales);
    rank->cache_bytes += operand + codes + scales;
    const qe_recipe *recipe = plan->model_ops->recipe(plan->model);
    int scaled = recipe->kind == QE_RECIPE_DELAYED && plan->model_ops->weight(plan->model, weight)->scaled;
    for (int role = 0; scaled && role < QE_SCALE_ROLES; role++)
        QE_TRY(set_up_scale(rank, weight, role, recipe, error_out));
    return QE_OK;
}

static qe_status place_weight(qe_rank *rank, uint32_t weight, qe_error *error_out) {
    const qe_plan *plan = rank->team->plan;
    const qe_weight_info *info = plan->model_ops->weight(plan->model, weight);
    uint64_t values = (uint64_t)info->rows * info->columns;
    place_master(rank, weight, values * sizeof(float));
    return info->quantized ? place_cache(rank, weight, error_out) : QE_OK;
}

static qe_status allocate_tables(qe_rank *rank, qe_error *error_out) {
    size_t count = rank->team->plan->weight_count;
    rank->places = calloc(count, sizeof *rank->places);
    rank->moment1 = calloc(count, sizeof *rank->moment1);
    rank->moment2 = calloc(count, sizeof *rank->moment2);
    rank->folded = calloc(count * QE_SCALE_ROLES + 1, sizeof *rank->folded);
    rank->folded_begin = calloc(count + 1, sizeof *rank->folded_begin);
    rank->values = calloc(count + 1, sizeof *rank->values);
    rank->gathered = calloc((count + 1) * rank->team->rank_count, sizeof *rank->gathered);
    if (rank->places && rank->moment1 && rank->moment2 && rank->folded && rank->folded_begin && rank->values &&
        rank->gathered)
        return QE_OK;
    return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the weight table of rank %u", rank->index);
}

/* Scales of all weights side by side, whether they are this rank's or not: they are few. */
static qe_status allocate_scales(qe_rank *rank, qe_error *error_out) {
    const qe_plan *plan = rank->team->plan;
    const qe_recipe *recipe = plan->model_ops->recipe(plan->model);
    uint64_t count = plan->weight_count * (uint64_t)QE_SCALE_ROLES;
    rank->adamw = qe_rank_alloc(rank, QE_MEMORY_WORKSPACE, sizeof *rank->adamw, error_out);
    if (rank->adamw == NULL) return QE_ERROR_MEMORY;
    if (recipe->kind != QE_RECIPE_DELAYED) return QE_OK;
    rank->scales = qe_rank_alloc(rank, QE_MEMORY_SCALES, count * sizeof *rank->scales, error_out);
    rank->histories = qe_rank_alloc(rank, QE_MEMORY_SCALES, count * recipe->history_length * sizeof *rank->histories,
                                    error_out);
    return rank->scales != NULL && rank->histories != NULL ? QE_OK : QE_ERROR_MEMORY;
}

static qe_status allocate_workspace(qe_rank *rank, qe_error *error_out) {
    const qe_plan *plan = rank->team->plan;
    uint64_t bytes = plan->model_ops->workspace_bytes(plan->model);
    rank->workspace = qe_rank_alloc(rank, QE_MEMORY_WORKSPACE, bytes, error_out);
    return rank->workspace == NULL && bytes > 0 ? QE_ERROR_MEMORY : QE_OK;
}

static qe_status allocate_constants(qe_rank *rank, qe_error *error_out) {
    const qe_plan *plan = rank->team->plan;
    uint64_t bytes = plan->model_ops->constant_bytes(plan->model);
    rank->constants = qe_rank_alloc(rank, QE_MEMORY_WORKSPACE, bytes, error_out);
    if (rank->constants == NULL) return QE_ERROR_MEMORY;
    void *host = malloc((size_t)bytes);
    qe_status status =
        host != NULL ? QE_OK : qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the model's constants");
    if (status == QE_OK) {
        plan->model_ops->constant_fill(plan->model, host);
        status = qe_rank_write(rank, rank->constants, host, bytes, error_out);
    }
    free(host);
    return status;
}

void qe_rank_list_folded(qe_rank *rank) {
    uint32_t count = 0;
    for (uint32_t weight = 0; weight < rank->team->plan->weight_count; weight++) {
        rank->folded_begin[weight] = count;
        for (int role = 0; role < QE_SCALE_ROLES && rank->places[weight].scale[role] != NULL; role++)
            rank->folded[count++] = rank->places[weight].scale[role];
    }
}

qe_status qe_rank_unseal_caches(qe_rank *rank) {
    static const uint64_t none = 0;
    for (uint32_t weight = 0; weight < rank->team->plan->weight_count; weight++) {
        uint64_t *key = rank->places[weight].cache_key;
        if (key != NULL) QE_TRY(qe_rank_write(rank, &key[QE_KEY_SEAL], &none, sizeof none, &rank->error));
    }
    rank->caches_unsealed = 0;
    return QE_OK;
}

/* As much as all weights of the rank will be given. */
static qe_status allocate_arenas(qe_rank *rank, qe_error *error_out) {
    static const qe_memory_kind kinds[] = {QE_MEMORY_MASTERS, QE_MEMORY_MOMENTS, QE_MEMORY_GRADIENTS,
                                           QE_MEMORY_CACHES};
    qe_memory_ledger ledger = {{0}};
    qe_memory_add_rank(rank->team->plan, rank->index, &ledger);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        uint64_t bytes = ledger.bytes[kinds[i]];
        char *memory = qe_rank_alloc(rank, kinds[i], bytes, error_out);
        if (memory == NULL && bytes > 0) return QE_ERROR_MEMORY;
        rank->arenas[kinds[i]] = (qe_arena){.memory = memory, .bytes = bytes};
    }
    return QE_OK;
}

qe_status qe_rank_allocate(qe_rank *rank, qe_error *error_out) {
    QE_TRY(allocate_tables(rank, error_out));
    QE_TRY(allocate_arenas(rank, error_out));
    QE_TRY(allocate_constants(rank, error_out));
    QE_TRY(allocate_workspace(rank, error_out));
    QE_TRY(allocate_scales(rank, error_out));
    for (uint32_t weight = 0; weight < rank->team->plan->weight_count; weight++)
        if (qe_rank_owns(rank, weight)) QE_TRY(place_weight(rank, weight, error_out));
    qe_rank_list_folded(rank);
    return QE_OK;
}

static void release_weight(qe_rank *rank, uint32_t weight) {
    qe_weight_place *place = &rank->places[weight];
    void *parts[] = {place->master,        place->grad,           place->cache_codes,   place->cache_scale_inv,
                     place->cache_operand, rank->moment1[weight], rank->moment2[weight]};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) qe_rank_free(rank, parts[i]);
}

void qe_rank_release(qe_rank *rank) {
    int complete = rank->places && rank->moment1 && rank->moment2;
    for (uint32_t weight = 0; complete && weight < rank->team->plan->weight_count; weight++)
        release_weight(rank, weight);
    void *parts[] = {rank->constants, rank->workspace, rank->scales, rank->histories, rank->adamw};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) qe_rank_free(rank, parts[i]);
    for (uint32_t i = 0; i < rank->retired_count; i++) qe_rank_free(rank, rank->retired[i]);
    for (int kind = 0; kind < QE_MEMORY_KINDS; kind++) {
        void *memory = rank->arenas[kind].memory;
        rank->arenas[kind] = (qe_arena){NULL, 0, 0};
        qe_rank_free(rank, memory);
    }
    free(rank->retired);
    free(rank->places);
    free(rank->moment1);
    free(rank->moment2);
    free(rank->folded);
    free(rank->folded_begin);
    free(rank->values);
    free(rank->gathered);
}
