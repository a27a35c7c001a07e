/* json.h - jansson where memory runs out. Version 2.14 then reads beyond the end of a token whose buffer cannot grow,
 * drops keys of what it reads and writes, and calls the rest a success; bad JSON and no memory are one error to it. So
 * its memory comes through here: where its allocator refuses, a reserve gives, and what the reserve cannot give is
 * counted. */
#ifndef QE_STORE_JSON_H
#define QE_STORE_JSON_H

#include <jansson.h>

/* Stands between jansson and its allocator (whoever set it) from now on; once is enough. Called by the rest of this
 * header. Thread: any. */
void qe_json_guard(void);
/* How often jansson got no memory at all: what it did meanwhile cannot be trusted. */
unsigned long qe_json_refusals(void);

/* Duplicate keys are refused. On failure: NULL; *is_memory_out: for want of memory, and *error_out says nothing. */
json_t *qe_json_parse(const char *text, size_t bytes, json_error_t *error_out, int *is_memory_out);
/* On failure (memory; NULL as the document): NULL. Owns: the caller frees. */
char *qe_json_text(const json_t *document, size_t flags);

#endif
