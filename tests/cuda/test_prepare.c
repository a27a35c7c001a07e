/* test_prepare.c - what an op cannot do on a device is told when it is prepared, not by the step that runs into it.
 * Needs no GPU: launchers and the calls of the runtime that the file under test makes are replaced here. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "backend/cuda/device.h"
#include "backend/cuda/fused.h"
#include "base/assert.h"

/* --- a device that does as it is told ------------------------------------------------------------------------- */

/* What the next launch says, how the runtime remembers it, and how captures end. */
static struct {
    qe_status queued;
    cudaError_t last, ended;
    int launches, graphs;
    const char *cause;   /* what launchers of products and attention say; NULL: nothing */
    int fuses, is_fused; /* there is a kernel for ops of two parts; it was chosen */
    char order[256]; /* of what was launched or asked for, a word each */
} now;

static void note(const char *word) {
    const size_t length = strlen(now.order);
    (void)snprintf(now.order + length, sizeof now.order - length, "%s ", word);
}

static qe_status launch(const char *word) {
    note(word);
    now.launches++;
    return now.queued;
}

static qe_status product_launch(const char *word, qe_error *error_out) {
    const qe_status status = launch(word);
    if (status == QE_OK || now.cause == NULL) return status;
    return qe_error_set(error_out, QE_ERROR_DEVICE, "another way", "%s", now.cause);
}

#define LAUNCHER(op, args_type) \
    qe_status qe_cuda_##op(const args_type *args, cudaStream_t stream) { return (void)args, (void)stream, launch(#op); }
LAUNCHER(accumulate, qe_args_accumulate)
LAUNCHER(adamw, qe_args_adamw)
LAUNCHER(cross_entropy, qe_args_cross_entropy)
LAUNCHER(embed, qe_args_embed)
LAUNCHER(embed_backward, qe_args_embed_backward)
LAUNCHER(fold, qe_args_fold)
LAUNCHER(grad_norm, qe_args_grad_norm)
LAUNCHER(guard, qe_args_guard)
LAUNCHER(norm, qe_args_norm)
LAUNCHER(norm_backward, qe_args_norm_backward)
LAUNCHER(quantize, qe_args_quantize)
LAUNCHER(quantize_weight, qe_args_quantize_weight)
LAUNCHER(rope, qe_args_rope)
LAUNCHER(rope_backward_quantize, qe_args_rope)
LAUNCHER(stamp, qe_args_stamp)
LAUNCHER(swiglu_backward_quantize, qe_args_swiglu_backward)
LAUNCHER(swiglu_quantize, qe_args_swiglu)
LAUNCHER(tally, qe_args_tally)

