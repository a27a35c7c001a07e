/* Which ops of two parts one kernel of ours may take: what it writes while others still read lies elsewhere, boxes of
 * the copy engine begin at whole sixteens, and sizes are ones that it counts. The rest is left to the parts, whose bits
 * the op has. Addresses are made up: no GPU is needed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "backend/cuda/attention_own.h"
#include "backend/cuda/fused_choice.h"
#include "backend/cuda/input_grad_swiglu.h"
#include "backend/cuda/linear_rope.h"
#include "backend/cuda/linear_swiglu.h"

enum { X = 1, X_SCALE, W, W_SCALE, Y, SCALE, AMAX, CODES, CODES_SCALE, TURNED, TURNED_SCALE };

/* Each has 64 GiB to itself. */
static void *place(int which, uint64_t offset) { return (void *)(((uintptr_t)which << 36) + offset); }

static qe_qtensor tensor(int which, uint32_t rows, uint32_t columns, uint8_t transposed) {
    return (qe_qtensor){.codes = place(which, 0), .scale_inv = place(which + 1, 0), .rows = rows, .columns = columns,
                        .format = QE_FORMAT_E4M3, .transposed = transposed};
}

static qe_quantize_target target(uint32_t rows, uint32_t columns) {
    return (qe_quantize_target){.recipe = QE_RECIPE_DELAYED, .format = QE_FORMAT_E4M3, .scale = place(SCALE, 0),
                                .amax = place(AMAX, 0), .operand = tensor(CODES, rows, columns, 0),
                                .retained = tensor(TURNED, rows, columns, 1)};
}

/* --- products ---------------------------------------------------------------------------------------------------- */

enum { ROWS = 256, IN = 512, FFN = 384 };

static qe_args_linear linear(void) {
    return (qe_args_linear){.x = tensor(X, ROWS, IN, 0), .w = tensor(W, 2 * FFN, IN, 0), .y = place(Y, 0), .rows = ROWS,
                            .in = IN, .out = 2 * FFN, .accumulation = QE_ACCUMULATE_FAST, .target = target(ROWS, FFN)};
}

static void a_product_with_swiglu_is_taken_with_either_plane_or_both(void **state) {
    (void)state;
    qe_args_linear a = linear();
    assert_true(qe_linear_swiglu_fits(&a));
    a.target.amax = NULL;
    assert_true(qe_linear_swiglu_fits(&a));
    a.target.operand = (qe_qtensor){0};
    assert_true(qe_linear_swiglu_fits(&a));
    a = linear();
    a.target.retained = (qe_qtensor){0};
    assert_true(qe_linear_swiglu_fits(&a));
}

/* Codes over the last bytes of what is read, over its first, and right behind it. */
static void codes_over_what_a_product_still_reads_are_left_to_the_parts(void **state) {
    (void)state;
    const struct {
        int which;
        uint64_t bytes;
    } read[] = {{X, ROWS * IN}, {W, 2 * FFN * IN}, {Y, ROWS * 2 * FFN * 2}};
    for (size_t i = 0; i < sizeof read / sizeof *read; ++i)
        for (int retains = 0; retains < 2; ++retains) {
            qe_args_linear a = linear();
            void **codes = retains ? &a.target.retained.codes : &a.target.operand.codes;
            *codes = place(read[i].which, 0);
            assert_false(qe_linear_swiglu_fits(&a));
            *codes = place(read[i].which, read[i].bytes - 16);
            assert_false(qe_linear_swiglu_fits(&a));
            *codes = place(read[i].which, read[i].bytes);
            assert_true(qe_linear_swiglu_fits(&a));
            *codes = (char *)place(read[i].which, 0) - ROWS * FFN + 16;
            assert_false(qe_linear_swiglu_fits(&a));
            *codes = (char *)place(read[i].which, 0) - ROWS * FFN;
            assert_true(qe_linear_swiglu_fits(&a));
        }
}

static void scales_that_a_product_still_reads_are_not_written(void **state) {
    (void)state;
    qe_args_linear a = linear();
    a.target.operand.scale_inv = a.x.scale_inv;
    assert_false(qe_linear_swiglu_fits(&a));
    a = linear();
    a.target.retained.scale_inv = a.w.scale_inv;
    assert_false(qe_linear_swiglu_fits(&a));
    a = linear();
    a.target.retained.scale_inv = a.target.operand.scale_inv; /* as FP8 training has it */
    assert_true(qe_linear_swiglu_fits(&a));
}

