/* checkpoint_write.c - one checkpoint: beside its place, synced, renamed, the parent synced. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/hash.h"
#include "store/file.h"
#include "store/folder.h"
#include "store/manifest.h"
#include "store/tensor.h"

/* A file of the directory that is being written, hashed on its way. */
typedef struct output {
    int folder, file;
    const char *path; /* for messages */
    char where[QE_ERROR_PATH_BYTES];
    qe_hash hash;
    uint64_t bytes;
    qe_pace *pace;
} output;

static qe_status put_piece(output *to, const char *bytes, size_t size_bytes, qe_error *error_out) {
    size_t done = 0;
    while (done < size_bytes) {
        ssize_t written = write(to->file, bytes + done, size_bytes - done);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return qe_store_refuse_errno(error_out, to->where, "write", errno);
        done += (size_t)written;
    }
    qe_hash_update(&to->hash, bytes, size_bytes);
    to->bytes += size_bytes;
    qe_pace_rest(to->pace);
    return QE_OK;
}

static qe_status put(void *context, const void *bytes, uint64_t size_bytes, qe_error *error_out) {
    output *to = context;
    for (uint64_t done = 0; done < size_bytes;) {
        uint64_t left = size_bytes - done, piece = left < QE_PACE_PIECE_BYTES ? left : QE_PACE_PIECE_BYTES;
        QE_TRY(put_piece(to, (const char *)bytes + done, (size_t)piece, error_out));
        done += piece;
    }
    return QE_OK;
}

