/* launch.cuh - the emulated twin of src/backend/cuda/launch.cuh. */
#ifndef QE_CUDA_LAUNCH_CUH
#define QE_CUDA_LAUNCH_CUH

#include "emulator.h"
#include "qeffect/status.h"

enum { GRID_TALL_MAX = 3 }; /* low, so that every shape of some rows is folded into z */

/* What a launcher asks before it chooses; a launch itself may have as many blocks as on a device. */
static inline bool grid_is_possible(dim3 grid) {
    return grid.y <= emulator_down_max();
}

template <typename Job>
static qe_status launch(void (*kernel)(Job), dim3 grid, uint32_t threads, uint32_t cluster, size_t, cudaStream_t,
                        const Job &job) {
    if (grid.x == 0 || grid.y == 0) return QE_OK;
    const uint32_t together = cluster > 0 ? cluster : 1;
    if (grid.x % together != 0 || grid.y > 65535 || threads > 1024) return QE_ERROR_DEVICE;
    emulator_run(grid, threads, together, [&] { kernel(job); });
    return QE_OK;
}

template <auto KERNEL_OF>
static uint32_t clusters_known(uint32_t, uint32_t, size_t) {
    return 1;
}

#define LAUNCH_TRY(call)                                  \
    do {                                                  \
        const qe_status launch_status = (call);           \
        if (launch_status != QE_OK) return launch_status; \
    } while (0)

static inline uint32_t pieces_of(uint64_t count, uint64_t piece) {
    return static_cast<uint32_t>((count + piece - 1) / piece);
}

static inline bool is_aligned(const void *at) {
    return reinterpret_cast<uintptr_t>(at) % 16 == 0;
}

#endif
