/* checkpoint_writer.c - the thread that writes while steps run.
 *
 *   IDLE --start--> BUSY --(written or refused)--> IDLE     `outcome` is that of the last write until it is told
 */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/lock.h"
#include "store/folder.h"

struct qe_checkpoint_writer {
    qe_checkpoint_folder *folder;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    const qe_checkpoint_content *content; /* NULL: idle */
    int quits;
    qe_pace pace;
    qe_status outcome;
    qe_error error;
};

/* Among ranks that compute on all processors it runs where one of them waits: waking up, it does not push one aside.
 * Where that is refused it has the pace alone. */
static void step_back(const qe_checkpoint_writer *writer) {
    const struct sched_param none = {0};
    if (writer->pace.percent < 100) (void)pthread_setschedparam(pthread_self(), SCHED_IDLE, &none);
}

static void *writer_main(void *opaque) {
    qe_checkpoint_writer *writer = opaque;
    step_back(writer);
    pthread_mutex_lock(&writer->mutex);
    for (;;) {
        while (writer->content == NULL && !writer->quits) pthread_cond_wait(&writer->changed, &writer->mutex);
        if (writer->content == NULL) break;
        qe_error error = {0};
        pthread_mutex_unlock(&writer->mutex);
        qe_status status = qe_checkpoint_write_paced(writer->folder, writer->content, &writer->pace, &error);
        pthread_mutex_lock(&writer->mutex);
        writer->outcome = status;
        writer->error = error;
        writer->content = NULL;
        pthread_cond_broadcast(&writer->changed);
    }
    pthread_mutex_unlock(&writer->mutex);
    return NULL;
}

qe_status qe_checkpoint_writer_create(qe_checkpoint_folder *folder, unsigned percent,
                                      qe_checkpoint_writer **writer_out, qe_error *error_out) {
    qe_checkpoint_writer *writer = calloc(1, sizeof *writer);
    if (writer == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a writer");
    writer->folder = folder;
    int refused = qe_pace_init(&writer->pace, percent);
    if (!refused) {
        refused = qe_lock_init(&writer->mutex, &writer->changed, NULL);
        if (!refused && pthread_create(&writer->thread, NULL, writer_main, writer) == 0)
            return *writer_out = writer, QE_OK;
        if (!refused) qe_lock_deinit(&writer->mutex, &writer->changed);
        qe_pace_deinit(&writer->pace);
    }
    free(writer);
    return qe_error_set(error_out, QE_ERROR_IO, "raise the limit on threads", "no thread to write checkpoints");
}

void qe_checkpoint_writer_destroy(qe_checkpoint_writer *writer) {
    if (writer == NULL) return;
    qe_pace_hurry(&writer->pace);
    pthread_mutex_lock(&writer->mutex);
    writer->quits = 1;
    pthread_cond_broadcast(&writer->changed);
    pthread_mutex_unlock(&writer->mutex);
    pthread_join(writer->thread, NULL);
    qe_pace_deinit(&writer->pace);
    qe_lock_deinit(&writer->mutex, &writer->changed);
    free(writer);
}

void qe_checkpoint_writer_start(qe_checkpoint_writer *writer, const qe_checkpoint_content *content) {
    pthread_mutex_lock(&writer->mutex);
    QE_ASSERT(writer->content == NULL);
    writer->pace.hurry = 0;
    writer->content = content;
    pthread_cond_broadcast(&writer->changed);
    pthread_mutex_unlock(&writer->mutex);
}

int qe_checkpoint_writer_is_idle(qe_checkpoint_writer *writer) {
    pthread_mutex_lock(&writer->mutex);
    int idle = writer->content == NULL;
    pthread_mutex_unlock(&writer->mutex);
    return idle;
}

qe_status qe_checkpoint_writer_finish(qe_checkpoint_writer *writer, qe_error *error_out) {
    qe_pace_hurry(&writer->pace);
    pthread_mutex_lock(&writer->mutex);
    while (writer->content != NULL) pthread_cond_wait(&writer->changed, &writer->mutex);
    qe_status status = writer->outcome;
    if (status != QE_OK && error_out != NULL) *error_out = writer->error;
    writer->outcome = QE_OK;
    pthread_mutex_unlock(&writer->mutex);
    return status;
}
