/* run.c - from an op to its kernels. */
#include <stdlib.h>
#include "backend/cuda/device.h"
#include "backend/cuda/fused.h"
#include "base/assert.h"

/* Asking costs a fraction of a launch. */
static int is_of_device(const void *address) {
    struct cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, address) == cudaSuccess) return attributes.type == cudaMemoryTypeDevice;
    (void)cudaGetLastError();
    return 0;
}

static int is_within_device(const qe_args_copy *args) {
    return is_of_device(args->from) && is_of_device(args->to);
}

static qe_status copy_queue(const qe_args_copy *args, cudaStream_t stream) {
    if (args->bytes == 0) return QE_OK;
    if (is_within_device(args))
        return qe_cuda_copy(args->from, args->to, args->bytes, stream);
    return cudaMemcpyAsync(args->to, args->from, args->bytes, cudaMemcpyDefault, stream) == cudaSuccess
               ? QE_OK
               : QE_ERROR_DEVICE;
}

static qe_status kernel_queue(const qe_op *op, cudaStream_t stream) {
    const qe_op_args *args = &op->args;
    switch (op->kind) {
        case QE_OP_EMBED: return qe_cuda_embed(&args->embed, stream);
        case QE_OP_EMBED_BACKWARD: return qe_cuda_embed_backward(&args->embed_backward, stream);
        case QE_OP_NORM:
        case QE_OP_NORM_QUANTIZE: return qe_cuda_norm(&args->norm, stream);
        case QE_OP_NORM_BACKWARD: return qe_cuda_norm_backward(&args->norm_backward, stream);
        case QE_OP_QUANTIZE: return qe_cuda_quantize(&args->quantize, stream);
        case QE_OP_QUANTIZE_WEIGHT: return qe_cuda_quantize_weight(&args->quantize_weight, stream);
        case QE_OP_ROPE: return qe_cuda_rope(&args->rope, stream);
        case QE_OP_ROPE_BACKWARD_QUANTIZE: return qe_cuda_rope_backward_quantize(&args->rope, stream);
        case QE_OP_SWIGLU_QUANTIZE: return qe_cuda_swiglu_quantize(&args->swiglu, stream);
        case QE_OP_SWIGLU_BACKWARD_QUANTIZE: return qe_cuda_swiglu_backward_quantize(&args->swiglu_backward, stream);
        case QE_OP_CROSS_ENTROPY: return qe_cuda_cross_entropy(&args->cross_entropy, stream);
        case QE_OP_COPY: return copy_queue(&args->copy, stream);
        case QE_OP_ACCUMULATE: return qe_cuda_accumulate(&args->accumulate, stream);
        case QE_OP_GRAD_NORM: return qe_cuda_grad_norm(&args->grad_norm, stream);
        case QE_OP_ADAMW: return qe_cuda_adamw(&args->adamw, stream);
        case QE_OP_FOLD: return qe_cuda_fold(&args->fold, stream);
        case QE_OP_STAMP: return qe_cuda_stamp(&args->stamp, stream);
        case QE_OP_TALLY: return qe_cuda_tally(&args->tally, stream);
        case QE_OP_GUARD: return qe_cuda_guard(&args->guard, stream);
        default: return QE_ERROR_ARGUMENT;
    }
}

static int is_substituted(const qe_device *device, const qe_op *op) {
    return device->substitute.takes != NULL && device->substitute.takes(op);
}

/* On failure *error_out may hold words; what has none is told by who asked. */
static qe_status part_queue(qe_device *device, const qe_op *op, cudaStream_t stream, qe_error *error_out) {
    if (is_substituted(device, op))
        return device->substitute.queue(device->substitute.context, op, stream, error_out);
    switch (op->kind) {
        case QE_OP_LINEAR:
        case QE_OP_LINEAR_INPUT_GRAD:
        case QE_OP_LINEAR_WEIGHT_GRAD: return qe_cuda_gemm_run(device->gemm, op, stream, error_out);
        case QE_OP_ATTENTION:
        case QE_OP_ATTENTION_BACKWARD: return qe_cuda_attention_run(device->attention, op, stream, error_out);
        default: return kernel_queue(op, stream);
    }
}

/* --- ops of two parts -------------------------------------------------------------------------------------------- */

