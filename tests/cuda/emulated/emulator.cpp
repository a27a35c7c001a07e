/* emulator.cpp - see emulator.h. */
#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector_functions.h>

#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace {

enum { LANES = 32, STACK_BYTES = 128 * 1024 };

struct meeting { /* of a fixed set of fibers, again and again */
    uint32_t expected = 0, arrived = 0, generation = 0;
    void check() {
        if (expected > 0 && arrived >= expected) arrived = 0, ++generation;
    }
};

struct warp_state {
    meeting all;
    std::map<uint32_t, meeting> some; /* by mask */
    uint64_t slot[LANES];
};

struct block_state {
    meeting barrier;
    std::map<uint32_t, meeting> some; /* by id */
    std::vector<warp_state> warps;
    std::map<const void *, std::vector<unsigned char>> shared;
    uint32_t rank = 0;
};

enum { COPY_BYTES = 16 };
struct copy {
    void *to;
    const void *from;
};
typedef std::vector<copy> copies;

struct fiber {
    ucontext_t context;
    char *stack;
    emulated_thread self;
    block_state *block;
    uint32_t lane, warp, awaited; /* awaited: generation of the cluster's barrier */
    bool is_done;
    std::deque<copies> closed; /* groups on their way */
    copies open; /* asked for since the last group */
};

struct machine {
    ucontext_t scheduler;
    std::vector<std::unique_ptr<char[]>> stacks; /* of fibers, kept from cluster to cluster */
    std::vector<fiber> fibers;
    std::vector<block_state> blocks;
    meeting cluster;
    fiber *running = nullptr;
    const std::function<void()> *kernel = nullptr;
    uint64_t events = 0; /* meetings and messages: no event in a round means that all wait for ever */
    std::mt19937 random{20261129};
};

machine *current;

void meet(meeting &m) {
    const uint32_t generation = m.generation;
    ++m.arrived, ++current->events;
    m.check();
    while (m.generation == generation) emulator_yield();
}

/* An empty group may be left. */
void copies_check(const fiber &f) {
    bool is_late = !f.open.empty();
    for (const copies &group : f.closed) is_late = is_late || !group.empty();
    if (!is_late) return;
    fprintf(stderr, "emulator: a thread ends before copies that it asked for have come\n");
    abort();
}

void fiber_main() {
    (*current->kernel)();
    fiber *f = current->running;
    copies_check(*f);
    f->is_done = true;
    ++current->events;
    block_state *block = f->block;
    --block->barrier.expected, block->barrier.check();
    --block->warps[f->warp].all.expected, block->warps[f->warp].all.check();
    --current->cluster.expected, current->cluster.check();
    swapcontext(&f->context, &current->scheduler);
}

void fiber_start(fiber &f) {
    f.is_done = false, f.awaited = 0;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack;
    f.context.uc_stack.ss_size = STACK_BYTES;
    f.context.uc_link = &current->scheduler;
    makecontext(&f.context, fiber_main, 0);
}

void schedule() {
    std::vector<size_t> order(current->fibers.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (uint64_t idle = 0;;) {
        bool is_alive = false;
        const uint64_t before = current->events;
        for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[current->random() % i]);
        for (size_t i : order) {
            fiber &f = current->fibers[i];
            if (f.is_done) continue;
            is_alive = true;
            current->running = &f;
            swapcontext(&current->scheduler, &f.context);
        }
        if (!is_alive) return;
        idle = current->events == before ? idle + 1 : 0;
        if (idle > 4) {
            fprintf(stderr, "emulator: every thread of a cluster waits and none will be woken\n");
            abort();
        }
    }
}

void run_cluster(dim3 grid, uint32_t threads, uint32_t cluster, uint3 first) {
    machine &m = *current;
    m.blocks.clear(), m.blocks.resize(cluster);
    m.fibers.clear(), m.fibers.resize(static_cast<size_t>(cluster) * threads);
    while (m.stacks.size() < m.fibers.size()) m.stacks.emplace_back(new char[STACK_BYTES]);
    m.cluster = meeting();
    m.cluster.expected = cluster * threads;
    for (uint32_t b = 0; b < cluster; ++b) {
        block_state &block = m.blocks[b];
        block.rank = b;
        block.barrier.expected = threads;
        block.warps.resize((threads + LANES - 1) / LANES);
        for (uint32_t t = 0; t < threads; ++t) {
            fiber &f = m.fibers[b * threads + t];
            f.stack = m.stacks[b * threads + t].get();
            f.self.thread = make_uint3(t, 0, 0), f.self.block = make_uint3(first.x + b, first.y, first.z);
            f.self.block_dim = dim3(threads), f.self.grid_dim = grid;
            f.block = &block, f.lane = t % LANES, f.warp = t / LANES;
            ++block.warps[f.warp].all.expected;
            fiber_start(f);
        }
    }
    schedule();
}

}  // namespace

const emulated_thread &emulator_self() {
    return current->running->self;
}

static uint32_t down_max;
static uint64_t runs;

uint64_t emulator_runs() {
    return runs;
}

uint32_t emulator_down_max() {
    constexpr uint32_t OF_A_DEVICE = 65535;
    return down_max == 0 ? OF_A_DEVICE : down_max;
}

void emulator_down_set(uint32_t blocks) {
    down_max = blocks;
}

