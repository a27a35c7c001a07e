/* linear_rope.cuh - heads of queries, keys and values of a product of E4M3 codes, queries and keys rotated, in one
 * kernel for Hopper.
 *
 * A block has one multiprocessor and goes from tile to tile of 128 rows by 128 pairs: columns of halves of heads, which
 * rope turns with those half a head further. Two blocks in a cluster have rows below each other: each loads its own
 * rows of x and half of the weights, lower or upper halves of heads, for both. One warp loads. Two groups of four warps
 * multiply 64 rows each, in one chain of additions over all terms; they round a tile's sums to bf16 at its end, and
 * turn and store them while they multiply the next one's. Rows of the weights are loaded in such an order that a thread
 * has eight neighbouring pairs of a row: it reads their angles, and writes them, 16 bytes at a time. What lies beyond
 * the last row or column is computed and not stored. */
#ifndef QE_CUDA_LINEAR_ROPE_CUH
#define QE_CUDA_LINEAR_ROPE_CUH

#include "backend/cuda/product_tiles.cuh"
#include "backend/cuda/source.cuh"

namespace linear_rope {

using namespace product_tiles;

constexpr uint32_t PAIRS = 128, COLUMNS = 2 * PAIRS;       /* of a tile */
constexpr uint32_t THREADS = (1 + GROUPS) * GROUP_THREADS; /* the first group loads */
constexpr uint32_t STAGES = 4, OF_X = ROWS * TERMS, STAGE_BYTES = OF_X + COLUMNS * TERMS;
constexpr uint32_t AT_BARRIERS = STAGES * STAGE_BYTES;
constexpr uint32_t SHARED_BYTES = ALIGN_BYTES + AT_BARRIERS + 8 * 2 * STAGES;
static_assert(SHARED_BYTES <= SHARED_MAX, "a block's shared memory");
/* Of a thread: of the group that loads, of those that multiply; 168 each without a change. */
constexpr uint32_t LOADER_REGISTERS = 24, MATH_REGISTERS = 240;

/* Weights come in boxes of so many rows, all of one half of a head. In a box row 2 p + e + 8 g is the one that lies at
 * 8 p + 2 g + e, e < 2, p < 4 and g < 4: a thread's sums of the matrix unit are then of eight neighbours. */
constexpr uint32_t BOX = 32, BOXES = PAIRS / BOX, PAIR = 2, QUAD = 4, EIGHT = 8;
static_assert(PAIR * QUAD * QUAD == BOX && PAIR * QUAD == EIGHT, "all rows of a box");

/* What a thread turns at a time: eight pairs of a row, PIECES of a tile, spread over the next one's stages: at least as
 * many. */
constexpr uint32_t PIECES = 2 * BOXES, IN_MIN = PIECES * TERMS;

struct job {
    CUtensorMap x, w; /* boxes of 128 rows; of 32, in their order, at a multiple of 32 */
    const float *x_scale, *w_scale, *cosine, *sine;
    uint16_t *y;
    uint32_t rows, columns, sequence;
    uint32_t half, turned; /* pairs of a head: a power of two, from 32 on; of all heads that are rotated */
    uint32_t steps, apart; /* stages of a tile; from one piece to the next */
    tiling tiles;
};

typedef product_tiles::walk<PAIRS> walk;
typedef product_tiles::turn<STAGES> turn;
typedef ring<STAGES, STAGE_BYTES, AT_BARRIERS> memory;

/* The pair's first column; the second is half a head further. */
DEVICE uint32_t column_of(const job &j, uint32_t pair) {
    return pair + pair / j.half * j.half;
}

/* --- the warp that loads ----------------------------------------------------------------------------------------- */

DEVICE void stage_load(const job &j, const memory &m, const turn &t, uint32_t term, uint32_t row,
                       const uint32_t (&boxes)[BOXES]) {
    const uint32_t to = m.stage(t.stage), barrier = m.full(t.stage), half = to + OF_X + cluster_rank() * PAIRS * TERMS;
    barrier_wait(m.empty(t.stage), t.parity ^ 1);
    barrier_expect(barrier, STAGE_BYTES);
    box_load(to, &j.x, term, row, barrier);
#pragma unroll
    for (uint32_t i = 0; i < BOXES; ++i)
        box_load_many_5(half + i * BOX * TERMS, &j.w, term, boxes[i], barrier, (1 << CLUSTER) - 1);
}

DEVICE void tiles_load(const job &j, const memory &m) {
    turn t;
    for (walk at(j.tiles); !at.is_over(); at.next()) {
        const place here = at.here();
        uint32_t boxes[BOXES];
#pragma unroll
        for (uint32_t i = 0; i < BOXES; ++i)
            boxes[i] = (column_of(j, here.column + i * BOX) + cluster_rank() * j.half) / BOX;
#pragma unroll 1
        for (uint32_t step = 0; step < j.steps; ++step, t.next()) stage_load(j, m, t, step * TERMS, here.row, boxes);
    }
}

/* --- groups that multiply ---------------------------------------------------------------------------------------- */

struct math {
    const job &j;
    const memory &m;
    const uint32_t lane, first_row; /* of a tile, the upper one of this thread's two rows */
    const uint64_t x_offset;        /* of the group's rows, as operands count */
    turn ahead, behind;             /* stages that are multiplied next; that are done next */
    float sums[PAIRS];              /* of the lower columns of pairs, then of the upper */
    uint32_t made[PAIRS / 2];       /* the tile before, as bf16 */
    place before;
    rope_turn angles; /* of the piece that is turned next */

