/* plan.h - a schedule lowered for a model: every op on a stream, bound to slots, edges and deposits, and certified.
 *
 * A plan holds no pointers to memory; it says how many bytes of what must exist and which unit of work uses which
 * slot. The step (step.h) allocates that memory and binds the same units to it. The model is known only through
 * qe_model_ops: plan and step call `lower` with the same frames, once without addresses and once with. */
#ifndef QEFFECT_PLAN_H
#define QEFFECT_PLAN_H

#include "qeffect/ledger.h"
#include "qeffect/op.h"
#include "qeffect/schedule.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What one microbatch retains on a stage, by lifetime. X and Y together are the W retention of the papers. */
typedef enum qe_slot_kind {
    QE_SLOT_I,      /* F .. I: what the input gradient needs (also the forward's own intermediates) */
    QE_SLOT_X,      /* F .. W: quantized inputs of the linears */
    QE_SLOT_Y,      /* I .. W: quantized output gradients of the linears */
    QE_SLOT_IN_F,   /* the stage's input activation, from its arrival to the end of I */
    QE_SLOT_OUT_F,  /* the stage's output activation, from F until it is sent */
    QE_SLOT_IN_B,   /* gradient of the stage's output, from its arrival to the end of I */
    QE_SLOT_OUT_B,  /* gradient of the stage's input, from I until it is sent */
    QE_SLOT_KINDS
} qe_slot_kind;

enum { QE_SCALE_X, QE_SCALE_W, QE_SCALE_DY, QE_SCALE_ROLES }; /* hidden scales of one linear */
/* Layouts of a weight cache: what forward products take, and the codes (transposed ones, which input gradients take,
 * where operands are codes). */
enum { QE_LAYOUT_CODES = 1, QE_LAYOUT_OPERAND = 2 };

/* A weight as the optimizer sees it: one master, one gradient, one pair of moments. A fused linear is one weight. */
typedef struct qe_weight_info {
    char name[QE_NAME_BYTES];
    uint32_t rows, columns;   /* a gain is 1 x columns */
    uint32_t stage_layer;     /* index of the model layer it belongs to */
    uint8_t quantized;        /* has a cache: a copy of its values as products take them */
    uint8_t scaled;           /* has hidden scales where the recipe keeps them */
    uint8_t decay;            /* weight decay applies */
    uint8_t deposited_by;     /* QE_ACTION_I or QE_ACTION_W */
    uint8_t uses;             /* deposits of one microbatch, each with a `use` of its own: all but a step's first add;
                                 0 stands for 1 */
} qe_weight_info;

static inline uint32_t qe_weight_uses(const qe_weight_info *info) {
    return info->uses > 0 ? info->uses : 1;
}

/* A named view of rows of a weight, as checkpoints and other frameworks know it. */
typedef struct qe_parameter {
    char name[QE_NAME_BYTES]; /* "model.layers.0.self_attn.q_proj.weight" */
    uint32_t weight;          /* index of the weight it is part of */
    uint32_t row_begin, rows, columns; /* rows of the weight; a gain has rows 1 */
    uint8_t vector;           /* a gain: its shape is [columns] */
} qe_parameter;

typedef struct qe_slot_place {
    char *at;            /* address; NULL in a plan */
    uint32_t object;     /* QE_NONE: the stage has no such slot (first and last stage, evaluation) */
    uint32_t generation; /* from the step's beginning */
    uint16_t stage;      /* its owner: a neighbour's where a result is handed over on one rank */
} qe_slot_place;

typedef struct qe_weight_place {
    float *master, *grad;                         /* [rows, columns] */
    void *cache_codes, *cache_operand;            /* [rows, columns] qe_quantize_target's retained and operand */
    float *cache_scale_inv;
    uint64_t *witness;                     /* version, behind the master's values */
    uint64_t *cache_key;                   /* [QE_KEY_WORDS] behind the operand */
    qe_scale_state *scale[QE_SCALE_ROLES];        /* delayed scaling only */
    uint32_t weight_object, grad_object, cache_object;
    uint32_t scale_object[QE_SCALE_ROLES];        /* QE_NONE unless delayed */
    uint32_t tally; /* where its gradient's deposits are counted: place among the rank's words */
} qe_weight_place;

/* Everything an action of one (stage, microbatch) touches. */
typedef struct qe_frame {
    uint32_t stage, stages, microbatch;
    uint8_t training;       /* 0: evaluation; nothing is recorded, deposited or retained past F */
    uint8_t set;            /* deposits of this action are the first of the step */
    uint8_t ahead;          /* fill: only weight `ahead_weight`, behind its commit and its scale's fold, for the next
                               step: nothing is recorded */
    uint32_t ahead_weight;
    uint8_t apart;          /* weight gradients of products are set where the frame says, whatever was deposited: an op
                               of the plan's own adds them */
    qe_slot_place slot[QE_SLOT_KINDS];
    const qe_weight_place *weights; /* [weight_count], indexed by the model's weight index */
    const char *constants;  /* what the model computes once: qe_model_ops.constant_fill */
    char *work;             /* scratch of the compute stream */
    uint32_t work_object;
    uint64_t work_bytes;
    char *workspace;        /* of matrix products; the object is QE_NONE where the backend asks for none */
    uint32_t workspace_object;
    uint64_t workspace_bytes;
    const int32_t *tokens, *targets; /* [T] of this microbatch */
    uint32_t tokens_object;
    double *loss;           /* [1] of this microbatch */
    uint32_t loss_object;
    float gradient_scale;   /* 1 / tokens of the step */
} qe_frame;

