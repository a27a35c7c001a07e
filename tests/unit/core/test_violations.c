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

static void what_only_a_trace_may_hold_is_refused_by_a_ledger(void **state) {
    (void)state;
    qe_program program;
    qe_ledger *ledger;
    make_right_program(&program);
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
        cmocka_unit_test(what_only_a_trace_may_hold_is_refused_by_a_ledger),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
