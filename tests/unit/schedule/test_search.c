/* The search: published profiles with the rates of the papers' scheduler as bounds, random problems against every named
 * order, small ones against all orders there are, limits of memory, what is refused. */
#include <math.h>
#include <time.h>
#include "base/prng.h"
#include "qeffect/search.h"
#include "sanitized.h"
#include "unit/schedule/support.h"

#define SAME 1e-9 /* of times: sums in another order round differently */

static qe_search_result searched(const qe_search_request *request) {
    qe_search_result result = {0};
    qe_error error = {0};
    if (qe_schedule_search(request, &result, &error) != QE_OK) fail_msg("%s", error.message);
    return result;
}

static double rate(double value, double work) { return (value - work) / value; }

/* ---- the zero-bubble papers' profiles (arXiv 2401.10241, table 5; ms) ---- */

typedef struct profile {
    const char *name;
    uint32_t ranks, microbatches;
    double forward, input, weight, hop, share; /* share: M_W / M_B, 32h / (34h + 5as) at a sequence of 1024 */
    double once, twice;      /* bubble rate of ZB-1p and ZB-2p, the scheduler's at P and 2P microbatches of memory */
    double twice_makespan;   /* ZB-2p's where the optimizer waits for all */
    double v, v_makespan;    /* of their scheduler for a V, at P microbatches; 0: not known */
} profile;

static const profile PROFILES[] = {
    {"1.5B", 8, 24, 18.522, 18.086, 9.337, .601, .3665, .1585, .0433, .1083, 0, 0},
    {"1.5B", 8, 32, 18.513, 18.086, 9.331, .626, .3665, .1242, .0039, .0835, 0, 0},
    {"6.2B", 8, 24, 29.718, 29.444, 19.927, .527, .4324, .1323, .0029, .1003, .0403, .0606},
    {"14.6B", 16, 48, 11.347, 11.248, 8.132, .377, .4324, .1397, .0066, .1065, .0498, .0714},
    {"28.3B", 32, 96, 10.419, 10.207, 7.715, .408, .4324, .1421, .0038, .1098, .0531, .0763},
};
enum { PROFILE_COUNT = sizeof PROFILES / sizeof PROFILES[0] };
#define FOUR_DIGITS 5e-5 /* published rates are rounded */

static double rate_of(const profile *on, uint32_t chunks, double limit, qe_search_metric metric) {
    qe_stage_cost cost = qe_stage_cost_of(on->forward, on->input, on->weight, on->share, chunks);
    qe_search_request request = {.ranks = on->ranks, .chunks = chunks, .microbatches = on->microbatches,
                                 .placement = (uint8_t)(chunks == 1 ? QE_SEARCH_LINEAR : QE_SEARCH_V),
                                 .metric = (uint8_t)metric, .memory_limit = limit,
                                 .times = {.costs = &cost, .cost_count = 1, .latency = on->hop}};
    qe_search_result found = searched(&request);
    double value = rate(found.value, found.work);
    assert_true(found.peak_kept <= limit * (1 + SAME));
    qe_search_result_deinit(&found);
    return value;
}

static void published_profiles_are_no_worse_than_zero_bubbles_own_scheduler(void **state) {
    (void)state;
    for (size_t i = 0; i < PROFILE_COUNT; i++) {
        const profile *on = &PROFILES[i];
        double once = rate_of(on, 1, on->ranks, QE_SEARCH_STAGE);
        double twice = rate_of(on, 1, 2.0 * on->ranks, QE_SEARCH_STAGE);
        double makespan = rate_of(on, 1, 2.0 * on->ranks, QE_SEARCH_MAKESPAN);
        print_message("%-6s P%-2u M%u: stage bubble rate %.4f at P (ZB-1p %.4f), %.4f at 2P (ZB-2p %.4f); "
                      "makespan bubble rate %.4f at 2P (%.4f)\n", on->name, on->ranks, on->microbatches, once,
                      on->once, twice, on->twice, makespan, on->twice_makespan);
        assert_true(once <= on->once + FOUR_DIGITS);
        assert_true(twice <= on->twice + FOUR_DIGITS);
        assert_true(makespan <= on->twice_makespan + FOUR_DIGITS);
    }
}

