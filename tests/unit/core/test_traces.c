/* test_traces.c - every trace under tests/traces is judged as its `# expect:` line says: `ok`, or the rules of the
 * records in order, `rule*N` where one record counts N. Written and read again, it is judged the same. */
#include "core_program.h"

#include <dirent.h>
#include <stdlib.h>

static const char *const folder = "tests/traces";

static FILE *open_trace(const char *name, char *path, size_t capacity) {
    snprintf(path, capacity, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    return file;
}

static void read_expected(FILE *file, char *expected, size_t capacity) {
    char line[1024];
    expected[0] = '\0';
    while (fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, "# expect: ", 10) != 0) continue;
        snprintf(expected, capacity, "%s", line + 10);
        expected[strcspn(expected, "\n")] = '\0';
        break;
    }
    rewind(file);
    assert_true(expected[0] != '\0');
}

static void describe(qe_status status, const qe_violations *violations, char *text, size_t capacity) {
    size_t length = 0;
    if (status == QE_OK) snprintf(text, capacity, "ok");
    for (uint32_t i = 0; i < violations->count; i++) {
        const qe_violation *record = &violations->record[i];
        length += (size_t)snprintf(text + length, capacity - length, "%s%s", i ? " " : "", qe_rule_id(record->rule));
        if (record->count > 1) length += (size_t)snprintf(text + length, capacity - length, "*%u", record->count);
    }
}

static void assert_says(const char *text, const char *part) {
    if (strstr(text, part) == NULL) fail_msg("no `%s` in: %s", part, text);
}

static int is_race(qe_rule rule) {
    return (rule >= QE_RULE_SYNC_ENTER && rule <= QE_RULE_SYNC_HOST) || rule == QE_RULE_SYNC_REUSE;
}

/* An op that raced with the record's named the record's object, or another one that the text names, too; of a launch
 * only the graph is told. */
static void assert_names_both(const qe_violation *record, const qe_program *program, const char *text) {
    const qe_item *other = &program->items[record->other_item];
    uint32_t object = qe_violation_other_object(record, program);
    int named = object != QE_NONE;
    for (uint32_t i = 0; i < other->effect_count; i++) {
        const qe_effect *effect = &program->effects[other->first_effect + i];
        if (effect->object == record->object || effect->kind == QE_EFFECT_GRAPH_LAUNCH) named = 1;
    }
    if (!named) fail_msg("nothing says what the other op touched: %s", text);
    if (object == QE_NONE) return;
    char part[QE_NAME_BYTES + 32];
    snprintf(part, sizeof part, "(%s %s)", qe_object_kind_name(program->objects[object].kind),
             program->objects[object].name);
    assert_says(text, part);
}

/* Every record names its op with its line and the object; a race both ops, both streams and the missing edge; what was
 * repeated says how often. */
static void assert_facts(const qe_violation *record, const qe_program *program, const char *text) {
    char part[2 * QE_NAME_BYTES + 64];
    snprintf(part, sizeof part, "at line %u", program->items[record->item].line);
    assert_says(text, part);
    if (record->object != QE_NONE) assert_says(text, program->objects[record->object].name);
    int about_an_object = record->rule != QE_RULE_SYNC_EVENT && record->rule != QE_RULE_SYNC_CAPTURE;
    assert_int_equal(about_an_object && record->object == QE_NONE, 0);
    snprintf(part, sizeof part, "It happened %u times.", record->count);
    if (record->count > 1) assert_says(text, part);
    int crosses = record->rule == QE_RULE_SYNC_CAPTURE && record->object == QE_NONE;
    if (crosses) assert_says(text, "On the other side: ");
    if (!is_race(record->rule) && !crosses) return;
    assert_true(record->other_item < record->item);
    const qe_item *other = &program->items[record->other_item];
    snprintf(part, sizeof part, "on %s at line %u", program->streams[other->stream].name, other->line);
    if (other->microbatch == QE_NONE) assert_says(text, part);
    if (crosses) return;
    assert_names_both(record, program, text);
    snprintf(part, sizeof part, "recorded on %s behind the former and awaited on %s before the latter",
             program->streams[other->stream].name, program->streams[record->stream].name);
    assert_says(text, part);
    assert_true(record->found < record->expected); /* how far it has waited, and for which op of the other stream */
}

