/* cmocka.h - the assertions of tests/step_world.h for programs that link no test library: one that fails ends the
 * program. Found before the library's only by programs that ask for it. */
#ifndef QE_TESTS_PLAIN_CMOCKA_H
#define QE_TESTS_PLAIN_CMOCKA_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define print_error(...) fprintf(stderr, __VA_ARGS__)

static inline void plain_assert(int holds, const char *what, const char *file, int line) {
    if (holds) return;
    fprintf(stderr, "%s:%d: %s does not hold\n", file, line, what);
    exit(EXIT_FAILURE);
}

#define assert_true(condition) plain_assert((condition) != 0, #condition, __FILE__, __LINE__)
#define assert_false(condition) plain_assert((condition) == 0, "not " #condition, __FILE__, __LINE__)
#define assert_non_null(pointer) plain_assert((pointer) != NULL, #pointer " != NULL", __FILE__, __LINE__)
#define assert_null(pointer) plain_assert((pointer) == NULL, #pointer " == NULL", __FILE__, __LINE__)
#define assert_memory_equal(a, b, bytes) \
    plain_assert(memcmp(a, b, bytes) == 0, #a " and " #b " have the same bytes", __FILE__, __LINE__)
#define assert_int_equal(a, b) \
    plain_assert((unsigned long long)(a) == (unsigned long long)(b), #a " == " #b, __FILE__, __LINE__)

#endif
