/* capture.h - recorded graphs of a bound plan: which items a graph covers, its seal, and how it is run. */
#ifndef QE_STEP_CAPTURE_H
#define QE_STEP_CAPTURE_H

#include "step/team.h"

/* A recording and what it froze. One graph serves every segment whose ops are the same, so every microbatch that lands
 * in the same slots. */
struct qe_sealed_graph {
    qe_graph *graph;
    qe_op *sealed; /* [op_count] as they were when recorded; `first_op` names the ones that are bound now */
    uint32_t op_count;
    const uint64_t **words; /* what its guards look at */
    const uint64_t **guard_words; /* device: the same */
    uint64_t *guard_block; /* device: what they expect: the launch, head, tail */
    qe_op head_guard, tail_guard;
};

/* Items [first, end) of the program that one launch runs. Edges with streams outside the graph are kept outside. */
struct qe_segment {
    uint32_t first, end;
    uint32_t graph; /* index into graphs */
    uint8_t whole_step; /* lanes of several streams */
    uint32_t gradient_copies; /* gradients that come back from scratch inside */
    qe_guard_entry *entries; /* head_count at the head, the rest at the tail */
    uint32_t head_count, entry_count;
    uint64_t *block; /* host: this launch's share of guard_block */
    qe_op arm; /* copies it there */
};

/* Records every segment of the binding. On failure nothing is left behind. Requires: ops are bound, nothing runs. */
qe_status qe_binding_capture(qe_rank *rank, qe_binding *binding, qe_error *error_out);
/* The program that the ledger is made of: the plan's with an object for each graph there may be. There are at most as
 * many as segments, whatever a later recording makes of them. */
qe_status qe_binding_add_graphs(qe_binding *binding, qe_error *error_out);
/* Everything was recorded again: the ledger's seals rise. */
void qe_binding_tell_captured(qe_binding *binding);
void qe_binding_uncapture(qe_rank *rank, qe_binding *binding);

/* The segment that begins at item `index`, or NULL. */
const qe_segment *qe_binding_segment(const qe_binding *binding, uint32_t index);
/* Does the seal still hold? QE_NONE; else the item of the first op that differs, and a launch that says how. */
uint32_t qe_segment_broken(const qe_binding *binding, const qe_segment *segment, qe_effect *launch_out);
/* Launches a segment with its edges to the caller's stream. */
qe_status qe_segment_launch(qe_rank *rank, qe_binding *binding, const qe_segment *segment);

#endif
