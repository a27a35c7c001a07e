/* The codec against double-precision arithmetic on the grid of values: ilogb, rint and ldexp, no bit tricks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/prng.h"
#include "qeffect/fp8.h"

enum { RANDOM_PATTERNS = 16 * 1000 * 1000 };

/* A format as the papers describe it: 1 + f/2^mantissa_bits times 2^e, e from exponent_min up. */
typedef struct grid {
    qe_format format;
    int mantissa_bits;
    int exponent_min;
    double max;
} grid;

static const grid grids[] = {
    {.format = QE_FORMAT_E4M3, .mantissa_bits = 3, .exponent_min = -6, .max = 448.0},
    {.format = QE_FORMAT_E5M2, .mantissa_bits = 2, .exponent_min = -14, .max = 57344.0},
};
static const grid bf16_grid = {.format = QE_FORMAT_BF16, .mantissa_bits = 7, .exponent_min = -126, .max = INFINITY};

static float float_from(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Nearest number of the grid, ties to the even multiple of the step. Every operation but rint is exact. */
static double grid_round(const grid *to, double magnitude) {
    int exponent = magnitude == 0.0 ? to->exponent_min : ilogb(magnitude);
    if (exponent < to->exponent_min) exponent = to->exponent_min;
    double step = ldexp(1.0, exponent - to->mantissa_bits);
    return rint(magnitude / step) * step;
}

/* Code of a number that lies on the grid. */
static uint32_t grid_code(const grid *to, double magnitude) {
    double normal_min = ldexp(1.0, to->exponent_min);
    if (magnitude < normal_min) return (uint32_t)ldexp(magnitude, to->mantissa_bits - to->exponent_min);
    int exponent = ilogb(magnitude);
    double fraction = ldexp(magnitude, -exponent) - 1.0;
    return ((uint32_t)(exponent - to->exponent_min + 1) << to->mantissa_bits) +
           (uint32_t)ldexp(fraction, to->mantissa_bits);
}

static uint8_t reference_encode(const grid *to, double value) {
    if (isnan(value)) return 0x7F;
    double magnitude = fabs(value);
    double rounded = magnitude >= to->max ? to->max : grid_round(to, magnitude);
    uint32_t code = grid_code(to, rounded);
    return (uint8_t)(signbit(value) ? code + 128 : code);
}

static double reference_decode(const grid *from, uint32_t code) {
    int steps = 1 << from->mantissa_bits;
    int exponent = (int)(code % 128) / steps;
    double fraction = (double)(code % (uint32_t)steps) / steps;
    double sign = code >= 128 ? -1.0 : 1.0;
    if (exponent == 0) return sign * fraction * ldexp(1.0, from->exponent_min);
    return sign * (1.0 + fraction) * ldexp(1.0, from->exponent_min + exponent - 1);
}

/* The same answer by trying every code: nearest, and of two equally near the even one. */
static uint8_t searched_encode(const grid *to, double value) {
    if (isnan(value)) return 0x7F;
    double magnitude = fmin(fabs(value), to->max);
    uint32_t best = 0;
    for (uint32_t code = 0; code < 128 && reference_decode(to, code) <= to->max; code++) {
        double distance = fabs(reference_decode(to, code) - magnitude);
        double best_distance = fabs(reference_decode(to, best) - magnitude);
        if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
    }
    return (uint8_t)(signbit(value) ? best + 128 : best);
}

static void report(const char *what, float value, unsigned found, unsigned expected) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    print_error("%s of %a (0x%08x): found 0x%x, expected 0x%x\n", what, (double)value, bits, found, expected);
}

/* 1 and a line when the codec disagrees with the reference. */
static unsigned encode_mismatch(const grid *to, float value) {
    uint8_t found = qe_fp8_encode(to->format, value);
    uint8_t expected = reference_encode(to, (double)value);
    if (found == expected) return 0;
    report(to->format == QE_FORMAT_E4M3 ? "E4M3" : "E5M2", value, found, expected);
    return 1;
}

static void every_bf16_value_encodes_as_double_arithmetic_and_as_a_search_say(void **state) {
    (void)state;
    for (size_t g = 0; g < 2; g++) {
        for (uint32_t code = 0; code < 65536; code++) {
            float value = float_from(code << 16);
            assert_int_equal(encode_mismatch(&grids[g], value), 0);
            assert_int_equal(qe_fp8_encode(grids[g].format, value), searched_encode(&grids[g], (double)value));
        }
    }
}

