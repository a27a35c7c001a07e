/* counterexample.c - a counterexample as a paragraph for people. The facts are in the structure; words are made
 * here. */
#include "schedule/order.h"

#include <stdarg.h>

#include "base/assert.h"

enum { PLACED_BYTES = 96 };

/* snprintf's conventions over several pieces: `length` counts what all of them need. */
typedef struct paragraph {
    char *text;
    size_t capacity, length;
} paragraph;

__attribute__((format(printf, 2, 3))) static void say(paragraph *to, const char *format, ...) {
    size_t at = to->length < to->capacity ? to->length : to->capacity;
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(at == to->capacity ? NULL : to->text + at, to->capacity - at, format, arguments);
    va_end(arguments);
    QE_ASSERT(length >= 0);
    to->length += (size_t)length;
}

/* "1B0 (row 2, cell 5)", or the place in a rank's order where no file was read. */
static const char *placed(const qe_schedule *schedule, uint32_t index, char text[static PLACED_BYTES]) {
    const qe_action *action = &schedule->actions[index];
    char name[32];
    (void)qe_action_text(action, name, sizeof name);
    if (action->row != 0) {
        (void)snprintf(text, PLACED_BYTES, "%s (row %u, cell %u)", name, action->row, action->column);
        return text;
    }
    uint32_t rank = qe_schedule_action_rank(schedule, index);
    (void)snprintf(text, PLACED_BYTES, "%s (rank %u, action %u)", name, rank, index - schedule->rank_begin[rank] + 1);
    return text;
}

static void say_place(paragraph *to, const qe_counterexample *facts, const qe_schedule *schedule) {
    char first[PLACED_BYTES], second[PLACED_BYTES];
    if (facts->action_count == 0) {
        say(to, "no rank has stage %u, though stages run from 0 to %u.", (unsigned)facts->missing.stage,
            schedule->stages - 1);
        return;
    }
    uint32_t last = facts->actions[facts->action_count - 1];
    const qe_action *action = &schedule->actions[last];
    if (action->stage >= schedule->stages || action->microbatch >= schedule->microbatches) {
        say(to, "%s is out of range: found %u, expected below %u.", placed(schedule, last, first), facts->found,
            facts->expected);
        return;
    }
    say(to, "stage %u lives on one rank only: ", (unsigned)action->stage);
    if (facts->action_count == 2) {
        say(to, "%s is on rank %u, ", placed(schedule, facts->actions[0], second), facts->expected);
    } else if (facts->expected < schedule->ranks) {
        say(to, "that is rank %u, but ", facts->expected);
    }
    say(to, "%s on rank %u.", placed(schedule, last, first), facts->found);
}

static void say_duplicate(paragraph *to, const qe_counterexample *facts, const qe_schedule *schedule) {
    char first[PLACED_BYTES], second[PLACED_BYTES];
    uint8_t before = schedule->actions[facts->actions[0]].kind, repeated = schedule->actions[facts->actions[1]].kind;
    say(to, "%s repeats %s", placed(schedule, facts->actions[1], first), placed(schedule, facts->actions[0], second));
    say(to, before == repeated ? "; every action is due once." : "; B already consists of I and W.");
}

static void say_missing(paragraph *to, const qe_counterexample *facts) {
    char name[32];
    (void)qe_action_text(&facts->missing, name, sizeof name);
    say(to, "%s is due and absent", name);
    if (facts->missing.kind == QE_ACTION_B) say(to, " (or I and W in its place)");
    say(to, "; every stage takes every microbatch once.");
}

static void say_order(paragraph *to, const qe_counterexample *facts, const qe_schedule *schedule) {
    char early[PLACED_BYTES], needed[PLACED_BYTES];
    say(to, "%s needs %s, which comes after it on the same rank.", placed(schedule, facts->actions[0], early),
        placed(schedule, facts->actions[1], needed));
}

/* Within a row an action waits for an earlier one; across rows, for a neighbouring stage's result. A neighbouring
 * stage may stand in the same row: what comes later there can only be waited for because of its result. */
static int waits_by_row(const qe_schedule *schedule, uint32_t waiting, uint32_t waited_for) {
    return waited_for < waiting &&
           qe_schedule_action_rank(schedule, waiting) == qe_schedule_action_rank(schedule, waited_for);
}

static void say_cycle(paragraph *to, const qe_counterexample *facts, const qe_schedule *schedule) {
    char text[PLACED_BYTES];
    say(to, "%u actions wait for each other, and %u never run. ", facts->action_count, facts->found);
    say(to, "%s", placed(schedule, facts->actions[0], text));
    for (uint32_t i = 0; i < facts->action_count; i++) {
        uint32_t waiting = facts->actions[i], waited_for = facts->actions[(i + 1) % facts->action_count];
        say(to, waits_by_row(schedule, waiting, waited_for) ? " comes after " : " needs the result of ");
        say(to, "%s", placed(schedule, waited_for, text));
        say(to, i + 1 == facts->action_count ? "." : ", which");
    }
}

int qe_counterexample_text(const qe_counterexample *counterexample, const qe_schedule *schedule, char *text,
                           size_t capacity) {
    paragraph to = {.text = text, .capacity = capacity};
    say(&to, "%s: ", qe_rule_id(counterexample->rule));
    switch (counterexample->rule) {
    case QE_RULE_SCHEDULE_PLACE: say_place(&to, counterexample, schedule); break;
    case QE_RULE_SCHEDULE_DUPLICATE: say_duplicate(&to, counterexample, schedule); break;
    case QE_RULE_SCHEDULE_MISSING: say_missing(&to, counterexample); break;
    case QE_RULE_SCHEDULE_ORDER: say_order(&to, counterexample, schedule); break;
    case QE_RULE_SCHEDULE_CYCLE: say_cycle(&to, counterexample, schedule); break;
    default: say(&to, "not a counterexample."); break; /* the caller's structure was never filled */
    }
    return (int)to.length;
}
