/* embed_backward.cu - gradients of a table's rows. No scratch and no atomics: a block owns a few rows of the vocabulary
 * and some columns, looks through all tokens for those of its rows, sorts what it finds by row (stable: tokens of a row
 * stay in order) and adds. So a row's contributions are added in the order of tokens, whatever the sizes of blocks.
 *
 * What bounds it is the frequent token, whose contributions come one after the other: a ring in shared memory has many
 * of them on their way, and rows of a block lie apart, since frequent tokens are often neighbours. */
#include "backend/cuda/codec.cuh"
#include "backend/cuda/kernels.h"
#include "backend/cuda/launch.cuh"

namespace {

constexpr uint32_t WARP = 32, ALL_LANES = 0xFFFFFFFFu;
constexpr uint32_t THREADS = 128, WARPS = THREADS / WARP;
constexpr uint32_t ROUNDS = 8; /* tokens that a lane looks at in one go */
constexpr uint32_t CHUNK = THREADS * ROUNDS; /* tokens that are looked at, or sorted, together */
constexpr uint32_t ROWS_MAX = 32; /* rows of a block: a bit each in a word */
constexpr uint32_t BLOCKS_WANTED = 1056; /* eight for each of 132 multiprocessors: else fewer rows */
constexpr uint32_t BLOCKS_FEW = 396; /* three: then each has room for a long ring */
constexpr uint32_t BATCH = 8; /* contributions of single columns that are on their way */
constexpr uint32_t RING_GROUP = 4; /* contributions that are asked for, and awaited, at once */
constexpr uint32_t RING_SHORT = 16, RING_LONG = 32; /* contributions on their way: 32 or 64 KiB of a block */
constexpr uint32_t NONE = UINT32_MAX;

/* Rows of a block are its number, that plus the number of blocks, which is a power of two, and so on. */
struct row_set {
    uint32_t shift, count;

