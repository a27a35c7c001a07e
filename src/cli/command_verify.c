/* command_verify.c - `qeffect verify`: runs the parity matrix, a few rows at a time, and tells each in its order. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <jansson.h>
#include "base/assert.h"
#include "base/lock.h"
#include "base/seconds.h"
#include "base/text.h"
#include "cli/verify.h"

typedef struct verification {
    const qe_cli *cli;
    qe_settings configured;
    qe_verify_plant plant;
    qe_verify_rows rows;
    qe_verify_outcome *outcomes; /* [rows.count] */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint8_t *done;  /* [rows.count] under the mutex, as next and stop */
    uint32_t next;
    int stop;
    json_t *told; /* rows of the document */
    uint32_t told_count, equal, baselines, differing, refused;
    int unexercised;
    qe_status worst; /* of the first row that did not run */
} verification;

/* Sizes at which a row takes a fraction of a second, and rates at which scales move; what a file or --set says
 * holds. */
static const char *const small[] = {
    "model.layers=4",
    "model.hidden=32",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn=48",
    "model.sequence=16",
    "train.warmup=2",
    "train.sequences=1",
    "train.learning_rate=3e-2",
    "train.minimum_learning_rate=3e-3",
    "pipeline.microbatches=8",
};

/* A device that multiplies FP8 in whole sixteens, and whose attention knows heads of 64. */
static const char *const whole_sixteens[] = {
    "model.hidden=128", "model.heads=2", "model.kv_heads=1", "model.ffn=192", "model.sequence=64",
};

static qe_settings_place *place_of(qe_settings *settings, const char *assignment) {
    size_t length = strcspn(assignment, "="), row = 0;
    while (strncmp(qe_settings_describe(row).key, assignment, length) != 0 ||
           qe_settings_describe(row).key[length] != 0) {
        row++;
        QE_ASSERT(row < qe_settings_count());
    }
    return &settings->place[row];
}

/* Over the built-in defaults, under what a person wrote. */
static void set_defaults(qe_settings *settings, const char *const *assignments, size_t count) {
    qe_error error;
    for (size_t i = 0; i < count; i++) {
        qe_settings_place *place = place_of(settings, assignments[i]);
        if (place->line != QE_SETTINGS_LINE_DEFAULT) continue;
        qe_status set = qe_settings_set(settings, assignments[i], &error);
        QE_ASSERT(set == QE_OK);
        place->line = QE_SETTINGS_LINE_DEFAULT;
    }
}

static int make_settings(qe_cli *cli, qe_device_kind device, qe_settings *settings) {
    qe_error error = {0};
    int status = qe_session_settings(cli, cli->argument_count > 0 ? cli->arguments[0] : NULL, NULL, settings);
    if (status != QE_EXIT_OK) return status;
    if (qe_cli_value(cli, "row") == NULL) /* the process that makes the rows has said it */
        qe_device_unused_print(device, settings);
    set_defaults(settings, small, sizeof small / sizeof *small);
    if (qe_device_is_gpu(device))
        set_defaults(settings, whole_sixteens, sizeof whole_sixteens / sizeof *whole_sixteens);
    if (qe_settings_check(settings, &error) != QE_OK) return qe_cli_error(cli, &error);
    uint32_t microbatches = settings->pipeline.microbatches;
    if (microbatches >= 4 && microbatches % 2 == 0) return QE_EXIT_OK;
    qe_error_set(&error, QE_ERROR_CONFIG, "use 4, 6 or 8",
                 "pipeline.microbatches is %u; the matrix needs an even number from 4 on, which every schedule takes",
                 microbatches);
    return qe_cli_error(cli, &error);
}

/* ROW or ROW@STEP. */
static int parse_plant(const qe_cli *cli, verification *v) {
    const char *text = qe_cli_value(cli, "plant");
    char first[24];
    uint64_t row, step = 5;
    if (text == NULL) return QE_EXIT_OK;
    size_t length = strcspn(text, "@");
    snprintf(first, sizeof first, "%.*s", (int)length, text);
    if (length >= sizeof first || !qe_text_to_u64(first, &row) || row == 0 || row > v->rows.count)
        return qe_cli_usage(cli, "--plant %s: expected a row from 1 to %u", text, v->rows.count);
    if (text[length] == '@' && (!qe_text_to_u64(text + length + 1, &step) || step == 0 || step > QE_VERIFY_STEPS))
        return qe_cli_usage(cli, "--plant %s: expected a step from 1 to %d behind @", text, QE_VERIFY_STEPS);
    v->plant = (qe_verify_plant){(uint32_t)row, (uint32_t)step};
    return QE_EXIT_OK;
}

