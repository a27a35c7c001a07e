/* norm_backward.cuh - the kernels of norm_backward.cu for rows that a cluster holds in registers. */
#ifndef QE_CUDA_NORM_BACKWARD_CUH
#define QE_CUDA_NORM_BACKWARD_CUH

#include "backend/cuda/row_sums.cuh"
#include "backend/cuda/tile.cuh"

struct norm_backward_job {
    const uint16_t *dy, *x; /* [rows, hidden] bf16 */
    const float *rstd, *gain; /* [rows], [hidden] */
    const uint16_t *residual; /* [rows, hidden] bf16; NULL: none; may be dx */
    uint16_t *dx; /* [rows, hidden] bf16 */
    float *partials; /* [gridDim.y, hidden]; NULL: no gradient of the gain */
    uint32_t first_group; /* of 32 rows: this launch begins there */
    code_planes planes; /* rows and hidden stand here */
    scaling scale;
    tensor_words words;
};

/* What a thread holds of ROWS rows and eight columns. */
template <int ROWS>
struct backward_rows {
    uint4 dy[ROWS], x[ROWS], residual[ROWS];
    uint32_t first, column;
    bool inside;
};

template <int ROWS>
static METHOD void backward_load(const norm_backward_job &job, backward_rows<ROWS> &rows) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const bool load = rows.inside && rows.first + i < job.planes.rows;
        const size_t at = static_cast<size_t>(rows.first + i) * job.planes.columns + rows.column;
        rows.x[i] = load ? load_once(job.x + at) : zero;
        rows.dy[i] = load ? load_once(job.dy + at) : zero;
    }
}

template <int ROWS>
static METHOD void backward_load_residual(const norm_backward_job &job, backward_rows<ROWS> &rows) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const bool load = job.residual && rows.inside && rows.first + i < job.planes.rows;
        const size_t at = static_cast<size_t>(rows.first + i) * job.planes.columns + rows.column;
        rows.residual[i] = load ? load_once(job.residual + at) : zero;
    }
}

/* sum over eight columns of (dy*gain)*x. */
DEVICE float backward_dot(const float *dy, const float *x, const float *gain) {
    float sum = mul(mul(dy[0], gain[0]), x[0]);
#pragma unroll
    for (int k = 1; k < 8; ++k) sum = fused(mul(dy[k], gain[k]), x[k], sum);
    return sum;
}

DEVICE float backward_value(float dy, float x, float gain, float rstd, float mean) {
    return mul(rstd, sub(mul(dy, gain), mul(mul(x, rstd), mean)));
}

/* dx of one row; the gain's part is added up. Returns dx as bf16. */
DEVICE uint4 backward_row(bool has_residual, uint4 raw_dy, uint4 raw_x, uint4 raw_residual, const float *gain,
                          float rstd, float mean, float *gain_sums) {
    float dy[8], x[8], v[8];
    unpack8(raw_dy, dy);
    unpack8(raw_x, x);
    unpack8(raw_residual, v);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        gain_sums[k] = fused(dy[k], mul(x[k], rstd), gain_sums[k]);
        const float own = backward_value(dy[k], x[k], gain[k], rstd, mean);
        v[k] = has_residual ? add(v[k], own) : own;
    }
    return pack8(v);
}

/* dx and codes of one thread's rows. rstd, mean: lane i has those of row i of the 32. Returns the amax. */
template <int FORMAT, int ROWS>
static METHOD float backward_store(const norm_backward_job &job, const backward_rows<ROWS> &rows, const float *gain,
                                   float rstd_of_lane, float mean_of_lane, float scale, float *gain_sums) {
    const uint32_t within = threadIdx.x % WARP / ROWS * ROWS;
    float amax = 0.0f;
    column_codes<ROWS> columns;
#pragma unroll
    for (int group = 0; group < ROWS / 4; ++group) {
        uint32_t four[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = group * 4 + i;
            const float rstd = shuffle(rstd_of_lane, within + at), mean = shuffle(mean_of_lane, within + at);
            const uint4 words = backward_row(job.residual != nullptr, rows.dy[at], rows.x[at], rows.residual[at], gain,
                                             rstd, mean, gain_sums);
            const uint32_t row = rows.first + at;
            const bool store = rows.inside && row < job.planes.rows;
            if (store)
                *reinterpret_cast<uint4 *>(job.dx + static_cast<size_t>(row) * job.planes.columns + rows.column) =
                    words;
            if constexpr (FORMAT == FORMAT_NONE) continue;
            float v[8];
            unpack8(words, v);
            if (store) amax = amax_of8(amax, v);
            four[i][0] = encode4<FORMAT>(v, scale);
            four[i][1] = encode4<FORMAT>(v + 4, scale);
            if (store && job.planes.by_rows) store_row_codes(job.planes, row, rows.column, four[i]);
        }
        if (FORMAT != FORMAT_NONE) columns.put(group, four);
    }
    if (FORMAT != FORMAT_NONE && rows.inside && rows.first < job.planes.rows && job.planes.by_columns)
        columns.store(job.planes, rows.first, rows.column);
    return amax;
}

