/* PyTorch's CSV with communication: what is added, and what a file may say of it instead. */
#include "unit/schedule/support.h"

enum { TEXT_BYTES = 1 << 16, CELLS = 512, RANKS = 8 };

static char *with_moves(const qe_schedule *schedule) {
    char *text = calloc(1, TEXT_BYTES);
    FILE *file = fmemopen(text, TEXT_BYTES, "w");
    qe_error error = {0};
    assert_non_null(file);
    if (qe_schedule_write_csv_comms(schedule, file, &error) != QE_OK) fail_msg("%s", error.message);
    (void)fclose(file);
    return text;
}

/* As PyTorch 2.11 dumps them with format="compute_comms". */
static void the_communication_is_that_of_pytorch(void **state) {
    (void)state;
    qe_schedule schedule = generated("zbh1", 2, 1, 2);
    char *text = with_moves(&schedule);
    assert_string_equal(text, "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0W0,0RECV_B1,0I1,0W1,0REDUCE_GRAD,"
                              "0RESHARD\n1UNSHARD,1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1F1,1I1,1SEND_B1,1W0,1W1,"
                              "1REDUCE_GRAD,1RESHARD\n");
    free(text);
    qe_schedule_deinit(&schedule);
    schedule = generated("looped-bfs", 1, 4, 1); /* three stages are gathered at once; no transfers within a rank */
    text = with_moves(&schedule);
    assert_string_equal(text, "0UNSHARD,1UNSHARD,2UNSHARD,0F0,0RESHARD,3UNSHARD,1F0,2F0,3F0,3B0,3REDUCE_GRAD,3RESHARD,"
                              "0UNSHARD,2B0,2REDUCE_GRAD,2RESHARD,1B0,1REDUCE_GRAD,1RESHARD,0B0,0REDUCE_GRAD,"
                              "0RESHARD\n");
    free(text);
    qe_schedule_deinit(&schedule);
    schedule = generated("dualpipev", 2, 2, 4);
    text = with_moves(&schedule);
    assert_non_null(strstr(text, ",(2F2;1B0)OVERLAP_F_B,2SEND_F2,1SEND_B0,"));
    free(text);
    qe_schedule_deinit(&schedule);
}

static void every_order_comes_back_without_its_communication(void **state) {
    (void)state;
    for (uint32_t name = 0; qe_schedule_name(name) != NULL; name++) {
        for (uint32_t ranks = 1; ranks <= 4; ranks++) {
            qe_schedule_request request = {.name = qe_schedule_name(name), .ranks = ranks, .microbatches = 2 * ranks,
                                           .chunks = qe_schedule_usual_chunks(qe_schedule_name(name))};
            qe_schedule schedule;
            if (qe_schedule_generate(&request, &schedule, NULL) != QE_OK) continue; /* dualpipe on an odd number */
            char *text = with_moves(&schedule);
            qe_schedule back = schedule_of(text);
            assert_int_equal(back.rank_begin[ranks], schedule.rank_begin[ranks]);
            assert_int_equal(back.reversed, schedule.reversed);
            for (uint32_t i = 0; i < schedule.rank_begin[ranks]; i++) {
                char ours[64], theirs[64];
                (void)qe_action_text(&schedule.actions[i], ours, sizeof ours);
                (void)qe_action_text(&back.actions[i], theirs, sizeof theirs);
                assert_string_equal(ours, theirs);
                assert_int_equal(back.actions[i].paired, schedule.actions[i].paired);
            }
            free(text);
            qe_schedule_deinit(&back);
            qe_schedule_deinit(&schedule);
        }
    }
}

static void a_schedule_that_cannot_run_gets_no_communication(void **state) {
    (void)state;
    static const char *const files[] = {"0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "0F0,3F0\n1F0\n"};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        qe_schedule schedule = schedule_of(files[i]);
        qe_error error = {0};
        FILE *file = tmpfile();
        assert_non_null(file);
        assert_int_equal(qe_schedule_write_csv_comms(&schedule, file, &error), QE_CONTRACT);
        assert_non_null(strstr(error.message, "schedule."));
        assert_int_equal(ftell(file), 0);
        (void)fclose(file);
        qe_schedule_deinit(&schedule);
    }
}