/* Receives the ops of an action in program order. */
typedef struct qe_sink {
    void *context;
    qe_status (*op)(void *context, const qe_op *op, const qe_effect *effects, uint32_t effect_count);
} qe_sink;

/* Phases of a stage that a model lowers. */
typedef enum qe_phase { QE_PHASE_FILL, QE_PHASE_F, QE_PHASE_I, QE_PHASE_W } qe_phase;

/* The model, as plan and step know it. All functions are pure. */
typedef struct qe_model_ops {
    size_t size;
    uint32_t (*weight_count)(const void *model);
    const qe_weight_info *(*weight)(const void *model, uint32_t index);
    /* Stage of a weight when the model is cut in `stages`. */
    uint32_t (*weight_stage)(const void *model, uint32_t index, uint32_t stages);
    uint32_t (*stages_max)(const void *model);
    uint64_t (*slot_bytes)(const void *model, uint32_t stage, uint32_t stages, qe_slot_kind kind);
    uint64_t (*work_bytes)(const void *model);
    uint64_t (*workspace_bytes)(const void *model); /* of matrix products; 0: none */
    uint64_t (*constant_bytes)(const void *model);
    void (*constant_fill)(const void *model, void *host_out); /* tables that never change, e.g. of RoPE */
    uint64_t (*cache_code_bytes)(const void *model, uint32_t weight);
    uint64_t (*cache_operand_bytes)(const void *model, uint32_t weight);
    uint64_t (*cache_scale_count)(const void *model, uint32_t weight);
    uint32_t (*parameter_count)(const void *model);
    const qe_parameter *(*parameter)(const void *model, uint32_t index); /* sorted by name */
    uint32_t (*tokens)(const void *model); /* T of one microbatch */
    const qe_recipe *(*recipe)(const void *model);
    qe_status (*lower)(const void *model, const qe_frame *frame, qe_phase phase, const qe_sink *sink);
} qe_model_ops;

typedef enum qe_gradient_placement { QE_GRADIENT_DIRECT, QE_GRADIENT_COPY } qe_gradient_placement;

typedef struct qe_plan_options {
    uint8_t forward_only;     /* evaluation */
    uint8_t cache_weights;    /* 1: quantize a weight once a step; 0: before every use */
    uint8_t reuse_slots;      /* 0: a slot per microbatch (baseline) */
    qe_gradient_placement placement;
    uint8_t sums_apart;       /* copy: products are set in scratch and added to the gradient (qe_numerics.sums_apart);
                                 0: the gradient is moved to scratch, accumulated there, and moved back */
    uint8_t fill_ahead;       /* 1: commits quantize what they make for the next step (qe_plan_fills_ahead). For commits
                                 that are recorded: a recording that lacks an edge between fold and commit is refused
                                 before it may run; op by op it would be found when folds are done and no commit is */
    uint8_t share_slots;      /* 1: slots of different kinds and stages may lie in one region, in turns; 0: a region for
                                 each slot of a pool */
} qe_plan_options;

/* A unit of work: one call of the model's `lower`, or one op of the plan's own. */
typedef enum qe_unit_kind {
    QE_UNIT_LOAD,     /* the caller's stream writes the batch */
    QE_UNIT_FILL,     /* weight caches of a stage */
    QE_UNIT_F, QE_UNIT_I, QE_UNIT_W,
    QE_UNIT_SEND_F, QE_UNIT_RECV_F, QE_UNIT_SEND_B, QE_UNIT_RECV_B,
    QE_UNIT_GRAD_IN, QE_UNIT_GRAD_OUT, /* placement copy: one weight to scratch and back, or from scratch added */
    QE_UNIT_TAKE,     /* one weight: norm of its gradient */
    QE_UNIT_COMMIT,   /* one weight: optimizer */
    QE_UNIT_FOLD,     /* scales of some weights, as many as one op may have effects */
    QE_UNIT_READ      /* the caller's stream reads the losses */
} qe_unit_kind;

