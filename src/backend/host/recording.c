/* recording.c - from begin to end: what streams are given is noted, not run, and what may not be recorded spoils it.
 *
 * Order is kept as vector clocks of the lanes' steps. They tell at the end whether the first lane comes behind the last
 * op of every other, and at a wait whether it says anything new. What CUDA does in each case was tried:
 * docs/graphs.md. */
#include "backend/host/recording.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/assert.h"

enum { STEPS_FIRST = 64 }; /* room of a recording's first allocation; it doubles */

static qe_status failure_of(const host_recording *recording) {
    return atomic_load_explicit(&recording->failure, memory_order_relaxed);
}

/* Under the device's lock. */
__attribute__((format(printf, 4, 0))) static void spoil_locked(host_recording *recording, qe_status status,
                                                               const char *remedy, const char *format, va_list list) {
    if (failure_of(recording) != QE_OK) return;
    char message[QE_ERROR_TEXT_BYTES];
    vsnprintf(message, sizeof message, format, list);
    qe_error_set(&recording->cause, status, remedy, "%s", message);
    atomic_store_explicit(&recording->failure, status, memory_order_relaxed);
}

qe_status qe_host_recording_spoil(host_recording *recording, qe_status status, const char *remedy, const char *format,
                                  ...) {
    va_list list;
    va_start(list, format);
    pthread_mutex_lock(&recording->device->lock);
    spoil_locked(recording, status, remedy, format, list);
    pthread_mutex_unlock(&recording->device->lock);
    va_end(list);
    return failure_of(recording);
}

/* Origins of all recordings of a device, one after the other: usually there is one. */
__attribute__((format(printf, 2, 3))) static int spoil_all(qe_device *device, const char *format, ...) {
    int spoilt = 0;
    pthread_mutex_lock(&device->lock);
    for (host_recording *recording = device->recordings; recording; recording = recording->next, ++spoilt) {
        va_list list;
        va_start(list, format);
        spoil_locked(recording, QE_ERROR_ARGUMENT, "do it before the recording begins or after it has ended", format,
                     list);
        va_end(list);
    }
    pthread_mutex_unlock(&device->lock);
    return spoilt;
}

qe_status qe_host_recording_forbid(qe_device *device, const char *call, const char *name, qe_error *error_out) {
    if (!atomic_load_explicit(&device->recordings_live, memory_order_acquire)) return QE_OK;
    const char *of = name ? " of stream '" : "", *named = name ? name : "", *closed = name ? "'" : "";
    const int spoilt =
        spoil_all(device, "%s%s%s%s while a stream of the device was recording", call, of, named, closed);
    if (!spoilt) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, "do it before the recording begins or after it has ended",
                        "%s%s%s%s while a stream of the device is recording", call, of, named, closed);
}

static void lane_attach(host_recording *recording, qe_stream *stream) {
    stream->recording = recording;
    stream->lane = recording->lanes_count++;
    recording->lanes[stream->lane].stream = stream;
}

qe_status qe_host_recording_begin(qe_stream *stream, qe_error *error_out) {
    if (stream->recording)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "end or abandon that recording first",
                            "stream '%s' is recording already", stream->name);
    host_recording *recording = calloc(1, sizeof *recording);
    if (!recording)
        return qe_error_set(error_out, QE_ERROR_MEMORY, "free memory and try again", "no memory for a recording");
    qe_device *device = stream->device;
    recording->device = device;
    atomic_init(&recording->failure, QE_OK);
    lane_attach(recording, stream);
    pthread_mutex_lock(&device->lock);
    recording->next = device->recordings;
    device->recordings = recording;
    atomic_fetch_add(&device->recordings_live, 1);
    pthread_mutex_unlock(&device->lock);
    return QE_OK;
}

/* Room for one more step of the stream; the caller fills its kind and `what`. */
static qe_status step_add(qe_stream *stream, host_step **step_out) {
    host_recording *recording = stream->recording;
    if (recording->steps_count == RECORDING_STEPS_MAX)
        return qe_host_recording_spoil(recording, QE_ERROR_LIMIT, "end recordings, or record smaller graphs",
                                       "stream '%s': more than %d steps in one recording", stream->name,
                                       RECORDING_STEPS_MAX);
    if (recording->steps_count == recording->steps_capacity) {
        const uint64_t capacity = recording->steps_capacity ? 2 * recording->steps_capacity : STEPS_FIRST;
        host_step *steps = realloc(recording->steps, capacity * sizeof *steps);
        if (!steps)
            return qe_host_recording_spoil(recording, QE_ERROR_MEMORY, "free memory or record smaller graphs",
                                           "no memory for %llu recorded steps", (unsigned long long)capacity);
        recording->steps = steps;
        recording->steps_capacity = capacity;
    }
    host_step *step = &recording->steps[recording->steps_count++];
    step->lane = stream->lane;
    step->is_node = 0;
    ++recording->lanes[stream->lane].seen.steps[stream->lane];
    *step_out = step;
    return QE_OK;
}

