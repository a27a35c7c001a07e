/* tile.cuh - codes by rows and transposed and the amax, in one pass: the fast way for 8-bit formats, for shapes in
 * multiples of 16. An amax is a maximum of bits and has no order, all else is elementwise: no result depends on the
 * shape of a tile. */
#ifndef QE_CUDA_TILE_CUH
#define QE_CUDA_TILE_CUH

#include "backend/cuda/launch.cuh"
#include "backend/cuda/source.cuh"
#include "backend/cuda/tall.cuh"
#include "qeffect/op.h"

enum { WARP = 32 };

/* The scale of one tensor, and where its amax goes. */
struct scaling {
    const float *scale; /* delayed; else NULL */
    const int32_t *tensor_amax; /* current: bits of the amax of the whole tensor */
    float format_max;
    int32_t *amax; /* raised to the largest |x|; NULL: not recorded */
};

DEVICE float scale_of(const scaling &s) {
    if (s.scale) return *s.scale;
    return s.tensor_amax ? scale_from_amax(float_of(static_cast<uint32_t>(*s.tensor_amax)), s.format_max, false) : 1.0f;
}

/* Per-tensor words that go with the codes. Pointers may be NULL. */
struct tensor_words {
    float *scale_inv[2];
    const uint64_t *weight_witness, *scale_epoch;
    uint64_t *key;
};

DEVICE void write_words(const tensor_words &words, float scale) {
    if (words.scale_inv[0]) *words.scale_inv[0] = inverse_of(scale);
    if (words.scale_inv[1]) *words.scale_inv[1] = inverse_of(scale);
    if (words.key == nullptr) return;
    words.key[QE_KEY_SEAL] = 0; /* first: a block that begins later must not take this key for a commit's */
    device_fence();
    words.key[QE_KEY_VERSION] = *words.weight_witness;
    words.key[QE_KEY_EPOCH] = words.scale_epoch ? *words.scale_epoch : 0;
}

/* Did a commit quantize just this weight, under just this scale? *amax_out: bits of the amax that its key remembers.
 * All words are asked for at once: one way to memory, not five, before a block has anything else to do. The seal of a
 * key that looks right is read again behind the rest, since this fill's first block may be taking the seal back. */
DEVICE bool is_sealed(const tensor_words &words, int32_t *amax_out) {
    if (words.key == nullptr || words.weight_witness == nullptr) return false;
    const uint64_t seal_then = word_now(&words.key[QE_KEY_SEAL]), version = word_now(&words.key[QE_KEY_VERSION]);
    const uint64_t epoch = word_now(&words.key[QE_KEY_EPOCH]), witness = word_now(words.weight_witness);
    const uint64_t scale_epoch = words.scale_epoch ? word_now(words.scale_epoch) : 0;
    if ((seal_then & QE_KEY_SEALED) == 0 || version != witness || epoch != scale_epoch) return false;
    device_fence();
    const uint64_t seal = word_now(&words.key[QE_KEY_SEAL]);
    *amax_out = static_cast<int32_t>(seal);
    return (seal & QE_KEY_SEALED) != 0;
}

template <typename Source>
struct keeps_key {
    static constexpr bool value = false;
};
template <>
struct keeps_key<weight_source> {
    static constexpr bool value = true;
};

/* A fill behind a commit has nothing left to do but to record the amax. One thread looks for its block: the words of
 * the seal are one place in memory for all. First thing in the kernel. */
template <typename Source>
static METHOD bool is_filled(const tensor_words &words, int32_t *record) {
    if constexpr (!keeps_key<Source>::value) return false;
    uint32_t &is_done = shared_object<uint32_t>();
    if (threadIdx.x == 0) {
        int32_t amax = 0;
        is_done = is_sealed(words, &amax);
        if (is_done && record && is_first_block()) raise_word(record, amax);
    }
    block_barrier();
    return is_done != 0;
}

/* All lanes of the warp call it. `seen` is what the word held a while ago: it only rises, so what is not above it needs
 * no atomic. */
DEVICE void record_amax(int32_t *word, float amax, int32_t seen) {
    const int32_t most = warp_largest(static_cast<int32_t>(bits_of(amax)));
    if (word && threadIdx.x % WARP == 0 && most > seen) raise_word(word, most);
}

