/* test_program.c - programs grow, refuse what refers to nothing, and are unchanged by a refused call; conflicts. */
#include "core_program.h"

#include <stdlib.h>

static void a_program_grows_far_beyond_its_first_room(void **state) {
    (void)state;
    enum { MANY = 3000 };
    qe_program program;
    qe_program_init(&program);
    assert_int_equal(qe_program_add_stream(&program, "s", QE_STREAM_COMPUTE, NULL, NULL), QE_OK);
    for (uint32_t i = 0; i < MANY; i++) {
        qe_object slot = {.kind = QE_OBJECT_SLOT};
        snprintf(slot.name, sizeof slot.name, "slot%u", i);
        assert_int_equal(must_add_object(&program, slot), i);
        const qe_effect effects[] = {{.kind = QE_EFFECT_SLOT_ACQUIRE, .object = i, .version = i},
                                     {.kind = QE_EFFECT_SLOT_BORROW, .object = i, .version = i}};
        must_add(&program, (qe_item){.kind = QE_ITEM_OP, .microbatch = i}, i % 2 ? "odd" : "even", effects, 2);
    }
    assert_int_equal(program.label_count, 2);
    for (uint32_t i = 0; i < MANY; i++) {
        const qe_item *item = &program.items[i];
        assert_int_equal(item->microbatch, i);
        assert_int_equal(item->first_effect, 2 * i);
        assert_int_equal(program.effects[item->first_effect + 1].version, i);
        assert_int_equal(item->label, i % 2);
    }
    qe_program_deinit(&program);
    assert_null(program.items);
    qe_program_deinit(&program);
}

static qe_program copy_of(const qe_program *program) { return *program; }

static void assert_unchanged(const qe_program *program, const qe_program *before) {
    assert_int_equal(program->object_count, before->object_count);
    assert_int_equal(program->stream_count, before->stream_count);
    assert_int_equal(program->label_count, before->label_count);
    assert_int_equal(program->item_count, before->item_count);
    assert_int_equal(program->effect_count, before->effect_count);
    assert_int_equal(program->deposit_count, before->deposit_count);
}

static void what_refers_to_nothing_is_refused(void **state) {
    (void)state;
    static const qe_object objects[] = {
        {.name = "", .kind = QE_OBJECT_SLOT},
        {.name = "x", .kind = QE_OBJECT_KINDS},
        {.name = "x", .kind = QE_OBJECT_CACHE, .weight = SLOT, .scale = SCALE},
        {.name = "x", .kind = QE_OBJECT_CACHE, .weight = QE_NONE, .scale = SCALE},
        {.name = "x", .kind = QE_OBJECT_CACHE, .weight = WEIGHT, .scale = SLOT},
        {.name = "x", .kind = QE_OBJECT_CACHE, .weight = WEIGHT, .scale = BUFFER + 1}, /* itself */
        {.name = "x", .kind = QE_OBJECT_GRAD, .weight = 99},
        {.name = "x", .kind = QE_OBJECT_GRAD, .weight = BUFFER + 1},
        {.name = "x", .kind = QE_OBJECT_GRAD, .weight = SCALE},
        {.name = "x", .kind = QE_OBJECT_BUFFER, .counter = QE_BUFFER_ABSENT + 1},
        {.name = "x", .kind = QE_OBJECT_BUFFER, .address = UINT64_MAX, .bytes = 1},
        {.name = "x", .kind = QE_OBJECT_SLOT, .address = UINT64_MAX - 1, .bytes = 2},
    };
    static const qe_item items[] = {
        {.kind = QE_ITEM_KINDS},
        {.kind = QE_ITEM_OP, .stream = 4},
        {.kind = QE_ITEM_OP, .label = 99},
        {.kind = QE_ITEM_OP, .label = 10}, /* as many as there are */
        {.kind = QE_ITEM_DESTROY, .event = 3},
        {.kind = QE_ITEM_WAIT, .stream = 4},
        {.kind = QE_ITEM_RECORD, .stream = 4},
        {.kind = QE_ITEM_SYNC_STREAM, .stream = 4},
        {.kind = QE_ITEM_RECORD, .event = 3},
        {.kind = QE_ITEM_WAIT, .event = QE_NONE},
        {.kind = QE_ITEM_SYNC_EVENT, .event = 3},
        {.kind = QE_ITEM_SYNC_STREAM, .stream = QE_NONE},
    };
    qe_program program;
    make_right_program(&program);
    assert_int_equal(program.label_count, 10);
    assert_int_equal(program.object_count, BUFFER + 1);
    qe_program before = copy_of(&program);
    qe_error error;
    for (size_t i = 0; i < sizeof objects / sizeof objects[0]; i++) {
        assert_int_equal(qe_program_add_object(&program, &objects[i], NULL, &error), QE_ERROR_ARGUMENT);
        assert_true(error.message[0] != '\0');
    }
    for (size_t i = 0; i < sizeof items / sizeof items[0]; i++)
        assert_int_equal(qe_program_add_item(&program, &items[i], NULL, 0, NULL, &error), QE_ERROR_ARGUMENT);
    assert_int_equal(qe_program_add_stream(&program, "x", (qe_stream_role)9, NULL, &error), QE_ERROR_ARGUMENT);
    assert_int_equal(qe_program_add_stream(&program, "", QE_STREAM_COMM, NULL, &error), QE_ERROR_ARGUMENT);
    assert_int_equal(qe_program_add_label(&program, "", NULL, &error), QE_ERROR_ARGUMENT);
    qe_item of_no_rank = {.kind = QE_ITEM_SYNC_DEVICE, .rank = QE_RANKS_MAX};
    assert_int_equal(qe_program_add_item(&program, &of_no_rank, NULL, 0, NULL, &error), QE_ERROR_ARGUMENT);
    assert_unchanged(&program, &before);
    qe_program_deinit(&program);
}

