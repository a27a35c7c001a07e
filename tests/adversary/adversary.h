/* adversary.h - what the files of the adversary share: docs/adversary.md says what it is and what it claims.
 *
 * A *step* is a right program of one step, versions counted from its beginning, as plans have them. A *mutant* is a
 * step with one fault, a list of entries in which one thing is different. Both are judged at the three moments of the
 * core: when a plan is certified, when work is submitted, when a trace is checked. */
#ifndef QE_ADVERSARY_H
#define QE_ADVERSARY_H

#include <stdint.h>
#include <stdio.h>

#include "qeffect/ledger.h"
#include "qeffect/schedule.h"
#include "qeffect/trace.h"

/* ---- dice.c: seeded, and words for failures ---- */

typedef struct dice {
    uint64_t state;
} dice;
uint64_t dice_next(dice *d);
uint32_t dice_below(dice *d, uint32_t bound); /* 0 for a bound of 0 */
int dice_one_in(dice *d, uint32_t sides);

/* The adversary itself is wrong, or out of memory: says where and exits with 1. */
_Noreturn void give_up(const char *file, int line, const char *what);
#define MUST(condition) ((condition) ? (void)0 : give_up(__FILE__, __LINE__, #condition))

/* ---- sequence.c: a program's items as a list that can be edited ---- */

typedef struct entry {
    qe_item item;
    uint32_t source; /* item of the right program; QE_NONE: put in */
    uint8_t changed; /* it is not what the right program has */
    qe_effect effects[QE_EFFECTS_MAX];
} entry;

typedef struct item_list {
    entry *entries;
    uint32_t count, capacity;
} item_list;

void sequence_free(item_list *list);
void sequence_copy(item_list *into, const item_list *from);
void sequence_of(item_list *into, const qe_program *program);
/* Returns the new entry, in front of `at`; a copy of `entry`. */
entry *sequence_insert(item_list *list, uint32_t at, const entry *added);
void sequence_remove(item_list *list, uint32_t at);
void sequence_drop_effect(item_list *list, uint32_t at, uint32_t effect);
void sequence_move(item_list *list, uint32_t from, uint32_t to);

/* ---- step.c: right programs, and what is known of them by walking through ---- */

enum { NAME_BYTES = 200 };

typedef struct step {
    qe_program program; /* objects, streams, labels, events, declared orders; its items are `right` */
    item_list right;
    item_list prelude; /* submitted once, before the first step: what is captured for all steps. Traces only */
    char name[NAME_BYTES];
    uint8_t traces_only; /* ranks, implicit order, allocations, draws: no ledger takes it */
    uint8_t from_plan;
    uint8_t whole_graphs; /* what is captured is told by launches alone: operators cannot see it, the oracle can */
    uint8_t single;      /* its end is not its beginning: it is one step and no more */
    uint64_t *delta;  /* [objects] how far a step moves the counter */
} step;

void step_init(step *s);
void step_free(step *s);
/* Right when program and items are there: declares orders of gradients and finds deltas. */
void step_seal(step *s);
void step_number(step *s); /* its entries, where they changed since */
uint64_t effect_moves(const qe_effect *effect); /* how far it moves its object's counter */
/* Swaps neighbours that have nothing to do with each other, `tries` times: the same program in another order. */
void step_shuffle(step *s, dice *d, uint32_t tries);
/* Do two effects of different items keep their order? Not the ledger's answer: written down here once more. */
int effects_conflict(const qe_effect *a, const qe_effect *b);
int effect_writes(const qe_effect *effect);
int effect_is(const qe_effect *effect, qe_object_kind kind);

/* Steps 0 .. count-1 as one trace; step `at` is `edited` where that is not NULL. `starts` [count + 1]: item index of
 * each step's first entry. `apart`: events are forgotten between steps, as a ledger forgets them. */
void unroll(const step *s, const item_list *edited, uint32_t at, uint32_t count, int apart, qe_program *out,
            uint32_t *starts);

/* ---- where right programs come from ---- */

void generate_plan(step *s, dice *d);   /* a plan's rank, or all its ranks in one trace */
void generate_small(step *s, dice *d);  /* every kind of object, random streams, edges as needed */
void generate_memory(step *s, dice *d); /* blocks that are handed out again, draws, default streams: traces only */
void step_of_program(step *s, const qe_program *program, const char *name); /* a plan's, as it is */
void plans_free(void);                  /* what generate_plan keeps */

/* ---- precedence.c: order and bytes without clocks ---- */

typedef struct item_breach {
    uint32_t item;   /* of the program; its item_count: none */
    uint64_t rules;  /* bit per rule that the item breaks */
} item_breach;

/* The first item of a program that touches something unordered, waits for nothing, or reads other bytes than it was
 * declared for. Every set of items that come before is kept as a set. Does not judge versions, nor
 * what is recorded. `replays`: what is recorded happens at launches; else at once, as a ledger has it. */
item_breach precedence_first(const qe_program *program, int replays);

/* ---- mutate.c, mutate_*.c: faults ---- */

typedef enum fault_kind {
    FAULT_DROP, FAULT_DUPLICATE, FAULT_EARLY, FAULT_LATE, FAULT_SWAP, FAULT_STALE, FAULT_FUTURE, FAULT_OWNER,
    FAULT_CONSTANT, FAULT_ADDRESS, FAULT_RANGE, FAULT_FORGET, FAULT_REUSE, FAULT_EDGE, FAULT_STREAM, FAULT_HOST,
    FAULT_RECORDING, FAULT_HARMLESS, FAULT_KINDS
} fault_kind;
extern const char *const fault_words[FAULT_KINDS];

