/* status.h - how a call says what went wrong.
 *
 * Two kinds only. An operating error (a file, a setting, memory, the device) is a qe_status with a qe_error that
 * names the cause and the way out. A breach of contract is QE_CONTRACT plus records (violation.h). Our own bugs
 * are asserts and never reach a caller. Codes are grouped by the largest thing that must be rebuilt afterwards. */
#ifndef QEFFECT_STATUS_H
#define QEFFECT_STATUS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum qe_status {
    QE_OK = 0,
    /* The call is refused; nothing has changed. */
    QE_ERROR_ARGUMENT = 1,    /* a value that the caller passed is impossible */
    QE_ERROR_LIMIT = 2,       /* a named limit (limits.h) is exceeded */
    QE_ERROR_MEMORY = 3,      /* the allocator said no */
    QE_ERROR_IO = 4,          /* the operating system refused a read, a write, a thread */
    QE_ERROR_FORMAT = 5,      /* a file's content is malformed */
    QE_ERROR_CONFIG = 6,      /* a setting is unknown, of the wrong type or impossible */
    QE_ERROR_UNSUPPORTED = 7, /* this build, machine or backend cannot do it */
    /* The step must be given up; weights, optimizer state and scales are those of the step before. */
    QE_CONTRACT = 16,          /* a rule is broken; see the records */
    QE_ERROR_INTERRUPTED = 17, /* the caller asked to stop */
    QE_ERROR_DEVICE = 18,      /* a stream or a transport failed */
} qe_status;

enum {
    QE_ERROR_TEXT_BYTES = 768,  /* fits a path, what was found and what was expected; longer text is cut */
    QE_ERROR_PATH_BYTES = 512,
};

/* The cause of a failed call and the way out. Text is for people; program logic reads `status` only. */
typedef struct qe_error {
    qe_status status;
    char message[QE_ERROR_TEXT_BYTES]; /* what was found and what was expected */
    char remedy[QE_ERROR_TEXT_BYTES];  /* what to do; may be empty */
    char path[QE_ERROR_PATH_BYTES];    /* the file concerned; may be empty */
    uint32_t line, column;             /* 1-based place in `path`; 0 where unknown */
} qe_error;

/* Fills *error_out (when not NULL) and returns `status`, so that detectors can write `return qe_error_set(...)`.
 * Requires:   status != QE_OK; remedy may be NULL; format is a printf format for the message.
 * Ensures:    path, line and column are empty.
 * Thread:     any. */
qe_status qe_error_set(qe_error *error_out, qe_status status, const char *remedy, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Adds the place to an error that qe_error_set filled. NULL is ignored. Returns error_out's status (QE_OK for NULL). */
qe_status qe_error_place(qe_error *error_out, const char *path, uint32_t line, uint32_t column);

/* A fixed word for a status ("argument", "memory", ...). */
const char *qe_status_name(qe_status status);

#ifdef __cplusplus
}
#endif
#endif
