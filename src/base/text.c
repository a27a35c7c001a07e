/* text.c - strict numbers and near words. The builder is in text_builder.c. */
#include "base/text.h"

#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

static const char *skip_digits(const char *text) {
    while (is_digit(*text)) text++;
    return text;
}

/* Behind a whole number without a leading zero, or NULL where there is none. */
static const char *skip_whole(const char *text) {
    if (!is_digit(*text)) return NULL;
    if (*text == '0') return text + 1;
    return skip_digits(text);
}

bool qe_text_to_u64(const char *text, uint64_t *value_out) {
    const char *end = skip_whole(text);
    if (end == NULL || *end != '\0') return false;
    uint64_t value = 0;
    for (const char *digit = text; digit != end; digit++) {
        if (__builtin_mul_overflow(value, 10U, &value)) return false;
        if (__builtin_add_overflow(value, (uint64_t)(*digit - '0'), &value)) return false;
    }
    *value_out = value;
    return true;
}

bool qe_text_to_i64(const char *text, int64_t *value_out) {
    bool negative = *text == '-';
    uint64_t magnitude;
    if (!qe_text_to_u64(text + (negative ? 1 : 0), &magnitude)) return false;
    if (negative && magnitude == 0) return false;
    if (magnitude > (uint64_t)INT64_MAX + (negative ? 1U : 0U)) return false;
    /* ~x + 1 = -x without passing through a value that int64 lacks. */
    *value_out = negative ? -(int64_t)(magnitude - 1U) - 1 : (int64_t)magnitude;
    return true;
}

/* JSON's grammar of a number. */
static bool is_json_number(const char *text) {
    text = skip_whole(text + (*text == '-' ? 1 : 0));
    if (text == NULL) return false;
    if (*text == '.') {
        if (!is_digit(text[1])) return false;
        text = skip_digits(text + 1);
    }
    if (*text == 'e' || *text == 'E') {
        text += text[1] == '-' || text[1] == '+' ? 2 : 1;
        if (!is_digit(*text)) return false;
        text = skip_digits(text);
    }
    return *text == '\0';
}

bool qe_text_to_double(const char *text, double *value_out) {
    if (!is_json_number(text)) return false;
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (plain == (locale_t)0) return false;
    double value = strtod_l(text, NULL, plain);
    freelocale(plain);
    if (!isfinite(value)) return false;
    *value_out = value;
    return true;
}

enum { WORD_BYTES = 64 }; /* longer words are no key or name of ours */

static char lower(char c) {
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

static size_t smaller(size_t left, size_t right) {
    return left < right ? left : right;
}

/* One cell of the table: prefixes of length i and j. `rows` are those of i, i-1, i-2. */
static size_t cell(const char *left, size_t i, const char *right, size_t j, size_t *const rows[3]) {
    bool same = lower(left[i - 1]) == lower(right[j - 1]);
    size_t best = rows[1][j - 1] + (same ? 0 : 1);
    best = smaller(best, rows[1][j] + 1);
    best = smaller(best, rows[0][j - 1] + 1);
    bool swapped = i > 1 && j > 1 && lower(left[i - 1]) == lower(right[j - 2]) &&
                   lower(left[i - 2]) == lower(right[j - 1]);
    return swapped ? smaller(best, rows[2][j - 2] + 1) : best;
}

/* Requires: both words are shorter than WORD_BYTES. */
static size_t distance(const char *left, const char *right) {
    size_t storage[3][WORD_BYTES];
    size_t *rows[3] = {storage[0], storage[1], storage[2]};
    size_t left_length = strlen(left), right_length = strlen(right);
    for (size_t j = 0; j <= right_length; j++) rows[0][j] = j;
    for (size_t i = 1; i <= left_length; i++) {
        size_t *oldest = rows[2];
        rows[2] = rows[1];
        rows[1] = rows[0];
        rows[0] = oldest;
        rows[0][0] = i;
        for (size_t j = 1; j <= right_length; j++) rows[0][j] = cell(left, i, right, j, rows);
    }
    return rows[0][right_length];
}

const char *qe_text_nearest(const char *word, const char *const *list, size_t count) {
    size_t length = strlen(word);
    if (length >= WORD_BYTES) return NULL;
    const char *nearest = NULL;
    size_t limit = (length + 2) / 3 + 1; /* first distance that is too far */
    for (size_t k = 0; k < count; k++) {
        if (strlen(list[k]) >= WORD_BYTES) continue;
        size_t found = distance(word, list[k]);
        if (found >= limit) continue;
        limit = found;
        nearest = list[k];
    }
    return nearest;
}
