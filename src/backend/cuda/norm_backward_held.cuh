/* norm_backward_held.cuh - the kernel of norm_backward.cu for many rows, which clusters hold in shared memory. */
#ifndef QE_CUDA_NORM_BACKWARD_HELD_CUH
#define QE_CUDA_NORM_BACKWARD_HELD_CUH

#include "backend/cuda/held.cuh"
#include "backend/cuda/norm_backward.cuh"

/* As many rows as one partial sum of the gain's gradient has. */
enum { BACKWARD_TALL = CLUSTER_ROWS, BACKWARD_HELD_THREADS = HELD_THREADS<CLUSTER_ROWS> };

template <int WIDE>
struct backward_side {
    held_tile<BACKWARD_TALL, WIDE> x, dy; /* then codes; then the gain's sums */
};
template <int WIDE>
struct backward_held {
    backward_side<WIDE> side[WIDE];
    held_sums<BACKWARD_TALL, WIDE> sums;
};
template <int WIDE>
static METHOD backward_held<WIDE> &backward_memory() {
    if constexpr (WIDE == 1)
        return shared_object<backward_held<WIDE>>();
    else
        return shared_large_object<backward_held<WIDE>>();
}

/* What is the same for a thread's rows. */
struct backward_constant {
    float gain[8], scale;
    float rstd_of_lane, mean_of_lane; /* held_lane_of */
};

template <int WIDE>
static METHOD void backward_held_dots(const backward_side<WIDE> &own, const float *gain, float *sums) {
#pragma unroll
    for (int i = 0; i < HELD_ROWS; ++i) {
        float dy[8], x[8];
        unpack8(own.dy.row(i), dy);
        unpack8(own.x.row(i), x);
        sums[i] = backward_dot(dy, x, gain);
    }
}

/* dx and codes of a thread's rows. Returns the amax. */
template <int FORMAT, int WIDE>
static METHOD float backward_held_rows(const norm_backward_job &job, size_t begin, backward_side<WIDE> &own,
                                       const uint4 *residual, const backward_constant &c, float *gain_sums) {
    const uint32_t hidden = job.planes.columns;
    float amax = 0.0f;
#pragma unroll
    for (int group = 0; group < HELD_ROWS / 4; ++group) {
        uint32_t four[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = group * 4 + i;
            const float rstd = shuffle(c.rstd_of_lane, held_lane_of(at));
            const float mean = shuffle(c.mean_of_lane, held_lane_of(at));
            const uint4 words = backward_row(job.residual != nullptr, own.dy.row(at), own.x.row(at), residual[at],
                                             c.gain, rstd, mean, gain_sums);
            store_whole(job.dx + begin + static_cast<size_t>(at) * hidden, words);
            if constexpr (FORMAT == FORMAT_NONE) continue;
            float v[8];
            unpack8(words, v);
            amax = amax_of8(amax, v);
            four[i][0] = encode4<FORMAT>(v, c.scale);
            four[i][1] = encode4<FORMAT>(v + 4, c.scale);
        }
        if constexpr (FORMAT == FORMAT_NONE) continue;
        held_store_rows(job.planes, begin + static_cast<size_t>(group * 4) * hidden, four);
        warp_barrier(0xFFFFFFFFu);
        own.x.put(group, four);
    }
    return amax;
}

/* A thread's sums of eight columns, where its rows of dy stood. */
template <int WIDE>
static METHOD void backward_held_gain(held_tile<BACKWARD_TALL, WIDE> &dy, const float *sums) {
    dy.at[0][dy.own()] = make_uint4(bits_of(sums[0]), bits_of(sums[1]), bits_of(sums[2]), bits_of(sums[3]));
    dy.at[1][dy.own()] = make_uint4(bits_of(sums[4]), bits_of(sums[5]), bits_of(sums[6]), bits_of(sums[7]));
}

/* The sums of the four threads below each other, as a tree. */
template <int WIDE>
static METHOD void backward_held_store_gain(const norm_backward_job &job, const held_tile<BACKWARD_TALL, WIDE> &dy,
                                            uint32_t left) {
    float *to = job.partials + static_cast<size_t>(blockIdx.y) * job.planes.columns + left;
#pragma unroll 1
    for (uint32_t first = 0; first < HELD_COLUMNS; first += BACKWARD_HELD_THREADS) {
        const uint32_t i = first + dy.own();
        const float *sums = reinterpret_cast<const float *>(&dy.at[i / 4 % 2][i / 8]) + i % 4;
        to[i] = tree_sum<BACKWARD_TALL / HELD_ROWS>(sums, WARP * sizeof(uint4) / sizeof(float));
    }
}

/* 768 threads of a multiprocessor: 80 registers each; or one wide block. */
template <int FORMAT, int WIDE>
KERNEL void __launch_bounds__(BACKWARD_HELD_THREADS *WIDE, WIDE == 1 ? 768 / BACKWARD_HELD_THREADS : 1)
    norm_backward_held_kernel(const __grid_constant__ norm_backward_job job) {
    backward_held<WIDE> &shared = backward_memory<WIDE>();
    backward_side<WIDE> &own = shared.side[held_side<BACKWARD_TALL, WIDE>()];
    const uint32_t hidden = job.planes.columns, group = job.first_group + blockIdx.y;
    const held_place place = held_place_of<BACKWARD_TALL, WIDE>(group);
    const size_t begin = place.at(hidden);
#pragma unroll
    for (int i = 0; i < HELD_ROWS; ++i) {
        own.dy.bring(i, job.dy + begin, hidden);
        own.x.bring(i, job.x + begin, hidden);
    }
    shared.sums.begin();
    backward_constant c;
    c.scale = FORMAT == FORMAT_NONE ? 1.0f : scale_of(job.scale);
    held_table(job.gain + place.column, c.gain);
    copies_wait();
    float sums[HELD_ROWS], gain_sums[8] = {};
    backward_held_dots(own, c.gain, sums);
    c.rstd_of_lane = __ldg(job.rstd + place.row + held_row_of_total(threadIdx.x % WARP));
    uint4 residual[HELD_ROWS];
#pragma unroll
    for (int i = 0; i < HELD_ROWS; ++i)
        residual[i] =
            job.residual ? load_once(job.residual + begin + static_cast<size_t>(i) * hidden) : make_uint4(0, 0, 0, 0);
    shared.sums.send(sums);
    c.mean_of_lane = quotient(mul(shared.sums.receive(), c.rstd_of_lane), static_cast<float>(hidden));
    const int32_t seen = FORMAT != FORMAT_NONE && job.scale.amax ? load_shared_word(job.scale.amax) : 0;
    const float amax = backward_held_rows<FORMAT>(job, begin, own, residual, c, gain_sums);
    backward_held_gain(own.dy, gain_sums);
    if constexpr (FORMAT != FORMAT_NONE) {
        record_amax(job.scale.amax, amax, seen);
        if (blockIdx.x == 0 && group == 0 && threadIdx.x == 0) write_words(job.words, c.scale);
    }
    held_meet<BACKWARD_TALL, WIDE>();
    if (job.partials) backward_held_store_gain(job, own.dy, place.left);
    if (FORMAT != FORMAT_NONE && job.planes.by_columns) own.x.store(job.planes, place);
}

#endif
