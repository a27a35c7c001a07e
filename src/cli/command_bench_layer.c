/* command_bench_layer.c - `qeffect bench layer`: what one layer takes, and what keeps it from taking less. */
#include <string.h>
#include <jansson.h>
#include "cli/bench_layer.h"

static const qe_layer_shape shapes[] = {
    {"h1024", 1024, 4096, 16, 16, 1024},
    {"h2048", 2048, 8192, 16, 16, 2048},
    {"h4096", 4096, 14336, 32, 8, 2048},
    {"h4096-long", 4096, 14336, 32, 8, 8192},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };
static const qe_layer_shape others[] = {
    {"1.1b", 2048, 5632, 32, 4, 2048}, /* of `bench step` */
    {"tiny", 64, 96, 4, 2, 64},        /* for tests, and for a look at the host */
};
enum { OTHERS = sizeof others / sizeof *others };

typedef struct row {
    const qe_layer_shape *shape;
    qe_bench_layer exact, loose; /* as trained; all products fast and attention in any order */
    qe_bench_ceilings ceilings;
    double floor_ms;
    char identity[160];
} row;

static qe_status open_layer(qe_layer *layer, const qe_layer_shape *shape, const qe_layer_options *base, int loose,
                            qe_error *error) {
    qe_layer_options options = *base;
    options.all_fast = options.any_order = loose;
    return qe_layer_open(layer, shape, &options, error);
}

static qe_status measure_exact(const qe_layer_options *options, double seconds, row *r, qe_error *error) {
    qe_layer layer;
    qe_status status = open_layer(&layer, r->shape, options, 0, error);
    memcpy(r->identity, layer.identity, sizeof r->identity);
    if (status == QE_OK) status = qe_bench_layer_ops(&layer, &r->exact, error);
    if (status == QE_OK) status = qe_bench_layer_ceilings(&layer, &r->ceilings, error);
    if (status == QE_OK) status = qe_bench_layer_measure(&layer, seconds, 1, &r->exact, error);
    if (status == QE_OK) r->floor_ms = qe_bench_layer_floor_ms(&r->exact, &r->ceilings);
    qe_layer_close(&layer);
    return status;
}

static qe_status measure_loose(const qe_layer_options *options, double seconds, row *r, qe_error *error) {
    qe_layer layer;
    qe_status status = open_layer(&layer, r->shape, options, 1, error);
    if (status == QE_OK) status = qe_bench_layer_ops(&layer, &r->loose, error);
    if (status == QE_OK) status = qe_bench_layer_measure(&layer, seconds, 0, &r->loose, error);
    qe_layer_close(&layer);
    return status;
}

static json_t *figure_json(const qe_bench_figure *figure) {
    return json_pack("{s:f, s:f, s:f, s:I, s:f, s:f, s:f}", "median_ms", figure->median_ms, "low_ms", figure->low_ms,
                     "high_ms", figure->high_ms, "samples", (json_int_t)figure->samples, "seconds", figure->seconds,
                     "sm_mhz", figure->sm_mhz, "power_w", figure->power_w);
}

static json_t *ops_json(const qe_bench_layer *bench) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < bench->op_count; i++) {
        const qe_bench_op *op = &bench->ops[i];
        char phase[2] = {op->phase, 0};
        json_array_append_new(list, json_pack("{s:s, s:s, s:f, s:f, s:f}", "op", op->title, "phase", phase,
                                              "us", op->us, "flops", op->work.flops, "bytes", op->work.bytes));
    }
    return list;
}

