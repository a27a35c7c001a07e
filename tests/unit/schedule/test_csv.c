/* Schedules as PyTorch's compute-only CSV: there and back, and everything that a file may hold instead. */
#include "unit/schedule/support.h"

static void assert_same(const qe_schedule *a, const qe_schedule *b) {
    assert_int_equal(a->ranks, b->ranks);
    assert_int_equal(a->stages, b->stages);
    assert_int_equal(a->microbatches, b->microbatches);
    assert_int_equal(a->reversed, b->reversed);
    assert_memory_equal(a->rank_begin, b->rank_begin, (a->ranks + 1) * sizeof *a->rank_begin);
    assert_memory_equal(a->stage_rank, b->stage_rank, a->stages * sizeof *a->stage_rank);
    for (uint32_t i = 0; i < a->rank_begin[a->ranks]; i++) {
        assert_int_equal(a->actions[i].stage, b->actions[i].stage);
        assert_int_equal(a->actions[i].kind, b->actions[i].kind);
        assert_int_equal(a->actions[i].microbatch, b->actions[i].microbatch);
        assert_int_equal(a->actions[i].paired, b->actions[i].paired);
    }
}

static void assert_round_trip(const qe_schedule *schedule) {
    FILE *file = tmpfile();
    qe_schedule back;
    assert_non_null(file);
    assert_int_equal(qe_schedule_write_csv(schedule, file, NULL), QE_OK);
    rewind(file);
    assert_int_equal(qe_schedule_read_csv(file, "back.csv", &back, NULL), QE_OK);
    assert_same(schedule, &back);
    qe_schedule_deinit(&back);
    (void)fclose(file);
}

static void what_is_written_is_read_back_the_same(void **state) {
    (void)state;
    static const qe_schedule_request requests[] = {
        {"gpipe", 4, 1, 8, 0},       {"1f1b", 64, 1, 100, 0},     {"interleaved", 4, 2, 8, 0},
        {"zbh1", 8, 1, 24, 0},       {"sequential", 2, 3, 5, 0},  {"interleaved", 3, 3, 9, 1},
        {"1f1b", 1, 1, 1, 0},        {"dualpipev", 4, 2, 9, 0},   {"dualpipe", 4, 1, 8, 0},
        {"dualpipe", 2, 1, 4, 0},    {"dualpipe", 6, 1, 12, 1},   {"v-half", 5, 2, 9, 0},
    };
    for (size_t i = 0; i < sizeof requests / sizeof requests[0]; i++) {
        qe_schedule schedule;
        assert_int_equal(qe_schedule_generate(&requests[i], &schedule, NULL), QE_OK);
        assert_round_trip(&schedule);
        qe_schedule_deinit(&schedule);
    }
}

static void the_written_form_is_one_row_per_rank_without_bubbles(void **state) {
    (void)state;
    qe_schedule schedule = generated("1f1b", 2, 1, 2);
    char text[256] = {0};
    FILE *file = fmemopen(text, sizeof text, "w");
    assert_non_null(file);
    assert_int_equal(qe_schedule_write_csv(&schedule, file, NULL), QE_OK);
    (void)fclose(file);
    assert_string_equal(text, "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
    qe_schedule_deinit(&schedule);
}

static void pairs_are_written_and_read_as_one_cell(void **state) {
    (void)state;
    static const char rows[] = "1F0,2F0,2B0,1F1,(2F1;1B0)OVERLAP_F_B,2B1,1B1\n";
    qe_schedule schedule = schedule_of("1F0,2F0,2B0,1F1,\"( 2F1 ;1B0 )OVERLAP_F_B\",2B1, (1B1;)OVERLAP_F_B\n");
    assert_int_equal(schedule.rank_begin[1], 8);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(schedule.actions[i].paired, i == 4);
        assert_int_equal(schedule.actions[i].column, i < 5 ? i + 1 : i);
    }
    char text[256] = {0}, cell[64];
    assert_int_equal(qe_schedule_cell_text(&schedule, 3, cell, sizeof cell), 1);
    assert_string_equal(cell, "1F1");
    assert_int_equal(qe_schedule_cell_text(&schedule, 4, cell, sizeof cell), 2);
    assert_string_equal(cell, "(2F1;1B0)OVERLAP_F_B");
    FILE *file = fmemopen(text, sizeof text, "w");
    assert_non_null(file);
    assert_int_equal(qe_schedule_write_csv(&schedule, file, NULL), QE_OK);
    (void)fclose(file);
    assert_string_equal(text, rows);
    schedule.actions[7].paired = 1; /* with nothing behind it */
    assert_int_equal(qe_schedule_cell_text(&schedule, 7, cell, sizeof cell), 1);
    assert_string_equal(cell, "1B1");
    qe_schedule_deinit(&schedule);
}

