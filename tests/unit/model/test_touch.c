/* Declared is touched: every address range of every op of the model lies inside one thing that the op declares, with
 * the right to write it where it is written; nothing is declared that no op touches; what is read was written before;
 * no two places of a slot overlap; and only an op that says so names a microbatch. No op runs: its arguments are
 * enough. */
#include "step_world.h"

enum { REGION_GAP_BITS = 36, RANGES_MAX = 4096 };

/* Something that ops point into. Addresses are made up: each region has 64 GiB to itself. */
typedef enum region_kind {
    REGION_SLOT, REGION_WORK, REGION_TOKENS, REGION_LOSS, REGION_CONSTANTS, REGION_MASTER, REGION_GRAD, REGION_CODES,
    REGION_SCALES, REGION_OPERAND, REGION_SCALE
} region_kind;

typedef struct region {
    region_kind kind;
    uint64_t bytes;
    uint32_t object;
    uint8_t *written; /* [bytes]; slots and work */
} region;

typedef struct range {
    uint32_t region;
    uint64_t begin, end;
} range;

typedef struct lab {
    const qe_model *model;
    region regions[512];
    uint32_t region_count;
    qe_weight_place *places;
    range slot_ranges[RANGES_MAX]; /* all that was touched in slots */
    uint32_t slot_range_count;
    /* The op under judgement. */
    const qe_effect *effects;
    uint32_t effect_count;
    uint8_t used[QE_EFFECTS_MAX], used_write[QE_EFFECTS_MAX];
    const char *name;
    uint8_t per_microbatch;
    uint64_t ops;
} lab;

static void *add_region(lab *l, region_kind kind, uint64_t bytes, uint32_t object) {
    assert_true(l->region_count < sizeof l->regions / sizeof l->regions[0]);
    region *r = &l->regions[l->region_count++];
    *r = (region){.kind = kind, .bytes = bytes, .object = object};
    if (kind == REGION_SLOT || kind == REGION_WORK) {
        r->written = calloc(bytes + 1, 1);
        assert_non_null(r->written);
    }
    return (void *)((uintptr_t)l->region_count << REGION_GAP_BITS);
}

static range locate(const lab *l, const void *at, uint64_t bytes) {
    uintptr_t address = (uintptr_t)at;
    uint32_t index = (uint32_t)(address >> REGION_GAP_BITS);
    if (index == 0 || index > l->region_count) fail_msg("%s: an address that nobody gave out", l->name);
    range found = {.region = index - 1, .begin = address & (((uintptr_t)1 << REGION_GAP_BITS) - 1)};
    found.end = found.begin + bytes;
    if (found.end > l->regions[found.region].bytes)
        fail_msg("%s: bytes %llu to %llu of a region of %llu (kind %d)", l->name, (unsigned long long)found.begin,
                 (unsigned long long)found.end, (unsigned long long)l->regions[found.region].bytes,
                 l->regions[found.region].kind);
    return found;
}

/* Does the effect allow this access of this kind of region? */
static int allows(const qe_effect *effect, region_kind kind, const range *at, int write) {
    switch (kind) {
    case REGION_SLOT: return effect->kind == QE_EFFECT_SLOT_BORROW && (!write || effect->write);
    case REGION_WORK:
        return effect->kind == QE_EFFECT_BUFFER_WRITE && effect->begin <= at->begin && effect->end >= at->end;
    case REGION_TOKENS:
        return !write && effect->kind == QE_EFFECT_BUFFER_READ && effect->begin <= at->begin && effect->end >= at->end;
    case REGION_LOSS:
        return write && effect->kind == QE_EFFECT_BUFFER_WRITE && effect->begin <= at->begin && effect->end >= at->end;
    case REGION_MASTER: return !write && effect->kind == QE_EFFECT_WEIGHT_READ;
    case REGION_GRAD: return write && effect->kind == QE_EFFECT_GRAD_DEPOSIT;
    case REGION_CODES:
        return effect->kind == (write ? QE_EFFECT_CACHE_FILL : QE_EFFECT_CACHE_USE) &&
               (effect->layouts & QE_LAYOUT_CODES);
    case REGION_SCALES: return effect->kind == (write ? QE_EFFECT_CACHE_FILL : QE_EFFECT_CACHE_USE);
    case REGION_OPERAND:
        return effect->kind == (write ? QE_EFFECT_CACHE_FILL : QE_EFFECT_CACHE_USE) &&
               (effect->layouts & QE_LAYOUT_OPERAND);
    case REGION_SCALE: return effect->kind == (write ? QE_EFFECT_SCALE_RECORD : QE_EFFECT_SCALE_USE);
    case REGION_CONSTANTS: break;
    }
    return 0;
}