static void a_pair_that_sends_at_its_end_may_stop_an_order_that_runs_apart(void **state) {
    (void)state;
    qe_schedule schedule = schedule_of("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n");
    qe_error error = {0};
    FILE *file = tmpfile();
    assert_non_null(file);
    assert_int_equal(qe_schedule_check(&schedule, NULL, NULL), QE_OK);
    assert_int_equal(qe_schedule_write_csv_comms(&schedule, file, &error), QE_CONTRACT);
    assert_non_null(strstr(error.message, "(0F1;0B0)OVERLAP_F_B on rank 0 never has its input"));
    (void)fclose(file);
    qe_schedule_deinit(&schedule);
}

typedef struct bad_file {
    const char *csv;
    uint32_t row, cell;
    const char *message; /* part of it */
} bad_file;

#define GOOD_0 "0F0,0SEND_F0,0RECV_B0,0B0"
#define GOOD_1 "1RECV_F0,1F0,1B0,1SEND_B0"
static const bad_file BAD_FILES[] = {
    {"0F0,0B0\n" GOOD_1 "\n", 1, 1, "schedule.missing: 0F0 (row 1, cell 1) has no SEND_F"},
    {GOOD_0 "\n1F0,1B0\n", 2, 1, "schedule.missing: 1F0 (row 2, cell 1) has no RECV_F"},
    {"0F0,0SEND_F0,0B0\n" GOOD_1 "\n", 1, 3, "schedule.missing: 0B0 (row 1, cell 3) has no RECV_B"},
    {GOOD_0 "\n1RECV_F0,1F0,1B0\n", 2, 3, "schedule.missing: 1B0 (row 2, cell 3) has no SEND_B"},
    {GOOD_0 ",0SEND_F0\n" GOOD_1 "\n", 1, 5, "duplicate: 0SEND_F0 (row 1, cell 5) repeats 0SEND_F0 (row 1, cell 2)"},
    {"0SEND_F0,0F0,0RECV_B0,0B0\n" GOOD_1 "\n", 1, 1,
     "order: 0SEND_F0 (row 1, cell 1) comes before what it sends, 0F0"},
    {GOOD_0 "\n1F0,1RECV_F0,1B0,1SEND_B0\n", 2, 2, "order: 1RECV_F0 (row 2, cell 2) comes after what needs it, 1F0"},
    {GOOD_0 "\n" GOOD_1 ",0SEND_F0\n", 2, 5, "place: 0SEND_F0 (row 2, cell 5) is not on its stage's rank"},
    {GOOD_0 "\n" GOOD_1 ",1SEND_F0\n", 2, 5, "place: 1SEND_F0 (row 2, cell 5) has no stage at the other end"},
    {GOOD_0 ",0RECV_F0\n" GOOD_1 "\n", 1, 5, "place: 0RECV_F0 (row 1, cell 5) has no stage at the other end"},
    {GOOD_0 ",2SEND_F0\n" GOOD_1 "\n", 1, 5, "place: 2SEND_F0 (row 1, cell 5) is of a stage without F"},
    {GOOD_0 ",0SEND_F7\n" GOOD_1 "\n", 1, 5, "place: 0SEND_F7 (row 1, cell 5) is of a microbatch without F"},
    {"0F0,0SEND_F0,1F0\n", 1, 2, "place: 0SEND_F0 (row 1, cell 2) is between two stages of one rank"},
    {"0F0,0SEND_F0,0RECV_B0\n1RECV_F0,1F0\n", 1, 3, "place: 0RECV_B0 (row 1, cell 3) is of a gradient"},
    {"0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n", 1, 2,
     "cycle: transfers wait for each other: 0SEND_F0 (row 1, cell 2) waits for 1RECV_F0 (row 2, cell 2), which "
     "stands behind 1RECV_F1 (row 2, cell 1); 1RECV_F1 (row 2, cell 1) waits for 0SEND_F1 (row 1, cell 4), which "
     "stands behind 0SEND_F0 (row 1, cell 2)"},
    {"0F0,0B0,0UNSHARD\n", 1, 1, "order: 0F0 (row 1, cell 1) runs without the weights of its stage"},
    {"0UNSHARD,0F0,0RESHARD,0B0\n", 1, 4, "order: 0B0 (row 1, cell 4) runs without the weights of its stage"},
    {"0UNSHARD,0UNSHARD,0F0,0B0\n", 1, 2, "duplicate: 0UNSHARD (row 1, cell 2) gathers weights that are there"},
    {"0RESHARD,0UNSHARD,0F0,0B0\n", 1, 1, "order: 0RESHARD (row 1, cell 1) drops weights that are not there"},
    {"0F0,0I0,0REDUCE_GRAD,0W0\n", 1, 3,
     "order: 0REDUCE_GRAD (row 1, cell 3) comes before the last gradient of its stage"},
    {"0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD\n", 1, 4, "duplicate: 0REDUCE_GRAD (row 1, cell 4) reduces"},
    {"0F0,1F0,1B0,0B0,0REDUCE_GRAD\n", 1, 3, "missing: 1B0 (row 1, cell 3) ends its stage's gradients, and no REDUCE"},
    {"0F0,0B0,1UNSHARD\n", 1, 3, "place: 1UNSHARD (row 1, cell 3) is of a stage without F"},
    {"0F0,0B0\n1F0,1B0,0REDUCE_GRAD\n", 2, 3, "place: 0REDUCE_GRAD (row 2, cell 3) is not on its stage's rank"},
};

