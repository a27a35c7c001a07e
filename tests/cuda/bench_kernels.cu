/* bench_kernels.cu - the fused kernels on a GPU: checked first, then timed.
 * Built with `ninja -C build-cuda bench_kernels`.
 *
 *   bench_kernels          checks, then a table: kernel, shape, us, counted MB, TB/s, and of 32 MB and more what a copy
 *                          of as many bytes read and written takes
 *   bench_kernels --check  checks alone
 *   bench_kernels --time   the table alone
 *   bench_kernels --shapes the tile shapes that were considered, for each source, at the largest size
 *
 * Counted bytes: every input read once, every output written once. A launch is one node of a graph of launches over
 * rotating buffers of more than 256 MB together, so that nothing is warm in the second cache; the median of many
 * graphs. The time of a node is part of the figure: an empty one's is printed first.
 * Exit status: 0, 1 when a check failed or the device did. */
#include <algorithm>
#include <functional>

#include "backend/cuda/sink.cuh"
#include "kernel_checks.h"

enum { ROTATED_BYTES = 288 << 20, NODES_MIN = 24, NODES_MAX = 512, GRAPHS = 21 };
static const double GRAPH_BYTES = 8e9; /* moved by the nodes of a graph, so that its own launch hardly counts */
static const double LARGE_BYTES = 32e6, WANTED_RATE = 3.6e6; /* bytes per microsecond that a large op should move */

struct shape {
    uint32_t rows, hidden, ffn, heads, kv_heads, head_dim;
    uint32_t qkv() const {
        return (heads + 2 * kv_heads) * head_dim;
    }
};

static const shape SHAPES[] = {{1024, 1024, 4096, 16, 16, 64},
                               {2048, 2048, 8192, 16, 16, 128},
                               {2048, 4096, 14336, 32, 8, 128},
                               {8192, 4096, 14336, 32, 8, 128}};

/* --- device memory of one run, filled with random bf16 or fp32 ---------------------------------------------------- */

KERNEL void fill_kernel(uint32_t *words, size_t count, uint32_t seed, int is_bf16) {
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
         i += static_cast<size_t>(blockDim.x) * gridDim.x) {
        uint32_t h = static_cast<uint32_t>(i) * 2654435761u ^ seed;
        h ^= h >> 16, h *= 0x85EBCA6Bu, h ^= h >> 13, h *= 0xC2B2AE35u, h ^= h >> 16;
        /* Signs and mantissas are random, magnitudes between 1/8 and 2. */
        const uint32_t exponent = 124u + (h >> 3 & 3u);
        if (is_bf16)
            words[i] = (h & 0x807F807Fu) | exponent << 23 | (124u + (h >> 5 & 3u)) << 7;
        else
            words[i] = (h & 0x807FFFFFu) | exponent << 23;
    }
}

class arena {
   public:
    explicit arena(size_t bytes) : bytes_(bytes) {
        MUST(cudaMalloc(&at_, bytes));
    }
    ~arena() {
        cudaFree(at_);
    }
    void *take(size_t bytes) {
        const size_t from = used_;
        used_ += (bytes + 255) / 256 * 256;
        if (used_ > bytes_) {
            fprintf(stderr, "the arena of a measurement is too small\n");
            exit(1);
        }
        return static_cast<char *>(at_) + from;
    }
    void *bf16(size_t count) {
        return filled(count * 2, 1);
    }
    float *fp32(size_t count) {
        return static_cast<float *>(filled(count * 4, 0));
    }
    size_t used() const {
        return used_;
    }

   private:
    void *filled(size_t bytes, int is_bf16) {
        void *at = take(bytes);
        fill_kernel<<<1024, 256>>>(static_cast<uint32_t *>(at), bytes / 4, static_cast<uint32_t>(used_), is_bf16);
        MUST(cudaGetLastError());
        return at;
    }
    void *at_ = nullptr;
    size_t bytes_, used_ = 0;
};

