/* cutlass.h - further candidates for 8-bit products: a few persistent kernels of CUTLASS that load what is added and
 * store results while they multiply the next tile, which cuBLASLt's do not. There are none where the build had no
 * headers of CUTLASS. Nothing is split along k and tiles are dealt out beforehand: bits depend on the shape alone.
 * Thread: one at a time per object. */
#ifndef QE_CUDA_CUTLASS_H
#define QE_CUDA_CUTLASS_H

#include <cuda_runtime_api.h>

#include "backend/cuda/product.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    QE_CUTLASS_KERNELS_MAX = 32,
    QE_CUTLASS_CANDIDATES_MAX = 16, /* kernels that take one product */
    QE_CUTLASS_NAME_BYTES = 64
};

/* What launches need to know of a device; asked once. */
typedef struct qe_cutlass_device {
    int device, multiprocessors;
    int clusters; /* that one kernel can have at work at a time; 0: not asked yet */
} qe_cutlass_device;

typedef enum qe_cutlass_schedule {
    QE_CUTLASS_COOPERATIVE, /* two groups of warps share a tile */
    QE_CUTLASS_PINGPONG     /* each has its own: one multiplies while the other stores */
} qe_cutlass_schedule;

/* One kernel. The functions are called through cutlass.c only. */
typedef struct qe_cutlass_kernel {
    uint8_t first, second, result; /* qe_format */
    uint8_t accumulation, schedule;
    uint8_t cluster_m, cluster_n;  /* blocks that share what they load */
    uint16_t tile_m, tile_n, tile_k;
    uint32_t version;              /* CUTLASS's, as in its version.h */
    int (*takes)(const qe_product *product);
    qe_status (*prepare)(qe_cutlass_device *device);
    qe_status (*launch)(const qe_cutlass_device *device, const qe_product *product, const qe_product_data *data,
                        cudaStream_t stream);
} qe_cutlass_kernel;

/* Kernels of one device. All zeros: nothing is prepared. */
typedef struct qe_cutlass {
    qe_cutlass_device devices[QE_CUTLASS_KERNELS_MAX];
} qe_cutlass;

/* Those whose formats, accumulation and alignment are the product's, in a fixed order; touches no device. */
uint32_t qe_cutlass_candidates(const qe_product *product, qe_algorithm candidates_out[QE_CUTLASS_CANDIDATES_MAX]);
/* Is this algorithm one of this family, whether or not this build has it? */
int qe_cutlass_owns(const qe_algorithm *algorithm);
/* Gets the algorithm's kernel ready on the current device. Capture: forbidden.
 * On failure: QE_ERROR_UNSUPPORTED: another version, no such kernel, not for this product, not on this device. */
qe_status qe_cutlass_prepare(qe_cutlass *cutlass, const qe_product *product, const qe_algorithm *algorithm,
                             qe_error *error_out);
/* Queues it: asks nothing, allocates nothing. Requires: prepared for this product. Capture: recorded. */
qe_status qe_cutlass_launch(const qe_cutlass *cutlass, const qe_product *product, const qe_product_data *data,
                            const qe_algorithm *algorithm, cudaStream_t stream);
/* "cutlass 4.2.0 128x128x128 2x1 cooperative" */
void qe_cutlass_name(const qe_algorithm *algorithm, char name[QE_CUTLASS_NAME_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
