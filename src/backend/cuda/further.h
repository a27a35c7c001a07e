/* further.h - candidates for 8-bit products beside cuBLASLt's: persistent kernels made of CUTLASS's templates, which a
 * build has that found its headers, and ours (product_own.cuh, weight_grad.cuh). Nothing is split along k and tiles are
 * dealt out beforehand: bits depend on the shape alone.
 * Thread: one at a time per object. */
#ifndef QE_CUDA_FURTHER_H
#define QE_CUDA_FURTHER_H

#include <cuda_runtime_api.h>

#include "backend/cuda/product.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    QE_FURTHER_KERNELS_MAX = 32,
    QE_FURTHER_CANDIDATES_MAX = 16, /* kernels that take one product */
    QE_FURTHER_NAME_BYTES = 64
};

/* What launches need to know of a device; asked once. */
typedef struct qe_further_device {
    int device, multiprocessors;
    int clusters; /* that one kernel can have at work at a time; 0: not asked yet */
    void *encode; /* ours: the driver's cuTensorMapEncodeTiled */
} qe_further_device;

typedef enum qe_further_maker { QE_FURTHER_CUTLASS, QE_FURTHER_OWN } qe_further_maker;

typedef enum qe_further_schedule {
    QE_FURTHER_COOPERATIVE, /* two groups of warps share a tile */
    QE_FURTHER_PINGPONG     /* each has its own: one multiplies while the other stores */
} qe_further_schedule;

/* One kernel. The functions are called through further.c only. */
typedef struct qe_further_kernel {
    uint8_t first, second, result; /* qe_format */
    uint8_t maker, accumulation, schedule;
    uint8_t cluster_m, cluster_n;  /* blocks that share what they load */
    uint16_t tile_m, tile_n, tile_k;
    uint32_t version;              /* CUTLASS's, as in its version.h; ours: 0 */
    int (*takes)(const qe_product *product);
    qe_status (*prepare)(qe_further_device *device);
    qe_status (*launch)(const qe_further_device *device, const qe_product *product, const qe_product_data *data,
                        cudaStream_t stream);
} qe_further_kernel;

/* Kernels of one device. All zeros: nothing is prepared. */
typedef struct qe_further {
    qe_further_device devices[QE_FURTHER_KERNELS_MAX];
} qe_further;

/* Those whose formats, accumulation and alignment are the product's, in a fixed order; touches no device. */
uint32_t qe_further_candidates(const qe_product *product, qe_algorithm candidates_out[QE_FURTHER_CANDIDATES_MAX]);
/* Is this algorithm one of this family, whether or not this build has it? */
int qe_further_owns(const qe_algorithm *algorithm);
/* Gets the algorithm's kernel ready on the current device. Capture: forbidden.
 * On failure: QE_ERROR_UNSUPPORTED: another version, no such kernel, not for this product, not on this device. */
qe_status qe_further_prepare(qe_further *further, const qe_product *product, const qe_algorithm *algorithm,
                             qe_error *error_out);
/* Queues it: asks nothing, allocates nothing. Requires: prepared for this product. Capture: recorded. */
qe_status qe_further_launch(const qe_further *further, const qe_product *product, const qe_product_data *data,
                            const qe_algorithm *algorithm, cudaStream_t stream);
/* "cutlass 4.2.0 128x128x128 2x1 cooperative", "ours 128x128x128 2x1 cooperative" */
void qe_further_name(const qe_algorithm *algorithm, char name[QE_FURTHER_NAME_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
