/* attention_finish.cuh - the last kernel of attention's backward. Sums are taken apart, scaled and rounded to bf16;
 * then they are stored as dqkv (`finish`), or rotated back and quantized both ways as rope's backward does it
 * (`finish_codes`), so that no gradient of a query, and of keys and values only where no parts are to be added, goes
 * through memory as bf16. Both have the same bits. */
#ifndef QE_CUDA_ATTENTION_FINISH_CUH
#define QE_CUDA_ATTENTION_FINISH_CUH

#include "backend/cuda/attention_own.cuh"
#include "backend/cuda/tile.cuh"

namespace attention {

struct gradients_job {
    const int32_t *sums;
    const float *parts, *stats, *peak; /* peak: of each sequence and head of keys */
    uint16_t *dqkv; /* of keys and values an input where nothing is in parts */
    shape of;
    float scale;
};

/* Eight neighbours of a row of a square. */
struct eight_words {
    uint4 low, high;
    METHOD explicit eight_words(const void *at)
        : low(*static_cast<const uint4 *>(at)), high(*(static_cast<const uint4 *>(at) + 1)) {}
};

/* Of a row of queries' sums. */
DEVICE uint4 query_gradients(const eight_words &sums, float unscale) {
    const uint32_t words[] = {sums.low.x,  sums.low.y,  sums.low.z,  sums.low.w,
                              sums.high.x, sums.high.y, sums.high.z, sums.high.w};
    float v[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; i += 2) {
        const int32_t low = static_cast<int32_t>(words[i]);
        v[i] = mul(__int2float_rn(low), unscale);
        v[i + 1] = mul(__int2float_rn(upper_of(low, static_cast<int32_t>(words[i + 1]))), unscale);
    }
    return pack8(v);
}

/* Parts are added in their order, from zero on. */
DEVICE void part_add(const eight_words &part, float *v) {
    const uint32_t words[] = {part.low.x,  part.low.y,  part.low.z,  part.low.w,
                              part.high.x, part.high.y, part.high.z, part.high.w};
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) v[i] = add(v[i], float_of(words[i]));
}
DEVICE uint4 key_gradients(float *v, float scale) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) v[i] = mul(v[i], scale);
    return pack8(v);
}

/* Of one head of q, k or v: which, and the number of its keys. `head` counts through a row of dqkv. */
struct finish_head {
    uint32_t which, kv_head; /* 0: keys, 1: values; 2: queries */
    METHOD finish_head(const shape &of, uint32_t head) {
        const uint32_t behind = head - of.heads;
        which = head < of.heads ? 2 : behind / of.kv_heads;
        kv_head = head < of.heads ? head / (of.heads / of.kv_heads) : behind % of.kv_heads;
    }
};

/* COUNT rows from `row` of sequence s on, one square's at most, of eight columns from `column` of a head on. */
template <uint32_t DIM, uint32_t COUNT>
DEVICE void queries_finish(const gradients_job &j, uint32_t s, uint32_t head, uint32_t kv_head, uint32_t row,
                           uint32_t column, uint4 *gradients_out) {
    const shape &of = j.of;
    const uint32_t group = row / ROWS;
    const int32_t *from = j.sums + of.sums_at(s, head, group, DIM) + column / 64 * TILE_WORDS +
                          square_at(row % ROWS, column % 64);
    const float *norms = j.stats + of.stats_at(s, head, group) + STAT_NORM + row % ROWS;
    const float peak = j.peak[of.peak_at(s, kv_head)];
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i)
        gradients_out[i] = query_gradients(eight_words(from + 8 * i), mul(sum_unscale(norms[i], peak), j.scale));
}

