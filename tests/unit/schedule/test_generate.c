/* The named orders: their text, the figures they are known by, and what is refused. */
#include "unit/schedule/support.h"

static void assert_row(const qe_schedule *schedule, uint32_t rank, const char *expected) {
    char text[4096];
    assert_string_equal(row_text(schedule, rank, text, sizeof text), expected);
}

static void rows_of_the_published_examples_are_reproduced(void **state) {
    (void)state;
    qe_schedule schedule = generated("1f1b", 4, 1, 8);
    assert_row(&schedule, 1, "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7");
    assert_row(&schedule, 3, "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7");
    qe_schedule_deinit(&schedule);
    schedule = generated("gpipe", 4, 1, 8);
    assert_row(&schedule, 2, "2F0 2F1 2F2 2F3 2F4 2F5 2F6 2F7 2B0 2B1 2B2 2B3 2B4 2B5 2B6 2B7");
    qe_schedule_deinit(&schedule);
    schedule = generated("zbh1", 4, 1, 8);
    assert_row(&schedule, 3, "3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3F6 3I6 3W3 3F7 3I7 3W4 "
                             "3W5 3W6 3W7");
    assert_row(&schedule, 0, "0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0F6 0I3 0W3 0F7 0I4 0W4 0I5 0W5 0I6 "
                             "0W6 0I7 0W7");
    qe_schedule_deinit(&schedule);
    schedule = generated("interleaved", 4, 2, 8);
    assert_row(&schedule, 3, "3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3 7F4 7B4 "
                             "7F5 7B5 7F6 7B6 7F7 7B7 3B4 3B5 3B6 3B7");
    qe_schedule_deinit(&schedule);
}

static void rows_of_zbh2_are_the_published_ones(void **state) {
    (void)state;
    qe_schedule schedule = generated("zbh2", 4, 1, 8);
    assert_row(&schedule, 2, "2F0 2F1 2F2 2I0 2F3 2I1 2F4 2I2 2F5 2I3 2F6 2I4 2W0 2F7 2I5 2W1 2I6 2W2 2I7 2W3 2W4 2W5 "
                             "2W6 2W7");
    assert_row(&schedule, 0, "0F0 0F1 0F2 0F3 0F4 0F5 0F6 0I0 0W0 0F7 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5 0I6 0W6 "
                             "0I7 0W7");
    qe_schedule_deinit(&schedule);
    schedule = generated("zbh2", 4, 1, 2); /* fewer microbatches than forwards ahead, and than W are late */
    assert_row(&schedule, 0, "0F0 0F1 0I0 0W0 0I1 0W1");
    assert_row(&schedule, 3, "3F0 3I0 3F1 3I1 3W0 3W1");
    qe_schedule_deinit(&schedule);
}

/* As PyTorch 2.11's ScheduleLoopedBFS, ScheduleInterleavedZeroBubble and ScheduleZBVZeroBubble compute them. */
static void rows_are_those_of_pytorch(void **state) {
    (void)state;
    qe_schedule schedule = generated("looped-bfs", 2, 2, 3);
    assert_row(&schedule, 0, "0F0 0F1 0F2 2F0 2F1 2F2 2B2 2B1 2B0 0B2 0B1 0B0");
    assert_row(&schedule, 1, "1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0");
    qe_schedule_deinit(&schedule);
    schedule = generated("interleaved-zb", 2, 2, 4);
    assert_row(&schedule, 0, "0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 "
                             "0I3 0W3");
    assert_row(&schedule, 1, "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 "
                             "1W2 1W3");
    qe_schedule_deinit(&schedule);
    schedule = generated("zbv", 3, 2, 6);
    assert_row(&schedule, 0, "0F0 0F1 0F2 0F3 0F4 5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 5W2 0F5 0I0 0W0 5F3 5I3 5W3 0I1 0W1 "
                             "5F4 5I4 5W4 0I2 0W2 5F5 5I5 5W5 0I3 0W3 0I4 0W4 0I5 0W5");
    assert_row(&schedule, 2, "2F0 3F0 2F1 3F1 2F2 3F2 3I0 3W0 2F3 2I0 2W0 3F3 3I1 3W1 2F4 2I1 2W1 3F4 3I2 3W2 2F5 2I2 "
                             "2W2 3F5 3I3 3W3 2I3 3I4 2I4 3I5 2I5 2W3 3W4 3W5 2W4 2W5");
    qe_schedule_deinit(&schedule);
    schedule = generated("zbv", 2, 2, 2); /* as for 3, without the third */
    assert_row(&schedule, 0, "0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1");
    assert_row(&schedule, 1, "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1");
    qe_schedule_deinit(&schedule);
}

