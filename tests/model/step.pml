/* step.pml - the protocol by which ranks commit a step together or not at all (src/step/rank.c, team.c; comm.h's
 * meetings), for Spin. A rank works, its guards are asked, ranks meet with their losses, each judges its commits, they
 * meet again, and only then write. Up to FAULTS things go wrong, whichever and whenever:
 *
 *   the ledger refuses an action or a commit; the device fails in the work or in the middle of the commit; a guard
 *   fires in the work or at the head of the commit; a loss is not finite; the transport fails one rank before a meeting
 *   or behind one that the others held.
 *
 * DESIGN's invariants: 7 (weights, moments and scales become visible together or not at all), 1 (a scale folds once in
 * a step that commits, and in no other; a dropped step drops its amax); every command is answered, a step in which
 * nothing goes wrong commits, and only a device or a transport may leave ranks apart, which the team then says.
 *
 * mutant: SKIP_MEETING    a rank commits without the second meeting
 * mutant: OWN_LOSS        a rank vetoes by its own loss instead of all ranks'
 * mutant: DEAF_GUARD      a guard that fired in the work is not asked before the meeting
 * mutant: BLIND_COMMIT    a commit does not look at the guard at its head, and the rank calls it done
 * mutant: FOLD_VETOED     a vetoed step folds
 * mutant: FOLD_TWICE      a commit folds twice
 * mutant: FOLD_FORGOTTEN  a commit does not fold
 * mutant: KEEP_AMAX       a dropped step keeps its amax
 * mutant: QUIET_TEAR      a commit that stopped in the middle is not told
 * mutant: QUIET_LOSS      a rank that lost a meeting which the others held is not told
 * mutant: NO_ABORT        a rank that gives up wakes nobody
 * mutant: NO_RESET        the transport is not made ready for the next step
 * mutant: EARLY_WRITE     the first weight is written before the second meeting
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef FAULTS
#define FAULTS 2
#endif
#define STEPS 3

mtype = { OK, CONTRACT, DEVICE, INTERRUPTED };

/* What outlives a step, by rank: two weights with their moments, an epoch; and a recorded amax that no fold took. */
byte first[RANKS], second[RANKS], epoch[RANKS];
bool amax[RANKS];

/* What a rank says of its last command. */
mtype status[RANKS];
bool committed[RANKS], torn_rank[RANKS], vetoed[RANKS], fired[RANKS];

/* The transport. */
bool aborted, all_finite, gathering;
byte seated, meeting;

/* The team: steps that committed; what its caller may know. */
byte good, round, finished, faults;
bool torn, asked;
bool broke; /* the device in a commit, a guard at its head, or the transport: what may leave the ranks apart */

/* One more thing goes wrong: never, or now. */
#define FAULT(what) if :: faults > 0 -> faults--; what :: true fi

/* All ranks meet; `mine` goes into what all get. */
inline meet(mine) {
    FAULT(outcome = DEVICE; broke = true); /* before the others know */
    if
    :: outcome == OK && aborted -> outcome = INTERRUPTED
    :: outcome == OK && !aborted ->
        before = meeting;
        gathering = gathering && mine;
        seated++;
        if
        :: seated == RANKS -> all_finite = gathering; gathering = true; seated = 0; meeting++
        :: else
        fi;
        (meeting != before || aborted);
        if
        :: meeting != before -> FAULT(outcome = DEVICE; broke = true) /* behind a meeting that was held */
        :: else -> outcome = INTERRUPTED
        fi
    :: outcome != OK
    fi
}

inline write_state(r) {
#ifndef EARLY_WRITE
    first[r]++;
#endif
    FAULT(outcome = DEVICE; broke = true); /* in the middle */
    if
    :: outcome == OK ->
        second[r]++;
#ifndef FOLD_FORGOTTEN
        epoch[r]++;
#endif
#ifdef FOLD_TWICE
        epoch[r]++;
#endif
        amax[r] = false
    :: else
    fi
}

/* The guard at the head of the commit's graph: its optimizer writes nothing where it fired. */
inline run_commit(r) {
    guard = false;
    FAULT(guard = true; broke = true);
    if
#ifdef BLIND_COMMIT
    :: guard -> skip
#else
    :: guard -> outcome = CONTRACT
#endif
    :: else -> write_state(r)
    fi;
    if
    :: outcome == OK -> committed[r] = true
    :: else ->
#ifndef QUIET_TEAR
        torn_rank[r] = true
#else
        skip
#endif
    fi
}