    /* Which of this block's rows a token is; NONE: of another block, or no token. */
    METHOD uint32_t of(uint32_t token) const {
        const bool mine = (token & ((1u << shift) - 1)) == blockIdx.x && token >> shift < count;
        return mine ? token >> shift : NONE;
    }
};

/* What a block found, in the order of tokens, then sorted by row. */
struct found_tokens {
    uint32_t of_warp[WARPS]; /* found by each in the chunk at hand */
    uint32_t tokens[CHUNK]; /* which ones, and of which row */
    uint8_t rows[CHUNK];
    uint32_t counts[WARPS][ROWS_MAX]; /* then: where the next one of this warp and row goes */
    uint32_t first[ROWS_MAX + 1]; /* of each row in `sorted` */
    uint32_t present; /* a bit for each row that has one */
    uint32_t sorted[CHUNK];
};

DEVICE uint32_t warp_here() {
    return threadIdx.x / WARP;
}
DEVICE uint32_t lane_of_warp() {
    return threadIdx.x % WARP;
}
DEVICE uint32_t lanes_below() {
    return (1u << lane_of_warp()) - 1;
}

/* Turns counts into places: rows one after the other, within a row warps one after the other. */
DEVICE void places_make(found_tokens &found) {
    if (warp_here() == 0) {
        const uint32_t row = lane_of_warp();
        uint32_t total = 0;
        for (uint32_t warp = 0; warp < WARPS; ++warp) total += found.counts[warp][row];
        const uint32_t present = warp_ballot(total != 0);
        uint32_t through = total;
        for (uint32_t step = 1; step < WARP; step *= 2) {
            const uint32_t below = shuffle(through, static_cast<int>(row - step));
            if (row >= step) through += below;
        }
        uint32_t place = through - total;
        found.first[row] = place;
        if (row + 1 == ROWS_MAX) found.first[ROWS_MAX] = through, found.present = present;
        for (uint32_t warp = 0; warp < WARPS; ++warp) {
            const uint32_t count = found.counts[warp][row];
            found.counts[warp][row] = place;
            place += count;
        }
    }
    block_barrier();
}

/* This thread's tokens of the chunk. A warp looks at ROUNDS * 32 neighbours, 32 at a time, so warp, round and lane are
 * in the order of tokens. */
DEVICE void chunk_load(uint32_t (&token)[ROUNDS], const qe_args_embed_backward &args, uint64_t begin) {
#pragma unroll
    for (uint32_t round = 0; round < ROUNDS; ++round) {
        const uint64_t at = begin + (warp_here() * ROUNDS + round) * WARP + lane_of_warp();
        token[round] = at < args.tokens_count ? static_cast<uint32_t>(args.tokens[at]) : UINT32_MAX;
    }
}

/* How many of the chunk are of this block, and which of its rows they are; where there is none, this is one barrier. */
DEVICE uint32_t chunk_count(found_tokens &found, uint32_t (&row_out)[ROUNDS], const uint32_t (&token)[ROUNDS],
                            const row_set &rows) {
    uint32_t mine = 0, all = 0;
#pragma unroll
    for (uint32_t round = 0; round < ROUNDS; ++round) {
        row_out[round] = rows.of(token[round]);
        mine += bits_in(warp_ballot(row_out[round] != NONE));
    }
    if (!block_any(mine != 0)) return 0;
    if (lane_of_warp() == 0) found.of_warp[warp_here()] = mine;
    block_barrier();
    for (uint32_t warp = 0; warp < WARPS; ++warp) all += found.of_warp[warp];
    return all;
}

/* Behind the `held` that are there already. Requires: chunk_count. */
DEVICE void chunk_append(found_tokens &found, const uint32_t (&row)[ROUNDS], uint32_t begin, uint32_t held) {
    for (uint32_t before = 0; before < warp_here(); ++before) held += found.of_warp[before];
#pragma unroll
    for (uint32_t round = 0; round < ROUNDS; ++round) {
        const uint32_t all = warp_ballot(row[round] != NONE);
        if (row[round] != NONE) {
            const uint32_t place = held + bits_in(all & lanes_below());
            found.tokens[place] = begin + (warp_here() * ROUNDS + round) * WARP + lane_of_warp();
            found.rows[place] = static_cast<uint8_t>(row[round]);
        }
        held += bits_in(all);
    }
}

/* Sorts the `held` that were found by row; those of a row stay in order. */
DEVICE void found_sort(found_tokens &found, uint32_t held) {
    const uint32_t first = warp_here() * ROUNDS * WARP + lane_of_warp();
    uint32_t *counts = found.counts[warp_here()];
    counts[lane_of_warp()] = 0;
    block_barrier();
    uint32_t rank[ROUNDS];
#pragma unroll
    for (uint32_t round = 0; round < ROUNDS; ++round) {
        if (first - lane_of_warp() + round * WARP >= held) break; /* all lanes of the warp */
        const bool mine = first + round * WARP < held;
        const uint32_t row = mine ? found.rows[first + round * WARP] : NONE;
        const uint32_t same = warp_match(row), before = same & lanes_below();
        rank[round] = mine ? counts[row] + bits_in(before) : 0;
        warp_barrier(ALL_LANES);
        if (mine && before == 0) counts[row] += bits_in(same);
        warp_barrier(ALL_LANES);
    }
    block_barrier();
    places_make(found);
#pragma unroll
    for (uint32_t round = 0; round < ROUNDS; ++round) {
        const uint32_t at = first + round * WARP;
        if (at < held) found.sorted[counts[found.rows[at]] + rank[round]] = found.tokens[at];
    }
    block_barrier();
}

/* WIDTH neighbours of a row. */
template <int WIDTH>
struct sums_of {
    float at[WIDTH];
};

DEVICE void sums_load(sums_of<8> &sums, const float *from) {
    const float4 low = load_here(from), high = load_here(from + 4);
    sums = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}
DEVICE void sums_load(sums_of<1> &sums, const float *from) {
    sums.at[0] = *from;
}
DEVICE void sums_store(float *to, const sums_of<8> &sums) {
    const float *v = sums.at;
    store_whole(to, make_uint4(bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])));
    store_whole(to + 4, make_uint4(bits_of(v[4]), bits_of(v[5]), bits_of(v[6]), bits_of(v[7])));
}
DEVICE void sums_store(float *to, const sums_of<1> &sums) {
    *to = sums.at[0];
}
DEVICE void sums_add(sums_of<8> &sums, uint4 pairs) {
    float value[8];
    unpack8(pairs, value);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums.at[i] = add(sums.at[i], value[i]);
}

