/* bench_kernels.c - times the kernels that a step is made of, one at a time on the calling thread, through the
 * backend's own table: what is measured is what training runs. */
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/prng.h"
#include "base/seconds.h"
#include "cli/bench.h"
#include "qeffect/host.h"

enum { SAMPLES = 15 };
static const double sample_s = 1e-3; /* long against the clock, short against the machine's moods */

/* Memory that every kernel of a report is run in. */
typedef struct workbench {
    const qe_backend *backend;
    qe_device *device;
    float *a, *b, *c, *d; /* [floats] */
    uint8_t *codes; /* [floats] */
    uint64_t floats;
} workbench;

typedef struct kernel {
    workbench *bench;
    const qe_op *op; /* NULL: memcpy of `bytes` from a to c */
    size_t bytes;
} kernel;

static qe_status run_once(const kernel *timed, qe_error *error_out) {
    if (timed->op != NULL) return timed->bench->backend->run(timed->bench->device, timed->op, error_out);
    memcpy(timed->bench->c, timed->bench->a, timed->bytes);
    __asm__ volatile("" : : "r"(timed->bench->c) : "memory");
    return QE_OK;
}

static qe_status run_many(const kernel *timed, uint64_t turns, double *seconds_out, qe_error *error_out) {
    double begin = qe_seconds_now();
    for (uint64_t i = 0; i < turns; i++) QE_TRY(run_once(timed, error_out));
    *seconds_out = (qe_seconds_now() - begin) / (double)turns;
    return QE_OK;
}

/* How often a kernel must run to fill a sample. */
static qe_status count_turns(const kernel *timed, uint64_t *turns_out, qe_error *error_out) {
    double seconds;
    for (*turns_out = 1; *turns_out < 1u << 20; *turns_out *= 2) {
        QE_TRY(run_many(timed, *turns_out, &seconds, error_out));
        if (seconds * (double)*turns_out >= sample_s) break;
    }
    return QE_OK;
}

static qe_status time_alone(const kernel *timed, double *seconds_out, qe_error *error_out) {
    double samples[SAMPLES];
    uint64_t turns;
    QE_TRY(count_turns(timed, &turns, error_out));
    for (int i = 0; i < SAMPLES; i++) QE_TRY(run_many(timed, turns, &samples[i], error_out));
    *seconds_out = qe_bench_median(samples, SAMPLES);
    return QE_OK;
}

/* Two kernels in turn; *ratio_out is time of b over time of a, which is rate of a over rate of b. */
static qe_status time_pair(const kernel *a, const kernel *b, double *a_s_out, double *b_s_out, double *ratio_out,
                           qe_error *error_out) {
    double a_s[SAMPLES], b_s[SAMPLES], ratio[SAMPLES];
    uint64_t a_turns, b_turns;
    QE_TRY(count_turns(a, &a_turns, error_out));
    QE_TRY(count_turns(b, &b_turns, error_out));
    for (int i = 0; i < SAMPLES; i++) {
        QE_TRY(run_many(a, a_turns, &a_s[i], error_out));
        QE_TRY(run_many(b, b_turns, &b_s[i], error_out));
        ratio[i] = b_s[i] / a_s[i];
    }
    *a_s_out = qe_bench_median(a_s, SAMPLES);
    *b_s_out = qe_bench_median(b_s, SAMPLES);
    *ratio_out = qe_bench_median(ratio, SAMPLES);
    return QE_OK;
}

static qe_status time_quantize(workbench *bench, qe_bench_quantize *row, qe_format format, int decode,
                               qe_error *error_out) {
    float scale = 1.0f, amax = 0.0f, scale_inv = 1.0f;
    qe_qtensor codes = {.codes = bench->codes,
                        .scale_inv = &scale_inv,
                        .rows = row->rows,
                        .columns = row->columns,
                        .format = (uint8_t)format,
                        .blocking = QE_BLOCKING_TENSOR};
    qe_op op = {.kind = QE_OP_QUANTIZE};
    op.args.quantize = (qe_args_quantize){.x = bench->a, .rows = row->rows, .columns = row->columns};
    op.args.quantize.target = (qe_quantize_target){.recipe = QE_RECIPE_DELAYED,
                                                   .format = (uint8_t)format,
                                                   .scale = &scale,
                                                   .amax = &amax,
                                                   .operand = {.codes = decode ? bench->b : NULL},
                                                   .retained = codes};
    double elements = (double)row->rows * row->columns, quantize_s, copy_s;
    kernel quantize = {bench, &op, 0}, copy = {bench, NULL, (size_t)elements * sizeof(float)};
    QE_TRY(time_pair(&quantize, &copy, &quantize_s, &copy_s, &row->ratio, error_out));
    row->gelements_per_s = 1e-9 * elements / quantize_s;
    row->copy_gelements_per_s = 1e-9 * elements / copy_s;
    return QE_OK;
}

static qe_status time_quantizes(workbench *bench, uint32_t tokens, const qe_settings_model *m, qe_bench_kernels *out,
                                qe_error *error_out) {
    static const struct {
        const char *what;
        int gradient, decode;
    } rows[QE_BENCH_QUANTIZE_ROWS] = {
        {"E4M3 codes", 0, 0},
        {"E4M3 codes and values", 0, 1},
        {"E5M2 codes", 1, 0},
        {"E5M2 codes and values", 1, 1},
    };
    for (int i = 0; i < QE_BENCH_QUANTIZE_ROWS; i++) {
        qe_bench_quantize *row = &out->quantize[i];
        *row = (qe_bench_quantize){
            .what = rows[i].what, .rows = tokens, .columns = rows[i].gradient ? 2 * m->ffn : m->hidden};
        qe_format format = rows[i].gradient ? QE_FORMAT_E5M2 : QE_FORMAT_E4M3;
        QE_TRY(time_quantize(bench, row, format, rows[i].decode, error_out));
    }
    return QE_OK;
}

