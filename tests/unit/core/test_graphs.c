/* test_graphs.c - rules of captured programs, each with the same program twice: right it is certified and runs step
 * after step; with one fault it is refused with exactly that rule, nothing has changed, and the history says so too. */
#include "core_program.h"

#include <stdlib.h>

#include "core/ledger_state.h"

enum { ON_COMPUTE, ON_SIDE };
enum { THE_GRAPH, THE_BUFFER, THE_SLOT };
enum { OUTSIDE, FORK, JOIN };
enum {
    AT_OUTSIDE, AT_ENTER, AT_BEGIN, AT_FORK, AT_JOINS, AT_WRITE, AT_JOIN, AT_JOINED, AT_CAPTURE, AT_LAUNCH, AT_COUNT
};

#define GRAPH(k, v) {.kind = QE_EFFECT_GRAPH_##k, .object = THE_GRAPH, .version = v}
#define LAUNCH(v, frozen, then, now)                                                                        \
    {.kind = QE_EFFECT_GRAPH_LAUNCH, .object = THE_GRAPH, .version = v, .use = QE_FROZEN_##frozen, .begin = then, \
     .end = now}
#define BYTES(k) {.kind = QE_EFFECT_BUFFER_##k, .object = THE_BUFFER, .end = 64}

/* Every step captures the graph anew, over two streams, and launches it. */
static void make_graph_program(qe_program *program, uint64_t buffer_address) {
    qe_program_init(program);
    must_add_object(program, (qe_object){.name = "G", .kind = QE_OBJECT_GRAPH});
    qe_object buffer = {.name = "b", .kind = QE_OBJECT_BUFFER, .bytes = 64, .address = buffer_address};
    must_add_object(program, buffer);
    must_add_object(program, (qe_object){.name = "X", .kind = QE_OBJECT_SLOT, .bytes = 64, .address = 4096});
    assert_int_equal(qe_program_add_stream(program, "compute", QE_STREAM_COMPUTE, NULL, NULL), QE_OK);
    assert_int_equal(qe_program_add_stream(program, "side", QE_STREAM_COMM, NULL, NULL), QE_OK);
    for (int i = 0; i < 3; i++) qe_program_add_event(program);
    EDGE(program, RECORD, ON_SIDE, OUTSIDE);
    EDGE(program, WAIT, ON_COMPUTE, OUTSIDE);
    OP(program, ON_COMPUTE, QE_NONE, "begin", GRAPH(BEGIN, 0));
    EDGE(program, RECORD, ON_COMPUTE, FORK);
    EDGE(program, WAIT, ON_SIDE, FORK);
    OP(program, ON_SIDE, QE_NONE, "write", BYTES(WRITE));
    EDGE(program, RECORD, ON_SIDE, JOIN);
    EDGE(program, WAIT, ON_COMPUTE, JOIN);
    OP(program, ON_COMPUTE, QE_NONE, "capture", GRAPH(CAPTURE, 1));
    OP(program, ON_COMPUTE, QE_NONE, "launch", LAUNCH(1, ADDRESS, 7, 7), BYTES(READ));
    assert_int_equal(program->item_count, AT_COUNT);
}

typedef struct graph_fault {
    const char *rule;
    uint32_t before; /* right items first */
    uint32_t at;     /* the item that is submitted in place, with `effect` where it is an op */
    qe_effect effect;
    uint64_t expected, found;
    int first_step_only;
} graph_fault;

static const graph_fault faults[] = {
    {"graph.empty", AT_BEGIN, AT_LAUNCH, LAUNCH(0, NOTHING, 0, 0), 0, 0, 1},
    {"graph.stale", AT_LAUNCH, AT_LAUNCH, LAUNCH(0, NOTHING, 0, 0), 0, 1, 0},
    {"graph.stale", AT_LAUNCH, AT_LAUNCH, LAUNCH(2, ADDRESS, 1, 2), 2, 1, 0},
    {"graph.stale", AT_CAPTURE, AT_CAPTURE, GRAPH(CAPTURE, 2), 2, 1, 0},
    {"graph.mode", AT_LAUNCH, AT_LAUNCH, LAUNCH(1, MODE, 1, 2), 1, 2, 0},
    {"graph.address", AT_LAUNCH, AT_LAUNCH, LAUNCH(1, ADDRESS, 4096, 8192), 4096, 8192, 0},
    {"graph.constant", AT_LAUNCH, AT_LAUNCH, LAUNCH(1, CONSTANT, 0, 1), 0, 1, 0},
    {"sync.capture", AT_FORK, AT_ENTER, {0}, 1, 0, 0},
    {"sync.capture", AT_JOINED, AT_ENTER, {0}, 1, 0, 0},
};
enum { FAULTS = sizeof faults / sizeof faults[0], LATER = 2 };

