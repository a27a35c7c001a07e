/* bench_swiglu.cu - variants of swiglu, forward. Compiled twice: with and without evict-first loads. */
#include "backend/cuda/kernels.h"
#include "bench_tiles.cuh"

#ifdef QE_LOAD_EVICT_FIRST
#define SWIGLU_VARIANTS swiglu_variants_evict
#else
#define SWIGLU_VARIANTS swiglu_variants
#endif

std::vector<variant> swiglu_variants(const shape &s);
std::vector<variant> swiglu_variants_evict(const shape &s);

std::vector<variant> SWIGLU_VARIANTS(const shape &s) {
    typedef swiglu_source S;
    enum { F = QE_FORMAT_E4M3 };
    tile_bench<S> b = {s.rows, s.ffn, QE_FORMAT_E4M3, [s](bench_memory &m) {
                           return S{m.bf16(2 * static_cast<size_t>(s.rows) * s.ffn), s.ffn};
                       }};
#ifdef QE_LOAD_EVICT_FIRST
    return {TILE(8, 4, 2, 2, 2, 4, 0), TILE(8, 4, 2, 2, 2, 2, 0), TILE(16, 8, 1, 2, 2, 4, 0)};
#else
    return {TILE_PART(8, 4, 2, 2, 2, 4, 0, WRITE_ROWS),
            TILE_PART(8, 4, 2, 2, 2, 4, 0, WRITE_COLUMNS),
            TILE(8, 4, 2, 2, 2, 2, 0),
            TILE(8, 4, 2, 2, 2, 1, 0),
            TILE(8, 4, 2, 2, 2, 4, 5),
            TILE(8, 4, 1, 2, 2, 4, 8),
            TILE(8, 8, 2, 2, 2, 4, 0),
            TILE(8, 8, 2, 2, 2, 2, 0),
            TILE(8, 8, 1, 2, 2, 4, 8),
            TILE(16, 8, 1, 2, 2, 4, 0),
            TILE(16, 8, 2, 2, 2, 4, 0),
            TILE(16, 4, 1, 2, 2, 4, 0),
            TILE(16, 4, 1, 2, 2, 2, 6),
            TILE(8, 4, 2, 4, 1, 4, 0),
            TILE(8, 4, 2, 1, 2, 4, 0),
            TILE(8, 4, 2, 4, 2, 4, 0),
            TILE(4, 4, 1, 4, 1, 4, 0),
            TILE(4, 4, 1, 2, 2, 4, 0)};
#endif
}

#ifndef QE_LOAD_EVICT_FIRST
void sweep_swiglu(sweep &to, const shape &s) {
    std::vector<variant> all = {library_variant([s](bench_memory &m) {
        qe_args_swiglu a = {};
        a.gate_up = m.bf16(2 * static_cast<size_t>(s.rows) * s.ffn), a.rows = s.rows, a.ffn = s.ffn;
        a.target = delayed(m, s.rows, s.ffn, QE_FORMAT_E4M3);
        return [a](cudaStream_t stream) { return qe_cuda_swiglu_quantize(&a, stream); };
    })};
    for (const variant &v : swiglu_variants(s)) all.push_back(v);
    for (const variant &v : swiglu_variants_evict(s)) all.push_back(v);
    to.run("swiglu_quantize", s, 6.0 * s.rows * s.ffn, all);
}
#endif
