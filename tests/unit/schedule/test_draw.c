/* Pictures: the text chart letter by letter, the timeline event by event, the SVG by what it holds. */
#include <jansson.h>
#include <math.h>
#include "qeffect/draw.h"
#include "unit/schedule/support.h"

typedef qe_status drawer(const qe_drawing *drawing, FILE *file, qe_error *error_out);

static qe_simulation simulated(const qe_schedule *schedule, uint32_t chunks) {
    qe_stage_cost cost = qe_stage_cost_of(1, 1, 1, 1, chunks);
    qe_simulation_request request = {.schedule = schedule, .costs = &cost, .cost_count = 1};
    qe_simulation simulation = {0};
    qe_error error = {0};
    if (qe_simulation_run(&request, &simulation, &error) != QE_OK) fail_msg("%s", error.message);
    return simulation;
}

static qe_drawing drawing_of(const qe_schedule *schedule, const qe_simulation *simulation) {
    return (qe_drawing){.schedule = schedule, .simulation = simulation, .title = "<a & b>", .unit = "ms",
                        .unit_us = 1000.0};
}

static char *contents(FILE *file) {
    long bytes = ftell(file);
    char *text = calloc((size_t)bytes + 1, 1);
    assert_non_null(text);
    rewind(file);
    assert_int_equal(fread(text, 1, (size_t)bytes, file), bytes);
    (void)fclose(file);
    return text;
}

static char *drawn(drawer *draw, const qe_drawing *drawing) {
    FILE *file = tmpfile();
    qe_error error = {0};
    assert_non_null(file);
    if (draw(drawing, file, &error) != QE_OK) fail_msg("%s", error.message);
    return contents(file);
}

static char *chart(const char *csv, uint32_t chunks, uint32_t columns) {
    qe_schedule schedule = schedule_of(csv);
    qe_simulation simulation = simulated(&schedule, chunks);
    qe_drawing drawing = drawing_of(&schedule, &simulation);
    FILE *file = tmpfile();
    assert_non_null(file);
    assert_int_equal(qe_draw_text(&drawing, columns, file, NULL), QE_OK);
    qe_simulation_deinit(&simulation);
    qe_schedule_deinit(&schedule);
    return contents(file);
}

static uint32_t occurrences(const char *text, const char *word) {
    uint32_t count = 0;
    for (const char *at = strstr(text, word); at != NULL; at = strstr(at + 1, word)) count++;
    return count;
}

static void a_text_chart_shows_actions_and_waits_in_proportion(void **state) {
    (void)state;
    char *text = chart("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", 1, 10 + 27);
    assert_string_equal(text, "rank 0    F0-F1-......B0----...B1----\n"
                              "rank 1       F0-B0----F1-B1----      \n");
    free(text);
}

static void a_narrow_text_chart_keeps_the_letters(void **state) {
    (void)state;
    char *text = chart("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", 1, 10 + 18);
    assert_string_equal(text, "rank 0    F0F1....B0--..B1--\n"
                              "rank 1      F0B0--F1B1--    \n");
    free(text);
    text = chart("0F10,0I10,0W10,0F11,0I11,0W11,0F0,0I0,0W0,0F1,0I1,0W1\n", 1, 24);
    assert_string_equal(text, "rank 0    FIW-FIWFIW0FIW\n");
    free(text);
}

static void every_second_chunk_is_written_small(void **state) {
    (void)state;
    char *text = chart("0F0,1F0,1I0,0I0,1W0,0W0\n", 1, 10 + 18);
    assert_string_equal(text, "rank 0    F0-f0-i0-I0-w0-W0-\n");
    free(text);
}

static json_t *timeline(const qe_drawing *drawing) {
    char *text = drawn(qe_draw_timeline, drawing);
    json_error_t error;
    json_t *document = json_loads(text, JSON_REJECT_DUPLICATES, &error);
    if (document == NULL) fail_msg("%d: %s", error.line, error.text);
    free(text);
    return document;
}

