/* Offsets: aligned, apart, and never the fruit of a wrapped sum. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/prng.h"

static void pieces_are_aligned_and_do_not_overlap(void **state) {
    (void)state;
    qe_arena arena = {0};
    qe_prng prng = qe_prng_make(1, "arena");
    size_t end = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        uint64_t bits = qe_prng_u64(&prng, i);
        size_t bytes = bits % 300, align_bytes = (size_t)1 << ((bits >> 32) % 8);
        size_t offset = qe_arena_add(&arena, bytes, align_bytes);
        assert_true(offset % align_bytes == 0);
        assert_true(offset >= end);
        assert_true(offset - end < align_bytes);
        if (bytes > 0) end = offset + bytes;
        assert_true(arena.total_bytes == end);
    }
    assert_int_equal(arena.align_bytes, 128);
    assert_false(arena.overflowed);
}

static void the_block_is_zeroed_and_aligned_to_the_largest_piece(void **state) {
    (void)state;
    qe_arena arena = {0};
    qe_arena_add(&arena, 3, 1);
    size_t offset = qe_arena_add_array(&arena, 100, sizeof(double), 64);
    assert_int_equal(offset, 64);
    void *block = NULL;
    assert_int_equal(qe_arena_allocate(&arena, &block, NULL), QE_OK);
    assert_true((uintptr_t)block % 64 == 0);
    for (size_t i = 0; i < arena.total_bytes; i++) assert_int_equal(((unsigned char *)block)[i], 0);
    memset(block, 1, arena.total_bytes);
    free(block);
}

static void an_empty_arena_gives_a_block_that_can_be_freed(void **state) {
    (void)state;
    qe_arena arena = {0};
    void *block = NULL;
    assert_int_equal(qe_arena_allocate(&arena, &block, NULL), QE_OK);
    assert_non_null(block);
    free(block);
}

static void assert_refused(const qe_arena *arena) {
    int mark;
    void *block = &mark;
    qe_error error;
    assert_int_equal(qe_arena_allocate(arena, &block, &error), QE_ERROR_MEMORY);
    assert_int_equal(error.status, QE_ERROR_MEMORY);
    assert_true(strlen(error.message) > 0 && strlen(error.remedy) > 0);
    assert_ptr_equal(block, &mark);
}

static void a_sum_that_overflows_sticks_and_is_refused(void **state) {
    (void)state;
    qe_arena arena = {0};
    qe_arena_add(&arena, 100, 64);
    assert_int_equal(qe_arena_add(&arena, SIZE_MAX - 99, 1), 0);
    assert_int_equal(arena.total_bytes, 100);
    qe_arena_add(&arena, 1, 1);
    assert_refused(&arena);
}

static void padding_that_overflows_is_refused(void **state) {
    (void)state;
    qe_arena arena = {0};
    qe_arena_add(&arena, SIZE_MAX - 10, 1);
    qe_arena_add(&arena, 1, 64);
    assert_refused(&arena);
    qe_arena whole = {0};
    qe_arena_add(&whole, SIZE_MAX - 1, 64); /* fits a size_t, but not rounded up to its alignment */
    assert_false(whole.overflowed);
    assert_refused(&whole);
}

static void a_product_that_overflows_is_refused(void **state) {
    (void)state;
    qe_arena arena = {0};
    assert_int_equal(qe_arena_add_array(&arena, SIZE_MAX / 4, 5, 8), 0);
    assert_refused(&arena);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_are_aligned_and_do_not_overlap),
        cmocka_unit_test(the_block_is_zeroed_and_aligned_to_the_largest_piece),
        cmocka_unit_test(an_empty_arena_gives_a_block_that_can_be_freed),
        cmocka_unit_test(a_sum_that_overflows_sticks_and_is_refused),
        cmocka_unit_test(padding_that_overflows_is_refused),
        cmocka_unit_test(a_product_that_overflows_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
