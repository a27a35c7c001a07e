/* test_violations.c - what a record of a breach says: both ops with their lines, the object, the versions, and which
 * edge is missing. */
#include "core_program.h"

enum { PARTS = 6 };

typedef struct told {
    const char *trace;
    qe_rule rule;
    uint32_t line, other_line; /* 0: there is no other op */
    uint64_t expected, found;
    const char *parts[PARTS];
} told;

static const told all[] = {
    {"csan_40_never_waited", QE_RULE_SYNC_SIDE, 10, 9, 1, 0,
     {"kernel on S2 at line 10", "buffer T", "kernel on S1 at line 9", "S2 never waited for S1",
      "recorded on S1 behind the former and awaited on S2 before the latter"}},
    {"csan_40_waited_too_early", QE_RULE_SYNC_SIDE, 14, 12, 2, 1,
     {"kernel on S2 at line 14", "kernel on S1 at line 12", "up to its op 1; the conflict is with op 2"}},
    {"csan_21_reused_block", QE_RULE_SYNC_REUSE, 14, 11, 1, 0,
     {"kernel on S2 at line 14", "buffer U", "kernel on S1 at line 11 (buffer T)", "recorded on S1"}},
    {"csan_30_coalesced_blocks", QE_RULE_SYNC_REUSE, 16, 11, 1, 0,
     {"buffer U", "one on S1 at line 11 (buffer T1)"}},
    {"memory_views_share_bytes", QE_RULE_SYNC_SIDE, 11, 10, 1, 0,
     {"buffer view", "whole on a at line 10 (buffer block)"}},
    {"slot_shares_bytes_with_a_buffer", QE_RULE_SLOT_ALIAS, 8, 0, 65536, 65791,
     {"buffer backup", "The slot (slot X) lies at 0x10000"}},
    {"memory_use_after_free", QE_RULE_BUFFER_FREED, 10, 9, 4096, 4096,
     {"read on a at line 10", "buffer T", "Last changed by free on a at line 9"}},
    {"memory_allocated_twice", QE_RULE_BUFFER_LIVE, 10, 9, 4096, 4096,
     {"malloc on a at line 10", "buffer T", "Last changed by malloc on a at line 9"}},
    {"memory_where_another_lives", QE_RULE_BUFFER_LIVE, 10, 0, 4128, 4096,
     {"malloc on a at line 10", "buffer U", "at 0x1020", "lies at 0x1000 (buffer T) is live"}},
    {"capture_unjoined", QE_RULE_GRAPH_UNJOINED, 16, 15, 1, 0,
     {"end on s1 at line 16", "graph G", "1 ops of that stream", "right on s2 at line 15"}},
    {"b125_same_numbers_in_every_replay", QE_RULE_RNG_FROZEN, 9, 8, 64, 0,
     {"replay on compute (stage 0, microbatch 1) at line 9", "rng R", "The next number is 64; the draw begins at 0"}},
    {"b124_recompute_draws_other_numbers", QE_RULE_RNG_SPLIT, 9, 8, 64, 128,
     {"recompute on compute (stage 0, microbatch 0) at line 9", "rng R", "drew these numbers at 64"}},
    {"b58_rolled_back", QE_RULE_CACHE_STALE, 14, 11, 2, 1,
     {"cache q", "Version 2 is due; found version 1", "Last changed by fill on compute"}},
    {"slot_leaks_in_the_order_of_objects", QE_RULE_SLOT_LEAK, 12, 10, 0, 1, {"step end at line 12", "slot X"}},
    {"default_stream_beside_nonblocking", QE_RULE_SYNC_SIDE, 10, 9, 1, 0, {"default never waited for free"}},
    {"ranks_hosts_are_apart", QE_RULE_SYNC_SIDE, 10, 8, 1, 0, {"c1 never waited for c0"}},
    {"nvidia_06_refill_before_replay", QE_RULE_SYNC_HOST, 13, 12, 4, 0,
     {"refill on cpu at line 13", "replay on compute at line 12", "buffer pinned"}},
};

static uint32_t line_of(const qe_program *program, uint32_t item) {
    return item < program->item_count ? program->items[item].line : 0;
}

