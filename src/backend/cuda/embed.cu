/* embed.cu - rows of a table as bf16, and their gradients. Backward needs no scratch and no atomics: a block owns a few
 * rows of the vocabulary and some columns, looks through all tokens for those of its rows, sorts what it finds by row
 * (stable: tokens of a row stay in order) and adds. So a row's contributions are added in the order of tokens, whatever
 * the sizes of blocks. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/block.cuh"

namespace {

constexpr uint32_t EMBED_THREADS_MAX = 256;

/* WIDTH neighbours of a row: floats, and bf16 as they lie in memory. 16 bytes of bf16 are moved at once, or 2. */
template <int WIDTH>
struct columns {
    float at[WIDTH];
};
template <int WIDTH>
struct bf16_columns;
template <>
struct bf16_columns<8> {
    uint4 pairs;
};
template <>
struct bf16_columns<1> {
    __nv_bfloat16 value;
};

__device__ __forceinline__ columns<8> columns_load(const float *from, columns<8> *) {
    const float4 low = reinterpret_cast<const float4 *>(from)[0], high = reinterpret_cast<const float4 *>(from)[1];
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

__device__ __forceinline__ columns<1> columns_load(const float *from, columns<1> *) {
    return {{*from}};
}

__device__ __forceinline__ void columns_store(float *to, const columns<8> &from) {
    reinterpret_cast<float4 *>(to)[0] = make_float4(from.at[0], from.at[1], from.at[2], from.at[3]);
    reinterpret_cast<float4 *>(to)[1] = make_float4(from.at[4], from.at[5], from.at[6], from.at[7]);
}

__device__ __forceinline__ void columns_store(float *to, const columns<1> &from) {
    *to = from.at[0];
}

__device__ __forceinline__ bf16_columns<8> columns_round(const columns<8> &from) {
    return {make_uint4(qe_bf16_pair(from.at[0], from.at[1]), qe_bf16_pair(from.at[2], from.at[3]),
                       qe_bf16_pair(from.at[4], from.at[5]), qe_bf16_pair(from.at[6], from.at[7]))};
}

__device__ __forceinline__ bf16_columns<1> columns_round(const columns<1> &from) {
    return {__float2bfloat16_rn(from.at[0])};
}

__device__ __forceinline__ void columns_add(columns<8> &sum, const bf16_columns<8> &value) {
    const uint32_t pairs[4] = {value.pairs.x, value.pairs.y, value.pairs.z, value.pairs.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum.at[2 * i] += qe_bf16_low(pairs[i]);
        sum.at[2 * i + 1] += qe_bf16_high(pairs[i]);
    }
}

__device__ __forceinline__ void columns_add(columns<1> &sum, const bf16_columns<1> &value) {
    sum.at[0] += __bfloat162float(value.value);
}

/* A block per token; blocks in y where the row is wider than a block. */
template <int WIDTH>
__global__ void embed_rows(qe_args_embed args) {
    const uint32_t column = (blockIdx.y * blockDim.x + threadIdx.x) * WIDTH;
    if (column >= args.hidden) return;
    const size_t token = (size_t)args.tokens[blockIdx.x];
    const columns<WIDTH> value =
        columns_load(args.table + token * args.hidden + column, static_cast<columns<WIDTH> *>(nullptr));
    __nv_bfloat16 *y = static_cast<__nv_bfloat16 *>(args.y) + (size_t)blockIdx.x * args.hidden + column;
    *reinterpret_cast<bf16_columns<WIDTH> *>(y) = columns_round(value);
}

} // namespace

qe_status qe_cuda_embed(const qe_args_embed *args, cudaStream_t stream) {
    if (args->tokens_count == 0 || args->hidden == 0) return QE_OK;
    const int is_wide = args->hidden % 8 == 0 && is_aligned(args->table) && is_aligned(args->y);
    const uint64_t pieces = pieces_of(args->hidden, is_wide ? 8 : 1);
    const uint32_t threads = qe_cuda_threads(pieces, EMBED_THREADS_MAX);
    const dim3 blocks(args->tokens_count, pieces_of(pieces, threads));
    return launch(is_wide ? embed_rows<8> : embed_rows<1>, blocks, threads, 0, 0, stream, *args);
}

