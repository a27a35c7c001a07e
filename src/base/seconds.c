/* seconds.c - see seconds.h. */
#include "base/seconds.h"

#include <time.h>

double qe_seconds_now(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
