/* command_bench_placement.c - `qeffect bench placement`: gradients accumulated in place against gradients that are
 * copied, in one run with the same bits; what that saves, and what the bytes say it should save. */
#include <stdlib.h>
#include <string.h>
#include <jansson.h>
#include "base/assert.h"
#include "cli/bench_deposits.h"

enum { DIRECT, COPY, WAYS, SHAPE_NAME_BYTES = 48 };

typedef struct row {
    char name[SHAPE_NAME_BYTES];
    qe_settings settings;
    double step_ms[WAYS];
    qe_bench_spread ratio;             /* copy over direct */
    uint64_t copies[WAYS];             /* of a step, counted as they were submitted */
    uint64_t linear_copies;            /* of them gradients of quantized linears */
    double moved_bytes, summed_bytes;  /* that the copies of a step read and write: moves, and additions */
    uint64_t launches;                 /* of them */
    double saved_ms, bytes_ms;         /* measured; and what these bytes take at the rates of large ones */
    qe_bench_deposits deposits;        /* what they take at their own sizes, and products that need not read */
    char hash[WAYS][QE_STATE_HASH_BYTES];
    char backend[176];
} row;

typedef struct bench {
    qe_cli *cli;
    qe_device_kind device;
    uint64_t steps, pairs, rest_ms;
    qe_bench_ceilings ceilings;
    qe_bench_run *run[WAYS];
    row row;
    json_t *list;
    int differs;
} bench;

/* What copies read and write, from the plan: a move reads and writes the gradient once, an addition reads what is there
 * too; and how many ops that are. */
static void count_planned(row *r, const qe_plan *plan) {
    for (uint32_t rank = 0; rank < plan->ranks; rank++)
        for (uint32_t u = 0; u < plan->rank[rank].unit_count; u++) {
            const qe_unit *unit = &plan->rank[rank].units[u];
            if (unit->kind != QE_UNIT_GRAD_OUT && unit->kind != QE_UNIT_GRAD_IN) continue;
            const qe_weight_info *info = plan->model_ops->weight(plan->model, unit->weight);
            int adds = !unit->set && qe_plan_adds_apart(plan, unit->weight);
            double values_bytes = (double)sizeof(float) * info->rows * info->columns;
            if (adds) r->summed_bytes += 3.0 * values_bytes;
            else r->moved_bytes += 2.0 * values_bytes;
            r->launches++;
            r->linear_copies += unit->kind == QE_UNIT_GRAD_OUT && info->scaled;
        }
}

static qe_status open_way(bench *b, int way, qe_error *error) {
    qe_settings settings = b->row.settings;
    settings.pipeline.placement = way == COPY ? QE_PLACEMENT_COPY : QE_PLACEMENT_DIRECT;
    QE_TRY(qe_bench_run_open(b->run[way], &settings, b->device, error));
    b->run[way]->rest_ms = b->rest_ms;
    b->row.copies[way] = b->run[way]->last.gradient_copies;
    memcpy(b->row.backend, b->run[way]->session.backend, sizeof b->row.backend);
    if (way == COPY) count_planned(&b->row, b->run[COPY]->session.train);
    return QE_OK;
}

static qe_status hash_way(bench *b, int way, qe_error *error) {
    return qe_team_state_hash(b->run[way]->session.team, b->row.hash[way], error);
}

static qe_status foretell(bench *b, qe_error *error) {
    return qe_bench_deposits_measure(b->run[COPY], b->steps, b->pairs, &b->row.deposits, error);
}

/* The two take turns, and who begins changes. */
static qe_status take_turns(bench *b, qe_error *error) {
    for (int way = 0; way < WAYS; way++) QE_TRY(open_way(b, way, error));
    for (uint64_t pair = 0; pair < b->pairs; pair++)
        for (uint64_t turn = 0; turn < WAYS; turn++)
            QE_TRY(qe_bench_run_steps(b->run[(turn + pair) % WAYS], b->steps, error));
    for (int way = 0; way < WAYS; way++) QE_TRY(hash_way(b, way, error));
    return foretell(b, error);
}

