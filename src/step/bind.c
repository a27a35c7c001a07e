/* bind.c - gives every op of a plan its addresses. Units are lowered again with the frames they were planned with,
 * so op number and order are the plan's; nothing is allocated or looked up afterwards. */
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "step/guard.h"

typedef struct bind_sink {
    qe_binding *binding;
    uint32_t next, end;
} bind_sink;

static qe_status sink_op(void *context, const qe_op *op, const qe_effect *effects, uint32_t count) {
    bind_sink *sink = context;
    (void)effects;
    (void)count;
    QE_ASSERT(sink->next < sink->end);
    sink->binding->ops[sink->next++] = *op;
    return QE_OK;
}

static char *slot_address(const qe_binding *binding, const qe_unit *unit, qe_slot_kind kind) {
    uint32_t stage;
    qe_slot_kind resolved;
    if (unit->slot[kind] == QE_NONE) return NULL;
    qe_plan_resolve_slot(binding->plan, unit->stage, kind, &stage, &resolved);
    const qe_pool *pool = qe_rank_plan_pool(binding->rank_plan, stage, resolved);
    QE_ASSERT(pool != NULL);
    QE_ASSERT(unit->slot[kind] < pool->count);
    return binding->regions[pool->regions[unit->slot[kind]]];
}

uint64_t *qe_binding_slot_witness(const qe_binding *binding, const qe_unit *unit, qe_slot_kind kind) {
    char *slot = slot_address(binding, unit, kind);
    if (slot == NULL) return NULL;
    uint32_t stage;
    qe_slot_kind resolved;
    qe_plan_resolve_slot(binding->plan, unit->stage, kind, &stage, &resolved);
    const qe_pool *pool = qe_rank_plan_pool(binding->rank_plan, stage, resolved);
    uint64_t bytes = binding->rank_plan->regions[pool->regions[unit->slot[kind]]].bytes;
    return (uint64_t *)(void *)(slot + bytes - QE_ALIGN_BYTES);
}

static qe_frame frame_of(const qe_rank *rank, const qe_binding *binding, const qe_unit *unit) {
    const qe_plan *plan = binding->plan;
    uint64_t tokens = plan->model_ops->tokens(plan->model);
    qe_frame frame = {.stage = unit->stage,
                      .stages = plan->stages,
                      .microbatch = unit->microbatch,
                      .training = !plan->options.forward_only,
                      .set = unit->set,
                      .weights = binding->places,
                      .constants = rank->constants,
                      .work = binding->work,
                      .workspace = rank->workspace};
    qe_plan_frame_objects(plan, binding->rank_plan, unit, &frame);
    frame.gradient_scale = (float)(1.0 / ((double)tokens * plan->microbatches));
    for (int kind = 0; kind < QE_SLOT_KINDS; kind++)
        frame.slot[kind].at = slot_address(binding, unit, (qe_slot_kind)kind);
    if (unit->microbatch == QE_NONE) return frame;
    frame.tokens = binding->tokens + 2 * tokens * unit->microbatch;
    frame.targets = frame.tokens + tokens;
    frame.loss = binding->loss + unit->microbatch;
    return frame;
}

static qe_status bind_lowered(qe_rank *rank, qe_binding *binding, const qe_unit *unit, qe_phase phase) {
    qe_frame frame = frame_of(rank, binding, unit);
    bind_sink sink = {
        .binding = binding, .next = unit->first_op + unit->stamped, .end = unit->first_op + unit->op_count};
    qe_sink target = {.context = &sink, .op = sink_op};
    QE_TRY(binding->plan->model_ops->lower(binding->plan->model, &frame, phase, &target));
    QE_ASSERT(sink.next + unit->tally_count == sink.end); /* bind_tallies sees to those */
    return QE_OK;
}

