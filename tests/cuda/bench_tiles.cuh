/* bench_tiles.cuh - tile shapes of one source as variants of a sweep. */
#ifndef QE_TESTS_CUDA_BENCH_TILES_CUH
#define QE_TESTS_CUDA_BENCH_TILES_CUH

#include "backend/cuda/sink.cuh"
#include "bench_time.h"

#ifdef QE_LOAD_EVICT_FIRST
#define TILE_HINT " evict"
#else
#define TILE_HINT ""
#endif

template <typename Source>
struct tile_bench {
    uint32_t rows, columns;
    qe_format format;
    std::function<Source(bench_memory &)> source;
};

enum { WRITE_ROWS = 1, WRITE_COLUMNS = 2, WRITE_BOTH = 3 };

template <typename Source, typename Tile>
static variant tile_variant(const char *name, const tile_bench<Source> &b, int planes = WRITE_BOTH) {
    variant v;
    v.name = std::string(name) + TILE_HINT;
    if (planes == WRITE_ROWS) v.name += " rows only";
    if (planes == WRITE_COLUMNS) v.name += " columns only";
    v.is_partial = planes != WRITE_BOTH;
    v.make = [=](bench_memory &m) {
        tile_job<Source> job = {};
        job.source = b.source(m);
        const qe_quantize_target target = delayed(m, b.rows, b.columns, b.format);
        planes_of(places_of(&target, b.rows, b.columns), &job.planes);
        job.scale = scaling_of(&target), job.words = words_of(&target, tensor_words());
        if (!(planes & WRITE_ROWS)) job.planes.by_rows = nullptr;
        if (!(planes & WRITE_COLUMNS)) job.planes.by_columns = nullptr;
        return launcher([job](cudaStream_t stream) { return tile_launch<Source, Tile>(job, stream); });
    };
    return v;
}

/* rows/across/ahead, warps, near, blocks */
#define TILE(R, A, H, X, Y, N, B) \
    tile_variant<S, tile_shape<F, R, A, H, X, Y, N, B>>(#R "/" #A "/" #H " " #X "x" #Y " n" #N " b" #B, b)
#define TILE_PART(R, A, H, X, Y, N, B, PART) \
    tile_variant<S, tile_shape<F, R, A, H, X, Y, N, B>>(#R "/" #A "/" #H " " #X "x" #Y " n" #N " b" #B, b, PART)

/* The launcher of the library itself: the first of every sweep. */
static inline variant library_variant(const maker &make) {
    return variant{"library", make, false};
}

#endif