static void published_profiles_on_a_v_are_no_worse_than_their_scheduler_for_it(void **state) {
    (void)state;
    for (size_t i = 0; i < PROFILE_COUNT; i++) {
        const profile *on = &PROFILES[i];
        if (on->v == 0) continue;
        double stage = rate_of(on, 2, on->ranks, QE_SEARCH_STAGE);
        double makespan = rate_of(on, 2, on->ranks, QE_SEARCH_MAKESPAN);
        print_message("%-6s P%-2u M%u on a V at P: stage bubble rate %.4f (theirs %.4f), makespan bubble rate %.4f "
                      "(%.4f)\n", on->name, on->ranks, on->microbatches, stage, on->v, makespan, on->v_makespan);
        assert_true(stage <= on->v + FOUR_DIGITS);
        assert_true(makespan <= on->v_makespan + FOUR_DIGITS);
    }
}

/* ---- random problems ---- */

typedef struct draw {
    qe_prng numbers;
    uint64_t next;
} draw;

static double between(draw *from, double low, double high) {
    return low + (high - low) * (double)qe_prng_uniform(&from->numbers, from->next++);
}

static uint32_t one_of(draw *from, uint32_t low, uint32_t high) {
    return low + (uint32_t)(qe_prng_u64(&from->numbers, from->next++) % (high - low + 1));
}

enum { STAGES_MOST = 24 };

typedef struct problem {
    qe_search_request request;
    qe_stage_cost costs[STAGES_MOST];
} problem;

/* Even or uneven stages, with hops or without, much memory or little. */
static void draw_problem(draw *from, uint32_t ranks_most, uint32_t microbatches_most, problem *out) {
    uint32_t chunks = one_of(from, 0, 2) == 0 ? 1 : 2, ranks = one_of(from, 1, ranks_most);
    uint32_t microbatches = one_of(from, 1, microbatches_most), stages = ranks * chunks;
    double even[3] = {between(from, .5, 3), between(from, .5, 3), between(from, 0, 3)};
    double share = one_of(from, 0, 1) ? 1.0 : between(from, 0, 1), hop = one_of(from, 0, 1) ? 0.0 : between(from, 0, 1);
    int uneven = one_of(from, 0, 1) == 1, limited = one_of(from, 0, 3) > 0;
    *out = (problem){.request = {.ranks = ranks, .chunks = chunks, .microbatches = microbatches,
                                 .metric = one_of(from, 0, 1) ? QE_SEARCH_STAGE : QE_SEARCH_MAKESPAN,
                                 .memory_limit = limited ? between(from, 1, 2.0 * ranks) : 0.0}};
    if (chunks > 1) out->request.placement = (uint8_t)(one_of(from, 0, 1) ? QE_SEARCH_V : QE_SEARCH_LOOPED);
    for (uint32_t s = 0; s < stages; s++) {
        double f = even[0], i = even[1], w = even[2];
        if (uneven) f = between(from, .5, 3), i = between(from, .5, 3), w = between(from, 0, 3);
        out->costs[s] = qe_stage_cost_of(f, i, w, share, chunks);
    }
    out->request.times = (qe_simulation_request){.cost_count = stages, .latency = hop};
}

static double value_of(const qe_simulation *times, const qe_search_request *request) {
    return request->metric == QE_SEARCH_STAGE ? times->span : times->makespan;
}

static int lives_there(const qe_schedule *schedule, const qe_search_result *found) {
    if (schedule->reversed > 0) return 0;
    return memcmp(schedule->stage_rank, found->schedule.stage_rank, schedule->stages * sizeof(uint32_t)) == 0;
}

/* Every named order that lives on the same ranks and fits; their count. */
static uint32_t assert_beats_names(const problem *on, const qe_search_result *found) {
    const qe_search_request *asked = &on->request;
    qe_simulation simulation = {0};
    uint32_t fit = 0;
    for (uint32_t i = 0; qe_schedule_name(i) != NULL; i++) {
        qe_schedule_request named = {qe_schedule_name(i), asked->ranks, asked->chunks, asked->microbatches, 0};
        qe_schedule schedule;
        qe_simulation_request times = asked->times;
        if (qe_schedule_generate(&named, &schedule, NULL) != QE_OK) continue;
        times.schedule = &schedule;
        assert_int_equal(qe_simulation_run(&times, &simulation, NULL), QE_OK);
        int fits = asked->memory_limit == 0 || simulation.peak_kept <= asked->memory_limit * (1 + 1e-12);
        if (lives_there(&schedule, found) && fits) {
            fit++;
            if (found->value > value_of(&simulation, asked) * (1 + SAME)) {
                fail_msg("%s: %.9f, found %.9f", named.name, value_of(&simulation, asked), found->value);
            }
        }
        qe_schedule_deinit(&schedule);
    }
    qe_simulation_deinit(&simulation);
    return fit;
}

