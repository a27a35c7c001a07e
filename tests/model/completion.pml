/* completion.pml - two-way completion and what a split backward owns, for Spin: a caller's stream, a compute stream (F
 * and I of two microbatches, then take and commit) and a side stream (their W), ordered by events alone, as a plan
 * orders them. One slot is retained from F until I and W are done, whichever is last, and there is one for both
 * microbatches. Every access is begun and ended, so that what is not ordered meets in some run.
 *
 * DESIGN's invariants: 4 (the graph waits for the caller's prior work on what it touches, the caller for the graph), 2
 * (a slot lives until its last obligation is discharged and is named by its generation), 5 (each right to deposit is
 * spent once, in order; the first sets; the optimizer takes a gradient only when all are spent).
 *
 * mutant: NO_ENTER        compute does not wait for the caller's write
 * mutant: NO_EXIT         the caller reads without waiting for compute
 * mutant: NO_SEAM         the caller writes the next tokens without waiting for the reads of the step before
 * mutant: NO_JOIN         W does not wait for the I that makes its dY
 * mutant: NO_REUSE        F takes the slot without waiting for the W that reads it
 * mutant: NO_TAKE_EDGE    the optimizer does not wait for the side stream
 * mutant: EARLY_RELEASE   the slot is released by I, as if W owed nothing
 * mutant: LATE_RELEASE    the slot is released by nobody
 * mutant: STALE_HANDLE    W names the generation of the microbatch before
 * mutant: SWAPPED         W of the second microbatch comes first
 * mutant: ADD_FIRST       the first deposit adds
 * mutant: SET_ALWAYS      every deposit sets
 * mutant: TWICE           a right is spent twice
 * mutant: LOST            a right is not spent
 */
#define STEPS 3
#define MBS 2

/* Buffers: how many are at it now. Whoever reads finds what the step wrote. */
byte tokens_readers, tokens_writers, tokens_of;
byte loss_readers, loss_writers, loss_of;

/* The slot: generation, owner, what still owes; dY that I makes for W. */
byte generation, owner, readers, writers;
bool live, owes_i, owes_w;
byte handle[MBS];
byte dy_of[MBS];

/* The gradient: deposits by microbatch this step, sum of what they put there. */
byte spent[MBS], sum, deposits, version;

/* Events: how often each was recorded. */
byte loaded, taken, read_out, done_i[MBS], done_w[MBS], exited;

inline begin_read(r, w) { atomic { assert(w == 0); r++ } }
inline end_read(r) { r-- }
inline begin_write(r, w) { atomic { assert(w == 0 && r == 0); w++ } }
inline end_write(w) { w-- }

inline read_loss(which) {
#ifndef NO_EXIT
    (exited >= which);
#endif
    begin_read(loss_readers, loss_writers);
    assert(loss_of == which);
    end_read(loss_readers);
    read_out++
}

/* It writes the next tokens while the step before still runs: as soon as their last reader is done. */
active proctype caller() {
    byte step = 0;
    do
    :: step < STEPS ->
        step++;
#ifndef NO_SEAM
        (taken >= step - 1);
#endif
        begin_write(tokens_readers, tokens_writers);
        tokens_of = step;
        end_write(tokens_writers);
        if
        :: step > 1 -> read_loss(step - 1)
        :: else
        fi;
        loaded++ /* the event that compute waits for */
    :: else -> break
    od;
    read_loss(STEPS)
}

inline acquire(m) {
    atomic {
        assert(!live); /* slot.live */
        live = true; owner = m; generation++; handle[m] = generation;
        owes_i = true; owes_w = true
    }
}

inline borrow(m) { assert(live && owner == m && handle[m] == generation) } /* slot.empty, .owner, .stale */

/* Released by whoever discharges the last obligation. */
inline discharge(obligation) {
    atomic {
        obligation = false;
        if
        :: !owes_i && !owes_w -> live = false
        :: else
        fi
    }
}

inline forward(m) {
#ifndef NO_REUSE
    if
    :: m > 0 -> (done_w[m - 1] >= step)
    :: m == 0 && step > 1 -> (done_w[MBS - 1] >= step - 1)
    :: else
    fi;
#endif
    begin_read(tokens_readers, tokens_writers);
    assert(tokens_of == step);
    acquire(m);
    begin_write(readers, writers);
    end_write(writers);
    end_read(tokens_readers);
}

inline input_gradient(m) {
    borrow(m);
    begin_read(readers, writers);
    dy_of[m] = step;
    end_read(readers);
#ifdef EARLY_RELEASE
    atomic { owes_i = false; live = false };
#else
    discharge(owes_i);
#endif
    done_i[m]++
}

/* First deposit of a step sets, later ones add. */
inline deposit(m) {
    atomic {
        assert(spent[m] == 0);                    /* grad.twice */
        assert(m == 0 || spent[m - 1] == 1);      /* grad.order */
        spent[m] = 1;
        if
#if defined(ADD_FIRST)
        :: true -> sum = sum + m + 1
#elif defined(SET_ALWAYS)
        :: true -> sum = m + 1
#else
        :: deposits == 0 -> sum = m + 1
        :: deposits > 0 -> sum = sum + m + 1
#endif
        fi;
        deposits++
    }
}

inline weight_gradient(m, w_step) {
#ifndef NO_JOIN
    (done_i[m] >= w_step);
#endif
#ifdef STALE_HANDLE
    assert(live && owner == m && handle[m] - 1 == generation);
#else
    borrow(m);
#endif
    begin_read(readers, writers);
    assert(dy_of[m] == w_step);
#ifdef LOST
    if
    :: m == 0 -> deposit(m)
    :: else
    fi;
#else
    deposit(m);
#endif
#ifdef TWICE
    deposit(m);
#endif
    end_read(readers);
#ifdef LATE_RELEASE
    owes_w = false;
#else
    discharge(owes_w);
#endif
    done_w[m]++
}

active proctype side() {
    byte w_step = 0;
    do
    :: w_step < STEPS ->
        w_step++;
#ifdef SWAPPED
        weight_gradient(1, w_step);
        weight_gradient(0, w_step)
#else
        weight_gradient(0, w_step);
        weight_gradient(1, w_step)
#endif
    :: else -> break
    od
}

/* The optimizer takes the gradient, and the loss of the step goes out. */
inline take_and_commit() {
#ifndef NO_TAKE_EDGE
    (done_w[0] >= step && done_w[1] >= step);
#endif
    atomic {
        assert(spent[0] == 1 && spent[1] == 1); /* grad.missing */
        assert(sum == 3);                       /* 1 + 2, of this step alone */
        spent[0] = 0; spent[1] = 0; deposits = 0;
        version++
    };
    assert(version == step);
    assert(!live) /* slot.leak */
}

active proctype compute() {
    byte step = 0;
    do
    :: step < STEPS ->
        step++;
#ifndef NO_ENTER
        (loaded >= step);
#endif
        forward(0);
        input_gradient(0);
        forward(1);
        taken++; /* no more reads of tokens */
        input_gradient(1);
        begin_write(loss_readers, loss_writers);
        loss_of = step;
        end_write(loss_writers);
        take_and_commit();
        exited++ /* the event that the caller waits for */
    :: else -> break
    od
}

ltl finished { <> (version == STEPS && read_out == STEPS) }
