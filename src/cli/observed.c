/* observed.c - gathers what observe let pass. A step's breaches are those of its history, so that `qeffect trace check`
 * on the trace gives the same list. */
#include "cli/observed.h"

#include <stdio.h>
#include <string.h>
#include <jansson.h>

static void describe(qe_observed_kind *kind, const qe_program *program) {
    const qe_violation *violation = &kind->violation;
    qe_violation_text(violation, program, kind->text, sizeof kind->text);
    if (violation->object < program->object_count)
        snprintf(kind->object, sizeof kind->object, "%s", program->objects[violation->object].name);
    if (violation->item >= program->item_count) return;
    const qe_item *item = &program->items[violation->item];
    if (item->kind == QE_ITEM_OP)
        snprintf(kind->op, sizeof kind->op, "%s", program->labels[item->label].text);
}

static int same_kind(const qe_observed_kind *a, const qe_observed_kind *b) {
    return a->rank == b->rank && strcmp(a->during, b->during) == 0 && a->violation.rule == b->violation.rule &&
           strcmp(a->object, b->object) == 0 && strcmp(a->op, b->op) == 0;
}

/* A step whose breaches are taken in. */
typedef struct noted_step {
    qe_observed *observed;
    qe_session *session;
    const char *during;
    uint64_t step;
} noted_step;

static void note_one(const noted_step *at, uint32_t rank, const qe_violation *violation, const qe_program *program) {
    qe_observed *observed = at->observed;
    qe_observed_kind found = {.rank = rank, .during = at->during, .violation = *violation, .count = violation->count};
    found.first_step = found.last_step = at->step;
    found.violation.count = 1; /* the count stands beside the text */
    describe(&found, program);
    for (uint32_t i = 0; i < observed->kind_count; i++) {
        qe_observed_kind *kind = &observed->kinds[i];
        if (kind->last_step == at->step || !same_kind(kind, &found)) continue;
        kind->last_step = at->step;
        kind->count += violation->count;
        return;
    }
    if (observed->kind_count < QE_OBSERVED_MAX) observed->kinds[observed->kind_count++] = found;
    else observed->others += violation->count;
}

static void note_all(const noted_step *at, uint32_t rank, const qe_violations *violations, const qe_program *program) {
    uint64_t kept = 0;
    for (uint32_t i = 0; i < violations->count; i++) {
        note_one(at, rank, &violations->record[i], program);
        kept += violations->record[i].count;
    }
    if (violations->total > kept) at->observed->others += violations->total - kept;
}

/* Returns 0 where the rank's history tells of nothing. */
static int note_history(const noted_step *at, uint32_t rank) {
    qe_program history;
    qe_violations violations;
    qe_error error = {0};
    qe_program_init(&history);
    if (qe_team_history(at->session->team, rank, &history, &error) != QE_OK) return 0;
    int told = qe_program_judge(&history, &violations, &error) == QE_CONTRACT;
    if (told) note_all(at, rank, &violations, &history);
    if (told && !at->observed->traced) {
        error = (qe_error){0};
        at->observed->traced = qe_session_write_trace(at->session, &history, &error) == 0;
        snprintf(at->observed->untraced, sizeof at->observed->untraced, "%s", error.message);
    }
    qe_program_deinit(&history);
    return told;
}

void qe_observed_note(qe_observed *observed, qe_session *session, const char *during, uint64_t step,
                      const qe_step_result *result) {
    noted_step at = {observed, session, during, step};
    int told = 0;
    if (result->violation_rank == QE_NONE) return;
    observed->steps++;
    for (uint32_t rank = 0; rank < session->schedule.ranks; rank++) told |= note_history(&at, rank);
    /* What a guard saw on the device, or a step too long for its log: only the record is there. */
    if (!told)
        note_all(&at, result->violation_rank, &result->violations,
                 qe_team_program(session->team, result->violation_rank));
}

void qe_observed_print(const qe_observed *observed, const qe_session *session, const char *program_name) {
    for (uint32_t i = 0; i < observed->kind_count; i++) {
        const qe_observed_kind *kind = &observed->kinds[i];
        fprintf(stderr, "observed %llu time%s, first in %s, step %llu: rank %u: %s\n",
                (unsigned long long)kind->count, qe_cli_s(kind->count), kind->during,
                (unsigned long long)kind->first_step, kind->rank, kind->text);
    }
    if (observed->others > 0)
        fprintf(stderr, "and %llu breach%s of other kinds\n", (unsigned long long)observed->others,
                qe_cli_es(observed->others));
    const char *trace = session->settings.contracts.trace;
    if (observed->traced)
        fprintf(stderr, "the first of %llu observed step%s is in %s; `%s trace check %s` tells the same of it\n",
                (unsigned long long)observed->steps, qe_cli_s(observed->steps), trace, program_name, trace);
    else if (observed->untraced[0])
        fprintf(stderr, "no trace was written to %s: %s\n", trace, observed->untraced);
}

json_t *qe_observed_json(const qe_observed *observed) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < observed->kind_count; i++) {
        const qe_observed_kind *kind = &observed->kinds[i];
        json_t *fields = json_pack("{s:i, s:s, s:I, s:I, s:s, s:s, s:I, s:I}", "rank", (int)kind->rank, "during",
                                   kind->during, "step", (json_int_t)kind->first_step, "count", (json_int_t)kind->count,
                                   "rule", qe_rule_id(kind->violation.rule), "message", kind->text, "expected",
                                   (json_int_t)kind->violation.expected, "found", (json_int_t)kind->violation.found);
        if (kind->object[0]) json_object_set_new(fields, "object", qe_cli_json_text(kind->object));
        if (kind->op[0]) json_object_set_new(fields, "op", qe_cli_json_text(kind->op));
        json_array_append_new(list, fields);
    }
    return list;
}