/* What counts a unit's deposits: which words, its effect says. */
static void bind_tallies(qe_binding *binding) {
    const qe_rank_plan *plan = binding->rank_plan;
    for (uint32_t i = 0; i < plan->program.item_count; i++) {
        const qe_item *item = &plan->program.items[i];
        if (item->kind != QE_ITEM_OP) continue;
        const qe_unit *unit = &plan->units[plan->item_unit[i]];
        if (plan->item_op[i] + unit->tally_count < unit->first_op + unit->op_count) continue;
        const qe_effect *effect = &plan->program.effects[item->first_effect];
        qe_op *op = &binding->ops[plan->item_op[i]];
        QE_ASSERT(effect->object == plan->deposits_object);
        *op = (qe_op){.kind = QE_OP_TALLY, .layer = op[-1].layer};
        op->args.tally = (qe_args_tally){.words = binding->deposits + effect->begin / sizeof(uint64_t),
                                         .count = (uint32_t)((effect->end - effect->begin) / sizeof(uint64_t))};
    }
}

static qe_status bind_transfer(qe_rank *rank, qe_binding *binding, const qe_unit *unit, qe_error *error_out) {
    int incoming = unit->kind == QE_UNIT_RECV_F || unit->kind == QE_UNIT_RECV_B;
    int backward = unit->kind == QE_UNIT_SEND_B || unit->kind == QE_UNIT_RECV_B;
    qe_slot_kind kind =
        backward ? (incoming ? QE_SLOT_IN_B : QE_SLOT_OUT_B) : (incoming ? QE_SLOT_IN_F : QE_SLOT_OUT_F);
    const qe_team_options *options = &rank->team->options;
    uint32_t from = incoming ? unit->peer : rank->index, to = incoming ? rank->index : unit->peer;
    qe_channel *channel;
    QE_TRY(options->comm->channel_open(options->world, from, to, (uint32_t)backward, &channel, error_out));
    qe_op *op = &binding->ops[unit->first_op + unit->stamped];
    op->kind = incoming ? QE_OP_RECV : QE_OP_SEND;
    op->args.transfer = (qe_args_transfer){.channel = channel, .bytes_at = slot_address(binding, unit, kind)};
    op->args.transfer.bytes =
        binding->plan->model_ops->slot_bytes(binding->plan->model, unit->stage, binding->plan->stages, kind);
    return QE_OK;
}

static uint64_t weight_values(const qe_plan *plan, uint32_t weight) {
    const qe_weight_info *info = plan->model_ops->weight(plan->model, weight);
    return (uint64_t)info->rows * info->columns;
}

static void bind_copy(qe_binding *binding, const qe_unit *unit, void *to, const void *from, uint64_t bytes) {
    binding->ops[unit->first_op] = (qe_op){.kind = QE_OP_COPY};
    binding->ops[unit->first_op].args.copy = (qe_args_copy){.from = from, .to = to, .bytes = bytes};
}

static void bind_add(qe_binding *binding, const qe_rank *rank, const qe_unit *unit) {
    qe_op *op = &binding->ops[unit->first_op];
    *op = (qe_op){.kind = QE_OP_ACCUMULATE};
    op->args.accumulate = (qe_args_accumulate){.from = binding->places[unit->weight].grad,
                                               .to = rank->places[unit->weight].grad,
                                               .count = weight_values(binding->plan, unit->weight)};
}

/* The beginning of the compute stream's scratch, where sums are made apart first. */
static double *norm_partials(const qe_rank *rank, const qe_binding *binding) {
    if (rank->team->options.backend->numerics.operands != QE_OPERANDS_CODES) return NULL;
    return (double *)(void *)binding->work;
}

static void bind_take(qe_binding *binding, const qe_rank *rank, const qe_unit *unit) {
    qe_op *op = &binding->ops[unit->first_op];
    *op = (qe_op){.kind = QE_OP_GRAD_NORM};
    op->args.grad_norm = (qe_args_grad_norm){.grad = rank->places[unit->weight].grad,
                                             .sum = &binding->norms[unit->weight],
                                             .partials = norm_partials(rank, binding),
                                             .count = weight_values(binding->plan, unit->weight)};
}

/* Under `observe` work goes on whatever a guard saw. */
static const qe_guard_fault *vetoing_fault(const qe_rank *rank, const qe_binding *binding) {
    return rank->team->options.contracts == QE_CONTRACTS_TRAP ? binding->fault : NULL;
}

