/* tensor.c - element types and dense tensors. */
#include <string.h>

#include "base/assert.h"
#include "qeffect/safetensors.h"
#include "store/tensor.h"

static const struct { const char *name; uint32_t bytes; } dtypes[QE_DTYPES] = {
    [QE_DTYPE_F64] = {"F64", 8}, [QE_DTYPE_F32] = {"F32", 4}, [QE_DTYPE_F16] = {"F16", 2},
    [QE_DTYPE_BF16] = {"BF16", 2}, [QE_DTYPE_I64] = {"I64", 8}, [QE_DTYPE_I32] = {"I32", 4},
    [QE_DTYPE_I16] = {"I16", 2}, [QE_DTYPE_I8] = {"I8", 1}, [QE_DTYPE_U64] = {"U64", 8},
    [QE_DTYPE_U32] = {"U32", 4}, [QE_DTYPE_U16] = {"U16", 2}, [QE_DTYPE_U8] = {"U8", 1},
    [QE_DTYPE_BOOL] = {"BOOL", 1}, [QE_DTYPE_F8_E4M3] = {"F8_E4M3", 1}, [QE_DTYPE_F8_E5M2] = {"F8_E5M2", 1},
};

const char *qe_dtype_name(qe_dtype dtype) {
    QE_ASSERT((unsigned)dtype < QE_DTYPES);
    return dtypes[dtype].name;
}

uint32_t qe_dtype_bytes(qe_dtype dtype) {
    QE_ASSERT((unsigned)dtype < QE_DTYPES);
    return dtypes[dtype].bytes;
}

int qe_dtype_from_name(const char *name, qe_dtype *dtype_out) {
    for (unsigned i = 0; i < QE_DTYPES; i++)
        if (strcmp(dtypes[i].name, name) == 0) return *dtype_out = (qe_dtype)i, 0;
    return -1;
}

int qe_tensor_measure(qe_dtype dtype, uint32_t rank, const uint64_t *shape, uint64_t *bytes_out) {
    uint64_t bytes = qe_dtype_bytes(dtype);
    for (uint32_t i = 0; i < rank; i++)
        if (shape[i] > INT64_MAX || __builtin_mul_overflow(bytes, shape[i], &bytes)) return -1;
    *bytes_out = bytes;
    return 0;
}

qe_tensor qe_tensor_make(const char *name, qe_dtype dtype, uint32_t rank, const uint64_t *shape, const void *data) {
    qe_tensor tensor = {.name = name, .dtype = dtype, .rank = rank, .data = data};
    QE_ASSERT(rank <= QE_TENSOR_RANK_MAX);
    for (uint32_t i = 0; i < rank; i++) tensor.shape[i] = shape[i];
    int overflow = qe_tensor_measure(dtype, rank, shape, &tensor.bytes);
    QE_ASSERT(overflow == 0);
    return tensor;
}