static void a_move_that_cannot_be_is_named_with_place_rule_and_reason(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof BAD_FILES / sizeof BAD_FILES[0]; i++) {
        qe_schedule schedule = {.ranks = 77};
        qe_error error = {0};
        const char *csv = BAD_FILES[i].csv;
        if (read_bytes(csv, strlen(csv), &schedule, &error) != QE_CONTRACT) fail_msg("%s is taken", csv);
        if (strstr(error.message, BAD_FILES[i].message) == NULL) fail_msg("%s: %s", csv, error.message);
        assert_string_equal(error.path, "orders.csv");
        assert_int_equal(error.line, BAD_FILES[i].row);
        assert_int_equal(error.column, BAD_FILES[i].cell);
        assert_int_equal(schedule.ranks, 77);
        assert_int_equal(read_bytes(csv, strlen(csv), &schedule, NULL), QE_CONTRACT);
    }
}

/* Each rank sends first what the other receives second: it hangs where no send returns before its receive. */
static void bug_b115_sends_that_wait_for_each_other_are_told_as_a_ring(void **state) {
    (void)state;
    static const char csv[] = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
                              "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
    qe_schedule schedule;
    qe_error error = {0};
    assert_int_equal(read_bytes(csv, strlen(csv), &schedule, &error), QE_CONTRACT);
    assert_non_null(strstr(error.message, "schedule.cycle: transfers wait for each other: 0SEND_F1 (row 1, cell 4) "
                                          "waits for 1RECV_F1 (row 2, cell 5), which stands behind 1SEND_B0 (row 2, "
                                          "cell 4); 1SEND_B0 (row 2, cell 4) waits for 0RECV_B0 (row 1, cell 5), "
                                          "which stands behind 0SEND_F1 (row 1, cell 4)"));
}

static void bug_b116_a_receive_before_work_that_does_not_need_it_is_legal(void **state) {
    (void)state;
    static const char csv[] = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
                              "1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n";
    qe_schedule schedule;
    qe_error error = {0};
    assert_int_equal(read_bytes(csv, strlen(csv), &schedule, &error), QE_OK);
    assert_int_equal(qe_schedule_check(&schedule, NULL, &error), QE_OK);
    qe_schedule_deinit(&schedule);
}

static void what_is_wrong_without_its_moves_is_left_to_the_check(void **state) {
    (void)state;
    qe_schedule schedule = schedule_of("0F0,0SEND_F0,0F0,0SEND_B3\n1F0\n");
    qe_counterexample counterexample = {0};
    assert_int_equal(qe_schedule_check(&schedule, &counterexample, NULL), QE_CONTRACT);
    assert_int_equal(counterexample.rule, QE_RULE_SCHEDULE_DUPLICATE);
    qe_counterexample_deinit(&counterexample);
    qe_schedule_deinit(&schedule);
}

