/* The allocator says no, at every single call while model, schedule, plans and team are made. */
#include "step_world.h"

#include <errno.h>
#include <stdatomic.h>

#define STOOD_IN !SANITIZED /* a sanitizer's allocator cannot be stood in for */

static _Atomic long calls_left; /* until the one that fails; 0: none will */
static _Atomic int happened;

#if STOOD_IN
static int refuses(void) {
    if (atomic_load(&calls_left) == 0 || atomic_fetch_sub(&calls_left, 1) != 1) return 0;
    atomic_store(&happened, 1);
    errno = ENOMEM;
    return 1;
}

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *at, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);

#define EXPORTED __attribute__((visibility("default")))
EXPORTED void *malloc(size_t bytes) { return refuses() ? NULL : __libc_malloc(bytes); }
EXPORTED void *calloc(size_t count, size_t bytes) { return refuses() ? NULL : __libc_calloc(count, bytes); }
EXPORTED void *realloc(void *at, size_t bytes) { return refuses() ? NULL : __libc_realloc(at, bytes); }
EXPORTED void *aligned_alloc(size_t alignment, size_t bytes) {
    return refuses() ? NULL : __libc_memalign(alignment, bytes);
}
#endif

typedef struct parts {
    qe_model *model;
    qe_schedule schedule;
    qe_plan *plan;
    qe_world *ranks;
    qe_team *team;
} parts;

static qe_status make(parts *all, qe_error *error) {
    static const world_options options = {.ranks = 2};
    static const qe_recipe recipe = {.kind = QE_RECIPE_DELAYED, .history_length = 4};
    static const qe_schedule_request request = {.name = "zbh1", .ranks = 2, .chunks = 1, .microbatches = 3};
    static const qe_plan_options plan_options = {.cache_weights = 1, .reuse_slots = 1};
    qe_model_config config = world_config(&options);
    qe_violations violations;
    qe_counterexample counterexample;
    memset(all, 0, sizeof *all);
    qe_status status = qe_model_create(&config, &recipe, &all->model, error);
    if (status == QE_OK) status = qe_schedule_generate(&request, &all->schedule, error);
    if (status == QE_OK)
        status = qe_plan_create(&all->schedule, qe_model_table(), all->model, &plan_options, &all->plan,
                                &violations, &counterexample, error);
    if (status == QE_OK) status = qe_local_world_create(2, &all->ranks, error);
    if (status != QE_OK) return status;
    qe_team_options team = {.backend = qe_host_backend(), .comm = qe_local_comm(), .world = all->ranks,
                            .opened = world_opened};
    return qe_team_create(all->plan, NULL, &team, &all->team, error);
}

static void unmake(parts *all) {
    qe_team_destroy(all->team);
    qe_local_world_destroy(all->ranks);
    qe_plan_destroy(all->plan);
    qe_schedule_deinit(&all->schedule);
    qe_model_destroy(all->model);
}

static void memory_that_is_refused_anywhere_is_an_error_and_no_crash(void **state) {
    (void)state;
    if (!STOOD_IN) skip();
    enum { CALLS_MAX = 100000 };
    parts all;
    qe_error error;
    must(make(&all, &error), &error, "everything"); /* what the process takes once is taken */
    unmake(&all);
    for (long nth = 1;; nth++) {
        assert_true(nth < CALLS_MAX);
        memset(&error, 0, sizeof error);
        atomic_store(&happened, 0);
        atomic_store(&calls_left, nth);
        qe_status status = make(&all, &error);
        atomic_store(&calls_left, 0);
        int refused = atomic_load(&happened);
        unmake(&all);
        if (!refused) {
            must(status, &error, "everything");
            print_message("%ld calls\n", nth);
            break;
        }
        if (status == QE_OK) continue; /* somebody could do without */
        assert_true(status == QE_ERROR_MEMORY || status == QE_ERROR_IO); /* IO: a thread without memory */
        assert_int_equal(error.status, status);
        assert_true(error.message[0] != '\0');
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_that_is_refused_anywhere_is_an_error_and_no_crash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
