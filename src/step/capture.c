/* capture.c - turns a bound plan into graphs, and keeps their seals.
 *
 * A segment is a run of ops that one launch replaces. For the units layer and action it lies on the compute stream and
 * leaves out ops that name their microbatch (copies of tokens and of the loss), so that segments in the same slots have
 * the same ops and share a graph. For the whole step it covers all streams; edges with the caller stay outside. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/seconds.h"
#include "step/guard.h"

static const qe_op *op_of(const qe_binding *binding, uint32_t item) {
    return &binding->ops[binding->rank_plan->item_op[item]];
}

static const qe_unit *unit_of(const qe_binding *binding, uint32_t item) {
    return &binding->rank_plan->units[binding->rank_plan->item_unit[item]];
}

/* Items with the same key may share a segment; 0: the item stays eager. */
static uint64_t segment_key(const qe_rank *rank, const qe_binding *binding, uint32_t item) {
    const qe_item *at = &binding->rank_plan->program.items[item];
    if (at->kind != QE_ITEM_OP || at->stream != binding->rank_plan->stream_compute) return 0;
    const qe_op *op = op_of(binding, item);
    if (op->per_microbatch) return 0;
    uint64_t layer = rank->team->options.capture == QE_CAPTURE_LAYER ? op->layer : 0;
    switch ((qe_unit_kind)unit_of(binding, item)->kind) {
        case QE_UNIT_FILL:
        case QE_UNIT_F:
        case QE_UNIT_I:
        case QE_UNIT_W: return (binding->rank_plan->item_unit[item] + UINT64_C(16)) << 16 | layer;
        case QE_UNIT_TAKE: return 1;
        case QE_UNIT_COMMIT:
        case QE_UNIT_FOLD: return 2;
        default: return 0;
    }
}

static qe_segment *add_segment(qe_binding *binding, uint32_t first, uint32_t end) {
    qe_segment *segment = &binding->segments[binding->segment_count];
    *segment = (qe_segment){.first = first, .end = end};
    for (uint32_t item = first; item < end; item++)
        segment->gradient_copies += unit_of(binding, item)->kind == QE_UNIT_GRAD_OUT &&
                                    binding->rank_plan->program.items[item].kind == QE_ITEM_OP;
    binding->item_segment[first] = binding->segment_count++;
    return segment;
}

static void cut_runs(const qe_rank *rank, qe_binding *binding) {
    uint32_t count = binding->rank_plan->program.item_count;
    for (uint32_t first = 0; first < count;) {
        uint64_t key = segment_key(rank, binding, first);
        uint32_t end = first + 1;
        while (key != 0 && end < count && segment_key(rank, binding, end) == key) end++;
        if (key != 0 && end - first > 1) add_segment(binding, first, end); /* one op gains nothing as a graph */
        first = end;
    }
}

static int on_caller(const qe_binding *binding, uint32_t item) {
    return binding->rank_plan->program.items[item].stream == binding->rank_plan->stream_caller;
}

/* Between the caller's load and the commit lies one graph, from the commit to the caller's read another. */
static void cut_step(qe_binding *binding) {
    const qe_rank_plan *plan = binding->rank_plan;
    uint32_t first = 0, commit = plan->commit_begin, exit = plan->exit_begin;
    while (first < commit && on_caller(binding, first)) first++;
    if (first < commit) add_segment(binding, first, commit)->whole_step = 1;
    if (commit < exit) add_segment(binding, commit, exit)->whole_step = 1;
}

/* An edge with the caller's stream: it waits for the caller's event, or its event is what the caller waits for. */
static void find_caller_edges(const qe_binding *binding) {
    const qe_program *program = &binding->rank_plan->program;
    for (uint32_t i = 0; i < program->item_count; i++) {
        if (!on_caller(binding, i) || program->items[i].kind == QE_ITEM_OP) continue;
        for (uint32_t other = 0; other < program->item_count; other++) {
            const qe_item *at = &program->items[other];
            if ((at->kind == QE_ITEM_WAIT || at->kind == QE_ITEM_RECORD) && at->event == program->items[i].event)
                binding->caller_edge[other] = 1;
        }
    }
}

static int in_segment(const qe_binding *binding, const qe_segment *segment, uint32_t item) {
    return item >= segment->first && item < segment->end && !(segment->whole_step && binding->caller_edge[item]);
}