static void is_declared(lab *l, const range *at, int write) {
    const region *r = &l->regions[at->region];
    if (r->kind == REGION_CONSTANTS) {
        assert_false(write);
        return;
    }
    for (uint32_t i = 0; i < l->effect_count; i++) {
        if (l->effects[i].object != r->object || !allows(&l->effects[i], r->kind, at, write)) continue;
        l->used[i] = 1;
        l->used_write[i] |= (uint8_t)write;
        return;
    }
    fail_msg("%s %s what it did not declare (kind %d)", l->name, write ? "writes" : "reads", r->kind);
}

static void note_slot_range(lab *l, const range *at) {
    for (uint32_t i = 0; i < l->slot_range_count; i++) {
        const range *other = &l->slot_ranges[i];
        if (other->region != at->region || other->end <= at->begin || at->end <= other->begin) continue;
        if (other->begin != at->begin || other->end != at->end)
            fail_msg("%s: [%llu, %llu) overlaps [%llu, %llu) of the same slot", l->name,
                     (unsigned long long)at->begin, (unsigned long long)at->end, (unsigned long long)other->begin,
                     (unsigned long long)other->end);
        return;
    }
    assert_true(l->slot_range_count < RANGES_MAX);
    l->slot_ranges[l->slot_range_count++] = *at;
}

static void touch(lab *l, const void *at, uint64_t bytes, int write) {
    if (at == NULL || bytes == 0) return;
    range found = locate(l, at, bytes);
    is_declared(l, &found, write);
    region_kind kind = l->regions[found.region].kind;
    if (!l->per_microbatch && (kind == REGION_TOKENS || kind == REGION_LOSS))
        fail_msg("%s names a microbatch and does not say so", l->name);
    region *r = &l->regions[found.region];
    if (r->kind == REGION_SLOT || r->kind == REGION_WORK) assert_int_equal(found.begin % QE_ALIGN_BYTES, 0);
    if (r->kind == REGION_SLOT) note_slot_range(l, &found);
    if (r->written == NULL) return;
    if (write) memset(r->written + found.begin, 1, bytes);
    else if (memchr(r->written + found.begin, 0, bytes) != NULL)
        fail_msg("%s reads bytes that nothing wrote (kind %d)", l->name, r->kind);
}

static void reads(lab *l, const void *at, uint64_t count) { touch(l, at, count * 4, 0); }
static void writes(lab *l, const void *at, uint64_t count) { touch(l, at, count * 4, 1); }

/* Activations are as wide as the backend's. */
static uint64_t active(const lab *l, uint64_t count) {
    return count * qe_format_bytes((qe_format)qe_model_config_of(l->model)->numerics.activation);
}

static void reads_active(lab *l, const void *at, uint64_t count) { touch(l, at, active(l, count), 0); }
static void writes_active(lab *l, const void *at, uint64_t count) { touch(l, at, active(l, count), 1); }

static int takes_codes(const lab *l) { return qe_model_config_of(l->model)->numerics.operands == QE_OPERANDS_CODES; }

static uint64_t scale_count(const qe_qtensor *t) {
    uint64_t row_blocks = (t->rows + QE_BLOCK - 1) / QE_BLOCK, column_blocks = (t->columns + QE_BLOCK - 1) / QE_BLOCK;
    switch ((qe_blocking)t->blocking) {
    case QE_BLOCKING_ROW: return t->rows * column_blocks;
    case QE_BLOCKING_COLUMN: return row_blocks * t->columns;
    case QE_BLOCKING_TILE: return row_blocks * column_blocks;
    default: return 1;
    }
}

static void qtensor(lab *l, const qe_qtensor *t, int write) {
    if (t->codes == NULL) return;
    touch(l, t->codes, (uint64_t)t->rows * t->columns * qe_format_bytes((qe_format)t->format), write);
    touch(l, t->scale_inv, scale_count(t) * sizeof(float), write);
}

