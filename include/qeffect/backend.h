/* backend.h - what a device must offer. The core knows devices only through these tables; each has one lifetime.
 * All entries are set; a backend that lacks one uses a stub that returns QE_ERROR_UNSUPPORTED. */
#ifndef QEFFECT_BACKEND_H
#define QEFFECT_BACKEND_H

#include <stddef.h>
#include "qeffect/limits.h"
#include "qeffect/op.h"
#include "qeffect/rule.h"
#include "qeffect/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qe_device qe_device;
typedef struct qe_stream qe_stream;
typedef struct qe_event qe_event;
typedef struct qe_graph qe_graph;

/* Bytes of a device that are kept elsewhere on it: more than none, at addresses that are multiples of 16. */
typedef struct qe_keep_range {
    const void *from;
    void *to;
    uint64_t bytes;
} qe_keep_range;

typedef struct qe_memory_ops {
    size_t size; /* sizeof the struct, so older tables are recognised */
    /* Zeroed, aligned to QE_ALIGN_BYTES. Before the first step only. Capture: forbidden. */
    qe_status (*alloc)(qe_device *device, size_t bytes, void **address_out, qe_error *error_out);
    void (*release)(qe_device *device, void *address);
    /* Zeroed memory of the host that ops of this device may copy from and to (page-locked where that matters). */
    qe_status (*host_alloc)(qe_device *device, size_t bytes, void **address_out, qe_error *error_out);
    void (*host_release)(qe_device *device, void *address);
    /* Host <-> device, returns when done. Thread: any; the caller orders it. Capture: forbidden. */
    qe_status (*write)(qe_device *device, void *to, const void *from_host, size_t bytes, qe_error *error_out);
    qe_status (*read)(qe_device *device, void *to_host, const void *from, size_t bytes, qe_error *error_out);
    /* A copy that the work does not wait for, in two steps: kept within the device, which is fast, then fetched beside
     * the work. Both NULL: memory is the host's, and there is nothing to gain.
     * keep: the copies are under way, and taken when the next `write` to this device returns. Requires: until then
     * nothing changes the ranges. Capture: forbidden.
     * fetch: what was kept, to the host. Thread: any, one at a time, beside all other calls. Capture: allowed. */
    qe_status (*keep)(qe_device *device, const qe_keep_range *ranges, size_t count, qe_error *error_out);
    qe_status (*fetch)(qe_device *device, void *to_host, const void *kept, size_t bytes, qe_error *error_out);
} qe_memory_ops;

typedef struct qe_stream_ops {
    size_t size;
    qe_status (*create)(qe_device *device, const char *name, qe_stream **stream_out, qe_error *error_out);
    void (*destroy)(qe_stream *stream); /* drains first; cannot fail */
    /* Queues one op. `op` must stay valid and unchanged until it has run. Thread: one submitter per stream.
     * Blocks only while the queue is full. No allocation. */
    qe_status (*submit)(qe_stream *stream, const qe_op *op);
    qe_status (*event_create)(qe_device *device, qe_event **event_out, qe_error *error_out);
    void (*event_destroy)(qe_event *event);
    qe_status (*record)(qe_stream *stream, qe_event *event); /* marks what the stream has been given so far */
    /* later work waits for the last record submitted before this call */
    qe_status (*wait)(qe_stream *stream, qe_event *event);
    qe_status (*event_sync)(qe_event *event, qe_error *error_out); /* host waits. Capture: forbidden */
    /* Host waits until all work is done. On failure: the first error of an op of this stream since the last sync
     * (QE_ERROR_DEVICE, or QE_ERROR_INTERRUPTED when a transport was aborted); the stream goes on working. */
    qe_status (*sync)(qe_stream *stream, qe_error *error_out);
} qe_stream_ops;

typedef struct qe_graph_info {
    uint32_t ops, lanes;  /* recorded ops; streams that take part */
    uint64_t bytes;       /* memory that the graph holds */
} qe_graph_info;

/* Recorded work. A graph freezes what it was given: pointers, shapes and host constants are copied; memory that ops
 * read through a pointer when they run (qe_args_adamw.step) is not. Recording follows CUDA's stream capture:
 * docs/graphs.md.
 * Thread: all streams of a recording, or of a launch, are used by one thread at a time. */
