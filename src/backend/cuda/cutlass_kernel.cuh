/* cutlass_kernel.cuh - one 8-bit product as a persistent kernel of CUTLASS for sm_90a, and a table entry for it. Warps
 * that load run ahead of those that multiply, also across tiles: what is added is in shared memory before the product
 * is done, and results are on their way out while the next tile is multiplied.
 *
 *   D[m, n] = (scale_a[0] scale_b[0]) sum + beta C[m, n]     A [m, k] and B [n, k] row-major, C may be D
 *
 * The product of scales and sum is rounded once, the addition once more. Nothing is split along k and no tile is
 * taken by whoever comes first, so bits depend on the shape alone. */
#ifndef QE_CUDA_CUTLASS_KERNEL_CUH
#define QE_CUDA_CUTLASS_KERNEL_CUH

#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/version.h>

#include "backend/cuda/further.h"
#include "backend/cuda/launch.cuh"

namespace cut {

using cute::_1;
using cute::_2;
using cute::_64;
using cute::_128;
using cute::_192;
using cute::_256;
namespace fusion = cutlass::epilogue::fusion;
namespace schedule = cutlass::gemm;

constexpr auto ROUND = cutlass::FloatRoundStyle::round_to_nearest;
using stride_none = cute::Stride<cute::_0, cute::_0, int64_t>;

/* alpha sum + beta C as a tree: beta is 0 or 1 and known on the host, alpha is two words on the device. C is not
 * loaded where beta is 0. */
using both_scales = fusion::Sm90ScalarBroadcast<float, stride_none, 2>;
using scaled_sum =
    fusion::Sm90EVT<fusion::Sm90Compute<cutlass::multiplies, float, float, ROUND>, both_scales, fusion::Sm90AccFetch>;
template <typename Result>
using epilogue_tree =
    fusion::Sm90EVT<fusion::Sm90Compute<cutlass::homogeneous_multiply_add, Result, float, ROUND>,
                    fusion::Sm90ScalarBroadcast<float, stride_none>, fusion::Sm90SrcFetch<Result>, scaled_sum>;

template <typename First, typename Second, typename Result, typename Tile, typename Cluster, typename Schedule,
          typename EpilogueSchedule>
struct kernel_of {
    static constexpr int CODES_PER_LOAD = 16;                 /* 16 bytes, as TMA wants rows to be aligned */
    static constexpr int RESULTS_PER_LOAD = 16 / sizeof(Result);
    using row_major = cutlass::layout::RowMajor;
    using column_major = cutlass::layout::ColumnMajor;        /* of [k, n]: rows of [n, k] */
    using epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
        cutlass::epilogue::collective::EpilogueTileAuto, float, float, Result, row_major, RESULTS_PER_LOAD, Result,
        row_major, RESULTS_PER_LOAD, EpilogueSchedule, epilogue_tree<Result>>::CollectiveOp;
    using mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, First, row_major, CODES_PER_LOAD, Second, column_major,
        CODES_PER_LOAD, float, Tile, Cluster,
        cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename epilogue::SharedStorage))>,
        Schedule>::CollectiveOp;
    using type = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, mainloop, epilogue,
                                                      cutlass::gemm::PersistentScheduler>;
};

template <typename Kernel>
typename Kernel::Arguments arguments_of(const qe_product *product, const qe_product_data *data,
                                        const qe_further_device *device) {
    typename Kernel::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = {static_cast<int>(product->m), static_cast<int>(product->n), static_cast<int>(product->k),
                               1};
    arguments.mainloop.ptr_A = static_cast<typename Kernel::ElementA const *>(data->first);
    arguments.mainloop.dA = {product->k, _1{}, 0};
    arguments.mainloop.ptr_B = static_cast<typename Kernel::ElementB const *>(data->second);
    arguments.mainloop.dB = {product->k, _1{}, 0};
    arguments.epilogue.ptr_C = static_cast<typename Kernel::ElementC const *>(data->added);
    arguments.epilogue.dC = {product->n, _1{}, 0};
    arguments.epilogue.ptr_D = static_cast<typename Kernel::ElementD *>(data->result);
    arguments.epilogue.dD = {product->n, _1{}, 0};
    arguments.epilogue.thread = {
        {{data->beta}, {nullptr}},                                            /* beta */
        {},                                                                   /* C */
        {{{1.0f, 1.0f}, {data->first_scale, data->second_scale}}, {}, {}},    /* alpha sum */
        {},                                                                   /* fma */
    };
    arguments.hw_info.device_id = device->device;
    arguments.hw_info.sm_count = device->multiprocessors;
    arguments.hw_info.max_active_clusters = device->clusters;
    return arguments;
}

