/* The certificate against a slow judge of its own: every action, send and receive is a node, every rule of
 * docs/schedules.md an edge, and the transitive closure of all of them says what can run. Thousands of random small
 * schedules and mutants of named ones, under every transport. A counterexample must be true, a shortest cycle through
 * the first stuck thing, and hold no constraint that can go. */
#include "unit/schedule/support.h"

#include "qeffect/certificate.h"

enum { ACTIONS = 64, NODES = 3 * ACTIONS, STAGES = 8, RANKS = 4, CASES = 20000, WORDS = NODES / 64 };

typedef struct world {
    qe_schedule s;
    qe_action actions[ACTIONS];
    uint32_t begin[RANKS + 1], stage_rank[STAGES];
} world;

static uint32_t roll(uint64_t *seed, uint32_t sides) {
    *seed = *seed * 6364136223846793005U + 1442695040888963407U;
    return (uint32_t)((*seed >> 33) % sides);
}

static uint32_t count_of(const world *w) { return w->s.rank_begin[w->s.ranks]; }

static uint32_t row_of(const world *w, uint32_t index) {
    uint32_t rank = 0;
    while (w->begin[rank + 1] <= index) rank++;
    return rank;
}

/* The first action of a stage and microbatch in a lane (0: F, 1: I or B, 2: W or B); ACTIONS: none. */
static uint32_t find(const world *w, int64_t stage, uint32_t microbatch, int lane) {
    static const uint8_t lanes[QE_ACTION_KINDS] = {1, 2, 4, 6};
    for (uint32_t i = 0; i < count_of(w); i++) {
        const qe_action *a = &w->actions[i];
        if (a->stage == stage && a->microbatch == microbatch && (lanes[a->kind] & 1U << lane)) return i;
    }
    return ACTIONS;
}

static uint32_t producer_of(const world *w, uint32_t i) {
    const qe_action *a = &w->actions[i];
    if (a->kind == QE_ACTION_W) return ACTIONS;
    return a->kind == QE_ACTION_F ? find(w, a->stage - 1, a->microbatch, 0) : find(w, a->stage + 1, a->microbatch, 1);
}

static uint32_t user_of(const world *w, uint32_t i) {
    const qe_action *a = &w->actions[i];
    if (a->kind == QE_ACTION_W) return ACTIONS;
    return a->kind == QE_ACTION_F ? find(w, a->stage + 1, a->microbatch, 0) : find(w, a->stage - 1, a->microbatch, 1);
}

static int crosses(const world *w, uint32_t a, uint32_t b) { return b != ACTIONS && row_of(w, a) != row_of(w, b); }

/* First and last of the unit of an action: a pair runs as one. */
static uint32_t unit_begin(const world *w, uint32_t i) {
    return i > w->begin[row_of(w, i)] && w->actions[i - 1].paired ? i - 1 : i;
}
static uint32_t unit_end(const world *w, uint32_t i) { return unit_begin(w, i) + w->actions[unit_begin(w, i)].paired; }

/* ---- the graph: wait[a][b] says why node a waits for node b ---- */

typedef struct graph {
    const world *w;
    qe_transport t;
    uint8_t wait[NODES][NODES];
    uint64_t reach[NODES][WORDS];
    uint32_t producer[ACTIONS], user[ACTIONS];
} graph;

static uint32_t run_node(uint32_t i) { return i; }
static uint32_t send_node(uint32_t i) { return ACTIONS + i; }

/* The receive for action i; a node of its own only where sends are buffered and queues hold receives. */
static uint32_t receive_node(const graph *g, uint32_t i) {
    int own = g->t.capacity > 0 && g->t.communicators == QE_COMMUNICATORS_ONE && g->t.sends == QE_SENDS_SINGLE;
    return own ? 2 * ACTIONS + i : send_node(g->producer[i]);
}

static int sends(const graph *g, uint32_t i) { return crosses(g->w, i, g->user[i]); }
static int receives(const graph *g, uint32_t i) { return crosses(g->w, i, g->producer[i]); }

static void add(graph *g, uint32_t a, uint32_t b, qe_wait why) {
    if (g->wait[a][b] == QE_WAIT_NONE) g->wait[a][b] = (uint8_t)why;
}

