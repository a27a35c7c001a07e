/* cross_entropy.cu - loss and, in place of the bf16 logits, their gradient. A short row stays in a warp's registers. A
 * longer one is a block's: where it fits into the shared memory of a block, or of a few blocks of a cluster, it is read
 * from the device once; else twice. The sum of exponentials is fp32 with a running maximum, each thread over its own
 * elements, then lanes and warps by halves; the loss of a row is fp64. Orders depend on the shape alone.
 * Instructions bound it besides memory: nothing is done for every logit that only the target's needs. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/block.cuh"
#include "backend/cuda/device.cuh"

namespace {

constexpr size_t LOSS_SHARED_BYTES_MAX = 112 * 1024; /* of a block: up to it two share a multiprocessor */
constexpr uint32_t LOSS_THREADS_MIN = 64, LOSS_THREADS = 512, LOSS_THREADS_MAX = 1024; /* of a row */
constexpr uint32_t LOSS_CLUSTER = 8; /* blocks that share a row too long for one: many such fit a multiprocessor */
constexpr size_t LOSS_CLUSTER_BYTES_MAX = 448 * 1024; /* of its row: above it few warps would be at work */
constexpr uint32_t LOSS_PIECES = 4;  /* that a thread has, or one more, where a row needs fewer than all threads */
constexpr uint32_t SHORT_PIECES = 4; /* of a lane, which has one of every 32 of a row */
constexpr uint32_t SHORT_VOCAB_MAX = SHORT_PIECES * QE_CUDA_WARP * 8;
constexpr uint32_t SHORT_ROWS = 8; /* of a block */
constexpr uint32_t SUM_THREADS = 256, SUM_THREADS_MAX = 1024, SUM_TERMS = 8; /* of a thread, asked for at once */
constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LOSS_LOWEST = -1e38f; /* the maximum of nothing: times log2(e) it is still finite */

/* e^(z - most), where base = -most * log2(e). */
__device__ __forceinline__ float exponential(float z, float base) {
    return power_of_two(fmaf(z, LOG2_E, base));
}

/* --- Eight logits side by side --- */

__device__ __forceinline__ void unpack(uint4 pairs, float z[8]) {
    z[0] = qe_bf16_low(pairs.x), z[1] = qe_bf16_high(pairs.x);
    z[2] = qe_bf16_low(pairs.y), z[3] = qe_bf16_high(pairs.y);
    z[4] = qe_bf16_low(pairs.z), z[5] = qe_bf16_high(pairs.z);
    z[6] = qe_bf16_low(pairs.w), z[7] = qe_bf16_high(pairs.w);
}

__device__ __forceinline__ uint4 pack(const float z[8]) {
    return make_uint4(qe_bf16_pair(z[0], z[1]), qe_bf16_pair(z[2], z[3]), qe_bf16_pair(z[4], z[5]),
                      qe_bf16_pair(z[6], z[7]));
}

__device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b) {
    const __nv_bfloat162 larger =
        __hmax2(*reinterpret_cast<const __nv_bfloat162 *>(&a), *reinterpret_cast<const __nv_bfloat162 *>(&b));
    return *reinterpret_cast<const uint32_t *>(&larger);
}

__device__ __forceinline__ float highest_of(uint4 pairs) {
    const uint32_t larger = larger_pair(larger_pair(pairs.x, pairs.y), larger_pair(pairs.z, pairs.w));
    return fmaxf(qe_bf16_low(larger), qe_bf16_high(larger));
}

/* --- A thread's pieces of a row --- */

/* Threads of BLOCKS blocks, one after the other, take a piece each in turns. THREADS of a block; 0: fewer than the
 * most, so that turns are few. */
template <uint32_t BLOCKS, uint32_t THREADS>
struct row_share {
    uint32_t threads = THREADS > 0 ? THREADS : blockDim.x, step = BLOCKS * threads;
    uint32_t first = blockIdx.x % BLOCKS * threads + threadIdx.x, turns;

