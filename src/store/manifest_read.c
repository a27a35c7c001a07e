/* manifest_read.c - judges a manifest that anybody may have written: its own hash first, then every entry by type,
 * bound and name. Nothing it names is opened here. */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/hash.h"
#include "store/file.h"
#include "store/json.h"
#include "store/manifest.h"

typedef struct reading {
    const char *path;
    qe_error *error_out;
} reading;

static const char remedy[] = "Use another checkpoint; this one is damaged.";

#define REFUSE(from, ...) qe_store_refuse((from)->error_out, QE_ERROR_FORMAT, (from)->path, remedy, __VA_ARGS__)

/* The text ends with the hash of what stands before it, to the byte. */
static qe_status check_seal(const reading *from, const char *text, size_t bytes) {
    static const char seal[] = QE_MANIFEST_SEAL, end[] = "\"\n}\n";
    const size_t digest = QE_HASH_TEXT_BYTES - 1, tail = sizeof seal - 1 + digest + sizeof end - 1;
    char expected[QE_HASH_TEXT_BYTES];
    if (bytes < tail) return REFUSE(from, "the manifest was cut short: it has %zu bytes", bytes);
    const char *at = text + bytes - tail;
    if (memcmp(at, seal, sizeof seal - 1) != 0 || memcmp(text + bytes - (sizeof end - 1), end, sizeof end - 1) != 0)
        return REFUSE(from, "the manifest does not end with its hash: it was cut short or changed");
    qe_hash_text(qe_hash_bytes(text, bytes - tail), expected);
    if (memcmp(at + sizeof seal - 1, expected, digest) != 0)
        return REFUSE(from, "the manifest is not the one that was written: its hash is %s, not %.*s", expected,
                      (int)digest, at + sizeof seal - 1);
    return QE_OK;
}

static qe_status read_count(const reading *from, const json_t *object, const char *key, uint64_t *count_out) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return REFUSE(from, "\"%.64s\" is not a whole number of 0 or more", key);
    *count_out = (uint64_t)json_integer_value(value);
    return QE_OK;
}

static qe_status read_text(const reading *from, const json_t *object, const char *key, const char **text_out) {
    const char *text = json_string_value(json_object_get(object, key));
    if (text == NULL) return REFUSE(from, "\"%.64s\" is not text", key);
    *text_out = text;
    return QE_OK;
}

static qe_status copy_text(const reading *from, const json_t *object, const char *key, char **text_out) {
    const char *text = NULL;
    QE_TRY(read_text(from, object, key, &text));
    *text_out = strdup(text);
    return *text_out ? QE_OK : qe_store_refuse_errno(from->error_out, from->path, "read", ENOMEM);
}

/* 32 hexadecimal digits. */
static qe_status read_digest(const reading *from, const json_t *object, const char *key,
                             char digest_out[QE_DIGEST_BYTES]) {
    const char *text = NULL;
    QE_TRY(read_text(from, object, key, &text));
    if (strlen(text) != QE_DIGEST_BYTES - 1 || strspn(text, "0123456789abcdef") != QE_DIGEST_BYTES - 1)
        return REFUSE(from, "\"%.64s\" is not 32 hexadecimal digits", key);
    memcpy(digest_out, text, QE_DIGEST_BYTES);
    return QE_OK;
}

static qe_status read_object(const reading *from, const json_t *object, const char *key, json_t **value_out) {
    json_t *value = json_object_get(object, key);
    if (!json_is_object(value)) return REFUSE(from, "\"%.64s\" is not an object", key);
    *value_out = value;
    return QE_OK;
}

static qe_status read_facts(const reading *from, const json_t *object, const char *key, qe_facts *facts) {
    json_t *entries = NULL, *value;
    const char *name;
    QE_TRY(read_object(from, object, key, &entries));
    json_object_foreach(entries, name, value) {
        if (!json_is_string(value)) return REFUSE(from, "\"%.64s\": \"%.64s\" is not text", key, name);
        QE_TRY(qe_facts_add(facts, name, json_string_value(value), from->error_out));
    }
    return QE_OK;
}

static qe_status read_counts(const reading *from, const json_t *object, const char *key, qe_counts *counts) {
    json_t *entries = NULL, *value;
    const char *name;
    QE_TRY(read_object(from, object, key, &entries));
    json_object_foreach(entries, name, value) {
        uint64_t count = 0;
        (void)value;
        QE_TRY(read_count(from, entries, name, &count));
        QE_TRY(qe_counts_add(counts, name, count, from->error_out));
    }
    return QE_OK;
}

static qe_status read_lineage(const reading *from, const json_t *document, qe_manifest *manifest) {
    const json_t *list = json_object_get(document, "lineage"), *entry;
    size_t index;
    if (!json_is_array(list) || json_array_size(list) == 0) return REFUSE(from, "\"lineage\" is not a list of runs");
    json_array_foreach(list, index, entry) {
        char run[QE_DIGEST_BYTES];
        uint64_t step = 0;
        const char *changes = NULL;
        QE_TRY(read_digest(from, entry, "run", run));
        QE_TRY(read_count(from, entry, "from_step", &step));
        QE_TRY(read_text(from, entry, "changes", &changes));
        QE_TRY(qe_manifest_add_lineage(manifest, run, step, changes, from->error_out));
    }
    return QE_OK;
}