/* Streams of two teams of several ranks are more than a GPU has connections for, and one that waits would hold up
 * another. */
static qe_status one_by_one(bench *b, qe_error *error) {
    for (int way = 0; way < WAYS; way++) {
        QE_TRY(open_way(b, way, error));
        QE_TRY(qe_bench_run_steps(b->run[way], b->pairs * b->steps, error));
        QE_TRY(hash_way(b, way, error));
        if (way == COPY) QE_TRY(foretell(b, error));
        qe_bench_run_close(b->run[way]);
    }
    return QE_OK;
}

static double sum_of(const double *values, uint64_t count) {
    double sum = 0;
    for (uint64_t i = 0; i < count; i++) sum += values[i];
    return sum;
}

static void take_figures(bench *b) {
    row *r = &b->row;
    double ratios[QE_BENCH_RUN_STEPS_MAX];
    for (int way = 0; way < WAYS; way++) r->step_ms[way] = qe_bench_run_step_ms(b->run[way]);
    for (uint64_t pair = 0; pair < b->pairs; pair++)
        ratios[pair] = sum_of(b->run[COPY]->step_s + pair * b->steps, b->steps) /
                       sum_of(b->run[DIRECT]->step_s + pair * b->steps, b->steps);
    r->ratio.median = qe_bench_median(ratios, b->pairs); /* sorts */
    r->ratio.low = ratios[b->pairs / 4];
    r->ratio.high = ratios[b->pairs - 1 - b->pairs / 4];
    r->saved_ms = r->step_ms[COPY] - r->step_ms[DIRECT];
    r->bytes_ms = 1e3 * (r->moved_bytes / b->ceilings.copy_bytes + r->summed_bytes / b->ceilings.sum_bytes);
    b->differs |= strcmp(r->hash[DIRECT], r->hash[COPY]) != 0;
}

static qe_status measure(bench *b, qe_error *error) {
    qe_bench_choices choices;
    qe_status status = qe_bench_choices_open(&choices, b->device, &b->row.settings, error);
    int together = !qe_device_is_gpu(b->device) || b->row.settings.pipeline.ranks == 1;
    if (status == QE_OK) status = together ? take_turns(b, error) : one_by_one(b, error);
    if (status == QE_OK) take_figures(b);
    for (int way = WAYS; way-- > 0;) qe_bench_run_close(b->run[way]);
    qe_bench_choices_close(&choices);
    return status;
}

static double foretold_ms(const row *r) {
    return r->deposits.copies_ms - r->deposits.reads_ms;
}

static json_t *row_json(const bench *b) {
    const row *r = &b->row;
    const qe_settings *s = &r->settings;
    json_t *spread = json_pack("{s:f, s:f, s:f}", "median", r->ratio.median, "quartile_low", r->ratio.low,
                               "quartile_high", r->ratio.high);
    json_t *document = json_pack(
        "{s:s, s:s, s:i, s:i, s:i, s:i, s:s, s:i, s:i}", "shape", r->name, "backend", r->backend, "layers",
        (int)s->model.layers, "hidden", (int)s->model.hidden, "ffn", (int)s->model.ffn, "microbatch_tokens",
        (int)(s->model.sequence * s->train.sequences), "schedule", s->pipeline.schedule, "ranks",
        (int)s->pipeline.ranks, "microbatches", (int)s->pipeline.microbatches);
    json_object_set_new(document, "rest_ms", json_integer((json_int_t)b->rest_ms));
    json_object_set_new(document, "direct_step_ms", json_real(r->step_ms[DIRECT]));
    json_object_set_new(document, "copy_step_ms", json_real(r->step_ms[COPY]));
    json_object_set_new(document, "copy_over_direct", spread);
    json_object_set_new(document, "direct_copies", json_integer((json_int_t)r->copies[DIRECT]));
    json_object_set_new(document, "copy_copies", json_integer((json_int_t)r->copies[COPY]));
    json_object_set_new(document, "copy_linear_copies", json_integer((json_int_t)r->linear_copies));
    json_object_set_new(document, "copy_bytes", json_real(r->moved_bytes + r->summed_bytes));
    json_object_set_new(document, "copy_launches", json_integer((json_int_t)r->launches));
    json_object_set_new(document, "saved_ms", json_real(r->saved_ms));
    json_object_set_new(document, "bytes_ms", json_real(r->bytes_ms));
    json_object_set_new(document, "copies_ms", json_real(r->deposits.copies_ms));
    json_object_set_new(document, "read_bytes", json_real(r->deposits.read_bytes));
    json_object_set_new(document, "reads_ms", json_real(r->deposits.reads_ms));
    json_object_set_new(document, "predicted_ms", json_real(foretold_ms(r)));
    json_object_set_new(document, "direct_state_hash", json_string(r->hash[DIRECT]));
    json_object_set_new(document, "copy_state_hash", json_string(r->hash[COPY]));
    json_object_set_new(document, "same_bits", json_boolean(strcmp(r->hash[DIRECT], r->hash[COPY]) == 0));
    return document;
}

