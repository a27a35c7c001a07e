/* bench_time.cu - see bench_time.h. */
#include "bench_time.h"

#include <algorithm>

enum { ROTATED_BYTES = 288 << 20, NODES_MIN = 24, GRAPHS = 11, WARM = 2 };

static __global__ void fill_kernel(uint32_t *words, size_t count) {
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
         i += static_cast<size_t>(blockDim.x) * gridDim.x) {
        uint32_t h = static_cast<uint32_t>(i) * 2654435761u;
        h ^= h >> 16, h *= 0x85EBCA6Bu, h ^= h >> 13, h *= 0xC2B2AE35u, h ^= h >> 16;
        /* Signs and mantissas are random, magnitudes between 1/8 and 2. */
        words[i] = (h & 0x807F807Fu) | (124u + (h >> 3 & 3u)) << 23 | (124u + (h >> 5 & 3u)) << 7;
    }
}

static __global__ void checksum_kernel(const uint32_t *words, size_t count, unsigned long long *sum) {
    unsigned long long own = 0;
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
         i += static_cast<size_t>(blockDim.x) * gridDim.x) {
        unsigned long long h =
            (static_cast<unsigned long long>(words[i]) << 32 | static_cast<uint32_t>(i)) * 0x9E3779B97F4A7C15ull;
        h ^= h >> 29, h *= 0xBF58476D1CE4E5B9ull;
        own += h ^ h >> 32;
    }
    atomicAdd(sum, own);
}

arena::arena(size_t bytes, bool is_filled) : bytes_(bytes) {
    MUST(cudaMalloc(&at_, bytes));
    if (is_filled)
        fill_kernel<<<2048, 256>>>(static_cast<uint32_t *>(at_), bytes / 4);
    else
        MUST(cudaMemset(at_, 0, bytes));
    MUST(cudaGetLastError());
}

void *arena::take(size_t bytes) {
    const size_t from = used_;
    used_ += (bytes + 511) / 512 * 512;
    if (used_ > bytes_) {
        fprintf(stderr, "the memory of a measurement is too small\n");
        exit(1);
    }
    return at() + from;
}

uint64_t checksum(const void *at, size_t bytes) {
    unsigned long long *sum, found;
    MUST(cudaMalloc(&sum, sizeof *sum));
    MUST(cudaMemset(sum, 0, sizeof *sum));
    checksum_kernel<<<1024, 256>>>(static_cast<const uint32_t *>(at), bytes / 4, sum);
    MUST(cudaMemcpy(&found, sum, sizeof found, cudaMemcpyDeviceToHost));
    MUST(cudaFree(sum));
    return found;
}

qe_quantize_target delayed(bench_memory &memory, uint32_t rows, uint32_t columns, qe_format format) {
    const size_t count = static_cast<size_t>(rows) * columns;
    qe_quantize_target t = {};
    t.recipe = QE_RECIPE_DELAYED, t.format = static_cast<uint8_t>(format);
    t.scale = memory.fp32(1);
    float *words = memory.output<float>(2);
    t.amax = words;
    for (qe_qtensor *tensor : {&t.operand, &t.retained}) {
        tensor->codes = memory.output<uint8_t>(count), tensor->scale_inv = words + 1;
        tensor->rows = rows, tensor->columns = columns, tensor->format = t.format;
        tensor->transposed = tensor == &t.retained;
    }
    return t;
}

static void launch_all(const std::vector<launcher> &launches, cudaStream_t stream) {
    for (const launcher &l : launches) {
        if (l(stream) == QE_OK) continue;
        fprintf(stderr, "a launch was refused: %s\n", cudaGetErrorString(cudaGetLastError()));
        exit(1);
    }
}

/* The median of what `once` takes between two events. */
static double time_between(cudaStream_t stream, double launches, const std::function<void()> &once) {
    cudaEvent_t begin, end;
    std::vector<double> times;
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    for (int i = 0; i < GRAPHS + WARM; ++i) {
        float ms;
        MUST(cudaEventRecord(begin, stream));
        once();
        MUST(cudaEventRecord(end, stream));
        MUST(cudaEventSynchronize(end));
        MUST(cudaEventElapsedTime(&ms, begin, end));
        if (i >= WARM) times.push_back(1000.0 * ms / launches);
    }
    MUST(cudaEventDestroy(begin));
    MUST(cudaEventDestroy(end));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

double time_launches(const std::vector<launcher> &launches) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    size_t nodes = 0;
    MUST(cudaStreamCreate(&stream));
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (; nodes < NODES_MIN; nodes += launches.size()) launch_all(launches, stream);
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&executable, graph, 0));
    const double us =
        time_between(stream, static_cast<double>(nodes), [&] { MUST(cudaGraphLaunch(executable, stream)); });
    MUST(cudaGraphExecDestroy(executable));
    MUST(cudaGraphDestroy(graph));
    MUST(cudaStreamDestroy(stream));
    return us;
}

double time_eager(const std::vector<launcher> &launches) {
    cudaStream_t stream;
    MUST(cudaStreamCreate(&stream));
    const size_t turns = NODES_MIN / launches.size() + 1;
    const double us = time_between(stream, static_cast<double>(turns * launches.size()), [&] {
        for (size_t i = 0; i < turns; ++i) launch_all(launches, stream);
    });
    MUST(cudaStreamDestroy(stream));
    return us;
}

void sweep::run(const char *op, const shape &s, double bytes, const std::vector<variant> &variants) {
    const size_t sets = std::max<size_t>(2, static_cast<size_t>(ROTATED_BYTES / std::max(bytes, 2e6)) + 1);
    outcome best = {};
    uint64_t expected = 0;
    for (size_t i = 0; i < variants.size(); ++i) {
        const variant &v = variants[i];
        std::vector<launcher> launches;
        memory_.in.reset(), memory_.out.reset();
        launches.push_back(v.make(memory_));
        const size_t written = memory_.out.used();
        while (launches.size() < sets) launches.push_back(v.make(memory_));
        MUST(cudaMemset(memory_.out.at(), 0xA5, written));
        launch_all({launches[0]}, nullptr);
        MUST(cudaDeviceSynchronize());
        const uint64_t found = checksum(memory_.out.at(), written);
        if (i == 0) expected = found;
        const bool is_same = v.is_partial || found == expected;
        wrong_ += !is_same;
        const double us = time_launches(launches);
        printf("%-24s T=%-5u h=%-5u f=%-6u %-26s %9.2f us %8.1f MB %7.3f TB/s%s\n", op, s.rows, s.hidden, s.ffn,
               v.name.c_str(), us, bytes / 1e6, bytes / us * 1e-6, is_same ? "" : "  OTHER BYTES");
        fflush(stdout);
        if (i == 0) best = {op, v.name, s, us, us, bytes};
        if (is_same && !v.is_partial && us < best.us) best.name = v.name, best.us = us;
    }
    best_.push_back(best);
}

int sweep::summary() const {
    printf("\nbest, and what the library takes now:\n");
    for (const outcome &b : best_)
        printf("%-24s T=%-5u h=%-5u f=%-6u %-26s %9.2f us %7.3f TB/s%s  now %9.2f\n", b.op.c_str(), b.s.rows,
               b.s.hidden, b.s.ffn, b.name.c_str(), b.us, b.bytes / b.us * 1e-6,
               b.bytes >= 32e6 && b.bytes / b.us * 1e-6 < 3.6 ? " *" : "  ", b.first_us);
    printf("%d variants with other bytes\n", wrong_);
    return wrong_;
}
