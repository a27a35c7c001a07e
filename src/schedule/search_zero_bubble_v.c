/* search_zero_bubble_v.c - the heuristic for two stages on each rank of a V from the same authors' code. A microbatch
 * passes every rank four times: F down, F up, I down, I up. After the ranks are filled, each round gives every rank
 * one I and then one F, whichever leg's input is there; W go into gaps that take one, and where a gap would make the
 * longest wait of all ranks longer. What the ranks waited is allowed to each of them when it is made again. */
#include "schedule/search.h"

#include <math.h>

enum { F = QE_ACTION_F, I = QE_ACTION_I, W = QE_ACTION_W, F_DOWN = 0, F_UP, I_DOWN, I_UP, LEGS };

typedef struct rank_state {
    uint32_t done[LEGS], placed, weights_begin;
    double clock, held, waited;
    double allowed; /* what it waited the time before, less than the longest did */
} rank_state;

typedef struct heuristic {
    const qe_search_problem *problem;
    const qe_search_v_switches *switches;
    double *end;     /* [LEGS][ranks][microbatches]; negative: not placed */
    qe_action *queue; /* [ranks][2 * microbatches] I in their order */
    qe_action *rows;
    int failed;
    rank_state rank[QE_SEARCH_RANKS_MAX];
} heuristic;

static int is_up(uint32_t leg) { return leg == F_UP || leg == I_UP; }

static uint32_t stage_of(const heuristic *on, uint32_t rank, uint32_t leg) {
    return leg == F_DOWN || leg == I_UP ? rank : 2 * on->problem->ranks - 1 - rank;
}

static double *end_of(heuristic *on, uint32_t leg, uint32_t rank, uint32_t microbatch) {
    return &on->end[((size_t)leg * on->problem->ranks + rank) * on->problem->microbatches + microbatch];
}

/* When the input of a rank's next action of a leg is there; 0 where it comes from the rank itself, negative where it is
 * not known. */
static double arrival(heuristic *on, uint32_t rank, uint32_t leg) {
    uint32_t ranks = on->problem->ranks, from = is_up(leg) ? rank + 1 : rank - 1;
    if (rank == (is_up(leg) ? ranks - 1 : 0)) return 0.0;
    double end = *end_of(on, leg, from, on->rank[rank].done[leg]);
    if (end < 0.0) return end;
    const qe_search_stage *stage = &on->problem->stage[stage_of(on, from, leg)];
    return end + (leg <= F_UP ? stage->forward : stage->backward);
}

static uint32_t pending(const heuristic *on, uint32_t rank) {
    return on->rank[rank].done[I_DOWN] + on->rank[rank].done[I_UP] - on->rank[rank].weights_begin;
}

static qe_action *queue_of(heuristic *on, uint32_t rank, uint32_t index) {
    return &on->queue[(size_t)rank * 2 * on->problem->microbatches + index];
}

static void append(heuristic *on, uint32_t rank, qe_action action) {
    on->rows[(size_t)rank * on->problem->row_count + on->rank[rank].placed++] = action;
}

static void put_weight(heuristic *on, uint32_t index) {
    rank_state *rank = &on->rank[index];
    if (pending(on, index) == 0) {
        on->failed = 1;
        return;
    }
    qe_action action = *queue_of(on, index, rank->weights_begin++);
    rank->clock += on->problem->stage[action.stage].time[W];
    rank->held -= on->problem->stage[action.stage].freed_by_weight;
    append(on, index, action);
}

/* Is the action of the leg before it done on this rank, and is there one left? */
static int can_put(heuristic *on, uint32_t rank, uint32_t leg) {
    const rank_state *at = &on->rank[rank];
    if (at->done[leg] >= on->problem->microbatches || arrival(on, rank, leg) < 0.0) return 0;
    return leg == F_DOWN || at->done[leg] < at->done[leg - 1];
}

static void put(heuristic *on, uint32_t index, uint32_t leg) {
    rank_state *rank = &on->rank[index];
    uint32_t stage = stage_of(on, index, leg);
    const qe_search_stage *at = &on->problem->stage[stage];
    int kind = leg <= F_UP ? F : I;
    if (on->failed || !can_put(on, index, leg) ||
        (kind == F && rank->held + at->taken > on->problem->limit)) {
        on->failed = 1;
        return;
    }
    double start = fmax(rank->clock, arrival(on, index, leg));
    qe_action action = {.microbatch = rank->done[leg], .stage = (uint16_t)stage, .kind = (uint8_t)kind};
    if (rank->done[F_DOWN] > 0) rank->waited += start - rank->clock;
    rank->clock = *end_of(on, leg, index, action.microbatch) = start + at->time[kind];
    rank->held += kind == F ? at->taken : -at->freed_by_input;
    append(on, index, action);
    if (kind == I) {
        action.kind = W;
        *queue_of(on, index, rank->done[I_DOWN] + rank->done[I_UP]) = action;
    }
    rank->done[leg]++;
}

static double longest_wait(const heuristic *on) {
    double longest = 0.0;
    for (uint32_t rank = 0; rank < on->problem->ranks; rank++) longest = fmax(longest, on->rank[rank].waited);
    return longest;
}