static const char *text_of(json_t *event, const char *key) {
    const char *text = json_string_value(json_object_get(event, key));
    return text == NULL ? "" : text;
}

static double number_of(json_t *event, const char *key) { return json_number_value(json_object_get(event, key)); }

/* The slice of an action on its rank. */
static json_t *slice_of(json_t *events, const char *name) {
    for (size_t i = 0; i < json_array_size(events); i++) {
        json_t *event = json_array_get(events, i);
        if (strcmp(text_of(event, "ph"), "X") == 0 && strcmp(text_of(event, "name"), name) == 0) return event;
    }
    fail_msg("no slice %s", name);
    return NULL;
}

static void a_timeline_has_every_action_in_microseconds(void **state) {
    (void)state;
    qe_schedule schedule = generated("zbh2", 4, 1, 8);
    qe_simulation simulation = simulated(&schedule, 1);
    qe_drawing drawing = drawing_of(&schedule, &simulation);
    json_t *document = timeline(&drawing), *events = json_object_get(document, "traceEvents");
    for (uint32_t i = 0; i < simulation.actions_count; i++) {
        char name[32];
        (void)qe_action_text(&schedule.actions[i], name, sizeof name);
        json_t *slice = slice_of(events, name);
        assert_true(fabs(number_of(slice, "ts") - simulation.start[i] * 1000) < 1e-6);
        assert_true(fabs(number_of(slice, "dur") - (simulation.end[i] - simulation.start[i]) * 1000) < 1e-6);
        assert_int_equal(number_of(slice, "pid"), schedule.actions[i].stage);
    }
    json_decref(document);
    qe_simulation_deinit(&simulation);
    qe_schedule_deinit(&schedule);
}

/* Arrows come in pairs, one for each of 3 boundaries x 2 ways x 8 microbatches; counters end at nothing kept. */
static void a_timeline_has_transfers_counters_and_folds(void **state) {
    (void)state;
    qe_schedule schedule = generated("zbh2", 4, 1, 8);
    qe_simulation simulation = simulated(&schedule, 1);
    qe_drawing drawing = drawing_of(&schedule, &simulation);
    json_t *document = timeline(&drawing), *events = json_object_get(document, "traceEvents");
    uint32_t begun = 0, ended = 0, folds = 0;
    double kept[4] = {1, 1, 1, 1}, most = 0;
    for (size_t i = 0; i < json_array_size(events); i++) {
        json_t *event = json_array_get(events, i), *args = json_object_get(event, "args");
        const char *phase = text_of(event, "ph");
        begun += strcmp(phase, "s") == 0;
        ended += strcmp(phase, "f") == 0;
        folds += strcmp(phase, "i") == 0;
        if (strcmp(phase, "C") != 0) continue;
        uint32_t rank = (uint32_t)number_of(event, "pid");
        kept[rank] = number_of(args, "F to I") + number_of(args, "I to W");
        if (rank == 3 && number_of(args, "I to W") > most) most = number_of(args, "I to W");
    }
    assert_int_equal(begun, 48);
    assert_int_equal(ended, 48);
    assert_int_equal(folds, 4);
    for (int rank = 0; rank < 4; rank++) assert_true(kept[rank] == 0);
    assert_int_equal(most, 7); /* 2r+1 */
    json_decref(document);
    qe_simulation_deinit(&simulation);
    qe_schedule_deinit(&schedule);
}

static void a_timeline_tells_the_two_ways_of_dualpipe_apart_by_rank(void **state) {
    (void)state;
    qe_schedule schedule = generated("dualpipe", 4, 1, 8);
    qe_simulation simulation = simulated(&schedule, 1);
    qe_drawing drawing = drawing_of(&schedule, &simulation);
    json_t *document = timeline(&drawing), *events = json_object_get(document, "traceEvents");
    assert_int_equal(number_of(slice_of(events, "0F0"), "pid"), 0);
    assert_int_equal(number_of(slice_of(events, "0F4"), "pid"), 3);
    json_decref(document);
    qe_simulation_deinit(&simulation);
    qe_schedule_deinit(&schedule);
}