static void sixteen_million_random_fp32_patterns_encode_as_double_arithmetic_says(void **state) {
    (void)state;
    qe_prng prng = qe_prng_make(20110101, "codec patterns");
    for (uint64_t i = 0; i < RANDOM_PATTERNS / 2; i++) {
        uint64_t both = qe_prng_u64(&prng, i);
        for (unsigned half = 0; half < 2; half++) {
            float value = float_from((uint32_t)(both >> (32 * half)));
            unsigned wrong = encode_mismatch(&grids[0], value) + encode_mismatch(&grids[1], value);
            assert_int_equal(wrong, 0);
        }
    }
}

/* Random patterns seldom fall into the narrow range of a format: here all of them do. */
static void four_million_patterns_of_the_formats_own_range_encode_as_double_arithmetic_says(void **state) {
    (void)state;
    qe_prng prng = qe_prng_make(20110101, "codec range");
    for (uint64_t i = 0; i < 4000000; i++) {
        uint64_t bits = qe_prng_u64(&prng, i);
        uint32_t exponent = 127U - 18U + (uint32_t)((bits >> 32) % 36U); /* 2^-18 to 2^17 */
        uint32_t pattern = ((uint32_t)bits & 0x807FFFFFU) | exponent << 23;
        float value = float_from(pattern);
        unsigned wrong = encode_mismatch(&grids[0], value) + encode_mismatch(&grids[1], value);
        assert_int_equal(wrong, 0);
    }
}

static void midpoints_go_to_even_and_their_neighbours_to_the_nearer_side(void **state) {
    (void)state;
    for (size_t g = 0; g < 2; g++) {
        const grid *to = &grids[g];
        uint8_t code_max = qe_fp8_encode(to->format, FLT_MAX);
        for (uint32_t code = 0; code < code_max; code++) {
            float middle = (float)((reference_decode(to, code) + reference_decode(to, code + 1)) / 2.0);
            uint32_t even = code % 2 == 0 ? code : code + 1;
            assert_int_equal(qe_fp8_encode(to->format, middle), even);
            assert_int_equal(qe_fp8_encode(to->format, -middle), even + 128);
            assert_int_equal(qe_fp8_encode(to->format, nextafterf(middle, 0.0F)), code);
            assert_int_equal(qe_fp8_encode(to->format, nextafterf(middle, FLT_MAX)), code + 1);
        }
    }
}

static void values_beyond_the_largest_and_infinities_saturate_with_their_sign(void **state) {
    (void)state;
    const float beyond[] = {1e5F, FLT_MAX, INFINITY};
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(qe_fp8_encode(QE_FORMAT_E4M3, beyond[i]), 0x7E);
        assert_int_equal(qe_fp8_encode(QE_FORMAT_E4M3, -beyond[i]), 0xFE);
        assert_int_equal(qe_fp8_encode(QE_FORMAT_E5M2, beyond[i]), 0x7B);
        assert_int_equal(qe_fp8_encode(QE_FORMAT_E5M2, -beyond[i]), 0xFB);
    }
    assert_int_equal(qe_fp8_encode(QE_FORMAT_E4M3, nextafterf(448.0F, FLT_MAX)), 0x7E);
    assert_int_equal(qe_fp8_encode(QE_FORMAT_E4M3, 464.1F), 0x7E); /* an unsaturated rounding would give 480 */
}

static void nan_encodes_as_7f_whatever_its_sign_and_payload(void **state) {
    (void)state;
    const uint32_t patterns[] = {0x7FC00000U, 0xFFC00000U, 0x7F800001U, 0xFF800001U, 0x7FFFFFFFU, 0xFFFFFFFFU};
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        assert_int_equal(qe_fp8_encode(QE_FORMAT_E4M3, float_from(patterns[i])), 0x7F);
        assert_int_equal(qe_fp8_encode(QE_FORMAT_E5M2, float_from(patterns[i])), 0x7F);
    }
}

static void zeros_and_what_underflows_keep_their_sign(void **state) {
    (void)state;
    for (size_t g = 0; g < 2; g++) {
        qe_format format = grids[g].format;
        assert_int_equal(qe_fp8_encode(format, 0.0F), 0x00);
        assert_int_equal(qe_fp8_encode(format, -0.0F), 0x80);
        assert_int_equal(qe_fp8_encode(format, FLT_TRUE_MIN), 0x00);
        assert_int_equal(qe_fp8_encode(format, -FLT_TRUE_MIN), 0x80);
        assert_true(signbit(qe_fp8_decode(format, 0x80)));
    }
}