static void what_acts_on_nothing_is_refused(void **state) {
    (void)state;
    qe_program program;
    make_right_program(&program);
    qe_program before = copy_of(&program);
    qe_error error;
    qe_item op = {.kind = QE_ITEM_OP};
    qe_effect effects[QE_EFFECTS_MAX + 1] = {{.kind = QE_EFFECT_SCALE_USE, .object = SLOT}};
    assert_int_equal(qe_program_add_item(&program, &op, effects, 1, NULL, &error), QE_ERROR_ARGUMENT);
    effects[0] = (qe_effect){.kind = QE_EFFECT_KINDS};
    assert_int_equal(qe_program_add_item(&program, &op, effects, 1, NULL, &error), QE_ERROR_ARGUMENT);
    effects[0] = (qe_effect){.kind = QE_EFFECT_SCALE_USE, .object = 99};
    assert_int_equal(qe_program_add_item(&program, &op, effects, 1, NULL, &error), QE_ERROR_ARGUMENT);
    effects[0].object = BUFFER + 1;
    assert_int_equal(qe_program_add_item(&program, &op, effects, 1, NULL, &error), QE_ERROR_ARGUMENT);
    effects[0] = (qe_effect){.kind = QE_EFFECT_BUFFER_READ, .object = BUFFER, .end = 1, .rows = QE_ROWS_MAX + 1};
    assert_int_equal(qe_program_add_item(&program, &op, effects, 1, NULL, &error), QE_ERROR_LIMIT);
    assert_int_equal(qe_program_add_item(&program, &op, effects, QE_EFFECTS_MAX + 1, NULL, &error), QE_ERROR_LIMIT);
    qe_item record = {.kind = QE_ITEM_RECORD};
    assert_int_equal(qe_program_add_item(&program, &record, effects, 1, NULL, &error), QE_ERROR_ARGUMENT);
    effects[0] = (qe_effect){.kind = QE_EFFECT_SCALE_USE, .object = SCALE};
    effects[1] = (qe_effect){.kind = QE_EFFECT_SCALE_USE, .object = 99};
    assert_int_equal(qe_program_add_item(&program, &op, effects, 2, NULL, &error), QE_ERROR_ARGUMENT);
    effects[0] = (qe_effect){.kind = QE_EFFECT_GRAPH_LAUNCH, .object = WEIGHT};
    assert_int_equal(qe_program_add_item(&program, &op, effects, 1, NULL, &error), QE_ERROR_ARGUMENT);
    qe_deposit deposit = {.object = WEIGHT};
    assert_int_equal(qe_program_add_deposit(&program, &deposit, &error), QE_ERROR_ARGUMENT);
    assert_unchanged(&program, &before);
    qe_program_deinit(&program);
}

