/* bench_run.c - see bench_run.h. Weights are filled by a generator of a few instructions: a billion normal numbers of
 * the model's own would take longer than the measurement. */
#include "cli/bench_run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/assert.h"
#include "base/seconds.h"

enum { WARM_UP_STEPS = 2 };
static const char CHOICES_FILE[] = "algorithms";

int qe_bench_shape_settings(qe_cli *cli, const qe_bench_shape *shape, qe_settings *settings_out) {
    qe_settings base;
    qe_settings_default(&base);
    base.model.layers = shape->layers;
    base.model.hidden = shape->hidden;
    base.model.ffn = shape->ffn;
    base.model.heads = shape->heads;
    base.model.kv_heads = shape->kv_heads;
    base.model.vocab = shape->vocab;
    base.model.sequence = shape->sequence;
    base.train.sequences = shape->sequences;
    base.train.mode = QE_TRAIN_CAPTURED;
    base.train.capture = QE_CAPTURE_UNIT_ACTION;
    snprintf(base.pipeline.schedule, sizeof base.pipeline.schedule, "%s", shape->schedule);
    base.pipeline.ranks = shape->ranks;
    base.pipeline.chunks = 1;
    base.pipeline.microbatches = shape->microbatches;
    return qe_session_settings(cli, NULL, &base, settings_out);
}

/* SplitMix64 of the number's place: uniform over 24 bits, with the deviation of initial weights. */
static void fill_matrix(float *values, uint64_t count, uint64_t seed) {
    const float deviation = 0.02f, width = 3.4641016f; /* of a uniform number: its range over sqrt(12) */
    for (uint64_t i = 0; i < count; i++) {
        uint64_t z = (i + 1 + seed * UINT64_C(0xd1b54a32d192ed03)) * UINT64_C(0x9e3779b97f4a7c15);
        z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        values[i] = ((float)(int32_t)(z >> 40) * 0x1p-24f - 0.5f) * (width * deviation);
    }
}

