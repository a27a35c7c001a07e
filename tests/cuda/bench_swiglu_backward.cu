/* bench_swiglu_backward.cu - variants of swiglu, backward. */
#include "backend/cuda/kernels.h"
#include "bench_tiles.cuh"

void sweep_swiglu_backward(sweep &to, const shape &s) {
    typedef swiglu_backward_source S;
    enum { F = QE_FORMAT_E5M2 };
    const size_t count = static_cast<size_t>(s.rows) * s.ffn;
    tile_bench<S> b = {s.rows, 2 * s.ffn, QE_FORMAT_E5M2, [=](bench_memory &m) {
                           const uint16_t *gate_up = m.bf16(2 * count);
                           return S{gate_up, m.bf16(count), s.ffn};
                       }};
    const variant library = library_variant([=](bench_memory &m) {
        qe_args_swiglu_backward a = {};
        a.gate_up = m.bf16(2 * count), a.dy = m.bf16(count);
        a.rows = s.rows, a.ffn = s.ffn;
        a.target = delayed(m, s.rows, 2 * s.ffn, QE_FORMAT_E5M2);
        return [a](cudaStream_t stream) { return qe_cuda_swiglu_backward_quantize(&a, stream); };
    });
    to.run("swiglu_backward_quantize", s, 10.0 * static_cast<double>(count),
           {library,
            TILE_PART(8, 4, 1, 2, 2, 4, 0, WRITE_ROWS),
            TILE_PART(8, 4, 1, 2, 2, 4, 0, WRITE_COLUMNS),
            TILE(8, 4, 1, 2, 2, 2, 0),
            TILE(8, 4, 1, 2, 2, 1, 0),
            TILE(8, 4, 1, 2, 2, 4, 4),
            TILE(8, 4, 1, 2, 2, 4, 5),
            TILE(8, 4, 2, 2, 2, 4, 0),
            TILE(8, 8, 1, 2, 2, 4, 0),
            TILE(8, 8, 1, 2, 2, 2, 0),
            TILE(8, 8, 1, 2, 2, 4, 5),
            TILE(16, 8, 1, 2, 2, 4, 0),
            TILE(16, 4, 1, 2, 2, 4, 0),
            TILE(8, 4, 1, 4, 1, 4, 0),
            TILE(8, 4, 1, 1, 2, 4, 0),
            TILE(8, 4, 1, 4, 2, 4, 0),
            TILE(4, 4, 1, 4, 1, 4, 0),
            TILE(4, 4, 1, 2, 2, 4, 0),
            TILE(4, 4, 1, 2, 2, 4, 7)});
}
