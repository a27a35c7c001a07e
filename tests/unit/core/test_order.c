/* What is really executed is judged by itself: an edge that is missing there is found whoever wins the race. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "qeffect/order.h"

typedef struct world {
    qe_order *order;
    uint32_t compute, side, caller, event, back;
    char bytes[256];
} world;

static int setup(void **state) {
    static world w;
    qe_error error;
    memset(&w, 0, sizeof w);
    assert_int_equal(qe_order_create(&w.order, &error), QE_OK);
    assert_int_equal(qe_order_add_stream(w.order, "compute", QE_STREAM_COMPUTE, &w.compute, &error), QE_OK);
    assert_int_equal(qe_order_add_stream(w.order, "send", QE_STREAM_COMM, &w.side, &error), QE_OK);
    assert_int_equal(qe_order_add_stream(w.order, "caller", QE_STREAM_CALLER, &w.caller, &error), QE_OK);
    w.event = qe_order_add_event(w.order);
    w.back = qe_order_add_event(w.order);
    *state = &w;
    return 0;
}

static int teardown(void **state) {
    qe_order_destroy(((world *)*state)->order);
    return 0;
}

static qe_status touch(world *w, uint32_t stream, size_t begin, size_t bytes, int write, qe_breach *breach) {
    qe_range range = {.at = w->bytes + begin, .bytes = bytes, .read = !write, .write = write != 0, .object = "slot"};
    return qe_order_access(w->order, stream, "an op", &range, 1, breach);
}

static void edge(world *w, uint32_t from, uint32_t to, uint32_t event) {
    assert_int_equal(qe_order_record(w->order, from, event), QE_OK);
    assert_int_equal(qe_order_wait(w->order, to, event), QE_OK);
}

static void work_that_an_event_orders_is_fine(void **state) {
    world *w = *state;
    qe_breach breach;
    for (int turn = 0; turn < 10000; turn++) { /* and it may go on as long as it likes */
        assert_int_equal(touch(w, w->compute, 0, 64, 1, &breach), QE_OK);
        edge(w, w->compute, w->side, w->event);
        assert_int_equal(touch(w, w->side, 0, 64, 0, &breach), QE_OK);
        edge(w, w->side, w->compute, w->back);
    }
}

static void a_wait_that_was_not_executed_is_missed(void **state) {
    world *w = *state;
    qe_breach breach;
    assert_int_equal(touch(w, w->compute, 0, 64, 1, &breach), QE_OK);
    assert_int_equal(qe_order_record(w->order, w->compute, w->event), QE_OK);
    assert_int_equal(touch(w, w->side, 32, 64, 0, &breach), QE_CONTRACT);
    assert_int_equal(breach.rule, QE_RULE_SYNC_SIDE);
    assert_string_equal(breach.object, "slot");
    assert_non_null(strstr(breach.text, "'send'"));
}

static void bytes_that_do_not_meet_need_no_edge(void **state) {
    world *w = *state;
    qe_breach breach;
    assert_int_equal(touch(w, w->compute, 0, 64, 1, &breach), QE_OK);
    assert_int_equal(touch(w, w->side, 64, 64, 1, &breach), QE_OK);
    assert_int_equal(touch(w, w->compute, 128, 64, 0, &breach), QE_OK);
    assert_int_equal(touch(w, w->side, 128, 64, 0, &breach), QE_OK);
}

static void a_slot_that_is_reused_before_it_was_sent_is_missed(void **state) {
    world *w = *state;
    qe_breach breach;
    assert_int_equal(touch(w, w->compute, 0, 64, 1, &breach), QE_OK);
    edge(w, w->compute, w->side, w->event);
    assert_int_equal(touch(w, w->side, 0, 64, 0, &breach), QE_OK);
    assert_int_equal(touch(w, w->compute, 0, 64, 1, &breach), QE_CONTRACT);
    assert_int_equal(breach.rule, QE_RULE_SYNC_SIDE);
}

static void the_callers_stream_has_rules_of_its_own(void **state) {
    world *w = *state;
    qe_breach breach;
    assert_int_equal(touch(w, w->caller, 0, 8, 1, &breach), QE_OK);
    assert_int_equal(touch(w, w->compute, 0, 8, 0, &breach), QE_CONTRACT);
    assert_int_equal(breach.rule, QE_RULE_SYNC_ENTER);
    assert_int_equal(touch(w, w->compute, 8, 8, 1, &breach), QE_OK);
    assert_int_equal(touch(w, w->caller, 8, 8, 0, &breach), QE_CONTRACT);
    assert_int_equal(breach.rule, QE_RULE_SYNC_EXIT);
}

static void the_host_has_to_wait_too(void **state) {
    world *w = *state;
    qe_breach breach;
    assert_int_equal(touch(w, w->compute, 0, 8, 1, &breach), QE_OK);
    assert_int_equal(touch(w, QE_NONE, 0, 8, 0, &breach), QE_CONTRACT);
    assert_int_equal(breach.rule, QE_RULE_SYNC_HOST);
    assert_int_equal(qe_order_sync(w->order, w->compute), QE_OK);
    assert_int_equal(touch(w, QE_NONE, 0, 8, 0, &breach), QE_OK);
}

static void a_refused_access_leaves_no_mark(void **state) {
    world *w = *state;
    qe_breach breach;
    assert_int_equal(touch(w, w->compute, 0, 8, 1, &breach), QE_OK);
    assert_int_equal(touch(w, w->side, 0, 8, 1, &breach), QE_CONTRACT);
    assert_int_equal(touch(w, w->compute, 0, 8, 0, &breach), QE_OK);
}

static void streams_that_come_later_start_afresh(void **state) {
    world *w = *state;
    qe_breach breach;
    qe_error error;
    uint32_t late;
    assert_int_equal(touch(w, w->compute, 0, 8, 1, &breach), QE_OK);
    assert_int_equal(qe_order_add_stream(w->order, "late", QE_STREAM_COMM, &late, &error), QE_OK);
    assert_int_equal(touch(w, late, 0, 8, 1, &breach), QE_OK);
    assert_int_equal(touch(w, w->compute, 0, 8, 0, &breach), QE_CONTRACT);
}

#define ORDER_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ORDER_TEST(work_that_an_event_orders_is_fine),
        ORDER_TEST(a_wait_that_was_not_executed_is_missed),
        ORDER_TEST(bytes_that_do_not_meet_need_no_edge),
        ORDER_TEST(a_slot_that_is_reused_before_it_was_sent_is_missed),
        ORDER_TEST(the_callers_stream_has_rules_of_its_own),
        ORDER_TEST(the_host_has_to_wait_too),
        ORDER_TEST(a_refused_access_leaves_no_mark),
        ORDER_TEST(streams_that_come_later_start_afresh),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
