/* keeping.c - checkpoints of a running session. The copy is taken between two steps; the writer has it to itself until
 * it is done, and no second copy is taken before. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <jansson.h>
#include "base/assert.h"
#include "base/seconds.h"
#include "cli/checkpoints.h"

/* A processor that no rank computes on is the writer's alone; else it takes so little that a step is not longer for it.
 * Percent of one processor. */
static unsigned share_of(const qe_session *session) {
    enum { SHARE_AMONG_RANKS = 2 };
    cpu_set_t set;
    int processors = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return processors > (int)session->schedule.ranks ? 100 : SHARE_AMONG_RANKS;
}

static int is_same_folder(const char *one, const char *two) {
    char *first = realpath(one, NULL), *second = realpath(two, NULL);
    int same = first != NULL && second != NULL && strcmp(first, second) == 0;
    free(first);
    free(second);
    return same;
}

static int goes_on_there(const qe_keeping *keeping, const qe_resume *resume) {
    return resume != NULL && is_same_folder(resume->folder, keeping->session->settings.checkpoint.path);
}

/* Those that a resume found damaged do not count among the ones to keep. */
static qe_status distrust(qe_keeping *keeping, const qe_resume *resume, qe_error *error_out) {
    if (resume == NULL || resume->skipped_count == 0 || !goes_on_there(keeping, resume)) return QE_OK;
    for (size_t i = 0; i < resume->skipped_count; i++)
        QE_TRY(qe_checkpoint_folder_distrust(keeping->folder, resume->skipped[i], error_out));
    return QE_OK;
}

/* Whoever forgot --resume is told before the first save takes the place of what was kept. */
static void tell_replaced(const qe_keeping *keeping, const qe_resume *resume) {
    const qe_settings_checkpoint *settings = &keeping->session->settings.checkpoint;
    qe_checkpoint_name *names = NULL;
    size_t count = 0, newest = 0;
    if (settings->keep == 0 || goes_on_there(keeping, resume)) return;
    if (qe_checkpoint_list(settings->path, &names, &count, NULL) != QE_OK) return;
    while (newest < count && names[newest].serial == UINT64_MAX) newest++;
    if (newest < count)
        fprintf(stderr, "%s holds checkpoints of another run: those of this one take their place; another "
                "checkpoint.path keeps them, and --resume %s/%s goes on from them\n", settings->path, settings->path,
                names[newest].name);
    free(names);
}

static qe_status take_lineage(qe_keeping *keeping, const qe_manifest *lineage, qe_error *error_out) {
    char run[QE_DIGEST_BYTES];
    for (size_t i = 0; lineage != NULL && i < lineage->lineage_count; i++)
        QE_TRY(qe_manifest_add_lineage(&keeping->manifest, lineage->lineage[i].run, lineage->lineage[i].from_step,
                                       lineage->lineage[i].changes, error_out));
    if (keeping->manifest.lineage_count > 0) return QE_OK;
    QE_TRY(qe_run_name(run, error_out));
    return qe_manifest_add_lineage(&keeping->manifest, run, 0, "", error_out);
}

/* On the writer's thread. */
static qe_status gather(void *context, qe_error *error_out) {
    qe_keeping *keeping = context;
    QE_TRY(qe_snapshot_fetch(keeping->snapshot, error_out));
    qe_snapshot_parts_update(&keeping->parts, keeping->snapshot, &keeping->manifest);
    return QE_OK;
}

qe_status qe_keeping_open(qe_keeping *keeping, qe_session *session, qe_progress *progress, const qe_resume *resume,
                          qe_error *error_out) {
    const qe_settings_checkpoint *settings = &session->settings.checkpoint;
    *keeping = (qe_keeping){.session = session, .progress = progress};
    if (settings->every == 0 || settings->path[0] == 0) return QE_OK;
    QE_TRY(qe_checkpoint_folder_open(settings->path, settings->keep, &keeping->folder, error_out));
    tell_replaced(keeping, resume);
    QE_TRY(qe_snapshot_create(session->team, &keeping->snapshot, error_out));
    qe_snapshot_twin(session->team, keeping->snapshot);
    QE_TRY(qe_session_manifest(session, &keeping->manifest, error_out));
    QE_TRY(distrust(keeping, resume, error_out));
    QE_TRY(take_lineage(keeping, resume != NULL ? &resume->lineage : NULL, error_out));
    QE_TRY(qe_snapshot_parts_init(&keeping->parts, keeping->snapshot, &keeping->manifest, error_out));
    keeping->content = (qe_checkpoint_content){.manifest = &keeping->manifest,
                                               .model = qe_session_store_model(session),
                                               .parts = keeping->parts.parts,
                                               .part_count = 3,
                                               .gather = gather,
                                               .gather_context = keeping};
    return qe_checkpoint_writer_create(keeping->folder, share_of(session), &keeping->writer, error_out);
}

/* Requires: the writer is idle. */
static qe_status copy(qe_keeping *keeping, uint64_t step, qe_error *error_out) {
    qe_manifest *manifest = &keeping->manifest;
    QE_TRY(qe_team_snapshot_take(keeping->session->team, keeping->snapshot, error_out));
    qe_learning_rate rate = qe_session_rate(keeping->session);
    manifest->step = step;
    manifest->learning_rate = step > 0 ? qe_learning_rate_at(&rate, step) : 0;
    manifest->data.position = qe_session_position(keeping->session, step);
    keeping->asked_step = step;
    keeping->is_due = 0;
    return QE_OK;
}

