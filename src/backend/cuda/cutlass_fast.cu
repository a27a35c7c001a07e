/* cutlass_fast.cu - weight gradients of E5M2 by E4M3 that add up in the matrix unit alone. */
#include "backend/cuda/cutlass_kernel.cuh"
#include "backend/cuda/further_tables.h"

using namespace cut;

template <typename Tile, typename Cluster>
using cooperative = gradient_of<schedule::KernelTmaWarpSpecializedCooperativeFP8FastAccum, cooperative_epilogue, Tile,
                                Cluster>;
template <typename Tile, typename Cluster>
using pingpong = gradient_of<schedule::KernelTmaWarpSpecializedPingpongFP8FastAccum, pingpong_epilogue, Tile, Cluster>;

using wide = cute::Shape<_128, _256, _128>;

extern "C" {
const qe_further_kernel qe_cutlass_fast[] = {
    entry_of<cooperative<wide, down>>(QE_ACCUMULATE_FAST, QE_FURTHER_COOPERATIVE),
    entry_of<pingpong<square, down>>(QE_ACCUMULATE_FAST, QE_FURTHER_PINGPONG),
};
const uint32_t qe_cutlass_fast_count = sizeof qe_cutlass_fast / sizeof qe_cutlass_fast[0];
}
