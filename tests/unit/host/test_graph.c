/* Recorded graphs of the host backend: what a launch runs, in which order, what is frozen and what is not, what it
 * costs. */
#include "graphs.h"

enum { ROWS = 8, WIDE = 128, VOCAB = 96, TRAIN_OPS = 8 };

/* A layer that learns: norm, quantize, product, loss, weight gradient, AdamW, fold. */
typedef struct tiny_model {
    float *x, *gain, *rstd, *logits, *weight, *grad, *scratch_x, *scratch_dy, *moments;
    int32_t targets[ROWS];
    double loss;
    quantized input, master, delta;
    qe_scale_state scale, *scales[1]; /* of the delta */
    float history[4];
    qe_recipe recipe;
    qe_adamw step;
    qe_op ops[TRAIN_OPS];
} tiny_model;

static void tiny_ops(tiny_model *m) {
    m->ops[0] = (qe_op){.kind = QE_OP_NORM_QUANTIZE,
                        .args.norm = {.x = m->x, .gain = m->gain, .rstd = m->rstd, .target = m->input.target,
                                      .epsilon = 1e-5f, .rows = ROWS, .hidden = WIDE}};
    m->ops[1] = (qe_op){.kind = QE_OP_QUANTIZE_WEIGHT,
                        .args.quantize_weight = {.w = m->weight, .rows = VOCAB, .columns = WIDE,
                                                 .target = m->master.target}};
    m->ops[2] = (qe_op){.kind = QE_OP_LINEAR,
                        .args.linear = {.x = m->input.target.operand, .w = m->master.target.operand, .y = m->logits,
                                        .rows = ROWS, .in = WIDE, .out = VOCAB}};
    m->ops[3] = (qe_op){.kind = QE_OP_CROSS_ENTROPY,
                        .args.cross_entropy = {.logits = m->logits, .targets = m->targets, .loss = &m->loss,
                                               .gradient_scale = 1.0f / ROWS, .rows = ROWS, .vocab = VOCAB,
                                               .backward = 1}};
    m->ops[4] = (qe_op){.kind = QE_OP_QUANTIZE,
                        .args.quantize = {.x = m->logits, .rows = ROWS, .columns = VOCAB, .target = m->delta.target}};
    m->ops[5] = (qe_op){.kind = QE_OP_LINEAR_WEIGHT_GRAD,
                        .args.linear_weight_grad = {.x = m->input.target.retained, .dy = m->delta.target.retained,
                                                    .scratch_x = m->scratch_x, .scratch_dy = m->scratch_dy,
                                                    .grad = m->grad, .rows = ROWS, .in = WIDE, .out = VOCAB,
                                                    .set = 1}};
    m->ops[6] = (qe_op){.kind = QE_OP_ADAMW,
                        .args.adamw = {.weight = m->weight, .grad = m->grad, .moment1 = m->moments,
                                       .moment2 = m->moments + VOCAB * WIDE, .count = VOCAB * WIDE, .step = &m->step,
                                       .decay = 1}};
    m->ops[7] = (qe_op){.kind = QE_OP_FOLD, .args.fold = {.states = m->scales, .count = 1, .recipe = &m->recipe}};
}

static void tiny_init(tiny_model *m) {
    memset(m, 0, sizeof *m);
    m->x = random_floats(ROWS * WIDE, 2.0f, 1);
    m->gain = random_floats(WIDE, 1.0f, 2);
    m->weight = random_floats(VOCAB * WIDE, 0.3f, 3);
    m->rstd = floats_of(ROWS);
    m->logits = floats_of(ROWS * VOCAB);
    m->grad = floats_of(VOCAB * WIDE);
    m->scratch_x = floats_of(ROWS * WIDE);
    m->scratch_dy = floats_of(ROWS * VOCAB);
    m->moments = floats_of(2 * VOCAB * WIDE);
    for (int i = 0; i < ROWS; ++i) m->targets[i] = i * 7 % VOCAB;
    quantized_init(&m->input, QE_RECIPE_CURRENT, QE_FORMAT_E4M3, ROWS, WIDE, 0);
    quantized_init(&m->master, QE_RECIPE_CURRENT, QE_FORMAT_E4M3, VOCAB, WIDE, 1);
    quantized_init(&m->delta, QE_RECIPE_DELAYED, QE_FORMAT_E5M2, ROWS, VOCAB, 0);
    m->recipe = (qe_recipe){.kind = QE_RECIPE_DELAYED, .history_length = 4};
    m->scale = (qe_scale_state){.scale = 1.0f, .history = m->history, .history_length = 4, .format_max = 57344.0f};
    m->scales[0] = &m->scale;
    m->delta.target.scale = &m->scale.scale;
    m->delta.target.amax = &m->scale.amax;
    tiny_ops(m);
}