/* The comm streams join the recording at its beginning and come back at its end. */
static qe_status fork_lanes(qe_rank *rank, qe_binding *binding) {
    const qe_stream_ops *ops = rank->team->options.backend->stream;
    const qe_program *program = &binding->rank_plan->program;
    QE_TRY(
        ops->record(binding->streams[binding->rank_plan->stream_compute], binding->edge_events[program->stream_count]));
    for (uint32_t s = 0; s < program->stream_count; s++)
        if (program->streams[s].role == QE_STREAM_COMM)
            QE_TRY(ops->wait(binding->streams[s], binding->edge_events[program->stream_count]));
    return QE_OK;
}

static qe_status join_lanes(qe_rank *rank, qe_binding *binding) {
    const qe_stream_ops *ops = rank->team->options.backend->stream;
    const qe_program *program = &binding->rank_plan->program;
    for (uint32_t s = 0; s < program->stream_count; s++) {
        if (program->streams[s].role != QE_STREAM_COMM) continue;
        QE_TRY(ops->record(binding->streams[s], binding->edge_events[s]));
        QE_TRY(ops->wait(binding->streams[binding->rank_plan->stream_compute], binding->edge_events[s]));
    }
    return QE_OK;
}

static qe_status give_items(qe_rank *rank, qe_binding *binding, const qe_segment *segment) {
    if (segment->whole_step) QE_TRY(fork_lanes(rank, binding));
    for (uint32_t item = segment->first; item < segment->end; item++)
        if (in_segment(binding, segment, item)) QE_TRY(qe_binding_run_item(rank, binding, item));
    return segment->whole_step ? join_lanes(rank, binding) : QE_OK;
}

static qe_status record_graph(qe_rank *rank, qe_binding *binding, const qe_segment *segment, qe_sealed_graph *graph,
                              qe_error *error_out) {
    const qe_graph_ops *ops = rank->team->options.backend->graph;
    qe_stream *compute = binding->streams[binding->rank_plan->stream_compute];
    const qe_stream_ops *streams = rank->team->options.backend->stream;
    QE_TRY(ops->begin(compute, error_out));
    qe_status status = graph->guard_block != NULL ? streams->submit(compute, &graph->head_guard) : QE_OK;
    if (status == QE_OK) status = give_items(rank, binding, segment);
    if (status == QE_OK && graph->guard_block != NULL) status = streams->submit(compute, &graph->tail_guard);
    qe_status ended = ops->end(compute, &graph->graph, error_out); /* says in words what made it invalid */
    if (status == QE_OK || status == ended) return ended;
    if (ended == QE_OK) ops->destroy(graph->graph); /* else it is as if nothing was recorded, for another reason */
    return qe_error_set(error_out, status, NULL, "recording items %u to %u of rank %u failed", segment->first,
                        segment->end, rank->index);
}

/* Copies what the segment's ops are now; their order is that of the items. */
static uint32_t copy_ops(const qe_binding *binding, const qe_segment *segment, qe_op *ops_out) {
    uint32_t count = 0;
    for (uint32_t item = segment->first; item < segment->end; item++) {
        if (binding->rank_plan->program.items[item].kind != QE_ITEM_OP) continue;
        if (ops_out != NULL) ops_out[count] = *op_of(binding, item);
        count++;
    }
    return count;
}

