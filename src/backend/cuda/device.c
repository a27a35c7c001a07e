/* device.c - the device: its life, its memory, its tables. */
#include "backend/cuda/device.h"
#include "backend/cuda/lt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"

enum {
    COMPUTE_CAPABILITY_MIN = 90, /* FP8 matrix products need Ada (89); these kernels are compiled for Hopper */
    RUNTIME_MIN = 13000,
};

qe_status qe_cuda_check(cudaError_t code, const char *what, qe_error *error_out) {
    if (code == cudaSuccess) return QE_OK;
    (void)cudaGetLastError(); /* the sticky copy has been told */
    if (code == cudaErrorMemoryAllocation)
        return qe_error_set(error_out, QE_ERROR_MEMORY, QE_CUDA_LESS_MEMORY, "%s: the device has no memory for it",
                            what);
    return qe_error_set(error_out, QE_ERROR_DEVICE, NULL, "%s: %s", what, cudaGetErrorString(code));
}

/* The sum of what fits is for the plan to know. */
qe_status qe_cuda_taken(cudaError_t code, uint64_t bytes, const char *what, qe_error *error_out) {
    size_t free_bytes = 0, total_bytes = 0;
    char free_words[64] = "";
    if (code != cudaErrorMemoryAllocation) return qe_cuda_check(code, what != NULL ? what : "an allocation", error_out);
    (void)cudaGetLastError();
    if (cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess)
        (void)snprintf(free_words, sizeof free_words, ", %zu of %zu are free", free_bytes, total_bytes);
    (void)cudaGetLastError();
    return qe_error_set(error_out, QE_ERROR_MEMORY, QE_CUDA_LESS_MEMORY, "%s%s%llu bytes more are needed%s",
                        what != NULL ? what : "", what != NULL ? ": " : "", (unsigned long long)bytes, free_words);
}

qe_status qe_cuda_host_taken(cudaError_t code, uint64_t bytes, qe_error *error_out) {
    if (code != cudaErrorMemoryAllocation) return qe_cuda_check(code, "page-locked memory", error_out);
    (void)cudaGetLastError();
    return qe_error_set(error_out, QE_ERROR_MEMORY,
                        "free memory of the host, or raise what a process may take and lock of it (ulimit -l and -v, a "
                        "container's limit)",
                        "%llu bytes of the host's memory, page-locked, cannot be had", (unsigned long long)bytes);
}

qe_status qe_cuda_start(qe_error *error_out) {
    int driver = 0, count = 0;
    /* Streams that share a connection wait for each other, and a rank may wait for a message on any of its own. The
     * driver reads this when it starts; what a person has set stays. */
    (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    cudaError_t code = cudaDriverGetVersion(&driver);
    if (code == cudaSuccess && driver == 0)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                            "use --device host, or install NVIDIA's driver 580 or newer", "there is no NVIDIA driver");
    if (code == cudaSuccess && driver < RUNTIME_MIN && driver > 0)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "update the NVIDIA driver to 580 or newer",
                            "the driver speaks CUDA %d.%d, this build needs %d.%d", driver / 1000, driver % 1000 / 10,
                            RUNTIME_MIN / 1000, RUNTIME_MIN % 1000 / 10);
    code = cudaGetDeviceCount(&count);
    (void)cudaGetLastError();
    if (code == cudaSuccess && count > 0) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "use --device host, or a machine with an NVIDIA GPU",
                        "no GPU is to be had: %s", code == cudaSuccess ? "there is none" : cudaGetErrorString(code));
}

static qe_status capability_check(const struct cudaDeviceProp *properties, qe_error *error_out) {
    int capability = properties->major * 10 + properties->minor;
    if (capability == COMPUTE_CAPABILITY_MIN) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "use a Hopper GPU (H100, H200) or --device host",
                        "%s has compute capability %d.%d; the kernels are built for %d.%d", properties->name,
                        properties->major, properties->minor, COMPUTE_CAPABILITY_MIN / 10,
                        COMPUTE_CAPABILITY_MIN % 10);
}