static double rate_tb(double bytes, double ms) {
    return ms > 0 ? 1e-9 * bytes / ms : 0;
}

static void print_saved(const row *r) {
    const qe_bench_deposits *d = &r->deposits;
    double copied = r->moved_bytes + r->summed_bytes;
    printf("  saved           %9.3f ms   foretold %7.3f ms   saved / foretold %.2f\n", r->saved_ms, foretold_ms(r),
           r->saved_ms / foretold_ms(r));
    printf("  foretold        %9.3f ms for %.3f GB in %llu copies, each way counted (%.2f TB/s)", d->copies_ms,
           1e-9 * copied, (unsigned long long)r->launches, rate_tb(copied, d->copies_ms));
    if (d->read_bytes > 0)
        printf(", less %.3f ms for %.3f GB that products do not read (%.2f TB/s)", d->reads_ms, 1e-9 * d->read_bytes,
               rate_tb(d->read_bytes, d->reads_ms));
    printf("\n");
    printf("  at large rates  %9.3f ms for the copies   saved / that %.2f\n", r->bytes_ms, r->saved_ms / r->bytes_ms);
}

static void print_row(const bench *b) {
    const row *r = &b->row;
    const qe_settings *s = &r->settings;
    printf("%s: %u layer%s, hidden %u, ffn %u, %s, %u rank%s, %u microbatch%s of %u tokens on %s\n", r->name,
           s->model.layers, qe_cli_s(s->model.layers), s->model.hidden, s->model.ffn, s->pipeline.schedule,
           s->pipeline.ranks, qe_cli_s(s->pipeline.ranks), s->pipeline.microbatches,
           qe_cli_es(s->pipeline.microbatches), s->model.sequence * s->train.sequences, r->backend);
    if (b->rest_ms > 0) printf("  rest            %9llu ms before every step\n", (unsigned long long)b->rest_ms);
    printf("  step            direct %9.3f ms   copy %9.3f ms   copy / direct %.3f (%.3f .. %.3f)\n",
           r->step_ms[DIRECT], r->step_ms[COPY], r->ratio.median, r->ratio.low, r->ratio.high);
    printf("  gradient copies direct %9llu      copy %9llu      of them of quantized linears %llu\n",
           (unsigned long long)r->copies[DIRECT], (unsigned long long)r->copies[COPY],
           (unsigned long long)r->linear_copies);
    print_saved(r);
    printf("  state           direct %s\n                  copy   %s\n", r->hash[DIRECT], r->hash[COPY]);
}

/* Of 128 elements, or of 16; one head where neither divides. */
static uint32_t head_count(uint32_t hidden) {
    uint32_t elements = hidden % 128 == 0 ? 128 : 16;
    return hidden % elements == 0 ? hidden / elements : 1;
}

