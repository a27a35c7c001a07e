/* fused_check.h - what tests of ops of two parts that one kernel does have in common: an op's memory with guards, the
 * same bits whole and apart, and what stays apart. */
#ifndef QE_TESTS_CUDA_FUSED_CHECK_H
#define QE_TESTS_CUDA_FUSED_CHECK_H

#include <cmocka.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/fused.h"
#include "backend/cuda/product_kernels.h"
#include "backend/cuda/products.h"

enum { SKIPPED = 77, GUARD_BYTES = 256, POISON = 0xA5, PLACES_MAX = 16 };

static cudaStream_t aside;

/* Returns 0 where there is no GPU. */
static inline int gpu_open(void) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        printf("skipped: there is no GPU\n");
        return 0;
    }
    assert_int_equal(cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking), cudaSuccess);
    return 1;
}

/* What a program's main returns. */
static inline int run_all(void (*const *cases)(void), size_t count, const char *title) {
    if (!gpu_open()) return SKIPPED;
    for (size_t i = 0; i < count; i++) cases[i]();
    (void)cudaStreamDestroy(aside);
    printf("%s: all holds\n", title);
    return 0;
}

static inline qe_cuda_gemm *gemm_open(void) {
    qe_cuda_gemm *gemm = NULL;
    qe_error error = {0};
    assert_int_equal(qe_cuda_gemm_create(aside, &gemm, &error), QE_OK);
    return gemm;
}

/* --- an op's memory ---------------------------------------------------------------------------------------------- */

typedef struct memory {
    char *at[PLACES_MAX];
    size_t bytes[PLACES_MAX];
    int count;
} memory;

/* `aside` waits neither for memsets nor for what small copies have under way: poison may come after inputs. Seen once,
 * other bits here while two programs ran beside on the GPU. */
static inline void settle(void) { assert_int_equal(cudaDeviceSynchronize(), cudaSuccess); }

/* Poison, with a guard behind each place. */
static inline memory memory_place(const size_t *bytes, int count) {
    memory m = {.count = count};
    assert_true(count <= PLACES_MAX);
    for (int i = 0; i < count; i++) {
        m.bytes[i] = bytes[i];
        assert_int_equal(cudaMalloc((void **)&m.at[i], bytes[i] + GUARD_BYTES), cudaSuccess);
        assert_int_equal(cudaMemset(m.at[i], POISON, bytes[i] + GUARD_BYTES), cudaSuccess);
    }
    settle();
    return m;
}

static inline void put_random(const memory *m, int which, qe_format format, size_t count, uint32_t seed) {
    assert_int_equal(qe_cuda_random(format, m->at[which], count, seed, aside), QE_OK);
    assert_int_equal(cudaStreamSynchronize(aside), cudaSuccess);
}

static inline void put_float(const memory *m, int which, float value) {
    assert_int_equal(cudaMemcpy(m->at[which], &value, sizeof value, cudaMemcpyHostToDevice), cudaSuccess);
    settle();
}

/* Nothing was written behind what is one's own. */
static inline void guards_hold(const memory *m) {
    unsigned char guard[GUARD_BYTES], wanted[GUARD_BYTES];
    memset(wanted, POISON, sizeof wanted);
    for (int i = 0; i < m->count; i++) {
        assert_int_equal(cudaMemcpy(guard, m->at[i] + m->bytes[i], GUARD_BYTES, cudaMemcpyDeviceToHost), cudaSuccess);
        assert_memory_equal(guard, wanted, GUARD_BYTES);
    }
}

static inline void memory_free(memory *m) {
    for (int i = 0; i < m->count; i++) (void)cudaFree(m->at[i]);
}

/* Codes at a place, their scale at the next one. */
static inline qe_qtensor codes_at(const memory *m, int which, qe_format format, uint32_t rows, uint32_t columns,
                                  uint8_t transposed) {
    return (qe_qtensor){.codes = m->at[which], .scale_inv = (float *)m->at[which + 1], .rows = rows,
                        .columns = columns, .format = (uint8_t)format, .blocking = QE_BLOCKING_TENSOR,
                        .transposed = transposed};
}

static inline void results_equal(const memory *m, const memory *other, int from) {
    for (int i = from; i < m->count; i++) {
        char *one = malloc(m->bytes[i]), *two = malloc(m->bytes[i]);
        assert_non_null(one);
        assert_non_null(two);
        assert_int_equal(cudaMemcpy(one, m->at[i], m->bytes[i], cudaMemcpyDeviceToHost), cudaSuccess);
        assert_int_equal(cudaMemcpy(two, other->at[i], m->bytes[i], cudaMemcpyDeviceToHost), cudaSuccess);
        assert_memory_equal(one, two, m->bytes[i]);
        free(one);
        free(two);
    }
}

