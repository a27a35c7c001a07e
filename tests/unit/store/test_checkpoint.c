/* Checkpoints: what is written reads back; every changed bit and every cut is found; a breach has its rule; what is
 * damaged is named and passed over; nothing outside the directory is read or written. */
#include "checkpoint_files.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "qeffect/limits.h"

/* The n-th time from now that memory is asked for, by whatever library, it is refused; and every time behind that. */
static atomic_long until_refused;
static atomic_int is_over;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(__clang__)
#define CAN_REFUSE 0 /* a sanitizer's allocator cannot be stood in for */
#else
#define CAN_REFUSE 1
#define EXPORTED __attribute__((visibility("default")))
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *at, size_t bytes);

static int is_refused(void) {
    if (atomic_load(&until_refused) <= 0) return 0;
    if (atomic_load(&until_refused) > 1 || !atomic_load(&is_over))
        if (atomic_fetch_sub(&until_refused, 1) != 1) return 0;
    errno = ENOMEM;
    return 1;
}

EXPORTED void *malloc(size_t bytes) { return is_refused() ? NULL : __libc_malloc(bytes); }
EXPORTED void *calloc(size_t count, size_t bytes) { return is_refused() ? NULL : __libc_calloc(count, bytes); }
EXPORTED void *realloc(void *at, size_t bytes) { return is_refused() ? NULL : __libc_realloc(at, bytes); }
#endif

/* Two parameters with moments and one scale: small, so that every bit of it can be tried. */
typedef struct run {
    float weight[6], moments[12], scale[1], history[4];
    int64_t epoch[1];
    qe_tensor model[1], optimizer[2], scales[3];
    qe_checkpoint_part parts[3];
    qe_manifest manifest;
    qe_checkpoint_content content;
} run;

static void run_tensors(run *r) {
    static const uint64_t matrix[2] = {2, 3}, one[1] = {1}, four[1] = {4};
    r->model[0] = qe_tensor_make("a.weight", QE_DTYPE_F32, 2, matrix, r->weight);
    r->optimizer[0] = qe_tensor_make("a.weight.moment1", QE_DTYPE_F32, 2, matrix, r->moments);
    r->optimizer[1] = qe_tensor_make("a.weight.moment2", QE_DTYPE_F32, 2, matrix, r->moments + 6);
    r->scales[0] = qe_tensor_make("a.x.scale", QE_DTYPE_F32, 1, one, r->scale);
    r->scales[1] = qe_tensor_make("a.x.history", QE_DTYPE_F32, 1, four, r->history);
    r->scales[2] = qe_tensor_make("a.x.epoch", QE_DTYPE_I64, 1, one, r->epoch);
    r->parts[0] = (qe_checkpoint_part){"model.safetensors", r->model, 1};
    r->parts[1] = (qe_checkpoint_part){"optimizer.safetensors", r->optimizer, 2};
    r->parts[2] = (qe_checkpoint_part){"scales.safetensors", r->scales, 3};
}

static void run_at(run *r, uint64_t step) {
    for (size_t i = 0; i < 6; i++) r->weight[i] = (float)i + (float)step;
    for (size_t i = 0; i < 12; i++) r->moments[i] = (float)i * 0.5f - (float)step;
    r->scale[0] = 3.0f + (float)step;
    for (size_t i = 0; i < 4; i++) r->history[i] = (float)i / 3.0f;
    r->epoch[0] = (int64_t)step;
    r->manifest.step = step;
    r->manifest.data.position = 8 * step;
    r->manifest.versions.list[0].count = step + 1;
    r->manifest.epochs.list[0].count = step;
}

static void run_open(run *r, const char *name) {
    memset(r, 0, sizeof *r);
    assert_int_equal(qe_manifest_add_lineage(&r->manifest, name, 0, "", NULL), QE_OK);
    assert_int_equal(qe_facts_add(&r->manifest.settings, "model.layers", "2", NULL), QE_OK);
    assert_int_equal(qe_facts_add(&r->manifest.device, "backend", "host", NULL), QE_OK);
    assert_int_equal(qe_facts_add(&r->manifest.algorithms, "blas_core", "Haswell", NULL), QE_OK);
    assert_int_equal(qe_facts_add(&r->manifest.libraries, "openblas", "0.3.21", NULL), QE_OK);
    assert_int_equal(qe_counts_add(&r->manifest.versions, "a", 0, NULL), QE_OK);
    assert_int_equal(qe_counts_add(&r->manifest.epochs, "a.x", 0, NULL), QE_OK);
    snprintf(r->manifest.data.digest, QE_DIGEST_BYTES, "%s", RUN_A);
    r->manifest.data.tokens = 1000;
    r->manifest.rng.seed = INT64_MAX;
    r->manifest.learning_rate = 0.1;
    run_tensors(r);
    r->content = (qe_checkpoint_content){.manifest = &r->manifest, .parts = r->parts, .part_count = 3};
    r->content.model = (qe_store_model){1, 4, 2, 1, 8, 16, 8, 10000, 1e-5};
}

