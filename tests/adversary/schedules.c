/* schedules.c - right orders and orders with one fault, at the moment when a schedule is checked or certified. Whether
 * an order can run is asked of ranks that try: each runs the next action of its row when its inputs are there. */
#include <stdlib.h>
#include <string.h>

#include "adversary/adversary.h"
#include "qeffect/certificate.h"

enum { RANKS_MAX = 5, MICROBATCHES_MAX = 8, STAGES_MAX = 16, ACTIONS_MAX = 3 * STAGES_MAX * MICROBATCHES_MAX + 2 };

typedef struct rows {
    qe_schedule s;
    qe_action action[RANKS_MAX][ACTIONS_MAX];
    uint32_t count[RANKS_MAX];
    qe_action flat[RANKS_MAX * ACTIONS_MAX];
    uint32_t begin[RANKS_MAX + 1], stage_rank[STAGES_MAX];
} rows;

static void take(rows *r, const qe_schedule *s) {
    memset(r, 0, sizeof *r);
    r->s = *s;
    memcpy(r->stage_rank, s->stage_rank, s->stages * sizeof *s->stage_rank);
    for (uint32_t rank = 0; rank < s->ranks; rank++)
        for (uint32_t i = s->rank_begin[rank]; i < s->rank_begin[rank + 1]; i++) {
            qe_action a = s->actions[i];
            a.paired = 0; /* its halves run one behind the other anyway */
            r->action[rank][r->count[rank]++] = a;
        }
}

static const qe_schedule *flat(rows *r) {
    uint32_t next = 0;
    for (uint32_t rank = 0; rank < r->s.ranks; rank++) {
        r->begin[rank] = next;
        for (uint32_t i = 0; i < r->count[rank]; i++) r->flat[next++] = r->action[rank][i];
    }
    r->begin[r->s.ranks] = next;
    r->s.rank_begin = r->begin;
    r->s.stage_rank = r->stage_rank;
    r->s.actions = r->flat;
    return &r->s;
}

/* ---- can it run? ---- */

typedef struct progress {
    uint8_t f[STAGES_MAX][MICROBATCHES_MAX], i[STAGES_MAX][MICROBATCHES_MAX], w[STAGES_MAX][MICROBATCHES_MAX];
} progress;

static int can_run(const rows *r, const progress *p, const qe_action *a) {
    uint32_t s = a->stage, m = a->microbatch;
    if (a->kind == QE_ACTION_F) return s == 0 || p->f[s - 1][m];
    if (a->kind == QE_ACTION_W) return p->i[s][m];
    return p->f[s][m] && (s + 1 == r->s.stages || p->i[s + 1][m]);
}

static void ran(progress *p, const qe_action *a) {
    if (a->kind == QE_ACTION_F) p->f[a->stage][a->microbatch] = 1;
    if (a->kind == QE_ACTION_I || a->kind == QE_ACTION_B) p->i[a->stage][a->microbatch] = 1;
    if (a->kind == QE_ACTION_W || a->kind == QE_ACTION_B) p->w[a->stage][a->microbatch] = 1;
}

static int runs(const rows *r) {
    progress p = {0};
    uint32_t next[RANKS_MAX] = {0}, left = 0;
    for (uint32_t rank = 0; rank < r->s.ranks; rank++) left += r->count[rank];
    for (int moved = 1; moved && left > 0;) {
        moved = 0;
        for (uint32_t rank = 0; rank < r->s.ranks; rank++)
            for (; next[rank] < r->count[rank] && can_run(r, &p, &r->action[rank][next[rank]]); next[rank]++) {
                ran(&p, &r->action[rank][next[rank]]);
                moved = 1;
                left--;
            }
    }
    return left == 0;
}

/* Does an action stand behind one that needs it, on its own row? */
static int is_out_of_order(const rows *r) {
    for (uint32_t rank = 0; rank < r->s.ranks; rank++)
        for (uint32_t i = 0; i < r->count[rank]; i++)
            for (uint32_t k = i + 1; k < r->count[rank]; k++) {
                const qe_action *a = &r->action[rank][i], *b = &r->action[rank][k];
                int same = a->stage == b->stage && a->microbatch == b->microbatch;
                int later = a->kind != QE_ACTION_F && b->kind == QE_ACTION_F;
                later |= a->kind == QE_ACTION_W && b->kind == QE_ACTION_I;
                if (same && later) return 1;
            }
    return 0;
}