/* ---- mutations, judged by a graph of its own ---- */

typedef struct cells {
    char word[CELLS][24];
    uint32_t count, row_begin[RANKS + 1], rows;
} cells;

static cells cells_of(const char *text) {
    cells c = {.count = 0};
    for (const char *at = text; *at != '\0'; at++) {
        size_t length = strcspn(at, ",\n");
        assert_true(c.count < CELLS && length < sizeof c.word[0]);
        memcpy(c.word[c.count++], at, length);
        at += length;
        if (*at == '\n') c.row_begin[++c.rows] = c.count;
    }
    return c;
}

static size_t text_of(const cells *c, char *text) {
    size_t at = 0;
    for (uint32_t row = 0; row < c->rows; row++) {
        for (uint32_t i = c->row_begin[row]; i < c->row_begin[row + 1]; i++) {
            const char *comma = i > c->row_begin[row] ? "," : "";
            at += (size_t)snprintf(text + at, TEXT_BYTES - at, "%s%s", comma, c->word[i]);
        }
        text[at++] = '\n';
    }
    return at;
}

static uint32_t find_cell(const cells *c, const char *word) {
    for (uint32_t i = 0; i < c->count; i++) {
        if (strcmp(c->word[i], word) == 0) return i;
    }
    return QE_NONE;
}

static uint32_t row_of(const cells *c, uint32_t index) {
    uint32_t row = 0;
    while (c->row_begin[row + 1] <= index) row++;
    return row;
}

typedef struct parsed {
    unsigned stage, microbatch;
    char kind[12];
} parsed;

static parsed parse(const char *word) {
    parsed p = {0};
    assert_true(sscanf(word, "%u%11[A-Z_]%u", &p.stage, p.kind, &p.microbatch) >= 2);
    return p;
}

static int is_transfer(const char *word) { return strstr(word, "SEND_") != NULL || strstr(word, "RECV_") != NULL; }

/* The F, or the I or B, that a transfer is for. */
static uint32_t compute_of(const cells *c, const char *transfer) {
    parsed p = parse(transfer);
    char word[24];
    int forward = p.kind[5] == 'F';
    (void)snprintf(word, sizeof word, "%u%c%u", p.stage, forward ? 'F' : 'I', p.microbatch);
    uint32_t at = find_cell(c, word);
    if (at != QE_NONE || forward) return at;
    (void)snprintf(word, sizeof word, "%uB%u", p.stage, p.microbatch);
    return find_cell(c, word);
}

static uint32_t other_end(const cells *c, const char *transfer) {
    parsed p = parse(transfer);
    char word[24];
    int sends = p.kind[0] == 'S', up = sends == (p.kind[5] == 'F');
    (void)snprintf(word, sizeof word, "%u%s_%c%u", up ? p.stage + 1 : p.stage - 1, sends ? "RECV" : "SEND", p.kind[5],
                   p.microbatch);
    return find_cell(c, word);
}

/* Edges into a cell; transfers that meet are one node, the smaller index. */
static uint32_t node_of(const cells *c, uint32_t index) {
    if (!is_transfer(c->word[index])) return index;
    uint32_t other = other_end(c, c->word[index]);
    return other < index ? other : index;
}

/* Can everything be done, taking away what has nothing before it? */
static int runs(const cells *c) {
    static uint8_t before[CELLS][CELLS];
    uint8_t gone[CELLS] = {0};
    memset(before, 0, sizeof before);
    for (uint32_t i = 0; i < c->count; i++) {
        uint32_t compute = is_transfer(c->word[i]) ? compute_of(c, c->word[i]) : QE_NONE;
        if (compute != QE_NONE && strstr(c->word[i], "SEND") != NULL) before[node_of(c, i)][compute] = 1;
        if (compute != QE_NONE && strstr(c->word[i], "RECV") != NULL) before[compute][node_of(c, i)] = 1;
        for (uint32_t j = i; j-- > c->row_begin[row_of(c, i)];) {
            if (is_transfer(c->word[i]) != is_transfer(c->word[j])) continue;
            before[node_of(c, i)][node_of(c, j)] = 1;
            break;
        }
    }
    for (int moved = 1; moved;) {
        moved = 0;
        for (uint32_t i = 0; i < c->count; i++) {
            uint32_t waits = 0;
            for (uint32_t j = 0; j < c->count; j++) waits += before[i][j] && !gone[j] && j != i;
            if (gone[i] || waits > 0 || node_of(c, i) != i) continue;
            gone[i] = 1;
            moved = 1;
        }
    }
    for (uint32_t i = 0; i < c->count; i++) {
        if (!gone[node_of(c, i)]) return 0;
    }
    return 1;
}