static qe_status seal_graph(qe_rank *rank, qe_binding *binding, const qe_segment *segment, qe_error *error_out) {
    qe_sealed_graph *graph = &binding->graphs[binding->graph_count];
    graph->op_count = copy_ops(binding, segment, NULL);
    graph->sealed = calloc(graph->op_count + 1u, sizeof *graph->sealed);
    if (graph->sealed == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a graph's seal");
    copy_ops(binding, segment, graph->sealed);
    qe_status status = qe_guard_graph(rank, binding, segment, graph, error_out);
    if (status == QE_OK) status = record_graph(rank, binding, segment, graph, error_out);
    if (status == QE_OK) {
        binding->graph_count++;
        return QE_OK;
    }
    qe_guard_graph_release(rank, graph);
    free(graph->sealed);
    memset(graph, 0, sizeof *graph);
    return status;
}

/* First word in which two ops differ, as an offset into the op; sizeof the op where they are the same. */
static size_t first_difference(const qe_op *a, const qe_op *b) {
    for (size_t at = 0; at < sizeof *a; at += sizeof(uint64_t))
        if (memcmp((const char *)a + at, (const char *)b + at, sizeof(uint64_t)) != 0) return at;
    return sizeof *a;
}

/* The first op of the segment that is not what the graph holds; its item, or QE_NONE. */
static uint32_t broken_seal(const qe_binding *binding, const qe_segment *segment, const qe_sealed_graph *graph,
                            size_t *word_out) {
    uint32_t next = 0;
    for (uint32_t item = segment->first; item < segment->end; item++) {
        if (binding->rank_plan->program.items[item].kind != QE_ITEM_OP) continue;
        const qe_op *sealed = &graph->sealed[next++], *bound = op_of(binding, item);
        if (memcmp(sealed, bound, sizeof *sealed) == 0) continue;
        *word_out = first_difference(sealed, bound);
        return item;
    }
    return QE_NONE;
}

/* A graph that already holds exactly these ops and whose guards look at exactly these words: the same ops may stand for
 * other versioned objects in another place of the order. */
static uint32_t find_graph(const qe_binding *binding, const qe_segment *segment) {
    uint32_t count = copy_ops(binding, segment, NULL);
    size_t word;
    for (uint32_t g = 0; !segment->whole_step && g < binding->graph_count; g++)
        if (binding->graphs[g].op_count == count &&
            broken_seal(binding, segment, &binding->graphs[g], &word) == QE_NONE &&
            qe_guard_fits(segment, &binding->graphs[g]))
            return g;
    return QE_NONE;
}

static qe_status capture_segment(qe_rank *rank, qe_binding *binding, qe_segment *segment, qe_error *error_out) {
    QE_TRY(qe_guard_segment(rank, binding, segment, error_out));
    segment->graph = find_graph(binding, segment);
    if (segment->graph == QE_NONE) {
        segment->graph = binding->graph_count;
        QE_TRY(seal_graph(rank, binding, segment, error_out));
    }
    qe_guard_arm(segment, (uint32_t)(segment - binding->segments), &binding->graphs[segment->graph]);
    return segment->arm.args.copy.to == NULL ? QE_OK : qe_declare_arming(rank, &segment->arm, error_out);
}

static qe_status allocate(qe_rank *rank, qe_binding *binding, qe_error *error_out) {
    const qe_program *program = &binding->rank_plan->program;
    binding->segments = calloc(program->item_count + 1u, sizeof *binding->segments);
    binding->graphs = calloc(program->item_count + 1u, sizeof *binding->graphs);
    binding->item_segment = malloc((program->item_count + 1u) * sizeof *binding->item_segment);
    binding->caller_edge = calloc(program->item_count + 1u, sizeof *binding->caller_edge);
    binding->edge_events = calloc(program->stream_count + 1u, sizeof *binding->edge_events);
    if (!binding->segments || !binding->graphs || !binding->item_segment || !binding->caller_edge ||
        !binding->edge_events)
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the graphs of rank %u", rank->index);
    memset(binding->item_segment, 0xff, (program->item_count + 1u) * sizeof *binding->item_segment);
    find_caller_edges(binding); /* once: a launch must not look for them */
    for (uint32_t s = 0; s <= program->stream_count; s++)
        QE_TRY(rank->team->options.backend->stream->event_create(rank->device, &binding->edge_events[s], error_out));
    return QE_OK;
}

qe_status qe_binding_capture(qe_rank *rank, qe_binding *binding, qe_error *error_out) {
    if (binding->plan == NULL || rank->team->options.capture == QE_CAPTURE_NONE) return QE_OK;
    double begin_s = qe_seconds_now();
    qe_status status = allocate(rank, binding, error_out);
    if (status == QE_OK && rank->team->options.capture == QE_CAPTURE_STEP)
        cut_step(binding);
    else if (status == QE_OK)
        cut_runs(rank, binding);
    for (uint32_t i = 0; status == QE_OK && i < binding->segment_count; i++)
        status = capture_segment(rank, binding, &binding->segments[i], error_out);
    if (status != QE_OK) qe_binding_uncapture(rank, binding);
    binding->capture_s = qe_seconds_now() - begin_s;
    return status;
}

void qe_binding_uncapture(qe_rank *rank, qe_binding *binding) {
    const qe_backend *backend = rank->team->options.backend;
    for (uint32_t g = 0; g < binding->graph_count; g++) {
        backend->graph->destroy(binding->graphs[g].graph);
        qe_guard_graph_release(rank, &binding->graphs[g]);
        free(binding->graphs[g].sealed);
    }
    for (uint32_t i = 0; i < binding->segment_count; i++) {
        qe_declare_forget(rank, &binding->segments[i].arm);
        free(binding->segments[i].entries);
        qe_rank_host_free(rank, binding->segments[i].block);
    }
    for (uint32_t s = 0; binding->edge_events != NULL && s <= binding->rank_plan->program.stream_count; s++)
        if (binding->edge_events[s] != NULL) backend->stream->event_destroy(binding->edge_events[s]);
    free(binding->segments);
    free(binding->graphs);
    free(binding->item_segment);
    free(binding->caller_edge);
    free(binding->edge_events);
    binding->segments = NULL;
    binding->graphs = NULL;
    binding->item_segment = NULL;
    binding->caller_edge = NULL;
    binding->edge_events = NULL;
    binding->segment_count = binding->graph_count = 0;
}

const qe_segment *qe_binding_segment(const qe_binding *binding, uint32_t index) {
    if (binding->item_segment == NULL || binding->item_segment[index] == QE_NONE) return NULL;
    return &binding->segments[binding->item_segment[index]];
}

qe_status qe_binding_add_graphs(qe_binding *binding, qe_error *error_out) {
    binding->program = &binding->rank_plan->program;
    if (binding->segment_count == 0) return QE_OK;
    QE_TRY(qe_program_copy(binding->program, &binding->sealed_program, error_out));
    for (uint32_t g = 0; g < binding->segment_count; g++) {
        qe_object graph = {.kind = QE_OBJECT_GRAPH, .counter = 1, .weight = QE_NONE, .scale = QE_NONE};
        snprintf(graph.name, sizeof graph.name, "graph%u", g);
        QE_TRY(qe_program_add_object(&binding->sealed_program, &graph, NULL, error_out));
    }
    binding->program = &binding->sealed_program;
    return QE_OK;
}

static uint32_t graph_object(const qe_binding *binding, uint32_t graph) {
    return binding->rank_plan->program.object_count + graph;
}

void qe_binding_tell_captured(qe_binding *binding) {
    for (uint32_t g = 0; g < binding->segment_count; g++) {
        uint32_t object = graph_object(binding, g);
        qe_ledger_touch(binding->ledger, object, qe_ledger_counter(binding->ledger, object) + 1);
    }
}

static uint64_t word_at(const qe_op *op, size_t offset_bytes) {
    uint64_t word;
    memcpy(&word, (const char *)op + offset_bytes, sizeof word);
    return word;
}

uint32_t qe_segment_broken(const qe_binding *binding, const qe_segment *segment, qe_effect *launch_out) {
    const qe_sealed_graph *graph = &binding->graphs[segment->graph];
    size_t word = 0;
    uint32_t item = broken_seal(binding, segment, graph, &word);
    if (item == QE_NONE) return QE_NONE;
    uint32_t op = 0;
    for (uint32_t i = segment->first; i < item; i++) op += binding->rank_plan->program.items[i].kind == QE_ITEM_OP;
    int address = word >= offsetof(qe_op, args) &&
                  qe_op_is_address(op_of(binding, item)->kind, (uint32_t)(word - offsetof(qe_op, args)));
    *launch_out = (qe_effect){.kind = QE_EFFECT_GRAPH_LAUNCH,
                              .object = graph_object(binding, segment->graph),
                              .use = address ? QE_FROZEN_ADDRESS : QE_FROZEN_CONSTANT,
                              .begin = word_at(&graph->sealed[op], word),
                              .end = word_at(op_of(binding, item), word)};
    return item;
}

/* The caller's edges of a whole-step graph: waits go before the launch, records behind it. */
static qe_status caller_edges(qe_rank *rank, qe_binding *binding, const qe_segment *segment, qe_item_kind kind) {
    for (uint32_t item = segment->first; item < segment->end; item++)
        if (binding->rank_plan->program.items[item].kind == kind && binding->caller_edge[item])
            QE_TRY(qe_binding_run_item(rank, binding, item));
    return QE_OK;
}

qe_status qe_segment_launch(qe_rank *rank, qe_binding *binding, const qe_segment *segment) {
    const qe_backend *backend = rank->team->options.backend;
    const qe_sealed_graph *graph = &binding->graphs[segment->graph];
    qe_stream *compute = binding->streams[binding->rank_plan->stream_compute];
    if (segment->whole_step) QE_TRY(caller_edges(rank, binding, segment, QE_ITEM_WAIT));
    if (graph->guard_block != NULL) QE_TRY(backend->stream->submit(compute, &segment->arm));
    QE_TRY(backend->graph->launch(graph->graph, compute));
    return segment->whole_step ? caller_edges(rank, binding, segment, QE_ITEM_RECORD) : QE_OK;
}
