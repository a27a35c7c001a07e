/* judge.c - the same mutant at the moments of the core, and what each has to say of it. */
#include <stdlib.h>
#include <string.h>

#include "adversary/adversary.h"
#include "core/ledger_state.h"
#include "oracle/oracle.h"

const char *const moment_words[MOMENTS] = {"schedule", "plan", "issue", "trace", "running", "device", "resume"};

static void take_objects(qe_program *program, const qe_object *objects) {
    if (objects != NULL) memcpy(program->objects, objects, program->object_count * sizeof *objects);
}

/* Right steps before the fault, and one behind it, where what it left behind shows. */
static uint32_t steps_of(const step *s, uint32_t at_step) { return s->single ? 1 : at_step + 2; }

void trace_of(const step *s, const item_list *list, uint32_t at_step, const qe_object *objects, qe_program *out,
              uint32_t *starts) {
    unroll(s, list, at_step, steps_of(s, at_step), 0, out, starts);
    take_objects(out, objects);
}

/* Where an item of an unrolled program stands. */
static void place_of(const mutant *m, const uint32_t *starts, uint32_t steps, uint32_t item, verdict *out) {
    uint32_t n = steps - 1;
    while (n > 0 && item < starts[n]) n--;
    MUST(n >= m->at_step); /* a right step before the fault: the generator is wrong */
    const item_list *list = n == m->at_step ? &m->list : &m->step->right;
    out->later = n - m->at_step;
    out->where = item - starts[n] < list->count ? item - starts[n] : AT_END;
}

static int before(verdict a, verdict b) {
    if (b.rule == QE_RULE_NONE) return a.rule != QE_RULE_NONE;
    if (a.rule == QE_RULE_NONE) return 0;
    if (a.later != b.later) return a.later < b.later;
    if (a.where != b.where) return a.where < b.where;
    return a.rule < b.rule; /* of one submission, the order of the rules decides */
}

static qe_rule first_rule(uint64_t rules) { return rules == 0 ? QE_RULE_NONE : (qe_rule)__builtin_ctzll(rules); }

static void without_graphs(item_list *list) {
    for (uint32_t i = 0; i < list->count; i++)
        for (uint32_t k = list->entries[i].item.effect_count; k-- > 0;)
            if (effect_is(&list->entries[i].effects[k], QE_OBJECT_GRAPH)) sequence_drop_effect(list, i, k);
}

/* A ledger is told of a recording by the ops that it stands for, at once; a trace has them at the launch. What is left
 * when graphs are taken out is the same for both. */
int oracle_says(const mutant *m, verdict expected, verdict *said_out) {
    static oracle_verdict found;
    qe_program program;
    step s = *m->step;
    item_list list = {0}, right = {0};
    uint32_t starts[STEPS_MAX + 1], steps = m->in_trace ? steps_of(m->step, m->at_step) : m->at_step + 1;
    sequence_copy(&list, &m->list);
    sequence_copy(&right, &m->step->right);
    if (!m->in_trace) without_graphs(&list);
    if (!m->in_trace) without_graphs(&right);
    s.right = right;
    unroll(&s, &list, m->at_step, steps, !m->in_trace, &program, starts);
    take_objects(&program, m->objects);
    uint32_t item = oracle_judge(&program, &found);
    *said_out = (verdict){.rule = item < program.item_count ? (qe_rule)found.rule : QE_RULE_NONE};
    if (item < program.item_count) place_of(m, starts, steps, item, said_out);
    qe_program_deinit(&program);
    sequence_free(&list);
    sequence_free(&right);
    return is_same(expected, *said_out);
}

enum { ORACLE_ITEMS_MAX = 8000 }; /* it takes the square of their number */

/* Of a ledger's graphs the oracle knows nothing. */
static int is_for_oracle(const mutant *m, verdict expected) {
    int graphs = (expected.rule >= QE_RULE_GRAPH_UNJOINED && expected.rule <= QE_RULE_GRAPH_CONSTANT) ||
                 expected.rule == QE_RULE_SYNC_CAPTURE;
    return m->list.count * (m->at_step + 1) <= ORACLE_ITEMS_MAX && (m->in_trace || !graphs);
}

