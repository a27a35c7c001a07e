/* test_rule.c - the table of rules is whole; docs/rules.md says the same in the same order, with tests that exist. */
#include "core_program.h"

#include <stdlib.h>

static void ids_are_found_again_and_differ(void **state) {
    (void)state;
    for (int rule = QE_RULE_NONE + 1; rule < QE_RULE_COUNT; rule++) {
        const char *id = qe_rule_id((qe_rule)rule);
        assert_int_equal(qe_rule_from_id(id), rule);
        assert_non_null(strchr(id, '.'));
        const char *sentence = qe_rule_sentence((qe_rule)rule);
        assert_int_equal(sentence[strlen(sentence) - 1], '.');
    }
    assert_int_equal(qe_rule_from_id("scale.bussy"), QE_RULE_NONE);
    assert_int_equal(qe_rule_from_id(""), QE_RULE_NONE);
    assert_int_equal(qe_rule_from_id("none"), QE_RULE_NONE);
}

static int contains_line(const char *path, const char *wanted) {
    char line[1024];
    FILE *file = fopen(path, "r");
    if (file == NULL) return 0;
    int found = 0;
    while (!found && fgets(line, sizeof line, file) != NULL) found = strstr(line, wanted) != NULL;
    fclose(file);
    return found;
}

/* Every `room/test_file: test_name` of the cell must be a test of that file. */
static void assert_tests_exist(const char *cell) {
    char room[64], file[64], name[128], path[256], wanted[192];
    int count = 0;
    for (const char *at = strchr(cell, '`'); at != NULL; at = strchr(at, '`')) {
        if (sscanf(at, "`%63[a-z]/%63[a-z_]: %127[a-z0-9_]`", room, file, name) != 3) fail_msg("no test: %s", at);
        snprintf(path, sizeof path, "tests/unit/%s/%s.c", room, file);
        snprintf(wanted, sizeof wanted, "static void %s(void **state)", name);
        if (!contains_line(path, wanted)) fail_msg("%s has no %s", path, name);
        at = strchr(at + 1, '`') + 1;
        count++;
    }
    assert_true(count > 0);
}

static void the_page_of_rules_lists_every_rule_in_order_with_its_test(void **state) {
    (void)state;
    FILE *page = fopen("docs/rules.md", "r");
    assert_non_null(page);
    char line[1024], expected[512];
    int rule = QE_RULE_NONE + 1;
    while (fgets(line, sizeof line, page) != NULL) {
        if (strncmp(line, "| `", 3) != 0) continue;
        assert_true(rule < QE_RULE_COUNT);
        const char *sentence = qe_rule_sentence((qe_rule)rule);
        snprintf(expected, sizeof expected, "| `%s` | %s | ", qe_rule_id((qe_rule)rule), sentence);
        if (strncmp(line, expected, strlen(expected)) != 0) fail_msg("found %sexpected %s", line, expected);
        const char *cell = strstr(line + strlen(expected), " | ");
        assert_non_null(cell);
        assert_tests_exist(cell + 3);
        rule++;
    }
    fclose(page);
    assert_int_equal(rule, QE_RULE_COUNT);
}

/* A cell names traces with the first rule they break, and tests. */
static uint32_t assert_shown(const char *cell) {
    char name[128], verdict[64], path[256], wanted[256];
    uint32_t count = 0;
    for (const char *at = strchr(cell, '`'); at != NULL; at = strchr(at, '`')) {
        const char *end = strchr(at + 1, '`');
        assert_non_null(end);
        if (sscanf(at, "`%127[a-z0-9_]`: %63[a-z.]", name, verdict) == 2) {
            snprintf(path, sizeof path, "tests/traces/%s.qet", name);
            snprintf(wanted, sizeof wanted, "# expect: %s", verdict);
            if (!contains_line(path, wanted)) fail_msg("%s is not judged %s", path, verdict);
        } else {
            snprintf(wanted, sizeof wanted, "%.*s", (int)(end - at + 1), at);
            assert_tests_exist(wanted);
        }
        at = end + 1;
        count++;
    }
    return count;
}

