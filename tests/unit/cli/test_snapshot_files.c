/* A team's state in files and back: by name, by rule. The commands are a program and no library, so this test compiles
 * the one file it is about. */
#include "cli/snapshot_files.c"

#include "checkpoint_files.h"
#include "step_world.h"

/* Saves the team's state as step 3 of the folder. */
static void save(scene *s, world *w) {
    qe_checkpoint_folder *folder = NULL;
    qe_snapshot *snapshot = NULL;
    qe_snapshot_parts parts;
    qe_manifest manifest = {.step = 3};
    scene_must(s, qe_manifest_add_lineage(&manifest, RUN_A, 0, "", &s->error), "lineage");
    snprintf(manifest.data.digest, sizeof manifest.data.digest, "%s", RUN_A);
    scene_must(s, qe_snapshot_create(w->team, &snapshot, &s->error), "snapshot");
    scene_must(s, qe_team_snapshot_take(w->team, snapshot, &s->error), "take");
    scene_must(s, qe_snapshot_parts_init(&parts, snapshot, &manifest, &s->error), "parts");
    qe_checkpoint_content content = {.manifest = &manifest, .parts = parts.parts, .part_count = 3};
    content.model = (qe_store_model){4, 32, 4, 2, 48, 64, 16, 10000, 1e-5};
    scene_must(s, qe_checkpoint_folder_open(s->folder, 0, &folder, &s->error), "folder");
    scene_must(s, qe_checkpoint_write(folder, &content, &s->error), "write");
    qe_checkpoint_folder_close(folder);
    qe_snapshot_parts_deinit(&parts);
    qe_snapshot_destroy(snapshot);
    qe_manifest_deinit(&manifest);
}

static qe_checkpoint *open_saved(scene *s) {
    char place[PLACE_BYTES];
    qe_checkpoint *checkpoint = NULL;
    scene_place(s, "step-00000003", place);
    scene_must(s, qe_checkpoint_open(place, &checkpoint, &s->rule, &s->error), "open");
    return checkpoint;
}

static qe_status restore(scene *s, world *w, const qe_checkpoint *checkpoint, int adapts, int *adapted_out) {
    qe_snapshot *snapshot = NULL;
    memset(&s->error, 0, sizeof s->error);
    scene_must(s, qe_snapshot_create(w->team, &snapshot, &s->error), "snapshot");
    qe_status status = qe_snapshot_restore(snapshot, checkpoint, adapts, adapted_out, &s->rule, &s->error);
    if (status == QE_OK) scene_must(s, qe_team_snapshot_put(w->team, snapshot, &s->error), "put");
    qe_snapshot_destroy(snapshot);
    return status;
}

static world trained(const world_options *options) {
    world w;
    world_open(&w, options);
    for (int i = 0; i < 3; i++) world_step(&w, 0);
    return w;
}

static void what_was_saved_is_restored_over_other_ranks(void **state) {
    scene *s = *state;
    world_options two = {.ranks = 2}, four = {.ranks = 4, .capture = QE_CAPTURE_ACTION};
    world one = trained(&two), other;
    int adapted = 0;
    save(s, &one);
    qe_checkpoint *checkpoint = open_saved(s);
    world_open(&other, &four);
    scene_must(s, restore(s, &other, checkpoint, 0, &adapted), "restore");
    assert_false(adapted);
    assert_string_equal(world_state(&other).text, world_state(&one).text);
    assert_string_equal(world_state(&other).text, qe_checkpoint_manifest(checkpoint)->state_hash);
    scene_must(s, qe_snapshot_verify(other.team, checkpoint, &s->rule, &s->error), "verify");
    qe_checkpoint_close(checkpoint);
    world_close(&one);
    world_close(&other);
}

static void another_state_than_the_one_that_was_saved_is_refused(void **state) {
    scene *s = *state;
    world_options options = {.ranks = 2};
    world one = trained(&options);
    save(s, &one);
    qe_checkpoint *checkpoint = open_saved(s);
    world_step(&one, 0);
    assert_int_equal(qe_snapshot_verify(one.team, checkpoint, &s->rule, &s->error), QE_CONTRACT);
    assert_int_equal(s->rule, QE_RULE_CHECKPOINT_STATE);
    assert_says(s->error.message, "checkpoint.state");
    qe_checkpoint_close(checkpoint);
    world_close(&one);
}

typedef struct wrong {
    world_options options;
    qe_rule rule;
    const char *words;
} wrong;

