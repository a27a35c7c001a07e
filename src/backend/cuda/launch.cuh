/* launch.cuh - one way to launch a kernel. */
#ifndef QE_CUDA_LAUNCH_CUH
#define QE_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "qeffect/status.h"

/* More shared memory than 48 KiB has to be asked for; what a kernel declares itself comes on top of this. */
enum { LAUNCH_SHARED_STATIC = 40 * 1024 };
enum { LAUNCH_CLUSTER_ANY = 8, LAUNCH_CLUSTER_MOST = 16 }; /* blocks of a cluster that every chip runs; with leave */
enum { LAUNCH_DEVICES_MOST = 64 }; /* whose answers are remembered */
enum { GRID_TALL_MAX = 65535 }; /* of gridDim.y, and of z: tall.cuh */

/* attribute: lives as long as the configuration. */
static inline cudaLaunchConfig_t launch_config(dim3 grid, uint32_t threads, uint32_t cluster, size_t shared_bytes,
                                               cudaStream_t stream, cudaLaunchAttribute *attribute) {
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim.x = cluster;
    attribute->val.clusterDim.y = 1;
    attribute->val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attribute;
    config.numAttrs = cluster > 0 ? 1 : 0;
    return config;
}

template <typename... Parameters>
static bool launch_ask(void (*kernel)(Parameters...), uint32_t cluster, size_t shared_bytes) {
    const void *symbol = reinterpret_cast<const void *>(kernel);
    if (cluster > LAUNCH_CLUSTER_ANY &&
        cudaFuncSetAttribute(symbol, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess)
        return false;
    return shared_bytes <= LAUNCH_SHARED_STATIC ||
           cudaFuncSetAttribute(symbol, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)) ==
               cudaSuccess;
}

/* Clusters of the kernel that this device has at work at a time; 0: it cannot run them. Asks the driver, half a
 * microsecond, and not the device. */
template <typename... Parameters>
static uint32_t clusters_at_work(void (*kernel)(Parameters...), uint32_t threads, uint32_t cluster,
                                 size_t shared_bytes) {
    int clusters = 0;
    cudaLaunchAttribute attribute = {};
    const cudaLaunchConfig_t config = launch_config(dim3(cluster), threads, cluster, shared_bytes, nullptr, &attribute);
    if (!launch_ask(kernel, cluster, shared_bytes) ||
        cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess || clusters < 1)
        return 0;
    return static_cast<uint32_t>(clusters);
}

/* clusters_at_work of a kernel that always has so many threads and so much shared memory, in clusters of at most
 * LAUNCH_CLUSTER_MOST. Remembered: asking the driver costs half a microsecond. Leaves no error behind. */
template <auto KERNEL_OF>
static uint32_t clusters_known(uint32_t threads, uint32_t cluster, size_t shared_bytes) {
    static uint32_t answers[LAUNCH_DEVICES_MOST][LAUNCH_CLUSTER_MOST + 1]; /* and one; 0: not asked yet */
    uint32_t unkept = 0, *kept = &unkept;
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess && device < LAUNCH_DEVICES_MOST) kept = &answers[device][cluster];
    uint32_t answer = __atomic_load_n(kept, __ATOMIC_RELAXED);
    if (answer == 0) {
        answer = 1 + clusters_at_work(KERNEL_OF, threads, cluster, shared_bytes);
        if (answer == 1) (void)cudaGetLastError();
        __atomic_store_n(kept, answer, __ATOMIC_RELAXED);
    }
    return answer - 1;
}

/* May a launch have so many blocks? Asked here, so that the answer is in one word whatever a driver says. */
static inline bool grid_is_possible(dim3 grid) {
    constexpr uint32_t ACROSS_MAX = 0x7FFFFFFF;
    return grid.x <= ACROSS_MAX && grid.y <= GRID_TALL_MAX && grid.z <= GRID_TALL_MAX;
}

/* The verdict is the launch's own: a look at the last error could show another thread's.
 * On failure: QE_ERROR_LIMIT: more blocks than a launch may have; QE_ERROR_DEVICE.
 * cluster: blocks along x that share their memory; grid.x is a multiple of it; 1 also where a kernel that sends within
 * its cluster has a single block, which is illegal without one; 0: none. */
template <typename... Parameters, typename... Given>
static qe_status launch(void (*kernel)(Parameters...), dim3 grid, uint32_t threads, uint32_t cluster,
                        size_t shared_bytes, cudaStream_t stream, const Given &...given) {
    if (grid.x == 0 || grid.y == 0) return QE_OK;
    if (!grid_is_possible(grid)) return QE_ERROR_LIMIT;
    if (!launch_ask(kernel, cluster, shared_bytes)) return QE_ERROR_DEVICE;
    cudaLaunchAttribute attribute = {};
    const cudaLaunchConfig_t config = launch_config(grid, threads, cluster, shared_bytes, stream, &attribute);
    return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(given)...) == cudaSuccess ? QE_OK
                                                                                                 : QE_ERROR_DEVICE;
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
