/* test_ledger_random.c - seeded programs against an oracle that knows no vector clocks: it keeps, for every stream,
 * the host and every event, the set of ops that are ordered before it, and compares every pair of ops. Also: a random
 * trace is judged the same after it was written and read, and a random departure the same from the ledger's dump. */
#include "core_program.h"

#include <stdlib.h>

#include "core/ledger_state.h"

enum { STREAMS = 5, EVENTS = 3, BUFFERS = 3, MOST_ITEMS = 60, BYTES = 96 };

static uint64_t next(uint64_t *seed) {
    uint64_t z = (*seed += 0x9e3779b97f4a7c15u); /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static uint32_t below(uint64_t *seed, uint32_t bound) { return (uint32_t)(next(seed) % bound); }

static void add_world(qe_program *program) {
    static const qe_stream_role roles[STREAMS] = {QE_STREAM_CALLER, QE_STREAM_COMPUTE, QE_STREAM_COMM, QE_STREAM_COMM,
                                                  QE_STREAM_HOST};
    static const char *const names[STREAMS] = {"a", "b", "c", "d", "host thread"};
    for (int i = 0; i < STREAMS; i++)
        assert_int_equal(qe_program_add_stream(program, names[i], roles[i], NULL, NULL), QE_OK);
    for (int i = 0; i < EVENTS; i++) qe_program_add_event(program);
    for (int i = 0; i < BUFFERS; i++) {
        qe_object buffer = {.kind = QE_OBJECT_BUFFER, .bytes = BYTES, .counter = 1};
        snprintf(buffer.name, sizeof buffer.name, "buffer \"%d\"", i);
        must_add_object(program, buffer);
    }
}

static qe_effect random_buffer_effect(uint64_t *seed) {
    qe_effect effect = {.object = below(seed, BUFFERS)};
    effect.kind = below(seed, 3) == 0 ? QE_EFFECT_BUFFER_WRITE : QE_EFFECT_BUFFER_READ;
    effect.begin = below(seed, BYTES);
    effect.end = effect.begin + below(seed, (uint32_t)(BYTES - effect.begin + 1));
    return effect;
}

static void add_random_item(qe_program *program, uint64_t *seed, uint32_t *recorded) {
    qe_item item = {.stream = below(seed, STREAMS), .event = below(seed, EVENTS), .microbatch = QE_NONE};
    uint32_t choice = below(seed, 10);
    if (choice < 5) {
        qe_effect effects[3];
        uint32_t count = below(seed, 4);
        for (uint32_t i = 0; i < count; i++) effects[i] = random_buffer_effect(seed);
        must_add(program, item, "op", effects, count);
        return;
    }
    static const uint8_t kinds[] = {QE_ITEM_RECORD, QE_ITEM_WAIT, QE_ITEM_WAIT, QE_ITEM_SYNC_EVENT,
                                    QE_ITEM_SYNC_STREAM};
    item.kind = kinds[choice - 5];
    if (below(seed, 40) == 0) item.kind = QE_ITEM_SYNC_DEVICE;
    if (item.kind == QE_ITEM_RECORD) *recorded |= 1u << item.event;
    int waits = item.kind == QE_ITEM_WAIT || item.kind == QE_ITEM_SYNC_EVENT;
    if (waits && !(*recorded >> item.event & 1)) return;
    must_add(program, item, NULL, NULL, 0);
}

/* The oracle: sets of items as bits. */
typedef struct order_sets {
    uint64_t stream[STREAMS], host, event[EVENTS], before[MOST_ITEMS];
} order_sets;

static int races(const qe_program *program, const order_sets *oracle, uint32_t index) {
    const qe_item *item = &program->items[index];
    for (uint32_t earlier = 0; earlier < index; earlier++) {
        const qe_item *other = &program->items[earlier];
        if (other->kind != QE_ITEM_OP || (oracle->before[index] >> earlier & 1)) continue;
        for (uint32_t a = 0; a < item->effect_count; a++)
            for (uint32_t b = 0; b < other->effect_count; b++)
                if (qe_effect_conflicts(&program->effects[item->first_effect + a],
                                        &program->effects[other->first_effect + b]))
                    return 1;
    }
    return 0;
}

/* Index of the first op that races, or QE_NONE. */
static uint32_t first_race(const qe_program *program) {
    order_sets oracle = {0};
    for (uint32_t i = 0; i < program->item_count; i++) {
        const qe_item *item = &program->items[i];
        uint64_t known = oracle.stream[item->stream] | oracle.host;
        switch ((qe_item_kind)item->kind) {
        case QE_ITEM_OP:
            oracle.before[i] = known;
            if (races(program, &oracle, i)) return i;
            oracle.stream[item->stream] = known | (uint64_t)1 << i;
            if (program->streams[item->stream].role == QE_STREAM_HOST) oracle.host = oracle.stream[item->stream];
            break;
        case QE_ITEM_RECORD: oracle.event[item->event] = known; break;
        case QE_ITEM_WAIT:
            oracle.stream[item->stream] = known | oracle.event[item->event];
            if (program->streams[item->stream].role == QE_STREAM_HOST) oracle.host = oracle.stream[item->stream];
            break;
        case QE_ITEM_SYNC_EVENT: oracle.host |= oracle.event[item->event]; break;
        case QE_ITEM_SYNC_STREAM: oracle.host |= oracle.stream[item->stream]; break;
        case QE_ITEM_SYNC_DEVICE:
            for (int s = 0; s < STREAMS; s++) oracle.host |= oracle.stream[s];
            break;
        case QE_ITEM_STEP_BEGIN:
        case QE_ITEM_STEP_END:
        case QE_ITEM_DESTROY:
        case QE_ITEM_KINDS: break;
        }
    }
    return QE_NONE;
}

static void races_are_those_of_an_oracle_without_clocks(void **state) {
    (void)state;
    uint32_t racy = 0, clean = 0;
    for (uint64_t trial = 0; trial < 20000; trial++) {
        uint64_t seed = trial;
        qe_program program;
        qe_violations violations;
        uint32_t recorded = 0;
        qe_program_init(&program);
        add_world(&program);
        uint32_t length = 4 + below(&seed, MOST_ITEMS - 4);
        for (uint32_t i = 0; i < length; i++) add_random_item(&program, &seed, &recorded);
        uint32_t expected = first_race(&program);
        qe_status status = qe_program_judge(&program, &violations, NULL);
        uint32_t found = status == QE_OK ? QE_NONE : violations.record[0].item;
        if (found != expected) print_error("seed %llu\n", (unsigned long long)trial);
        assert_int_equal(found, expected);
        if (expected == QE_NONE) clean++;
        else racy++;
        qe_program_deinit(&program);
    }
    print_message("    %u racy programs, %u clean ones\n", racy, clean);
    assert_true(racy > 1000);
    assert_true(clean > 1000);
}

/* A right program with random items moved, dropped, doubled, and random numbers changed. */
static void add_mutated(qe_program *program, uint64_t *seed) {
    qe_program right;
    make_right_program(&right);
    program->objects[SCALE].counter = below(seed, 4);
    program->objects[SLOT].counter = below(seed, 4);
    program->objects[WEIGHT].counter = below(seed, 4);
    program->objects[BUFFER].counter = below(seed, 2);
    for (uint32_t step = 0; step < 2; step++) {
        must_add(program, (qe_item){.kind = QE_ITEM_STEP_BEGIN, .microbatch = QE_NONE}, NULL, NULL, 0);
        for (uint32_t i = 0; i < ITEM_COUNT; i++) {
            uint32_t chosen = below(seed, 12) == 0 ? below(seed, ITEM_COUNT) : i;
            if (below(seed, 20) == 0) continue;
            qe_item item = right.items[chosen];
            qe_effect effects[QE_EFFECTS_MAX];
            for (uint32_t k = 0; k < item.effect_count; k++) {
                effects[k] = right.effects[item.first_effect + k];
                uint64_t version = below(seed, 2) ? below(seed, 4) : UINT64_MAX - below(seed, 3);
                if (below(seed, 15) == 0) effects[k].version = version;
                if (below(seed, 30) == 0 && effects[k].object == CACHE) effects[k].recipe = (uint8_t)below(seed, 8);
                if (below(seed, 30) == 0 && effects[k].object == SLOT) effects[k].microbatch = QE_NONE;
            }
            must_add(program, item, item.kind == QE_ITEM_OP ? right.labels[item.label].text : NULL, effects,
                     item.effect_count);
        }
        must_add(program, (qe_item){.kind = QE_ITEM_STEP_END, .microbatch = QE_NONE}, NULL, NULL, 0);
    }
    qe_program_deinit(&right);
}

static void assert_same_records(const qe_violations *a, const qe_violations *b) {
    assert_int_equal(a->total, b->total);
    assert_int_equal(a->count, b->count);
    for (uint32_t i = 0; i < a->count; i++) {
        assert_int_equal(a->record[i].rule, b->record[i].rule);
        assert_int_equal(a->record[i].item, b->record[i].item);
        assert_int_equal(a->record[i].other_item, b->record[i].other_item);
        assert_int_equal(a->record[i].object, b->record[i].object);
        assert_int_equal(a->record[i].expected, b->record[i].expected);
        assert_int_equal(a->record[i].found, b->record[i].found);
        assert_int_equal(a->record[i].count, b->record[i].count);
    }
}

static void a_written_trace_is_judged_as_its_program(void **state) {
    (void)state;
    uint32_t rules[QE_RULE_COUNT] = {0};
    for (uint64_t trial = 0; trial < 3000; trial++) {
        uint64_t seed = trial;
        qe_program program, again;
        qe_violations violations, violations_again;
        qe_error error;
        qe_program_init(&program);
        qe_program_init(&again);
        add_objects(&program);
        add_mutated(&program, &seed);
        char *text = NULL;
        size_t length = 0;
        FILE *out = open_memstream(&text, &length);
        assert_int_equal(qe_trace_write(&program, out, NULL), QE_OK);
        fclose(out);
        FILE *in = fmemopen(text, length, "r");
        qe_status read = qe_trace_read(in, "copy", &again, &error);
        if (read != QE_OK) print_error("%u:%u %s\n", error.line, error.column, error.message);
        assert_int_equal(read, QE_OK);
        fclose(in);
        qe_status status = qe_program_judge(&program, &violations, NULL);
        assert_int_equal(qe_program_judge(&again, &violations_again, NULL), status);
        assert_same_records(&violations, &violations_again);
        for (uint32_t i = 0; i < violations.count; i++) rules[violations.record[i].rule]++;
        free(text);
        qe_program_deinit(&program);
        qe_program_deinit(&again);
    }
    uint32_t seen = 0;
    for (int i = 1; i < QE_RULE_COUNT; i++) seen += rules[i] > 0;
    print_message("    %u rules were broken\n", seen);
    assert_true(seen >= 25);
}

/* Drives a ledger with planned and other items in any order; every refusal must come out of its dump, too. */
static uint32_t drive(qe_ledger *ledger, uint64_t *seed) {
    const qe_program *program = ledger->program;
    qe_violations violations, offline;
    uint32_t refusals = 0, index = 0;
    qe_ledger_step_begin(ledger);
    while (index < program->item_count) {
        uint32_t chosen = below(seed, 8) == 0 ? below(seed, program->item_count) : index;
        const qe_item *item = &program->items[chosen];
        const qe_effect *effects = &program->effects[item->first_effect];
        qe_status status = below(seed, 8) ? qe_ledger_issue(ledger, chosen, &violations)
                                          : qe_ledger_submit(ledger, item, effects, chosen, &violations);
        QE_LEDGER_VALID(ledger);
        if (chosen == index || below(seed, 10) == 0) index++;
        if (status == QE_OK) continue;
        assert_int_equal(status, QE_CONTRACT);
        refusals++;
        qe_program history;
        qe_program_init(&history);
        assert_int_equal(qe_ledger_history(ledger, &history, NULL), QE_OK);
        assert_int_equal(qe_program_judge(&history, &offline, NULL), QE_CONTRACT);
        assert_int_equal(offline.record[0].rule, violations.record[0].rule);
        assert_int_equal(offline.record[0].object, violations.record[0].object);
        assert_int_equal(offline.record[0].expected, violations.record[0].expected);
        assert_int_equal(offline.record[0].found, violations.record[0].found);
        assert_int_equal(offline.record[0].item, history.item_count - 1);
        assert_int_equal(offline.total, violations.total);
        qe_program_deinit(&history);
    }
    if (qe_ledger_step_end(ledger, &violations) != QE_OK) qe_ledger_step_abort(ledger);
    return refusals;
}

static void every_refusal_comes_out_of_the_dump_too(void **state) {
    (void)state;
    uint32_t refusals = 0;
    qe_program program;
    qe_violations violations;
    make_right_program(&program);
    for (uint64_t trial = 0; trial < 1000; trial++) {
        uint64_t seed = trial;
        qe_ledger *ledger;
        assert_int_equal(qe_ledger_create(&program, &ledger, NULL), QE_OK);
        assert_int_equal(qe_ledger_certify(ledger, &violations, NULL), QE_OK);
        for (int step = 0; step < 4; step++) {
            refusals += drive(ledger, &seed);
            if (below(&seed, 3) == 0) qe_ledger_touch(ledger, below(&seed, BUFFER + 1), below(&seed, 9));
        }
        qe_ledger_destroy(ledger);
    }
    print_message("    %u refusals\n", refusals);
    assert_true(refusals > 1000);
    qe_program_deinit(&program);
}

/* What an observing ledger told, by rule, and the first rule of all. */
typedef struct told_rules {
    uint32_t total, of[QE_RULE_COUNT];
    qe_rule first;
} told_rules;

static void note(told_rules *told, const qe_violations *violations) {
    assert_int_equal(violations->total, violations->count);
    if (told->total == 0 && violations->total > 0) told->first = violations->record[0].rule;
    told->total += violations->total;
    for (uint32_t i = 0; i < violations->count; i++) told->of[violations->record[i].rule]++;
}

static told_rules observe_step(qe_ledger *ledger, uint64_t *seed) {
    const qe_program *program = ledger->program;
    qe_violations violations;
    told_rules told = {0};
    qe_ledger_step_begin(ledger);
    for (uint32_t index = 0; index < program->item_count; index++) {
        uint32_t chosen = below(seed, 12) == 0 ? below(seed, program->item_count) : index;
        if (below(seed, 16) == 0) continue;
        const qe_item *item = &program->items[chosen];
        qe_status status = below(seed, 8) ? qe_ledger_issue(ledger, chosen, &violations)
                                          : qe_ledger_submit(ledger, item, &program->effects[item->first_effect],
                                                             below(seed, 2) ? chosen : QE_NONE, &violations);
        QE_LEDGER_VALID(ledger);
        assert_int_equal(status, violations.total > 0 ? QE_CONTRACT : QE_OK);
        note(&told, &violations);
    }
    qe_status status = qe_ledger_step_end(ledger, &violations);
    assert_int_equal(status, violations.total > 0 ? QE_CONTRACT : QE_OK);
    note(&told, &violations);
    return told;
}

/* Submissions beside the program have no number of their own in a ledger: of an op that races with several of them it
 * tells once, the trace of each. */
static int is_race(int rule) { return rule >= QE_RULE_SYNC_ENTER && rule <= QE_RULE_SYNC_HOST; }

static int assert_told_again(const qe_ledger *ledger, const told_rules *told) {
    qe_program history;
    qe_violations offline;
    uint32_t of[QE_RULE_COUNT] = {0};
    qe_program_init(&history);
    assert_int_equal(qe_ledger_history(ledger, &history, NULL), QE_OK);
    assert_int_equal(history.items[history.item_count - 1].kind, QE_ITEM_STEP_END);
    assert_int_equal(qe_program_judge(&history, &offline, NULL), told->total > 0 ? QE_CONTRACT : QE_OK);
    if (told->total > 0) assert_int_equal(offline.record[0].rule, told->first);
    for (uint32_t i = 0; i < offline.count; i++) of[offline.record[i].rule] += offline.record[i].count;
    int whole = offline.count < QE_VIOLATIONS_MAX;
    for (int rule = 1; whole && rule < QE_RULE_COUNT; rule++) {
        if (is_race(rule)) assert_int_equal(of[rule] > 0, told->of[rule] > 0);
        else assert_int_equal(of[rule], told->of[rule]);
    }
    qe_program_deinit(&history);
    return whole && told->total > 0;
}

static void an_observed_step_is_judged_the_same_from_its_dump(void **state) {
    (void)state;
    uint32_t broken = 0, whole = 0, right_after = 0;
    qe_program program;
    qe_violations violations;
    make_right_program(&program);
    for (uint64_t trial = 0; trial < 1500; trial++) {
        uint64_t seed = trial;
        qe_ledger *ledger;
        assert_int_equal(qe_ledger_create(&program, &ledger, NULL), QE_OK);
        assert_int_equal(qe_ledger_certify(ledger, &violations, NULL), QE_OK);
        qe_ledger_observe(ledger);
        for (int step = 0; step < 4; step++) {
            told_rules told = observe_step(ledger, &seed);
            broken += told.total > 0;
            if (qe_ledger_observed(ledger) > 0) assert_true(told.total > 0);
            whole += assert_told_again(ledger, &told) != 0;
        }
        /* Whatever was observed, a right step is right after it, and on the certified way. */
        uint64_t certified, judged;
        qe_ledger_step_begin(ledger);
        for (uint32_t i = 0; i < program.item_count; i++)
            if (qe_ledger_issue(ledger, i, &violations) != QE_OK)
                fail_msg("trial %llu item %u: %s", (unsigned long long)trial, i,
                         qe_rule_id(violations.record[0].rule));
        assert_int_equal(qe_ledger_step_end(ledger, &violations), QE_OK);
        qe_ledger_counts(ledger, &certified, &judged);
        right_after += certified == program.item_count;
        qe_ledger_destroy(ledger);
    }
    print_message("    %u observed steps, %u of them within the records kept\n", broken, whole);
    assert_true(broken > 1000);
    assert_true(whole > 300);
    assert_int_equal(right_after, 1500);
    qe_program_deinit(&program);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(races_are_those_of_an_oracle_without_clocks),
        cmocka_unit_test(a_written_trace_is_judged_as_its_program),
        cmocka_unit_test(every_refusal_comes_out_of_the_dump_too),
        cmocka_unit_test(an_observed_step_is_judged_the_same_from_its_dump),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
