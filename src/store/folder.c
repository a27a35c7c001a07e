/* folder.c - directories by descriptor: made beside, published, discarded, swept. */
#include "store/folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "store/file.h"
#include "store/manifest.h"

enum {
    NAMES_TRIED = 1000, /* discarded directories of one process that could not be removed */
    DEPTH_MAX = 16,     /* of directories that others made below a checkpoint: each takes a descriptor meanwhile */
};

static const char partial_prefix[] = ".qeffect-partial-", discarded_prefix[] = ".qeffect-discarded-";

void qe_folder_text(const char *path, const char *name, char text_out[QE_ERROR_PATH_BYTES]) {
    (void)!snprintf(text_out, QE_ERROR_PATH_BYTES, "%.*s/%s", QE_ERROR_PATH_BYTES - 140, path, name);
}

int qe_folder_make_beside(int parent, const char *kind, char name_out[QE_CHECKPOINT_NAME_BYTES * 2]) {
    int code = EEXIST;
    for (int i = 0; i < NAMES_TRIED && code == EEXIST; i++) {
        snprintf(name_out, QE_CHECKPOINT_NAME_BYTES * 2, ".qeffect-%s-%ld-%d", kind, (long)getpid(), i);
        code = mkdirat(parent, name_out, 0777) == 0 ? 0 : errno;
    }
    return code;
}

static int by_name(const void *left, const void *right) {
    return strcmp(*(char *const *)left, *(char *const *)right);
}

void qe_folder_names_free(char **names, size_t count) {
    for (size_t i = 0; i < count; i++) free(names[i]);
    free(names);
}

/* Appends a copy; 0, or -1. */
static int add_name(char ***names, size_t *count, const char *name) {
    char **grown = realloc(*names, (*count + 1) * sizeof *grown);
    if (grown == NULL) return -1;
    *names = grown;
    grown[*count] = strdup(name);
    if (grown[*count] == NULL) return -1;
    ++*count;
    return 0;
}

static int read_names(DIR *directory, char ***names, size_t *count) {
    for (;;) {
        errno = 0;
        const struct dirent *entry = readdir(directory);
        if (entry == NULL) return errno;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (add_name(names, count, entry->d_name) != 0) return ENOMEM;
    }
}

