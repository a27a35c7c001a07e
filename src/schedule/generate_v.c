/* generate_v.c - 1f1b-v (Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362). One microbatch
 * takes six slots of a rank: F and a two slot long B on both of its stages. The pattern of a microbatch is repeated
 * every six slots; then, without keeping more than that pattern does, everything moves to the earliest gap. */
#include "schedule/generate.h"

#include <stdlib.h>

#include "base/assert.h"

/* What a slot does; a B is an I and, in the next free slot, its W. F1 and I1 are of the stage on the way back. */
typedef enum slot_kind { F0, F1, I1, I0, W1, W0, KINDS, EMPTY = KINDS } slot_kind;

enum { PERIOD = 6, HALF_PERIOD = 3 };

/* `slot`, `held`: [ranks][length]; `held` is what a rank keeps behind the slot. `end`: [ranks][KINDS][microbatches],
 * one behind the slot of an action that has its final place, else 0. */
typedef struct grid {
    uint32_t ranks, microbatches, length;
    uint8_t *slot;
    uint32_t *held, *end;
    uint32_t peak, placed[QE_RANKS_MAX][KINDS];
} grid;

static uint32_t *end_of(const grid *g, uint32_t rank, slot_kind kind, uint32_t microbatch) {
    return &g->end[((size_t)rank * KINDS + kind) * g->microbatches + microbatch];
}

static void free_grid(grid *g) {
    free(g->slot);
    free(g->held);
    free(g->end);
}

/* Slot 0 of each kind of action on each rank within the period. */
static void fill_pattern(uint32_t ranks, uint8_t pattern[QE_RANKS_MAX][KINDS]) {
    uint32_t now = 0, in_period = (HALF_PERIOD - (ranks + 2) % HALF_PERIOD) % HALF_PERIOD;
    for (uint32_t i = 0; i < ranks; i++) pattern[i][F0] = (uint8_t)(++now % PERIOD);
    for (uint32_t i = ranks; i-- > 0;) pattern[i][F1] = (uint8_t)(++now % PERIOD);
    now += ranks % HALF_PERIOD == 0 ? 1 + HALF_PERIOD : 1;
    for (uint32_t i = 0; i < 2 * ranks; i++) {
        uint32_t down = i < ranks, rank = down ? i : 2 * ranks - 1 - i;
        pattern[rank][down ? I1 : I0] = (uint8_t)(now % PERIOD);
        pattern[rank][down ? W1 : W0] = (uint8_t)((now + 1) % PERIOD);
        now += 2;
        if (++in_period < HALF_PERIOD) continue;
        in_period = 0; /* the other half of the period is for F */
        now += HALF_PERIOD;
    }
}

/* All microbatches of one kind, from the first slot at or behind `from` where the pattern has it. */
static uint32_t repeat(grid *g, uint32_t rank, slot_kind kind, uint32_t from, uint8_t phase) {
    uint32_t first = from + (phase + PERIOD - from % PERIOD) % PERIOD;
    for (uint32_t microbatch = 0; microbatch < g->microbatches; microbatch++) {
        uint32_t at = first + PERIOD * microbatch;
        QE_ASSERT(at < g->length);
        g->slot[(size_t)rank * g->length + at] = (uint8_t)kind;
    }
    return first + 1;
}

static void fill_slots(grid *g) {
    static const slot_kind way[4] = {F0, F1, I1, I0};
    uint8_t pattern[QE_RANKS_MAX][KINDS];
    fill_pattern(g->ranks, pattern);
    for (size_t i = 0; i < (size_t)g->ranks * g->length; i++) g->slot[i] = EMPTY;
    uint32_t next = PERIOD;
    for (uint32_t pass = 0; pass < 4; pass++) {
        for (uint32_t i = 0; i < g->ranks; i++) {
            uint32_t rank = pass % 2 == 0 ? i : g->ranks - 1 - i;
            next = repeat(g, rank, way[pass], next, pattern[rank][way[pass]]);
            if (way[pass] == I1) (void)repeat(g, rank, W1, next, pattern[rank][W1]);
            if (way[pass] == I0) (void)repeat(g, rank, W0, next, pattern[rank][W0]);
        }
    }
}

static void fill_held(grid *g) {
    for (uint32_t rank = 0; rank < g->ranks; rank++) {
        uint32_t now = 0;
        for (uint32_t at = 0; at < g->length; at++) {
            uint8_t kind = g->slot[(size_t)rank * g->length + at];
            if (kind == F0 || kind == F1) now++;
            if (kind == W1 || kind == W0) now--;
            g->held[(size_t)rank * g->length + at] = now;
            if (now > g->peak) g->peak = now;
        }
    }
}