/* A thread's columns: of contributions, and of the block's rows. */
template <int WIDTH>
struct strip {
    const uint16_t *dy;
    float *grad;
    size_t hidden, stride; /* elements from a token to the next, and from a row of the block to its next */
    uint32_t fresh; /* a bit for each row that holds no sum yet */

    METHOD sums_of<WIDTH> load(uint32_t row) const {
        sums_of<WIDTH> sums = {};
        if (!(fresh >> row & 1)) sums_load(sums, grad + row * stride);
        return sums;
    }
};

/* Contributions that come through shared memory. A thread reads what it asked for itself, so it waits for no other. */
template <uint32_t RING>
struct ring_of {
    uint4 at[RING][THREADS];

    METHOD void ask(const strip<8> &own, const found_tokens &found, uint32_t from, uint32_t count) {
        const uint16_t *row[RING_GROUP];
#pragma unroll
        for (uint32_t k = 0; k < RING_GROUP; ++k)
            if (from + k < count) row[k] = own.dy + found.sorted[from + k] * own.hidden;
#pragma unroll
        for (uint32_t k = 0; k < RING_GROUP; ++k)
            if (from + k < count) copy_ahead(&at[(from + k) % RING][threadIdx.x], row[k]);
        copies_close();
    }

    /* What came for [from, end), at most a group. */
    METHOD void add_to(sums_of<8> &sums, uint32_t from, uint32_t end) const {
        uint4 value[RING_GROUP];
#pragma unroll
        for (uint32_t k = 0; k < RING_GROUP; ++k)
            if (from + k < end) value[k] = at[(from + k) % RING][threadIdx.x];
#pragma unroll
        for (uint32_t k = 0; k < RING_GROUP; ++k)
            if (from + k < end) sums_add(sums, value[k]);
    }
};

/* Adds all that was found and sorted. The next row's sum is asked for while this one's contributions come. */
template <uint32_t RING>
DEVICE void found_add(strip<8> &own, const found_tokens &found) {
    ring_of<RING> &ring = shared_large_object<ring_of<RING>>();
    const uint32_t count = found.first[ROWS_MAX];
    uint32_t present = found.present, at = 0, row = lowest_bit(present);
    for (uint32_t rest = present & ~own.fresh; rest != 0; rest &= rest - 1)
        prefetch(own.grad + lowest_bit(rest) * own.stride);
    for (uint32_t k = 0; k < RING; k += RING_GROUP) ring.ask(own, found, k, count);
    sums_of<8> sums = own.load(row);
    for (; present != 0; present &= present - 1) {
        const uint32_t later = present & (present - 1), row_next = later ? lowest_bit(later) : row;
        sums_of<8> next = {};
        if (later) next = own.load(row_next);
        for (const uint32_t end = found.first[row + 1]; at < end;) {
            if (at % RING_GROUP == 0) copies_wait_but(RING / RING_GROUP - 1);
            const uint32_t group_end = (at / RING_GROUP + 1) * RING_GROUP, until = end < group_end ? end : group_end;
            ring.add_to(sums, at, until);
            at = until;
            if (at == group_end) ring.ask(own, found, at + RING - RING_GROUP, count);
        }
        sums_store(own.grad + row * own.stride, sums);
        sums = next, row = row_next;
    }
    copies_wait();
}

/* The same for single columns, which cannot be copied past the registers: a batch of them is loaded ahead. */
template <uint32_t RING>
DEVICE void found_add(strip<1> &own, const found_tokens &found) {
    for (uint32_t present = found.present; present != 0; present &= present - 1) {
        const uint32_t row = lowest_bit(present), end = found.first[row + 1];
        sums_of<1> sum = own.load(row);
        for (uint32_t at = found.first[row]; at < end; at += BATCH) {
            uint16_t value[BATCH];
#pragma unroll
            for (uint32_t k = 0; k < BATCH; ++k)
                if (at + k < end) value[k] = own.dy[found.sorted[at + k] * own.hidden];
#pragma unroll
            for (uint32_t k = 0; k < BATCH; ++k)
                if (at + k < end) sum.at[0] = add(sum.at[0], bf16_value(value[k]));
        }
        sums_store(own.grad + row * own.stride, sum);
    }
}

