/* bench_products - is every form of matrix product and attention right on this GPU, and how fast is it?
 *
 *   bench_products [--only check|time|attention|gradients] [--shape 0..3] [--seconds N] [--choices FILE]
 *                  [--sustained SECONDS]
 *
 * sustained: every time is of so many seconds of launches without pause, the first half not counted.
 * gradients: input and weight gradients of codes, cuBLASLt's fastest against every other kernel; only where it is
 * asked for.
 * Checks compare with sums in double on the host; times are of ops in a graph, on rotating random data, and tell the
 * heuristic's first candidate from the fastest. Exit status 1 where a check failed, 77 without a GPU. */
#include "cuda/bench_products.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

const bench_shape bench_shapes[BENCH_SHAPES] = {
    {"h1024 f4096 16x64 T1024", 1024, 1024, 4096, 16, 16, 64},
    {"h2048 f8192 16x128 T2048", 2048, 2048, 8192, 16, 16, 128},
    {"h4096 f14336 32/8x128 T2048", 2048, 4096, 14336, 32, 8, 128},
    {"h4096 f14336 32/8x128 T8192", 8192, 4096, 14336, 32, 8, 128},
};

enum { LAUNCHES = 9, BURST_MAX = 64 };
static const double BURST_MICROSECONDS = 300.0;

double bench_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int bench_late(const bench *b) { return bench_now() - b->started > b->seconds_max; }

void bench_fail(bench *b, const char *format, ...) {
    va_list arguments;
    ++b->failures;
    printf("FAIL: ");
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
    fflush(stdout);
}

void *bench_alloc(bench *b, uint64_t bytes) {
    void *at = NULL;
    const cudaError_t status = cudaMalloc(&at, bytes ? bytes : 1);
    if (status == cudaSuccess) return at;
    bench_fail(b, "%llu MiB: %s", (unsigned long long)(bytes >> 20), cudaGetErrorString(status));
    (void)cudaGetLastError();
    return NULL;
}

void *bench_upload(bench *b, const void *host, uint64_t bytes) {
    void *at = bench_alloc(b, bytes);
    if (at && (cudaMemcpy(at, host, bytes, cudaMemcpyHostToDevice) != cudaSuccess ||
               cudaDeviceSynchronize() != cudaSuccess)) /* the bench's stream does not wait for it by itself */
        bench_fail(b, "upload");
    return at;
}

void bench_free(void *at) { (void)cudaFree(at); }

float bench_random(uint64_t seed, uint64_t index) {
    uint64_t z = seed * 0xD1B54A32D192ED03u + index * 0x9E3779B97F4A7C15u + 1;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    const uint64_t sum = (z & 0xFFFF) + ((z >> 16) & 0xFFFF) + ((z >> 32) & 0xFFFF) + (z >> 48);
    return ((float)sum / 65535.0f - 2.0f) * 1.7320508f;
}

qe_cuda_gemm *bench_chosen(bench *b, const qe_product *product, const qe_algorithm *algorithm) {
    qe_cuda_choice choice = {0};
    qe_cuda_gemm *gemm = NULL;
    qe_error error = {0};
    qe_product_key(product, choice.key);
    memcpy(choice.words, algorithm->words, sizeof choice.words);
    if (qe_cuda_gemm_create(b->stream, &gemm, &error) == QE_OK &&
        qe_cuda_gemm_choose(gemm, &choice, &error) == QE_OK)
        return gemm;
    bench_fail(b, "%s: %s", choice.key, error.message);
    qe_cuda_gemm_destroy(gemm);
    return NULL;
}

bench bench_attention_open(bench *b, const qe_op *op, qe_attention_algorithm algorithm) {
    bench with = *b;
    qe_cuda_choice choice;
    qe_error error = {0};
    qe_attention_choice_make(op, algorithm, &choice);
    with.failures = 0;
    with.attention = NULL;
    if (qe_cuda_attention_create(b->stream, &with.attention, &error) == QE_OK &&
        qe_cuda_attention_choose(with.attention, &choice, &error) == QE_OK)
        return with;
    bench_fail(b, "%s: %s", choice.key, error.message);
    qe_cuda_attention_destroy(with.attention);
    with.attention = NULL;
    return with;
}

