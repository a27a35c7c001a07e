/* tensor.h - what the reader and the writer of safetensors share. */
#ifndef QE_STORE_TENSOR_H
#define QE_STORE_TENSOR_H

#include "base/hash.h"
#include "qeffect/safetensors.h"

/* Where the bytes of a file go, in their order. */
typedef struct qe_byte_sink {
    void *context;
    qe_status (*write)(void *context, const void *bytes, uint64_t size_bytes, qe_error *error_out);
} qe_byte_sink;

/* The bytes of a safetensors file. `path` is for messages. On failure: as qe_safetensors_write. */
qe_status qe_safetensors_emit(const char *path, const qe_tensor *tensors, size_t count, const qe_metadata *metadata,
                              size_t metadata_count, const qe_byte_sink *sink, qe_error *error_out);
/* Reads an open file from its beginning, every byte once; *digest_out (may be NULL) is their hash. Otherwise as
 * qe_safetensors_open. The descriptor stays the caller's. */
qe_status qe_safetensors_read(int descriptor, uint64_t file_bytes, const char *path, qe_safetensors **file_out,
                              qe_hash128 *digest_out, qe_error *error_out);

/* 0, or -1 for a name that is none of ours. */
int qe_dtype_from_name(const char *name, qe_dtype *dtype_out);
/* 0, or -1 when the product does not fit 64 bits. */
int qe_tensor_measure(qe_dtype dtype, uint32_t rank, const uint64_t *shape, uint64_t *bytes_out);

#endif