/* The certificate, and the figures by a simulation of our own. */
static void assert_proved(const problem *on, const qe_search_result *found) {
    const qe_search_request *asked = &on->request;
    qe_certificate_request rules = {.gradients = QE_GRADIENTS_ASCENDING};
    qe_certificate certificate;
    qe_error error = {0};
    qe_status verdict = qe_schedule_certify(&found->schedule, &rules, &certificate, NULL, &error);
    if (verdict != QE_OK) fail_msg("%s", error.message);
    qe_certificate_deinit(&certificate);
    qe_simulation simulation = {0};
    qe_simulation_request times = asked->times;
    times.schedule = &found->schedule;
    assert_int_equal(qe_simulation_run(&times, &simulation, NULL), QE_OK);
    assert_true(fabs(value_of(&simulation, asked) - found->value) <= SAME * found->value);
    if (asked->memory_limit > 0) assert_true(simulation.peak_kept <= asked->memory_limit * (1 + SAME));
    assert_true(found->value >= found->bound * (1 - SAME));
    qe_simulation_deinit(&simulation);
}

enum { RANDOM_PROBLEMS = 300 };

static void random_problems_are_never_worse_than_a_name_and_never_over_the_limit(void **state) {
    (void)state;
    draw from = {.numbers = qe_prng_make(1, "search")};
    uint32_t fit = 0, beaten = 0, limited = 0;
    for (int i = 0; i < RANDOM_PROBLEMS; i++) {
        problem on;
        draw_problem(&from, 8, 16, &on);
        on.request.times.costs = on.costs;
        qe_search_result found = searched(&on.request);
        fit += assert_beats_names(&on, &found);
        assert_proved(&on, &found);
        limited += on.request.memory_limit > 0;
        beaten += found.named == NULL || found.value < found.named_value * (1 - SAME);
        qe_search_result_deinit(&found);
    }
    print_message("%d problems, %u with a limit: better than every name in %u, never worse than the %u that fit\n",
                  RANDOM_PROBLEMS, limited, beaten, fit);
}

static void the_same_request_gets_the_same_answer(void **state) {
    (void)state;
    draw from = {.numbers = qe_prng_make(2, "search")};
    for (int i = 0; i < 10; i++) {
        problem on;
        draw_problem(&from, 6, 10, &on);
        on.request.times.costs = on.costs;
        qe_search_result one = searched(&on.request), two = searched(&on.request);
        uint32_t actions = one.schedule.rank_begin[one.schedule.ranks];
        assert_int_equal(actions, two.schedule.rank_begin[two.schedule.ranks]);
        assert_memory_equal(one.schedule.actions, two.schedule.actions, actions * sizeof(qe_action));
        qe_search_result_deinit(&one);
        qe_search_result_deinit(&two);
    }
}

/* ---- all orders ---- */

/* Every order of a small problem whose actions start as early as their rows let them: in the order of starts, each of
 * them is met once. Microbatches are alike, so each kind of a stage takes them in order. */
typedef struct brute {
    const problem *on;
    const qe_schedule *placed; /* who lives where */
    double end[2][STAGES_MOST][4];
    uint32_t done[3][STAGES_MOST];
    double clock[4], begin[4], held[4], left[4], now, best;
    uint64_t orders;
} brute;

static uint32_t home(const brute *b, uint32_t stage) { return b->placed->stage_rank[stage]; }

static double hop_between(const brute *b, uint32_t from, uint32_t to) {
    return home(b, from) == home(b, to) ? 0.0 : b->on->request.times.latency;
}

/* -1: not there yet. */
static double input_of(const brute *b, uint32_t kind, uint32_t stage) {
    uint32_t m = b->done[kind][stage], stages = b->on->request.times.cost_count;
    if (m == b->on->request.microbatches) return -1;
    if (kind == QE_ACTION_W) return m < b->done[QE_ACTION_I][stage] ? 0 : -1;
    if (kind == QE_ACTION_I && m >= b->done[QE_ACTION_F][stage]) return -1;
    if (kind == QE_ACTION_I && stage == stages - 1) return b->end[QE_ACTION_F][stage][m];
    if (kind == QE_ACTION_F && stage == 0) return 0;
    uint32_t from = kind == QE_ACTION_F ? stage - 1 : stage + 1;
    return b->done[kind][from] > m ? b->end[kind][from][m] + hop_between(b, from, stage) : -1;
}

static double span_of(const brute *b, uint32_t rank, double end) {
    return b->on->request.metric == QE_SEARCH_STAGE && b->begin[rank] >= 0 ? end - b->begin[rank] : end;
}