static void all_256_codes_of_both_formats_decode_by_the_formula(void **state) {
    (void)state;
    for (size_t g = 0; g < 2; g++) {
        for (uint32_t code = 0; code < 256; code++) {
            float found = qe_fp8_decode(grids[g].format, (uint8_t)code);
            double expected = reference_decode(&grids[g], code);
            if (fabs(expected) <= grids[g].max) {
                assert_true((double)found == expected && !signbit(found) == !signbit(expected));
            } else if (grids[g].format == QE_FORMAT_E5M2 && code % 128 == 0x7C) {
                assert_true(isinf(found) && !signbit(found) == (code < 128));
            } else {
                assert_true(isnan(found));
            }
        }
    }
}

static void every_finite_code_survives_decode_and_encode(void **state) {
    (void)state;
    for (size_t g = 0; g < 2; g++) {
        for (uint32_t code = 0; code < 256; code++) {
            float value = qe_fp8_decode(grids[g].format, (uint8_t)code);
            if (isfinite(value)) assert_int_equal(qe_fp8_encode(grids[g].format, value), code);
        }
    }
}

static uint16_t reference_bf16(double value) {
    double magnitude = fabs(value);
    uint32_t code = 0x7F80;
    if (!isinf(magnitude)) {
        double rounded = grid_round(&bf16_grid, magnitude);
        code = rounded >= 0x1p128 ? 0x7F80 : grid_code(&bf16_grid, rounded);
    }
    return (uint16_t)(signbit(value) ? code | 0x8000U : code);
}

static void sixteen_million_random_fp32_patterns_round_to_bf16_as_double_arithmetic_says(void **state) {
    (void)state;
    qe_prng prng = qe_prng_make(20110101, "bf16 patterns");
    for (uint64_t i = 0; i < RANDOM_PATTERNS / 2; i++) {
        uint64_t both = qe_prng_u64(&prng, i);
        for (unsigned half = 0; half < 2; half++) {
            float value = float_from((uint32_t)(both >> (32 * half)));
            if (isnan(value)) continue;
            uint16_t found = qe_bf16_encode(value);
            uint16_t expected = reference_bf16((double)value);
            if (found != expected) report("bf16", value, found, expected);
            assert_int_equal(found, expected);
        }
    }
}

static void every_bf16_value_survives_decode_and_encode_and_nan_becomes_quiet(void **state) {
    (void)state;
    for (uint32_t code = 0; code < 65536; code++) {
        float value = qe_bf16_decode((uint16_t)code);
        uint32_t expected = isnan(value) ? code | 0x0040U : code;
        assert_int_equal(qe_bf16_encode(value), expected);
    }
    assert_int_equal(qe_bf16_encode(FLT_MAX), 0x7F80);                  /* rounds up to Inf */
    assert_int_equal(qe_bf16_encode(float_from(0x3F808000U)), 0x3F80);  /* tie, to even below */
    assert_int_equal(qe_bf16_encode(float_from(0x3F818000U)), 0x3F82);  /* tie, to even above */
    assert_true(isnan(qe_bf16_decode(qe_bf16_encode(float_from(0x7F800001U)))));
}

/* r is 1/x correctly rounded when neither neighbour is nearer. In double r*x is exact (48 bits), and so is its
 * distance to 1, for 1/2 <= r*x <= 2. */
static void assert_correct_reciprocal(float x) {
    float r = qe_scale_inverse(x);
    double miss = fabs(1.0 - (double)r * (double)x);
    double below = fabs(1.0 - (double)nextafterf(r, 0.0F) * (double)x);
    double above = fabs(1.0 - (double)nextafterf(r, INFINITY) * (double)x);
    if (miss > below || miss > above) print_error("1/%a is not %a\n", (double)x, (double)r);
    assert_true(miss <= below && miss <= above);
    assert_true(r == 1.0F / x);
    assert_true(r == (float)(1.0L / (long double)x));
}

static void scale_inverse_is_correctly_rounded_also_where_it_is_subnormal(void **state) {
    (void)state;
    qe_prng prng = qe_prng_make(7, "reciprocals");
    for (uint64_t i = 0; i < 1000000; i++) {
        uint64_t bits = qe_prng_u64(&prng, i);
        uint32_t mantissa = (uint32_t)bits & 0x7FFFFFU;
        uint32_t any = 1U + (uint32_t)((bits >> 32) % 254U);
        assert_correct_reciprocal(float_from(any << 23 | mantissa));
        uint32_t large = 252U + (uint32_t)((bits >> 40) % 3U); /* 2^125 and up: 1/x is subnormal or next to it */
        assert_correct_reciprocal(float_from(large << 23 | mantissa));
    }
    assert_correct_reciprocal(FLT_MAX);
    assert_true(qe_scale_inverse(FLT_MAX) > 0.0F && qe_scale_inverse(FLT_MAX) < FLT_MIN);
    for (int e = -126; e <= 127; e++) assert_true((double)qe_scale_inverse(ldexpf(1.0F, e)) == ldexp(1.0, -e));
}