/* Codes of one 8-bit tensor, both ways. Either may be NULL. */
struct code_planes {
    uint8_t *by_rows; /* [rows, columns] */
    uint8_t *by_columns; /* [columns, rows] */
    uint32_t rows, columns;
};

/* a..d: four columns each of four rows. out[i]: four rows of column i. */
DEVICE void transpose4(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t *out, int stride) {
    const uint32_t ab_low = bytes_of(a, b, 0x5140), ab_high = bytes_of(a, b, 0x7362);
    const uint32_t cd_low = bytes_of(c, d, 0x5140), cd_high = bytes_of(c, d, 0x7362);
    out[0 * stride] = bytes_of(ab_low, cd_low, 0x5410);
    out[1 * stride] = bytes_of(ab_low, cd_low, 0x7632);
    out[2 * stride] = bytes_of(ab_high, cd_high, 0x5410);
    out[3 * stride] = bytes_of(ab_high, cd_high, 0x7632);
}

/* Eight columns of ROWS rows, as one thread gathers them: ROWS contiguous bytes of a transposed plane per column. */
template <int ROWS>
struct column_codes {
    uint32_t words[8][ROWS / 4];

    /* four: codes of rows 4*group .. 4*group+3, two words a row. */
    METHOD void put(int group, const uint32_t (*four)[2]) {
        transpose4(four[0][0], four[1][0], four[2][0], four[3][0], &words[0][group], ROWS / 4);
        transpose4(four[0][1], four[1][1], four[2][1], four[3][1], &words[4][group], ROWS / 4);
    }
    METHOD void store(const code_planes &planes, uint32_t row, uint32_t column) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint8_t *at = planes.by_columns + static_cast<size_t>(column + i) * planes.rows + row;
            if (ROWS == 16)
                *reinterpret_cast<uint4 *>(at) = make_uint4(words[i][0], words[i][1 % (ROWS / 4)],
                                                            words[i][2 % (ROWS / 4)], words[i][3 % (ROWS / 4)]);
            else if (ROWS == 8)
                *reinterpret_cast<uint2 *>(at) = make_uint2(words[i][0], words[i][1 % (ROWS / 4)]);
            else
                *reinterpret_cast<uint32_t *>(at) = words[i][0];
        }
    }
};

/* IS_LATE: store_late. */
template <bool IS_LATE = false>
static METHOD void store_row_codes(const code_planes &planes, uint32_t row, uint32_t column, const uint32_t *two) {
    uint8_t *at = planes.by_rows + static_cast<size_t>(row) * planes.columns + column;
    if (IS_LATE)
        store_late(at, make_uint2(two[0], two[1]));
    else
        *reinterpret_cast<uint2 *>(at) = make_uint2(two[0], two[1]);
}

DEVICE float amax_of8(float amax, const float *v) {
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = larger(amax, magnitude(v[i]));
    return amax;
}

/* Where a lane stands in a warp of ACROSS by 32 / ACROSS threads. A store is cut into pieces of 128 bytes of a warp, in
 * order of lanes; so NEAR threads stand side by side, then come those below them, then the next NEAR: a piece of the
 * transposed plane then has whole sectors of 32 bytes, and one of the rows 64 bytes. */
template <int ACROSS, int NEAR>
struct lane_place {
    static METHOD uint32_t across(uint32_t lane) {
        return lane % NEAR + lane / (NEAR * (WARP / ACROSS)) * NEAR;
    }
    static METHOD uint32_t below(uint32_t lane) {
        return lane / NEAR % (WARP / ACROSS);
    }
};

/* One thread takes ROWS rows of eight units; one warp ACROSS threads side by side, 32 / ACROSS below each other; one
 * block WARPS_X by WARPS_Y warps, BLOCKS of which a multiprocessor should hold (0: as many as the compiler sees fit; 1
 * would tell it that registers do not matter). AHEAD groups of four rows are under way from memory. Threads meet for
 * the amax alone: no barrier, no shared memory. */
template <int FORMAT_, int ROWS_, int ACROSS_, int AHEAD_, int WARPS_X_, int WARPS_Y_, int NEAR_ = ACROSS_,
          int BLOCKS_ = 0>
