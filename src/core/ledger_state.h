/* ledger_state.h - the inside of the ledger, for the files of this room and its tests.
 *
 * Three layers, each with its own file:
 *   state  (ledger_check.c)   one small record per object; pure checks and their application
 *   order  (ledger_clock.c, ledger_access.c, ledger_range.c, ledger_graph.c)   vector clocks, who touched what when,
 *          byte ranges, what graphs recorded
 *   entry  (ledger_judge.c: full, effects together; ledger_trace.c: full, one effect after the other; ledger_issue.c:
 *          certified; ledger.c: steps)
 * The order layer is not kept up on the certified way. `order_valid` and `order_items` say how far it has been built
 * for this step; qe_ledger_order_build brings it up when a departure needs it. */
#ifndef QE_CORE_LEDGER_STATE_H
#define QE_CORE_LEDGER_STATE_H

#include "qeffect/ledger.h"

/* What is true of one object now. `word` packs the facts that are not counters, see the macros below: the certified
 * way compares and stores whole words. */
typedef struct qe_object_state {
    uint64_t counter; /* absolute epoch, generation, version, takes, offset; buffer: a bit per stream that pledged */
    uint64_t word;
    uint64_t key_version; /* cache: absolute; buffer: 1 while it is not allocated */
    uint64_t key_epoch;   /* cache: absolute; buffer: 1 + the item that allocated it, 0: there from the beginning */
} qe_object_state;

enum { QE_STATE_CELLS = 4 }; /* 64-bit cells of one state */

#define QE_LOW32 ((uint64_t)UINT32_MAX)
#define QE_SCALE_FOLDED ((uint64_t)1 << 32)  /* bits 0..31: records of this step */
#define QE_SCALE_PENDING ((uint64_t)1 << 33) /* recorded and not folded since */
#define QE_SLOT_LIVE ((uint64_t)1 << 63)     /* bits 0..31: microbatch, 32..47: stage */
#define QE_WEIGHT_COMMITTED ((uint64_t)1)
#define QE_CACHE_FILLED ((uint64_t)1 << 16)  /* bits 0..7: layouts, 8..15: recipe */
#define QE_CACHE_FRESH ((uint64_t)1 << 17)   /* filled in this step */
#define QE_GRAD_TAKEN ((uint64_t)1 << 32)    /* bits 0..31: deposits of this step */

/* Knowledge of each stream's submissions: at[t] of them are ordered before whoever holds the clock. */
typedef struct qe_clock {
    uint32_t at[QE_PROGRAM_STREAMS_MAX];
} qe_clock;

typedef struct qe_access {
    uint32_t clock; /* its number on its stream; 0: there is none */
    uint32_t item;  /* program item, or QE_NONE */
    uint32_t stream;
} qe_access;

/* Last write and the reads since, one per stream, of an object or of a byte range. */
typedef struct qe_touches {
    qe_access write;
    qe_access *reads; /* [stream_count] */
} qe_touches;

/* Bytes [begin, end) of a space that share one history. */
typedef struct qe_range {
    uint64_t begin, end;
    qe_access write;
    uint32_t writes; /* of the step `step`; see qe_range_writes */
    uint32_t step;
    uint32_t owner;  /* buffer that lies here now, where addresses are told; QE_NONE: none */
    uint8_t written; /* ever */
    uint8_t before;  /* a ledger: before this step */
    uint32_t next;   /* the range behind it; QE_NONE: it is the last one */
    uint32_t left, right; /* in the tree by `begin`; a heap by a hash of the number, so it is balanced as a rule */
} qe_range;

/* The ranges of one space, ascending and without holes: a chain through the pool, and a tree to search it. A space is a
 * buffer, or the buffers that share bytes; its list is that of its first buffer. Requires: bytes > 0, else the rest is
 * without meaning. */
typedef struct qe_range_list {
    uint32_t first, root; /* the first range stays the first: it begins at 0 */
    uint64_t bytes;
} qe_range_list;

/* Effects in the order of their recording. Their versions are told from what the counters would be by then: a launch
 * adds what they are. */
typedef struct qe_recorded {
    qe_effect *effects;
    uint32_t count, capacity;
    uint32_t copied; /* how many of them are of graphs that the recording launches */
} qe_recorded;

