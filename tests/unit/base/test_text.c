/* Strict numbers, near words, growing text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"

static const char *const no_numbers[] = {"", " ", "-", "+", "+4", " 4", "4 ", "4x", "x4", "0x10", "010", "00", "-010",
                                         "--4", "4\n", "nan", "inf", "NaN", "1_000", "1,000", "\xD9\xA3"};
static const char *const no_integers[] = {"4.0", "4.", ".4", "4e0", "1e3", "-0"};

static void whole_numbers_are_read_to_both_ends_of_their_range(void **state) {
    (void)state;
    uint64_t u = 1;
    assert_true(qe_text_to_u64("0", &u) && u == 0);
    assert_true(qe_text_to_u64("18446744073709551615", &u) && u == UINT64_MAX);
    int64_t i = 1;
    assert_true(qe_text_to_i64("0", &i) && i == 0);
    assert_true(qe_text_to_i64("-1", &i) && i == -1);
    assert_true(qe_text_to_i64("9223372036854775807", &i) && i == INT64_MAX);
    assert_true(qe_text_to_i64("-9223372036854775808", &i) && i == INT64_MIN);
}

static void anything_but_a_whole_number_is_refused_and_nothing_is_written(void **state) {
    (void)state;
    uint64_t u = 77;
    int64_t i = 77;
    for (size_t k = 0; k < sizeof no_numbers / sizeof no_numbers[0]; k++)
        assert_false(qe_text_to_u64(no_numbers[k], &u) || qe_text_to_i64(no_numbers[k], &i));
    for (size_t k = 0; k < sizeof no_integers / sizeof no_integers[0]; k++)
        assert_false(qe_text_to_u64(no_integers[k], &u) || qe_text_to_i64(no_integers[k], &i));
    assert_false(qe_text_to_u64("-1", &u));
    assert_true(u == 77 && i == 77);
}

static void a_whole_number_out_of_range_is_refused(void **state) {
    (void)state;
    uint64_t u = 77;
    int64_t i = 77;
    assert_false(qe_text_to_u64("18446744073709551616", &u));
    assert_false(qe_text_to_u64("99999999999999999999", &u));
    assert_false(qe_text_to_i64("9223372036854775808", &i));
    assert_false(qe_text_to_i64("-9223372036854775809", &i));
    assert_false(qe_text_to_i64("-18446744073709551616", &i));
    assert_true(u == 77 && i == 77);
}

static void doubles_are_read_as_json_writes_them(void **state) {
    (void)state;
    double d = 0.0;
    assert_true(qe_text_to_double("0", &d) && d == 0.0);
    assert_true(qe_text_to_double("-0", &d) && d == 0.0 && signbit(d));
    assert_true(qe_text_to_double("4", &d) && d == 4.0);
    assert_true(qe_text_to_double("4.0", &d) && d == 4.0);
    assert_true(qe_text_to_double("-0.1", &d) && d == -0.1);
    assert_true(qe_text_to_double("3e-4", &d) && d == 3e-4);
    assert_true(qe_text_to_double("1.5E+3", &d) && d == 1500.0);
    assert_true(qe_text_to_double("1.7976931348623157e308", &d) && d == DBL_MAX);
    assert_true(qe_text_to_double("1e-400", &d) && d == 0.0);
}

static void anything_but_a_finite_json_number_is_refused(void **state) {
    (void)state;
    double d = 77.0;
    for (size_t k = 0; k < sizeof no_numbers / sizeof no_numbers[0]; k++)
        assert_false(qe_text_to_double(no_numbers[k], &d));
    const char *const others[] = {"4.",   ".4",  "4..0", "1e",  "1e+",  "e3",       "1e3.0", "1.0f",
                                  "0x1p3", "-.5", "01.5", "1,5", "1e400", "infinity", "-inf",  "1 e3"};
    for (size_t k = 0; k < sizeof others / sizeof others[0]; k++) assert_false(qe_text_to_double(others[k], &d));
    assert_true(d == 77.0);
}

static const char *const keys[] = {"steps", "seed", "mode", "microbatches", "history_length", "learning_rate"};
enum { KEY_COUNT = sizeof keys / sizeof keys[0] };

static void a_slip_finds_the_word_that_was_meant(void **state) {
    (void)state;
    assert_string_equal(qe_text_nearest("step", keys, KEY_COUNT), "steps");
    assert_string_equal(qe_text_nearest("stpes", keys, KEY_COUNT), "steps"); /* swapped neighbours: one slip */
    assert_string_equal(qe_text_nearest("SEED", keys, KEY_COUNT), "seed");
    assert_string_equal(qe_text_nearest("micro_batches", keys, KEY_COUNT), "microbatches");
    assert_string_equal(qe_text_nearest("history_len", keys, KEY_COUNT), "history_length");
    assert_string_equal(qe_text_nearest("learning-rate", keys, KEY_COUNT), "learning_rate");
}