struct tile_shape {
    static constexpr int FORMAT = FORMAT_, ROWS = ROWS_, ACROSS = ACROSS_, WARPS_X = WARPS_X_, BLOCKS = BLOCKS_;
    typedef lane_place<ACROSS_, NEAR_> place;
    static constexpr int GROUPS = ROWS / 4, EARLY = AHEAD_ < GROUPS ? AHEAD_ : GROUPS;
    static constexpr int THREADS = WARP * WARPS_X * WARPS_Y_;
    static constexpr int UNITS = WARPS_X * ACROSS * 8, TALL = WARPS_Y_ * (WARP / ACROSS) * ROWS; /* of a block */
};

template <typename Source>
struct tile_job {
    Source source;
    code_planes planes;
    scaling scale;
    tensor_words words;
};

/* The codes of one row of a group, kept for the transposed plane and stored by rows. Returns the amax. */
template <typename Source, int FORMAT, bool IS_LATE>
static METHOD float tile_row(const tile_job<Source> &job, const float (*v)[8], uint32_t row, uint32_t unit, float scale,
                             float amax, uint32_t (*four)[4][2], int i) {
#pragma unroll
    for (int output = 0; output < Source::OUTPUTS; ++output) {
        amax = amax_of8(amax, v[output]);
        if constexpr (FORMAT != FORMAT_NONE) {
            four[output][i][0] = encode4<FORMAT>(v[output], scale);
            four[output][i][1] = encode4<FORMAT>(v[output] + 4, scale);
            if (job.planes.by_rows)
                store_row_codes<IS_LATE>(job.planes, row, job.source.column(output, unit), four[output][i]);
        }
    }
    return amax;
}

template <typename Source, typename Tile>
static METHOD float tile_run(const tile_job<Source> &job, uint32_t row, uint32_t unit, float scale, uint32_t mask) {
    const typename Source::constant constant = job.source.begin(row, unit);
    typename Source::raw raw[Tile::EARLY * 4];
    column_codes<Tile::ROWS> columns[Source::OUTPUTS];
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < Tile::EARLY * 4; ++i) raw[i] = job.source.load(row + i, unit);
    warp_barrier(mask);
#pragma unroll
    for (int group = 0; group < Tile::GROUPS; ++group) {
        uint32_t four[Source::OUTPUTS][4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float v[Source::OUTPUTS][8];
            const int at = (group * 4 + i) % (Tile::EARLY * 4);
            job.source.values(constant, raw[at], row + group * 4 + i, unit, v);
            if (group + Tile::EARLY < Tile::GROUPS)
                raw[at] = job.source.load(row + (group + Tile::EARLY) * 4 + i, unit);
            amax = tile_row<Source, Tile::FORMAT, false>(job, v, row + group * 4 + i, unit, scale, amax, four, i);
        }
        if constexpr (Tile::FORMAT != FORMAT_NONE) {
#pragma unroll
            for (int output = 0; output < Source::OUTPUTS; ++output) columns[output].put(group, four[output]);
        }
    }
    if constexpr (Tile::FORMAT != FORMAT_NONE) {
        if (job.planes.by_columns == nullptr) return amax;
#pragma unroll
        for (int output = 0; output < Source::OUTPUTS; ++output)
            columns[output].store(job.planes, row, job.source.column(output, unit));
    }
    return amax;
}

template <typename Source, typename Tile>
KERNEL void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)
    tile_kernel(const __grid_constant__ tile_job<Source> job) {
    typedef typename Tile::place place;
    if (is_filled<Source>(job.words, job.scale.amax)) return;
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint32_t unit = blockIdx.x * Tile::UNITS + (warp % Tile::WARPS_X * Tile::ACROSS + place::across(lane)) * 8;
    const uint32_t row =
        blockIdx.y * Tile::TALL + (warp / Tile::WARPS_X * (WARP / Tile::ACROSS) + place::below(lane)) * Tile::ROWS;
    const float scale = scale_of(job.scale);
    const int32_t seen = job.scale.amax ? load_shared_word(job.scale.amax) : 0;
    float amax = 0.0f;
    const bool inside = unit < job.source.units && row < job.planes.rows;
    const uint32_t mask = warp_ballot(inside);
    if (inside) amax = tile_run<Source, Tile>(job, row, unit, scale, mask);
    record_amax(job.scale.amax, amax, seen);
    if (is_first_block() && threadIdx.x == 0) write_words(job.words, scale);
}

