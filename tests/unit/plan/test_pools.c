/* How many slots a plan takes, counted a second time from nothing but the order of the schedule. */
#include "qeffect/simulate.h"
#include "step_world.h"

typedef struct held {
    int64_t from, to; /* units of program order in which the slot is not free, both included */
} held;

/* Where the parts of an action stand in the program: receives of action j are posted before action j - 1. */
enum { RECEIVE, INPUT_PART, WEIGHT_PART, PARTS };

typedef struct rank_order {
    const qe_schedule *schedule;
    uint32_t rank;
} rank_order;

static int64_t position(const rank_order *order, uint32_t stage, uint32_t microbatch, qe_action_kind kind, int part) {
    const qe_schedule *s = order->schedule;
    for (uint32_t i = s->rank_begin[order->rank]; i < s->rank_begin[order->rank + 1]; i++) {
        const qe_action *action = &s->actions[i];
        if (action->stage != stage || action->microbatch != microbatch) continue;
        int same = action->kind == kind || (action->kind == QE_ACTION_B && kind != QE_ACTION_F);
        if (!same) continue;
        int64_t at = (int64_t)(i - s->rank_begin[order->rank]);
        if (part == RECEIVE && at > 0) at--;
        return at * PARTS + part;
    }
    fail_msg("stage %u, microbatch %u has no such action", stage, microbatch);
    return 0;
}

static int64_t forward_at(const rank_order *order, uint32_t stage, uint32_t m) {
    return position(order, stage, m, QE_ACTION_F, INPUT_PART);
}
static int64_t input_at(const rank_order *order, uint32_t stage, uint32_t m) {
    return position(order, stage, m, QE_ACTION_I, INPUT_PART);
}
static int64_t weight_at(const rank_order *order, uint32_t stage, uint32_t m) {
    return position(order, stage, m, QE_ACTION_W, WEIGHT_PART);
}

/* Messages of one edge are received in the sender's order, so one that overtakes another takes it along. */
static int64_t received_at(const rank_order *order, uint32_t producer, uint32_t m, qe_action_kind kind) {
    const qe_schedule *s = order->schedule;
    uint32_t sender = s->stage_rank[producer];
    int64_t earliest = INT64_MAX;
    int found = 0;
    for (uint32_t i = s->rank_begin[sender]; i < s->rank_begin[sender + 1]; i++) {
        const qe_action *action = &s->actions[i];
        int sends = kind == QE_ACTION_F ? action->kind == QE_ACTION_F
                                        : action->kind == QE_ACTION_I || action->kind == QE_ACTION_B;
        int64_t consumer = kind == QE_ACTION_F ? action->stage + 1 : (int64_t)action->stage - 1;
        if (!sends || consumer < 0 || consumer >= s->stages || s->stage_rank[consumer] != order->rank) continue;
        found |= action->stage == producer && action->microbatch == m;
        if (!found) continue;
        int64_t at = position(order, (uint32_t)consumer, action->microbatch, kind, RECEIVE);
        if (at < earliest) earliest = at;
    }
    assert_true(found);
    return earliest;
}

static held held_in_f(const rank_order *order, uint32_t stage, uint32_t m) {
    int local = order->schedule->stage_rank[stage - 1] == order->rank;
    return (held){local ? forward_at(order, stage - 1, m) : received_at(order, stage - 1, m, QE_ACTION_F),
                  input_at(order, stage, m)};
}

static held held_in_b(const rank_order *order, uint32_t stage, uint32_t m) {
    int local = order->schedule->stage_rank[stage + 1] == order->rank;
    return (held){local ? input_at(order, stage + 1, m) : received_at(order, stage + 1, m, QE_ACTION_I),
                  input_at(order, stage, m)};
}

static held held_by(const rank_order *order, uint32_t stage, uint32_t m, qe_slot_kind kind) {
    switch (kind) {
    case QE_SLOT_I: return (held){forward_at(order, stage, m), input_at(order, stage, m)};
    case QE_SLOT_X: return (held){forward_at(order, stage, m), weight_at(order, stage, m)};
    case QE_SLOT_Y: return (held){input_at(order, stage, m), weight_at(order, stage, m)};
    case QE_SLOT_IN_F: return held_in_f(order, stage, m);
    case QE_SLOT_IN_B: return held_in_b(order, stage, m);
    default: fail(); return (held){0, 0};
    }
}

