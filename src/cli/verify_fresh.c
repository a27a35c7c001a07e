/* verify_fresh.c - a row in a new process of this very program: what the processes share is the command line, and what
 * comes back is one JSON document with every loss, norm and digest. */
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <jansson.h>
#include "base/seconds.h"
#include "cli/verify.h"

extern char **environ;

static json_t *digests_json(const qe_verify_tensor *tensor) {
    json_t *list = json_array();
    for (int step = 0; step < QE_VERIFY_STEPS; step++) {
        char text[QE_HASH_TEXT_BYTES];
        qe_hash_text(tensor->digest[step], text);
        json_array_append_new(list, json_string(text));
    }
    return list;
}

json_t *qe_verify_outcome_json(const qe_verify_row *row, const qe_verify_outcome *outcome) {
    json_t *losses = json_array(), *norms = json_array(), *tensors = json_array();
    for (int step = 0; step < QE_VERIFY_STEPS; step++) {
        json_array_append_new(losses, json_real(outcome->loss[step]));
        json_array_append_new(norms, json_real(outcome->norm[step]));
    }
    for (uint32_t i = 0; i < outcome->tensor_count; i++)
        json_array_append_new(tensors, json_pack("{s:s, s:o}", "name", outcome->tensors[i].name, "digests",
                                                 digests_json(&outcome->tensors[i])));
    return json_pack("{s:I, s:s, s:s, s:o, s:o, s:o}", "row", (json_int_t)row->number, "state_hash", outcome->hash,
                     "backend", outcome->backend, "loss", losses, "gradient_norm", norms, "tensors", tensors);
}

/* Two groups of 16 hexadecimal digits. */
static int read_digest(const char *text, qe_hash128 *digest_out) {
    char half[17] = {0}, *end;
    if (text == NULL || strlen(text) != 32 || strspn(text, "0123456789abcdef") != 32) return 0;
    memcpy(half, text, 16);
    digest_out->high = strtoull(half, &end, 16);
    digest_out->low = strtoull(text + 16, &end, 16);
    return 1;
}

static int read_tensor(const json_t *document, qe_verify_tensor *tensor) {
    const char *name = json_string_value(json_object_get(document, "name"));
    const json_t *digests = json_object_get(document, "digests");
    if (name == NULL || json_array_size(digests) != QE_VERIFY_STEPS) return 0;
    snprintf(tensor->name, sizeof tensor->name, "%s", name);
    for (size_t step = 0; step < QE_VERIFY_STEPS; step++)
        if (!read_digest(json_string_value(json_array_get(digests, step)), &tensor->digest[step])) return 0;
    return 1;
}

static int read_numbers(const json_t *list, double *values_out) {
    if (json_array_size(list) != QE_VERIFY_STEPS) return 0;
    for (size_t step = 0; step < QE_VERIFY_STEPS; step++) {
        const json_t *value = json_array_get(list, step);
        if (!json_is_number(value)) return 0;
        values_out[step] = json_number_value(value);
    }
    return 1;
}

static int read_outcome(const json_t *document, qe_verify_outcome *outcome) {
    const json_t *tensors = json_object_get(document, "tensors");
    const char *hash = json_string_value(json_object_get(document, "state_hash"));
    const char *backend = json_string_value(json_object_get(document, "backend"));
    if (hash == NULL || backend == NULL || !json_is_array(tensors)) return 0;
    if (!read_numbers(json_object_get(document, "loss"), outcome->loss)) return 0;
    if (!read_numbers(json_object_get(document, "gradient_norm"), outcome->norm)) return 0;
    snprintf(outcome->hash, sizeof outcome->hash, "%s", hash);
    snprintf(outcome->backend, sizeof outcome->backend, "%s", backend);
    size_t count = json_array_size(tensors);
    outcome->tensors = calloc(count + 1, sizeof *outcome->tensors);
    if (outcome->tensors == NULL) return 0;
    outcome->tensor_capacity = outcome->tensor_count = (uint32_t)count;
    for (size_t i = 0; i < count; i++)
        if (!read_tensor(json_array_get(tensors, i), &outcome->tensors[i])) return 0;
    return 1;
}

static int is_how_rows_run(const qe_cli_option *option) {
    static const char *const names[] = {"json", "jobs", "keep", "row", "list"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(option->name, names[i]) == 0) return 1;
    return 0;
}

static void free_words(char **words) {
    for (size_t i = 0; words != NULL && words[i] != NULL; i++) free(words[i]);
    free(words);
}

