/* check_squares.cpp - what a warp makes of a square of gate and up that a product handed over (linear_swiglu_codes.cuh)
 * against the kernel that reads them from memory: the same codes both ways, the same amax, bit for bit. */
#include "check_squares.h"

#include "backend/cuda/linear_swiglu_codes.cuh"

using linear_swiglu::BOX_BYTES;
using linear_swiglu::BOX_COLUMNS;
using linear_swiglu::BOX_ROW_BYTES;
using linear_swiglu::lane_codes;

namespace {

constexpr uint32_t ROWS = 64; /* of a square */

/* Columns of gate, then of up, as the copy engine's 128-byte swizzle has them. */
std::vector<uint8_t> square_of(const std::vector<uint16_t> &gate_up, uint32_t ffn, uint32_t row, uint32_t column) {
    std::vector<uint8_t> square(2 * BOX_BYTES);
    for (uint32_t half = 0; half < 2; ++half)
        for (uint32_t r = 0; r < ROWS; ++r)
            for (uint32_t i = 0; i < BOX_COLUMNS; ++i) {
                const uint16_t value = gate_up[static_cast<size_t>(row + r) * 2 * ffn + half * ffn + column + i];
                const size_t chunk = (i / 8) ^ (r % 8), at = half * BOX_BYTES + r * BOX_ROW_BYTES + chunk * 16;
                memcpy(&square[at + i % 8 * 2], &value, sizeof value);
            }
    return square;
}

/* As a warp has them: sixteen groups of rows at once, or half a square. */
template <uint32_t GROUPS>
float square_run(const code_planes &planes, const std::vector<uint8_t> &square, uint32_t row, uint32_t column,
                 float scale) {
    constexpr uint32_t TALL = 16 * GROUPS;
    float amax = 0.0f;
    for (uint32_t top = 0; top < ROWS; top += TALL)
        for (uint32_t lane = 0; lane < WARP; ++lane) {
            lane_codes<GROUPS> codes(lane);
            amax = codes.make(planes, square.data() + top * BOX_ROW_BYTES, row + top, column, scale, amax);
            codes.store(planes, row + top, column);
        }
    return amax;
}

/* No two of eight lanes that read together meet in a bank. */
template <uint32_t GROUPS>
std::string meetings() {
    std::vector<uint8_t> nothing;
    for (uint32_t i = 0; i < 4 * GROUPS; ++i)
        for (uint32_t first = 0; first < WARP; first += 8) {
            uint32_t seen = 0;
            for (uint32_t lane = first; lane < first + 8; ++lane) {
                const lane_codes<GROUPS> codes(lane);
                seen |= 1u << (codes.place(i) / 16 % 8);
            }
            if (seen != 0xFF) return "lanes " + std::to_string(first) + " on meet in a bank";
        }
    return "";
}

} // namespace

template <uint32_t GROUPS>
static std::string squares_wrong(const target_case &c, uint32_t rows, uint32_t ffn, kind k) {
    const size_t count = static_cast<size_t>(rows) * ffn;
    const std::vector<uint16_t> x = bf16_values(2 * count, rows + ffn, k);
    buffer gate_up(count * 4);
    gate_up.put(x);
    target_memory wanted(c, rows, ffn), found(c, rows, ffn);
    wanted.poison(0xA5), found.poison(0xA5);
    qe_args_swiglu args = {};
    args.gate_up = gate_up.at(), args.rows = rows, args.ffn = ffn, args.target = wanted.target();
    if (qe_cuda_swiglu_quantize(&args, nullptr) != QE_OK) return "the launcher refused";
    const qe_quantize_target target = found.target();
    const code_planes planes = {static_cast<uint8_t *>(target.operand.codes),
                                static_cast<uint8_t *>(target.retained.codes), rows, ffn};
    float amax = 0.0f;
    for (uint32_t row = 0; row < rows; row += ROWS)
        for (uint32_t column = 0; column < ffn; column += BOX_COLUMNS)
            amax = larger(amax,
                          square_run<GROUPS>(planes, square_of(x, ffn, row, column), row, column, *target.scale));
    if (target.amax) *target.amax = larger(*target.amax, amax);
    *target.operand.scale_inv = 1.0f / *target.scale;
    if (!found.is_guarded()) return "written beyond the end of the target";
    return wanted.bytes() == found.bytes() ? "" : "other bits than swiglu_quantize's";
}

void check_squares(checks &all) {
    const target_case c = {QE_RECIPE_DELAYED, QE_FORMAT_E4M3, false, true, true, true, 3.7f, 0.0f};
    all.report("places of a square, 4 groups", meetings<4>());
    all.report("places of a square, 2 groups", meetings<2>());
    for (const kind k : {PLAIN, WIDE}) {
        all.report(name_of("squares of 4 groups", c, 128, 192), squares_wrong<4>(c, 128, 192, k));
        all.report(name_of("squares of 2 groups", c, 128, 192), squares_wrong<2>(c, 128, 192, k));
    }
}
