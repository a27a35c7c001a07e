/* held.cuh - rows that a cluster of blocks holds in shared memory, so that a row is read once.
 *
 * A block has TALL rows (32 or 64) and WIDE sides of 256 columns, a cluster as many blocks as a row needs, of sixteen
 * sides at most; a warp has eight rows of a side, a thread eight columns of them. A thread reads only what it copied
 * there itself. Sums have the order of row_sums.cuh. That many small blocks, each with rows of its own, are at work on
 * a multiprocessor is what makes this fast: while one waits for sums of its cluster, others read and write. Where there
 * are too few for that, wide blocks, one on each, are all done at the same time.
 *
 *   held_tile  bring -> copies_wait -> four rows at a time: read, warp_barrier, put -> held_meet -> store
 *   held_sums  begin -> send -> receive, once per kernel; a row is the blocks of one blockIdx.y */
#ifndef QE_CUDA_HELD_CUH
#define QE_CUDA_HELD_CUH

#include "backend/cuda/row_sums.cuh"
#include "backend/cuda/tile.cuh"

enum { HELD_ROWS = 8, HELD_COLUMNS = WARP * 8, HELD_SIDES_MAX = 16 };

/* Of a side. */
template <int TALL>
constexpr int HELD_THREADS = TALL *(WARP / HELD_ROWS);

/* The side of this thread, and its number there. */
template <int TALL, int WIDE>
static METHOD uint32_t held_side() {
    return WIDE == 1 ? 0 : threadIdx.x / HELD_THREADS<TALL>;
}
template <int TALL, int WIDE>
static METHOD uint32_t held_thread() {
    return WIDE == 1 ? threadIdx.x : threadIdx.x % HELD_THREADS<TALL>;
}
/* The threads of a side. */
template <int TALL, int WIDE>
static METHOD void held_meet() {
    if (WIDE == 1)
        block_barrier();
    else
        some_barrier(1 + held_side<TALL, WIDE>(), HELD_THREADS<TALL>);
}

/* Where a thread stands: the first of its rows and columns. */
struct held_place {
    uint32_t top, left, row, column; /* of the side, of the thread */
    METHOD size_t at(uint32_t hidden) const {
        return static_cast<size_t>(row) * hidden + column;
    }
};

template <int TALL, int WIDE = 1>
static METHOD held_place held_place_of(uint32_t group) {
    held_place place;
    place.top = group * TALL, place.left = (blockIdx.x * WIDE + held_side<TALL, WIDE>()) * HELD_COLUMNS;
    place.row = place.top + held_thread<TALL, WIDE>() / WARP * HELD_ROWS;
    place.column = place.left + threadIdx.x % WARP * 8;
    return place;
}

/* Codes of four rows take the place of the first two of them: of a column a word. Columns are moved about within the
 * warp, so that no two words that are stored together meet in a bank. */
template <int TALL, int WIDE = 1>
struct held_tile {
    static constexpr uint32_t THREADS = HELD_THREADS<TALL>, PIECES = TALL / 16;
    uint4 at[HELD_ROWS][THREADS];

    static METHOD uint32_t own() {
        return held_thread<TALL, WIDE>();
    }
    METHOD void bring(int i, const uint16_t *from, uint32_t hidden) {
        copy_ahead(&at[i][own()], from + static_cast<size_t>(i) * hidden);
    }
    METHOD uint4 row(int i) const {
        return at[i][own()];
    }
    static METHOD uint32_t turned(uint32_t thread, uint32_t half) {
        return thread ^ ((thread / WARP / 2 * 2 + half) << (TALL == 32 ? 1 : 0));
    }
    /* four: codes of rows 4*group .. 4*group+3 of this thread. All lanes have read these rows. */
    METHOD void put(int group, const uint32_t (*four)[2]) {
        column_codes<4> codes;
        codes.put(0, four);
        at[group * 4][turned(own(), 0)] =
            make_uint4(codes.words[0][0], codes.words[1][0], codes.words[2][0], codes.words[3][0]);
        at[group * 4 + 1][turned(own(), 1)] =
            make_uint4(codes.words[4][0], codes.words[5][0], codes.words[6][0], codes.words[7][0]);
    }
    /* A thread stores sixteen rows of columns that are APART from each other: where their codes lie differs by what the
     * compiler knows, so no address has to be found anew. */
    METHOD void store(const code_planes &planes, const held_place &place) const {
        constexpr uint32_t APART = THREADS / PIECES, WORDS = sizeof(uint4) / sizeof(uint32_t);
        const uint32_t piece = own() % PIECES, column = own() / PIECES, half = column / 4 % 2;
        const uint4 *rows = &at[half][turned(piece * 2 * WARP + column / 8, half)];
        const uint32_t *from = reinterpret_cast<const uint32_t *>(rows) + column % 4;
        const size_t begin = static_cast<size_t>(place.left + column) * planes.rows + place.top;
        uint8_t *to = planes.by_columns + begin + piece * 16;
#pragma unroll
        for (uint32_t k = 0; k < HELD_COLUMNS / APART; ++k, from += APART / 8 * WORDS) {
            constexpr uint32_t FOUR = 4 * THREADS * WORDS, EIGHT = WARP * WORDS; /* to the next four rows, and eight */
            const uint4 codes = make_uint4(from[0], from[FOUR], from[EIGHT], from[FOUR + EIGHT]);
            store_late(to + static_cast<size_t>(k * APART) * planes.rows, codes);
        }
    }
};

