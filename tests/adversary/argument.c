/* argument.c - numbers of the command line. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "adversary/adversary.h"

uint64_t argument(const char *text) {
    char *end;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    if (errno == 0 && *end == '\0' && end != text && *text != '-') return number;
    fprintf(stderr, "found %s, expected a number\n", text);
    exit(2);
}
