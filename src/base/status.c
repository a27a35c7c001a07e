/* status.c - fills qe_error records. Text is formatted aside first, so that an error may be rewritten in terms of
 * its own former message. */
#include "qeffect/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"

/* Index of the first byte to drop when `text` must fit `limit` bytes: never inside a UTF-8 character, because error
 * text is written into JSON documents. */
static size_t cut_index(const char *text, size_t limit) {
    size_t index = limit;
    while (index > 0 && ((unsigned char)text[index] & 0xC0U) == 0x80U) index--;
    return index;
}

static void copy_text(char *to, size_t to_bytes, const char *from) {
    size_t length = from == NULL ? 0 : strlen(from);
    if (length >= to_bytes) length = cut_index(from, to_bytes - 1);
    if (length > 0) memcpy(to, from, length);
    to[length] = '\0';
}

/* vsnprintf cuts where the buffer ends; this drops the piece of a UTF-8 character that the cut may have left. */
static void format_text(char *to, size_t to_bytes, const char *format, va_list arguments) {
    int length = vsnprintf(to, to_bytes, format, arguments);
    if (length < 0) {
        to[0] = '\0';
        return;
    }
    if ((size_t)length < to_bytes) return;
    size_t start = to_bytes - 1;
    while (start > 0 && ((unsigned char)to[start - 1] & 0xC0U) == 0x80U) start--;
    if (start > 0 && (unsigned char)to[start - 1] >= 0xC0U) to[start - 1] = '\0';
}

qe_status qe_error_set(qe_error *error_out, qe_status status, const char *remedy, const char *format, ...) {
    QE_ASSERT(status != QE_OK);
    if (error_out == NULL) return status;
    qe_error error = {.status = status};
    va_list arguments;
    va_start(arguments, format);
    format_text(error.message, sizeof error.message, format, arguments);
    va_end(arguments);
    copy_text(error.remedy, sizeof error.remedy, remedy);
    *error_out = error;
    return status;
}

qe_status qe_error_place(qe_error *error_out, const char *path, uint32_t line, uint32_t column) {
    if (error_out == NULL) return QE_OK;
    /* path may be error_out's own path: placing a deeper line in the same file. */
    if (path != error_out->path) copy_text(error_out->path, sizeof error_out->path, path);
    error_out->line = line;
    error_out->column = column;
    return error_out->status;
}

const char *qe_status_name(qe_status status) {
    switch (status) {
    case QE_OK: return "ok";
    case QE_ERROR_ARGUMENT: return "argument";
    case QE_ERROR_LIMIT: return "limit";
    case QE_ERROR_MEMORY: return "memory";
    case QE_ERROR_IO: return "io";
    case QE_ERROR_FORMAT: return "format";
    case QE_ERROR_CONFIG: return "config";
    case QE_ERROR_UNSUPPORTED: return "unsupported";
    case QE_CONTRACT: return "contract";
    case QE_ERROR_INTERRUPTED: return "interrupted";
    case QE_ERROR_DEVICE: return "device";
    }
    return "unknown";
}
