/* The exponential of the kernels against libm's in double. It is included as the portable copy compiles it; the other
 * levels give the same bits (test_levels). */
#define QE_LEVEL portable
#include "backend/host/kernels/level.h"
#include "devices.h"

static double ulps_apart(float x) {
    const double expected = exp((double)x);
    const float nearest = (float)expected, above = nextafterf(nearest, INFINITY);
    return fabs((double)exp_lane(x) - expected) / ((double)above - (double)nearest);
}

static void the_exponential_is_within_two_units_in_the_last_place(void **state) {
    (void)state;
    double worst = 0.0;
    for (float x = -87.3f; x < 88.3f; x += 1.3e-4f) worst = fmax(worst, ulps_apart(x));
    uint64_t seed = 3;
    for (int i = 0; i < 500000; ++i) worst = fmax(worst, ulps_apart(random_float(&seed)));
    print_message("worst: %.2f units in the last place\n", worst);
    assert_true(worst < 2.0);
    assert_true(exp_lane(0.0f) == 1.0f);
}

static void outside_its_range_the_exponential_is_finite_and_nan_stays_nan(void **state) {
    (void)state;
    assert_true(exp_lane(-INFINITY) > 0.0f);
    assert_true(exp_lane(-INFINITY) < 2e-38f);
    assert_true(exp_lane(INFINITY) < INFINITY);
    assert_true(exp_lane(INFINITY) > 2e38f);
    assert_true(isnan(exp_lane(NAN)) != 0);
    for (uint32_t payload = 1; payload < 0x800000; payload += 4099) {
        assert_true(isnan(exp_lane(float_from(0x7F800000u + payload))) != 0);
        assert_true(isnan(exp_lane(float_from(0xFF800000u + payload))) != 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_exponential_is_within_two_units_in_the_last_place),
        cmocka_unit_test(outside_its_range_the_exponential_is_finite_and_nan_stays_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
