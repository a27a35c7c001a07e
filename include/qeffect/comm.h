/* comm.h - transports between ranks. One channel per directed edge, opened before the first step. */
#ifndef QEFFECT_COMM_H
#define QEFFECT_COMM_H

#include <stddef.h>
#include "qeffect/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qe_world qe_world;     /* all ranks */
typedef struct qe_channel qe_channel; /* one directed edge, one sender, one receiver, messages in order */

typedef struct qe_comm_ops {
    size_t size;
    const char *name; /* "local" */
    /* `lane` tells edges between the same two ranks apart (forward 0, backward 1). The same call on both ends, in any
     * order, gives each its end of one channel. Owns: the world. Before the first step only. */
    qe_status (*channel_open)(qe_world *world, uint32_t from_rank, uint32_t to_rank, uint32_t lane,
               qe_channel **channel_out, qe_error *error_out);
    /* Rendezvous: returns when the receiver has the bytes (send) or the bytes are there (recv). Called by stream
     * threads. On failure: QE_ERROR_INTERRUPTED after world_abort, QE_ERROR_DEVICE for a size mismatch, on both ends.
     * A transport that can fail one end alone aborts the world then: the other end would wait for ever. */
    qe_status (*send)(qe_channel *channel, const void *bytes_at, size_t bytes);
    qe_status (*recv)(qe_channel *channel, void *bytes_at, size_t bytes);
    /* All ranks meet. *worst_out is the largest status any rank brought; every rank gets the same. The table
     * `values` [count per rank] of every rank is gathered into `gathered` [ranks * count] in rank order.
     * After world_abort it returns QE_ERROR_INTERRUPTED at once. Thread: the rank's issuing thread. */
    qe_status (*meet)(qe_world *world, uint32_t rank, qe_status mine, const double *values, size_t count,
               double *gathered, qe_status *worst_out);
    /* Wakes everything that waits, on all ranks; they return QE_ERROR_INTERRUPTED. Thread: any. */
    void (*abort)(qe_world *world);
    /* Ready for the next step after an abort: channels are empty. Requires: no call is in flight on any rank. */
    void (*reset)(qe_world *world);
} qe_comm_ops;

#ifdef __cplusplus
}
#endif
#endif
