/* time_kernels - microseconds of every launcher of backend/cuda/kernels.h, and terabytes per second of the bytes that
 * it must move (each input read once, each output written once), out of a captured graph. Operands are random and
 * rotate, so that none is warm in the second cache; the time of a node in a graph, some 0.8 us, is part of the figure.
 *
 *   time_kernels            all of them
 *   time_kernels norm fold  those whose names contain one of these
 *
 * Exit status: 0, 1 an error of the device, 77 skipped because there is no GPU. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/kernels.h"
#include "qeffect/limits.h"

enum {
    RANDOM_BYTES = 64 << 20, /* what operands are copied from */
    SETS_MAX = 48,
    LAUNCHES_MAX = 512,
    SAMPLES = 9,
    ALIGN_BYTES = 256,
    WORDS = 512, /* of guards and slots */
    STATES = 384 /* of a model of 32 layers */
};
static const size_t ROTATION_BYTES = 320u << 20; /* five times the second cache */
static const float SAMPLE_US = 4000.0f;

/* What operands are made of. */
typedef enum filling {
    RANDOM,   /* pairs of bf16 about normal; as floats they are about normal too */
    POSITIVE, /* the same without signs */
    ZERO
} filling;

typedef struct bench {
    cudaStream_t stream;
    char *random, *positive; /* [RANDOM_BYTES] on the device */
    int failed;
    int words_count;
    char **words; /* parts of names that are wanted */
} bench;

/* Gives out one set of operands; without a base it only counts. */
typedef struct place {
    bench *b;
    char *base;
    size_t used;
} place;

static int is_bad(bench *b, cudaError_t code, const char *what) {
    if (code == cudaSuccess) return 0;
    printf("FAILED %s: %s\n", what, cudaGetErrorString(code));
    return b->failed = 1;
}

