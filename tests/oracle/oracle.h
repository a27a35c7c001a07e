/* oracle.h - a second judge of programs, to hold the ledger against: naive on purpose, and sharing with it nothing but
 * the form of a program (program.h) and the numbers of rules (rule.h). docs/oracle.md says how it thinks. */
#ifndef QE_TESTS_ORACLE_H
#define QE_TESTS_ORACLE_H

#include "qeffect/program.h"
#include "qeffect/rule.h"

enum { ORACLE_BREACHES_MAX = 256 }; /* of one item, each rule and object once; further ones are left out */

typedef struct oracle_breach {
    int rule;
    uint32_t object; /* QE_NONE: it is about no object */
    int refuses;     /* what the effect says of its object is not true, so the op's further words on it only follow */
} oracle_breach;

/* What is wrong with one item. */
typedef struct oracle_verdict {
    int rule; /* the first of them in the order of rules; QE_RULE_NONE: nothing */
    int count;
    oracle_breach breach[ORACLE_BREACHES_MAX];
} oracle_verdict;

typedef struct oracle oracle;

/* How far it has come, to go back to. */
typedef struct oracle_mark {
    uint32_t count, deeds, points;
    int step, recording[QE_PROGRAM_STREAMS_MAX];
} oracle_mark;

/* The program may grow up to `items_max` items while it is judged. Ends the process where there is no memory. */
oracle *oracle_open(const qe_program *program, uint32_t items_max);
void oracle_close(oracle *o);
/* Judges the next item. Behind a breach there is nothing to ask any more, except after oracle_back. */
const oracle_verdict *oracle_next(oracle *o);
oracle_mark oracle_here(const oracle *o);
void oracle_back(oracle *o, const oracle_mark *mark);

/* Epoch, generation, version, offset or seal of an object, as what the stream is given next would find it. */
uint64_t oracle_counter(const oracle *o, uint32_t object, uint32_t stream);

/* The first item that breaks a rule, and what is wrong with it; item_count where none does. */
uint32_t oracle_judge(const qe_program *program, oracle_verdict *verdict_out);

#endif
