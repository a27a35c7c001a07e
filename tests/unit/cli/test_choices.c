/* The algorithms that a checkpoint names are written down again where their file is gone, and only there. The commands
 * are a program and no library, so this test compiles the one file it is about. */
#include "cli/manifest_choices.c"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { TEXT_MAX = 256 };

static void fill(qe_manifest *manifest, const char *const *lines, size_t count) {
    char name[32];
    qe_error error = {0};
    for (size_t i = 0; i < count; i++) {
        snprintf(name, sizeof name, "choice_%zu", i + 1);
        assert_int_equal(qe_facts_add(&manifest->algorithms, name, lines[i], &error), QE_OK);
    }
}

static void text_of(const char *path, char text[TEXT_MAX]) {
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t length = fread(text, 1, TEXT_MAX - 1, file);
    text[length] = 0;
    fclose(file);
}

static void the_file_is_made_of_the_manifest_line_by_line(void **state) {
    (void)state;
    static const char *const lines[] = {"qeffect choices 1", "cuBLASLt 13.1.0\tNVIDIA H200\tlinear m16\t0\t00 01"};
    char path[64], text[TEXT_MAX];
    qe_manifest manifest = {0}, again = {0};
    qe_error error = {0};
    snprintf(path, sizeof path, "test_choices.%d", (int)getpid());
    fill(&manifest, lines, 2);
    assert_int_equal(qe_manifest_choices_restore(&manifest, path, &error), QE_OK);
    text_of(path, text);
    assert_string_equal(text, "qeffect choices 1\ncuBLASLt 13.1.0\tNVIDIA H200\tlinear m16\t0\t00 01\n");
    FILE *file = fopen(path, "r");
    assert_int_equal(qe_manifest_choices_add(&again, file, &error), QE_OK); /* and read back as it was */
    fclose(file);
    assert_int_equal(again.algorithms.count, 2);
    for (size_t i = 0; i < 2; i++) assert_string_equal(again.algorithms.list[i].value, lines[i]);
    fill(&again, lines, 1);
    assert_int_equal(qe_manifest_choices_restore(&again, path, &error), QE_OK);
    text_of(path, text);
    assert_int_equal(strlen(text), strlen(lines[0]) + strlen(lines[1]) + 2); /* a file that is there stays */
    unlink(path);
    qe_manifest_deinit(&manifest);
    qe_manifest_deinit(&again);
}

static void nothing_is_written_where_nothing_was_chosen_or_nothing_can_be(void **state) {
    (void)state;
    static const char *const lines[] = {"qeffect choices 1"};
    qe_manifest none = {0}, some = {0};
    qe_error error = {0};
    assert_int_equal(qe_facts_add(&none.algorithms, "choice", "the libraries' first", &error), QE_OK);
    assert_int_equal(qe_manifest_choices_restore(&none, "test_choices.none", &error), QE_OK);
    assert_int_not_equal(access("test_choices.none", F_OK), 0);
    fill(&some, lines, 1);
    assert_int_equal(qe_manifest_choices_restore(&some, "", &error), QE_OK);
    assert_int_equal(qe_manifest_choices_restore(&some, "no/such/folder/file", &error), QE_ERROR_IO);
    assert_non_null(strstr(error.remedy, "train.algorithms"));
    qe_manifest_deinit(&none);
    qe_manifest_deinit(&some);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_file_is_made_of_the_manifest_line_by_line),
        cmocka_unit_test(nothing_is_written_where_nothing_was_chosen_or_nothing_can_be),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
