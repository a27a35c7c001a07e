/* tune.c - see tune.h. Launches of a candidate go into a graph, so that a short product is not timed by how fast
 * the host can launch it; candidates take turns, so that a chip that warms up and slows does so for all of them. */
#include "backend/cuda/tune.h"
#include "backend/cuda/products.h"

#include <stdlib.h>
#include <string.h>

#include "backend/cuda/product_kernels.h"
#include "base/assert.h"

enum {
    SETS_MAX = 32,                   /* launches of one graph, each on operands of its own */
    SET_ALIGN_BYTES = 256,           /* as cudaMalloc's */
    ROUNDS_FIRST = 3,                /* of everyone */
    ROUNDS_MAX = 11,                 /* of those that are near the best after the first */
};
#define ROTATION_BYTES (192ull << 20) /* three times a large L2 */
#define BURST_MILLISECONDS 0.2f       /* far above the events' resolution of half a microsecond */
#define ESTIMATE_SLACK 1.5f           /* a single cold launch may mislead by that much */
#define FINALIST_SLACK 1.05f
#define TIE_SLACK 1.002f              /* what repeated medians differ by */
static const float SCALE_INVERSE = 1.0f / 64.0f; /* random codes have a deviation of 64 */

typedef struct candidate {
    cudaGraphExec_t graph; /* NULL: out of the race */
    float estimate, median; /* milliseconds of one launch, of the graph */
    float samples[ROUNDS_MAX];
} candidate;

typedef struct world {
    const qe_tune *tune;
    char *arena;
    uint64_t set_bytes, result_bytes;
    uint32_t sets, burst;
    qe_product_data data[SETS_MAX];
    void *again;       /* result of a second run */
    uint32_t *differs; /* [1] on the device */
    float *scale;      /* [1] on the device */
    cudaEvent_t begin, end;
    candidate candidates[QE_ALGORITHMS_MAX];
} world;

typedef struct extent {
    uint64_t first, second, result; /* elements */
} extent;

static extent extent_of(const qe_product *product) {
    const uint64_t m = product->m, n = product->n, k = product->k;
    return (extent){m * k, k * n, m * n};
}

static uint64_t padded(uint64_t bytes) { return (bytes + SET_ALIGN_BYTES - 1) / SET_ALIGN_BYTES * SET_ALIGN_BYTES; }

/* Products of a linear op add something that lies elsewhere; a weight gradient adds in place. */
static int adds_apart(const qe_product *product) { return product->adds && product->kind == QE_OP_LINEAR; }

static void world_measure(world *w) {
    const qe_product *product = w->tune->product;
    const extent e = extent_of(product);
    w->result_bytes = padded(e.result * qe_format_bytes(qe_product_result(product)));
    w->set_bytes = padded(e.first * qe_format_bytes((qe_format)product->first)) +
                   padded(e.second * qe_format_bytes((qe_format)product->second)) +
                   w->result_bytes * (adds_apart(product) ? 2 : 1);
    const uint64_t wanted = (ROTATION_BYTES + w->set_bytes - 1) / w->set_bytes;
    w->sets = wanted > SETS_MAX ? SETS_MAX : (uint32_t)wanted;
}

/* Fewer sets where memory is short: then timings are warmer, but there is a choice. */
static qe_status world_allocate(world *w, qe_error *error_out) {
    for (;; w->sets /= 2) {
        const uint64_t bytes = w->sets * w->set_bytes + w->result_bytes + 2 * SET_ALIGN_BYTES;
        const cudaError_t status = cudaMalloc((void **)&w->arena, bytes);
        if (status == cudaSuccess) return QE_OK;
        if (status != cudaErrorMemoryAllocation) return qe_cuda_failure(status, "tuning a product", error_out);
        (void)cudaGetLastError();
        if (w->sets > 1) continue;
        return qe_error_set(error_out, QE_ERROR_MEMORY,
                            "tune with more memory free and keep the choices in a file (train.algorithms), or do "
                            "without tuning: leave it empty",
                            "tuning this product needs %llu MiB of device memory, which is not free",
                            (unsigned long long)(bytes >> 20) + 1);
    }
}

