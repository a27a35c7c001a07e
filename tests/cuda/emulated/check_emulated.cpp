/* check_emulated.cpp - the kernel checks without a GPU, on shapes that reach every path: whole and cut tiles, one block and
 * clusters, few and many rows a thread, widths that no vector fits. */
#include "../kernel_checks.h"

int main(int argc, char **argv) {
    checks all;
    const bool is_long = argc > 1 && strcmp(argv[1], "--long") == 0;
    check_quantize(all, 16, 16, SPECIAL);
    check_quantize(all, 144, 208, SPECIAL);
    check_quantize(all, 37, 51, SPECIAL);
    check_quantize_weight(all, 80, 144, SPECIAL);
    check_quantize_weight(all, 19, 130, WIDE);
    check_rope(all, 48, 24, 3, 1, 32, SPECIAL);
    check_rope(all, 48, 16, 2, 1, 128, SPECIAL);
    check_rope(all, 21, 7, 2, 1, 12, SPECIAL);
    check_swiglu(all, 48, 80, WIDE);
    check_swiglu(all, 13, 21, PLAIN);
    check_norm(all, 48, 144, SPECIAL);
    check_norm(all, 16, 1024, WIDE);
    check_norm(all, 21, 99, WIDE);
    check_norm_backward(all, 48, 144, WIDE);
    check_norm_backward(all, 16, 1024, WIDE);
    check_norm_backward(all, 21, 99, WIDE);
    check_decode(all, 150, 136);
    check_decode(all, 7, 9);
    if (is_long) {
        check_codec(all);
        check_quantize(all, 1040, 3104, SPECIAL);
        check_norm(all, 784, 4112, WIDE);
        check_norm_backward(all, 784, 4112, WIDE);
        check_norm_backward(all, 16400, 208, PLAIN);
        check_swiglu(all, 528, 3088, WIDE);
        check_rope(all, 1040, 208, 16, 4, 128, WIDE);
    }
    printf("%d checks, %d failed\n", all.run, all.failed);
    return all.failed ? 1 : 0;
}