void bench_attention_close(bench *b, bench *with) {
    qe_cuda_attention_destroy(with->attention);
    b->failures += with->failures;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

int bench_prepare(const runner *r, const qe_op *op) {
    qe_error error = {0};
    const qe_status status = r->gemm ? qe_cuda_gemm_prepare(r->gemm, op, r->tune, &error)
                                     : qe_cuda_attention_prepare(r->b->attention, op, r->tune, &error);
    if (status == QE_OK) return 1;
    bench_fail(r->b, "prepare %s: %s: %s (%s)", qe_op_name(op->kind), qe_status_name(status), error.message,
               error.remedy);
    return 0;
}

int bench_run(const runner *r, const qe_op *op) {
    qe_error error = {0};
    const qe_status status = r->gemm ? qe_cuda_gemm_run(r->gemm, op, r->b->stream, &error)
                                     : qe_cuda_attention_run(r->b->attention, op, r->b->stream, &error);
    if (status == QE_OK) return 1;
    bench_fail(r->b, "run %s: %s: %s", qe_op_name(op->kind), qe_status_name(status), error.message);
    return 0;
}

int bench_sync(bench *b) {
    const cudaError_t status = cudaStreamSynchronize(b->stream);
    if (status == cudaSuccess) return 1;
    bench_fail(b, "the device failed: %s", cudaGetErrorString(status));
    return 0;
}

cudaGraphExec_t bench_capture(const runner *r, const qe_op *ops, uint32_t count, uint32_t repeats) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable = NULL;
    int good = 1;
    /* global: what a capture may not do shows here */
    if (cudaStreamBeginCapture(r->b->stream, cudaStreamCaptureModeGlobal) != cudaSuccess) good = 0;
    for (uint32_t i = 0; i < repeats && good; ++i) good = bench_run(r, &ops[i % count]);
    const cudaError_t ended = cudaStreamEndCapture(r->b->stream, &graph);
    if (ended != cudaSuccess) {
        bench_fail(r->b, "capture of %s: %s", qe_op_name(ops[0].kind), cudaGetErrorString(ended));
        good = 0;
    }
    if (good && cudaGraphInstantiate(&executable, graph, 0) != cudaSuccess) {
        bench_fail(r->b, "instantiating %s", qe_op_name(ops[0].kind));
        executable = NULL;
    }
    if (graph) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    return executable;
}

