/* cutlass_fast.cu - weight gradients of E5M2 by E4M3 that add up in the matrix unit alone. */
#include "backend/cuda/cutlass_kernel.cuh"
#include "backend/cuda/cutlass_tables.h"

using namespace cut;

template <typename Tile, typename Cluster>
using cooperative = typename kernel_of<cutlass::float_e5m2_t, cutlass::float_e4m3_t, float, Tile, Cluster,
                                       schedule::KernelTmaWarpSpecializedCooperativeFP8FastAccum,
                                       cutlass::epilogue::TmaWarpSpecializedCooperative>::type;
template <typename Tile, typename Cluster>
using pingpong = typename kernel_of<cutlass::float_e5m2_t, cutlass::float_e4m3_t, float, Tile, Cluster,
                                    schedule::KernelTmaWarpSpecializedPingpongFP8FastAccum,
                                    cutlass::epilogue::TmaWarpSpecialized>::type;

using wide = cute::Shape<_128, _256, _128>;
using square = cute::Shape<_128, _128, _128>;
using down = cute::Shape<_2, _1, _1>;

extern "C" {
const qe_cutlass_kernel qe_cutlass_fast[] = {
    entry_of<cooperative<wide, down>>(QE_ACCUMULATE_FAST, QE_CUTLASS_COOPERATIVE),
    entry_of<pingpong<square, down>>(QE_ACCUMULATE_FAST, QE_CUTLASS_PINGPONG),
};
const uint32_t qe_cutlass_fast_count = sizeof qe_cutlass_fast / sizeof qe_cutlass_fast[0];
}
