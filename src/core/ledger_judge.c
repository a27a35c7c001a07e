/* ledger_judge.c - the full way: every rule, for one submission. First the state of objects, effect by effect, each
 * seeing what those before it left; then order; then, if nothing is wrong, all of it is kept. A refused submission
 * puts the states back. Traces keep what is not wrong and go on. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "core/ledger_state.h"

QE_STATIC_ASSERT(QE_EFFECTS_MAX <= 32, "a bit per effect");

static int is_buffer(const qe_judgement *judgement, uint32_t effect_index) {
    return judgement->ledger->program->objects[judgement->effects[effect_index].object].kind == QE_OBJECT_BUFFER;
}

static void save(qe_judgement *judgement, uint32_t object) {
    for (uint32_t i = 0; i < judgement->saved_count; i++)
        if (judgement->saved_object[i] == object) return;
    QE_ASSERT(judgement->saved_count < QE_EFFECTS_MAX);
    judgement->saved_object[judgement->saved_count] = object;
    judgement->saved[judgement->saved_count] = judgement->ledger->state[object];
    judgement->saved_count++;
}

static void restore(qe_judgement *judgement) {
    for (uint32_t i = 0; i < judgement->saved_count; i++)
        judgement->ledger->state[judgement->saved_object[i]] = judgement->saved[i];
}

/* After a breach on an object, what the same op says of it further only follows from that. */
static int follows(const qe_judgement *judgement, uint32_t effect_index) {
    for (uint32_t i = 0; i < effect_index; i++)
        if ((judgement->bad & 1u << i) && judgement->effects[i].object == judgement->effects[effect_index].object)
            return 1;
    return 0;
}

/* Who allocated a buffer, who freed it last, and which streams pledged: facts of the item. */
static void apply_life(const qe_judgement *judgement, const qe_effect *effect) {
    qe_ledger *ledger = judgement->ledger;
    qe_object_state *state = &ledger->state[effect->object];
    int begins = effect->kind == QE_EFFECT_BUFFER_ALLOC || effect->kind == QE_EFFECT_BUFFER_TAKE;
    if (effect->kind == QE_EFFECT_RNG_DRAW) return;
    if (effect->kind == QE_EFFECT_BUFFER_PLEDGE) state->counter |= (uint64_t)1 << judgement->item->stream;
    else ledger->writes[effect->object] = (qe_access){1, judgement->index, judgement->item->stream};
    if (begins) state->key_epoch = (uint64_t)judgement->index + 1;
}

int qe_judgement_state(qe_judgement *judgement, uint32_t effect_index) {
    qe_ledger *ledger = judgement->ledger;
    const qe_effect *effect = &judgement->effects[effect_index];
    qe_finding findings[QE_FINDINGS_MAX];
    uint32_t count = qe_state_check(ledger, effect, findings);
    for (uint32_t i = 0; i < count; i++)
        qe_judgement_report(judgement, effect_index, &findings[i], &ledger->writes[effect->object]);
    if (count > 0) return 0;
    if (!ledger->foreign) save(judgement, effect->object); /* a trace keeps what is not wrong */
    qe_state_apply(ledger, effect);
    if (effect->kind >= QE_EFFECT_BUFFER_ALLOC) apply_life(judgement, effect);
    return 1;
}

static void judge_state(qe_judgement *judgement, uint32_t effect_index) {
    if (follows(judgement, effect_index)) judgement->bad |= 1u << effect_index;
    else (void)qe_judgement_state(judgement, effect_index);
}

static void judge_op(qe_judgement *judgement) {
    for (uint32_t i = 0; i < judgement->count; i++) judge_state(judgement, i);
    for (uint32_t i = 0; i < judgement->count; i++) {
        if (!is_buffer(judgement, i)) qe_access_check(judgement, i);
        else if (!(judgement->bad & 1u << i)) qe_range_check(judgement, i);
    }
}

static void judge_recording(qe_judgement *judgement) {
    const qe_ledger *ledger = judgement->ledger;
    qe_access across;
    if (qe_clock_leaves_recording(ledger, judgement->item, &across))
        qe_judgement_report(judgement, QE_NONE, &(qe_finding){QE_RULE_SYNC_CAPTURE, 1, 0}, &across);
    for (uint32_t i = 0; i < judgement->count; i++) {
        uint32_t stream = judgement->item->stream;
        int can_begin = qe_clock_can_record(ledger, stream) && ledger->stream_recording[stream] == 0;
        if (judgement->effects[i].kind == QE_EFFECT_GRAPH_BEGIN && !can_begin)
            qe_judgement_report(judgement, i, &(qe_finding){QE_RULE_SYNC_CAPTURE, 1, 0}, NULL);
        if (judgement->effects[i].kind != QE_EFFECT_GRAPH_CAPTURE) continue;
        uint32_t other = qe_clock_unjoined(ledger, judgement->item->stream, &judgement->clock);
        if (other == QE_NONE) continue;
        qe_finding finding = {QE_RULE_GRAPH_UNJOINED, ledger->stream_clock[other].at[other],
                              judgement->clock.at[other]};
        qe_judgement_report(judgement, i, &finding, &ledger->stream_last[other]);
    }
}

