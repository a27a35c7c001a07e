/* trace_effect.c - one effect of an op: `KIND NAME[BEGIN,END)@VERSION,attribute,attribute=value`. Numbers in a trace
 * are absolute; a program counts from its objects' counters. */
#include <string.h>

#include "base/assert.h"
#include "core/effect.h"
#include "core/trace_state.h"
#include "qeffect/recipe.h"

static qe_status read_kind(qe_trace_reader *reader, uint8_t *kind_out) {
    char word[QE_NAME_BYTES];
    char *before = reader->at;
    QE_TRY(qe_trace_word(reader, "an effect such as slot.borrow", word));
    for (int kind = 0; kind < QE_EFFECT_KINDS; kind++) {
        if (strcmp(word, qe_effect_kind_name((qe_effect_kind)kind)) != 0) continue;
        *kind_out = (uint8_t)kind;
        return QE_OK;
    }
    reader->at = before + strspn(before, " \t");
    return qe_trace_expected(reader, "an effect: scale.use|record|fold, slot.acquire|borrow|release, "
                                     "weight.read|commit, cache.fill|use, grad.deposit|take, buffer.read|write, "
                                     "buffer.alloc|free|take|drop|pledge, graph.begin|capture|launch, rng.draw");
}

/* What the effect means where it says nothing more: the op's stage and microbatch, the whole buffer, now. */
static void set_defaults(const qe_program *program, const qe_item *item, qe_effect *effect) {
    const qe_object *object = &program->objects[effect->object];
    if (object->kind == QE_OBJECT_SLOT) effect->stage = item->stage;
    if (object->kind == QE_OBJECT_SLOT || object->kind == QE_OBJECT_RNG || effect->kind == QE_EFFECT_GRAD_DEPOSIT)
        effect->microbatch = item->microbatch;
    if (object->kind == QE_OBJECT_BUFFER) effect->end = object->bytes;
    if (object->kind == QE_OBJECT_RNG) effect->end = 1;
}

/* `*ROWS/PITCH`: so many times, so many bytes apart. */
static qe_status read_rows(qe_trace_reader *reader, qe_effect *effect) {
    uint64_t rows;
    if (!qe_trace_takes(reader, '*')) return QE_OK;
    if (*reader->at == '0') return qe_trace_expected(reader, "at least one row");
    QE_TRY(qe_trace_number(reader, QE_ROWS_MAX, "rows, at most 4096", &rows));
    if (!qe_trace_takes(reader, '/')) return qe_trace_expected(reader, "`/` and the bytes from row to row");
    QE_TRY(qe_trace_number(reader, UINT64_MAX, "the bytes from row to row", &effect->pitch));
    effect->rows = (uint32_t)rows;
    return QE_OK;
}

static qe_status read_range(qe_trace_reader *reader, qe_effect *effect) {
    if (!qe_trace_takes(reader, '[')) return QE_OK;
    QE_TRY(qe_trace_number(reader, UINT64_MAX, "the first byte of a range", &effect->begin));
    if (!qe_trace_takes(reader, ',')) return qe_trace_expected(reader, "`,` in a range such as [0,128)");
    QE_TRY(qe_trace_number(reader, UINT64_MAX, "the end of a range", &effect->end));
    if (!qe_trace_takes(reader, ')')) return qe_trace_expected(reader, "`)` after a range such as [0,128)");
    return read_rows(reader, effect);
}

/* The counter that versions of the effect are told from. */
static uint64_t counter_of(const qe_program *program, uint32_t object) {
    if (object == QE_NONE) return 0;
    switch (program->objects[object].kind) {
    case QE_OBJECT_CACHE: return program->objects[program->objects[object].weight].counter;
    case QE_OBJECT_BUFFER: return 0;
    case QE_OBJECT_SCALE:
    case QE_OBJECT_SLOT:
    case QE_OBJECT_WEIGHT:
    case QE_OBJECT_GRAD:
    case QE_OBJECT_GRAPH:
    case QE_OBJECT_RNG:
    case QE_OBJECT_KINDS: break;
    }
    return program->objects[object].counter;
}

static qe_status read_version(qe_trace_reader *reader, qe_effect *effect) {
    qe_object_kind about = qe_effect_object_kind(effect->kind);
    int needed = about != QE_OBJECT_GRAD && about != QE_OBJECT_BUFFER && effect->kind != QE_EFFECT_GRAPH_BEGIN;
    if (!qe_trace_takes(reader, '@'))
        return needed ? qe_trace_expected(reader, "`@` and the version it was built for") : QE_OK;
    uint64_t version;
    QE_TRY(qe_trace_number(reader, UINT64_MAX, "a version below 2^64", &version));
    effect->version = version - counter_of(reader->program, effect->object);
    return QE_OK;
}

static qe_status read_value(qe_trace_reader *reader, uint64_t most, const char *expected, uint64_t *value_out) {
    if (!qe_trace_takes(reader, '=')) return qe_trace_expected(reader, "`=` and a value");
    return qe_trace_number(reader, most, expected, value_out);
}

qe_status qe_trace_recipe(qe_trace_reader *reader, uint8_t *recipe_out) {
    char word[QE_NAME_BYTES];
    char *before = reader->at;
    uint64_t number;
    qe_recipe_kind kind;
    if (*before >= '0' && *before <= '9') {
        QE_TRY(qe_trace_number(reader, UINT8_MAX, "a recipe number below 256", &number));
        *recipe_out = (uint8_t)number;
        return QE_OK;
    }
    QE_TRY(qe_trace_name(reader, "a recipe", word));
    if (qe_recipe_from_name(word, &kind) != 0) {
        reader->at = before;
        return qe_trace_expected(reader, "a recipe: delayed, current, block, bf16, fp32 or a number");
    }
    *recipe_out = (uint8_t)kind;
    return QE_OK;
}

