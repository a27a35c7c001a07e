/* Captured execution: the same ops as graphs give the same bits, a graph serves every microbatch of its slots, and a
 * graph whose seal is broken is refused. Without contracts the same breach trains on with what was frozen. */
#include "step_world.h"

#include "step/capture.h"

enum { STEPS = 4 };

static const qe_capture units[] = {QE_CAPTURE_LAYER, QE_CAPTURE_ACTION, QE_CAPTURE_STEP};
enum { UNITS = sizeof units / sizeof *units };

static world_hash hash_after(world *w, int steps) {
    for (int step = 0; step < steps; step++) world_step(w, 0);
    return world_state(w);
}

static world_hash hash_of(const world_options *options) {
    world w;
    world_open(&w, options);
    world_hash hash = hash_after(&w, STEPS);
    world_close(&w);
    return hash;
}

static void captured_agrees_with_eager(qe_recipe_kind recipe) {
    static const struct {
        const char *schedule;
        uint32_t ranks, chunks;
    } shapes[] = {{"gpipe", 2, 1}, {"1f1b", 1, 1}, {"1f1b", 2, 1}, {"1f1b", 4, 1}, {"zbh1", 2, 1}, {"zbh1", 3, 1},
                  {"interleaved", 2, 2}, {"interleaved", 1, 4}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int unit = 0; unit < UNITS; unit++) {
            world_options options = {.schedule = shapes[i].schedule, .ranks = shapes[i].ranks,
                                     .chunks = shapes[i].chunks, .recipe = recipe, .evaluates = unit == 1};
            world_hash eager = hash_of(&options);
            options.capture = units[unit];
            assert_string_equal(eager.text, hash_of(&options).text);
        }
}

static void every_capture_unit_gives_the_bits_of_eager_when_scales_are_delayed(void **state) {
    (void)state;
    captured_agrees_with_eager(QE_RECIPE_DELAYED);
}

static void every_capture_unit_gives_the_bits_of_eager_for_the_other_recipes(void **state) {
    (void)state;
    const qe_recipe_kind recipes[] = {QE_RECIPE_CURRENT, QE_RECIPE_BLOCK, QE_RECIPE_BF16, QE_RECIPE_FP32};
    for (int i = 0; i < 4; i++) captured_agrees_with_eager(recipes[i]);
}

static void captured_agrees_where_nothing_is_cached_and_gradients_are_copied(void **state) {
    (void)state;
    for (int unit = 0; unit < UNITS; unit++) {
        world_options options = {.schedule = "zbh1", .ranks = 2, .no_cache = 1, .copy = 1};
        world_hash eager = hash_of(&options);
        options.capture = units[unit];
        assert_string_equal(eager.text, hash_of(&options).text);
    }
}

/* F in every combination of slots, first and later deposits of I and W, fill, takes, commit: not the microbatches. */
static void graphs_follow_slots_and_not_microbatches(void **state) {
    (void)state;
    qe_capture_use use[2];
    for (int doubled = 0; doubled < 2; doubled++) {
        world w;
        world_options options = {.schedule = "1f1b", .ranks = 2, .microbatches = doubled ? 16 : 8,
                                 .capture = QE_CAPTURE_ACTION};
        world_open(&w, &options);
        use[doubled] = qe_team_captured(w.team, 1);
        world_close(&w);
    }
    assert_int_equal(use[0].graphs, use[1].graphs);
    assert_true(use[1].segments > use[0].segments);
    assert_true(use[0].graphs < use[0].segments);
    assert_int_equal(use[0].slots, use[1].slots);
    assert_int_equal(use[0].bytes, use[1].bytes);
    assert_true(use[0].slots > 0 && use[0].slots < 8);
    assert_true(use[0].seconds > 0.0 && use[0].seconds < 60.0);
    print_message("rank 1 of 1f1b: %u graphs serve %u segments at 8 microbatches, %u at 16\n", use[0].graphs,
                  use[0].segments, use[1].segments);
}

static uint32_t parameter_named(const world *w, const char *name) {
    for (uint32_t i = 0; i < qe_model_parameter_count(w->model); i++)
        if (strcmp(qe_model_parameter(w->model, i)->name, name) == 0) return i;
    fail_msg("no parameter %s", name);
    return 0;
}