/* The sums of the threads that stand below each other in a warp; each then stores some of the eight columns. */
template <int ROWS>
static METHOD void backward_store_gain(const norm_backward_job &job, uint32_t column, bool inside, float *sums) {
    const uint32_t lane = threadIdx.x % WARP, deep = lane / ROWS;
    const int BELOW = WARP / ROWS; /* 2, 4 or 8 threads */
#pragma unroll
    for (int step = 1, width = 4; step < BELOW; step *= 2, width /= 2) {
        const bool upper = deep & step;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i >= width) continue;
            const float keep = upper ? sums[i + width] : sums[i];
            const float give = upper ? sums[i] : sums[i + width];
            sums[i] = add(keep, shuffle_xor(give, step * ROWS));
        }
    }
    if (!inside) return;
    uint32_t from = 0;
#pragma unroll
    for (int step = 1, width = 4; step < BELOW; step *= 2, width /= 2) from += deep & step ? width : 0;
    float *at = job.partials + static_cast<size_t>(blockIdx.y) * job.planes.columns + column + from;
#pragma unroll
    for (int i = 0; i < 8 / BELOW; ++i) at[i] = sums[i];
}

template <int FORMAT, int ROWS>
KERNEL void __launch_bounds__(CLUSTER_WARPS_MAX * 32)
    norm_backward_kernel(const __grid_constant__ norm_backward_job job) {
    row_shared &shared = shared_object<row_shared>();
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, hidden = job.planes.columns;
    const uint32_t group = job.first_group + blockIdx.y, row = group * CLUSTER_ROWS + lane;
    backward_rows<ROWS> rows;
    rows.column = (blockIdx.x * (blockDim.x / WARP) + warp) * (ROWS * 8) + lane % ROWS * 8;
    rows.first = group * CLUSTER_ROWS + lane / ROWS * ROWS;
    rows.inside = rows.column < hidden;
    row_sums_begin(shared);
    backward_load(job, rows);
    const float scale = FORMAT == FORMAT_NONE ? 1.0f : scale_of(job.scale);
    const int32_t seen = job.scale.amax ? load_shared_word(job.scale.amax) : 0;
    const float rstd = row < job.planes.rows ? __ldg(job.rstd + row) : 0.0f;
    float gain[8], sums[ROWS];
#pragma unroll
    for (int k = 0; k < 8; ++k) gain[k] = rows.inside ? __ldg(job.gain + rows.column + k) : NEUTRAL; /* so sums are */
    warp_barrier(0xFFFFFFFFu);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float dy[8], x[8];
        unpack8(rows.dy[i], dy);
        unpack8(rows.x[i], x);
        sums[i] = backward_dot(dy, x, gain);
        forget(rows.dy[i]);
        forget(rows.x[i]);
    }
    backward_load_residual(job, rows);
    row_sums_send<ROWS>(shared, sums);
    const float mean = quotient(mul(row_sums_receive(shared), rstd), static_cast<float>(hidden));
    float gain_sums[8] = {};
    const float amax = backward_store<FORMAT, ROWS>(job, rows, gain, rstd, mean, scale, gain_sums);
    if (job.partials) backward_store_gain<ROWS>(job, rows.column, rows.inside, gain_sums);
    if (FORMAT == FORMAT_NONE) return;
    record_amax(job.scale.amax, amax, seen);
    if (blockIdx.x == 0 && group == 0 && threadIdx.x == 0) write_words(job.words, scale);
}

/* --- the gain's gradient ----------------------------------------------------------------------------------------- */

struct partials_job {
    const float *partials; /* [count, hidden] */
    float *grad; /* [hidden] */
    uint32_t count, hidden, set;
};

enum { PARTIALS_DEEP = 16, PARTIALS_AHEAD = 16 };

/* Thread (i, j) adds partials j, j + 16, ... of column i in order, PARTIALS_AHEAD of which are under way at once; then
 * the 16 are added as a tree. */
KERNEL void __launch_bounds__(WARP *PARTIALS_DEEP) partials_kernel(const __grid_constant__ partials_job job) {
    float(*sums)[WARP] = shared_object<float[PARTIALS_DEEP][WARP]>();
    const uint32_t lane = threadIdx.x % WARP, deep = threadIdx.x / WARP, column = blockIdx.x * WARP + lane;
    const uint32_t count = column < job.hidden ? job.count : 0;
    const float before = deep == 0 && count > 0 && !job.set ? job.grad[column] : 0.0f;
    float sum = 0.0f;
    for (uint32_t first = deep; first < count; first += PARTIALS_DEEP * PARTIALS_AHEAD) {
        const float *at = job.partials + static_cast<size_t>(first) * job.hidden + column;
        float partial[PARTIALS_AHEAD];
#pragma unroll
        for (uint32_t k = 0; k < PARTIALS_AHEAD; ++k)
            if (first + k * PARTIALS_DEEP < count) partial[k] = __ldg(at + k * PARTIALS_DEEP * size_t{job.hidden});
#pragma unroll
        for (uint32_t k = 0; k < PARTIALS_AHEAD; ++k)
            if (first + k * PARTIALS_DEEP < count) sum = add(sum, partial[k]);
    }
    sums[deep][lane] = sum;
    block_barrier();
    if (deep != 0 || count == 0) return;
    const float total = tree_sum<PARTIALS_DEEP>(&sums[0][lane], WARP);
    job.grad[column] = job.set ? total : add(before, total);
}

static inline qe_status partials_launch(const qe_args_norm_backward *args, uint32_t count, bool set,
                                        cudaStream_t stream) {
    partials_job job = {};
    job.partials = args->partials, job.grad = args->gain_grad;
    job.count = count, job.hidden = args->hidden, job.set = set;
    return launch(partials_kernel, dim3(pieces_of(args->hidden, WARP)), WARP * PARTIALS_DEEP, 0, 0, stream, job);
}

#endif