typedef struct qe_unit {
    uint8_t kind;          /* qe_unit_kind */
    uint8_t set;           /* deposits of this unit set */
    uint8_t stamped;       /* its first op stamps the slots it acquires */
    uint16_t stage;
    uint32_t microbatch;
    uint32_t weight;       /* grad_in/out, take, commit: model weight index; fold: the first of its weights */
    uint32_t weight_count; /* fold: scaled weights of this rank, from `weight` on */
    uint32_t peer;         /* send, recv: the other rank */
    uint32_t stream;       /* program stream index */
    uint32_t first_op, op_count;
    uint32_t tally_count;  /* of these, the last ones: they count its deposits */
    uint32_t slot[QE_SLOT_KINDS];       /* pool index; QE_NONE where unused */
    uint32_t generation[QE_SLOT_KINDS];
} qe_unit;

/* Memory that serves one slot after another, of whatever pools: their lives do not meet. It is one object of the
 * program, so that what waits for a slot waits for whoever had its memory before. */
typedef struct qe_region {
    uint32_t object;
    uint8_t kind;          /* qe_slot_kind it was made for */
    uint64_t bytes;        /* with the witness word, in the last QE_ALIGN_BYTES */
} qe_region;

/* Slots of one (stage, kind) on a rank. */
typedef struct qe_pool {
    uint16_t stage;
    uint8_t kind;          /* qe_slot_kind */
    uint32_t count;
    uint64_t slot_bytes;   /* that a slot needs, with the witness word */
    uint32_t *objects;     /* [count] program objects */
    uint32_t *regions;     /* [count] where each lies */
} qe_pool;

typedef struct qe_rank_plan {
    qe_program program;
    uint32_t *item_op;     /* [program.item_count] op index, QE_NONE for records and waits */
    uint32_t *item_unit;   /* [program.item_count] */
    qe_unit *units;
    uint32_t unit_count, unit_capacity, op_count;
    qe_pool *pools;
    uint32_t pool_count;
    qe_region *regions;
    uint32_t region_count, region_capacity;
    qe_weight_place *places; /* [weight_count], addresses NULL; objects QE_NONE for weights of other ranks */
    uint32_t workspace_object; /* QE_NONE: products need none */
    uint32_t work_object, tokens_object, loss_object, norms_object, scratch_object, deposits_object;
    uint32_t tally_count;  /* words of deposits_object; one per gradient, what is deposited together lies together */
    uint32_t take_begin, commit_begin, exit_begin; /* item indices where the phases start */
    uint64_t slot_bytes;   /* of all regions: the activation memory of the rank */
    uint64_t live_bytes;   /* most that slots I, X and Y hold at once, in program order: the peak activation */
    uint32_t stream_compute, stream_caller, stream_host; /* the host stream is used by nothing that is planned */
} qe_rank_plan;

typedef struct qe_plan {
    uint32_t ranks, stages, microbatches, weight_count;
    qe_plan_options options;
    const qe_model_ops *model_ops;
    const void *model;
    uint32_t *stage_rank;  /* [stages] */
    qe_rank_plan *rank;    /* [ranks] */
} qe_plan;

/* Lowers a schedule and certifies the result: schedule check, then every rank's program by the ledger, then freedom
 * from deadlock of all streams of all ranks together (rendezvous transfers, slots as counted).
 * Requires:   model outlives the plan.
 * On failure: QE_CONTRACT with *violations_out (and *counterexample_out for schedule rules; deinit it); or an operating
 *             error. Owns: the caller destroys *plan_out. Thread: any. */
qe_status qe_plan_create(const qe_schedule *schedule, const qe_model_ops *ops, const void *model,
                         const qe_plan_options *options, qe_plan **plan_out, qe_violations *violations_out,
                         qe_counterexample *counterexample_out, qe_error *error_out);
void qe_plan_destroy(qe_plan *plan);

/* The pool of (stage, kind) on a rank, or NULL where the stage has no such slot. */
const qe_pool *qe_rank_plan_pool(const qe_rank_plan *rank, uint32_t stage, qe_slot_kind kind);

/* Placement copy: is the weight's gradient set in scratch and added from there? Not where a microbatch deposits more
 * than once: its sum would be made apart, and round otherwise. */
int qe_plan_adds_apart(const qe_plan *plan, uint32_t weight);

/* Is the weight's cache filled for the next step by the commit itself? Only under delayed scaling is the scale known by
 * then; the fill at the beginning of the next step finds the cache sealed and has nothing left to write. */
int qe_plan_fills_ahead(const qe_plan *plan, const qe_rank_plan *rank, uint32_t weight);

/* Where a stage's slot of `kind` really is: a result for a neighbour on the same rank is written into the neighbour's
 * own slot, so OUT_F of s is IN_F of s + 1 there, and OUT_B of s is IN_B of s - 1. */
void qe_plan_resolve_slot(const qe_plan *plan, uint32_t stage, qe_slot_kind kind, uint32_t *stage_out,
                          qe_slot_kind *kind_out);

/* Completes a frame's objects and generations from a unit; addresses stay as they are. */
void qe_plan_frame_objects(const qe_plan *plan, const qe_rank_plan *rank, const qe_unit *unit, qe_frame *frame);

#ifdef __cplusplus
}
#endif
#endif
