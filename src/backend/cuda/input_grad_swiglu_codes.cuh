/* input_grad_swiglu_codes.cuh - from bf16 gate, up and gradient in shared memory to codes of the gradients of gate and
 * up, by rows and transposed: what a warp does with 32 rows of 64 columns, 16 rows at a time. Plain C++ over
 * device.cuh, lane by lane, so tests/cuda/emulated can run it. */
#ifndef QE_CUDA_INPUT_GRAD_SWIGLU_CODES_CUH
#define QE_CUDA_INPUT_GRAD_SWIGLU_CODES_CUH

#include "backend/cuda/tile.cuh"

namespace input_grad_swiglu {

constexpr uint32_t STRIP = 64, UNIT_ROWS = 32, SUB_ROWS = 16; /* columns, rows of them, that are read at a time */
constexpr uint32_t ROW_BYTES = STRIP * 2;                     /* rows lie in the copy engine's 128-byte swizzle */
constexpr uint32_t RAW_BYTES = 2 * SUB_ROWS * ROW_BYTES;      /* gate, then up */
constexpr uint32_t BOX_BYTES = UNIT_ROWS * STRIP, CODES_BYTES = 2 * BOX_BYTES; /* codes of gate, then of up, by rows */

/* A lane makes codes of eight columns of every fourth row, which wait in shared memory, row by row; then it turns four
 * columns of sixteen rows. What lanes read or write together does not meet in a bank. */
template <int FORMAT>
struct lane_codes {
    uint8_t *codes; /* [2][UNIT_ROWS][STRIP] of this warp */
    uint32_t lane;

    METHOD lane_codes(uint32_t lane_, uint8_t *codes_) : codes(codes_), lane(lane_) {}

    /* raw: gate and up, dy: the gradient, of sixteen rows: those from slot * SUB_ROWS on. Returns the amax. */
    METHOD float make(const uint8_t *raw, const uint8_t *dy, uint32_t slot, float scale, float amax) const {
        const swiglu_backward_source source = {};
        const uint32_t chunk = lane % 8, first = lane / 8;
        const uint32_t even = first * ROW_BYTES + ((chunk ^ first) << 4), odd = even ^ 64;
        uint8_t *to = codes + (slot * SUB_ROWS + first) * STRIP + chunk * 8;
#pragma unroll
        for (uint32_t i = 0; i < SUB_ROWS / 4; ++i) {
            float v[2][8];
            const uint32_t at = (i % 2 ? odd : even) + i * 4 * ROW_BYTES;
            const swiglu_backward_source::raw r = {*reinterpret_cast<const uint4 *>(raw + at),
                                                   *reinterpret_cast<const uint4 *>(raw + RAW_BYTES / 2 + at),
                                                   *reinterpret_cast<const uint4 *>(dy + at)};
            source.values(no_constant(), r, 0, 0, v);
#pragma unroll
            for (uint32_t output = 0; output < 2; ++output) {
                amax = amax_of8(amax, v[output]);
                *reinterpret_cast<uint2 *>(to + output * BOX_BYTES + i * 4 * STRIP) =
                    make_uint2(encode4<FORMAT>(v[output], scale), encode4<FORMAT>(v[output] + 4, scale));
            }
        }
        return amax;
    }

    /* Four words of column k of four: its sixteen rows. Lanes of the lower half read neighbouring rows in the other
     * order. */
    METHOD void turn(uint32_t output, uint32_t (&columns)[4][4]) const {
        const uint32_t half = lane / 16;
        const uint32_t low = half ? 0x1504 : 0x5140, high = half ? 0x3726 : 0x7362;
        const uint8_t *from = codes + output * BOX_BYTES + half * 16 * STRIP + lane % 16 * 4;
        const uint8_t *even = from + half * STRIP, *odd = from - half * STRIP;
#pragma unroll
        for (uint32_t group = 0; group < 4; ++group) {
            uint32_t rows[4];
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i)
                rows[i] = *reinterpret_cast<const uint32_t *>((i % 2 ? odd : even) + (group * 4 + i) * STRIP);
            const uint32_t ab_low = bytes_of(rows[0], rows[1], low), ab_high = bytes_of(rows[0], rows[1], high);
            const uint32_t cd_low = bytes_of(rows[2], rows[3], low), cd_high = bytes_of(rows[2], rows[3], high);
            columns[0][group] = bytes_of(ab_low, cd_low, 0x5410);
            columns[1][group] = bytes_of(ab_low, cd_low, 0x7632);
            columns[2][group] = bytes_of(ab_high, cd_high, 0x5410);
            columns[3][group] = bytes_of(ab_high, cd_high, 0x7632);
        }
    }

    /* The transposed codes of the unit at `row`, `column`, once all lanes have made theirs. */
    METHOD void store(const code_planes &planes, uint64_t units, uint32_t row, uint32_t column) const {
        const uint64_t tall = planes.rows;
        uint8_t *to = planes.by_columns + (column + lane % 16 * 4) * tall + row + lane / 16 * 16;
#pragma unroll
        for (uint32_t output = 0; output < 2; ++output) {
            uint32_t columns[4][4];
            turn(output, columns);
#pragma unroll
            for (uint32_t k = 0; k < 4; ++k)
                store_late(to + (k + output * units) * tall,
                           make_uint4(columns[k][0], columns[k][1], columns[k][2], columns[k][3]));
        }
    }
};

} // namespace input_grad_swiglu

#endif
