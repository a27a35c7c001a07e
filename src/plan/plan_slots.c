/* plan_slots.c - hands out slots in program order. A pool grows to the peak of live microbatches and no further. What
 * lives and dies on the compute stream (slots I, X, Y) may lie where a slot of another kind or stage lay before: the
 * order of the program is the order of that stream. Slots of transfers share among the stages of a rank, kind by kind:
 * one that came free before a transfer was posted makes it wait for no more than a slot of its own stage would. */
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
    state->slot_of = malloc(plan->microbatches * sizeof *state->slot_of);
    build->out->pool_count++;
    if (state->slot_of == NULL)
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
    for (uint32_t i = 0; i < build->out->pool_count; i++) free(build->pool_states[i].slot_of);
    free(build->region_states);
}

static uint32_t pool_index(const qe_build *build, const qe_unit *unit, qe_slot_kind kind) {
    uint32_t stage;
    qe_slot_kind resolved;
    qe_plan_resolve_slot(build->plan, unit->stage, kind, &stage, &resolved);
    const qe_pool *pool = qe_rank_plan_pool(build->out, stage, resolved);
    return pool == NULL ? QE_NONE : (uint32_t)(pool - build->out->pools);
}

static int on_compute(uint8_t kind) {
    return kind == QE_SLOT_I || kind == QE_SLOT_X || kind == QE_SLOT_Y;
}

static int is_outgoing(const qe_pool *pool) {
    return pool->kind == QE_SLOT_OUT_F || pool->kind == QE_SLOT_OUT_B;
}

static int is_free(const qe_build *build, uint32_t region) {
    return !build->region_states[region].live && !build->region_states[region].deferred;
}

static uint32_t free_slot(const qe_build *build, uint32_t index) {
    const qe_pool *pool = &build->out->pools[index];
    int fresh = !build->plan->options.reuse_slots || (build->unbounded_sends && is_outgoing(pool));
    for (uint32_t slot = 0; !fresh && slot < pool->count; slot++)
        if (is_free(build, pool->regions[slot])) return slot;
    return pool->count;
}

static int may_share(const qe_build *build, const qe_pool *pool, const qe_region *region) {
    if (build->sharing == QE_SHARING_NONE || !build->plan->options.reuse_slots) return 0;
    if (!on_compute(pool->kind)) return build->shares_boundary && pool->kind == region->kind;
    if (!on_compute(region->kind)) return 0;
    return build->sharing == QE_SHARING_ALL || pool->kind == region->kind;
}

/* The smallest memory that is free and large enough; QE_NONE: there is none. */
static uint32_t idle_region(const qe_build *build, const qe_pool *pool) {
    uint32_t best = QE_NONE;
    for (uint32_t r = 0; r < build->out->region_count; r++) {
        const qe_region *region = &build->out->regions[r];
        if (!is_free(build, r) || region->bytes < pool->slot_bytes || !may_share(build, pool, region)) continue;
        if (best == QE_NONE || region->bytes < build->out->regions[best].bytes) best = r;
    }
    return best;
}

static qe_status add_region(qe_build *build, const qe_pool *pool, uint32_t *index_out) {
    qe_rank_plan *out = build->out;
    qe_object object = {.kind = QE_OBJECT_SLOT, .weight = QE_NONE, .scale = QE_NONE};
    uint32_t count = out->region_count;
    if (qe_build_grow((void **)&out->regions, count, &out->region_capacity, sizeof *out->regions) != 0 ||
        qe_build_grow((void **)&build->region_states, count, &build->region_state_capacity,
                      sizeof *build->region_states) != 0)
        return qe_error_set(build->error, QE_ERROR_MEMORY, "use fewer microbatches", "no memory for %u slots",
                            count + 1);
    out->regions[count] = (qe_region){.kind = pool->kind, .bytes = pool->slot_bytes};
    build->region_states[count] = (qe_region_state){0};
    snprintf(object.name, sizeof object.name, "%s.s%u.%u", kind_names[pool->kind], pool->stage, pool->count);
    QE_TRY(qe_program_add_object(&out->program, &object, &out->regions[count].object, build->error));
    *index_out = out->region_count++;
    return QE_OK;
}

/* Room for one more slot: there may be more than microbatches, where others lie in them meanwhile. */
static int grow_pool(qe_pool *pool) {
    uint32_t *objects = realloc(pool->objects, (pool->count + 1u) * sizeof *objects);
    if (objects != NULL) pool->objects = objects;
    uint32_t *regions = realloc(pool->regions, (pool->count + 1u) * sizeof *regions);
    if (regions != NULL) pool->regions = regions;
    return objects != NULL && regions != NULL;
}

static qe_status add_slot(qe_build *build, uint32_t index) {
    qe_pool *pool = &build->out->pools[index];
    uint32_t region = idle_region(build, pool);
    if (!grow_pool(pool))
        return qe_error_set(build->error, QE_ERROR_MEMORY, "use fewer microbatches", "no memory for %u slots of a pool",
                            pool->count + 1);
    if (region == QE_NONE) QE_TRY(add_region(build, pool, &region));
    pool->regions[pool->count] = region;
    pool->objects[pool->count++] = build->out->regions[region].object;
    return QE_OK;
}

static void count_live(qe_build *build, const qe_pool *pool, int begins) {
    if (!on_compute(pool->kind)) return;
    build->live_bytes = begins ? build->live_bytes + pool->slot_bytes : build->live_bytes - pool->slot_bytes;
    if (build->live_bytes > build->out->live_bytes) build->out->live_bytes = build->live_bytes;
}

qe_status qe_build_acquire(qe_build *build, qe_unit *unit, qe_slot_kind kind) {
    uint32_t index = pool_index(build, unit, kind);
    if (index == QE_NONE) return QE_OK;
    qe_pool_state *state = &build->pool_states[index];
    uint32_t slot = free_slot(build, index);
    if (slot == build->out->pools[index].count) QE_TRY(add_slot(build, index));
    qe_region_state *region = &build->region_states[build->out->pools[index].regions[slot]];
    QE_ASSERT(!region->live);
    QE_ASSERT(state->slot_of[unit->microbatch] == QE_NONE);
    region->live = 1;
    region->generation++;
    count_live(build, &build->out->pools[index], 1);
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
    unit->generation[kind] = build->region_states[build->out->pools[index].regions[slot]].generation;
}

static void defer(qe_build *build, qe_pool_state *state, uint32_t region) {
    if (state->deferred != QE_NONE) build->region_states[state->deferred].deferred = 0;
    build->region_states[region].deferred = 1;
    state->deferred = region;
}

void qe_build_release(qe_build *build, const qe_unit *unit, qe_slot_kind kind) {
    uint32_t index = pool_index(build, unit, kind);
    if (index == QE_NONE) return;
    qe_pool_state *state = &build->pool_states[index];
    uint32_t slot = state->slot_of[unit->microbatch];
    QE_ASSERT(slot != QE_NONE);
    build->region_states[build->out->pools[index].regions[slot]].live = 0;
    count_live(build, &build->out->pools[index], 0);
    state->slot_of[unit->microbatch] = QE_NONE;
    if (is_outgoing(&build->out->pools[index])) defer(build, state, build->out->pools[index].regions[slot]);
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