static void tiny_deinit(tiny_model *m) {
    float *all[] = {m->x, m->gain, m->weight, m->rstd, m->logits, m->grad, m->scratch_x, m->scratch_dy, m->moments};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) free(all[i]);
    quantized_deinit(&m->input);
    quantized_deinit(&m->master);
    quantized_deinit(&m->delta);
}

/* What the host changes between steps; the op reads it through its pointer. */
static void tiny_step_set(tiny_model *m, int step) {
    const float n = (float)step;
    m->step = (qe_adamw){.learning_rate = 0.01f / n, .beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f,
                         .weight_decay = 0.1f, .bias_correction1 = 1.0f - powf(0.9f, n),
                         .bias_correction2 = 1.0f - powf(0.95f, n), .gradient_scale = 1.0f};
}

static void assert_same_model(const tiny_model *a, const tiny_model *b) {
    assert_same_bits(a->weight, b->weight, VOCAB * WIDE * sizeof(float));
    assert_same_bits(a->moments, b->moments, 2 * VOCAB * WIDE * sizeof(float));
    assert_same_bits(a->grad, b->grad, VOCAB * WIDE * sizeof(float));
    assert_same_bits(a->logits, b->logits, ROWS * VOCAB * sizeof(float));
    assert_same_bits(a->history, b->history, sizeof a->history);
    assert_same_bits(&a->scale.scale, &b->scale.scale, sizeof a->scale.scale);
    assert_same_bits(&a->loss, &b->loss, sizeof a->loss);
}

static void a_replay_has_the_bits_of_an_eager_run_and_reads_fresh_what_it_reaches_through_pointers(void **state) {
    (void)state;
    static tiny_model eager, captured;
    tiny_init(&eager);
    tiny_init(&captured);
    qe_stream *stream = stream_of("learner");
    begin(stream);
    for (int i = 0; i < TRAIN_OPS; ++i) submit(stream, &captured.ops[i]);
    qe_graph *graph = end(stream);
    const qe_graph_info info = host->graph->info(graph);
    assert_int_equal(info.ops, TRAIN_OPS);
    assert_int_equal(info.lanes, 1);
    assert_true(info.bytes >= TRAIN_OPS * sizeof(qe_op));
    memset(captured.ops, 0xff, sizeof captured.ops); /* the graph has its own */
    double loss_before = INFINITY;
    for (int step = 1; step <= 5; ++step) {
        tiny_step_set(&eager, step);
        tiny_step_set(&captured, step);
        for (int i = 0; i < TRAIN_OPS; ++i) submit(stream, &eager.ops[i]);
        launch(graph, stream);
        sync_with(stream);
        assert_same_model(&eager, &captured);
        assert_true(captured.loss < loss_before); /* it learns: the steps are not the same step */
        loss_before = captured.loss;
    }
    assert_true(captured.scale.scale > 1.0f); /* folded */
    host->graph->destroy(graph);
    host->stream->destroy(stream);
    tiny_deinit(&eager);
    tiny_deinit(&captured);
}

