/* cross_entropy.cu - loss and, in place of the bf16 logits, their gradient; a block for each row. Where a row fits into
 * the shared memory of a block, or of a few blocks of a cluster, it is read from the device once; else twice. The sum
 * of exponentials is fp32 with a running maximum, each thread over its own elements, then lanes and warps by halves;
 * the loss of a row is fp64. Orders depend on the shape alone. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/block.cuh"

namespace {

constexpr size_t LOSS_SHARED_BYTES_MAX = 226 * 1024;  /* what a block of this architecture may have, less a few words */
constexpr size_t LOSS_SHARED_BYTES_HALF = 112 * 1024; /* up to it two blocks share a multiprocessor */
constexpr uint32_t LOSS_THREADS_MIN = 64, LOSS_THREADS = 512, LOSS_THREADS_MAX = 1024;
constexpr uint32_t LOSS_CLUSTER = 4;  /* blocks that share a row too long for one: several such fit a multiprocessor */
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

/* A thread's next piece of a row, where threads of BLOCKS blocks, one after the other, take a piece each in turns. */
template <uint32_t BLOCKS>
struct piece {
    uint32_t at = blockIdx.x % BLOCKS * blockDim.x + threadIdx.x; /* of the row */
    uint32_t kept = threadIdx.x;                                  /* of the block's shared memory */

    __device__ __forceinline__ void next() {
        at += BLOCKS * blockDim.x;
        kept += blockDim.x;
    }
};

/* A row in pieces of WIDTH logits. KEPT: a block's stay in its shared memory. */
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
    template <uint32_t BLOCKS>
    __device__ __forceinline__ void fetch(uint32_t pieces) {
        if constexpr (KEPT) {
            for (piece<BLOCKS> p; p.at < pieces; p.next()) {
                const uint32_t to = (uint32_t)__cvta_generic_to_shared(kept + p.kept);
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(at + p.at) : "memory");
            }
            asm volatile("cp.async.commit_group;\n cp.async.wait_group 0;" ::: "memory");
        }
    }
    template <uint32_t BLOCKS>
    __device__ __forceinline__ void load(const piece<BLOCKS> &p, float z[8]) const {
        const uint4 pairs = KEPT ? kept[p.kept] : at[p.at];
        z[0] = qe_bf16_low(pairs.x), z[1] = qe_bf16_high(pairs.x);
        z[2] = qe_bf16_low(pairs.y), z[3] = qe_bf16_high(pairs.y);
        z[4] = qe_bf16_low(pairs.z), z[5] = qe_bf16_high(pairs.z);
        z[6] = qe_bf16_low(pairs.w), z[7] = qe_bf16_high(pairs.w);
    }
    template <uint32_t BLOCKS>
    __device__ __forceinline__ void store(const piece<BLOCKS> &p, const float z[8]) {
        at[p.at] = make_uint4(qe_bf16_pair(z[0], z[1]), qe_bf16_pair(z[2], z[3]), qe_bf16_pair(z[4], z[5]),
                           qe_bf16_pair(z[6], z[7]));
    }
};

template <>
struct logits_row<1, false> {
    __nv_bfloat16 *at;

    __device__ __forceinline__ logits_row(void *logits, size_t first) {
        at = static_cast<__nv_bfloat16 *>(logits) + first;
    }
    template <uint32_t BLOCKS>
    __device__ __forceinline__ void fetch(uint32_t) {
    }
    template <uint32_t BLOCKS>
    __device__ __forceinline__ void load(const piece<BLOCKS> &p, float z[1]) const {
        z[0] = __bfloat162float(at[p.at]);
    }
    template <uint32_t BLOCKS>
    __device__ __forceinline__ void store(const piece<BLOCKS> &p, const float z[1]) {
        at[p.at] = __float2bfloat16_rn(z[0]);
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

/* Blocks of a cluster meet. Half a barrier each: what was written before arriving is seen after waiting. */
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* Where block `rank` of the cluster has what lies at `at` here. */
__device__ __forceinline__ void cluster_store(const soft_sum *at, uint32_t rank, soft_sum value) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.v2.f32 [there], {%2, %3};\n}" ::"r"((uint32_t)__cvta_generic_to_shared(at)),
        "r"(rank), "f"(value.most), "f"(value.sum)
        : "memory");
}

/* The whole row's, in every thread. Where blocks share it, they have arrived once. */
template <uint32_t BLOCKS>
__device__ soft_sum soft_row(soft_sum mine) {
    __shared__ __align__(8) soft_sum of_warp[QE_CUDA_WARPS_MAX];
    const uint32_t lane = threadIdx.x % QE_CUDA_WARP, warp = threadIdx.x / QE_CUDA_WARP;
    const uint32_t warps = blockDim.x / QE_CUDA_WARP;
    mine.lanes();
    if constexpr (BLOCKS == 1) {
        if (lane == 0) of_warp[warp] = mine;
        __syncthreads();
    } else {
        cluster_wait(); /* all blocks run, so that they may be written to */
        if (lane < BLOCKS) cluster_store(&of_warp[blockIdx.x % BLOCKS * warps + warp], lane, mine);
        cluster_arrive();
        cluster_wait();
    }
    mine = lane < BLOCKS * warps ? of_warp[lane] : soft_sum{LOSS_LOWEST, 0.0f};
    mine.lanes();
    return mine;
}