static json_t *row_json(const qe_verify_row *row) {
    int captured = row->execution != QE_VERIFY_EAGER && row->execution != QE_VERIFY_BASELINE;
    const char *name = qe_verify_execution_name(row->execution);
    json_t *fields = json_pack(
        "{s:I, s:s, s:s, s:I, s:I, s:I, s:I, s:s, s:b, s:s, s:s, s:s}", "row", (json_int_t)row->number, "mode",
        captured ? "captured" : name, "schedule", row->schedule, "ranks", (json_int_t)row->ranks, "chunks",
        (json_int_t)row->chunks, "stages", (json_int_t)(row->ranks * row->chunks), "layers", (json_int_t)row->layers,
        "recipe", qe_recipe_name(row->recipe), "cache_weights", row->cache, "placement", row->copy ? "copy" : "direct",
        "contracts", qe_verify_contracts_name(row->contracts), "process", row->fresh ? "fresh" : "here");
    if (captured) json_object_set_new(fields, "capture", json_string(strchr(name, ' ') + 1));
    if (row->history > 0) json_object_set_new(fields, "history", json_integer(row->history));
    json_object_set_new(fields, "baseline_row", json_integer((json_int_t)row->baseline + 1));
    return fields;
}

static void tell_head(int hashes) {
    printf("%3s %-15s %-11s %-3s %-3s %-9s %-5s %-6s %-7s %-5s", "row", "execution", "schedule", "pxv", "", "recipe",
           "cache", "grads", "rules", "proc");
    if (hashes) printf(" %-32s state_hash", "state_hash of its baseline");
    putchar('\n');
}

static int list_rows(const verification *v) {
    json_t *list = json_array();
    if (!v->cli->json) tell_head(0);
    for (uint32_t i = 0; i < v->rows.count; i++) {
        char words[160];
        qe_verify_row_words(&v->rows.row[i], words, sizeof words);
        if (!v->cli->json) printf("%3u %s\n", i + 1, words);
        json_array_append_new(list, row_json(&v->rows.row[i]));
    }
    if (v->cli->json) return qe_cli_json(json_pack("{s:o}", "rows", list), QE_EXIT_OK);
    json_decref(list);
    return QE_EXIT_OK;
}

/* One row alone, in this process: what a new process does for a fresh row, and how a person looks at one again. */
static int run_one(const verification *v, uint32_t index) {
    const qe_verify_row *row = &v->rows.row[index];
    qe_verify_outcome outcome;
    qe_verify_run(row, &v->configured, &v->plant, &outcome);
    int status = QE_EXIT_OK;
    if (outcome.status != QE_OK) status = qe_cli_error(v->cli, &outcome.error);
    else if (v->cli->json) status = qe_cli_json(qe_verify_outcome_json(row, &outcome), QE_EXIT_OK);
    else {
        for (int step = 0; step < QE_VERIFY_STEPS; step++)
            printf("step %-2d  loss %.17g  gradient norm %.17g\n", step + 1, outcome.loss[step], outcome.norm[step]);
        printf("state_hash %s\n", outcome.hash);
    }
    qe_verify_outcome_deinit(&outcome);
    return status;
}

/* Takes rows in their order until none is left; a baseline comes before the rows that are compared with it. */
static void *work(void *opaque) {
    verification *v = opaque;
    pthread_mutex_lock(&v->mutex);
    while (!v->stop && v->next < v->rows.count) {
        uint32_t index = v->next++;
        pthread_mutex_unlock(&v->mutex);
        const qe_verify_row *row = &v->rows.row[index];
        if (row->fresh) qe_verify_run_fresh(v->cli, row, &v->outcomes[index]);
        else qe_verify_run(row, &v->configured, &v->plant, &v->outcomes[index]);
        pthread_mutex_lock(&v->mutex);
        v->done[index] = 1;
        pthread_cond_broadcast(&v->changed);
    }
    pthread_mutex_unlock(&v->mutex);
    return NULL;
}

static void wait_for(verification *v, uint32_t index) {
    pthread_mutex_lock(&v->mutex);
    while (!v->done[index]) pthread_cond_wait(&v->changed, &v->mutex);
    pthread_mutex_unlock(&v->mutex);
}

