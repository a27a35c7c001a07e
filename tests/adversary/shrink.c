/* shrink.c - a case that went wrong is made smaller as long as it goes wrong in the same way: objects are taken out
 * with all their effects (what is right without them stays right), then items that only order. */
#include <stdlib.h>
#include <string.h>

#include "adversary/adversary.h"

static void without_object(item_list *list, uint32_t object) {
    for (uint32_t i = 0; i < list->count; i++)
        for (uint32_t k = list->entries[i].item.effect_count; k-- > 0;)
            if (list->entries[i].effects[k].object == object) {
                int changed = list->entries[i].changed;
                sequence_drop_effect(list, i, k);
                list->entries[i].changed = (uint8_t)changed;
            }
}

static int is_idle(const entry *e) { return e->item.kind == QE_ITEM_OP && e->item.effect_count == 0; }

static void without_idle(item_list *list) {
    for (uint32_t i = list->count; i-- > 0;)
        if (is_idle(&list->entries[i])) sequence_remove(list, i);
}

/* Judged as a trace, whatever the moment was: does it still break the rule that was found, and no other before? */
static int still_says(const mutant *m, qe_rule rule) {
    qe_program program;
    qe_violations violations;
    uint32_t starts[STEPS_MAX + 1];
    trace_of(m->step, &m->list, m->at_step, m->objects, &program, starts);
    qe_status status = qe_program_judge(&program, &violations, NULL);
    qe_rule found = status == QE_OK ? QE_RULE_NONE : violations.record[0].rule;
    breach seen = precedence_first(&program, 1);
    qe_program_deinit(&program);
    int orders = found >= QE_RULE_SYNC_ENTER && found <= QE_RULE_SYNC_EVENT;
    if (found != rule) return 0;
    return !orders || seen.rules == 0; /* a race that is there for good is another fault */
}

void shrink_and_write(const mutant *m, moment at, const char *file) {
    mutant small = *m;
    step s = *m->step;
    verdict found = found_at(m, at);
    memset(&small.list, 0, sizeof small.list);
    memset(&s.right, 0, sizeof s.right);
    sequence_copy(&small.list, &m->list);
    sequence_copy(&s.right, &m->step->right);
    small.step = &s;
    int shrinks = still_says(&small, found.rule);
    for (uint32_t object = 0; shrinks && object < s.program.object_count; object++) {
        item_list list = {0}, right = {0};
        sequence_copy(&list, &small.list);
        sequence_copy(&right, &s.right);
        without_object(&small.list, object);
        without_object(&s.right, object);
        if (!still_says(&small, found.rule)) {
            sequence_copy(&small.list, &list);
            sequence_copy(&s.right, &right);
        }
        sequence_free(&list);
        sequence_free(&right);
    }
    if (shrinks) {
        without_idle(&small.list);
        without_idle(&s.right);
    }
    qe_program program;
    uint32_t starts[STEPS_MAX + 1];
    trace_of(&s, &small.list, small.at_step, small.objects, &program, starts);
    FILE *out = fopen(file, "w");
    if (out != NULL) {
        MUST(qe_trace_write(&program, out, NULL) == QE_OK && fclose(out) == 0);
        fprintf(stderr, "  written: %s (%u items)\n", file, program.item_count);
    }
    qe_program_deinit(&program);
    sequence_free(&small.list);
    sequence_free(&s.right);
}
