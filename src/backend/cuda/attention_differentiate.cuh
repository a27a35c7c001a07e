/* attention_differentiate.cuh - the kernel of attention's backward that does the five products; README.md has the
 * whole. One warp loads, two groups of warps multiply, each for half of a block's keys. A group waits for the other
 * only for gradients of scores, and adds up those of a step in the next: while one makes weights, the other
 * multiplies. */
#ifndef QE_CUDA_ATTENTION_DIFFERENTIATE_CUH
#define QE_CUDA_ATTENTION_DIFFERENTIATE_CUH

#include <math.h>

#include "backend/cuda/attention_own.cuh"

namespace attention {

using namespace sm90;

constexpr uint32_t MULTIPLIERS = 2; /* groups of warps */
constexpr uint32_t THREADS = (1 + MULTIPLIERS) * GROUP_THREADS;
constexpr uint32_t LOADER_REGISTERS = 24, MULTIPLIER_REGISTERS = 240; /* 128 (24 + 2 * 240) of 65536 */
constexpr uint32_t STAGES = 2;
constexpr uint32_t STATS_STAGES = 4; /* norms of a step are needed in the next, too */
constexpr uint32_t BOX_BYTES = ROWS * 128; /* 64 rows of 64 columns */
constexpr uint32_t SWIZZLE_ALIGN = 1024;

/* Steps of sixteen columns whose values stay in registers, so that products read them from there: as many as fit. */
template <uint32_t DIM>
constexpr uint32_t HELD = DIM == 128 ? 5 : 0;

template <uint32_t DIM>
struct room {
    static constexpr uint32_t ROW_BOXES = QUERIES<DIM> / ROWS;
    static constexpr uint32_t KEY_BYTES = KEYS * DIM * 2, QUERY_BYTES = QUERIES<DIM> * DIM * 2;
    static constexpr uint32_t STATS_BYTES = ROW_BOXES * STATS * 4;
    static constexpr uint32_t SCORE_BYTES = KEYS * QUERIES<DIM> * 2;
    uint8_t keys[KEY_BYTES], values[KEY_BYTES];
    uint8_t queries[STAGES][QUERY_BYTES], douts[STAGES][QUERY_BYTES];
    uint8_t scores[2][SCORE_BYTES];             /* gradients of scores, keys down, queries across */
    float stats[STATS_STAGES][ROW_BOXES * STATS];
    uint64_t keys_full, full[STAGES], empty[STAGES], dout_full[STAGES], dout_empty[STAGES];
    uint64_t scores_full[2], scores_empty[2];
    uint64_t inbox_full, peer_ready; /* of pairs: what the peer sent is here; it may be sent to */
};

struct differentiate_job {
    CUtensorMap qkv, dout;
    const float *stats, *peaks;
    float *peak; /* [sequences, kv_heads] of all peaks, for what comes behind */
    int32_t *sums;
    float *parts;
    uint16_t *dqkv;
    shape of;
    float scale, scale_log2;
};

/* One block's work: a block of keys under some heads of their group. */
struct item {
    uint32_t block, split, kv_head, s; /* block of keys */
    uint32_t head, heads;              /* the first, and how many */
    uint32_t query_first, query_end;   /* blocks of queries that see any of its keys */