static void add_input(graph *g, uint32_t i, uint32_t of, qe_wait why) {
    int direct = g->t.sends == QE_SENDS_SINGLE && g->t.communicators == QE_COMMUNICATORS_EDGE && g->t.capacity == 0;
    if (g->producer[of] == ACTIONS) return;
    if (receives(g, of) && !direct) add(g, run_node(i), receive_node(g, of), why);
    else add(g, run_node(i), run_node(g->producer[of]), why);
}

static void add_run(graph *g, uint32_t i) {
    const world *w = g->w;
    add_input(g, i, i, QE_WAIT_RESULT);
    if (w->actions[i].paired) {
        const qe_action *second = &w->actions[i + 1];
        add_input(g, i, i + 1, QE_WAIT_PAIR);
        if (second->kind != QE_ACTION_F) {
            add(g, i, find(w, second->stage, second->microbatch, second->kind == QE_ACTION_W), QE_WAIT_PAIR);
        }
    }
    for (uint32_t j = w->begin[row_of(w, i)]; j < i; j++) {
        add(g, run_node(i), run_node(j), QE_WAIT_ROW);
        if (g->t.sends == QE_SENDS_BATCHED && j < unit_begin(w, i) && sends(g, j)) {
            add(g, run_node(i), send_node(j), QE_WAIT_BATCH);
        }
    }
}

/* Place of a send or receive in its rank's queue: a unit's receives, then its sends. */
static uint32_t queue_place(const graph *g, uint32_t i, int is_send) {
    return 4 * unit_begin(g->w, i) + (is_send ? 2 : 0) + (i - unit_begin(g->w, i));
}

static void add_queue(graph *g, uint32_t node, uint32_t rank, uint32_t place) {
    for (uint32_t j = g->w->begin[rank]; j < g->w->begin[rank + 1]; j++) {
        if (receives(g, j) && queue_place(g, j, 0) < place) add(g, node, receive_node(g, j), QE_WAIT_QUEUE);
        if (sends(g, j) && queue_place(g, j, 1) < place) add(g, node, send_node(j), QE_WAIT_QUEUE);
    }
}

/* Message number k on its edge waits until the use number k - capacity of that edge, in the row of its user. */
static void add_buffer(graph *g, uint32_t i) {
    uint32_t from = row_of(g->w, i), to = row_of(g->w, g->user[i]), number = 0, used = 0;
    for (uint32_t j = g->w->begin[from]; j < i; j++) number += sends(g, j) && row_of(g->w, g->user[j]) == to;
    if (number < g->t.capacity) return;
    for (uint32_t j = g->w->begin[to]; j < g->w->begin[to + 1]; j++) {
        if (!receives(g, j) || row_of(g->w, g->producer[j]) != from) continue;
        if (used++ == number - g->t.capacity) add(g, send_node(i), run_node(j), QE_WAIT_BUFFER);
    }
}

static void add_send(graph *g, uint32_t i) {
    const world *w = g->w;
    uint32_t from = row_of(w, i), to = row_of(w, g->user[i]), node = send_node(i);
    add(g, node, g->t.sends == QE_SENDS_BATCHED ? unit_end(w, i) : i, QE_WAIT_SEND);
    if (g->t.capacity > 0) add_buffer(g, i);
    if (g->t.sends == QE_SENDS_BATCHED) {
        for (uint32_t j = w->begin[to]; g->t.capacity == 0 && j < unit_begin(w, g->user[i]); j++) {
            add(g, node, run_node(j), QE_WAIT_POST);
        }
    } else if (g->t.communicators == QE_COMMUNICATORS_EDGE) {
        for (uint32_t j = w->begin[from]; j < i; j++) {
            if (sends(g, j) && row_of(w, g->user[j]) == to) add(g, node, send_node(j), QE_WAIT_QUEUE);
        }
    } else {
        add_queue(g, node, from, queue_place(g, i, 1));
        if (g->t.capacity == 0) add_queue(g, node, to, queue_place(g, g->user[i], 0));
    }
}

static void close_graph(graph *g) {
    memset(g->reach, 0, sizeof g->reach);
    for (uint32_t a = 0; a < NODES; a++) {
        for (uint32_t b = 0; b < NODES; b++) {
            if (g->wait[a][b]) g->reach[a][b / 64] |= 1ULL << b % 64;
        }
    }
    for (uint32_t k = 0; k < NODES; k++) {
        for (uint32_t a = 0; a < NODES; a++) {
            if (!(g->reach[a][k / 64] >> k % 64 & 1)) continue;
            for (uint32_t word = 0; word < WORDS; word++) g->reach[a][word] |= g->reach[k][word];
        }
    }
}

