/* twin.h - inside of the step room: a second copy of what one rank keeps from step to step, on its device. */
#ifndef QE_STEP_TWIN_H
#define QE_STEP_TWIN_H

#include "step/team.h"

typedef struct qe_twin {
    qe_rank *rank;
    void *memory;
    qe_keep_range *ranges; /* [count] masters, moments, scales, histories */
    size_t count;
} qe_twin;

/* [ranks], or NULL where the backend keeps nothing or memory is short. */
qe_twin *qe_twins_create(qe_team *team);
/* Requires: the team's devices are open. */
void qe_twins_destroy(qe_twin *twins, uint32_t count);
/* Requires: the rank's streams are idle; nothing but a commit changes the state. On failure: QE_ERROR_DEVICE. */
qe_status qe_twin_keep(const qe_twin *twin, qe_error *error_out);
/* What lay at `from`, which is memory of the rank, when it was kept. Thread: any, one at a time. */
qe_status qe_twin_read(const qe_twin *twin, void *to_host, const void *from, size_t bytes, qe_error *error_out);

#endif
