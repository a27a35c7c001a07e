/* file.c - opening, reading and refusing files. */
#include "store/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

qe_status qe_store_refuse(qe_error *error_out, qe_status status, const char *path, const char *remedy,
                          const char *format, ...) {
    char message[QE_ERROR_TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    qe_error_set(error_out, status, remedy, "%s", message);
    qe_error_place(error_out, path, 0, 0);
    return status;
}

static const char *remedy_for(int code) {
    switch (code) {
    case ENOSPC:
    case EDQUOT: return "Free some space or write elsewhere; the unfinished file was removed.";
    case EFBIG: return "Raise the file size limit (ulimit -f) or write elsewhere; the unfinished file was removed.";
    case EACCES:
    case EPERM: return "Allow access to it, or name a place of your own.";
    case EROFS: return "Name a place that can be written to.";
    case ENOENT:
    case ENOTDIR: return "Check the path; its directory must exist.";
    default: return "Check the path and the device it is on.";
    }
}

qe_status qe_store_refuse_errno(qe_error *error_out, const char *path, const char *verb, int code) {
    qe_status status = code == ENOMEM ? QE_ERROR_MEMORY : QE_ERROR_IO;
    return qe_store_refuse(error_out, status, path, remedy_for(code), "cannot %s the file: %s", verb, strerror(code));
}

qe_status qe_store_open(const char *path, int *descriptor_out, uint64_t *size_bytes_out, qe_error *error_out) {
    /* O_NONBLOCK: opening a pipe must not wait for a writer. */
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) return qe_store_refuse_errno(error_out, path, "open", errno);
    struct stat kind;
    qe_status status = QE_OK;
    if (fstat(descriptor, &kind) != 0) status = qe_store_refuse_errno(error_out, path, "examine", errno);
    else if (!S_ISREG(kind.st_mode))
        status = qe_store_refuse(error_out, QE_ERROR_IO, path, "Name a regular file.",
                                 "it is %s, expected a regular file",
                                 S_ISDIR(kind.st_mode) ? "a directory" : "a device or a pipe");
    if (status != QE_OK) {
        close(descriptor);
        return status;
    }
    *descriptor_out = descriptor;
    *size_bytes_out = (uint64_t)kind.st_size;
    return QE_OK;
}

qe_status qe_store_read(int descriptor, const char *path, void *bytes, uint64_t size_bytes, qe_error *error_out) {
    uint64_t done = 0;
    while (done < size_bytes) {
        ssize_t got = read(descriptor, (char *)bytes + done, (size_t)(size_bytes - done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return qe_store_refuse_errno(error_out, path, "read", errno);
        if (got == 0)
            return qe_store_refuse(error_out, QE_ERROR_IO, path, "Wait until nothing writes to it, then read it again.",
                                   "the file shrank while it was read");
        done += (uint64_t)got;
    }
    return QE_OK;
}