static qe_status read_microbatch(qe_trace_reader *reader, uint32_t *microbatch_out) {
    uint64_t value;
    if (strncmp(reader->at, "=none", 5) == 0 && !qe_trace_is_bare(reader->at[5])) {
        reader->at += 5;
        *microbatch_out = QE_NONE;
        return QE_OK;
    }
    QE_TRY(read_value(reader, QE_NONE - 1, "a microbatch below 4294967295, or none", &value));
    *microbatch_out = (uint32_t)value;
    return QE_OK;
}

static qe_status read_epoch(qe_trace_reader *reader, qe_effect *effect) {
    uint64_t value;
    QE_TRY(read_value(reader, UINT64_MAX, "a scale epoch below 2^64", &value));
    effect->epoch = value - counter_of(reader->program, reader->program->objects[effect->object].scale);
    return QE_OK;
}

/* `mode=CAPTURED/NOW`, or an address or a constant: what was frozen, and what is there now. */
static qe_status read_frozen(qe_trace_reader *reader, const char *word, qe_effect *effect) {
    int kind = QE_FROZEN_MODE;
    while (kind < QE_FROZEN_KINDS && strcmp(word, qe_frozen_name((qe_frozen)kind)) != 0) kind++;
    if (kind == QE_FROZEN_KINDS || effect->use != QE_FROZEN_NOTHING)
        return qe_trace_expected(reader, "one of mode=, address= or constant= for each graph.launch");
    effect->use = (uint16_t)kind;
    QE_TRY(read_value(reader, UINT64_MAX, "what it was captured with, below 2^64", &effect->begin));
    if (!qe_trace_takes(reader, '/')) return qe_trace_expected(reader, "`/` and what is there now");
    return qe_trace_number(reader, UINT64_MAX, "what is there now, below 2^64", &effect->end);
}

/* `count=N`, `mb=M` or `again`. */
static qe_status read_draw(qe_trace_reader *reader, const char *word, char *before, qe_effect *effect) {
    if (strcmp(word, "count") == 0)
        return read_value(reader, UINT64_MAX, "how many numbers are drawn", &effect->end);
    if (strcmp(word, "mb") == 0) return read_microbatch(reader, &effect->microbatch);
    if (strcmp(word, "again") == 0) {
        effect->write = 1;
        return QE_OK;
    }
    reader->at = before;
    return qe_trace_expected(reader, "count=, mb= or again");
}

static qe_status read_attribute(qe_trace_reader *reader, qe_said *said, qe_effect *effect) {
    char word[QE_NAME_BYTES];
    char *before = reader->at;
    uint64_t value = 0;
    QE_TRY(qe_trace_word(reader, "an attribute", word));
    QE_TRY(qe_trace_once(reader, said, before));
    qe_object_kind about = qe_effect_object_kind(effect->kind);
    int slot = about == QE_OBJECT_SLOT, cache = about == QE_OBJECT_CACHE;
    int deposit = effect->kind == QE_EFFECT_GRAD_DEPOSIT;
    if ((effect->kind == QE_EFFECT_SLOT_BORROW && strcmp(word, "write") == 0) ||
        (deposit && strcmp(word, "set") == 0)) {
        effect->write = 1;
        return QE_OK;
    }
    if (about == QE_OBJECT_RNG) return read_draw(reader, word, before, effect);
    if (effect->kind == QE_EFFECT_GRAPH_LAUNCH) return read_frozen(reader, word, effect);
    if (cache && strcmp(word, "epoch") == 0) return read_epoch(reader, effect);
    if ((slot || deposit) && strcmp(word, "mb") == 0) return read_microbatch(reader, &effect->microbatch);
    if (cache && strcmp(word, "recipe") == 0 && qe_trace_takes(reader, '='))
        return qe_trace_recipe(reader, &effect->recipe);
    if (slot && strcmp(word, "stage") == 0) {
        QE_TRY(read_value(reader, UINT16_MAX, "a stage below 65536", &value));
        effect->stage = (uint16_t)value;
    } else if (deposit && strcmp(word, "use") == 0) {
        QE_TRY(read_value(reader, UINT16_MAX, "a use below 65536", &value));
        effect->use = (uint16_t)value;
    } else if (cache && strcmp(word, "layouts") == 0) {
        QE_TRY(read_value(reader, UINT8_MAX, "a set of layouts below 256", &value));
        effect->layouts = (uint8_t)value;
    } else {
        reader->at = before;
        return qe_trace_expected(reader, "an attribute of this effect: write, stage=, mb= (slot); set, mb=, use= "
                                         "(grad); epoch=, layouts=, recipe= (cache)");
    }
    return QE_OK;
}

qe_status qe_trace_effect(qe_trace_reader *reader, const qe_item *item, qe_effect *effect_out) {
    *effect_out = (qe_effect){0};
    QE_TRY(read_kind(reader, &effect_out->kind));
    QE_TRY(qe_trace_known(reader, qe_effect_object_kind(effect_out->kind), &effect_out->object));
    set_defaults(reader->program, item, effect_out);
    int bytes = effect_out->kind == QE_EFFECT_BUFFER_READ || effect_out->kind == QE_EFFECT_BUFFER_WRITE;
    if (bytes) QE_TRY(read_range(reader, effect_out));
    QE_TRY(read_version(reader, effect_out));
    qe_said said = {0};
    while (qe_trace_takes(reader, ',')) QE_TRY(read_attribute(reader, &said, effect_out));
    if (*reader->at != '\0' && *reader->at != ' ' && *reader->at != '\t')
        return qe_trace_expected(reader, "a blank, or `,` and an attribute");
    return QE_OK;
}
