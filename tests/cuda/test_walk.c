/* test_walk.c - what the walk over a captured graph refuses: a node that no op made, an op without a node, and two ops
 * that touch the same bytes, one of them writing, without a path of edges between them, of which a programmatic one
 * between two ops is none. Needs no GPU: graphs are made up, and the calls of the runtime that claims.c makes are
 * replaced here. Random graphs are judged a second time, by closing over all nodes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "backend/cuda/device.h"
#include "base/assert.h"
#include "checked.h"

/* --- a graph that is made up -------------------------------------------------------------------------------------- */

enum { NODES_MAX = 48, EDGES_MAX = 256, OPS_MAX = 16, RANGES = 2, FULL = 0, EARLY = 1 };

typedef struct edge {
    size_t from, to;
    int type; /* FULL, EARLY: programmatic */
} edge;

static size_t node_count, edge_count;
static edge edges[EDGES_MAX];
static qe_op ops[OPS_MAX];
static qe_range ranges[OPS_MAX][RANGES];
static size_t range_counts[OPS_MAX];
static char memory[64];

static cudaGraphNode_t node(size_t index) { return (cudaGraphNode_t)(uintptr_t)(index + 1); }

static void edge_add(size_t from, size_t to, int type) {
    QE_ASSERT(edge_count < EDGES_MAX && from < to);
    edges[edge_count++] = (edge){from, to, type};
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    (void)graph;
    for (size_t i = 0; nodes != NULL && i < *count; i++) nodes[i] = node(i);
    *count = node_count;
    return cudaSuccess;
}
cudaError_t cudaGraphGetEdges(cudaGraph_t graph, cudaGraphNode_t *from, cudaGraphNode_t *to, cudaGraphEdgeData *data,
                              size_t *count) {
    (void)graph;
    for (size_t i = 0; from != NULL && i < *count; i++) {
        from[i] = node(edges[i].from);
        to[i] = node(edges[i].to);
        data[i] = (cudaGraphEdgeData){0};
        data[i].type = edges[i].type == EARLY ? cudaGraphDependencyTypeProgrammatic : cudaGraphDependencyTypeDefault;
    }
    *count = edge_count;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status_out,
                                     unsigned long long *id_out, cudaGraph_t *graph_out,
                                     const cudaGraphNode_t **dependencies_out, const cudaGraphEdgeData **data_out,
                                     size_t *count_out) {
    (void)stream, (void)id_out, (void)dependencies_out, (void)data_out, (void)count_out;
    *status_out = cudaStreamCaptureStatusActive;
    *graph_out = (cudaGraph_t)&edges;
    return cudaSuccess;
}
qe_status qe_cuda_queued(qe_device *device, cudaError_t code, const char *what) {
    (void)device;
    return qe_cuda_check(code, what, NULL);
}
const qe_range *qe_cuda_declared(const qe_device *device, const qe_op *op, size_t *count_out) {
    (void)device;
    *count_out = range_counts[op - ops];
    return ranges[op - ops];
}

/* --- a recording -------------------------------------------------------------------------------------------------- */

static qe_stream origin;
static qe_graph graph;

static void recording_begin(void) {
    free(graph.claims);
    graph = (qe_graph){.origin = &origin};
    node_count = edge_count = 0;
    memset(range_counts, 0, sizeof range_counts);
}

/* The next op leaves so many nodes, one behind the other; edges to it are the caller's. Returns the first. */
static size_t op_give_again(uint32_t number, size_t nodes, int type) {
    const size_t first = node_count;
    (void)qe_cuda_claim_begin(&graph);
    node_count += nodes;
    for (size_t i = first + 1; i < node_count; i++) edge_add(i - 1, i, type);
    (void)qe_cuda_claim_end(&graph, &ops[number]);
    return first;
}

static size_t op_give(uint32_t number, size_t nodes, int type) {
    ops[number] = (qe_op){.kind = QE_OP_ACCUMULATE};
    return op_give_again(number, nodes, type);
}

