/* tall.cuh - grids with more blocks below each other than the 16 bits of gridDim.y count, as a vocabulary of 2^18 or
 * millions of tokens ask for: they go on in z. There may be a few blocks too many at the end. */
#ifndef QE_CUDA_TALL_CUH
#define QE_CUDA_TALL_CUH

#include "backend/cuda/device.cuh"
#include "backend/cuda/launch.cuh"

static inline dim3 tall_grid(uint32_t across, uint32_t down) {
    const uint32_t deep = pieces_of(down, GRID_TALL_MAX);
    return deep < 2 ? dim3(across, down) : dim3(across, pieces_of(down, deep), deep);
}

/* The number of this block, and of all, from top to bottom. */
DEVICE uint32_t block_down() {
    return blockIdx.z * gridDim.y + blockIdx.y;
}
DEVICE uint32_t blocks_down() {
    return gridDim.z * gridDim.y;
}
DEVICE bool is_first_block() {
    return blockIdx.x == 0 && block_down() == 0;
}

#endif
