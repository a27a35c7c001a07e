/* guard.c - what guards look at and what they expect. See guard.h. */
#include "step/guard.h"

#include <stdlib.h>
#include <string.h>
#include "base/assert.h"

enum { BLOCK_HEAD = 1 }; /* a block is: who launches, then the expected numbers of head and tail */

static void weight_words(const qe_rank *rank, const qe_binding *binding, uint32_t weight, uint64_t **words) {
    const qe_weight_place *place = &binding->places[weight];
    if (place->weight_object == QE_NONE) return;
    words[place->weight_object] = rank->places[weight].witness;
    if (place->grad_object != QE_NONE)
        words[place->grad_object] = binding->deposits + binding->rank_plan->places[weight].tally;
    if (place->cache_object != QE_NONE) words[place->cache_object] = place->cache_key;
    for (int role = 0; role < QE_SCALE_ROLES; role++)
        if (place->scale_object[role] != QE_NONE) words[place->scale_object[role]] = &place->scale[role]->epoch;
}

/* Where each object's witness is; NULL for those without one. */
static void find_words(const qe_rank *rank, const qe_binding *binding, uint64_t **words) {
    for (uint32_t weight = 0; weight < binding->plan->weight_count; weight++)
        weight_words(rank, binding, weight, words);
    for (uint32_t r = 0; r < binding->rank_plan->region_count; r++) {
        const qe_region *region = &binding->rank_plan->regions[r];
        words[region->object] = (uint64_t *)(void *)(binding->regions[r] + region->bytes - QE_ALIGN_BYTES);
    }
}

qe_status qe_guard_create(qe_rank *rank, qe_binding *binding, qe_error *error_out) {
    const qe_program *program = &binding->rank_plan->program;
    const qe_team_options *options = &rank->team->options;
    if (options->capture == QE_CAPTURE_NONE || options->contracts == QE_CONTRACTS_OFF) return QE_OK;
    binding->words = calloc(program->object_count + 1u, sizeof *binding->words);
    binding->base = calloc(program->object_count + 1u, sizeof *binding->base);
    binding->deposited = calloc(program->object_count + 1u, sizeof *binding->deposited);
    binding->fault = qe_rank_alloc(rank, QE_MEMORY_GRAPHS, sizeof *binding->fault, error_out);
    if (binding->words == NULL || binding->base == NULL || binding->deposited == NULL)
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the guards of rank %u", rank->index);
    if (binding->fault == NULL) return QE_ERROR_MEMORY;
    find_words(rank, binding, binding->words);
    rank->words_stale = 1;
    return QE_OK;
}

void qe_guard_refresh(const qe_rank *rank, qe_binding *binding) {
    if (binding->words != NULL) find_words(rank, binding, binding->words);
}

void qe_guard_destroy(qe_rank *rank, qe_binding *binding) {
    qe_rank_free(rank, binding->fault);
    free(binding->words);
    free(binding->base);
    free(binding->deposited);
    binding->fault = NULL;
    binding->deposited = NULL;
    binding->words = NULL;
    binding->base = NULL;
}

/* What a segment finds at its head and leaves at its tail, per object. */
typedef struct object_span {
    uint8_t seen, at_head;
    uint64_t head, tail; /* counters, or the weight version of a cache's key */
    uint64_t head_epoch, tail_epoch; /* cache: scale epoch of the key */
} object_span;

static int changes(const qe_effect *effect) {
    return effect->kind == QE_EFFECT_SLOT_ACQUIRE || effect->kind == QE_EFFECT_WEIGHT_COMMIT ||
           effect->kind == QE_EFFECT_SCALE_FOLD;
}