    __device__ __forceinline__ explicit row_share(uint32_t pieces) {
        if constexpr (THREADS > 0) {
            turns = first < pieces ? (pieces - first + step - 1) / step : 0;
        } else { /* a division by what is no constant is long */
            turns = 0;
#pragma unroll
            for (uint32_t turn = 0; turn <= LOSS_PIECES; ++turn) turns += first + turn * step < pieces;
        }
    }
    __device__ __forceinline__ bool has(uint32_t piece) const {
        if constexpr (THREADS > 0) return piece % step == first;
        bool found = false;
#pragma unroll
        for (uint32_t turn = 0; turn <= LOSS_PIECES; ++turn) found |= piece == first + turn * step;
        return found;
    }
    __device__ __forceinline__ uint32_t turn_of(uint32_t piece) const {
        return (piece - first) / step;
    }
};

/* A row in pieces of WIDTH logits. KEPT: a block's stay in its shared memory. */
template <int WIDTH, bool KEPT, typename share>
struct logits_row;

template <bool KEPT, typename share>
struct logits_row<8, KEPT, share> {
    share mine;
    uint4 *at, *kept;

    __device__ __forceinline__ logits_row(__nv_bfloat16 *logits, uint32_t pieces) : mine(pieces) {
        extern __shared__ __align__(128) uint4 shared[]; /* or a line of copies falls upon two of its lines */
        at = reinterpret_cast<uint4 *>(logits) + mine.first;
        kept = shared + threadIdx.x;
    }
    __device__ __forceinline__ void ask() {
        if constexpr (KEPT)
            for (uint32_t turn = 0; turn < mine.turns; ++turn)
                copy_ahead(kept + turn * mine.threads, at + turn * mine.step);
    }
    /* A thread waits for its own copies only and reads only those. */
    __device__ __forceinline__ void wait() {
        if constexpr (KEPT) copies_wait();
    }
    /* Returns the highest. */
    __device__ __forceinline__ float load(uint32_t turn, float z[8]) const {
        const uint4 pairs = KEPT ? kept[turn * mine.threads] : at[turn * mine.step];
        unpack(pairs, z);
        return highest_of(pairs);
    }
    __device__ __forceinline__ void store(uint32_t turn, const float z[8]) {
        at[turn * mine.step] = pack(z);
    }
    /* One logit of this thread's. */
    __device__ __forceinline__ float logit(uint32_t column) const {
        const uint32_t turn = mine.turn_of(column / 8);
        const uint4 *piece = KEPT ? kept + turn * mine.threads : at + turn * mine.step;
        return __bfloat162float(reinterpret_cast<const __nv_bfloat16 *>(piece)[column % 8]);
    }
};

template <typename share>
struct logits_row<1, false, share> {
    share mine;
    __nv_bfloat16 *at;

    __device__ __forceinline__ logits_row(__nv_bfloat16 *logits, uint32_t pieces) : mine(pieces) {
        at = logits + mine.first;
    }
    __device__ __forceinline__ void ask() {
    }
    __device__ __forceinline__ void wait() {
    }
    __device__ __forceinline__ float load(uint32_t turn, float z[1]) const {
        return z[0] = __bfloat162float(at[turn * mine.step]);
    }
    __device__ __forceinline__ void store(uint32_t turn, const float z[1]) {
        at[turn * mine.step] = __float2bfloat16_rn(z[0]);
    }
    __device__ __forceinline__ float logit(uint32_t column) const {
        return __bfloat162float(at[mine.turn_of(column) * mine.step]);
    }
};

/* --- Sums of exponentials --- */

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
    __device__ __forceinline__ void add(const float z[WIDTH], float highest) {
        raise(highest);
        const float base = -most * LOG2_E;
        float part[WIDTH];
#pragma unroll
        for (uint32_t k = 0; k < WIDTH; ++k) part[k] = exponential(z[k], base);
        sum += sum_of(part);
    }
    __device__ __forceinline__ void join(soft_sum other) {
        const float above = fmaxf(most, other.most);
        sum = sum * power_of_two((most - above) * LOG2_E) + other.sum * power_of_two((other.most - above) * LOG2_E);
        most = above;
    }
    __device__ __forceinline__ void lanes() {
        for (uint32_t half = QE_CUDA_WARP / 2; half > 0; half /= 2)
            join({__shfl_xor_sync(0xFFFFFFFFu, most, half), __shfl_xor_sync(0xFFFFFFFFu, sum, half)});
    }
};

/* Sums of the warps that share a row. Other blocks of the cluster send theirs. */
struct meeting {
    float2 of_warp[QE_CUDA_WARPS_MAX];
    mailbox box;
};

