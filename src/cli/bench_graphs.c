/* bench_graphs.c - what a replay costs beside its ops: graphs of the size of an action whose ops do nothing. */
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/seconds.h"
#include "cli/bench.h"
#include "qeffect/host.h"

enum {
    OPS = 27, /* a forward of two decoder layers with its ends, an op of two parts counted as two */
    WORDS = 24, /* slots, weights, scales and cache keys at the head, and again at the tail */
    LAUNCHES = 64, /* in a row, before the stream is waited for: the ring never fills */
    ROUNDS = 101,
};

typedef struct graph_bench {
    const qe_backend *backend;
    qe_device *device;
    qe_stream *stream;
    qe_graph *graph;
    qe_op ops[OPS], sealed[OPS], arm, guard;
    uint64_t words[2 * WORDS], expected[2 * WORDS], block[2 * WORDS];
    const uint64_t *addresses[2 * WORDS];
    uint64_t launch;
    qe_guard_fault fault;
} graph_bench;

static void make_ops(graph_bench *b) {
    for (int i = 0; i < OPS; i++) b->ops[i] = (qe_op){.kind = QE_OP_COPY};
    for (int i = 0; i < 2 * WORDS; i++) b->addresses[i] = &b->words[i];
    memcpy(b->sealed, b->ops, sizeof b->sealed);
    b->arm = (qe_op){.kind = QE_OP_COPY};
    b->arm.args.copy = (qe_args_copy){.from = b->block, .to = b->expected, .bytes = sizeof b->block};
    b->guard = (qe_op){.kind = QE_OP_GUARD};
    b->guard.args.guard = (qe_args_guard){
        .words = b->addresses, .expected = b->expected, .launch = &b->launch, .fault = &b->fault, .count = 2 * WORDS};
}

static qe_status record(graph_bench *b, qe_error *error_out) {
    QE_TRY(b->backend->graph->begin(b->stream, error_out));
    for (int i = 0; i < OPS; i++) QE_TRY(b->backend->stream->submit(b->stream, &b->ops[i]));
    return b->backend->graph->end(b->stream, &b->graph, error_out);
}

static qe_status open_bench(graph_bench *b, qe_error *error_out) {
    QE_TRY(b->backend->open(&b->device, error_out));
    QE_TRY(b->backend->stream->create(b->device, "bench", &b->stream, error_out));
    make_ops(b);
    return record(b, error_out);
}

static void close_bench(graph_bench *b) {
    if (b->graph != NULL) b->backend->graph->destroy(b->graph);
    if (b->stream != NULL) b->backend->stream->destroy(b->stream);
    if (b->device != NULL) b->backend->close(b->device);
}

/* Seconds of the submitter for one launch, and from the first launch to the end of the last, per launch. */
static qe_status time_launches(graph_bench *b, double *submit_s, double *whole_s, qe_error *error_out) {
    double begin = qe_seconds_now();
    for (int i = 0; i < LAUNCHES; i++) {
        QE_TRY(b->backend->stream->submit(b->stream, &b->arm));
        QE_TRY(b->backend->graph->launch(b->graph, b->stream));
    }
    *submit_s = (qe_seconds_now() - begin) / LAUNCHES;
    QE_TRY(b->backend->stream->sync(b->stream, error_out));
    *whole_s = (qe_seconds_now() - begin) / LAUNCHES;
    return QE_OK;
}

static qe_status time_eager(graph_bench *b, double *submit_s, qe_error *error_out) {
    double begin = qe_seconds_now();
    for (int i = 0; i < LAUNCHES; i++)
        for (int op = 0; op < OPS; op++) QE_TRY(b->backend->stream->submit(b->stream, &b->ops[op]));
    *submit_s = (qe_seconds_now() - begin) / LAUNCHES;
    return b->backend->stream->sync(b->stream, error_out);
}

static qe_status time_host(graph_bench *b, double *seal_s, double *guard_s, qe_error *error_out) {
    int differs = 0;
    double begin = qe_seconds_now();
    for (int i = 0; i < LAUNCHES; i++)
        for (int op = 0; op < OPS; op++) {
            differs |= memcmp(&b->sealed[op], &b->ops[op], sizeof(qe_op)) != 0;
            __asm__ volatile("" : "+r"(differs) : : "memory"); /* compared every time */
        }
    *seal_s = (qe_seconds_now() - begin) / LAUNCHES;
    QE_ASSERT(!differs);
    begin = qe_seconds_now();
    for (int i = 0; i < LAUNCHES; i++) QE_TRY(b->backend->run(b->device, &b->guard, error_out));
    *guard_s = (qe_seconds_now() - begin) / LAUNCHES;
    return QE_OK;
}

static qe_status measure(graph_bench *b, qe_bench_graphs *out, qe_error *error_out) {
    double launch[ROUNDS], whole[ROUNDS], eager[ROUNDS], seal[ROUNDS], guard[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        QE_TRY(time_launches(b, &launch[i], &whole[i], error_out));
        QE_TRY(time_eager(b, &eager[i], error_out));
        QE_TRY(time_host(b, &seal[i], &guard[i], error_out));
    }
    *out = (qe_bench_graphs){.ops = OPS, .words = 2 * WORDS};
    out->launch_ns = 1e9 * qe_bench_median(launch, ROUNDS);
    out->seal_ns = 1e9 * qe_bench_median(seal, ROUNDS);
    out->replay_ns = out->launch_ns + out->seal_ns;
    out->eager_ns = 1e9 * qe_bench_median(eager, ROUNDS);
    out->node_ns = 1e9 * qe_bench_median(whole, ROUNDS) / OPS;
    out->guard_ns = 1e9 * qe_bench_median(guard, ROUNDS);
    return QE_OK;
}

qe_status qe_bench_graphs_measure(qe_bench_graphs *graphs_out, qe_error *error_out) {
    graph_bench *b = calloc(1, sizeof *b);
    if (b == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to time graphs");
    b->backend = qe_host_backend();
    qe_status status = open_bench(b, error_out);
    if (status == QE_OK) status = measure(b, graphs_out, error_out);
    close_bench(b);
    free(b);
    return status;
}