static void check(const told *expected) {
    char path[256], text[2048];
    qe_program program;
    qe_violations violations;
    qe_error error;
    snprintf(path, sizeof path, "tests/traces/%s.qet", expected->trace);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    qe_program_init(&program);
    if (qe_trace_read(file, path, &program, &error) != QE_OK) fail_msg("%s:%u %s", path, error.line, error.message);
    fclose(file);
    assert_int_equal(qe_program_judge(&program, &violations, &error), QE_CONTRACT);
    snprintf(text, sizeof text, "%u breaches of contract; the first is %s", violations.total,
             qe_rule_id(expected->rule));
    assert_string_equal(error.message, text);
    const qe_violation *first = &violations.record[0];
    qe_violation_text(first, &program, text, sizeof text);
    print_message("    %s\n", text);
    assert_int_equal(first->rule, expected->rule);
    assert_int_equal(line_of(&program, first->item), expected->line);
    assert_int_equal(line_of(&program, first->other_item), expected->other_line);
    assert_int_equal(first->expected, expected->expected);
    assert_int_equal(first->found, expected->found);
    for (int i = 0; i < PARTS && expected->parts[i] != NULL; i++)
        if (strstr(text, expected->parts[i]) == NULL) fail_msg("%s: no `%s` in: %s", path, expected->parts[i], text);
    qe_program_deinit(&program);
}

static void a_record_names_both_ops_the_object_the_versions_and_the_missing_edge(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) check(&all[i]);
}

/* What the two numbers of a record say, rule by rule, and how the rest of the text goes on. */
typedef struct fact {
    qe_rule rule;
    uint64_t expected, found;
    const char *words;
} fact;

#define WORD(high, low) ((uint64_t)(high) << 32 | (low))

