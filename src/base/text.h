/* text.h - reading numbers strictly, guessing the word that was meant, and building text that grows.
 * Nothing here depends on the locale: a decimal comma set by the host program changes neither reading nor writing. */
#ifndef QE_BASE_TEXT_H
#define QE_BASE_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* True, and *value_out set, when the whole of `text` is one decimal number that fits; else false and *value_out is
 * untouched. No blanks, no `+`, no leading zero (`010` is 8 to some readers), no `0x`, no unit behind. Integers take
 * digits only (`4.0` and `4e0` are refused), with one `-` for i64 (`-0` is refused). Doubles are written as in JSON
 * (`-1`, `0.5`, `1e-3`; not `.5`, `5.`, `nan`, `inf`) and must be finite; too small a one reads as 0. */
bool qe_text_to_u64(const char *text, uint64_t *value_out);
bool qe_text_to_i64(const char *text, int64_t *value_out);
bool qe_text_to_double(const char *text, double *value_out);

/* The entry of `list` nearest to `word` by Damerau-Levenshtein distance (insert, delete, replace, swap neighbours;
 * case ignored), the first of equals; NULL when none is near enough to be a likely slip of about one in three
 * letters. For "did you mean". */
const char *qe_text_nearest(const char *word, const char *const *list, size_t count);

/* Text that grows. Start from {0}. The first refused allocation or bad format sticks: later appends do nothing, and
 * the caller asks once, at the end. */
typedef struct qe_text_builder {
    char *text;       /* terminated; NULL while nothing was appended */
    size_t length;    /* without the terminator */
    size_t capacity_bytes;
    bool failed;
} qe_text_builder;

/* `format` is printf's; a decimal point is a point. */
void qe_text_builder_append(qe_text_builder *builder, const char *format, ...) __attribute__((format(printf, 2, 3)));
void qe_text_builder_append_bytes(qe_text_builder *builder, const char *bytes, size_t count);
/* The same for libraries that write through a callback: context is the builder; 0, or -1 when anything failed. */
int qe_text_builder_sink(const char *bytes, size_t count, void *context);
/* `text` as a JSON string, quotes included. Bytes that are not UTF-8 become U+FFFD. */
void qe_text_builder_append_json(qe_text_builder *builder, const char *text);
/* Hands over the text ("" when nothing was appended) and leaves the builder empty; NULL when anything failed.
 * Owns:       the caller frees the result with free(). */
char *qe_text_builder_take(qe_text_builder *builder);
void qe_text_builder_deinit(qe_text_builder *builder);

#endif
