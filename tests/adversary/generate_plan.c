/* generate_plan.c - right programs from plans: a named schedule over a small model, one rank's program or all of them
 * in one trace, eager or with stretches of it captured. */
#include <stdlib.h>
#include <string.h>

#include "adversary/adversary.h"
#include "qeffect/model.h"

enum { RANKS_MAX = 4, MICROBATCHES_MAX = 6, LAYERS_MAX = 12, RECIPES = 5, SEGMENT_MAX = 20, COUNTERS = 4 };

static qe_model *models[LAYERS_MAX + 1][RECIPES];

static const qe_model *model_of(uint32_t layers, qe_recipe_kind kind) {
    qe_model_config config = {.layers = layers, .hidden = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 64,
                              .sequence = 16, .sequences = 1, .rope_theta = 10000.0f, .norm_epsilon = 1e-5f};
    qe_recipe recipe = {.kind = kind, .history_length = 4};
    if (models[layers][kind] == NULL)
        MUST(qe_model_create(&config, &recipe, &models[layers][kind], NULL) == QE_OK);
    return models[layers][kind];
}

void plans_free(void) {
    for (int layers = 0; layers <= LAYERS_MAX; layers++)
        for (int kind = 0; kind < RECIPES; kind++) {
            qe_model_destroy(models[layers][kind]);
            models[layers][kind] = NULL;
        }
}

static void add_words(step *s, const char *words) {
    size_t used = strlen(s->name);
    snprintf(s->name + used, sizeof s->name - used, "%s", words);
}

static uint32_t names(void) {
    uint32_t count = 0;
    while (qe_schedule_name(count) != NULL) count++;
    return count;
}

/* Not every order fits every size: draws until one does. */
static void draw_schedule(dice *d, int forward_only, qe_schedule *schedule, char *name) {
    for (;;) {
        qe_schedule_request request = {.name = qe_schedule_name(dice_below(d, names())),
                                       .ranks = 1 + dice_below(d, RANKS_MAX),
                                       .microbatches = 1 + dice_below(d, MICROBATCHES_MAX),
                                       .forward_only = forward_only};
        request.chunks = qe_schedule_usual_chunks(request.name);
        if (dice_one_in(d, 4)) request.chunks = 1 + dice_below(d, 3);
        if (request.ranks * request.chunks > LAYERS_MAX) continue;
        if (qe_schedule_generate(&request, schedule, NULL) != QE_OK) continue;
        snprintf(name, NAME_BYTES, "%s P%u V%u M%u", request.name, request.ranks, request.chunks, request.microbatches);
        if (schedule->reversed == 0) return; /* such plans are not built */
        qe_schedule_deinit(schedule);
    }
}

static uint32_t add_events(step *s, uint32_t count) {
    uint32_t first = s->program.event_count;
    for (uint32_t i = 0; i < count; i++) qe_program_add_event(&s->program);
    return first;
}

/* Takes a program's objects, streams and events over, and its items as entries behind the others. */
static void append(step *s, const qe_program *program, uint16_t rank, int many, item_list *items) {
    qe_program *to = &s->program;
    uint32_t objects = to->object_count, streams = to->stream_count, events = add_events(s, program->event_count);
    for (uint32_t i = 0; i < program->object_count; i++) {
        qe_object object = program->objects[i];
        if (many) MUST((size_t)snprintf(object.name, sizeof object.name, "r%u/%.90s", rank, program->objects[i].name));
        if (object.weight != QE_NONE) object.weight += objects;
        if (object.scale != QE_NONE) object.scale += objects;
        MUST(qe_program_add_object(to, &object, NULL, NULL) == QE_OK);
    }
    for (uint32_t i = 0; i < program->stream_count; i++) {
        char name[QE_NAME_BYTES];
        snprintf(name, sizeof name, "%.80s%s%.0u", program->streams[i].name, many ? "@" : "", many ? rank : 0u);
        MUST(qe_program_add_stream(to, name, program->streams[i].role, NULL, NULL) == QE_OK);
        to->streams[streams + i].rank = rank;
    }
    sequence_of(items, program);
    for (uint32_t i = 0; i < items->count; i++) {
        entry *e = &items->entries[i];
        if (e->item.kind == QE_ITEM_OP)
            MUST(qe_program_add_label(to, program->labels[e->item.label].text, &e->item.label, NULL) == QE_OK);
        else
            e->item.event += events;
        e->item.stream += streams;
        e->item.rank = rank;
        for (uint32_t k = 0; k < e->item.effect_count; k++) e->effects[k].object += objects;
    }
}

