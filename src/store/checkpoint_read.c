/* checkpoint_read.c - opens a checkpoint and verifies all of it: the manifest, then every file by size, structure,
 * hash, run and step, then the epochs of scales. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/hash.h"
#include "store/file.h"
#include "store/folder.h"
#include "store/manifest.h"
#include "store/tensor.h"

struct qe_checkpoint {
    char *path;
    qe_manifest manifest;
    qe_safetensors **files; /* [manifest.file_count]; NULL where it holds no tensors */
    const qe_tensor **tensors, **sorted; /* [count] in their order, and by name */
    size_t count;
};

static const char remedy[] = "Use another checkpoint; this one is damaged.";
static const char which[] = "Name a checkpoint (step-...), or the checkpoint.path of a run with checkpoint.every set.";

typedef struct opening {
    qe_checkpoint *checkpoint;
    int folder;
    qe_rule rule; /* that was broken */
    qe_error *error_out;
} opening;

__attribute__((format(printf, 4, 5)))
static qe_status breach(opening *at, qe_rule rule, const char *name, const char *format, ...) {
    char what[QE_ERROR_TEXT_BYTES], where[QE_ERROR_PATH_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    at->rule = rule;
    qe_folder_text(at->checkpoint->path, name, where);
    return qe_store_refuse(at->error_out, QE_CONTRACT, where,
                           "Put the files of one save back together, or use another checkpoint.", "%s: %s %s",
                           qe_rule_id(rule), qe_rule_sentence(rule), what);
}

static int has_ending(const char *name, const char *ending) {
    size_t length = strlen(name), wanted = strlen(ending);
    return length > wanted && strcmp(name + length - wanted, ending) == 0;
}

/* What a file says of itself, where it can be read at all, is the better verdict than a wrong hash: it tells how. */
static qe_status check_origin(opening *at, const qe_manifest_file *entry, const qe_safetensors *file) {
    const qe_manifest *manifest = &at->checkpoint->manifest;
    const char *run = qe_safetensors_metadata(file, "qeffect.run");
    const char *step = qe_safetensors_metadata(file, "qeffect.step");
    char own[32];
    snprintf(own, sizeof own, "%" PRIu64, manifest->step);
    if (run != NULL && strcmp(run, qe_manifest_run(manifest)) != 0)
        return breach(at, QE_RULE_CHECKPOINT_RUN, entry->name, "The manifest is of run %.8s, the file of run %.8s.",
                      qe_manifest_run(manifest), run);
    if (step != NULL && strcmp(step, own) != 0)
        return breach(at, QE_RULE_CHECKPOINT_MIXED, entry->name, "The manifest is of step %s, the file of step %.24s.",
                      own, step);
    if (run != NULL && step != NULL) return QE_OK;
    return breach(at, QE_RULE_CHECKPOINT_RUN, entry->name, "The file does not say of which run and step it is.");
}

static qe_status check_digest(opening *at, const qe_manifest_file *entry, qe_hash128 digest) {
    char found[QE_HASH_TEXT_BYTES], where[QE_ERROR_PATH_BYTES];
    qe_hash_text(digest, found);
    if (strcmp(found, entry->digest) == 0) return QE_OK;
    qe_folder_text(at->checkpoint->path, entry->name, where);
    return qe_store_refuse(at->error_out, QE_ERROR_FORMAT, where, remedy,
                           "the file is not the one that was written: its XXH3-128 is %s, the manifest says %s", found,
                           entry->digest);
}

static qe_status check_size(opening *at, const qe_manifest_file *entry, uint64_t bytes) {
    char where[QE_ERROR_PATH_BYTES];
    if (bytes == entry->bytes) return QE_OK;
    qe_folder_text(at->checkpoint->path, entry->name, where);
    return qe_store_refuse(at->error_out, QE_ERROR_FORMAT, where, remedy,
                           "the file has %" PRIu64 " bytes, the manifest says %" PRIu64, bytes, entry->bytes);
}

static qe_status read_tensors(opening *at, size_t index, int file, uint64_t bytes) {
    const qe_manifest_file *entry = &at->checkpoint->manifest.files[index];
    char where[QE_ERROR_PATH_BYTES];
    qe_hash128 digest = {0, 0};
    qe_error unreadable = {0};
    qe_folder_text(at->checkpoint->path, entry->name, where);
    qe_status status =
        qe_safetensors_read(file, bytes, where, &at->checkpoint->files[index], &digest, &unreadable);
    if (status == QE_OK) QE_TRY(check_origin(at, entry, at->checkpoint->files[index]));
    QE_TRY(check_size(at, entry, bytes));
    if (status == QE_OK) return check_digest(at, entry, digest);
    if (status == QE_ERROR_FORMAT) /* written anew it would not be the manifest's */
        return qe_store_refuse(at->error_out, status, where, remedy, "%s", unreadable.message);
    if (at->error_out != NULL) *at->error_out = unreadable;
    return status;
}

static qe_status read_bytes(opening *at, const qe_manifest_file *entry, int file, uint64_t bytes) {
    enum { PIECE_BYTES = 1 << 16 };
    char where[QE_ERROR_PATH_BYTES], piece[PIECE_BYTES];
    qe_hash hash;
    QE_TRY(check_size(at, entry, bytes));
    qe_folder_text(at->checkpoint->path, entry->name, where);
    qe_hash_init(&hash);
    for (uint64_t left = bytes; left > 0;) {
        uint64_t now = left < PIECE_BYTES ? left : PIECE_BYTES;
        QE_TRY(qe_store_read(file, where, piece, now, at->error_out));
        qe_hash_update(&hash, piece, (size_t)now);
        left -= now;
    }
    return check_digest(at, entry, qe_hash_digest(&hash));
}

static qe_status read_file(opening *at, size_t index) {
    const qe_manifest_file *entry = &at->checkpoint->manifest.files[index];
    int file = -1;
    uint64_t bytes = 0;
    if (faccessat(at->folder, entry->name, F_OK, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT) {
        char where[QE_ERROR_PATH_BYTES];
        qe_folder_text(at->checkpoint->path, entry->name, where);
        return qe_store_refuse(at->error_out, QE_ERROR_IO, where, remedy,
                               "the manifest names a file that is not there");
    }
    QE_TRY(qe_folder_open_file(at->folder, at->checkpoint->path, entry->name, &file, &bytes, at->error_out));
    qe_status status = has_ending(entry->name, ".safetensors") ? read_tensors(at, index, file, bytes)
                                                               : read_bytes(at, entry, file, bytes);
    close(file);
    return status;
}

static int by_name(const void *left, const void *right) {
    return strcmp((*(const qe_tensor *const *)left)->name, (*(const qe_tensor *const *)right)->name);
}

static qe_status index_tensors(opening *at) {
    qe_checkpoint *checkpoint = at->checkpoint;
    size_t total = 0;
    for (size_t f = 0; f < checkpoint->manifest.file_count; f++)
        if (checkpoint->files[f] != NULL) total += qe_safetensors_count(checkpoint->files[f]);
    checkpoint->tensors = calloc(total + 1, sizeof *checkpoint->tensors);
    checkpoint->sorted = calloc(total + 1, sizeof *checkpoint->sorted);
    if (checkpoint->tensors == NULL || checkpoint->sorted == NULL)
        return qe_store_refuse_errno(at->error_out, checkpoint->path, "read", ENOMEM);
    for (size_t f = 0; f < checkpoint->manifest.file_count; f++)
        for (size_t i = 0; checkpoint->files[f] != NULL && i < qe_safetensors_count(checkpoint->files[f]); i++)
            checkpoint->tensors[checkpoint->count++] = qe_safetensors_at(checkpoint->files[f], i);
    memcpy(checkpoint->sorted, checkpoint->tensors, total * sizeof *checkpoint->sorted);
    qsort(checkpoint->sorted, total, sizeof *checkpoint->sorted, by_name);
    for (size_t i = 1; i < total; i++)
        if (by_name(&checkpoint->sorted[i - 1], &checkpoint->sorted[i]) == 0)
            return qe_store_refuse(at->error_out, QE_ERROR_FORMAT, checkpoint->path, remedy,
                                   "the tensor \"%.64s\" is in two files", checkpoint->sorted[i]->name);
    return QE_OK;
}

/* A scale is what its epoch says: the one that lies beside it must be the one that was counted. */
static qe_status check_epochs(opening *at) {
    const qe_counts *epochs = &at->checkpoint->manifest.epochs;
    for (size_t i = 0; i < epochs->count; i++) {
        char name[512];
        int64_t epoch = -1;
        snprintf(name, sizeof name, "%.480s.epoch", epochs->list[i].name);
        const qe_tensor *tensor = qe_checkpoint_find(at->checkpoint, name);
        if (tensor != NULL && tensor->dtype == QE_DTYPE_I64 && tensor->bytes == sizeof epoch)
            memcpy(&epoch, tensor->data, sizeof epoch);
        if (epoch < 0 || (uint64_t)epoch != epochs->list[i].count)
            return breach(at, QE_RULE_SCALE_EPOCH, QE_MANIFEST_NAME,
                          "%.96s: the manifest counts epoch %" PRIu64 ", the scale is of epoch %" PRId64 ".",
                          epochs->list[i].name, epochs->list[i].count, epoch);
    }
    return QE_OK;
}

static qe_status read_manifest(opening *at) {
    char *text = NULL, where[QE_ERROR_PATH_BYTES];
    size_t bytes = 0;
    struct stat kind;
    qe_folder_text(at->checkpoint->path, QE_MANIFEST_NAME, where);
    if (fstatat(at->folder, QE_MANIFEST_NAME, &kind, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT)
        return qe_store_refuse(at->error_out, QE_ERROR_IO, at->checkpoint->path, which,
                               "there is no manifest.json, so this is no checkpoint");
    QE_TRY(qe_folder_read(at->folder, at->checkpoint->path, QE_MANIFEST_NAME, QE_MANIFEST_BYTES_MAX, &text, &bytes,
                          at->error_out));
    qe_status status = qe_manifest_read_text(text, bytes, where, &at->checkpoint->manifest, at->error_out);
    free(text);
    return status;
}

static qe_status read_all(opening *at) {
    qe_checkpoint *checkpoint = at->checkpoint;
    QE_TRY(read_manifest(at));
    checkpoint->files = calloc(checkpoint->manifest.file_count + 1, sizeof(qe_safetensors *));
    if (checkpoint->files == NULL) return qe_store_refuse_errno(at->error_out, checkpoint->path, "read", ENOMEM);
    for (size_t i = 0; i < checkpoint->manifest.file_count; i++) QE_TRY(read_file(at, i));
    QE_TRY(index_tensors(at));
    return check_epochs(at);
}

/* Why a directory could not be opened. `flags` are those of openat. */
static qe_status refuse_folder(int parent, const char *name, int flags, const char *path, int code,
                               qe_error *error_out) {
    struct stat kind;
    int follows = flags & O_NOFOLLOW ? AT_SYMLINK_NOFOLLOW : 0;
    if (path[0] == 0) return qe_store_refuse(error_out, QE_ERROR_IO, path, which, "the path is empty");
    if (code == ENOENT)
        return qe_store_refuse(error_out, QE_ERROR_IO, path, which, "there is no such file or directory");
    int is_other = (code == ENOTDIR || code == ELOOP) && fstatat(parent, name, &kind, follows) == 0;
    if (is_other && S_ISLNK(kind.st_mode))
        return qe_store_refuse(error_out, QE_ERROR_FORMAT, path, "Put the directory itself there.", "it is a link");
    if (is_other && !S_ISDIR(kind.st_mode))
        return qe_store_refuse(error_out, QE_ERROR_IO, path, which, "it is a file, expected a directory");
    return qe_store_refuse_errno(error_out, path, "open", code);
}

/* `parent` is AT_FDCWD for a path of the user's, who may have put a link there. */
static qe_status open_at(int parent, const char *name, int flags, const char *path, qe_checkpoint **checkpoint_out,
                         qe_rule *rule_out, qe_error *error_out) {
    *rule_out = QE_RULE_NONE;
    opening at = {.error_out = error_out};
    at.folder = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags);
    if (at.folder < 0) return refuse_folder(parent, name, flags, path, errno, error_out);
    at.checkpoint = calloc(1, sizeof *at.checkpoint);
    qe_status status = QE_ERROR_MEMORY;
    if (at.checkpoint != NULL && (at.checkpoint->path = strdup(path)) != NULL) status = read_all(&at);
    else qe_store_refuse_errno(error_out, path, "read", ENOMEM);
    close(at.folder);
    if (status == QE_OK) return *checkpoint_out = at.checkpoint, QE_OK;
    *rule_out = at.rule;
    qe_checkpoint_close(at.checkpoint);
    return status;
}

qe_status qe_checkpoint_open(const char *path, qe_checkpoint **checkpoint_out, qe_rule *rule_out,
                             qe_error *error_out) {
    return open_at(AT_FDCWD, path, 0, path, checkpoint_out, rule_out, error_out);
}

void qe_checkpoint_close(qe_checkpoint *checkpoint) {
    if (checkpoint == NULL) return;
    for (size_t i = 0; checkpoint->files != NULL && i < checkpoint->manifest.file_count; i++)
        qe_safetensors_close(checkpoint->files[i]);
    qe_manifest_deinit(&checkpoint->manifest);
    free(checkpoint->files);
    free(checkpoint->tensors);
    free(checkpoint->sorted);
    free(checkpoint->path);
    free(checkpoint);
}

const qe_manifest *qe_checkpoint_manifest(const qe_checkpoint *checkpoint) {
    return &checkpoint->manifest;
}

const char *qe_checkpoint_path(const qe_checkpoint *checkpoint) {
    return checkpoint->path;
}

size_t qe_checkpoint_count(const qe_checkpoint *checkpoint) {
    return checkpoint->count;
}

const qe_tensor *qe_checkpoint_at(const qe_checkpoint *checkpoint, size_t index) {
    QE_ASSERT(index < checkpoint->count);
    return checkpoint->tensors[index];
}

const qe_tensor *qe_checkpoint_find(const qe_checkpoint *checkpoint, const char *name) {
    qe_tensor wanted = {.name = name};
    const qe_tensor *key = &wanted;
    const qe_tensor **found =
        bsearch(&key, checkpoint->sorted, checkpoint->count, sizeof *checkpoint->sorted, by_name);
    return found ? *found : NULL;
}

void qe_checkpoint_hash(const qe_checkpoint *checkpoint, char text_out[QE_DIGEST_BYTES]) {
    qe_hash hash;
    qe_hash_init(&hash);
    for (size_t i = 0; i < checkpoint->count; i++) {
        const qe_tensor *tensor = checkpoint->tensors[i];
        if (tensor->dtype == QE_DTYPE_F32 && (tensor->rank == 1 || tensor->rank == 2))
            qe_hash_tensor(&hash, tensor->name, tensor->rank, tensor->shape, tensor->data);
    }
    qe_hash_text(qe_hash_digest(&hash), text_out);
}

int qe_checkpoint_is_one(const char *path) {
    struct stat kind;
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return 0;
    int found = fstatat(folder, QE_MANIFEST_NAME, &kind, AT_SYMLINK_NOFOLLOW) == 0;
    close(folder);
    return found;
}

qe_status qe_checkpoint_list(const char *path, qe_checkpoint_name **names_out, size_t *count_out,
                             qe_error *error_out) {
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return refuse_folder(AT_FDCWD, path, 0, path, errno, error_out);
    qe_status status = qe_folder_checkpoints(folder, path, names_out, count_out, error_out);
    close(folder);
    return status;
}

/* One of a list; its manifest must be of the step in its name, or the list is not in order. */
static qe_status open_named(int folder, const char *path, const qe_checkpoint_name *name,
                            qe_checkpoint **checkpoint_out, qe_rule *rule_out, qe_error *error_out) {
    char where[QE_ERROR_PATH_BYTES];
    qe_folder_text(path, name->name, where);
    QE_TRY(open_at(folder, name->name, O_NOFOLLOW, where, checkpoint_out, rule_out, error_out));
    uint64_t step = (*checkpoint_out)->manifest.step;
    if (step == name->step) return QE_OK;
    qe_checkpoint_close(*checkpoint_out);
    return qe_store_refuse(error_out, QE_ERROR_FORMAT, where, "Give the directory its own name back.",
                           "the directory is named for step %" PRIu64 ", its manifest is of step %" PRIu64, name->step,
                           step);
}

qe_status qe_checkpoint_open_listed(const char *path, const qe_checkpoint_name *name, qe_checkpoint **checkpoint_out,
                                    qe_rule *rule_out, qe_error *error_out) {
    *rule_out = QE_RULE_NONE;
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return refuse_folder(AT_FDCWD, path, 0, path, errno, error_out);
    qe_status status = open_named(folder, path, name, checkpoint_out, rule_out, error_out);
    close(folder);
    return status;
}

static qe_status open_first(int folder, const char *path, const qe_checkpoint_name *names, size_t count,
                            qe_checkpoint_skipped skipped, void *context, qe_checkpoint **checkpoint_out,
                            qe_rule *rule_out, qe_error *error_out) {
    qe_error newest = {0};
    qe_rule newest_rule = QE_RULE_NONE;
    for (size_t i = 0; i < count; i++) {
        qe_error error = {0};
        qe_checkpoint *checkpoint = NULL;
        qe_status status = open_named(folder, path, &names[i], &checkpoint, rule_out, &error);
        if (status == QE_OK) return *checkpoint_out = checkpoint, QE_OK;
        if (status == QE_ERROR_MEMORY) return *error_out = error, status; /* says nothing about the checkpoint */
        if (i == 0) newest = error, newest_rule = *rule_out;
        if (skipped != NULL) skipped(context, names[i].name, *rule_out, &error);
    }
    *rule_out = newest_rule;
    if (count > 0) return *error_out = newest, newest.status;
    return qe_store_refuse(error_out, QE_ERROR_IO, path, which, "there is no checkpoint in this directory");
}

qe_status qe_checkpoint_open_newest(const char *path, qe_checkpoint_skipped skipped, void *context,
                                    qe_checkpoint **checkpoint_out, qe_rule *rule_out, qe_error *error_out) {
    qe_checkpoint_name *names = NULL;
    size_t count = 0;
    qe_error error = {0};
    *rule_out = QE_RULE_NONE;
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return refuse_folder(AT_FDCWD, path, 0, path, errno, error_out);
    qe_status status = qe_folder_checkpoints(folder, path, &names, &count, &error);
    if (status == QE_OK)
        status = open_first(folder, path, names, count, skipped, context, checkpoint_out, rule_out, &error);
    free(names);
    close(folder);
    if (status != QE_OK && error_out != NULL) *error_out = error;
    return status;
}
