/* times.c - "1,1.2,0.7", files of such lines and what `bench` measured, as costs of stages. */
#include "cli/times.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <jansson.h>
#include "base/assert.h"
#include "base/text.h"

enum { VALUES_MOST = 4, VALUE_BYTES = 64, LINE_BYTES = 1024 };

int qe_times_number(const qe_cli *cli, const char *name, double fallback, double *value_out) {
    const char *text = qe_cli_value(cli, name);
    *value_out = fallback;
    if (text == NULL || (qe_text_to_double(text, value_out) && *value_out >= 0.0)) return 0;
    qe_cli_usage(cli, "--%s is '%s'; expected a number of 0 or more", name, text);
    return -1;
}

int qe_times_positive(const qe_cli *cli, const char *name, double *value_out) {
    const char *text = qe_cli_value(cli, name);
    *value_out = 0.0;
    if (text == NULL || (qe_text_to_double(text, value_out) && *value_out > 0.0)) return 0;
    qe_cli_usage(cli, "--%s is '%s'; expected a number above 0, or leave it out", name, text);
    return -1;
}

#define EXPECTED "expected F,I,W or F,I,W,C, numbers from 0 to 1e30; F, I and W not all 0"

/* What the library takes: a file or a setting that has more is told where it is. */
static int is_time(double value) { return value >= 0.0 && value <= 1e30; }

/* Times, parted by commas and nothing else. Returns how many, or 0 where it is anything else. */
static int read_values(const char *text, double values[VALUES_MOST]) {
    int count = 0;
    for (;;) {
        char value[VALUE_BYTES];
        size_t length = strcspn(text, ",");
        if (count == VALUES_MOST || length >= sizeof value) return 0;
        memcpy(value, text, length);
        value[length] = '\0';
        if (!qe_text_to_double(value, &values[count]) || !is_time(values[count])) return 0;
        count++;
        if (text[length] == '\0') return count;
        text += length + 1;
    }
}

static uint32_t stages_beside(const qe_schedule *schedule, uint32_t stage) {
    uint32_t stages = 0;
    for (uint32_t s = 0; s < schedule->stages; s++) stages += schedule->stage_rank[s] == schedule->stage_rank[stage];
    return stages;
}

static qe_status take_costs(const qe_schedule *shape, qe_times *times_out, qe_error *error_out) {
    *times_out = (qe_times){.costs = calloc(shape->stages, sizeof *times_out->costs)};
    if (times_out->costs != NULL) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for times");
}

/* A step that takes no time has no shares to tell, and no order is better than another. */
static int is_nothing(const double *times) { return times[0] == 0.0 && times[1] == 0.0 && times[2] == 0.0; }

qe_status qe_times_parse(const char *text, const qe_schedule *shape, double share, qe_times *times_out,
                         qe_error *error_out) {
    double values[VALUES_MOST];
    int count = read_values(text, values);
    if (count < 3 || is_nothing(values)) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "write times of a whole rank, such as 1,1.2,0.7,0.1",
                            "the times are '%.64s'; " EXPECTED, text);
    }
    QE_TRY(take_costs(shape, times_out, error_out));
    times_out->hop = count == VALUES_MOST ? values[3] : 0.0;
    for (uint32_t stage = 0; stage < shape->stages; stage++) {
        times_out->costs[stage] =
            qe_stage_cost_of(values[0], values[1], values[2], share, stages_beside(shape, stage));
    }
    return QE_OK;
}

/* ---- files ---- */

/* What a file is read with. */
typedef struct reader {
    const char *path;
    const qe_schedule *shape;
    double share;
    qe_times *times;
    qe_error *error;
} reader;

static qe_status refuse(const reader *on, uint32_t line, qe_status status, const char *message, const char *remedy) {
    (void)qe_error_set(on->error, status, remedy, "%s", message);
    (void)qe_error_place(on->error, on->path, line, 0);
    return status;
}

/* A stage's own times; it keeps its part of a whole rank. */
static void set_stage(const reader *on, uint32_t stage, const double values[3]) {
    qe_stage_cost *cost = &on->times->costs[stage];
    *cost = qe_stage_cost_of(0.0, 0.0, 0.0, on->share, stages_beside(on->shape, stage));
    for (int kind = 0; kind < 3; kind++) cost->time[kind] = values[kind];
    cost->time[QE_ACTION_B] = values[QE_ACTION_I] + values[QE_ACTION_W];
}

static qe_status read_lines(const reader *on, FILE *file) {
    char line[LINE_BYTES];
    uint32_t stage = 0;
    for (; fgets(line, sizeof line, file) != NULL; stage++) {
        double values[VALUES_MOST];
        line[strcspn(line, "\r\n")] = '\0';
        if (stage == on->shape->stages) {
            return refuse(on, stage + 1, QE_ERROR_FORMAT, "more lines than the schedule has stages",
                          "leave one line for each stage");
        }
        if (read_values(line, values) != 3) {
            return refuse(on, stage + 1, QE_ERROR_FORMAT, "expected F,I,W: three numbers from 0 to 1e30",
                          "write the times of a stage on each line");
        }
        set_stage(on, stage, values);
    }
    if (ferror(file)) return refuse(on, 0, QE_ERROR_IO, "cannot read the times", "check the file");
    if (stage == on->shape->stages) return QE_OK;
    return refuse(on, stage + 1, QE_ERROR_FORMAT, "fewer lines than the schedule has stages",
                  "write one line for each stage");
}

