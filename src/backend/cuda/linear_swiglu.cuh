/* linear_swiglu.cuh - gate and up of a product of E4M3 codes, and swiglu's codes of them, in one kernel for Hopper.
 *
 * A block has one multiprocessor and goes from tile to tile of 128 rows by 80 gate and the same 80 up columns. Two
 * blocks in a cluster have rows below each other: each loads its own rows of x and half of the weights, gate or up, for
 * both. One warp loads. Two groups of four warps take every other tile: while one multiplies, in one chain of additions
 * over all terms, the other rounds its sums to bf16, makes codes of them while they are in its registers, and has the
 * copy engine store them, 64 rows at a time. What lies beyond the last row or column is computed and not stored. */
#ifndef QE_CUDA_LINEAR_SWIGLU_CUH
#define QE_CUDA_LINEAR_SWIGLU_CUH

#include "backend/cuda/linear_swiglu_codes.cuh"
#include "backend/cuda/product_tiles.cuh"

namespace linear_swiglu {

using namespace product_tiles;

constexpr uint32_t THREADS = (1 + GROUPS) * GROUP_THREADS; /* the first group loads */
constexpr uint32_t STAGES = 5, OF_X = ROWS * TERMS, STAGE_BYTES = OF_X + 2 * COLUMNS * TERMS;
/* Half a tile on its way out: gate and up in boxes of 64 columns and of the 16 behind them, codes by rows and
 * transposed. Boxes lie in the copy engine's swizzle of their width, 128 and 32 bytes. */
constexpr uint32_t WIDE = 64, NARROW = COLUMNS - WIDE;
constexpr uint32_t WIDE_BYTES = HALF_ROWS * WIDE * 2, NARROW_BYTES = HALF_ROWS * NARROW * 2;
constexpr uint32_t OF_NARROW = 2 * WIDE_BYTES, OF_CODES = OF_NARROW + 2 * NARROW_BYTES;
constexpr uint32_t OF_TURNED = OF_CODES + CODES_BYTES, OUT_BYTES = OF_TURNED + CODES_BYTES;
constexpr uint32_t AT_OUT = STAGES * STAGE_BYTES, AT_BARRIERS = AT_OUT + OUT_BYTES;
constexpr uint32_t SHARED_BYTES = ALIGN_BYTES + AT_BARRIERS + 8 * (2 * STAGES + 2 * GROUPS);
static_assert(SHARED_BYTES <= SHARED_MAX, "a block's shared memory");
static_assert(NARROW == 16 && OF_NARROW % 256 == 0 && OF_CODES % 128 == 0 && OF_TURNED % 512 == 0, "places of boxes");
/* Of a thread: of the group that loads, of those that multiply; 168 each without a change. */
constexpr uint32_t LOADER_REGISTERS = 24, MATH_REGISTERS = 240;

struct job {
    CUtensorMap x, w;                  /* boxes of 128 rows, 80 rows */
    CUtensorMap wide, narrow;          /* y as [rows, 2, columns]: 64 rows */
    CUtensorMap codes, turned;         /* boxes of 64 rows by 80 columns, and of 80 by 64 */
    uint32_t has_codes, has_turned;
    const float *x_scale, *w_scale;
    scaling scale;
    tensor_words words;
    uint32_t columns, steps; /* of gate; stages of a tile */
    tiling tiles;
};

typedef product_tiles::walk<COLUMNS> walk;

/* What a block has in shared memory. */
struct memory : ring<STAGES, STAGE_BYTES, AT_BARRIERS> {
    METHOD explicit memory(uint8_t *bytes) : ring(bytes) {}
    METHOD uint32_t out() const {
        return base + AT_OUT;
    }
    METHOD uint8_t *out_bytes() const {
        return at + AT_OUT;
    }
    /* The other group has all its stages; it is done with what goes out. */
    METHOD uint32_t multiplies(uint32_t group) const {
        return other(group);
    }
    METHOD uint32_t stores(uint32_t group) const {
        return other(GROUPS + group);
    }
};

typedef memory::turn turn;

DEVICE void barriers_begin(const memory &m) {
    m.begin(1, [&] {
        for (uint32_t i = 0; i < GROUPS; ++i) {
            barrier_init(m.multiplies(i), GROUP_WARPS);
            barrier_init(m.stores(i), 1);
        }
    });
}

/* --- the warp that loads ----------------------------------------------------------------------------------------- */

DEVICE void tiles_load(const job &j, const memory &m) {
    turn t;
    for (walk at(j.tiles); !at.is_over(); at.next()) {
        const place here = at.here();
        m.load<COLUMNS * TERMS>(&j.x, &j.w, here.row, here.column + cluster_rank() * j.columns, j.steps, t);
    }
}

/* --- groups that multiply ---------------------------------------------------------------------------------------- */

/* One of them; its sums of a tile's upper and lower 64 rows, the gate columns first. */
struct math {
    const job &j;
    const memory &m;
    const uint32_t group, warp, lane;
    float upper[COLUMNS], lower[COLUMNS];
    float amax;

    METHOD math(const job &j_, const memory &m_, uint32_t group_, uint32_t warp_, uint32_t lane_)
        : j(j_), m(m_), group(group_), warp(warp_), lane(lane_), amax(0.0f) {}

    METHOD void release(turn &behind) const {
        if (lane < CLUSTER) barrier_arrive_at(m.empty(behind.stage), lane);
        behind.next();
    }

