/* texts.c - configuration, schedules, traces and times: what people and other programs write by hand. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/times.h"
#include "fuzz/readers.h"
#include "qeffect/schedule.h"
#include "qeffect/settings.h"
#include "qeffect/trace.h"

/* The first byte chooses between a file and one --set of the command line. */
void fuzz_config(const uint8_t *bytes, size_t count) {
    qe_settings settings, before;
    qe_error error = {0};
    memset(&settings, 0, sizeof settings);
    qe_settings_default(&settings);
    before = settings;
    if (count == 0) return;
    if (bytes[0] == '=') {
        char *assignment = strndup((const char *)bytes + 1, count - 1);
        fuzz_check(assignment != NULL, "no memory");
        fuzz_check_refusal(qe_settings_set(&settings, assignment, &error), &error);
        free(assignment);
    } else {
        qe_status status = qe_settings_load(fuzz_file(bytes, count), &settings, &error);
        fuzz_check_refusal(status, &error);
        if (status != QE_OK) fuzz_check(memcmp(&settings, &before, sizeof before) == 0, "refused, and changed");
    }
    error = (qe_error){0};
    fuzz_check_refusal(qe_settings_check(&settings, &error), &error);
    for (size_t i = 0; i < qe_settings_count(); i++) { /* each value is written as it is read */
        char text[QE_SETTINGS_VALUE_BYTES];
        qe_settings again = settings;
        int length = qe_settings_value_text(&settings, i, text, sizeof text);
        fuzz_check(length >= 0 && (size_t)length < sizeof text, "a value without a text");
        (void)again;
    }
}

static char *written(const qe_schedule *schedule, int comms, size_t *count_out) {
    char *text = NULL;
    qe_error error = {0};
    FILE *file = open_memstream(&text, count_out);
    fuzz_check(file != NULL, "no memory");
    qe_status status = comms ? qe_schedule_write_csv_comms(schedule, file, &error)
                             : qe_schedule_write_csv(schedule, file, &error);
    fuzz_check(fclose(file) == 0, "no memory");
    if (status == QE_OK) return text;
    fuzz_check_refusal(status, &error);
    free(text);
    return NULL;
}

/* What was read is written, and reads as the same actions. */
static void csv_again(const qe_schedule *schedule, int comms) {
    qe_schedule again = {0};
    qe_error error = {0};
    size_t count = 0;
    char *text = written(schedule, comms, &count);
    if (text == NULL || count == 0) {
        free(text);
        return;
    }
    FILE *file = fmemopen(text, count, "r");
    fuzz_check(file != NULL, "no memory");
    qe_status status = qe_schedule_read_csv(file, "written.csv", &again, &error);
    fclose(file);
    fuzz_check(status == QE_OK, error.message);
    fuzz_check(again.ranks == schedule->ranks && again.stages == schedule->stages, "another shape when read again");
    qe_schedule_deinit(&again);
    free(text);
}

void fuzz_csv(const uint8_t *bytes, size_t count) {
    qe_schedule schedule = {0};
    qe_error error = {0};
    qe_counterexample found = {0};
    if (count == 0) return;
    FILE *file = fmemopen((void *)(uintptr_t)bytes, count, "r");
    fuzz_check(file != NULL, "no memory");
    qe_status status = qe_schedule_read_csv(file, "input.csv", &schedule, &error);
    fclose(file);
    if (status != QE_CONTRACT) fuzz_check_refusal(status, &error);
    if (status != QE_OK) return;
    error = (qe_error){0};
    status = qe_schedule_check(&schedule, &found, &error);
    if (status == QE_OK) {
        csv_again(&schedule, 0);
        csv_again(&schedule, 1);
    }
    qe_counterexample_deinit(&found);
    qe_schedule_deinit(&schedule);
}

static qe_status trace_read(const void *bytes, size_t count, qe_program *program, qe_error *error) {
    FILE *file = fmemopen((void *)(uintptr_t)bytes, count, "r");
    fuzz_check(file != NULL, "no memory");
    qe_program_init(program);
    qe_status status = qe_trace_read(file, "input.qet", program, error);
    fclose(file);
    return status;
}

static void trace_again(const qe_program *program, const qe_violations *found) {
    qe_program again;
    qe_violations same = {0};
    qe_error error = {0};
    char *text = NULL;
    size_t count = 0;
    FILE *file = open_memstream(&text, &count);
    fuzz_check(file != NULL, "no memory");
    fuzz_check(qe_trace_write(program, file, &error) == QE_OK && fclose(file) == 0, "what was read is not written");
    fuzz_check(trace_read(text, count, &again, &error) == QE_OK, error.message);
    (void)qe_program_judge(&again, &same, &error);
    fuzz_check(same.total == found->total, "judged another way when written and read");
    for (uint32_t i = 0; i < found->count; i++)
        fuzz_check(same.record[i].rule == found->record[i].rule, "another rule when written and read");
    qe_program_deinit(&again);
    free(text);
}

void fuzz_trace(const uint8_t *bytes, size_t count) {
    qe_program program;
    qe_violations found = {0};
    qe_error error = {0};
    if (count == 0) return;
    qe_status status = trace_read(bytes, count, &program, &error);
    fuzz_check_refusal(status, &error);
    if (status == QE_OK) {
        char text[2048];
        status = qe_program_judge(&program, &found, &error);
        fuzz_check(status == QE_OK || status == QE_CONTRACT || error.message[0] != 0, "not judged, and no word why");
        for (uint32_t i = 0; i < found.count; i++)
            fuzz_check(qe_violation_text(&found.record[i], &program, text, sizeof text) > 0, "a breach without words");
        if (status == QE_OK || status == QE_CONTRACT) trace_again(&program, &found);
    }
    qe_program_deinit(&program);
}

/* Times of the stages of two ranks, as lines or as what bench wrote. */
void fuzz_times(const uint8_t *bytes, size_t count) {
    qe_schedule shape = {0};
    qe_schedule_request request = {.name = "interleaved", .ranks = 2, .chunks = 2, .microbatches = 4};
    qe_times times = {0};
    qe_error error = {0};
    fuzz_check(qe_schedule_generate(&request, &shape, &error) == QE_OK, "no shape");
    if (count > 0 && bytes[0] == '=') {
        char *text = strndup((const char *)bytes + 1, count - 1);
        fuzz_check(text != NULL, "no memory");
        fuzz_check_refusal(qe_times_parse(text, &shape, 1.0, &times, &error), &error);
        free(text);
    } else
        fuzz_check_refusal(qe_times_load(fuzz_file(bytes, count), &shape, 1.0, &times, &error), &error);
    qe_times_deinit(&times);
    qe_schedule_deinit(&shape);
}
