/* test_open.c - what a machine lacks for the cuda backend is told when the device is opened, before any work, with a
 * way out: a driver, a newer one, a GPU, a Hopper one, cuDNN, memory. Needs no GPU: the runtime that device.c calls,
 * and its libraries, are replaced here. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "backend/cuda/device.h"

/* --- a machine that is as it is told ------------------------------------------------------------------------------ */

typedef struct machine {
    int driver, gpus;
    cudaError_t counting;
    int major, minor;
    int lacks_cublaslt, lacks_cudnn;
    size_t free_bytes, host_bytes;
    int refuses_ops, says_nothing; /* an op is not queued; of memory it only says no */
} machine;

static machine now;
static int streams, opened; /* that are there: nothing is left of a device that could not be opened */

cudaError_t cudaDriverGetVersion(int *version_out) { return *version_out = now.driver, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count_out) { return *count_out = now.gpus, now.counting; }
cudaError_t cudaGetDevice(int *device_out) { return *device_out = 0, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    (void)device;
    memset(properties, 0, sizeof *properties);
    (void)snprintf(properties->name, sizeof properties->name, "GPU of the test");
    properties->major = now.major, properties->minor = now.minor;
    return cudaSuccess;
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t code) { return code == cudaErrorNoDevice ? "no device" : "an error"; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream_out, unsigned flags) {
    return (void)flags, *stream_out = malloc(1), streams++, cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return free(stream), streams--, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return (void)stream, cudaSuccess; }
cudaError_t cudaMalloc(void **address_out, size_t bytes) {
    *address_out = bytes <= now.free_bytes ? malloc(bytes) : NULL;
    return *address_out != NULL ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *address) { return free(address), cudaSuccess; }
cudaError_t cudaHostAlloc(void **address_out, size_t bytes, unsigned flags) {
    (void)flags, *address_out = bytes <= now.host_bytes ? malloc(bytes) : NULL;
    return *address_out != NULL ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeHost(void *address) { return free(address), cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *free_out, size_t *total_out) {
    if (now.says_nothing) return cudaErrorUnknown;
    return *free_out = now.free_bytes, *total_out = 1000000, cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return (void)kind, (void)stream, memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
    return (void)stream, memset(at, value, bytes), cudaSuccess;
}

qe_status qe_cuda_gemm_create(cudaStream_t aside, qe_cuda_gemm **gemm_out, qe_error *error_out) {
    (void)aside;
    if (now.lacks_cublaslt) return qe_error_set(error_out, QE_ERROR_DEVICE, "another", "cuBLASLt does not open");
    return *gemm_out = malloc(1), opened++, QE_OK;
}
void qe_cuda_gemm_destroy(qe_cuda_gemm *gemm) { opened -= gemm != NULL, free(gemm); }
const char *qe_cuda_gemm_identity(const qe_cuda_gemm *gemm) { return (void)gemm, "cuBLASLt of the test"; }
qe_status qe_cuda_attention_create(cudaStream_t aside, qe_cuda_attention **attention_out, qe_error *error_out) {
    (void)aside;
    if (now.lacks_cudnn) return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "install cuDNN", "cuDNN is not there");
    return *attention_out = malloc(1), opened++, QE_OK;
}
void qe_cuda_attention_destroy(qe_cuda_attention *attention) { opened -= attention != NULL, free(attention); }
const char *qe_cuda_attention_identity(const qe_cuda_attention *attention) {
    return (void)attention, "cuDNN of the test";
}
uint64_t qe_cuda_attention_bytes(const qe_cuda_attention *attention) { return (void)attention, 0; }
qe_status qe_cuda_choices_read(qe_cuda_gemm *gemm, qe_cuda_attention *attention, const char *path,
                               qe_error *error_out) {
    return (void)gemm, (void)attention, (void)path, (void)error_out, QE_OK;
}

