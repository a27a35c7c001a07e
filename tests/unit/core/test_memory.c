/* test_memory.c - the n-th allocation fails, for every n until a run is clean: whatever the core does with a trace or a
 * ledger then says so, leaves programs empty or as they were, and gives back what it took. */
#include "core_program.h"

#include <errno.h>
#include <stdlib.h>

#include "core/ledger_state.h"

/* The sanitizers bring their own allocator; there, nothing can be made to fail and the test is skipped. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define CAN_FAIL 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define CAN_FAIL 0
#endif
#endif
#ifndef CAN_FAIL
#define CAN_FAIL 1
#endif

static long fail_in = -1; /* allocations until one fails; below 0: none does */
static long live;         /* blocks taken and not given back */

#if CAN_FAIL
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);
extern void __libc_free(void *block);

static int fails(void) {
    if (fail_in < 0 || fail_in-- > 0) return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t bytes) {
    if (fails()) return NULL;
    live++;
    return __libc_malloc(bytes);
}
void *calloc(size_t count, size_t bytes) {
    if (fails()) return NULL;
    live++;
    return __libc_calloc(count, bytes);
}
void *realloc(void *old, size_t bytes) {
    if (fails()) return NULL;
    live += old == NULL;
    return __libc_realloc(old, bytes);
}
void free(void *block) {
    live -= block != NULL;
    __libc_free(block);
}
#endif

typedef qe_status (*scenario)(void);

/* Runs with the n-th allocation failing until none fails; returns how many runs failed. */
static long fail_each(scenario run) {
    for (long n = 0;; n++) {
        long before = live;
        fail_in = n;
        qe_status status = run();
        int clean = fail_in >= 0;
        fail_in = -1;
        assert_int_equal(live, before);
        if (clean) {
            assert_int_equal(status, QE_OK);
            return n;
        }
        assert_int_equal(status, QE_ERROR_MEMORY);
        assert_true(n < 10000);
    }
}

static qe_program shared;
static FILE *shared_trace;

static qe_status read_a_trace(void) {
    qe_program program;
    rewind(shared_trace);
    qe_program_init(&program);
    qe_status status = qe_trace_read(shared_trace, "x", &program, NULL);
    if (status != QE_OK) assert_null(program.items);
    qe_program_deinit(&program);
    return status;
}

static qe_status judge_a_program(void) {
    qe_violations violations;
    return qe_program_judge(&shared, &violations, NULL);
}

static qe_program launches;

/* A graph of a deposit, a draw, a slot and bytes, launched so often that what launches add no longer fits where the
 * program's own deposits and draws would. */
static void make_launches(void) {
    enum { LAUNCHES = 40 };
    FILE *text = tmpfile();
    assert_non_null(text);
    fprintf(text, "qet 1\nstream s compute\nslot X\ngrad g\nrng R\nbuffer x bytes=64\ngraph G\n"
                  "op begin on s : graph.begin G\nop work on s mb=1 : slot.acquire X@1 grad.deposit g rng.draw R@0 "
                  "buffer.write x[8,16) buffer.read x[9,12)\nop free on s mb=1 : slot.release X@1\n"
                  "op end on s : graph.capture G@1\nop first on s mb=0 : grad.deposit g,set\n");
    for (int i = 1; i <= LAUNCHES; i++) fprintf(text, "op replay on s mb=%d : graph.launch G@1\n", i);
    rewind(text);
    qe_program_init(&launches);
    assert_int_equal(qe_trace_read(text, "launches", &launches, NULL), QE_OK);
    fclose(text);
}

static qe_status judge_launches(void) {
    qe_violations violations;
    return qe_program_judge(&launches, &violations, NULL);
}

static qe_status certify_a_program(void) {
    qe_ledger *ledger = NULL;
    qe_violations violations;
    qe_status status = qe_ledger_create(&shared, &ledger, NULL);
    if (status != QE_OK) {
        assert_null(ledger);
        return status;
    }
    status = qe_ledger_certify(ledger, &violations, NULL);
    assert_int_equal(ledger->certified, status == QE_OK);
    qe_ledger_destroy(ledger);
    return status;
}

/* A read that splits the buffer as the program does not needs room; without it, nothing has changed. */
static qe_status depart_with_new_ranges(void) {
    qe_ledger *ledger = NULL;
    qe_violations violations;
    qe_program history;
    qe_status status = qe_ledger_create(&shared, &ledger, NULL);
    if (status != QE_OK) return status;
    qe_ledger_step_begin(ledger);
    qe_item item = {.kind = QE_ITEM_OP, .stream = CALLER, .microbatch = QE_NONE, .effect_count = 1};
    for (uint64_t i = 0; i < 40 && status == QE_OK; i++) {
        qe_effect effect = BUFFER_EFFECT(WRITE, 2 * i + 1, 2 * i + 2, 0);
        size_t before = qe_ledger_image(ledger, NULL, 0);
        status = qe_ledger_submit(ledger, &item, &effect, QE_NONE, &violations);
        if (status != QE_OK) assert_int_equal(qe_ledger_image(ledger, NULL, 0), before);
        qe_ledger_assert_valid(ledger);
    }
    qe_program_init(&history);
    if (status == QE_OK) status = qe_ledger_history(ledger, &history, NULL);
    if (status != QE_OK) assert_null(history.items);
    qe_program_deinit(&history);
    qe_ledger_destroy(ledger);
    return status;
}

static qe_status write_a_trace(void) {
    static char buffer[1 << 16];
    FILE *out = fopen("/dev/null", "w");
    if (out == NULL) return QE_ERROR_MEMORY;
    setvbuf(out, buffer, _IOFBF, sizeof buffer);
    qe_status status = qe_trace_write(&shared, out, NULL);
    fclose(out);
    return status;
}

static qe_status copy_a_program(void) {
    qe_program copy;
    qe_program_init(&copy);
    qe_status status = qe_program_copy(&shared, &copy, NULL);
    if (status != QE_OK) assert_null(copy.items);
    qe_program_deinit(&copy);
    return status;
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    if (!CAN_FAIL) skip();
    make_right_program(&shared);
    make_launches();
    shared_trace = tmpfile();
    assert_non_null(shared_trace);
    assert_int_equal(qe_trace_write(&shared, shared_trace, NULL), QE_OK);
    static const scenario scenarios[] = {read_a_trace, judge_a_program, certify_a_program, depart_with_new_ranges,
                                         write_a_trace, copy_a_program, judge_launches};
    for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
        long failed = fail_each(scenarios[i]);
        print_message("    scenario %zu: %ld allocations, each failed once\n", i, failed);
        assert_true(failed > 1);
    }
    fclose(shared_trace);
    qe_program_deinit(&shared);
    qe_program_deinit(&launches);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_allocation_may_fail)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
