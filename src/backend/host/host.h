/* host.h - what the files of the host backend share: the device and the rooms of its life. */
#ifndef QE_HOST_HOST_H
#define QE_HOST_HOST_H

#include "backend/host/blas.h"
#include "backend/host/counter.h"
#include "backend/host/kernels.h"
#include "qeffect/host.h"

/* How far a stream has come. It outlives its stream: an event that was recorded there may be waited for later. */
typedef struct host_progress {
    host_counter done; /* items finished */
    struct host_progress *next;
} host_progress;

enum { HOST_IDENTITY_BYTES = 128 }; /* "host avx512 openblas 0.3.21 SkylakeX" */

struct qe_device {
    const host_kernels *kernels; /* of the level chosen at open */
    const host_blas *blas;       /* of the process */
    const qe_comm_ops *comm;     /* NULL: no transport */
    pthread_mutex_t lock;        /* the next three fields, and what recordings and their events know of each other */
    host_progress *progresses;   /* of every stream there ever was; freed at close */
    uint32_t streams;            /* alive now */
    struct host_recording *recordings; /* of streams that record now */
    _Atomic uint32_t recordings_live;  /* how many; so that calls which no recording allows need no lock */
    char identity[HOST_IDENTITY_BYTES];
};

/* Runs one op on the calling thread. QE_OK, or what the transport said. */
qe_status qe_host_op_run(const qe_device *device, const qe_op *op);
/* The same status in words; `status` != QE_OK. */
qe_status qe_host_op_error(qe_status status, qe_op_kind kind, qe_error *error_out);

extern const qe_stream_ops qe_host_streams;

#endif
