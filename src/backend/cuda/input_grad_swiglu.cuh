/* input_grad_swiglu.cuh - an input gradient, swiglu's backward and codes of the gradients of gate and up, in one kernel
 * for Hopper: the gradient of swiglu's result never lies in memory.
 *
 * A block has one multiprocessor and goes from tile to tile of 128 rows by 128 columns. Two blocks in a cluster have
 * rows below each other: each loads its own rows of dy and half of the weights for both. One warp loads; two groups of
 * four warps multiply 64 rows each, round their sums to bf16 and hand them over in shared memory; four warps finish
 * them, 32 rows of a strip of 64 columns at a time, while the next tile is multiplied. A warp that finishes has gate
 * and up of its next rows brought beside. */
#ifndef QE_CUDA_INPUT_GRAD_SWIGLU_CUH
#define QE_CUDA_INPUT_GRAD_SWIGLU_CUH

#include "backend/cuda/input_grad_swiglu_codes.cuh"
#include "backend/cuda/product_sums.cuh"

namespace input_grad_swiglu {

using namespace product_tiles;

constexpr uint32_t COLUMNS = 128; /* of a tile */
constexpr uint32_t THREADS = (1 + GROUPS + 1) * GROUP_THREADS; /* the first group loads, the last one finishes */
constexpr uint32_t FINISHERS = ROWS / UNIT_ROWS;               /* warps: each has a unit's rows in every strip */
constexpr uint32_t HALF_FINISHERS = GROUP_ROWS / UNIT_ROWS;    /* that read what one group hands over */
constexpr uint32_t STRIPS = COLUMNS / STRIP, HALF_BYTES = STRIPS * LAID_BYTES;
static_assert(STRIP == LAID, "what finishes reads what multiplies lays");
constexpr uint32_t STAGES = 4, OF_DY = ROWS * TERMS, STAGE_BYTES = OF_DY + COLUMNS * TERMS;

/* What lies where in shared memory. */
constexpr uint32_t AT_HALVES = STAGES * STAGE_BYTES, AT_RAW = AT_HALVES + GROUPS * HALF_BYTES;
constexpr uint32_t AT_CODES = AT_RAW + FINISHERS * 2 * RAW_BYTES, AT_BARRIERS = AT_CODES + FINISHERS * CODES_BYTES;
constexpr uint32_t BARRIERS = 2 * STAGES + 2 * GROUPS + 2 * FINISHERS;
constexpr uint32_t SHARED_BYTES = ALIGN_BYTES + AT_BARRIERS + 8 * BARRIERS;
static_assert(SHARED_BYTES <= SHARED_MAX, "a block's shared memory");

/* How groups multiply. OVERLAPPED: a thread has sums of two stages, so that one is multiplied while the other is added
 * to the fp32 sums; what it costs is registers of the warps that finish. */
enum way { PLAIN, OVERLAPPED };

/* Registers of a thread, of 128 without a change. */
template <way WAY>
struct registers_of {
    static constexpr uint32_t LOAD = WAY == OVERLAPPED ? 24 : 40;
    static constexpr uint32_t MATH = WAY == OVERLAPPED ? 208 : 168;
    static constexpr uint32_t FINISH = WAY == OVERLAPPED ? 72 : 136;
    static_assert(LOAD + GROUPS * MATH + FINISH == 512, "a multiprocessor's registers");
};

struct job {
    CUtensorMap dy, w;          /* boxes of 128 rows, of half of a tile's columns */
    CUtensorMap gate_up, codes; /* boxes of 64 columns of 16 rows, of 32 rows of codes */
    const float *dy_scale, *w_scale;
    scaling scale;
    tensor_words words;
    code_planes planes;
    uint32_t units, steps; /* columns of the product; stages of a tile */
    tiling tiles;
};

typedef product_tiles::walk<COLUMNS> walk;

/* What a block has in shared memory. */
struct memory : ring<STAGES, STAGE_BYTES, AT_BARRIERS> {
    METHOD explicit memory(uint8_t *bytes) : ring(bytes) {
        asm volatile("" : "+r"(base)); /* computed once, not at each use */
    }
    METHOD uint32_t half(uint32_t group) const {
        return base + AT_HALVES + group * HALF_BYTES;
    }
    METHOD uint32_t raw(uint32_t finisher, uint32_t slot) const {
        return base + AT_RAW + (finisher * 2 + slot) * RAW_BYTES;
    }
    METHOD uint32_t codes(uint32_t finisher) const {
        return base + AT_CODES + finisher * CODES_BYTES;
    }
    METHOD uint8_t *bytes(uint32_t address) const {
        return at + (address - base);
    }
    METHOD uint32_t filled(uint32_t group) const {
        return other(group);
    }
    METHOD uint32_t drained(uint32_t group) const {
        return other(GROUPS + group);
    }
    METHOD uint32_t brought(uint32_t finisher, uint32_t slot) const {
        return other(2 * GROUPS + 2 * finisher + slot);
    }
};

DEVICE void barriers_begin(const memory &m) {
    m.begin(GROUPS, [m] {
        for (uint32_t i = 0; i < GROUPS; ++i) {
            barrier_init(m.filled(i), GROUP_WARPS);
            barrier_init(m.drained(i), HALF_FINISHERS);
        }
        for (uint32_t i = 0; i < 2 * FINISHERS; ++i) barrier_init(m.brought(0, i), 1);
    });
}

/* --- the warp that loads ----------------------------------------------------------------------------------------- */

DEVICE void tiles_load(const job &j, const memory &m) {
    constexpr uint32_t HALF = COLUMNS / CLUSTER;
    memory::turn t;
    for (walk at(j.tiles); !at.is_over(); at.next()) {
        const place here = at.here();
        m.load<HALF * TERMS>(&j.dy, &j.w, here.row, here.column + cluster_rank() * HALF, j.steps, t);
    }
}

/* --- groups that multiply ---------------------------------------------------------------------------------------- */

/* One of them. FORMAT: of dy. */
template <way WAY, int FORMAT>
struct math : multiplier<memory, COLUMNS, FORMAT> {
    using base = multiplier<memory, COLUMNS, FORMAT>;
    using base::group, base::m;