/* The commit quantizes what the next step's fill would. */
static qe_status sink_ahead(void *context, const qe_op *op, const qe_effect *effects, uint32_t count) {
    qe_args_adamw *adamw = context;
    const qe_args_quantize_weight *fill = &op->args.quantize_weight;
    (void)effects;
    (void)count;
    QE_ASSERT(op->kind == QE_OP_QUANTIZE_WEIGHT && fill->w == adamw->weight);
    adamw->rows = fill->rows;
    adamw->columns = fill->columns;
    adamw->target = fill->target;
    adamw->scale_epoch = fill->scale_epoch;
    adamw->key = fill->key;
    return QE_OK;
}

static qe_status bind_commit(qe_binding *binding, const qe_rank *rank, const qe_unit *unit) {
    const qe_plan *plan = binding->plan;
    qe_op *op = &binding->ops[unit->first_op];
    *op = (qe_op){.kind = QE_OP_ADAMW};
    op->args.adamw = (qe_args_adamw){
        .weight = rank->places[unit->weight].master,
        .grad = rank->places[unit->weight].grad,
        .moment1 = rank->moment1[unit->weight],
        .moment2 = rank->moment2[unit->weight],
        .count = weight_values(plan, unit->weight),
        .step = rank->adamw,
        .witness = rank->places[unit->weight].witness,
        .fault = vetoing_fault(rank, binding),
        .decay = plan->model_ops->weight(plan->model, unit->weight)->decay,
    };
    if (!qe_plan_fills_ahead(plan, binding->rank_plan, unit->weight)) return QE_OK;
    qe_frame frame = {.stage = unit->stage, .stages = plan->stages, .training = 1, .weights = binding->places,
                      .ahead = 1, .ahead_weight = unit->weight};
    qe_sink sink = {.context = &op->args.adamw, .op = sink_ahead};
    return plan->model_ops->lower(plan->model, &frame, QE_PHASE_FILL, &sink);
}

static void bind_fold(qe_binding *binding, const qe_rank *rank, const qe_unit *unit) {
    qe_op *op = &binding->ops[unit->first_op];
    *op = (qe_op){.kind = QE_OP_FOLD};
    op->args.fold = (qe_args_fold){.states = rank->folded + rank->folded_begin[unit->weight],
                                   .count = unit->weight_count * QE_SCALE_ROLES,
                                   .recipe = binding->plan->model_ops->recipe(binding->plan->model),
                                   .fault = vetoing_fault(rank, binding)};
}

static void bind_own(qe_rank *rank, qe_binding *binding, const qe_unit *unit) {
    const qe_plan *plan = binding->plan;
    uint64_t tokens = 2ull * plan->model_ops->tokens(plan->model) * sizeof(int32_t) * plan->microbatches;
    uint64_t grad = unit->weight == QE_NONE ? 0 : weight_values(plan, unit->weight) * sizeof(float);
    switch ((qe_unit_kind)unit->kind) {
        case QE_UNIT_LOAD: bind_copy(binding, unit, binding->tokens, binding->staging, tokens); break;
        case QE_UNIT_READ:
            bind_copy(binding, unit, binding->loss_host, binding->loss, plan->microbatches * sizeof(double));
            break;
        case QE_UNIT_GRAD_IN:
            bind_copy(binding, unit, binding->places[unit->weight].grad, rank->places[unit->weight].grad, grad);
            break;
        case QE_UNIT_GRAD_OUT:
            if (!unit->set && qe_plan_adds_apart(plan, unit->weight)) {
                bind_add(binding, rank, unit);
                break;
            }
            bind_copy(binding, unit, rank->places[unit->weight].grad, binding->places[unit->weight].grad, grad);
            break;
        case QE_UNIT_TAKE: bind_take(binding, rank, unit); break;
        case QE_UNIT_FOLD: bind_fold(binding, rank, unit); break;
        default: QE_ASSERT(0 && "a unit of the plan's own");
    }
}