static void scale_from_amax_follows_the_published_cases(void **state) {
    (void)state;
    for (int power = 0; power < 2; power++) {
        assert_true(qe_scale_from_amax(0.0F, 448.0F, power) == 1.0F);
        assert_true(qe_scale_from_amax(INFINITY, 448.0F, power) == 1.0F);
        assert_true(qe_scale_from_amax(NAN, 448.0F, power) == 1.0F);
    }
    assert_true(qe_scale_from_amax(1e-40F, 448.0F, 0) == FLT_MAX);
    assert_true(qe_scale_from_amax(1e-40F, 448.0F, 1) == 0x1p127F);
    assert_true(qe_scale_from_amax(7.0F, 448.0F, 0) == 64.0F);
    assert_true(qe_scale_from_amax(7.0F, 448.0F, 1) == 64.0F);
    assert_true(qe_scale_from_amax(8.0F, 57344.0F, 0) == 7168.0F);
    assert_true(qe_scale_from_amax(3.0F, 448.0F, 0) == 448.0F / 3.0F);
    assert_true(qe_scale_from_amax(3.0F, 448.0F, 1) == 128.0F);
}

static void a_power_of_two_scale_is_the_largest_that_keeps_amax_in_range(void **state) {
    (void)state;
    qe_prng prng = qe_prng_make(7, "block amax");
    for (uint64_t i = 0; i < 200000; i++) {
        uint32_t bits = (uint32_t)qe_prng_u64(&prng, i) & 0x7FFFFFFFU;
        float amax = float_from(bits % 0x7F000000U + 0x00800000U); /* normal numbers */
        double quotient = 448.0 / (double)amax;
        if (quotient >= 0x1p127 || quotient < 0x1p-125) continue; /* clamped; the last cases are above */
        double scale = (double)qe_scale_from_amax(amax, 448.0F, 1);
        int exponent;
        assert_true(frexp(scale, &exponent) == 0.5);
        assert_true(scale * (double)amax <= 448.0);
        /* The fp32 quotient never rounds across a power of two, so clearing its mantissa loses less than half. */
        assert_true(2.0 * scale * (double)amax > 448.0);
    }
}

static void formats_know_their_largest_value_and_their_size(void **state) {
    (void)state;
    assert_true(qe_format_max(QE_FORMAT_E4M3) == 448.0F);
    assert_true(qe_format_max(QE_FORMAT_E5M2) == 57344.0F);
    assert_true(qe_format_max(QE_FORMAT_BF16) == 0.0F);
    assert_true(qe_format_max(QE_FORMAT_FP32) == 0.0F);
    assert_int_equal(qe_format_bytes(QE_FORMAT_E4M3), 1);
    assert_int_equal(qe_format_bytes(QE_FORMAT_E5M2), 1);
    assert_int_equal(qe_format_bytes(QE_FORMAT_BF16), 2);
    assert_int_equal(qe_format_bytes(QE_FORMAT_FP32), 4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_bf16_value_encodes_as_double_arithmetic_and_as_a_search_say),
        cmocka_unit_test(sixteen_million_random_fp32_patterns_encode_as_double_arithmetic_says),
        cmocka_unit_test(four_million_patterns_of_the_formats_own_range_encode_as_double_arithmetic_says),
        cmocka_unit_test(midpoints_go_to_even_and_their_neighbours_to_the_nearer_side),
        cmocka_unit_test(values_beyond_the_largest_and_infinities_saturate_with_their_sign),
        cmocka_unit_test(nan_encodes_as_7f_whatever_its_sign_and_payload),
        cmocka_unit_test(zeros_and_what_underflows_keep_their_sign),
        cmocka_unit_test(all_256_codes_of_both_formats_decode_by_the_formula),
        cmocka_unit_test(every_finite_code_survives_decode_and_encode),
        cmocka_unit_test(sixteen_million_random_fp32_patterns_round_to_bf16_as_double_arithmetic_says),
        cmocka_unit_test(every_bf16_value_survives_decode_and_encode_and_nan_becomes_quiet),
        cmocka_unit_test(scale_inverse_is_correctly_rounded_also_where_it_is_subnormal),
        cmocka_unit_test(scale_from_amax_follows_the_published_cases),
        cmocka_unit_test(a_power_of_two_scale_is_the_largest_that_keeps_amax_in_range),
        cmocka_unit_test(formats_know_their_largest_value_and_their_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
