/* trace_names.c - names to indices, for the trace reader and for finding equal names in the writer. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "core/trace_state.h"

enum { FIRST_BUCKETS = 64 }; /* a power of two, as all later sizes */

static uint64_t hash_of(uint32_t space, const char *name) {
    uint64_t hash = 14695981039346656037u ^ space; /* FNV-1a */
    for (; *name; name++) hash = (hash ^ (unsigned char)*name) * 1099511628211u;
    return hash ^ hash >> 32;
}

/* The bucket that holds the name, or the free one where it belongs. */
static uint32_t bucket_of(const qe_names *names, uint32_t space, const char *name) {
    uint32_t mask = names->bucket_count - 1;
    for (uint32_t bucket = (uint32_t)hash_of(space, name) & mask;; bucket = (bucket + 1) & mask) {
        if (names->buckets[bucket] == 0) return bucket;
        const qe_name_entry *entry = &names->entries[names->buckets[bucket] - 1];
        if (entry->space == space && strcmp(entry->name, name) == 0) return bucket;
    }
}

uint32_t qe_names_find(const qe_names *names, uint32_t space, const char *name) {
    if (names->bucket_count == 0) return QE_NONE;
    uint32_t bucket = bucket_of(names, space, name);
    return names->buckets[bucket] == 0 ? QE_NONE : names->entries[names->buckets[bucket] - 1].index;
}

/* Buckets stay at most half full, so that a search always meets a free one. */
static qe_status grow(qe_names *names) {
    if (names->count < names->capacity) return QE_OK;
    uint32_t bucket_count = names->bucket_count > 0 ? names->bucket_count * 2 : FIRST_BUCKETS;
    uint32_t *buckets = calloc(bucket_count, sizeof *buckets);
    if (buckets == NULL) return QE_ERROR_MEMORY;
    qe_name_entry *entries = realloc(names->entries, (size_t)bucket_count / 2 * sizeof *entries);
    if (entries == NULL) {
        free(buckets);
        return QE_ERROR_MEMORY;
    }
    free(names->buckets);
    names->entries = entries;
    names->capacity = bucket_count / 2;
    names->buckets = buckets;
    names->bucket_count = bucket_count;
    for (uint32_t i = 0; i < names->count; i++)
        names->buckets[bucket_of(names, entries[i].space, entries[i].name)] = i + 1;
    return QE_OK;
}

qe_status qe_names_add(qe_names *names, uint32_t space, const char *name, uint32_t index) {
    QE_ASSERT(strlen(name) < QE_NAME_BYTES);
    QE_ASSERT(qe_names_find(names, space, name) == QE_NONE);
    QE_TRY(grow(names));
    qe_name_entry *entry = &names->entries[names->count];
    memset(entry, 0, sizeof *entry);
    memcpy(entry->name, name, strlen(name));
    entry->space = space;
    entry->index = index;
    names->buckets[bucket_of(names, space, name)] = ++names->count;
    QE_ASSERT(names->count <= names->bucket_count / 2);
    return QE_OK;
}

void qe_names_deinit(qe_names *names) {
    free(names->entries);
    free(names->buckets);
    memset(names, 0, sizeof *names);
}
