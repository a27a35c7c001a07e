/* host.c - the device: what it knows, its memory, its tables. */
#include "backend/host/host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/host/graph.h"
#include "backend/host/recording.h"
#include "base/align.h"
#include "base/assert.h"
#include "base/lock.h"
#include "qeffect/limits.h"

/* The level asked for by QE_HOST_LEVEL, never above what the processor has. */
static qe_status level_choose(host_level *level_out, qe_error *error_out) {
    const host_level best = qe_host_level_best();
    const char *wanted = getenv("QE_HOST_LEVEL");
    if (!wanted || !*wanted) {
        *level_out = best;
        return QE_OK;
    }
    static const char *const names[HOST_LEVELS] = {"portable", "avx2", "avx512"};
    for (int level = 0; level < HOST_LEVELS; ++level)
        if (strcmp(wanted, names[level]) == 0) {
            *level_out = (host_level)level < best ? (host_level)level : best;
            return QE_OK;
        }
    return qe_error_set(error_out, QE_ERROR_CONFIG, "use portable, avx2 or avx512, or unset it",
                        "QE_HOST_LEVEL is '%s'", wanted);
}

static qe_status host_open(qe_device **device_out, qe_error *error_out) {
    host_level level = HOST_LEVEL_PORTABLE;
    const host_blas *blas = NULL;
    QE_TRY(level_choose(&level, error_out));
    QE_TRY(qe_host_blas_join(&blas, error_out));
    qe_device *device = calloc(1, sizeof *device);
    if (!device || qe_lock_init(&device->lock, NULL, NULL) != 0) {
        free(device);
        qe_host_blas_leave();
        return qe_error_set(error_out, QE_ERROR_MEMORY, "free memory and try again", "no memory for a device");
    }
    device->kernels = qe_host_kernels_of(level);
    device->blas = blas;
    atomic_init(&device->recordings_live, 0);
    snprintf(device->identity, sizeof device->identity, "host %s %s", device->kernels->name, blas->name);
    *device_out = device;
    return QE_OK;
}

static void host_close(qe_device *device) {
    if (!device) return;
    QE_ASSERT(device->streams == 0);
    for (host_progress *progress = device->progresses; progress;) {
        host_progress *next = progress->next;
        qe_host_counter_deinit(&progress->done);
        free(progress);
        progress = next;
    }
    pthread_mutex_destroy(&device->lock);
    free(device);
    qe_host_blas_leave();
}

static const char *host_identity(const qe_device *device) { return device->identity; }

void qe_host_set_comm(qe_device *device, const qe_comm_ops *comm) {
    QE_ASSERT(device->streams == 0);
    device->comm = comm;
}

static qe_status host_alloc(qe_device *device, size_t bytes, void **address_out, qe_error *error_out) {
    QE_TRY(qe_host_recording_forbid(device, "an allocation of memory", NULL, error_out));
    if (bytes > SIZE_MAX - QE_ALIGN_BYTES)
        return qe_error_set(error_out, QE_ERROR_MEMORY, "use smaller sizes", "%zu bytes cannot be had", bytes);
    const size_t rounded = qe_aligned(bytes);
    void *address = aligned_alloc(QE_ALIGN_BYTES, rounded ? rounded : QE_ALIGN_BYTES);
    if (!address)
        return qe_error_set(error_out, QE_ERROR_MEMORY, "use a smaller model, fewer live microbatches or more memory",
                            "the allocator refused %zu bytes", bytes);
    memset(address, 0, rounded);
    *address_out = address;
    return QE_OK;
}

/* It cannot fail: the memory goes, and what is being recorded, which may name it, goes with it. */
static void host_release(qe_device *device, void *address) {
    (void)qe_host_recording_forbid(device, "a release of memory", NULL, NULL);
    free(address);
}

static qe_status host_write(qe_device *device, void *to, const void *from_host, size_t bytes, qe_error *error_out) {
    QE_TRY(qe_host_recording_forbid(device, "a write by the host", NULL, error_out));
    if (bytes > 0) memcpy(to, from_host, bytes);
    return QE_OK;
}

static qe_status host_read(qe_device *device, void *to_host, const void *from, size_t bytes, qe_error *error_out) {
    QE_TRY(qe_host_recording_forbid(device, "a read by the host", NULL, error_out));
    if (bytes > 0) memcpy(to_host, from, bytes);
    return QE_OK;
}

/* Every shape can be computed, and nothing needs to be chosen. */
static qe_status host_prepare(qe_device *device, const qe_op *op, qe_error *error_out) {
    (void)device, (void)op, (void)error_out;
    return QE_OK;
}

/* It looks at nothing. */
static int host_breach(qe_device *device, qe_breach *breach_out) {
    (void)device, (void)breach_out;
    return 0;
}

static qe_status host_run(qe_device *device, const qe_op *op, qe_error *error_out) {
    const qe_status status = qe_host_op_run(device, op);
    return status == QE_OK ? QE_OK : qe_host_op_error(status, op->kind, error_out);
}

/* It runs what it is given; backend `check` looks. */
static qe_status host_declare(qe_device *device, const qe_op *op, const qe_range *ranges, size_t count,
                              qe_error *error_out) {
    (void)device, (void)op, (void)ranges, (void)count, (void)error_out;
    return QE_OK;
}

const qe_backend *qe_host_backend(void) {
    static const qe_memory_ops memory = {
        .size = sizeof(qe_memory_ops),
        .alloc = host_alloc,
        .release = host_release,
        .host_alloc = host_alloc,
        .host_release = host_release,
        .write = host_write,
        .read = host_read,
    };
    static const qe_backend backend = {
        .size = sizeof(qe_backend),
        .name = "host",
        .numerics = {.activation = QE_FORMAT_FP32, .operands = QE_OPERANDS_DECODED},
        .open = host_open,
        .close = host_close,
        .identity = host_identity,
        .memory = &memory,
        .stream = &qe_host_streams,
        .graph = &qe_host_graphs,
        .run = host_run,
        .prepare = host_prepare,
        .breach = host_breach,
        .declare = host_declare,
    };
    return &backend;
}
