/* output.c - writes beside, syncs, renames. */
#include "cli/output.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "qeffect/safetensors.h"

/* A name of its own: behind the output's, which may be the longest there is, nothing fits. */
#define PARTIAL ".qeffect-partial-XXXXXX"

/* What is written, and how. */
typedef struct content {
    qe_cli_writer *writer;
    const void *context;
} content;

static int refuse_output(const qe_cli *cli, const char *path, const qe_error *error) {
    qe_error placed = *error;
    (void)qe_error_place(&placed, path, 0, 0);
    return qe_cli_error(cli, &placed);
}

static int refuse_system(const qe_cli *cli, const char *path, const char *what, int reason) {
    qe_error error = {0};
    (void)qe_error_set(&error, QE_ERROR_IO, "check the folder, its permissions and the space left", "%s: %s", what,
                       strerror(reason));
    return refuse_output(cli, path, &error);
}

static int write_in_place(const qe_cli *cli, const char *path, const content *what) {
    qe_error error = {0};
    FILE *file = fopen(path, "w");
    if (file == NULL) return refuse_system(cli, path, "cannot open the output", errno);
    qe_status status = what->writer(what->context, file, &error);
    if (fclose(file) != 0 && status == QE_OK) return refuse_system(cli, path, "cannot write the output", errno);
    return status == QE_OK ? QE_EXIT_OK : refuse_output(cli, path, &error);
}

/* Writes and syncs the file beside; 0, or the exit status after printing. Takes `descriptor`. */
static int fill_beside(const qe_cli *cli, const char *path, int descriptor, const content *what) {
    qe_error error = {0};
    FILE *file = fdopen(descriptor, "w");
    if (file == NULL) {
        int reason = errno;
        (void)close(descriptor);
        return refuse_system(cli, path, "cannot open the output", reason);
    }
    mode_t mask = umask(0); /* the only way to read it; commands run on one thread */
    (void)umask(mask);
    (void)fchmod(descriptor, 0666 & ~mask);
    qe_status status = what->writer(what->context, file, &error);
    if (status == QE_OK && fsync(descriptor) != 0) {
        status = qe_error_set(&error, QE_ERROR_IO, NULL, "cannot write the output: %s", strerror(errno));
    }
    if (fclose(file) != 0 && status == QE_OK) {
        status = qe_error_set(&error, QE_ERROR_IO, NULL, "cannot write the output: %s", strerror(errno));
    }
    return status == QE_OK ? QE_EXIT_OK : refuse_output(cli, path, &error);
}

static int write_beside(const qe_cli *cli, const char *path, char *beside, const content *what) {
    int descriptor = mkstemp(beside);
    if (descriptor < 0) return refuse_system(cli, path, "cannot create the output", errno);
    int status = fill_beside(cli, path, descriptor, what);
    if (status == QE_EXIT_OK && rename(beside, path) != 0) {
        status = refuse_system(cli, path, "cannot put the output in place", errno);
    }
    if (status != QE_EXIT_OK) (void)unlink(beside);
    return status;
}

static int is_folder(const char *path) {
    struct stat there;
    return stat(path, &there) == 0 && S_ISDIR(there.st_mode);
}

/* Renaming over a pipe or a device would take it away, and /dev/stdout may stand for somebody's open file. */
static int is_replaceable(const char *path) {
    struct stat there;
    if (strncmp(path, "/dev/", 5) == 0) return 0;
    return stat(path, &there) != 0 || S_ISREG(there.st_mode);
}

int qe_cli_try_output(const qe_cli *cli, const char *option) {
    const char *path = qe_cli_value(cli, option);
    qe_error error = {0};
    if (path == NULL) return QE_EXIT_OK;
    if (path[0] == '\0') return qe_cli_usage(cli, "--%s needs the name of a file", option);
    if (!is_replaceable(path) && !is_folder(path)) return QE_EXIT_OK; /* opening a pipe would wait for its reader */
    return qe_store_try_file(path, &error) == QE_OK ? QE_EXIT_OK : qe_cli_error(cli, &error);
}

int qe_cli_apart(const qe_cli *cli, const char *option, const char *other) {
    const char *path = qe_cli_value(cli, option), *other_path = qe_cli_value(cli, other);
    if (path == NULL || other_path == NULL || strcmp(path, other_path) != 0 || !is_replaceable(path)) return QE_EXIT_OK;
    return qe_cli_usage(cli, "--%s and --%s name one file, '%s'; only the last would be left", option, other, path);
}

int qe_cli_write_file(const qe_cli *cli, const char *path, qe_cli_writer *writer, const void *context) {
    const content what = {.writer = writer, .context = context};
    if (!is_replaceable(path)) return write_in_place(cli, path, &what);
    char *target = realpath(path, NULL); /* a link keeps being one: what it points to is replaced */
    const char *place = target == NULL ? path : target;
    const char *slash = strrchr(place, '/');
    int folder = slash == NULL ? 0 : (int)(slash + 1 - place);
    size_t bytes = (size_t)folder + sizeof PARTIAL;
    char *beside = malloc(bytes);
    int status;
    if (beside == NULL) {
        status = refuse_system(cli, path, "cannot create the output", ENOMEM);
    } else {
        (void)snprintf(beside, bytes, "%.*s" PARTIAL, folder, place);
        status = write_beside(cli, place, beside, &what);
    }
    free(beside);
    free(target);
    return status;
}
