/* scene.c - the scenes, and their files. */
#include "faults/scene.h"

#include <dirent.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "faults/fault.h"
#include "qeffect/checkpoint.h"
#include "qeffect/model.h"
#include "qeffect/plan.h"

int qe_program_main(int argc, char **argv); /* main of the program: tests/CMakeLists.txt */

enum { STEPS = 3, ALL = (1 << FAULT_KINDS) - 1 };
enum { MEMORY = 1 << FAULT_MEMORY, SYSTEM = 1 << FAULT_SYSTEM, FILES = 1 << FAULT_FILES };

static char step_hash[STEPS + 1][40]; /* of checkpoints, by step */

/* ---- a plan alone ---- */

static int refuse(const qe_error *error) {
    fprintf(stderr, "qeffect: %s\n  what to do: %s\n", error->message,
            error->remedy[0] != 0 ? error->remedy : qe_status_name(error->status));
    return error->status == QE_OK || error->message[0] == 0 ? 70 : 1;
}

static qe_status plan_make(const char *name, uint32_t chunks, int forward_only, qe_error *error) {
    qe_model_config config = {.layers = 4, .hidden = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 64,
                              .sequence = 16, .sequences = 1, .rope_theta = 10000.0f, .norm_epsilon = 1e-5f};
    qe_recipe recipe = {.kind = QE_RECIPE_DELAYED, .history_length = 4, .amax_algorithm = QE_AMAX_MAX};
    qe_schedule_request request = {
        .name = name, .ranks = 2, .chunks = chunks, .microbatches = 4, .forward_only = forward_only};
    qe_plan_options options = {.cache_weights = 1, .reuse_slots = 1, .forward_only = forward_only != 0};
    qe_schedule schedule = {0};
    qe_model *model = NULL;
    qe_plan *plan = NULL;
    qe_violations violations = {0};
    qe_counterexample counterexample = {0};
    qe_status status = qe_model_create(&config, &recipe, &model, error);
    if (status == QE_OK) status = qe_schedule_generate(&request, &schedule, error);
    if (status == QE_OK)
        status = qe_plan_create(&schedule, qe_model_table(), model, &options, &plan, &violations, &counterexample,
                                error);
    qe_plan_destroy(plan);
    qe_counterexample_deinit(&counterexample);
    qe_schedule_deinit(&schedule);
    qe_model_destroy(model);
    return status;
}

static int plan_run(void) {
    qe_error error = {0};
    qe_status status = plan_make("zbh1", 1, 0, &error);
    if (status == QE_OK) status = plan_make("interleaved", 2, 0, &error);
    if (status == QE_OK) status = plan_make("1f1b", 1, 1, &error);
    return status == QE_OK ? 0 : refuse(&error);
}

/* ---- the scenes ---- */

#define TRAIN "train", "in/tiny.yaml", "--json", "--set", "checkpoint.path=run", "--set", "contracts.trace="
#define EVERY "--set", "checkpoint.every=1", "--set", "checkpoint.keep=2"

