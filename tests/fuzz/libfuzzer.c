/* libfuzzer.c - the entry of libFuzzer for one reader: QE_FUZZ_READER is its name. */
#include <string.h>

#include "fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    static const fuzz_reader *reader;
    for (const fuzz_reader *one = fuzz_readers; reader == NULL && one->name != NULL; one++)
        if (strcmp(one->name, QE_FUZZ_READER) == 0) reader = one;
    fuzz_one(reader, bytes, count);
    return 0;
}