/* --- timing ------------------------------------------------------------------------------------------------------ */

typedef std::function<qe_status(cudaStream_t)> launcher;

/* Microseconds of one launch of those that rotate, as one of `least` nodes or more. */
static double time_launches(const std::vector<launcher> &launches, size_t least) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaEvent_t begin, end;
    MUST(cudaStreamCreate(&stream));
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    size_t nodes = 0;
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    while (nodes < least)
        for (const launcher &l : launches) {
            if (l(stream) != QE_OK) {
                fprintf(stderr, "a launch was refused: %s\n", cudaGetErrorString(cudaGetLastError()));
                exit(1);
            }
            ++nodes;
        }
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&executable, graph, 0));
    std::vector<double> times;
    for (int i = 0; i < GRAPHS + 3; ++i) {
        float ms;
        MUST(cudaEventRecord(begin, stream));
        MUST(cudaGraphLaunch(executable, stream));
        MUST(cudaEventRecord(end, stream));
        MUST(cudaEventSynchronize(end));
        MUST(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3) times.push_back(1000.0 * ms / static_cast<double>(nodes));
    }
    MUST(cudaGraphExecDestroy(executable));
    MUST(cudaGraphDestroy(graph));
    MUST(cudaEventDestroy(begin));
    MUST(cudaEventDestroy(end));
    MUST(cudaStreamDestroy(stream));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

/* Bytes that an op must read and write. */
struct traffic {
    double read, written;
    double bytes() const {
        return read + written;
    }
};

/* Of what rotates: `make` prepares one of the launches in the arena. */
static double time_rotated(double bytes, const std::function<launcher(arena &)> &make) {
    std::vector<launcher> launches;
    const size_t sets = std::max<size_t>(2, static_cast<size_t>(ROTATED_BYTES / bytes) + 1);
    arena memory(static_cast<size_t>(static_cast<double>(sets) * (bytes * 1.2 + (16 << 20))));
    for (size_t i = 0; i < sets; ++i) launches.push_back(make(memory));
    MUST(cudaDeviceSynchronize());
    return time_launches(launches, std::min<size_t>(NODES_MAX, NODES_MIN + static_cast<size_t>(GRAPH_BYTES / bytes)));
}

enum { COPY_THREADS = 256 };

template <int LOADS, int STORES>
KERNEL void __launch_bounds__(COPY_THREADS) copy_kernel(const uint4 *from, uint4 *to) {
    const size_t load = blockIdx.x * static_cast<size_t>(LOADS * COPY_THREADS) + threadIdx.x;
    const size_t store = blockIdx.x * static_cast<size_t>(STORES * COPY_THREADS) + threadIdx.x;
    uint4 v[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) v[i] = load_once(from + load + i * COPY_THREADS);
#pragma unroll
    for (int i = 1; i < LOADS; ++i) v[0].x ^= v[i].x, v[0].y ^= v[i].y, v[0].z ^= v[i].z, v[0].w ^= v[i].w;
#pragma unroll
    for (int i = 0; i < STORES; ++i) store_late(to + store + i * COPY_THREADS, v[0]);
}

/* The form that was the fastest of many at all sizes: as few loads a thread as the mix allows. */
template <int LOADS, int STORES>
static double copy_us(double bytes) {
    const double block_bytes = (LOADS + STORES) * COPY_THREADS * 16.0;
    const uint32_t blocks = static_cast<uint32_t>(bytes / block_bytes + 0.5);
    return time_rotated(bytes, [blocks](arena &m) {
        const size_t words = static_cast<size_t>(blocks) * COPY_THREADS;
        const uint4 *from = static_cast<const uint4 *>(m.bf16(words * LOADS * 8));
        uint4 *to = static_cast<uint4 *>(m.take(words * STORES * 16));
        return launcher([=](cudaStream_t stream) {
            return launch(copy_kernel<LOADS, STORES>, dim3(blocks), COPY_THREADS, 0, 0, stream, from, to);
        });
    });
}