/* A limit that a program on its own ran into: a few lines must not take memory without end. */
typedef enum qe_excess {
    QE_EXCESS_GRAPH,  /* effects of one graph */
    QE_EXCESS_COPIES, /* effects of graphs within graphs */
    QE_EXCESS_ROWS    /* histories of bytes that rows split */
} qe_excess;

/* What a graph's launch does. */
typedef struct qe_graph_record {
    uint32_t object;
    qe_recorded sealed;
    qe_clock launched; /* launches of one graph follow each other by themselves */
} qe_graph_record;

/* Where a recording keeps the order of what it records: a list per space that it touches; an object that is no buffer
 * is a space of one byte. */
typedef struct qe_recorded_space {
    uint32_t recording, space; /* recording 0: free */
    qe_range_list list;
    uint64_t advanced; /* of an object's counter, by what is recorded */
} qe_recorded_space;

/* A draw of this step. */
typedef struct qe_draw {
    uint64_t offset, count;
    uint32_t microbatch;
} qe_draw;

/* One place of a gradient's order, or one deposit made where no order is known. */
typedef struct qe_contribution {
    uint32_t microbatch;
    uint32_t use;
} qe_contribution;

typedef struct qe_grad_order {
    uint32_t first, length; /* into contributions */
    uint8_t jumps;          /* microbatches do not ascend */
    uint8_t ordered;        /* contributions hold the declared order; else they are filled as deposits come */
} qe_grad_order;

/* cells[cell] is compared with, or becomes, cells[base] + delta. */
typedef struct qe_cell_op {
    uint32_t cell, base;
    uint64_t delta;
} qe_cell_op;

/* What the certified way does for one item: operations [first, first + compares) compare, then `stores` store. */
typedef struct qe_compiled {
    uint32_t first;
    uint16_t compares, stores;
} qe_compiled;

/* A submission after the departure. */
typedef struct qe_log_entry {
    qe_item item;
    uint32_t first_effect; /* into log_effects */
} qe_log_entry;

/* What a history ends with that is in neither the program nor the log. */
typedef enum qe_refused { QE_REFUSED_NONE, QE_REFUSED_ITEM, QE_REFUSED_END } qe_refused;

typedef enum qe_ledger_phase { QE_LEDGER_IDLE, QE_LEDGER_OPEN } qe_ledger_phase;

struct qe_ledger {
    const qe_program *program;
    uint32_t object_count, stream_count, event_count;
    qe_ledger_phase phase;
    uint8_t certified;
    uint8_t departed;       /* in this step: everything is judged */
    uint8_t observes;       /* what breaks a rule is told and kept; the step goes on */
    uint64_t observed;      /* submissions of this step that broke one and were kept */
    uint8_t foreign;        /* judges a program on its own: clocks run through steps, records are merged */
    uint32_t cursor;        /* next certified item */
    uint64_t certified_count, judged_count;

    uint64_t *cells;        /* zero state, then state, then begin: one block, so that cell numbers reach all */
    qe_object_state *state; /* [object_count] now */
    qe_object_state *begin; /* [object_count] at step_begin; versions count from its counters */

    uint32_t *touched;      /* objects that a step's end or the next begin must look at, see qe_state_touch */
    uint8_t *is_touched;    /* [object_count] */
    uint32_t touched_count;

    uint32_t *alias;        /* [object_count] buffer: a slot that shares bytes with it, or QE_NONE */
    uint32_t *weight_grad;  /* [object_count] weight: its first grad; grad: the next one of the same weight */
    qe_grad_order *orders;  /* [object_count] */
    qe_contribution *contributions;
    uint32_t contribution_count, contribution_capacity;

    qe_compiled *compiled;  /* [item_count] */
    qe_cell_op *cell_ops;
    uint32_t cell_op_count, cell_op_capacity;