static void a_product_off_whole_sixteens_is_left_to_the_parts(void **state) {
    (void)state;
    for (int i = 0; i < 5; ++i) {
        qe_args_linear a = linear();
        void **const at[] = {&a.x.codes, &a.w.codes, &a.y, &a.target.operand.codes, &a.target.retained.codes};
        *at[i] = (char *)*at[i] + 2;
        assert_false(qe_linear_swiglu_fits(&a));
    }
}

static void sizes_that_a_product_does_not_count_are_left_to_the_parts(void **state) {
    (void)state;
    static const uint32_t sizes[][3] = {
        {0, IN, 2 * FFN},          {ROWS, 0, 2 * FFN},       {ROWS, IN, 0},        {ROWS - 8, IN, 2 * FFN},
        {ROWS, IN - 64, 2 * FFN},  {ROWS, IN, 2 * FFN - 16}, {ROWS, IN, 1},        {1u << 31, IN, 32},
        {0xFFFFFFF0u, IN, 32},     {16, 1u << 31, 32},       {16, IN, 1u << 31},   {16, IN, 0xFFFFFFE0u},
        {1u << 30, 128, 1u << 30},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
        qe_args_linear a = linear();
        a.rows = sizes[i][0], a.in = sizes[i][1], a.out = sizes[i][2];
        assert_false(qe_linear_swiglu_fits(&a));
    }
}

static void other_products_are_left_to_the_parts(void **state) {
    (void)state;
    for (int i = 0; i < 10; ++i) {
        qe_args_linear a = linear();
        switch (i) {
            case 0: a.residual = place(Y, 0); break;
            case 1: a.accumulation = QE_ACCUMULATE_SPLIT; break;
            case 2: a.x.format = QE_FORMAT_E5M2; break;
            case 3: a.w.transposed = 1; break;
            case 4: a.x.blocking = QE_BLOCKING_ROW; break;
            case 5: a.x.scale_inv = NULL; break;
            case 6: a.target.recipe = QE_RECIPE_CURRENT; break;
            case 7: a.target.format = QE_FORMAT_E5M2; break;
            case 8: a.target.scale = NULL; break;
            default: a.target.retained.format = QE_FORMAT_BF16; break;
        }
        assert_false(qe_linear_swiglu_fits(&a));
    }
}

/* --- input gradients ---------------------------------------------------------------------------------------------- */

enum { OUT_OF_DOWN = 512, GATE_UP = TURNED_SCALE + 1 };

static qe_args_linear_input_grad input_grad(void) {
    return (qe_args_linear_input_grad){.dy = tensor(X, ROWS, OUT_OF_DOWN, 0), .w = tensor(W, OUT_OF_DOWN, FFN, 1),
                                       .dx = place(Y, 0), .rows = ROWS, .in = FFN, .out = OUT_OF_DOWN,
                                       .accumulation = QE_ACCUMULATE_SPLIT, .gate_up = place(GATE_UP, 0),
                                       .target = target(ROWS, 2 * FFN)};
}

static void codes_over_what_an_input_gradient_still_reads_are_left_to_the_parts(void **state) {
    (void)state;
    const struct {
        int which;
        uint64_t bytes;
    } read[] = {{X, ROWS * OUT_OF_DOWN}, {W, FFN * OUT_OF_DOWN}, {GATE_UP, ROWS * 2 * FFN * 2}};
    qe_args_linear_input_grad a = input_grad();
    assert_true(qe_input_grad_swiglu_fits(&a));
    for (size_t i = 0; i < sizeof read / sizeof *read; ++i)
        for (int retains = 0; retains < 2; ++retains) {
            a = input_grad();
            void **codes = retains ? &a.target.retained.codes : &a.target.operand.codes;
            *codes = place(read[i].which, 0);
            assert_false(qe_input_grad_swiglu_fits(&a));
            *codes = place(read[i].which, read[i].bytes - 16);
            assert_false(qe_input_grad_swiglu_fits(&a));
            *codes = place(read[i].which, read[i].bytes);
            assert_true(qe_input_grad_swiglu_fits(&a));
            *codes = (char *)place(read[i].which, 0) - ROWS * 2 * FFN + 16;
            assert_false(qe_input_grad_swiglu_fits(&a));
        }
    a = input_grad();
    a.target.operand.scale_inv = a.dy.scale_inv;
    assert_false(qe_input_grad_swiglu_fits(&a));
}