static void rows_of_1f1b_v_are_those_of_the_papers_code(void **state) {
    (void)state;
    qe_schedule schedule = generated("1f1b-v", 3, 2, 5);
    assert_row(&schedule, 0, "0F0 0F1 0F2 0F3 0F4 5F0 5B0 5F1 5B1 5F2 5B2 5F3 0B0 5B3 5F4 0B1 5B4 0B2 0B3 0B4");
    assert_row(&schedule, 1, "1F0 1F1 1F2 4F0 1F3 4F1 4B0 4F2 4B1 1F4 1B0 4F3 4B2 1B1 4F4 4B3 1B2 4B4 1B3 1B4");
    assert_row(&schedule, 2, "2F0 3F0 2F1 3F1 2F2 3F2 3B0 2B0 2F3 3F3 3B1 2B1 2F4 3F4 3B2 2B2 3B3 2B3 3B4 2B4");
    static const uint32_t ranks[6] = {0, 1, 2, 2, 1, 0};
    assert_memory_equal(schedule.stage_rank, ranks, sizeof ranks);
    qe_schedule_deinit(&schedule);
}

static void rows_of_v_half_and_v_min_are_those_of_the_papers_code(void **state) {
    (void)state;
    qe_schedule schedule = generated("v-half", 3, 2, 5);
    assert_row(&schedule, 0, "0F0 0F1 0F2 5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 0F3 5F2 5I2 5W2 0I1 0W1 0F4 5F3 "
                              "5I3 5W3 0I2 0W2 5F4 5I4 0I3 5W4 0W3 0I4 0W4");
    assert_row(&schedule, 1, "1F0 1F1 4F0 4F1 4I0 4W0 1F2 1I0 4I1 4W1 4F2 1W0 1F3 1I1 4I2 4W2 4F3 1W1 1F4 "
                              "1I2 4I3 4W3 4F4 1W2 1I3 4I4 4W4 1W3 1I4 1W4");
    assert_row(&schedule, 2, "2F0 3F0 2F1 3F1 3I0 3W0 2I0 2W0 2F2 3F2 3I1 3W1 2I1 2W1 2F3 3F3 3I2 2I2 3W2 "
                              "2F4 2W2 3F4 3I3 2I3 3W3 2W3 3I4 2I4 3W4 2W4");
    static const uint32_t ranks[6] = {0, 1, 2, 2, 1, 0};
    assert_memory_equal(schedule.stage_rank, ranks, sizeof ranks);
    qe_schedule_deinit(&schedule);
    schedule = generated("v-min", 3, 2, 5);
    assert_row(&schedule, 0, "0F0 0F1 0F2 5F0 5I0 5W0 5F1 0I0 5I1 5W1 0W0 5F2 0F3 0I1 5I2 5W2 0W1 5F3 0F4 "
                              "0I2 5I3 5W3 0W2 5F4 5I4 0I3 5W4 0W3 0I4 0W4");
    assert_row(&schedule, 1, "1F0 1F1 4F0 4F1 4I0 4W0 1I0 1F2 1W0 4I1 4F2 4W1 1I1 1F3 1W1 4I2 4F3 4W2 1I2 "
                              "1F4 1W2 4I3 4F4 4W3 1I3 4I4 4W4 1W3 1I4 1W4");
    assert_row(&schedule, 2, "2F0 3F0 2F1 3F1 3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 2F3 3F3 3I2 2I2 3W2 "
                              "2W2 2F4 3F4 3I3 2I3 3W3 2W3 3I4 2I4 3W4 2W4");
    assert_memory_equal(schedule.stage_rank, ranks, sizeof ranks);
    qe_schedule_deinit(&schedule);
}

/* FNV-1a over what `qeffect schedule` writes. */
static uint64_t digest_rows(uint64_t digest, const qe_schedule *schedule) {
    char text[4096];
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) {
        (void)row_text(schedule, rank, text, sizeof text);
        for (const char *at = text; *at != '\0'; at++) {
            digest = (digest ^ (uint8_t)(*at == ' ' ? ',' : *at)) * 0x100000001b3;
        }
        digest = (digest ^ '\n') * 0x100000001b3;
    }
    return digest;
}

/* Few rows are read by people; these 168 sizes each were computed by the paper's code, zbv_greedy.py at 39f2c186. */
static void all_small_sizes_of_v_half_and_v_min_are_those_of_the_papers_code(void **state) {
    (void)state;
    static const struct {
        const char *name;
        uint64_t digest;
    } source[] = {{"v-half", 0xf2564d6081723c1f}, {"v-min", 0x0bdb6be4bf877e5f}};
    for (size_t i = 0; i < sizeof source / sizeof source[0]; i++) {
        uint64_t digest = 0xcbf29ce484222325;
        for (uint32_t size = 0; size < 12 * 14; size++) {
            qe_schedule schedule = generated(source[i].name, size / 14 + 1, 2, size % 14 + 1);
            digest = digest_rows(digest, &schedule);
            qe_schedule_deinit(&schedule);
        }
        assert_true(digest == source[i].digest);
    }
}

/* As DeepSeek's own code runs them (github.com/deepseek-ai/DualPipe, 3da1bbe); dualpipev as PyTorch 2.11's
 * ScheduleDualPipeV computes it, too. Pairs are F, B. */
