/* cut_check.h - a team on the tables of cut_shim.h, and what is asked of it for each kind of edge: that leaving it out
 * is trapped, that the state is as it was, that the team goes on, and that without a trap the bits would be others.
 *
 * All is held against one reference: a run of the same model with all edges, without delays, without contracts. */
#ifndef QE_TESTS_CUT_CHECK_H
#define QE_TESTS_CUT_CHECK_H

#include "cut_shim.h"
#include "step_world.h"

#include "qeffect/snapshot.h"

enum { CUT_BATCHES = 2, CUT_EVALUATION_STEP = 1000000 }; /* batches of evaluations: no step has them */

typedef struct cut_reference {
    uint32_t hashed, steps; /* the state is hashed after each of the first steps, and after the last */
    world_hash *hash;       /* [hashed + 1] behind step i */
    double *loss;           /* [steps + 1] of step i */
    world_hash last;
    double evaluated[CUT_BATCHES][WORLD_MICROBATCHES_MAX]; /* losses, with the weights of the start */
    qe_snapshot *start;
} cut_reference;

static inline qe_status cut_evaluate(world *w, uint32_t batch, double *losses_out) {
    world_batch(w, CUT_EVALUATION_STEP + batch % CUT_BATCHES, 0);
    qe_batch tokens = {w->batch_tokens, w->batch_targets};
    return qe_team_evaluate(w->team, &tokens, losses_out, NULL, 0, 0, &w->result, &w->error);
}

static inline int cut_evaluates_as(world *w, uint32_t batch, const cut_reference *reference) {
    double losses[WORLD_MICROBATCHES_MAX];
    if (cut_evaluate(w, batch, losses) != QE_OK) return 0;
    return memcmp(losses, reference->evaluated[batch % CUT_BATCHES], w->microbatches * sizeof *losses) == 0;
}

static inline int cut_state_is(world *w, const world_hash *hash) {
    return strcmp(world_state(w).text, hash->text) == 0;
}

/* Clipping is always at work, so that a wrong norm shows in the weights. */
static inline void cut_world_open(world *w, const world_options *options) {
    world_open(w, options);
    w->optimizer.rate = (qe_learning_rate){.peak = 2e-3, .minimum = 5e-4, .warmup_steps = 2, .steps = 100};
    w->optimizer.clip_norm = 0.05;
}

/* Back to the beginning. */
static inline void cut_start(world *w, const cut_reference *reference) {
    must(qe_team_snapshot_put(w->team, reference->start, &w->error), &w->error, "put");
    w->step = 1;
}

static inline void cut_reference_make(world *w, uint32_t hashed, uint32_t steps, cut_reference *reference_out) {
    cut_reference *r = reference_out;
    if (steps < hashed) steps = hashed;
    *r = (cut_reference){.hashed = hashed, .steps = steps};
    r->hash = cut_alloc((hashed + 1) * sizeof *r->hash);
    r->loss = cut_alloc((steps + 1) * sizeof *r->loss);
    must(qe_snapshot_create(w->team, &r->start, &w->error), &w->error, "snapshot");
    must(qe_team_snapshot_take(w->team, r->start, &w->error), &w->error, "take");
    for (uint32_t i = 0; i < CUT_BATCHES; i++) must(cut_evaluate(w, i, r->evaluated[i]), &w->error, "evaluate");
    r->hash[0] = world_state(w);
    for (uint32_t i = 1; i <= steps; i++) {
        r->loss[i] = world_step(w, 0);
        if (i <= hashed) r->hash[i] = world_state(w);
    }
    r->last = world_state(w);
}

static inline void cut_reference_free(cut_reference *reference) {
    qe_snapshot_destroy(reference->start);
    free(reference->hash);
    free(reference->loss);
}

/* What runs of one kind came to. */
typedef struct cut_tally {
    uint32_t runs, trapped, unchanged, went_on;
    uint64_t dropped;              /* 0: the plan has no such edge */
    uint32_t rules[QE_RULE_COUNT]; /* verdicts */
    char words[QE_ERROR_TEXT_BYTES]; /* of the first refusal of a capture */
} cut_tally;

static inline int cut_is_sync(qe_rule rule) {
    return rule == QE_RULE_SYNC_ENTER || rule == QE_RULE_SYNC_EXIT || rule == QE_RULE_SYNC_SIDE ||
           rule == QE_RULE_SYNC_HOST;
}

/* What nothing waits for is met by the step behind it. */
static inline int cut_is_met_later(cut_kind kind) { return kind == CUT_FOLD || kind == CUT_COMMIT; }

/* The kinds of edges that lie inside of recordings: a graph without them is refused before it may run. */
static inline int cut_is_recorded(cut_kind kind, qe_capture capture) {
    if (capture == QE_CAPTURE_NONE) return 0;
    if (cut_is_met_later(kind)) return 1;
    int caller = kind == CUT_ENTER || kind == CUT_EXIT || kind == CUT_DRAIN;
    return capture == QE_CAPTURE_STEP && !caller;
}

/* The armed command, and for what is met later the one behind it. */
static inline qe_status cut_command(world *w, cut_kind kind, uint32_t run) {
    double losses[WORLD_MICROBATCHES_MAX];
    if (kind == CUT_EXIT) return cut_evaluate(w, run, losses);
    qe_status status = world_try_step(w, 0);
    if (!cut_is_met_later(kind) || status != QE_OK) return status;
    uint64_t dropped = cut_dropped();
    cut_arm(CUT_NONE);
    status = world_try_step(w, 0);
    cut.devices[0]->dropped = dropped;
    return status;
}

