/* resume.c - the adversary where a run goes on from a checkpoint: what a team saved is restored over another shape of
 * team, with the same bits and the same next step. With one thing wrong (a file of another step or run, an epoch, a
 * model that is larger or of another shape, bits that are not those that were saved) it is refused by its rule.
 *
 *   adversary_resume [TEAMS [FAULTS [SEED]]]     faults of each team */
#include "cli/snapshot_files.c" /* the commands are a program and no library */

#include "checkpoint_files.h"
#include "step_world.h"


#include "adversary/adversary.h"

enum { DEFAULT_TEAMS = 12, DEFAULT_FAULTS = 6, EARLIER = 2, SAVED = 3 };

static uint64_t teams = DEFAULT_TEAMS, faults_each = DEFAULT_FAULTS, first_seed;
static uint32_t wrong;

typedef struct attack {
    scene *s;
    dice d;
    uint64_t seed;
    world_options options;
    world w;
    world_hash saved;
    const char *what;
    fault_kind kind;
} attack;

static const struct {
    const char *schedule;
    uint32_t ranks, chunks;
} shapes[] = {{"gpipe", 1, 1}, {"1f1b", 2, 1}, {"zbh1", 2, 1}, {"1f1b", 4, 1}, {"interleaved", 2, 2}, {"zbv", 1, 2},
              {"zbv", 2, 2}, {"dualpipev", 2, 2}};

/* Gradients are added in the same order in all of these, so the bits are the same. */
static world_options draw_options(dice *d, qe_recipe_kind recipe, uint32_t history) {
    static const qe_capture units[] = {QE_CAPTURE_NONE, QE_CAPTURE_ACTION, QE_CAPTURE_STEP};
    uint32_t shape = dice_below(d, sizeof shapes / sizeof *shapes);
    return (world_options){.schedule = shapes[shape].schedule, .ranks = shapes[shape].ranks,
                           .chunks = shapes[shape].chunks, .recipe = recipe, .history = history,
                           .capture = units[dice_below(d, 3)], .no_cache = dice_one_in(d, 4)};
}

static void save_to(attack *a, const char *folder_name, const char *run, uint64_t step_number) {
    qe_checkpoint_folder *folder = NULL;
    qe_snapshot *snapshot = NULL;
    qe_snapshot_parts parts;
    qe_manifest manifest = {.step = step_number};
    char place_of_folder[PLACE_BYTES];
    scene *s = a->s;
    scene_place(s, folder_name, place_of_folder);
    scene_must(s, qe_manifest_add_lineage(&manifest, run, 0, "", &s->error), "lineage");
    snprintf(manifest.data.digest, sizeof manifest.data.digest, "%s", run);
    scene_must(s, qe_snapshot_create(a->w.team, &snapshot, &s->error), "snapshot");
    scene_must(s, qe_team_snapshot_take(a->w.team, snapshot, &s->error), "take");
    scene_must(s, qe_snapshot_parts_init(&parts, snapshot, &manifest, &s->error), "parts");
    qe_checkpoint_content content = {.manifest = &manifest, .parts = parts.parts, .part_count = 3};
    content.model = (qe_store_model){4, 32, 4, 2, 48, 64, 16, 10000, 1e-5};
    scene_must(s, qe_checkpoint_folder_open(place_of_folder, 0, &folder, &s->error), "folder");
    scene_must(s, qe_checkpoint_write(folder, &content, &s->error), "write");
    qe_checkpoint_folder_close(folder);
    qe_snapshot_parts_deinit(&parts);
    qe_snapshot_destroy(snapshot);
    qe_manifest_deinit(&manifest);
}

static qe_status open_one(attack *a, const char *name, qe_checkpoint **checkpoint_out) {
    char at[PLACE_BYTES];
    scene_place(a->s, name, at);
    a->s->rule = QE_RULE_NONE;
    return qe_checkpoint_open(at, checkpoint_out, &a->s->rule, &a->s->error);
}

static qe_status restore(attack *a, world *w, const qe_checkpoint *checkpoint) {
    qe_snapshot *snapshot = NULL;
    int adapted = 0;
    a->s->rule = QE_RULE_NONE;
    scene_must(a->s, qe_snapshot_create(w->team, &snapshot, &a->s->error), "snapshot");
    qe_status status = qe_snapshot_restore(snapshot, checkpoint, 0, &adapted, &a->s->rule, &a->s->error);
    if (status == QE_OK) scene_must(a->s, qe_team_snapshot_put(w->team, snapshot, &a->s->error), "put");
    qe_snapshot_destroy(snapshot);
    return status;
}

