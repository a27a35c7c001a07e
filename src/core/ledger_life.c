/* ledger_life.c - takes all memory of a ledger at once, from the counts of its program, and gives it back. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "core/ledger_state.h"

enum {
    LOG_SPARE = 64,         /* departed submissions beyond two programs' worth of items */
    LOG_EFFECTS_SPARE = 1024,
};

static void *take(size_t count, size_t bytes) { return calloc(count > 0 ? count : 1, bytes); }

static int take_state(qe_ledger *ledger) {
    size_t objects = ledger->object_count;
    ledger->cells = take(QE_STATE_CELLS * (2 * objects + 1), sizeof *ledger->cells);
    ledger->touched = take(objects, sizeof *ledger->touched);
    ledger->is_touched = take(objects, sizeof *ledger->is_touched);
    ledger->weight_grad = take(objects, sizeof *ledger->weight_grad);
    ledger->alias = take(objects, sizeof *ledger->alias);
    ledger->orders = take(objects, sizeof *ledger->orders);
    ledger->contribution_capacity = ledger->program->deposit_count + ledger->program->effect_count;
    ledger->contributions = take(ledger->contribution_capacity, sizeof *ledger->contributions);
    ledger->refused_at = take(objects, sizeof *ledger->refused_at);
    if (!ledger->touched || !ledger->is_touched || !ledger->alias || !ledger->refused_at) return 0;
    if (!ledger->cells || !ledger->weight_grad || !ledger->orders || !ledger->contributions) return 0;
    QE_STATIC_ASSERT(sizeof(qe_object_state) == QE_STATE_CELLS * sizeof(uint64_t), "a state is its cells");
    ledger->state = (qe_object_state *)(void *)(ledger->cells + QE_STATE_CELLS);
    ledger->begin = ledger->state + objects;
    return 1;
}

static int take_order(qe_ledger *ledger) {
    size_t objects = ledger->object_count;
    ledger->event_clocks = take((size_t)ledger->event_count * ledger->stream_count, sizeof *ledger->event_clocks);
    ledger->event_recorded = take(ledger->event_count, sizeof *ledger->event_recorded);
    ledger->event_item = take(ledger->event_count, sizeof *ledger->event_item);
    ledger->event_recording = take(ledger->event_count, sizeof *ledger->event_recording);
    ledger->writes = take(objects, sizeof *ledger->writes);
    ledger->reads = take(objects * ledger->stream_count, sizeof *ledger->reads);
    ledger->ranges = take(objects, sizeof *ledger->ranges);
    if (!ledger->event_recording || !ledger->event_item) return 0;
    return ledger->event_clocks && ledger->event_recorded && ledger->writes && ledger->reads && ledger->ranges;
}

static int take_log(qe_ledger *ledger) {
    if (ledger->foreign) return 1;
    ledger->log_capacity = 2 * ledger->program->item_count + LOG_SPARE;
    ledger->log_effect_capacity = 2 * ledger->program->effect_count + LOG_EFFECTS_SPARE;
    ledger->log = take(ledger->log_capacity, sizeof *ledger->log);
    ledger->log_effects = take(ledger->log_effect_capacity, sizeof *ledger->log_effects);
    ledger->compiled = take(ledger->program->item_count, sizeof *ledger->compiled);
    return ledger->log && ledger->log_effects && ledger->compiled;
}

static void link_grads(qe_ledger *ledger) {
    const qe_program *program = ledger->program;
    for (uint32_t i = 0; i < program->object_count; i++) ledger->weight_grad[i] = QE_NONE;
    for (uint32_t grad = 0; grad < program->object_count; grad++) {
        const qe_object *object = &program->objects[grad];
        if (object->kind != QE_OBJECT_GRAD || object->weight == QE_NONE) continue;
        QE_ASSERT(program->objects[object->weight].kind == QE_OBJECT_WEIGHT);
        ledger->weight_grad[grad] = ledger->weight_grad[object->weight];
        ledger->weight_grad[object->weight] = grad;
    }
}

