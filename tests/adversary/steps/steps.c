/* steps.c - faults in running steps: real training on the host backend, eager and captured, schedules and recipes.
 * A fault is planted in what a rank submits (what breaks is said by the operators, not by the running step), in memory
 * that nobody declared (witness words), in what the device is given (a graph once more or once less), in what a graph
 * froze, or in the numbers. Each must be trapped by its rule and change nothing; the step after it goes on, and in the
 * end the bits are those of a run that was never disturbed.
 *
 *   adversary_steps [TEAMS [FAULTS [SEED]]]     faults of each team */
#include "step_world.h"

#include <math.h>
#include <stdatomic.h>

#include "adversary/adversary.h"
#include "step/capture.h"

enum { DEFAULT_TEAMS = 40, DEFAULT_FAULTS = 6, FIRST_STEPS = 2, TRIES = 40 };

static uint64_t teams = DEFAULT_TEAMS, faults_each = DEFAULT_FAULTS, first_seed;
static uint32_t wrong;

typedef struct shape {
    const char *schedule;
    uint32_t ranks, chunks;
} shape;
static const shape shapes[] = {{"gpipe", 1, 1}, {"gpipe", 2, 1}, {"1f1b", 1, 1}, {"1f1b", 3, 1}, {"zbh1", 1, 1},
                               {"zbh1", 2, 1}, {"zbh2", 2, 1}, {"interleaved", 2, 2}, {"interleaved", 1, 2},
                               {"looped-bfs", 2, 2}, {"interleaved-zb", 2, 2}, {"zbv", 1, 2}, {"zbv", 2, 2},
                               {"v-half", 2, 2}, {"v-min", 2, 2}, {"1f1b-v", 2, 2}, {"dualpipev", 2, 2},
                               {"sequential", 1, 1}};

/* ---- what the device is given ---- */

static struct {
    uint32_t rogue, slip; /* launches until it happens; 0: it does not */
    int twice;
    qe_op op;
} device;
static const uint64_t garbage = UINT64_C(0x0123456789abcdef);

/* Used by one submitter: where these faults are planted, there is one rank. */
static qe_status faulty_launch(qe_graph *graph, qe_stream *stream) {
    const qe_graph_ops *ops = qe_host_backend()->graph;
    if (device.slip > 0 && --device.slip == 0) {
        if (!device.twice) return QE_OK;
        qe_status status = ops->launch(graph, stream);
        if (status != QE_OK) return status;
    }
    if (device.rogue > 0 && --device.rogue == 0) {
        qe_status status = qe_host_backend()->stream->submit(stream, &device.op);
        if (status != QE_OK) return status;
    }
    return ops->launch(graph, stream);
}

/* ---- a team under attack ---- */

typedef struct attack {
    world w;
    world_options options;
    dice d;
    step steps[4]; /* each rank's program */
    uint64_t seed;
    char name[NAME_BYTES];
} attack;

typedef struct outcome {
    uint64_t rules;   /* any of them is right; 0: nothing may be trapped */
    uint32_t item;    /* of the program; QE_NONE: not asked */
    fault_kind kind;
    const char *what;
    int on_device; /* no submission tells of it */
} outcome;

static void complain(const attack *a, const outcome *due, const char *found) {
    fprintf(stderr, "seed %llu: %s, fault: %s\n  expected: %s\n  found:    %s\n", (unsigned long long)a->seed, a->name,
            due->what, due->rules ? qe_rule_id((qe_rule)__builtin_ctzll(due->rules)) : "nothing", found);
    wrong++;
}

