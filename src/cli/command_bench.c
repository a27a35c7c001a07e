/* command_bench.c - `qeffect bench`: what training, its recipes, its contracts and its kernels cost, as ratios taken
 * in one run. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <jansson.h>
#include "base/assert.h"
#include "cli/bench.h"

typedef struct bench {
    qe_cli *cli;
    qe_settings settings;
    uint64_t steps, pairs;
    double load; /* of the machine before anything ran; negative: unknown */
    qe_bench_steps timed;
    qe_bench_contracts contracts;
    qe_bench_graphs graphs;
    qe_bench_kernels kernels;
    qe_bench_stage *stages; /* [stages of the schedule]; NULL: more than one rank may hold */
    uint64_t *doubled_slot_bytes; /* [ranks] at twice the microbatches; NULL: the schedule is a file */
} bench;

typedef struct ratio {
    const char *name; /* JSON key */
    const char *text;
    int over, under; /* qe_bench_variant; -1: the configured recipe */
} ratio;

static const ratio ratios[] = {
    {"delayed_over_bf16", "delayed / bf16", QE_BENCH_DELAYED, QE_BENCH_BF16},
    {"current_over_bf16", "current / bf16", QE_BENCH_CURRENT, QE_BENCH_BF16},
    {"block_over_bf16", "block / bf16", QE_BENCH_BLOCK, QE_BENCH_BF16},
    {"bf16_over_fp32", "bf16 / fp32", QE_BENCH_BF16, QE_BENCH_FP32},
    {"delayed_over_fp32", "delayed / fp32", QE_BENCH_DELAYED, QE_BENCH_FP32},
    {"baseline_over_eager", "baseline / eager", QE_BENCH_BASELINE, -1},
    {"captured_over_eager", "captured / eager", QE_BENCH_CAPTURED, -1},
    {NULL, NULL, -1, QE_BENCH_UNCHECKED}, /* the configured contracts: see ratio_name */
};
enum { RATIOS = sizeof ratios / sizeof *ratios };

static const char *contracts_name(const bench *b) {
    return b->settings.contracts.mode == QE_CONTRACTS_SETTING_TRAP      ? "trap"
           : b->settings.contracts.mode == QE_CONTRACTS_SETTING_OBSERVE ? "observe"
                                                                        : "off";
}

enum { RATIO_NAME_BYTES = 48 };

/* JSON key or text; with contracts off the ratio tells how far apart two runs of the same are. */
static const char *ratio_name(const bench *b, const ratio *r, int key, char *scratch) {
    if (r->name != NULL) return key ? r->name : r->text;
    snprintf(scratch, RATIO_NAME_BYTES, key ? "%s_over_off" : "contracts %s / off", contracts_name(b));
    return scratch;
}

static qe_bench_spread ratio_of(const bench *b, const ratio *r) {
    qe_bench_variant over = r->over < 0 ? b->timed.configured : (qe_bench_variant)r->over;
    qe_bench_variant under = r->under < 0 ? b->timed.configured : (qe_bench_variant)r->under;
    return qe_bench_steps_ratio(&b->timed, over, under);
}

static double tokens_per_s(const bench *b, qe_bench_variant variant) {
    return (double)b->timed.tokens_per_step / qe_bench_steps_seconds(&b->timed, variant);
}

/* Ranks check side by side, so their sum over a step's time is the most that checks can cost. */
static double check_share(const bench *b) {
    return 1e-6 * b->contracts.step_check_us / qe_bench_steps_seconds(&b->timed, b->timed.configured);
}

static const char *variant_text(qe_bench_variant variant) {
    if (variant == QE_BENCH_BASELINE) return "baseline";
    if (variant == QE_BENCH_UNCHECKED) return "contracts off";
    if (variant == QE_BENCH_CAPTURED) return "captured";
    return qe_recipe_name((qe_recipe_kind)variant);
}

static const qe_session *configured(const bench *b) {
    return &b->timed.session[b->timed.configured];
}

