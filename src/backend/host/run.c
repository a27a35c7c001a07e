/* run.c - from an op to its kernel. */
#include <sched.h>
#include <string.h>
#include <time.h>

#include "backend/host/host.h"
#include "backend/host/linear.h"

static qe_status transfer_run(const qe_device *device, const qe_args_transfer *args, qe_op_kind kind) {
    if (!device->comm) return QE_ERROR_UNSUPPORTED;
    if (kind == QE_OP_SEND) return device->comm->send(args->channel, args->bytes_at, args->bytes);
    return device->comm->recv(args->channel, args->bytes_at, args->bytes);
}

/* A guard that fired turns commits and folds into nothing. */
static int is_vetoed(const qe_guard_fault *fault) {
    return fault != NULL && fault->fired;
}

/* What the weight became is quantized for the next step; the key vouches for it and remembers its amax. */
static void fill_ahead(const host_kernels *kernels, const qe_args_adamw *args) {
    float amax = 0.0F;
    uint32_t bits;
    qe_args_quantize_weight fill = {.w = args->weight, .rows = args->rows, .columns = args->columns,
                                    .target = args->target};
    fill.target.amax = &amax;
    kernels->quantize_weight(&fill);
    memcpy(&bits, &amax, sizeof bits);
    args->key[QE_KEY_VERSION] = *args->witness;
    args->key[QE_KEY_EPOCH] = *args->scale_epoch;
    args->key[QE_KEY_SEAL] = QE_KEY_SEALED | bits;
}

static void adamw_run(const host_kernels *kernels, const qe_args_adamw *args) {
    if (is_vetoed(args->fault)) return;
    kernels->adamw(args);
    if (args->witness != NULL) ++*args->witness;
    if (args->key != NULL) fill_ahead(kernels, args);
}

/* Did a commit quantize just this? Then only its amax is to be recorded. */
static int is_filled(const qe_args_quantize_weight *args, uint64_t epoch) {
    const uint64_t *key = args->key;
    if (key[QE_KEY_VERSION] != *args->weight_witness || key[QE_KEY_EPOCH] != epoch) return 0;
    return (key[QE_KEY_SEAL] & QE_KEY_SEALED) != 0;
}

static void record_amax(const qe_args_quantize_weight *args) {
    float amax;
    const uint32_t bits = (uint32_t)args->key[QE_KEY_SEAL];
    memcpy(&amax, &bits, sizeof amax);
    if (args->target.amax != NULL && amax > *args->target.amax) *args->target.amax = amax;
}

static void quantize_weight_run(const host_kernels *kernels, const qe_args_quantize_weight *args) {
    if (args->key == NULL) {
        kernels->quantize_weight(args);
        return;
    }
    const uint64_t epoch = args->scale_epoch != NULL ? *args->scale_epoch : 0;
    if (is_filled(args, epoch)) {
        record_amax(args);
        return;
    }
    kernels->quantize_weight(args);
    args->key[QE_KEY_VERSION] = *args->weight_witness;
    args->key[QE_KEY_EPOCH] = epoch;
    args->key[QE_KEY_SEAL] = 0;
}

static void stamp_run(const qe_args_stamp *args) {
    for (uint32_t i = 0; i < args->count; ++i) ++*args->words[i];
}

static void tally_run(const qe_args_tally *args) {
    for (uint32_t i = 0; i < args->count; ++i) ++args->words[i];
}

/* The first guard that fires is kept. */
static void guard_run(const qe_args_guard *args) {
    for (uint32_t i = 0; i < args->count && !args->fault->fired; ++i) {
        const uint64_t found = *args->words[i];
        if (found == args->expected[i]) continue;
        *args->fault = (qe_guard_fault){.fired = 1,
                                        .launch = *args->launch,
                                        .entry = args->first_entry + i,
                                        .expected = args->expected[i],
                                        .found = found};
    }
}

static void fold_run(const qe_args_fold *args) {
    if (is_vetoed(args->fault)) return;
    for (uint32_t i = 0; i < args->count; ++i) qe_scale_fold(args->states[i], args->recipe);
}

static void copy_run(const qe_args_copy *args) {
    if (args->bytes > 0) memcpy(args->to, args->from, args->bytes);
}