static qe_rule order_of(const rows *r) {
    if (is_out_of_order(r)) return QE_RULE_SCHEDULE_ORDER;
    return runs(r) ? QE_RULE_NONE : QE_RULE_SCHEDULE_CYCLE;
}

/* ---- faults ---- */

typedef struct plant {
    rows *r;
    dice *d;
    uint32_t rank, at; /* a random action */
    fault_kind kind;
    const char *name;
    qe_certificate_request request;
} plant;

static void remove_at(rows *r, uint32_t rank, uint32_t at) {
    r->count[rank]--;
    memmove(&r->action[rank][at], &r->action[rank][at + 1], (r->count[rank] - at) * sizeof **r->action);
}

static void insert_at(rows *r, uint32_t rank, uint32_t at, qe_action a) {
    memmove(&r->action[rank][at + 1], &r->action[rank][at], (r->count[rank] - at) * sizeof **r->action);
    r->action[rank][at] = a;
    r->count[rank]++;
}

/* An order without a single backward action is an evaluation, and owes none. */
static int backwards(const rows *r) {
    int count = 0;
    for (uint32_t rank = 0; rank < r->s.ranks; rank++)
        for (uint32_t i = 0; i < r->count[rank]; i++) count += r->action[rank][i].kind != QE_ACTION_F;
    return count;
}

static int drop_action(plant *p, qe_rule *rule) {
    *rule = QE_RULE_SCHEDULE_MISSING;
    remove_at(p->r, p->rank, p->at);
    return backwards(p->r) > 0;
}

static int repeat_action(plant *p, qe_rule *rule) {
    *rule = QE_RULE_SCHEDULE_DUPLICATE;
    insert_at(p->r, p->rank, dice_below(p->d, p->r->count[p->rank] + 1), p->r->action[p->rank][p->at]);
    return 1;
}

/* Its own is missing then as well; of two rules the first is the verdict. */
static int other_microbatch(plant *p, qe_rule *rule) {
    qe_action *a = &p->r->action[p->rank][p->at];
    uint32_t own = a->microbatch;
    if (p->r->s.microbatches < 2 || p->r->s.reversed > 0) return 0;
    a->microbatch = (own + 1 + dice_below(p->d, p->r->s.microbatches - 1)) % p->r->s.microbatches;
    *rule = QE_RULE_SCHEDULE_DUPLICATE;
    return 1;
}

static int out_of_range(plant *p, qe_rule *rule) {
    qe_action *a = &p->r->action[p->rank][p->at];
    if (dice_one_in(p->d, 2)) a->stage = (uint16_t)(p->r->s.stages + dice_below(p->d, 3));
    else a->microbatch = p->r->s.microbatches + dice_below(p->d, 3);
    *rule = QE_RULE_SCHEDULE_PLACE;
    return 1;
}

static int other_rank(plant *p, qe_rule *rule) {
    qe_action a = p->r->action[p->rank][p->at];
    uint32_t to = dice_below(p->d, p->r->s.ranks);
    if (to == p->rank) return 0;
    remove_at(p->r, p->rank, p->at);
    insert_at(p->r, to, dice_below(p->d, p->r->count[to] + 1), a);
    *rule = QE_RULE_SCHEDULE_PLACE;
    return 1;
}

static int swap_actions(plant *p, qe_rule *rule) {
    qe_action *a = &p->r->action[p->rank][p->at];
    uint32_t other = dice_below(p->d, p->r->count[p->rank]);
    if (other == p->at) return 0;
    qe_action kept = *a;
    *a = p->r->action[p->rank][other];
    p->r->action[p->rank][other] = kept;
    *rule = order_of(p->r);
    return 1;
}

static int swap_neighbours(plant *p, qe_rule *rule) {
    qe_action *a = &p->r->action[p->rank][p->at];
    if (p->at + 1 >= p->r->count[p->rank]) return 0;
    qe_action kept = a[0];
    a[0] = a[1];
    a[1] = kept;
    *rule = order_of(p->r);
    return 1;
}

