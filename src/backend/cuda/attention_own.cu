/* attention_own.cu - see attention_own.h and README.md. Three kernels: `measure` makes statistics of queries and keys
 * and clears sums, `differentiate` does the five products, `finish` rounds sums to bf16. */
#include "backend/cuda/attention_own.h"

#include <math.h>

#include "backend/cuda/attention_differentiate.cuh"
#include "backend/cuda/launch.cuh"

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
        stats[STAT_LSE + r] = mul(lse, 1.4426950408889634f);
        stats[STAT_MEAN + r] = mean;
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

/* --- finish ------------------------------------------------------------------------------------------------------ */

constexpr uint32_t FINISH_THREADS = 256; /* each two rows by eight columns of a tile */

struct finish_job {
    const int32_t *sums;
    const float *parts, *stats, *peaks;
    uint16_t *dqkv;
    shape of;
    float scale;
    uint32_t query_tiles; /* blocks before those of keys and values */
};

/* Which of a tile's sixteen-byte words a thread takes: four neighbours in memory, eight columns of two rows. */
struct corner {
    uint32_t column, row, word;
    METHOD corner() {
        const uint32_t i = threadIdx.x % 8, line = threadIdx.x / 8;
        column = 8 * i;
        row = line / 8 * 16 + line % 8;
        word = i * GROUP_THREADS + line * 4;
    }
};

DEVICE void row_store(uint16_t *dqkv, const shape &of, uint32_t s, uint32_t row, uint32_t column,
                      const float (&values)[8]) {
    if (row >= of.sequence) return;
    *reinterpret_cast<uint4 *>(dqkv + (static_cast<uint64_t>(s) * of.sequence + row) * of.row + column) =
        make_uint4(round_bf16_pair(values[0], values[1]), round_bf16_pair(values[2], values[3]),
                   round_bf16_pair(values[4], values[5]), round_bf16_pair(values[6], values[7]));
}

template <uint32_t DIM>
DEVICE void finish_queries(const finish_job &j) {
    constexpr uint32_t ACROSS = DIM / 64;
    const shape &of = j.of;
    const corner c;
    uint32_t rest = blockIdx.x / ACROSS;
    const uint32_t group = rest % of.groups, column = blockIdx.x % ACROSS * 64 + c.column;
    rest /= of.groups;
    const uint32_t head = rest % of.heads, s = rest / of.heads, row = group * ROWS + c.row;
    const int4 *words = reinterpret_cast<const int4 *>(j.sums) + static_cast<uint64_t>(blockIdx.x) * (TILE_WORDS / 4) +
                        c.word;
    const float *norms = j.stats + of.stats_at(s, head, group) + STAT_NORM + c.row;
    int4 four[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) four[i] = words[i];
    const float peak = peak_of(j.peaks, of, s, head / (of.heads / of.kv_heads));
    const float upper = mul(sum_unscale(norms[0], peak), j.scale), lower = mul(sum_unscale(norms[8], peak), j.scale);
    float high[8], low[8];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        high[2 * i] = mul(__int2float_rn(four[i].x), upper);
        high[2 * i + 1] = mul(__int2float_rn(four[i].y), upper);
        low[2 * i] = mul(__int2float_rn(four[i].z), lower);
        low[2 * i + 1] = mul(__int2float_rn(four[i].w), lower);
    }
    row_store(j.dqkv, of, s, row, head * DIM + column, high);
    row_store(j.dqkv, of, s, row + 8, head * DIM + column, low);
}

/* Parts are added in their order. */
template <uint32_t DIM>
DEVICE void finish_keys(const finish_job &j, uint32_t index) {
    constexpr uint32_t ACROSS = DIM / 64;
    const shape &of = j.of;
    const corner c;
    const uint32_t tile = index % ACROSS, half = index / ACROSS % 2, which = index / ACROSS / 2 % 2;
    uint32_t rest = index / ACROSS / 4;
    const uint32_t block = rest % of.key_blocks;
    rest /= of.key_blocks;
    const uint32_t kv_head = rest % of.kv_heads, s = rest / of.kv_heads;
    float high[8] = {}, low[8] = {};
    for (uint32_t split = 0; split < of.splits; ++split) {
        const float4 *words = reinterpret_cast<const float4 *>(
                                  j.parts + of.part_at(split, s, kv_head, block, which, half, DIM)) +
                              tile * (TILE_WORDS / 4) + c.word;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const float4 four = words[i];
            high[2 * i] = add(high[2 * i], four.x);
            high[2 * i + 1] = add(high[2 * i + 1], four.y);
            low[2 * i] = add(low[2 * i], four.z);
            low[2 * i + 1] = add(low[2 * i + 1], four.w);
        }
    }
    const float scale = which == 0 ? j.scale : 1.0f;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
        high[i] = mul(high[i], scale);
        low[i] = mul(low[i], scale);
    }
    const uint32_t row = block * KEYS + half * ROWS + c.row;
    const uint32_t column = (of.heads + which * of.kv_heads + kv_head) * DIM + tile * 64 + c.column;
    row_store(j.dqkv, of, s, row, column, high);
    row_store(j.dqkv, of, s, row + 8, column, low);
}

template <uint32_t DIM>
__global__ void __launch_bounds__(FINISH_THREADS) finish(const finish_job j) {
    if (blockIdx.x < j.query_tiles)
        finish_queries<DIM>(j);
    else
        finish_keys<DIM>(j, blockIdx.x - j.query_tiles);
}

