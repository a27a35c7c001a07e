/* attention_forward.cuh - the kernel of causal attention's forward; README.md has the whole. One warp loads, groups of
 * warps multiply, each for 64 queries of a block. A block goes from piece to piece of work (some queries of one head),
 * and a group's products run on across them: scores of the next keys are begun before weights of these are made use of,
 * and while one group makes weights, another multiplies. */
#ifndef QE_CUDA_ATTENTION_FORWARD_CUH
#define QE_CUDA_ATTENTION_FORWARD_CUH

#include <math.h>

#include "backend/cuda/sm90.cuh"
#include "backend/cuda/tile.cuh"

namespace forward {

using namespace sm90;

constexpr uint32_t ROWS = 64;  /* queries of a group of warps */
constexpr uint32_t KEYS = 128; /* of a block of keys */
constexpr uint32_t STAGES = 2; /* of each ring; of two, the other one is the one before */
constexpr uint32_t SWIZZLE_ALIGN = 1024;
constexpr uint32_t GROUPS = 2;
constexpr uint32_t QUERIES = GROUPS * ROWS;
constexpr uint32_t THREADS = (1 + GROUPS) * GROUP_THREADS;
constexpr uint32_t LOADER_REGISTERS = 40, MULTIPLIER_REGISTERS = 232;

/* FORMAT: of codes, which are made where results still lie in registers; FORMAT_NONE: there are none. Their transposed
 * plane wants two neighbouring queries in a thread, which otherwise has two that are eight apart: so queries are loaded
 * out of order, and results stored. Requires then: sequences are whole sixteens. */
template <int FORMAT>
constexpr bool HAS_CODES = FORMAT != FORMAT_NONE;
template <int FORMAT>
constexpr uint32_t APART = HAS_CODES<FORMAT> ? 1 : 8;

struct forward_job {
    CUtensorMap queries, keys, out; /* boxes of 64 columns; ROWS, KEYS / CLUSTER, ROWS rows */
    CUtensorMap by_rows, by_columns; /* codes: ROWS by all columns of a head, and transposed */
    bool has_rows, has_columns;
    scaling codes;
    tensor_words words;
    float *lse;
    uint32_t sequences, sequence, heads, kv_heads;
    uint32_t blocks; /* of queries, of a sequence */
    uint32_t pieces; /* of a block, or of a cluster */
    float scale, scale_log2;
};

/* CLUSTER: blocks that take pieces of neighbouring heads with the same keys: each brings a part of these for all. */
template <uint32_t CLUSTER>
DEVICE uint32_t rank_of() {
    return CLUSTER > 1 ? cluster_rank() : 0;
}

/* Some queries of one head. */
struct piece {
    uint32_t block, head, s;
    uint32_t steps; /* blocks of keys; 0: there is no more work */