static void commit_effects(qe_judgement *judgement) {
    qe_ledger *ledger = judgement->ledger;
    for (uint32_t i = 0; i < judgement->count; i++) {
        if (judgement->unordered & 1u << i) qe_range_apply_unordered(ledger, judgement, i);
        if (judgement->bad & 1u << i) continue;
        if (is_buffer(judgement, i)) qe_range_apply(ledger, judgement, i);
        else qe_access_apply(ledger, judgement, i);
    }
}

static void commit_op(qe_judgement *judgement) {
    qe_ledger *ledger = judgement->ledger;
    qe_clock_run(ledger, judgement->item->stream, &judgement->clock);
    uint32_t stream = judgement->item->stream;
    ledger->stream_last[stream] = (qe_access){judgement->clock.at[stream], judgement->index, stream};
    if (ledger->foreign) qe_graph_finish(judgement);
    for (uint32_t i = 0; i < judgement->count; i++)
        if (!(judgement->bad & 1u << i) || judgement->effects[i].kind == QE_EFFECT_GRAPH_CAPTURE)
            qe_clock_recordings(ledger, stream, &judgement->effects[i]);
}

/* A program on its own: what an effect leaves is there for the next one, and what is not wrong is kept. */
static qe_status run_trace_op(qe_judgement *judgement) {
    uint32_t before = judgement->violations->total;
    judgement->recording = judgement->ledger->stream_recording[judgement->item->stream];
    qe_graph_await(judgement);
    judge_recording(judgement);
    QE_TRY(qe_trace_judge_effects(judgement));
    commit_op(judgement);
    return judgement->violations->total != before ? QE_CONTRACT : QE_OK;
}

static qe_status run_op(qe_judgement *judgement, int keep) {
    qe_ledger *ledger = judgement->ledger;
    uint32_t before = judgement->violations->total;
    judgement->clock = qe_clock_next(ledger, judgement->item->stream);
    judgement->clock.at[judgement->item->stream]++;
    if (ledger->foreign) return run_trace_op(judgement);
    QE_TRY(qe_range_reserve(ledger, judgement->effects, judgement->count, 0));
    judge_recording(judgement);
    judge_op(judgement);
    int broken = judgement->violations->total != before;
    if (broken && !keep) {
        restore(judgement);
        return QE_CONTRACT;
    }
    commit_effects(judgement);
    commit_op(judgement);
    return broken ? QE_CONTRACT : QE_OK;
}

static qe_status run_clock(qe_judgement *judgement) {
    if (qe_clock_finds_unrecorded(judgement->ledger, judgement->item)) {
        qe_finding finding = {QE_RULE_SYNC_EVENT, 1, 0};
        qe_judgement_report(judgement, QE_NONE, &finding, NULL);
        return QE_CONTRACT;
    }
    qe_access across;
    if (qe_clock_leaves_recording(judgement->ledger, judgement->item, &across)) {
        qe_finding finding = {QE_RULE_SYNC_CAPTURE, 1, 0};
        qe_judgement_report(judgement, QE_NONE, &finding, &across);
        return QE_CONTRACT;
    }
    qe_clock_apply(judgement->ledger, judgement->item, judgement->index);
    return QE_OK;
}

static qe_status run_step(qe_judgement *judgement) {
    qe_ledger *ledger = judgement->ledger;
    if (!ledger->foreign) return QE_OK; /* a ledger's steps are its caller's: qe_ledger_step_begin and _end */
    if (judgement->item->kind == QE_ITEM_STEP_BEGIN) {
        qe_state_begin_step(ledger);
        qe_range_begin_step(ledger);
        return QE_OK;
    }
    uint32_t before = judgement->violations->total;
    qe_ledger_judge_end(ledger, judgement->index, judgement->violations);
    qe_state_begin_step(ledger);
    qe_range_begin_step(ledger);
    return judgement->violations->total == before ? QE_OK : QE_CONTRACT;
}

qe_status qe_ledger_judge(qe_ledger *ledger, const qe_item *item, const qe_effect *effects, uint32_t index, int keep,
                          qe_violations *violations) {
    QE_ASSERT(ledger->order_valid);
    QE_ASSERT(item->effect_count <= QE_EFFECTS_MAX);
    qe_judgement judgement = {.ledger = ledger, .item = item, .effects = effects, .count = item->effect_count};
    judgement.index = index;
    judgement.violations = violations;
    judgement.first_record = violations->count;
    if (item->kind == QE_ITEM_OP) return run_op(&judgement, keep);
    if (item->kind == QE_ITEM_STEP_BEGIN || item->kind == QE_ITEM_STEP_END) return run_step(&judgement);
    return run_clock(&judgement);
}

