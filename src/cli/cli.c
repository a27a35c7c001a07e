/* cli.c - reads a command line against a command's table, prints help, errors and JSON. */
#include "cli/cli.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <jansson.h>
#include "base/text.h"
#include "cli/main.h"
#include "qeffect/settings.h"
#include "qeffect/trace.h"
#include "store/json.h"

enum { VIOLATION_TEXT_BYTES = 2048 }; /* two ops with their names, the sentence and the missing edge */

static const qe_cli_option common_options[] = {
    {"json", 0, NULL, "one JSON document on standard output", 0},
    {"help", 'h', NULL, "this text", 0},
    {NULL, 0, NULL, NULL, 0},
};

/* Something that was to be said found no memory: a document would lack it in silence, since jansson's setters are asked
 * by nobody. Of the process, as its output is. */
static atomic_int lost;

void qe_cli_begin(void) {
    qe_json_guard();
}

static int is_lost(void) {
    return atomic_load(&lost) || qe_json_refusals() > 0;
}

int qe_cli_finish(int status) {
    const char *why = is_lost() ? "no memory for all of it" : NULL;
    if (fflush(stdout) != 0 || ferror(stdout)) why = strerror(errno);
    if (why == NULL) return status;
    fprintf(stderr, "qeffect: standard output: %s\n", why);
    return status == QE_EXIT_OK ? QE_EXIT_ERROR : status;
}

const char *qe_cli_value(const qe_cli *cli, const char *name) {
    for (int i = cli->option_count; i-- > 0;)
        if (strcmp(cli->given[i].option->name, name) == 0) return cli->given[i].value;
    return NULL;
}

int qe_cli_has(const qe_cli *cli, const char *name) {
    return qe_cli_value(cli, name) != NULL;
}

int qe_cli_number(const qe_cli *cli, const char *name, uint64_t low, uint64_t high, uint64_t fallback,
                  uint64_t *value_out) {
    const char *text = qe_cli_value(cli, name);
    *value_out = fallback;
    if (text == NULL) return 0;
    uint64_t value;
    if (!qe_text_to_u64(text, &value) || value < low || value > high) {
        qe_cli_usage(cli, "--%s is '%s'; expected a whole number from %llu to %llu", name, text,
                     (unsigned long long)low, (unsigned long long)high);
        return -1;
    }
    *value_out = value;
    return 0;
}

static int exit_for(qe_status status) {
    switch (status) {
        case QE_OK: return QE_EXIT_OK;
        case QE_CONTRACT: return QE_EXIT_CONTRACT;
        case QE_ERROR_INTERRUPTED: return QE_EXIT_INTERRUPTED;
        case QE_ERROR_ARGUMENT: return QE_EXIT_USAGE;
        default: return QE_EXIT_ERROR;
    }
}

/* A way out where whoever found the error knew none of its own. */
static const char *remedy_of(const qe_error *error) {
    if (error->remedy[0] != 0) return error->remedy;
    switch (error->status) {
        case QE_ERROR_MEMORY: return "free some memory, or use smaller sizes or fewer ranks";
        case QE_ERROR_IO: return "check the path, its permissions, the space left and the system's limits";
        case QE_ERROR_DEVICE: return "go on from the last checkpoint (train --resume); if it fails again, look at the "
                                     "device and the system's log";
        case QE_ERROR_UNSUPPORTED: return "use another device, recipe or shape";
        default: return "";
    }
}

struct json_t *qe_cli_error_json(const qe_error *error) {
    json_t *fields = json_pack("{s:s, s:o}", "status", qe_status_name(error->status), "message",
                               qe_cli_json_text(error->message));
    if (remedy_of(error)[0]) json_object_set_new(fields, "remedy", qe_cli_json_text(remedy_of(error)));
    if (error->path[0]) json_object_set_new(fields, "path", qe_cli_json_text(error->path));
    if (error->line) json_object_set_new(fields, "line", json_integer(error->line));
    if (error->column) json_object_set_new(fields, "column", json_integer(error->column));
    return fields;
}

/* A terminal does what an escape sequence says, and C1 controls (U+0080 to U+009F) are such sequences, too. */
static void put_visibly(FILE *to, const char *text) {
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text, next = (unsigned char)text[1];
        int is_control = (c < 0x20 && c != '\n' && c != '\t') || c == 0x7F;
        int is_second = c == 0xC2 && next >= 0x80 && next < 0xA0;
        if (is_control || is_second) fprintf(to, "\\x%02X", is_second ? next : c);
        else fputc(c, to);
        text += is_second;
    }
}

void qe_cli_print(const char *format, ...) {
    va_list arguments;
    char *text = NULL;
    va_start(arguments, format);
    if (vasprintf(&text, format, arguments) >= 0) {
        put_visibly(stdout, text);
    } else {
        atomic_store(&lost, 1);
        text = NULL;
    }
    va_end(arguments);
    free(text);
}

