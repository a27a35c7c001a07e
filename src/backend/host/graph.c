/* graph.c - a recording becomes a graph, and a launch puts one item into the ring of each stream that takes part.
 *
 * Lanes meet at signals: counters that rise to the number of the launch, so launches may queue. A lane's stream runs
 * them in order, and a launch on another stream than the one before waits for that one, as launches of one CUDA graph
 * do; so every signal rises through all numbers in order. */
#include "backend/host/graph.h"

#include <stdlib.h>

#include "backend/host/recording.h"
#include "base/assert.h"

/* ------------------------------------------------------------------------------------------------- from a recording */

/* Which steps a launch has to take: ops, the waits that something comes behind, and the records they wait for. All
 * waits of a record come after it, so one walk from the end finds them. What is left comes before the end of the first
 * lane, whose last waits are the way back of the others. */
static void recording_trim(host_recording *recording) {
    int goes_on[QE_STREAMS_MAX] = {1};
    for (uint64_t i = recording->steps_count; i-- > 0;) {
        host_step *step = &recording->steps[i];
        if (step->kind == STEP_OP) step->is_node = 1;
        if (step->kind == STEP_WAIT) step->is_node = goes_on[step->lane];
        if (step->kind == STEP_WAIT && step->is_node) recording->steps[step->what.source].is_node = 1;
        goes_on[step->lane] |= step->is_node;
    }
}

typedef struct graph_sizes {
    uint64_t nodes[QE_STREAMS_MAX]; /* per recorded lane */
    uint64_t nodes_count, signals_count, ops;
    uint32_t lanes; /* those that have nodes, and the first */
} graph_sizes;

static graph_sizes recording_measure(host_recording *recording) {
    graph_sizes sizes = {0};
    for (uint64_t i = 0; i < recording->steps_count; ++i) {
        host_step *step = &recording->steps[i];
        if (!step->is_node) continue;
        ++sizes.nodes[step->lane];
        ++sizes.nodes_count;
        sizes.ops += step->kind == STEP_OP;
        if (step->kind == STEP_RECORD) step->what.record.signal = sizes.signals_count++;
    }
    for (uint32_t lane = 0; lane < recording->lanes_count; ++lane) sizes.lanes += lane == 0 || sizes.nodes[lane] > 0;
    return sizes;
}

QE_STATIC_ASSERT(sizeof(qe_graph) % _Alignof(host_lane) == 0, "lanes lie behind the graph");
QE_STATIC_ASSERT(sizeof(host_lane) % _Alignof(host_node) == 0, "nodes lie behind the lanes");
QE_STATIC_ASSERT(sizeof(host_node) % _Alignof(host_counter) == 0, "signals lie behind the nodes");

/* All signals, or none. */
static int signals_init(qe_graph *graph, uint64_t count) {
    for (graph->signals_count = 0; graph->signals_count < count; ++graph->signals_count)
        if (qe_host_counter_init(&graph->signals[graph->signals_count]) != 0) {
            while (graph->signals_count > 0) qe_host_counter_deinit(&graph->signals[--graph->signals_count]);
            return -1;
        }
    return 0;
}

static qe_graph *graph_allocate(qe_device *device, const graph_sizes *sizes) {
    const uint64_t bytes = sizeof(qe_graph) + sizes->lanes * sizeof(host_lane) +
                           sizes->nodes_count * sizeof(host_node) + sizes->signals_count * sizeof(host_counter);
    qe_graph *graph = calloc(1, bytes);
    if (!graph) return NULL;
    graph->device = device;
    graph->lanes = (host_lane *)(graph + 1);
    host_node *nodes = (host_node *)(graph->lanes + sizes->lanes);
    graph->signals = (host_counter *)(nodes + sizes->nodes_count);
    graph->info = (qe_graph_info){.ops = (uint32_t)sizes->ops, .lanes = sizes->lanes, .bytes = bytes};
    if (signals_init(graph, sizes->signals_count) == 0) return graph;
    free(graph);
    return NULL;
}

static host_node node_of(const host_recording *recording, const host_step *step, host_counter *signals) {
    switch (step->kind) {
        case STEP_OP: return (host_node){.kind = NODE_OP, .what.op = step->what.op};
        case STEP_RECORD: return (host_node){.kind = NODE_RAISE, .what.signal = &signals[step->what.record.signal]};
        case STEP_WAIT: break;
    }
    const host_step *source = &recording->steps[step->what.source];
    return (host_node){.kind = NODE_WAIT, .what.signal = &signals[source->what.record.signal]};
}

/* Steps in the order of submission become nodes per lane. */
static void graph_fill(qe_graph *graph, const host_recording *recording, const graph_sizes *sizes) {
    host_lane *lanes[QE_STREAMS_MAX] = {0};
    host_node *nodes = (host_node *)(graph->lanes + sizes->lanes);
    uint32_t used = 0;
    for (uint32_t lane = 0; lane < recording->lanes_count; ++lane) {
        if (lane > 0 && sizes->nodes[lane] == 0) continue;
        lanes[lane] = &graph->lanes[used++];
        *lanes[lane] = (host_lane){.nodes = nodes, .stream = recording->lanes[lane].stream};
        nodes += sizes->nodes[lane];
    }
    for (uint64_t i = 0; i < recording->steps_count; ++i) {
        const host_step *step = &recording->steps[i];
        if (!step->is_node) continue;
        host_lane *lane = lanes[step->lane];
        lane->nodes[lane->count++] = node_of(recording, step, graph->signals);
    }
}

