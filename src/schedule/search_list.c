/* search_list.c - rows made action by action: whoever can act first acts next, on what a policy prefers. Since actions
 * are chosen in the order of their starts, everything that has arrived by then is known.
 *
 * Memory is given out as a banker does. On each rank the oldest microbatch that still has forwards to do there can
 * always do them: others are let in only beside what it still claims. So the oldest one of all ranks goes on to its end
 * wherever it is, and with it everything ends. */
#include "schedule/search.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/assert.h"

enum { F = QE_ACTION_F, I = QE_ACTION_I, W = QE_ACTION_W };

typedef struct rank_state {
    double clock; /* end of its last action */
    double begin; /* start of its first action; negative: none yet */
    double held, left; /* size kept; time of what it has still to do */
    uint32_t placed, flying; /* actions; F that wait for their I */
    uint32_t weights_begin, weights_end; /* of its queue */
} rank_state;

struct qe_search_lists {
    const qe_search_problem *problem;
    const qe_search_policy *policy;
    rank_state *rank;      /* [ranks] */
    double *look;          /* [2 * leaves] a tree of minima; a leaf says when a rank looks for its next action:
                            * INFINITY: when something arrives */
    uint32_t leaves;
    uint32_t *next[2];     /* [stages] first microbatch without F, without I */
    double *arrival[2];    /* [stages * microbatches] of the input of F and of I; INFINITY: not known */
    qe_action *weights;    /* [ranks][stages of a rank * microbatches] I whose W is due, in their order */
    qe_action *rows;
    uint32_t placed;
};

qe_status qe_search_lists_create(const qe_search_problem *problem, qe_search_lists **lists_out, qe_error *error_out) {
    size_t pairs = (size_t)problem->stages * problem->microbatches;
    qe_arena arena = {0};
    size_t leaves = 1;
    while (leaves < problem->ranks) leaves *= 2;
    size_t self = qe_arena_add(&arena, sizeof(qe_search_lists), QE_ALIGN_BYTES);
    size_t rank = qe_arena_add_array(&arena, problem->ranks, sizeof(rank_state), QE_ALIGN_BYTES);
    size_t look = qe_arena_add_array(&arena, 2 * leaves, sizeof(double), QE_ALIGN_BYTES);
    size_t next = qe_arena_add_array(&arena, 2 * (size_t)problem->stages, sizeof(uint32_t), QE_ALIGN_BYTES);
    size_t arrival = qe_arena_add_array(&arena, 2 * pairs, sizeof(double), QE_ALIGN_BYTES);
    size_t weights = qe_arena_add_array(&arena, pairs, sizeof(qe_action), QE_ALIGN_BYTES);
    void *block;
    QE_TRY(qe_arena_allocate(&arena, &block, error_out));
    char *bytes = block;
    qe_search_lists *lists = (qe_search_lists *)(bytes + self);
    *lists = (qe_search_lists){.problem = problem, .rank = (rank_state *)(bytes + rank),
                               .look = (double *)(bytes + look), .leaves = (uint32_t)leaves};
    for (size_t lane = 0; lane < 2; lane++) {
        lists->next[lane] = (uint32_t *)(bytes + next) + lane * problem->stages;
        lists->arrival[lane] = (double *)(bytes + arrival) + lane * pairs;
    }
    lists->weights = (qe_action *)(bytes + weights);
    *lists_out = lists;
    return QE_OK;
}

void qe_search_lists_destroy(qe_search_lists *lists) { free(lists); }

static void set_look(qe_search_lists *on, uint32_t rank, double look) {
    uint32_t at = on->leaves + rank;
    on->look[at] = look;
    for (at /= 2; at > 0; at /= 2) {
        const double *two = on->look + (size_t)2 * at;
        double least = two[0] < two[1] ? two[0] : two[1];
        if (on->look[at] == least) return;
        on->look[at] = least;
    }
}

/* Of equals the first one. */
static uint32_t first_to_look(const qe_search_lists *on) {
    uint32_t at = 1;
    while (at < on->leaves) {
        const double *two = on->look + (size_t)2 * at;
        at = 2 * at + (two[1] < two[0]);
    }
    return at - on->leaves;
}

