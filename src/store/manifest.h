/* manifest.h - inside of the store room: the manifest as bytes, and the names that may stand in it. */
#ifndef QE_STORE_MANIFEST_H
#define QE_STORE_MANIFEST_H

#include "qeffect/checkpoint.h"

#define QE_MANIFEST_NAME "manifest.json"
/* Between the bytes that are hashed and their hash. */
#define QE_MANIFEST_SEAL ",\n \"manifest_xxh3_128\": \""

/* The bytes of a manifest, its own hash at the end. Owns: the caller frees. */
qe_status qe_manifest_write_text(const qe_manifest *manifest, const char *path, char **text_out, size_t *bytes_out,
                                 qe_error *error_out);
/* Judges everything; a manifest that was refused is empty. Owns: deinit. */
qe_status qe_manifest_read_text(const char *text, size_t bytes, const char *path, qe_manifest *manifest_out,
                                qe_error *error_out);

/* May a file of a checkpoint be called that? Letters, digits, `.`, `_` and `-`, not beginning with a point. */
int qe_manifest_name_fits(const char *name);

/* "step-00000100" <-> 100; the text is exactly what the number gives. */
void qe_checkpoint_name_make(uint64_t step, char name_out[QE_CHECKPOINT_NAME_BYTES]);
int qe_checkpoint_name_read(const char *name, uint64_t *step_out);

#endif
