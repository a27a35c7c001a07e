/* step_world.h - a small training session for tests: model, schedule, plans, ranks in one process, host backend.
 *
 * The model is tiny (4 layers, hidden 32, 4 heads over 2, ffn 48, 64 words, 16 tokens), so that a step takes about a
 * millisecond. Everything fails by cmocka's assertions with the error's own words. */
#ifndef QE_TESTS_STEP_WORLD_H
#define QE_TESTS_STEP_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "qeffect/host.h"
#include "qeffect/local.h"
#include "qeffect/model.h"
#include "qeffect/step.h"
#include "sanitized.h"

enum { WORLD_MICROBATCHES_MAX = 16, WORLD_ALL_ZERO = 1 };

/* Zero fields stand for the usual value, named behind each. */
typedef struct world_options {
    const char *schedule; /* "1f1b" */
    const qe_schedule *given; /* instead of a named schedule; the caller keeps it */
    uint32_t ranks, chunks, microbatches; /* 1, 1, 4 */
    qe_recipe_kind recipe; /* delayed */
    uint32_t history; /* 4 */
    qe_contracts contracts; /* trap */
    qe_capture capture; /* eager */
    int baseline; /* sequential on one rank; no cache, no reuse, gradients copied */
    int no_cache, no_reuse, copy; /* one by one */
    int apart; /* with copy: products are set in scratch and added, whatever the backend says of its sums */
    int evaluates; /* with an evaluation plan */
    const qe_model_config *config; /* tiny, as above */
    int quickstart; /* the sizes of the quickstart instead of the tiny ones */
    const qe_backend *backend; /* host */
    const qe_comm_ops *comm; /* local; with what makes and ends its worlds */
    qe_status (*ranks_create)(uint32_t ranks, qe_world **world_out, qe_error *error_out);
    void (*ranks_destroy)(qe_world *world);
    void (*opened)(qe_device *device, const void *context); /* gives the host device its transport */
    const void *opened_context;
} world_options;

typedef struct world {
    qe_model *model;
    qe_plan *plan, *evaluation;
    qe_world *ranks;
    void (*ranks_destroy)(qe_world *world);
    qe_team *team;
    uint32_t microbatches, tokens, vocab;
    uint64_t step; /* of the next call, from 1 */
    qe_optimizer optimizer;
    qe_step_result result;
    qe_error error;
    int32_t *batch_tokens, *batch_targets;
} world;

static inline void must(qe_status status, const qe_error *error, const char *what) {
    if (status != QE_OK) print_error("%s: %s: %s\n", what, qe_status_name(status), error->message);
    assert_int_equal(status, QE_OK);
}

static inline qe_model_config world_config(const world_options *options) {
    if (options->config != NULL) return *options->config;
    if (options->quickstart)
        return (qe_model_config){.layers = 4, .hidden = 128, .heads = 4, .kv_heads = 2, .ffn = 384, .vocab = 256,
                                 .sequence = 128, .sequences = 2, .rope_theta = 10000.0f, .norm_epsilon = 1e-5f};
    return (qe_model_config){.layers = 4, .hidden = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 64,
                             .sequence = 16, .sequences = 1, .rope_theta = 10000.0f, .norm_epsilon = 1e-5f};
}

static inline qe_model *world_model(const world_options *options) {
    qe_model_config config = world_config(options);
    if (options->backend != NULL) config.numerics = options->backend->numerics;
    qe_recipe recipe = {.kind = options->recipe,
                        .history_length = options->history > 0 ? options->history : 4,
                        .amax_algorithm = QE_AMAX_MAX};
    qe_model *model = NULL;
    qe_error error = {0};
    must(qe_model_create(&config, &recipe, &model, &error), &error, "model");
    return model;
}

static inline uint32_t or_else(uint32_t value, uint32_t usual) { return value > 0 ? value : usual; }

static inline void world_schedule(const world_options *options, int forward_only, qe_schedule *schedule_out) {
    uint32_t ranks = or_else(options->ranks, 1), chunks = or_else(options->chunks, 1);
    qe_schedule_request request = {.name = options->schedule != NULL ? options->schedule : "1f1b",
                                   .ranks = ranks,
                                   .chunks = chunks,
                                   .microbatches = or_else(options->microbatches, 4),
                                   .forward_only = forward_only};
    if (options->baseline) {
        request.name = "sequential";
        request.ranks = 1;
        request.chunks = ranks * chunks;
    }
    qe_error error = {0};
    must(qe_schedule_generate(&request, schedule_out, &error), &error, request.name);
}

static inline qe_plan *world_plan(const qe_schedule *schedule, const qe_model *model, const world_options *options,
                                  int forward_only) {
    qe_plan_options plan_options = {
        .forward_only = forward_only != 0,
        .cache_weights = !options->baseline && !options->no_cache,
        .fill_ahead = options->capture != QE_CAPTURE_NONE,
        .reuse_slots = !options->baseline && !options->no_reuse,
        .share_slots = !options->baseline && !options->no_reuse,
        .placement = options->baseline || options->copy ? QE_GRADIENT_COPY : QE_GRADIENT_DIRECT,
        .sums_apart = options->apart != 0,
    };
    qe_plan *plan = NULL;
    qe_violations violations;
    qe_counterexample counterexample;
    qe_error error = {0};
    qe_status status =
        qe_plan_create(schedule, qe_model_table(), model, &plan_options, &plan, &violations, &counterexample, &error);
    if (status == QE_CONTRACT && violations.count > 0)
        print_error("plan breaks %s at item %u\n", qe_rule_id(violations.record[0].rule), violations.record[0].item);
    must(status, &error, "plan");
    return plan;
}