static const char *judge_swap(const cells *c, uint32_t index) {
    for (uint32_t i = index; i < index + 2; i++) {
        if (!is_transfer(c->word[i])) continue;
        uint32_t compute = compute_of(c, c->word[i]);
        if ((strstr(c->word[i], "SEND") != NULL) == (i < compute)) return "schedule.order";
    }
    return runs(c) ? NULL : "schedule.cycle";
}

static void expect(const cells *c, const char *rule, uint32_t *count) {
    char text[TEXT_BYTES];
    size_t length = text_of(c, text);
    qe_schedule schedule = {0};
    qe_error error = {0};
    qe_status status = read_bytes(text, length, &schedule, &error);
    text[length] = '\0';
    if (status != (rule == NULL ? QE_OK : QE_CONTRACT)) {
        fail_msg("%s\nexpected %s, found: %s", text, rule == NULL ? "good" : rule, error.message);
    }
    if (rule != NULL && strncmp(error.message, rule, strlen(rule)) != 0) fail_msg("%s: %s", rule, error.message);
    qe_schedule_deinit(&schedule);
    ++*count;
}

static void mutate(const cells *c, uint32_t index, uint32_t *count) {
    cells mutant = *c;
    if (is_transfer(c->word[index])) {
        mutant.word[index][0] = '\0'; /* a bubble */
        expect(&mutant, "schedule.missing", count);
        mutant = *c;
        uint32_t row = row_of(c, index);
        memmove(mutant.word[index + 1], c->word[index], (c->count - index) * sizeof c->word[0]);
        mutant.count++;
        for (uint32_t r = row + 1; r <= c->rows; r++) mutant.row_begin[r]++;
        expect(&mutant, "schedule.duplicate", count);
    }
    if (index + 1 == c->row_begin[row_of(c, index) + 1]) return;
    if (!is_transfer(c->word[index]) && !is_transfer(c->word[index + 1])) return;
    mutant = *c;
    memcpy(mutant.word[index], c->word[index + 1], sizeof c->word[0]);
    memcpy(mutant.word[index + 1], c->word[index], sizeof c->word[0]);
    expect(&mutant, judge_swap(&mutant, index), count);
}

/* Without weights to gather: they only lengthen the rows. */
static void drop_stage_moves(cells *c) {
    cells kept = {.rows = c->rows};
    for (uint32_t row = 0; row < c->rows; row++) {
        for (uint32_t i = c->row_begin[row]; i < c->row_begin[row + 1]; i++) {
            if (strstr(c->word[i], "SHARD") != NULL || strstr(c->word[i], "REDUCE") != NULL) continue;
            memcpy(kept.word[kept.count++], c->word[i], sizeof c->word[i]);
        }
        kept.row_begin[row + 1] = kept.count;
    }
    *c = kept;
}

static void every_single_mutation_of_the_transfers_gets_the_right_verdict(void **state) {
    (void)state;
    static const qe_schedule_request requests[] = {
        {"1f1b", 2, 1, 3, 0}, {"1f1b", 3, 1, 4, 0}, {"zbh1", 3, 1, 3, 0}, {"interleaved", 2, 2, 4, 0},
        {"zbv", 2, 2, 3, 0},  {"v-min", 3, 2, 2, 0}, {"gpipe", 3, 1, 2, 1}, {"interleaved-zb", 3, 2, 3, 0},
    };
    uint32_t count = 0;
    for (size_t i = 0; i < sizeof requests / sizeof requests[0]; i++) {
        qe_schedule schedule;
        assert_int_equal(qe_schedule_generate(&requests[i], &schedule, NULL), QE_OK);
        char *text = with_moves(&schedule);
        cells c = cells_of(text);
        drop_stage_moves(&c);
        expect(&c, NULL, &count);
        for (uint32_t index = 0; index < c.count; index++) mutate(&c, index, &count);
        free(text);
        qe_schedule_deinit(&schedule);
    }
    print_message("%u files judged\n", count);
    assert_true(count > 500);
}

