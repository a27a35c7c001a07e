/* Philox against the known answers that its authors publish (Random123, tests/kat_vectors), and what is drawn from it
 * against what its law says. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/prng.h"

typedef struct answer {
    uint32_t counter[4], key[2], words[4];
} answer;

static const answer answers[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

static void philox_gives_the_published_answers(void **state) {
    (void)state;
    for (size_t i = 0; i < 3; i++) {
        uint32_t words[4];
        qe_philox(answers[i].counter, answers[i].key, words);
        assert_memory_equal(words, answers[i].words, sizeof words);
    }
}

static void numbers_come_from_the_documented_counter_and_key(void **state) {
    (void)state;
    uint64_t seed = 0x0123456789ABCDEFU, name = qe_hash_name("model.embed_tokens.weight"), index = 0x500000003U;
    qe_prng prng = qe_prng_make(seed, "model.embed_tokens.weight");
    const uint32_t key[2] = {0x89ABCDEFU, 0x01234567U};
    const uint32_t half[4] = {0x80000001U, 0x2U, (uint32_t)name, (uint32_t)(name >> 32)};    /* index / 2 */
    const uint32_t quarter[4] = {0x40000000U, 0x1U, (uint32_t)name, (uint32_t)(name >> 32)}; /* index / 4 */
    uint32_t words[4];
    qe_philox(half, key, words);
    assert_true(qe_prng_u64(&prng, index) == ((uint64_t)words[3] << 32 | words[2]));
    assert_true(qe_prng_u64(&prng, index - 1) == ((uint64_t)words[1] << 32 | words[0]));
    qe_philox(quarter, key, words);
    assert_true((double)qe_prng_uniform(&prng, index) == floor((double)words[3] / 256.0) / 16777216.0);
}

static void a_number_depends_on_seed_name_and_index_alone(void **state) {
    (void)state;
    qe_prng a = qe_prng_make(1, "a"), b = qe_prng_make(1, "b"), other_seed = qe_prng_make(2, "a");
    unsigned equal = 0;
    for (uint64_t i = 1000; i-- > 0;) {
        qe_prng again = qe_prng_make(1, "a");
        assert_true(qe_prng_u64(&a, i) == qe_prng_u64(&again, i));
        assert_true(qe_prng_normal(&a, i) == qe_prng_normal(&again, i));
        if (qe_prng_u64(&a, i) == qe_prng_u64(&b, i)) equal++;
        if (qe_prng_u64(&a, i) == qe_prng_u64(&other_seed, i)) equal++;
        if (qe_prng_u64(&a, i) == qe_prng_u64(&a, i + 1)) equal++;
    }
    assert_int_equal(equal, 0);
}

static void filling_gives_the_same_normals_from_any_start_and_length(void **state) {
    (void)state;
    qe_prng prng = qe_prng_make(3, "fill");
    for (uint64_t first = 0; first < 4; first++) {
        for (size_t count = 0; count < 9; count++) {
            float values[10];
            values[count] = 77.0F;
            qe_prng_normal_fill(&prng, first, 0.02F, count, values);
            for (size_t k = 0; k < count; k++) assert_true(values[k] == 0.02F * qe_prng_normal(&prng, first + k));
            assert_true(values[count] == 77.0F);
        }
    }
}

static void uniforms_lie_in_the_unit_interval_and_fill_it_evenly(void **state) {
    (void)state;
    enum { COUNT = 1000000, CELLS = 100 };
    qe_prng prng = qe_prng_make(4, "uniform");
    unsigned cells[CELLS] = {0};
    for (uint64_t i = 0; i < COUNT; i++) {
        float u = qe_prng_uniform(&prng, i);
        assert_true(u >= 0.0F && u < 1.0F);
        cells[(size_t)(u * CELLS)]++;
    }
    double chi_square = 0.0, expected = (double)COUNT / CELLS;
    for (size_t c = 0; c < CELLS; c++) chi_square += pow(cells[c] - expected, 2.0) / expected;
    assert_true(chi_square > 55.0 && chi_square < 150.0); /* 99 degrees of freedom: beyond 1 in 1000 on either side */
}

static int compare_floats(const void *left, const void *right) {
    float l = *(const float *)left, r = *(const float *)right;
    return (l > r) - (l < r);
}