static void a_swap_counts_as_one_slip_and_beats_two(void **state) {
    (void)state;
    const char *const words[] = {"baxc", "abcd"}; /* from "bacd": two replacements, one swap */
    assert_string_equal(qe_text_nearest("bacd", words, 2), "abcd");
    const char *const short_words[] = {"ab"};
    assert_string_equal(qe_text_nearest("ba", short_words, 1), "ab");
}

static void a_word_of_another_kind_finds_nothing(void **state) {
    (void)state;
    assert_null(qe_text_nearest("temperature", keys, KEY_COUNT));
    assert_null(qe_text_nearest("", keys, KEY_COUNT));
    assert_null(qe_text_nearest("steps", keys, 0));
    char endless[1000];
    memset(endless, 's', sizeof endless - 1);
    endless[sizeof endless - 1] = '\0';
    assert_null(qe_text_nearest(endless, keys, KEY_COUNT));
    const char *const endless_list[] = {endless, "seed"};
    assert_string_equal(qe_text_nearest("sed", endless_list, 2), "seed");
}

static void of_equally_near_words_the_first_is_taken(void **state) {
    (void)state;
    const char *const words[] = {"mode", "node", "code"};
    assert_string_equal(qe_text_nearest("rode", words, 3), "mode");
}

static void built_text_is_what_was_appended_however_long(void **state) {
    (void)state;
    enum { LINES = 5000 };
    qe_text_builder builder = {0};
    for (int i = 0; i < LINES; i++) qe_text_builder_append(&builder, "%d;", i);
    size_t length = builder.length;
    char *text = qe_text_builder_take(&builder);
    assert_non_null(text);
    assert_int_equal(strlen(text), length);
    const char *at = text;
    for (int i = 0; i < LINES; i++) {
        char *end;
        assert_int_equal(strtol(at, &end, 10), i);
        assert_int_equal(*end, ';');
        at = end + 1;
    }
    assert_int_equal(*at, '\0');
    free(text);
    assert_null(builder.text);
}

static void one_piece_longer_than_the_room_is_printed_whole(void **state) {
    (void)state;
    for (int width = 250; width < 262; width++) {
        qe_text_builder builder = {0};
        qe_text_builder_append(&builder, "%*d", width, 7);
        qe_text_builder_append(&builder, "%s", "!");
        char *text = qe_text_builder_take(&builder);
        assert_int_equal(strlen(text), (size_t)width + 1);
        assert_string_equal(text + width - 1, "7!");
        free(text);
    }
}

static void an_untouched_builder_gives_an_empty_text(void **state) {
    (void)state;
    qe_text_builder builder = {0};
    char *text = qe_text_builder_take(&builder);
    assert_string_equal(text, "");
    free(text);
    qe_text_builder_deinit(&builder);
}

static void a_failure_sticks_until_the_text_is_taken(void **state) {
    (void)state;
    qe_text_builder builder = {0};
    qe_text_builder_append(&builder, "start");
    qe_text_builder_append_bytes(&builder, "x", SIZE_MAX);
    assert_true(builder.failed);
    qe_text_builder_append(&builder, "more");
    qe_text_builder_append_json(&builder, "more");
    assert_int_equal(builder.length, 5);
    assert_null(qe_text_builder_take(&builder));
    qe_text_builder_append(&builder, "again");
    char *text = qe_text_builder_take(&builder);
    assert_string_equal(text, "again");
    free(text);
}