static void begin(qe_search_lists *on) {
    const qe_search_problem *problem = on->problem;
    size_t pairs = (size_t)problem->stages * problem->microbatches;
    on->placed = 0;
    for (uint32_t rank = 0; rank < problem->ranks; rank++) {
        uint32_t queue = rank * problem->chunks * problem->microbatches;
        on->rank[rank] = (rank_state){.begin = -1.0, .left = problem->work[rank], .weights_begin = queue,
                                      .weights_end = queue};
    }
    for (uint32_t i = 0; i < 2 * on->leaves; i++) on->look[i] = INFINITY;
    for (uint32_t rank = 0; rank < problem->ranks; rank++) set_look(on, rank, 0.0);
    for (size_t lane = 0; lane < 2; lane++) {
        memset(on->next[lane], 0, problem->stages * sizeof *on->next[lane]);
        for (size_t i = 0; i < pairs; i++) on->arrival[lane][i] = INFINITY;
    }
    for (uint32_t m = 0; m < problem->microbatches; m++) on->arrival[F][m] = 0.0;
}

static size_t pair_of(const qe_search_lists *on, uint32_t stage, uint32_t microbatch) {
    return (size_t)stage * on->problem->microbatches + microbatch;
}

static const uint32_t *stages_of(const qe_search_lists *on, uint32_t rank) {
    return &on->problem->stage_of[(size_t)rank * on->problem->chunks];
}

/* What the oldest microbatch with forwards left on the rank still claims there, unless it is this one. */
static double claim_beside(const qe_search_lists *on, uint32_t rank, uint32_t microbatch) {
    const uint32_t *stages = stages_of(on, rank);
    uint32_t oldest = QE_NONE;
    double claim = 0.0;
    for (uint32_t c = 0; c < on->problem->chunks; c++) {
        if (on->next[F][stages[c]] < oldest) oldest = on->next[F][stages[c]];
    }
    if (microbatch == oldest) return 0.0;
    for (uint32_t c = 0; c < on->problem->chunks; c++) {
        if (on->next[F][stages[c]] <= oldest) claim += on->problem->stage[stages[c]].taken;
    }
    return claim;
}

static int fits(const qe_search_lists *on, uint32_t rank, uint32_t stage) {
    double taken = on->problem->stage[stage].taken;
    if (on->rank[rank].held + taken > on->problem->limit) return 0;
    if (on->problem->chunks == 1 || isinf(on->problem->limit)) return 1;
    return on->rank[rank].held + taken + claim_beside(on, rank, on->next[F][stage]) <= on->problem->limit;
}

/* What a rank could do, and when the next thing arrives that it could do then. */
typedef struct choice {
    uint32_t forward, backward; /* stages; QE_NONE */
    double next;
    int blocked; /* a forward is there, and memory is not */
} choice;

/* Stages ascend, so `early` keeps the first one found and its opposite the last. */
static void look_forward(const qe_search_lists *on, uint32_t rank, double now, choice *found) {
    const qe_search_problem *problem = on->problem;
    const uint32_t *stages = stages_of(on, rank);
    if (on->policy->cap != NULL && on->rank[rank].flying >= on->policy->cap[rank]) return;
    for (uint32_t c = 0; c < problem->chunks; c++) {
        uint32_t stage = stages[c], microbatch = on->next[F][stage];
        if (microbatch == problem->microbatches) continue;
        double arrival = on->arrival[F][pair_of(on, stage, microbatch)];
        if (isinf(arrival)) continue;
        if (!fits(on, rank, stage)) {
            found->blocked |= arrival <= now;
        } else if (arrival > now) {
            found->next = arrival < found->next ? arrival : found->next;
        } else if (found->forward == QE_NONE || !on->policy->forward_early) {
            found->forward = stage;
        }
    }
}

static void look_backward(const qe_search_lists *on, uint32_t rank, double now, choice *found) {
    const qe_search_problem *problem = on->problem;
    const uint32_t *stages = stages_of(on, rank);
    for (uint32_t c = 0; c < problem->chunks; c++) {
        uint32_t stage = stages[c], microbatch = on->next[I][stage];
        if (microbatch == on->next[F][stage]) continue;
        double arrival = on->arrival[I][pair_of(on, stage, microbatch)];
        if (isinf(arrival)) continue;
        if (arrival > now) found->next = arrival < found->next ? arrival : found->next;
        else if (found->backward == QE_NONE || !on->policy->backward_early) found->backward = stage;
    }
}

static void arrives(qe_search_lists *on, int lane, uint32_t stage, uint32_t microbatch, double at) {
    uint32_t rank = on->problem->stage[stage].rank;
    double clock = on->rank[rank].clock, look = at > clock ? at : clock;
    on->arrival[lane][pair_of(on, stage, microbatch)] = at;
    if (look < on->look[on->leaves + rank]) set_look(on, rank, look);
}

