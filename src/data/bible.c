/* bible.c - runs Debian's `bible` (package bible-kjv, public domain text) and keeps what it prints.
 *
 * The same bytes as `bible -f Gen1:1-Rev22:21 </dev/null | cut -d' ' -f2-`. Without -f the program formats for a
 * terminal and can crash. It looks for its text in the working directory first, and reads COLUMNS; so it is started
 * in / with an empty environment. Whatever it printed, the checksum decides. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "base/hash.h"
#include "data/source.h"

/* Of bible-kjv 4.38, with references off: `... | cut -d' ' -f2- | xxhsum -H2` and `| wc -c`. */
enum { BIBLE_BYTES = 4137850 };
static const char bible_hash[] = "05b98751a428dfa4d2afc68c1f859494";

enum { OUTPUT_BYTES_MAX = 16 << 20 }; /* three times what it prints with references; more is another program */

static const char remedy_install[] =
    "Install it (apt-get install bible-kjv), or set data.path to a UTF-8 text of your own.";

static qe_status refuse_errno(qe_error *error_out, const char *program, int code) {
    return qe_error_set(error_out, code == ENOMEM ? QE_ERROR_MEMORY : QE_ERROR_IO, remedy_install,
                        "cannot run the program `%s`, which prints the King James Bible: %s", program,
                        strerror(code));
}

static int set_actions(posix_spawn_file_actions_t *actions, int output) {
    int code = posix_spawn_file_actions_addopen(actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    if (code == 0) code = posix_spawn_file_actions_addopen(actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    if (code == 0) code = posix_spawn_file_actions_adddup2(actions, output, STDOUT_FILENO);
    if (code == 0) code = posix_spawn_file_actions_addchdir_np(actions, "/");
    return code;
}

static int set_signals(posix_spawnattr_t *attributes) {
    sigset_t none, defaults;
    sigemptyset(&none);
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGPIPE);
    sigaddset(&defaults, SIGINT);
    int code = posix_spawnattr_setsigmask(attributes, &none);
    if (code == 0) code = posix_spawnattr_setsigdefault(attributes, &defaults);
    if (code == 0) code = posix_spawnattr_setflags(attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    return code;
}

/* Starts the program with its standard output on `output`; returns an errno. */
static int spawn(const char *program, int output, pid_t *process_out) {
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    int code = posix_spawn_file_actions_init(&actions);
    if (code != 0) return code;
    code = posix_spawnattr_init(&attributes);
    if (code != 0) goto drop_actions;
    code = set_actions(&actions, output);
    if (code == 0) code = set_signals(&attributes);
    char argument_format[] = "-f", argument_range[] = "Gen1:1-Rev22:21";
    char *name = strdup(program);
    char *arguments[] = {name, argument_format, argument_range, NULL}, *environment[] = {NULL};
    if (code == 0 && name == NULL) code = ENOMEM;
    if (code == 0) code = posix_spawnp(process_out, program, &actions, &attributes, arguments, environment);
    free(name);
    posix_spawnattr_destroy(&attributes);
drop_actions:
    posix_spawn_file_actions_destroy(&actions);
    return code;
}

static int64_t now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

/* Reads until the end or the deadline; returns an errno, ETIMEDOUT and EFBIG included. */
static int drain(int descriptor, int timeout_ms, uint8_t *data, size_t *size_out) {
    int64_t deadline = now_ms() + timeout_ms;
    for (size_t done = 0;;) {
        int64_t left = deadline - now_ms();
        struct pollfd wait = {.fd = descriptor, .events = POLLIN};
        int ready = left > 0 ? poll(&wait, 1, (int)left) : 0;
        if (ready == 0) return ETIMEDOUT;
        if (ready < 0 && errno != EINTR) return errno;
        if (ready < 0) continue;
        ssize_t got = read(descriptor, data + done, OUTPUT_BYTES_MAX - done);
        if (got < 0 && errno != EINTR) return errno;
        if (got < 0) continue;
        done += (size_t)got;
        if (got == 0) return *size_out = done, 0;
        if (done == OUTPUT_BYTES_MAX) return EFBIG;
    }
}

/* cut -d' ' -f2-: drops each line up to its first space; a line without one stays. Returns the new size. */
static size_t drop_references(uint8_t *data, size_t size_bytes) {
    size_t to = 0;
    for (size_t from = 0; from < size_bytes;) {
        const uint8_t *newline = memchr(data + from, '\n', size_bytes - from);
        size_t end = newline ? (size_t)(newline - data) + 1 : size_bytes;
        const uint8_t *space = memchr(data + from, ' ', end - from);
        size_t start = space ? (size_t)(space - data) + 1 : from;
        memmove(data + to, data + start, end - start);
        to += end - start;
        from = end;
    }
    return to;
}

static qe_status verify(const qe_source *source, const char *program, qe_error *error_out) {
    char hash[QE_HASH_TEXT_BYTES];
    qe_hash_text(qe_hash_bytes(source->data, source->size_bytes), hash);
    if (source->size_bytes == BIBLE_BYTES && strcmp(hash, bible_hash) == 0) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_FORMAT,
                        "Install Debian's bible-kjv 4.38, or set data.path to a UTF-8 text of your own.",
                        "`%s` printed another text than the King James Bible of bible-kjv: %zu bytes with XXH3-128 %s, "
                        "expected %d bytes with %s", program, source->size_bytes, hash, BIBLE_BYTES, bible_hash);
}

/* Runs the program and fills `data`; returns an errno. */
static int run(const char *program, int timeout_ms, uint8_t *data, size_t *size_out) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return errno;
    pid_t process = 0;
    int code = spawn(program, ends[1], &process);
    close(ends[1]);
    if (code != 0) goto close_pipe;
    code = drain(ends[0], timeout_ms, data, size_out);
    if (code != 0) kill(process, SIGKILL);
    while (waitpid(process, NULL, 0) < 0 && errno == EINTR) continue;
close_pipe:
    close(ends[0]);
    return code;
}

qe_status qe_source_read_bible(const char *program, int timeout_ms, qe_source *source_out, qe_error *error_out) {
    qe_source source = {.data = malloc(OUTPUT_BYTES_MAX)};
    if (source.data == NULL)
        return qe_error_set(error_out, QE_ERROR_MEMORY, "Free some memory.", "no memory for the King James Bible");
    int code = run(program, timeout_ms, source.data, &source.size_bytes);
    qe_status status = QE_OK;
    if (code == ETIMEDOUT || code == EFBIG)
        status = qe_error_set(error_out, QE_ERROR_IO, remedy_install, "the program `%s` was stopped: it %s", program,
                              code == EFBIG ? "printed far more than the King James Bible" : "did not end in time");
    else if (code != 0) status = refuse_errno(error_out, program, code);
    if (status == QE_OK) {
        source.size_bytes = drop_references(source.data, source.size_bytes);
        status = verify(&source, program, error_out);
    }
    if (status != QE_OK) {
        qe_source_deinit(&source);
        return status;
    }
    *source_out = source;
    return QE_OK;
}