/* --- host -------------------------------------------------------------------------------------------------------- */

constexpr uint32_t ITEMS_WANTED = 256; /* pieces of work that keep a large chip's multiprocessors busy to the end */
constexpr uint64_t ALIGN_BYTES = 256;

uint32_t up(uint32_t value, uint32_t to) {
    return (value + to - 1) / to;
}

/* Of the shape alone: bits must not depend on how many multiprocessors there are. */
uint32_t splits_of(uint32_t items, uint32_t group) {
    uint32_t splits = 1;
    while (items * splits < ITEMS_WANTED && splits < group) {
        do ++splits;
        while (group % splits != 0);
    }
    return splits;
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
    of.row = (a->heads + 2 * a->kv_heads) * a->head_dim;
    of.out_row = a->heads * a->head_dim;
    return of;
}

struct extents {
    uint64_t stats, peaks, sums, parts, whole; /* bytes from the start of the workspace */
    extents(const shape &of, uint32_t dim) {
        const uint64_t groups = static_cast<uint64_t>(of.sequences) * of.groups;
        const uint64_t items = static_cast<uint64_t>(of.splits) * of.sequences * of.kv_heads * of.key_blocks;
        stats = 0;
        peaks = padded(stats + groups * of.heads * STATS * sizeof(float));
        sums = padded(peaks + groups * of.kv_heads * 2 * sizeof(float));
        parts = padded(sums + groups * of.heads * ROWS * dim * sizeof(int32_t));
        whole = padded(parts + (of.splits > 1 ? items * 2 * KEYS * dim * sizeof(float) : 0));
    }
    static uint64_t padded(uint64_t bytes) { return (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES; }
};

typedef CUresult (*encoder)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                            const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* bf16 [sequences, sequence, columns], boxes of 64 x 64. */
bool map_make(const qe_attention_own *own, const void *at, const shape &of, uint32_t columns, CUtensorMap *map_out) {
    const cuuint64_t sizes[] = {columns, of.sequence, of.sequences};
    const cuuint64_t pitches[] = {columns * 2ull, static_cast<cuuint64_t>(columns) * of.sequence * 2};
    const cuuint32_t box[] = {64, ROWS, 1}, steps[] = {1, 1, 1};
    return reinterpret_cast<encoder>(own->encode)(
               map_out, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void *>(at), sizes, pitches, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <uint32_t DIM>
constexpr size_t SHARED_BYTES = sizeof(room<DIM>);

template <uint32_t DIM>
qe_status run(const qe_attention_own *own, const qe_args_attention_backward *a, uint8_t *workspace,
              cudaStream_t stream) {
    const shape of = shape_of(a);
    const extents at(of, DIM);
    float *const stats = reinterpret_cast<float *>(workspace + at.stats);
    float *const peaks = reinterpret_cast<float *>(workspace + at.peaks);
    float *const parts = reinterpret_cast<float *>(workspace + at.parts);
    int32_t *const sums = reinterpret_cast<int32_t *>(workspace + at.sums);
    uint16_t *const dqkv = static_cast<uint16_t *>(a->dqkv);
    const float scale = 1.0f / sqrtf(static_cast<float>(DIM));
    const measure_job first = {static_cast<const uint16_t *>(a->qkv), static_cast<const uint16_t *>(a->out),
                               static_cast<const uint16_t *>(a->dout), a->lse, stats, peaks,
                               reinterpret_cast<uint4 *>(sums), of};
    differentiate_job second = {{}, {}, stats, peaks, sums, parts, dqkv, of, scale, scale * 1.4426950408889634f};
    const uint32_t tiles = of.sequences * of.heads * of.groups * (DIM / 64);
    const uint32_t key_tiles = of.splits > 1 ? of.sequences * of.kv_heads * of.key_blocks * 4 * (DIM / 64) : 0;
    const finish_job third = {sums, parts, stats, peaks, dqkv, of, scale, tiles};
    if (!map_make(own, a->qkv, of, of.row, &second.qkv) || !map_make(own, a->dout, of, of.out_row, &second.dout))
        return QE_ERROR_DEVICE;
    LAUNCH_TRY(launch(measure<DIM>, dim3(of.groups, of.heads + of.kv_heads, of.sequences), MEASURE_THREADS, 1, 0,
                      stream, first));
    LAUNCH_TRY(launch(differentiate<DIM>, dim3(of.key_blocks * of.splits * of.kv_heads * of.sequences), THREADS, 1,
                      SHARED_BYTES<DIM>, stream, second));
    return launch(finish<DIM>, dim3(tiles + key_tiles), FINISH_THREADS, 1, 0, stream, third);
}

} // namespace

qe_status qe_attention_own_open(qe_attention_own *own_out) {
    constexpr unsigned int ENCODE_SINCE = 12000;
    cudaDriverEntryPointQueryResult found;
    void *encode = nullptr;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, ENCODE_SINCE, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
        return QE_ERROR_UNSUPPORTED;
    own_out->encode = encode;
    return QE_OK;
}

int qe_attention_own_takes(const qe_args_attention_backward *a) {
    constexpr uint64_t INDEX_MAX = 1ull << 31; /* of what is counted in 32 bits */
    if (a->head_dim != 64 && a->head_dim != 128) return 0;
    const uint64_t tokens = static_cast<uint64_t>(a->sequences) * (a->sequence + 2ull * KEYS);
    return a->sequences < 65536 && a->heads + a->kv_heads < 65536 && tokens * a->heads * 4 < INDEX_MAX;
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
