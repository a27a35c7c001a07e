/* check.h - a backend that wraps another one and fails every op that touches bytes it did not declare:
 * docs/backends.md. For debugging and tests: an op runs at least twice, with all memory of the device copied. */
#ifndef QEFFECT_CHECK_H
#define QEFFECT_CHECK_H

#include "qeffect/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The table; immutable, valid for the life of the process. Its `open` gives a device that wraps nothing yet.
 *
 * An op that was submitted, or run, without a declaration fails. What breaks a declaration surfaces as QE_ERROR_DEVICE
 * from `sync` (or `run`) in words: op, layer, object and byte; what was written without being declared is taken back.
 * SEND and RECV meet other ranks and are not checked, but their bytes are left alone while they are under way. A
 * launched graph is checked as one op that may touch what all its ops may; one with transfers is not checked. */
const qe_backend *qe_check_backend(void);

/* Opens a device of `inner` behind `device`; *inner_out (may be NULL) is for calls of that backend's own.
 * Requires:   `device` was opened by qe_check_backend and wraps nothing; `inner` outlives it.
 * On failure: what inner->open said. The device still wraps nothing, and all its calls fail with that error.
 * Owns:       closing `device` closes the inner one. Thread: before the first use. Capture: forbidden. */
qe_status qe_check_wrap(qe_device *device, const qe_backend *inner, qe_device **inner_out, qe_error *error_out);

/* How much was looked at so far. Thread: any. */
typedef struct qe_check_count {
    uint64_t ops, graphs;         /* checked; launches count once */
    uint64_t transfers, launches; /* passed on unchecked */
} qe_check_count;
qe_check_count qe_check_counts(qe_device *device);

#ifdef __cplusplus
}
#endif
#endif
