/* resume.c - a session that goes on from a checkpoint: opened, compared, put into the team, verified by its hash. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/text.h"
#include "cli/checkpoints.h"
#include "cli/import.h"

static void note_skipped(void *context, const char *name, qe_rule rule, const qe_error *error) {
    qe_resume *resume = context;
    (void)rule;
    void *grown = error->status == QE_ERROR_UNSUPPORTED
                      ? NULL /* good for another version */
                      : realloc(resume->skipped, (resume->skipped_count + 1) * sizeof *resume->skipped);
    if (grown != NULL) {
        resume->skipped = grown;
        snprintf(resume->skipped[resume->skipped_count++], QE_CHECKPOINT_NAME_BYTES, "%s", name);
    }
    fprintf(stderr, "%s is no checkpoint to go on from:\n", name);
    qe_cli_print_error(error);
}

/* Everything before the last name; the directory itself for what has none. */
static void folder_of(const char *path, char folder_out[QE_SETTINGS_TEXT_BYTES]) {
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') length--;
    while (length > 0 && path[length - 1] != '/') length--;
    while (length > 1 && path[length - 1] == '/') length--;
    snprintf(folder_out, QE_SETTINGS_TEXT_BYTES, "%.*s", (int)length, length == 0 ? "" : path);
    if (length == 0) snprintf(folder_out, QE_SETTINGS_TEXT_BYTES, ".");
}

static qe_status copy_lineage(qe_resume *resume, qe_error *error_out) {
    const qe_manifest *manifest = qe_checkpoint_manifest(resume->checkpoint);
    for (size_t i = 0; i < manifest->lineage_count; i++)
        QE_TRY(qe_manifest_add_lineage(&resume->lineage, manifest->lineage[i].run, manifest->lineage[i].from_step,
                                       manifest->lineage[i].changes, error_out));
    return QE_OK;
}

qe_status qe_resume_open(qe_resume *resume, const char *path, qe_rule *rule_out, qe_error *error_out) {
    *resume = (qe_resume){0};
    *rule_out = QE_RULE_NONE;
    if (strlen(path) >= QE_SETTINGS_TEXT_BYTES)
        return qe_error_set(error_out, QE_ERROR_LIMIT, "use a shorter path", "the path of the checkpoint is too long");
    snprintf(resume->path, sizeof resume->path, "%s", path);
    size_t length = strlen(path), ending = strlen(".safetensors");
    if (length > ending && strcmp(path + length - ending, ".safetensors") == 0)
        return qe_safetensors_open(path, &resume->weights, error_out);
    if (qe_checkpoint_is_one(path)) {
        folder_of(path, resume->folder);
        QE_TRY(qe_checkpoint_open(path, &resume->checkpoint, rule_out, error_out));
    } else {
        snprintf(resume->folder, sizeof resume->folder, "%s", path);
        QE_TRY(qe_checkpoint_open_newest(path, note_skipped, resume, &resume->checkpoint, rule_out, error_out));
    }
    snprintf(resume->path, sizeof resume->path, "%s", qe_checkpoint_path(resume->checkpoint));
    resume->step = qe_checkpoint_manifest(resume->checkpoint)->step;
    return copy_lineage(resume, error_out);
}

/* The tensors, which are as large as the state. */
static void drop_tensors(qe_resume *resume) {
    qe_checkpoint_close(resume->checkpoint);
    qe_safetensors_close(resume->weights);
    resume->checkpoint = NULL;
    resume->weights = NULL;
}

void qe_resume_close(qe_resume *resume) {
    drop_tensors(resume);
    qe_manifest_deinit(&resume->lineage);
    free(resume->skipped);
    *resume = (qe_resume){0};
}

const char *qe_resume_path(const qe_resume *resume) {
    return resume->path;
}

uint64_t qe_resume_step(const qe_resume *resume) {
    return resume->step;
}

