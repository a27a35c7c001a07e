/* session_manifest.c - what a run is, as facts of a manifest; and which of them decide the bits. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <jansson.h>
#include "base/assert.h"
#include "base/hash.h"
#include "cli/checkpoints.h"

static qe_status add_settings(const qe_session *session, qe_facts *facts, qe_error *error_out) {
    for (size_t i = 0; i < qe_settings_count(); i++) {
        char text[QE_SETTINGS_VALUE_BYTES];
        if (qe_settings_value_text(&session->settings, i, text, sizeof text) < 0)
            return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the settings");
        QE_TRY(qe_facts_add(facts, qe_settings_describe(i).key, text, error_out));
    }
    return QE_OK;
}

/* The host says "host avx512 openblas 0.3.21 SkylakeX". */
static qe_status add_host(const qe_session *session, qe_manifest *manifest, qe_error *error_out) {
    char level[32] = "", library[32] = "", version[32] = "", core[32] = "";
    int words = sscanf(session->identity, "host %31s %31s %31s %31s", level, library, version, core);
    if (words != 4) return QE_OK;
    QE_TRY(qe_facts_add(&manifest->algorithms, "kernels", level, error_out));
    QE_TRY(qe_facts_add(&manifest->algorithms, "blas_core", core, error_out));
    return qe_facts_add(&manifest->libraries, library, version, error_out);
}

/* A GPU says "cuda NVIDIA H200 cuBLASLt 13.1.0 cuDNN 9.19.0, frontend 1.32.0", and Transformer Engine behind it. */
static qe_status add_gpu(const qe_session *session, qe_manifest *manifest, qe_error *error_out) {
    const char *libraries = strstr(session->identity, "cuBLASLt");
    const char *path = session->settings.train.algorithms;
    if (libraries != NULL) QE_TRY(qe_facts_add(&manifest->libraries, "cuda", libraries, error_out));
    FILE *file = path[0] != 0 ? fopen(path, "r") : NULL;
    if (file == NULL) return qe_facts_add(&manifest->algorithms, "choice", "the libraries' first", error_out);
    qe_status status = qe_manifest_choices_add(manifest, file, error_out);
    (void)fclose(file);
    return status;
}

static qe_status add_device(const qe_session *session, qe_manifest *manifest, qe_error *error_out) {
    char kind[32] = "";
    (void)sscanf(session->identity, "%31s", kind);
    QE_TRY(qe_facts_add(&manifest->device, "backend", kind, error_out));
    QE_TRY(qe_facts_add(&manifest->device, "identity", session->identity, error_out));
    return strcmp(kind, "host") == 0 ? add_host(session, manifest, error_out) : add_gpu(session, manifest, error_out);
}

/* --- the order in which gradients add up ---------------------------------------------------------------------- */

static int deposits(const qe_action *action, uint32_t stage, uint8_t kind) {
    return action->stage == stage && (action->kind == kind || action->kind == QE_ACTION_B);
}

/* Hashes the microbatches in which a weight receives its contributions; returns 0 where they do not ascend. */
static int hash_order(const qe_schedule *schedule, uint32_t stage, uint8_t kind, qe_hash *hash) {
    uint32_t rank = schedule->stage_rank[stage], last = 0;
    int ascends = 1;
    for (uint32_t i = schedule->rank_begin[rank]; i < schedule->rank_begin[rank + 1]; i++) {
        const qe_action *action = &schedule->actions[i];
        if (!deposits(action, stage, kind)) continue;
        ascends &= action->microbatch >= last;
        last = action->microbatch;
        qe_hash_update(hash, &last, sizeof last);
    }
    return ascends;
}

/* "ascending", or a hash: the same for every number of stages and ranks. */
static void describe_order(const qe_session *session, char text_out[QE_HASH_TEXT_BYTES]) {
    const qe_model_ops *ops = qe_model_table();
    qe_hash hash;
    int ascends = 1;
    qe_hash_init(&hash);
    for (uint32_t i = 0; i < ops->weight_count(session->model); i++)
        ascends &= hash_order(&session->schedule, ops->weight_stage(session->model, i, session->schedule.stages),
                              ops->weight(session->model, i)->deposited_by, &hash);
    if (ascends) snprintf(text_out, QE_HASH_TEXT_BYTES, "ascending");
    else qe_hash_text(qe_hash_digest(&hash), text_out);
}