static void a_graph_goes_on_using_the_pointers_and_constants_it_was_recorded_with(void **state) {
    (void)state;
    uint64_t cells[2] = {0}, numbers[2] = {5, 7};
    uint8_t bytes[2][4] = {{1, 2, 3, 4}, {0}};
    qe_channel channel = {.cell = &cells[0], .factor = 1};
    qe_op ops[2] = {fuse(&channel, &numbers[0]), copy(bytes[0], bytes[1], 2)};
    qe_stream *stream = stream_of("frozen");
    begin(stream);
    submit(stream, &ops[0]);
    submit(stream, &ops[1]);
    assert_int_equal(cells[0], 0); /* recorded, not run */
    qe_graph *graph = end(stream);
    ops[0].args.transfer.bytes_at = &numbers[1]; /* too late: an address */
    ops[1].args.copy.bytes = 4;                  /* and a host constant */
    launch(graph, stream);
    sync_with(stream);
    assert_int_equal(cells[0], 5);
    assert_int_equal(bytes[1][2], 0);
    numbers[0] = 100; /* what lies behind the old address is read at every launch */
    launch(graph, stream);
    sync_with(stream);
    assert_int_equal(cells[0], 105);
    for (int i = 0; i < 2; ++i) submit(stream, &ops[i]);
    sync_with(stream);
    assert_int_equal(cells[0], 112);
    assert_int_equal(bytes[1][2], 3);
    host->graph->destroy(graph);
    host->stream->destroy(stream);
}

static void a_thousand_queued_launches_keep_the_order_of_three_lanes(void **state) {
    (void)state;
    static diamond d;
    diamond_init(&d);
    diamond_record(&d);
    const qe_graph_info info = host->graph->info(d.graph);
    assert_int_equal(info.ops, 5);
    assert_int_equal(info.lanes, 3);
    atomic_int gate = 0;
    qe_channel held = {.gate = &gate};
    qe_op first = hold(&held, &d.one), after = copy(&d.x, &d.channels[0].factor, 0);
    submit(d.streams[0], &first); /* behind it a thousand launches queue, all lanes of them */
    const long before = blocks_taken();
    for (int i = 0; i < 1000; ++i) launch(d.graph, d.streams[0]);
    assert_int_equal(blocks_taken(), before);
    nap_us(2000);
    assert_int_equal(d.y, 0); /* the other lanes start behind the launching stream's earlier work */
    atomic_store(&gate, 1);
    submit(d.streams[0], &after);
    sync_with(d.streams[0]); /* and its later work runs behind all of them */
    assert_diamond(&d, 1000);
    for (int i = 0; i < 1000; ++i) launch(d.graph, d.streams[0]);
    for (int i = 0; i < 10; ++i) {
        diamond_submit(&d); /* graphs and eager work mix */
        launch(d.graph, d.streams[0]);
    }
    sync_with(d.streams[0]);
    assert_diamond(&d, 2020);
    diamond_deinit(&d);
}

static void launches_on_any_stream_follow_each_other_and_lanes_change_places_with_it(void **state) {
    (void)state;
    static diamond d;
    diamond_init(&d);
    diamond_record(&d);
    qe_stream *outside = stream_of("outside"), *turns[4] = {d.streams[1], outside, d.streams[2], d.streams[0]};
    for (int i = 0; i < 2000; ++i) launch(d.graph, turns[i * i / 3 % 4]);
    for (int i = 0; i < 4; ++i) sync_with(turns[i]);
    assert_diamond(&d, 2000);
    host->stream->destroy(outside);
    diamond_deinit(&d);
}

static void a_graph_may_be_destroyed_as_soon_as_the_launching_stream_is_done(void **state) {
    (void)state;
    static diamond d;
    diamond_init(&d);
    for (int i = 0; i < 300; ++i) {
        diamond_record(&d);
        launch(d.graph, d.streams[0]);
        sync_with(d.streams[0]);
        host->graph->destroy(d.graph);
    }
    d.graph = NULL;
    assert_diamond(&d, 300);
    diamond_deinit(&d);
}