    METHOD math(const job &j_, const memory &m_, uint32_t group, uint32_t warp, uint32_t lane_)
        : j(j_), m(m_), lane(lane_), first_row(group * GROUP_ROWS + warp * 16 + lane_ / 4),
          x_offset(group * GROUP_ROWS * TERMS / 16) {}

    METHOD void stage_begin(bool adds) {
        barrier_wait(m.full(ahead.stage), ahead.parity);
        const uint64_t x = operand(m.stage(ahead.stage)) + x_offset, w = operand(m.stage(ahead.stage) + OF_X);
        mma_fence();
#pragma unroll
        for (uint32_t k = 0; k < TERMS / 32; ++k) mma_e4m3(sums, x + 2 * k, w + 2 * k, adds || k > 0);
        mma_commit();
        ahead.next();
    }
    /* Of the one before the last that was begun. */
    METHOD void stage_end() {
        mma_wait<1>();
        stage_release();
    }
    METHOD void stage_release() {
        if (lane < CLUSTER) barrier_arrive_at(m.empty(behind.stage), lane);
        behind.next();
    }

    /* Pieces of boxes 0, 2, 0, 2, 1, 3, 1, 3, of the upper row, upper, lower, lower, ...: of heads of 64 and 128 two
     * that follow each other have the same angles. */
    static METHOD uint32_t box_of(uint32_t piece) {
        return piece / 4 + piece % 2 * 2;
    }
    static METHOD uint32_t below_of(uint32_t piece) {
        return piece / 2 % 2;
    }
    METHOD uint32_t row_of(uint32_t piece) const {
        return before.row + first_row + below_of(piece) * 8;
    }
    /* Of this thread's eight. */
    METHOD uint32_t pair_of(uint32_t piece) const {
        return before.column + box_of(piece) * BOX + lane % 4 * EIGHT;
    }

    METHOD void angles_load(uint32_t piece) {
        if (pair_of(piece) >= j.turned) return;
        const size_t at = static_cast<size_t>(row_of(piece) % j.sequence) * j.half + (pair_of(piece) & (j.half - 1));
        angles = rope_turn_here(j.cosine + at, j.sine + at);
    }
    /* The next piece's angles are asked for as soon as these are no longer needed. */
    METHOD void piece_write(uint32_t piece) {
        const uint32_t *a = made + box_of(piece) * EIGHT + below_of(piece), *b = a + PAIRS / 4;
        uint4 lower = make_uint4(a[0], a[2], a[4], a[6]), upper = make_uint4(b[0], b[2], b[4], b[6]);
        if (pair_of(piece) < j.turned) {
            float v[2][EIGHT];
            unpack8(lower, v[0]);
            unpack8(upper, v[1]);
            rope_apply(angles, v[0], v[1]);
            lower = pack8(v[0]), upper = pack8(v[1]);
        }
        const bool is_shared = piece % 2 == 0 && j.half <= 2 * BOX;
        if (piece + 1 < PIECES && !is_shared) angles_load(piece + 1);
        const uint32_t column = column_of(j, pair_of(piece));
        if (row_of(piece) < j.rows && column < j.columns) {
            uint16_t *to = j.y + static_cast<size_t>(row_of(piece)) * j.columns + column;
            *reinterpret_cast<uint4 *>(to) = lower;
            *reinterpret_cast<uint4 *>(to + j.half) = upper;
        }
    }

    /* One tile's sums, while what the tile before left is turned. */
    METHOD void multiply(bool has_before) {
#pragma unroll
        for (uint32_t piece = 0; piece < PIECES; ++piece) {
            stage_begin(piece > 0);
            if (has_before) piece_write(piece);
            if (piece > 0) stage_end();
            stages(j.apart - 1);
        }
        stages(j.steps - PIECES * j.apart);
    }
    METHOD void stages(uint32_t count) {
#pragma unroll 1
        for (uint32_t i = 0; i < count; ++i) {
            stage_begin(true);
            stage_end();
        }
    }
    METHOD void round(float alpha) {
        mma_wait<0>();
        registers_pin(sums);
        stage_release();
#pragma unroll
        for (uint32_t i = 0; i < PAIRS / 2; ++i)
            made[i] = round_bf16_pair(mul(sums[2 * i], alpha), mul(sums[2 * i + 1], alpha));
    }

    METHOD void run() {
        const float alpha = mul(*j.x_scale, *j.w_scale);
        bool has_before = false;
        for (walk at(j.tiles); !at.is_over(); at.next(), has_before = true) {
            multiply(has_before);
            before = at.here();
            angles_load(0);
            round(alpha);
        }
#pragma unroll
        for (uint32_t piece = 0; piece < PIECES; ++piece) piece_write(piece);
    }
};

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
        math(j, m, warp / GROUP_WARPS - 1, warp % GROUP_WARPS, lane).run();
    }
    cluster_sync(); /* a block that is gone has no barriers to arrive at */
}

} // namespace linear_rope

#endif