/* Of as many bytes in about this mix. */
static double copy_of(const traffic &t) {
    const double ratio = t.read / t.written;
    if (ratio < 0.75) return copy_us<1, 2>(t.bytes());
    if (ratio < 1.25) return copy_us<1, 1>(t.bytes());
    if (ratio < 1.75) return copy_us<3, 2>(t.bytes());
    return ratio < 2.5 ? copy_us<2, 1>(t.bytes()) : copy_us<3, 1>(t.bytes());
}

/* One line of the table. */
static void measure(const char *name, const shape &s, const traffic &t, const std::function<launcher(arena &)> &make) {
    const double bytes = t.bytes(), us = time_rotated(bytes, make);
    printf("%-28s T=%-5u h=%-5u f=%-6u %9.2f us %9.1f MB %7.3f TB/s", name, s.rows, s.hidden, s.ffn, us, bytes / 1e6,
           bytes / us * 1e-6);
    if (bytes >= LARGE_BYTES) printf("  a copy %9.2f us%s", copy_of(t), bytes / us < WANTED_RATE ? "  below 3.6" : "");
    printf("\n");
    fflush(stdout);
}

KERNEL void nothing_kernel() {
}

static void measure_nothing() {
    for (uint32_t blocks : {1u, 512u, 2048u}) {
        const launcher nothing = [blocks](cudaStream_t stream) {
            return launch(nothing_kernel, dim3(blocks), COPY_THREADS, 0, 0, stream);
        };
        printf("an empty node of %4u blocks %6.2f us\n", blocks, time_launches({nothing}, NODES_MAX));
    }
}

/* Codes both ways under delayed scaling. */
static qe_quantize_target delayed(arena &memory, uint32_t rows, uint32_t columns, qe_format format) {
    const size_t count = static_cast<size_t>(rows) * columns;
    qe_quantize_target t = {};
    t.recipe = QE_RECIPE_DELAYED, t.format = static_cast<uint8_t>(format);
    float *words = memory.fp32(4);
    t.scale = words, t.amax = words + 1;
    for (qe_qtensor *tensor : {&t.operand, &t.retained}) {
        tensor->codes = memory.take(count), tensor->scale_inv = words + 2;
        tensor->rows = rows, tensor->columns = columns, tensor->format = t.format;
        tensor->transposed = tensor == &t.retained;
    }
    return t;
}

static launcher norm_of(arena &m, const shape &s, bool is_quantized) {
    const size_t count = static_cast<size_t>(s.rows) * s.hidden;
    qe_args_norm a = {};
    a.x = m.bf16(count), a.gain = m.fp32(s.hidden), a.rstd = m.fp32(s.rows), a.epsilon = 1e-5f;
    a.rows = s.rows, a.hidden = s.hidden;
    if (is_quantized)
        a.target = delayed(m, s.rows, s.hidden, QE_FORMAT_E4M3);
    else
        a.y = m.take(count * 2);
    return [a](cudaStream_t stream) { return qe_cuda_norm(&a, stream); };
}

static launcher norm_backward_of(arena &m, const shape &s, bool is_quantized) {
    const size_t count = static_cast<size_t>(s.rows) * s.hidden;
    qe_args_norm_backward a = {};
    a.dy = m.bf16(count), a.x = m.bf16(count), a.residual = m.bf16(count), a.dx = m.take(count * 2);
    a.rstd = m.fp32(s.rows), a.gain = m.fp32(s.hidden), a.gain_grad = m.fp32(s.hidden);
    a.partials = static_cast<float *>(m.take(static_cast<size_t>(QE_GAIN_PARTIALS) * s.hidden * 4));
    a.rows = s.rows, a.hidden = s.hidden;
    if (is_quantized) a.target = delayed(m, s.rows, s.hidden, QE_FORMAT_E5M2);
    return [a](cudaStream_t stream) { return qe_cuda_norm_backward(&a, stream); };
}