static void save(scene *s, run *r, uint64_t step, uint32_t keep) {
    qe_checkpoint_folder *folder = NULL;
    run_at(r, step);
    scene_must(s, qe_checkpoint_folder_open(s->folder, keep, &folder, &s->error), "folder");
    scene_must(s, qe_checkpoint_write(folder, &r->content, &s->error), "write");
    qe_checkpoint_folder_close(folder);
}

static void save_steps(scene *s, const uint64_t *steps, size_t count, uint32_t keep) {
    run r;
    run_open(&r, RUN_A);
    for (size_t i = 0; i < count; i++) save(s, &r, steps[i], keep);
    qe_manifest_deinit(&r.manifest);
}

static qe_status open_named(scene *s, const char *name, qe_checkpoint **checkpoint_out) {
    char place[PLACE_BYTES];
    scene_place(s, name, place);
    memset(&s->error, 0, sizeof s->error);
    return qe_checkpoint_open(place, checkpoint_out, &s->rule, &s->error);
}

/* Refused, with the file and the words. */
static void refused(scene *s, qe_status status, qe_rule rule, const char *words) {
    qe_checkpoint *checkpoint = NULL;
    qe_status found = open_named(s, "step-00000003", &checkpoint);
    if (found != status)
        fail_msg("%s, expected %s: %s", qe_status_name(found), qe_status_name(status), s->error.message);
    assert_null(checkpoint);
    assert_int_equal(s->rule, rule);
    assert_says(s->error.message, words);
    assert_true(s->error.path[0] != 0);
    assert_true(s->error.remedy[0] != 0);
}

static void what_is_written_reads_back(void **state) {
    scene *s = *state;
    run r;
    qe_checkpoint *checkpoint = NULL;
    char hash[QE_DIGEST_BYTES];
    run_open(&r, RUN_A);
    assert_int_equal(qe_manifest_add_lineage(&r.manifest, RUN_B, 2, "recipe.name: bf16 -> fp32", NULL), QE_OK);
    save(s, &r, 3, 0);
    scene_must(s, open_named(s, "step-00000003", &checkpoint), "open");
    const qe_manifest *found = qe_checkpoint_manifest(checkpoint);
    assert_int_equal(found->step, 3);
    assert_int_equal(found->serial, 1);
    assert_int_equal(found->lineage_count, 2);
    assert_string_equal(qe_manifest_run(found), RUN_B);
    assert_int_equal(found->lineage[1].from_step, 2);
    assert_string_equal(found->lineage[1].changes, "recipe.name: bf16 -> fp32");
    assert_string_equal(qe_facts_find(&found->settings, "model.layers"), "2");
    assert_string_equal(qe_facts_find(&found->algorithms, "blas_core"), "Haswell");
    assert_string_equal(qe_facts_find(&found->libraries, "openblas"), "0.3.21");
    assert_int_equal(qe_counts_find(&found->versions, "a")->count, 4);
    assert_int_equal(found->data.position, 24);
    assert_int_equal(found->rng.seed, INT64_MAX);
    assert_true(found->learning_rate == 0.1);
    assert_int_equal(found->file_count, 4);
    assert_int_equal(qe_checkpoint_count(checkpoint), 6);
    assert_memory_equal(qe_checkpoint_find(checkpoint, "a.weight.moment2")->data, r.moments + 6, 24);
    assert_null(qe_checkpoint_find(checkpoint, "a"));
    qe_checkpoint_hash(checkpoint, hash);
    assert_string_equal(hash, found->state_hash);
    assert_string_equal(hash, r.manifest.state_hash);
    qe_checkpoint_close(checkpoint);
    qe_manifest_deinit(&r.manifest);
}

static const char *const files[] = {"step-00000003/manifest.json", "step-00000003/model.safetensors",
                                    "step-00000003/optimizer.safetensors", "step-00000003/scales.safetensors",
                                    "step-00000003/config.json"};
enum { FILES = sizeof files / sizeof *files };

