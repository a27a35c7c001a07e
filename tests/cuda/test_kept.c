/* test_kept.c - a second copy of the state: each call that it makes fails in turn, which is told and leaves what the
 * next copy can begin with. Needs no GPU: the runtime that kept.c calls is replaced here. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "backend/cuda/device.h"
#include "base/assert.h"
#include "checked.h"

/* --- a runtime that fails where it is told to --------------------------------------------------------------------- */

static struct {
    int calls, fails_at; /* counted from 1; 0: none fails */
    int held;            /* what was created and not destroyed */
    qe_status keeps;     /* what the launcher says, without a word to the runtime */
} now;

static cudaError_t called(void) { return ++now.calls == now.fails_at ? cudaErrorUnknown : cudaSuccess; }

static cudaError_t made(void **object_out) {
    const cudaError_t code = called();
    *object_out = code == cudaSuccess ? malloc(1 << 12) : NULL;
    now.held += code == cudaSuccess;
    return code;
}

static cudaError_t unmade(void *object) { return now.held -= object != NULL, free(object), cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event_out, unsigned flags) {
    return (void)flags, made((void **)event_out);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return unmade(event); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream_out, unsigned flags) {
    return (void)flags, made((void **)stream_out);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return unmade(stream); }
cudaError_t cudaMalloc(void **address_out, size_t bytes) { return (void)bytes, made(address_out); }
cudaError_t cudaFree(void *address) { return unmade(address); }
cudaError_t cudaFreeHost(void *address) { return unmade(address); }
cudaError_t cudaHostAlloc(void **address_out, size_t bytes, unsigned flags) {
    const cudaError_t code = called();
    (void)flags, *address_out = code == cudaSuccess ? malloc(bytes) : NULL;
    now.held += code == cudaSuccess;
    return code;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind, (void)stream;
    const cudaError_t code = called();
    if (code == cudaSuccess) memcpy(to, from, bytes);
    return code;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return (void)event, (void)stream, called(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return (void)stream, (void)event, (void)flags, called();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return (void)stream, called(); }
cudaError_t cudaSetDevice(int ordinal) { return (void)ordinal, called(); }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }

uint64_t qe_cuda_keep_pieces(uint64_t bytes) { return (bytes + 99) / 100; }
qe_status qe_cuda_keep(const qe_keep_piece *pieces, uint32_t count, uint64_t pieces_all, cudaStream_t stream) {
    (void)pieces_all, (void)stream;
    if (now.keeps != QE_OK) return now.keeps;
    if (called() != cudaSuccess) return QE_ERROR_DEVICE;
    for (uint32_t i = 0; i < count; i++) memcpy(pieces[i].to, pieces[i].from, pieces[i].bytes);
    return QE_OK;
}

/* --- a state of two ranges ---------------------------------------------------------------------------------------- */

static char state[2][256], kept[2][256], fetched[256];
static int checked, failed;

static void check(int good, const char *what) {
    checked++;
    failed += !good;
    if (!good) printf("FAILED %s, call %d\n", what, now.fails_at);
}

static qe_status keep_and_fetch(qe_device *device, char mark) {
    const qe_keep_range ranges[] = {{state[0], kept[0], sizeof *state}, {state[1], kept[1], sizeof *state}};
    qe_error error;
    memset(state, mark, sizeof state), memset(kept, 0, sizeof kept), memset(fetched, 0, sizeof fetched);
    QE_TRY(qe_cuda_memory_keep(device, ranges, 2, &error));
    return qe_cuda_memory_fetch(device, fetched, kept[1], sizeof fetched, &error);
}

static int is_whole(void) {
    return memcmp(state, kept, sizeof state) == 0 && memcmp(state[1], fetched, sizeof fetched) == 0;
}

/* Returns how many calls the copy makes. */
static int fail_at(int call) {
    qe_device device = {.ordinal = 0};
    now.calls = 0, now.fails_at = call;
    check((keep_and_fetch(&device, 'a') == QE_OK) == (call == 0), "a copy, or why there is none");
    const int calls = now.calls;
    check(call > 0 || is_whole(), "bytes of the copy");
    now.fails_at = 0;
    check(keep_and_fetch(&device, 'b') == QE_OK && is_whole(), "the next copy");
    qe_cuda_keeping_close(&device);
    check(now.held == 0, "what is left");
    return calls;
}

/* A launch that is refused before the runtime is asked is no copy. */
static void expect_refusals(void) {
    static const qe_status refusals[] = {QE_ERROR_LIMIT, QE_ERROR_DEVICE, QE_ERROR_ARGUMENT};
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        qe_device device = {.ordinal = 0};
        now.keeps = refusals[i];
        check(keep_and_fetch(&device, 'a') != QE_OK, "a launch that is refused");
        now.keeps = QE_OK;
        qe_cuda_keeping_close(&device);
    }
}

int main(void) {
    const int calls = fail_at(0);
    for (int call = 1; call <= calls; call++) (void)fail_at(call);
    expect_refusals();
    printf("%d calls fail in turn: %d checks, %d failed\n", calls, checked, failed);
    return failed > 0;
}
