#!/bin/sh
# Verifies the models exhaustively with Spin, and every mutant of each: a line "mutant: NAME ..." in a model names one,
# and it must fail.
#
#   tests/model/check_model.sh FOLDER     a folder for what Spin makes
set -u
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
mkdir -p "$folder" && cd "$folder" || exit 1
failed=0

# Assertions and deadlocks, or with a formula its liveness under weak fairness. Prints "errors states".
verify() { # MODEL "-DNAME..." "" or FORMULA
    rm -f pan pan.* ./*.trail
    # shellcheck disable=SC2086 # several definitions
    errors=none states=0
    spin $2 -a "$here/$1.pml" >spin.log 2>&1 || { cat spin.log; return 1; }
    if [ -z "$3" ]; then
        cc -O0 -DSAFETY -DNOCLAIM -DVECTORSZ=2048 -o pan pan.c 2>cc.log && ./pan -m200000 -E >pan.log 2>&1
        # once more with invalid end states, which -E leaves out: both are errors, and an assertion is told first
        if grep -q "errors: 0" pan.log; then ./pan -m200000 >pan.log 2>&1; fi
    else
        cc -O0 -DNFAIR=3 -DVECTORSZ=2048 -o pan pan.c 2>cc.log && ./pan -a -f -m200000 -N "$3" >pan.log 2>&1
    fi
    errors=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' pan.log)
    states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log)
    grep -q "max search depth too small\|out of memory" pan.log && errors=incomplete
    [ -n "$errors" ] || { cat cc.log pan.log; errors=none; }
}

expect() { # WHAT
    if [ "$errors" = "0" ]; then echo "model: $1: holds in all $states states"; else
        echo "model: $1: FAILED (errors: $errors)"
        grep -m1 "assertion violated\|invalid end state\|acceptance cycle" pan.log
        failed=1
    fi
}

for case in "step:-DRANKS=2 -DFAULTS=2:" "step:-DRANKS=3 -DFAULTS=3:" "step:-DRANKS=2 -DFAULTS=2:answered" \
    "completion:-DPLAIN:" "completion:-DPLAIN:finished"; do
    model=${case%%:*} rest=${case#*:}
    verify "$model" "${rest%%:*}" "${rest#*:}"
    expect "$model ${rest%%:*} ${rest#*:}"
done

mutants=0
for model in step completion; do
    for mutant in $(sed -n 's/^ \* mutant: \([A-Z_]*\).*/\1/p' "$here/$model.pml"); do
        mutants=$((mutants + 1))
        verify "$model" "-D$mutant" ""
        if [ "$errors" = "0" ]; then # what no assertion sees may never end
            formula=answered
            [ "$model" = completion ] && formula=finished
            verify "$model" "-D$mutant" "$formula"
        fi
        case $errors in
        0 | incomplete | none) echo "model: mutant $model $mutant: FAILED, it holds ($errors)"; failed=1 ;;
        esac
    done
done
echo "model: $mutants mutants, each with one invariant broken; all must fail"
exit $failed
