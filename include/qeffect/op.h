/* op.h - every op a backend can run, with its arguments. Pointers are device pointers of the backend that runs it
 * (host pointers for `host`). Matrices are row-major and dense unless a stride is given. T = tokens of one microbatch
 * (sequences * sequence_length). Arithmetic and accumulation order: docs/numerics.md.
 *
 * An *activation* (`void *`) holds elements of the backend's activation format (qe_numerics). An *operand* is what a
 * matrix product takes; how it lies in memory is the backend's choice too. */
#ifndef QEFFECT_OP_H
#define QEFFECT_OP_H

#include <stdint.h>
#include "qeffect/recipe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Arguments have no unnamed holes (`reserved` is 0): graphs are sealed by comparing whole ops, byte by byte. */
#ifdef __GNUC__
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wpadded"
#endif

/* How the elements of a quantized matrix share inverse scales. */
typedef enum qe_blocking {
    QE_BLOCKING_TENSOR, /* one for the matrix (1.0 for bf16 and fp32) */
    QE_BLOCKING_ROW,    /* 1x128 along a row: [rows][ceil(columns/128)] */
    QE_BLOCKING_COLUMN, /* 128x1 down a column: [ceil(rows/128)][columns] */
    QE_BLOCKING_TILE    /* 128x128: [ceil(rows/128)][ceil(columns/128)] */
} qe_blocking;

/* A matrix that a product takes. Codes and inverse scales are one unit: they are made together and retained
 * together. */
typedef struct qe_qtensor {
    void *codes;        /* [rows, columns] elements of `format`; [columns, rows] where `transposed` */
    float *scale_inv;   /* see qe_blocking; NULL for bf16 and fp32 */
    uint32_t rows, columns; /* of the matrix, not of its transpose */
    uint8_t format;     /* qe_format */
    uint8_t blocking;   /* qe_blocking */
    uint8_t transposed; /* 1: lies as its transpose */
    uint8_t reserved[5];
} qe_qtensor;

/* What a backend computes with; the model lays out its memory by it. */
typedef enum qe_operands {
    QE_OPERANDS_DECODED, /* products take fp32 values that were rounded to the recipe's format (host) */
    QE_OPERANDS_CODES    /* products take the codes themselves: E4M3 and E5M2 by rows and transposed; bf16 values where
                            block scaling was undone (exactly: its scales are powers of two) (cuda) */
} qe_operands;

typedef struct qe_numerics {
    uint8_t activation; /* qe_format of activations: fp32 or bf16 */
    uint8_t operands;   /* qe_operands */
    uint8_t sums_apart; /* 1: a weight gradient's product is rounded to fp32, then added: set elsewhere and added by
                           QE_OP_ACCUMULATE it has the same bits. 0: the product's own accumulation rounds otherwise */
    uint8_t reserved[1];
    uint32_t workspace_bytes; /* of the scratch that every matrix product is given; 0: none */
} qe_numerics;

/* How a product of 8-bit codes adds up. Wider operands always accumulate in fp32. */
typedef enum qe_accumulation {
    QE_ACCUMULATE_FAST, /* in the matrix unit alone */
    QE_ACCUMULATE_SPLIT /* partial sums are promoted to fp32 registers */
} qe_accumulation;

/* How a tensor is quantized. `operand` receives what the forward or input-gradient product takes (row blocking under
 * QE_RECIPE_BLOCK); `retained` what the weight gradient takes later (column blocking under QE_RECIPE_BLOCK, else the
 * same values). For a weight, `retained` is what the input gradient takes.
 *
 *  operands | recipe          | operand                              | retained
 *  decoded  | any             | fp32 values                          | codes and inverse scales
 *  codes    | delayed current | codes, inverse scale                 | codes transposed, the same inverse scale
 *  codes    | block           | bf16 values                          | codes and inverse scales; weights: nothing
 *  codes    | bf16 fp32       | values                               | the same values; weights: nothing */