static void count(attack *a, qe_rule due, qe_status status) {
    qe_rule found = status == QE_CONTRACT ? a->s->rule : QE_RULE_NONE;
    int right = status == QE_CONTRACT && found == due;
    tally_mutant(a->kind, MOMENT_RESUME, due, right);
    tally_operator(a->what, due);
    if (right) return;
    fprintf(stderr, "seed %llu: %s P%u %s, fault: %s\n  expected: %s\n  found:    %s\n", (unsigned long long)a->seed,
            a->options.schedule, a->options.ranks, qe_recipe_name(a->options.recipe), a->what, qe_rule_id(due),
            status == QE_OK ? "nothing" : found ? qe_rule_id(found) : a->s->error.message);
    wrong++;
}

static const char *any_file(attack *a) {
    static const char *const files[] = {"model.safetensors", "optimizer.safetensors", "scales.safetensors"};
    return files[dice_below(&a->d, a->options.recipe == QE_RECIPE_DELAYED ? 3 : 2)]; /* others have no scales */
}

static void copy_into(attack *a, const char *from, const char *file) {
    char source[PLACE_BYTES], target[PLACE_BYTES];
    size_t bytes = 0;
    snprintf(source, sizeof source, "%s/%s", from, file);
    snprintf(target, sizeof target, "a/step-00000003/%s", file);
    char *content = scene_read(a->s, source, &bytes);
    scene_write(a->s, target, content, bytes);
    free(content);
}

/* ---- faults ---- */

static void refused_when_opened(attack *a, qe_rule due) {
    qe_checkpoint *checkpoint = NULL;
    qe_status status = open_one(a, "a/step-00000003", &checkpoint);
    count(a, due, status);
    if (status == QE_OK) qe_checkpoint_close(checkpoint);
}

static int file_of_another_step(attack *a) {
    const char *file = any_file(a);
    a->what = "a file of another step";
    a->kind = FAULT_STALE;
    copy_into(a, "a/step-00000002", file);
    refused_when_opened(a, QE_RULE_CHECKPOINT_MIXED);
    copy_into(a, "kept/step-00000003", file);
    return 1;
}

static int file_of_another_run(attack *a) {
    const char *file = any_file(a);
    a->what = "a file of another run";
    a->kind = FAULT_OWNER;
    copy_into(a, "b/step-00000003", file);
    refused_when_opened(a, QE_RULE_CHECKPOINT_RUN);
    copy_into(a, "kept/step-00000003", file);
    return 1;
}

static int epoch_that_is_not_the_scales(attack *a) {
    char now[80], then[80];
    if (a->options.recipe != QE_RECIPE_DELAYED) return 0;
    static const char *const roles[] = {"x", "w", "dy"};
    a->what = "an epoch that is not the scale's";
    a->kind = FAULT_STALE;
    uint32_t layer = dice_below(&a->d, 4);
    const char *role = roles[dice_below(&a->d, 3)];
    snprintf(then, sizeof then, "model.layers.%u.mlp.down_proj.%s\": 3", layer, role);
    snprintf(now, sizeof now, "model.layers.%u.mlp.down_proj.%s\": %u", layer, role, dice_one_in(&a->d, 2) ? 2u : 4u);
    scene_forge(a->s, "a/step-00000003/manifest.json", then, now);
    refused_when_opened(a, QE_RULE_SCALE_EPOCH);
    scene_forge(a->s, "a/step-00000003/manifest.json", now, then);
    return 1;
}

static void refused_when_restored(attack *a, const qe_model_config *config, uint32_t history, qe_rule due) {
    qe_checkpoint *checkpoint = NULL;
    world other;
    world_options options = draw_options(&a->d, a->options.recipe, history);
    options.config = config;
    scene_must(a->s, open_one(a, "a/step-00000003", &checkpoint), "open");
    world_open(&other, &options);
    world_hash before = world_state(&other);
    qe_status status = restore(a, &other, checkpoint);
    if (strcmp(before.text, world_state(&other).text) != 0) status = QE_OK; /* it was not refused as it should be */
    count(a, due, status);
    world_close(&other);
    qe_checkpoint_close(checkpoint);
}

static int larger_model(attack *a) {
    static const qe_model_config more = {8, 32, 4, 2, 48, 64, 16, 1, 10000.0f, 1e-5f};
    a->what = "a model with more layers";
    a->kind = FAULT_DROP;
    refused_when_restored(a, &more, 4, QE_RULE_CHECKPOINT_MISSING);
    return 1;
}

static int other_shape(attack *a) {
    static const qe_model_config wider = {4, 32, 4, 2, 64, 64, 16, 1, 10000.0f, 1e-5f},
                                 wordy = {4, 32, 4, 2, 48, 80, 16, 1, 10000.0f, 1e-5f};
    int history = a->options.recipe == QE_RECIPE_DELAYED && dice_one_in(&a->d, 3);
    a->what = history ? "a history of another length" : "a model of another shape";
    a->kind = FAULT_RANGE;
    refused_when_restored(a, history ? NULL : dice_one_in(&a->d, 2) ? &wider : &wordy, history ? 5 : 4,
                          QE_RULE_CHECKPOINT_SHAPE);
    return 1;
}