static void *take(place *p, size_t bytes, filling how) {
    const size_t at = p->used;
    p->used = (at + bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
    if (p->base == NULL) return NULL;
    if (how == ZERO) {
        is_bad(p->b, cudaMemset(p->base + at, 0, bytes), "zeros");
        return p->base + at;
    }
    const char *from = how == RANDOM ? p->b->random : p->b->positive;
    for (size_t done = 0; done < bytes; done += RANDOM_BYTES) {
        const size_t part = bytes - done < RANDOM_BYTES ? bytes - done : RANDOM_BYTES;
        is_bad(p->b, cudaMemcpy(p->base + at + done, from, part, cudaMemcpyDeviceToDevice), "operands");
    }
    return p->base + at;
}

/* Bytes of the host at the next place. */
static void *put(place *p, const void *from, size_t bytes) {
    void *at = take(p, bytes, ZERO);
    if (at != NULL) is_bad(p->b, cudaMemcpy(at, from, bytes, cudaMemcpyHostToDevice), "small operands");
    return at;
}

static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

/* --- Ops: builders take operands and return the bytes that must move --- */

typedef struct sizes {
    uint32_t a, b, c, d;
} sizes;

typedef double builder(place *p, sizes s, qe_op *op);

static int32_t *tokens_take(place *p, uint32_t count, uint32_t vocab) {
    int32_t *tokens = malloc(count * sizeof *tokens);
    if (tokens == NULL) abort();
    uint64_t state = count;
    for (uint32_t i = 0; i < count; ++i) { /* few words are frequent, as in text */
        const double u = (double)(next_random(&state) >> 11) * 0x1p-53;
        tokens[i] = (int32_t)(u * u * u * u * vocab);
    }
    int32_t *at = put(p, tokens, count * sizeof *tokens);
    free(tokens);
    return at;
}

/* Under delayed scaling: codes by rows and transposed. */
static qe_quantize_target target_take(place *p, qe_recipe_kind recipe, qe_format format, uint32_t rows,
                                      uint32_t columns) {
    const size_t count = (size_t)rows * columns;
    const float scale = format == QE_FORMAT_E5M2 ? 1024.0f : 64.0f;
    qe_quantize_target target = {.recipe = (uint8_t)recipe, .format = (uint8_t)format};
    const int is_block = recipe == QE_RECIPE_BLOCK;
    float *inverse = take(p, is_block ? (size_t)((rows + QE_BLOCK - 1) / QE_BLOCK) * columns * 4 : 4, ZERO);
    if (recipe == QE_RECIPE_DELAYED) {
        target.scale = put(p, &scale, sizeof scale);
        target.amax = take(p, sizeof(float), ZERO);
    }
    target.operand = (qe_qtensor){.codes = take(p, is_block ? 2 * count : count, ZERO),
                                  .scale_inv = is_block ? NULL : inverse,
                                  .rows = rows,
                                  .columns = columns,
                                  .format = (uint8_t)(is_block ? QE_FORMAT_BF16 : format)};
    target.retained = (qe_qtensor){.codes = take(p, count, ZERO),
                                   .scale_inv = inverse,
                                   .rows = rows,
                                   .columns = columns,
                                   .format = (uint8_t)format,
                                   .blocking = is_block ? QE_BLOCKING_COLUMN : QE_BLOCKING_TENSOR,
                                   .transposed = !is_block};
    return target;
}

static double embed_make(place *p, sizes s, qe_op *op) { /* tokens, vocab, hidden */
    op->kind = QE_OP_EMBED;
    op->args.embed = (qe_args_embed){.tokens = tokens_take(p, s.a, s.b),
                                     .table = take(p, (size_t)s.b * s.c * 4, RANDOM),
                                     .y = take(p, (size_t)s.a * s.c * 2, ZERO),
                                     .tokens_count = s.a,
                                     .hidden = s.c};
    return 6.0 * s.a * s.c; /* frequent rows are read from the cache: less moves */
}

static double embed_backward_make(place *p, sizes s, qe_op *op) { /* tokens, vocab, hidden, set */
    op->kind = QE_OP_EMBED_BACKWARD;
    op->args.embed_backward = (qe_args_embed_backward){.tokens = tokens_take(p, s.a, s.b),
                                                       .dy = take(p, (size_t)s.a * s.c * 2, RANDOM),
                                                       .grad = take(p, (size_t)s.b * s.c * 4, RANDOM),
                                                       .tokens_count = s.a,
                                                       .hidden = s.c,
                                                       .vocab = s.b,
                                                       .set = (uint8_t)s.d};
    return 2.0 * s.a * s.c + (s.d ? 4.0 * s.b * s.c : 0.0); /* adding: and eight for each row that occurs */
}

static double cross_entropy_make(place *p, sizes s, qe_op *op) { /* rows, vocab */
    op->kind = QE_OP_CROSS_ENTROPY;
    op->args.cross_entropy = (qe_args_cross_entropy){.logits = take(p, (size_t)s.a * s.b * 2, RANDOM),
                                                     .targets = tokens_take(p, s.a, s.b),
                                                     .loss = take(p, sizeof(double), ZERO),
                                                     .row_losses = take(p, s.a * sizeof(double), ZERO),
                                                     .gradient_scale = 1.0f / (float)s.a,
                                                     .rows = s.a,
                                                     .vocab = s.b,
                                                     .backward = 1};
    return 4.0 * s.a * s.b;
}

static double grad_norm_make(place *p, sizes s, qe_op *op) { /* count in thousands of 1024 */
    const uint64_t count = (uint64_t)s.a << 10;
    op->kind = QE_OP_GRAD_NORM;
    op->args.grad_norm = (qe_args_grad_norm){.grad = take(p, count * 4, RANDOM),
                                             .count = count,
                                             .sum = take(p, sizeof(double), ZERO),
                                             .partials = take(p, QE_NORM_PARTIALS * sizeof(double), ZERO)};
    return 4.0 * (double)count;
}

static double adamw_make(place *p, sizes s, qe_op *op) {
    static const qe_adamw step = {3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.271f, 0.142625f, 0.37f};
    const uint64_t count = (uint64_t)s.a << 10;
    op->kind = QE_OP_ADAMW;
    op->args.adamw = (qe_args_adamw){.weight = take(p, count * 4, RANDOM),
                                     .grad = take(p, count * 4, RANDOM),
                                     .moment1 = take(p, count * 4, RANDOM),
                                     .moment2 = take(p, count * 4, POSITIVE),
                                     .count = count,
                                     .step = put(p, &step, sizeof step),
                                     .decay = 1,
                                     .witness = take(p, sizeof(uint64_t), ZERO),
                                     .fault = take(p, sizeof(qe_guard_fault), ZERO)};
    return 28.0 * (double)count;
}

static double norm_make(place *p, sizes s, qe_op *op) { /* rows, hidden */
    op->kind = QE_OP_NORM_QUANTIZE;
    op->args.norm = (qe_args_norm){.x = take(p, (size_t)s.a * s.b * 2, RANDOM),
                                   .gain = take(p, s.b * 4, RANDOM),
                                   .rstd = take(p, s.a * 4, ZERO),
                                   .target = target_take(p, QE_RECIPE_DELAYED, QE_FORMAT_E4M3, s.a, s.b),
                                   .epsilon = 1e-5f,
                                   .rows = s.a,
                                   .hidden = s.b};
    return 4.0 * s.a * s.b;
}

static double norm_backward_make(place *p, sizes s, qe_op *op) {
    const size_t bytes = (size_t)s.a * s.b * 2;
    op->kind = QE_OP_NORM_BACKWARD;
    op->args.norm_backward = (qe_args_norm_backward){
        .dy = take(p, bytes, RANDOM),
        .x = take(p, bytes, RANDOM),
        .rstd = take(p, s.a * 4, POSITIVE),
        .gain = take(p, s.b * 4, RANDOM),
        .residual = take(p, bytes, RANDOM),
        .dx = take(p, bytes, ZERO),
        .gain_grad = take(p, s.b * 4, RANDOM),
        .partials = take(p, (size_t)QE_GAIN_PARTIALS * s.b * 4, ZERO),
        .rows = s.a,
        .hidden = s.b,
        .target = target_take(p, QE_RECIPE_DELAYED, QE_FORMAT_E5M2, s.a, s.b),
    };
    return 10.0 * s.a * s.b;
}

static double quantize_make(place *p, sizes s, qe_op *op) { /* rows, columns, recipe */
    const qe_format format = s.c == QE_RECIPE_BLOCK ? QE_FORMAT_E4M3 : QE_FORMAT_E5M2;
    op->kind = QE_OP_QUANTIZE;
    op->args.quantize = (qe_args_quantize){.x = take(p, (size_t)s.a * s.b * 2, RANDOM),
                                           .rows = s.a,
                                           .columns = s.b,
                                           .target = target_take(p, (qe_recipe_kind)s.c, format, s.a, s.b)};
    return (s.c == QE_RECIPE_DELAYED ? 4.0 : s.c == QE_RECIPE_CURRENT ? 6.0 : 5.0) * s.a * s.b;
}

static double weight_make(place *p, sizes s, qe_op *op) {
    op->kind = QE_OP_QUANTIZE_WEIGHT;
    op->args.quantize_weight = (qe_args_quantize_weight){
        .w = take(p, (size_t)s.a * s.b * 4, RANDOM),
        .rows = s.a,
        .columns = s.b,
        .target = target_take(p, QE_RECIPE_DELAYED, QE_FORMAT_E4M3, s.a, s.b),
        .weight_witness = take(p, sizeof(uint64_t), ZERO),
        .scale_epoch = take(p, sizeof(uint64_t), ZERO),
        .key = take(p, QE_KEY_WORDS * sizeof(uint64_t), ZERO),
    };
    return 6.0 * s.a * s.b;
}

static qe_args_rope rope_args(place *p, sizes s) { /* rows, heads, kv_heads, head_dim; one sequence */
    return (qe_args_rope){.qkv = take(p, (size_t)s.a * (s.b + 2 * s.c) * s.d * 2, RANDOM),
                          .cosine = take(p, (size_t)s.a * s.d * 2, RANDOM),
                          .sine = take(p, (size_t)s.a * s.d * 2, RANDOM),
                          .rows = s.a,
                          .sequence = s.a,
                          .heads = s.b,
                          .kv_heads = s.c,
                          .head_dim = s.d};
}

static double rope_make(place *p, sizes s, qe_op *op) {
    op->kind = QE_OP_ROPE;
    op->args.rope = rope_args(p, s);
    return 4.0 * s.a * (s.b + s.c) * s.d;
}

static double rope_backward_make(place *p, sizes s, qe_op *op) {
    op->kind = QE_OP_ROPE_BACKWARD_QUANTIZE;
    op->args.rope = rope_args(p, s);
    op->args.rope.target = target_take(p, QE_RECIPE_DELAYED, QE_FORMAT_E5M2, s.a, (s.b + 2 * s.c) * s.d);
    return 4.0 * s.a * (s.b + 2 * s.c) * s.d;
}

static double swiglu_make(place *p, sizes s, qe_op *op) { /* rows, ffn */
    op->kind = QE_OP_SWIGLU_QUANTIZE;
    op->args.swiglu = (qe_args_swiglu){.gate_up = take(p, (size_t)s.a * s.b * 4, RANDOM),
                                       .rows = s.a,
                                       .ffn = s.b,
                                       .target = target_take(p, QE_RECIPE_DELAYED, QE_FORMAT_E4M3, s.a, s.b)};
    return 6.0 * s.a * s.b;
}

static double swiglu_backward_make(place *p, sizes s, qe_op *op) {
    op->kind = QE_OP_SWIGLU_BACKWARD_QUANTIZE;
    op->args.swiglu_backward = (qe_args_swiglu_backward){
        .gate_up = take(p, (size_t)s.a * s.b * 4, RANDOM),
        .dy = take(p, (size_t)s.a * s.b * 2, RANDOM),
        .dgate_up = take(p, (size_t)s.a * s.b * 4, ZERO),
        .rows = s.a,
        .ffn = s.b,
        .target = target_take(p, QE_RECIPE_DELAYED, QE_FORMAT_E5M2, s.a, 2 * s.b),
    };
    return 10.0 * s.a * s.b;
}

static double stamp_make(place *p, sizes s, qe_op *op) {
    op->kind = QE_OP_STAMP;
    op->args.stamp.count = s.a;
    for (uint32_t i = 0; i < s.a; ++i) op->args.stamp.words[i] = take(p, sizeof(uint64_t), ZERO);
    return 16.0 * s.a;
}

static double guard_make(place *p, sizes s, qe_op *op) {
    uint64_t *words = take(p, s.a * sizeof *words, ZERO);
    const uint64_t *table[WORDS];
    for (uint32_t i = 0; i < s.a; ++i) table[i] = words == NULL ? NULL : words + i;
    op->kind = QE_OP_GUARD;
    op->args.guard = (qe_args_guard){.words = put(p, table, s.a * sizeof *table),
                                     .expected = take(p, s.a * sizeof(uint64_t), ZERO),
                                     .launch = take(p, sizeof(uint64_t), ZERO),
                                     .fault = take(p, sizeof(qe_guard_fault), ZERO),
                                     .count = s.a};
    return 24.0 * s.a;
}

/* The table of states is read when the op is submitted; one for all sets, since folding is not a matter of bytes. */
static double fold_make(place *p, sizes s, qe_op *op) { /* states, history */
    static const qe_recipe recipe = {QE_RECIPE_DELAYED, 16, 0, QE_AMAX_MAX};
    static qe_scale_state *table[STATES];
    qe_scale_state states[STATES];
    float *histories = take(p, (size_t)s.a * s.b * 4, POSITIVE);
    for (uint32_t i = 0; i < s.a; ++i)
        states[i] = (qe_scale_state){.scale = 1.0f,
                                     .amax = 1.0f,
                                     .history = histories == NULL ? NULL : histories + (size_t)i * s.b,
                                     .history_length = s.b,
                                     .format_max = 448.0f};
    qe_scale_state *at = put(p, states, s.a * sizeof *states);
    for (uint32_t i = 0; i < s.a; ++i) table[i] = at == NULL ? NULL : at + i;
    op->kind = QE_OP_FOLD;
    op->args.fold = (qe_args_fold){.states = table, .count = s.a, .recipe = &recipe};
    return 8.0 * s.a * s.b;
}

/* --- Timing --- */

static qe_status launch(const qe_op *op, cudaStream_t stream) {
    const qe_op_args *args = &op->args;
    switch ((int)op->kind) {
        case QE_OP_EMBED: return qe_cuda_embed(&args->embed, stream);
        case QE_OP_EMBED_BACKWARD: return qe_cuda_embed_backward(&args->embed_backward, stream);
        case QE_OP_NORM_QUANTIZE: return qe_cuda_norm(&args->norm, stream);
        case QE_OP_NORM_BACKWARD: return qe_cuda_norm_backward(&args->norm_backward, stream);
        case QE_OP_QUANTIZE: return qe_cuda_quantize(&args->quantize, stream);
        case QE_OP_QUANTIZE_WEIGHT: return qe_cuda_quantize_weight(&args->quantize_weight, stream);
        case QE_OP_ROPE: return qe_cuda_rope(&args->rope, stream);
        case QE_OP_ROPE_BACKWARD_QUANTIZE: return qe_cuda_rope_backward_quantize(&args->rope, stream);
        case QE_OP_SWIGLU_QUANTIZE: return qe_cuda_swiglu_quantize(&args->swiglu, stream);
        case QE_OP_SWIGLU_BACKWARD_QUANTIZE: return qe_cuda_swiglu_backward_quantize(&args->swiglu_backward, stream);
        case QE_OP_CROSS_ENTROPY: return qe_cuda_cross_entropy(&args->cross_entropy, stream);
        case QE_OP_GRAD_NORM: return qe_cuda_grad_norm(&args->grad_norm, stream);
        case QE_OP_ADAMW: return qe_cuda_adamw(&args->adamw, stream);
        case QE_OP_FOLD: return qe_cuda_fold(&args->fold, stream);
        case QE_OP_STAMP: return qe_cuda_stamp(&args->stamp, stream);
        default: return qe_cuda_guard(&args->guard, stream);
    }
}

/* `launches` of them, sets in turn, in a graph. */
static cudaGraphExec_t captured(bench *b, const qe_op *ops, uint32_t sets, uint32_t launches) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable = NULL;
    if (is_bad(b, cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal), "begin of a capture"))
        return NULL;
    qe_status status = QE_OK;
    for (uint32_t i = 0; i < launches && status == QE_OK; ++i) status = launch(&ops[i % sets], b->stream);
    if (status != QE_OK) is_bad(b, cudaGetLastError(), "a launch in a capture"), b->failed = 1;
    if (is_bad(b, cudaStreamEndCapture(b->stream, &graph), "end of a capture")) return NULL;
    is_bad(b, cudaGraphInstantiate(&executable, graph, 0), "a graph");
    cudaGraphDestroy(graph);
    return executable;
}

