/* bench_rope.cu - variants of rope, forward (wide) and backward (tiles). */
#include "backend/cuda/kernels.h"
#include "backend/cuda/rope_codes.cuh"
#include "bench_tiles.cuh"

static qe_args_rope rope_args(bench_memory &m, const shape &s, bool back) {
    qe_args_rope a = {};
    const size_t count = static_cast<size_t>(s.rows) * s.qkv(), angles = static_cast<size_t>(s.rows) * s.head_dim / 2;
    /* Forward turns in place: from random values to turned ones, the first time the outputs' poison. */
    a.qkv = back ? m.bf16(count) : m.output<uint16_t>(count);
    a.cosine = m.fp32(angles), a.sine = m.fp32(angles);
    a.rows = a.sequence = s.rows, a.heads = s.heads, a.kv_heads = s.kv_heads, a.head_dim = s.head_dim;
    if (back) a.target = delayed(m, s.rows, s.qkv(), QE_FORMAT_E5M2);
    return a;
}

static rope_source source_of(const qe_args_rope &a, uint32_t heads, uint32_t back) {
    rope_source source = {};
    source.qkv = static_cast<const uint16_t *>(a.qkv);
    source.cosine = a.cosine, source.sine = a.sine;
    source.columns = (a.heads + 2 * a.kv_heads) * a.head_dim;
    source.half = a.head_dim / 2, source.units = heads * source.half;
    source.sequence = a.sequence, source.turned_heads = a.heads + a.kv_heads, source.back = back;
    return source;
}

template <int THREADS, int ROWS>
static variant wide_variant(const shape &s) {
    return variant{std::to_string(THREADS) + " threads, rows " + std::to_string(ROWS),
                   [s](bench_memory &m) {
                       const qe_args_rope a = rope_args(m, s, false);
                       wide_job<rope_source> job = {};
                       job.source = source_of(a, a.heads + a.kv_heads, 0);
                       job.at[0] = static_cast<uint16_t *>(a.qkv), job.rows = s.rows, job.columns = s.qkv();
                       return
                           [job](cudaStream_t stream) { return wide_launch<rope_source, THREADS, ROWS>(job, stream); };
                   },
                   false};
}

static void sweep_forward(sweep &to, const shape &s) {
    const variant library = library_variant([s](bench_memory &m) {
        const qe_args_rope a = rope_args(m, s, false);
        return [a](cudaStream_t stream) { return qe_cuda_rope(&a, stream); };
    });
    to.run("rope", s, 4.0 * s.rows * (s.heads + s.kv_heads) * s.head_dim,
           {library, wide_variant<64, 1>(s), wide_variant<64, 2>(s), wide_variant<64, 8>(s), wide_variant<128, 1>(s),
            wide_variant<128, 2>(s), wide_variant<128, 4>(s), wide_variant<128, 8>(s), wide_variant<32, 4>(s),
            wide_variant<32, 8>(s), wide_variant<256, 2>(s), wide_variant<256, 4>(s)});
}

/* Heads of a block. */
template <int HEADS, bool IS_AT_ONCE>
static variant codes_variant(const shape &s) {
    return variant{std::to_string(HEADS) + " heads" + (IS_AT_ONCE ? ", at once" : ""),
                   [s](bench_memory &m) {
                       const qe_args_rope a = rope_args(m, s, true);
                       tile_job<rope_source> job = {};
                       job.source = source_of(a, s.heads + 2 * s.kv_heads, 1);
                       planes_of(places_of(&a.target, s.rows, s.qkv()), &job.planes);
                       job.scale = scaling_of(&a.target), job.words = words_of(&a.target, tensor_words());
                       return [job](cudaStream_t stream) {
                           return rope_codes_launch<QE_FORMAT_E5M2, HEADS, IS_AT_ONCE>(job, stream);
                       };
                   },
                   false};
}

static void sweep_codes(sweep &to, const shape &s, const variant &library) {
    if (s.head_dim != 2 * ROPE_HALF) return;
    to.run("rope_backward_quantize", s, 4.0 * s.rows * s.qkv(),
           {library, codes_variant<1, false>(s), codes_variant<1, true>(s), codes_variant<2, false>(s),
            codes_variant<2, true>(s), codes_variant<3, false>(s), codes_variant<3, true>(s)});
}

void sweep_rope(sweep &to, const shape &s) {
    typedef rope_source S;
    enum { F = QE_FORMAT_E5M2 };
    tile_bench<S> b = {s.rows, s.qkv(), QE_FORMAT_E5M2, [s](bench_memory &m) {
                           qe_args_rope a = {};
                           const size_t angles = static_cast<size_t>(s.rows) * s.head_dim / 2;
                           a.qkv = m.bf16(static_cast<size_t>(s.rows) * s.qkv());
                           a.cosine = m.fp32(angles), a.sine = m.fp32(angles), a.sequence = s.rows;
                           a.heads = s.heads, a.kv_heads = s.kv_heads, a.head_dim = s.head_dim;
                           return source_of(a, s.heads + 2 * s.kv_heads, 1);
                       }};
    const variant library = library_variant([s](bench_memory &m) {
        const qe_args_rope a = rope_args(m, s, true);
        return [a](cudaStream_t stream) { return qe_cuda_rope_backward_quantize(&a, stream); };
    });
    to.run("rope_backward_quantize", s, 4.0 * s.rows * s.qkv(),
           {library,
            TILE_PART(8, 8, 2, 4, 1, 8, 0, WRITE_ROWS),
            TILE_PART(8, 8, 2, 4, 1, 8, 0, WRITE_COLUMNS),
            TILE(8, 8, 2, 4, 1, 4, 0),
            TILE(8, 8, 2, 4, 1, 2, 0),
            TILE(8, 8, 1, 4, 1, 4, 0),
            TILE(8, 8, 1, 4, 1, 4, 4),
            TILE(8, 8, 1, 4, 1, 4, 5),
            TILE(8, 4, 2, 4, 1, 4, 0),
            TILE(8, 4, 1, 4, 1, 4, 5),
            TILE(8, 4, 1, 4, 1, 2, 5),
            TILE(8, 4, 2, 2, 2, 4, 0),
            TILE(8, 8, 1, 2, 2, 4, 5),
            TILE(16, 8, 1, 4, 1, 4, 0),
            TILE(4, 4, 1, 4, 1, 4, 0),
            TILE(4, 4, 1, 4, 1, 4, 8),
            TILE(4, 4, 1, 4, 2, 4, 4),
            TILE(4, 8, 1, 4, 1, 8, 8),
            TILE(4, 8, 1, 4, 2, 8, 4)});
    sweep_codes(to, s, library);
    sweep_forward(to, s);
}
