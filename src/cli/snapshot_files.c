/* snapshot_files.c - which tensor of the state lies in which file under which name. */
#include "cli/snapshot_files.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"

static qe_status no_memory(qe_error *error_out) {
    return qe_error_set(error_out, QE_ERROR_MEMORY, "keep no checkpoints (checkpoint.every=0) or free memory",
                        "no memory for checkpoints");
}

static qe_tensor tensor_of(const qe_state_tensor *from) {
    uint64_t matrix[2] = {from->rows, from->columns};
    if (from->rows == 0) return qe_tensor_make(from->name, QE_DTYPE_F32, 1, &matrix[1], from->values);
    return qe_tensor_make(from->name, QE_DTYPE_F32, 2, matrix, from->values);
}

static qe_status add_counts(const qe_snapshot *snapshot, qe_manifest *manifest, qe_error *error_out) {
    for (uint32_t i = 0; i < snapshot->count_count; i++) {
        const qe_snapshot_count *count = &snapshot->counts[i];
        qe_counts *list = count->role < 0 ? &manifest->versions : &manifest->epochs;
        QE_TRY(qe_counts_add(list, count->name, count->count, error_out));
    }
    return QE_OK;
}

static qe_status allocate(qe_snapshot_parts *parts, const qe_snapshot *snapshot, qe_error *error_out) {
    parts->tensors = calloc(snapshot->tensor_count + parts->epoch_count, sizeof *parts->tensors);
    parts->epochs = calloc(parts->epoch_count + 1, sizeof *parts->epochs);
    parts->epoch_names = calloc(parts->epoch_count + 1, sizeof *parts->epoch_names);
    return parts->tensors && parts->epochs && parts->epoch_names ? QE_OK : no_memory(error_out);
}

static qe_status add_epoch(qe_snapshot_parts *parts, size_t index, const char *scale, qe_tensor *tensor,
                           qe_error *error_out) {
    static const uint64_t one[1] = {1};
    char *name = NULL;
    if (asprintf(&name, "%s.epoch", scale) < 0) return no_memory(error_out);
    parts->epoch_names[index] = name;
    *tensor = qe_tensor_make(name, QE_DTYPE_I64, 1, one, &parts->epochs[index]);
    return QE_OK;
}

qe_status qe_snapshot_parts_init(qe_snapshot_parts *parts, const qe_snapshot *snapshot, qe_manifest *manifest,
                                 qe_error *error_out) {
    static const char *const files[] = {"model.safetensors", "optimizer.safetensors", "scales.safetensors"};
    *parts = (qe_snapshot_parts){0};
    QE_TRY(add_counts(snapshot, manifest, error_out));
    parts->epoch_count = manifest->epochs.count;
    QE_TRY(allocate(parts, snapshot, error_out));
    for (int part = 0; part < 3; part++) parts->parts[part].file = files[part];
    for (uint32_t i = 0; i < snapshot->tensor_count; i++) {
        const qe_state_tensor *tensor = &snapshot->tensors[i];
        int part = tensor->kind == QE_STATE_PARAMETER ? 0 : tensor->kind <= QE_STATE_MOMENT2 ? 1 : 2;
        parts->tensors[i] = tensor_of(tensor);
        parts->parts[part].count++;
    }
    for (size_t i = 0; i < parts->epoch_count; i++)
        QE_TRY(add_epoch(parts, i, manifest->epochs.list[i].name, &parts->tensors[snapshot->tensor_count + i],
                         error_out));
    parts->parts[2].count += parts->epoch_count;
    parts->parts[0].tensors = parts->tensors;
    parts->parts[1].tensors = parts->parts[0].tensors + parts->parts[0].count;
    parts->parts[2].tensors = parts->parts[1].tensors + parts->parts[1].count;
    qe_snapshot_parts_update(parts, snapshot, manifest);
    return QE_OK;
}

void qe_snapshot_parts_deinit(qe_snapshot_parts *parts) {
    for (size_t i = 0; parts->epoch_names != NULL && i < parts->epoch_count; i++) free(parts->epoch_names[i]);
    free(parts->epoch_names);
    free(parts->epochs);
    free(parts->tensors);
    *parts = (qe_snapshot_parts){0};
}

void qe_snapshot_parts_update(qe_snapshot_parts *parts, const qe_snapshot *snapshot, qe_manifest *manifest) {
    size_t version = 0, epoch = 0;
    for (uint32_t i = 0; i < snapshot->count_count; i++) {
        const qe_snapshot_count *count = &snapshot->counts[i];
        if (count->role < 0) {
            manifest->versions.list[version++].count = count->count;
        } else {
            parts->epochs[epoch] = (int64_t)count->count;
            manifest->epochs.list[epoch++].count = count->count;
        }
    }
}

/* --- back ----------------------------------------------------------------------------------------------------- */

typedef struct restoring {
    qe_snapshot *snapshot;
    const qe_checkpoint *checkpoint;
    int adapts, adapted;
    qe_rule *rule_out;
    qe_error *error_out;
} restoring;

