/* check_units.h - see check_units.cpp. */
#ifndef QE_TESTS_CUDA_CHECK_UNITS_H
#define QE_TESTS_CUDA_CHECK_UNITS_H

#include "../kernel_checks.h"

void check_units(checks &all);

#endif