static int is_wide(uint8_t format) { return format == QE_FORMAT_FP32 || format == QE_FORMAT_BF16; }

/* What a product takes: values as the backend computes with them, or 8-bit codes with their inverse scale. */
static void operand(lab *l, const qe_qtensor *t, uint64_t rows, uint64_t columns, int write) {
    assert_int_equal(t->rows, rows);
    assert_int_equal(t->columns, columns);
    assert_true(takes_codes(l) || (t->format == QE_FORMAT_FP32 && !t->transposed));
    assert_int_equal(t->scale_inv != NULL, !is_wide(t->format));
    assert_int_equal(t->blocking, QE_BLOCKING_TENSOR);
    assert_non_null(t->codes);
    qtensor(l, t, write);
}

static void target(lab *l, const qe_quantize_target *t, uint64_t rows, uint64_t columns, qe_recipe_kind recipe) {
    assert_int_equal(t->recipe, recipe);
    if (t->retained.codes != NULL) {
        assert_int_equal(t->retained.rows, rows);
        assert_int_equal(t->retained.columns, columns);
    }
    reads(l, t->scale, 1);
    writes(l, t->amax, 1);
    operand(l, &t->operand, rows, columns, 1);
    qtensor(l, &t->retained, 1);
}

static qe_recipe_kind recipe_of(const lab *l) { return qe_model_table()->recipe(l->model)->kind; }

static void norm(lab *l, const qe_args_norm *a, int quantizes) {
    reads_active(l, a->x, (uint64_t)a->rows * a->hidden);
    reads(l, a->gain, a->hidden);
    writes(l, a->rstd, a->rows);
    if (quantizes) target(l, &a->target, a->rows, a->hidden, recipe_of(l));
    else writes_active(l, a->y, (uint64_t)a->rows * a->hidden);
}

static void norm_backward(lab *l, const qe_args_norm_backward *a) {
    uint64_t all = (uint64_t)a->rows * a->hidden;
    reads_active(l, a->dy, all);
    reads_active(l, a->x, all);
    reads(l, a->rstd, a->rows);
    reads(l, a->gain, a->hidden);
    reads_active(l, a->residual, all);
    writes_active(l, a->dx, all);
    writes(l, a->gain_grad, a->hidden);
    assert_int_equal(a->partials != NULL, takes_codes(l));
    writes(l, a->partials, (uint64_t)QE_GAIN_PARTIALS * a->hidden);
    if (a->target.operand.codes != NULL) target(l, &a->target, a->rows, a->hidden, recipe_of(l));
    else assert_null(a->target.retained.codes);
}

/* Every product has it where the backend asks for any. */
static void workspace(lab *l, void *at) {
    uint64_t bytes = qe_model_table()->workspace_bytes(l->model);
    assert_int_equal(at != NULL, bytes > 0);
    touch(l, at, bytes, 1);
}

static void weight_grad(lab *l, const qe_args_linear_weight_grad *a) {
    qtensor(l, &a->x, 0);
    qtensor(l, &a->dy, 0);
    const int decodes = takes_codes(l) ? a->x.blocking != QE_BLOCKING_TENSOR : a->x.format != QE_FORMAT_FP32;
    if (decodes) assert_non_null(a->scratch_x);
    if (decodes) assert_non_null(a->scratch_dy);
    writes_active(l, a->scratch_x, (uint64_t)a->rows * a->in);
    writes_active(l, a->scratch_dy, (uint64_t)a->rows * a->out);
    writes(l, a->grad, (uint64_t)a->in * a->out);
    workspace(l, a->workspace);
}

static void rope(lab *l, const qe_args_rope *a, int quantizes) {
    uint64_t columns = (uint64_t)(a->heads + 2 * a->kv_heads) * a->head_dim;
    reads(l, a->cosine, (uint64_t)a->sequence * a->head_dim / 2);
    reads(l, a->sine, (uint64_t)a->sequence * a->head_dim / 2);
    reads_active(l, a->qkv, a->rows * columns);
    writes_active(l, a->qkv, a->rows * columns);
    if (quantizes) target(l, &a->target, a->rows, columns, recipe_of(l));
}

static void attention_scratch(lab *l, const void *at, uint64_t sequence, uint64_t head_dim) {
    if (!takes_codes(l)) writes(l, at, qe_attention_scratch_floats(sequence, head_dim)); /* else the backend's own */
}

