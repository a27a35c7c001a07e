/* norm.cu - RMSNorm, and quantized in the same pass: y = (x * rstd) * gain,
 * rstd = 1 / sqrt(sum(x*x) / hidden + epsilon). A cluster keeps rows between the sum and the codes, in shared memory
 * where there are many, else in registers, so x is read once. Recipes whose scale is not known beforehand take rstd
 * from one pass and quantize in others. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/norm_held.cuh"
#include "backend/cuda/sink.cuh"

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

/* Rows in shared memory; QE_ERROR_UNSUPPORTED: not this shape, or not on this device. */
template <int FORMAT, int TALL>
static qe_status norm_held_launch(const norm_job &job, cudaStream_t stream) {
    const uint32_t blocks = job.planes.columns / HELD_COLUMNS, threads = HELD_THREADS<TALL>;
    if (!held_fits<TALL>(job.planes.rows, job.planes.columns) ||
        clusters_known<norm_held_kernel<FORMAT, TALL>>(threads, blocks, 0) == 0)
        return QE_ERROR_UNSUPPORTED;
    const dim3 grid(blocks, job.planes.rows / TALL);
    return launch(norm_held_kernel<FORMAT, TALL>, grid, threads, blocks, 0, stream, job);
}

/* Pieces of 64 bytes of the transposed plane where tiles are many; more tiles where they are few. */
enum { NORM_TALL_VALUES = 16 << 20 };

template <int FORMAT>
static qe_status norm_large(const norm_job &job, cudaStream_t stream) {
    const uint64_t values = static_cast<uint64_t>(job.planes.rows) * job.planes.columns;
    qe_status status = QE_ERROR_UNSUPPORTED;
    if constexpr (FORMAT != QE_FORMAT_BF16) {
        if (values >= NORM_TALL_VALUES) status = norm_held_launch<FORMAT, 64>(job, stream);
        if (status == QE_ERROR_UNSUPPORTED) status = norm_held_launch<FORMAT, 32>(job, stream);
    }
    return status == QE_ERROR_UNSUPPORTED ? norm_launch<FORMAT, 16>(job, stream) : status;
}

/* Few rows per thread where many would leave multiprocessors idle. */
enum { NORM_SMALL_VALUES = 3 << 20 };

template <int FORMAT>
static qe_status norm_format(const norm_job &job, cudaStream_t stream) {
    const uint64_t values = static_cast<uint64_t>(job.planes.rows) * job.planes.columns;
    if (values <= NORM_SMALL_VALUES && cluster_shape_of<4>(job.planes.columns).blocks > 0)
        return norm_launch<FORMAT, 4>(job, stream);
    return norm_large<FORMAT>(job, stream);
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
