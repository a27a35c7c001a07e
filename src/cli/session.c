/* session.c - builds and tears down a run of the built-in model on a device. */
#include "cli/session.h"
#include "cli/schedule_argument.h"
#include "cli/session_evaluation.h"
#include "cli/session_search.h"
#include "cli/stopwatch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/assert.h"

static qe_status open_data(qe_session *session, qe_error *error_out) {
    const qe_settings *s = &session->settings;
    qe_dataset_options options = {.path = s->data.path,
                                  .format = s->data.format,
                                  .validation = s->data.validation,
                                  .sequence = s->model.sequence,
                                  .vocab = s->model.vocab};
    return qe_dataset_open(&options, &session->dataset, error_out);
}

/* A model that this device cannot multiply. The message names the size: no line is better than another's. */
static qe_status blame_model(const qe_settings *settings, qe_error *error_out) {
    static const char *const sizes[] = {"model.hidden",   "model.heads",    "model.kv_heads", "model.ffn",
                                        "model.sequence", "train.sequences", "recipe.name",   NULL};
    qe_status status = qe_settings_blame(settings, sizes, error_out);
    error_out->line = error_out->column = 0;
    return status;
}

static qe_status create_model(qe_session *session, qe_error *error_out) {
    const qe_settings_model *m = &session->settings.model;
    const qe_settings_products *p = &session->settings.products;
    qe_model_config config = {
        .layers = m->layers,
        .hidden = m->hidden,
        .heads = m->heads,
        .kv_heads = m->kv_heads,
        .ffn = m->ffn,
        .vocab = m->vocab,
        .sequence = m->sequence,
        .sequences = session->settings.train.sequences,
        .rope_theta = (float)m->rope_theta,
        .norm_epsilon = (float)m->norm_epsilon,
        .numerics = qe_device_backend(session->device)->numerics,
        .accumulation = {(uint8_t)p->forward, (uint8_t)p->input_grad, (uint8_t)p->weight_grad},
        .attention_any_order = !session->settings.train.deterministic,
    };
    qe_status status = qe_model_create(&config, &session->settings.recipe, &session->model, error_out);
    return status == QE_ERROR_ARGUMENT ? blame_model(&session->settings, error_out) : status;
}

/* A slip in a name is told as that; but "orders" may be a file, as it is for `check`. */
static int is_path(const char *schedule) {
    if (qe_cli_looks_like_path(schedule)) return 1;
    return !qe_schedule_argument_is_name(schedule) && access(schedule, F_OK) == 0;
}

static qe_status read_csv(qe_session *session, qe_error *error_out) {
    const char *path = session->settings.pipeline.schedule;
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        qe_error_set(error_out, QE_ERROR_IO, "pipeline.schedule takes a name or a CSV file", "cannot open: %s",
                     strerror(errno));
        return qe_error_place(error_out, path, 0, 0);
    }
    qe_status status = qe_schedule_read_csv(file, path, &session->schedule, error_out);
    fclose(file);
    if (status != QE_OK) return status;
    const qe_settings_pipeline *p = &session->settings.pipeline;
    if (session->schedule.ranks != p->ranks || session->schedule.microbatches != p->microbatches)
        qe_error_set(error_out, QE_ERROR_CONFIG, "set pipeline.ranks and pipeline.microbatches to what the file holds",
                     "%u rank%s and %u microbatch%s; the configuration says %u and %u", session->schedule.ranks,
                     qe_cli_s(session->schedule.ranks), session->schedule.microbatches,
                     qe_cli_es(session->schedule.microbatches), p->ranks, p->microbatches);
    else if (session->schedule.stages > session->settings.model.layers)
        qe_error_set(error_out, QE_ERROR_CONFIG, "a stage needs a layer: use a schedule with fewer stages",
                     "%u stages for a model of %u layer%s", session->schedule.stages, session->settings.model.layers,
                     qe_cli_s(session->settings.model.layers));
    else
        return QE_OK;
    return qe_error_place(error_out, path, 0, 0);
}

