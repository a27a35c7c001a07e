/* search_exact.c - all orders of a small problem, by branch and bound. Microbatches are alike, so every kind of every
 * stage takes them in order.
 *
 * Without a limit of memory: of what could run next, the action that would end first decides the rank; whatever that
 * rank could start before that end is a branch (Giffler and Thompson: one of the orders made so is best). With a limit
 * an F may better wait although nothing is in its way, so all ranks' actions are branches, in the order of their
 * starts; I and W only ever give memory back, so nobody waits while one of them fits in front. */
#include "schedule/search_exact.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"

enum {
    F = QE_ACTION_F,
    I = QE_ACTION_I,
    W = QE_ACTION_W,
    NODES_MOST = 1 << 20, /* a tenth of a second */
};

typedef struct exact {
    const qe_search_problem *problem;
    double begin[QE_SEARCH_EXACT_MAX], clock[QE_SEARCH_EXACT_MAX]; /* [ranks]; begin negative: not yet */
    double held[QE_SEARCH_EXACT_MAX], left[QE_SEARCH_EXACT_MAX];
    uint32_t done[QE_SEARCH_KINDS][QE_SEARCH_EXACT_MAX];           /* [stages] */
    double tail[2][QE_SEARCH_EXACT_MAX]; /* from the end of F, of I to the end of the first stage's rank, at least */
    double end[QE_SEARCH_KINDS][QE_SEARCH_EXACT_MAX];              /* [stages * microbatches] */
    qe_action path[QE_SEARCH_EXACT_MAX], best[QE_SEARCH_EXACT_MAX]; /* in the order of making */
    uint32_t depth, actions;
    double now; /* with a limit: no action starts earlier any more */
    uint64_t nodes;
    double value; /* to be beaten */
    int found;
} exact;

/* What could run next. */
typedef struct branch {
    qe_action action;
    double start;
} branch;

enum { BRANCHES_MOST = QE_SEARCH_EXACT_MAX };

static size_t at(const exact *on, uint32_t stage, uint32_t microbatch) {
    return (size_t)stage * on->problem->microbatches + microbatch;
}

/* When its input is there; negative: that is not known yet. */
static double arrival(const exact *on, uint32_t kind, uint32_t stage) {
    const qe_search_stage *stages = on->problem->stage;
    uint32_t m = on->done[kind][stage], last = on->problem->stages - 1;
    if (kind == W) return m < on->done[I][stage] ? 0.0 : -1.0;
    if (kind == F && stage == 0) return 0.0;
    if (kind == F) {
        return on->done[F][stage - 1] > m ? on->end[F][at(on, stage - 1, m)] + stages[stage - 1].forward : -1.0;
    }
    if (on->done[F][stage] <= m) return -1.0;
    if (stage == last) return on->end[F][at(on, stage, m)];
    return on->done[I][stage + 1] > m ? on->end[I][at(on, stage + 1, m)] + stages[stage + 1].backward : -1.0;
}

static uint32_t list_branches(const exact *on, branch *branches, uint32_t *rank_out, double *first_end_out) {
    const qe_search_problem *problem = on->problem;
    uint32_t count = 0;
    *first_end_out = INFINITY;
    for (uint32_t stage = 0; stage < problem->stages; stage++) {
        const qe_search_stage *of = &problem->stage[stage];
        for (uint32_t kind = 0; kind < QE_SEARCH_KINDS; kind++) {
            if (on->done[kind][stage] == problem->microbatches) continue;
            if (kind == F && on->held[of->rank] + of->taken > problem->limit) continue;
            double input = arrival(on, kind, stage);
            if (input < 0.0) continue;
            qe_action action = {.microbatch = on->done[kind][stage], .stage = (uint16_t)stage, .kind = (uint8_t)kind};
            double start = fmax(input, on->clock[of->rank]);
            branches[count++] = (branch){action, start};
            if (start + of->time[kind] >= *first_end_out) continue;
            *first_end_out = start + of->time[kind];
            *rank_out = of->rank;
        }
    }
    return count;
}

static double origin(const exact *on, uint32_t rank) {
    if (on->problem->request->metric == QE_SEARCH_MAKESPAN) return 0.0;
    return on->begin[rank] < 0.0 ? on->clock[rank] : on->begin[rank];
}

/* Can what is left still beat the best? */
static int is_hopeless(const exact *on) {
    for (uint32_t rank = 0; rank < on->problem->ranks; rank++) {
        double next = on->left[rank] > on->problem->grain ? fmax(on->clock[rank], on->now) : on->clock[rank];
        if (next + on->left[rank] - origin(on, rank) >= on->value - on->problem->grain) return 1;
    }
    return 0;
}

static void keep_best(exact *on) {
    double most = 0.0;
    for (uint32_t rank = 0; rank < on->problem->ranks; rank++) most = fmax(most, on->clock[rank] - origin(on, rank));
    if (most >= on->value - on->problem->grain) return;
    on->value = most;
    on->found = 1;
    memcpy(on->best, on->path, on->actions * sizeof *on->best);
}

static void visit(exact *on);

