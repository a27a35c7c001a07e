/* Guards: what no declaration covers is still found before it reaches a weight. A rogue copy, which nobody declared, is
 * slipped onto the compute stream between two graphs of a running step and lands on an object's witness word. */
#include "step_world.h"

#include "base/assert.h"
#include "step/guard.h"

enum { STEPS = 4 };

typedef struct rogue {
    uint32_t countdown; /* launches until the write; 0: disarmed */
    qe_op op;
} rogue;

static rogue planted;
static struct {
    uint32_t countdown; /* launches until the one that goes wrong; 0: none does */
    int once, again;    /* it is launched in its turn; it is launched later */
    uint32_t later;     /* behind so many other launches; 0: at once */
    qe_graph *held;     /* what is to be launched yet */
} slip;
static const uint64_t garbage = UINT64_C(0x0123456789abcdef);

static qe_status launch_held(qe_stream *stream) {
    qe_graph *graph = slip.held;
    slip.held = NULL;
    return qe_host_backend()->graph->launch(graph, stream);
}

static qe_status launch_and_slip(qe_graph *graph, qe_stream *stream) {
    int slips = --slip.countdown == 0;
    if (!slips || slip.once) QE_TRY(qe_host_backend()->graph->launch(graph, stream));
    if (slips && slip.again) slip.held = graph;
    return slip.held != NULL && slip.later == 0 ? launch_held(stream) : QE_OK;
}

static qe_status launch_with_rogue(qe_graph *graph, qe_stream *stream) {
    if (slip.countdown > 0) return launch_and_slip(graph, stream);
    if (slip.held != NULL) {
        QE_TRY(qe_host_backend()->graph->launch(graph, stream));
        return --slip.later == 0 ? launch_held(stream) : QE_OK;
    }
    if (planted.countdown > 0 && --planted.countdown == 0) {
        qe_status status = qe_host_backend()->stream->submit(stream, &planted.op);
        if (status != QE_OK) return status;
    }
    return qe_host_backend()->graph->launch(graph, stream);
}

static void open_rogue_world(world *w, world_options *options, qe_backend *backend, qe_graph_ops *graph) {
    *backend = *qe_host_backend();
    *graph = *backend->graph;
    graph->launch = launch_with_rogue;
    backend->graph = graph;
    planted.countdown = 0;
    options->backend = backend;
    options->schedule = "1f1b";
    options->ranks = 1; /* one submitter, so that the countdown is one thread's */
    world_open(w, options);
}

static uint32_t object_named(const world *w, const char *name) {
    const qe_program *program = qe_team_program(w->team, 0);
    for (uint32_t i = 0; i < program->object_count; i++)
        if (strcmp(program->objects[i].name, name) == 0) return i;
    fail_msg("no object %s", name);
    return 0;
}

static void plant(world *w, uint32_t object, uint32_t launches) {
    planted.op = (qe_op){.kind = QE_OP_COPY};
    planted.op.args.copy = (qe_args_copy){.from = &garbage, .to = w->team->ranks[0].train.words[object], .bytes = 8};
    planted.countdown = launches;
}

static const struct {
    const char *object;
    qe_rule rule;
} victims[] = {
    {"I.s0.0", QE_RULE_SLOT_STALE},
    {"X.s0.0", QE_RULE_SLOT_STALE},
    {"model.layers.1.self_attn.qkv_proj", QE_RULE_WEIGHT_VERSION},
    {"model.norm", QE_RULE_WEIGHT_VERSION},
    {"model.layers.2.mlp.down_proj.dy", QE_RULE_SCALE_EPOCH},
    {"model.layers.0.mlp.gate_up_proj.cache", QE_RULE_CACHE_STALE},
};

static void steps(world *w, int count) {
    for (int i = 0; i < count; i++) world_step(w, 0);
}