/* What decides whether a named order can be had. */
static const char *const sizes_of_schedule[] = {"pipeline.schedule", "pipeline.microbatches", "pipeline.ranks",
                                                "pipeline.chunks", NULL};

static qe_status blame_sizes(const qe_settings *settings, qe_error *error_out) {
    qe_status status = error_out->status;
    if (status != QE_ERROR_ARGUMENT && status != QE_ERROR_LIMIT) return status;
    return qe_settings_blame(settings, sizes_of_schedule, error_out);
}

/* An order that cannot be had of twice as many microbatches as ranks either, which all take, wants other chunks. */
static int wants_chunks(const qe_schedule_request *request) {
    qe_schedule_request usual = *request;
    qe_schedule made;
    usual.microbatches = 2 * request->ranks;
    if (qe_schedule_generate(&usual, &made, NULL) != QE_OK) return 1;
    qe_schedule_deinit(&made);
    return 0;
}

static qe_status blame_request(const qe_settings *settings, const qe_schedule_request *request, qe_error *error_out) {
    static const char *const chunks[] = {"pipeline.schedule", "pipeline.chunks", NULL};
    static const char *const others[] = {"pipeline.schedule", "pipeline.microbatches", "pipeline.ranks", NULL};
    if (error_out->status != QE_ERROR_ARGUMENT) return blame_sizes(settings, error_out);
    return qe_settings_blame(settings, wants_chunks(request) ? chunks : others, error_out);
}

static qe_status named_schedule(qe_session *session, qe_error *error_out) {
    static const char *const name[] = {"pipeline.schedule", NULL};
    const qe_settings_pipeline *p = &session->settings.pipeline;
    char guess[QE_CLI_GUESS_BYTES];
    if (!qe_schedule_argument_is_name(p->schedule)) {
        qe_error_set(error_out, QE_ERROR_ARGUMENT, "use auto, " QE_SCHEDULE_NAMES_PLANNED ", or a CSV file of your own",
                     "no schedule is named \"%.64s\"%s", p->schedule,
                     qe_schedule_argument_guess(p->schedule, 1, guess));
        return qe_settings_blame(&session->settings, name, error_out);
    }
    qe_schedule_request request = {
        .name = p->schedule, .ranks = p->ranks, .chunks = p->chunks, .microbatches = p->microbatches};
    qe_status status = qe_schedule_generate(&request, &session->schedule, error_out);
    return status == QE_OK ? QE_OK : blame_request(&session->settings, &request, error_out);
}

/* The baseline runs the stages of the configured schedule on one rank, one microbatch at a time. */
static qe_status make_schedule(qe_session *session, const qe_plan_options *plan, int evaluates,
                               qe_error *error_out) {
    const char *name = session->settings.pipeline.schedule;
    QE_TRY(strcmp(name, "auto") == 0 ? qe_session_search(&session->settings, session->model, plan, evaluates,
                                                         &session->schedule, error_out)
           : is_path(name)           ? read_csv(session, error_out)
                                     : named_schedule(session, error_out));
    if (session->settings.train.mode != QE_TRAIN_BASELINE) return QE_OK;
    qe_schedule_request request = {.name = "sequential",
                                   .ranks = 1,
                                   .chunks = session->schedule.stages,
                                   .microbatches = session->schedule.microbatches};
    qe_schedule_deinit(&session->schedule);
    return qe_schedule_generate(&request, &session->schedule, error_out);
}

/* Moves the action at `from` to `to`; those between close up. */
static void move_action(qe_action *actions, uint32_t from, uint32_t to) {
    qe_action moved = actions[from];
    for (; from < to; from++) actions[from] = actions[from + 1];
    for (; from > to; from--) actions[from] = actions[from - 1];
    actions[to] = moved;
}

/* First action of a rank that is (or is not) a forward of `microbatch` or later; `end` when there is none. */
static uint32_t find_action(const qe_schedule *schedule, uint32_t rank, int forward, uint32_t microbatch) {
    uint32_t i = schedule->rank_begin[rank], end = schedule->rank_begin[rank + 1];
    while (i < end &&
           ((schedule->actions[i].kind == QE_ACTION_F) != forward || schedule->actions[i].microbatch < microbatch))
        i++;
    return i;
}