__attribute__((format(printf, 3, 4)))
static qe_status breach(const restoring *r, qe_rule rule, const char *format, ...) {
    char what[QE_ERROR_TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    *r->rule_out = rule;
    qe_error_set(r->error_out, QE_CONTRACT, "go on from another checkpoint", "%s: %s %s", qe_rule_id(rule),
                 qe_rule_sentence(rule), what);
    qe_error_place(r->error_out, qe_checkpoint_path(r->checkpoint), 0, 0);
    return QE_CONTRACT;
}

static int is_vector(const qe_tensor *tensor, uint64_t columns) {
    return tensor->dtype == QE_DTYPE_F32 && tensor->rank == 1 && tensor->shape[0] == columns;
}

static int fits(const qe_tensor *tensor, const qe_state_tensor *wanted) {
    if (wanted->rows == 0) return is_vector(tensor, wanted->columns);
    return tensor->dtype == QE_DTYPE_F32 && tensor->rank == 2 && tensor->shape[0] == wanted->rows &&
           tensor->shape[1] == wanted->columns;
}

/* The newest amaxes stay. Index 0 is the current row, 0 between folds. */
static void keep_newest(const qe_tensor *from, float *to, uint64_t length) {
    const float *values = from->data;
    uint64_t had = from->shape[0], kept = (had < length ? had : length) - 1;
    for (uint64_t i = 1; i <= kept; i++) to[length - i] = values[had - i];
}

static qe_status restore_tensor(restoring *r, uint32_t index) {
    const qe_state_tensor *wanted = &r->snapshot->tensors[index];
    const qe_tensor *tensor = qe_checkpoint_find(r->checkpoint, wanted->name);
    float *values = qe_snapshot_values(r->snapshot, index);
    int is_hidden = wanted->kind == QE_STATE_SCALE || wanted->kind == QE_STATE_HISTORY;
    if (tensor == NULL && is_hidden && r->adapts) return r->adapted = 1, QE_OK; /* as at a beginning */
    if (tensor == NULL) return breach(r, QE_RULE_CHECKPOINT_MISSING, "There is no %s.", wanted->name);
    if (fits(tensor, wanted)) return memcpy(values, tensor->data, tensor->bytes), QE_OK;
    int other_length = wanted->kind == QE_STATE_HISTORY && tensor->dtype == QE_DTYPE_F32 && tensor->rank == 1 &&
                       tensor->shape[0] > 0;
    if (!other_length || !r->adapts)
        return breach(r, QE_RULE_CHECKPOINT_SHAPE, "%s is not F32 of the shape that this model keeps.", wanted->name);
    keep_newest(tensor, values, wanted->columns);
    r->adapted = 1;
    return QE_OK;
}

static qe_status restore_count(restoring *r, uint32_t index, size_t hint) {
    const qe_manifest *manifest = qe_checkpoint_manifest(r->checkpoint);
    qe_snapshot_count *wanted = &r->snapshot->counts[index];
    const qe_counts *counts = wanted->role < 0 ? &manifest->versions : &manifest->epochs;
    int is_there = hint < counts->count && strcmp(counts->list[hint].name, wanted->name) == 0;
    const qe_count *count = is_there ? &counts->list[hint] : qe_counts_find(counts, wanted->name);
    if (count == NULL && !(wanted->role >= 0 && r->adapts))
        return breach(r, QE_RULE_CHECKPOINT_MISSING, "The manifest does not count %s.", wanted->name);
    wanted->count = count != NULL ? count->count : 0;
    return QE_OK;
}

/* Tensors that the state's hash is taken of. */
static size_t count_state(const qe_checkpoint *checkpoint) {
    size_t count = 0;
    for (size_t i = 0; i < qe_checkpoint_count(checkpoint); i++)
        count += qe_checkpoint_at(checkpoint, i)->dtype == QE_DTYPE_F32;
    return count;
}

qe_status qe_snapshot_restore(qe_snapshot *snapshot, const qe_checkpoint *checkpoint, int adapts, int *adapted_out,
                              qe_rule *rule_out, qe_error *error_out) {
    restoring r = {.snapshot = snapshot, .checkpoint = checkpoint, .adapts = adapts, .rule_out = rule_out};
    size_t versions = 0, epochs = 0;
    r.error_out = error_out;
    *rule_out = QE_RULE_NONE;
    for (uint32_t i = 0; i < snapshot->tensor_count; i++) QE_TRY(restore_tensor(&r, i));
    r.adapted |= adapts && count_state(checkpoint) != snapshot->tensor_count; /* scales that are not kept any more */
    for (uint32_t i = 0; i < snapshot->count_count; i++)
        QE_TRY(restore_count(&r, i, snapshot->counts[i].role < 0 ? versions++ : epochs++));
    *adapted_out = r.adapted;
    return QE_OK;
}

qe_status qe_snapshot_verify(qe_team *team, const qe_checkpoint *checkpoint, qe_rule *rule_out, qe_error *error_out) {
    restoring r = {.checkpoint = checkpoint, .rule_out = rule_out, .error_out = error_out};
    char found[QE_STATE_HASH_BYTES];
    const char *saved = qe_checkpoint_manifest(checkpoint)->state_hash;
    QE_TRY(qe_team_state_hash(team, found, error_out));
    if (strcmp(found, saved) == 0) return QE_OK;
    return breach(&r, QE_RULE_CHECKPOINT_STATE, "Saved was %s, restored is %s.", saved, found);
}
