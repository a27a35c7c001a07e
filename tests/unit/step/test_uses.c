/* A weight that a microbatch uses twice, and a bias: y1 = x W', y2 = y1 W' + b. Both uses are deposited where the
 * gradient lives, the first of the step sets, and a use that is left out, deposited twice or out of order is trapped.
 * No Llama has either, so the model is this test's own; the host computes it. */
#include <math.h>
#include <string.h>
#include "base/assert.h"
#include "step/team.h"
#include "step_world.h"

enum { SIDE = 16, ROWS = 24, WEIGHTS = 2 };
enum { W, B }; /* indices of the two weights */

typedef enum fault { NONE, FORGOTTEN, SET_TWICE } fault;

typedef struct toy {
    fault wrong;
} toy;

/* What the model computes once: x, dy of y2, a column of ones, a loss; each on a line of its own. */
typedef struct constants {
    float x[ROWS * SIDE], dy[ROWS * SIDE], bias_rows[ROWS * SIDE], ones[QE_ALIGN_BYTES];
    double loss[8];
} constants;

static uint32_t weight_count(const void *model) {
    (void)model;
    return WEIGHTS;
}
static const qe_weight_info *weight(const void *model, uint32_t index) {
    static const qe_weight_info infos[WEIGHTS] = {
        [W] = {.name = "w", .rows = SIDE, .columns = SIDE, .deposited_by = QE_ACTION_W, .uses = 2},
        [B] = {.name = "b", .rows = SIDE, .columns = 1, .deposited_by = QE_ACTION_W},
    };
    (void)model;
    return &infos[index];
}
static uint32_t weight_stage(const void *model, uint32_t index, uint32_t stages) {
    (void)model, (void)index, (void)stages;
    return 0;
}
static uint32_t stages_max(const void *model) {
    (void)model;
    return 1;
}
static uint64_t slot_bytes(const void *model, uint32_t stage, uint32_t stages, qe_slot_kind kind) {
    (void)model, (void)stage, (void)stages;
    int kept = kind == QE_SLOT_I || kind == QE_SLOT_X || kind == QE_SLOT_Y;
    return kept ? ROWS * SIDE * sizeof(float) : 0;
}
static uint64_t nothing(const void *model) {
    (void)model;
    return 0;
}
static uint64_t a_line(const void *model) {
    (void)model;
    return QE_ALIGN_BYTES;
}
static uint64_t no_cache(const void *model, uint32_t index) {
    (void)model, (void)index;
    return 0;
}
static uint64_t constant_bytes(const void *model) {
    (void)model;
    return sizeof(constants);
}
static void constant_fill(const void *model, void *host_out) {
    constants *c = host_out;
    (void)model;
    memset(c, 0, sizeof *c);
    for (int i = 0; i < ROWS * SIDE; i++) {
        c->x[i] = (float)((i * 7 + 3) % 13 - 6) / 8.0f;
        c->dy[i] = (float)((i * 5 + 1) % 11 - 5) / 64.0f;
    }
    for (int i = 0; i < ROWS; i++) c->ones[i] = 1.0f;
    c->loss[0] = 1.0;
}
static const qe_parameter *parameter(const void *model, uint32_t index) {
    static const qe_parameter parameters[WEIGHTS] = {
        {.name = "b", .weight = B, .rows = SIDE, .columns = 1},
        {.name = "w", .weight = W, .rows = SIDE, .columns = SIDE},
    };
    (void)model;
    return &parameters[index];
}
static uint32_t tokens(const void *model) {
    (void)model;
    return ROWS;
}
static const qe_recipe *recipe(const void *model) {
    static const qe_recipe plain = {.kind = QE_RECIPE_FP32};
    (void)model;
    return &plain;
}

static qe_qtensor tensor(const void *at, uint32_t rows, uint32_t columns) {
    return (qe_qtensor){.codes = (void *)(uintptr_t)at, .rows = rows, .columns = columns, .format = QE_FORMAT_FP32};
}

