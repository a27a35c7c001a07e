/* recording.h - what a recording knows until it becomes a graph, and what calls mean meanwhile. */
#ifndef QE_HOST_RECORDING_H
#define QE_HOST_RECORDING_H

#include "backend/host/stream.h"

/* A rank's step is some thousand ops. A recording of more than a million steps is one that nobody ended. */
enum { RECORDING_STEPS_MAX = 1 << 20 };

typedef enum step_kind { STEP_OP, STEP_RECORD, STEP_WAIT } step_kind;

/* For each lane, how many of its steps come before a point. */
typedef struct host_clock {
    uint64_t steps[QE_STREAMS_MAX];
} host_clock;

typedef struct host_step {
    step_kind kind;
    uint32_t lane;
    int is_node; /* a launch takes it; known once the recording has ended */
    union {
        qe_op op;
        struct {
            host_clock clock;
            uint64_t signal; /* its number, once the graph is built */
        } record;
        uint64_t source; /* wait: the step that recorded */
    } what;
} host_step;

typedef struct recorded_lane {
    qe_stream *stream; /* NULL: destroyed meanwhile */
    host_clock seen;   /* what comes before its next step; its own entry: its steps so far */
    uint64_t worked;   /* its steps up to its last op */
} recorded_lane;

struct host_recording {
    qe_device *device;
    recorded_lane lanes[QE_STREAMS_MAX]; /* 0: the stream that began */
    uint32_t lanes_count;
    host_step *steps;
    uint64_t steps_count, steps_capacity;
    _Atomic qe_status failure; /* that of `cause` */
    /* Under the device's lock. */
    qe_error cause; /* what spoilt it first */
    qe_event *events;
    host_recording *next; /* of the device */
};

/* Thread: all streams of a recording are used by one thread at a time, the caller orders it; `forbid`: any. */
qe_status qe_host_recording_begin(qe_stream *stream, qe_error *error_out);
/* The stream's recording, which it began, if it can become a graph. */
qe_status qe_host_recording_check(qe_stream *stream, host_recording **recording_out, qe_error *error_out);
/* Lets all streams run again. Events recorded inside are captured, or what they were before. */
void qe_host_recording_close(host_recording *recording, int is_good);

/* The stream records. */
qe_status qe_host_recording_submit(qe_stream *stream, const qe_op *op);
qe_status qe_host_recording_record(qe_stream *stream, qe_event *event);
/* The stream records, or the event is not plain. */
qe_status qe_host_recording_wait(qe_stream *stream, qe_event *event);
/* The stream is destroyed: a recording that it began is dropped, one that it joined is spoilt. */
void qe_host_recording_leave(qe_stream *stream);
/* The event is recorded outside, or destroyed: no recording knows it any more. */
void qe_host_recording_forget(qe_event *event);
/* Refuses `call` of the thing `name` (may be NULL) while a stream of the device records, and spoils what is being
 * recorded, as CUDA does. */
qe_status qe_host_recording_forbid(qe_device *device, const char *call, const char *name, qe_error *error_out);
/* Notes the first cause; returns its status. */
qe_status qe_host_recording_spoil(host_recording *recording, qe_status status, const char *remedy, const char *format,
                                  ...) __attribute__((format(printf, 4, 5)));

#endif