/* The ranks' hosts submit at the same time. */
static void interleave(step *s, dice *d, item_list *rows, uint32_t count) {
    uint32_t next[RANKS_MAX] = {0}, left = 0;
    for (uint32_t r = 0; r < count; r++) left += rows[r].count;
    for (; left > 0; left--) {
        uint32_t r = dice_below(d, count);
        while (next[r] == rows[r].count) r = (r + 1) % count;
        sequence_insert(&s->right, s->right.count, &rows[r].entries[next[r]++]);
    }
}

void step_of_program(step *s, const qe_program *program, const char *name) {
    step_init(s);
    append(s, program, 0, 0, &s->right);
    snprintf(s->name, sizeof s->name, "%s", name);
    step_seal(s);
}

static void take_plan(step *s, dice *d, const qe_plan *plan) {
    item_list rows[RANKS_MAX] = {{0}};
    uint32_t streams = 0;
    for (uint32_t r = 0; r < plan->ranks; r++) streams += plan->rank[r].program.stream_count;
    int many = plan->ranks > 1 && streams <= QE_PROGRAM_STREAMS_MAX && dice_one_in(d, 4);
    if (!many) append(s, &plan->rank[dice_below(d, plan->ranks)].program, 0, 0, &s->right);
    for (uint32_t r = 0; many && r < plan->ranks; r++) append(s, &plan->rank[r].program, (uint16_t)r, 1, &rows[r]);
    if (many) interleave(s, d, rows, plan->ranks);
    for (uint32_t r = 0; r < RANKS_MAX; r++) sequence_free(&rows[r]);
    s->traces_only |= (uint8_t)many;
    if (many) add_words(s, " all ranks");
}

/* Ops of one stream without an edge between them; `whole`: of one microbatch, because a launch puts its own in. */
static int is_run(const step *s, uint32_t first, uint32_t at, int whole) {
    const entry *a = &s->right.entries[first], *b = &s->right.entries[at];
    if (whole && a->item.microbatch != b->item.microbatch) return 0;
    return b->item.kind == QE_ITEM_OP && b->item.stream == a->item.stream && a->item.kind == QE_ITEM_OP;
}

static entry plain_op(step *s, const entry *like, const char *label) {
    entry e = *like;
    memset(e.effects, 0, sizeof e.effects);
    e.item.effect_count = 0;
    MUST(qe_program_add_label(&s->program, label, &e.item.label, NULL) == QE_OK);
    return e;
}

static void add_effect(item_list *list, const entry *empty, const qe_effect *effect, int *open) {
    entry *last = *open ? &list->entries[list->count - 1] : NULL;
    if (last == NULL || last->item.effect_count == QE_EFFECTS_MAX) last = sequence_insert(list, list->count, empty);
    last->effects[last->item.effect_count++] = *effect;
    *open = 1;
}

/* What an effect of a recording says: its versions count on from what the counters are when the graph is launched, so
 * they are told from what they were in front of the run. */
static qe_effect counted_on(const step *s, const qe_effect *effect, const uint64_t *moved) {
    qe_effect e = *effect;
    const qe_object *object = &s->program.objects[e.object];
    if (object->kind == QE_OBJECT_CACHE) {
        e.version -= moved[object->weight];
        if (object->scale != QE_NONE) e.epoch -= moved[object->scale];
    } else if (object->kind != QE_OBJECT_BUFFER && object->kind != QE_OBJECT_GRAD) {
        e.version -= moved[e.object];
    }
    return e;
}

static void record_op(step *s, const entry *e, const entry *told, const uint64_t *moved, item_list *out) {
    entry recorded = *e;
    int open = 0; /* one op tells of one op */
    recorded.item.effect_count = 0;
    for (uint32_t k = 0; k < e->item.effect_count; k++) {
        int recorded_too = moved != NULL || effect_is(&e->effects[k], QE_OBJECT_BUFFER);
        if (moved != NULL) recorded.effects[recorded.item.effect_count++] = counted_on(s, &e->effects[k], moved);
        else if (recorded_too) recorded.effects[recorded.item.effect_count++] = e->effects[k];
        else add_effect(out, told, &e->effects[k], &open);
    }
    sequence_insert(&s->prelude, s->prelude.count, &recorded);
}

/* Ops [first, end) of one stream become a graph. With `moved`, all that they do is recorded before the first step;
 * without, what they do to buffers is, and what they do to versions is told behind each launch. */
