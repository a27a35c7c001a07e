/* norm.cu - RMSNorm, and quantized in the same pass: y = (x * rstd) * gain,
 * rstd = 1 / sqrt(sum(x*x) / hidden + epsilon). A cluster keeps 32 rows in registers between the sum and the codes, so
 * x is read once. Recipes whose scale is not known beforehand take rstd from one pass and quantize in others. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/row_sums.cuh"
#include "backend/cuda/sink.cuh"

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

/* --- any shape --------------------------------------------------------------------------------------------------- */

enum { NORM_THREADS = 256 };

/* rstd alone, a block per row: thread i sums columns i, i + 256, ..., then a tree over threads. */
KERNEL void __launch_bounds__(NORM_THREADS) norm_rstd_kernel(const __grid_constant__ norm_job job) {
    float *sums = shared_object<float[NORM_THREADS]>();
    const uint32_t hidden = job.planes.columns;
    const uint16_t *x = job.x + static_cast<size_t>(blockIdx.x) * hidden;
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < hidden; i += NORM_THREADS) sum = fused(bf16_value(x[i]), bf16_value(x[i]), sum);
    sums[threadIdx.x] = sum;
    for (uint32_t width = NORM_THREADS / 2; width > 0; width /= 2) {
        block_barrier();
        if (threadIdx.x < width) sums[threadIdx.x] = add(sums[threadIdx.x], sums[threadIdx.x + width]);
    }
    if (threadIdx.x == 0) job.rstd[blockIdx.x] = norm_rstd(sums[0], hidden, job.epsilon);
}

/* --- launchers --------------------------------------------------------------------------------------------------- */

template <int FORMAT, int ROWS>
static qe_status norm_launch(const norm_job &job, cudaStream_t stream) {
    const cluster_shape shape = cluster_shape_of<ROWS>(job.planes.columns);
    const dim3 grid(shape.blocks, pieces_of(job.planes.rows, CLUSTER_ROWS));
    return launch(norm_kernel<FORMAT, ROWS>, grid, shape.warps * WARP, shape.blocks, 0, stream, job);
}

/* Few rows per thread where many would leave multiprocessors idle. */
enum { NORM_SMALL_VALUES = 3 << 20 };

template <int FORMAT>
static qe_status norm_format(const norm_job &job, cudaStream_t stream) {
    const uint64_t values = static_cast<uint64_t>(job.planes.rows) * job.planes.columns;
    const bool is_small = values <= NORM_SMALL_VALUES && cluster_shape_of<4>(job.planes.columns).blocks > 0;
    return is_small ? norm_launch<FORMAT, 4>(job, stream) : norm_launch<FORMAT, 16>(job, stream);
}

static bool norm_fits(const norm_job &job) {
    return job.planes.columns % 8 == 0 && is_aligned(job.x) && is_aligned(job.gain) &&
           cluster_shape_of<16>(job.planes.columns).blocks > 0;
}

/* bf16 straight from the registers of the cluster. */
static bool norm_writes_values(const qe_quantize_target *target, const places &to, norm_job *job) {
    for (int i = 0; i < 2; ++i) {
        if (to.at[i] && (to.format[i] != QE_FORMAT_BF16 || to.transposed[i] || !is_aligned(to.at[i]))) return false;
        job->value[i] = static_cast<uint16_t *>(to.at[i]);
    }
    return target->recipe == QE_RECIPE_BF16;
}

static qe_status norm_target(const qe_args_norm *args, const qe_quantize_target *target, cudaStream_t stream) {
    const places to = places_of(target, args->rows, args->hidden);
    norm_job job = {};
    job.x = static_cast<const uint16_t *>(args->x);
    job.gain = args->gain, job.rstd = args->rstd, job.epsilon = args->epsilon;
    job.planes.rows = args->rows, job.planes.columns = args->hidden;
    const bool fits = norm_fits(job);
    if (fits && norm_writes_values(target, to, &job)) return norm_format<QE_FORMAT_BF16>(job, stream);
    job.value[0] = job.value[1] = nullptr;
    if (fits && target->recipe == QE_RECIPE_DELAYED && planes_of(to, &job.planes)) {
        job.scale = scaling_of(target);
        job.words = words_of(target, tensor_words());
        return target->format == QE_FORMAT_E4M3 ? norm_format<QE_FORMAT_E4M3>(job, stream)
                                                : norm_format<QE_FORMAT_E5M2>(job, stream);
    }
    if (fits)
        LAUNCH_TRY(norm_format<QE_FORMAT_BF16>(job, stream));
    else
        LAUNCH_TRY(launch(norm_rstd_kernel, dim3(args->rows), NORM_THREADS, 1, 0, stream, job));
    norm_source source = {};
    source.x = job.x, source.rstd = args->rstd, source.gain = args->gain, source.units = args->hidden;
    return target_fill(source, args->rows, args->hidden, target, false, tensor_words(), stream);
}

extern "C" qe_status qe_cuda_norm(const qe_args_norm *args, cudaStream_t stream) {
    if (args->y == nullptr) return norm_target(args, &args->target, stream);
    qe_quantize_target target = {};
    target.recipe = QE_RECIPE_BF16;
    target.operand.codes = args->y;
    target.operand.format = QE_FORMAT_BF16;
    return norm_target(args, &target, stream);
}
