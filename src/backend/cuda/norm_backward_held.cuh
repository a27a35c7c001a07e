/* norm_backward_held.cuh - the kernel of norm_backward.cu for many rows, which clusters hold in shared memory. */
#ifndef QE_CUDA_NORM_BACKWARD_HELD_CUH
#define QE_CUDA_NORM_BACKWARD_HELD_CUH

#include "backend/cuda/held.cuh"
#include "backend/cuda/norm_backward.cuh"

/* As many rows as one partial sum of the gain's gradient has. */
enum { BACKWARD_TALL = CLUSTER_ROWS, BACKWARD_HELD_THREADS = HELD_THREADS<CLUSTER_ROWS> };

struct backward_held {
    held_tile<BACKWARD_TALL> x, dy; /* then codes; then the gain's sums */
    held_sums<BACKWARD_TALL> sums;
};

/* What is the same for a thread's rows. */
struct backward_constant {
    float gain[8], scale;
    float rstd_of_lane, mean_of_lane; /* held_lane_of */
};

static METHOD void backward_held_dots(const backward_held &shared, const float *gain, float *sums) {
#pragma unroll
    for (int i = 0; i < HELD_ROWS; ++i) {
        float dy[8], x[8];
        unpack8(shared.dy.row(i), dy);
        unpack8(shared.x.row(i), x);
        sums[i] = backward_dot(dy, x, gain);
    }
}

/* dx and codes of a thread's rows. Returns the amax. */
template <int FORMAT>
static METHOD float backward_held_rows(const norm_backward_job &job, size_t begin, backward_held &shared,
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
            const uint4 words = backward_row(job.residual != nullptr, shared.dy.row(at), shared.x.row(at), residual[at],
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
        shared.x.put(group, four);
    }
    return amax;
}

/* A thread's sums of eight columns, where its rows of dy stood. */
static METHOD void backward_held_gain(backward_held &shared, const float *sums) {
    shared.dy.at[0][threadIdx.x] = make_uint4(bits_of(sums[0]), bits_of(sums[1]), bits_of(sums[2]), bits_of(sums[3]));
    shared.dy.at[1][threadIdx.x] = make_uint4(bits_of(sums[4]), bits_of(sums[5]), bits_of(sums[6]), bits_of(sums[7]));
}

/* The sums of the four threads below each other, as a tree. */
static METHOD void backward_held_store_gain(const norm_backward_job &job, const backward_held &shared, uint32_t left) {
    float *to = job.partials + static_cast<size_t>(blockIdx.y) * job.planes.columns + left;
#pragma unroll 1
    for (uint32_t first = 0; first < HELD_COLUMNS; first += BACKWARD_HELD_THREADS) {
        const uint32_t i = first + threadIdx.x;
        const float *sums = reinterpret_cast<const float *>(&shared.dy.at[i / 4 % 2][i / 8]) + i % 4;
        to[i] = tree_sum<BACKWARD_TALL / HELD_ROWS>(sums, WARP * sizeof(uint4) / sizeof(float));
    }
}

/* 768 threads of a multiprocessor: 80 registers each. */
template <int FORMAT>
KERNEL void __launch_bounds__(BACKWARD_HELD_THREADS, 768 / BACKWARD_HELD_THREADS)
    norm_backward_held_kernel(const __grid_constant__ norm_backward_job job) {
    backward_held &shared = shared_object<backward_held>();
    const uint32_t hidden = job.planes.columns, group = job.first_group + blockIdx.y;
    const held_place place = held_place_of<BACKWARD_TALL>(group);
    const size_t begin = place.at(hidden);
#pragma unroll
    for (int i = 0; i < HELD_ROWS; ++i) {
        shared.dy.bring(i, job.dy + begin, hidden);
        shared.x.bring(i, job.x + begin, hidden);
    }
    shared.sums.begin();
    backward_constant c;
    c.scale = FORMAT == FORMAT_NONE ? 1.0f : scale_of(job.scale);
    held_table(job.gain + place.column, c.gain);
    copies_wait();
    float sums[HELD_ROWS], gain_sums[8] = {};
    backward_held_dots(shared, c.gain, sums);
    c.rstd_of_lane = __ldg(job.rstd + place.row + held_row_of_total(threadIdx.x % WARP));
    uint4 residual[HELD_ROWS];
#pragma unroll
    for (int i = 0; i < HELD_ROWS; ++i)
        residual[i] =
            job.residual ? load_once(job.residual + begin + static_cast<size_t>(i) * hidden) : make_uint4(0, 0, 0, 0);
    shared.sums.send(sums);
    c.mean_of_lane = quotient(mul(shared.sums.receive(), c.rstd_of_lane), static_cast<float>(hidden));
    const int32_t seen = FORMAT != FORMAT_NONE && job.scale.amax ? load_shared_word(job.scale.amax) : 0;
    const float amax = backward_held_rows<FORMAT>(job, begin, shared, residual, c, gain_sums);
    backward_held_gain(shared, gain_sums);
    if constexpr (FORMAT != FORMAT_NONE) {
        record_amax(job.scale.amax, amax, seen);
        if (blockIdx.x == 0 && group == 0 && threadIdx.x == 0) write_words(job.words, c.scale);
    }
    block_barrier();
    if (job.partials) backward_held_store_gain(job, shared, place.left);
    if (FORMAT != FORMAT_NONE && job.planes.by_columns) shared.x.store(job.planes, place);
}

#endif
