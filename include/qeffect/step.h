/* step.h - runs plans: memory, binding, one training step on all ranks of this process, and what a trap leaves.
 *
 * A team is the ranks of one process. Each rank has a thread that submits, streams of its backend, a ledger per plan,
 * and the state of its weights. Life of one step on every rank:
 *
 *   begin -> issue actions -> issue takes -> drain -> meet (norms, losses, verdicts of all ranks)
 *         -> judge commits and folds -> meet (verdicts) -> run them -> end
 *                                   '-> any rank refused, or the loss is not finite: abort on all ranks
 *
 * Nothing that outlives a step (weights, moments, scales) is written before the second meeting. */
#ifndef QEFFECT_STEP_H
#define QEFFECT_STEP_H

#include "qeffect/backend.h"
#include "qeffect/comm.h"
#include "qeffect/memory.h"
#include "qeffect/plan.h"
#include "qeffect/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qe_team qe_team;

/* What one graph covers. Same ops, same bits. */
typedef enum qe_capture {
    QE_CAPTURE_NONE,   /* eager */
    QE_CAPTURE_LAYER,  /* one layer of one action */
    QE_CAPTURE_ACTION, /* one action of a stage */
    QE_CAPTURE_STEP    /* all actions of a rank with their transfers; and the commit */
} qe_capture;

typedef struct qe_team_options {
    const qe_backend *backend;
    const qe_comm_ops *comm;
    qe_world *world;          /* has as many ranks as the plans */
    qe_contracts contracts;
    qe_capture capture;
    /* called for each rank's device before its streams; may be NULL */
    void (*opened)(qe_device *device, const void *context);
    const void *opened_context;
} qe_team_options;

typedef struct qe_batch {
    const int32_t *tokens, *targets; /* [microbatches, T]; the caller's memory, unchanged until the call returns */
} qe_batch;

typedef struct qe_step_result {
    double loss;           /* mean over the tokens of the step, nats */
    double gradient_norm;  /* before clipping */
    uint8_t vetoed;        /* loss or norm not finite: nothing was committed */
    uint64_t certified, judged; /* submissions that went the certified way and the full way, all ranks */
    uint64_t gradient_copies;   /* gradients that were moved to scratch and back, all ranks: in and out count once */
    uint64_t actions_ns, commit_ns; /* of the slowest rank: from the first submission to the last result of actions and
                                       takes; of commits and folds */
    /* A breach: where and what. rank is QE_NONE without one. */
    uint32_t violation_rank;
    qe_violations violations;
} qe_step_result;

/* Optimizer constants of a step from the global gradient norm: called once per step on every rank, must be pure. */
typedef struct qe_step_optimizer {
    qe_adamw (*constants)(const void *context, double gradient_norm);
    const void *context;
} qe_step_optimizer;

/* Allocates everything that steps will need and starts the rank threads.
 * Requires:   train and evaluate are plans of the same model over the same stages; one of them may be NULL. They, the
 *             world and the tables outlive the team.
 * Owns:       the caller destroys. Thread: one caller. */
qe_status qe_team_create(const qe_plan *train, const qe_plan *evaluate, const qe_team_options *options,
                         qe_team **team_out, qe_error *error_out);
void qe_team_destroy(qe_team *team);

/* Parameter values by index of the model's sorted list. A write bumps the weight's version and empties its cache. */
qe_status qe_team_parameter_write(qe_team *team, uint32_t parameter, const float *values, qe_error *error_out);
qe_status qe_team_parameter_read(qe_team *team, uint32_t parameter, float *values_out, qe_error *error_out);

/* One training step on all ranks.
 * Ensures:    QE_OK: weights, moments and scales are those of the next step, or, when result_out->vetoed, unchanged.
 * On failure: QE_CONTRACT (records and rank in *result_out), QE_ERROR_DEVICE, ...: weights, moments and scales are
 *             those before the call, and the team can go on. Only a device that fails while commits run can tear a
 *             step; the team then refuses to step, evaluate, read, write and hash (QE_ERROR_DEVICE): a checkpoint is
 *             the way on. */
qe_status qe_team_step(qe_team *team, const qe_batch *batch, const qe_step_optimizer *optimizer,
                       qe_step_result *result_out, qe_error *error_out);

/* Forward only, with the evaluation plan: scales are used, nothing else changes. losses_out: [microbatches], sums over
 * tokens in nats. logits_out: NULL, or [T, vocab] of microbatch 0 from `logits_offset_bytes` of the last X slot. */