/* The first rank waits for a gradient before its second forward; the last rank for that forward before the gradient. */
static void close_cycle(qe_schedule *schedule) {
    uint32_t last = schedule->ranks - 1;
    uint32_t forward = find_action(schedule, 0, 1, 1), backward = find_action(schedule, 0, 0, 0);
    if (forward < backward && backward < schedule->rank_begin[1]) move_action(schedule->actions, backward, forward);
    forward = find_action(schedule, last, 1, 1);
    backward = find_action(schedule, last, 0, 0);
    if (backward < forward && forward < schedule->rank_begin[last + 1])
        move_action(schedule->actions, backward, forward);
}

static void drop_last_of_first_rank(qe_schedule *schedule) {
    uint32_t end = schedule->rank_begin[1], all = schedule->rank_begin[schedule->ranks];
    memmove(&schedule->actions[end - 1], &schedule->actions[end], (all - end) * sizeof *schedule->actions);
    for (uint32_t rank = 1; rank <= schedule->ranks; rank++) schedule->rank_begin[rank]--;
}

/* Spoils a schedule so that it breaks one schedule rule (--inject schedule.*). */
static void spoil(qe_schedule *schedule, qe_rule rule) {
    qe_action *first = schedule->actions;
    uint32_t count = schedule->rank_begin[1];
    if (count < 2) return;
    if (rule == QE_RULE_SCHEDULE_DUPLICATE) first[count - 2] = first[count - 1];
    if (rule == QE_RULE_SCHEDULE_MISSING) drop_last_of_first_rank(schedule);
    if (rule == QE_RULE_SCHEDULE_ORDER) move_action(first, count - 1, 0);
    if (rule == QE_RULE_SCHEDULE_PLACE) /* another rank's stage, or one that is not there */
        first[0].stage = schedule->ranks > 1 ? first[count].stage : (uint16_t)schedule->stages;
    if (rule == QE_RULE_SCHEDULE_CYCLE && schedule->ranks > 1) close_cycle(schedule);
}

/* A schedule that is an order, of which no plan can be made. */
static qe_status blame_plan(const qe_session *session, qe_error *error_out) {
    static const char *const name[] = {"pipeline.schedule", NULL};
    const char *schedule = session->settings.pipeline.schedule;
    if (error_out->status != QE_ERROR_UNSUPPORTED) return blame_sizes(&session->settings, error_out);
    if (is_path(schedule)) return qe_error_place(error_out, schedule, 0, 0);
    return qe_settings_blame(&session->settings, name, error_out);
}

/* Of the model, or of the stopwatch in front of it. */
static qe_status create_plan(qe_session *session, const qe_schedule *schedule, const qe_plan_options *options,
                             qe_plan **plan_out, qe_error *error_out) {
    const qe_model_ops *ops = session->watch != NULL ? qe_stopwatch_table() : qe_model_table();
    const void *model = session->watch != NULL ? (const void *)session->watch : session->model;
    qe_status status = qe_plan_create(schedule, ops, model, options, plan_out, &session->violations,
                                      &session->counterexample, error_out);
    return status == QE_OK || status == QE_CONTRACT ? status : blame_plan(session, error_out);
}

static qe_status training_plan(qe_session *session, const qe_plan_options *plan, qe_rule broken, qe_error *error_out) {
    if (broken != QE_RULE_NONE) spoil(&session->schedule, broken);
    QE_TRY(create_plan(session, &session->schedule, plan, &session->train, error_out));
    if (broken == QE_RULE_NONE) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "try pipeline.ranks of 2 and 4 microbatches, or another rule",
                        "no move of one action makes this schedule break %s", qe_rule_id(broken));
}

