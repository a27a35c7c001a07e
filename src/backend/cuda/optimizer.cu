/* optimizer.cu - the sum of squares of a gradient, and AdamW (adamw.cuh), with the bits of the host's kernel whatever
 * the compiler may fuse. Weights that are quantized with the same step: commit.cu. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/adamw.cuh"
#include "backend/cuda/block.cuh"

namespace {

/* --- Sum of squares: block b of a number of blocks that depends on `count` alone ------------------------------- */

constexpr uint32_t NORM_THREADS = 256;
constexpr uint32_t NORM_WIDTH = 4; /* neighbours that one thread takes: 16 bytes */
constexpr uint32_t NORM_UNROLL = 4;
constexpr uint32_t NORM_BLOCK = NORM_THREADS * NORM_WIDTH * NORM_UNROLL; /* elements that are worth a block */
constexpr uint32_t NORM_BLOCKS_MAX = QE_NORM_PARTIALS;

template <bool IS_ALIGNED>
__device__ __forceinline__ float4 norm_load(const float *grad, uint64_t piece) {
    const float *at = grad + piece * NORM_WIDTH;
    return IS_ALIGNED ? *reinterpret_cast<const float4 *>(at) : make_float4(at[0], at[1], at[2], at[3]);
}

__device__ __forceinline__ double norm_add(double sum, float4 value) {
    sum = fma((double)value.x, (double)value.x, sum); /* the square of a float is exact in double */
    sum = fma((double)value.y, (double)value.y, sum);
    sum = fma((double)value.z, (double)value.z, sum);
    return fma((double)value.w, (double)value.w, sum);
}

template <bool IS_ALIGNED>
__global__ void __launch_bounds__(NORM_THREADS) norm_blocks(const float *grad, uint64_t count, double *sums) {
    const uint64_t pieces = count / NORM_WIDTH, stride = (uint64_t)gridDim.x * NORM_THREADS;
    uint64_t piece = (uint64_t)blockIdx.x * NORM_THREADS + threadIdx.x;
    double sum = 0.0;
    for (; piece + (NORM_UNROLL - 1) * stride < pieces; piece += NORM_UNROLL * stride) {
        float4 value[NORM_UNROLL];
#pragma unroll
        for (uint32_t k = 0; k < NORM_UNROLL; ++k) value[k] = norm_load<IS_ALIGNED>(grad, piece + (uint64_t)k * stride);
#pragma unroll
        for (uint32_t k = 0; k < NORM_UNROLL; ++k) sum = norm_add(sum, value[k]);
    }
    for (; piece < pieces; piece += stride) sum = norm_add(sum, norm_load<IS_ALIGNED>(grad, piece));
    if (blockIdx.x == 0 && threadIdx.x < count % NORM_WIDTH) {
        const double value = (double)grad[pieces * NORM_WIDTH + threadIdx.x];
        sum = fma(value, value, sum);
    }
    sum = qe_block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(NORM_BLOCKS_MAX) norm_end(const double *partials, uint32_t count, double *sum_out) {
    const double sum = qe_block_sum(threadIdx.x < count ? partials[threadIdx.x] : 0.0);
    if (threadIdx.x == 0) *sum_out = sum;
}

} // namespace

qe_status qe_cuda_grad_norm(const qe_args_grad_norm *args, cudaStream_t stream) {
    const uint64_t wanted = pieces_of(args->count, NORM_BLOCK);
    const uint32_t blocks = wanted < 1 ? 1 : wanted < NORM_BLOCKS_MAX ? (uint32_t)wanted : NORM_BLOCKS_MAX;
    double *sums = blocks == 1 ? args->sum : args->partials;
    const auto kernel = is_aligned(args->grad) ? norm_blocks<true> : norm_blocks<false>;
    const qe_status status = launch(kernel, blocks, NORM_THREADS, 0, 0, stream, args->grad, args->count, sums);
    if (status != QE_OK || blocks == 1) return status;
    return launch(norm_end, 1, NORM_BLOCKS_MAX, 0, 0, stream, args->partials, blocks, args->sum);
}