/* Does one pass of this room do both parts? The others are queued one behind the other. The same answer in every mode:
 * it depends on shapes, on which addresses are NULL and whose bytes overlap, and on what was chosen. */
static int takes_whole(const qe_device *device, const qe_op *op) {
    switch (op->kind) {
        case QE_OP_ATTENTION:
        case QE_OP_ATTENTION_BACKWARD: return 1; /* attention.cpp knows which of its kernels quantize */
        default: return qe_cuda_fused_takes(qe_cuda_gemm_fused(device->gemm), op);
    }
}

static qe_status whole_queue(qe_device *device, const qe_op *op, cudaStream_t stream, qe_error *error_out) {
    QE_ASSERT(takes_whole(device, op));
    if (qe_cuda_fused_is(op->kind)) return qe_cuda_fused_run(qe_cuda_gemm_fused(device->gemm), op, stream, error_out);
    return qe_cuda_attention_run(device->attention, op, stream, error_out);
}

static int any_substituted(const qe_device *device, const qe_op *op) {
    qe_op parts[QE_OP_PARTS_MAX];
    const uint32_t count = qe_op_parts(op, parts);
    for (uint32_t i = 0; i < count; i++)
        if (is_substituted(device, &parts[i])) return 1;
    return 0;
}

static qe_status parts_queue(qe_device *device, const qe_op *op, cudaStream_t stream, qe_error *error_out) {
    qe_op parts[QE_OP_PARTS_MAX];
    const uint32_t count = qe_op_parts(op, parts);
    for (uint32_t i = 0; i < count; i++) QE_TRY(part_queue(device, &parts[i], stream, error_out));
    return QE_OK;
}

static qe_status op_queue(qe_device *device, const qe_op *op, cudaStream_t stream, qe_error *error_out) {
    qe_op parts[QE_OP_PARTS_MAX];
    if (qe_op_parts(op, parts) > 1 && takes_whole(device, op) && !any_substituted(device, op))
        return whole_queue(device, op, stream, error_out);
    return parts_queue(device, op, stream, error_out);
}

/* SplitMix64: delays only have to differ. */
static uint64_t next_delay_ns(qe_device *device) {
    uint64_t z = device->delay_state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (z ^ z >> 31) % (device->delay_max_ns + 1);
}

qe_status qe_cuda_op_queue(qe_device *device, const qe_op *op, cudaStream_t stream) {
    qe_status status = QE_OK;
    qe_error *first = device->failure.status == QE_OK ? &device->failure : NULL;
    if (device->delay_max_ns > 0) status = qe_cuda_delay(next_delay_ns(device), stream);
    if (status == QE_OK) status = op_queue(device, op, stream, first);
    if (status == QE_OK || device->failure.status != QE_OK) return status;
    cudaError_t code = cudaGetLastError();
    return qe_error_set(&device->failure, QE_ERROR_DEVICE, NULL, "%s could not be queued: %s", qe_op_name(op->kind),
                        code == cudaSuccess ? "its library refused it" : cudaGetErrorString(code));
}

/* A shape that was not chosen before: told to the file, or refused by what the file was to say. */
static qe_status choice_tell(const qe_device *device, const qe_cuda_choice *chosen, qe_error *error_out) {
    if (device->choices_path == NULL) return QE_OK;
    if (!device->honours)
        return qe_cuda_choices_write(device->gemm, device->attention, device->choices_path, error_out);
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "use the model that the file was made for, or another file",
                        "%s names no algorithm for %s", device->choices_path, chosen->key);
}

static qe_status product_prepare(qe_device *device, const qe_op *op, qe_error *error_out) {
    const qe_cuda_choice *choices;
    uint32_t before = qe_cuda_gemm_choices(device->gemm, &choices);
    QE_TRY(qe_cuda_gemm_prepare(device->gemm, op, device->tune && !device->honours, error_out));
    uint32_t after = qe_cuda_gemm_choices(device->gemm, &choices);
    return after == before ? QE_OK : choice_tell(device, &choices[after - 1], error_out);
}