/* Not called. */
const qe_stream_ops qe_cuda_streams = {.size = sizeof(qe_stream_ops)};
const qe_graph_ops qe_cuda_graphs = {.size = sizeof(qe_graph_ops)};
void qe_cuda_clocks_close(struct cuda_clocks *clocks) { (void)clocks; }
void qe_cuda_declarations_free(qe_device *device) { (void)device; }
void qe_cuda_keeping_close(qe_device *device) { (void)device; }
void qe_cuda_timeline_destroy(cuda_timeline *timeline) { (void)timeline; }
int qe_cuda_breach(qe_device *device, qe_breach *breach_out) { return (void)device, (void)breach_out, 0; }
qe_status qe_cuda_declare(qe_device *device, const qe_op *op, const qe_range *ranges, size_t count,
                          qe_error *error_out) {
    return (void)device, (void)op, (void)ranges, (void)count, (void)error_out, QE_OK;
}
qe_status qe_cuda_memory_keep(qe_device *device, const qe_keep_range *ranges, size_t count, qe_error *error_out) {
    return (void)device, (void)ranges, (void)count, (void)error_out, QE_OK;
}
qe_status qe_cuda_memory_fetch(qe_device *device, void *to_host, const void *kept, size_t bytes, qe_error *error_out) {
    return (void)device, (void)to_host, (void)kept, (void)bytes, (void)error_out, QE_OK;
}
qe_status qe_cuda_op_prepare(qe_device *device, const qe_op *op, qe_error *error_out) {
    return (void)device, (void)op, (void)error_out, QE_OK;
}
qe_status qe_cuda_op_queue(qe_device *device, const qe_op *op, cudaStream_t stream) {
    (void)op, (void)stream;
    if (!now.refuses_ops) return QE_OK;
    if (device->failure.status != QE_OK) return QE_ERROR_DEVICE; /* the first is kept */
    return qe_error_set(&device->failure, QE_ERROR_DEVICE, NULL, "this op");
}
qe_status qe_cuda_timeline_create(const char *path, cuda_timeline **timeline_out, qe_error *error_out) {
    return (void)path, (void)timeline_out, (void)error_out, QE_OK;
}
qe_status qe_cuda_watch_host(qe_device *device, void *at, size_t bytes, int write) {
    return (void)device, (void)at, (void)bytes, (void)write, QE_OK;
}

/* --- what is told ---------------------------------------------------------------------------------------------- */

static const machine good = {.driver = 13010, .gpus = 1, .major = 9, .free_bytes = 1 << 20, .host_bytes = 1 << 20};
static int failed, checked;

static void check(int holds, const char *what, const qe_error *error) {
    checked++;
    failed += !holds;
    if (!holds) printf("FAILED %s: %s (%s)\n", what, error->message, error->remedy);
}

static void expect(const char *what, machine is, qe_status wanted, const char *words, const char *remedy) {
    qe_device *device = NULL;
    qe_error error = {0};
    now = is;
    const qe_status status = qe_cuda_backend()->open(&device, &error);
    const int told = strstr(error.message, words) != NULL && strstr(error.remedy, remedy) != NULL;
    check(status == wanted && device == NULL && told && streams == 0 && opened == 0, what, &error);
}

static void expect_what_is_lacking(void) {
    machine is = good;
    is.driver = 0;
    expect("no driver", is, QE_ERROR_UNSUPPORTED, "no NVIDIA driver", "580");
    is = good, is.driver = 12080;
    expect("an old driver", is, QE_ERROR_UNSUPPORTED, "speaks CUDA 12.8, this build needs 13.0", "580");
    is = good, is.gpus = 0;
    expect("no GPU", is, QE_ERROR_UNSUPPORTED, "no GPU is to be had: there is none", "--device host");
    is.counting = cudaErrorNoDevice;
    expect("no GPU, as the runtime says", is, QE_ERROR_UNSUPPORTED, "no GPU is to be had: no device", "--device host");
    static const int others[][2] = {{7, 5}, {8, 0}, {8, 9}, {10, 0}, {12, 0}}; /* without FP8, or our kernels */
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        char words[64];
        is = good, is.major = others[i][0], is.minor = others[i][1];
        (void)snprintf(words, sizeof words, "GPU of the test has compute capability %d.%d;", is.major, is.minor);
        expect("another GPU", is, QE_ERROR_UNSUPPORTED, words, "Hopper");
    }
    is = good, is.lacks_cublaslt = 1;
    expect("no cuBLASLt", is, QE_ERROR_DEVICE, "cuBLASLt does not open", "another");
    is = good, is.lacks_cudnn = 1;
    expect("no cuDNN", is, QE_ERROR_UNSUPPORTED, "cuDNN is not there", "install cuDNN");
}

