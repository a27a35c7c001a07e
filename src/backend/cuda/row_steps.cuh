/* row_steps.cuh - the sums of row_sums.cuh for rows that lie in shared memory, a few rows at a time: while the sums of
 * one step travel through the cluster, the rows of the step before are finished and stored.
 *
 * A cluster takes 32 rows of all columns. A thread has ROWS rows of eight columns and copies them into its own places
 * of shared memory, all at once; a step is four rows of each thread. The order of a sum is that of row_sums.cuh.
 *
 *   begin -> send step 0 -> send step 1 -> receive step 0 -> ... */
#ifndef QE_CUDA_ROW_STEPS_CUH
#define QE_CUDA_ROW_STEPS_CUH

#include "backend/cuda/row_sums.cuh"
#include "backend/cuda/tile.cuh"

enum { STEP_ROWS = 4, STEP_THREADS_MAX = 256, STEP_NEAR = 4 };

/* Where the threads of a cluster stand. */
template <int ROWS>
struct step_shape {
    typedef lane_place<ROWS, STEP_NEAR> place;
    static constexpr int BELOW = CLUSTER_ROWS / ROWS, STEPS = ROWS / STEP_ROWS;
    static constexpr uint32_t COUNT = BELOW * STEP_ROWS; /* rows of a step */

    static METHOD uint32_t column() {
        const uint32_t warps = blockDim.x / WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        return ((blockIdx.x * warps + warp) * ROWS + place::across(lane)) * 8;
    }
    static METHOD uint32_t row() { /* the first of the thread's rows, of 32 */
        return place::below(threadIdx.x % WARP) * ROWS;
    }
    /* Row `number` of a step, of 32. */
    static METHOD uint32_t row_of(uint32_t step, uint32_t number) {
        return number / STEP_ROWS * ROWS + step * STEP_ROWS + number % STEP_ROWS;
    }
};

struct step_shared {
    float part[STEP_THREADS_MAX / WARP][CLUSTER_ROWS];
    float total[CLUSTER_BLOCKS_MAX][CLUSTER_ROWS]; /* of every block of the cluster; written by them */
    mailbox box[CLUSTER_ROWS / STEP_ROWS]; /* one per step: counts what they write */
};

DEVICE float step_warps_sum(const float *at, uint32_t warps) {
    if (warps == 8) return tree_sum<8>(at, CLUSTER_ROWS);
    if (warps == 4) return tree_sum<4>(at, CLUSTER_ROWS);
    return warps == 2 ? tree_sum<2>(at, CLUSTER_ROWS) : *at;
}

/* First thing in the kernel, as row_sums_begin. */
template <int ROWS>
static METHOD void steps_begin(step_shared &shared) {
    typedef step_shape<ROWS> shape;
    if (threadIdx.x == 0) {
        for (int step = 0; step < shape::STEPS; ++step) {
            mailbox_open(&shared.box[step]);
            mailbox_arm(&shared.box[step], cluster_size() * shape::COUNT * sizeof(float));
        }
    }
    for (uint32_t i = threadIdx.x; i < CLUSTER_BLOCKS_MAX * CLUSTER_ROWS; i += blockDim.x)
        if (i / CLUSTER_ROWS >= cluster_size()) shared.total[i / CLUSTER_ROWS][i % CLUSTER_ROWS] = 0.0f;
    warp_barrier(0xFFFFFFFFu);
    cluster_arrive();
}

/* Sends this block's part of the sums of a step to every block. sums: of the thread's rows of the step; destroyed. */
template <int ROWS>
static METHOD void step_send(step_shared &shared, float *sums, uint32_t step) {
    typedef step_shape<ROWS> shape;
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    float sum = spread_sum<STEP_ROWS>(sums, lane);
#pragma unroll
    for (int mask = STEP_NEAR * shape::BELOW; mask < WARP; mask *= 2) sum = add(sum, shuffle_xor(sum, mask));
    if (lane < shape::COUNT)
        shared.part[warp][shape::row_of(step, lane / STEP_ROWS * STEP_ROWS + spread_index<STEP_ROWS>(lane))] = sum;
    block_barrier();
    if (step == 0) cluster_wait();
    const uint32_t row = shape::row_of(step, lane % shape::COUNT);
    for (uint32_t rank = warp; rank < cluster_size(); rank += warps) {
        if (lane >= shape::COUNT) continue;
        mailbox_send(&shared.total[cluster_rank()][row], &shared.box[step], rank,
                     step_warps_sum(&shared.part[0][row], warps));
    }
}

/* Lane i of every warp gets the sum of row i of the step, i modulo their count. */
template <int ROWS>
static METHOD float step_receive(step_shared &shared, uint32_t step) {
    typedef step_shape<ROWS> shape;
    mailbox_wait(&shared.box[step], 0);
    const uint32_t row = shape::row_of(step, threadIdx.x % shape::COUNT);
    /* Not -0, which the zeros of a cluster of fewer blocks would have made 0. */
    return add(tree_sum<CLUSTER_BLOCKS_MAX>(&shared.total[0][row], CLUSTER_ROWS), 0.0f);
}

/* Waits for group `step` of the `most` + 1 that were closed: unrolled, so `step` is a constant. */
template <int MOST>
static METHOD void copy_wait_for(int step) {
    switch (MOST - step) {
        case 0: return copy_wait<0>();
        case 1: return copy_wait<1>();
        case 2: return copy_wait<2>();
        case 3: return copy_wait<3>();
        case 4: return copy_wait<4>();
        case 5: return copy_wait<5>();
        case 6: return copy_wait<6>();
        default: return copy_wait<7>();
    }
}

DEVICE void load_gain(const float *gain, uint32_t column, bool inside, float *v) {
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float4 low = inside ? load_table(gain + column) : zero, high = inside ? load_table(gain + column + 4) : zero;
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}

/* Blocks of a cluster; 0: too many. */
template <int ROWS>
static inline uint32_t step_blocks(uint32_t hidden, uint32_t threads) {
    const uint32_t wide = threads / (CLUSTER_ROWS / ROWS) * 8, blocks = (hidden + wide - 1) / wide;
    return blocks <= CLUSTER_BLOCKS_MAX ? blocks : 0;
}

#endif