static void other_input_gradients_are_left_to_the_parts(void **state) {
    (void)state;
    for (int i = 0; i < 15; ++i) {
        qe_args_linear_input_grad a = input_grad();
        switch (i) {
            case 0: a.accumulation = QE_ACCUMULATE_FAST; break;
            case 1: a.dy.format = QE_FORMAT_E5M2; break; /* the target's is another */
            case 2: a.w.transposed = 0; break;
            case 3: a.dy.transposed = 1; break;
            case 4: a.gate_up = NULL; break;
            case 5: a.gate_up = place(GATE_UP, 2); break;
            case 6: a.target.operand = (qe_qtensor){0}; break;
            case 7: a.target.retained = (qe_qtensor){0}; break;
            case 8: a.target.recipe = QE_RECIPE_CURRENT; break;
            case 9: a.rows = ROWS - 16; break;
            case 10: a.in = FFN - 32; break;
            case 11: a.out = 0; break;
            case 12: a.rows = 1u << 31; break;
            case 13: a.in = 1u << 30; break;
            default: a.target.scale = NULL; break;
        }
        assert_false(qe_input_grad_swiglu_fits(&a));
    }
}

/* --- attention --------------------------------------------------------------------------------------------------- */

enum { SEQUENCES = 3, SEQUENCE = 160, TOKENS = SEQUENCES * SEQUENCE, HEADS = 4, KV_HEADS = 2, DIM = 64 };
enum { QKV = X, LSE = W, OUT = Y };

static qe_args_attention attention(void) {
    return (qe_args_attention){.qkv = place(QKV, 0), .out = place(OUT, 0), .lse = place(LSE, 0), .sequences = SEQUENCES,
                               .sequence = SEQUENCE, .heads = HEADS, .kv_heads = KV_HEADS, .head_dim = DIM,
                               .deterministic = 1, .target = target(TOKENS, HEADS * DIM)};
}

static void attention_makes_either_plane_or_both(void **state) {
    (void)state;
    qe_args_attention a = attention();
    assert_true(qe_attention_forward_takes(&a) && qe_attention_forward_quantizes(&a));
    a.target.operand = (qe_qtensor){0};
    assert_true(qe_attention_forward_quantizes(&a));
    a.target.retained = (qe_qtensor){0};
    assert_false(qe_attention_forward_quantizes(&a)); /* there is nothing to make */
    a = attention();
    a.target.retained = (qe_qtensor){0};
    assert_true(qe_attention_forward_quantizes(&a));
}

/* The log-sums are written meanwhile: codes over them are to come last. */
static void codes_over_what_attention_still_reads_are_made_behind_it(void **state) {
    (void)state;
    const struct {
        int which;
        uint64_t bytes;
    } used[] = {{QKV, TOKENS * (HEADS + 2 * KV_HEADS) * DIM * 2}, {LSE, TOKENS * HEADS * 4}};
    for (size_t i = 0; i < sizeof used / sizeof *used; ++i)
        for (int retains = 0; retains < 2; ++retains) {
            qe_args_attention a = attention();
            void **codes = retains ? &a.target.retained.codes : &a.target.operand.codes;
            *codes = place(used[i].which, 0);
            assert_false(qe_attention_forward_quantizes(&a));
            *codes = place(used[i].which, used[i].bytes - 16);
            assert_false(qe_attention_forward_quantizes(&a));
            *codes = place(used[i].which, used[i].bytes);
            assert_true(qe_attention_forward_quantizes(&a));
            *codes = (char *)place(used[i].which, 0) - TOKENS * HEADS * DIM + 16;
            assert_false(qe_attention_forward_quantizes(&a));
        }
}

static void other_targets_of_attention_are_made_behind_it(void **state) {
    (void)state;
    for (int i = 0; i < 6; ++i) {
        qe_args_attention a = attention();
        switch (i) {
            case 0: a.target.recipe = QE_RECIPE_CURRENT; break;
            case 1: a.target.operand.format = QE_FORMAT_BF16; break;
            case 2: a.sequence = 136; break;
            case 3: a.target.operand.codes = place(CODES, 2); break;
            case 4: a.target.retained.codes = place(TURNED, 8); break;
            default: a.target.retained.transposed = 0; break; /* two planes that lie alike */
        }
        assert_false(qe_attention_forward_quantizes(&a));
    }
}

