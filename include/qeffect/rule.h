/* rule.h - the rules of the contract, and the record of one breach. Text is made at the edge; ids are never reused.
 * docs/rules.md lists every rule: one sentence, where it is checked, its test. */
#ifndef QEFFECT_RULE_H
#define QEFFECT_RULE_H

#include <stdint.h>
#include "qeffect/limits.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The order here is the order of docs/rules.md: where one submission breaks several rules, the first is the verdict. */
typedef enum qe_rule {
    QE_RULE_NONE = 0,
    QE_RULE_SCALE_EPOCH,     /* scale.epoch: use or record declared for epoch a, the scale is at epoch b */
    QE_RULE_SCALE_BUSY,      /* scale.busy: fold while records of this epoch are still due */
    QE_RULE_SCALE_TWICE,     /* scale.twice: second fold in one step */
    QE_RULE_SCALE_UNFOLDED,  /* scale.unfolded: step ends with a recorded amax and no fold */
    QE_RULE_SCALE_LOST,      /* scale.lost: step ends with fewer records than due */
    QE_RULE_SLOT_STALE,      /* slot.stale: handle of generation a, the slot is at b */
    QE_RULE_SLOT_LIVE,       /* slot.live: acquire while another generation is live */
    QE_RULE_SLOT_EMPTY,      /* slot.empty: borrow or release of a slot that retains nothing */
    QE_RULE_SLOT_TWICE,      /* slot.twice: handle released twice */
    QE_RULE_SLOT_OWNER,      /* slot.owner: handle of another stage or microbatch */
    QE_RULE_SLOT_LEAK,       /* slot.leak: step ends with live slots */
    QE_RULE_WEIGHT_VERSION,  /* weight.version: read declared for version a, the weight is at b */
    QE_RULE_WEIGHT_TWICE,    /* weight.twice: second commit in one step */
    QE_RULE_WEIGHT_UNTAKEN,  /* weight.untaken: commit without its gradient taken in this step */
    QE_RULE_CACHE_EMPTY,     /* cache.empty: use before the first fill */
    QE_RULE_CACHE_STALE,     /* cache.stale: made from version a, the weight is at b */
    QE_RULE_CACHE_SCALE,     /* cache.scale: made at scale epoch a, used as epoch b */
    QE_RULE_CACHE_RECIPE,    /* cache.recipe: made for another recipe */
    QE_RULE_CACHE_LAYOUT,    /* cache.layout: this layout was not filled with the others */
    QE_RULE_GRAD_TWICE,      /* grad.twice: the contribution of (microbatch, use) is in already */
    QE_RULE_GRAD_ORDER,      /* grad.order: contribution out of the declared order */
    QE_RULE_GRAD_SET,        /* grad.set: a later deposit sets, or the first one adds */
    QE_RULE_GRAD_TAKEN,      /* grad.taken: deposit or take after the take of this step */
    QE_RULE_GRAD_MISSING,    /* grad.missing: taken, or step ended, with n of m deposits */
    QE_RULE_BUFFER_BOUNDS,   /* buffer.bounds: range outside the buffer */
    QE_RULE_BUFFER_UNWRITTEN, /* buffer.unwritten: read of bytes that nothing wrote */
    QE_RULE_BUFFER_VERSION,  /* buffer.version: read declared for write k of the step, found write j */
    QE_RULE_SYNC_ENTER,      /* sync.enter: conflicts with the caller's earlier work, no edge into this op */
    QE_RULE_SYNC_EXIT,       /* sync.exit: the caller conflicts with earlier work, no edge out of it */
    QE_RULE_SYNC_SIDE,       /* sync.side: conflicting ops on two streams, no edge between them */
    QE_RULE_SYNC_HOST,       /* sync.host: the host touches what a stream still uses, or the other way round */
    QE_RULE_SYNC_EVENT,      /* sync.event: wait on an event that was never recorded */
    QE_RULE_SYNC_CAPTURE,    /* sync.capture: a recording waits for what is outside it, or the other way round */
    QE_RULE_GRAPH_UNJOINED,  /* graph.unjoined: a recording ends before a stream in it was joined */
    QE_RULE_GRAPH_EMPTY,     /* graph.empty: launched before its first capture */
    QE_RULE_GRAPH_STALE,     /* graph.stale: launched by seal a, it was captured again and is at b */
    QE_RULE_GRAPH_MODE,      /* graph.mode: captured for mode a, launched for mode b */
    QE_RULE_GRAPH_ADDRESS,   /* graph.address: a graph holds address a, the tensor is at b now */
    QE_RULE_GRAPH_CONSTANT,  /* graph.constant: a shape, host constant or algorithm was frozen as a and is b now */
    QE_RULE_SLOT_ALIAS,      /* slot.alias: a buffer's bytes are bytes of a slot */
    QE_RULE_BUFFER_FREED,    /* buffer.freed: touched before its allocation or after its free */
    QE_RULE_BUFFER_LIVE,     /* buffer.live: allocated where it, or another buffer, is live */
    QE_RULE_SYNC_REUSE,      /* sync.reuse: memory that was handed out again, its earlier users not awaited */
    QE_RULE_RNG_FROZEN,      /* rng.frozen: numbers drawn again, or left out */
    QE_RULE_RNG_SPLIT,       /* rng.split: a recompute draws other numbers than its forward */
    QE_RULE_SCHEDULE_PLACE,  /* schedule.place: a stage on two ranks, on none, or out of range */
    QE_RULE_SCHEDULE_DUPLICATE, /* schedule.duplicate: an action twice */
    QE_RULE_SCHEDULE_MISSING, /* schedule.missing: an action that is due is absent */
    QE_RULE_SCHEDULE_ORDER,  /* schedule.order: F, I, W of one (stage, microbatch) out of order on its rank */
    QE_RULE_SCHEDULE_CYCLE,  /* schedule.cycle: actions wait for each other */
    QE_RULE_SCHEDULE_MEMORY, /* schedule.memory: a rank keeps more microbatches at once than the limit */
    QE_RULE_STEP_NONFINITE,  /* step.nonfinite: loss or gradient norm is not finite */
    QE_RULE_CHECKPOINT_RUN,  /* checkpoint.run: a manifest beside files of another run */
    QE_RULE_CHECKPOINT_MIXED, /* checkpoint.mixed: files of different steps */
    QE_RULE_CHECKPOINT_MISSING, /* checkpoint.missing: something that the plan keeps is in no file */
    QE_RULE_CHECKPOINT_SHAPE, /* checkpoint.shape: a tensor of another dtype or shape than the plan keeps */
    QE_RULE_CHECKPOINT_STATE, /* checkpoint.state: what was restored is not what was saved */
    QE_RULE_COUNT
} qe_rule;

/* "scale.epoch" ...; from_id returns QE_RULE_NONE for an unknown id. */
const char *qe_rule_id(qe_rule rule);
qe_rule qe_rule_from_id(const char *id);
/* One sentence of docs/rules.md. */
const char *qe_rule_sentence(qe_rule rule);

/* Facts of one breach. Indices refer to the program that was judged; QE_NONE where a field does not apply. */
typedef struct qe_violation {
    qe_rule rule;
    uint32_t item;        /* the offending submission: program item index, or QE_NONE (e.g. at step end) */
    uint32_t other_item;  /* the other op of a conflict, or the one that made the state */
    uint32_t object;
    uint32_t stream;
    uint16_t stage;
    uint32_t microbatch;
    uint64_t expected, found; /* versions, generations, counts, as the rule's sentence names them */
    uint32_t count;       /* how often it happened; repeated ones are recorded once */
} qe_violation;

/* Caller's memory. `total` counts all, `record` keeps the first QE_VIOLATIONS_MAX. */
typedef struct qe_violations {
    uint32_t count;       /* records kept */
    uint32_t total;
    qe_violation record[QE_VIOLATIONS_MAX];
} qe_violations;

#ifdef __cplusplus
}
#endif
#endif
