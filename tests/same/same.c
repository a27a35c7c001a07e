/* same.c - the two devices, memory with fences, comparisons. */
#include "same.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/kernels.h"
#include "backend/cuda/products.h"
#include "qeffect/host.h"
#ifdef QE_TE
#include "backend/te/ops.h"
#include "qeffect/te.h"
#endif

enum {
    ARENA_BYTES = 1 << 30, /* the largest case takes some 300 MB */
    FENCE_BYTES = 256,     /* before and behind each buffer; also its alignment */
    FENCE_VALUE = 0xA5,
    POISON_VALUE = 0xFF, /* NaN in every format */
    SKIPPED = 77,
    FAILURES_PRINTED = 40
};

uint64_t same_failures, same_cases, same_substituted;
static qe_device *host_device;
#ifdef QE_TE
static qe_device *te_device; /* NULL: all ops are the cuda backend's */
#endif
static char *arena;
static cudaStream_t stream;
static qe_cuda_attention *attentions[2], *attention; /* one for each algorithm, as plans take long; the one in use */

static int cuda_failed(cudaError_t code, const char *what) {
    if (code == cudaSuccess) return 0;
    printf("FAILED %s: %s\n", what, cudaGetErrorString(code));
    ++same_failures;
    return 1;
}

static int device_open(void) {
    int count = 0;
    const cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess || count == 0) {
        printf("skipped: these tests compare a GPU with the host, and there is none (%s)\n",
               code == cudaSuccess ? "no device" : cudaGetErrorString(code));
        return SKIPPED;
    }
    struct cudaDeviceProp properties;
    if (cuda_failed(cudaGetDeviceProperties(&properties, 0), "properties")) return 1;
    if (properties.major != 9) {
        printf("skipped: the kernels are built for compute capability 9.0; %s has %d.%d\n", properties.name,
               properties.major, properties.minor);
        return SKIPPED;
    }
    printf("device: %s\n", properties.name);
    return cuda_failed(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream") ||
           cuda_failed(cudaMalloc((void **)&arena, ARENA_BYTES), "memory of the device");
}

int same_open(void) {
    setvbuf(stdout, NULL, _IOLBF, 0); /* what was found is there even if a later case crashes */
    const int status = device_open();
    if (status != 0) return status;
    qe_error error;
    if (qe_host_backend()->open(&host_device, &error) != QE_OK) {
        printf("FAILED the host backend: %s\n%s\n", error.message, error.remedy);
        return 1;
    }
    printf("host: %s\n", qe_host_backend()->identity(host_device));
    return 0;
}

int same_te_open(void) {
#ifdef QE_TE
    qe_error error = {.status = QE_OK};
    if (qe_te_backend()->open(&te_device, &error) == QE_OK) {
        printf("te: %s\n", qe_te_backend()->identity(te_device));
        return 0;
    }
    printf("skipped: %s\n", error.message);
#else
    printf("skipped: this program was built without the te backend (-DQE_TE=FOLDER)\n");
#endif
    return SKIPPED;
}

void same_close(void) {
    if (host_device != NULL) qe_host_backend()->close(host_device);
#ifdef QE_TE
    if (te_device != NULL) qe_te_backend()->close(te_device);
#endif
    for (int i = 0; i < 2; ++i) qe_cuda_attention_destroy(attentions[i]);
    if (arena != NULL) cudaFree(arena);
}

void *room(size_t bytes) {
    const size_t whole = (bytes + QE_ALIGN_BYTES) / QE_ALIGN_BYTES * QE_ALIGN_BYTES;
    void *at = aligned_alloc(QE_ALIGN_BYTES, whole);
    if (at == NULL) {
        printf("FAILED no memory for %zu bytes\n", bytes);
        abort();
    }
    memset(at, 0, whole);
    return at;
}

/* --- A case --- */

