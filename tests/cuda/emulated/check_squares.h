/* check_squares.h - see check_squares.cpp. */
#ifndef QE_TESTS_CUDA_CHECK_SQUARES_H
#define QE_TESTS_CUDA_CHECK_SQUARES_H

#include "../kernel_checks.h"

void check_squares(checks &all);

#endif
