/* declare.c - which bytes an op may touch, by the address of the op: what a captured graph is judged by. */
#include <stdlib.h>
#include <string.h>
#include "backend/cuda/device.h"
#include "base/assert.h"

struct cuda_declaration {
    const qe_op *op;
    size_t count;
    qe_range ranges[]; /* [count] */
};

/* The place of `op` in the sorted table, or where it would go. */
static uint64_t place_of(const qe_device *device, const qe_op *op) {
    uint64_t low = 0, high = device->declaration_count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if ((uintptr_t)device->declarations[middle]->op < (uintptr_t)op)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int holds(const qe_device *device, uint64_t place, const qe_op *op) {
    return place < device->declaration_count && device->declarations[place]->op == op;
}

static void forget(qe_device *device, uint64_t place) {
    free(device->declarations[place]);
    device->declaration_count--;
    memmove(&device->declarations[place], &device->declarations[place + 1],
            (device->declaration_count - place) * sizeof *device->declarations);
}

static qe_status grow(qe_device *device, qe_error *error_out) {
    enum { FIRST = 1024 };
    if (device->declaration_count < device->declaration_capacity) return QE_OK;
    uint64_t wanted = device->declaration_capacity == 0 ? FIRST : 2 * device->declaration_capacity;
    cuda_declaration **grown = realloc(device->declarations, wanted * sizeof *grown);
    if (grown == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for declarations");
    device->declarations = grown;
    device->declaration_capacity = wanted;
    return QE_OK;
}

static qe_status keep(qe_device *device, uint64_t place, const qe_op *op, const qe_range *ranges, size_t count,
                      qe_error *error_out) {
    QE_TRY(grow(device, error_out));
    cuda_declaration *kept = malloc(sizeof *kept + count * sizeof *ranges);
    if (kept == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a declaration");
    kept->op = op;
    kept->count = count;
    memcpy(kept->ranges, ranges, count * sizeof *ranges);
    memmove(&device->declarations[place + 1], &device->declarations[place],
            (device->declaration_count - place) * sizeof *device->declarations);
    device->declarations[place] = kept;
    device->declaration_count++;
    return QE_OK;
}

qe_status qe_cuda_declare(qe_device *device, const qe_op *op, const qe_range *ranges, size_t count,
                          qe_error *error_out) {
    uint64_t place = place_of(device, op);
    if (holds(device, place, op)) forget(device, place);
    return count == 0 ? QE_OK : keep(device, place, op, ranges, count, error_out);
}

const qe_range *qe_cuda_declared(const qe_device *device, const qe_op *op, size_t *count_out) {
    uint64_t place = place_of(device, op);
    if (!holds(device, place, op)) {
        *count_out = 0;
        return NULL;
    }
    *count_out = device->declarations[place]->count;
    return device->declarations[place]->ranges;
}

void qe_cuda_declarations_free(qe_device *device) {
    for (uint64_t i = 0; i < device->declaration_count; i++) free(device->declarations[i]);
    free(device->declarations);
}
