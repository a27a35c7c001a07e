/* core_program.h - the small right program that the tests of the contract core start from: two microbatches on one
 * stage, every kind of object, four streams. Every op is needed by a rule; its number is its name. */
#ifndef QE_TESTS_CORE_PROGRAM_H
#define QE_TESTS_CORE_PROGRAM_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "qeffect/trace.h"

enum { CALLER, COMPUTE, SEND, HOST };
enum { SCALE, SLOT, WEIGHT, CACHE, GRAD, BUFFER };
enum {
    ITEM_LOAD, ITEM_LOADED, ITEM_ENTER, ITEM_FILL, ITEM_F0, ITEM_W0, ITEM_F1, ITEM_W1, ITEM_TAKE, ITEM_COMMIT,
    ITEM_FOLD, ITEM_DONE, ITEM_SIDE, ITEM_SEND, ITEM_SENT, ITEM_EXIT, ITEM_STORE, ITEM_SYNC, ITEM_HOST, ITEM_COUNT
};
enum { BUFFER_BYTES = 256, HALF = 128 };

#define SCALE_EFFECT(k, v) {.kind = QE_EFFECT_SCALE_##k, .object = SCALE, .version = v}
#define SLOT_EFFECT(k, v, mb, w) \
    {.kind = QE_EFFECT_SLOT_##k, .object = SLOT, .version = v, .microbatch = mb, .write = w}
#define WEIGHT_EFFECT(k, v) {.kind = QE_EFFECT_WEIGHT_##k, .object = WEIGHT, .version = v}
#define CACHE_EFFECT(k, l, v, e) \
    {.kind = QE_EFFECT_CACHE_##k, .object = CACHE, .layouts = l, .version = v, .epoch = e}
#define DEPOSIT(mb, w) {.kind = QE_EFFECT_GRAD_DEPOSIT, .object = GRAD, .microbatch = mb, .write = w}
#define TAKE() {.kind = QE_EFFECT_GRAD_TAKE, .object = GRAD}
#define BUFFER_EFFECT(k, b, e, v) {.kind = QE_EFFECT_BUFFER_##k, .object = BUFFER, .begin = b, .end = e, .version = v}

static inline uint32_t must_add_object(qe_program *program, qe_object object) {
    uint32_t index;
    assert_int_equal(qe_program_add_object(program, &object, &index, NULL), QE_OK);
    return index;
}

static inline void must_add(qe_program *program, qe_item item, const char *label, const qe_effect *effects,
                            uint32_t count) {
    if (label != NULL) assert_int_equal(qe_program_add_label(program, label, &item.label, NULL), QE_OK);
    assert_int_equal(qe_program_add_item(program, &item, effects, count, NULL, NULL), QE_OK);
}

#define OP(program, on, mb, text, ...)                                                               \
    do {                                                                                             \
        const qe_effect op_effects[] = {__VA_ARGS__};                                                \
        must_add(program, (qe_item){.kind = QE_ITEM_OP, .stream = on, .microbatch = mb}, text,       \
                 op_effects, sizeof op_effects / sizeof op_effects[0]);                              \
    } while (0)
#define EDGE(program, what, on, which) \
    must_add(program, (qe_item){.kind = QE_ITEM_##what, .stream = on, .event = which, .microbatch = QE_NONE}, NULL, \
             NULL, 0)

static inline void add_objects(qe_program *program) {
    static const qe_object objects[] = {
        [SCALE] = {.name = "S", .kind = QE_OBJECT_SCALE, .due = 2},
        [SLOT] = {.name = "X", .kind = QE_OBJECT_SLOT},
        [WEIGHT] = {.name = "w", .kind = QE_OBJECT_WEIGHT},
        [CACHE] = {.name = "q", .kind = QE_OBJECT_CACHE, .weight = WEIGHT, .scale = SCALE},
        [GRAD] = {.name = "g", .kind = QE_OBJECT_GRAD, .weight = WEIGHT, .due = 2},
        [BUFFER] = {.name = "b", .kind = QE_OBJECT_BUFFER, .bytes = BUFFER_BYTES},
    };
    for (size_t i = 0; i < sizeof objects / sizeof objects[0]; i++) must_add_object(program, objects[i]);
    assert_int_equal(qe_program_add_stream(program, "caller", QE_STREAM_CALLER, NULL, NULL), QE_OK);
    assert_int_equal(qe_program_add_stream(program, "compute", QE_STREAM_COMPUTE, NULL, NULL), QE_OK);
    assert_int_equal(qe_program_add_stream(program, "send", QE_STREAM_COMM, NULL, NULL), QE_OK);
    assert_int_equal(qe_program_add_stream(program, "host", QE_STREAM_HOST, NULL, NULL), QE_OK);
    for (int i = 0; i < 3; i++) qe_program_add_event(program);
}

static inline void add_right_items(qe_program *program) {
    OP(program, CALLER, QE_NONE, "load", BUFFER_EFFECT(WRITE, 0, BUFFER_BYTES, 0));
    EDGE(program, RECORD, CALLER, 0);
    EDGE(program, WAIT, COMPUTE, 0);
    OP(program, COMPUTE, QE_NONE, "fill", WEIGHT_EFFECT(READ, 0), CACHE_EFFECT(FILL, 3, 0, 0));
    OP(program, COMPUTE, 0, "forward", CACHE_EFFECT(USE, 1, 0, 0), SCALE_EFFECT(USE, 0), SCALE_EFFECT(RECORD, 0),
       SLOT_EFFECT(ACQUIRE, 1, 0, 0), SLOT_EFFECT(BORROW, 1, 0, 1), BUFFER_EFFECT(READ, 0, HALF, 1));
    OP(program, COMPUTE, 0, "weight_grad", SLOT_EFFECT(BORROW, 1, 0, 0), DEPOSIT(0, 1), SLOT_EFFECT(RELEASE, 1, 0, 0));
    OP(program, COMPUTE, 1, "forward", CACHE_EFFECT(USE, 1, 0, 0), SCALE_EFFECT(USE, 0), SCALE_EFFECT(RECORD, 0),
       SLOT_EFFECT(ACQUIRE, 2, 1, 0), SLOT_EFFECT(BORROW, 2, 1, 1), BUFFER_EFFECT(READ, HALF, BUFFER_BYTES, 1));
    OP(program, COMPUTE, 1, "weight_grad", SLOT_EFFECT(BORROW, 2, 1, 0), DEPOSIT(1, 0), SLOT_EFFECT(RELEASE, 2, 1, 0));
    OP(program, COMPUTE, QE_NONE, "grad_norm", TAKE());
    OP(program, COMPUTE, QE_NONE, "adamw", WEIGHT_EFFECT(COMMIT, 0));
    OP(program, COMPUTE, QE_NONE, "fold", SCALE_EFFECT(FOLD, 0));
    EDGE(program, RECORD, COMPUTE, 1);
    EDGE(program, WAIT, SEND, 1);
    OP(program, SEND, QE_NONE, "send", BUFFER_EFFECT(WRITE, 0, HALF, 0));
    EDGE(program, RECORD, SEND, 2);
    EDGE(program, WAIT, CALLER, 2);
    OP(program, CALLER, QE_NONE, "store", BUFFER_EFFECT(WRITE, 0, BUFFER_BYTES, 0));
    EDGE(program, SYNC_STREAM, CALLER, 0);
    OP(program, HOST, QE_NONE, "look", BUFFER_EFFECT(WRITE, 0, BUFFER_BYTES, 0));
}

static inline void make_right_program(qe_program *program) {
    qe_program_init(program);
    add_objects(program);
    add_right_items(program);
    assert_int_equal(program->item_count, ITEM_COUNT);
}

#endif