static void world_place(world *w) {
    const qe_product *product = w->tune->product;
    const extent e = extent_of(product);
    char *at = w->arena;
    w->scale = (float *)at;
    w->differs = (uint32_t *)(at + SET_ALIGN_BYTES);
    w->again = at + 2 * SET_ALIGN_BYTES;
    at += 2 * SET_ALIGN_BYTES + w->result_bytes;
    for (uint32_t i = 0; i < w->sets; ++i) {
        qe_product_data *data = &w->data[i];
        *data = (qe_product_data){.first = at, .first_scale = w->scale, .second_scale = w->scale,
                                  .beta = product->adds ? 1.0f : 0.0f};
        at += padded(e.first * qe_format_bytes((qe_format)product->first));
        data->second = at;
        at += padded(e.second * qe_format_bytes((qe_format)product->second));
        data->result = at;
        data->added = at;
        at += w->result_bytes;
        if (!adds_apart(product)) continue;
        data->added = at;
        at += w->result_bytes;
    }
}

static qe_status world_fill(const world *w) {
    const qe_product *product = w->tune->product;
    const extent e = extent_of(product);
    const qe_format result = qe_product_result(product);
    const cudaStream_t stream = w->tune->stream;
    if (cudaMemcpyAsync(w->scale, &SCALE_INVERSE, sizeof SCALE_INVERSE, cudaMemcpyHostToDevice, stream) != cudaSuccess)
        return QE_ERROR_DEVICE;
    for (uint32_t i = 0; i < w->sets; ++i) {
        const qe_product_data *data = &w->data[i];
        QE_TRY(qe_cuda_random((qe_format)product->first, (void *)data->first, e.first, 3 * i, stream));
        QE_TRY(qe_cuda_random((qe_format)product->second, (void *)data->second, e.second, 3 * i + 1, stream));
        QE_TRY(qe_cuda_random(result, (void *)data->added, e.result, 3 * i + 2, stream));
    }
    return QE_OK;
}

static qe_status launch(const world *w, uint32_t index, const qe_product_data *data) {
    const qe_tune *tune = w->tune;
    return qe_algorithm_launch(tune->solver, tune->product, tune->problem, data, &tune->candidates[index],
                               tune->stream, NULL);
}

/* Milliseconds between what `begin` and `end` were recorded around. */
static float elapsed(const world *w) {
    float milliseconds = 0.0f;
    if (cudaEventSynchronize(w->end) != cudaSuccess) return -1.0f;
    if (cudaEventElapsedTime(&milliseconds, w->begin, w->end) != cudaSuccess) return -1.0f;
    return milliseconds;
}

/* A candidate that does not launch is out; a device that fails is an error. */
static qe_status estimate(world *w, uint32_t index) {
    candidate *c = &w->candidates[index];
    c->estimate = -1.0f;
    if (launch(w, index, &w->data[0]) != QE_OK) {
        (void)cudaGetLastError();
        return QE_OK;
    }
    (void)cudaEventRecord(w->begin, w->tune->stream);
    const qe_status status = launch(w, index, &w->data[w->sets - 1]);
    (void)cudaEventRecord(w->end, w->tune->stream);
    const float milliseconds = elapsed(w);
    if (milliseconds < 0.0f) return QE_ERROR_DEVICE;
    if (status == QE_OK) c->estimate = milliseconds;
    return QE_OK;
}

static float estimate_best(const world *w) {
    float best = -1.0f;
    for (uint32_t i = 0; i < w->tune->count; ++i) {
        const float one = w->candidates[i].estimate;
        if (one >= 0.0f && (best < 0.0f || one < best)) best = one;
    }
    return best;
}