static void only_dualpipe_has_stages_on_two_ranks(void **state) {
    (void)state;
    qe_schedule schedule = schedule_of("0F0,1F1,1B1,0B0\n1F0,0F1,0B1,1B0\n");
    assert_int_equal(schedule.reversed, 1);
    qe_schedule_deinit(&schedule);
    static const char *const others[] = {"0F0,1F1,1B1,0B0\n1F0,0F1,0B1,1B0,0F2\n", "0F0,1F1,2F1\n1F0,0F1\n",
                                         "0F0,0F1\n1F0,0F1\n"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        qe_counterexample counterexample = {0};
        schedule = schedule_of(others[i]);
        assert_int_equal(schedule.reversed, 0);
        assert_int_equal(qe_schedule_check(&schedule, &counterexample, NULL), QE_CONTRACT);
        assert_int_equal(counterexample.rule, QE_RULE_SCHEDULE_PLACE);
        qe_counterexample_deinit(&counterexample);
        qe_schedule_deinit(&schedule);
    }
}

static void bubbles_spaces_line_ends_and_uneven_rows_are_tolerated(void **state) {
    (void)state;
    static const char *const files[] = {
        "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n",
        "0F0,0F1,,,0B0,0B1\r\n,1F0,1B0,1F1,1B1\r\n",
        "0F0 , 0F1\t,  ,,0B0,0B1  \n,1F0,1B0,1F1,1B1",
        "0F0,0F1,0B0,0B1,,,,,,,,\n,,,,,,,,,1F0,1B0,1F1,1B1,\n\n\r\n",
        "00F00,0F1,0B0,0B1\n1F0,1B0,1F1,01B1\n",
        "\"0F0\",0F1, \" 0B0 \",0B1\n1F0,1B0,1F1,1B1\n",
    };
    qe_schedule expected = generated("1f1b", 2, 1, 2);
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        qe_schedule schedule = schedule_of(files[i]);
        assert_same(&expected, &schedule);
        qe_schedule_deinit(&schedule);
    }
    qe_schedule_deinit(&expected);
}

static void actions_remember_their_row_and_cell(void **state) {
    (void)state;
    qe_schedule schedule = schedule_of("0F0,,0B0\n,1F0,1I0,1W0\n");
    assert_int_equal(schedule.actions[1].row, 1);
    assert_int_equal(schedule.actions[1].column, 3);
    assert_int_equal(schedule.actions[4].row, 2);
    assert_int_equal(schedule.actions[4].column, 4);
    assert_int_equal(schedule.actions[4].kind, QE_ACTION_W);
    qe_schedule_deinit(&schedule);
}

typedef struct bad_file {
    const char *csv;
    qe_status status;
    uint32_t row, cell;
    const char *found, *expected; /* parts of the message */
} bad_file;

