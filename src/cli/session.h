/* session.h - everything that a run of the built-in model needs, made from settings: data, model, plans, team. */
#ifndef QE_CLI_SESSION_H
#define QE_CLI_SESSION_H

#include <signal.h>
#include "cli/cli.h"
#include "cli/device.h"
#include "qeffect/data.h"
#include "qeffect/model.h"
#include "qeffect/safetensors.h"
#include "qeffect/settings.h"
#include "qeffect/step.h"

typedef struct qe_session {
    qe_settings settings;
    qe_dataset *dataset; /* NULL: a session without data (generate) */
    qe_model *model;
    struct qe_stopwatch *watch; /* NULL: nobody asks when actions end */
    qe_schedule schedule, evaluation_schedule;
    qe_plan *train, *evaluate;
    qe_world *world;
    qe_team *team;
    char backend[176]; /* identity of the device, and whether it is wrapped */
    char identity[160]; /* of the device alone: what decides the bits beside the program */
    qe_device_kind device;
    qe_device *first_device; /* rank 0's */
    qe_device_use use; /* of the device's memory, by this run, when everything was made; 0: it is the host's */
    int honours; /* the file of algorithms was there before this run */
    uint32_t devices; /* that were opened: one for each rank */
    qe_error joined; /* why a device could not be set up as the settings want it */
    uint32_t sequences_per_step;
    int32_t *tokens, *targets; /* [microbatches, T] of one step */
    double *losses; /* [microbatches] of one evaluation */
    uint64_t steps_before, sequences_before; /* a resumed run: steps done, and sequences used up by them */
    /* Of a refused plan: */
    qe_violations violations;
    qe_counterexample counterexample;
} qe_session;

typedef struct qe_session_options {
    int training; /* 0: only the evaluation plan */
    int no_evaluation; /* 1: only the training plan: measurements of it */
    int data; /* opens data.path */
    qe_device_kind device;
    struct qe_stopwatch *watch; /* NULL, or notes when each action ends (host) */
    qe_rule break_schedule; /* a schedule.* rule: the schedule is spoilt before it is planned (--inject) */
} qe_session_options;

/* Requires: settings are checked. On failure: an error,
or QE_CONTRACT with what the plan broke; close it either way. */
qe_status qe_session_open(qe_session *session, const qe_settings *settings, const qe_session_options *options,
                          qe_error *error_out);
void qe_session_close(qe_session *session);

/* Initial values of every parameter from train.seed. */
qe_status qe_session_initialize(qe_session *session, qe_error *error_out);
/* Copies parameters out of, or into, a safetensors file with Hugging Face names. */
qe_status qe_session_save(qe_session *session, const char *directory, qe_error *error_out);
qe_status qe_session_save_file(qe_session *session, const char *path, qe_error *error_out);
qe_status qe_session_load(qe_session *session, const char *path, qe_error *error_out);

/* {"masters_bytes": ..., "total_bytes": ...} of a memory ledger. */
struct json_t *qe_cli_memory_json(const qe_memory_ledger *ledger);

/* One training step with the batch of `step` (1..). */
qe_status qe_session_step(qe_session *session, uint64_t step, qe_step_result *result_out, qe_error *error_out);
/* The same with the batch that session->tokens and ->targets already hold. */
qe_status qe_session_step_given(qe_session *session, uint64_t step, qe_step_result *result_out, qe_error *error_out);
/* Fills session->tokens and ->targets with the training batch of `step`. */
void qe_session_batch(qe_session *session, uint64_t step);
/* Sequences of the training data that are used up when `step` is done: the next one has this number. */
uint64_t qe_session_position(const qe_session *session, uint64_t step);
/* The learning rate as the settings have it. */
qe_learning_rate qe_session_rate(const qe_session *session);
/* The same sizes as config.json has them. */
qe_store_model qe_session_store_model(const qe_session *session);
/* Mean loss in nats per token over the first `sequences` validation windows (0: all). QE_ERROR_INTERRUPTED, and
 * *loss_out untouched, as soon as *stop is set: all windows of a long text may take hours. */
qe_status qe_session_validate(qe_session *session, uint64_t sequences, const volatile sig_atomic_t *stop,
                              double *loss_out, qe_step_result *result_out, qe_error *error_out);

/* Prints a breach for people on standard error, with the command of `program_name` to go on with, and writes its trace
 * where contracts.trace says; *document_out (may be NULL) receives the same as JSON. */
struct json_t;
void qe_session_report_breach(qe_session *session, const char *program_name, const qe_step_result *result,
                              struct json_t **document_out);

/* Writes a history where contracts.trace says; returns 0 when there is one on disk. */
int qe_session_write_trace(qe_session *session, const qe_program *history, qe_error *error_out);

/* Settings from CONFIG.yaml, --set, and the options that are short for a setting, over `base` (NULL: the defaults)
 * where there is no CONFIG.yaml. Returns an exit status. */
int qe_session_settings(qe_cli *cli, const char *path, const qe_settings *base, qe_settings *settings_out);
/* Says which settings that are not at their defaults do nothing in training beside the others: no mistake where a file
 * serves several runs. What is for a device: qe_device_unused_print. */
void qe_session_unused_print(const qe_settings *settings);
/* Graphs of all ranks. */
qe_capture_use qe_session_captured(const qe_session *session);

#endif
