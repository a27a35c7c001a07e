/* cases_attention.c - attention on the host and on the device: every forward and every backward that the device has,
 * cuDNN's, in a fixed order and in any, and ours; and that quantizing, or rotating back and quantizing, in attention's
 * last kernel gives the codes of doing so apart. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "same.h"

/* Of the largest: the device rounds weights and their gradients to bf16 before a product, the host does not. */
static same_tolerance out_value = {"attention: out", 0, 8e-3, 0, 0, 0};
static same_tolerance lse_value = {"attention: log-sum-exp", 1e-5, 1e-5, 0, 0, 0};
static same_tolerance back_value = {"attention_backward: dqkv", 0, 1.5e-2, 0, 0, 0};

typedef struct attention_shape {
    uint32_t sequences, sequence, heads, kv_heads, head_dim;
} attention_shape;

/* One key seen, blocks that are not full, several blocks of keys, groups of one and of eight, two sequences, odd
 * lengths. */
static const attention_shape shapes[] = {{1, 16, 1, 1, 64},  {2, 96, 4, 2, 64},   {1, 160, 4, 4, 128},
                                         {2, 208, 6, 2, 64}, {1, 272, 8, 1, 128}, {2, 320, 8, 2, 128},
                                         {2, 128, 3, 3, 64}, {1, 256, 2, 2, 128}, {3, 131, 4, 2, 128},
                                         {1, 77, 3, 3, 64}};
enum { SHAPES = sizeof shapes / sizeof *shapes };
/* Many blocks of the kernel that makes codes straight from sums: with parts of keys' gradients, without; and more
 * pieces of several rounds than a chip has multiprocessors. */
static const attention_shape many[] = {
    {62, 64, 64, 1, 128}, {64, 64, 64, 4, 128}, {128, 64, 64, 2, 64}, {2, 400, 24, 8, 64}, {3, 272, 40, 8, 128}};
enum { MANY = sizeof many / sizeof *many };

static uint32_t rows_of(const attention_shape *s) { return s->sequences * s->sequence; }
static uint32_t columns_of(const attention_shape *s) { return (s->heads + 2 * s->kv_heads) * s->head_dim; }
static size_t scratch_bytes(const attention_shape *s) {
    return sizeof(float) * qe_attention_scratch_floats(s->sequence, s->head_dim);
}

/* What a backward starts from. */
typedef struct forward_result {
    float *qkv, *dout, *out, *lse;
} forward_result;

static qe_op forward_op(const attention_shape *s, const same_buffer *qkv, const same_buffer *out,
                        const same_buffer *lse, const same_buffer *scratch, same_side side) {
    qe_op op = {.kind = QE_OP_ATTENTION};
    op.args.attention = (qe_args_attention){.qkv = same_at(qkv, side),
                                            .out = same_at(out, side),
                                            .lse = same_at(lse, side),
                                            .scratch = same_at(scratch, side),
                                            .sequences = s->sequences,
                                            .sequence = s->sequence,
                                            .heads = s->heads,
                                            .kv_heads = s->kv_heads,
                                            .head_dim = s->head_dim,
                                            .deterministic = 1};
    return op;
}

static const char *name_of(qe_attention_algorithm algorithm, int deterministic) {
    return algorithm == QE_ATTENTION_OWN ? "ours" : deterministic ? "cuDNN's" : "cuDNN's, any order";
}

static qe_status one_launch(const void *context, void *stream) { return same_launch(context, stream); }

/* The host's result is made by the first algorithm's call, and kept for the second's. */
static void forward_compare(const attention_shape *s, const forward_result *result, qe_attention_algorithm algorithm) {
    const size_t rows = rows_of(s), out_count = rows * s->heads * s->head_dim, lse_count = rows * s->heads;
    const int is_first = algorithm == QE_ATTENTION_CUDNN;
    same_world world;
    world_begin(&world, "attention %ux%u, heads %u/%u of %u, %s", s->sequences, s->sequence, s->heads, s->kv_heads,
                s->head_dim, name_of(algorithm, 1));
    same_buffer *qkv = world_activation(&world, rows * columns_of(s), result->qkv);
    same_buffer *out = world_activation(&world, out_count, NULL), *lse = world_bytes(&world, lse_count * 4, NULL);
    same_buffer *scratch = world_pair(&world, scratch_bytes(s), NULL, 0, NULL);
    const qe_op host = forward_op(s, qkv, out, lse, scratch, SAME_HOST);
    const qe_op device = forward_op(s, qkv, out, lse, scratch, SAME_DEVICE);
    if (same_attention_use(&world, &device, algorithm) &&
        (is_first ? world_run(&world, &host, &device) : world_launch(&world, one_launch, &device))) {
        float *values = same_floats(out);
        if (is_first) memcpy(result->out, out->host, out_count * sizeof(float));
        if (is_first) memcpy(result->lse, lse->host, lse_count * sizeof(float));
        same_close_to(&world, &out_value, result->out, values, out_count);
        same_close_to(&world, &lse_value, result->lse, lse->fetched, lse_count);
        free(values);
    }
    world_end(&world);
}

