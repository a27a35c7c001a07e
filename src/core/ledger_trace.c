/* ledger_trace.c - the effects of an op where a program is judged on its own, one after the other: each is judged by
 * what those before it left, and left out where it breaks a rule. In a recording an effect does not happen; it is held
 * against what is recorded with it, and kept for the launches, which let it happen. */
#include <string.h>

#include "base/assert.h"
#include "core/effect.h"
#include "core/ledger_state.h"

static int is_buffer(const qe_ledger *ledger, const qe_effect *effect) {
    return ledger->program->objects[effect->object].kind == QE_OBJECT_BUFFER;
}

/* After a breach on an object, what the same op says of it further only follows from that. */
static int follows(const qe_judgement *judgement, uint32_t object) {
    return judgement->ledger->refused_at[object] == judgement->index + 1;
}

static void refuse(qe_judgement *judgement, uint32_t effect_index) {
    judgement->ledger->refused_at[judgement->effects[effect_index].object] = judgement->index + 1;
    judgement->bad |= 1u << effect_index;
}

/* Memory whose earlier users were not awaited is told once: from then on it belongs to who has it. */
static int is_kept(const qe_judgement *judgement, uint32_t effect_index) {
    uint32_t bit = 1u << effect_index;
    if (!(judgement->bad & bit)) return 1;
    return (judgement->reused & bit) && !(judgement->unordered & bit);
}

static qe_status touch_bytes(qe_judgement *judgement, uint32_t effect_index) {
    qe_ledger *ledger = judgement->ledger;
    QE_TRY(qe_range_reserve(ledger, &judgement->effects[effect_index], 1, judgement->recording));
    qe_range_check(judgement, effect_index);
    if (judgement->unordered & 1u << effect_index) qe_range_apply_unordered(ledger, judgement, effect_index);
    if (is_kept(judgement, effect_index)) qe_range_apply(ledger, judgement, effect_index);
    return QE_OK;
}

/* It happens now. The order of an op on a versioned object is asked even where its version is wrong. */
static qe_status happen(qe_judgement *judgement, uint32_t effect_index) {
    qe_ledger *ledger = judgement->ledger;
    const qe_effect *effect = &judgement->effects[effect_index];
    QE_TRY(qe_state_reserve(ledger, effect));
    if (follows(judgement, effect->object) || !qe_judgement_state(judgement, effect_index))
        refuse(judgement, effect_index);
    if (qe_effect_object_kind(effect->kind) == QE_OBJECT_GRAPH) return QE_OK;
    if (is_buffer(ledger, effect))
        return judgement->bad & 1u << effect_index ? QE_OK : touch_bytes(judgement, effect_index);
    qe_access_check(judgement, effect_index);
    if (!(judgement->bad & 1u << effect_index)) qe_access_apply(ledger, judgement, effect_index);
    return QE_OK;
}

/* A range that is wrong is wrong whenever it happens. */
static int has_range(qe_judgement *judgement, uint32_t effect_index) {
    const qe_effect *effect = &judgement->effects[effect_index];
    if (!is_buffer(judgement->ledger, effect)) return 1;
    qe_finding findings[QE_FINDINGS_MAX];
    uint32_t count = follows(judgement, effect->object) ? 0 : qe_state_check_range(judgement->ledger, effect, findings);
    for (uint32_t i = 0; i < count; i++) qe_judgement_report(judgement, effect_index, &findings[i], NULL);
    if (count > 0 || follows(judgement, effect->object)) refuse(judgement, effect_index);
    return !(judgement->bad & 1u << effect_index);
}

/* Is recorded: only its order among what is recorded with it is asked. The allocator's acts have none. */
static qe_status record(qe_judgement *judgement, uint32_t effect_index) {
    qe_ledger *ledger = judgement->ledger;
    const qe_effect *effect = &judgement->effects[effect_index];
    if (!has_range(judgement, effect_index)) return QE_OK;
    QE_TRY(qe_graph_reserve_list(ledger, judgement->recording, ledger->space[effect->object]));
    if (is_buffer(ledger, effect)) {
        if (!qe_effect_is_allocators(effect)) QE_TRY(touch_bytes(judgement, effect_index));
    } else {
        qe_access_check(judgement, effect_index);
        if (!(judgement->bad & 1u << effect_index)) qe_access_apply(ledger, judgement, effect_index);
    }
    return qe_graph_keep(ledger, judgement->item->stream, effect, judgement->copies);
}

/* One effect of a launched graph in the place of the launch: it happens, or is recorded again in another graph. */
static qe_status replay(qe_judgement *judgement, const qe_effect *recorded) {
    const qe_effect *effects = judgement->effects;
    uint32_t bad = judgement->bad, unordered = judgement->unordered, reused = judgement->reused;
    int runs = judgement->recording == 0;
    qe_effect effect = runs ? qe_graph_launched(judgement->ledger, recorded, judgement->item->microbatch) : *recorded;
    judgement->effects = &effect;
    judgement->bad = judgement->unordered = judgement->reused = 0;
    judgement->copies = !runs;
    qe_status status = runs ? happen(judgement, 0) : record(judgement, 0);
    judgement->copies = 0;
    judgement->effects = effects;
    judgement->bad = bad;
    judgement->unordered = unordered;
    judgement->reused = reused;
    return status;
}

static qe_status launch(qe_judgement *judgement, uint32_t effect_index) {
    const qe_recorded *content = qe_graph_content(judgement->ledger, judgement->effects[effect_index].object);
    for (uint32_t i = 0; i < content->count; i++) QE_TRY(replay(judgement, &content->effects[i]));
    return QE_OK;
}

static qe_status record_own(qe_judgement *judgement, uint32_t effect_index) {
    qe_effect relative = judgement->effects[effect_index];
    qe_graph_relative(judgement->ledger, judgement->recording, &relative);
    const qe_effect *effects = judgement->effects;
    uint32_t bad = judgement->bad;
    judgement->effects = &relative;
    judgement->bad = judgement->unordered = judgement->reused = 0;
    qe_status status = record(judgement, 0);
    judgement->effects = effects;
    judgement->bad = bad;
    return status;
}

qe_status qe_trace_judge_effects(qe_judgement *judgement) {
    for (uint32_t i = 0; i < judgement->count; i++) {
        const qe_effect *effect = &judgement->effects[i];
        int graph = qe_effect_object_kind(effect->kind) == QE_OBJECT_GRAPH;
        if (judgement->recording != 0 && !graph) {
            QE_TRY(record_own(judgement, i));
            continue;
        }
        uint32_t bad = judgement->bad;
        QE_TRY(happen(judgement, i));
        int launches = effect->kind == QE_EFFECT_GRAPH_LAUNCH && judgement->bad == bad;
        if (launches) QE_TRY(launch(judgement, i));
    }
    return QE_OK;
}