    template <uint32_t DIM>
    METHOD static item of(const shape &o) {
        item it;
        /* The first keys have the most queries: longest first, of few heads at a time, whose sums the cache holds. */
        const uint32_t wave = o.splits * o.wave_heads * o.key_blocks, begin = blockIdx.x / wave * o.wave_heads;
        const uint32_t left = o.kv_heads * o.sequences - begin, across = o.splits * min(o.wave_heads, left);
        const uint32_t within = blockIdx.x % wave;
        uint32_t rest = begin * o.splits + within % across;
        it.block = within / across;
        it.split = rest % o.splits;
        rest /= o.splits;
        it.kv_head = rest % o.kv_heads;
        it.s = rest / o.kv_heads;
        it.heads = o.heads / o.kv_heads / o.splits;
        it.head = (it.kv_head * o.splits + it.split) * it.heads;
        it.query_first = it.block * (KEYS / QUERIES<DIM>);
        it.query_end = o.groups * ROWS / QUERIES<DIM>;
        return it;
    }
    METHOD uint32_t steps() const { return heads * (query_end - query_first); }
};

/* Where loading and multiplying stand: head, block of queries, stage of the ring and its parity, that of statistics. */
struct turn {
    uint32_t head, query, stage = 0, parity = 0, stats = 0;
    METHOD explicit turn(const item &it) : head(it.head), query(it.query_first) {}
    METHOD void next(const item &it) {
        if (++query == it.query_end) {
            query = it.query_first;
            ++head;
        }
        stats = (stats + 1) % STATS_STAGES;
        if (++stage < STAGES) return;
        stage = 0;
        parity ^= 1;
    }
};

/* Boxes of 64 x 64: rows down, then columns. */
template <uint32_t DIM, uint32_t COUNT>
DEVICE void boxes_load(uint8_t *to, const CUtensorMap *map, uint32_t column, uint32_t row, uint32_t s,
                       uint64_t *barrier) {
#pragma unroll
    for (uint32_t c = 0; c < DIM / 64; ++c)
#pragma unroll
        for (uint32_t r = 0; r < COUNT; ++r)
            box_load(to + (c * COUNT + r) * BOX_BYTES, map, column + c * 64, row + r * ROWS, s, barrier);
}

/* One thread: keeps the ring full. */
template <uint32_t DIM>
DEVICE void load_all(const differentiate_job &j, room<DIM> &m, const item &it) {
    using R = room<DIM>;
    const uint32_t key_column = (j.of.heads + it.kv_head) * DIM;
    barrier_expect(&m.keys_full, 2 * R::KEY_BYTES);
    boxes_load<DIM, KEYS / ROWS>(m.keys, &j.qkv, key_column, it.block * KEYS, it.s, &m.keys_full);
    boxes_load<DIM, KEYS / ROWS>(m.values, &j.qkv, key_column + j.of.kv_heads * DIM, it.block * KEYS, it.s,
                                 &m.keys_full);
    turn t(it);
    for (uint32_t left = it.steps(); left > 0; --left) {
        const uint32_t row = t.query * QUERIES<DIM>;
        phase_wait(&m.empty[t.stage], t.parity ^ 1);
        barrier_expect(&m.full[t.stage], R::QUERY_BYTES + R::STATS_BYTES);
        boxes_load<DIM, R::ROW_BOXES>(m.queries[t.stage], &j.qkv, t.head * DIM, row, it.s, &m.full[t.stage]);
        bytes_load(m.stats[t.stats], j.stats + j.of.stats_at(it.s, t.head, row / ROWS), R::STATS_BYTES,
                   &m.full[t.stage]);
        phase_wait(&m.dout_empty[t.stage], t.parity ^ 1);
        barrier_expect(&m.dout_full[t.stage], R::QUERY_BYTES);
        boxes_load<DIM, R::ROW_BOXES>(m.douts[t.stage], &j.dout, t.head * DIM, row, it.s,
                                      &m.dout_full[t.stage]);
        t.next(it);
    }
}

/* Where a thread's sums lie in 64 rows. */
struct place {
    uint32_t group, thread, warp, lane; /* of this group's 128 threads */
    uint32_t row, pair;                 /* its upper row, its pair of columns of four */
    METHOD place() /* the shuffle tells the compiler that a warp's lanes are of one group */
        : group(__shfl_sync(0xFFFFFFFFu, threadIdx.x / GROUP_THREADS, 0) - 1), thread(threadIdx.x % GROUP_THREADS),
          warp(thread / 32), lane(thread % 32), row(warp * 16 + lane / 4), pair(lane % 4) {}
    /* Of a tile of pairs, its first; eight columns on are 32 pairs on, eight rows on 256. */
    METHOD uint32_t pairs_at() const { return warp * 512 + lane; }
};

/* sums (+)= first second', both [rows, DIM] in boxes: 64 keys by all queries. */
template <uint32_t DIM, uint32_t COUNT>
DEVICE void multiply_rows(float (&sums)[COUNT], const uint8_t *first, const uint8_t *second, bool adds) {
    constexpr uint32_t FIRST_APART = KEYS * 128 / 16, SECOND_APART = QUERIES<DIM> * 128 / 16;
    const uint64_t a = operand(first, 0), b = operand(second, 0);
#pragma unroll
    for (uint32_t k = 0; k < DIM / 16; ++k)
        mma<false, false>(sums, a + k / 4 * FIRST_APART + k % 4 * 2, b + k / 4 * SECOND_APART + k % 4 * 2,
                          k > 0 || adds);
}

/* sums += first second', as above; of the first operand's columns the first are in registers. */
template <uint32_t DIM, uint32_t COUNT>
DEVICE void multiply_held(float (&sums)[COUNT], const uint32_t *held, const uint8_t *first, const uint8_t *second) {
    constexpr uint32_t FIRST_APART = KEYS * 128 / 16, SECOND_APART = QUERIES<DIM> * 128 / 16;
    const uint64_t a = operand(first, 0), b = operand(second, 0);
#pragma unroll
    for (uint32_t k = 0; k < DIM / 16; ++k) {
        const uint64_t at = b + k / 4 * SECOND_APART + k % 4 * 2;
        if (k + 1 <= HELD<DIM>)
            mma<false>(sums, held + 4 * k, at);
        else
            mma<false, false>(sums, a + k / 4 * FIRST_APART + k % 4 * 2, at, true);
    }
}

/* sums += first second: 64 keys by DIM, over all queries. The first operand is in registers, four of every eight. */
template <uint32_t DIM, uint32_t COUNT>
DEVICE void multiply_queries(float (&sums)[DIM / 2], const float (&operands)[COUNT], uint32_t from,
                             const uint8_t *second) {
    const uint64_t b = operand(second, QUERIES<DIM> * 128);
#pragma unroll
    for (uint32_t k = 0; k < QUERIES<DIM> / 16; ++k) {
        const float *at = operands + 8 * k + from;
        const uint32_t first[] = {bits_of(at[0]), bits_of(at[1]), bits_of(at[2]), bits_of(at[3])};
        mma<true>(sums, first, b + k * (16 * 128 / 16));
    }
}

/* sums = first' second: 64 queries by 64 columns, over all keys. */
DEVICE void multiply_keys(float (&sums)[32], const uint8_t *first, const uint8_t *second) {
    const uint64_t a = operand(first, 0), b = operand(second, 0);
#pragma unroll
    for (uint32_t k = 0; k < KEYS / 16; ++k)
        mma<true, true>(sums, a + k * (16 * 128 / 16), b + k * (16 * 128 / 16), k > 0);
}

/* Scores become weights; a key sees no query before it. */
template <uint32_t COUNT>
DEVICE void cut(float (&s)[COUNT], const place &p, int32_t first_key_less_query) {
#pragma unroll
    for (uint32_t i = 0; i < COUNT / 4; ++i)
#pragma unroll
        for (uint32_t n = 0; n < 4; ++n) {
            const int32_t key = first_key_less_query + static_cast<int32_t>(p.row + n / 2 * 8);
            if (key > static_cast<int32_t>(8 * i + 2 * p.pair + n % 2)) s[4 * i + n] = -INFINITY;
        }
}

/* Where a statistic of this thread's two queries of eight lies, and of those eight times i on. */
DEVICE uint32_t stats_address(const float *stats, stat which, const place &p) {
    return shared_address(stats) + 4 * which + 8 * p.pair;
}
DEVICE float2 stats_load(uint32_t at, uint32_t i) {
    return pair_load(at + i / 8 * (STATS * 4) + i % 8 * 32);
}

constexpr uint32_t STATS_AHEAD = 3; /* loads begun: all at once would need more registers than there are */

template <uint32_t COUNT>
DEVICE void weigh(float (&s)[COUNT], const float *stats, const place &p, float scale_log2) {
    const uint32_t at = stats_address(stats, STAT_LSE, p);
    float2 lse[STATS_AHEAD];
#pragma unroll
    for (uint32_t i = 0; i < STATS_AHEAD; ++i) lse[i] = stats_load(at, i);
#pragma unroll
    for (uint32_t i = 0; i < COUNT / 4; ++i) {
        const float2 less = lse[i % STATS_AHEAD];
        float(&four)[4] = reinterpret_cast<float(&)[4]>(s[4 * i]);
#pragma unroll
        for (uint32_t n = 0; n < 4; ++n)
            four[n] = power_of_two(fused(four[n], scale_log2, n % 2 ? less.y : less.x));
        if (i + STATS_AHEAD < COUNT / 4) lse[i % STATS_AHEAD] = stats_load(at, i + STATS_AHEAD);
        registers_pin(four);
    }
}

/* Gradients of weights begin with what centres them. */
template <uint32_t COUNT>
DEVICE void means_take(float (&d)[COUNT], const float *stats, const place &p) {
    const uint32_t at = stats_address(stats, STAT_MEAN, p);
#pragma unroll
    for (uint32_t i = 0; i < COUNT / 4; ++i) {
        const float2 less = stats_load(at, i);
        d[4 * i] = d[4 * i + 2] = less.x;
        d[4 * i + 1] = d[4 * i + 3] = less.y;
    }
    registers_pin(d);
}

/* Of weights and their gradients, centred, those of scores: 64 keys by all queries into boxes of 64 queries. Both
 * become operands where the weights were, of every eight registers four of weights and four of gradients. */
template <uint32_t COUNT>
DEVICE void scores_make(float (&s)[COUNT], const float (&d)[COUNT], uint8_t *scores, const place &p) {
    const uint32_t row = p.warp * 16 + p.lane % 16, chunk = p.lane / 16 ^ p.lane % 8;
    const uint32_t at = shared_address(scores) + (p.group * ROWS + row) * 128;
#pragma unroll
    for (uint32_t k = 0; k < COUNT / 8; ++k) { /* sixteen queries */
        uint32_t weights[4], gradients[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t n = 8 * k + 2 * i;
            weights[i] = round_bf16_pair(s[n], s[n + 1]);
            gradients[i] = round_bf16_pair(mul(d[n], s[n]), mul(d[n + 1], s[n + 1]));
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            s[8 * k + i] = float_of(weights[i]);
            s[8 * k + 4 + i] = float_of(gradients[i]);
        }
        squares_store(at + k / 4 * (KEYS * 128) + ((chunk ^ k % 4 * 2) << 4), gradients);
    }
    registers_pin(s);
}

/* What a warp did before it leaves to others. */
DEVICE void warp_arrive(uint64_t *barrier, const place &p) {
    if (p.lane == 0) barrier_arrive(barrier);
}

/* The gradient of a group's 64 keys or values. */
template <uint32_t DIM>
DEVICE void gradient_store(const differentiate_job &j, const item &it, const place &p, const float (&sums)[DIM / 2],
                           uint32_t which, float scale) {
    const shape &of = j.of;
    if (of.parts > 1) {
        float2 *to = reinterpret_cast<float2 *>(
                         j.parts + of.part_at(it.split, it.s, it.kv_head, it.block, which, p.group, DIM)) +
                     p.pairs_at();
#pragma unroll
        for (uint32_t i = 0; i < DIM / 8; ++i) {
            float2 *const at = to + i / 8 * (TILE_WORDS / 2) + i % 8 * 32;
            at[0] = make_float2(sums[4 * i], sums[4 * i + 1]);
            at[256] = make_float2(sums[4 * i + 2], sums[4 * i + 3]);
        }
        return;
    }
    const uint32_t column = (of.heads + which * of.kv_heads + it.kv_head) * DIM + 2 * p.pair;
#pragma unroll
    for (uint32_t low = 0; low < 2; ++low) {
        const uint32_t key = it.block * KEYS + p.group * ROWS + p.row + 8 * low;
        if (key >= of.sequence) continue;
        uint16_t *to = j.dqkv + (static_cast<uint64_t>(it.s) * of.sequence + key) * of.row + column;
#pragma unroll
        for (uint32_t i = 0; i < DIM / 8; ++i)
            *reinterpret_cast<uint32_t *>(to + 8 * i) =
                round_bf16_pair(mul(sums[4 * i + 2 * low], scale), mul(sums[4 * i + 2 * low + 1], scale));
    }
}

/* Two blocks of a cluster have the same keys and half of the heads each: one adds up what belongs to keys, the other
 * what belongs to values. The inbox lies where queries were; half of it is a group's, sixteen bytes a thread. */
template <uint32_t DIM>
DEVICE void gradient_exchange(const differentiate_job &j, room<DIM> &m, const item &it, const place &p,
                              float (&own)[DIM / 2], const float (&other)[DIM / 2]) {
    constexpr uint32_t APART = GROUP_THREADS * sizeof(float4), GROUP_BYTES = DIM / 8 * APART;
    const uint8_t *inbox = m.queries[0] + p.group * GROUP_BYTES + p.thread * sizeof(float4);
    const uint32_t to = peer_address(inbox, it.split ^ 1), barrier = peer_address(&m.inbox_full, it.split ^ 1);
    phase_wait(&m.peer_ready, 0);
#pragma unroll
    for (uint32_t i = 0; i < DIM / 8; ++i) peer_send(to + i * APART, barrier, other + 4 * i);
    phase_wait(&m.inbox_full, 0);
#pragma unroll
    for (uint32_t i = 0; i < DIM / 8; ++i) {
        const float4 v = *reinterpret_cast<const float4 *>(inbox + i * APART);
        const float theirs[] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (uint32_t n = 0; n < 4; ++n) own[4 * i + n] = add(add(0.0f, own[4 * i + n]), theirs[n]); /* as parts are */
    }
    gradient_store<DIM>(j, it, p, own, it.split, it.split == 0 ? j.scale : 1.0f);
}

/* One group of warps at half of a block's keys. */
template <uint32_t DIM>
struct multiplier {
    static constexpr uint32_t COUNT = QUERIES<DIM> / 2;
    const differentiate_job &j;
    room<DIM> &m;
    const item &it;
    const place p;
    const uint8_t *keys, *values;
    const uint8_t *sum_keys; /* of a tile of queries this group adds up columns (of 128) or rows (of 64) */
    uint32_t sum_scores, sum_rows;
    float peak;

