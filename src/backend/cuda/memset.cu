/* memset.cu - libraries that count in memory clear it by a memset, which a capture keeps as a node of its own kind. One
 * such node costs the host two microseconds in every launch of the graph: only graphs that hold nothing but kernels are
 * launched in one piece (measured: 32 kernels 3 us, with 32 memsets among them 60 us). So memsets become kernels. */
#include <stdlib.h>

#include "backend/cuda/block.cuh"
#include "backend/cuda/kernels.h"

namespace {

constexpr uint32_t THREADS = 256, BLOCKS_MAX = 1024, WIDE_BYTES = sizeof(uint4);

struct clear_job {
    char *to;
    uint64_t bytes;
    uint32_t word; /* the value, repeated to four bytes */
};

__global__ void __launch_bounds__(THREADS) clear(const __grid_constant__ clear_job job) {
    const uint64_t first = static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x;
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * THREADS;
    const uint64_t wide = reinterpret_cast<uintptr_t>(job.to) % WIDE_BYTES == 0 ? job.bytes / WIDE_BYTES : 0;
    const uint4 words = {job.word, job.word, job.word, job.word};
    for (uint64_t i = first; i < wide; i += step) reinterpret_cast<uint4 *>(job.to)[i] = words;
    for (uint64_t i = wide * WIDE_BYTES + first; i < job.bytes; i += step)
        job.to[i] = static_cast<char>(job.word >> 8 * (i % sizeof job.word));
}

uint32_t repeated(uint32_t value, uint32_t bytes) {
    if (bytes == 1) return (value & 0xFF) * 0x01010101u;
    return bytes == 2 ? (value & 0xFFFF) * 0x00010001u : value;
}

/* Nodes before or behind `node`, in memory that the caller frees. No edge of a memset is a programmatic one. */
cudaError_t neighbours(cudaGraphNode_t node, bool before, cudaGraphNode_t **nodes_out, size_t *count_out) {
    size_t count = 0;
    cudaError_t code = before ? cudaGraphNodeGetDependencies(node, nullptr, nullptr, &count)
                              : cudaGraphNodeGetDependentNodes(node, nullptr, nullptr, &count);
    if (code != cudaSuccess) return code;
    cudaGraphNode_t *nodes = static_cast<cudaGraphNode_t *>(calloc(count + 1, sizeof *nodes));
    cudaGraphEdgeData *edges = static_cast<cudaGraphEdgeData *>(calloc(count + 1, sizeof *edges));
    if (!nodes || !edges) code = cudaErrorMemoryAllocation;
    if (code == cudaSuccess && count > 0) /* asking for none is an error */
        code = before ? cudaGraphNodeGetDependencies(node, nodes, edges, &count)
                      : cudaGraphNodeGetDependentNodes(node, nodes, edges, &count);
    for (size_t i = 0; code == cudaSuccess && i < count; ++i)
        if (edges[i].type != cudaGraphDependencyTypeDefault) code = cudaErrorNotSupported;
    free(edges);
    if (code == cudaSuccess) {
        *nodes_out = nodes;
        *count_out = count;
    } else {
        free(nodes);
    }
    return code;
}

cudaError_t kernel_add(cudaGraph_t graph, const cudaGraphNode_t *before, size_t count, clear_job job,
                       cudaGraphNode_t *node_out) {
    const uint64_t blocks = job.bytes / WIDE_BYTES / THREADS + 1;
    void *arguments[] = {&job};
    cudaKernelNodeParams params = {};
    params.func = reinterpret_cast<void *>(clear);
    params.gridDim = dim3(static_cast<unsigned>(blocks < BLOCKS_MAX ? blocks : BLOCKS_MAX));
    params.blockDim = dim3(THREADS);
    params.kernelParams = arguments;
    return cudaGraphAddKernelNode(node_out, graph, before, count, &params);
}

cudaError_t edges_add(cudaGraph_t graph, cudaGraphNode_t from, const cudaGraphNode_t *behind, size_t count) {
    cudaError_t code = cudaSuccess;
    for (size_t i = 0; code == cudaSuccess && i < count; ++i)
        code = cudaGraphAddDependencies(graph, &from, &behind[i], nullptr, 1);
    return code;
}

cudaError_t replace(cudaGraph_t graph, cudaGraphNode_t node, const cudaMemsetParams &memset) {
    cudaGraphNode_t *before = nullptr, *behind = nullptr, kernel;
    size_t before_count = 0, behind_count = 0;
    const clear_job job = {static_cast<char *>(memset.dst), memset.width * memset.elementSize,
                           repeated(memset.value, memset.elementSize)};
    cudaError_t code = neighbours(node, true, &before, &before_count);
    if (code == cudaSuccess) code = neighbours(node, false, &behind, &behind_count);
    if (code == cudaSuccess) code = kernel_add(graph, before, before_count, job, &kernel);
    if (code == cudaSuccess) code = edges_add(graph, kernel, behind, behind_count);
    if (code == cudaSuccess) code = cudaGraphDestroyNode(node);
    free(before);
    free(behind);
    return code;
}

cudaError_t replace_if_memset(cudaGraph_t graph, cudaGraphNode_t node) {
    cudaGraphNodeType type;
    cudaMemsetParams memset;
    cudaError_t code = cudaGraphNodeGetType(node, &type);
    if (code != cudaSuccess || type != cudaGraphNodeTypeMemset) return code;
    code = cudaGraphMemsetNodeGetParams(node, &memset);
    if (code != cudaSuccess || memset.height > 1) return code; /* lines with gaps between them stay what they are */
    return replace(graph, node, memset);
}

} // namespace

qe_status qe_cuda_memsets_replace(cudaGraph_t graph) {
    size_t count = 0;
    cudaError_t code = cudaGraphGetNodes(graph, nullptr, &count);
    cudaGraphNode_t *nodes = static_cast<cudaGraphNode_t *>(calloc(count + 1, sizeof *nodes));
    if (!nodes) return QE_ERROR_MEMORY;
    if (code == cudaSuccess) code = cudaGraphGetNodes(graph, nodes, &count);
    for (size_t i = 0; code == cudaSuccess && i < count; ++i) code = replace_if_memset(graph, nodes[i]);
    free(nodes);
    return code == cudaSuccess ? QE_OK : QE_ERROR_DEVICE;
}
