/* rule.c - the table of rules: stable id and one sentence. docs/rules.md is checked against it by a test. */
#include "qeffect/rule.h"

#include <string.h>

#include "base/assert.h"

typedef struct rule_text {
    const char *id;
    const char *sentence;
} rule_text;

static const rule_text rules[] = {
    [QE_RULE_NONE] = {"none", "No rule is broken."},
    [QE_RULE_SCALE_EPOCH] = {"scale.epoch",
        "A scale is used, recorded into and folded at the epoch it was declared for."},
    [QE_RULE_SCALE_BUSY] = {"scale.busy",
        "A scale is folded only after every record due in this step is in."},
    [QE_RULE_SCALE_TWICE] = {"scale.twice", "A scale is folded at most once in a step."},
    [QE_RULE_SCALE_UNFOLDED] = {"scale.unfolded",
        "A scale that recorded an amax is folded before the step ends."},
    [QE_RULE_SCALE_LOST] = {"scale.lost",
        "A scale that recorded at all has every record due when the step ends."},
    [QE_RULE_SLOT_STALE] = {"slot.stale", "A slot is named only by the handle of its current generation."},
    [QE_RULE_SLOT_LIVE] = {"slot.live", "A slot is acquired only when no other generation is live in it."},
    [QE_RULE_SLOT_EMPTY] = {"slot.empty", "Only a slot that retains something is borrowed or released."},
    [QE_RULE_SLOT_TWICE] = {"slot.twice", "A handle is released once."},
    [QE_RULE_SLOT_OWNER] = {"slot.owner", "A slot is used for the stage and microbatch that acquired it."},
    [QE_RULE_SLOT_LEAK] = {"slot.leak", "Every slot is free when the step ends."},
    [QE_RULE_WEIGHT_VERSION] = {"weight.version",
        "A weight is read and committed at the version it was declared for."},
    [QE_RULE_WEIGHT_TWICE] = {"weight.twice", "A weight is committed at most once in a step."},
    [QE_RULE_WEIGHT_UNTAKEN] = {"weight.untaken",
        "A weight is committed only after its gradient was taken in this step."},
    [QE_RULE_CACHE_EMPTY] = {"cache.empty", "A cached weight is used only after it was filled."},
    [QE_RULE_CACHE_STALE] = {"cache.stale",
        "A cached weight is used only while it was made from the current version."},
    [QE_RULE_CACHE_SCALE] = {"cache.scale", "A cached weight is used with the scale epoch it was made at."},
    [QE_RULE_CACHE_RECIPE] = {"cache.recipe", "A cached weight is used for the recipe it was made for."},
    [QE_RULE_CACHE_LAYOUT] = {"cache.layout",
        "Only layouts that were filled under the current key are used."},
    [QE_RULE_GRAD_TWICE] = {"grad.twice", "The contribution of one microbatch and use is deposited once."},
    [QE_RULE_GRAD_ORDER] = {"grad.order", "Contributions are deposited in their declared order."},
    [QE_RULE_GRAD_SET] = {"grad.set", "The first deposit of a step sets the gradient; later ones add."},
    [QE_RULE_GRAD_TAKEN] = {"grad.taken",
        "After its gradient was taken, nothing is deposited or taken in this step."},
    [QE_RULE_GRAD_MISSING] = {"grad.missing", "A gradient is taken, in every step, with every deposit due."},
    [QE_RULE_BUFFER_BOUNDS] = {"buffer.bounds", "A byte range lies inside its buffer."},
    [QE_RULE_BUFFER_UNWRITTEN] = {"buffer.unwritten", "Only bytes that were written are read."},
    [QE_RULE_BUFFER_VERSION] = {"buffer.version",
        "A read finds the write of this step that it was declared for."},
    [QE_RULE_SYNC_ENTER] = {"sync.enter", "Work waits for the caller's earlier work on what it touches."},
    [QE_RULE_SYNC_EXIT] = {"sync.exit", "The caller waits for earlier work on what it touches."},
    [QE_RULE_SYNC_SIDE] = {"sync.side", "Conflicting ops on two streams are ordered by an event."},
    [QE_RULE_SYNC_HOST] = {"sync.host",
        "The host and a stream touch the same thing only in an order that a sync makes."},
    [QE_RULE_SYNC_EVENT] = {"sync.event", "Only an event that was recorded is waited for."},
    [QE_RULE_SYNC_CAPTURE] = {"sync.capture", "A recording waits only for what is recorded with it."},
    [QE_RULE_GRAPH_UNJOINED] = {"graph.unjoined", "A recording ends only after every stream in it was joined."},
    [QE_RULE_GRAPH_EMPTY] = {"graph.empty", "Only a graph that was captured is launched."},
    [QE_RULE_GRAPH_STALE] = {"graph.stale", "A graph is captured and launched by its current seal."},
    [QE_RULE_GRAPH_MODE] = {"graph.mode", "A graph is replayed only in the mode it was captured for."},
    [QE_RULE_GRAPH_ADDRESS] = {"graph.address", "A graph is replayed only while everything is where it was captured."},
    [QE_RULE_GRAPH_CONSTANT] = {"graph.constant",
        "A graph is replayed only with the shapes and host constants it was captured with."},
    [QE_RULE_SLOT_ALIAS] = {"slot.alias", "A buffer shares no byte with a slot."},
    [QE_RULE_BUFFER_FREED] = {"buffer.freed", "A buffer is touched only between its allocation and its free."},
    [QE_RULE_BUFFER_LIVE] = {"buffer.live", "Memory is allocated only where nothing that is live lies."},
    [QE_RULE_SYNC_REUSE] = {"sync.reuse",
        "Memory that is handed out again is touched only after its earlier users."},
    [QE_RULE_RNG_FROZEN] = {"rng.frozen", "A draw begins where the draw before it ended."},
    [QE_RULE_RNG_SPLIT] = {"rng.split", "A recomputed draw is the one that its forward made."},
    [QE_RULE_SCHEDULE_PLACE] = {"schedule.place", "Every stage lives on exactly one rank and in range."},
    [QE_RULE_SCHEDULE_DUPLICATE] = {"schedule.duplicate", "Every action happens once."},
    [QE_RULE_SCHEDULE_MISSING] = {"schedule.missing", "Every action that is due happens."},
    [QE_RULE_SCHEDULE_ORDER] = {"schedule.order",
        "F, I and W of one stage and microbatch follow each other on its rank."},
    [QE_RULE_SCHEDULE_CYCLE] = {"schedule.cycle", "No actions wait for each other in a circle."},
    [QE_RULE_SCHEDULE_MEMORY] = {"schedule.memory", "A rank keeps no more at once than the limit allows."},
    [QE_RULE_STEP_NONFINITE] = {"step.nonfinite",
        "A step commits only with a finite loss and gradient norm."},
    [QE_RULE_CHECKPOINT_RUN] = {"checkpoint.run", "The files of a checkpoint are of the manifest's run."},
    [QE_RULE_CHECKPOINT_MIXED] = {"checkpoint.mixed", "The files of a checkpoint are of the manifest's step."},
    [QE_RULE_CHECKPOINT_MISSING] = {"checkpoint.missing",
        "Everything that outlives a step is in the checkpoint that a run goes on from."},
    [QE_RULE_CHECKPOINT_SHAPE] = {"checkpoint.shape",
        "Every tensor of a checkpoint has the dtype and shape that the plan keeps."},
    [QE_RULE_CHECKPOINT_STATE] = {"checkpoint.state", "The state after a resume has the hash it was saved with."},
};
QE_STATIC_ASSERT(sizeof rules / sizeof rules[0] == QE_RULE_COUNT, "every rule has its id and sentence");

const char *qe_rule_id(qe_rule rule) {
    QE_ASSERT((unsigned)rule < QE_RULE_COUNT);
    return rules[rule].id;
}

qe_rule qe_rule_from_id(const char *id) {
    QE_ASSERT(id != NULL);
    for (int rule = QE_RULE_NONE + 1; rule < QE_RULE_COUNT; rule++)
        if (strcmp(rules[rule].id, id) == 0) return (qe_rule)rule;
    return QE_RULE_NONE;
}

const char *qe_rule_sentence(qe_rule rule) {
    QE_ASSERT((unsigned)rule < QE_RULE_COUNT);
    return rules[rule].sentence;
}
