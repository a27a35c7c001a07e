/* product_tiles.cuh - what products of ours for Hopper share: a block has one multiprocessor and goes from tile to
 * tile; two blocks in a cluster have rows below each other, and each loads its own rows of the first operand and half
 * of the second for both; stages go round in a ring at the beginning of a block's shared memory. */
#ifndef QE_CUDA_PRODUCT_TILES_CUH
#define QE_CUDA_PRODUCT_TILES_CUH

#include "backend/cuda/sm90_stream.cuh"
#include "backend/cuda/tile.cuh"

namespace product_tiles {

using namespace sm90;

constexpr uint32_t CLUSTER = 2;                                    /* blocks */
constexpr uint32_t ROWS = 128, TERMS = 128;                        /* of a tile; of a stage */
constexpr uint32_t GROUPS = 2, GROUP_WARPS = GROUP_THREADS / WARP; /* that multiply */
constexpr uint32_t GROUP_ROWS = 64;                                /* that four warps multiply at a time */
constexpr uint32_t ALIGN_BYTES = 1024;                             /* the swizzle's */
constexpr uint32_t SHARED_MAX = 227 * 1024;                        /* bytes of a block */

struct place {
    uint32_t row, column;
};

/* Tiles of a cluster: how many there are, and how many are gone through from top to bottom before the next column. */
struct tiling {
    uint32_t down, across, band;
};
/* One of them, counted from the first. */
struct cell {
    uint32_t over, along; /* down, across */
};

/* Where a block is in its work, of tiles so many columns wide. every, first: it takes every n-th of its tiles. */
template <uint32_t COLUMNS>
struct walk {
    uint32_t index, stride;
    const tiling &of;

    METHOD explicit walk(const tiling &of_, uint32_t every = 1, uint32_t first = 0)
        : index(blockIdx.x / CLUSTER + first * (gridDim.x / CLUSTER)), stride(every * (gridDim.x / CLUSTER)), of(of_) {}
    METHOD bool is_over() const {
        return index >= of.down * of.across;
    }
    METHOD void next() {
        index += stride;
    }
    METHOD cell cell_here() const {
        const uint32_t panel = index / (of.band * of.across), within = index % (of.band * of.across);
        const uint32_t left = of.down - panel * of.band, high = left < of.band ? left : of.band;
        return cell{panel * of.band + within % high, within / high};
    }
    METHOD place here() const {
        const cell at = cell_here();
        return place{(at.over * CLUSTER + cluster_rank()) * ROWS, at.along * COLUMNS};
    }
};

/* Stage number `number` since the beginning. */
template <uint32_t STAGES>
struct turn {
    uint32_t stage, parity;
    METHOD explicit turn(uint32_t number = 0) : stage(number % STAGES), parity(number / STAGES & 1) {}
    METHOD void next() {
        if (++stage < STAGES) return;
        stage = 0;
        parity ^= 1;
    }
};

/* A block's shared memory: stages, what else a kernel has there, from AT_BARRIERS on barriers: those of the ring, then
 * others. */
template <uint32_t STAGES, uint32_t STAGE_BYTES, uint32_t AT_BARRIERS>
struct ring {
    static constexpr uint32_t COUNT = STAGES, BYTES = STAGE_BYTES;
    typedef product_tiles::turn<STAGES> turn;
    uint8_t *at;
    uint32_t base;

    METHOD explicit ring(uint8_t *bytes) {
        const uint32_t raw = shared_address(bytes);
        base = (raw + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
        at = bytes + (base - raw);
    }
    METHOD uint32_t stage(uint32_t i) const {
        return base + i * STAGE_BYTES;
    }
    METHOD uint32_t full(uint32_t stage) const {
        return base + AT_BARRIERS + 8 * stage;
    }
    METHOD uint32_t empty(uint32_t stage) const {
        return full(STAGES + stage);
    }
    METHOD uint32_t other(uint32_t barrier) const {
        return full(2 * STAGES + barrier);
    }
    struct nothing {
        template <typename... Any>
        METHOD void operator()(Any...) const {}
    };
    /* By all threads of a cluster, before any other use. groups: of this block that read a stage. others(): begins the
     * barriers that are not of stages, by one thread. */
    template <typename Others = nothing>
    METHOD void begin(uint32_t groups, Others others = nothing()) const {
        if (threadIdx.x == 0) {
            for (uint32_t i = 0; i < STAGES; ++i) {
                barrier_init(full(i), 1);
                barrier_init(empty(i), CLUSTER * groups * GROUP_WARPS);
            }
            others();
            barriers_publish();
        }
        block_barrier();
        cluster_sync();
    }
    /* By one thread: a tile's stages. row: of the first operand; second_row: of the half that this block brings both;
     * SECOND_BYTES of it in a stage. besides(step): what else is asked for with each. */
    template <uint32_t SECOND_BYTES, typename Besides = nothing>
    METHOD void load(const CUtensorMap *first, const CUtensorMap *second, uint32_t row, uint32_t second_row,
                     uint32_t steps, turn &t, Besides besides = nothing()) const {
        const uint32_t second_at = ROWS * TERMS + cluster_rank() * SECOND_BYTES;
#pragma unroll 1
        for (uint32_t step = 0; step < steps; ++step, t.next()) {
            const uint32_t to = stage(t.stage), barrier = full(t.stage);
            barrier_wait(empty(t.stage), t.parity ^ 1);
            barrier_expect(barrier, STAGE_BYTES);
            box_load(to, first, step * TERMS, row, barrier);
            box_load_many(to + second_at, second, step * TERMS, second_row, barrier, (1 << CLUSTER) - 1);
            besides(step);
        }
    }
};

} // namespace product_tiles

#endif
