/* What has more blocks than a launch may have is refused in a word of its own, before the device is asked for anything:
 * no GPU is needed, and nothing is read or written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/cuda/kernels.h"

enum { BLOCKS_MAX = 65535, ROWS = 32, HIDDEN = 4096 }; /* below each other; of a block */
static _Alignas(16) char nowhere[16];

static qe_args_norm norm_of(uint32_t rows, uint32_t hidden) {
    return (qe_args_norm){.x = nowhere, .gain = (const float *)(void *)nowhere, .rstd = (float *)(void *)nowhere,
                          .epsilon = 1e-5f, .rows = rows, .hidden = hidden};
}

static void a_norm_of_too_many_tokens_is_beyond_a_limit(void **state) {
    (void)state;
    const uint32_t rows[] = {BLOCKS_MAX * ROWS + 16, 1u << 31, UINT32_MAX - 15};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
        qe_args_norm a = norm_of(rows[i], HIDDEN);
        a.y = nowhere;
        assert_int_equal(qe_cuda_norm(&a, NULL), QE_ERROR_LIMIT);
        a.y = NULL;
        a.target = (qe_quantize_target){.recipe = QE_RECIPE_DELAYED, .scale = (const float *)(void *)nowhere};
        a.target.operand = (qe_qtensor){.codes = nowhere, .rows = rows[i], .columns = HIDDEN};
        assert_int_equal(qe_cuda_norm(&a, NULL), QE_ERROR_LIMIT);
        a.target.recipe = QE_RECIPE_BLOCK;
        assert_int_equal(qe_cuda_norm(&a, NULL), QE_ERROR_LIMIT);
    }
}

/* A block for each row, as of widths that no cluster holds, goes further. */
static void blocks_side_by_side_are_counted_too(void **state) {
    (void)state;
    const qe_args_norm a = norm_of((1u << 31) + 16, HIDDEN + 1);
    assert_int_equal(qe_cuda_norm(&a, NULL), QE_ERROR_LIMIT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_norm_of_too_many_tokens_is_beyond_a_limit),
        cmocka_unit_test(blocks_side_by_side_are_counted_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