static void tell_difference(const qe_verify_difference *difference) {
    printf("    differs first in step %u: %s", difference->step, difference->what);
    if (difference->expected != difference->found)
        printf(" %.17g instead of %.17g", difference->found, difference->expected);
    if (difference->tensor[0] && strcmp(difference->what, difference->tensor) != 0)
        printf("; the first tensor after it: %s", difference->tensor);
    printf(" (tensors that differ then: %u)\n", difference->tensors);
}

static void difference_json(json_t *fields, const qe_verify_difference *difference) {
    json_t *document = json_pack("{s:I, s:s, s:I}", "step", (json_int_t)difference->step, "first", difference->what,
                                 "tensors", (json_int_t)difference->tensors);
    if (difference->tensor[0]) json_object_set_new(document, "tensor", json_string(difference->tensor));
    if (difference->expected != difference->found) {
        json_object_set_new(document, "expected", json_real(difference->expected));
        json_object_set_new(document, "found", json_real(difference->found));
    }
    json_object_set_new(fields, "difference", document);
}

static void exercise_json(json_t *fields, const qe_verify_exercise *exercise) {
    json_t *document = json_pack("{s:I, s:I, s:I, s:b, s:b}", "scales", (json_int_t)exercise->scales, "rose",
                                 (json_int_t)exercise->rose, "fell", (json_int_t)exercise->fell, "zero_microbatch",
                                 exercise->zero_microbatch, "infinite_amax", exercise->infinite_amax);
    if (exercise->still[0]) json_object_set_new(document, "still", json_string(exercise->still));
    json_object_set_new(fields, "exercise", document);
}

/* A baseline whose steps were no test of what they are meant to test proves nothing about its rows. */
static void judge_exercise(verification *v, const qe_verify_row *row, const qe_verify_exercise *exercise) {
    if (qe_verify_exercised(exercise)) return;
    v->unexercised = 1;
    fprintf(stderr, "row %u: these steps prove too little: ", row->number);
    if (exercise->still[0])
        fprintf(stderr, "%s did not both rise and fall (%u of %u scales rose, %u fell)\n", exercise->still,
                exercise->rose, exercise->scales, exercise->fell);
    else fprintf(stderr, "%s\n", exercise->zero_microbatch ? "the Inf did not come to its history and go"
                                                           : "the zero microbatch was not zero");
}

static void tell_refused(verification *v, json_t *fields, uint32_t index, const qe_verify_outcome *outcome) {
    const char *message = outcome->status != QE_OK ? outcome->error.message : "its baseline did not run";
    char words[160];
    qe_verify_row_words(&v->rows.row[index], words, sizeof words);
    fprintf(stderr, "row %u (%s) did not run: %s\n", index + 1, words, message);
    json_object_set_new(fields, "error", json_string(message));
    if (v->worst == QE_OK) v->worst = outcome->status != QE_OK ? outcome->status : QE_ERROR_IO;
    v->refused++;
}

static void tell_compared(verification *v, json_t *fields, uint32_t index) {
    const qe_verify_row *row = &v->rows.row[index];
    const qe_verify_outcome *outcome = &v->outcomes[index], *baseline = &v->outcomes[row->baseline];
    int is_baseline = row->baseline == index;
    qe_verify_difference difference = qe_verify_compare(baseline, outcome);
    char words[160];
    const char *verdict = is_baseline ? "baseline" : difference.step == 0 ? "equal" : "DIFFERS";
    qe_verify_row_words(row, words, sizeof words);
    if (!v->cli->json) {
        printf("%3u %s %s %s %-8s %5.2f s\n", row->number, words, baseline->hash, outcome->hash, verdict,
               outcome->seconds);
        if (difference.step != 0) tell_difference(&difference);
        fflush(stdout);
    }
    json_object_set_new(fields, "baseline_hash", json_string(baseline->hash));
    json_object_set_new(fields, "state_hash", json_string(outcome->hash));
    json_object_set_new(fields, "equal", json_boolean(difference.step == 0));
    json_object_set_new(fields, "seconds", json_real(outcome->seconds));
    if (difference.step != 0) difference_json(fields, &difference);
    if (is_baseline) exercise_json(fields, &outcome->exercise);
    if (is_baseline) judge_exercise(v, row, &outcome->exercise);
    if (difference.step != 0) v->differing++;
    else if (is_baseline) v->baselines++;
    else v->equal++;
}

