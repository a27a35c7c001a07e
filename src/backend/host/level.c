/* level.c - which kernels this processor can run. */
#include "backend/host/kernels.h"

extern const host_kernels qe_host_kernels_portable;
#ifdef QE_HOST_X86
extern const host_kernels qe_host_kernels_avx2, qe_host_kernels_avx512;
#endif

const host_kernels *qe_host_kernels_of(host_level level) {
    switch (level) {
        case HOST_LEVEL_PORTABLE: return &qe_host_kernels_portable;
#ifdef QE_HOST_X86
        case HOST_LEVEL_AVX2: return &qe_host_kernels_avx2;
        case HOST_LEVEL_AVX512: return &qe_host_kernels_avx512;
#else
        case HOST_LEVEL_AVX2:
        case HOST_LEVEL_AVX512: return NULL;
#endif
        case HOST_LEVELS: break;
    }
    return NULL;
}

host_level qe_host_level_best(void) {
#ifdef QE_HOST_X86
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return HOST_LEVEL_PORTABLE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")) return HOST_LEVEL_AVX2;
    if (!__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) return HOST_LEVEL_AVX2;
    return HOST_LEVEL_AVX512;
#else
    return HOST_LEVEL_PORTABLE;
#endif
}
