/* verify_run.c - trains one row for twelve eventful steps and keeps a digest of every tensor after each of them.
 *
 * The steps are made so that what could go wrong has a chance to: weights swell and shrink, so that every scale falls
 * and rises; one amax is Inf; one microbatch is all zero. Data are drawn from the seed: no file is needed. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/prng.h"
#include "base/seconds.h"
#include "cli/verify.h"

typedef struct run {
    const qe_verify_row *row;
    const qe_verify_plant *plant;
    qe_session session;
    qe_verify_outcome *outcome;
    uint32_t step; /* from 1 */
    uint32_t visited; /* tensors seen in this look at the state */
    uint32_t infinite_weight; /* whose x is hooked */
    qe_error observed; /* the first breach that contracts `observe` let pass */
    int no_memory;
} run;

/* Factors on all weights before a step. A scale falls as soon as its amax rises, and rises when the last four steps
 * (the longest history) were all lower. Five steps swollen, then five shrunk: x and w fall in step 2, rise in 10. */
static const float swell_factors[QE_VERIFY_STEPS] = {1, 3, 1, 1, 1, 1, 0.2f, 1, 1, 1, 1, 3};
/* dY follows the weights in some linears and goes against them in others (norms divide), but the last gain multiplies
 * all of it and no x. Lowered for five steps: dY falls in step 2, rises in 6 and falls in 8. */
static const float last_gain_factors[QE_VERIFY_STEPS] = {1, 1, 1 / 30.0f, 1, 1, 1, 1, 10, 1, 1, 1, 1};