static void note_failure(qe_keeping *keeping, const qe_error *error) {
    keeping->failed++;
    qe_progress_end(keeping->progress);
    fprintf(stderr, "the checkpoint of step %llu was not written:\n", (unsigned long long)keeping->asked_step);
    qe_cli_print_error(error);
}

/* What became of the last write, once it is over. */
static void note_outcome(qe_keeping *keeping) {
    qe_error error = {0};
    if (keeping->asked_step == keeping->written_step) return;
    if (qe_checkpoint_writer_finish(keeping->writer, &error) == QE_OK) {
        keeping->written++;
        keeping->written_step = keeping->asked_step;
    } else {
        note_failure(keeping, &error);
        keeping->asked_step = keeping->written_step;
    }
}

/* Enough of them for a median; without memory for one more there is one less. */
static void note_time(qe_keeping *keeping, qe_keeping_time kind, double seconds) {
    enum { TIMES_MAX = 100000 };
    size_t count = keeping->times[kind].count;
    if (count == TIMES_MAX) return;
    double *grown = (count & (count - 1)) == 0
                        ? realloc(keeping->times[kind].ms, (count == 0 ? 1 : 2 * count) * sizeof *grown)
                        : keeping->times[kind].ms;
    if (grown == NULL) return;
    keeping->times[kind].ms = grown;
    grown[keeping->times[kind].count++] = 1e3 * seconds;
}

qe_status qe_keeping_step(qe_keeping *keeping, uint64_t step, double step_s, qe_error *error_out) {
    if (keeping->writer == NULL) return QE_OK;
    qe_keeping_time kind = keeping->was_busy ? QE_KEEPING_WRITING : QE_KEEPING_PLAIN;
    double begin = qe_seconds_now();
    int due = step % keeping->session->settings.checkpoint.every == 0;
    int idle = qe_checkpoint_writer_is_idle(keeping->writer);
    int rested = idle && !keeping->was_busy; /* one that is late waits for it: no step has both to bear */
    if (idle) note_outcome(keeping);
    if (due && !idle) keeping->postponed++;
    keeping->is_due |= due;
    keeping->was_busy = !idle;
    if (idle && (due || (keeping->is_due && rested))) {
        QE_TRY(copy(keeping, step, error_out));
        qe_checkpoint_writer_start(keeping->writer, &keeping->content);
        keeping->was_busy = 1;
        kind = QE_KEEPING_COPYING;
    }
    note_time(keeping, kind, step_s + qe_seconds_now() - begin);
    return QE_OK;
}

qe_status qe_keeping_last(qe_keeping *keeping, uint64_t step, qe_error *error_out) {
    if (keeping->writer == NULL || !qe_checkpoint_writer_is_idle(keeping->writer)) return QE_OK;
    note_outcome(keeping);
    if (keeping->written > 0 && keeping->written_step == step) return QE_OK;
    QE_TRY(copy(keeping, step, error_out));
    qe_checkpoint_writer_start(keeping->writer, &keeping->content);
    return QE_OK;
}

qe_status qe_keeping_finish(qe_keeping *keeping, uint64_t step, qe_error *error_out) {
    if (keeping->writer == NULL) return QE_OK;
    note_outcome(keeping); /* waits */
    if (keeping->written > 0 && keeping->written_step == step) return QE_OK;
    QE_TRY(copy(keeping, step, error_out));
    qe_status status = qe_checkpoint_write(keeping->folder, &keeping->content, error_out);
    if (status == QE_OK) {
        keeping->written++;
        keeping->written_step = step;
    } else {
        keeping->failed++;
        keeping->asked_step = keeping->written_step;
    }
    return status;
}

void qe_keeping_close(qe_keeping *keeping) {
    qe_checkpoint_writer_destroy(keeping->writer);
    qe_checkpoint_folder_close(keeping->folder);
    for (int kind = 0; kind < QE_KEEPING_TIMES; kind++) free(keeping->times[kind].ms);
    qe_snapshot_parts_deinit(&keeping->parts);
    qe_snapshot_destroy(keeping->snapshot);
    qe_manifest_deinit(&keeping->manifest);
    *keeping = (qe_keeping){0};
}

static int by_size(const void *left, const void *right) {
    double one = *(const double *)left, two = *(const double *)right;
    return one < two ? -1 : one > two;
}

static json_t *times_json(const qe_keeping *keeping) {
    static const char *const names[QE_KEEPING_TIMES] = {"plain", "writing", "copying"};
    json_t *object = json_object();
    for (int kind = 0; kind < QE_KEEPING_TIMES; kind++) {
        size_t count = keeping->times[kind].count;
        if (count == 0) continue;
        qsort(keeping->times[kind].ms, count, sizeof(double), by_size);
        json_object_set_new(object, names[kind], json_real(keeping->times[kind].ms[count / 2]));
    }
    return object;
}

struct json_t *qe_keeping_json(const qe_keeping *keeping) {
    if (keeping->writer == NULL) return NULL;
    return json_pack("{s:I, s:I, s:I, s:I, s:s, s:o}", "written", (json_int_t)keeping->written, "postponed",
                     (json_int_t)keeping->postponed, "failed", (json_int_t)keeping->failed, "step",
                     (json_int_t)keeping->written_step, "run", qe_manifest_run(&keeping->manifest), "step_ms",
                     times_json(keeping));
}