/* Before anything is taken. */
static qe_status check_memory(const qe_session *session, qe_error *error_out) {
    static const char *const limits[] = {"train.memory_limit", NULL};
    uint64_t limit = session->settings.train.memory_limit_bytes;
    if (limit == 0) return QE_OK;
    qe_status status = qe_memory_check(session->train, session->evaluate, limit, error_out);
    return status == QE_ERROR_ARGUMENT ? qe_settings_blame(&session->settings, limits, error_out) : status;
}

static qe_status make_plans(qe_session *session, const qe_session_options *options, qe_error *error_out) {
    const qe_settings *s = &session->settings;
    int baseline = s->train.mode == QE_TRAIN_BASELINE;
    qe_plan_options plan = {.cache_weights = s->pipeline.cache_weights && !baseline, .reuse_slots = !baseline,
                            .share_slots = !baseline};
    int writes_anew = session->device == QE_DEVICE_TE; /* its fills know of no seal */
    plan.fill_ahead = s->train.mode == QE_TRAIN_CAPTURED && !writes_anew;
    plan.placement = baseline || s->pipeline.placement == QE_PLACEMENT_COPY ? QE_GRADIENT_COPY : QE_GRADIENT_DIRECT;
    plan.sums_apart = !baseline && qe_device_backend(session->device)->numerics.sums_apart;
    QE_TRY(make_schedule(session, &plan, !options->no_evaluation, error_out));
    if (options->training) QE_TRY(training_plan(session, &plan, options->break_schedule, error_out));
    if (options->no_evaluation) return check_memory(session, error_out);
    QE_TRY(qe_evaluation_schedule(&session->schedule, &session->evaluation_schedule, error_out));
    QE_TRY(create_plan(session, &session->evaluation_schedule, &qe_evaluation_options, &session->evaluate, error_out));
    return check_memory(session, error_out);
}

static void device_opened(qe_device *device, const void *context) {
    qe_session *session = (qe_session *)(uintptr_t)context;
    const qe_settings_train *t = &session->settings.train;
    if (session->first_device == NULL) {
        session->first_device = device;
        session->use = qe_device_use_of(session->device, device); /* the driver's and the libraries' */
    }
    qe_device_join(session->device, device, session->identity, sizeof session->identity);
    snprintf(session->backend, sizeof session->backend, "%s%s", session->device == QE_DEVICE_CHECK ? "check on " : "",
             session->identity);
    qe_error *error = session->joined.status == QE_OK ? &session->joined : NULL;
    char timeline[sizeof t->timeline + 16]; /* of further ranks: a file of their own, or only the last one's is left */
    snprintf(timeline, sizeof timeline, "%s", t->timeline);
    if (t->timeline[0] != 0 && session->devices > 0)
        snprintf(timeline, sizeof timeline, "%s.%u", t->timeline, session->devices);
    session->devices++;
    (void)qe_device_configure(session->device, device, t->algorithms, session->honours, timeline, t->nvtx,
                              session->settings.contracts.order, error);
}

static qe_capture capture_of(const qe_settings_train *train) {
    if (train->mode != QE_TRAIN_CAPTURED) return QE_CAPTURE_NONE;
    return train->capture == QE_CAPTURE_UNIT_LAYER    ? QE_CAPTURE_LAYER
           : train->capture == QE_CAPTURE_UNIT_ACTION ? QE_CAPTURE_ACTION
                                                      : QE_CAPTURE_STEP;
}

/* Who refused memory knows what it was asked for last; plans know how much a rank takes of all kinds. */
static void tell_whole(const qe_session *session, qe_error *error) {
    const qe_plan *any = session->train != NULL ? session->train : session->evaluate;
    uint64_t most = 0;
    for (uint32_t rank = 0; rank < any->ranks; rank++) {
        const qe_memory_ledger ledger = qe_memory_foretell(session->train, session->evaluate, rank);
        const uint64_t bytes = qe_memory_ledger_total(&ledger);
        if (bytes > most) most = bytes;
    }
    const size_t length = strlen(error->message);
    snprintf(error->message + length, sizeof error->message - length, "; a rank takes up to %llu in all (%u rank%s)",
             (unsigned long long)most, any->ranks, qe_cli_s(any->ranks));
}

