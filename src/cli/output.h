/* output.h - a file that a command writes appears whole or not at all. */
#ifndef QE_CLI_OUTPUT_H
#define QE_CLI_OUTPUT_H

#include "cli/cli.h"

/* Writes and flushes the content. */
typedef qe_status qe_cli_writer(const void *context, FILE *file, qe_error *error_out);

/* Writes beside `path`, syncs, and renames into place; pipes and devices are written in place. Returns an exit status;
 * it has printed what is wrong. */
int qe_cli_write_file(const qe_cli *cli, const char *path, qe_cli_writer *writer, const void *context);

/* Could it be written there? Asked of an option's FILE (NULL: not given) before the work whose result it takes; leaves
 * nothing. Returns an exit status; it has printed what is wrong. */
int qe_cli_try_output(const qe_cli *cli, const char *option);
/* A usage error where two options name one file, of which only the last would be left; /dev/null and the like take
 * both. */
int qe_cli_apart(const qe_cli *cli, const char *option, const char *other);

#endif