qe_status qe_cuda_copy(const void *from, void *to, uint64_t bytes, cudaStream_t stream) {
    return (void)from, (void)to, (void)bytes, (void)stream, launch("copy");
}
qe_status qe_cuda_delay(uint64_t nanoseconds, cudaStream_t stream) {
    return (void)nanoseconds, (void)stream, launch("delay");
}
qe_status qe_cuda_channel_prepare(qe_channel *channel, uint64_t bytes, cudaStream_t aside, qe_error *error_out) {
    return (void)channel, (void)bytes, (void)aside, (void)error_out, QE_OK;
}
int qe_cuda_fused_is(qe_op_kind kind) {
    return kind == QE_OP_LINEAR || kind == QE_OP_LINEAR_INPUT_GRAD || kind == QE_OP_LINEAR_ROPE;
}
uint32_t qe_cuda_gemm_choices(const qe_cuda_gemm *gemm, const qe_cuda_choice **choices_out) {
    return (void)gemm, *choices_out = NULL, 0;
}
qe_status qe_cuda_gemm_prepare(qe_cuda_gemm *gemm, const qe_op *op, int tune, qe_error *error_out) {
    return (void)gemm, (void)op, (void)tune, (void)error_out, note("choose"), QE_OK;
}
qe_status qe_cuda_gemm_run(qe_cuda_gemm *gemm, const qe_op *op, cudaStream_t stream, qe_error *error_out) {
    return (void)gemm, (void)stream, product_launch(qe_op_name(op->kind), error_out);
}
qe_cuda_fused *qe_cuda_gemm_fused(const qe_cuda_gemm *gemm) { return (void)gemm, NULL; }
/* Not in place, and not over the end of the operand. */
enum { OVER_THE_END = 1 << 20 };
int qe_cuda_fused_fits(const qe_cuda_fused *fused, const qe_op *op) {
    const char *x = op->args.linear.x.codes, *codes = op->args.linear.target.operand.codes;
    return (void)fused, now.fuses && (op->kind != QE_OP_LINEAR || (codes != x && codes != x + OVER_THE_END));
}
qe_status qe_cuda_fused_prepare(qe_cuda_fused *fused, const qe_op *op, const qe_fused_apart *apart,
                                const qe_cuda_choice **chosen_out, qe_error *error_out) {
    (void)fused, (void)error_out;
    *chosen_out = NULL;
    now.is_fused = qe_cuda_fused_fits(fused, op);
    return apart ? apart->queue(apart->context, op, NULL) : QE_OK;
}
int qe_cuda_fused_takes(const qe_cuda_fused *fused, const qe_op *op) {
    return now.is_fused && qe_cuda_fused_fits(fused, op);
}
qe_status qe_cuda_fused_run(const qe_cuda_fused *fused, const qe_op *op, cudaStream_t stream, qe_error *error_out) {
    return (void)fused, (void)stream, product_launch(qe_op_title(op), error_out);
}
uint64_t qe_cuda_attention_bytes(const qe_cuda_attention *attention) { return (void)attention, 0; }
uint32_t qe_cuda_attention_choices(const qe_cuda_attention *attention, const qe_cuda_choice **choices_out) {
    return (void)attention, *choices_out = NULL, 0;
}
qe_status qe_cuda_attention_prepare(qe_cuda_attention *attention, const qe_op *op, int tune, qe_error *error_out) {
    return (void)attention, (void)op, (void)tune, (void)error_out, note("choose"), QE_OK;
}
qe_status qe_cuda_attention_run(qe_cuda_attention *attention, const qe_op *op, cudaStream_t stream,
                                qe_error *error_out) {
    return (void)attention, (void)stream, product_launch(qe_op_title(op), error_out);
}
qe_status qe_cuda_choices_write(const qe_cuda_gemm *gemm, const qe_cuda_attention *attention, const char *path,
                                qe_error *error_out) {
    return (void)gemm, (void)attention, (void)path, (void)error_out, QE_OK;
}

const char *cudaGetErrorString(cudaError_t code) { return code == cudaSuccess ? "no error" : "an error"; }
cudaError_t cudaGetLastError(void) {
    cudaError_t last = now.last;
    now.last = cudaSuccess;
    return last;
}
cudaError_t cudaMemGetInfo(size_t *free_out, size_t *total_out) {
    *free_out = *total_out = 0;
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return (void)to, (void)from, (void)bytes, (void)kind, (void)stream, cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *at) {
    return (void)attributes, (void)at, cudaErrorInvalidValue;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    return (void)stream, (void)mode, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph_out) {
    (void)stream;
    *graph_out = now.ended == cudaSuccess ? malloc(1) : NULL;
    now.graphs += *graph_out != NULL;
    return now.ended;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable_out, cudaGraph_t graph, unsigned long long flags) {
    (void)graph, (void)flags;
    *executable_out = malloc(1);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return free(executable), cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    now.graphs--;
    return free(graph), cudaSuccess;
}
qe_status qe_cuda_check(cudaError_t code, const char *what, qe_error *error_out) {
    if (code == cudaSuccess) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_DEVICE, NULL, "%s: %s", what, cudaGetErrorString(code));
}