qe_status qe_host_recording_submit(qe_stream *stream, const qe_op *op) {
    host_step *step = NULL;
    QE_TRY(failure_of(stream->recording));
    QE_TRY(step_add(stream, &step));
    step->kind = STEP_OP;
    step->what.op = *op;
    recorded_lane *lane = &stream->recording->lanes[stream->lane];
    lane->worked = lane->seen.steps[stream->lane];
    return QE_OK;
}

/* Under the device's lock. */
static void event_unlink(qe_event *event) {
    if (event->previous) event->previous->next = event->next;
    else event->recording->events = event->next;
    if (event->next) event->next->previous = event->previous;
    event->previous = event->next = NULL;
    event->recording = NULL;
}

/* Under the device's lock. */
static void event_link(qe_event *event, host_recording *recording, uint64_t step) {
    if (atomic_load_explicit(&event->state, memory_order_relaxed) == EVENT_INSIDE) event_unlink(event);
    else event->before = atomic_load_explicit(&event->state, memory_order_relaxed);
    event->recording = recording;
    event->step = step;
    event->next = recording->events;
    if (event->next) event->next->previous = event;
    recording->events = event;
    atomic_store_explicit(&event->state, EVENT_INSIDE, memory_order_relaxed);
}

void qe_host_recording_forget(qe_event *event) {
    pthread_mutex_lock(&event->device->lock);
    if (atomic_load_explicit(&event->state, memory_order_relaxed) == EVENT_INSIDE) event_unlink(event);
    atomic_store_explicit(&event->state, EVENT_PLAIN, memory_order_relaxed);
    pthread_mutex_unlock(&event->device->lock);
}

static qe_status spoil_foreign(host_recording *recording, const char *name) {
    return qe_host_recording_spoil(recording, QE_ERROR_ARGUMENT, "use events of the device that records",
                                   "stream '%s' was given an event of another device while it recorded", name);
}

qe_status qe_host_recording_record(qe_stream *stream, qe_event *event) {
    host_recording *recording = stream->recording;
    host_step *step = NULL;
    QE_TRY(failure_of(recording));
    if (event->device != recording->device) return spoil_foreign(recording, stream->name);
    QE_TRY(step_add(stream, &step));
    step->kind = STEP_RECORD;
    step->what.record.clock = recording->lanes[stream->lane].seen;
    pthread_mutex_lock(&recording->device->lock);
    event_link(event, recording, recording->steps_count - 1);
    pthread_mutex_unlock(&recording->device->lock);
    return QE_OK;
}

/* The stream's next step comes behind the record. A wait that says nothing new is not recorded: whoever has seen the
 * record itself has seen all that comes before it. */
static qe_status wait_add(qe_stream *stream, uint64_t source) {
    host_recording *recording = stream->recording;
    const host_step *record = &recording->steps[source];
    host_clock *seen = &recording->lanes[stream->lane].seen;
    if (seen->steps[record->lane] >= record->what.record.clock.steps[record->lane]) return QE_OK;
    host_step *step = NULL;
    QE_TRY(step_add(stream, &step)); /* may move the steps */
    step->kind = STEP_WAIT;
    step->what.source = source;
    const host_clock *brought = &recording->steps[source].what.record.clock;
    for (int lane = 0; lane < QE_STREAMS_MAX; ++lane)
        if (seen->steps[lane] < brought->steps[lane]) seen->steps[lane] = brought->steps[lane];
    return QE_OK;
}

/* A stream that runs meets an event of a recording: it takes part from now on. */
static qe_status recording_join(qe_stream *stream, host_recording *recording, uint64_t source) {
    QE_TRY(failure_of(recording));
    if (stream->device != recording->device) return spoil_foreign(recording, stream->name);
    if (recording->lanes_count == QE_STREAMS_MAX)
        return qe_host_recording_spoil(recording, QE_ERROR_LIMIT, "use fewer streams",
                                       "stream '%s' would be one more than the %d streams of a recording", stream->name,
                                       QE_STREAMS_MAX);
    lane_attach(recording, stream);
    return wait_add(stream, source);
}

