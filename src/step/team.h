/* team.h - inside of the step room: a rank's memory, its two bound plans, and the thread that drives it. */
#ifndef QE_STEP_TEAM_H
#define QE_STEP_TEAM_H

#include <pthread.h>
#include "qeffect/memory.h"
#include "qeffect/step.h"

/* One change to what a rank submits. Items are indices of the training program. None keeps a peer waiting for a
 * transfer: where an op that other ranks need is concerned, only what it declares is changed. */
typedef enum qe_edit_kind {
    QE_EDIT_NONE,
    QE_EDIT_SKIP, /* `item` is not submitted */
    QE_EDIT_REPEAT, /* `item` is submitted twice */
    QE_EDIT_EARLY, /* `item` is submitted before `at` instead of at its place */
    QE_EDIT_ALTER, /* `item` is submitted with effect `effect_index` replaced by `effect` */
    QE_EDIT_DROP, /* `item` is submitted without effect `effect_index` */
    QE_EDIT_FORGET, /* as drop, and no later effect on the same object is submitted */
    QE_EDIT_INSERT /* something that does `effect` on `stream` is submitted before `at` */
} qe_edit_kind;

typedef struct qe_edit {
    qe_edit_kind kind;
    uint32_t item, at, effect_index;
    uint32_t stream;
    qe_effect effect; /* drop, forget: the one that is left out */
} qe_edit;

typedef struct qe_segment qe_segment;
typedef struct qe_sealed_graph qe_sealed_graph;
typedef struct qe_guard_entry qe_guard_entry;

/* A plan bound to memory on one rank. */
typedef struct qe_binding {
    const qe_plan *plan; /* NULL: this team has no such plan */
    const qe_rank_plan *rank_plan;
    qe_weight_place *places; /* [weight_count] objects of this plan, addresses of the rank */
    char *slot_memory[QE_SLOT_KINDS]; /* the regions that were made for each kind */
    char **regions; /* [region_count] where each lies in it */
    char *work, *grad_scratch; /* grad_scratch: parallel to the rank's gradients */
    int32_t *tokens, *staging; /* device and host: [microbatches][tokens | targets][T] */
    double *loss, *loss_host, *norms; /* device, host, device */
    uint64_t *deposits; /* device: [tally_count] witness words of gradients: deposits ever made */
    qe_op *ops; /* [op_count] */
    qe_stream **streams; /* [stream_count]; NULL for the host's */
    qe_event **events; /* [event_count] */
    const qe_program *program; /* what the ledger knows: the plan's, and a graph object for each segment */
    qe_program sealed_program; /* storage of that where there are segments */
    qe_ledger *ledger;
    uint64_t slot_bytes, scratch_bytes;
    /* Captured execution; all empty when eager. */
    qe_segment *segments;
    uint32_t segment_count;
    uint8_t *caller_edge;   /* [item_count] the item is an edge with the caller's stream */
    uint32_t *item_segment; /* [item_count] segment that begins there, or QE_NONE */
    qe_sealed_graph *graphs;
    uint32_t graph_count;
    double capture_s; /* that recording them took */
    /* Guards; NULL when eager or without contracts. */
    uint64_t **words; /* [object_count] witness of each object, or NULL */
    uint64_t *base; /* [object_count] counters at the beginning of the step; of gradients all
                       deposits of the steps before */
    uint32_t *deposited; /* [object_count] while graphs are recorded: deposits made before item `deposited_end` */
    uint32_t deposited_end;
    qe_guard_fault *fault; /* device */
    uint8_t fault_fired; /* and has to be cleared before the next step */
    qe_event **edge_events; /* [stream_count + 1] fork and joins of a whole-step graph */
} qe_binding;

/* One piece of a device's memory, handed out once: what a weight has is many small pieces, each of which the device
 * would round up on its own. */
typedef struct qe_arena {
    char *memory;
    uint64_t bytes, placed;
} qe_arena;
enum { QE_PIECE_BYTES = 512 }; /* pieces are aligned as a device's own allocations are */

typedef struct qe_rank {
    struct qe_team *team;
    uint32_t index;
    pthread_t thread;
    int started;
    qe_device *device;
    qe_weight_place *places; /* [weight_count] addresses only */
    float **moment1, **moment2; /* [weight_count] */
    qe_scale_state *scales; /* device: [weight_count * roles], those of local scaled weights are set up */
    qe_scale_state **folded; /* host: of local scaled weights, role by role, in the order of weights */
    uint32_t *folded_begin; /* [weight_count] where a scaled weight's begin */
    float *histories; /* device: [weight_count * roles, history_length] */
    char *constants;
    char *workspace; /* of matrix products, those of training and of evaluation, which never run at once */
    qe_adamw *adamw; /* device: of the step that is being committed */
    qe_binding train, evaluate;
    uint64_t state_bytes, cache_bytes;
    qe_memory_ledger taken; /* of the device, as it was asked for */
    qe_arena arenas[QE_MEMORY_KINDS]; /* of what every weight has: masters, moments, gradients, caches */
    void **retired; /* memory that graphs may still point to; freed with the rank */
    uint32_t retired_count;
    uint8_t words_stale; /* witness words are to be set from the ledger before the next step */
    uint8_t ledger_told; /* the ledger found a breach in this step, so its history tells of one */
    uint8_t has_stepped; /* a training step was begun: buffers were written */
    uint8_t caches_unsealed; /* a weight or a scale was written by hand: no cache may vouch for what it holds */
    uint8_t has_caches; /* the last training step left every cache filled, and no weight was written since */
    double *values, *gathered; /* for the meeting: norms by weight, then the loss */
    /* Outcome of the last command. */
    qe_status status;
    qe_error error;
    qe_violations violations; /* under observe: the first of the step, as its ledger told them */
    qe_program history; /* of a step that was refused or observed */
    uint8_t vetoed;
    uint8_t committed; /* this step's commits ran */
    uint8_t torn; /* some weights of a step are committed and others not: the device failed in between */
    double loss_sum, gradient_norm;
    qe_status copied; /* of the last copy into team->copying, as `error` is */
    uint64_t certified, judged, gradient_copies, actions_ns, commit_ns;
} qe_rank;