/* --- what is told ---------------------------------------------------------------------------------------------- */

static int failed, checked;

/* Twice: what was refused once is not taken for ready. */
static void expect(const char *name, qe_status queued, cudaError_t last, cudaError_t ended, qe_status wanted,
                   const char *words, const char *remedy) {
    qe_device device = {0};
    const qe_op op = {.kind = QE_OP_QUANTIZE};
    for (int turn = 0; turn < 2; turn++) {
        qe_error error = {0};
        now.queued = queued, now.last = last, now.ended = ended;
        const qe_status status = qe_cuda_op_prepare(&device, &op, &error);
        const int told = strstr(error.message, words) != NULL && strstr(error.remedy, remedy) != NULL;
        const int good = status == wanted && now.graphs == 0 && (status == QE_OK || told);
        checked++;
        failed += !good;
        if (!good) printf("FAILED %s: %s: %s (%s)\n", name, qe_status_name(status), error.message, error.remedy);
    }
    free(device.loaded);
}

static qe_op with_target(qe_op_kind kind) {
    static _Alignas(16) char places[QE_OP_RAW_WORDS][16];
    qe_op op = {.kind = kind};
    for (uint32_t i = 0; i < QE_OP_RAW_WORDS; i++)
        if (qe_op_is_address(kind, i * 8)) op.args.raw[i] = (uint64_t)(uintptr_t)places[i];
    return op;
}

/* What a kernel is refused for reaches who prepares it, and who queues it; where there are no words, some do. */
static void expect_cause(qe_op_kind kind, int fuses, const char *cause, const char *wanted) {
    qe_device device = {0};
    const qe_op op = with_target(kind);
    qe_error error = {0};
    now.fuses = fuses, now.is_fused = 0, now.cause = cause;
    now.queued = QE_ERROR_DEVICE, now.last = now.ended = cudaSuccess;
    const qe_status prepared = qe_cuda_op_prepare(&device, &op, &error);
    const int clean = device.failure.status == QE_OK;
    const qe_status queued = qe_cuda_op_queue(&device, &op, NULL);
    const int told = strstr(error.message, wanted) != NULL && strstr(device.failure.message, wanted) != NULL &&
                     (cause == NULL || (strcmp(error.remedy, "another way") == 0 &&
                                        strcmp(device.failure.remedy, "another way") == 0));
    const int good = prepared == QE_ERROR_DEVICE && queued == QE_ERROR_DEVICE && clean && told;
    checked++;
    failed += !good;
    if (!good) printf("FAILED a cause: \"%s\", \"%s\"\n", error.message, device.failure.message);
    now.fuses = 0, now.cause = NULL;
    free(device.loaded);
}

/* Kernels of like ops are loaded once. */
static void expect_once(void) {
    qe_device device = {0};
    const qe_op op = {.kind = QE_OP_QUANTIZE};
    qe_error error = {0};
    now.queued = QE_OK, now.last = now.ended = cudaSuccess, now.launches = 0;
    for (int turn = 0; turn < 3; turn++) QE_ASSERT(qe_cuda_op_prepare(&device, &op, &error) == QE_OK);
    checked++;
    failed += now.launches != 1;
    free(device.loaded);
}

/* --- ops of two parts ------------------------------------------------------------------------------------------ */

static int takes_products(const qe_op *op) {
    QE_ASSERT(strcmp(qe_op_title(op), qe_op_name(op->kind)) == 0); /* asked about parts alone */
    return op->kind == QE_OP_LINEAR || op->kind == QE_OP_LINEAR_INPUT_GRAD || op->kind == QE_OP_ATTENTION;
}
static qe_status other_prepare(void *context, const qe_op *op, qe_error *error_out) {
    return (void)context, (void)op, (void)error_out, note("other-choose"), QE_OK;
}
static qe_status other_queue(void *context, const qe_op *op, cudaStream_t stream, qe_error *error_out) {
    return (void)context, (void)stream, (void)error_out, note("other"), launch(qe_op_name(op->kind));
}

