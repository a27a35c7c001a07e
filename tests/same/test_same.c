/* test_same.c - every op of backend/cuda/kernels.h on the host backend and on the device, with the same input.
 *
 *   test_same            all of them
 *   test_same norm fold  those whose names contain one of these
 *   test_same --te ...   the same with the te backend's kernels, in cases whose ops it takes
 *
 * Exit status: 0 same, 1 a difference or an operating error, 77 skipped because there is no GPU (or no Transformer
 * Engine). */
#include <stdio.h>
#include <string.h>

#include "same.h"

typedef struct named_case {
    const char *name;
    void (*run)(void);
} named_case;

static const named_case cases[] = {
    {"codec", case_codec},
    {"quantize", case_quantize},
    {"quantize_weight", case_quantize_weight},
    {"decode", case_decode},
    {"fold", case_fold},
    {"stamp", case_stamp},
    {"tally", case_tally},
    {"accumulate", case_accumulate},
    {"guard", case_guard},
    {"embed", case_embed},
    {"embed_backward", case_embed_backward},
    {"adamw", case_adamw},
    {"commit", case_commit},
    {"grad_norm", case_grad_norm},
    {"cross_entropy", case_cross_entropy},
    {"norm", case_norm},
    {"norm_quantize", case_norm_quantize},
    {"norm_backward", case_norm_backward},
    {"attention", case_attention},
    {"rope", case_rope},
    {"rope_backward_quantize", case_rope_backward_quantize},
    {"swiglu_quantize", case_swiglu_quantize},
    {"swiglu_backward_quantize", case_swiglu_backward_quantize},
};
enum { CASES = sizeof cases / sizeof *cases };

static int wanted(const char *name, int count, char **words) {
    for (int i = 0; i < count; ++i)
        if (strstr(name, words[i]) != NULL) return 1;
    return count == 0;
}

static void run_case(const named_case *one) {
    const uint64_t failures = same_failures, before = same_cases, substituted = same_substituted;
    one->run();
    printf("%-8s %-26s %5llu cases", same_failures == failures ? "same" : "DIFFERS", one->name,
           (unsigned long long)(same_cases - before));
    if (same_substituted > substituted)
        printf(", %llu runs by Transformer Engine", (unsigned long long)(same_substituted - substituted));
    printf("\n");
}

int main(int argc, char **argv) {
    const int te = argc > 1 && strcmp(argv[1], "--te") == 0;
    int status = same_open();
    if (status == 0 && te) status = same_te_open();
    if (status != 0) return status;
    for (size_t i = 0; i < CASES; ++i)
        if (wanted(cases[i].name, argc - 1 - te, argv + 1 + te)) run_case(&cases[i]);
    tolerances_print();
    printf("%llu cases, %llu failures\n", (unsigned long long)same_cases, (unsigned long long)same_failures);
    same_close();
    return same_failures > 0;
}
