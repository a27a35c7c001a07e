/* same.h - one op on the host backend and on the device, with the same input, and what may lie between the results.
 *
 *   world_begin -> buffers -> world_run -> comparisons -> world_end
 *
 * A buffer has a side on the host and one on the device; an activation is fp32 there and bf16 here (and its values are
 * bf16 numbers, so both start from the same). Device memory is poisoned before each run and fenced, and the device runs
 * twice: what was not written, written beside, or differs from run to run is a failure. A failure is printed and
 * counted, and work goes on. */
#ifndef QE_TEST_SAME_H
#define QE_TEST_SAME_H

#include <stddef.h>
#include <stdint.h>

#include "backend/cuda/attention_choice.h"
#include "qeffect/backend.h"
#include "qeffect/fp8.h"
#include "qeffect/limits.h"
#include "qeffect/op.h"

typedef enum same_side { SAME_HOST, SAME_DEVICE } same_side;

typedef struct same_buffer {
    void *host;            /* the host's side: input, then result */
    void *device;          /* device memory */
    void *begin;           /* what the device's side holds before each run; NULL: poison */
    void *fetched;         /* what it held after the last */
    void *before;          /* after the run before */
    size_t host_bytes, device_bytes;
    int is_activation;
} same_buffer;

enum { SAME_BUFFERS_MAX = 32 };

typedef struct same_world {
    char title[160]; /* "norm_quantize delayed 48x144" */
    same_buffer buffers[SAME_BUFFERS_MAX];
    uint32_t count;
    size_t device_used;
    int any_order; /* two runs may differ */
} same_world;

/* How far a result of the device may lie from the host's: |device - host| <= relative * |host| + of_largest * the
 * largest |host| of the tensor. Of a quantized tensor, `others` is the share of elements (and two elements more) that
 * may be as far as neighbouring numbers of the format. */
typedef struct same_tolerance {
    const char *what;
    double relative, of_largest, others;
    double worst; /* seen so far, as a part of what is allowed */
    uint64_t compared;
} same_tolerance;

/* --- The two devices. Returns 0, or 77 where there is no GPU, having said why. --- */
int same_open(void);
void same_close(void);
extern uint64_t same_failures, same_cases;
/* From now on ops that the te backend gives to Transformer Engine are run by it; same_substituted counts such runs.
 * Returns 0, or 77 where that cannot be had, having said why. */
int same_te_open(void);
extern uint64_t same_substituted;

/* --- A case --- */
void world_begin(same_world *world, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* values: [count], rounded to bf16 on both sides; NULL: written by the op. */
same_buffer *world_activation(same_world *world, size_t count, const float *values);
/* The same bytes on both sides; NULL: written by the op. */
same_buffer *world_bytes(same_world *world, size_t bytes, const void *values);
/* Other bytes on each side, of other sizes; NULL: written by the op. 0 bytes: NULL addresses. */
same_buffer *world_pair(same_world *world, size_t host_bytes, const void *host, size_t device_bytes,
                        const void *device);
/* The address on one side. NULL stays NULL. */
void *same_at(const same_buffer *buffer, same_side side);
/* Runs both. Returns 1 when there is something to compare, 0 when a launch failed (counted). */
int world_run(same_world *world, const qe_op *host, const qe_op *device);
/* Queues an op of kernels.h, or attention's. */
qe_status same_launch(const qe_op *op, void *stream);
/* Is there a cuDNN? If not says so. */
int same_attention_open(void);
/* Attention's ops are run with this algorithm from now on. Returns 0 when it does not take the shape (counted). */
int same_attention_use(const same_world *world, const qe_op *op, qe_attention_algorithm algorithm);
/* The device alone, twice: qe_cuda_decode has no op. */
int world_launch(same_world *world, qe_status (*launch)(const void *context, void *stream), const void *context);
void world_end(same_world *world);
void world_fail(const same_world *world, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* --- Comparisons --- */
/* The device's side as floats: an activation decoded. The caller frees. */
float *same_floats(const same_buffer *buffer);
/* The largest |value| that is finite. */
double same_largest(const float *values, size_t count);
/* Same bytes on both sides. */
void same_bits(const same_world *world, const char *what, const same_buffer *buffer);
void same_memory(const same_world *world, const char *what, const void *host, const void *device, size_t bytes);
/* Same fp32 numbers; every NaN is the same. */
void same_numbers(const same_world *world, const char *what, const float *host, const float *device, size_t count);
void same_close_to(const same_world *world, same_tolerance *tolerance, const float *host, const float *device,
                   size_t count);
void same_double(const same_world *world, same_tolerance *tolerance, double host, double device);

/* --- Where a quantized tensor goes, on both sides (the table at qe_quantize_target) --- */
typedef enum same_parts {
    SAME_ALL,
    SAME_EVALUATION, /* nothing retained, amax not recorded */
    SAME_RETAINED    /* no operand */
} same_parts;

typedef struct same_target {
    qe_quantize_target side[2];
    same_buffer *operand, *retained, *scale_inv, *scale, *amax;
    uint32_t rows, columns;
    int is_weight;
} same_target;

void target_make(same_world *world, same_target *target, qe_recipe_kind recipe, qe_format format, uint32_t rows,
                 uint32_t columns, int is_weight, same_parts parts, float scale);
/* Bit for bit: codes, inverse scales, decoded values, the transposed layout, the amax. */
void target_exact(const same_world *world, const same_target *target);
/* Neighbouring numbers of the format where the values before rounding differ in their last bits. */
void target_close(const same_world *world, const same_target *target, same_tolerance *value, same_tolerance *amax);
/* qe_quantize_target's format of a recipe: HYBRID. */
qe_format target_format(qe_recipe_kind recipe, int is_gradient);

/* --- Numbers --- */
typedef struct same_random {
    uint64_t state;
} same_random;

uint32_t random_bits(same_random *random);
float random_unit(same_random *random);   /* [-1, 1) */
float random_normal(same_random *random); /* about normal, at most 6 */
float float_from(uint32_t bits);
uint32_t bits_from(float value);
float bf16_round(float value);
/* [count] numbers about normal, times width, and a few zeros; the caller frees. */
float *normals(size_t count, float width, uint64_t seed);
void *room(size_t bytes); /* zeroed; never NULL */
/* Cosines of every position and half a head, then sines. */
float *turns_of(uint32_t sequence, uint32_t head_dim);

/* Exact: the arithmetic is the same. */
void case_codec(void);
void case_quantize(void);
void case_quantize_weight(void);
void case_decode(void);
void case_fold(void);
void case_stamp(void);
void case_tally(void);
void case_accumulate(void);
void case_guard(void);
void case_embed(void);
void case_embed_backward(void);
void case_adamw(void);
void case_commit(void);
/* Close: sums in another order, another exp. */
void case_grad_norm(void);
void case_cross_entropy(void);
void case_norm(void);
void case_norm_quantize(void);
void case_norm_backward(void);
void case_attention(void);
void case_rope(void);
void case_rope_backward_quantize(void);
void case_swiglu_quantize(void);
void case_swiglu_backward_quantize(void);
void tolerances_print(void);
void tolerance_print(const same_tolerance *tolerance);

#endif
