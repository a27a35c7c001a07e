/* Streams and the in-process transport together: two ranks, each with its own device, compute and communication
 * streams, as a pipeline uses them. One thread issues for both ranks; the streams do the waiting. */
#include "devices.h"
#include "qeffect/local.h"

enum { STEPS = 300, WIDTH = 64 };

typedef struct rank {
    qe_device *device;
    qe_stream *compute, *comm;
    qe_event *ready;
} rank;

static void rank_open(rank *r) {
    const qe_backend *host = qe_host_backend();
    assert_int_equal(host->open(&r->device, NULL), QE_OK);
    qe_host_set_comm(r->device, qe_local_comm());
    assert_int_equal(host->stream->create(r->device, "compute", &r->compute, NULL), QE_OK);
    assert_int_equal(host->stream->create(r->device, "comm", &r->comm, NULL), QE_OK);
    assert_int_equal(host->stream->event_create(r->device, &r->ready, NULL), QE_OK);
}

static void rank_close(rank *r) {
    const qe_backend *host = qe_host_backend();
    host->stream->destroy(r->compute);
    host->stream->destroy(r->comm);
    host->stream->event_destroy(r->ready);
    host->close(r->device);
}

static qe_channel *channel_of(qe_world *world, uint32_t from, uint32_t to) {
    qe_channel *channel = NULL;
    assert_int_equal(qe_local_comm()->channel_open(world, from, to, 0, &channel, NULL), QE_OK);
    return channel;
}

static qe_op transfer(qe_op_kind kind, qe_channel *channel, float *at) {
    return (qe_op){.kind = kind, .args.transfer = {.channel = channel, .bytes_at = at, .bytes = WIDTH * sizeof(float)}};
}

static qe_op copy(const float *from, float *to) {
    return (qe_op){.kind = QE_OP_COPY, .args.copy = {.from = from, .to = to, .bytes = WIDTH * sizeof(float)}};
}

/* Rank 0 computes into a buffer and sends it; rank 1 receives and takes it over. Both buffers are used again at every
 * step, so a missing wait or a send that returns early shows as a wrong value. */
static void activations_cross_ranks_through_reused_buffers(void **state) {
    (void)state;
    const qe_stream_ops *stream = qe_host_backend()->stream;
    qe_world *world = NULL;
    rank ranks[2];
    assert_int_equal(qe_local_world_create(2, &world, NULL), QE_OK);
    rank_open(&ranks[0]);
    rank_open(&ranks[1]);
    qe_channel *channel = channel_of(world, 0, 1);
    float *source = random_floats(STEPS * WIDTH, 1.0f, 1), *result = floats_of(STEPS * WIDTH), out[WIDTH], in[WIDTH];
    qe_op *ops = calloc(4 * STEPS, sizeof *ops);
    for (int step = 0; step < STEPS; ++step) {
        qe_op *op = ops + 4 * step;
        op[0] = copy(source + step * WIDTH, out);
        op[1] = transfer(QE_OP_SEND, channel, out);
        op[2] = transfer(QE_OP_RECV, channel, in);
        op[3] = copy(in, result + step * WIDTH);
        for (int side = 0; side < 2; ++side) { /* compute then send; receive then compute */
            qe_stream *first = side ? ranks[1].comm : ranks[0].compute;
            qe_stream *second = side ? ranks[1].compute : ranks[0].comm;
            stream->submit(first, &op[2 * side]);
            stream->record(first, ranks[side].ready);
            stream->wait(second, ranks[side].ready);
            stream->submit(second, &op[2 * side + 1]);
            stream->record(second, ranks[side].ready); /* the buffer is free again */
            stream->wait(first, ranks[side].ready);
        }
    }
    for (int side = 0; side < 2; ++side) {
        assert_int_equal(stream->sync(ranks[side].compute, NULL), QE_OK);
        assert_int_equal(stream->sync(ranks[side].comm, NULL), QE_OK);
    }
    assert_same_bits(result, source, STEPS * WIDTH * sizeof(float));
    rank_close(&ranks[0]);
    rank_close(&ranks[1]);
    qe_local_world_destroy(world);
    free(source), free(result), free(ops);
}

static void an_aborted_transport_frees_the_streams_and_sync_says_so(void **state) {
    (void)state;
    const qe_stream_ops *stream = qe_host_backend()->stream;
    qe_world *world = NULL;
    rank r;
    qe_error error = {0};
    float at[WIDTH] = {0}, source[WIDTH] = {3.0f}, result[WIDTH] = {0};
    assert_int_equal(qe_local_world_create(2, &world, NULL), QE_OK);
    rank_open(&r);
    qe_op receive = transfer(QE_OP_RECV, channel_of(world, 1, 0), at), after = copy(source, result);
    stream->submit(r.comm, &receive); /* nobody sends */
    stream->record(r.comm, r.ready);
    stream->wait(r.compute, r.ready);
    stream->submit(r.compute, &after);
    qe_local_comm()->abort(world);
    assert_int_equal(stream->sync(r.compute, &error), QE_OK);
    assert_int_equal(stream->sync(r.comm, &error), QE_ERROR_INTERRUPTED);
    assert_non_null(strstr(error.message, "recv"));
    assert_true(result[0] == 3.0f);
    qe_local_comm()->reset(world);
    assert_int_equal(stream->sync(r.comm, &error), QE_OK);
    rank_close(&r);
    qe_local_world_destroy(world);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(activations_cross_ranks_through_reused_buffers),
        cmocka_unit_test(an_aborted_transport_frees_the_streams_and_sync_says_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