/* End of the action of another stage or kind that this one needs; 0 where it needs none. */
static uint32_t needed_end(const grid *g, uint32_t rank, slot_kind kind, uint32_t microbatch) {
    int first = rank == 0, last = rank == g->ranks - 1;
    switch (kind) {
        case F0: return first ? 0 : *end_of(g, rank - 1, F0, microbatch);
        case F1: return last ? *end_of(g, rank, F0, microbatch) : *end_of(g, rank + 1, F1, microbatch);
        case I1: return first ? *end_of(g, rank, F1, microbatch) : *end_of(g, rank - 1, W1, microbatch);
        case I0: return last ? *end_of(g, rank, W1, microbatch) : *end_of(g, rank + 1, W0, microbatch);
        case W1: return *end_of(g, rank, I1, microbatch);
        default: return *end_of(g, rank, I0, microbatch);
    }
}

/* The earliest gap from `from` on for what stands in slot `at`; `at` itself where there is none. */
static uint32_t find_gap(const uint8_t *slot, uint32_t from, uint32_t at, int two) {
    while (from < at && (slot[from] != EMPTY || (two && slot[from + 1] != EMPTY))) from++;
    return from;
}

/* As find_gap for an F, which must not be kept where the rank is at its peak already. */
static uint32_t find_forward_gap(const grid *g, uint32_t rank, uint32_t from, uint32_t at) {
    const uint32_t *held = g->held + (size_t)rank * g->length;
    uint32_t place = at;
    while (place > from && held[place - 1] < g->peak) place--;
    return find_gap(g->slot + (size_t)rank * g->length, place, at, 0);
}

static void advance_slot(grid *g, uint32_t rank, uint32_t at) {
    uint8_t *slot = g->slot + (size_t)rank * g->length;
    slot_kind kind = (slot_kind)slot[at];
    if (kind == EMPTY) return;
    uint32_t microbatch = g->placed[rank][kind]++, from = needed_end(g, rank, kind, microbatch);
    if (microbatch > 0 && *end_of(g, rank, kind, microbatch - 1) > from) from = *end_of(g, rank, kind, microbatch - 1);
    uint32_t place = find_gap(slot, from, at, kind == I1 || kind == I0);
    if (kind == F0 || kind == F1) place = find_forward_gap(g, rank, place, at);
    slot[at] = EMPTY;
    slot[place] = (uint8_t)kind;
    for (uint32_t i = place; i < at; i++) {
        if (kind == F0 || kind == F1) g->held[(size_t)rank * g->length + i]++;
        if (kind == W1 || kind == W0) g->held[(size_t)rank * g->length + i]--;
    }
    *end_of(g, rank, kind, microbatch) = place + 1;
}

static void write_actions(const grid *g, int forward_only, qe_action *next) {
    static const uint8_t kinds[KINDS] = {QE_ACTION_F, QE_ACTION_F, QE_ACTION_B, QE_ACTION_B, QE_ACTION_W, QE_ACTION_W};
    for (uint32_t rank = 0; rank < g->ranks; rank++) {
        uint32_t microbatch[KINDS] = {0};
        for (uint32_t at = 0; at < g->length; at++) {
            uint8_t kind = g->slot[(size_t)rank * g->length + at];
            if (kind >= W1 || (forward_only && kinds[kind] != QE_ACTION_F)) continue; /* an empty slot, or B did it */
            uint32_t stage = kind == F0 || kind == I0 ? rank : 2 * g->ranks - 1 - rank;
            *next++ = (qe_action){.microbatch = microbatch[kind]++, .stage = (uint16_t)stage, .kind = kinds[kind]};
        }
    }
}

qe_status qe_rows_1f1b_v(const qe_schedule_request *request, qe_action *actions, qe_error *error_out) {
    grid g = {.ranks = request->ranks, .microbatches = request->microbatches};
    g.length = PERIOD * (4 * g.ranks + g.microbatches + 1);
    g.slot = malloc((size_t)g.ranks * g.length);
    g.held = malloc((size_t)g.ranks * g.length * sizeof *g.held);
    g.end = calloc((size_t)g.ranks * KINDS * g.microbatches, sizeof *g.end);
    if (g.slot == NULL || g.held == NULL || g.end == NULL) {
        free_grid(&g);
        return qe_error_set(error_out, QE_ERROR_MEMORY, "use fewer microbatches, or free memory",
                            "no memory to arrange 1f1b-v");
    }
    fill_slots(&g);
    fill_held(&g);
    for (uint32_t at = 0; at < g.length; at++) {
        for (uint32_t rank = 0; rank < g.ranks; rank++) advance_slot(&g, rank, at);
    }
    write_actions(&g, request->forward_only, actions);
    free_grid(&g);
    return QE_OK;
}
