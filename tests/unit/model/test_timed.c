/* The timed model: real steps of it last as long as the simulator says. */
#include <math.h>
#include "qeffect/simulate.h"
#include "qeffect/timed.h"
#include "step_world.h"

typedef struct timed_case {
    const char *schedule;
    uint32_t ranks, chunks, microbatches;
    int uneven;
} timed_case;

enum { TRIES = 5, STAGES = 8 };

/* A prediction is right within 3%. Where actions took longer than asked the machine was busy with something else, and
 * nothing can be said. */
#define TOLERANCE (SANITIZED ? 0.5 : 0.03)
#define LATENESS 0.005

/* No stage is like its neighbours; long enough that what a busy machine adds stays below the tolerance. */
static const qe_timed_stage EVEN = {20000000, 24000000, 22000000};
static const qe_timed_stage UNEVEN[STAGES] = {
    {15000000, 21000000, 16500000}, {19500000, 18000000, 15000000}, {15000000, 15000000, 15000000},
    {24000000, 30000000, 18000000}, {16500000, 19500000, 25500000}, {15000000, 18000000, 15000000},
    {18000000, 22500000, 19500000}, {27000000, 33000000, 15000000},
};

static qe_adamw no_step(const void *context, double norm) {
    (void)context;
    (void)norm;
    return (qe_adamw){.learning_rate = 0, .beta1 = 0.9f, .beta2 = 0.9f, .epsilon = 1e-8f, .bias_correction1 = 1,
                      .bias_correction2 = 1, .gradient_scale = 1};
}

static qe_team *team_of(const qe_plan *plan, qe_world *ranks) {
    qe_team_options options = {.backend = qe_host_backend(), .comm = qe_local_comm(), .world = ranks,
                               .opened = world_opened};
    qe_team *team = NULL;
    qe_error error = {0};
    must(qe_team_create(plan, NULL, &options, &team, &error), &error, "team");
    return team;
}

/* How much longer than asked the actions of the last step took, all in all. */
static double lateness(const qe_schedule *schedule, const qe_timed_model *model, const qe_timed_stage *stages) {
    double asked = 0, taken = 0;
    for (uint32_t i = 0; i < schedule->rank_begin[schedule->ranks]; i++) {
        const qe_action *action = &schedule->actions[i];
        const qe_timed_stage *t = &stages[action->stage];
        const uint64_t ns[QE_ACTION_KINDS] = {t->forward_ns, t->input_ns, t->weight_ns, t->input_ns + t->weight_ns};
        qe_timed_span span = qe_timed_model_span(model, action);
        asked += (double)ns[action->kind];
        taken += (double)(span.end_ns - span.begin_ns);
    }
    return taken / asked - 1;
}

/* Runs a step of a schedule; its makespan in ms. */
static double measured(const qe_schedule *schedule, const qe_timed_model *model) {
    qe_plan_options options = {.cache_weights = 1, .reuse_slots = 1};
    qe_plan *plan = NULL;
    qe_violations violations;
    qe_counterexample counterexample;
    qe_error error = {0};
    must(qe_plan_create(schedule, qe_timed_model_table(), model, &options, &plan, &violations, &counterexample,
                        &error), &error, "plan");
    qe_world *ranks = NULL;
    must(qe_local_world_create(plan->ranks, &ranks, &error), &error, "ranks");
    qe_team *team = team_of(plan, ranks);
    int32_t nothing[64] = {0};
    qe_batch batch = {nothing, nothing};
    qe_step_optimizer optimizer = {no_step, NULL};
    qe_step_result result;
    must(qe_team_step(team, &batch, &optimizer, &result, &error), &error, "step");
    assert_false(result.vetoed);
    uint64_t begin = UINT64_MAX, end = 0;
    for (uint32_t i = 0; i < schedule->rank_begin[schedule->ranks]; i++) {
        qe_timed_span span = qe_timed_model_span(model, &schedule->actions[i]);
        if (span.begin_ns < begin) begin = span.begin_ns;
        if (span.end_ns > end) end = span.end_ns;
    }
    qe_team_destroy(team);
    qe_local_world_destroy(ranks);
    qe_plan_destroy(plan);
    return (double)(end - begin) * 1e-6;
}

static double predicted(const qe_schedule *schedule, const qe_timed_stage *stages) {
    qe_stage_cost costs[STAGES] = {0};
    for (uint32_t s = 0; s < schedule->stages; s++) {
        costs[s].time[QE_ACTION_F] = (double)stages[s].forward_ns * 1e-6;
        costs[s].time[QE_ACTION_I] = (double)stages[s].input_ns * 1e-6;
        costs[s].time[QE_ACTION_W] = (double)stages[s].weight_ns * 1e-6;
        costs[s].time[QE_ACTION_B] = costs[s].time[QE_ACTION_I] + costs[s].time[QE_ACTION_W];
    }
    qe_simulation_request request = {.schedule = schedule, .costs = costs, .cost_count = schedule->stages,
                                     .gradient_early = 1};
    qe_simulation simulation = {0};
    qe_error error = {0};
    must(qe_simulation_run(&request, &simulation, &error), &error, "simulation");
    double makespan = simulation.makespan;
    qe_simulation_deinit(&simulation);
    return makespan;
}

static double nearest(const qe_schedule *schedule, const qe_timed_model *model, double expected) {
    double found = 0;
    for (int i = 0; i < TRIES; i++) {
        found = measured(schedule, model);
        assert_true(found >= 0.999 * expected); /* nothing is faster than its parts */
        if (found <= (1 + TOLERANCE) * expected) break;
    }
    return found;
}

static void compare(const timed_case *one) {
    qe_schedule_request request = {.name = one->schedule, .ranks = one->ranks, .chunks = one->chunks,
                                   .microbatches = one->microbatches};
    qe_schedule schedule;
    qe_timed_model *model = NULL;
    qe_timed_stage stages[STAGES];
    qe_error error = {0};
    must(qe_schedule_generate(&request, &schedule, &error), &error, one->schedule);
    for (uint32_t s = 0; s < schedule.stages; s++) stages[s] = one->uneven ? UNEVEN[s] : EVEN;
    must(qe_timed_model_create(stages, schedule.stages, schedule.microbatches, &model, &error), &error, "model");
    double expected = predicted(&schedule, stages), found = nearest(&schedule, model, expected);
    print_message("%-14s P%u V%u M%u %-6s: predicted %.1f ms, measured %.1f ms, %+.2f%%\n", one->schedule, one->ranks,
                  one->chunks, one->microbatches, one->uneven ? "uneven" : "even", expected, found,
                  100 * (found / expected - 1));
    double late = lateness(&schedule, model, stages);
    int disturbed = found > (1 + TOLERANCE) * expected && late > LATENESS;
    if (disturbed) print_message("actions took %.1f%% longer than asked: the machine is busy\n", 100 * late);
    if (!disturbed) assert_true(found <= (1 + TOLERANCE) * expected);
    qe_timed_model_destroy(model);
    qe_schedule_deinit(&schedule);
    if (disturbed) skip();
}

static void a_step_lasts_as_long_as_the_simulator_says(void **state) {
    (void)state;
    static const timed_case cases[] = {
        {"1f1b", 4, 1, 6, 0}, {"zbv", 3, 2, 5, 0}, {"zbh2", 4, 1, 7, 1}, {"1f1b-v", 4, 2, 4, 1},
        {"looped-bfs", 2, 2, 3, 1}, {"sequential", 2, 1, 1, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) compare(&cases[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_step_lasts_as_long_as_the_simulator_says)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