static void what_is_missing_or_of_another_shape_is_refused_by_its_rule(void **state) {
    static const qe_model_config more_layers = {8, 32, 4, 2, 48, 64, 16, 1, 10000.0f, 1e-5f},
                                 wider = {4, 32, 4, 2, 64, 64, 16, 1, 10000.0f, 1e-5f};
    const wrong cases[] = {
        {{.ranks = 1, .config = &more_layers}, QE_RULE_CHECKPOINT_MISSING, "There is no model.layers.4"},
        {{.ranks = 1, .config = &wider}, QE_RULE_CHECKPOINT_SHAPE, "is not F32 of the shape"},
        {{.ranks = 1, .history = 9}, QE_RULE_CHECKPOINT_SHAPE, ".history is not F32 of the shape"},
    };
    scene *s = *state;
    world_options options = {.ranks = 2};
    world one = trained(&options);
    save(s, &one);
    qe_checkpoint *checkpoint = open_saved(s);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        world other;
        int adapted = 0;
        world_open(&other, &cases[i].options);
        world_hash before = world_state(&other);
        assert_int_equal(restore(s, &other, checkpoint, 0, &adapted), QE_CONTRACT);
        assert_int_equal(s->rule, cases[i].rule);
        assert_says(s->error.message, cases[i].words);
        assert_string_equal(world_state(&other).text, before.text);
        world_close(&other);
    }
    qe_checkpoint_close(checkpoint);
    world_close(&one);
}

static const float *history_of(const qe_snapshot *snapshot, uint64_t *length_out) {
    for (uint32_t i = 0; i < snapshot->tensor_count; i++)
        if (snapshot->tensors[i].kind == QE_STATE_HISTORY) {
            *length_out = snapshot->tensors[i].columns;
            return snapshot->tensors[i].values;
        }
    fail_msg("no history");
    return NULL;
}

/* The newest entries stay; what a shorter history never had is 0, as at a beginning. */
static void a_new_lineage_keeps_the_newest_of_a_history(void **state) {
    scene *s = *state;
    world_options options = {.ranks = 2, .history = 4};
    world one = trained(&options);
    const uint32_t lengths[] = {1, 2, 3, 4, 5, 9};
    uint64_t had = 0;
    qe_snapshot *before = NULL;
    save(s, &one);
    scene_must(s, qe_snapshot_create(one.team, &before, &s->error), "snapshot");
    scene_must(s, qe_team_snapshot_take(one.team, before, &s->error), "take");
    const float *old_values = history_of(before, &had);
    qe_checkpoint *checkpoint = open_saved(s);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        world_options wanted = {.ranks = 1, .history = lengths[i]};
        world other;
        qe_snapshot *after = NULL;
        int adapted = 0;
        uint64_t length = 0;
        world_open(&other, &wanted);
        scene_must(s, restore(s, &other, checkpoint, 1, &adapted), "restore");
        assert_int_equal(adapted, lengths[i] != 4);
        scene_must(s, qe_snapshot_create(other.team, &after, &s->error), "snapshot");
        scene_must(s, qe_team_snapshot_take(other.team, after, &s->error), "take");
        const float *values = history_of(after, &length);
        assert_int_equal(length, lengths[i]);
        for (uint64_t age = 0; age < length; age++) {
            float expected = age + 1 < length && age + 1 < had ? old_values[had - 1 - age] : 0.0f;
            assert_true(values[length - 1 - age] == expected);
        }
        qe_snapshot_destroy(after);
        world_close(&other);
    }
    qe_snapshot_destroy(before);
    qe_checkpoint_close(checkpoint);
    world_close(&one);
}

static void a_new_lineage_begins_scales_that_were_not_kept(void **state) {
    scene *s = *state;
    world_options bf16 = {.ranks = 2, .recipe = QE_RECIPE_BF16}, delayed = {.ranks = 2};
    world one = trained(&bf16), other;
    int adapted = 0;
    save(s, &one);
    qe_checkpoint *checkpoint = open_saved(s);
    world_open(&other, &delayed);
    assert_int_equal(restore(s, &other, checkpoint, 0, &adapted), QE_CONTRACT);
    assert_int_equal(s->rule, QE_RULE_CHECKPOINT_MISSING);
    scene_must(s, restore(s, &other, checkpoint, 1, &adapted), "restore");
    assert_true(adapted);
    other.step = 4;
    world_step(&other, 0);
    qe_checkpoint_close(checkpoint);
    world_close(&one);
    world_close(&other);
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, scene_setup, scene_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        IN_FOLDER(what_was_saved_is_restored_over_other_ranks),
        IN_FOLDER(another_state_than_the_one_that_was_saved_is_refused),
        IN_FOLDER(what_is_missing_or_of_another_shape_is_refused_by_its_rule),
        IN_FOLDER(a_new_lineage_keeps_the_newest_of_a_history),
        IN_FOLDER(a_new_lineage_begins_scales_that_were_not_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
