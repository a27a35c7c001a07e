/* command_trace.c - `qeffect trace check`: the ledger's judgement of a trace file, by anybody. */
#include <errno.h>
#include <string.h>
#include <jansson.h>
#include "base/assert.h"
#include "cli/cli.h"
#include "qeffect/trace.h"

enum { TEXT_BYTES = 2048 };

static qe_status read_trace(const char *path, qe_program *program, qe_error *error) {
    int standard_input = strcmp(path, "-") == 0;
    FILE *file = standard_input ? stdin : fopen(path, "r");
    if (file == NULL) {
        qe_error_set(error, QE_ERROR_IO, "give the path of a .qet file, or - for standard input", "cannot open: %s",
                     strerror(errno));
        return qe_error_place(error, path, 0, 0);
    }
    qe_status status = qe_trace_read(file, path, program, error);
    if (!standard_input) fclose(file);
    return status;
}

static uint32_t line_of(const qe_violation *violation, const qe_program *program) {
    return violation->item < program->item_count ? program->items[violation->item].line : 0;
}

/* One of the two submissions of a breach: its line, what it is called, where it was submitted. */
static void put_item(json_t *fields, const qe_program *program, uint32_t index, const char *line, const char *op,
                     const char *stream) {
    if (index >= program->item_count) return;
    const qe_item *item = &program->items[index];
    if (item->line > 0) json_object_set_new(fields, line, json_integer(item->line));
    if (item->kind == QE_ITEM_OP)
        json_object_set_new(fields, op, qe_cli_json_text(program->labels[item->label].text));
    if (item->kind <= QE_ITEM_WAIT)
        json_object_set_new(fields, stream, qe_cli_json_text(program->streams[item->stream].name));
}

static json_t *violation_json(const qe_violation *violation, const qe_program *program) {
    json_t *fields = qe_cli_violation_json(violation, program);
    put_item(fields, program, violation->item, "line", "op", "stream");
    put_item(fields, program, violation->other_item, "other_line", "other_op", "other_stream");
    return fields;
}

static int report_json(const char *path, const qe_program *program, const qe_violations *violations) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < violations->count; i++)
        json_array_append_new(list, violation_json(&violations->record[i], program));
    json_t *document = json_pack("{s:o, s:i, s:i, s:o}", "trace", qe_cli_json_text(path), "items",
                                 (int)program->item_count, "violation_count", (int)violations->total,
                                 "violations", list);
    if (violations->count > 0)
        json_object_set_new(document, "verdict", json_string(qe_rule_id(violations->record[0].rule)));
    return qe_cli_json(document, violations->total == 0 ? QE_EXIT_OK : QE_EXIT_CONTRACT);
}

static int report_text(const char *path, const qe_program *program, const qe_violations *violations) {
    if (violations->total == 0) {
        printf("%s: %u items on %u stream%s keep every rule\n", path, program->item_count, program->stream_count,
               qe_cli_s(program->stream_count));
        return QE_EXIT_OK;
    }
    for (uint32_t i = 0; i < violations->count; i++) {
        char text[TEXT_BYTES];
        qe_violation_text(&violations->record[i], program, text, sizeof text);
        printf("%s:%u: %s\n", path, line_of(&violations->record[i], program), text);
    }
    if (violations->total > violations->count) printf("and %u more\n", violations->total - violations->count);
    printf("verdict: %s (the first in program order)\n", qe_rule_id(violations->record[0].rule));
    return QE_EXIT_CONTRACT;
}

static int run_trace_check(qe_cli *cli) {
    const char *path = cli->arguments[0];
    qe_program program;
    qe_violations violations = {0};
    qe_error error = {0};
    qe_program_init(&program);
    qe_status status = read_trace(path, &program, &error);
    if (status == QE_OK) status = qe_program_judge(&program, &violations, &error);
    int exit_status;
    if (status != QE_OK && status != QE_CONTRACT)
        exit_status = qe_cli_error(cli, &error);
    else
        exit_status = cli->json ? report_json(path, &program, &violations) : report_text(path, &program, &violations);
    qe_program_deinit(&program);
    return exit_status;
}

static const qe_cli_option options[] = {{NULL, 0, NULL, NULL, 0}};

const qe_command qe_command_trace_check = {
    .name = "trace check",
    .arguments = "FILE.qet",
    .summary = "judge an effect trace by the rules of the contract",
    .details =
        "A trace is text: streams, objects with versions, operations with their effects, events and waits\n"
        "(docs/trace.md). Training writes one at every trap; write your own for any program. Each violation names the\n"
        "rule, both operations, the object and what was expected; the first in program order is the verdict.\n"
        "\n"
        "Exit status: 0 every rule is kept, 1 the file is malformed, 3 a rule is broken.\n"
        "\n"
        "Examples:\n"
        "  qeffect trace check qeffect-trap.qet\n"
        "  qeffect train --inject sync.side; qeffect trace check qeffect-trap.qet --json\n",
    .options = options,
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run_trace_check,
};
