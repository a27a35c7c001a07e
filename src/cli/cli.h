/* cli.h - conventions of the commands: options, output, exit status. The only room that prints. */
#ifndef QE_CLI_CLI_H
#define QE_CLI_CLI_H

#include <stdio.h>
#include "qeffect/program.h"
#include "qeffect/rule.h"
#include "qeffect/status.h"

enum {
    QE_EXIT_OK = 0,
    QE_EXIT_ERROR = 1,
    QE_EXIT_USAGE = 2,
    QE_EXIT_CONTRACT = 3,
    QE_EXIT_DIFFERS = 4,
    QE_EXIT_INTERRUPTED = 130
};

/* One option of a command. `--name VALUE` or `--name=VALUE`; a flag has no value. */
typedef struct qe_cli_option {
    const char *name; /* without dashes */
    char letter; /* 0: none */
    const char *value; /* "N", "FILE"; NULL: a flag */
    const char *help; /* one line */
    int repeatable;
} qe_cli_option;

struct qe_cli;

typedef struct qe_command {
    const char *name; /* "trace check" has a space */
    const char *arguments; /* "SCHEDULE" */
    const char *summary; /* one line */
    const char *details; /* paragraphs and examples for --help */
    const qe_cli_option *options; /* ends with name == NULL; --help and --json are added to every command */
    int arguments_min, arguments_max;
    int (*run)(struct qe_cli *cli); /* returns an exit status */
} qe_command;

/* A parsed command line. */
typedef struct qe_cli {
    const char *program; /* as it was called, so that what is said can be typed */
    const qe_command *command;
    int argument_count;
    char **arguments;
    int option_count;
    struct {
        const qe_cli_option *option;
        const char *value;
    } given[64];
    int json; /* one JSON document on standard output */
    int terminal; /* standard error is a terminal */
} qe_cli;

/* Value of an option, or NULL. A flag's value is "". The last one wins. */
const char *qe_cli_value(const qe_cli *cli, const char *name);
int qe_cli_has(const qe_cli *cli, const char *name);
/* Whole number in [low, high] from an option; `fallback` when absent. On failure prints usage text,
            returns -1 (exit 2). */
int qe_cli_number(const qe_cli *cli, const char *name, uint64_t low, uint64_t high, uint64_t fallback,
                  uint64_t *value_out);

/* Prints an error for people on standard error (place, message, remedy), or {"error": {...}} on standard output with
 * --json, and returns the exit status that fits its status code. */
int qe_cli_error(const qe_cli *cli, const qe_error *error);
/* The text of it alone. */
void qe_cli_print_error(const qe_error *error);
/* printf, on standard output, for text that cites what anybody may have written, such as a manifest: control
 * characters, which a terminal would obey, are printed as \xNN; line ends and tabs stay. */
void qe_cli_print(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The ending of a word behind its number: printf("%u rank%s", n, qe_cli_s(n)); of "microbatch" qe_cli_es. */
static inline const char *qe_cli_s(uint64_t count) { return count == 1 ? "" : "s"; }
static inline const char *qe_cli_es(uint64_t count) { return count == 1 ? "" : "es"; }
/* "4 ranks, 4 stages, 8 microbatches". */
enum { QE_CLI_SIZES_BYTES = 80 };
const char *qe_cli_sizes(uint32_t ranks, uint32_t stages, uint32_t microbatches, char text_out[QE_CLI_SIZES_BYTES]);
/* A usage error (exit 2): printf text, then how to get help. */
int qe_cli_usage(const qe_cli *cli, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* "; did you mean 'x'?" of the name that is nearest to a word which is none of them; "" where none is near. */
enum { QE_CLI_GUESS_BYTES = 96 };
const char *qe_cli_guess(const char *word, const char *const *names, size_t count, char text_out[QE_CLI_GUESS_BYTES]);
/* "layr" is a slip in a name, "orders/layr" and "layr.yaml" are files that may not be there. */
int qe_cli_looks_like_path(const char *argument);
/* Prints a jansson document on standard output (takes the reference) and returns `status`. */
struct json_t;
/* {"rule", "message", "expected", "found", "count", "object", "other_object"}: what every command says of a breach. */
struct json_t *qe_cli_violation_json(const qe_violation *violation, const qe_program *program);
int qe_cli_json(struct json_t *document, int status);
/* {"status", "message", "remedy", "path", "line", "column"} of an error: what every command's "error" says. */
struct json_t *qe_cli_error_json(const qe_error *error);
/* A JSON string of text that may hold anything: paths, file contents, messages that cite them. Bytes that are not UTF-8
 * become U+FFFD, where jansson alone would refuse the whole document. NULL: no memory. */
struct json_t *qe_cli_json_text(const char *text);

extern const qe_command qe_command_train, qe_command_generate, qe_command_check, qe_command_schedule,
    qe_command_simulate, qe_command_trace_check, qe_command_bench, qe_command_bench_layer,
    qe_command_bench_placement, qe_command_bench_step, qe_command_verify, qe_command_inspect;

#endif