void qe_cli_print_error(const qe_error *error) {
    fputs("qeffect: ", stderr);
    put_visibly(stderr, error->path);
    if (error->path[0]) fputc(':', stderr);
    if (error->line) fprintf(stderr, "%u:", error->line);
    if (error->column) fprintf(stderr, "%u:", error->column);
    if (error->path[0]) fputc(' ', stderr);
    put_visibly(stderr, error->message);
    const char *remedy = remedy_of(error);
    if (remedy[0]) fputs("\n  what to do: ", stderr);
    put_visibly(stderr, remedy);
    fputc('\n', stderr);
}

int qe_cli_error(const qe_cli *cli, const qe_error *error) {
    qe_cli_print_error(error);
    int status = exit_for(error->status);
    atomic_store(&lost, 0); /* what was lost before, this is said instead of */
    return cli->json ? qe_cli_json(json_pack("{s:o}", "error", qe_cli_error_json(error)), status) : status;
}

int qe_cli_usage(const qe_cli *cli, const char *format, ...) {
    qe_error error = {.status = QE_ERROR_ARGUMENT};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error.message, sizeof error.message, format, arguments);
    va_end(arguments);
    snprintf(error.remedy, sizeof error.remedy, "%s %s%s--help says what it takes", cli->program,
             cli->command ? cli->command->name : "", cli->command ? " " : "");
    qe_cli_error(cli, &error);
    return QE_EXIT_USAGE;
}

const char *qe_cli_guess(const char *word, const char *const *names, size_t count, char text_out[QE_CLI_GUESS_BYTES]) {
    const char *nearest = qe_text_nearest(word, names, count);
    text_out[0] = '\0';
    if (nearest != NULL) (void)snprintf(text_out, QE_CLI_GUESS_BYTES, "; did you mean '%s'?", nearest);
    return text_out;
}

const char *qe_cli_sizes(uint32_t ranks, uint32_t stages, uint32_t microbatches, char text_out[QE_CLI_SIZES_BYTES]) {
    (void)snprintf(text_out, QE_CLI_SIZES_BYTES, "%u rank%s, %u stage%s, %u microbatch%s", ranks, qe_cli_s(ranks),
                   stages, qe_cli_s(stages), microbatches, qe_cli_es(microbatches));
    return text_out;
}

int qe_cli_looks_like_path(const char *argument) { return strpbrk(argument, "./") != NULL; }

struct json_t *qe_cli_json_text(const char *text) {
    qe_text_builder builder = {0};
    qe_text_builder_append_json(&builder, text);
    char *quoted = qe_text_builder_take(&builder);
    json_t *string = quoted == NULL ? NULL : json_loads(quoted, JSON_DECODE_ANY, NULL);
    if (string == NULL) atomic_store(&lost, 1);
    free(quoted);
    return string;
}

/* Written only when all of it is there: half a document is none. */
int qe_cli_json(struct json_t *document, int status) {
    char *text = is_lost() ? NULL : qe_json_text(document, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
    json_decref(document);
    atomic_store(&lost, 0);
    if (text == NULL) {
        fputs("qeffect: no memory for the JSON document\n  what to do: free some memory and try again\n", stderr);
        return QE_EXIT_ERROR;
    }
    int failed = fputs(text, stdout) == EOF || putchar('\n') == EOF || fflush(stdout) != 0;
    free(text);
    if (!failed) return status;
    fprintf(stderr, "qeffect: standard output: %s\n", strerror(errno));
    return QE_EXIT_ERROR;
}

static const qe_cli_option *find_option(const qe_command *command, const char *name, size_t length, char letter) {
    const qe_cli_option *tables[] = {command->options, common_options};
    for (size_t t = 0; t < 2; t++)
        for (const qe_cli_option *option = tables[t]; option != NULL && option->name != NULL; option++) {
            if (letter != 0 && option->letter == letter) return option;
            if (letter == 0 && strlen(option->name) == length && strncmp(option->name, name, length) == 0)
                return option;
        }
    return NULL;
}

/* "steps", "learning-rate" and "train.steps" are settings and no options. NULL: none is of that name, or the command
 * takes none. */
static const char *setting_named(const qe_command *command, const char *name) {
    if (find_option(command, "set", strlen("set"), 0) == NULL) return NULL;
    for (size_t row = 0; row < qe_settings_count(); row++) {
        const char *key = qe_settings_describe(row).key, *last = strchr(key, '.') + 1;
        const char *as_key = strchr(name, '.') != NULL ? key : last;
        size_t same = 0;
        while (as_key[same] != 0 && (as_key[same] == name[same] || (as_key[same] == '_' && name[same] == '-'))) same++;
        if (as_key[same] == 0 && name[same] == 0) return key;
    }
    return NULL;
}

static int unknown_option(const qe_cli *cli, const char *word) {
    const char *names[64];
    size_t count = 0;
    for (const qe_cli_option *option = cli->command->options; option != NULL && option->name != NULL && count < 60;
         option++)
        names[count++] = option->name;
    for (const qe_cli_option *option = common_options; option->name != NULL; option++) names[count++] = option->name;
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(word + 2, "="), word[1] == '-' ? word + 2 : word + 1);
    const char *nearest = qe_text_nearest(name, names, count), *key = setting_named(cli->command, name);
    if (key != NULL) return qe_cli_usage(cli, "there is no option '%s'; did you mean --set %s=VALUE?", word, key);
    if (nearest != NULL) return qe_cli_usage(cli, "there is no option '%s'; did you mean --%s?", word, nearest);
    return qe_cli_usage(cli, "there is no option '%s'", word);
}

