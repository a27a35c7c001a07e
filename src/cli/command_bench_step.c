/* command_bench_step.c - `qeffect bench step`: a whole training step, eager, as a graph per action and as one graph,
 * with its commit, against what the device's own rates allow. */
#include <stdlib.h>
#include <string.h>
#include <jansson.h>
#include "base/assert.h"
#include "cli/bench_run.h"
#include "cli/session_peak.h"

static const qe_bench_shape shapes[] = {
    {"1.1b", 22, 2048, 5632, 32, 4, 32000, 2048, 1, "1f1b", 1, 8},
    {"0.2b", 12, 1024, 2816, 8, 8, 32000, 1024, 2, "1f1b", 1, 8},
    {"tiny", 3, 64, 96, 4, 2, 256, 32, 1, "1f1b", 1, 8},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

typedef enum way { EAGER, ACTION, STEP, WAYS } way;
static const char *const way_names[WAYS] = {"eager", "action", "step"};

typedef struct figures {
    double step_ms, low_ms, actions_ms, commit_ms, open_s;
    uint32_t graphs;
    uint64_t graph_bytes;
    qe_memory_ledger foretold, taken; /* of the rank that takes most */
    uint64_t all_foretold_bytes, all_taken_bytes; /* of all ranks */
    qe_device_use use; /* of the device, as it says */
    qe_session_peak peak; /* of the rank that keeps most */
    double commit_bytes; /* of all ranks */
} figures;

typedef struct bench {
    qe_cli *cli;
    qe_settings settings;
    qe_device_kind device;
    uint64_t steps;
    int taken[WAYS];
    figures figure[WAYS];
    qe_bench_ceilings ceilings;
    char backend[176];
    uint64_t parameters, embedding, tokens;
    double model_flops; /* of a step */
} bench;

/* Forward and backward: 6 per parameter and token without the embedding; attention's two products, causal by half. */
static double model_flops(const bench *b) {
    const qe_settings_model *m = &b->settings.model;
    double tokens = (double)b->tokens;
    double attention = 6.0 * m->layers * tokens * m->sequence * m->hidden; /* 12 without causality */
    return 6.0 * (double)(b->parameters - b->embedding) * tokens + attention;
}

static void describe(bench *b, const qe_session *session) {
    snprintf(b->backend, sizeof b->backend, "%s", session->backend);
    b->parameters = qe_model_scalar_count(session->model);
    b->embedding = (uint64_t)b->settings.model.vocab * b->settings.model.hidden;
    b->tokens = (uint64_t)session->sequences_per_step * b->settings.model.sequence;
    b->model_flops = model_flops(b);
}

static double fastest_ms(const qe_bench_run *run) {
    double least = run->step_s[0];
    for (uint32_t i = 1; i < run->measured; i++) least = run->step_s[i] < least ? run->step_s[i] : least;
    return 1e3 * least;
}

static void take_figures(figures *f, const qe_bench_run *run) {
    f->step_ms = qe_bench_run_step_ms(run);
    f->low_ms = fastest_ms(run);
    f->actions_ms = qe_bench_run_actions_ms(run);
    f->commit_ms = qe_bench_run_commit_ms(run);
    f->open_s = run->open_s;
    qe_capture_use use = qe_session_captured(&run->session);
    f->graphs = use.graphs;
    f->graph_bytes = use.bytes;
}

static void take_memory(figures *f, const qe_session *session) {
    for (uint32_t rank = 0; rank < session->schedule.ranks; rank++) {
        qe_memory_ledger foretold = qe_memory_foretell(session->train, NULL, rank);
        qe_memory_ledger taken = qe_team_memory_ledger(session->team, rank);
        f->all_foretold_bytes += qe_memory_ledger_total(&foretold);
        f->all_taken_bytes += qe_memory_ledger_total(&taken);
        if (rank > 0 && qe_memory_ledger_total(&taken) <= qe_memory_ledger_total(&f->taken)) continue;
        f->foretold = foretold;
        f->taken = taken;
    }
    f->use = session->use;
}

static qe_status take_peak(figures *f, const qe_session *session, qe_error *error) {
    for (uint32_t rank = 0; rank < session->schedule.ranks; rank++) {
        qe_session_peak peak;
        QE_TRY(qe_session_peak_of(session->train, &session->schedule, rank, &peak, error));
        if (rank == 0 || peak.live_bytes > f->peak.live_bytes) f->peak = peak;
    }
    return QE_OK;
}

/* Four values are read, three written; a commit that quantizes for the next step writes codes both ways besides. */
static double commit_bytes_of(const qe_plan *plan) {
    enum { ADAMW_BYTES = 28, CODES_BYTES = 2 };
    double bytes = 0;
    for (uint32_t weight = 0; weight < plan->weight_count; weight++) {
        const qe_weight_info *info = plan->model_ops->weight(plan->model, weight);
        uint32_t stage = plan->model_ops->weight_stage(plan->model, weight, plan->stages);
        int ahead = qe_plan_fills_ahead(plan, &plan->rank[plan->stage_rank[stage]], weight);
        bytes += (double)info->rows * info->columns * (ADAMW_BYTES + (ahead ? CODES_BYTES : 0));
    }
    return bytes;
}

static qe_status measure_way(bench *b, way how, qe_bench_run *run, qe_error *error) {
    qe_settings settings = b->settings;
    settings.train.mode = how == EAGER ? QE_TRAIN_EAGER : QE_TRAIN_CAPTURED;
    settings.train.capture = how == STEP ? QE_CAPTURE_UNIT_STEP : QE_CAPTURE_UNIT_ACTION;
    qe_status status = qe_bench_run_open(run, &settings, b->device, error);
    if (status == QE_OK) status = qe_bench_run_steps(run, b->steps, error);
    if (status == QE_OK) {
        take_figures(&b->figure[how], run);
        take_memory(&b->figure[how], &run->session);
        status = take_peak(&b->figure[how], &run->session, error);
        b->figure[how].commit_bytes = commit_bytes_of(run->session.train);
        describe(b, &run->session);
    }
    qe_bench_run_close(run);
    return status;
}

static qe_status measure(bench *b, qe_error *error) {
    qe_bench_run *run = malloc(sizeof *run);
    qe_bench_choices choices;
    if (run == NULL) return qe_error_set(error, QE_ERROR_MEMORY, NULL, "no memory to time steps");
    qe_status status = qe_bench_choices_open(&choices, b->device, &b->settings, error);
    for (int how = 0; status == QE_OK && how < WAYS; how++)
        if (b->taken[how]) status = measure_way(b, (way)how, run, error);
    qe_bench_choices_close(&choices);
    free(run);
    return status == QE_OK ? qe_bench_run_ceilings(b->device, &b->ceilings, error) : status;
}

static double flops_per_s(const bench *b, way how) {
    return b->model_flops / (1e-3 * b->figure[how].step_ms);
}

static json_t *way_json(const bench *b, way how) {
    const figures *f = &b->figure[how];
    json_t *fields = json_pack("{s:s, s:f, s:f, s:f, s:f, s:f}", "way", way_names[how], "step_ms", f->step_ms,
                               "fastest_ms", f->low_ms, "actions_ms", f->actions_ms, "commit_ms", f->commit_ms,
                               "commit_bytes_per_s", f->commit_bytes / (1e-3 * f->commit_ms));
    json_object_set_new(fields, "tokens_per_s", json_real(1e3 * (double)b->tokens / f->step_ms));
    json_object_set_new(fields, "model_flops_per_s", json_real(flops_per_s(b, how)));
    json_object_set_new(fields, "product_share", json_real(flops_per_s(b, how) / b->ceilings.product_flops));
    json_object_set_new(fields, "graphs", json_integer((json_int_t)f->graphs));
    json_object_set_new(fields, "graph_bytes", json_integer((json_int_t)f->graph_bytes));
    json_object_set_new(fields, "open_s", json_real(f->open_s));
    json_object_set_new(fields, "foretold", qe_cli_memory_json(&f->foretold));
    json_object_set_new(fields, "taken", qe_cli_memory_json(&f->taken));
    json_object_set_new(fields, "all_foretold_bytes", json_integer((json_int_t)f->all_foretold_bytes));
    json_object_set_new(fields, "all_taken_bytes", json_integer((json_int_t)f->all_taken_bytes));
    json_object_set_new(fields, "peak_activation_bytes", json_integer((json_int_t)f->peak.live_bytes));
    json_object_set_new(fields, "simulated_activation_bytes", json_integer((json_int_t)f->peak.simulated_bytes));
    json_object_set_new(fields, "placed_activation_bytes", json_integer((json_int_t)f->peak.placed_bytes));
    int told = f->use.used_bytes > 0;
    json_object_set_new(fields, "device_used_bytes", told ? json_integer((json_int_t)f->use.used_bytes) : json_null());
    json_object_set_new(fields, "device_code_bytes", told ? json_integer((json_int_t)f->use.code_bytes) : json_null());
    return fields;
}

static int report_json(const bench *b) {
    const qe_settings *s = &b->settings;
    json_t *list = json_array();
    for (int how = 0; how < WAYS; how++)
        if (b->taken[how]) json_array_append_new(list, way_json(b, (way)how));
    return qe_cli_json(
        json_pack("{s:s, s:I, s:I, s:I, s:s, s:i, s:i, s:f, s:f, s:f, s:o}", "backend", b->backend, "parameters",
                  (json_int_t)b->parameters, "embedding_parameters", (json_int_t)b->embedding, "tokens_per_step",
                  (json_int_t)b->tokens, "schedule", s->pipeline.schedule, "ranks", (int)s->pipeline.ranks,
                  "microbatches", (int)s->pipeline.microbatches, "model_flops_per_step", b->model_flops,
                  "product_flops_per_s", b->ceilings.product_flops, "copy_bytes_per_s", b->ceilings.copy_bytes, "steps",
                  list),
        QE_EXIT_OK);
}

/* Code of kernels is the driver's, whatever the model; the rest is held against what was foretold. */
static void print_use(const figures *f) {
    const double mib = 1 << 20, used = (double)f->use.used_bytes, code = (double)f->use.code_bytes;
    printf("\n         %.1f MiB less are free on the device: code of kernels %.1f, else %.1f (%.4f of what was "
           "foretold), of it attention's workspace %.1f",
           used / mib, code / mib, (used - code) / mib, (used - code) / (double)f->all_foretold_bytes,
           (double)f->use.attention_bytes / mib);
}

static void print_memory(const figures *f) {
    printf("         memory of a rank, MiB:");
    for (int kind = 0; kind < QE_MEMORY_KINDS; kind++)
        printf(" %s %.1f", qe_memory_kind_name((qe_memory_kind)kind), (double)f->taken.bytes[kind] / (1 << 20));
    printf("\n         all ranks: foretold %.1f MiB, taken %.1f MiB", (double)f->all_foretold_bytes / (1 << 20),
           (double)f->all_taken_bytes / (1 << 20));
    if (f->use.used_bytes > 0) print_use(f);
    printf("\n         peak activation of a rank: %llu bytes, simulated %llu, placed in %llu\n",
           (unsigned long long)f->peak.live_bytes, (unsigned long long)f->peak.simulated_bytes,
           (unsigned long long)f->peak.placed_bytes);
}

static int report(const bench *b) {
    if (b->cli->json) return report_json(b);
    const qe_settings *s = &b->settings;
    printf("%s\n%.3f G parameters, %llu tokens a step, %s, %u rank%s, %u microbatch%s\n", b->backend,
           1e-9 * (double)b->parameters, (unsigned long long)b->tokens, s->pipeline.schedule, s->pipeline.ranks,
           qe_cli_s(s->pipeline.ranks), s->pipeline.microbatches, qe_cli_es(s->pipeline.microbatches));
    printf("%-8s %10s %10s %10s %10s %12s %10s %10s %8s %8s\n", "way", "step ms", "fastest", "actions ms", "commit ms",
           "commit TB/s", "Mtokens/s", "TFLOP/s", "share", "open s");
    for (int how = 0; how < WAYS; how++) {
        const figures *f = &b->figure[how];
        if (!b->taken[how]) continue;
        printf("%-8s %10.3f %10.3f %10.3f %10.3f %12.3f %10.3f %10.3f %7.1f%% %8.1f\n", way_names[how], f->step_ms,
               f->low_ms, f->actions_ms, f->commit_ms, 1e-9 * f->commit_bytes / f->commit_ms,
               1e-3 * (double)b->tokens / f->step_ms,
               1e-12 * flops_per_s(b, (way)how), 100 * flops_per_s(b, (way)how) / b->ceilings.product_flops, f->open_s);
        printf("         %u graphs of %.1f MiB\n", f->graphs, (double)f->graph_bytes / (1 << 20));
        print_memory(f);
    }
    printf("model FLOPs of a step %.4g; a large 8-bit product runs at %.4g FLOP/s, a large copy at %.4g B/s\n",
           b->model_flops, b->ceilings.product_flops, b->ceilings.copy_bytes);
    return QE_EXIT_OK;
}

static int take_ways(bench *b) {
    const char *only = qe_cli_value(b->cli, "way");
    for (int how = 0; how < WAYS; how++) b->taken[how] = only == NULL || strcmp(only, way_names[how]) == 0;
    for (int how = 0; how < WAYS; how++)
        if (b->taken[how]) return QE_EXIT_OK;
    return qe_cli_usage(b->cli, "--way is '%s'; expected eager, action or step", only);
}

static int run_bench_step(qe_cli *cli) {
    bench b = {.cli = cli};
    qe_error error = {0};
    const char *name = cli->argument_count > 0 ? cli->arguments[0] : NULL;
    if (qe_cli_number(cli, "steps", 1, QE_BENCH_RUN_STEPS_MAX, 10, &b.steps) != 0) return QE_EXIT_USAGE;
    int status = qe_device_option(cli, QE_DEVICE_CAN_HOST | QE_DEVICE_CAN_CHECK | QE_DEVICE_CAN_GPU, &b.device);
    if (status == QE_EXIT_OK) status = take_ways(&b);
    if (status != QE_EXIT_OK) return status;
    if (name == NULL) name = qe_device_is_gpu(b.device) ? "1.1b" : "tiny";
    for (int i = 0; i < SHAPES; i++)
        if (strcmp(name, shapes[i].name) == 0) {
            status = qe_bench_shape_settings(cli, &shapes[i], &b.settings);
            if (status != QE_EXIT_OK) return status;
            qe_device_unused_print(b.device, &b.settings);
            return measure(&b, &error) == QE_OK ? report(&b) : qe_cli_error(cli, &error);
        }
    return qe_cli_usage(cli, "there is no shape '%s', but 1.1b, 0.2b and tiny", name);
}

static const qe_cli_option options[] = {
    {"device", 0, "NAME", "where to run: host, cuda, te or check", 0},
    {"steps", 0, "N", "steps that are measured each way (default 10)", 0},
    {"way", 0, "NAME", "only eager, action or step", 0},
    {"set", 0, "KEY=VALUE", "override one setting, e.g. pipeline.schedule=zbh1 (docs/config.md)", 1},
    {NULL, 0, NULL, NULL, 0},
};

const qe_command qe_command_bench_step = {
    .name = "bench step",
    .arguments = "[SHAPE]",
    .summary = "time a whole step: eager, a graph per action, one graph; and its commit",
    .details =
        "Random weights, random tokens; two steps warm up, every figure is a median. The commit is what a rank\n"
        "spends from the first optimizer op to the last result; its bytes are 28 for each parameter (master, gradient\n"
        "and two moments are read, all but the gradient written), and 2 for each that a recorded commit quantizes,\n"
        "both ways. Model FLOPs: 6 for each parameter but the\n"
        "embedding's and token, and attention, causal by half; their share is of a large 8-bit product timed in the\n"
        "same run.\n"
        "\n"
        "Shapes: 1.1b (22 layers, hidden 2048, ffn 5632, 32/4 heads, vocabulary 32000, 8 microbatches of 2048\n"
        "tokens), 0.2b (12 layers, hidden 1024), and tiny, which is the host's.\n"
        "\n"
        "Examples:\n"
        "  qeffect bench step --device cuda\n"
        "  qeffect bench step tiny --steps 3 --json\n",
    .options = options,
    .arguments_min = 0,
    .arguments_max = 1,
    .run = run_bench_step,
};