static launcher quantize_of(arena &m, uint32_t rows, uint32_t columns) {
    qe_args_quantize a = {};
    a.x = m.bf16(static_cast<size_t>(rows) * columns), a.rows = rows, a.columns = columns;
    a.target = delayed(m, rows, columns, QE_FORMAT_E4M3);
    return [a](cudaStream_t stream) { return qe_cuda_quantize(&a, stream); };
}

static launcher weight_of(arena &m, uint32_t rows, uint32_t columns) {
    qe_args_quantize_weight a = {};
    a.w = m.fp32(static_cast<size_t>(rows) * columns), a.rows = rows, a.columns = columns;
    a.target = delayed(m, rows, columns, QE_FORMAT_E4M3);
    return [a](cudaStream_t stream) { return qe_cuda_quantize_weight(&a, stream); };
}

static launcher rope_of(arena &m, const shape &s, bool back) {
    qe_args_rope a = {};
    a.qkv = m.bf16(static_cast<size_t>(s.rows) * s.qkv());
    const size_t angles = static_cast<size_t>(s.rows) * s.head_dim / 2;
    a.cosine = m.fp32(angles), a.sine = m.fp32(angles);
    a.rows = a.sequence = s.rows, a.heads = s.heads, a.kv_heads = s.kv_heads, a.head_dim = s.head_dim;
    if (!back) return [a](cudaStream_t stream) { return qe_cuda_rope(&a, stream); };
    a.target = delayed(m, s.rows, s.qkv(), QE_FORMAT_E5M2);
    return [a](cudaStream_t stream) { return qe_cuda_rope_backward_quantize(&a, stream); };
}

static launcher swiglu_of(arena &m, const shape &s) {
    qe_args_swiglu a = {};
    a.gate_up = m.bf16(static_cast<size_t>(s.rows) * 2 * s.ffn), a.rows = s.rows, a.ffn = s.ffn;
    a.target = delayed(m, s.rows, s.ffn, QE_FORMAT_E4M3);
    return [a](cudaStream_t stream) { return qe_cuda_swiglu_quantize(&a, stream); };
}

static launcher swiglu_backward_of(arena &m, const shape &s) {
    qe_args_swiglu_backward a = {};
    a.gate_up = m.bf16(static_cast<size_t>(s.rows) * 2 * s.ffn), a.dy = m.bf16(static_cast<size_t>(s.rows) * s.ffn);
    a.rows = s.rows, a.ffn = s.ffn;
    a.target = delayed(m, s.rows, 2 * s.ffn, QE_FORMAT_E5M2);
    return [a](cudaStream_t stream) { return qe_cuda_swiglu_backward_quantize(&a, stream); };
}

static launcher decode_of(arena &m, uint32_t rows, uint32_t columns) {
    qe_qtensor t = {};
    t.codes = m.bf16(static_cast<size_t>(rows) * columns / 2), t.rows = rows, t.columns = columns;
    t.scale_inv = m.fp32(static_cast<size_t>((rows + QE_BLOCK - 1) / QE_BLOCK) * columns);
    t.format = QE_FORMAT_E4M3, t.blocking = QE_BLOCKING_COLUMN;
    void *values = m.take(static_cast<size_t>(rows) * columns * 2);
    return [t, values](cudaStream_t stream) { return qe_cuda_decode(&t, values, stream); };
}

