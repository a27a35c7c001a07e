/* layer.c - see layer.h. */
#include "cli/layer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/prng.h"
#include "base/seconds.h"
#include "qeffect/fp8.h"

enum { STAGE = 1, STAGES = 3, SEED = 7, WARM_STEPS = 6, VOCAB = 64 };

static qe_status take(qe_layer *layer, uint64_t bytes, void **address_out, qe_error *error_out) {
    QE_ASSERT(layer->taken_count < sizeof layer->taken / sizeof *layer->taken);
    const qe_status status = layer->backend->memory->alloc(layer->device, (size_t)bytes, address_out, error_out);
    if (status == QE_ERROR_MEMORY && error_out != NULL) /* settings of training are none of this command */
        (void)snprintf(error_out->remedy, sizeof error_out->remedy,
                       "ask for fewer sets of slots (--sets 1), or a smaller shape");
    QE_TRY(status);
    layer->taken[layer->taken_count++] = *address_out;
    return QE_OK;
}

/* Random normal values of a deviation, in the format that lies there: a block of them, again and again. Its length is
 * odd, so rows differ. */
static qe_status fill_random(qe_layer *layer, void *to, const char *name, uint64_t count, float deviation, int bf16,
                             qe_error *error_out) {
    enum { BLOCK_VALUES = (1 << 20) + 1 };
    qe_prng prng = qe_prng_make(SEED, name);
    float *values = malloc(BLOCK_VALUES * sizeof *values);
    if (values == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for random values");
    qe_prng_normal_fill(&prng, 0, deviation, BLOCK_VALUES, values);
    uint16_t *narrow = (uint16_t *)(void *)values; /* narrows in place, from the front */
    for (uint64_t i = 0; bf16 && i < BLOCK_VALUES; i++) narrow[i] = qe_bf16_encode(values[i]);
    uint64_t each = bf16 ? sizeof *narrow : sizeof *values;
    qe_status status = QE_OK;
    for (uint64_t at = 0; status == QE_OK && at < count; at += BLOCK_VALUES) {
        uint64_t part = count - at < BLOCK_VALUES ? count - at : BLOCK_VALUES;
        status = layer->backend->memory->write(layer->device, (char *)to + at * each, values, part * each, error_out);
    }
    free(values);
    return status;
}

static int activations_are_bf16(const qe_layer *layer) {
    return layer->backend->numerics.activation == QE_FORMAT_BF16;
}

static qe_status make_scale(qe_layer *layer, uint32_t weight, int role, qe_error *error_out) {
    size_t index = weight * QE_SCALE_ROLES + (size_t)role;
    uint32_t length = layer->options.recipe.history_length;
    qe_scale_state state = {.scale = 1.0f, .history = layer->histories + index * length, .history_length = length};
    state.format_max = qe_format_max(role == QE_SCALE_DY ? QE_FORMAT_E5M2 : QE_FORMAT_E4M3);
    layer->places[weight].scale[role] = &layer->scales[index];
    layer->folded[layer->fold_count++] = &layer->scales[index];
    return layer->backend->memory->write(layer->device, &layer->scales[index], &state, sizeof state, error_out);
}

static qe_status make_weight(qe_layer *layer, uint32_t weight, qe_error *error_out) {
    const qe_model_ops *ops = qe_model_table();
    const qe_weight_info *info = ops->weight(layer->model, weight);
    qe_weight_place *place = &layer->places[weight];
    uint64_t count = (uint64_t)info->rows * info->columns;
    void *master, *grad, *codes = NULL, *scale_inv = NULL;
    QE_TRY(take(layer, count * sizeof(float), &master, error_out));
    QE_TRY(take(layer, count * sizeof(float), &grad, error_out));
    place->master = master;
    place->grad = grad;
    QE_TRY(fill_random(layer, master, info->name, count, info->rows == 1 ? 1.0f : 0.02f, 0, error_out));
    QE_TRY(fill_random(layer, grad, "gradient", count, 1e-3f, 0, error_out));
    if (!info->quantized) return QE_OK;
    QE_TRY(take(layer, ops->cache_operand_bytes(layer->model, weight), &place->cache_operand, error_out));
    uint64_t code_bytes = ops->cache_code_bytes(layer->model, weight);
    uint64_t scale_bytes = ops->cache_scale_count(layer->model, weight) * sizeof(float);
    if (code_bytes > 0) QE_TRY(take(layer, code_bytes, &codes, error_out));
    if (scale_bytes > 0) QE_TRY(take(layer, scale_bytes, &scale_inv, error_out));
    place->cache_codes = codes;
    place->cache_scale_inv = scale_inv;
    for (int role = 0; layer->options.recipe.kind == QE_RECIPE_DELAYED && role < QE_SCALE_ROLES; role++)
        QE_TRY(make_scale(layer, weight, role, error_out));
    return QE_OK;
}

static qe_status make_weights(qe_layer *layer, qe_error *error_out) {
    const qe_model_ops *ops = qe_model_table();
    uint32_t count = ops->weight_count(layer->model);
    uint64_t scales = (uint64_t)count * QE_SCALE_ROLES;
    void *states, *histories;
    layer->places = calloc(count, sizeof *layer->places);
    if (layer->places == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for weights");
    QE_TRY(take(layer, scales * sizeof(qe_scale_state), &states, error_out));
    QE_TRY(take(layer, scales * layer->options.recipe.history_length * sizeof(float), &histories, error_out));
    layer->scales = states;
    layer->histories = histories;
    for (uint32_t weight = 0; weight < count; weight++) {
        for (int role = 0; role < QE_SCALE_ROLES; role++) layer->places[weight].scale_object[role] = QE_NONE;
        if (ops->weight_stage(layer->model, weight, STAGES) == STAGE) QE_TRY(make_weight(layer, weight, error_out));
    }
    layer->fold = (qe_op){.kind = QE_OP_FOLD};
    layer->fold.args.fold = (qe_args_fold){
        .states = layer->folded, .count = layer->fold_count, .recipe = &layer->options.recipe};
    return QE_OK;
}

typedef struct collector {
    qe_op *ops;
    uint32_t *count;
} collector;

static qe_status collect(void *context, const qe_op *op, const qe_effect *effects, uint32_t effect_count) {
    collector *c = context;
    (void)effects, (void)effect_count;
    QE_ASSERT(*c->count < QE_LAYER_OPS_MAX);
    c->ops[(*c->count)++] = *op;
    return QE_OK;
}

/* The frame of a microbatch in a set's slots; its deposits add to what is there. */
static qe_frame frame_of(const qe_layer *layer, const qe_layer_set *set) {
    qe_frame frame = {.stage = STAGE,
                      .stages = STAGES,
                      .training = 1,
                      .weights = layer->places,
                      .constants = layer->constants,
                      .work = layer->work,
                      .gradient_scale = 1.0f};
    for (int kind = 0; set != NULL && kind < QE_SLOT_KINDS; kind++) frame.slot[kind].at = set->slot[kind];
    return frame;
}

static qe_status lower(qe_layer *layer, const qe_layer_set *set, qe_phase phase, qe_op *ops, uint32_t *count) {
    qe_frame frame = frame_of(layer, set);
    collector c = {ops, count};
    qe_sink sink = {.context = &c, .op = collect};
    return qe_model_table()->lower(layer->model, &frame, phase, &sink);
}

static qe_status make_set(qe_layer *layer, qe_layer_set *set, qe_error *error_out) {
    uint64_t values = (uint64_t)layer->shape.tokens * layer->shape.hidden;
    for (int kind = 0; kind < QE_SLOT_KINDS; kind++) {
        uint64_t bytes = qe_model_table()->slot_bytes(layer->model, STAGE, STAGES, (qe_slot_kind)kind);
        if (bytes > 0) QE_TRY(take(layer, bytes, &set->slot[kind], error_out));
    }
    int bf16 = activations_are_bf16(layer);
    QE_TRY(fill_random(layer, set->slot[QE_SLOT_IN_F], "input", values, 1.0f, bf16, error_out));
    QE_TRY(fill_random(layer, set->slot[QE_SLOT_IN_B], "output gradient", values, 1e-2f, bf16, error_out));
    QE_TRY(lower(layer, set, QE_PHASE_F, set->ops, &set->op_count));
    set->input_begin = set->op_count;
    QE_TRY(lower(layer, set, QE_PHASE_I, set->ops, &set->op_count));
    set->weight_begin = set->op_count;
    QE_TRY(lower(layer, set, QE_PHASE_W, set->ops, &set->op_count));
    for (uint32_t i = 0; i < set->op_count; i++)
        QE_TRY(layer->backend->prepare(layer->device, &set->ops[i], error_out));
    return QE_OK;
}

/* Guards of as many words as those of an action; all words are what they are expected to be. */
static qe_status make_guards(qe_layer *layer, qe_error *error_out) {
    enum { WORDS = QE_LAYER_GUARD_WORDS, EXPECTED = WORDS, TABLE = 2 * WORDS, LAUNCH = 3 * WORDS, FAULT };
    const uint64_t *table[WORDS];
    void *memory;
    QE_TRY(take(layer, (FAULT + 8) * sizeof(uint64_t), &memory, error_out));
    layer->guard_memory = memory;
    for (int i = 0; i < WORDS; i++) table[i] = layer->guard_memory + i;
    QE_TRY(layer->backend->memory->write(layer->device, layer->guard_memory + TABLE, table, sizeof table, error_out));
    layer->head_guard = (qe_op){.kind = QE_OP_GUARD};
    layer->head_guard.args.guard =
        (qe_args_guard){.words = (const uint64_t *const *)(const void *)(layer->guard_memory + TABLE),
                        .expected = layer->guard_memory + EXPECTED,
                        .launch = layer->guard_memory + LAUNCH,
                        .fault = (qe_guard_fault *)(void *)(layer->guard_memory + FAULT),
                        .count = WORDS};
    layer->tail_guard = layer->head_guard;
    layer->tail_guard.args.guard.first_entry = WORDS;
    return QE_OK;
}

static qe_status make_model(qe_layer *layer, qe_error *error_out) {
    const qe_layer_shape *s = &layer->shape;
    uint8_t gradients = layer->options.all_fast ? QE_ACCUMULATE_FAST : QE_ACCUMULATE_SPLIT;
    qe_model_config config = {.layers = STAGES,
                              .hidden = s->hidden,
                              .heads = s->heads,
                              .kv_heads = s->kv_heads,
                              .ffn = s->ffn,
                              .vocab = VOCAB,
                              .sequence = s->tokens,
                              .sequences = 1,
                              .rope_theta = 10000.0f,
                              .norm_epsilon = 1e-5f,
                              .numerics = layer->backend->numerics,
                              .accumulation = {QE_ACCUMULATE_FAST, gradients, gradients},
                              .attention_any_order = layer->options.any_order != 0};
    return qe_model_create(&config, &layer->options.recipe, &layer->model, error_out);
}

static qe_status make_constants(qe_layer *layer, qe_error *error_out) {
    const qe_model_ops *ops = qe_model_table();
    uint64_t bytes = ops->constant_bytes(layer->model);
    QE_TRY(take(layer, ops->work_bytes(layer->model), &layer->work, error_out));
    QE_TRY(take(layer, bytes, &layer->constants, error_out));
    void *host = malloc((size_t)bytes);
    if (host == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the model's constants");
    ops->constant_fill(layer->model, host);
    qe_status status = layer->backend->memory->write(layer->device, layer->constants, host, (size_t)bytes, error_out);
    free(host);
    return status;
}

/* A few steps with folds: the scales come to fit the tensors. */
static qe_status warm(qe_layer *layer, qe_error *error_out) {
    const qe_stream_ops *streams = layer->backend->stream;
    for (int step = 0; step < WARM_STEPS; step++) {
        for (uint32_t i = 0; i < layer->fill_count; i++) QE_TRY(streams->submit(layer->stream, &layer->fill[i]));
        QE_TRY(qe_layer_submit(layer, (uint32_t)step % layer->options.sets));
        if (layer->fold_count > 0) QE_TRY(streams->submit(layer->stream, &layer->fold));
        QE_TRY(qe_layer_sync(layer, error_out));
    }
    for (uint32_t i = 0; i < layer->fill_count; i++) QE_TRY(streams->submit(layer->stream, &layer->fill[i]));
    return qe_layer_sync(layer, error_out);
}

static qe_status record(const qe_layer *layer, const qe_layer_set *set, qe_graph **graph_out, qe_error *error_out) {
    const qe_stream_ops *streams = layer->backend->stream;
    QE_TRY(layer->backend->graph->begin(layer->stream, error_out));
    qe_status status = streams->submit(layer->stream, &layer->head_guard);
    for (uint32_t i = 0; status == QE_OK && i < set->op_count; i++)
        status = streams->submit(layer->stream, &set->ops[i]);
    if (status == QE_OK) status = streams->submit(layer->stream, &layer->tail_guard);
    if (status == QE_OK) return layer->backend->graph->end(layer->stream, graph_out, error_out);
    layer->backend->graph->abandon(layer->stream);
    return qe_error_set(error_out, status, NULL, "an op of the layer could not be recorded");
}

static qe_status record_all(qe_layer *layer, qe_error *error_out) {
    double begin = qe_seconds_now();
    for (uint32_t i = 0; i < layer->options.sets; i++)
        QE_TRY(record(layer, &layer->set[i], &layer->set[i].graph, error_out));
    layer->capture_s = qe_seconds_now() - begin;
    return QE_OK;
}

/* A driver gives memory out in pieces that hold several graphs, and keeps those of graphs that are gone: what many take
 * together tells, from the first piece on. */
static qe_status weigh_graphs(qe_layer *layer, qe_error *error_out) {
    enum { COUNTED = 256, COPIES_MAX = 4 * COUNTED };
    qe_graph *copies[COPIES_MAX];
    int made = 0, counted = -1; /* -1: no piece yet */
    qe_status status = QE_OK;
    while (made < COPIES_MAX && counted < COUNTED) {
        status = record(layer, &layer->set[0], &copies[made], error_out);
        if (status != QE_OK) break;
        const uint64_t bytes = layer->backend->graph->info(copies[made++]).bytes;
        if (counted >= 0) layer->graph_bytes += bytes;
        if (counted >= 0 || bytes > 0) counted++;
    }
    if (counted > 0) layer->graph_bytes /= (uint64_t)counted;
    while (made > 0) layer->backend->graph->destroy(copies[--made]);
    return status;
}

qe_status qe_layer_open(qe_layer *layer, const qe_layer_shape *shape, const qe_layer_options *options,
                        qe_error *error_out) {
    memset(layer, 0, sizeof *layer);
    layer->shape = *shape;
    layer->options = *options;
    layer->backend = qe_device_backend(options->device);
    QE_TRY(layer->backend->open(&layer->device, error_out));
    qe_device_join(options->device, layer->device, layer->identity, sizeof layer->identity);
    qe_device_tune(options->device, layer->device);
    QE_TRY(layer->backend->stream->create(layer->device, "compute", &layer->stream, error_out));
    QE_TRY(make_model(layer, error_out));
    QE_TRY(make_constants(layer, error_out));
    QE_TRY(make_weights(layer, error_out));
    QE_TRY(make_guards(layer, error_out));
    QE_TRY(lower(layer, NULL, QE_PHASE_FILL, layer->fill, &layer->fill_count));
    for (uint32_t i = 0; i < options->sets; i++) QE_TRY(make_set(layer, &layer->set[i], error_out));
    QE_TRY(warm(layer, error_out));
    QE_TRY(record_all(layer, error_out));
    return weigh_graphs(layer, error_out);
}

void qe_layer_close(qe_layer *layer) {
    if (layer->device == NULL) return;
    for (uint32_t i = 0; i < layer->options.sets; i++)
        if (layer->set[i].graph != NULL) layer->backend->graph->destroy(layer->set[i].graph);
    if (layer->stream != NULL) layer->backend->stream->destroy(layer->stream);
    for (uint32_t i = 0; i < layer->taken_count; i++) layer->backend->memory->release(layer->device, layer->taken[i]);
    qe_model_destroy(layer->model);
    free(layer->places);
    layer->backend->close(layer->device);
    memset(layer, 0, sizeof *layer);
}

qe_status qe_layer_submit(qe_layer *layer, uint32_t set) {
    const qe_layer_set *at = &layer->set[set];
    for (uint32_t i = 0; i < at->op_count; i++) QE_TRY(layer->backend->stream->submit(layer->stream, &at->ops[i]));
    return QE_OK;
}

qe_status qe_layer_launch(qe_layer *layer, uint32_t set) {
    return layer->backend->graph->launch(layer->set[set].graph, layer->stream);
}

qe_status qe_layer_sync(qe_layer *layer, qe_error *error_out) {
    return layer->backend->stream->sync(layer->stream, error_out);
}

static double bytes_of(const qe_qtensor *tensor) {
    if (tensor->codes == NULL) return 0;
    return (double)tensor->rows * tensor->columns * qe_format_bytes((qe_format)tensor->format);
}

static double written(const qe_quantize_target *target) {
    return bytes_of(&target->operand) + bytes_of(&target->retained);
}

static qe_layer_work product(double rows, double in, double out, double bytes) {
    return (qe_layer_work){.flops = 2 * rows * in * out, .bytes = bytes};
}

/* Causal: half of the scores. Backward makes five products where forward makes two. */
static qe_layer_work attention(const qe_args_attention *a, int backward, double element) {
    double tokens = (double)a->sequences * a->sequence, out = (double)a->heads * a->head_dim;
    double qkv = (a->heads + 2.0 * a->kv_heads) * a->head_dim;
    double lse = tokens * a->heads * sizeof(float);
    return (qe_layer_work){.flops = (backward ? 5 : 2) * tokens * a->sequence * out,
                           .bytes = tokens * element * (backward ? 2 * qkv + 2 * out : qkv + out) + lse};
}

static qe_layer_work part_work(const qe_layer *layer, const qe_op *op) {
    const qe_op_args *args = &op->args;
    double element = activations_are_bf16(layer) ? sizeof(uint16_t) : sizeof(float), values;
    switch (op->kind) {
        case QE_OP_NORM_QUANTIZE:
            return (qe_layer_work){.bytes = (double)args->norm.rows * args->norm.hidden * element +
                                            written(&args->norm.target)};
        case QE_OP_QUANTIZE:
            return (qe_layer_work){.bytes = (double)args->quantize.rows * args->quantize.columns * element +
                                            written(&args->quantize.target)};
        case QE_OP_SWIGLU_QUANTIZE:
            return (qe_layer_work){.bytes = 2.0 * args->swiglu.rows * args->swiglu.ffn * element +
                                            written(&args->swiglu.target)};
        case QE_OP_SWIGLU_BACKWARD_QUANTIZE:
            return (qe_layer_work){.bytes = 3.0 * args->swiglu_backward.rows * args->swiglu_backward.ffn * element +
                                            written(&args->swiglu_backward.target)};
        case QE_OP_NORM_BACKWARD:
            values = (double)args->norm_backward.rows * args->norm_backward.hidden * element;
            return (qe_layer_work){.bytes = 4 * values + written(&args->norm_backward.target)};
        case QE_OP_ROPE:
            values = (double)args->rope.rows * (args->rope.heads + args->rope.kv_heads) * args->rope.head_dim;
            return (qe_layer_work){.bytes = 2 * values * element};
        case QE_OP_ROPE_BACKWARD_QUANTIZE:
            values = (double)args->rope.rows * (args->rope.heads + 2.0 * args->rope.kv_heads) * args->rope.head_dim;
            return (qe_layer_work){.bytes = values * element + written(&args->rope.target)};
        case QE_OP_ATTENTION: return attention(&args->attention, 0, element);
        case QE_OP_ATTENTION_BACKWARD: {
            const qe_args_attention_backward *b = &args->attention_backward;
            qe_args_attention shape = {.sequences = b->sequences, .sequence = b->sequence, .heads = b->heads};
            shape.kv_heads = b->kv_heads;
            shape.head_dim = b->head_dim;
            return attention(&shape, 1, element);
        }
        case QE_OP_LINEAR: {
            const qe_args_linear *l = &args->linear;
            double y = (double)l->rows * l->out * element * (l->residual != NULL ? 2 : 1);
            return product(l->rows, l->in, l->out, bytes_of(&l->x) + bytes_of(&l->w) + y);
        }
        case QE_OP_LINEAR_INPUT_GRAD: {
            const qe_args_linear_input_grad *l = &args->linear_input_grad;
            return product(l->rows, l->in, l->out,
                           bytes_of(&l->dy) + bytes_of(&l->w) + (double)l->rows * l->in * element);
        }
        case QE_OP_LINEAR_WEIGHT_GRAD: {
            const qe_args_linear_weight_grad *l = &args->linear_weight_grad;
            double grad = (double)l->in * l->out * sizeof(float) * (l->set ? 1 : 2);
            return product(l->rows, l->in, l->out, bytes_of(&l->x) + bytes_of(&l->dy) + grad);
        }
        default: return (qe_layer_work){0};
    }
}

/* What the first of two parts leaves and the second reads need not travel but once, or not at all where nobody reads it
 * later: a gradient on its way, queries before they are rotated. */
static double between(const qe_layer *layer, const qe_op *op) {
    double element = activations_are_bf16(layer) ? sizeof(uint16_t) : sizeof(float);
    const qe_op_args *args = &op->args;
    switch (op->kind) {
        case QE_OP_LINEAR: return (double)args->linear.rows * args->linear.out * element;
        case QE_OP_LINEAR_INPUT_GRAD: return 2.0 * args->linear_input_grad.rows * args->linear_input_grad.in * element;
        case QE_OP_LINEAR_ROPE:
            return 2.0 * args->linear_rope.rows * (args->linear_rope.heads + args->linear_rope.kv_heads) *
                   args->linear_rope.head_dim * element;
        case QE_OP_ATTENTION:
            return (double)args->attention.sequences * args->attention.sequence * args->attention.heads *
                   args->attention.head_dim * element;
        default: {
            const qe_args_attention_backward *b = &args->attention_backward;
            return 2.0 * b->sequences * b->sequence * (b->heads + 2.0 * b->kv_heads) * b->head_dim * element;
        }
    }
}

qe_layer_work qe_layer_work_of(const qe_layer *layer, const qe_op *op) {
    qe_op parts[QE_OP_PARTS_MAX];
    uint32_t count = qe_op_parts(op, parts);
    qe_layer_work work = part_work(layer, &parts[0]);
    if (count == 1) return work;
    qe_layer_work second = part_work(layer, &parts[1]);
    work.flops += second.flops;
    work.bytes += second.bytes - between(layer, op);
    return work;
}
