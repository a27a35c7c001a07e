/* rope_codes.cuh - rope's backward with codes both ways, for heads of 128.
 *
 * A block has 64 rows of HEADS heads, a thread four rows of eight pairs of each. The angles of these pairs stay in
 * registers: heads share them. All that a block reads is asked for first thing, the angles, then head after head into
 * shared memory, 16 KiB each; while codes of one head are made, others are on their way. A thread reads what it brought
 * itself. Codes leave by rows from registers; those of four rows take the place of what they were made of, and are then
 * read by columns, sixteen rows at a time.
 *
 * IS_AT_ONCE: all blocks run at a time. Then what was read is the first that the second cache gives up, and codes the
 * next: it has room for what is still to come. Many rows stream through it, faster without such words. */
#ifndef QE_CUDA_ROPE_CODES_CUH
#define QE_CUDA_ROPE_CODES_CUH

#include "backend/cuda/tile.cuh"

enum { ROPE_TALL = 64, ROPE_HALF = 64 /* pairs of a head */, ROPE_CODES_THREADS = ROPE_TALL / 4 * ROPE_HALF / 8 };
enum { ROPE_PIECES = 2 * ROPE_HALF / 8 /* of a row, 16 bytes each */, ROPE_CODES_BLOCKS = 4 /* of a multiprocessor */ };

/* Where a thread stands: which four rows of a block, which eight pairs of a head. */
struct rope_place {
    uint32_t four, across, row;
    METHOD rope_place()
        : four(threadIdx.x / (ROPE_HALF / 8)), across(threadIdx.x % (ROPE_HALF / 8)),
          row(block_down() * ROPE_TALL + four * 4) {}
};

template <bool IS_LATE, typename Words>
static METHOD void rope_store(uint8_t *at, Words words) {
    if (IS_LATE)
        store_late(at, words);
    else
        store_whole(at, words);
}

/* Codes of four rows of eight pairs, lower and upper halves. */
struct rope_fours {
    uint32_t of[2][4][2];
};

/* 64 rows of a head; a thread's rows are those of its four, its pieces `across` and eight further. A group of four rows
 * has a line of words for its columns q, 4 + q, ... in its q-th row, in an order that differs from sixteen rows to
 * sixteen, so that no two words that are stored together meet in a bank. */
struct rope_head {
    uint4 at[ROPE_TALL][ROPE_PIECES];

    METHOD void bring(const rope_place &place, const uint16_t *from, uint32_t columns, bool is_last_use) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            copy_ahead(&at[place.four * 4 + i][place.across], from, is_last_use);
            copy_ahead(&at[place.four * 4 + i][place.across + ROPE_HALF / 8], from + ROPE_HALF, is_last_use);
            from += columns;
        }
    }
    METHOD void read(const rope_place &place, uint32_t i, float *lower, float *upper) const {
        unpack8(at[place.four * 4 + i][place.across], lower);
        unpack8(at[place.four * 4 + i][place.across + ROPE_HALF / 8], upper);
    }
    static METHOD uint32_t turned(uint32_t across, uint32_t sixteen) {
        return across ^ sixteen * 2;
    }
    /* All lanes of the warp have read what was there. */
    METHOD void put(const rope_place &place, const rope_fours &fours) {
        const uint32_t to = turned(place.across, place.four / 4);
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            column_codes<4> codes;
            codes.put(0, fours.of[half]);
            uint4(*const row)[ROPE_PIECES] = &at[place.four * 4 + half * 2];
            row[0][to] = make_uint4(codes.words[0][0], codes.words[1][0], codes.words[2][0], codes.words[3][0]);
            row[1][to] = make_uint4(codes.words[4][0], codes.words[5][0], codes.words[6][0], codes.words[7][0]);
        }
    }
    /* Four columns of sixteen rows. first: the head's first column; row: the block's first row. */
    template <bool IS_LATE>
    METHOD void store(const code_planes &planes, uint32_t first, uint32_t row) const {
        const uint32_t sixteen = threadIdx.x % 4, across = threadIdx.x / 4 % 8, q = threadIdx.x / WARP;
        if (row + sixteen * 16 >= planes.rows) return;
        uint4 w[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) w[i] = at[sixteen * 16 + i * 4 + q][turned(across, sixteen)];
        const uint32_t column = first + q / 2 * ROPE_HALF + across * 8 + q % 2 * 4;
        uint8_t *to = planes.by_columns + static_cast<size_t>(column) * planes.rows + row + sixteen * 16;
        rope_store<IS_LATE>(to, make_uint4(w[0].x, w[1].x, w[2].x, w[3].x));
        rope_store<IS_LATE>(to += planes.rows, make_uint4(w[0].y, w[1].y, w[2].y, w[3].y));
        rope_store<IS_LATE>(to += planes.rows, make_uint4(w[0].z, w[1].z, w[2].z, w[3].z));
        rope_store<IS_LATE>(to += planes.rows, make_uint4(w[0].w, w[1].w, w[2].w, w[3].w));
    }
};

/* What a thread needs of the table. */
struct rope_turns {
    rope_turn of[4];
    METHOD void load(const rope_source &source, const rope_place &place) {
        uint32_t position = place.row % source.sequence;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const size_t at = static_cast<size_t>(position) * ROPE_HALF + place.across * 8;
            of[i] = rope_turn_here(source.cosine + at, source.sine + at);
            if (++position == source.sequence) position = 0;
        }
    }
};