static qe_ledger *open_certified(const qe_program *program) {
    qe_ledger *ledger;
    qe_violations violations;
    qe_error error = {0};
    assert_int_equal(qe_ledger_create(program, &ledger, &error), QE_OK);
    if (qe_ledger_certify(ledger, &violations, &error) != QE_OK) fail_msg("%s", error.message);
    return ledger;
}

static void run_items(qe_ledger *ledger, uint32_t first, uint32_t end) {
    qe_violations violations;
    for (uint32_t i = first; i < end; i++) assert_int_equal(qe_ledger_issue(ledger, i, &violations), QE_OK);
}

static void run_steps(qe_ledger *ledger, int steps) {
    qe_violations violations;
    for (int step = 0; step < steps; step++) {
        qe_ledger_step_begin(ledger);
        run_items(ledger, 0, AT_COUNT);
        assert_int_equal(qe_ledger_step_end(ledger, &violations), QE_OK);
    }
}

static void history_says(const qe_ledger *ledger, const graph_fault *fault, uint64_t before) {
    qe_program history;
    qe_violations violations;
    qe_program_init(&history);
    assert_int_equal(qe_ledger_history(ledger, &history, NULL), QE_OK);
    assert_int_equal(qe_program_judge(&history, &violations, NULL), QE_CONTRACT);
    assert_int_equal(violations.total, 1);
    assert_string_equal(qe_rule_id(violations.record[0].rule), fault->rule);
    int counted = strcmp(fault->rule, "graph.stale") == 0 || strcmp(fault->rule, "graph.empty") == 0;
    assert_int_equal(violations.record[0].expected, fault->expected + (counted ? before : 0));
    assert_int_equal(violations.record[0].found, fault->found + (counted ? before : 0));
    qe_program_deinit(&history);
}

static void check_fault(const qe_program *program, const graph_fault *fault, int steps_before) {
    qe_ledger *ledger = open_certified(program);
    qe_violations violations;
    run_steps(ledger, steps_before);
    qe_ledger_step_begin(ledger);
    run_items(ledger, 0, fault->before);
    size_t length = qe_ledger_image(ledger, NULL, 0);
    unsigned char *before = malloc(length), *after = malloc(length);
    qe_ledger_image(ledger, before, length);
    qe_item item = program->items[fault->at];
    if (item.kind == QE_ITEM_OP) item.effect_count = 1;
    assert_int_equal(qe_ledger_submit(ledger, &item, &fault->effect, fault->at, &violations), QE_CONTRACT);
    assert_int_equal(violations.total, 1);
    assert_string_equal(qe_rule_id(violations.record[0].rule), fault->rule);
    assert_int_equal(violations.record[0].item, fault->at);
    assert_int_equal(qe_ledger_image(ledger, after, length), length);
    assert_memory_equal(before, after, length);
    history_says(ledger, fault, (uint64_t)steps_before);
    run_items(ledger, fault->before, AT_COUNT);
    assert_int_equal(qe_ledger_step_end(ledger, &violations), QE_OK);
    assert_int_equal(qe_ledger_counter(ledger, THE_GRAPH), steps_before + 1);
    free(before);
    free(after);
    qe_ledger_destroy(ledger);
}

static void every_fault_of_a_graph_is_refused_with_its_rule_and_changes_nothing(void **state) {
    (void)state;
    qe_program program;
    make_graph_program(&program, 4096 + 64);
    for (int i = 0; i < FAULTS; i++) {
        print_message("    %s\n", faults[i].rule);
        check_fault(&program, &faults[i], 0);
        if (!faults[i].first_step_only) check_fault(&program, &faults[i], LATER);
    }
    qe_program_deinit(&program);
}

