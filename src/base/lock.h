/* lock.h - a mutex and its condition variable, made together or not at all. The system may refuse either. */
#ifndef QE_BASE_LOCK_H
#define QE_BASE_LOCK_H

#include <pthread.h>

/* 0, or the system's error number: nothing is left then. changed, attributes: may be NULL. */
int qe_lock_init(pthread_mutex_t *mutex, pthread_cond_t *changed, const pthread_condattr_t *attributes);
void qe_lock_deinit(pthread_mutex_t *mutex, pthread_cond_t *changed);

#endif