/* Lane 2 is forked by lane 1 and joined through it: the first lane never names it. */
static void a_lane_may_be_forked_and_joined_through_another(void **state) {
    (void)state;
    static diamond d;
    diamond_init(&d);
    begin(d.streams[0]);
    submit(d.streams[0], &d.ops[0]);
    record(d.streams[0], d.forked);
    wait_for(d.streams[1], d.forked);
    submit(d.streams[1], &d.ops[1]);
    record(d.streams[1], d.joined[1]);
    wait_for(d.streams[2], d.joined[1]);
    submit(d.streams[2], &d.ops[2]);
    record(d.streams[2], d.joined[2]);
    wait_for(d.streams[1], d.joined[2]);
    record(d.streams[1], d.joined[1]); /* the same event again: it means the last record */
    wait_for(d.streams[0], d.joined[1]);
    wait_for(d.streams[0], d.joined[2]); /* says nothing new */
    submit(d.streams[0], &d.ops[3]);
    submit(d.streams[0], &d.ops[4]);
    d.graph = end(d.streams[0]);
    for (int i = 0; i < 1000; ++i) launch(d.graph, d.streams[0]);
    sync_with(d.streams[0]);
    assert_diamond(&d, 1000);
    diamond_deinit(&d);
}

static void a_stream_that_joins_and_does_nothing_is_no_lane(void **state) {
    (void)state;
    static diamond d;
    diamond_init(&d);
    begin(d.streams[0]);
    record(d.streams[0], d.forked);
    wait_for(d.streams[1], d.forked);
    submit(d.streams[0], &d.ops[0]);
    d.graph = end(d.streams[0]);
    assert_int_equal(host->graph->info(d.graph).lanes, 1);
    launch(d.graph, d.streams[0]);
    sync_with(d.streams[0]);
    assert_int_equal(d.x, 1);
    submit(d.streams[1], &d.ops[1]); /* runs: the recording is over for it too */
    sync_with(d.streams[1]);
    assert_int_equal(d.y, 1);
    diamond_deinit(&d);
}

static void an_empty_graph_and_a_hundred_waits_of_one_lane_are_graphs(void **state) {
    (void)state;
    uint64_t number = 4, result = 0;
    qe_op op = copy(&number, &result, sizeof number);
    qe_stream *stream = stream_of("alone");
    qe_event *event = event_of(), *never = event_of();
    begin(stream);
    qe_graph *empty = end(stream);
    assert_int_equal(host->graph->info(empty).ops, 0);
    launch(empty, stream);
    begin(stream);
    submit(stream, &op);
    for (int i = 0; i < 100; ++i) {
        record(stream, event);
        wait_for(stream, event);
        wait_for(stream, never); /* nothing to wait for, as outside */
    }
    qe_graph *graph = end(stream);
    assert_int_equal(host->graph->info(graph).ops, 1);
    assert_true(host->graph->info(graph).bytes < 4 * sizeof(qe_op)); /* waits that say nothing are not kept */
    launch(graph, stream);
    sync_with(stream);
    assert_int_equal(result, 4);
    host->graph->destroy(empty);
    host->graph->destroy(graph);
    host->graph->destroy(NULL);
    host->stream->destroy(stream);
    host->stream->event_destroy(event);
    host->stream->event_destroy(never);
}

static void more_launches_than_a_ring_holds_all_run(void **state) {
    (void)state;
    enum { LAUNCHES = 30000 };
    uint64_t cell = 0, expected = 0, one = 1;
    qe_channel channel = {.cell = &cell, .factor = 3};
    qe_op op = fuse(&channel, &one);
    qe_stream *stream = stream_of("many");
    begin(stream);
    submit(stream, &op);
    submit(stream, &op);
    qe_graph *graph = end(stream);
    for (int i = 0; i < LAUNCHES; ++i) launch(graph, stream);
    sync_with(stream);
    for (int i = 0; i < 2 * LAUNCHES; ++i) expected = 3 * expected + 1;
    assert_int_equal(cell, expected);
    host->graph->destroy(graph);
    host->stream->destroy(stream);
}

