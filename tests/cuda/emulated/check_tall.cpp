/* check_tall.cpp - a weight of more tiles below each other than one launch may have is stepped, quantized and sealed
 * one after the other. Launchers are told of a low limit, so that a small one is above it. */
#include "check_tall.h"

namespace {

void expect_launches(checks &all, uint32_t rows, bool has_fired, uint64_t wanted) {
    enum { COLUMNS = 208 };
    const uint64_t before = emulator_runs();
    check_commit(all, rows, COLUMNS, has_fired);
    all.report("launches of a commit", emulator_runs() - before == wanted ? "" : "not as many as there should be");
}

} // namespace

void check_tall(checks &all) {
    enum { BLOCKS = 3, ROWS = 32 * BLOCKS };
    emulator_down_set(BLOCKS);
    expect_launches(all, ROWS, false, 1);
    expect_launches(all, ROWS + 16, false, 3);
    expect_launches(all, ROWS + 16, true, 3);
    emulator_down_set(0);
}