static void json_strings_are_escaped_and_bad_bytes_replaced(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"plain", "\"plain\""},
        {"", "\"\""},
        {"a\"b\\c", "\"a\\\"b\\\\c\""},
        {"tab\tline\n\x01", "\"tab\\u0009line\\u000a\\u0001\""},
        {"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80", "\"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\""},
        {"a\xFF" "b", "\"a\\ufffdb\""},
        {"\xC0\xAF", "\"\\ufffd\\ufffd\""},                 /* an overlong slash */
        {"\xED\xA0\x80", "\"\\ufffd\\ufffd\\ufffd\""},      /* a surrogate */
        {"\xE0\x80\x80", "\"\\ufffd\\ufffd\\ufffd\""},      /* an overlong zero */
        {"\xF4\x90\x80\x80", "\"\\ufffd\\ufffd\\ufffd\\ufffd\""}, /* beyond U+10FFFF */
        {"\xF0\x9F\x98", "\"\\ufffd\\ufffd\\ufffd\""},      /* cut short */
        {"\x7F\xC2\x80\xC2\x9F\xC2\xA0", "\"\\u007f\\u0080\\u009f\xC2\xA0\""},
        {"\xEF\xBB\xBF\xEF\xBF\xBD\xEF\xBF\xBE", "\"\\ufeff\xEF\xBF\xBD\\ufffe\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qe_text_builder builder = {0};
        qe_text_builder_append_json(&builder, cases[i][0]);
        char *text = qe_text_builder_take(&builder);
        assert_string_equal(text, cases[i][1]);
        free(text);
    }
}

/* Where a locale with a decimal comma is installed the test runs under it; elsewhere under the default one. */
static void a_decimal_point_is_a_point_in_every_locale(void **state) {
    (void)state;
    const char *const commas[] = {"de_DE.UTF-8", "fr_FR.UTF-8", "de_DE", "nl_NL.UTF-8"};
    for (size_t i = 0; i < 4 && setlocale(LC_NUMERIC, commas[i]) == NULL; i++) {}
    char before[16], after[16];
    snprintf(before, sizeof before, "%.1f", 0.5);
    qe_text_builder builder = {0};
    qe_text_builder_append(&builder, "%.1f", 1.5);
    char *text = qe_text_builder_take(&builder);
    assert_string_equal(text, "1.5");
    double d = 0.0;
    assert_true(qe_text_to_double(text, &d) && d == 1.5);
    snprintf(after, sizeof after, "%.1f", 0.5);
    assert_string_equal(before, after); /* the host program's own locale is back */
    free(text);
    setlocale(LC_NUMERIC, "C");
}

static void a_sink_says_that_its_builder_failed(void **state) {
    (void)state;
    qe_text_builder builder = {0};
    assert_int_equal(qe_text_builder_sink("ab", 2, &builder), 0);
    builder.failed = true;
    assert_int_equal(qe_text_builder_sink("c", 1, &builder), -1);
    assert_null(qe_text_builder_take(&builder));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_numbers_are_read_to_both_ends_of_their_range),
        cmocka_unit_test(anything_but_a_whole_number_is_refused_and_nothing_is_written),
        cmocka_unit_test(a_whole_number_out_of_range_is_refused),
        cmocka_unit_test(doubles_are_read_as_json_writes_them),
        cmocka_unit_test(anything_but_a_finite_json_number_is_refused),
        cmocka_unit_test(a_slip_finds_the_word_that_was_meant),
        cmocka_unit_test(a_swap_counts_as_one_slip_and_beats_two),
        cmocka_unit_test(a_word_of_another_kind_finds_nothing),
        cmocka_unit_test(of_equally_near_words_the_first_is_taken),
        cmocka_unit_test(built_text_is_what_was_appended_however_long),
        cmocka_unit_test(one_piece_longer_than_the_room_is_printed_whole),
        cmocka_unit_test(an_untouched_builder_gives_an_empty_text),
        cmocka_unit_test(a_failure_sticks_until_the_text_is_taken),
        cmocka_unit_test(json_strings_are_escaped_and_bad_bytes_replaced),
        cmocka_unit_test(a_decimal_point_is_a_point_in_every_locale),
        cmocka_unit_test(a_sink_says_that_its_builder_failed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