static qe_effect borrow(const qe_frame *frame, qe_slot_kind kind, int write) {
    const qe_slot_place *slot = &frame->slot[kind];
    return (qe_effect){.kind = QE_EFFECT_SLOT_BORROW, .object = slot->object, .write = write != 0,
                       .version = slot->generation, .stage = slot->stage, .microbatch = frame->microbatch};
}

static qe_effect reads_weight(const qe_frame *frame) {
    return (qe_effect){.kind = QE_EFFECT_WEIGHT_READ, .object = frame->weights[W].weight_object};
}

static qe_status linear(const qe_frame *frame, const void *x, const void *residual, void *y, qe_slot_kind to,
                        qe_slot_kind from, const qe_sink *sink) {
    qe_op op = {.kind = QE_OP_LINEAR};
    op.args.linear = (qe_args_linear){.x = tensor(x, ROWS, SIDE), .w = tensor(frame->weights[W].master, SIDE, SIDE),
                                      .residual = residual, .y = y, .rows = ROWS, .in = SIDE, .out = SIDE};
    qe_effect effects[3] = {reads_weight(frame), borrow(frame, to, 1)};
    uint32_t count = 2;
    if (from != QE_SLOT_KINDS) effects[count++] = borrow(frame, from, 0);
    return sink->op(sink->context, &op, effects, count);
}

static qe_status forward(const qe_frame *frame, const qe_sink *sink) {
    const constants *c = (const constants *)(const void *)frame->constants;
    QE_TRY(linear(frame, c == NULL ? NULL : c->x, NULL, frame->slot[QE_SLOT_X].at, QE_SLOT_X, QE_SLOT_KINDS, sink));
    QE_TRY(linear(frame, frame->slot[QE_SLOT_X].at, c == NULL ? NULL : c->bias_rows, frame->slot[QE_SLOT_I].at,
                  QE_SLOT_I, QE_SLOT_X, sink));
    qe_op op = {.kind = QE_OP_COPY, .per_microbatch = 1};
    op.args.copy = (qe_args_copy){.from = c == NULL ? NULL : c->loss, .to = frame->loss, .bytes = sizeof(double)};
    uint64_t begin = frame->microbatch * sizeof(double);
    qe_effect effect = {.kind = QE_EFFECT_BUFFER_WRITE, .object = frame->loss_object, .begin = begin,
                        .end = begin + sizeof(double)};
    return sink->op(sink->context, &op, &effect, 1);
}

static qe_status input_grad(const qe_frame *frame, const qe_sink *sink) {
    const constants *c = (const constants *)(const void *)frame->constants;
    qe_op op = {.kind = QE_OP_LINEAR_INPUT_GRAD};
    op.args.linear_input_grad =
        (qe_args_linear_input_grad){.dy = tensor(c == NULL ? NULL : c->dy, ROWS, SIDE),
                                    .w = tensor(frame->weights[W].master, SIDE, SIDE),
                                    .dx = frame->slot[QE_SLOT_Y].at, .rows = ROWS, .in = SIDE, .out = SIDE};
    qe_effect effects[] = {reads_weight(frame), borrow(frame, QE_SLOT_Y, 1)};
    return sink->op(sink->context, &op, effects, 2);
}

static qe_status deposit(const qe_frame *frame, uint32_t index, uint16_t use, int set, const void *x, const void *dy,
                         qe_slot_kind from, const qe_sink *sink) {
    uint32_t in = index == W ? SIDE : 1;
    qe_op op = {.kind = QE_OP_LINEAR_WEIGHT_GRAD};
    op.args.linear_weight_grad =
        (qe_args_linear_weight_grad){.x = tensor(x, ROWS, in), .dy = tensor(dy, ROWS, SIDE),
                                     .grad = frame->weights[index].grad, .rows = ROWS, .in = in, .out = SIDE,
                                     .set = set || (index == B && frame->apart)};
    qe_effect effects[2] = {{.kind = QE_EFFECT_GRAD_DEPOSIT, .object = frame->weights[index].grad_object,
                             .write = set != 0, .microbatch = frame->microbatch, .use = use}};
    uint32_t count = 1;
    if (from != QE_SLOT_KINDS) effects[count++] = borrow(frame, from, 0);
    return sink->op(sink->context, &op, effects, count);
}