static void names_that_do_not_fit_are_refused(void **state) {
    (void)state;
    char longest[QE_NAME_BYTES + 1];
    memset(longest, 'n', sizeof longest);
    longest[QE_NAME_BYTES] = '\0';
    qe_program program;
    qe_program_init(&program);
    assert_int_equal(qe_program_add_label(&program, longest, NULL, NULL), QE_ERROR_ARGUMENT);
    assert_int_equal(qe_program_add_stream(&program, longest, QE_STREAM_COMM, NULL, NULL), QE_ERROR_ARGUMENT);
    qe_object object = {.kind = QE_OBJECT_SLOT};
    memcpy(object.name, longest, QE_NAME_BYTES);
    assert_int_equal(qe_program_add_object(&program, &object, NULL, NULL), QE_ERROR_ARGUMENT);
    longest[QE_NAME_BYTES - 1] = '\0';
    assert_int_equal(qe_program_add_label(&program, longest, NULL, NULL), QE_OK);
    assert_int_equal(qe_program_add_stream(&program, longest, QE_STREAM_COMM, NULL, NULL), QE_OK);
    for (int i = 1; i < QE_PROGRAM_STREAMS_MAX; i++)
        assert_int_equal(qe_program_add_stream(&program, "s", QE_STREAM_COMM, NULL, NULL), QE_OK);
    assert_int_equal(qe_program_add_stream(&program, "s", QE_STREAM_COMM, NULL, NULL), QE_ERROR_LIMIT);
    qe_program_deinit(&program);
}

static void a_copy_is_equal_grows_by_itself_and_outlives_its_origin(void **state) {
    (void)state;
    qe_program program, copy, none;
    make_right_program(&program);
    for (uint32_t mb = 0; mb < 2; mb++)
        assert_int_equal(qe_program_add_deposit(&program, &(qe_deposit){GRAD, mb, 0}, NULL), QE_OK);
    qe_program_init(&copy);
    assert_int_equal(qe_program_copy(&program, &copy, NULL), QE_OK);
    assert_memory_equal(copy.items, program.items, program.item_count * sizeof *copy.items);
    assert_memory_equal(copy.effects, program.effects, program.effect_count * sizeof *copy.effects);
    assert_int_equal(copy.event_count, program.event_count);
    assert_int_equal(copy.item_count, program.item_count);
    assert_int_equal(copy.effect_count, program.effect_count);
    assert_int_equal(copy.label_count, program.label_count);
    assert_int_equal(copy.stream_count, program.stream_count);
    assert_int_equal(copy.object_count, program.object_count);
    assert_int_equal(copy.deposit_count, 2);
    assert_memory_equal(copy.objects, program.objects, program.object_count * sizeof *copy.objects);
    assert_memory_equal(copy.streams, program.streams, program.stream_count * sizeof *copy.streams);
    assert_memory_equal(copy.labels, program.labels, program.label_count * sizeof *copy.labels);
    assert_memory_equal(copy.deposits, program.deposits, 2 * sizeof *copy.deposits);
    must_add_object(&copy, (qe_object){.name = "more", .kind = QE_OBJECT_GRAPH, .weight = QE_NONE, .scale = QE_NONE});
    assert_int_equal(copy.object_count, program.object_count + 1);
    for (uint32_t mb = 2; mb < 40; mb++) {
        assert_int_equal(qe_program_add_deposit(&copy, &(qe_deposit){GRAD, mb, 0}, NULL), QE_OK);
        OP(&copy, COMPUTE, mb, "more", SCALE_EFFECT(USE, 0));
    }
    assert_int_equal(program.deposit_count, 2);
    assert_int_equal(copy.deposits[39].microbatch, 39);
    assert_int_equal(copy.items[ITEM_COUNT + 37].microbatch, 39);
    qe_program_deinit(&program);
    assert_string_equal(copy.objects[SLOT].name, "X");
    assert_string_equal(copy.labels[0].text, "load");
    qe_program_init(&none);
    qe_program_deinit(&copy);
    assert_int_equal(qe_program_copy(&none, &copy, NULL), QE_OK);
    assert_null(copy.objects);
}