static void attention(lab *l, const qe_args_attention *a) {
    uint64_t rows = (uint64_t)a->sequences * a->sequence;
    reads_active(l, a->qkv, rows * (a->heads + 2 * a->kv_heads) * a->head_dim);
    writes(l, a->lse, rows * a->heads);
    attention_scratch(l, a->scratch, a->sequence, a->head_dim);
    writes_active(l, a->out, rows * a->heads * a->head_dim);
}

static void attention_backward(lab *l, const qe_args_attention_backward *a) {
    uint64_t rows = (uint64_t)a->sequences * a->sequence;
    uint64_t columns = (uint64_t)(a->heads + 2 * a->kv_heads) * a->head_dim;
    reads_active(l, a->qkv, rows * columns);
    assert_int_equal(a->out != NULL, takes_codes(l));
    reads_active(l, a->out, rows * a->heads * a->head_dim);
    reads(l, a->lse, rows * a->heads);
    reads_active(l, a->dout, rows * a->heads * a->head_dim);
    attention_scratch(l, a->scratch, a->sequence, a->head_dim);
    writes_active(l, a->dqkv, rows * columns);
}

static void ends(lab *l, const qe_op *op) {
    if (op->kind == QE_OP_EMBED) {
        const qe_args_embed *a = &op->args.embed;
        uint64_t vocab = qe_model_config_of(l->model)->vocab;
        reads(l, a->tokens, a->tokens_count);
        reads(l, a->table, vocab * a->hidden);
        writes_active(l, a->y, (uint64_t)a->tokens_count * a->hidden);
    } else if (op->kind == QE_OP_EMBED_BACKWARD) {
        const qe_args_embed_backward *a = &op->args.embed_backward;
        reads(l, a->tokens, a->tokens_count);
        reads_active(l, a->dy, (uint64_t)a->tokens_count * a->hidden);
        writes(l, a->grad, (uint64_t)a->vocab * a->hidden);
    } else {
        const qe_args_cross_entropy *a = &op->args.cross_entropy;
        reads(l, a->targets, a->rows);
        reads_active(l, a->logits, (uint64_t)a->rows * a->vocab);
        writes_active(l, a->logits, (uint64_t)a->rows * a->vocab);
        writes(l, a->loss, 2);
        assert_int_equal(a->row_losses != NULL, takes_codes(l));
        writes(l, a->row_losses, 2ull * a->rows);
    }
}

static void linear(lab *l, const qe_op *op) {
    if (op->kind == QE_OP_LINEAR) {
        const qe_args_linear *a = &op->args.linear;
        operand(l, &a->x, a->rows, a->in, 0);
        operand(l, &a->w, a->out, a->in, 0);
        assert_false(a->x.transposed || a->w.transposed);
        reads_active(l, a->residual, (uint64_t)a->rows * a->out);
        writes_active(l, a->y, (uint64_t)a->rows * a->out);
        workspace(l, a->workspace);
    } else {
        const qe_args_linear_input_grad *a = &op->args.linear_input_grad;
        operand(l, &a->dy, a->rows, a->out, 0);
        operand(l, &a->w, a->out, a->in, 0);
        assert_false(a->dy.transposed);
        assert_int_equal(a->w.transposed, !is_wide(a->w.format));
        writes_active(l, a->dx, (uint64_t)a->rows * a->in);
        workspace(l, a->workspace);
    }
}

static void activation(lab *l, const qe_op *op) {
    if (op->kind == QE_OP_SWIGLU_QUANTIZE) {
        const qe_args_swiglu *a = &op->args.swiglu;
        reads_active(l, a->gate_up, 2ull * a->rows * a->ffn);
        target(l, &a->target, a->rows, a->ffn, recipe_of(l));
    } else {
        const qe_args_swiglu_backward *a = &op->args.swiglu_backward;
        reads_active(l, a->gate_up, 2ull * a->rows * a->ffn);
        reads_active(l, a->dy, (uint64_t)a->rows * a->ffn);
        writes_active(l, a->dgate_up, 2ull * a->rows * a->ffn);
        target(l, &a->target, a->rows, 2ull * a->ffn, recipe_of(l));
    }
}

