/* bench_layer.c - `qeffect bench layer`: forward, input gradient and weight gradient of one layer, as one graph and op
 * by op, with the floor that the device's own ceilings set, taken in the same run. */
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/seconds.h"
#include "cli/bench.h"
#include "cli/bench_layer.h"

static const double batch_s = 0.05; /* between two synchronisations: long against what they cost */

enum { SAMPLES_MAX = 4096 };

typedef qe_status layer_submit(qe_layer *layer, uint32_t set);

/* Seconds of one turn of `count`, sets in rotation. */
static qe_status time_batch(qe_layer *layer, layer_submit *submit, uint64_t count, double *seconds_out,
                            qe_error *error_out) {
    double begin = qe_seconds_now();
    for (uint64_t i = 0; i < count; i++) QE_TRY(submit(layer, (uint32_t)(i % layer->options.sets)));
    QE_TRY(qe_layer_sync(layer, error_out));
    *seconds_out = (qe_seconds_now() - begin) / (double)count;
    return QE_OK;
}

static qe_bench_figure figure_of(double *samples, size_t count, double seconds) {
    qe_bench_figure figure = {.samples = count, .seconds = seconds};
    figure.median_ms = 1e3 * qe_bench_median(samples, count); /* sorts */
    figure.low_ms = 1e3 * samples[count / 4];
    figure.high_ms = 1e3 * samples[count - 1 - count / 4];
    return figure;
}

/* What the device ran at while samples were taken. */
typedef struct clock_log {
    double sm_mhz[SAMPLES_MAX], power_w[SAMPLES_MAX];
    size_t count;
} clock_log;

static void clock_note(qe_layer *layer, clock_log *log) {
    qe_device_clocks now;
    if (!qe_device_clocks_of(layer->options.device, layer->device, &now)) return;
    log->sm_mhz[log->count] = now.sm_mhz;
    log->power_w[log->count++] = now.power_w;
}

qe_status qe_bench_sustained(qe_layer *layer, layer_submit *submit, double seconds, qe_bench_figure *figure_out,
                             qe_error *error_out) {
    double once, samples[SAMPLES_MAX], begin;
    clock_log log = {.count = 0};
    size_t count = 0;
    for (int warm = 0; warm < 3; warm++) QE_TRY(time_batch(layer, submit, layer->options.sets, &once, error_out));
    uint64_t turns = (uint64_t)(batch_s / once) + 1;
    begin = qe_seconds_now();
    while (count < SAMPLES_MAX && (count < 3 || qe_seconds_now() - begin < seconds)) {
        QE_TRY(time_batch(layer, submit, turns, &samples[count++], error_out));
        clock_note(layer, &log);
    }
    *figure_out = figure_of(samples, count, qe_seconds_now() - begin);
    if (log.count == 0) return QE_OK;
    figure_out->sm_mhz = qe_bench_median(log.sm_mhz, log.count);
    figure_out->power_w = qe_bench_median(log.power_w, log.count);
    return QE_OK;
}

/* One op of every set, again and again, as a graph: what a kernel costs among others, without the host. */
static qe_status op_graph(qe_layer *layer, uint32_t op, uint32_t turns, qe_graph **graph_out, qe_error *error_out) {
    const qe_graph_ops *graphs = layer->backend->graph;
    QE_TRY(graphs->begin(layer->stream, error_out));
    qe_status status = QE_OK;
    for (uint32_t i = 0; status == QE_OK && i < turns; i++)
        status = layer->backend->stream->submit(layer->stream, &layer->set[i % layer->options.sets].ops[op]);
    if (status == QE_OK) return graphs->end(layer->stream, graph_out, error_out);
    graphs->abandon(layer->stream);
    return qe_error_set(error_out, status, NULL, "an op could not be recorded");
}

/* Microseconds of one of the `turns` that a graph holds; the graph goes. */
static qe_status time_graph(qe_layer *layer, qe_graph *graph, uint32_t turns, double *us_out, qe_error *error_out) {
    enum { SAMPLES = 9 };
    double samples[SAMPLES];
    qe_status status = QE_OK;
    for (int i = -1; status == QE_OK && i < SAMPLES; i++) { /* the first is a warm-up */
        double begin = qe_seconds_now();
        status = layer->backend->graph->launch(graph, layer->stream);
        if (status == QE_OK) status = qe_layer_sync(layer, error_out);
        if (i >= 0) samples[i] = (qe_seconds_now() - begin) / turns;
    }
    layer->backend->graph->destroy(graph);
    QE_TRY(status);
    *us_out = 1e6 * qe_bench_median(samples, SAMPLES);
    return QE_OK;
}