static const fact facts[] = {
    {QE_RULE_SCALE_EPOCH, 5, 3, "Built for epoch 5; the scale is at epoch 3."},
    {QE_RULE_SCALE_BUSY, 5, 3, "5 records are due in a step; 3 came."},
    {QE_RULE_SCALE_TWICE, 1, 2, "It was folded in this step already."},
    {QE_RULE_SCALE_UNFOLDED, 1, 0, "It holds an amax that no fold took."},
    {QE_RULE_SCALE_LOST, 5, 3, "5 records are due in a step; 3 came."},
    {QE_RULE_SLOT_STALE, 5, 3, "The handle is of generation 5; the slot is at 3."},
    {QE_RULE_SLOT_LIVE, 5, 3, "Generation 5 is asked for; generation 3 is live."},
    {QE_RULE_SLOT_EMPTY, 5, 3, "Generation 5 is named; nothing is retained."},
    {QE_RULE_SLOT_TWICE, 5, 3, "Generation 5 was released before."},
    {QE_RULE_SLOT_OWNER, WORD(2, 5), WORD(1, QE_NONE),
     "Named for stage 2 and microbatch 5; it belongs to stage 1 and no microbatch."},
    {QE_RULE_SLOT_LEAK, 5, 3, "Generation 3 was never released."},
    {QE_RULE_WEIGHT_VERSION, 5, 3, "Built for version 5; the weight is at version 3."},
    {QE_RULE_WEIGHT_TWICE, 1, 2, "It was committed in this step already."},
    {QE_RULE_WEIGHT_UNTAKEN, 1, 0, "Its gradient was not taken in this step."},
    {QE_RULE_CACHE_EMPTY, 1, 0, "Nothing has filled it."},
    {QE_RULE_CACHE_STALE, 5, 3, "Version 5 is due; found version 3."},
    {QE_RULE_CACHE_SCALE, 5, 3, "Scale epoch 5 is due; found epoch 3."},
    {QE_RULE_CACHE_RECIPE, 4, 5, "Used for fp32; made for recipe 5."},
    {QE_RULE_CACHE_RECIPE, 0, 3, "Used for delayed; made for bf16."},
    {QE_RULE_CACHE_LAYOUT, 26, 3, "Layouts 0x1a are used; 0x3 are filled."},
    {QE_RULE_GRAD_TWICE, 5, 3, "That of microbatch 5, use 3, is in already."},
    {QE_RULE_GRAD_TWICE, QE_NONE, 0, "That of no microbatch, use 0, is in already."},
    {QE_RULE_GRAD_ORDER, 5, 3, "The contribution of microbatch 5 is due; that of microbatch 3 came."},
    {QE_RULE_GRAD_ORDER, 5, QE_NONE, "The contribution of microbatch 5 is due; that of no microbatch came."},
    {QE_RULE_GRAD_ORDER, WORD(0, 5), WORD(1, 5),
     "The contribution of microbatch 5, use 0, is due; that of microbatch 5, use 1, came."},
    {QE_RULE_GRAD_ORDER, QE_NONE, 3, "No further contribution is due; that of microbatch 3 came."},
    {QE_RULE_GRAD_ORDER, QE_NONE, WORD(2, 3), "No further contribution is due; that of microbatch 3, use 2, came."},
    {QE_RULE_GRAD_SET, 1, 0, "The first deposit of a step must set; this one adds."},
    {QE_RULE_GRAD_SET, 0, 1, "Deposits are in already; this one would wipe them out."},
    {QE_RULE_GRAD_TAKEN, 5, 3, "The optimizer has it already."},
    {QE_RULE_GRAD_MISSING, 5, 3, "3 of 5 deposits are in."},
    {QE_RULE_BUFFER_BOUNDS, 5, 9, "The range reaches 9; it may reach 5."},
    {QE_RULE_BUFFER_UNWRITTEN, 5, 0, "Nothing has written byte 5."},
    {QE_RULE_BUFFER_VERSION, 5, 3, "Built for write 5 of the step; write 3 is there."},
    {QE_RULE_SYNC_CAPTURE, 1, 0, "What is waited for lies on the other side of a recording's border; move the wait "
                                 "across it."},
    {QE_RULE_GRAPH_UNJOINED, 5, 3, "5 ops of that stream were recorded; the end waits for 3."},
    {QE_RULE_GRAPH_UNJOINED, 3, 3, "It began on another stream than the one that it ends on."},
    {QE_RULE_GRAPH_EMPTY, 5, 0, "It was never captured."},
    {QE_RULE_GRAPH_STALE, 5, 3, "Seal 5 is named; seal 3 is due."},
    {QE_RULE_GRAPH_MODE, 5, 3, "Captured for mode 5; launched for mode 3."},
    {QE_RULE_GRAPH_ADDRESS, 4096, 10, "It holds address 0x1000; that is at 0xa now."},
    {QE_RULE_GRAPH_CONSTANT, 26, 3, "It holds bits 0x1a; they are 0x3 now."},
    {QE_RULE_SLOT_ALIAS, 26, 3, "The slot lies at 0x1a, the buffer at 0x3."},
    {QE_RULE_BUFFER_FREED, 5, 5, "It is not allocated here."},
    {QE_RULE_BUFFER_LIVE, 26, 3, "Asked for at 0x1a; what lies at 0x3 is live."},
    {QE_RULE_RNG_FROZEN, 5, 3, "The next number is 5; the draw begins at 3."},
    {QE_RULE_RNG_SPLIT, 5, 3, "No forward of this microbatch drew these numbers at 5."},
    {QE_RULE_SCHEDULE_CYCLE, 0, 0, ""},
    {QE_RULE_STEP_NONFINITE, 0, 0, ""},
};

/* Two ops, the later one of a microbatch; the objects and streams of the right program. */
static void make_two_ops(qe_program *program) {
    qe_program_init(program);
    add_objects(program);
    qe_item early = {.kind = QE_ITEM_OP, .stream = SEND, .microbatch = QE_NONE, .line = 30};
    qe_item late = {.kind = QE_ITEM_OP, .stream = COMPUTE, .microbatch = 7, .stage = 2};
    must_add(program, early, "early", NULL, 0);
    must_add(program, late, "late", NULL, 0);
}

static void assert_text(const qe_violation *violation, const qe_program *program, const char *expected) {
    char text[2048], cut[] = "xxxxxxx";
    int length = qe_violation_text(violation, program, text, sizeof text);
    assert_string_equal(text, expected);
    assert_int_equal(length, strlen(expected));
    assert_int_equal(qe_violation_text(violation, program, cut, 4), length); /* as snprintf: its whole length */
    assert_int_equal(strlen(cut), 3);
    assert_memory_equal(cut, expected, 3);
    assert_string_equal(cut + 4, "xxx");
    assert_int_equal(qe_violation_text(violation, program, NULL, 0), length);
}

