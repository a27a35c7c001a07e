/* lock.c - both or none. */
#include "base/lock.h"

#include <stddef.h>

int qe_lock_init(pthread_mutex_t *mutex, pthread_cond_t *changed, const pthread_condattr_t *attributes) {
    int refused = pthread_mutex_init(mutex, NULL);
    if (refused || changed == NULL) return refused;
    refused = pthread_cond_init(changed, attributes);
    if (refused) pthread_mutex_destroy(mutex);
    return refused;
}

void qe_lock_deinit(pthread_mutex_t *mutex, pthread_cond_t *changed) {
    if (changed != NULL) pthread_cond_destroy(changed);
    pthread_mutex_destroy(mutex);
}