    /* The last queries have the most keys: longest first. */
    template <uint32_t CLUSTER>
    METHOD static piece of(const forward_job &j, uint32_t index) {
        piece it = {0, 0, 0, 0};
        if (index >= j.pieces) return it;
        const uint32_t heads = j.heads * j.sequences / CLUSTER;
        const uint32_t head = index % heads * CLUSTER + rank_of<CLUSTER>();
        it.block = j.blocks - 1 - index / heads;
        it.head = head % j.heads;
        it.s = head / j.heads;
        it.steps = (min((it.block + 1) * QUERIES, j.sequence) + KEYS - 1) / KEYS;
        return it;
    }
};

template <uint32_t DIM>
struct room {
    static constexpr uint32_t GROUP_BYTES = ROWS * DIM * 2, KEY_BYTES = KEYS * DIM * 2;
    uint8_t queries[STAGES][GROUPS][GROUP_BYTES];
    uint8_t keys[STAGES][KEY_BYTES], values[STAGES][KEY_BYTES];
    uint8_t out[GROUPS][GROUP_BYTES];
    piece pieces[STAGES];
    uint64_t queries_full[STAGES], queries_empty[STAGES];
    uint64_t keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
};

/* Where a ring of stages stands. */
struct turn {
    uint32_t stage = 0, parity = 0;
    METHOD void next() {
        if (++stage < STAGES) return;
        stage = 0;
        parity ^= 1;
    }
};

/* Four 8 x 8 of bf16 transposed. */
DEVICE void squares_store_across(uint32_t at, const uint32_t *pairs) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(pairs[0]),
                 "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
}
DEVICE void word_store(uint32_t at, uint32_t word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
}
DEVICE void map_prefetch(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
DEVICE void threads_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void box_store(const CUtensorMap *map, const void *from, uint32_t column, uint32_t row, uint32_t plane) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
                 "r"(column), "r"(row), "r"(plane), "r"(shared_address(from))
                 : "memory");
}
DEVICE float log_of_two(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* Rows of queries; where there are codes, of sixteen the even ones first, then the odd ones. */
template <int FORMAT>
DEVICE void queries_box_load(void *to, const CUtensorMap *map, uint32_t column, uint32_t row, uint32_t plane,
                             uint64_t *barrier) {
    if (!HAS_CODES<FORMAT>)
        box_load(to, map, column, row, plane, barrier);
    else
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %6, %6, %3, "
            "%4}], [%5];" ::"r"(shared_address(to)),
            "l"(map), "r"(column), "r"(row / 16), "r"(plane), "r"(shared_address(barrier)), "r"(0)
            : "memory");
}
template <int FORMAT>
DEVICE void queries_box_store(const CUtensorMap *map, const void *from, uint32_t column, uint32_t row,
                              uint32_t plane) {
    if (!HAS_CODES<FORMAT>)
        box_store(map, from, column, row, plane);
    else
        asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %5, %5, %2, %3}], [%4];" ::"l"(
                         map),
                     "r"(column), "r"(row / 16), "r"(plane), "r"(shared_address(from)), "r"(0)
                     : "memory");
}
/* Into every block of the cluster that `mask` names, at the same place, counted by its own barrier. */
DEVICE void box_share(void *to, const CUtensorMap *map, uint32_t column, uint32_t row, uint32_t plane,
                      uint64_t *barrier, uint32_t mask) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(column), "r"(row), "r"(plane), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>(mask))
        : "memory");
}
/* All threads of the cluster; what they wrote before is seen. */
DEVICE void cluster_meet() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
DEVICE void boxes_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
DEVICE void boxes_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
DEVICE void boxes_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* --- loading ----------------------------------------------------------------------------------------------------- */

/* Where a block of keys or values is. */
struct key_place {
    uint32_t column, row, s;
};

/* A block of keys or values: boxes of 64 columns. */
template <uint32_t DIM, uint32_t CLUSTER>
DEVICE void keys_load(const forward_job &j, uint8_t (&stages)[STAGES][room<DIM>::KEY_BYTES], const key_place &at,
                      uint64_t *all_full, uint64_t *all_empty, turn &t) {
    uint8_t *const to = stages[t.stage];
    uint64_t *const full = all_full + t.stage;
    phase_wait(all_empty + t.stage, t.parity ^ 1);
    barrier_expect(full, room<DIM>::KEY_BYTES);
    const uint32_t part = rank_of<CLUSTER>() * (KEYS / CLUSTER);
#pragma unroll
    for (uint32_t c = 0; c < DIM / 64; ++c) {
        uint8_t *const box = to + (c * KEYS + part) * 128;
        if (CLUSTER > 1)
            box_share(box, &j.keys, at.column + c * 64, at.row + part, at.s, full, (1u << CLUSTER) - 1);
        else
            box_load(box, &j.keys, at.column + c * 64, at.row, at.s, full);
    }
    t.next();
}