static scene scenes[] = {
    {.name = "train in a new process",
     .arguments = {TRAIN, "--set", "train.steps=1", "--set", "checkpoint.path=", "--set", "pipeline.ranks=1"},
     .kinds = SYSTEM | MEMORY, .is_json = 1, .is_train = 1, .is_cold = 1, .files_below = "/in"},
    {.name = "plan", .runs = plan_run, .kinds = MEMORY, .files_below = ""},
    {.name = "train, 1 rank", .arguments = {TRAIN, "--set", "pipeline.ranks=1"}, .kinds = ALL, .is_json = 1,
     .is_train = 1, .files_below = "/in"},
    {.name = "train, 2 ranks, checkpoints", .arguments = {TRAIN, EVERY}, .resumes = {TRAIN, EVERY, "--resume", "run"},
     .kinds = ALL, .is_json = 1, .is_train = 1, .files_below = "/in"},
    {.name = "train captured by step, 2 ranks",
     .arguments = {TRAIN, EVERY, "--mode", "captured", "--set", "train.capture=step"},
     .resumes = {TRAIN, EVERY, "--resume", "run"}, .kinds = ALL, .is_json = 1, .is_train = 1, .files_below = "/in"},
    {.name = "train captured by layer, 1 rank",
     .arguments = {TRAIN, "--mode", "captured", "--set", "train.capture=layer", "--set", "pipeline.ranks=1"},
     .kinds = ALL & ~FILES, .is_json = 1, .is_train = 1, .files_below = "/in"},
    {.name = "train as baseline", .arguments = {TRAIN, "--mode", "baseline"}, .kinds = ALL & ~FILES, .is_json = 1,
     .is_train = 1, .files_below = "/in"},
    {.name = "resume", .arguments = {TRAIN, EVERY, "--resume", "run"}, .resumes = {TRAIN, EVERY, "--resume", "run"},
     .start = "kept", .kinds = ALL & ~FILES, .is_json = 1, .is_train = 1, .files_below = "/in"},
    {.name = "resume captured",
     .arguments = {TRAIN, EVERY, "--resume", "run", "--mode", "captured", "--set", "train.capture=step"},
     .resumes = {TRAIN, EVERY, "--resume", "run"}, .start = "kept", .kinds = ALL & ~FILES, .is_json = 1,
     .is_train = 1, .files_below = "/in"},
    {.name = "verify, a row", .arguments = {"verify", "--rows", "short", "--row", "9", "--json"}, .kinds = ALL & ~FILES,
     .is_json = 1, .files_below = "/in"},
    {.name = "trace check, right", .arguments = {"trace", "check", "in/right.qet", "--json"},
     .kinds = MEMORY | FILES, .is_json = 1, .files_below = ""},
    {.name = "trace check, wrong", .arguments = {"trace", "check", "in/wrong.qet", "--json"},
     .kinds = MEMORY | FILES, .is_json = 1, .status = 3, .files_below = ""},
    {.name = "trace check, in words", .arguments = {"trace", "check", "in/wrong.qet"},
     .kinds = MEMORY | FILES, .status = 3, .files_below = ""},
    {.name = "check", .arguments = {"check", "in/orders.csv", "--json"}, .kinds = MEMORY | FILES, .is_json = 1,
     .expected_keys = 1, .files_below = ""},
    {.name = "check, a wrong file", .arguments = {"check", "in/stuck.csv"}, .kinds = MEMORY | FILES, .status = 3,
     .files_below = ""},
    {.name = "schedule auto", .arguments = {"schedule", "auto", "--ranks", "2", "--microbatches", "4", "--times",
                                            "1,1.2,0.7,0.1", "-o", "written"},
     .kinds = MEMORY | FILES, .writes = "written", .files_below = ""},
    {.name = "simulate", .arguments = {"simulate", "in/orders.csv", "--stage-times", "in/times.txt", "--chart",
                                       "--timeline", "written"},
     .kinds = MEMORY | FILES, .writes = "written", .files_below = ""},
    {.name = "simulate, drawn", .arguments = {"simulate", "zbv", "--ranks", "2", "--svg", "written", "--json"},
     .kinds = MEMORY | FILES, .is_json = 1, .writes = "written", .files_below = ""},
    {.name = "simulate, measured", .arguments = {"simulate", "1f1b", "--ranks", "2", "--microbatches", "3", "--times",
                                                 "20,20,20", "--steps", "1", "--tolerance", "100000", "--measured",
                                                 "--json"},
     .kinds = MEMORY | SYSTEM, .is_json = 1, .expected_keys = 1, .files_below = ""},
    {.name = "inspect", .arguments = {"inspect", "run/step-00000002", "--tensors", "--json"}, .start = "kept",
     .kinds = MEMORY | FILES, .is_json = 1, .files_below = ""},
    {.name = "inspect, in words", .arguments = {"inspect", "run/step-00000002", "--tensors"}, .start = "kept",
     .kinds = MEMORY | FILES, .files_below = ""},
    {.name = "inspect a folder", .arguments = {"inspect", "run", "--json"}, .start = "kept", .kinds = MEMORY | FILES,
     .is_json = 1, .files_below = ""},
    {.name = "inspect, two", .arguments = {"inspect", "--diff", "run/step-00000001", "run/step-00000002", "--json"},
     .start = "kept", .kinds = MEMORY | FILES, .is_json = 1, .status = 4, .files_below = ""},
    {.name = "generate", .arguments = {"generate", "weights", "--prompt", "the ", "--tokens", "3", "--json"},
     .kinds = ALL, .is_json = 1, .expected_keys = 1, .files_below = ""},
};

scene *scene_all(size_t *count_out) {
    *count_out = sizeof scenes / sizeof *scenes;
    return scenes;
}

/* ---- files ---- */

char *scene_file(const char *name) {
    FILE *file = fopen(name, "rb");
    if (file == NULL) return NULL;
    char *text = NULL;
    size_t used = 0, room = 0, got = 1;
    while (got > 0) {
        if (used + 1 >= room) text = realloc(text, room = 2 * room + 4096);
        QE_ASSERT(text != NULL);
        got = fread(text + used, 1, room - used - 1, file);
        used += got;
    }
    text[used] = 0;
    fclose(file);
    return text;
}

static void write_file(const char *name, const char *content) {
    FILE *file = fopen(name, "wb");
    QE_ASSERT(file != NULL);
    QE_ASSERT(fputs(content, file) >= 0);
    QE_ASSERT(fclose(file) == 0);
}