    /* Groups take turns at stages, tile by tile: who waited for a stage before its turn could take the phase before the
     * last for its own. use: tiles of this group before. */
    METHOD void multiply(uint32_t use) {
        turn ahead((GROUPS * use + group) * j.steps), behind = ahead;
        if (group + use > 0) barrier_wait(m.multiplies(group), (use + group + 1) & 1);
#pragma unroll 1
        for (uint32_t step = 0; step < j.steps; ++step) {
            barrier_wait(m.full(ahead.stage), ahead.parity);
            const uint32_t stage = m.stage(ahead.stage);
            const uint64_t x = operand(stage), below = operand(stage + HALF_ROWS * TERMS), w = operand(stage + OF_X);
            mma_fence();
#pragma unroll
            for (uint32_t k = 0; k < TERMS / 32; ++k) {
                mma_e4m3(upper, x + 2 * k, w + 2 * k, step + k > 0);
                mma_e4m3(lower, below + 2 * k, w + 2 * k, step + k > 0);
            }
            mma_commit();
            ahead.next();
            if (step == 0) continue;
            mma_wait<1>();
            release(behind);
        }
        warp_barrier(0xFFFFFFFFu);
        if (lane == 0) barrier_arrive(m.multiplies(group ^ 1));
        mma_wait<0>();
        registers_pin(upper);
        registers_pin(lower);
        release(behind);
    }

    /* Where a lane's row of 16 bytes goes that has columns `column` to `column` + 15 beside its neighbour. */
    METHOD uint32_t square_place(uint32_t column) const {
        const uint32_t row = warp * 16 + lane % 16, beside = lane / 16;
        if (column < WIDE) return m.out() + row * WIDE * 2 + (((column / 8 + beside) ^ row % 8) << 4);
        return m.out() + OF_NARROW + row * NARROW * 2 + (((column - WIDE) / 8 + beside) ^ row / 4 % 2) * 16;
    }

    /* Rounds half of the sums as cuBLASLt does and makes codes of them. */
    METHOD void half_make(const float (&sums)[COLUMNS], const place &here, float alpha, float scale) {
        const lane_of_sums at(warp, lane);
#pragma unroll
        for (uint32_t column = 0; column < COLUMNS; column += 16) {
            const float *gate = sums + column / 2, *up = sums + COLUMNS / 2 + column / 2;
            quad of;
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                of.gate[i] = round_bf16_pair(mul(gate[2 * i], alpha), mul(gate[2 * i + 1], alpha));
                of.up[i] = round_bf16_pair(mul(up[2 * i], alpha), mul(up[2 * i + 1], alpha));
            }
            const uint32_t to = square_place(column);
            squares_store(to, of.gate);
            squares_store(to + (column < WIDE ? WIDE_BYTES : NARROW_BYTES), of.up);
            amax = codes_make(at, of, column, here.column + column < j.columns, scale, amax,
                              m.out_bytes() + OF_CODES, m.out_bytes() + OF_TURNED);
        }
        shared_publish();
    }

    /* By one thread. What is outside of a tensor is not written. Ensures: shared memory may be written again. */
    METHOD void half_store(uint32_t row, uint32_t column) const {
        const uint32_t out = m.out();
#pragma unroll
        for (uint32_t of = 0; of < 2; ++of) {
            box_store(&j.wide, out + of * WIDE_BYTES, column, of, row);
            box_store(&j.narrow, out + OF_NARROW + of * NARROW_BYTES, column + WIDE, of, row);
        }
        if (j.has_codes) box_store(&j.codes, out + OF_CODES, column, row);
        if (j.has_turned) box_store(&j.turned, out + OF_TURNED, row, column);
        stores_commit();
        stores_wait_read();
    }

    /* Groups take turns at what goes out, too. */
    METHOD void write(uint32_t use, const place &here, float alpha, float scale) {
        const bool sends = warp == 0 && lane == 0;
        if (group + use > 0) barrier_wait(m.stores(group ^ 1), (use + group + 1) & 1);
        half_make(upper, here, alpha, scale);
        threads_sync(1 + group, GROUP_THREADS);
        if (sends) half_store(here.row, here.column);
        threads_sync(1 + group, GROUP_THREADS);
        half_make(lower, here, alpha, scale);
        threads_sync(1 + group, GROUP_THREADS);
        if (sends) {
            half_store(here.row + HALF_ROWS, here.column);
            barrier_arrive(m.stores(group));
        }
        warp_barrier(0xFFFFFFFFu);
    }

    METHOD void run() {
        const float alpha = mul(*j.x_scale, *j.w_scale), scale = scale_of(j.scale);
        const int32_t seen = j.scale.amax ? load_shared_word(j.scale.amax) : 0;
        uint32_t use = 0;
        for (walk at(j.tiles, GROUPS, group); !at.is_over(); at.next(), ++use) {
            multiply(use);
            write(use, at.here(), alpha, scale);
        }
        record_amax(j.scale.amax, amax, seen);
        if (warp == 0 && lane == 0) stores_wait();
        warp_barrier(0xFFFFFFFFu);
    }
};

KERNEL void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ job j) {
    extern __shared__ uint8_t shared_raw[];
    const memory m(shared_raw);
    const uint32_t warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
    barriers_begin(m);
    if (warp < GROUP_WARPS) {
        registers_lower<LOADER_REGISTERS>();
        if (threadIdx.x == 0) tiles_load(j, m);
        if (blockIdx.x == 0 && threadIdx.x == 0) write_words(j.words, scale_of(j.scale));
        warp_barrier(0xFFFFFFFFu);
    } else {
        registers_raise<MATH_REGISTERS>();
        math(j, m, warp / GROUP_WARPS - 1, warp % GROUP_WARPS, lane).run();
    }
    cluster_sync(); /* a block that is gone has no barriers to arrive at */
}

} // namespace linear_swiglu

#endif
