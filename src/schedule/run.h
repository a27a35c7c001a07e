/* run.h - a schedule that is run in thought, and what is left of it where it stops. */
#ifndef QE_SCHEDULE_RUN_H
#define QE_SCHEDULE_RUN_H

#include "qeffect/certificate.h"
#include "schedule/source.h"

enum {
    QE_UNIT_ACTIONS_MAX = 2, /* a pair is one unit: it starts when the inputs of both are there */
    QE_FLOWS = 2 * QE_LANES, /* each lane, and each the other way (qe_schedule.reversed) */
};

/* A directed edge between two ranks, with what has passed over it. */
typedef struct qe_edge {
    uint32_t from, to;
    uint32_t sent, used; /* messages that left; messages whose action has run */
    uint32_t at;         /* edge transport: index in the sender's row where the next message is looked for */
} qe_edge;

/* One rank. `unit` stands at row index `next`; `last` is the unit before it. */
typedef struct qe_run_rank {
    uint32_t next;
    uint8_t unit_count, last_count;
    uint8_t due;         /* batches: bit i: the result of last[i] must still leave */
    uint8_t queue_send;  /* one communicator: the head is a send, else a receive */
    uint32_t queue_next; /* one communicator: number of the head in the rank's queue (qe_run_queue_op) */
    uint32_t queue_index; /* row index of the head's action; QE_NONE behind the last */
    qe_action unit[QE_UNIT_ACTIONS_MAX], last[QE_UNIT_ACTIONS_MAX];
    qe_action queue_action;
} qe_run_rank;

typedef struct qe_run {
    const qe_source *source;
    qe_transport transport;
    int direct;           /* messages add no constraint of their own: a result is there when its action has run */
    uint8_t *did;         /* [stages * microbatches] bits, below */
    qe_run_rank *rank;    /* [ranks] */
    uint32_t *ready;      /* [ranks] ranks that may have something to do, each at most once */
    uint32_t ready_count;
    uint8_t *listed;      /* [ranks] */
    qe_edge *edge;        /* [edge_count] by sender */
    uint32_t edge_count;
    uint32_t *edge_begin; /* [ranks + 1] */
    uint32_t *out_edge;   /* [QE_FLOWS * stages] edge of a stage's results; QE_NONE: they stay on the rank */
    void *memory;         /* owned: everything above */
} qe_run;

/* What happened to a (stage, microbatch), for each lane. */
static inline uint8_t qe_did_run(qe_lane lane) { return (uint8_t)(1U << lane); }
static inline uint8_t qe_did_send(qe_lane lane) { return (uint8_t)(4U << lane); }
static inline uint8_t qe_did_arrive(qe_lane lane) { return (uint8_t)(16U << lane); }

static inline int qe_run_did(const qe_run *run, uint32_t stage, uint32_t microbatch, uint8_t bit) {
    return (run->did[(size_t)stage * run->source->microbatches + microbatch] & bit) != 0;
}

/* Which of the streams between stages an action is part of: its lane, one way or the other. */
static inline size_t qe_run_flow(const qe_source *source, const qe_action *action) {
    return (size_t)qe_action_lane(action) + (qe_source_turned(source, action->microbatch) ? QE_LANES : 0);
}

/* The edge on which an action's result leaves its rank; QE_NONE. */
static inline uint32_t qe_run_edge(const qe_run *run, const qe_action *action) {
    if (action->kind == QE_ACTION_W) return QE_NONE;
    return run->out_edge[qe_run_flow(run->source, action) * run->source->stages + action->stage];
}

/* The edge on which an action's input comes. Requires: qe_source_receives. */
static inline uint32_t qe_run_edge_in(const qe_run *run, const qe_action *action) {
    return run->out_edge[qe_run_flow(run->source, action) * run->source->stages +
                         qe_source_producer(run->source, action)];
}

/* A place in the queue of a rank with one communicator: a unit's receives, then its sends. Two numbers per action. */
typedef struct qe_queue_op {
    uint32_t index; /* of the action in the row */
    int send;
} qe_queue_op;
qe_queue_op qe_run_queue_op(const qe_source *source, uint32_t rank, uint32_t number);
uint32_t qe_run_queue_number(const qe_source *source, uint32_t rank, uint32_t index, int send);

/* Runs until nothing moves. Owns: the caller calls deinit, whatever was returned. On failure: QE_ERROR_MEMORY. */
qe_status qe_run_all(qe_run *run, const qe_source *source, const qe_transport *transport, qe_error *error_out);
void qe_run_deinit(qe_run *run);
/* Actions that never run. */
uint64_t qe_run_stuck(const qe_run *run);

/* The cycle at which a run stopped. Requires: qe_run_stuck(run) > 0.
 * Returns QE_CONTRACT with *counterexample_out filled (owned by the caller), or QE_ERROR_MEMORY. */
qe_status qe_run_explain(const qe_run *run, qe_counterexample *counterexample_out, qe_error *error_out);

#endif