/* Rows of cells that each mean something, in any order, from a fixed seed: taken or refused with a place, never worse;
 * and what is taken and valid gets transfers that are taken again. */
static void random_rows_of_good_cells_never_do_harm(void **state) {
    (void)state;
    static const char *const kinds[] = {"F",      "F",       "I",       "W",           "B",      "B",      "SEND_F",
                                        "RECV_F", "UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_B", "RECV_B", "F"};
    uint64_t seed = 20241130;
    uint32_t taken = 0, refused = 0, valid = 0;
    for (int round = 0; round < 30000; round++) {
        char text[512];
        size_t at = 0;
        for (int cell = 0; cell < 2 + round % 9; cell++) {
            uint64_t dice[6];
            for (size_t i = 0; i < 6; i++) {
                seed = seed * 6364136223846793005U + 1442695040888963407U;
                dice[i] = seed >> 33;
            }
            unsigned stage = (unsigned)(dice[0] % (round % 2 ? 2 : 3));
            unsigned microbatch = (unsigned)(round % 2 ? 0 : dice[1] % 2);
            const char *end = dice[2] % 5 == 0 ? "\n" : ",";
            const char *kind = kinds[dice[3] % (round % 2 ? 5 : sizeof kinds / sizeof kinds[0])];
            if (dice[4] % 6 == 0) {
                at += (size_t)snprintf(text + at, sizeof text - at, "(%uF%u;%u%c%u)OVERLAP_F_B%s", stage, microbatch,
                                       (unsigned)(dice[5] % 3), dice[5] % 2 ? 'B' : 'I', 1 - microbatch, end);
            } else {
                at += (size_t)snprintf(text + at, sizeof text - at, "%u%s%u%s", stage, kind, microbatch, end);
            }
        }
        qe_schedule schedule = {0};
        qe_error error = {0};
        qe_status status = read_bytes(text, at, &schedule, &error);
        if (status != QE_OK) {
            refused++;
            assert_true(status == QE_ERROR_FORMAT || status == QE_CONTRACT);
            assert_true(error.line > 0);
            continue;
        }
        taken++;
        FILE *file = tmpfile();
        assert_non_null(file);
        if (qe_schedule_write_csv_comms(&schedule, file, NULL) == QE_OK) {
            qe_schedule back;
            rewind(file);
            assert_int_equal(qe_schedule_read_csv(file, "back.csv", &back, NULL), QE_OK);
            qe_schedule_deinit(&back);
            valid++;
        }
        (void)fclose(file);
        qe_schedule_deinit(&schedule);
    }
    print_message("%u taken, %u of them valid, %u refused\n", taken, valid, refused);
    assert_true(valid > 20 && refused > 1000);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_communication_is_that_of_pytorch),
        cmocka_unit_test(every_order_comes_back_without_its_communication),
        cmocka_unit_test(a_schedule_that_cannot_run_gets_no_communication),
        cmocka_unit_test(a_pair_that_sends_at_its_end_may_stop_an_order_that_runs_apart),
        cmocka_unit_test(a_move_that_cannot_be_is_named_with_place_rule_and_reason),
        cmocka_unit_test(bug_b115_sends_that_wait_for_each_other_are_told_as_a_ring),
        cmocka_unit_test(bug_b116_a_receive_before_work_that_does_not_need_it_is_legal),
        cmocka_unit_test(what_is_wrong_without_its_moves_is_left_to_the_check),
        cmocka_unit_test(every_single_mutation_of_the_transfers_gets_the_right_verdict),
        cmocka_unit_test(random_rows_of_good_cells_never_do_harm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