static void rows_of_dualpipe_and_dualpipev_are_those_of_deepseeks_code(void **state) {
    (void)state;
    qe_schedule schedule = generated("dualpipe", 4, 1, 8);
    assert_row(&schedule, 0, "0F0 0F1 0F2 3F4 3I4 3W4 3F5 0F3 3B5 3F6 0B0 3B6 3F7 0B1 3B7 0I2 0W2 0I3 0W3");
    assert_row(&schedule, 1, "1F0 2F4 1F1 2F5 1F2 2B4 2F6 1B0 1F3 2B5 2F7 1B1 2B6 1B2 2I7 1I3 2W7 1W3");
    assert_row(&schedule, 2, "1F4 2F0 1F5 2F1 1F6 2B0 2F2 1B4 1F7 2B1 2F3 1B5 2B2 1B6 2I3 1I7 2W3 1W7");
    assert_row(&schedule, 3, "0F4 0F5 0F6 3F0 3I0 3W0 3F1 0F7 3B1 3F2 0B4 3B2 3F3 0B5 3B3 0I6 0W6 0I7 0W7");
    assert_int_equal(schedule.reversed, 4);
    for (uint32_t stage = 0; stage < 4; stage++) {
        assert_int_equal(qe_schedule_rank(&schedule, stage, 3), stage);
        assert_int_equal(qe_schedule_rank(&schedule, stage, 4), 3 - stage);
    }
    qe_schedule_deinit(&schedule);
    schedule = generated("dualpipev", 2, 2, 5);
    assert_row(&schedule, 0, "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 0F4 3B2 3F3 0B1 3B3 3F4 0B2 3B4 0I3 0W3 0I4 "
                             "0W4");
    assert_row(&schedule, 1, "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 1F4 2B2 2F4 1B2 2B3 1B3 2I4 1I4 2W4 1W4");
    for (uint32_t i = 0; i < 22; i++) { /* rank 1: its first F and B in turn run one behind the other, then by pairs */
        assert_int_equal(schedule.actions[schedule.rank_begin[1] + i].paired, i >= 6 && i < 16 && i % 2 == 0);
    }
    assert_int_equal(schedule.reversed, 0);
    qe_schedule_deinit(&schedule);
}

static void the_second_chunk_of_a_v_runs_back_over_the_ranks(void **state) {
    (void)state;
    qe_schedule schedule = generated("zbv", 4, 2, 8);
    static const uint32_t ranks[8] = {0, 1, 2, 3, 3, 2, 1, 0};
    assert_memory_equal(schedule.stage_rank, ranks, sizeof ranks);
    qe_schedule_deinit(&schedule);
    schedule = generated("interleaved-zb", 4, 2, 8);
    for (uint32_t stage = 0; stage < 8; stage++) assert_int_equal(schedule.stage_rank[stage], stage % 4);
    qe_schedule_deinit(&schedule);
}

static void sequential_takes_one_microbatch_through_all_stages_and_back(void **state) {
    (void)state;
    qe_schedule schedule = generated("sequential", 1, 3, 2);
    assert_row(&schedule, 0, "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1");
    qe_schedule_deinit(&schedule);
    schedule = generated("sequential", 2, 2, 1);
    assert_row(&schedule, 0, "0F0 2F0 2B0 0B0");
    assert_row(&schedule, 1, "1F0 3F0 3B0 1B0");
    qe_schedule_deinit(&schedule);
}

static void evaluation_keeps_only_the_forwards_in_the_same_order(void **state) {
    (void)state;
    qe_schedule_request request = {.name = "interleaved", .ranks = 2, .chunks = 2, .microbatches = 2,
                                   .forward_only = 1};
    qe_schedule schedule;
    assert_int_equal(qe_schedule_generate(&request, &schedule, NULL), QE_OK);
    assert_row(&schedule, 0, "0F0 0F1 2F0 2F1");
    assert_row(&schedule, 1, "1F0 1F1 3F0 3F1");
    qe_schedule_deinit(&schedule);
}

static void warmup_is_cut_where_a_step_has_fewer_microbatches_than_ranks(void **state) {
    (void)state;
    qe_schedule schedule = generated("1f1b", 4, 1, 2);
    assert_row(&schedule, 0, "0F0 0F1 0B0 0B1");
    assert_row(&schedule, 3, "3F0 3B0 3F1 3B1");
    qe_schedule_deinit(&schedule);
}

/* An event simulation of its own: every action starts when its rank is free and its input is there. */
typedef struct times {
    long forward, input, weight, hop; /* of one chunk */
} times;

typedef struct figures {
    long makespan_bubble, stage_bubble; /* in units of the times */
    uint32_t peak_live, peak_weight;    /* in chunks */
} figures;

static long duration(times t, uint8_t kind) {
    if (kind == QE_ACTION_F) return t.forward;
    if (kind == QE_ACTION_I) return t.input;
    return kind == QE_ACTION_W ? t.weight : t.input + t.weight;
}

/* End of the action that gives this one its input; -1 while unknown, 0 where it needs none. */
static long input_end(const qe_schedule *s, const long *end, uint32_t rank, const qe_action *action, times t) {
    long source_stage = action->kind == QE_ACTION_F ? action->stage - 1L : action->stage + 1L;
    if (action->kind == QE_ACTION_W || source_stage < 0 || source_stage >= (long)s->stages) return 0;
    uint32_t source_rank = qe_schedule_rank(s, (uint32_t)source_stage, action->microbatch);
    for (uint32_t i = s->rank_begin[source_rank]; i < s->rank_begin[source_rank + 1]; i++) {
        const qe_action *other = &s->actions[i];
        int forward = other->kind == QE_ACTION_F;
        if (other->stage != source_stage || other->microbatch != action->microbatch) continue;
        if (other->kind == QE_ACTION_W || forward != (action->kind == QE_ACTION_F)) continue;
        return end[i] < 0 ? -1 : end[i] + (source_rank == rank ? 0 : t.hop);
    }
    return -1;
}