/* The witness word lies in the last line of a slot: a write that runs over the slot's end meets it first. */
static void bind_stamp(qe_binding *binding, const qe_unit *unit) {
    static const qe_slot_kind acquired[][QE_STAMP_MAX] = {
        [QE_UNIT_F] = {QE_SLOT_I, QE_SLOT_X, QE_SLOT_OUT_F, QE_SLOT_KINDS},
        [QE_UNIT_I] = {QE_SLOT_Y, QE_SLOT_OUT_B, QE_SLOT_KINDS},
        [QE_UNIT_RECV_F] = {QE_SLOT_IN_F, QE_SLOT_KINDS},
        [QE_UNIT_RECV_B] = {QE_SLOT_IN_B, QE_SLOT_KINDS},
    };
    qe_op *op = &binding->ops[unit->first_op];
    *op = (qe_op){.kind = QE_OP_STAMP};
    for (int i = 0; acquired[unit->kind][i] != QE_SLOT_KINDS; i++) {
        uint64_t *word = qe_binding_slot_witness(binding, unit, acquired[unit->kind][i]);
        if (word != NULL) op->args.stamp.words[op->args.stamp.count++] = word;
    }
    QE_ASSERT(op->args.stamp.count > 0);
}

static qe_status bind_unit(qe_rank *rank, qe_binding *binding, const qe_unit *unit, qe_error *error_out) {
    if (unit->stamped) bind_stamp(binding, unit);
    switch ((qe_unit_kind)unit->kind) {
        case QE_UNIT_FILL: return bind_lowered(rank, binding, unit, QE_PHASE_FILL);
        case QE_UNIT_F: return bind_lowered(rank, binding, unit, QE_PHASE_F);
        case QE_UNIT_I: return bind_lowered(rank, binding, unit, QE_PHASE_I);
        case QE_UNIT_W: return bind_lowered(rank, binding, unit, QE_PHASE_W);
        case QE_UNIT_SEND_F:
        case QE_UNIT_RECV_F:
        case QE_UNIT_SEND_B:
        case QE_UNIT_RECV_B: return bind_transfer(rank, binding, unit, error_out);
        case QE_UNIT_COMMIT: return bind_commit(binding, rank, unit);
        default: bind_own(rank, binding, unit); return QE_OK;
    }
}

/* A weight's addresses are the rank's, its objects this plan's. Scratch of this binding stays. */
static void take_place(const qe_rank *rank, qe_binding *binding, uint32_t weight) {
    qe_weight_place *place = &binding->places[weight];
    const qe_weight_place *planned = &binding->rank_plan->places[weight];
    int in_scratch = binding->grad_scratch != NULL && qe_rank_owns(rank, weight);
    float *grad = in_scratch ? place->grad : rank->places[weight].grad;
    *place = rank->places[weight];
    place->grad = grad;
    place->weight_object = planned->weight_object;
    place->grad_object = planned->grad_object;
    place->cache_object = planned->cache_object;
    memcpy(place->scale_object, planned->scale_object, sizeof place->scale_object);
}

/* Under placement copy gradients are accumulated in scratch. */
static qe_status bind_places(qe_rank *rank, qe_binding *binding, qe_error *error_out) {
    const qe_plan *plan = binding->plan;
    binding->places = malloc(plan->weight_count * sizeof *binding->places);
    if (binding->places == NULL)
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for %u weights", plan->weight_count);
    uint64_t scratch_bytes = 0;
    for (uint32_t weight = 0; weight < plan->weight_count; weight++) {
        take_place(rank, binding, weight);
        if (qe_rank_owns(rank, weight)) scratch_bytes += weight_values(plan, weight) * sizeof(float);
    }
    if (plan->options.placement != QE_GRADIENT_COPY || plan->options.forward_only) return QE_OK;
    binding->grad_scratch = qe_rank_alloc(rank, QE_MEMORY_WORKSPACE, scratch_bytes, error_out);
    if (binding->grad_scratch == NULL) return QE_ERROR_MEMORY;
    binding->scratch_bytes += scratch_bytes;
    float *next = (float *)(void *)binding->grad_scratch;
    for (uint32_t weight = 0; weight < plan->weight_count; weight++) {
        if (!qe_rank_owns(rank, weight)) continue;
        binding->places[weight].grad = next;
        next += weight_values(plan, weight);
    }
    return QE_OK;
}