/* Of all ranks' programs: kinds, streams, objects and effects of everything that is submitted. */
static void hash_plan(const qe_plan *plan, char text_out[QE_HASH_TEXT_BYTES]) {
    qe_hash hash;
    qe_hash_init(&hash);
    for (uint32_t rank = 0; rank < plan->ranks; rank++) {
        const qe_program *program = &plan->rank[rank].program;
        for (uint32_t i = 0; i < program->item_count; i++) {
            const qe_item *item = &program->items[i];
            const uint32_t words[] = {item->kind, item->stage, item->microbatch, item->stream, item->event};
            qe_hash_update(&hash, words, sizeof words);
            for (uint32_t e = 0; e < item->effect_count; e++) {
                const qe_effect *effect = &program->effects[item->first_effect + e];
                const uint64_t numbers[] = {effect->kind, effect->object, effect->version, effect->begin, effect->end};
                qe_hash_update(&hash, numbers, sizeof numbers);
            }
        }
    }
    qe_hash_text(qe_hash_digest(&hash), text_out);
}

static qe_status add_number(qe_facts *facts, const char *name, uint64_t number, qe_error *error_out) {
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)number);
    return qe_facts_add(facts, name, text, error_out);
}

static qe_status add_schedule(const qe_session *session, qe_facts *facts, qe_error *error_out) {
    char order[QE_HASH_TEXT_BYTES], plan[QE_HASH_TEXT_BYTES];
    int is_baseline = session->settings.train.mode == QE_TRAIN_BASELINE;
    describe_order(session, order);
    hash_plan(session->train, plan);
    QE_TRY(qe_facts_add(facts, "name", is_baseline ? "sequential" : session->settings.pipeline.schedule, error_out));
    QE_TRY(add_number(facts, "ranks", session->schedule.ranks, error_out));
    QE_TRY(add_number(facts, "stages", session->schedule.stages, error_out));
    QE_TRY(add_number(facts, "microbatches", session->schedule.microbatches, error_out));
    QE_TRY(qe_facts_add(facts, "accumulation_order", order, error_out));
    return qe_facts_add(facts, "plan_hash", plan, error_out);
}

qe_status qe_session_manifest(const qe_session *session, qe_manifest *manifest, qe_error *error_out) {
    qe_dataset_info data = qe_dataset_describe(session->dataset);
    QE_TRY(qe_facts_add(&manifest->program, "qeffect", QE_VERSION, error_out));
    QE_TRY(add_settings(session, &manifest->settings, error_out));
    QE_TRY(add_device(session, manifest, error_out));
    QE_TRY(add_schedule(session, &manifest->schedule, error_out));
    manifest->data.name = strdup(data.name);
    manifest->data.tokens = data.tokens;
    manifest->data.train_windows = data.train_windows;
    qe_dataset_digest(session->dataset, manifest->data.digest);
    manifest->rng.algorithm = strdup("philox4x32-10");
    manifest->rng.seed = session->settings.train.seed;
    if (manifest->data.name != NULL && manifest->rng.algorithm != NULL) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a manifest");
}

qe_status qe_run_name(char run_out[QE_DIGEST_BYTES], qe_error *error_out) {
    qe_hash128 random;
    if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random)
        return qe_error_set(error_out, QE_ERROR_IO, NULL, "the system gives no random bytes to name the run by");
    qe_hash_text(random, run_out);
    return QE_OK;
}

/* --- settings of a manifest ----------------------------------------------------------------------------------- */

/* Texts are written in quotes, as in a file; --set takes them without. */
static qe_status set_one(qe_settings *settings, const qe_fact *fact, qe_error *error_out) {
    char assignment[QE_SETTINGS_VALUE_BYTES + 128];
    json_t *text = fact->value[0] == '"' ? json_loads(fact->value, JSON_DECODE_ANY, NULL) : NULL;
    int length = snprintf(assignment, sizeof assignment, "%s=%s", fact->name,
                          text != NULL ? json_string_value(text) : fact->value);
    json_decref(text);
    qe_error why = {0};
    qe_status status = length < (int)sizeof assignment ? qe_settings_set(settings, assignment, &why) : QE_ERROR_LIMIT;
    if (status == QE_OK) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                        "use the version that wrote it, or begin a run from its model.safetensors (--new-lineage)",
                        "the checkpoint was written with a setting that this program does not take: %.64s = %.64s%s%s",
                        fact->name, fact->value, why.message[0] ? ": " : "", why.message);
}

qe_status qe_manifest_settings(const qe_manifest *manifest, qe_settings *settings_out, qe_error *error_out) {
    qe_settings settings;
    qe_settings_default(&settings);
    for (size_t i = 0; i < manifest->settings.count; i++)
        QE_TRY(set_one(&settings, &manifest->settings.list[i], error_out));
    memset(settings.place, 0, sizeof settings.place); /* nobody wrote them on this command line */
    *settings_out = settings;
    return QE_OK;
}

/* --- what decides the bits ------------------------------------------------------------------------------------ */

/* Keys that may change without a bit changing, or that are compared as what they come to: the data by its tokens, the
 * schedule by its order. A new key decides the bits until it is named here. */