/* Runs what can run on one rank; returns how many actions did. A pair starts with both inputs and gives its outputs
 * at its end. */
static uint32_t advance(const qe_schedule *s, uint32_t rank, uint32_t *next, long *end, times t) {
    uint32_t ran = 0;
    while (*next < s->rank_begin[rank + 1]) {
        uint32_t count = s->actions[*next].paired ? 2 : 1;
        long now = *next == s->rank_begin[rank] ? 0 : end[*next - 1], last = 0;
        for (uint32_t i = *next; i < *next + count; i++) {
            long ready = input_end(s, end, rank, &s->actions[i], t);
            if (ready < 0) return ran;
            if (ready > now) now = ready;
            last += duration(t, s->actions[i].kind);
        }
        for (uint32_t i = *next; i < *next + count; i++) end[i] = now + last;
        *next += count;
        ran += count;
    }
    return ran;
}

static void keep_peaks(const qe_schedule *s, figures *out) {
    for (uint32_t rank = 0; rank < s->ranks; rank++) {
        uint32_t live = 0, weight = 0;
        for (uint32_t i = s->rank_begin[rank]; i < s->rank_begin[rank + 1]; i++) {
            uint8_t kind = s->actions[i].kind;
            if (kind == QE_ACTION_F) live++;
            if (kind == QE_ACTION_I) weight++;
            if (live > out->peak_live) out->peak_live = live;
            if (weight > out->peak_weight) out->peak_weight = weight;
            if (kind == QE_ACTION_W) weight--;
            if (kind == QE_ACTION_W || kind == QE_ACTION_B) live--;
        }
        assert_int_equal(live, 0);
    }
}

static figures simulate(const qe_schedule *s, times t) {
    uint32_t actions = s->rank_begin[s->ranks], next[QE_RANKS_MAX], ran = 1;
    long *end = malloc(actions * sizeof *end), makespan = 0, longest = 0;
    assert_non_null(end);
    for (uint32_t i = 0; i < actions; i++) end[i] = -1;
    for (uint32_t rank = 0; rank < s->ranks; rank++) next[rank] = s->rank_begin[rank];
    while (ran > 0) {
        ran = 0;
        for (uint32_t rank = 0; rank < s->ranks; rank++) ran += advance(s, rank, &next[rank], end, t);
    }
    for (uint32_t rank = 0; rank < s->ranks; rank++) {
        uint32_t first = s->rank_begin[rank], last = s->rank_begin[rank + 1] - 1;
        assert_int_equal(next[rank], last + 1);
        long busy_from = end[first] - duration(t, s->actions[first].kind); /* no row begins with a pair */
        if (end[last] > makespan) makespan = end[last];
        if (end[last] - busy_from > longest) longest = end[last] - busy_from;
    }
    long work = (long)s->microbatches * (s->stages / s->ranks) * (t.forward + t.input + t.weight);
    figures out = {.makespan_bubble = makespan - work, .stage_bubble = longest - work};
    keep_peaks(s, &out);
    free(end);
    return out;
}

/* Published figures in whole numbers: bubbles in tenths of a chunk's F, peaks in chunks. */
typedef struct bubbles {
    long makespan, stage; /* -1: not published */
} bubbles;

typedef struct golden {
    const char *name;
    uint32_t ranks, chunks, microbatches, peak, weight;
    bubbles even, uneven, hops; /* F=I=W; F, I, W = 1, 1.2, 0.7; F=I=W and a hop of 0.1 of a full rank's F */
} golden;

