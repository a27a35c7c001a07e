/* check_held.h - see check_held.cpp. */
#ifndef QE_TESTS_CUDA_CHECK_HELD_H
#define QE_TESTS_CUDA_CHECK_HELD_H

#include "../kernel_checks.h"

void check_held(checks &all);

#endif
