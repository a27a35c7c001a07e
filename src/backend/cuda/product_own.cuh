/* product_own.cuh - a product of 8-bit codes into bf16 for Hopper, split sums: the bits of cuBLASLt's.
 *
 * A block goes from tile to tile of 128 rows by 128 columns. One warp loads; two groups of four warps multiply 64 rows
 * each, a thread with two stages' sums beside its fp32 sums; they round these in shared memory and have the copy engine
 * store them. What lies beyond the last row, column or term is zeros, and is not stored. */
#ifndef QE_CUDA_PRODUCT_OWN_CUH
#define QE_CUDA_PRODUCT_OWN_CUH

#include "backend/cuda/product_sums.cuh"

namespace product_own {

using namespace product_tiles;

constexpr uint32_t COLUMNS = 128, STRIPS = COLUMNS / LAID; /* of a tile */
constexpr uint32_t STAGES = 5, STAGE_BYTES = (ROWS + COLUMNS) * TERMS, GROUP_BYTES = STRIPS * LAID_BYTES;
constexpr uint32_t AT_OUT = STAGES * STAGE_BYTES, AT_BARRIERS = AT_OUT + GROUPS * GROUP_BYTES;
constexpr uint32_t SHARED_BYTES = ALIGN_BYTES + AT_BARRIERS + 8 * 2 * STAGES;
static_assert(SHARED_BYTES <= SHARED_MAX, "a block's shared memory");
constexpr uint32_t THREADS = (1 + GROUPS) * GROUP_THREADS; /* the first group loads */
/* Of a thread: of the group that loads, of those that multiply; 168 each without a change. */
constexpr uint32_t LOADER_REGISTERS = 24, MATH_REGISTERS = 240;

struct job {
    CUtensorMap first, second; /* boxes of 128 rows, of half of a tile's columns */
    CUtensorMap result;        /* boxes of 64 by 64 */
    const float *first_scale, *second_scale;
    uint32_t steps; /* stages of a tile */
    tiling tiles;
};

typedef product_tiles::walk<COLUMNS> walk;

/* What a block has in shared memory. */
struct memory : ring<STAGES, STAGE_BYTES, AT_BARRIERS> {
    METHOD explicit memory(uint8_t *bytes) : ring(bytes) {
        asm volatile("" : "+r"(base)); /* computed once, not at each use */
    }
    METHOD uint32_t out(uint32_t group) const {
        return base + AT_OUT + group * GROUP_BYTES;
    }
};

DEVICE void tiles_load(const job &j, const memory &m) {
    constexpr uint32_t HALF = COLUMNS / CLUSTER;
    memory::turn t;
    for (walk at(j.tiles); !at.is_over(); at.next()) {
        const place here = at.here();
        m.load<HALF * TERMS>(&j.first, &j.second, here.row, here.column + cluster_rank() * HALF, j.steps, t);
    }
}

/* One of the groups that multiply. FORMAT: of the first operand. */
template <int FORMAT>
struct math : multiplier<memory, COLUMNS, FORMAT> {
    using sum = multiplier<memory, COLUMNS, FORMAT>;
    using sum::m, sum::group;
    const bool sends;

    METHOD math(const memory &m_, uint32_t group_, uint32_t warp, uint32_t lane_)
        : sum(m_, group_, lane_), sends(warp == 0 && lane_ == 0) {}

    /* By one thread. */
    METHOD void send(const job &j, const place &here) const {
#pragma unroll
        for (uint32_t i = 0; i < STRIPS; ++i)
            box_store(&j.result, m.out(group) + i * LAID_BYTES, here.column + i * LAID, here.row + group * GROUP_ROWS);
        stores_commit();
    }

    METHOD void write(const job &j, const place &here, const typename sum::sums &total, float alpha) const {
        if (sends) stores_wait_read();
        threads_sync(1 + group, GROUP_THREADS);
        sum::lay(total, alpha, m.out(group));
        shared_publish();
        threads_sync(1 + group, GROUP_THREADS);
        if (sends) send(j, here);
        warp_barrier(0xFFFFFFFFu);
    }

    METHOD void run(const job &j) {
        const float alpha = mul(*j.first_scale, *j.second_scale);
        for (walk at(j.tiles); !at.is_over(); at.next()) {
            float total[sum::COUNT];
            sum::tile_sum(total, j.steps);
            write(j, at.here(), total, alpha);
        }
        if (sends) stores_wait();
        warp_barrier(0xFFFFFFFFu);
    }
};

template <int FORMAT>
KERNEL void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ job j) {
    extern __shared__ uint8_t shared_raw[];
    const memory m(shared_raw);
    const uint32_t warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
    m.begin(GROUPS);
    if (warp < GROUP_WARPS) {
        registers_lower<LOADER_REGISTERS>();
        if (threadIdx.x == 0) tiles_load(j, m);
        warp_barrier(0xFFFFFFFFu);
    } else {
        registers_raise<MATH_REGISTERS>();
        math<FORMAT>(m, warp / GROUP_WARPS - 1, warp % GROUP_WARPS, lane).run(j);
    }
    cluster_sync(); /* a block that is gone has no barriers to arrive at */
}

} // namespace product_own

#endif