#define NOT_PUBLISHED {-1, -1}
static const golden GOLDEN[] = {
    {"gpipe", 4, 1, 12, 12, 0, {90, 90}, NOT_PUBLISHED, NOT_PUBLISHED},
    {"gpipe", 8, 1, 24, 24, 0, {210, 210}, {203, 203}, {224, 224}},
    {"1f1b", 4, 1, 12, 4, 0, {90, 90}, NOT_PUBLISHED, NOT_PUBLISHED},
    {"1f1b", 8, 1, 24, 8, 0, {210, 210}, {203, 203}, {264, 264}},
    {"interleaved", 4, 2, 12, 11, 0, {90, 90}, NOT_PUBLISHED, NOT_PUBLISHED},
    {"interleaved", 8, 2, 24, 23, 0, {210, 210}, {203, -1}, {270, -1}},
    {"interleaved", 4, 3, 12, 15, 0, {90, 90}, NOT_PUBLISHED, NOT_PUBLISHED},
    {"interleaved", 8, 3, 24, 31, 0, {210, 210}, {203, -1}, {348, -1}},
    {"zbh1", 4, 1, 12, 4, 4, {30, 30}, NOT_PUBLISHED, NOT_PUBLISHED},
    {"zbh1", 8, 1, 24, 8, 8, {70, 70}, {105, -1}, {98, -1}},
    {"zbh2", 4, 1, 12, 7, 7, {30, 0}, NOT_PUBLISHED, NOT_PUBLISHED},
    {"zbh2", 8, 1, 24, 15, 15, {70, 0}, {70, 56}, {77, 14}},
    {"interleaved-zb", 4, 2, 12, 8, 4, {30, 30}, NOT_PUBLISHED, NOT_PUBLISHED},
    {"interleaved-zb", 8, 2, 24, 16, 8, {70, 70}, {105, -1}, {142, -1}},
    {"zbv", 4, 2, 12, 8, 7, {30, 0}, NOT_PUBLISHED, NOT_PUBLISHED},
    {"zbv", 8, 2, 24, 16, 15, {70, 0}, {84, 70}, {136, 80}},
    {"v-half", 4, 2, 12, 6, 4, {50, 50}, NOT_PUBLISHED, NOT_PUBLISHED},
    {"v-half", 8, 2, 24, 10, 4, {170, 170}, {239, -1}, {266, -1}},
    {"v-min", 4, 2, 12, 4, 2, {110, 110}, NOT_PUBLISHED, NOT_PUBLISHED},
    {"v-min", 8, 2, 24, 8, 2, {270, 270}, {617, -1}, {562, -1}},
    {"1f1b-v", 4, 2, 12, 6, 0, {150, 150}, NOT_PUBLISHED, NOT_PUBLISHED},
    {"1f1b-v", 8, 2, 24, 12, 0, {330, 330}, {348, -1}, {530, -1}},
    {"dualpipe", 4, 1, 12, 5, 2, {20, 20}, NOT_PUBLISHED, NOT_PUBLISHED},
    {"dualpipe", 8, 1, 24, 9, 4, {60, 60}, {75, -1}, {90, -1}},
    {"dualpipev", 4, 2, 12, 9, 4, {60, 60}, NOT_PUBLISHED, NOT_PUBLISHED},
    {"dualpipev", 8, 2, 24, 17, 8, {140, 140}, {179, -1}, {266, -1}},
    /* (P-1)(F+I+W)/V by the definition of the order */
    {"looped-bfs", 4, 2, 12, 24, 0, {90, 90}, NOT_PUBLISHED, NOT_PUBLISHED},
    {"looped-bfs", 8, 3, 24, 72, 0, {210, 210}, {203, 203}, NOT_PUBLISHED},
};

static void assert_bubbles(const qe_schedule *schedule, times t, bubbles expected) {
    figures found = simulate(schedule, t);
    if (expected.makespan >= 0) assert_int_equal(found.makespan_bubble, expected.makespan);
    if (expected.stage >= 0) assert_int_equal(found.stage_bubble, expected.stage);
}

static void assert_golden(const golden *row) {
    qe_schedule schedule = generated(row->name, row->ranks, row->chunks, row->microbatches);
    figures even = simulate(&schedule, (times){10, 10, 10, 0});
    assert_int_equal(even.peak_live, row->peak);
    assert_int_equal(even.peak_weight, row->weight);
    assert_bubbles(&schedule, (times){10, 10, 10, 0}, row->even);
    assert_bubbles(&schedule, (times){10, 12, 7, 0}, row->uneven);
    assert_bubbles(&schedule, (times){10, 10, 10, row->chunks}, row->hops);
    qe_schedule_deinit(&schedule);
}

static void bubbles_and_peaks_are_the_published_ones(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof GOLDEN / sizeof GOLDEN[0]; i++) {
        print_message("%s P%u V%u M%u\n", GOLDEN[i].name, GOLDEN[i].ranks, GOLDEN[i].chunks, GOLDEN[i].microbatches);
        assert_golden(&GOLDEN[i]);
    }
}

static void peaks_per_rank_follow_the_formulas_and_not_the_microbatches(void **state) {
    (void)state;
    for (uint32_t microbatches = 8; microbatches <= 64; microbatches *= 2) {
        qe_schedule_peak peak[8];
        qe_schedule schedule = generated("1f1b", 8, 1, microbatches);
        qe_schedule_peaks(&schedule, peak);
        for (uint32_t r = 0; r < 8; r++) {
            assert_int_equal(peak[r].activation, 8 - r);
            assert_int_equal(peak[r].live, 8 - r);
            assert_int_equal(peak[r].weight, 0);
        }
        qe_schedule_deinit(&schedule);
        schedule = generated("zbh1", 8, 1, microbatches);
        qe_schedule_peaks(&schedule, peak);
        for (uint32_t r = 0; r < 8; r++) {
            assert_int_equal(peak[r].activation, 8 - r);
            assert_int_equal(peak[r].weight, r + 1);
            assert_int_equal(peak[r].live, 8);
        }
        qe_schedule_deinit(&schedule);
    }
}

