/* adamw.cu - AdamW (adamw.cuh) with the bits of the host's kernel whatever the compiler may fuse. Weights that are
 * quantized with the same step: commit.cu. */
#include "backend/cuda/adamw.cuh"
#include "backend/cuda/kernels.h"
#include "backend/cuda/launch.cuh"

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

    METHOD void load(const qe_args_adamw &args, uint64_t i) {
        grad = reinterpret_cast<const floats<WIDTH> *>(args.grad)[i];
        weight = reinterpret_cast<const floats<WIDTH> *>(args.weight)[i];
        moment1 = reinterpret_cast<const floats<WIDTH> *>(args.moment1)[i];
        moment2 = reinterpret_cast<const floats<WIDTH> *>(args.moment2)[i];
    }

    METHOD void update(const adamw_factors &f) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) adamw_one(f, grad.at[k], weight.at[k], moment1.at[k], moment2.at[k]);
    }

    METHOD void store(const qe_args_adamw &args, uint64_t i) const {
        reinterpret_cast<floats<WIDTH> *>(args.weight)[i] = weight;
        reinterpret_cast<floats<WIDTH> *>(args.moment1)[i] = moment1;
        reinterpret_cast<floats<WIDTH> *>(args.moment2)[i] = moment2;
    }
};

template <int WIDTH>
KERNEL void __launch_bounds__(ADAMW_THREADS) adamw_blocks(qe_args_adamw args) {
    const uint64_t pieces = args.count / WIDTH;
    const uint64_t span = (uint64_t)ADAMW_THREADS * ADAMW_PIECES;
    const int is_vetoed = args.fault != NULL && word_now(&args.fault->fired) != 0;
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