static float replay_us(bench *b, cudaGraphExec_t graph) {
    cudaEvent_t begin, end;
    float ms = 0.0f;
    if (is_bad(b, cudaEventCreate(&begin), "an event") || is_bad(b, cudaEventCreate(&end), "an event")) return 0.0f;
    cudaEventRecord(begin, b->stream);
    is_bad(b, cudaGraphLaunch(graph, b->stream), "a replay");
    cudaEventRecord(end, b->stream);
    if (!is_bad(b, cudaEventSynchronize(end), "a replay")) cudaEventElapsedTime(&ms, begin, end);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return ms * 1e3f;
}

static int by_size(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* One replay tells how many launches fill a sample; then the median of samples, for each launch. */
static float launch_us(bench *b, const qe_op *ops, uint32_t sets, float spread_out[2]) {
    uint32_t launches = sets;
    float samples[SAMPLES] = {0};
    for (int attempt = 0; attempt < 2 && !b->failed; ++attempt) {
        cudaGraphExec_t graph = captured(b, ops, sets, launches);
        if (graph == NULL) return 0.0f;
        replay_us(b, graph);
        for (int i = 0; i < SAMPLES; ++i) samples[i] = replay_us(b, graph) / (float)launches;
        cudaGraphExecDestroy(graph);
        qsort(samples, SAMPLES, sizeof *samples, by_size);
        const float wanted = SAMPLE_US / (samples[SAMPLES / 2] > 0.1f ? samples[SAMPLES / 2] : 0.1f);
        launches = wanted < (float)LAUNCHES_MAX ? ((uint32_t)wanted / sets + 1) * sets : LAUNCHES_MAX / sets * sets;
    }
    spread_out[0] = samples[0], spread_out[1] = samples[SAMPLES - 1];
    return samples[SAMPLES / 2];
}

static int is_wanted(const bench *b, const char *name) {
    for (int i = 0; i < b->words_count; ++i)
        if (strstr(name, b->words[i]) != NULL) return 1;
    return b->words_count == 0;
}

static void time_one(bench *b, const char *name, builder *make, sizes s) {
    if (!is_wanted(b, name)) return;
    place counting = {.b = b};
    qe_op ops[SETS_MAX];
    memset(ops, 0, sizeof ops);
    const double bytes = make(&counting, s, &ops[0]);
    const size_t wanted = ROTATION_BYTES / (counting.used + 1) + 1;
    const uint32_t sets = make == fold_make ? 1 : wanted < 2 ? 2 : wanted < SETS_MAX ? (uint32_t)wanted : SETS_MAX;
    char *arena = NULL;
    b->failed = 0;
    if (is_bad(b, cudaMalloc((void **)&arena, counting.used * sets), name)) return;
    for (uint32_t i = 0; i < sets; ++i) make(&(place){b, arena + i * counting.used, 0}, s, &ops[i]);
    float spread[2] = {0.0f, 0.0f};
    is_bad(b, cudaDeviceSynchronize(), "operands");
    const float us = b->failed ? 0.0f : launch_us(b, ops, sets, spread);
    printf("%-26s %6u %6u %6u %6u %9.1f MB %9.2f us (%.2f..%.2f) %6.2f TB/s%s\n", name, s.a, s.b, s.c, s.d,
           bytes / 1e6, (double)us, (double)spread[0], (double)spread[1], us > 0.0f ? bytes / (double)us / 1e6 : 0.0,
           b->failed ? " FAILED" : "");
    cudaFree(arena);
}

static void copy_ceiling(bench *b) {
    enum { MEGABYTES = 1024, TIMES = 10 };
    char *from = NULL, *to = NULL;
    cudaEvent_t begin, end;
    float ms = 0.0f;
    const size_t bytes = (size_t)MEGABYTES << 20;
    if (cudaMalloc((void **)&from, bytes) != cudaSuccess || cudaMalloc((void **)&to, bytes) != cudaSuccess) return;
    for (size_t at = 0; at < bytes; at += RANDOM_BYTES)
        cudaMemcpyAsync(from + at, b->random, RANDOM_BYTES, cudaMemcpyDeviceToDevice, b->stream);
    cudaEventCreate(&begin), cudaEventCreate(&end);
    cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, b->stream);
    cudaEventRecord(begin, b->stream);
    for (int i = 0; i < TIMES; ++i) cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, b->stream);
    cudaEventRecord(end, b->stream);
    if (!is_bad(b, cudaEventSynchronize(end), "copies")) cudaEventElapsedTime(&ms, begin, end);
    printf("copy of the runtime: %.2f TB/s\n", ms > 0.0f ? 2.0 * TIMES * (double)bytes / (double)ms / 1e9 : 0.0);
    cudaEventDestroy(begin), cudaEventDestroy(end), cudaFree(from), cudaFree(to);
}

