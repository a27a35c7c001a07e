/* ledger_memory.c - bytes by kind before anything is taken: the sizes that memory.c and bind.c ask for, from plans. */
#include "qeffect/memory.h"

#include "base/assert.h"
#include "step/team.h"

const char *qe_memory_kind_name(qe_memory_kind kind) {
    static const char *const names[QE_MEMORY_KINDS] = {
        [QE_MEMORY_MASTERS] = "masters", [QE_MEMORY_MOMENTS] = "moments", [QE_MEMORY_GRADIENTS] = "gradients",
        [QE_MEMORY_CACHES] = "caches", [QE_MEMORY_SCALES] = "scales", [QE_MEMORY_SLOTS_I] = "slots_i",
        [QE_MEMORY_SLOTS_W] = "slots_w", [QE_MEMORY_BOUNDARY] = "boundary", [QE_MEMORY_WORKSPACE] = "workspace",
        [QE_MEMORY_SNAPSHOT] = "snapshot", [QE_MEMORY_GRAPHS] = "graphs",
    };
    QE_ASSERT(kind < QE_MEMORY_KINDS);
    return names[kind];
}

uint64_t qe_memory_ledger_total(const qe_memory_ledger *ledger) {
    uint64_t total = 0;
    for (int kind = 0; kind < QE_MEMORY_KINDS; kind++) total += ledger->bytes[kind];
    return total;
}

qe_memory_kind qe_memory_kind_of_slot(qe_slot_kind kind) {
    switch (kind) {
        case QE_SLOT_I: return QE_MEMORY_SLOTS_I;
        case QE_SLOT_X:
        case QE_SLOT_Y: return QE_MEMORY_SLOTS_W;
        default: return QE_MEMORY_BOUNDARY;
    }
}

uint64_t qe_memory_piece_bytes(uint64_t bytes) {
    return (bytes + QE_PIECE_BYTES - 1) / QE_PIECE_BYTES * QE_PIECE_BYTES;
}

static void add_weight(const qe_plan *plan, uint32_t weight, qe_memory_ledger *ledger) {
    const qe_model_ops *ops = plan->model_ops;
    const qe_weight_info *info = ops->weight(plan->model, weight);
    uint64_t bytes = (uint64_t)info->rows * info->columns * sizeof(float);
    ledger->bytes[QE_MEMORY_MASTERS] += qe_memory_piece_bytes(qe_rank_master_bytes(bytes));
    if (!plan->options.forward_only) {
        ledger->bytes[QE_MEMORY_GRADIENTS] += qe_memory_piece_bytes(bytes);
        ledger->bytes[QE_MEMORY_MOMENTS] += 2 * qe_memory_piece_bytes(bytes);
    }
    if (!info->quantized) return;
    uint64_t operand = qe_rank_master_bytes(ops->cache_operand_bytes(plan->model, weight));
    uint64_t scales = ops->cache_scale_count(plan->model, weight) * sizeof(float);
    ledger->bytes[QE_MEMORY_CACHES] += qe_memory_piece_bytes(operand) + qe_memory_piece_bytes(scales) +
                                       qe_memory_piece_bytes(ops->cache_code_bytes(plan->model, weight));
}

void qe_memory_add_rank(const qe_plan *plan, uint32_t rank, qe_memory_ledger *ledger) {
    const qe_model_ops *ops = plan->model_ops;
    const qe_recipe *recipe = ops->recipe(plan->model);
    for (uint32_t weight = 0; weight < plan->weight_count; weight++)
        if (plan->stage_rank[ops->weight_stage(plan->model, weight, plan->stages)] == rank)
            add_weight(plan, weight, ledger);
    ledger->bytes[QE_MEMORY_WORKSPACE] +=
        ops->constant_bytes(plan->model) + ops->workspace_bytes(plan->model) + sizeof(qe_adamw);
    if (recipe->kind == QE_RECIPE_DELAYED)
        ledger->bytes[QE_MEMORY_SCALES] += (uint64_t)plan->weight_count * QE_SCALE_ROLES *
                                           (sizeof(qe_scale_state) + recipe->history_length * sizeof(float));
}