/* A checkpoint says how to train, not where to write: its paths for output are not followed. */
qe_status qe_resume_settings(const qe_resume *resume, qe_settings *settings_out, qe_error *error_out) {
    qe_settings settings, usual;
    qe_settings_default(&usual);
    if (resume->checkpoint == NULL) return *settings_out = usual, QE_OK;
    qe_status status = qe_manifest_settings(qe_checkpoint_manifest(resume->checkpoint), &settings, error_out);
    if (status != QE_OK) return qe_error_place(error_out, resume->path, 0, 0);
    settings.contracts = usual.contracts;
    memcpy(settings.train.timeline, usual.train.timeline, sizeof settings.train.timeline);
    snprintf(settings.checkpoint.path, sizeof settings.checkpoint.path, "%s", resume->folder);
    *settings_out = settings;
    return QE_OK;
}

/* --- what changed --------------------------------------------------------------------------------------------- */

/* Owns: the caller frees; NULL: no memory. What does not fit `limit_bytes` is counted. */
static char *join(const qe_facts *differences, size_t limit_bytes) {
    qe_text_builder text = {0};
    for (size_t i = 0; i < differences->count; i++) {
        const qe_fact *one = &differences->list[i];
        if (text.length + strlen(one->name) + strlen(one->value) > limit_bytes) {
            qe_text_builder_append(&text, "; and %zu more", differences->count - i);
            break;
        }
        qe_text_builder_append(&text, "%s%s: %s", i == 0 ? "" : "; ", one->name, one->value);
    }
    return qe_text_builder_take(&text);
}