/* Sums of eight uniform numbers, as bf16. */
static int random_make(bench *b) {
    const size_t count = RANDOM_BYTES / sizeof(uint32_t);
    uint32_t *words = malloc(RANDOM_BYTES);
    if (words == NULL) return 1;
    uint64_t state = 7;
    for (size_t i = 0; i < count; ++i) {
        uint32_t pair = 0;
        for (int half = 0; half < 2; ++half) {
            const uint64_t bits = next_random(&state);
            float sum = 0.0f;
            for (int k = 0; k < 8; ++k) sum += (float)(bits >> 8 * k & 0xFF) - 127.5f;
            sum /= 209.0f;
            uint32_t code;
            memcpy(&code, &sum, sizeof code);
            pair |= code >> 16 << 16 * half;
        }
        words[i] = pair;
    }
    int bad = is_bad(b, cudaMalloc((void **)&b->random, RANDOM_BYTES), "memory") ||
              is_bad(b, cudaMalloc((void **)&b->positive, RANDOM_BYTES), "memory") ||
              is_bad(b, cudaMemcpy(b->random, words, RANDOM_BYTES, cudaMemcpyHostToDevice), "random numbers");
    for (size_t i = 0; i < count; ++i) words[i] &= 0x7FFF7FFFu;
    bad = bad || is_bad(b, cudaMemcpy(b->positive, words, RANDOM_BYTES, cudaMemcpyHostToDevice), "random numbers");
    bad = bad || is_bad(b, cudaDeviceSynchronize(), "random numbers"); /* the bench's stream does not wait for them */
    free(words);
    return bad;
}