static qe_status try_step(world *w) { return world_try_step(w, 0); }

/* The refused launch is the last thing in the step's history, which gives the same verdict with the same numbers. */
static void history_tells_the_same(world *w) {
    const qe_violation *told = &w->result.violations.record[0];
    qe_program history;
    qe_violations violations;
    qe_program_init(&history);
    must(qe_team_history(w->team, w->result.violation_rank, &history, &w->error), &w->error, "history");
    assert_int_equal(qe_program_judge(&history, &violations, NULL), QE_CONTRACT);
    assert_int_equal(violations.total, w->result.violations.total);
    assert_int_equal(violations.record[0].rule, told->rule);
    assert_int_equal(violations.record[0].expected, told->expected);
    assert_int_equal(violations.record[0].found, told->found);
    assert_int_equal(violations.record[0].item, history.item_count - 1);
    assert_string_equal(history.objects[violations.record[0].object].name,
                        qe_team_program(w->team, w->result.violation_rank)->objects[told->object].name);
    qe_program_deinit(&history);
}

static void a_moved_weight_is_refused_and_recaptured(void **state) {
    (void)state;
    for (int unit = 0; unit < UNITS; unit++) {
        world w;
        world_options options = {.schedule = "zbh1", .ranks = 2, .capture = units[unit]};
        world_hash expected = hash_of(&options);
        world_open(&w, &options);
        hash_after(&w, 2);
        world_hash before = world_state(&w);
        must(qe_team_weight_move(w.team, parameter_named(&w, "model.norm.weight"), &w.error), &w.error, "move");
        assert_string_equal(before.text, world_state(&w).text); /* the values moved with it */
        assert_int_equal(try_step(&w), QE_CONTRACT);
        assert_int_equal(w.result.violations.record[0].rule, QE_RULE_GRAPH_ADDRESS);
        assert_true(w.result.violations.record[0].expected != w.result.violations.record[0].found);
        assert_string_equal(before.text, world_state(&w).text);
        history_tells_the_same(&w);
        must(qe_team_recapture(w.team, &w.error), &w.error, "recapture");
        hash_after(&w, 1);
        must(qe_team_weight_move(w.team, parameter_named(&w, "model.norm.weight"), &w.error), &w.error, "move again");
        assert_int_equal(try_step(&w), QE_CONTRACT);
        assert_int_equal(w.result.violations.record[0].rule, QE_RULE_GRAPH_ADDRESS);
        history_tells_the_same(&w); /* by the seal of the second recording */
        must(qe_team_recapture(w.team, &w.error), &w.error, "recapture");
        assert_string_equal(expected.text, hash_after(&w, STEPS - 3).text);
        world_close(&w);
    }
}

enum { MEMORIES = 4, MOVES = MEMORIES + QE_SCALE_ROLES };

/* Moves one of the rank's memories of a weight; returns where it was. The key of a cache lies behind it. */
static void *move_memory(world *w, uint32_t weight, int which) {
    qe_rank *rank = &w->team->ranks[0];
    qe_weight_place *place = &rank->places[weight];
    const qe_weight_info *info = qe_model_table()->weight(w->model, weight);
    uint64_t bytes = (uint64_t)info->rows * info->columns * sizeof(float);
    void *left[MEMORIES] = {rank->moment1[weight], rank->moment2[weight], place->grad, place->cache_operand};
    void *moved = qe_rank_alloc(rank, QE_MEMORY_MASTERS, qe_rank_master_bytes(bytes), &w->error);
    assert_non_null(moved);
    memcpy(moved, left[which], bytes);
    switch (which) {
    case 0: rank->moment1[weight] = moved; break;
    case 1: rank->moment2[weight] = moved; break;
    case 2: place->grad = moved; break;
    default:
        place->cache_operand = moved;
        place->cache_key = qe_rank_behind(moved, bytes);
    }
    return left[which];
}

static void *move_part(world *w, int part, qe_scale_state *scale_out) {
    qe_rank *rank = &w->team->ranks[0];
    uint32_t weight = rank->team->plan->weight_count / 2;
    while (!qe_model_table()->weight(w->model, weight)->scaled) weight++;
    if (part < MEMORIES) return move_memory(w, weight, part);
    *scale_out = *rank->places[weight].scale[part - MEMORIES];
    rank->places[weight].scale[part - MEMORIES] = scale_out;
    return NULL;
}