static json_t *row_json(const row *r) {
    json_t *document =
        json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:s}", "shape", r->shape->name, "hidden", (int)r->shape->hidden,
                  "ffn", (int)r->shape->ffn, "heads", (int)r->shape->heads, "kv_heads", (int)r->shape->kv_heads,
                  "tokens", (int)r->shape->tokens, "backend", r->identity);
    json_object_set_new(document, "captured", figure_json(&r->exact.captured));
    json_object_set_new(document, "eager", figure_json(&r->exact.eager));
    json_object_set_new(document, "captured_all_fast_any_order", figure_json(&r->loose.captured));
    json_object_set_new(document, "floor_ms", json_real(r->floor_ms));
    json_object_set_new(document, "product_flops_per_s", json_real(r->ceilings.product_flops));
    json_object_set_new(document, "copy_bytes_per_s", json_real(r->ceilings.copy_bytes));
    json_object_set_new(document, "launch_us", json_real(r->exact.launch_us));
    json_object_set_new(document, "launch_low_us", json_real(r->exact.launch_low_us));
    json_object_set_new(document, "launch_high_us", json_real(r->exact.launch_high_us));
    json_object_set_new(document, "guards_us", json_real(r->exact.guards_us));
    json_object_set_new(document, "capture_s", json_real(r->exact.capture_s));
    json_object_set_new(document, "graph_bytes", json_integer((json_int_t)r->exact.graph_bytes));
    json_object_set_new(document, "ops", ops_json(&r->exact));
    json_object_set_new(document, "ops_all_fast_any_order", ops_json(&r->loose));
    return document;
}

static void print_ops(const qe_bench_layer *bench) {
    double sum = 0;
    for (uint32_t i = 0; i < bench->op_count; i++) {
        const qe_bench_op *op = &bench->ops[i];
        double rate = op->work.flops > 0 ? 1e-6 * op->work.flops / op->us : 1e-6 * op->work.bytes / op->us;
        printf("    %c %-33s %9.2f us %9.2f %s\n", op->phase, op->title, op->us, rate,
               op->work.flops > 0 ? "TFLOP/s" : "TB/s");
        sum += op->us;
    }
    printf("    sum of ops alone                   %9.2f us\n", sum);
}

static void print_row(const row *r) {
    const qe_bench_layer *e = &r->exact;
    printf("%s: hidden %u, ffn %u, %u/%u heads, %u tokens on %s\n", r->shape->name, r->shape->hidden, r->shape->ffn,
           r->shape->heads, r->shape->kv_heads, r->shape->tokens, r->identity);
    printf("  captured  %9.4f ms (%.4f to %.4f)   eager / captured %.2f   captured / floor %.2f\n",
           e->captured.median_ms, e->captured.low_ms, e->captured.high_ms,
           e->eager.median_ms / e->captured.median_ms, e->captured.median_ms / r->floor_ms);
    if (e->captured.sm_mhz > 0)
        printf("  while captured ran: %.0f MHz, %.0f W (medians)\n", e->captured.sm_mhz, e->captured.power_w);
    printf("  eager     %9.4f ms   all products fast, attention in any order %9.4f ms\n", e->eager.median_ms,
           r->loose.captured.median_ms);
    printf("  floor     %9.4f ms   product %.4g TFLOP/s, copy %.2f TB/s\n", r->floor_ms,
           1e-12 * r->ceilings.product_flops, 1e-12 * r->ceilings.copy_bytes);
    printf("  replay %.2f us of host time (%.2f to %.2f), both guards %.2f us, capture %.3f s, graph %.1f KiB\n",
           e->launch_us, e->launch_low_us, e->launch_high_us, e->guards_us, e->capture_s,
           (double)e->graph_bytes / 1024);
    print_ops(e);
}

static const qe_layer_shape *shape_named(const char *name) {
    for (int i = 0; i < SHAPES; i++)
        if (strcmp(name, shapes[i].name) == 0) return &shapes[i];
    for (int i = 0; i < OTHERS; i++)
        if (strcmp(name, others[i].name) == 0) return &others[i];
    return NULL;
}

static int run_shape(const qe_cli *cli, const qe_layer_shape *shape, const qe_layer_options *options, double seconds,
                     json_t *list) {
    qe_error error = {0};
    row r = {.shape = shape};
    qe_status status = measure_exact(options, seconds, &r, &error);
    if (status == QE_OK) status = measure_loose(options, seconds, &r, &error);
    if (status != QE_OK) return qe_cli_error(cli, &error);
    if (cli->json)
        json_array_append_new(list, row_json(&r));
    else
        print_row(&r);
    fflush(stdout);
    return QE_EXIT_OK;
}