enum { AT_END = 0xfffffffe, NOWHERE = 0xffffffff };

typedef struct mutant {
    const step *step;
    dice *dice;
    uint32_t at_step;   /* which step is disturbed: 0 is the program's first */
    int in_trace;       /* versions are absolute, events outlive steps */
    item_list list;      /* the step with its fault */
    /* What the operator says: the first state rule that breaks, and where: an entry of `list`, AT_END, or NOWHERE. */
    uint32_t where;
    uint32_t later;     /* steps after at_step */
    uint64_t rules;     /* bit per rule; more than one only where the operator says why */
    /* What the fault changes about the objects themselves (an address); NULL: nothing. */
    qe_object *objects;
    fault_kind kind;
    const char *operator_name;
} mutant;

/* Draws an operator and a place for it. Returns 0 where nothing fitted. */
int mutate(mutant *m);
void mutant_free(mutant *m);
uint32_t operator_count(void);
const char *operator_name(uint32_t index);

/* ---- judge.c: what the product says, and what it has to say ---- */

typedef enum moment {
    MOMENT_SCHEDULE, /* an order is checked, certified */
    MOMENT_PLAN,     /* a program is certified */
    MOMENT_ISSUE,    /* work is submitted; the step ends */
    MOMENT_TRACE,    /* a trace is written, read and judged */
    MOMENT_RUNNING,  /* a running step: its ledgers, the seals of its graphs, its numbers */
    MOMENT_DEVICE,   /* guards at the ends of graphs; the order of what is executed */
    MOMENT_RESUME,   /* a checkpoint is gone on from */
    MOMENTS
} moment;
extern const char *const moment_words[MOMENTS];

typedef struct verdict {
    qe_rule rule;          /* QE_RULE_NONE: all is right */
    uint32_t later, where; /* as a mutant predicts; NOWHERE */
} verdict;

/* From the operator's words about state and precedence.c's about order and bytes. */
verdict expected_of(const mutant *m);
/* Does the oracle (tests/oracle) say the same? It reads the mutant as a trace, whatever the moment. */
int oracle_says(const mutant *m, verdict expected, verdict *said_out);
/* The same, counted; where it cannot be asked, it is not. */
int oracle_confirms(const mutant *m, verdict expected, verdict *said_out);
/* What the product says of a mutant at a moment. */
verdict found_at(const mutant *m, moment at);
/* Is a right step right at every moment that takes it? Says where it is not. */
int is_accepted(const step *s, dice *d, const char **where_out);
static inline int is_same(verdict a, verdict b) {
    return a.rule == b.rule && (a.rule == QE_RULE_NONE || (a.later == b.later && a.where == b.where));
}
/* The trace of a mutant, or of a right step where `list` is NULL. */
void trace_of(const step *s, const item_list *list, uint32_t at_step, const qe_object *objects, qe_program *out,
              uint32_t *starts);
enum { STEPS_MAX = 4 };

/* ---- tally.c ---- */

void tally_valid(const char *what, uint32_t count);
void tally_refused(void); /* a right program: a false trap */
void tally_mutant(fault_kind kind, moment at, qe_rule expected, int right);
void tally_oracle(qe_rule expected, int agrees);
void tally_operator(const char *name, qe_rule expected);
/* Leaves the counts in the file that ADVERSARY_COUNTS names, if it names one; and adds those of such files. */
void tally_keep(void);
void tally_read(const char *path);
/* Keeps and prints. Returns 0 where something was wrong; `complete`: or an operator or a rule was never tried. */
int tally_print(int complete, int all_moments);
/* A number of the command line; anything else ends the program with status 2. */
uint64_t argument(const char *text);

/* ---- other moments: returns how many cases went wrong ---- */

uint32_t schedules_run(uint64_t seed, uint64_t cases, uint64_t mutants); /* `mutants` of each case */

/* ---- shrink.c: a case that went wrong, made small and written out ---- */

void shrink_and_write(const mutant *m, const char *file);

/* For the files of operators. */
typedef struct fault_operator {
    const char *name;
    fault_kind kind;
    int (*plant)(mutant *m); /* returns 0 where it does not fit */
    uint8_t traces_only;
} fault_operator;
extern const fault_operator state_operators[], move_operators[], order_operators[], memory_operators[];
extern const uint32_t state_operator_count, move_operator_count, order_operator_count, memory_operator_count;

typedef struct place {
    uint32_t entry, effect;
} place;
/* A random effect of a kind, or a random entry of a kind, of the right step. Returns 0 where there is none. */
int pick_effect(mutant *m, qe_effect_kind kind, place *out);
int pick_item(mutant *m, qe_item_kind kind, uint32_t *out);
/* The next (previous) effect on an object behind (before) a place in `list`, of a kind in the bit set; 0: none. */
int find_next(const item_list *list, place from, uint32_t object, uint64_t kinds, place *out);
int find_previous(const item_list *list, place from, uint32_t object, uint64_t kinds, place *out);
static inline qe_effect *effect_at(const item_list *list, place at) {
    return &list->entries[at.entry].effects[at.effect];
}
uint32_t count_effects(const item_list *list, uint32_t object, qe_effect_kind kind);
static inline uint64_t bit_of(unsigned number) { return (uint64_t)1 << number; }
static inline int predict(mutant *m, uint32_t where, uint64_t rules) {
    m->where = where;
    m->rules = rules;
    return 1;
}
/* The counter that an object has when the disturbed step begins. */
uint64_t counter_at(const mutant *m, uint32_t object);
/* Puts an op of one effect in front of `at`, like the one at `like`. */
void insert_effect(mutant *m, uint32_t at, place like, const qe_effect *effect);

#endif