static void assert_text(const qe_violations *violations, const qe_program *program) {
    for (uint32_t i = 0; i < violations->count; i++) {
        char text[1024];
        int length = qe_violation_text(&violations->record[i], program, text, sizeof text);
        assert_true(length > 0 && (size_t)length < sizeof text);
        assert_int_equal(strlen(text), length);
        assert_non_null(strstr(text, qe_rule_id(violations->record[i].rule)));
        assert_non_null(strstr(text, qe_rule_sentence(violations->record[i].rule)));
        assert_non_null(strstr(text, "at line "));
        assert_int_equal(qe_violation_text(&violations->record[i], program, NULL, 0), length);
        assert_facts(&violations->record[i], program, text);
        print_message("    %s\n", text);
    }
}

static void check_again(const qe_program *program, const char *expected) {
    qe_program again;
    qe_violations violations;
    char found[1024];
    FILE *copy = tmpfile();
    assert_non_null(copy);
    assert_int_equal(qe_trace_write(program, copy, NULL), QE_OK);
    rewind(copy);
    qe_program_init(&again);
    qe_error error;
    qe_status read = qe_trace_read(copy, "copy", &again, &error);
    if (read != QE_OK) print_error("%u:%u %s\n", error.line, error.column, error.message);
    assert_int_equal(read, QE_OK);
    describe(qe_program_judge(&again, &violations, NULL), &violations, found, sizeof found);
    assert_string_equal(found, expected);
    fclose(copy);
    qe_program_deinit(&again);
}

/* Returns 1 when the trace is judged otherwise than expected. */
static int check_trace(const char *name) {
    char path[512], expected[1024], found[1024];
    qe_program program;
    qe_violations violations;
    qe_error error;
    FILE *file = open_trace(name, path, sizeof path);
    read_expected(file, expected, sizeof expected);
    qe_program_init(&program);
    qe_status read = qe_trace_read(file, path, &program, &error);
    if (read != QE_OK) print_error("%s:%u:%u: %s\n", error.path, error.line, error.column, error.message);
    assert_int_equal(read, QE_OK);
    qe_status status = qe_program_judge(&program, &violations, NULL);
    assert_true(status == QE_OK || status == QE_CONTRACT);
    describe(status, &violations, found, sizeof found);
    print_message("%s: %s\n", name, found);
    assert_text(&violations, &program);
    int differs = strcmp(found, expected) != 0;
    if (differs) print_error("%s: found %s, expected %s\n", name, found, expected);
    check_again(&program, found);
    fclose(file);
    qe_program_deinit(&program);
    return differs;
}

static void every_trace_is_judged_as_its_header_says(void **state) {
    (void)state;
    DIR *directory = opendir(folder);
    assert_non_null(directory);
    int count = 0, different = 0;
    for (struct dirent *entry = readdir(directory); entry != NULL; entry = readdir(directory)) {
        size_t length = strlen(entry->d_name);
        if (length < 5 || strcmp(entry->d_name + length - 4, ".qet") != 0) continue;
        different += check_trace(entry->d_name);
        count++;
    }
    closedir(directory);
    assert_true(count >= 60);
    assert_int_equal(different, 0);
}

/* The first block of the page of the grammar; without the line it says so of, it breaks what it says. */
static void the_example_of_the_grammar_is_what_it_says(void **state) {
    (void)state;
    char line[1024];
    FILE *page = fopen("docs/trace.md", "r");
    assert_non_null(page);
    for (int with_wait = 1; with_wait >= 0; with_wait--) {
        FILE *block = tmpfile();
        assert_non_null(block);
        rewind(page);
        int inside = 0;
        while (fgets(line, sizeof line, page) != NULL && !(inside && strncmp(line, "```", 3) == 0)) {
            if (inside && (with_wait || strncmp(line, "wait ", 5) != 0)) fputs(line, block);
            if (strncmp(line, "```", 3) == 0) inside = 1;
        }
        rewind(block);
        qe_program program;
        qe_violations violations;
        char found[1024];
        qe_program_init(&program);
        assert_int_equal(qe_trace_read(block, "docs/trace.md", &program, NULL), QE_OK);
        describe(qe_program_judge(&program, &violations, NULL), &violations, found, sizeof found);
        assert_string_equal(found, with_wait ? "ok" : "sync.side");
        fclose(block);
        qe_program_deinit(&program);
    }
    fclose(page);
}