    METHOD math(const memory &m_, uint32_t group_, uint32_t lane_) : base(m_, group_, lane_) {}

    METHOD void run(const job &j) {
        const float alpha = mul(*j.dy_scale, *j.w_scale);
        uint32_t parity = 0;
        for (walk at(j.tiles); !at.is_over(); at.next(), parity ^= 1) {
            float total[base::COUNT];
#pragma unroll
            for (uint32_t i = 0; i < base::COUNT; ++i) total[i] = 0.0f;
            if constexpr (WAY == OVERLAPPED)
                base::stages_sum_overlapped(total, j.steps);
            else
                base::stages_sum(total, j.steps);
            barrier_wait(m.drained(group), parity ^ 1);
            base::lay(total, alpha, m.half(group));
            warp_barrier(0xFFFFFFFFu);
            if (base::lane == 0) barrier_arrive(m.filled(group));
        }
    }
};

/* --- warps that finish ------------------------------------------------------------------------------------------- */

/* One of them: UNIT_ROWS rows of a tile, strip by strip. */
template <int FORMAT>
struct finisher {
    const job &j;
    const memory &m;
    const uint32_t number, group, lane;

    METHOD finisher(const job &j_, const memory &m_, uint32_t number_, uint32_t lane_)
        : j(j_), m(m_), number(number_), group(number_ / HALF_FINISHERS), lane(lane_) {}

    METHOD place unit_of(const place &tile, uint32_t strip) const {
        return place{tile.row + number * UNIT_ROWS, tile.column + strip * STRIP};
    }
    METHOD bool is_inside(const place &unit) const {
        return unit.row < j.planes.rows && unit.column < j.units;
    }
    /* Gate and up of SUB_ROWS rows, zeros where there are none. The whole warp has read what lay there. */
    METHOD void bring(const place &unit, uint32_t slot) const {
        if (lane != 0) return;
        const uint32_t barrier = m.brought(number, slot), to = m.raw(number, slot), row = unit.row + slot * SUB_ROWS;
        barrier_expect(barrier, RAW_BYTES);
        box_load(to, &j.gate_up, unit.column, row, barrier);
        box_load(to + RAW_BYTES / 2, &j.gate_up, unit.column + j.units, row, barrier);
    }
    /* Codes by rows. */
    METHOD void send(const place &unit) const {
        if (lane != 0) return;
        box_store(&j.codes, m.codes(number), unit.column, unit.row);
        box_store(&j.codes, m.codes(number) + BOX_BYTES, unit.column + j.units, unit.row);
        stores_commit();
    }
    /* Both layouts of a unit whose codes lie in shared memory, which is free again then. */
    METHOD void store(const lane_codes<FORMAT> &codes, const place &unit) const {
        send(unit);
        codes.store(j.planes, j.units, unit.row, unit.column);
        if (lane == 0) stores_wait_read();
        warp_barrier(0xFFFFFFFFu);
    }

