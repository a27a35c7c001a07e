/* Small worlds, whole: every generated schedule of up to 3 ranks and 4 microbatches with every single mutation, and
 * random rows, judged by the checker and by brute force. The brute force knows nothing of the checker's graph: it
 * counts actions, then runs ranks, channels and rendezvous until nothing moves. */
#include "unit/schedule/support.h"

enum { ACTIONS = 128, RANKS = 4, STAGES = 12, MICROBATCHES = 5 };

static uint32_t count_of(const qe_schedule *s) { return s->rank_begin[s->ranks]; }

static uint32_t row_of(const qe_schedule *s, uint32_t index) {
    uint32_t rank = 0;
    while (s->rank_begin[rank + 1] <= index) rank++;
    return rank;
}

/* ---- counts ---- */

typedef struct tally {
    uint32_t of[STAGES][MICROBATCHES][QE_ACTION_KINDS];
    int training;
} tally;

static tally tally_of(const qe_schedule *s) {
    tally t = {.training = 0};
    for (uint32_t i = 0; i < count_of(s); i++) {
        t.of[s->actions[i].stage][s->actions[i].microbatch][s->actions[i].kind]++;
        if (s->actions[i].kind != QE_ACTION_F) t.training = 1;
    }
    return t;
}

static int placed_well(const qe_schedule *s) {
    for (uint32_t i = 0; i < count_of(s); i++) {
        if (qe_schedule_rank(s, s->actions[i].stage, s->actions[i].microbatch) != row_of(s, i)) return 0;
    }
    return 1;
}

static int counted(const qe_schedule *s, const tally *t, int *too_many_out, int *too_few_out) {
    for (uint32_t stage = 0; stage < s->stages; stage++) {
        for (uint32_t m = 0; m < s->microbatches; m++) {
            const uint32_t *n = t->of[stage][m];
            uint32_t input = n[QE_ACTION_I] + n[QE_ACTION_B], weight = n[QE_ACTION_W] + n[QE_ACTION_B];
            if (n[QE_ACTION_F] > 1 || input > 1 || weight > 1) *too_many_out = 1;
            if (n[QE_ACTION_F] < 1 || (t->training && (input < 1 || weight < 1))) *too_few_out = 1;
        }
    }
    return !*too_many_out && !*too_few_out;
}

/* ---- brute-force run with channels ---- */

typedef struct channel {
    uint32_t message[ACTIONS]; /* producers, in the order of the sender's row */
    uint32_t count, sent, posted, moved;
} channel;

typedef struct machine {
    const qe_schedule *s;
    channel edge[RANKS][RANKS][2];
    uint32_t next[RANKS];
    uint8_t done[ACTIONS];
    int moving; /* something has happened in this round: a message, a posted receive, an action */
} machine;

static int same_pair(const qe_action *a, long stage, uint32_t microbatch) {
    return a->stage == stage && a->microbatch == microbatch;
}

/* The first action of that description, ACTIONS if there is none. `lane` 0: F, 1: I or B. */
static uint32_t find(const qe_schedule *s, long stage, uint32_t microbatch, int lane) {
    for (uint32_t i = 0; i < count_of(s); i++) {
        uint8_t kind = s->actions[i].kind;
        int fits = lane == 0 ? kind == QE_ACTION_F : kind == QE_ACTION_I || kind == QE_ACTION_B;
        if (fits && same_pair(&s->actions[i], stage, microbatch)) return i;
    }
    return ACTIONS;
}

static uint32_t producer_of(const qe_schedule *s, uint32_t index) {
    const qe_action *a = &s->actions[index];
    if (a->kind == QE_ACTION_W) return ACTIONS;
    return a->kind == QE_ACTION_F ? find(s, a->stage - 1L, a->microbatch, 0)
                                  : find(s, a->stage + 1L, a->microbatch, 1);
}

/* The channel on which an action's result leaves its rank, or NULL. */
static channel *outlet(machine *m, uint32_t index) {
    const qe_action *a = &m->s->actions[index];
    long to = a->kind == QE_ACTION_F ? a->stage + 1L : a->stage - 1L;
    if (a->kind == QE_ACTION_W || to < 0 || to >= (long)m->s->stages) return NULL;
    uint32_t from_rank = row_of(m->s, index), to_rank = qe_schedule_rank(m->s, (uint32_t)to, a->microbatch);
    return from_rank == to_rank ? NULL : &m->edge[from_rank][to_rank][a->kind != QE_ACTION_F];
}