/* Each graph launches the one before twice: a few lines must not become effects without end. */
static void graphs_in_graphs_do_not_grow_without_bound(void **state) {
    (void)state;
    enum { GRAPHS = 40 };
    qe_program program;
    qe_violations violations;
    qe_error error;
    FILE *text = tmpfile();
    assert_non_null(text);
    fprintf(text, "qet 1\nstream s compute\nbuffer x bytes=8 written\n");
    for (int i = 0; i < GRAPHS; i++) {
        fprintf(text, "graph G%d\nop begin on s : graph.begin G%d\n", i, i);
        if (i == 0) fprintf(text, "op work on s : buffer.write x\n");
        else fprintf(text, "op twice on s : graph.launch G%d@1 graph.launch G%d@1\n", i - 1, i - 1);
        fprintf(text, "op end on s : graph.capture G%d@1\n", i);
    }
    rewind(text);
    qe_program_init(&program);
    assert_int_equal(qe_trace_read(text, "doubling", &program, &error), QE_OK);
    assert_int_equal(qe_program_judge(&program, &violations, &error), QE_ERROR_LIMIT);
    assert_string_equal(error.message, "line 78: graphs that hold more than 262144 effects of other graphs");
    fclose(text);
    qe_program_deinit(&program);
}

static void add_op(qe_program *program, qe_effect effect, uint32_t count) {
    qe_effect effects[QE_EFFECTS_MAX];
    for (uint32_t i = 0; i < count; i++) effects[i] = effect;
    must_add(program, (qe_item){.kind = QE_ITEM_OP, .microbatch = QE_NONE}, "op", effects, count);
}

enum { BYTES_READ, LARGE, OUTER, LATER };

/* A graph of so many reads of one buffer; the stream, the buffer and three graphs are all there is. */
static void make_large_graph(qe_program *program, uint32_t ops) {
    qe_program_init(program);
    must_add_object(program, (qe_object){.name = "x", .kind = QE_OBJECT_BUFFER, .bytes = 8,
                                         .counter = QE_BUFFER_WRITTEN});
    for (int i = 0; i < 3; i++) must_add_object(program, (qe_object){.name = "G", .kind = QE_OBJECT_GRAPH});
    assert_int_equal(qe_program_add_stream(program, "s", QE_STREAM_COMPUTE, NULL, NULL), QE_OK);
    add_op(program, (qe_effect){.kind = QE_EFFECT_GRAPH_BEGIN, .object = LARGE}, 1);
    for (uint32_t i = 0; i < ops; i++)
        add_op(program, (qe_effect){.kind = QE_EFFECT_BUFFER_READ, .object = BYTES_READ, .end = 8}, QE_EFFECTS_MAX);
    add_op(program, (qe_effect){.kind = QE_EFFECT_GRAPH_CAPTURE, .object = LARGE, .version = 1}, 1);
}

/* Captures a graph, for the `seal`-th time, that launches the large one `launches` times. */
static void capture_launches(qe_program *program, uint32_t graph, uint32_t seal, uint32_t launches) {
    add_op(program, (qe_effect){.kind = QE_EFFECT_GRAPH_BEGIN, .object = graph}, 1);
    add_op(program, (qe_effect){.kind = QE_EFFECT_GRAPH_LAUNCH, .object = LARGE, .version = 1}, launches);
    add_op(program, (qe_effect){.kind = QE_EFFECT_GRAPH_CAPTURE, .object = graph, .version = seal}, 1);
}

static qe_status judge(const qe_program *program, qe_error *error) {
    qe_violations violations;
    *error = (qe_error){0};
    return qe_program_judge(program, &violations, error);
}

