/* retain.h - what rows tell alone, rank by rank: what is kept and how long, windows of fold and fill, order of
 * gradients. */
#ifndef QE_SCHEDULE_RETAIN_H
#define QE_SCHEDULE_RETAIN_H

#include "qeffect/certificate.h"
#include "schedule/source.h"

/* Requires:   counts and order on each rank hold, for stored rows; for computed ones they are asserted here.
 * Ensures:    certificate->rank[] and what is summed over them are filled; the caller made certificate->rank.
 * On failure: QE_CONTRACT with *counterexample_out filled (owned by the caller), or QE_ERROR_MEMORY. */
qe_status qe_retain_judge(const qe_source *source, const qe_certificate_request *request, qe_certificate *certificate,
                          qe_counterexample *counterexample_out, qe_error *error_out);

#endif