void emulator_run(dim3 grid, uint32_t threads, uint32_t cluster, const std::function<void()> &kernel) {
    ++runs;
    machine m;
    current = &m;
    m.kernel = &kernel;
    for (uint32_t z = 0; z < grid.z; ++z)
        for (uint32_t y = 0; y < grid.y; ++y)
            for (uint32_t x = 0; x < grid.x; x += cluster) run_cluster(grid, threads, cluster, make_uint3(x, y, z));
    current = nullptr;
}

void emulator_yield() {
    fiber *f = current->running;
    swapcontext(&f->context, &current->scheduler);
}

void emulator_warp_barrier(uint32_t mask) {
    fiber *f = current->running;
    meeting &m = f->block->warps[f->warp].some[mask];
    if (!(mask >> f->lane & 1)) {
        fprintf(stderr, "emulator: lane %u waits for %08x, which it is not part of\n", f->lane, mask);
        abort();
    }
    m.expected = static_cast<uint32_t>(__builtin_popcount(mask));
    meet(m);
}

void emulator_block_barrier() {
    meet(current->running->block->barrier);
}

void emulator_some_barrier(uint32_t id, uint32_t threads) {
    meeting &m = current->running->block->some[id];
    m.expected = threads;
    meet(m);
}

void emulator_gather(uint64_t value, uint64_t (&all_out)[LANES]) {
    fiber *f = current->running;
    warp_state &warp = f->block->warps[f->warp];
    warp.slot[f->lane] = value;
    meet(warp.all);
    memcpy(all_out, warp.slot, sizeof warp.slot);
    meet(warp.all);
}

uint64_t emulator_exchange(uint64_t value, int from) {
    uint64_t all[LANES];
    emulator_gather(value, all);
    return all[from & (LANES - 1)];
}

void emulator_copy(void *to, const void *from) {
    current->running->open.push_back({to, from});
}

void emulator_copies_close() {
    fiber *f = current->running;
    f->closed.push_back(std::move(f->open));
    f->open.clear();
}

void emulator_copies_wait(uint32_t left) {
    fiber *f = current->running;
    for (; f->closed.size() > left; f->closed.pop_front())
        for (const copy &c : f->closed.front()) memcpy(c.to, c.from, COPY_BYTES);
}

void emulator_copies_wait() {
    emulator_copies_close();
    emulator_copies_wait(0);
}

void *emulator_shared(const void *key, size_t bytes) {
    std::vector<unsigned char> &memory = current->running->block->shared[key];
    if (memory.empty()) memory.assign(bytes, 0xA5); /* nothing is zero of itself */
    return memory.data();
}

void *emulator_remote(void *at, uint32_t rank) {
    for (auto &piece : current->running->block->shared) {
        unsigned char *begin = piece.second.data();
        const ptrdiff_t offset = static_cast<unsigned char *>(at) - begin;
        if (offset < 0 || offset >= static_cast<ptrdiff_t>(piece.second.size())) continue;
        std::vector<unsigned char> &theirs = current->blocks.at(rank).shared[piece.first];
        if (theirs.empty()) {
            fprintf(stderr, "emulator: block %u is written to before it runs\n", rank);
            abort();
        }
        ++current->events;
        return theirs.data() + offset;
    }
    fprintf(stderr, "emulator: an address that is not shared memory\n");
    abort();
}

uint32_t emulator_cluster_size() {
    return static_cast<uint32_t>(current->blocks.size());
}
uint32_t emulator_cluster_rank() {
    return current->running->block->rank;
}

void emulator_cluster_arrive() {
    current->running->awaited = current->cluster.generation;
    ++current->cluster.arrived, ++current->events;
    current->cluster.check();
}
void emulator_cluster_wait() {
    while (current->cluster.generation == current->running->awaited) emulator_yield();
    ++current->events;
}

/* --- the few calls of the runtime that launchers and checks make -------------------------------------------------- */

static std::map<void *, std::pair<void *, size_t>> &mappings() {
    static std::map<void *, std::pair<void *, size_t>> all;
    return all;
}

extern "C" {
/* Ends at a page that nobody may touch, and begins behind one. */
cudaError_t CUDARTAPI cudaMalloc(void **at, size_t bytes) {
    const size_t page = 4096, rounded = (bytes + 255) / 256 * 256, room = (rounded + page - 1) / page * page;
    char *raw =
        static_cast<char *>(mmap(nullptr, room + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (raw == MAP_FAILED) return cudaErrorMemoryAllocation;
    mprotect(raw, page, PROT_NONE);
    mprotect(raw + page + room, page, PROT_NONE);
    *at = raw + page + room - rounded;
    mappings()[*at] = {raw, room + 2 * page};
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaFree(void *at) {
    const auto found = mappings().find(at);
    if (found == mappings().end()) return at ? cudaErrorInvalidValue : cudaSuccess;
    munmap(found->second.first, found->second.second);
    mappings().erase(found);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemset(void *at, int value, size_t bytes) {
    memset(at, value, bytes);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t) {
    memset(at, value, bytes);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceSynchronize(void) {
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGetLastError(void) {
    return cudaSuccess;
}
const char *CUDARTAPI cudaGetErrorString(cudaError_t) {
    return "emulated";
}
}
