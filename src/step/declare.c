/* declare.c - which bytes an op may touch, from what the program says it does: effects name objects, and only the
 * binding knows where an object lies. What no effect speaks of (the caller's own memory, tables that never change) is
 * added by the kind of unit. */
#include <stdlib.h>
#include "base/assert.h"
#include "step/guard.h"

/* An effect names a range or a handful: an optimizer step has seven. Each unit adds at most two. */
enum { RANGES_MAX = 7 * QE_EFFECTS_MAX + 2 };

typedef struct ranges {
    const qe_rank *rank;
    const qe_binding *binding;
    const char *object; /* of the effect that is looked at */
    qe_range range[RANGES_MAX];
    uint32_t count;
} ranges;

enum { READS = 1, WRITES = 2 };

static void add(ranges *all, const void *at, uint64_t bytes, int access, const char *part) {
    if (at == NULL || bytes == 0) return;
    QE_ASSERT(all->count < RANGES_MAX);
    all->range[all->count++] = (qe_range){.at = (void *)(uintptr_t)at,
                                          .bytes = bytes,
                                          .read = (access & READS) != 0,
                                          .write = (access & WRITES) != 0,
                                          .object = all->object,
                                          .part = part};
}

static uint64_t weight_bytes(const ranges *all, uint32_t weight) {
    const qe_plan *plan = all->binding->plan;
    const qe_weight_info *info = plan->model_ops->weight(plan->model, weight);
    return (uint64_t)info->rows * info->columns * sizeof(float);
}

/* The weight that an object belongs to: itself, its gradient, its cache or one of its scales (*role_out). */
static uint32_t weight_of(const ranges *all, uint32_t object, int *role_out) {
    for (uint32_t weight = 0; weight < all->binding->plan->weight_count; weight++) {
        const qe_weight_place *place = &all->binding->places[weight];
        if (place->weight_object == object || place->grad_object == object || place->cache_object == object)
            return weight;
        for (int role = 0; role < QE_SCALE_ROLES; role++)
            if (place->scale_object[role] == object) {
                *role_out = role;
                return weight;
            }
    }
    QE_ASSERT(0 && "an object of a weight of this rank");
    return QE_NONE;
}

/* Who acquires a slot moves its witness word; who borrows it, its bytes. */
static void add_slot(ranges *all, const qe_effect *effect) {
    const qe_rank_plan *plan = all->binding->rank_plan;
    for (uint32_t r = 0; r < plan->region_count; r++) {
        if (plan->regions[r].object != effect->object) continue;
        const char *at = all->binding->regions[r];
        uint64_t bytes = plan->regions[r].bytes - QE_ALIGN_BYTES;
        if (effect->kind == QE_EFFECT_SLOT_ACQUIRE)
            add(all, at + bytes, sizeof(uint64_t), READS | WRITES, "witness");
        else
            add(all, at, bytes, effect->write ? READS | WRITES : READS, NULL);
        return;
    }
    QE_ASSERT(0 && "a slot of this rank");
}

/* A guard that fired turns commits and folds into nothing. */
static void add_fault(ranges *all) {
    add(all, all->binding->fault, sizeof *all->binding->fault, READS, "guard fault");
}

static void add_scale(ranges *all, const qe_effect *effect) {
    int role = 0;
    uint32_t weight = weight_of(all, effect->object, &role);
    qe_scale_state *state = all->binding->places[weight].scale[role];
    const qe_plan *plan = all->binding->plan;
    uint32_t length = plan->model_ops->recipe(plan->model)->history_length;
    if (effect->kind == QE_EFFECT_SCALE_USE) add(all, &state->scale, sizeof state->scale, READS, "scale");
    if (effect->kind == QE_EFFECT_SCALE_RECORD) add(all, &state->amax, sizeof state->amax, READS | WRITES, "amax");
    if (effect->kind != QE_EFFECT_SCALE_FOLD) return;
    add(all, &state->scale, sizeof state->scale, READS | WRITES, "scale");
    add(all, &state->amax, sizeof state->amax, READS | WRITES, "amax");
    add(all, all->rank->histories + ((size_t)weight * QE_SCALE_ROLES + (size_t)role) * length, length * sizeof(float),
        READS | WRITES, "history");
    add(all, &state->history, sizeof state->history + sizeof state->history_length + sizeof state->format_max, READS,
        "scale");
    add(all, &state->epoch, sizeof state->epoch, READS | WRITES, "epoch");
    add_fault(all);
}

/* The key that a fill writes is what weight and scale say of themselves; a key that says it already is looked at. */
static void add_key(ranges *all, const qe_weight_place *place) {
    const qe_scale_state *state = place->scale[QE_SCALE_W];
    add(all, place->cache_key, QE_KEY_WORDS * sizeof *place->cache_key, READS | WRITES, "key");
    add(all, place->witness, sizeof *place->witness, READS, "weight's witness");
    if (state != NULL) add(all, &state->epoch, sizeof state->epoch, READS, "scale's epoch");
}