static void copy_file(const char *from, const char *to) {
    char bytes[1 << 16];
    int in = open(from, O_RDONLY | O_CLOEXEC), out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    QE_ASSERT(in >= 0);
    QE_ASSERT(out >= 0);
    for (ssize_t got = 1; got > 0;) {
        got = read(in, bytes, sizeof bytes);
        QE_ASSERT(got >= 0);
        QE_ASSERT(write(out, bytes, (size_t)got) == got);
    }
    close(in);
    close(out);
}

typedef void each_entry(const char *path, const char *name, int is_folder, void *context);

static void each(const char *path, each_entry *call, void *context) {
    DIR *directory = opendir(path);
    if (directory == NULL) return;
    for (struct dirent *one = readdir(directory); one != NULL; one = readdir(directory)) {
        char place[512];
        struct stat kind;
        if (strcmp(one->d_name, ".") == 0 || strcmp(one->d_name, "..") == 0) continue;
        int length = snprintf(place, sizeof place, "%s/%s", path, one->d_name);
        QE_ASSERT(length > 0 && (size_t)length < sizeof place);
        if (lstat(place, &kind) == 0) call(place, one->d_name, S_ISDIR(kind.st_mode), context);
    }
    closedir(directory);
}

static void remove_one(const char *path, const char *name, int is_folder, void *context) {
    (void)name, (void)context;
    if (is_folder) scene_remove(path);
    else unlink(path);
}

void scene_remove(const char *path) {
    each(path, remove_one, NULL);
    rmdir(path);
}

static void copy_folder(const char *from, const char *to);
static void copy_one(const char *path, const char *name, int is_folder, void *context) {
    char to[512];
    int length = snprintf(to, sizeof to, "%s/%s", (const char *)context, name);
    QE_ASSERT(length > 0 && (size_t)length < sizeof to);
    if (is_folder) copy_folder(path, to);
    else copy_file(path, to);
}

static void copy_folder(const char *from, const char *to) {
    char place[512];
    snprintf(place, sizeof place, "%s", to);
    QE_ASSERT(mkdir(to, 0777) == 0);
    each(from, copy_one, place);
}

void scene_restore(const scene *s) {
    scene_remove("run");
    unlink("written");
    if (s->start != NULL) copy_folder(s->start, "run");
}

/* ---- what they begin with ---- */

static const char tiny[] = "model:\n  layers: 2\n  hidden: 32\n  heads: 2\n  kv_heads: 1\n  ffn: 64\n  vocab: 256\n"
                           "  sequence: 16\ndata:\n  path: in/text.txt\n  validation: 0\ntrain:\n  steps: 3\n"
                           "  sequences: 1\n  warmup: 1\npipeline:\n  schedule: 1f1b\n  ranks: 2\n  chunks: 1\n"
                           "  microbatches: 4\n";

static void write_text(void) {
    static const char *const words[] = {"light ", "and ", "the ", "water, ", "was ", "upon ", "earth.\n", "day "};
    FILE *file = fopen("in/text.txt", "wb");
    QE_ASSERT(file != NULL);
    for (uint32_t i = 0, state = 7; i < 1200; i++) {
        state = state * 1664525u + 1013904223u;
        fputs(words[state >> 29], file);
    }
    QE_ASSERT(fclose(file) == 0);
}