static int shape_unknown(const qe_cli *cli, const char *name) {
    char names[80] = ""; /* cut where it is too short for all of them */
    for (int i = 0; i < SHAPES + OTHERS; i++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i > 0 ? ", " : "",
                 i < SHAPES ? shapes[i].name : others[i - SHAPES].name);
    return qe_cli_usage(cli, "there is no shape '%s', but %s", name, names);
}

/* A slip in the last shape is told before the first is timed. */
static int run_shapes(qe_cli *cli, const qe_layer_options *options, double seconds) {
    for (int i = 0; i < cli->argument_count; i++)
        if (shape_named(cli->arguments[i]) == NULL)
            return shape_unknown(cli, cli->arguments[i]);
    json_t *list = json_array();
    int status = QE_EXIT_OK;
    if (cli->argument_count == 0 && !qe_device_is_gpu(options->device)) /* h1024 alone takes a host some ten minutes */
        status = run_shape(cli, shape_named("tiny"), options, seconds, list);
    else if (cli->argument_count == 0)
        for (int i = 0; status == QE_EXIT_OK && i < SHAPES; i++)
            status = run_shape(cli, &shapes[i], options, seconds, list);
    for (int i = 0; status == QE_EXIT_OK && i < cli->argument_count; i++)
        status = run_shape(cli, shape_named(cli->arguments[i]), options, seconds, list);
    if (status == QE_EXIT_OK && cli->json)
        return qe_cli_json(json_pack("{s:o}", "layers", list), QE_EXIT_OK);
    json_decref(list);
    return status;
}

static int run_bench_layer(qe_cli *cli) {
    qe_layer_options options = {.recipe = {.kind = QE_RECIPE_DELAYED, .history_length = 16}};
    uint64_t seconds, sets;
    const char *recipe = qe_cli_value(cli, "recipe");
    if (recipe != NULL && qe_recipe_from_name(recipe, &options.recipe.kind) != 0)
        return qe_cli_usage(cli, "--recipe is '%s'; expected delayed, current, block, bf16 or fp32", recipe);
    if (qe_cli_number(cli, "seconds", 1, 600, 2, &seconds) != 0 ||
        qe_cli_number(cli, "sets", 1, QE_LAYER_SETS_MAX, 4, &sets) != 0)
        return QE_EXIT_USAGE;
    options.sets = (uint32_t)sets;
    int status = qe_device_option(cli, QE_DEVICE_CAN_HOST | QE_DEVICE_CAN_GPU, &options.device);
    return status == QE_EXIT_OK ? run_shapes(cli, &options, (double)seconds) : status;
}

static const qe_cli_option options[] = {
    {"device", 0, "NAME", "where to run: host, cuda or te", 0},
    {"recipe", 0, "NAME", "delayed (default), current, block, bf16 or fp32", 0},
    {"seconds", 0, "N", "how long each figure is sustained (default 2)", 0},
    {"sets", 0, "N", "sets of slots that take turns (default 4)", 0},
    {NULL, 0, NULL, NULL, 0},
};

const qe_command qe_command_bench_layer = {
    .name = "bench layer",
    .arguments = "[SHAPE...]",
    .summary = "time one layer, captured and eager, against the floor of its device",
    .details =
        "Forward, input gradient and weight gradient of one decoder layer: gradients are added to main gradients that\n"
        "already hold something, the caches of the weights are filled, data are random, sets of slots take turns so\n"
        "that nothing is warm in a cache. Every figure is sustained; the floor is made of ceilings (a large product,\n"
        "a copy, attention alone) that are measured in the same run. Then the same with every product accumulating\n"
        "fast and attention in any order.\n"
        "\n"
        "Shapes: h1024 (ffn 4096, 16 heads, 1024 tokens), h2048 (8192, 16, 2048), h4096 (14336, 32/8, 2048),\n"
        "h4096-long (8192 tokens); without one, all of them on a GPU, tiny on a host. Besides: 1.1b, a layer of\n"
        "`bench step 1.1b`, and tiny.\n"
        "\n"
        "Examples:\n"
        "  qeffect bench layer --device cuda\n"
        "  qeffect bench layer tiny --seconds 1 --json\n",
    .options = options,
    .arguments_min = 0,
    .arguments_max = SHAPES + OTHERS,
    .run = run_bench_layer,
};
