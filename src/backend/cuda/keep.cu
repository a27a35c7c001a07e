/* keep.cu - many copies within the device as one kernel: a copy of its own for each costs two microseconds of standing
 * still, and there are hundreds. */
#include "backend/cuda/block.cuh"
#include "backend/cuda/kernels.h"

namespace {

constexpr uint32_t THREADS = 512, BLOCKS = 1024, PIECE_BYTES = 64 << 10;

struct keep_job {
    const qe_keep_piece *pieces;
    uint32_t count;
    uint64_t pieces_all;
};

/* The range that piece number `index` is of: the last one that begins at or before it. */
__device__ uint32_t range_of(const keep_job &job, uint64_t index) {
    uint32_t low = 0, high = job.count - 1;
    while (low < high) {
        const uint32_t middle = (low + high + 1) / 2;
        if (job.pieces[middle].first <= index)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The device's memory is aligned far beyond 16 bytes; the last ones of a range may be fewer. */
__global__ void __launch_bounds__(THREADS) keep(const __grid_constant__ keep_job job) {
    for (uint64_t index = blockIdx.x; index < job.pieces_all; index += gridDim.x) {
        const qe_keep_piece piece = job.pieces[range_of(job, index)];
        const uint64_t begin = (index - piece.first) * PIECE_BYTES, left = piece.bytes - begin;
        const uint64_t bytes = left < PIECE_BYTES ? left : PIECE_BYTES, wide = bytes / sizeof(uint4);
        const char *from = static_cast<const char *>(piece.from) + begin;
        char *to = static_cast<char *>(piece.to) + begin;
#pragma unroll 4
        for (uint64_t i = threadIdx.x; i < wide; i += THREADS)
            __stcs(reinterpret_cast<uint4 *>(to) + i, __ldcs(reinterpret_cast<const uint4 *>(from) + i));
        for (uint64_t i = wide * sizeof(uint4) + threadIdx.x; i < bytes; i += THREADS) to[i] = from[i];
    }
}

} // namespace

uint64_t qe_cuda_keep_pieces(uint64_t bytes) { return (bytes + PIECE_BYTES - 1) / PIECE_BYTES; }

qe_status qe_cuda_keep(const qe_keep_piece *pieces, uint32_t count, uint64_t pieces_all, cudaStream_t stream) {
    if (count == 0) return QE_OK;
    return launch(keep, BLOCKS, THREADS, 0, 0, stream, keep_job{pieces, count, pieces_all});
}