static void tell_row(verification *v, uint32_t index) {
    qe_verify_outcome *outcome = &v->outcomes[index];
    json_t *fields = row_json(&v->rows.row[index]);
    uint32_t baseline = v->rows.row[index].baseline;
    if (outcome->status != QE_OK || v->outcomes[baseline].status != QE_OK) tell_refused(v, fields, index, outcome);
    else tell_compared(v, fields, index);
    json_array_append_new(v->told, fields);
    v->told_count++;
    if (baseline != index) qe_verify_outcome_deinit(outcome); /* baselines are compared with until the end */
    if (v->cli->json && v->cli->terminal) fprintf(stderr, "\r\033[Krow %u/%u", index + 1, v->rows.count);
}

static void run_rows(verification *v, uint32_t jobs) {
    pthread_t threads[QE_VERIFY_JOBS_MAX];
    uint32_t started = 0;
    while (started < jobs && pthread_create(&threads[started], NULL, work, v) == 0) started++;
    if (started == 0) {
        v->worst = QE_ERROR_IO;
        fprintf(stderr, "qeffect: no thread to run rows; raise the limit on threads\n");
        return;
    }
    int keep = qe_cli_has(v->cli, "keep");
    for (uint32_t i = 0; i < v->rows.count && (keep || v->differing + v->refused == 0); i++) {
        wait_for(v, i);
        tell_row(v, i);
    }
    pthread_mutex_lock(&v->mutex);
    v->stop = 1;
    pthread_mutex_unlock(&v->mutex);
    for (uint32_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
    if (v->cli->json && v->cli->terminal) fprintf(stderr, "\r\033[K");
}

static int exit_of(const verification *v) {
    if (v->differing > 0 || v->unexercised) return QE_EXIT_DIFFERS;
    if (v->worst == QE_CONTRACT) return QE_EXIT_CONTRACT;
    return v->worst == QE_OK ? QE_EXIT_OK : QE_EXIT_ERROR;
}

static void tell_exercise(const verification *v) {
    uint32_t scales = 0, delayed = 0;
    for (uint32_t i = 0; i < v->told_count; i++) {
        int counts = v->rows.row[i].baseline == i && v->rows.row[i].history > 0 && v->outcomes[i].status == QE_OK;
        if (!counts) continue;
        delayed++;
        scales += v->outcomes[i].exercise.scales;
    }
    if (v->unexercised || delayed == 0) return;
    printf("exercise  %u scales of %u delayed baselines: each rose and fell within the %d steps; one amax of Inf "
           "(step %d)\n          came and left; microbatch 1 of step %d was all zero; every loss was finite\n",
           scales, delayed, QE_VERIFY_STEPS, QE_VERIFY_INFINITE_STEP, QE_VERIFY_ZERO_STEP);
}

static int finish(verification *v, double seconds) {
    int status = exit_of(v);
    if (!v->cli->json) {
        tell_exercise(v);
        printf("%u of %u rows: %u equal to their baselines, %u baselines, %u differ, %u did not run; %.1f s on %s\n",
               v->told_count, v->rows.count, v->equal, v->baselines, v->differing, v->refused, seconds,
               v->outcomes[0].backend[0] ? v->outcomes[0].backend : "no device");
        return status;
    }
    json_t *document = json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:I, s:f, s:s, s:O}", "rows_planned",
                                 (json_int_t)v->rows.count, "rows_run", (json_int_t)v->told_count, "equal",
                                 (json_int_t)v->equal, "baselines", (json_int_t)v->baselines, "differing",
                                 (json_int_t)v->differing, "refused", (json_int_t)v->refused, "exercised",
                                 !v->unexercised, "steps", (json_int_t)QE_VERIFY_STEPS, "seconds", seconds, "backend",
                                 v->outcomes[0].backend, "rows", v->told);
    return qe_cli_json(document, status);
}

static int run_all(verification *v, uint32_t jobs) {
    v->outcomes = calloc(v->rows.count, sizeof *v->outcomes);
    v->done = calloc(v->rows.count, sizeof *v->done);
    v->told = json_array();
    int status = QE_EXIT_ERROR;
    if (v->outcomes == NULL || v->done == NULL || v->told == NULL || qe_lock_init(&v->mutex, &v->changed, NULL) != 0) {
        qe_error error = {0};
        (void)qe_error_set(&error, QE_ERROR_MEMORY, NULL, "no memory for the rows");
        status = qe_cli_error(v->cli, &error);
    } else {
        double begin = qe_seconds_now();
        if (!v->cli->json) tell_head(1);
        run_rows(v, jobs);
        status = finish(v, qe_seconds_now() - begin);
        qe_lock_deinit(&v->mutex, &v->changed);
    }
    for (uint32_t i = 0; v->outcomes != NULL && i < v->rows.count; i++) qe_verify_outcome_deinit(&v->outcomes[i]);
    free(v->outcomes);
    free(v->done);
    json_decref(v->told);
    return status;
}

