/* memory.h - the bytes of a rank by kind: foretold from its plans, and counted as they are taken. */
#ifndef QEFFECT_MEMORY_H
#define QEFFECT_MEMORY_H

#include "qeffect/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum qe_memory_kind {
    QE_MEMORY_MASTERS,   /* fp32 weights */
    QE_MEMORY_MOMENTS,
    QE_MEMORY_GRADIENTS,
    QE_MEMORY_CACHES,    /* weights as products take them, every layout */
    QE_MEMORY_SCALES,    /* scale states and histories */
    QE_MEMORY_SLOTS_I,   /* what the input gradient needs, F .. I */
    QE_MEMORY_SLOTS_W,   /* what the weight gradient needs, F .. W and I .. W */
    QE_MEMORY_BOUNDARY,  /* activations and gradients that cross stages */
    QE_MEMORY_WORKSPACE, /* scratch, tokens, losses, norms, copied gradients, tables */
    QE_MEMORY_SNAPSHOT,  /* masters, moments and scales once more, while a checkpoint is fetched; where there is room */
    QE_MEMORY_GRAPHS,    /* what guards look at and expect */
    QE_MEMORY_KINDS
} qe_memory_kind;

typedef struct qe_memory_ledger {
    uint64_t bytes[QE_MEMORY_KINDS];
} qe_memory_ledger;

/* "masters" ..., as commands write it. */
const char *qe_memory_kind_name(qe_memory_kind kind);
uint64_t qe_memory_ledger_total(const qe_memory_ledger *ledger);

/* What a rank of a team of these plans will take of its device, before anything is taken. Everything is taken when the
 * team is made and kept until it goes, so the total is the peak too. Left out are
 * guards, whose words depend on the recorded graphs (some KiB a graph), and a snapshot's copy, which is done without
 * where there is no room.
 * Requires: plans as qe_team_create takes them; one of them may be NULL. Thread: any. */
qe_memory_ledger qe_memory_foretell(const qe_plan *train, const qe_plan *evaluate, uint32_t rank);

/* Does no rank need more than `limit_bytes`? On failure: QE_ERROR_ARGUMENT says which rank, of what, and what lowers
 * it. */
qe_status qe_memory_check(const qe_plan *train, const qe_plan *evaluate, uint64_t limit_bytes, qe_error *error_out);

#ifdef __cplusplus
}
#endif
#endif
