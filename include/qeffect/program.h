/* program.h - the one representation of submitted work: objects, items on streams, and the effects of each op.
 *
 * A plan lowers a schedule into one program per rank; a trace file is a program as text (trace.h); the ledger
 * (ledger.h) judges programs and live submissions by the same rules. An op is one unit of submitted work. It declares
 * its effects on objects, with the version of each object that it was built for.
 *
 * Versions count from the state at the beginning of the program (`qe_object.counter`), modulo 2^64: a handle that is
 * older than the program has a version near 2^64. A plan's program has counters of 0 and is submitted again every
 * step; the ledger adds the counters it finds at the step's beginning. */
#ifndef QEFFECT_PROGRAM_H
#define QEFFECT_PROGRAM_H

#include <stdint.h>
#include "qeffect/limits.h"
#include "qeffect/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum qe_object_kind {
    QE_OBJECT_SCALE,  /* counter: epoch, +1 at each fold */
    QE_OBJECT_SLOT,   /* counter: generation, +1 at each acquire */
    QE_OBJECT_WEIGHT, /* counter: version, +1 at each commit, load or rollback */
    QE_OBJECT_CACHE,  /* key: (weight version, scale epoch, recipe) */
    QE_OBJECT_GRAD,   /* counter: takes; deposits made of deposits due this step */
    QE_OBJECT_BUFFER, /* bytes, by range */
    QE_OBJECT_GRAPH,  /* captured program; counter: its seal, how often it was captured */
    QE_OBJECT_RNG,    /* counter-based generator; counter: offset of the next number */
    QE_OBJECT_KINDS
} qe_object_kind;

/* `counter` of a buffer. */
typedef enum qe_buffer_begin {
    QE_BUFFER_UNWRITTEN, /* nothing has written it yet */
    QE_BUFFER_WRITTEN,   /* all of it was written before */
    QE_BUFFER_ABSENT     /* it is not allocated */
} qe_buffer_begin;

typedef struct qe_object {
    char name[QE_NAME_BYTES];
    qe_object_kind kind;
    uint64_t counter; /* epoch, generation, version or takes at the beginning of the program;
                         buffer: qe_buffer_begin */
    uint32_t due;     /* grad: deposits due per step; scale: records due per step (0: not checked) */
    uint32_t weight;  /* cache, grad: object index of its weight; grad: QE_NONE where it has none */
    uint32_t scale;   /* cache: object index of the scale it is made with, or QE_NONE */
    uint64_t bytes;   /* buffer: its size; slot: its size where an address is told; others 0 */
    uint64_t key_version, key_epoch; /* cache: absolute key that it holds at the beginning of the program */
    uint8_t layouts, recipe;         /* cache: layouts and recipe that it holds then; layouts 0: it is empty */
    uint64_t address; /* buffer, slot: where its `bytes` lie; 0: not told. Buffers share the bytes they overlap in */
} qe_object;

/* One place in the declared order of a gradient's deposits. */
typedef struct qe_deposit {
    uint32_t object; /* grad */
    uint32_t microbatch;
    uint16_t use;
} qe_deposit;

typedef enum qe_stream_role {
    QE_STREAM_COMPUTE,
    QE_STREAM_COMM,
    QE_STREAM_CALLER, /* the caller's own stream: missing edges with it are sync.enter and sync.exit */
    QE_STREAM_HOST    /* the host thread as a place where accesses happen */
} qe_stream_role;

/* CUDA's rules of the default stream; they order work without an event. */
typedef enum qe_stream_order {
    QE_STREAM_SEPARATE, /* ordered with other streams by events and syncs alone */
    QE_STREAM_BLOCKING, /* ordered with the legacy default stream of its rank, both ways */
    QE_STREAM_LEGACY    /* the legacy default stream: waits for, and is awaited by, all blocking streams of its rank */
} qe_stream_order;

typedef struct qe_stream_info {
    char name[QE_NAME_BYTES];
    qe_stream_role role;
    uint8_t order; /* qe_stream_order; only judged in a trace */
    uint16_t rank; /* whose host submits to it; below QE_RANKS_MAX; only judged in a trace */
} qe_stream_info;