static uint32_t peak_of(const held *list, uint32_t count) {
    uint32_t peak = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t live = 0;
        for (uint32_t k = 0; k < count; k++) live += list[k].from <= list[i].from && list[i].from <= list[k].to;
        if (live > peak) peak = live;
    }
    return peak;
}

/* 0: this stage has no such slots. */
static uint32_t expected_count(const rank_order *order, uint32_t stage, qe_slot_kind kind) {
    const qe_schedule *s = order->schedule;
    uint32_t microbatches = s->microbatches;
    int first = stage == 0, last = stage + 1 == s->stages;
    if (kind == QE_SLOT_OUT_F || kind == QE_SLOT_OUT_B) {
        int end = kind == QE_SLOT_OUT_F ? last : first;
        uint32_t to = kind == QE_SLOT_OUT_F ? stage + 1 : stage - 1;
        if (end || s->stage_rank[to] == order->rank) return 0;
        return microbatches < 2 ? microbatches : 2; /* one is sent while the next is made */
    }
    if ((kind == QE_SLOT_IN_F && first) || (kind == QE_SLOT_IN_B && last)) return 0;
    held list[WORLD_MICROBATCHES_MAX * 2];
    for (uint32_t m = 0; m < microbatches; m++) list[m] = held_by(order, stage, m, kind);
    return peak_of(list, microbatches);
}

enum { HELD_MAX = 3 * QE_CHUNKS_MAX * WORLD_MICROBATCHES_MAX * 2 };

/* Lives that may lie in the same memory in turns. */
typedef struct lives {
    held list[HELD_MAX];
    uint64_t sizes[HELD_MAX];
    uint32_t count;
} lives;

static void add_lives(lives *to, const rank_order *order, const qe_pool *pool) {
    for (uint32_t m = 0; m < order->schedule->microbatches; m++) {
        assert_true(to->count < HELD_MAX);
        to->list[to->count] = held_by(order, pool->stage, m, (qe_slot_kind)pool->kind);
        to->sizes[to->count++] = pool->slot_bytes;
    }
}

static uint64_t most_at_once(const lives *all) {
    uint64_t most = 0;
    for (uint32_t i = 0; i < all->count; i++) {
        uint64_t live = 0;
        for (uint32_t k = 0; k < all->count; k++)
            if (all->list[k].from <= all->list[i].from && all->list[i].from <= all->list[k].to) live += all->sizes[k];
        if (live > most) most = live;
    }
    return most;
}

/* Most bytes of slots I, X and Y that live at once on a rank, and of each kind that arrives; of what is sent, the stage
 * that needs most. No plan can do with less. */
static uint64_t least_bytes(const qe_plan *plan, const rank_order *order) {
    static lives of[QE_SLOT_KINDS];
    uint64_t sent[QE_SLOT_KINDS] = {0}, least = 0;
    for (int kind = 0; kind < QE_SLOT_KINDS; kind++) of[kind].count = 0;
    for (uint32_t p = 0; p < plan->rank[order->rank].pool_count; p++) {
        const qe_pool *pool = &plan->rank[order->rank].pools[p];
        qe_slot_kind kind = (qe_slot_kind)pool->kind;
        if (kind == QE_SLOT_OUT_F || kind == QE_SLOT_OUT_B) {
            uint64_t bytes = expected_count(order, pool->stage, kind) * pool->slot_bytes;
            if (bytes > sent[kind]) sent[kind] = bytes;
        } else {
            int computes = kind == QE_SLOT_I || kind == QE_SLOT_X || kind == QE_SLOT_Y;
            add_lives(&of[computes ? QE_SLOT_I : kind], order, pool);
        }
    }
    for (int kind = 0; kind < QE_SLOT_KINDS; kind++) least += most_at_once(&of[kind]) + sent[kind];
    return least;
}

