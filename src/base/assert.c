/* assert.c - the one place below src/cli that prints: the program is broken and nobody else can say so. */
#include "base/assert.h"

#include <stdio.h>
#include <stdlib.h>

_Noreturn void qe_assert_failed(const char *expression, const char *file, int line) {
    fprintf(stderr, "qeffect: internal error: %s does not hold at %s:%d\n", expression, file, line);
    abort();
}