static const bad_file BAD_FILES[] = {
    {"0F0,0X0\n", QE_ERROR_FORMAT, 1, 2, "found \"0X0\"", "expected F, I, W or B after the stage"},
    {"0F0\n,1f0\n", QE_ERROR_FORMAT, 2, 2, "found \"1f0\"", "F, I, W or B"},
    {"0FF0\n", QE_ERROR_FORMAT, 1, 1, "found \"0FF0\"", "F, I, W or B"},
    {"F0\n", QE_ERROR_FORMAT, 1, 1, "found \"F0\"", "a stage number first"},
    {"-1F0\n", QE_ERROR_FORMAT, 1, 1, "found \"-1F0\"", "a stage number first, from 0 on"},
    {"0F-1\n", QE_ERROR_FORMAT, 1, 1, "found \"0F-1\"", "a microbatch number, from 0 on"},
    {"0F+1\n", QE_ERROR_FORMAT, 1, 1, "found \"0F+1\"", "a microbatch number"},
    {"0F\n", QE_ERROR_FORMAT, 1, 1, "found \"0F\"", "a microbatch number"},
    {"0F0,0F1x\n", QE_ERROR_FORMAT, 1, 2, "found \"0F1x\"", "nothing after"},
    {"0F0 0F1\n", QE_ERROR_FORMAT, 1, 1, "found \"0F0 0F1\"", "nothing after"},
    {"0F1.5\n", QE_ERROR_FORMAT, 1, 1, "found \"0F1.5\"", "nothing after"},
    {"\"0F0\n", QE_ERROR_FORMAT, 1, 1, "found \"\"0F0\"", "a stage number first"},
    {"4096F0\n", QE_ERROR_FORMAT, 1, 1, "found \"4096F0\"", "below 4096"},
    {"0F65536\n", QE_ERROR_FORMAT, 1, 1, "found \"0F65536\"", "below 65536"},
    {"99999999999999999999999999F0\n", QE_ERROR_FORMAT, 1, 1, "99999999999999999999999999F0", "below 4096"},
    {"0F18446744073709551616\n", QE_ERROR_FORMAT, 1, 1, "0F18446744073709551616", "below 65536"},
    {"0F4294967296\n", QE_ERROR_FORMAT, 1, 1, "0F4294967296", "below 65536"},
    {"0F0,0SEND_F\n", QE_ERROR_FORMAT, 1, 2, "found \"0SEND_F\"", "a microbatch number, from 0 on"},
    {"0F0,0UNSHARDx\n", QE_ERROR_FORMAT, 1, 2, "found \"0UNSHARDx\"", "nothing after"},
    {"0F0,0OVERLAP_F_B0\n", QE_ERROR_FORMAT, 1, 2, "found \"0OVERLAP_F_B0\"", "F, I, W or B after"},
    {"0SEND_F0\n1F0\n", QE_ERROR_FORMAT, 1, 0, "row 1 moves data and computes nothing", ""},
    {"1F0\n0UNSHARD\n", QE_ERROR_FORMAT, 2, 0, "row 2 moves data and computes nothing", ""},
    {"0SEND_X0\n", QE_ERROR_FORMAT, 1, 1, "found \"0SEND_X0\"", "F, I, W or B after"},
    {"0F0,(0F1;3B0)\n", QE_ERROR_FORMAT, 1, 2, "(0F1;3B0)", "OVERLAP_F_B behind"},
    {"0F0,(0F1;3B0)F\n", QE_ERROR_FORMAT, 1, 2, "(0F1;3B0)F", "OVERLAP_F_B behind"},
    {"0F0,(0F1;3B0)OVERLAP_F_B0\n", QE_ERROR_FORMAT, 1, 2, "OVERLAP_F_B0", "OVERLAP_F_B behind"},
    {"0F0,(0F1;3B0 OVERLAP_F_B\n", QE_ERROR_FORMAT, 1, 2, "(0F1;3B0 OVERLAP_F_B", "OVERLAP_F_B behind"},
    {"()OVERLAP_F_B\n", QE_ERROR_FORMAT, 1, 1, "()OVERLAP_F_B", "two actions in the pair"},
    {"(;)OVERLAP_F_B\n", QE_ERROR_FORMAT, 1, 1, "(;)OVERLAP_F_B", "two actions in the pair"},
    {"(0F0;1B0;2W0)OVERLAP_F_B\n", QE_ERROR_FORMAT, 1, 1, "(0F0;1B0;2W0)", "two actions in the pair, not more"},
    {"(0F0;1F0)OVERLAP_F_B\n", QE_ERROR_FORMAT, 1, 1, "(0F0;1F0)", "an F and a B"},
    {"(0F0;1W0)OVERLAP_F_B\n", QE_ERROR_FORMAT, 1, 1, "(0F0;1W0)", "an F and a B"},
    {"(0F0;1SEND_B0)OVERLAP_F_B\n", QE_ERROR_FORMAT, 1, 1, "(0F0;1SEND_B0)", "an F and a B"},
    {"(0SEND_F0)OVERLAP_F_B\n", QE_ERROR_FORMAT, 1, 1, "(0SEND_F0)", "actions that compute"},
    {"(2F0;2B0)OVERLAP_F_B\n", QE_ERROR_FORMAT, 1, 1, "(2F0;2B0)", "the backward needs this very forward"},
    {"(2F0;(2B0)OVERLAP_F_B)OVERLAP_F_B\n", QE_ERROR_FORMAT, 1, 1, "(2F0;(2B0)", "OVERLAP_F_B behind"},
    {"(2F0;B0)OVERLAP_F_B\n", QE_ERROR_FORMAT, 1, 1, "(2F0;B0)", "a stage number first"},
    {"\xEF\xBB\xBF" "0F0\n", QE_ERROR_FORMAT, 1, 1, "found \"\\xEF\\xBB\\xBF0F0\"", "a stage number first"},
    {"", QE_ERROR_FORMAT, 1, 0, "no action", ""},
    {"\n\n\n", QE_ERROR_FORMAT, 1, 0, "no action", ""},
    {",,,\n,,", QE_ERROR_FORMAT, 1, 0, "no action", ""},
    {"0F0\n\n1F0\n", QE_ERROR_FORMAT, 2, 0, "row 2 has no action", "each row is one rank"},
    {"0F0\n,,\n\n1F0\n", QE_ERROR_FORMAT, 2, 0, "row 2 has no action", "each row is one rank"},
};

