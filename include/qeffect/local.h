/* local.h - the in-process transport: ranks are threads of one process, a message is one memcpy. */
#ifndef QEFFECT_LOCAL_H
#define QEFFECT_LOCAL_H

#include "qeffect/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A world of ranks 0..ranks-1.
 * Requires:   1 <= ranks <= QE_RANKS_MAX (else QE_ERROR_LIMIT).
 * On failure: *world_out is unchanged.
 * Owns:       the caller, until qe_local_world_destroy; channels belong to the world.
 * Thread:     any. */
qe_status qe_local_world_create(uint32_t ranks, qe_world **world_out, qe_error *error_out);

/* Requires: no call is in flight on any rank. NULL is ignored. */
void qe_local_world_destroy(qe_world *world);

/* The table; immutable, valid for the life of the process. */
const qe_comm_ops *qe_local_comm(void);

#ifdef __cplusplus
}
#endif
#endif
