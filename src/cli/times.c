/* times.c - "1,1.2,0.7" and files of such lines, as costs of stages. */
#include "cli/times.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/text.h"

enum { VALUES_MOST = 4, VALUE_BYTES = 64, LINE_BYTES = 1024 };

int qe_times_number(const qe_cli *cli, const char *name, double fallback, double *value_out) {
    const char *text = qe_cli_value(cli, name);
    *value_out = fallback;
    if (text == NULL || (qe_text_to_double(text, value_out) && *value_out >= 0.0)) return 0;
    qe_cli_usage(cli, "--%s is '%s'; expected a number of 0 or more", name, text);
    return -1;
}

/* Numbers of 0 or more, parted by commas and nothing else. Returns how many, or 0 where it is anything else. */
static int read_values(const char *text, double values[VALUES_MOST]) {
    int count = 0;
    for (;;) {
        char value[VALUE_BYTES];
        size_t length = strcspn(text, ",");
        if (count == VALUES_MOST || length >= sizeof value) return 0;
        memcpy(value, text, length);
        value[length] = '\0';
        if (!qe_text_to_double(value, &values[count]) || values[count] < 0.0) return 0;
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

static int read_option(const qe_cli *cli, const qe_schedule *schedule, double share, qe_times *times) {
    const char *text = qe_cli_value(cli, "times");
    double values[VALUES_MOST] = {1.0, 1.0, 1.0, 0.0};
    int count = text == NULL ? VALUES_MOST : read_values(text, values);
    if (count < 3) return qe_cli_usage(cli, "--times is '%s'; expected F,I,W or F,I,W,C, numbers of 0 or more", text);
    times->hop = count == VALUES_MOST ? values[3] : 0.0;
    for (uint32_t stage = 0; stage < schedule->stages; stage++) {
        times->costs[stage] =
            qe_stage_cost_of(values[0], values[1], values[2], share, stages_beside(schedule, stage));
    }
    return QE_EXIT_OK;
}

static int refuse(const qe_cli *cli, const char *path, uint32_t line, qe_status status, const char *message,
                  const char *remedy) {
    qe_error error = {0};
    (void)qe_error_set(&error, status, remedy, "%s", message);
    (void)qe_error_place(&error, path, line, 0);
    return qe_cli_error(cli, &error);
}

/* A stage's own times; it keeps its part of a whole rank. */
static int read_line(const qe_cli *cli, const char *path, const qe_schedule *schedule, uint32_t stage, char *line,
                     double share, qe_times *times) {
    double values[VALUES_MOST];
    line[strcspn(line, "\r\n")] = '\0';
    if (read_values(line, values) != 3) {
        return refuse(cli, path, stage + 1, QE_ERROR_FORMAT, "expected F,I,W: three numbers of 0 or more",
                      "write the times of a stage on each line");
    }
    qe_stage_cost *cost = &times->costs[stage];
    *cost = qe_stage_cost_of(0.0, 0.0, 0.0, share, stages_beside(schedule, stage));
    for (int kind = 0; kind < 3; kind++) cost->time[kind] = values[kind];
    cost->time[QE_ACTION_B] = values[QE_ACTION_I] + values[QE_ACTION_W];
    return QE_EXIT_OK;
}

static int read_lines(const qe_cli *cli, const char *path, FILE *file, const qe_schedule *schedule, double share,
                      qe_times *times) {
    char line[LINE_BYTES];
    uint32_t stage = 0;
    for (; fgets(line, sizeof line, file) != NULL; stage++) {
        if (stage == schedule->stages) {
            return refuse(cli, path, stage + 1, QE_ERROR_FORMAT, "more lines than the schedule has stages",
                          "leave one line for each stage");
        }
        int status = read_line(cli, path, schedule, stage, line, share, times);
        if (status != QE_EXIT_OK) return status;
    }
    if (ferror(file)) return refuse(cli, path, 0, QE_ERROR_IO, "cannot read the times", "check the file");
    if (stage == schedule->stages) return QE_EXIT_OK;
    return refuse(cli, path, stage + 1, QE_ERROR_FORMAT, "fewer lines than the schedule has stages",
                  "write one line for each stage");
}

static int read_file(const qe_cli *cli, const char *path, const qe_schedule *schedule, double share,
                     qe_times *times) {
    FILE *file = fopen(path, "r");
    if (file == NULL) return refuse(cli, path, 0, QE_ERROR_IO, strerror(errno), "name a file with a line per stage");
    int status = read_lines(cli, path, file, schedule, share, times);
    (void)fclose(file);
    return status;
}

int qe_times_read(const qe_cli *cli, const qe_schedule *schedule, qe_times *times_out) {
    const char *path = qe_cli_value(cli, "stage-times");
    qe_times times = {0};
    double share;
    if (qe_times_number(cli, "weight-share", 1.0, &share) != 0) return QE_EXIT_USAGE;
    if (share > 1.0) return qe_cli_usage(cli, "--weight-share is more than 1, the whole of what is kept");
    if (qe_times_number(cli, "memory-limit", 0.0, &times.memory_limit) != 0) return QE_EXIT_USAGE;
    if (path != NULL && qe_cli_has(cli, "times")) {
        return qe_cli_usage(cli, "--times and --stage-times say the same; give one of them");
    }
    times.costs = calloc(schedule->stages, sizeof *times.costs);
    if (times.costs == NULL) return refuse(cli, "", 0, QE_ERROR_MEMORY, "no memory for times", NULL);
    int status = path == NULL ? read_option(cli, schedule, share, &times)
                              : read_file(cli, path, schedule, share, &times);
    if (status == QE_EXIT_OK) *times_out = times;
    else qe_times_deinit(&times);
    return status;
}

void qe_times_deinit(qe_times *times) {
    free(times->costs);
    *times = (qe_times){0};
}
