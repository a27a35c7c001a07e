/* fault_files.c - loaded in front of the program (LD_PRELOAD): counts its system calls on files below one directory,
 * and at the n-th kills the process, or lets the call fail. The program does not know.
 *
 *   QE_FAULT_FOLDER  the directory, absolute, links resolved
 *   QE_FAULT_AT      n, from 1; 0 or none: only counts
 *   QE_FAULT_DO      before: killed before the call; after: behind it; half: a write writes half, then killed;
 *                    ENOSPC, EIO, EACCES, ...: the call fails; full: this and every later call that needs room fails
 *   QE_FAULT_LOG     a file that receives a line per counted call: its number, name and path
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static atomic_int calls, is_full;
static const char *_Atomic struck; /* the call that met its fault */

static const struct { const char *name; int code; } codes[] = {
    {"ENOSPC", ENOSPC}, {"EIO", EIO}, {"EACCES", EACCES}, {"EINTR", EINTR}, {"EMFILE", EMFILE}, {"full", ENOSPC}};

static void die(void) {
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;) pause();
}

/* The path that a directory's descriptor and a name mean; 0 where it cannot be told. */
static int resolve(int folder, const char *name, char path[2 * PATH_MAX]) {
    char link[64];
    size_t used = 0;
    if (name == NULL || name[0] != '/') {
        snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
        long length = syscall(SYS_readlink, link, path, PATH_MAX);
        if (length <= 0) return 0;
        used = (size_t)length;
    }
    path[used] = 0;
    if (name != NULL) snprintf(path + used, 2 * PATH_MAX - used, "%s%s", used > 0 ? "/" : "", name);
    return 1;
}

static void tell(int number, const char *call, const char *path) {
    const char *log = getenv("QE_FAULT_LOG");
    char line[2 * PATH_MAX + 64];
    if (log == NULL) return;
    int file = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    int length = snprintf(line, sizeof line, "%d %s %s\n", number, call, path);
    (void)!syscall(SYS_write, file, line, (size_t)length);
    syscall(SYS_close, file);
}

/* What is to happen to this call. */
typedef enum fault { NONE, BEFORE, AFTER, HALF, FAIL } fault;

static int code_of(const char *what) {
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (strcmp(codes[i].name, what) == 0) return codes[i].code;
    return 0;
}

static fault fault_of(const char *what) {
    if (strcmp(what, "before") == 0) return BEFORE;
    if (strcmp(what, "after") == 0) return AFTER;
    if (strcmp(what, "half") == 0) return HALF;
    errno = code_of(what);
    return errno != 0 ? FAIL : NONE;
}

static fault judge(const char *call, int needs_room, int folder, const char *name) {
    const char *below = getenv("QE_FAULT_FOLDER"), *at = getenv("QE_FAULT_AT"), *what = getenv("QE_FAULT_DO");
    char path[2 * PATH_MAX];
    int kept = errno;
    if (below == NULL || !resolve(folder, name, path)) return errno = kept, NONE;
    size_t length = strlen(below);
    if (strncmp(path, below, length) != 0 || (path[length] != 0 && path[length] != '/')) return errno = kept, NONE;
    int number = atomic_fetch_add(&calls, 1) + 1;
    tell(number, call, path + length);
    errno = kept;
    if (is_full && needs_room) return errno = ENOSPC, FAIL;
    if (at == NULL || what == NULL || strtol(at, NULL, 10) != number) return NONE;
    if (strcmp(what, "full") == 0) is_full = 1;
    if (is_full && !needs_room) return NONE;
    fault chosen = fault_of(what);
    atomic_store(&struck, call);
    if (chosen == BEFORE) die();
    return chosen;
}

/* Wraps a call that gives an int and has no bytes to write. */
#define GUARDED(call, needs_room, folder, name, ...)                                                \
    do {                                                                                            \
        fault chosen = judge(#call, needs_room, folder, name);                                      \
        if (chosen == FAIL) return -1;                                                              \
        int result = REAL(call)(__VA_ARGS__);                                                       \
        if (chosen == AFTER || chosen == HALF) die();                                               \
        return result;                                                                              \
    } while (0)

static mode_t mode_of(int flags, va_list arguments) {
    return (flags & (O_CREAT | O_TMPFILE)) ? (mode_t)va_arg(arguments, int) : 0;
}

EXPORT int open(const char *name, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = mode_of(flags, arguments);
    va_end(arguments);
    GUARDED(open, (flags & O_CREAT) != 0, AT_FDCWD, name, name, flags, mode);
}

EXPORT int openat(int folder, const char *name, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = mode_of(flags, arguments);
    va_end(arguments);
    GUARDED(openat, (flags & O_CREAT) != 0, folder, name, folder, name, flags, mode);
}

EXPORT int mkdir(const char *name, mode_t mode) { GUARDED(mkdir, 1, AT_FDCWD, name, name, mode); }
EXPORT int mkdirat(int folder, const char *name, mode_t mode) { GUARDED(mkdirat, 1, folder, name, folder, name, mode); }
EXPORT int fsync(int file) { GUARDED(fsync, 1, file, NULL, file); }
EXPORT int rename(const char *from, const char *to) { GUARDED(rename, 0, AT_FDCWD, from, from, to); }
EXPORT int renameat(int f, const char *from, int t, const char *to) { GUARDED(renameat, 0, f, from, f, from, t, to); }
EXPORT int renameat2(int f, const char *from, int t, const char *to, unsigned flags) {
    GUARDED(renameat2, 0, f, from, f, from, t, to, flags);
}
EXPORT int unlink(const char *name) { GUARDED(unlink, 0, AT_FDCWD, name, name); }
EXPORT int unlinkat(int folder, const char *name, int flags) {
    GUARDED(unlinkat, 0, folder, name, folder, name, flags);
}
EXPORT int flock(int file, int operation) { GUARDED(flock, 0, file, NULL, file, operation); }
EXPORT int fstat(int file, struct stat *kind) { GUARDED(fstat, 0, file, NULL, file, kind); }
EXPORT int fstatat(int folder, const char *name, struct stat *kind, int flags) {
    GUARDED(fstatat, 0, folder, name, folder, name, kind, flags);
}

/* A descriptor is closed even where close fails. */
EXPORT int close(int file) {
    fault chosen = judge("close", 0, file, NULL);
    int code = errno, result = REAL(close)(file);
    if (chosen == AFTER || chosen == HALF) die();
    if (chosen != FAIL) return result;
    errno = code;
    return -1;
}

EXPORT ssize_t write(int file, const void *bytes, size_t count) {
    fault chosen = judge("write", 1, file, NULL);
    if (chosen == FAIL) return -1;
    ssize_t result = REAL(write)(file, bytes, chosen == HALF ? count / 2 : count);
    if (chosen == AFTER || chosen == HALF) die();
    return result;
}

EXPORT ssize_t read(int file, void *bytes, size_t count) {
    fault chosen = judge("read", 0, file, NULL);
    if (chosen == FAIL) return -1;
    ssize_t result = REAL(read)(file, bytes, count);
    if (chosen == AFTER || chosen == HALF) die();
    return result;
}

EXPORT struct dirent *readdir(DIR *directory) {
    fault chosen = judge("readdir", 0, dirfd(directory), NULL);
    if (chosen == FAIL) return NULL;
    struct dirent *entry = REAL(readdir)(directory);
    if (chosen == AFTER || chosen == HALF) die();
    return entry;
}
