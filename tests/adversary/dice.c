/* dice.c - seeded numbers, and the end where the adversary itself is wrong. */
#include <stdlib.h>

#include "adversary/adversary.h"

uint64_t dice_next(dice *d) {
    uint64_t z = (d->state += 0x9e3779b97f4a7c15u); /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

uint32_t dice_below(dice *d, uint32_t bound) { return bound > 0 ? (uint32_t)(dice_next(d) >> 11) % bound : 0; }

int dice_one_in(dice *d, uint32_t sides) { return dice_below(d, sides) == 0; }

_Noreturn void give_up(const char *file, int line, const char *what) {
    fprintf(stderr, "%s:%d: the adversary itself is wrong: %s\n", file, line, what);
    exit(1);
}
