/* The in-process transport: rendezvous, order, abort, reset, meetings. Each rank is a thread. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "qeffect/limits.h"
#include "qeffect/local.h"

enum { MESSAGES = 2000, RANKS = 4 };

typedef struct side {
    qe_world *world;
    qe_channel *channel;
    uint32_t rank;
    qe_status status;
    qe_status worst;
    uint64_t wrong;
    size_t bytes;
    atomic_int done;
    double gathered[RANKS * 2];
} side;

static void nap_ms(long ms) { nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL); }

static qe_world *world_of(uint32_t ranks) {
    qe_world *world = NULL;
    qe_error error;
    assert_int_equal(qe_local_world_create(ranks, &world, &error), QE_OK);
    return world;
}

static qe_channel *channel_of(qe_world *world, uint32_t from, uint32_t to, uint32_t lane) {
    qe_channel *channel = NULL;
    assert_int_equal(qe_local_comm()->channel_open(world, from, to, lane, &channel, NULL), QE_OK);
    return channel;
}

static pthread_t start(void *(*body)(void *), side *with) {
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, body, with), 0);
    return thread;
}

static void *sends_numbers(void *argument) {
    side *me = argument;
    for (uint64_t i = 0; i < MESSAGES; ++i) {
        uint64_t number = i;
        if (qe_local_comm()->send(me->channel, &number, sizeof number) != QE_OK) ++me->wrong;
        number = UINT64_MAX; /* after send returned the bytes are the sender's again */
    }
    return NULL;
}

static void *receives_numbers(void *argument) {
    side *me = argument;
    for (uint64_t i = 0; i < MESSAGES; ++i) {
        uint64_t number = 77;
        if (qe_local_comm()->recv(me->channel, &number, sizeof number) != QE_OK || number != i) ++me->wrong;
    }
    return NULL;
}

static void messages_arrive_whole_and_in_order(void **state) {
    (void)state;
    qe_world *world = world_of(2);
    side forth = {.channel = channel_of(world, 0, 1, 0)}, back = {.channel = channel_of(world, 1, 0, 1)};
    side forth_end = forth, back_end = back;
    pthread_t threads[4] = {start(sends_numbers, &forth), start(receives_numbers, &forth_end),
                            start(sends_numbers, &back), start(receives_numbers, &back_end)};
    for (int i = 0; i < 4; ++i) pthread_join(threads[i], NULL);
    assert_int_equal(forth.wrong + forth_end.wrong + back.wrong + back_end.wrong, 0);
    qe_local_world_destroy(world);
}

static void both_ends_open_one_channel_and_lanes_tell_channels_apart(void **state) {
    (void)state;
    qe_world *world = world_of(3);
    assert_ptr_equal(channel_of(world, 0, 1, 0), channel_of(world, 0, 1, 0));
    assert_ptr_not_equal(channel_of(world, 0, 1, 0), channel_of(world, 0, 1, 1));
    assert_ptr_not_equal(channel_of(world, 0, 1, 0), channel_of(world, 1, 0, 0));
    assert_ptr_not_equal(channel_of(world, 0, 1, 0), channel_of(world, 0, 2, 0));
    qe_local_world_destroy(world);
}

static void an_impossible_channel_or_world_is_refused(void **state) {
    (void)state;
    qe_world *world = world_of(2), *none = NULL;
    qe_channel *channel = NULL;
    qe_error error;
    assert_int_equal(qe_local_comm()->channel_open(world, 0, 2, 0, &channel, &error), QE_ERROR_ARGUMENT);
    assert_int_equal(qe_local_comm()->channel_open(world, 1, 1, 0, &channel, &error), QE_ERROR_ARGUMENT);
    assert_null(channel);
    assert_int_equal(qe_local_world_create(0, &none, &error), QE_ERROR_LIMIT);
    assert_int_equal(qe_local_world_create(QE_RANKS_MAX + 1, &none, &error), QE_ERROR_LIMIT);
    assert_null(none);
    qe_local_world_destroy(world);
}

static void *sends_once(void *argument) {
    side *me = argument;
    char bytes[64] = "payload";
    me->status = qe_local_comm()->send(me->channel, bytes, me->bytes);
    atomic_store(&me->done, 1);
    return NULL;
}

static void *receives_once(void *argument) {
    side *me = argument;
    char bytes[64];
    me->status = qe_local_comm()->recv(me->channel, bytes, me->bytes);
    return NULL;
}

static void a_send_returns_only_when_the_receiver_has_the_bytes(void **state) {
    (void)state;
    qe_world *world = world_of(2);
    side sender = {.channel = channel_of(world, 0, 1, 0), .bytes = 8, .status = QE_ERROR_IO};
    pthread_t thread = start(sends_once, &sender);
    nap_ms(20);
    assert_false(atomic_load(&sender.done));
    char bytes[8];
    assert_int_equal(qe_local_comm()->recv(sender.channel, bytes, 8), QE_OK);
    pthread_join(thread, NULL);
    assert_int_equal(sender.status, QE_OK);
    assert_string_equal(bytes, "payload");
    qe_local_world_destroy(world);
}