static int double_order(const void *left, const void *right) {
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static double launch_time(const bench *b, cudaGraphExec_t graph, cudaEvent_t begin, cudaEvent_t end) {
    float milliseconds = -1.0f;
    (void)cudaEventRecord(begin, b->stream);
    if (cudaGraphLaunch(graph, b->stream) != cudaSuccess) return -1.0;
    (void)cudaEventRecord(end, b->stream);
    if (cudaEventSynchronize(end) != cudaSuccess) return -1.0;
    if (cudaEventElapsedTime(&milliseconds, begin, end) != cudaSuccess) return -1.0;
    return 1e3 * (double)milliseconds;
}

/* Of many launches one behind the other: once the chip is as warm, and as slow, as work without end makes it. */
static double sustained_time(const bench *b, cudaGraphExec_t graph) {
    double begin = bench_now(), warm = 0.0;
    uint32_t launches = 0;
    for (double now = begin; now - begin < b->sustained; now = bench_now()) {
        for (int i = 0; i < LAUNCHES; ++i)
            if (cudaGraphLaunch(graph, b->stream) != cudaSuccess) return -1.0;
        if (cudaStreamSynchronize(b->stream) != cudaSuccess) return -1.0;
        if (warm > 0.0) launches += LAUNCHES;
        if (warm == 0.0 && now - begin > b->sustained / 2) warm = bench_now();
    }
    return launches == 0 ? -1.0 : 1e6 * (bench_now() - warm) / launches;
}

static double graph_time(const bench *b, cudaGraphExec_t graph) {
    cudaEvent_t begin = NULL, end = NULL;
    double samples[LAUNCHES], median = -1.0;
    if (cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess) {
        (void)launch_time(b, graph, begin, end);
        for (int i = 0; i < LAUNCHES; ++i) samples[i] = launch_time(b, graph, begin, end);
        qsort(samples, LAUNCHES, sizeof samples[0], double_order);
        median = samples[0] < 0.0 ? -1.0 : samples[LAUNCHES / 2];
    }
    if (begin) (void)cudaEventDestroy(begin);
    if (end) (void)cudaEventDestroy(end);
    return median;
}

double bench_time(const runner *r, const qe_op *ops, uint32_t count) {
    cudaGraphExec_t graph = bench_capture(r, ops, count, count);
    if (!graph) return -1.0;
    const double once = graph_time(r->b, graph);
    (void)cudaGraphExecDestroy(graph);
    if (once <= 0.0) return -1.0;
    const double wanted = BURST_MICROSECONDS / once * count;
    uint32_t repeats = wanted < BURST_MAX ? (uint32_t)wanted + 1 : BURST_MAX;
    if (repeats < count) repeats = count;
    graph = bench_capture(r, ops, count, repeats);
    if (!graph) return -1.0;
    const double all = r->b->sustained > 0.0 ? sustained_time(r->b, graph) : graph_time(r->b, graph);
    (void)cudaGraphExecDestroy(graph);
    return all < 0.0 ? -1.0 : all / repeats;
}

/* --- the program -------------------------------------------------------------------------------------------------- */

typedef struct choices {
    const char *only, *choices_path;
    int shape;
    double seconds, sustained;
} choices;

static int choices_scan(int count, char **words, choices *chosen) {
    for (int i = 1; i + 1 < count; i += 2) {
        if (strcmp(words[i], "--only") == 0)
            chosen->only = words[i + 1];
        else if (strcmp(words[i], "--choices") == 0)
            chosen->choices_path = words[i + 1];
        else if (strcmp(words[i], "--shape") == 0)
            chosen->shape = (int)strtol(words[i + 1], NULL, 10);
        else if (strcmp(words[i], "--sustained") == 0)
            chosen->sustained = strtod(words[i + 1], NULL);
        else if (strcmp(words[i], "--seconds") == 0)
            chosen->seconds = strtod(words[i + 1], NULL);
        else
            return 0;
    }
    return count % 2 == 1;
}

static int bench_open(bench *b) {
    struct cudaDeviceProp properties;
    qe_error error = {0};
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("skipped: no GPU (%s)\n", cudaGetErrorString(cudaGetLastError()));
        return 77;
    }
    if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess ||
        cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking) != cudaSuccess ||
        qe_cuda_gemm_create(b->stream, &b->first, &error) != QE_OK ||
        qe_cuda_gemm_create(b->stream, &b->tuned, &error) != QE_OK ||
        qe_cuda_gemm_create(b->stream, &b->lt, &error) != QE_OK) {
        printf("FAIL: opening the device: %s\n", error.message);
        return 1;
    }
    qe_cuda_gemm_lt_only(b->lt);
    printf("%s, %d.%d, %s\n", properties.name, properties.major, properties.minor, qe_cuda_gemm_identity(b->first));
    if (qe_cuda_attention_create(b->stream, &b->attention, &error) == QE_OK)
        printf("%s\n", qe_cuda_attention_identity(b->attention));
    else
        bench_fail(b, "%s (%s)", error.message, error.remedy);
    return 0;
}

static void bench_all(bench *b, const choices *chosen) {
    const char *only = chosen->only;
    if (!only || strcmp(only, "check") == 0) {
        bench_check_products(b);
        bench_check_choices(b, chosen->choices_path);
    }
    if (b->attention && (!only || strcmp(only, "check") == 0)) bench_check_attention(b);
    if (b->attention && (!only || strcmp(only, "attention") == 0)) bench_time_attention(b, chosen->shape);
    if (!only || strcmp(only, "time") == 0) bench_time_products(b, chosen->shape);
    if (only && strcmp(only, "gradients") == 0) bench_time_gradients(b, chosen->shape);
}

int main(int count, char **words) {
    choices chosen = {.choices_path = "bench_products.choices", .shape = -1, .seconds = 55.0};
    bench b = {.started = bench_now()};
    if (!choices_scan(count, words, &chosen)) {
        printf("usage: bench_products [--only check|time|attention|gradients] [--shape 0..3] [--seconds N] "
               "[--choices FILE] [--sustained SECONDS]\n");
        return 2;
    }
    b.seconds_max = chosen.seconds;
    b.sustained = chosen.sustained;
    const int opened = bench_open(&b);
    if (opened != 0) return opened;
    bench_all(&b, &chosen);
    qe_cuda_attention_destroy(b.attention);
    qe_cuda_gemm_destroy(b.lt);
    qe_cuda_gemm_destroy(b.tuned);
    qe_cuda_gemm_destroy(b.first);
    (void)cudaStreamDestroy(b.stream);
    printf("%s: %u failures, %.1f s\n", b.failures ? "FAILED" : "passed", b.failures, bench_now() - b.started);
    return b.failures ? 1 : 0;
}
