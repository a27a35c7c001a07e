/* align.h - sizes rounded up to where the next thing may lie. */
#ifndef QE_BASE_ALIGN_H
#define QE_BASE_ALIGN_H

#include <stdint.h>
#include "qeffect/limits.h"

/* Requires: bytes <= UINT64_MAX - QE_ALIGN_BYTES. */
static inline uint64_t qe_aligned(uint64_t bytes) {
    return (bytes + QE_ALIGN_BYTES - 1) / QE_ALIGN_BYTES * QE_ALIGN_BYTES;
}

#endif