static qe_status read_file(const reading *from, const json_t *entry, qe_manifest *manifest) {
    qe_manifest_file *file = &manifest->files[manifest->file_count];
    const char *name = NULL;
    QE_TRY(read_text(from, entry, "name", &name));
    if (!qe_manifest_name_fits(name) || strcmp(name, QE_MANIFEST_NAME) == 0)
        return REFUSE(from, "a file is called \"%.64s\", expected letters, digits, '.', '_' and '-'", name);
    for (size_t i = 0; i < manifest->file_count; i++)
        if (strcmp(manifest->files[i].name, name) == 0) return REFUSE(from, "the file %s is named twice", name);
    QE_TRY(read_count(from, entry, "bytes", &file->bytes));
    QE_TRY(read_digest(from, entry, "xxh3_128", file->digest));
    file->name = strdup(name);
    if (file->name == NULL) return qe_store_refuse_errno(from->error_out, from->path, "read", ENOMEM);
    manifest->file_count++;
    return QE_OK;
}

static qe_status read_files(const reading *from, const json_t *document, qe_manifest *manifest) {
    const json_t *list = json_object_get(document, "files"), *entry;
    size_t index;
    if (!json_is_array(list) || json_array_size(list) == 0) return REFUSE(from, "\"files\" is not a list of files");
    if (json_array_size(list) > QE_CHECKPOINT_FILES_MAX)
        return REFUSE(from, "%zu files, expected at most %d", json_array_size(list), QE_CHECKPOINT_FILES_MAX);
    manifest->files = calloc(json_array_size(list), sizeof *manifest->files);
    if (manifest->files == NULL) return qe_store_refuse_errno(from->error_out, from->path, "read", ENOMEM);
    qe_status status = QE_OK;
    json_array_foreach(list, index, entry)
        if (status == QE_OK) status = read_file(from, entry, manifest);
    return status;
}

static qe_status read_data(const reading *from, const json_t *document, qe_manifest *manifest) {
    json_t *data = NULL, *rng = NULL;
    QE_TRY(read_object(from, document, "data", &data));
    QE_TRY(copy_text(from, data, "name", &manifest->data.name));
    QE_TRY(read_digest(from, data, "xxh3_128", manifest->data.digest));
    QE_TRY(read_count(from, data, "tokens", &manifest->data.tokens));
    QE_TRY(read_count(from, data, "train_windows", &manifest->data.train_windows));
    QE_TRY(read_count(from, data, "position", &manifest->data.position));
    QE_TRY(read_object(from, document, "rng", &rng));
    QE_TRY(copy_text(from, rng, "algorithm", &manifest->rng.algorithm));
    QE_TRY(read_count(from, rng, "seed", &manifest->rng.seed));
    return read_count(from, rng, "offset", &manifest->rng.offset);
}

static qe_status read_kind(const reading *from, const json_t *document) {
    const char *format = NULL;
    uint64_t version = 0;
    QE_TRY(read_text(from, document, "format", &format));
    if (strcmp(format, "qeffect-checkpoint") != 0) return REFUSE(from, "the format is \"%.64s\"", format);
    QE_TRY(read_count(from, document, "version", &version));
    if (version == 1) return QE_OK;
    return qe_store_refuse(from->error_out, QE_ERROR_UNSUPPORTED, from->path, "Use the version that wrote it.",
                           "the format is of version %" PRIu64 ", this program reads version 1", version);
}

static qe_status read_document(const reading *from, const json_t *document, qe_manifest *manifest) {
    json_t *device = NULL, *counters = NULL;
    const json_t *rate = json_object_get(document, "learning_rate");
    QE_TRY(read_kind(from, document));
    QE_TRY(read_count(from, document, "step", &manifest->step));
    QE_TRY(read_count(from, document, "serial", &manifest->serial));
    QE_TRY(read_digest(from, document, "state_hash", manifest->state_hash));
    QE_TRY(read_facts(from, document, "program", &manifest->program));
    QE_TRY(read_lineage(from, document, manifest));
    QE_TRY(read_files(from, document, manifest));
    QE_TRY(read_facts(from, document, "settings", &manifest->settings));
    QE_TRY(read_data(from, document, manifest));
    if (!json_is_number(rate)) return REFUSE(from, "\"learning_rate\" is not a number");
    manifest->learning_rate = json_number_value(rate);
    QE_TRY(read_object(from, document, "device", &device));
    QE_TRY(read_facts(from, device, "opened", &manifest->device));
    QE_TRY(read_facts(from, device, "algorithms", &manifest->algorithms));
    QE_TRY(read_facts(from, device, "libraries", &manifest->libraries));
    QE_TRY(read_facts(from, document, "schedule", &manifest->schedule));
    QE_TRY(read_object(from, document, "counters", &counters));
    QE_TRY(read_counts(from, counters, "weights", &manifest->versions));
    return read_counts(from, counters, "scales", &manifest->epochs);
}

qe_status qe_manifest_read_text(const char *text, size_t bytes, const char *path, qe_manifest *manifest_out,
                                qe_error *error_out) {
    reading from = {path, error_out};
    json_error_t error;
    memset(manifest_out, 0, sizeof *manifest_out);
    QE_TRY(check_seal(&from, text, bytes));
    int is_memory_out = 0;
    json_t *document = qe_json_parse(text, bytes, &error, &is_memory_out);
    if (is_memory_out) return qe_store_refuse_errno(error_out, path, "read", ENOMEM);
    if (document == NULL) return REFUSE(&from, "not JSON: %s", error.text);
    qe_status status = json_is_object(document) ? read_document(&from, document, manifest_out)
                                                : REFUSE(&from, "the manifest is not an object");
    json_decref(document);
    if (status != QE_OK) qe_manifest_deinit(manifest_out);
    return status;
}
