/* What a plan says of itself: items, units and ops number each other without holes; and what is no plan is refused. */
#include "step_world.h"

static qe_unit_kind kind_of(const qe_rank_plan *rank, uint32_t item) {
    return (qe_unit_kind)rank->units[rank->item_unit[item]].kind;
}

static void ops_are_numbered_in_program_order(const qe_rank_plan *rank) {
    uint32_t next = 0;
    for (uint32_t i = 0; i < rank->program.item_count; i++) {
        assert_true(rank->item_unit[i] < rank->unit_count);
        const qe_unit *unit = &rank->units[rank->item_unit[i]];
        const qe_item *item = &rank->program.items[i];
        assert_int_equal(item->stream, unit->stream);
        assert_int_equal(item->stage, unit->stage);
        assert_int_equal(item->microbatch, unit->microbatch);
        if (item->kind != QE_ITEM_OP) {
            assert_true(item->kind == QE_ITEM_RECORD || item->kind == QE_ITEM_WAIT);
            assert_int_equal(rank->item_op[i], QE_NONE);
            continue;
        }
        assert_int_equal(rank->item_op[i], next);
        assert_in_range(next, unit->first_op, unit->first_op + unit->op_count - 1);
        next++;
    }
    assert_int_equal(next, rank->op_count);
}

static void units_tile_the_ops(const qe_rank_plan *rank) {
    uint32_t next = 0;
    for (uint32_t u = 0; u < rank->unit_count; u++) {
        assert_int_equal(rank->units[u].first_op, next);
        assert_true(rank->units[u].op_count > 0);
        next += rank->units[u].op_count;
    }
    assert_int_equal(next, rank->op_count);
}

/* Waits and records carry their unit, so every item of a phase belongs to a unit of that phase. */
static void phases_follow_each_other(const qe_rank_plan *rank) {
    assert_true(rank->take_begin <= rank->commit_begin);
    assert_true(rank->commit_begin <= rank->exit_begin);
    assert_true(rank->exit_begin <= rank->program.item_count);
    for (uint32_t i = 0; i < rank->program.item_count; i++) {
        qe_unit_kind kind = kind_of(rank, i);
        int phase = kind == QE_UNIT_TAKE ? 1 : kind == QE_UNIT_COMMIT || kind == QE_UNIT_FOLD ? 2
                    : kind == QE_UNIT_READ ? 3 : 0;
        int place = i < rank->take_begin ? 0 : i < rank->commit_begin ? 1 : i < rank->exit_begin ? 2 : 3;
        assert_int_equal(phase, place);
    }
}

static void units_use_slots_that_exist(const qe_plan *plan, const qe_rank_plan *rank) {
    for (uint32_t u = 0; u < rank->unit_count; u++) {
        const qe_unit *unit = &rank->units[u];
        for (int kind = 0; kind < QE_SLOT_KINDS; kind++) {
            if (unit->slot[kind] == QE_NONE) continue;
            uint32_t stage;
            qe_slot_kind resolved;
            qe_plan_resolve_slot(plan, unit->stage, (qe_slot_kind)kind, &stage, &resolved);
            const qe_pool *pool = qe_rank_plan_pool(rank, stage, resolved);
            assert_non_null(pool);
            assert_true(unit->slot[kind] < pool->count);
            assert_true(unit->generation[kind] >= 1);
            const qe_object *object = &rank->program.objects[pool->objects[unit->slot[kind]]];
            assert_int_equal(object->kind, QE_OBJECT_SLOT);
        }
    }
}

static uint32_t units_of(const qe_rank_plan *rank, qe_unit_kind kind) {
    uint32_t count = 0;
    for (uint32_t u = 0; u < rank->unit_count; u++) count += rank->units[u].kind == kind;
    return count;
}