/* The head's copy is bf16 whatever the recipe; only products of codes need one. */
static void quantize_weight(lab *l, const qe_args_quantize_weight *a) {
    uint32_t weight = 0;
    while (l->places[weight].master != a->w) weight++;
    const qe_weight_info *info = qe_model_table()->weight(l->model, weight);
    const int is_head = strcmp(info->name, "lm_head") == 0;
    assert_int_equal(info->scaled, !is_head);
    assert_true(!is_head || takes_codes(l));
    reads(l, a->w, (uint64_t)a->rows * a->columns);
    target(l, &a->target, a->rows, a->columns, is_head ? QE_RECIPE_BF16 : recipe_of(l));
}

static void touched(lab *l, const qe_op *op) {
    switch (op->kind) {
    case QE_OP_EMBED:
    case QE_OP_EMBED_BACKWARD:
    case QE_OP_CROSS_ENTROPY: ends(l, op); break;
    case QE_OP_NORM: norm(l, &op->args.norm, 0); break;
    case QE_OP_NORM_QUANTIZE: norm(l, &op->args.norm, 1); break;
    case QE_OP_NORM_BACKWARD: norm_backward(l, &op->args.norm_backward); break;
    case QE_OP_QUANTIZE:
        reads_active(l, op->args.quantize.x, (uint64_t)op->args.quantize.rows * op->args.quantize.columns);
        target(l, &op->args.quantize.target, op->args.quantize.rows, op->args.quantize.columns, recipe_of(l));
        break;
    case QE_OP_QUANTIZE_WEIGHT: quantize_weight(l, &op->args.quantize_weight); break;
    case QE_OP_COPY:
        touch(l, op->args.copy.from, op->args.copy.bytes, 0);
        touch(l, op->args.copy.to, op->args.copy.bytes, 1);
        break;
    case QE_OP_LINEAR:
    case QE_OP_LINEAR_INPUT_GRAD: linear(l, op); break;
    case QE_OP_LINEAR_WEIGHT_GRAD: weight_grad(l, &op->args.linear_weight_grad); break;
    case QE_OP_ROPE: rope(l, &op->args.rope, 0); break;
    case QE_OP_ROPE_BACKWARD_QUANTIZE: rope(l, &op->args.rope, 1); break;
    case QE_OP_ATTENTION: attention(l, &op->args.attention); break;
    case QE_OP_ATTENTION_BACKWARD: attention_backward(l, &op->args.attention_backward); break;
    case QE_OP_SWIGLU_QUANTIZE:
    case QE_OP_SWIGLU_BACKWARD_QUANTIZE: activation(l, op); break;
    default: fail_msg("%s is no op of the model", qe_op_name(op->kind));
    }
}

/* Nothing is declared for nothing; scratch is declared as a whole. */
static void nothing_idle(const lab *l) {
    for (uint32_t i = 0; i < l->effect_count; i++) {
        const qe_effect *effect = &l->effects[i];
        if (!l->used[i]) fail_msg("%s declares %s and does nothing of it", l->name,
                                  qe_effect_kind_name((qe_effect_kind)effect->kind));
        if (effect->kind == QE_EFFECT_SLOT_BORROW && effect->write && !l->used_write[i])
            fail_msg("%s declares that it writes a slot and only reads it", l->name);
    }
}

/* What is made while others may still read is not where they read it. */
static void apart(const qe_op *op) {
    const qe_args_linear *l = &op->args.linear;
    const qe_args_linear_input_grad *g = &op->args.linear_input_grad;
    if (op->kind == QE_OP_LINEAR && l->target.operand.codes != NULL) {
        assert_ptr_not_equal(l->x.codes, l->target.operand.codes);
        assert_true(l->x.scale_inv == NULL || l->x.scale_inv != l->target.operand.scale_inv);
    } else if (op->kind == QE_OP_LINEAR_INPUT_GRAD && g->target.operand.codes != NULL) {
        assert_ptr_not_equal(g->dy.codes, g->target.operand.codes);
        assert_true(g->dy.scale_inv == NULL || g->dy.scale_inv != g->target.operand.scale_inv);
    }
}

static qe_status sink_op(void *context, const qe_op *op, const qe_effect *effects, uint32_t count) {
    lab *l = context;
    l->effects = effects;
    l->effect_count = count;
    l->name = qe_op_name(op->kind);
    l->per_microbatch = op->per_microbatch;
    assert_true(op->layer <= qe_model_config_of(l->model)->layers + 1);
    memset(l->used, 0, sizeof l->used);
    memset(l->used_write, 0, sizeof l->used_write);
    qe_op parts[QE_OP_PARTS_MAX];
    const uint32_t part_count = qe_op_parts(op, parts);
    for (uint32_t i = 0; i < part_count; i++) touched(l, &parts[i]);
    apart(op);
    nothing_idle(l);
    l->ops++;
    return QE_OK;
}

