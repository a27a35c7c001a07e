/* watch.c - what streams were really given, told to the order of the device: ops and graphs with the bytes that they
 * declared, and every access by the host. */
#include <stdlib.h>
#include <string.h>
#include "backend/cuda/device.h"
#include "base/assert.h"

static int watches(const qe_device *device) {
    return device->order != NULL && device->recording == NULL;
}

static qe_status judged(qe_device *device, qe_status status, const qe_breach *found) {
    if (status != QE_CONTRACT) return status;
    if (!device->breached) device->breach = *found;
    device->breached = 1;
    return QE_CONTRACT;
}

qe_status qe_cuda_watch_op(qe_device *device, uint32_t stream, const qe_op *op) {
    size_t count;
    qe_breach found;
    if (!watches(device)) return QE_OK;
    const qe_range *ranges = qe_cuda_declared(device, op, &count);
    return judged(device, qe_order_access(device->order, stream, qe_op_name(op->kind), ranges, count, &found), &found);
}

qe_status qe_cuda_watch_launch(const qe_graph *graph, uint32_t stream) {
    qe_breach found;
    qe_device *device = graph->device;
    if (!watches(device)) return QE_OK;
    qe_status status = qe_order_access(device->order, stream, "graph", graph->touched, graph->touched_count, &found);
    return judged(device, status, &found);
}

qe_status qe_cuda_watch_host(qe_device *device, void *at, size_t bytes, int write) {
    qe_breach found;
    qe_range range = {.at = at, .bytes = bytes, .read = !write, .write = write != 0, .object = "memory"};
    if (!watches(device)) return QE_OK;
    return judged(device, qe_order_access(device->order, QE_NONE, "the host", &range, 1, &found), &found);
}

int qe_cuda_breach(qe_device *device, qe_breach *breach_out) {
    if (!device->breached) return 0;
    *breach_out = device->breach;
    device->breached = 0;
    return 1;
}

static int by_place(const void *a, const void *b) {
    const qe_range *x = a, *y = b;
    if (x->write != y->write) return x->write < y->write ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

/* Ranges that meet become one; those that are written and those that are only read stay apart. */
static size_t merge(qe_range *ranges, size_t count) {
    size_t kept = 0;
    qsort(ranges, count, sizeof *ranges, by_place);
    for (size_t i = 0; i < count; i++) {
        qe_range *last = kept > 0 ? &ranges[kept - 1] : NULL;
        uintptr_t begin = (uintptr_t)ranges[i].at, end = begin + ranges[i].bytes;
        if (last == NULL || last->write != ranges[i].write || begin > (uintptr_t)last->at + last->bytes)
            ranges[kept++] = ranges[i];
        else if (end > (uintptr_t)last->at + last->bytes)
            last->bytes = end - (uintptr_t)last->at;
    }
    return kept;
}

static size_t gather(const qe_graph *graph, qe_range *ranges_out) {
    size_t total = 0;
    for (uint64_t i = 0; i < graph->claim_count; i++) {
        size_t count;
        const qe_op *op = graph->claims[i].op;
        if (i > 0 && graph->claims[i - 1].op == op) continue; /* a further node of it, or the same bytes again */
        const qe_range *ranges = qe_cuda_declared(graph->device, op, &count);
        if (ranges_out != NULL && count > 0) memcpy(ranges_out + total, ranges, count * sizeof *ranges);
        total += count;
    }
    return total;
}

qe_status qe_cuda_watch_graph(qe_graph *graph, qe_error *error_out) {
    if (graph->device->order == NULL) return QE_OK;
    size_t count = gather(graph, NULL);
    graph->touched = calloc(count + 1, sizeof *graph->touched);
    if (graph->touched == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to watch a graph");
    gather(graph, graph->touched);
    graph->touched_count = merge(graph->touched, count);
    return QE_OK;
}