template <uint32_t DIM, int FORMAT>
DEVICE void queries_load(const forward_job &j, room<DIM> &m, const piece &it, const turn &t) {
    phase_wait(&m.queries_empty[t.stage], t.parity ^ 1);
    m.pieces[t.stage] = it;
    if (it.steps == 0) {
        barrier_arrive(&m.queries_full[t.stage]);
        return;
    }
    barrier_expect(&m.queries_full[t.stage], GROUPS * room<DIM>::GROUP_BYTES);
#pragma unroll
    for (uint32_t g = 0; g < GROUPS; ++g)
#pragma unroll
        for (uint32_t c = 0; c < DIM / 64; ++c)
            queries_box_load<FORMAT>(m.queries[t.stage][g] + c * ROWS * 128, &j.queries, it.head * DIM + c * 64,
                                     it.block * QUERIES + g * ROWS, it.s, &m.queries_full[t.stage]);
}

/* A block's pieces: dealt out there and back, so that who got a longer one gets a shorter one next. */
template <uint32_t CLUSTER>
struct deal {
    const uint32_t hands = gridDim.x / CLUSTER, own = blockIdx.x / CLUSTER;
    uint32_t index = own, round = 0;
    METHOD void next() {
        ++round;
        index = round * hands + (round % 2 ? hands - 1 - own : own);
    }
};

/* One thread. Keys are asked for one step ahead of values, as they are needed. */
template <uint32_t DIM, int FORMAT, uint32_t CLUSTER>
DEVICE void load_all(const forward_job &j, room<DIM> &m) {
    turn of_queries, of_keys, of_values;
    key_place values = {0, 0, 0}; /* asked for next */
    bool has_values = false;
    const auto values_load = [&] {
        if (has_values) keys_load<DIM, CLUSTER>(j, m.values, values, m.values_full, m.values_empty, of_values);
    };
    piece it;
    for (deal<CLUSTER> pieces;; pieces.next()) {
        it = piece::of<CLUSTER>(j, pieces.index);
        const uint32_t column = (j.heads + it.head / (j.heads / j.kv_heads)) * DIM;
        queries_load<DIM, FORMAT>(j, m, it, of_queries);
        of_queries.next();
        if (it.steps == 0) break;
        for (uint32_t n = it.steps; n-- > 0;) {
            const key_place keys = {column, n * KEYS, it.s};
            keys_load<DIM, CLUSTER>(j, m.keys, keys, m.keys_full, m.keys_empty, of_keys);
            values_load();
            has_values = true;
            values = {column + j.kv_heads * DIM, n * KEYS, it.s};
        }
    }
    values_load();
}

/* --- multiplying ------------------------------------------------------------------------------------------------- */

/* Where a thread's sums lie in 64 rows. */
template <int FORMAT>
struct place {
    uint32_t group, thread, warp, lane; /* of this group's 128 threads */
    uint32_t row, pair;                 /* its upper query (the other is APART on), its pair of columns of four */
    METHOD place() /* the shuffle tells the compiler that a warp's lanes are of one group */
        : group(__shfl_sync(0xFFFFFFFFu, threadIdx.x / GROUP_THREADS, 0) - 1), thread(threadIdx.x % GROUP_THREADS),
          warp(thread / 32), lane(thread % 32), row(warp * 16 + lane / 4 * (HAS_CODES<FORMAT> ? 2 : 1)),
          pair(lane % 4) {}
};

enum barrier_id : uint32_t { BARRIER_TURN = 1, BARRIER_GROUP = 8 };

/* Groups multiply in turns. */
DEVICE void turn_take(uint32_t group) {
    threads_sync(BARRIER_TURN + group, 2 * GROUP_THREADS);
}
DEVICE void turn_give(uint32_t group) {
    threads_arrive(BARRIER_TURN + (group + 1 == GROUPS ? 0 : group + 1), 2 * GROUP_THREADS);
}
/* A warp has no more use for a stage of keys or values: to all that bring parts of what comes next. */
template <uint32_t CLUSTER>
DEVICE void release(uint64_t *empty) {
    const uint32_t lane = threadIdx.x % 32;
    if (CLUSTER > 1) {
        if (lane < CLUSTER) barrier_arrive_at(empty, lane);
    } else if (lane == 0)
        barrier_arrive(empty);
}