template <uint32_t BLOCKS>
__device__ __forceinline__ void meeting_open(meeting &all) {
    if constexpr (BLOCKS > 1) {
        if (threadIdx.x == 0) {
            mailbox_open(&all.box);
            mailbox_arm(&all.box, BLOCKS * (blockDim.x / QE_CUDA_WARP) * sizeof(float2));
        }
        warp_barrier(0xFFFFFFFFu); /* a cluster's barrier is for whole warps */
        cluster_arrive();
    }
}

/* The whole row's, in every thread. */
template <uint32_t BLOCKS>
__device__ soft_sum soft_row(meeting &all, soft_sum mine) {
    const uint32_t lane = threadIdx.x % QE_CUDA_WARP, warp = threadIdx.x / QE_CUDA_WARP;
    const uint32_t warps = blockDim.x / QE_CUDA_WARP;
    mine.lanes();
    const float2 sent = make_float2(mine.most, mine.sum);
    if constexpr (BLOCKS == 1) {
        if (lane == 0) all.of_warp[warp] = sent;
        __syncthreads();
    } else {
        cluster_wait(); /* all blocks run, and their mailboxes are armed */
        if (lane < BLOCKS) mailbox_send(&all.of_warp[blockIdx.x % BLOCKS * warps + warp], &all.box, lane, sent);
        mailbox_wait(&all.box, 0);
    }
    mine = {LOSS_LOWEST, 0.0f};
    if (lane < BLOCKS * warps) mine = {all.of_warp[lane].x, all.of_warp[lane].y};
    mine.lanes();
    return mine;
}

/* --- What becomes of a row --- */

/* What a row's gradient is made with. */
struct row_scale {
    float base, factor;

    /* As of logits that are not the target's. */
    template <int WIDTH>
    __device__ __forceinline__ void apply(float z[WIDTH]) const {
#pragma unroll
        for (uint32_t k = 0; k < WIDTH; ++k) z[k] = exponential(z[k], base) * factor;
    }
    __device__ __forceinline__ __nv_bfloat16 of_target(float z, float gradient_scale) const {
        return __float2bfloat16_rn(exponential(z, base) * factor - gradient_scale);
    }
};

__device__ __forceinline__ row_scale scale_of(soft_sum all, float gradient_scale) {
    return {-all.most * LOG2_E, quotient(gradient_scale, all.sum)};
}

__device__ __forceinline__ double loss_of(soft_sum all, float at_target) {
    return log((double)all.sum) + ((double)all.most - (double)at_target);
}

template <int WIDTH, typename row_kind>
__device__ __forceinline__ void row_clear(row_kind &row) {
    const float zero[WIDTH] = {};
    for (uint32_t turn = 0; turn < row.mine.turns; ++turn) row.store(turn, zero);
}

/* BLOCKS of a cluster take a row. The thread that has the target's piece makes the loss, and stores the target's
 * gradient over the piece's. Logits are asked for before it is known whether they count. */
template <int WIDTH, bool KEPT, uint32_t BLOCKS, uint32_t THREADS>
__global__ void __launch_bounds__(THREADS > 0 ? THREADS : LOSS_THREADS_MAX) loss_rows(qe_args_cross_entropy args) {
    __shared__ meeting sums;
    const uint32_t number = blockIdx.x / BLOCKS;
    __nv_bfloat16 *logits = static_cast<__nv_bfloat16 *>(args.logits) + (size_t)number * args.vocab;
    logits_row<WIDTH, KEPT, row_share<BLOCKS, THREADS>> row(logits, args.vocab / WIDTH);
    row.ask();
    const uint32_t target = (uint32_t)args.targets[number];
    if (target >= args.vocab) { /* negative: not counted */
        row.wait();
        if (args.backward) row_clear<WIDTH>(row);
        if (row.mine.first == 0) args.row_losses[number] = 0.0;
        return;
    }
    meeting_open<BLOCKS>(sums);
    row.wait();
    soft_sum all = {LOSS_LOWEST, 0.0f};
    float z[WIDTH];
#pragma unroll 4
    for (uint32_t turn = 0; turn < row.mine.turns; ++turn) {
        const float highest = row.load(turn, z);
        all.add<WIDTH>(z, highest);
    }
    all = soft_row<BLOCKS>(sums, all);
    const bool is_owner = row.mine.has(target / WIDTH);
    const float at_target = is_owner ? row.logit(target) : 0.0f;
    if (args.backward) {
        const row_scale scale = scale_of(all, args.gradient_scale);
#pragma unroll 4
        for (uint32_t turn = 0; turn < row.mine.turns; ++turn) {
            row.load(turn, z);
            scale.apply<WIDTH>(z);
            row.store(turn, z);
        }
        if (is_owner) logits[target] = scale.of_target(at_target, args.gradient_scale);
    }
    if (is_owner) args.row_losses[number] = loss_of(all, at_target);
}