/* A size behind `letter`: digits alone, none of them a zero in front. Moves *text behind it; 0: there is none. */
static uint32_t read_size(const char **text, char letter) {
    enum { SIZE_MOST = 65536 }; /* as model.hidden and model.sequence */
    const char *at = *text;
    uint32_t size = 0;
    if (*at != letter || at[1] == '0') return 0;
    for (at++; *at >= '0' && *at <= '9'; at++) {
        size = 10 * size + (uint32_t)(*at - '0');
        if (size > SIZE_MOST) return 0;
    }
    *text = at;
    return size;
}

/* "reference", or hHIDDEN-tTOKENS: 4 layers over 4 ranks under zbh1, 8 microbatches of so many tokens; with -alone
 * behind it one rank under 1f1b, whose copies run beside nothing. */
static int shape_of(const char *name, qe_bench_shape *shape_out) {
    static const qe_bench_shape reference = {"reference", 3, 64, 96, 4, 2, 256, 32, 1, "1f1b", 1, 8};
    const char *rest = name;
    if (strcmp(name, reference.name) == 0) {
        *shape_out = reference;
        return 1;
    }
    uint32_t hidden = read_size(&rest, 'h');
    if (hidden == 0 || *rest++ != '-') return 0;
    uint32_t tokens = read_size(&rest, 't');
    int alone = strcmp(rest, "-alone") == 0;
    if (tokens == 0 || (*rest != '\0' && !alone)) return 0;
    uint32_t windows = tokens % 1024 == 0 ? tokens / 1024 : 1;
    *shape_out = (qe_bench_shape){.name = name, .layers = 4, .hidden = hidden, .ffn = 4 * hidden, .vocab = 256,
                                  .sequence = tokens / windows, .sequences = windows, .microbatches = 8};
    shape_out->schedule = alone ? "1f1b" : "zbh1";
    shape_out->ranks = alone ? 1 : 4;
    shape_out->heads = shape_out->kv_heads = head_count(hidden);
    return 1;
}

static int name_shape(bench *b, const char *name) {
    qe_bench_shape shape;
    memset(&b->row, 0, sizeof b->row);
    if (strlen(name) >= SHAPE_NAME_BYTES || !shape_of(name, &shape))
        return qe_cli_usage(b->cli, "there is no shape '%s', but reference and hHIDDEN-tTOKENS, such as "
                            "h2048-t1024, with or without -alone behind it", name);
    snprintf(b->row.name, sizeof b->row.name, "%s", name);
    return qe_bench_shape_settings(b->cli, &shape, &b->row.settings);
}

static int run_shape(bench *b, const char *name) {
    qe_error error = {0};
    int status = name_shape(b, name);
    if (status != QE_EXIT_OK) return status;
    if (measure(b, &error) != QE_OK) return qe_cli_error(b->cli, &error);
    if (b->cli->json) json_array_append_new(b->list, row_json(b));
    else print_row(b);
    fflush(stdout);
    return QE_EXIT_OK;
}

/* A slip in the last shape is told before the first is timed. */
static int run_shapes(bench *b) {
    qe_error error = {0};
    const char *usual = qe_device_is_gpu(b->device) ? "h2048-t1024" : "reference";
    const char *const *names = b->cli->argument_count == 0 ? &usual : (const char *const *)b->cli->arguments;
    int count = b->cli->argument_count == 0 ? 1 : b->cli->argument_count, status = QE_EXIT_OK;
    for (int i = 0; status == QE_EXIT_OK && i < count; i++) status = name_shape(b, names[i]);
    if (status != QE_EXIT_OK) return status;
    qe_device_unused_print(b->device, &b->row.settings);
    if (qe_bench_run_ceilings(b->device, &b->ceilings, &error) != QE_OK) return qe_cli_error(b->cli, &error);
    for (int i = 0; status == QE_EXIT_OK && i < count; i++) status = run_shape(b, names[i]);
    if (status == QE_EXIT_OK && b->differs) status = QE_EXIT_DIFFERS;
    int told = status == QE_EXIT_OK || status == QE_EXIT_DIFFERS;
    if (!told) return status;
    if (!b->cli->json) {
        printf("rates: a large copy %.3f TB/s, a large addition %.3f TB/s\n", 1e-12 * b->ceilings.copy_bytes,
               1e-12 * b->ceilings.sum_bytes);
        return status;
    }
    return qe_cli_json(json_pack("{s:f, s:f, s:O}", "copy_bytes_per_s", b->ceilings.copy_bytes, "sum_bytes_per_s",
                                 b->ceilings.sum_bytes, "rows", b->list),
                       status);
}