static void assert_refused(const char *bytes, size_t count, const bad_file *expected) {
    qe_schedule schedule = {.ranks = 77};
    qe_error error = {0};
    assert_int_equal(read_bytes(bytes, count, &schedule, &error), expected->status);
    if (strstr(error.message, expected->found) == NULL) fail_msg("%s: %s", expected->found, error.message);
    if (strstr(error.message, expected->expected) == NULL) fail_msg("%s: %s", expected->expected, error.message);
    assert_string_equal(error.path, "orders.csv");
    assert_int_equal(error.line, expected->row);
    assert_int_equal(error.column, expected->cell);
    assert_int_equal(schedule.ranks, 77);
    assert_int_equal(read_bytes(bytes, count, &schedule, NULL), expected->status);
}

static void a_malformed_cell_is_named_with_row_cell_text_and_what_was_expected(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof BAD_FILES / sizeof BAD_FILES[0]; i++) {
        assert_refused(BAD_FILES[i].csv, strlen(BAD_FILES[i].csv), &BAD_FILES[i]);
    }
}

static void an_embedded_zero_byte_is_garbage_and_not_an_end(void **state) {
    (void)state;
    bad_file expected = {NULL, QE_ERROR_FORMAT, 1, 1, "0F0\\x00", "text without zero bytes"};
    assert_refused("0F0\0,0B0\n", 9, &expected);
}

static void a_long_cell_is_cut_in_the_message_and_long_padding_is_harmless(void **state) {
    (void)state;
    size_t count = 1000000;
    char *bytes = malloc(count);
    assert_non_null(bytes);
    bad_file expected = {NULL, QE_ERROR_FORMAT, 1, 1, "0000...", "an action such as 2F0"};
    memset(bytes, '0', count);
    assert_refused(bytes, count, &expected);
    memset(bytes, ' ', count);
    memcpy(bytes + count / 2, "0F0", 3);
    qe_schedule schedule;
    assert_int_equal(read_bytes(bytes, count, &schedule, NULL), QE_OK);
    assert_int_equal(schedule.rank_begin[1], 1);
    qe_schedule_deinit(&schedule);
    free(bytes);
}

static void a_rank_too_many_is_a_limit(void **state) {
    (void)state;
    static char csv[4097 * 8];
    size_t at = 0;
    for (int rank = 0; rank < 4097; rank++) at += (size_t)snprintf(csv + at, sizeof csv - at, "%dF0\n", rank);
    bad_file expected = {NULL, QE_ERROR_LIMIT, 4097, 0, "row 4097 is one rank too many", "at most 4096"};
    assert_refused(csv, at, &expected);
}

/* A file that has no end to speak of: 100 MB of commas, then one action, without 100 MB of memory. */
typedef struct commas {
    size_t left;
} commas;

static ssize_t give_commas(void *cookie, char *buffer, size_t size) {
    commas *from = cookie;
    size_t count = size < from->left ? size : from->left;
    memset(buffer, ',', count);
    if (count == from->left && count > 4) memcpy(buffer + count - 4, "0F0\n", 4);
    from->left -= count;
    return (ssize_t)count;
}

static void a_hundred_megabytes_of_commas_are_read_as_bubbles(void **state) {
    (void)state;
    commas from = {.left = 100000000};
    FILE *file = fopencookie(&from, "r", (cookie_io_functions_t){.read = give_commas});
    qe_schedule schedule;
    assert_non_null(file);
    assert_int_equal(qe_schedule_read_csv(file, "commas.csv", &schedule, NULL), QE_OK);
    (void)fclose(file);
    assert_int_equal(schedule.rank_begin[1], 1);
    assert_int_equal(schedule.actions[0].column, 100000000 - 4 + 1);
    qe_schedule_deinit(&schedule);
}