/* --- Short rows --- */

/* The sum in the order of a block of 64 threads: a lane is two of them. */
__device__ __forceinline__ soft_sum short_sum(const uint4 (&row)[SHORT_PIECES], uint32_t pieces) {
    const uint32_t lane = threadIdx.x % QE_CUDA_WARP;
    soft_sum all[2] = {{LOSS_LOWEST, 0.0f}, {LOSS_LOWEST, 0.0f}};
#pragma unroll
    for (uint32_t i = 0; i < SHORT_PIECES; ++i) {
        if (lane + QE_CUDA_WARP * i >= pieces) continue;
        float z[8];
        unpack(row[i], z);
        all[i % 2].add<8>(z, highest_of(row[i]));
    }
    all[0].lanes();
    all[1].lanes();
    all[0].join(all[1]);
    return all[0];
}

__device__ __forceinline__ void short_gradient(uint4 *at, const uint4 (&row)[SHORT_PIECES], uint32_t pieces,
                                               const row_scale &scale, bool is_counted) {
    const uint32_t lane = threadIdx.x % QE_CUDA_WARP;
#pragma unroll
    for (uint32_t i = 0; i < SHORT_PIECES; ++i) {
        const uint32_t piece = lane + QE_CUDA_WARP * i;
        if (piece >= pieces) continue;
        float z[8];
        unpack(row[i], z);
        scale.apply<8>(z);
        at[piece] = is_counted ? pack(z) : make_uint4(0, 0, 0, 0);
    }
}

/* A warp's row. Leaves what its loss is made of, 0 where the target is not counted. */
__device__ void short_row(const qe_args_cross_entropy &args, uint32_t number, soft_sum *sum_out, float *at_target_out) {
    const uint32_t lane = threadIdx.x % QE_CUDA_WARP, pieces = args.vocab / 8;
    __nv_bfloat16 *logits = static_cast<__nv_bfloat16 *>(args.logits) + (size_t)number * args.vocab;
    uint4 *at = reinterpret_cast<uint4 *>(logits), row[SHORT_PIECES];
#pragma unroll
    for (uint32_t i = 0; i < SHORT_PIECES; ++i)
        if (lane + QE_CUDA_WARP * i < pieces) row[i] = at[lane + QE_CUDA_WARP * i];
    const uint32_t target = (uint32_t)args.targets[number];
    const bool is_counted = target < args.vocab, is_owner = is_counted && target / 8 % QE_CUDA_WARP == lane;
    const float at_target = is_owner ? __bfloat162float(logits[target]) : 0.0f;
    const soft_sum all = short_sum(row, pieces);
    if (args.backward) {
        const row_scale scale = scale_of(all, args.gradient_scale);
        short_gradient(at, row, pieces, scale, is_counted);
        if (is_owner) logits[target] = scale.of_target(at_target, args.gradient_scale);
    }
    if (is_owner) *sum_out = all, *at_target_out = at_target;
    if (!is_counted && lane == 0) *sum_out = {0.0f, 1.0f}, *at_target_out = 0.0f;
}

/* A warp takes a row; the first one adds the block's losses to one number. */
__global__ void __launch_bounds__(SHORT_ROWS *QE_CUDA_WARP) loss_short_rows(qe_args_cross_entropy args) {
    __shared__ soft_sum sums[SHORT_ROWS];
    __shared__ float at_targets[SHORT_ROWS];
    const uint32_t lane = threadIdx.x % QE_CUDA_WARP, warp = threadIdx.x / QE_CUDA_WARP;
    const uint32_t first = blockIdx.x * SHORT_ROWS;
    if (first + warp < args.rows) short_row(args, first + warp, &sums[warp], &at_targets[warp]);
    __syncthreads();
    if (warp > 0) return;
    double sum = lane < SHORT_ROWS && first + lane < args.rows ? loss_of(sums[lane], at_targets[lane]) : 0.0;
    for (uint32_t half = SHORT_ROWS / 2; half > 0; half /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, half);
    if (lane == 0) args.row_losses[blockIdx.x] = sum;
}

