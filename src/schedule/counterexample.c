/* counterexample.c - a counterexample as a paragraph for people. The facts are in the structure; words are made
 * here. */
#include "schedule/order.h"

#include <stdarg.h>

#include "base/assert.h"

enum {
    PLACED_BYTES = 96,
    KEPT_NAMED = 8, /* forwards that a sentence names; more are in the structure */
};

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
static const char *placed(const qe_cited *cited, char text[static PLACED_BYTES]) {
    char name[32];
    (void)qe_action_text(&cited->action, name, sizeof name);
    if (cited->action.row != 0) {
        (void)snprintf(text, PLACED_BYTES, "%s (row %u, cell %u)", name, cited->action.row, cited->action.column);
    } else {
        (void)snprintf(text, PLACED_BYTES, "%s (rank %u, action %u)", name, cited->rank, cited->index + 1);
    }
    return text;
}

static void say_place(paragraph *to, const qe_counterexample *facts) {
    char first[PLACED_BYTES], second[PLACED_BYTES];
    if (facts->cited_count == 0) {
        say(to, "no rank has stage %u, though stages run from 0 to %u.", (unsigned)facts->missing.stage,
            facts->stages - 1);
        return;
    }
    const qe_cited *last = &facts->cited[facts->cited_count - 1];
    if (last->action.stage >= facts->stages || last->action.microbatch >= facts->microbatches) {
        say(to, "%s is out of range: found %llu, expected below %llu.", placed(last, first),
            (unsigned long long)facts->found, (unsigned long long)facts->expected);
        return;
    }
    say(to, "stage %u lives on one rank only: ", (unsigned)last->action.stage);
    if (facts->cited_count == 2) {
        say(to, "%s is on rank %u, ", placed(&facts->cited[0], second), (unsigned)facts->expected);
    } else if (facts->expected < facts->ranks) {
        say(to, "that is rank %u, but ", (unsigned)facts->expected);
    }
    say(to, "%s on rank %u.", placed(last, first), (unsigned)facts->found);
}

static void say_duplicate(paragraph *to, const qe_counterexample *facts) {
    char first[PLACED_BYTES], second[PLACED_BYTES];
    uint8_t before = facts->cited[0].action.kind, repeated = facts->cited[1].action.kind;
    say(to, "%s repeats %s", placed(&facts->cited[1], first), placed(&facts->cited[0], second));
    say(to, before == repeated ? "; every action is due once." : "; B already consists of I and W.");
}

static void say_missing(paragraph *to, const qe_counterexample *facts) {
    char name[32];
    (void)qe_action_text(&facts->missing, name, sizeof name);
    say(to, "%s is due and absent", name);
    if (facts->missing.kind == QE_ACTION_B) say(to, " (or I and W in its place)");
    say(to, "; every stage takes every microbatch once.");
}

/* A sentence about two actions; each %s is one of them. */
static void say_two(paragraph *to, const qe_counterexample *facts, const char *between, const char *end) {
    char first[PLACED_BYTES], second[PLACED_BYTES];
    say(to, "%s%s%s%s", placed(&facts->cited[0], first), between, placed(&facts->cited[1], second), end);
}

static void say_memory(paragraph *to, const qe_counterexample *facts) {
    char text[PLACED_BYTES];
    const qe_cited *last = &facts->cited[facts->cited_count - 1];
    say(to, "rank %u may keep %llu forwards at once, and %s is one more. Kept are", last->rank,
        (unsigned long long)facts->expected, placed(last, text));
    for (uint32_t i = 0; i < facts->cited_count; i++) {
        char name[32];
        if (facts->cited_count > KEPT_NAMED && i == KEPT_NAMED / 2) {
            i = facts->cited_count - KEPT_NAMED / 2;
            say(to, ", ...");
        }
        (void)qe_action_text(&facts->cited[i].action, name, sizeof name);
        say(to, "%s %s", i == 0 ? "" : ",", name);
    }
    say(to, ".");
}

static const char *part_of(const qe_cited *cited) {
    return cited->part == QE_PART_SEND ? "the send of " : cited->part == QE_PART_RECEIVE ? "the receive for " : "";
}

static const char *wait_of(const qe_cited *waiting, const qe_cited *waited_for) {
    int message = waited_for->part != QE_PART_RUN;
    switch ((qe_wait)waiting->wait) {
    case QE_WAIT_ROW: return " comes after ";
    case QE_WAIT_RESULT: return message ? " needs " : " needs the result of ";
    case QE_WAIT_PAIR: return message ? " overlaps with an action that needs " :
                                        " overlaps with an action that needs the result of ";
    case QE_WAIT_SEND: return " leaves after ";
    case QE_WAIT_QUEUE: return " stands on its communicator behind ";
    case QE_WAIT_BATCH: return " follows a batch with ";
    case QE_WAIT_POST: return " meets a receive that is posted after ";
    case QE_WAIT_BUFFER: return " needs a buffer that is free after ";
    default: return " waits for "; /* the caller's structure */
    }
}

static void say_cycle(paragraph *to, const qe_counterexample *facts) {
    char text[PLACED_BYTES];
    const char *what = "actions";
    for (uint32_t i = 0; i < facts->cited_count; i++) {
        if (facts->cited[i].part != QE_PART_RUN) what = "actions and messages";
    }
    say(to, "%u %s wait for each other, and %llu %snever run. ", facts->cited_count, what,
        (unsigned long long)facts->found, what[7] == '\0' ? "" : "actions ");
    say(to, "%s%s", part_of(&facts->cited[0]), placed(&facts->cited[0], text));
    for (uint32_t i = 0; i < facts->cited_count; i++) {
        const qe_cited *waiting = &facts->cited[i], *waited_for = &facts->cited[(i + 1) % facts->cited_count];
        say(to, "%s%s%s", wait_of(waiting, waited_for), part_of(waited_for), placed(waited_for, text));
        say(to, i + 1 == facts->cited_count ? "." : ", which");
    }
}

int qe_counterexample_text(const qe_counterexample *facts, char *text, size_t capacity) {
    paragraph to = {.text = text, .capacity = capacity};
    say(&to, "%s: ", qe_rule_id(facts->rule));
    switch (facts->rule) {
    case QE_RULE_SCHEDULE_PLACE: say_place(&to, facts); break;
    case QE_RULE_SCHEDULE_DUPLICATE: say_duplicate(&to, facts); break;
    case QE_RULE_SCHEDULE_MISSING: say_missing(&to, facts); break;
    case QE_RULE_SCHEDULE_ORDER:
        say_two(&to, facts, " needs ", ", which comes after it on the same rank.");
        break;
    case QE_RULE_SCHEDULE_CYCLE: say_cycle(&to, facts); break;
    case QE_RULE_SCHEDULE_MEMORY: say_memory(&to, facts); break;
    case QE_RULE_SCALE_BUSY: say_two(&to, facts, " folds the stage's scales, and ", " still uses them."); break;
    case QE_RULE_CACHE_EMPTY: say_two(&to, facts, " uses the stage's weight cache before ", " fills it."); break;
    case QE_RULE_GRAD_ORDER: say_two(&to, facts, " adds its gradient before ", ", of an earlier microbatch."); break;
    default: say(&to, "not a counterexample."); break; /* the caller's structure was never filled */
    }
    return (int)to.length;
}
