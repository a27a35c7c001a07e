/* schedule_argument.h - SCHEDULE on a command line: a name with its sizes, or a CSV file. */
#ifndef QE_CLI_SCHEDULE_ARGUMENT_H
#define QE_CLI_SCHEDULE_ARGUMENT_H

#include "cli/cli.h"
#include "qeffect/schedule.h"

/* The options that every command with a SCHEDULE takes; the last three words of its option table. */
#define QE_SCHEDULE_OPTIONS                                                                                     \
    {"ranks", 0, "N", "ranks of the pipeline (default 4)", 0},                                                  \
        {"chunks", 0, "N", "stages on each rank (default 1; orders for several: 2)", 0},                               \
        {"microbatches", 0, "N", "microbatches of one step (default: twice the ranks)", 0}, {                   \
        "forward-only", 0, NULL, "the order of an evaluation: only the F actions", 0                            \
    }

/* Does `argument` name a schedule that qe_schedule_generate knows? */
int qe_schedule_argument_is_name(const char *argument);
/* What else a word may have been meant to be (qe_cli_guess): auto or a schedule, `planned` one that a plan can be made
 * of. */
const char *qe_schedule_argument_guess(const char *word, int planned, char text_out[QE_CLI_GUESS_BYTES]);
/* The request for a named schedule with the sizes of the options. Returns an exit status; it has printed what is
 * wrong. */
int qe_schedule_argument_sizes(const qe_cli *cli, const char *name, qe_schedule_request *request_out);
/* Says why sizes of the options cannot be had, and returns an exit status: that there is a limit to them is no other
 * fault than that they do not fit each other. */
int qe_schedule_argument_refuse(const qe_cli *cli, const qe_error *error);
/* The named schedule with the sizes of the options. Returns an exit status; it has printed what is wrong. Owns: the
 * caller frees *schedule_out when the status is QE_EXIT_OK. */
int qe_schedule_argument_generate(const qe_cli *cli, const char *name, qe_schedule *schedule_out);
/* A name, `auto` or a CSV file. With a file, --microbatches says how many are due and --ranks how many rows, if given;
 * for `auto` the command takes the options of times.h and search_argument.h, too. */
int qe_schedule_argument_load(const qe_cli *cli, const char *argument, qe_schedule *schedule_out);

/* Refuses a schedule that cannot run, for commands that make something of it; `check` tells more of why. Returns an
 * exit status; it has printed what is wrong. */
int qe_schedule_argument_check(const qe_cli *cli, const char *argument, const qe_schedule *schedule);

/* {"schedule", "ranks", "stages", "microbatches", "actions"}: what every command says of a schedule; NULL without
 * memory. */
struct json_t *qe_schedule_argument_json(const char *argument, const qe_schedule *schedule);

#endif
