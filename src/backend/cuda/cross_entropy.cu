/* cross_entropy.cu - loss and, in place of the bf16 logits, their gradient; a block for each row. Where a row fits into
 * a block's shared memory it is read from the device once; else twice. The sum of exponentials is fp32 with a running
 * maximum, each thread over its own elements, then lanes and warps by halves; the loss of a row is fp64. Orders depend
 * on the shape alone. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/block.cuh"

namespace {

constexpr size_t LOSS_SHARED_BYTES_MAX = 226 * 1024;  /* what a block of this architecture may have, less a few words */
constexpr size_t LOSS_SHARED_BYTES_FREE = 48 * 1024;  /* above it a kernel must be allowed to */
constexpr size_t LOSS_SHARED_BYTES_HALF = 112 * 1024; /* up to it two blocks share a multiprocessor */
constexpr uint32_t LOSS_THREADS_MIN = 64, LOSS_THREADS = 512, LOSS_THREADS_MAX = 1024;
constexpr uint32_t LOSS_PIECES = 4;   /* that a thread has at least, where there are enough */
constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LOSS_LOWEST = -1e38f; /* the maximum of nothing: times log2(e) it is still finite */

/* 2^x within 2 units in the last place; what would be subnormal is 0. */
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* e^(z - most), where base = -most * log2(e). */
__device__ __forceinline__ float exponential(float z, float base) {
    return power_of_two(fmaf(z, LOG2_E, base));
}

/* A row in pieces of WIDTH logits; thread i takes pieces i, i + threads, ... KEPT: they stay in shared memory. */
template <int WIDTH, bool KEPT>
struct logits_row;

template <bool KEPT>
struct logits_row<8, KEPT> {
    uint4 *at, *kept;

    __device__ __forceinline__ logits_row(void *logits, size_t first) {
        extern __shared__ uint4 shared[];
        at = reinterpret_cast<uint4 *>(static_cast<__nv_bfloat16 *>(logits) + first);
        kept = shared;
    }
    /* A thread waits for its own copies only and reads only those. */
    __device__ __forceinline__ void fetch(uint32_t pieces) {
        if constexpr (KEPT) {
            for (uint32_t i = threadIdx.x; i < pieces; i += blockDim.x) {
                const uint32_t to = (uint32_t)__cvta_generic_to_shared(kept + i);
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(at + i) : "memory");
            }
            asm volatile("cp.async.commit_group;\n cp.async.wait_group 0;" ::: "memory");
        }
    }
    __device__ __forceinline__ void load(uint32_t i, float z[8]) const {
        const uint4 pairs = KEPT ? kept[i] : at[i];
        z[0] = qe_bf16_low(pairs.x), z[1] = qe_bf16_high(pairs.x);
        z[2] = qe_bf16_low(pairs.y), z[3] = qe_bf16_high(pairs.y);
        z[4] = qe_bf16_low(pairs.z), z[5] = qe_bf16_high(pairs.z);
        z[6] = qe_bf16_low(pairs.w), z[7] = qe_bf16_high(pairs.w);
    }
    __device__ __forceinline__ void store(uint32_t i, const float z[8]) {
        at[i] = make_uint4(qe_bf16_pair(z[0], z[1]), qe_bf16_pair(z[2], z[3]), qe_bf16_pair(z[4], z[5]),
                           qe_bf16_pair(z[6], z[7]));
    }
};

template <>
struct logits_row<1, false> {
    __nv_bfloat16 *at;

    __device__ __forceinline__ logits_row(void *logits, size_t first) {
        at = static_cast<__nv_bfloat16 *>(logits) + first;
    }
    __device__ __forceinline__ void fetch(uint32_t) {
    }
    __device__ __forceinline__ void load(uint32_t i, float z[1]) const {
        z[0] = __bfloat162float(at[i]);
    }
    __device__ __forceinline__ void store(uint32_t i, const float z[1]) {
        at[i] = __float2bfloat16_rn(z[0]);
    }
};