static void build(graph *g, const world *w, const qe_transport *t) {
    memset(g->wait, 0, sizeof g->wait);
    g->w = w;
    g->t = *t;
    for (uint32_t i = 0; i < count_of(w); i++) {
        g->producer[i] = producer_of(w, i);
        g->user[i] = user_of(w, i);
    }
    for (uint32_t i = 0; i < count_of(w); i++) {
        add_run(g, i);
        int edge = t->sends == QE_SENDS_SINGLE && t->communicators == QE_COMMUNICATORS_EDGE && t->capacity == 0;
        if (sends(g, i) && !edge) add_send(g, i);
        if (!receives(g, i) || receive_node(g, i) < 2 * ACTIONS) continue;
        add(g, receive_node(g, i), send_node(g->producer[i]), QE_WAIT_RESULT);
        add_queue(g, receive_node(g, i), row_of(w, i), queue_place(g, i, 0));
    }
    close_graph(g);
}

static int reaches(const graph *g, uint32_t a, uint32_t b) { return (int)(g->reach[a][b / 64] >> b % 64 & 1); }

/* It is on a cycle, or waits for one. */
static int never_happens(const graph *g, uint32_t node) {
    for (uint32_t b = 0; b < NODES; b++) {
        if (reaches(g, b, b) && (b == node || reaches(g, node, b))) return 1;
    }
    return 0;
}

static uint32_t count_stuck(const graph *g) {
    uint32_t stuck = 0;
    for (uint32_t i = 0; i < count_of(g->w); i++) stuck += (uint32_t)never_happens(g, run_node(i));
    return stuck;
}

/* ---- is the counterexample true, shortest, first and irreducible? ---- */

static uint32_t shortest_through(const graph *g, uint32_t start) {
    uint32_t distance[NODES], queue[NODES], queued = 0;
    for (uint32_t i = 0; i < NODES; i++) distance[i] = NODES;
    distance[start] = 0;
    queue[queued++] = start;
    for (uint32_t next = 0; next < queued; next++) {
        uint32_t a = queue[next];
        if (g->wait[a][start]) return distance[a] + 1;
        for (uint32_t b = 0; b < NODES; b++) {
            if (!g->wait[a][b] || distance[b] != NODES) continue;
            distance[b] = distance[a] + 1;
            queue[queued++] = b;
        }
    }
    return 0;
}

/* What stands first in a rank's queue and never happens; NODES: nothing. */
static uint32_t queue_head(const graph *g, uint32_t rank) {
    uint32_t head = NODES, first = UINT32_MAX;
    if (g->t.sends == QE_SENDS_BATCHED || g->t.communicators == QE_COMMUNICATORS_EDGE) return NODES;
    for (uint32_t i = g->w->begin[rank]; i < g->w->begin[rank + 1]; i++) {
        for (int is_send = 0; is_send < 2; is_send++) {
            if (!(is_send ? sends(g, i) : receives(g, i)) || queue_place(g, i, is_send) >= first) continue;
            uint32_t node = is_send ? send_node(i) : receive_node(g, i);
            if (!never_happens(g, node)) continue;
            first = queue_place(g, i, is_send);
            head = node;
        }
    }
    return head;
}

static uint32_t first_stuck(const graph *g) {
    for (uint32_t rank = 0; rank < g->w->s.ranks; rank++) {
        uint32_t i = g->w->begin[rank];
        while (i < g->w->begin[rank + 1] && !never_happens(g, run_node(i))) i++;
        if (i < g->w->begin[rank + 1] && reaches(g, run_node(i), run_node(i))) return run_node(i);
        uint32_t head = queue_head(g, rank);
        if (head != NODES && reaches(g, head, head)) return head;
    }
    return NODES;
}

static uint32_t node_of(const graph *g, const qe_cited *cited) {
    uint32_t index = g->w->begin[cited->rank] + cited->index;
    const qe_action *here = &g->w->actions[index], *said = &cited->action;
    assert_true(here->stage == said->stage && here->microbatch == said->microbatch && here->kind == said->kind);
    return (cited->part == QE_PART_RUN ? 0 : cited->part == QE_PART_SEND ? ACTIONS : 2 * ACTIONS) + index;
}