static void postponed_weight_gradients_per_rank_follow_the_formulas(void **state) {
    (void)state;
    for (uint32_t microbatches = 16; microbatches <= 64; microbatches *= 2) {
        qe_schedule_peak peak[8];
        qe_schedule schedule = generated("zbh2", 8, 1, microbatches);
        qe_schedule_peaks(&schedule, peak);
        for (uint32_t r = 0; r < 8; r++) {
            assert_int_equal(peak[r].activation, 2 * (8 - r) - 1);
            assert_int_equal(peak[r].weight, 2 * r + 1);
            assert_int_equal(peak[r].live, 15);
        }
        qe_schedule_deinit(&schedule);
        schedule = generated("interleaved-zb", 8, 2, microbatches);
        qe_schedule_peaks(&schedule, peak);
        for (uint32_t r = 0; r < 8; r++) assert_int_equal(peak[r].weight, r + 1);
        for (uint32_t r = 0; r < 8; r++) assert_int_equal(peak[r].live, 16);
        qe_schedule_deinit(&schedule);
        schedule = generated("zbv", 8, 2, microbatches);
        qe_schedule_peaks(&schedule, peak);
        for (uint32_t r = 0; r < 8; r++) assert_int_equal(peak[r].weight, 2 * r + 1);
        for (uint32_t r = 0; r < 8; r++) assert_int_equal(peak[r].live, 16);
        qe_schedule_deinit(&schedule);
    }
}

/* The paper's promise: half and a third of what 1f1b keeps, whatever the number of microbatches. */
static void v_half_and_v_min_keep_half_and_a_third(void **state) {
    (void)state;
    for (uint32_t ranks = 4; ranks <= 32; ranks += 2) {
        for (uint32_t microbatches = 3 * ranks; microbatches <= 12 * ranks; microbatches *= 2) {
            qe_schedule_peak peak[32];
            qe_schedule schedule = generated("v-half", ranks, 2, microbatches);
            qe_schedule_peaks(&schedule, peak);
            uint32_t most = 0, pending = 0;
            for (uint32_t r = 0; r < ranks; r++) most = peak[r].live > most ? peak[r].live : most;
            for (uint32_t r = 0; r < ranks; r++) pending = peak[r].weight > pending ? peak[r].weight : pending;
            assert_int_equal((most + 1) / 2, (ranks + 2) / 2);
            assert_in_range(pending, 1, 4);
            qe_schedule_deinit(&schedule);
            schedule = generated("v-min", ranks, 2, microbatches);
            qe_schedule_peaks(&schedule, peak);
            most = pending = 0;
            for (uint32_t r = 0; r < ranks; r++) most = peak[r].live > most ? peak[r].live : most;
            for (uint32_t r = 0; r < ranks; r++) pending = peak[r].weight > pending ? peak[r].weight : pending;
            assert_int_equal((most + 1) / 2, (ranks + 4) / 3);
            assert_in_range(pending, 1, 2);
            qe_schedule_deinit(&schedule);
        }
    }
}

static void every_name_is_in_the_text_of_names(void **state) {
    (void)state;
    char text[256] = "";
    size_t length = 0;
    for (uint32_t i = 0; qe_schedule_name(i) != NULL; i++) {
        const char *between = i == 0 ? "" : qe_schedule_name(i + 1) == NULL ? " or " : ", ";
        length += (size_t)snprintf(text + length, sizeof text - length, "%s%s", between, qe_schedule_name(i));
        assert_true(length < sizeof text);
    }
    assert_string_equal(text, QE_SCHEDULE_NAMES);
}

static void the_usual_number_of_chunks_is_one_that_the_order_takes(void **state) {
    (void)state;
    for (uint32_t i = 0; qe_schedule_name(i) != NULL; i++) {
        qe_schedule schedule = generated(qe_schedule_name(i), 4, qe_schedule_usual_chunks(qe_schedule_name(i)), 8);
        qe_schedule_deinit(&schedule);
    }
    assert_int_equal(qe_schedule_usual_chunks("zbv"), 2);
    assert_int_equal(qe_schedule_usual_chunks("zbh2"), 1);
    assert_int_equal(qe_schedule_usual_chunks("orders.csv"), 1);
}

static void interleaved_peaks_follow_the_formula(void **state) {
    (void)state;
    qe_schedule_peak peak[8];
    qe_schedule schedule = generated("interleaved", 8, 2, 24);
    qe_schedule_peaks(&schedule, peak);
    for (uint32_t r = 0; r < 8; r++) assert_int_equal(peak[r].live, 2 * (7 - r) + 8 + 1);
    qe_schedule_deinit(&schedule);
}

static void an_evaluation_keeps_one_microbatch_at_a_time(void **state) {
    (void)state;
    qe_schedule_request request = {.name = "gpipe", .ranks = 2, .chunks = 1, .microbatches = 5, .forward_only = 1};
    qe_schedule schedule;
    qe_schedule_peak peak[2];
    assert_int_equal(qe_schedule_generate(&request, &schedule, NULL), QE_OK);
    qe_schedule_peaks(&schedule, peak);
    assert_int_equal(peak[0].live, 1);
    assert_int_equal(peak[1].weight, 0);
    qe_schedule_deinit(&schedule);
}

