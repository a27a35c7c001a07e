/* timeline.c - when ops and graphs ran on the device, as a Chrome timeline (opens in Perfetto). Pairs of events are
 * kept in a ring: the last ones of a run are what is written. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "backend/cuda/device.h"

enum { TIMELINE_MARKS = 8192 }; /* some steps of a small model, one of a large one */

typedef struct timeline_mark {
    const char *name; /* of an op's kind: always there */
    char stream_name[QE_NAME_BYTES]; /* the file is written when streams are gone */
    cudaEvent_t begin, end;
} timeline_mark;

struct cuda_timeline {
    FILE *file; /* from the start: what cannot be written is told before the work and not behind it */
    cudaEvent_t origin;
    int started;
    uint64_t count; /* of all marks so far; the ring holds the last */
    timeline_mark marks[TIMELINE_MARKS];
};

static qe_status marks_create(cuda_timeline *timeline, qe_error *error_out) {
    cudaError_t code = cudaEventCreate(&timeline->origin);
    for (int i = 0; code == cudaSuccess && i < TIMELINE_MARKS; i++) {
        code = cudaEventCreate(&timeline->marks[i].begin);
        if (code == cudaSuccess) code = cudaEventCreate(&timeline->marks[i].end);
    }
    return qe_cuda_check(code, "events of a timeline", error_out);
}

static qe_status file_open(cuda_timeline *timeline, const char *path, qe_error *error_out) {
    timeline->file = fopen(path, "we");
    if (timeline->file != NULL) return QE_OK;
    (void)qe_error_set(error_out, QE_ERROR_IO, "name a file that can be written with --set train.timeline=FILE",
                       "cannot write the timeline: %s", strerror(errno));
    return error_out != NULL ? qe_error_place(error_out, path, 0, 0) : QE_ERROR_IO;
}

qe_status qe_cuda_timeline_create(const char *path, cuda_timeline **timeline_out, qe_error *error_out) {
    cuda_timeline *timeline = calloc(1, sizeof *timeline);
    if (timeline == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a timeline");
    qe_status status = marks_create(timeline, error_out);
    if (status == QE_OK) status = file_open(timeline, path, error_out);
    if (status != QE_OK) {
        qe_cuda_timeline_destroy(timeline);
        return status;
    }
    *timeline_out = timeline;
    return QE_OK;
}

void qe_cuda_timeline_begin(cuda_timeline *timeline, const char *name, const char *stream_name, cudaStream_t stream) {
    timeline_mark *mark = &timeline->marks[timeline->count % TIMELINE_MARKS];
    if (!timeline->started) (void)cudaEventRecord(timeline->origin, stream);
    timeline->started = 1;
    mark->name = name;
    (void)snprintf(mark->stream_name, sizeof mark->stream_name, "%s", stream_name);
    (void)cudaEventRecord(mark->begin, stream);
}

void qe_cuda_timeline_end(cuda_timeline *timeline, cudaStream_t stream) {
    (void)cudaEventRecord(timeline->marks[timeline->count++ % TIMELINE_MARKS].end, stream);
}

static double us_between(cudaEvent_t from, cudaEvent_t to) {
    float ms = 0;
    return cudaEventElapsedTime(&ms, from, to) == cudaSuccess ? 1e3 * (double)ms : 0;
}

static void mark_write(const cuda_timeline *timeline, const timeline_mark *mark, int first, FILE *file) {
    fprintf(file, "%s\n{\"name\":\"%s\",\"ph\":\"X\",\"pid\":0,\"tid\":\"%s\",\"ts\":%.3f,\"dur\":%.3f}",
            first ? "" : ",", mark->name, mark->stream_name, us_between(timeline->origin, mark->begin),
            us_between(mark->begin, mark->end));
}

static void marks_write(const cuda_timeline *timeline, FILE *file) {
    uint64_t kept = timeline->count < TIMELINE_MARKS ? timeline->count : TIMELINE_MARKS;
    fprintf(file, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    for (uint64_t i = 0; i < kept; i++)
        mark_write(timeline, &timeline->marks[(timeline->count - kept + i) % TIMELINE_MARKS], i == 0, file);
    fprintf(file, "\n]}\n");
}

void qe_cuda_timeline_destroy(cuda_timeline *timeline) {
    if (timeline == NULL) return;
    if (timeline->file != NULL) {
        marks_write(timeline, timeline->file);
        (void)fclose(timeline->file);
    }
    for (int i = 0; i < TIMELINE_MARKS; i++) {
        if (timeline->marks[i].begin != NULL) (void)cudaEventDestroy(timeline->marks[i].begin);
        if (timeline->marks[i].end != NULL) (void)cudaEventDestroy(timeline->marks[i].end);
    }
    if (timeline->origin != NULL) (void)cudaEventDestroy(timeline->origin);
    free(timeline);
}