/* One piece of memory for all regions of a kind. */
static qe_status allocate_regions(qe_rank *rank, qe_binding *binding, qe_error *error_out) {
    const qe_rank_plan *rank_plan = binding->rank_plan;
    uint64_t bytes[QE_SLOT_KINDS] = {0}, placed[QE_SLOT_KINDS] = {0};
    binding->regions = calloc(rank_plan->region_count + 1u, sizeof *binding->regions);
    if (binding->regions == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for slots");
    for (uint32_t r = 0; r < rank_plan->region_count; r++)
        bytes[rank_plan->regions[r].kind] += rank_plan->regions[r].bytes;
    for (int kind = 0; kind < QE_SLOT_KINDS; kind++) {
        qe_memory_kind counted = qe_memory_kind_of_slot((qe_slot_kind)kind);
        binding->slot_memory[kind] = qe_rank_alloc(rank, counted, bytes[kind], error_out);
        if (bytes[kind] > 0 && binding->slot_memory[kind] == NULL) return QE_ERROR_MEMORY;
        binding->slot_bytes += bytes[kind];
    }
    for (uint32_t r = 0; r < rank_plan->region_count; r++) {
        const qe_region *region = &rank_plan->regions[r];
        binding->regions[r] = binding->slot_memory[region->kind] + placed[region->kind];
        placed[region->kind] += region->bytes;
    }
    return QE_OK;
}

static qe_status allocate_buffers(qe_rank *rank, qe_binding *binding, qe_error *error_out) {
    const qe_plan *plan = binding->plan;
    uint64_t tokens = 2ull * plan->model_ops->tokens(plan->model) * sizeof(int32_t) * plan->microbatches;
    uint64_t losses = plan->microbatches * sizeof(double), work = plan->model_ops->work_bytes(plan->model);
    binding->work = qe_rank_alloc(rank, QE_MEMORY_WORKSPACE, work, error_out);
    binding->tokens = qe_rank_alloc(rank, QE_MEMORY_WORKSPACE, tokens, error_out);
    binding->staging = qe_rank_host_alloc(rank, tokens, error_out);
    binding->loss = qe_rank_alloc(rank, QE_MEMORY_WORKSPACE, losses, error_out);
    binding->loss_host = qe_rank_host_alloc(rank, losses, error_out);
    binding->norms = qe_rank_alloc(rank, QE_MEMORY_WORKSPACE, plan->weight_count * sizeof(double), error_out);
    binding->deposits = qe_rank_alloc(rank, QE_MEMORY_WORKSPACE,
                                      (binding->rank_plan->tally_count + 1u) * sizeof(uint64_t), error_out);
    binding->scratch_bytes += work + 2 * tokens + 2 * losses;
    if (!binding->work || !binding->tokens || !binding->staging || !binding->loss || !binding->loss_host ||
        !binding->norms || !binding->deposits)
        return QE_ERROR_MEMORY;
    binding->ops = calloc(binding->rank_plan->op_count + 1, sizeof *binding->ops);
    if (binding->ops == NULL)
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for %u ops", binding->rank_plan->op_count);
    return allocate_regions(rank, binding, error_out);
}

static qe_status create_streams(qe_rank *rank, qe_binding *binding, qe_error *error_out) {
    const qe_stream_ops *ops = rank->team->options.backend->stream;
    const qe_program *program = &binding->rank_plan->program;
    binding->streams = calloc(program->stream_count + 1, sizeof *binding->streams);
    binding->events = calloc(program->event_count + 1, sizeof *binding->events);
    if (binding->streams == NULL || binding->events == NULL)
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for streams");
    for (uint32_t i = 0; i < program->stream_count; i++) {
        if (program->streams[i].role == QE_STREAM_HOST) continue;
        QE_TRY(ops->create(rank->device, program->streams[i].name, &binding->streams[i], error_out));
    }
    for (uint32_t i = 0; i < program->event_count; i++)
        QE_TRY(ops->event_create(rank->device, &binding->events[i], error_out));
    return QE_OK;
}

/* A device chooses algorithms now, so that nothing is chosen or allocated while work runs or is recorded. */
static qe_status prepare_ops(qe_rank *rank, const qe_binding *binding, qe_error *error_out) {
    for (uint32_t i = 0; i < binding->rank_plan->op_count; i++)
        QE_TRY(rank->team->options.backend->prepare(rank->device, &binding->ops[i], error_out));
    return QE_OK;
}

static qe_status bind_units(qe_rank *rank, qe_binding *binding, qe_error *error_out) {
    for (uint32_t i = 0; i < binding->rank_plan->unit_count; i++)
        QE_TRY(bind_unit(rank, binding, &binding->rank_plan->units[i], error_out));
    bind_tallies(binding);
    QE_TRY(prepare_ops(rank, binding, error_out));
    return qe_binding_declare(rank, binding, error_out);
}

qe_status qe_binding_rebind(qe_rank *rank, qe_binding *binding, qe_error *error_out) {
    if (binding->plan == NULL) return QE_OK;
    for (uint32_t weight = 0; weight < binding->plan->weight_count; weight++) take_place(rank, binding, weight);
    qe_guard_refresh(rank, binding);
    qe_rank_list_folded(rank);
    return bind_units(rank, binding, error_out);
}

qe_status qe_binding_create(qe_rank *rank, qe_binding *binding, const qe_plan *plan, qe_error *error_out) {
    memset(binding, 0, sizeof *binding);
    if (plan == NULL) return QE_OK;
    binding->plan = plan;
    binding->rank_plan = &plan->rank[rank->index];
    QE_TRY(bind_places(rank, binding, error_out));
    QE_TRY(allocate_buffers(rank, binding, error_out));
    QE_TRY(create_streams(rank, binding, error_out));
    QE_TRY(qe_guard_create(rank, binding, error_out));
    QE_TRY(bind_units(rank, binding, error_out));
    QE_TRY(qe_binding_capture(rank, binding, error_out));
    QE_TRY(qe_binding_add_graphs(binding, error_out));
    QE_TRY(qe_ledger_create(binding->program, &binding->ledger, error_out));
    qe_violations violations; /* the plan was certified before; this arms the certified way */
    QE_TRY(qe_ledger_certify(binding->ledger, &violations, error_out));
    if (rank->team->options.contracts == QE_CONTRACTS_OBSERVE) qe_ledger_observe(binding->ledger);
    return QE_OK;
}

void qe_binding_destroy(qe_rank *rank, qe_binding *binding) {
    if (binding->plan == NULL) return;
    qe_binding_uncapture(rank, binding);
    const qe_stream_ops *ops = rank->team->options.backend->stream;
    const qe_program *program = &binding->rank_plan->program;
    for (uint32_t i = 0; binding->streams != NULL && i < program->stream_count; i++)
        if (binding->streams[i] != NULL) ops->destroy(binding->streams[i]);
    for (uint32_t i = 0; binding->events != NULL && i < program->event_count; i++)
        if (binding->events[i] != NULL) ops->event_destroy(binding->events[i]);
    for (int kind = 0; kind < QE_SLOT_KINDS; kind++) qe_rank_free(rank, binding->slot_memory[kind]);
    void *buffers[] = {binding->work, binding->grad_scratch, binding->tokens, binding->loss, binding->norms,
                       binding->deposits};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) qe_rank_free(rank, buffers[i]);
    qe_rank_host_free(rank, binding->staging);
    qe_rank_host_free(rank, binding->loss_host);
    qe_ledger_destroy(binding->ledger);
    qe_program_deinit(&binding->sealed_program);
    qe_guard_destroy(rank, binding);
    free(binding->streams);
    free(binding->events);
    free(binding->regions);
    free(binding->places);
    free(binding->ops);
    memset(binding, 0, sizeof *binding);
}
