/* fold.cu - qe_scale_fold of many scales in one launch, a block for each. The table of states travels in the kernel's
 * parameters, so a graph freezes it; the recipe too. Bit for bit src/core/recipe.c: a maximum has no order, the
 * division is rounded to nearest, the power of two is exact. */
#include <float.h>

#include "backend/cuda/kernels.h"
#include "backend/cuda/block.cuh"

namespace {

constexpr uint32_t FOLD_THREADS = 128;
constexpr uint32_t FOLD_STATES_FEW = 64;    /* a layer's twelve scales and more, in half a kilobyte of parameters */
constexpr uint32_t FOLD_STATES_MANY = 1024; /* 8 KiB of the 32 KiB that parameters may take */

template <uint32_t CAPACITY>
struct fold_table {
    qe_scale_state *states[CAPACITY];
};

/* NaN loses against any number, as `larger` of recipe.c. */
__device__ float fold_block_max(float value) {
    __shared__ float of_warp[FOLD_THREADS / QE_CUDA_WARP];
    for (uint32_t half = QE_CUDA_WARP / 2; half > 0; half /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, half));
    if (threadIdx.x % QE_CUDA_WARP == 0) of_warp[threadIdx.x / QE_CUDA_WARP] = value;
    __syncthreads();
    for (uint32_t warp = 0; warp < FOLD_THREADS / QE_CUDA_WARP; ++warp) value = fmaxf(value, of_warp[warp]);
    return value;
}

/* Largest of the row now recorded and the rows kept. */
__device__ float fold_window(const float *history, uint32_t length, float last) {
    float most = last;
    for (uint32_t i = 1 + threadIdx.x; i < length; i += FOLD_THREADS) most = fmaxf(most, history[i]);
    return fold_block_max(most);
}

/* h[i] <- h[i+1], a stretch at a time: all of it is read before any of it is written. */
__device__ void fold_roll(float *history, uint32_t length, float last) {
    for (uint32_t at = 1; at + 1 < length; at += FOLD_THREADS) {
        const uint32_t i = at + threadIdx.x;
        const float next = i + 1 < length ? history[i + 1] : 0.0f;
        __syncthreads();
        if (i + 1 < length) history[i] = next;
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    if (length > 1) history[length - 1] = last;
    history[0] = 0.0f;
}

__device__ float fold_scale(float scale, float format_max, int32_t margin, float amax) {
    const float scaled_max = ldexpf(format_max, -margin);
    if (isfinite(amax) && amax > 0.0f) scale = __fdiv_rn(scaled_max, amax);
    return isinf(scale) ? FLT_MAX : scale;
}

template <uint32_t CAPACITY>
__global__ void fold_states(const __grid_constant__ fold_table<CAPACITY> table, qe_recipe recipe,
                            const qe_guard_fault *fault) {
    if (fault != NULL && qe_word_now(&fault->fired)) return;
    qe_scale_state *state = table.states[blockIdx.x];
    float *history = state->history;
    const uint32_t length = state->history_length;
    const float last = state->amax, scale = state->scale;
    __syncthreads(); /* all have read what the first thread changes */
    if (threadIdx.x == 0) state->epoch++;
    if (last == 0.0f) return;
    const float amax = recipe.amax_algorithm == QE_AMAX_MAX ? fold_window(history, length, last) : last;
    fold_roll(history, length, last);
    if (threadIdx.x != 0) return;
    state->scale = fold_scale(scale, state->format_max, recipe.margin, amax);
    state->amax = 0.0f;
}

template <uint32_t CAPACITY>
qe_status fold_some(const qe_args_fold *args, uint32_t first, uint32_t count, cudaStream_t stream) {
    fold_table<CAPACITY> table = {};
    for (uint32_t i = 0; i < count; ++i) table.states[i] = args->states[first + i];
    return launch(fold_states<CAPACITY>, count, FOLD_THREADS, 0, 0, stream, table, *args->recipe, args->fault);
}

} // namespace

qe_status qe_cuda_fold(const qe_args_fold *args, cudaStream_t stream) {
    qe_status status = QE_OK;
    for (uint32_t first = 0; first < args->count && status == QE_OK; first += FOLD_STATES_MANY) {
        const uint32_t left = args->count - first, count = left < FOLD_STATES_MANY ? left : FOLD_STATES_MANY;
        status = count <= FOLD_STATES_FEW ? fold_some<FOLD_STATES_FEW>(args, first, count, stream)
                                          : fold_some<FOLD_STATES_MANY>(args, first, count, stream);
    }
    return status;
}