template <typename Source, typename Tile>
static qe_status tile_launch(const tile_job<Source> &job, cudaStream_t stream) {
    const dim3 grid(pieces_of(job.source.units, Tile::UNITS), pieces_of(job.planes.rows, Tile::TALL));
    return launch(tile_kernel<Source, Tile>, grid, Tile::THREADS, 0, 0, stream, job);
}

/* --- large tensors ------------------------------------------------------------------------------------------------ */

/* What bounds these kernels is how well reads and writes mix in memory, and how soon the first reads are under way. So
 * a thread asks for many rows before it looks at one, little stands in front of that, and blocks run in bands, column
 * after column, so that neighbours of the transposed plane are written about the same time. Of inputs and of codes by
 * rows whole lines of 128 bytes are asked of the second cache, of the transposed plane half lines. Codes of four rows
 * of a column are a word in shared memory; the words of a row stand in an order that differs from piece to piece of
 * sixteen rows, so that no two that are stored together meet in a bank. */
template <typename Source>
struct staged_codes {
    typedef typename Source::large shape;
    uint32_t at[Source::OUTPUTS][shape::ROWS / 4][shape::UNITS];

    static METHOD uint32_t turned(uint32_t column, uint32_t piece) {
        return column ^ piece * 8;
    }
    /* Eight columns from `column` on, of group `number` of four rows. */
    METHOD void put(int output, uint32_t number, uint32_t column, const uint32_t (*four)[2]) {
        column_codes<4> codes;
        codes.put(0, four);
        uint32_t *to = &at[output][number][turned(column, number / 4)];
        *reinterpret_cast<uint4 *>(to) =
            make_uint4(codes.words[0][0], codes.words[1][0], codes.words[2][0], codes.words[3][0]);
        *reinterpret_cast<uint4 *>(to + 4) =
            make_uint4(codes.words[4][0], codes.words[5][0], codes.words[6][0], codes.words[7][0]);
    }
    /* Sixteen rows of a column. */
    METHOD uint4 get(int output, uint32_t column, uint32_t piece) const {
        const uint32_t from = turned(column, piece);
        return make_uint4(at[output][piece * 4][from], at[output][piece * 4 + 1][from], at[output][piece * 4 + 2][from],
                          at[output][piece * 4 + 3][from]);
    }
};

/* Which tile a block takes: blocks run about in the order of their numbers, a band's along x. No division stands before
 * the first load. Codes are made from the end on, where what was written or measured last may still lie in the second
 * cache. Blocks behind the last band's end have no tile: theirs is not below `down`. */
template <typename Shape>
DEVICE uint2 staged_tile(uint32_t down, bool is_reversed) {
    const uint32_t x = blockIdx.x / Shape::BAND, y = block_down() * Shape::BAND + blockIdx.x % Shape::BAND;
    return is_reversed ? make_uint2(gridDim.x / Shape::BAND - 1 - x, down - 1 - y) : make_uint2(x, y);
}

template <typename Shape>
static dim3 staged_grid(uint32_t units, uint32_t rows) {
    const uint32_t across = pieces_of(units, Shape::UNITS), down = pieces_of(rows, Shape::ROWS);
    return tall_grid(across * Shape::BAND, pieces_of(down, Shape::BAND));
}

template <typename Source>
static METHOD void staged_store(const tile_job<Source> &job, const staged_codes<Source> &stage, uint32_t first_row,
                                uint32_t first_unit) {
    typedef typename Source::large shape;
#pragma unroll
    for (int output = 0; output < Source::OUTPUTS; ++output)
#pragma unroll
        for (uint32_t i = threadIdx.x; i < shape::UNITS * shape::PIECES; i += shape::THREADS) {
            const uint32_t column = i / shape::PIECES, piece = i % shape::PIECES;
            const uint32_t unit = first_unit + column, row = first_row + piece * 16;
            if (unit >= job.source.units || row >= job.planes.rows) continue;
            uint8_t *plane = job.planes.by_columns;
            store_late(plane + static_cast<size_t>(job.source.column(output, unit)) * job.planes.rows + row,
                       stage.get(output, column, piece));
        }
}

/* The codes of a thread's rows. number: its first group of four of them in the block. Returns the amax. */
template <typename Source, int FORMAT>
static METHOD float staged_run(const tile_job<Source> &job, staged_codes<Source> &stage, uint32_t row, uint32_t unit,
                               uint32_t number, float scale, uint32_t mask) {
    typedef typename Source::large shape;
    const typename Source::constant constant = job.source.begin(row, unit);
    typename Source::raw raw[shape::EARLY];
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < shape::EARLY; ++i) raw[i] = job.source.load(row + i, unit);
    warp_barrier(mask);