static qe_status make_team(qe_session *session, qe_error *error_out) {
    QE_TRY(qe_device_world_create(session->device, session->schedule.ranks, &session->world, error_out));
    qe_team_options options = {
        .backend = qe_device_backend(session->device),
        .comm = qe_device_comm(session->device),
        .world = session->world,
        .contracts = (qe_contracts)session->settings.contracts.mode,
        .capture = capture_of(&session->settings.train),
        .opened = device_opened,
        .opened_context = session,
    };
    const qe_status status = qe_team_create(session->train, session->evaluate, &options, &session->team, error_out);
    if (session->joined.status != QE_OK) { /* nobody could be told while the device was opened; it is the cause */
        *error_out = session->joined;
        return session->joined.status;
    }
    if (status == QE_ERROR_MEMORY) tell_whole(session, error_out);
    QE_TRY(status);
    uint64_t before = session->use.used_bytes;
    session->use = qe_device_use_of(session->device, session->first_device);
    session->use.used_bytes -= before;
    return QE_OK;
}

static qe_status make_batch(qe_session *session, qe_error *error_out) {
    const qe_settings *s = &session->settings;
    session->sequences_per_step = session->schedule.microbatches * s->train.sequences;
    size_t count = (size_t)session->sequences_per_step * s->model.sequence;
    session->tokens = calloc(count, sizeof *session->tokens);
    session->targets = calloc(count, sizeof *session->targets);
    session->losses = calloc(session->schedule.microbatches, sizeof *session->losses);
    if (session->tokens != NULL && session->targets != NULL && session->losses != NULL) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_MEMORY, "use fewer or shorter sequences",
                        "no memory for a batch of %zu tokens", count);
}

qe_status qe_session_open(qe_session *session, const qe_settings *settings, const qe_session_options *options,
                          qe_error *error_out) {
    memset(session, 0, sizeof *session);
    session->settings = *settings;
    session->device = options->device;
    session->honours = settings->train.algorithms[0] != 0 && access(settings->train.algorithms, F_OK) == 0;
    if (options->data) QE_TRY(open_data(session, error_out));
    QE_TRY(create_model(session, error_out));
    session->watch = options->watch;
    if (session->watch != NULL) session->watch->model = session->model;
    QE_TRY(make_plans(session, options, error_out));
    QE_TRY(make_team(session, error_out));
    return make_batch(session, error_out);
}

void qe_session_close(qe_session *session) {
    qe_team_destroy(session->team);
    qe_device_world_destroy(session->device, session->world);
    qe_plan_destroy(session->train);
    qe_plan_destroy(session->evaluate);
    qe_schedule_deinit(&session->schedule);
    qe_schedule_deinit(&session->evaluation_schedule);
    qe_counterexample_deinit(&session->counterexample);
    qe_model_destroy(session->model);
    if (session->dataset != NULL) qe_dataset_close(session->dataset);
    free(session->tokens);
    free(session->targets);
    free(session->losses);
    memset(session, 0, sizeof *session);
}

qe_capture_use qe_session_captured(const qe_session *session) {
    qe_capture_use all = {0};
    for (uint32_t rank = 0; rank < session->schedule.ranks; rank++) {
        qe_capture_use use = qe_team_captured(session->team, rank);
        all.graphs += use.graphs, all.segments += use.segments, all.slots += use.slots;
        all.ops += use.ops, all.bytes += use.bytes, all.seconds += use.seconds;
    }
    return all;
}

uint64_t qe_session_position(const qe_session *session, uint64_t step) {
    QE_ASSERT(step >= session->steps_before);
    return session->sequences_before + (step - session->steps_before) * session->sequences_per_step;
}

void qe_session_batch(qe_session *session, uint64_t step) {
    uint64_t first = qe_session_position(session, step - 1);
    qe_dataset_batch(session->dataset, QE_DATA_TRAIN, session->settings.train.seed, first, session->sequences_per_step,
                     session->tokens, session->targets);
}