static qe_status attention_prepare(qe_device *device, const qe_op *op, qe_error *error_out) {
    const qe_cuda_choice *choices;
    uint32_t before = qe_cuda_attention_choices(device->attention, &choices);
    QE_TRY(qe_cuda_attention_prepare(device->attention, op, device->tune && !device->honours, error_out));
    uint32_t after = qe_cuda_attention_choices(device->attention, &choices);
    return after == before ? QE_OK : choice_tell(device, &choices[after - 1], error_out);
}

static int is_address(const qe_op *op, uint32_t word) {
    return qe_op_is_address(op->kind, word * (uint32_t)sizeof op->args.raw[0]);
}

/* What kernels are chosen by of where bytes lie: whether there are any, whether they begin at whole sixteens, and
 * whether another operand begins there too. */
static uint64_t address_likeness(const qe_op *op, uint32_t word) {
    enum { NONE, UNALIGNED, ALIGNED, CLASSES };
    const uint64_t at = op->args.raw[word];
    uint32_t first = 0;
    if (at == 0) return NONE;
    while (!is_address(op, first) || op->args.raw[first] != at) first++;
    return first * CLASSES + (at % 16 == 0 ? ALIGNED : UNALIGNED);
}

/* Of an op of two parts: whether one kernel could do it, which also depends on whose bytes overlap. */
static int may_be_whole(const qe_device *device, const qe_op *op) {
    qe_op parts[QE_OP_PARTS_MAX];
    if (!qe_cuda_fused_is(op->kind)) return 0;
    return qe_op_parts(op, parts) > 1 && qe_cuda_fused_fits(qe_cuda_gemm_fused(device->gemm), op);
}

/* Everything of an op but just where its bytes lie: ops that are alike run the same kernels. A copy runs one only
 * within the device. */
static uint64_t likeness(const qe_device *device, const qe_op *op) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325) ^ (uint64_t)op->kind; /* FNV-1a, by words */
    if (op->kind == QE_OP_COPY && is_within_device(&op->args.copy)) hash++;
    if (may_be_whole(device, op)) hash++;
    for (uint32_t i = 0; i < QE_OP_RAW_WORDS; i++) {
        const uint64_t word = is_address(op, i) ? address_likeness(op, i) : op->args.raw[i];
        hash = (hash ^ word) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static int is_loaded(const qe_device *device, uint64_t hash) {
    for (uint32_t i = 0; i < device->loaded_count; i++)
        if (device->loaded[i] == hash) return 1;
    return 0;
}

static qe_status note_loaded(qe_device *device, uint64_t hash, qe_error *error_out) {
    enum { FIRST = 64 };
    if (device->loaded_count == device->loaded_capacity) {
        uint32_t wanted = device->loaded_capacity == 0 ? FIRST : 2 * device->loaded_capacity;
        uint64_t *grown = realloc(device->loaded, wanted * sizeof *grown);
        if (grown == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to prepare an op");
        device->loaded = grown;
        device->loaded_capacity = wanted;
    }
    device->loaded[device->loaded_count++] = hash;
    return QE_OK;
}

/* In the words of what failed. */
static qe_status words_take(const qe_error *words, qe_error *error_out) {
    if (error_out != NULL) *error_out = *words;
    return words->status;
}

/* What a step would run into is told before it begins. */
static qe_status launch_refused(const qe_op *op, qe_status queued, cudaError_t launched, qe_error *error_out) {
    const char *name = qe_op_name(op->kind);
    if (queued == QE_ERROR_ARGUMENT)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "choose sizes, and addresses, that are multiples of 16",
                            "the device cannot compute %s of this shape, or where its operands lie", name);
    if (queued == QE_ERROR_LIMIT || launched == cudaErrorInvalidConfiguration)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "use fewer tokens in a microbatch, or smaller sizes",
                            "%s of this shape needs more blocks than a launch may have", name);
    if (launched != cudaSuccess) return qe_cuda_check(launched, name, error_out);
    return qe_error_set(error_out, queued, NULL, "%s could not be queued: its library refused it", name);
}

/* A kernel that is used for the first time is loaded, and that may wait for everything that runs, a rank that waits for
 * a message among it. So each is put into a graph that is made ready and never run. */