void world_begin(same_world *world, const char *format, ...) {
    va_list rest;
    memset(world, 0, sizeof *world);
    va_start(rest, format);
    vsnprintf(world->title, sizeof world->title, format, rest);
    va_end(rest);
    ++same_cases;
}

void world_end(same_world *world) {
    for (uint32_t i = 0; i < world->count; ++i) {
        same_buffer *buffer = &world->buffers[i];
        free(buffer->host);
        free(buffer->begin);
        free(buffer->fetched);
        free(buffer->before);
    }
    world->count = 0;
}

void world_fail(const same_world *world, const char *format, ...) {
    if (++same_failures > FAILURES_PRINTED) return;
    va_list rest;
    printf("FAILED %s: ", world->title);
    va_start(rest, format);
    vprintf(format, rest);
    va_end(rest);
    printf("\n");
    if (same_failures == FAILURES_PRINTED) printf("(further failures are only counted)\n");
}

static void *copy_of(const void *from, size_t bytes) {
    void *to = room(bytes);
    if (bytes > 0) memcpy(to, from, bytes);
    return to;
}

same_buffer *world_pair(same_world *world, size_t host_bytes, const void *host, size_t device_bytes,
                        const void *device) {
    if (world->count == SAME_BUFFERS_MAX) abort();
    same_buffer *buffer = &world->buffers[world->count++];
    const size_t begin = (world->device_used + FENCE_BYTES + FENCE_BYTES - 1) / FENCE_BYTES * FENCE_BYTES;
    if (begin + device_bytes + FENCE_BYTES > ARENA_BYTES) {
        printf("FAILED %s: the arena is too small\n", world->title);
        abort();
    }
    world->device_used = begin + device_bytes;
    *buffer = (same_buffer){.host_bytes = host_bytes, .device_bytes = device_bytes};
    buffer->host = host != NULL ? copy_of(host, host_bytes) : room(host_bytes);
    buffer->begin = device != NULL ? copy_of(device, device_bytes) : NULL;
    buffer->device = arena + begin;
    buffer->fetched = room(device_bytes);
    buffer->before = room(device_bytes);
    return buffer;
}

same_buffer *world_bytes(same_world *world, size_t bytes, const void *values) {
    return world_pair(world, bytes, values, bytes, values);
}

same_buffer *world_activation(same_world *world, size_t count, const float *values) {
    float *host = room(count * sizeof *host);
    uint16_t *device = room(count * sizeof *device);
    for (size_t i = 0; values != NULL && i < count; ++i) {
        device[i] = qe_bf16_encode(values[i]);
        host[i] = qe_bf16_decode(device[i]);
    }
    same_buffer *buffer = world_pair(world, count * sizeof *host, host, count * sizeof *device,
                                     values != NULL ? device : NULL);
    buffer->is_activation = 1;
    free(host);
    free(device);
    return buffer;
}

void *same_at(const same_buffer *buffer, same_side side) {
    if (buffer == NULL) return NULL;
    if (side == SAME_HOST) return buffer->host_bytes > 0 ? buffer->host : NULL;
    return buffer->device_bytes > 0 ? buffer->device : NULL;
}

int same_attention_open(void) {
    qe_error error = {.status = QE_OK};
    qe_status status = QE_OK;
    for (int i = 0; i < 2 && status == QE_OK; ++i) status = qe_cuda_attention_create(stream, &attentions[i], &error);
    attention = attentions[0];
    if (status == QE_OK) return 1;
    printf("skipped attention: %s\n", error.message);
    return 0;
}

int same_attention_use(const same_world *world, const qe_op *op, qe_attention_algorithm algorithm) {
    qe_cuda_choice choice;
    qe_error error = {.status = QE_OK};
    qe_attention_choice_make(op, algorithm, &choice);
    attention = attentions[algorithm];
    qe_status status = qe_cuda_attention_choose(attention, &choice, &error);
    if (status == QE_OK) status = qe_cuda_attention_prepare(attention, op, 0, &error);
    if (status != QE_OK) world_fail(world, "%s", error.message);
    return status == QE_OK;
}

