/* order.h - is what streams are really given ordered as it must be? A backend that wants to know tells every call it
 * makes, at the moment it makes it: accesses with their bytes, records, waits, syncs. A ledger of bytes judges them
 * with vector clocks, so the verdict does not depend on who wins a race. What was declared or planned plays no
 * part: an edge that was planned and never executed is missing here. */
#ifndef QEFFECT_ORDER_H
#define QEFFECT_ORDER_H

#include "qeffect/backend.h"
#include "qeffect/program.h"
#include "qeffect/rule.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qe_order qe_order;

/* Owns: the caller destroys. Thread: one at a time. */
qe_status qe_order_create(qe_order **order_out, qe_error *error_out);
void qe_order_destroy(qe_order *order);

/* New streams and events; what was told before is forgotten.
 * Requires: all work is done. On failure: QE_ERROR_MEMORY, QE_ERROR_LIMIT. */
qe_status qe_order_add_stream(qe_order *order, const char *name, qe_stream_role role, uint32_t *stream_out,
                              qe_error *error_out);
uint32_t qe_order_add_event(qe_order *order);

/* Work called `what` touches these bytes, on a stream, or at once on the host (stream QE_NONE).
 * On failure: QE_CONTRACT with *breach_out: rule and the two accesses in words; QE_ERROR_MEMORY. */
qe_status qe_order_access(qe_order *order, uint32_t stream, const char *what, const qe_range *ranges, size_t count,
                          qe_breach *breach_out);
qe_status qe_order_record(qe_order *order, uint32_t stream, uint32_t event);
qe_status qe_order_wait(qe_order *order, uint32_t stream, uint32_t event);
/* The host has waited for all that the stream was given. */
qe_status qe_order_sync(qe_order *order, uint32_t stream);

#ifdef __cplusplus
}
#endif
#endif
