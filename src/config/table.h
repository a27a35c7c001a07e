/* table.h - the one table of settings. A row says where a value lies, what it may be and what it means; parsing,
 * --set, --help, docs/config.md and value texts all read it. */
#ifndef QE_CONFIG_TABLE_H
#define QE_CONFIG_TABLE_H

#include "qeffect/settings.h"

typedef enum qe_row_type {
    QE_ROW_U32, QE_ROW_U64, QE_ROW_I32, QE_ROW_REAL, QE_ROW_BOOL, QE_ROW_WORD, QE_ROW_TEXT
} qe_row_type;

typedef struct qe_settings_row {
    const char *key;  /* "group.name" */
    qe_row_type type;
    size_t offset;    /* into qe_settings */
    /* For a word: its spellings in the order of its enum, joined by '|'. For the others: what is allowed, in words. */
    const char *kind;
    int64_t whole_minimum;
    uint64_t whole_maximum;
    double real_minimum, real_maximum;
    bool is_minimum_open, is_maximum_open; /* the bound itself is not allowed */
    const char *initial, *help;
} qe_settings_row;

const qe_settings_row *qe_settings_row_at(size_t index);
/* Row of a whole key ("model.layers"), of `length` bytes; qe_settings_count() when there is none. */
size_t qe_settings_row_find(const char *key, size_t length);
/* Bytes of the group's name in a row's key, without the point. */
size_t qe_settings_row_group_length(const qe_settings_row *row);

/* A value as it was written. */
typedef struct qe_scalar {
    const char *text; /* [length], terminated */
    size_t length;    /* smaller or larger than strlen(text) only when it holds a zero byte */
    bool is_quoted;   /* surely text */
} qe_scalar;

/* Judges a value and stores it.
 * On failure: `status`, with what was found and what was expected; *settings is unchanged. */
qe_status qe_settings_assign(qe_settings *settings, size_t index, const qe_scalar *scalar, qe_status status,
                             qe_error *error_out);

/* Copies text for a message: at most about 60 bytes, no control characters, never half a character. */
enum { QE_SHOWN_BYTES = 72 };
void qe_settings_show(const char *text, size_t length, char shown_out[QE_SHOWN_BYTES]);

/* "Did you mean ...?" and the names that exist, for one that does not. `group` may itself be unknown. */
void qe_settings_suggest_group(const char *name, char *remedy_out, size_t capacity);
void qe_settings_suggest_key(const char *group, const char *name, char *remedy_out, size_t capacity);

#endif
