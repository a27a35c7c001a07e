/* product_sums.cuh - how four warps multiply 64 rows of a tile: sums of its stages in registers, and bf16 of them in
 * shared memory. Each stage's 128 terms, summed by the matrix unit, are added to fp32 sums, as cuBLASLt's split
 * accumulation does, bit for bit. */
#ifndef QE_CUDA_PRODUCT_SUMS_CUH
#define QE_CUDA_PRODUCT_SUMS_CUH

#include "backend/cuda/codec.cuh"
#include "backend/cuda/product_tiles.cuh"

namespace product_tiles {

/* Stages of a turn of the loop: what is multiplied from one turn into the next, the assembler takes one by one. */
constexpr uint32_t BATCH = 8;
/* bf16 lies in strips of 64 columns of a group's rows, in the copy engine's 128-byte swizzle. */
constexpr uint32_t LAID = 64, LAID_ROW_BYTES = LAID * 2, LAID_BYTES = GROUP_ROWS * LAID_ROW_BYTES;

/* Of a ring whose stages hold ROWS rows of the first operand, then COLUMNS of the second. FORMAT: of the first. */
template <typename Ring, uint32_t COLUMNS, int FORMAT>
struct multiplier {
    static constexpr uint32_t COUNT = COLUMNS / 2; /* sums of a thread */
    typedef float sums[COUNT];

    const Ring &m;
    const uint32_t group, lane, apart;
    const uint64_t begin;  /* first operand of the first stage */
    uint64_t next;         /* of the next one */
    uint32_t behind, last; /* barriers of the block that this lane tells: of the stage taken next, the last one's */
    typename Ring::turn ahead;

    METHOD multiplier(const Ring &m_, uint32_t group_, uint32_t lane_)
        : m(m_), group(group_), lane(lane_), apart((ROWS - group_ * GROUP_ROWS) * TERMS / 16),
          begin(operand(m_.stage(0) + group_ * GROUP_ROWS * TERMS)), next(begin),
          behind(address_at(m_.empty(0), lane_ % CLUSTER)), last(behind + 8 * (Ring::COUNT - 1)) {}

    METHOD void multiply(sums &part) {
        barrier_wait(m.full(ahead.stage), ahead.parity);
        const uint64_t first = next, second = first + apart;
        mma_fence();
#pragma unroll
        for (uint32_t k = 0; k < TERMS / 32; ++k)
            if constexpr (FORMAT == QE_FORMAT_E5M2)
                mma_e5m2_e4m3(part, first + 2 * k, second + 2 * k, k > 0);
            else
                mma_e4m3(part, first + 2 * k, second + 2 * k, k > 0);
        mma_commit();
        ahead.next();
        next = ahead.stage == 0 ? begin : next + Ring::BYTES / 16;
    }

    /* What was multiplied: its stage is free, and it is added to the fp32 sums. */
    METHOD void take(sums &total, sums &part) {
        registers_pin(part);
        if (lane < CLUSTER) barrier_arrive_there(behind);
        behind = behind == last ? last - 8 * (Ring::COUNT - 1) : behind + 8;
#pragma unroll
        for (uint32_t i = 0; i < COUNT; ++i) total[i] = add(total[i], part[i]);
    }

    METHOD void stages_sum(sums &total, uint32_t steps) {
        sums part;
#pragma unroll 1
        for (uint32_t step = 0; step < steps; ++step) {
            registers_pin(part);
            multiply(part);
            mma_wait<0>();
            take(total, part);
        }
    }
    /* A thread has sums of two stages, so that one is multiplied while the other is added. steps: of whole batches. */
    METHOD void stages_sum_overlapped(sums &total, uint32_t steps) {
        float part[2][COUNT];
#pragma unroll 1
        for (uint32_t step = 0; step < steps; step += BATCH) {
            multiply(part[0]);
#pragma unroll
            for (uint32_t i = 1; i < BATCH; ++i) {
                multiply(part[i % 2]);
                mma_wait<1>();
                take(total, part[(i + 1) % 2]);
            }
            mma_wait<0>();
            take(total, part[1]);
        }
    }

    /* A tile's. */
    METHOD void tile_sum(sums &total, uint32_t steps) {
#pragma unroll
        for (uint32_t i = 0; i < COUNT; ++i) total[i] = 0.0f;
        stages_sum_overlapped(total, steps / BATCH * BATCH);
        stages_sum(total, steps % BATCH);
    }

    /* Rounds sums to bf16, strip by strip, from `strips` on. */
    METHOD void lay(const sums &total, float alpha, uint32_t strips) const {
        const uint32_t row = threadIdx.x / WARP % GROUP_WARPS * 16 + lane % 16;
        const uint32_t row_at = strips + row * LAID_ROW_BYTES, turned = lane / 16 ^ lane % 8;
#pragma unroll
        for (uint32_t n = 0; n < COLUMNS / 16; ++n) {
            uint32_t pairs[4];
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i)
                pairs[i] = round_bf16_pair(mul(total[n * 8 + 2 * i], alpha), mul(total[n * 8 + 2 * i + 1], alpha));
            squares_store(row_at + n / 4 * LAID_BYTES + ((turned ^ 2 * (n % 4)) << 4), pairs);
        }
    }
};

} // namespace product_tiles

#endif
