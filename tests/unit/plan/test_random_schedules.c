/* Orders that nobody would write: random ones, with F, I, W and B of random stages on random ranks. What the schedule
 * check lets through is planned, certified, and runs to its end with the same bits every time. */
#include "step_world.h"

#include <unistd.h>

enum { STAGES_MAX = 4, SCHEDULES = SANITIZED ? 24 : 120, STEPS = 3, PATIENCE_S = 60 };

typedef struct dice {
    uint64_t state;
} dice;

static uint32_t roll(dice *d, uint32_t sides) {
    d->state = d->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(d->state >> 33) % sides;
}

typedef struct progress {
    uint8_t f[STAGES_MAX][WORLD_MICROBATCHES_MAX], i[STAGES_MAX][WORLD_MICROBATCHES_MAX],
        w[STAGES_MAX][WORLD_MICROBATCHES_MAX];
} progress;

/* The next action of (stage, microbatch), if its inputs are there. */
static int next_action(const progress *p, uint32_t stages, uint32_t stage, uint32_t m, dice *d, qe_action *out) {
    *out = (qe_action){.microbatch = m, .stage = (uint16_t)stage};
    if (!p->f[stage][m]) {
        out->kind = QE_ACTION_F;
        return stage == 0 || p->f[stage - 1][m];
    }
    if (!p->i[stage][m]) {
        out->kind = roll(d, 3) == 0 ? QE_ACTION_B : QE_ACTION_I;
        return stage + 1 == stages || p->i[stage + 1][m];
    }
    out->kind = QE_ACTION_W;
    return !p->w[stage][m];
}

static void mark(progress *p, const qe_action *action) {
    if (action->kind == QE_ACTION_F) p->f[action->stage][action->microbatch] = 1;
    if (action->kind == QE_ACTION_I || action->kind == QE_ACTION_B) p->i[action->stage][action->microbatch] = 1;
    if (action->kind == QE_ACTION_W || action->kind == QE_ACTION_B) p->w[action->stage][action->microbatch] = 1;
}

static uint32_t random_order(dice *d, uint32_t stages, uint32_t microbatches, qe_action *order) {
    progress p = {0};
    uint32_t count = 0, left = 3 * stages * microbatches;
    while (left > 0) {
        qe_action action;
        if (!next_action(&p, stages, roll(d, stages), roll(d, microbatches), d, &action)) continue;
        mark(&p, &action);
        left -= action.kind == QE_ACTION_B ? 2 : 1;
        order[count++] = action;
    }
    return count;
}

/* Every rank has a stage; the others lie anywhere. */
static void random_places(dice *d, uint32_t ranks, uint32_t stages, uint32_t *stage_rank) {
    for (uint32_t s = 0; s < stages; s++) stage_rank[s] = s < ranks ? s : roll(d, ranks);
    for (uint32_t s = stages - 1; s > 0; s--) {
        uint32_t other = roll(d, s + 1), kept = stage_rank[s];
        stage_rank[s] = stage_rank[other];
        stage_rank[other] = kept;
    }
}

static qe_schedule random_schedule(dice *d) {
    static qe_action order[3 * STAGES_MAX * WORLD_MICROBATCHES_MAX];
    qe_schedule s = {.ranks = 2 + roll(d, 2), .microbatches = 1 + roll(d, 5)};
    s.stages = s.ranks + roll(d, STAGES_MAX - s.ranks + 1);
    uint32_t count = random_order(d, s.stages, s.microbatches, order);
    s.rank_begin = calloc(s.ranks + 1, sizeof *s.rank_begin);
    s.stage_rank = calloc(s.stages, sizeof *s.stage_rank);
    s.actions = calloc(count, sizeof *s.actions);
    assert_non_null(s.rank_begin);
    assert_non_null(s.stage_rank);
    assert_non_null(s.actions);
    random_places(d, s.ranks, s.stages, s.stage_rank);
    uint32_t next = 0;
    for (uint32_t rank = 0; rank < s.ranks; rank++) {
        s.rank_begin[rank] = next;
        for (uint32_t i = 0; i < count; i++)
            if (s.stage_rank[order[i].stage] == rank) s.actions[next++] = order[i];
    }
    s.rank_begin[s.ranks] = next;
    return s;
}

static world_hash run_once(const world_options *options, double *loss_out) {
    world w;
    world_open(&w, options);
    for (int step = 0; step < STEPS; step++) loss_out[step] = world_step(&w, 0);
    world_hash hash = world_state(&w);
    world_close(&w);
    return hash;
}