static void note_effect(object_span *span, const qe_effect *effect) {
    uint64_t before = effect->version, after = effect->version;
    if (effect->kind == QE_EFFECT_SLOT_ACQUIRE)
        before = effect->version - 1;
    else if (changes(effect))
        after = effect->version + 1;
    if (!span->seen) {
        span->seen = 1;
        span->at_head = effect->kind != QE_EFFECT_CACHE_FILL; /* what is filled here holds nothing yet */
        span->head = before;
        span->head_epoch = effect->epoch;
    }
    span->tail = after;
    span->tail_epoch = effect->epoch;
}

static uint32_t grad_of_word(const qe_binding *binding, uint64_t word) {
    const qe_weight_place *places = binding->rank_plan->places;
    for (uint32_t weight = 0; weight < binding->plan->weight_count; weight++)
        if (places[weight].grad_object != QE_NONE && places[weight].tally == word) return places[weight].grad_object;
    QE_ASSERT(0 && "a word of a gradient");
    return QE_NONE;
}

static void note_grad(qe_binding *binding, object_span *spans, uint32_t grad, uint32_t deposits) {
    uint32_t before = binding->deposited[grad];
    binding->deposited[grad] += deposits;
    if (spans == NULL) return;
    if (!spans[grad].seen) spans[grad] = (object_span){.seen = 1, .at_head = 1, .head = before};
    spans[grad].tail = binding->deposited[grad];
}

/* What an item does to gradients; spans NULL: it lies in no segment and is only counted. */
static void note_item_grads(qe_binding *binding, uint32_t index, object_span *spans) {
    const qe_rank_plan *plan = binding->rank_plan;
    const qe_item *item = &plan->program.items[index];
    for (uint32_t e = 0; item->kind == QE_ITEM_OP && e < item->effect_count; e++) {
        const qe_effect *effect = &plan->program.effects[item->first_effect + e];
        if (effect->kind == QE_EFFECT_GRAD_TAKE) note_grad(binding, spans, effect->object, 0);
        if (effect->object != plan->deposits_object) continue;
        for (uint64_t word = effect->begin / sizeof(uint64_t); word < effect->end / sizeof(uint64_t); word++)
            note_grad(binding, spans, grad_of_word(binding, word), 1);
    }
}

/* Segments come in the order of items; with the first one everything is recorded anew. */
static void count_deposits_until(qe_binding *binding, const qe_segment *segment) {
    uint32_t end = segment->first;
    if (segment == binding->segments) {
        memset(binding->deposited, 0, binding->rank_plan->program.object_count * sizeof *binding->deposited);
        binding->deposited_end = 0;
    }
    for (; binding->deposited_end < end; binding->deposited_end++)
        note_item_grads(binding, binding->deposited_end, NULL);
}

static void note_segment(qe_binding *binding, const qe_segment *segment, object_span *spans) {
    const qe_program *program = &binding->rank_plan->program;
    count_deposits_until(binding, segment);
    for (uint32_t i = segment->first; i < segment->end; i++) {
        const qe_item *item = &program->items[i];
        for (uint32_t e = 0; item->kind == QE_ITEM_OP && e < item->effect_count; e++) {
            const qe_effect *effect = &program->effects[item->first_effect + e];
            if (binding->words[effect->object] == NULL || program->objects[effect->object].kind == QE_OBJECT_GRAD)
                continue;
            note_effect(&spans[effect->object], effect);
        }
        note_item_grads(binding, i, spans);
    }
    binding->deposited_end = segment->end;
}

/* The last graph before the commit looks at all that the commit will change: what is wrong there is known before the
 * ranks meet, so nothing is committed anywhere. */
static void note_commit(const qe_binding *binding, const qe_segment *segment, object_span *spans) {
    const qe_rank_plan *plan = binding->rank_plan;
    if (segment->end != plan->commit_begin) return;
    for (uint32_t i = plan->commit_begin; i < plan->exit_begin; i++) {
        const qe_item *item = &plan->program.items[i];
        for (uint32_t e = 0; item->kind == QE_ITEM_OP && e < item->effect_count; e++) {
            const qe_effect *effect = &plan->program.effects[item->first_effect + e];
            object_span *span = &spans[effect->object];
            if (!changes(effect) || span->seen) continue;
            span->seen = 1;
            span->tail = effect->version;
        }
    }
}

