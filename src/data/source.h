/* source.h - where the bytes of a data set come from, and whether they are what they should be. */
#ifndef QE_DATA_SOURCE_H
#define QE_DATA_SOURCE_H

#include <stddef.h>
#include <stdint.h>
#include "qeffect/status.h"

/* Owns: whoever holds it frees `data` with qe_source_deinit. */
typedef struct qe_source {
    uint8_t *data; /* [size_bytes] */
    size_t size_bytes;
} qe_source;

void qe_source_deinit(qe_source *source);

/* A regular file, whole. On failure: QE_ERROR_IO, QE_ERROR_FORMAT (empty), QE_ERROR_LIMIT, QE_ERROR_MEMORY. */
qe_status qe_source_read_file(const char *path, qe_source *source_out, qe_error *error_out);

/* The King James Bible as `program` (Debian's bible) prints it, verse references off, checksum verified.
 * Requires:   timeout_ms > 0; a program that is silent or runs longer is killed.
 * On failure: QE_ERROR_IO (missing, killed), QE_ERROR_FORMAT (another text), QE_ERROR_MEMORY. */
qe_status qe_source_read_bible(const char *program, int timeout_ms, qe_source *source_out, qe_error *error_out);

/* QE_ERROR_FORMAT with line and column (in bytes) of the first byte that is not UTF-8. */
qe_status qe_source_check_text(const qe_source *source, const char *path, qe_error *error_out);

/* llm.c's data file: 256 little-endian int32 (magic, version, tokens, zeros), then uint16 tokens. */
enum { QE_SHARD_MAGIC = 20240520, QE_SHARD_VERSION = 1, QE_SHARD_HEADER_BYTES = 256 * 4 };

/* 1 when the first four bytes are the magic number; no UTF-8 text starts with them. */
int qe_source_is_shard(const qe_source *source);
/* Header, size and every token. */
qe_status qe_source_check_shard(const qe_source *source, const char *path, uint32_t vocab, qe_error *error_out);

#endif
