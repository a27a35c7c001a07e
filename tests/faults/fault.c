/* fault.c - counting, and memory: this program's malloc comes before libc's, for libc itself, too. */
#include "faults/fault.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define EXPORTED __attribute__((visibility("default")))
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static _Atomic int armed = -1; /* fault_kind, or -1 */
static _Atomic int paused;
static _Atomic long counted, due;
static _Atomic(const char *) met;
static char *told; /* [FAULT_NAME_BYTES] in memory that outlives the process */

#if defined(__SANITIZE_ADDRESS__)
enum { IS_WATCHED = 1 };
#else
enum { IS_WATCHED = 0 };
#endif

/* OpenBLAS 0.3.21 uses what malloc gave it without a look, and a sanitizer what libc took for it when a thread began
 * (pthread_getattr_np, through functions without a name): what they ask for cannot be refused. What libc takes for us
 * is refused in builds that nobody watches. Apart, because malloc is called before a sanitizer has the memory in which
 * it watches a function's stack. */
__attribute__((noinline)) static int is_foreign(const void *caller) {
    Dl_info info = {0};
    if (caller == NULL || dladdr(caller, &info) == 0) return 0;
    if (IS_WATCHED && strstr(info.dli_fname, "/libc.so") != NULL) return 1;
    return strstr(info.dli_fname, "/libopenblas") != NULL;
}

static int is_due(fault_kind kind, const char *call, const void *caller) {
    if (atomic_load(&armed) != (int)kind || atomic_load(&paused)) return 0;
    if (atomic_fetch_add(&counted, 1) + 1 != atomic_load(&due)) return 0;
    if (is_foreign(caller)) {
        atomic_fetch_add(&due, 1); /* the next one, then */
        return 0;
    }
    atomic_store(&met, call);
    if (told != NULL) strncpy(told, call, FAULT_NAME_BYTES - 1);
    return 1;
}

int fault_is_due(fault_kind kind, const char *call) { return is_due(kind, call, NULL); }
void fault_tell(char *name_out) { told = name_out; }

void fault_pause(void) { atomic_fetch_add(&paused, 1); }
void fault_resume(void) { atomic_fetch_sub(&paused, 1); }

/* ---- memory ---- */

#if defined(__SANITIZE_ADDRESS__)
extern void *__interceptor_malloc(size_t bytes);
extern void *__interceptor_calloc(size_t count, size_t bytes);
extern void *__interceptor_realloc(void *at, size_t bytes);
extern void *__interceptor_memalign(size_t alignment, size_t bytes);
extern void __interceptor_free(void *at);
#define REAL_MALLOC __interceptor_malloc
#define REAL_CALLOC __interceptor_calloc
#define REAL_REALLOC __interceptor_realloc
#define REAL_MEMALIGN __interceptor_memalign
#define REAL_FREE __interceptor_free
#define COUNTS_BLOCKS 0
#else
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *at, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
extern void __libc_free(void *at);
#define REAL_MALLOC __libc_malloc
#define REAL_CALLOC __libc_calloc
#define REAL_REALLOC __libc_realloc
#define REAL_MEMALIGN __libc_memalign
#define REAL_FREE __libc_free
#define COUNTS_BLOCKS 1
#endif

/* Blocks that were taken since the start, by address; one that finds no place is only counted. */
enum { PLACES = 1 << 16, PROBES = 32 };
static struct place {
    _Atomic uintptr_t block;
    const void *caller;
} places[PLACES];

static struct place *place_of(const void *block, uintptr_t wanted) {
    size_t at = (size_t)((uintptr_t)block >> 4) * 0x9E3779B1u;
    for (size_t i = 0; i < PROBES; i++) {
        struct place *place = &places[(at + i) % PLACES];
        if (atomic_load(&place->block) == wanted) return place;
    }
    return NULL;
}

static void *taken(void *block, const void *caller) {
    if (!COUNTS_BLOCKS || block == NULL) return block;
    struct place *place = atomic_load(&armed) < 0 ? NULL : place_of(block, 0);
    uintptr_t none = 0;
    if (place != NULL && atomic_compare_exchange_strong(&place->block, &none, (uintptr_t)block))
        place->caller = caller;
    return block;
}

static void given_back(void *block) {
    if (!COUNTS_BLOCKS || block == NULL) return;
    struct place *place = place_of(block, (uintptr_t)block);
    if (place != NULL) atomic_store(&place->block, 0);
}

/* The stacks of threads that are over are kept for later ones, with what the loader took for them; and where OpenBLAS
 * cannot map the region that it keeps for the life of the process, it takes a block of memory in its place. */
