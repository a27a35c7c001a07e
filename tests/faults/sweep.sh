# sweep.sh CHECK_FAULTS JOBS FOLDER - every case once: JOBS runs side by side, each with its share; the log of each is
# left in FOLDER/check_faults.N.log. Prints what failed and each run's count; fails where one of them does.
set -u
program=$1 jobs=$2 folder=$3 failed=0 children=
rm -f "$folder"/check_faults.*.log # of a sweep with more shares
for part in $(seq "$jobs"); do
    "$program" --every "$jobs" --part "$part" >"$folder/check_faults.$part.log" 2>&1 &
    children="$children $!"
done
for child in $children; do wait "$child" || failed=1; done
for part in $(seq "$jobs"); do grep -A 12 '^FAILED' "$folder/check_faults.$part.log"; done
for part in $(seq "$jobs"); do tail -n 1 "$folder/check_faults.$part.log"; done
awk '/^faults:/ { cases += $2; met += $4; failures += $9 } END { print "faults: " cases " cases, " met " met, " \
    failures " failed in all" }' "$folder"/check_faults.*.log
exit $failed
