/* shard.c - token files in llm.c's layout. The size must follow from the header exactly, so that a file that was cut
 * short or is still being written is refused. */
#include <inttypes.h>
#include "data/source.h"

enum { SHARD_MAGIC_32_BIT = 20240801 }; /* llm.c's Llama 3 files: uint32 tokens */

static int32_t header_word(const qe_source *source, size_t index) {
    const uint8_t *at = source->data + 4 * index;
    return (int32_t)((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
}

int qe_source_is_shard(const qe_source *source) {
    return source->size_bytes >= 4 && header_word(source, 0) == QE_SHARD_MAGIC;
}

static const char remedy_layout[] =
    "Write 256 int32 (20240520, 1, number of tokens, zeros), then that many uint16 tokens, as llm.c's "
    "dev/data scripts do; or set data.format: text.";

static qe_status judge_header(const qe_source *source, qe_error *error_out) {
    if (source->size_bytes < QE_SHARD_HEADER_BYTES)
        return qe_error_set(error_out, QE_ERROR_FORMAT, remedy_layout,
                            "the token file has %zu bytes, its header alone needs %d", source->size_bytes,
                            QE_SHARD_HEADER_BYTES);
    int32_t magic = header_word(source, 0), version = header_word(source, 1), count = header_word(source, 2);
    if (magic == SHARD_MAGIC_32_BIT)
        return qe_error_set(error_out, QE_ERROR_FORMAT, "Write the tokens as uint16 (magic 20240520, version 1).",
                            "this is llm.c's layout with 32-bit tokens (magic %" PRId32 ")", magic);
    if (magic != QE_SHARD_MAGIC)
        return qe_error_set(error_out, QE_ERROR_FORMAT, remedy_layout,
                            "the token file starts with %" PRId32 ", expected the magic number %d", magic,
                            QE_SHARD_MAGIC);
    if (version != QE_SHARD_VERSION)
        return qe_error_set(error_out, QE_ERROR_FORMAT, remedy_layout,
                            "the token file has version %" PRId32 ", expected %d", version, QE_SHARD_VERSION);
    if (count < 1)
        return qe_error_set(error_out, QE_ERROR_FORMAT, remedy_layout,
                            "the token file's header says %" PRId32 " tokens, expected at least 1", count);
    uint64_t expected = QE_SHARD_HEADER_BYTES + 2 * (uint64_t)count;
    if (source->size_bytes != expected)
        return qe_error_set(error_out, QE_ERROR_FORMAT, "Write the file anew; it was cut short or damaged.",
                            "the token file has %zu bytes, its header of %" PRId32 " tokens means %" PRIu64,
                            source->size_bytes, count, expected);
    return QE_OK;
}

static qe_status judge_tokens(const qe_source *source, uint32_t vocab, qe_error *error_out) {
    const uint8_t *at = source->data + QE_SHARD_HEADER_BYTES;
    size_t count = (source->size_bytes - QE_SHARD_HEADER_BYTES) / 2;
    for (size_t i = 0; i < count; i++) {
        uint32_t token = (uint32_t)at[2 * i] | (uint32_t)at[2 * i + 1] << 8;
        if (token >= vocab)
            return qe_error_set(error_out, QE_ERROR_FORMAT,
                                "Set model.vocab to the size of the tokenizer that wrote the file.",
                                "token %zu of the file is %" PRIu32 ", expected below model.vocab = %" PRIu32, i,
                                token, vocab);
    }
    return QE_OK;
}

qe_status qe_source_check_shard(const qe_source *source, const char *path, uint32_t vocab, qe_error *error_out) {
    qe_status status = judge_header(source, error_out);
    if (status == QE_OK) status = judge_tokens(source, vocab, error_out);
    if (status != QE_OK) qe_error_place(error_out, path, 0, 0);
    return status;
}