/* The disturbed step, and what has to be said of it. Returns whether it was trapped. */
static int strike(attack *a, const outcome *due) {
    world *w = &a->w;
    world_hash before = world_state(w);
    qe_status status = world_try_step(w, 0);
    const qe_violation *told = &w->result.violations.record[0];
    qe_rule found = status == QE_CONTRACT && w->result.violations.count > 0 ? told->rule : QE_RULE_NONE;
    int right = due->rules == 0 ? status == QE_OK : status == QE_CONTRACT && (due->rules >> found & 1);
    if (right && due->rules != 0 && due->item != QE_NONE) right = told->item == due->item;
    if (right && status == QE_CONTRACT) right = strcmp(before.text, world_state(w).text) == 0;
    qe_rule counted = due->rules == 0 ? QE_RULE_NONE : right ? found : (qe_rule)__builtin_ctzll(due->rules);
    tally_mutant(due->kind, due->on_device ? MOMENT_DEVICE : MOMENT_RUNNING, counted, right);
    tally_operator(due->what, counted);
    if (!right) complain(a, due, status == QE_OK ? "nothing" : found ? qe_rule_id(found) : w->error.message);
    return status != QE_OK;
}

static void step_on(attack *a) { world_step(&a->w, 0); }

/* ---- submissions ---- */

/* An operator's mutant that is one edit of what a rank submits: an effect altered or dropped, an edge skipped. */
static int edit_of(const mutant *m, qe_edit *edit) {
    const item_list *list = &m->list, *right = &m->step->right;
    uint32_t at = 0;
    if (list->count + 1 == right->count) {
        while (at < list->count && list->entries[at].source == at) at++;
        *edit = (qe_edit){.kind = QE_EDIT_SKIP, .item = at, .stream = right->entries[at].item.stream};
        return right->entries[at].item.kind == QE_ITEM_WAIT || right->entries[at].item.kind == QE_ITEM_RECORD;
    }
    if (list->count != right->count) return 0;
    uint32_t changed = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        if (list->entries[i].source != i) return 0;
        if (list->entries[i].changed && ++changed == 1) at = i;
    }
    const entry *now = &list->entries[at], *then = &right->entries[at];
    if (changed != 1 || now->item.kind != QE_ITEM_OP || now->item.stream != then->item.stream) return 0;
    uint32_t k = 0;
    while (k < now->item.effect_count && memcmp(&now->effects[k], &then->effects[k], sizeof now->effects[k]) == 0) k++;
    int dropped = now->item.effect_count + 1 == then->item.effect_count;
    if (!dropped && k == now->item.effect_count) return 0;
    /* A commit that runs and is not declared is found by the guards of the next step: another fault. */
    if (dropped && then->effects[k].kind == QE_EFFECT_WEIGHT_COMMIT) return 0;
    *edit = (qe_edit){.kind = dropped ? QE_EDIT_DROP : QE_EDIT_ALTER, .item = at, .effect_index = k,
                      .stream = now->item.stream, .effect = dropped ? then->effects[k] : now->effects[k]};
    return 1;
}

static int plant_edit(attack *a, outcome *due) {
    static qe_object objects[4096];
    uint32_t rank = dice_below(&a->d, a->w.plan->ranks);
    const step *s = &a->steps[rank];
    qe_edit edit;
    for (int i = 0; i < TRIES; i++) {
        mutant m = {.step = s, .dice = &a->d, .at_step = 2, .objects = objects};
        MUST(s->program.object_count <= 4096);
        memcpy(objects, s->program.objects, s->program.object_count * sizeof *objects);
        int fits = mutate(&m) && edit_of(&m, &edit) &&
                   memcmp(objects, s->program.objects, s->program.object_count * sizeof *objects) == 0;
        verdict said = {0}, oracles;
        if (fits) said = expected_of(&m);
        if (fits && !oracle_confirms(&m, said, &oracles))
            fail_msg("'%s' of entry %u: expected %s at %u, %u steps later; the oracle says %s at %u, %u steps later",
                     m.operator_name, edit.item, qe_rule_id(said.rule), said.where, said.later,
                     qe_rule_id(oracles.rule), oracles.where, oracles.later);
        *due = (outcome){.rules = said.rule != QE_RULE_NONE ? bit_of((unsigned)said.rule) : 0, .item = QE_NONE,
                         .kind = m.kind, .what = m.operator_name};
        if (said.rule != QE_RULE_NONE && said.where != AT_END) due->item = m.list.entries[said.where].source;
        mutant_free(&m);
        if (!fits) continue;
        a->w.team->edit = edit;
        a->w.team->edit_rank = rank;
        return 1;
    }
    return 0;
}