/* A descriptor of its own: reading a directory moves its place. */
static DIR *directory_again(int descriptor) {
    int own = openat(descriptor, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = own >= 0 ? fdopendir(own) : NULL;
    if (directory == NULL && own >= 0) close(own);
    return directory;
}

static int list_names(int descriptor, char ***names_out, size_t *count_out) {
    DIR *directory = directory_again(descriptor);
    if (directory == NULL) return errno;
    *names_out = NULL;
    *count_out = 0;
    int code = read_names(directory, names_out, count_out);
    closedir(directory);
    if (code != 0) qe_folder_names_free(*names_out, *count_out);
    else if (*count_out > 0) qsort(*names_out, *count_out, sizeof **names_out, by_name);
    return code;
}

qe_status qe_folder_names(int descriptor, const char *path, char ***names_out, size_t *count_out,
                          qe_error *error_out) {
    int code = list_names(descriptor, names_out, count_out);
    return code == 0 ? QE_OK : qe_store_refuse_errno(error_out, path, "list", code);
}

/* Other programs put directories of their own beside a checkpoint's files (caches of an upload, of a notebook): they
 * go with it. `depth`: how many levels below. */
static int remove_tree(int parent, const char *name, int depth) {
    char **names = NULL;
    size_t count = 0;
    int descriptor = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (descriptor < 0) return errno;
    int code = list_names(descriptor, &names, &count);
    for (size_t i = 0; code == 0 && i < count; i++)
        if (unlinkat(descriptor, names[i], 0) != 0 && errno == EISDIR && depth > 0)
            (void)!remove_tree(descriptor, names[i], depth - 1);
    if (code == 0) qe_folder_names_free(names, count);
    close(descriptor);
    if (code == 0 && unlinkat(parent, name, AT_REMOVEDIR) != 0) code = errno;
    return code;
}

int qe_folder_remove(int parent, const char *name) { return remove_tree(parent, name, DEPTH_MAX); }

/* Where a file system cannot exchange, what was there is put aside first; a death in between leaves the older ones. */
static int replace_slowly(int parent, const char *from, const char *name) {
    char aside[QE_CHECKPOINT_NAME_BYTES * 2];
    int code = qe_folder_make_beside(parent, "discarded", aside);
    if (code != 0) return code;
    if (renameat(parent, name, parent, aside) != 0) code = errno; /* over an empty directory */
    if (code == 0 && renameat(parent, from, parent, name) != 0) {
        code = errno;
        (void)!renameat(parent, aside, parent, name);
    }
    if (code == 0 && renameat(parent, aside, parent, from) != 0) code = errno;
    return code;
}

int qe_folder_publish(int parent, const char *from, const char *name) {
    if (renameat2(parent, from, parent, name, RENAME_NOREPLACE) == 0) return 0;
    if (errno == EEXIST) {
        if (renameat2(parent, from, parent, name, RENAME_EXCHANGE) == 0) return 0;
        return errno == EINVAL || errno == ENOSYS ? replace_slowly(parent, from, name) : errno;
    }
    if (errno != EINVAL && errno != ENOSYS) return errno;
    if (renameat(parent, from, parent, name) == 0) return 0; /* refused where a checkpoint is: it is not empty */
    return errno == ENOTEMPTY || errno == EEXIST ? replace_slowly(parent, from, name) : errno;
}

/* ".qeffect-partial-PID-N" as a file: a single file on its way. */
static int is_abandoned_file(const char *name) {
    if (strncmp(name, partial_prefix, sizeof partial_prefix - 1) != 0) return 0;
    char *end = NULL;
    long process = strtol(name + sizeof partial_prefix - 1, &end, 10);
    if (process <= 0 || *end != '-') return 0;
    return kill((pid_t)process, 0) != 0 && errno == ESRCH;
}

static int is_left_over(const char *name) {
    return strncmp(name, partial_prefix, sizeof partial_prefix - 1) == 0 ||
           strncmp(name, discarded_prefix, sizeof discarded_prefix - 1) == 0;
}

void qe_folder_sweep(const qe_checkpoint_folder *folder) {
    char **names = NULL;
    size_t count = 0;
    if (list_names(folder->descriptor, &names, &count) != 0) return; /* the next save tries again */
    for (size_t i = 0; i < count; i++) {
        struct stat kind;
        if (!is_left_over(names[i])) continue;
        if (fstatat(folder->descriptor, names[i], &kind, AT_SYMLINK_NOFOLLOW) != 0) continue;
        if (S_ISDIR(kind.st_mode)) (void)qe_folder_remove(folder->descriptor, names[i]);
        else if (S_ISLNK(kind.st_mode) || is_abandoned_file(names[i]))
            (void)!unlinkat(folder->descriptor, names[i], 0);
    }
    qe_folder_names_free(names, count);
}

/* The newest first; what cannot be read before all. */
static int by_serial(const void *left, const void *right) {
    const qe_checkpoint_name *one = left, *two = right;
    if (one->serial != two->serial) return one->serial > two->serial ? -1 : 1;
    return one->step > two->step ? -1 : one->step < two->step;
}

/* What cannot be read now (no descriptors, no memory, a device that fails) may be whole: only what is not there, or no
 * directory, is no checkpoint. */
static qe_status unread(int code) {
    return code == ENOENT || code == ENOTDIR || code == ELOOP ? QE_ERROR_FORMAT : QE_ERROR_IO;
}

/* Reads the manifest of a checkpoint below `parent`; an empty manifest where there is none that can be read.
 * On failure: QE_ERROR_IO and QE_ERROR_MEMORY say nothing about the checkpoint. */
static qe_status read_manifest(int parent, const char *path, const char *name, qe_manifest *manifest_out) {
    char *text = NULL;
    size_t bytes = 0;
    int descriptor = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    memset(manifest_out, 0, sizeof *manifest_out);
    if (descriptor < 0) return unread(errno);
    qe_status status =
        qe_folder_read(descriptor, path, QE_MANIFEST_NAME, QE_MANIFEST_BYTES_MAX, &text, &bytes, NULL);
    if (status == QE_ERROR_IO && faccessat(descriptor, QE_MANIFEST_NAME, F_OK, AT_SYMLINK_NOFOLLOW) != 0)
        status = unread(errno);
    if (status == QE_OK) status = qe_manifest_read_text(text, bytes, path, manifest_out, NULL);
    free(text);
    close(descriptor);
    return status;
}

qe_status qe_folder_checkpoints(int descriptor, const char *path, qe_checkpoint_name **names_out, size_t *count_out,
                                qe_error *error_out) {
    char **names = NULL;
    size_t count = 0, found = 0;
    QE_TRY(qe_folder_names(descriptor, path, &names, &count, error_out));
    qe_checkpoint_name *list = calloc(count + 1, sizeof *list);
    for (size_t i = 0; list != NULL && i < count; i++) {
        qe_manifest manifest;
        qe_checkpoint_name *one = &list[found];
        if (!qe_checkpoint_name_read(names[i], &one->step)) continue;
        snprintf(one->name, sizeof one->name, "%s", names[i]);
        qe_status status = read_manifest(descriptor, path, names[i], &manifest);
        /* Once more what was refused for a moment: without its serial an old one would come first. */
        if (status == QE_ERROR_IO) status = read_manifest(descriptor, path, names[i], &manifest);
        one->serial = status == QE_OK ? manifest.serial : UINT64_MAX;
        one->is_foreign = status == QE_ERROR_UNSUPPORTED || status == QE_ERROR_IO;
        qe_manifest_deinit(&manifest);
        found++;
        if (status != QE_ERROR_MEMORY) continue;
        free(list); /* which one is the newest cannot be told */
        list = NULL;
    }
    qe_folder_names_free(names, count);
    if (list == NULL) return qe_store_refuse_errno(error_out, path, "list", ENOMEM);
    if (found > 0) qsort(list, found, sizeof *list, by_serial);
    *names_out = list;
    *count_out = found;
    return QE_OK;
}

/* Out of sight in one step, then file by file: a death in between leaves nothing that looks like a checkpoint. */
static int discard(int parent, const char *name) {
    char aside[QE_CHECKPOINT_NAME_BYTES * 2];
    int code = qe_folder_make_beside(parent, "discarded", aside);
    if (code != 0) return code;
    if (renameat(parent, name, parent, aside) != 0) {
        code = errno;
        (void)!unlinkat(parent, aside, AT_REMOVEDIR);
        return code;
    }
    return qe_folder_remove(parent, aside);
}

void qe_folder_trust(qe_checkpoint_folder *folder, const char *name) {
    for (size_t i = 0; i < folder->distrusted_count; i++)
        if (strcmp(folder->distrusted[i], name) == 0)
            memcpy(folder->distrusted[i], folder->distrusted[--folder->distrusted_count], QE_CHECKPOINT_NAME_BYTES);
}

qe_status qe_checkpoint_folder_distrust(qe_checkpoint_folder *folder, const char *name, qe_error *error_out) {
    char(*grown)[QE_CHECKPOINT_NAME_BYTES] =
        realloc(folder->distrusted, (folder->distrusted_count + 1) * sizeof *grown);
    if (grown == NULL) return qe_store_refuse_errno(error_out, folder->path, "open", ENOMEM);
    folder->distrusted = grown;
    snprintf(grown[folder->distrusted_count++], QE_CHECKPOINT_NAME_BYTES, "%s", name);
    return QE_OK;
}

/* Worth a place among those that stay? */
static int is_good(const qe_checkpoint_folder *folder, const qe_checkpoint_name *name) {
    for (size_t i = 0; i < folder->distrusted_count; i++)
        if (strcmp(folder->distrusted[i], name->name) == 0) return 0;
    return qe_folder_looks_complete(folder->descriptor, folder->path, name->name);
}

int qe_folder_prune(const qe_checkpoint_folder *folder) {
    qe_checkpoint_name *names = NULL;
    size_t count = 0;
    uint32_t good = 0;
    int code = 0;
    if (folder->keep == 0) return 0;
    if (qe_folder_checkpoints(folder->descriptor, folder->path, &names, &count, NULL) != QE_OK) return EIO;
    for (size_t i = 0; i < count; i++) {
        if (names[i].is_foreign) continue;
        if (good < folder->keep && is_good(folder, &names[i])) {
            good++;
            continue;
        }
        int failed = discard(folder->descriptor, names[i].name);
        if (failed) code = failed;
    }
    free(names);
    return code;
}

qe_status qe_folder_open_file(int descriptor, const char *path, const char *name, int *file_out, uint64_t *bytes_out,
                              qe_error *error_out) {
    char text[QE_ERROR_PATH_BYTES];
    struct stat kind;
    qe_folder_text(path, name, text);
    /* O_NONBLOCK: opening a pipe must not wait for a writer. */
    int file = openat(descriptor, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (file < 0 && errno == ELOOP)
        return qe_store_refuse(error_out, QE_ERROR_FORMAT, text, "Put the file itself there.", "the file is a link");
    if (file < 0) return qe_store_refuse_errno(error_out, text, "open", errno);
    int examined = fstat(file, &kind) == 0;
    if (examined && S_ISREG(kind.st_mode)) {
        *file_out = file;
        *bytes_out = (uint64_t)kind.st_size;
        return QE_OK;
    }
    int code = errno;
    close(file);
    if (!examined) return qe_store_refuse_errno(error_out, text, "examine", code);
    return qe_store_refuse(error_out, QE_ERROR_FORMAT, text, "Put the file itself there.", "it is not a regular file");
}

qe_status qe_folder_read(int descriptor, const char *path, const char *name, size_t bytes_max, char **text_out,
                         size_t *bytes_out, qe_error *error_out) {
    char where[QE_ERROR_PATH_BYTES];
    int file = -1;
    uint64_t bytes = 0;
    qe_folder_text(path, name, where);
    QE_TRY(qe_folder_open_file(descriptor, path, name, &file, &bytes, error_out));
    char *text = bytes <= bytes_max ? malloc((size_t)bytes + 1) : NULL;
    qe_status status = QE_OK;
    if (bytes > bytes_max)
        status = qe_store_refuse(error_out, QE_ERROR_LIMIT, where, "Use another checkpoint.",
                                 "the file has %" PRIu64 " bytes, expected at most %zu", bytes, bytes_max);
    else if (text == NULL) status = qe_store_refuse_errno(error_out, where, "read", ENOMEM);
    else status = qe_store_read(file, where, text, bytes, error_out);
    close(file);
    if (status != QE_OK) {
        free(text);
        return status;
    }
    text[bytes] = 0;
    *text_out = text;
    *bytes_out = (size_t)bytes;
    return QE_OK;
}

static int has_size(int descriptor, const qe_manifest_file *file) {
    struct stat kind;
    return fstatat(descriptor, file->name, &kind, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(kind.st_mode) &&
           (uint64_t)kind.st_size == file->bytes;
}

int qe_folder_looks_complete(int parent, const char *path, const char *name) {
    qe_manifest manifest;
    int complete = read_manifest(parent, path, name, &manifest) == QE_OK;
    int descriptor = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    for (size_t i = 0; complete && i < manifest.file_count; i++)
        complete = descriptor >= 0 && has_size(descriptor, &manifest.files[i]);
    if (descriptor >= 0) close(descriptor);
    qe_manifest_deinit(&manifest);
    return complete;
}

/* A file system that knows no locks lets everybody in. */
static int lock(int descriptor) {
    if (flock(descriptor, LOCK_EX | LOCK_NB) == 0) return 0;
    return errno == EWOULDBLOCK ? EWOULDBLOCK : 0;
}

static qe_status open_locked(const char *path, int *descriptor_out, qe_error *error_out) {
    int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return qe_store_refuse_errno(error_out, path, "open", errno);
    if (lock(descriptor) == 0) return *descriptor_out = descriptor, QE_OK;
    close(descriptor);
    return qe_store_refuse(error_out, QE_ERROR_IO, path, "Wait until it has ended, or set another checkpoint.path.",
                           "another run keeps its checkpoints in this directory");
}

static qe_status find_serial(qe_checkpoint_folder *folder, qe_error *error_out) {
    qe_checkpoint_name *names = NULL;
    size_t count = 0;
    QE_TRY(qe_folder_checkpoints(folder->descriptor, folder->path, &names, &count, error_out));
    for (size_t i = 0; i < count; i++)
        if (names[i].serial != UINT64_MAX && names[i].serial > folder->serial) folder->serial = names[i].serial;
    free(names);
    return QE_OK;
}

qe_status qe_checkpoint_folder_open(const char *path, uint32_t keep, qe_checkpoint_folder **folder_out,
                                    qe_error *error_out) {
    QE_TRY(qe_store_make_directory(path, error_out));
    qe_checkpoint_folder *folder = calloc(1, sizeof *folder);
    char *copy = strdup(path);
    qe_status status = folder && copy ? open_locked(path, &folder->descriptor, error_out)
                                      : qe_store_refuse_errno(error_out, path, "open", ENOMEM);
    if (status != QE_OK) {
        free(copy);
        free(folder);
        return status;
    }
    folder->path = copy;
    folder->keep = keep;
    qe_folder_sweep(folder);
    status = find_serial(folder, error_out);
    if (status == QE_OK) *folder_out = folder;
    else qe_checkpoint_folder_close(folder);
    return status;
}

void qe_checkpoint_folder_close(qe_checkpoint_folder *folder) {
    if (folder == NULL) return;
    close(folder->descriptor);
    free(folder->distrusted);
    free(folder->path);
    free(folder);
}