/* A row's largest score, over the four lanes that share it. */
DEVICE float row_largest(float value) {
    value = larger(value, shuffle_xor(value, 1));
    return larger(value, shuffle_xor(value, 2));
}
DEVICE float row_sum(float value) {
    value = add(value, shuffle_xor(value, 1));
    return add(value, shuffle_xor(value, 2));
}

/* Scores become weights: powers of two of their distance from what was the largest score of the row's first block, and
 * stays until weights become too large for comfort. It cancels in the end, so that it need not be the largest. */
constexpr float WEIGHTS_MOST = 0x1p24f; /* of a thread's weights of a block and row, together */

struct softmax {
    float most[2], sum[2]; /* of this thread's two rows */
    float scale_log2;

    /* From these scores on. */
    METHOD void begin(const float (&s)[KEYS / 2]) {
        rows_most(s, most);
        sum[0] = sum[1] = 0.0f;
    }
    METHOD void begin(const float (&s)[KEYS / 2], uint32_t (&weights)[KEYS / 4]) {
        float part[2];
        begin(s);
        weigh(s, weights, part);
        count(part);
    }
    METHOD static void rows_most(const float (&s)[KEYS / 2], float (&most_out)[2]) {
        float now[2] = {s[0], s[2]};
#pragma unroll
        for (uint32_t i = 0; i < KEYS / 8; ++i)
#pragma unroll
            for (uint32_t n = 0; n < 4; ++n) now[n / 2] = larger(now[n / 2], s[4 * i + n]);
        most_out[0] = row_largest(now[0]);
        most_out[1] = row_largest(now[1]);
    }
    METHOD void weigh(const float (&s)[KEYS / 2], uint32_t (&weights)[KEYS / 4], float (&part)[2]) const {
        const float below[2] = {-mul(most[0], scale_log2), -mul(most[1], scale_log2)};
        float parts[2][2] = {};
#pragma unroll
        for (uint32_t i = 0; i < KEYS / 4; ++i) {
            const float a = power_of_two(fused(s[2 * i], scale_log2, below[i % 2]));
            const float b = power_of_two(fused(s[2 * i + 1], scale_log2, below[i % 2]));
            parts[i % 2][0] = add(parts[i % 2][0], a);
            parts[i % 2][1] = add(parts[i % 2][1], b);
            weights[i] = round_bf16_pair(a, b);
        }
        part[0] = add(parts[0][0], parts[0][1]);
        part[1] = add(parts[1][0], parts[1][1]);
    }
    METHOD static bool is_too_much(const float (&part)[2]) {
        return __any_sync(0xFFFFFFFFu, larger(part[0], part[1]) > WEIGHTS_MOST);
    }
    METHOD void raise(const float (&s)[KEYS / 2], float (&factor_out)[2]) {
        float now[2];
        rows_most(s, now);
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r) {
            now[r] = larger(now[r], most[r]);
            factor_out[r] = power_of_two(mul(sub(most[r], now[r]), scale_log2));
            sum[r] = mul(sum[r], factor_out[r]);
            most[r] = now[r];
        }
    }
    /* Returns: must sums be multiplied? */
    METHOD bool weigh_or_raise(const float (&s)[KEYS / 2], uint32_t (&weights)[KEYS / 4], float (&part)[2],
                               float (&factor_out)[2]) {
        bool raises = false;
#pragma unroll 1
        for (;;) { /* twice at most: with scores of 2^48 weights of the largest are too much for ever */
            weigh(s, weights, part);
            if (raises || !is_too_much(part)) return raises;
            raise(s, factor_out);
            raises = true;
        }
    }
    METHOD void count(const float (&part)[2]) {
        sum[0] = add(sum[0], part[0]);
        sum[1] = add(sum[1], part[1]);
    }
};