typedef enum qe_effect_kind {
    QE_EFFECT_SCALE_USE,    /* reads the scale of epoch `version` */
    QE_EFFECT_SCALE_RECORD, /* adds an amax to epoch `version`; commutes with uses and records */
    QE_EFFECT_SCALE_FOLD,   /* epoch `version` -> `version` + 1 */
    QE_EFFECT_SLOT_ACQUIRE, /* generation becomes `version`; owner is (stage, microbatch) */
    QE_EFFECT_SLOT_BORROW,  /* reads, or writes if `write`, what generation `version` retains */
    QE_EFFECT_SLOT_RELEASE, /* ends generation `version` */
    QE_EFFECT_WEIGHT_READ,  /* reads the master at `version` */
    QE_EFFECT_WEIGHT_COMMIT, /* `version` -> `version` + 1 */
    QE_EFFECT_CACHE_FILL,   /* the key becomes (version, epoch, recipe); `layouts` are written */
    QE_EFFECT_CACHE_USE,    /* reads `layouts` made for (version, epoch, recipe) */
    QE_EFFECT_GRAD_DEPOSIT, /* places the contribution of (microbatch, use); `write`: sets, else adds */
    QE_EFFECT_GRAD_TAKE,    /* the optimizer takes the gradient; every due deposit must be in */
    QE_EFFECT_BUFFER_READ,  /* bytes [begin, end) */
    QE_EFFECT_BUFFER_WRITE, /* bytes [begin, end) */
    QE_EFFECT_GRAPH_BEGIN,  /* the op's stream records the graph from here on, instead of running */
    QE_EFFECT_GRAPH_CAPTURE, /* the recording, or what was handed over whole, becomes seal `version` */
    QE_EFFECT_GRAPH_LAUNCH, /* replays seal `version`; `use`: one thing that was frozen (`begin`), and now (`end`) */
    /* The rest are judged only where a program is judged on its own (a trace). Memory: */
    QE_EFFECT_BUFFER_ALLOC,  /* it is there from here on, in the order of the stream; nothing has written it */
    QE_EFFECT_BUFFER_FREE,   /* it is gone from here on, in the order of the stream */
    QE_EFFECT_BUFFER_TAKE,   /* handed out by an allocator of the host: has no place in the order of a stream */
    QE_EFFECT_BUFFER_DROP,   /* given back to it: who gets the bytes next must come after their users */
    QE_EFFECT_BUFFER_PLEDGE, /* at its drop the allocator waits for what this stream was given (record_stream) */
    QE_EFFECT_RNG_DRAW,      /* numbers [`version`, `version` + `end`); `write`: again, as its forward drew them */
    QE_EFFECT_KINDS
} qe_effect_kind;

/* What a graph froze, and a launch compares with what is there now. */
typedef enum qe_frozen {
    QE_FROZEN_NOTHING,  /* the launch tells of no difference */
    QE_FROZEN_MODE,     /* number of a mode: training, evaluation, a schedule, a count of microbatches */
    QE_FROZEN_ADDRESS,  /* where something lies */
    QE_FROZEN_CONSTANT, /* bits of a shape, a host constant, an algorithm */
    QE_FROZEN_KINDS
} qe_frozen;

/* One declared effect. Fields a kind does not use are 0. */
typedef struct qe_effect {
    uint32_t object;     /* index into qe_program.objects */
    uint8_t kind;        /* qe_effect_kind */
    uint8_t write;       /* borrow: writes; deposit: sets */
    uint8_t layouts;     /* cache: bit set of layouts */
    uint8_t recipe;      /* cache: qe_recipe_kind the bytes are made for */
    uint16_t stage;      /* slot: owner's stage */
    uint16_t use;        /* grad: which use of the weight in the microbatch, for weights used more than once;
                            graph launch: qe_frozen */
    union {
        uint32_t microbatch; /* slot: owner's microbatch; grad: whose contribution; draw: for whom */
        uint32_t rows;       /* buffer read or write: [begin, end) so many times, `pitch` apart; 0: once */
    };
    uint64_t version;    /* epoch, generation or version, from the beginning of the program; cache: weight version;
                            buffer read: which write of this step it expects (1 is the first; 0: any) */
    union {
        uint64_t epoch;      /* cache: scale epoch, from the beginning of the program */
        uint64_t pitch;      /* buffer read or write with rows: bytes from one's begin to the next one's */
    };
    uint64_t begin, end; /* buffer: byte range; graph launch: what it was captured with, and what is there now */
} qe_effect;

typedef enum qe_item_kind {
    QE_ITEM_OP,
    QE_ITEM_RECORD,      /* event `event` marks what stream has been given so far */
    QE_ITEM_WAIT,        /* stream's later work waits for the last record of `event` */
    QE_ITEM_SYNC_EVENT,  /* the host waits for the last record of `event` */
    QE_ITEM_SYNC_STREAM, /* the host waits for `stream` */
    QE_ITEM_SYNC_DEVICE, /* the host waits for all streams */
    QE_ITEM_STEP_BEGIN,
    QE_ITEM_STEP_END,    /* every slot free, every recorded scale folded, every grad taken */
    QE_ITEM_DESTROY,     /* event `event` is destroyed: it has no record until it is recorded again */
    QE_ITEM_KINDS
} qe_item_kind;