static void a_failing_op_is_told_by_the_stream_that_ran_it_and_the_rest_runs(void **state) {
    (void)state;
    static diamond d;
    diamond_init(&d);
    d.channels[2].answer = QE_ERROR_INTERRUPTED;
    diamond_record(&d);
    qe_error error = {0};
    launch(d.graph, d.streams[0]);
    sync_with(d.streams[0]);
    assert_diamond(&d, 1);
    assert_int_equal(host->stream->sync(d.streams[2], &error), QE_ERROR_INTERRUPTED);
    assert_non_null(strstr(error.message, "send was interrupted"));
    sync_with(d.streams[2]);
    sync_with(d.streams[1]);
    diamond_deinit(&d);
}

static double now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1e9 * (double)time.tv_sec + (double)time.tv_nsec;
}

static qe_graph *graph_of_copies(qe_stream *stream, const qe_op *op, int count) {
    begin(stream);
    for (int i = 0; i < count; ++i) submit(stream, op);
    return end(stream);
}

static void the_costs_of_launches_and_nodes_are_printed(void **state) {
    (void)state;
    enum { ROUNDS = 30, BURST = 4000, NODES = 10000 };
    uint64_t number = 0;
    qe_op nothing = copy(&number, &number, 0);
    qe_stream *stream = stream_of("timed");
    qe_graph *one = graph_of_copies(stream, &nothing, 1), *many = graph_of_copies(stream, &nothing, NODES);
    double launch_ns = INFINITY, submit_ns = INFINITY, node_ns = INFINITY, eager_ns = INFINITY;
    for (int round = 0; round < ROUNDS; ++round) {
        double start = now_ns();
        for (int i = 0; i < BURST; ++i) launch(one, stream);
        launch_ns = fmin(launch_ns, (now_ns() - start) / BURST);
        sync_with(stream);
        start = now_ns();
        for (int i = 0; i < BURST; ++i) submit(stream, &nothing);
        submit_ns = fmin(submit_ns, (now_ns() - start) / BURST);
        sync_with(stream);
        start = now_ns();
        launch(many, stream);
        sync_with(stream);
        node_ns = fmin(node_ns, (now_ns() - start) / NODES);
        start = now_ns();
        for (int i = 0; i < NODES; ++i) submit(stream, &nothing);
        sync_with(stream);
        eager_ns = fmin(eager_ns, (now_ns() - start) / NODES);
    }
    print_message("submitter: %.0f ns per launch, %.0f ns per eager op; start to end: %.1f ns per node, %.1f ns per "
                  "eager op; %.0f bytes per node\n",
                  launch_ns, submit_ns, node_ns, eager_ns, (double)host->graph->info(many).bytes / NODES);
    host->graph->destroy(one);
    host->graph->destroy(many);
    host->stream->destroy(stream);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_replay_has_the_bits_of_an_eager_run_and_reads_fresh_what_it_reaches_through_pointers),
        cmocka_unit_test(a_graph_goes_on_using_the_pointers_and_constants_it_was_recorded_with),
        cmocka_unit_test(a_thousand_queued_launches_keep_the_order_of_three_lanes),
        cmocka_unit_test(launches_on_any_stream_follow_each_other_and_lanes_change_places_with_it),
        cmocka_unit_test(a_graph_may_be_destroyed_as_soon_as_the_launching_stream_is_done),
        cmocka_unit_test(a_lane_may_be_forked_and_joined_through_another),
        cmocka_unit_test(a_stream_that_joins_and_does_nothing_is_no_lane),
        cmocka_unit_test(an_empty_graph_and_a_hundred_waits_of_one_lane_are_graphs),
        cmocka_unit_test(more_launches_than_a_ring_holds_all_run),
        cmocka_unit_test(a_failing_op_is_told_by_the_stream_that_ran_it_and_the_rest_runs),
        cmocka_unit_test(the_costs_of_launches_and_nodes_are_printed),
    };
    return cmocka_run_group_tests(tests, device_open, device_close);
}