static void add_weight(lab *l, uint32_t index, uint32_t *object) {
    const qe_model_ops *ops = qe_model_table();
    const qe_weight_info *info = ops->weight(l->model, index);
    qe_weight_place *place = &l->places[index];
    uint64_t values = (uint64_t)info->rows * info->columns;
    memset(place, 0, sizeof *place);
    for (int role = 0; role < QE_SCALE_ROLES; role++) place->scale_object[role] = QE_NONE;
    place->weight_object = (*object)++;
    place->grad_object = (*object)++;
    place->cache_object = (*object)++;
    place->master = add_region(l, REGION_MASTER, values * 4, place->weight_object);
    place->grad = add_region(l, REGION_GRAD, values * 4, place->grad_object);
    if (!info->quantized) return;
    uint64_t codes = ops->cache_code_bytes(l->model, index), scales = ops->cache_scale_count(l->model, index);
    if (codes > 0) place->cache_codes = add_region(l, REGION_CODES, codes, place->cache_object);
    if (scales > 0) place->cache_scale_inv = add_region(l, REGION_SCALES, scales * 4, place->cache_object);
    place->cache_operand =
        add_region(l, REGION_OPERAND, ops->cache_operand_bytes(l->model, index), place->cache_object);
    const int scaled = info->scaled && ops->recipe(l->model)->kind == QE_RECIPE_DELAYED;
    for (int role = 0; role < QE_SCALE_ROLES && scaled; role++) {
        place->scale_object[role] = (*object)++;
        place->scale[role] = add_region(l, REGION_SCALE, sizeof(qe_scale_state), place->scale_object[role]);
    }
}

static void mark_arrived(lab *l, const qe_slot_place *slot) {
    if (slot->at == NULL) return;
    region *r = &l->regions[((uintptr_t)slot->at >> REGION_GAP_BITS) - 1];
    memset(r->written, 1, r->bytes);
}

static void forget_work(lab *l) {
    for (uint32_t i = 0; i < l->region_count; i++)
        if (l->regions[i].kind == REGION_WORK) memset(l->regions[i].written, 0, l->regions[i].bytes);
}

static void phase(lab *l, const qe_frame *frame, qe_phase which) {
    qe_sink sink = {l, sink_op};
    forget_work(l); /* what another action left there is nobody's */
    assert_int_equal(qe_model_table()->lower(l->model, frame, which, &sink), QE_OK);
}

static qe_frame frame_of(lab *l, uint32_t stage, uint32_t stages, int training, uint32_t object) {
    enum { MICROBATCHES = 3, MICROBATCH = 1 };
    const qe_model_ops *ops = qe_model_table();
    uint64_t tokens = ops->tokens(l->model);
    qe_frame frame = {.stage = stage, .stages = stages, .microbatch = MICROBATCH, .training = training != 0, .set = 1,
                      .weights = l->places, .work_bytes = ops->work_bytes(l->model),
                      .workspace_bytes = ops->workspace_bytes(l->model)};
    for (int kind = 0; kind < QE_SLOT_KINDS; kind++) {
        uint64_t bytes = ops->slot_bytes(l->model, stage, stages, (qe_slot_kind)kind);
        int kept = training || kind == QE_SLOT_I || kind == QE_SLOT_X || kind == QE_SLOT_IN_F || kind == QE_SLOT_OUT_F;
        frame.slot[kind] = (qe_slot_place){.object = QE_NONE, .stage = (uint16_t)stage};
        if (bytes == 0 || !kept) continue;
        frame.slot[kind] = (qe_slot_place){.object = object, .generation = 1, .stage = (uint16_t)stage};
        frame.slot[kind].at = add_region(l, REGION_SLOT, bytes, object++);
    }
    frame.work_object = object++;
    frame.work = add_region(l, REGION_WORK, frame.work_bytes, frame.work_object);
    frame.workspace_object = object++;
    if (frame.workspace_bytes > 0)
        frame.workspace = add_region(l, REGION_WORK, frame.workspace_bytes, frame.workspace_object);
    frame.tokens_object = object++;
    frame.tokens = (const int32_t *)add_region(l, REGION_TOKENS, MICROBATCHES * 2 * tokens * 4, frame.tokens_object);
    frame.tokens += 2 * tokens * MICROBATCH;
    frame.targets = frame.tokens + tokens;
    frame.loss_object = object++;
    frame.loss = (double *)add_region(l, REGION_LOSS, MICROBATCHES * sizeof(double), frame.loss_object);
    frame.loss += MICROBATCH;
    frame.constants = add_region(l, REGION_CONSTANTS, ops->constant_bytes(l->model), QE_NONE);
    return frame;
}

