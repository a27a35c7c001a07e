/* dataset.c - one stream of tokens, its two splits, and which window a sequence number means. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/hash.h"
#include "base/prng.h"
#include "data/source.h"
#include "qeffect/data.h"

enum { BIBLE_TIMEOUT_MS = 60000 }; /* it takes 0.2 s; a machine under load gets far more */
enum { TEXT_VOCAB = 256, VOCAB_MAX = 65536 };

typedef struct split {
    uint64_t begin, tokens, windows; /* first token in the stream, how many, windows that fit */
} split;

struct qe_dataset {
    char *name;
    qe_source source;
    const uint8_t *stream; /* inside source: the first token */
    uint32_t token_bytes;  /* 1: text, 2: shard */
    uint32_t sequence;
    uint64_t tokens;
    split splits[2]; /* by qe_data_split */
};

static qe_status judge_options(const qe_dataset_options *options, qe_error *error_out) {
    if (!(options->validation >= 0 && options->validation < 1))
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "Set data.validation to a fraction, such as 0.05.",
                            "data.validation is %g, expected at least 0 and below 1", options->validation);
    if (options->sequence == 0)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "Set model.sequence to 128.",
                            "model.sequence is 0, expected at least 1");
    if (options->vocab == 0 || options->vocab > VOCAB_MAX)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "Set model.vocab to 256 for text.",
                            "model.vocab is %" PRIu32 ", expected 1 to %d", options->vocab, VOCAB_MAX);
    return QE_OK;
}

static qe_status judge_text(const qe_dataset *dataset, uint32_t vocab, qe_error *error_out) {
    if (vocab < TEXT_VOCAB)
        return qe_error_set(error_out, QE_ERROR_CONFIG, "Set model.vocab to 256.",
                            "a text's tokens are its bytes, but model.vocab is %" PRIu32 ", expected at least %d",
                            vocab, TEXT_VOCAB);
    return qe_source_check_text(&dataset->source, dataset->name, error_out);
}

/* Reads the stream and points `stream` at its first token. */
static qe_status load(qe_dataset *dataset, const qe_dataset_options *options, qe_error *error_out) {
    int is_bible = options->path == NULL || options->path[0] == '\0';
    dataset->name = strdup(is_bible ? "King James Bible (bible-kjv)" : options->path);
    if (dataset->name == NULL)
        return qe_error_set(error_out, QE_ERROR_MEMORY, "Free some memory.", "no memory for a data set");
    if (is_bible && options->format == QE_DATA_TOKENS)
        return qe_error_set(error_out, QE_ERROR_CONFIG, "Name the token file in data.path.",
                            "data.format is tokens, but data.path is empty, which means the King James Bible, a text");
    if (is_bible) QE_TRY(qe_source_read_bible("bible", BIBLE_TIMEOUT_MS, &dataset->source, error_out));
    else QE_TRY(qe_source_read_file(options->path, &dataset->source, error_out));
    int is_shard = options->format == QE_DATA_TOKENS
                   || (options->format == QE_DATA_AUTO && qe_source_is_shard(&dataset->source));
    if (is_shard) QE_TRY(qe_source_check_shard(&dataset->source, dataset->name, options->vocab, error_out));
    else QE_TRY(judge_text(dataset, options->vocab, error_out));
    size_t header_bytes = is_shard ? QE_SHARD_HEADER_BYTES : 0;
    dataset->token_bytes = is_shard ? 2 : 1;
    dataset->stream = dataset->source.data + header_bytes;
    dataset->tokens = (dataset->source.size_bytes - header_bytes) / dataset->token_bytes;
    dataset->sequence = options->sequence;
    return QE_OK;
}

static split make_split(uint64_t begin, uint64_t tokens, uint32_t sequence) {
    /* The last target of a window is the token after it. */
    return (split){begin, tokens, tokens > 0 ? (tokens - 1) / sequence : 0};
}

