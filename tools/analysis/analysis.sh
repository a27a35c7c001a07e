#!/bin/sh
# cppcheck, clang-tidy and gcc -fanalyzer on the core. A tool that is not there is named and fails the check.
#
#   tools/analysis/analysis.sh FOLDER     a folder for what the tools write
set -u
cd "$(dirname "$0")/../.." || exit 1
folder=$1 here=tools/analysis
mkdir -p "$folder"
jobs=$(nproc 2>/dev/null || echo 2)
core="src/base src/core src/plan src/schedule src/step"
flags="-std=c17 -D_GNU_SOURCE -Iinclude -Isrc"
files=$(for room in $core; do ls "$room"/*.c; done)
failed=0

have() {
    command -v "$1" >/dev/null 2>&1 && return 0
    echo "analysis: $1 is not there: apt-get install $2"
    failed=1
    return 1
}

if have cppcheck cppcheck; then
    # The readers beside the core: they are given what anybody wrote.
    # shellcheck disable=SC2086 # lists of folders
    if cppcheck -q -j "$jobs" --std=c11 --library=posix --enable=warning,performance,portability -D_GNU_SOURCE \
        -Iinclude -Isrc --suppress=missingIncludeSystem --suppressions-list=$here/cppcheck.txt --error-exitcode=1 \
        $core src/store src/config src/data src/comm 2>"$folder/cppcheck.log"; then
        echo "analysis: cppcheck: clean ($(cppcheck --version))"
    else cat "$folder/cppcheck.log"; failed=1; fi
fi

tidy=$(command -v clang-tidy || command -v clang-tidy-14 || echo clang-tidy)
if have "$tidy" clang-tidy; then
    # shellcheck disable=SC2086 # a list of flags
    if echo "$files" | xargs -n 4 -P "$jobs" sh -c "$tidy --quiet \"\$@\" -- $flags" tidy >"$folder/tidy.log" 2>&1; then
        echo "analysis: clang-tidy: clean on $(echo "$files" | wc -l) files"
    else grep -E "warning|error" "$folder/tidy.log"; failed=1; fi
fi

if have gcc gcc; then
    # A log per file: lines of two that run at once would mix.
    rm -rf "$folder/analyzer" && mkdir -p "$folder/analyzer"
    # shellcheck disable=SC2016 # the inner shell's
    echo "$files" | FLAGS=$flags LOGS=$folder/analyzer xargs -n 1 -P "$jobs" sh -c \
        'log=$LOGS/$(echo "$1" | tr / _); gcc $FLAGS -O1 -fanalyzer -c "$1" -o /dev/null >"$log" 2>&1 ||
            echo "$1: error" >>"$log"' analyze
    cat "$folder"/analyzer/* >"$folder/analyzer.log"
    sed -n -e 's/^\([^:]*\):[0-9]*:[0-9]*: warning: .*\[\(-Wanalyzer[a-z-]*\)\]$/\1 \2/p' -e '/^[^:]*: error$/p' \
        "$folder/analyzer.log" | sort -u >"$folder/found.txt"
    grep -v '^#' $here/known.txt | grep . | sort -u >"$folder/known.txt"
    new=$(comm -23 "$folder/found.txt" "$folder/known.txt")
    gone=$(comm -13 "$folder/found.txt" "$folder/known.txt")
    case $(gcc -dumpversion) in
    12*) ;;
    *) gone="" ;;
    esac
    if [ -z "$new$gone" ]; then
        echo "analysis: gcc -fanalyzer: clean but for $(wc -l <"$folder/known.txt") findings that are known to be wrong"
    else
        [ -z "$new" ] || { echo "analysis: gcc -fanalyzer found:"; echo "$new"; }
        [ -z "$gone" ] || { echo "analysis: no longer found, so no longer known ($here/known.txt):"; echo "$gone"; }
        failed=1
    fi
fi
exit $failed