/* Both parts are made ready, and queued in order; a substitute is given its parts, or an op is whole here. */
static void expect_parts_on(qe_device device, qe_op_kind kind, int substituted, const char *wanted) {
    qe_error error = {0};
    const qe_op op = with_target(kind);
    if (substituted) {
        device.substitute.takes = takes_products;
        device.substitute.prepare = other_prepare;
        device.substitute.queue = other_queue;
    }
    now.queued = QE_OK, now.last = now.ended = cudaSuccess, now.order[0] = 0, now.is_fused = 0;
    const qe_status status = qe_cuda_op_prepare(&device, &op, &error);
    const int good = status == QE_OK && strcmp(now.order, wanted) == 0;
    checked++;
    failed += !good;
    if (!good) printf("FAILED %s: \"%s\", not \"%s\"\n", qe_op_title(&op), now.order, wanted);
    free(device.loaded);
}

static void expect_parts(qe_op_kind kind, int substituted, const char *wanted) {
    const qe_device device = {0};
    expect_parts_on(device, kind, substituted, wanted);
}

/* A kernel that does both parts is raced against them where choices are tuned; a file that says nothing of it, and a
 * substitute, leave them apart. */
static void expect_fused(void) {
    const qe_device plain = {0}, tuned = {.tune = 1}, honours = {.tune = 1, .honours = 1};
    now.fuses = 1;
    expect_parts_on(plain, QE_OP_LINEAR, 0, "choose linear_swiglu_quantize ");
    expect_parts_on(plain, QE_OP_LINEAR_INPUT_GRAD, 0, "choose linear_input_grad_swiglu_quantize ");
    expect_parts_on(plain, QE_OP_LINEAR_ROPE, 0, "choose linear_rope ");
    expect_parts_on(tuned, QE_OP_LINEAR_ROPE, 0, "choose linear rope linear_rope ");
    expect_parts_on(honours, QE_OP_LINEAR_ROPE, 0, "choose linear rope ");
    expect_parts_on(plain, QE_OP_LINEAR_ROPE, 1, "other-choose other linear rope ");
    expect_parts_on(tuned, QE_OP_LINEAR, 0, "choose linear swiglu_quantize linear_swiglu_quantize ");
    expect_parts_on(honours, QE_OP_LINEAR, 0, "choose linear swiglu_quantize ");
    expect_parts_on(plain, QE_OP_LINEAR, 1, "other-choose other linear swiglu_quantize ");
    now.fuses = 0;
}

static void prepare_expecting(qe_device *device, const qe_op *op, const char *what, const char *wanted) {
    qe_error error = {0};
    now.order[0] = 0;
    const int good = qe_cuda_op_prepare(device, op, &error) == QE_OK && strcmp(now.order, wanted) == 0;
    checked++;
    failed += !good;
    if (!good) printf("FAILED %s: \"%s\", not \"%s\"\n", what, now.order, wanted);
}

/* What was made ready for one op is not taken to be ready for another, whose operands lie so that other kernels run:
 * one in the other's place, off whole sixteens, or nowhere. Elsewhere alone makes no difference. */
