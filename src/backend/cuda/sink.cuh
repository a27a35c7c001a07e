/* sink.cuh - rounds the values of a source and stores them as a target wants them. Beside tile.cuh:
 *
 *  wide_kernel    bf16 by rows, eight at a time
 *  single_kernel  any format, any shape, one value at a time; or the amax alone
 *  block_kernel   blocks of 128: decoded bf16 by rows, codes with scales by columns; tiles of weights
 *  finish_kernel  what is written once per tensor, where no other kernel can write it
 *
 * Under `current` the word of the inverse scale holds the amax while the tensor is measured and quantized. */
#ifndef QE_CUDA_SINK_CUH
#define QE_CUDA_SINK_CUH

#include "backend/cuda/tile.cuh"
#include "qeffect/limits.h"

/* Where values go, in up to two places. Pointers may be NULL. */
struct places {
    void *at[2];
    uint32_t rows, columns;
    uint8_t format[2], transposed[2];
};

/* --- eight bf16 at a time ---------------------------------------------------------------------------------------- */

template <typename Source>
struct wide_job {
    Source source;
    uint16_t *at[2]; /* [rows, columns]; NULL: not wanted; may be what the source reads */
    uint32_t rows, columns;
    tensor_words words;
};

enum { WIDE_THREADS = 64, WIDE_ROWS = 4 };

template <typename Source, int THREADS, int ROWS>
KERNEL void __launch_bounds__(THREADS) wide_kernel(const __grid_constant__ wide_job<Source> job) {
    const uint32_t unit = (blockIdx.x * THREADS + threadIdx.x) * 8, first = block_down() * ROWS;
    if (is_first_block() && threadIdx.x == 0) write_words(job.words, 1.0f);
    if (unit >= job.source.units) return;
    const typename Source::constant constant = job.source.begin(first, unit);
    typename Source::raw raw[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        if (first + i < job.rows) raw[i] = job.source.load(first + i, unit);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (first + i >= job.rows) return;
        float v[Source::OUTPUTS][8];
        job.source.values(constant, raw[i], first + i, unit, v);
#pragma unroll
        for (int output = 0; output < Source::OUTPUTS; ++output) {
            const size_t at = static_cast<size_t>(first + i) * job.columns + job.source.column(output, unit);
            const uint4 words = pack8(v[output]);
            if (job.at[0]) *reinterpret_cast<uint4 *>(job.at[0] + at) = words;
            if (job.at[1]) *reinterpret_cast<uint4 *>(job.at[1] + at) = words;
        }
    }
}

template <typename Source, int THREADS, int ROWS>
static qe_status wide_launch(const wide_job<Source> &job, cudaStream_t stream) {
    const dim3 grid = tall_grid(pieces_of(job.source.units, THREADS * 8), pieces_of(job.rows, ROWS));
    return launch(wide_kernel<Source, THREADS, ROWS>, grid, THREADS, 0, 0, stream, job);
}

/* --- one value at a time ----------------------------------------------------------------------------------------- */

template <typename Source>
struct single_job {
    Source source;
    places to;
    scaling scale;
    tensor_words words;
};

enum { SINGLE_THREADS = 256, SINGLE_BLOCKS_MAX = 4096 };

DEVICE void store_single(const places &to, int place, uint32_t row, uint32_t column, float value, float scale) {
    const size_t at = to.transposed[place] ? static_cast<size_t>(column) * to.rows + row
                                           : static_cast<size_t>(row) * to.columns + column;
    const int format = to.format[place];
    if (format == QE_FORMAT_FP32)
        static_cast<float *>(to.at[place])[at] = value;
    else if (format == QE_FORMAT_BF16)
        static_cast<uint16_t *>(to.at[place])[at] = static_cast<uint16_t>(bf16_code(value));
    else
        static_cast<uint8_t *>(to.at[place])[at] = static_cast<uint8_t>(encode1(format, mul(value, scale)));
}

template <typename Source>
KERNEL void __launch_bounds__(SINGLE_THREADS) single_kernel(const __grid_constant__ single_job<Source> job) {
    if (is_filled<Source>(job.words, job.scale.amax)) return;
    const float scale = scale_of(job.scale);
    const uint64_t count = static_cast<uint64_t>(job.to.rows) * job.source.units;
    float amax = 0.0f;
    for (uint64_t i = blockIdx.x * static_cast<uint64_t>(SINGLE_THREADS) + threadIdx.x; i < count;
         i += static_cast<uint64_t>(SINGLE_THREADS) * gridDim.x) {
        const uint32_t row = static_cast<uint32_t>(i / job.source.units);
        const uint32_t unit = static_cast<uint32_t>(i % job.source.units);
        float v[Source::OUTPUTS];
        job.source.value(row, unit, v);
        for (int output = 0; output < Source::OUTPUTS; ++output) {
            amax = larger(amax, magnitude(v[output]));
            for (int place = 0; place < 2; ++place)
                if (job.to.at[place])
                    store_single(job.to, place, row, job.source.column(output, unit), v[output], scale);
        }
    }
    record_amax(job.scale.amax, amax, 0);
    if (blockIdx.x == 0 && threadIdx.x == 0) write_words(job.words, scale);
}

