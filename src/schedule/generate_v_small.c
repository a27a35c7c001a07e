/* generate_v_small.c - v-half and v-min (Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362):
 * the orders of the paper's own code. The F and I of one microbatch have fixed slots on every rank; the next
 * microbatch follows six slots later, and W fill the slots between. Then, without holding more than that pattern
 * does, everything before and behind the steady part moves to the earliest gap; once with the W in their places, once
 * for the end alone with the W wherever there is room. Times play no part in it: every action takes one slot. */
#include "schedule/generate.h"
#include "schedule/v_grid.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

/* Until the second part of the arrangement ends, W of both stages are of one kind: */
enum { W = W1 };

typedef enum part { START, STEADY, END } part;

/* `pending`: [ranks][length], I without their W behind the slot. `inputs`: [ranks][2 * microbatches], the slots of the
 * I that have their final places, ascending, as many as `input_count[rank]`. `weight_end`: one behind the last W. */
typedef struct small {
    qe_v_grid grid;
    part part;
    uint32_t *pending, *inputs, *input_count, *weight_end;
} small;

static int is_forward(uint8_t kind) { return kind == F0 || kind == F1; }
static int is_input(uint8_t kind) { return kind == I1 || kind == I0; }
static uint32_t later(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* The slots of microbatch 0 on a rank. */
typedef void first_slots(uint32_t ranks, uint32_t rank, uint32_t slot[static 4]);

static void first_slots_min(uint32_t ranks, uint32_t rank, uint32_t slot[static 4]) {
    uint32_t apart = ranks % 3 == 0 ? 2 : 0; /* else the I would meet the F of later microbatches */
    slot[F0] = rank;
    slot[F1] = 2 * ranks - rank - 1;
    slot[I1] = 2 * ranks + apart + rank;
    slot[I0] = 4 * ranks + apart - rank - 1;
}

static void first_slots_half(uint32_t ranks, uint32_t rank, uint32_t slot[static 4]) {
    uint32_t apart = ranks % 2 == 0 ? 3 : 0; /* as above */
    slot[F0] = 2 * rank;
    slot[F1] = 3 * ranks - rank - 2;
    slot[I1] = 3 * ranks + apart + 2 * rank - 1;
    slot[I0] = 6 * ranks + apart - rank - 2;
}

static void fill_pattern(qe_v_grid *g, first_slots *first) {
    for (uint32_t rank = 0; rank < g->ranks; rank++) {
        uint32_t slot[4];
        first(g->ranks, rank, slot);
        for (uint32_t kind = F0; kind <= I0; kind++) qe_v_grid_repeat(g, rank, (qe_v_kind)kind, slot[kind]);
    }
}

/* W into every slot left over. With `split` they are told apart, and the stage on the way back comes first. */
static void put_weights(qe_v_grid *g, int split) {
    for (uint32_t rank = 0; rank < g->ranks; rank++) {
        uint8_t *slot = qe_v_grid_slots(g, rank);
        uint32_t back = 0, forth = 0;
        for (uint32_t at = 0; at < g->length; at++) {
            if (slot[at] == I0 && split) forth++;
            else if (is_input(slot[at])) back++;
            if (slot[at] != EMPTY || back + forth == 0) continue;
            slot[at] = back > 0 ? W1 : W0;
            if (back > 0) back--;
            else forth--;
        }
        QE_ASSERT(back + forth == 0);
    }
}

static void drop_weights(qe_v_grid *g) {
    for (size_t i = 0; i < (size_t)g->ranks * g->length; i++) {
        if (g->slot[i] == W) g->slot[i] = EMPTY;
    }
}

/* End of what F or I needs: the same of the neighbour, what comes before it on its own rank, and its predecessor. */
static uint32_t needed_end(const qe_v_grid *g, uint32_t rank, qe_v_kind kind, uint32_t microbatch) {
    uint32_t end = microbatch == 0 ? 0 : *qe_v_grid_end(g, rank, kind, microbatch - 1);
    int down = kind == F0 || kind == I1;
    if (down && rank > 0) end = later(end, *qe_v_grid_end(g, rank - 1, kind, microbatch));
    if (!down && rank + 1 < g->ranks) end = later(end, *qe_v_grid_end(g, rank + 1, kind, microbatch));
    return kind == F0 ? end : later(end, *qe_v_grid_end(g, rank, (qe_v_kind)(kind - 1), microbatch));
}

static void forget_places(qe_v_grid *g) {
    memset(g->placed, 0, (size_t)g->ranks * QE_V_KINDS * sizeof *g->placed);
}

/* Everything as early as the order of the slots lets it be. It never moves behind what it stands before, so the slots
 * are changed in place. */
static void squeeze(small *s) {
    qe_v_grid *g = &s->grid;
    uint32_t *rank_end = s->weight_end;
    memset(rank_end, 0, g->ranks * sizeof *rank_end);
    forget_places(g);
    for (uint32_t at = 0; at < g->length; at++) {
        for (uint32_t rank = 0; rank < g->ranks; rank++) {
            uint8_t *slot = qe_v_grid_slots(g, rank), kind = slot[at];
            if (kind == EMPTY) continue;
            uint32_t place = rank_end[rank], microbatch = qe_v_grid_take(g, rank, kind);
            if (kind != W) place = later(place, needed_end(g, rank, kind, microbatch));
            QE_ASSERT(place <= at);
            slot[at] = EMPTY;
            slot[place] = kind;
            rank_end[rank] = place + 1;
            if (kind != W) *qe_v_grid_end(g, rank, kind, microbatch) = place + 1;
        }
    }
}

static uint32_t *inputs_of(small *s, uint32_t rank) { return s->inputs + (size_t)rank * 2 * s->grid.microbatches; }

static void note_input(small *s, uint32_t rank, uint32_t place) {
    uint32_t *input = inputs_of(s, rank), at = s->input_count[rank]++;
    for (; at > 0 && input[at - 1] > place; at--) input[at] = input[at - 1];
    input[at] = place;
}

/* The steady part begins with the first I of stage 0 and ends with the last F of it, or never. */
static part part_at(small *s, uint32_t rank, uint8_t kind, uint32_t microbatch) {
    if (kind == I0 && rank == 0 && s->part == START) s->part = STEADY;
    part now = s->part;
    if (kind == F0 && microbatch == s->grid.microbatches - 1 && now == STEADY) s->part = END;
    return now;
}

static void move(qe_v_grid *g, uint32_t rank, uint32_t from, uint32_t to) {
    uint8_t *slot = qe_v_grid_slots(g, rank), kind = slot[from];
    slot[from] = EMPTY;
    slot[to] = kind;
}

static void advance_slot(small *s, uint32_t rank, uint32_t at) {
    qe_v_grid *g = &s->grid;
    uint8_t kind = qe_v_grid_slots(g, rank)[at];
    if (kind == EMPTY) return;
    uint32_t microbatch = qe_v_grid_take(g, rank, kind), place = at, from;
    if (kind == W) from = later(s->weight_end[rank], inputs_of(s, rank)[microbatch] + 1);
    else from = needed_end(g, rank, kind, microbatch);
    QE_ASSERT(from <= at);
    if (part_at(s, rank, kind, microbatch) != STEADY) {
        place = is_forward(kind) ? qe_v_grid_forward_gap(g, rank, from, at) : qe_v_grid_gap(g, rank, from, at, 0);
    }
    move(g, rank, at, place);
    for (uint32_t i = place; i < at; i++) {
        if (is_forward(kind)) qe_v_grid_held(g, rank)[i]++;
        if (kind == W) qe_v_grid_held(g, rank)[i]--;
    }
    if (is_input(kind)) note_input(s, rank, place);
    if (kind == W) s->weight_end[rank] = place + 1;
    else *qe_v_grid_end(g, rank, kind, microbatch) = place + 1;
}

/* What a rank holds where its W take every slot left over. */
typedef struct hold {
    uint32_t held, pending;
} hold;

static hold hold_behind(hold now, uint8_t kind) {
    if (is_forward(kind)) now.held++;
    if (is_input(kind)) now.pending++;
    if (kind != EMPTY || now.pending == 0) return now;
    return (hold){now.held - 1, now.pending - 1};
}

static hold hold_before(const small *s, uint32_t rank, uint32_t at) {
    size_t place = (size_t)rank * s->grid.length + at;
    return at == 0 ? (hold){0, 0} : (hold){s->grid.held[place - 1], s->pending[place - 1]};
}

/* May what stands at `at` stand at `to`? Looks until everything is as before. */
static int may_move(small *s, uint32_t rank, uint32_t at, uint32_t to) {
    const uint8_t *slot = qe_v_grid_slots(&s->grid, rank);
    hold now = hold_before(s, rank, to);
    for (uint32_t i = to; i < s->grid.length; i++) {
        now = hold_behind(now, i == to ? slot[at] : i == at ? EMPTY : slot[i]);
        hold before = hold_before(s, rank, i + 1);
        if (now.held > s->grid.peak) return 0;
        if (i >= at && now.held == before.held && now.pending == before.pending) return 1;
    }
    return 1;
}

/* Follows the holds of a rank from a slot on. */
static void note_holds(small *s, uint32_t rank, uint32_t from) {
    const uint8_t *slot = qe_v_grid_slots(&s->grid, rank);
    for (uint32_t i = from; i < s->grid.length; i++) {
        hold now = hold_behind(hold_before(s, rank, i), slot[i]);
        qe_v_grid_held(&s->grid, rank)[i] = now.held;
        s->pending[(size_t)rank * s->grid.length + i] = now.pending;
        if (from == 0) s->grid.peak = later(s->grid.peak, now.held);
    }
}

static void advance_end_slot(small *s, uint32_t rank, uint32_t at) {
    qe_v_grid *g = &s->grid;
    const uint8_t *slot = qe_v_grid_slots(g, rank);
    uint8_t kind = slot[at];
    if (kind == EMPTY) return;
    uint32_t microbatch = qe_v_grid_take(g, rank, kind), place = at;
    if (part_at(s, rank, kind, microbatch) == END) {
        place = needed_end(g, rank, kind, microbatch);
        QE_ASSERT(place <= at);
        while (place < at && (slot[place] != EMPTY || !may_move(s, rank, at, place))) place++;
    }
    if (place < at) {
        move(g, rank, at, place);
        note_holds(s, rank, place);
    }
    *qe_v_grid_end(g, rank, kind, microbatch) = place + 1;
}

static void advance(small *s, void (*slot)(small *s, uint32_t rank, uint32_t at)) {
    forget_places(&s->grid);
    s->part = START;
    for (uint32_t at = 0; at < s->grid.length; at++) {
        for (uint32_t rank = 0; rank < s->grid.ranks; rank++) slot(s, rank, at);
    }
}

static void arrange(small *s, first_slots *first) {
    fill_pattern(&s->grid, first);
    put_weights(&s->grid, 0);
    qe_v_grid_hold(&s->grid);
    advance(s, advance_slot);
    squeeze(s);
    drop_weights(&s->grid);
    s->grid.peak = 0;
    for (uint32_t rank = 0; rank < s->grid.ranks; rank++) note_holds(s, rank, 0);
    advance(s, advance_end_slot);
    put_weights(&s->grid, 0);
    squeeze(s);
    drop_weights(&s->grid);
    put_weights(&s->grid, 1);
}

static void close_small(small *s) {
    free(s->pending);
    free(s->inputs);
    free(s->input_count);
    free(s->weight_end);
    qe_v_grid_close(&s->grid);
}

static qe_status open_small(const qe_schedule_request *request, small *s, qe_error *error_out) {
    /* Both patterns end within 6 slots per rank; then a W for every I at most is left. */
    uint32_t length = 6 * request->ranks + (QE_V_PERIOD + 2) * request->microbatches + 2;
    QE_TRY(qe_v_grid_open(request, length, &s->grid, error_out));
    s->pending = calloc((size_t)request->ranks * length, sizeof *s->pending);
    s->inputs = calloc((size_t)request->ranks * 2 * request->microbatches, sizeof *s->inputs);
    s->input_count = calloc(request->ranks, sizeof *s->input_count);
    s->weight_end = calloc(request->ranks, sizeof *s->weight_end);
    if (s->pending != NULL && s->inputs != NULL && s->input_count != NULL && s->weight_end != NULL) return QE_OK;
    close_small(s);
    return qe_error_set(error_out, QE_ERROR_MEMORY, "use fewer microbatches, or free memory",
                        "no memory to arrange %s", request->name);
}

static qe_status put_rows(const qe_schedule_request *request, first_slots *first, qe_action *actions,
                          qe_error *error_out) {
    static const uint8_t kinds[QE_V_KINDS] = {QE_ACTION_F, QE_ACTION_F, QE_ACTION_I,
                                              QE_ACTION_I, QE_ACTION_W, QE_ACTION_W};
    small s = {0};
    QE_TRY(open_small(request, &s, error_out));
    arrange(&s, first);
    qe_v_grid_write(&s.grid, kinds, request->forward_only, actions);
    close_small(&s);
    return QE_OK;
}

qe_status qe_rows_v_half(const qe_schedule_request *request, qe_action *actions, qe_error *error_out) {
    return put_rows(request, first_slots_half, actions, error_out);
}

qe_status qe_rows_v_min(const qe_schedule_request *request, qe_action *actions, qe_error *error_out) {
    return put_rows(request, first_slots_min, actions, error_out);
}
