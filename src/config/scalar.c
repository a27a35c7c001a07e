/* scalar.c - one written value into one field, and back. Stricter than YAML: `4x`, `010`, `4.0` and `yes` are not
 * numbers or truth values here, because readers disagree about what they mean. */
#include <float.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/text.h"
#include "config/table.h"

enum { SHOWN_TEXT_BYTES = QE_SHOWN_BYTES - 4 }; /* room for "..." */

void qe_settings_show(const char *text, size_t length, char shown_out[QE_SHOWN_BYTES]) {
    size_t kept = length < SHOWN_TEXT_BYTES ? length : SHOWN_TEXT_BYTES;
    while (kept < length && kept > 0 && ((unsigned char)text[kept] & 0xC0u) == 0x80u) kept--;
    for (size_t i = 0; i < kept; i++) {
        unsigned char byte = (unsigned char)text[i];
        shown_out[i] = byte < 0x20 || byte == 0x7F ? '?' : (char)byte;
    }
    snprintf(shown_out + kept, sizeof "...", "%s", kept < length ? "..." : "");
}

/* Index of `text` among words joined by '|', or -1. */
static int word_index(const char *words, const char *text) {
    size_t length = strlen(text);
    int index = 0;
    for (const char *word = words;; index++) {
        size_t word_length = strcspn(word, "|");
        if (word_length == length && memcmp(word, text, length) == 0) return index;
        if (word[word_length] == '\0') return -1;
        word += word_length + 1;
    }
}

enum { WORDS_MAX = 8, WORD_BYTES = 24 };

/* Fills suggestion with `Did you mean "x"? ` or nothing. */
static void suggest_word(const qe_settings_row *row, const char *text, char *suggestion, size_t capacity) {
    char words[WORDS_MAX][WORD_BYTES];
    const char *list[WORDS_MAX];
    size_t count = 0;
    for (const char *word = row->kind; word != NULL && count < WORDS_MAX; count++) {
        size_t length = strcspn(word, "|");
        QE_ASSERT(length < WORD_BYTES);
        memcpy(words[count], word, length);
        words[count][length] = '\0';
        list[count] = words[count];
        word = word[length] == '|' ? word + length + 1 : NULL;
    }
    const char *nearest = qe_text_nearest(text, list, count);
    suggestion[0] = '\0';
    if (nearest != NULL) snprintf(suggestion, capacity, "Did you mean \"%s\"? ", nearest);
}

static qe_status refuse(const qe_settings_row *row, const qe_scalar *scalar, qe_status status, qe_error *error_out) {
    char shown[QE_SHOWN_BYTES], suggestion[64] = "", remedy[256], found[QE_SHOWN_BYTES + 32];
    qe_settings_show(scalar->text, scalar->length, shown);
    if (scalar->length == 0) snprintf(found, sizeof found, "nothing");
    else snprintf(found, sizeof found, scalar->is_quoted ? "the text \"%s\"" : "\"%s\"", shown);
    if (row->type == QE_ROW_WORD) suggest_word(row, scalar->text, suggestion, sizeof suggestion);
    snprintf(remedy, sizeof remedy, "%sThe default is %s.", suggestion, row->initial);
    return qe_error_set(error_out, status, remedy, "%s: found %s, expected %s%s", row->key, found,
                        row->type == QE_ROW_WORD ? "one of " : "", row->kind);
}

static bool read_whole(const qe_settings_row *row, const char *text, void *field) {
    int64_t value = 0;
    uint64_t large = 0;
    if (row->type == QE_ROW_I32) {
        if (!qe_text_to_i64(text, &value)) return false;
        if (value < row->whole_minimum || value > (int64_t)row->whole_maximum) return false;
        *(int32_t *)field = (int32_t)value;
        return true;
    }
    if (!qe_text_to_u64(text, &large)) return false;
    if (large < (uint64_t)row->whole_minimum || large > row->whole_maximum) return false;
    if (row->type == QE_ROW_U64) *(uint64_t *)field = large;
    else *(uint32_t *)field = (uint32_t)large;
    return true;
}

/* What is computed with is the nearest float: 1e-60 "above 0" is 0 then, and a beta "below 1" of 0.99999999999 is 1,
 * where it stops the moments and not the bias correction. Numbers that small are refused while they are subnormal, too:
 * processors may take them for 0. */
static bool stays_inside_as_float(const qe_settings_row *row, double value) {
    if (row->is_minimum_open && row->real_minimum == 0 && value < FLT_MIN) return false;
    return !(row->is_maximum_open && (double)(float)value >= row->real_maximum);
}

static bool read_real(const qe_settings_row *row, const char *text, double *field) {
    double value = 0;
    if (!qe_text_to_double(text, &value)) return false;
    if (value < row->real_minimum || (row->is_minimum_open && value == row->real_minimum)) return false;
    if (value > row->real_maximum || (row->is_maximum_open && value == row->real_maximum)) return false;
    if (!stays_inside_as_float(row, value)) return false;
    *field = value == 0 ? 0 : value; /* -0 is 0 */
    return true;
}

static bool read_word(const qe_settings_row *row, const char *text, unsigned *field) {
    int index = word_index(row->kind, text);
    if (index < 0) return false;
    *field = (unsigned)index;
    return true;
}