    METHOD multiplier(const differentiate_job &job, room<DIM> &memory, const item &work)
        : j(job), m(memory), it(work), keys(m.keys + p.group * BOX_BYTES),
          values(m.values + p.group * BOX_BYTES), sum_keys(m.keys + (DIM == 128 ? p.group * KEYS * 128 : 0)),
          sum_scores(DIM == 128 ? 0 : p.group * KEYS * 128), sum_rows(DIM == 128 ? 0 : p.group),
          peak(peak_of(job.peaks, job.of, work.s, work.kv_head)) {}

    METHOD void values_hold(uint32_t (&held)[DIM / 4]) const {
        const uint32_t row = p.warp * 16 + p.lane % 16, chunk = p.lane / 16 ^ p.lane % 8;
        const uint32_t at = shared_address(values) + row * 128;
#pragma unroll
        for (uint32_t k = 0; k + 1 <= HELD<DIM>; ++k)
            squares_load(at + k / 4 * (KEYS * 128) + ((chunk ^ k % 4 * 2) << 4), held + 4 * k);
    }
    /* `never` is false, which the compiler does not know: what was in `s` has to lie where scores will. */
    METHOD void scores_begin(float (&s)[COUNT], const turn &t, bool never) const {
        registers_pin(s);
        mma_fence();
        multiply_rows<DIM>(s, keys, m.queries[t.stage], never);
        mma_commit();
    }
    METHOD void dweights_begin(float (&d)[COUNT], const uint32_t (&held)[DIM / 4], const turn &t) const {
        phase_wait(&m.dout_full[t.stage], t.parity);
        mma_fence();
        multiply_held<DIM>(d, held, values, m.douts[t.stage]);
        mma_commit();
    }
    METHOD void weights_make(float (&s)[COUNT], const turn &t) const {
        const int32_t ahead = static_cast<int32_t>(it.block * KEYS + p.group * ROWS) -
                              static_cast<int32_t>(t.query * QUERIES<DIM>);
        registers_pin(s);
        if (ahead > -static_cast<int32_t>(ROWS)) cut(s, p, ahead);
        weigh(s, m.stats[t.stats], p, j.scale_log2);
        registers_pin(s);
    }
    /* Makes both operands of a step, and gives those of the sums of queries to both groups. */
    METHOD void operands_make(float (&s)[COUNT], const uint32_t (&held)[DIM / 4], const turn &t, uint32_t step,
                              bool never) const {
        float d[COUNT];
        phase_wait(&m.full[t.stage], t.parity);
        means_take(d, m.stats[t.stats], p);
        scores_begin(s, t, never);
        dweights_begin(d, held, t);
        mma_wait<1>();
        weights_make(s, t);
        phase_wait(&m.scores_empty[step % 2], step / 2 % 2 ^ 1);
        mma_wait<0>();
        registers_pin(d);
        registers_pin(s);
        scores_make(s, d, m.scores[step % 2], p);
        shared_publish();
        __syncwarp();
        warp_arrive(&m.scores_full[step % 2], p);
    }
    METHOD void sums_begin(float (&sums)[32], uint32_t step) const {
        registers_pin(sums);
        mma_fence();
        multiply_keys(sums, m.scores[step % 2] + sum_scores, sum_keys);
        mma_commit();
    }
    METHOD void dvalues_begin(float (&dvalues)[DIM / 2], const float (&s)[COUNT], const turn &t) const {
        registers_pin(dvalues);
        mma_fence();
        multiply_queries<DIM>(dvalues, s, 0, m.douts[t.stage]);
        mma_commit();
    }
    METHOD void dkeys_begin(float (&dkeys)[DIM / 2], const float (&s)[COUNT], const turn &t) const {
        registers_pin(dkeys);
        mma_fence();
        multiply_queries<DIM>(dkeys, s, 4, m.queries[t.stage]);
        mma_commit();
    }
    /* Which tile of all sums is this group's. */
    METHOD uint32_t tile_of(const turn &t) const {
        const uint32_t group = t.query * (QUERIES<DIM> / ROWS) + sum_rows;
        return static_cast<uint32_t>(j.of.sums_at(it.s, t.head, group, DIM) / TILE_WORDS) + (DIM == 128 ? p.group : 0);
    }
    /* Of the step before t, as integers, straight from registers. */
    METHOD void sums_send(const float (&sums)[32], const turn &t, uint32_t tile) const {
        const float *const norms =
            m.stats[(t.stats + STATS_STAGES - 1) % STATS_STAGES] + sum_rows * STATS + STAT_NORM + p.row;
        const float upper = sum_scale(norms[0], peak), lower = sum_scale(norms[8], peak);
        uint64_t *to =
            reinterpret_cast<uint64_t *>(j.sums + static_cast<uint64_t>(tile) * TILE_WORDS) + p.pairs_at();
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
            pair_add(to + i * 32, pair_of(__float2int_rn(mul(sums[4 * i], upper)),
                                          __float2int_rn(mul(sums[4 * i + 1], upper))));
            pair_add(to + i * 32 + 256, pair_of(__float2int_rn(mul(sums[4 * i + 2], lower)),
                                                __float2int_rn(mul(sums[4 * i + 3], lower))));
        }
    }
    /* Sums of the last step. Of pairs, nothing reads queries any more: the peer may send. */
    template <bool PAIRS>
    METHOD void sums_finish(const turn &t, uint32_t steps, uint32_t tile) const {
        if (PAIRS && p.lane == 0) barrier_arrive_at(&m.peer_ready, it.split ^ 1);
        float sums[32];
        phase_wait(&m.scores_full[(steps - 1) % 2], (steps - 1) / 2 % 2);
        sums_begin(sums, steps - 1);
        mma_wait<0>();
        registers_pin(sums);
        sums_send(sums, t, tile);
    }
};