inline drop_step(r) {
#ifndef KEEP_AMAX
    amax[r] = false
#else
    skip
#endif
}

proctype rank(byte r) {
    byte seen = 0, before;
    bool finite, guard, judged;
    mtype outcome;
    do
    :: atomic { round != seen -> /* but for the waits: what a rank does between them, no other rank sees */
        seen = round;
        outcome = OK; finite = true; guard = false;
        committed[r] = false; vetoed[r] = false; fired[r] = false;
        amax[r] = true; /* the work: it records */
        FAULT(outcome = CONTRACT);
        FAULT(outcome = DEVICE);
        FAULT(finite = false);
        FAULT(guard = true);
        fired[r] = guard;
#ifndef DEAF_GUARD
        if
        :: outcome == OK && guard -> outcome = CONTRACT
        :: else
        fi;
#endif
        if
        :: outcome == OK -> meet(finite)
        :: else
        fi;
#ifdef OWN_LOSS
        vetoed[r] = outcome == OK && !finite;
#else
        vetoed[r] = outcome == OK && !all_finite;
#endif
        if
        :: vetoed[r] ->
#ifdef FOLD_VETOED
            epoch[r]++;
#endif
            drop_step(r)
        :: else ->
            if
            :: outcome == OK -> FAULT(outcome = CONTRACT) /* commits and folds are judged, and not run */
            :: else
            fi;
#ifdef EARLY_WRITE
            if
            :: outcome == OK -> first[r]++
            :: else
            fi;
#endif
#ifndef SKIP_MEETING
            if
            :: outcome == OK -> meet(true)
            :: else
            fi;
#endif
            if
            :: outcome == OK -> run_commit(r)
            :: else
            fi;
            if
            :: outcome != OK ->
#ifndef NO_ABORT
                aborted = true;
#endif
                drop_step(r)
            :: else
            fi
        fi;
        status[r] = outcome;
        finished++ }
    :: round == seen && round == STEPS -> break
    :: torn && finished == RANKS && !asked -> break
    od
}

/* Between commands: what the caller sees is of one step, or the team says that it is not. */
inline check_state() {
    i = 0;
    do
    :: i < RANKS ->
        assert(torn || (first[i] == good && second[i] == good && epoch[i] == good)); /* invariants 7 and 1 */
        assert(torn || !amax[i]);                                                     /* of a step that is over */
        i++
    :: else -> break
    od
}

inline outcome_of_all() {
    any_bad = false; any_committed = false; any_vetoed = false; any_fired = false; all_vetoed = true;
    i = 0;
    do
    :: i < RANKS ->
        any_bad = any_bad || status[i] != OK;
        any_committed = any_committed || committed[i];
        any_vetoed = any_vetoed || vetoed[i];
        all_vetoed = all_vetoed && vetoed[i];
        any_fired = any_fired || fired[i];
        torn = torn || torn_rank[i];
        i++
    :: else -> break
    od;
    assert(any_bad || any_vetoed == all_vetoed); /* all decide alike */
    assert(!(any_fired && any_committed));       /* a guard that fired in the work stops all */
    assert(!any_bad || !any_committed || broke); /* what the ledger refuses leaves all at the step before */
    if
    :: any_bad ->
#ifndef QUIET_LOSS
        torn = torn || any_committed;
#endif
#ifndef NO_RESET
        aborted = false; seated = 0; gathering = true
#else
        skip
#endif
    :: !any_bad && !any_vetoed -> good++
    :: !any_bad && any_vetoed
    fi
}

active proctype team() {
    byte i, step, left, before_good;
    bool any_bad, any_committed, any_vetoed, all_vetoed, any_fired;
    faults = FAULTS; all_finite = true; gathering = true;
    atomic { i = 0; do :: i < RANKS -> run rank(i); i++ :: else -> break od };
    do
    :: step < STEPS && !torn ->
        step++;
        finished = 0;
        left = faults; before_good = good;
        asked = true;
        round++;
        (finished == RANKS);
        asked = false;
        atomic {
            outcome_of_all();
            assert(faults < left || good == before_good + 1); /* nothing went wrong, so nothing is stopped */
            check_state()
        }
    :: else -> break
    od
}

ltl answered { [] (asked -> <> !asked) }
