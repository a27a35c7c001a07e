/* schedule_argument.c - turns SCHEDULE and its options into a schedule. */
#include "cli/schedule_argument.h"
#include "cli/search_argument.h"

#include <errno.h>
#include <string.h>
#include <jansson.h>

int qe_schedule_argument_is_name(const char *argument) {
    for (uint32_t i = 0; qe_schedule_name(i) != NULL; i++) {
        if (strcmp(argument, qe_schedule_name(i)) == 0) return 1;
    }
    return 0;
}

const char *qe_schedule_argument_guess(const char *word, int planned, char text_out[QE_CLI_GUESS_BYTES]) {
    enum { NAMES_MAX = 32 };
    const char *names[NAMES_MAX] = {"auto"};
    size_t count = 1;
    for (uint32_t i = 0; qe_schedule_name(i) != NULL && count < NAMES_MAX; i++) {
        if (!planned || strcmp(qe_schedule_name(i), "dualpipe") != 0) names[count++] = qe_schedule_name(i);
    }
    return qe_cli_guess(word, names, count, text_out);
}

int qe_schedule_argument_sizes(const qe_cli *cli, const char *name, qe_schedule_request *request_out) {
    uint64_t ranks, chunks, microbatches;
    uint64_t usual_chunks = qe_schedule_usual_chunks(name);
    if (qe_cli_number(cli, "ranks", 1, QE_SCHEDULE_RANKS_MAX, 4, &ranks) != 0) return QE_EXIT_USAGE;
    if (qe_cli_number(cli, "chunks", 1, QE_CHUNKS_MAX, usual_chunks, &chunks) != 0) return QE_EXIT_USAGE;
    if (qe_cli_number(cli, "microbatches", 1, QE_MICROBATCHES_MAX, 2 * ranks, &microbatches) != 0) {
        return QE_EXIT_USAGE;
    }
    *request_out = (qe_schedule_request){.name = name,
                                         .ranks = (uint32_t)ranks,
                                         .chunks = (uint32_t)chunks,
                                         .microbatches = (uint32_t)microbatches,
                                         .forward_only = qe_cli_has(cli, "forward-only")};
    return QE_EXIT_OK;
}

int qe_schedule_argument_refuse(const qe_cli *cli, const qe_error *error) {
    int status = qe_cli_error(cli, error);
    return error->status == QE_ERROR_LIMIT ? QE_EXIT_USAGE : status;
}

int qe_schedule_argument_generate(const qe_cli *cli, const char *name, qe_schedule *schedule_out) {
    qe_schedule_request request;
    qe_error error = {0};
    int status = qe_schedule_argument_sizes(cli, name, &request);
    if (status != QE_EXIT_OK) return status;
    if (qe_schedule_generate(&request, schedule_out, &error) != QE_OK) return qe_schedule_argument_refuse(cli, &error);
    return QE_EXIT_OK;
}

static int refuse_file(const qe_cli *cli, const char *path, int reason) {
    char guess[QE_CLI_GUESS_BYTES];
    qe_error error = {0};
    if (reason == ENOENT && !qe_cli_looks_like_path(path)) {
        return qe_cli_usage(cli, "\"%s\" is neither a schedule (auto, " QE_SCHEDULE_NAMES ") nor a file%s", path,
                            qe_schedule_argument_guess(path, 0, guess));
    }
    (void)qe_error_set(&error, QE_ERROR_IO, "name a CSV file, auto, or " QE_SCHEDULE_NAMES,
                       "cannot open the schedule: %s", strerror(reason));
    (void)qe_error_place(&error, path, 0, 0);
    return qe_cli_error(cli, &error);
}

static int read_file(const qe_cli *cli, const char *path, qe_schedule *schedule_out) {
    qe_error error = {0};
    FILE *file = fopen(path, "r");
    if (file == NULL) return refuse_file(cli, path, errno);
    qe_status status = qe_schedule_read_csv(file, path, schedule_out, &error);
    (void)fclose(file);
    return status == QE_OK ? QE_EXIT_OK : qe_cli_error(cli, &error);
}

static int refuse_size(const qe_cli *cli, const char *path, const char *what, uint64_t asked, uint32_t found) {
    qe_error error = {0};
    (void)qe_error_set(&error, QE_ERROR_FORMAT, "leave the option out, or correct the file",
                       "%s: found %u, expected %llu as --%s says", what, found, (unsigned long long)asked, what);
    (void)qe_error_place(&error, path, 0, 0);
    return qe_cli_error(cli, &error);
}

/* What a file cannot say of itself: a step's last microbatches, or a rank's whole row, may be missing from it. */
static int expect_sizes(const qe_cli *cli, const char *path, qe_schedule *schedule) {
    uint64_t ranks, chunks, microbatches;
    if (qe_cli_number(cli, "ranks", 1, QE_SCHEDULE_RANKS_MAX, schedule->ranks, &ranks) != 0) return QE_EXIT_USAGE;
    if (qe_cli_number(cli, "chunks", 1, QE_CHUNKS_MAX, 1, &chunks) != 0) return QE_EXIT_USAGE;
    if (qe_cli_number(cli, "microbatches", 1, QE_MICROBATCHES_MAX, schedule->microbatches, &microbatches) != 0) {
        return QE_EXIT_USAGE;
    }
    if (qe_cli_has(cli, "forward-only")) return qe_cli_usage(cli, "--forward-only is for named schedules, not files");
    if (ranks != schedule->ranks) return refuse_size(cli, path, "ranks", ranks, schedule->ranks);
    if (qe_cli_has(cli, "chunks") && chunks * ranks != schedule->stages) {
        return refuse_size(cli, path, "chunks", chunks, schedule->stages / schedule->ranks);
    }
    schedule->microbatches = (uint32_t)microbatches;
    return QE_EXIT_OK;
}

int qe_schedule_argument_load(const qe_cli *cli, const char *argument, qe_schedule *schedule_out) {
    static const char *const searching[] = {"stages", "metric", NULL};
    if (qe_search_argument_is(argument)) return qe_search_argument_load(cli, schedule_out);
    if (qe_search_argument_alone(cli, searching) != QE_EXIT_OK) return QE_EXIT_USAGE;
    if (qe_schedule_argument_is_name(argument)) return qe_schedule_argument_generate(cli, argument, schedule_out);
    qe_schedule schedule;
    int status = read_file(cli, argument, &schedule);
    if (status != QE_EXIT_OK) return status;
    status = expect_sizes(cli, argument, &schedule);
    if (status != QE_EXIT_OK) qe_schedule_deinit(&schedule);
    else *schedule_out = schedule;
    return status;
}

int qe_schedule_argument_check(const qe_cli *cli, const char *argument, const qe_schedule *schedule) {
    qe_error error = {0};
    qe_counterexample counterexample = {0};
    qe_status status = qe_schedule_check(schedule, &counterexample, &error);
    qe_counterexample_deinit(&counterexample);
    if (status == QE_OK) return QE_EXIT_OK;
    (void)qe_error_place(&error, argument, 0, 0);
    return qe_cli_error(cli, &error);
}

json_t *qe_schedule_argument_json(const char *argument, const qe_schedule *schedule) {
    json_t *document = json_pack("{s:i, s:i, s:i, s:i}", "ranks", (int)schedule->ranks, "stages",
                                 (int)schedule->stages, "microbatches", (int)schedule->microbatches, "actions",
                                 (int)schedule->rank_begin[schedule->ranks]);
    (void)json_object_set_new(document, "schedule", qe_cli_json_text(argument));
    return document;
}