static double worst_waste; /* bytes of a rank's slots over the least that there could be */

static void check_pools(const qe_plan *plan, const qe_schedule *schedule) {
    for (uint32_t rank = 0; rank < plan->ranks; rank++) {
        uint64_t bytes = 0, regions = 0;
        rank_order order = {schedule, rank};
        for (uint32_t r = 0; r < plan->rank[rank].region_count; r++) regions += plan->rank[rank].regions[r].bytes;
        assert_int_equal(plan->rank[rank].slot_bytes, regions);
        for (uint32_t stage = 0; stage < plan->stages; stage++)
            for (int kind = 0; kind < QE_SLOT_KINDS; kind++) {
                const qe_pool *pool = qe_rank_plan_pool(&plan->rank[rank], stage, (qe_slot_kind)kind);
                uint32_t expected = 0;
                if (schedule->stage_rank[stage] == rank) expected = expected_count(&order, stage, (qe_slot_kind)kind);
                uint32_t found = pool == NULL ? 0 : pool->count;
                if (found < expected)
                    print_error("rank %u, stage %u, kind %d: %u slots, expected %u\n", rank, stage, kind, found,
                                expected);
                assert_true(found >= expected); /* more where another pool's slot lies in one of them meanwhile */
                if (pool == NULL) continue;
                for (uint32_t i = 0; i < pool->count; i++)
                    assert_true(plan->rank[rank].regions[pool->regions[i]].bytes >= pool->slot_bytes);
                uint64_t content = qe_model_table()->slot_bytes(plan->model, stage, plan->stages, (qe_slot_kind)kind);
                assert_int_equal(pool->slot_bytes, content + QE_ALIGN_BYTES); /* the witness has a line of its own */
                bytes += expected * pool->slot_bytes;
            }
        uint64_t least = least_bytes(plan, &order);
        assert_true(regions <= bytes && regions >= least);
        if ((double)regions / (double)least > worst_waste) worst_waste = (double)regions / (double)least;
    }
}

static int generate(const world_options *options, qe_schedule *schedule_out) {
    qe_schedule_request request = {.name = options->schedule, .ranks = options->ranks, .chunks = options->chunks,
                                   .microbatches = options->microbatches};
    qe_error error;
    return qe_schedule_generate(&request, schedule_out, &error) == QE_OK;
}

static void a_pool_has_as_many_slots_as_live_at_once_at_most(void **state) {
    (void)state;
    static const char *const names[] = {"gpipe", "1f1b", "interleaved", "zbh1"};
    int planned[4] = {0};
    for (size_t n = 0; n < 4; n++)
        for (uint32_t ranks = 1; ranks <= 4; ranks++)
            for (uint32_t chunks = 1; chunks <= 2; chunks++)
                for (uint32_t microbatches = 1; microbatches <= 12; microbatches++) {
                    world_options options = {.schedule = names[n], .ranks = ranks, .chunks = chunks,
                                             .microbatches = microbatches};
                    qe_schedule schedule;
                    if (ranks * chunks > 4 || !generate(&options, &schedule)) continue;
                    qe_model *model = world_model(&options);
                    qe_plan *plan = world_plan(&schedule, model, &options, 0);
                    check_pools(plan, &schedule);
                    planned[n]++;
                    qe_plan_destroy(plan);
                    qe_model_destroy(model);
                    qe_schedule_deinit(&schedule);
                }
    for (size_t n = 0; n < 4; n++) assert_true(planned[n] >= 10);
    print_message("most bytes of a rank's slots over the least there could be: %.3f\n", worst_waste);
    assert_true(worst_waste < 1.35);
}

static void without_reuse_every_microbatch_has_slots_of_its_own(void **state) {
    (void)state;
    world_options options = {.schedule = "zbh1", .ranks = 3, .chunks = 1, .microbatches = 7, .no_reuse = 1};
    world w;
    world_prepare(&w, &options);
    for (uint32_t rank = 0; rank < 3; rank++)
        for (uint32_t i = 0; i < w.plan->rank[rank].pool_count; i++)
            assert_int_equal(w.plan->rank[rank].pools[i].count, 7);
    world_close(&w);
}

