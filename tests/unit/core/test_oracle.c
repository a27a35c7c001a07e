/* test_oracle.c - the ledger's verdict on programs against that of a naive second judge (tests/oracle): the same first
 * item, and on it the same rules on the same objects. Every trace that the repository holds; every sequence up to a
 * length of the letters of each family (tests/oracle/families); random ones beyond it. docs/oracle.md.
 *
 *   core_test_oracle [short|long [RANDOM [FIRST_SEED]]]   how long sequences are, and how many random ones */
#include "core_program.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>

#include "oracle/oracle.h"
#include "oracle/random_trace.h"

enum { DEFAULT_RANDOM = 20000, LETTERS_MAX = 64, LENGTH_MAX = 12 };
static const char *const trace_folder = "tests/traces", *const family_folder = "tests/oracle/families";

static int goes_far;
static long random_count = DEFAULT_RANDOM, first_seed;
static uint64_t seen_rules[QE_RULE_COUNT]; /* of all tests, so that no rule goes unasked */

typedef struct tally {
    uint64_t traces, clean, by_rule[QE_RULE_COUNT];
} tally;

static int told_by_ledger(const qe_violations *violations, uint32_t item, int rule, uint32_t object) {
    for (uint32_t i = 0; i < violations->count; i++) {
        const qe_violation *v = &violations->record[i];
        if (v->item == item && (int)v->rule == rule && v->object == object) return 1;
    }
    return 0;
}

static int told_by_oracle(const oracle_verdict *verdict, int rule, uint32_t object) {
    for (int i = 0; i < verdict->count; i++)
        if (verdict->breach[i].rule == rule && verdict->breach[i].object == object) return 1;
    return 0;
}

static uint32_t count_records(const qe_violations *violations, uint32_t item) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < violations->count; i++) count += violations->record[i].item == item;
    return count;
}

/* Is the first breach the same: item, rule, and every rule and object that the item breaks? */
static int agree(const qe_violations *violations, uint32_t item, const oracle_verdict *verdict) {
    if (verdict->rule == QE_RULE_NONE || violations->count == 0)
        return verdict->rule == QE_RULE_NONE && violations->count == 0;
    if (violations->record[0].item != item || (int)violations->record[0].rule != verdict->rule) return 0;
    for (uint32_t i = 0; i < violations->count; i++) {
        const qe_violation *v = &violations->record[i];
        if (v->item == item && !told_by_oracle(verdict, (int)v->rule, v->object)) return 0;
    }
    int all_kept = count_records(violations, item) < QE_VIOLATIONS_MAX; /* a ledger keeps so many and counts the rest */
    for (int i = 0; i < verdict->count && all_kept; i++)
        if (!told_by_ledger(violations, item, verdict->breach[i].rule, verdict->breach[i].object)) return 0;
    return 1;
}

static void print_verdicts(const qe_program *program, const qe_violations *violations, uint32_t item,
                           const oracle_verdict *verdict) {
    qe_trace_write(program, stderr, NULL);
    for (int i = 0; i < verdict->count; i++)
        print_error("oracle: item %u breaks %s on object %d\n", item, qe_rule_id((qe_rule)verdict->breach[i].rule),
                    (int)verdict->breach[i].object);
    for (uint32_t i = 0; i < violations->count; i++)
        print_error("ledger: item %u breaks %s on object %d\n", violations->record[i].item,
                    qe_rule_id(violations->record[i].rule), (int)violations->record[i].object);
}

static void hold_against(const qe_program *program, uint32_t item, const oracle_verdict *verdict, tally *into) {
    qe_violations violations;
    qe_status status = qe_program_judge(program, &violations, NULL);
    assert_true(status == QE_OK || status == QE_CONTRACT);
    if (!agree(&violations, item, verdict)) {
        print_verdicts(program, &violations, item, verdict);
        fail_msg("the oracle finds %s, the ledger %s", qe_rule_id((qe_rule)verdict->rule),
                 violations.count > 0 ? qe_rule_id(violations.record[0].rule) : "none");
    }
    into->traces++;
    into->clean += verdict->rule == QE_RULE_NONE;
    into->by_rule[verdict->rule]++;
    for (int i = 0; i < verdict->count; i++) seen_rules[verdict->breach[i].rule]++;
}