static void each_rule_says_its_facts_word_for_word(void **state) {
    (void)state;
    qe_program program;
    char expected[2048];
    make_two_ops(&program);
    for (size_t i = 0; i < sizeof facts / sizeof facts[0]; i++) {
        const fact *one = &facts[i];
        qe_violation violation = {.rule = one->rule, .item = 1, .other_item = QE_NONE, .object = QE_NONE,
                                  .stream = COMPUTE, .expected = one->expected, .found = one->found, .count = 1};
        const char *blank = one->words[0] ? " " : "";
        snprintf(expected, sizeof expected, "%s: late on compute (stage 2, microbatch 7) (item 1). %s%s%s",
                 qe_rule_id(one->rule), qe_rule_sentence(one->rule), blank, one->words);
        assert_text(&violation, &program, expected);
        violation.other_item = 0;
        violation.count = 2;
        int across = one->rule == QE_RULE_SYNC_CAPTURE || one->rule == QE_RULE_GRAPH_UNJOINED;
        snprintf(expected + strlen(expected), sizeof expected - strlen(expected), " %s early on send at line 30. It "
                 "happened 2 times.", across ? "On the other side:" : "Last changed by");
        assert_text(&violation, &program, expected);
    }
    qe_program_deinit(&program);
}

static void a_race_says_how_far_it_has_waited_and_what_is_missing(void **state) {
    (void)state;
    static const qe_rule races[] = {QE_RULE_SYNC_ENTER, QE_RULE_SYNC_EXIT, QE_RULE_SYNC_SIDE, QE_RULE_SYNC_HOST,
                                    QE_RULE_SYNC_REUSE};
    qe_program program;
    char expected[2048];
    make_two_ops(&program);
    for (size_t i = 0; i < sizeof races / sizeof races[0]; i++) {
        qe_violation race = {.rule = races[i], .item = 1, .other_item = 0, .object = SLOT, .stream = COMPUTE,
                             .expected = 5, .found = 3, .count = 1};
        for (; race.found <= 3; race.found -= 3) {
            const char *waited = race.found > 0 ? "has waited for send up to its op 3; the conflict is with op 5."
                                                : "never waited for send.";
            snprintf(expected, sizeof expected, "%s: late on compute (stage 2, microbatch 7) (item 1), slot X. %s No "
                     "event orders early on send at line 30 before this on compute. compute %s The missing edge: an "
                     "event recorded on send behind the former and awaited on compute before the latter.",
                     qe_rule_id(races[i]), qe_rule_sentence(races[i]), waited);
            assert_text(&race, &program, expected);
        }
    }
    qe_violation outside = {.rule = QE_RULE_SYNC_SIDE, .item = 2, .other_item = 2, .object = 99, .stream = 99,
                            .expected = 5, .found = 0, .count = 1};
    assert_text(&outside, &program, "sync.side: a submission outside the plan. Conflicting ops on two streams are "
                "ordered by an event. No event orders a submission outside the plan before this on the host. the host "
                "never waited for its stream. The missing edge: an event recorded on its stream behind the former and "
                "awaited on the host before the latter.");
    qe_violation end = {.rule = QE_RULE_SLOT_LEAK, .item = QE_NONE, .other_item = 0, .object = SLOT,
                        .stream = QE_NONE, .expected = 0, .found = 1, .count = 1};
    assert_text(&end, &program, "slot.leak: the end of the step, slot X. Every slot is free when the step ends. "
                "Generation 1 was never released. Last changed by early on send at line 30.");
    qe_violation begun = {.rule = QE_RULE_SYNC_CAPTURE, .item = 0, .other_item = QE_NONE, .object = SLOT,
                          .stream = SEND, .expected = 1, .found = 0, .count = 1};
    assert_text(&begun, &program, "sync.capture: early on send at line 30, slot X. A recording waits only for what is "
                "recorded with it. Its stream records already, or is one that cannot: the host, or the legacy default "
                "stream.");
    qe_violation nothing = {.rule = QE_RULE_SYNC_EVENT, .item = 0, .other_item = QE_NONE, .object = QE_NONE,
                            .stream = SEND, .expected = 1, .found = 0, .count = 1};
    assert_text(&nothing, &program, "sync.event: early on send at line 30. Only an event that was recorded is waited "
                "for. The event has no record before this; such a wait waits for nothing.");
    qe_program_deinit(&program);
}

