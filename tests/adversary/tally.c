/* tally.c - counts, and the tables that are printed. */
#include <stdlib.h>
#include <string.h>

#include "adversary/adversary.h"

enum { OPERATORS_MAX = 160, SOURCES_MAX = 16 };

static struct {
    uint32_t expected[QE_RULE_COUNT][MOMENTS], right[QE_RULE_COUNT][MOMENTS]; /* rule NONE: equivalent */
    uint32_t kind[FAULT_KINDS], kind_trapped[FAULT_KINDS], kind_equivalent[FAULT_KINDS];
    const char *operator[OPERATORS_MAX];
    uint32_t operator_count, by_operator[OPERATORS_MAX], operator_equivalent[OPERATORS_MAX];
    const char *source[SOURCES_MAX];
    uint32_t source_count, valid[SOURCES_MAX];
    uint32_t wrong, refused, oracle_trapped, oracle_equivalent, oracle_differs;
} tally;

void tally_valid(const char *what, uint32_t count) {
    uint32_t i = 0;
    while (i < tally.source_count && strcmp(tally.source[i], what) != 0) i++;
    MUST(i < SOURCES_MAX);
    if (i == tally.source_count) tally.source[tally.source_count++] = what;
    tally.valid[i] += count;
}

void tally_refused(void) { tally.refused++; }

void tally_mutant(fault_kind kind, moment at, qe_rule expected, int right) {
    tally.expected[expected][at]++;
    tally.right[expected][at] += right != 0;
    tally.kind[kind]++;
    tally.kind_equivalent[kind] += expected == QE_RULE_NONE && right;
    tally.kind_trapped[kind] += expected != QE_RULE_NONE && right;
    tally.wrong += !right;
}

void tally_oracle(qe_rule expected, int agrees) {
    tally.oracle_differs += !agrees;
    tally.oracle_trapped += agrees && expected != QE_RULE_NONE;
    tally.oracle_equivalent += agrees && expected == QE_RULE_NONE;
}

static void add_operator(const char *name, uint32_t count, uint32_t equivalent) {
    uint32_t i = 0;
    while (i < tally.operator_count && strcmp(tally.operator[i], name) != 0) i++;
    MUST(i < OPERATORS_MAX);
    if (i == tally.operator_count) tally.operator[tally.operator_count++] = name;
    tally.by_operator[i] += count;
    tally.operator_equivalent[i] += equivalent;
}

void tally_operator(const char *name, qe_rule expected) { add_operator(name, 1, expected == QE_RULE_NONE); }

/* Names of the file outlive the line. */
static const char *kept_name(const char *name) {
    static char names[OPERATORS_MAX + SOURCES_MAX][64];
    uint32_t i = 0;
    while (names[i][0] != '\0' && strcmp(names[i], name) != 0) i++;
    MUST(i < OPERATORS_MAX + SOURCES_MAX - 1);
    snprintf(names[i], sizeof names[i], "%s", name);
    return names[i];
}

static void read_line(const char *line) {
    unsigned a, b, c, d;
    char name[64];
    if (sscanf(line, "m %u %u %u %u", &a, &b, &c, &d) == 4 && a < QE_RULE_COUNT && b < MOMENTS) {
        tally.expected[a][b] += c;
        tally.right[a][b] += d;
        tally.wrong += c - d;
    } else if (sscanf(line, "k %u %u %u %u", &a, &b, &c, &d) == 4 && a < FAULT_KINDS) {
        tally.kind[a] += b;
        tally.kind_trapped[a] += c;
        tally.kind_equivalent[a] += d;
    } else if (sscanf(line, "o %u %u %u", &a, &b, &c) == 3) {
        tally.oracle_trapped += a;
        tally.oracle_equivalent += b;
        tally.oracle_differs += c;
    } else if (sscanf(line, "r %u", &a) == 1) {
        tally.refused += a;
    } else if (sscanf(line, "p %u %u %63[^\n]", &a, &b, name) == 3) {
        add_operator(kept_name(name), a, b);
    } else if (sscanf(line, "v %u %63[^\n]", &a, name) == 2) {
        tally_valid(kept_name(name), a);
    }
}

static void write_counts(FILE *file) {
    for (unsigned rule = 0; rule < QE_RULE_COUNT; rule++)
        for (unsigned at = 0; at < MOMENTS; at++)
            if (tally.expected[rule][at] > 0)
                fprintf(file, "m %u %u %u %u\n", rule, at, tally.expected[rule][at], tally.right[rule][at]);
    for (unsigned kind = 0; kind < FAULT_KINDS; kind++)
        if (tally.kind[kind] > 0)
            fprintf(file, "k %u %u %u %u\n", kind, tally.kind[kind], tally.kind_trapped[kind],
                    tally.kind_equivalent[kind]);
    fprintf(file, "r %u\n", tally.refused);
    fprintf(file, "o %u %u %u\n", tally.oracle_trapped, tally.oracle_equivalent, tally.oracle_differs);
    for (uint32_t i = 0; i < tally.operator_count; i++)
        fprintf(file, "p %u %u %s\n", tally.by_operator[i], tally.operator_equivalent[i], tally.operator[i]);
    for (uint32_t i = 0; i < tally.source_count; i++)
        fprintf(file, "v %u %s\n", tally.valid[i], tally.source[i]);
}