static void every_changed_bit_is_found(void **state) {
    scene *s = *state;
    const uint64_t step = 3;
    int tried = 0;
    save_steps(s, &step, 1, 0);
    for (size_t f = 0; f < FILES; f++) {
        size_t bytes = 0;
        char *content = scene_read(s, files[f], &bytes);
        for (size_t bit = 0; bit < 8 * bytes; bit += bytes < 700 ? 1 : 3) { /* 3 meets every bit of a byte in turn */
            qe_checkpoint *checkpoint = NULL;
            content[bit / 8] = (char)(content[bit / 8] ^ 1 << bit % 8);
            scene_write(s, files[f], content, bytes);
            content[bit / 8] = (char)(content[bit / 8] ^ 1 << bit % 8);
            if (open_named(s, "step-00000003", &checkpoint) == QE_OK) fail_msg("bit %zu of %s", bit, files[f]);
            tried++;
        }
        scene_write(s, files[f], content, bytes);
        free(content);
    }
    qe_checkpoint *checkpoint = NULL;
    scene_must(s, open_named(s, "step-00000003", &checkpoint), "as it was");
    qe_checkpoint_close(checkpoint);
    print_message("%d bits\n", tried);
}

static void every_cut_and_every_addition_is_found(void **state) {
    scene *s = *state;
    const uint64_t step = 3;
    save_steps(s, &step, 1, 0);
    for (size_t f = 0; f < FILES; f++) {
        size_t bytes = 0;
        char *content = scene_read(s, files[f], &bytes);
        for (size_t length = 0; length <= bytes + 1; length++) {
            qe_checkpoint *checkpoint = NULL;
            if (length == bytes) continue;
            scene_write(s, files[f], content, length);
            if (open_named(s, "step-00000003", &checkpoint) == QE_OK) fail_msg("%zu bytes of %s", length, files[f]);
        }
        char place[PLACE_BYTES];
        qe_checkpoint *checkpoint = NULL;
        scene_place(s, files[f], place);
        unlink(place);
        assert_int_equal(open_named(s, "step-00000003", &checkpoint), QE_ERROR_IO);
        scene_write(s, files[f], content, bytes);
        free(content);
    }
}

static void copy_file(const scene *s, const char *from, const char *to) {
    size_t bytes = 0;
    char *content = scene_read(s, from, &bytes);
    scene_write(s, to, content, bytes);
    free(content);
}

/* Puts the hash of what a file of step 3 holds now into its manifest. */
static void forge_digest(const scene *s, const char *file) {
    size_t bytes = 0;
    char name[96], digest[QE_HASH_TEXT_BYTES], old_digest[QE_DIGEST_BYTES] = {0};
    snprintf(name, sizeof name, "step-00000003/%s", file);
    char *content = scene_read(s, name, &bytes);
    qe_hash_text(qe_hash_bytes(content, bytes), digest);
    free(content);
    char *manifest = scene_read(s, "step-00000003/manifest.json", &bytes);
    const char *at = strstr(strstr(manifest, file), "\"xxh3_128\": \"");
    memcpy(old_digest, at + strlen("\"xxh3_128\": \""), QE_DIGEST_BYTES - 1);
    free(manifest);
    scene_forge(s, "step-00000003/manifest.json", old_digest, digest);
}

static void files_of_another_step_are_mixed(void **state) {
    scene *s = *state;
    const uint64_t steps[] = {3, 4};
    save_steps(s, steps, 2, 0);
    copy_file(s, "step-00000004/optimizer.safetensors", "step-00000003/optimizer.safetensors");
    refused(s, QE_CONTRACT, QE_RULE_CHECKPOINT_MIXED, "checkpoint.mixed");
    assert_says(s->error.path, "optimizer.safetensors");
    forge_digest(s, "optimizer.safetensors"); /* and so they are to somebody who put their hash into the manifest */
    refused(s, QE_CONTRACT, QE_RULE_CHECKPOINT_MIXED, "the file of step 4");
}

static void a_manifest_of_another_run_is_refused(void **state) {
    scene *s = *state;
    run r;
    const uint64_t step = 3;
    save_steps(s, &step, 1, 0);
    copy_file(s, "step-00000003/scales.safetensors", "scales.of.a");
    run_open(&r, RUN_B);
    save(s, &r, 3, 0);
    qe_manifest_deinit(&r.manifest);
    copy_file(s, "scales.of.a", "step-00000003/scales.safetensors");
    refused(s, QE_CONTRACT, QE_RULE_CHECKPOINT_RUN, "The manifest is of run bbbbbbbb, the file of run aaaaaaaa");
}

static void a_scale_of_another_epoch_is_refused(void **state) {
    scene *s = *state;
    const uint64_t step = 3;
    save_steps(s, &step, 1, 0);
    scene_forge(s, "step-00000003/manifest.json", "\"a.x\": 3", "\"a.x\": 2");
    refused(s, QE_CONTRACT, QE_RULE_SCALE_EPOCH, "counts epoch 2, the scale is of epoch 3");
    scene_forge(s, "step-00000003/manifest.json", "\"a.x\": 2", "\"a.y\": 3");
    refused(s, QE_CONTRACT, QE_RULE_SCALE_EPOCH, "the scale is of epoch -1");
}

