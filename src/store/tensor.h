/* tensor.h - what the reader and the writer of safetensors share. */
#ifndef QE_STORE_TENSOR_H
#define QE_STORE_TENSOR_H

#include "qeffect/safetensors.h"

/* 0, or -1 for a name that is none of ours. */
int qe_dtype_from_name(const char *name, qe_dtype *dtype_out);
/* 0, or -1 when the product does not fit 64 bits. */
int qe_tensor_measure(qe_dtype dtype, uint32_t rank, const uint64_t *shape, uint64_t *bytes_out);

#endif
