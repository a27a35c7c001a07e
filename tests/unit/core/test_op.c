/* op.c, op_layout.c - ops in words, in parts, and where their addresses lie. */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "qeffect/op.h"

static char places[64];

static const qe_op_kind doubles[] = {QE_OP_LINEAR, QE_OP_LINEAR_INPUT_GRAD, QE_OP_ATTENTION, QE_OP_ATTENTION_BACKWARD};
enum { DOUBLES = sizeof doubles / sizeof *doubles };

static qe_quantize_target *target_of(qe_op *op) {
    switch ((int)op->kind) {
    case QE_OP_LINEAR: return &op->args.linear.target;
    case QE_OP_LINEAR_INPUT_GRAD: return &op->args.linear_input_grad.target;
    case QE_OP_ATTENTION: return &op->args.attention.target;
    default: return &op->args.attention_backward.target;
    }
}

/* Two parts whatever it is given. */
static int is_always_double(qe_op_kind kind) { return kind == QE_OP_LINEAR_ROPE; }

/* Every word that is an address names a place of its own. */
static void addresses_fill(qe_op *op) {
    for (uint32_t i = 0; i < QE_OP_RAW_WORDS; i++)
        if (qe_op_is_address(op->kind, i * 8)) op->args.raw[i] = (uint64_t)(uintptr_t)&places[i];
}

static void an_op_is_one_part_but_for_the_four_that_have_a_target(void **state) {
    (void)state;
    for (qe_op_kind kind = QE_OP_EMBED; kind < QE_OP_KINDS; kind++) {
        if (is_always_double(kind)) continue;
        qe_op op = {.kind = kind, .layer = 7, .per_microbatch = 1}, parts[QE_OP_PARTS_MAX];
        assert_int_equal(qe_op_parts(&op, parts), 1); /* no address, so no target */
        assert_memory_equal(&parts[0], &op, sizeof op);
        assert_string_equal(qe_op_title(&op), qe_op_name(kind));
        int has = 0;
        for (int i = 0; i < DOUBLES; i++) has |= doubles[i] == kind;
        addresses_fill(&op);
        assert_int_equal(qe_op_parts(&op, parts), has ? 2 : 1);
        has |= kind == QE_OP_NORM_BACKWARD; /* in one part */
        assert_int_equal(strcmp(qe_op_title(&op), qe_op_name(kind)) != 0, has);
    }
}

static void either_tensor_makes_a_target(void **state) {
    (void)state;
    for (int i = 0; i < DOUBLES; i++) {
        qe_op op = {.kind = doubles[i], .layer = 7, .per_microbatch = 1}, parts[QE_OP_PARTS_MAX];
        target_of(&op)->operand.codes = places;
        assert_int_equal(qe_op_parts(&op, parts), 2);
        assert_int_equal(parts[1].layer, 7);
        assert_int_equal(parts[1].per_microbatch, 1);
        target_of(&op)->operand.codes = NULL;
        target_of(&op)->retained.codes = places;
        assert_int_equal(qe_op_parts(&op, parts), 2);
        assert_int_equal(qe_op_parts(&parts[0], parts), 1); /* the first has none */
    }
}

static void a_product_with_rope_is_two_parts_whether_it_has_addresses_or_none(void **state) {
    (void)state;
    qe_op op = {.kind = QE_OP_LINEAR_ROPE, .layer = 7, .per_microbatch = 1}, parts[QE_OP_PARTS_MAX];
    for (int filled = 0; filled < 2; filled++) {
        assert_int_equal(qe_op_parts(&op, parts), 2);
        assert_string_equal(qe_op_title(&op), "linear_rope");
        const qe_op_kind kinds[] = {QE_OP_LINEAR, QE_OP_ROPE};
        for (int i = 0; i < 2; i++) {
            qe_op again[QE_OP_PARTS_MAX];
            assert_int_equal(parts[i].kind, kinds[i]);
            assert_int_equal(parts[i].layer, 7);
            assert_int_equal(parts[i].per_microbatch, 1);
            assert_int_equal(qe_op_parts(&parts[i], again), 1);
        }
        addresses_fill(&op);
    }
}

static int names(const qe_op *op, uint64_t address) {
    for (uint32_t i = 0; i < QE_OP_RAW_WORDS; i++)
        if (qe_op_is_address(op->kind, i * 8) && op->args.raw[i] == address) return 1;
    return 0;
}

