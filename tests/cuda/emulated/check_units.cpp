/* check_units.cpp - what a warp makes of gate, up and a gradient that a product handed over
 * (input_grad_swiglu_codes.cuh) against the kernel that reads them from memory: the same codes both ways, the same
 * amax, bit for bit. */
#include "check_units.h"

#include "backend/cuda/input_grad_swiglu_codes.cuh"

using namespace input_grad_swiglu;

namespace {

/* Rows of 64 bf16 as the copy engine's 128-byte swizzle has them, or as sums are laid. */
void rows_lay(const uint16_t *values, size_t pitch, uint32_t rows, uint8_t *to) {
    for (uint32_t r = 0; r < rows; ++r)
        for (uint32_t i = 0; i < STRIP; ++i)
            memcpy(to + r * ROW_BYTES + ((i / 8) ^ (r % 8)) * 16 + i % 8 * 2, values + r * pitch + i, 2);
}

struct operands {
    std::vector<uint16_t> gate_up, dy;
    uint32_t rows, ffn;
};

/* As the copy engine stores a box. */
void box_store(const uint8_t *from, uint8_t *to, size_t pitch) {
    for (uint32_t r = 0; r < UNIT_ROWS; ++r) memcpy(to + r * pitch, from + r * STRIP, STRIP);
}

template <int FORMAT>
float unit_run(const operands &o, const code_planes &planes, uint32_t row, uint32_t column, float scale) {
    std::vector<uint8_t> raw(RAW_BYTES), dy(SUB_ROWS * ROW_BYTES), codes(CODES_BYTES);
    float amax = 0.0f;
    for (uint32_t slot = 0; slot < UNIT_ROWS / SUB_ROWS; ++slot) {
        const size_t first = row + slot * SUB_ROWS, pitch = static_cast<size_t>(2) * o.ffn;
        rows_lay(&o.gate_up[first * pitch + column], pitch, SUB_ROWS, raw.data());
        rows_lay(&o.gate_up[first * pitch + o.ffn + column], pitch, SUB_ROWS, raw.data() + RAW_BYTES / 2);
        rows_lay(&o.dy[first * o.ffn + column], o.ffn, SUB_ROWS, dy.data());
        for (uint32_t lane = 0; lane < WARP; ++lane)
            amax = lane_codes<FORMAT>(lane, codes.data()).make(raw.data(), dy.data(), slot, scale, amax);
    }
    for (uint32_t output = 0; output < 2; ++output)
        box_store(&codes[output * BOX_BYTES], planes.by_rows + static_cast<size_t>(row) * planes.columns +
                                                  output * o.ffn + column, planes.columns);
    for (uint32_t lane = 0; lane < WARP; ++lane)
        lane_codes<FORMAT>(lane, codes.data()).store(planes, o.ffn, row, column);
    return amax;
}

template <int FORMAT>
std::string units_wrong(const target_case &c, uint32_t rows, uint32_t ffn, kind k) {
    const size_t count = static_cast<size_t>(rows) * ffn;
    const operands o = {bf16_values(2 * count, rows + ffn, k), bf16_values(count, rows, k), rows, ffn};
    buffer gate_up(count * 4), dy(count * 2);
    gate_up.put(o.gate_up), dy.put(o.dy);
    target_memory wanted(c, rows, 2 * ffn), found(c, rows, 2 * ffn);
    wanted.poison(0xA5), found.poison(0xA5);
    qe_args_swiglu_backward args = {};
    args.gate_up = gate_up.at(), args.dy = dy.at(), args.rows = rows, args.ffn = ffn, args.target = wanted.target();
    if (qe_cuda_swiglu_backward_quantize(&args, nullptr) != QE_OK) return "the launcher refused";
    const qe_quantize_target target = found.target();
    const code_planes planes = {static_cast<uint8_t *>(target.operand.codes),
                                static_cast<uint8_t *>(target.retained.codes), rows, 2 * ffn};
    float amax = 0.0f;
    for (uint32_t row = 0; row < rows; row += UNIT_ROWS)
        for (uint32_t column = 0; column < ffn; column += STRIP)
            amax = larger(amax, unit_run<FORMAT>(o, planes, row, column, *target.scale));
    if (target.amax) *target.amax = larger(*target.amax, amax);
    *target.operand.scale_inv = 1.0f / *target.scale;
    if (!found.is_guarded()) return "written beyond the end of the target";
    return wanted.bytes() == found.bytes() ? "" : "other bits than swiglu_backward_quantize's";
}

} // namespace

void check_units(checks &all) {
    const target_case narrow = {QE_RECIPE_DELAYED, QE_FORMAT_E4M3, false, true, true, true, 3.7f, 0.0f};
    const target_case wide = {QE_RECIPE_DELAYED, QE_FORMAT_E5M2, false, true, true, true, 371.0f, 0.0f};
    for (const kind k : {PLAIN, WIDE, SPECIAL}) {
        all.report(name_of("units", narrow, 96, 192), units_wrong<QE_FORMAT_E4M3>(narrow, 96, 192, k));
        all.report(name_of("units", wide, 96, 192), units_wrong<QE_FORMAT_E5M2>(wide, 96, 192, k));
    }
}