int oracle_confirms(const mutant *m, verdict expected, verdict *said_out) {
    if (!is_for_oracle(m, expected)) return 1;
    int same = oracle_says(m, expected, said_out);
    tally_oracle(expected.rule, same);
    return same;
}

verdict expected_of(const mutant *m) {
    verdict said = {first_rule(m->where == NOWHERE ? 0 : m->rules), m->later, m->where}, seen = {0};
    qe_program program;
    uint32_t starts[STEPS_MAX + 1], steps = m->in_trace ? steps_of(m->step, m->at_step) : m->at_step + 1;
    unroll(m->step, &m->list, m->at_step, steps, !m->in_trace, &program, starts);
    take_objects(&program, m->objects);
    item_breach found = precedence_first(&program, m->in_trace);
    seen.rule = first_rule(found.rules);
    if (seen.rule != QE_RULE_NONE) place_of(m, starts, steps, found.item, &seen);
    qe_program_deinit(&program);
    return before(said, seen) ? said : seen;
}

/* ---- plan ---- */

static void program_of(const step *s, const item_list *list, const qe_object *objects, qe_program *out) {
    qe_program_init(out);
    MUST(qe_program_copy(&s->program, out, NULL) == QE_OK);
    out->item_count = out->effect_count = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        const entry *e = &list->entries[i];
        MUST(qe_program_add_item(out, &e->item, e->effects, e->item.effect_count, NULL, NULL) == QE_OK);
    }
    take_objects(out, objects);
}

static verdict of_record(qe_status status, const qe_violations *violations) {
    MUST(status == QE_OK || status == QE_CONTRACT);
    if (status == QE_OK) return (verdict){0};
    const qe_violation *first = &violations->record[0];
    return (verdict){first->rule, 0, first->item == QE_NONE ? AT_END : first->item};
}

static verdict at_plan(const mutant *m) {
    qe_program program;
    qe_ledger *ledger;
    qe_violations violations;
    program_of(m->step, &m->list, m->objects, &program);
    MUST(qe_ledger_create(&program, &ledger, NULL) == QE_OK);
    verdict found = of_record(qe_ledger_certify(ledger, &violations, NULL), &violations);
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
    return found;
}

/* ---- issue ---- */

static qe_ledger *certified(const qe_program *program) {
    qe_ledger *ledger;
    qe_violations violations;
    MUST(qe_ledger_create(program, &ledger, NULL) == QE_OK);
    if (qe_ledger_certify(ledger, &violations, NULL) == QE_OK) return ledger;
    qe_ledger_destroy(ledger);
    return NULL;
}

static qe_status submit(qe_ledger *ledger, const entry *e, qe_violations *violations) {
    if (!e->changed && e->source != QE_NONE) return qe_ledger_issue(ledger, e->source, violations);
    return qe_ledger_submit(ledger, &e->item, e->effects, e->source, violations);
}

static int run_right(qe_ledger *ledger, const step *s) {
    qe_violations violations;
    qe_ledger_step_begin(ledger);
    for (uint32_t i = 0; i < s->right.count; i++)
        if (qe_ledger_issue(ledger, i, &violations) != QE_OK) return 0;
    return qe_ledger_step_end(ledger, &violations) == QE_OK;
}

/* Is the ledger byte for byte what it was before it refused? */
static int refuses_without_a_trace(qe_ledger *ledger, const entry *e, qe_violations *violations, qe_status *status) {
    size_t length = qe_ledger_image(ledger, NULL, 0);
    unsigned char *kept = malloc(length), *now = malloc(length);
    MUST(kept != NULL && now != NULL);
    qe_ledger_image(ledger, kept, length);
    *status = submit(ledger, e, violations);
    int same = *status == QE_OK || (qe_ledger_image(ledger, now, length) == length && memcmp(kept, now, length) == 0);
    free(kept);
    free(now);
    return same;
}