/* What a plan's binding takes. */
static void add_binding(const qe_plan *plan, uint32_t rank, qe_memory_ledger *ledger) {
    const qe_model_ops *ops = plan->model_ops;
    const qe_rank_plan *out = &plan->rank[rank];
    uint64_t *workspace = &ledger->bytes[QE_MEMORY_WORKSPACE];
    for (uint32_t r = 0; r < out->region_count; r++)
        ledger->bytes[qe_memory_kind_of_slot((qe_slot_kind)out->regions[r].kind)] += out->regions[r].bytes;
    *workspace += ops->work_bytes(plan->model);
    *workspace += 2ull * ops->tokens(plan->model) * sizeof(int32_t) * plan->microbatches; /* tokens and targets */
    *workspace += plan->microbatches * sizeof(double) + plan->weight_count * sizeof(double); /* losses, norms */
    *workspace += (out->tally_count + 1u) * sizeof(uint64_t);
    if (plan->options.placement != QE_GRADIENT_COPY || plan->options.forward_only) return;
    for (uint32_t weight = 0; weight < plan->weight_count; weight++) {
        const qe_weight_info *info = ops->weight(plan->model, weight);
        if (plan->stage_rank[ops->weight_stage(plan->model, weight, plan->stages)] == rank)
            *workspace += (uint64_t)info->rows * info->columns * sizeof(float);
    }
}

qe_memory_ledger qe_memory_foretell(const qe_plan *train, const qe_plan *evaluate, uint32_t rank) {
    qe_memory_ledger ledger = {{0}};
    QE_ASSERT(train != NULL || evaluate != NULL);
    qe_memory_add_rank(train != NULL ? train : evaluate, rank, &ledger);
    if (train != NULL) add_binding(train, rank, &ledger);
    if (evaluate != NULL) add_binding(evaluate, rank, &ledger);
    return ledger;
}

static qe_status refuse(const qe_memory_ledger *l, uint32_t rank, uint64_t limit_bytes, qe_error *error_out) {
    const uint64_t *b = l->bytes;
    uint64_t state = b[QE_MEMORY_MASTERS] + b[QE_MEMORY_MOMENTS] + b[QE_MEMORY_GRADIENTS] + b[QE_MEMORY_CACHES];
    uint64_t slots = b[QE_MEMORY_SLOTS_I] + b[QE_MEMORY_SLOTS_W] + b[QE_MEMORY_BOUNDARY];
    uint64_t total = qe_memory_ledger_total(l);
    const char *remedy = state >= limit_bytes ? "spread the weights over more ranks, or use a smaller model"
                         : slots >= total - limit_bytes
                             ? "use a schedule that keeps fewer microbatches live (1f1b, v-half, v-min, auto), fewer "
                               "or shorter sequences in a microbatch, or more ranks"
                             : "use fewer or shorter sequences in a microbatch";
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, remedy,
                        "rank %u needs %llu bytes, the limit is %llu: masters %llu, moments %llu, gradients %llu, "
                        "caches %llu, slots for I %llu, slots for W %llu, boundary %llu, workspace %llu",
                        rank, (unsigned long long)total, (unsigned long long)limit_bytes,
                        (unsigned long long)b[QE_MEMORY_MASTERS], (unsigned long long)b[QE_MEMORY_MOMENTS],
                        (unsigned long long)b[QE_MEMORY_GRADIENTS], (unsigned long long)b[QE_MEMORY_CACHES],
                        (unsigned long long)b[QE_MEMORY_SLOTS_I], (unsigned long long)b[QE_MEMORY_SLOTS_W],
                        (unsigned long long)b[QE_MEMORY_BOUNDARY], (unsigned long long)b[QE_MEMORY_WORKSPACE]);
}

qe_status qe_memory_check(const qe_plan *train, const qe_plan *evaluate, uint64_t limit_bytes, qe_error *error_out) {
    uint32_t ranks = train != NULL ? train->ranks : evaluate->ranks, most = 0;
    qe_memory_ledger worst = qe_memory_foretell(train, evaluate, 0);
    for (uint32_t rank = 1; rank < ranks; rank++) {
        qe_memory_ledger ledger = qe_memory_foretell(train, evaluate, rank);
        if (qe_memory_ledger_total(&ledger) <= qe_memory_ledger_total(&worst)) continue;
        worst = ledger;
        most = rank;
    }
    return qe_memory_ledger_total(&worst) <= limit_bytes ? QE_OK : refuse(&worst, most, limit_bytes, error_out);
}