static inline void world_opened(qe_device *device, const void *context) {
    (void)context;
    qe_host_set_comm(device, qe_local_comm());
}

static inline void world_initialize(world *w, uint64_t seed) {
    for (uint32_t i = 0; i < qe_model_parameter_count(w->model); i++) {
        const qe_parameter *parameter = qe_model_parameter(w->model, i);
        float *values = malloc((size_t)parameter->rows * parameter->columns * sizeof *values);
        assert_non_null(values);
        qe_model_initialize(w->model, i, seed, values);
        must(qe_team_parameter_write(w->team, i, values, &w->error), &w->error, parameter->name);
        free(values);
    }
}

/* Model and plans, without a team. */
static inline void world_prepare(world *w, const world_options *options) {
    memset(w, 0, sizeof *w);
    qe_schedule schedule, forward;
    w->model = world_model(options);
    if (options->given == NULL) world_schedule(options, 0, &schedule);
    else schedule = *options->given;
    w->plan = world_plan(&schedule, w->model, options, 0);
    if (options->evaluates) {
        world_schedule(options, 1, &forward);
        w->evaluation = world_plan(&forward, w->model, options, 1);
        qe_schedule_deinit(&forward);
    }
    if (options->given == NULL) qe_schedule_deinit(&schedule);
    w->microbatches = w->plan->microbatches;
    w->tokens = qe_model_table()->tokens(w->model);
    w->vocab = qe_model_config_of(w->model)->vocab;
    w->step = 1;
    w->optimizer = (qe_optimizer){.rate = {.peak = 3e-2, .minimum = 3e-3, .warmup_steps = 2, .steps = 12},
                                      .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1,
                                      .clip_norm = 1.0};
    size_t values = (size_t)w->microbatches * w->tokens;
    w->batch_tokens = calloc(values, sizeof(int32_t));
    w->batch_targets = calloc(values, sizeof(int32_t));
    assert_non_null(w->batch_tokens);
    assert_non_null(w->batch_targets);
    w->ranks_destroy = options->ranks_destroy != NULL ? options->ranks_destroy : qe_local_world_destroy;
    must((options->ranks_create != NULL ? options->ranks_create : qe_local_world_create)(w->plan->ranks, &w->ranks,
                                                                                         &w->error),
         &w->error, "ranks");
}

static inline qe_status world_team(world *w, const world_options *options) {
    qe_team_options team_options = {.backend = options->backend != NULL ? options->backend : qe_host_backend(),
                                    .comm = options->comm != NULL ? options->comm : qe_local_comm(),
                                    .world = w->ranks,
                                    .contracts = options->contracts,
                                    .capture = options->capture,
                                    .opened = options->opened != NULL ? options->opened : world_opened,
                                    .opened_context = options->opened_context};
    return qe_team_create(w->plan, w->evaluation, &team_options, &w->team, &w->error);
}

static inline void world_open(world *w, const world_options *options) {
    world_prepare(w, options);
    must(world_team(w, options), &w->error, "team");
    world_initialize(w, 7);
}

static inline void world_close(world *w) {
    qe_team_destroy(w->team);
    w->ranks_destroy(w->ranks);
    qe_plan_destroy(w->plan);
    qe_plan_destroy(w->evaluation);
    qe_model_destroy(w->model);
    free(w->batch_tokens);
    free(w->batch_targets);
    memset(w, 0, sizeof *w);
}

/* The batch of a step: every batch is another one, each word follows from the one before it, so there is something to
 * learn. With WORLD_ALL_ZERO microbatch 1 is word 0 throughout. */
static inline void world_batch(world *w, uint64_t step, int flags) {
    uint32_t state = (uint32_t)(step * 2654435761u + 12345u);
    size_t values = (size_t)w->microbatches * w->tokens;
    for (size_t i = 0; i < values; i++) {
        state = state * 1664525u + 1013904223u;
        w->batch_tokens[i] = (int32_t)(state >> 16) % (int32_t)w->vocab;
        w->batch_targets[i] = (w->batch_tokens[i] * 5 + 3) % (int32_t)w->vocab;
    }
    if (!(flags & WORLD_ALL_ZERO) || w->microbatches < 2) return;
    memset(w->batch_tokens + w->tokens, 0, w->tokens * sizeof(int32_t));
}

static inline qe_adamw world_constants(const void *context, double norm) {
    const world *w = context;
    return qe_optimizer_step(&w->optimizer, w->step, norm);
}

/* One step on the batch of its number; the step counts only when it commits. */
static inline qe_status world_try_step(world *w, int flags) {
    world_batch(w, w->step, flags);
    qe_batch batch = {w->batch_tokens, w->batch_targets};
    qe_step_optimizer optimizer = {world_constants, w};
    memset(&w->error, 0, sizeof w->error);
    qe_status status = qe_team_step(w->team, &batch, &optimizer, &w->result, &w->error);
    if (status == QE_OK && !w->result.vetoed) w->step++;
    return status;
}

static inline double world_step(world *w, int flags) {
    qe_status status = world_try_step(w, flags);
    if (status == QE_CONTRACT && w->result.violations.count > 0)
        print_error("step %llu breaks %s\n", (unsigned long long)w->step,
                    qe_rule_id(w->result.violations.record[0].rule));
    must(status, &w->error, "step");
    assert_false(w->result.vetoed);
    return w->result.loss;
}

typedef struct world_hash {
    char text[QE_STATE_HASH_BYTES];
} world_hash;

static inline world_hash world_state(world *w) {
    world_hash hash;
    must(qe_team_state_hash(w->team, hash.text, &w->error), &w->error, "state hash");
    assert_int_equal(strlen(hash.text), QE_STATE_HASH_BYTES - 1);
    return hash;
}

#endif