/* Every order with sizes that fit can run: the checker says so for all small sizes and for odd large ones. */
static void every_generated_schedule_is_certified(void **state) {
    (void)state;
    uint32_t tried = 0;
    for (uint32_t name = 0; qe_schedule_name(name) != NULL; name++) {
        for (uint32_t size = 0; size < 8 * 4 * 24 * 2; size++) {
            qe_schedule_request request = {.name = qe_schedule_name(name), .ranks = size % 8 + 1,
                                           .chunks = size / 8 % 4 + 1, .microbatches = size / 32 % 24 + 1,
                                           .forward_only = (int)(size / 768)};
            qe_schedule schedule;
            qe_counterexample counterexample = {0};
            if (qe_schedule_generate(&request, &schedule, NULL) != QE_OK) continue;
            qe_error error = {0};
            if (qe_schedule_check(&schedule, &counterexample, &error) != QE_OK) {
                fail_msg("%s P%u V%u M%u: %s", request.name, request.ranks, request.chunks, request.microbatches,
                         error.message);
            }
            qe_schedule_deinit(&schedule);
            tried++;
        }
    }
    print_message("%u generated schedules certified\n", tried);
    assert_true(tried > 2500);
}

typedef struct refusal {
    qe_schedule_request request;
    qe_status status;
    const char *message, *remedy; /* parts of the text */
} refusal;

static const refusal REFUSALS[] = {
    {{"zbh9", 2, 1, 4, 0}, QE_ERROR_ARGUMENT, "no schedule is named \"zbh9\"", "did you mean zbh1? use gpipe"},
    {{NULL, 2, 1, 4, 0}, QE_ERROR_ARGUMENT, "no schedule is named", "1f1b"},
    {{"1f1b", 0, 1, 4, 0}, QE_ERROR_ARGUMENT, "ranks is 0", ""},
    {{"1f1b", 4097, 1, 4, 0}, QE_ERROR_LIMIT, "ranks is 4097; expected 1 to 4096", ""},
    {{"v-half", 65, 2, 200, 0}, QE_ERROR_ARGUMENT, "ranks is 65; v-half takes 1 to 64", "use fewer ranks, or zbv"},
    {{"looped-bfs", 65, 64, 4, 0}, QE_ERROR_LIMIT, "ranks times chunks is 4160; expected 1 to 4096", ""},
    {{"1f1b", 2, 0, 4, 0}, QE_ERROR_ARGUMENT, "chunks is 0", ""},
    {{"sequential", 1, 65, 4, 0}, QE_ERROR_LIMIT, "chunks is 65", ""},
    {{"1f1b", 2, 1, 0, 0}, QE_ERROR_ARGUMENT, "microbatches is 0", ""},
    {{"1f1b", 2, 1, 65537, 0}, QE_ERROR_LIMIT, "microbatches is 65537", ""},
    {{"1f1b", 2, 2, 4, 0}, QE_ERROR_ARGUMENT, "is 2; 1f1b needs exactly 1", "use 1, or interleaved for 2"},
    {{"gpipe", 2, 3, 4, 0}, QE_ERROR_ARGUMENT, "is 3; gpipe needs exactly 1", "use 1, or looped-bfs for 3"},
    {{"zbh1", 2, 2, 4, 0}, QE_ERROR_ARGUMENT, "is 2; zbh1 needs exactly 1", "use 1, or interleaved-zb for 2"},
    {{"zbh2", 2, 2, 4, 0}, QE_ERROR_ARGUMENT, "is 2; zbh2 needs exactly 1", "use 1, or interleaved-zb for 2"},
    {{"interleaved", 2, 1, 4, 0}, QE_ERROR_ARGUMENT, "is 1; interleaved needs at least 2", "use 2, or 1f1b for 1"},
    {{"interleaved-zb", 2, 1, 4, 0}, QE_ERROR_ARGUMENT, "interleaved-zb needs at least 2", "use 2, or zbh1 for 1"},
    {{"zbv", 2, 1, 4, 0}, QE_ERROR_ARGUMENT, "is 1; zbv needs exactly 2", "use 2, or zbh1 for 1"},
    {{"zbv", 2, 3, 4, 0}, QE_ERROR_ARGUMENT, "is 3; zbv needs exactly 2", "use 2, or interleaved-zb for 3"},
    {{"1f1b-v", 2, 1, 4, 0}, QE_ERROR_ARGUMENT, "is 1; 1f1b-v needs exactly 2", "use 2, or 1f1b for 1"},
    {{"v-half", 2, 1, 4, 0}, QE_ERROR_ARGUMENT, "is 1; v-half needs exactly 2", "use 2, or zbh1 for 1"},
    {{"v-min", 2, 3, 4, 0}, QE_ERROR_ARGUMENT, "is 3; v-min needs exactly 2", "use 2, or interleaved-zb for 3"},
    {{"dualpipe", 3, 1, 8, 0}, QE_ERROR_ARGUMENT, "dualpipe needs an even number of ranks, found 3", "dualpipev"},
    {{"dualpipe", 4, 1, 9, 0}, QE_ERROR_ARGUMENT, "dualpipe needs an even number of microbatches, found 9", "one"},
    {{"dualpipe", 4, 1, 6, 0}, QE_ERROR_ARGUMENT, "dualpipe needs at least twice as many microbatches as ranks (8)",
     "fits is 8"},
    {{"dualpipe", 4, 2, 8, 0}, QE_ERROR_ARGUMENT, "is 2; dualpipe needs exactly 1", "use 1, or dualpipev for 2"},
    {{"dualpipe", 4, 3, 8, 0}, QE_ERROR_ARGUMENT, "is 3; dualpipe needs exactly 1", "or interleaved-zb for 3"},
    {{"dualpipev", 4, 1, 8, 0}, QE_ERROR_ARGUMENT, "is 1; dualpipev needs exactly 2", "use 2, or zbh1 for 1"},
    {{"dualpipev", 4, 2, 7, 0}, QE_ERROR_ARGUMENT, "twice as many microbatches as ranks (8), found 7", "fits is 8"},
    {{"interleaved-zb", 4, 2, 3, 0}, QE_ERROR_ARGUMENT, "as many microbatches as ranks (4), found 3", "fits is 4"},
    {{"interleaved-zb", 4, 2, 9, 0}, QE_ERROR_ARGUMENT, "and 9 microbatches are not divisible by 2", "fits is 10"},
    {{"zbh1", 4, 1, 3, 0}, QE_ERROR_ARGUMENT, "zbh1 needs at least as many microbatches as ranks (4), found 3", "is 4"},
    {{"interleaved", 4, 2, 3, 0}, QE_ERROR_ARGUMENT, "as many microbatches as ranks (4), found 3", "fits is 4"},
    {{"interleaved", 4, 2, 9, 0}, QE_ERROR_ARGUMENT, "and 9 microbatches are not divisible by 2", "fits is 10"},
    {{"interleaved", 4, 2, 13, 0}, QE_ERROR_ARGUMENT, "and 13 microbatches are not divisible by 3", "fits is 12"},
    {{"interleaved", 63, 2, 65536, 0}, QE_ERROR_ARGUMENT, "65536 microbatches are not divisible", "fits is 65520"},
    {{"sequential", 64, 64, 65536, 0}, QE_ERROR_LIMIT, "536870912 actions; at most 33554432", "fewer"},
};