template <int WIDTH, bool KEPT, uint32_t BLOCKS>
__device__ void row_clear(logits_row<WIDTH, KEPT> &row, uint32_t pieces) {
    const float zero[WIDTH] = {};
    for (piece<BLOCKS> p; p.at < pieces; p.next()) row.store(p, zero);
}

template <int WIDTH, bool KEPT, uint32_t BLOCKS>
__device__ void row_gradient(logits_row<WIDTH, KEPT> &row, uint32_t pieces, soft_sum all, uint32_t target,
                             float gradient_scale) {
    const float base = -all.most * LOG2_E, factor = __fdiv_rn(gradient_scale, all.sum);
    for (piece<BLOCKS> p; p.at < pieces; p.next()) {
        float z[WIDTH];
        row.load(p, z);
        const uint32_t hot = p.at == target / WIDTH ? target % WIDTH : WIDTH; /* a constant index keeps registers */
#pragma unroll
        for (uint32_t k = 0; k < WIDTH; ++k)
            z[k] = exponential(z[k], base) * factor - (k == hot ? gradient_scale : 0.0f);
        row.store(p, z);
    }
}

/* BLOCKS of a cluster take a row. */
template <int WIDTH, bool KEPT, uint32_t BLOCKS>
__global__ void __launch_bounds__(LOSS_THREADS_MAX / BLOCKS) loss_rows(qe_args_cross_entropy args) {
    const uint32_t pieces = args.vocab / WIDTH, number = blockIdx.x / BLOCKS;
    const size_t first = (size_t)number * args.vocab;
    const int32_t target = args.targets[number];
    const bool is_first = blockIdx.x % BLOCKS == 0 && threadIdx.x == 0;
    logits_row<WIDTH, KEPT> row(args.logits, first);
    if (target < 0) {
        if (args.backward) row_clear<WIDTH, KEPT, BLOCKS>(row, pieces);
        if (is_first) args.row_losses[number] = 0.0;
        return;
    }
    if constexpr (BLOCKS > 1) cluster_arrive();
    row.template fetch<BLOCKS>(pieces);
    float at_target = 0.0f; /* read before anybody writes: writes come behind the barrier of the sum */
    if (is_first)
        at_target = __bfloat162float(static_cast<const __nv_bfloat16 *>(args.logits)[first + (uint32_t)target]);
    soft_sum all = {LOSS_LOWEST, 0.0f};
    for (piece<BLOCKS> p; p.at < pieces; p.next()) {
        float z[WIDTH];
        row.load(p, z);
        all.add<WIDTH>(z);
    }
    all = soft_row<BLOCKS>(all);
    if (is_first) args.row_losses[number] = log((double)all.sum) + ((double)all.most - (double)at_target);
    if (args.backward) row_gradient<WIDTH, KEPT, BLOCKS>(row, pieces, all, (uint32_t)target, args.gradient_scale);
}

__global__ void __launch_bounds__(LOSS_THREADS_MAX) loss_sum(const double *row_losses, uint32_t rows, double *sum_out) {
    double sum = 0.0;
    for (uint32_t row = threadIdx.x; row < rows; row += LOSS_THREADS_MAX) sum += row_losses[row];
    sum = qe_block_sum(sum);
    if (threadIdx.x == 0) *sum_out = sum;
}

/* bytes: of a row. */
template <uint32_t BLOCKS>
qe_status loss_rows_kept(const qe_args_cross_entropy *args, uint32_t threads, size_t bytes, cudaStream_t stream) {
    const uint32_t turns = pieces_of(args->vocab / 8, threads * BLOCKS);
    const size_t kept = BLOCKS == 1 ? bytes : (size_t)turns * threads * sizeof(uint4);
    return launch(loss_rows<8, true, BLOCKS>, args->rows * BLOCKS, threads, BLOCKS > 1 ? BLOCKS : 0, kept, stream,
                  *args);
}

qe_status loss_rows_launch(const qe_args_cross_entropy *args, cudaStream_t stream) {
    const int is_wide = args->vocab % 8 == 0 && is_aligned(args->logits);
    const size_t bytes = (size_t)args->vocab * sizeof(__nv_bfloat16);
    const uint32_t most = bytes > LOSS_SHARED_BYTES_HALF ? LOSS_THREADS_MAX : LOSS_THREADS;
    const uint32_t wanted = qe_cuda_threads(args->vocab / (is_wide ? 8 : 1) / LOSS_PIECES, most);
    const uint32_t threads = wanted < LOSS_THREADS_MIN ? LOSS_THREADS_MIN : wanted;
    if (!is_wide) return launch(loss_rows<1, false, 1>, args->rows, threads, 0, 0, stream, *args);
    if (bytes <= LOSS_SHARED_BYTES_MAX) return loss_rows_kept<1>(args, threads, bytes, stream);
    if (bytes <= LOSS_CLUSTER * LOSS_SHARED_BYTES_HALF && args->rows <= INT32_MAX / LOSS_CLUSTER)
        return loss_rows_kept<LOSS_CLUSTER>(args, threads / LOSS_CLUSTER, bytes, stream);
    return launch(loss_rows<8, false, 1>, args->rows, threads, 0, 0, stream, *args);
}

} // namespace

qe_status qe_cuda_cross_entropy(const qe_args_cross_entropy *args, cudaStream_t stream) {
    const qe_status status = args->rows > 0 ? loss_rows_launch(args, stream) : QE_OK;
    if (status != QE_OK) return status;
    return launch(loss_sum, 1, LOSS_THREADS_MAX, 0, 0, stream, args->row_losses, args->rows, args->loss);
}