/* --- Backward --------------------------------------------------------------------------------------------------- */

namespace {

constexpr uint32_t BACK_THREADS = 128;
constexpr uint32_t BACK_WARPS = BACK_THREADS / QE_CUDA_WARP;
constexpr uint32_t BACK_ROUNDS = 8;                         /* tokens that a lane looks at in one go */
constexpr uint32_t BACK_CHUNK = BACK_THREADS * BACK_ROUNDS; /* tokens that are sorted together */
constexpr uint32_t BACK_ROWS_MAX = 32;                      /* rows of a block, a bit each in a word, one scan */
constexpr uint32_t BACK_BLOCKS_WANTED = 1056;               /* eight for each of 132 multiprocessors: else fewer rows */
constexpr uint32_t BACK_BATCH = 8;                          /* contributions that are on their way at once */

/* What a block found in one chunk, sorted by row. */
struct found_tokens {
    uint32_t counts[BACK_WARPS][BACK_ROWS_MAX]; /* then: where the next one of this warp and row goes */
    uint32_t first[BACK_ROWS_MAX + 1];          /* of each row in `offsets` */
    uint16_t offsets[BACK_CHUNK];               /* of tokens in the chunk */
};

/* Turns counts into places: rows one after the other, within a row warps one after the other. */
__device__ void places_of(found_tokens &found) {
    if (threadIdx.x < BACK_ROWS_MAX) {
        const uint32_t row = threadIdx.x;
        uint32_t total = 0;
        for (uint32_t warp = 0; warp < BACK_WARPS; ++warp) total += found.counts[warp][row];
        uint32_t through = total;
        for (uint32_t step = 1; step < QE_CUDA_WARP; step *= 2) {
            const uint32_t below = __shfl_up_sync(0xFFFFFFFFu, through, step);
            if (row >= step) through += below;
        }
        uint32_t place = through - total;
        found.first[row] = place;
        if (row + 1 == BACK_ROWS_MAX) found.first[BACK_ROWS_MAX] = through;
        for (uint32_t warp = 0; warp < BACK_WARPS; ++warp) {
            const uint32_t count = found.counts[warp][row];
            found.counts[warp][row] = place;
            place += count;
        }
    }
    __syncthreads();
}

/* Finds the chunk's tokens of rows [row_first, row_first + rows). Returns whether there is one. A warp looks at
 * BACK_ROUNDS * 32 neighbours, 32 at a time, so warp, round and lane are in the order of tokens. */
__device__ bool chunk_sort(found_tokens &found, const int32_t *tokens, uint32_t begin, uint32_t count,
                           uint32_t row_first, uint32_t rows) {
    const uint32_t warp = threadIdx.x / QE_CUDA_WARP, lane = threadIdx.x % QE_CUDA_WARP;
    uint32_t row[BACK_ROUNDS];
    bool any = false;
#pragma unroll
    for (uint32_t round = 0; round < BACK_ROUNDS; ++round) {
        const uint32_t at = begin + (warp * BACK_ROUNDS + round) * QE_CUDA_WARP + lane;
        row[round] = at < count ? (uint32_t)tokens[at] - row_first : UINT32_MAX;
        any |= row[round] < rows;
    }
    if (!__syncthreads_or(any)) return false;
    found.counts[warp][lane] = 0;
    __syncwarp();
    uint32_t rank[BACK_ROUNDS];
#pragma unroll
    for (uint32_t round = 0; round < BACK_ROUNDS; ++round) {
        const bool mine = row[round] < rows;
        const uint32_t same = __match_any_sync(0xFFFFFFFFu, mine ? row[round] : UINT32_MAX);
        const uint32_t before = same & ((1u << lane) - 1);
        rank[round] = mine ? found.counts[warp][row[round]] + __popc(before) : 0;
        __syncwarp();
        if (mine && before == 0) found.counts[warp][row[round]] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    places_of(found);
#pragma unroll
    for (uint32_t round = 0; round < BACK_ROUNDS; ++round)
        if (row[round] < rows)
            found.offsets[found.counts[warp][row[round]] + rank[round]] =
                (uint16_t)((warp * BACK_ROUNDS + round) * QE_CUDA_WARP + lane);
    __syncthreads();
    return true;
}

/* sum += dy of these tokens, one after the other; a batch of them is loaded ahead. */
template <int WIDTH>
__device__ __forceinline__ void tokens_add(columns<WIDTH> &sum, const __nv_bfloat16 *dy, uint32_t hidden,
                                           const uint16_t *offsets, uint32_t count) {
    for (uint32_t at = 0; at < count; at += BACK_BATCH) {
        bf16_columns<WIDTH> value[BACK_BATCH];
#pragma unroll
        for (uint32_t k = 0; k < BACK_BATCH; ++k)
            if (at + k < count)
                value[k] = *reinterpret_cast<const bf16_columns<WIDTH> *>(dy + (size_t)offsets[at + k] * hidden);
#pragma unroll
        for (uint32_t k = 0; k < BACK_BATCH; ++k)
            if (at + k < count) columns_add(sum, value[k]);
    }
}

/* Block x: rows; block y: columns. `set` rows start from zero at their first chunk, or at the end if there is none. */
template <int WIDTH>
__global__ void __launch_bounds__(BACK_THREADS) embed_gradients(qe_args_embed_backward args, uint32_t rows_of_block) {
    __shared__ found_tokens found;
    const uint32_t row_first = blockIdx.x * rows_of_block;
    const uint32_t rows = min(rows_of_block, args.vocab - row_first);
    const uint32_t column = (blockIdx.y * BACK_THREADS + threadIdx.x) * WIDTH;
    const bool is_inside = column < args.hidden;
    const __nv_bfloat16 *dy = static_cast<const __nv_bfloat16 *>(args.dy) + column;
    float *grad = args.grad + (size_t)row_first * args.hidden + column;
    uint32_t fresh = args.set ? UINT32_MAX : 0; /* a bit for each row that holds no sum yet */
    for (uint32_t begin = 0; begin < args.tokens_count; begin += BACK_CHUNK) {
        if (!chunk_sort(found, args.tokens, begin, args.tokens_count, row_first, rows)) continue;
        for (uint32_t row = 0; row < rows && is_inside; ++row) {
            const uint32_t first = found.first[row], count = found.first[row + 1] - first;
            if (count == 0) continue;
            columns<WIDTH> sum = {};
            if (!(fresh >> row & 1)) sum = columns_load(grad + (size_t)row * args.hidden, &sum);
            fresh &= ~(1u << row);
            tokens_add(sum, dy + (size_t)begin * args.hidden, args.hidden, found.offsets + first, count);
            columns_store(grad + (size_t)row * args.hidden, sum);
        }
        __syncthreads(); /* the next chunk uses the same memory */
    }
    for (uint32_t row = 0; row < rows && is_inside; ++row)
        if (fresh >> row & 1) columns_store(grad + (size_t)row * args.hidden, columns<WIDTH>{});
}

} // namespace

qe_status qe_cuda_embed_backward(const qe_args_embed_backward *args, cudaStream_t stream) {
    if (args->hidden == 0 || args->vocab == 0) return QE_OK;
    const int is_wide = args->hidden % 8 == 0 && is_aligned(args->dy) && is_aligned(args->grad);
    const uint64_t slices = pieces_of(args->hidden, (is_wide ? 8u : 1u) * BACK_THREADS);
    const uint64_t most = (uint64_t)args->vocab * slices / BACK_BLOCKS_WANTED;
    const uint32_t rows = most < 1 ? 1 : most < BACK_ROWS_MAX ? (uint32_t)most : BACK_ROWS_MAX;
    const dim3 blocks(pieces_of(args->vocab, rows), (uint32_t)slices);
    return launch(is_wide ? embed_gradients<8> : embed_gradients<1>, blocks, BACK_THREADS, 0, 0, stream, *args,
                  rows);
}