/* Everything that asks the driver stands here, so that launches only launch. */
template <typename Kernel>
qe_status prepare(qe_further_device *device) {
    using cluster = typename Kernel::ClusterShape;
    const auto kernel = cutlass::device_kernel<Kernel>;
    const int bytes = Kernel::SharedStorageSize;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess)
        return QE_ERROR_UNSUPPORTED;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {cute::size<0>(cluster{}), cute::size<1>(cluster{}), 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(cute::size<0>(cluster{}), cute::size<1>(cluster{}));
    config.blockDim = Kernel::get_block_shape();
    config.dynamicSmemBytes = bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&device->clusters, kernel, &config) != cudaSuccess || device->clusters < 1)
        return QE_ERROR_UNSUPPORTED;
    return QE_OK;
}

template <typename Kernel>
int takes(const qe_product *product) {
    const qe_product_data nothing = {};
    const qe_further_device device = {0, 1, 1, nullptr};
    return Kernel::can_implement(arguments_of<Kernel>(product, &nothing, &device));
}

template <typename Kernel>
qe_status launch(const qe_further_device *device, const qe_product *product, const qe_product_data *data,
                 cudaStream_t stream) {
    using cluster = typename Kernel::ClusterShape;
    const auto params = Kernel::to_underlying_arguments(arguments_of<Kernel>(product, data, device), nullptr);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {cute::size<0>(cluster{}), cute::size<1>(cluster{}), 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = Kernel::get_grid_shape(params);
    config.blockDim = Kernel::get_block_shape();
    config.dynamicSmemBytes = Kernel::SharedStorageSize;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, cutlass::device_kernel<Kernel>, params) == cudaSuccess ? QE_OK : QE_ERROR_DEVICE;
}

template <typename Element>
constexpr qe_format format_of() {
    if (cute::is_same_v<Element, cutlass::float_e4m3_t>) return QE_FORMAT_E4M3;
    if (cute::is_same_v<Element, cutlass::float_e5m2_t>) return QE_FORMAT_E5M2;
    return cute::is_same_v<Element, float> ? QE_FORMAT_FP32 : QE_FORMAT_BF16;
}

template <typename Kernel>
constexpr qe_further_kernel entry_of(qe_accumulation accumulation, qe_further_schedule warps) {
    using tile = typename Kernel::TileShape;
    using cluster = typename Kernel::ClusterShape;
    return {format_of<typename Kernel::ElementA>(), format_of<typename Kernel::ElementB>(),
            format_of<typename Kernel::ElementD>(), QE_FURTHER_CUTLASS,
            static_cast<uint8_t>(accumulation), static_cast<uint8_t>(warps),
            cute::size<0>(cluster{}), cute::size<1>(cluster{}),
            cute::size<0>(tile{}), cute::size<1>(tile{}), cute::size<2>(tile{}),
            CUTLASS_VERSION, takes<Kernel>, prepare<Kernel>, launch<Kernel>};
}

/* Weight gradients: E5M2 by E4M3 into fp32. */
template <typename Schedule, typename Epilogue, typename Tile, typename Cluster>
using gradient_of = typename kernel_of<cutlass::float_e5m2_t, cutlass::float_e4m3_t, float, Tile, Cluster, Schedule,
                                       Epilogue>::type;
using cooperative_epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
using pingpong_epilogue = cutlass::epilogue::TmaWarpSpecialized;

using square = cute::Shape<cute::_128, cute::_128, cute::_128>;
using down = cute::Shape<cute::_2, cute::_1, cute::_1>;

} // namespace cut
#endif
