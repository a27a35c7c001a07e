/* linear_swiglu.cuh - gate and up of a product of E4M3 codes, and swiglu's codes of them, in one kernel for Hopper.
 *
 * A block has one multiprocessor and goes from tile to tile of 128 rows by 128 gate and the same 128 up columns. Two
 * blocks in a cluster have rows below each other: each loads its own rows of x and half of the weights, gate or up, for
 * both. One warp loads; two groups of four warps multiply 64 rows each, in one chain of additions over all terms; they
 * round their sums to bf16 and hand them over in shared memory, a square of 64 rows and 64 gate and 64 up columns at a
 * time; three warps have the copy engine store a square and make codes of it, while the next tile is multiplied. What
 * the last tile leaves is shared out between the warps that multiplied. */
#ifndef QE_CUDA_LINEAR_SWIGLU_CUH
#define QE_CUDA_LINEAR_SWIGLU_CUH

#include "backend/cuda/linear_swiglu_codes.cuh"
#include "backend/cuda/sm90_stream.cuh"

namespace linear_swiglu {

using namespace sm90;

constexpr uint32_t CLUSTER = 2;                             /* blocks */
constexpr uint32_t ROWS = 128, COLUMNS = 128, TERMS = 128;  /* of a tile: rows, gate columns; of a stage */
constexpr uint32_t GROUP_ROWS = 64, GROUPS = 2;             /* that multiply */
constexpr uint32_t THREADS = (1 + GROUPS) * GROUP_THREADS;  /* the first group loads and writes */
constexpr uint32_t WRITERS = 3;                             /* warps of it */
constexpr uint32_t STAGES = 3, STAGE_BYTES = (ROWS + 2 * COLUMNS) * TERMS, OF_X = ROWS * TERMS;
constexpr uint32_t SQUARES = 4, SQUARE_BYTES = 2 * BOX_BYTES; /* of a tile: part by part, group by group */
/* Squares in flight have a pair of barriers each: a multiple of the writers and of a tile's squares, so that a thread
 * that waits at one sees all its phases. */
constexpr uint32_t SLOTS = WRITERS * SQUARES;
constexpr uint32_t BARRIER_BYTES = 8 * (2 * STAGES + 2 * SLOTS);
constexpr uint32_t ALIGN_BYTES = 1024; /* the swizzle's */
constexpr uint32_t SHARED_BYTES = ALIGN_BYTES + STAGES * STAGE_BYTES + SQUARES * SQUARE_BYTES + BARRIER_BYTES;
static_assert(SHARED_BYTES <= 227 * 1024, "a block's shared memory");
/* Of a thread: of the group that loads and writes, of those that multiply; 168 each without a change. */
constexpr uint32_t WRITER_REGISTERS = 104, MATH_REGISTERS = 200;

struct job {
    CUtensorMap x, w, y; /* boxes of 128 rows, 128 rows, 64 rows and 64 columns */
    const float *x_scale, *w_scale;
    scaling scale;
    tensor_words words;
    code_planes planes;
    uint32_t down, across, steps; /* tiles of a cluster, stages of a tile */
    uint32_t band;                /* tiles that are gone through from top to bottom before the next column */
};

struct place {
    uint32_t row, column;
};

/* Where a block is in its work. */
struct walk {
    uint32_t index, stride, tiles;

    METHOD explicit walk(const job &j)
        : index(blockIdx.x / CLUSTER), stride(gridDim.x / CLUSTER), tiles(j.down * j.across) {}
    METHOD bool is_last() const {
        return index + stride >= tiles;
    }
    METHOD place here(const job &j) const {
        const uint32_t panel = index / (j.band * j.across), within = index % (j.band * j.across);
        const uint32_t left = j.down - panel * j.band, high = left < j.band ? left : j.band;
        return place{((panel * j.band + within % high) * CLUSTER + cluster_rank()) * ROWS, within / high * COLUMNS};
    }
};

/* What a block has in shared memory. */
struct memory {
    uint8_t *at;
    uint32_t base;