/* Slots at twice the microbatches, from the plan alone. A CSV says its own number of microbatches. */
static qe_status plan_doubled(bench *b, qe_error *error) {
    qe_session session = {0};
    qe_settings doubled = b->settings;
    qe_error limit;
    doubled.pipeline.microbatches *= 2;
    doubled.train.mode = QE_TRAIN_EAGER;
    if (configured(b)->schedule.actions[0].row != 0) return QE_OK; /* read from a file */
    if (qe_settings_check(&doubled, &limit) != QE_OK) return QE_OK; /* twice as many is more than a step may have */
    qe_session_options options = {.training = 1, .data = 0};
    qe_status status = qe_session_open(&session, &doubled, &options, error);
    if (status == QE_OK) {
        b->doubled_slot_bytes = calloc(session.train->ranks, sizeof *b->doubled_slot_bytes);
        if (b->doubled_slot_bytes == NULL)
            status = qe_error_set(error, QE_ERROR_MEMORY, NULL, "no memory for the sizes of slots");
    }
    for (uint32_t rank = 0; status == QE_OK && rank < session.train->ranks; rank++)
        b->doubled_slot_bytes[rank] = session.train->rank[rank].slot_bytes;
    qe_session_close(&session);
    return status;
}

static qe_status measure_actions(bench *b, qe_error *error) {
    uint32_t stages = configured(b)->schedule.stages;
    if (stages > QE_CHUNKS_MAX) return QE_OK;
    b->stages = calloc(stages, sizeof *b->stages);
    if (b->stages == NULL) return qe_error_set(error, QE_ERROR_MEMORY, NULL, "no memory for the times of stages");
    return qe_bench_actions_measure(&b->settings, stages, b->timed.session[0].dataset, b->stages, error);
}

static qe_status measure(bench *b, qe_error *error) {
    QE_TRY(qe_bench_steps_measure(&b->timed, &b->settings, b->steps, b->pairs, b->cli->terminal, error));
    QE_TRY(qe_bench_contracts_measure(configured(b)->train, &b->contracts, error));
    QE_TRY(qe_bench_graphs_measure(&b->graphs, error));
    QE_TRY(qe_bench_kernels_measure(&b->settings, &b->kernels, error));
    QE_TRY(measure_actions(b, error));
    return plan_doubled(b, error);
}

static void print_head(const bench *b) {
    const qe_session *s = configured(b);
    char sizes[QE_CLI_SIZES_BYTES];
    printf("backend   %s, %ld processors", s->backend, sysconf(_SC_NPROCESSORS_ONLN));
    if (b->load >= 0) printf(", load %.2f when it began", b->load);
    printf("\npipeline  %s: %s of %u sequence%s; recipe %s\n", b->settings.pipeline.schedule,
           qe_cli_sizes(s->schedule.ranks, s->schedule.stages, s->schedule.microbatches, sizes),
           b->settings.train.sequences, qe_cli_s(b->settings.train.sequences),
           qe_recipe_name(b->settings.recipe.kind));
    printf("rounds    %llu of %llu step%s; everything takes turns; medians\n\n", (unsigned long long)b->pairs,
           (unsigned long long)b->steps, qe_cli_s(b->steps));
}

static void print_steps(const bench *b) {
    printf("%-22s %10s %10s\n", "step", "ms", "tokens/s");
    for (int v = 0; v < QE_BENCH_VARIANTS; v++) {
        qe_bench_variant variant = (qe_bench_variant)v;
        printf("  %-20s %10.2f %10.0f\n", variant_text(variant), 1e3 * qe_bench_steps_seconds(&b->timed, variant),
               tokens_per_s(b, variant));
    }
    printf("\n%-22s %10s %20s\n", "step time ratio", "median", "middle half of rounds");
    for (int i = 0; i < RATIOS; i++) {
        char name[RATIO_NAME_BYTES];
        qe_bench_spread spread = ratio_of(b, &ratios[i]);
        printf("  %-20s %10.3f %12.3f .. %.3f\n", ratio_name(b, &ratios[i], 0, name), spread.median,
               spread.low, spread.high);
    }
}

static void print_contracts(const bench *b) {
    const qe_bench_contracts *c = &b->contracts;
    printf("\ncontracts (all ranks)\n");
    printf("  %-40s %10llu\n", "submissions checked in a step", (unsigned long long)c->items_per_step);
    printf("  %-40s %10llu\n", "of these ops", (unsigned long long)c->ops_per_step);
    printf("  %-40s %10.1f ns\n", "check of a certified one, median", c->check_ns);
    printf("  %-40s %10.1f ns\n", "the same with the ledger out of cache", c->check_cold_ns);
    printf("  %-40s %10.1f ns\n", "full judgement of one", c->judge_ns);
    printf("  %-40s %10.1f us\n", "all checks of a step, out of cache", c->step_check_us);
    printf("  %-40s %10.4f %%\n", "share of a step", 100 * check_share(b));
}

