/* bench_deposits.c - see bench_deposits.h.
 *
 * A sample has the deposits of one step, in one of three ways: all products set a buffer; from the second
 * microbatch on they add to the gradient; or they set, and what they set is moved or added to it behind every one.
 * What lies between the first way and the others is what reads and copies take.
 *
 * A chip at its limit of power has a clock that follows its load, and what draws less makes all else faster; so on a
 * GPU a sample begins with a whole step, which is timed with it and is the same in all ways. */
#include "cli/bench_deposits.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/align.h"
#include "base/assert.h"
#include "base/prng.h"
#include "base/seconds.h"
#include "qeffect/fp8.h"

enum {
    SETS, ADDS, COPIES, WAYS,
    BLOCK_VALUES = 1 << 20, /* random numbers, again and again: more than a tile or a line can see */
    FORMATS = QE_FORMAT_FP32 + 1
};

/* The ops of one weight. */
typedef struct weight_ops {
    int is_product;         /* else its gradient is moved to the buffer and back */
    qe_op set, first, add;  /* products: into the buffer, the gradient, and to what is there */
    qe_op in, out, sum;     /* the gradient moved to the buffer and back; the buffer added to it */
} weight_ops;

typedef struct deposits {
    qe_bench_run *run;
    const qe_session *session;
    const qe_plan *plan;
    const qe_backend *backend;
    qe_device *device;
    qe_stream *stream;
    void *gradients, *buffer, *operands, *workspace, *scale;
    void *block[FORMATS];   /* of random numbers; NULL: not needed yet */
    double *seconds[WAYS];
    uint64_t measured[WAYS];
    weight_ops *weights;    /* [plan->weight_count] */
} deposits;

static const qe_weight_info *info_of(const deposits *d, uint32_t weight) {
    return d->plan->model_ops->weight(d->plan->model, weight);
}

static uint64_t values_of(const deposits *d, uint32_t weight) {
    const qe_weight_info *info = info_of(d, weight);
    return (uint64_t)info->rows * info->columns;
}

static uint32_t tokens_of(const deposits *d) {
    return d->session->settings.model.sequence * d->session->settings.train.sequences;
}

/* What the weight gradient of this weight takes: docs/numerics.md. */
static qe_format operand_format(const deposits *d, uint32_t weight, int is_gradient) {
    qe_recipe_kind kind = d->session->settings.recipe.kind;
    if (!info_of(d, weight)->scaled) return (qe_format)d->backend->numerics.activation;
    if (kind == QE_RECIPE_DELAYED || kind == QE_RECIPE_CURRENT) return is_gradient ? QE_FORMAT_E5M2 : QE_FORMAT_E4M3;
    return kind == QE_RECIPE_FP32 ? QE_FORMAT_FP32 : QE_FORMAT_BF16;
}

static uint64_t operand_bytes(const deposits *d, uint32_t weight, int is_gradient) {
    const qe_weight_info *info = info_of(d, weight);
    uint64_t columns = is_gradient ? info->rows : info->columns;
    return qe_aligned(tokens_of(d) * columns * qe_format_bytes(operand_format(d, weight, is_gradient)));
}

/* --- random numbers ----------------------------------------------------------------------------------------------- */

/* The largest of a block, about five times that, just fits its format: what a chip draws depends on it. */
static float deviation_of(qe_format format) {
    static const float deviation[FORMATS] = {[QE_FORMAT_E4M3] = 448.0f / 5, [QE_FORMAT_E5M2] = 57344.0f / 5,
                                             [QE_FORMAT_BF16] = 1.0f, [QE_FORMAT_FP32] = 1.0f};
    return deviation[format];
}

static void put_number(void *block, uint64_t i, qe_format format, float value) {
    if (format == QE_FORMAT_FP32) ((float *)block)[i] = value;
    else if (format == QE_FORMAT_BF16) ((uint16_t *)block)[i] = qe_bf16_encode(value);
    else ((uint8_t *)block)[i] = qe_fp8_encode(format, value);
}

