/* file.c - reads a file whole. Not mapped: a file that shrinks under a map kills the process. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "data/source.h"
#include "qeffect/data.h"

static const char remedy_path[] =
    "Give data.path a UTF-8 text or a token file of llm.c's layout, or leave it empty for the King James Bible.";

void qe_source_deinit(qe_source *source) {
    free(source->data);
    *source = (qe_source){0};
}

static qe_status refuse(qe_error *error_out, qe_status status, const char *path, const char *remedy, const char *what) {
    qe_error_set(error_out, status, remedy, "%s", what);
    qe_error_place(error_out, path, 0, 0);
    return status;
}

static qe_status refuse_errno(qe_error *error_out, const char *path, const char *verb) {
    const char *remedy = errno == EACCES ? "Allow reading it (chmod +r), or run as its owner." : remedy_path;
    qe_error_set(error_out, QE_ERROR_IO, remedy, "cannot %s the data file: %s", verb, strerror(errno));
    qe_error_place(error_out, path, 0, 0);
    return QE_ERROR_IO;
}

static qe_status judge_kind(const struct stat *kind, const char *path, qe_error *error_out) {
    if (S_ISDIR(kind->st_mode))
        return refuse(error_out, QE_ERROR_IO, path, remedy_path, "the data file is a directory");
    if (!S_ISREG(kind->st_mode))
        return refuse(error_out, QE_ERROR_IO, path, "Write the stream into a file first, then name that file.",
                      "the data file is not a regular file");
    if (kind->st_size == 0) return refuse(error_out, QE_ERROR_FORMAT, path, remedy_path, "the data file is empty");
    if ((uint64_t)kind->st_size > QE_DATA_BYTES_MAX)
        return refuse(error_out, QE_ERROR_LIMIT, path, "Cut it into shards and train on one after the other.",
                      "the data file is larger than 8 GiB, and is read whole into memory");
    return QE_OK;
}

static qe_status read_all(int descriptor, uint8_t *data, size_t size_bytes, const char *path, qe_error *error_out) {
    size_t done = 0;
    while (done < size_bytes) {
        ssize_t got = read(descriptor, data + done, size_bytes - done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return refuse_errno(error_out, path, "read");
        if (got == 0)
            return refuse(error_out, QE_ERROR_IO, path, "Wait until nothing writes to it, then start again.",
                          "the data file shrank while it was read");
        done += (size_t)got;
    }
    return QE_OK;
}

qe_status qe_source_read_file(const char *path, qe_source *source_out, qe_error *error_out) {
    /* O_NONBLOCK: opening a pipe must not wait for a writer. */
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) return refuse_errno(error_out, path, "open");
    uint8_t *data = NULL;
    struct stat kind;
    qe_status status = fstat(descriptor, &kind) == 0 ? judge_kind(&kind, path, error_out)
                                                     : refuse_errno(error_out, path, "examine");
    if (status != QE_OK) goto close_file;
    size_t size_bytes = (size_t)kind.st_size;
    data = malloc(size_bytes);
    status = data ? read_all(descriptor, data, size_bytes, path, error_out)
                  : refuse(error_out, QE_ERROR_MEMORY, path, "Use a smaller file.", "no memory to hold the data file");
    if (status == QE_OK) *source_out = (qe_source){data, size_bytes};
    else free(data);
close_file:
    close(descriptor);
    return status;
}