template <uint32_t COUNT>
DEVICE void clear(float (&sums)[COUNT]) {
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) sums[i] = 0.0f;
}
template <uint32_t COUNT>
DEVICE void multiply(float (&sums)[COUNT], const float (&by)[2]) {
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) sums[i] = mul(sums[i], by[i / 2 % 2]);
}

/* A query sees no key behind it. */
template <int FORMAT>
DEVICE void cut(float (&s)[KEYS / 2], const place<FORMAT> &p, int32_t first_key_less_query) {
#pragma unroll
    for (uint32_t i = 0; i < KEYS / 8; ++i)
#pragma unroll
        for (uint32_t n = 0; n < 4; ++n)
            if (first_key_less_query + static_cast<int32_t>(8 * i + 2 * p.pair + n % 2) >
                static_cast<int32_t>(p.row + n / 2 * APART<FORMAT>))
                s[4 * i + n] = -INFINITY;
}

template <uint32_t DIM, int FORMAT>
struct multiplier {
    const forward_job &j;
    room<DIM> &m;
    const place<FORMAT> p;
    const float scale; /* of codes */
    float amax = 0.0f;

    METHOD multiplier(const forward_job &job, room<DIM> &memory)
        : j(job), m(memory), scale(HAS_CODES<FORMAT> ? scale_of(j.codes) : 1.0f) {}