static void random_orders_are_planned_and_run_with_the_same_bits_every_time(void **state) {
    (void)state;
    dice d = {2024};
    int ran = 0;
    for (int n = 0; n < SCHEDULES; n++) {
        alarm(PATIENCE_S); /* a deadlock would wait for ever */
        qe_schedule schedule = random_schedule(&d);
        qe_error error = {0};
        qe_status status = qe_schedule_check(&schedule, NULL, &error);
        assert_true(status == QE_OK || status == QE_CONTRACT);
        if (status == QE_OK) {
            world_options options = {.given = &schedule, .recipe = (qe_recipe_kind)(n % 5), .copy = n % 7 == 0,
                                     .no_cache = n % 11 == 0};
            double first[STEPS], again[STEPS];
            world_hash hash = run_once(&options, first);
            assert_string_equal(run_once(&options, again).text, hash.text);
            assert_memory_equal(first, again, sizeof first);
            ran++;
        }
        qe_schedule_deinit(&schedule);
    }
    alarm(0);
    print_message("%d of %d orders ran\n", ran, SCHEDULES);
    assert_true(ran > SCHEDULES / 2);
}

/* The loss of a batch does not depend on the order of the backward passes at all. */
static void the_first_loss_of_every_order_is_the_baselines(void **state) {
    (void)state;
    dice d = {77};
    alarm(PATIENCE_S);
    for (int n = 0; n < 12; n++) {
        qe_schedule schedule = random_schedule(&d);
        qe_error error;
        if (qe_schedule_check(&schedule, NULL, &error) == QE_OK) {
            world_options options = {.given = &schedule}, baseline = {.baseline = 1, .ranks = 1};
            baseline.microbatches = schedule.microbatches;
            double losses[STEPS], expected[STEPS];
            run_once(&options, losses);
            run_once(&baseline, expected);
            assert_true(losses[0] == expected[0]);
        }
        qe_schedule_deinit(&schedule);
    }
    alarm(0);
}

/* Found by looking at thousands: rank 0 runs ahead of what rank 1 can take, so two outgoing slots would stop it before
 * it does what rank 1 waits for. */
static const char *const runs_ahead =
    "1F3,1F1,1I1,1I3,1F2,1F4,1F0,1F5,1W1,1B2,1F7,1I0,1B4,1W0,1W3,1F6,1B6,1B7,1I5,1W5\n"
    "0F3,0F1,0F7,0F6,2F1,2F3,0F0,0F4,2B1,2I3,0F2,0B1,2F2,2F0,0F5,2F4,2I2,2I0,2W2,2W3,2F5,0B3,2I4,2F7,2I5,2W4,2W0,"
    "2W5,0I0,2B7,0B2,0W0,0B4,2F6,2B6,0I6,0B7,0I5,0W5,0W6\n";

static void an_order_that_two_outgoing_slots_would_stop_gets_more_and_runs(void **state) {
    (void)state;
    FILE *file = tmpfile();
    assert_non_null(file);
    assert_true(fputs(runs_ahead, file) >= 0);
    rewind(file);
    qe_schedule schedule;
    qe_error error = {0};
    must(qe_schedule_read_csv(file, "ahead.csv", &schedule, &error), &error, "csv");
    fclose(file);
    world_options options = {.given = &schedule};
    world w;
    world_prepare(&w, &options);
    uint32_t most = 0;
    for (uint32_t rank = 0; rank < w.plan->ranks; rank++)
        for (uint32_t i = 0; i < w.plan->rank[rank].pool_count; i++) {
            const qe_pool *pool = &w.plan->rank[rank].pools[i];
            int leaves = pool->kind == QE_SLOT_OUT_F || pool->kind == QE_SLOT_OUT_B;
            if (leaves && pool->count > most) most = pool->count;
        }
    assert_true(most > 2);
    world_close(&w);
    double first[STEPS], again[STEPS];
    alarm(PATIENCE_S);
    world_hash hash = run_once(&options, first);
    assert_string_equal(run_once(&options, again).text, hash.text);
    alarm(0);
    qe_schedule_deinit(&schedule);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_orders_are_planned_and_run_with_the_same_bits_every_time),
        cmocka_unit_test(an_order_that_two_outgoing_slots_would_stop_gets_more_and_runs),
        cmocka_unit_test(the_first_loss_of_every_order_is_the_baselines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
