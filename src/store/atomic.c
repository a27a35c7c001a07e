/* atomic.c - write beside, sync, rename, sync the directory. A reader sees the old file or the new one. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "qeffect/safetensors.h"
#include "store/file.h"
#include "store/folder.h"

enum { NAMES_TRIED = 100 }; /* unfinished files of this process or of dead ones with its number */

/* The directory of a path, owned by the caller; NULL when memory is out. */
static char *directory_of(const char *path) {
    const char *slash = strrchr(path, '/');
    if (slash == NULL) return strdup(".");
    return strndup(path, slash == path ? 1 : (size_t)(slash - path));
}

/* Where the bytes shall lie in the end. A link stays a link; a device or a directory must not be renamed over. */
static qe_status resolve(const char *path, char **target_out, mode_t *mode_out, qe_error *error_out) {
    struct stat kind;
    int exists = stat(path, &kind) == 0;
    if (!exists && errno != ENOENT) return qe_store_refuse_errno(error_out, path, "write", errno);
    if (path[0] == '\0') return qe_store_refuse_errno(error_out, path, "write", ENOENT);
    if (exists && !S_ISREG(kind.st_mode))
        return qe_store_refuse(error_out, QE_ERROR_IO, path, "Name a file that is new or regular.",
                               "cannot write the file: it is %s",
                               S_ISDIR(kind.st_mode) ? "a directory" : "a device or a pipe");
    *target_out = exists ? realpath(path, NULL) : strdup(path);
    *mode_out = exists ? kind.st_mode & 07777 : 0;
    return *target_out ? QE_OK : qe_store_refuse_errno(error_out, path, "write", errno);
}

/* Creates a file of a name that nobody has, in the target's directory; returns an errno. */
static int create_beside(qe_atomic_file *file) {
    char *directory = directory_of(file->target);
    if (directory == NULL) return ENOMEM;
    int code = EEXIST;
    for (int i = 0; i < NAMES_TRIED && code == EEXIST; i++) {
        free(file->temporary);
        file->temporary = NULL;
        if (asprintf(&file->temporary, "%s/.qeffect-partial-%ld-%d", directory, (long)getpid(), i) < 0) {
            file->temporary = NULL;
            code = ENOMEM;
            break;
        }
        file->descriptor = open(file->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        code = file->descriptor >= 0 ? 0 : errno;
    }
    free(directory);
    return code;
}

static void forget(qe_atomic_file *file) {
    if (file->descriptor >= 0) close(file->descriptor);
    free(file->target);
    free(file->temporary);
    *file = (qe_atomic_file){.descriptor = -1};
}

qe_status qe_atomic_file_begin(const char *path, qe_atomic_file *file_out, qe_error *error_out) {
    qe_atomic_file file = {.descriptor = -1};
    mode_t mode = 0;
    QE_TRY(resolve(path, &file.target, &mode, error_out));
    int code = create_beside(&file);
    if (code != 0) {
        forget(&file);
        return qe_store_refuse_errno(error_out, path, "write", code);
    }
    if (mode != 0) (void)!fchmod(file.descriptor, mode); /* someone else's file keeps our mode: no reason to fail */
    *file_out = file;
    return QE_OK;
}

qe_status qe_atomic_file_write(qe_atomic_file *file, const void *bytes, uint64_t size_bytes, qe_error *error_out) {
    uint64_t done = 0;
    while (done < size_bytes) {
        ssize_t put = write(file->descriptor, (const char *)bytes + done, (size_t)(size_bytes - done));
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return qe_store_refuse_errno(error_out, file->target, "write", errno);
        done += (uint64_t)put;
    }
    return QE_OK;
}

/* Makes the rename last. Some file systems cannot sync a directory, and say EINVAL; some directories cannot be read. */
static int sync_directory(const char *path) {
    char *directory = directory_of(path);
    if (directory == NULL) return ENOMEM;
    int descriptor = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC), code = 0;
    free(directory);
    if (descriptor < 0) return errno == EACCES ? 0 : errno;
    if (fsync(descriptor) != 0 && errno != EINVAL) code = errno;
    close(descriptor);
    return code;
}

static int finish(qe_atomic_file *file) {
    if (fsync(file->descriptor) != 0) return errno;
    int descriptor = file->descriptor;
    file->descriptor = -1;
    if (close(descriptor) != 0) return errno;
    if (rename(file->temporary, file->target) != 0) return errno;
    return 0;
}