static void an_svg_has_every_action_slot_and_fold(void **state) {
    (void)state;
    qe_schedule schedule = generated("zbh1", 4, 1, 8);
    qe_simulation simulation = simulated(&schedule, 1);
    qe_drawing drawing = drawing_of(&schedule, &simulation);
    char *svg = drawn(qe_draw_svg, &drawing);
    assert_int_equal(occurrences(svg, "class=\"F a\""), 32);
    assert_int_equal(occurrences(svg, "class=\"I a\""), 32);
    assert_int_equal(occurrences(svg, "class=\"W a\""), 32);
    assert_int_equal(occurrences(svg, "class=\"keep\""), 32 + 1); /* and the legend */
    assert_int_equal(occurrences(svg, "class=\"late\""), 32 + 1);
    assert_int_equal(occurrences(svg, "class=\"fold\""), 4 + 1);
    assert_int_equal(occurrences(svg, ">slot 3: "), 4 * 4); /* four slots a rank, each taken twice, two lines each */
    assert_int_equal(occurrences(svg, ">slot 4: "), 0);
    assert_non_null(strstr(svg, "<title>2F0: 2 to 3</title>"));
    assert_non_null(strstr(svg, "&lt;a &amp; b>"));
    assert_non_null(strstr(svg, "all ranks meet"));
    assert_string_equal(svg + strlen(svg) - 7, "</svg>\n");
    free(svg);
    qe_simulation_deinit(&simulation);
    qe_schedule_deinit(&schedule);
}

static void an_evaluation_keeps_and_folds_nothing(void **state) {
    (void)state;
    qe_schedule schedule = schedule_of("0F0,0F1\n1F0,1F1\n");
    qe_simulation simulation = simulated(&schedule, 1);
    qe_drawing drawing = drawing_of(&schedule, &simulation);
    char *svg = drawn(qe_draw_svg, &drawing), *json = drawn(qe_draw_timeline, &drawing);
    assert_int_equal(occurrences(svg, "class=\"fold\""), 0);
    assert_int_equal(occurrences(svg, ">slot "), 0);
    assert_int_equal(occurrences(json, "fold of scales"), 0);
    free(svg);
    free(json);
    qe_simulation_deinit(&simulation);
    qe_schedule_deinit(&schedule);
}

static void halves_of_a_pair_share_the_height(void **state) {
    (void)state;
    qe_schedule schedule = generated("dualpipev", 2, 2, 8);
    qe_simulation simulation = simulated(&schedule, 2);
    qe_drawing drawing = drawing_of(&schedule, &simulation);
    uint32_t pairs = 0;
    for (uint32_t i = 0; i < simulation.actions_count; i++) pairs += schedule.actions[i].paired;
    assert_true(pairs > 0);
    char *svg = drawn(qe_draw_svg, &drawing);
    assert_int_equal(occurrences(svg, "height=\"13.0\""), 2 * pairs);
    free(svg);
    qe_simulation_deinit(&simulation);
    qe_schedule_deinit(&schedule);
}

static void more_slots_than_lines_share_the_last_one(void **state) {
    (void)state;
    qe_schedule schedule = generated("gpipe", 2, 1, 100);
    qe_simulation simulation = simulated(&schedule, 1);
    qe_drawing drawing = drawing_of(&schedule, &simulation);
    char *svg = drawn(qe_draw_svg, &drawing);
    assert_int_equal(occurrences(svg, ">slot 63: "), 2 * 37);
    assert_int_equal(occurrences(svg, ">slot 64: "), 0);
    free(svg);
    qe_simulation_deinit(&simulation);
    qe_schedule_deinit(&schedule);
}

