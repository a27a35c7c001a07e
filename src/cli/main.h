/* main.h - what only main.c needs of cli.c. */
#ifndef QE_CLI_MAIN_H
#define QE_CLI_MAIN_H

#include "cli/cli.h"

/* Parses the words behind the command's name. Returns an exit status; with --help nothing is judged but options.
 * Owns: the caller frees cli->arguments. */
int qe_cli_parse(qe_cli *cli, const qe_command *command, int count, char **words);
/* Before anything is said, and when all is: what could not be said is an error like any other. finish returns the exit
 * status. */
void qe_cli_begin(void);
int qe_cli_finish(int status);
void qe_cli_help(const qe_command *command);

#endif