static void add_entry(qe_segment *segment, uint32_t *count, const uint64_t *word, const uint64_t *base,
                      uint64_t relative, uint32_t object) {
    segment->entries[*count] = (qe_guard_entry){.word = word, .base = base, .relative = relative, .object = object};
    ++*count;
}

static void add_object(const qe_binding *binding, qe_segment *segment, uint32_t *count, uint32_t object,
                       uint64_t version, uint64_t epoch) {
    static const uint64_t no_scale = 0;
    const qe_object *about = &binding->rank_plan->program.objects[object];
    const uint64_t *word = binding->words[object];
    if (about->kind != QE_OBJECT_CACHE) {
        add_entry(segment, count, word, &binding->base[object], version, object);
        return;
    }
    add_entry(segment, count, &word[0], &binding->base[about->weight], version, object);
    add_entry(segment, count, &word[1], about->scale == QE_NONE ? &no_scale : &binding->base[about->scale],
              about->scale == QE_NONE ? 0 : epoch, object);
}

static void list_entries(const qe_binding *binding, qe_segment *segment, const object_span *spans) {
    uint32_t objects = binding->rank_plan->program.object_count, count = 0;
    for (uint32_t object = 0; object < objects; object++)
        if (spans[object].seen && spans[object].at_head)
            add_object(binding, segment, &count, object, spans[object].head, spans[object].head_epoch);
    segment->head_count = count;
    for (uint32_t object = 0; object < objects; object++)
        if (spans[object].seen)
            add_object(binding, segment, &count, object, spans[object].tail, spans[object].tail_epoch);
    segment->entry_count = count;
}

qe_status qe_guard_segment(qe_rank *rank, qe_binding *binding, qe_segment *segment, qe_error *error_out) {
    uint32_t objects = binding->rank_plan->program.object_count;
    if (binding->words == NULL) return QE_OK;
    object_span *spans = calloc(objects + 1u, sizeof *spans);
    uint32_t most = 4 * objects; /* head and tail, a cache has two words */
    segment->entries = calloc(most + 1u, sizeof *segment->entries);
    segment->block = qe_rank_host_alloc(rank, (most + BLOCK_HEAD) * sizeof *segment->block, error_out);
    int failed = spans == NULL || segment->entries == NULL || segment->block == NULL;
    if (!failed) {
        note_segment(binding, segment, spans);
        note_commit(binding, segment, spans);
        list_entries(binding, segment, spans);
    }
    free(spans);
    return failed ? qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a guard of %u objects", objects)
                  : QE_OK;
}

static qe_op guard_op(const qe_binding *binding, const qe_sealed_graph *graph, uint32_t first, uint32_t count) {
    qe_op op = {.kind = QE_OP_GUARD};
    op.args.guard = (qe_args_guard){.words = (const uint64_t *const *)graph->guard_words + first,
                                    .expected = graph->guard_block + BLOCK_HEAD + first,
                                    .launch = graph->guard_block,
                                    .fault = binding->fault,
                                    .count = count,
                                    .first_entry = first};
    return op;
}

