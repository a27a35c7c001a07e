/* te_products.c - see te_products.h. */
#include "te_products.h"

#include <cmocka.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/te/ops.h"
#include "qeffect/cuda.h"
#include "qeffect/fp8.h"
#include "qeffect/te.h"

typedef struct shape {
    uint32_t rows, in, out;
} shape;

/* Not more than a thousand terms: sums of numbers between -1 and 1 stay whole numbers of bf16. */
static const shape shapes[] = {{16, 16, 16}, {64, 256, 128}, {272, 144, 400}, {1024, 512, 768}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

typedef enum residual { RESIDUAL_NONE, RESIDUAL_APART, RESIDUAL_IN_PLACE } residual;

typedef struct one_product {
    qe_op_kind kind;
    qe_format first, second; /* x and w; dy and w; x and dy */
    residual residual;
    uint8_t set, accumulation;
} one_product;

static const one_product products[] = {
    {QE_OP_LINEAR, QE_FORMAT_E4M3, QE_FORMAT_E4M3, RESIDUAL_NONE, 0, QE_ACCUMULATE_FAST},
    {QE_OP_LINEAR, QE_FORMAT_E4M3, QE_FORMAT_E4M3, RESIDUAL_APART, 0, QE_ACCUMULATE_FAST},
    {QE_OP_LINEAR, QE_FORMAT_E4M3, QE_FORMAT_E4M3, RESIDUAL_IN_PLACE, 0, QE_ACCUMULATE_SPLIT},
    {QE_OP_LINEAR, QE_FORMAT_BF16, QE_FORMAT_BF16, RESIDUAL_APART, 0, QE_ACCUMULATE_SPLIT},
    {QE_OP_LINEAR_INPUT_GRAD, QE_FORMAT_E5M2, QE_FORMAT_E4M3, RESIDUAL_NONE, 0, QE_ACCUMULATE_SPLIT},
    {QE_OP_LINEAR_INPUT_GRAD, QE_FORMAT_E4M3, QE_FORMAT_E4M3, RESIDUAL_NONE, 0, QE_ACCUMULATE_FAST},
    {QE_OP_LINEAR_INPUT_GRAD, QE_FORMAT_BF16, QE_FORMAT_BF16, RESIDUAL_NONE, 0, QE_ACCUMULATE_SPLIT},
    {QE_OP_LINEAR_WEIGHT_GRAD, QE_FORMAT_E4M3, QE_FORMAT_E5M2, RESIDUAL_NONE, 1, QE_ACCUMULATE_SPLIT},
    {QE_OP_LINEAR_WEIGHT_GRAD, QE_FORMAT_E4M3, QE_FORMAT_E5M2, RESIDUAL_NONE, 0, QE_ACCUMULATE_SPLIT},
    {QE_OP_LINEAR_WEIGHT_GRAD, QE_FORMAT_E4M3, QE_FORMAT_E5M2, RESIDUAL_NONE, 0, QE_ACCUMULATE_FAST},
    {QE_OP_LINEAR_WEIGHT_GRAD, QE_FORMAT_BF16, QE_FORMAT_BF16, RESIDUAL_NONE, 0, QE_ACCUMULATE_SPLIT},
};
enum { PRODUCTS = sizeof products / sizeof *products };

enum { PART_BYTES = 8 << 20 }; /* each of first, second, residual, result; the largest takes 1.6 MB */

typedef struct world {
    qe_device *device;
    char *first, *second, *residual, *result, *scales; /* device */
    char *workspace; /* NULL: the backend's own */
    char *host;
    uint64_t state;
} world;

static uint32_t draw(world *w) {
    uint64_t z = w->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    return (uint32_t)((z ^ z >> 27) >> 32);
}

static char *take(const world *w, size_t bytes) {
    qe_error error = {0};
    void *at = NULL;
    assert_int_equal(qe_te_backend()->memory->alloc(w->device, bytes, &at, &error), QE_OK);
    return at;
}

static void put(const world *w, void *to, const void *from, size_t bytes) {
    qe_error error = {0};
    assert_int_equal(qe_te_backend()->memory->write(w->device, to, from, bytes, &error), QE_OK);
}

static void *get(const world *w, const void *from, size_t bytes) {
    qe_error error = {0};
    void *to = malloc(bytes);
    assert_non_null(to);
    assert_int_equal(qe_te_backend()->memory->read(w->device, to, from, bytes, &error), QE_OK);
    return to;
}

static world world_open(qe_device *device) {
    /* Powers of two, each on a line of its own. */
    static const float scales[32] = {[0] = 0.5f, [16] = 2.0f};
    world w = {.device = device, .state = 7};
    char **const parts[] = {&w.first, &w.second, &w.residual, &w.result};
    for (int i = 0; i < 4; i++) *parts[i] = take(&w, PART_BYTES);
    w.scales = take(&w, sizeof scales);
    put(&w, w.scales, scales, sizeof scales);
    w.host = malloc(PART_BYTES);
    assert_non_null(w.host);
    return w;
}

static void world_close(world *w) {
    char *const parts[] = {w->first, w->second, w->residual, w->result, w->scales};
    for (int i = 0; i < 5; i++) qe_te_backend()->memory->release(w->device, parts[i]);
    free(w->host);
}

static void encode(char *to, uint64_t at, qe_format format, float value) {
    const uint16_t half = qe_bf16_encode(value);
    if (format == QE_FORMAT_FP32) memcpy(to + at * sizeof value, &value, sizeof value);
    else if (format == QE_FORMAT_BF16) memcpy(to + at * sizeof half, &half, sizeof half);
    else to[at] = (char)qe_fp8_encode(format, value);
}

/* Whole numbers in [-largest, largest], or, largest = 0, any numbers about 1. */
static void fill(world *w, char *to, uint64_t count, qe_format format, int largest) {
    for (uint64_t i = 0; i < count; i++) {
        const uint32_t drawn = draw(w);
        const float whole = (float)((int)(drawn % (uint32_t)(2 * largest + 1)) - largest);
        encode(w->host, i, format, largest > 0 ? whole : (float)drawn * 0x1p-31f - 1.0f);
    }
    put(w, to, w->host, count * qe_format_bytes(format));
}

static int is_code(qe_format format) { return format == QE_FORMAT_E4M3 || format == QE_FORMAT_E5M2; }

static qe_qtensor operand(const world *w, char *codes, uint32_t rows, uint32_t columns, qe_format format,
                          int transposed, int scale) {
    return (qe_qtensor){.codes = codes, .rows = rows, .columns = columns, .format = (uint8_t)format,
                        .scale_inv = is_code(format) ? (float *)(void *)w->scales + scale * 16 : NULL,
                        .transposed = is_code(format) && transposed};
}

static qe_op product_op(const world *w, const one_product *p, const shape *s) {
    qe_op op = {.kind = p->kind};
    char *result = w->result;
    if (p->kind == QE_OP_LINEAR) {
        const void *added[] = {NULL, w->residual, result};
        op.args.linear = (qe_args_linear){
            .x = operand(w, w->first, s->rows, s->in, p->first, 0, 0),
            .w = operand(w, w->second, s->out, s->in, p->second, 0, 1), .residual = added[p->residual], .y = result,
            .workspace = w->workspace, .rows = s->rows, .in = s->in, .out = s->out, .accumulation = p->accumulation};
    } else if (p->kind == QE_OP_LINEAR_INPUT_GRAD) {
        op.args.linear_input_grad = (qe_args_linear_input_grad){
            .dy = operand(w, w->first, s->rows, s->out, p->first, 0, 0),
            .w = operand(w, w->second, s->out, s->in, p->second, 1, 1), .dx = result,
            .workspace = w->workspace, .rows = s->rows, .in = s->in, .out = s->out, .accumulation = p->accumulation};
    } else {
        op.args.linear_weight_grad = (qe_args_linear_weight_grad){
            .x = operand(w, w->first, s->rows, s->in, p->first, 1, 0),
            .dy = operand(w, w->second, s->rows, s->out, p->second, 1, 1), .grad = (float *)(void *)result,
            .workspace = w->workspace, .rows = s->rows, .in = s->in, .out = s->out, .set = p->set,
            .accumulation = p->accumulation};
    }
    return op;
}

static size_t result_bytes(const one_product *p, const shape *s) {
    if (p->kind == QE_OP_LINEAR_WEIGHT_GRAD) return sizeof(float) * s->in * s->out;
    return sizeof(uint16_t) * s->rows * (p->kind == QE_OP_LINEAR ? s->out : s->in);
}

static void operands_fill(world *w, const one_product *p, const shape *s, int largest) {
    const uint64_t first = (uint64_t)s->rows * (p->kind == QE_OP_LINEAR_INPUT_GRAD ? s->out : s->in);
    const uint64_t second =
        p->kind == QE_OP_LINEAR_WEIGHT_GRAD ? (uint64_t)s->rows * s->out : (uint64_t)s->out * s->in;
    fill(w, w->first, first, p->first, largest);
    fill(w, w->second, second, p->second, largest);
}

/* Runs it on a device, over a result that holds `before`; the caller frees. */
static void *result_of(const world *w, const qe_backend *backend, qe_device *device, const qe_op *op,
                       const void *before, size_t bytes) {
    qe_error error = {0};
    put(w, w->result, before, bytes);
    const qe_status status = backend->run(device, op, &error);
    if (status != QE_OK) printf("%s: %s\n", qe_op_name(op->kind), error.message);
    assert_int_equal(status, QE_OK);
    return get(w, w->result, bytes);
}

static void agree(world *w, qe_device *cuda, const one_product *p, const shape *s) {
    const qe_format format = p->kind == QE_OP_LINEAR_WEIGHT_GRAD ? QE_FORMAT_FP32 : QE_FORMAT_BF16;
    const size_t bytes = result_bytes(p, s);
    const qe_op op = product_op(w, p, s);
    operands_fill(w, p, s, 1);
    fill(w, w->residual, bytes / qe_format_bytes(format), format, 16);
    void *before = get(w, w->residual, bytes);
    assert_true(qe_te_takes(&op));
    void *te = result_of(w, qe_te_backend(), w->device, &op, before, bytes);
    void *own = result_of(w, qe_cuda_backend(), cuda, &op, before, bytes);
    assert_true(memcmp(te, own, bytes) == 0);
    assert_true(memcmp(te, before, bytes) != 0);
    free(te), free(own), free(before);
}

void products_of_whole_numbers_are_the_cuda_backends(qe_device *te, qe_device *cuda) {
    world w = world_open(te);
    for (int p = 0; p < PRODUCTS; p++)
        for (int s = 0; s < SHAPES; s++) agree(&w, cuda, &products[p], &shapes[s]);
    printf("te: %d products of whole numbers, the cuda backend's bits\n", PRODUCTS * SHAPES);
    world_close(&w);
}

static void same_bits_at(world *w, const one_product *p, const shape *s, char *space, size_t step) {
    const size_t bytes = result_bytes(p, s);
    world moved = *w;
    void *before = calloc(1, bytes);
    assert_non_null(before);
    w->state = moved.state = 99;
    operands_fill(w, p, s, 0);
    qe_op op = product_op(w, p, s);
    void *one = result_of(w, qe_te_backend(), w->device, &op, before, bytes);
    moved.first += step, moved.second += 2 * step, moved.result += 3 * step;
    moved.workspace = space + step;
    operands_fill(&moved, p, s, 0);
    op = product_op(&moved, p, s);
    void *other = result_of(&moved, qe_te_backend(), w->device, &op, before, bytes);
    assert_true(memcmp(one, other, bytes) == 0);
    free(one), free(other), free(before);
}

void a_product_has_the_same_bits_wherever_it_lies(qe_device *te) {
    world w = world_open(te);
    char *space = take(&w, qe_te_backend()->numerics.workspace_bytes + 256);
    for (int p = 0; p < PRODUCTS; p++)
        for (int s = 0; s < SHAPES; s++)
            for (size_t step = QE_ALIGN_BYTES; step < 256; step += QE_ALIGN_BYTES)
                if (products[p].residual == RESIDUAL_NONE) same_bits_at(&w, &products[p], &shapes[s], space, step);
    printf("te: the same bits at every multiple of %d bytes, operands, result and workspace\n", QE_ALIGN_BYTES);
    qe_te_backend()->memory->release(te, space);
    world_close(&w);
}

typedef struct recording {
    qe_device *device;
    qe_stream *stream;
    qe_graph *graph;
    const qe_op *op;
} recording;

/* On a thread that has never called Transformer Engine: a rank records on one of its own. */
static void *record(void *context) {
    recording *r = context;
    const qe_backend *te = qe_te_backend();
    qe_error error = {0};
    assert_int_equal(te->graph->begin(r->stream, &error), QE_OK);
    const uint64_t free_bytes = qe_cuda_memory_of(r->device).free_bytes;
    assert_true(free_bytes > 0);
    assert_int_equal(te->stream->submit(r->stream, r->op), QE_OK);
    assert_int_equal(qe_cuda_memory_of(r->device).free_bytes, free_bytes); /* nothing was taken */
    assert_int_equal(te->graph->end(r->stream, &r->graph, &error), QE_OK);
    return NULL;
}

static qe_graph *graph_of(qe_device *device, qe_stream *stream, const qe_op *op) {
    recording r = {.device = device, .stream = stream, .op = op};
    pthread_t rank;
    assert_int_equal(pthread_create(&rank, NULL, record, &r), 0);
    assert_int_equal(pthread_join(rank, NULL), 0);
    assert_non_null(r.graph);
    return r.graph;
}

/* The graph is launched twice, so what it adds to is put back between. */
static void captured_run(world *w, const one_product *p, const shape *s) {
    const qe_backend *te = qe_te_backend();
    const size_t bytes = result_bytes(p, s);
    const qe_op op = product_op(w, p, s);
    qe_error error = {0};
    qe_stream *stream = NULL;
    operands_fill(w, p, s, 0);
    void *before = get(w, w->residual, bytes);
    void *eager = result_of(w, te, w->device, &op, before, bytes);
    assert_int_equal(te->stream->create(w->device, "compute", &stream, &error), QE_OK);
    qe_graph *graph = graph_of(w->device, stream, &op);
    for (int launch = 0; launch < 2; launch++) {
        put(w, w->result, before, bytes);
        assert_int_equal(te->graph->launch(graph, stream), QE_OK);
        assert_int_equal(te->stream->sync(stream, &error), QE_OK);
        void *captured = get(w, w->result, bytes);
        assert_true(memcmp(captured, eager, bytes) == 0);
        free(captured);
    }
    te->graph->destroy(graph);
    te->stream->destroy(stream);
    free(eager), free(before);
}

void a_captured_product_has_the_bits_of_an_eager_one(qe_device *te) {
    world w = world_open(te);
    for (int p = 0; p < PRODUCTS; p++)
        for (int s = 0; s < SHAPES; s++) captured_run(&w, &products[p], &shapes[s]);
    printf("te: %d products, captured and eager: the same bits\n", PRODUCTS * SHAPES);
    world_close(&w);
}

enum { SEQUENCES = 2, SEQUENCE = 128, HEADS = 4, HEAD_DIM = 64, ROWS = SEQUENCES * SEQUENCE };

static qe_op attention_op(const world *w, int backward) {
    qe_op op = {.kind = backward ? QE_OP_ATTENTION_BACKWARD : QE_OP_ATTENTION};
    if (backward)
        op.args.attention_backward = (qe_args_attention_backward){
            .qkv = w->first, .out = w->second, .lse = (float *)(void *)(w->second + PART_BYTES / 2),
            .dout = w->residual, .dqkv = w->result, .sequences = SEQUENCES, .sequence = SEQUENCE, .heads = HEADS,
            .kv_heads = HEADS, .head_dim = HEAD_DIM, .deterministic = 1};
    else
        op.args.attention = (qe_args_attention){
            .qkv = w->first, .out = w->second, .lse = (float *)(void *)(w->second + PART_BYTES / 2),
            .sequences = SEQUENCES, .sequence = SEQUENCE, .heads = HEADS, .kv_heads = HEADS, .head_dim = HEAD_DIM,
            .deterministic = 1};
    return op;
}

/* Of a graph: its plan must be there on a thread that is new. */
static void attention_run(const world *w, const qe_op *op, const char *at, size_t bytes) {
    const qe_backend *te = qe_te_backend();
    qe_error error = {0};
    qe_stream *stream = NULL;
    void *none = calloc(1, PART_BYTES);
    assert_non_null(none);
    assert_true(qe_te_takes(op));
    assert_int_equal(te->run(w->device, op, &error), QE_OK);
    void *eager = get(w, at, bytes);
    assert_true(memcmp(eager, none, bytes) != 0);
    assert_int_equal(te->stream->create(w->device, "compute", &stream, &error), QE_OK);
    qe_graph *graph = graph_of(w->device, stream, op);
    put(w, (void *)(uintptr_t)at, none, bytes);
    assert_int_equal(te->graph->launch(graph, stream), QE_OK);
    assert_int_equal(te->stream->sync(stream, &error), QE_OK);
    void *captured = get(w, at, bytes);
    assert_true(memcmp(eager, captured, bytes) == 0);
    te->graph->destroy(graph);
    te->stream->destroy(stream);
    free(eager), free(captured), free(none);
}

void captured_attention_has_the_bits_of_an_eager_one(qe_device *te) {
    world w = world_open(te);
    const size_t out_count = (size_t)ROWS * HEADS * HEAD_DIM, bytes = sizeof(uint16_t) * out_count;
    fill(&w, w.first, 3 * out_count, QE_FORMAT_BF16, 0);
    fill(&w, w.residual, out_count, QE_FORMAT_BF16, 0);
    const qe_op forward = attention_op(&w, 0), backward = attention_op(&w, 1);
    attention_run(&w, &forward, w.second, bytes);
    attention_run(&w, &backward, w.result, 3 * bytes);
    puts("te: attention, captured and eager: the same bits");
    world_close(&w);
}

void a_product_that_no_matrix_unit_computes_is_refused_in_words(qe_device *te) {
    const shape odd = {24, 32, 40};
    world w = world_open(te);
    qe_error error = {0};
    const qe_op op = product_op(&w, &products[0], &odd);
    assert_int_equal(qe_te_backend()->prepare(te, &op, &error), QE_ERROR_UNSUPPORTED);
    assert_non_null(strstr(error.message, "multiples of 16"));
    world_close(&w);
}

/* Its x has a column less than the product says: only Transformer Engine compares the two. */
static qe_op torn_op(const world *w) {
    qe_op op = product_op(w, &products[0], &shapes[1]);
    op.args.linear.x.columns -= 16;
    return op;
}

static void must_say_why(const qe_error *error) {
    assert_non_null(strstr(error->message, "Transformer Engine"));
    assert_non_null(strstr(error->message, "incompatible dimensions"));
}

static void thrown_when_bound(const world *w) {
    const qe_op torn = torn_op(w);
    qe_error error = {0};
    assert_int_equal(qe_te_backend()->prepare(w->device, &torn, &error), QE_ERROR_DEVICE);
    must_say_why(&error);
}

static void thrown_when_it_runs(const world *w, qe_stream *stream) {
    const qe_stream_ops *streams = qe_te_backend()->stream;
    const qe_op torn = torn_op(w), whole = product_op(w, &products[0], &shapes[1]);
    qe_error error = {0};
    assert_true(streams->submit(stream, &torn) != QE_OK);
    assert_int_equal(streams->sync(stream, &error), QE_ERROR_DEVICE);
    must_say_why(&error);
    assert_int_equal(streams->submit(stream, &whole), QE_OK);
    assert_int_equal(streams->sync(stream, &error), QE_OK);
}

static void thrown_when_it_is_recorded(const world *w, qe_stream *stream) {
    const qe_backend *te = qe_te_backend();
    const qe_op torn = torn_op(w), whole = product_op(w, &products[0], &shapes[1]);
    qe_error error = {0};
    qe_graph *graph = NULL;
    assert_int_equal(te->graph->begin(stream, &error), QE_OK);
    assert_int_equal(te->stream->submit(stream, &whole), QE_OK);
    assert_true(te->stream->submit(stream, &torn) != QE_OK);
    assert_true(te->graph->end(stream, &graph, &error) != QE_OK);
    assert_true(graph == NULL);
    must_say_why(&error);
    graph = graph_of(w->device, stream, &whole);
    assert_int_equal(te->graph->launch(graph, stream), QE_OK);
    assert_int_equal(te->stream->sync(stream, &error), QE_OK);
    te->graph->destroy(graph);
}

void what_is_thrown_gives_up_the_op_and_not_the_device(qe_device *te) {
    world w = world_open(te);
    qe_stream *stream = NULL;
    qe_error error = {0};
    operands_fill(&w, &products[0], &shapes[1], 1);
    assert_int_equal(qe_te_backend()->stream->create(te, "compute", &stream, &error), QE_OK);
    thrown_when_bound(&w);
    thrown_when_it_runs(&w, stream);
    thrown_when_it_is_recorded(&w, stream);
    qe_te_backend()->stream->destroy(stream);
    world_close(&w);
    puts("te: what is thrown gives up an op, not the device");
}
