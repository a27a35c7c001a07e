/* attention_own.cu - see attention_own.h and README.md. Three kernels: `measure` makes statistics of queries and keys
 * and clears sums, `differentiate` does the five products, `finish` rounds sums to bf16, or goes on to codes. */
#include "backend/cuda/attention_own.h"

#include <math.h>

#include "backend/cuda/attention_differentiate.cuh"
#include "backend/cuda/attention_finish.cuh"
#include "backend/cuda/kernels.h"
#include "backend/cuda/sink.cuh"
#include "backend/cuda/tensor_map.cuh"

namespace {

using namespace sm90;
using namespace attention;

/* --- measure ----------------------------------------------------------------------------------------------------- */

constexpr uint32_t MEASURE_THREADS = 256;
/* Norms below 2^-50 count as that: their squares would be no normal numbers. */
constexpr float SQUARE_LEAST = 0x1p-100f;

struct measure_job {
    const uint16_t *qkv, *out, *dout;
    const float *lse;
    float *stats, *peaks;
    uint4 *sums;
    shape of;
};

struct eight {
    float at[8];
    METHOD explicit eight(uint4 v) {
        const uint32_t words[] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            at[2 * i] = float_of(words[i] << 16);
            at[2 * i + 1] = float_of(words[i] & 0xFFFF0000u);
        }
    }
};

DEVICE float dot(const eight &a, const eight &b) {
    float sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) sum = fused(a.at[i], b.at[i], sum);
    return sum;
}

/* Over the lanes that share a row, in every one of them. */
template <uint32_t LANES>
DEVICE float row_sum(float value) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) value = add(value, shuffle_xor(value, mask));
    return value;
}

/* Eight elements of a row of a head; zeros behind the sequence's end. */
DEVICE eight row_load(const uint16_t *rows, uint64_t row_elements, uint32_t row, uint32_t count, uint32_t column) {
    return eight(row < count ? load_once(rows + row * row_elements + column) : make_uint4(0, 0, 0, 0));
}

template <uint32_t DIM>
DEVICE void measure_queries(const measure_job &j, uint32_t s, uint32_t head, uint32_t group) {
    constexpr uint32_t LANES = DIM / 8, PASS = MEASURE_THREADS / LANES;
    const shape &of = j.of;
    const uint64_t at = static_cast<uint64_t>(s) * of.sequence * of.out_row + head * DIM;
    float *stats = j.stats + of.stats_at(s, head, group);
    const uint32_t column = threadIdx.x % LANES * 8;
#pragma unroll
    for (uint32_t r = threadIdx.x / LANES; r < ROWS; r += PASS) {
        const uint32_t row = group * ROWS + r;
        const eight out = row_load(j.out + at, of.out_row, row, of.sequence, column);
        const eight dout = row_load(j.dout + at, of.out_row, row, of.sequence, column);
        const float mean = row_sum<LANES>(dot(dout, out)), square = row_sum<LANES>(dot(dout, dout));
        if (column != 0) continue;
        const float lse = row < of.sequence ? j.lse[(s * of.heads + head) * of.sequence + row] : 0.0f;
        stats[STAT_LSE + r] = mul(lse, -1.4426950408889634f);
        stats[STAT_MEAN + r] = -mean;
        /* 0 mean: a mean that is no number makes the whole row none */
        stats[STAT_NORM + r] = fused(0.0f, mean, root(square < SQUARE_LEAST ? SQUARE_LEAST : square));
    }
    uint4 *sums = j.sums + of.sums_at(s, head, group, DIM) / 4;
#pragma unroll
    for (uint32_t i = threadIdx.x; i < ROWS * DIM / 4; i += MEASURE_THREADS) sums[i] = make_uint4(0, 0, 0, 0);
}

DEVICE void raise_shared(uint32_t *word, float value) {
    atomicMax(word, bits_of(value) & 0x7FFFFFFFu); /* a maximum does not depend on order */
}