static int submissions(attack *a) {
    outcome due;
    if (!plant_edit(a, &due)) return 0;
    strike(a, &due);
    a->w.team->edit_rank = QE_NONE;
    step_on(a); /* and the caches are full again */
    return 1;
}

/* ---- memory ---- */

static const qe_binding *binding_of(const attack *a) { return &a->w.team->ranks[0].train; }

static int has_graphs(const attack *a) {
    return a->w.plan->ranks == 1 && binding_of(a)->segment_count > 1 && a->options.capture != QE_CAPTURE_STEP;
}

/* Whether a guard looks at an object in a segment, before it is overwritten: of a cache, a use and no fill. */
static int is_looked_at(const qe_binding *b, uint32_t from, uint32_t object) {
    const qe_program *p = &b->rank_plan->program;
    for (uint32_t n = from; n < b->segment_count; n++)
        for (uint32_t i = b->segments[n].first; i < b->segments[n].end; i++)
            for (uint32_t k = 0; k < p->items[i].effect_count; k++) {
                const qe_effect *effect = &p->effects[p->items[i].first_effect + k];
                if (p->items[i].kind == QE_ITEM_OP && effect->object == object)
                    return effect->kind != QE_EFFECT_CACHE_FILL && b->segments[n].end <= b->rank_plan->commit_begin;
            }
    return 0;
}

static int witnesses(attack *a) {
    static const qe_rule rules[QE_OBJECT_KINDS] = {[QE_OBJECT_SCALE] = QE_RULE_SCALE_EPOCH,
                                                   [QE_OBJECT_SLOT] = QE_RULE_SLOT_STALE,
                                                   [QE_OBJECT_WEIGHT] = QE_RULE_WEIGHT_VERSION,
                                                   [QE_OBJECT_CACHE] = QE_RULE_CACHE_STALE};
    if (!has_graphs(a)) return 0;
    const qe_binding *b = binding_of(a);
    for (int i = 0; i < TRIES; i++) {
        uint32_t object = dice_below(&a->d, b->rank_plan->program.object_count);
        uint32_t launch = dice_below(&a->d, b->segment_count);
        qe_rule rule = rules[b->rank_plan->program.objects[object].kind];
        if (rule == QE_RULE_NONE || b->words[object] == NULL || !is_looked_at(b, launch, object)) continue;
        device.op = (qe_op){.kind = QE_OP_COPY};
        device.op.args.copy = (qe_args_copy){.from = &garbage, .to = b->words[object], .bytes = sizeof garbage};
        device.rogue = launch + 1;
        outcome due = {bit_of((unsigned)rule), QE_NONE, FAULT_ADDRESS, "a write that nobody declared", 1};
        strike(a, &due);
        device.rogue = 0;
        step_on(a);
        return 1;
    }
    return 0;
}

/* What a segment leaves in words, if it runs once: slots that it acquires, deposits that it makes. */
static uint64_t leaves(const qe_binding *b, uint32_t segment, qe_rule deposits) {
    const qe_program *p = &b->rank_plan->program;
    uint64_t rules = 0;
    for (uint32_t i = b->segments[segment].first; i < b->segments[segment].end; i++)
        for (uint32_t k = 0; p->items[i].kind == QE_ITEM_OP && k < p->items[i].effect_count; k++) {
            const qe_effect *effect = &p->effects[p->items[i].first_effect + k];
            if (effect->kind == QE_EFFECT_SLOT_ACQUIRE) rules |= bit_of(QE_RULE_SLOT_STALE);
            if (effect->object == b->rank_plan->deposits_object) rules |= bit_of(deposits);
        }
    return rules;
}

