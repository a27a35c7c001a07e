/* check_emulated.cpp - the kernel checks without a GPU.
 *
 *   check_emulated [--large]   exit status: 0, 1 when a check failed */
#include "check_embed.h"
#include "check_held.h"
#include "check_rope_codes.h"
#include "check_squares.h"
#include "check_tall.h"
#include "check_units.h"

int main(int argc, char **argv) {
    checks all;
    check_everything(all, argc > 1 && strcmp(argv[1], "--large") == 0);
    check_embed(all);
    check_held(all);
    check_rope_codes(all);
    check_squares(all);
    check_units(all);
    check_tall(all);
    printf("%d checks, %d failed\n", all.run, all.failed);
    return all.failed ? 1 : 0;
}