    METHOD void scores_begin(float (&s)[KEYS / 2], const turn &queries, const turn &keys) const {
        const uint64_t a = operand(m.queries[queries.stage][p.group], 0), b = operand(m.keys[keys.stage], 0);
        registers_pin(s);
        mma_fence();
#pragma unroll
        for (uint32_t k = 0; k < DIM / 16; ++k)
            mma<false, false>(s, a + k / 4 * (ROWS * 128 / 16) + k % 4 * 2, b + k / 4 * (KEYS * 128 / 16) + k % 4 * 2,
                              k > 0);
        mma_commit();
    }
    METHOD void sums_begin(float (&sums)[DIM / 2], uint32_t (&weights)[KEYS / 4], const turn &values) const {
        const uint64_t b = operand(m.values[values.stage], KEYS * 128);
        registers_pin(weights);
        registers_pin(sums);
        mma_fence();
#pragma unroll
        for (uint32_t k = 0; k < KEYS / 16; ++k) mma<true>(sums, weights + 4 * k, b + k * (16 * 128 / 16));
        mma_commit();
    }
    METHOD void scores_cut(float (&s)[KEYS / 2], const piece &it, uint32_t n) const {
        const int32_t ahead =
            static_cast<int32_t>(n * KEYS) - static_cast<int32_t>(it.block * QUERIES + p.group * ROWS);
        if (ahead + static_cast<int32_t>(KEYS) > 1) cut(s, p, ahead);
    }
    METHOD void lse_store(const softmax &soft, const piece &it, uint32_t r, float whole) const {
        const uint32_t row = it.block * QUERIES + p.group * ROWS + p.row + APART<FORMAT> * r;
        if (p.pair == 0 && row < j.sequence)
            j.lse[(static_cast<uint64_t>(it.s) * j.heads + it.head) * j.sequence + row] =
                fused(soft.most[r], j.scale, mul(log_of_two(whole), 0.693147180559945f));
    }
    /* Codes of sixteen columns, whose pairs are as squares_store takes them. Four threads have a row's sixteen; each
     * sends one of its neighbour's pairs and gets another, and then has four columns of both queries. */
    METHOD void codes_store(const uint32_t (&pairs)[4], uint32_t k, uint8_t *rows, uint32_t (&across)[2]) {
        float v[2][4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            v[i % 2][i / 2 * 2] = low_bf16(pairs[i]);
            v[i % 2][i / 2 * 2 + 1] = high_bf16(pairs[i]);
        }
        const uint32_t upper = encode4<FORMAT>(v[0], scale), lower = encode4<FORMAT>(v[1], scale);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) amax = larger(amax, larger(magnitude(v[0][i]), magnitude(v[1][i])));
        across[0] = bytes_of(upper, lower, 0x5140);
        across[1] = bytes_of(upper, lower, 0x7362);
        const bool odd = p.pair % 2 != 0;
        const uint32_t got =
            __shfl_xor_sync(0xFFFFFFFFu, bytes_of(upper, lower, odd ? 0x5410 : 0x7632), 1);
        constexpr uint32_t SWIZZLES = DIM / 16 - 1; /* rows of 128 bytes are turned by row, of 64 by two rows */
        const uint32_t row = p.warp * 16 + p.lane / 4, turned = k ^ (DIM == 128 ? row : row / 2) & SWIZZLES;
        const uint32_t at = shared_address(rows) + row * DIM + turned * 16 + p.pair % 2 * 8 + p.pair / 2 * 4;
        word_store(at, bytes_of(upper, got, odd ? 0x3254 : 0x5410));
        word_store(at + 8 * DIM, bytes_of(lower, got, odd ? 0x3276 : 0x7610));
    }
    /* 32 columns of 16 queries, transposed: a column's are 64 bytes, turned by two columns. */
    METHOD void across_store(uint8_t *columns, uint32_t first, const uint32_t (&across)[4]) const {
        const uint32_t column = first + p.lane;
        squares_store_across(shared_address(columns) + column * ROWS + ((p.warp ^ column / 2 % 4) << 4), across);
    }
    METHOD void boxes_store(const piece &it, uint32_t first, uint8_t *rows, uint8_t *columns) const {
        if (p.thread != 0) return;
        if (first < j.sequence) {
#pragma unroll
            for (uint32_t c = 0; c < DIM / 64; ++c)
                queries_box_store<FORMAT>(&j.out, m.out[p.group] + c * ROWS * 128, it.head * DIM + c * 64, first, it.s);
            const uint32_t column = it.head * DIM;
            if (HAS_CODES<FORMAT> && j.has_rows) queries_box_store<FORMAT>(&j.by_rows, rows, column, first, it.s);
            if (HAS_CODES<FORMAT> && j.has_columns) box_store(&j.by_columns, columns, first, it.s, column);
        }
        boxes_commit();
    }
    /* Results of a piece; sums begin anew. `queries`: where they stood, which codes may overwrite. Requires: what was
     * stored before is read. */
    METHOD void finish(float (&sums)[DIM / 2], const softmax &soft, const piece &it, uint8_t *queries) {
        const uint32_t first = it.block * QUERIES + p.group * ROWS;
        uint8_t *const rows = queries, *const columns = queries + ROWS * DIM;
        float inverse[2];
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r) {
            const float whole = row_sum(soft.sum[r]);
            inverse[r] = reciprocal_estimate(whole);
            lse_store(soft, it, r, whole);
        }
        const uint32_t at = shared_address(m.out[p.group]) + (p.warp * 16 + p.lane % 16) * 128;
        const uint32_t chunk = p.lane / 16 ^ p.lane % 8;
        const float before = amax;
        uint32_t across[4];
#pragma unroll
        for (uint32_t k = 0; k < DIM / 16; ++k) { /* sixteen columns */
            uint32_t pairs[4], two[2];
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i)
                pairs[i] = round_bf16_pair(mul(sums[8 * k + 2 * i], inverse[i % 2]),
                                           mul(sums[8 * k + 2 * i + 1], inverse[i % 2]));
            squares_store(at + k / 4 * (ROWS * 128) + ((chunk ^ k % 4 * 2) << 4), pairs);
            if (!HAS_CODES<FORMAT>) continue;
            codes_store(pairs, k, rows, two);
            across[k % 2 * 2] = two[0];
            across[k % 2 * 2 + 1] = two[1];
            if (k % 2 == 1) across_store(columns, k / 2 * 32, across);
        }
        if (first + p.warp * 16 >= j.sequence) amax = before; /* rows behind the end are none */
        shared_publish();
        threads_sync(BARRIER_GROUP + p.group, GROUP_THREADS);
        boxes_store(it, first, rows, columns);
        clear(sums);
    }
    /* What was stored is read: queries may come where codes stood. */
    METHOD void queries_release(uint32_t stage) const {
        if (p.thread != 0) return;
        boxes_wait_read();
        barrier_arrive(&m.queries_empty[stage]);
    }
};

