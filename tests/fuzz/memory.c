/* memory.c - how much is held: by a sanitizer's hooks, or with this program's malloc before libc's. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "fuzz/fuzz.h"

static atomic_long held, most, at_begin;

__attribute__((unused)) static void add(long bytes) { /* another allocator than ours may be at work */
    long now = atomic_fetch_add(&held, bytes) + bytes, before = atomic_load(&most);
    while (now > before && !atomic_compare_exchange_weak(&most, &before, now)) {}
}

void fuzz_memory_begin(void) {
    atomic_store(&at_begin, atomic_load(&held));
    atomic_store(&most, atomic_load(&held));
}

size_t fuzz_memory_most(void) { return (size_t)(atomic_load(&most) - atomic_load(&at_begin)); }
long fuzz_memory_held(void) { return atomic_load(&held) - atomic_load(&at_begin); }

#if defined(QE_FUZZ)
#include <sanitizer/allocator_interface.h>

static void taken(const volatile void *block, size_t bytes) {
    (void)block;
    add((long)bytes);
}

static void given_back(const volatile void *block) { add(-(long)__sanitizer_get_allocated_size(block)); }

__attribute__((constructor)) static void install(void) { __sanitizer_install_malloc_and_free_hooks(taken, given_back); }

#elif !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define EXPORTED __attribute__((visibility("default")))
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *at, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
extern void __libc_free(void *at);

static void *taken(void *block) {
    if (block != NULL) add((long)malloc_usable_size(block));
    return block;
}

EXPORTED void *malloc(size_t bytes) { return taken(__libc_malloc(bytes)); }
EXPORTED void *calloc(size_t count, size_t bytes) { return taken(__libc_calloc(count, bytes)); }
EXPORTED void *aligned_alloc(size_t alignment, size_t bytes) { return taken(__libc_memalign(alignment, bytes)); }
EXPORTED void *memalign(size_t alignment, size_t bytes) { return taken(__libc_memalign(alignment, bytes)); }
EXPORTED void *realloc(void *at, size_t bytes) {
    long before = at == NULL ? 0 : (long)malloc_usable_size(at);
    void *moved = __libc_realloc(at, bytes);
    if (moved == NULL && bytes > 0) return NULL;
    add(-before);
    return taken(moved);
}
EXPORTED int posix_memalign(void **at_out, size_t alignment, size_t bytes) {
    *at_out = taken(__libc_memalign(alignment, bytes));
    return *at_out == NULL ? ENOMEM : 0;
}
EXPORTED void free(void *at) {
    if (at != NULL) add(-(long)malloc_usable_size(at));
    __libc_free(at);
}
#endif
