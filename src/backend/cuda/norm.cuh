/* norm.cuh - the kernel of norm.cu for rows that a cluster holds in registers. */
#ifndef QE_CUDA_NORM_CUH
#define QE_CUDA_NORM_CUH

#include "backend/cuda/row_sums.cuh"
#include "backend/cuda/tile.cuh"

struct norm_job {
    const uint16_t *x; /* [rows, hidden] bf16 */
    const float *gain; /* [hidden] */
    float *rstd; /* [rows] */
    uint16_t *value[2]; /* [rows, hidden] bf16; NULL: not wanted */
    code_planes planes; /* rows and hidden stand here */
    scaling scale;
    tensor_words words;
    float epsilon;
};

/* Threads side by side along a row have ROWS * 8 columns a warp (row_sums.cuh). */
struct norm_place {
    uint32_t first, column; /* row and column of the thread's corner */
    bool inside; /* it has columns */
};

template <int ROWS>
static METHOD norm_place norm_place_of(uint32_t group, uint32_t hidden) {
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    norm_place place;
    place.column = (blockIdx.x * (blockDim.x / WARP) + warp) * (ROWS * 8) + lane % ROWS * 8;
    place.first = group * CLUSTER_ROWS + lane / ROWS * ROWS;
    place.inside = place.column < hidden;
    return place;
}

DEVICE float norm_rstd(float sum, uint32_t hidden, float epsilon) {
    return quotient(1.0f, root(add(quotient(sum, static_cast<float>(hidden)), epsilon)));
}

/* Rows of one thread, once their rstd is known. Returns the amax. All lanes call it: they pass rstd around. */
template <int FORMAT, int ROWS>
static METHOD float norm_store(const norm_job &job, const norm_place &place, const uint4 *raw, float rstd_of_lane) {
    const float scale = FORMAT == QE_FORMAT_BF16 ? 1.0f : scale_of(job.scale);
    const uint32_t within = threadIdx.x % WARP / ROWS * ROWS;
    float gain[8], amax = 0.0f;
    column_codes<ROWS> columns;
#pragma unroll
    for (int i = 0; i < 8; ++i) gain[i] = place.inside ? __ldg(job.gain + place.column + i) : 0.0f;
#pragma unroll
    for (int group = 0; group < ROWS / 4; ++group) {
        uint32_t four[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t row = place.first + group * 4 + i;
            const float rstd = shuffle(rstd_of_lane, within + group * 4 + i);
            const bool store = place.inside && row < job.planes.rows;
            float v[8];
            unpack8(raw[group * 4 + i], v);
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] = normed(v[k], rstd, gain[k]);
            if (FORMAT == QE_FORMAT_BF16) {
                const size_t at = static_cast<size_t>(row) * job.planes.columns + place.column;
                const uint4 words = pack8(v);
                if (store && job.value[0]) *reinterpret_cast<uint4 *>(job.value[0] + at) = words;
                if (store && job.value[1]) *reinterpret_cast<uint4 *>(job.value[1] + at) = words;
                continue;
            }
            if (store) amax = amax_of8(amax, v);
            four[i][0] = encode4<FORMAT>(v, scale);
            four[i][1] = encode4<FORMAT>(v + 4, scale);
            if (store && job.planes.by_rows) store_row_codes(job.planes, row, place.column, four[i]);
        }
        if (FORMAT != QE_FORMAT_BF16) columns.put(group, four);
    }
    if (FORMAT != QE_FORMAT_BF16 && place.inside && place.first < job.planes.rows && job.planes.by_columns)
        columns.store(job.planes, place.first, place.column);
    return amax;
}

template <int FORMAT, int ROWS>
KERNEL void __launch_bounds__(CLUSTER_WARPS_MAX * 32) norm_kernel(const __grid_constant__ norm_job job) {
    row_shared &shared = shared_object<row_shared>();
    const uint32_t hidden = job.planes.columns, lane = threadIdx.x % WARP;
    const norm_place place = norm_place_of<ROWS>(blockIdx.y, hidden);
    uint4 raw[ROWS];
    row_sums_begin(shared);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        raw[i] = place.inside && place.first + i < job.planes.rows
                     ? load_once(job.x + static_cast<size_t>(place.first + i) * hidden + place.column)
                     : make_uint4(0, 0, 0, 0);
    const int32_t seen = job.scale.amax ? load_shared_word(job.scale.amax) : 0;
    float sums[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float v[8];
        unpack8(raw[i], v);
        sums[i] = mul(v[0], v[0]);
#pragma unroll
        for (int k = 1; k < 8; ++k) sums[i] = fused(v[k], v[k], sums[i]);
    }
    row_sums_send<ROWS>(shared, sums);
    const float rstd = norm_rstd(row_sums_receive(shared), hidden, job.epsilon);
    const uint32_t row = blockIdx.y * CLUSTER_ROWS + lane;
    if (blockIdx.x == 0 && threadIdx.x < WARP && row < job.planes.rows) job.rstd[row] = rstd;
    const float amax = norm_store<FORMAT, ROWS>(job, place, raw, rstd);
    if (FORMAT == QE_FORMAT_BF16) return;
    record_amax(job.scale.amax, amax, seen);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) write_words(job.words, scale_of(job.scale));
}

#endif