/* The shuffle tells the compiler that what depends on steps is the same for all lanes. */
template <uint32_t DIM>
DEVICE piece piece_at(const room<DIM> &m, const turn &t) {
    piece it = m.pieces[t.stage];
    it.steps = __shfl_sync(0xFFFFFFFFu, it.steps, 0);
    return it;
}

/* One group of warps: 64 queries of every piece. A round begins scores of the next block of keys and sums of this one,
 * and makes the next weights; one round also ends a piece and begins the next. */
template <uint32_t DIM, int FORMAT, uint32_t CLUSTER>
struct rounds {
    const forward_job &j;
    room<DIM> &m;
    multiplier<DIM, FORMAT> with;
    const uint32_t group;
    float s[KEYS / 2], sums[DIM / 2], part[2];
    turn of_queries, of_keys, of_values;
    softmax soft, done;
    piece it, before; /* of the scores at hand; of the weights before them */
    uint32_t n;       /* block of keys of the scores */
    bool is_over = false, is_stored = false; /* is_stored: what the other stage of queries has is on its way out */

    METHOD rounds(const forward_job &job, room<DIM> &memory)
        : j(job), m(memory), with(job, memory), group(with.p.group) {
        soft.scale_log2 = j.scale_log2;
        clear(sums);
    }
    /* The first weights. */
    METHOD void begin(uint32_t (&weights)[KEYS / 4]) {
        if (group + 1 == GROUPS) turn_give(group);
        phase_wait(&m.queries_full[0], 0);
        it = piece_at(m, of_queries);
        n = it.steps - 1;
        phase_wait(&m.keys_full[0], 0);
        with.scores_begin(s, of_queries, of_keys);
        mma_wait<0>();
        registers_pin(s);
        release<CLUSTER>(&m.keys_empty[of_keys.stage]);
        of_keys.next();
        with.scores_cut(s, it, n);
        soft.begin(s, weights);
    }
    /* Scores are there in the end, sums are not. */
    METHOD void products_begin(uint32_t (&weights)[KEYS / 4]) {
        if (!is_over) phase_wait(&m.keys_full[of_keys.stage], of_keys.parity);
        turn_take(group);
        with.scores_begin(s, of_queries, of_keys); /* of nothing where it is over */
        phase_wait(&m.values_full[of_values.stage], of_values.parity);
        with.sums_begin(sums, weights, of_values);
        turn_give(group);
        mma_wait<1>();
        registers_pin(s);
        if (!is_over) release<CLUSTER>(&m.keys_empty[of_keys.stage]);
        of_keys.next();
    }
    /* In the round that began them: the assembler keeps operands in registers only within it. */
    METHOD void sums_wait(uint32_t (&weights)[KEYS / 4]) {
        mma_wait<0>();
        registers_pin(sums);
        registers_pin(weights);
        release<CLUSTER>(&m.values_empty[of_values.stage]);
        of_values.next();
        if (is_stored) with.queries_release(of_queries.stage ^ 1);
        is_stored = false;
    }
    /* A round within a piece. */
    METHOD void plain(uint32_t (&weights)[KEYS / 4], uint32_t (&next)[KEYS / 4]) {
        float factor[2];
        --n;
        products_begin(weights);
        const bool raises = soft.weigh_or_raise(s, next, part, factor);
        sums_wait(weights);
        if (raises) multiply(sums, factor);
        soft.count(part);
    }
    METHOD void piece_next() {
        if (is_stored) with.queries_release(of_queries.stage ^ 1); /* the piece to come wants them */
        is_stored = false;
        of_queries.next();
        phase_wait(&m.queries_full[of_queries.stage], of_queries.parity);
        it = piece_at(m, of_queries);
        n = it.steps - 1;
        is_over = it.steps == 0;
    }
    /* A round that may end a piece. */
    METHOD void any(uint32_t (&weights)[KEYS / 4], uint32_t (&next)[KEYS / 4]) {
        float factor[2];
        before = it;
        const bool begins = n-- == 0;
        if (begins) piece_next();
        products_begin(weights);
        if (begins) {
            done = soft;
            with.scores_cut(s, it, n);
            soft.begin(s);
        }
        const bool raises = soft.weigh_or_raise(s, next, part, factor);
        sums_wait(weights);
        is_stored = begins;
        if (begins) with.finish(sums, done, before, m.queries[of_queries.stage ^ 1][group]);
        if (raises) multiply(sums, factor);
        soft.count(part);
    }
};