qe_status qe_team_evaluate(qe_team *team, const qe_batch *batch, double *losses_out, float *logits_out,
                           uint64_t logits_offset_bytes,
                           uint64_t logits_bytes, qe_step_result *result_out, qe_error *error_out);

/* What outlives a step, tensor by tensor: parameters sorted by name, then moments, then scales and histories. */
typedef enum qe_state_kind {
    QE_STATE_PARAMETER,
    QE_STATE_MOMENT1,
    QE_STATE_MOMENT2,
    QE_STATE_SCALE,
    QE_STATE_HISTORY
} qe_state_kind;
typedef struct qe_state_tensor {
    qe_state_kind kind;
    const char *name; /* "model.norm.weight.moment1", "model.layers.0.mlp.down_proj.dy.scale" */
    uint64_t rows, columns; /* rows 0: a vector of `columns` */
    const float *values;    /* fp32; valid during the call only */
    uint32_t weight;        /* the model's weight index */
    int role;               /* scale and history: QE_SCALE_X, QE_SCALE_W, QE_SCALE_DY; else -1 */
    uint32_t parameter;     /* the model's parameter index; QE_NONE for scales and histories */
} qe_state_tensor;
/* Calls `visit` for every tensor of the state in the order of the hash. Thread: the caller's, between steps.
 * On failure: QE_ERROR_DEVICE or QE_ERROR_MEMORY; the tensors before were visited. */
qe_status qe_team_state_visit(qe_team *team, void (*visit)(void *context, const qe_state_tensor *tensor),
                              void *context, qe_error *error_out);

/* XXH3-128 over the same tensors, each with name, dtype, shape and little-endian bytes; 32 hexadecimal digits. */
enum { QE_STATE_HASH_BYTES = 33 };
qe_status qe_team_state_hash(qe_team *team, char text_out[QE_STATE_HASH_BYTES], qe_error *error_out);

/* Plans a fault that breaks exactly `rule` on some rank and arms it for the next qe_team_step. The fault is an edit of
 * the submitted order or of a handle; it is found by judging edited programs offline.
 * On failure: QE_ERROR_UNSUPPORTED when no single edit of this plan breaks this rule first in the next step;
 *             QE_ERROR_ARGUMENT with contracts off: nothing would stop the fault. */
qe_status qe_team_inject(qe_team *team, qe_rule rule, qe_error *error_out);

/* A hook for tests: raises the amax that the next step records for one scale to at least `amax`, which may be Inf; the
 * step folds it as its own, and drops it as its own when it does not commit.
 * On failure: QE_ERROR_ARGUMENT: this weight has no such scale (not quantized, or the recipe keeps none). */
qe_status qe_team_scale_amax(qe_team *team, uint32_t weight, int role, float amax, qe_error *error_out);

/* What the ledger of a rank saw in the last (refused) step, as a program for qe_trace_write. */
qe_status qe_team_history(qe_team *team, uint32_t rank, qe_program *program_out, qe_error *error_out);
/* The training program of a rank: names for the indices in a violation. */
const qe_program *qe_team_program(const qe_team *team, uint32_t rank);
/* Moves a weight's master to other memory, as frameworks do behind one's back; ops are bound again, graphs are not:
 * the next captured step is refused (graph.address) until qe_team_recapture. Without contracts the graphs go on with
 * the old memory. */
qe_status qe_team_weight_move(qe_team *team, uint32_t parameter, qe_error *error_out);
/* Records all graphs again. On failure: the team runs eagerly. */
qe_status qe_team_recapture(qe_team *team, qe_error *error_out);
/* Graphs of a rank: how many there are, how many segments of a step they serve, ops and bytes; how many microbatches
 * its stages hold at a time, since each of these has graphs of its own; how long recording them took. */
typedef struct qe_capture_use {
    uint32_t graphs, segments, slots;
    uint64_t ops, bytes;
    double seconds;
} qe_capture_use;
qe_capture_use qe_team_captured(const qe_team *team, uint32_t rank);

/* Bytes in use by rank: weights with moments and gradients, caches, slots, scratch. */
typedef struct qe_memory_use { uint64_t state_bytes, cache_bytes, slot_bytes, scratch_bytes; } qe_memory_use;
qe_memory_use qe_team_memory(const qe_team *team, uint32_t rank);
/* What a rank took of its device, by kind; moved weights and recorded graphs are counted on. */
qe_memory_ledger qe_team_memory_ledger(const qe_team *team, uint32_t rank);

#ifdef __cplusplus
}
#endif
#endif