static void open_channels(machine *m, const qe_schedule *s) {
    memset(m, 0, sizeof *m);
    m->s = s;
    for (uint32_t rank = 0; rank < s->ranks; rank++) m->next[rank] = s->rank_begin[rank];
    for (uint32_t i = 0; i < count_of(s); i++) {
        channel *to = outlet(m, i);
        if (to != NULL) to->message[to->count++] = i;
    }
}

/* A rank about to run `index` posts its receives, in the sender's order, up to the message it needs. */
static int input_arrived(machine *m, uint32_t index) {
    uint32_t producer = producer_of(m->s, index), number = 0;
    if (producer == ACTIONS) return 1;
    channel *from = outlet(m, producer);
    if (from == NULL) return m->done[producer];
    while (from->message[number] != producer) number++;
    for (; from->posted < number + 1; from->posted++) m->moving = 1;
    return from->moved > number;
}

static int local_arrived(const machine *m, uint32_t index) {
    const qe_action *a = &m->s->actions[index];
    if (a->kind == QE_ACTION_F) return 1;
    uint32_t forward = find(m->s, a->stage, a->microbatch, 0);
    if (a->kind != QE_ACTION_W) return m->done[forward];
    return m->done[find(m->s, a->stage, a->microbatch, 1)];
}

static void move_messages(machine *m) {
    for (uint32_t i = 0; i < RANKS * RANKS * 2; i++) {
        channel *c = &m->edge[0][0][0] + i;
        for (; c->moved < c->sent && c->moved < c->posted; c->moved++) m->moving = 1;
    }
}

static void step_rank(machine *m, uint32_t rank) {
    uint32_t index = m->next[rank];
    if (index == m->s->rank_begin[rank + 1]) return;
    int arrived = input_arrived(m, index);
    if (!arrived || !local_arrived(m, index)) return;
    channel *to = outlet(m, index);
    if (to != NULL) to->sent++; /* messages are in row order, so this is the next one */
    m->done[index] = 1;
    m->next[rank]++;
    m->moving = 1;
}

static int runs_to_the_end(machine *m) {
    do {
        m->moving = 0;
        move_messages(m);
        for (uint32_t rank = 0; rank < m->s->ranks; rank++) step_rank(m, rank);
    } while (m->moving);
    for (uint32_t i = 0; i < count_of(m->s); i++) {
        if (!m->done[i]) return 0;
    }
    return 1;
}

static int ordered_on_ranks(const qe_schedule *s) {
    for (uint32_t i = 0; i < count_of(s); i++) {
        const qe_action *a = &s->actions[i];
        if (a->kind == QE_ACTION_F) continue;
        if (find(s, a->stage, a->microbatch, 0) > i) return 0;
        if (a->kind == QE_ACTION_W && find(s, a->stage, a->microbatch, 1) > i) return 0;
    }
    return 1;
}

static qe_rule brute_force(const qe_schedule *s) {
    tally t = tally_of(s);
    int too_many = 0, too_few = 0;
    static machine m;
    if (!placed_well(s)) return QE_RULE_SCHEDULE_PLACE;
    if (!counted(s, &t, &too_many, &too_few)) return too_many ? QE_RULE_SCHEDULE_DUPLICATE : QE_RULE_SCHEDULE_MISSING;
    if (!ordered_on_ranks(s)) return QE_RULE_SCHEDULE_ORDER;
    open_channels(&m, s);
    return runs_to_the_end(&m) ? QE_RULE_NONE : QE_RULE_SCHEDULE_CYCLE;
}

/* ---- is the counterexample a proof, and the shortest? ---- */

static int waits_for(const qe_schedule *s, uint32_t a, uint32_t b) {
    return producer_of(s, a) == b || (row_of(s, a) == row_of(s, b) && b < a);
}

