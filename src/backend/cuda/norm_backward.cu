/* norm_backward.cu - RMSNorm backward: m = sum((dy*gain)*x) * rstd / hidden,
 * dx = residual + rstd * (dy*gain - (x*rstd)*m), gain_grad (+)= sum over rows of dy * (x*rstd).
 *
 * dx is an activation: it is rounded to bf16, and what is quantized is that bf16 value, so this op has the bits of a
 * norm backward and a quantize after each other. A cluster keeps 32 rows between the sum and dx, in shared memory where
 * there are many, else in registers: every input is read once. The gain's gradient: a thread adds its rows in order
 * (fused multiply-add), threads of a column are added as a tree; one partial sum per cluster; then partials in the
 * order that partials_kernel says. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/norm_backward_held.cuh"
#include "backend/cuda/sink.cuh"

/* --- any shape --------------------------------------------------------------------------------------------------- */

enum { BACKWARD_THREADS = 256 };

/* Partial p of a column: rows p, p + gridDim.y, ... in order. */
KERNEL void __launch_bounds__(BACKWARD_THREADS) gain_any_kernel(const __grid_constant__ norm_backward_job job) {
    const uint32_t column = blockIdx.x * BACKWARD_THREADS + threadIdx.x, hidden = job.planes.columns;
    if (column >= hidden) return;
    float sum = 0.0f;
    for (uint32_t row = blockIdx.y; row < job.planes.rows; row += gridDim.y) {
        const size_t at = static_cast<size_t>(row) * hidden + column;
        sum = fused(bf16_value(job.dy[at]), mul(bf16_value(job.x[at]), job.rstd[row]), sum);
    }
    job.partials[static_cast<size_t>(blockIdx.y) * hidden + column] = sum;
}

/* dx, a block per row: thread i sums columns i, i + 256, ..., then a tree over threads. */
KERNEL void __launch_bounds__(BACKWARD_THREADS) backward_any_kernel(const __grid_constant__ norm_backward_job job) {
    float *sums = shared_object<float[BACKWARD_THREADS]>();
    const uint32_t hidden = job.planes.columns;
    const size_t begin = static_cast<size_t>(blockIdx.x) * hidden;
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < hidden; i += BACKWARD_THREADS)
        sum = fused(mul(bf16_value(job.dy[begin + i]), job.gain[i]), bf16_value(job.x[begin + i]), sum);
    sums[threadIdx.x] = sum;
    for (uint32_t width = BACKWARD_THREADS / 2; width > 0; width /= 2) {
        block_barrier();
        if (threadIdx.x < width) sums[threadIdx.x] = add(sums[threadIdx.x], sums[threadIdx.x + width]);
    }
    block_barrier();
    const float rstd = job.rstd[blockIdx.x];
    const float mean = quotient(mul(sums[0], rstd), static_cast<float>(hidden));
    for (uint32_t i = threadIdx.x; i < hidden; i += BACKWARD_THREADS) {
        const size_t at = begin + i;
        float v = backward_value(bf16_value(job.dy[at]), bf16_value(job.x[at]), job.gain[i], rstd, mean);
        if (job.residual) v = add(bf16_value(job.residual[at]), v);
        job.dx[at] = static_cast<uint16_t>(bf16_code(v));
    }
}

static qe_status backward_any(const qe_args_norm_backward *args, const norm_backward_job &job, cudaStream_t stream) {
    const uint32_t most = QE_GAIN_PARTIALS, partials = args->rows < most ? args->rows : most;
    if (job.partials) { /* first: dx may be written over dy */
        const dim3 grid(pieces_of(args->hidden, BACKWARD_THREADS), partials);
        LAUNCH_TRY(launch(gain_any_kernel, grid, BACKWARD_THREADS, 1, 0, stream, job));
        LAUNCH_TRY(partials_launch(args, partials, args->set, stream));
    }
    return launch(backward_any_kernel, dim3(args->rows), BACKWARD_THREADS, 1, 0, stream, job);
}

/* --- launchers --------------------------------------------------------------------------------------------------- */

template <int FORMAT, int ROWS>
static qe_status backward_launch(const norm_backward_job &job, uint32_t clusters, cudaStream_t stream) {
    const cluster_shape shape = cluster_shape_of<ROWS>(job.planes.columns);
    return launch(norm_backward_kernel<FORMAT, ROWS>, dim3(shape.blocks, clusters), shape.warps * WARP, shape.blocks, 0,
                  stream, job);
}

/* Rows in shared memory; QE_ERROR_UNSUPPORTED: not this shape, or not on this device. Blocks of one side share a
 * multiprocessor with others. Wide ones have it alone: that is taken where they are all at work at once, and most
 * multiprocessors have one. */
enum { BACKWARD_WIDE = 4 };