static void tell(const char *which, const tally *t) {
    print_message("    %s: %llu traces agree, %llu clean", which, (unsigned long long)t->traces,
                  (unsigned long long)t->clean);
    for (int rule = 1; rule < QE_RULE_COUNT; rule++)
        if (t->by_rule[rule] > 0)
            print_message(", %s %llu", qe_rule_id((qe_rule)rule), (unsigned long long)t->by_rule[rule]);
    print_message("\n");
}

static FILE *open_file(const char *folder, const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    if (file == NULL) fail_msg("%s: %s", path, strerror(errno));
    return file;
}

static void read_program(FILE *file, const char *name, qe_program *program) {
    qe_error error;
    qe_program_init(program);
    if (qe_trace_read(file, name, program, &error) == QE_OK) return;
    fail_msg("%s:%u:%u: %s", name, error.line, error.column, error.message);
}

static int is_trace(const struct dirent *entry) {
    size_t length = strlen(entry->d_name);
    return length > 4 && strcmp(entry->d_name + length - 4, ".qet") == 0;
}

static void every_trace_of_the_repository_is_judged_alike(void **state) {
    (void)state;
    struct dirent **entries;
    tally t = {0};
    int count = scandir(trace_folder, &entries, is_trace, alphasort);
    assert_true(count > 100);
    for (int i = 0; i < count; i++) {
        qe_program program;
        oracle_verdict verdict;
        FILE *file = open_file(trace_folder, entries[i]->d_name);
        read_program(file, entries[i]->d_name, &program);
        fclose(file);
        uint32_t item = oracle_judge(&program, &verdict);
        hold_against(&program, item, &verdict, &t);
        qe_program_deinit(&program);
        free(entries[i]);
    }
    free(entries);
    tell("traces of the repository", &t);
}

/* `# all of: 5, long 7`: how long the sequences of a family's letters are. */
static uint32_t read_length(FILE *file, const char *name) {
    char line[256];
    unsigned usual, far;
    while (fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "# all of: %u, long %u", &usual, &far) == 2) {
            rewind(file);
            assert_in_range(far, usual, LENGTH_MAX);
            return goes_far ? far : usual;
        }
    fail_msg("%s does not say how long its traces are", name);
    return 0;
}

/* Each prefix without a breach goes on with every letter. What begins with a breach is judged with its first: both
 * judges name the first breach. */
static void extend(qe_program *trace, const qe_program *family, oracle *o, uint32_t length, tally *t) {
    uint32_t depth = trace->item_count;
    oracle_mark mark = oracle_here(o);
    trace->item_count++;
    for (uint32_t i = 0; i < family->item_count; i++) {
        trace->items[depth] = family->items[i];
        const oracle_verdict *verdict = oracle_next(o);
        hold_against(trace, depth, verdict, t);
        if (verdict->rule == QE_RULE_NONE && depth + 1 < length) extend(trace, family, o, length, t);
        oracle_back(o, &mark);
    }
    trace->item_count = depth;
}

static void judge_family(const char *name, tally *total) {
    qe_program family;
    qe_item items[LENGTH_MAX];
    tally t = {0};
    char which[128];
    FILE *file = open_file(family_folder, name);
    uint32_t length = read_length(file, name);
    read_program(file, name, &family);
    fclose(file);
    assert_in_range(family.item_count, 2, LETTERS_MAX);
    qe_program trace = family;
    trace.items = items;
    trace.item_count = 0;
    oracle *o = oracle_open(&trace, length);
    extend(&trace, &family, o, length, &t);
    oracle_close(o);
    double all = 0;
    for (uint32_t i = 0; i < length; i++) all = all * family.item_count + family.item_count;
    snprintf(which, sizeof which, "%.*s: all %.4g of up to %u items over %u letters", (int)strlen(name) - 4, name, all,
             length, family.item_count);
    tell(which, &t);
    total->traces += t.traces;
    total->clean += t.clean;
    qe_program_deinit(&family);
}