static void capture_run(step *s, uint32_t first, uint32_t end, const uint64_t *moved, item_list *out) {
    uint32_t graph, number = s->program.object_count;
    qe_object object = {.kind = QE_OBJECT_GRAPH, .weight = QE_NONE, .scale = QE_NONE};
    snprintf(object.name, sizeof object.name, "graph%u", number);
    MUST(qe_program_add_object(&s->program, &object, &graph, NULL) == QE_OK);
    const entry *like = &s->right.entries[first];
    entry begin = plain_op(s, like, "begin"), capture = plain_op(s, like, "capture");
    entry launch = plain_op(s, like, "launch"), told = plain_op(s, like, "told");
    int open = 0;
    add_effect(&s->prelude, &begin, &(qe_effect){.object = graph, .kind = QE_EFFECT_GRAPH_BEGIN}, &open);
    open = 0;
    add_effect(out, &launch, &(qe_effect){.object = graph, .kind = QE_EFFECT_GRAPH_LAUNCH, .version = 1}, &open);
    for (uint32_t i = first; i < end; i++) record_op(s, &s->right.entries[i], &told, moved, out);
    open = 0;
    add_effect(&s->prelude, &capture, &(qe_effect){.object = graph, .kind = QE_EFFECT_GRAPH_CAPTURE, .version = 1},
               &open);
}

static void count_moves(const entry *e, uint64_t *moved) {
    for (uint32_t k = 0; k < e->item.effect_count; k++) moved[e->effects[k].object] += effect_moves(&e->effects[k]);
}

/* A layer's worth, an action's, or as much as there is between two edges. */
static void capture_runs(step *s, dice *d) {
    static const uint32_t lengths[] = {6, 12, SEGMENT_MAX};
    uint32_t most = lengths[dice_below(d, 3)];
    uint64_t *moved = calloc(s->program.object_count + 1u, sizeof *moved);
    item_list out = {0};
    MUST(moved != NULL);
    s->whole_graphs = (uint8_t)dice_one_in(d, 2);
    for (uint32_t i = 0; i < s->right.count;) {
        uint32_t end = i + 1;
        while (end < s->right.count && end - i < most && is_run(s, i, end, s->whole_graphs)) end++;
        if (end - i > 1 && !dice_one_in(d, 4)) capture_run(s, i, end, s->whole_graphs ? moved : NULL, &out);
        else
            for (uint32_t k = i; k < end; k++) sequence_insert(&out, out.count, &s->right.entries[k]);
        for (; i < end; i++) count_moves(&s->right.entries[i], moved);
    }
    free(moved);
    sequence_free(&s->right);
    s->right = out;
    s->traces_only = 1;
    add_words(s, s->whole_graphs ? " captured whole" : " captured");
}

static void draw_counters(step *s, dice *d) {
    if (dice_one_in(d, 2)) return;
    for (uint32_t i = 0; i < s->program.object_count; i++) {
        qe_object *o = &s->program.objects[i];
        if (o->kind == QE_OBJECT_SCALE || o->kind == QE_OBJECT_SLOT || o->kind == QE_OBJECT_WEIGHT)
            o->counter = dice_below(d, COUNTERS);
    }
}

void generate_plan(step *s, dice *d) {
    qe_schedule schedule;
    qe_plan_options options = {.forward_only = (uint8_t)dice_one_in(d, 10), .cache_weights = !dice_one_in(d, 3),
                               .reuse_slots = !dice_one_in(d, 4),
                               .placement = dice_one_in(d, 3) ? QE_GRADIENT_COPY : QE_GRADIENT_DIRECT};
    step_init(s);
    draw_schedule(d, options.forward_only, &schedule, s->name);
    uint32_t layers = schedule.stages + (schedule.stages < LAYERS_MAX ? dice_below(d, 2) : 0);
    qe_recipe_kind recipe = (qe_recipe_kind)dice_below(d, RECIPES);
    qe_plan *plan = NULL;
    qe_violations violations;
    qe_counterexample counterexample;
    qe_status status = qe_plan_create(&schedule, qe_model_table(), model_of(layers, recipe), &options, &plan,
                                      &violations, &counterexample, NULL);
    if (status != QE_OK) fprintf(stderr, "%s: %s\n", s->name, qe_status_name(status));
    MUST(status == QE_OK); /* a named schedule that has no plan would be a false trap */
    size_t used = strlen(s->name);
    snprintf(s->name + used, sizeof s->name - used, " %s%s%s%s%s", qe_recipe_name(recipe),
             options.forward_only ? " evaluation" : "", options.cache_weights ? "" : " no-cache",
             options.reuse_slots ? "" : " no-reuse", options.placement == QE_GRADIENT_COPY ? " copy" : "");
    take_plan(s, d, plan);
    s->from_plan = 1;
    draw_counters(s, d);
    step_shuffle(s, d, dice_below(d, 2 * s->right.count));
    int captures = dice_one_in(d, 4);
    step_seal(s);
    if (captures) capture_runs(s, d);
    if (captures) step_number(s);
    qe_plan_destroy(plan);
    qe_schedule_deinit(&schedule);
}
