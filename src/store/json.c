/* json.c - the reserve is of the process, as jansson's allocator is. */
#include "store/json.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "base/text.h"

enum { RESERVE_BYTES = 1 << 20 }; /* some ten thousand values: an error document, the rest of a manifest */

static pthread_once_t guard_once = PTHREAD_ONCE_INIT;
static json_malloc_t inner_malloc;
static json_free_t inner_free;
static atomic_ulong refusals;

static struct reserve {
    _Alignas(max_align_t) char bytes[RESERVE_BYTES];
    pthread_mutex_t mutex;
    size_t used, live; /* blocks; without one all of it is free again */
} reserve = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static void *reserve_take(size_t bytes) {
    size_t rounded = (bytes / _Alignof(max_align_t) + 1) * _Alignof(max_align_t);
    char *block = NULL;
    pthread_mutex_lock(&reserve.mutex);
    if (bytes < RESERVE_BYTES && rounded <= RESERVE_BYTES - reserve.used) {
        block = reserve.bytes + reserve.used;
        reserve.used += rounded;
        reserve.live++;
    }
    pthread_mutex_unlock(&reserve.mutex);
    if (block == NULL) atomic_fetch_add(&refusals, 1);
    return block;
}

static void *guarded_malloc(size_t bytes) {
    void *memory = inner_malloc(bytes);
    return memory != NULL ? memory : reserve_take(bytes);
}

static void guarded_free(void *memory) {
    if ((uintptr_t)memory - (uintptr_t)reserve.bytes >= RESERVE_BYTES) {
        inner_free(memory);
        return;
    }
    pthread_mutex_lock(&reserve.mutex);
    if (--reserve.live == 0) reserve.used = 0;
    pthread_mutex_unlock(&reserve.mutex);
}

static void guard(void) {
    json_get_alloc_funcs(&inner_malloc, &inner_free);
    json_set_alloc_funcs(guarded_malloc, guarded_free);
}

void qe_json_guard(void) {
    pthread_once(&guard_once, guard);
}

unsigned long qe_json_refusals(void) {
    return atomic_load(&refusals);
}

json_t *qe_json_parse(const char *text, size_t bytes, json_error_t *error_out, int *is_memory_out) {
    qe_json_guard();
    unsigned long before = qe_json_refusals();
    json_t *document = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, error_out);
    *is_memory_out = qe_json_refusals() != before;
    if (!*is_memory_out) return document;
    json_decref(document);
    return NULL;
}

/* Through a builder, whose failure sticks. */
char *qe_json_text(const json_t *document, size_t flags) {
    qe_text_builder builder = {0};
    qe_json_guard();
    unsigned long before = qe_json_refusals();
    int failed = json_dump_callback(document, qe_text_builder_sink, &builder, flags) != 0;
    if (failed || qe_json_refusals() != before) builder.failed = true;
    return qe_text_builder_take(&builder);
}