static qe_status device_fill(qe_device *device, qe_error *error_out) {
    struct cudaDeviceProp properties;
    QE_TRY(qe_cuda_check(cudaGetDevice(&device->ordinal), "the current device", error_out));
    QE_TRY(qe_cuda_check(cudaGetDeviceProperties(&properties, device->ordinal), "properties of the GPU", error_out));
    QE_TRY(capability_check(&properties, error_out));
    QE_TRY(qe_cuda_check(cudaStreamCreateWithFlags(&device->aside, cudaStreamNonBlocking), "a stream", error_out));
    QE_TRY(qe_cuda_gemm_create(device->aside, &device->gemm, error_out));
    QE_TRY(qe_cuda_attention_create(device->aside, &device->attention, error_out));
    snprintf(device->identity, sizeof device->identity, "cuda %.60s %.30s %.50s", properties.name,
             qe_cuda_gemm_identity(device->gemm), qe_cuda_attention_identity(device->attention));
    return QE_OK;
}

static void cuda_close(qe_device *device) {
    if (device == NULL) return;
    QE_ASSERT(device->streams == 0);
    qe_cuda_timeline_destroy(device->timeline);
    qe_cuda_clocks_close(device->clocks);
    if (device->substitute.destroy != NULL) device->substitute.destroy(device->substitute.context);
    qe_cuda_gemm_destroy(device->gemm);
    qe_cuda_attention_destroy(device->attention);
    if (device->aside != NULL) (void)cudaStreamDestroy(device->aside);
    qe_cuda_keeping_close(device);
    qe_order_destroy(device->order);
    free(device->loaded);
    qe_cuda_declarations_free(device);
    free(device);
}