/* Half of the block's keys through all its steps. */
template <uint32_t DIM, bool PAIRS>
DEVICE void multiply_all(const differentiate_job &j, room<DIM> &m, const item &it) {
    const multiplier<DIM> with(j, m, it);
    const place &p = with.p;
    const bool never = j.of.sequence == 0;
    float s[QUERIES<DIM> / 2] = {}, dkeys[DIM / 2] = {}, dvalues[DIM / 2] = {};
    uint32_t held[DIM / 4], tile = 0;
    turn t(it);
    phase_wait(&m.keys_full, 0);
    with.values_hold(held);
    const uint32_t steps = it.steps();
    for (uint32_t step = 0; step < steps; ++step) {
        float sums[32];
        with.operands_make(s, held, t, step, never);
        if (step > 0) phase_wait(&m.scores_full[(step - 1) % 2], (step - 1) / 2 % 2);
        with.sums_begin(sums, step + 1); /* of the step before; in the first of nothing, and not used */
        with.dvalues_begin(dvalues, s, t);
        with.dkeys_begin(dkeys, s, t);
        mma_wait<2>();
        registers_pin(sums);
        if (step > 0) {
            warp_arrive(&m.scores_empty[(step - 1) % 2], p);
            with.sums_send(sums, t, tile);
        }
        mma_wait<1>();
        registers_pin(dvalues);
        warp_arrive(&m.dout_empty[t.stage], p);
        mma_wait<0>();
        registers_pin(dkeys);
        warp_arrive(&m.empty[t.stage], p);
        tile = with.tile_of(t);
        t.next(it);
    }
    with.template sums_finish<PAIRS>(t, steps, tile);
    if (!PAIRS) {
        gradient_store<DIM>(j, it, p, dkeys, 0, j.scale);
        gradient_store<DIM>(j, it, p, dvalues, 1, 1.0f);
    } else if (it.split == 0)
        gradient_exchange<DIM>(j, m, it, p, dkeys, dvalues);
    else
        gradient_exchange<DIM>(j, m, it, p, dvalues, dkeys);
    if (it.block == 0 && it.split == 0 && p.group == 0 && p.thread == 0)
        j.peak[j.of.peak_at(it.s, it.kv_head)] = with.peak;
}

