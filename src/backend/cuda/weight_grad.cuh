/* weight_grad.cuh - a weight gradient of 8-bit codes for Hopper: split sums of a product, scaled, added to fp32 in
 * place or put there, with the bits of cuBLASLt's.
 *
 * One warp of a block loads the stages of its tiles, and asks the second cache for what will be added while the tile is
 * multiplied, so that nothing waits for memory when it comes to that. Two groups of four warps multiply 64 rows each
 * and lay their scaled sums in shared memory; a warp each has the copy engine add them where they belong, a strip at a
 * time, while the next tile is multiplied: with all strips at once what the next tile needs would queue up behind them.
 * The sums come back to no multiprocessor, since the cache adds. It rounds as any addition does, and keeps denormals.
 * What lies beyond the last row, column or term is zeros, and is not stored. */
#ifndef QE_CUDA_WEIGHT_GRAD_CUH
#define QE_CUDA_WEIGHT_GRAD_CUH

#include "backend/cuda/product_sums.cuh"

namespace weight_grad {

using namespace product_tiles;

constexpr uint32_t COLUMNS = 128, STAGES = 5;
constexpr uint32_t STAGE_BYTES = (ROWS + COLUMNS) * TERMS;
/* fp32 of a group's rows, in the copy engine's 128-byte swizzle. */
constexpr uint32_t STRIP = 32, STRIPS = COLUMNS / STRIP, STRIP_ROW_BYTES = STRIP * 4;
constexpr uint32_t STRIP_BYTES = GROUP_ROWS * STRIP_ROW_BYTES, GROUP_BYTES = STRIPS * STRIP_BYTES;
constexpr uint32_t AT_OUT = STAGES * STAGE_BYTES, AT_BARRIERS = AT_OUT + GROUPS * GROUP_BYTES;
constexpr uint32_t SHARED_BYTES = ALIGN_BYTES + AT_BARRIERS + 8 * (2 * STAGES + 2 * GROUPS);
static_assert(SHARED_BYTES <= SHARED_MAX, "a block's shared memory");
/* Rows that the second cache is asked for with each of a tile's last stages. Sooner was slower: they are read while the
 * sums of the tile before are added then. */
constexpr uint32_t AHEAD_ROWS = 16, AHEAD_STAGES = ROWS / AHEAD_ROWS;

constexpr uint32_t THREADS = (1 + GROUPS) * GROUP_THREADS; /* the first group loads and stores */
/* Of a thread: of the group that loads, of those that multiply; 168 each without a change. */
constexpr uint32_t LOADER_REGISTERS = 40, MATH_REGISTERS = 232;

struct job {
    CUtensorMap first, second; /* boxes of 128 rows, of half of a tile's columns */
    CUtensorMap sums, ahead;   /* the same sums in boxes of 64 rows by a strip, and of AHEAD_ROWS by a tile's columns */
    const float *first_scale, *second_scale;
    uint32_t steps; /* stages of a tile */
    uint32_t rows, columns;
    bool adds;
    tiling tiles; /* of the product turned over: band: tiles side by side, before what lies below */
};

/* What a block has in shared memory. */
struct memory : ring<STAGES, STAGE_BYTES, AT_BARRIERS> {
    METHOD explicit memory(uint8_t *bytes) : ring(bytes) {
        asm volatile("" : "+r"(base)); /* computed once, not at each use */
    }
    METHOD uint32_t out(uint32_t group) const {
        return base + AT_OUT + group * GROUP_BYTES;
    }
    /* A group's sums lie there; they have left. */
    METHOD uint32_t laid(uint32_t group) const {
        return other(group);
    }
    METHOD uint32_t left(uint32_t group) const {
        return other(GROUPS + group);
    }
};

DEVICE void barriers_begin(const memory &m) {
    m.begin(GROUPS, [m] {
        for (uint32_t i = 0; i < GROUPS; ++i) {
            barrier_init(m.laid(i), GROUP_WARPS);
            barrier_init(m.left(i), 1);
        }
    });
}

/* --- what comes and goes ----------------------------------------------------------------------------------------- */

/* Where this block's tile lies. */
DEVICE place place_of(const walk<COLUMNS> &at) {
    const cell here = at.cell_here();
    return place{(here.along * CLUSTER + cluster_rank()) * ROWS, here.over * COLUMNS};
}

DEVICE void tiles_load(const job &j, const memory &m) {
    constexpr uint32_t HALF = COLUMNS / CLUSTER;
    memory::turn t;
    for (walk<COLUMNS> at(j.tiles); !at.is_over(); at.next()) {
        const place here = place_of(at);
        const uint32_t end = here.row + ROWS < j.rows ? here.row + ROWS : j.rows;
        uint32_t row = j.adds ? here.row : end;
        m.load<HALF * TERMS>(&j.first, &j.second, here.row, here.column + cluster_rank() * HALF, j.steps, t,
                             [&](uint32_t step) {
                                 if (row >= end || step + AHEAD_STAGES < j.steps) return;
                                 box_ahead(&j.ahead, here.column, row);
                                 row += AHEAD_ROWS;
                             });
    }
}

/* By one thread: a group's rows of each tile. */
DEVICE void tiles_store(const job &j, const memory &m, uint32_t group) {
    uint32_t parity = 0;
    for (walk<COLUMNS> at(j.tiles); !at.is_over(); at.next(), parity ^= 1) {
        const place here = place_of(at);
        const uint32_t row = here.row + group * GROUP_ROWS;
        barrier_wait(m.laid(group), parity);
#pragma unroll 1
        for (uint32_t i = 0; i < STRIPS && row < j.rows; ++i) {
            const uint32_t column = here.column + i * STRIP, from = m.out(group) + i * STRIP_BYTES;
            if (column >= j.columns) break;
            if (j.adds)
                box_add(&j.sums, from, column, row);
            else
                box_store(&j.sums, from, column, row);
            stores_commit();
            stores_wait_read();
        }
        barrier_arrive(m.left(group));
    }
    stores_wait();
}

/* --- products ---------------------------------------------------------------------------------------------------- */

/* One of the groups that multiply. */
template <int FORMAT>
struct math : multiplier<memory, COLUMNS, FORMAT> {
    using sum = multiplier<memory, COLUMNS, FORMAT>;
    using sum::m, sum::group, sum::lane;
    const uint32_t warp;

