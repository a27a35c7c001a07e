/* linear_swiglu_codes.cuh - from gate and up, as a warp has them in registers behind a product, to swiglu's codes by
 * rows and transposed in shared memory. Plain C++ over device.cuh, so tests/cuda/emulated can run it. */
#ifndef QE_CUDA_LINEAR_SWIGLU_CODES_CUH
#define QE_CUDA_LINEAR_SWIGLU_CODES_CUH

#include "backend/cuda/tile.cuh"

namespace linear_swiglu {

constexpr uint32_t COLUMNS = 80;   /* of gate, and of up, of a tile */
constexpr uint32_t HALF_ROWS = 64; /* that are made at a time: four warps have 16 each */

/* Codes of half a tile: by rows, and transposed as the copy engine's 64-byte swizzle has them. */
constexpr uint32_t CODES_BYTES = HALF_ROWS * COLUMNS;

/* A lane's place in a product's sums: of every eight columns it has two, `pair` and the next, in two rows, `row` and
 * the eighth below. */
struct lane_of_sums {
    uint32_t warp, row, pair;
    METHOD lane_of_sums(uint32_t warp_, uint32_t lane) : warp(warp_), row(lane / 4), pair(lane % 4) {}
};

/* What a lane has of sixteen columns: gate and up as bf16 pairs; first columns 2 pair and the next, rows `row` and
 * row + 8, then the same eight columns on. */
struct quad {
    uint32_t gate[4], up[4];
};

DEVICE uint32_t exchanged(uint32_t word, int mask) {
    return bits_of(shuffle_xor(float_of(word), mask));
}

/* upper, lower: codes of row `row` and of the eighth below, of two columns and of the two eight columns on. Four lanes
 * whose rows follow one another change what they have, so that each has four rows of two columns, eight apart:
 * words_out. All lanes of a warp call it. */
DEVICE void codes_turn(const lane_of_sums &lane, uint32_t upper, uint32_t lower, uint32_t *words_out) {
    const bool is_odd = lane.row & 1, is_high = lane.row & 2;
    /* Rows with the next one: even lanes of the upper eight, odd ones of the lower. */
    const uint32_t kept = is_odd ? lower : upper, got = exchanged(is_odd ? upper : lower, 4);
    const uint32_t first = is_odd ? got : kept, second = is_odd ? kept : got;
    const uint32_t near = bytes_of(first, second, 0x5140), far = bytes_of(first, second, 0x7362);
    /* Two rows with the next two: of the first column of each pair, or of the second. */
    const uint32_t left = bytes_of(near, far, 0x5410), right = bytes_of(near, far, 0x7632);
    const uint32_t own = is_high ? right : left, other = exchanged(is_high ? left : right, 8);
    words_out[0] = bytes_of(is_high ? other : own, is_high ? own : other, 0x5410);
    words_out[1] = bytes_of(is_high ? other : own, is_high ? own : other, 0x7632);
}

/* Where codes_turn's first word goes; the second one eight columns on. No two lanes of a warp meet in a bank. */
DEVICE uint32_t turned_place(const lane_of_sums &lane, uint32_t column) {
    const uint32_t own = column + 2 * lane.pair + (lane.row >> 1 & 1);
    return own * HALF_ROWS + ((lane.warp ^ lane.pair) << 4) + 8 * (lane.row & 1) + 4 * (lane.row >> 2);
}

/* Of row `row` of a quad, or of the eighth below. */
template <bool IS_CUT>
DEVICE void row_make(const quad &of, uint32_t below, float *v) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t gate = of.gate[2 * i + below], up = of.up[2 * i + below];
        v[2 * i] = swiglu<IS_CUT>(low_bf16(gate), low_bf16(up));
        v[2 * i + 1] = swiglu<IS_CUT>(high_bf16(gate), high_bf16(up));
    }
}

/* Sixteen columns from `column` on. is_inside: they are columns of the result. Returns the amax. Exponents are cut only
 * where a gate is large. */
DEVICE float codes_make(const lane_of_sums &lane, const quad &of, uint32_t column, bool is_inside, float scale,
                        float amax, uint8_t *by_rows, uint8_t *turned) {
    uint32_t codes[2], words[2];
    float values[2][4];
    if (is_moderate(largest_bf16_pair(make_uint4(of.gate[0], of.gate[1], of.gate[2], of.gate[3]))))
        row_make<false>(of, 0, values[0]), row_make<false>(of, 1, values[1]);
    else
        row_make<true>(of, 0, values[0]), row_make<true>(of, 1, values[1]);
#pragma unroll
    for (uint32_t below = 0; below < 2; ++below) {
        const float *v = values[below];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i)
            if (is_inside) amax = larger(amax, magnitude(v[i]));
        codes[below] = encode4<QE_FORMAT_E4M3>(v, scale);
        uint8_t *at = by_rows + (lane.warp * 16 + lane.row + below * 8) * COLUMNS + column + 2 * lane.pair;
        *reinterpret_cast<uint16_t *>(at) = static_cast<uint16_t>(codes[below]);
        *reinterpret_cast<uint16_t *>(at + 8) = static_cast<uint16_t>(codes[below] >> 16);
    }
    codes_turn(lane, codes[0], codes[1], words);
    *reinterpret_cast<uint32_t *>(turned + turned_place(lane, column)) = words[0];
    *reinterpret_cast<uint32_t *>(turned + turned_place(lane, column + 8)) = words[1];
    return amax;
}

} // namespace linear_swiglu

#endif
