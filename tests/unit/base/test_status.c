/* Error records: what they keep, what they cut, what they leave alone. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "qeffect/status.h"

static void an_error_keeps_its_status_message_and_remedy(void **state) {
    (void)state;
    qe_error error;
    memset(&error, 0x5A, sizeof error);
    assert_int_equal(qe_error_set(&error, QE_ERROR_CONFIG, "Write 4.", "found %s, expected %d", "4x", 4),
                     QE_ERROR_CONFIG);
    assert_int_equal(error.status, QE_ERROR_CONFIG);
    assert_string_equal(error.message, "found 4x, expected 4");
    assert_string_equal(error.remedy, "Write 4.");
    assert_string_equal(error.path, "");
    assert_int_equal(error.line, 0);
    assert_int_equal(error.column, 0);
}

static void a_missing_record_or_remedy_is_no_fault(void **state) {
    (void)state;
    assert_int_equal(qe_error_set(NULL, QE_ERROR_IO, "x", "y %d", 1), QE_ERROR_IO);
    assert_int_equal(qe_error_place(NULL, "a.yaml", 1, 2), QE_OK);
    qe_error error;
    qe_error_set(&error, QE_ERROR_IO, NULL, "gone");
    assert_string_equal(error.remedy, "");
}

static void a_place_is_added_without_touching_the_text(void **state) {
    (void)state;
    qe_error error;
    qe_error_set(&error, QE_ERROR_FORMAT, "Fix it.", "bad cell");
    assert_int_equal(qe_error_place(&error, "a.csv", 3, 7), QE_ERROR_FORMAT);
    assert_string_equal(error.path, "a.csv");
    assert_int_equal(error.line, 3);
    assert_int_equal(error.column, 7);
    assert_string_equal(error.message, "bad cell");
    assert_string_equal(error.remedy, "Fix it.");
    qe_error_place(&error, error.path, 4, 1);
    assert_string_equal(error.path, "a.csv");
    assert_int_equal(error.line, 4);
    qe_error_place(&error, NULL, 0, 0);
    assert_string_equal(error.path, "");
}

static void an_error_may_be_rewritten_in_terms_of_itself(void **state) {
    (void)state;
    qe_error error;
    qe_error_set(&error, QE_ERROR_IO, "Free some space.", "disk full");
    qe_error_set(&error, QE_ERROR_IO, error.remedy, "saving: %s", error.message);
    assert_string_equal(error.message, "saving: disk full");
    assert_string_equal(error.remedy, "Free some space.");
}

/* True when the text ends between characters: every first byte has the followers that it announces. */
static int ends_whole(const char *text) {
    size_t length = strlen(text), back = 0;
    while (back < length && ((unsigned char)text[length - 1 - back] & 0xC0U) == 0x80U) back++;
    unsigned char first = back < length ? (unsigned char)text[length - 1 - back] : 0;
    size_t followers = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : first >= 0xC0 ? 1 : 0;
    return followers == back;
}

static void long_text_is_cut_between_characters(void **state) {
    (void)state;
    const char *const characters[] = {"a", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80"};
    for (size_t c = 0; c < 4; c++) {
        for (size_t shift = 0; shift < 4; shift++) {
            char text[4 * QE_ERROR_TEXT_BYTES] = {0};
            size_t length = shift, step = strlen(characters[c]);
            memset(text, 'x', shift);
            for (; length < 2 * QE_ERROR_TEXT_BYTES; length += step) memcpy(text + length, characters[c], step);
            qe_error error;
            qe_error_set(&error, QE_ERROR_ARGUMENT, text, "%s", text);
            qe_error_place(&error, text, 1, 1);
            const char *const kept[] = {error.message, error.remedy, error.path};
            const size_t rooms[] = {sizeof error.message, sizeof error.remedy, sizeof error.path};
            for (size_t k = 0; k < 3; k++) {
                assert_true(strlen(kept[k]) < rooms[k]);
                assert_true(strlen(kept[k]) + 5 >= rooms[k]); /* no more was cut than one character */
                assert_memory_equal(kept[k], text, strlen(kept[k]));
                assert_true(ends_whole(kept[k]));
            }
        }
    }
}

static void text_that_just_fits_is_kept_whole(void **state) {
    (void)state;
    char text[QE_ERROR_TEXT_BYTES];
    memset(text, 'x', sizeof text);
    memcpy(text + sizeof text - 3, "\xC3\xA9", 3);
    qe_error error;
    qe_error_set(&error, QE_ERROR_ARGUMENT, text, "%s", text);
    assert_string_equal(error.message, text);
    assert_string_equal(error.remedy, text);
}

static void every_status_has_a_word_of_its_own(void **state) {
    (void)state;
    const qe_status statuses[] = {QE_OK, QE_ERROR_ARGUMENT, QE_ERROR_LIMIT, QE_ERROR_MEMORY, QE_ERROR_IO,
                                  QE_ERROR_FORMAT, QE_ERROR_CONFIG, QE_ERROR_UNSUPPORTED, QE_CONTRACT,
                                  QE_ERROR_INTERRUPTED, QE_ERROR_DEVICE};
    size_t count = sizeof statuses / sizeof statuses[0];
    for (size_t i = 0; i < count; i++) {
        assert_string_not_equal(qe_status_name(statuses[i]), "unknown");
        for (size_t j = 0; j < i; j++)
            assert_string_not_equal(qe_status_name(statuses[i]), qe_status_name(statuses[j]));
    }
    assert_string_equal(qe_status_name(QE_ERROR_MEMORY), "memory");
    assert_string_equal(qe_status_name((qe_status)999), "unknown");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_error_keeps_its_status_message_and_remedy),
        cmocka_unit_test(a_missing_record_or_remedy_is_no_fault),
        cmocka_unit_test(a_place_is_added_without_touching_the_text),
        cmocka_unit_test(an_error_may_be_rewritten_in_terms_of_itself),
        cmocka_unit_test(long_text_is_cut_between_characters),
        cmocka_unit_test(text_that_just_fits_is_kept_whole),
        cmocka_unit_test(every_status_has_a_word_of_its_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