static bool read_bool(const char *text, bool *field) {
    bool is_true = strcmp(text, "true") == 0;
    if (!is_true && strcmp(text, "false") != 0) return false;
    *field = is_true;
    return true;
}

/* Plain `null`, `~` and nothing are YAML's ways to say "no value"; none of them is the name of a file. */
static bool is_no_value(const qe_scalar *scalar) {
    return !scalar->is_quoted && (scalar->length == 0 || strcmp(scalar->text, "~") == 0
                                  || strcmp(scalar->text, "null") == 0);
}

static qe_status read_text(const qe_settings_row *row, const qe_scalar *scalar, char *field, qe_status status,
                           qe_error *error_out) {
    char shown[QE_SHOWN_BYTES];
    qe_settings_show(scalar->text, scalar->length, shown);
    if (is_no_value(scalar))
        return qe_error_set(error_out, status, "Write \"\" for an empty text, or remove the line for the default.",
                            "%s: found %s, expected text", row->key, scalar->length ? shown : "nothing");
    if (strlen(scalar->text) != scalar->length)
        return qe_error_set(error_out, status, "Remove the zero byte.", "%s: the text holds a zero byte", row->key);
    if (scalar->length >= QE_SETTINGS_TEXT_BYTES)
        return qe_error_set(error_out, status, "Use a shorter path.",
                            "%s: found %zu bytes of text, expected at most %d", row->key, scalar->length,
                            QE_SETTINGS_TEXT_BYTES - 1);
    memcpy(field, scalar->text, scalar->length + 1);
    return QE_OK;
}

qe_status qe_settings_assign(qe_settings *settings, size_t index, const qe_scalar *scalar, qe_status status,
                             qe_error *error_out) {
    const qe_settings_row *row = qe_settings_row_at(index);
    char *field = (char *)settings + row->offset;
    if (row->type == QE_ROW_TEXT) return read_text(row, scalar, field, status, error_out);
    bool is_good = strlen(scalar->text) == scalar->length;
    if (row->type == QE_ROW_WORD) is_good = is_good && read_word(row, scalar->text, (unsigned *)(void *)field);
    else if (scalar->is_quoted) is_good = false; /* "4" is text */
    else if (row->type == QE_ROW_REAL) is_good = is_good && read_real(row, scalar->text, (double *)(void *)field);
    else if (row->type == QE_ROW_BOOL) is_good = is_good && read_bool(scalar->text, (bool *)field);
    else is_good = is_good && read_whole(row, scalar->text, field);
    return is_good ? QE_OK : refuse(row, scalar, status, error_out);
}

/* The shortest decimal that reads back as the same double. */
static void append_real(qe_text_builder *builder, double value) {
    for (int digits = 1; digits <= 17; digits++) {
        qe_text_builder one = {0};
        double back = 0;
        qe_text_builder_append(&one, "%.*g", digits, value);
        bool is_same = !one.failed && qe_text_to_double(one.text, &back) && back == value;
        if (is_same || digits == 17) qe_text_builder_append(builder, "%s", one.text ? one.text : "");
        qe_text_builder_deinit(&one);
        if (is_same) return;
    }
}

static void append_word(qe_text_builder *builder, const char *words, unsigned index) {
    while (index > 0) words += strcspn(words, "|") + 1, index--;
    qe_text_builder_append_bytes(builder, words, strcspn(words, "|"));
}

int qe_settings_value_text(const qe_settings *settings, size_t index, char *text, size_t capacity) {
    const qe_settings_row *row = qe_settings_row_at(index);
    const void *field = (const char *)settings + row->offset;
    qe_text_builder builder = {0};
    switch (row->type) {
    case QE_ROW_U32: qe_text_builder_append(&builder, "%" PRIu32, *(const uint32_t *)field); break;
    case QE_ROW_U64: qe_text_builder_append(&builder, "%" PRIu64, *(const uint64_t *)field); break;
    case QE_ROW_I32: qe_text_builder_append(&builder, "%" PRId32, *(const int32_t *)field); break;
    case QE_ROW_REAL: append_real(&builder, *(const double *)field); break;
    case QE_ROW_BOOL: qe_text_builder_append(&builder, *(const bool *)field ? "true" : "false"); break;
    case QE_ROW_WORD: append_word(&builder, row->kind, *(const unsigned *)field); break;
    case QE_ROW_TEXT: qe_text_builder_append_json(&builder, field); break;
    }
    char *whole = qe_text_builder_take(&builder);
    int length = whole ? snprintf(text, capacity, "%s", whole) : -1;
    free(whole);
    return length;
}

int qe_settings_is_default(const qe_settings *settings, const char *key) {
    char now[QE_SETTINGS_VALUE_BYTES], usual[QE_SETTINGS_VALUE_BYTES];
    size_t row = qe_settings_row_find(key, strlen(key));
    qe_settings initial;
    QE_ASSERT(row < qe_settings_count());
    qe_settings_default(&initial);
    (void)qe_settings_value_text(settings, row, now, sizeof now);
    (void)qe_settings_value_text(&initial, row, usual, sizeof usual);
    return strcmp(now, usual) == 0;
}
