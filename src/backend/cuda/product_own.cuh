/* product_own.cuh - a product of 8-bit codes into bf16 for Hopper, with something added or not: the bits of cuBLASLt's.
 *
 * One warp loads a tile's stages, another what is added, to where the result will lie; two groups of four warps
 * multiply 64 rows each, round their sums in shared memory, and have the copy engine store them. Split sums in tiles of
 * 128 x 128, two stages' at a time in a thread; fast ones in tiles of 128 x 256. What lies beyond the last row, column
 * or term is zeros, and is not stored. */
#ifndef QE_CUDA_PRODUCT_OWN_CUH
#define QE_CUDA_PRODUCT_OWN_CUH

#include "backend/cuda/product_sums.cuh"

namespace product_own {

using namespace product_tiles;

constexpr uint32_t THREADS = (1 + GROUPS) * GROUP_THREADS; /* the first group loads */
/* Of a thread: of the group that loads, of those that multiply; 168 each without a change. */
constexpr uint32_t LOADER_REGISTERS = 24, MATH_REGISTERS = 240;

/* SPLIT: how sums are made; FORMAT: of the first operand; ADDS: something is added. */
template <bool SPLIT_, int FORMAT_, bool ADDS_>
struct form {
    static constexpr bool SPLIT = SPLIT_, ADDS = ADDS_;
    static constexpr int FORMAT = FORMAT_;
    static constexpr uint32_t COLUMNS = SPLIT ? 128 : 256, STAGES = SPLIT ? 5 : 3;
    static constexpr uint32_t STAGE_BYTES = (ROWS + COLUMNS) * TERMS, STRIPS = COLUMNS / LAID;
    static constexpr uint32_t GROUP_BYTES = STRIPS * LAID_BYTES, AT_OUT = STAGES * STAGE_BYTES;
    static constexpr uint32_t AT_BARRIERS = AT_OUT + GROUPS * GROUP_BYTES;
    static constexpr uint32_t SHARED_BYTES = ALIGN_BYTES + AT_BARRIERS + 8 * (2 * STAGES + 2 * GROUPS);
    static_assert(SHARED_BYTES <= SHARED_MAX, "a block's shared memory");
};

struct job {
    CUtensorMap first, second;  /* boxes of 128 rows, of half of a tile's columns */
    CUtensorMap result, added;  /* boxes of 64 by 64 */
    const float *first_scale, *second_scale;
    uint32_t steps; /* stages of a tile */
    tiling tiles;
};

/* What a block has in shared memory. */
template <typename Form>
struct memory : ring<Form::STAGES, Form::STAGE_BYTES, Form::AT_BARRIERS> {
    using memory::ring::base, memory::ring::other;

    METHOD explicit memory(uint8_t *bytes) : memory::ring(bytes) {
        asm volatile("" : "+r"(base)); /* computed once, not at each use */
    }
    METHOD uint32_t out(uint32_t group) const {
        return base + Form::AT_OUT + group * Form::GROUP_BYTES;
    }
    /* What is added lies there; it may be brought there. */
    METHOD uint32_t brought(uint32_t group) const {
        return other(group);
    }
    METHOD uint32_t stored(uint32_t group) const {
        return other(GROUPS + group);
    }
};

template <typename Form>
DEVICE void barriers_begin(const memory<Form> &m) {
    if (threadIdx.x == 0) {
        m.begin(GROUPS);
        for (uint32_t i = 0; i < 2 * GROUPS; ++i) barrier_init(m.other(i), 1);
        barriers_publish();
    }
    block_barrier();
    cluster_sync();
}

template <typename Form>
DEVICE void tiles_load(const job &j, const memory<Form> &m) {
    constexpr uint32_t HALF = Form::COLUMNS / CLUSTER;
    typename memory<Form>::turn t;
    for (walk<Form::COLUMNS> at(j.tiles); !at.is_over(); at.next()) {
        const place here = at.here();
        m.template load<HALF * TERMS>(&j.first, &j.second, here.row, here.column + cluster_rank() * HALF, j.steps, t);
    }
}

/* What is added: both groups' rows of each tile, as soon as the tile before is stored. */
template <typename Form>
DEVICE void added_load(const job &j, const memory<Form> &m) {
    uint32_t parity = 1;
    for (walk<Form::COLUMNS> at(j.tiles); !at.is_over(); at.next(), parity ^= 1) {
        const place here = at.here();
        for (uint32_t group = 0; group < GROUPS; ++group) {
            const uint32_t barrier = m.brought(group), to = m.out(group);
            barrier_wait(m.stored(group), parity);
            barrier_expect(barrier, Form::GROUP_BYTES);
            for (uint32_t i = 0; i < Form::STRIPS; ++i)
                box_load(to + i * LAID_BYTES, &j.added, here.column + i * LAID, here.row + group * GROUP_ROWS,
                         barrier);
        }
    }
}

/* One of the groups that multiply. */
template <typename Form>
struct math : multiplier<memory<Form>, Form::COLUMNS, Form::FORMAT> {
    using sum = multiplier<memory<Form>, Form::COLUMNS, Form::FORMAT>;
    using sum::m, sum::group, sum::lane;
    const bool sends;

