/* main.c - finds the command and runs it. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/text.h"
#include "cli/main.h"

static const qe_command *const commands[] = {
    &qe_command_train,       &qe_command_verify, &qe_command_generate, &qe_command_check, &qe_command_schedule,
    &qe_command_simulate,    &qe_command_trace_check, &qe_command_inspect, &qe_command_bench,
    &qe_command_bench_layer, &qe_command_bench_placement, &qe_command_bench_step,
};
enum { COMMANDS = sizeof commands / sizeof *commands };

static void help(FILE *out) {
    fprintf(out,
            "usage: qeffect COMMAND [arguments] [options]\n\n"
            "QEffect trains FP8 models over pipeline stages under contract: every op declares what it does to scales,\n"
            "slots, weights, caches and gradients; a schedule is proved before it runs and checked while it "
            "runs.\n\ncommands:\n");
    for (int i = 0; i < COMMANDS; i++) fprintf(out, "  %-15s %s\n", commands[i]->name, commands[i]->summary);
    fprintf(out,
            "\nqeffect COMMAND --help explains one, --version tells which this is. "
            "A first run: qeffect train examples/quickstart.yaml\n"
            "exit status: 0 good, 1 operating error, 2 usage, 3 contract violation, 4 comparison failed, 130 "
            "interrupted\n");
}

/* "trace check" and "bench layer" take two words, and "bench" alone is a command too. Returns how many words name the
 * command, 0 if none does. */
static int find(int count, char **words, const qe_command **command_out) {
    int found = 0, asks = count > 1 && (strcmp(words[1], "--help") == 0 || strcmp(words[1], "-h") == 0);
    for (int i = 0; i < COMMANDS; i++) {
        const char *name = commands[i]->name, *space = strchr(name, ' ');
        size_t first = space == NULL ? strlen(name) : (size_t)(space - name);
        if (strlen(words[0]) != first || strncmp(words[0], name, first) != 0) continue;
        int both = space != NULL && count > 1 && strcmp(words[1], space + 1) == 0;
        if (!both && space != NULL && (!asks || found)) continue;
        *command_out = commands[i];
        found = both ? 2 : 1;
        if (both) return found;
    }
    return found;
}

/* Is the command one of two words, of which this is the first? */
static int is_below(const qe_command *command, const char *first) {
    size_t length = strlen(first);
    return strncmp(command->name, first, length) == 0 && command->name[length] == ' ';
}

static int unknown_command(const char *program, int count, char **words) {
    const char *names[COMMANDS + 2] = {[COMMANDS] = "--help", "--version"};
    qe_cli cli = {.program = program};
    for (int i = 0; i < COMMANDS; i++) names[i] = commands[i]->name;
    for (int i = 0; i < count; i++) cli.json |= strcmp(words[i], "--json") == 0;
    const char *nearest = qe_text_nearest(words[0], names, COMMANDS + 2);
    for (int i = 0; i < COMMANDS; i++) { /* "trace" lacks its second word and is no slip for "train" */
        if (is_below(commands[i], words[0])) nearest = names[i];
    }
    if (nearest != NULL) return qe_cli_usage(&cli, "there is no command '%s'; did you mean '%s'?", words[0], nearest);
    return qe_cli_usage(&cli, "there is no command '%s'", words[0]);
}

/* "bench layr", "bench --json layr": a second word of a command that has several, and no file that the first could take
 * alone. */
static int is_second_word(const qe_command *command, const char *word) {
    for (int i = 0; i < COMMANDS; i++)
        if (is_below(commands[i], command->name))
            return word[0] != '-' && !qe_cli_looks_like_path(word) && access(word, F_OK) != 0;
    return 0;
}

static int unknown_second(const qe_cli *cli, const char *first, const char *word) {
    const char *names[COMMANDS];
    char guess[QE_CLI_GUESS_BYTES], all[256] = "";
    size_t known = 0, length = strlen(first);
    for (int i = 0; i < COMMANDS; i++) {
        if (!is_below(commands[i], first)) continue;
        names[known++] = commands[i]->name + length + 1;
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", known > 1 ? ", " : "", commands[i]->name);
    }
    for (size_t i = 0; i < known; i++)
        if (strcmp(word, names[i]) == 0) /* what stands right behind the first word has been found */
            return qe_cli_usage(cli, "'%s' is of the command's name and stands before its options: %s %s", word,
                                first, word);
    (void)qe_cli_guess(word, names, known, guess);
    return qe_cli_usage(cli, "there is no command '%s %s', and no file '%s'%s There are %s, and %s alone", first,
                        word, word, guess[0] != 0 ? guess : ".", all, first);
}

static int run(const qe_command *command, qe_cli *cli, int count, char **words, int is_whole) {
    int status = qe_cli_parse(cli, command, count, words);
    if (status != QE_EXIT_OK) return status;
    if (qe_cli_has(cli, "help")) {
        qe_cli_help(command);
        return QE_EXIT_OK;
    }
    if (!is_whole && cli->argument_count > 0 && is_second_word(command, cli->arguments[0]))
        return unknown_second(cli, command->name, cli->arguments[0]);
    return command->run(cli);
}

static int help_of(const char *program, int count, char **words) {
    const qe_command *command = NULL;
    if (count == 0) help(stdout);
    else if (find(count, words, &command) == 0) return unknown_command(program, count, words);
    else qe_cli_help(command);
    return QE_EXIT_OK;
}

int main(int argc, char **argv) {
    signal(SIGXFSZ, SIG_IGN); /* a file-size limit is a refused write then, with a message, and not a death */
    qe_cli_begin();
    if (argc < 2) {
        help(stderr);
        return QE_EXIT_USAGE;
    }
    if (strcmp(argv[1], "help") == 0) return qe_cli_finish(help_of(argv[0], argc - 2, argv + 2));
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) return qe_cli_finish(help_of(argv[0], 0, NULL));
    if (strcmp(argv[1], "--version") == 0) {
        puts("qeffect " QE_VERSION);
        return qe_cli_finish(QE_EXIT_OK);
    }
    const qe_command *command = NULL;
    int words = find(argc - 1, argv + 1, &command);
    if (words == 0) return unknown_command(argv[0], argc - 1, argv + 1);
    qe_cli cli = {.program = argv[0]};
    for (int i = 1; i < argc; i++) cli.json |= strcmp(argv[i], "--json") == 0;
    if (words == 1 && argc > 2 && is_second_word(command, argv[2])) /* before options, which may be of what was meant */
        return qe_cli_finish(unknown_second(&cli, command->name, argv[2]));
    int status = run(command, &cli, argc - 1 - words, argv + 1 + words, words > 1);
    free(cli.arguments);
    return qe_cli_finish(status);
}