static qe_status fill_weight(qe_session *session, uint32_t index, qe_error *error_out) {
    const qe_parameter *parameter = qe_model_parameter(session->model, index);
    uint64_t count = (uint64_t)parameter->rows * parameter->columns;
    float *values = malloc(count * sizeof *values);
    if (values == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for %s", parameter->name);
    if (!parameter->vector) fill_matrix(values, count, index);
    for (uint64_t i = 0; parameter->vector && i < count; i++) values[i] = 1.0f;
    qe_status status = qe_team_parameter_write(session->team, index, values, error_out);
    free(values);
    return status;
}

static qe_status fill_weights(qe_session *session, qe_error *error_out) {
    for (uint32_t i = 0; i < qe_model_parameter_count(session->model); i++)
        QE_TRY(fill_weight(session, i, error_out));
    return QE_OK;
}

static void fill_batch(qe_session *session, uint64_t step) {
    uint64_t count = (uint64_t)session->sequences_per_step * session->settings.model.sequence;
    uint64_t state = step;
    for (uint64_t i = 0; i < count; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        session->tokens[i] = (int32_t)((state >> 33) % session->settings.model.vocab);
        session->targets[i] = (int32_t)((state >> 40) % session->settings.model.vocab);
    }
}

qe_status qe_bench_run_step(qe_bench_run *run, qe_error *error_out) {
    uint64_t step = ++run->next_step;
    fill_batch(&run->session, step);
    qe_status status = qe_session_step_given(&run->session, step, &run->last, error_out);
    int broken = status == QE_CONTRACT || (status == QE_OK && run->last.violation_rank != QE_NONE);
    if (broken || (status == QE_OK && run->last.vetoed))
        return qe_error_set(error_out, QE_CONTRACT, "qeffect train with these settings names the rule",
                            "step %llu of a timed run %s", (unsigned long long)step,
                            broken ? "breaks a rule" : "is not finite");
    return status;
}

qe_status qe_bench_run_open(qe_bench_run *run, const qe_settings *settings, qe_device_kind device,
                            qe_error *error_out) {
    qe_session_options options = {.training = 1, .no_evaluation = 1, .device = device};
    double begin = qe_seconds_now();
    memset(run, 0, sizeof *run);
    qe_status status = qe_session_open(&run->session, settings, &options, error_out);
    if (status == QE_CONTRACT && error_out->message[0] == 0) /* the plan's; else a recording's, which is in words */
        return qe_error_set(error_out, status, "qeffect train names the rule", "the schedule cannot run");
    QE_TRY(status);
    run->open_s = qe_seconds_now() - begin;
    QE_TRY(fill_weights(&run->session, error_out));
    for (int i = 0; i < WARM_UP_STEPS; i++) QE_TRY(qe_bench_run_step(run, error_out));
    return QE_OK;
}

qe_status qe_bench_run_steps(qe_bench_run *run, uint64_t steps, qe_error *error_out) {
    QE_ASSERT(run->measured + steps <= QE_BENCH_RUN_STEPS_MAX);
    for (uint64_t i = 0; i < steps; i++) {
        if (run->rest_ms > 0) (void)usleep((useconds_t)run->rest_ms * 1000);
        double begin = qe_seconds_now();
        QE_TRY(qe_bench_run_step(run, error_out));
        run->step_s[run->measured] = qe_seconds_now() - begin;
        run->actions_ns[run->measured] = run->last.actions_ns;
        run->commit_ns[run->measured++] = run->last.commit_ns;
    }
    return QE_OK;
}

void qe_bench_run_close(qe_bench_run *run) {
    qe_session_close(&run->session);
}

double qe_bench_run_step_ms(const qe_bench_run *run) {
    double sorted[QE_BENCH_RUN_STEPS_MAX];
    memcpy(sorted, run->step_s, run->measured * sizeof *sorted);
    return 1e3 * qe_bench_median(sorted, run->measured);
}

static double median_ms(const uint64_t *ns, uint32_t count) {
    double sorted[QE_BENCH_RUN_STEPS_MAX];
    for (uint32_t i = 0; i < count; i++) sorted[i] = 1e-6 * (double)ns[i];
    return qe_bench_median(sorted, count);
}

double qe_bench_run_actions_ms(const qe_bench_run *run) {
    return median_ms(run->actions_ns, run->measured);
}

double qe_bench_run_commit_ms(const qe_bench_run *run) {
    return median_ms(run->commit_ns, run->measured);
}

qe_status qe_bench_choices_open(qe_bench_choices *choices, qe_device_kind device, qe_settings *settings,
                                qe_error *error_out) {
    choices->folder[0] = 0;
    if (!qe_device_is_gpu(device) || settings->train.algorithms[0] != 0) return QE_OK;
    snprintf(choices->folder, sizeof choices->folder, "/tmp/qeffect-bench-XXXXXX");
    if (mkdtemp(choices->folder) == NULL) {
        choices->folder[0] = 0;
        return qe_error_set(error_out, QE_ERROR_IO, "name a file with --set train.algorithms=FILE",
                            "no folder for a file of algorithms below /tmp");
    }
    snprintf(settings->train.algorithms, sizeof settings->train.algorithms, "%s/%s", choices->folder, CHOICES_FILE);
    return QE_OK;
}

void qe_bench_choices_close(qe_bench_choices *choices) {
    char path[sizeof choices->folder + sizeof CHOICES_FILE + 1];
    if (choices->folder[0] == 0) return;
    snprintf(path, sizeof path, "%s/%s", choices->folder, CHOICES_FILE);
    (void)unlink(path); /* it may not have been made */
    (void)rmdir(choices->folder);
    choices->folder[0] = 0;
}

/* Memory and a stream of a device of its own, for one measurement. */
typedef struct ceiling {
    const qe_backend *backend;
    qe_device *device;
    qe_stream *stream;
    void *a, *b, *c;
    float *scale;
    uint64_t bytes;
} ceiling;

/* Codes that are never a NaN or an Inf of a format, and moderate; or fp32 values. */
static void random_operand(void *values, uint64_t bytes, int codes) {
    uint64_t state = 1;
    if (!codes) fill_matrix(values, bytes / sizeof(float), 1);
    for (uint64_t i = 0; codes && i < bytes; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        ((uint8_t *)values)[i] = (uint8_t)(state >> 56) & 0xbf;
    }
}

static qe_status ceiling_fill(ceiling *c, qe_error *error_out) {
    static const float one = 1.0f;
    void *values = malloc((size_t)c->bytes);
    if (values == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for random values");
    random_operand(values, c->bytes, c->backend->numerics.operands == QE_OPERANDS_CODES);
    qe_status status = c->backend->memory->write(c->device, c->a, values, c->bytes, error_out);
    if (status == QE_OK) status = c->backend->memory->write(c->device, c->b, values, c->bytes, error_out);
    if (status == QE_OK) status = c->backend->memory->write(c->device, c->scale, &one, sizeof one, error_out);
    free(values);
    return status;
}

static qe_status ceiling_open(ceiling *c, qe_device_kind device, uint32_t side, qe_error *error_out) {
    char identity[160];
    void **parts[] = {&c->a, &c->b, &c->c, (void **)&c->scale};
    c->backend = qe_device_backend(device);
    c->bytes = (uint64_t)side * side * sizeof(float);
    QE_TRY(c->backend->open(&c->device, error_out));
    qe_device_join(device, c->device, identity, sizeof identity);
    qe_device_tune(device, c->device);
    QE_TRY(c->backend->stream->create(c->device, "ceiling", &c->stream, error_out));
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        QE_TRY(c->backend->memory->alloc(c->device, c->bytes, parts[i], error_out));
    return ceiling_fill(c, error_out);
}

static void ceiling_close(ceiling *c) {
    void *parts[] = {c->a, c->b, c->c, c->scale};
    if (c->device == NULL) return;
    if (c->stream != NULL) c->backend->stream->destroy(c->stream);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i] != NULL) c->backend->memory->release(c->device, parts[i]);
    c->backend->close(c->device);
}

