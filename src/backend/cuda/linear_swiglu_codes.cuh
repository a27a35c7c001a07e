/* linear_swiglu_codes.cuh - from bf16 gate and up in shared memory to swiglu's codes by rows and transposed: what a
 * warp does with a square of 64 columns. Plain C++ over device.cuh, lane by lane, so tests/cuda/emulated can run it. */
#ifndef QE_CUDA_LINEAR_SWIGLU_CODES_CUH
#define QE_CUDA_LINEAR_SWIGLU_CODES_CUH

#include "backend/cuda/tile.cuh"

namespace linear_swiglu {

/* 64 rows of 64 bf16: rows of 128 bytes in the copy engine's 128-byte swizzle. */
constexpr uint32_t BOX_COLUMNS = 64, BOX_ROW_BYTES = 128, BOX_BYTES = 8192;

/* One lane's part of 16 GROUPS rows: 4 GROUPS rows of eight columns. Two lanes stand side by side, four below each
 * other, then come the next two: so of the transposed plane, whole sectors of 32 bytes are stored. Lanes that stand
 * lower go through their rows in another order, so that no two of the eight that read together meet in a bank. */
template <uint32_t GROUPS>
struct lane_codes {
    static constexpr uint32_t ROWS = 4 * GROUPS;
    uint32_t words[8][GROUPS]; /* four rows of a column each, in the order that this lane had them */
    uint32_t across, below;

    METHOD explicit lane_codes(uint32_t lane) : across(lane % 2 + lane / 8 * 2), below(lane / 2 % 4) {}

    /* Rows change places by an exclusive or: within a group of four (2), and groups among each other (4). */
    METHOD uint32_t turned(uint32_t i) const {
        return i ^ 2 * below;
    }
    METHOD bool turns_within() const {
        return (below & 1) != 0;
    }
    METHOD bool turns_groups() const {
        return (below & 2) != 0;
    }

    /* Of this lane's row number i: where its eight columns are in a box. */
    METHOD uint32_t place(uint32_t i) const {
        const uint32_t r = below * ROWS + turned(i);
        return r * BOX_ROW_BYTES + ((across ^ (r & 7)) << 4);
    }
    METHOD swiglu_source::raw load(const uint8_t *gate, uint32_t i) const {
        const uint32_t at = place(i);
        return swiglu_source::raw{*reinterpret_cast<const uint4 *>(gate + at),
                                  *reinterpret_cast<const uint4 *>(gate + BOX_BYTES + at)};
    }

    METHOD void put(uint32_t group, const uint32_t (*four)[2]) {
        const uint32_t first = turns_within() ? 0x1054 : 0x5410, second = turns_within() ? 0x3276 : 0x7632;
#pragma unroll
        for (uint32_t k = 0; k < 2; ++k) {
            const uint32_t ab_low = bytes_of(four[0][k], four[1][k], 0x5140);
            const uint32_t ab_high = bytes_of(four[0][k], four[1][k], 0x7362);
            const uint32_t cd_low = bytes_of(four[2][k], four[3][k], 0x5140);
            const uint32_t cd_high = bytes_of(four[2][k], four[3][k], 0x7362);
            words[4 * k][group] = bytes_of(ab_low, cd_low, first);
            words[4 * k + 1][group] = bytes_of(ab_low, cd_low, second);
            words[4 * k + 2][group] = bytes_of(ab_high, cd_high, first);
            words[4 * k + 3][group] = bytes_of(ab_high, cd_high, second);
        }
    }

    /* gate, and up behind it: the boxes from the first of these rows on. row, column: of the planes, where the square
     * begins. Stores codes by rows; returns the amax. */
    METHOD float make(const code_planes &planes, const uint8_t *gate, uint32_t row, uint32_t column, float scale,
                      float amax) {
        const swiglu_source source = {};
#pragma unroll
        for (uint32_t group = 0; group < GROUPS; ++group) {
            swiglu_source::raw raw[4];
            uint32_t four[4][2];
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) raw[i] = load(gate, group * 4 + i);
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                float v[1][8];
                source.values(no_constant(), raw[i], 0, 0, v);
                amax = amax_of8(amax, v[0]);
                four[i][0] = encode4<QE_FORMAT_E4M3>(v[0], scale);
                four[i][1] = encode4<QE_FORMAT_E4M3>(v[0] + 4, scale);
                if (planes.by_rows)
                    store_row_codes<true>(planes, row + below * ROWS + turned(group * 4 + i), column + across * 8,
                                          four[i]);
            }
            put(group, four);
        }
        return amax;
    }

    /* The transposed plane. */
    METHOD void store(const code_planes &planes, uint32_t row, uint32_t column) const {
        if (planes.by_columns == nullptr) return;
        const bool turns = turns_groups();
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
            uint8_t *at = planes.by_columns + static_cast<size_t>(column + across * 8 + i) * planes.rows + row +
                          below * ROWS;
            const uint2 low = turns ? make_uint2(words[i][1], words[i][0]) : make_uint2(words[i][0], words[i][1]);
            if constexpr (GROUPS == 4) {
                const uint2 high = turns ? make_uint2(words[i][3], words[i][2]) : make_uint2(words[i][2], words[i][3]);
                store_late(at, make_uint4(low.x, low.y, high.x, high.y));
            } else {
                store_late(at, low);
            }
        }
    }
};

} // namespace linear_swiglu

#endif