void scene_prepare(void) {
    QE_ASSERT(mkdir("in", 0777) == 0);
    write_file("in/tiny.yaml", tiny);
    write_text();
    copy_file(QE_TRACES "/b01_right.qet", "in/right.qet");
    copy_file(QE_TRACES "/b64_input_overwritten.qet", "in/wrong.qet");
    write_file("in/orders.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
    write_file("in/stuck.csv", "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n");
    write_file("in/times.txt", "1,1.2,0.7\n1.1,1.2,0.6\n");
}

static int run_words(const char *const *words) {
    char *argv[32] = {"qeffect"};
    int argc = 1;
    for (; *words != NULL && argc < 31; words++) argv[argc++] = (char *)(uintptr_t)*words;
    return qe_program_main(argc, argv);
}

int scene_run(const scene *s) { return s->runs != NULL ? s->runs() : run_words(s->arguments); }

static void undisturbed(const char *const *words) {
    FILE *kept = stdout;
    int errors = dup(STDERR_FILENO), nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    QE_ASSERT(errors >= 0);
    QE_ASSERT(nowhere >= 0);
    dup2(nowhere, STDERR_FILENO);
    fault_stdout_open("stdout");
    int status = run_words(words);
    fault_stdout_close();
    stdout = kept;
    dup2(errors, STDERR_FILENO);
    close(errors);
    close(nowhere);
    QE_ASSERT(status == 0);
}

static void note_hash(const char *path, const char *name, int is_folder, void *context) {
    qe_checkpoint *checkpoint = NULL;
    qe_rule rule;
    (void)context;
    if (!is_folder || strncmp(name, "step-", 5) != 0) return;
    if (qe_checkpoint_open(path, &checkpoint, &rule, NULL) != QE_OK) return;
    const qe_manifest *manifest = qe_checkpoint_manifest(checkpoint);
    if (manifest->step <= STEPS) snprintf(step_hash[manifest->step], sizeof step_hash[0], "%s", manifest->state_hash);
    qe_checkpoint_close(checkpoint);
}

/* The first checkpoint of a run is sure, and the last; one in between may be postponed. */
void scene_warm(void) {
    static const char *const first[] = {TRAIN, "--set", "checkpoint.every=1", "--set", "checkpoint.keep=0", NULL};
    static const char *const second[] = {TRAIN, "--set", "checkpoint.every=2", "--set", "checkpoint.keep=0", NULL};
    scene_remove("run");
    undisturbed(first);
    undisturbed(second);
    each("run", note_hash, NULL);
    for (int step = 1; step <= STEPS; step++) QE_ASSERT(step_hash[step][0] != 0);
    QE_ASSERT(mkdir("weights", 0777) == 0);
    copy_file("run/model.safetensors", "weights/model.safetensors");
    copy_file("run/config.json", "weights/config.json");
    scene_remove("run/step-00000003"); /* the newest is of step 2, saved last */
    QE_ASSERT(rename("run", "kept") == 0);
}

void scene_learn(scene *s) {
    s->expected = scene_file("stdout");
    s->written = s->writes != NULL ? scene_file(s->writes) : NULL;
    QE_ASSERT(s->expected != NULL);
    if (!s->is_train) return;
    json_t *document = json_loads(s->expected, 0, NULL);
    const char *hash = json_string_value(json_object_get(document, "state_hash"));
    QE_ASSERT(hash != NULL);
    snprintf(s->hash, sizeof s->hash, "%s", hash);
    json_decref(document);
}

/* ---- what is found behind a run ---- */

static int same_keys(const json_t *one, const json_t *other) {
    if (json_is_number(one) && json_is_number(other)) return 1;
    if (json_typeof(one) != json_typeof(other)) return json_is_boolean(one) && json_is_boolean(other);
    if (json_is_array(one)) {
        if (json_array_size(one) != json_array_size(other)) return 0;
        for (size_t i = 0; i < json_array_size(one); i++)
            if (!same_keys(json_array_get(one, i), json_array_get(other, i))) return 0;
    }
    if (!json_is_object(one)) return 1;
    if (json_object_size(one) != json_object_size(other)) return 0;
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)one, key, value) {
        if (strcmp(key, "checkpoints") == 0) continue; /* what it tells depends on how fast the disk is */
        const json_t *same = json_object_get(other, key);
        if (same == NULL || !same_keys(value, same)) return 0;
    }
    return 1;
}

int scene_same_keys(const char *one, const char *other) {
    json_t *left = json_loads(one, 0, NULL), *right = json_loads(other, 0, NULL);
    int same = left != NULL && right != NULL && same_keys(left, right);
    json_decref(left);
    json_decref(right);
    return same;
}

typedef struct found {
    const char *wrong;
    int checkpoints, litter;
} found;

static void look(const char *path, const char *name, int is_folder, void *context) {
    found *f = context;
    qe_checkpoint *checkpoint = NULL;
    qe_rule rule;
    if (name[0] == '.') f->litter++;
    if (!is_folder || strncmp(name, "step-", 5) != 0) return;
    f->checkpoints++;
    if (qe_checkpoint_open(path, &checkpoint, &rule, NULL) != QE_OK) {
        f->wrong = "a checkpoint is not whole";
        return;
    }
    const qe_manifest *manifest = qe_checkpoint_manifest(checkpoint);
    if (manifest->step > STEPS || strcmp(manifest->state_hash, step_hash[manifest->step]) != 0)
        f->wrong = "a checkpoint holds other bits than its step";
    qe_checkpoint_close(checkpoint);
}

const char *scene_files_wrong(const scene *s) {
    found f = {0};
    if (s->is_train && !s->is_cold) each("run", look, &f);
    if (s->start != NULL && s->is_train && f.checkpoints == 0) return "the checkpoints are gone";
    char *written = s->writes != NULL ? scene_file(s->writes) : NULL;
    if (written != NULL && strcmp(written, s->written) != 0) f.wrong = "half a file was written";
    free(written);
    return f.wrong;
}

int scene_has_checkpoint(void) {
    found f = {0};
    each("run", look, &f);
    return f.checkpoints > 0;
}

int scene_litter(void) {
    found f = {0};
    each("run", look, &f);
    return f.litter;
}