template <typename Source>
static qe_status single_launch(const single_job<Source> &job, cudaStream_t stream) {
    const uint32_t needed = pieces_of(static_cast<uint64_t>(job.to.rows) * job.source.units, SINGLE_THREADS);
    const uint32_t most = SINGLE_BLOCKS_MAX, blocks = needed < most ? needed : most;
    return launch(single_kernel<Source>, dim3(blocks), SINGLE_THREADS, 0, 0, stream, job);
}

/* --- blocks of 128 ----------------------------------------------------------------------------------------------- */

template <typename Source>
struct block_job {
    Source source;
    uint16_t *decoded; /* [rows, columns] bf16: 1x128 blocks, tiles of a weight; NULL: not wanted */
    uint8_t *codes; /* [rows, columns]: 128x1 blocks, tiles of a weight; NULL: not wanted */
    float *scale_inv;
    uint32_t rows, columns;
    int32_t format;
    uint32_t is_weight;
    tensor_words words;
};

enum { BLOCK_THREADS = 256, BLOCK_WARPS = BLOCK_THREADS / WARP, BLOCK_PITCH = QE_BLOCK + 1 };

struct block_shared {
    float value[QE_BLOCK][BLOCK_PITCH];
    float half[2][QE_BLOCK]; /* amax of a column's upper and lower half */
    int32_t whole; /* amax of the tile */
};

DEVICE float block_scale(int32_t amax, int format) {
    return scale_from_amax(float_of(static_cast<uint32_t>(amax)), format_max_of(format), true);
}

DEVICE uint16_t block_decoded(float value, float scale, float scale_inv, int format) {
    return static_cast<uint16_t>(bf16_code(mul(decode1(format, encode1(format, mul(value, scale))), scale_inv)));
}

/* A warp per row. A weight's rows share the scale of the tile. */
template <typename Source>
static METHOD void block_rows(const block_job<Source> &job, const block_shared &shared) {
    const uint32_t lane = threadIdx.x % WARP, left = blockIdx.x * QE_BLOCK;
    for (uint32_t i = threadIdx.x / WARP; i < QE_BLOCK && block_down() * QE_BLOCK + i < job.rows; i += BLOCK_WARPS) {
        float amax = 0.0f;
        for (uint32_t j = lane; j < QE_BLOCK; j += WARP) amax = larger(amax, magnitude(shared.value[i][j]));
        const int32_t of_row = warp_largest(static_cast<int32_t>(bits_of(amax)));
        const float scale = block_scale(job.is_weight ? shared.whole : of_row, job.format);
        const float scale_inv = inverse_of(scale);
        const size_t at = static_cast<size_t>(block_down() * QE_BLOCK + i) * job.columns + left;
        for (uint32_t j = lane; j < QE_BLOCK && left + j < job.columns; j += WARP)
            job.decoded[at + j] = block_decoded(shared.value[i][j], scale, scale_inv, job.format);
    }
}

/* Two threads per column, each for half of its rows. */
template <typename Source>
static METHOD void block_columns(const block_job<Source> &job, block_shared &shared) {
    const uint32_t j = threadIdx.x % QE_BLOCK, half = threadIdx.x / QE_BLOCK, column = blockIdx.x * QE_BLOCK + j;
    const uint32_t begin = half * (QE_BLOCK / 2), end = begin + QE_BLOCK / 2;
    float amax = 0.0f;
    for (uint32_t i = begin; i < end; ++i) amax = larger(amax, magnitude(shared.value[i][j]));
    shared.half[half][j] = amax;
    block_barrier();
    amax = larger(shared.half[0][j], shared.half[1][j]);
    const float scale = block_scale(job.is_weight ? shared.whole : static_cast<int32_t>(bits_of(amax)), job.format);
    if (column >= job.columns) return;
    for (uint32_t i = begin; i < end && block_down() * QE_BLOCK + i < job.rows; ++i)
        job.codes[static_cast<size_t>(block_down() * QE_BLOCK + i) * job.columns + column] =
            static_cast<uint8_t>(encode1(job.format, mul(shared.value[i][j], scale)));
    if (half != 0) return;
    if (!job.is_weight)
        job.scale_inv[static_cast<size_t>(block_down()) * job.columns + column] = inverse_of(scale);
    else if (j == 0)
        job.scale_inv[static_cast<size_t>(block_down()) * gridDim.x + blockIdx.x] = inverse_of(scale);
}