template <uint32_t DIM>
DEVICE void measure_keys(const measure_job &j, uint32_t s, uint32_t kv_head, uint32_t group) {
    constexpr uint32_t LANES = DIM / 8, PASS = MEASURE_THREADS / LANES;
    __shared__ uint32_t most[2];
    const shape &of = j.of;
    const uint64_t at = static_cast<uint64_t>(s) * of.sequence * of.row + (of.heads + kv_head) * DIM;
    const uint32_t column = threadIdx.x % LANES * 8;
    if (threadIdx.x < 2) most[threadIdx.x] = 0;
    block_barrier();
#pragma unroll
    for (uint32_t r = threadIdx.x / LANES; r < ROWS; r += PASS) {
        const uint32_t row = group * ROWS + r;
        const eight key = row_load(j.qkv + at, of.row, row, of.sequence, column);
        const eight value = row_load(j.qkv + at + of.kv_heads * DIM, of.row, row, of.sequence, column);
        const float keys = row_sum<LANES>(dot(key, key)), values = row_sum<LANES>(dot(value, value));
        if (column != 0) continue;
        raise_shared(&most[0], keys);
        raise_shared(&most[1], values);
    }
    block_barrier();
    if (threadIdx.x < 2) j.peaks[of.peaks_at(s, kv_head, group) + threadIdx.x] = float_of(most[threadIdx.x]);
}

/* Blocks: groups of ROWS tokens, then heads and behind them those of keys, then sequences. */
template <uint32_t DIM>
__global__ void __launch_bounds__(MEASURE_THREADS) measure(const measure_job j) {
    if (blockIdx.y < j.of.heads)
        measure_queries<DIM>(j, blockIdx.z, blockIdx.y, blockIdx.x);
    else
        measure_keys<DIM>(j, blockIdx.z, blockIdx.y - j.of.heads, blockIdx.x);
}

/* --- host -------------------------------------------------------------------------------------------------------- */

constexpr uint32_t ITEMS_WANTED = 256; /* pieces of work that keep a large chip's multiprocessors busy to the end */
constexpr uint32_t WAVE_ITEMS = 128;
constexpr uint32_t PAIR = 2; /* of splits, which are a cluster */
constexpr uint64_t ALIGN_BYTES = 256;

uint32_t up(uint32_t value, uint32_t to) {
    return (value + to - 1) / to;
}

/* Of the shape alone: bits must not depend on how many multiprocessors there are. */
uint32_t splits_of(uint32_t items, uint32_t group) {
    uint32_t splits = group % PAIR == 0 ? PAIR : 1; /* a pair costs nothing, and has sums of fewer heads in the cache */
    while (items * splits < ITEMS_WANTED && splits < group) {
        do ++splits;
        while (group % splits != 0);
    }
    return splits;
}

/* As few as give a large chip's multiprocessors one piece of work each. */
uint32_t wave_heads_of(const shape &of) {
    const uint32_t heads = up(WAVE_ITEMS, of.key_blocks * of.splits), all = of.kv_heads * of.sequences;
    return heads < all ? heads : all;
}

shape shape_of(const qe_args_attention_backward *a) {
    const uint32_t queries = a->head_dim == 128 ? QUERIES<128> : QUERIES<64>;
    shape of = {};
    of.sequences = a->sequences;
    of.sequence = a->sequence;
    of.heads = a->heads;
    of.kv_heads = a->kv_heads;
    of.groups = up(a->sequence, queries) * (queries / ROWS);
    of.key_blocks = up(a->sequence, KEYS);
    of.splits = splits_of(of.key_blocks * a->kv_heads * a->sequences, a->heads / a->kv_heads);
    of.parts = of.splits == PAIR ? 1 : of.splits;
    of.wave_heads = wave_heads_of(of);
    of.row = (a->heads + 2 * a->kv_heads) * a->head_dim;
    of.out_row = a->heads * a->head_dim;
    return of;
}