static inline void cut_note_verdict(const world *w, qe_status status, cut_tally *tally) {
    if (status != QE_CONTRACT || w->result.violations.count == 0) return;
    qe_rule rule = w->result.violations.record[0].rule;
    tally->rules[rule]++;
    tally->trapped += cut_is_sync(rule) != 0;
}

static inline int cut_went_on(world *w, const cut_reference *reference, cut_kind kind, uint32_t run) {
    if (kind == CUT_EXIT) return cut_evaluates_as(w, run, reference);
    if (cut_is_met_later(kind)) return 1; /* the step whose work went astray is the one that went on */
    return world_try_step(w, 0) == QE_OK && !w->result.vetoed && cut_state_is(w, &reference->hash[w->step - 1]);
}

/* One run: the edge is left out, the step is refused, the state is that of the step before, the next step is right.
 * Requires: w->step is below reference->hashed. */
static inline void cut_trap_run(world *w, const cut_reference *reference, cut_kind kind, uint32_t run,
                                cut_tally *tally) {
    cut_arm(kind);
    qe_status status = cut_command(w, kind, run);
    uint64_t dropped = cut_dropped();
    cut_arm(CUT_NONE);
    cut_settle();
    tally->dropped += dropped;
    if (dropped == 0) return;
    tally->runs++;
    cut_note_verdict(w, status, tally);
    int unchanged = cut_state_is(w, &reference->hash[w->step - 1]);
    int went_on = unchanged && cut_went_on(w, reference, kind, run);
    tally->unchanged += unchanged != 0;
    tally->went_on += went_on != 0;
    if (!went_on) cut_start(w, reference);
}

/* Runs with other delays each, or without. */
static inline cut_tally cut_trap_runs(world *w, const cut_reference *reference, cut_kind kind, uint32_t runs,
                                      int delayed) {
    cut_tally tally = {0};
    cut_start(w, reference);
    for (uint32_t run = 0; run < runs; run++) {
        cut_delays(delayed ? run + 1 : 0);
        cut_trap_run(w, reference, kind, run, &tally);
        if (tally.dropped == 0) break; /* there is nothing to leave out */
    }
    cut_delays(0);
    return tally;
}

/* Each run records all graphs without the edge; afterwards they are recorded with it, and the team trains. */
static inline cut_tally cut_capture_runs(world *w, const cut_reference *reference, cut_kind kind, uint32_t runs) {
    cut_tally tally = {0};
    cut_start(w, reference);
    for (uint32_t run = 0; run < runs; run++) {
        cut_arm(kind);
        qe_status status = qe_team_recapture(w->team, &w->error);
        uint64_t dropped = cut_dropped();
        cut_arm(CUT_NONE);
        tally.dropped += dropped;
        if (dropped == 0) break;
        tally.runs++;
        tally.trapped += status == QE_CONTRACT || status == QE_ERROR_ARGUMENT;
        if (tally.words[0] == 0 && status != QE_OK)
            snprintf(tally.words, sizeof tally.words, "%s", w->error.message);
        tally.unchanged += cut_state_is(w, &reference->hash[0]) != 0;
    }
    must(qe_team_recapture(w->team, &w->error), &w->error, "recapture");
    if (world_try_step(w, 0) == QE_OK && cut_state_is(w, &reference->hash[1])) tally.went_on = tally.runs;
    return tally;
}

/* Is the bits' being right a matter of this edge? Without contracts, with the delays of a seed. */
static inline int cut_ends_otherwise(world *w, const cut_reference *reference, cut_kind kind, uint64_t seed) {
    cut_start(w, reference);
    if (kind == CUT_EXIT) must(cut_evaluate(w, 1, NULL), &w->error, "evaluate");
    cut_delays(seed);
    cut_arm(kind);
    int otherwise;
    if (kind == CUT_EXIT) {
        otherwise = !cut_evaluates_as(w, 0, reference);
    } else {
        (void)world_try_step(w, 0);
        if (cut_is_met_later(kind)) cut_arm(CUT_NONE);
        (void)world_try_step(w, 0);
        cut_settle();
        otherwise = !cut_state_is(w, &reference->hash[2]);
    }
    cut_arm(CUT_NONE);
    cut_delays(0);
    return otherwise;
}

/* Runs until the bits are others; *runs_out: how many there were. */
static inline int cut_is_real(world *w, const cut_reference *reference, cut_kind kind, uint32_t runs_max,
                              uint32_t *runs_out) {
    for (*runs_out = 1; *runs_out <= runs_max; ++*runs_out)
        if (cut_ends_otherwise(w, reference, kind, *runs_out)) return 1;
    *runs_out = runs_max;
    return 0;
}

/* Steps with all edges, and delays of another seed every so often: how many were refused, or had another loss.
 * Requires: the reference hashed the state behind the last of them. */
static inline uint32_t cut_clean_run(world *w, const cut_reference *reference, uint32_t steps, int *same_state_out) {
    enum { SEED_EVERY = 20, SEED_FIRST = 1000 };
    uint32_t wrong = 0;
    cut_start(w, reference);
    for (uint32_t i = 1; i <= steps; i++) {
        if (i % SEED_EVERY == 1) cut_delays(SEED_FIRST + i);
        qe_status status = world_try_step(w, 0);
        wrong += status != QE_OK || memcmp(&w->result.loss, &reference->loss[i], sizeof(double)) != 0;
    }
    cut_delays(0);
    *same_state_out =
        cut_state_is(w, steps == reference->steps ? &reference->last : &reference->hash[steps]);
    return wrong;
}

#endif
