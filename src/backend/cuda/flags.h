/* flags.h - kernels of the in-process transport: they wait for and set words in device memory. */
#ifndef QE_CUDA_FLAGS_H
#define QE_CUDA_FLAGS_H

#include <cuda_runtime_api.h>
#include "qeffect/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Waits until *word is 1 and makes it 0, or until *aborted is not 0. Capture: recorded. */
qe_status qe_cuda_flag_take(int *word, const int *aborted, cudaStream_t stream);
/* Everything before becomes visible, then *word is 1. */
qe_status qe_cuda_flag_give(int *word, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