static void sizes_that_attention_does_not_count_are_not_taken(void **state) {
    (void)state;
    static const uint32_t sizes[][4] = {
        {1u << 16, 1u << 16, 1, 1},     {1u << 31, 1, 1, 1},           {1, 1u << 31, 1, 1},
        {1, 16, 1u << 26, 1u << 24},    {1, 16, 1, 1u << 25},          {0xFFFFFFFFu, 0xFFFFFFFFu, 1, 1},
        {1u << 24, 16, 1u << 8, 1},     {1u << 31, 0xFFFFFFFFu, 1u << 20, 1},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
        qe_args_attention a = attention();
        a.sequences = sizes[i][0], a.sequence = sizes[i][1], a.heads = sizes[i][2], a.kv_heads = sizes[i][3];
        assert_false(qe_attention_forward_takes(&a));
    }
    qe_args_attention a = attention();
    a.head_dim = 96;
    assert_false(qe_attention_forward_takes(&a));
}

/* Its last kernel has a row of blocks for each head of queries, keys and values. */
static void heads_that_a_backward_has_no_blocks_for_are_not_taken(void **state) {
    (void)state;
    static const struct {
        uint32_t sequences, sequence, heads, kv_heads, is_taken;
    } sizes[] = {{1, 16, 65533, 1, 1}, {1, 16, 65534, 1, 0},          {1, 16, 21845, 21845, 1},
                 {1, 16, 21846, 21846, 0}, {1, 16, 1, 0xFFFFFFFFu, 0}, {1, 16, 0xFFFFFFFFu, 1, 0},
                 {65535, 16, 1, 1, 1}, {65536, 16, 1, 1, 0},          {1, 0xFFFFFFFFu, 1, 1, 0}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
        const qe_args_attention_backward a = {.sequences = sizes[i].sequences, .sequence = sizes[i].sequence,
                                              .heads = sizes[i].heads, .kv_heads = sizes[i].kv_heads, .head_dim = DIM};
        assert_int_equal(qe_attention_own_takes(&a) != 0, sizes[i].is_taken);
    }
}

/* --- shapes in a file of choices --------------------------------------------------------------------------------- */

static int shape_fits(const char *key) {
    qe_cuda_choice choice = {.workspace_bytes = 0};
    qe_fused_shape shape, again;
    qe_fused_way way;
    qe_product product;
    qe_op op, parts[QE_OP_PARTS_MAX];
    memcpy(choice.key, key, strlen(key));
    assert_int_equal(qe_fused_choice_parse(&choice, &shape, &way, NULL), QE_OK);
    qe_fused_op_of(&shape, &op);
    assert_int_equal(qe_op_parts(&op, parts), 2);
    assert_int_equal(qe_product_of(&parts[0], &product, NULL), QE_OK);
    qe_fused_shape_of(&op, &product, &again);
    if (shape.head_dim == 0) again.head_dim = 0; /* any */
    assert_memory_equal(&shape, &again, sizeof shape);
    if (op.kind == QE_OP_LINEAR_ROPE) return qe_linear_rope_fits(&op.args.linear_rope);
    return op.kind == QE_OP_LINEAR ? qe_linear_swiglu_fits(&op.args.linear)
                                   : qe_input_grad_swiglu_fits(&op.args.linear_input_grad);
}

static void a_shape_of_a_file_is_taken_where_an_op_of_it_is(void **state) {
    (void)state;
    assert_true(shape_fits("fused linear m2048 n28672 k4096 tn e4m3 e4m3 fast to e4m3"));
    assert_true(shape_fits("fused linear m16 n32 k128 tn e4m3 e4m3 fast to e4m3"));
    assert_true(shape_fits("fused linear m2048 n6144 k4096 tn e4m3 e4m3 fast to rope"));
    assert_true(shape_fits("fused linear m16 n64 k1024 tn e4m3 e4m3 fast to rope"));
    assert_true(shape_fits("fused linear m2048 n6144 k4096 tn e4m3 e4m3 fast to rope 64"));
    assert_true(shape_fits("fused linear m2048 n6144 k4096 tn e4m3 e4m3 fast to rope 128"));
    assert_true(shape_fits("fused linear_input_grad m2048 n14336 k4096 tn e5m2 e4m3 split to e5m2"));
    assert_true(shape_fits("fused linear_input_grad m32 n64 k128 tn e4m3 e4m3 split to e4m3"));
}

