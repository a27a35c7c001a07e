/* source.h - the rows of a schedule as the judges look at them: stored, or computed action by action from a formula.
 * Also who needs whose result: the only place that knows how stages follow each other. */
#ifndef QE_SCHEDULE_SOURCE_H
#define QE_SCHEDULE_SOURCE_H

#include "qeffect/schedule.h"

/* One action of a row, from the sizes alone. */
typedef qe_action (*qe_row_formula)(const qe_schedule_request *order, uint32_t rank, uint32_t index);

typedef struct qe_source {
    uint32_t ranks, stages, microbatches;
    uint64_t actions;
    const uint32_t *stage_rank;       /* [stages] */
    uint32_t reversed;                /* qe_schedule.reversed */
    int apart;                        /* pairs are not looked at: their halves run one behind the other */
    const qe_schedule *schedule;      /* stored rows, or NULL and: */
    qe_row_formula formula;
    const qe_schedule_request *order;
    uint32_t row_count;               /* the same for all ranks */
} qe_source;

qe_source qe_source_stored(const qe_schedule *schedule);
/* NULL where the name has no formula. */
qe_row_formula qe_source_formula(const char *name, uint32_t *actions_per_pair_out);

/* Does the microbatch run the other way, through weights of its own? */
static inline int qe_source_turned(const qe_source *source, uint32_t microbatch) {
    return source->reversed > 0 && microbatch >= source->microbatches - source->reversed;
}

/* The rank where a microbatch meets a stage. */
static inline uint32_t qe_source_rank(const qe_source *source, uint32_t stage, uint32_t microbatch) {
    return source->stage_rank[qe_source_turned(source, microbatch) ? source->stages - 1 - stage : stage];
}

static inline uint32_t qe_source_row_count(const qe_source *source, uint32_t rank) {
    if (source->schedule == NULL) return source->row_count;
    return source->schedule->rank_begin[rank + 1] - source->schedule->rank_begin[rank];
}

static inline qe_action qe_source_at(const qe_source *source, uint32_t rank, uint32_t index) {
    if (source->schedule == NULL) return source->formula(source->order, rank, index);
    return source->schedule->actions[source->schedule->rank_begin[rank] + index];
}

/* Actions of the unit that begins at an index with `first`: a pair is one. */
static inline uint8_t qe_source_unit_count(const qe_source *source, uint32_t rank, uint32_t index,
                                           const qe_action *first) {
    return first->paired && !source->apart && index + 1 < qe_source_row_count(source, rank) ? 2 : 1;
}

/* First index of the unit that holds an index. */
static inline uint32_t qe_source_unit_begin(const qe_source *source, uint32_t rank, uint32_t index) {
    if (source->schedule == NULL || source->apart || index == 0) return index;
    return qe_source_at(source, rank, index - 1).paired ? index - 1 : index;
}

/* What passes between stages: activations forward, gradients back. */
typedef enum qe_lane { QE_LANE_F, QE_LANE_B, QE_LANES } qe_lane;

/* Requires: the action is no W. */
static inline qe_lane qe_action_lane(const qe_action *action) {
    return action->kind == QE_ACTION_F ? QE_LANE_F : QE_LANE_B;
}

/* The stage whose result of the same microbatch and lane an action needs; QE_NONE: nobody's. */
static inline uint32_t qe_source_producer(const qe_source *source, const qe_action *action) {
    if (action->kind == QE_ACTION_W) return QE_NONE;
    if (action->kind == QE_ACTION_F) return action->stage == 0 ? QE_NONE : action->stage - 1U;
    return action->stage + 1U == source->stages ? QE_NONE : action->stage + 1U;
}

/* The stage that needs an action's result; QE_NONE: nobody. */
static inline uint32_t qe_source_consumer(const qe_source *source, const qe_action *action) {
    if (action->kind == QE_ACTION_W) return QE_NONE;
    if (action->kind != QE_ACTION_F) return action->stage == 0 ? QE_NONE : action->stage - 1U;
    return action->stage + 1U == source->stages ? QE_NONE : action->stage + 1U;
}

/* The ranks of them; QE_NONE. */
static inline uint32_t qe_source_from(const qe_source *source, const qe_action *action) {
    uint32_t producer = qe_source_producer(source, action);
    return producer == QE_NONE ? QE_NONE : qe_source_rank(source, producer, action->microbatch);
}

static inline uint32_t qe_source_to(const qe_source *source, const qe_action *action) {
    uint32_t consumer = qe_source_consumer(source, action);
    return consumer == QE_NONE ? QE_NONE : qe_source_rank(source, consumer, action->microbatch);
}

/* Does its input come from another rank? */
static inline int qe_source_receives(const qe_source *source, uint32_t rank, const qe_action *action) {
    uint32_t from = qe_source_from(source, action);
    return from != QE_NONE && from != rank;
}

qe_cited qe_source_cite(const qe_source *source, uint32_t rank, uint32_t index);

#endif
