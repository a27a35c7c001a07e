/* claims.c - what a captured graph really holds. Every node is claimed by the op that was being submitted when it came.
 * A node that came between two ops, and an op that left no node, make the recording invalid; at the end the graph is
 * walked: so do two ops that touch the same bytes, one of them writing, without a path of edges between them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "backend/cuda/device.h"
#include "base/assert.h"

static qe_status claim_add(qe_graph *graph, cudaGraphNode_t node, const qe_op *op) {
    enum { FIRST = 256 };
    if (graph->claim_count == graph->claim_capacity) {
        uint64_t wanted = graph->claim_capacity == 0 ? FIRST : 2 * graph->claim_capacity;
        cuda_claim *grown = realloc(graph->claims, wanted * sizeof *grown);
        if (grown == NULL) return QE_ERROR_MEMORY;
        graph->claims = grown;
        graph->claim_capacity = wanted;
    }
    graph->claims[graph->claim_count++] = (cuda_claim){.node = node, .op = op, .given = graph->ops};
    return QE_OK;
}

/* While it is recorded. */
static qe_status looked(const qe_graph *graph, cudaError_t code) {
    return qe_cuda_queued(graph->device, code, "looking at the captured graph");
}

static int is_claimed(const qe_graph *graph, cudaGraphNode_t node, uint64_t hint) {
    if (hint < graph->claim_count && graph->claims[hint].node == node) return 1; /* nodes come in order of creation */
    for (uint64_t i = 0; i < graph->claim_count; i++)
        if (graph->claims[i].node == node) return 1;
    return 0;
}

static qe_status claim_new(qe_graph *graph, cudaGraph_t captured, size_t count, const qe_op *op) {
    cudaGraphNode_t *nodes = malloc(count * sizeof *nodes);
    if (nodes == NULL) return QE_ERROR_MEMORY;
    qe_status status = looked(graph, cudaGraphGetNodes(captured, nodes, &count));
    for (size_t i = 0; status == QE_OK && i < count; i++)
        if (!is_claimed(graph, nodes[i], i)) status = claim_add(graph, nodes[i], op);
    free(nodes);
    return status;
}

/* The graph so far; NULL where the capture is no longer valid: its end will say why. */
static qe_status nodes_now(const qe_graph *graph, cudaGraph_t *captured_out, size_t *count_out) {
    enum cudaStreamCaptureStatus state;
    *captured_out = NULL;
    *count_out = graph->claim_count;
    QE_TRY(looked(graph, cudaStreamGetCaptureInfo(graph->origin->stream, &state, NULL, captured_out, NULL, NULL,
                                                  NULL)));
    if (state != cudaStreamCaptureStatusActive) *captured_out = NULL;
    if (*captured_out == NULL) return QE_OK;
    return looked(graph, cudaGraphGetNodes(*captured_out, NULL, count_out));
}

static qe_status refuse(qe_graph *graph, qe_status status, const char *remedy, const char *words, const char *what) {
    if (graph->refusal.status == QE_OK) qe_error_set(&graph->refusal, status, remedy, "%s%s", what, words);
    return status;
}

static const char NOBODYS[] = "the captured graph holds a node that no op made: something else was captured with them";
static const char NOBODYS_REMEDY[] = "submit everything through the stream's table";

static qe_status unclaimed(qe_graph *graph) {
    return refuse(graph, QE_CONTRACT, NOBODYS_REMEDY, NOBODYS, "");
}

qe_status qe_cuda_claim_begin(qe_graph *graph) {
    cudaGraph_t captured;
    size_t count;
    QE_TRY(nodes_now(graph, &captured, &count));
    return count > graph->claim_count ? unclaimed(graph) : QE_OK;
}

/* Work that is given but empty. */
static int makes_no_node(const qe_op *op) {
    if (op->kind == QE_OP_GUARD) return op->args.guard.count == 0;
    return op->kind == QE_OP_COPY && op->args.copy.bytes == 0;
}

qe_status qe_cuda_claim_end(qe_graph *graph, const qe_op *op) {
    cudaGraph_t captured;
    size_t count;
    graph->ops++;
    qe_status status = nodes_now(graph, &captured, &count);
    if (status == QE_OK && captured != NULL && count == graph->claim_count && !makes_no_node(op))
        return refuse(graph, QE_CONTRACT, "let its stream join the recording", " left no node in the captured graph: "
                      "its stream takes no part, so it ran at once", qe_op_name(op->kind));
    if (status == QE_OK && count > graph->claim_count) status = claim_new(graph, captured, count, op);
    if (status != QE_ERROR_MEMORY) return status;
    return refuse(graph, status, NULL, " could not be claimed: no memory", qe_op_name(op->kind));
}