__device__ __forceinline__ float sum_of(const float (&part)[8]) {
    return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

__device__ __forceinline__ float sum_of(const float (&part)[1]) {
    return part[0];
}

/* The sum of e^(z - most) over what has been seen. */
struct soft_sum {
    float most, sum;

    __device__ __forceinline__ void raise(float above) {
        if (!(above > most)) return;
        sum *= power_of_two((most - above) * LOG2_E);
        most = above;
    }
    template <int WIDTH>
    __device__ __forceinline__ void add(const float z[WIDTH]) {
        float highest = z[0];
#pragma unroll
        for (uint32_t k = 1; k < WIDTH; ++k) highest = fmaxf(highest, z[k]);
        raise(highest);
        const float base = -most * LOG2_E;
        float part[WIDTH];
#pragma unroll
        for (uint32_t k = 0; k < WIDTH; ++k) part[k] = exponential(z[k], base);
        sum += sum_of(part);
    }
    __device__ __forceinline__ void lanes() {
        for (uint32_t half = QE_CUDA_WARP / 2; half > 0; half /= 2) {
            const soft_sum other = {__shfl_xor_sync(0xFFFFFFFFu, most, half), __shfl_xor_sync(0xFFFFFFFFu, sum, half)};
            const float above = fmaxf(most, other.most);
            sum = sum * power_of_two((most - above) * LOG2_E) + other.sum * power_of_two((other.most - above) * LOG2_E);
            most = above;
        }
    }
};

/* The whole block's, in every thread. */
__device__ soft_sum soft_block(soft_sum mine) {
    __shared__ soft_sum of_warp[QE_CUDA_WARPS_MAX];
    const uint32_t lane = threadIdx.x % QE_CUDA_WARP, warps = blockDim.x / QE_CUDA_WARP;
    mine.lanes();
    if (lane == 0) of_warp[threadIdx.x / QE_CUDA_WARP] = mine;
    __syncthreads();
    mine = lane < warps ? of_warp[lane] : soft_sum{LOSS_LOWEST, 0.0f};
    mine.lanes();
    return mine;
}

template <int WIDTH, bool KEPT>
__device__ void row_clear(logits_row<WIDTH, KEPT> &row, uint32_t pieces) {
    const float zero[WIDTH] = {};
    for (uint32_t i = threadIdx.x; i < pieces; i += blockDim.x) row.store(i, zero);
}

template <int WIDTH, bool KEPT>
__device__ void row_gradient(logits_row<WIDTH, KEPT> &row, uint32_t pieces, soft_sum all, uint32_t target,
                             float gradient_scale) {
    const float base = -all.most * LOG2_E, factor = __fdiv_rn(gradient_scale, all.sum);
    for (uint32_t i = threadIdx.x; i < pieces; i += blockDim.x) {
        float z[WIDTH];
        row.load(i, z);
        const uint32_t hot = i == target / WIDTH ? target % WIDTH : WIDTH; /* a constant index keeps registers */
#pragma unroll
        for (uint32_t k = 0; k < WIDTH; ++k)
            z[k] = exponential(z[k], base) * factor - (k == hot ? gradient_scale : 0.0f);
        row.store(i, z);
    }
}

template <int WIDTH, bool KEPT>
__global__ void __launch_bounds__(LOSS_THREADS_MAX) loss_rows(qe_args_cross_entropy args) {
    const uint32_t pieces = args.vocab / WIDTH;
    const size_t first = (size_t)blockIdx.x * args.vocab;
    const int32_t target = args.targets[blockIdx.x];
    logits_row<WIDTH, KEPT> row(args.logits, first);
    if (target < 0) {
        if (args.backward) row_clear(row, pieces);
        if (threadIdx.x == 0) args.row_losses[blockIdx.x] = 0.0;
        return;
    }
    row.fetch(pieces);
    float at_target = 0.0f; /* read before anybody writes: writes come behind the barrier of the sum */
    if (threadIdx.x == 0)
        at_target = __bfloat162float(static_cast<const __nv_bfloat16 *>(args.logits)[first + (uint32_t)target]);
    soft_sum all = {LOSS_LOWEST, 0.0f};
    for (uint32_t i = threadIdx.x; i < pieces; i += blockDim.x) {
        float z[WIDTH];
        row.load(i, z);
        all.add<WIDTH>(z);
    }
    all = soft_block(all);
    if (threadIdx.x == 0)
        args.row_losses[blockIdx.x] = log((double)all.sum) + ((double)all.most - (double)at_target);
    if (args.backward) row_gradient(row, pieces, all, (uint32_t)target, args.gradient_scale);
}

__global__ void __launch_bounds__(LOSS_THREADS_MAX) loss_sum(const double *row_losses, uint32_t rows, double *sum_out) {
    double sum = 0.0;
    for (uint32_t row = threadIdx.x; row < rows; row += LOSS_THREADS_MAX) sum += row_losses[row];
    sum = qe_block_sum(sum);
    if (threadIdx.x == 0) *sum_out = sum;
}

qe_status loss_rows_kept(const qe_args_cross_entropy *args, uint32_t threads, size_t bytes,
                                cudaStream_t stream) {
    const auto kernel = loss_rows<8, true>;
    if (bytes > LOSS_SHARED_BYTES_FREE &&
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes) != cudaSuccess)
        return QE_ERROR_DEVICE;
    return launch(kernel, args->rows, threads, 0, bytes, stream, *args);
}

qe_status loss_rows_launch(const qe_args_cross_entropy *args, cudaStream_t stream) {
    const int is_wide = args->vocab % 8 == 0 && is_aligned(args->logits);
    const size_t bytes = (size_t)args->vocab * sizeof(__nv_bfloat16);
    const uint32_t most = bytes > LOSS_SHARED_BYTES_HALF ? LOSS_THREADS_MAX : LOSS_THREADS;
    const uint32_t wanted = qe_cuda_threads(args->vocab / (is_wide ? 8 : 1) / LOSS_PIECES, most);
    const uint32_t threads = wanted < LOSS_THREADS_MIN ? LOSS_THREADS_MIN : wanted;
    if (!is_wide) return launch(loss_rows<1, false>, args->rows, threads, 0, 0, stream, *args);
    if (bytes > LOSS_SHARED_BYTES_MAX)
        return launch(loss_rows<8, false>, args->rows, threads, 0, 0, stream, *args);
    return loss_rows_kept(args, threads, bytes, stream);
}

} // namespace

qe_status qe_cuda_cross_entropy(const qe_args_cross_entropy *args, cudaStream_t stream) {
    const qe_status status = args->rows > 0 ? loss_rows_launch(args, stream) : QE_OK;
    if (status != QE_OK) return status;
    return launch(loss_sum, 1, LOSS_THREADS_MAX, 0, 0, stream, args->row_losses, args->rows, args->loss);
}