static void accumulate_run(const qe_args_accumulate *args) {
    for (uint64_t i = 0; i < args->count; ++i) args->to[i] += args->from[i];
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

enum { WAKE_NS = 300000 }; /* a sleeper is woken late by up to this much; what is left is waited for awake */

static void sleep_until(uint64_t until_ns) {
    const struct timespec end = {.tv_sec = (time_t)(until_ns / 1000000000u), .tv_nsec = (long)(until_ns % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL) != 0) {} /* a signal woke it */
}

/* Sleeps, so that ranks delay side by side however few cores there are. */
static void delay_run(const qe_args_delay *args) {
    const uint64_t begin = now_ns(), end = begin + args->duration_ns;
    if (args->duration_ns > WAKE_NS) sleep_until(end - WAKE_NS);
    while (now_ns() < end) sched_yield();
    args->span_ns[0] = begin;
    args->span_ns[1] = now_ns();
}

static qe_status part_run(const qe_device *device, const qe_op *op) {
    const host_kernels *kernels = device->kernels;
    host_sgemm *sgemm = device->blas->sgemm;
    const qe_op_args *args = &op->args;
    switch (op->kind) {
        case QE_OP_EMBED: kernels->embed(&args->embed); break;
        case QE_OP_EMBED_BACKWARD: kernels->embed_backward(&args->embed_backward); break;
        case QE_OP_NORM: kernels->norm(&args->norm); break;
        case QE_OP_NORM_QUANTIZE: kernels->norm_quantize(&args->norm); break;
        case QE_OP_NORM_BACKWARD: kernels->norm_backward(&args->norm_backward); break;
        case QE_OP_QUANTIZE: kernels->quantize(&args->quantize); break;
        case QE_OP_QUANTIZE_WEIGHT: quantize_weight_run(kernels, &args->quantize_weight); break;
        case QE_OP_LINEAR: qe_host_linear(&args->linear, sgemm); break;
        case QE_OP_LINEAR_INPUT_GRAD: qe_host_linear_input_grad(&args->linear_input_grad, sgemm); break;
        case QE_OP_LINEAR_WEIGHT_GRAD: qe_host_linear_weight_grad(&args->linear_weight_grad, kernels, sgemm); break;
        case QE_OP_ROPE: kernels->rope(&args->rope); break;
        case QE_OP_ROPE_BACKWARD_QUANTIZE: kernels->rope_backward_quantize(&args->rope); break;
        case QE_OP_ATTENTION: kernels->attention(&args->attention, sgemm); break;
        case QE_OP_ATTENTION_BACKWARD: kernels->attention_backward(&args->attention_backward, sgemm); break;
        case QE_OP_SWIGLU_QUANTIZE: kernels->swiglu_quantize(&args->swiglu); break;
        case QE_OP_SWIGLU_BACKWARD_QUANTIZE: kernels->swiglu_backward_quantize(&args->swiglu_backward); break;
        case QE_OP_CROSS_ENTROPY: kernels->cross_entropy(&args->cross_entropy); break;
        case QE_OP_COPY: copy_run(&args->copy); break;
        case QE_OP_ACCUMULATE: accumulate_run(&args->accumulate); break;
        case QE_OP_GRAD_NORM: kernels->grad_norm(&args->grad_norm); break;
        case QE_OP_ADAMW: adamw_run(kernels, &args->adamw); break;
        case QE_OP_FOLD: fold_run(&args->fold); break;
        case QE_OP_STAMP: stamp_run(&args->stamp); break;
        case QE_OP_TALLY: tally_run(&args->tally); break;
        case QE_OP_GUARD: guard_run(&args->guard); break;
        case QE_OP_DELAY: delay_run(&args->delay); break;
        case QE_OP_SEND:
        case QE_OP_RECV: return transfer_run(device, &args->transfer, op->kind);
        case QE_OP_LINEAR_ROPE: /* is two parts */
        case QE_OP_KINDS: return QE_ERROR_ARGUMENT;
    }
    return QE_OK;
}

qe_status qe_host_op_run(const qe_device *device, const qe_op *op) {
    qe_op parts[QE_OP_PARTS_MAX];
    const uint32_t count = qe_op_parts(op, parts);
    qe_status status = QE_OK;
    for (uint32_t i = 0; status == QE_OK && i < count; ++i) status = part_run(device, &parts[i]);
    return status;
}

qe_status qe_host_op_error(qe_status status, qe_op_kind kind, qe_error *error_out) {
    switch (status) {
        case QE_ERROR_INTERRUPTED:
            return qe_error_set(error_out, status, NULL, "%s was interrupted: the transport was aborted",
                                qe_op_name(kind));
        case QE_ERROR_UNSUPPORTED:
            return qe_error_set(error_out, status, "give the device a transport before the first step",
                                "%s on a device that has no transport", qe_op_name(kind));
        default:
            return qe_error_set(error_out, status, NULL, "%s failed (%s): both ends must name the same number of bytes",
                                qe_op_name(kind), qe_status_name(status));
    }
}