/* Room for each gradient: as many places as it has declared ones, or deposits in the program. */
static void place_orders(qe_ledger *ledger) {
    const qe_program *program = ledger->program;
    for (uint32_t i = 0; i < program->deposit_count; i++) {
        ledger->orders[program->deposits[i].object].ordered = 1;
        ledger->orders[program->deposits[i].object].length++;
    }
    for (uint32_t i = 0; i < program->effect_count; i++) {
        const qe_effect *effect = &program->effects[i];
        if (effect->kind == QE_EFFECT_RNG_DRAW) ledger->orders[effect->object].length++;
        if (effect->kind != QE_EFFECT_GRAD_DEPOSIT || ledger->orders[effect->object].ordered) continue;
        ledger->orders[effect->object].length++;
    }
    uint32_t next = 0;
    for (uint32_t i = 0; i < program->object_count; i++) {
        ledger->orders[i].first = next;
        next += ledger->orders[i].length;
    }
    ledger->contribution_count = next;
}

/* Is the contribution in a list that is being filled? Lists ascend as a rule, and then the last one decides. */
static int is_known(const qe_contribution *list, const qe_grad_order *order, qe_contribution contribution) {
    if (order->length == 0) return 0;
    if (!order->jumps && contribution.microbatch > list[order->length - 1].microbatch) return 0;
    for (uint32_t i = 0; i < order->length; i++)
        if (list[i].microbatch == contribution.microbatch && list[i].use == contribution.use) return 1;
    return 0;
}

/* Appends to a gradient's order, which `length` counts while it is filled. A contribution that is in it already keeps
 * its first place. */
static void append(qe_ledger *ledger, uint32_t object, qe_contribution contribution) {
    qe_grad_order *order = &ledger->orders[object];
    qe_contribution *list = &ledger->contributions[order->first];
    QE_ASSERT(order->first + order->length < ledger->contribution_count);
    if (is_known(list, order, contribution)) return;
    if (order->length > 0 && contribution.microbatch < list[order->length - 1].microbatch) order->jumps = 1;
    list[order->length++] = contribution;
}

static void fill_orders(qe_ledger *ledger) {
    const qe_program *program = ledger->program;
    for (uint32_t i = 0; i < program->object_count; i++) {
        if (ledger->foreign && !ledger->orders[i].ordered) continue; /* its deposits are written as they come */
        ledger->orders[i].length = 0;
    }
    for (uint32_t i = 0; i < program->deposit_count; i++) {
        const qe_deposit *deposit = &program->deposits[i];
        append(ledger, deposit->object, (qe_contribution){deposit->microbatch, deposit->use});
    }
    for (uint32_t i = 0; i < program->effect_count && !ledger->foreign; i++) {
        const qe_effect *effect = &program->effects[i];
        if (effect->kind != QE_EFFECT_GRAD_DEPOSIT || ledger->orders[effect->object].ordered) continue;
        append(ledger, effect->object, (qe_contribution){effect->microbatch, effect->use});
    }
    for (uint32_t i = 0; i < program->object_count && !ledger->foreign; i++) ledger->orders[i].ordered = 1;
}

/* Room for every draw, at the places that the orders of generators name; few programs draw at all. */
static qe_draw *draws_of(qe_ledger *ledger) {
    const qe_program *program = ledger->program;
    for (uint32_t i = 0; i < program->object_count; i++)
        if (program->objects[i].kind == QE_OBJECT_RNG && ledger->orders[i].length > 0)
            ledger->draw_capacity = ledger->contribution_count;
    return take(ledger->draw_capacity, sizeof *ledger->draws);
}