static qe_status weight_grad(const toy *model, const qe_frame *frame, const qe_sink *sink) {
    const constants *c = (const constants *)(const void *)frame->constants;
    const void *x = c == NULL ? NULL : c->x, *dy = c == NULL ? NULL : c->dy, *ones = c == NULL ? NULL : c->ones;
    int again = model->wrong == SET_TWICE;
    QE_TRY(deposit(frame, W, 0, frame->set, frame->slot[QE_SLOT_X].at, dy, QE_SLOT_X, sink));
    if (model->wrong != FORGOTTEN || frame->microbatch != 1)
        QE_TRY(deposit(frame, W, 1, again && frame->set, x, frame->slot[QE_SLOT_Y].at, QE_SLOT_Y, sink));
    return deposit(frame, B, 0, frame->set, ones, dy, QE_SLOT_KINDS, sink);
}

/* Nothing is cached: a fill takes no time, and is there because a plan has one. */
static qe_status fill(const qe_frame *frame, const qe_sink *sink) {
    qe_op op = {.kind = QE_OP_COPY};
    qe_effect effect = reads_weight(frame);
    return sink->op(sink->context, &op, &effect, 1);
}

static qe_status lower(const void *model, const qe_frame *frame, qe_phase phase, const qe_sink *sink) {
    switch (phase) {
    case QE_PHASE_FILL: return fill(frame, sink);
    case QE_PHASE_F: return forward(frame, sink);
    case QE_PHASE_I: return input_grad(frame, sink);
    case QE_PHASE_W: return weight_grad(model, frame, sink);
    }
    return QE_ERROR_ARGUMENT;
}

static const qe_model_ops toy_table = {
    .size = sizeof(qe_model_ops), .weight_count = weight_count, .weight = weight, .weight_stage = weight_stage,
    .stages_max = stages_max, .slot_bytes = slot_bytes, .work_bytes = a_line, .workspace_bytes = nothing,
    .constant_bytes = constant_bytes, .constant_fill = constant_fill, .cache_code_bytes = no_cache,
    .cache_operand_bytes = no_cache, .cache_scale_count = no_cache, .parameter_count = weight_count,
    .parameter = parameter, .tokens = tokens, .recipe = recipe, .lower = lower,
};

enum { MICROBATCHES = 3, STEPS = 4 };

static qe_status plan_toy(const toy *model, qe_gradient_placement placement, int apart, qe_plan **plan_out,
                          qe_violations *violations) {
    qe_schedule schedule;
    qe_counterexample counterexample;
    qe_error error;
    qe_schedule_request request = {.name = "1f1b", .ranks = 1, .chunks = 1, .microbatches = MICROBATCHES};
    qe_plan_options options = {.cache_weights = 1, .reuse_slots = 1, .share_slots = 1, .placement = placement,
                               .sums_apart = apart != 0};
    assert_int_equal(qe_schedule_generate(&request, &schedule, &error), QE_OK);
    qe_status status =
        qe_plan_create(&schedule, &toy_table, model, &options, plan_out, violations, &counterexample, &error);
    qe_schedule_deinit(&schedule);
    return status;
}

static void write_weights(qe_team *team) {
    float w[SIDE * SIDE], b[SIDE] = {0};
    qe_error error;
    for (int i = 0; i < SIDE * SIDE; i++) w[i] = (float)((i * 11 + 2) % 17 - 8) / 32.0f;
    assert_int_equal(qe_team_parameter_write(team, 0, b, &error), QE_OK);
    assert_int_equal(qe_team_parameter_write(team, 1, w, &error), QE_OK);
}

static qe_adamw constants_of(const void *context, double norm) {
    (void)context, (void)norm;
    return (qe_adamw){.learning_rate = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f,
                      .bias_correction1 = 0.1f, .bias_correction2 = 0.05f, .gradient_scale = 1.0f};
}