    uint8_t order_valid;
    uint32_t order_items;   /* certified items of this step that the order layer has seen */
    uint32_t marked_items;  /* certified items whose writes are marked in the ranges, from earlier steps */
    uint32_t unmarked_items; /* the same, not yet marked */
    qe_clock stream_clock[QE_PROGRAM_STREAMS_MAX];
    qe_clock stream_before[QE_PROGRAM_STREAMS_MAX]; /* a recording stream's, from before it recorded */
    uint64_t partners[QE_PROGRAM_STREAMS_MAX]; /* bit per stream that is ordered with this one by itself */
    qe_access stream_last[QE_PROGRAM_STREAMS_MAX]; /* its last op */
    qe_clock host_clock[QE_RANKS_MAX];
    uint32_t *event_clocks; /* [event_count][stream_count] */
    uint8_t *event_recorded; /* [event_count] */
    uint32_t *event_item;    /* [event_count] program item of its last record, or QE_NONE */
    uint32_t *event_recording; /* [event_count] the recording its record is part of; 0: none */
    uint32_t stream_recording[QE_PROGRAM_STREAMS_MAX]; /* the one that the stream takes part in */
    uint32_t recordings;    /* begun so far: their numbers */
    uint32_t stream_origin[QE_PROGRAM_STREAMS_MAX]; /* the stream that the recording began on */
    qe_recorded records[QE_PROGRAM_STREAMS_MAX]; /* by origin: what the recording that goes on holds so far */
    uint32_t ended_recording; /* the one that ends with the op that is judged */
    uint64_t copied;        /* of all graphs and recordings */
    qe_excess excess;       /* behind QE_ERROR_LIMIT */
    uint32_t graph_count;
    qe_graph_record *graphs; /* [graph_count] ascending by object; only where a program is judged on its own */
    qe_recorded_space *recorded; /* [recorded_capacity] hash table of the recordings that go on */
    uint32_t recorded_capacity, recorded_count;
    qe_draw *draws;         /* places from orders[rng].first on */
    uint32_t draw_capacity;
    uint32_t *refused_at;   /* [object_count] 1 + the item that was refused on it last; only a program on its own */
    qe_access *writes;      /* [object_count] last write */
    qe_access *reads;       /* [object_count][stream_count] reads since */
    qe_range_list *ranges;  /* [object_count] of spaces */
    uint32_t *space;        /* [object_count] buffer: the first of those it shares bytes with, or itself */
    uint64_t *shift;        /* [object_count] buffer: where it begins in its space */
    qe_range *pool;
    qe_access *pool_reads;  /* [pool_capacity][stream_count] */
    uint32_t *pool_free;    /* [pool_capacity] stack of free indices */
    uint32_t pool_capacity, pool_free_count;
    uint32_t range_step;    /* number of the step that counts of writes belong to */

    qe_log_entry *log;
    qe_effect *log_effects;
    uint32_t log_count, log_capacity, log_effect_count, log_effect_capacity;
    uint64_t log_lost;      /* submissions that found the log full */
    uint8_t refused;        /* qe_refused: what was refused last in this step */
    qe_item refused_item;
    qe_effect refused_effects[QE_EFFECTS_MAX];
};

/* One submission while it is judged. */
typedef struct qe_judgement {
    qe_ledger *ledger;
    const qe_item *item;
    const qe_effect *effects;
    uint32_t count;
    uint32_t index;     /* program item, or QE_NONE */
    uint32_t bad;       /* bit per effect that breaks a rule */
    uint32_t unordered; /* bit per effect that breaks a rule of order */
    uint32_t reused;    /* bit per effect on memory whose earlier users were not awaited */
    uint32_t recording; /* that the item's stream takes part in; 0: it runs */
    int copies;         /* what is recorded comes from a graph that is launched within the recording */
    qe_clock clock;     /* what the item's stream knows when it runs */
    qe_violations *violations;
    uint32_t first_record; /* records of this submission begin here */
    uint32_t saved_count;
    uint32_t saved_object[QE_EFFECTS_MAX];
    qe_object_state saved[QE_EFFECTS_MAX]; /* states before the submission */
} qe_judgement;

/* One thing wrong with one effect. */
typedef struct qe_finding {
    qe_rule rule;
    uint64_t expected, found;
} qe_finding;
enum { QE_FINDINGS_MAX = 4 }; /* of one effect: a cache use can differ in version, epoch, recipe and layout */

/* ledger_life.c. `foreign`: the program is judged on its own. */
qe_status qe_ledger_open(const qe_program *program, int foreign, qe_ledger **ledger_out, qe_error *error_out);