static void every_action_and_weight_has_its_unit(const qe_plan *plan) {
    uint32_t f = 0, i = 0, w = 0, take = 0, commit = 0, fold = 0, sends = 0, receives = 0, read = 0;
    for (uint32_t r = 0; r < plan->ranks; r++) {
        const qe_rank_plan *rank = &plan->rank[r];
        f += units_of(rank, QE_UNIT_F);
        i += units_of(rank, QE_UNIT_I);
        w += units_of(rank, QE_UNIT_W);
        take += units_of(rank, QE_UNIT_TAKE);
        commit += units_of(rank, QE_UNIT_COMMIT);
        for (uint32_t u = 0; u < rank->unit_count; u++)
            if (rank->units[u].kind == QE_UNIT_FOLD) fold += rank->units[u].weight_count;
        read += units_of(rank, QE_UNIT_READ);
        sends += units_of(rank, QE_UNIT_SEND_F) + units_of(rank, QE_UNIT_SEND_B);
        receives += units_of(rank, QE_UNIT_RECV_F) + units_of(rank, QE_UNIT_RECV_B);
    }
    assert_int_equal(f, plan->stages * plan->microbatches);
    assert_int_equal(i, f);
    assert_int_equal(w, f);
    assert_int_equal(take, plan->weight_count);
    assert_int_equal(commit, plan->weight_count);
    uint32_t scaled = 0, crossings = 0;
    for (uint32_t n = 0; n < plan->weight_count; n++) scaled += plan->model_ops->weight(plan->model, n)->scaled;
    assert_int_equal(scaled, 4 * 4); /* the linears of every decoder, and never the head */
    assert_int_equal(fold, plan->model_ops->recipe(plan->model)->kind == QE_RECIPE_DELAYED ? scaled : 0);
    for (uint32_t s = 0; s + 1 < plan->stages; s++) crossings += plan->stage_rank[s] != plan->stage_rank[s + 1];
    assert_int_equal(sends, 2 * crossings * plan->microbatches);
    assert_int_equal(receives, sends);
    assert_int_equal(read, 1);
}

/* As the tiny model of step_world.h, where products take codes and activations are bf16: the head is cached too. */
static const qe_model_config codes = {.layers = 4, .hidden = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 64,
                                      .sequence = 16, .sequences = 1, .rope_theta = 1e4f, .norm_epsilon = 1e-5f,
                                      .numerics = {QE_FORMAT_BF16, QE_OPERANDS_CODES}};

static void items_units_and_ops_number_each_other_without_holes(void **state) {
    (void)state;
    static const world_options cases[] = {
        {.config = &codes, .schedule = "zbh1", .ranks = 2},
        {.config = &codes, .ranks = 3, .baseline = 1},
        {.config = &codes, .ranks = 2, .no_cache = 1, .copy = 1, .recipe = QE_RECIPE_CURRENT},
        {.config = &codes, .schedule = "interleaved", .ranks = 2, .chunks = 2, .recipe = QE_RECIPE_BLOCK},
        {.config = &codes, .schedule = "dualpipev", .ranks = 2, .chunks = 2, .recipe = QE_RECIPE_BF16},
        {.ranks = 1}, {.schedule = "gpipe", .ranks = 4, .recipe = QE_RECIPE_BLOCK}, {.schedule = "zbh1", .ranks = 3},
        {.schedule = "interleaved", .ranks = 2, .chunks = 2, .microbatches = 6}, {.baseline = 1, .ranks = 3},
        {.schedule = "1f1b", .ranks = 2, .no_cache = 1, .copy = 1, .recipe = QE_RECIPE_FP32},
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        world w;
        world_prepare(&w, &cases[c]);
        for (uint32_t rank = 0; rank < w.plan->ranks; rank++) {
            ops_are_numbered_in_program_order(&w.plan->rank[rank]);
            units_tile_the_ops(&w.plan->rank[rank]);
            phases_follow_each_other(&w.plan->rank[rank]);
            units_use_slots_that_exist(w.plan, &w.plan->rank[rank]);
        }
        every_action_and_weight_has_its_unit(w.plan);
        world_close(&w);
    }
}

