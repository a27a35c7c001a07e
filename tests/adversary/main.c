/* main.c - right programs that must be let through, and single faults that must be trapped by the right rule.
 *
 *   adversary [MUTANTS [VALID [SEED]]]     counts, and the seed of the first case (0)
 *   adversary case SEED                    one case again, with words
 *   adversary table FILE...                counts that several programs left, as one table
 *
 * Every case has a seed of its own: the first one and its number. One that goes wrong prints its seed, shrinks, and is
 * written as a trace into the directory where the program was started. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "adversary/adversary.h"

enum { DEFAULT_MUTANTS = 500, DEFAULT_VALID = 250, WRONG_MAX = 20, SCHEDULES_ONE_IN = 10, FAULTS_OF_A_SCHEDULE = 4 };
enum { COMPLETE = 5000 }; /* so many mutants have seen every operator */

static int wrong, verbose;

static const char *where_text(verdict v, const item_list *list, char *text, size_t capacity) {
    if (v.rule == QE_RULE_NONE) snprintf(text, capacity, "nothing");
    else if (v.where == AT_END) snprintf(text, capacity, "%s at the end of the step", qe_rule_id(v.rule));
    else
        snprintf(text, capacity, "%s at entry %u of %u, %u steps later", qe_rule_id(v.rule), v.where, list->count,
                 v.later);
    return text;
}

static void tell(const mutant *m, moment at, verdict expected, verdict found, uint64_t seed) {
    char due[120], told[120], file[80];
    fprintf(stderr, "seed %llu: %s, step %u, %s, fault: %s (%s)\n  expected: %s\n  found:    %s\n",
            (unsigned long long)seed, m->step->name, m->at_step, moment_words[at], m->operator_name,
            fault_words[m->kind], where_text(expected, &m->list, due, sizeof due),
            where_text(found, &m->list, told, sizeof told));
    snprintf(file, sizeof file, "adversary-%llu.qet", (unsigned long long)seed);
    shrink_and_write(m, file);
}

static void generate(step *s, dice *d) {
    uint32_t choice = dice_below(d, 10);
    if (choice < 3) generate_plan(s, d);
    else if (choice < 8) generate_small(s, d);
    else generate_memory(s, d);
}

static int ask_oracle(const mutant *m, moment at, verdict expected, uint64_t seed) {
    verdict said;
    if (oracle_confirms(m, expected, &said)) return 1;
    fprintf(stderr, "the oracle says otherwise than ledger and operator:\n");
    tell(m, at, expected, said, seed);
    return 0;
}

static void try_mutant(const step *s, dice *d, uint64_t seed) {
    static const moment moments[] = {MOMENT_PLAN, MOMENT_ISSUE, MOMENT_TRACE};
    moment at = s->traces_only ? MOMENT_TRACE : moments[dice_below(d, 3)];
    mutant m = {.step = s, .dice = d, .in_trace = at == MOMENT_TRACE};
    m.at_step = at == MOMENT_PLAN || s->single ? 0 : dice_below(d, 3);
    m.objects = malloc((s->program.object_count + 1u) * sizeof *m.objects);
    MUST(m.objects != NULL);
    memcpy(m.objects, s->program.objects, s->program.object_count * sizeof *m.objects);
    if (mutate(&m)) {
        int moved = memcmp(m.objects, s->program.objects, s->program.object_count * sizeof *m.objects) != 0;
        if (at == MOMENT_ISSUE && moved) at = MOMENT_PLAN; /* where things lie is told once */
        if (moved) m.at_step = 0;                         /* and it holds from the first step on */
        verdict expected = {0}, found = found_at(&m, at);
        if (s->whole_graphs) oracle_says(&m, expected, &expected);
        else expected = expected_of(&m);
        int right = is_same(expected, found);
        if (right) right = ask_oracle(&m, at, expected, seed);
        tally_mutant(m.kind, at, expected.rule, right);
        tally_operator(m.operator_name, expected.rule);
        if (!right || verbose) tell(&m, at, expected, found, seed);
        wrong += !right;
    }
    mutant_free(&m);
    free(m.objects);
}

static void run_case(uint64_t seed, uint32_t mutants, int count_valid) {
    dice d = {seed * 0x2545f4914f6cdd1du + 1};
    const char *where = "";
    step s;
    generate(&s, &d);
    if (verbose) fprintf(stderr, "seed %llu: %s\n", (unsigned long long)seed, s.name);
    int accepted = is_accepted(&s, &d, &where);
    if (!accepted) {
        mutant none = {.step = &s, .where = NOWHERE, .operator_name = "none", .kind = FAULT_HARMLESS};
        sequence_copy(&none.list, &s.right);
        fprintf(stderr, "a false trap at %s\n", where);
        tell(&none, MOMENT_TRACE, (verdict){0}, found_at(&none, MOMENT_TRACE), seed);
        mutant_free(&none);
        tally_refused();
        wrong++;
    } else if (count_valid) {
        tally_valid(s.from_plan ? (s.traces_only ? "plans, all ranks or captured" : "plans of one rank")
                                : s.single ? "memory, draws, default streams" : "small programs", 1);
    }
    for (uint32_t i = 0; accepted && i < mutants; i++) try_mutant(&s, &d, seed);
    step_free(&s);
}

int main(int argc, char **argv) {
    if (argc > 2 && strcmp(argv[1], "table") == 0) {
        for (int i = 2; i < argc; i++) tally_read(argv[i]);
        return !tally_print(1, 1);
    }
    if (argc == 3 && strcmp(argv[1], "case") == 0) {
        verbose = 1;
        run_case(argument(argv[2]), 4, 1);
        plans_free();
        return wrong > 0;
    }
    uint64_t mutants = argc > 1 ? argument(argv[1]) : DEFAULT_MUTANTS;
    uint64_t valid = argc > 2 ? argument(argv[2]) : DEFAULT_VALID;
    uint64_t seed = argc > 3 ? argument(argv[3]) : 0;
    for (uint64_t i = 0; i < valid && wrong < WRONG_MAX; i++)
        run_case(seed + i, (uint32_t)(mutants * (i + 1) / valid - mutants * i / valid), 1);
    plans_free();
    wrong += (int)schedules_run(seed, valid / SCHEDULES_ONE_IN, FAULTS_OF_A_SCHEDULE);
    int complete = tally_print(mutants >= COMPLETE, 0);
    return wrong == 0 && complete ? 0 : 1;
}
