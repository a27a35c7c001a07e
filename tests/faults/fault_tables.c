/* fault_tables.c - the host backend's tables and the transport's, handed out in place of the real ones: the linker
 * gives every call of qe_host_backend and qe_local_comm to this file (--wrap). */
#include "faults/fault.h"

#include "base/assert.h"

const qe_backend *__real_qe_host_backend(void);
const qe_comm_ops *__real_qe_local_comm(void);
const qe_backend *__wrap_qe_host_backend(void);
const qe_comm_ops *__wrap_qe_local_comm(void);

#define qe_host_backend __real_qe_host_backend
#include "step_faults.h"
#undef qe_host_backend

enum { DEVICE_PLACES = FAULT_OPEN | FAULT_CREATE | FAULT_RUN | FAULT_SYNC | FAULT_BIND | FAULT_GRAPH };
static const long never = 1L << 40;

static _Atomic long first_left;

void fault_device_start(long nth) {
    long left = nth > 0 ? nth : never;
    atomic_store(&first_left, left);
    fault_arm(DEVICE_PLACES, left);
}

long fault_device_stop(void) {
    long calls = atomic_load(&first_left) - atomic_load(&fault_left);
    atomic_store(&fault_places, 0);
    return calls;
}

const char *fault_device_met(void) { return atomic_load(&fault_happened) ? "a call of the backend" : NULL; }

const qe_backend *__wrap_qe_host_backend(void) {
    static fault_backend faulty;
    return fault_backend_init(&faulty);
}

/* ---- transport ---- */

static qe_world *_Atomic opened;

/* A transport that fails one end alone wakes all others (comm.h). */
static qe_status comm_lost(const char *call) {
    if (!fault_is_due(FAULT_COMM, call)) return QE_OK;
    __real_qe_local_comm()->abort(atomic_load(&opened));
    return QE_ERROR_DEVICE;
}

static qe_status comm_open(qe_world *world, uint32_t from_rank, uint32_t to_rank, uint32_t lane,
                           qe_channel **channel_out, qe_error *error_out) {
    if (fault_is_due(FAULT_COMM, "channel_open"))
        return qe_error_set(error_out, QE_ERROR_DEVICE, "planted", "planted: channel_open");
    atomic_store(&opened, world);
    return __real_qe_local_comm()->channel_open(world, from_rank, to_rank, lane, channel_out, error_out);
}

static qe_status comm_send(qe_channel *channel, const void *bytes_at, size_t bytes) {
    QE_TRY(comm_lost("send"));
    return __real_qe_local_comm()->send(channel, bytes_at, bytes);
}

static qe_status comm_recv(qe_channel *channel, void *bytes_at, size_t bytes) {
    QE_TRY(comm_lost("recv"));
    return __real_qe_local_comm()->recv(channel, bytes_at, bytes);
}

/* Fails before the others know, or behind a meeting that was held: what a transport may do to one rank. */
static qe_status comm_meet(qe_world *world, uint32_t rank, qe_status mine, const double *values, size_t count,
                           double *gathered, qe_status *worst_out) {
    if (fault_is_due(FAULT_COMM, "meet")) return QE_ERROR_DEVICE;
    qe_status status = __real_qe_local_comm()->meet(world, rank, mine, values, count, gathered, worst_out);
    return fault_is_due(FAULT_COMM, "meet, held") ? QE_ERROR_DEVICE : status;
}

static void comm_abort(qe_world *world) { __real_qe_local_comm()->abort(world); }
static void comm_reset(qe_world *world) { __real_qe_local_comm()->reset(world); }

const qe_comm_ops *__wrap_qe_local_comm(void) {
    static const qe_comm_ops faulty = {.size = sizeof(qe_comm_ops),
                                       .name = "local",
                                       .channel_open = comm_open,
                                       .send = comm_send,
                                       .recv = comm_recv,
                                       .meet = comm_meet,
                                       .abort = comm_abort,
                                       .reset = comm_reset};
    return &faulty;
}