static void a_graph_holds_as_many_effects_as_the_limit_says(void **state) {
    (void)state;
    qe_program program;
    qe_error error;
    for (uint32_t more = 0; more < 2; more++) {
        make_large_graph(&program, QE_GRAPH_EFFECTS_MAX / QE_EFFECTS_MAX + more);
        assert_int_equal(judge(&program, &error), more ? QE_ERROR_LIMIT : QE_OK);
        assert_string_equal(error.message, more ? "line 0: a graph of more than 1048576 effects" : "");
        qe_program_deinit(&program);
    }
}

/* What counts is what graphs hold at once: a graph that is captured again lets go of what it held. */
static void what_graphs_hold_of_other_graphs_is_counted_while_they_hold_it(void **state) {
    (void)state;
    enum { EFFECTS = 16384, ROUNDS = 40, FIT = QE_GRAPH_COPIES_MAX / EFFECTS };
    qe_program program;
    qe_error error;
    make_large_graph(&program, EFFECTS / QE_EFFECTS_MAX);
    for (uint32_t i = 1; i <= ROUNDS; i++) {
        capture_launches(&program, OUTER, 2 * i - 1, 4);
        add_op(&program, (qe_effect){.kind = QE_EFFECT_GRAPH_CAPTURE, .object = OUTER, .version = 2 * i}, 1);
        capture_launches(&program, LATER, i, 2);
    }
    assert_int_equal(judge(&program, &error), QE_OK);
    qe_program_deinit(&program);
    make_large_graph(&program, EFFECTS / QE_EFFECTS_MAX); /* one copy fits for each effect of the program, too */
    capture_launches(&program, OUTER, 1, FIT);
    capture_launches(&program, LATER, 1, 1);
    assert_int_equal(judge(&program, &error), QE_OK);
    capture_launches(&program, OUTER, 2, 2); /* the old one is held until the new one is there */
    assert_int_equal(judge(&program, &error), QE_ERROR_LIMIT);
    qe_program_deinit(&program);
}

enum { MATRIX_ROWS = QE_ROWS_MAX, MATRIX_PITCH = 1 << 16 };

/* `layouts` columns of a matrix, each written `times`, on so many streams. */
static qe_status judge_columns(uint32_t streams, uint32_t layouts, uint32_t times, qe_error *error) {
    qe_program program;
    qe_program_init(&program);
    must_add_object(&program, (qe_object){.name = "m", .kind = QE_OBJECT_BUFFER, .bytes = 1ull << 28});
    for (uint32_t i = 0; i < streams; i++)
        assert_int_equal(qe_program_add_stream(&program, "s", QE_STREAM_COMPUTE, NULL, NULL), QE_OK);
    for (uint32_t i = 0; i < times; i++)
        for (uint32_t k = 0; k < layouts; k++)
            add_op(&program, (qe_effect){.kind = QE_EFFECT_BUFFER_WRITE, .object = 0, .begin = 4 * k, .end = 4 * k + 2,
                                         .rows = MATRIX_ROWS, .pitch = MATRIX_PITCH}, 1);
    qe_status status = judge(&program, error);
    qe_program_deinit(&program);
    return status;
}

static void rows_do_not_split_bytes_without_bound(void **state) {
    (void)state;
    qe_error error;
    assert_int_equal(judge_columns(QE_PROGRAM_STREAMS_MAX, 8, 1, &error), QE_OK);
    assert_int_equal(judge_columns(QE_PROGRAM_STREAMS_MAX, 8, 20, &error), QE_OK); /* the same borders again */
    assert_int_equal(judge_columns(QE_PROGRAM_STREAMS_MAX, 100, 1, &error), QE_ERROR_LIMIT);
    assert_string_equal(error.message, "line 0: rows split bytes into more pieces than are followed");
    assert_int_equal(judge_columns(1, 60, 1, &error), QE_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_trace_is_judged_as_its_header_says),
        cmocka_unit_test(the_example_of_the_grammar_is_what_it_says),
        cmocka_unit_test(graphs_in_graphs_do_not_grow_without_bound),
        cmocka_unit_test(a_graph_holds_as_many_effects_as_the_limit_says),
        cmocka_unit_test(what_graphs_hold_of_other_graphs_is_counted_while_they_hold_it),
        cmocka_unit_test(rows_do_not_split_bytes_without_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