/* ledger_check.c: the state layer. */
uint32_t qe_state_check(const qe_ledger *ledger, const qe_effect *effect, qe_finding *findings_out);
/* Of a buffer's effect: what is true of it whenever it happens. */
uint32_t qe_state_check_range(const qe_ledger *ledger, const qe_effect *effect, qe_finding *findings_out);
/* Room for what the effect leaves in a list: launches make more deposits and draws than a program has. */
qe_status qe_state_reserve(qe_ledger *ledger, const qe_effect *effect);
void qe_state_apply(qe_ledger *ledger, const qe_effect *effect);
/* Findings of one object at a step's end; returns their number. */
uint32_t qe_state_check_end(const qe_ledger *ledger, uint32_t object, qe_finding *findings_out);
/* Forgets what counts per step. */
void qe_state_begin_step(qe_ledger *ledger);
/* A trace may hold many objects and many steps, so each step visits only what was touched in it, gradients that are due
 * in every step, and slots that stay live. */
void qe_state_touch(qe_ledger *ledger, uint32_t object);

/* ledger_clock.c */
void qe_clock_merge(qe_clock *into, const qe_clock *from);
void qe_clock_reset(qe_ledger *ledger);
/* What the stream was given so far to run; what it records is not part of that. */
const qe_clock *qe_clock_given(const qe_ledger *ledger, uint32_t stream);
/* Clock of the stream's next submission, which inherits what the host knows. */
qe_clock qe_clock_next(const qe_ledger *ledger, uint32_t stream);
/* Record, wait and sync; sync.event is found before by qe_clock_check. */
int qe_clock_finds_unrecorded(const qe_ledger *ledger, const qe_item *item);
void qe_clock_apply(qe_ledger *ledger, const qe_item *item, uint32_t index);
/* A wait or sync that crosses the border of a recording, or an op of the legacy stream beside one: what is on its other
 * side, if that is known. */
int qe_clock_leaves_recording(const qe_ledger *ledger, const qe_item *item, qe_access *across_out);
/* Is the stream one that CUDA records: neither the host nor the legacy default stream? */
int qe_clock_can_record(const qe_ledger *ledger, uint32_t stream);
/* The effects of an op that begin or end a recording. */
void qe_clock_recordings(qe_ledger *ledger, uint32_t stream, const qe_effect *effect);
/* A stream whose recorded work the end of the recording on `stream` does not wait for, or the one that the recording
 * began on where that is another; QE_NONE. */
uint32_t qe_clock_unjoined(const qe_ledger *ledger, uint32_t stream, const qe_clock *clock);
/* An op runs: its clock becomes its stream's, and the host's where the host is the stream. */
void qe_clock_run(qe_ledger *ledger, uint32_t stream, const qe_clock *clock);

/* ledger_access.c: the order layer. */
void qe_access_check(qe_judgement *judgement, uint32_t effect_index);
void qe_access_apply(qe_ledger *ledger, const qe_judgement *judgement, uint32_t effect_index);
void qe_access_reset(qe_ledger *ledger);
/* Reports accesses of `touches` that conflict with the effect and are not ordered before it. */
void qe_access_judge(qe_judgement *judgement, uint32_t effect_index, const qe_touches *touches);
/* Brings the order layer up to the items that were issued in this step. */
void qe_ledger_order_build(qe_ledger *ledger);

/* ledger_range.c: byte ranges of buffers. */
qe_status qe_range_open(qe_ledger *ledger, qe_error *error_out);
void qe_range_close(qe_ledger *ledger);
void qe_range_check(qe_judgement *judgement, uint32_t effect_index);
/* Room for what `count` effects may split; `recording`: in the spaces of that recording. */
qe_status qe_range_reserve(qe_ledger *ledger, const qe_effect *effects, uint32_t count, uint32_t recording);
void qe_range_apply(qe_ledger *ledger, const qe_judgement *judgement, uint32_t effect_index);
/* A write that raced did happen: the bytes are written, but later work is judged against what was there before. */
void qe_range_apply_unordered(qe_ledger *ledger, const qe_judgement *judgement, uint32_t effect_index);
/* A list of one range, of memory that was there before. */
qe_status qe_range_list_open(qe_ledger *ledger, qe_range_list *list, uint64_t bytes);
void qe_range_list_close(qe_ledger *ledger, qe_range_list *list);
void qe_range_mark(qe_ledger *ledger, const qe_effect *effect);
void qe_range_begin_step(qe_ledger *ledger);
static inline uint32_t qe_range_writes(const qe_ledger *ledger, const qe_range *range) {
    return range->step == ledger->range_step ? range->writes : 0;
}
void qe_range_reset(qe_ledger *ledger);

