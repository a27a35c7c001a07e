/* certificate.h - what a schedule is proved to do, under which rules of communication, and what it keeps.
 *
 * A schedule is valid only with respect to rules: the same rows run under one transport and stop under another, fit one
 * memory and not another. The rules are values here, and the certificate repeats them. docs/schedules.md says what
 * each means. Named orders with a formula are judged as a stream: their rows are computed when they are looked at and
 * never stored. */
#ifndef QEFFECT_CERTIFICATE_H
#define QEFFECT_CERTIFICATE_H

#include "qeffect/schedule.h"
#include "qeffect/simulate.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum qe_sends {
    QE_SENDS_SINGLE,  /* every send and receive is posted alone; an action waits for its own input only */
    QE_SENDS_BATCHED, /* what lies between two actions is one batch; the second action waits for all of it */
} qe_sends;

typedef enum qe_communicators {
    QE_COMMUNICATORS_EDGE, /* one per directed edge of two ranks: messages pass in the sender's order */
    QE_COMMUNICATORS_ONE,  /* one for all: each rank's sends and receives pass in the order of its row */
} qe_communicators;

typedef struct qe_transport {
    uint8_t sends;         /* qe_sends */
    uint8_t communicators; /* qe_communicators; batches are the same on one and on many */
    uint8_t release;       /* qe_release: a pair is one unit, or its halves run one behind the other */
    uint32_t capacity;     /* messages of a directed edge that are sent and not yet used; 0: rendezvous */
} qe_transport;

/* When the scales of a stage fold, in the step's order on its rank. */
typedef enum qe_fold_policy {
    QE_FOLD_STEP,            /* behind the stage's last action */
    QE_FOLD_LAST_MICROBATCH, /* behind the backward (I or B) of the last microbatch, as counting frameworks do */
} qe_fold_policy;

/* When the weight caches of a stage are filled. */
typedef enum qe_fill_policy {
    QE_FILL_STEP,             /* before the stage's first action */
    QE_FILL_FIRST_MICROBATCH, /* before the forward of microbatch 0, as counting frameworks do */
} qe_fill_policy;

typedef enum qe_gradient_order {
    QE_GRADIENTS_ASCENDING, /* microbatches in order: the bits of the baseline */
    QE_GRADIENTS_OWN,       /* another order, fixed by the rows: bits of its own, the same every time */
} qe_gradient_order;

typedef struct qe_certificate_request {
    qe_transport transport;
    double memory_limit;    /* in activations of one microbatch on a full rank; 0: none */
    uint8_t fold, fill;     /* qe_fold_policy, qe_fill_policy */
    uint8_t gradients;      /* qe_gradient_order; QE_GRADIENTS_OWN admits every order */
    uint8_t find_capacity;  /* find the least capacity that cannot deadlock, too */
} qe_certificate_request;

typedef struct qe_certificate_rank {
    uint32_t stages, actions;
    qe_schedule_peak peak;
    uint8_t gradient_order; /* qe_gradient_order of all its stages together */
} qe_certificate_rank;

typedef struct qe_certificate {
    uint32_t ranks, stages, microbatches;
    uint64_t actions;
    qe_certificate_rank *rank; /* [ranks]; owned */
    double peak_activation;    /* the largest rank[].peak.live / rank[].stages */
    uint8_t gradient_order;    /* qe_gradient_order of all stages */
    uint8_t streamed;          /* the rows were computed, not stored */
    uint32_t least_capacity;   /* buffers per directed edge that suffice with these sends and communicators; 0: not
                                * asked */
} qe_certificate;

/* Proves placement, counts, order, freedom from deadlock under request->transport, and then, row by row: the life of
 * what each microbatch keeps, its peak against the limit, that no action of a stage stands behind its fold or before
 * its fill, and the order of gradients.
 * On failure: QE_CONTRACT and *counterexample_out (may be NULL) filled, to be freed with qe_counterexample_deinit: the
 *             first breach in row order of the first broken rule in the order above. QE_ERROR_ARGUMENT, _LIMIT: not a
 *             schedule at all; QE_ERROR_MEMORY.
 * Owns: the caller frees *certificate_out with deinit. Cost: linear in actions. Thread: any. */
qe_status qe_schedule_certify(const qe_schedule *schedule, const qe_certificate_request *request,
                              qe_certificate *certificate_out, qe_counterexample *counterexample_out,
                              qe_error *error_out);

/* Is there a formula for the actions of a named order, so that it can be certified without being stored? */
int qe_schedule_streams(const char *name);
/* As qe_schedule_certify for the schedule that qe_schedule_generate would make; it may have more actions than can be
 * stored. Requires: qe_schedule_streams(order->name), else QE_ERROR_UNSUPPORTED; so is order->forward_only. */
qe_status qe_schedule_certify_streamed(const qe_schedule_request *order, const qe_certificate_request *request,
                                       qe_certificate *certificate_out, qe_counterexample *counterexample_out,
                                       qe_error *error_out);
/* Deinit of a zeroed certificate is a no-op. */
void qe_certificate_deinit(qe_certificate *certificate);

#ifdef __cplusplus
}
#endif
#endif
