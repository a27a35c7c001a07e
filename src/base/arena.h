/* arena.h - measure, then place: offsets are handed out first, the block is allocated once, nothing moves after.
 * An overflow sticks; it is asked for once, at the end. */
#ifndef QE_BASE_ARENA_H
#define QE_BASE_ARENA_H

#include <stdbool.h>
#include <stddef.h>

#include "qeffect/status.h"

/* Start from {0}. */
typedef struct qe_arena {
    size_t total_bytes; /* end of the last piece */
    size_t align_bytes; /* largest alignment asked for; 0 while empty */
    bool overflowed;
} qe_arena;

/* Room for `bytes` at a multiple of align_bytes; the offset of that room. 0 bytes takes no room.
 * Requires:   align_bytes is a power of two.
 * On failure: (the total exceeds SIZE_MAX) 0, and qe_arena_allocate will refuse. */
size_t qe_arena_add(qe_arena *arena, size_t bytes, size_t align_bytes);
/* The same for count * element_bytes. */
size_t qe_arena_add_array(qe_arena *arena, size_t count, size_t element_bytes, size_t align_bytes);

/* Allocates what was added, zeroed, aligned to the largest alignment.
 * On failure: QE_ERROR_MEMORY; *block_out is untouched.
 * Owns:       the caller frees *block_out with free(). */
qe_status qe_arena_allocate(const qe_arena *arena, void **block_out, qe_error *error_out);

#endif
