/* check_squares.cpp - what four warps make of 64 rows of gate and up that a product left in their registers
 * (linear_swiglu_codes.cuh) against the kernel that reads them from memory: the same codes both ways, the same amax,
 * bit for bit. */
#include "check_squares.h"

#include "backend/cuda/launch.cuh"
#include "backend/cuda/linear_swiglu_codes.cuh"

using namespace linear_swiglu;

namespace {

constexpr uint32_t THREADS = 4 * WARP;

struct square_job {
    const uint16_t *gate_up; /* [64, 2 COLUMNS] */
    uint32_t inside;         /* columns */
    float scale;
    uint8_t *by_rows, *turned;
    float *amax; /* [THREADS] */
};

/* As sums lie: of every eight columns a lane has two neighbours, in two rows. */
KERNEL void square_kernel(const square_job job) {
    const uint32_t thread = threadIdx.x;
    const lane_of_sums lane(thread / WARP, thread % WARP);
    float amax = 0.0f;
    for (uint32_t column = 0; column < COLUMNS; column += 16) {
        quad of;
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t row = lane.warp * 16 + lane.row + i % 2 * 8, at = column + i / 2 * 8 + 2 * lane.pair;
            const uint16_t *gate = job.gate_up + row * 2 * COLUMNS + at, *up = gate + COLUMNS;
            of.gate[i] = gate[0] | static_cast<uint32_t>(gate[1]) << 16;
            of.up[i] = up[0] | static_cast<uint32_t>(up[1]) << 16;
        }
        amax = codes_make(lane, of, column, column < job.inside, job.scale, amax, job.by_rows, job.turned);
    }
    job.amax[thread] = amax;
}

/* Where the copy engine's 64-byte swizzle has row `row` of column `column`. */
size_t swizzled(uint32_t column, uint32_t row) {
    return static_cast<size_t>(column) * HALF_ROWS + ((row / 16 ^ (column / 2 % 4)) << 4) + row % 16;
}

std::string codes_wrong(const std::vector<uint8_t> &rows, const std::vector<uint8_t> &columns,
                        const std::vector<uint8_t> &by_rows, const std::vector<uint8_t> &turned) {
    for (uint32_t row = 0; row < HALF_ROWS; ++row)
        for (uint32_t column = 0; column < COLUMNS; ++column) {
            const size_t at = static_cast<size_t>(row) * COLUMNS + column;
            if (by_rows[at] != rows[at]) return "row " + std::to_string(row) + " has another code";
            if (turned[swizzled(column, row)] != columns[static_cast<size_t>(column) * HALF_ROWS + row])
                return "column " + std::to_string(column) + " has another code";
        }
    return "";
}

std::string square_wrong(const target_case &c, kind k, uint32_t seed) {
    constexpr size_t COUNT = HALF_ROWS * COLUMNS;
    buffer gate_up(COUNT * 4), by_rows(COUNT), turned(COUNT), amaxes(THREADS * 4);
    gate_up.put(bf16_values(2 * COUNT, seed, k));
    target_memory wanted(c, HALF_ROWS, COLUMNS);
    wanted.poison(0xA5);
    const qe_quantize_target target = wanted.target();
    qe_args_swiglu args = {};
    args.gate_up = gate_up.at(), args.rows = HALF_ROWS, args.ffn = COLUMNS, args.target = target;
    if (qe_cuda_swiglu_quantize(&args, nullptr) != QE_OK) return "the launcher refused";
    const square_job job = {gate_up.as<uint16_t>(), COLUMNS,           c.scale, by_rows.as<uint8_t>(),
                            turned.as<uint8_t>(),   amaxes.as<float>()};
    if (launch(square_kernel, dim3(1), THREADS, 1, 0, nullptr, job) != QE_OK) return "the launcher refused";
    float amax = 0.0f;
    for (float of_lane : amaxes.get<float>()) amax = std::max(amax, of_lane);
    if (!by_rows.is_guarded() || !turned.is_guarded()) return "written beyond the end";
    if (memcmp(&amax, target.amax, sizeof amax) != 0) return "another amax";
    std::vector<uint8_t> rows(COUNT), columns(COUNT);
    memcpy(rows.data(), target.operand.codes, COUNT), memcpy(columns.data(), target.retained.codes, COUNT);
    return codes_wrong(rows, columns, by_rows.get<uint8_t>(), turned.get<uint8_t>());
}

/* Lanes of a warp that store words of the transposed plane together. */
std::string meetings() {
    for (uint32_t warp = 0; warp < 4; ++warp) {
        uint32_t seen = 0;
        for (uint32_t lane = 0; lane < WARP; ++lane)
            seen |= 1u << (turned_place(lane_of_sums(warp, lane), 16) / 4 % 32);
        if (seen != 0xFFFFFFFFu) return "lanes of warp " + std::to_string(warp) + " meet in a bank";
    }
    return "";
}

} // namespace

void check_squares(checks &all) {
    const target_case c = {QE_RECIPE_DELAYED, QE_FORMAT_E4M3, false, true, true, true, 3.7f, 0.0f};
    all.report("places of transposed codes", meetings());
    for (const kind k : {PLAIN, WIDE})
        for (uint32_t seed = 1; seed <= 3; ++seed)
            all.report(name_of("codes of a product's sums", c, HALF_ROWS, COLUMNS), square_wrong(c, k, seed));
}