static void a_shape_that_no_kernel_takes_is_known_without_its_op(void **state) {
    (void)state;
    static const char *const keys[] = {
        "fused linear m2048 n28672 k4096 tn e4m3 e4m3 split to e4m3",
        "fused linear m2048 n28672 k4096 tn e4m3 e4m3 fast to e5m2",
        "fused linear m2048 n28672 k4096 tn e5m2 e4m3 fast to e4m3",
        "fused linear m2048 n28672 k4112 tn e4m3 e4m3 fast to e4m3",
        "fused linear m2048 n28688 k4096 tn e4m3 e4m3 fast to e4m3",
        "fused linear m2048 n28672 k4096 tn bf16 bf16 split to e4m3",
        "fused linear m2147483648 n32 k128 tn e4m3 e4m3 fast to e4m3",
        "fused linear m4294967280 n4294967264 k4294967168 tn e4m3 e4m3 fast to e4m3",
        "fused linear m2048 n6144 k4096 tn e4m3 e4m3 split to rope",
        "fused linear m2048 n6160 k4096 tn e4m3 e4m3 fast to rope",
        "fused linear m2048 n6144 k4096 tn e4m3 e4m3 fast to rope 32",
        "fused linear m2048 n6144 k4096 tn e4m3 e4m3 fast to rope 96",
        "fused linear m2048 n6144 k4096 tn e4m3 e4m3 fast to rope 6144",
        "fused linear m2048 n6144 k896 tn e4m3 e4m3 fast to rope",
        "fused linear m2048 n6144 k4112 tn e4m3 e4m3 fast to rope",
        "fused linear m2048 n6144 k4096 tn bf16 bf16 split to rope",
        "fused linear m2147483648 n64 k1024 tn e4m3 e4m3 fast to rope",
        "fused linear m4294967280 n4294967232 k4294967168 tn e4m3 e4m3 fast to rope",
        "fused linear_input_grad m2048 n14336 k4096 tn e5m2 e4m3 fast to e5m2",
        "fused linear_input_grad m2048 n14336 k4096 tn e5m2 e4m3 split to e4m3",
        "fused linear_input_grad m2064 n14336 k4096 tn e5m2 e4m3 split to e5m2",
        "fused linear_input_grad m2048 n14352 k4096 tn e5m2 e4m3 split to e5m2",
        "fused linear_input_grad m2048 n14336 k4112 tn e5m2 e4m3 split to e5m2",
        "fused linear_input_grad m2048 n14336 k4096 nn bf16 bf16 split to e5m2",
        "fused linear_input_grad m32 n2147483648 k128 tn e5m2 e4m3 split to e5m2",
    };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; ++i) {
        if (shape_fits(keys[i])) fail_msg("%s", keys[i]);
    }
}

/* --- products with rope ------------------------------------------------------------------------------------------- */

enum { ROPE_IN = 1024, ROPE_COLUMNS = (HEADS + 2 * KV_HEADS) * DIM, ROPE_SEQUENCE = 128, COSINE, SINE };

static qe_args_linear_rope linear_rope(void) {
    return (qe_args_linear_rope){.x = tensor(X, ROWS, ROPE_IN, 0), .w = tensor(W, ROPE_COLUMNS, ROPE_IN, 0),
                                 .y = place(Y, 0), .cosine = place(COSINE, 0), .sine = place(SINE, 0), .rows = ROWS,
                                 .in = ROPE_IN, .sequence = ROPE_SEQUENCE, .heads = HEADS, .kv_heads = KV_HEADS,
                                 .head_dim = DIM, .accumulation = QE_ACCUMULATE_FAST};
}