typedef struct qe_quantize_target {
    uint8_t recipe;      /* qe_recipe_kind */
    uint8_t format;      /* qe_format of the codes */
    uint8_t reserved[6];
    const float *scale;  /* delayed: the current scale; else NULL */
    float *amax;         /* delayed: raised to the largest |x|; NULL: not recorded (evaluation, other recipes) */
    qe_qtensor operand;  /* codes may be NULL: only `retained` is made */
    qe_qtensor retained; /* codes may be NULL: nothing is retained */
} qe_quantize_target;

typedef enum qe_op_kind {
    QE_OP_EMBED,              /* y[t] = table[token[t]] */
    QE_OP_EMBED_BACKWARD,     /* grad[token[t]] (+)= dy[t], tokens in order */
    QE_OP_NORM,               /* RMSNorm, not quantized */
    QE_OP_NORM_QUANTIZE,      /* RMSNorm, then quantized */
    QE_OP_NORM_BACKWARD,      /* dx = residual + norm', deposit of the gain's gradient; dx may be quantized too */
    QE_OP_QUANTIZE,
    QE_OP_QUANTIZE_WEIGHT,    /* fills a cache: codes and decoded layout; tile blocking under QE_RECIPE_BLOCK */
    QE_OP_LINEAR,             /* y = x w' (+ residual); swiglu of y may be quantized too */
    QE_OP_LINEAR_INPUT_GRAD,  /* dx = dy w; may go back through swiglu and be quantized too */
    QE_OP_LINEAR_WEIGHT_GRAD, /* grad (+)= dy' x, from retained tensors */
    QE_OP_ROPE,               /* rotates q and k in place */
    QE_OP_LINEAR_ROPE,        /* y = x w', q and k of it rotated */
    QE_OP_ROPE_BACKWARD_QUANTIZE, /* rotates dq and dk back in place, then quantizes all of dqkv */
    QE_OP_ATTENTION,          /* causal, grouped-query; may be quantized too */
    QE_OP_ATTENTION_BACKWARD, /* dqkv; may be rotated back and quantized too */
    QE_OP_SWIGLU_QUANTIZE,    /* silu(gate) * up, then quantized */
    QE_OP_SWIGLU_BACKWARD_QUANTIZE,
    QE_OP_CROSS_ENTROPY,      /* loss and, in place of the logits, their gradient */
    QE_OP_COPY,               /* bytes */
    QE_OP_ACCUMULATE,         /* to[i] += from[i], fp32 */
    QE_OP_GRAD_NORM,          /* sum of squares of one gradient */
    QE_OP_ADAMW,              /* one weight */
    QE_OP_FOLD,               /* qe_scale_fold of some scales */
    QE_OP_STAMP,              /* slots are acquired: their witness words go up by one */
    QE_OP_TALLY,              /* deposits of an action are counted in the gradients' witness words */
    QE_OP_GUARD,              /* witness words are what this launch expects, or the fault word is set */
    QE_OP_SEND,               /* through the transport of the stream */
    QE_OP_RECV,
    QE_OP_DELAY,              /* takes a given time and touches nothing: stands for work in measurements */
    QE_OP_KINDS
} qe_op_kind;

typedef struct qe_args_embed {
    const int32_t *tokens; /* [T], each in 0..vocab-1 */
    const float *table;    /* [vocab, hidden] */
    void *y;               /* [T, hidden] activation */
    uint32_t tokens_count, hidden;
} qe_args_embed;

typedef struct qe_args_embed_backward {
    const int32_t *tokens; /* [T] */
    const void *dy;        /* [T, hidden] activation */
    float *grad;           /* [vocab, hidden] */
    uint32_t tokens_count, hidden, vocab;
    uint8_t set;           /* 1: grad is zeroed first; 0: adds */
    uint8_t reserved[3];
} qe_args_embed_backward;

typedef struct qe_args_norm { /* QE_OP_NORM and QE_OP_NORM_QUANTIZE */
    const void *x;      /* [T, hidden] activation */
    const float *gain;  /* [hidden] */
    float *rstd;        /* [T] 1/sqrt(mean(x^2) + epsilon), retained */
    void *y;            /* QE_OP_NORM: [T, hidden] activation; else NULL */
    qe_quantize_target target; /* QE_OP_NORM_QUANTIZE: rows T, columns hidden; `operand` is set */
    float epsilon;
    uint32_t rows, hidden;
    uint8_t reserved[4];
} qe_args_norm;

