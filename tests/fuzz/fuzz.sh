#!/bin/sh
# Fuzzes every reader for a while, from the kept inputs on. What it finds is left in BUILD/fuzz-found; the kept inputs
# are not changed, except with --keep, which minimises what was found into them.
#
#   tests/fuzz/fuzz.sh BUILD SECONDS [--keep]
set -u
build=$1 seconds=$2 keeps=${3:-}
corpus=$(dirname "$0")/corpus
failed=0
for program in "$build"/tests/fuzz_*; do
    reader=${program##*/fuzz_}
    grown=$build/fuzz-grown/$reader found=$build/fuzz-found/$reader
    mkdir -p "$grown" "$found" "$corpus/$reader"
    # 10 s and 1 GiB are far from what any input of 64 KiB may take; each reader has a bound of its own (fuzz.c).
    if ! "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=65536 -seed=1 \
        -print_final_stats=1 -verbosity=0 -artifact_prefix="$found/" "$grown" "$corpus/$reader" >"$found/log" 2>&1; then
        failed=1
        echo "fuzz: $reader FAILED; the input is in $found"
        tail -40 "$found/log"
    else
        runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$found/log")
        echo "fuzz: $reader: $runs inputs in $seconds s, none of them crashed, hung, or took too much"
    fi
    if [ "$keeps" = --keep ] && [ "$failed" = 0 ]; then
        rm -rf "$build/fuzz-merged" && mkdir -p "$build/fuzz-merged"
        "$program" -merge=1 -max_len=4096 "$build/fuzz-merged" "$corpus/$reader" "$grown" >>"$found/log" 2>&1
        rm -rf "${corpus:?}/$reader" && mv "$build/fuzz-merged" "$corpus/$reader"
    fi
done
exit $failed
