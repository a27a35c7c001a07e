/* trace_words.c - the pieces a line of a trace is made of, and errors that say where, what was found, what was due. */
#include <string.h>

#include "base/assert.h"
#include "core/trace_state.h"

static void skip_blanks(qe_trace_reader *reader) {
    while (*reader->at == ' ' || *reader->at == '\t') reader->at++;
}

int qe_trace_at_end(qe_trace_reader *reader) {
    skip_blanks(reader);
    return *reader->at == '\0' || *reader->at == '#';
}

int qe_trace_takes(qe_trace_reader *reader, char c) {
    QE_ASSERT(c != '\0');
    if (*reader->at != c) return 0;
    reader->at++;
    return 1;
}

static uint32_t column_of(const qe_trace_reader *reader, const char *at) {
    QE_ASSERT(at >= reader->line);
    return (uint32_t)(at - reader->line) + 1;
}

/* The word at `at`, made safe to print. */
static void quote_found(const char *at, char *found_out) {
    size_t length = 0;
    while (at[length] && at[length] != ' ' && at[length] != '\t' && length < QE_TRACE_FOUND_BYTES) {
        unsigned char c = (unsigned char)at[length];
        found_out[length++] = c >= 0x20 && c < 0x7f ? (char)c : '?';
    }
    found_out[length] = '\0';
}

qe_status qe_trace_expected(qe_trace_reader *reader, const char *expected) {
    char found[QE_TRACE_FOUND_BYTES + 1];
    quote_found(reader->at, found);
    if (found[0] == '\0')
        qe_error_set(reader->error_out, QE_ERROR_FORMAT, "the grammar is docs/trace.md",
                     "found the end of the line, expected %s", expected);
    else
        qe_error_set(reader->error_out, QE_ERROR_FORMAT, "the grammar is docs/trace.md", "found `%s`, expected %s",
                     found, expected);
    qe_error_place(reader->error_out, reader->path, reader->line_number, column_of(reader, reader->at));
    return QE_ERROR_FORMAT;
}

qe_status qe_trace_refused(qe_trace_reader *reader, const char *at, qe_status status) {
    QE_ASSERT(status != QE_OK);
    if (status == QE_ERROR_ARGUMENT) { /* to a program's caller; here it is what a file says */
        status = QE_ERROR_FORMAT;
        qe_error said = reader->error_out != NULL ? *reader->error_out : (qe_error){0};
        qe_error_set(reader->error_out, status, "the grammar is docs/trace.md", "%s", said.message);
    }
    qe_error_place(reader->error_out, reader->path, reader->line_number, column_of(reader, at));
    return status;
}

static size_t word_length(const char *word) {
    size_t length = 0;
    while ((word[length] >= 'a' && word[length] <= 'z') || word[length] == '.') length++;
    return length;
}

qe_status qe_trace_word(qe_trace_reader *reader, const char *expected, char *word_out) {
    skip_blanks(reader);
    size_t length = word_length(reader->at);
    if (length == 0 || length >= QE_NAME_BYTES) return qe_trace_expected(reader, expected);
    memcpy(word_out, reader->at, length);
    word_out[length] = '\0';
    reader->at += length;
    return QE_OK;
}

qe_status qe_trace_parted(qe_trace_reader *reader) {
    char c = *reader->at;
    if (c == ' ' || c == '\t' || c == '\0' || c == '#') return QE_OK;
    return qe_trace_expected(reader, "a blank or the end of the line");
}

qe_status qe_trace_once(qe_trace_reader *reader, qe_said *said, char *word) {
    size_t length = word_length(word);
    for (uint32_t i = 0; i < said->count; i++) {
        if (word_length(said->word[i]) != length || memcmp(said->word[i], word, length) != 0) continue;
        reader->at = word;
        return qe_trace_expected(reader, "each word once");
    }
    QE_ASSERT(said->count < QE_SAID_MAX);
    said->word[said->count++] = word;
    return QE_OK;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return -1;
}

/* One character of a quoted name: itself, \" \\ or \xhh. */
static qe_status quoted_byte(qe_trace_reader *reader, char *byte_out) {
    *byte_out = *reader->at;
    if (!qe_trace_takes(reader, '\\')) {
        reader->at++;
        return QE_OK;
    }
    *byte_out = *reader->at;
    if (qe_trace_takes(reader, '"') || qe_trace_takes(reader, '\\')) return QE_OK;
    if (!qe_trace_takes(reader, 'x')) return qe_trace_expected(reader, "\\\", \\\\ or \\x and two hex digits");
    int high = hex_digit(reader->at[0]);
    int low = high < 0 ? -1 : hex_digit(reader->at[1]);
    if (low < 0 || high * 16 + low == 0) return qe_trace_expected(reader, "two hex digits that are not 00");
    *byte_out = (char)(high * 16 + low);
    reader->at += 2;
    return QE_OK;
}

static qe_status quoted_name(qe_trace_reader *reader, char *name_out) {
    size_t length = 0;
    while (*reader->at != '"') {
        if (*reader->at == '\0') return qe_trace_expected(reader, "a closing \"");
        if (length == QE_NAME_BYTES - 1) return qe_trace_expected(reader, "a name of at most 95 bytes");
        QE_TRY(quoted_byte(reader, &name_out[length]));
        length++;
    }
    if (length == 0) return qe_trace_expected(reader, "a byte: a name is not empty");
    name_out[length] = '\0';
    reader->at++;
    return QE_OK;
}

qe_status qe_trace_name(qe_trace_reader *reader, const char *expected, char *name_out) {
    skip_blanks(reader);
    if (qe_trace_takes(reader, '"')) return quoted_name(reader, name_out);
    size_t length = 0;
    while (qe_trace_is_bare(reader->at[length])) length++;
    if (length == 0) return qe_trace_expected(reader, expected);
    if (length >= QE_NAME_BYTES) return qe_trace_expected(reader, "a name of at most 95 bytes");
    memcpy(name_out, reader->at, length);
    name_out[length] = '\0';
    reader->at += length;
    return QE_OK;
}

qe_status qe_trace_number(qe_trace_reader *reader, uint64_t most, const char *expected, uint64_t *number_out) {
    char *at = reader->at;
    uint64_t number = 0;
    if (*at < '0' || *at > '9' || (*at == '0' && at[1] >= '0' && at[1] <= '9'))
        return qe_trace_expected(reader, expected);
    for (; *at >= '0' && *at <= '9'; at++) {
        if (__builtin_mul_overflow(number, (uint64_t)10, &number) ||
            __builtin_add_overflow(number, (uint64_t)(*at - '0'), &number))
            return qe_trace_expected(reader, expected);
    }
    if (number > most) return qe_trace_expected(reader, expected);
    reader->at = at;
    *number_out = number;
    return QE_OK;
}

const char *qe_trace_space_name(uint32_t space) {
    if (space < QE_OBJECT_KINDS) return qe_object_kind_name((qe_object_kind)space);
    if (space == QE_NAMES_STREAM) return "stream";
    return space == QE_NAMES_EVENT ? "event" : "label";
}

qe_status qe_trace_known(qe_trace_reader *reader, uint32_t space, uint32_t *index_out) {
    char name[QE_NAME_BYTES], expected[64];
    skip_blanks(reader);
    char *before = reader->at;
    snprintf(expected, sizeof expected, "the name of a declared %s", qe_trace_space_name(space));
    QE_TRY(qe_trace_name(reader, expected, name));
    *index_out = qe_names_find(&reader->names, space, name);
    if (*index_out != QE_NONE) return QE_OK;
    reader->at = before;
    return qe_trace_expected(reader, expected);
}
