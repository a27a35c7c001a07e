/* build.h - inside of the plan room: one rank's plan while it is being made. */
#ifndef QE_PLAN_BUILD_H
#define QE_PLAN_BUILD_H

#include "qeffect/plan.h"

/* A message on a directed edge, in the sender's order. */
typedef struct qe_message {
    uint16_t stage; /* of the producer */
    uint32_t microbatch;
} qe_message;

/* One direction of traffic into or out of a rank. */
typedef struct qe_edge {
    uint32_t peer;
    uint8_t backward; /* lane: 0 activations, 1 gradients */
    uint8_t outgoing;
    uint32_t stream; /* program stream */
    qe_message *messages; /* incoming only: what the peer sends, in its order */
    uint32_t message_count, posted;
} qe_edge;

/* An op item before edges are known. */
typedef struct qe_draft {
    qe_item item;
    uint32_t unit, op;
    uint32_t first_effect, effect_count;
    uint32_t event; /* recorded right behind it; QE_NONE: none */
    uint32_t first_wait, wait_count;
} qe_draft;

/* Which slots may lie in memory that another pool's slot has left. */
typedef enum qe_sharing { QE_SHARING_NONE, QE_SHARING_KIND, QE_SHARING_ALL, QE_SHARINGS } qe_sharing;

/* A region while slots are handed out in program order. */
typedef struct qe_region_state {
    uint32_t generation; /* the last one */
    uint8_t live;
    uint8_t deferred; /* free one release later, so that a send overlaps the next result */
} qe_region_state;

/* One pool while slots are handed out in program order. */
typedef struct qe_pool_state {
    uint32_t *slot_of; /* [microbatches] slot index of a live microbatch */
    uint32_t deferred; /* outgoing pools: the region that was released last; QE_NONE */
} qe_pool_state;

typedef struct qe_build {
    const qe_plan *plan;
    const qe_schedule *schedule;
    uint32_t rank;
    qe_rank_plan *out;
    qe_pool_state *pool_states; /* parallel to out->pools */
    qe_region_state *region_states; /* parallel to out->regions */
    uint32_t region_state_capacity;
    qe_sharing sharing;
    uint64_t live_bytes; /* of slots I, X and Y now */
    qe_edge edges[QE_STREAMS_MAX];
    uint32_t edge_count;
    qe_draft *drafts;
    uint32_t draft_count, draft_capacity;
    qe_effect *effects;
    uint32_t effect_count, effect_capacity;
    uint32_t *waits; /* events, by draft */
    uint32_t wait_count, wait_capacity;
    uint8_t *filled; /* [stages] weight caches filled this step */
    uint8_t *deposited; /* [stages * 2] by I, by W */
    uint32_t current_unit;
    uint8_t *tallied; /* [words] deposits of the unit that is being lowered */
    int unbounded_sends; /* every message has a slot of its own */
    int shares_boundary; /* slots of transfers may lie where those of the rank's other stages lay */
    uint32_t take_begin, commit_begin, exit_begin; /* draft indices */
    qe_error *error;
} qe_build;

/* plan_objects.c */
qe_status qe_build_objects(qe_build *build);
/* plan_units.c: all units of the step in program order, as drafts */
qe_status qe_build_units(qe_build *build);
/* plan_slots.c */
qe_status qe_build_pools(qe_build *build);
qe_status qe_build_acquire(qe_build *build, qe_unit *unit, qe_slot_kind kind);
void qe_build_attach(qe_build *build, qe_unit *unit, qe_slot_kind kind);
void qe_build_release(qe_build *build, const qe_unit *unit, qe_slot_kind kind);
void qe_build_pools_deinit(qe_build *build);
/* Adds a slot effect of the unit to a draft's effects. */
qe_status qe_build_slot_effect(qe_build *build, const qe_unit *unit, qe_slot_kind kind, qe_effect_kind effect_kind,
                               int write, qe_effect *effect_out);
/* plan_edges.c */
qe_status qe_build_edges(qe_build *build);
void qe_build_edges_deinit(qe_build *build);
qe_edge *qe_build_edge(qe_build *build, uint32_t peer, int backward, int outgoing);
/* plan_sync.c: finds the edges that conflicts need and writes the program */
qe_status qe_build_program(qe_build *build);
/* plan_deadlock.c: QE_OK, or QE_CONTRACT when the streams of all ranks cannot all finish */
qe_status qe_plan_deadlock_check(const qe_plan *plan, qe_error *error_out);

/* plan_units.c: draft of one op; effects are copied. */
qe_status qe_build_draft(qe_build *build, const char *label, const qe_effect *effects, uint32_t count);

/* Grows an array to hold one more; 0 on success. */
int qe_build_grow(void **array, uint32_t count, uint32_t *capacity, size_t element_bytes);

#endif
