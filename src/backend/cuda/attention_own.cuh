/* attention_own.cuh - what the three kernels of attention's backward agree on: how work is cut, how what they hand on
 * lies, and the scale of sums in integers.
 *
 * A tile of sums is 64 x 64 in squares of 8 x 8, row by row of squares: a warp's store of one pair of registers. */
#ifndef QE_CUDA_ATTENTION_OWN_CUH
#define QE_CUDA_ATTENTION_OWN_CUH

#include "backend/cuda/sm90.cuh"

namespace attention {

constexpr uint32_t ROWS = 64;             /* of a tile, of a group of statistics */
constexpr uint32_t KEYS = 2 * ROWS;       /* of a block of keys: each of two groups of warps has half of them */
constexpr uint32_t TILE_WORDS = ROWS * 64;
/* Of ROWS queries: log-sum-exp in powers of two and mean, negative both, norm of dO. */
constexpr uint32_t STATS = 3 * ROWS;
enum stat : uint32_t { STAT_LSE = 0, STAT_MEAN = ROWS, STAT_NORM = 2 * ROWS };

/* Queries that are done at a time. */
template <uint32_t DIM>
constexpr uint32_t QUERIES = DIM == 128 ? 64 : 128;

struct shape {
    uint32_t sequences, sequence, heads, kv_heads;
    uint32_t groups;     /* of ROWS queries of a sequence, filled up to whole blocks of queries */
    uint32_t key_blocks; /* of a sequence */
    uint32_t splits;     /* parts of a group of heads; each makes a part of the gradients of keys and values */
    uint32_t parts;      /* that are handed on; 1: none, they are whole: two are added where they are made */
    uint32_t wave_heads; /* of keys, of all sequences, that blocks are begun for together: no result depends on it */
    uint32_t row, out_row; /* elements from a token to the next */

    METHOD uint32_t peak_at(uint32_t s, uint32_t kv_head) const {
        return s * kv_heads + kv_head;
    }
    METHOD uint32_t stats_at(uint32_t s, uint32_t head, uint32_t group) const {
        return ((s * heads + head) * groups + group) * STATS;
    }
    METHOD uint32_t peaks_at(uint32_t s, uint32_t kv_head, uint32_t group) const {
        return ((s * kv_heads + kv_head) * groups + group) * 2;
    }
    /* Tile of sums of ROWS queries; DIM / 64 of them lie together. */
    METHOD uint64_t sums_at(uint32_t s, uint32_t head, uint32_t group, uint32_t dim) const {
        return static_cast<uint64_t>((s * heads + head) * groups + group) * ROWS * dim;
    }
    /* Words of one group of warps' part: of keys (0) or values (1), half of the block of keys. */
    METHOD uint64_t part_at(uint32_t split, uint32_t s, uint32_t kv_head, uint32_t block, uint32_t which,
                            uint32_t half, uint32_t dim) const {
        const uint32_t item = ((split * sequences + s) * kv_heads + kv_head) * key_blocks + block;
        return (static_cast<uint64_t>(item) * 4 + which * 2 + half) * ROWS * dim;
    }
};

/* Words before row `row`, columns from `column` on, of a tile of sums; both are multiples of eight, or row is any. */
DEVICE uint32_t square_at(uint32_t row, uint32_t column) {
    return (row / 8 * 8 + column / 8) * 64 + row % 8 * 8;
}

/* Two sums are one word of 64 bits, so that one addition does both: what the lower carries or borrows goes into the
 * upper, and comes out again when they are taken apart. */
DEVICE uint64_t pair_of(int32_t low, int32_t high) {
    return static_cast<uint64_t>(static_cast<uint32_t>(high + (low >> 31))) << 32 | static_cast<uint32_t>(low);
}
DEVICE int32_t upper_of(int32_t low, int32_t high) {
    return high - (low >> 31);
}

/* The largest |K_j| |V_j| that any pair of keys could have: every lane of a warp gets it. NaN stays. */
DEVICE float peak_of(const float *peaks, const shape &of, uint32_t s, uint32_t kv_head) {
    const float *here = peaks + of.peaks_at(s, kv_head, 0);
    uint32_t keys = 0, values = 0; /* numbers that are not negative are ordered as their bits are; NaN comes last */
    for (uint32_t i = threadIdx.x % 32; i < of.groups; i += 32) {
        keys = max(keys, bits_of(here[2 * i]));
        values = max(values, bits_of(here[2 * i + 1]));
    }
    keys = __reduce_max_sync(0xFFFFFFFFu, keys);
    values = __reduce_max_sync(0xFFFFFFFFu, values);
    return mul(root(float_of(keys)), root(float_of(values)));
}

/* Sums of one query are kept as integers, times a power of two. With weights P_j whose sum is 1,
 * sum |dS_j| = sum P_j |dP_j - mean dP| <= deviation of dP <= max |dP_j|, so no sum of dS_j K_j, over any keys, is
 * larger than norm peak < 2^(e + 1), e its exponent. Times 2^(29 - e) that is 2^30: a factor of two is left for what
 * roundings add. Bounds below 2^-97 count as that. Exponents are biased by 127. */
DEVICE uint32_t bound_exponent(float norm, float peak) {
    return max(bits_of(mul(norm, peak)) >> 23 & 0xFFu, 30u);
}
DEVICE float sum_scale(float norm, float peak) {
    return float_of((283u - bound_exponent(norm, peak)) << 23);
}
/* NaN where the bound is no number: then the sums mean nothing. */
DEVICE float sum_unscale(float norm, float peak) {
    const uint32_t e = bound_exponent(norm, peak);
    return e == 255u ? float_of(0x7FC00000u) : float_of((e - 29u) << 23);
}

} // namespace attention

#endif
