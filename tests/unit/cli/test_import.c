/* Weights and scaling state of other programs: taken over exactly, or refused by name. The commands are a program and
 * no library, so this test compiles the one file it is about. */
#include "cli/import.c"

#include <math.h>

#include "checkpoint_files.h"
#include "step_world.h"

enum { TENSORS_MAX = 256, TE_LENGTH = 6 };

/* A file in the making; names and values are its own. */
typedef struct draft {
    qe_tensor tensors[TENSORS_MAX];
    char names[TENSORS_MAX][192];
    float *values[TENSORS_MAX];
    size_t count;
} draft;

static float *add(draft *d, const char *module, const char *part, uint32_t rank, const uint64_t *shape) {
    assert_true(d->count < TENSORS_MAX);
    size_t at = d->count++, elements = (size_t)(shape[0] * (rank == 2 ? shape[1] : 1));
    snprintf(d->names[at], sizeof d->names[at], "%s%s", module, part);
    d->values[at] = calloc(elements, sizeof(float));
    assert_non_null(d->values[at]);
    d->tensors[at] = qe_tensor_make(d->names[at], QE_DTYPE_F32, rank, shape, d->values[at]);
    return d->values[at];
}

static void drop(draft *d) {
    for (size_t i = 0; i < d->count; i++) free(d->values[i]);
    free(d);
}

/* A module's state as Transformer Engine lays it out: slots beside each other, row 0 pending. */
static void add_module(draft *d, const char *module, uint64_t length) {
    uint64_t three[2] = {length, 3}, two[2] = {length, 2};
    float *scale_fwd = add(d, module, ".scale_fwd", 1, &three[1]);
    float *scale_bwd = add(d, module, ".scale_bwd", 1, &two[1]);
    float *fwd = add(d, module, ".amax_history_fwd", 2, three), *bwd = add(d, module, ".amax_history_bwd", 2, two);
    for (uint64_t slot = 0; slot < 3; slot++) {
        scale_fwd[slot] = 2.0f + (float)slot;
        if (slot < 2) scale_bwd[slot] = 64.0f + (float)slot;
        for (uint64_t row = 0; row < length; row++) {
            fwd[row * 3 + slot] = (float)(100 * (slot + 1) + row);
            if (slot < 2) bwd[row * 2 + slot] = (float)(1000 * (slot + 1) + row);
        }
    }
}

static draft *weights_of(const qe_snapshot *snapshot) {
    draft *d = calloc(1, sizeof *d);
    assert_non_null(d);
    for (uint32_t i = 0; i < snapshot->tensor_count && snapshot->tensors[i].kind == QE_STATE_PARAMETER; i++) {
        const qe_state_tensor *from = &snapshot->tensors[i];
        uint64_t shape[2] = {from->rows, from->columns};
        int is_vector = from->rows == 0;
        float *to = add(d, from->name, "", is_vector ? 1 : 2, is_vector ? &shape[1] : shape);
        memcpy(to, from->values, (size_t)((is_vector ? 1 : from->rows) * from->columns) * sizeof *to);
    }
    return d;
}

static qe_status import(scene *s, const draft *d, qe_snapshot *snapshot, qe_import_report *report) {
    char place[PLACE_BYTES];
    qe_safetensors *file = NULL;
    scene_place(s, "weights.safetensors", place);
    memset(&s->error, 0, sizeof s->error);
    scene_must(s, qe_safetensors_write(place, d->tensors, d->count, NULL, 0, &s->error), "write");
    scene_must(s, qe_safetensors_open(place, &file, &s->error), "open");
    qe_status status = qe_snapshot_import(snapshot, file, report, &s->rule, &s->error);
    qe_safetensors_close(file);
    return status;
}

/* A world, a snapshot of its weights, and an empty one to import into. */
typedef struct stage {
    world w;
    qe_snapshot *before, *after;
    draft *file;
} stage;

static void stage_open(scene *s, stage *st, uint32_t history) {
    world_options options = {.ranks = 2, .history = history};
    world_open(&st->w, &options);
    world_step(&st->w, 0);
    scene_must(s, qe_snapshot_create(st->w.team, &st->before, &s->error), "snapshot");
    scene_must(s, qe_team_snapshot_take(st->w.team, st->before, &s->error), "take");
    scene_must(s, qe_snapshot_create(st->w.team, &st->after, &s->error), "snapshot");
    st->file = weights_of(st->before);
}

static void stage_close(stage *st) {
    drop(st->file);
    qe_snapshot_destroy(st->before);
    qe_snapshot_destroy(st->after);
    world_close(&st->w);
}

static void weights_alone_begin_a_run(void **state) {
    scene *s = *state;
    stage st;
    qe_import_report report;
    stage_open(s, &st, 4);
    scene_must(s, import(s, st.file, st.after, &report), "import");
    assert_int_equal(report.scales_found, 0);
    assert_true(report.scales > 0);
    for (uint32_t i = 0; i < st.after->tensor_count; i++) {
        const qe_state_tensor *tensor = &st.after->tensors[i];
        uint64_t count = (tensor->rows == 0 ? 1 : tensor->rows) * tensor->columns;
        for (uint64_t v = 0; v < count; v++) {
            float expected = tensor->kind == QE_STATE_PARAMETER ? st.before->tensors[i].values[v]
                             : tensor->kind == QE_STATE_SCALE   ? 1.0f
                                                                : 0.0f;
            assert_true(tensor->values[v] == expected);
        }
    }
    stage_close(&st);
}

