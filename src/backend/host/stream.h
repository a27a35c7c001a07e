/* stream.h - what a stream and an event are, for the two files that feed streams: stream.c and graph.c. */
#ifndef QE_HOST_STREAM_H
#define QE_HOST_STREAM_H

#include "backend/host/host.h"
#include "qeffect/limits.h"

enum { RING_ITEMS = 8192 }; /* a power of two; a step of a rank is some thousand ops, so submitters rarely block */

typedef struct host_lane host_lane;
typedef struct host_recording host_recording;

typedef enum item_kind { ITEM_OP, ITEM_WAIT, ITEM_LANE, ITEM_STOP } item_kind;

typedef struct ring_item {
    item_kind kind;
    union {
        const qe_op *op;
        host_progress *progress; /* wait */
        const host_lane *lane;
    } what;
    uint64_t position; /* wait: how far `progress` must have come; lane: the number of the launch */
} ring_item;

struct qe_stream {
    qe_device *device;
    host_progress *progress;
    host_counter submitted;
    uint64_t given; /* the submitter's own copy of `submitted` */
    pthread_t thread;
    host_recording *recording; /* that its submissions go to; NULL: they run */
    uint32_t lane;             /* its place there */
    /* First failure since the last sync. The thread writes it before `done` rises; sync reads it after that. */
    _Atomic qe_status failure;
    _Atomic int failed_kind; /* qe_op_kind */
    char name[QE_NAME_BYTES];
    ring_item ring[RING_ITEMS];
};

/*  PLAIN --record in a recording--> INSIDE --it ends well--> CAPTURED
 *    ^                                |                         |
 *    '--- record outside; it fails ---+-----record outside------'     (a failed recording gives back `before`) */
typedef enum event_state { EVENT_PLAIN, EVENT_INSIDE, EVENT_CAPTURED } event_state;

struct qe_event {
    qe_device *device;
    pthread_mutex_t lock;    /* the two fields below: one thread may record an event while another waits for it */
    host_progress *progress; /* of the stream that recorded it last, outside recordings; NULL: never recorded */
    uint64_t position;
    /* Changed under the device's lock. */
    _Atomic event_state state;
    event_state before;        /* INSIDE: what a failed recording gives back */
    host_recording *recording; /* INSIDE: which, and its step */
    uint64_t step;
    qe_event *previous, *next; /* INSIDE: the other events of that recording */
};

/* Puts an item into the stream's ring; blocks while it is full. */
void qe_host_item_submit(qe_stream *stream, ring_item item);
/* The last record submitted outside recordings before now; NULL: there is none. */
host_progress *qe_host_event_read(qe_event *event, uint64_t *position_out);

#endif