#pragma unroll
    for (int group = 0; group < shape::DEEP; ++group) {
        uint32_t four[Source::OUTPUTS][4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float v[Source::OUTPUTS][8];
            const int at = group * 4 + i;
            job.source.values(constant, raw[at % shape::EARLY], row + at, unit, v);
            if (at + shape::EARLY < shape::DEEP * 4)
                raw[at % shape::EARLY] = job.source.load(row + at + shape::EARLY, unit);
            amax = tile_row<Source, FORMAT, true>(job, v, row + at, unit, scale, amax, four, i);
        }
        if constexpr (FORMAT != FORMAT_NONE) {
#pragma unroll
            for (int output = 0; output < Source::OUTPUTS; ++output)
                stage.put(output, number + group, unit % shape::UNITS, four[output]);
        }
    }
    return amax;
}

template <typename Source, int FORMAT>
KERNEL void __launch_bounds__(Source::large::THREADS, Source::large::BLOCKS)
    staged_kernel(const __grid_constant__ tile_job<Source> job) {
    typedef typename Source::large shape;
    if (is_filled<Source>(job.words, job.scale.amax)) return;
    staged_codes<Source> &stage = shared_object<staged_codes<Source>>();
    const uint32_t number = threadIdx.x / shape::ACROSS * shape::DEEP;
    const uint32_t down = (job.planes.rows - 1) / shape::ROWS + 1;
    const uint2 tile = staged_tile<shape>(down, FORMAT != FORMAT_NONE);
    if (tile.y >= down) return;
    const uint32_t first_row = tile.y * shape::ROWS, first_unit = tile.x * shape::UNITS;
    const uint32_t row = first_row + number * 4, unit = first_unit + threadIdx.x % shape::ACROSS * 8;
    const float scale = scale_of(job.scale);
    const int32_t seen = job.scale.amax ? load_shared_word(job.scale.amax) : 0;
    float amax = 0.0f;
    const bool inside = unit < job.source.units && row < job.planes.rows;
    const uint32_t mask = warp_ballot(inside);
    if (inside) amax = staged_run<Source, FORMAT>(job, stage, row, unit, number, scale, mask);
    record_amax(job.scale.amax, amax, seen);
    if (is_first_block() && threadIdx.x == 0) write_words(job.words, scale);
    if (FORMAT == FORMAT_NONE || job.planes.by_columns == nullptr) return;
    block_barrier();
    staged_store<Source>(job, stage, first_row, first_unit);
}

template <typename Source, int FORMAT>
static qe_status staged_launch(const tile_job<Source> &job, cudaStream_t stream) {
    typedef typename Source::large shape;
    const dim3 grid = staged_grid<shape>(job.source.units, job.planes.rows);
    return launch(staged_kernel<Source, FORMAT>, grid, shape::THREADS, shape::CLUSTER, 0, stream, job);
}

/* Small tiles where large ones would leave multiprocessors idle. */
enum { TILE_SMALL_VALUES = 3 << 20 };

template <typename Source, int FORMAT>
static qe_status tile_format(const tile_job<Source> &job, cudaStream_t stream) {
    constexpr int ROWS = Source::OUTPUTS == 1 ? 8 : 4; /* two outputs have no registers for more */
    typedef tile_shape<FORMAT, ROWS, 4, ROWS / 4, 16 / ROWS, 1> small;
    const uint64_t values = static_cast<uint64_t>(job.planes.rows) * job.source.units * Source::OUTPUTS;
    if (values <= TILE_SMALL_VALUES) return tile_launch<Source, small>(job, stream);
    return staged_launch<Source, FORMAT>(job, stream);
}

template <typename Source>
static qe_status tile_quantize(const tile_job<Source> &job, int format, cudaStream_t stream) {
    switch (format) {
        case QE_FORMAT_E4M3: return tile_format<Source, QE_FORMAT_E4M3>(job, stream);
        case QE_FORMAT_E5M2: return tile_format<Source, QE_FORMAT_E5M2>(job, stream);
        default: return tile_format<Source, FORMAT_NONE>(job, stream);
    }
}

#endif
