/* command_train.c - `qeffect train`: the training loop, what it prints, and what it leaves. */
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <jansson.h>
#include "base/assert.h"
#include "base/seconds.h"
#include "base/text.h"
#include "cli/checkpoints.h"
#include "cli/observed.h"
#include "cli/output.h"

typedef struct training {
    qe_cli *cli;
    qe_session session;
    json_t *document, *curve, *validation;
    qe_progress progress;
    uint64_t steps_done, vetoed, tokens;
    qe_rule inject;
    uint64_t inject_step;
    qe_device_kind device;
    double last_loss, validation_loss, seconds;
    uint64_t certified, judged, gradient_copies;
    qe_observed observed;
    qe_keeping keeping;
    qe_resume resume;
    int resumes;
    qe_rule refused; /* a checkpoint rule that was broken */
    qe_error lost;   /* why not all was written at the end; QE_OK: all was */
    int kept;        /* the weights are written */
} training;

static volatile sig_atomic_t interrupted;
static void on_interrupt(int signal_number) {
    (void)signal_number;
    interrupted = 1;
}

static void catch_interrupt(void) {
    struct sigaction action = {.sa_handler = on_interrupt,
                               .sa_flags = (int)SA_RESETHAND}; /* a second Ctrl-C ends at once */
    struct sigaction before;
    sigemptyset(&action.sa_mask);
    /* A shell starts what runs in the background with Ctrl-C ignored; it stays so. */
    if (sigaction(SIGINT, NULL, &before) != 0 || before.sa_handler != SIG_IGN) sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

/* RULE or RULE@STEP. */
static int parse_inject(qe_cli *cli, training *t) {
    const char *text = qe_cli_value(cli, "inject");
    char id[64];
    if (text == NULL) return QE_EXIT_OK;
    size_t length = strcspn(text, "@");
    snprintf(id, sizeof id, "%.*s", (int)length, text);
    t->inject = qe_rule_from_id(id);
    t->inject_step = 2;
    if (t->inject == QE_RULE_NONE) {
        const char *ids[QE_RULE_COUNT];
        char guess[QE_CLI_GUESS_BYTES];
        for (int rule = 1; rule < QE_RULE_COUNT; rule++) ids[rule - 1] = qe_rule_id((qe_rule)rule);
        return qe_cli_usage(cli, "there is no rule '%s' in docs/rules.md%s", id,
                            qe_cli_guess(id, ids, QE_RULE_COUNT - 1, guess));
    }
    if (text[length] == '@' && (!qe_text_to_u64(text + length + 1, &t->inject_step) || t->inject_step == 0))
        return qe_cli_usage(cli, "--inject %s: the step behind @ is '%s'; expected a whole number from 1", text,
                            text + length + 1);
    return QE_EXIT_OK;
}

static int is_schedule_rule(qe_rule rule) {
    return rule >= QE_RULE_SCHEDULE_PLACE && rule <= QE_RULE_SCHEDULE_CYCLE;
}

/* What graphs replace, and what they cost: of layers and actions, no more comes with further microbatches. */
static void describe_captured(const training *t) {
    qe_capture_use all = qe_session_captured(&t->session);
    if (all.graphs == 0) return;
    printf("captured  %u graph%s of %llu ops for %u launches a step, in %.3f s; %.1f KiB, %.1f a slot\n", all.graphs,
           qe_cli_s(all.graphs), (unsigned long long)all.ops, all.segments, all.seconds, (double)all.bytes / 1024,
           (double)all.bytes / 1024 / (all.slots > 0 ? all.slots : 1));
}

/* NULL, which a document leaves out: none. */
static json_t *captured_json(const training *t) {
    qe_capture_use all = qe_session_captured(&t->session);
    if (all.graphs == 0) return NULL;
    return json_pack("{s:i, s:i, s:i, s:I, s:I, s:f}", "graphs", (int)all.graphs, "launches", (int)all.segments,
                     "slots", (int)all.slots, "ops", (json_int_t)all.ops, "bytes", (json_int_t)all.bytes, "seconds",
                     all.seconds);
}

static void describe(training *t) {
    const qe_settings *s = &t->session.settings;
    qe_dataset_info data = qe_dataset_describe(t->session.dataset);
    char sizes[QE_CLI_SIZES_BYTES];
    if (t->cli->json) return;
    printf("model     %llu parameters: %u layer%s, hidden %u, heads %u/%u, ffn %u, vocab %u, sequence %u\n",
           (unsigned long long)qe_model_scalar_count(t->session.model), s->model.layers, qe_cli_s(s->model.layers),
           s->model.hidden, s->model.heads, s->model.kv_heads, s->model.ffn, s->model.vocab, s->model.sequence);
    printf("data      %s: %llu tokens, %llu for validation\n", data.name, (unsigned long long)data.tokens,
           (unsigned long long)data.validation_tokens);
    printf("pipeline  %s: %s of %u sequence%s\n",
           s->train.mode == QE_TRAIN_BASELINE ? "baseline (sequential)" : s->pipeline.schedule,
           qe_cli_sizes(t->session.schedule.ranks, t->session.schedule.stages, t->session.schedule.microbatches, sizes),
           s->train.sequences, qe_cli_s(s->train.sequences));
    printf("recipe    %s   backend  %s   contracts  %s\n", qe_recipe_name(s->recipe.kind), t->session.backend,
           s->contracts.mode == QE_CONTRACTS_SETTING_TRAP  ? "trap"
           : s->contracts.mode == QE_CONTRACTS_SETTING_OFF ? "off"
                                                           : "observe");
    describe_captured(t);
    if (t->resumes)
        printf("resumed   step %llu of %s\n", (unsigned long long)qe_resume_step(&t->resume),
               qe_resume_path(&t->resume));
    fflush(stdout);
}

static qe_status validate(training *t, uint64_t step, uint64_t sequences, qe_step_result *result, qe_error *error) {
    if (qe_dataset_describe(t->session.dataset).validation_windows == 0) return QE_OK;
    double loss;
    qe_status status = qe_session_validate(&t->session, sequences, &interrupted, &loss, result, error);
    if (status == QE_ERROR_INTERRUPTED && interrupted) return QE_OK; /* a mean over part of the windows says nothing */
    QE_TRY(status);
    t->validation_loss = loss;
    qe_observed_note(&t->observed, &t->session, "validation", step, result);
    qe_progress_validation(&t->progress, step, t->validation_loss);
    json_array_append_new(t->validation,
                          json_pack("{s:I, s:f}", "step", (json_int_t)step, "validation_loss", t->validation_loss));
    return QE_OK;
}

static qe_status vetoed(training *t, uint64_t step, double loss, qe_error *error) {
    t->vetoed++;
    if (t->session.settings.train.nonfinite == QE_NONFINITE_SKIP) return QE_OK;
    char text[64];
    snprintf(text, sizeof text, "%.6g", loss);
    qe_error_set(error, QE_CONTRACT,
                 "lower train.learning_rate, or set train.nonfinite=skip to count such steps and go on",
                 "step.nonfinite: loss or gradient norm of step %llu is not finite (loss %s); nothing was committed",
                 (unsigned long long)step, text);
    return QE_CONTRACT;
}

static qe_status one_step(training *t, uint64_t step, qe_step_result *result, qe_error *error) {
    if (t->inject != QE_RULE_NONE && t->inject_step == step) QE_TRY(qe_team_inject(t->session.team, t->inject, error));
    QE_TRY(qe_session_step(&t->session, step, result, error));
    qe_observed_note(&t->observed, &t->session, "training", step, result);
    if (result->vetoed) return vetoed(t, step, result->loss, error);
    t->certified += result->certified;
    t->gradient_copies = result->gradient_copies;
    t->judged += result->judged;
    t->last_loss = result->loss;
    if (t->cli->json)
        json_array_append_new(t->curve, json_pack("{s:I, s:f, s:f}", "step", (json_int_t)step, "loss", result->loss,
                                                  "gradient_norm", result->gradient_norm));
    return QE_OK;
}

static qe_status loop(training *t, qe_step_result *result, qe_error *error) {
    const qe_settings_train *settings = &t->session.settings.train;
    for (uint64_t step = t->steps_done + 1; step <= settings->steps && !interrupted; step++) {
        double begin = qe_seconds_now();
        QE_TRY(one_step(t, step, result, error));
        double took = qe_seconds_now() - begin;
        t->seconds += took;
        t->steps_done = step;
        t->tokens += (uint64_t)t->session.sequences_per_step * t->session.settings.model.sequence;
        qe_progress_step(&t->progress, step, result->loss, (double)t->tokens / t->seconds);
        QE_TRY(qe_keeping_step(&t->keeping, step, took, error));
        int due = settings->evaluate_every != 0 && step % settings->evaluate_every == 0 && step != settings->steps;
        if (due) QE_TRY(validate(t, step, settings->evaluate_sequences, result, error));
    }
    if (interrupted) return QE_OK;
    QE_TRY(qe_keeping_last(&t->keeping, t->steps_done, error)); /* the last validation may take hours */
    return validate(t, t->steps_done, 0, result, error);
}

/* All that could be trained is trained: what cannot be written is told, and the rest of it is kept. */
static void note_lost(training *t, const char *what, const qe_error *error) {
    qe_progress_end(&t->progress);
    fprintf(stderr, "%s of step %llu could not be written:\n", what, (unsigned long long)t->steps_done);
    qe_cli_print_error(error);
    if (t->lost.status == QE_OK) t->lost = *error;
}

static void keep(training *t) {
    const char *path = t->session.settings.checkpoint.path;
    qe_error error = {0};
    if (path[0] == 0 || t->steps_done == 0) return;
    if (qe_keeping_finish(&t->keeping, t->steps_done, &error) != QE_OK) note_lost(t, "the checkpoint", &error);
    error = (qe_error){0};
    t->kept = qe_session_save(&t->session, path, &error) == QE_OK;
    if (!t->kept) note_lost(t, "the weights", &error);
}

static const char *why_not_kept(const training *t) {
    if (t->session.settings.checkpoint.path[0] == 0) return "checkpoint.path is empty";
    return t->steps_done == 0 ? "no step was finished" : "they could not be written";
}

static json_t *rank_memory_json(const training *t, uint32_t rank) {
    qe_memory_use use = qe_team_memory(t->session.team, rank);
    json_t *fields = json_pack("{s:i, s:I, s:I, s:I, s:I}", "rank", (int)rank, "state_bytes",
                               (json_int_t)use.state_bytes, "cache_bytes", (json_int_t)use.cache_bytes, "slot_bytes",
                               (json_int_t)use.slot_bytes, "scratch_bytes", (json_int_t)use.scratch_bytes);
    qe_memory_ledger foretold = qe_memory_foretell(t->session.train, t->session.evaluate, rank);
    qe_memory_ledger taken = qe_team_memory_ledger(t->session.team, rank);
    json_object_set_new(fields, "foretold", qe_cli_memory_json(&foretold));
    json_object_set_new(fields, "taken", qe_cli_memory_json(&taken));
    return fields;
}

static json_t *memory_json(const training *t) {
    json_t *list = json_array();
    for (uint32_t rank = 0; rank < t->session.schedule.ranks; rank++)
        json_array_append_new(list, rank_memory_json(t, rank));
    return list;
}

/* A run that is at its end does not go on by itself: the cosine ends there, too. */
static void tell_checkpoints(const training *t, const char *path) {
    uint64_t steps = t->session.settings.train.steps;
    printf("checkpoints are in %s, the last of step %llu", path, (unsigned long long)t->keeping.written_step);
    if (t->keeping.postponed > 0)
        printf(" (%llu fell due while one was being written, and waited)", (unsigned long long)t->keeping.postponed);
    printf("; `%s train --resume %s", t->cli->program, path);
    if (t->keeping.written_step < steps) printf("` goes on from it\n");
    else printf(" --set train.steps=%llu --new-lineage` trains longer\n", 2ULL * steps);
}

static void tell_kept(const training *t) {
    const char *path = t->session.settings.checkpoint.path;
    if (t->kept) printf("weights are in %s; `%s generate %s` continues a text\n", path, t->cli->program, path);
    if (t->keeping.written > 0) tell_checkpoints(t, path);
    if (!t->kept) printf("no weights were kept: %s\n", why_not_kept(t));
}

static int finish(training *t, const char *hash) {
    double rate = t->seconds > 0 ? (double)t->tokens / t->seconds : 0;
    const char *path = t->session.settings.checkpoint.path;
    qe_progress_end(&t->progress);
    qe_observed_print(&t->observed, &t->session, t->cli->program);
    int status = t->lost.status != QE_OK ? QE_EXIT_ERROR : interrupted ? QE_EXIT_INTERRUPTED : QE_EXIT_OK;
    if (!t->cli->json) {
        printf("%s after %llu step%s", interrupted ? "interrupted" : "done", (unsigned long long)t->steps_done,
               qe_cli_s(t->steps_done));
        if (t->tokens > 0) printf(": loss %.4f", t->last_loss);
        if (!interrupted && json_array_size(t->validation) > 0)
            printf(", validation %.4f nats/token", t->validation_loss);
        if (rate > 0) printf(", %.0f tokens/s", rate);
        if (t->vetoed > 0)
            printf(", %llu step%s skipped (not finite)", (unsigned long long)t->vetoed, qe_cli_s(t->vetoed));
        printf("\nstate_hash %s\n", hash);
        tell_kept(t);
        return status;
    }
    json_object_set_new(t->document, "state_hash", json_string(hash));
    json_object_set_new(t->document, "steps", json_integer((json_int_t)t->steps_done));
    json_object_set_new(t->document, "vetoed", json_integer((json_int_t)t->vetoed));
    json_object_set_new(t->document, "interrupted", json_boolean(interrupted));
    json_object_set_new(t->document, "tokens_per_s", json_real(rate));
    uint64_t here = t->steps_done - qe_resume_step(&t->resume);
    if (here > 0) json_object_set_new(t->document, "step_ms", json_real(1e3 * t->seconds / (double)here));
    if (here > 0 || !t->resumes) json_object_set_new(t->document, "loss", json_real(t->last_loss));
    if (!interrupted && json_array_size(t->validation) > 0)
        json_object_set_new(t->document, "validation_loss", json_real(t->validation_loss));
    json_object_set(t->document, "loss_curve", t->curve);
    json_object_set(t->document, "validation", t->validation);
    json_object_set_new(t->document, "gradient_copies", json_integer((json_int_t)t->gradient_copies));
    json_object_set_new(t->document, "certified_checks", json_integer((json_int_t)t->certified));
    json_object_set_new(t->document, "full_checks", json_integer((json_int_t)t->judged));
    if (t->session.settings.contracts.mode == QE_CONTRACTS_SETTING_OBSERVE)
        json_object_set_new(t->document, "observed", qe_observed_json(&t->observed));
    if (t->observed.traced)
        json_object_set_new(t->document, "trace", qe_cli_json_text(t->session.settings.contracts.trace));
    json_object_set_new(t->document, "memory", memory_json(t));
    json_object_set_new(t->document, "captured", captured_json(t));
    json_object_set_new(t->document, "backend", json_string(t->session.backend));
    if (t->kept) json_object_set_new(t->document, "checkpoint", qe_cli_json_text(path));
    if (t->lost.status != QE_OK) json_object_set_new(t->document, "error", qe_cli_error_json(&t->lost));
    if (t->keeping.writer != NULL) json_object_set_new(t->document, "checkpoints", qe_keeping_json(&t->keeping));
    if (t->resumes) {
        json_object_set_new(t->document, "resumed_from", qe_cli_json_text(qe_resume_path(&t->resume)));
        json_object_set_new(t->document, "resumed_step", json_integer((json_int_t)qe_resume_step(&t->resume)));
    }
    json_t *document = t->document;
    t->document = NULL;
    return qe_cli_json(document, status);
}

static qe_status dump_batches(training *t, uint64_t steps, const char *path, qe_error *error) {
    uint64_t shape[3] = {steps, t->session.sequences_per_step, t->session.settings.model.sequence};
    size_t one = (size_t)shape[1] * shape[2];
    int32_t *tokens = calloc(steps * one, sizeof *tokens), *targets = calloc(steps * one, sizeof *targets);
    qe_status status = tokens && targets ? QE_OK
                                         : qe_error_set(error, QE_ERROR_MEMORY, "dump fewer steps",
                                                        "no memory for %llu batches", (unsigned long long)steps);
    for (uint64_t step = 1; status == QE_OK && step <= steps; step++) {
        qe_session_batch(&t->session, t->steps_done + step);
        memcpy(tokens + (step - 1) * one, t->session.tokens, one * sizeof *tokens);
        memcpy(targets + (step - 1) * one, t->session.targets, one * sizeof *targets);
    }
    if (status == QE_OK) {
        qe_tensor tensors[2] = {qe_tensor_make("tokens", QE_DTYPE_I32, 3, shape, tokens),
                                qe_tensor_make("targets", QE_DTYPE_I32, 3, shape, targets)};
        status = qe_safetensors_write(path, tensors, 2, NULL, 0, error);
    }
    free(tokens);
    free(targets);
    return status;
}

static qe_status prepare(training *t, uint64_t dump_steps, qe_error *error) {
    const char *initial = qe_cli_value(t->cli, "dump-initial"), *batches = qe_cli_value(t->cli, "dump-batches");
    if (t->resumes) {
        QE_TRY(qe_resume_apply(&t->resume, &t->session, qe_cli_has(t->cli, "new-lineage"), &t->refused, error));
        t->steps_done = qe_resume_step(&t->resume);
    } else QE_TRY(qe_session_initialize(&t->session, error));
    if (initial != NULL) QE_TRY(qe_session_save_file(&t->session, initial, error));
    if (batches != NULL) QE_TRY(dump_batches(t, dump_steps, batches, error));
    return qe_keeping_open(&t->keeping, &t->session, &t->progress, t->resumes ? &t->resume : NULL, error);
}

static int fail_schedule(training *t) {
    char text[2048];
    const qe_counterexample *counterexample = &t->session.counterexample;
    qe_counterexample_text(counterexample, text, sizeof text);
    fprintf(stderr, "refused before anything ran: %s\n", text);
    if (!t->cli->json) return QE_EXIT_CONTRACT;
    return qe_cli_json(
        json_pack("{s:{s:s, s:o}}", "counterexample", "rule", qe_rule_id(counterexample->rule), "message",
                  qe_cli_json_text(text)),
        QE_EXIT_CONTRACT);
}

/* Not finite losses and checkpoints break rules that no ledger sees: there is no history to write as a trace. */
static json_t *rule_json(qe_rule rule, const qe_error *error) {
    return json_pack("{s:[{s:s, s:o}]}", "violations", "rule", qe_rule_id(rule), "message",
                     qe_cli_json_text(error->message));
}

/* The good steps are not lost with the one that was refused. */
static void save_last(training *t) {
    qe_error error = {0};
    if (t->keeping.writer == NULL) return;
    if (qe_keeping_finish(&t->keeping, t->steps_done, &error) != QE_OK) qe_cli_print_error(&error);
    else
        fprintf(stderr, "a checkpoint of step %llu is in %s\n", (unsigned long long)t->steps_done,
                t->session.settings.checkpoint.path);
}

/* A step was refused and the state is that of the step before, unless the breach came while it was committed. */
static int fail_step(training *t, const qe_step_result *result, qe_error *error) {
    json_t *breach = NULL;
    char hash[QE_STATE_HASH_BYTES];
    qe_error torn = {0};
    if (result->vetoed) {
        qe_cli_print_error(error);
        breach = rule_json(QE_RULE_STEP_NONFINITE, error);
    } else {
        qe_session_report_breach(&t->session, t->cli->program, result, &breach);
    }
    int whole = qe_team_state_hash(t->session.team, hash, &torn) == QE_OK;
    if (whole)
        fprintf(stderr, "weights, optimizer state and scales are those of step %llu: state_hash %s\n",
                (unsigned long long)t->steps_done, hash);
    else qe_cli_print_error(&torn);
    if (whole && t->steps_done > qe_resume_step(&t->resume)) save_last(t);
    if (!t->cli->json) {
        json_decref(breach);
        return QE_EXIT_CONTRACT;
    }
    json_t *document = json_pack("{s:o, s:I}", "breach", breach, "steps", (json_int_t)t->steps_done);
    json_object_set_new(document, whole ? "state_hash" : "state_error", json_string(whole ? hash : torn.message));
    return qe_cli_json(document, QE_EXIT_CONTRACT);
}

/* A checkpoint that breaks a rule: nothing was trained. */
static int fail_checkpoint(const training *t, const qe_error *error) {
    qe_cli_print_error(error);
    if (!t->cli->json) return QE_EXIT_CONTRACT;
    return qe_cli_json(json_pack("{s:o}", "breach", rule_json(t->refused, error)), QE_EXIT_CONTRACT);
}

/* A breach in a checkpoint, in a plan, in a step, or an operating error. */
static int fail(training *t, qe_status status, const qe_step_result *result, qe_error *error) {
    qe_progress_end(&t->progress);
    qe_observed_print(&t->observed, &t->session, t->cli->program);
    if (t->refused != QE_RULE_NONE) return fail_checkpoint(t, error);
    if (t->session.counterexample.rule != QE_RULE_NONE) return fail_schedule(t);
    if (status == QE_CONTRACT && t->session.team != NULL) return fail_step(t, result, error);
    return qe_cli_error(t->cli, error);
}

/* What the run before chose is in the checkpoint, wherever its file has gone. */
static qe_status bring_choices(const training *t, const qe_settings *settings, qe_error *error) {
    const qe_checkpoint *from = t->resumes ? t->resume.checkpoint : NULL;
    if (from == NULL || !qe_device_is_gpu(t->device)) return QE_OK;
    return qe_manifest_choices_restore(qe_checkpoint_manifest(from), settings->train.algorithms, error);
}

/* Whatever is wrong with a place, the way out begins at the key or option that says it. */
static qe_status name_place(qe_status status, const char *what, qe_error *error) {
    size_t length = strlen(error->remedy);
    if (status == QE_OK) return QE_OK;
    snprintf(error->remedy + length, sizeof error->remedy - length, "%sThe place is %s.", length > 0 ? " " : "", what);
    return status;
}

/* Nobody asked for a trace in the folder of the run, which may be one that is only read: without it a trap still is. */
static qe_status try_trace(const qe_settings *settings, qe_error *error) {
    qe_status status = qe_store_try_file(settings->contracts.trace, error);
    if (status == QE_OK || !qe_settings_is_default(settings, "contracts.trace"))
        return name_place(status, "contracts.trace, where empty leaves none", error);
    fprintf(stderr, "a trap would leave no trace (contracts.trace): %s\n", error->message);
    *error = (qe_error){0};
    return QE_OK;
}

/* Before any work: not only when all is trained, or at the trap that is lost without its trace. */
static qe_status try_places(const training *t, const qe_settings *settings, qe_error *error) {
    const char *kept = settings->checkpoint.path, *trace = settings->contracts.trace;
    static const char *const dumps[] = {"dump-initial", "dump-batches"};
    if (kept[0] != 0)
        QE_TRY(name_place(qe_store_try_model(kept, error), "checkpoint.path, where empty keeps nothing", error));
    if (trace[0] != 0 && settings->contracts.mode != QE_CONTRACTS_SETTING_OFF) QE_TRY(try_trace(settings, error));
    for (size_t i = 0; i < sizeof dumps / sizeof *dumps; i++) {
        const char *path = qe_cli_value(t->cli, dumps[i]);
        char what[64];
        snprintf(what, sizeof what, "--%s", dumps[i]);
        if (path != NULL) QE_TRY(name_place(qe_store_try_file(path, error), what, error));
    }
    return QE_OK;
}

static int run_training(training *t, const qe_settings *settings, uint64_t dump_steps) {
    qe_error error = {0};
    qe_step_result result = {0};
    qe_session_options options = {
        .training = 1,
        .data = 1,
        .device = t->device,
        .break_schedule = is_schedule_rule(t->inject) ? t->inject : QE_RULE_NONE,
    };
    if (is_schedule_rule(t->inject)) t->inject = QE_RULE_NONE;
    qe_device_unused_print(t->device, settings);
    qe_session_unused_print(settings);
    qe_status status = try_places(t, settings, &error);
    if (status == QE_OK) status = bring_choices(t, settings, &error);
    if (status == QE_OK) status = qe_session_open(&t->session, settings, &options, &error);
    if (status == QE_OK) status = prepare(t, dump_steps, &error);
    if (status != QE_OK) return fail(t, status, &result, &error);
    describe(t);
    qe_progress_begin(&t->progress, t->cli->terminal, t->steps_done + 1, settings->train.steps);
    catch_interrupt();
    status = loop(t, &result, &error);
    if (status != QE_OK) return fail(t, status, &result, &error);
    char hash[QE_STATE_HASH_BYTES];
    status = qe_team_state_hash(t->session.team, hash, &error);
    if (status != QE_OK) return fail(t, status, &result, &error);
    keep(t);
    return finish(t, hash);
}

/* Without a file, a resumed run goes on with the settings of its checkpoint. */
static int settings_of(training *t, qe_settings *settings) {
    const char *config = t->cli->argument_count > 0 ? t->cli->arguments[0] : NULL;
    const char *path = qe_cli_value(t->cli, "resume");
    qe_error error = {0};
    qe_settings base;
    if (path == NULL) return qe_session_settings(t->cli, config, NULL, settings);
    qe_status status = qe_resume_open(&t->resume, path, &t->refused, &error);
    t->resumes = status == QE_OK;
    if (status == QE_OK && config == NULL) status = qe_resume_settings(&t->resume, &base, &error);
    if (t->refused != QE_RULE_NONE) return fail_checkpoint(t, &error);
    if (status != QE_OK) return qe_cli_error(t->cli, &error);
    return qe_session_settings(t->cli, config, config == NULL ? &base : NULL, settings);
}

static int train(training *t, uint64_t dump_steps) {
    qe_settings settings;
    int status = settings_of(t, &settings);
    if (status != QE_EXIT_OK) return status;
    if (t->inject != QE_RULE_NONE && settings.contracts.mode == QE_CONTRACTS_SETTING_OFF)
        return qe_cli_usage(t->cli, "--inject plants a fault for the contracts to find; contracts.mode is off");
    if (t->inject != QE_RULE_NONE && !is_schedule_rule(t->inject) &&
        (t->inject_step > settings.train.steps || t->inject_step <= qe_resume_step(&t->resume)))
        return qe_cli_usage(t->cli, "--inject: step %llu never comes; train.steps is %u and the first is %llu",
                            (unsigned long long)t->inject_step, settings.train.steps,
                            (unsigned long long)qe_resume_step(&t->resume) + 1);
    return run_training(t, &settings, dump_steps);
}

static int run_train(qe_cli *cli) {
    training t = {.cli = cli};
    uint64_t dump_steps;
    int status = parse_inject(cli, &t);
    if (status != QE_EXIT_OK) return status;
    if (qe_cli_number(cli, "dump-steps", 1, 1000000, 20, &dump_steps) != 0) return QE_EXIT_USAGE;
    status = qe_device_option(cli, QE_DEVICE_CAN_HOST | QE_DEVICE_CAN_CHECK | QE_DEVICE_CAN_GPU, &t.device);
    if (status != QE_EXIT_OK) return status;
    if (qe_cli_has(cli, "new-lineage") && !qe_cli_has(cli, "resume"))
        return qe_cli_usage(cli, "--new-lineage is for a run that goes on with --resume");
    if (qe_cli_has(cli, "dump-steps") && !qe_cli_has(cli, "dump-batches"))
        return qe_cli_usage(cli, "--dump-steps says how many batches --dump-batches writes, which is not there");
    status = qe_cli_apart(cli, "dump-initial", "dump-batches");
    if (status != QE_EXIT_OK) return status;
    t.document = json_object();
    t.curve = json_array();
    t.validation = json_array();
    status = train(&t, dump_steps);
    qe_keeping_close(&t.keeping);
    qe_resume_close(&t.resume);
    qe_session_close(&t.session);
    json_decref(t.document);
    json_decref(t.curve);
    json_decref(t.validation);
    return status;
}

static const qe_cli_option options[] = {
    {"set", 0, "KEY=VALUE", "override one setting, e.g. train.steps=100 (docs/config.md)", 1},
    {"device", 0, "NAME", "where to run: host, cuda, te, or check (slow): fails ops that touch the undeclared", 0},
    {"mode", 0, "MODE", "eager (default), captured or baseline; the bits are the same", 0},
    {"contracts", 0, "MODE", "trap (default), observe or off", 0},
    {"placement", 0, "WAY", "gradients direct (default) or copy", 0},
    {"memory-limit", 0, "BYTES", "what a rank may take (docs/memory.md); more is refused before it runs", 0},
    {"resume", 0, "DIR", "go on from a checkpoint, or from the newest complete one of a checkpoint.path", 0},
    {"new-lineage", 0, NULL, "with --resume: accept and record changes that give other bits", 0},
    {"inject", 0, "RULE[@STEP]", "plant one real fault of that kind (default: in step 2) and see it trapped", 0},
    {"dump-initial", 0, "FILE", "write the initial weights as safetensors", 0},
    {"dump-batches", 0, "FILE", "write the first batches as safetensors", 0},
    {"dump-steps", 0, "K", "how many batches --dump-batches writes (default 20)", 0},
    {NULL, 0, NULL, NULL, 0},
};

const qe_command qe_command_train = {
    .name = "train",
    .arguments = "[CONFIG.yaml]",
    .summary = "train the built-in model in FP8 over pipeline stages, under contract",
    .details =
        "Trains a Llama-style decoder on text. Without a file the defaults are the quickstart: the King James Bible,\n"
        "4 layers, 2 pipeline ranks, delayed-scaling FP8. The weights are left in checkpoint.path, in place of\n"
        "what an earlier run left there.\n"
        "\n"
        "Loss is in nats per token, a token of text being a byte: 5.55 is guessing among 256, less is better. A\n"
        "step's loss is that of its own batch; validation is on text that is never trained on, and what counts.\n"
        "`state_hash` covers parameters, optimizer moments, scales and histories: two runs with the same hash hold\n"
        "the same bits.\n"
        "\n"
        "With checkpoint.every=N the state is kept every N steps, written while the next ones run. --resume goes on\n"
        "from it in a new process, in any mode, over any number of stages and ranks, with the bits of a run that\n"
        "never stopped; without a CONFIG.yaml the settings are the checkpoint's (docs/checkpoints.md).\n"
        "\n"
        "A broken rule (docs/rules.md) stops the step before any weight moves, prints both operations, and leaves a\n"
        "trace (docs/trace.md). With --contracts observe the run goes on; at its end it tells each kind of breach\n"
        "once, with a count, and the trace is the whole of the first such step.\n"
        "\n"
        "Examples:\n"
        "  qeffect train examples/quickstart.yaml\n"
        "  qeffect train --set data.path=my-text.txt --set checkpoint.path=run/mine\n"
        "  qeffect train --set recipe.name=bf16 --set train.steps=100 --set checkpoint.path=run/bf16\n"
        "  qeffect train --mode baseline --set train.steps=20 --set checkpoint.path=\n"
        "  qeffect train examples/quickstart.yaml --set checkpoint.every=100\n"
        "  qeffect train --resume run/quickstart\n"
        "  qeffect train examples/quickstart.yaml --inject scale.busy@5\n",
    .options = options,
    .arguments_min = 0,
    .arguments_max = 1,
    .run = run_train,
};