    METHOD math(const memory<Form> &m_, uint32_t group_, uint32_t warp, uint32_t lane_)
        : sum(m_, group_, lane_), sends(warp == 0 && lane_ == 0) {}

    METHOD void tile_sum(typename sum::sums &total, uint32_t steps) {
        if constexpr (Form::SPLIT) {
#pragma unroll
            for (uint32_t i = 0; i < sum::COUNT; ++i) total[i] = 0.0f;
            sum::stages_sum_overlapped(total, steps / BATCH * BATCH);
            sum::stages_sum(total, steps % BATCH);
        } else {
            sum::stages_chain(total, steps);
        }
    }

    /* Adds to what lies where the result will. */
    METHOD void lay_added(const typename sum::sums &total, float alpha) const {
#pragma unroll
        for (uint32_t n = 0; n < Form::COLUMNS / 16; ++n) {
            const uint32_t at = sum::square_place(m.out(group), n);
            uint32_t pairs[4];
            squares_load(at, pairs);
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i)
                pairs[i] = round_bf16_pair(added_to(total[n * 8 + 2 * i], alpha, low_bf16(pairs[i])),
                                           added_to(total[n * 8 + 2 * i + 1], alpha, high_bf16(pairs[i])));
            squares_store(at, pairs);
        }
    }
    static METHOD float added_to(float value, float alpha, float more) {
        return fused(value, alpha, more);
    }

    /* By one thread. */
    METHOD void send(const job &j, const place &here) const {
#pragma unroll
        for (uint32_t i = 0; i < Form::STRIPS; ++i)
            box_store(&j.result, m.out(group) + i * LAID_BYTES, here.column + i * LAID,
                      here.row + group * GROUP_ROWS);
        stores_commit();
    }

    METHOD void write(const job &j, const place &here, const typename sum::sums &total, float alpha, uint32_t parity) {
        if constexpr (Form::ADDS) {
            barrier_wait(m.brought(group), parity);
            lay_added(total, alpha);
        } else {
            if (sends) stores_wait_read();
            threads_sync(1 + group, GROUP_THREADS);
            sum::lay(total, alpha, m.out(group));
        }
        shared_publish();
        threads_sync(1 + group, GROUP_THREADS);
        if (sends) {
            send(j, here);
            if (Form::ADDS) {
                stores_wait_read();
                barrier_arrive(m.stored(group));
            }
        }
        warp_barrier(0xFFFFFFFFu);
    }

    METHOD void run(const job &j) {
        const float alpha = mul(*j.first_scale, *j.second_scale);
        uint32_t parity = 0;
        for (walk<Form::COLUMNS> at(j.tiles); !at.is_over(); at.next(), parity ^= 1) {
            float total[sum::COUNT];
            tile_sum(total, j.steps);
            write(j, at.here(), total, alpha, parity);
        }
        if (sends) stores_wait();
        warp_barrier(0xFFFFFFFFu);
    }
};

template <typename Form>
KERNEL void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ job j) {
    extern __shared__ uint8_t shared_raw[];
    const memory<Form> m(shared_raw);
    const uint32_t warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
    barriers_begin(m);
    if (warp < GROUP_WARPS) {
        registers_lower<LOADER_REGISTERS>();
        if (threadIdx.x == 0) tiles_load(j, m);
        if (Form::ADDS && threadIdx.x == WARP) added_load(j, m);
        warp_barrier(0xFFFFFFFFu);
    } else {
        registers_raise<MATH_REGISTERS>();
        math<Form>(m, warp / GROUP_WARPS - 1, warp % GROUP_WARPS, lane).run(j);
    }
    cluster_sync(); /* a block that is gone has no barriers to arrive at */
}

} // namespace product_own

#endif