static void try_orders(brute *b);

static void try_action(brute *b, uint32_t kind, uint32_t stage) {
    const qe_stage_cost *cost = &b->on->costs[stage];
    uint32_t rank = home(b, stage), m = b->done[kind][stage];
    double input = input_of(b, kind, stage), limit = b->on->request.memory_limit;
    double clock = b->clock[rank], begin = b->begin[rank], held = b->held[rank], left = b->left[rank], now = b->now;
    double start = input > clock ? input : clock, end = start + cost->time[kind];
    if (input < 0 || start < now) return;
    if (kind == QE_ACTION_F) b->held[rank] += cost->keep[QE_KEEP_I] + cost->keep[QE_KEEP_X];
    else b->held[rank] -= cost->keep[kind == QE_ACTION_I ? QE_KEEP_I : QE_KEEP_X];
    if (kind != QE_ACTION_F || limit == 0 || b->held[rank] <= limit * (1 + SAME)) {
        if (begin < 0) b->begin[rank] = start;
        if (kind != QE_ACTION_W) b->end[kind][stage][m] = end;
        b->clock[rank] = end;
        b->left[rank] -= cost->time[kind];
        b->now = start;
        b->done[kind][stage]++;
        try_orders(b);
        b->done[kind][stage]--;
    }
    b->clock[rank] = clock, b->begin[rank] = begin, b->held[rank] = held, b->left[rank] = left, b->now = now;
}

/* Goes on only where no rank is sure to end later than the best. */
static void try_orders(brute *b) {
    const qe_search_request *asked = &b->on->request;
    uint32_t stages = asked->times.cost_count, left = 0;
    double most = 0;
    for (uint32_t rank = 0; rank < asked->ranks; rank++) {
        most = fmax(most, span_of(b, rank, b->clock[rank] + b->left[rank]));
    }
    if (most >= b->best - SAME) return;
    for (uint32_t stage = 0; stage < stages; stage++) left += asked->microbatches - b->done[QE_ACTION_W][stage];
    if (left == 0) b->best = most, b->orders++;
    for (uint32_t i = 0; left > 0 && i < 3 * stages; i++) try_action(b, i / stages, i % stages);
}

/* The best of all orders, beginning from one that is known. */
static double best_of_all(const problem *on, const qe_search_result *found) {
    brute b = {.on = on, .placed = &found->schedule, .best = found->value};
    for (uint32_t rank = 0; rank < 4; rank++) b.begin[rank] = -1;
    for (uint32_t stage = 0; stage < on->request.times.cost_count; stage++) {
        const double *time = on->costs[stage].time;
        b.left[home(&b, stage)] += on->request.microbatches * (time[0] + time[1] + time[2]);
    }
    try_orders(&b);
    return b.best;
}

enum { SMALL_PROBLEMS = 120 };

static void small_problems_get_the_best_of_all_orders(void **state) {
    (void)state;
    draw from = {.numbers = qe_prng_make(3, "search")};
    uint32_t known = 0, exact = 0;
    double worst = 0;
    for (int i = 0; i < SMALL_PROBLEMS; i++) {
        problem on;
        draw_problem(&from, 3, 4, &on);
        if (on.request.chunks * on.request.ranks * on.request.microbatches > 9) continue;
        on.request.times.costs = on.costs;
        qe_search_result found = searched(&on.request);
        double best = best_of_all(&on, &found);
        known += found.bound >= found.value * (1 - SAME);
        exact++;
        worst = fmax(worst, found.value / best - 1);
        qe_search_result_deinit(&found);
    }
    print_message("%u small problems: largest gap to the best of all orders %.2g; %u known to be best\n", exact, worst,
                  known);
    assert_true(exact > 50);
    assert_true(worst <= SAME);
}

static void thirty_two_stages_and_256_microbatches_take_less_than_ten_seconds_of_a_core(void **state) {
    (void)state;
    const profile *on = &PROFILES[PROFILE_COUNT - 1];
    qe_stage_cost cost = qe_stage_cost_of(on->forward, on->input, on->weight, 1, 1);
    qe_search_request request = {.ranks = 32, .chunks = 1, .microbatches = 256, .metric = QE_SEARCH_STAGE,
                                 .memory_limit = 32, .times = {.costs = &cost, .cost_count = 1, .latency = on->hop}};
    clock_t begin = clock();
    qe_search_result found = searched(&request);
    double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    print_message("32 stages, 256 microbatches: %u orders in %.2f s of a core\n", found.tried, seconds);
#if defined(__OPTIMIZE__) && !SANITIZED /* the promise is of a build for use: counting lines, and watching races,
                                                 takes 4 to 20 times as long */
    assert_true(seconds < 10);
#endif
    qe_search_result_deinit(&found);
}