typedef struct forgery {
    const char *old_text, *new_text, *words;
} forgery;

static void hostile_manifests_are_refused_by_name(void **state) {
    static const forgery forgeries[] = {
        {"\"model.safetensors\"", "\"../model.safetensors\"", "a file is called"},
        {"\"model.safetensors\"", "\"/etc/passwd\"", "a file is called"},
        {"\"model.safetensors\"", "\"..\"", "a file is called"},
        {"\"model.safetensors\"", "\".hidden\"", "a file is called"},
        {"\"model.safetensors\"", "\"\"", "a file is called"},
        {"\"model.safetensors\"", "\"manifest.json\"", "a file is called"},
        {"\"model.safetensors\"", "\"scales.safetensors\"", "named twice"},
        {"\"model.safetensors\"", "\"model\\u0000.safetensors\"", "not JSON"},
        {"\"step\": 3", "\"step\": -3", "\"step\""},
        {"\"step\": 3", "\"step\": 3.0", "\"step\""},
        {"\"step\": 3", "\"step\": 9223372036854775808", "not JSON"},
        {"\"step\": 3", "\"step\": 3,\n \"step\": 3", "duplicate"},
        {"\"step\": 3", "\"steps\": 3", "\"step\""},
        {"\"version\": 1", "\"version\": 2", "version 2"},
        {"\"qeffect-checkpoint\"", "\"pickle\"", "the format is \"pickle\""},
        {"\"changes\": \"\"", "\"changes\": 0", "\"changes\""},
        {"\"" RUN_A "\"", "\"" RUN_A "a\"", "32 hexadecimal"},
        {"\"settings\": {", "\"settings\": {\n  \"x\": 1,", "is not text"},
        {"\"files\": [", "\"files\": 7, \"f\": [", "\"files\""},
        {"\"bytes\": ", "\"bytes\": 1", "bytes, the manifest says"},
        {"\"learning_rate\": 0.1", "\"learning_rate\": null, \"x\": 0.1", "\"learning_rate\""},
        {"\"counters\": {", "\"counters\": [], \"c\": {", "\"counters\""},
        {"\"lineage\": [", "\"lineage\": [], \"l\": [", "\"lineage\""},
        {"\"rng\": {", "\"rng\": null, \"r\": {", "\"rng\""},
    };
    scene *s = *state;
    const uint64_t step = 3;
    size_t bytes = 0;
    save_steps(s, &step, 1, 0);
    char *original = scene_read(s, files[0], &bytes);
    for (size_t i = 0; i < sizeof forgeries / sizeof *forgeries; i++) {
        qe_checkpoint *checkpoint = NULL;
        scene_forge(s, files[0], forgeries[i].old_text, forgeries[i].new_text);
        qe_status status = open_named(s, "step-00000003", &checkpoint);
        if (status == QE_OK || status == QE_CONTRACT) fail_msg("%s was taken", forgeries[i].new_text);
        assert_says(s->error.message, forgeries[i].words);
        scene_write(s, files[0], original, bytes);
    }
    free(original);
    char *deep = malloc(1 << 20);
    assert_non_null(deep);
    memset(deep, '[', 1 << 20);
    scene_write(s, files[0], deep, 1 << 20);
    refused(s, QE_ERROR_FORMAT, QE_RULE_NONE, "does not end with its hash");
    free(deep);
}