static void normals_follow_the_normal_law(void **state) {
    (void)state;
    enum { COUNT = 400000 };
    float *values = malloc(COUNT * sizeof *values);
    assert_non_null(values);
    qe_prng prng = qe_prng_make(5, "normal");
    qe_prng_normal_fill(&prng, 0, 1.0F, COUNT, values);
    double sum = 0.0, squares = 0.0, pairs = 0.0;
    for (size_t i = 0; i < COUNT; i++) {
        sum += (double)values[i];
        squares += (double)values[i] * (double)values[i];
        pairs += (double)values[i] * (double)values[i ^ 1U];
    }
    assert_true(fabs(sum / COUNT) < 5.0 / sqrt(COUNT));
    assert_true(fabs(squares / COUNT - 1.0) < 5.0 * sqrt(2.0 / COUNT));
    assert_true(fabs(pairs / COUNT) < 5.0 * sqrt(2.0 / COUNT)); /* the two of a block are independent */
    qsort(values, COUNT, sizeof *values, compare_floats);
    double widest = 0.0; /* Kolmogorov-Smirnov */
    for (size_t i = 0; i < COUNT; i++) {
        double law = 0.5 * erfc(-(double)values[i] / sqrt(2.0));
        widest = fmax(widest, fabs(law - (double)i / COUNT));
    }
    assert_true(widest * sqrt(COUNT) < 1.95); /* 1 in 1000 */
    free(values);
}

static void assert_bijection(uint64_t seed, uint64_t epoch, uint64_t count) {
    unsigned char *seen = calloc(count, 1);
    assert_non_null(seen);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t to = qe_permutation_at(seed, epoch, count, i);
        assert_true(to < count);
        assert_int_equal(seen[to], 0);
        seen[to] = 1;
    }
    free(seen);
}

static void a_permutation_hits_every_place_once(void **state) {
    (void)state;
    for (uint64_t count = 1; count <= 300; count++) assert_bijection(count, 7 * count, count);
    const uint64_t larger[] = {1023, 1024, 1025, 4096, 4097, 65535, 65536, 65537, 100003};
    for (size_t i = 0; i < sizeof larger / sizeof larger[0]; i++) assert_bijection(42, i, larger[i]);
}

static void a_permutation_of_more_than_32_bits_stays_inside_and_keeps_places_apart(void **state) {
    (void)state;
    const uint64_t counts[] = {0x100000001U, 1U << 31, 0x8000000000000001U, UINT64_MAX};
    for (size_t c = 0; c < 4; c++) {
        uint64_t before = UINT64_MAX;
        for (uint64_t i = 0; i < 1000; i++) {
            uint64_t to = qe_permutation_at(1, 1, counts[c], i);
            assert_true(to < counts[c]);
            assert_true(to != before);
            before = to;
        }
    }
}

static void epochs_and_seeds_shuffle_differently(void **state) {
    (void)state;
    unsigned same_epoch = 0, same_seed = 0, fixed = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        uint64_t to = qe_permutation_at(1, 0, 1000, i);
        same_epoch += to == qe_permutation_at(1, 1, 1000, i);
        same_seed += to == qe_permutation_at(2, 0, 1000, i);
        fixed += to == i;
    }
    assert_true(same_epoch < 10 && same_seed < 10 && fixed < 10); /* one expected of each */
}

static void over_many_epochs_an_element_visits_all_places_evenly(void **state) {
    (void)state;
    enum { PLACES = 10, EPOCHS = 20000 };
    for (uint64_t element = 0; element < PLACES; element += 9) {
        unsigned visits[PLACES] = {0};
        for (uint64_t epoch = 0; epoch < EPOCHS; epoch++) visits[qe_permutation_at(11, epoch, PLACES, element)]++;
        double chi_square = 0.0, expected = (double)EPOCHS / PLACES;
        for (size_t p = 0; p < PLACES; p++) chi_square += pow(visits[p] - expected, 2.0) / expected;
        assert_true(chi_square < 27.9); /* 9 degrees of freedom: 1 in 1000 */
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_published_answers),
        cmocka_unit_test(numbers_come_from_the_documented_counter_and_key),
        cmocka_unit_test(a_number_depends_on_seed_name_and_index_alone),
        cmocka_unit_test(filling_gives_the_same_normals_from_any_start_and_length),
        cmocka_unit_test(uniforms_lie_in_the_unit_interval_and_fill_it_evenly),
        cmocka_unit_test(normals_follow_the_normal_law),
        cmocka_unit_test(a_permutation_hits_every_place_once),
        cmocka_unit_test(a_permutation_of_more_than_32_bits_stays_inside_and_keeps_places_apart),
        cmocka_unit_test(epochs_and_seeds_shuffle_differently),
        cmocka_unit_test(over_many_epochs_an_element_visits_all_places_evenly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
