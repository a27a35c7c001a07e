/* text_builder.c - text that grows; a failure sticks until it is taken. */
#include <locale.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"

enum { FIRST_BYTES = 256 };

/* Room for `count` more bytes and the terminator. */
static bool reserve(qe_text_builder *builder, size_t count) {
    size_t wanted;
    if (builder->failed) return false;
    if (__builtin_add_overflow(builder->length, count, &wanted)) goto failed;
    if (__builtin_add_overflow(wanted, 1U, &wanted)) goto failed;
    if (wanted <= builder->capacity_bytes) return true;
    size_t doubled = builder->capacity_bytes > SIZE_MAX / 2 ? wanted : builder->capacity_bytes * 2;
    size_t capacity_bytes = wanted > doubled ? wanted : doubled;
    if (capacity_bytes < FIRST_BYTES) capacity_bytes = FIRST_BYTES;
    char *text = realloc(builder->text, capacity_bytes);
    if (text == NULL) goto failed;
    builder->text = text;
    builder->capacity_bytes = capacity_bytes;
    return true;
failed:
    builder->failed = true;
    return false;
}

void qe_text_builder_append_bytes(qe_text_builder *builder, const char *bytes, size_t count) {
    if (!reserve(builder, count)) return;
    if (count > 0) memcpy(builder->text + builder->length, bytes, count);
    builder->length += count;
    builder->text[builder->length] = '\0';
}

int qe_text_builder_sink(const char *bytes, size_t count, void *context) {
    qe_text_builder *builder = context;
    qe_text_builder_append_bytes(builder, bytes, count);
    return builder->failed ? -1 : 0;
}

/* First try into the room there is; if that is short, make room and print again. */
static void append_list(qe_text_builder *builder, const char *format, va_list arguments) {
    va_list again;
    va_copy(again, arguments);
    size_t room_bytes = builder->capacity_bytes - builder->length;
    int length = vsnprintf(builder->text + builder->length, room_bytes, format, arguments);
    if (length < 0) {
        builder->failed = true;
    } else if ((size_t)length < room_bytes) {
        builder->length += (size_t)length;
    } else if (reserve(builder, (size_t)length)) {
        vsnprintf(builder->text + builder->length, (size_t)length + 1, format, again);
        builder->length += (size_t)length;
    }
    va_end(again);
}

void qe_text_builder_append(qe_text_builder *builder, const char *format, ...) {
    if (!reserve(builder, 0)) return;
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (plain == (locale_t)0) {
        builder->failed = true;
        return;
    }
    locale_t before = uselocale(plain); /* of this thread only */
    va_list arguments;
    va_start(arguments, format);
    append_list(builder, format, arguments);
    va_end(arguments);
    uselocale(before);
    freelocale(plain);
}

/* Bytes of the UTF-8 character at `text`; 0 when it is malformed, too long for its value, or a surrogate. */
static size_t utf8_bytes(const unsigned char *text) {
    unsigned char first = text[0];
    if (first < 0x80) return 1;
    if (first < 0xC2 || first > 0xF4) return 0;
    size_t bytes = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    for (size_t k = 1; k < bytes; k++) {
        if ((text[k] & 0xC0U) != 0x80U) return 0; /* the terminator ends here too */
    }
    if (first == 0xE0 && text[1] < 0xA0) return 0;
    if (first == 0xED && text[1] > 0x9F) return 0;
    if (first == 0xF0 && text[1] < 0x90) return 0;
    return first == 0xF4 && text[1] > 0x8F ? 0 : bytes;
}

/* The code of a character that YAML allows in escaped form alone (1.2, section 5.1), or JSON does; 0: as it is. */
static unsigned code_to_escape(const unsigned char *text, size_t bytes) {
    if (bytes == 1) return text[0] < 0x20 || text[0] == 0x7F ? text[0] : 0;
    if (bytes == 2) return text[0] == 0xC2 && text[1] < 0xA0 ? text[1] : 0;
    if (bytes != 3 || text[0] != 0xEF) return 0;
    unsigned code = 0xF000U | (text[1] & 0x3FU) << 6 | (text[2] & 0x3FU);
    return code == 0xFEFF || code >= 0xFFFE ? code : 0; /* the mark of byte order, and what is no character */
}

static void append_json_character(qe_text_builder *builder, const char *text, size_t bytes) {
    unsigned char first = (unsigned char)*text;
    unsigned code = code_to_escape((const unsigned char *)text, bytes);
    if (bytes == 0) {
        qe_text_builder_append_bytes(builder, "\\ufffd", 6);
    } else if (first == '"' || first == '\\') {
        const char escaped[2] = {'\\', *text};
        qe_text_builder_append_bytes(builder, escaped, sizeof escaped);
    } else if (code != 0) {
        qe_text_builder_append(builder, "\\u%04x", code);
    } else {
        qe_text_builder_append_bytes(builder, text, bytes);
    }
}

void qe_text_builder_append_json(qe_text_builder *builder, const char *text) {
    qe_text_builder_append_bytes(builder, "\"", 1);
    while (*text != '\0') {
        size_t bytes = utf8_bytes((const unsigned char *)text);
        append_json_character(builder, text, bytes);
        text += bytes == 0 ? 1 : bytes;
    }
    qe_text_builder_append_bytes(builder, "\"", 1);
}

char *qe_text_builder_take(qe_text_builder *builder) {
    qe_text_builder_append_bytes(builder, "", 0);
    char *text = builder->text;
    if (builder->failed) {
        free(text);
        text = NULL;
    }
    *builder = (qe_text_builder){0};
    return text;
}

void qe_text_builder_deinit(qe_text_builder *builder) {
    free(builder->text);
    *builder = (qe_text_builder){0};
}