static void fused_kernels(bench *b) {
    static const sizes layers[] = {{1024, 1024, 4096, 0}, {2048, 2048, 8192, 0}, {2048, 4096, 14336, 0},
                                   {8192, 4096, 14336, 0}};
    static const sizes between[] = {/* norms */
                                    {4096, 4096, QE_RECIPE_DELAYED, 0},
                                    {8192, 2048, QE_RECIPE_DELAYED, 0},
                                    {16384, 2048, QE_RECIPE_DELAYED, 0}};
    static const sizes heads[] = {{1024, 16, 16, 64}, {2048, 16, 16, 128}, {2048, 32, 8, 128}, {8192, 32, 8, 128}};
    for (size_t i = 0; i < sizeof layers / sizeof *layers; ++i) {
        const sizes at = {layers[i].a, layers[i].b, QE_RECIPE_DELAYED, 0}, wide = {layers[i].a, layers[i].c, 0, 0};
        time_one(b, "norm_quantize", norm_make, at);
        time_one(b, "norm_backward quantized", norm_backward_make, at);
        time_one(b, "quantize", quantize_make, at);
        time_one(b, "rope", rope_make, heads[i]);
        time_one(b, "rope_backward_quantize", rope_backward_make, heads[i]);
        time_one(b, "swiglu_quantize", swiglu_make, wide);
        time_one(b, "swiglu_backward_quantize", swiglu_backward_make, wide);
    }
    for (size_t i = 0; i < sizeof between / sizeof *between; ++i) {
        time_one(b, "norm_quantize", norm_make, between[i]);
        time_one(b, "norm_backward quantized", norm_backward_make, between[i]);
    }
    time_one(b, "quantize current", quantize_make, (sizes){8192, 4096, QE_RECIPE_CURRENT, 0});
    time_one(b, "quantize block", quantize_make, (sizes){8192, 4096, QE_RECIPE_BLOCK, 0});
    time_one(b, "quantize_weight", weight_make, (sizes){4096, 4096, 0, 0});
    time_one(b, "quantize_weight", weight_make, (sizes){28672, 4096, 0, 0});
}

