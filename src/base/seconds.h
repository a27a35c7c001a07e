/* seconds.h - how long something took. */
#ifndef QE_BASE_SECONDS_H
#define QE_BASE_SECONDS_H

/* Seconds of the monotonic clock, as fine as it gives them. Thread: any. */
double qe_seconds_now(void);

#endif
