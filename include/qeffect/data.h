/* data.h - token streams cut into windows. The window of a sequence number is a pure function of (seed, number), so a
 * restart needs no state but the number.
 *
 * The stream is split once: the last `validation` fraction is validation, the rest is for training. Window i of a
 * split is its tokens [i * sequence, i * sequence + sequence], targets shifted by one: every token but the first is a
 * target once per epoch. */
#ifndef QEFFECT_DATA_H
#define QEFFECT_DATA_H

#include <stdint.h>
#include "qeffect/data_format.h"
#include "qeffect/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A data set is read whole into memory; larger ones must be cut into shards. */
#define QE_DATA_BYTES_MAX (UINT64_C(8) << 30)

typedef enum qe_data_split { QE_DATA_TRAIN, QE_DATA_VALIDATION } qe_data_split;

typedef struct qe_dataset qe_dataset;

typedef struct qe_dataset_options {
    const char *path; /* empty or NULL: the King James Bible that Debian's bible-kjv prints */
    qe_data_format format;
    double validation;        /* 0 <= fraction < 1 */
    uint32_t sequence, vocab; /* vocab: 1..65536; at least 256 for text */
} qe_dataset_options;

typedef struct qe_dataset_info {
    const char *name;      /* the path, or "King James Bible (bible-kjv)"; lives as long as the data set */
    qe_data_format format; /* never QE_DATA_AUTO */
    uint64_t tokens;       /* of the whole stream */
    uint64_t train_tokens, validation_tokens;
    uint64_t train_windows, validation_windows;
} qe_dataset_info;

/* Reads and judges the whole stream: UTF-8, header, size, every token below vocab, at least one training window (and
 * one validation window when a fraction is asked for).
 * On failure: QE_ERROR_IO, QE_ERROR_FORMAT (with path and, for text, line), QE_ERROR_CONFIG, QE_ERROR_MEMORY.
 * Owns:       the caller closes the data set. Thread: one. */
qe_status qe_dataset_open(const qe_dataset_options *options, qe_dataset **dataset_out, qe_error *error_out);
void qe_dataset_close(qe_dataset *dataset);
qe_dataset_info qe_dataset_describe(const qe_dataset *dataset);

/* XXH3-128 of the stream's tokens as they lie in the file, 32 hexadecimal digits: the same for the same data under
 * another name. Reads all of it: some seconds for the largest. Thread: any. */
enum { QE_DATA_DIGEST_BYTES = 33 };
void qe_dataset_digest(const qe_dataset *dataset, char text_out[QE_DATA_DIGEST_BYTES]);

/* Sequences first .. first + count - 1 of a split. Training visits every window once per epoch in an order that
 * depends on (seed, epoch); validation goes from window 0 on and ignores the seed.
 * Requires: outputs hold count * sequence values each; validation: validation_windows > 0.
 * Ensures:  validation numbers past the last window give tokens of 0 and targets of -1, which no loss counts.
 * Thread:   any; the data set is not changed. */
void qe_dataset_batch(const qe_dataset *dataset, qe_data_split split, uint64_t seed, uint64_t first_sequence,
                      uint32_t count, int32_t *tokens_out, int32_t *targets_out);

#ifdef __cplusplus
}
#endif
#endif