static qe_status host_graph_end(qe_stream *stream, qe_graph **graph_out, qe_error *error_out) {
    host_recording *recording = NULL;
    qe_status status = qe_host_recording_check(stream, &recording, error_out);
    if (!recording) return status; /* the stream began none: nothing has ended */
    qe_graph *graph = NULL;
    if (status == QE_OK) {
        recording_trim(recording);
        const graph_sizes sizes = recording_measure(recording);
        graph = graph_allocate(stream->device, &sizes);
        if (graph) graph_fill(graph, recording, &sizes);
        else status = qe_error_set(error_out, QE_ERROR_MEMORY, "free memory or record smaller graphs",
                                   "no memory for a graph of %llu ops", (unsigned long long)sizes.ops);
    }
    qe_host_recording_close(recording, status == QE_OK);
    if (status == QE_OK) *graph_out = graph;
    return status;
}

static void host_graph_abandon(qe_stream *stream) {
    if (stream->recording) qe_host_recording_close(stream->recording, 0);
}

/* ------------------------------------------------------------------------------------------------------- launching */

qe_status qe_host_lane_run(const qe_device *device, const host_lane *lane, uint64_t launch, qe_op_kind *failed_out) {
    qe_status first = QE_OK;
    for (const host_node *node = lane->nodes, *end = node + lane->count; node < end; ++node) {
        if (node->kind == NODE_RAISE) qe_host_counter_raise(node->what.signal, launch);
        if (node->kind == NODE_WAIT) qe_host_counter_wait(node->what.signal, launch);
        if (node->kind != NODE_OP) continue;
        const qe_status status = qe_host_op_run(device, &node->what.op);
        if (status == QE_OK || first != QE_OK) continue;
        first = status;
        *failed_out = node->what.op.kind;
    }
    return first;
}

/* Where a lane runs: the first on the launching stream, the others where they were recorded. If one of them was
 * recorded on the launching stream, it changes places with the first: two lanes of one stream would wait for each
 * other. */
static qe_stream *lane_stream(const qe_graph *graph, uint32_t lane, qe_stream *launching) {
    if (lane == 0) return launching;
    qe_stream *own = graph->lanes[lane].stream;
    return own == launching ? graph->lanes[0].stream : own;
}

/* Every stream that would run a lane runs. */
static qe_status launch_check(const qe_graph *graph, qe_stream *stream) {
    if (stream->device != graph->device) return QE_ERROR_ARGUMENT;
    if (stream->recording)
        return qe_host_recording_spoil(stream->recording, QE_ERROR_UNSUPPORTED, "launch it outside recordings",
                                       "a graph was launched on stream '%s' while it recorded", stream->name);
    for (uint32_t lane = 1; lane < graph->info.lanes; ++lane)
        if (lane_stream(graph, lane, stream)->recording) return QE_ERROR_ARGUMENT;
    return QE_OK;
}

static qe_status host_graph_launch(qe_graph *graph, qe_stream *stream) {
    QE_TRY(launch_check(graph, stream));
    const host_lane *first = &graph->lanes[0];
    if (first->tail && first->tail != stream->progress)
        qe_host_item_submit(stream, (ring_item){.kind = ITEM_WAIT, .what.progress = first->tail,
                                                .position = first->tail_position});
    const uint64_t launch = ++graph->launches;
    for (uint32_t i = 0; i < graph->info.lanes; ++i) {
        host_lane *lane = &graph->lanes[i];
        qe_stream *runs = lane_stream(graph, i, stream);
        qe_host_item_submit(runs, (ring_item){.kind = ITEM_LANE, .what.lane = lane, .position = launch});
        lane->tail = runs->progress;
        lane->tail_position = runs->given;
    }
    return QE_OK;
}

/* A thread may still be leaving a signal whose value has let the others go on. */
static void host_graph_destroy(qe_graph *graph) {
    if (!graph) return;
    for (uint32_t lane = 0; lane < graph->info.lanes; ++lane)
        if (graph->lanes[lane].tail)
            qe_host_counter_wait(&graph->lanes[lane].tail->done, graph->lanes[lane].tail_position);
    for (uint64_t i = 0; i < graph->signals_count; ++i) qe_host_counter_deinit(&graph->signals[i]);
    free(graph);
}

static qe_graph_info host_graph_info(const qe_graph *graph) { return graph->info; }

const qe_graph_ops qe_host_graphs = {
    .size = sizeof(qe_graph_ops),
    .begin = qe_host_recording_begin,
    .end = host_graph_end,
    .abandon = host_graph_abandon,
    .launch = host_graph_launch,
    .destroy = host_graph_destroy,
    .info = host_graph_info,
};