/* All fences, then every buffer's own bytes. */
static int upload(const same_world *world) {
    if (cuda_failed(cudaMemset(arena, FENCE_VALUE, world->device_used + FENCE_BYTES), "fences")) return 1;
    for (uint32_t i = 0; i < world->count; ++i) {
        const same_buffer *buffer = &world->buffers[i];
        if (buffer->device_bytes == 0) continue;
        const cudaError_t code =
            buffer->begin != NULL
                ? cudaMemcpy(buffer->device, buffer->begin, buffer->device_bytes, cudaMemcpyHostToDevice)
                : cudaMemset(buffer->device, POISON_VALUE, buffer->device_bytes);
        if (cuda_failed(code, "an upload")) return 1;
    }
    return cuda_failed(cudaDeviceSynchronize(), "uploads");
}

static void fence_check(const same_world *world, const char *all, size_t from, size_t to) {
    for (size_t at = from; at < to; ++at)
        if ((uint8_t)all[at] != FENCE_VALUE) {
            world_fail(world, "a byte beside the buffers was written (byte %zu of %zu..%zu)", at, from, to);
            return;
        }
}

static int fetch(same_world *world) {
    const size_t bytes = world->device_used + FENCE_BYTES;
    char *all = room(bytes);
    if (cuda_failed(cudaMemcpy(all, arena, bytes, cudaMemcpyDeviceToHost), world->title)) {
        free(all);
        return 1;
    }
    size_t end = 0;
    for (uint32_t i = 0; i < world->count; ++i) {
        same_buffer *buffer = &world->buffers[i];
        const size_t begin = (size_t)((char *)buffer->device - arena);
        fence_check(world, all, end, begin);
        end = begin + buffer->device_bytes;
        void *older = buffer->before;
        buffer->before = buffer->fetched;
        buffer->fetched = older;
        if (buffer->device_bytes > 0) memcpy(buffer->fetched, all + begin, buffer->device_bytes);
    }
    fence_check(world, all, end, bytes);
    free(all);
    return 0;
}

static void repeat_check(const same_world *world) {
    if (world->any_order) return;
    for (uint32_t i = 0; i < world->count; ++i) {
        const same_buffer *buffer = &world->buffers[i];
        if (buffer->device_bytes > 0 && memcmp(buffer->fetched, buffer->before, buffer->device_bytes) != 0)
            world_fail(world, "buffer %u: two runs on the device differ", i);
    }
}

int world_launch(same_world *world, qe_status (*launch)(const void *context, void *stream), const void *context) {
    for (int run = 0; run < 2; ++run) {
        if (upload(world)) return 0;
        if (launch(context, stream) != QE_OK) {
            world_fail(world, "the launch was refused (%s)", cudaGetErrorString(cudaGetLastError()));
            return 0;
        }
        if (cuda_failed(cudaStreamSynchronize(stream), world->title) || fetch(world)) return 0;
    }
    repeat_check(world);
    return 1;
}

