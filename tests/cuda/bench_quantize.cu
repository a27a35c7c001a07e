/* bench_quantize.cu - variants of quantize. Compiled twice: with and without evict-first loads. */
#include "backend/cuda/kernels.h"
#include "bench_tiles.cuh"

#ifdef QE_LOAD_EVICT_FIRST
#define QUANTIZE_VARIANTS quantize_variants_evict
#else
#define QUANTIZE_VARIANTS quantize_variants
#endif

std::vector<variant> quantize_variants(const shape &s);
std::vector<variant> quantize_variants_evict(const shape &s);

std::vector<variant> QUANTIZE_VARIANTS(const shape &s) {
    typedef plain_source S;
    enum { F = QE_FORMAT_E4M3 };
    tile_bench<S> b = {s.rows, s.hidden, QE_FORMAT_E4M3, [s](bench_memory &m) {
                           return S{m.bf16(static_cast<size_t>(s.rows) * s.hidden), s.hidden};
                       }};
#ifdef QE_LOAD_EVICT_FIRST
    return {TILE(16, 8, 4, 2, 2, 8, 0), TILE(16, 8, 4, 2, 2, 4, 0), TILE(16, 8, 4, 2, 2, 2, 0)};
#else
    return {TILE_PART(16, 8, 4, 2, 2, 8, 0, WRITE_ROWS),
            TILE_PART(16, 8, 4, 2, 2, 8, 0, WRITE_COLUMNS),
            TILE_PART(16, 8, 4, 2, 2, 4, 0, WRITE_COLUMNS),
            TILE(16, 8, 4, 2, 2, 4, 0),
            TILE(16, 8, 4, 2, 2, 2, 0),
            TILE(16, 8, 4, 2, 2, 1, 0),
            TILE(16, 8, 2, 2, 2, 4, 6),
            TILE(16, 8, 2, 2, 2, 2, 6),
            TILE(16, 4, 4, 2, 2, 4, 0),
            TILE(16, 4, 4, 2, 2, 2, 0),
            TILE(16, 8, 4, 1, 2, 4, 0),
            TILE(16, 8, 4, 2, 1, 4, 0),
            TILE(16, 8, 4, 1, 4, 4, 0),
            TILE(8, 8, 2, 2, 2, 4, 0),
            TILE(8, 4, 2, 2, 2, 4, 0),
            TILE(8, 8, 2, 2, 2, 4, 8),
            TILE(4, 4, 1, 4, 1, 4, 0),
            TILE(4, 4, 1, 2, 2, 4, 0)};
#endif
}

#ifndef QE_LOAD_EVICT_FIRST
void sweep_quantize(sweep &to, const shape &s) {
    std::vector<variant> all = {library_variant([s](bench_memory &m) {
        qe_args_quantize a = {};
        a.x = m.bf16(static_cast<size_t>(s.rows) * s.hidden), a.rows = s.rows, a.columns = s.hidden;
        a.target = delayed(m, s.rows, s.hidden, QE_FORMAT_E4M3);
        return [a](cudaStream_t stream) { return qe_cuda_quantize(&a, stream); };
    })};
    for (const variant &v : quantize_variants(s)) all.push_back(v);
    for (const variant &v : quantize_variants_evict(s)) all.push_back(v);
    to.run("quantize", s, 4.0 * s.rows * s.hidden, all);
}

void sweep_weight(sweep &to, const shape &s) {
    typedef weight_source S;
    enum { F = QE_FORMAT_E4M3 };
    const size_t count = static_cast<size_t>(s.ffn) * s.hidden;
    tile_bench<S> b = {s.ffn, s.hidden, QE_FORMAT_E4M3, [=](bench_memory &m) { return S{m.fp32(count), s.hidden}; }};
    const variant library = library_variant([=](bench_memory &m) {
        qe_args_quantize_weight a = {};
        a.w = m.fp32(count), a.rows = s.ffn, a.columns = s.hidden;
        a.target = delayed(m, s.ffn, s.hidden, QE_FORMAT_E4M3);
        return [a](cudaStream_t stream) { return qe_cuda_quantize_weight(&a, stream); };
    });
    to.run("quantize_weight", s, 6.0 * static_cast<double>(count),
           {library, TILE(16, 8, 2, 2, 2, 4, 0), TILE(16, 8, 2, 2, 2, 2, 0), TILE(16, 4, 2, 2, 2, 4, 0),
            TILE(16, 8, 1, 2, 2, 4, 6), TILE(8, 8, 1, 2, 2, 4, 8), TILE(8, 4, 2, 2, 2, 4, 0),
            TILE(8, 4, 1, 2, 2, 4, 0)});
}
#endif