/* An op as it was given once: its nodes are claims [first, last]. */
typedef struct graph_op {
    const qe_op *op;
    uint32_t given;
    uint64_t first, last;
} graph_op;

/* One range of one op, for a sweep over addresses. */
typedef struct touched {
    uintptr_t begin, end;
    uint32_t op; /* index into walk.ops */
    const qe_range *range;
} touched;

typedef struct walk {
    const qe_graph *graph;
    graph_op *ops;
    uint32_t op_count;
    uint64_t *reach; /* [claims][words]: bit j of row i: there is a path from j to i */
    uint64_t words;
    touched *touches;
    uint64_t touch_count;
    const qe_op *early, *late; /* the first two ops with no more than a programmatic edge between them; NULL: none */
} walk;

/* UINT64_MAX: nobody's. */
static uint64_t claim_of(const qe_graph *graph, cudaGraphNode_t node) {
    for (uint64_t i = 0; i < graph->claim_count; i++)
        if (graph->claims[i].node == node) return i;
    return UINT64_MAX;
}

static int by_target(const void *a, const void *b) {
    const uint64_t *x = a, *y = b;
    return x[1] < y[1] ? -1 : x[1] > y[1];
}

static void reach_edge(walk *w, uint64_t from, uint64_t to) {
    uint64_t *row = w->reach + to * w->words;
    const uint64_t *other = w->reach + from * w->words;
    for (uint64_t i = 0; i < w->words; i++) row[i] |= other[i];
    row[from / 64] |= UINT64_C(1) << from % 64;
}

/* pairs: [count][2] indices of claims. Captured nodes come behind what they depend on, so rows are complete when they
 * are used. */
static qe_status reach_fill(walk *w, uint64_t (*pairs)[2], size_t count, qe_error *error_out) {
    qsort(pairs, count, sizeof *pairs, by_target);
    for (size_t i = 0; i < count; i++) {
        if (pairs[i][0] >= pairs[i][1])
            return qe_error_set(error_out, QE_CONTRACT, NULL, "an edge of the captured graph leads backwards");
        reach_edge(w, pairs[i][0], pairs[i][1]);
    }
    return QE_OK;
}

/* A programmatic edge orders less than it seems to, so between two ops it counts as none. Within an op it is its
 * library's business: cuBLASLt's second kernel of a product whose k is split has one, sums what the first made, and so
 * waits for it by itself. */
static int is_edge(walk *w, const cudaGraphEdgeData *data, const uint64_t pair[2]) {
    if (data->type != cudaGraphDependencyTypeProgrammatic) return 1;
    const cuda_claim *from = &w->graph->claims[pair[0]], *to = &w->graph->claims[pair[1]];
    if (from->given == to->given) return 1;
    if (w->early == NULL) w->early = from->op, w->late = to->op;
    return 0;
}

/* Edges of the graph as indices of claims. */
static qe_status edges_read(walk *w, uint64_t (*pairs)[2], size_t *count, qe_error *error_out) {
    const qe_graph *graph = w->graph;
    cudaGraphNode_t *from = calloc(2 * *count + 1, sizeof *from), *to = from + *count;
    cudaGraphEdgeData *data = calloc(*count + 1, sizeof *data);
    qe_status status = from != NULL && data != NULL
                           ? qe_cuda_check(cudaGraphGetEdges(graph->graph, from, to, data, count), "edges of a graph",
                                           error_out)
                           : qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the edges of a graph");
    size_t kept = 0;
    for (size_t i = 0; status == QE_OK && i < *count; i++) {
        pairs[kept][0] = claim_of(graph, from[i]);
        pairs[kept][1] = claim_of(graph, to[i]);
        if (pairs[kept][0] == UINT64_MAX || pairs[kept][1] == UINT64_MAX)
            status = qe_error_set(error_out, QE_CONTRACT, NOBODYS_REMEDY, "%s", NOBODYS);
        else
            kept += (size_t)is_edge(w, &data[i], pairs[kept]);
    }
    *count = kept;
    free(from);
    free(data);
    return status;
}