/* Files whose hash is right and whose structure is hostile: judged before a byte of data is handed out. */
static void hostile_files_with_right_hashes_are_refused(void **state) {
    static const forgery forgeries[] = {
        {"\"data_offsets\":[0,24]", "\"data_offsets\":[0,99]", "outside the data"},
        {"\"data_offsets\":[24,48]", "\"data_offsets\":[20,44]", "overlap"},
        {"\"data_offsets\":[24,48]", "\"data_offsets\":[48,24]", "outside the data"},
        {"\"dtype\":\"F32\"", "\"dtype\":\"F99\"", "unknown dtype"},
        {"\"shape\":[2,3]", "\"shape\":[2,9]", "its shape means"},
        {"\"a.weight.moment2\"", "\"a.weight.moment1\"", "duplicate"},
        {"{\"__metadata__", "[\"__metadata__", "does not begin with {"},
    };
    scene *s = *state;
    const uint64_t step = 3;
    for (size_t i = 0; i < sizeof forgeries / sizeof *forgeries; i++) {
        size_t bytes = 0, length = strlen(forgeries[i].old_text);
        save_steps(s, &step, 1, 0);
        char *content = scene_read(s, "step-00000003/optimizer.safetensors", &bytes);
        char *at = memmem(content, bytes, forgeries[i].old_text, length);
        assert_non_null(at);
        assert_int_equal(strlen(forgeries[i].new_text), length);
        memcpy(at, forgeries[i].new_text, length);
        scene_write(s, "step-00000003/optimizer.safetensors", content, bytes);
        free(content);
        forge_digest(s, "optimizer.safetensors");
        refused(s, QE_ERROR_FORMAT, QE_RULE_NONE, forgeries[i].words);
    }
    size_t bytes = 0;
    save_steps(s, &step, 1, 0);
    char *content = scene_read(s, "step-00000003/optimizer.safetensors", &bytes);
    memset(content, 0x7f, 8); /* a header of 9e18 bytes */
    scene_write(s, "step-00000003/optimizer.safetensors", content, bytes);
    free(content);
    forge_digest(s, "optimizer.safetensors");
    refused(s, QE_ERROR_FORMAT, QE_RULE_NONE, "header");
}

static void links_pipes_and_folders_are_not_followed(void **state) {
    scene *s = *state;
    char place[PLACE_BYTES], outside[PLACE_BYTES];
    const uint64_t step = 3;
    save_steps(s, &step, 1, 0);
    copy_file(s, files[1], "outside");
    scene_place(s, files[1], place);
    scene_place(s, "outside", outside);
    unlink(place);
    assert_int_equal(symlink(outside, place), 0);
    refused(s, QE_ERROR_FORMAT, QE_RULE_NONE, "link");
    unlink(place);
    assert_int_equal(mkfifo(place, 0666), 0);
    refused(s, QE_ERROR_FORMAT, QE_RULE_NONE, "not a regular file");
    unlink(place);
    assert_int_equal(mkdir(place, 0777), 0);
    refused(s, QE_ERROR_FORMAT, QE_RULE_NONE, "not a regular file");
    rmdir(place);
    copy_file(s, "outside", files[1]);
    scene_place(s, files[0], place);
    copy_file(s, files[0], "outside");
    unlink(place);
    assert_int_equal(symlink(outside, place), 0);
    refused(s, QE_ERROR_FORMAT, QE_RULE_NONE, "link");
}

/* --- many in one directory ------------------------------------------------------------------------------------ */

typedef struct skips {
    char text[512];
    int count;
} skips;

static void note_skip(void *context, const char *name, qe_rule rule, const qe_error *error) {
    skips *all = context;
    size_t used = strlen(all->text);
    snprintf(all->text + used, sizeof all->text - used, "%s(%s:%.40s)", name, qe_rule_id(rule), error->message);
    all->count++;
}

static uint64_t newest(scene *s, skips *skipped) {
    qe_checkpoint *checkpoint = NULL;
    memset(skipped, 0, sizeof *skipped);
    scene_must(s, qe_checkpoint_open_newest(s->folder, note_skip, skipped, &checkpoint, &s->rule, &s->error), "newest");
    uint64_t step = qe_checkpoint_manifest(checkpoint)->step;
    qe_checkpoint_close(checkpoint);
    return step;
}

static void the_newest_complete_one_is_taken_and_damaged_ones_are_named(void **state) {
    scene *s = *state;
    skips skipped;
    char place[PLACE_BYTES];
    const uint64_t steps[] = {1, 2, 3, 4, 5, 6};
    save_steps(s, steps, 6, 0);
    assert_int_equal(newest(s, &skipped), 6);
    assert_int_equal(skipped.count, 0);
    scene_write(s, "step-00000006/manifest.json", "{", 1);
    scene_place(s, "step-00000005/manifest.json", place);
    unlink(place);
    copy_file(s, "step-00000001/scales.safetensors", "step-00000004/scales.safetensors");
    assert_int_equal(newest(s, &skipped), 3);
    assert_int_equal(skipped.count, 3);
    assert_says(skipped.text, "step-00000006(none:");
    assert_says(skipped.text, "step-00000005(none:");
    assert_says(skipped.text, "step-00000004(checkpoint.mixed:");
    char renamed[PLACE_BYTES];
    scene_place(s, "step-00000003", place);
    scene_place(s, "step-00000009", renamed);
    assert_int_equal(rename(place, renamed), 0);
    assert_int_equal(newest(s, &skipped), 2);
    assert_says(skipped.text, "step-00000009(none:the directory is named for step 9");
}