static ssize_t give_zeroes(void *cookie, char *buffer, size_t size) {
    (void)cookie;
    memset(buffer, 0, size);
    return (ssize_t)size;
}

static void a_cell_without_an_end_is_refused_without_looking_for_it(void **state) {
    (void)state;
    FILE *file = fopencookie(NULL, "r", (cookie_io_functions_t){.read = give_zeroes});
    qe_schedule schedule;
    qe_error error = {0};
    assert_non_null(file);
    assert_int_equal(qe_schedule_read_csv(file, "/dev/zero", &schedule, &error), QE_ERROR_FORMAT);
    (void)fclose(file);
    assert_non_null(strstr(error.message, "row 1, cell 1: found \"\\x00"));
}

static void a_directory_and_a_full_disk_are_operating_errors(void **state) {
    (void)state;
    qe_schedule schedule = {0};
    qe_error error = {0};
    FILE *file = fopen(".", "r");
    assert_non_null(file);
    assert_int_equal(qe_schedule_read_csv(file, ".", &schedule, &error), QE_ERROR_IO);
    assert_non_null(strstr(error.message, "cannot read"));
    (void)fclose(file);
    schedule = generated("1f1b", 2, 1, 2);
    file = fopen("/dev/full", "w");
    assert_non_null(file);
    assert_int_equal(qe_schedule_write_csv(&schedule, file, &error), QE_ERROR_IO);
    assert_non_null(strstr(error.message, "cannot write"));
    (void)fclose(file);
    qe_schedule_deinit(&schedule);
}

/* Bytes near the grammar, from a fixed seed: the reader either takes a file or refuses it with a place in it. */
static void random_bytes_never_do_harm(void **state) {
    (void)state;
    static const char alphabet[] = "0123456789FIWB,,,,\n\n (;)_OVERLAPSENDx\r\t-";
    uint64_t seed = 20240917;
    uint32_t accepted = 0, refused = 0;
    for (int round = 0; round < 20000; round++) {
        char bytes[48];
        for (size_t i = 0; i < sizeof bytes; i++) {
            seed = seed * 6364136223846793005U + 1442695040888963407U;
            bytes[i] = alphabet[(seed >> 33) % (round % 2 ? sizeof alphabet - 1 : 20)];
        }
        qe_schedule schedule = {0};
        qe_error error = {0};
        qe_status status = read_bytes(bytes, 1 + (seed >> 40) % sizeof bytes, &schedule, &error);
        if (status == QE_OK) {
            accepted++;
            assert_round_trip(&schedule);
        } else {
            refused++;
            assert_true(status == QE_ERROR_FORMAT || status == QE_ERROR_LIMIT || status == QE_CONTRACT);
            assert_true(error.line > 0);
        }
        qe_schedule_deinit(&schedule);
    }
    print_message("%u accepted, %u refused\n", accepted, refused);
    assert_true(accepted > 0 && refused > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_written_is_read_back_the_same),
        cmocka_unit_test(the_written_form_is_one_row_per_rank_without_bubbles),
        cmocka_unit_test(pairs_are_written_and_read_as_one_cell),
        cmocka_unit_test(only_dualpipe_has_stages_on_two_ranks),
        cmocka_unit_test(bubbles_spaces_line_ends_and_uneven_rows_are_tolerated),
        cmocka_unit_test(actions_remember_their_row_and_cell),
        cmocka_unit_test(a_malformed_cell_is_named_with_row_cell_text_and_what_was_expected),
        cmocka_unit_test(an_embedded_zero_byte_is_garbage_and_not_an_end),
        cmocka_unit_test(a_long_cell_is_cut_in_the_message_and_long_padding_is_harmless),
        cmocka_unit_test(a_rank_too_many_is_a_limit),
        cmocka_unit_test(a_hundred_megabytes_of_commas_are_read_as_bubbles),
        cmocka_unit_test(a_cell_without_an_end_is_refused_without_looking_for_it),
        cmocka_unit_test(a_directory_and_a_full_disk_are_operating_errors),
        cmocka_unit_test(random_bytes_never_do_harm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