static const char *const free_keys[] = {
    "data.path",         "data.format",       "train.mode",     "train.capture",          "train.nonfinite",
    "train.evaluate_every", "train.evaluate_sequences", "pipeline.schedule", "pipeline.ranks", "pipeline.chunks",
    "pipeline.cache_weights", "pipeline.placement", "contracts.mode", "contracts.trace",  "checkpoint.path",
    "checkpoint.every",  "checkpoint.keep",   "contracts.order", "train.nvtx",             "train.timeline",
    "train.memory_limit",
    "pipeline.times",    "pipeline.memory_limit", "pipeline.stages"};

static int decides(const char *key, const qe_settings *then, const qe_settings *now) {
    for (size_t i = 0; i < sizeof free_keys / sizeof *free_keys; i++)
        if (strcmp(key, free_keys[i]) == 0) return 0;
    int is_detail = strncmp(key, "recipe.", 7) == 0 && strcmp(key, "recipe.name") != 0;
    return !is_detail || then->recipe.kind == QE_RECIPE_DELAYED || now->recipe.kind == QE_RECIPE_DELAYED;
}

static qe_status add_difference(qe_facts *differences, const char *name, const char *then, const char *now,
                                qe_error *error_out) {
    char text[256];
    snprintf(text, sizeof text, "%.96s -> %.96s", then != NULL ? then : "none", now != NULL ? now : "none");
    return qe_facts_add(differences, name, text, error_out);
}

static qe_status compare_settings(const qe_manifest *then, const qe_manifest *now, qe_facts *differences,
                                  qe_error *error_out) {
    qe_settings before, after;
    QE_TRY(qe_manifest_settings(then, &before, error_out));
    QE_TRY(qe_manifest_settings(now, &after, error_out));
    for (size_t i = 0; i < qe_settings_count(); i++) {
        char old_text[QE_SETTINGS_VALUE_BYTES], new_text[QE_SETTINGS_VALUE_BYTES];
        const char *key = qe_settings_describe(i).key;
        if (!decides(key, &before, &after)) continue;
        if (qe_settings_value_text(&before, i, old_text, sizeof old_text) < 0 ||
            qe_settings_value_text(&after, i, new_text, sizeof new_text) < 0)
            return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to compare settings");
        if (strcmp(old_text, new_text) != 0)
            QE_TRY(add_difference(differences, key, old_text, new_text, error_out));
    }
    return QE_OK;
}

static int same(const char *left, const char *right) {
    return left == right || (left != NULL && right != NULL && strcmp(left, right) == 0);
}

/* Every fact of either side. */
static qe_status compare_facts(const char *prefix, const qe_facts *then, const qe_facts *now, qe_facts *differences,
                               qe_error *error_out) {
    for (size_t side = 0; side < 2; side++) {
        const qe_facts *list = side == 0 ? then : now;
        for (size_t i = 0; i < list->count; i++) {
            char name[128];
            const char *key = list->list[i].name, *old_text = qe_facts_find(then, key);
            if (side == 1 && old_text != NULL) continue; /* compared already */
            if (same(old_text, qe_facts_find(now, key))) continue;
            snprintf(name, sizeof name, "%s%.100s", prefix, key);
            QE_TRY(add_difference(differences, name, old_text, qe_facts_find(now, key), error_out));
        }
    }
    return QE_OK;
}

/* An order that does not ascend is a hash: the schedules say which setting it came from. */
static qe_status compare_orders(const qe_facts *then, const qe_facts *now, qe_facts *differences,
                                qe_error *error_out) {
    const char *old_order = qe_facts_find(then, "accumulation_order");
    const char *new_order = qe_facts_find(now, "accumulation_order");
    const char *old_name = qe_facts_find(then, "name"), *new_name = qe_facts_find(now, "name");
    char text[128];
    if (same(old_order, new_order)) return QE_OK;
    snprintf(text, sizeof text, "%.40s (pipeline.schedule %.20s -> %.20s)", new_order, old_name ? old_name : "none",
             new_name ? new_name : "none");
    return add_difference(differences, "accumulation_order", old_order, text, error_out);
}

qe_status qe_manifest_differences(const qe_manifest *then, const qe_manifest *now, qe_facts *differences,
                                  qe_error *error_out) {
    QE_TRY(compare_settings(then, now, differences, error_out));
    if (strcmp(then->data.digest, now->data.digest) != 0)
        QE_TRY(add_difference(differences, "data", then->data.name, now->data.name, error_out));
    QE_TRY(compare_facts("device.", &then->device, &now->device, differences, error_out));
    QE_TRY(compare_facts("algorithm.", &then->algorithms, &now->algorithms, differences, error_out));
    QE_TRY(compare_facts("library.", &then->libraries, &now->libraries, differences, error_out));
    return compare_orders(&then->schedule, &now->schedule, differences, error_out);
}