static cudaGraph_t burst_capture(const world *w, uint32_t index) {
    cudaGraph_t graph = NULL;
    int launched = 1;
    if (cudaStreamBeginCapture(w->tune->stream, cudaStreamCaptureModeRelaxed) != cudaSuccess) return NULL;
    for (uint32_t i = 0; i < w->burst && launched; ++i)
        launched = launch(w, index, &w->data[i % w->sets]) == QE_OK;
    if (cudaStreamEndCapture(w->tune->stream, &graph) == cudaSuccess && launched) return graph;
    if (graph) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    return NULL;
}

/* What cannot be captured is of no use and stays out. */
static void burst_build(world *w, uint32_t index) {
    cudaGraph_t graph = burst_capture(w, index);
    if (!graph) return;
    if (cudaGraphInstantiate(&w->candidates[index].graph, graph, 0) != cudaSuccess) {
        w->candidates[index].graph = NULL;
        (void)cudaGetLastError();
    }
    (void)cudaGraphDestroy(graph);
}

static qe_status race_start(world *w) {
    for (uint32_t i = 0; i < w->tune->count; ++i) QE_TRY(estimate(w, i));
    const float best = estimate_best(w);
    if (best < 0.0f) return QE_ERROR_UNSUPPORTED;
    const float launches = best > 0.0f ? BURST_MILLISECONDS / best : (float)SETS_MAX;
    w->burst = launches < (float)SETS_MAX ? (uint32_t)launches + 1 : SETS_MAX;
    if (w->burst < w->sets) w->burst = w->sets; /* or the data would be the same each time */
    for (uint32_t i = 0; i < w->tune->count; ++i) {
        const float one = w->candidates[i].estimate;
        if (one >= 0.0f && one <= ESTIMATE_SLACK * best) burst_build(w, i);
    }
    return QE_OK;
}

static qe_status sample(world *w, uint32_t round) {
    for (uint32_t i = 0; i < w->tune->count; ++i) {
        candidate *c = &w->candidates[i];
        if (!c->graph) continue;
        (void)cudaEventRecord(w->begin, w->tune->stream);
        if (cudaGraphLaunch(c->graph, w->tune->stream) != cudaSuccess) return QE_ERROR_DEVICE;
        (void)cudaEventRecord(w->end, w->tune->stream);
        c->samples[round] = elapsed(w);
        if (c->samples[round] < 0.0f) return QE_ERROR_DEVICE;
    }
    return QE_OK;
}

static int float_order(const void *left, const void *right) {
    const float a = *(const float *)left, b = *(const float *)right;
    return (a > b) - (a < b);
}

static float median_of(const float *samples, uint32_t count) {
    float sorted[ROUNDS_MAX];
    memcpy(sorted, samples, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, float_order);
    return sorted[count / 2];
}

static void candidate_drop(candidate *c) {
    if (c->graph) (void)cudaGraphExecDestroy(c->graph);
    c->graph = NULL;
}

/* Medians of `rounds` samples each; returns the smallest, or a negative number where no one is left. */
static float rank(world *w, uint32_t rounds) {
    float best = -1.0f;
    for (uint32_t i = 0; i < w->tune->count; ++i) {
        candidate *c = &w->candidates[i];
        if (!c->graph) continue;
        c->median = median_of(c->samples, rounds);
        if (best < 0.0f || c->median < best) best = c->median;
    }
    return best;
}

static qe_status race_run(world *w) {
    for (uint32_t round = 0; round < ROUNDS_MAX; ++round) {
        QE_TRY(sample(w, round));
        if (round + 1 != ROUNDS_FIRST) continue;
        const float best = rank(w, ROUNDS_FIRST);
        for (uint32_t i = 0; i < w->tune->count; ++i)
            if (w->candidates[i].median > FINALIST_SLACK * best) candidate_drop(&w->candidates[i]);
    }
    (void)rank(w, ROUNDS_MAX);
    return QE_OK;
}

