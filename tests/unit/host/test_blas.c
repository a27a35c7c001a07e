/* How OpenBLAS is loaded: which core, what is left of the environment, and that two threads at once get the same bits.
 * The core is chosen once per process, so each choice is made in a child. */
#include <sys/wait.h>
#include <unistd.h>

#include "devices.h"

/* Runs `body` in a child; returns its exit status, -1 if it did not exit. */
static int in_child(int (*body)(void)) {
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(body());
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int identity_holds(const char *core) {
    qe_device *device = NULL;
    if (qe_host_backend()->open(&device, NULL) != QE_OK) return 0;
    const int holds = strstr(qe_host_backend()->identity(device), core) != NULL;
    qe_host_backend()->close(device);
    return holds;
}

static int asks_for_nehalem(void) {
    setenv("OPENBLAS_CORETYPE", "Nehalem", 1);
    if (!identity_holds("Nehalem")) return 1;
    return strcmp(getenv("OPENBLAS_CORETYPE"), "Nehalem") == 0 ? 0 : 2;
}

static int asks_for_nothing(void) {
    unsetenv("OPENBLAS_CORETYPE");
    unsetenv("OPENBLAS_NUM_THREADS");
    const char *best = "openblas";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = "Haswell";
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
        best = "SkylakeX";
    if (!identity_holds(best)) return 1;
    return getenv("OPENBLAS_CORETYPE") || getenv("OPENBLAS_NUM_THREADS") ? 2 : 0;
}

static void the_core_that_the_user_names_is_used(void **state) {
    (void)state;
#if !defined(__x86_64__)
    skip();
#endif
    assert_int_equal(in_child(asks_for_nehalem), 0);
}

static void else_the_best_core_is_used_and_the_environment_is_left_alone(void **state) {
    (void)state;
#if !defined(__x86_64__)
    skip();
#endif
    assert_int_equal(in_child(asks_for_nothing), 0);
}

enum { SIDE = 96, ROUNDS = 60, STREAMS = 3 };

static void streams_that_multiply_at_the_same_time_get_the_same_bits(void **state) {
    (void)state;
    const qe_backend *host = qe_host_backend();
    qe_device *device = NULL;
    assert_int_equal(host->open(&device, NULL), QE_OK);
    float *x = random_floats(SIDE * SIDE, 1.0f, 1), *w = random_floats(SIDE * SIDE, 1.0f, 2);
    float *expected = floats_of(SIDE * SIDE), *results[STREAMS];
    qe_op op = {.kind = QE_OP_LINEAR,
                .args.linear = {.x = plain(x, SIDE, SIDE), .w = plain(w, SIDE, SIDE), .y = expected, .rows = SIDE,
                                .in = SIDE, .out = SIDE}};
    assert_int_equal(host->run(device, &op, NULL), QE_OK);
    qe_stream *streams[STREAMS];
    qe_op *ops = calloc(STREAMS * ROUNDS, sizeof *ops);
    for (int s = 0; s < STREAMS; ++s) {
        results[s] = floats_of((size_t)ROUNDS * SIDE * SIDE);
        assert_int_equal(host->stream->create(device, "multiply", &streams[s], NULL), QE_OK);
    }
    for (int i = 0; i < STREAMS * ROUNDS; ++i) {
        ops[i] = op;
        ops[i].args.linear.y = results[i % STREAMS] + (size_t)(i / STREAMS) * SIDE * SIDE;
        assert_int_equal(host->stream->submit(streams[i % STREAMS], &ops[i]), QE_OK);
    }
    for (int s = 0; s < STREAMS; ++s) {
        assert_int_equal(host->stream->sync(streams[s], NULL), QE_OK);
        for (size_t round = 0; round < ROUNDS; ++round)
            assert_same_bits(results[s] + round * SIDE * SIDE, expected, SIDE * SIDE * sizeof(float));
        host->stream->destroy(streams[s]);
        free(results[s]);
    }
    free(x), free(w), free(expected), free(ops);
    host->close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_core_that_the_user_names_is_used), /* children first: nothing is loaded yet */
        cmocka_unit_test(else_the_best_core_is_used_and_the_environment_is_left_alone),
        cmocka_unit_test(streams_that_multiply_at_the_same_time_get_the_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