static void what_lies_at_the_edge_is_taken(void **state) {
    (void)state;
    static const qe_object objects[] = {
        {.name = "x", .kind = QE_OBJECT_BUFFER, .counter = QE_BUFFER_ABSENT, .address = UINT64_MAX - 1, .bytes = 1},
        {.name = "x", .kind = QE_OBJECT_GRAD, .weight = QE_NONE},
        {.name = "x", .kind = QE_OBJECT_CACHE, .weight = WEIGHT, .scale = QE_NONE},
        {.name = "x", .kind = QE_OBJECT_RNG, .counter = UINT64_MAX},
    };
    static const qe_item items[] = {
        {.kind = QE_ITEM_SYNC_DEVICE, .rank = QE_RANKS_MAX - 1, .stream = 99, .event = 99}, /* not its fields */
        {.kind = QE_ITEM_SYNC_EVENT, .event = 2, .stream = 99},
        {.kind = QE_ITEM_DESTROY, .event = 2, .stream = 99, .label = 99},
        {.kind = QE_ITEM_SYNC_STREAM, .stream = 3, .event = 99},
        {.kind = QE_ITEM_STEP_BEGIN, .stream = 99, .event = 99, .label = 99},
        {.kind = QE_ITEM_STEP_END, .stream = 99, .event = 99},
        {.kind = QE_ITEM_OP, .stream = 3, .label = 9, .event = 99},
    };
    qe_program program;
    uint32_t index = 0;
    make_right_program(&program);
    for (uint32_t i = 0; i < sizeof objects / sizeof objects[0]; i++) {
        assert_int_equal(qe_program_add_object(&program, &objects[i], &index, NULL), QE_OK);
        assert_int_equal(index, BUFFER + 1 + i);
    }
    for (uint32_t i = 0; i < sizeof items / sizeof items[0]; i++) {
        assert_int_equal(qe_program_add_item(&program, &items[i], NULL, 0, &index, NULL), QE_OK);
        assert_int_equal(index, ITEM_COUNT + i);
    }
    qe_effect rows = {.kind = QE_EFFECT_BUFFER_WRITE, .object = BUFFER, .end = 1, .rows = QE_ROWS_MAX};
    qe_effect none = {.kind = QE_EFFECT_SLOT_ACQUIRE, .object = SLOT, .microbatch = QE_NONE}; /* no rows */
    qe_item op = {.kind = QE_ITEM_OP};
    assert_int_equal(qe_program_add_item(&program, &op, &rows, 1, NULL, NULL), QE_OK);
    assert_int_equal(qe_program_add_item(&program, &op, &none, 1, NULL, NULL), QE_OK);
    qe_effect most[QE_EFFECTS_MAX];
    for (int i = 0; i < QE_EFFECTS_MAX; i++) most[i] = rows;
    assert_int_equal(qe_program_add_item(&program, &op, most, QE_EFFECTS_MAX, &index, NULL), QE_OK);
    assert_int_equal(program.items[index].effect_count, QE_EFFECTS_MAX);
    for (uint32_t i = 0; i < 3; i++) assert_int_equal(qe_program_add_event(&program), 3 + i);
    qe_program_deinit(&program);
}

static void a_launch_freezes_only_what_has_a_name(void **state) {
    (void)state;
    qe_program program;
    make_right_program(&program);
    qe_object object = {.name = "G", .kind = QE_OBJECT_GRAPH, .weight = QE_NONE, .scale = QE_NONE};
    qe_effect effect = {.kind = QE_EFFECT_GRAPH_LAUNCH, .object = must_add_object(&program, object)};
    qe_item op = {.kind = QE_ITEM_OP, .stream = COMPUTE};
    effect.use = QE_FROZEN_CONSTANT;
    assert_int_equal(qe_program_add_item(&program, &op, &effect, 1, NULL, NULL), QE_OK);
    effect.use = QE_FROZEN_KINDS;
    assert_int_equal(qe_program_add_item(&program, &op, &effect, 1, NULL, NULL), QE_ERROR_ARGUMENT);
    qe_program_deinit(&program);
}