static void where_none_is_left_the_newest_is_blamed(void **state) {
    scene *s = *state;
    qe_checkpoint *checkpoint = NULL;
    assert_int_equal(qe_checkpoint_open_newest(s->folder, NULL, NULL, &checkpoint, &s->rule, &s->error), QE_ERROR_IO);
    assert_says(s->error.message, "there is no checkpoint");
    const uint64_t steps[] = {1, 2};
    save_steps(s, steps, 2, 0);
    copy_file(s, "step-00000001/scales.safetensors", "step-00000002/scales.safetensors");
    scene_write(s, "step-00000001/config.json", "{}", 2);
    assert_int_equal(qe_checkpoint_open_newest(s->folder, NULL, NULL, &checkpoint, &s->rule, &s->error), QE_CONTRACT);
    assert_int_equal(s->rule, QE_RULE_CHECKPOINT_MIXED);
}

/* A run that goes back, or another one in the same directory: the newest is what was written last. */
static void the_newest_is_what_was_saved_last_whatever_its_step(void **state) {
    scene *s = *state;
    skips skipped;
    const uint64_t steps[] = {10, 20, 30, 15};
    save_steps(s, steps, 4, 3);
    assert_int_equal(newest(s, &skipped), 15);
    assert_int_equal(scene_entries(s), 3); /* 10 was the oldest */
    qe_checkpoint_name *names = NULL;
    size_t count = 0;
    scene_must(s, qe_checkpoint_list(s->folder, &names, &count, &s->error), "list");
    assert_int_equal(count, 3);
    assert_int_equal(names[0].step, 15);
    assert_int_equal(names[1].step, 30);
    assert_int_equal(names[2].step, 20);
    free(names);
}

static void only_as_many_as_asked_for_stay_and_damaged_ones_do_not_count(void **state) {
    scene *s = *state;
    skips skipped;
    const uint64_t steps[] = {1, 2, 3}, more[] = {4}, last[] = {5};
    save_steps(s, steps, 3, 2);
    assert_int_equal(scene_entries(s), 2);
    scene_write(s, "step-00000003/model.safetensors", "short", 5);
    save_steps(s, more, 1, 2);
    assert_int_equal(scene_entries(s), 2); /* 2 is the second complete one, and 3 is gone */
    assert_int_equal(newest(s, &skipped), 4);
    assert_int_equal(skipped.count, 0);
    scene_write(s, "step-00000002/manifest.json", "{", 1);
    scene_write(s, "step-00000004/scales.safetensors", "short", 5);
    save_steps(s, last, 1, 0); /* who keeps all keeps damaged ones, too */
    assert_int_equal(scene_entries(s), 3);
    assert_int_equal(newest(s, &skipped), 5);
}

/* One whose sizes are right is known to be damaged only to who read it: a run that went on from another one. */
static void what_was_found_damaged_is_not_among_those_that_stay(void **state) {
    scene *s = *state;
    run r;
    skips skipped;
    qe_checkpoint_folder *folder = NULL;
    const uint64_t steps[] = {1, 2, 3};
    size_t bytes = 0;
    save_steps(s, steps, 3, 0);
    char *content = scene_read(s, "step-00000003/model.safetensors", &bytes);
    content[bytes - 1] ^= 1;
    scene_write(s, "step-00000003/model.safetensors", content, bytes);
    free(content);
    assert_int_equal(newest(s, &skipped), 2);
    run_open(&r, RUN_A);
    run_at(&r, 4);
    scene_must(s, qe_checkpoint_folder_open(s->folder, 2, &folder, &s->error), "folder");
    scene_must(s, qe_checkpoint_folder_distrust(folder, "step-00000003", &s->error), "distrust");
    scene_must(s, qe_checkpoint_write(folder, &r.content, &s->error), "write");
    assert_int_equal(scene_entries(s), 2);
    run_at(&r, 3); /* written anew, it is trusted again */
    scene_must(s, qe_checkpoint_write(folder, &r.content, &s->error), "write");
    run_at(&r, 5);
    scene_must(s, qe_checkpoint_write(folder, &r.content, &s->error), "write");
    qe_checkpoint_folder_close(folder);
    qe_manifest_deinit(&r.manifest);
    assert_int_equal(scene_entries(s), 2);
    scene_write(s, "step-00000005/manifest.json", "{", 1);
    assert_int_equal(newest(s, &skipped), 3);
}

/* What a later version wrote may be good: it is passed over, and stays. */
static void a_checkpoint_of_a_later_version_is_left_alone(void **state) {
    scene *s = *state;
    skips skipped;
    const uint64_t steps[] = {1, 2}, more[] = {3, 4};
    save_steps(s, steps, 2, 1);
    scene_forge(s, "step-00000002/manifest.json", "\"version\": 1", "\"version\": 2");
    save_steps(s, more, 2, 1);
    assert_int_equal(scene_entries(s), 2);
    assert_int_equal(newest(s, &skipped), 4);
    assert_says(skipped.text, "step-00000002(none:the format is of version 2");
}

