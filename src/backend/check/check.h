/* check.h - what the files of the check backend share.
 *
 * Every stream is a thread that takes items in order and runs ops of the inner device itself, one at a time on the
 * whole device: an op is looked at while nothing else runs but transfers. Inner streams serve recordings and launches
 * alone. One lock guards everything of a device; it is held while an op is checked and given up while a transfer or an
 * unchecked graph runs. */
#ifndef QE_CHECK_CHECK_H
#define QE_CHECK_CHECK_H

#include <pthread.h>

#include "qeffect/check.h"

enum {
    CHECK_ITEMS = 256,         /* of one stream's queue: a submitter that is further ahead waits */
    CHECK_POISON = 0xff,       /* NaN in fp32, bf16, E4M3 and E5M2, -1 as an integer */
    CHECK_GUARD_BYTES = 256    /* around an allocation, never declared; keeps the alignment of QE_ALIGN_BYTES */
};

enum { ACCESS_READ = 1, ACCESS_WRITE = 2, ACCESS_FOREIGN = 4 /* a transfer has it: not ours to look at */ };

/* Memory that is looked at: an allocation with its guards, or host memory that a declaration named. */
typedef struct check_region {
    char *base; /* guards included */
    uint64_t bytes;
    uint64_t guard_bytes; /* in front and behind; 0 for host memory */
    char *before, *after, *again; /* [bytes] before the op, after it, after it ran on poison */
} check_region;

/* What an op, or all ops of a graph, may touch. */
typedef struct check_declaration {
    const qe_op *op;
    qe_range *ranges;
    uint32_t count;
} check_declaration;

/* Bytes of one region that are declared alike. */
typedef struct check_span {
    check_region *region;
    uint64_t begin, end;
    int access;
} check_span;

/* How far a stream has come. Outlives its stream, because events remember it; the device frees it. */
typedef struct check_progress {
    uint64_t done; /* items finished */
    struct check_progress *next;
} check_progress;

typedef enum check_item_kind { ITEM_OP, ITEM_WAIT, ITEM_LAUNCH } check_item_kind;

typedef struct check_item {
    check_item_kind kind;
    uint64_t position; /* ITEM_WAIT: items that `progress` must have finished */
    union {
        const qe_op *op;
        check_progress *progress;
        qe_graph *graph;
    } what;
} check_item;

struct qe_stream {
    qe_device *device;
    qe_stream *inner, *next;
    check_progress *progress;
    check_item items[CHECK_ITEMS];
    uint64_t given;
    int stop, recording;
    qe_range flying; /* bytes of the transfer that runs now; else bytes is 0 */
    qe_error failure; /* the first since the last sync */
    pthread_t thread;
};

struct qe_event {
    qe_device *device;
    qe_event *inner, *next;
    check_progress *progress;
    uint64_t position;
    uint64_t inside; /* the recording that it was last recorded in; 0: outside of all */
};

struct qe_graph {
    qe_device *device;
    qe_graph *inner;
    check_declaration all; /* union of its ops */
    int transfers;         /* holds some: passed on unchecked */
    int spoiled;           /* while it is recorded: it waits for what is outside */
};

struct qe_device {
    const qe_backend *inner_backend;
    qe_device *inner; /* NULL: wraps nothing */
    qe_error refusal; /* why it does not */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* anything that somebody waits for */
    check_region **regions; /* by address */
    uint32_t region_count, region_capacity;
    check_declaration *declarations; /* by op */
    uint32_t declaration_count, declaration_capacity;
    check_span *spans; /* of the op that is looked at, by address */
    uint32_t span_count, span_capacity;
    qe_stream *streams;
    qe_event *events;
    check_progress *progresses;
    qe_graph *recording; /* what is being recorded; one at a time */
    qe_stream *recorder; /* began it */
    uint64_t recording_number; /* of the last that began, from 1 */
    uint32_t passing;    /* unchecked graphs that run now */
    qe_check_count counts;
};

/* One run of what is looked at. */
typedef struct check_run {
    qe_status (*run)(const struct check_run *run, qe_error *error_out);
    qe_device *device;
    const qe_op *op;   /* NULL: the graph */
    qe_graph *graph;
    qe_stream *stream; /* the graph's */
} check_run;

/* All of them: the device's lock is held. */

/* region.c */
qe_status qe_check_region_add(qe_device *device, char *base, uint64_t bytes, uint64_t guard_bytes,
                              qe_error *error_out);
void qe_check_region_remove(qe_device *device, const char *base);
/* Ranges lie in one region each; those outside every allocation become regions. */
qe_status qe_check_declare(qe_device *device, const qe_op *op, const qe_range *ranges, size_t count,
                           qe_error *error_out);
/* Adds ranges to a declaration; ranges of the same bytes become one. */
qe_status qe_check_declaration_join(check_declaration *all, const qe_range *ranges, size_t count,
                                    qe_error *error_out);
const check_declaration *qe_check_find(const qe_device *device, const qe_op *op);
/* Cuts all regions into spans. */
qe_status qe_check_cut(qe_device *device, const check_declaration *declared, qe_error *error_out);
/* "byte 12 of model.norm (moment1)". */
void qe_check_name(const qe_device *device, const check_region *region, uint64_t byte, char *text_out, size_t bytes);

/* judge.c: runs it, and fails when it touched what is not declared. */
qe_status qe_check_judge(const check_run *run, const check_declaration *declared, qe_error *error_out);

/* stream.c */
/* Waits only while the queue is full. */
void qe_check_put(qe_stream *stream, check_item item);
/* QE_OK, or why the device wraps nothing. */
qe_status qe_check_wrapped(const qe_device *device, qe_error *error_out);
/* Judges an op that is no transfer, once no unchecked graph runs. */
qe_status qe_check_op(qe_device *device, const qe_op *op, qe_error *error_out);
/* The first failure since the last sync is kept. */
void qe_check_note(qe_stream *stream, const qe_error *error);
extern const qe_stream_ops qe_check_streams;

/* graph.c */
qe_status qe_check_record_op(qe_stream *stream, const qe_op *op);
void qe_check_launch_now(qe_stream *stream, qe_graph *graph);
extern const qe_graph_ops qe_check_graphs;

#endif
