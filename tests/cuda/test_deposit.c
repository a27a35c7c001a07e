/* test_deposit.c - does a weight gradient round in two steps: the product, then its sum with what is there?
 *
 * A product is added to a gradient once in place, and once by setting an empty buffer, whose values the host then adds
 * to the same gradient. Scales are no powers of two. Prints, per shape, how many elements differ; with --strict any
 * difference fails. What placement copy does stands on it: docs/numerics.md. With --te (first) the products are the te
 * backend's. Skipped (77) where there is no GPU. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "qeffect/cuda.h"
#include "qeffect/fp8.h"
#ifdef QE_TE
#include "qeffect/te.h"
#endif

typedef struct shape {
    uint32_t rows, in, out;
    qe_format x, dy;
} shape;

static const shape shapes[] = {
    {1024, 2048, 2560, QE_FORMAT_E4M3, QE_FORMAT_E5M2},  {2048, 2048, 11264, QE_FORMAT_E4M3, QE_FORMAT_E5M2},
    {2048, 5632, 2048, QE_FORMAT_E4M3, QE_FORMAT_E5M2},  {4096, 1024, 1024, QE_FORMAT_E4M3, QE_FORMAT_E5M2},
    {64, 64, 192, QE_FORMAT_E4M3, QE_FORMAT_E5M2},       {2048, 2048, 4096, QE_FORMAT_BF16, QE_FORMAT_BF16},
    {64, 64, 192, QE_FORMAT_FP32, QE_FORMAT_FP32},
};

/* No powers of two; each on a line of its own, as retained tensors have theirs. */
enum { SCALE_STRIDE = 16 };
static const float scales[2 * SCALE_STRIDE] = {[0] = 1.0f / 3.0f, [SCALE_STRIDE] = 7.0f / 5.0f};

typedef struct world {
    const qe_backend *backend;
    qe_device *device;
    void *x, *dy;
    float *scale, *sum, *product;
    float *there, *in_place, *apart; /* host */
    uint64_t state;
} world;

static void must(qe_status status, const qe_error *error, const char *what) {
    if (status == QE_OK) return;
    fprintf(stderr, "%s: %s\n", what, error->message);
    exit(1);
}