static qe_status time_op(qe_layer *layer, uint32_t op, qe_bench_op *out, qe_error *error_out) {
    enum { TURNS = 32 };
    double us;
    qe_graph *graph = NULL;
    const qe_op *first = &layer->set[0].ops[op];
    QE_TRY(op_graph(layer, op, TURNS, &graph, error_out));
    QE_TRY(time_graph(layer, graph, TURNS, &us, error_out));
    *out = (qe_bench_op){
        .kind = first->kind, .title = qe_op_title(first), .work = qe_layer_work_of(layer, first), .us = us};
    out->phase = op < layer->set[0].input_begin ? 'F' : op < layer->set[0].weight_begin ? 'I' : 'W';
    return QE_OK;
}

qe_status qe_bench_layer_ops(qe_layer *layer, qe_bench_layer *out, qe_error *error_out) {
    out->op_count = layer->set[0].op_count;
    for (uint32_t i = 0; i < out->op_count; i++) QE_TRY(time_op(layer, i, &out->ops[i], error_out));
    return QE_OK;
}

/* Host time of a launch, while the device is busy behind: single launches, because one in a while is disturbed. Each
 * graph is under way once, because a full queue would make the host wait; the first of a round, which wakes an idle
 * chip, is not counted. */
static qe_status time_host(qe_layer *layer, qe_bench_layer *out, qe_error *error_out) {
    enum { ROUNDS = 64 }; /* what else the host does comes and goes for milliseconds */
    double samples[QE_LAYER_SETS_MAX * ROUNDS];
    uint32_t sets = layer->options.sets, count = 0;
    for (uint32_t i = 0; i < sets * ROUNDS; i++) {
        double begin = qe_seconds_now();
        QE_TRY(qe_layer_launch(layer, i % sets));
        if (i % sets != 0 || sets == 1) samples[count++] = qe_seconds_now() - begin;
        if (i % sets == sets - 1) QE_TRY(qe_layer_sync(layer, error_out));
    }
    out->launch_us = 1e6 * qe_bench_median(samples, count); /* sorts */
    out->launch_low_us = 1e6 * samples[count / 4];
    out->launch_high_us = 1e6 * samples[count - 1 - count / 4];
    return QE_OK;
}

/* Both guards alone, as a graph of many: the host's launch and its wait, some 20 us, must not count among them. */
static qe_status time_guards(qe_layer *layer, double *guards_us_out, qe_error *error_out) {
    enum { PAIRS = 512 };
    qe_graph *graph = NULL;
    QE_TRY(layer->backend->graph->begin(layer->stream, error_out));
    qe_status status = QE_OK;
    for (int i = 0; status == QE_OK && i < PAIRS; i++) {
        status = layer->backend->stream->submit(layer->stream, &layer->head_guard);
        if (status == QE_OK) status = layer->backend->stream->submit(layer->stream, &layer->tail_guard);
    }
    if (status != QE_OK) {
        layer->backend->graph->abandon(layer->stream);
        return status;
    }
    QE_TRY(layer->backend->graph->end(layer->stream, &graph, error_out));
    return time_graph(layer, graph, PAIRS, guards_us_out, error_out);
}

/* A run of one op, for ceilings. */
static qe_status time_alone(qe_layer *layer, const qe_op *op, double *seconds_out, qe_error *error_out) {
    enum { TURNS = 8, SAMPLES = 7 };
    double samples[SAMPLES];
    QE_TRY(layer->backend->prepare(layer->device, op, error_out));
    for (int s = -1; s < SAMPLES; s++) {
        double begin = qe_seconds_now();
        for (int i = 0; i < TURNS; i++) QE_TRY(layer->backend->stream->submit(layer->stream, op));
        QE_TRY(qe_layer_sync(layer, error_out));
        if (s >= 0) samples[s] = (qe_seconds_now() - begin) / TURNS;
    }
    *seconds_out = qe_bench_median(samples, SAMPLES);
    return QE_OK;
}

typedef struct ceiling_memory {
    void *a, *b, *c;
} ceiling_memory;

