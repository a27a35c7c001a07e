/* pace.h - inside of the store room: how much of a processor writing may take while others work. A thread of low
 * priority would starve where the machine is full, and whoever waits for it with it; so the writer works in pieces and
 * rests in between, until somebody waits. */
#ifndef QE_STORE_PACE_H
#define QE_STORE_PACE_H

#include <pthread.h>
#include <stdint.h>

enum { QE_PACE_PIECE_BYTES = 256 << 10 }; /* some 0.1 ms of hashing and copying: what a rank may lose at once */

typedef struct qe_pace {
    unsigned percent; /* of one processor; 100: no rest */
    pthread_mutex_t mutex;
    pthread_cond_t hurried;
    int hurry;
    int64_t worked_ns; /* processor time of the writing thread up to the last rest */
} qe_pace;

/* 0, or the system's error number: nothing is left then. */
int qe_pace_init(qe_pace *pace, unsigned percent);
void qe_pace_deinit(qe_pace *pace);
/* The calling thread begins to work. */
void qe_pace_begin(qe_pace *pace);
/* Rests for as long as the work since the last rest asks for. NULL: never. */
void qe_pace_rest(qe_pace *pace);
/* No more rests until the next begin; ends one that is going on. */
void qe_pace_hurry(qe_pace *pace);

#endif