static void every_kind_of_submission_has_a_name(void **state) {
    (void)state;
    static const char *const words[QE_ITEM_KINDS] = {"late on compute", "record on compute", "wait on compute", "sync",
                                                     "sync", "sync", "step begin", "step end", "destroy"};
    qe_program program;
    char expected[256];
    make_two_ops(&program);
    for (uint8_t kind = 0; kind < QE_ITEM_KINDS; kind++) {
        program.items[1].kind = kind;
        qe_violation violation = {.rule = QE_RULE_SYNC_EVENT, .item = 1, .other_item = QE_NONE, .object = QE_NONE,
                                  .stream = COMPUTE, .count = 1};
        snprintf(expected, sizeof expected, "sync.event: %s (stage 2, microbatch 7) (item 1). Only an event that was "
                 "recorded is waited for. The event has no record before this; such a wait waits for nothing.",
                 words[kind]);
        assert_text(&violation, &program, expected);
    }
    qe_program_deinit(&program);
}

static void what_only_a_trace_may_hold_is_refused_by_a_ledger(void **state) {
    (void)state;
    qe_program program;
    qe_ledger *ledger;
    make_right_program(&program);
    program.streams[CALLER].order = QE_STREAM_LEGACY; /* the first stream */
    assert_int_equal(qe_ledger_create(&program, &ledger, NULL), QE_ERROR_UNSUPPORTED);
    program.streams[CALLER].order = QE_STREAM_SEPARATE;
    program.streams[HOST].rank = 1; /* the last one */
    assert_int_equal(qe_ledger_create(&program, &ledger, NULL), QE_ERROR_UNSUPPORTED);
    program.streams[HOST].rank = 0;
    program.streams[COMPUTE].order = QE_STREAM_BLOCKING;
    assert_int_equal(qe_ledger_create(&program, &ledger, NULL), QE_ERROR_UNSUPPORTED);
    program.streams[COMPUTE].order = QE_STREAM_SEPARATE;
    program.streams[COMPUTE].rank = 1;
    assert_int_equal(qe_ledger_create(&program, &ledger, NULL), QE_ERROR_UNSUPPORTED);
    program.streams[COMPUTE].rank = 0;
    assert_int_equal(qe_ledger_create(&program, &ledger, NULL), QE_OK);
    qe_violations violations;
    qe_effect effect = {.kind = QE_EFFECT_BUFFER_FREE, .object = BUFFER, .end = BUFFER_BYTES};
    qe_item item = {.kind = QE_ITEM_OP, .stream = COMPUTE, .microbatch = QE_NONE, .effect_count = 1};
    qe_ledger_step_begin(ledger);
    assert_int_equal(qe_ledger_submit(ledger, &item, &effect, QE_NONE, &violations), QE_ERROR_UNSUPPORTED);
    effect = (qe_effect){.kind = QE_EFFECT_BUFFER_READ, .object = BUFFER, .end = 1, .rows = 2, .pitch = 2};
    assert_int_equal(qe_ledger_submit(ledger, &item, &effect, QE_NONE, &violations), QE_ERROR_UNSUPPORTED);
    qe_ledger_destroy(ledger);
    OP(&program, COMPUTE, QE_NONE, "free", {.kind = QE_EFFECT_BUFFER_FREE, .object = BUFFER, .end = BUFFER_BYTES});
    assert_int_equal(qe_ledger_create(&program, &ledger, NULL), QE_ERROR_UNSUPPORTED);
    qe_program_deinit(&program);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_record_names_both_ops_the_object_the_versions_and_the_missing_edge),
        cmocka_unit_test(each_rule_says_its_facts_word_for_word),
        cmocka_unit_test(a_race_says_how_far_it_has_waited_and_what_is_missing),
        cmocka_unit_test(every_kind_of_submission_has_a_name),
        cmocka_unit_test(what_only_a_trace_may_hold_is_refused_by_a_ledger),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