/* One block per 128 x 128 values, cut at the edges; values beyond them are 0, which no amax sees. */
template <typename Source>
KERNEL void __launch_bounds__(BLOCK_THREADS) block_kernel(const __grid_constant__ block_job<Source> job) {
    block_shared &shared = shared_large_object<block_shared>();
    const uint32_t j = threadIdx.x % QE_BLOCK, column = blockIdx.x * QE_BLOCK + j;
    if (block_down() * QE_BLOCK >= job.rows) return; /* a block too many of a tall grid */
    if (threadIdx.x == 0) shared.whole = 0;
    block_barrier();
    float amax = 0.0f;
    for (uint32_t i = threadIdx.x / QE_BLOCK; i < QE_BLOCK; i += BLOCK_THREADS / QE_BLOCK) {
        const uint32_t row = block_down() * QE_BLOCK + i;
        float v[Source::OUTPUTS], value = 0.0f;
        if (row < job.rows && column < job.columns) {
            int output;
            const uint32_t unit = job.source.unit_of(column, &output);
            job.source.value(row, unit, v);
            value = Source::OUTPUTS == 2 && output ? v[Source::OUTPUTS - 1] : v[0];
        }
        shared.value[i][j] = value;
        amax = larger(amax, magnitude(value));
    }
    const int32_t of_warp = warp_largest(static_cast<int32_t>(bits_of(amax)));
    if (threadIdx.x % WARP == 0) raise_word(&shared.whole, of_warp);
    block_barrier();
    if (job.decoded) block_rows(job, shared);
    if (job.codes) block_columns(job, shared);
    if (is_first_block() && threadIdx.x == 0) write_words(job.words, 1.0f);
}

/* --- what is left ------------------------------------------------------------------------------------------------ */

struct finish_job {
    scaling scale;
    tensor_words words;
};

KERNEL void finish_kernel(const __grid_constant__ finish_job job) {
    const float scale = scale_of(job.scale); /* first: the amax may lie where the inverse scale goes */
    write_words(job.words, scale);
}

/* --- a target ---------------------------------------------------------------------------------------------------- */

static inline bool is_8_bit(int format) {
    return format == QE_FORMAT_E4M3 || format == QE_FORMAT_E5M2;
}

/* The tensors of a target whose codes are wanted; the same memory is written once. */
static inline places places_of(const qe_quantize_target *target, uint32_t rows, uint32_t columns) {
    places to = {};
    to.rows = rows, to.columns = columns;
    const qe_qtensor *tensors[2] = {&target->operand, &target->retained};
    for (int i = 0; i < 2; ++i) {
        to.at[i] = tensors[i]->codes;
        to.format[i] = tensors[i]->format;
        to.transposed[i] = tensors[i]->transposed;
    }
    if (to.at[1] == to.at[0]) to.at[1] = nullptr;
    return to;
}

static inline tensor_words words_of(const qe_quantize_target *target, const tensor_words &key) {
    tensor_words words = key;
    words.scale_inv[0] = target->operand.codes ? target->operand.scale_inv : nullptr;
    words.scale_inv[1] = target->retained.codes ? target->retained.scale_inv : nullptr;
    if (words.scale_inv[1] == words.scale_inv[0]) words.scale_inv[1] = nullptr;
    return words;
}

static inline scaling scaling_of(const qe_quantize_target *target) {
    scaling s = {};
    s.format_max = target->format == QE_FORMAT_E4M3 ? 448.0f : 57344.0f;
    if (target->recipe != QE_RECIPE_DELAYED) return s;
    s.scale = target->scale;
    s.amax = reinterpret_cast<int32_t *>(target->amax); /* magnitudes: their bits order as they do */
    return s;
}

/* 8-bit codes in the two ways that tile_kernel writes. */
static inline bool planes_of(const places &to, code_planes *planes_out) {
    code_planes planes = {};
    planes.rows = to.rows, planes.columns = to.columns;
    for (int i = 0; i < 2; ++i) {
        if (to.at[i] == nullptr) continue;
        uint8_t **plane = to.transposed[i] ? &planes.by_columns : &planes.by_rows;
        if (!is_8_bit(to.format[i]) || *plane || !is_aligned(to.at[i])) return false;
        *plane = static_cast<uint8_t *>(to.at[i]);
    }
    *planes_out = planes;
    return to.rows % 16 == 0 && to.columns % 16 == 0;
}

/* Have they no byte in common? What is made in one pass must not lie where others still read. */
static inline bool is_apart(const void *one, uint64_t bytes, const void *other, uint64_t other_bytes) {
    const uintptr_t a = reinterpret_cast<uintptr_t>(one), b = reinterpret_cast<uintptr_t>(other);
    return one == nullptr || other == nullptr || (a < b ? b - a >= bytes : a - b >= other_bytes);
}