/* First forwards of all legs, and as many more as fit before the first comes back up. */
static void fill_down(heuristic *on) {
    uint32_t ranks = on->problem->ranks;
    for (uint32_t rank = 0; rank < ranks; rank++) put(on, rank, F_DOWN);
    for (uint32_t rank = ranks; rank-- > 0 && !on->failed;) {
        const rank_state *at = &on->rank[rank];
        const qe_search_stage *stage = &on->problem->stage[rank];
        while (rank + 1 < ranks && at->held + stage->taken * (2 + 2 * rank) <= on->problem->limit &&
               at->clock + stage->time[F] <= arrival(on, rank, F_UP) && at->done[F_DOWN] < on->problem->microbatches) {
            for (uint32_t i = 0; i <= rank; i++) put(on, i, F_DOWN);
            if (on->failed) return;
        }
        put(on, rank, F_UP);
    }
}

/* Both legs in turn, until no rank has fewer forwards than the one before it. */
static void fill_up(heuristic *on) {
    uint32_t ranks = on->problem->ranks, microbatches = on->problem->microbatches, leg = F_DOWN;
    for (uint32_t rank = 1; rank < ranks && !on->failed; rank++) {
        const uint32_t *done = on->rank[rank].done, *before = on->rank[rank - 1].done;
        while (done[F_DOWN] + done[F_UP] < before[F_DOWN] + before[F_UP] ||
               (done[F_UP] <= before[F_UP] && before[F_UP] < microbatches)) {
            for (uint32_t i = ranks; i-- > rank;) {
                if (on->rank[i].done[leg] < microbatches) put(on, i, leg);
            }
            if (on->failed) return;
            leg = leg == F_DOWN ? F_UP : F_DOWN;
        }
    }
}

/* W in front of a rank's next action of a leg; `always`: also into a gap that is too small for it and makes the longest
 * wait longer. */
static void fill_gap(heuristic *on, uint32_t index, uint32_t leg, int always) {
    const rank_state *rank = &on->rank[index];
    double next = arrival(on, index, leg);
    if (next <= 0.0) return;
    for (;;) {
        if (pending(on, index) == 0) return;
        const qe_action *first = queue_of(on, index, rank->weights_begin);
        if (next < rank->clock + on->problem->stage[first->stage].time[W]) break;
        put_weight(on, index);
    }
    double spare = fmax(longest_wait(on), rank->allowed) - rank->waited;
    if (always && next - rank->clock > spare) put_weight(on, index);
}

static uint32_t backward_leg(heuristic *on, uint32_t index) {
    const rank_state *rank = &on->rank[index];
    if (rank->done[I_UP] >= rank->done[I_DOWN]) return I_DOWN;
    if (index + 1 == on->problem->ranks || rank->done[I_DOWN] == on->problem->microbatches) return I_UP;
    return arrival(on, index, I_UP) >= 0.0 ? I_UP : I_DOWN;
}

static void put_backward(heuristic *on, uint32_t rank, uint32_t leg) {
    fill_gap(on, rank, leg, leg == I_UP || on->switches->fill_backward);
    put(on, rank, leg);
}

static void put_backwards(heuristic *on) {
    uint8_t leg[QE_SEARCH_RANKS_MAX];
    uint32_t ranks = on->problem->ranks;
    for (uint32_t rank = 0; rank < ranks; rank++) leg[rank] = (uint8_t)backward_leg(on, rank);
    for (uint32_t rank = ranks; rank-- > 0;) {
        if (leg[rank] == I_UP) put_backward(on, rank, I_UP);
    }
    for (uint32_t rank = 0; rank < ranks; rank++) {
        if (leg[rank] == I_DOWN) put_backward(on, rank, I_DOWN);
    }
}

static uint32_t forward_leg(heuristic *on, uint32_t index) {
    const rank_state *rank = &on->rank[index];
    if (rank->done[F_UP] == on->problem->microbatches) return LEGS;
    if (can_put(on, index, F_UP)) return F_UP;
    return can_put(on, index, F_DOWN) ? F_DOWN : LEGS;
}

static void put_forwards(heuristic *on) {
    for (uint32_t rank = 0; rank < on->problem->ranks && !on->failed; rank++) {
        uint32_t leg = forward_leg(on, rank);
        if (leg == LEGS) continue;
        double taken = on->problem->stage[stage_of(on, rank, leg)].taken;
        while (on->rank[rank].held + taken > on->problem->limit && !on->failed) put_weight(on, rank);
        fill_gap(on, rank, leg, on->switches->fill_forward);
        put(on, rank, leg);
    }
}

static void begin(heuristic *on, const double *waited) {
    size_t legs = (size_t)LEGS * on->problem->ranks * on->problem->microbatches;
    double longest = 0.0;
    for (size_t i = 0; i < legs; i++) on->end[i] = -1.0;
    if (waited == NULL) return;
    for (uint32_t rank = 0; rank < on->problem->ranks; rank++) longest = fmax(longest, waited[rank]);
    for (uint32_t rank = 0; rank < on->problem->ranks; rank++) on->rank[rank].allowed = longest - waited[rank];
}

double qe_search_zero_bubble_v(const qe_search_problem *problem, const qe_search_v_switches *switches,
                               const double *allowed, double *ends, qe_action *queue, qe_action *rows_out,
                               double *waited_out) {
    heuristic on = {.problem = problem, .switches = switches, .end = ends, .queue = queue, .rows = rows_out};
    begin(&on, allowed);
    fill_down(&on);
    fill_up(&on);
    for (uint32_t round = 0; round < 2 * problem->microbatches && !on.failed; round++) {
        put_backwards(&on);
        put_forwards(&on);
    }
    if (on.failed) return -1.0;
    double longest = longest_wait(&on);
    for (uint32_t rank = 0; rank < problem->ranks; rank++) {
        while (pending(&on, rank) > 0) put_weight(&on, rank);
        waited_out[rank] = on.rank[rank].waited;
    }
    return longest;
}
