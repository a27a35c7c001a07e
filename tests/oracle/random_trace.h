/* random_trace.h - seeded traces over a world with every kind of object: mostly right for a while, then wrong in one
 * place, then whatever. */
#ifndef QE_TESTS_RANDOM_TRACE_H
#define QE_TESTS_RANDOM_TRACE_H

#include "qeffect/program.h"

enum { RANDOM_ITEMS_MAX = 64 };

/* Pair: qe_program_deinit. The same seed gives the same trace. Ends the process where there is no memory. */
void random_trace(qe_program *program_out, uint64_t seed);

#endif