/* PAIRS: blocks are in clusters of two, which are the two splits of one block of keys. */
template <uint32_t DIM, bool PAIRS>
__global__ void __launch_bounds__(THREADS, 1) differentiate(const __grid_constant__ differentiate_job j) {
    extern __shared__ __align__(SWIZZLE_ALIGN) uint8_t raw[]; /* at its start: the kernel has no other */
    room<DIM> &m = *reinterpret_cast<room<DIM> *>(raw);
    if (shared_address(raw) % SWIZZLE_ALIGN != 0) __trap();
    const item it = item::of<DIM>(j.of);
    if (threadIdx.x == 0) {
        constexpr uint32_t WARPS = MULTIPLIERS * GROUP_THREADS / 32;
        barrier_init(&m.keys_full, 1);
        for (uint32_t i = 0; i < STAGES; ++i) {
            barrier_init(&m.full[i], 1);
            barrier_init(&m.empty[i], WARPS);
            barrier_init(&m.dout_full[i], 1);
            barrier_init(&m.dout_empty[i], WARPS);
        }
        for (uint32_t i = 0; i < 2; ++i) {
            barrier_init(&m.scores_full[i], WARPS);
            barrier_init(&m.scores_empty[i], WARPS);
        }
        barrier_init(&m.peer_ready, WARPS);
        barrier_init(&m.inbox_full, 1);
        barriers_publish();
        if (PAIRS) barrier_expect(&m.inbox_full, KEYS * DIM * sizeof(float));
    }
    block_barrier();
    if (PAIRS) cluster_arrive(); /* the peer's barriers are made before they are used */
    if (threadIdx.x < GROUP_THREADS) {
        registers_lower<LOADER_REGISTERS>();
        if (PAIRS) cluster_wait();
        if (threadIdx.x == 0) load_all<DIM>(j, m, it);
    } else {
        registers_raise<MULTIPLIER_REGISTERS>();
        if (PAIRS) cluster_wait();
        multiply_all<DIM, PAIRS>(j, m, it);
    }
}

} // namespace attention

#endif
