/* A failed assertion says where and stops the process; a passing one evaluates its condition once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/assert.h"

static _Noreturn void break_an_assertion(int error_fd) {
    const struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    signal(SIGABRT, SIG_DFL);
    dup2(error_fd, STDERR_FILENO);
    volatile int one = 1;
    QE_ASSERT(one == 2);
    _exit(0);
}

static void a_broken_assertion_prints_expression_and_place_and_aborts(void **state) {
    (void)state;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) break_an_assertion(ends[1]);
    close(ends[1]);
    char text[4096] = "";
    size_t length = 0;
    ssize_t got;
    while (length < sizeof text - 1 && (got = read(ends[0], text + length, sizeof text - 1 - length)) > 0)
        length += (size_t)got;
    close(ends[0]);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGABRT);
    assert_non_null(strstr(text, "one == 2"));
    assert_non_null(strstr(text, "test_assert.c:"));
}

static void a_true_assertion_evaluates_its_condition_once(void **state) {
    (void)state;
    int count = 0;
    QE_ASSERT(++count == 1);
    assert_int_equal(count, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_broken_assertion_prints_expression_and_place_and_aborts),
        cmocka_unit_test(a_true_assertion_evaluates_its_condition_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