template <uint32_t DIM, int FORMAT, uint32_t CLUSTER>
DEVICE void multiply_all(const forward_job &j, room<DIM> &m) {
    rounds<DIM, FORMAT, CLUSTER> work(j, m);
    uint32_t weights[KEYS / 4], next[KEYS / 4];
    work.begin(weights);
    for (;;) {
#pragma unroll 1
        while (work.n >= 2) { /* two rounds, so that weights stay where they were made */
            work.plain(weights, next);
            work.plain(next, weights);
        }
        work.any(weights, next);
        if (work.is_over) break;
#pragma unroll
        for (uint32_t i = 0; i < KEYS / 4; ++i) weights[i] = next[i];
    }
    if (HAS_CODES<FORMAT>)
        record_amax(j.codes.amax, work.with.amax, j.codes.amax ? load_shared_word(j.codes.amax) : 0);
    if (work.with.p.thread == 0) boxes_wait();
}

template <uint32_t DIM, int FORMAT, uint32_t CLUSTER>
__global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ forward_job j) {
    extern __shared__ __align__(SWIZZLE_ALIGN) uint8_t raw[]; /* at its start: the kernel has no other */
    room<DIM> &m = *reinterpret_cast<room<DIM> *>(raw);
    if (shared_address(raw) % SWIZZLE_ALIGN != 0) __trap();
    if (threadIdx.x == 0) {
        constexpr uint32_t WARPS = GROUPS * GROUP_THREADS / 32;
        for (uint32_t i = 0; i < STAGES; ++i) {
            barrier_init(&m.queries_full[i], 1);
            barrier_init(&m.queries_empty[i], GROUPS);
            barrier_init(&m.keys_full[i], 1);
            barrier_init(&m.keys_empty[i], WARPS * CLUSTER);
            barrier_init(&m.values_full[i], 1);
            barrier_init(&m.values_empty[i], WARPS * CLUSTER);
        }
        barriers_publish();
        map_prefetch(&j.queries);
        map_prefetch(&j.keys);
        map_prefetch(&j.out);
    }
    if (CLUSTER > 1)
        cluster_meet();
    else
        block_barrier();
    if (threadIdx.x < GROUP_THREADS) {
        registers_lower<LOADER_REGISTERS>();
        if (threadIdx.x == 0) load_all<DIM, FORMAT, CLUSTER>(j, m);
    } else {
        registers_raise<MULTIPLIER_REGISTERS>();
        multiply_all<DIM, FORMAT, CLUSTER>(j, m);
        const bool writes = blockIdx.x == 0 && threadIdx.x == GROUP_THREADS;
        if (HAS_CODES<FORMAT> && writes) write_words(j.words, scale_of(j.codes));
    }
    if (CLUSTER > 1) cluster_meet(); /* others may still count here */
}

} // namespace forward

#endif
