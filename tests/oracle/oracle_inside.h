/* oracle_inside.h - what the files of the oracle share. docs/oracle.md says how it thinks. */
#ifndef QE_TESTS_ORACLE_INSIDE_H
#define QE_TESTS_ORACLE_INSIDE_H

#include "oracle/oracle.h"

/* One effect that was accepted. */
typedef struct deed {
    qe_effect effect; /* versions absolute; in a recording, from what the counters then were */
    int item, stream, step;
    int recording; /* 0: it happened; else it is part of that recording and happens at launches */
    int unordered; /* it broke a rule of order: later effects of its op do not come after it */
    int takes_over; /* that earlier users of its bytes were not awaited is told: they are asked for no more */
    int hollow;    /* what its bytes are was not changed: it broke a rule of memory */
    int sealed;    /* graph.capture: the recording that the graph holds from here on; 0: nothing is told of it */
    int given[QE_PROGRAM_STREAMS_MAX]; /* buffer.drop: last item of each stream that pledged; -1: none */
} deed;

/* A byte: of an address space, or of a buffer that tells no address. Other objects are one byte each. */
typedef struct place {
    uint32_t space;
    uint64_t at;
} place;

static const uint32_t ADDRESSES = UINT32_MAX; /* of buffers that tell where they lie */

struct oracle {
    const qe_program *program;
    uint32_t items_max, count;
    uint8_t *before; /* [item][earlier item]: a path of edges leads from the earlier one to it */
    int *part_of;    /* [item] the recording that it is part of */
    deed *deeds;
    uint32_t deed_count, deeds_max;
    place *points; /* where ranges begin or end: between two of them all bytes are alike */
    uint32_t point_count, points_max;
    int step;                               /* borders of steps so far */
    int recording[QE_PROGRAM_STREAMS_MAX]; /* its number; 0: the stream runs what it is given */
    oracle_verdict verdict;
};

static inline const qe_object *object_of(const oracle *o, uint32_t object) { return &o->program->objects[object]; }
static inline const qe_item *item_of(const oracle *o, int item) { return &o->program->items[item]; }
static inline const qe_stream_info *stream_of(const oracle *o, int stream) { return &o->program->streams[stream]; }

static inline int begins_life(const qe_effect *e) {
    return e->kind == QE_EFFECT_BUFFER_ALLOC || e->kind == QE_EFFECT_BUFFER_TAKE;
}
static inline int ends_life(const qe_effect *e) {
    return e->kind == QE_EFFECT_BUFFER_FREE || e->kind == QE_EFFECT_BUFFER_DROP;
}
static inline int is_placed(const qe_object *b) { return b->address > 0 && b->bytes > 0; }

static inline uint32_t rows_of(const qe_effect *e) {
    int touches = e->kind == QE_EFFECT_BUFFER_READ || e->kind == QE_EFFECT_BUFFER_WRITE;
    return touches && e->rows > 1 ? e->rows : 1;
}

static inline uint8_t *row_of(const oracle *o, int item) { return &o->before[(size_t)item * o->items_max]; }
static inline int is_before(const oracle *o, int earlier, int item) { return earlier >= 0 && row_of(o, item)[earlier]; }

static inline int is_on_stream(const qe_item *item) {
    return item->kind == QE_ITEM_OP || item->kind == QE_ITEM_RECORD || item->kind == QE_ITEM_WAIT;
}

/* oracle_rules.c: what is wrong with the item that is judged. `refuses`: the effect did not happen. */
void oracle_note(oracle *o, int rule, uint32_t object, int refuses);
int oracle_is_refused(const oracle *o, uint32_t object);
/* oracle_rules.c: a program's versions count from its objects' first counters; a recording's from what the counters
 * would be when the effect happens; all others are absolute. */
uint64_t oracle_counter_in(const oracle *o, uint32_t object, int recording);
qe_effect oracle_absolute(const oracle *o, qe_effect e);
qe_effect oracle_recorded(const oracle *o, qe_effect e, int recording);
qe_effect oracle_launched(const oracle *o, qe_effect e, uint32_t microbatch);
/* oracle_rules.c: one effect against what happened before. */
void oracle_judge_state(oracle *o, const qe_effect *e);
void oracle_judge_range(oracle *o, const qe_effect *e);
int oracle_judge_byte(const oracle *o, const qe_effect *e, place p);
void oracle_judge_end(oracle *o);
int oracle_covers(const oracle *o, const qe_effect *e, place p);
int oracle_is_in_bounds(const qe_effect *e, uint64_t bytes);
int oracle_born(const oracle *o, uint32_t buffer);

/* oracle_order.c: edges and the paths they make. */
void oracle_add_edge(oracle *o, int from, int to);
void oracle_add_stream_edges(oracle *o, int item);
int oracle_last_on(const oracle *o, int stream, int item, int recording);
int oracle_last_of_host(const oracle *o, int rank, int item);
int oracle_record_of(const oracle *o, uint32_t event, int item);
int oracle_are_related(const oracle *o, int a, int b);
/* oracle_order.c: one byte of an effect against who touched it before. */
enum { RACED = 1, RACED_BEFORE = 2 };
int oracle_touches(const qe_effect *e);
int oracle_judge_order(oracle *o, const qe_effect *e, int item, int recording, place p);

#endif