/* By the definition, in double: every microbatch is the same. */
static void check_gradients(const qe_team *team, const float *w) {
    static constants c;
    double y1[ROWS][SIDE], dy1[ROWS][SIDE];
    const float *grad_w = team->ranks[0].places[W].grad, *grad_b = team->ranks[0].places[B].grad;
    constant_fill(NULL, &c);
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < SIDE; i++) {
            y1[r][i] = dy1[r][i] = 0;
            for (int k = 0; k < SIDE; k++) {
                y1[r][i] += (double)c.x[r * SIDE + k] * (double)w[i * SIDE + k];
                dy1[r][i] += (double)c.dy[r * SIDE + k] * (double)w[k * SIDE + i];
            }
        }
    for (int o = 0; o < SIDE; o++) {
        double bias = 0;
        for (int r = 0; r < ROWS; r++) bias += (double)c.dy[r * SIDE + o];
        assert_true(fabs((double)grad_b[o] - MICROBATCHES * bias) < 1e-5);
        for (int i = 0; i < SIDE; i++) {
            double both = 0;
            for (int r = 0; r < ROWS; r++)
                both += (double)c.dy[r * SIDE + o] * y1[r][i] + dy1[r][o] * (double)c.x[r * SIDE + i];
            assert_true(fabs((double)grad_w[o * SIDE + i] - MICROBATCHES * both) < 1e-4);
        }
    }
}

typedef struct hashed {
    char text[QE_STATE_HASH_BYTES];
} hashed;

static hashed train(qe_gradient_placement placement, int apart, qe_capture capture, uint64_t *copies_out) {
    const toy model = {NONE};
    static const int32_t batch_values[MICROBATCHES * ROWS];
    const qe_batch batch = {batch_values, batch_values};
    const qe_step_optimizer optimizer = {constants_of, NULL};
    qe_plan *plan = NULL;
    qe_violations violations;
    qe_world *ranks = NULL;
    qe_team *team = NULL;
    qe_error error;
    qe_step_result result;
    hashed hash;
    float w[SIDE * SIDE];
    assert_int_equal(plan_toy(&model, placement, apart, &plan, &violations), QE_OK);
    assert_int_equal(qe_local_world_create(1, &ranks, &error), QE_OK);
    qe_team_options options = {.backend = qe_host_backend(), .comm = qe_local_comm(), .world = ranks,
                               .capture = capture, .opened = world_opened};
    must(qe_team_create(plan, NULL, &options, &team, &error), &error, "team");
    write_weights(team);
    for (int step = 0; step < STEPS; step++) {
        assert_int_equal(qe_team_parameter_read(team, 1, w, &error), QE_OK);
        assert_int_equal(qe_team_step(team, &batch, &optimizer, &result, &error), QE_OK);
        assert_false(result.vetoed);
        *copies_out = result.gradient_copies;
        check_gradients(team, w);
    }
    assert_int_equal(qe_team_state_hash(team, hash.text, &error), QE_OK);
    qe_team_destroy(team);
    qe_local_world_destroy(ranks);
    qe_plan_destroy(plan);
    return hash;
}

static void both_uses_and_the_bias_are_placed_directly_with_the_bits_of_copies(void **state) {
    (void)state;
    const qe_capture captures[] = {QE_CAPTURE_NONE, QE_CAPTURE_ACTION, QE_CAPTURE_STEP};
    uint64_t copies;
    hashed first = train(QE_GRADIENT_DIRECT, 0, QE_CAPTURE_NONE, &copies);
    for (size_t c = 0; c < sizeof captures / sizeof *captures; c++) {
        assert_string_equal(train(QE_GRADIENT_DIRECT, 0, captures[c], &copies).text, first.text);
        assert_int_equal(copies, 0);
        for (int apart = 0; apart < 2; apart++) {
            assert_string_equal(train(QE_GRADIENT_COPY, apart, captures[c], &copies).text, first.text);
            assert_int_equal(copies, WEIGHTS * MICROBATCHES);
        }
    }
}

