/* counter.c - see counter.h. The raiser stores the value, then looks for sleepers; a sleeper announces what it
 * waits for, then looks at the value. Both orders are sequentially consistent, so one of the two sees the other. */
#include "backend/host/counter.h"

#include "base/lock.h"

/* Some 200 ns where a pause takes 140 cycles: longer than a cache line needs to travel, too short to steal a core from
 * an op that is running. */
enum { SPIN_TURNS = 4 };

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

int qe_host_counter_init(host_counter *counter) {
    atomic_init(&counter->value, 0);
    atomic_init(&counter->wake_at, UINT64_MAX);
    return qe_lock_init(&counter->lock, &counter->risen, NULL);
}

void qe_host_counter_deinit(host_counter *counter) {
    qe_lock_deinit(&counter->lock, &counter->risen);
}

void qe_host_counter_raise(host_counter *counter, uint64_t value) {
    atomic_store(&counter->value, value);
    if (atomic_load(&counter->wake_at) > value) return;
    pthread_mutex_lock(&counter->lock);
    atomic_store(&counter->wake_at, UINT64_MAX); /* whoever must sleep on says so again */
    pthread_cond_broadcast(&counter->risen);
    pthread_mutex_unlock(&counter->lock);
}

void qe_host_counter_wait(host_counter *counter, uint64_t value) {
    for (int turn = 0; turn < SPIN_TURNS; ++turn) {
        if (qe_host_counter_get(counter) >= value) return;
        pause_briefly();
    }
    pthread_mutex_lock(&counter->lock);
    for (;;) {
        if (atomic_load(&counter->wake_at) > value) atomic_store(&counter->wake_at, value);
        if (atomic_load(&counter->value) >= value) break;
        pthread_cond_wait(&counter->risen, &counter->lock);
    }
    pthread_mutex_unlock(&counter->lock);
}