qe_status same_launch(const qe_op *op, void *on) {
    const qe_op_args *args = &op->args;
    const cudaStream_t queue = on;
    switch ((int)op->kind) {
        case QE_OP_EMBED: return qe_cuda_embed(&args->embed, queue);
        case QE_OP_EMBED_BACKWARD: return qe_cuda_embed_backward(&args->embed_backward, queue);
        case QE_OP_NORM:
        case QE_OP_NORM_QUANTIZE: return qe_cuda_norm(&args->norm, queue);
        case QE_OP_NORM_BACKWARD: return qe_cuda_norm_backward(&args->norm_backward, queue);
        case QE_OP_QUANTIZE: return qe_cuda_quantize(&args->quantize, queue);
        case QE_OP_QUANTIZE_WEIGHT: return qe_cuda_quantize_weight(&args->quantize_weight, queue);
        case QE_OP_ATTENTION:
        case QE_OP_ATTENTION_BACKWARD: return qe_cuda_attention_run(attention, op, queue, NULL);
        case QE_OP_ROPE: return qe_cuda_rope(&args->rope, queue);
        case QE_OP_ROPE_BACKWARD_QUANTIZE: return qe_cuda_rope_backward_quantize(&args->rope, queue);
        case QE_OP_SWIGLU_QUANTIZE: return qe_cuda_swiglu_quantize(&args->swiglu, queue);
        case QE_OP_SWIGLU_BACKWARD_QUANTIZE: return qe_cuda_swiglu_backward_quantize(&args->swiglu_backward, queue);
        case QE_OP_CROSS_ENTROPY: return qe_cuda_cross_entropy(&args->cross_entropy, queue);
        case QE_OP_GRAD_NORM: return qe_cuda_grad_norm(&args->grad_norm, queue);
        case QE_OP_ADAMW: return qe_cuda_adamw(&args->adamw, queue);
        case QE_OP_FOLD: return qe_cuda_fold(&args->fold, queue);
        case QE_OP_STAMP: return qe_cuda_stamp(&args->stamp, queue);
        case QE_OP_ACCUMULATE: return qe_cuda_accumulate(&args->accumulate, queue);
        case QE_OP_TALLY: return qe_cuda_tally(&args->tally, queue);
        case QE_OP_GUARD: return qe_cuda_guard(&args->guard, queue);
        default: return QE_ERROR_ARGUMENT;
    }
}

/* Transformer Engine's, where there is such a device and it takes the op. */
static int substituted_run(const qe_op *op, qe_status *status_out) {
#ifdef QE_TE
    qe_error error = {.status = QE_OK};
    if (te_device == NULL || !qe_te_takes(op)) return 0;
    same_substituted++;
    *status_out = qe_te_backend()->run(te_device, op, &error);
    if (*status_out != QE_OK) printf("te: %s\n", error.message);
    return 1;
#else
    (void)op, (void)status_out;
    return 0;
#endif
}

static qe_status op_launch(const void *context, void *on) {
    qe_status status = QE_OK;
    return substituted_run(context, &status) ? status : same_launch(context, on);
}

int world_run(same_world *world, const qe_op *host, const qe_op *device) {
    qe_error error = {.status = QE_OK};
    if (qe_host_backend()->run(host_device, host, &error) != QE_OK) {
        world_fail(world, "the host refused it: %s", error.message);
        return 0;
    }
    return world_launch(world, op_launch, device);
}

/* --- Comparisons --- */

float *same_floats(const same_buffer *buffer) {
    if (!buffer->is_activation) return copy_of(buffer->fetched, buffer->device_bytes);
    const size_t count = buffer->device_bytes / sizeof(uint16_t);
    const uint16_t *codes = buffer->fetched;
    float *values = room(count * sizeof *values);
    for (size_t i = 0; i < count; ++i) values[i] = qe_bf16_decode(codes[i]);
    return values;
}

void same_memory(const same_world *world, const char *what, const void *host, const void *device, size_t bytes) {
    const uint8_t *a = host, *b = device;
    size_t differing = 0, first = 0;
    for (size_t i = bytes; i-- > 0;)
        if (a[i] != b[i]) differing++, first = i;
    if (differing > 0)
        world_fail(world, "%s: %zu of %zu bytes differ, first byte %zu: host %02x, device %02x", what, differing, bytes,
                   first, a[first], b[first]);
}

void same_bits(const same_world *world, const char *what, const same_buffer *buffer) {
    same_memory(world, what, buffer->host, buffer->fetched, buffer->device_bytes);
}

void same_numbers(const same_world *world, const char *what, const float *host, const float *device, size_t count) {
    size_t differing = 0, first = 0;
    for (size_t i = count; i-- > 0;) {
        if (bits_from(host[i]) == bits_from(device[i]) || (isnan(host[i]) && isnan(device[i]))) continue;
        differing++, first = i;
    }
    if (differing > 0)
        world_fail(world, "%s: %zu of %zu numbers differ, first %zu: host %.9g (%08x), device %.9g (%08x)", what,
                   differing, count, first, (double)host[first], bits_from(host[first]), (double)device[first],
                   bits_from(device[first]));
}