qe_status qe_guard_graph(qe_rank *rank, qe_binding *binding, const qe_segment *segment, qe_sealed_graph *graph,
                         qe_error *error_out) {
    if (binding->words == NULL) return QE_OK;
    uint64_t bytes = (segment->entry_count + 1u) * sizeof *graph->words;
    graph->words = calloc(segment->entry_count + 1u, sizeof *graph->words);
    graph->guard_words = qe_rank_alloc(rank, QE_MEMORY_GRAPHS, bytes, error_out);
    graph->guard_block =
        qe_rank_alloc(rank, QE_MEMORY_GRAPHS, (segment->entry_count + BLOCK_HEAD) * sizeof *graph->guard_block,
                      error_out);
    if (graph->words == NULL)
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a guard of %u words",
                            segment->entry_count);
    if (graph->guard_words == NULL || graph->guard_block == NULL) return QE_ERROR_MEMORY;
    for (uint32_t i = 0; i < segment->entry_count; i++) graph->words[i] = segment->entries[i].word;
    QE_TRY(qe_rank_write(rank, (void *)graph->guard_words, graph->words, bytes, error_out));
    graph->head_guard = guard_op(binding, graph, 0, segment->head_count);
    graph->tail_guard = guard_op(binding, graph, segment->head_count, segment->entry_count - segment->head_count);
    const qe_backend *backend = rank->team->options.backend;
    QE_TRY(backend->prepare(rank->device, &graph->head_guard, error_out));
    QE_TRY(backend->prepare(rank->device, &graph->tail_guard, error_out));
    QE_TRY(qe_declare_guard(rank, &graph->head_guard, graph->words, error_out));
    return qe_declare_guard(rank, &graph->tail_guard, graph->words + segment->head_count, error_out);
}

void qe_guard_graph_release(qe_rank *rank, qe_sealed_graph *graph) {
    qe_declare_forget(rank, &graph->head_guard);
    qe_declare_forget(rank, &graph->tail_guard);
    free(graph->words);
    qe_rank_free(rank, (void *)graph->guard_words);
    qe_rank_free(rank, graph->guard_block);
}

int qe_guard_fits(const qe_segment *segment, const qe_sealed_graph *graph) {
    if (graph->guard_block == NULL) return 1;
    uint32_t head = graph->head_guard.args.guard.count, tail = graph->tail_guard.args.guard.count;
    if (segment->head_count != head || segment->entry_count != head + tail) return 0;
    for (uint32_t i = 0; i < segment->entry_count; i++)
        if (graph->words[i] != segment->entries[i].word) return 0;
    return 1;
}

void qe_guard_arm(qe_segment *segment, uint32_t index, const qe_sealed_graph *graph) {
    if (graph->guard_block == NULL) return;
    QE_ASSERT(qe_guard_fits(segment, graph));
    segment->block[0] = index;
    segment->arm = (qe_op){.kind = QE_OP_COPY};
    segment->arm.args.copy = (qe_args_copy){.from = segment->block,
                                            .to = graph->guard_block,
                                            .bytes = (segment->entry_count + BLOCK_HEAD) * sizeof *segment->block};
}

/* The ledger that knows the versions of weights and scales: evaluation follows training. */
static const qe_binding *keeper(const qe_rank *rank, const qe_binding *binding) {
    return rank->train.plan != NULL ? &rank->train : binding;
}

static void read_weight_counters(const qe_rank *rank, qe_binding *binding, uint32_t weight) {
    const qe_weight_place *here = &binding->places[weight];
    const qe_binding *known = keeper(rank, binding);
    if (here->weight_object == QE_NONE) return;
    binding->base[here->weight_object] = qe_ledger_counter(known->ledger, known->places[weight].weight_object);
    for (int role = 0; role < QE_SCALE_ROLES; role++)
        if (here->scale_object[role] != QE_NONE)
            binding->base[here->scale_object[role]] =
                qe_ledger_counter(known->ledger, known->places[weight].scale_object[role]);
}

static void read_counters(const qe_rank *rank, qe_binding *binding) {
    const qe_program *program = &binding->rank_plan->program;
    for (uint32_t weight = 0; weight < binding->plan->weight_count; weight++)
        read_weight_counters(rank, binding, weight);
    for (uint32_t object = 0; object < program->object_count; object++) {
        const qe_object *about = &program->objects[object];
        uint64_t counter = qe_ledger_counter(binding->ledger, object);
        if (about->kind == QE_OBJECT_SLOT) binding->base[object] = counter;
        if (about->kind == QE_OBJECT_GRAD) binding->base[object] = counter * about->due; /* it counts takes */
    }
}