static qe_status spoil_merge(qe_stream *stream, host_recording *other) {
    const char *remedy = "end one recording before the other needs its work";
    const char *format = "stream '%s' waited for an event of another recording";
    qe_host_recording_spoil(other, QE_ERROR_ARGUMENT, remedy, format, stream->name);
    return qe_host_recording_spoil(stream->recording, QE_ERROR_ARGUMENT, remedy, format, stream->name);
}

/* The stream records, the event was recorded outside. */
static qe_status wait_outside(qe_stream *stream, qe_event *event, event_state state) {
    uint64_t position;
    if (state == EVENT_PLAIN && !qe_host_event_read(event, &position)) return QE_OK; /* never recorded */
    return qe_host_recording_spoil(stream->recording, QE_ERROR_ARGUMENT,
                                   "wait before the recording begins, or record the event inside it",
                                   "stream '%s' waited while it recorded for an event recorded outside the recording",
                                   stream->name);
}

qe_status qe_host_recording_wait(qe_stream *stream, qe_event *event) {
    pthread_mutex_lock(&event->device->lock);
    const event_state state = atomic_load_explicit(&event->state, memory_order_relaxed);
    host_recording *recording = event->recording;
    const uint64_t source = event->step;
    pthread_mutex_unlock(&event->device->lock);
    if (stream->recording) QE_TRY(failure_of(stream->recording));
    if (state != EVENT_INSIDE) return stream->recording ? wait_outside(stream, event, state) : QE_ERROR_ARGUMENT;
    if (!stream->recording) return recording_join(stream, recording, source);
    if (stream->recording != recording) return spoil_merge(stream, recording);
    return wait_add(stream, source);
}

/* The first lane comes behind every op, or a stream that did not come back. */
static const qe_stream *stream_missing(const host_recording *recording) {
    for (uint32_t lane = 1; lane < recording->lanes_count; ++lane)
        if (recording->lanes[0].seen.steps[lane] < recording->lanes[lane].worked) return recording->lanes[lane].stream;
    return NULL;
}

qe_status qe_host_recording_check(qe_stream *stream, host_recording **recording_out, qe_error *error_out) {
    host_recording *recording = stream->recording;
    if (!recording)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "begin a recording first", "stream '%s' is not recording",
                            stream->name);
    if (stream->lane != 0) {
        const char *remedy = "end it on the stream that began it";
        const char *format = "stream '%s' joined the recording and ended it";
        qe_host_recording_spoil(recording, QE_ERROR_ARGUMENT, remedy, format, stream->name);
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, remedy, format, stream->name);
    }
    const qe_stream *missing = failure_of(recording) == QE_OK ? stream_missing(recording) : NULL;
    if (missing)
        qe_host_recording_spoil(recording, QE_ERROR_ARGUMENT,
                                "record an event behind its last op and let the stream that began wait for it",
                                "stream '%s' joined the recording and did not come back behind its last op",
                                missing->name);
    pthread_mutex_lock(&recording->device->lock);
    const qe_status failure = failure_of(recording);
    if (failure != QE_OK && error_out) *error_out = recording->cause;
    pthread_mutex_unlock(&recording->device->lock);
    *recording_out = recording;
    return failure;
}

/* Under the device's lock. */
static void recording_unlink(host_recording *recording) {
    host_recording **at = &recording->device->recordings;
    while (*at != recording) at = &(*at)->next;
    *at = recording->next;
    atomic_fetch_sub(&recording->device->recordings_live, 1);
}

void qe_host_recording_close(host_recording *recording, int is_good) {
    qe_device *device = recording->device;
    for (uint32_t lane = 0; lane < recording->lanes_count; ++lane)
        if (recording->lanes[lane].stream) recording->lanes[lane].stream->recording = NULL;
    pthread_mutex_lock(&device->lock);
    recording_unlink(recording);
    while (recording->events) {
        qe_event *event = recording->events;
        event_unlink(event);
        atomic_store_explicit(&event->state, is_good ? EVENT_CAPTURED : event->before, memory_order_relaxed);
    }
    pthread_mutex_unlock(&device->lock);
    free(recording->steps);
    free(recording);
}

void qe_host_recording_leave(qe_stream *stream) {
    host_recording *recording = stream->recording;
    if (!recording) return;
    if (stream->lane == 0) {
        qe_host_recording_close(recording, 0);
        return;
    }
    qe_host_recording_spoil(recording, QE_ERROR_ARGUMENT, "destroy streams when no recording uses them",
                            "stream '%s' was destroyed while it recorded", stream->name);
    recording->lanes[stream->lane].stream = NULL;
    stream->recording = NULL;
}