static void forward_run(const attention_shape *s, forward_result *result) {
    const size_t rows = rows_of(s), out_count = rows * s->heads * s->head_dim, lse_count = rows * s->heads;
    result->qkv = normals(rows * columns_of(s), 1.0f, rows);
    result->dout = normals(out_count, 0.5f, rows + 1);
    result->out = room(out_count * sizeof(float));
    result->lse = room(lse_count * sizeof(float));
    forward_compare(s, result, QE_ATTENTION_CUDNN);
    forward_compare(s, result, QE_ATTENTION_OWN);
}

/* --- backward ---------------------------------------------------------------------------------------------------- */

typedef struct backward_buffers {
    same_buffer *qkv, *out, *lse, *dout, *dqkv, *scratch, *turn;
} backward_buffers;

static backward_buffers backward_make(same_world *world, const attention_shape *s, const forward_result *from) {
    const size_t rows = rows_of(s), out_count = rows * s->heads * s->head_dim;
    const size_t turn_bytes = (size_t)2 * s->sequence * (s->head_dim / 2) * sizeof(float);
    float *turns = turns_of(s->sequence, s->head_dim);
    const backward_buffers b = {.qkv = world_activation(world, rows * columns_of(s), from->qkv),
                                .out = world_activation(world, out_count, from->out),
                                .lse = world_bytes(world, rows * s->heads * sizeof(float), from->lse),
                                .dout = world_activation(world, out_count, from->dout),
                                .dqkv = world_activation(world, rows * columns_of(s), NULL),
                                .scratch = world_pair(world, scratch_bytes(s), NULL, 0, NULL),
                                .turn = world_bytes(world, turn_bytes, turns)};
    free(turns);
    return b;
}

static qe_op backward_op(const attention_shape *s, const backward_buffers *b, int deterministic,
                         const qe_quantize_target *target, same_side side) {
    qe_op op = {.kind = QE_OP_ATTENTION_BACKWARD};
    const float *cosine = same_at(b->turn, side);
    op.args.attention_backward = (qe_args_attention_backward){
        .qkv = same_at(b->qkv, side),
        .out = same_at(b->out, side),
        .lse = same_at(b->lse, side),
        .dout = same_at(b->dout, side),
        .dqkv = same_at(b->dqkv, side),
        .scratch = same_at(b->scratch, side),
        .cosine = cosine,
        .sine = cosine + s->sequence * (s->head_dim / 2),
        .sequences = s->sequences,
        .sequence = s->sequence,
        .heads = s->heads,
        .kv_heads = s->kv_heads,
        .head_dim = s->head_dim,
        .deterministic = (uint8_t)deterministic,
    };
    if (target != NULL) op.args.attention_backward.target = *target;
    return op;
}

static void backward_run(const attention_shape *s, const forward_result *from, qe_attention_algorithm algorithm,
                         int deterministic) {
    same_world world;
    world_begin(&world, "attention_backward %ux%u, heads %u/%u of %u, %s", s->sequences, s->sequence, s->heads,
                s->kv_heads, s->head_dim, name_of(algorithm, deterministic));
    const backward_buffers b = backward_make(&world, s, from);
    const qe_op host = backward_op(s, &b, deterministic, NULL, SAME_HOST);
    const qe_op device = backward_op(s, &b, deterministic, NULL, SAME_DEVICE);
    world.any_order = !deterministic;
    if (same_attention_use(&world, &device, algorithm) && world_run(&world, &host, &device)) {
        float *values = same_floats(b.dqkv);
        same_close_to(&world, &back_value, b.dqkv->host, values, (size_t)rows_of(s) * columns_of(s));
        free(values);
    }
    world_end(&world);
}

/* Attention's op with a target, or without one and then rope's. */
typedef struct two_ways {
    qe_op whole, first, second;
    int apart;
} two_ways;

static qe_status two_ways_launch(const void *context, void *stream) {
    const two_ways *ways = context;
    if (!ways->apart) return same_launch(&ways->whole, stream);
    const qe_status status = same_launch(&ways->first, stream);
    return status == QE_OK ? same_launch(&ways->second, stream) : status;
}

static void *fetched_copy(const same_buffer *buffer) {
    void *copy = room(buffer->device_bytes);
    memcpy(copy, buffer->fetched, buffer->device_bytes);
    return copy;
}

/* The same bytes in one pass and in two. */
static void ways_compare(same_world *world, two_ways *ways, same_buffer *const *results, int count) {
    enum { RESULTS_MAX = 6 };
    void *one[RESULTS_MAX] = {NULL};
    if (!world_launch(world, two_ways_launch, ways)) return;
    for (int i = 0; i < count; i++)
        if (results[i] != NULL) one[i] = fetched_copy(results[i]);
    ways->apart = 1;
    if (world_launch(world, two_ways_launch, ways))
        for (int i = 0; i < count; i++)
            if (one[i] != NULL)
                same_memory(world, "one pass, two passes", one[i], results[i]->fetched, results[i]->device_bytes);
    for (int i = 0; i < count; i++) free(one[i]);
}

