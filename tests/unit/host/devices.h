/* devices.h - one device per kernel level, and the small things that every test of kernels needs. */
#ifndef QE_TEST_HOST_DEVICES_H
#define QE_TEST_HOST_DEVICES_H

#include <math.h>
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "qeffect/fp8.h"
#include "qeffect/host.h"

enum { LEVELS = 3 };
static const char *const level_names[LEVELS] = {"portable", "avx2", "avx512"};
/* A level that this processor lacks is the next lower one: compared with itself it passes, and the identity says so. */
static qe_device *devices[LEVELS];

static inline int devices_open(void **state) {
    (void)state;
    for (int level = 0; level < LEVELS; ++level) {
        qe_error error;
        setenv("QE_HOST_LEVEL", level_names[level], 1);
        if (qe_host_backend()->open(&devices[level], &error) != QE_OK) {
            print_error("%s\n%s\n", error.message, error.remedy);
            return -1;
        }
        print_message("%s: %s\n", level_names[level], qe_host_backend()->identity(devices[level]));
    }
    unsetenv("QE_HOST_LEVEL");
    return 0;
}

static inline int devices_close(void **state) {
    (void)state;
    for (int level = 0; level < LEVELS; ++level) qe_host_backend()->close(devices[level]);
    return 0;
}

static inline void op_run(int level, const qe_op *op) {
    assert_int_equal(qe_host_backend()->run(devices[level], op, NULL), QE_OK);
}

/* A generator of the test's own; the same numbers everywhere. */
static inline uint32_t random_bits(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 32);
}

/* Uniform in [-1, 1). */
static inline float random_float(uint64_t *state) { return (float)(int32_t)random_bits(state) / 2147483648.0f; }

static inline float *floats_of(size_t count) {
    float *values = aligned_alloc(64, (count * sizeof(float) + 127) / 64 * 64);
    assert_non_null(values);
    memset(values, 0, (count * sizeof(float) + 127) / 64 * 64);
    return values;
}

static inline float *random_floats(size_t count, float width, uint64_t seed) {
    float *values = floats_of(count);
    for (size_t i = 0; i < count; ++i) values[i] = width * random_float(&seed);
    return values;
}

static inline float float_from(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_from(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Values that a product takes as they are. */
static inline qe_qtensor plain(float *values, uint32_t rows, uint32_t columns) {
    return (qe_qtensor){.codes = values, .rows = rows, .columns = columns, .format = QE_FORMAT_FP32};
}

/* Where a quantized tensor goes, with all its memory. */
typedef struct quantized {
    qe_quantize_target target;
    float scale, amax;
} quantized;

static inline void quantized_init(quantized *q, uint8_t recipe, uint8_t format, uint32_t rows, uint32_t columns,
                                  int is_weight) {
    const uint8_t stored = recipe == QE_RECIPE_BF16   ? QE_FORMAT_BF16
                           : recipe == QE_RECIPE_FP32 ? QE_FORMAT_FP32
                                                      : format;
    const uint8_t blocked = is_weight ? QE_BLOCKING_TILE : QE_BLOCKING_COLUMN;
    memset(q, 0, sizeof *q);
    q->scale = 1.0f;
    q->target.recipe = recipe;
    q->target.format = stored;
    if (recipe == QE_RECIPE_DELAYED) {
        q->target.scale = &q->scale;
        q->target.amax = &q->amax;
    }
    q->target.operand = plain(floats_of((size_t)rows * columns), rows, columns);
    q->target.retained = (qe_qtensor){
        .codes = floats_of((size_t)rows * columns),
        .scale_inv =
            stored == QE_FORMAT_BF16 || stored == QE_FORMAT_FP32 ? NULL : floats_of((size_t)rows * columns + 1),
        .rows = rows,
        .columns = columns,
        .format = stored,
        .blocking = recipe == QE_RECIPE_BLOCK ? blocked : QE_BLOCKING_TENSOR,
    };
}

static inline void quantized_deinit(quantized *q) {
    free(q->target.operand.codes);
    free(q->target.retained.codes);
    free(q->target.retained.scale_inv);
}

/* What a product takes of it. */
static inline float *decoded_of(const quantized *q) { return q->target.operand.codes; }

static inline void assert_same_bits(const void *a, const void *b, size_t bytes) {
    if (memcmp(a, b, bytes) == 0) return;
    for (size_t i = 0; i < bytes; ++i)
        if (((const uint8_t *)a)[i] != ((const uint8_t *)b)[i])
            fail_msg("byte %zu of %zu: %02x and %02x", i, bytes, ((const uint8_t *)a)[i], ((const uint8_t *)b)[i]);
}

#endif