template <int WIDTH, uint32_t RING>
DEVICE void found_take(strip<WIDTH> &own, found_tokens &found, uint32_t held, bool is_inside) {
    found_sort(found, held);
    if (is_inside) found_add<RING>(own, found);
    own.fresh &= ~found.present;
    block_barrier(); /* what comes next uses the same memory */
}

struct embed_job {
    qe_args_embed_backward args;
    uint32_t shift; /* of row_set */
};

/* Block x: rows; block y: columns. `set` rows start from zero at their first sum, or at the end if there is none. */
template <int WIDTH, uint32_t RING>
KERNEL void __launch_bounds__(THREADS) embed_gradients(const __grid_constant__ embed_job job) {
    const qe_args_embed_backward &args = job.args;
    found_tokens &found = shared_object<found_tokens>();
    const row_set rows = {job.shift, (args.vocab - blockIdx.x + (1u << job.shift) - 1) >> job.shift};
    const uint32_t column = (blockIdx.y * THREADS + threadIdx.x) * WIDTH;
    const bool is_inside = column < args.hidden;
    strip<WIDTH> own = {static_cast<const uint16_t *>(args.dy) + column,
                        args.grad + static_cast<size_t>(blockIdx.x) * args.hidden + column, args.hidden,
                        static_cast<size_t>(args.hidden) << job.shift, args.set ? UINT32_MAX : 0};
    uint32_t row[ROUNDS], token[ROUNDS], token_next[ROUNDS], held = 0;
    chunk_load(token, args, 0);
    for (uint64_t begin = 0; begin < args.tokens_count; begin += CHUNK) {
        chunk_load(token_next, args, begin + CHUNK);
        const uint32_t more = chunk_count(found, row, token, rows);
        if (held + more > CHUNK) {
            found_take<WIDTH, RING>(own, found, held, is_inside);
            held = 0;
        }
        if (more != 0) chunk_append(found, row, static_cast<uint32_t>(begin), held);
        held += more;
#pragma unroll
        for (uint32_t round = 0; round < ROUNDS; ++round) token[round] = token_next[round];
    }
    if (held != 0) found_take<WIDTH, RING>(own, found, held, is_inside);
    for (uint32_t i = 0; i < rows.count && is_inside; ++i)
        if (own.fresh >> i & 1) sums_store(own.grad + i * own.stride, sums_of<WIDTH>{});
}

/* The smallest power of two, as its exponent, of blocks that have at most `rows` rows each. */
uint32_t blocks_shift(uint32_t vocab, uint32_t rows) {
    uint32_t shift = 0;
    while (static_cast<uint64_t>(rows) << shift < vocab) ++shift;
    return shift;
}

template <int WIDTH, uint32_t RING>
qe_status gradients_launch(const embed_job &job, uint32_t slices, cudaStream_t stream) {
    const uint64_t blocks = static_cast<uint64_t>(1) << job.shift;
    const dim3 grid(blocks < job.args.vocab ? static_cast<uint32_t>(blocks) : job.args.vocab, slices);
    return launch(embed_gradients<WIDTH, RING>, grid, THREADS, 0, WIDTH == 8 ? sizeof(ring_of<RING>) : 0, stream, job);
}

} // namespace

qe_status qe_cuda_embed_backward(const qe_args_embed_backward *args, cudaStream_t stream) {
    if (args->hidden == 0 || args->vocab == 0) return QE_OK;
    const bool is_wide = args->hidden % 8 == 0 && is_aligned(args->dy) && is_aligned(args->grad);
    const uint32_t slices = pieces_of(args->hidden, (is_wide ? 8u : 1u) * THREADS);
    const uint64_t most = static_cast<uint64_t>(args->vocab) * slices / BLOCKS_WANTED;
    const uint32_t rows = most < 1 ? 1 : most < ROWS_MAX ? static_cast<uint32_t>(most) : ROWS_MAX;
    const embed_job job = {*args, blocks_shift(args->vocab, rows)};
    const bool are_few = static_cast<uint64_t>(slices) << job.shift <= BLOCKS_FEW;
    if (!is_wide) return gradients_launch<1, RING_SHORT>(job, slices, stream);
    return are_few ? gradients_launch<8, RING_LONG>(job, slices, stream)
                   : gradients_launch<8, RING_SHORT>(job, slices, stream);
}