/* Ops and effects of a lowering, one after another. */
typedef struct told {
    qe_op ops[RANGES_MAX];
    qe_effect effects[RANGES_MAX];
    uint32_t op_count, count;
} told;

static qe_status sink_effects(void *context, const qe_op *op, const qe_effect *effects, uint32_t count) {
    told *t = context;
    assert_true(t->count + count <= RANGES_MAX && t->op_count < RANGES_MAX);
    t->ops[t->op_count++] = *op;
    memcpy(&t->effects[t->count], effects, count * sizeof *effects);
    t->count += count;
    return QE_OK;
}

/* Of the same op with its addresses and without: what differs is what qe_op_is_address says, and all of that. A seal
 * that took an address for a constant would refuse every other place. */
static void addresses_are_known(const qe_op *with, const qe_op *without) {
    assert_int_equal(with->kind, without->kind);
    for (uint32_t i = 0; i < QE_OP_RAW_WORDS; i++) {
        const int is_address = qe_op_is_address(with->kind, i * 8) && with->args.raw[i] != 0;
        if ((with->args.raw[i] != without->args.raw[i]) != is_address)
            fail_msg("%s: word %u is %s address", qe_op_title(with), i, is_address ? "no" : "an unknown");
    }
}

/* A plan is made before there are addresses: what is declared may not depend on them. */
static void addresses_change_no_effect(const lab *l, const qe_frame *frame, qe_phase which) {
    static told with, without;
    uint32_t count = qe_model_table()->weight_count(l->model);
    qe_weight_place *places = calloc(count, sizeof *places);
    qe_frame bare = *frame;
    assert_non_null(places);
    for (uint32_t i = 0; i < count; i++) {
        const qe_weight_place *placed = &l->places[i];
        places[i] = (qe_weight_place){.weight_object = placed->weight_object, .grad_object = placed->grad_object,
                                      .cache_object = placed->cache_object};
        memcpy(places[i].scale_object, placed->scale_object, sizeof places[i].scale_object);
    }
    bare.weights = places;
    bare.work = bare.workspace = NULL, bare.constants = NULL, bare.tokens = bare.targets = NULL, bare.loss = NULL;
    for (int kind = 0; kind < QE_SLOT_KINDS; kind++) bare.slot[kind].at = NULL;
    with.count = without.count = with.op_count = without.op_count = 0;
    assert_int_equal(qe_model_table()->lower(l->model, frame, which, &(qe_sink){&with, sink_effects}), QE_OK);
    assert_int_equal(qe_model_table()->lower(l->model, &bare, which, &(qe_sink){&without, sink_effects}), QE_OK);
    assert_int_equal(with.count, without.count);
    assert_memory_equal(with.effects, without.effects, with.count * sizeof *with.effects);
    assert_int_equal(with.op_count, without.op_count);
    for (uint32_t i = 0; i < with.op_count; i++) addresses_are_known(&with.ops[i], &without.ops[i]);
    free(places);
}

static uint64_t judge_stage(const qe_model *model, uint32_t stage, uint32_t stages, int training) {
    static lab l;
    uint32_t object = 0;
    memset(&l, 0, sizeof l);
    l.model = model;
    l.places = calloc(qe_model_table()->weight_count(model), sizeof *l.places);
    assert_non_null(l.places);
    for (uint32_t w = 0; w < qe_model_table()->weight_count(model); w++) add_weight(&l, w, &object);
    qe_frame frame = frame_of(&l, stage, stages, training, object);
    phase(&l, &frame, QE_PHASE_FILL);
    mark_arrived(&l, &frame.slot[QE_SLOT_IN_F]);
    phase(&l, &frame, QE_PHASE_F);
    mark_arrived(&l, &frame.slot[QE_SLOT_IN_B]);
    if (training) phase(&l, &frame, QE_PHASE_I);
    if (training) phase(&l, &frame, QE_PHASE_W);
    for (int which = QE_PHASE_FILL; which <= (training ? QE_PHASE_W : QE_PHASE_F); which++)
        addresses_change_no_effect(&l, &frame, (qe_phase)which);
    for (uint32_t i = 0; i < l.region_count; i++) free(l.regions[i].written);
    free(l.places);
    return l.ops;
}