/* ---- refusals ---- */

static void a_limit_that_nothing_obeys_is_refused_with_the_least_that_is(void **state) {
    (void)state;
    qe_stage_cost cost = qe_stage_cost_of(1, 1, 1, 1, 2);
    qe_search_request request = {.ranks = 4, .chunks = 2, .microbatches = 8, .memory_limit = 0.99,
                                 .times = {.costs = &cost, .cost_count = 1}};
    qe_search_result result = {0};
    qe_error error = {0};
    assert_int_equal(qe_schedule_search(&request, &result, &error), QE_ERROR_ARGUMENT);
    assert_non_null(strstr(error.message, "the memory limit is 0.99; the least that any order obeys is 1"));
    assert_null(result.schedule.actions);
    request.memory_limit = 1;
    qe_search_result found = searched(&request);
    assert_true(found.peak_kept <= 1 + SAME);
    qe_search_result_deinit(&found);
}

static void assert_refused(qe_search_request request, qe_status expected, const char *text) {
    qe_search_result result = {0};
    qe_error error = {0};
    assert_int_equal(qe_schedule_search(&request, &result, &error), expected);
    if (strstr(error.message, text) == NULL) fail_msg("%s: %s", text, error.message);
}

static void wrong_times_and_sizes_are_refused(void **state) {
    (void)state;
    qe_stage_cost cost = qe_stage_cost_of(1, 1, 1, 1, 1), wrong = cost, endless = cost;
    wrong.time[QE_ACTION_I] = -1;
    endless.time[QE_ACTION_W] = INFINITY;
    qe_search_request good = {.ranks = 4, .chunks = 1, .microbatches = 8, .times = {.costs = &cost, .cost_count = 1}};
    qe_search_request bad = good;
    bad.times.costs = &wrong;
    assert_refused(bad, QE_ERROR_ARGUMENT, "a cost of stage 0 is negative");
    bad.times.costs = &endless;
    assert_refused(bad, QE_ERROR_ARGUMENT, "a cost of stage 0 is negative, not a number or above 1e+30");
    endless.time[QE_ACTION_W] = 1e307; /* a number, but sums of it are not */
    assert_refused(bad, QE_ERROR_ARGUMENT, "a cost of stage 0 is negative, not a number or above 1e+30");
    bad = good, bad.times.cost_count = 3;
    assert_refused(bad, QE_ERROR_ARGUMENT, "found costs of 3 stages, the schedule has 4");
    bad = good, bad.times.latency = NAN;
    assert_refused(bad, QE_ERROR_ARGUMENT, "latency");
    bad = good, bad.memory_limit = -1;
    assert_refused(bad, QE_ERROR_ARGUMENT, "the memory limit is negative");
    bad = good, bad.ranks = 0;
    assert_refused(bad, QE_ERROR_ARGUMENT, "ranks is 0");
    bad = good, bad.ranks = 257;
    assert_refused(bad, QE_ERROR_LIMIT, "ranks is 257");
    bad = good, bad.ranks = 64, bad.microbatches = 65536;
    assert_refused(bad, QE_ERROR_LIMIT, "12582912 actions");
    bad = good, bad.placement = QE_SEARCH_V;
    assert_refused(bad, QE_ERROR_ARGUMENT, "1 chunk on each rank; v has several");
    bad = good, bad.chunks = 2, bad.placement = QE_SEARCH_LINEAR;
    assert_refused(bad, QE_ERROR_ARGUMENT, "2 chunks on each rank; linear has 1");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_profiles_are_no_worse_than_zero_bubbles_own_scheduler),
        cmocka_unit_test(published_profiles_on_a_v_are_no_worse_than_their_scheduler_for_it),
        cmocka_unit_test(random_problems_are_never_worse_than_a_name_and_never_over_the_limit),
        cmocka_unit_test(small_problems_get_the_best_of_all_orders),
        cmocka_unit_test(thirty_two_stages_and_256_microbatches_take_less_than_ten_seconds_of_a_core),
        cmocka_unit_test(the_same_request_gets_the_same_answer),
        cmocka_unit_test(a_limit_that_nothing_obeys_is_refused_with_the_least_that_is),
        cmocka_unit_test(wrong_times_and_sizes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