static qe_status begin(output *to, const char *name, qe_error *error_out) {
    qe_folder_text(to->path, name, to->where);
    qe_hash_init(&to->hash);
    to->bytes = 0;
    to->file = openat(to->folder, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    return to->file >= 0 ? QE_OK : qe_store_refuse_errno(error_out, to->where, "write", errno);
}

/* What could not be synced was not written: the pages may be gone. */
static qe_status end(output *to, qe_status status, qe_error *error_out) {
    if (status == QE_OK && fsync(to->file) != 0) status = qe_store_refuse_errno(error_out, to->where, "sync", errno);
    if (close(to->file) != 0 && status == QE_OK)
        status = qe_store_refuse_errno(error_out, to->where, "write", errno);
    return status;
}

static void note(qe_manifest *manifest, const output *from, char *name) {
    qe_manifest_file *file = &manifest->files[manifest->file_count++];
    file->name = name;
    file->bytes = from->bytes;
    qe_hash_text(qe_hash_digest(&from->hash), file->digest);
}

static qe_status write_part(output *to, const qe_checkpoint_part *part, qe_manifest *manifest, qe_error *error_out) {
    char step[32], *name = strdup(part->file);
    snprintf(step, sizeof step, "%llu", (unsigned long long)manifest->step);
    const qe_metadata metadata[] = {
        {"format", "pt"}, {"qeffect.run", qe_manifest_run(manifest)}, {"qeffect.step", step}};
    qe_byte_sink sink = {.context = to, .write = put};
    if (name == NULL) return qe_store_refuse_errno(error_out, to->path, "write", ENOMEM);
    qe_status status = begin(to, part->file, error_out);
    if (status == QE_OK) {
        status = qe_safetensors_emit(to->where, part->tensors, part->count, metadata, 3, &sink, error_out);
        status = end(to, status, error_out);
    }
    if (status == QE_OK) note(manifest, to, name);
    else free(name);
    return status;
}

static qe_status write_bytes(output *to, const char *name, const char *text, size_t bytes, qe_error *error_out) {
    QE_TRY(begin(to, name, error_out));
    return end(to, put(to, text, bytes, error_out), error_out);
}

static qe_status write_config(output *to, const qe_checkpoint_content *content, qe_error *error_out) {
    char *text = NULL, *name = strdup("config.json");
    size_t bytes = 0;
    qe_status status = name ? qe_store_model_text(to->path, &content->model, &text, &bytes, error_out)
                            : qe_store_refuse_errno(error_out, to->path, "write", ENOMEM);
    if (status == QE_OK) status = write_bytes(to, name, text, bytes, error_out);
    free(text);
    if (status == QE_OK) note(content->manifest, to, name);
    else free(name);
    return status;
}

static qe_status write_manifest(output *to, const qe_manifest *manifest, qe_error *error_out) {
    char *text = NULL;
    size_t bytes = 0;
    QE_TRY(qe_manifest_write_text(manifest, to->path, &text, &bytes, error_out));
    qe_status status = write_bytes(to, QE_MANIFEST_NAME, text, bytes, error_out);
    free(text);
    return status;
}

static void hash_state(const qe_checkpoint_content *content, qe_pace *pace) {
    qe_hash hash;
    qe_hash_init(&hash);
    for (size_t p = 0; p < content->part_count; p++)
        for (size_t i = 0; i < content->parts[p].count; i++) {
            const qe_tensor *tensor = &content->parts[p].tensors[i];
            if (tensor->dtype != QE_DTYPE_F32) continue;
            qe_hash_tensor(&hash, tensor->name, tensor->rank, tensor->shape, tensor->data);
            if (tensor->bytes >= QE_PACE_PIECE_BYTES) qe_pace_rest(pace);
        }
    qe_hash_text(qe_hash_digest(&hash), content->manifest->state_hash);
}

/* Forgets the files of an earlier write with this manifest. */
static qe_status prepare_files(const qe_checkpoint_content *content, const char *path, qe_error *error_out) {
    qe_manifest *manifest = content->manifest;
    for (size_t i = 0; i < manifest->file_count; i++) free(manifest->files[i].name);
    free(manifest->files);
    manifest->file_count = 0;
    manifest->files = calloc(content->part_count + 1, sizeof *manifest->files);
    return manifest->files ? QE_OK : qe_store_refuse_errno(error_out, path, "write", ENOMEM);
}

static qe_status write_all(output *to, const qe_checkpoint_content *content, qe_error *error_out) {
    QE_TRY(prepare_files(content, to->path, error_out));
    hash_state(content, to->pace);
    for (size_t i = 0; i < content->part_count; i++)
        if (content->parts[i].count > 0) QE_TRY(write_part(to, &content->parts[i], content->manifest, error_out));
    QE_TRY(write_config(to, content, error_out));
    QE_TRY(write_manifest(to, content->manifest, error_out));
    if (fsync(to->folder) != 0 && errno != EINVAL)
        return qe_store_refuse_errno(error_out, to->path, "sync the directory of", errno);
    return QE_OK;
}

/* Written and synced under a name that nobody looks for; or nothing. */
static qe_status write_beside(const qe_checkpoint_folder *folder, const qe_checkpoint_content *content, qe_pace *pace,
                              char name_out[QE_CHECKPOINT_NAME_BYTES * 2], qe_error *error_out) {
    output to = {.path = folder->path, .pace = pace};
    int code = qe_folder_make_beside(folder->descriptor, "partial", name_out);
    if (code != 0) return qe_store_refuse_errno(error_out, folder->path, "make a directory in", code);
    to.folder = openat(folder->descriptor, name_out, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    qe_status status = to.folder >= 0 ? write_all(&to, content, error_out)
                                      : qe_store_refuse_errno(error_out, folder->path, "open a directory in", errno);
    if (to.folder >= 0) close(to.folder);
    if (status != QE_OK) (void)qe_folder_remove(folder->descriptor, name_out);
    return status;
}

qe_status qe_checkpoint_write(qe_checkpoint_folder *folder, const qe_checkpoint_content *content,
                              qe_error *error_out) {
    return qe_checkpoint_write_paced(folder, content, NULL, error_out);
}

qe_status qe_checkpoint_write_paced(qe_checkpoint_folder *folder, const qe_checkpoint_content *content, qe_pace *pace,
                                    qe_error *error_out) {
    char partial[QE_CHECKPOINT_NAME_BYTES * 2], name[QE_CHECKPOINT_NAME_BYTES];
    qe_checkpoint_name_make(content->manifest->step, name);
    if (content->gather != NULL) QE_TRY(content->gather(content->gather_context, error_out));
    if (pace != NULL) qe_pace_begin(pace);
    qe_folder_sweep(folder);
    content->manifest->serial = ++folder->serial;
    QE_TRY(write_beside(folder, content, pace, partial, error_out));
    int code = qe_folder_publish(folder->descriptor, partial, name);
    (void)qe_folder_remove(folder->descriptor, partial); /* what was there before, or what could not take its place */
    if (code != 0) return qe_store_refuse_errno(error_out, folder->path, "name the new checkpoint in", code);
    if (fsync(folder->descriptor) != 0 && errno != EINVAL)
        return qe_store_refuse_errno(error_out, folder->path, "sync the directory of", errno);
    qe_folder_trust(folder, name);
    (void)qe_folder_prune(folder); /* what stays for now is removed by the next save */
    return QE_OK;
}