    METHOD explicit memory(uint8_t *bytes) {
        const uint32_t raw = shared_address(bytes);
        base = (raw + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
        at = bytes + (base - raw);
    }
    METHOD uint32_t stage(uint32_t i) const {
        return base + i * STAGE_BYTES;
    }
    /* Gate, then up. */
    METHOD uint32_t square(uint32_t number) const {
        return base + STAGES * STAGE_BYTES + number % SQUARES * SQUARE_BYTES;
    }
    /* Of the last tile: where stages were. */
    METHOD uint32_t last_square(uint32_t number) const {
        return base + number * SQUARE_BYTES;
    }
    METHOD const uint8_t *bytes(uint32_t address) const {
        return at + (address - base);
    }
    METHOD uint32_t full(uint32_t stage) const {
        return base + STAGES * STAGE_BYTES + SQUARES * SQUARE_BYTES + 8 * stage;
    }
    METHOD uint32_t empty(uint32_t stage) const {
        return full(STAGES + stage);
    }
    METHOD uint32_t ready(uint32_t square) const {
        return full(2 * STAGES + square % SLOTS);
    }
    METHOD uint32_t free(uint32_t square) const {
        return full(2 * STAGES + SLOTS + square % SLOTS);
    }
};

DEVICE uint32_t parity_of(uint32_t square) {
    return square / SLOTS & 1;
}
DEVICE uint32_t square_number(uint32_t use, uint32_t part, uint32_t group) {
    return use * SQUARES + part * GROUPS + group;
}

DEVICE void barriers_begin(const memory &m) {
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < STAGES; ++i) {
            barrier_init(m.full(i), 1);
            barrier_init(m.empty(i), CLUSTER * GROUPS * (GROUP_THREADS / WARP));
        }
        for (uint32_t i = 0; i < SLOTS; ++i) {
            barrier_init(m.ready(i), GROUP_THREADS / WARP);
            barrier_init(m.free(i), 1);
        }
        barriers_publish();
    }
    block_barrier();
    cluster_sync();
}

struct turn {
    uint32_t stage = 0, parity = 0;
    METHOD void next() {
        if (++stage < STAGES) return;
        stage = 0;
        parity ^= 1;
    }
};

/* --- the warp that loads ----------------------------------------------------------------------------------------- */

DEVICE void tiles_load(const job &j, const memory &m) {
    const uint32_t rank = cluster_rank();
    turn t;
    for (walk at(j); at.index < at.tiles; at.index += at.stride) {
        const place here = at.here(j);
        for (uint32_t step = 0; step < j.steps; ++step, t.next()) {
            const uint32_t stage = m.stage(t.stage), barrier = m.full(t.stage);
            barrier_wait(m.empty(t.stage), t.parity ^ 1);
            barrier_expect(barrier, STAGE_BYTES);
            box_load(stage, &j.x, step * TERMS, here.row, barrier);
            box_load_many(stage + OF_X + rank * COLUMNS * TERMS, &j.w, step * TERMS,
                          here.column + rank * j.planes.columns, barrier, (1 << CLUSTER) - 1);
        }
    }
}

/* --- warps that write -------------------------------------------------------------------------------------------- */

DEVICE void square_store(const job &j, uint32_t from, uint32_t row, uint32_t column) {
    box_store(&j.y, from, column, row);
    box_store(&j.y, from + BOX_BYTES, column + j.planes.columns, row);
}

/* Each takes every third square. Those below the last row are let go. */
DEVICE void squares_write(const job &j, const memory &m, uint32_t writer, uint32_t lane) {
    const float scale = scale_of(j.scale);
    const int32_t seen = j.scale.amax ? load_shared_word(j.scale.amax) : 0;
    float amax = 0.0f;
    for (uint32_t square = writer;; square += WRITERS) {
        walk at(j);
        at.index += square / SQUARES * at.stride;
        if (at.index >= at.tiles || at.is_last()) break;
        const place here = at.here(j);
        const uint32_t row = here.row + square % GROUPS * GROUP_ROWS, from = m.square(square);
        const uint32_t column = here.column + square % SQUARES / GROUPS * BOX_COLUMNS;
        const bool is_inside = row < j.planes.rows;
        lane_codes<4> codes(lane);
        barrier_wait(m.ready(square), parity_of(square));
        if (is_inside && lane == 0) {
            square_store(j, from, row, column);
            stores_commit();
        }
        warp_barrier(0xFFFFFFFFu);
        if (is_inside) amax = codes.make(j.planes, m.bytes(from), row, column, scale, amax);
        warp_barrier(0xFFFFFFFFu);
        if (lane == 0) {
            stores_wait_read();
            barrier_arrive(m.free(square));
        }
        if (is_inside) codes.store(j.planes, row, column);
        warp_barrier(0xFFFFFFFFu);
    }
    record_amax(j.scale.amax, amax, seen);
    if (lane == 0) stores_wait();
}

/* --- groups that multiply ---------------------------------------------------------------------------------------- */

/* One of them: its sums of 64 rows, the gate columns first. */
struct math {
    const job &j;
    const memory &m;
    const uint32_t group, warp, lane;
    turn ahead, behind; /* the stage that comes next, the last one that is still read */
    float sums[2 * COLUMNS / 2];

    METHOD math(const job &j_, const memory &m_, uint32_t group_, uint32_t warp_, uint32_t lane_)
        : j(j_), m(m_), group(group_), warp(warp_), lane(lane_) {}

    METHOD void release() {
        if (lane < CLUSTER) barrier_arrive_at(m.empty(behind.stage), lane);
        behind.next();
    }

