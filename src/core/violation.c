/* violation.c - one breach as a paragraph for people. The record holds facts; this is where they become words. */
#include <stdarg.h>
#include <string.h>

#include "base/assert.h"
#include "core/effect.h"
#include "qeffect/recipe.h"
#include "qeffect/trace.h"

enum { OP_TEXT_BYTES = 320 };

typedef struct text {
    char *bytes;
    size_t capacity;
    int length; /* of the whole text, as snprintf counts */
} text;

static void put(text *into, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(text *into, const char *format, ...) {
    va_list arguments;
    size_t used = (size_t)into->length < into->capacity ? (size_t)into->length : into->capacity;
    va_start(arguments, format);
    int more = vsnprintf(into->bytes ? into->bytes + used : NULL, into->capacity - used, format, arguments);
    va_end(arguments);
    if (more > 0) into->length += more;
}

static void item_text(const qe_program *program, uint32_t index, char *out, size_t capacity) {
    text into = {out, capacity, 0};
    if (index == QE_NONE || index >= program->item_count) {
        put(&into, "a submission outside the plan");
        return;
    }
    const qe_item *item = &program->items[index];
    static const char *const words[QE_ITEM_KINDS] = {"op", "record", "wait", "sync", "sync", "sync", "step begin",
                                                     "step end", "destroy"};
    if (item->kind == QE_ITEM_OP) put(&into, "%s", program->labels[item->label].text);
    else put(&into, "%s", words[item->kind]);
    if (item->kind <= QE_ITEM_WAIT) put(&into, " on %s", program->streams[item->stream].name);
    if (item->microbatch != QE_NONE) put(&into, " (stage %u, microbatch %u)", item->stage, item->microbatch);
    if (item->line > 0) put(&into, " at line %u", item->line);
    else put(&into, " (item %u)", index);
}

static const char *stream_name(const qe_program *program, uint32_t stream) {
    return stream < program->stream_count ? program->streams[stream].name : "the host";
}

static int overlap(const qe_object *object, uint64_t begin, uint64_t end) {
    return object->address != 0 && begin < object->address + object->bytes && object->address < end;
}

/* The buffer through which the other op touched bytes of this one, or QE_NONE where it named this one itself. */
static uint32_t touched_by(const qe_program *program, const qe_item *other, uint32_t object) {
    uint32_t found = QE_NONE;
    for (uint32_t i = 0; i < other->effect_count; i++) {
        const qe_effect *effect = &program->effects[other->first_effect + i];
        const qe_object *touched = &program->objects[effect->object];
        if (effect->object == object) return QE_NONE;
        if (found != QE_NONE || touched->kind != QE_OBJECT_BUFFER || touched->address == 0) continue;
        uint64_t from = touched->address;
        if (overlap(&program->objects[object], from + effect->begin, from + qe_effect_reach(effect)))
            found = effect->object;
    }
    return found;
}

/* What lies at an address and shares bytes with an object. */
static uint32_t placed_at(const qe_program *program, uint32_t object, qe_object_kind kind, uint64_t address) {
    const qe_object *one = &program->objects[object];
    for (uint32_t i = 0; i < program->object_count; i++) {
        const qe_object *other = &program->objects[i];
        int absent = kind == QE_OBJECT_BUFFER && other->counter == QE_BUFFER_ABSENT;
        if (other->kind != kind || other->address != address || absent) continue;
        if (overlap(other, one->address, one->address + one->bytes)) return i;
    }
    return QE_NONE;
}

uint32_t qe_violation_other_object(const qe_violation *violation, const qe_program *program) {
    QE_ASSERT(violation != NULL);
    QE_ASSERT(program != NULL);
    uint32_t object = violation->object;
    if (object >= program->object_count || program->objects[object].kind != QE_OBJECT_BUFFER) return QE_NONE;
    if (violation->rule == QE_RULE_SLOT_ALIAS)
        return placed_at(program, object, QE_OBJECT_SLOT, violation->expected);
    if (violation->other_item < program->item_count)
        return touched_by(program, &program->items[violation->other_item], object);
    int absent = program->objects[object].counter == QE_BUFFER_ABSENT; /* else it is its own other */
    if (violation->rule != QE_RULE_BUFFER_LIVE || !absent) return QE_NONE;
    return placed_at(program, object, QE_OBJECT_BUFFER, violation->found);
}

/* " (buffer T)", where the other side named another object. */
static void put_other_object(text *into, const qe_violation *violation, const qe_program *program) {
    uint32_t other = qe_violation_other_object(violation, program);
    if (other == QE_NONE) return;
    const qe_object *object = &program->objects[other];
    put(into, " (%s %s)", qe_object_kind_name(object->kind), object->name);
}

static void put_sync(text *into, const qe_violation *violation, const qe_program *program, const char *other) {
    const char *later = stream_name(program, violation->stream);
    if (violation->rule == QE_RULE_SYNC_EVENT) {
        put(into, " The event has no record before this; such a wait waits for nothing.");
        return;
    }
    const char *earlier = "its stream";
    if (violation->other_item < program->item_count)
        earlier = stream_name(program, program->items[violation->other_item].stream);
    put(into, " No event orders %s", other);
    put_other_object(into, violation, program);
    put(into, " before this on %s.", later);
    if (violation->found == 0) put(into, " %s never waited for %s.", later, earlier);
    else
        put(into, " %s has waited for %s up to its op %llu; the conflict is with op %llu.", later, earlier,
            (unsigned long long)violation->found, (unsigned long long)violation->expected);
    put(into, " The missing edge: an event recorded on %s behind the former and awaited on %s before the latter.",
        earlier, later);
}

static void put_owner(text *into, uint64_t word) {
    uint32_t microbatch = (uint32_t)word;
    put(into, "stage %u", (unsigned)(word >> 32));
    if (microbatch == QE_NONE) put(into, " and no microbatch");
    else put(into, " and microbatch %u", microbatch);
}

static void put_recipe(text *into, uint64_t recipe) {
    if (recipe <= QE_RECIPE_FP32) put(into, "%s", qe_recipe_name((qe_recipe_kind)recipe));
    else put(into, "recipe %llu", (unsigned long long)recipe);
}

static void put_microbatch(text *into, uint64_t word) {
    uint32_t microbatch = (uint32_t)word;
    if (microbatch == QE_NONE) put(into, " of no microbatch");
    else put(into, " of microbatch %u", microbatch);
}

/* A contribution: its use above its microbatch. Most weights are used once, and need no word of it. */
static void put_contribution(text *into, uint64_t word, int uses) {
    put_microbatch(into, word);
    if (uses) put(into, ", use %u,", (unsigned)(word >> 32));
}

static void put_due(text *into, uint64_t expected, uint64_t found) {
    int uses = (expected | found) >> 32 != 0;
    if (expected == QE_NONE) put(into, " No further contribution is due; that");
    else {
        put(into, " The contribution");
        put_contribution(into, expected, uses);
        put(into, " is due; that");
    }
    put_contribution(into, found, uses);
    put(into, " came.");
}

/* What the two numbers of a record mean, per rule. */
static void put_scale_and_slot(text *into, const qe_violation *violation) {
    unsigned long long expected = violation->expected, found = violation->found;
    switch (violation->rule) {
    case QE_RULE_SCALE_EPOCH: put(into, " Built for epoch %llu; the scale is at epoch %llu.", expected, found); break;
    case QE_RULE_SCALE_BUSY:
    case QE_RULE_SCALE_LOST: put(into, " %llu records are due in a step; %llu came.", expected, found); break;
    case QE_RULE_SCALE_TWICE: put(into, " It was folded in this step already."); break;
    case QE_RULE_SCALE_UNFOLDED: put(into, " It holds an amax that no fold took."); break;
    case QE_RULE_SLOT_STALE:
        put(into, " The handle is of generation %llu; the slot is at %llu.", expected, found);
        break;
    case QE_RULE_SLOT_LIVE:
        put(into, " Generation %llu is asked for; generation %llu is live.", expected, found);
        break;
    case QE_RULE_SLOT_EMPTY: put(into, " Generation %llu is named; nothing is retained.", expected); break;
    case QE_RULE_SLOT_TWICE: put(into, " Generation %llu was released before.", expected); break;
    case QE_RULE_SLOT_OWNER:
        put(into, " Named for ");
        put_owner(into, violation->expected);
        put(into, "; it belongs to ");
        put_owner(into, violation->found);
        put(into, ".");
        break;
    case QE_RULE_SLOT_LEAK: put(into, " Generation %llu was never released.", found); break;
    default: break; /* the other functions' rules */
    }
}

static void put_weight_and_cache(text *into, const qe_violation *violation) {
    unsigned long long expected = violation->expected, found = violation->found;
    switch (violation->rule) {
    case QE_RULE_WEIGHT_VERSION:
        put(into, " Built for version %llu; the weight is at version %llu.", expected, found);
        break;
    case QE_RULE_WEIGHT_TWICE: put(into, " It was committed in this step already."); break;
    case QE_RULE_WEIGHT_UNTAKEN: put(into, " Its gradient was not taken in this step."); break;
    case QE_RULE_CACHE_EMPTY: put(into, " Nothing has filled it."); break;
    case QE_RULE_CACHE_STALE: put(into, " Version %llu is due; found version %llu.", expected, found); break;
    case QE_RULE_CACHE_SCALE: put(into, " Scale epoch %llu is due; found epoch %llu.", expected, found); break;
    case QE_RULE_CACHE_RECIPE:
        put(into, " Used for ");
        put_recipe(into, violation->expected);
        put(into, "; made for ");
        put_recipe(into, violation->found);
        put(into, ".");
        break;
    case QE_RULE_CACHE_LAYOUT: put(into, " Layouts 0x%llx are used; 0x%llx are filled.", expected, found); break;
    default: break; /* the other functions' rules */
    }
}

static void put_grad_and_buffer(text *into, const qe_violation *violation, const qe_program *program) {
    unsigned long long expected = violation->expected, found = violation->found;
    switch (violation->rule) {
    case QE_RULE_GRAD_TWICE:
        put(into, " That");
        put_contribution(into, (found << 32) | expected, 1);
        put(into, " is in already.");
        break;
    case QE_RULE_GRAD_ORDER: put_due(into, violation->expected, violation->found); break;
    case QE_RULE_GRAD_SET:
        if (violation->expected) put(into, " The first deposit of a step must set; this one adds.");
        else put(into, " Deposits are in already; this one would wipe them out.");
        break;
    case QE_RULE_GRAD_TAKEN: put(into, " The optimizer has it already."); break;
    case QE_RULE_GRAD_MISSING: put(into, " %llu of %llu deposits are in.", found, expected); break;
    case QE_RULE_BUFFER_BOUNDS: put(into, " The range reaches %llu; it may reach %llu.", found, expected); break;
    case QE_RULE_BUFFER_UNWRITTEN: put(into, " Nothing has written byte %llu.", expected); break;
    case QE_RULE_BUFFER_FREED: put(into, " It is not allocated here."); break;
    case QE_RULE_BUFFER_LIVE:
        put(into, " Asked for at 0x%llx; what lies at 0x%llx", expected, found);
        put_other_object(into, violation, program);
        put(into, " is live.");
        break;
    case QE_RULE_BUFFER_VERSION:
        put(into, " Built for write %llu of the step; write %llu is there.", expected, found);
        break;
    default: break; /* the other functions' rules */
    }
}

static void put_graph(text *into, const qe_violation *violation, const qe_program *program) {
    unsigned long long expected = violation->expected, found = violation->found;
    switch (violation->rule) {
    case QE_RULE_SYNC_CAPTURE:
        if (violation->object != QE_NONE)
            put(into, " Its stream records already, or is one that cannot: the host, or the legacy default stream.");
        else
            put(into, " What is waited for lies on the other side of a recording's border; move the wait across it.");
        break;
    case QE_RULE_GRAPH_UNJOINED:
        if (found >= expected) put(into, " It began on another stream than the one that it ends on.");
        else put(into, " %llu ops of that stream were recorded; the end waits for %llu.", expected, found);
        break;
    case QE_RULE_RNG_FROZEN: put(into, " The next number is %llu; the draw begins at %llu.", expected, found); break;
    case QE_RULE_RNG_SPLIT: put(into, " No forward of this microbatch drew these numbers at %llu.", expected); break;
    case QE_RULE_GRAPH_EMPTY: put(into, " It was never captured."); break;
    case QE_RULE_GRAPH_STALE: put(into, " Seal %llu is named; seal %llu is due.", expected, found); break;
    case QE_RULE_GRAPH_MODE: put(into, " Captured for mode %llu; launched for mode %llu.", expected, found); break;
    case QE_RULE_GRAPH_ADDRESS: put(into, " It holds address 0x%llx; that is at 0x%llx now.", expected, found); break;
    case QE_RULE_GRAPH_CONSTANT: put(into, " It holds bits 0x%llx; they are 0x%llx now.", expected, found); break;
    case QE_RULE_SLOT_ALIAS:
        put(into, " The slot");
        put_other_object(into, violation, program);
        put(into, " lies at 0x%llx, the buffer at 0x%llx.", expected, found);
        break;
    default: break; /* the other functions' rules */
    }
}

static int is_sync(qe_rule rule) {
    return (rule >= QE_RULE_SYNC_ENTER && rule <= QE_RULE_SYNC_EVENT) || rule == QE_RULE_SYNC_REUSE;
}

static void put_facts(text *into, const qe_violation *violation, const qe_program *program) {
    char other[OP_TEXT_BYTES];
    item_text(program, violation->other_item, other, sizeof other);
    if (is_sync(violation->rule)) {
        put_sync(into, violation, program, other);
        return;
    }
    put_scale_and_slot(into, violation);
    put_weight_and_cache(into, violation);
    put_grad_and_buffer(into, violation, program);
    put_graph(into, violation, program);
    if (violation->other_item == QE_NONE) return;
    if (violation->rule == QE_RULE_SYNC_CAPTURE || violation->rule == QE_RULE_GRAPH_UNJOINED)
        put(into, " On the other side: %s.", other);
    else put(into, " Last changed by %s.", other);
}

int qe_violation_text(const qe_violation *violation, const qe_program *program, char *out, size_t capacity) {
    QE_ASSERT(violation != NULL);
    QE_ASSERT(program != NULL);
    QE_ASSERT(out != NULL || capacity == 0);
    char item[OP_TEXT_BYTES];
    text into = {out, capacity, 0};
    if (capacity > 0) out[0] = '\0';
    int at_end = violation->item == QE_NONE && violation->stream == QE_NONE;
    if (at_end) snprintf(item, sizeof item, "the end of the step");
    else item_text(program, violation->item, item, sizeof item);
    put(&into, "%s: %s", qe_rule_id(violation->rule), item);
    if (violation->object < program->object_count) {
        const qe_object *object = &program->objects[violation->object];
        put(&into, ", %s %s", qe_object_kind_name(object->kind), object->name);
    }
    put(&into, ". %s", qe_rule_sentence(violation->rule));
    put_facts(&into, violation, program);
    if (violation->count > 1) put(&into, " It happened %u times.", violation->count);
    return into.length;
}
