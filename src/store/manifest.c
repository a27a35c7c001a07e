/* manifest.c - the lists of a manifest, and the names that may stand in it. */
#include "store/manifest.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

static qe_status no_memory(qe_error *error_out) {
    return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the manifest of a checkpoint");
}

/* Room for one more element of `size` bytes; 0, or -1. */
static int reserve(void **list, size_t count, size_t *capacity, size_t size) {
    if (count < *capacity) return 0;
    size_t wanted = *capacity == 0 ? 16 : 2 * *capacity;
    void *grown = realloc(*list, wanted * size);
    if (grown == NULL) return -1;
    *list = grown;
    *capacity = wanted;
    return 0;
}

qe_status qe_facts_add(qe_facts *facts, const char *name, const char *value, qe_error *error_out) {
    void *list = facts->list;
    int failed = reserve(&list, facts->count, &facts->capacity, sizeof *facts->list);
    facts->list = list;
    if (failed) return no_memory(error_out);
    qe_fact fact = {strdup(name), strdup(value)};
    if (fact.name == NULL || fact.value == NULL) {
        free(fact.name);
        free(fact.value);
        return no_memory(error_out);
    }
    facts->list[facts->count++] = fact;
    return QE_OK;
}

const char *qe_facts_find(const qe_facts *facts, const char *name) {
    for (size_t i = 0; i < facts->count; i++)
        if (strcmp(facts->list[i].name, name) == 0) return facts->list[i].value;
    return NULL;
}

qe_status qe_counts_add(qe_counts *counts, const char *name, uint64_t count, qe_error *error_out) {
    void *list = counts->list;
    int failed = reserve(&list, counts->count, &counts->capacity, sizeof *counts->list);
    counts->list = list;
    if (failed) return no_memory(error_out);
    qe_count added = {strdup(name), count};
    if (added.name == NULL) return no_memory(error_out);
    counts->list[counts->count++] = added;
    return QE_OK;
}

const qe_count *qe_counts_find(const qe_counts *counts, const char *name) {
    for (size_t i = 0; i < counts->count; i++)
        if (strcmp(counts->list[i].name, name) == 0) return &counts->list[i];
    return NULL;
}

void qe_facts_deinit(qe_facts *facts) {
    for (size_t i = 0; i < facts->count; i++) {
        free(facts->list[i].name);
        free(facts->list[i].value);
    }
    free(facts->list);
    *facts = (qe_facts){0};
}

static void counts_deinit(qe_counts *counts) {
    for (size_t i = 0; i < counts->count; i++) free(counts->list[i].name);
    free(counts->list);
}

void qe_manifest_deinit(qe_manifest *manifest) {
    qe_facts *facts[] = {&manifest->settings,  &manifest->device,   &manifest->algorithms,
                         &manifest->libraries, &manifest->schedule, &manifest->program};
    for (size_t i = 0; i < sizeof facts / sizeof *facts; i++) qe_facts_deinit(facts[i]);
    counts_deinit(&manifest->versions);
    counts_deinit(&manifest->epochs);
    for (size_t i = 0; i < manifest->lineage_count; i++) free(manifest->lineage[i].changes);
    for (size_t i = 0; i < manifest->file_count; i++) free(manifest->files[i].name);
    free(manifest->lineage);
    free(manifest->files);
    free(manifest->data.name);
    free(manifest->rng.algorithm);
    memset(manifest, 0, sizeof *manifest);
}

qe_status qe_manifest_add_lineage(qe_manifest *manifest, const char *run, uint64_t from_step, const char *changes,
                                  qe_error *error_out) {
    QE_ASSERT(strlen(run) == QE_DIGEST_BYTES - 1);
    if (manifest->lineage_count == QE_LINEAGE_MAX)
        return qe_error_set(error_out, QE_ERROR_LIMIT, "start a run from its weights",
                            "the run was continued as another %d times", QE_LINEAGE_MAX);
    qe_lineage *grown = realloc(manifest->lineage, (manifest->lineage_count + 1) * sizeof *grown);
    if (grown == NULL) return no_memory(error_out);
    manifest->lineage = grown;
    qe_lineage *added = &grown[manifest->lineage_count];
    added->changes = strdup(changes);
    if (added->changes == NULL) return no_memory(error_out);
    snprintf(added->run, sizeof added->run, "%s", run);
    added->from_step = from_step;
    manifest->lineage_count++;
    return QE_OK;
}

const char *qe_manifest_run(const qe_manifest *manifest) {
    QE_ASSERT(manifest->lineage_count > 0);
    return manifest->lineage[manifest->lineage_count - 1].run;
}

int qe_manifest_name_fits(const char *name) {
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t length = strlen(name);
    return length > 0 && length < 128 && name[0] != '.' && strspn(name, allowed) == length;
}

void qe_checkpoint_name_make(uint64_t step, char name_out[QE_CHECKPOINT_NAME_BYTES]) {
    int length = snprintf(name_out, QE_CHECKPOINT_NAME_BYTES, "step-%08" PRIu64, step);
    QE_ASSERT(length > 0 && length < QE_CHECKPOINT_NAME_BYTES);
}

int qe_checkpoint_name_read(const char *name, uint64_t *step_out) {
    char again[QE_CHECKPOINT_NAME_BYTES];
    if (strncmp(name, "step-", 5) != 0 || strlen(name) >= sizeof again) return 0;
    if (name[5] == 0 || strspn(name + 5, "0123456789") != strlen(name + 5)) return 0;
    uint64_t step = 0;
    for (const char *digit = name + 5; *digit; digit++)
        if (__builtin_mul_overflow(step, 10u, &step) || __builtin_add_overflow(step, (uint64_t)(*digit - '0'), &step))
            return 0;
    qe_checkpoint_name_make(step, again);
    if (step > INT64_MAX || strcmp(again, name) != 0) return 0;
    *step_out = step;
    return 1;
}