double same_largest(const float *values, size_t count) {
    double largest = 0.0;
    for (size_t i = 0; i < count; ++i)
        if (isfinite(values[i]) && fabs((double)values[i]) > largest) largest = fabs((double)values[i]);
    return largest;
}

/* How far apart, as a part of what is allowed. What is not finite must be the same. */
static double part_of(const same_tolerance *tolerance, double host, double device, double largest) {
    if (!isfinite(host) || !isfinite(device)) return host == device || (isnan(host) && isnan(device)) ? 0.0 : INFINITY;
    const double allowed = tolerance->relative * fabs(host) + tolerance->of_largest * largest;
    const double apart = fabs(device - host);
    if (apart == 0.0) return 0.0;
    return allowed > 0.0 ? apart / allowed : INFINITY;
}

void same_close_to(const same_world *world, same_tolerance *tolerance, const float *host, const float *device,
                   size_t count) {
    const double largest = same_largest(host, count);
    size_t beyond = 0, first = 0;
    for (size_t i = count; i-- > 0;) {
        const double part = part_of(tolerance, (double)host[i], (double)device[i], largest);
        if (part > tolerance->worst) tolerance->worst = part;
        if (!(part <= 1.0)) beyond++, first = i;
    }
    tolerance->compared += count;
    if (beyond > 0)
        world_fail(world, "%s: %zu of %zu too far apart, first %zu: host %.9g, device %.9g (largest %.3g)",
                   tolerance->what, beyond, count, first, (double)host[first], (double)device[first], largest);
}

void same_double(const same_world *world, same_tolerance *tolerance, double host, double device) {
    const double part = part_of(tolerance, host, device, fabs(host));
    if (part > tolerance->worst) tolerance->worst = part;
    tolerance->compared++;
    if (!(part <= 1.0)) world_fail(world, "%s: host %.17g, device %.17g", tolerance->what, host, device);
}

/* --- Numbers --- */

/* SplitMix64. */
uint32_t random_bits(same_random *random) {
    uint64_t z = random->state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return (uint32_t)((z ^ z >> 31) >> 32);
}

float random_unit(same_random *random) {
    return (float)(int32_t)random_bits(random) / 2147483648.0f;
}

/* Twelve uniform numbers: variance 12 * 1/3 / 4. */
float random_normal(same_random *random) {
    float sum = 0.0f;
    for (int i = 0; i < 12; ++i) sum += random_unit(random);
    return sum * 0.5f;
}

float float_from(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

uint32_t bits_from(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

float bf16_round(float value) {
    return qe_bf16_decode(qe_bf16_encode(value));
}

float *normals(size_t count, float width, uint64_t seed) {
    same_random random = {seed};
    float *values = room(count * sizeof *values);
    for (size_t i = 0; i < count; ++i)
        values[i] = random_bits(&random) % 97 == 0 ? 0.0f : width * random_normal(&random);
    return values;
}

float *turns_of(uint32_t sequence, uint32_t head_dim) {
    const uint32_t half = head_dim / 2;
    float *turns = room((size_t)2 * sequence * half * sizeof *turns);
    for (uint32_t i = 0; i < sequence * half; ++i) {
        const double angle = (double)(i / half) * pow(10000.0, -2.0 * (double)(i % half) / head_dim);
        turns[i] = (float)cos(angle);
        turns[sequence * half + i] = (float)sin(angle);
    }
    return turns;
}

void tolerance_print(const same_tolerance *t) {
    printf("%-32s %10.3g %10.3g %8.3g %12llu %8.3f\n", t->what, t->relative, t->of_largest, t->others,
           (unsigned long long)t->compared, t->worst);
}