static const qe_state_tensor *tensor_of(const qe_snapshot *snapshot, const char *name) {
    for (uint32_t i = 0; i < snapshot->tensor_count; i++)
        if (strcmp(snapshot->tensors[i].name, name) == 0) return &snapshot->tensors[i];
    fail_msg("no %s", name);
    return NULL;
}

static void plain_state_of_transformer_engine_is_read_by_role(void **state) {
    static const uint32_t lengths[] = {1, 2, 4, TE_LENGTH, 9};
    scene *s = *state;
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
        stage st;
        qe_import_report report;
        stage_open(s, &st, lengths[l]);
        add_module(st.file, "model.layers.1.mlp.down_proj", TE_LENGTH);
        scene_must(s, import(s, st.file, st.after, &report), "import");
        assert_int_equal(report.scales_found, 3);
        assert_int_equal(report.pending, 3); /* row 0 is not 0 in this file */
        static const struct { const char *role; float scale, base; } roles[] = {
            {"x", 2.0f, 100}, {"w", 3.0f, 200}, {"dy", 64.0f, 1000}};
        for (size_t r = 0; r < 3; r++) {
            char name[128];
            snprintf(name, sizeof name, "model.layers.1.mlp.down_proj.%s.scale", roles[r].role);
            assert_true(tensor_of(st.after, name)->values[0] == roles[r].scale);
            snprintf(name, sizeof name, "model.layers.1.mlp.down_proj.%s.history", roles[r].role);
            const qe_state_tensor *history = tensor_of(st.after, name);
            assert_int_equal(history->columns, lengths[l]);
            for (uint64_t age = 0; age < lengths[l]; age++) { /* the newest is the last; row 0 is of no step */
                int is_kept = age + 1 < lengths[l] && age + 1 < TE_LENGTH;
                float expected = is_kept ? roles[r].base + (float)(TE_LENGTH - 1 - age) : 0.0f;
                assert_true(history->values[lengths[l] - 1 - age] == expected);
            }
        }
        assert_true(tensor_of(st.after, "model.layers.0.mlp.down_proj.x.scale")->values[0] == 1.0f);
        scene_must(s, qe_team_snapshot_put(st.w.team, st.after, &s->error), "put");
        world_step(&st.w, 0);
        stage_close(&st);
    }
}

static void what_is_not_state_of_one_gemm_is_refused_by_its_module(void **state) {
    scene *s = *state;
    static const char module[] = "model.layers.0.mlp.down_proj";
    const uint64_t six[2] = {4, 6}, three[2] = {4, 3}, none[2] = {0, 3};
    const struct { uint64_t scale; const uint64_t *history; const char *words; } cases[] = {
        {6, six, "not F32 of the shapes"}, {3, none, "not F32 of the shapes"}, {3, NULL, "alone"}, {0, three, "alone"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        stage st;
        qe_import_report report;
        stage_open(s, &st, 4);
        if (cases[i].scale > 0) add(st.file, module, ".scale_fwd", 1, &cases[i].scale)[0] = 1.0f;
        if (cases[i].history != NULL) add(st.file, module, ".amax_history_fwd", 2, cases[i].history);
        assert_int_equal(import(s, st.file, st.after, &report), QE_ERROR_FORMAT);
        assert_says(s->error.message, module);
        assert_says(s->error.message, cases[i].words);
        stage_close(&st);
    }
    stage st;
    qe_import_report report;
    stage_open(s, &st, 4);
    const uint64_t one = 1;
    add(st.file, module, "._extra_state", 1, &one);
    scene_must(s, import(s, st.file, st.after, &report), "import");
    assert_int_equal(report.pickled, 1);
    stage_close(&st);
}

static void weights_that_are_missing_or_of_another_shape_are_refused_by_rule(void **state) {
    scene *s = *state;
    stage st;
    qe_import_report report;
    stage_open(s, &st, 4);
    qe_tensor *last = &st.file->tensors[st.file->count - 1];
    last->rank = 1;
    last->shape[0] = last->bytes / sizeof(float) + 1;
    last->bytes += sizeof(float);
    last->data = st.before->values;
    assert_int_equal(import(s, st.file, st.after, &report), QE_CONTRACT);
    assert_int_equal(s->rule, QE_RULE_CHECKPOINT_SHAPE);
    free(st.file->values[--st.file->count]);
    assert_int_equal(import(s, st.file, st.after, &report), QE_CONTRACT);
    assert_int_equal(s->rule, QE_RULE_CHECKPOINT_MISSING);
    stage_close(&st);
}

static void every_half_becomes_the_float_it_is(void **state) {
    (void)state;
    for (uint32_t half = 0; half < 65536; half++) {
        int exponent = (int)(half >> 10 & 31), sign = half >> 15 ? -1 : 1;
        double fraction = (double)(half & 1023);
        float found = from_half((uint16_t)half);
        if (exponent == 31 && fraction > 0) {
            assert_true(isnan(found));
            continue;
        }
        double expected = exponent == 31 ? INFINITY
                          : exponent == 0 ? ldexp(fraction, -24)
                                          : ldexp(1024 + fraction, exponent - 25);
        assert_true((double)found == sign * expected);
        assert_int_equal(signbit(found) != 0, sign < 0);
    }
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, scene_setup, scene_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        IN_FOLDER(weights_alone_begin_a_run),
        IN_FOLDER(plain_state_of_transformer_engine_is_read_by_role),
        IN_FOLDER(what_is_not_state_of_one_gemm_is_refused_by_its_module),
        IN_FOLDER(weights_that_are_missing_or_of_another_shape_are_refused_by_rule),
        cmocka_unit_test(every_half_becomes_the_float_it_is),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