/* With all constraints but `without`, the cited nodes can be put in an order: a chain from behind it. */
static int satisfiable(const uint32_t *from, const uint32_t *to, uint32_t count, uint32_t without) {
    uint8_t gone[NODES] = {0};
    for (uint32_t round = 0; round < count; round++) {
        for (uint32_t i = 0; i < count; i++) {
            int waits = 0;
            for (uint32_t k = 0; k < count; k++) waits |= k != without && from[k] == from[i] && !gone[to[k]];
            if (!waits) gone[from[i]] = 1;
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        if (!gone[from[i]]) return 0;
    }
    return 1;
}

static void assert_cycle(const graph *g, const qe_counterexample *c) {
    uint32_t from[NODES], to[NODES];
    assert_int_equal(c->found, count_stuck(g));
    assert_true(c->cited_count > 0 && c->cited_count < NODES);
    for (uint32_t i = 0; i < c->cited_count; i++) {
        from[i] = node_of(g, &c->cited[i]);
        to[i] = node_of(g, &c->cited[(i + 1) % c->cited_count]);
        assert_int_equal(g->wait[from[i]][to[i]], c->cited[i].wait);
    }
    assert_int_equal(from[0], first_stuck(g));
    assert_int_equal(c->cited_count, shortest_through(g, from[0]));
    assert_false(satisfiable(from, to, c->cited_count, NODES));
    for (uint32_t i = 0; i < c->cited_count; i++) assert_true(satisfiable(from, to, c->cited_count, i));
}

/* ---- rows alone ---- */

static qe_rule judge_counts(const world *w) {
    int many = 0, few = 0, training = 0, early = 0;
    for (uint32_t i = 0; i < count_of(w); i++) {
        if (qe_schedule_rank(&w->s, w->actions[i].stage, w->actions[i].microbatch) != row_of(w, i)) {
            return QE_RULE_SCHEDULE_PLACE;
        }
        training |= w->actions[i].kind != QE_ACTION_F;
    }
    for (uint32_t stage = 0; stage < w->s.stages; stage++) {
        for (uint32_t m = 0; m < w->s.microbatches; m++) {
            uint32_t n[QE_ACTION_KINDS] = {0};
            for (uint32_t i = 0; i < count_of(w); i++) {
                if (w->actions[i].stage == stage && w->actions[i].microbatch == m) n[w->actions[i].kind]++;
            }
            uint32_t input = n[QE_ACTION_I] + n[QE_ACTION_B], weight = n[QE_ACTION_W] + n[QE_ACTION_B];
            many |= n[QE_ACTION_F] > 1 || input > 1 || weight > 1;
            few |= n[QE_ACTION_F] == 0 || (training && (input == 0 || weight == 0));
            if (!training) continue;
            uint32_t f = find(w, stage, m, 0), i = find(w, stage, m, 1), last = find(w, stage, m, 2);
            early |= f > i || i > last;
        }
    }
    return many ? QE_RULE_SCHEDULE_DUPLICATE : few ? QE_RULE_SCHEDULE_MISSING : early ? QE_RULE_SCHEDULE_ORDER : 0;
}

/* Forwards kept at an action: begun at its unit's end, not ended before its unit. */
static int is_kept(const world *w, uint32_t f, uint32_t at) {
    uint32_t end = find(w, w->actions[f].stage, w->actions[f].microbatch, 2);
    if (w->actions[f].kind != QE_ACTION_F || row_of(w, f) != row_of(w, at)) return 0;
    if (end == ACTIONS) return unit_begin(w, f) == unit_begin(w, at); /* an evaluation keeps nothing */
    return f <= unit_end(w, at) && end >= unit_begin(w, at);
}

static uint32_t kept_at(const world *w, uint32_t at) {
    uint32_t kept = 0;
    for (uint32_t f = 0; f < count_of(w); f++) kept += (uint32_t)is_kept(w, f, at);
    return kept;
}

static uint32_t peak_of(const world *w, uint32_t rank) {
    uint32_t peak = 0;
    for (uint32_t i = w->begin[rank]; i < w->begin[rank + 1]; i++) peak = kept_at(w, i) > peak ? kept_at(w, i) : peak;
    return peak;
}

static uint32_t stages_on(const world *w, uint32_t rank) {
    uint32_t stages = 0;
    for (uint32_t stage = 0; stage < w->s.stages; stage++) stages += w->stage_rank[stage] == rank;
    return stages;
}

static int over_limit(const world *w, double limit) {
    for (uint32_t rank = 0; limit > 0.0 && rank < w->s.ranks; rank++) {
        if (peak_of(w, rank) > limit * stages_on(w, rank) + 1e-6) return 1;
    }
    return 0;
}

static int turned(const world *w, const qe_action *a) { return a->microbatch >= w->s.microbatches - w->s.reversed; }

/* Two actions of the same weights: the same stage, the same way. */
static int same_weights(const world *w, uint32_t a, uint32_t b) {
    return w->actions[a].stage == w->actions[b].stage && turned(w, &w->actions[a]) == turned(w, &w->actions[b]);
}

static int adds(const qe_action *a) { return a->kind == QE_ACTION_W || a->kind == QE_ACTION_B; }

/* Does {first, second} break the rule? By definition and not by a walk. */
static int breaks(const world *w, qe_rule rule, uint32_t first, uint32_t second) {
    const qe_action *a = &w->actions[first], *b = &w->actions[second];
    uint32_t low = turned(w, a) ? w->s.microbatches - w->s.reversed : 0;
    uint32_t high = turned(w, a) ? w->s.microbatches : w->s.microbatches - w->s.reversed;
    if (first >= second || !same_weights(w, first, second)) return 0;
    if (rule == QE_RULE_SCALE_BUSY) {
        return (a->kind == QE_ACTION_I || a->kind == QE_ACTION_B) && a->microbatch + 1 == high;
    }
    if (rule == QE_RULE_CACHE_EMPTY) return b->kind == QE_ACTION_F && b->microbatch == low;
    return adds(a) && adds(b) && a->microbatch > b->microbatch;
}

static int any_breaks(const world *w, qe_rule rule) {
    for (uint32_t a = 0; a < count_of(w); a++) {
        for (uint32_t b = a + 1; b < count_of(w); b++) {
            if (breaks(w, rule, a, b)) return 1;
        }
    }
    return 0;
}

static qe_rule judge_rows(const world *w, const qe_certificate_request *request) {
    if (over_limit(w, request->memory_limit)) return QE_RULE_SCHEDULE_MEMORY;
    if (request->fold == QE_FOLD_LAST_MICROBATCH && any_breaks(w, QE_RULE_SCALE_BUSY)) return QE_RULE_SCALE_BUSY;
    if (request->fill == QE_FILL_FIRST_MICROBATCH && any_breaks(w, QE_RULE_CACHE_EMPTY)) return QE_RULE_CACHE_EMPTY;
    int ordered = request->gradients == QE_GRADIENTS_ASCENDING;
    return ordered && any_breaks(w, QE_RULE_GRAD_ORDER) ? QE_RULE_GRAD_ORDER : QE_RULE_NONE;
}

/* Kept together at one action, exactly one more than allowed: without any of them it is allowed. */
static void assert_memory(const world *w, const qe_counterexample *c, double limit) {
    uint32_t rank = c->cited[0].rank, last = w->begin[rank] + c->cited[c->cited_count - 1].index;
    assert_true(c->cited_count > limit * stages_on(w, rank) + 1e-6);
    assert_true(c->cited_count - 1 <= limit * stages_on(w, rank) + 1e-6);
    for (uint32_t i = 0; i < c->cited_count; i++) {
        assert_true(is_kept(w, w->begin[rank] + c->cited[i].index, last));
        assert_true(i == 0 || c->cited[i - 1].index < c->cited[i].index);
    }
}

static void assert_facts(const graph *g, const qe_certificate_request *request, const qe_counterexample *c) {
    const world *w = g->w;
    if (c->rule == QE_RULE_SCHEDULE_CYCLE) assert_cycle(g, c);
    if (c->rule == QE_RULE_SCHEDULE_MEMORY) assert_memory(w, c, request->memory_limit);
    if (c->rule != QE_RULE_SCALE_BUSY && c->rule != QE_RULE_CACHE_EMPTY && c->rule != QE_RULE_GRAD_ORDER) return;
    assert_int_equal(c->cited_count, 2);
    assert_int_equal(c->cited[0].rank, c->cited[1].rank);
    uint32_t begin = w->begin[c->cited[0].rank];
    assert_true(breaks(w, c->rule, begin + c->cited[0].index, begin + c->cited[1].index));
}

static void assert_certificate(const world *w, const qe_certificate_request *request, const qe_certificate *c) {
    static graph g;
    qe_transport t = request->transport;
    for (uint32_t rank = 0; rank < w->s.ranks; rank++) assert_int_equal(c->rank[rank].peak.live, peak_of(w, rank));
    assert_int_equal(c->gradient_order == QE_GRADIENTS_OWN, any_breaks(w, QE_RULE_GRAD_ORDER));
    if (!request->find_capacity) return;
    for (t.capacity = 1; t.capacity < ACTIONS; t.capacity++) {
        build(&g, w, &t);
        if (count_stuck(&g) == 0) break;
    }
    assert_int_equal(c->least_capacity, t.capacity);
}

/* ---- cases ---- */

typedef struct score {
    uint32_t of[QE_RULE_COUNT], by_transport[5][2], longest;
} score;

static const char *const TRANSPORTS[] = {"edge", "edge, buffers", "one", "one, buffers", "batched"};

static void say_rows(const world *w) {
    char text[2048];
    for (uint32_t r = 0; r < w->s.ranks; r++) print_message("%s\n", row_text(&w->s, r, text, sizeof text));
}

static void attach(world *w) {
    w->s.actions = w->actions;
    w->s.rank_begin = w->begin;
    w->s.stage_rank = w->stage_rank;
}

/* The slow judge sees no pairs where their halves run apart. */
static void judge(const world *given, const qe_certificate_request *request, score *sum) {
    static graph g;
    static world seen;
    const world *w = &seen;
    seen = *given;
    attach(&seen);
    int apart = request->transport.release == QE_RELEASE_OP;
    for (uint32_t i = 0; apart && i < count_of(w); i++) seen.actions[i].paired = 0;
    qe_certificate certificate = {0};
    qe_counterexample c = {0};
    const qe_transport *t = &request->transport;
    qe_status status = qe_schedule_certify(&given->s, request, &certificate, &c, NULL);
    qe_rule expected = judge_counts(w);
    build(&g, w, t);
    if (expected == QE_RULE_NONE) {
        expected = count_stuck(&g) > 0 ? QE_RULE_SCHEDULE_CYCLE : judge_rows(w, request);
        int kind = t->sends == QE_SENDS_BATCHED ? 4 : 2 * t->communicators + (t->capacity > 0);
        sum->by_transport[kind][expected == QE_RULE_SCHEDULE_CYCLE]++;
    }
    if (c.rule != expected || (status == QE_OK) != (expected == QE_RULE_NONE)) {
        say_rows(w);
        fail_msg("certificate says %s, the slow judge %s; sends %d communicators %d capacity %u", qe_rule_id(c.rule),
                 qe_rule_id(expected), t->sends, t->communicators, t->capacity);
    }
    sum->of[expected]++;
    if (c.cited_count > sum->longest) sum->longest = c.cited_count;
    if (status == QE_OK) assert_certificate(w, request, &certificate);
    else assert_facts(&g, request, &c);
    qe_certificate_deinit(&certificate);
    qe_counterexample_deinit(&c);
}

static int named_world(uint64_t *seed, world *w) {
    uint32_t names = 0;
    while (qe_schedule_name(names) != NULL) names++;
    qe_schedule_request request = {.name = qe_schedule_name(roll(seed, names)), .ranks = 1 + roll(seed, RANKS),
                                   .microbatches = 1 + roll(seed, 8), .forward_only = roll(seed, 16) == 0};
    request.chunks = roll(seed, 2) ? qe_schedule_usual_chunks(request.name) : 1 + roll(seed, 3);
    qe_schedule s;
    if (qe_schedule_generate(&request, &s, NULL) != QE_OK) return 0;
    int fits = s.stages <= STAGES && s.rank_begin[s.ranks] < ACTIONS;
    if (fits) {
        *w = (world){.s = s};
        memcpy(w->actions, s.actions, s.rank_begin[s.ranks] * sizeof *s.actions);
        memcpy(w->begin, s.rank_begin, (s.ranks + 1) * sizeof *s.rank_begin);
        memcpy(w->stage_rank, s.stage_rank, s.stages * sizeof *s.stage_rank);
        attach(w);
    }
    qe_schedule_deinit(&s);
    return fits;
}

/* What comes next of a pair, if its inputs are there: any order that can be, on any ranks. */
static int take_next(uint64_t *seed, uint8_t done[STAGES][8], uint32_t stages, uint32_t stage, uint32_t m,
                     qe_action *out) {
    uint8_t *now = &done[stage][m];
    *out = (qe_action){.stage = (uint16_t)stage, .microbatch = m};
    if (*now == 7) return 0;
    if (*now == 0) {
        if (stage > 0 && done[stage - 1][m] == 0) return 0;
        *now = 1;
    } else if (*now == 1) {
        if (stage + 1 < stages && (done[stage + 1][m] & 2) == 0) return 0;
        out->kind = roll(seed, 3) == 0 ? QE_ACTION_B : QE_ACTION_I;
        *now = out->kind == QE_ACTION_B ? 7 : 3;
    } else {
        out->kind = QE_ACTION_W;
        *now = 7;
    }
    return 1;
}

static void random_world(uint64_t *seed, world *w) {
    qe_action order[ACTIONS];
    uint8_t done[STAGES][8] = {{0}};
    uint32_t count = 0, left, next = 0;
    *w = (world){.s = {.ranks = 1 + roll(seed, 3), .microbatches = 1 + roll(seed, 4)}};
    w->s.stages = w->s.ranks + roll(seed, 3);
    for (uint32_t s = 0; s < w->s.stages; s++) w->stage_rank[s] = s < w->s.ranks ? s : roll(seed, w->s.ranks);
    for (left = w->s.stages * w->s.microbatches; left > 0;) {
        uint32_t stage = roll(seed, w->s.stages), m = roll(seed, w->s.microbatches);
        if (!take_next(seed, done, w->s.stages, stage, m, &order[count])) continue;
        left -= done[stage][m] == 7;
        count++;
    }
    for (uint32_t rank = 0; rank < w->s.ranks; rank++) {
        w->begin[rank] = next;
        for (uint32_t i = 0; i < count; i++) {
            if (w->stage_rank[order[i].stage] == rank) w->actions[next++] = order[i];
        }
    }
    w->begin[w->s.ranks] = next;
    attach(w);
}

static void drop(world *w, uint32_t index) {
    uint32_t rank = row_of(w, index);
    memmove(&w->actions[index], &w->actions[index + 1], (count_of(w) - index - 1) * sizeof *w->actions);
    for (uint32_t r = rank + 1; r <= w->s.ranks; r++) w->begin[r]--;
}

static void insert(world *w, uint32_t rank, uint32_t index, qe_action action) {
    if (count_of(w) == ACTIONS) return;
    memmove(&w->actions[index + 1], &w->actions[index], (count_of(w) - index) * sizeof *w->actions);
    w->actions[index] = action;
    for (uint32_t r = rank + 1; r <= w->s.ranks; r++) w->begin[r]++;
}

/* Swap of neighbours, drop, duplicate, move within the row or to another. */
static void mutate(uint64_t *seed, world *w) {
    uint32_t kind = roll(seed, 10), index = roll(seed, count_of(w)), rank = row_of(w, index);
    qe_action action = w->actions[index];
    if (count_of(w) < 2) return;
    if (kind < 5) {
        if (index + 1 == w->begin[rank + 1]) return;
        w->actions[index] = w->actions[index + 1];
        w->actions[index + 1] = action;
    } else if (kind < 8) {
        drop(w, index);
        if (roll(seed, 12) == 0) return;
        if (roll(seed, 12) == 0) rank = roll(seed, w->s.ranks);
        insert(w, rank, w->begin[rank] + roll(seed, w->begin[rank + 1] - w->begin[rank] + 1), action);
    } else if (roll(seed, 6) == 0) {
        insert(w, rank, w->begin[rank] + roll(seed, w->begin[rank + 1] - w->begin[rank] + 1), action);
    } else if (action.kind != QE_ACTION_W && index + 1 < w->begin[rank + 1]) {
        w->actions[index].paired = 1;
    }
}

static void mend_pairs(world *w) {
    for (uint32_t i = 0; i < count_of(w); i++) {
        int last = i + 1 == w->begin[row_of(w, i) + 1];
        if (last || w->actions[i + 1].paired) w->actions[i].paired = 0;
    }
}

static qe_certificate_request random_request(uint64_t *seed) {
    qe_certificate_request request = {.fold = roll(seed, 8) == 0, .fill = roll(seed, 8) == 0,
                                      .gradients = roll(seed, 4) ? QE_GRADIENTS_OWN : QE_GRADIENTS_ASCENDING,
                                      .find_capacity = roll(seed, 16) == 0};
    request.transport.sends = roll(seed, 3) == 0 ? QE_SENDS_BATCHED : QE_SENDS_SINGLE;
    request.transport.communicators = roll(seed, 3) == 0 ? QE_COMMUNICATORS_EDGE : QE_COMMUNICATORS_ONE;
    request.transport.release = roll(seed, 4) == 0 ? QE_RELEASE_OP : QE_RELEASE_PAIR;
    request.transport.capacity = roll(seed, 2) ? 0 : 1 + roll(seed, 3);
    if (roll(seed, 3) == 0) request.memory_limit = 0.5 + roll(seed, 12) / 3.0;
    return request;
}

static void the_certificate_agrees_with_the_closure_of_everything(void **state) {
    (void)state;
    score sum = {{0}, {{0}}, 0};
    uint64_t seed = 2026;
    for (uint32_t n = 0; n < CASES;) {
        world w;
        if (roll(&seed, 3) == 0) random_world(&seed, &w);
        else if (!named_world(&seed, &w)) continue;
        for (uint32_t changes = roll(&seed, 4); changes > 0; changes--) mutate(&seed, &w);
        if (count_of(&w) == 0) continue;
        mend_pairs(&w);
        qe_certificate_request request = random_request(&seed);
        judge(&w, &request, &sum);
        n++;
    }
    for (int rule = 0; rule < QE_RULE_COUNT; rule++) {
        if (sum.of[rule] > 0) print_message("%6u %s\n", sum.of[rule], qe_rule_id((qe_rule)rule));
    }
    for (int kind = 0; kind < 5; kind++) {
        const uint32_t *ends = sum.by_transport[kind];
        print_message("%-14s %u run, %u stop\n", TRANSPORTS[kind], ends[0], ends[1]);
        assert_true(ends[0] > 50 && ends[1] > 50);
    }
    print_message("longest counterexample: %u facts\n", sum.longest);
    static const qe_rule met[] = {QE_RULE_NONE, QE_RULE_SCHEDULE_PLACE, QE_RULE_SCHEDULE_DUPLICATE,
                                  QE_RULE_SCHEDULE_MISSING, QE_RULE_SCHEDULE_ORDER, QE_RULE_SCHEDULE_CYCLE,
                                  QE_RULE_SCHEDULE_MEMORY, QE_RULE_SCALE_BUSY, QE_RULE_CACHE_EMPTY, QE_RULE_GRAD_ORDER};
    for (size_t i = 0; i < sizeof met / sizeof met[0]; i++) assert_true(sum.of[met[i]] > 10);
}

/* ---- streams ---- */

static void a_stream_has_the_rows_of_the_stored_schedule_and_the_same_verdicts(void **state) {
    (void)state;
    static const char *const names[] = {"gpipe", "1f1b", "zbh1"};
    uint64_t seed = 9;
    uint32_t refused = 0;
    for (uint32_t n = 0; n < 3000; n++) {
        qe_schedule_request order = {.name = names[n % 3], .ranks = 1 + roll(&seed, 9), .chunks = 1};
        order.microbatches = order.ranks + roll(&seed, 20);
        if (n % 3 != 2) order.microbatches = 1 + roll(&seed, 20);
        qe_certificate_request request = random_request(&seed);
        qe_certificate streamed = {0}, stored = {0};
        qe_counterexample a = {0}, b = {0};
        qe_schedule s = generated(order.name, order.ranks, 1, order.microbatches);
        qe_status status = qe_schedule_certify(&s, &request, &stored, &b, NULL);
        assert_int_equal(qe_schedule_certify_streamed(&order, &request, &streamed, &a, NULL), status);
        assert_int_equal(a.rule, b.rule);
        assert_int_equal(a.found, b.found);
        assert_int_equal(a.cited_count, b.cited_count);
        if (a.cited_count > 0) assert_memory_equal(a.cited, b.cited, a.cited_count * sizeof *a.cited);
        if (status == QE_OK) {
            assert_int_equal(streamed.actions, stored.actions);
            assert_int_equal(streamed.least_capacity, stored.least_capacity);
            assert_memory_equal(streamed.rank, stored.rank, order.ranks * sizeof *stored.rank);
        }
        refused += status != QE_OK;
        qe_certificate_deinit(&streamed);
        qe_certificate_deinit(&stored);
        qe_counterexample_deinit(&a);
        qe_counterexample_deinit(&b);
        qe_schedule_deinit(&s);
    }
    print_message("3000 streamed and stored, %u refused alike\n", refused);
    assert_true(refused > 300);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_certificate_agrees_with_the_closure_of_everything),
        cmocka_unit_test(a_stream_has_the_rows_of_the_stored_schedule_and_the_same_verdicts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
