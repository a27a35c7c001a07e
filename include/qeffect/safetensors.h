/* safetensors.h - tensors in files that others read, and files that appear whole or not at all.
 *
 * Every writer writes beside the target, syncs, renames, syncs the directory; on failure the target is as it was and
 * nothing is left beside it. Layout: 8 bytes little-endian header length, JSON header, data. */
#ifndef QEFFECT_SAFETENSORS_H
#define QEFFECT_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>
#include "qeffect/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    QE_TENSOR_RANK_MAX = 8,                   /* dimensions; ours have two at most */
    QE_SAFETENSORS_HEADER_BYTES_MAX = 16 << 20, /* about 100 000 tensors; the format's own bound is 100 MB */
};

typedef enum qe_dtype {
    QE_DTYPE_F64, QE_DTYPE_F32, QE_DTYPE_F16, QE_DTYPE_BF16, QE_DTYPE_I64, QE_DTYPE_I32, QE_DTYPE_I16, QE_DTYPE_I8,
    QE_DTYPE_U64, QE_DTYPE_U32, QE_DTYPE_U16, QE_DTYPE_U8, QE_DTYPE_BOOL, QE_DTYPE_F8_E4M3, QE_DTYPE_F8_E5M2,
    QE_DTYPES
} qe_dtype;

/* "F32" ... and bytes of one element. */
const char *qe_dtype_name(qe_dtype dtype);
uint32_t qe_dtype_bytes(qe_dtype dtype);

/* One dense little-endian tensor, row-major. */
typedef struct qe_tensor {
    const char *name;
    qe_dtype dtype;
    uint32_t rank;
    uint64_t shape[QE_TENSOR_RANK_MAX]; /* outermost first */
    const void *data;
    uint64_t bytes;                     /* product of shape times element size */
} qe_tensor;

typedef struct qe_metadata { const char *key, *value; } qe_metadata;

/* Fills a tensor and computes its bytes. Requires: rank <= QE_TENSOR_RANK_MAX, the product fits 64 bits. */
qe_tensor qe_tensor_make(const char *name, qe_dtype dtype, uint32_t rank, const uint64_t *shape, const void *data);

/* Writes tensors in the order given, without gaps; the first begins at a multiple of 8 bytes.
 * On failure: QE_ERROR_ARGUMENT (a name twice or not UTF-8, bytes that do not fit the shape), QE_ERROR_IO,
 *             QE_ERROR_MEMORY; no file is left. Thread: any, one per path. */
qe_status qe_safetensors_write(const char *path, const qe_tensor *tensors, size_t count, const qe_metadata *metadata,
                               size_t metadata_count, qe_error *error_out);

typedef struct qe_safetensors qe_safetensors;

/* Reads a whole file. Judges everything before anything is handed out: header length, JSON, duplicate keys, dtype,
 * shape against offsets, bounds, overlaps, holes.
 * On failure: QE_ERROR_IO, QE_ERROR_FORMAT, QE_ERROR_LIMIT, QE_ERROR_MEMORY. Owns: the caller closes it. */
qe_status qe_safetensors_open(const char *path, qe_safetensors **file_out, qe_error *error_out);
void qe_safetensors_close(qe_safetensors *file);
size_t qe_safetensors_count(const qe_safetensors *file);
/* Tensors in the order of their data. Names and data live until close; data is aligned to its element. */
const qe_tensor *qe_safetensors_at(const qe_safetensors *file, size_t index);
/* NULL when there is none of that name. */
const qe_tensor *qe_safetensors_find(const qe_safetensors *file, const char *name);
const char *qe_safetensors_metadata(const qe_safetensors *file, const char *key);

/* Creates a directory and its parents; one that exists is fine.
 * On failure: QE_ERROR_IO naming the component that could not be made. */
qe_status qe_store_make_directory(const char *path, qe_error *error_out);
/* Could it be made, and written into? Asked before long work that will end there. A directory of another name is
 * made in the nearest one that there is, and removed: permissions do not say all, and to the superuser nothing. */
qe_status qe_store_try_directory(const char *path, qe_error *error_out);
/* Could qe_store_write_text_atomic write there? Asked likewise: an empty file is made beside it and removed. */
qe_status qe_store_try_file(const char *path, qe_error *error_out);
/* Puts `size_bytes` bytes into a file, all or none. */
qe_status qe_store_write_text_atomic(const char *path, const void *bytes, size_t size_bytes, qe_error *error_out);

/* Sizes of a Llama-style decoder, as config.json holds them. */
typedef struct qe_store_model {
    uint32_t layers, hidden, heads, kv_heads, ffn, vocab, sequence;
    double rope_theta, norm_epsilon;
} qe_store_model;

/* Makes the directory, writes model.safetensors, then config.json: Hugging Face transformers' LlamaForCausalLM loads
 * it when the tensors carry its names. On failure: as qe_safetensors_write; files that were there stay. Links at these
 * two names are refused: nothing is written outside the directory. */
qe_status qe_store_write_model(const char *directory, const qe_store_model *model, const qe_tensor *tensors,
                               size_t count, const qe_metadata *metadata, size_t metadata_count, qe_error *error_out);
/* Could they be written? Asked before long work that will end there; leaves nothing. On failure: QE_ERROR_IO. */
qe_status qe_store_try_model(const char *directory, qe_error *error_out);
/* Reads config.json of such a directory. The tensors are in directory/model.safetensors.
 * On failure: QE_ERROR_FORMAT names the key; QE_ERROR_IO; QE_ERROR_UNSUPPORTED for another architecture. */
qe_status qe_store_read_model_config(const char *directory, qe_store_model *model_out, qe_error *error_out);

#ifdef __cplusplus
}
#endif
#endif
