/* check.c - the device that wraps another: its life, its memory, its tables. */
#include <stdlib.h>
#include <string.h>

#include "backend/check/check.h"
#include "base/assert.h"
#include "base/lock.h"
#include "qeffect/limits.h"

_Static_assert(CHECK_GUARD_BYTES % QE_ALIGN_BYTES == 0, "memory behind a guard is aligned as it would be without");

static qe_status check_open(qe_device **device_out, qe_error *error_out) {
    qe_device *device = calloc(1, sizeof *device);
    if (!device || qe_lock_init(&device->lock, &device->changed, NULL) != 0) {
        free(device);
        return qe_error_set(error_out, QE_ERROR_MEMORY, "free memory and try again", "no memory for a device");
    }
    qe_error_set(&device->refusal, QE_ERROR_ARGUMENT, "see qe_check_wrap", "the check device wraps no other device");
    *device_out = device;
    return QE_OK;
}

qe_status qe_check_wrap(qe_device *device, const qe_backend *inner, qe_device **inner_out, qe_error *error_out) {
    QE_ASSERT(device->inner == NULL);
    qe_error refusal = {.status = QE_OK};
    const qe_status status = inner->open(&device->inner, &refusal);
    if (status != QE_OK) {
        device->refusal = refusal;
        if (error_out) *error_out = refusal;
        return status;
    }
    device->inner_backend = inner;
    if (inner_out) *inner_out = device->inner;
    return QE_OK;
}

static void check_close(qe_device *device) {
    if (!device) return;
    QE_ASSERT(device->streams == NULL);
    while (device->region_count > 0) qe_check_region_remove(device, device->regions[device->region_count - 1]->base);
    for (uint32_t i = 0; i < device->declaration_count; ++i) free(device->declarations[i].ranges);
    for (check_progress *progress = device->progresses; progress;) {
        check_progress *next = progress->next;
        free(progress);
        progress = next;
    }
    if (device->inner) device->inner_backend->close(device->inner);
    qe_lock_deinit(&device->lock, &device->changed);
    free(device->regions);
    free(device->declarations);
    free(device->spans);
    free(device);
}

/* The bits are the inner device's. */
static const char *check_identity(const qe_device *device) {
    return device->inner ? device->inner_backend->identity(device->inner) : "check";
}

qe_status qe_check_wrapped(const qe_device *device, qe_error *error_out) {
    if (device->inner) return QE_OK;
    if (error_out) *error_out = device->refusal;
    return device->refusal.status;
}

/* Guards lie around what was asked for, so that a step too far is seen in the last slot of a pool too. */
static qe_status alloc_guarded(qe_device *device, size_t bytes, void **address_out, qe_error *error_out) {
    const qe_memory_ops *memory = device->inner_backend->memory;
    void *base = NULL;
    if (bytes > SIZE_MAX - 2 * CHECK_GUARD_BYTES)
        return qe_error_set(error_out, QE_ERROR_MEMORY, "use smaller sizes", "%zu bytes cannot be had", bytes);
    QE_TRY(memory->alloc(device->inner, bytes + 2 * CHECK_GUARD_BYTES, &base, error_out));
    const qe_status status =
        qe_check_region_add(device, base, bytes + 2 * CHECK_GUARD_BYTES, CHECK_GUARD_BYTES, error_out);
    if (status != QE_OK) {
        memory->release(device->inner, base);
        return status;
    }
    *address_out = (char *)base + CHECK_GUARD_BYTES;
    return QE_OK;
}

static qe_status check_alloc(qe_device *device, size_t bytes, void **address_out, qe_error *error_out) {
    QE_TRY(qe_check_wrapped(device, error_out));
    pthread_mutex_lock(&device->lock);
    const qe_status status = alloc_guarded(device, bytes, address_out, error_out);
    pthread_mutex_unlock(&device->lock);
    return status;
}

static void check_release(qe_device *device, void *address) {
    if (!address) return;
    char *base = (char *)address - CHECK_GUARD_BYTES;
    pthread_mutex_lock(&device->lock);
    qe_check_region_remove(device, base);
    device->inner_backend->memory->release(device->inner, base);
    pthread_mutex_unlock(&device->lock);
}

static qe_status check_write(qe_device *device, void *to, const void *from_host, size_t bytes, qe_error *error_out) {
    QE_TRY(qe_check_wrapped(device, error_out));
    pthread_mutex_lock(&device->lock);
    const qe_status status = device->inner_backend->memory->write(device->inner, to, from_host, bytes, error_out);
    pthread_mutex_unlock(&device->lock);
    return status;
}

static qe_status check_read(qe_device *device, void *to_host, const void *from, size_t bytes, qe_error *error_out) {
    QE_TRY(qe_check_wrapped(device, error_out));
    pthread_mutex_lock(&device->lock);
    const qe_status status = device->inner_backend->memory->read(device->inner, to_host, from, bytes, error_out);
    pthread_mutex_unlock(&device->lock);
    return status;
}

/* Through a stream of its own would be the same and cost a thread: the calling thread judges it. */
static qe_status check_run_now(qe_device *device, const qe_op *op, qe_error *error_out) {
    QE_TRY(qe_check_wrapped(device, error_out));
    if (op->kind == QE_OP_SEND || op->kind == QE_OP_RECV)
        return device->inner_backend->run(device->inner, op, error_out);
    pthread_mutex_lock(&device->lock);
    const qe_status status = qe_check_op(device, op, error_out);
    pthread_mutex_unlock(&device->lock);
    return status;
}

static qe_status check_prepare(qe_device *device, const qe_op *op, qe_error *error_out) {
    QE_TRY(qe_check_wrapped(device, error_out));
    return device->inner_backend->prepare(device->inner, op, error_out);
}

static int check_breach(qe_device *device, qe_breach *breach_out) {
    return device->inner != NULL ? device->inner_backend->breach(device->inner, breach_out) : 0;
}

static qe_status check_declare(qe_device *device, const qe_op *op, const qe_range *ranges, size_t count,
                               qe_error *error_out) {
    QE_TRY(qe_check_wrapped(device, error_out));
    pthread_mutex_lock(&device->lock);
    const qe_status status = qe_check_declare(device, op, ranges, count, error_out);
    pthread_mutex_unlock(&device->lock);
    return status;
}

qe_check_count qe_check_counts(qe_device *device) {
    pthread_mutex_lock(&device->lock);
    const qe_check_count counts = device->counts;
    pthread_mutex_unlock(&device->lock);
    return counts;
}

const qe_backend *qe_check_backend(void) {
    static const qe_memory_ops memory = {
        .size = sizeof(qe_memory_ops),
        .alloc = check_alloc,
        .release = check_release,
        .host_alloc = check_alloc,
        .host_release = check_release,
        .write = check_write,
        .read = check_read,
    };
    static const qe_backend backend = {
        .size = sizeof(qe_backend),
        .name = "check",
        .numerics = {.activation = QE_FORMAT_FP32, .operands = QE_OPERANDS_DECODED}, /* the host's */
        .open = check_open,
        .close = check_close,
        .identity = check_identity,
        .memory = &memory,
        .stream = &qe_check_streams,
        .graph = &qe_check_graphs,
        .run = check_run_now,
        .prepare = check_prepare,
        .breach = check_breach,
        .declare = check_declare,
    };
    return &backend;
}