static void touch(uint32_t number, size_t at, size_t bytes, int write) {
    QE_ASSERT(range_counts[number] < RANGES && at + bytes <= sizeof memory);
    ranges[number][range_counts[number]++] = (qe_range){.at = memory + at, .bytes = bytes, .write = (uint8_t)write};
}

static int checked, failed;

static void expect(const char *what, int refused, const char *words) {
    qe_error error = {0};
    qe_status status = graph.refusal.status;
    if (status == QE_OK) status = qe_cuda_graph_judge(&graph, &error);
    if (graph.refusal.status != QE_OK) error = graph.refusal;
    const int told = status == QE_CONTRACT && strstr(error.message, words) != NULL;
    const int good = refused ? told : status == QE_OK;
    checked++;
    failed += !good;
    if (!good) printf("FAILED %s: %s: %s\n", what, qe_status_name(status), error.message);
}

/* Two ops that write the same bytes, with an edge of that type; NONE: without one. */
enum { NONE = -1 };
static void two_writers(int type) {
    recording_begin();
    (void)op_give(0, 1, FULL);
    (void)op_give(1, 1, FULL);
    touch(0, 0, 8, 1);
    touch(1, 4, 8, 1);
    if (type != NONE) edge_add(0, 1, type);
}

static void expect_pairs(void) {
    two_writers(FULL);
    expect("an edge", 0, "");
    two_writers(NONE);
    expect("no edge", 1, "without an order between them");
    two_writers(EARLY);
    expect("a programmatic edge", 1, "is programmatic and orders less");
    two_writers(EARLY);
    edge_add(0, 1, FULL);
    expect("a programmatic edge beside a full one", 0, "");
    two_writers(NONE);
    ranges[0][0].write = ranges[1][0].write = 0;
    expect("both only read", 0, "");
    two_writers(NONE);
    ranges[1][0].at = memory + 8;
    expect("bytes apart", 0, "");
}

/* The same op twice in a row: it is in order with itself only by an edge. */
static void expect_an_op_twice(void) {
    for (int type = NONE; type <= EARLY; type++) {
        recording_begin();
        (void)op_give(0, 1, FULL);
        touch(0, 0, 8, 1);
        (void)op_give_again(0, 1, FULL);
        if (type != NONE) edge_add(0, 1, type);
        expect("an op that is given twice", type != FULL, "without an order between them");
    }
}

static void expect_no_bytes(void) {
    two_writers(NONE);
    ranges[1][0].bytes = 0;
    expect("no bytes within those of another", 0, "");
    two_writers(NONE);
    ranges[0][0] = (qe_range){.at = memory + 4, .bytes = 0, .write = 1};
    expect("no bytes where another begins", 0, "");
}

/* A library's two kernels of one op, and what follows them. */
static void expect_early_within_an_op(void) {
    for (int type = FULL; type <= EARLY; type++) {
        recording_begin();
        (void)op_give(0, 2, type);
        (void)op_give(1, 2, EARLY);
        touch(0, 0, 8, 1);
        touch(1, 0, 8, 0);
        edge_add(1, 2, FULL);
        expect("programmatic edges within ops", 0, "");
    }
    recording_begin();
    (void)op_give(0, 2, EARLY);
    (void)op_give(1, 1, FULL);
    touch(0, 0, 8, 1);
    touch(1, 0, 8, 0);
    edge_add(0, 2, FULL); /* behind the first kernel alone */
    expect("an edge past an op's last node", 1, "without an order between them");
}

static void expect_claims(void) {
    recording_begin();
    (void)op_give(0, 1, FULL);
    node_count++; /* nobody's */
    (void)op_give(1, 1, FULL);
    expect("a node between two ops", 1, "a node that no op made");
    recording_begin();
    (void)op_give(0, 1, FULL);
    node_count++;
    expect("a node behind the last op", 1, "a node that no op made");
    recording_begin();
    (void)op_give(0, 0, FULL);
    expect("an op without a node", 1, "left no node");
}