template <int FORMAT, int WIDE>
static qe_status backward_held_launch(const norm_backward_job &job, uint32_t clusters, cudaStream_t stream) {
    const uint32_t blocks = job.planes.columns / (HELD_COLUMNS * WIDE), threads = BACKWARD_HELD_THREADS * WIDE;
    const size_t shared_bytes = WIDE == 1 ? 0 : sizeof(backward_held<WIDE>);
    if (!held_fits<BACKWARD_TALL, WIDE>(job.planes.rows, job.planes.columns)) return QE_ERROR_UNSUPPORTED;
    const uint32_t most = clusters_known<norm_backward_held_kernel<FORMAT, WIDE>>(threads, blocks, shared_bytes);
    const bool is_taken = WIDE == 1 ? most > 0 : clusters <= most && clusters * 4 >= most * 3;
    if (!is_taken) return QE_ERROR_UNSUPPORTED;
    const dim3 grid(blocks, clusters);
    return launch(norm_backward_held_kernel<FORMAT, WIDE>, grid, threads, blocks, shared_bytes, stream, job);
}

enum { BACKWARD_SMALL_VALUES = 3 << 20 };

template <int FORMAT>
static qe_status backward_format(const norm_backward_job &job, uint32_t clusters, cudaStream_t stream) {
    const uint64_t values = static_cast<uint64_t>(job.planes.rows) * job.planes.columns;
    if (values <= BACKWARD_SMALL_VALUES && cluster_shape_of<4>(job.planes.columns).blocks > 0)
        return backward_launch<FORMAT, 4>(job, clusters, stream);
    qe_status status = backward_held_launch<FORMAT, BACKWARD_WIDE>(job, clusters, stream);
    if (status == QE_ERROR_UNSUPPORTED) status = backward_held_launch<FORMAT, 1>(job, clusters, stream);
    return status == QE_ERROR_UNSUPPORTED ? backward_launch<FORMAT, 8>(job, clusters, stream) : status;
}

static norm_backward_job backward_job_of(const qe_args_norm_backward *args) {
    norm_backward_job job = {};
    job.dy = static_cast<const uint16_t *>(args->dy), job.x = static_cast<const uint16_t *>(args->x);
    job.rstd = args->rstd, job.gain = args->gain;
    job.residual = static_cast<const uint16_t *>(args->residual);
    job.dx = static_cast<uint16_t *>(args->dx);
    job.partials = args->gain_grad ? args->partials : nullptr;
    job.planes.rows = args->rows, job.planes.columns = args->hidden;
    return job;
}

static bool backward_fits(const norm_backward_job &job) {
    return job.planes.columns % 8 == 0 && is_aligned(job.dy) && is_aligned(job.x) && is_aligned(job.gain) &&
           is_aligned(job.residual) && is_aligned(job.dx) && cluster_shape_of<8>(job.planes.columns).blocks > 0;
}

static qe_status backward_codes(const norm_backward_job &job, int format, uint32_t clusters, cudaStream_t stream) {
    switch (format) {
        case QE_FORMAT_E4M3: return backward_format<QE_FORMAT_E4M3>(job, clusters, stream);
        case QE_FORMAT_E5M2: return backward_format<QE_FORMAT_E5M2>(job, clusters, stream);
        default: return backward_format<FORMAT_NONE>(job, clusters, stream);
    }
}

/* A launch has at most QE_GAIN_PARTIALS clusters, one for each partial sum. */
static qe_status backward_clusters(const qe_args_norm_backward *args, norm_backward_job job, int format,
                                   cudaStream_t stream) {
    const uint32_t groups = pieces_of(args->rows, CLUSTER_ROWS), most = QE_GAIN_PARTIALS;
    for (; job.first_group < groups; job.first_group += most) {
        const uint32_t left = groups - job.first_group, clusters = left < most ? left : most;
        LAUNCH_TRY(backward_codes(job, format, clusters, stream));
        if (job.partials) LAUNCH_TRY(partials_launch(args, clusters, job.first_group == 0 && args->set, stream));
    }
    return QE_OK;
}

extern "C" qe_status qe_cuda_norm_backward(const qe_args_norm_backward *args, cudaStream_t stream) {
    const qe_quantize_target *target = &args->target;
    const places to = places_of(target, args->rows, args->hidden);
    norm_backward_job job = backward_job_of(args);
    const bool fits = backward_fits(job), is_wanted = to.at[0] || to.at[1];
    if (fits && is_wanted && target->recipe == QE_RECIPE_DELAYED && planes_of(to, &job.planes)) {
        job.scale = scaling_of(target);
        job.words = words_of(target, tensor_words());
        return backward_clusters(args, job, target->format, stream);
    }
    if (fits)
        LAUNCH_TRY(backward_clusters(args, job, FORMAT_NONE, stream));
    else
        LAUNCH_TRY(backward_any(args, job, stream));
    if (!is_wanted) return QE_OK;
    plain_source source = {};
    source.x = job.dx, source.units = args->hidden;
    return target_fill(source, args->rows, args->hidden, target, false, tensor_words(), stream);
}
