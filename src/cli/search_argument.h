/* search_argument.h - the schedule `auto` on a command line: its options, and the search. */
#ifndef QE_CLI_SEARCH_ARGUMENT_H
#define QE_CLI_SEARCH_ARGUMENT_H

#include "cli/cli.h"
#include "cli/times.h"
#include "qeffect/search.h"

/* What auto takes beside QE_TIMES_OPTIONS; a part of an option table. */
#define QE_SEARCH_OPTIONS                                                                                       \
    {"stages", 0, "WORD", "auto: where stages live: any (default), linear, looped or v", 0}, {                  \
        "metric", 0, "WORD", "auto: what is made small: makespan (default) or stage, the longest span of a rank", 0 \
    }

int qe_search_argument_is(const char *argument);
/* For schedules other than auto: QE_EXIT_USAGE, with text, where one of the options named is given. NULL ends them. */
int qe_search_argument_alone(const qe_cli *cli, const char *const *options);
/* Any schedule of the sizes that --ranks, --chunks and --microbatches say, so that times can be read for it. Returns an
 * exit status; it has printed what is wrong. Owns: the caller deinits. */
int qe_search_argument_shape(const qe_cli *cli, qe_schedule *schedule_out);
/* Searches for times that were read for such a schedule; says on standard error what was found. Returns an exit status;
 * it has printed what is wrong. Owns: the caller deinits *result_out. */
int qe_search_argument_run(const qe_cli *cli, const qe_schedule *shape, const qe_simulation_request *times,
                           double memory_limit, qe_search_result *result_out);
/* All of it, with the options of QE_TIMES_OPTIONS. Owns: the caller deinits *schedule_out. */
int qe_search_argument_load(const qe_cli *cli, qe_schedule *schedule_out);

#endif