/* Codes under scales that are known when the kernels run. format: of the codes, FORMAT_NONE: only the amax. */
template <typename Source>
static qe_status scaled_quantize(const Source &source, const places &to, int format, const scaling &scale,
                                 const tensor_words &words, cudaStream_t stream) {
    tile_job<Source> tile = {};
    if (source.wide() && planes_of(to, &tile.planes)) {
        tile.source = source, tile.scale = scale, tile.words = words;
        return tile_quantize(tile, format, stream);
    }
    single_job<Source> single = {};
    single.source = source, single.to = to, single.scale = scale, single.words = words;
    return single_launch(single, stream);
}

/* Measures, quantizes, then turns the measure into the inverse scale: three launches and no look at the device. */
template <typename Source>
static qe_status current_quantize(const Source &source, const places &to, const qe_quantize_target *target,
                                  const tensor_words &words, cudaStream_t stream) {
    int32_t *word = reinterpret_cast<int32_t *>(words.scale_inv[0] ? words.scale_inv[0] : words.scale_inv[1]);
    if (word == nullptr) return QE_ERROR_ARGUMENT;
    places nowhere = {};
    nowhere.rows = to.rows, nowhere.columns = to.columns;
    scaling measure = {};
    measure.amax = word;
    if (cudaMemsetAsync(word, 0, sizeof *word, stream) != cudaSuccess) return QE_ERROR_DEVICE;
    LAUNCH_TRY(scaled_quantize(source, nowhere, FORMAT_NONE, measure, tensor_words(), stream));
    finish_job finish = {};
    finish.scale.tensor_amax = word, finish.scale.format_max = scaling_of(target).format_max;
    finish.words = words;
    LAUNCH_TRY(scaled_quantize(source, to, target->format, finish.scale, tensor_words(), stream));
    return launch(finish_kernel, dim3(1), 1, 0, 0, stream, finish);
}

template <typename Source>
static qe_status block_quantize(const Source &source, const places &to, const qe_quantize_target *target,
                                bool is_weight, const tensor_words &words, cudaStream_t stream) {
    block_job<Source> job = {};
    job.source = source;
    job.decoded = static_cast<uint16_t *>(target->operand.codes);
    job.codes = static_cast<uint8_t *>(target->retained.codes);
    job.scale_inv = target->retained.scale_inv;
    job.rows = to.rows, job.columns = to.columns;
    job.format = target->format, job.is_weight = is_weight;
    job.words = words;
    job.words.scale_inv[0] = job.words.scale_inv[1] = nullptr; /* one per block, not per tensor */
    const dim3 grid = tall_grid(pieces_of(to.columns, QE_BLOCK), pieces_of(to.rows, QE_BLOCK));
    return launch(block_kernel<Source>, grid, BLOCK_THREADS, 0, sizeof(block_shared), stream, job);
}

/* Values as bf16 or fp32. */
template <typename Source>
static qe_status values_store(const Source &source, const places &to, const tensor_words &words, cudaStream_t stream) {
    wide_job<Source> wide = {};
    bool is_wide = source.wide() && to.columns % 8 == 0;
    for (int i = 0; i < 2; ++i) {
        wide.at[i] = static_cast<uint16_t *>(to.at[i]);
        if (to.at[i]) is_wide = is_wide && to.format[i] == QE_FORMAT_BF16 && !to.transposed[i] && is_aligned(to.at[i]);
    }
    if (is_wide) {
        wide.source = source, wide.rows = to.rows, wide.columns = to.columns, wide.words = words;
        return wide_launch<Source, WIDE_THREADS, WIDE_ROWS>(wide, stream);
    }
    single_job<Source> single = {};
    single.source = source, single.to = to, single.words = words;
    return single_launch(single, stream);
}

/* Everything that a target may ask for. key: the words of a weight's cache key, else empty. */
template <typename Source>
static qe_status target_fill(const Source &source, uint32_t rows, uint32_t columns, const qe_quantize_target *target,
                             bool is_weight, const tensor_words &key, cudaStream_t stream) {
    const places to = places_of(target, rows, columns);
    const tensor_words words = words_of(target, key);
    switch (target->recipe) {
        case QE_RECIPE_DELAYED: return scaled_quantize(source, to, target->format, scaling_of(target), words, stream);
        case QE_RECIPE_CURRENT: return current_quantize(source, to, target, words, stream);
        case QE_RECIPE_BLOCK: return block_quantize(source, to, target, is_weight, words, stream);
        default: return values_store(source, to, words, stream);
    }
}

#endif