static void small_kernels(bench *b) {
    time_one(b, "embed", embed_make, (sizes){8192, 32768, 4096, 0});
    time_one(b, "embed", embed_make, (sizes){2048, 32768, 1024, 0});
    time_one(b, "embed_backward set", embed_backward_make, (sizes){8192, 32768, 4096, 1});
    time_one(b, "embed_backward add", embed_backward_make, (sizes){8192, 32768, 4096, 0});
    time_one(b, "embed_backward add", embed_backward_make, (sizes){2048, 32768, 2048, 0});
    time_one(b, "embed_backward set", embed_backward_make, (sizes){2048, 256, 1024, 1});
    time_one(b, "cross_entropy", cross_entropy_make, (sizes){2048, 32768, 0, 0});
    time_one(b, "cross_entropy", cross_entropy_make, (sizes){2048, 50304, 0, 0});
    time_one(b, "cross_entropy", cross_entropy_make, (sizes){1024, 128256, 0, 0});
    time_one(b, "cross_entropy", cross_entropy_make, (sizes){4096, 2048, 0, 0});
    time_one(b, "cross_entropy", cross_entropy_make, (sizes){16384, 2048, 0, 0});
    time_one(b, "cross_entropy", cross_entropy_make, (sizes){8192, 5000, 0, 0});
    time_one(b, "cross_entropy", cross_entropy_make, (sizes){4096, 16384, 0, 0});
    time_one(b, "cross_entropy", cross_entropy_make, (sizes){16384, 1024, 0, 0});
    time_one(b, "grad_norm", grad_norm_make, (sizes){8192, 0, 0, 0});
    time_one(b, "grad_norm", grad_norm_make, (sizes){57344, 0, 0, 0});
    time_one(b, "adamw", adamw_make, (sizes){1024, 0, 0, 0});
    time_one(b, "adamw", adamw_make, (sizes){8192, 0, 0, 0});
    time_one(b, "adamw", adamw_make, (sizes){57344, 0, 0, 0});
    time_one(b, "fold", fold_make, (sizes){12, 16, 0, 0});
    time_one(b, "fold", fold_make, (sizes){STATES, 16, 0, 0});
    time_one(b, "fold", fold_make, (sizes){STATES, 1024, 0, 0});
    time_one(b, "stamp", stamp_make, (sizes){3, 0, 0, 0});
    time_one(b, "guard", guard_make, (sizes){1, 0, 0, 0});
    time_one(b, "guard", guard_make, (sizes){40, 0, 0, 0});
    time_one(b, "guard", guard_make, (sizes){WORDS, 0, 0, 0});
}

int main(int argc, char **argv) {
    bench b = {.words_count = argc - 1, .words = argv + 1};
    int count = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        printf("skipped: kernels are timed on a GPU, and there is none\n");
        return 77;
    }
    if (is_bad(&b, cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking), "a stream") || random_make(&b))
        return 1;
    copy_ceiling(&b);
    small_kernels(&b);
    fused_kernels(&b);
    return is_bad(&b, cudaDeviceSynchronize(), "the end");
}