/* Floats of scratch for the partial sums of a gain's gradient. */
enum { QE_GAIN_PARTIALS = 512 }; /* sums over rows r, r + 512, ... are made apart, then added in order */

typedef struct qe_args_norm_backward {
    const void *dy;       /* [T, hidden] gradient of the norm's output */
    const void *x;        /* [T, hidden] the norm's input */
    const float *rstd;    /* [T] */
    const float *gain;    /* [hidden] */
    const void *residual; /* [T, hidden] gradient that goes around the norm, added; may be NULL; may equal dx */
    void *dx;             /* [T, hidden] */
    float *gain_grad;     /* [hidden]: sum over rows, then set or added; NULL: skipped */
    float *partials;      /* scratch [QE_GAIN_PARTIALS, hidden]; only with operands `codes` */
    uint32_t rows, hidden;
    uint8_t set;
    uint8_t reserved[7];
    qe_quantize_target target; /* of dx, as QE_OP_QUANTIZE; neither operand nor retained codes: not quantized */
} qe_args_norm_backward;

typedef struct qe_args_quantize { /* QE_OP_QUANTIZE */
    const void *x; /* [rows, columns] activation */
    uint32_t rows, columns;
    qe_quantize_target target;
} qe_args_quantize;

/* Words of a cache's key. */
enum {
    QE_KEY_VERSION, /* of the weight */
    QE_KEY_EPOCH,   /* of the scale; 0 without one */
    QE_KEY_SEAL,    /* 0: nobody vouches for the whole; else QE_KEY_SEALED | bits of the amax of what was quantized */
    QE_KEY_AMAX,    /* while a commit writes: bits of the amax so far; 0 between */
    QE_KEY_WORDS
};
#define QE_KEY_SEALED ((uint64_t)1 << 32)

typedef struct qe_args_quantize_weight {
    const float *w;  /* [rows, columns] master */
    uint32_t rows, columns;
    qe_quantize_target target; /* retained: the cache's codes (tile blocking under block); operand: see the table */
    /* The key travels with the bytes: qe_cache_key words. A key that names the weight's version and the scale's epoch,
     * and is sealed, says that a commit made just these bytes: nothing is written then, and the amax that the key
     * remembers is recorded. NULL: not kept. */
    const uint64_t *weight_witness, *scale_epoch;
    uint64_t *key; /* [QE_KEY_WORDS] */
} qe_args_quantize_weight;

typedef struct qe_args_linear {
    qe_qtensor x;         /* [rows, in] */
    qe_qtensor w;         /* [out, in] */
    const void *residual; /* [rows, out] activation, added (beta = 1 onto a copy in y); NULL: none */
    void *y;              /* [rows, out] activation */
    void *workspace;      /* [qe_numerics.workspace_bytes]: no two products that may run at once have the same */
    uint32_t rows, in, out;
    uint8_t accumulation; /* qe_accumulation */
    uint8_t reserved[3];
    void *decoded_scratch;     /* as swiglu's, [rows, out / 2]; unused without a target */
    qe_quantize_target target; /* [rows, out / 2]: what QE_OP_SWIGLU_QUANTIZE makes of y, the same bits; y is written
                                  too. Neither operand nor retained codes: y is all */
} qe_args_linear;

typedef struct qe_args_linear_input_grad {
    qe_qtensor dy;        /* [rows, out] */
    qe_qtensor w;         /* [out, in]; transposed where its format is 8 bits wide */
    void *dx;             /* [rows, in] activation */
    void *workspace;      /* [qe_numerics.workspace_bytes]: no two products that may run at once have the same */
    uint32_t rows, in, out;
    uint8_t accumulation;
    uint8_t reserved[3];
    const void *gate_up;       /* activation [rows, 2 * in]: dx is the gradient of its swiglu; NULL without a target */
    void *dgate_up;            /* as swiglu backward's scratch, [rows, 2 * in] */
    qe_quantize_target target; /* [rows, 2 * in]: what QE_OP_SWIGLU_BACKWARD_QUANTIZE makes of dx, the same bits; dx is
                                  scratch then. Neither operand nor retained codes: dx is the result */
} qe_args_linear_input_grad;