/* Length of the shortest circle through `start`, by distances over all pairs of actions; 0: none. */
static uint32_t shortest_through(const qe_schedule *s, uint32_t start) {
    uint32_t distance[ACTIONS], count = count_of(s), shortest = 0;
    for (uint32_t i = 0; i < count; i++) distance[i] = ACTIONS;
    distance[start] = 0;
    for (int changed = 1; changed;) {
        changed = 0;
        for (uint32_t a = 0; a < count; a++) {
            for (uint32_t b = 0; b < count && distance[a] < ACTIONS; b++) {
                if (distance[a] + 1 >= distance[b] || !waits_for(s, a, b)) continue;
                distance[b] = distance[a] + 1;
                changed = 1;
            }
        }
    }
    for (uint32_t a = 0; a < count; a++) {
        if (a == start || distance[a] == ACTIONS || !waits_for(s, a, start)) continue;
        if (shortest == 0 || distance[a] + 1 < shortest) shortest = distance[a] + 1;
    }
    return shortest;
}

/* Index of a cited action in the schedule. */
static uint32_t cited(const qe_schedule *s, const qe_counterexample *c, uint32_t i) {
    const qe_cited *at = &c->cited[i];
    uint32_t index = s->rank_begin[at->rank] + at->index;
    assert_memory_equal(&s->actions[index], &at->action, sizeof at->action);
    return index;
}

static void assert_cycle_is_shortest(const qe_schedule *s, const qe_counterexample *c) {
    static machine m;
    open_channels(&m, s);
    assert_false(runs_to_the_end(&m));
    uint32_t stuck = 0, first = ACTIONS;
    for (uint32_t i = 0; i < count_of(s); i++) stuck += !m.done[i];
    assert_int_equal(c->found, stuck);
    for (uint32_t i = 0; i < c->cited_count; i++) {
        assert_true(waits_for(s, cited(s, c, i), cited(s, c, (i + 1) % c->cited_count)));
        assert_false(m.done[cited(s, c, i)]);
    }
    for (uint32_t rank = 0; rank < s->ranks && first == ACTIONS; rank++) {
        if (m.next[rank] < s->rank_begin[rank + 1] && shortest_through(s, m.next[rank]) > 0) first = m.next[rank];
    }
    assert_int_equal(cited(s, c, 0), first);
    assert_int_equal(c->cited_count, shortest_through(s, first));
}

static void assert_facts(const qe_schedule *s, const qe_counterexample *c) {
    tally t = tally_of(s);
    const qe_action *a = c->cited_count > 0 ? &c->cited[0].action : NULL;
    const qe_action *b = c->cited_count > 1 ? &c->cited[1].action : NULL;
    if (c->rule == QE_RULE_SCHEDULE_CYCLE) assert_cycle_is_shortest(s, c);
    if (c->rule == QE_RULE_SCHEDULE_DUPLICATE || c->rule == QE_RULE_SCHEDULE_ORDER) {
        assert_int_equal(c->cited_count, 2);
        assert_true(same_pair(a, b->stage, b->microbatch));
        assert_true(cited(s, c, 0) < cited(s, c, 1));
    }
    if (c->rule == QE_RULE_SCHEDULE_MISSING) {
        const uint32_t *n = t.of[c->missing.stage][c->missing.microbatch];
        assert_int_equal(c->cited_count, 0);
        assert_int_equal(n[c->missing.kind], 0);
    }
    if (c->rule == QE_RULE_SCHEDULE_PLACE) {
        uint32_t last = cited(s, c, c->cited_count - 1);
        assert_int_equal(row_of(s, last), c->found);
        assert_int_equal(qe_schedule_rank(s, s->actions[last].stage, s->actions[last].microbatch), c->expected);
    }
}

typedef struct score {
    uint32_t judged, of[QE_RULE_COUNT];
} score;

static void print_score(const score *sum) {
    print_message("%u judged: %u valid, place %u, duplicate %u, missing %u, order %u, cycle %u\n", sum->judged,
                  sum->of[QE_RULE_NONE], sum->of[QE_RULE_SCHEDULE_PLACE], sum->of[QE_RULE_SCHEDULE_DUPLICATE],
                  sum->of[QE_RULE_SCHEDULE_MISSING], sum->of[QE_RULE_SCHEDULE_ORDER],
                  sum->of[QE_RULE_SCHEDULE_CYCLE]);
}