/* After an abort some declared changes never ran. Words are set to what the ledger counts. */
static qe_status set_words(qe_rank *rank, qe_binding *binding) {
    if (binding->plan == NULL || binding->words == NULL) return QE_OK;
    read_counters(rank, binding);
    const qe_program *program = &binding->rank_plan->program;
    for (uint32_t object = 0; object < program->object_count; object++)
        if (binding->words[object] != NULL && program->objects[object].kind != QE_OBJECT_CACHE)
            QE_TRY(qe_rank_write(rank, binding->words[object], &binding->base[object], sizeof *binding->base,
                                 &rank->error));
    return QE_OK;
}

/* A fault is read at the end of every step that gets there; only one that fired has to go. */
static qe_status clear_fault(qe_rank *rank, qe_binding *binding) {
    static const qe_guard_fault none = {0};
    if (!binding->fault_fired) return QE_OK;
    QE_TRY(qe_rank_write(rank, binding->fault, &none, sizeof none, &rank->error));
    binding->fault_fired = 0;
    return QE_OK;
}

qe_status qe_guard_begin(qe_rank *rank, qe_binding *binding) {
    if (binding->words == NULL) return QE_OK;
    if (rank->words_stale) {
        QE_TRY(set_words(rank, &rank->train));
        QE_TRY(set_words(rank, &rank->evaluate));
        rank->train.fault_fired = rank->evaluate.fault_fired = 1; /* perhaps: a step that failed need not have looked */
        rank->words_stale = 0;
    }
    read_counters(rank, binding);
    for (uint32_t s = 0; s < binding->segment_count; s++) {
        qe_segment *segment = &binding->segments[s];
        for (uint32_t i = 0; i < segment->entry_count; i++)
            segment->block[BLOCK_HEAD + i] = *segment->entries[i].base + segment->entries[i].relative;
    }
    return clear_fault(rank, binding);
}

static qe_rule rule_of(qe_object_kind kind, const qe_guard_fault *fault) {
    switch (kind) {
        case QE_OBJECT_GRAD: return fault->found > fault->expected ? QE_RULE_GRAD_TWICE : QE_RULE_GRAD_MISSING;
        case QE_OBJECT_SLOT: return QE_RULE_SLOT_STALE;
        case QE_OBJECT_WEIGHT: return QE_RULE_WEIGHT_VERSION;
        case QE_OBJECT_SCALE: return QE_RULE_SCALE_EPOCH;
        default: return QE_RULE_CACHE_STALE;
    }
}

qe_status qe_guard_verdict(qe_rank *rank, qe_binding *binding, qe_violations *violations_out) {
    qe_guard_fault fault;
    if (binding->words == NULL) return QE_OK;
    QE_TRY(qe_rank_read(rank, &fault, binding->fault, sizeof fault, &rank->error));
    if (!fault.fired) return QE_OK;
    binding->fault_fired = 1;
    QE_ASSERT(fault.launch < binding->segment_count);
    const qe_segment *segment = &binding->segments[fault.launch];
    QE_ASSERT(fault.entry < segment->entry_count);
    uint32_t object = segment->entries[fault.entry].object;
    uint32_t item = fault.entry < segment->head_count ? segment->first : segment->end - 1;
    const qe_program *program = &binding->rank_plan->program;
    memset(violations_out, 0, sizeof *violations_out);
    violations_out->count = violations_out->total = 1;
    violations_out->record[0] = (qe_violation){
        .rule = rule_of(program->objects[object].kind, &fault),
        .item = item,
        .other_item = QE_NONE,
        .object = object,
        .stream = program->items[item].stream,
        .stage = program->items[item].stage,
        .microbatch = program->items[item].microbatch,
        .expected = fault.expected,
        .found = fault.found,
        .count = 1,
    };
    return QE_CONTRACT;
}