/* Takes the option at arguments[*index]; moves *index to its value where it is a word of its own. */
static int take_option(qe_cli *cli, int count, char **words, int *index) {
    const char *word = words[*index];
    int is_long = word[1] == '-';
    size_t length = is_long ? strcspn(word + 2, "=") : 1;
    const qe_cli_option *option = find_option(cli->command, word + 2, length, is_long ? 0 : word[1]);
    if (option == NULL || (!is_long && word[2] != 0)) return unknown_option(cli, word);
    const char *value = is_long && word[2 + length] == '=' ? word + 3 + length : NULL;
    if (option->value == NULL && value != NULL)
        return qe_cli_usage(cli, "--%s takes no value; found '%s'", option->name, value);
    if (option->value != NULL && value == NULL) {
        if (*index + 1 == count) return qe_cli_usage(cli, "--%s needs a value: %s", option->name, option->value);
        value = words[++*index];
    }
    if (cli->option_count == (int)(sizeof cli->given / sizeof *cli->given))
        return qe_cli_usage(cli, "too many options");
    if (!option->repeatable && qe_cli_has(cli, option->name))
        return qe_cli_usage(cli, "--%s is given twice", option->name);
    cli->given[cli->option_count].option = option;
    cli->given[cli->option_count++].value = value == NULL ? "" : value;
    return QE_EXIT_OK;
}

int qe_cli_parse(qe_cli *cli, const qe_command *command, int count, char **words) {
    *cli = (qe_cli){
        .program = cli->program, .command = command, .arguments = calloc((size_t)count + 1, sizeof(char *))};
    cli->terminal = isatty(STDERR_FILENO);
    for (int i = 0; i < count; i++) cli->json |= strcmp(words[i], "--json") == 0; /* so that errors are JSON, too */
    if (cli->arguments == NULL) {
        qe_error error = {0};
        (void)qe_error_set(&error, QE_ERROR_MEMORY, NULL, "no memory for the command line");
        return qe_cli_error(cli, &error);
    }
    int options_over = 0;
    for (int i = 0; i < count; i++) {
        if (!options_over && strcmp(words[i], "--") == 0)
            options_over = 1;
        else if (options_over || words[i][0] != '-' || words[i][1] == 0)
            cli->arguments[cli->argument_count++] = words[i];
        else {
            int status = take_option(cli, count, words, &i);
            if (status != QE_EXIT_OK) return status;
        }
    }
    if (qe_cli_has(cli, "help")) return QE_EXIT_OK;
    if (cli->argument_count < command->arguments_min) return qe_cli_usage(cli, "expected %s", command->arguments);
    if (cli->argument_count > command->arguments_max)
        return qe_cli_usage(cli, "'%s' is one argument too many", cli->arguments[command->arguments_max]);
    return QE_EXIT_OK;
}

static void print_options(const qe_cli_option *option) {
    for (; option != NULL && option->name != NULL; option++) {
        char left[64];
        int length = snprintf(left, sizeof left, "  %s%c%s--%s%s%s", option->letter ? "-" : "  ",
                              option->letter ? option->letter : ' ', option->letter ? ", " : "  ", option->name,
                              option->value ? " " : "", option->value ? option->value : "");
        printf("%-*s %s\n", length > 34 ? length : 34, left, option->help);
    }
}

void qe_cli_help(const qe_command *command) {
    printf("usage: qeffect %s%s%s [options]\n\n%s\n\n%s\noptions:\n", command->name, command->arguments[0] ? " " : "",
           command->arguments, command->summary, command->details);
    print_options(command->options);
    print_options(common_options);
}

struct json_t *qe_cli_violation_json(const qe_violation *violation, const qe_program *program) {
    char text[VIOLATION_TEXT_BYTES];
    qe_violation_text(violation, program, text, sizeof text);
    json_t *fields = json_pack("{s:s, s:o, s:I, s:I, s:I}", "rule", qe_rule_id(violation->rule), "message",
                               qe_cli_json_text(text), "expected", (json_int_t)violation->expected, "found",
                               (json_int_t)violation->found, "count", (json_int_t)violation->count);
    if (violation->object < program->object_count)
        json_object_set_new(fields, "object", qe_cli_json_text(program->objects[violation->object].name));
    uint32_t other = qe_violation_other_object(violation, program);
    if (other != QE_NONE)
        json_object_set_new(fields, "other_object", qe_cli_json_text(program->objects[other].name));
    return fields;
}
