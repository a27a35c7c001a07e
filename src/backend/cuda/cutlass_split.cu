/* cutlass_split.cu - weight gradients of E5M2 by E4M3 whose partial sums are promoted to fp32 every 128 terms. Both
 * sums stand in registers, which is what bounds the tiles: 192 columns for two groups of warps, or for one alone. */
#include "backend/cuda/cutlass_kernel.cuh"
#include "backend/cuda/further_tables.h"

using namespace cut;

template <typename Tile, typename Cluster>
using cooperative = gradient_of<schedule::KernelTmaWarpSpecializedCooperative, cooperative_epilogue, Tile, Cluster>;
template <typename Tile, typename Cluster>
using pingpong = gradient_of<schedule::KernelTmaWarpSpecializedPingpong, pingpong_epilogue, Tile, Cluster>;

using wide = cute::Shape<_128, _192, _128>;
using low = cute::Shape<_64, _192, _128>;
using across = cute::Shape<_1, _2, _1>;
using four = cute::Shape<_2, _2, _1>;

extern "C" {
const qe_further_kernel qe_cutlass_split[] = {
    entry_of<cooperative<square, down>>(QE_ACCUMULATE_SPLIT, QE_FURTHER_COOPERATIVE),
    entry_of<cooperative<square, across>>(QE_ACCUMULATE_SPLIT, QE_FURTHER_COOPERATIVE),
    entry_of<cooperative<square, four>>(QE_ACCUMULATE_SPLIT, QE_FURTHER_COOPERATIVE),
    entry_of<cooperative<wide, down>>(QE_ACCUMULATE_SPLIT, QE_FURTHER_COOPERATIVE),
    entry_of<pingpong<low, down>>(QE_ACCUMULATE_SPLIT, QE_FURTHER_PINGPONG),
};
const uint32_t qe_cutlass_split_count = sizeof qe_cutlass_split / sizeof qe_cutlass_split[0];
}