static void one_of_the_same_step_is_replaced_whole(void **state) {
    scene *s = *state;
    skips skipped;
    const uint64_t steps[] = {3, 3};
    save_steps(s, steps, 1, 0);
    scene_write(s, "step-00000003/model.safetensors", "short", 5);
    save_steps(s, steps, 2, 0);
    assert_int_equal(scene_entries(s), 1);
    assert_int_equal(newest(s, &skipped), 3);
    assert_int_equal(skipped.count, 0);
}

/* Litter of dead writers goes with the next save; what looks like it and is not ours to remove stays. */
static void what_dead_writers_left_is_swept(void **state) {
    scene *s = *state;
    char place[PLACE_BYTES];
    const uint64_t step = 3;
    pid_t dead = fork();
    if (dead == 0) _exit(0);
    assert_true(dead > 0);
    waitpid(dead, NULL, 0);
    char name[96];
    snprintf(name, sizeof name, ".qeffect-partial-%ld-0", (long)dead);
    scene_write(s, name, "x", 1);
    scene_place(s, ".qeffect-partial-1-7", place);
    assert_int_equal(mkdir(place, 0777), 0);
    scene_write(s, ".qeffect-partial-1-7/model.safetensors", "x", 1);
    scene_place(s, ".qeffect-discarded-1-0", place);
    assert_int_equal(mkdir(place, 0777), 0);
    scene_write(s, ".qeffect-partial-1-3", "of process 1, which lives", 5);
    scene_write(s, "notes.txt", "x", 1);
    save_steps(s, &step, 1, 0);
    assert_int_equal(scene_entries(s), 3); /* the checkpoint, the notes, the file of a living process */
}

static void two_runs_do_not_write_into_one_directory(void **state) {
    scene *s = *state;
    qe_checkpoint_folder *one = NULL, *two = NULL;
    scene_must(s, qe_checkpoint_folder_open(s->folder, 0, &one, &s->error), "first");
    assert_int_equal(qe_checkpoint_folder_open(s->folder, 0, &two, &s->error), QE_ERROR_IO);
    assert_says(s->error.message, "another run");
    qe_checkpoint_folder_close(one);
    scene_must(s, qe_checkpoint_folder_open(s->folder, 0, &two, &s->error), "second");
    qe_checkpoint_folder_close(two);
}

static void the_writer_writes_what_it_was_given_and_tells_its_outcome(void **state) {
    scene *s = *state;
    run r;
    skips skipped;
    qe_checkpoint_folder *folder = NULL;
    qe_checkpoint_writer *writer = NULL;
    run_open(&r, RUN_A);
    scene_must(s, qe_checkpoint_folder_open(s->folder, 0, &folder, &s->error), "folder");
    scene_must(s, qe_checkpoint_writer_create(folder, 10, &writer, &s->error), "writer");
    scene_must(s, qe_checkpoint_writer_finish(writer, &s->error), "nothing to tell");
    for (uint64_t step = 1; step <= 3; step++) {
        run_at(&r, step);
        qe_checkpoint_writer_start(writer, &r.content);
        scene_must(s, qe_checkpoint_writer_finish(writer, &s->error), "write");
        assert_true(qe_checkpoint_writer_is_idle(writer));
    }
    assert_int_equal(newest(s, &skipped), 3);
    r.scales[0].bytes = 5; /* cannot be written */
    qe_checkpoint_writer_start(writer, &r.content);
    assert_int_equal(qe_checkpoint_writer_finish(writer, &s->error), QE_ERROR_ARGUMENT);
    scene_must(s, qe_checkpoint_writer_finish(writer, &s->error), "told once");
    qe_checkpoint_writer_destroy(writer);
    qe_checkpoint_folder_close(folder);
    qe_manifest_deinit(&r.manifest);
    assert_int_equal(scene_entries(s), 3);
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, scene_setup, scene_teardown)

