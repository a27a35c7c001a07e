/* guard.h - the device moment: guards at the head and the tail of every graph compare witness words in the objects'
 * memory with what this launch expects. What they catch, no declaration covered.
 *
 *   words of slots    rise at each stamp (acquire)         of weights  at each commit
 *   words of scales   rise at each fold                    of caches   are the key, written by the fill
 *   words of gradients rise behind each action that deposits
 *
 * A graph serves several segments of a step, so what is expected is data: an arming copy puts the numbers of this
 * launch into the graph's block before it runs. */
#ifndef QE_STEP_GUARD_H
#define QE_STEP_GUARD_H

#include "step/capture.h"

/* One word that a guard looks at: it must be *base + relative. */
struct qe_guard_entry {
    const uint64_t *word, *base;
    uint64_t relative;
    uint32_t object;
};

/* On the rank: words of all objects of a binding, and the counters that they are held against. */
qe_status qe_guard_create(qe_rank *rank, qe_binding *binding, qe_error *error_out);
/* Finds the words again after memory has moved. */
void qe_guard_refresh(const qe_rank *rank, qe_binding *binding);
void qe_guard_destroy(qe_rank *rank, qe_binding *binding);

/* Lists what the segment's guards look at: head entries, then tail entries. */
qe_status qe_guard_segment(qe_rank *rank, qe_binding *binding, qe_segment *segment, qe_error *error_out);
/* Memory of a graph's two guards, and their ops; the segment is one that the graph serves. */
qe_status qe_guard_graph(qe_rank *rank, qe_binding *binding, const qe_segment *segment, qe_sealed_graph *graph,
                         qe_error *error_out);
void qe_guard_graph_release(qe_rank *rank, qe_sealed_graph *graph);
/* The copy that arms `graph` for `segment`. */
void qe_guard_arm(qe_segment *segment, uint32_t index, const qe_sealed_graph *graph);

/* Would the graph's guards look at what this segment must look at, in its order? What `arm` requires. */
int qe_guard_fits(const qe_segment *segment, const qe_sealed_graph *graph);

/* declare.c: tells the backend what a guard and an arming copy touch, and that an op is gone. words: the host's copy of
 * the guard's. */
qe_status qe_declare_guard(qe_rank *rank, const qe_op *op, const uint64_t *const *words, qe_error *error_out);
qe_status qe_declare_arming(qe_rank *rank, const qe_op *op, qe_error *error_out);
void qe_declare_forget(qe_rank *rank, const qe_op *op);

/* Reads the counters of this step, after words that nobody can trust any more (an abort, a write by hand) were set. */
qe_status qe_guard_begin(qe_rank *rank, qe_binding *binding);
/* Did a guard fire in this step? QE_CONTRACT with the record, else QE_OK. Requires: streams are drained. */
qe_status qe_guard_verdict(qe_rank *rank, qe_binding *binding, qe_violations *violations_out);

#endif