/* --- The sum of all --- */

__global__ void __launch_bounds__(SUM_THREADS_MAX) loss_sum(const double *losses, uint32_t count, double *sum_out) {
    double sum = 0.0;
    for (uint32_t first = threadIdx.x; first < count; first += SUM_TERMS * blockDim.x) {
        double term[SUM_TERMS];
#pragma unroll
        for (uint32_t k = 0; k < SUM_TERMS; ++k) {
            const uint32_t at = first + k * blockDim.x;
            term[k] = at < count ? losses[at] : 0.0;
        }
#pragma unroll
        for (uint32_t k = 0; k < SUM_TERMS; ++k) sum += term[k];
    }
    sum = qe_block_sum(sum);
    if (threadIdx.x == 0) *sum_out = sum;
}

/* --- Launches --- */

/* A block has a row. */
template <int WIDTH, bool KEPT>
qe_status loss_rows_alone(const qe_args_cross_entropy *args, uint32_t threads, cudaStream_t stream) {
    const size_t kept = KEPT ? (size_t)args->vocab * sizeof(__nv_bfloat16) : 0;
    const auto kernel = threads == LOSS_THREADS_MAX ? loss_rows<WIDTH, KEPT, 1, LOSS_THREADS_MAX>
                        : threads == LOSS_THREADS   ? loss_rows<WIDTH, KEPT, 1, LOSS_THREADS>
                                                    : loss_rows<WIDTH, KEPT, 1, 0>;
    return launch(kernel, args->rows, threads, 0, kept, stream, *args);
}

qe_status loss_rows_shared(const qe_args_cross_entropy *args, cudaStream_t stream) {
    constexpr uint32_t THREADS = LOSS_THREADS_MAX / LOSS_CLUSTER;
    const size_t kept = (size_t)pieces_of(args->vocab / 8, LOSS_THREADS_MAX) * THREADS * sizeof(uint4);
    return launch(loss_rows<8, true, LOSS_CLUSTER, THREADS>, args->rows * LOSS_CLUSTER, THREADS, LOSS_CLUSTER, kept,
                  stream, *args);
}

qe_status loss_rows_launch(const qe_args_cross_entropy *args, cudaStream_t stream) {
    const int is_wide = args->vocab % 8 == 0 && is_aligned(args->logits);
    const size_t bytes = (size_t)args->vocab * sizeof(__nv_bfloat16);
    const uint32_t most = bytes > LOSS_SHARED_BYTES_MAX ? LOSS_THREADS_MAX : LOSS_THREADS;
    const uint32_t wanted = qe_cuda_threads(args->vocab / (is_wide ? 8 : 1) / LOSS_PIECES, most);
    const uint32_t threads = wanted < LOSS_THREADS_MIN ? LOSS_THREADS_MIN : wanted;
    if (!is_wide) return loss_rows_alone<1, false>(args, threads, stream);
    if (bytes <= LOSS_SHARED_BYTES_MAX) return loss_rows_alone<8, true>(args, threads, stream);
    if (bytes <= LOSS_CLUSTER_BYTES_MAX && args->rows <= INT32_MAX / LOSS_CLUSTER)
        return loss_rows_shared(args, stream);
    return loss_rows_alone<8, false>(args, threads, stream);
}

} // namespace

qe_status qe_cuda_cross_entropy(const qe_args_cross_entropy *args, cudaStream_t stream) {
    const bool is_short = args->vocab % 8 == 0 && args->vocab <= SHORT_VOCAB_MAX && is_aligned(args->logits);
    const uint32_t losses = is_short ? pieces_of(args->rows, SHORT_ROWS) : args->rows;
    if (is_short)
        LAUNCH_TRY(launch(loss_short_rows, losses, SHORT_ROWS * QE_CUDA_WARP, 0, 0, stream, *args));
    else
        LAUNCH_TRY(loss_rows_launch(args, stream));
    const uint32_t threads = losses > SUM_THREADS * SUM_TERMS ? SUM_THREADS_MAX : SUM_THREADS;
    return launch(loss_sum, 1, threads, 0, 0, stream, args->row_losses, losses, args->loss);
}
