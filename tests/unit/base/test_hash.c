/* XXH3-128 against the known answers of xxHash's own sanity test (inputs: its generator; seed 0). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"

enum { INPUT_BYTES = 4096 };

/* The input buffer of xxHash's sanity test. */
static void fill_input(unsigned char input[INPUT_BYTES]) {
    uint64_t generator = 2654435761U;
    for (size_t i = 0; i < INPUT_BYTES; i++) {
        input[i] = (unsigned char)(generator >> 56);
        generator *= 11400714785074694797U;
    }
}

typedef struct answer {
    size_t bytes;
    uint64_t low, high;
} answer;

static const answer answers[] = {
    {0, 0x6001C324468D497FU, 0x99AA06D3014798D8U},    {1, 0xC44BDFF4074EECDBU, 0xA6CD5E9392000F6AU},
    {6, 0x3E7039BDDA43CFC6U, 0x082AFE0B8162D12AU},    {12, 0x061A192713F69AD9U, 0x6E3EFD8FC7802B18U},
    {24, 0x1E7044D28B1B901DU, 0x0CE966E4678D3761U},   {48, 0xF942219AED80F67BU, 0xA002AC4E5478227EU},
    {81, 0x5E8BAFB9F95FB803U, 0x4952F58181AB0042U},   {222, 0xF1AEBD597CEC6B3AU, 0x337E09641B948717U},
    {403, 0xCDEB804D65C6DEA4U, 0x1B6DE21E332DD73DU},  {512, 0x617E49599013CB6BU, 0x18D2D110DCC9BCA1U},
    {2048, 0xDD59E2C3A5F038E0U, 0xF736557FD47073A5U}, {2367, 0xCB37AEB9E5D361EDU, 0xE89C0F6FF369B427U},
};

static void known_answers_hold_in_one_call_and_in_pieces(void **state) {
    (void)state;
    unsigned char input[INPUT_BYTES];
    fill_input(input);
    for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++) {
        qe_hash128 whole = qe_hash_bytes(input, answers[i].bytes);
        assert_true(whole.low == answers[i].low && whole.high == answers[i].high);
        for (size_t piece = 1; piece < 300; piece = piece * 3 + 1) {
            qe_hash hash;
            qe_hash_init(&hash);
            for (size_t at = 0; at < answers[i].bytes; at += piece) {
                size_t left = answers[i].bytes - at;
                qe_hash_update(&hash, input + at, left < piece ? left : piece);
            }
            qe_hash128 digest = qe_hash_digest(&hash);
            assert_true(digest.low == answers[i].low && digest.high == answers[i].high);
        }
    }
}

static void the_text_of_an_empty_input_is_the_published_one(void **state) {
    (void)state;
    char text[QE_HASH_TEXT_BYTES];
    qe_hash_text(qe_hash_bytes(NULL, 0), text);
    assert_string_equal(text, "99aa06d3014798d86001c324468d497f");
    qe_hash_text((qe_hash128){.high = 1, .low = 0xAB}, text);
    assert_string_equal(text, "000000000000000100000000000000ab");
}

static void a_digest_may_be_taken_on_the_way(void **state) {
    (void)state;
    unsigned char input[INPUT_BYTES];
    fill_input(input);
    qe_hash hash;
    qe_hash_init(&hash);
    qe_hash_update(&hash, NULL, 0);
    qe_hash_update(&hash, input, 512);
    assert_true(qe_hash_digest(&hash).low == 0x617E49599013CB6BU);
    qe_hash_update(&hash, input + 512, 2048 - 512);
    assert_true(qe_hash_digest(&hash).low == 0xDD59E2C3A5F038E0U);
}

static void a_hash_may_live_in_aligned_memory_and_be_used_again(void **state) {
    (void)state;
    qe_hash *hash = aligned_alloc(64, sizeof *hash);
    assert_non_null(hash);
    for (int round = 0; round < 2; round++) {
        qe_hash_init(hash);
        qe_hash_update(hash, "abc", 3);
        qe_hash128 expected = qe_hash_bytes("abc", 3);
        qe_hash128 found = qe_hash_digest(hash);
        assert_true(found.low == expected.low && found.high == expected.high);
    }
    free(hash);
}

static void names_hash_by_their_characters_alone(void **state) {
    (void)state;
    assert_true(qe_hash_name("") == 0x2D06800538D394C2U); /* XXH3-64 of nothing, seed 0 */
    char copy[] = "lm_head.weight";
    assert_true(qe_hash_name(copy) == qe_hash_name("lm_head.weight"));
    assert_true(qe_hash_name("a") != qe_hash_name("b"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers_hold_in_one_call_and_in_pieces),
        cmocka_unit_test(the_text_of_an_empty_input_is_the_published_one),
        cmocka_unit_test(a_digest_may_be_taken_on_the_way),
        cmocka_unit_test(a_hash_may_live_in_aligned_memory_and_be_used_again),
        cmocka_unit_test(names_hash_by_their_characters_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