static void add_cache(ranges *all, const qe_effect *effect) {
    /* What a commit has filled stays as it is: a fill may leave every byte. */
    int role = 0, access = effect->kind == QE_EFFECT_CACHE_FILL ? READS | WRITES : READS;
    const qe_plan *plan = all->binding->plan;
    uint32_t weight = weight_of(all, effect->object, &role);
    const qe_weight_place *place = &all->binding->places[weight];
    if (effect->kind == QE_EFFECT_CACHE_FILL) add_key(all, place);
    if (effect->layouts & QE_LAYOUT_OPERAND)
        add(all, place->cache_operand, plan->model_ops->cache_operand_bytes(plan->model, weight), access, "operand");
    if (!(effect->layouts & QE_LAYOUT_CODES)) return;
    add(all, place->cache_codes, plan->model_ops->cache_code_bytes(plan->model, weight), access, "codes");
    add(all, place->cache_scale_inv, plan->model_ops->cache_scale_count(plan->model, weight) * sizeof(float), access,
        "scale_inv");
}

/* A commit is the optimizer's step: it reads the gradient that was taken before. */
static void add_weight(ranges *all, const qe_effect *effect) {
    int role = 0;
    uint32_t weight = weight_of(all, effect->object, &role);
    uint64_t bytes = weight_bytes(all, weight);
    const qe_weight_place *place = &all->rank->places[weight];
    switch ((qe_effect_kind)effect->kind) {
        case QE_EFFECT_WEIGHT_READ: add(all, place->master, bytes, READS, NULL); break;
        case QE_EFFECT_GRAD_TAKE: add(all, place->grad, bytes, READS, NULL); break;
        case QE_EFFECT_GRAD_DEPOSIT: /* where the binding accumulates: scratch under placement copy */
            add(all, all->binding->places[weight].grad, bytes, effect->write ? WRITES : READS | WRITES, NULL);
            break;
        default:
            add(all, place->master, bytes, READS | WRITES, NULL);
            add(all, place->grad, bytes, READS, "grad");
            add(all, all->rank->moment1[weight], bytes, READS | WRITES, "moment1");
            add(all, all->rank->moment2[weight], bytes, READS | WRITES, "moment2");
            add(all, all->rank->adamw, sizeof *all->rank->adamw, READS, "optimizer constants");
            add(all, place->witness, sizeof *place->witness, READS | WRITES, "witness");
            add_fault(all);
    }
}

/* One byte of the scratch object stands for a weight. */
static void add_scratch(ranges *all, const qe_effect *effect) {
    for (uint64_t weight = effect->begin; weight < effect->end; weight++)
        add(all, all->binding->places[weight].grad, weight_bytes(all, (uint32_t)weight),
            effect->kind == QE_EFFECT_BUFFER_WRITE ? READS | WRITES : READS, NULL);
}

/* What an op writes into the work area it may read there again. */
static void add_buffer(ranges *all, const qe_effect *effect) {
    const qe_binding *binding = all->binding;
    const qe_rank_plan *plan = binding->rank_plan;
    if (effect->object == plan->scratch_object) {
        add_scratch(all, effect);
        return;
    }
    int access = effect->kind == QE_EFFECT_BUFFER_READ ? READS : WRITES;
    int scratch = effect->object == plan->work_object || effect->object == plan->workspace_object;
    if (scratch || effect->object == plan->deposits_object) access |= READS;
    const char *base = effect->object == plan->work_object       ? binding->work
                       : effect->object == plan->workspace_object ? all->rank->workspace
                       : effect->object == plan->deposits_object ? (const char *)binding->deposits
                       : effect->object == plan->tokens_object ? (const char *)binding->tokens
                       : effect->object == plan->loss_object   ? (const char *)binding->loss
                                                               : (const char *)binding->norms;
    QE_ASSERT(effect->end <= plan->program.objects[effect->object].bytes);
    add(all, base + effect->begin, effect->end - effect->begin, access, NULL);
}

static void add_effect(ranges *all, const qe_effect *effect) {
    all->object = all->binding->rank_plan->program.objects[effect->object].name;
    switch ((qe_effect_kind)effect->kind) {
        case QE_EFFECT_SLOT_RELEASE: break; /* a counter of the ledger */
        case QE_EFFECT_SLOT_ACQUIRE:
        case QE_EFFECT_SLOT_BORROW: add_slot(all, effect); break;
        case QE_EFFECT_SCALE_USE:
        case QE_EFFECT_SCALE_RECORD:
        case QE_EFFECT_SCALE_FOLD: add_scale(all, effect); break;
        case QE_EFFECT_CACHE_FILL:
        case QE_EFFECT_CACHE_USE: add_cache(all, effect); break;
        case QE_EFFECT_BUFFER_READ:
        case QE_EFFECT_BUFFER_WRITE: add_buffer(all, effect); break;
        default: add_weight(all, effect);
    }
}

