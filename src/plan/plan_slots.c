/* plan_slots.c - hands out slots in program order. A pool grows to the peak of live microbatches and no further. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "plan/build.h"

static const char *const kind_names[QE_SLOT_KINDS] = {"I", "X", "Y", "in_f", "out_f", "in_b", "out_b"};

static int needed_for_evaluation(qe_slot_kind kind) {
    return kind == QE_SLOT_I || kind == QE_SLOT_X || kind == QE_SLOT_IN_F || kind == QE_SLOT_OUT_F;
}

/* Outgoing slots exist only where the neighbour is on another rank. */
static int pool_exists(const qe_plan *plan, uint32_t stage, qe_slot_kind kind) {
    if (plan->options.forward_only && !needed_for_evaluation(kind)) return 0;
    uint32_t owner;
    qe_slot_kind owner_kind;
    qe_plan_resolve_slot(plan, stage, kind, &owner, &owner_kind);
    return owner == stage && owner_kind == kind &&
           plan->model_ops->slot_bytes(plan->model, stage, plan->stages, kind) > 0;
}

static qe_status pool_init(qe_build *build, uint32_t stage, qe_slot_kind kind) {
    const qe_plan *plan = build->plan;
    uint32_t index = build->out->pool_count;
    qe_pool *pool = &build->out->pools[index];
    qe_pool_state *state = &build->pool_states[index];
    *pool = (qe_pool){.stage = (uint16_t)stage, .kind = (uint8_t)kind};
    pool->slot_bytes = plan->model_ops->slot_bytes(plan->model, stage, plan->stages, kind) + QE_ALIGN_BYTES;
    pool->objects = calloc(plan->microbatches, sizeof *pool->objects);
    state->live = calloc(plan->microbatches, sizeof *state->live);
    state->generation = calloc(plan->microbatches, sizeof *state->generation);
    state->slot_of = malloc(plan->microbatches * sizeof *state->slot_of);
    build->out->pool_count++;
    if (pool->objects == NULL || state->live == NULL || state->generation == NULL || state->slot_of == NULL)
        return qe_error_set(build->error, QE_ERROR_MEMORY, "use fewer microbatches",
                            "no memory for a slot pool of %u microbatches", plan->microbatches);
    memset(state->slot_of, 0xff, plan->microbatches * sizeof *state->slot_of);
    state->deferred = QE_NONE;
    return QE_OK;
}

qe_status qe_build_pools(qe_build *build) {
    const qe_plan *plan = build->plan;
    for (uint32_t stage = 0; stage < plan->stages; stage++) {
        if (plan->stage_rank[stage] != build->rank) continue;
        for (int kind = 0; kind < QE_SLOT_KINDS; kind++)
            if (pool_exists(plan, stage, (qe_slot_kind)kind)) QE_TRY(pool_init(build, stage, (qe_slot_kind)kind));
    }
    return QE_OK;
}

void qe_build_pools_deinit(qe_build *build) {
    for (uint32_t i = 0; i < build->out->pool_count; i++) {
        free(build->pool_states[i].live);
        free(build->pool_states[i].generation);
        free(build->pool_states[i].slot_of);
    }
}

static uint32_t pool_index(const qe_build *build, const qe_unit *unit, qe_slot_kind kind) {
    uint32_t stage;
    qe_slot_kind resolved;
    qe_plan_resolve_slot(build->plan, unit->stage, kind, &stage, &resolved);
    const qe_pool *pool = qe_rank_plan_pool(build->out, stage, resolved);
    return pool == NULL ? QE_NONE : (uint32_t)(pool - build->out->pools);
}

static int is_outgoing(const qe_pool *pool) {
    return pool->kind == QE_SLOT_OUT_F || pool->kind == QE_SLOT_OUT_B;
}

static uint32_t free_slot(const qe_build *build, uint32_t index) {
    const qe_pool *pool = &build->out->pools[index];
    const qe_pool_state *state = &build->pool_states[index];
    int fresh = !build->plan->options.reuse_slots || (build->unbounded_sends && is_outgoing(pool));
    for (uint32_t slot = 0; !fresh && slot < pool->count; slot++)
        if (!state->live[slot] && slot != state->deferred) return slot;
    return pool->count;
}

static qe_status add_slot(qe_build *build, uint32_t index) {
    qe_pool *pool = &build->out->pools[index];
    QE_ASSERT(pool->count < build->plan->microbatches);
    qe_object object = {.kind = QE_OBJECT_SLOT, .weight = QE_NONE, .scale = QE_NONE};
    snprintf(object.name, sizeof object.name, "%s.s%u.%u", kind_names[pool->kind], pool->stage, pool->count);
    QE_TRY(qe_program_add_object(&build->out->program, &object, &pool->objects[pool->count], build->error));
    pool->count++;
    return QE_OK;
}

qe_status qe_build_acquire(qe_build *build, qe_unit *unit, qe_slot_kind kind) {
    uint32_t index = pool_index(build, unit, kind);
    if (index == QE_NONE) return QE_OK;
    qe_pool_state *state = &build->pool_states[index];
    uint32_t slot = free_slot(build, index);
    if (slot == build->out->pools[index].count) QE_TRY(add_slot(build, index));
    QE_ASSERT(!state->live[slot]);
    QE_ASSERT(state->slot_of[unit->microbatch] == QE_NONE);
    state->live[slot] = 1;
    state->generation[slot]++;
    state->slot_of[unit->microbatch] = slot;
    qe_build_attach(build, unit, kind);
    return QE_OK;
}

void qe_build_attach(qe_build *build, qe_unit *unit, qe_slot_kind kind) {
    uint32_t index = pool_index(build, unit, kind);
    if (index == QE_NONE) return;
    const qe_pool_state *state = &build->pool_states[index];
    uint32_t slot = state->slot_of[unit->microbatch];
    if (slot == QE_NONE) return;
    unit->slot[kind] = slot;
    unit->generation[kind] = state->generation[slot];
}

void qe_build_release(qe_build *build, const qe_unit *unit, qe_slot_kind kind) {
    uint32_t index = pool_index(build, unit, kind);
    if (index == QE_NONE) return;
    qe_pool_state *state = &build->pool_states[index];
    uint32_t slot = state->slot_of[unit->microbatch];
    QE_ASSERT(slot != QE_NONE);
    state->live[slot] = 0;
    state->slot_of[unit->microbatch] = QE_NONE;
    if (is_outgoing(&build->out->pools[index])) state->deferred = slot;
}

qe_status qe_build_slot_effect(qe_build *build, const qe_unit *unit, qe_slot_kind kind, qe_effect_kind effect_kind,
                               int write, qe_effect *effect_out) {
    uint32_t index = pool_index(build, unit, kind);
    QE_ASSERT(index != QE_NONE);
    const qe_pool *pool = &build->out->pools[index];
    QE_ASSERT(unit->slot[kind] < pool->count);
    *effect_out = (qe_effect){
        .object = pool->objects[unit->slot[kind]],
        .kind = (uint8_t)effect_kind,
        .write = write != 0,
        .stage = pool->stage,
        .microbatch = unit->microbatch,
        .version = unit->generation[kind],
    };
    return QE_OK;
}
