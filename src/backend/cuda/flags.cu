/* flags.cu - one thread that waits costs one slot of one multiprocessor; it sleeps between looks. */
#include "backend/cuda/flags.h"

#include "backend/cuda/launch.cuh"

enum { LOOK_EVERY_NS = 200 };

static __device__ int look(const int *word) {
    int value;
    asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

static __global__ void take(int *word, const int *aborted) {
    while (look(word) == 0 && look(aborted) == 0) __nanosleep(LOOK_EVERY_NS);
    if (look(aborted) == 0) asm volatile("st.relaxed.sys.global.b32 [%0], 0;" ::"l"(word) : "memory");
    __threadfence_system();
}

static __global__ void give(int *word) {
    __threadfence_system();
    asm volatile("st.release.sys.global.b32 [%0], 1;" ::"l"(word) : "memory");
}

extern "C" qe_status qe_cuda_flag_take(int *word, const int *aborted, cudaStream_t stream) {
    return launch(take, 1, 1, 0, 0, stream, word, aborted);
}

extern "C" qe_status qe_cuda_flag_give(int *word, cudaStream_t stream) {
    return launch(give, 1, 1, 0, 0, stream, word);
}
