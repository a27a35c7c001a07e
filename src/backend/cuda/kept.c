/* kept.c - a second copy of the state on the device, and its way to the host beside the work. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/device.h"
#include "base/assert.h"

/* What is on its way to the host at a time. From memory that is not page-locked the driver would copy in pieces of its
 * own, and keep others from launching meanwhile. */
enum { STAGING_BYTES = 8 << 20 };

static qe_status keeping_open(qe_device *device, qe_error *error_out) {
    if (device->kept == NULL)
        QE_TRY(qe_cuda_check(cudaEventCreateWithFlags(&device->kept, cudaEventDisableTiming), "an event", error_out));
    if (device->fetching == NULL)
        QE_TRY(qe_cuda_check(cudaStreamCreateWithFlags(&device->fetching, cudaStreamNonBlocking), "a stream",
                             error_out));
    if (device->staging != NULL) return QE_OK;
    return qe_cuda_host_taken(cudaHostAlloc(&device->staging, STAGING_BYTES, cudaHostAllocPortable), STAGING_BYTES,
                              error_out);
}

static qe_status keeping_grow(qe_device *device, size_t count, qe_error *error_out) {
    QE_TRY(keeping_open(device, error_out));
    if (count <= device->keeping_capacity) return QE_OK;
    (void)cudaFree(device->keeping);
    device->keeping = NULL;
    device->keeping_capacity = 0;
    void *grown = NULL;
    const size_t bytes = count * sizeof *device->keeping;
    QE_TRY(qe_cuda_taken(cudaMalloc(&grown, bytes), bytes, "a copy of the state", error_out));
    device->keeping = grown;
    device->keeping_capacity = count;
    return QE_OK;
}

static uint64_t pieces_fill(qe_keep_piece *pieces, const qe_keep_range *ranges, size_t count) {
    uint64_t all = 0;
    for (size_t i = 0; i < count; i++) {
        QE_ASSERT(ranges[i].bytes > 0);
        pieces[i] = (qe_keep_piece){ranges[i].from, ranges[i].to, ranges[i].bytes, all};
        all += qe_cuda_keep_pieces(ranges[i].bytes);
    }
    return all;
}

qe_status qe_cuda_memory_keep(qe_device *device, const qe_keep_range *ranges, size_t count, qe_error *error_out) {
    if (count == 0) return QE_OK;
    QE_TRY(keeping_grow(device, count, error_out));
    qe_keep_piece *pieces = calloc(count, sizeof *pieces);
    if (pieces == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a copy of the state");
    const uint64_t all = pieces_fill(pieces, ranges, count);
    cudaError_t code = cudaMemcpyAsync(device->keeping, pieces, count * sizeof *pieces, cudaMemcpyHostToDevice,
                                       device->aside);
    if (code == cudaSuccess && qe_cuda_keep(device->keeping, (uint32_t)count, all, device->aside) != QE_OK) {
        code = cudaGetLastError();
        if (code == cudaSuccess) code = cudaErrorLaunchFailure; /* refused, and the runtime was not asked */
    }
    free(pieces); /* the driver has read it */
    if (code == cudaSuccess) code = cudaEventRecord(device->kept, device->aside);
    return qe_cuda_check(code, "a copy of the state", error_out);
}

qe_status qe_cuda_memory_fetch(qe_device *device, void *to_host, const void *kept, size_t bytes, qe_error *error_out) {
    cudaError_t code = cudaSetDevice(device->ordinal); /* the thread may be new here */
    if (code == cudaSuccess) code = cudaStreamWaitEvent(device->fetching, device->kept, 0);
    for (size_t done = 0; code == cudaSuccess && done < bytes; done += STAGING_BYTES) {
        const size_t piece = bytes - done < STAGING_BYTES ? bytes - done : STAGING_BYTES;
        code = cudaMemcpyAsync(device->staging, (const char *)kept + done, piece, cudaMemcpyDeviceToHost,
                               device->fetching);
        if (code == cudaSuccess) code = cudaStreamSynchronize(device->fetching);
        if (code == cudaSuccess) memcpy((char *)to_host + done, device->staging, piece);
    }
    return qe_cuda_check(code, "a copy of the state to the host", error_out);
}

void qe_cuda_keeping_close(qe_device *device) {
    (void)cudaFree(device->keeping);
    (void)cudaFreeHost(device->staging);
    if (device->kept != NULL) (void)cudaEventDestroy(device->kept);
    if (device->fetching != NULL) (void)cudaStreamDestroy(device->fetching);
}
