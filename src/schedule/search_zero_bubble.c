/* search_zero_bubble.c - the heuristic of Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism (arXiv 2401.10241), by
 * which they made ZB-1p and ZB-2p: as many forwards ahead as memory and the first I admit, then one F and one I in turn
 * on all ranks; W where a gap takes it, or where the gap would make the longest wait of all ranks longer, or where
 * memory asks for it. Three switches of theirs are tried in all combinations by the caller. */
#include "schedule/search.h"

#include <math.h>

enum { F = QE_ACTION_F, I = QE_ACTION_I, W = QE_ACTION_W };

typedef struct rank_state {
    uint32_t done[QE_SEARCH_KINDS], placed, ahead;
    double clock, held, waited;
} rank_state;

typedef struct heuristic {
    const qe_search_problem *problem;
    const qe_search_switches *switches;
    double *end[QE_SEARCH_KINDS]; /* [ranks * microbatches] */
    qe_action *rows;
    rank_state rank[QE_SEARCH_RANKS_MAX];
} heuristic;

static double time_of(const heuristic *on, uint32_t rank, int kind) { return on->problem->stage[rank].time[kind]; }

static double *end_of(heuristic *on, int kind, uint32_t rank, uint32_t microbatch) {
    return &on->end[kind][(size_t)rank * on->problem->microbatches + microbatch];
}

/* When the input of the rank's next F or I is there. */
static double arrival(heuristic *on, uint32_t rank, int kind) {
    uint32_t microbatch = on->rank[rank].done[kind];
    if (kind == F && rank > 0) return *end_of(on, F, rank - 1, microbatch) + on->problem->stage[rank - 1].forward;
    if (kind == I && rank + 1 < on->problem->ranks) {
        return *end_of(on, I, rank + 1, microbatch) + on->problem->stage[rank + 1].backward;
    }
    return 0.0;
}

static void put(heuristic *on, uint32_t index, int kind) {
    rank_state *rank = &on->rank[index];
    const qe_search_stage *stage = &on->problem->stage[index];
    uint32_t microbatch = rank->done[kind];
    double start = kind == W ? rank->clock : fmax(rank->clock, arrival(on, index, kind));
    if (rank->done[F] > 0) rank->waited += start - rank->clock;
    rank->clock = *end_of(on, kind, index, microbatch) = start + stage->time[kind];
    rank->held += kind == F ? stage->taken : kind == I ? -stage->freed_by_input : -stage->freed_by_weight;
    on->rows[(size_t)index * on->problem->row_count + rank->placed++] =
        (qe_action){.microbatch = microbatch, .stage = (uint16_t)index, .kind = (uint8_t)kind};
    rank->done[kind]++;
}

static int has_weight(const heuristic *on, uint32_t rank) {
    return on->rank[rank].done[W] < on->rank[rank].done[I];
}

static double longest_wait(const heuristic *on) {
    double longest = 0.0;
    for (uint32_t rank = 0; rank < on->problem->ranks; rank++) longest = fmax(longest, on->rank[rank].waited);
    return longest;
}

/* Forwards that a rank takes on before its first I, which begins at `first`. */
static void plan_ahead(heuristic *on, uint32_t index, double *first) {
    rank_state *rank = &on->rank[index];
    const qe_search_stage *stage = &on->problem->stage[index];
    double held = rank->held, clock = rank->clock;
    double arrives = *first + (index + 1 < on->problem->ranks ? on->problem->stage[index + 1].backward : 0.0);
    while (rank->done[F] + rank->ahead < on->problem->microbatches && held + stage->taken <= on->problem->limit) {
        if (on->switches->wait_before_first ? clock + stage->time[F] > arrives : clock >= arrives) break;
        held += stage->taken;
        clock += stage->time[F];
        rank->ahead++;
    }
    *first = fmax(clock, arrives) + stage->time[I];
}

/* No rank is as far ahead as the one before it. */
static void put_ahead(heuristic *on) {
    for (uint32_t index = 1; index < on->problem->ranks; index++) {
        rank_state *rank = &on->rank[index];
        while (rank->ahead > 0 && rank->ahead >= on->rank[index - 1].ahead &&
               rank->done[F] + rank->ahead < on->problem->microbatches) {
            rank->ahead--;
        }
    }
    for (uint32_t index = 0; index < on->problem->ranks; index++) {
        for (uint32_t i = 0; i < on->rank[index].ahead; i++) put(on, index, F);
    }
}