static void every_use_is_due_and_counted_on_the_device(void **state) {
    (void)state;
    const toy model = {NONE};
    qe_plan *plan = NULL;
    qe_violations violations;
    assert_int_equal(plan_toy(&model, QE_GRADIENT_DIRECT, 0, &plan, &violations), QE_OK);
    const qe_rank_plan *rank = &plan->rank[0];
    assert_int_equal(rank->program.objects[rank->places[W].grad_object].due, 2 * MICROBATCHES);
    assert_int_equal(rank->program.objects[rank->places[B].grad_object].due, MICROBATCHES);
    uint32_t counted[WEIGHTS] = {0};
    for (uint32_t i = 0; i < rank->program.item_count; i++) {
        const qe_item *item = &rank->program.items[i];
        const qe_effect *effect = &rank->program.effects[item->first_effect];
        if (item->kind != QE_ITEM_OP || effect->object != rank->deposits_object) continue;
        for (int index = W; index <= B; index++) {
            uint64_t word = rank->places[index].tally * sizeof(uint64_t);
            counted[index] += effect->begin <= word && word < effect->end;
        }
    }
    assert_int_equal(counted[W], 2 * MICROBATCHES);
    assert_int_equal(counted[B], MICROBATCHES);
    qe_plan_destroy(plan);
}

static void a_use_that_is_left_out_or_sets_again_is_trapped_at_plan_time(void **state) {
    (void)state;
    const struct {
        fault wrong;
        qe_rule rule;
    } cases[] = {{FORGOTTEN, QE_RULE_GRAD_MISSING}, {SET_TWICE, QE_RULE_GRAD_SET}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const toy model = {cases[i].wrong};
        qe_plan *plan = NULL;
        qe_violations violations;
        assert_int_equal(plan_toy(&model, QE_GRADIENT_DIRECT, 0, &plan, &violations), QE_CONTRACT);
        assert_int_equal(violations.record[0].rule, cases[i].rule);
    }
}

/* Out of order, again, or one too few: the ledger of the certified plan is told what was never planned. */
static void a_use_out_of_order_or_twice_is_trapped_at_issue_time(void **state) {
    (void)state;
    const toy model = {NONE};
    qe_plan *plan = NULL;
    qe_violations violations;
    qe_error error;
    qe_ledger *ledger;
    assert_int_equal(plan_toy(&model, QE_GRADIENT_DIRECT, 0, &plan, &violations), QE_OK);
    const qe_program *program = &plan->rank[0].program;
    assert_int_equal(qe_ledger_create(program, &ledger, &error), QE_OK);
    assert_int_equal(qe_ledger_certify(ledger, &violations, &error), QE_OK);
    qe_ledger_step_begin(ledger);
    uint32_t deposits = 0;
    for (uint32_t i = 0; i < program->item_count; i++) {
        const qe_item *item = &program->items[i];
        const qe_effect *effect = &program->effects[item->first_effect];
        int deposits_w = item->kind == QE_ITEM_OP && effect->kind == QE_EFFECT_GRAD_DEPOSIT &&
                         effect->object == plan->rank[0].places[W].grad_object;
        if (deposits_w && deposits == 0) { /* the second use before the first */
            qe_item alone = *item;
            qe_effect early = *effect;
            alone.effect_count = 1;
            early.use = 1;
            assert_int_equal(qe_ledger_submit(ledger, &alone, &early, i, &violations), QE_CONTRACT);
            assert_int_equal(violations.record[0].rule, QE_RULE_GRAD_ORDER);
        }
        assert_int_equal(qe_ledger_submit(ledger, item, effect, i, &violations), QE_OK);
        if (!deposits_w) continue;
        qe_item again = *item; /* the same use once more */
        again.effect_count = 1;
        assert_int_equal(qe_ledger_submit(ledger, &again, effect, i, &violations), QE_CONTRACT);
        assert_int_equal(violations.record[0].rule, QE_RULE_GRAD_TWICE);
        deposits++;
    }
    assert_int_equal(deposits, 2 * MICROBATCHES);
    assert_int_equal(qe_ledger_step_end(ledger, &violations), QE_OK);
    qe_ledger_destroy(ledger);
    qe_plan_destroy(plan);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_uses_and_the_bias_are_placed_directly_with_the_bits_of_copies),
        cmocka_unit_test(every_use_is_due_and_counted_on_the_device),
        cmocka_unit_test(a_use_that_is_left_out_or_sets_again_is_trapped_at_plan_time),
        cmocka_unit_test(a_use_out_of_order_or_twice_is_trapped_at_issue_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