static void measure_shape(const shape &s) {
    const double th = static_cast<double>(s.rows) * s.hidden, tf = static_cast<double>(s.rows) * s.ffn;
    const double te = static_cast<double>(s.rows) * s.qkv(), turned = te - 1.0 * s.rows * s.kv_heads * s.head_dim;
    const double wide = static_cast<double>(s.ffn) * s.hidden, rstd = 4.0 * s.rows;
    measure("norm", s, {2 * th, 2 * th + rstd}, [&](arena &m) { return norm_of(m, s, false); });
    measure("norm_quantize", s, {2 * th, 2 * th + rstd}, [&](arena &m) { return norm_of(m, s, true); });
    measure("norm_backward", s, {6 * th, 2 * th}, [&](arena &m) { return norm_backward_of(m, s, false); });
    measure("norm_backward_quantize", s, {6 * th, 4 * th}, [&](arena &m) { return norm_backward_of(m, s, true); });
    measure("quantize", s, {2 * th, 2 * th}, [&](arena &m) { return quantize_of(m, s.rows, s.hidden); });
    measure("quantize_weight", s, {4 * wide, 2 * wide}, [&](arena &m) { return weight_of(m, s.ffn, s.hidden); });
    measure("rope", s, {2 * turned, 2 * turned}, [&](arena &m) { return rope_of(m, s, false); });
    measure("rope_backward_quantize", s, {2 * te, 2 * te}, [&](arena &m) { return rope_of(m, s, true); });
    measure("swiglu_quantize", s, {4 * tf, 2 * tf}, [&](arena &m) { return swiglu_of(m, s); });
    measure("swiglu_backward_quantize", s, {6 * tf, 4 * tf}, [&](arena &m) { return swiglu_backward_of(m, s); });
    measure("decode", s, {tf, 2 * tf}, [&](arena &m) { return decode_of(m, s.rows, s.ffn); });
}

static void measure_copy() {
    const shape none = {};
    for (size_t bytes : {16u << 20, 64u << 20, 512u << 20})
        measure("copy by the runtime", none, {1.0 * bytes, 1.0 * bytes}, [bytes](arena &m) {
            void *from = m.bf16(bytes / 2), *to = m.take(bytes);
            return launcher([=](cudaStream_t stream) {
                return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream) == cudaSuccess
                           ? QE_OK
                           : QE_ERROR_DEVICE;
            });
        });
}

/* --- tile shapes that were considered ----------------------------------------------------------------------------- */

template <typename Source, int FORMAT, int ROWS, int ACROSS, int AHEAD, int X, int Y>
static void measure_tile(const char *name, const shape &s, const traffic &t, uint32_t columns,
                         const std::function<Source(arena &)> &source) {
    typedef tile_shape<FORMAT, ROWS, ACROSS, AHEAD, X, Y> tile;
    char title[64];
    snprintf(title, sizeof title, "%s %d/%d/%d %dx%d", name, ROWS, ACROSS, AHEAD, X, Y);
    measure(title, s, t, [&](arena &m) {
        tile_job<Source> job = {};
        job.source = source(m);
        const qe_quantize_target target = delayed(m, s.rows, columns, static_cast<qe_format>(FORMAT));
        planes_of(places_of(&target, s.rows, columns), &job.planes);
        job.scale = scaling_of(&target), job.words = words_of(&target, tensor_words());
        return launcher([job](cudaStream_t stream) { return tile_launch<Source, tile>(job, stream); });
    });
}

template <typename Source, int FORMAT>
static void measure_tiles(const char *name, const shape &s, const traffic &b, uint32_t columns,
                          const std::function<Source(arena &)> &source) {
    measure_tile<Source, FORMAT, 16, 8, 4, 2, 2>(name, s, b, columns, source);
    measure_tile<Source, FORMAT, 16, 8, 2, 2, 2>(name, s, b, columns, source);
    measure_tile<Source, FORMAT, 16, 8, 1, 2, 2>(name, s, b, columns, source);
    measure_tile<Source, FORMAT, 16, 8, 2, 1, 2>(name, s, b, columns, source);
    measure_tile<Source, FORMAT, 16, 4, 2, 2, 2>(name, s, b, columns, source);
    measure_tile<Source, FORMAT, 8, 8, 2, 2, 2>(name, s, b, columns, source);
    measure_tile<Source, FORMAT, 8, 8, 1, 2, 2>(name, s, b, columns, source);
    measure_tile<Source, FORMAT, 8, 8, 2, 4, 1>(name, s, b, columns, source);
    measure_tile<Source, FORMAT, 8, 4, 2, 2, 2>(name, s, b, columns, source);
    measure_tile<Source, FORMAT, 8, 4, 1, 2, 2>(name, s, b, columns, source);
    measure_tile<Source, FORMAT, 8, 4, 2, 4, 1>(name, s, b, columns, source);
    measure_tile<Source, FORMAT, 8, 4, 2, 2, 4>(name, s, b, columns, source);
    measure_tile<Source, FORMAT, 4, 4, 1, 4, 1>(name, s, b, columns, source);
    measure_tile<Source, FORMAT, 4, 4, 1, 2, 2>(name, s, b, columns, source);
}

