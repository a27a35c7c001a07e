/* check_tall.h - see check_tall.cpp. */
#ifndef QE_CUDA_CHECK_TALL_H
#define QE_CUDA_CHECK_TALL_H

#include "../kernel_checks.h"
#include "emulator.h"

void check_tall(checks &all);

#endif