/* A square product, large enough that nothing but the matrix unit counts, of the operands that the layer has. */
static qe_status time_square(qe_layer *layer, const ceiling_memory *memory, uint32_t side, double *rate_out,
                             qe_error *error_out) {
    double seconds;
    qe_op op = {.kind = QE_OP_LINEAR};
    qe_op parts[QE_OP_PARTS_MAX];
    (void)qe_op_parts(&layer->set[0].ops[1], parts);
    QE_ASSERT(parts[0].kind == QE_OP_LINEAR);
    op.args.linear = parts[0].args.linear;
    op.args.linear.x.codes = memory->a;
    op.args.linear.w.codes = memory->b;
    op.args.linear.x.rows = op.args.linear.x.columns = op.args.linear.w.rows = op.args.linear.w.columns = side;
    op.args.linear.y = memory->c;
    op.args.linear.residual = NULL;
    op.args.linear.rows = op.args.linear.in = op.args.linear.out = side;
    QE_TRY(time_alone(layer, &op, &seconds, error_out));
    *rate_out = 2.0 * side * side * side / seconds;
    return QE_OK;
}

/* A device's operands are of any format. A host's are fp32: none of them subnormal, nor a product of two, because a
 * processor takes many times as long for such. */
static qe_status random_bytes(qe_layer *layer, void *to, uint64_t bytes, qe_error *error_out) {
    const int is_fp32 = layer->options.device == QE_DEVICE_HOST;
    uint8_t *host = malloc((size_t)bytes);
    uint64_t state = 1;
    if (host == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for random bytes");
    for (uint64_t i = 0; i < bytes; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        host[i] = (uint8_t)(state >> 56) & 0xbf; /* never a NaN or an Inf of a format */
        if (is_fp32 && i % sizeof(float) == sizeof(float) - 1) host[i] |= 0x3c; /* an exponent of -7 to 0 */
    }
    qe_status status = layer->backend->memory->write(layer->device, to, host, (size_t)bytes, error_out);
    free(host);
    return status;
}

qe_status qe_bench_layer_ceilings(qe_layer *layer, qe_bench_ceilings *out, qe_error *error_out) {
    int on_host = layer->options.device == QE_DEVICE_HOST;
    uint32_t side = on_host ? 1024 : 8192;
    uint64_t bytes = (uint64_t)side * side * sizeof(float);
    const qe_memory_ops *memory = layer->backend->memory;
    ceiling_memory m = {0};
    double seconds = 0;
    qe_status status = memory->alloc(layer->device, bytes, &m.a, error_out);
    if (status == QE_OK) status = memory->alloc(layer->device, bytes, &m.b, error_out);
    if (status == QE_OK) status = memory->alloc(layer->device, bytes, &m.c, error_out);
    if (status == QE_OK) status = random_bytes(layer, m.a, bytes, error_out);
    if (status == QE_OK) status = random_bytes(layer, m.b, bytes, error_out);
    if (status == QE_OK) status = time_square(layer, &m, side, &out->product_flops, error_out);
    qe_op copy = {.kind = QE_OP_COPY};
    copy.args.copy = (qe_args_copy){.from = m.a, .to = m.c, .bytes = bytes};
    if (status == QE_OK) status = time_alone(layer, &copy, &seconds, error_out);
    out->copy_bytes = 2.0 * (double)bytes / seconds;
    void *all[] = {m.a, m.b, m.c};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] != NULL) memory->release(layer->device, all[i]);
    return status;
}

static int is_attention(qe_op_kind kind) {
    return kind == QE_OP_ATTENTION || kind == QE_OP_ATTENTION_BACKWARD;
}

/* Sum over ops of the longer of arithmetic and bytes, and what a graph needs between two kernels. Attention's ceiling
 * is what its library reaches alone. */
double qe_bench_layer_floor_ms(const qe_bench_layer *bench, const qe_bench_ceilings *ceilings) {
    const double gap_s = 0.8e-6; /* a further node of a graph, as measured on an H200 */
    double seconds = 0;
    for (uint32_t i = 0; i < bench->op_count; i++) {
        const qe_bench_op *op = &bench->ops[i];
        double arithmetic = op->work.flops / ceilings->product_flops, bytes = op->work.bytes / ceilings->copy_bytes;
        double own = is_attention(op->kind) ? 1e-6 * op->us : arithmetic > bytes ? arithmetic : bytes;
        seconds += own + gap_s;
    }
    return 1e3 * seconds;
}

qe_status qe_bench_layer_measure(qe_layer *layer, double seconds, int with_eager, qe_bench_layer *out,
                                 qe_error *error_out) {
    out->capture_s = layer->capture_s;
    out->graph_bytes = layer->graph_bytes;
    /* Before the long run, which leaves the chip at a lower clock: guards are latency alone. */
    QE_TRY(time_guards(layer, &out->guards_us, error_out));
    QE_TRY(time_host(layer, out, error_out));
    QE_TRY(qe_bench_sustained(layer, qe_layer_launch, seconds, &out->captured, error_out));
    return with_eager ? qe_bench_sustained(layer, qe_layer_submit, seconds, &out->eager, error_out) : QE_OK;
}