static void print_graphs(const bench *b) {
    const qe_bench_graphs *g = &b->graphs;
    printf("\nrecorded graphs (%llu ops that do nothing, guards of %llu words)\n", (unsigned long long)g->ops,
           (unsigned long long)g->words);
    printf("  %-40s %10.1f ns\n", "arm and launch one", g->launch_ns);
    printf("  %-40s %10.1f ns\n", "compare it with its seal", g->seal_ns);
    printf("  %-40s %10.1f ns\n", "host time of a replay beyond its ops", g->replay_ns);
    printf("  %-40s %10.1f ns\n", "submit the same ops one by one", g->eager_ns);
    printf("  %-40s %10.1f ns\n", "an op inside, start to end", g->node_ns);
    printf("  %-40s %10.1f ns\n", "both guards", g->guard_ns);
}

static void print_kernels(const bench *b) {
    printf("\n%-24s %14s %10s %12s %12s\n", "quantize and amax", "shape", "G elem/s", "copy", "ratio");
    for (int i = 0; i < QE_BENCH_QUANTIZE_ROWS; i++) {
        const qe_bench_quantize *q = &b->kernels.quantize[i];
        char shape[32];
        snprintf(shape, sizeof shape, "%ux%u", q->rows, q->columns);
        printf("  %-22s %14s %10.2f %12.2f %12.2f\n", q->what, shape, q->gelements_per_s, q->copy_gelements_per_s,
               q->ratio);
    }
    printf("\n%-24s %14s %10s %12s %12s\n", "matrix products, GF/s", "rows,in,out", "forward", "input grad",
           "weight grad");
    for (int i = 0; i < QE_BENCH_SHAPES_MAX; i++) {
        const qe_bench_linear *l = &b->kernels.linear[i];
        char shape[48];
        snprintf(shape, sizeof shape, "%ux%ux%u", l->rows, l->in, l->out);
        printf("  %-22s %14s %10.1f %12.1f %12.1f\n", l->name, shape, l->gflops[0], l->gflops[1], l->gflops[2]);
    }
}

static void print_stages(const bench *b) {
    if (b->stages == NULL) return;
    printf("\n%-24s %10s %14s %14s\n", "actions of a stage, ms", "forward", "input grad", "weight grad");
    for (uint32_t stage = 0; stage < configured(b)->schedule.stages; stage++) {
        const double *ms = b->stages[stage].ms;
        printf("  stage %-16u %10.3f %14.3f %14.3f\n", stage, ms[QE_ACTION_F], ms[QE_ACTION_I], ms[QE_ACTION_W]);
    }
}

static void print_memory(const bench *b) {
    const qe_plan *plan = configured(b)->train;
    printf("\n%-24s %14s %23s %12s\n", "slots", "bytes", "twice the microbatches", "ratio");
    for (uint32_t rank = 0; rank < plan->ranks; rank++) {
        unsigned long long bytes = plan->rank[rank].slot_bytes;
        printf("  rank %-17u %14llu", rank, bytes);
        if (b->doubled_slot_bytes != NULL)
            printf(" %23llu %12.3f", (unsigned long long)b->doubled_slot_bytes[rank],
                   (double)b->doubled_slot_bytes[rank] / (double)bytes);
        putchar('\n');
    }
}

static json_t *steps_json(const bench *b) {
    json_t *list = json_array();
    for (int v = 0; v < QE_BENCH_VARIANTS; v++) {
        qe_bench_variant variant = (qe_bench_variant)v;
        qe_recipe_kind recipe = variant <= QE_BENCH_FP32 ? (qe_recipe_kind)variant : b->settings.recipe.kind;
        json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:f, s:f}", "recipe", qe_recipe_name(recipe), "mode",
                                              variant == QE_BENCH_BASELINE   ? "baseline"
                                              : variant == QE_BENCH_CAPTURED ? "captured"
                                                                             : "eager",
                                              "contracts",
                                              variant == QE_BENCH_UNCHECKED ? "off" : contracts_name(b), "step_ms",
                                              1e3 * qe_bench_steps_seconds(&b->timed, variant), "tokens_per_s",
                                              tokens_per_s(b, variant)));
    }
    return list;
}

