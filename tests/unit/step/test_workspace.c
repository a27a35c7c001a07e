/* The scratch of matrix products is an object of the plan: every product declares it, the memory ledger counts it, and
 * whoever works in it at the same time is trapped. */
#include <string.h>
#include "step/team.h"
#include "step_world.h"

enum { WORKSPACE_BYTES = 4096 };

static const qe_model_config config = {.layers = 4, .hidden = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 64,
                                       .sequence = 16, .sequences = 1, .rope_theta = 1e4f, .norm_epsilon = 1e-5f,
                                       .numerics = {.activation = QE_FORMAT_FP32, .operands = QE_OPERANDS_DECODED,
                                                    .workspace_bytes = WORKSPACE_BYTES}};

static void *workspace_of(const qe_op *op) {
    switch (op->kind) {
    case QE_OP_LINEAR: return op->args.linear.workspace;
    case QE_OP_LINEAR_ROPE: return op->args.linear_rope.workspace;
    case QE_OP_LINEAR_INPUT_GRAD: return op->args.linear_input_grad.workspace;
    case QE_OP_LINEAR_WEIGHT_GRAD: return op->args.linear_weight_grad.workspace;
    default: return NULL;
    }
}

static int is_product(const qe_op *op) {
    return op->kind == QE_OP_LINEAR || op->kind == QE_OP_LINEAR_ROPE || op->kind == QE_OP_LINEAR_INPUT_GRAD ||
           op->kind == QE_OP_LINEAR_WEIGHT_GRAD;
}

static uint32_t declares_workspace(const qe_rank_plan *plan, const qe_item *item) {
    uint32_t count = 0;
    for (uint32_t e = 0; e < item->effect_count; e++) {
        const qe_effect *effect = &plan->program.effects[item->first_effect + e];
        if (effect->object != plan->workspace_object) continue;
        assert_int_equal(effect->kind, QE_EFFECT_BUFFER_WRITE);
        assert_int_equal(effect->begin, 0);
        assert_int_equal(effect->end, WORKSPACE_BYTES);
        count++;
    }
    return count;
}

static uint32_t check_binding(const qe_rank *rank, const qe_binding *binding) {
    const qe_rank_plan *plan = binding->rank_plan;
    uint32_t products = 0;
    for (uint32_t i = 0; i < plan->program.item_count; i++) {
        const qe_item *item = &plan->program.items[i];
        if (item->kind != QE_ITEM_OP) continue;
        const qe_op *op = &binding->ops[plan->item_op[i]];
        assert_int_equal(declares_workspace(plan, item), is_product(op));
        assert_ptr_equal(workspace_of(op), is_product(op) ? rank->workspace : NULL);
        if (is_product(op)) assert_int_equal(item->stream, plan->stream_compute);
        products += (uint32_t)is_product(op);
    }
    return products;
}

static void every_product_declares_the_ranks_workspace_and_works_in_it(void **state) {
    (void)state;
    world_options options = {.config = &config, .ranks = 2, .evaluates = 1, .schedule = "zbh1",
                             .capture = QE_CAPTURE_ACTION};
    world w;
    world_open(&w, &options);
    for (uint32_t i = 0; i < 2; i++) {
        const qe_rank *rank = &w.team->ranks[i];
        assert_non_null(rank->workspace);
        assert_true(check_binding(rank, &rank->train) > 0);
        assert_true(check_binding(rank, &rank->evaluate) > 0);
        qe_memory_ledger foretold = qe_memory_foretell(w.plan, w.evaluation, i);
        qe_memory_ledger taken = qe_team_memory_ledger(w.team, i);
        assert_int_equal(foretold.bytes[QE_MEMORY_WORKSPACE], taken.bytes[QE_MEMORY_WORKSPACE]);
        assert_true(foretold.bytes[QE_MEMORY_WORKSPACE] > WORKSPACE_BYTES);
    }
    assert_ptr_not_equal(w.team->ranks[0].workspace, w.team->ranks[1].workspace);
    world_step(&w, 0);
    world_close(&w);
}

/* A product that a second stream runs beside the first: what two graphs that share a workspace do. */
static void a_product_beside_another_in_the_same_workspace_is_trapped(void **state) {
    (void)state;
    world_options options = {.config = &config, .ranks = 2, .schedule = "zbh1"};
    world w;
    qe_ledger *ledger;
    qe_violations violations;
    world_prepare(&w, &options);
    const qe_rank_plan *plan = &w.plan->rank[0];
    const qe_program *program = &plan->program;
    uint32_t comm = 0, tried = 0;
    while (program->streams[comm].role != QE_STREAM_COMM) comm++;
    assert_int_equal(qe_ledger_create(program, &ledger, &w.error), QE_OK);
    assert_int_equal(qe_ledger_certify(ledger, &violations, &w.error), QE_OK);
    qe_ledger_step_begin(ledger);
    for (uint32_t i = 0; i < program->item_count; i++) {
        const qe_item *item = &program->items[i];
        const qe_effect *effects = item->effect_count > 0 ? &program->effects[item->first_effect] : NULL;
        assert_int_equal(qe_ledger_submit(ledger, item, effects, i, &violations), QE_OK);
        if (item->kind != QE_ITEM_OP || declares_workspace(plan, item) == 0) continue;
        qe_item beside = *item;
        const qe_effect alone = {.kind = QE_EFFECT_BUFFER_WRITE, .object = plan->workspace_object,
                                 .end = WORKSPACE_BYTES};
        beside.stream = comm;
        beside.effect_count = 1;
        assert_int_equal(qe_ledger_submit(ledger, &beside, &alone, QE_NONE, &violations), QE_CONTRACT);
        assert_int_equal(violations.record[0].rule, QE_RULE_SYNC_SIDE);
        assert_int_equal(violations.record[0].object, plan->workspace_object);
        tried++;
    }
    assert_true(tried > 20);
    assert_int_equal(qe_ledger_step_end(ledger, &violations), QE_OK);
    qe_ledger_destroy(ledger);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_product_declares_the_ranks_workspace_and_works_in_it),
        cmocka_unit_test(a_product_beside_another_in_the_same_workspace_is_trapped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
