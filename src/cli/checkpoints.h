/* checkpoints.h - a session's state in checkpoints: what is written while it trains, and how a run goes on from one. */
#ifndef QE_CLI_CHECKPOINTS_H
#define QE_CLI_CHECKPOINTS_H

#include "cli/progress.h"
#include "cli/session.h"
#include "cli/snapshot_files.h"

/* Everything of a manifest that stays the same for the whole run: settings, device, schedule, data, seed.
 * On failure: what was filled in is the caller's to deinit. */
qe_status qe_session_manifest(const qe_session *session, qe_manifest *manifest, qe_error *error_out);

/* --- going on: --resume --- */

typedef struct qe_resume {
    qe_checkpoint *checkpoint; /* until it is applied; NULL: from weights alone */
    qe_safetensors *weights;   /* a file of another program; until it is applied */
    char path[QE_ERROR_PATH_BYTES]; /* of what was opened */
    uint64_t step;
    qe_manifest lineage; /* runs so far; with --new-lineage, and this one */
    char folder[QE_SETTINGS_TEXT_BYTES]; /* the directory of checkpoints it lies in */
    char (*skipped)[QE_CHECKPOINT_NAME_BYTES]; /* damaged ones there */
    size_t skipped_count;
} qe_resume;

/* Opens a checkpoint, or the newest complete one of a directory; damaged ones are named on standard error. A file
 * `*.safetensors` is weights to begin a new lineage from, with Transformer Engine's scaling state where it is plain.
 * On failure: QE_CONTRACT: *rule_out. */
qe_status qe_resume_open(qe_resume *resume, const char *path, qe_rule *rule_out, qe_error *error_out);
void qe_resume_close(qe_resume *resume);
/* What was opened, for messages. */
const char *qe_resume_path(const qe_resume *resume);
/* The settings it was written with (a file of weights: the defaults); where it lies for checkpoint.path, and the usual
 * contracts. */
qe_status qe_resume_settings(const qe_resume *resume, qe_settings *settings_out, qe_error *error_out);
/* Makes the checkpoint's state the session's, and lets go of its tensors. What differs and decides the bits is refused,
 * or, with new_lineage, recorded in resume->lineage.
 * On failure: QE_CONTRACT: *rule_out; QE_ERROR_CONFIG: what differs. */
qe_status qe_resume_apply(qe_resume *resume, qe_session *session, int new_lineage, qe_rule *rule_out,
                          qe_error *error_out);
uint64_t qe_resume_step(const qe_resume *resume);

/* --- keeping: checkpoint.every --- */

/* What went on beside a step: nothing, the writer, or a copy of the state at its end. */
typedef enum qe_keeping_time {
    QE_KEEPING_PLAIN, QE_KEEPING_WRITING, QE_KEEPING_COPYING, QE_KEEPING_TIMES
} qe_keeping_time;

typedef struct qe_keeping {
    qe_session *session;
    qe_progress *progress; /* messages interrupt its line */
    qe_checkpoint_folder *folder;
    qe_checkpoint_writer *writer;
    qe_snapshot *snapshot;
    qe_manifest manifest;
    qe_snapshot_parts parts;
    qe_checkpoint_content content;
    uint64_t asked_step, written_step; /* the last that was given to the writer, and that is known to be on disk */
    uint64_t written, postponed, failed;
    int is_due; /* a checkpoint was due while the writer was at work */
    int was_busy; /* the writer was at work when the step that is under way began */
    struct { double *ms; size_t count; } times[QE_KEEPING_TIMES]; /* of steps, by what went on beside them */
} qe_keeping;

/* Does nothing where checkpoint.every is 0 or there is no path. resume: what the run goes on from, or NULL: a run of
 * its own begins. On failure: close it all the same. */
qe_status qe_keeping_open(qe_keeping *keeping, qe_session *session, qe_progress *progress, const qe_resume *resume,
                          qe_error *error_out);
/* After each step, which took `step_s`: takes a copy when one is due and the writer is free, else after the first step
 * when it is. Never waits for the disk. What a write failed for is said on standard error; the run goes on. */
qe_status qe_keeping_step(qe_keeping *keeping, uint64_t step, double step_s, qe_error *error_out);
/* After the last step: starts writing its state where the writer is free, so that what comes then does not keep it from
 * the disk. */
qe_status qe_keeping_last(qe_keeping *keeping, uint64_t step, qe_error *error_out);
/* The state after `step` is on disk when this returns QE_OK. On failure: of this last write. */
qe_status qe_keeping_finish(qe_keeping *keeping, uint64_t step, qe_error *error_out);
void qe_keeping_close(qe_keeping *keeping);
/* {"written", "postponed", "failed", "step", "run", "step_ms": {"plain", "writing", "copying"}}: medians, which say
 * what checkpoints cost; or NULL where nothing is kept. */
struct json_t *qe_keeping_json(const qe_keeping *keeping);

/* What decides the bits and is not the same, one text per difference; names are keys of the configuration or
 * "device", "data", "accumulation_order". On failure: QE_ERROR_MEMORY, QE_ERROR_UNSUPPORTED. */
qe_status qe_manifest_differences(const qe_manifest *then, const qe_manifest *now, qe_facts *differences,
                                  qe_error *error_out);
/* Settings of a manifest over the defaults.
 * On failure: QE_ERROR_UNSUPPORTED: a key or value that this program does not take. */
qe_status qe_manifest_settings(const qe_manifest *manifest, qe_settings *settings_out, qe_error *error_out);
/* What was chosen for each shape, line by line; without a file the libraries choose, the same for the same versions.
 * On failure: QE_ERROR_MEMORY. */
qe_status qe_manifest_choices_add(qe_manifest *manifest, FILE *file, qe_error *error_out);
/* Writes down the chosen algorithms that the manifest holds where no such file is: a run goes on with those of the one
 * before. Does nothing where the path is "", the file is there, or nothing was chosen.
 * On failure: QE_ERROR_IO; no file is left. */
qe_status qe_manifest_choices_restore(const qe_manifest *manifest, const char *path, qe_error *error_out);
/* A new name for a run: 32 hexadecimal digits. */
qe_status qe_run_name(char run_out[QE_DIGEST_BYTES], qe_error *error_out);

#endif