/* Two runs from the same start; *same_out = 1 where their bits are equal. */
static qe_status reproduces(const world *w, uint32_t index, int *same_out) {
    const qe_product *product = w->tune->product;
    const cudaStream_t stream = w->tune->stream;
    const uint64_t count = extent_of(product).result;
    const qe_format format = qe_product_result(product);
    qe_product_data one = w->data[0], other = w->data[0];
    uint32_t differs = 1;
    other.result = w->again;
    if (!adds_apart(product)) other.added = w->again;
    if (cudaMemsetAsync(w->differs, 0, sizeof *w->differs, stream) != cudaSuccess) return QE_ERROR_DEVICE;
    QE_TRY(qe_cuda_random(format, one.result, count, 1, stream));
    QE_TRY(qe_cuda_random(format, other.result, count, 1, stream));
    if (launch(w, index, &one) != QE_OK) return QE_ERROR_DEVICE;
    if (launch(w, index, &other) != QE_OK) return QE_ERROR_DEVICE;
    QE_TRY(qe_cuda_compare(one.result, other.result, count * qe_format_bytes(format), w->differs, stream));
    if (cudaMemcpyAsync(&differs, w->differs, sizeof differs, cudaMemcpyDeviceToHost, stream) != cudaSuccess ||
        cudaStreamSynchronize(stream) != cudaSuccess)
        return QE_ERROR_DEVICE;
    *same_out = differs == 0;
    return QE_OK;
}

static qe_status race_finish(world *w, uint32_t *best_out) {
    for (;;) {
        const float best = rank(w, ROUNDS_MAX);
        uint32_t index = 0;
        int same = 0;
        if (best < 0.0f) return QE_ERROR_UNSUPPORTED;
        while (!w->candidates[index].graph || w->candidates[index].median > TIE_SLACK * best) ++index;
        QE_TRY(reproduces(w, index, &same));
        if (same) {
            *best_out = index;
            return QE_OK;
        }
        candidate_drop(&w->candidates[index]);
    }
}

static qe_status race(world *w, uint32_t *best_out) {
    QE_TRY(world_fill(w));
    QE_TRY(race_start(w));
    QE_TRY(race_run(w));
    return race_finish(w, best_out);
}

static void world_deinit(world *w) {
    for (uint32_t i = 0; i < w->tune->count; ++i) candidate_drop(&w->candidates[i]);
    if (w->begin) (void)cudaEventDestroy(w->begin);
    if (w->end) (void)cudaEventDestroy(w->end);
    (void)cudaFree(w->arena);
}

static qe_status race_error(qe_status status, const qe_tune *tune, qe_error *error_out) {
    char key[QE_PRODUCT_KEY_BYTES];
    qe_product_key(tune->product, key);
    if (status == QE_ERROR_UNSUPPORTED)
        return qe_error_set(error_out, status, NULL, "none of %u algorithms for %s runs and gives the same bits twice",
                            tune->count, key);
    return qe_error_set(error_out, status, NULL, "tuning %s: %s", key, qe_cuda_why(cudaGetLastError()));
}

qe_status qe_tune_best(const qe_tune *tune, uint32_t *best_out, qe_error *error_out) {
    world *w = calloc(1, sizeof *w);
    qe_status status = QE_ERROR_DEVICE;
    if (!w) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to tune with");
    QE_ASSERT(tune->count >= 1 && tune->count <= QE_ALGORITHMS_MAX);
    w->tune = tune;
    world_measure(w);
    status = world_allocate(w, error_out);
    if (status != QE_OK) goto done;
    world_place(w);
    status = QE_ERROR_DEVICE;
    if (cudaEventCreate(&w->begin) == cudaSuccess && cudaEventCreate(&w->end) == cudaSuccess)
        status = race(w, best_out);
    if (status != QE_OK) status = race_error(status, tune, error_out);
done:
    world_deinit(w);
    free(w);
    return status;
}