static void effects_conflict_unless_both_read_or_both_record(void **state) {
    (void)state;
    static const uint8_t readers[] = {QE_EFFECT_SCALE_USE, QE_EFFECT_SCALE_RECORD, QE_EFFECT_SLOT_BORROW,
                                      QE_EFFECT_WEIGHT_READ, QE_EFFECT_CACHE_USE, QE_EFFECT_BUFFER_READ,
                                      QE_EFFECT_GRAPH_BEGIN, QE_EFFECT_GRAPH_CAPTURE, QE_EFFECT_GRAPH_LAUNCH};
    static const uint8_t no_access[] = {QE_EFFECT_BUFFER_TAKE, QE_EFFECT_BUFFER_DROP, QE_EFFECT_BUFFER_PLEDGE};
    for (int a = 0; a < QE_EFFECT_KINDS; a++) {
        for (int b = 0; b < QE_EFFECT_KINDS; b++) {
            qe_effect first = {.kind = (uint8_t)a, .end = 8}, second = {.kind = (uint8_t)b, .end = 8};
            int both_read = memchr(readers, a, sizeof readers) && memchr(readers, b, sizeof readers);
            if (memchr(no_access, a, sizeof no_access) || memchr(no_access, b, sizeof no_access)) both_read = 1;
            assert_int_equal(qe_effect_conflicts(&first, &second), !both_read);
            assert_int_equal(qe_effect_conflicts(&second, &first), !both_read);
            second.object = 1;
            assert_int_equal(qe_effect_conflicts(&first, &second), 0);
        }
    }
    qe_effect reads = {.kind = QE_EFFECT_SLOT_BORROW}, writes = {.kind = QE_EFFECT_SLOT_BORROW, .write = 1};
    assert_int_equal(qe_effect_conflicts(&reads, &reads), 0);
    assert_int_equal(qe_effect_conflicts(&reads, &writes), 1);
    assert_int_equal(qe_effect_conflicts(&writes, &writes), 1);
}

static void ranges_conflict_only_where_they_meet(void **state) {
    (void)state;
    static const struct {
        uint64_t begin, end, other_begin, other_end;
        int conflict;
    } cases[] = {
        {0, 8, 8, 16, 0}, {0, 9, 8, 16, 1}, {8, 16, 0, 8, 0}, {0, 16, 4, 8, 1}, {4, 4, 0, 8, 0}, {0, 8, 4, 4, 0},
        {0, 8, 100, 90, 0}, {0, UINT64_MAX, UINT64_MAX - 1, UINT64_MAX, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qe_effect a = {.kind = QE_EFFECT_BUFFER_WRITE, .begin = cases[i].begin, .end = cases[i].end};
        qe_effect b = {.kind = QE_EFFECT_BUFFER_READ, .begin = cases[i].other_begin, .end = cases[i].other_end};
        assert_int_equal(qe_effect_conflicts(&a, &b), cases[i].conflict);
        assert_int_equal(qe_effect_conflicts(&b, &a), cases[i].conflict);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_program_grows_far_beyond_its_first_room),
        cmocka_unit_test(what_refers_to_nothing_is_refused),
        cmocka_unit_test(what_acts_on_nothing_is_refused),
        cmocka_unit_test(names_that_do_not_fit_are_refused),
        cmocka_unit_test(a_copy_is_equal_grows_by_itself_and_outlives_its_origin),
        cmocka_unit_test(what_lies_at_the_edge_is_taken),
        cmocka_unit_test(a_launch_freezes_only_what_has_a_name),
        cmocka_unit_test(effects_conflict_unless_both_read_or_both_record),
        cmocka_unit_test(ranges_conflict_only_where_they_meet),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
