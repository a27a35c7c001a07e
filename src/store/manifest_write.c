/* manifest_write.c - a manifest as JSON. Its last entry is the hash of all bytes before it, so that no bit of it can
 * change unseen. */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "store/file.h"
#include "store/json.h"
#include "store/manifest.h"

/* Every helper takes NULL for what memory was missing for, and the whole is NULL then. */
static json_t *whole(uint64_t number) {
    return json_integer((json_int_t)number);
}

static json_t *facts_json(const qe_facts *facts) {
    json_t *object = json_object();
    for (size_t i = 0; i < facts->count; i++)
        if (json_object_set_new(object, facts->list[i].name, json_string(facts->list[i].value)) != 0) {
            json_decref(object);
            return NULL;
        }
    return object;
}

static json_t *counts_json(const qe_counts *counts) {
    json_t *object = json_object();
    for (size_t i = 0; i < counts->count; i++)
        if (json_object_set_new(object, counts->list[i].name, whole(counts->list[i].count)) != 0) {
            json_decref(object);
            return NULL;
        }
    return object;
}

static json_t *lineage_json(const qe_manifest *manifest) {
    json_t *list = json_array();
    for (size_t i = 0; i < manifest->lineage_count; i++) {
        const qe_lineage *run = &manifest->lineage[i];
        json_t *entry = json_pack("{s:s, s:o, s:s}", "run", run->run, "from_step", whole(run->from_step), "changes",
                                  run->changes);
        if (json_array_append_new(list, entry) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static json_t *files_json(const qe_manifest *manifest) {
    json_t *list = json_array();
    for (size_t i = 0; i < manifest->file_count; i++) {
        const qe_manifest_file *file = &manifest->files[i];
        json_t *entry =
            json_pack("{s:s, s:o, s:s}", "name", file->name, "bytes", whole(file->bytes), "xxh3_128", file->digest);
        if (json_array_append_new(list, entry) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static json_t *data_json(const qe_manifest *manifest) {
    return json_pack("{s:s, s:s, s:o, s:o, s:o}", "name", manifest->data.name ? manifest->data.name : "", "xxh3_128",
                     manifest->data.digest, "tokens", whole(manifest->data.tokens), "train_windows",
                     whole(manifest->data.train_windows), "position", whole(manifest->data.position));
}

static json_t *rng_json(const qe_manifest *manifest) {
    return json_pack("{s:s, s:o, s:o}", "algorithm", manifest->rng.algorithm ? manifest->rng.algorithm : "", "seed",
                     whole(manifest->rng.seed), "offset", whole(manifest->rng.offset));
}

static json_t *device_json(const qe_manifest *manifest) {
    return json_pack("{s:o, s:o, s:o}", "opened", facts_json(&manifest->device), "algorithms",
                     facts_json(&manifest->algorithms), "libraries", facts_json(&manifest->libraries));
}

static json_t *counters_json(const qe_manifest *manifest) {
    return json_pack("{s:o, s:o}", "weights", counts_json(&manifest->versions), "scales",
                     counts_json(&manifest->epochs));
}

static json_t *manifest_json(const qe_manifest *manifest) {
    return json_pack(
        "{s:s, s:i, s:o, s:o, s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:f, s:o, s:o, s:s, s:o}", "format",
        "qeffect-checkpoint", "version", 1, "step", whole(manifest->step), "serial", whole(manifest->serial),
        "state_hash", manifest->state_hash, "program", facts_json(&manifest->program), "lineage",
        lineage_json(manifest), "files", files_json(manifest), "settings", facts_json(&manifest->settings), "data",
        data_json(manifest), "rng", rng_json(manifest), "learning_rate", manifest->learning_rate, "device",
        device_json(manifest), "schedule", facts_json(&manifest->schedule), "history", "row 0 current, newest last",
        "counters", counters_json(manifest));
}

/* Replaces the closing brace by the hash of what stands before it. */
static char *seal(const char *text, size_t *bytes_out) {
    size_t length = strlen(text);
    char digest[QE_HASH_TEXT_BYTES], *sealed = NULL;
    if (length < 2 || strcmp(text + length - 2, "\n}") != 0) return NULL;
    qe_hash_text(qe_hash_bytes(text, length - 2), digest);
    int bytes = asprintf(&sealed, "%.*s" QE_MANIFEST_SEAL "%s\"\n}\n", (int)(length - 2), text, digest);
    if (bytes < 0) return NULL;
    *bytes_out = (size_t)bytes;
    return sealed;
}

qe_status qe_manifest_write_text(const qe_manifest *manifest, const char *path, char **text_out, size_t *bytes_out,
                                 qe_error *error_out) {
    qe_json_guard();
    unsigned long refusals = qe_json_refusals();
    json_t *document = manifest_json(manifest);
    char *text = document ? qe_json_text(document, JSON_INDENT(1) | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(document);
    char *sealed = text ? seal(text, bytes_out) : NULL;
    free(text);
    if (sealed != NULL) return *text_out = sealed, QE_OK;
    if (document != NULL || qe_json_refusals() != refusals)
        return qe_store_refuse_errno(error_out, path, "describe", ENOMEM);
    return qe_store_refuse(error_out, QE_ERROR_ARGUMENT, path, "Use names and paths in UTF-8.",
                           "a name or a path in it is not UTF-8");
}