/* One object of "stage_times". */
static int read_object(const json_t *object, double values[3]) {
    static const char *const names[3] = {"forward_ms", "input_ms", "weight_ms"};
    for (int kind = 0; kind < 3; kind++) {
        const json_t *value = json_object_get(object, names[kind]);
        if (!json_is_number(value)) return 0;
        values[kind] = json_number_value(value);
        if (!is_time(values[kind])) return 0;
    }
    return 1;
}

static qe_status read_measured(const reader *on, const json_t *document) {
    const json_t *list = json_object_get(document, "stage_times");
    char message[128];
    if (!json_is_array(list)) {
        return refuse(on, 0, QE_ERROR_FORMAT, "the document has no \"stage_times\"",
                      "write it with qeffect bench --json");
    }
    if (json_array_size(list) != on->shape->stages) {
        (void)snprintf(message, sizeof message, "the document has times of %zu stage%s, the schedule has %u",
                       json_array_size(list), qe_cli_s(json_array_size(list)), on->shape->stages);
        return refuse(on, 0, QE_ERROR_FORMAT, message, "measure with the ranks and chunks of the schedule");
    }
    for (uint32_t stage = 0; stage < on->shape->stages; stage++) {
        double values[3];
        if (!read_object(json_array_get(list, stage), values)) {
            (void)snprintf(message, sizeof message,
                           "\"stage_times\"[%u] lacks forward_ms, input_ms or weight_ms, of 0 to 1e30", stage);
            return refuse(on, 0, QE_ERROR_FORMAT, message, "write it with qeffect bench --json");
        }
        set_stage(on, stage, values);
    }
    return QE_OK;
}

static qe_status read_json(const reader *on, FILE *file) {
    json_error_t fault;
    json_t *document = json_loadf(file, JSON_REJECT_DUPLICATES, &fault);
    if (document == NULL) {
        return refuse(on, fault.line > 0 ? (uint32_t)fault.line : 0, QE_ERROR_FORMAT, fault.text,
                      "write it with qeffect bench --json");
    }
    qe_status status = read_measured(on, document);
    json_decref(document);
    return status;
}

/* JSON begins with a brace, and times never do. */
static qe_status read_file(const reader *on, FILE *file) {
    uint32_t stage = 0;
    int first = fgetc(file);
    if (first == EOF) {
        return refuse(on, 1, ferror(file) ? QE_ERROR_IO : QE_ERROR_FORMAT, "the file is empty, or no file",
                      "write the times of a stage on each line");
    }
    (void)ungetc(first, file);
    QE_TRY(first == '{' ? read_json(on, file) : read_lines(on, file));
    while (stage < on->shape->stages && is_nothing(on->times->costs[stage].time)) stage++;
    if (stage < on->shape->stages) return QE_OK;
    return refuse(on, 0, QE_ERROR_FORMAT, "all times of all stages are 0", "write the times of at least one stage");
}

qe_status qe_times_load(const char *path, const qe_schedule *shape, double share, qe_times *times_out,
                        qe_error *error_out) {
    reader on = {.path = path, .shape = shape, .share = share, .times = times_out, .error = error_out};
    char message[128];
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        (void)snprintf(message, sizeof message, "cannot open the times: %s", strerror(errno));
        return refuse(&on, 0, QE_ERROR_IO, message, "name a file with a line F,I,W per stage, or one of bench --json");
    }
    qe_status status = take_costs(shape, times_out, error_out);
    if (status == QE_OK) status = read_file(&on, file);
    (void)fclose(file);
    if (status != QE_OK) qe_times_deinit(times_out);
    return status;
}

/* ---- the command line ---- */

int qe_times_read(const qe_cli *cli, const qe_schedule *schedule, qe_times *times_out) {
    const char *path = qe_cli_value(cli, "stage-times"), *text = qe_cli_value(cli, "times");
    double share, limit;
    qe_times times = {0};
    qe_error error = {0};
    if (qe_times_number(cli, "weight-share", 1.0, &share) != 0) return QE_EXIT_USAGE;
    if (share > 1.0) return qe_cli_usage(cli, "--weight-share is more than 1, the whole of what is kept");
    if (qe_times_positive(cli, "memory-limit", &limit) != 0) return QE_EXIT_USAGE;
    if (path != NULL && text != NULL) {
        return qe_cli_usage(cli, "--times and --stage-times say the same; give one of them");
    }
    qe_status status = path != NULL ? qe_times_load(path, schedule, share, &times, &error)
                                    : qe_times_parse(text == NULL ? "1,1,1" : text, schedule, share, &times, &error);
    if (status == QE_ERROR_ARGUMENT) {
        return qe_cli_usage(cli, "--times is '%s'; " EXPECTED, text);
    }
    if (status != QE_OK) return qe_cli_error(cli, &error);
    times.memory_limit = limit;
    *times_out = times;
    return QE_EXIT_OK;
}

void qe_times_deinit(qe_times *times) {
    free(times->costs);
    *times = (qe_times){0};
}