static void a_span_too_short_for_a_scale_is_drawn_as_none(void **state) {
    (void)state;
    const double times[] = {5e-324, 1e-310, 1e-290, 1e-200, 1e29};
    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
        qe_schedule schedule = schedule_of("0F0,0B0\n1F0,1B0\n");
        qe_stage_cost cost = qe_stage_cost_of(times[i], times[i], times[i], 0.5, 1);
        qe_simulation_request request = {.schedule = &schedule, .costs = &cost, .cost_count = 1};
        qe_simulation simulation = {0};
        assert_int_equal(qe_simulation_run(&request, &simulation, NULL), QE_OK);
        qe_drawing drawing = drawing_of(&schedule, &simulation);
        char *text = drawn(qe_draw_svg, &drawing);
        assert_non_null(strstr(text, "</svg>"));
        assert_null(strstr(text, "nan"));
        assert_null(strstr(text, "inf"));
        assert_in_range(occurrences(text, "class=\"tick\""), 1, 100);
        free(text);
        qe_simulation_deinit(&simulation);
        qe_schedule_deinit(&schedule);
    }
}

static void too_many_actions_are_refused_as_svg_and_nothing_is_written(void **state) {
    (void)state;
    qe_schedule schedule = generated("1f1b", 64, 1, 1100);
    qe_simulation simulation = simulated(&schedule, 1);
    qe_drawing drawing = drawing_of(&schedule, &simulation);
    qe_error error = {0};
    FILE *file = tmpfile();
    assert_non_null(file);
    assert_int_equal(qe_draw_svg(&drawing, file, &error), QE_ERROR_LIMIT);
    assert_non_null(strstr(error.message, "140800 actions are too many for an SVG; at most 131072"));
    assert_int_equal(ftell(file), 0);
    (void)fclose(file);
    qe_simulation_deinit(&simulation);
    qe_schedule_deinit(&schedule);
}

static void a_full_disk_is_an_error_of_every_picture(void **state) {
    (void)state;
    static drawer *const drawers[] = {qe_draw_svg, qe_draw_timeline};
    qe_schedule schedule = generated("1f1b", 8, 1, 64);
    qe_simulation simulation = simulated(&schedule, 1);
    qe_drawing drawing = drawing_of(&schedule, &simulation);
    for (size_t i = 0; i < 3; i++) {
        qe_error error = {0};
        FILE *file = fopen("/dev/full", "w");
        assert_non_null(file);
        qe_status status = i < 2 ? drawers[i](&drawing, file, &error) : qe_draw_text(&drawing, 80, file, &error);
        assert_int_equal(status, QE_ERROR_IO);
        assert_non_null(strstr(error.message, "cannot write: "));
        (void)fclose(file);
    }
    qe_simulation_deinit(&simulation);
    qe_schedule_deinit(&schedule);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_text_chart_shows_actions_and_waits_in_proportion),
        cmocka_unit_test(a_narrow_text_chart_keeps_the_letters),
        cmocka_unit_test(every_second_chunk_is_written_small),
        cmocka_unit_test(a_timeline_has_every_action_in_microseconds),
        cmocka_unit_test(a_timeline_has_transfers_counters_and_folds),
        cmocka_unit_test(a_timeline_tells_the_two_ways_of_dualpipe_apart_by_rank),
        cmocka_unit_test(an_svg_has_every_action_slot_and_fold),
        cmocka_unit_test(an_evaluation_keeps_and_folds_nothing),
        cmocka_unit_test(halves_of_a_pair_share_the_height),
        cmocka_unit_test(more_slots_than_lines_share_the_last_one),
        cmocka_unit_test(a_span_too_short_for_a_scale_is_drawn_as_none),
        cmocka_unit_test(too_many_actions_are_refused_as_svg_and_nothing_is_written),
        cmocka_unit_test(a_full_disk_is_an_error_of_every_picture),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