static void an_undeclared_write_is_trapped_before_it_reaches_a_weight(void **state) {
    (void)state;
    const qe_capture units[] = {QE_CAPTURE_LAYER, QE_CAPTURE_ACTION};
    for (size_t unit = 0; unit < 2; unit++)
        for (size_t i = 0; i < sizeof victims / sizeof *victims; i++) {
            world w, quiet;
            qe_backend backend;
            qe_graph_ops graph;
            world_options options = {.capture = units[unit]}, usual = {.capture = units[unit], .schedule = "1f1b"};
            world_open(&quiet, &usual);
            steps(&quiet, STEPS);
            open_rogue_world(&w, &options, &backend, &graph);
            steps(&w, 2);
            world_hash before = world_state(&w);
            plant(&w, object_named(&w, victims[i].object), 4);
            assert_int_equal(world_try_step(&w, 0), QE_CONTRACT);
            assert_int_equal(w.result.violations.record[0].rule, victims[i].rule);
            assert_int_equal(w.result.violations.record[0].object, object_named(&w, victims[i].object));
            assert_true(w.result.violations.record[0].found == garbage ||
                        victims[i].rule == QE_RULE_SLOT_STALE); /* a later stamp may have counted on from it */
            assert_string_equal(before.text, world_state(&w).text);
            steps(&w, STEPS - 2);
            assert_string_equal(world_state(&quiet).text, world_state(&w).text);
            world_close(&w);
            world_close(&quiet);
        }
}

/* The launch of a step, from 1, that runs the weight gradients of a microbatch, or takes the gradients. */
static uint32_t launch_of(const world *w, qe_unit_kind kind, uint32_t microbatch) {
    const qe_binding *binding = &w->team->ranks[0].train;
    for (uint32_t s = 0; s < binding->segment_count; s++) {
        const qe_unit *unit = &binding->rank_plan->units[binding->rank_plan->item_unit[binding->segments[s].first]];
        if (unit->kind == kind && (kind == QE_UNIT_TAKE || unit->microbatch == microbatch)) return s + 1;
    }
    fail_msg("no launch of microbatch %u", microbatch);
    return 0;
}

/* One launch of a step goes wrong as `slip` says; the step is trapped by `rule`, and all is as if it had not been. */
static void a_slip_is_trapped(uint32_t microbatch, int once, int again, qe_unit_kind behind, qe_rule rule) {
    world w, quiet;
    qe_backend backend;
    qe_graph_ops graph;
    world_options options = {.capture = QE_CAPTURE_ACTION}, usual = {.capture = QE_CAPTURE_ACTION};
    world_open(&quiet, &usual);
    steps(&quiet, STEPS);
    open_rogue_world(&w, &options, &backend, &graph);
    steps(&w, 2);
    world_hash before = world_state(&w);
    slip.countdown = launch_of(&w, QE_UNIT_W, microbatch);
    slip.once = once;
    slip.again = again;
    slip.later = behind == QE_UNIT_LOAD ? 0 : launch_of(&w, behind, microbatch + 1) - slip.countdown;
    qe_status status = world_try_step(&w, 0);
    assert_int_equal(slip.countdown, 0);
    assert_null(slip.held);
    const qe_violation *found = &w.result.violations.record[0];
    assert_int_equal(status, QE_CONTRACT);
    assert_int_equal(found->rule, rule);
    assert_int_equal(qe_team_program(w.team, 0)->objects[found->object].kind, QE_OBJECT_GRAD);
    assert_string_equal(before.text, world_state(&w).text);
    steps(&w, STEPS - 2);
    assert_string_equal(world_state(&quiet).text, world_state(&w).text);
    world_close(&w);
    world_close(&quiet);
}

enum { SLIP_MICROBATCHES = 4 };

/* No declaration tells of it: the device is given a graph once more, or once less, than the ledger was. */
static void deposits_that_are_run_twice_or_not_at_all_are_trapped_on_the_device(void **state) {
    (void)state;
    for (uint32_t microbatch = 0; microbatch < SLIP_MICROBATCHES; microbatch++) {
        a_slip_is_trapped(microbatch, 1, 1, QE_UNIT_LOAD, QE_RULE_GRAD_TWICE);
        a_slip_is_trapped(microbatch, 0, 0, QE_UNIT_LOAD, QE_RULE_GRAD_MISSING);
    }
}

/* The later microbatch finds one deposit too few. */
static void deposits_that_are_run_behind_the_next_ones_are_trapped_on_the_device(void **state) {
    (void)state;
    for (uint32_t microbatch = 0; microbatch + 1 < SLIP_MICROBATCHES; microbatch++)
        a_slip_is_trapped(microbatch, 0, 1, QE_UNIT_W, QE_RULE_GRAD_MISSING);
}