static verdict run_mutant(const mutant *m, qe_ledger *ledger) {
    qe_violations violations;
    qe_status status = QE_OK;
    verdict found = {0};
    qe_ledger_step_begin(ledger);
    for (uint32_t i = 0; i < m->list.count && status == QE_OK; i++) {
        const entry *e = &m->list.entries[i];
        if (e->changed || e->source == QE_NONE) MUST(refuses_without_a_trace(ledger, e, &violations, &status));
        else status = submit(ledger, e, &violations);
        if (status != QE_OK) found = (verdict){violations.record[0].rule, 0, i};
    }
    if (status == QE_OK) {
        status = qe_ledger_step_end(ledger, &violations);
        if (status != QE_OK) found = (verdict){violations.record[0].rule, 0, AT_END};
    }
    MUST(status == QE_OK || status == QE_CONTRACT);
    if (status != QE_OK) qe_ledger_step_abort(ledger);
    return found;
}

static verdict at_issue(const mutant *m) {
    qe_program program;
    program_of(m->step, &m->step->right, NULL, &program);
    qe_ledger *ledger = certified(&program);
    MUST(ledger != NULL);
    for (uint32_t n = 0; n < m->at_step; n++) MUST(run_right(ledger, m->step));
    verdict found = run_mutant(m, ledger);
    MUST(run_right(ledger, m->step)); /* whatever was refused, a right step is right after it */
    qe_ledger_destroy(ledger);
    qe_program_deinit(&program);
    return found;
}

/* ---- trace ---- */

static void written_and_read(qe_program *program) {
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    MUST(out != NULL && qe_trace_write(program, out, NULL) == QE_OK && fclose(out) == 0);
    qe_program_deinit(program);
    FILE *in = fmemopen(text, length, "r");
    qe_error error = {0};
    MUST(in != NULL);
    if (qe_trace_read(in, "mutant", program, &error) != QE_OK) {
        fwrite(text, 1, length, stderr);
        fprintf(stderr, "%u:%u %s\n", error.line, error.column, error.message);
        MUST(0 && "a trace that was written cannot be read");
    }
    fclose(in);
    free(text);
}

static verdict at_trace(const mutant *m) {
    qe_program program;
    qe_violations violations;
    uint32_t starts[STEPS_MAX + 1];
    trace_of(m->step, &m->list, m->at_step, m->objects, &program, starts);
    written_and_read(&program);
    qe_status status = qe_program_judge(&program, &violations, NULL);
    verdict found = of_record(status, &violations);
    if (status != QE_OK) place_of(m, starts, steps_of(m->step, m->at_step), violations.record[0].item, &found);
    qe_program_deinit(&program);
    return found;
}

verdict found_at(const mutant *m, moment at) {
    if (at == MOMENT_PLAN) return at_plan(m);
    return at == MOMENT_ISSUE ? at_issue(m) : at_trace(m);
}

/* ---- right steps ---- */

static int is_issued(const step *s, const qe_program *program, dice *d) {
    qe_ledger *ledger = certified(program);
    qe_violations violations;
    qe_status status = QE_OK;
    if (ledger == NULL) return 0;
    for (uint32_t n = 0; n < 3 && status == QE_OK; n++) {
        uint32_t departs = dice_one_in(d, 2) ? dice_below(d, s->right.count) : QE_NONE;
        qe_ledger_step_begin(ledger);
        for (uint32_t i = 0; i < s->right.count && status == QE_OK; i++) {
            const entry *e = &s->right.entries[i];
            status = i == departs ? qe_ledger_submit(ledger, &e->item, e->effects, i, &violations)
                                  : qe_ledger_issue(ledger, i, &violations);
        }
        if (status == QE_OK) status = qe_ledger_step_end(ledger, &violations);
    }
    qe_ledger_destroy(ledger);
    return status == QE_OK;
}

int is_accepted(const step *s, dice *d, const char **where_out) {
    qe_program program;
    qe_violations violations;
    uint32_t starts[STEPS_MAX + 1];
    int right = 1;
    if (!s->traces_only) {
        program_of(s, &s->right, NULL, &program);
        qe_ledger *ledger = certified(&program);
        right = ledger != NULL;
        qe_ledger_destroy(ledger);
        if (!right) *where_out = "plan";
        else if (!(right = is_issued(s, &program, d))) *where_out = "issue";
        qe_program_deinit(&program);
    }
    if (!right) return 0;
    trace_of(s, NULL, dice_below(d, 2), NULL, &program, starts);
    written_and_read(&program);
    right = qe_program_judge(&program, &violations, NULL) == QE_OK;
    if (!right) *where_out = "trace";
    qe_program_deinit(&program);
    return right;
}