qe_status qe_atomic_file_commit(qe_atomic_file *file, qe_error *error_out) {
    int code = finish(file);
    if (code != 0) {
        qe_store_refuse_errno(error_out, file->target, "write", code);
        qe_atomic_file_abort(file);
        return code == ENOMEM ? QE_ERROR_MEMORY : QE_ERROR_IO;
    }
    qe_status status = QE_OK;
    code = sync_directory(file->target);
    if (code != 0) status = qe_store_refuse_errno(error_out, file->target, "sync the directory of", code);
    forget(file);
    return status;
}

void qe_atomic_file_abort(qe_atomic_file *file) {
    if (file->temporary != NULL) unlink(file->temporary);
    forget(file);
}

qe_status qe_store_write_text_atomic(const char *path, const void *bytes, size_t size_bytes, qe_error *error_out) {
    qe_atomic_file file;
    QE_TRY(qe_atomic_file_begin(path, &file, error_out));
    qe_status status = qe_atomic_file_write(&file, bytes, size_bytes, error_out);
    if (status == QE_OK) return qe_atomic_file_commit(&file, error_out);
    qe_atomic_file_abort(&file);
    return status;
}

qe_status qe_store_try_file(const char *path, qe_error *error_out) {
    qe_atomic_file file;
    QE_TRY(qe_atomic_file_begin(path, &file, error_out));
    qe_atomic_file_abort(&file);
    return QE_OK;
}

/* One component, `path` cut there; returns an errno. */
static int make_one(const char *path) {
    struct stat kind;
    if (mkdir(path, 0777) == 0) return 0;
    int code = errno;
    if (stat(path, &kind) != 0) return code;
    return S_ISDIR(kind.st_mode) ? 0 : ENOTDIR;
}

qe_status qe_store_make_directory(const char *path, qe_error *error_out) {
    char *partial = strdup(path);
    if (partial == NULL) return qe_store_refuse_errno(error_out, path, "make", ENOMEM);
    int code = path[0] == '\0' ? ENOENT : 0;
    for (char *at = partial; code == 0;) {
        at += strspn(at, "/");
        at += strcspn(at, "/");
        char kept = *at;
        *at = '\0';
        code = make_one(partial);
        if (kept == '\0' || code != 0) break;
        *at = kept;
    }
    qe_status status = QE_OK;
    if (code != 0)
        status = qe_store_refuse(error_out, code == ENOMEM ? QE_ERROR_MEMORY : QE_ERROR_IO, partial,
                                 "Name another directory, or make this one.", "cannot make the directory: %s",
                                 code == ENOTDIR ? "a file of that name is in the way" : strerror(code));
    free(partial);
    return status;
}

/* Cuts the last component off; "" becomes ".". */
static void to_parent(char *path) {
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') length--;
    while (length > 0 && path[length - 1] != '/') length--;
    while (length > 1 && path[length - 1] == '/') length--;
    path[length] = '\0';
    if (length == 0) snprintf(path, 2, ".");
}

/* Makes a directory in one that there is, and removes it; returns an errno. */
static int try_inside(const char *path) {
    char name[2 * QE_CHECKPOINT_NAME_BYTES];
    int descriptor = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC); /* some may be written into, but not read */
    if (descriptor < 0) return errno;
    int code = qe_folder_make_beside(descriptor, "partial", name);
    if (code == 0 && unlinkat(descriptor, name, AT_REMOVEDIR) != 0) code = errno;
    close(descriptor);
    return code;
}

qe_status qe_store_try_directory(const char *path, qe_error *error_out) {
    char *nearest = malloc(strlen(path) + 2);
    struct stat kind;
    if (nearest == NULL) return qe_store_refuse_errno(error_out, path, "make", ENOMEM);
    snprintf(nearest, strlen(path) + 1, "%s", path);
    for (size_t end = strlen(nearest); end > 1 && nearest[end - 1] == '/'; end--) nearest[end - 1] = '\0';
    /* a link to nothing is something: no directory can be made in its place */
    while (lstat(nearest, &kind) != 0 && errno == ENOENT && strcmp(nearest, ".") != 0 && strcmp(nearest, "/") != 0)
        to_parent(nearest);
    qe_status status = QE_OK;
    int code = stat(nearest, &kind) != 0 ? errno : S_ISDIR(kind.st_mode) ? 0 : ENOTDIR;
    if (code != 0)
        status = qe_store_refuse(error_out, QE_ERROR_IO, nearest, "Name another directory, or move what is there.",
                                 "cannot make the directory: %s",
                                 code == ENOTDIR  ? "a file of that name is in the way"
                                 : code == ENOENT ? "a link to what is not there is in the way"
                                                  : strerror(code));
    else if ((code = try_inside(nearest)) != 0)
        status = qe_store_refuse(error_out, QE_ERROR_IO, nearest, "Name a directory that you may write to.",
                                 "cannot write into the directory: %s", strerror(code));
    free(nearest);
    return status;
}
