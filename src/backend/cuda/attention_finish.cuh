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
    METHOD eight_words(uint4 first, uint4 second) : low(first), high(second) {}
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

/* A thread has four rows of eight columns of a head's lower half and the eight that turn with them; a warp 32 rows of
 * 32 columns and as many; a block 64 rows. Rows of codes and columns of them are then written in pieces of 32 bytes. */
template <uint32_t DIM>
struct codes_shape {
    static constexpr uint32_t THREADS = 128, BLOCKS = 5; /* of a multiprocessor */
    static constexpr uint32_t ACROSS = 4, BELOW = WARP / ACROSS, TALL = BELOW * 4, SIDE = DIM / 2 / (ACROSS * 8);
    static constexpr uint32_t HEADS = THREADS / WARP / (ROWS / TALL) / SIDE;
};

/* What a thread does: of a head, from a token on, which is a row of sequence s. */
struct codes_place {
    uint32_t head, token, s, row, column, across, below;
    template <uint32_t DIM>
    METHOD static codes_place of(const shape &o) {
        typedef codes_shape<DIM> shape;
        const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        codes_place at;
        at.across = lane % shape::ACROSS, at.below = lane / shape::ACROSS;
        at.head = blockIdx.x * shape::HEADS + warp / (ROWS / shape::TALL) / shape::SIDE;
        at.token = blockIdx.y * ROWS + warp / shape::SIDE % (ROWS / shape::TALL) * shape::TALL + at.below * 4;
        at.column = (warp % shape::SIDE * shape::ACROSS + at.across) * 8;
        at.s = at.token / o.sequence, at.row = at.token % o.sequence;
        return at;
    }
};

/* A warp's sums, lower and upper half, as they come: lines of four rows of eight. A thread has a line, and a warp's
 * threads read theirs side by side: a poor order for loads from memory. The sixteen bytes of a line stand where no two
 * that are read together meet in a bank. */
struct warp_sums {
    uint8_t lines[2][WARP][128];
    METHOD void *at(uint32_t half, uint32_t line, uint32_t chunk) {
        return &lines[half][line][(chunk ^ line % 8) * 16];
    }
    METHOD eight_words row(uint32_t half, uint32_t line, uint32_t i) {
        return eight_words(*static_cast<const uint4 *>(at(half, line, 2 * i)),
                           *static_cast<const uint4 *>(at(half, line, 2 * i + 1)));
    }
};

/* Begins to bring a warp's sums. place: of a thread; sequences are whole eights, of which a warp has four. */
template <uint32_t DIM>
DEVICE void sums_fetch(const gradients_job &j, warp_sums &to, const codes_place &place) {
    const shape &of = j.of;
    const uint32_t lane = threadIdx.x % WARP, token = place.token - place.below * 4;
    const uint32_t column = place.column - place.across * 8;
    uint32_t s = token / of.sequence, row = token % of.sequence;
#pragma unroll
    for (uint32_t eight = 0; eight < 4; ++eight) {
        if (s >= of.sequences) return;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) { /* two squares, 512 bytes */
            const uint32_t half = i / 2, at = column + half * (DIM / 2), line = eight * 8 + i % 2 * 4 + lane / 8;
            const int32_t *from = j.sums + of.sums_at(s, place.head, row / ROWS, DIM) + at / 64 * TILE_WORDS +
                                  square_at(row % ROWS, at % 64) + i % 2 * 128 + lane * 4;
            copy_ahead(to.at(half, line, lane % 8), from);
        }
        row += 8;
        if (row == of.sequence) row = 0, ++s;
    }
}

/* One row of a thread's, lower and upper half, as bf16. */
struct row_halves {
    uint4 lower, upper;
};

/* A thread's rows of queries, out of shared memory. */
struct query_rows {
    warp_sums &sums;
    uint32_t line;
    float by[4];
    METHOD query_rows(const gradients_job &j, warp_sums &from, const codes_place &place)
        : sums(from), line(place.below / 2 * 8 + place.across * 2 + place.below % 2) {
        const shape &of = j.of;
        const uint32_t stats = of.stats_at(place.s, place.head, place.row / ROWS);
        const float *norms = j.stats + stats + STAT_NORM + place.row % ROWS;
        const float peak = j.peak[of.peak_at(place.s, place.head / (of.heads / of.kv_heads))];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) by[i] = mul(sum_unscale(norms[i], peak), j.scale);
    }
    METHOD row_halves operator()(uint32_t i) const {
        return row_halves{query_gradients(sums.row(0, line, i), by[i]), query_gradients(sums.row(1, line, i), by[i])};
    }
};