static void follow(exact *on, const branch *to) {
    const qe_action *action = &to->action;
    const qe_search_stage *stage = &on->problem->stage[action->stage];
    uint32_t rank = stage->rank;
    double begin = on->begin[rank], clock = on->clock[rank], held = on->held[rank], left = on->left[rank];
    double now = on->now;
    double end = to->start + stage->time[action->kind];
    if (action->kind != W && end + on->tail[action->kind][action->stage] >= on->value - on->problem->grain) return;
    if (begin < 0.0) on->begin[rank] = to->start;
    on->clock[rank] = on->end[action->kind][at(on, action->stage, action->microbatch)] = end;
    on->left[rank] -= stage->time[action->kind];
    on->held[rank] += action->kind == F   ? stage->taken
                      : action->kind == I ? -stage->freed_by_input
                                          : -stage->freed_by_weight;
    on->done[action->kind][action->stage]++;
    on->path[on->depth++] = *action;
    if (isfinite(on->problem->limit)) on->now = to->start;
    visit(on);
    on->now = now;
    on->depth--;
    on->done[action->kind][action->stage]--;
    on->begin[rank] = begin;
    on->clock[rank] = clock;
    on->held[rank] = held;
    on->left[rank] = left;
}

/* The first end decides; what starts when it ends would come behind it anyway. */
static void follow_first_rank(exact *on, const branch *branches, uint32_t count, uint32_t rank, double first_end) {
    for (uint32_t i = 0; i < count; i++) {
        if (on->problem->stage[branches[i].action.stage].rank != rank) continue;
        if (branches[i].start <= first_end + on->problem->grain) follow(on, &branches[i]);
    }
}

/* Does an I or W of the same rank end before it starts? */
static int lets_pass(const exact *on, const branch *branches, uint32_t count, const branch *other) {
    const qe_search_stage *stages = on->problem->stage;
    for (uint32_t i = 0; i < count; i++) {
        const qe_action *action = &branches[i].action;
        if (&branches[i] == other || action->kind == F) continue;
        if (stages[action->stage].rank != stages[other->action.stage].rank) continue;
        double end = branches[i].start + stages[action->stage].time[action->kind];
        if (end <= other->start && branches[i].start < other->start) return 1;
    }
    return 0;
}

static void follow_all_ranks(exact *on, const branch *branches, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        if (branches[i].start < on->now || lets_pass(on, branches, count, &branches[i])) continue;
        follow(on, &branches[i]);
    }
}

/* Depth is bounded by the number of actions. */
static void visit(exact *on) {
    branch branches[BRANCHES_MOST];
    uint32_t rank = 0;
    double first_end;
    if (++on->nodes > NODES_MOST || is_hopeless(on)) return;
    if (on->depth == on->actions) {
        keep_best(on);
        return;
    }
    uint32_t count = list_branches(on, branches, &rank, &first_end);
    if (isfinite(on->problem->limit)) follow_all_ranks(on, branches, count);
    else follow_first_rank(on, branches, count, rank, first_end);
}

/* The rest of a microbatch's way, and its last W. It ends on the first stage's rank, which begins at 0, so that spans
 * are bounded as makespans are. */
static void fill_tails(exact *on) {
    const qe_search_stage *stages = on->problem->stage;
    uint32_t count = on->problem->stages;
    on->tail[I][0] = stages[0].time[W];
    for (uint32_t s = 1; s < count; s++) {
        on->tail[I][s] = stages[s].backward + stages[s - 1].time[I] + on->tail[I][s - 1];
    }
    on->tail[F][count - 1] = stages[count - 1].time[I] + on->tail[I][count - 1];
    for (uint32_t s = count - 1; s-- > 0;) {
        on->tail[F][s] = stages[s].forward + stages[s + 1].time[F] + on->tail[F][s + 1];
    }
}

static void write_rows(const exact *on, qe_action *rows_out) {
    uint32_t placed[QE_SEARCH_EXACT_MAX] = {0};
    for (uint32_t i = 0; i < on->actions; i++) {
        uint32_t rank = on->problem->stage[on->best[i].stage].rank;
        rows_out[(size_t)rank * on->problem->row_count + placed[rank]++] = on->best[i];
    }
}

int qe_search_exact_takes(const qe_search_problem *problem) {
    const qe_simulation_request *times = &problem->request->times;
    if ((uint64_t)problem->ranks * problem->row_count > QE_SEARCH_EXACT_MAX || times->bandwidth > 0.0) return 0;
    if (times->pair > 0.0 && times->pair < 1.0) return 0;
    for (uint32_t i = 0; i < times->cost_count; i++) {
        const qe_stage_cost *cost = &times->costs[i];
        if (cost->keep[QE_KEEP_W] > 0.0) return 0;
        if (cost->time[QE_ACTION_B] < cost->time[QE_ACTION_I] + cost->time[QE_ACTION_W] - problem->grain) return 0;
    }
    return 1;
}

qe_search_verdict qe_search_exact(const qe_search_problem *problem, double value, qe_action *rows_out) {
    exact on = {.problem = problem, .value = value, .actions = problem->ranks * problem->row_count};
    QE_ASSERT(qe_search_exact_takes(problem));
    for (uint32_t rank = 0; rank < problem->ranks; rank++) {
        on.begin[rank] = -1.0;
        on.left[rank] = problem->work[rank];
    }
    fill_tails(&on);
    visit(&on);
    if (on.found) write_rows(&on, rows_out);
    return (qe_search_verdict){.found = (uint8_t)on.found, .proved = on.nodes <= NODES_MOST};
}