/* What has been taken holds every deposit that was due: one more is one too many. */
static void a_deposit_that_is_run_once_more_behind_the_take_is_trapped_on_the_device(void **state) {
    (void)state;
    for (uint32_t microbatch = 0; microbatch < SLIP_MICROBATCHES; microbatch++)
        a_slip_is_trapped(microbatch, 1, 1, QE_UNIT_TAKE, QE_RULE_GRAD_TWICE);
}

static int verdict_is_lost; /* once */

static qe_status read_or_lose(qe_device *device, void *to, const void *from, size_t bytes, qe_error *error_out) {
    if (bytes != sizeof(qe_guard_fault) || !verdict_is_lost)
        return qe_host_backend()->memory->read(device, to, from, bytes, error_out);
    verdict_is_lost = 0;
    return qe_error_set(error_out, QE_ERROR_DEVICE, NULL, "planted: read");
}

/* The step fails of something else before anybody looks at what a guard saw: that is not told of the next step. */
static void a_guard_that_fired_in_a_failed_step_says_nothing_of_the_next(void **state) {
    (void)state;
    world w, quiet;
    qe_backend backend;
    qe_graph_ops graph;
    qe_memory_ops memory = *qe_host_backend()->memory;
    world_options options = {.capture = QE_CAPTURE_ACTION}, usual = {.capture = QE_CAPTURE_ACTION, .schedule = "1f1b"};
    world_open(&quiet, &usual);
    steps(&quiet, STEPS);
    open_rogue_world(&w, &options, &backend, &graph);
    memory.read = read_or_lose;
    backend.memory = &memory;
    steps(&w, 2);
    world_hash before = world_state(&w);
    plant(&w, object_named(&w, victims[2].object), 4);
    verdict_is_lost = 1;
    assert_int_equal(world_try_step(&w, 0), QE_ERROR_DEVICE);
    assert_false(verdict_is_lost);
    assert_true(w.team->ranks[0].train.fault->fired); /* on the device, and nobody read it */
    assert_string_equal(before.text, world_state(&w).text);
    steps(&w, STEPS - 2);
    assert_string_equal(world_state(&quiet).text, world_state(&w).text);
    world_close(&w);
    world_close(&quiet);
}

/* Behind the last look before the commit only the commit's own graph can see it: too late to give the step up. */
static void a_write_in_front_of_the_commit_is_trapped_and_the_state_is_shown_to_nobody(void **state) {
    (void)state;
    const qe_capture units[] = {QE_CAPTURE_LAYER, QE_CAPTURE_ACTION, QE_CAPTURE_STEP};
    for (size_t unit = 0; unit < 3; unit++) {
        world w;
        qe_backend backend;
        qe_graph_ops graph;
        char hash[QE_STATE_HASH_BYTES];
        world_options options = {.capture = units[unit]};
        open_rogue_world(&w, &options, &backend, &graph);
        steps(&w, 2);
        plant(&w, object_named(&w, "model.norm"), w.team->ranks[0].train.segment_count);
        assert_int_equal(world_try_step(&w, 0), QE_CONTRACT);
        assert_int_equal(w.result.violations.record[0].rule, QE_RULE_WEIGHT_VERSION);
        assert_int_equal(w.result.violations.record[0].found, garbage);
        assert_int_equal(qe_team_state_hash(w.team, hash, &w.error), QE_ERROR_DEVICE);
        assert_int_equal(world_try_step(&w, 0), QE_ERROR_DEVICE);
        world_close(&w);
    }
}

static void without_contracts_nobody_sees_it(void **state) {
    (void)state;
    world w;
    qe_backend backend;
    qe_graph_ops graph;
    world_options options = {.capture = QE_CAPTURE_ACTION, .contracts = QE_CONTRACTS_OFF};
    open_rogue_world(&w, &options, &backend, &graph);
    assert_null(w.team->ranks[0].train.words); /* no guards were recorded */
    steps(&w, 2);
    world_close(&w);
}