static uint64_t slot_bytes(const char *schedule, uint32_t ranks, uint32_t microbatches, uint32_t rank, int quickstart) {
    world_options options = {.schedule = schedule, .ranks = ranks, .microbatches = microbatches,
                             .quickstart = quickstart};
    qe_schedule made;
    world_schedule(&options, 0, &made);
    qe_model *model = world_model(&options);
    qe_plan *plan = world_plan(&made, model, &options, 0);
    uint64_t bytes = plan->rank[rank].slot_bytes;
    qe_plan_destroy(plan);
    qe_model_destroy(model);
    qe_schedule_deinit(&made);
    return bytes;
}

static void doubling_the_microbatches_leaves_the_activation_memory_of_1f1b_and_zbh1_as_it_is(void **state) {
    (void)state;
    static const char *const names[] = {"1f1b", "zbh1"};
    for (size_t n = 0; n < 2; n++)
        for (uint32_t ranks = 1; ranks <= 4; ranks++)
            for (uint32_t rank = 0; rank < ranks; rank++) {
                uint64_t bytes = slot_bytes(names[n], ranks, 2 * ranks, rank, 0);
                assert_int_equal(slot_bytes(names[n], ranks, 4 * ranks, rank, 0), bytes);
                assert_int_equal(slot_bytes(names[n], ranks, 8 * ranks, rank, 0), bytes);
            }
    for (size_t n = 0; n < 2; n++)
        for (uint32_t rank = 0; rank < 2; rank++)
            assert_int_equal(slot_bytes(names[n], 2, 8, rank, 1), slot_bytes(names[n], 2, 16, rank, 1));
}

static void doubling_the_microbatches_of_gpipe_doubles_what_it_retains(void **state) {
    (void)state;
    for (uint32_t rank = 0; rank < 2; rank++) {
        uint64_t four = slot_bytes("gpipe", 2, 4, rank, 0), eight = slot_bytes("gpipe", 2, 8, rank, 0);
        assert_true(eight > four + four / 2);
        assert_true(slot_bytes("gpipe", 2, 16, rank, 0) - eight == 2 * (eight - four));
    }
}

/* Memory that one stage's slots have left serves the other stage of a rank. */
static void two_stages_of_a_rank_share_the_memory_of_slots(void **state) {
    (void)state;
    const char *const schedules[] = {"zbv", "v-half", "v-min", "interleaved", "interleaved-zb"};
    for (size_t s = 0; s < sizeof schedules / sizeof *schedules; s++) {
        qe_model_config config = {.layers = 8, .hidden = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 64,
                                  .sequence = 16, .sequences = 1, .rope_theta = 10000.0f, .norm_epsilon = 1e-5f};
        world_options options = {.schedule = schedules[s], .ranks = 4, .chunks = 2, .microbatches = 16,
                                 .config = &config};
        world w;
        uint64_t apart = 0, together = 0;
        world_prepare(&w, &options);
        for (uint32_t rank = 0; rank < 4; rank++) {
            const qe_rank_plan *plan = &w.plan->rank[rank];
            together += plan->slot_bytes;
            for (uint32_t p = 0; p < plan->pool_count; p++) apart += plan->pools[p].count * plan->pools[p].slot_bytes;
        }
        print_message("%s: %.3f of the memory of pools apart\n", schedules[s], (double)together / (double)apart);
        assert_true((double)together < 0.85 * (double)apart);
        world_close(&w);
    }
}

