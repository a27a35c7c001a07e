/* generate_dualpipe.c - DualPipe and DualPipeV, as DeepSeek's own code orders them (github.com/deepseek-ai/DualPipe),
 * and PyTorch's ScheduleDualPipeV the latter. Two streams of microbatches meet on every rank, and the F of one runs
 * overlapped with the B of the other. In DualPipe they enter the pipeline at its two ends; in DualPipeV the second is
 * the first on its way back, so the same eight steps fill both. */
#include "schedule/generate.h"

#include "base/assert.h"

/* One stream on a rank: `first` is added to its own numbers of microbatches. */
typedef struct lane {
    uint32_t stage, first, next[QE_ACTION_KINDS];
} lane;

/* `depth`: how far the rank is from the end where lane 0 enters, of `reach` ranks. Microbatches of a lane: `count`.
 * `postponed`: how many W were put of those that are told apart from their I. */
typedef struct way {
    qe_row *to;
    uint32_t depth, reach, count, postponed;
    lane lane[2];
} way;

static void put_one(way *w, uint32_t which, qe_action_kind kind, uint32_t microbatch, int paired) {
    QE_ASSERT(microbatch < w->count);
    *w->to->next++ = (qe_action){.microbatch = w->lane[which].first + microbatch,
                                 .stage = (uint16_t)w->lane[which].stage,
                                 .kind = (uint8_t)kind,
                                 .paired = paired != 0};
}

static void put(way *w, uint32_t which, qe_action_kind kind) {
    uint32_t microbatch = w->lane[which].next[kind]++;
    if (kind == QE_ACTION_F || !w->to->request->forward_only) put_one(w, which, kind, microbatch, 0);
}

/* B counts where I does: a lane's backwards are one sequence, whole or not. */
static void put_backward(way *w, uint32_t which, int whole) {
    uint32_t microbatch = w->lane[which].next[QE_ACTION_I]++;
    if (w->to->request->forward_only) return;
    put_one(w, which, whole ? QE_ACTION_B : QE_ACTION_I, microbatch, 0);
}

static void put_pair(way *w, uint32_t forward, int together) {
    put(w, forward, QE_ACTION_F);
    if (together && !w->to->request->forward_only) w->to->next[-1].paired = 1;
    put_backward(w, 1 - forward, 1);
}

/* W that wait for a later step wait in one queue for both lanes; step_6 fills it by turns. */
static void put_weight(way *w) {
    uint32_t turn = w->postponed++, by_turns = w->depth + 1;
    uint32_t which = turn < by_turns ? (turn + w->depth) % 2 : 0;
    uint32_t later = w->lane[which].next[QE_ACTION_W]++;
    if (!w->to->request->forward_only) put_one(w, which, QE_ACTION_W, later, 0);
}

/* Steps 1 to 3: fill the pipeline, and begin backward on the way back as soon as it is there. */
static void put_warmup(way *w) {
    uint32_t ahead = w->reach - 1 - w->depth;
    for (uint32_t i = 0; i < 2 * ahead; i++) put(w, 0, QE_ACTION_F);
    for (uint32_t i = 0; i <= w->depth; i++) {
        put(w, 0, QE_ACTION_F);
        put(w, 1, QE_ACTION_F);
    }
    for (uint32_t i = 0; i < ahead; i++) {
        put_backward(w, 1, 0);
        if (!w->to->request->forward_only) put_one(w, 1, QE_ACTION_W, i, 0);
        put(w, 1, QE_ACTION_F);
    }
}

/* Steps 4 and 5. Where the streams meet, the first pair is not overlapped: its F need not wait for what its B needs. */
static void put_steady(way *w) {
    uint32_t ahead = w->reach - 1 - w->depth, pairs = w->count - 2 * w->reach + w->depth + 1;
    for (uint32_t i = 0; i < pairs; i++) {
        put_pair(w, 0, i > 0 || ahead > 0);
        put_pair(w, 1, 1);
    }
    for (uint32_t i = 0; i < ahead; i++) {
        put_backward(w, 1, 1);
        put_pair(w, 1, 1);
    }
}

/* A backward of step 6: whole, or with its W put off. */
static void put_last_backward(way *w, uint32_t which, int whole) {
    if (whole) w->lane[which].next[QE_ACTION_W] = w->lane[which].next[QE_ACTION_I] + 1;
    put_backward(w, which, whole);
}

/* Steps 6 to 8: half-way through the last backwards, W begin to wait, and fill the gaps behind. */
static void put_drain(way *w) {
    uint32_t ahead = w->reach - 1 - w->depth, half = (w->depth + 1) / 2, odd = w->depth % 2;
    for (uint32_t which = 0; which < 2; which++) w->lane[which].next[QE_ACTION_W] = w->lane[which].next[QE_ACTION_I];
    for (uint32_t i = 0; i <= w->depth; i++) {
        put_last_backward(w, 1, i < half || (i == half && !odd));
        put_last_backward(w, 0, i < half);
    }
    for (uint32_t i = 0; i < ahead; i++) {
        put_weight(w);
        put_backward(w, 0, 0);
    }
    for (uint32_t i = 0; i <= w->depth; i++) put_weight(w);
}

static void put_way(way *w) {
    put_warmup(w);
    put_steady(w);
    put_drain(w);
    QE_ASSERT(w->lane[0].next[QE_ACTION_F] == w->count);
    QE_ASSERT(w->lane[1].next[QE_ACTION_I] == w->count);
}

void qe_row_dualpipev(qe_row *to) {
    way w = {.to = to, .depth = to->rank, .reach = to->request->ranks, .count = to->request->microbatches};
    for (uint32_t chunk = 0; chunk < 2; chunk++) w.lane[chunk].stage = qe_row_stage(to, chunk);
    put_way(&w);
}

/* The first half of the microbatches enters at rank 0, the second at the last rank, where it finds stage 0 again. Lane
 * 0 is the one that enters at the nearer end. */
void qe_row_dualpipe(qe_row *to) {
    uint32_t ranks = to->request->ranks, half = to->request->microbatches / 2, far = to->rank >= ranks / 2;
    way w = {.to = to, .depth = far ? ranks - 1 - to->rank : to->rank, .reach = ranks / 2, .count = half};
    w.lane[far] = (lane){.stage = to->rank, .first = 0};
    w.lane[!far] = (lane){.stage = ranks - 1 - to->rank, .first = half};
    put_way(&w);
}