static qe_qtensor plain(float *values, uint32_t rows, uint32_t columns) {
    return (qe_qtensor){
        .codes = values, .rows = rows, .columns = columns, .format = QE_FORMAT_FP32, .blocking = QE_BLOCKING_TENSOR};
}

/* fp32 operands: nothing but the product itself. */
static qe_status time_linear(workbench *bench, qe_bench_linear *linear, qe_error *error_out) {
    uint32_t rows = linear->rows, in = linear->in, out = linear->out;
    qe_op op[QE_BENCH_PRODUCTS] = {
        {.kind = QE_OP_LINEAR}, {.kind = QE_OP_LINEAR_INPUT_GRAD}, {.kind = QE_OP_LINEAR_WEIGHT_GRAD}};
    op[0].args.linear = (qe_args_linear){.x = plain(bench->a, rows, in),
                                         .w = plain(bench->b, out, in),
                                         .y = bench->c,
                                         .rows = rows,
                                         .in = in,
                                         .out = out};
    op[1].args.linear_input_grad = (qe_args_linear_input_grad){.dy = plain(bench->a, rows, out),
                                                               .w = plain(bench->b, out, in),
                                                               .dx = bench->c,
                                                               .rows = rows,
                                                               .in = in,
                                                               .out = out};
    op[2].args.linear_weight_grad = (qe_args_linear_weight_grad){.x = plain(bench->a, rows, in),
                                                                 .dy = plain(bench->b, rows, out),
                                                                 .scratch_x = bench->d,
                                                                 .scratch_dy = bench->d,
                                                                 .grad = bench->c,
                                                                 .rows = rows,
                                                                 .in = in,
                                                                 .out = out,
                                                                 .set = 1};
    for (int i = 0; i < QE_BENCH_PRODUCTS; i++) {
        double seconds;
        kernel product = {bench, &op[i], 0};
        QE_TRY(time_alone(&product, &seconds, error_out));
        linear->gflops[i] = 2e-9 * (double)rows * in * out / seconds;
    }
    return QE_OK;
}

static void list_linears(uint32_t tokens, const qe_settings_model *m, qe_bench_linear out[QE_BENCH_SHAPES_MAX]) {
    uint32_t head_dim = m->hidden / m->heads, qkv = (m->heads + 2 * m->kv_heads) * head_dim;
    const qe_bench_linear linears[QE_BENCH_SHAPES_MAX] = {
        {.name = "qkv", .rows = tokens, .in = m->hidden, .out = qkv},
        {.name = "attention out", .rows = tokens, .in = m->hidden, .out = m->hidden},
        {.name = "gate and up", .rows = tokens, .in = m->hidden, .out = 2 * m->ffn},
        {.name = "down", .rows = tokens, .in = m->ffn, .out = m->hidden},
        {.name = "head", .rows = tokens, .in = m->hidden, .out = m->vocab},
    };
    memcpy(out, linears, sizeof linears);
}

static qe_status take_memory(workbench *bench, qe_error *error_out) {
    const qe_memory_ops *memory = bench->backend->memory;
    float **arrays[] = {&bench->a, &bench->b, &bench->c, &bench->d};
    void *address;
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        QE_TRY(memory->alloc(bench->device, bench->floats * sizeof(float), &address, error_out));
        *arrays[i] = address;
    }
    QE_TRY(memory->alloc(bench->device, bench->floats, &address, error_out));
    bench->codes = address;
    qe_prng prng = qe_prng_make(1, "bench");
    qe_prng_normal_fill(&prng, 0, 1.0f, bench->floats, bench->a);
    qe_prng_normal_fill(&prng, bench->floats, 1.0f, bench->floats, bench->b);
    return QE_OK;
}

static void leave(workbench *bench) {
    void *arrays[] = {bench->a, bench->b, bench->c, bench->d, bench->codes};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        bench->backend->memory->release(bench->device, arrays[i]);
    bench->backend->close(bench->device);
}

qe_status qe_bench_kernels_measure(const qe_settings *settings, qe_bench_kernels *kernels_out, qe_error *error_out) {
    const qe_settings_model *m = &settings->model;
    workbench bench = {.backend = qe_host_backend()};
    uint32_t tokens = m->sequence * settings->train.sequences;
    memset(kernels_out, 0, sizeof *kernels_out);
    list_linears(tokens, m, kernels_out->linear);
    bench.floats = 2 * (uint64_t)tokens * m->ffn;
    for (int i = 0; i < QE_BENCH_SHAPES_MAX; i++) {
        const qe_bench_linear *l = &kernels_out->linear[i];
        uint64_t sizes[] = {(uint64_t)l->rows * l->in, (uint64_t)l->rows * l->out, (uint64_t)l->in * l->out};
        for (int k = 0; k < 3; k++) bench.floats = sizes[k] > bench.floats ? sizes[k] : bench.floats;
    }
    QE_TRY(bench.backend->open(&bench.device, error_out));
    qe_status status = take_memory(&bench, error_out);
    if (status == QE_OK) status = time_quantizes(&bench, tokens, m, kernels_out, error_out);
    for (int i = 0; status == QE_OK && i < QE_BENCH_SHAPES_MAX; i++)
        status = time_linear(&bench, &kernels_out->linear[i], error_out);
    leave(&bench);
    return status;
}