/* at: of the first of these rows. Four at a time: a branch for each row would keep the compiler from mixing what it
 * does for them. */
DEVICE void held_store_rows(const code_planes &planes, size_t at, const uint32_t (*four)[2]) {
    if (planes.by_rows == nullptr) return;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        store_whole(planes.by_rows + at + static_cast<size_t>(i) * planes.columns, make_uint2(four[i][0], four[i][1]));
}

/* What each of eight neighbouring lanes has of a warp's eight rows, and which lane of the warp has the total of a row:
 * the order that spread_sum leaves. */
DEVICE uint32_t held_row_of(uint32_t lane) {
    return spread_index<HELD_ROWS>(lane % HELD_ROWS);
}
DEVICE uint32_t held_lane_of(uint32_t row) {
    return row / 4 * (WARP / 2) + spread_index<4>(row % 4);
}
DEVICE uint32_t held_row_of_total(uint32_t lane) {
    return lane / (WARP / 2) * 4 + spread_index<4>(lane % 4);
}

template <int TALL, int WIDE = 1>
struct held_sums {
    float part[HELD_SIDES_MAX][TALL + 4]; /* of every side of the cluster, written by them; spread over banks */
    mailbox box;

    static METHOD uint32_t sides() {
        return cluster_size() * WIDE;
    }
    /* First thing: from here on others may write to this block. NEUTRAL where the cluster has no side. */
    METHOD void begin() {
        if (threadIdx.x == 0) {
            mailbox_open(&box);
            mailbox_arm(&box, sides() * TALL * sizeof(float));
        }
#pragma unroll 1
        for (uint32_t i = sides() * TALL + threadIdx.x; i < HELD_SIDES_MAX * TALL; i += HELD_THREADS<TALL> * WIDE)
            part[i / TALL][i % TALL] = NEUTRAL;
        warp_barrier(0xFFFFFFFFu);
        cluster_arrive();
    }
    /* sums: of this thread's rows; destroyed. */
    METHOD void send(float *sums) {
        const uint32_t lane = threadIdx.x % WARP;
        float sum = spread_sum<HELD_ROWS>(sums, lane);
#pragma unroll
        for (int step = HELD_ROWS; step < WARP; step *= 2) sum = add(sum, shuffle_xor(sum, step));
        if (sides() < HELD_SIDES_MAX) block_barrier(); /* what others filled in */
        cluster_wait();
        const uint32_t side = blockIdx.x * WIDE + held_side<TALL, WIDE>();
        float *own = &part[side][held_thread<TALL, WIDE>() / WARP * HELD_ROWS + held_row_of(lane)];
#pragma unroll
        for (uint32_t i = 0; i < HELD_SIDES_MAX / WIDE; i += WARP / HELD_ROWS) {
            const uint32_t rank = i + lane / HELD_ROWS;
            if (rank < cluster_size()) mailbox_send(own, &box, rank, sum);
        }
    }
    /* The total of row held_row_of_total(lane) of this warp. */
    METHOD float receive() {
        const uint32_t lane = threadIdx.x % WARP, top = held_thread<TALL, WIDE>() / WARP * HELD_ROWS;
        const uint32_t first = top + lane / (WARP / 2) * 4;
        mailbox_wait(&box, 0);
        const float4 four = *reinterpret_cast<const float4 *>(&part[lane % HELD_SIDES_MAX][first]);
        float sums[4] = {four.x, four.y, four.z, four.w};
        float sum = spread_sum<4>(sums, lane);
#pragma unroll
        for (int step = 4; step < HELD_SIDES_MAX; step *= 2) sum = add(sum, shuffle_xor(sum, step));
        return sum;
    }
};

/* Eight floats of a table. */
DEVICE void held_table(const float *at, float *v) {
    const float4 low = load_table(at), high = load_table(at + 4);
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}

/* Is this a shape for blocks of TALL rows and WIDE sides? */
template <int TALL, int WIDE = 1>
static inline bool held_fits(uint32_t rows, uint32_t hidden) {
    return hidden % (HELD_COLUMNS * WIDE) == 0 && hidden <= HELD_COLUMNS * HELD_SIDES_MAX && rows % TALL == 0;
}

#endif