static rope_source rope_source_of(arena &m, const shape &s) {
    rope_source source = {};
    const size_t angles = static_cast<size_t>(s.rows) * s.head_dim / 2;
    source.qkv = static_cast<uint16_t *>(m.bf16(static_cast<size_t>(s.rows) * s.qkv()));
    source.cosine = m.fp32(angles), source.sine = m.fp32(angles);
    source.columns = s.qkv(), source.half = s.head_dim / 2, source.units = s.qkv() / 2;
    source.sequence = s.rows, source.turned_heads = s.heads + s.kv_heads, source.back = 1;
    return source;
}

static void measure_tile_shapes(const shape &s) {
    const double th = static_cast<double>(s.rows) * s.hidden, tf = static_cast<double>(s.rows) * s.ffn;
    const size_t t = s.rows;
    measure_tiles<plain_source, QE_FORMAT_E4M3>("plain", s, {2 * th, 2 * th}, s.hidden, [&](arena &m) {
        return plain_source{static_cast<uint16_t *>(m.bf16(t * s.hidden)), s.hidden};
    });
    measure_tiles<swiglu_source, QE_FORMAT_E4M3>("swiglu", s, {4 * tf, 2 * tf}, s.ffn, [&](arena &m) {
        return swiglu_source{static_cast<uint16_t *>(m.bf16(2 * t * s.ffn)), s.ffn};
    });
    const traffic back = {6 * tf, 4 * tf};
    measure_tiles<swiglu_backward_source, QE_FORMAT_E5M2>("swiglu_backward", s, back, 2 * s.ffn, [&](arena &m) {
        const uint16_t *gate_up = static_cast<uint16_t *>(m.bf16(2 * t * s.ffn));
        return swiglu_backward_source{gate_up, static_cast<uint16_t *>(m.bf16(t * s.ffn)), s.ffn};
    });
    const double te = static_cast<double>(s.rows) * s.qkv();
    measure_tiles<rope_source, QE_FORMAT_E5M2>("rope_backward", s, {2 * te, 2 * te}, s.qkv(),
                                               [&](arena &m) { return rope_source_of(m, s); });
}

/* --- checks ------------------------------------------------------------------------------------------------------ */

static int check_all() {
    checks all;
    check_everything(all, true);
    printf("%d checks, %d failed\n", all.run, all.failed);
    return all.failed ? 1 : 0;
}

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    cudaDeviceProp device;
    MUST(cudaGetDeviceProperties(&device, 0));
    printf("%s, %d multiprocessors, %d MB of second cache\n", device.name, device.multiProcessorCount,
           device.l2CacheSize >> 20);
    if (what == "" || what == "--check") {
        const int failed = check_all();
        if (failed || what == "--check") return failed;
    }
    measure_nothing();
    measure_copy();
    if (what == "--shapes")
        for (const shape &s : {SHAPES[3], SHAPES[2]}) measure_tile_shapes(s);
    else
        for (const shape &s : SHAPES) measure_shape(s);
    MUST(cudaDeviceSynchronize());
    return 0;
}
