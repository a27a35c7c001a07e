/* effect.h - what kinds of effects mean, for the files of this room. */
#ifndef QE_CORE_EFFECT_H
#define QE_CORE_EFFECT_H

#include "qeffect/program.h"

/* Does the effect count as a write where order is judged? Uses and records of a scale commute, so both read. */
int qe_effect_writes(const qe_effect *effect);

/* What the host's allocator does has no place in the order of a stream. */
int qe_effect_is_allocators(const qe_effect *effect);

/* Whether only a program that is judged on its own may have it (ledger_life.c). */
int qe_effect_only_in_traces(const qe_effect *effect);

/* Does a read or write repeat its range, `pitch` apart? And one behind the last byte that it touches. */
int qe_effect_has_rows(const qe_effect *effect);
uint64_t qe_effect_reach(const qe_effect *effect);

/* What kind of object an effect of this kind acts on. */
qe_object_kind qe_effect_object_kind(uint8_t kind);

/* Whether an item may be added to, or submitted beside, a program: all that it names exists. */
qe_status qe_program_check_item(const qe_program *program, const qe_item *item, const qe_effect *effects,
                                uint32_t count, qe_error *error_out);

/* "mode" ..., as traces write what a graph froze. */
const char *qe_frozen_name(qe_frozen frozen);

#endif
