/* utf8.c - strict UTF-8 (RFC 3629): no overlong forms, no surrogates, nothing above U+10FFFF. */
#include <inttypes.h>
#include <string.h>
#include "data/source.h"

/* Length of the well-formed sequence at `at`, or 0. */
static size_t sequence_length(const uint8_t *at, size_t left) {
    uint8_t lead = at[0];
    size_t length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (length == 0 || length > left) return 0;
    for (size_t i = 1; i < length; i++)
        if ((at[i] & 0xC0) != 0x80) return 0;
    if (lead == 0xE0 && at[1] < 0xA0) return 0; /* overlong */
    if (lead == 0xED && at[1] > 0x9F) return 0; /* surrogate */
    if (lead == 0xF0 && at[1] < 0x90) return 0; /* overlong */
    if (lead == 0xF4 && at[1] > 0x8F) return 0; /* above U+10FFFF */
    return length;
}

static qe_status refuse(const qe_source *source, size_t offset, const char *path, qe_error *error_out) {
    uint64_t line = 1, column = 1;
    for (size_t i = 0; i < offset; i++) {
        column++;
        if (source->data[i] == '\n') line++, column = 1;
    }
    qe_error_set(error_out, QE_ERROR_FORMAT,
                 "Convert it to UTF-8 (iconv -f LATIN1 -t UTF-8), or set data.format: tokens for a token file.",
                 "the text is not UTF-8: byte 0x%02X at offset %zu starts no character", source->data[offset], offset);
    qe_error_place(error_out, path, line < UINT32_MAX ? (uint32_t)line : UINT32_MAX,
                   column < UINT32_MAX ? (uint32_t)column : UINT32_MAX);
    return QE_ERROR_FORMAT;
}

qe_status qe_source_check_text(const qe_source *source, const char *path, qe_error *error_out) {
    size_t offset = 0;
    while (offset < source->size_bytes) {
        uint64_t eight = 0;
        if (source->size_bytes - offset >= sizeof eight) memcpy(&eight, source->data + offset, sizeof eight);
        else eight = UINT64_MAX;
        if ((eight & UINT64_C(0x8080808080808080)) == 0) { /* eight ASCII bytes, nearly always */
            offset += sizeof eight;
            continue;
        }
        size_t length = sequence_length(source->data + offset, source->size_bytes - offset);
        if (length == 0) return refuse(source, offset, path, error_out);
        offset += length;
    }
    return QE_OK;
}