static void every_short_trace_of_each_family_is_judged_alike(void **state) {
    (void)state;
    struct dirent **entries;
    tally total = {0};
    int count = scandir(family_folder, &entries, is_trace, alphasort);
    assert_true(count > 10);
    for (int i = 0; i < count; i++) {
        judge_family(entries[i]->d_name, &total);
        free(entries[i]);
    }
    free(entries);
    print_message("    %d families: %llu traces held against each other, %llu clean\n", count,
                  (unsigned long long)total.traces, (unsigned long long)total.clean);
}

static void random_traces_are_judged_alike(void **state) {
    (void)state;
    tally t = {0};
    uint64_t items = 0;
    for (long trial = 0; trial < random_count; trial++) {
        qe_program program;
        oracle_verdict verdict;
        random_trace(&program, (uint64_t)(first_seed + trial));
        uint32_t item = oracle_judge(&program, &verdict);
        hold_against(&program, item, &verdict, &t);
        items += program.item_count;
        qe_program_deinit(&program);
    }
    tell("random", &t);
    print_message("    random: %.1f items on average\n", (double)items / (double)random_count);
}

static void judge(const qe_program *program, qe_violations *violations_out) {
    memset(violations_out, 0, sizeof *violations_out);
    qe_status status = qe_program_judge(program, violations_out, NULL);
    assert_true(status == QE_OK || status == QE_CONTRACT);
}

/* The same in all but the stream of an item that is on none. */
static int are_same(const qe_violation *a, const qe_violation *b) {
    return a->rule == b->rule && a->item == b->item && a->other_item == b->other_item && a->object == b->object &&
           a->stage == b->stage && a->microbatch == b->microbatch && a->expected == b->expected &&
           a->found == b->found && a->count == b->count;
}

/* Every record is the same, to its numbers: what is written down is all that judging needs. */
static void random_traces_are_judged_alike_when_they_were_written_and_read_again(void **state) {
    (void)state;
    enum { TRACES = 3000 };
    for (uint64_t seed = 0; seed < TRACES; seed++) {
        qe_program program, again;
        qe_violations before, after;
        char *text = NULL;
        size_t bytes = 0;
        random_trace(&program, seed);
        FILE *out = open_memstream(&text, &bytes);
        assert_non_null(out);
        assert_int_equal(qe_trace_write(&program, out, NULL), QE_OK);
        fclose(out);
        FILE *in = fmemopen(text, bytes, "r");
        assert_non_null(in);
        read_program(in, "again", &again);
        fclose(in);
        judge(&program, &before);
        judge(&again, &after);
        int same = before.count == after.count && before.total == after.total;
        for (uint32_t i = 0; i < before.count && same; i++) same = are_same(&before.record[i], &after.record[i]);
        if (!same) fail_msg("judged otherwise when it is read:\n%s", text);
        free(text);
        qe_program_deinit(&program);
        qe_program_deinit(&again);
    }
}

/* All that a trace can state, from scale.epoch to rng.split in the order of rules, without what only runs and files
 * break. */
static void every_rule_of_traces_was_broken_somewhere(void **state) {
    (void)state;
    for (int rule = QE_RULE_SCALE_EPOCH; rule <= QE_RULE_RNG_SPLIT; rule++)
        if (seen_rules[rule] == 0) fail_msg("no trace broke %s", qe_rule_id((qe_rule)rule));
}

static long argument(const char *text, long least) {
    char *end;
    errno = 0;
    long number = strtol(text, &end, 10);
    if (errno == 0 && *end == '\0' && end != text && number >= least) return number;
    fprintf(stderr, "found %s, expected a number from %ld on\n", text, least);
    exit(2);
}

int main(int argc, char **argv) {
    goes_far = argc > 1 && strcmp(argv[1], "long") == 0;
    if (argc > 2) random_count = argument(argv[2], 1);
    if (argc > 3) first_seed = argument(argv[3], 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_trace_of_the_repository_is_judged_alike),
        cmocka_unit_test(every_short_trace_of_each_family_is_judged_alike),
        cmocka_unit_test(random_traces_are_judged_alike),
        cmocka_unit_test(random_traces_are_judged_alike_when_they_were_written_and_read_again),
        cmocka_unit_test(every_rule_of_traces_was_broken_somewhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