static qe_status kernels_load(qe_device *device, const qe_op *op, qe_error *error_out) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable = NULL;
    qe_error words = {.status = QE_OK};
    uint64_t hash = likeness(device, op);
    if (is_loaded(device, hash)) return QE_OK;
    QE_TRY(qe_cuda_check(cudaStreamBeginCapture(device->aside, cudaStreamCaptureModeThreadLocal), "preparing an op",
                         error_out));
    qe_status queued = op_queue(device, op, device->aside, &words);
    cudaError_t launched = cudaGetLastError(); /* the end of the capture only says that something failed */
    cudaError_t code = cudaStreamEndCapture(device->aside, &graph);
    if (code == cudaSuccess) code = cudaGraphInstantiate(&executable, graph, 0);
    if (executable != NULL) (void)cudaGraphExecDestroy(executable);
    if (graph != NULL) (void)cudaGraphDestroy(graph);
    if (queued != QE_OK && words.status != QE_OK) return words_take(&words, error_out);
    if (queued != QE_OK) return launch_refused(op, queued, launched, error_out);
    QE_TRY(qe_cuda_check(code, qe_op_name(op->kind), error_out));
    return note_loaded(device, hash, error_out);
}

static uint64_t free_bytes(void) {
    size_t free_now = 0, total = 0;
    return cudaMemGetInfo(&free_now, &total) == cudaSuccess ? free_now : 0;
}

/* A substitute takes its workspace as everybody takes memory. */
static uint64_t lent_bytes(const qe_device *device) {
    return qe_cuda_attention_bytes(device->attention) + device->taken_bytes;
}

static qe_status part_prepare(qe_device *device, const qe_op *op, qe_error *error_out) {
    if (is_substituted(device, op))
        return device->substitute.prepare(device->substitute.context, op, error_out);
    switch (op->kind) {
        case QE_OP_LINEAR:
        case QE_OP_LINEAR_INPUT_GRAD:
        case QE_OP_LINEAR_WEIGHT_GRAD: return product_prepare(device, op, error_out);
        case QE_OP_ATTENTION:
        case QE_OP_ATTENTION_BACKWARD: return attention_prepare(device, op, error_out);
        default: return QE_OK;
    }
}

static qe_status apart_queue(void *context, const qe_op *op, cudaStream_t stream) {
    return parts_queue(context, op, stream, NULL);
}

/* Bits are the same either way, so a file of choices that says nothing of it is not wrong: parts stay apart, as they
 * were when it was written. */
static qe_status whole_prepare(qe_device *device, const qe_op *op, qe_error *error_out) {
    const qe_fused_apart apart = {apart_queue, device};
    const qe_cuda_choice *chosen = NULL;
    if (device->honours || !qe_cuda_fused_is(op->kind)) return QE_OK;
    QE_TRY(qe_cuda_fused_prepare(qe_cuda_gemm_fused(device->gemm), op, device->tune ? &apart : NULL, &chosen,
                                 error_out));
    return chosen == NULL ? QE_OK : choice_tell(device, chosen, error_out);
}

/* An op's parts are always ready too: what one pass takes may be the slower choice. */
static qe_status first_prepare(qe_device *device, const qe_op *op, qe_error *error_out) {
    qe_op parts[QE_OP_PARTS_MAX];
    const uint32_t count = qe_op_parts(op, parts);
    for (uint32_t i = 0; i < count; i++) QE_TRY(part_prepare(device, &parts[i], error_out));
    if (count > 1 && !any_substituted(device, op)) QE_TRY(whole_prepare(device, op, error_out));
    return kernels_load(device, op, error_out);
}

/* What is gone behind it, and is nobody's workspace, is code: the driver loads it and keeps it. */
qe_status qe_cuda_op_prepare(qe_device *device, const qe_op *op, qe_error *error_out) {
    if (op->kind == QE_OP_SEND || op->kind == QE_OP_RECV)
        return qe_cuda_channel_prepare(op->args.transfer.channel, op->args.transfer.bytes, device->aside, error_out);
    if (is_loaded(device, likeness(device, op))) return QE_OK;
    const uint64_t free_before = free_bytes(), lent = lent_bytes(device);
    const qe_status status = first_prepare(device, op, error_out);
    const uint64_t kept = free_bytes() + lent_bytes(device) - lent;
    if (free_before > kept) device->code_bytes += free_before - kept;
    return status;
}