/* A graph once more, or once less, than the ledger was told. What its ops acquire or deposit is out by one; where it
 * does both, the guard names the object that it looks at first. What does neither is told apart by no word. */
static int slips(attack *a) {
    if (!has_graphs(a)) return 0;
    const qe_binding *b = binding_of(a);
    device.twice = dice_one_in(&a->d, 2);
    for (int i = 0; i < TRIES; i++) {
        uint32_t launch = dice_below(&a->d, b->segment_count);
        uint64_t rules = leaves(b, launch, device.twice ? QE_RULE_GRAD_TWICE : QE_RULE_GRAD_MISSING);
        if (rules == 0) continue;
        outcome due = {.rules = rules, .item = QE_NONE, .kind = device.twice ? FAULT_DUPLICATE : FAULT_DROP,
                       .what = device.twice ? "a graph launched twice" : "a graph not launched",
                       .on_device = 1};
        device.slip = launch + 1;
        strike(a, &due);
        device.slip = 0;
        step_on(a);
        return 1;
    }
    return 0;
}

/* ---- seals and numbers ---- */

static int moved_weight(attack *a) {
    if (a->options.capture == QE_CAPTURE_NONE) return 0;
    uint32_t parameter = dice_below(&a->d, qe_model_parameter_count(a->w.model));
    must(qe_team_weight_move(a->w.team, parameter, &a->w.error), &a->w.error, "move");
    outcome due = {bit_of(QE_RULE_GRAPH_ADDRESS), QE_NONE, FAULT_ADDRESS, "a weight that moved"};
    strike(a, &due);
    must(qe_team_recapture(a->w.team, &a->w.error), &a->w.error, "recapture");
    step_on(a);
    return 1;
}

static int changed_constant(attack *a) {
    if (a->options.capture == QE_CAPTURE_NONE) return 0;
    qe_rank *rank = &a->w.team->ranks[dice_below(&a->d, a->w.plan->ranks)];
    uint32_t count = rank->train.rank_plan->op_count, first = dice_below(&a->d, count);
    for (uint32_t i = 0; i < count; i++) {
        qe_op *op = &rank->train.ops[(first + i) % count];
        if (op->kind != QE_OP_NORM_QUANTIZE) continue;
        float kept = op->args.norm.epsilon;
        op->args.norm.epsilon = kept * (2.0f + (float)dice_below(&a->d, 5));
        outcome due = {bit_of(QE_RULE_GRAPH_CONSTANT), QE_NONE, FAULT_CONSTANT, "a constant that changed"};
        strike(a, &due);
        op->args.norm.epsilon = kept;
        step_on(a);
        return 1;
    }
    return 0;
}

/* A NaN in a weight that every token passes. The step is given up; the weight is put right, and training goes on. */
static int not_finite(attack *a) {
    world *w = &a->w;
    uint32_t parameter = dice_below(&a->d, qe_model_parameter_count(w->model));
    const qe_parameter *p = qe_model_parameter(w->model, parameter);
    if (strncmp(p->name, "model.layers.", 13) != 0 && strcmp(p->name, "model.norm.weight") != 0) return 0;
    size_t count = (size_t)p->rows * p->columns;
    float *values = malloc(count * sizeof *values);
    assert_non_null(values);
    must(qe_team_parameter_read(w->team, parameter, values, &w->error), &w->error, p->name);
    size_t at = dice_below(&a->d, (uint32_t)count);
    float kept = values[at];
    values[at] = NAN;
    must(qe_team_parameter_write(w->team, parameter, values, &w->error), &w->error, p->name);
    world_hash before = world_state(w);
    qe_status status = world_try_step(w, 0);
    int right = status == QE_OK && w->result.vetoed && strcmp(before.text, world_state(w).text) == 0;
    outcome due = {bit_of(QE_RULE_STEP_NONFINITE), QE_NONE, FAULT_CONSTANT, "a weight that is not a number"};
    tally_mutant(due.kind, MOMENT_RUNNING, QE_RULE_STEP_NONFINITE, right);
    tally_operator(due.what, QE_RULE_STEP_NONFINITE);
    if (!right) complain(a, &due, qe_status_name(status));
    values[at] = kept;
    must(qe_team_parameter_write(w->team, parameter, values, &w->error), &w->error, p->name);
    free(values);
    step_on(a);
    return 1;
}

