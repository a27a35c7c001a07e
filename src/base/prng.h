/* prng.h - random numbers by counter: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as
 * easy as 1, 2, 3"). There is no state to carry: number i of (seed, name) is always the same, in whatever order, by
 * whichever thread and rank it is asked for. docs/numerics.md fixes the mapping. */
#ifndef QE_BASE_PRNG_H
#define QE_BASE_PRNG_H

#include <stddef.h>
#include <stdint.h>

/* One block: 128 random bits from a 128-bit counter and a 64-bit key, words least significant first. */
void qe_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words_out[4]);

/* A sequence of numbers. Plain value: copy it freely, share it between threads. Give each purpose its own name. */
typedef struct qe_prng {
    uint64_t seed;
    uint64_t name_hash;
} qe_prng;

qe_prng qe_prng_make(uint64_t seed, const char *name);

/* Number `index` of the sequence: 64 random bits; uniform in [0, 1) on a grid of 2^-24; standard normal
 * (Box-Muller in double, rounded once; |x| < 8.6). */
uint64_t qe_prng_u64(const qe_prng *prng, uint64_t index);
float qe_prng_uniform(const qe_prng *prng, uint64_t index);
float qe_prng_normal(const qe_prng *prng, uint64_t index);

/* values_out[k] = deviation * qe_prng_normal(first_index + k), at half the cost. */
void qe_prng_normal_fill(const qe_prng *prng, uint64_t first_index, float deviation, size_t count, float *values_out);

/* Where element `index` goes in a random order of 0..count-1. Stateless: a Feistel network walked until it lands
 * inside. Each (seed, epoch) is a bijection of its own.
 * Requires: index < count. */
uint64_t qe_permutation_at(uint64_t seed, uint64_t epoch, uint64_t count, uint64_t index);

#endif