/* A thread's rows of a head that has come. to: of codes by rows, or NULL. Returns the amax. */
template <int FORMAT, bool IS_LATE>
static METHOD float rope_encode(const rope_head &head, const rope_place &place, const rope_turns &turns, bool is_turned,
                                float scale, float amax, uint8_t *to, uint32_t columns, rope_fours &fours) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        float v[2][8];
        head.read(place, i, v[0], v[1]);
        if (is_turned) rope_apply(rope_back(turns.of[i]), v[0], v[1]);
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            uint32_t *const two = fours.of[half][i];
            amax = amax_of8(amax, v[half]);
            two[0] = encode4<FORMAT>(v[half], scale), two[1] = encode4<FORMAT>(v[half] + 4, scale);
            if (to == nullptr) continue;
            rope_store<IS_LATE>(to + i * static_cast<size_t>(columns) + half * ROPE_HALF, make_uint2(two[0], two[1]));
        }
    }
    return amax;
}

template <int HEADS>
struct rope_heads {
    rope_head of[HEADS];
};

/* Blocks: heads blockIdx.x, blockIdx.x + gridDim.x, ... of 64 rows, so that all blocks read neighbours at a time. */
template <int FORMAT, int HEADS, bool IS_AT_ONCE>
KERNEL void __launch_bounds__(ROPE_CODES_THREADS, ROPE_CODES_BLOCKS)
    rope_codes_kernel(const __grid_constant__ tile_job<rope_source> job) {
    rope_heads<HEADS> &shared = shared_large_object<rope_heads<HEADS>>();
    const rope_place place;
    const uint32_t columns = job.source.columns, heads = columns / (2 * ROPE_HALF);
    const bool inside = place.row < job.planes.rows;
    rope_turns turns;
    if (inside && blockIdx.x < job.source.turned_heads) turns.load(job.source, place);
    const size_t origin = static_cast<size_t>(place.row) * columns + place.across * 8;
#pragma unroll
    for (uint32_t i = 0; i < HEADS; ++i) {
        const uint32_t head = blockIdx.x + i * gridDim.x;
        if (inside && head < heads)
            shared.of[i].bring(place, job.source.qkv + origin + head * 2 * ROPE_HALF, columns, IS_AT_ONCE);
        copies_close();
    }
    const float scale = scale_of(job.scale);
    const int32_t seen = job.scale.amax ? load_shared_word(job.scale.amax) : 0;
    float amax = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < HEADS; ++i) {
        const uint32_t head = blockIdx.x + i * gridDim.x;
        if (head >= heads) break;
        copies_wait_but(HEADS - 1 - i);
        if (inside) {
            rope_fours fours;
            uint8_t *to = job.planes.by_rows ? job.planes.by_rows + origin + head * 2 * ROPE_HALF : nullptr;
            amax = rope_encode<FORMAT, IS_AT_ONCE>(shared.of[i], place, turns, head < job.source.turned_heads, scale,
                                                   amax, to, columns, fours);
            warp_barrier(0xFFFFFFFFu);
            shared.of[i].put(place, fours);
        }
        block_barrier();
        if (job.planes.by_columns == nullptr) continue;
        shared.of[i].template store<IS_AT_ONCE>(job.planes, head * 2 * ROPE_HALF, block_down() * ROPE_TALL);
    }
    record_amax(job.scale.amax, amax, seen);
    if (is_first_block() && threadIdx.x == 0) write_words(job.words, scale);
}

template <int FORMAT, int HEADS, bool IS_AT_ONCE>
static qe_status rope_codes_launch(const tile_job<rope_source> &job, cudaStream_t stream) {
    const uint32_t heads = job.source.columns / (2 * ROPE_HALF);
    const dim3 grid = tall_grid(pieces_of(heads, HEADS), pieces_of(job.planes.rows, ROPE_TALL));
    return launch(rope_codes_kernel<FORMAT, HEADS, IS_AT_ONCE>, grid, ROPE_CODES_THREADS, 0,
                  sizeof(rope_heads<HEADS>), stream, job);
}

/* Of blocks, a large chip's 132 multiprocessors have so many at a time. */
enum { ROPE_AT_A_TIME = 132 * ROPE_CODES_BLOCKS, ROPE_HEADS_MOST = 3 };

/* Few heads of a block that all of them run at a time; where that cannot be, one, so that reads and writes mix. */
template <int FORMAT>
static qe_status rope_codes(const tile_job<rope_source> &job, cudaStream_t stream) {
    const uint64_t tiles = pieces_of(job.planes.rows, ROPE_TALL), heads = job.source.columns / (2 * ROPE_HALF);
    if (tiles * heads <= ROPE_AT_A_TIME) return rope_codes_launch<FORMAT, 1, true>(job, stream);
    if (tiles * pieces_of(heads, ROPE_HEADS_MOST) <= ROPE_AT_A_TIME)
        return rope_codes_launch<FORMAT, ROPE_HEADS_MOST, true>(job, stream);
    return rope_codes_launch<FORMAT, 1, false>(job, stream);
}

#endif