static void the_page_of_reports_names_traces_and_tests_that_say_so(void **state) {
    (void)state;
    enum { REPORTS = 84 };
    char line[2048];
    uint32_t reports = 0, shown = 0;
    int number = 0, before = 0;
    FILE *page = fopen("docs/reports.md", "r");
    assert_non_null(page);
    while (fgets(line, sizeof line, page) != NULL) {
        if (strncmp(line, "| B", 3) != 0) continue;
        assert_non_null(strchr(line, '\n'));
        assert_int_equal(sscanf(line, "| B%d |", &number), 1);
        assert_true(number > before); /* each once */
        before = number;
        const char *cell = strchr(line, ')');
        assert_non_null(cell);
        uint32_t more = assert_shown(cell);
        if (more == 0) fail_msg("nothing shows %s", line);
        shown += more;
        reports++;
    }
    fclose(page);
    assert_int_equal(reports, REPORTS);
    print_message("    %u reports, %u traces and tests\n", reports, shown);
}

/* Of a row's verdicts: are there good ones, and bad ones? */
static void read_verdicts(const char *cell, int *good_out, int *bad_out) {
    char verdict[64];
    *good_out = *bad_out = 0;
    for (const char *at = strstr(cell, "`: "); at != NULL; at = strstr(at + 1, "`: ")) {
        if (sscanf(at, "`: %63[a-z.]", verdict) != 1) fail_msg("no verdict: %s", at);
        if (strcmp(verdict, "ok") == 0) *good_out = 1;
        else *bad_out = 1;
    }
}

/* Rows "| C01 | ..." in order, one for each letter: g good only, b bad, m both. */
static void assert_cases(char prefix, const char *kinds) {
    char line[2048], begin[16];
    size_t cases = 0;
    FILE *page = fopen("docs/reports.md", "r");
    assert_non_null(page);
    while (fgets(line, sizeof line, page) != NULL) {
        if (line[0] != '|' || line[2] != prefix || line[3] < '0' || line[3] > '9' || strchr(line, ']')) continue;
        snprintf(begin, sizeof begin, "| %c%02zu | ", prefix, cases + 1);
        if (strncmp(line, begin, strlen(begin)) != 0) fail_msg("found %s, expected %s", line, begin);
        const char *cell = strstr(line + strlen(begin), " | ");
        assert_non_null(cell);
        assert_true(assert_shown(cell) > 0);
        int good, bad;
        read_verdicts(cell, &good, &bad);
        assert_true(cases < strlen(kinds));
        if (kinds[cases] == 'g' ? bad || !good : kinds[cases] == 'b' ? !bad : !good || !bad)
            fail_msg("%c was expected of %s", kinds[cases], line);
        cases++;
    }
    fclose(page);
    assert_int_equal(cases, strlen(kinds));
}

/* The 40 cases as its authors judge them; the tenth from the left is case 10. */
static void the_cases_of_the_stream_sanitizer_are_judged_as_it_judges_them(void **state) {
    (void)state;
    assert_cases('C', "ggbgbbgbbb"
                      "gbgbggbgbm"
                      "bggbggbbbb"
                      "gbbggggmbb");
}

static void every_numerical_error_of_the_catalogue_has_its_fault_and_its_cure(void **state) {
    (void)state;
    assert_cases('N', "mmmmmmmmmmmmmmm");
}

static void kinds_have_words(void **state) {
    (void)state;
    for (int kind = 0; kind < QE_EFFECT_KINDS; kind++) {
        const char *word = qe_effect_kind_name((qe_effect_kind)kind);
        assert_non_null(strchr(word, '.'));
        int known = 0;
        for (int object = 0; object < QE_OBJECT_KINDS; object++) {
            const char *prefix = qe_object_kind_name((qe_object_kind)object);
            if (strncmp(word, prefix, strlen(prefix)) == 0 && word[strlen(prefix)] == '.') known++;
        }
        assert_int_equal(known, 1);
    }
    assert_string_equal(qe_effect_kind_name((qe_effect_kind)QE_EFFECT_KINDS), "unknown");
    assert_string_equal(qe_object_kind_name((qe_object_kind)QE_OBJECT_KINDS), "unknown");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ids_are_found_again_and_differ),
        cmocka_unit_test(the_page_of_rules_lists_every_rule_in_order_with_its_test),
        cmocka_unit_test(the_page_of_reports_names_traces_and_tests_that_say_so),
        cmocka_unit_test(the_cases_of_the_stream_sanitizer_are_judged_as_it_judges_them),
        cmocka_unit_test(every_numerical_error_of_the_catalogue_has_its_fault_and_its_cure),
        cmocka_unit_test(kinds_have_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
