/* file.h - files that appear whole or not at all, and files read with a bound. */
#ifndef QE_STORE_FILE_H
#define QE_STORE_FILE_H

#include <stddef.h>
#include <stdint.h>
#include "qeffect/safetensors.h"

/* A file being written beside its target. begin, then write any number of times, then commit or abort. */
typedef struct qe_atomic_file {
    int descriptor;  /* -1: closed */
    char *target;    /* owned; links resolved */
    char *temporary; /* owned; in the same directory */
} qe_atomic_file;

/* On failure: nothing is left, and neither commit nor abort is due. */
qe_status qe_atomic_file_begin(const char *path, qe_atomic_file *file_out, qe_error *error_out);
qe_status qe_atomic_file_write(qe_atomic_file *file, const void *bytes, uint64_t size_bytes, qe_error *error_out);
/* Syncs, renames, syncs the directory. On failure: aborted. */
qe_status qe_atomic_file_commit(qe_atomic_file *file, qe_error *error_out);
void qe_atomic_file_abort(qe_atomic_file *file);

/* Opens a regular file for reading. */
qe_status qe_store_open(const char *path, int *descriptor_out, uint64_t *size_bytes_out, qe_error *error_out);
/* Exactly `size_bytes` from where the descriptor stands. */
qe_status qe_store_read(int descriptor, const char *path, void *bytes, uint64_t size_bytes, qe_error *error_out);

/* What config.json says of a model: `bytes_out` bytes, no terminator. Owns: the caller frees. `path`: for messages. */
qe_status qe_store_model_text(const char *path, const qe_store_model *model, char **text_out, size_t *bytes_out,
                              qe_error *error_out);

/* Sets an error about a file; returns `status`. */
qe_status qe_store_refuse(qe_error *error_out, qe_status status, const char *path, const char *remedy,
                          const char *format, ...) __attribute__((format(printf, 5, 6)));
/* "cannot `verb` the file: ..." from errno, with the way out that fits it. */
qe_status qe_store_refuse_errno(qe_error *error_out, const char *path, const char *verb, int code);

#endif