static void a_buffer_on_a_slot_is_refused_before_anything_runs(void **state) {
    (void)state;
    static const struct {
        uint64_t address;
        int broken;
    } places[] = {{0, 0}, {4096 - 64, 0}, {4096 - 63, 1}, {4096, 1}, {4096 + 63, 1}, {4096 + 64, 0}};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        qe_program program;
        qe_ledger *ledger;
        qe_violations violations;
        make_graph_program(&program, places[i].address);
        assert_int_equal(qe_ledger_create(&program, &ledger, NULL), QE_OK);
        assert_int_equal(qe_ledger_certify(ledger, &violations, NULL), places[i].broken ? QE_CONTRACT : QE_OK);
        assert_int_equal(violations.total > 0, places[i].broken);
        for (uint32_t k = 0; k < violations.count; k++) {
            assert_int_equal(violations.record[k].rule, QE_RULE_SLOT_ALIAS);
            assert_int_equal(violations.record[k].expected, 4096);
            assert_int_equal(violations.record[k].found, places[i].address);
        }
        qe_ledger_destroy(ledger);
        qe_program_deinit(&program);
    }
}

static void a_graph_that_was_captured_between_steps_is_launched_by_its_new_seal(void **state) {
    (void)state;
    qe_program program;
    qe_violations violations;
    make_graph_program(&program, 0);
    qe_ledger *ledger = open_certified(&program);
    run_steps(ledger, 1);
    qe_ledger_touch(ledger, THE_GRAPH, 2);
    assert_int_equal(qe_ledger_counter(ledger, THE_GRAPH), 2);
    qe_ledger_touch(ledger, THE_GRAPH, 1);
    assert_int_equal(qe_ledger_counter(ledger, THE_GRAPH), 2); /* seals never fall */
    qe_ledger_step_begin(ledger);
    qe_item launch = program.items[AT_LAUNCH];
    launch.effect_count = 1;
    const qe_effect now = LAUNCH(0, NOTHING, 0, 0), old = LAUNCH((uint64_t)-1, NOTHING, 0, 0);
    assert_int_equal(qe_ledger_submit(ledger, &launch, &now, QE_NONE, &violations), QE_OK);
    assert_int_equal(qe_ledger_submit(ledger, &launch, &old, QE_NONE, &violations), QE_CONTRACT);
    assert_int_equal(violations.record[0].rule, QE_RULE_GRAPH_STALE);
    assert_int_equal(violations.record[0].expected, 1);
    qe_ledger_step_abort(ledger);
    assert_int_equal(qe_ledger_counter(ledger, THE_GRAPH), 2);
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

/* The order of what was issued the certified way is built when the first submission departs from it. */
static void a_recording_that_an_op_begins_beside_other_effects_is_known_when_a_step_departs(void **state) {
    (void)state;
    qe_program program;
    qe_ledger *ledger;
    qe_violations violations;
    make_graph_program(&program, 0);
    program.item_count = 0;
    uint32_t scale = must_add_object(&program, (qe_object){.name = "S", .kind = QE_OBJECT_SCALE});
    EDGE(&program, RECORD, ON_SIDE, OUTSIDE);
    OP(&program, ON_COMPUTE, QE_NONE, "begin", {.kind = QE_EFFECT_SCALE_USE, .object = scale}, GRAPH(BEGIN, 0));
    OP(&program, ON_COMPUTE, QE_NONE, "capture", {.kind = QE_EFFECT_SCALE_USE, .object = scale}, GRAPH(CAPTURE, 1));
    assert_int_equal(qe_ledger_create(&program, &ledger, NULL), QE_OK);
    assert_int_equal(qe_ledger_certify(ledger, &violations, NULL), QE_OK);
    qe_item wait = {.kind = QE_ITEM_WAIT, .stream = ON_COMPUTE, .event = OUTSIDE, .microbatch = QE_NONE};
    static const uint32_t issued[] = {1, 2, 1, 3}; /* a step that is given up takes its recording with it */
    for (size_t step = 0; step < sizeof issued / sizeof issued[0]; step++) {
        qe_ledger_step_begin(ledger);
        for (uint32_t i = 0; i < issued[step]; i++) assert_int_equal(qe_ledger_issue(ledger, i, &violations), QE_OK);
        qe_status status = qe_ledger_submit(ledger, &wait, NULL, QE_NONE, &violations);
        assert_int_equal(status, issued[step] == 2 ? QE_CONTRACT : QE_OK);
        if (status == QE_CONTRACT) assert_int_equal(violations.record[0].rule, QE_RULE_SYNC_CAPTURE);
        qe_ledger_step_abort(ledger);
    }
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_recording_that_an_op_begins_beside_other_effects_is_known_when_a_step_departs),
        cmocka_unit_test(every_fault_of_a_graph_is_refused_with_its_rule_and_changes_nothing),
        cmocka_unit_test(a_buffer_on_a_slot_is_refused_before_anything_runs),
        cmocka_unit_test(a_graph_that_was_captured_between_steps_is_launched_by_its_new_seal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
