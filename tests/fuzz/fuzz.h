/* fuzz.h - readers that are given whatever bytes. A target reads one input; what is asked of it: it comes back, it
 * touches no memory that is not its own (sanitizers), what it took is in proportion to the input and given back, a
 * refusal says what is wrong, and what it accepted comes out again as it went in. */
#ifndef QE_TESTS_FUZZ_H
#define QE_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

#include "qeffect/status.h"

typedef void fuzz_target(const uint8_t *bytes, size_t count);

/* "config" ... and what reads it; ends with NULL. tests/fuzz/corpus/NAME holds its inputs. */
typedef struct fuzz_reader {
    const char *name;
    fuzz_target *read;
    size_t bytes_base, bytes_per_byte; /* memory that may be held at once: of any input, and for each of its bytes */
} fuzz_reader;

extern const fuzz_reader fuzz_readers[];

/* One input through one reader, with all that is asked of it; ends the process where it is not so. */
void fuzz_one(const fuzz_reader *reader, const uint8_t *bytes, size_t count);

/* For targets: the input as a file, config.json in a folder of its own; and an assertion that does not vanish. */
const char *fuzz_file(const uint8_t *bytes, size_t count);
const char *fuzz_folder(void);
void fuzz_check(int holds, const char *what);
/* A refusal has its status, words and, where it is of the file, a way out. */
void fuzz_check_refusal(qe_status status, const qe_error *error);

/* memory.c: bytes held now, and the most since the last begin. */
void fuzz_memory_begin(void);
size_t fuzz_memory_most(void);
long fuzz_memory_held(void);

#endif