static void judge_both(const qe_schedule *s, score *sum) {
    qe_counterexample c = {0};
    char rows[4][1024];
    qe_status status = qe_schedule_check(s, &c, NULL);
    qe_rule expected = brute_force(s);
    if (c.rule != expected || (status == QE_OK) != (expected == QE_RULE_NONE)) {
        for (uint32_t r = 0; r < s->ranks; r++) print_message("%s\n", row_text(s, r, rows[r], sizeof rows[r]));
        fail_msg("checker says %s, brute force %s", qe_rule_id(c.rule), qe_rule_id(expected));
    }
    assert_facts(s, &c);
    qe_counterexample_deinit(&c);
    sum->judged++;
    sum->of[expected]++;
}

/* ---- mutations ---- */

/* A schedule of its own memory, so that rows can grow. */
typedef struct mutant {
    qe_schedule s;
    qe_action actions[ACTIONS + 1];
    uint32_t begin[RANKS + 1], stage_rank[STAGES];
} mutant;

static void copy_to(mutant *to, const qe_schedule *from) {
    assert_true(count_of(from) <= ACTIONS && from->stages <= STAGES && from->ranks <= RANKS);
    memcpy(to->actions, from->actions, count_of(from) * sizeof *from->actions);
    memcpy(to->begin, from->rank_begin, (from->ranks + 1) * sizeof *from->rank_begin);
    memcpy(to->stage_rank, from->stage_rank, from->stages * sizeof *from->stage_rank);
    to->s = *from;
    to->s.actions = to->actions;
    to->s.rank_begin = to->begin;
    to->s.stage_rank = to->stage_rank;
}

static void drop(mutant *m, uint32_t index) {
    uint32_t rank = row_of(&m->s, index);
    memmove(&m->actions[index], &m->actions[index + 1], (count_of(&m->s) - index - 1) * sizeof *m->actions);
    for (uint32_t r = rank + 1; r <= m->s.ranks; r++) m->begin[r]--;
}

/* Before what is at `index` now, or at the end of the rank's row. */
static void insert(mutant *m, uint32_t rank, uint32_t index, qe_action action) {
    memmove(&m->actions[index + 1], &m->actions[index], (count_of(&m->s) - index) * sizeof *m->actions);
    m->actions[index] = action;
    for (uint32_t r = rank + 1; r <= m->s.ranks; r++) m->begin[r]++;
}

/* A pair whose second action is gone, or begins a pair now, is none any more. */
static void judge_mutant(mutant *m, score *sum) {
    for (uint32_t rank = 0; rank < m->s.ranks; rank++) {
        for (uint32_t i = m->begin[rank]; i < m->begin[rank + 1]; i++) {
            if (i + 1 == m->begin[rank + 1] || m->actions[i + 1].paired) m->actions[i].paired = 0;
        }
    }
    judge_both(&m->s, sum);
}

static void try_drop(const qe_schedule *s, uint32_t index, score *sum) {
    mutant m;
    copy_to(&m, s);
    drop(&m, index);
    judge_mutant(&m, sum);
}

/* A second time behind itself, and at the end of its row. */
static void try_duplicate(const qe_schedule *s, uint32_t index, score *sum) {
    mutant m;
    uint32_t rank = row_of(s, index);
    copy_to(&m, s);
    insert(&m, rank, index + 1, s->actions[index]);
    judge_mutant(&m, sum);
    copy_to(&m, s);
    insert(&m, rank, s->rank_begin[rank + 1], s->actions[index]);
    judge_mutant(&m, sum);
}

static void try_swap(const qe_schedule *s, uint32_t index, score *sum) {
    mutant m;
    if (index + 1 == s->rank_begin[row_of(s, index) + 1]) return;
    copy_to(&m, s);
    m.actions[index] = s->actions[index + 1];
    m.actions[index + 1] = s->actions[index];
    judge_mutant(&m, sum);
}

/* To every other place: of its own row, which keeps the counts, and of the other ranks' rows. */
static void try_move(const qe_schedule *s, uint32_t index, score *sum) {
    for (uint32_t rank = 0; rank < s->ranks; rank++) {
        mutant m, dropped;
        copy_to(&dropped, s);
        drop(&dropped, index);
        for (uint32_t at = dropped.begin[rank]; at <= dropped.begin[rank + 1]; at++) {
            copy_to(&m, &dropped.s);
            insert(&m, rank, at, s->actions[index]);
            judge_mutant(&m, sum);
        }
    }
}