static int run_bench_placement(qe_cli *cli) {
    bench b = {.cli = cli};
    if (qe_cli_number(cli, "steps", 1, 100, 3, &b.steps) != 0 || qe_cli_number(cli, "pairs", 1, 10, 5, &b.pairs) != 0 ||
        qe_cli_number(cli, "rest", 0, 1000, 0, &b.rest_ms) != 0)
        return QE_EXIT_USAGE;
    QE_ASSERT(100 * 10 <= QE_BENCH_RUN_STEPS_MAX);
    int status = qe_device_option(cli, QE_DEVICE_CAN_HOST | QE_DEVICE_CAN_CHECK | QE_DEVICE_CAN_GPU, &b.device);
    if (status != QE_EXIT_OK) return status;
    b.list = json_array();
    for (int way = 0; way < WAYS; way++) b.run[way] = calloc(1, sizeof *b.run[way]);
    if (b.run[DIRECT] != NULL && b.run[COPY] != NULL) {
        status = run_shapes(&b);
    } else {
        qe_error error;
        (void)qe_error_set(&error, QE_ERROR_MEMORY, NULL, "no memory to time steps");
        status = qe_cli_error(cli, &error);
    }
    json_decref(b.list);
    for (int way = 0; way < WAYS; way++) free(b.run[way]);
    return status;
}

static const qe_cli_option options[] = {
    {"device", 0, "NAME", "where to run: host, cuda, te or check", 0},
    {"steps", 0, "N", "steps of a turn (default 3)", 0},
    {"pairs", 0, "K", "turns of each (default 5)", 0},
    {"rest", 0, "MS", "pause before every step, so that a chip is not at its limit of power (default 0)", 0},
    {"set", 0, "KEY=VALUE", "override one setting, e.g. pipeline.schedule=1f1b (docs/config.md)", 1},
    {NULL, 0, NULL, NULL, 0},
};

const qe_command qe_command_bench_placement = {
    .name = "bench placement",
    .arguments = "[SHAPE...]",
    .summary = "time gradients placed directly against gradients copied: same bits, fewer bytes",
    .details =
        "Two runs from the same random weights take turns (ranks that share a GPU: one run after the other): one\n"
        "accumulates every weight gradient where it lives, the other in memory that belongs to its graph, from which\n"
        "it goes on behind every microbatch (docs/placement.md). Prints both step times, how many gradients were\n"
        "copied in a step, what was saved and what was foretold, and the state's hash of both: other bits are exit\n"
        "status 4.\n"
        "\n"
        "Foretold: the bytes that copies move, over the rate at which the same kernels move them at the same sizes\n"
        "behind products; less what products read that add in place, over the rate of that. Both rates are timed in\n"
        "the same run, without a step, on other memory. Beside it, what the copies would take at the rates of a\n"
        "large copy and a large addition.\n"
        "\n"
        "A chip at its limit of power slows down with every product, and a copy, which takes less power, gives some\n"
        "of that back. --rest 150 lets it rest before every step and every timing.\n"
        "\n"
        "Shapes: hHIDDEN-tTOKENS, e.g. h2048-t1024 (the default on cuda): 4 layers over 4 ranks of one process,\n"
        "ffn 4 hidden, zbh1, 8 microbatches of so many tokens; with -alone behind it one rank under 1f1b, whose\n"
        "copies run beside nothing; reference (the host's default): 3 layers, one rank, 8 microbatches.\n"
        "\n"
        "Examples:\n"
        "  qeffect bench placement\n"
        "  qeffect bench placement h1024-t1024 h2048-t1024 h4096-t1024 --device cuda --json\n",
    .options = options,
    .arguments_min = 0,
    .arguments_max = 32,
    .run = run_bench_placement,
};