static void a_size_mismatch_fails_both_ends_and_touches_nothing(void **state) {
    (void)state;
    qe_world *world = world_of(2);
    side sender = {.channel = channel_of(world, 0, 1, 0), .bytes = 16};
    pthread_t thread = start(sends_once, &sender);
    char bytes[8] = "before!";
    assert_int_equal(qe_local_comm()->recv(sender.channel, bytes, 8), QE_ERROR_DEVICE);
    pthread_join(thread, NULL);
    assert_int_equal(sender.status, QE_ERROR_DEVICE);
    assert_string_equal(bytes, "before!");
    sender.bytes = 8; /* the channel goes on working */
    thread = start(sends_once, &sender);
    assert_int_equal(qe_local_comm()->recv(sender.channel, bytes, 8), QE_OK);
    pthread_join(thread, NULL);
    assert_string_equal(bytes, "payload");
    qe_local_world_destroy(world);
}

static void *meets_alone(void *argument) {
    side *me = argument;
    const double values[2] = {1.0, 2.0};
    me->status = qe_local_comm()->meet(me->world, me->rank, QE_OK, values, 2, me->gathered, &me->worst);
    return NULL;
}

static void abort_wakes_senders_receivers_and_meetings_and_reset_starts_afresh(void **state) {
    (void)state;
    qe_world *world = world_of(3);
    side sender = {.channel = channel_of(world, 0, 1, 0), .bytes = 8};
    side receiver = {.channel = channel_of(world, 1, 2, 0), .bytes = 8};
    side member = {.world = world, .rank = 2, .worst = QE_CONTRACT};
    pthread_t threads[3] = {start(sends_once, &sender), start(receives_once, &receiver), start(meets_alone, &member)};
    nap_ms(20);
    qe_local_comm()->abort(world);
    for (int i = 0; i < 3; ++i) pthread_join(threads[i], NULL);
    assert_int_equal(sender.status, QE_ERROR_INTERRUPTED);
    assert_int_equal(receiver.status, QE_ERROR_INTERRUPTED);
    assert_int_equal(member.status, QE_ERROR_INTERRUPTED);
    assert_int_equal(member.worst, QE_CONTRACT); /* outputs are set on success only */
    char bytes[8];
    assert_int_equal(qe_local_comm()->send(sender.channel, bytes, 8), QE_ERROR_INTERRUPTED);
    assert_int_equal(qe_local_comm()->recv(sender.channel, bytes, 8), QE_ERROR_INTERRUPTED);
    qe_local_comm()->reset(world);
    pthread_t again = start(sends_once, &sender);
    assert_int_equal(qe_local_comm()->recv(sender.channel, bytes, 8), QE_OK);
    pthread_join(again, NULL);
    assert_int_equal(sender.status, QE_OK);
    qe_local_world_destroy(world);
}

static void *meets_often(void *argument) {
    side *me = argument;
    for (uint64_t round = 0; round < 500; ++round) {
        const double values[2] = {me->rank, (double)round};
        const qe_status mine = round % RANKS == me->rank ? QE_CONTRACT : round % 7 == 0 ? QE_ERROR_IO : QE_OK;
        if (qe_local_comm()->meet(me->world, me->rank, mine, values, 2, me->gathered, &me->worst) != QE_OK) ++me->wrong;
        if (me->worst != QE_CONTRACT) ++me->wrong;
        for (uint32_t rank = 0; rank < RANKS; ++rank)
            if (me->gathered[rank * 2] != rank || me->gathered[rank * 2 + 1] != (double)round) ++me->wrong;
    }
    return NULL;
}

static void every_meeting_gives_every_rank_the_worst_status_and_all_values(void **state) {
    (void)state;
    qe_world *world = world_of(RANKS);
    side sides[RANKS];
    pthread_t threads[RANKS];
    memset(sides, 0, sizeof sides);
    for (uint32_t rank = 0; rank < RANKS; ++rank) {
        sides[rank].world = world;
        sides[rank].rank = rank;
        threads[rank] = start(meets_often, &sides[rank]);
    }
    for (uint32_t rank = 0; rank < RANKS; ++rank) {
        pthread_join(threads[rank], NULL);
        assert_int_equal(sides[rank].wrong, 0);
    }
    qe_local_world_destroy(world);
}

static void a_rank_alone_meets_itself(void **state) {
    (void)state;
    qe_world *world = world_of(1);
    qe_status worst = QE_OK;
    double gathered[1] = {0}, value = 5.0;
    assert_int_equal(qe_local_comm()->meet(world, 0, QE_ERROR_IO, &value, 1, gathered, &worst), QE_OK);
    assert_int_equal(worst, QE_ERROR_IO);
    assert_true(gathered[0] == 5.0);
    assert_int_equal(qe_local_comm()->meet(world, 0, QE_OK, NULL, 0, NULL, &worst), QE_OK);
    assert_int_equal(worst, QE_OK);
    qe_local_world_destroy(world);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_arrive_whole_and_in_order),
        cmocka_unit_test(both_ends_open_one_channel_and_lanes_tell_channels_apart),
        cmocka_unit_test(an_impossible_channel_or_world_is_refused),
        cmocka_unit_test(a_send_returns_only_when_the_receiver_has_the_bytes),
        cmocka_unit_test(a_size_mismatch_fails_both_ends_and_touches_nothing),
        cmocka_unit_test(abort_wakes_senders_receivers_and_meetings_and_reset_starts_afresh),
        cmocka_unit_test(every_meeting_gives_every_rank_the_worst_status_and_all_values),
        cmocka_unit_test(a_rank_alone_meets_itself),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