template <uint32_t DIM, uint32_t COUNT>
DEVICE void keys_finish(const gradients_job &j, uint32_t s, const finish_head &of_head, uint32_t row, uint32_t column,
                        uint4 *gradients_out) {
    const shape &of = j.of;
    float v[COUNT][8] = {};
    for (uint32_t split = 0; split < of.parts; ++split) {
        const float *from = j.parts +
                            of.part_at(split, s, of_head.kv_head, row / KEYS, of_head.which, row / ROWS % 2, DIM) +
                            column / 64 * TILE_WORDS + square_at(row % ROWS, column % 64);
#pragma unroll
        for (uint32_t i = 0; i < COUNT; ++i) part_add(eight_words(from + 8 * i), v[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) gradients_out[i] = key_gradients(v[i], of_head.which == 0 ? j.scale : 1.0f);
}

/* --- bf16 -------------------------------------------------------------------------------------------------------- */

constexpr uint32_t FINISH_THREADS = 256, FINISH_ROWS = 2; /* rows of a thread, eight columns each */

/* Blocks: groups of 64 tokens, then heads of q and, where they are in parts, of k and v, then sequences. */
template <uint32_t DIM>
__global__ void __launch_bounds__(FINISH_THREADS) finish(const __grid_constant__ gradients_job j) {
    constexpr uint32_t ACROSS = DIM / 8;
    const shape &of = j.of;
    const uint32_t head = blockIdx.y, s = blockIdx.z, column = threadIdx.x % ACROSS * 8;
    const finish_head of_head(of, head);
    uint16_t *const to = j.dqkv + static_cast<uint64_t>(s) * of.sequence * of.row + head * DIM + column;
    for (uint32_t r = threadIdx.x / ACROSS * FINISH_ROWS; r < ROWS; r += FINISH_THREADS / ACROSS * FINISH_ROWS) {
        const uint32_t row = blockIdx.x * ROWS + r;
        uint4 gradients[FINISH_ROWS];
        if (of_head.which == 2)
            queries_finish<DIM, FINISH_ROWS>(j, s, head, of_head.kv_head, row, column, gradients);
        else
            keys_finish<DIM, FINISH_ROWS>(j, s, of_head, row, column, gradients);
#pragma unroll
        for (uint32_t i = 0; i < FINISH_ROWS; ++i)
            if (row + i < of.sequence)
                *reinterpret_cast<uint4 *>(to + static_cast<uint64_t>(row + i) * of.row) = gradients[i];
    }
}

/* --- codes ------------------------------------------------------------------------------------------------------- */

struct finish_codes_job {
    gradients_job sums;
    const float *cosine, *sine; /* [sequence, DIM / 2] */
    code_planes planes;
    scaling scale;
    tensor_words words;
};

/* A thread has eight rows of eight columns of a head's lower half and the eight that turn with them; a warp one head; a
 * block 64 tokens of some heads, which share the tables. */
template <uint32_t DIM>
struct codes_shape {
    static constexpr uint32_t ACROSS = DIM / 16, BELOW = WARP / ACROSS, TALL = BELOW * 8;
    static constexpr uint32_t WARPS = FINISH_THREADS / WARP, HEADS = WARPS / (ROWS / TALL);
};

/* Four rows of gradients, lower and upper half, as bf16. */
template <uint32_t DIM>
DEVICE void gradients_load(const gradients_job &j, const finish_head &of_head, uint32_t s, uint32_t head, uint32_t row,
                           uint32_t column, uint4 (&lower)[4], uint4 (&upper)[4]) {
    if (of_head.which == 2) {
        queries_finish<DIM, 4>(j, s, head, of_head.kv_head, row, column, lower);
        queries_finish<DIM, 4>(j, s, head, of_head.kv_head, row, column + DIM / 2, upper);
    } else if (j.of.parts > 1) {
        keys_finish<DIM, 4>(j, s, of_head, row, column, lower);
        keys_finish<DIM, 4>(j, s, of_head, row, column + DIM / 2, upper);
    } else {
        const uint64_t token = static_cast<uint64_t>(s) * j.of.sequence + row;
        const uint16_t *from = j.dqkv + token * j.of.row + head * DIM + column;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            lower[i] = load_once(from + static_cast<uint64_t>(i) * j.of.row);
            upper[i] = load_once(from + static_cast<uint64_t>(i) * j.of.row + DIM / 2);
        }
    }
}

template <int FORMAT>
DEVICE float row_encode(const code_planes &planes, uint32_t token, uint32_t column, const float *v, float scale,
                        float amax, uint32_t *two) {
    two[0] = encode4<FORMAT>(v, scale);
    two[1] = encode4<FORMAT>(v + 4, scale);
    if (planes.by_rows) store_row_codes(planes, token, column, two);
    return amax_of8(amax, v);
}

/* Eight rows of one head. Returns the amax. */
template <int FORMAT, uint32_t DIM>
DEVICE float rows_finish(const finish_codes_job &j, uint32_t head, uint32_t token, uint32_t column, float scale) {
    const uint32_t s = token / j.sums.of.sequence, row = token % j.sums.of.sequence;
    const finish_head of_head(j.sums.of, head);
    column_codes<8> codes[2];
    float amax = 0.0f;
#pragma unroll
    for (uint32_t four = 0; four < 2; ++four) {
        uint4 raw[2][4];
        uint32_t two[2][4][2];
        gradients_load<DIM>(j.sums, of_head, s, head, row + 4 * four, column, raw[0], raw[1]);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            float lower[8], upper[8];
            const uint32_t at = 4 * four + i;
            unpack8(raw[0][i], lower);
            unpack8(raw[1][i], upper);
            const uint64_t table = static_cast<uint64_t>(row + at) * (DIM / 2) + column;
            if (of_head.which != 1) rope_apply(rope_back(rope_turn_of(j.cosine + table, j.sine + table)), lower, upper);
            amax = row_encode<FORMAT>(j.planes, token + at, head * DIM + column, lower, scale, amax, two[0][i]);
            amax = row_encode<FORMAT>(j.planes, token + at, head * DIM + DIM / 2 + column, upper, scale, amax,
                                      two[1][i]);
        }
        codes[0].put(four, two[0]);
        codes[1].put(four, two[1]);
    }
    if (j.planes.by_columns == nullptr) return amax;
    codes[0].store(j.planes, token, head * DIM + column);
    codes[1].store(j.planes, token, head * DIM + DIM / 2 + column);
    return amax;
}

/* Blocks: heads, then 64 tokens each. Requires: sequences are whole eights. */
template <int FORMAT, uint32_t DIM>
__global__ void __launch_bounds__(FINISH_THREADS, 2) finish_codes(const __grid_constant__ finish_codes_job j) {
    typedef codes_shape<DIM> shape;
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint32_t head = blockIdx.x * shape::HEADS + warp % shape::HEADS;
    const uint32_t token = blockIdx.y * ROWS + warp / shape::HEADS * shape::TALL + lane / shape::ACROSS * 8;
    const float scale = scale_of(j.scale);
    const int32_t seen = j.scale.amax ? load_shared_word(j.scale.amax) : 0;
    const bool inside = head < j.sums.of.heads + 2 * j.sums.of.kv_heads && token < j.planes.rows;
    float amax = 0.0f;
    if (inside) amax = rows_finish<FORMAT, DIM>(j, head, token, lane % shape::ACROSS * 8, scale);
    record_amax(j.scale.amax, amax, seen);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) write_words(j.words, scale);
}

} // namespace attention

#endif