static qe_status divide(qe_dataset *dataset, double fraction, qe_error *error_out) {
    uint64_t held_out = (uint64_t)((double)dataset->tokens * fraction);
    split train = make_split(0, dataset->tokens - held_out, dataset->sequence);
    split validation = make_split(dataset->tokens - held_out, held_out, dataset->sequence);
    uint64_t needed = (uint64_t)dataset->sequence + 1;
    qe_status status = QE_OK;
    if (train.windows == 0)
        status = qe_error_set(error_out, QE_ERROR_CONFIG, "Use a longer text, or a smaller model.sequence.",
                              "too short: %" PRIu64 " tokens are for training, one window needs %" PRIu64
                              " (model.sequence + 1)", train.tokens, needed);
    else if (fraction > 0 && validation.windows == 0)
        status = qe_error_set(error_out, QE_ERROR_CONFIG,
                              "Use a longer text, a larger data.validation, or data.validation: 0 for none.",
                              "too short: %" PRIu64 " tokens are for validation, one window needs %" PRIu64
                              " (model.sequence + 1)", held_out, needed);
    if (status != QE_OK) return qe_error_place(error_out, dataset->name, 0, 0), status;
    dataset->splits[QE_DATA_TRAIN] = train;
    dataset->splits[QE_DATA_VALIDATION] = validation;
    return QE_OK;
}

qe_status qe_dataset_open(const qe_dataset_options *options, qe_dataset **dataset_out, qe_error *error_out) {
    QE_TRY(judge_options(options, error_out));
    qe_dataset *dataset = calloc(1, sizeof *dataset);
    if (dataset == NULL)
        return qe_error_set(error_out, QE_ERROR_MEMORY, "Free some memory.", "no memory for a data set");
    qe_status status = load(dataset, options, error_out);
    if (status == QE_OK) status = divide(dataset, options->validation, error_out);
    if (status != QE_OK) {
        qe_dataset_close(dataset);
        return status;
    }
    *dataset_out = dataset;
    return QE_OK;
}

void qe_dataset_close(qe_dataset *dataset) {
    if (dataset == NULL) return;
    qe_source_deinit(&dataset->source);
    free(dataset->name);
    free(dataset);
}

qe_dataset_info qe_dataset_describe(const qe_dataset *dataset) {
    const split *train = &dataset->splits[QE_DATA_TRAIN], *validation = &dataset->splits[QE_DATA_VALIDATION];
    return (qe_dataset_info){
        .name = dataset->name,
        .format = dataset->token_bytes == 2 ? QE_DATA_TOKENS : QE_DATA_TEXT,
        .tokens = dataset->tokens,
        .train_tokens = train->tokens,
        .validation_tokens = validation->tokens,
        .train_windows = train->windows,
        .validation_windows = validation->windows,
    };
}

void qe_dataset_digest(const qe_dataset *dataset, char text_out[QE_DATA_DIGEST_BYTES]) {
    QE_STATIC_ASSERT((int)QE_DATA_DIGEST_BYTES == (int)QE_HASH_TEXT_BYTES, "a digest is a hash as text");
    qe_hash_text(qe_hash_bytes(dataset->stream, (size_t)(dataset->tokens * dataset->token_bytes)), text_out);
}

static int32_t token_at(const qe_dataset *dataset, uint64_t index) {
    const uint8_t *at = dataset->stream + index * dataset->token_bytes;
    return dataset->token_bytes == 1 ? at[0] : at[0] | at[1] << 8;
}

static void copy_window(const qe_dataset *dataset, uint64_t begin, int32_t *tokens_out, int32_t *targets_out) {
    for (uint32_t i = 0; i < dataset->sequence; i++) {
        tokens_out[i] = token_at(dataset, begin + i);
        targets_out[i] = token_at(dataset, begin + i + 1);
    }
}

static void fill_nothing(uint32_t sequence, int32_t *tokens_out, int32_t *targets_out) {
    for (uint32_t i = 0; i < sequence; i++) tokens_out[i] = 0, targets_out[i] = -1;
}

void qe_dataset_batch(const qe_dataset *dataset, qe_data_split which, uint64_t seed, uint64_t first_sequence,
                      uint32_t count, int32_t *tokens_out, int32_t *targets_out) {
    const split *from = &dataset->splits[which];
    QE_ASSERT(from->windows > 0);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t number = first_sequence + i, window = number;
        int32_t *tokens = tokens_out + (size_t)i * dataset->sequence;
        int32_t *targets = targets_out + (size_t)i * dataset->sequence;
        if (which == QE_DATA_TRAIN)
            window = qe_permutation_at(seed, number / from->windows, from->windows, number % from->windows);
        if (window < from->windows) copy_window(dataset, from->begin + window * dataset->sequence, tokens, targets);
        else fill_nothing(dataset->sequence, tokens, targets);
    }
}
