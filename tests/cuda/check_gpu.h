/* check_gpu.h - what the parts of check_gpu share. */
#ifndef QE_TESTS_CHECK_GPU_H
#define QE_TESTS_CHECK_GPU_H

#include <stdint.h>
#include "qeffect/status.h"
#include "qeffect/step.h"

/* A graph that was planted with a fault, and what became of it. */
typedef struct planted {
    const char *what;
    int refusal_due, refused;
    char words[QE_ERROR_TEXT_BYTES]; /* of the refusal */
} planted;

enum { PLANTED_MAX = 8 };

/* Records graphs on a device of its own. Returns how many there were; */
uint32_t planted_graphs(planted *graphs_out);

/* Witness words that were overwritten between launches of a step, one a step. */
typedef struct overwritten {
    int capture;
    uint32_t tried, trapped, state_kept, went_on;
} overwritten;

/* On a team of its own. Requires: graphs are a layer's or an action's: a step has several launches. */
overwritten words_overwritten(qe_capture capture);

#endif
