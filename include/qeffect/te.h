/* te.h - the te backend: the cuda backend in which Transformer Engine's kernels run the products of 8-bit and bf16
 * operands, quantization under delayed and current scaling, swiglu, and attention where queries and keys have as many
 * heads. Its devices are the cuda backend's, and all of cuda.h holds for them; docs/te_backend.md says which ops are
 * whose.
 *
 * Built only with -DQE_TE=FOLDER, where an unpacked Transformer Engine lies. Environment: QE_TE names that folder
 * where it is another one when the program runs. */
#ifndef QEFFECT_TE_H
#define QEFFECT_TE_H

#include "qeffect/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The table; immutable, valid for the life of the process.
 * open fails as qe_cuda_backend's does, and with QE_ERROR_UNSUPPORTED where Transformer Engine of the version that the
 * build saw, or a library that it stands on, is not to be found; the message says which, and the way out. */
const qe_backend *qe_te_backend(void);

#ifdef __cplusplus
}
#endif
#endif