struct extents {
    uint64_t stats, peaks, peak, sums, parts, whole; /* bytes from the start of the workspace */
    extents(const shape &of, uint32_t dim) {
        const uint64_t groups = static_cast<uint64_t>(of.sequences) * of.groups;
        const uint64_t items = static_cast<uint64_t>(of.splits) * of.sequences * of.kv_heads * of.key_blocks;
        stats = 0;
        peaks = padded(stats + groups * of.heads * STATS * sizeof(float));
        peak = padded(peaks + groups * of.kv_heads * 2 * sizeof(float));
        sums = padded(peak + static_cast<uint64_t>(of.sequences) * of.kv_heads * sizeof(float));
        parts = padded(sums + groups * of.heads * ROWS * dim * sizeof(int32_t));
        whole = padded(parts + (of.parts > 1 ? items * 2 * KEYS * dim * sizeof(float) : 0));
    }
    static uint64_t padded(uint64_t bytes) { return (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES; }
};

bool map_make(const qe_attention_own *own, const void *at, const shape &of, uint32_t columns, CUtensorMap *map_out) {
    return tensor_map_make(own->encode, at, of.sequences, of.sequence, columns, ROWS, map_out);
}

template <uint32_t DIM>
constexpr size_t SHARED_BYTES = sizeof(room<DIM>);

/* Where the parts of the workspace lie. */
template <typename T>
T *room_at(uint8_t *workspace, uint64_t offset) {
    return reinterpret_cast<T *>(workspace + offset);
}

template <uint32_t DIM>
gradients_job gradients_job_of(const qe_args_attention_backward *a, const shape &of, uint8_t *workspace) {
    const extents at(of, DIM);
    gradients_job job = {};
    job.sums = room_at<int32_t>(workspace, at.sums);
    job.parts = room_at<float>(workspace, at.parts);
    job.stats = room_at<float>(workspace, at.stats);
    job.peak = room_at<float>(workspace, at.peak);
    job.dqkv = static_cast<uint16_t *>(a->dqkv);
    job.of = of;
    job.scale = 1.0f / sqrtf(static_cast<float>(DIM));
    return job;
}

template <uint32_t DIM>
qe_status sums_make(const qe_attention_own *own, const qe_args_attention_backward *a, const shape &of,
                    uint8_t *workspace, cudaStream_t stream) {
    const extents at(of, DIM);
    float *const stats = room_at<float>(workspace, at.stats), *const peaks = room_at<float>(workspace, at.peaks);
    int32_t *const sums = room_at<int32_t>(workspace, at.sums);
    const float scale = 1.0f / sqrtf(static_cast<float>(DIM));
    const measure_job first = {static_cast<const uint16_t *>(a->qkv), static_cast<const uint16_t *>(a->out),
                               static_cast<const uint16_t *>(a->dout), a->lse, stats, peaks,
                               reinterpret_cast<uint4 *>(sums), of};
    differentiate_job second = {{}, {}, stats, peaks, room_at<float>(workspace, at.peak), sums,
                                room_at<float>(workspace, at.parts), static_cast<uint16_t *>(a->dqkv), of, scale,
                                scale * 1.4426950408889634f};
    if (!map_make(own, a->qkv, of, of.row, &second.qkv) || !map_make(own, a->dout, of, of.out_row, &second.dout))
        return QE_ERROR_DEVICE;
    LAUNCH_TRY(launch(measure<DIM>, dim3(of.groups, of.heads + of.kv_heads, of.sequences), MEASURE_THREADS, 1, 0,
                      stream, first));
    const dim3 blocks(of.key_blocks * of.splits * of.kv_heads * of.sequences);
    if (of.splits == PAIR)
        return launch(differentiate<DIM, true>, blocks, THREADS, PAIR, SHARED_BYTES<DIM>, stream, second);
    return launch(differentiate<DIM, false>, blocks, THREADS, 1, SHARED_BYTES<DIM>, stream, second);
}

template <uint32_t DIM>
qe_status values_finish(const gradients_job &job, cudaStream_t stream) {
    const shape &of = job.of;
    const uint32_t heads = of.heads + (of.parts > 1 ? 2 * of.kv_heads : 0);
    return launch(finish<DIM>, dim3(up(of.sequence, ROWS), heads, of.sequences), FINISH_THREADS, 1, 0, stream, job);
}

template <uint32_t DIM>
dim3 codes_blocks(const shape &of) {
    return dim3(up(of.heads + 2 * of.kv_heads, codes_shape<DIM>::HEADS), up(of.sequences * of.sequence, ROWS));
}

/* Is the target one that codes are made for straight from sums? */
bool codes_job_of(const qe_args_attention_backward *a, const gradients_job &sums, finish_codes_job *job_out) {
    const places to = places_of(&a->target, a->sequences * a->sequence, sums.of.row);
    finish_codes_job job = {};
    if (a->target.recipe != QE_RECIPE_DELAYED || a->sequence % 8 != 0 || !planes_of(to, &job.planes)) return false;
    job.sums = sums;
    job.cosine = a->cosine, job.sine = a->sine;
    job.scale = scaling_of(&a->target);
    job.words = words_of(&a->target, tensor_words());
    *job_out = job;
    return is_aligned(a->cosine) && is_aligned(a->sine);
}

template <uint32_t DIM>
qe_status codes_finish(const finish_codes_job &job, int format, cudaStream_t stream) {
    const shape &of = job.sums.of;
    constexpr uint32_t EACH = codes_shape<DIM>::THREADS;
    constexpr size_t SHARED = EACH / WARP * sizeof(warp_sums);
    const dim3 grid = codes_blocks<DIM>(of);
    return format == QE_FORMAT_E4M3
               ? launch(finish_codes<QE_FORMAT_E4M3, DIM>, grid, EACH, 1, SHARED, stream, job)
               : launch(finish_codes<QE_FORMAT_E5M2, DIM>, grid, EACH, 1, SHARED, stream, job);
}

template <uint32_t DIM>
qe_status run(const qe_attention_own *own, const qe_args_attention_backward *a, uint8_t *workspace,
              cudaStream_t stream) {
    const shape of = shape_of(a);
    const gradients_job job = gradients_job_of<DIM>(a, of, workspace);
    finish_codes_job codes;
    LAUNCH_TRY(sums_make<DIM>(own, a, of, workspace, stream));
    const bool quantizes = qe_attention_backward_quantizes(a);
    if (quantizes && codes_blocks<DIM>(of).y <= GRID_TALL_MAX && codes_job_of(a, job, &codes))
        return codes_finish<DIM>(codes, a->target.format, stream);
    LAUNCH_TRY(values_finish<DIM>(job, stream));
    if (!quantizes) return QE_OK;
    const qe_args_rope rope = qe_attention_backward_rope(a);
    return qe_cuda_rope_backward_quantize(&rope, stream);
}

} // namespace