/* Of keys or values, as bf16 from memory. */
template <uint32_t DIM>
struct key_rows {
    uint4 lower[4], upper[4];
    METHOD key_rows(const gradients_job &j, const codes_place &place) {
        const uint16_t *from =
            j.dqkv + static_cast<uint64_t>(place.token) * j.of.row + place.head * DIM + place.column;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            lower[i] = load_once(from + static_cast<uint64_t>(i) * j.of.row);
            upper[i] = load_once(from + static_cast<uint64_t>(i) * j.of.row + DIM / 2);
        }
    }
    METHOD row_halves operator()(uint32_t i) const { return row_halves{lower[i], upper[i]}; }
};

/* The same where parts are to be added. */
template <uint32_t DIM>
struct part_rows {
    const gradients_job &j;
    const codes_place &place;
    finish_head of_head;
    METHOD part_rows(const gradients_job &job, const codes_place &at, const finish_head &head)
        : j(job), place(at), of_head(head) {}
    METHOD row_halves operator()(uint32_t i) const {
        row_halves v;
        keys_finish<DIM, 1>(j, place.s, of_head, place.row + i, place.column, &v.lower);
        keys_finish<DIM, 1>(j, place.s, of_head, place.row + i, place.column + DIM / 2, &v.upper);
        return v;
    }
};

template <int FORMAT>
DEVICE float row_encode(const code_planes &planes, uint32_t token, uint32_t column, const float *v, float scale,
                        float amax, uint32_t *two) {
    two[0] = encode4<FORMAT>(v, scale);
    two[1] = encode4<FORMAT>(v + 4, scale);
    if (planes.by_rows) store_row_codes(planes, token, column, two);
    return amax_of8(amax, v);
}

/* A thread's rows. Returns the amax. */
template <int FORMAT, uint32_t DIM, typename Rows>
DEVICE float rows_finish(const finish_codes_job &j, const codes_place &place, const Rows &rows, bool is_turned,
                         float scale) {
    const uint32_t lower_column = place.head * DIM + place.column, upper_column = lower_column + DIM / 2;
    uint32_t two[2][4][2];
    float amax = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        float lower[8], upper[8];
        const row_halves raw = rows(i);
        unpack8(raw.lower, lower);
        unpack8(raw.upper, upper);
        const uint32_t table = (place.row + i) * (DIM / 2) + place.column;
        if (is_turned) rope_apply(rope_back(rope_turn_of(j.cosine + table, j.sine + table)), lower, upper);
        amax = row_encode<FORMAT>(j.planes, place.token + i, lower_column, lower, scale, amax, two[0][i]);
        amax = row_encode<FORMAT>(j.planes, place.token + i, upper_column, upper, scale, amax, two[1][i]);
    }
    if (j.planes.by_columns == nullptr) return amax;
    column_codes<4> codes[2];
    codes[0].put(0, two[0]);
    codes[1].put(0, two[1]);
    codes[0].store(j.planes, place.token, lower_column);
    codes[1].store(j.planes, place.token, upper_column);
    return amax;
}

/* Blocks: heads, then 64 tokens each. Requires: sequences are whole eights. Shared: a warp_sums of each warp. */
template <int FORMAT, uint32_t DIM>
__global__ void __launch_bounds__(codes_shape<DIM>::THREADS, codes_shape<DIM>::BLOCKS)
    finish_codes(const __grid_constant__ finish_codes_job j) {
    extern __shared__ __align__(128) uint8_t codes_raw[];
    const gradients_job &of = j.sums;
    const codes_place place = codes_place::of<DIM>(of.of);
    const bool inside = place.head < of.of.heads + 2 * of.of.kv_heads && place.token < j.planes.rows;
    const float scale = scale_of(j.scale);
    const int32_t seen = j.scale.amax ? load_shared_word(j.scale.amax) : 0;
    float amax = 0.0f;
    if (place.head < of.of.heads) { /* the same for a warp */
        warp_sums &sums = reinterpret_cast<warp_sums *>(codes_raw)[threadIdx.x / WARP];
        sums_fetch<DIM>(of, sums, place);
        copies_wait();
        __syncwarp();
        if (inside) amax = rows_finish<FORMAT, DIM>(j, place, query_rows(of, sums, place), true, scale);
    } else if (inside) {
        const finish_head of_head(of.of, place.head);
        const bool turns = of_head.which == 0;
        amax = of.of.parts > 1
                   ? rows_finish<FORMAT, DIM>(j, place, part_rows<DIM>(of, place, of_head), turns, scale)
                   : rows_finish<FORMAT, DIM>(j, place, key_rows<DIM>(of, place), turns, scale);
    }
    record_amax(j.scale.amax, amax, seen);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) write_words(j.words, scale);
}

} // namespace attention

#endif