static uint64_t next(world *w) {
    uint64_t z = w->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static float value(world *w) {
    return (float)((double)(next(w) >> 11) * 0x1p-52 - 1.0);
}

static void *device_memory(world *w, uint64_t bytes) {
    qe_error error = {0};
    void *at = NULL;
    must(w->backend->memory->alloc(w->device, bytes, &at, &error), &error, "memory");
    return at;
}

/* Random numbers of a format: all codes but those that are no numbers, values of a few units. */
static void fill(world *w, void *to, uint64_t count, qe_format format) {
    uint64_t bytes = count * qe_format_bytes(format);
    unsigned char *host = malloc(bytes);
    qe_error error = {0};
    if (host == NULL) exit(1);
    for (uint64_t i = 0; i < count; i++) {
        float v = value(w);
        uint16_t half = qe_bf16_encode(v);
        uint8_t code = (uint8_t)(next(w) & 0xbb); /* exponents stay below the largest */
        if (format == QE_FORMAT_FP32) memcpy(host + i * sizeof v, &v, sizeof v);
        else if (format == QE_FORMAT_BF16) memcpy(host + i * sizeof half, &half, sizeof half);
        else host[i] = code;
    }
    must(w->backend->memory->write(w->device, to, host, bytes, &error), &error, "fill");
    free(host);
}

static qe_qtensor tensor(const world *w, void *codes, uint32_t rows, uint32_t columns, qe_format format, int scale) {
    int is_code = format == QE_FORMAT_E4M3 || format == QE_FORMAT_E5M2;
    return (qe_qtensor){.codes = codes, .scale_inv = is_code ? w->scale + scale * SCALE_STRIDE : NULL, .rows = rows,
                        .columns = columns, .format = (uint8_t)format, .transposed = (uint8_t)is_code};
}

static void deposit(world *w, const shape *s, float *grad, int set) {
    qe_error error = {0};
    qe_op op = {.kind = QE_OP_LINEAR_WEIGHT_GRAD};
    op.args.linear_weight_grad = (qe_args_linear_weight_grad){
        .x = tensor(w, w->x, s->rows, s->in, s->x, 0), .dy = tensor(w, w->dy, s->rows, s->out, s->dy, 1),
        .grad = grad, .rows = s->rows, .in = s->in, .out = s->out, .set = set != 0,
        .accumulation = QE_ACCUMULATE_SPLIT};
    must(w->backend->run(w->device, &op, &error), &error, "weight gradient");
}

static uint64_t differing(world *w, const shape *s) {
    qe_error error = {0};
    uint64_t count = (uint64_t)s->in * s->out, bytes = count * sizeof(float), differ = 0;
    const qe_memory_ops *memory = w->backend->memory;
    for (uint64_t i = 0; i < count; i++) w->there[i] = 1e3f * value(w);
    must(memory->write(w->device, w->sum, w->there, bytes, &error), &error, "gradient");
    deposit(w, s, w->sum, 0);
    deposit(w, s, w->product, 1);
    must(memory->read(w->device, w->in_place, w->sum, bytes, &error), &error, "sum");
    must(memory->read(w->device, w->apart, w->product, bytes, &error), &error, "product");
    for (uint64_t i = 0; i < count; i++) {
        float sum = w->there[i] + w->apart[i];
        differ += memcmp(&sum, &w->in_place[i], sizeof sum) != 0;
    }
    return differ;
}

static uint64_t check_shape(world *w, const shape *s, const char *how) {
    uint64_t x = (uint64_t)s->rows * s->in, dy = (uint64_t)s->rows * s->out, grad = (uint64_t)s->in * s->out;
    w->x = device_memory(w, x * qe_format_bytes(s->x));
    w->dy = device_memory(w, dy * qe_format_bytes(s->dy));
    w->sum = device_memory(w, grad * sizeof(float));
    w->product = device_memory(w, grad * sizeof(float));
    w->there = malloc(grad * sizeof(float));
    w->in_place = malloc(grad * sizeof(float));
    w->apart = malloc(grad * sizeof(float));
    if (w->there == NULL || w->in_place == NULL || w->apart == NULL) exit(1);
    fill(w, w->x, x, s->x);
    fill(w, w->dy, dy, s->dy);
    uint64_t differ = differing(w, s);
    printf("%-9s rows %5u in %5u out %5u format %d %d: %llu of %llu differ\n", how, s->rows, s->in, s->out, s->x,
           s->dy, (unsigned long long)differ, (unsigned long long)grad);
    void *device[] = {w->x, w->dy, w->sum, w->product};
    for (int i = 0; i < 4; i++) w->backend->memory->release(w->device, device[i]);
    free(w->there);
    free(w->in_place);
    free(w->apart);
    return differ;
}

/* With the libraries' first choice, and with the fastest of all. Returns how many elements differ, or 77. */
static int check_all(const qe_backend *backend, int tune, uint64_t *differ_out) {
    world w = {.backend = backend, .state = 1};
    qe_error error = {0};
    qe_status status = w.backend->open(&w.device, &error);
    if (status == QE_ERROR_UNSUPPORTED) return 77;
    must(status, &error, "device");
    must(qe_cuda_configure(w.device, &(qe_cuda_options){.tune = tune}, &error), &error, "options");
    w.scale = device_memory(&w, sizeof scales);
    must(w.backend->memory->write(w.device, w.scale, scales, sizeof scales, &error), &error, "scales");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        *differ_out += check_shape(&w, &shapes[i], tune ? "tuned" : "first");
    w.backend->memory->release(w.device, w.scale);
    w.backend->close(w.device);
    return 0;
}

static const qe_backend *backend_of(int te) {
#ifdef QE_TE
    if (te) return qe_te_backend();
#endif
    return te ? NULL : qe_cuda_backend();
}

int main(int argc, char **argv) {
    const int te = argc > 1 && strcmp(argv[1], "--te") == 0;
    const int strict = argc > 1 && strcmp(argv[argc - 1], "--strict") == 0;
    const qe_backend *backend = backend_of(te);
    uint64_t differ = 0;
    for (int tune = 0; tune < 2 - te; tune++) /* Transformer Engine is not tuned */
        if (backend == NULL || check_all(backend, tune, &differ) == 77) {
            puts(te ? "no GPU, or no Transformer Engine: skipped" : "no GPU: skipped");
            return 77;
        }
    return strict && differ > 0;
}
