/* support.h - small schedules as text, for the tests of this room. */
#ifndef QE_TEST_SCHEDULE_SUPPORT_H
#define QE_TEST_SCHEDULE_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "qeffect/schedule.h"

static inline qe_status read_bytes(const char *bytes, size_t count, qe_schedule *schedule_out, qe_error *error_out) {
    FILE *file = tmpfile();
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    rewind(file);
    qe_status status = qe_schedule_read_csv(file, "orders.csv", schedule_out, error_out);
    (void)fclose(file);
    return status;
}

static inline qe_schedule schedule_of(const char *csv) {
    qe_schedule schedule = {0};
    qe_error error = {0};
    qe_status status = read_bytes(csv, strlen(csv), &schedule, &error);
    if (status != QE_OK) fail_msg("%s: %s", csv, error.message);
    return schedule;
}

static inline qe_schedule generated(const char *name, uint32_t ranks, uint32_t chunks, uint32_t microbatches) {
    qe_schedule_request request = {.name = name, .ranks = ranks, .chunks = chunks, .microbatches = microbatches};
    qe_schedule schedule = {0};
    qe_error error = {0};
    if (qe_schedule_generate(&request, &schedule, &error) != QE_OK) {
        fail_msg("%s P%u V%u M%u: %s", name, ranks, chunks, microbatches, error.message);
    }
    return schedule;
}

/* One rank's order, actions parted by spaces. */
static inline const char *row_text(const qe_schedule *schedule, uint32_t rank, char *text, size_t capacity) {
    size_t at = 0;
    text[0] = '\0';
    for (uint32_t i = schedule->rank_begin[rank]; i < schedule->rank_begin[rank + 1]; i++) {
        if (i > schedule->rank_begin[rank]) text[at++] = ' ';
        at += (size_t)qe_action_text(&schedule->actions[i], text + at, capacity - at);
        assert_true(at + 1 < capacity);
    }
    return text;
}

#endif