static json_t *ratios_json(const bench *b) {
    json_t *fields = json_object();
    for (int i = 0; i < RATIOS; i++) {
        char name[RATIO_NAME_BYTES];
        qe_bench_spread spread = ratio_of(b, &ratios[i]);
        json_object_set_new(fields, ratio_name(b, &ratios[i], 1, name),
                            json_pack("{s:f, s:f, s:f}", "median", spread.median, "quartile_low", spread.low,
                                      "quartile_high", spread.high));
    }
    return fields;
}

static json_t *contracts_json(const bench *b) {
    const qe_bench_contracts *c = &b->contracts;
    return json_pack("{s:I, s:I, s:f, s:f, s:f, s:f, s:f}", "items_per_step", (json_int_t)c->items_per_step,
                     "ops_per_step", (json_int_t)c->ops_per_step, "check_ns", c->check_ns, "check_cold_ns",
                     c->check_cold_ns, "judge_ns", c->judge_ns, "step_check_us", c->step_check_us, "check_share",
                     check_share(b));
}

static json_t *graphs_json(const bench *b) {
    const qe_bench_graphs *g = &b->graphs;
    return json_pack("{s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f}", "ops", (json_int_t)g->ops, "words",
                     (json_int_t)g->words, "launch_ns", g->launch_ns, "seal_ns", g->seal_ns, "replay_ns", g->replay_ns,
                     "eager_ns", g->eager_ns, "node_ns", g->node_ns, "guard_ns", g->guard_ns);
}

static json_t *kernels_json(const bench *b) {
    json_t *quantize = json_array(), *linears = json_array();
    for (int i = 0; i < QE_BENCH_QUANTIZE_ROWS; i++) {
        const qe_bench_quantize *q = &b->kernels.quantize[i];
        json_array_append_new(quantize,
                              json_pack("{s:s, s:I, s:I, s:f, s:f, s:f}", "what", q->what, "rows", (json_int_t)q->rows,
                                        "columns", (json_int_t)q->columns, "gelements_per_s", q->gelements_per_s,
                                        "copy_gelements_per_s", q->copy_gelements_per_s, "ratio_to_copy", q->ratio));
    }
    for (int i = 0; i < QE_BENCH_SHAPES_MAX; i++) {
        const qe_bench_linear *l = &b->kernels.linear[i];
        json_array_append_new(
            linears, json_pack("{s:s, s:I, s:I, s:I, s:f, s:f, s:f}", "name", l->name, "rows", (json_int_t)l->rows,
                               "in", (json_int_t)l->in, "out", (json_int_t)l->out, "forward_gflops", l->gflops[0],
                               "input_grad_gflops", l->gflops[1], "weight_grad_gflops", l->gflops[2]));
    }
    return json_pack("{s:o, s:o}", "quantize", quantize, "matrix_products", linears);
}

static json_t *stages_json(const bench *b) {
    if (b->stages == NULL) return json_null();
    json_t *list = json_array();
    for (uint32_t stage = 0; stage < configured(b)->schedule.stages; stage++) {
        const double *ms = b->stages[stage].ms;
        json_array_append_new(list, json_pack("{s:i, s:f, s:f, s:f}", "stage", (int)stage, "forward_ms",
                                              ms[QE_ACTION_F], "input_ms", ms[QE_ACTION_I], "weight_ms",
                                              ms[QE_ACTION_W]));
    }
    return list;
}

static json_t *memory_json(const bench *b) {
    const qe_plan *plan = configured(b)->train;
    json_t *list = json_array();
    for (uint32_t rank = 0; rank < plan->ranks; rank++) {
        json_t *fields =
            json_pack("{s:i, s:I}", "rank", (int)rank, "slot_bytes", (json_int_t)plan->rank[rank].slot_bytes);
        json_t *doubled =
            b->doubled_slot_bytes == NULL ? json_null() : json_integer((json_int_t)b->doubled_slot_bytes[rank]);
        json_object_set_new(fields, "doubled_microbatches_slot_bytes", doubled);
        json_array_append_new(list, fields);
    }
    return list;
}