static qe_status reach_make(walk *w, qe_error *error_out) {
    size_t count = 0;
    QE_TRY(qe_cuda_check(cudaGraphGetEdges(w->graph->graph, NULL, NULL, NULL, &count), "edges of a graph", error_out));
    uint64_t(*pairs)[2] = calloc(count + 1, sizeof *pairs);
    w->words = (w->graph->claim_count + 63) / 64;
    w->reach = calloc(w->graph->claim_count * w->words + 1, sizeof *w->reach);
    qe_status status = pairs == NULL || w->reach == NULL
                           ? qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to walk a graph")
                       : count > 0 ? edges_read(w, pairs, &count, error_out)
                                   : QE_OK; /* the runtime refuses to list no edges */
    if (status == QE_OK) status = reach_fill(w, pairs, count, error_out);
    free(pairs);
    return status;
}

/* Ops and all that they say they touch. Claims of one submission lie side by side. */
static qe_status walk_list(walk *w, qe_error *error_out) {
    const qe_graph *graph = w->graph;
    uint64_t touches = 0;
    w->ops = calloc(graph->claim_count + 1, sizeof *w->ops);
    if (w->ops == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to walk a graph");
    for (uint64_t i = 0; i < graph->claim_count; i++) {
        size_t count;
        const cuda_claim *claim = &graph->claims[i];
        int same = w->op_count > 0 && w->ops[w->op_count - 1].given == claim->given;
        if (!same) w->ops[w->op_count++] = (graph_op){.op = claim->op, .given = claim->given, .first = i};
        w->ops[w->op_count - 1].last = i;
        if (!same && qe_cuda_declared(graph->device, claim->op, &count) != NULL) touches += count;
    }
    w->touches = calloc(touches + 1, sizeof *w->touches);
    if (w->touches == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to walk a graph");
    for (uint32_t i = 0; i < w->op_count; i++) {
        size_t count;
        const qe_range *ranges = qe_cuda_declared(graph->device, w->ops[i].op, &count);
        for (size_t r = 0; r < count; r++) {
            const uintptr_t begin = (uintptr_t)ranges[r].at, end = begin + ranges[r].bytes;
            if (end == begin) continue;
            w->touches[w->touch_count++] = (touched){.begin = begin, .end = end, .op = i, .range = &ranges[r]};
        }
    }
    return QE_OK;
}

static int by_begin(const void *a, const void *b) {
    const touched *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static int is_ordered(const walk *w, uint32_t a, uint32_t b) {
    const graph_op *first = &w->ops[a < b ? a : b], *second = &w->ops[a < b ? b : a];
    return (w->reach[second->first * w->words + first->last / 64] >> first->last % 64) & 1;
}

static qe_status pair_judge(const walk *w, const touched *a, const touched *b, qe_error *error_out) {
    if (a->op == b->op || (!a->range->write && !b->range->write) || is_ordered(w, a->op, b->op)) return QE_OK;
    char less[96] = "";
    if (w->early != NULL)
        snprintf(less, sizeof less, "; the edge from %s to %s is programmatic and orders less",
                 qe_op_name(w->early->kind), qe_op_name(w->late->kind));
    return qe_error_set(error_out, QE_CONTRACT, "record an event behind the first and let the second wait for it",
                        "sync.side: in a captured graph %s and %s touch %s%s%s without an order between them%s",
                        qe_op_name(w->ops[a->op].op->kind), qe_op_name(w->ops[b->op].op->kind),
                        a->range->object != NULL ? a->range->object : "the same bytes",
                        a->range->part != NULL ? " " : "", a->range->part != NULL ? a->range->part : "", less);
}

static qe_status walk_judge(walk *w, qe_error *error_out) {
    qsort(w->touches, w->touch_count, sizeof *w->touches, by_begin);
    for (uint64_t i = 0; i < w->touch_count; i++)
        for (uint64_t j = i + 1; j < w->touch_count && w->touches[j].begin < w->touches[i].end; j++)
            QE_TRY(pair_judge(w, &w->touches[i], &w->touches[j], error_out));
    return QE_OK;
}

static qe_status nodes_judge(qe_graph *graph, qe_error *error_out) {
    size_t count = 0;
    QE_TRY(qe_cuda_check(cudaGraphGetNodes(graph->graph, NULL, &count), "nodes of a graph", error_out));
    if (count == graph->claim_count) return QE_OK;
    qe_status status = unclaimed(graph);
    if (error_out != NULL) *error_out = graph->refusal;
    return status;
}

qe_status qe_cuda_graph_judge(qe_graph *graph, qe_error *error_out) {
    walk w = {.graph = graph};
    QE_TRY(nodes_judge(graph, error_out));
    qe_status status = reach_make(&w, error_out);
    if (status == QE_OK) status = walk_list(&w, error_out);
    if (status == QE_OK) status = walk_judge(&w, error_out);
    free(w.reach);
    free(w.ops);
    free(w.touches);
    return status;
}
