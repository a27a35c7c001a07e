/* shrink.c - a case that went wrong is made smaller as long as it goes wrong: objects are taken out with all their
 * effects, then items, one by one. What goes wrong is that ledger and oracle differ on the trace; where they do not (a
 * moment alone was wrong), what breaks the same rule is kept, and only objects are taken out: what is right without
 * them stays right. */
#include <stdlib.h>
#include <string.h>

#include "adversary/adversary.h"
#include "oracle/oracle.h"

typedef struct smaller {
    mutant m;
    step s;
    int differs; /* ledger and oracle, on the trace */
    qe_rule rule; /* that the ledger finds */
} smaller;

static int differs(const qe_program *program, qe_rule *rule_out) {
    static oracle_verdict said;
    qe_violations violations;
    uint32_t item = oracle_judge(program, &said);
    qe_status status = qe_program_judge(program, &violations, NULL);
    *rule_out = status == QE_OK ? QE_RULE_NONE : violations.record[0].rule;
    uint32_t found = status == QE_OK ? program->item_count : violations.record[0].item;
    return found != item || (item < program->item_count && (int)*rule_out != said.rule);
}

static int is_still_wrong(const smaller *w) {
    qe_program program;
    qe_rule rule;
    uint32_t starts[STEPS_MAX + 1];
    trace_of(&w->s, &w->m.list, w->m.at_step, w->m.objects, &program, starts);
    int still = differs(&program, &rule);
    qe_program_deinit(&program);
    return w->differs ? still : rule == w->rule && !still;
}

static void without_object(item_list *list, uint32_t object) {
    for (uint32_t i = 0; i < list->count; i++)
        for (uint32_t k = list->entries[i].item.effect_count; k-- > 0;)
            if (list->entries[i].effects[k].object == object) sequence_drop_effect(list, i, k);
}

static void without_idle(item_list *list) {
    for (uint32_t i = list->count; i-- > 0;)
        if (list->entries[i].item.kind == QE_ITEM_OP && list->entries[i].item.effect_count == 0)
            sequence_remove(list, i);
}

/* Keeps what was tried where it is still wrong. Takes both lists over. */
static int keep(smaller *w, item_list *list, item_list *right) {
    item_list kept = w->m.list, kept_right = w->s.right;
    w->m.list = *list;
    w->s.right = *right;
    int wrong = is_still_wrong(w);
    if (!wrong) {
        w->m.list = kept;
        w->s.right = kept_right;
    }
    sequence_free(wrong ? &kept : list);
    sequence_free(wrong ? &kept_right : right);
    return wrong;
}

static void copies(const smaller *w, item_list *list, item_list *right) {
    memset(list, 0, sizeof *list);
    memset(right, 0, sizeof *right);
    sequence_copy(list, &w->m.list);
    sequence_copy(right, &w->s.right);
}

/* Caches and gradients mean nothing without their weight, caches nothing without their scale. */
static int goes_with(const qe_object *other, uint32_t object) {
    int names = other->kind == QE_OBJECT_CACHE || other->kind == QE_OBJECT_GRAD;
    return names && (other->weight == object || (other->kind == QE_OBJECT_CACHE && other->scale == object));
}

static void take_object_out(smaller *w, uint32_t object, qe_object *objects) {
    uint32_t count = w->s.program.object_count;
    item_list list, right;
    copies(w, &list, &right);
    memcpy(objects, w->m.objects, count * sizeof *objects);
    for (uint32_t other = 0; other < count; other++) {
        if (other != object && !goes_with(&w->s.program.objects[other], object)) continue;
        without_object(&list, other);
        without_object(&right, other);
        w->m.objects[other].due = 0; /* nobody owes it anything any more */
    }
    without_idle(&list);
    without_idle(&right);
    if (!keep(w, &list, &right)) memcpy(w->m.objects, objects, count * sizeof *objects);
}

static void take_objects_out(smaller *w) {
    qe_object *objects = malloc((w->s.program.object_count + 1u) * sizeof *objects);
    MUST(objects != NULL);
    for (uint32_t object = 0; object < w->s.program.object_count; object++) take_object_out(w, object, objects);
    free(objects);
}

static void take_items_out(smaller *w) {
    for (int again = 1; again;) {
        again = 0;
        for (uint32_t i = w->m.list.count; i-- > 0;) {
            item_list list, right;
            copies(w, &list, &right);
            sequence_remove(&list, i);
            again |= keep(w, &list, &right);
        }
        for (uint32_t i = w->s.right.count; i-- > 0;) {
            item_list list, right;
            copies(w, &list, &right);
            sequence_remove(&right, i);
            again |= keep(w, &list, &right);
        }
    }
}

static void write_out(const smaller *w, const char *file) {
    qe_program program;
    uint32_t starts[STEPS_MAX + 1];
    trace_of(&w->s, &w->m.list, w->m.at_step, w->m.objects, &program, starts);
    FILE *out = fopen(file, "w");
    if (out != NULL) {
        MUST(qe_trace_write(&program, out, NULL) == QE_OK && fclose(out) == 0);
        fprintf(stderr, "  written: %s (%u items)\n", file, program.item_count);
    }
    qe_program_deinit(&program);
}

void shrink_and_write(const mutant *m, const char *file) {
    smaller w = {.m = *m, .s = *m->step};
    qe_program program;
    uint32_t starts[STEPS_MAX + 1];
    memset(&w.m.list, 0, sizeof w.m.list);
    memset(&w.s.right, 0, sizeof w.s.right);
    sequence_copy(&w.m.list, &m->list);
    sequence_copy(&w.s.right, &m->step->right);
    w.m.objects = malloc((w.s.program.object_count + 1u) * sizeof *w.m.objects);
    MUST(w.m.objects != NULL);
    memcpy(w.m.objects, m->objects != NULL ? m->objects : w.s.program.objects,
           w.s.program.object_count * sizeof *w.m.objects);
    trace_of(&w.s, &w.m.list, m->at_step, w.m.objects, &program, starts);
    w.differs = differs(&program, &w.rule);
    qe_program_deinit(&program);
    take_objects_out(&w);
    if (w.differs) take_items_out(&w);
    write_out(&w, file);
    free(w.m.objects);
    sequence_free(&w.m.list);
    sequence_free(&w.s.right);
}