/* Records name their object through an effect; at a step's end `effect` stands for it. */
static void judge_end_of(qe_judgement *judgement, qe_effect *effect, uint32_t object) {
    const qe_ledger *ledger = judgement->ledger;
    qe_finding findings[QE_FINDINGS_MAX];
    uint32_t count = qe_state_check_end(ledger, object, findings);
    QE_ASSERT(judgement->effects == effect);
    effect->object = object;
    const qe_access *other = ledger->order_valid ? &ledger->writes[object] : NULL;
    for (uint32_t i = 0; i < count; i++) qe_judgement_report(judgement, 0, &findings[i], other);
}

static int by_index(const void *a, const void *b) {
    uint32_t first = *(const uint32_t *)a, second = *(const uint32_t *)b;
    return (first > second) - (first < second);
}

void qe_ledger_judge_end(qe_ledger *ledger, uint32_t index, qe_violations *violations) {
    qe_item end = {.kind = QE_ITEM_STEP_END, .microbatch = QE_NONE, .stream = QE_NONE};
    qe_effect effect = {0};
    qe_judgement judgement = {.ledger = ledger, .item = &end, .count = 1, .index = index, .violations = violations};
    judgement.effects = &effect;
    judgement.first_record = violations->count;
    if (!ledger->foreign) {
        for (uint32_t object = 0; object < ledger->object_count; object++) judge_end_of(&judgement, &effect, object);
        return;
    }
    if (ledger->touched_count > 1) qsort(ledger->touched, ledger->touched_count, sizeof *ledger->touched, by_index);
    for (uint32_t i = 0; i < ledger->touched_count; i++) judge_end_of(&judgement, &effect, ledger->touched[i]);
}

/* A trace that owes something in every step could be wrong without end; nobody reads on after so many. */
enum { BREACHES_COUNTED_MAX = 1 << 20 };

static qe_status judge_items(qe_ledger *ledger, qe_violations *violations, uint32_t *line_out) {
    const qe_program *program = ledger->program;
    for (uint32_t i = 0; i < program->item_count && violations->total < BREACHES_COUNTED_MAX; i++) {
        *line_out = program->items[i].line;
        const qe_item *item = &program->items[i];
        const qe_effect *effects = item->effect_count > 0 ? &program->effects[item->first_effect] : NULL;
        qe_status status = qe_ledger_judge(ledger, item, effects, i, 1, violations);
        if (status != QE_OK && status != QE_CONTRACT) return status;
    }
    return violations->total > 0 ? QE_CONTRACT : QE_OK;
}

static qe_status refuse_excess(qe_excess excess, uint32_t line, qe_error *error_out) {
    if (excess == QE_EXCESS_ROWS)
        return qe_error_set(error_out, QE_ERROR_LIMIT, "name the bytes of a matrix from the first to the last",
                            "line %u: rows split bytes into more pieces than are followed", line);
    if (excess == QE_EXCESS_COPIES)
        return qe_error_set(error_out, QE_ERROR_LIMIT, "launch the graphs one after the other",
                            "line %u: graphs that hold more than %d effects of other graphs", line,
                            QE_GRAPH_COPIES_MAX);
    return qe_error_set(error_out, QE_ERROR_LIMIT, "split the graph", "line %u: a graph of more than %d effects", line,
                        QE_GRAPH_EFFECTS_MAX);
}

qe_status qe_program_judge(const qe_program *program, qe_violations *violations_out, qe_error *error_out) {
    QE_ASSERT(program != NULL);
    QE_ASSERT(violations_out != NULL);
    violations_out->count = 0;
    violations_out->total = 0;
    qe_ledger *ledger;
    QE_TRY(qe_ledger_open(program, 1, &ledger, error_out));
    ledger->phase = QE_LEDGER_OPEN; /* a trace may begin in the middle of a step */
    ledger->order_valid = 1;
    uint32_t line = 0;
    qe_status status = judge_items(ledger, violations_out, &line);
    qe_excess excess = ledger->excess;
    qe_ledger_destroy(ledger);
    if (status == QE_CONTRACT)
        return qe_error_set(error_out, status, NULL, "%u breaches of contract; the first is %s", violations_out->total,
                            qe_rule_id(violations_out->record[0].rule));
    if (status == QE_ERROR_LIMIT) return refuse_excess(excess, line, error_out);
    if (status != QE_OK) return qe_error_set(error_out, status, NULL, "no memory to judge the program");
    return QE_OK;
}