/* Products of 8-bit codes want whole sixteens. */
static int is_refused(const qe_model_config *config, int kind) {
    int fp8 = kind == QE_RECIPE_DELAYED || kind == QE_RECIPE_CURRENT;
    return config->numerics.operands == QE_OPERANDS_CODES && fp8 && config->hidden % 16 != 0;
}

static void judge_config(qe_model_config chosen, qe_numerics numerics, int training) {
    const qe_model_config *config = &chosen;
    chosen.numerics = numerics;
    for (int kind = 0; kind <= QE_RECIPE_FP32; kind++) {
        qe_recipe recipe = {.kind = (qe_recipe_kind)kind, .history_length = 4};
        qe_model *model;
        qe_error error = {0};
        if (is_refused(config, kind)) {
            assert_int_equal(qe_model_create(config, &recipe, &model, &error), QE_ERROR_ARGUMENT);
            assert_non_null(strstr(error.message, "whole sixteens"));
            continue;
        }
        must(qe_model_create(config, &recipe, &model, &error), &error, "model");
        for (uint32_t stages = 1; stages <= config->layers; stages++) {
            uint64_t ops = 0;
            for (uint32_t stage = 0; stage < stages; stage++) ops += judge_stage(model, stage, stages, training);
            enum { FILL = 4, F = 7, I = 8, W = 4, FEEDS = 2, COLLECT = 1, ENDS_F = 4, ENDS_I = 3, ENDS_W = 1 };
            uint64_t fill_head = config->numerics.operands == QE_OPERANDS_CODES;
            uint64_t expected = config->layers * (FILL + F) + fill_head + FEEDS + ENDS_F + COLLECT;
            if (training) expected += config->layers * (I + W) + ENDS_I + ENDS_W;
            assert_int_equal(ops, expected); /* a cut adds no op */
        }
        qe_model_destroy(model);
    }
}

static const qe_model_config small = {.layers = 4, .hidden = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 64,
                                      .sequence = 16, .sequences = 1, .rope_theta = 1e4f, .norm_epsilon = 1e-5f};
/* Nothing is a multiple of a block, and the tokens are more than one. */
static const qe_model_config odd = {.layers = 3, .hidden = 150, .heads = 5, .kv_heads = 1, .ffn = 201, .vocab = 67,
                                    .sequence = 47, .sequences = 3, .rope_theta = 1e4f, .norm_epsilon = 1e-5f};

static const qe_numerics values = {QE_FORMAT_FP32, QE_OPERANDS_DECODED};
static const qe_numerics codes = {QE_FORMAT_BF16, QE_OPERANDS_CODES, .workspace_bytes = 4096};

static void a_training_stage_touches_what_it_declares_and_declares_what_it_touches(void **state) {
    (void)state;
    judge_config(small, values, 1);
    judge_config(odd, values, 1);
}

static void a_training_stage_does_so_too_where_products_take_codes(void **state) {
    (void)state;
    judge_config(small, codes, 1);
    judge_config(odd, codes, 1);
}

static void an_evaluating_stage_touches_what_it_declares_and_declares_what_it_touches(void **state) {
    (void)state;
    judge_config(small, values, 0);
    judge_config(odd, values, 0);
}

static void an_evaluating_stage_does_so_too_where_products_take_codes(void **state) {
    (void)state;
    judge_config(small, codes, 0);
    judge_config(odd, codes, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_training_stage_touches_what_it_declares_and_declares_what_it_touches),
        cmocka_unit_test(an_evaluating_stage_touches_what_it_declares_and_declares_what_it_touches),
        cmocka_unit_test(a_training_stage_does_so_too_where_products_take_codes),
        cmocka_unit_test(an_evaluating_stage_does_so_too_where_products_take_codes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
