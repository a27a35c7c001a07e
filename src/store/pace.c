/* pace.c - rests in proportion to work. */
#include "store/pace.h"

#include <time.h>

#include "base/lock.h"

static int64_t now_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int qe_pace_init(qe_pace *pace, unsigned percent) {
    *pace = (qe_pace){.percent = percent < 1 ? 1 : percent};
    pthread_condattr_t monotonic;
    int refused = pthread_condattr_init(&monotonic);
    if (refused) return refused;
    refused = pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    if (!refused) refused = qe_lock_init(&pace->mutex, &pace->hurried, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return refused;
}

void qe_pace_deinit(qe_pace *pace) {
    qe_lock_deinit(&pace->mutex, &pace->hurried);
}

void qe_pace_begin(qe_pace *pace) {
    pace->worked_ns = now_ns(CLOCK_THREAD_CPUTIME_ID);
}

static void sleep_until(qe_pace *pace, int64_t end_ns) {
    const struct timespec end = {.tv_sec = (time_t)(end_ns / 1000000000), .tv_nsec = (long)(end_ns % 1000000000)};
    pthread_mutex_lock(&pace->mutex);
    while (!pace->hurry && pthread_cond_timedwait(&pace->hurried, &pace->mutex, &end) == 0) {}
    pthread_mutex_unlock(&pace->mutex);
}

void qe_pace_rest(qe_pace *pace) {
    if (pace == NULL || pace->percent >= 100) return;
    int64_t worked = now_ns(CLOCK_THREAD_CPUTIME_ID) - pace->worked_ns;
    sleep_until(pace, now_ns(CLOCK_MONOTONIC) + worked * (int64_t)(100 - pace->percent) / (int64_t)pace->percent);
    pace->worked_ns = now_ns(CLOCK_THREAD_CPUTIME_ID);
}

void qe_pace_hurry(qe_pace *pace) {
    pthread_mutex_lock(&pace->mutex);
    pace->hurry = 1;
    pthread_cond_broadcast(&pace->hurried);
    pthread_mutex_unlock(&pace->mutex);
}