static qe_status cuda_open(qe_device **device_out, qe_error *error_out) {
    QE_TRY(qe_cuda_start(error_out));
    qe_device *device = calloc(1, sizeof *device);
    if (device == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a device");
    qe_status status = device_fill(device, error_out);
    if (status != QE_OK) {
        cuda_close(device);
        return status;
    }
    *device_out = device;
    return QE_OK;
}

static const char *cuda_identity(const qe_device *device) {
    return device->identity;
}

static qe_status cuda_alloc(qe_device *device, size_t bytes, void **address_out, qe_error *error_out) {
    void *address = NULL;
    const size_t wanted = bytes > 0 ? bytes : QE_ALIGN_BYTES;
    cudaError_t code = cudaMalloc(&address, wanted);
    /* Not the default stream: what follows on others would not wait for it. */
    if (code == cudaSuccess) code = cudaMemsetAsync(address, 0, wanted, device->aside);
    if (code == cudaSuccess) code = cudaStreamSynchronize(device->aside);
    if (code != cudaSuccess) (void)cudaFree(address); /* it was there, and could not be cleared */
    QE_TRY(qe_cuda_taken(code, bytes, NULL, error_out));
    device->taken_bytes += bytes;
    device->allocations++;
    *address_out = address;
    return QE_OK;
}

static void cuda_release(qe_device *device, void *address) {
    (void)device;
    (void)cudaFree(address);
}

static qe_status cuda_host_alloc(qe_device *device, size_t bytes, void **address_out, qe_error *error_out) {
    void *address = NULL;
    (void)device;
    QE_TRY(qe_cuda_host_taken(cudaHostAlloc(&address, bytes > 0 ? bytes : QE_ALIGN_BYTES, cudaHostAllocPortable), bytes,
                              error_out));
    memset(address, 0, bytes);
    *address_out = address;
    return QE_OK;
}

static void cuda_host_release(qe_device *device, void *address) {
    (void)device;
    (void)cudaFreeHost(address);
}

static qe_status cuda_copy(qe_device *device, void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                           const char *what, qe_error *error_out) {
    if (bytes == 0) return QE_OK;
    cudaError_t code = cudaMemcpyAsync(to, from, bytes, kind, device->aside);
    if (code == cudaSuccess) code = cudaStreamSynchronize(device->aside);
    return qe_cuda_check(code, what, error_out);
}

static qe_status cuda_write(qe_device *device, void *to, const void *from_host, size_t bytes, qe_error *error_out) {
    QE_TRY(qe_cuda_watch_host(device, to, bytes, 1));
    return cuda_copy(device, to, from_host, bytes, cudaMemcpyHostToDevice, "a write by the host", error_out);
}

static qe_status cuda_read(qe_device *device, void *to_host, const void *from, size_t bytes, qe_error *error_out) {
    QE_TRY(qe_cuda_watch_host(device, (void *)(uintptr_t)from, bytes, 0));
    return cuda_copy(device, to_host, from, bytes, cudaMemcpyDeviceToHost, "a read by the host", error_out);
}

static qe_status cuda_run(qe_device *device, const qe_op *op, qe_error *error_out) {
    QE_TRY(qe_cuda_op_prepare(device, op, error_out));
    const qe_error before = device->failure; /* a stream's op failed: told at its sync, and not as this one */
    device->failure.status = QE_OK;
    qe_status status = qe_cuda_op_queue(device, op, device->aside);
    if (status != QE_OK && error_out != NULL) *error_out = device->failure;
    device->failure = before;
    if (status != QE_OK) return status;
    return qe_cuda_check(cudaStreamSynchronize(device->aside), qe_op_name(op->kind), error_out);
}

qe_status qe_cuda_configure(qe_device *device, const qe_cuda_options *options, qe_error *error_out) {
    device->tune = options->tune || options->choices_path != NULL;
    device->nvtx = options->nvtx;
    device->choices_path = options->choices_path;
    device->honours = options->honour;
    device->delay_max_ns = options->delay_max_ns;
    device->delay_state = options->delay_seed;
    if (options->watch && device->order == NULL) QE_TRY(qe_order_create(&device->order, error_out));
    if (options->timeline_path != NULL)
        QE_TRY(qe_cuda_timeline_create(options->timeline_path, &device->timeline, error_out));
    if (options->choices_path == NULL || (!options->honour && access(options->choices_path, F_OK) != 0)) return QE_OK;
    return qe_cuda_choices_read(device->gemm, device->attention, options->choices_path, error_out);
}

qe_cuda_memory qe_cuda_memory_of(qe_device *device) {
    qe_cuda_memory memory = {.taken_bytes = device->taken_bytes, .allocations = device->allocations,
                             .code_bytes = device->code_bytes,
                             .attention_bytes = qe_cuda_attention_bytes(device->attention)};
    size_t free_bytes = 0, total_bytes = 0;
    if (cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) {
        memory.free_bytes = free_bytes;
        memory.total_bytes = total_bytes;
    }
    return memory;
}

void qe_cuda_substitute_set(qe_device *device, const qe_cuda_substitute *substitute) {
    QE_ASSERT(device->substitute.takes == NULL && device->loaded_count == 0);
    char own[sizeof device->identity];
    snprintf(own, sizeof own, "%s", device->identity + strlen("cuda"));
    device->substitute = *substitute;
    snprintf(device->identity, sizeof device->identity, "%.16s%.140s, %.40s", substitute->backend, own,
             substitute->library);
}

const qe_memory_ops qe_cuda_memories = {
    .size = sizeof(qe_memory_ops),
    .alloc = cuda_alloc,
    .release = cuda_release,
    .host_alloc = cuda_host_alloc,
    .host_release = cuda_host_release,
    .write = cuda_write,
    .read = cuda_read,
    .keep = qe_cuda_memory_keep,
    .fetch = qe_cuda_memory_fetch,
};

const qe_backend *qe_cuda_backend(void) {
    static const qe_backend backend = {
        .size = sizeof(qe_backend),
        .name = "cuda",
        .numerics = {.activation = QE_FORMAT_BF16, .operands = QE_OPERANDS_CODES, .sums_apart = 1,
                     .workspace_bytes = QE_LT_WORKSPACE_BYTES},
        .open = cuda_open,
        .close = cuda_close,
        .identity = cuda_identity,
        .memory = &qe_cuda_memories,
        .stream = &qe_cuda_streams,
        .graph = &qe_cuda_graphs,
        .run = cuda_run,
        .prepare = qe_cuda_op_prepare,
        .breach = qe_cuda_breach,
        .declare = qe_cuda_declare,
    };
    return &backend;
}