static const char *counts_file(void) { return getenv("ADVERSARY_COUNTS"); }

void tally_keep(void) {
    if (counts_file() == NULL) return;
    FILE *file = fopen(counts_file(), "w");
    MUST(file != NULL);
    write_counts(file);
    MUST(fclose(file) == 0);
}

void tally_read(const char *path) {
    char line[128];
    FILE *file = fopen(path, "r");
    MUST(file != NULL);
    while (fgets(line, sizeof line, file) != NULL) read_line(line);
    MUST(fclose(file) == 0);
}

static void print_rules(void) {
    uint32_t sums[MOMENTS] = {0}, trapped[MOMENTS] = {0};
    printf("%-20s", "rule \\ trapped at");
    for (int at = 0; at < MOMENTS; at++) printf(" %12s", moment_words[at]);
    printf("\n");
    for (int rule = 0; rule < QE_RULE_COUNT; rule++) {
        int shown = (rule + 1) % QE_RULE_COUNT; /* the equivalent ones last */
        printf("%-20s", shown == QE_RULE_NONE ? "equivalent" : qe_rule_id((qe_rule)shown));
        for (int at = 0; at < MOMENTS; at++) {
            uint32_t all = tally.expected[shown][at], right = tally.right[shown][at];
            if (all == 0) printf(" %12s", "-");
            else if (all == right) printf(" %12u", all);
            else printf(" %5u/%-6u", right, all);
            if (shown != QE_RULE_NONE) {
                sums[at] += all;
                trapped[at] += right;
            }
        }
        printf("\n");
    }
    printf("%-20s", "trapped of");
    for (int at = 0; at < MOMENTS; at++) printf(" %5u/%-6u", trapped[at], sums[at]);
    printf("\n\n");
}

static void print_kinds(void) {
    uint32_t all = 0, trapped = 0, equivalent = 0;
    printf("%-20s %9s %9s %9s %9s\n", "kind of fault", "mutants", "trapped", "equivalent", "wrong");
    for (int kind = 0; kind < FAULT_KINDS; kind++) {
        if (tally.kind[kind] == 0) continue;
        printf("%-20s %9u %9u %9u %9u\n", fault_words[kind], tally.kind[kind], tally.kind_trapped[kind],
               tally.kind_equivalent[kind],
               tally.kind[kind] - tally.kind_trapped[kind] - tally.kind_equivalent[kind]);
        all += tally.kind[kind];
        trapped += tally.kind_trapped[kind];
        equivalent += tally.kind_equivalent[kind];
    }
    printf("%-20s %9u %9u %9u %9u\n\n", "all", all, trapped, equivalent, all - trapped - equivalent);
}

/* Rules of a run, and not of a program, are the last. */
static int print_gaps(int all_moments) {
    int gaps = 0;
    for (uint32_t i = 0; i < operator_count(); i++) {
        uint32_t k = 0;
        while (k < tally.operator_count && strcmp(tally.operator[k], operator_name(i)) != 0) k++;
        if (k < tally.operator_count) continue;
        printf("never fitted: %s\n", operator_name(i));
        gaps++;
    }
    for (int rule = 1; rule < (all_moments ? (int)QE_RULE_COUNT : (int)QE_RULE_STEP_NONFINITE); rule++) {
        uint32_t all = 0;
        for (int at = 0; at < MOMENTS; at++) all += tally.expected[rule][at];
        if (all > 0) continue;
        printf("never broken: %s\n", qe_rule_id((qe_rule)rule));
        gaps++;
    }
    return gaps;
}

int tally_print(int complete, int all_moments) {
    uint32_t valid = 0;
    tally_keep();
    printf("\n");
    print_rules();
    print_kinds();
    for (uint32_t i = 0; complete && i < tally.operator_count; i++)
        printf("  %-44s %7u mutants, %6u equivalent\n", tally.operator[i], tally.by_operator[i],
               tally.operator_equivalent[i]);
    for (uint32_t i = 0; i < tally.source_count; i++) {
        printf("valid: %-36s %7u accepted\n", tally.source[i], tally.valid[i]);
        valid += tally.valid[i];
    }
    if (tally.oracle_trapped > 0)
        printf("the oracle agrees: %u trapped, %u equivalent; differs: %u\n", tally.oracle_trapped,
               tally.oracle_equivalent, tally.oracle_differs);
    int gaps = complete ? print_gaps(all_moments) : 0;
    printf("valid programs: %u, false traps: %u\nmutants that were judged otherwise than expected: %u\n", valid,
           tally.refused, tally.wrong);
    return tally.wrong == 0 && tally.refused == 0 && (!complete || gaps == 0);
}