typedef struct qe_graph_ops {
    size_t size;
    /* From now on the stream's submissions are recorded instead of run. A stream that waits for an event recorded
     * inside joins the recording.
     * On failure: QE_ERROR_ARGUMENT when the stream records already, and that goes on; QE_ERROR_MEMORY. */
    qe_status (*begin)(qe_stream *stream, qe_error *error_out);
    /* Ends the recording that `stream` began. An event recorded inside is of no use outside until it is recorded
     * again.
     * Requires:   every joined stream was waited for behind its last op.
     * On failure: the first that made the recording invalid, in words. QE_ERROR_ARGUMENT: a stream that did not come
     *             back, a wait for an event recorded outside, a sync or an access to memory on a device that records.
     *             QE_ERROR_LIMIT: more than QE_STREAMS_MAX streams, a million steps. QE_ERROR_UNSUPPORTED: a launch
     *             inside. QE_ERROR_MEMORY. The call that did it failed too, and so did all later ones of the recording.
     *             The recording is dropped; all streams run again, events have the record they had before it; nothing
     *             is left behind.
     * Owns:       the caller destroys the graph. */
    qe_status (*end)(qe_stream *stream, qe_graph **graph_out, qe_error *error_out);
    /* Drops the recording that the stream takes part in. Does nothing where there is none. */
    void (*abandon)(qe_stream *stream);
    /* Runs the recorded work behind the stream's earlier work and behind the graph's launch before, wherever that
     * was; the stream's later work runs behind all of it. Lanes of other streams run on those streams.
     * Allocates nothing.
     * Requires:   the streams that took part still exist.
     * On failure: QE_ERROR_ARGUMENT for a stream of another device, or when a stream of a lane records. */
    qe_status (*launch)(qe_graph *graph, qe_stream *stream);
    /* Requires: the launching streams have been waited for, behind its launches. */
    void (*destroy)(qe_graph *graph);
    qe_graph_info (*info)(const qe_graph *graph);
} qe_graph_ops;

/* Bytes that an op may touch. An op that both reads and writes them says both; what it only writes has no value for it
 * before. The texts are for people and outlive the device. */
typedef struct qe_range {
    void *at;
    uint64_t bytes;
    uint8_t read, write;
    const char *object, *part; /* "model.layers.0.mlp.down_proj", "moment1" */
} qe_range;

/* A breach that a device found in what it was really given: no submission's declaration told of it. */
typedef struct qe_breach {
    qe_rule rule;
    char object[QE_NAME_BYTES]; /* what was touched, as the range said; may be empty */
    char text[QE_ERROR_TEXT_BYTES]; /* both accesses and what is missing between them */
} qe_breach;

typedef struct qe_backend {
    size_t size;
    const char *name;     /* "host" */
    qe_numerics numerics; /* what the model is to be laid out for */
    /* Opens one device for one rank. */
    qe_status (*open)(qe_device **device_out, qe_error *error_out);
    void (*close)(qe_device *device);
    /* What decides the bits beside the program: kernel level, BLAS core name and version; for checkpoints and seals. */
    const char *(*identity)(const qe_device *device);
    const qe_memory_ops *memory;
    const qe_stream_ops *stream;
    const qe_graph_ops *graph;
    /* Runs one op on the calling thread, now. Tests and the baseline of benchmarks. */
    qe_status (*run)(qe_device *device, const qe_op *op, qe_error *error_out);
    /* Gets ready to run an op like this one: chooses an algorithm, builds what it needs, grows workspace. Called when
     * an op is bound; running an op that was not prepared may do so then, but not while it is recorded.
     * On failure: QE_ERROR_UNSUPPORTED, in words, for shapes that the device cannot compute. Capture: forbidden. */
    qe_status (*prepare)(qe_device *device, const qe_op *op, qe_error *error_out);
    /* A call that returned QE_CONTRACT left its breach here; asking takes it. Returns 0 where there is none. A device
     * that does not look never finds one. */
    int (*breach)(qe_device *device, qe_breach *breach_out);
    /* Says what the op at this address may touch, in place of what was said before; called when an op is bound. No
     * ranges: the op, or memory of the host that it named, is gone. A backend that does not look (all but `check`)
     * returns QE_OK. Owns: copies the ranges. Capture: forbidden. */
    qe_status (*declare)(qe_device *device, const qe_op *op, const qe_range *ranges, size_t count,
                         qe_error *error_out);
} qe_backend;

#ifdef __cplusplus
}
#endif
#endif