qe_status qe_attention_own_open(qe_attention_own *own_out) {
    int device = 0, multiprocessors = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
        return QE_ERROR_UNSUPPORTED;
    void *encode = tensor_map_encoder_find();
    if (encode == nullptr) return QE_ERROR_UNSUPPORTED;
    own_out->encode = encode;
    own_out->multiprocessors = static_cast<uint32_t>(multiprocessors);
    return QE_OK;
}

int qe_attention_own_takes(const qe_args_attention_backward *a) {
    constexpr uint64_t INDEX_MAX = 1ull << 31; /* of what is counted in 32 bits */
    if (a->head_dim != 64 && a->head_dim != 128) return 0;
    const uint64_t all_heads = a->heads + 2ull * a->kv_heads; /* at most so many blocks stand below each other */
    if (a->sequences > GRID_TALL_MAX || all_heads > GRID_TALL_MAX) return 0;
    const uint64_t tokens = static_cast<uint64_t>(a->sequences) * (a->sequence + 2ull * KEYS);
    return tokens * a->heads * 4 < INDEX_MAX;
}

uint64_t qe_attention_own_bytes(const qe_args_attention_backward *a) {
    return extents(shape_of(a), a->head_dim).whole;
}

qe_status qe_attention_own_run(const qe_attention_own *own, const qe_args_attention_backward *a, void *workspace,
                               cudaStream_t stream) {
    if (!is_aligned(a->qkv) || !is_aligned(a->out) || !is_aligned(a->dout) || !is_aligned(a->dqkv))
        return QE_ERROR_ARGUMENT;
    return a->head_dim == 128 ? run<128>(own, a, static_cast<uint8_t *>(workspace), stream)
                              : run<64>(own, a, static_cast<uint8_t *>(workspace), stream);
}