typedef struct qe_args_linear_weight_grad {
    qe_qtensor x;         /* [rows, in] retained */
    qe_qtensor dy;        /* [rows, out] retained */
    void *scratch_x;      /* [rows, in] where codes are decoded first: fp32 (decoded operands), bf16 (block) */
    void *scratch_dy;     /* [rows, out] */
    float *grad;          /* [out, in] fp32 main gradient */
    void *workspace;      /* [qe_numerics.workspace_bytes]: no two products that may run at once have the same */
    uint32_t rows, in, out;
    uint8_t set;          /* 1: beta = 0; 0: beta = 1 */
    uint8_t accumulation;
    uint8_t reserved[2];
} qe_args_linear_weight_grad;

typedef struct qe_args_rope { /* QE_OP_ROPE and QE_OP_ROPE_BACKWARD_QUANTIZE */
    void *qkv;           /* activation [T, (heads + 2 kv_heads) * head_dim]: q, k, v heads; q and k are rotated */
    const float *cosine; /* [sequence, head_dim / 2] */
    const float *sine;   /* [sequence, head_dim / 2] */
    uint32_t rows, sequence, heads, kv_heads, head_dim; /* position of row t is t mod sequence; half-split form */
    uint8_t reserved[4];
    qe_quantize_target target; /* backward: rows T, columns (heads + 2 kv_heads) * head_dim */
} qe_args_rope;

/* Always two parts: a product without residual or target, then rope of its result. */
typedef struct qe_args_linear_rope {
    qe_qtensor x;               /* [rows, in] */
    qe_qtensor w;               /* [(heads + 2 kv_heads) * head_dim, in] */
    void *y;                    /* activation [rows, (heads + 2 kv_heads) * head_dim] */
    void *workspace;            /* as linear's */
    const float *cosine, *sine; /* as rope's */
    uint32_t rows, in, sequence, heads, kv_heads, head_dim;
    uint8_t accumulation; /* qe_accumulation */
    uint8_t reserved[7];
} qe_args_linear_rope;

enum { QE_ATTENTION_ROWS = 64 }; /* queries taken at a time: keeps a tile of scores in a core's second cache */

/* Floats that attention needs as scratch, forward or backward: scores and their gradients of QE_ATTENTION_ROWS
 * queries, keys padded to 16; keys and values of one head, transposed. */
static inline uint64_t qe_attention_scratch_floats(uint64_t sequence, uint64_t head_dim) {
    const uint64_t padded = (sequence + 15) / 16 * 16;
    return 2 * padded * QE_ATTENTION_ROWS + 2 * padded * head_dim;
}

typedef struct qe_args_attention {
    const void *qkv;  /* activation [T, (heads + 2 kv_heads) * head_dim], rotated */
    void *out;        /* activation [T, heads * head_dim] */
    float *lse;       /* [sequences, heads, sequence] log-sum-exp of the scaled scores, retained */
    void *scratch;    /* host: [qe_attention_scratch_floats(sequence, head_dim)] floats */
    uint32_t sequences, sequence, heads, kv_heads, head_dim;
    uint8_t deterministic; /* 0: the backend may add up in any order */
    uint8_t reserved[3];
    qe_quantize_target target; /* [T, heads * head_dim]: what QE_OP_QUANTIZE makes of out, the same bits; out is written
                                  too. Neither operand nor retained codes: out is all */
} qe_args_attention;

typedef struct qe_args_attention_backward {
    const void *qkv;   /* as forward */
    const void *out;   /* forward's result; NULL with decoded operands, where it is not needed */
    const float *lse;
    const void *dout;  /* activation [T, heads * head_dim] */
    void *dqkv;        /* activation [T, (heads + 2 kv_heads) * head_dim]; scratch where there is a target */
    void *scratch;     /* as forward */
    const float *cosine, *sine; /* as rope's; NULL without a target */
    uint32_t sequences, sequence, heads, kv_heads, head_dim;
    uint8_t deterministic;
    uint8_t reserved[3];
    qe_quantize_target target; /* what QE_OP_ROPE_BACKWARD_QUANTIZE makes of dqkv, the same bits; neither operand nor
                                  retained codes: dqkv is the result */
} qe_args_attention_backward;