static qe_status refuse(const qe_resume *resume, const char *what, const qe_facts *differences, const char *remedy,
                        qe_error *error_out) {
    char *text = join(differences, QE_ERROR_TEXT_BYTES - 128);
    if (text == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to tell what differs");
    qe_error_set(error_out, QE_ERROR_CONFIG, remedy, "%s: %s", what, text);
    free(text);
    return qe_error_place(error_out, qe_checkpoint_path(resume->checkpoint), 0, 0);
}

/* All of it: a lineage that was cut would not say what gave other bits. */
static qe_status record(qe_resume *resume, const qe_facts *differences, qe_error *error_out) {
    char run[QE_DIGEST_BYTES], *text = join(differences, SIZE_MAX);
    if (text == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to record what differs");
    qe_status status = qe_run_name(run, error_out);
    if (status == QE_OK)
        status = qe_manifest_add_lineage(&resume->lineage, run, qe_resume_step(resume), text, error_out);
    free(text);
    return status;
}

/* What says which tensors there are. */
static int is_size_of_model(const char *key) {
    static const char *const sizes[] = {"model.layers",   "model.hidden", "model.heads",
                                        "model.kv_heads", "model.ffn",    "model.vocab"};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (strcmp(key, sizes[i]) == 0) return 1;
    return 0;
}

static qe_status check_model(const qe_resume *resume, const qe_facts *differences, qe_error *error_out) {
    qe_facts sizes = {0};
    qe_status status = QE_OK;
    for (size_t i = 0; status == QE_OK && i < differences->count; i++)
        if (is_size_of_model(differences->list[i].name))
            status = qe_facts_add(&sizes, differences->list[i].name, differences->list[i].value, error_out);
    if (status == QE_OK && sizes.count > 0)
        status = refuse(resume, "the checkpoint is of another model", &sizes,
                        "set it back; another model is trained from its beginning, without --resume", error_out);
    qe_facts_deinit(&sizes);
    return status;
}

static qe_status judge_differences(qe_resume *resume, const qe_facts *differences, int new_lineage,
                                   qe_error *error_out) {
    QE_TRY(check_model(resume, differences, error_out));
    if (new_lineage) return record(resume, differences, error_out);
    if (differences->count == 0) return QE_OK;
    return refuse(resume, "the run cannot go on with the same bits", differences,
                  "set it back, or go on with other bits: --new-lineage accepts the change and records it", error_out);
}

static qe_status compare(qe_resume *resume, const qe_session *session, int new_lineage, qe_error *error_out) {
    qe_manifest now = {0};
    qe_facts differences = {0};
    qe_status status = qe_session_manifest(session, &now, error_out);
    if (status == QE_OK)
        status = qe_manifest_differences(qe_checkpoint_manifest(resume->checkpoint), &now, &differences, error_out);
    if (status != QE_OK) qe_error_place(error_out, resume->path, 0, 0);
    else status = judge_differences(resume, &differences, new_lineage, error_out);
    qe_facts_deinit(&differences);
    qe_manifest_deinit(&now);
    return status;
}

/* Another text is read from its beginning; the same one from where it was. */
static void take_position(const qe_resume *resume, qe_session *session) {
    const qe_manifest *manifest = qe_checkpoint_manifest(resume->checkpoint);
    char digest[QE_DATA_DIGEST_BYTES];
    qe_dataset_digest(session->dataset, digest);
    session->steps_before = manifest->step;
    session->sequences_before = strcmp(digest, manifest->data.digest) == 0 ? manifest->data.position : 0;
}

static qe_status put(const qe_resume *resume, qe_session *session, int adapts, qe_rule *rule_out,
                     qe_error *error_out) {
    qe_snapshot *snapshot = NULL;
    int adapted = 0;
    QE_TRY(qe_snapshot_create(session->team, &snapshot, error_out));
    qe_status status = qe_snapshot_restore(snapshot, resume->checkpoint, adapts, &adapted, rule_out, error_out);
    if (status == QE_OK) status = qe_team_snapshot_put(session->team, snapshot, error_out);
    qe_snapshot_destroy(snapshot);
    if (status != QE_OK || adapted) return status;
    return qe_snapshot_verify(session->team, resume->checkpoint, rule_out, error_out);
}

static qe_status note_import(qe_resume *resume, const qe_import_report *report, qe_error *error_out) {
    char text[QE_ERROR_TEXT_BYTES], run[QE_DIGEST_BYTES];
    snprintf(text, sizeof text,
             "begun from the weights of %.400s; %u of %u scales from Transformer Engine's state, %u pending amaxes "
             "dropped, state of %u modules is pickled and was not read",
             resume->path, report->scales_found, report->scales, report->pending, report->pickled);
    fprintf(stderr, "%s\n", text);
    QE_TRY(qe_run_name(run, error_out));
    return qe_manifest_add_lineage(&resume->lineage, run, 0, text, error_out);
}

/* Weights of another program have no moments and no place in the data: a run begins. */
static qe_status begin_from_weights(qe_resume *resume, qe_session *session, int new_lineage, qe_rule *rule_out,
                                    qe_error *error_out) {
    qe_snapshot *snapshot = NULL;
    qe_import_report report;
    if (!new_lineage) {
        qe_error_set(error_out, QE_ERROR_CONFIG, "begin a run from it with --new-lineage",
                     "a file of weights is no checkpoint: it has no moments, no step and no position in the data");
        return qe_error_place(error_out, resume->path, 0, 0);
    }
    QE_TRY(qe_snapshot_create(session->team, &snapshot, error_out));
    qe_status status = qe_snapshot_import(snapshot, resume->weights, &report, rule_out, error_out);
    if (status != QE_OK) qe_error_place(error_out, resume->path, 0, 0);
    if (status == QE_OK) status = qe_team_snapshot_put(session->team, snapshot, error_out);
    qe_snapshot_destroy(snapshot);
    return status == QE_OK ? note_import(resume, &report, error_out) : status;
}

static qe_status continue_from(qe_resume *resume, qe_session *session, int new_lineage, qe_rule *rule_out,
                               qe_error *error_out) {
    QE_TRY(compare(resume, session, new_lineage, error_out));
    QE_TRY(put(resume, session, new_lineage, rule_out, error_out));
    take_position(resume, session);
    return QE_OK;
}

qe_status qe_resume_apply(qe_resume *resume, qe_session *session, int new_lineage, qe_rule *rule_out,
                          qe_error *error_out) {
    *rule_out = QE_RULE_NONE;
    if (resume->weights != NULL) QE_TRY(begin_from_weights(resume, session, new_lineage, rule_out, error_out));
    else QE_TRY(continue_from(resume, session, new_lineage, rule_out, error_out));
    drop_tensors(resume);
    return QE_OK;
}