/* One submission, in the order in which the host makes them. */
typedef struct qe_item {
    uint8_t kind;        /* qe_item_kind */
    uint8_t effect_count;
    uint16_t stage;
    uint32_t microbatch; /* QE_NONE where it belongs to none */
    uint32_t stream;     /* index into qe_program.streams */
    uint32_t event;      /* record, wait, sync_event: event index */
    uint32_t first_effect; /* index into qe_program.effects */
    uint32_t label;      /* op: index into qe_program.labels */
    uint32_t line;       /* trace: 1-based line; plan: 0 */
    uint16_t rank;       /* sync_event, sync_device: whose host waits */
    uint16_t reserved;
} qe_item;

enum {
    QE_LABELS_MAX = 65536,     /* names of ops: a plan has some dozens */
    QE_ROWS_MAX = 4096,        /* of a strided range: a trace line must not cost more than a few ms */
    QE_GRAPH_EFFECTS_MAX = 1 << 20, /* of one graph: ten times the largest known; graphs in graphs grow by doubling */
    QE_GRAPH_COPIES_MAX = 1 << 18,  /* that graphs hold of graphs they launch; one more for each effect of a trace */
    QE_ROWS_MIB_MAX = 64,           /* histories of bytes that rows split in a trace: so much, and */
    QE_ROWS_EFFECT_KIB_MAX = 64,    /* so much more for each of its effects */
    QE_PROGRAM_MAX = 1u << 27, /* objects, items, effects or events of one program: indices stay far from QE_NONE */
};

typedef struct qe_label {
    char text[QE_NAME_BYTES]; /* "norm_quantize" ...: what the op is, for people */
} qe_label;

/* Growable arrays; all owned by the program. */
typedef struct qe_program {
    qe_object *objects;
    qe_stream_info *streams;
    qe_label *labels;
    qe_item *items;
    qe_effect *effects;
    qe_deposit *deposits; /* orders of gradients, where declared: see qe_program_add_deposit */
    uint32_t object_count, stream_count, label_count, item_count, effect_count, deposit_count, event_count;
    uint32_t object_capacity, stream_capacity, label_capacity, item_capacity, effect_capacity, deposit_capacity;
} qe_program;

/* Pair: init/deinit on the caller's struct. deinit of a zeroed struct is a no-op. Thread: one. */
void qe_program_init(qe_program *program);
void qe_program_deinit(qe_program *program);

/* Requires: copy_out is initialised and empty. On failure: QE_ERROR_MEMORY, and it still is. */
qe_status qe_program_copy(const qe_program *program, qe_program *copy_out, qe_error *error_out);

/* Add one thing; *_out is its index (may be NULL). References to other things must exist already, so that every
 * program is well formed. On failure (QE_ERROR_MEMORY, QE_ERROR_LIMIT, QE_ERROR_ARGUMENT) the program is unchanged. */
qe_status qe_program_add_object(qe_program *program, const qe_object *object, uint32_t *index_out,
                                qe_error *error_out);
qe_status qe_program_add_stream(qe_program *program, const char *name, qe_stream_role role, uint32_t *index_out,
                                qe_error *error_out);
/* Reuses an equal label. */
qe_status qe_program_add_label(qe_program *program, const char *text, uint32_t *index_out,
                               qe_error *error_out);
/* Copies `count` effects behind the last and sets item's first_effect and effect_count. */
qe_status qe_program_add_item(qe_program *program, const qe_item *item, const qe_effect *effects, uint32_t count,
                              uint32_t *index_out, qe_error *error_out);
/* Appends to the declared order of a gradient's deposits. A gradient with no declared order has that of the program's
 * own deposits in a ledger, and ascending microbatches where a program is judged on its own (a trace). */
qe_status qe_program_add_deposit(qe_program *program, const qe_deposit *deposit, qe_error *error_out);
/* A new event; it has no record yet. */
uint32_t qe_program_add_event(qe_program *program);

/* Do two effects on one object conflict: unless both only read, or both only record (a use and a record commute too)?
 * Buffer effects conflict only where their ranges meet (of a range with rows: from its first byte to its last); what
 * the host's allocator does conflicts with nothing. Deposits conflict with each other: their order is the bits. */
int qe_effect_conflicts(const qe_effect *a, const qe_effect *b);

/* "scale" ..., as traces write it; "unknown" for what is no kind. */
const char *qe_object_kind_name(qe_object_kind kind);
/* "scale.use" ..., as traces write it; "unknown" for what is no kind. */
const char *qe_effect_kind_name(qe_effect_kind kind);

#ifdef __cplusplus
}
#endif
#endif
