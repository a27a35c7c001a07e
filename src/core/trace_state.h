/* trace_state.h - what the files of the trace reader and writer share. The grammar is docs/trace.md. */
#ifndef QE_CORE_TRACE_STATE_H
#define QE_CORE_TRACE_STATE_H

#include <stdio.h>

#include "qeffect/trace.h"

enum {
    QE_TRACE_LINE_BYTES = 64 * 1024, /* an op of 16 effects with the longest names, all escaped, takes 12 KiB */
    QE_TRACE_FOUND_BYTES = 48,       /* how much of what was found an error quotes */
    QE_SAID_MAX = 16,                /* a cache has the most settings, six; an unknown word ends the reading */
};

/* Names are per kind: a weight and its gradient may share one. The first are qe_object_kind. */
typedef enum qe_name_space {
    QE_NAMES_STREAM = QE_OBJECT_KINDS,
    QE_NAMES_EVENT,
    QE_NAMES_LABEL,
} qe_name_space;

typedef struct qe_name_entry {
    char name[QE_NAME_BYTES];
    uint32_t space, index;
} qe_name_entry;

/* Hash table of names; init/deinit on the caller's struct, zeroed is empty. */
typedef struct qe_names {
    qe_name_entry *entries;
    uint32_t *buckets; /* [bucket_count] entry index + 1; 0: free */
    uint32_t count, capacity, bucket_count;
} qe_names;

uint32_t qe_names_find(const qe_names *names, uint32_t space, const char *name);
/* Requires: the name is not in. */
qe_status qe_names_add(qe_names *names, uint32_t space, const char *name, uint32_t index);
void qe_names_deinit(qe_names *names);

typedef struct qe_trace_reader {
    FILE *file;
    const char *path;
    qe_program *program;
    qe_error *error_out;
    qe_names names;
    char *line;       /* [QE_TRACE_LINE_BYTES] the line without its end */
    char *at;         /* where reading is, in `line` */
    uint32_t line_number;
} qe_trace_reader;

/* The words of one statement or effect that were said already. */
typedef struct qe_said {
    const char *word[QE_SAID_MAX]; /* in the line */
    uint32_t count;
} qe_said;

/* trace_words.c: pieces of a line. Each skips blanks before it unless it says otherwise. */
int qe_trace_at_end(qe_trace_reader *reader);
/* Consumes `c` if it comes next, blanks not skipped. */
int qe_trace_takes(qe_trace_reader *reader, char c);
/* Lower-case letters and dots. */
qe_status qe_trace_word(qe_trace_reader *reader, const char *expected, char *word_out);
/* Words are parted by blanks: one must come next, or the end of the line, or a comment. Skips none. */
qe_status qe_trace_parted(qe_trace_reader *reader);
/* Of two settings of one name nobody knows which was meant: the word at `word` must be a new one. */
qe_status qe_trace_once(qe_trace_reader *reader, qe_said *said, char *word);
qe_status qe_trace_name(qe_trace_reader *reader, const char *expected, char *name_out);
/* Blanks are not skipped. */
qe_status qe_trace_number(qe_trace_reader *reader, uint64_t most, const char *expected, uint64_t *number_out);
/* A name that must be known in `space`. */
qe_status qe_trace_known(qe_trace_reader *reader, uint32_t space, uint32_t *index_out);
/* QE_ERROR_FORMAT at the reader's place: what is found there, and what was expected. */
qe_status qe_trace_expected(qe_trace_reader *reader, const char *expected);
/* The same for a status of the program, as at `at`. */
qe_status qe_trace_refused(qe_trace_reader *reader, const char *at, qe_status status);
const char *qe_trace_space_name(uint32_t space);

/* trace_effect.c: one effect of an op. */
qe_status qe_trace_effect(qe_trace_reader *reader, const qe_item *item, qe_effect *effect_out);
qe_status qe_trace_recipe(qe_trace_reader *reader, uint8_t *recipe_out);

/* Whether a byte may stand in a name without quotes. */
static inline int qe_trace_is_bare(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
           c == '-' || c == '/' || c == '~' || c == '+' || c == '$' || c == '%';
}

#endif