static void heads_over_what_a_product_still_reads_are_left_to_the_parts(void **state) {
    (void)state;
    const struct {
        int which;
        uint64_t bytes;
    } read[] = {{X, ROWS * ROPE_IN}, {W, (uint64_t)ROPE_COLUMNS * ROPE_IN}, {X_SCALE, 4}, {W_SCALE, 4},
                {COSINE, ROPE_SEQUENCE * DIM / 2 * 4}, {SINE, ROPE_SEQUENCE * DIM / 2 * 4}};
    qe_args_linear_rope a = linear_rope();
    assert_true(qe_linear_rope_fits(&a));
    for (size_t i = 0; i < sizeof read / sizeof *read; ++i) {
        const uint64_t whole = (read[i].bytes + 15) / 16 * 16;
        a.y = place(read[i].which, 0);
        assert_false(qe_linear_rope_fits(&a));
        a.y = place(read[i].which, whole - 16);
        assert_false(qe_linear_rope_fits(&a));
        a.y = place(read[i].which, whole);
        assert_true(qe_linear_rope_fits(&a));
        a.y = (char *)place(read[i].which, 0) - ROWS * ROPE_COLUMNS * 2 + 16;
        assert_false(qe_linear_rope_fits(&a));
        a.y = (char *)place(read[i].which, 0) - ROWS * ROPE_COLUMNS * 2;
        assert_true(qe_linear_rope_fits(&a));
    }
}

static void a_product_with_rope_off_whole_sixteens_is_left_to_the_parts(void **state) {
    (void)state;
    for (int i = 0; i < 3; ++i) {
        qe_args_linear_rope a = linear_rope();
        void **const at[] = {&a.x.codes, &a.w.codes, &a.y};
        *at[i] = (char *)*at[i] + 2;
        assert_false(qe_linear_rope_fits(&a));
    }
    qe_args_linear_rope a = linear_rope();
    a.cosine += 1;
    assert_false(qe_linear_rope_fits(&a));
    a = linear_rope();
    a.sine += 1;
    assert_false(qe_linear_rope_fits(&a));
}

static void other_products_with_rope_are_left_to_the_parts(void **state) {
    (void)state;
    for (int i = 0; i < 15; ++i) {
        qe_args_linear_rope a = linear_rope();
        switch (i) {
            case 0: a.rows = 0; break;
            case 1: a.in = ROPE_IN - 128; break;
            case 2: a.in = ROPE_IN + 64; break;
            case 3: a.head_dim = 96; break;
            case 4: a.head_dim = 32; break;
            case 5: a.sequence = 0; break;
            case 6: a.heads = 0xFFFFFFF0u; break;
            case 7: a.heads = 1u << 25; break;
            case 8: a.rows = 1u << 31; break;
            case 9: a.accumulation = QE_ACCUMULATE_SPLIT; break;
            case 10: a.x.format = QE_FORMAT_E5M2; break;
            case 11: a.w.transposed = 1; break;
            case 12: a.x.blocking = QE_BLOCKING_ROW; break;
            case 13: a.w.scale_inv = NULL; break;
            default: a.heads = a.kv_heads = 0; break;
        }
        assert_false(qe_linear_rope_fits(&a));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_product_with_swiglu_is_taken_with_either_plane_or_both),
        cmocka_unit_test(codes_over_what_a_product_still_reads_are_left_to_the_parts),
        cmocka_unit_test(scales_that_a_product_still_reads_are_not_written),
        cmocka_unit_test(a_product_off_whole_sixteens_is_left_to_the_parts),
        cmocka_unit_test(sizes_that_a_product_does_not_count_are_left_to_the_parts),
        cmocka_unit_test(other_products_are_left_to_the_parts),
        cmocka_unit_test(codes_over_what_an_input_gradient_still_reads_are_left_to_the_parts),
        cmocka_unit_test(other_input_gradients_are_left_to_the_parts),
        cmocka_unit_test(a_shape_of_a_file_is_taken_where_an_op_of_it_is),
        cmocka_unit_test(a_shape_that_no_kernel_takes_is_known_without_its_op),
        cmocka_unit_test(heads_over_what_a_product_still_reads_are_left_to_the_parts),
        cmocka_unit_test(a_product_with_rope_off_whole_sixteens_is_left_to_the_parts),
        cmocka_unit_test(other_products_with_rope_are_left_to_the_parts),
        cmocka_unit_test(attention_makes_either_plane_or_both),
        cmocka_unit_test(codes_over_what_attention_still_reads_are_made_behind_it),
        cmocka_unit_test(other_targets_of_attention_are_made_behind_it),
        cmocka_unit_test(sizes_that_attention_does_not_count_are_not_taken),
        cmocka_unit_test(heads_that_a_backward_has_no_blocks_for_are_not_taken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