/* One bit of one parameter of what was restored. */
static int other_bits(attack *a) {
    qe_checkpoint *checkpoint = NULL;
    world other;
    world_options options = draw_options(&a->d, a->options.recipe, 4);
    a->what = "a bit that was not saved so";
    a->kind = FAULT_CONSTANT;
    scene_must(a->s, open_one(a, "a/step-00000003", &checkpoint), "open");
    world_open(&other, &options);
    scene_must(a->s, restore(a, &other, checkpoint), "restore");
    uint32_t parameter = dice_below(&a->d, qe_model_parameter_count(other.model));
    const qe_parameter *p = qe_model_parameter(other.model, parameter);
    float *values = malloc((size_t)p->rows * p->columns * sizeof *values);
    assert_non_null(values);
    must(qe_team_parameter_read(other.team, parameter, values, &other.error), &other.error, p->name);
    uint32_t bits, at = dice_below(&a->d, p->rows * p->columns);
    memcpy(&bits, &values[at], sizeof bits);
    bits ^= 1u << dice_below(&a->d, 23);
    memcpy(&values[at], &bits, sizeof bits);
    must(qe_team_parameter_write(other.team, parameter, values, &other.error), &other.error, p->name);
    free(values);
    a->s->rule = QE_RULE_NONE;
    count(a, QE_RULE_CHECKPOINT_STATE, qe_snapshot_verify(other.team, checkpoint, &a->s->rule, &a->s->error));
    world_close(&other);
    qe_checkpoint_close(checkpoint);
    return 1;
}

/* ---- right: another shape of team goes on with the same bits ---- */

static void goes_on(attack *a) {
    qe_checkpoint *checkpoint = NULL;
    world other;
    world_options options = draw_options(&a->d, a->options.recipe, 4);
    scene_must(a->s, open_one(a, "a/step-00000003", &checkpoint), "open");
    world_open(&other, &options);
    scene_must(a->s, restore(a, &other, checkpoint), "restore");
    int same = qe_snapshot_verify(other.team, checkpoint, &a->s->rule, &a->s->error) == QE_OK;
    other.step = a->w.step;
    world_step(&other, 0);
    world_step(&a->w, 0);
    same = same && strcmp(world_state(&other).text, world_state(&a->w).text) == 0;
    if (same) tally_valid("checkpoints that another team goes on from", 1);
    else fprintf(stderr, "seed %llu: a right checkpoint is refused, or goes on with other bits\n",
                 (unsigned long long)a->seed);
    if (!same) tally_refused();
    wrong += !same;
    world_close(&other);
    qe_checkpoint_close(checkpoint);
}

static void run_case(scene *s, uint64_t seed) {
    static int (*const faults[])(attack *) = {file_of_another_step, file_of_another_run, epoch_that_is_not_the_scales,
                                              larger_model, other_shape, other_bits};
    attack a = {.s = s, .seed = seed, .d = {seed * 0x9e3779b97f4a7c15u + 17}};
    qe_recipe_kind recipe = dice_one_in(&a.d, 2) ? QE_RECIPE_DELAYED : (qe_recipe_kind)dice_below(&a.d, 5);
    a.options = draw_options(&a.d, recipe, 4);
    world_open(&a.w, &a.options);
    for (int n = 1; n <= SAVED; n++) {
        world_step(&a.w, 0);
        if (n == EARLIER) save_to(&a, "a", RUN_A, EARLIER);
    }
    save_to(&a, "a", RUN_A, SAVED);
    save_to(&a, "kept", RUN_A, SAVED);
    save_to(&a, "b", RUN_B, SAVED);
    for (uint64_t planted = 0; planted < faults_each;)
        planted += faults[dice_below(&a.d, sizeof faults / sizeof *faults)](&a) != 0;
    goes_on(&a);
    world_close(&a.w);
    static const char *const folders[] = {"a", "kept", "b"};
    for (int i = 0; i < 3; i++) {
        char at[PLACE_BYTES];
        scene_place(s, folders[i], at);
        scene_clear(at);
    }
}

static void every_fault_of_a_checkpoint_is_refused_by_its_rule(void **state) {
    for (uint64_t i = 0; i < teams; i++) run_case(*state, first_seed + i);
    tally_print(0, 0);
    assert_int_equal(wrong, 0);
}

int main(int argc, char **argv) {
    if (argc > 1) teams = argument(argv[1]);
    if (argc > 2) faults_each = argument(argv[2]);
    if (argc > 3) first_seed = argument(argv[3]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_fault_of_a_checkpoint_is_refused_by_its_rule, scene_setup,
                                        scene_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
