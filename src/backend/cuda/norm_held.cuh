/* norm_held.cuh - the kernel of norm.cu for many rows, which clusters hold in shared memory. */
#ifndef QE_CUDA_NORM_HELD_CUH
#define QE_CUDA_NORM_HELD_CUH

#include "backend/cuda/held.cuh"
#include "backend/cuda/norm.cuh"

template <int TALL>
struct norm_held {
    held_tile<TALL> tile;
    held_sums<TALL> sums;
};

/* sum over eight columns of x*x. */
DEVICE float norm_squares(uint4 raw) {
    float v[8];
    unpack8(raw, v);
    float sum = mul(v[0], v[0]);
#pragma unroll
    for (int k = 1; k < 8; ++k) sum = fused(v[k], v[k], sum);
    return sum;
}

/* Codes of a thread's rows: by rows to memory, else into the tile. Returns the amax. */
template <int FORMAT, int TALL>
static METHOD float norm_held_codes(const norm_job &job, size_t at, held_tile<TALL> &tile, const float *gain,
                                    float rstd_of_lane, float scale) {
    float amax = 0.0f;
#pragma unroll
    for (int group = 0; group < HELD_ROWS / 4; ++group) {
        uint32_t four[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float rstd = shuffle(rstd_of_lane, held_lane_of(group * 4 + i));
            float v[8];
            unpack8(tile.row(group * 4 + i), v);
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] = normed(v[k], rstd, gain[k]);
            amax = amax_of8(amax, v);
            four[i][0] = encode4<FORMAT>(v, scale);
            four[i][1] = encode4<FORMAT>(v + 4, scale);
        }
        held_store_rows(job.planes, at + static_cast<size_t>(group * 4) * job.planes.columns, four);
        warp_barrier(0xFFFFFFFFu);
        tile.put(group, four);
    }
    return amax;
}

/* 1536 threads of a multiprocessor: 40 registers each. */
template <int FORMAT, int TALL>
KERNEL void __launch_bounds__(HELD_THREADS<TALL>, 1536 / HELD_THREADS<TALL>)
    norm_held_kernel(const __grid_constant__ norm_job job) {
    norm_held<TALL> &shared = shared_object<norm_held<TALL>>();
    const uint32_t hidden = job.planes.columns, lane = threadIdx.x % WARP;
    const held_place place = held_place_of<TALL>(blockIdx.y);
    const size_t at = place.at(hidden);
#pragma unroll
    for (int i = 0; i < HELD_ROWS; ++i) shared.tile.bring(i, job.x + at, hidden);
    shared.sums.begin();
    const int32_t seen = job.scale.amax ? load_shared_word(job.scale.amax) : 0;
    const float scale = scale_of(job.scale);
    copies_wait();
    float sums[HELD_ROWS], gain[8];
#pragma unroll
    for (int i = 0; i < HELD_ROWS; ++i) sums[i] = norm_squares(shared.tile.row(i));
    shared.sums.send(sums);
    held_table(job.gain + place.column, gain);
    const float rstd = norm_rstd(shared.sums.receive(), hidden, job.epsilon);
    if (place.left == 0 && lane % (WARP / 2) < 4) job.rstd[place.row + held_row_of_total(lane)] = rstd;
    const float amax = norm_held_codes<FORMAT, TALL>(job, at, shared.tile, gain, rstd, scale);
    record_amax(job.scale.amax, amax, seen);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) write_words(job.words, scale);
    block_barrier();
    if (job.planes.by_columns) shared.tile.store(job.planes, place);
}

#endif