/* "--name" or "--name=value". NULL without memory. */
static char *option_word(const qe_cli_option *option, const char *value) {
    size_t bytes = strlen(option->name) + strlen(value) + 4;
    char *word = malloc(bytes);
    if (word != NULL) snprintf(word, bytes, "--%s%s%s", option->name, option->value != NULL ? "=" : "", value);
    return word;
}

/* The words of a process that runs one row: those of this one, but how rows are run and told. Ends with NULL. */
static char **words_of(const qe_cli *cli, const char *row) {
    const char *head[] = {"qeffect", "verify", "--json", "--row", row};
    enum { HEAD = sizeof head / sizeof *head };
    char **words = calloc((size_t)(cli->option_count + cli->argument_count + HEAD + 2), sizeof *words);
    if (words == NULL) return NULL;
    size_t count = 0, due = HEAD + 1;
    for (size_t i = 0; i < HEAD; i++) count += (words[count] = strdup(head[i])) != NULL;
    for (int i = 0; i < cli->option_count; i++) {
        if (is_how_rows_run(cli->given[i].option)) continue;
        due++;
        count += (words[count] = option_word(cli->given[i].option, cli->given[i].value)) != NULL;
    }
    count += (words[count] = strdup("--")) != NULL; /* a file may be named like an option */
    for (int i = 0; i < cli->argument_count; i++, due++)
        count += (words[count] = strdup(cli->arguments[i])) != NULL;
    if (count == due) return words;
    free_words(words);
    return NULL;
}

/* Starts this program with its standard output in a pipe. Returns the end to read, or -1 with errno set. */
static int start(char **words, pid_t *pid_out) {
    int ends[2];
    posix_spawn_file_actions_t actions;
    if (pipe2(ends, O_CLOEXEC) != 0) return -1;
    int failed = posix_spawn_file_actions_init(&actions);
    if (failed == 0) {
        failed = posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
        if (failed == 0) failed = posix_spawn(pid_out, "/proc/self/exe", &actions, NULL, words, environ);
        posix_spawn_file_actions_destroy(&actions);
    }
    close(ends[1]);
    if (failed == 0) return ends[0];
    close(ends[0]);
    errno = failed;
    return -1;
}

static json_t *read_document(int end) {
    FILE *file = fdopen(end, "r");
    if (file == NULL) {
        close(end);
        return NULL;
    }
    json_t *document = json_loadf(file, 0, NULL);
    fclose(file);
    return document;
}

static qe_status refuse_child(const json_t *document, int ended, qe_error *error_out) {
    const char *message = json_string_value(json_object_get(json_object_get(document, "error"), "message"));
    if (WIFSIGNALED(ended))
        return qe_error_set(error_out, QE_ERROR_IO, NULL, "the new process died by signal %d", WTERMSIG(ended));
    int contract = WEXITSTATUS(ended) == QE_EXIT_CONTRACT;
    return qe_error_set(error_out, contract ? QE_CONTRACT : QE_ERROR_IO, NULL,
                        "the new process ended with exit status %d: %s", WEXITSTATUS(ended),
                        message != NULL ? message : "it did not print what a row prints");
}

static qe_status run_child(char **words, qe_verify_outcome *outcome, qe_error *error_out) {
    pid_t pid;
    int ended = 0, end = start(words, &pid);
    if (end < 0)
        return qe_error_set(error_out, QE_ERROR_IO, "raise the limit on processes", "no new process: %s",
                            strerror(errno));
    json_t *document = read_document(end);
    while (waitpid(pid, &ended, 0) < 0 && errno == EINTR) continue;
    int good = WIFEXITED(ended) && WEXITSTATUS(ended) == 0 && document != NULL && read_outcome(document, outcome);
    qe_status status = good ? QE_OK : refuse_child(document, ended, error_out);
    json_decref(document);
    return status;
}

void qe_verify_run_fresh(const qe_cli *cli, const qe_verify_row *row, qe_verify_outcome *outcome_out) {
    char number[16];
    memset(outcome_out, 0, sizeof *outcome_out);
    snprintf(number, sizeof number, "%u", row->number);
    double begin = qe_seconds_now();
    char **words = words_of(cli, number);
    outcome_out->status = words == NULL ? qe_error_set(&outcome_out->error, QE_ERROR_MEMORY, NULL, "no memory")
                                        : run_child(words, outcome_out, &outcome_out->error);
    free_words(words);
    outcome_out->seconds = qe_seconds_now() - begin;
}