static uint64_t processors(void) {
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online < 1 ? 1 : online > QE_VERIFY_JOBS_MAX ? QE_VERIFY_JOBS_MAX : (uint64_t)online;
}

static int run_verify(qe_cli *cli) {
    verification v = {.cli = cli};
    qe_error error = {0};
    uint64_t jobs, row;
    const char *which = qe_cli_value(cli, "rows");
    int full = which == NULL || strcmp(which, "full") == 0;
    if (!full && strcmp(which, "short") != 0)
        return qe_cli_usage(cli, "--rows is '%s'; expected short or full", which);
    qe_device_kind device;
    int status = qe_device_option(cli, QE_DEVICE_CAN_HOST | QE_DEVICE_CAN_GPU, &device);
    if (status != QE_EXIT_OK) return status;
    /* Teams that share a GPU share its connections, and would wait for each other's messages. */
    uint64_t most = qe_device_is_gpu(device) ? 1 : QE_VERIFY_JOBS_MAX;
    if (qe_cli_number(cli, "jobs", 1, most, most == 1 ? 1 : processors(), &jobs) != 0) return QE_EXIT_USAGE;
    status = make_settings(cli, device, &v.configured);
    if (status != QE_EXIT_OK) return status;
    if (qe_verify_rows_make(&v.rows, full, &v.configured, &error) != QE_OK)
        return qe_cli_error(cli, &error);
    for (uint32_t i = 0; i < v.rows.count; i++) v.rows.row[i].device = device;
    if (qe_cli_number(cli, "row", 1, v.rows.count, 0, &row) != 0) return QE_EXIT_USAGE;
    status = parse_plant(cli, &v);
    if (status != QE_EXIT_OK) return status;
    if (qe_cli_has(cli, "list")) return list_rows(&v);
    return row > 0 ? run_one(&v, (uint32_t)row - 1) : run_all(&v, (uint32_t)jobs);
}

static const qe_cli_option options[] = {
    {"rows", 0, "WHICH", "full (default), or short: every pair of choices once", 0},
    {"jobs", 0, "N", "rows that run at the same time (default: processors; on a GPU one)", 0},
    {"keep", 0, NULL, "go on after a row that differs", 0},
    {"set", 0, "KEY=VALUE", "override one setting, e.g. model.hidden=64 (docs/config.md)", 1},
    {"device", 0, "NAME", "where to run: host, cuda or te", 0},
    {"contracts", 0, "MODE", "of the rows that are checked: trap (default), observe or off", 0},
    {"list", 0, NULL, "only list the rows", 0},
    {"row", 0, "N", "run row N alone, in this process, and print what it computed", 0},
    {"plant", 0, "ROW[@STEP]", "change one bit of one parameter of that row (default: after step 5) and see it found",
     0},
    {NULL, 0, NULL, NULL, 0},
};

const qe_command qe_command_verify = {
    .name = "verify",
    .arguments = "[CONFIG.yaml]",
    .summary = "show that baseline, eager and captured training hold the same bits",
    .details =
        "Trains one small model for 12 steps in many ways: modes, schedules, stages, recipes, caches, placements,\n"
        "capture units, histories, uneven stages, contracts on and off, and in new processes. After every step each\n"
        "row is compared with the baseline of its numeric configuration: loss, gradient norm, and every parameter,\n"
        "moment, scale and history. A file or --set gives other sizes; its data, schedule and mode are not used.\n"
        "\n"
        "Exit status 4 when a row differs, with the first step and the first tensor in which it does.\n"
        "\n"
        "Examples:\n"
        "  qeffect verify\n"
        "  qeffect verify --rows short\n"
        "  qeffect verify examples/quickstart.yaml --rows short --jobs 1\n"
        "  qeffect verify --rows short --plant 9\n",
    .options = options,
    .arguments_min = 0,
    .arguments_max = 1,
    .run = run_verify,
};