static void whatever_of_a_weight_moves_is_refused_and_recaptured(void **state) {
    (void)state;
    for (int unit = 0; unit < UNITS; unit++)
        for (int part = 0; part < MOVES; part++)
            for (int copy = 0; copy < 2; copy++) {
                world w;
                qe_scale_state scale;
                world_options options = {.schedule = "1f1b", .capture = units[unit], .copy = copy};
                world_hash expected = hash_of(&options);
                world_open(&w, &options);
                world_hash before = hash_after(&w, 2);
                qe_rank *rank = &w.team->ranks[0];
                void *left = move_part(&w, part, &scale);
                must(qe_binding_rebind(rank, &rank->train, &w.error), &w.error, "rebind");
                assert_int_equal(try_step(&w), QE_CONTRACT);
                assert_int_equal(w.result.violations.record[0].rule, QE_RULE_GRAPH_ADDRESS);
                assert_string_equal(before.text, world_state(&w).text);
                must(qe_team_recapture(w.team, &w.error), &w.error, "recapture");
                assert_string_equal(expected.text, hash_after(&w, STEPS - 2).text);
                qe_rank_free(rank, left);
                world_close(&w);
            }
}

static void without_contracts_a_moved_weight_trains_on_with_stale_bytes(void **state) {
    (void)state;
    world w;
    world_options options = {.schedule = "zbh1", .ranks = 2, .capture = QE_CAPTURE_ACTION,
                             .contracts = QE_CONTRACTS_OFF};
    world_hash expected = hash_of(&options);
    world_open(&w, &options);
    hash_after(&w, 2);
    must(qe_team_weight_move(w.team, parameter_named(&w, "model.norm.weight"), &w.error), &w.error, "move");
    assert_string_not_equal(expected.text, hash_after(&w, STEPS - 2).text); /* wrong, and nobody says so */
    world_close(&w);
}

/* The test reaches into the binding: this is what a host value that changes after capture looks like. */
static qe_op *bound_op(world *w, qe_op_kind kind) {
    qe_binding *binding = &w->team->ranks[0].train;
    for (uint32_t i = 0; i < binding->rank_plan->op_count; i++)
        if (binding->ops[i].kind == kind) return &binding->ops[i];
    fail_msg("no op %s", qe_op_name(kind));
    return NULL;
}

static void a_changed_constant_is_refused(void **state) {
    (void)state;
    for (int unit = 0; unit < UNITS; unit++) {
        world w;
        world_options options = {.schedule = "1f1b", .ranks = 2, .capture = units[unit]};
        world_open(&w, &options);
        hash_after(&w, 2);
        world_hash before = world_state(&w);
        bound_op(&w, QE_OP_NORM_QUANTIZE)->args.norm.epsilon = 0.5f;
        assert_int_equal(try_step(&w), QE_CONTRACT);
        assert_int_equal(w.result.violations.record[0].rule, QE_RULE_GRAPH_CONSTANT);
        assert_string_equal(before.text, world_state(&w).text);
        history_tells_the_same(&w);
        world_close(&w);
    }
}

/* Seals of the commit's graph are looked at while the step can still be given up. */
static void a_changed_constant_of_the_optimizer_is_refused_before_any_weight_moves(void **state) {
    (void)state;
    for (int unit = 0; unit < UNITS; unit++) {
        world w;
        world_options options = {.schedule = "1f1b", .ranks = 2, .capture = units[unit]};
        world_hash expected = hash_of(&options);
        world_open(&w, &options);
        hash_after(&w, 2);
        world_hash before = world_state(&w);
        qe_op *adamw = bound_op(&w, QE_OP_ADAMW);
        adamw->args.adamw.count--;
        assert_int_equal(try_step(&w), QE_CONTRACT);
        assert_int_equal(w.result.violations.record[0].rule, QE_RULE_GRAPH_CONSTANT);
        assert_int_equal(w.result.violations.record[0].expected, adamw->args.adamw.count + 1);
        assert_string_equal(before.text, world_state(&w).text);
        history_tells_the_same(&w);
        adamw->args.adamw.count++;
        assert_string_equal(expected.text, hash_after(&w, STEPS - 2).text);
        world_close(&w);
    }
}

