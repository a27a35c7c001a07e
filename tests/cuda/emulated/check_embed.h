/* check_embed.h - see check_embed.cpp. */
#ifndef QE_TESTS_CUDA_CHECK_EMBED_H
#define QE_TESTS_CUDA_CHECK_EMBED_H

#include "../kernel_checks.h"

void check_embed(checks &all);

#endif