/* Seconds of one op, in a row of several. The first row warms up. */
static qe_status ceiling_op(ceiling *c, const qe_op *op, double *seconds_out, qe_error *error_out) {
    enum { SAMPLES = 7, TURNS = 8 };
    double samples[SAMPLES];
    QE_TRY(c->backend->prepare(c->device, op, error_out));
    for (int s = -1; s < SAMPLES; s++) {
        double begin = qe_seconds_now();
        for (int i = 0; i < TURNS; i++) QE_TRY(c->backend->stream->submit(c->stream, op));
        QE_TRY(c->backend->stream->sync(c->stream, error_out));
        if (s >= 0) samples[s] = qe_seconds_now() - begin;
    }
    *seconds_out = qe_bench_median(samples, SAMPLES) / TURNS;
    return QE_OK;
}

static qe_status ceiling_movements(ceiling *c, qe_bench_ceilings *out, qe_error *error_out) {
    double seconds;
    qe_op copy = {.kind = QE_OP_COPY}, sum = {.kind = QE_OP_ACCUMULATE};
    copy.args.copy = (qe_args_copy){.from = c->a, .to = c->c, .bytes = c->bytes};
    sum.args.accumulate = (qe_args_accumulate){.from = c->a, .to = c->c, .count = c->bytes / sizeof(float)};
    QE_TRY(ceiling_op(c, &copy, &seconds, error_out));
    out->copy_bytes = 2.0 * (double)c->bytes / seconds;
    QE_TRY(ceiling_op(c, &sum, &seconds, error_out));
    out->sum_bytes = 3.0 * (double)c->bytes / seconds;
    return QE_OK;
}

static qe_status ceiling_rates(ceiling *c, uint32_t side, qe_bench_ceilings *out, qe_error *error_out) {
    int codes = c->backend->numerics.operands == QE_OPERANDS_CODES;
    qe_qtensor operand = {.rows = side, .columns = side, .codes = c->a,
                          .format = (uint8_t)(codes ? QE_FORMAT_E4M3 : QE_FORMAT_FP32),
                          .scale_inv = codes ? c->scale : NULL};
    qe_op product = {.kind = QE_OP_LINEAR};
    product.args.linear = (qe_args_linear){.x = operand, .w = operand, .y = c->c, .rows = side, .in = side,
                                           .out = side, .accumulation = QE_ACCUMULATE_FAST};
    product.args.linear.w.codes = c->b;
    double seconds;
    QE_TRY(ceiling_op(c, &product, &seconds, error_out));
    out->product_flops = 2.0 * side * side * side / seconds;
    return ceiling_movements(c, out, error_out);
}

qe_status qe_bench_run_ceilings(qe_device_kind device, qe_bench_ceilings *ceilings_out, qe_error *error_out) {
    uint32_t side = qe_device_is_gpu(device) ? 8192 : 1024; /* large enough that nothing but the rate counts */
    ceiling c = {.backend = NULL};
    if (device == QE_DEVICE_CHECK) device = QE_DEVICE_HOST; /* what it looks at */
    qe_status status = ceiling_open(&c, device, side, error_out);
    if (status == QE_OK) status = ceiling_rates(&c, side, ceilings_out, error_out);
    ceiling_close(&c);
    return status;
}
