/* emulator.h - runs kernels on a processor, one fiber per thread, so that their indices, bounds and barriers can be
 * tested where there is no GPU. Fibers of a cluster take turns in a random order; a kernel whose threads all wait is
 * reported. It knows nothing of memory ordering: what one fiber wrote, all others see. Only copies into shared memory
 * come as late as they may: when the fiber that asked for them waits. */
#ifndef QE_TESTS_CUDA_EMULATOR_H
#define QE_TESTS_CUDA_EMULATOR_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include <functional>

struct emulated_thread {
    uint3 thread, block;
    dim3 block_dim, grid_dim;
};

/* Who asks. Valid inside a kernel only. */
const emulated_thread &emulator_self();

/* Blocks below each other that launchers are told a grid may have: as many as on a device (0), or fewer, so that small
 * shapes have too many. */
uint32_t emulator_down_max();
void emulator_down_set(uint32_t blocks);

void emulator_run(dim3 grid, uint32_t threads, uint32_t cluster, const std::function<void()> &kernel);
uint64_t emulator_runs(); /* that there were */

void emulator_warp_barrier(uint32_t mask);
void emulator_block_barrier();
void emulator_some_barrier(uint32_t id, uint32_t threads); /* so many of this block name this id */
/* What all lanes of this warp pass in the same call. */
void emulator_gather(uint64_t value, uint64_t (&all_out)[32]);
/* What lane `from` of this warp passes in the same call; all 32 lanes call. */
uint64_t emulator_exchange(uint64_t value, int from);
void *emulator_shared(const void *key, size_t bytes); /* one piece of memory per block and key */
void *emulator_remote(void *at, uint32_t rank); /* the same place in another block of the cluster */
uint32_t emulator_cluster_size();
uint32_t emulator_cluster_rank();
void emulator_cluster_arrive();
void emulator_cluster_wait();
/* 16 bytes that come when they are waited for; groups of them as on a device. */
void emulator_copy(void *to, const void *from);
void emulator_copies_close();
void emulator_copies_wait(uint32_t left); /* all but the last `left` groups */
void emulator_copies_wait();              /* all, in groups or not */
void emulator_yield(); /* lets others run; for loops that wait for a word */

#endif
