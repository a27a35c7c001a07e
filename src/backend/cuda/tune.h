/* tune.h - which of several algorithms is fastest for a product, on random data that does not sit in the cache. */
#ifndef QE_CUDA_TUNE_H
#define QE_CUDA_TUNE_H

#include "backend/cuda/algorithm.h"

typedef struct qe_tune {
    const qe_solver *solver;
    const qe_product *product;
    const qe_lt_problem *problem;
    const qe_algorithm *candidates;
    uint32_t count;      /* 1..QE_ALGORITHMS_MAX */
    cudaStream_t stream; /* nothing else runs on it */
} qe_tune;

/* Index of the fastest candidate that gives the same bits twice; of those that are equally fast the first.
 * Ensures:    the device memory it took is free again.
 * On failure: QE_ERROR_MEMORY: says how much it needed. QE_ERROR_UNSUPPORTED: no candidate runs, or none is
 *             reproducible. QE_ERROR_DEVICE.
 * Capture:    forbidden. */
qe_status qe_tune_best(const qe_tune *tune, uint32_t *best_out, qe_error *error_out);

#endif
