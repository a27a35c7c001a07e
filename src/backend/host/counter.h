/* counter.h - a number that only rises, and threads that sleep until it is high enough. The one tool by which stream
 * threads, their submitters and their waiters meet. Sequentially consistent atomics and no fences, so that
 * ThreadSanitizer can follow. */
#ifndef QE_HOST_COUNTER_H
#define QE_HOST_COUNTER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

typedef struct host_counter {
    _Atomic uint64_t value;
    _Atomic uint64_t wake_at; /* the least value a sleeper waits for; UINT64_MAX: nobody sleeps */
    pthread_mutex_t lock;
    pthread_cond_t risen;
} host_counter;

/* 0, or the system's error number: nothing is left then. */
int qe_host_counter_init(host_counter *counter);
void qe_host_counter_deinit(host_counter *counter);
/* Only one thread raises a counter. Sleepers are woken only when the least of them is satisfied: a host that waits for
 * the last of a thousand ops is woken once. */
void qe_host_counter_raise(host_counter *counter, uint64_t value);
/* Returns when the counter is at least `value`. Everything before the raise is visible. */
void qe_host_counter_wait(host_counter *counter, uint64_t value);

static inline uint64_t qe_host_counter_get(const host_counter *counter) {
    return atomic_load_explicit(&counter->value, memory_order_acquire);
}

#endif