    METHOD void multiply() {
#pragma unroll 1
        for (uint32_t step = 0; step < j.steps; ++step) {
            barrier_wait(m.full(ahead.stage), ahead.parity);
            const uint32_t stage = m.stage(ahead.stage);
            const uint64_t x = operand(stage + group * GROUP_ROWS * TERMS), w = operand(stage + OF_X);
            mma_fence();
#pragma unroll
            for (uint32_t k = 0; k < TERMS / 32; ++k) mma_e4m3(sums, x + 2 * k, w + 2 * k, step + k > 0);
            mma_commit();
            ahead.next();
            if (step == 0) continue;
            mma_wait<1>();
            release();
        }
        mma_wait<0>();
        registers_pin(sums);
        release();
    }

    /* Rounds the sums of 64 gate and 64 up columns as cuBLASLt does, and lays them where a square is. */
    METHOD void lay(uint32_t part, float alpha, uint32_t square) const {
        const uint32_t row_at = square + (warp * 16 + lane % 16) * BOX_ROW_BYTES, chunk = lane / 16 ^ lane % 8;
#pragma unroll
        for (uint32_t of = 0; of < 2; ++of)
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const float *s = sums + of * 64 + part * 32 + i * 8;
                uint32_t pairs[4];
#pragma unroll
                for (uint32_t k = 0; k < 4; ++k)
                    pairs[k] = round_bf16_pair(mul(s[2 * k], alpha), mul(s[2 * k + 1], alpha));
                squares_store(row_at + of * BOX_BYTES + ((chunk ^ 2 * i) << 4), pairs);
            }
        shared_publish();
    }

    METHOD void hand_over(uint32_t use, float alpha) const {
#pragma unroll
        for (uint32_t part = 0; part < 2; ++part) {
            const uint32_t square = square_number(use, part, group);
            if (use > 0) barrier_wait(m.free(square - SQUARES), parity_of(square - SQUARES));
            lay(part, alpha, m.square(square));
            warp_barrier(0xFFFFFFFFu);
            if (lane == 0) barrier_arrive(m.ready(square));
        }
    }

    /* Nothing comes behind it: four warps have half a square each. */
    METHOD void finish(const place &here, float alpha) const {
        const uint32_t row = here.row + group * GROUP_ROWS, part = warp / 2, below = warp % 2 * 32;
        threads_sync(1, GROUPS * GROUP_THREADS); /* the other group has read its last stage too */
        lay(0, alpha, m.last_square(group));
        lay(1, alpha, m.last_square(GROUPS + group));
        threads_sync(2 + group, GROUP_THREADS);
        if (row >= j.planes.rows) return;
        const bool sends = warp == 0 && lane == 0;
        if (sends) {
            square_store(j, m.last_square(group), row, here.column);
            square_store(j, m.last_square(GROUPS + group), row, here.column + BOX_COLUMNS);
            stores_commit();
        }
        warp_barrier(0xFFFFFFFFu);
        const int32_t seen = j.scale.amax ? load_shared_word(j.scale.amax) : 0;
        const uint8_t *gate = m.bytes(m.last_square(part * GROUPS + group)) + below * BOX_ROW_BYTES;
        lane_codes<2> codes(lane);
        const float amax = codes.make(j.planes, gate, row + below, here.column + part * BOX_COLUMNS,
                                      scale_of(j.scale), 0.0f);
        codes.store(j.planes, row + below, here.column + part * BOX_COLUMNS);
        record_amax(j.scale.amax, amax, seen);
        if (sends) stores_wait();
    }

    METHOD void run() {
        const float alpha = mul(*j.x_scale, *j.w_scale);
        uint32_t use = 0;
        for (walk at(j); at.index < at.tiles; at.index += at.stride, ++use) {
            multiply();
            if (at.is_last())
                finish(at.here(j), alpha);
            else
                hand_over(use, alpha);
        }
    }
};

KERNEL void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ job j) {
    extern __shared__ uint8_t shared_raw[];
    const memory m(shared_raw);
    const uint32_t warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
    barriers_begin(m);
    if (warp < GROUP_THREADS / WARP) {
        registers_lower<WRITER_REGISTERS>();
        if (warp > 0)
            squares_write(j, m, warp - 1, lane);
        else if (lane == 0)
            tiles_load(j, m);
        if (blockIdx.x == 0 && threadIdx.x == 0) write_words(j.words, scale_of(j.scale));
        warp_barrier(0xFFFFFFFFu);
    } else {
        registers_raise<MATH_REGISTERS>();
        math(j, m, warp / 4 - 1, warp % 4, lane).run();
        warp_barrier(0xFFFFFFFFu);
    }
    cluster_sync(); /* a block that is gone has no barriers to arrive at */
}

} // namespace linear_swiglu

#endif