/* ---- cases ---- */

static void draw_options(attack *a) {
    static const qe_capture units[] = {QE_CAPTURE_NONE, QE_CAPTURE_LAYER, QE_CAPTURE_ACTION, QE_CAPTURE_ACTION,
                                       QE_CAPTURE_STEP};
    const shape *sh = &shapes[dice_below(&a->d, sizeof shapes / sizeof *shapes)];
    a->options = (world_options){.schedule = sh->schedule, .ranks = sh->ranks, .chunks = sh->chunks, .microbatches = 4,
                                 .recipe = (qe_recipe_kind)dice_below(&a->d, 5), .capture = units[dice_below(&a->d, 5)],
                                 .no_cache = dice_one_in(&a->d, 4), .no_reuse = dice_one_in(&a->d, 4),
                                 .copy = dice_one_in(&a->d, 4)};
    snprintf(a->name, sizeof a->name, "%s P%u V%u %s capture %d%s%s%s", sh->schedule, sh->ranks, sh->chunks,
             qe_recipe_name(a->options.recipe), (int)a->options.capture, a->options.no_cache ? " no-cache" : "",
             a->options.no_reuse ? " no-reuse" : "", a->options.copy ? " copy" : "");
}

static void attack_open(attack *a, const qe_backend *backend) {
    world_options options = a->options;
    options.backend = backend;
    world_open(&a->w, &options);
    for (int i = 0; i < FIRST_STEPS; i++) step_on(a);
    for (uint32_t r = 0; r < a->w.plan->ranks; r++)
        step_of_program(&a->steps[r], &a->w.plan->rank[r].program, a->name);
}

static void hold_against_quiet(attack *a) {
    world quiet;
    world_hash disturbed = world_state(&a->w);
    world_open(&quiet, &a->options);
    while (quiet.step < a->w.step) world_step(&quiet, 0);
    if (strcmp(world_state(&quiet).text, disturbed.text) != 0) {
        outcome due = {.what = "all of them"};
        complain(a, &due, "other bits than those of a run that was never disturbed");
        tally_refused();
    } else {
        tally_valid("teams with the bits of a quiet run", 1);
    }
    world_close(&quiet);
}

static void run_case(uint64_t seed, const qe_backend *backend) {
    static int (*const kinds[])(attack *) = {submissions, submissions, submissions, witnesses, witnesses, slips,
                                             moved_weight, changed_constant, not_finite};
    attack a = {.seed = seed, .d = {seed * 0x9e3779b97f4a7c15u + 11}};
    draw_options(&a);
    attack_open(&a, backend);
    for (uint64_t planted = 0, tries = 0; planted < faults_each && tries < TRIES * faults_each; tries++)
        planted += kinds[dice_below(&a.d, sizeof kinds / sizeof *kinds)](&a) != 0;
    hold_against_quiet(&a);
    for (uint32_t r = 0; r < a.w.plan->ranks; r++) step_free(&a.steps[r]);
    world_close(&a.w);
}

static void every_fault_in_a_running_step_is_trapped_by_its_rule(void **state) {
    (void)state;
    qe_backend backend = *qe_host_backend();
    qe_graph_ops graph = *backend.graph;
    graph.launch = faulty_launch;
    backend.graph = &graph;
    for (uint64_t i = 0; i < teams; i++) run_case(first_seed + i, &backend);
    tally_print(0, 0);
    assert_int_equal(wrong, 0);
}

int main(int argc, char **argv) {
    if (argc > 1) teams = argument(argv[1]);
    if (argc > 2) faults_each = argument(argv[2]);
    if (argc > 3) first_seed = argument(argv[3]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_fault_in_a_running_step_is_trapped_by_its_rule)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