static void what_an_order_cannot_do_is_refused_with_the_reason_and_the_way_out(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof REFUSALS / sizeof REFUSALS[0]; i++) {
        qe_schedule schedule = {.ranks = 77};
        qe_error error = {0};
        assert_int_equal(qe_schedule_generate(&REFUSALS[i].request, &schedule, &error), REFUSALS[i].status);
        if (strstr(error.message, REFUSALS[i].message) == NULL) fail_msg("%zu: %s", i, error.message);
        if (strstr(error.remedy, REFUSALS[i].remedy) == NULL) fail_msg("%zu: %s", i, error.remedy);
        assert_int_equal(schedule.ranks, 77);
        assert_null(schedule.actions);
        assert_int_equal(qe_schedule_generate(&REFUSALS[i].request, &schedule, NULL), REFUSALS[i].status);
    }
}

static void microbatches_fewer_than_the_schedule_needs_are_refused_with_the_number_that_fits(void **state) {
    (void)state;
    for (uint32_t microbatches = 1; microbatches < 6; microbatches++) {
        qe_schedule_request request = {.name = "interleaved", .ranks = 6, .chunks = 2, .microbatches = microbatches};
        qe_schedule schedule;
        qe_error error = {0};
        assert_int_equal(qe_schedule_generate(&request, &schedule, &error), QE_ERROR_ARGUMENT);
        assert_non_null(strstr(error.message, "at least as many microbatches as ranks (6)"));
        assert_string_equal(error.remedy, "the nearest number of microbatches that fits is 6, or use 1f1b");
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_of_the_published_examples_are_reproduced),
        cmocka_unit_test(rows_of_zbh2_are_the_published_ones),
        cmocka_unit_test(rows_are_those_of_pytorch),
        cmocka_unit_test(rows_of_1f1b_v_are_those_of_the_papers_code),
        cmocka_unit_test(rows_of_v_half_and_v_min_are_those_of_the_papers_code),
        cmocka_unit_test(all_small_sizes_of_v_half_and_v_min_are_those_of_the_papers_code),
        cmocka_unit_test(rows_of_dualpipe_and_dualpipev_are_those_of_deepseeks_code),
        cmocka_unit_test(the_second_chunk_of_a_v_runs_back_over_the_ranks),
        cmocka_unit_test(sequential_takes_one_microbatch_through_all_stages_and_back),
        cmocka_unit_test(evaluation_keeps_only_the_forwards_in_the_same_order),
        cmocka_unit_test(warmup_is_cut_where_a_step_has_fewer_microbatches_than_ranks),
        cmocka_unit_test(bubbles_and_peaks_are_the_published_ones),
        cmocka_unit_test(peaks_per_rank_follow_the_formulas_and_not_the_microbatches),
        cmocka_unit_test(postponed_weight_gradients_per_rank_follow_the_formulas),
        cmocka_unit_test(v_half_and_v_min_keep_half_and_a_third),
        cmocka_unit_test(every_name_is_in_the_text_of_names),
        cmocka_unit_test(the_usual_number_of_chunks_is_one_that_the_order_takes),
        cmocka_unit_test(interleaved_peaks_follow_the_formula),
        cmocka_unit_test(an_evaluation_keeps_one_microbatch_at_a_time),
        cmocka_unit_test(every_generated_schedule_is_certified),
        cmocka_unit_test(what_an_order_cannot_do_is_refused_with_the_reason_and_the_way_out),
        cmocka_unit_test(microbatches_fewer_than_the_schedule_needs_are_refused_with_the_number_that_fits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