/* --- AdamW ------------------------------------------------------------------------------------------------------ */

namespace {

constexpr uint32_t ADAMW_THREADS = 256;
constexpr uint32_t ADAMW_PIECES = 2; /* pieces of a thread: eight loads of 16 bytes are under way */

/* WIDTH neighbours, moved at once: float4 or float. */
template <int WIDTH>
struct alignas(WIDTH * sizeof(float)) floats {
    float at[WIDTH];
};

template <int WIDTH>
struct adamw_piece {
    floats<WIDTH> weight, grad, moment1, moment2;

    __device__ __forceinline__ void load(const qe_args_adamw &args, uint64_t i) {
        grad = reinterpret_cast<const floats<WIDTH> *>(args.grad)[i];
        weight = reinterpret_cast<const floats<WIDTH> *>(args.weight)[i];
        moment1 = reinterpret_cast<const floats<WIDTH> *>(args.moment1)[i];
        moment2 = reinterpret_cast<const floats<WIDTH> *>(args.moment2)[i];
    }

    __device__ __forceinline__ void update(const adamw_factors &f) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) adamw_one(f, grad.at[k], weight.at[k], moment1.at[k], moment2.at[k]);
    }

    __device__ __forceinline__ void store(const qe_args_adamw &args, uint64_t i) const {
        reinterpret_cast<floats<WIDTH> *>(args.weight)[i] = weight;
        reinterpret_cast<floats<WIDTH> *>(args.moment1)[i] = moment1;
        reinterpret_cast<floats<WIDTH> *>(args.moment2)[i] = moment2;
    }
};

template <int WIDTH>
__global__ void __launch_bounds__(ADAMW_THREADS) adamw_blocks(qe_args_adamw args) {
    const uint64_t pieces = args.count / WIDTH;
    const uint64_t span = (uint64_t)ADAMW_THREADS * ADAMW_PIECES;
    const int is_vetoed = args.fault != NULL && qe_word_now(&args.fault->fired) != 0;
    const adamw_factors factors = factors_of(args.step, args.decay);
    if (is_vetoed) return;
    if (args.witness != NULL) witness_enter(args.witness);
    for (uint64_t first = blockIdx.x * span + threadIdx.x; first < pieces; first += gridDim.x * span) {
        adamw_piece<WIDTH> piece[ADAMW_PIECES];
#pragma unroll
        for (uint32_t k = 0; k < ADAMW_PIECES; ++k)
            if (first + k * ADAMW_THREADS < pieces) piece[k].load(args, first + k * ADAMW_THREADS);
#pragma unroll
        for (uint32_t k = 0; k < ADAMW_PIECES; ++k) {
            if (first + k * ADAMW_THREADS >= pieces) continue;
            piece[k].update(factors);
            piece[k].store(args, first + k * ADAMW_THREADS);
        }
    }
    if (blockIdx.x == 0 && threadIdx.x < args.count % WIDTH) {
        adamw_piece<1> last;
        last.load(args, pieces * WIDTH + threadIdx.x);
        last.update(factors);
        last.store(args, pieces * WIDTH + threadIdx.x);
    }
    if (args.witness != NULL) witness_leave(args.witness, [](uint64_t) {});
}

} // namespace

qe_status qe_cuda_adamw_alone(const qe_args_adamw *args, cudaStream_t stream) {
    const int is_wide = is_aligned(args->weight) && is_aligned(args->grad) &&
                        is_aligned(args->moment1) && is_aligned(args->moment2);
    const uint64_t wanted = pieces_of(args->count, (is_wide ? 4u : 1u) * ADAMW_THREADS * ADAMW_PIECES);
    const uint64_t blocks = wanted < 1 ? 1 : wanted < ADAMW_BLOCKS_MAX ? wanted : ADAMW_BLOCKS_MAX;
    return launch(is_wide ? adamw_blocks<4> : adamw_blocks<1>, (uint32_t)blocks, ADAMW_THREADS, 0, 0, stream,
                  *args);
}