static void fill_state(qe_ledger *ledger) {
    for (uint32_t i = 0; i < ledger->object_count; i++) {
        const qe_object *object = &ledger->program->objects[i];
        qe_object_state *state = &ledger->state[i];
        if (ledger->foreign && object->kind == QE_OBJECT_GRAD && object->due > 0) qe_state_touch(ledger, i);
        if (object->kind != QE_OBJECT_BUFFER && object->kind != QE_OBJECT_CACHE) state->counter = object->counter;
        if (object->kind == QE_OBJECT_BUFFER) state->key_version = object->counter == QE_BUFFER_ABSENT;
        if (object->kind != QE_OBJECT_CACHE || object->layouts == 0) continue;
        state->word = QE_CACHE_FILLED | (uint64_t)object->recipe << 8 | object->layouts;
        state->key_version = object->key_version;
        state->key_epoch = object->key_epoch;
    }
    if (ledger->object_count > 0) memcpy(ledger->begin, ledger->state, ledger->object_count * sizeof *ledger->state);
}

static qe_status fill(qe_ledger *ledger, qe_error *error_out) {
    if (!take_state(ledger) || !take_order(ledger) || !take_log(ledger))
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a ledger of %u objects",
                            ledger->object_count);
    link_grads(ledger);
    place_orders(ledger);
    ledger->draws = draws_of(ledger);
    if (ledger->draws == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for draws");
    fill_state(ledger);
    fill_orders(ledger);
    qe_clock_reset(ledger);
    QE_TRY(qe_space_open(ledger, error_out));
    QE_TRY(qe_range_open(ledger, error_out));
    return qe_graph_open(ledger, error_out);
}

qe_status qe_ledger_open(const qe_program *program, int foreign, qe_ledger **ledger_out, qe_error *error_out) {
    QE_ASSERT(program != NULL);
    QE_ASSERT(ledger_out != NULL);
    qe_ledger *ledger = calloc(1, sizeof *ledger);
    if (ledger == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a ledger");
    ledger->program = program;
    ledger->object_count = program->object_count;
    ledger->stream_count = program->stream_count;
    ledger->event_count = program->event_count;
    ledger->foreign = foreign != 0;
    qe_status status = fill(ledger, error_out);
    if (status == QE_OK) *ledger_out = ledger;
    else qe_ledger_destroy(ledger);
    return status;
}

/* What only a trace may hold: a ledger's certified way does not count it. */
int qe_effect_only_in_traces(const qe_effect *effect) {
    int touches = effect->kind == QE_EFFECT_BUFFER_READ || effect->kind == QE_EFFECT_BUFFER_WRITE;
    return effect->kind >= QE_EFFECT_BUFFER_ALLOC || (touches && effect->rows > 1);
}

static int is_only_a_trace(const qe_program *program) {
    for (uint32_t i = 0; i < program->effect_count; i++)
        if (qe_effect_only_in_traces(&program->effects[i])) return 1;
    for (uint32_t i = 0; i < program->stream_count; i++)
        if (program->streams[i].order != QE_STREAM_SEPARATE || program->streams[i].rank != 0) return 1;
    return 0;
}

qe_status qe_ledger_create(const qe_program *program, qe_ledger **ledger_out, qe_error *error_out) {
    QE_ASSERT(program != NULL);
    if (is_only_a_trace(program))
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "judge it as a trace: qe_program_judge",
                            "the program has allocations, draws, rows, ranks or CUDA's implicit order");
    return qe_ledger_open(program, 0, ledger_out, error_out);
}

void qe_ledger_destroy(qe_ledger *ledger) {
    if (ledger == NULL) return;
    qe_graph_close(ledger);
    qe_range_close(ledger);
    qe_space_close(ledger);
    free(ledger->draws);
    free(ledger->cells);
    free(ledger->touched);
    free(ledger->is_touched);
    free(ledger->weight_grad);
    free(ledger->alias);
    free(ledger->orders);
    free(ledger->contributions);
    free(ledger->refused_at);
    free(ledger->compiled);
    free(ledger->cell_ops);
    free(ledger->event_clocks);
    free(ledger->event_recorded);
    free(ledger->event_recording);
    free(ledger->event_item);
    free(ledger->writes);
    free(ledger->reads);
    free(ledger->log);
    free(ledger->log_effects);
    free(ledger);
}