static int move_early(plant *p, qe_rule *rule) {
    qe_action a = p->r->action[p->rank][p->at];
    remove_at(p->r, p->rank, p->at);
    insert_at(p->r, p->rank, dice_below(p->d, p->at + 1), a);
    *rule = order_of(p->r);
    return 1;
}

static uint32_t stages_on(const rows *r, uint32_t rank) {
    uint32_t count = 0;
    for (uint32_t s = 0; s < r->s.stages; s++) count += r->stage_rank[s] == rank;
    return count;
}

/* Forwards that are kept on a rank at once: from F until W or B. */
static uint32_t most_kept(const rows *r, uint32_t rank) {
    uint32_t kept = 0, most = 0;
    for (uint32_t i = 0; i < r->count[rank]; i++) {
        if (r->action[rank][i].kind == QE_ACTION_F && ++kept > most) most = kept;
        if (r->action[rank][i].kind == QE_ACTION_W || r->action[rank][i].kind == QE_ACTION_B) kept--;
    }
    return most;
}

static int less_memory(plant *p, qe_rule *rule) {
    double most = 0;
    if (p->r->s.reversed > 0) return 0;
    for (uint32_t rank = 0; rank < p->r->s.ranks; rank++) {
        double own = (double)most_kept(p->r, rank) / stages_on(p->r, rank);
        if (own > most) most = own;
    }
    int enough = dice_one_in(p->d, 4);
    p->request.memory_limit = enough ? most : most * (dice_below(p->d, 9) + 1) / 10.0;
    *rule = enough ? QE_RULE_NONE : QE_RULE_SCHEDULE_MEMORY;
    return 1;
}

/* Microbatches of a stage add their gradients in ascending order; two of them change places. */
static int swap_gradients(plant *p, qe_rule *rule) {
    qe_action *row = p->r->action[p->rank];
    uint32_t at = p->at, other = at + 1;
    int adds = row[at].kind == QE_ACTION_W || row[at].kind == QE_ACTION_B;
    if (!adds || p->r->s.reversed > 0) return 0;
    for (; other < p->r->count[p->rank]; other++)
        if (row[other].kind == row[at].kind && row[other].stage == row[at].stage) break;
    if (other >= p->r->count[p->rank]) return 0;
    int ascends = row[at].microbatch < row[other].microbatch;
    uint32_t kept = row[at].microbatch;
    row[at].microbatch = row[other].microbatch;
    row[other].microbatch = kept;
    *rule = order_of(p->r);
    if (*rule == QE_RULE_NONE && !ascends) return 0; /* an order of its own */
    if (*rule == QE_RULE_NONE) *rule = QE_RULE_GRAD_ORDER;
    p->request.gradients = QE_GRADIENTS_ASCENDING;
    return 1;
}

static const struct {
    const char *name;
    fault_kind kind;
    int (*plant)(plant *p, qe_rule *rule);
} faults[] = {
    {"action dropped", FAULT_DROP, drop_action},
    {"action repeated", FAULT_DUPLICATE, repeat_action},
    {"action of another microbatch", FAULT_OWNER, other_microbatch},
    {"stage or microbatch out of range", FAULT_RANGE, out_of_range},
    {"action on another rank", FAULT_STREAM, other_rank},
    {"two actions swapped", FAULT_SWAP, swap_actions},
    {"neighbours swapped", FAULT_SWAP, swap_neighbours},
    {"action early", FAULT_EARLY, move_early},
    {"less memory than is kept", FAULT_CONSTANT, less_memory},
    {"two gradients swapped", FAULT_SWAP, swap_gradients},
};

/* ---- cases ---- */