/* As many nodes as were claimed, and an edge to or from another. */
static void expect_foreign_edges(void) {
    for (int type = FULL; type <= EARLY; type++)
        for (int to = 0; to < 2; to++) {
            two_writers(FULL);
            edges[0] = to ? (edge){0, NODES_MAX, type} : (edge){NODES_MAX, 1, type};
            expect("an edge of a node that nobody claimed", 1, "a node that no op made");
        }
}

/* --- random graphs, judged twice ---------------------------------------------------------------------------------- */

static uint64_t state = 1;
static uint32_t below(uint32_t limit) {
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(state >> 33) % limit;
}

typedef struct random_graph {
    uint32_t op_count;
    size_t first[OPS_MAX + 1]; /* nodes of each op */
} random_graph;

static random_graph random_make(void) {
    random_graph made = {.op_count = 2 + below(OPS_MAX - 2)};
    recording_begin();
    for (uint32_t i = 0; i < made.op_count; i++) {
        made.first[i] = op_give(i, 1 + below(3), (int)below(2));
        made.first[i + 1] = node_count;
        for (uint32_t edges_wanted = below(4); i > 0 && edges_wanted > 0; edges_wanted--)
            edge_add(below((uint32_t)made.first[i]), made.first[i] + below((uint32_t)(node_count - made.first[i])),
                     below(4) == 0 ? EARLY : FULL);
        for (uint32_t r = below(RANGES + 1); r > 0; r--) touch(i, below(56), 1 + below(8), below(3) == 0);
    }
    return made;
}

static uint32_t op_of(const random_graph *g, size_t at) {
    uint32_t number = 0;
    while (g->first[number + 1] <= at) number++;
    return number;
}

static int conflict(uint32_t a, uint32_t b) {
    for (size_t i = 0; i < range_counts[a]; i++)
        for (size_t j = 0; j < range_counts[b]; j++) {
            const qe_range *x = &ranges[a][i], *y = &ranges[b][j];
            const char *from = x->at, *other = y->at;
            if ((x->write || y->write) && from < other + y->bytes && other < from + x->bytes) return 1;
        }
    return 0;
}

/* Is there a pair of ops in conflict, some node of one without a path to some node of the other? */
static int random_is_wrong(const random_graph *g) {
    static char path[NODES_MAX][NODES_MAX];
    memset(path, 0, sizeof path);
    for (size_t i = 0; i < edge_count; i++)
        if (edges[i].type == FULL || op_of(g, edges[i].from) == op_of(g, edges[i].to))
            path[edges[i].from][edges[i].to] = 1;
    for (size_t k = 0; k < node_count; k++)
        for (size_t i = 0; i < node_count; i++)
            for (size_t j = 0; j < node_count; j++) path[i][j] |= path[i][k] & path[k][j];
    for (uint32_t a = 0; a < g->op_count; a++)
        for (uint32_t b = a + 1; b < g->op_count; b++)
            for (size_t i = g->first[a]; i < g->first[a + 1]; i++)
                for (size_t j = g->first[b]; j < g->first[b + 1]; j++)
                    if (conflict(a, b) && !path[i][j]) return 1;
    return 0;
}

static void expect_random(void) {
    enum { GRAPHS = 20000 };
    int refused = 0;
    for (int i = 0; i < GRAPHS; i++) {
        const random_graph g = random_make();
        const int wrong = random_is_wrong(&g);
        refused += wrong;
        expect("a random graph", wrong, "without an order between them");
    }
    checked++;
    failed += refused < GRAPHS / 10 || refused > GRAPHS * 9 / 10; /* both verdicts are tried */
    printf("%d of %d random graphs refused\n", refused, GRAPHS);
}

int main(void) {
    expect_pairs();
    expect_an_op_twice();
    expect_no_bytes();
    expect_early_within_an_op();
    expect_claims();
    expect_foreign_edges();
    expect_random();
    free(graph.claims);
    printf("%d checks, %d failed\n", checked, failed);
    return failed > 0;
}