typedef enum qe_team_command {
    QE_COMMAND_NONE, QE_COMMAND_STEP, QE_COMMAND_EVALUATE, QE_COMMAND_COPY, QE_COMMAND_QUIT
} qe_team_command;

struct qe_team {
    const qe_plan *plan; /* either plan: sizes, model, placement of stages */
    qe_team_options options;
    uint32_t rank_count;
    qe_rank *ranks;
    pthread_mutex_t mutex;
    pthread_cond_t wake, done;
    uint64_t round; /* +1 for each command */
    uint32_t finished; /* ranks done with this round */
    qe_team_command command;
    struct qe_snapshot *copying; /* what QE_COMMAND_COPY fills */
    const qe_batch *batch;
    const qe_step_optimizer *optimizer;
    uint8_t torn; /* a rank is */
    /* An armed fault. */
    uint32_t edit_rank;
    qe_edit edit;
    qe_rule edit_rule;
};

/* memory.c */
qe_status qe_rank_allocate(qe_rank *rank, qe_error *error_out);
void qe_rank_release(qe_rank *rank);
/* Fills the table of which folds name a run; again where a scale has moved. */
void qe_rank_list_folded(qe_rank *rank);
/* No cache vouches for its bytes any more: the next fills write them. Requires: no work of the streams. */
qe_status qe_rank_unseal_caches(qe_rank *rank);
int qe_rank_owns(const qe_rank *rank, uint32_t weight);
/* Bytes of values with a line for their witness behind them, and where that line is. */
uint64_t qe_rank_master_bytes(uint64_t value_bytes);
uint64_t *qe_rank_behind(void *values, uint64_t value_bytes);
void *qe_rank_alloc(qe_rank *rank, qe_memory_kind kind, uint64_t bytes, qe_error *error_out);
/* ledger_memory.c: what a rank keeps from step to step; a piece of an arena with what is lost behind it. */
void qe_memory_add_rank(const qe_plan *plan, uint32_t rank, qe_memory_ledger *ledger);
uint64_t qe_memory_piece_bytes(uint64_t bytes);
qe_memory_kind qe_memory_kind_of_slot(qe_slot_kind kind);
/* Memory of the host that copies of the device's streams may name. */
void *qe_rank_host_alloc(qe_rank *rank, uint64_t bytes, qe_error *error_out);
void qe_rank_free(qe_rank *rank, void *address);
void qe_rank_host_free(qe_rank *rank, void *address);
/* Between host and device, at once. Requires: no work of the streams touches these bytes. */
qe_status qe_rank_write(qe_rank *rank, void *to, const void *from_host, uint64_t bytes, qe_error *error_out);
qe_status qe_rank_read(qe_rank *rank, void *to_host, const void *from, uint64_t bytes, qe_error *error_out);

/* bind.c */
qe_status qe_binding_create(qe_rank *rank, qe_binding *binding, const qe_plan *plan, qe_error *error_out);
void qe_binding_destroy(qe_rank *rank, qe_binding *binding);

/* bind.c: the witness word of the slot a unit uses; NULL where it uses none. */
uint64_t *qe_binding_slot_witness(const qe_binding *binding, const qe_unit *unit, qe_slot_kind kind);

/* bind.c: gives all ops their addresses again, after memory has moved. */
qe_status qe_binding_rebind(qe_rank *rank, qe_binding *binding, qe_error *error_out);

/* declare.c: tells the backend which bytes every op may touch, from the effects of the program. */
qe_status qe_binding_declare(qe_rank *rank, const qe_binding *binding, qe_error *error_out);

/* issue.c: gives one item to its stream. */
qe_status qe_binding_run_item(qe_rank *rank, qe_binding *binding, uint32_t index);

/* issue.c: submits items [begin, end); judge asks the ledger, run gives the work to the streams. */
qe_status qe_binding_issue(qe_rank *rank, qe_binding *binding, uint32_t begin, uint32_t end, int judge, int run);
qe_status qe_binding_drain(qe_rank *rank, qe_binding *binding, qe_error *error_out);

/* team.c: the rank that holds a weight; whether the state may be shown: what a device left half committed is not. */
qe_rank *qe_team_owner(const qe_team *team, uint32_t weight);
qe_status qe_team_whole(const qe_team *team, qe_error *error_out);

/* rank.c */
void qe_rank_step(qe_rank *rank);
void qe_rank_evaluate(qe_rank *rank);
/* Its share of the state into team->copying; `copied` says how that went. */
void qe_rank_copy(qe_rank *rank);
/* Every rank thread does the command once; returns when all are done. */
void qe_team_command_all(qe_team *team, qe_team_command command);

#endif