qe_learning_rate qe_session_rate(const qe_session *session) {
    const qe_settings_train *t = &session->settings.train;
    return (qe_learning_rate){.peak = t->learning_rate,
                              .minimum = t->minimum_learning_rate,
                              .warmup_steps = t->warmup,
                              .steps = t->steps};
}

typedef struct step_constants {
    qe_optimizer optimizer;
    uint64_t step;
} step_constants;

static qe_adamw constants_of(const void *context, double gradient_norm) {
    const step_constants *constants = context;
    return qe_optimizer_step(&constants->optimizer, constants->step, gradient_norm);
}

qe_status qe_session_step_given(qe_session *session, uint64_t step, qe_step_result *result_out, qe_error *error_out) {
    const qe_settings_train *t = &session->settings.train;
    step_constants constants = {
        .optimizer = {.rate = qe_session_rate(session),
                      .beta1 = t->beta1,
                      .beta2 = t->beta2,
                      .epsilon = t->epsilon,
                      .weight_decay = t->weight_decay,
                      .clip_norm = t->gradient_clip},
        .step = step,
    };
    qe_step_optimizer optimizer = {.constants = constants_of, .context = &constants};
    qe_batch batch = {.tokens = session->tokens, .targets = session->targets};
    return qe_team_step(session->team, &batch, &optimizer, result_out, error_out);
}

qe_status qe_session_step(qe_session *session, uint64_t step, qe_step_result *result_out, qe_error *error_out) {
    qe_session_batch(session, step);
    return qe_session_step_given(session, step, result_out, error_out);
}

static uint64_t counted(const qe_session *session) {
    uint64_t count = 0, all = (uint64_t)session->sequences_per_step * session->settings.model.sequence;
    for (uint64_t i = 0; i < all; i++) count += session->targets[i] >= 0;
    return count;
}

/* Windows of this batch from `limit` on are not counted. */
static void cut_batch(qe_session *session, uint64_t first, uint64_t limit) {
    uint64_t sequence = session->settings.model.sequence;
    for (uint64_t w = 0; w < session->sequences_per_step; w++)
        for (uint64_t i = 0; first + w >= limit && i < sequence; i++) session->targets[w * sequence + i] = -1;
}

qe_status qe_session_validate(qe_session *session, uint64_t sequences, const volatile sig_atomic_t *stop,
                              double *loss_out, qe_step_result *result_out, qe_error *error_out) {
    uint64_t windows = qe_dataset_describe(session->dataset).validation_windows, tokens = 0;
    if (sequences == 0 || sequences > windows) sequences = windows;
    double sum = 0;
    for (uint64_t first = 0; first < sequences; first += session->sequences_per_step) {
        if (*stop) return qe_error_set(error_out, QE_ERROR_INTERRUPTED, NULL, "the validation was interrupted");
        qe_dataset_batch(session->dataset, QE_DATA_VALIDATION, 0, first, session->sequences_per_step, session->tokens,
                         session->targets);
        cut_batch(session, first, sequences);
        qe_batch batch = {.tokens = session->tokens, .targets = session->targets};
        QE_TRY(qe_team_evaluate(session->team, &batch, session->losses, NULL, 0, 0, result_out, error_out));
        for (uint32_t m = 0; m < session->schedule.microbatches; m++) sum += session->losses[m];
        tokens += counted(session);
    }
    *loss_out = tokens == 0 ? 0 : sum / (double)tokens;
    return QE_OK;
}

qe_status qe_session_initialize(qe_session *session, qe_error *error_out) {
    for (uint32_t i = 0; i < qe_model_parameter_count(session->model); i++) {
        const qe_parameter *parameter = qe_model_parameter(session->model, i);
        float *values = malloc((size_t)parameter->rows * parameter->columns * sizeof *values);
        if (values == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for %s", parameter->name);
        qe_model_initialize(session->model, i, session->settings.train.seed, values);
        qe_status status = qe_team_parameter_write(session->team, i, values, error_out);
        free(values);
        if (status != QE_OK) return status;
    }
    return QE_OK;
}