/* jansson leaves a key out where its memory is refused, and calls the text whole. */
static void refuse_until_clean(scene *s) {
    run r;
    run_open(&r, RUN_A);
    save(s, &r, 2, 0);
    run_at(&r, 3);
    long nth = 0, refusals = 0;
    int is_met = 1;
    while (is_met) {
        qe_checkpoint_folder *folder = NULL;
        qe_checkpoint *checkpoint = NULL;
        scene_must(s, qe_checkpoint_folder_open(s->folder, 0, &folder, &s->error), "folder");
        atomic_store(&until_refused, nth += 1 + nth / 8); /* check-faults takes each */
        qe_status status = qe_checkpoint_write(folder, &r.content, &s->error);
        is_met = atomic_exchange(&until_refused, 0) <= atomic_load(&is_over); /* 1 stays where memory is over */
        qe_checkpoint_folder_close(folder);
        refusals += status == QE_ERROR_MEMORY;
        if (status != QE_OK) assert_int_equal(status, QE_ERROR_MEMORY);
        int is_there = open_named(s, "step-00000003", &checkpoint) == QE_OK;
        if (!is_there) assert_int_equal(s->error.status, QE_ERROR_IO); /* there is none */
        if (status == QE_OK) assert_true(is_there);
        qe_checkpoint_close(checkpoint);
    }
    assert_true(refusals > 0);
    qe_manifest_deinit(&r.manifest);
}

static void memory_that_is_refused_leaves_no_half_of_a_checkpoint(void **state) {
    if (!CAN_REFUSE) skip();
    refuse_until_clean(*state);
}

static void memory_that_is_over_leaves_no_half_of_a_checkpoint(void **state) {
    if (!CAN_REFUSE) skip();
    atomic_store(&is_over, 1);
    refuse_until_clean(*state);
    atomic_store(&is_over, 0);
}

/* The next save would remove it, and a run would go on from an older one. */
static void what_cannot_be_read_now_is_not_taken_for_damage(void **state) {
    scene *s = *state;
    static const uint64_t steps[] = {1, 2, 3};
    qe_checkpoint_name *names = NULL;
    size_t count = 0;
    struct rlimit before, none;
    save_steps(s, steps, 3, 0);
    int lowest = open("/dev/null", O_RDONLY);
    close(lowest);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = (struct rlimit){.rlim_cur = (rlim_t)lowest + 2, .rlim_max = before.rlim_max}; /* no manifest can be opened */
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    qe_status status = qe_checkpoint_list(s->folder, &names, &count, &s->error);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    scene_must(s, status, "list");
    assert_int_equal(count, 3);
    for (size_t i = 0; i < count; i++) assert_true(names[i].is_foreign);
    free(names);
    long nth = 0, refusals = 0, left = 0;
    while (CAN_REFUSE && left == 0) {
        atomic_store(&until_refused, ++nth);
        status = qe_checkpoint_list(s->folder, &names, &count, &s->error);
        left = atomic_exchange(&until_refused, 0);
        refusals += status == QE_ERROR_MEMORY;
        if (status != QE_OK) continue;
        assert_string_equal(names[0].name, "step-00000003");
        free(names);
    }
    assert_true(refusals > 10 || !CAN_REFUSE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        IN_FOLDER(what_is_written_reads_back),
        IN_FOLDER(every_changed_bit_is_found),
        IN_FOLDER(every_cut_and_every_addition_is_found),
        IN_FOLDER(files_of_another_step_are_mixed),
        IN_FOLDER(a_manifest_of_another_run_is_refused),
        IN_FOLDER(a_scale_of_another_epoch_is_refused),
        IN_FOLDER(hostile_manifests_are_refused_by_name),
        IN_FOLDER(hostile_files_with_right_hashes_are_refused),
        IN_FOLDER(links_pipes_and_folders_are_not_followed),
        IN_FOLDER(the_newest_complete_one_is_taken_and_damaged_ones_are_named),
        IN_FOLDER(where_none_is_left_the_newest_is_blamed),
        IN_FOLDER(the_newest_is_what_was_saved_last_whatever_its_step),
        IN_FOLDER(only_as_many_as_asked_for_stay_and_damaged_ones_do_not_count),
        IN_FOLDER(what_was_found_damaged_is_not_among_those_that_stay),
        IN_FOLDER(a_checkpoint_of_a_later_version_is_left_alone),
        IN_FOLDER(one_of_the_same_step_is_replaced_whole),
        IN_FOLDER(what_dead_writers_left_is_swept),
        IN_FOLDER(two_runs_do_not_write_into_one_directory),
        IN_FOLDER(the_writer_writes_what_it_was_given_and_tells_its_outcome),
        cmocka_unit_test_setup_teardown(memory_that_is_refused_leaves_no_half_of_a_checkpoint, scene_setup,
                                        scene_teardown),
        cmocka_unit_test_setup_teardown(memory_that_is_over_leaves_no_half_of_a_checkpoint, scene_setup,
                                        scene_teardown),
        cmocka_unit_test_setup_teardown(what_cannot_be_read_now_is_not_taken_for_damage, scene_setup, scene_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
