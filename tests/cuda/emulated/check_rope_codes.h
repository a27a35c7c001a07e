/* check_rope_codes.h - see check_rope_codes.cpp. */
#ifndef QE_TESTS_CUDA_CHECK_ROPE_CODES_H
#define QE_TESTS_CUDA_CHECK_ROPE_CODES_H

#include "../kernel_checks.h"

void check_rope_codes(checks &all);

#endif
