/* generate_v.c - 1f1b-v (Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362). One microbatch
 * takes six slots of a rank: F and a two slot long B on both of its stages. The pattern of a microbatch is repeated
 * every six slots; then, without keeping more than that pattern does, everything moves to the earliest gap. */
#include "schedule/generate.h"
#include "schedule/v_grid.h"

#include "base/assert.h"

enum { HALF_PERIOD = QE_V_PERIOD / 2 };

/* Slot 0 of each kind of action on each rank within the period. */
static void fill_pattern(uint32_t ranks, uint8_t pattern[QE_RANKS_MAX][QE_V_KINDS]) {
    uint32_t now = 0, in_period = (HALF_PERIOD - (ranks + 2) % HALF_PERIOD) % HALF_PERIOD;
    for (uint32_t i = 0; i < ranks; i++) pattern[i][F0] = (uint8_t)(++now % QE_V_PERIOD);
    for (uint32_t i = ranks; i-- > 0;) pattern[i][F1] = (uint8_t)(++now % QE_V_PERIOD);
    now += ranks % HALF_PERIOD == 0 ? 1 + HALF_PERIOD : 1;
    for (uint32_t i = 0; i < 2 * ranks; i++) {
        uint32_t down = i < ranks, rank = down ? i : 2 * ranks - 1 - i;
        pattern[rank][down ? I1 : I0] = (uint8_t)(now % QE_V_PERIOD);
        pattern[rank][down ? W1 : W0] = (uint8_t)((now + 1) % QE_V_PERIOD);
        now += 2;
        if (++in_period < HALF_PERIOD) continue;
        in_period = 0; /* the other half of the period is for F */
        now += HALF_PERIOD;
    }
}

/* All microbatches of one kind, from the first slot at or behind `from` where the pattern has it. */
static uint32_t repeat(qe_v_grid *g, uint32_t rank, qe_v_kind kind, uint32_t from, uint8_t phase) {
    uint32_t first = from + (phase + QE_V_PERIOD - from % QE_V_PERIOD) % QE_V_PERIOD;
    qe_v_grid_repeat(g, rank, kind, first);
    return first + 1;
}

static void fill_slots(qe_v_grid *g) {
    static const qe_v_kind way[4] = {F0, F1, I1, I0};
    uint8_t pattern[QE_RANKS_MAX][QE_V_KINDS];
    fill_pattern(g->ranks, pattern);
    uint32_t next = QE_V_PERIOD;
    for (uint32_t pass = 0; pass < 4; pass++) {
        for (uint32_t i = 0; i < g->ranks; i++) {
            uint32_t rank = pass % 2 == 0 ? i : g->ranks - 1 - i;
            next = repeat(g, rank, way[pass], next, pattern[rank][way[pass]]);
            if (way[pass] == I1) (void)repeat(g, rank, W1, next, pattern[rank][W1]);
            if (way[pass] == I0) (void)repeat(g, rank, W0, next, pattern[rank][W0]);
        }
    }
}

/* End of the action of another stage or kind that this one needs; 0 where it needs none. */
static uint32_t needed_end(const qe_v_grid *g, uint32_t rank, qe_v_kind kind, uint32_t microbatch) {
    int first = rank == 0, last = rank == g->ranks - 1;
    switch (kind) {
        case F0: return first ? 0 : *qe_v_grid_end(g, rank - 1, F0, microbatch);
        case F1: return last ? *qe_v_grid_end(g, rank, F0, microbatch) : *qe_v_grid_end(g, rank + 1, F1, microbatch);
        case I1: return first ? *qe_v_grid_end(g, rank, F1, microbatch) : *qe_v_grid_end(g, rank - 1, W1, microbatch);
        case I0: return last ? *qe_v_grid_end(g, rank, W1, microbatch) : *qe_v_grid_end(g, rank + 1, W0, microbatch);
        case W1: return *qe_v_grid_end(g, rank, I1, microbatch);
        default: return *qe_v_grid_end(g, rank, I0, microbatch);
    }
}

static void advance_slot(qe_v_grid *g, uint32_t rank, uint32_t at) {
    uint8_t *slot = qe_v_grid_slots(g, rank);
    qe_v_kind kind = (qe_v_kind)slot[at];
    if (kind == EMPTY) return;
    int forward = kind == F0 || kind == F1, weight = kind == W1 || kind == W0;
    uint32_t microbatch = qe_v_grid_take(g, rank, kind), from = needed_end(g, rank, kind, microbatch);
    uint32_t before = microbatch == 0 ? 0 : *qe_v_grid_end(g, rank, kind, microbatch - 1);
    uint32_t place = qe_v_grid_gap(g, rank, before > from ? before : from, at, kind == I1 || kind == I0);
    if (forward) place = qe_v_grid_forward_gap(g, rank, place, at);
    slot[at] = EMPTY;
    slot[place] = (uint8_t)kind;
    for (uint32_t i = place; i < at; i++) {
        if (forward) qe_v_grid_held(g, rank)[i]++;
        if (weight) qe_v_grid_held(g, rank)[i]--;
    }
    *qe_v_grid_end(g, rank, kind, microbatch) = place + 1;
}

qe_status qe_rows_1f1b_v(const qe_schedule_request *request, qe_action *actions, qe_error *error_out) {
    static const uint8_t kinds[QE_V_KINDS] = {QE_ACTION_F, QE_ACTION_F,     QE_ACTION_B,
                                              QE_ACTION_B, QE_ACTION_KINDS, QE_ACTION_KINDS}; /* B does the W */
    qe_v_grid g;
    QE_TRY(qe_v_grid_open(request, QE_V_PERIOD * (4 * request->ranks + request->microbatches + 1), &g, error_out));
    fill_slots(&g);
    qe_v_grid_hold(&g);
    for (uint32_t at = 0; at < g.length; at++) {
        for (uint32_t rank = 0; rank < g.ranks; rank++) advance_slot(&g, rank, at);
    }
    qe_v_grid_write(&g, kinds, request->forward_only, actions);
    qe_v_grid_close(&g);
    return QE_OK;
}