static void without_contracts_a_changed_constant_stays_frozen(void **state) {
    (void)state;
    world w;
    world_options options = {.schedule = "1f1b", .ranks = 2, .capture = QE_CAPTURE_ACTION,
                             .contracts = QE_CONTRACTS_OFF};
    world_hash unchanged = hash_of(&options);
    world_open(&w, &options);
    hash_after(&w, 2);
    bound_op(&w, QE_OP_NORM_QUANTIZE)->args.norm.epsilon = 0.5f; /* eager would obey; a graph cannot */
    assert_string_equal(unchanged.text, hash_after(&w, STEPS - 2).text);
    world_close(&w);
}

static void faults_are_trapped_in_captured_mode_too(void **state) {
    (void)state;
    const qe_rule rules[] = {QE_RULE_SCALE_BUSY, QE_RULE_SLOT_STALE, QE_RULE_CACHE_STALE, QE_RULE_GRAD_MISSING,
                             QE_RULE_SYNC_SIDE, QE_RULE_WEIGHT_TWICE, QE_RULE_SLOT_LEAK};
    for (int unit = 0; unit < UNITS; unit++)
        for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
            world w;
            world_options options = {.schedule = "zbh1", .ranks = 2, .capture = units[unit]};
            world_hash expected = hash_of(&options);
            world_open(&w, &options);
            hash_after(&w, 1);
            world_hash before = world_state(&w);
            must(qe_team_inject(w.team, rules[i], &w.error), &w.error, qe_rule_id(rules[i]));
            assert_int_equal(try_step(&w), QE_CONTRACT);
            assert_int_equal(w.result.violations.record[0].rule, rules[i]);
            assert_string_equal(before.text, world_state(&w).text);
            assert_string_equal(expected.text, hash_after(&w, STEPS - 1).text);
            world_close(&w);
        }
}

static int ends_left;
static qe_status failing_end(qe_stream *stream, qe_graph **graph_out, qe_error *error_out) {
    if (ends_left-- > 0) return qe_host_backend()->graph->end(stream, graph_out, error_out);
    qe_host_backend()->graph->abandon(stream);
    return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "planted: the graph cannot be made");
}

static void a_failed_capture_leaves_nothing_behind(void **state) {
    (void)state;
    qe_graph_ops graph = *qe_host_backend()->graph;
    qe_backend backend = *qe_host_backend();
    graph.end = failing_end;
    backend.graph = &graph;
    for (int left = 0; left < 6; left += 2) {
        world w;
        world_options options = {.schedule = "zbh1", .ranks = 2, .capture = QE_CAPTURE_ACTION, .backend = &backend};
        world_prepare(&w, &options);
        ends_left = left;
        assert_int_equal(world_team(&w, &options), QE_ERROR_MEMORY);
        assert_null(w.team);
        options.backend = NULL;
        must(world_team(&w, &options), &w.error, "team");
        world_close(&w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_capture_unit_gives_the_bits_of_eager_when_scales_are_delayed),
        cmocka_unit_test(every_capture_unit_gives_the_bits_of_eager_for_the_other_recipes),
        cmocka_unit_test(captured_agrees_where_nothing_is_cached_and_gradients_are_copied),
        cmocka_unit_test(graphs_follow_slots_and_not_microbatches),
        cmocka_unit_test(a_moved_weight_is_refused_and_recaptured),
        cmocka_unit_test(whatever_of_a_weight_moves_is_refused_and_recaptured),
        cmocka_unit_test(without_contracts_a_moved_weight_trains_on_with_stale_bytes),
        cmocka_unit_test(a_changed_constant_is_refused),
        cmocka_unit_test(a_changed_constant_of_the_optimizer_is_refused_before_any_weight_moves),
        cmocka_unit_test(without_contracts_a_changed_constant_stays_frozen),
        cmocka_unit_test(faults_are_trapped_in_captured_mode_too),
        cmocka_unit_test(a_failed_capture_leaves_nothing_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