static void an_evaluation_plan_has_forwards_and_nothing_that_changes_state(void **state) {
    (void)state;
    world w;
    world_options options = {.schedule = "zbh1", .ranks = 2, .evaluates = 1};
    world_prepare(&w, &options);
    for (uint32_t r = 0; r < 2; r++) {
        const qe_rank_plan *rank = &w.evaluation->rank[r];
        ops_are_numbered_in_program_order(rank);
        units_tile_the_ops(rank);
        units_use_slots_that_exist(w.evaluation, rank);
        assert_int_equal(units_of(rank, QE_UNIT_F), w.microbatches);
        for (uint32_t e = 0; e < rank->program.effect_count; e++) {
            qe_effect_kind kind = (qe_effect_kind)rank->program.effects[e].kind;
            assert_true(kind != QE_EFFECT_SCALE_RECORD && kind != QE_EFFECT_SCALE_FOLD &&
                        kind != QE_EFFECT_WEIGHT_COMMIT && kind != QE_EFFECT_GRAD_DEPOSIT &&
                        kind != QE_EFFECT_GRAD_TAKE);
        }
    }
    world_close(&w);
}

static qe_status plan_of(const qe_schedule *schedule, qe_violations *violations, qe_counterexample *counterexample,
                         qe_error *error) {
    world_options options = {.ranks = 1};
    qe_plan_options plan_options = {.cache_weights = 1, .reuse_slots = 1};
    qe_model *model = world_model(&options);
    qe_plan *plan = NULL;
    memset(error, 0, sizeof *error);
    qe_status status = qe_plan_create(schedule, qe_model_table(), model, &plan_options, &plan, violations,
                                      counterexample, error);
    if (status != QE_OK) assert_null(plan);
    qe_plan_destroy(plan);
    qe_model_destroy(model);
    return status;
}

static void more_stages_than_layers_are_refused_with_both_numbers(void **state) {
    (void)state;
    world_options options = {.schedule = "1f1b", .ranks = 5};
    qe_schedule schedule;
    qe_violations violations;
    qe_counterexample counterexample;
    qe_error error;
    world_schedule(&options, 0, &schedule);
    assert_int_equal(plan_of(&schedule, &violations, &counterexample, &error), QE_ERROR_ARGUMENT);
    assert_non_null(strstr(error.message, "5 stages"));
    assert_non_null(strstr(error.message, "4 layers"));
    assert_true(error.remedy[0] != '\0');
    assert_int_equal(counterexample.rule, QE_RULE_NONE);
    qe_schedule_deinit(&schedule);
}

/* Text of a schedule -> the rule that refuses it. */
static void refuses(const char *csv, qe_rule rule) {
    FILE *file = tmpfile();
    assert_non_null(file);
    fputs(csv, file);
    rewind(file);
    qe_schedule schedule;
    qe_violations violations;
    qe_counterexample counterexample;
    qe_error error = {0};
    must(qe_schedule_read_csv(file, "orders.csv", &schedule, &error), &error, csv);
    fclose(file);
    assert_int_equal(plan_of(&schedule, &violations, &counterexample, &error), QE_CONTRACT);
    assert_string_equal(qe_rule_id(counterexample.rule), qe_rule_id(rule));
    assert_int_equal(violations.count, 0);
    qe_counterexample_deinit(&counterexample);
    qe_schedule_deinit(&schedule);
}

static void a_schedule_that_cannot_run_is_refused_with_its_counterexample(void **state) {
    (void)state;
    refuses("0F0,0B0\n1F0,1F0,1B0\n", QE_RULE_SCHEDULE_DUPLICATE);
    refuses("0F0,0B0\n1F0,1I0\n", QE_RULE_SCHEDULE_MISSING);
    refuses("0F0,0B0\n1B0,1F0\n", QE_RULE_SCHEDULE_ORDER);
    refuses("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", QE_RULE_SCHEDULE_CYCLE);
    refuses("0F0,0B0,1F0\n1B0\n", QE_RULE_SCHEDULE_PLACE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(items_units_and_ops_number_each_other_without_holes),
        cmocka_unit_test(an_evaluation_plan_has_forwards_and_nothing_that_changes_state),
        cmocka_unit_test(more_stages_than_layers_are_refused_with_both_numbers),
        cmocka_unit_test(a_schedule_that_cannot_run_is_refused_with_its_counterexample),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
