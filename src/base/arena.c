/* arena.c - offsets with every overflow noticed. */
#include "base/arena.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

size_t qe_arena_add(qe_arena *arena, size_t bytes, size_t align_bytes) {
    QE_ASSERT(align_bytes != 0);
    QE_ASSERT((align_bytes & (align_bytes - 1)) == 0);
    size_t offset, end;
    if (__builtin_add_overflow(arena->total_bytes, align_bytes - 1, &offset)) goto overflow;
    offset &= ~(align_bytes - 1);
    if (__builtin_add_overflow(offset, bytes, &end)) goto overflow;
    if (bytes > 0) arena->total_bytes = end;
    if (align_bytes > arena->align_bytes) arena->align_bytes = align_bytes;
    return offset;
overflow:
    arena->overflowed = true;
    return 0;
}

size_t qe_arena_add_array(qe_arena *arena, size_t count, size_t element_bytes, size_t align_bytes) {
    size_t bytes;
    if (__builtin_mul_overflow(count, element_bytes, &bytes)) {
        arena->overflowed = true;
        return 0;
    }
    return qe_arena_add(arena, bytes, align_bytes);
}

/* aligned_alloc wants a multiple of the alignment, and at least one byte to give a pointer worth having. */
static bool padded_bytes(const qe_arena *arena, size_t align_bytes, size_t *bytes_out) {
    size_t bytes = arena->total_bytes == 0 ? 1 : arena->total_bytes;
    if (__builtin_add_overflow(bytes, align_bytes - 1, &bytes)) return false;
    *bytes_out = bytes & ~(align_bytes - 1);
    return true;
}

qe_status qe_arena_allocate(const qe_arena *arena, void **block_out, qe_error *error_out) {
    size_t align_bytes = arena->align_bytes < sizeof(void *) ? sizeof(void *) : arena->align_bytes;
    size_t bytes;
    if (arena->overflowed || !padded_bytes(arena, align_bytes, &bytes)) {
        return qe_error_set(error_out, QE_ERROR_MEMORY, "Use a smaller configuration.",
                            "the sizes asked for add up to more than an address can hold");
    }
    void *block = aligned_alloc(align_bytes, bytes);
    if (block == NULL) {
        return qe_error_set(error_out, QE_ERROR_MEMORY, "Use a smaller configuration or a machine with more memory.",
                            "%zu bytes of memory are not to be had", bytes);
    }
    memset(block, 0, bytes);
    *block_out = block;
    return QE_OK;
}