static qe_status make_block(deposits *d, qe_format format, qe_error *error_out) {
    enum { AT_A_TIME = 1024 };
    float values[AT_A_TIME];
    const qe_prng prng = qe_prng_make((uint64_t)format, "deposits");
    void *block = malloc(BLOCK_VALUES * qe_format_bytes(format));
    if (block == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for random numbers");
    for (uint64_t i = 0; i < BLOCK_VALUES; i++) {
        if (i % AT_A_TIME == 0) qe_prng_normal_fill(&prng, i, deviation_of(format), AT_A_TIME, values);
        put_number(block, i, format, values[i % AT_A_TIME]);
    }
    d->block[format] = block;
    return QE_OK;
}

static qe_status fill(deposits *d, void *to, uint64_t bytes, qe_format format, qe_error *error_out) {
    uint64_t block_bytes = BLOCK_VALUES * qe_format_bytes(format);
    if (d->block[format] == NULL) QE_TRY(make_block(d, format, error_out));
    for (uint64_t at = 0; at < bytes; at += block_bytes) {
        uint64_t part = bytes - at < block_bytes ? bytes - at : block_bytes;
        QE_TRY(d->backend->memory->write(d->device, (char *)to + at, d->block[format], part, error_out));
    }
    return QE_OK;
}

/* --- ops ---------------------------------------------------------------------------------------------------------- */

static qe_qtensor operand_of(const deposits *d, void *at, uint32_t weight, int is_gradient) {
    const qe_weight_info *info = info_of(d, weight);
    qe_format format = operand_format(d, weight, is_gradient);
    int is_code = format == QE_FORMAT_E4M3 || format == QE_FORMAT_E5M2;
    return (qe_qtensor){.codes = at, .scale_inv = is_code ? d->scale : NULL, .rows = tokens_of(d),
                        .columns = is_gradient ? info->rows : info->columns, .format = (uint8_t)format,
                        .transposed = (uint8_t)is_code};
}

static qe_op product(const deposits *d, uint32_t weight, char *operands, float *grad, int set) {
    const qe_weight_info *info = info_of(d, weight);
    char *dy = operands + operand_bytes(d, weight, 0);
    qe_op op = {.kind = QE_OP_LINEAR_WEIGHT_GRAD};
    op.args.linear_weight_grad = (qe_args_linear_weight_grad){
        .x = operand_of(d, operands, weight, 0), .dy = operand_of(d, dy, weight, 1), .grad = grad,
        .rows = tokens_of(d), .in = info->columns, .out = info->rows, .set = set != 0,
        .accumulation = (uint8_t)d->session->settings.products.weight_grad, .workspace = d->workspace};
    return op;
}

static qe_op move(float *from, float *to, uint64_t count) {
    qe_op op = {.kind = QE_OP_COPY};
    op.args.copy = (qe_args_copy){.from = from, .to = to, .bytes = count * sizeof(float)};
    return op;
}

static void make_ops(deposits *d, uint32_t weight, char *operands, float *grad, float *buffer) {
    weight_ops *w = &d->weights[weight];
    uint64_t count = values_of(d, weight);
    w->in = move(grad, buffer, count);
    w->out = move(buffer, grad, count);
    w->sum = (qe_op){.kind = QE_OP_ACCUMULATE};
    w->sum.args.accumulate = (qe_args_accumulate){.from = buffer, .to = grad, .count = count};
    w->set = product(d, weight, operands, buffer, 1);
    w->first = product(d, weight, operands, grad, 1);
    w->add = product(d, weight, operands, grad, 0);
}

static qe_status prepare(const deposits *d, const weight_ops *w, qe_error *error_out) {
    const qe_op *ops[] = {&w->in, &w->out, &w->sum, &w->set, &w->first, &w->add};
    size_t count = sizeof ops / sizeof *ops;
    for (size_t i = 0; i < (w->is_product ? count : count - 3); i++)
        QE_TRY(d->backend->prepare(d->device, ops[i], error_out));
    return QE_OK;
}

/* Products of weights that are not added apart are the same under both placements: none is timed. */
static qe_status make_weights(deposits *d, qe_error *error_out) {
    char *operands = d->operands;
    float *grad = d->gradients, *buffer = d->buffer;
    for (uint32_t weight = 0; weight < d->plan->weight_count; weight++) {
        weight_ops *w = &d->weights[weight];
        w->is_product = qe_plan_adds_apart(d->plan, weight);
        make_ops(d, weight, operands, grad, buffer);
        for (int is_gradient = 0; w->is_product && is_gradient < 2; is_gradient++) {
            uint64_t bytes = operand_bytes(d, weight, is_gradient);
            QE_TRY(fill(d, operands, bytes, operand_format(d, weight, is_gradient), error_out));
            operands += bytes;
        }
        uint64_t step = qe_aligned(values_of(d, weight) * sizeof(float)) / sizeof(float);
        grad += step;
        buffer += step;
        QE_TRY(prepare(d, w, error_out));
    }
    return QE_OK;
}

/* --- samples ------------------------------------------------------------------------------------------------------ */

static qe_status submit(const deposits *d, const qe_op *op) {
    return d->backend->stream->submit(d->stream, op);
}

/* Last layers first, as they deposit. */
static qe_status submit_products(const deposits *d, int adds, int is_first) {
    for (uint32_t weight = d->plan->weight_count; weight-- > 0;) {
        const weight_ops *w = &d->weights[weight];
        if (w->is_product) QE_TRY(submit(d, !adds ? &w->set : is_first ? &w->first : &w->add));
    }
    return QE_OK;
}

static qe_status submit_copies(const deposits *d, uint32_t microbatch) {
    for (uint32_t weight = 0; weight < d->plan->weight_count; weight++) {
        const weight_ops *w = &d->weights[weight];
        if (microbatch > 0 && !w->is_product) QE_TRY(submit(d, &w->in));
        QE_TRY(submit(d, microbatch > 0 && w->is_product ? &w->sum : &w->out));
    }
    return QE_OK;
}

static qe_status sample(deposits *d, int way, int is_kept, qe_error *error_out) {
    if (d->run->rest_ms > 0) (void)usleep((useconds_t)d->run->rest_ms * 1000);
    double begin = qe_seconds_now();
    if (qe_device_is_gpu(d->session->device)) QE_TRY(qe_bench_run_step(d->run, error_out));
    for (uint32_t microbatch = 0; microbatch < d->plan->microbatches; microbatch++) {
        QE_TRY(submit_products(d, way == ADDS, microbatch == 0));
        if (way == COPIES) QE_TRY(submit_copies(d, microbatch));
    }
    QE_TRY(d->backend->stream->sync(d->stream, error_out));
    if (is_kept) d->seconds[way][d->measured[way]++] = qe_seconds_now() - begin;
    return QE_OK;
}

/* Ways take turns, and who begins changes. Without a rest the first of a turn has the clock of the way before it, and
 * is not kept. */
static qe_status take_turns(deposits *d, uint64_t samples, uint64_t turns, qe_error *error_out) {
    uint64_t others = d->run->rest_ms == 0;
    for (uint64_t turn = 0; turn < turns * WAYS; turn++)
        for (uint64_t i = 0; i < others + samples; i++)
            QE_TRY(sample(d, (int)((turn + turn / WAYS) % WAYS), i >= others, error_out));
    return QE_OK;
}

/* From the second microbatch on. */
static double read_bytes(const deposits *d) {
    uint64_t values = 0;
    for (uint32_t weight = 0; weight < d->plan->weight_count; weight++)
        if (d->weights[weight].is_product) values += values_of(d, weight);
    return (d->plan->microbatches - 1.0) * (double)sizeof(float) * (double)values;
}

static qe_status measure(deposits *d, uint64_t samples, uint64_t turns, qe_bench_deposits *out, qe_error *error_out) {
    QE_TRY(make_weights(d, error_out));
    QE_TRY(take_turns(d, samples, turns, error_out));
    double ms[WAYS];
    for (int way = 0; way < WAYS; way++) ms[way] = 1e3 * qe_bench_median(d->seconds[way], d->measured[way]);
    *out = (qe_bench_deposits){
        .copies_ms = ms[COPIES] - ms[SETS], .reads_ms = ms[ADDS] - ms[SETS], .read_bytes = read_bytes(d)};
    return QE_OK;
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

static qe_status open_device(deposits *d, qe_error *error_out) {
    char identity[160];
    qe_device_kind kind = d->session->device == QE_DEVICE_CHECK ? QE_DEVICE_HOST : d->session->device;
    d->backend = qe_device_backend(kind);
    QE_TRY(d->backend->open(&d->device, error_out));
    qe_device_join(kind, d->device, identity, sizeof identity);
    QE_TRY(qe_device_configure(kind, d->device, d->session->settings.train.algorithms, 0, "", 0, 0, error_out));
    return d->backend->stream->create(d->device, "deposits", &d->stream, error_out);
}

static qe_status take_memory(deposits *d, qe_error *error_out) {
    static const float scale = 1e-4f; /* sums stay moderate */
    uint64_t gradients = 0, operands = 0;
    for (uint32_t weight = 0; weight < d->plan->weight_count; weight++) {
        gradients += qe_aligned(values_of(d, weight) * sizeof(float));
        if (qe_plan_adds_apart(d->plan, weight))
            operands += operand_bytes(d, weight, 0) + operand_bytes(d, weight, 1);
    }
    const qe_memory_ops *memory = d->backend->memory;
    QE_TRY(memory->alloc(d->device, gradients, &d->gradients, error_out));
    QE_TRY(memory->alloc(d->device, gradients, &d->buffer, error_out));
    QE_TRY(memory->alloc(d->device, operands, &d->operands, error_out));
    QE_TRY(memory->alloc(d->device, d->backend->numerics.workspace_bytes, &d->workspace, error_out));
    QE_TRY(memory->alloc(d->device, sizeof scale, &d->scale, error_out));
    return memory->write(d->device, d->scale, &scale, sizeof scale, error_out);
}

static qe_status take_host_memory(deposits *d, uint64_t count, qe_error *error_out) {
    int is_whole = 1;
    for (int way = 0; way < WAYS; way++) is_whole &= (d->seconds[way] = calloc(count, sizeof(double))) != NULL;
    d->weights = calloc(d->plan->weight_count, sizeof *d->weights);
    if (is_whole && d->weights != NULL) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to time deposits");
}

static void leave(deposits *d) {
    void *parts[] = {d->gradients, d->buffer, d->operands, d->workspace, d->scale};
    if (d->stream != NULL) d->backend->stream->destroy(d->stream);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i] != NULL) d->backend->memory->release(d->device, parts[i]);
    if (d->device != NULL) d->backend->close(d->device);
    for (int format = 0; format < FORMATS; format++) free(d->block[format]);
    for (int way = 0; way < WAYS; way++) free(d->seconds[way]);
    free(d->weights);
}

qe_status qe_bench_deposits_measure(qe_bench_run *run, uint64_t samples, uint64_t turns,
                                    qe_bench_deposits *deposits_out, qe_error *error_out) {
    deposits d = {.run = run, .session = &run->session, .plan = run->session.train};
    QE_ASSERT(d.plan->options.placement == QE_GRADIENT_COPY);
    qe_status status = take_host_memory(&d, samples * turns, error_out);
    if (status == QE_OK) status = open_device(&d, error_out);
    if (status == QE_OK) status = take_memory(&d, error_out);
    if (status == QE_OK) status = measure(&d, samples, turns, deposits_out, error_out);
    leave(&d);
    return status;
}