    /* A tile, whose first unit is being brought; has the next one's brought where there is one. */
    METHOD float tile_finish(const lane_codes<FORMAT> &codes, const place &tile, const place &next, bool is_last,
                             float scale, float amax, uint32_t &parity) const {
        const uint8_t *const dy = m.bytes(m.half(group)) + number % HALF_FINISHERS * UNIT_ROWS * ROW_BYTES;
        const uint8_t *const raw = m.bytes(m.raw(number, 0));
#pragma unroll 1
        for (uint32_t part = 0; part < 2 * STRIPS; ++part) {
            const uint32_t strip = part / 2, slot = part % 2;
            const place unit = unit_of(tile, strip);
            const bool ends = strip + 1 == STRIPS;
            barrier_wait(m.brought(number, slot), parity);
            parity ^= slot;
            if (is_inside(unit))
                amax = codes.make(raw + slot * RAW_BYTES, dy + strip * LAID_BYTES + slot * SUB_ROWS * ROW_BYTES, slot,
                                  scale, amax);
            if (slot == 1) shared_publish();
            warp_barrier(0xFFFFFFFFu);
            if (!ends || !is_last) bring(ends ? unit_of(next, 0) : unit_of(tile, strip + 1), slot);
            if (slot == 0) continue;
            if (ends && lane == 0) barrier_arrive(m.drained(group));
            if (is_inside(unit)) store(codes, unit);
        }
        return amax;
    }

    METHOD void run() const {
        const float scale = scale_of(j.scale);
        const int32_t seen = j.scale.amax ? load_shared_word(j.scale.amax) : 0;
        const lane_codes<FORMAT> codes(lane, m.bytes(m.codes(number)));
        float amax = 0.0f;
        uint32_t parity = 0, brought_parity = 0;
        walk at(j.tiles);
        place tile = {};
        if (!at.is_over()) {
            tile = at.here();
            bring(unit_of(tile, 0), 0);
            bring(unit_of(tile, 0), 1);
        }
        for (; !at.is_over(); parity ^= 1) {
            at.next();
            const bool is_last = at.is_over();
            const place next = is_last ? tile : at.here();
            barrier_wait(m.filled(group), parity);
            amax = tile_finish(codes, tile, next, is_last, scale, amax, brought_parity);
            tile = next;
        }
        record_amax(j.scale.amax, amax, seen);
        if (lane == 0) stores_wait();
    }
};

template <way WAY, int FORMAT>
KERNEL void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ job j) {
    extern __shared__ uint8_t shared_raw[];
    const memory m(shared_raw);
    const uint32_t warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
    const uint32_t group = warp / GROUP_WARPS;
    barriers_begin(m);
    /* Each change of registers stands in front of its own code alone: so the assembler knows how many there are. */
    if (group == 0) {
        registers_lower<registers_of<WAY>::LOAD>();
        if (threadIdx.x == 0) tiles_load(j, m);
        warp_barrier(0xFFFFFFFFu);
    } else if (group <= GROUPS) {
        registers_raise<registers_of<WAY>::MATH>();
        math<WAY, FORMAT>(m, group - 1, lane).run(j);
        warp_barrier(0xFFFFFFFFu); /* whole warps meet the cluster */
    } else {
        if (WAY == OVERLAPPED)
            registers_lower<registers_of<WAY>::FINISH>();
        else
            registers_raise<registers_of<WAY>::FINISH>();
        finisher<FORMAT>(j, m, warp % GROUP_WARPS, lane).run();
        if (blockIdx.x == 0 && threadIdx.x == THREADS - 1) write_words(j.words, scale_of(j.scale));
        warp_barrier(0xFFFFFFFFu);
    }
    cluster_sync(); /* a block that is gone has no barriers to arrive at */
}

} // namespace input_grad_swiglu

#endif