static void send(qe_search_lists *on, const qe_action *action, double end) {
    const qe_search_stage *stage = &on->problem->stage[action->stage];
    uint32_t last = on->problem->stages - 1;
    if (action->kind == F && action->stage == last) arrives(on, I, last, action->microbatch, end);
    else if (action->kind == F) arrives(on, F, action->stage + 1U, action->microbatch, end + stage->forward);
    else if (action->kind == I && action->stage > 0) {
        arrives(on, I, action->stage - 1U, action->microbatch, end + stage->backward);
    }
}

static void keep_book(qe_search_lists *on, rank_state *rank, const qe_action *action) {
    const qe_search_stage *stage = &on->problem->stage[action->stage];
    if (action->kind == F) {
        rank->held += stage->taken;
        rank->flying++;
        on->next[F][action->stage]++;
    } else if (action->kind == I) {
        rank->held -= stage->freed_by_input;
        rank->flying--;
        on->next[I][action->stage]++;
        on->weights[rank->weights_end] = *action;
        on->weights[rank->weights_end++].kind = W;
    } else {
        rank->held -= stage->freed_by_weight;
        rank->weights_begin++;
    }
    if (rank->weights_begin == rank->weights_end && rank->flying == 0) rank->held = 0.0; /* no crumbs of rounding */
}

static void place(qe_search_lists *on, uint32_t index, qe_action action, double now) {
    rank_state *rank = &on->rank[index];
    double time = on->problem->stage[action.stage].time[action.kind];
    on->rows[(size_t)index * on->problem->row_count + rank->placed++] = action;
    on->placed++;
    if (rank->begin < 0.0) rank->begin = now;
    rank->clock = now + time;
    rank->left -= time;
    set_look(on, index, rank->clock);
    keep_book(on, rank, &action);
    send(on, &action, rank->clock);
}

static qe_action action_of(const qe_search_lists *on, int kind, uint32_t stage) {
    return (qe_action){.microbatch = on->next[kind][stage], .stage = (uint16_t)stage, .kind = (uint8_t)kind};
}

/* Can the rank wait until `next` and still end in time? */
static int can_wait(const qe_search_lists *on, const rank_state *rank, double next) {
    if (on->policy->target <= 0.0) return 0;
    double origin = on->problem->request->metric == QE_SEARCH_STAGE ? rank->begin : 0.0;
    return next + rank->left <= origin + on->policy->target;
}

static int fills(const qe_search_lists *on, const rank_state *rank, const choice *found, double now) {
    if (found->blocked || isinf(found->next)) return 1;
    double time = on->problem->stage[on->weights[rank->weights_begin].stage].time[W], gap = found->next - now;
    if (time <= gap + on->problem->grain) return 1;
    return gap >= on->policy->fill * time && !can_wait(on, rank, found->next);
}

static void act(qe_search_lists *on, uint32_t index) {
    rank_state *rank = &on->rank[index];
    double now = on->look[on->leaves + index], near = now + on->problem->grain;
    choice found = {QE_NONE, QE_NONE, INFINITY, 0};
    look_forward(on, index, near, &found);
    look_backward(on, index, near, &found);
    if (found.forward != QE_NONE && (on->policy->forward_first || found.backward == QE_NONE)) {
        place(on, index, action_of(on, F, found.forward), now);
    } else if (found.backward != QE_NONE) {
        place(on, index, action_of(on, I, found.backward), now);
    } else if (rank->weights_begin < rank->weights_end && fills(on, rank, &found, now)) {
        place(on, index, on->weights[rank->weights_begin], now);
    } else {
        set_look(on, index, found.next);
    }
}

static double metric_of(const qe_search_lists *on) {
    double most = 0.0;
    for (uint32_t rank = 0; rank < on->problem->ranks; rank++) {
        double origin = on->problem->request->metric == QE_SEARCH_STAGE ? on->rank[rank].begin : 0.0;
        most = fmax(most, on->rank[rank].clock - origin);
    }
    return most;
}

double qe_search_lists_make(qe_search_lists *lists, const qe_search_policy *policy, qe_action *rows_out) {
    uint32_t actions = lists->problem->ranks * lists->problem->row_count;
    lists->policy = policy;
    lists->rows = rows_out;
    begin(lists);
    while (lists->placed < actions) {
        if (isinf(lists->look[1])) return INFINITY;
        act(lists, first_to_look(lists));
    }
    return metric_of(lists);
}
