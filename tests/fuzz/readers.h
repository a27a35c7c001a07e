/* readers.h - one function per reader; see fuzz.h. */
#ifndef QE_TESTS_FUZZ_READERS_H
#define QE_TESTS_FUZZ_READERS_H

#include "fuzz/fuzz.h"

fuzz_target fuzz_config, fuzz_csv, fuzz_trace, fuzz_safetensors, fuzz_manifest, fuzz_data, fuzz_times, fuzz_model,
    fuzz_choices;

#endif
