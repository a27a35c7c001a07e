/* copy.cu - bytes within the device, as a kernel. The runtime's own copy is a node of its own kind in a captured graph,
 * and only graphs that hold nothing but kernels are launched in one piece (memset.cu). */
#include "backend/cuda/block.cuh"
#include "backend/cuda/kernels.h"

namespace {

constexpr uint32_t THREADS = 256, UNROLL = 4; /* four loads of a thread are under way */

__global__ void __launch_bounds__(THREADS) copy_wide(const uint4 *from, uint4 *to, uint64_t pieces) {
    const uint64_t first = static_cast<uint64_t>(blockIdx.x) * THREADS * UNROLL + threadIdx.x;
    uint4 piece[UNROLL];
#pragma unroll
    for (uint32_t k = 0; k < UNROLL; ++k)
        if (first + k * THREADS < pieces) piece[k] = from[first + k * THREADS];
#pragma unroll
    for (uint32_t k = 0; k < UNROLL; ++k)
        if (first + k * THREADS < pieces) to[first + k * THREADS] = piece[k];
}

__global__ void __launch_bounds__(THREADS) copy_bytes(const char *from, char *to, uint64_t bytes) {
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i < bytes) to[i] = from[i];
}

} // namespace

qe_status qe_cuda_copy(const void *from, void *to, uint64_t bytes, cudaStream_t stream) {
    const bool wide = is_aligned(from) && is_aligned(to);
    const uint64_t pieces = wide ? bytes / sizeof(uint4) : 0, done = pieces * sizeof(uint4);
    if (pieces > 0) {
        const qe_status status =
            launch(copy_wide, pieces_of(pieces, THREADS * UNROLL), THREADS, 0, 0, stream,
                   static_cast<const uint4 *>(from), static_cast<uint4 *>(to), pieces);
        if (status != QE_OK) return status;
    }
    if (done == bytes) return QE_OK;
    return launch(copy_bytes, pieces_of(bytes - done, THREADS), THREADS, 0, 0, stream,
                  static_cast<const char *>(from) + done, static_cast<char *>(to) + done, bytes - done);
}
