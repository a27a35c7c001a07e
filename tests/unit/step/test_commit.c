/* What a recorded commit leaves for the next step: caches that hold what a fill would make, under keys that are sealed;
 * fills that leave them alone; and what breaks a seal. */
#include <string.h>
#include "step/team.h"
#include "step_world.h"

enum { STEPS = 4 };

/* The fill of a weight at the beginning of a step. */
static const qe_args_quantize_weight *fill_of(const qe_binding *binding, uint32_t weight) {
    for (uint32_t i = 0; i < binding->rank_plan->op_count; i++) {
        const qe_op *op = &binding->ops[i];
        if (op->kind == QE_OP_QUANTIZE_WEIGHT && op->args.quantize_weight.key == binding->places[weight].cache_key)
            return &op->args.quantize_weight;
    }
    fail_msg("weight %u has no fill", weight);
    return NULL;
}

static void run_fill(const qe_rank *rank, const qe_args_quantize_weight *fill) {
    qe_op op = {.kind = QE_OP_QUANTIZE_WEIGHT};
    qe_error error = {0};
    op.args.quantize_weight = *fill;
    must(qe_host_backend()->run(rank->device, &op, &error), &error, "fill");
}

/* The same weight quantized into other memory, whatever its key says. */
static void check_bytes(const qe_rank *rank, const qe_args_quantize_weight *fill, uint64_t seal) {
    size_t count = (size_t)fill->rows * fill->columns;
    float *operand = malloc(count * sizeof *operand), scale_inv = 0, amax = 0;
    uint8_t *codes = malloc(count);
    uint32_t bits;
    assert_non_null(operand);
    assert_non_null(codes);
    qe_args_quantize_weight other = *fill;
    other.key = NULL;
    other.target.amax = &amax;
    other.target.operand.codes = operand;
    other.target.retained.codes = codes;
    other.target.retained.scale_inv = &scale_inv;
    run_fill(rank, &other);
    assert_memory_equal(operand, fill->target.operand.codes, count * sizeof *operand);
    assert_memory_equal(codes, fill->target.retained.codes, count);
    assert_memory_equal(&scale_inv, fill->target.retained.scale_inv, sizeof scale_inv);
    memcpy(&bits, &amax, sizeof bits);
    assert_int_equal(seal, QE_KEY_SEALED | bits);
    free(operand);
    free(codes);
}

/* Returns how many caches are sealed. */
static uint32_t check_rank(const qe_rank *rank, int poisons) {
    uint32_t sealed = 0;
    for (uint32_t weight = 0; weight < rank->team->plan->weight_count; weight++) {
        const qe_weight_place *place = &rank->train.places[weight];
        if (!qe_rank_owns(rank, weight) || place->cache_key == NULL) continue;
        const uint64_t *key = place->cache_key;
        if (place->scale[QE_SCALE_W] == NULL) {
            assert_int_equal(key[QE_KEY_SEAL], 0);
            continue;
        }
        sealed++;
        assert_int_equal(key[QE_KEY_VERSION], *place->witness);
        assert_int_equal(key[QE_KEY_EPOCH], place->scale[QE_SCALE_W]->epoch);
        assert_int_equal(key[QE_KEY_AMAX], 0);
        const qe_args_quantize_weight *fill = fill_of(&rank->train, weight);
        check_bytes(rank, fill, key[QE_KEY_SEAL]);
        if (!poisons) continue;
        uint8_t *codes = fill->target.retained.codes, kept = codes[0];
        codes[0] = (uint8_t)~kept;
        run_fill(rank, fill);
        assert_int_equal(codes[0], (uint8_t)~kept);
        assert_true(place->scale[QE_SCALE_W]->amax > 0.0f);
        codes[0] = kept;
        place->scale[QE_SCALE_W]->amax = 0.0f;
    }
    return sealed;
}