/* Is dqkv rotated back and quantized? And the op that would do it apart (qe_op_parts says it of all). */
int qe_attention_backward_quantizes(const qe_args_attention_backward *args);
qe_args_rope qe_attention_backward_rope(const qe_args_attention_backward *args);

typedef struct qe_args_swiglu {
    const void *gate_up;    /* activation [rows, 2 * ffn]: gate, then up */
    uint32_t rows, ffn;
    void *decoded_scratch;  /* host: fp32 [rows, ffn], unused when target.operand is set */
    qe_quantize_target target; /* [rows, ffn] */
} qe_args_swiglu;

typedef struct qe_args_swiglu_backward {
    const void *gate_up; /* activation [rows, 2 * ffn] */
    const void *dy;      /* activation [rows, ffn] */
    void *dgate_up;      /* [rows, 2 * ffn] scratch, activation, before rounding; not written where one pass does all */
    uint32_t rows, ffn;
    qe_quantize_target target; /* [rows, 2 * ffn] */
} qe_args_swiglu_backward;

typedef struct qe_args_cross_entropy {
    void *logits;           /* activation [T, vocab]; becomes dlogits * gradient_scale when `backward` */
    const int32_t *targets; /* [T]; a negative target is not counted */
    double *loss;           /* [1] sum over rows of -log p(target), fp64, rows in order */
    double *row_losses;     /* scratch [T]; only with operands `codes` */
    float gradient_scale;   /* 1 / tokens of the step */
    uint32_t rows, vocab;
    uint8_t backward;
    uint8_t reserved[3];
} qe_args_cross_entropy;

typedef struct qe_args_copy {
    const void *from;
    void *to;
    uint64_t bytes;
} qe_args_copy;

typedef struct qe_args_accumulate {
    const float *from; /* [count] */
    float *to;         /* [count] */
    uint64_t count;
} qe_args_accumulate;

enum { QE_NORM_PARTIALS = 1024 };

typedef struct qe_args_grad_norm {
    const float *grad;
    uint64_t count;
    double *sum; /* [1] sum of squares, fixed order that depends on `count` alone */
    double *partials; /* scratch [QE_NORM_PARTIALS]; only with operands `codes` */
} qe_args_grad_norm;

/* What the first guard that fired saw; `fired` is 0 while none has. Lives in device memory. */
typedef struct qe_guard_fault {
    uint64_t fired, launch, entry, expected, found;
} qe_guard_fault;

enum { QE_STAMP_MAX = 4 }; /* a forward acquires three slots */

typedef struct qe_args_stamp {
    uint64_t *words[QE_STAMP_MAX];
    uint32_t count;
    uint8_t reserved[4];
} qe_args_stamp;

typedef struct qe_args_tally {
    uint64_t *words; /* [count] each rises by one */
    uint32_t count;
    uint8_t reserved[4];
} qe_args_tally;

typedef struct qe_args_guard {
    const uint64_t *const *words; /* [count] witness words */
    const uint64_t *expected;     /* [count] */
    const uint64_t *launch;       /* who launched: goes into the fault */
    qe_guard_fault *fault;
    uint32_t count, first_entry;  /* entries are numbered from first_entry in the fault */
} qe_args_guard;

typedef struct qe_adamw { /* of one step; the same for all weights */
    float learning_rate, beta1, beta2, epsilon, weight_decay;
    float bias_correction1, bias_correction2; /* 1 - beta^step */
    float gradient_scale;                     /* clip coefficient, 1 when not clipped */
} qe_adamw;

