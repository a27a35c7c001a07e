/* test_timeline.c - the file of a timeline: what cannot be written is told when it is opened, and what was marked last
 * is in it. Needs no GPU: the events of the runtime are replaced here by a clock that ticks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "backend/cuda/device.h"
#include "base/assert.h"
#include "checked.h"

static int failed, checked, events;
static float ticks;

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = calloc(1, sizeof(float));
    events += *event != NULL;
    return *event != NULL ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    events--;
    free(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    (void)stream;
    *(float *)(void *)event = ticks++;
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = *(float *)(void *)to - *(float *)(void *)from;
    return cudaSuccess;
}

static void check(int good, const char *what) {
    checked++;
    failed += !good;
    if (!good) printf("FAILED %s\n", what);
}

static void refuse(const char *path) {
    cuda_timeline *timeline = NULL;
    qe_error error = {0};
    const qe_status status = qe_cuda_timeline_create(path, &timeline, &error);
    check(status == QE_ERROR_IO && timeline == NULL, "a file that cannot be written");
    check(strstr(error.remedy, "train.timeline") != NULL && strcmp(error.path, path) == 0, "its name and a way out");
    check(events == 0, "no event is left");
}

static void mark_and_read(void) {
    enum { MARKS = 8192 + 100, LINE_BYTES = 256 };
    char path[] = "/tmp/qeffect-timeline-XXXXXX", line[LINE_BYTES], named[sizeof path], stream[] = "compute";
    cuda_timeline *timeline = NULL;
    qe_error error = {0};
    int lines = 0, streams = 0, fd = mkstemp(path);
    QE_ASSERT(fd >= 0 && close(fd) == 0);
    memcpy(named, path, sizeof path);
    QE_ASSERT(qe_cuda_timeline_create(named, &timeline, &error) == QE_OK);
    memset(named, 'x', sizeof named - 1); /* the path is the caller's */
    for (int i = 0; i < MARKS; i++) {
        qe_cuda_timeline_begin(timeline, i < 100 ? "early" : "late", stream, NULL);
        qe_cuda_timeline_end(timeline, NULL);
    }
    memset(stream, 'x', sizeof stream - 1); /* a device closes its streams first */
    qe_cuda_timeline_destroy(timeline);
    FILE *file = fopen(path, "r");
    QE_ASSERT(file != NULL);
    for (; fgets(line, sizeof line, file) != NULL; lines++) {
        check(strstr(line, "early") == NULL, "the last are kept");
        streams += strstr(line, "\"tid\":\"compute\"") != NULL;
    }
    (void)fclose(file);
    (void)unlink(path);
    check(streams == 8192, "names of streams that are gone");
    check(lines == 8192 + 2, "as many as the ring holds, and the document around them");
    check(events == 0, "no event is left");
}

int main(void) {
    refuse("/nonexistent/timeline.json");
    refuse("/");
    mark_and_read();
    printf("%d checks, %d failed\n", checked, failed);
    return failed > 0;
}
