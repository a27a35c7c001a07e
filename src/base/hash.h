/* hash.h - XXH3, compiled in from libxxhash's header, so that the library links with libc alone.
 * 128 bits identify content (state hashes, checksums of files); 64 bits key a name. Neither is for adversaries. */
#ifndef QE_BASE_HASH_H
#define QE_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

/* Only the layout of the state is wanted here; the functions are compiled once, in hash.c. */
#ifndef XXH_STATIC_LINKING_ONLY
#define XXH_STATIC_LINKING_ONLY
#endif
#include <xxhash.h>

enum { QE_HASH_TEXT_BYTES = 33 }; /* 32 hexadecimal digits and the terminator */

typedef struct qe_hash128 {
    uint64_t high, low;
} qe_hash128;

/* A running hash. 64-byte aligned: keep it on the stack, or in memory from aligned_alloc. Owns nothing. */
typedef struct qe_hash {
    XXH3_state_t state;
} qe_hash;

void qe_hash_init(qe_hash *hash);
/* data may be NULL when bytes is 0. How the input is cut into updates does not matter. */
void qe_hash_update(qe_hash *hash, const void *data, size_t bytes);
/* The hash of all bytes so far; more may follow. */
qe_hash128 qe_hash_digest(const qe_hash *hash);
/* One call for one piece of memory. */
qe_hash128 qe_hash_bytes(const void *data, size_t bytes);
/* Lower-case hexadecimal, high half first: what `xxhsum -H2` prints. */
void qe_hash_text(qe_hash128 digest, char text_out[QE_HASH_TEXT_BYTES]);

/* One tensor of fp32: a line "name F32 [shape]", then its little-endian bytes, so that two tensors never hash alike by
 * running into each other. rank 1 or 2. */
void qe_hash_tensor(qe_hash *hash, const char *name, uint32_t rank, const uint64_t *shape, const float *values);

/* 64 bits of a name. */
uint64_t qe_hash_name(const char *name);

#endif
