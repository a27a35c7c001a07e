/* fault_files.c - the shim of the crash tests inside of this program, and what it lacks: calls of readers, and FILE
 * streams, which libc reads and writes without any call that could be stood in for. */
#include "crash/fault_files.c"

#include "faults/fault.h"

EXPORT int stat(const char *name, struct stat *kind) { GUARDED(stat, 0, AT_FDCWD, name, name, kind); }
EXPORT int lstat(const char *name, struct stat *kind) { GUARDED(lstat, 0, AT_FDCWD, name, name, kind); }
EXPORT int access(const char *name, int mode) { GUARDED(access, 0, AT_FDCWD, name, name, mode); }
EXPORT int faccessat(int folder, const char *name, int mode, int flags) {
    GUARDED(faccessat, 0, folder, name, folder, name, mode, flags);
}
EXPORT int mkstemp(char *name) { GUARDED(mkstemp, 1, AT_FDCWD, name, name); }
EXPORT int fchmod(int file, mode_t mode) { GUARDED(fchmod, 0, file, NULL, file, mode); }

EXPORT char *realpath(const char *name, char *resolved) {
    if (judge("realpath", 0, AT_FDCWD, name) == FAIL) return NULL;
    return REAL(realpath)(name, resolved);
}

EXPORT DIR *opendir(const char *name) {
    if (judge("opendir", 0, AT_FDCWD, name) == FAIL) return NULL;
    return REAL(opendir)(name);
}

EXPORT DIR *fdopendir(int file) {
    if (judge("fdopendir", 0, file, NULL) == FAIL) return NULL;
    return REAL(fdopendir)(file);
}

/* ---- streams ---- */

static ssize_t stream_read(void *cookie, char *bytes, size_t count) {
    return read((int)(intptr_t)cookie, bytes, count);
}

/* 0 is an error here, and all there is. */
static ssize_t stream_write(void *cookie, const char *bytes, size_t count) {
    ssize_t done = write((int)(intptr_t)cookie, bytes, count);
    return done < 0 ? 0 : done;
}

static int stream_seek(void *cookie, off_t *offset, int whence) {
    off_t place = lseek((int)(intptr_t)cookie, *offset, whence);
    if (place < 0) return -1;
    *offset = place;
    return 0;
}

static int stream_close(void *cookie) { return close((int)(intptr_t)cookie); }

static FILE *stream_of(int file, const char *mode) {
    cookie_io_functions_t functions = {stream_read, stream_write, stream_seek, stream_close};
    return fopencookie((void *)(intptr_t)file, mode, functions);
}

EXPORT FILE *fdopen(int file, const char *mode) { return stream_of(file, mode); }

EXPORT FILE *fopen(const char *name, const char *mode) {
    int flags = mode[0] == 'r' ? O_RDONLY : O_WRONLY | O_CREAT | (mode[0] == 'a' ? O_APPEND : O_TRUNC);
    int file = open(name, flags | O_CLOEXEC, 0666);
    if (file < 0) return NULL;
    FILE *stream = stream_of(file, mode);
    if (stream == NULL) close(file);
    return stream;
}

/* ---- the count ---- */

static char wanted[32];

void fault_files_start(long nth, const char *folder) {
    snprintf(wanted, sizeof wanted, "%ld", nth);
    setenv("QE_FAULT_FOLDER", folder, 1);
    setenv("QE_FAULT_AT", wanted, 1);
    setenv("QE_FAULT_DO", "EIO", 1);
    atomic_store(&calls, 0);
    atomic_store(&struck, NULL);
}

long fault_files_stop(void) {
    unsetenv("QE_FAULT_FOLDER");
    return atomic_load(&calls);
}

const char *fault_files_met(void) { return atomic_load(&struck); }

void fault_stdout_open(const char *path) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file >= 0) stdout = stream_of(file, "w");
}

void fault_stdout_close(void) {
    if (stdout != NULL) fclose(stdout);
    stdout = NULL;
}