    METHOD math(const memory &m_, uint32_t group_, uint32_t warp_, uint32_t lane_)
        : sum(m_, group_, lane_), warp(warp_) {}

    /* Sums of eight columns lie as pairs of a row, and of the one eight below. Odd rows take another eight at a time
     * than even ones, so that a half warp's pairs lie in different banks. */
    METHOD void lay(const typename sum::sums &total, float alpha) const {
        const bool odd = lane / 4 % 2;
        const uint32_t begin = m.out(group) + (warp * 16 + lane / 4) * STRIP_ROW_BYTES + lane % 2 * 8;
        const uint32_t turned = (odd * 4 | lane % 4 / 2) ^ lane / 4;
#pragma unroll
        for (uint32_t n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
            for (uint32_t below = 0; below < 2; ++below) {
                const uint32_t even = n * 4 + 2 * below, other = (n ^ 2) * 4 + 2 * below;
                const uint32_t at = begin + n / 4 * STRIP_BYTES + below * 8 * STRIP_ROW_BYTES;
                pair_store(at + ((turned ^ 2 * (n % 4)) << 4), mul(odd ? total[other] : total[even], alpha),
                           mul(odd ? total[other + 1] : total[even + 1], alpha));
            }
    }

    METHOD void run(const job &j) {
        const float alpha = mul(*j.first_scale, *j.second_scale);
        uint32_t parity = 1;
        for (walk<COLUMNS> at(j.tiles); !at.is_over(); at.next(), parity ^= 1) {
            float total[sum::COUNT];
            sum::tile_sum(total, j.steps);
            barrier_wait(m.left(group), parity);
            lay(total, alpha);
            shared_publish();
            warp_barrier(0xFFFFFFFFu);
            if (lane == 0) barrier_arrive(m.laid(group));
            warp_barrier(0xFFFFFFFFu);
        }
    }
};

template <int FORMAT>
KERNEL void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ job j) {
    extern __shared__ uint8_t shared_raw[];
    const memory m(shared_raw);
    const uint32_t warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
    barriers_begin(m);
    if (warp < GROUP_WARPS) {
        registers_lower<LOADER_REGISTERS>();
        if (warp == 0 && lane == 0) tiles_load(j, m);
        if (warp > 0 && warp <= GROUPS && lane == 0) tiles_store(j, m, warp - 1);
        warp_barrier(0xFFFFFFFFu);
    } else {
        registers_raise<MATH_REGISTERS>();
        math<FORMAT>(m, warp / GROUP_WARPS - 1, warp % GROUP_WARPS, lane).run(j);
    }
    cluster_sync(); /* a block that is gone has no barriers to arrive at */
}

} // namespace weight_grad

#endif