/* Bytes that a place begins with instead. */
typedef struct given {
    int which;
    const void *bytes;
    size_t count;
} given;

static inline void give(const memory *m, const given *what) {
    if (!what) return;
    assert_int_equal(cudaMemcpy(m->at[what->which], what->bytes, what->count, cudaMemcpyHostToDevice), cudaSuccess);
    settle();
}

/* --- whole and apart --------------------------------------------------------------------------------------------- */

/* The same op on memory of its own each; results from place `from` on. Ensures: the memory is free. */
typedef struct pair {
    memory whole, apart;
    qe_op one, two;
    int from;
} pair;

static inline void expect_equal_bits(qe_cuda_gemm *gemm, pair *of,
                                     qe_status (*apart_queue)(void *gemm, const qe_op *op, cudaStream_t stream)) {
    qe_cuda_fused *fused = qe_cuda_gemm_fused(gemm);
    const qe_cuda_choice *chosen;
    qe_op parts[QE_OP_PARTS_MAX];
    (void)qe_op_parts(&of->two, parts);
    assert_int_equal(qe_cuda_gemm_prepare(gemm, &parts[0], 0, NULL), QE_OK);
    assert_int_equal(qe_cuda_fused_prepare(fused, &of->one, NULL, &chosen, NULL), QE_OK);
    assert_true(qe_cuda_fused_takes(fused, &of->one));
    settle();
    for (int turn = 0; turn < 3; turn++) {
        assert_int_equal(qe_cuda_fused_run(fused, &of->one, aside, NULL), QE_OK);
        assert_int_equal(apart_queue(gemm, &of->two, aside), QE_OK);
        assert_int_equal(cudaStreamSynchronize(aside), cudaSuccess);
        results_equal(&of->whole, &of->apart, of->from);
    }
    guards_hold(&of->whole);
    memory_free(&of->whole);
    memory_free(&of->apart);
}

/* An op that a kernel takes is left to its parts with each change. Ensures: the memory is free. */
static inline void expect_apart(memory *m, const qe_op *fits, void (*const *changes)(qe_op *op), size_t count) {
    qe_cuda_gemm *gemm = gemm_open();
    qe_cuda_fused *fused = qe_cuda_gemm_fused(gemm);
    const qe_cuda_choice *chosen;
    assert_false(qe_cuda_fused_takes(fused, fits)); /* not before it is prepared */
    assert_int_equal(qe_cuda_fused_prepare(fused, fits, NULL, &chosen, NULL), QE_OK);
    assert_true(qe_cuda_fused_takes(fused, fits));
    for (size_t i = 0; i < count; i++) {
        qe_op op = *fits;
        changes[i](&op);
        assert_int_equal(qe_cuda_fused_prepare(fused, &op, NULL, &chosen, NULL), QE_OK);
        assert_null(chosen);
        assert_false(qe_cuda_fused_takes(fused, &op));
    }
    qe_cuda_gemm_destroy(gemm);
    memory_free(m);
}

/* A race chooses once; the choice is in the list. Returns whether the op is done whole. */
static inline int expect_race(qe_cuda_gemm *gemm, const qe_op *op,
                              qe_status (*apart_queue)(void *gemm, const qe_op *op, cudaStream_t stream)) {
    qe_cuda_fused *fused = qe_cuda_gemm_fused(gemm);
    const qe_fused_apart apart = {apart_queue, gemm};
    const qe_cuda_choice *chosen;
    qe_op parts[QE_OP_PARTS_MAX];
    (void)qe_op_parts(op, parts);
    assert_int_equal(qe_cuda_gemm_prepare(gemm, &parts[0], 0, NULL), QE_OK);
    assert_int_equal(qe_cuda_fused_prepare(fused, op, &apart, &chosen, NULL), QE_OK);
    assert_non_null(chosen);
    const int is_whole = qe_cuda_fused_takes(fused, op);
    printf("  %s: %s\n", chosen->key, is_whole ? "whole" : "apart");
    assert_int_equal(qe_cuda_fused_prepare(fused, op, &apart, &chosen, NULL), QE_OK);
    assert_null(chosen);
    return is_whole;
}

/* The same with products of its own. Ensures: the memory is free. */
static inline void expect_race_alone(memory *m, const qe_op *op,
                                     qe_status (*apart_queue)(void *gemm, const qe_op *op, cudaStream_t stream)) {
    qe_cuda_gemm *gemm = gemm_open();
    (void)expect_race(gemm, op, apart_queue);
    qe_cuda_gemm_destroy(gemm);
    memory_free(m);
}

#endif
