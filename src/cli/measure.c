/* measure.c - plan, ranks, team and steps of the timed model, on the host. */
#include "cli/measure.h"

#include <stdlib.h>
#include <string.h>
#include "qeffect/host.h"
#include "qeffect/local.h"
#include "qeffect/step.h"
#include "qeffect/timed.h"

#define MS_PER_NS 1e-6

typedef struct measurement {
    const qe_simulation_request *request;
    const qe_schedule *schedule;
    qe_timed_model *model;
    qe_plan *plan;
    qe_world *world;
    qe_team *team;
    int32_t *tokens;     /* [microbatches]: a batch of nothing */
    double *start, *end; /* [actions] of the last step, ms */
} measurement;

static qe_status create_model(measurement *m, qe_error *error_out) {
    uint32_t stages = m->schedule->stages;
    qe_timed_stage *times = calloc(stages, sizeof *times);
    if (times == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for times");
    for (uint32_t stage = 0; stage < stages; stage++) {
        const double *ms = m->request->costs[m->request->cost_count == 1 ? 0 : stage].time;
        times[stage].forward_ns = (uint64_t)(ms[QE_ACTION_F] / MS_PER_NS + 0.5);
        times[stage].input_ns = (uint64_t)(ms[QE_ACTION_I] / MS_PER_NS + 0.5);
        times[stage].weight_ns = (uint64_t)(ms[QE_ACTION_W] / MS_PER_NS + 0.5);
    }
    qe_status status = qe_timed_model_create(times, stages, m->schedule->microbatches, &m->model, error_out);
    free(times);
    return status;
}

static qe_status create_plan(measurement *m, qe_error *error_out) {
    qe_plan_options options = {.cache_weights = 1, .reuse_slots = 1};
    qe_violations violations;
    qe_counterexample counterexample = {0};
    qe_status status = qe_plan_create(m->schedule, qe_timed_model_table(), m->model, &options, &m->plan, &violations,
                                      &counterexample, error_out);
    qe_counterexample_deinit(&counterexample);
    return status;
}

static void device_opened(qe_device *device, const void *context) {
    (void)context;
    qe_host_set_comm(device, qe_local_comm());
}

static qe_status create_team(measurement *m, qe_error *error_out) {
    qe_team_options options = {.backend = qe_host_backend(), .comm = qe_local_comm(), .world = m->world,
                               .contracts = QE_CONTRACTS_TRAP, .opened = device_opened};
    return qe_team_create(m->plan, NULL, &options, &m->team, error_out);
}

static qe_status prepare(measurement *m, qe_error *error_out) {
    size_t actions = m->schedule->rank_begin[m->schedule->ranks];
    m->tokens = calloc(m->schedule->microbatches, sizeof *m->tokens);
    m->start = calloc(actions, sizeof *m->start);
    m->end = calloc(actions, sizeof *m->end);
    if (m->tokens == NULL || m->start == NULL || m->end == NULL) {
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a measurement");
    }
    qe_status status = create_model(m, error_out);
    if (status == QE_OK) status = create_plan(m, error_out);
    if (status == QE_OK) status = qe_local_world_create(m->schedule->ranks, &m->world, error_out);
    if (status == QE_OK) status = create_team(m, error_out);
    return status;
}

static void release(measurement *m) {
    qe_team_destroy(m->team);
    qe_local_world_destroy(m->world);
    qe_plan_destroy(m->plan);
    qe_timed_model_destroy(m->model);
    free(m->tokens);
    free(m->start);
    free(m->end);
}

/* The weights are one number each and stay what they are. */
static qe_adamw no_step(const void *context, double norm) {
    (void)context;
    (void)norm;
    return (qe_adamw){.epsilon = 1e-8f, .bias_correction1 = 1.0f, .bias_correction2 = 1.0f, .gradient_scale = 1.0f};
}

static void read_spans(measurement *m) {
    uint64_t begin_ns = UINT64_MAX;
    size_t actions = m->schedule->rank_begin[m->schedule->ranks];
    for (size_t i = 0; i < actions; i++) {
        qe_timed_span span = qe_timed_model_span(m->model, &m->schedule->actions[i]);
        if (span.begin_ns < begin_ns) begin_ns = span.begin_ns;
    }
    for (size_t i = 0; i < actions; i++) {
        qe_timed_span span = qe_timed_model_span(m->model, &m->schedule->actions[i]);
        m->start[i] = (double)(span.begin_ns - begin_ns) * MS_PER_NS;
        m->end[i] = (double)(span.end_ns - begin_ns) * MS_PER_NS;
    }
}

static qe_status run_step(measurement *m, qe_simulation *out, qe_error *error_out) {
    qe_batch batch = {.tokens = m->tokens, .targets = m->tokens};
    qe_step_optimizer optimizer = {.constants = no_step};
    qe_step_result result;
    qe_status status = qe_team_step(m->team, &batch, &optimizer, &result, error_out);
    if (status != QE_OK) return status;
    read_spans(m);
    return qe_simulation_record(m->request, m->start, m->end, out, error_out);
}

static void keep_shortest(qe_simulation *all, uint32_t steps, qe_simulation *measured) {
    uint32_t shortest = 0;
    for (uint32_t step = 1; step < steps; step++) {
        if (all[step].makespan < all[shortest].makespan) shortest = step;
    }
    *measured = all[shortest];
    all[shortest] = (qe_simulation){0};
}

static qe_status run_steps(measurement *m, uint32_t steps, qe_simulation *measured, double *makespans_out,
                           qe_error *error_out) {
    qe_simulation *all = calloc(steps, sizeof *all);
    if (all == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for %u steps", steps);
    qe_status status = QE_OK;
    for (uint32_t step = 0; step < steps && status == QE_OK; step++) {
        status = run_step(m, &all[step], error_out);
        makespans_out[step] = all[step].makespan;
    }
    if (status == QE_OK) keep_shortest(all, steps, measured);
    for (uint32_t step = 0; step < steps; step++) qe_simulation_deinit(&all[step]);
    free(all);
    return status;
}

qe_status qe_measure(const qe_simulation_request *request, uint32_t steps, qe_simulation *measured,
                     double *makespans_out, qe_error *error_out) {
    measurement m = {.request = request, .schedule = request->schedule};
    qe_status status = prepare(&m, error_out);
    if (status == QE_OK) status = run_steps(&m, steps, measured, makespans_out, error_out);
    release(&m);
    return status;
}
