/* hash.c - the only file that compiles XXH3. */
#define XXH_INLINE_ALL
#include "base/hash.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"

void qe_hash_init(qe_hash *hash) {
    QE_ASSERT((uintptr_t)hash % 64 == 0);
    XXH_errorcode code = XXH3_128bits_reset(&hash->state);
    QE_ASSERT(code == XXH_OK);
}

void qe_hash_update(qe_hash *hash, const void *data, size_t bytes) {
    if (bytes == 0) return;
    XXH_errorcode code = XXH3_128bits_update(&hash->state, data, bytes);
    QE_ASSERT(code == XXH_OK);
}

static qe_hash128 from_xxh(XXH128_hash_t hash) {
    return (qe_hash128){.high = hash.high64, .low = hash.low64};
}

qe_hash128 qe_hash_digest(const qe_hash *hash) {
    return from_xxh(XXH3_128bits_digest(&hash->state));
}

qe_hash128 qe_hash_bytes(const void *data, size_t bytes) {
    return from_xxh(XXH3_128bits(bytes == 0 ? "" : data, bytes));
}

void qe_hash_text(qe_hash128 digest, char text_out[QE_HASH_TEXT_BYTES]) {
    snprintf(text_out, QE_HASH_TEXT_BYTES, "%016" PRIx64 "%016" PRIx64, digest.high, digest.low);
}

void qe_hash_tensor(qe_hash *hash, const char *name, uint32_t rank, const uint64_t *shape, const float *values) {
    char tail[64];
    QE_ASSERT(rank == 1 || rank == 2);
    uint64_t columns = shape[rank - 1], rows = rank == 1 ? 1 : shape[0];
    int length = rank == 1 ? snprintf(tail, sizeof tail, " F32 [%" PRIu64 "]\n", columns)
                           : snprintf(tail, sizeof tail, " F32 [%" PRIu64 ",%" PRIu64 "]\n", rows, columns);
    QE_ASSERT(length > 0 && (size_t)length < sizeof tail);
    qe_hash_update(hash, name, strlen(name));
    qe_hash_update(hash, tail, (size_t)length);
    qe_hash_update(hash, values, (size_t)(rows * columns) * sizeof *values);
}

uint64_t qe_hash_name(const char *name) {
    return XXH3_64bits(name, strlen(name));
}