static int is_for_life(const Dl_info *info) {
    return strstr(info->dli_fname, "/ld-linux") != NULL || strstr(info->dli_fname, "/libopenblas") != NULL;
}

long fault_blocks_held(int prints) {
    long held = 0;
    for (size_t i = 0; i < PLACES; i++) {
        Dl_info info = {0};
        if (atomic_load(&places[i].block) == 0 || dladdr(places[i].caller, &info) == 0 || is_for_life(&info)) continue;
        held++;
        if (prints)
            fprintf(stderr, "    held: taken at %s +0x%zx %s\n", info.dli_fname,
                    (size_t)((const char *)places[i].caller - (const char *)info.dli_fbase),
                    info.dli_sname == NULL ? "" : info.dli_sname);
    }
    return held;
}

#define CALLER __builtin_return_address(0)

static void *refused(void) {
    errno = ENOMEM;
    return NULL;
}

EXPORTED void *malloc(size_t bytes) {
    return is_due(FAULT_MEMORY, "malloc", CALLER) ? refused() : taken(REAL_MALLOC(bytes), CALLER);
}

EXPORTED void *calloc(size_t count, size_t bytes) {
    return is_due(FAULT_MEMORY, "calloc", CALLER) ? refused() : taken(REAL_CALLOC(count, bytes), CALLER);
}

EXPORTED void *realloc(void *at, size_t bytes) {
    if (is_due(FAULT_MEMORY, "realloc", CALLER)) return refused();
    void *moved = REAL_REALLOC(at, bytes);
    if (moved == NULL && bytes > 0) return NULL;
    given_back(at);
    return taken(moved, CALLER);
}

EXPORTED void *aligned_alloc(size_t alignment, size_t bytes) {
    return is_due(FAULT_MEMORY, "aligned_alloc", CALLER) ? refused() : taken(REAL_MEMALIGN(alignment, bytes), CALLER);
}

EXPORTED void *memalign(size_t alignment, size_t bytes) {
    return is_due(FAULT_MEMORY, "memalign", CALLER) ? refused() : taken(REAL_MEMALIGN(alignment, bytes), CALLER);
}

EXPORTED int posix_memalign(void **at_out, size_t alignment, size_t bytes) {
    if (is_due(FAULT_MEMORY, "posix_memalign", CALLER)) return ENOMEM;
    void *block = taken(REAL_MEMALIGN(alignment, bytes), CALLER);
    if (block == NULL) return ENOMEM;
    *at_out = block;
    return 0;
}

EXPORTED void free(void *at) {
    given_back(at);
    REAL_FREE(at);
}

EXPORTED void *mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset) {
    if (!fault_is_due(FAULT_MEMORY, "mmap")) return REAL(mmap)(at, bytes, protection, flags, file, offset);
    errno = ENOMEM;
    return MAP_FAILED;
}

/* ---- the system ---- */

EXPORTED int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                            void *argument) {
    if (fault_is_due(FAULT_SYSTEM, "pthread_create")) return EAGAIN;
    return REAL(pthread_create)(thread, attributes, start, argument);
}

EXPORTED int pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes) {
    if (fault_is_due(FAULT_SYSTEM, "pthread_mutex_init")) return EAGAIN;
    return REAL(pthread_mutex_init)(mutex, attributes);
}

EXPORTED int pthread_cond_init(pthread_cond_t *condition, const pthread_condattr_t *attributes) {
    if (fault_is_due(FAULT_SYSTEM, "pthread_cond_init")) return EAGAIN;
    return REAL(pthread_cond_init)(condition, attributes);
}

/* What a library's constructor makes of a refusal is not ours; that it cannot be loaded is. */
EXPORTED void *dlopen(const char *name, int flags) {
    if (fault_is_due(FAULT_SYSTEM, "dlopen")) return NULL;
    fault_pause();
    void *library = REAL(dlopen)(name, flags);
    fault_resume();
    return library;
}

/* ---- all kinds ---- */

static int started = -1;

void fault_start(fault_kind kind, long nth, const char *folder) {
    atomic_store(&counted, 0);
    atomic_store(&due, nth);
    atomic_store(&met, NULL);
    started = (int)kind;
    if (kind == FAULT_FILES) fault_files_start(nth, folder);
    if (kind == FAULT_DEVICE) fault_device_start(nth);
    atomic_store(&armed, (int)kind);
}

long fault_stop(void) {
    atomic_store(&armed, -1);
    if (started == FAULT_FILES) return fault_files_stop();
    if (started == FAULT_DEVICE) return fault_device_stop();
    return atomic_load(&counted);
}

const char *fault_met(void) {
    if (started == FAULT_FILES) return fault_files_met();
    if (started == FAULT_DEVICE) return fault_device_met();
    return atomic_load(&met);
}
