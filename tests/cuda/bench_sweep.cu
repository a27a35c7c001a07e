/* bench_sweep.cu - ways to do each fused op, timed against what the library does.
 * Built with `ninja -C build-cuda bench_sweep`.
 *
 *   bench_sweep [op ...]   all, or of: copy quantize weight swiglu swiglu_backward rope norm norm_backward
 *
 * Prints a line per op, shape and variant, then the best of each. Every variant's outputs are compared with those of
 * the library. Exit status: 0, 1 when bytes differed or the device failed. */
#include <string.h>

#include "bench_time.h"

static const shape SHAPES[] = {{1024, 1024, 4096, 16, 16, 64},
                               {2048, 2048, 8192, 16, 16, 128},
                               {2048, 4096, 14336, 32, 8, 128},
                               {8192, 4096, 14336, 32, 8, 128}};

/* --- ceilings: copies, and launches that do nothing --------------------------------------------------------------- */

static __global__ void nothing_kernel() {
}

template <int DEEP, bool IS_FIRST_OUT>
static __global__ void __launch_bounds__(256) copy_kernel(const uint4 *from, uint4 *to, size_t count) {
    const size_t begin = (blockIdx.x * static_cast<size_t>(DEEP)) * 256 + threadIdx.x;
    uint4 v[DEEP];
#pragma unroll
    for (int i = 0; i < DEEP; ++i)
        if (begin + i * 256 < count) v[i] = IS_FIRST_OUT ? __ldcs(from + begin + i * 256) : from[begin + i * 256];
#pragma unroll
    for (int i = 0; i < DEEP; ++i)
        if (begin + i * 256 < count) {
            if (IS_FIRST_OUT)
                __stcs(to + begin + i * 256, v[i]);
            else
                to[begin + i * 256] = v[i];
        }
}

template <int DEEP, bool IS_FIRST_OUT>
static variant copy_variant(const char *name, size_t bytes) {
    return {name,
            [bytes](bench_memory &m) {
                const uint4 *from = reinterpret_cast<const uint4 *>(m.bf16(bytes / 2));
                uint4 *to = m.output<uint4>(bytes / 16);
                return [=](cudaStream_t stream) {
                    const size_t count = bytes / 16;
                    copy_kernel<DEEP, IS_FIRST_OUT>
                        <<<static_cast<unsigned>((count + 256 * DEEP - 1) / (256 * DEEP)), 256, 0, stream>>>(from, to,
                                                                                                             count);
                    return cudaGetLastError() == cudaSuccess ? QE_OK : QE_ERROR_DEVICE;
                };
            },
            false};
}

static maker copy_maker(size_t bytes) {
    return [bytes](bench_memory &m) {
        void *from = m.bf16(bytes / 2), *to = m.output<uint8_t>(bytes);
        return [=](cudaStream_t stream) {
            return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream) == cudaSuccess ? QE_OK
                                                                                                     : QE_ERROR_DEVICE;
        };
    };
}

static void time_copies(bench_memory &memory, sweep &to) {
    const shape none = {};
    for (size_t mib : {8, 16, 64, 256, 512}) {
        const size_t bytes = mib << 20;
        memory.in.reset(), memory.out.reset();
        std::vector<launcher> launches;
        for (int i = 0; i < (mib < 256 ? 5 : 2); ++i) launches.push_back(copy_maker(bytes)(memory));
        printf("copy of %zu MB launched one by one: %.2f us, %.3f TB/s\n", mib, time_eager(launches),
               2.0 * static_cast<double>(bytes) / time_eager(launches) * 1e-6);
        to.run("copy", none, 2.0 * static_cast<double>(bytes),
               {{"memcpy node", copy_maker(bytes), false},
                copy_variant<2, false>("kernel of 2", bytes),
                copy_variant<4, false>("kernel of 4", bytes),
                copy_variant<8, false>("kernel of 8", bytes),
                copy_variant<4, true>("kernel of 4, streaming", bytes)});
    }
}

static void time_nothing(unsigned blocks, unsigned threads, unsigned cluster) {
    std::vector<launcher> launches(64, [=](cudaStream_t stream) {
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.stream = stream;
        config.attrs = &attribute, config.numAttrs = cluster ? 1 : 0;
        return cudaLaunchKernelEx(&config, nothing_kernel) == cudaSuccess ? QE_OK : QE_ERROR_DEVICE;
    });
    printf("nothing, %4u blocks of %4u threads, clusters of %u: %.2f us\n", blocks, threads, cluster,
           time_launches(launches));
}

static void time_launch_costs() {
    time_nothing(1, 32, 0);
    time_nothing(512, 128, 0);
    time_nothing(2048, 128, 0);
    time_nothing(512, 128, 1);
    time_nothing(512, 128, 4);
    time_nothing(512, 128, 8);
    time_nothing(2048, 128, 8);
    time_nothing(256, 256, 4);
    time_nothing(1024, 256, 4);
}

int main(int argc, char **argv) {
    cudaDeviceProp device;
    MUST(cudaGetDeviceProperties(&device, 0));
    printf("%s, %d multiprocessors\n", device.name, device.multiProcessorCount);
    bench_memory memory(size_t(2) << 30, size_t(2) << 30);
    sweep all(memory);
    auto is_wanted = [&](const char *op) {
        for (int i = 1; i < argc; ++i)
            if (strcmp(argv[i], op) == 0) return true;
        return argc == 1;
    };
    if (is_wanted("copy")) time_launch_costs(), time_copies(memory, all);
    const struct {
        const char *name;
        void (*run)(sweep &, const shape &);
    } ops[] = {{"norm", sweep_norm},
               {"norm_backward", sweep_norm_backward},
               {"rope", sweep_rope},
               {"quantize", sweep_quantize},
               {"weight", sweep_weight},
               {"swiglu", sweep_swiglu},
               {"swiglu_backward", sweep_swiglu_backward}};
    for (const auto &op : ops)
        for (const shape &s : SHAPES)
            if (is_wanted(op.name)) op.run(all, s);
    return all.summary() ? 1 : 0;
}