/* What a schedule's simulation says that each rank keeps at most, in bytes of this plan's slots. */
static void simulate(const qe_plan *plan, const qe_schedule *schedule, qe_simulation *simulation) {
    qe_stage_cost costs[QE_CHUNKS_MAX * 4] = {{{0}, 0, {0}, 0, 0}};
    static const qe_slot_kind kinds[QE_KEEPS] = {QE_SLOT_I, QE_SLOT_X, QE_SLOT_Y};
    qe_error error;
    assert_true(plan->stages <= sizeof costs / sizeof *costs);
    for (uint32_t stage = 0; stage < plan->stages; stage++)
        for (int keep = 0; keep < QE_KEEPS; keep++) {
            const qe_rank_plan *rank = &plan->rank[plan->stage_rank[stage]];
            const qe_pool *pool = qe_rank_plan_pool(rank, stage, kinds[keep]);
            costs[stage].keep[keep] = pool == NULL ? 0.0 : (double)pool->slot_bytes;
            for (int kind = 0; kind < QE_ACTION_KINDS; kind++) costs[stage].time[kind] = 1.0;
        }
    qe_simulation_request request = {.schedule = schedule, .costs = costs, .cost_count = plan->stages,
                                     .backward_splits = 1};
    assert_int_equal(qe_simulation_run(&request, simulation, &error), QE_OK);
}

static void check_peaks(const qe_plan *plan, const qe_schedule *schedule, double *most_placed) {
    qe_simulation simulation = {0};
    simulate(plan, schedule, &simulation);
    for (uint32_t rank = 0; rank < plan->ranks; rank++) {
        const qe_rank_plan *placed = &plan->rank[rank];
        uint64_t bytes = 0;
        for (uint32_t r = 0; r < placed->region_count; r++) {
            qe_slot_kind kind = (qe_slot_kind)placed->regions[r].kind;
            if (kind == QE_SLOT_I || kind == QE_SLOT_X || kind == QE_SLOT_Y) bytes += placed->regions[r].bytes;
        }
        assert_true((double)placed->live_bytes == simulation.ranks[rank].peak_kept);
        assert_true(bytes >= placed->live_bytes);
        double over = (double)bytes / (double)placed->live_bytes;
        if (over > *most_placed) *most_placed = over;
    }
    qe_simulation_deinit(&simulation);
}

static void the_peak_of_a_plan_is_what_the_simulation_predicts(void **state) {
    (void)state;
    static const char *const names[] = {"gpipe", "looped-bfs", "1f1b", "interleaved", "zbh1", "zbh2",
                                        "interleaved-zb", "zbv", "v-half", "v-min", "1f1b-v", "dualpipev"};
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        uint32_t checked = 0;
        double most_placed = 0;
        for (uint32_t ranks = 1; ranks <= 4; ranks++)
            for (uint32_t microbatches = 1; microbatches <= 12; microbatches++)
                for (uint32_t chunks = 1; chunks <= 2; chunks++) {
                    qe_model_config config = {.layers = 8, .hidden = 32, .heads = 4, .kv_heads = 2, .ffn = 48,
                                              .vocab = 64, .sequence = 16, .sequences = 1, .rope_theta = 10000.0f,
                                              .norm_epsilon = 1e-5f};
                    world_options options = {.schedule = names[n], .ranks = ranks, .chunks = chunks,
                                             .microbatches = microbatches, .config = &config};
                    qe_schedule schedule;
                    if (!generate(&options, &schedule)) continue;
                    qe_model *model = world_model(&options);
                    qe_plan *plan = world_plan(&schedule, model, &options, 0);
                    check_peaks(plan, &schedule, &most_placed);
                    checked++;
                    qe_plan_destroy(plan);
                    qe_model_destroy(model);
                    qe_schedule_deinit(&schedule);
                }
        print_message("%s: peak as simulated in %u plans, at most %.3f of it placed\n", names[n], checked, most_placed);
        assert_true(checked >= 4);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_peak_of_a_plan_is_what_the_simulation_predicts),
        cmocka_unit_test(two_stages_of_a_rank_share_the_memory_of_slots),
        cmocka_unit_test(a_pool_has_as_many_slots_as_live_at_once_at_most),
        cmocka_unit_test(without_reuse_every_microbatch_has_slots_of_its_own),
        cmocka_unit_test(doubling_the_microbatches_leaves_the_activation_memory_of_1f1b_and_zbh1_as_it_is),
        cmocka_unit_test(doubling_the_microbatches_of_gpipe_doubles_what_it_retains),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