/* Reads a parameter, lets `change` work on it, writes it back. */
static qe_status change_parameter(qe_session *session, uint32_t index,
                                  void (*change)(const qe_parameter *parameter, float *values, float by), float by,
                                  qe_error *error_out) {
    const qe_parameter *parameter = qe_model_parameter(session->model, index);
    float *values = malloc((size_t)parameter->rows * parameter->columns * sizeof *values);
    if (values == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for %s", parameter->name);
    qe_status status = qe_team_parameter_read(session->team, index, values, error_out);
    if (status == QE_OK) {
        change(parameter, values, by);
        status = qe_team_parameter_write(session->team, index, values, error_out);
    }
    free(values);
    return status;
}

static void multiply(const qe_parameter *parameter, float *values, float by) {
    for (size_t i = 0; i < (size_t)parameter->rows * parameter->columns; i++) values[i] *= by;
}

static void zero_first_row(const qe_parameter *parameter, float *values, float by) {
    (void)by;
    memset(values, 0, parameter->columns * sizeof *values);
}

static void flip_last_bit(const qe_parameter *parameter, float *values, float by) {
    (void)by;
    uint32_t bits;
    float *last = &values[(size_t)parameter->rows * parameter->columns - 1];
    memcpy(&bits, last, sizeof bits);
    bits ^= 1u;
    memcpy(last, &bits, sizeof bits);
}

static int is_named(const run *r, uint32_t parameter, const char *name) {
    return strcmp(qe_model_parameter(r->session.model, parameter)->name, name) == 0;
}

static qe_status swell(run *r, qe_error *error_out) {
    for (uint32_t i = 0; i < qe_model_parameter_count(r->session.model); i++) {
        float factor = swell_factors[r->step - 1];
        if (is_named(r, i, "model.norm.weight")) factor *= last_gain_factors[r->step - 1];
        if (factor != 1) QE_TRY(change_parameter(&r->session, i, multiply, factor, error_out));
    }
    return QE_OK;
}

/* The first norm of a zero row is 0, so with row 0 of the embedding zero a microbatch of token 0 is zero through the
 * whole stack, and with it every amax that it records. */
static qe_status zero_first_token(run *r, qe_error *error_out) {
    uint32_t embedding = 0;
    while (!is_named(r, embedding, "model.embed_tokens.weight")) {
        embedding++;
        QE_ASSERT(embedding < qe_model_parameter_count(r->session.model));
    }
    return change_parameter(&r->session, embedding, zero_first_row, 0, error_out);
}

/* A linear in the middle of the stack. */
static uint32_t middle_linear(const qe_model *model) {
    const qe_model_ops *ops = qe_model_table();
    uint32_t count = ops->weight_count(model), weight = count / 2;
    while (weight < count && !ops->weight(model, weight)->scaled) weight++;
    QE_ASSERT(weight < count);
    return weight;
}

static void make_batch(run *r) {
    qe_session *session = &r->session;
    uint32_t vocab = session->settings.model.vocab;
    size_t tokens = qe_model_table()->tokens(session->model), count = session->schedule.microbatches * tokens;
    qe_prng prng = qe_prng_make(session->settings.train.seed, "verify.tokens");
    for (size_t i = 0; i < count; i++) {
        uint64_t token = qe_prng_u64(&prng, (uint64_t)r->step * count + i) % vocab;
        session->tokens[i] = (int32_t)token;
        session->targets[i] = (int32_t)((token * 5 + 3) % vocab); /* each follows from the one before: it learns */
    }
    if (r->step == QE_VERIFY_ZERO_STEP) memset(session->tokens + tokens, 0, tokens * sizeof *session->tokens);
}

/* Logits of zero give ln(vocab) for every token. Evaluation changes nothing, so the baseline may look. */
static qe_status probe_zero(run *r, qe_error *error_out) {
    qe_session *session = &r->session;
    qe_step_result result;
    qe_batch batch = {.tokens = session->tokens, .targets = session->targets};
    QE_TRY(qe_team_evaluate(session->team, &batch, session->losses, NULL, 0, 0, &result, error_out));
    double expected = qe_model_table()->tokens(session->model) * log((double)session->settings.model.vocab);
    r->outcome->exercise.zero_microbatch = fabs(session->losses[1] - expected) < 1e-5 * expected;
    return QE_OK;
}

static qe_verify_tensor *tensor_at(qe_verify_outcome *outcome, uint32_t index) {
    if (index < outcome->tensor_capacity) return &outcome->tensors[index];
    uint32_t capacity = outcome->tensor_capacity == 0 ? 256 : 2 * outcome->tensor_capacity;
    qe_verify_tensor *grown = realloc(outcome->tensors, capacity * sizeof *grown);
    if (grown == NULL) return NULL;
    memset(grown + outcome->tensor_capacity, 0, (capacity - outcome->tensor_capacity) * sizeof *grown);
    outcome->tensors = grown;
    outcome->tensor_capacity = capacity;
    return &grown[index];
}

static void keep_digest(void *context, const qe_state_tensor *tensor) {
    run *r = context;
    uint32_t index = r->visited++;
    qe_verify_tensor *kept = tensor_at(r->outcome, index);
    if (kept == NULL) {
        r->no_memory = 1;
        return;
    }
    size_t count = (size_t)((tensor->rows == 0 ? 1 : tensor->rows) * tensor->columns);
    snprintf(kept->name, sizeof kept->name, "%s", tensor->name);
    kept->kind = tensor->kind;
    kept->hooked = tensor->weight == r->infinite_weight && tensor->role == QE_SCALE_X;
    kept->single = count == 1;
    kept->digest[r->step - 1] = qe_hash_bytes(tensor->values, count * sizeof *tensor->values);
    float largest = tensor->values[0];
    for (size_t i = 1; tensor->kind == QE_STATE_HISTORY && i < count; i++)
        if (tensor->values[i] > largest) largest = tensor->values[i];
    kept->largest[r->step - 1] = largest;
    if (index >= r->outcome->tensor_count) r->outcome->tensor_count = index + 1;
}

static qe_status look(run *r, qe_error *error_out) {
    r->visited = 0;
    QE_TRY(qe_team_state_visit(r->session.team, keep_digest, r, error_out));
    if (r->no_memory) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for digests");
    return QE_OK;
}

/* What a refused or vetoed step says for itself; an operating error has spoken. An observed one goes on. */
static qe_status explain(run *r, qe_status status, const qe_step_result *result, qe_error *error_out) {
    char text[QE_ERROR_TEXT_BYTES / 2];
    if (status == QE_OK && result->vetoed)
        return qe_error_set(error_out, QE_CONTRACT, "lower train.learning_rate",
                            "step.nonfinite: loss or gradient norm of step %u is not finite", r->step);
    if ((status != QE_OK && status != QE_CONTRACT) || result->violations.count == 0) return status;
    if (status == QE_OK && r->observed.status != QE_OK) return QE_OK;
    const qe_program *program = qe_team_program(r->session.team, result->violation_rank);
    qe_violation_text(&result->violations.record[0], program, text, sizeof text);
    qe_error_set(status == QE_OK ? &r->observed : error_out, QE_CONTRACT, NULL, "step %u: rank %u: %s", r->step,
                 result->violation_rank, text);
    return status;
}

/* Others are held against it. */
static int is_baseline(const qe_verify_row *row) { return row->baseline + 1 == row->number; }

static qe_status one_step(run *r, qe_error *error_out) {
    qe_step_result result = {0};
    make_batch(r);
    QE_TRY(swell(r, error_out));
    if (r->step == QE_VERIFY_INFINITE_STEP && r->row->history > 0)
        QE_TRY(qe_team_scale_amax(r->session.team, r->infinite_weight, QE_SCALE_X, INFINITY, error_out));
    if (r->step == QE_VERIFY_ZERO_STEP) QE_TRY(zero_first_token(r, error_out));
    if (r->step == QE_VERIFY_ZERO_STEP && is_baseline(r->row)) QE_TRY(probe_zero(r, error_out));
    qe_status status = qe_session_step_given(&r->session, r->step, &result, error_out);
    QE_TRY(explain(r, status, &result, error_out));
    r->outcome->loss[r->step - 1] = result.loss;
    r->outcome->norm[r->step - 1] = result.gradient_norm;
    if (r->plant->row == r->row->number && r->plant->step == r->step)
        QE_TRY(change_parameter(&r->session, qe_model_parameter_count(r->session.model) / 2, flip_last_bit, 0,
                                error_out));
    return look(r, error_out);
}

static qe_status all_steps(run *r, const qe_settings *settings, qe_error *error_out) {
    qe_session_options options = {.training = 1, .device = r->row->device};
    qe_status status = qe_session_open(&r->session, settings, &options, error_out);
    if (status == QE_CONTRACT && error_out->message[0] == 0)
        return qe_error_set(error_out, status, "qeffect check names the rule", "the plan is refused");
    QE_TRY(status);
    snprintf(r->outcome->backend, sizeof r->outcome->backend, "%s", r->session.backend);
    r->infinite_weight = middle_linear(r->session.model);
    QE_TRY(qe_session_initialize(&r->session, error_out));
    for (r->step = 1; r->step <= QE_VERIFY_STEPS; r->step++) QE_TRY(one_step(r, error_out));
    if (r->observed.status != QE_OK) {
        *error_out = r->observed;
        return QE_CONTRACT;
    }
    return qe_team_state_hash(r->session.team, r->outcome->hash, error_out);
}

void qe_verify_run(const qe_verify_row *row, const qe_settings *configured, const qe_verify_plant *plant,
                   qe_verify_outcome *outcome_out) {
    qe_settings settings;
    run r = {.row = row, .plant = plant, .outcome = outcome_out};
    memset(outcome_out, 0, sizeof *outcome_out);
    qe_verify_row_settings(row, configured, &settings);
    double begin = qe_seconds_now();
    outcome_out->status = all_steps(&r, &settings, &outcome_out->error);
    qe_session_close(&r.session);
    outcome_out->seconds = qe_seconds_now() - begin;
    if (outcome_out->status == QE_OK && is_baseline(row)) qe_verify_exercise_judge(outcome_out);
}

void qe_verify_outcome_deinit(qe_verify_outcome *outcome) {
    free(outcome->tensors);
    memset(outcome, 0, sizeof *outcome);
}