/* ledger_space.c: which buffers share bytes, and what lies where at the beginning. */
qe_status qe_space_open(qe_ledger *ledger, qe_error *error_out);
void qe_space_close(qe_ledger *ledger);

/* ledger_graph.c: what runs only when a graph is launched. Only where a program is judged on its own. */
qe_status qe_graph_open(qe_ledger *ledger, qe_error *error_out);
void qe_graph_close(qe_ledger *ledger);
/* The list of a space in a recording; made by qe_range_reserve, so it is there. */
qe_range_list *qe_graph_list(const qe_ledger *ledger, uint32_t recording, uint32_t space);
qe_status qe_graph_reserve_list(qe_ledger *ledger, uint32_t recording, uint32_t space);
/* An effect of a recording, told from what the counters would be by then (qe_graph_relative), is kept. */
void qe_graph_relative(const qe_ledger *ledger, uint32_t recording, qe_effect *effect);
qe_status qe_graph_keep(qe_ledger *ledger, uint32_t stream, const qe_effect *effect, int copied);
/* The same effect as a launch on behalf of `microbatch` does it now. */
qe_effect qe_graph_launched(const qe_ledger *ledger, const qe_effect *recorded, uint32_t microbatch);
const qe_recorded *qe_graph_content(const qe_ledger *ledger, uint32_t graph);
/* Launches of an op wait for those before them; behind its effects recordings begin and end. */
void qe_graph_await(qe_judgement *judgement);
void qe_graph_finish(qe_judgement *judgement);

/* ledger_trace.c: the effects of an op, one after the other, in the world or in a recording. */
qe_status qe_trace_judge_effects(qe_judgement *judgement);

/* ledger_record.c: violations. */
void qe_judgement_report(qe_judgement *judgement, uint32_t effect_index, const qe_finding *finding,
                         const qe_access *other);

/* ledger_judge.c: one effect against the state of its object; returns whether it may be applied, and does so. */
int qe_judgement_state(qe_judgement *judgement, uint32_t effect_index);
/* ledger_judge.c: the full way. `keep` as traces do: what breaks a rule is left out, the rest is applied. */
qe_status qe_ledger_judge(qe_ledger *ledger, const qe_item *item, const qe_effect *effects, uint32_t index, int keep,
                          qe_violations *violations);
/* Judges the end of a step; `index` is its program item or QE_NONE. */
void qe_ledger_judge_end(qe_ledger *ledger, uint32_t index, qe_violations *violations);

/* ledger_compile.c: certified operations of one item, from the states before and after it in `judged`. */
qe_status qe_compile_begin(qe_ledger *ledger, qe_error *error_out);
qe_status qe_compile_item(qe_ledger *ledger, const qe_ledger *judged, uint32_t index, const qe_object_state *before,
                          qe_error *error_out);

/* Every truth of the ledger's phase, asserted; called on transitions in debug builds. */
void qe_ledger_assert_valid(const qe_ledger *ledger);
#ifdef QE_DEBUG
#define QE_LEDGER_VALID(ledger) qe_ledger_assert_valid(ledger)
#else
#define QE_LEDGER_VALID(ledger) ((void)sizeof(ledger))
#endif

/* Absolute version that an effect names, and whether it is there. */
static inline uint64_t qe_version_of(const qe_ledger *ledger, uint32_t object, uint64_t version) {
    return ledger->begin[object].counter + version;
}

/* Bytes of all that a refused submission must leave alone, for tests: writes up to `capacity`, returns the length. */
size_t qe_ledger_image(const qe_ledger *ledger, unsigned char *bytes_out, size_t capacity);

#endif