/* What no effect of the program names. */
static void add_unnamed(ranges *all, const qe_unit *unit) {
    const qe_binding *binding = all->binding;
    const qe_plan *plan = binding->plan;
    uint64_t tokens = 2ull * plan->model_ops->tokens(plan->model) * sizeof(int32_t) * plan->microbatches;
    all->object = "caller";
    switch ((qe_unit_kind)unit->kind) {
        case QE_UNIT_LOAD: add(all, binding->staging, tokens, READS, "batch"); break;
        case QE_UNIT_READ: add(all, binding->loss_host, plan->microbatches * sizeof(double), WRITES, "losses"); break;
        case QE_UNIT_GRAD_IN:
        case QE_UNIT_GRAD_OUT: /* the gradient where it lives; effects speak of the scratch */
            all->object = plan->model_ops->weight(plan->model, unit->weight)->name;
            add(all, all->rank->places[unit->weight].grad, weight_bytes(all, unit->weight),
                unit->kind == QE_UNIT_GRAD_IN                                  ? READS
                : !unit->set && qe_plan_adds_apart(plan, unit->weight) ? READS | WRITES
                                                                               : WRITES,
                "grad");
            break;
        case QE_UNIT_FILL:
        case QE_UNIT_F:
        case QE_UNIT_I:
        case QE_UNIT_W:
            all->object = "constants";
            add(all, all->rank->constants, plan->model_ops->constant_bytes(plan->model), READS, NULL);
            break;
        default: break;
    }
}

qe_status qe_binding_declare(qe_rank *rank, const qe_binding *binding, qe_error *error_out) {
    const qe_backend *backend = rank->team->options.backend;
    const qe_rank_plan *plan = binding->rank_plan;
    for (uint32_t i = 0; i < plan->program.item_count; i++) {
        const qe_item *item = &plan->program.items[i];
        if (item->kind != QE_ITEM_OP) continue;
        ranges all = {.rank = rank, .binding = binding, .count = 0};
        for (uint32_t e = 0; e < item->effect_count; e++)
            add_effect(&all, &plan->program.effects[item->first_effect + e]);
        add_unnamed(&all, &plan->units[plan->item_unit[i]]);
        QE_TRY(backend->declare(rank->device, &binding->ops[plan->item_op[i]], all.range, all.count, error_out));
    }
    return QE_OK;
}

qe_status qe_declare_guard(qe_rank *rank, const qe_op *op, const uint64_t *const *words, qe_error *error_out) {
    const qe_args_guard *guard = &op->args.guard;
    qe_status status = QE_ERROR_MEMORY;
    uint32_t count = 0;
    qe_range *all = calloc(guard->count + 4u, sizeof *all);
    if (all == NULL) return qe_error_set(error_out, status, NULL, "no memory to declare a guard");
    const qe_range fixed[] = {
        {.at = (void *)(uintptr_t)guard->words, .bytes = guard->count * sizeof *guard->words, .part = "words"},
        {.at = (void *)(uintptr_t)guard->expected, .bytes = guard->count * sizeof *guard->expected, .part = "expected"},
        {.at = (void *)(uintptr_t)guard->launch, .bytes = sizeof *guard->launch, .part = "launch"},
        {.at = guard->fault, .bytes = sizeof *guard->fault, .write = 1, .part = "fault"},
    };
    for (; count < sizeof fixed / sizeof *fixed; count++) all[count] = fixed[count];
    for (uint32_t i = 0; i < guard->count; i++)
        all[count++] = (qe_range){
            .at = (void *)(uintptr_t)words[i], .bytes = sizeof **words, .part = "witness"};
    for (uint32_t i = 0; i < count; i++) {
        all[i].read = 1;
        all[i].object = "guard";
    }
    status = rank->team->options.backend->declare(rank->device, op, all, count, error_out);
    free(all);
    return status;
}

qe_status qe_declare_arming(qe_rank *rank, const qe_op *op, qe_error *error_out) {
    const qe_args_copy *copy = &op->args.copy;
    const qe_range both[] = {
        {.at = (void *)(uintptr_t)copy->from, .bytes = copy->bytes, .read = 1, .object = "guard", .part = "armed"},
        {.at = copy->to, .bytes = copy->bytes, .write = 1, .object = "guard", .part = "expected"},
    };
    return rank->team->options.backend->declare(rank->device, op, both, 2, error_out);
}

void qe_declare_forget(qe_rank *rank, const qe_op *op) {
    qe_error ignored; /* forgetting needs nothing */
    (void)rank->team->options.backend->declare(rank->device, op, NULL, 0, &ignored);
}
