/* prng.c - Philox4x32-10 and what is drawn from it. */
#include "base/prng.h"

#include <math.h>

#include "base/assert.h"
#include "base/hash.h"

enum {
    PHILOX_ROUNDS = 10,
    FEISTEL_ROUNDS = 8, /* even for the smallest domains, where each half is one bit */
};

/* Multipliers and key increments of the paper. */
static const uint32_t multiplier_0 = 0xD2511F53U;
static const uint32_t multiplier_1 = 0xCD9E8D57U;
static const uint32_t weyl_0 = 0x9E3779B9U;
static const uint32_t weyl_1 = 0xBB67AE85U;

/* Set in the second counter word of a permutation: number sequences never reach that block index. */
static const uint32_t permutation_domain = 0x80000000U;

void qe_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words_out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t product_0 = (uint64_t)multiplier_0 * c0;
        uint64_t product_1 = (uint64_t)multiplier_1 * c2;
        c0 = (uint32_t)(product_1 >> 32U) ^ c1 ^ k0;
        c1 = (uint32_t)product_1;
        c2 = (uint32_t)(product_0 >> 32U) ^ c3 ^ k1;
        c3 = (uint32_t)product_0;
        k0 += weyl_0;
        k1 += weyl_1;
    }
    words_out[0] = c0;
    words_out[1] = c1;
    words_out[2] = c2;
    words_out[3] = c3;
}

qe_prng qe_prng_make(uint64_t seed, const char *name) {
    return (qe_prng){.seed = seed, .name_hash = qe_hash_name(name)};
}

/* Key = seed; counter = block index (low half), hash of the name (high half): two names never share a block. */
static void block_at(const qe_prng *prng, uint64_t block_index, uint32_t words_out[4]) {
    const uint32_t key[2] = {(uint32_t)prng->seed, (uint32_t)(prng->seed >> 32U)};
    const uint32_t counter[4] = {(uint32_t)block_index, (uint32_t)(block_index >> 32U), (uint32_t)prng->name_hash,
                                 (uint32_t)(prng->name_hash >> 32U)};
    qe_philox(counter, key, words_out);
}

/* Half `half` (0 or 1) of a block as one 64-bit number. */
static uint64_t half_of(const uint32_t words[4], uint64_t half) {
    return (uint64_t)words[2 * half + 1] << 32U | words[2 * half];
}

uint64_t qe_prng_u64(const qe_prng *prng, uint64_t index) {
    uint32_t words[4];
    block_at(prng, index / 2, words);
    return half_of(words, index % 2);
}

float qe_prng_uniform(const qe_prng *prng, uint64_t index) {
    uint32_t words[4];
    block_at(prng, index / 4, words);
    return (float)(words[index % 4] >> 8U) * 0x1p-24F;
}

/* Both normals of a block. The radius takes its uniform from (0, 1], so that its logarithm is finite. */
static void normal_pair(const qe_prng *prng, uint64_t block_index, double pair_out[2]) {
    const double two_pi = 6.283185307179586476925;
    uint32_t words[4];
    block_at(prng, block_index, words);
    double radius = sqrt(-2.0 * log((double)((half_of(words, 0) >> 11U) + 1U) * 0x1p-53));
    double angle = two_pi * ((double)(half_of(words, 1) >> 11U) * 0x1p-53);
    pair_out[0] = radius * cos(angle);
    pair_out[1] = radius * sin(angle);
}

float qe_prng_normal(const qe_prng *prng, uint64_t index) {
    double pair[2];
    normal_pair(prng, index / 2, pair);
    return (float)pair[index % 2];
}

void qe_prng_normal_fill(const qe_prng *prng, uint64_t first_index, float deviation, size_t count,
                         float *values_out) {
    double pair[2] = {0.0, 0.0};
    for (size_t k = 0; k < count; k++) {
        uint64_t index = first_index + k;
        if (k == 0 || index % 2 == 0) normal_pair(prng, index / 2, pair);
        values_out[k] = deviation * (float)pair[index % 2];
    }
}

/* Bits of each half of the smallest even-width domain that holds 0..count-1. */
static uint32_t half_bits_for(uint64_t count) {
    uint32_t half_bits = 1;
    while (half_bits < 32 && (count - 1) >> (2U * half_bits) != 0) half_bits++;
    return half_bits;
}

static uint64_t feistel(uint64_t seed, uint64_t epoch, uint32_t half_bits, uint64_t value) {
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32U)};
    uint32_t mask = UINT32_MAX >> (32U - half_bits);
    uint32_t left = (uint32_t)(value >> half_bits), right = (uint32_t)value & mask;
    for (uint32_t round = 0; round < FEISTEL_ROUNDS; round++) {
        const uint32_t counter[4] = {right, permutation_domain | round, (uint32_t)epoch, (uint32_t)(epoch >> 32U)};
        uint32_t words[4];
        qe_philox(counter, key, words);
        uint32_t next = left ^ (words[0] & mask);
        left = right;
        right = next;
    }
    return (uint64_t)left << half_bits | right;
}

uint64_t qe_permutation_at(uint64_t seed, uint64_t epoch, uint64_t count, uint64_t index) {
    QE_ASSERT(index < count);
    uint32_t half_bits = half_bits_for(count);
    /* The network permutes a domain less than four times `count`. Values outside are walked through, each having
     * one predecessor, so that what is left is a permutation of the inside. */
    uint64_t value = index;
    do {
        value = feistel(seed, epoch, half_bits, value);
    } while (value >= count);
    return value;
}