/* How much was wanted and how much there is; what is there is not touched. */
static void expect_little_memory(void) {
    const qe_backend *backend = qe_cuda_backend();
    qe_device *device = NULL;
    qe_error error = {0};
    void *first = NULL, *second = NULL;
    now = good, now.free_bytes = 1000;
    check(backend->open(&device, &error) == QE_OK && streams == 1 && opened == 2, "a good machine", &error);
    check(strcmp(backend->identity(device), "cuda GPU of the test cuBLASLt of the test cuDNN of the test") == 0,
          backend->identity(device), &error);
    check(backend->memory->alloc(device, 1000, &first, &error) == QE_OK, "all of it", &error);
    check(backend->memory->alloc(device, 1001, &second, &error) == QE_ERROR_MEMORY && second == NULL &&
              strstr(error.message, "1001 bytes more are needed, 1000 of 1000000 are free") != NULL &&
              strstr(error.remedy, "train.sequences") != NULL,
          "too little memory", &error);
    now.says_nothing = 1;
    check(backend->memory->alloc(device, 1001, &second, &error) == QE_ERROR_MEMORY &&
              strcmp(error.message, "1001 bytes more are needed") == 0 && error.remedy[0] != '\0',
          "too little memory, and nobody says how much there is", &error);
    now.says_nothing = 0, now.host_bytes = 10;
    check(backend->memory->host_alloc(device, 11, &second, &error) == QE_ERROR_MEMORY && second == NULL &&
              strstr(error.message, "11 bytes of the host's memory, page-locked,") != NULL &&
              strstr(error.message, "device") == NULL && strstr(error.remedy, "ulimit -l") != NULL,
          "too little memory of the host", &error);
    check(qe_cuda_memory_of(device).taken_bytes == 1000, "what was taken", &error);
    backend->memory->release(device, first);
    backend->close(device);
    check(streams == 0 && opened == 0, "nothing is left", &error);
}

/* What failed on a stream is told at its sync, and is not why an op that is run at once fails. */
static void expect_own_failure(void) {
    const qe_backend *backend = qe_cuda_backend();
    const qe_op op = {.kind = QE_OP_ACCUMULATE};
    qe_device *device = NULL;
    qe_error error = {0};
    now = good, now.refuses_ops = 1;
    check(backend->open(&device, &error) == QE_OK, "a good machine", &error);
    (void)qe_error_set(&device->failure, QE_ERROR_DEVICE, NULL, "an op of a stream");
    check(backend->run(device, &op, &error) == QE_ERROR_DEVICE && strcmp(error.message, "this op") == 0,
          "an op that fails", &error);
    check(strcmp(device->failure.message, "an op of a stream") == 0, "what is still to be told", &device->failure);
    check(device->failure.status == QE_ERROR_DEVICE, "its status", &device->failure);
    device->failure.status = QE_OK;
    check(backend->run(device, &op, &error) == QE_ERROR_DEVICE && device->failure.status == QE_OK, "told once", &error);
    backend->close(device);
}

int main(void) {
    expect_what_is_lacking();
    expect_little_memory();
    expect_own_failure();
    printf("%d checks, %d failed\n", checked, failed);
    return failed > 0;
}