static void begin(heuristic *on) {
    uint32_t last = on->problem->ranks - 1;
    for (uint32_t rank = 0; rank <= last; rank++) put(on, rank, F);
    double first = *end_of(on, F, last, 0) + time_of(on, last, I);
    for (uint32_t rank = last; rank-- > 0;) plan_ahead(on, rank, &first);
    put_ahead(on);
    for (uint32_t rank = last + 1; rank-- > 0;) put(on, rank, I);
}

/* Time of the W that must go before one more F fits. */
static double room_time(const heuristic *on, uint32_t index) {
    const rank_state *rank = &on->rank[index];
    const qe_search_stage *stage = &on->problem->stage[index];
    double held = rank->held + stage->taken, time = 0.0;
    for (uint32_t w = rank->done[W]; held > on->problem->limit && w < rank->done[I]; w++) {
        held -= stage->freed_by_weight;
        time += stage->time[W];
    }
    return time;
}

/* Does the rank take another F now, or leave it because the next rank is behind? */
static int wants_forward(const heuristic *on, uint32_t index) {
    const rank_state *rank = &on->rank[index];
    if (rank->done[F] == on->problem->microbatches) return 0;
    if (!on->switches->backward_first || index + 1 == on->problem->ranks) return 1;
    const rank_state *next = &on->rank[index + 1];
    if (rank->done[F] < next->done[F] + 2) return 1;
    double due = next->clock + time_of(on, index + 1, F) + time_of(on, index + 1, I) +
                 on->problem->stage[index + 1].backward;
    if (rank->clock >= due) return 0;
    if (rank->clock + time_of(on, index, F) + room_time(on, index) <= due) return 1;
    return due - rank->clock > longest_wait(on) - rank->waited;
}

static int make_room(heuristic *on, uint32_t rank) {
    while (on->rank[rank].held + on->problem->stage[rank].taken > on->problem->limit) {
        if (!has_weight(on, rank)) return 0;
        put(on, rank, W);
    }
    return 1;
}

/* W in front of the rank's next F or I. */
static void fill(heuristic *on, uint32_t index, int kind) {
    const rank_state *rank = &on->rank[index];
    double next = arrival(on, index, kind);
    while (has_weight(on, index) && rank->clock + time_of(on, index, W) <= next) put(on, index, W);
    if (!has_weight(on, index) || rank->clock >= next) return;
    if (on->switches->fill_all || next - rank->clock > longest_wait(on) - rank->waited) put(on, index, W);
}

static int put_forwards(heuristic *on) {
    uint8_t wanted[QE_SEARCH_RANKS_MAX];
    uint32_t ranks = on->problem->ranks;
    for (uint32_t rank = 0; rank < ranks; rank++) wanted[rank] = (uint8_t)wants_forward(on, rank);
    for (uint32_t rank = ranks - 1; rank-- > 0;) wanted[rank] &= wanted[rank + 1];
    for (uint32_t rank = 0; rank < ranks; rank++) {
        if (!wanted[rank]) continue;
        if (!make_room(on, rank)) return 0;
        if (rank > 0) fill(on, rank, F);
        put(on, rank, F);
    }
    return 1;
}

static void put_backwards(heuristic *on) {
    for (uint32_t rank = on->problem->ranks; rank-- > 0;) {
        if (rank + 1 < on->problem->ranks) fill(on, rank, I);
        while (rank == 0 && on->rank[0].done[F] == on->problem->microbatches && has_weight(on, 0)) put(on, 0, W);
        put(on, rank, I);
    }
}

/* Every rank has the F of its next I: its forwards are never behind the next rank's. */
static int has_forwards(const heuristic *on) {
    for (uint32_t rank = 0; rank < on->problem->ranks; rank++) {
        if (on->rank[rank].done[F] <= on->rank[rank].done[I]) return 0;
    }
    return 1;
}

int qe_search_zero_bubble(const qe_search_problem *problem, const qe_search_switches *switches, double *ends,
                          qe_action *rows_out) {
    heuristic on = {.problem = problem, .switches = switches, .rows = rows_out};
    for (uint32_t kind = 0; kind < QE_SEARCH_KINDS; kind++) {
        on.end[kind] = ends + (size_t)kind * problem->stages * problem->microbatches;
    }
    begin(&on);
    for (uint32_t microbatch = 1; microbatch < problem->microbatches; microbatch++) {
        if (!put_forwards(&on) || !has_forwards(&on)) return 0;
        put_backwards(&on);
    }
    for (uint32_t rank = 0; rank < problem->ranks; rank++) {
        while (has_weight(&on, rank)) put(&on, rank, W);
    }
    return 1;
}