static void try_kinds(const qe_schedule *s, uint32_t index, score *sum) {
    for (uint8_t kind = 0; kind < QE_ACTION_KINDS; kind++) {
        mutant m;
        copy_to(&m, s);
        m.actions[index].kind = kind;
        judge_mutant(&m, sum);
    }
}

static void try_all(const qe_schedule *s, score *sum) {
    judge_both(s, sum);
    for (uint32_t index = 0; index < count_of(s); index++) {
        try_drop(s, index, sum);
        try_duplicate(s, index, sum);
        try_swap(s, index, sum);
        try_move(s, index, sum);
        try_kinds(s, index, sum);
    }
}

static void every_single_mutation_of_every_small_schedule_gets_the_right_verdict(void **state) {
    (void)state;
    score sum = {0};
    for (uint32_t name = 0; qe_schedule_name(name) != NULL; name++) {
        for (uint32_t size = 0; size < 3 * 3 * 4 * 2; size++) {
            qe_schedule_request request = {.name = qe_schedule_name(name), .ranks = size % 3 + 1,
                                           .chunks = size / 3 % 3 + 1, .microbatches = size / 9 % 4 + 1,
                                           .forward_only = (int)(size / 36)};
            qe_schedule schedule;
            if (qe_schedule_generate(&request, &schedule, NULL) != QE_OK) continue;
            if (count_of(&schedule) < ACTIONS) try_all(&schedule, &sum);
            qe_schedule_deinit(&schedule);
        }
    }
    print_score(&sum);
    assert_true(sum.of[QE_RULE_NONE] > 500 && sum.of[QE_RULE_SCHEDULE_CYCLE] > 500);
}

/* ---- random rows ---- */

static uint32_t random_below(uint64_t *seed, uint32_t bound) {
    *seed = *seed * 6364136223846793005U + 1442695040888963407U;
    return (uint32_t)((*seed >> 33) % bound);
}

/* Counts and placement of a generated one, rows shuffled by some swaps of neighbours that keep F, I, W in order. */
static void shuffle(mutant *m, uint64_t *seed, uint32_t swaps) {
    for (uint32_t i = 0; i < swaps; i++) {
        uint32_t index = random_below(seed, count_of(&m->s) - 1);
        qe_action first = m->actions[index], second = m->actions[index + 1];
        if (row_of(&m->s, index) != row_of(&m->s, index + 1)) continue;
        if (same_pair(&first, second.stage, second.microbatch)) continue;
        m->actions[index] = second;
        m->actions[index + 1] = first;
    }
}

static void random_orders_on_every_rank_get_the_right_verdict(void **state) {
    (void)state;
    score sum = {0};
    uint64_t seed = 7;
    static const qe_schedule_request requests[] = {
        {"zbh1", 3, 1, 4, 0}, {"1f1b", 4, 1, 4, 0}, {"interleaved", 2, 3, 4, 0}, {"interleaved", 3, 2, 3, 0},
        {"sequential", 2, 2, 3, 0}, {"sequential", 1, 3, 3, 0}, {"interleaved", 3, 3, 3, 1},
        {"zbv", 2, 2, 4, 0}, {"zbv", 3, 2, 4, 0},
    };
    for (uint32_t round = 0; round < 14000; round++) {
        qe_schedule schedule;
        mutant m;
        const qe_schedule_request *request = &requests[round % (sizeof requests / sizeof *requests)];
        assert_int_equal(qe_schedule_generate(request, &schedule, NULL), QE_OK);
        copy_to(&m, &schedule);
        shuffle(&m, &seed, 1 + random_below(&seed, round % 2 ? 12 : 200));
        judge_mutant(&m, &sum);
        qe_schedule_deinit(&schedule);
    }
    print_score(&sum);
    assert_true(sum.of[QE_RULE_NONE] > 500 && sum.of[QE_RULE_SCHEDULE_CYCLE] > 500);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_single_mutation_of_every_small_schedule_gets_the_right_verdict),
        cmocka_unit_test(random_orders_on_every_rank_get_the_right_verdict),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