/* Nothing that the whole names is lost, and the second reads what the first writes. */
static void the_parts_name_all_that_the_whole_names(void **state) {
    (void)state;
    for (int i = 0; i <= DOUBLES; i++) {
        qe_op op = {.kind = i < DOUBLES ? doubles[i] : QE_OP_LINEAR_ROPE}, parts[QE_OP_PARTS_MAX];
        addresses_fill(&op);
        assert_int_equal(qe_op_parts(&op, parts), 2);
        int shared = 0;
        for (uint32_t word = 0; word < QE_OP_RAW_WORDS; word++) {
            if (!qe_op_is_address(op.kind, word * 8)) continue;
            const int first = names(&parts[0], op.args.raw[word]), second = names(&parts[1], op.args.raw[word]);
            assert_true(first || second);
            shared += first && second;
        }
        assert_int_equal(shared, 1); /* what is between them alone */
    }
}

static void the_second_part_has_the_shape_that_the_first_leaves(void **state) {
    (void)state;
    qe_op parts[QE_OP_PARTS_MAX];
    qe_op op = {.kind = QE_OP_LINEAR, .args.linear = {.y = places, .rows = 3, .in = 5, .out = 14}};
    op.args.linear.target.operand.codes = places + 1;
    assert_int_equal(qe_op_parts(&op, parts), 2);
    assert_int_equal(parts[1].kind, QE_OP_SWIGLU_QUANTIZE);
    assert_ptr_equal(parts[1].args.swiglu.gate_up, places);
    assert_int_equal(parts[1].args.swiglu.rows, 3);
    assert_int_equal(parts[1].args.swiglu.ffn, 7);
    op = (qe_op){.kind = QE_OP_LINEAR_INPUT_GRAD, .args.linear_input_grad = {.dx = places, .rows = 3, .in = 5}};
    op.args.linear_input_grad.target.operand.codes = places + 1;
    assert_int_equal(qe_op_parts(&op, parts), 2);
    assert_int_equal(parts[1].kind, QE_OP_SWIGLU_BACKWARD_QUANTIZE);
    assert_ptr_equal(parts[1].args.swiglu_backward.dy, places);
    assert_int_equal(parts[1].args.swiglu_backward.rows, 3);
    assert_int_equal(parts[1].args.swiglu_backward.ffn, 5);
    op = (qe_op){.kind = QE_OP_ATTENTION,
                 .args.attention = {.out = places, .sequences = 2, .sequence = 3, .heads = 5, .head_dim = 8}};
    op.args.attention.target.operand.codes = places + 1;
    assert_int_equal(qe_op_parts(&op, parts), 2);
    assert_int_equal(parts[1].kind, QE_OP_QUANTIZE);
    assert_ptr_equal(parts[1].args.quantize.x, places);
    assert_int_equal(parts[1].args.quantize.rows, 6);
    assert_int_equal(parts[1].args.quantize.columns, 40);
    op = (qe_op){.kind = QE_OP_LINEAR_ROPE,
                 .args.linear_rope = {.y = places, .rows = 6, .in = 5, .sequence = 3, .heads = 5, .kv_heads = 2,
                                      .head_dim = 8, .accumulation = QE_ACCUMULATE_SPLIT}};
    assert_int_equal(qe_op_parts(&op, parts), 2);
    assert_int_equal(parts[0].args.linear.rows, 6);
    assert_int_equal(parts[0].args.linear.in, 5);
    assert_int_equal(parts[0].args.linear.out, 72);
    assert_int_equal(parts[0].args.linear.accumulation, QE_ACCUMULATE_SPLIT);
    assert_ptr_equal(parts[1].args.rope.qkv, places);
    assert_int_equal(parts[1].args.rope.rows, 6);
    assert_int_equal(parts[1].args.rope.sequence, 3);
    assert_int_equal(parts[1].args.rope.heads, 5);
    assert_int_equal(parts[1].args.rope.kv_heads, 2);
    assert_int_equal(parts[1].args.rope.head_dim, 8);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_op_is_one_part_but_for_the_four_that_have_a_target),
        cmocka_unit_test(either_tensor_makes_a_target),
        cmocka_unit_test(a_product_with_rope_is_two_parts_whether_it_has_addresses_or_none),
        cmocka_unit_test(the_parts_name_all_that_the_whole_names),
        cmocka_unit_test(the_second_part_has_the_shape_that_the_first_leaves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
