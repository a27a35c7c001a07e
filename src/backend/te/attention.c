/* attention.c - see attention.h. */
#include "backend/te/attention.h"

#include <stdlib.h>
#include <string.h>

#include "backend/cuda/substitute.h"
#include "base/assert.h"

/* What a plan depends on. No holes: shapes are compared byte by byte. */
typedef struct shape {
    uint32_t sequences, sequence, heads, head_dim;
    uint32_t backward, deterministic;
} shape;

struct qe_te_attention_plan {
    qe_te_attention_plan *next;
    shape shape;
    void *workspace;
    uint64_t workspace_bytes;
};

static shape shape_of(const qe_op *op) {
    const qe_args_attention *forward = &op->args.attention;
    const qe_args_attention_backward *backward = &op->args.attention_backward;
    if (op->kind == QE_OP_ATTENTION) /* its forward has one order */
        return (shape){forward->sequences, forward->sequence, forward->heads, forward->head_dim, 0, 0};
    return (shape){backward->sequences, backward->sequence, backward->heads, backward->head_dim, 1,
                   backward->deterministic};
}

/* Transformer Engine refuses the backward of other lengths in graphs, because cuDNN before 9.15.1 gets it wrong; here
 * eager and captured run the same, whatever the version. */
enum { WHOLE_SEQUENCE = 128 };

static int takes_shape(const shape *s, uint32_t kv_heads) {
    return s->heads == kv_heads && (s->head_dim == 64 || s->head_dim == 128) && s->sequence % WHOLE_SEQUENCE == 0 &&
           s->sequences < QE_TE_SEQUENCES_MAX;
}

int qe_te_attention_takes(const qe_op *op) {
    const shape s = shape_of(op);
    if (op->kind == QE_OP_ATTENTION) return takes_shape(&s, op->args.attention.kv_heads);
    return op->args.attention_backward.out != NULL && takes_shape(&s, op->args.attention_backward.kv_heads);
}

static qe_te_attention arguments_of(const qe_te_context *te, const qe_te_attention_plan *plan) {
    const shape *s = &plan->shape;
    return (qe_te_attention){.state = te->attention_state, .workspace = plan->workspace,
                             .workspace_bytes = plan->workspace_bytes, .sequences = s->sequences,
                             .sequence = s->sequence, .heads = s->heads, .head_dim = s->head_dim,
                             .backward = (uint8_t)s->backward, .deterministic = (uint8_t)s->deterministic};
}

static qe_te_attention_plan *plan_find(const qe_te_context *te, const shape *wanted) {
    qe_te_attention_plan *plan = te->attention;
    while (plan != NULL && memcmp(&plan->shape, wanted, sizeof *wanted) != 0) plan = plan->next;
    return plan;
}

static void plan_free(const qe_te_context *te, qe_te_attention_plan *plan) {
    if (plan->workspace != NULL) qe_cuda_memories.release(te->device, plan->workspace);
    free(plan);
}

/* Cumulative lengths and a state of random numbers, which nothing reads: no sequence is padded, nothing is dropped. */
static qe_status state_take(qe_te_context *te, qe_error *error_out) {
    if (te->attention_state != NULL) return QE_OK;
    return qe_cuda_memories.alloc(te->device, QE_TE_ATTENTION_STATE_BYTES, &te->attention_state, error_out);
}

static qe_status plan_make(qe_te_context *te, const shape *wanted, qe_error *error_out) {
    QE_TRY(state_take(te, error_out));
    qe_te_attention_plan *plan = calloc(1, sizeof *plan);
    if (plan == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a plan of attention");
    plan->shape = *wanted;
    const qe_te_attention arguments = arguments_of(te, plan);
    qe_status status = qe_te_attention_plan_build(te->library, &arguments, &plan->workspace_bytes, error_out);
    if (status == QE_OK)
        status = qe_cuda_memories.alloc(te->device, plan->workspace_bytes, &plan->workspace, error_out);
    if (status != QE_OK) {
        plan_free(te, plan);
        return status;
    }
    plan->next = te->attention;
    te->attention = plan;
    return QE_OK;
}

qe_status qe_te_attention_prepare(qe_te_context *te, const qe_op *op, qe_error *error_out) {
    const shape wanted = shape_of(op);
    return plan_find(te, &wanted) != NULL ? QE_OK : plan_make(te, &wanted, error_out);
}

qe_status qe_te_attention_record(const qe_te_context *te, qe_error *error_out) {
    for (const qe_te_attention_plan *plan = te->attention; plan != NULL; plan = plan->next) {
        qe_te_attention arguments = arguments_of(te, plan);
        uint64_t bytes = 0;
        arguments.workspace = NULL; /* builds only */
        QE_TRY(qe_te_attention_plan_build(te->library, &arguments, &bytes, error_out));
        if (bytes > plan->workspace_bytes)
            return qe_error_set(error_out, QE_ERROR_DEVICE, NULL,
                                "two plans for one shape of attention want %llu and %llu bytes of workspace",
                                (unsigned long long)plan->workspace_bytes, (unsigned long long)bytes);
    }
    return QE_OK;
}

static qe_status forward_queue(const qe_te_context *te, qe_te_attention *arguments, const qe_args_attention *args,
                               cudaStream_t stream, qe_error *error_out) {
    arguments->qkv = args->qkv;
    arguments->out = args->out;
    arguments->lse = args->lse;
    return qe_te_attention_run(te->library, arguments, stream, error_out);
}

static qe_status backward_queue(const qe_te_context *te, qe_te_attention *arguments,
                                const qe_args_attention_backward *args, cudaStream_t stream, qe_error *error_out) {
    arguments->qkv = args->qkv;
    arguments->out = (void *)(uintptr_t)args->out;
    arguments->lse = (float *)(uintptr_t)args->lse;
    arguments->dout = args->dout;
    arguments->dqkv = args->dqkv;
    return qe_te_attention_run(te->library, arguments, stream, error_out);
}

qe_status qe_te_attention_queue(qe_te_context *te, const qe_op *op, cudaStream_t stream, qe_error *error_out) {
    const shape wanted = shape_of(op);
    const qe_te_attention_plan *plan = plan_find(te, &wanted);
    if (plan == NULL) {
        enum cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
        if (cudaStreamIsCapturing(stream, &capturing) != cudaSuccess || capturing != cudaStreamCaptureStatusNone)
            return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "%s is recorded and was not prepared",
                                qe_op_name(op->kind));
        QE_TRY(plan_make(te, &wanted, error_out));
        plan = plan_find(te, &wanted);
    }
    qe_te_attention arguments = arguments_of(te, plan);
    return op->kind == QE_OP_ATTENTION
               ? forward_queue(te, &arguments, &op->args.attention, stream, error_out)
               : backward_queue(te, &arguments, &op->args.attention_backward, stream, error_out);
}

void qe_te_attention_free(qe_te_context *te) {
    for (qe_te_attention_plan *plan = te->attention, *next; plan != NULL; plan = next) {
        next = plan->next;
        plan_free(te, plan);
    }
    te->attention = NULL;
    if (te->attention_state != NULL) qe_cuda_memories.release(te->device, te->attention_state);
}
