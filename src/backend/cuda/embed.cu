/* embed.cu - rows of a table as bf16. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/block.cuh"

namespace {

constexpr uint32_t EMBED_THREADS_MAX = 256;

/* WIDTH neighbours of a row: floats, and bf16 as they lie in memory. 16 bytes of bf16 are moved at once, or 2. */
template <int WIDTH>
struct columns {
    float at[WIDTH];
};
template <int WIDTH>
struct bf16_columns;
template <>
struct bf16_columns<8> {
    uint4 pairs;
};
template <>
struct bf16_columns<1> {
    __nv_bfloat16 value;
};

__device__ __forceinline__ columns<8> columns_load(const float *from, columns<8> *) {
    const float4 low = reinterpret_cast<const float4 *>(from)[0], high = reinterpret_cast<const float4 *>(from)[1];
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

__device__ __forceinline__ columns<1> columns_load(const float *from, columns<1> *) {
    return {{*from}};
}

__device__ __forceinline__ bf16_columns<8> columns_round(const columns<8> &from) {
    return {make_uint4(qe_bf16_pair(from.at[0], from.at[1]), qe_bf16_pair(from.at[2], from.at[3]),
                       qe_bf16_pair(from.at[4], from.at[5]), qe_bf16_pair(from.at[6], from.at[7]))};
}

__device__ __forceinline__ bf16_columns<1> columns_round(const columns<1> &from) {
    return {__float2bfloat16_rn(from.at[0])};
}

/* A block per token; blocks in y where the row is wider than a block. */
template <int WIDTH>
__global__ void embed_rows(qe_args_embed args) {
    const uint32_t column = (blockIdx.y * blockDim.x + threadIdx.x) * WIDTH;
    if (column >= args.hidden) return;
    const size_t token = (size_t)args.tokens[blockIdx.x];
    const columns<WIDTH> value =
        columns_load(args.table + token * args.hidden + column, static_cast<columns<WIDTH> *>(nullptr));
    __nv_bfloat16 *y = static_cast<__nv_bfloat16 *>(args.y) + (size_t)blockIdx.x * args.hidden + column;
    *reinterpret_cast<bf16_columns<WIDTH> *>(y) = columns_round(value);
}

} // namespace

qe_status qe_cuda_embed(const qe_args_embed *args, cudaStream_t stream) {
    if (args->tokens_count == 0 || args->hidden == 0) return QE_OK;
    const int is_wide = args->hidden % 8 == 0 && is_aligned(args->table) && is_aligned(args->y);
    const uint64_t pieces = pieces_of(args->hidden, is_wide ? 8 : 1);
    const uint32_t threads = qe_cuda_threads(pieces, EMBED_THREADS_MAX);
    const dim3 blocks(args->tokens_count, pieces_of(pieces, threads));
    return launch(is_wide ? embed_rows<8> : embed_rows<1>, blocks, threads, 0, 0, stream, *args);
}
