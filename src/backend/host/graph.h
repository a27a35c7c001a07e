/* graph.h - a recorded graph: what each stream that took part runs, in order, at every launch. */
#ifndef QE_HOST_GRAPH_H
#define QE_HOST_GRAPH_H

#include "backend/host/stream.h"

typedef enum node_kind { NODE_OP, NODE_RAISE, NODE_WAIT } node_kind;

typedef struct host_node {
    node_kind kind;
    union {
        qe_op op;             /* a copy: this is what freezes pointers and constants */
        host_counter *signal; /* of the graph: raised to, or waited for, the number of the launch */
    } what;
} host_node;

struct host_lane {
    host_node *nodes;
    uint64_t count;
    qe_stream *stream;   /* that recorded it */
    host_progress *tail; /* where its last launch ends; NULL: never launched */
    uint64_t tail_position;
};

/* One block: this, its lanes, their nodes, the signals. */
struct qe_graph {
    qe_device *device;
    uint64_t launches;
    host_lane *lanes; /* [info.lanes]; 0: of the stream that began the recording */
    host_counter *signals;
    uint64_t signals_count;
    qe_graph_info info;
};

/* Runs a lane on the calling thread; every op runs. QE_OK, or the first failure and the kind of that op. */
qe_status qe_host_lane_run(const qe_device *device, const host_lane *lane, uint64_t launch, qe_op_kind *failed_out);

extern const qe_graph_ops qe_host_graphs;

#endif
