/* row_sums.cuh - sums along rows that a cluster of blocks holds in registers, so that a row is read once.
 *
 * A cluster takes 32 rows of all columns. A thread has ROWS rows of eight columns, a warp 32 / ROWS threads below each
 * other and ROWS side by side; warps and blocks stand side by side, `warps` a power of two. The order of a sum: eight
 * neighbours in order, with fused multiply-adds, then a binary tree over these eights, filled up on the right with
 * zeros that change nothing. It depends on the width of a row alone, not on how threads are cut.
 *
 *   begin -> send -> receive, once per kernel */
#ifndef QE_CUDA_ROW_SUMS_CUH
#define QE_CUDA_ROW_SUMS_CUH

#include "backend/cuda/codec.cuh"

enum { CLUSTER_ROWS = 32, CLUSTER_BLOCKS_MAX = 8, CLUSTER_WARPS_MIN = 4, CLUSTER_WARPS_MAX = 16 };

/* The zero that leaves every sum as it is: 0 would turn a sum of -0 into 0. */
static const float NEUTRAL = -0.0f;

struct row_shared {
    float part[CLUSTER_WARPS_MAX][CLUSTER_ROWS];
    float total[CLUSTER_BLOCKS_MAX][CLUSTER_ROWS]; /* of every block of the cluster; written by them */
    mailbox box; /* counts what they write */
};

/* Threads of a block and blocks of a cluster for rows of this width; blocks = 0: too wide. */
struct cluster_shape {
    uint32_t warps, blocks;
};

template <int ROWS>
static inline cluster_shape cluster_shape_of(uint32_t hidden) {
    cluster_shape shape = {};
    for (shape.warps = CLUSTER_WARPS_MIN; shape.warps <= CLUSTER_WARPS_MAX; shape.warps *= 2) {
        shape.blocks = (hidden + shape.warps * ROWS * 8 - 1) / (shape.warps * ROWS * 8);
        if (shape.blocks <= CLUSTER_BLOCKS_MAX) return shape;
    }
    shape.blocks = 0;
    return shape;
}

/* N values in each of N neighbouring lanes: lane i gets the sum over these lanes of value reversed(i). Lanes meet their
 * neighbours first, so sums form the tree above. */
template <int N>
static METHOD float spread_sum(float *sums, uint32_t lane) {
#pragma unroll
    for (int step = 1, width = N / 2; step < N; step *= 2, width /= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            if (i >= width) continue;
            const float keep = upper ? sums[i + width] : sums[i];
            const float give = upper ? sums[i] : sums[i + width];
            sums[i] = add(keep, shuffle_xor(give, step));
        }
    }
    return sums[0];
}

/* The value that spread_sum leaves in a lane: the bits of its number the other way round. */
template <int N>
static METHOD uint32_t spread_index(uint32_t lane) {
    uint32_t index = 0;
#pragma unroll
    for (int step = 1, width = N / 2; step < N; step *= 2, width /= 2) index += lane & step ? width : 0;
    return index;
}

template <int N>
static METHOD float tree_sum(const float *at, int stride) {
    if constexpr (N == 1)
        return *at;
    else
        return add(tree_sum<N / 2>(at, stride), tree_sum<N / 2>(at + N / 2 * stride, stride));
}

DEVICE float warps_sum(const float *at, uint32_t warps) {
    if (warps == 4) return tree_sum<4>(at, CLUSTER_ROWS);
    if (warps == 8) return tree_sum<8>(at, CLUSTER_ROWS);
    return tree_sum<16>(at, CLUSTER_ROWS);
}

/* First thing in the kernel: from here on others may write to this block. NEUTRAL where the cluster has no block: seen
 * by all after the barrier in send. */
DEVICE void row_sums_begin(row_shared &shared) {
    if (threadIdx.x == 0) {
        mailbox_open(&shared.box);
        mailbox_arm(&shared.box, cluster_size() * CLUSTER_ROWS * sizeof(float));
    }
    for (uint32_t i = threadIdx.x; i < CLUSTER_BLOCKS_MAX * CLUSTER_ROWS; i += blockDim.x)
        if (i / CLUSTER_ROWS >= cluster_size()) shared.total[i / CLUSTER_ROWS][i % CLUSTER_ROWS] = NEUTRAL;
    warp_barrier(0xFFFFFFFFu);
    cluster_arrive();
}

/* Sends this block's part of the 32 sums to every block. sums: of this thread's ROWS rows; destroyed. */
template <int ROWS>
static METHOD void row_sums_send(row_shared &shared, float *sums) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const float sum = spread_sum<ROWS>(sums, lane);
    shared.part[warp][lane / ROWS * ROWS + spread_index<ROWS>(lane)] = sum;
    block_barrier();
    const float total = warps_sum(&shared.part[0][lane], warps);
    cluster_wait();
    for (uint32_t rank = warp; rank < cluster_size(); rank += warps)
        mailbox_send(&shared.total[cluster_rank()][lane], &shared.box, rank, total);
}

/* Lane i of every warp gets the sum of row i of the 32. */
DEVICE float row_sums_receive(row_shared &shared) {
    mailbox_wait(&shared.box, 0);
    return tree_sum<CLUSTER_BLOCKS_MAX>(&shared.total[0][threadIdx.x % 32], CLUSTER_ROWS);
}

#endif
