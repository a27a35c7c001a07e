/* guard.cu - the device moment: witness words of slots and gradients rise, guards look at witness words, tests delay a
 * stream. All but long tallies are a single block whose time is its latency: two loads in a row for a guard. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/block.cuh"

namespace {

constexpr uint32_t GUARD_THREADS_MAX = 1024;

/* A word may be given twice; then it rises twice. */
__global__ void stamp_words(const __grid_constant__ qe_args_stamp args) {
    if (threadIdx.x < args.count)
        atomicAdd(reinterpret_cast<unsigned long long *>(args.words[threadIdx.x]), 1ull);
}

__global__ void tally_words(uint64_t *words, uint32_t count) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) ++words[i];
}

/* The first guard that fires keeps the fault, whatever runs beside it: only who turns `fired` from 0 to 1 writes. */
__device__ void fault_keep(const qe_args_guard &args, uint32_t entry, uint64_t found) {
    qe_guard_fault *fault = args.fault;
    if (atomicCAS(reinterpret_cast<unsigned long long *>(&fault->fired), 0ull, 1ull) != 0ull) return;
    fault->launch = *args.launch;
    fault->entry = args.first_entry + entry;
    fault->expected = args.expected[entry];
    fault->found = found;
}

/* One warp and a word per lane, where that is enough: no barrier of a block, and the address and what is expected of
 * the word are under way together. */
__global__ void __launch_bounds__(QE_CUDA_WARP) guard_few(const __grid_constant__ qe_args_guard args) {
    const uint32_t i = threadIdx.x < args.count ? threadIdx.x : 0;
    const uint64_t *word = args.words[i];
    const uint64_t expected = args.expected[i], found = qe_word_now(word);
    const uint32_t wrong = __ballot_sync(0xFFFFFFFFu, found != expected);
    if (wrong != 0 && threadIdx.x == static_cast<uint32_t>(__ffs(static_cast<int>(wrong)) - 1))
        fault_keep(args, i, found);
}

__global__ void guard_words(const __grid_constant__ qe_args_guard args) {
    __shared__ uint32_t first_wrong;
    uint32_t wrong = UINT32_MAX;
    uint64_t found = 0;
    for (uint32_t i = threadIdx.x; i < args.count && wrong == UINT32_MAX; i += blockDim.x) {
        const uint64_t expected = args.expected[i];
        found = qe_word_now(args.words[i]);
        if (found != expected) wrong = i;
    }
    if (!__syncthreads_or(wrong != UINT32_MAX)) return;
    if (threadIdx.x == 0) first_wrong = UINT32_MAX;
    __syncthreads();
    atomicMin(&first_wrong, wrong);
    __syncthreads();
    if (wrong == first_wrong) fault_keep(args, wrong, found);
}

/* The timer of the whole chip: the clock of a multiprocessor changes its rate. */
__global__ void delay_for(uint64_t nanoseconds) {
    uint64_t begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - begin < nanoseconds);
}

} // namespace

qe_status qe_cuda_stamp(const qe_args_stamp *args, cudaStream_t stream) {
    return launch(stamp_words, 1, QE_CUDA_WARP, 0, 0, stream, *args);
}

qe_status qe_cuda_tally(const qe_args_tally *args, cudaStream_t stream) {
    const uint32_t threads = qe_cuda_threads(args->count, GUARD_THREADS_MAX);
    if (args->count == 0) return QE_OK;
    return launch(tally_words, pieces_of(args->count, threads), threads, 0, 0, stream, args->words, args->count);
}

qe_status qe_cuda_guard(const qe_args_guard *args, cudaStream_t stream) {
    if (args->count == 0) return QE_OK;
    if (args->count <= QE_CUDA_WARP) return launch(guard_few, 1, QE_CUDA_WARP, 0, 0, stream, *args);
    return launch(guard_words, 1, qe_cuda_threads(args->count, GUARD_THREADS_MAX), 0, 0, stream, *args);
}

qe_status qe_cuda_delay(uint64_t nanoseconds, cudaStream_t stream) {
    return launch(delay_for, 1, 1, 0, 0, stream, nanoseconds);
}