static void a_recorded_commit_seals_what_a_fill_would_make_and_the_fill_leaves_it_alone(void **state) {
    (void)state;
    const qe_capture captures[] = {QE_CAPTURE_LAYER, QE_CAPTURE_ACTION, QE_CAPTURE_STEP};
    for (size_t c = 0; c < sizeof captures / sizeof *captures; c++) {
        world w;
        world_options options = {.ranks = 2, .schedule = "zbh1", .capture = captures[c], .recipe = QE_RECIPE_DELAYED};
        world_open(&w, &options);
        for (int i = 0; i < STEPS; i++) {
            uint32_t sealed = 0;
            world_step(&w, 0);
            for (uint32_t rank = 0; rank < 2; rank++) sealed += check_rank(&w.team->ranks[rank], 1);
            assert_int_equal(sealed, 4 * 4); /* layers, linears */
        }
        world_close(&w);
    }
}

static void op_by_op_nothing_is_sealed(void **state) {
    (void)state;
    world w;
    world_options options = {.recipe = QE_RECIPE_DELAYED};
    world_open(&w, &options);
    world_step(&w, 0);
    const qe_rank *rank = &w.team->ranks[0];
    for (uint32_t weight = 0; weight < w.plan->weight_count; weight++)
        if (rank->places[weight].cache_key != NULL) assert_int_equal(rank->places[weight].cache_key[QE_KEY_SEAL], 0);
    world_close(&w);
}

/* Steps with a parameter that is written, a step that is vetoed and an evaluation in between. */
static world_hash disturbed(const world_options *options, double *loss_out) {
    world w;
    world_open(&w, options);
    for (int i = 0; i < STEPS; i++) world_step(&w, 0);
    for (uint32_t i = 0; i < qe_model_parameter_count(w.model); i++) {
        const qe_parameter *parameter = qe_model_parameter(w.model, i);
        float *values = malloc((size_t)parameter->rows * parameter->columns * sizeof *values);
        assert_non_null(values);
        must(qe_team_parameter_read(w.team, i, values, &w.error), &w.error, "read");
        for (uint32_t k = 0; k < parameter->columns; k++) values[k] *= 1.5f;
        must(qe_team_parameter_write(w.team, i, values, &w.error), &w.error, "write");
        free(values);
        if (i % 5 == 0) world_step(&w, 0);
    }
    must(qe_team_inject(w.team, QE_RULE_STEP_NONFINITE, &w.error), &w.error, "inject");
    must(world_try_step(&w, 0), &w.error, "vetoed step");
    assert_true(w.result.vetoed);
    double losses[WORLD_MICROBATCHES_MAX];
    qe_batch batch = {w.batch_tokens, w.batch_targets};
    must(qe_team_evaluate(w.team, &batch, losses, NULL, 0, 0, &w.result, &w.error), &w.error, "evaluation");
    for (int i = 0; i < STEPS; i++) *loss_out = world_step(&w, 0);
    world_hash hash = world_state(&w);
    world_close(&w);
    return hash;
}

static void seals_change_no_bit_whatever_is_written_or_vetoed(void **state) {
    (void)state;
    const qe_capture captures[] = {QE_CAPTURE_LAYER, QE_CAPTURE_ACTION, QE_CAPTURE_STEP};
    const qe_contracts contracts[] = {QE_CONTRACTS_TRAP, QE_CONTRACTS_OFF};
    for (int recipe = QE_RECIPE_DELAYED; recipe <= QE_RECIPE_FP32; recipe++) {
        world_options options = {.schedule = "zbh1", .evaluates = 1, .recipe = (qe_recipe_kind)recipe};
        double loss, other;
        world_hash eager = disturbed(&options, &loss);
        for (size_t c = 0; c < sizeof captures / sizeof *captures; c++)
            for (size_t on = 0; on < 2; on++) {
                options.capture = captures[c];
                options.contracts = contracts[on];
                assert_string_equal(disturbed(&options, &other).text, eager.text);
                assert_memory_equal(&loss, &other, sizeof loss);
            }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_recorded_commit_seals_what_a_fill_would_make_and_the_fill_leaves_it_alone),
        cmocka_unit_test(op_by_op_nothing_is_sealed),
        cmocka_unit_test(seals_change_no_bit_whatever_is_written_or_vetoed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