static void expect_by_place(void) {
    qe_device device = {0};
    const qe_op fits = with_target(QE_OP_LINEAR);
    qe_op in_place = fits, over = fits, unaligned = fits, moved = fits, evaluates = fits;
    in_place.args.linear.target.operand.codes = fits.args.linear.x.codes;
    over.args.linear.target.operand.codes = (char *)fits.args.linear.x.codes + OVER_THE_END;
    unaligned.args.linear.y = (char *)fits.args.linear.y + 2;
    evaluates.args.linear.target.retained = (qe_qtensor){0};
    for (uint32_t i = 0; i < QE_OP_RAW_WORDS; i++)
        if (qe_op_is_address(fits.kind, i * 8)) moved.args.raw[i] += 4096;
    now.queued = QE_OK, now.last = now.ended = cudaSuccess, now.is_fused = 0, now.fuses = 1;
    prepare_expecting(&device, &in_place, "in place", "choose linear swiglu_quantize ");
    prepare_expecting(&device, &fits, "apart", "choose linear_swiglu_quantize ");
    prepare_expecting(&device, &moved, "moved", "");
    prepare_expecting(&device, &over, "over the end", "choose linear swiglu_quantize ");
    prepare_expecting(&device, &unaligned, "unaligned", "choose linear_swiglu_quantize ");
    prepare_expecting(&device, &evaluates, "one plane", "choose linear_swiglu_quantize ");
    prepare_expecting(&device, &in_place, "in place again", "");
    now.fuses = 0;
    free(device.loaded);
}

int main(void) {
    expect("a launch", QE_OK, cudaSuccess, cudaSuccess, QE_OK, "", "");
    expect("an error from before", QE_OK, cudaErrorInvalidDevice, cudaSuccess, QE_OK, "", "");
    expect("too many blocks", QE_ERROR_DEVICE, cudaErrorInvalidConfiguration, cudaSuccess, QE_ERROR_UNSUPPORTED,
           "more blocks than a launch may have", "fewer tokens");
    expect("too many blocks, by our own count", QE_ERROR_LIMIT, cudaSuccess, cudaSuccess, QE_ERROR_UNSUPPORTED,
           "more blocks than a launch may have", "fewer tokens");
    expect("a launch that fails", QE_ERROR_DEVICE, cudaErrorInvalidValue, cudaSuccess, QE_ERROR_DEVICE, "an error", "");
    expect("a library that refuses", QE_ERROR_DEVICE, cudaSuccess, cudaSuccess, QE_ERROR_DEVICE, "its library", "");
    expect("a shape that is not computed", QE_ERROR_ARGUMENT, cudaSuccess, cudaSuccess, QE_ERROR_UNSUPPORTED,
           "cannot compute", "multiples of 16");
    expect("a capture that fails", QE_OK, cudaSuccess, cudaErrorStreamCaptureInvalidated, QE_ERROR_DEVICE, "an error",
           "");
    static const qe_op_kind products[] = {QE_OP_LINEAR, QE_OP_LINEAR_INPUT_GRAD, QE_OP_LINEAR_ROPE, QE_OP_ATTENTION};
    for (int i = 0; i < 8; i++) {
        expect_cause(products[i / 2], i % 2, "the driver does not like it", "the driver does not like it");
        expect_cause(products[i / 2], i % 2, NULL, "could not be queued: its library refused it");
    }
    expect_once();
    expect_parts(QE_OP_LINEAR, 0, "choose linear swiglu_quantize ");
    expect_parts(QE_OP_LINEAR_ROPE, 0, "choose linear rope ");
    expect_parts(QE_OP_LINEAR_INPUT_GRAD, 0, "choose linear_input_grad swiglu_backward_quantize ");
    expect_parts(QE_OP_ATTENTION, 0, "choose attention_quantize ");
    expect_parts(QE_OP_ATTENTION_BACKWARD, 0, "choose attention_backward_rope_quantize ");
    expect_parts(QE_OP_LINEAR, 1, "other-choose other linear swiglu_quantize ");
    expect_parts(QE_OP_LINEAR_INPUT_GRAD, 1, "other-choose other linear_input_grad swiglu_backward_quantize ");
    expect_parts(QE_OP_ATTENTION, 1, "other-choose other attention quantize ");
    expect_parts(QE_OP_ATTENTION_BACKWARD, 1, "choose attention_backward_rope_quantize ");
    expect_fused();
    expect_by_place();
    printf("%d checks, %d failed\n", checked, failed);
    return failed > 0;
}