static int draw(rows *r, dice *d, char *name) {
    qe_schedule s;
    uint32_t names = 0;
    while (qe_schedule_name(names) != NULL) names++;
    qe_schedule_request request = {.name = qe_schedule_name(dice_below(d, names)),
                                   .ranks = 1 + dice_below(d, RANKS_MAX),
                                   .microbatches = 1 + dice_below(d, MICROBATCHES_MAX)};
    request.chunks = dice_one_in(d, 3) ? 1 + dice_below(d, 3) : qe_schedule_usual_chunks(request.name);
    if (request.ranks * request.chunks > STAGES_MAX) return 0;
    if (qe_schedule_generate(&request, &s, NULL) != QE_OK) return 0;
    snprintf(name, NAME_BYTES, "%s P%u V%u M%u", request.name, request.ranks, request.chunks, request.microbatches);
    take(r, &s);
    qe_schedule_deinit(&s);
    return 1;
}

static qe_rule rule_found(rows *r, const qe_certificate_request *request, const char *name) {
    qe_certificate certificate = {0};
    qe_counterexample counterexample = {0};
    qe_error error = {0};
    const qe_schedule *s = flat(r);
    qe_status status = request == NULL ? qe_schedule_check(s, &counterexample, &error)
                                       : qe_schedule_certify(s, request, &certificate, &counterexample, &error);
    qe_rule rule = status == QE_OK ? QE_RULE_NONE : counterexample.rule;
    if (status != QE_OK && status != QE_CONTRACT) fprintf(stderr, "%s: %s\n", name, error.message);
    MUST(status == QE_OK || status == QE_CONTRACT);
    qe_certificate_deinit(&certificate);
    qe_counterexample_deinit(&counterexample);
    return rule;
}

static void say(rows *r, const char *name, const plant *p, uint64_t seed, qe_rule expected, qe_rule found) {
    char file[80];
    fprintf(stderr, "schedule seed %llu: %s, fault: %s\n  expected: %s\n  found:    %s\n",
            (unsigned long long)seed, name, p->name, expected ? qe_rule_id(expected) : "nothing",
            found ? qe_rule_id(found) : "nothing");
    snprintf(file, sizeof file, "adversary-schedule-%llu.csv", (unsigned long long)seed);
    FILE *out = fopen(file, "w");
    if (out == NULL) return;
    MUST(qe_schedule_write_csv(flat(r), out, NULL) == QE_OK && fclose(out) == 0);
    fprintf(stderr, "  written: %s\n", file);
}

static uint32_t try_fault(const rows *right, rows *r, dice *d, uint64_t seed, const char *name) {
    uint32_t which = dice_below(d, sizeof faults / sizeof *faults), rank = dice_below(d, right->s.ranks);
    qe_rule expected = QE_RULE_NONE;
    *r = *right;
    if (r->count[rank] == 0) return 0;
    plant p = {.r = r, .d = d, .rank = rank, .at = dice_below(d, r->count[rank]), .name = faults[which].name,
               .request = {.gradients = QE_GRADIENTS_OWN}};
    if (!faults[which].plant(&p, &expected)) return 0;
    int certifies = p.request.memory_limit > 0 || p.request.gradients != QE_GRADIENTS_OWN;
    qe_rule found = rule_found(r, certifies ? &p.request : NULL, name);
    tally_mutant(faults[which].kind, MOMENT_SCHEDULE, expected, found == expected);
    tally_operator(p.name, expected);
    if (found != expected) say(r, name, &p, seed, expected, found);
    return found != expected;
}

uint32_t schedules_run(uint64_t seed, uint64_t cases, uint64_t mutants) {
    uint32_t wrong = 0;
    rows *right = malloc(sizeof *right), *r = malloc(sizeof *r);
    char name[NAME_BYTES];
    MUST(right != NULL && r != NULL);
    for (uint64_t n = 0; n < cases; n++) {
        dice d = {(seed + n) * 0x9e3779b97f4a7c15u + 7};
        while (!draw(right, &d, name)) continue;
        qe_rule found = rule_found(right, NULL, name);
        if (found == QE_RULE_NONE) tally_valid("schedules of every name", 1);
        else fprintf(stderr, "schedule seed %llu: a false trap of %s: %s\n", (unsigned long long)(seed + n), name,
                     qe_rule_id(found));
        wrong += found != QE_RULE_NONE;
        if (found != QE_RULE_NONE) tally_refused();
        for (uint64_t i = 0; i < mutants; i++) wrong += try_fault(right, r, &d, seed + n, name);
    }
    free(right);
    free(r);
    return wrong;
}