typedef struct qe_args_adamw {
    float *weight;       /* [count] master */
    const float *grad;   /* [count] */
    float *moment1, *moment2;
    uint64_t count;
    const qe_adamw *step; /* read when the op runs: device memory */
    uint8_t decay;        /* weight decay applies (matrices), or not (gains) */
    uint8_t reserved[7];
    uint64_t *witness;    /* version of the weight, +1; NULL: not kept */
    const qe_guard_fault *fault; /* a guard that fired turns the commit into nothing; NULL: not asked */
    /* What the weight becomes is quantized at once, for the next step: delayed scaling with the scale as it is when the
     * op runs, both tensors of the target set. amax NULL: the key remembers it. key NULL: nothing is quantized. */
    uint32_t rows, columns;
    qe_quantize_target target;
    const uint64_t *scale_epoch;
    uint64_t *key; /* [QE_KEY_WORDS] */
} qe_args_adamw;

typedef struct qe_args_fold {
    qe_scale_state *const *states; /* [count] host's table, of states on the device; read when the op is submitted, or
                                      runs */
    uint32_t count;
    uint8_t reserved[4];
    const qe_recipe *recipe;     /* host's, read as the table is */
    const qe_guard_fault *fault; /* as for adamw */
} qe_args_fold;

typedef struct qe_args_transfer { /* QE_OP_SEND, QE_OP_RECV */
    void *channel;   /* struct qe_channel of comm.h: one directed edge */
    void *bytes_at;
    uint64_t bytes;
} qe_args_transfer;

typedef struct qe_args_delay { /* host only */
    uint64_t duration_ns;
    uint64_t *span_ns;   /* [2] the monotonic clock when it began and when it ended */
} qe_args_delay;

enum { QE_OP_RAW_WORDS = 25 }; /* the largest arguments fit: op_layout.c asserts it */

typedef union qe_op_args {
    uint64_t raw[QE_OP_RAW_WORDS]; /* first, so that an op made with designated initializers is 0 throughout */
    qe_args_embed embed;
    qe_args_embed_backward embed_backward;
    qe_args_norm norm;
    qe_args_norm_backward norm_backward;
    qe_args_quantize quantize;
    qe_args_quantize_weight quantize_weight;
    qe_args_linear linear;
    qe_args_linear_input_grad linear_input_grad;
    qe_args_linear_weight_grad linear_weight_grad;
    qe_args_rope rope;
    qe_args_linear_rope linear_rope;
    qe_args_attention attention;
    qe_args_attention_backward attention_backward;
    qe_args_swiglu swiglu;
    qe_args_swiglu_backward swiglu_backward;
    qe_args_cross_entropy cross_entropy;
    qe_args_copy copy;
    qe_args_accumulate accumulate;
    qe_args_grad_norm grad_norm;
    qe_args_adamw adamw;
    qe_args_fold fold;
    qe_args_transfer transfer;
    qe_args_stamp stamp;
    qe_args_tally tally;
    qe_args_guard guard;
    qe_args_delay delay;
} qe_op_args;

/* One op, ready to run. */
typedef struct qe_op {
    qe_op_kind kind;
    uint16_t layer;         /* model layer it belongs to; capture unit "layer" cuts where it changes */
    uint8_t per_microbatch; /* its arguments name the microbatch and not only its slots: it stays outside a graph that
                               serves every microbatch of a slot */
    uint8_t reserved[1];
    qe_op_args args;
} qe_op;
#ifdef __GNUC__
#pragma GCC diagnostic pop
#endif

/* Is the 8-byte word at `offset_bytes` of this kind's arguments an address (else it is a shape or a constant)? */
int qe_op_is_address(qe_op_kind kind, uint32_t offset_bytes);

/* "norm_quantize" ... */
const char *qe_op_name(qe_op_kind kind);

enum { QE_OP_PARTS_MAX = 2 };

/* Products and attention, forward and backward, may have a target: they are two ops in one, as a product with rope
 * behind it is. What each of the two would be apart, in order; the second reads what the first writes. The same bits,
 * however a backend runs it.
 * Ensures: returns 1 and the op itself where it is one thing, else 2. */
uint32_t qe_op_parts(const qe_op *op, qe_op parts_out[QE_OP_PARTS_MAX]);

/* As qe_op_name, with what its target adds: "linear_swiglu_quantize". */
const char *qe_op_title(const qe_op *op);

#ifdef __cplusplus
}
#endif
#endif