static void forward_quantize_run(const attention_shape *s, qe_attention_algorithm algorithm, qe_recipe_kind recipe) {
    const uint32_t rows = rows_of(s), columns = s->heads * s->head_dim;
    float *values = normals((size_t)rows * columns_of(s), 1.0f, rows);
    same_world world;
    same_target target;
    world_begin(&world, "attention %s %ux%u, heads %u/%u of %u, %s", qe_recipe_name(recipe), s->sequences, s->sequence,
                s->heads, s->kv_heads, s->head_dim, name_of(algorithm, 1));
    same_buffer *qkv = world_activation(&world, (size_t)rows * columns_of(s), values);
    same_buffer *out = world_activation(&world, (size_t)rows * columns, NULL);
    same_buffer *lse = world_bytes(&world, (size_t)rows * s->heads * sizeof(float), NULL);
    same_buffer *scratch = world_pair(&world, scratch_bytes(s), NULL, 0, NULL);
    target_make(&world, &target, recipe, target_format(recipe, 0), rows, columns, 0, SAME_ALL, 100.0f);
    two_ways ways = {.whole = forward_op(s, qkv, out, lse, scratch, SAME_DEVICE),
                     .first = forward_op(s, qkv, out, lse, scratch, SAME_DEVICE),
                     .second = {.kind = QE_OP_QUANTIZE}};
    ways.whole.args.attention.target = target.side[SAME_DEVICE];
    ways.second.args.quantize = (qe_args_quantize){
        .x = same_at(out, SAME_DEVICE), .rows = rows, .columns = columns, .target = target.side[SAME_DEVICE]};
    same_buffer *const results[] = {target.operand, target.retained, target.scale_inv, target.amax, out, lse};
    if (same_attention_use(&world, &ways.whole, algorithm))
        ways_compare(&world, &ways, results, sizeof results / sizeof *results);
    world_end(&world);
    free(values);
}

static void quantize_run(const attention_shape *s, const forward_result *from, qe_attention_algorithm algorithm,
                         qe_recipe_kind recipe) {
    same_world world;
    same_target target;
    world_begin(&world, "attention_backward %s %ux%u, heads %u/%u of %u, %s", qe_recipe_name(recipe), s->sequences,
                s->sequence, s->heads, s->kv_heads, s->head_dim, name_of(algorithm, 1));
    const backward_buffers b = backward_make(&world, s, from);
    target_make(&world, &target, recipe, target_format(recipe, 1), rows_of(s), columns_of(s), 0, SAME_ALL, 100.0f);
    two_ways ways = {.whole = backward_op(s, &b, 1, &target.side[SAME_DEVICE], SAME_DEVICE),
                     .first = backward_op(s, &b, 1, NULL, SAME_DEVICE),
                     .second = {.kind = QE_OP_ROPE_BACKWARD_QUANTIZE}};
    ways.second.args.rope = qe_attention_backward_rope(&ways.whole.args.attention_backward);
    same_buffer *const results[] = {target.operand, target.retained, target.scale_inv, target.amax};
    if (same_attention_use(&world, &ways.whole, algorithm))
        ways_compare(&world, &ways, results, sizeof results / sizeof *results);
    world_end(&world);
}

static void result_free(const forward_result *from) {
    free(from->qkv), free(from->dout), free(from->out), free(from->lse);
}

void case_attention(void) {
    forward_result from;
    if (!same_attention_open()) return;
    for (size_t i = 0; i < SHAPES; ++i) {
        const attention_shape *s = &shapes[i];
        forward_run(s, &from);
        for (qe_recipe_kind recipe = QE_RECIPE_DELAYED; recipe <= QE_RECIPE_BF16; ++recipe)
            forward_quantize_run(s, QE_ATTENTION_OWN, recipe);
        forward_quantize_run(s, QE_ATTENTION_CUDNN, QE_RECIPE_DELAYED);
        backward_run(s, &from, QE_ATTENTION_CUDNN, 1);
        backward_run(s, &from, QE_ATTENTION_CUDNN, 0);
        backward_run(s, &from, QE_ATTENTION_OWN, 1);
        for (qe_recipe_kind recipe = QE_RECIPE_DELAYED; recipe <= QE_RECIPE_BF16; ++recipe)
            quantize_run(s, &from, QE_ATTENTION_OWN, recipe);
        quantize_run(s, &from, QE_ATTENTION_CUDNN, QE_RECIPE_DELAYED);
        result_free(&from);
    }
    for (size_t i = 0; i < MANY; ++i) {
        forward_run(&many[i], &from);
        forward_quantize_run(&many[i], QE_ATTENTION_OWN, QE_RECIPE_DELAYED);
        quantize_run(&many[i], &from, QE_ATTENTION_OWN, QE_RECIPE_DELAYED);
        result_free(&from);
    }
    tolerance_print(&out_value);
    tolerance_print(&lse_value);
    tolerance_print(&back_value);
}