static void words_count_what_was_done(void **state) {
    (void)state;
    world w;
    world_options options = {.capture = QE_CAPTURE_ACTION, .schedule = "zbh1", .ranks = 2, .microbatches = 8};
    world_open(&w, &options);
    steps(&w, 3);
    for (uint32_t r = 0; r < 2; r++) {
        const qe_binding *binding = &w.team->ranks[r].train;
        const qe_program *program = &binding->rank_plan->program;
        for (uint32_t i = 0; i < program->object_count; i++)
            if (binding->words[i] != NULL && program->objects[i].kind == QE_OBJECT_GRAD)
                assert_int_equal(*binding->words[i], 3 * program->objects[i].due);
            else if (binding->words[i] != NULL && program->objects[i].kind != QE_OBJECT_CACHE)
                assert_int_equal(*binding->words[i], qe_ledger_counter(binding->ledger, i));
    }
    world_close(&w);
}

static void a_commit_behind_a_guard_that_fired_is_nothing(void **state) {
    (void)state;
    qe_device *device = NULL;
    qe_error error = {0};
    must(qe_host_backend()->open(&device, &error), &error, "device");
    float weight = 1.0f, grad = 2.0f, m = 0.0f, v = 0.0f, history[2] = {0};
    float operand = 0;
    uint8_t codes = 0;
    uint64_t version = 5, key[QE_KEY_WORDS] = {5, 0, QE_KEY_SEALED, 0};
    qe_guard_fault fault = {.fired = 1};
    qe_adamw step = {.learning_rate = 0.1f, .beta1 = 0.9f, .beta2 = 0.9f, .epsilon = 1e-8f, .bias_correction1 = 0.1f,
                     .bias_correction2 = 0.1f, .gradient_scale = 1.0f};
    qe_scale_state scale = {.scale = 1.0f, .amax = 2.0f, .history = history, .history_length = 2, .format_max = 448.0f};
    qe_scale_state *scales[] = {&scale};
    qe_recipe recipe = {.kind = QE_RECIPE_DELAYED, .history_length = 2};
    qe_op adamw = {.kind = QE_OP_ADAMW}, fold = {.kind = QE_OP_FOLD};
    adamw.args.adamw = (qe_args_adamw){.weight = &weight, .grad = &grad, .moment1 = &m, .moment2 = &v, .count = 1,
                                       .step = &step, .witness = &version, .fault = &fault, .rows = 1,
                                       .columns = 1, .scale_epoch = &scale.epoch, .key = key};
    adamw.args.adamw.target = (qe_quantize_target){.recipe = QE_RECIPE_DELAYED, .scale = &scale.scale,
                                                   .operand = {.codes = &operand, .format = QE_FORMAT_FP32},
                                                   .retained = {.codes = &codes}};
    fold.args.fold = (qe_args_fold){.states = scales, .count = 1, .recipe = &recipe, .fault = &fault};
    for (int fired = 1; fired >= 0; fired--) {
        fault.fired = (uint64_t)fired;
        must(qe_host_backend()->run(device, &fold, &error), &error, "fold");
        must(qe_host_backend()->run(device, &adamw, &error), &error, "adamw");
        assert_int_equal(weight == 1.0f, fired);
        assert_int_equal(version, fired ? 5 : 6);
        assert_int_equal(scale.epoch, fired ? 0 : 1);
        assert_int_equal(scale.amax == 2.0f, fired);
        assert_int_equal(operand == 0.0f, fired);
        assert_int_equal(key[QE_KEY_VERSION], fired ? 5 : 6);
        assert_int_equal(key[QE_KEY_EPOCH], fired ? 0 : 1);
        assert_int_equal(key[QE_KEY_SEAL] == QE_KEY_SEALED, fired);
    }
    qe_host_backend()->close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_undeclared_write_is_trapped_before_it_reaches_a_weight),
        cmocka_unit_test(a_guard_that_fired_in_a_failed_step_says_nothing_of_the_next),
        cmocka_unit_test(a_write_in_front_of_the_commit_is_trapped_and_the_state_is_shown_to_nobody),
        cmocka_unit_test(without_contracts_nobody_sees_it),
        cmocka_unit_test(words_count_what_was_done),
        cmocka_unit_test(deposits_that_are_run_twice_or_not_at_all_are_trapped_on_the_device),
        cmocka_unit_test(deposits_that_are_run_behind_the_next_ones_are_trapped_on_the_device),
        cmocka_unit_test(a_deposit_that_is_run_once_more_behind_the_take_is_trapped_on_the_device),
        cmocka_unit_test(a_commit_behind_a_guard_that_fired_is_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
