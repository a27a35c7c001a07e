/* trace.h - programs as line-oriented text (.qet). The grammar is docs/trace.md. */
#ifndef QEFFECT_TRACE_H
#define QEFFECT_TRACE_H

#include <stdio.h>
#include "qeffect/ledger.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads a trace. Errors name line and column.
 * Requires:   program is initialised and empty. On failure: QE_ERROR_FORMAT or QE_ERROR_IO; program is empty. */
qe_status qe_trace_read(FILE *file, const char *path, qe_program *program, qe_error *error_out);

/* Writes a program as a trace that qe_trace_read takes and that judges the same. */
qe_status qe_trace_write(const qe_program *program, FILE *file, qe_error *error_out);

/* Copies what a ledger saw since its step began (a snapshot of counters, then every submission, the refused one last)
 * into a program that reproduces the verdict offline. Requires: program initialised and empty. */
qe_status qe_ledger_history(const qe_ledger *ledger, qe_program *program_out, qe_error *error_out);

/* The object that the other side of a breach named, where it is another one that shares bytes with the record's: a
 * view, the owner of the memory before, a slot below. QE_NONE where it is the same one, or a launch that does not say.
 */
uint32_t qe_violation_other_object(const qe_violation *violation, const qe_program *program);

/* One violation as a paragraph for people: rule, both ops with lines or stage and microbatch, objects, versions, the
 * missing edge. Writes at most `capacity` bytes, always terminated; returns the full length like snprintf. */
int qe_violation_text(const qe_violation *violation, const qe_program *program, char *text, size_t capacity);

#ifdef __cplusplus
}
#endif
#endif