static int report_json(const bench *b) {
    const qe_session *s = configured(b);
    json_t *document =
        json_pack("{s:s, s:i, s:I, s:I}", "backend", s->backend, "processors", (int)sysconf(_SC_NPROCESSORS_ONLN),
                  "steps", (json_int_t)b->steps, "pairs", (json_int_t)b->pairs);
    json_object_set_new(document, "load_average", b->load >= 0 ? json_real(b->load) : json_null());
    json_object_set_new(document, "pipeline",
                        json_pack("{s:o, s:i, s:i, s:i, s:i, s:s}", "schedule",
                                  qe_cli_json_text(b->settings.pipeline.schedule), "ranks",
                                  (int)s->schedule.ranks, "stages", (int)s->schedule.stages, "microbatches",
                                  (int)s->schedule.microbatches, "sequences", (int)b->settings.train.sequences,
                                  "recipe", qe_recipe_name(b->settings.recipe.kind)));
    json_object_set_new(document, "step_times", steps_json(b));
    json_object_set_new(document, "step_time_ratios", ratios_json(b));
    json_object_set_new(document, "contracts", contracts_json(b));
    json_object_set_new(document, "graphs", graphs_json(b));
    json_object_set_new(document, "kernels", kernels_json(b));
    json_object_set_new(document, "stage_times", stages_json(b));
    json_object_set_new(document, "memory", memory_json(b));
    return qe_cli_json(document, QE_EXIT_OK);
}

static int report(const bench *b) {
    if (b->cli->json) return report_json(b);
    print_head(b);
    print_steps(b);
    print_contracts(b);
    print_graphs(b);
    print_kernels(b);
    print_stages(b);
    print_memory(b);
    return QE_EXIT_OK;
}

static int run_bench(qe_cli *cli) {
    bench b = {.cli = cli};
    qe_error error = {0};
    if (qe_cli_number(cli, "steps", 1, QE_BENCH_STEPS_MAX, 5, &b.steps) != 0 ||
        qe_cli_number(cli, "pairs", 1, QE_BENCH_PAIRS_MAX, 7, &b.pairs) != 0)
        return QE_EXIT_USAGE;
    qe_device_kind device;
    int status = qe_device_option(cli, QE_DEVICE_CAN_HOST, &device);
    if (status != QE_EXIT_OK) return status;
    status = qe_session_settings(cli, cli->argument_count > 0 ? cli->arguments[0] : NULL, NULL, &b.settings);
    if (status != QE_EXIT_OK) return status;
    qe_device_unused_print(device, &b.settings);
    if (getloadavg(&b.load, 1) != 1) b.load = -1;
    if (b.load > 0.5) fprintf(stderr, "the machine is busy (load %.2f): ratios hold better than times do\n", b.load);
    status = measure(&b, &error) == QE_OK ? report(&b) : qe_cli_error(cli, &error);
    qe_bench_steps_deinit(&b.timed);
    free(b.doubled_slot_bytes);
    free(b.stages);
    return status;
}

static const qe_cli_option options[] = {
    {"steps", 0, "N", "steps of one round (default 5)", 0},
    {"pairs", 0, "K", "rounds in which everything takes a turn (default 7)", 0},
    {"set", 0, "KEY=VALUE", "override one setting, e.g. pipeline.schedule=1f1b (docs/config.md)", 1},
    {"device", 0, "NAME", "where to run: host", 0},
    {"contracts", 0, "MODE", "what is held against contracts off: trap (default), observe or off", 0},
    {NULL, 0, NULL, NULL, 0},
};

const qe_command qe_command_bench = {
    .name = "bench",
    .arguments = "[CONFIG.yaml]",
    .summary = "time recipes, modes, contracts and kernels against each other in one run",
    .details =
        "Opens the configured pipeline once per recipe, as baseline, captured, and without contracts, and lets them "
        "take\n"
        "turns: N steps each, K rounds, after a warm-up. Ratios are taken within a round; every figure is a median.\n"
        "Then, on the same plan, the ledger alone (ns per check, share of a step), the kernels alone at the model's\n"
        "sizes, F, I and W of each stage alone (with --json what --stage-times and pipeline.times take), and the\n"
        "bytes of slots with the configured and with twice the microbatches. Nothing is kept: no weights, no trace.\n"
        "Without a file the pipeline is the quickstart's, about half a minute on two cores.\n"
        "\n"
        "The load of the machine is told with the figures: on a busy one, use more rounds and trust the ratios.\n"
        "\n"
        "Examples:\n"
        "  qeffect bench\n"
        "  qeffect bench examples/quickstart.yaml --steps 10 --pairs 11 --json\n"
        "  qeffect bench --set pipeline.schedule=1f1b --set model.layers=8\n",
    .options = options,
    .arguments_min = 0,
    .arguments_max = 1,
    .run = run_bench,
};
