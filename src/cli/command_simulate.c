/* command_simulate.c - `qeffect simulate`: what a schedule costs, in thought and for real, and its pictures. */
#include <math.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include <jansson.h>
#include "cli/measure.h"
#include "cli/output.h"
#include "cli/schedule_argument.h"
#include "cli/search_argument.h"
#include "cli/times.h"
#include "qeffect/draw.h"

#define LATENESS 0.01 /* of actions, on an idle machine: a tenth of this */

enum { TITLE_BYTES = 256, COLUMNS_USUAL = 100, COLUMNS_LEAST = 24, STEPS_USUAL = 3 };

typedef struct simulate {
    const qe_cli *cli;
    const char *argument;
    qe_schedule schedule;
    qe_times times;
    qe_simulation_request request;
    qe_simulation predicted, measured;
    uint32_t steps; /* 0: nothing is measured */
    uint64_t columns; /* of the chart */
    double makespans[QE_MEASURE_STEPS_MAX];
    double tolerance;
} simulate;

/* ---- options ---- */

/* One of two words; the first where the option is absent. Returns 0 or 1, or -1 after printing usage text. */
static int one_of(const qe_cli *cli, const char *name, const char *first, const char *second) {
    const char *text = qe_cli_value(cli, name);
    if (text == NULL || strcmp(text, first) == 0) return 0;
    if (strcmp(text, second) == 0) return 1;
    qe_cli_usage(cli, "--%s is '%s'; expected %s or %s", name, text, first, second);
    return -1;
}

static int read_rules(simulate *s) {
    const qe_cli *cli = s->cli;
    int release = one_of(cli, "release", "pair", "op"), sync = one_of(cli, "sync", "all", "none");
    int gradient = one_of(cli, "gradient", "end", "early");
    if (release < 0 || sync < 0 || gradient < 0) return QE_EXIT_USAGE;
    s->request.release = release ? QE_RELEASE_OP : QE_RELEASE_PAIR;
    s->request.sync = sync ? QE_SYNC_NONE : QE_SYNC_ALL;
    s->request.gradient_early = s->request.backward_splits = gradient;
    return QE_EXIT_OK;
}

static int read_costs(simulate *s) {
    double optimizer, boundary;
    if (qe_times_number(s->cli, "optimizer", 0.0, &optimizer) != 0) return QE_EXIT_USAGE;
    if (qe_times_number(s->cli, "meet", 0.0, &s->request.meet) != 0) return QE_EXIT_USAGE;
    if (qe_times_positive(s->cli, "pair", &s->request.pair) != 0) return QE_EXIT_USAGE;
    if (qe_times_positive(s->cli, "bandwidth", &s->request.bandwidth) != 0) return QE_EXIT_USAGE;
    if (qe_times_number(s->cli, "boundary", 0.0, &boundary) != 0) return QE_EXIT_USAGE;
    if ((s->request.bandwidth > 0.0) != (boundary > 0.0)) {
        return qe_cli_usage(s->cli, "--boundary and --bandwidth go together: bytes, and bytes per unit of time");
    }
    uint32_t stages = s->schedule.stages;
    for (uint32_t stage = 0; stage < stages; stage++) {
        s->times.costs[stage].optimizer = optimizer * s->schedule.ranks / stages;
        s->times.costs[stage].output = s->times.costs[stage].gradient = boundary;
    }
    return QE_EXIT_OK;
}

/* What a real step does decides these: asking for something else could only make the prediction wrong. */
static const char *option_against_measuring(const qe_cli *cli) {
    static const char *const options[] = {"release", "gradient", "pair", "bandwidth", "boundary", "forward-only"};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        if (qe_cli_has(cli, options[i])) return options[i];
    }
    return NULL;
}

static int check_measurable(const simulate *s) {
    for (uint32_t stage = 0; stage < s->schedule.stages; stage++) {
        for (int kind = QE_ACTION_F; kind <= QE_ACTION_W; kind++) {
            double ms = s->times.costs[stage].time[kind];
            if (ms >= QE_MEASURE_LEAST_MS) continue;
            return qe_cli_usage(s->cli, "--measured needs actions of %d ms and more; one of stage %u takes %g "
                                "(--times are of a whole rank)", QE_MEASURE_LEAST_MS, stage, ms);
        }
    }
    if (s->times.hop == 0.0) return QE_EXIT_OK;
    return qe_cli_usage(s->cli, "--measured has the hops of this machine; leave the fourth of --times out");
}

static int read_measured(simulate *s) {
    uint64_t steps;
    if (qe_times_number(s->cli, "tolerance", 3.0, &s->tolerance) != 0) return QE_EXIT_USAGE;
    if (qe_cli_number(s->cli, "steps", 1, QE_MEASURE_STEPS_MAX, STEPS_USUAL, &steps) != 0) return QE_EXIT_USAGE;
    if (!qe_cli_has(s->cli, "measured")) {
        if (!qe_cli_has(s->cli, "steps") && !qe_cli_has(s->cli, "tolerance")) return QE_EXIT_OK;
        return qe_cli_usage(s->cli, "--steps and --tolerance go with --measured");
    }
    const char *against = option_against_measuring(s->cli);
    if (against != NULL) return qe_cli_usage(s->cli, "--%s does not go with --measured", against);
    s->steps = (uint32_t)steps;
    s->request.release = QE_RELEASE_OP;
    s->request.gradient_early = s->request.backward_splits = 1;
    return check_measurable(s);
}

static uint32_t terminal_columns(void) {
    struct winsize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col < COLUMNS_LEAST) return COLUMNS_USUAL;
    return size.ws_col;
}

static int read_options(simulate *s) {
    uint32_t usual = terminal_columns();
    if (qe_cli_number(s->cli, "width", COLUMNS_LEAST, UINT16_MAX, usual, &s->columns) != 0) return QE_EXIT_USAGE;
    int status = qe_cli_apart(s->cli, "svg", "timeline");
    if (status == QE_EXIT_OK) status = qe_cli_try_output(s->cli, "svg");
    if (status == QE_EXIT_OK) status = qe_cli_try_output(s->cli, "timeline");
    if (status == QE_EXIT_OK) status = qe_times_read(s->cli, &s->schedule, &s->times);
    if (status == QE_EXIT_OK) status = read_rules(s);
    if (status == QE_EXIT_OK) status = read_costs(s);
    if (status == QE_EXIT_OK) status = read_measured(s);
    if (status != QE_EXIT_OK) return status;
    s->request.schedule = &s->schedule;
    s->request.costs = s->times.costs;
    s->request.cost_count = s->schedule.stages;
    s->request.latency = s->times.hop;
    return QE_EXIT_OK;
}

/* ---- pictures ---- */

static const qe_simulation *shown(const simulate *s) { return s->steps > 0 ? &s->measured : &s->predicted; }

typedef struct picture {
    qe_drawing drawing;
    char title[TITLE_BYTES];
} picture;

static const char *sizes_of(const simulate *s, char text_out[QE_CLI_SIZES_BYTES]) {
    return qe_cli_sizes(s->schedule.ranks, s->schedule.stages, s->schedule.microbatches, text_out);
}

static void make_picture(const simulate *s, picture *out) {
    char sizes[QE_CLI_SIZES_BYTES];
    (void)snprintf(out->title, sizeof out->title, "%s: %s%s", s->argument, sizes_of(s, sizes),
                   s->steps > 0 ? " (measured)" : "");
    out->drawing = (qe_drawing){.schedule = &s->schedule, .simulation = shown(s), .title = out->title,
                                .unit = s->steps > 0 ? "ms" : "", .unit_us = 1000.0};
}

static qe_status write_svg(const void *drawing, FILE *file, qe_error *error_out) {
    return qe_draw_svg(drawing, file, error_out);
}

static qe_status write_timeline(const void *drawing, FILE *file, qe_error *error_out) {
    return qe_draw_timeline(drawing, file, error_out);
}

static int write_picture(const simulate *s, const char *option, qe_cli_writer *writer) {
    picture made;
    const char *path = qe_cli_value(s->cli, option);
    if (path == NULL) return QE_EXIT_OK;
    make_picture(s, &made);
    return qe_cli_write_file(s->cli, path, writer, &made.drawing);
}

static int print_chart(const simulate *s) {
    picture made;
    qe_error error = {0};
    if (!qe_cli_has(s->cli, "chart") || s->cli->json) return QE_EXIT_OK;
    make_picture(s, &made);
    if (qe_draw_text(&made.drawing, (uint32_t)s->columns, stdout, &error) != QE_OK) return qe_cli_error(s->cli, &error);
    printf("F forward, I input gradient, W weight gradient, B full backward; a number is the microbatch, a small\n"
           "letter every second chunk (or the way back), a dot a wait.\n");
    return QE_EXIT_OK;
}

/* ---- reports ---- */

static double share(double part, double whole) { return whole > 0.0 ? part / whole : 0.0; }

static int exceeds_limit(const simulate *s) {
    return s->times.memory_limit > 0.0 && s->predicted.peak_kept > s->times.memory_limit * (1.0 + 1e-12);
}

static double difference(const simulate *s) { return share(s->measured.makespan, s->predicted.makespan) - 1.0; }

static double all_busy(const qe_simulation *times) {
    double busy = 0.0;
    for (uint32_t rank = 0; rank < times->ranks_count; rank++) busy += times->ranks[rank].busy;
    return busy;
}

/* How much longer than asked the actions took, beside the asked: not the schedule's doing, but the machine's. */
static double lateness(const simulate *s) { return share(all_busy(&s->measured), all_busy(&s->predicted)) - 1.0; }

static int differs(const simulate *s) { return s->steps > 0 && fabs(difference(s)) > s->tolerance / 100.0; }

static int exit_status(const simulate *s) {
    if (exceeds_limit(s)) return QE_EXIT_CONTRACT;
    return differs(s) ? QE_EXIT_DIFFERS : QE_EXIT_OK;
}

static uint32_t most(const qe_simulation *times, qe_keep keep) {
    uint32_t largest = 0;
    for (uint32_t rank = 0; rank < times->ranks_count; rank++) {
        if (times->ranks[rank].peak[keep] > largest) largest = times->ranks[rank].peak[keep];
    }
    return largest;
}

static void print_figures(const simulate *s) {
    const qe_simulation *p = &s->predicted;
    printf("%-18s %12.4f   the busiest rank works %.4f\n", "makespan", p->makespan, p->work);
    printf("%-18s %12.4f   %5.2f%% of the makespan: lost where the optimizer waits for all ranks\n", "makespan bubble",
           p->makespan_bubble, 100.0 * share(p->makespan_bubble, p->makespan));
    printf("%-18s %12.4f   %5.2f%% of a rank's span: lost where it does not\n", "stage bubble", p->stage_bubble,
           100.0 * share(p->stage_bubble, p->span));
    printf("%-18s %12.4f   with the optimizer\n", "step", p->step);
    printf("%-18s %12.4f   microbatches of a whole rank\n", "peak activation", p->peak_kept);
    printf("%-18s %12u   (stage, microbatch) pairs\n", "pending W", most(p, QE_KEEP_W));
}

static void print_ranks(const simulate *s) {
    printf("\n%6s %11s %11s %11s %11s %11s %7s %7s %7s\n", "rank", "begin", "end", "busy", "wait", "kept", "slots I",
           "slots X", "slots W");
    for (uint32_t i = 0; i < s->predicted.ranks_count; i++) {
        const qe_simulated_rank *r = &s->predicted.ranks[i];
        printf("%6u %11.4f %11.4f %11.4f %11.4f %11.4f %7u %7u %7u\n", i, r->begin, r->end, r->busy,
               r->end - r->begin - r->busy, r->peak_kept, r->peak[QE_KEEP_I], r->peak[QE_KEEP_X], r->peak[QE_KEEP_W]);
    }
}

static void print_measured(const simulate *s) {
    const qe_simulation *p = &s->predicted, *m = &s->measured;
    double largest = m->makespan;
    for (uint32_t i = 0; i < s->steps; i++) largest = fmax(largest, s->makespans[i]);
    printf("\nmeasured on the host, the shortest of %u step%s of %.2f to %.2f ms\n", s->steps,
           qe_cli_s(s->steps), m->makespan, largest);
    printf("%-18s %12s %12s %9s\n", "", "predicted", "measured", "differs");
    printf("%-18s %12.3f %12.3f %+8.2f%%\n", "makespan", p->makespan, m->makespan, 100.0 * difference(s));
    printf("%-18s %12.3f %12.3f\n", "makespan bubble", p->makespan_bubble, m->makespan_bubble);
    printf("%-18s %12.3f %12.3f\n", "stage bubble", p->stage_bubble, m->stage_bubble);
    printf("%-18s %12.3f %12.3f %+8.2f%%\n", "all actions", all_busy(p), all_busy(m), 100.0 * lateness(s));
    if (differs(s)) printf("the prediction is not within %g%%\n", s->tolerance);
    if (differs(s) && lateness(s) > LATENESS) printf("actions took longer than asked: the machine is busy\n");
}

static int print_report(const simulate *s) {
    char sizes[QE_CLI_SIZES_BYTES];
    printf("%s: %s, %u actions\n", s->argument, sizes_of(s, sizes), s->predicted.actions_count);
    print_figures(s);
    print_ranks(s);
    if (s->steps > 0) print_measured(s);
    if (exceeds_limit(s)) {
        printf("\nkeeps %.4f microbatches of a whole rank; at most %g are allowed\n", s->predicted.peak_kept,
               s->times.memory_limit);
    }
    if (qe_cli_has(s->cli, "chart")) printf("\n");
    int status = print_chart(s);
    return status == QE_EXIT_OK ? exit_status(s) : status;
}

static json_t *json_ranks(const qe_simulation *times) {
    json_t *ranks = json_array();
    for (uint32_t i = 0; i < times->ranks_count; i++) {
        const qe_simulated_rank *r = &times->ranks[i];
        (void)json_array_append_new(
            ranks, json_pack("{s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:i, s:i, s:i}", "rank", (int)i, "begin", r->begin,
                             "end", r->end, "busy", r->busy, "wait", r->end - r->begin - r->busy, "optimizer_end",
                             r->optimizer_end, "peak_activation", r->peak_kept, "peak_slots_i",
                             (int)r->peak[QE_KEEP_I], "peak_slots_x", (int)r->peak[QE_KEEP_X], "peak_pending_weights",
                             (int)r->peak[QE_KEEP_W]));
    }
    return ranks;
}

static void json_figures(json_t *to, const qe_simulation *times) {
    json_t *figures = json_pack(
        "{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:i}", "makespan", times->makespan, "span", times->span, "work",
        times->work, "makespan_bubble", times->makespan_bubble, "makespan_bubble_rate",
        share(times->makespan_bubble, times->makespan), "stage_bubble", times->stage_bubble, "stage_bubble_rate",
        share(times->stage_bubble, times->span), "step", times->step, "peak_activation", times->peak_kept,
        "peak_pending_weights", (int)most(times, QE_KEEP_W));
    (void)json_object_update(to, figures);
    json_decref(figures);
    (void)json_object_set_new(to, "per_rank", json_ranks(times));
}

static json_t *json_measured(const simulate *s) {
    json_t *measured = json_object(), *steps = json_array();
    json_figures(measured, &s->measured);
    for (uint32_t i = 0; i < s->steps; i++) (void)json_array_append_new(steps, json_real(s->makespans[i]));
    (void)json_object_set_new(measured, "steps_ms", steps);
    (void)json_object_set_new(measured, "difference", json_real(difference(s)));
    (void)json_object_set_new(measured, "lateness", json_real(lateness(s)));
    (void)json_object_set_new(measured, "within_tolerance", json_boolean(!differs(s)));
    return measured;
}

static int json_report(const simulate *s) {
    json_t *document = qe_schedule_argument_json(s->argument, &s->schedule);
    json_figures(document, &s->predicted);
    if (s->times.memory_limit > 0.0) {
        (void)json_object_set_new(document, "memory_limit", json_real(s->times.memory_limit));
        (void)json_object_set_new(document, "within_memory_limit", json_boolean(!exceeds_limit(s)));
    }
    if (s->steps > 0) (void)json_object_set_new(document, "measured", json_measured(s));
    return qe_cli_json(document, exit_status(s));
}

/* ---- the command ---- */

static int run_both(simulate *s) {
    qe_error error = {0};
    qe_status status = qe_simulation_run(&s->request, &s->predicted, &error);
    if (status == QE_OK && s->steps > 0) {
        status = qe_measure(&s->request, s->steps, &s->measured, s->makespans, &error);
    }
    return status == QE_OK ? QE_EXIT_OK : qe_cli_error(s->cli, &error);
}

/* Puts the order that is best for all these times and rules into the place of the one they were read for. */
static int search_schedule(simulate *s) {
    qe_search_result result;
    if (!qe_search_argument_is(s->argument)) return QE_EXIT_OK;
    int status = qe_search_argument_run(s->cli, &s->schedule, &s->request, s->times.memory_limit, &result);
    if (status != QE_EXIT_OK) return status;
    qe_schedule_deinit(&s->schedule);
    s->schedule = result.schedule;
    return QE_EXIT_OK;
}

static int simulate_schedule(simulate *s) {
    int status = read_options(s);
    if (status == QE_EXIT_OK) status = search_schedule(s);
    if (status == QE_EXIT_OK) status = qe_schedule_argument_check(s->cli, s->argument, &s->schedule);
    if (status == QE_EXIT_OK) status = run_both(s);
    if (status == QE_EXIT_OK) status = write_picture(s, "svg", write_svg);
    if (status == QE_EXIT_OK) status = write_picture(s, "timeline", write_timeline);
    if (status != QE_EXIT_OK) return status;
    return s->cli->json ? json_report(s) : print_report(s);
}

static int run_simulate(qe_cli *cli) {
    simulate s = {.cli = cli, .argument = cli->arguments[0]};
    int status = qe_search_argument_is(s.argument) ? qe_search_argument_shape(cli, &s.schedule)
                                                   : qe_schedule_argument_load(cli, s.argument, &s.schedule);
    if (status != QE_EXIT_OK) return status;
    status = simulate_schedule(&s);
    qe_simulation_deinit(&s.predicted);
    qe_simulation_deinit(&s.measured);
    qe_times_deinit(&s.times);
    qe_schedule_deinit(&s.schedule);
    return status;
}

static const qe_cli_option OPTIONS[] = {
    QE_SCHEDULE_OPTIONS,
    QE_TIMES_OPTIONS,
    QE_SEARCH_OPTIONS,
    {"boundary", 0, "BYTES", "bytes that pass a boundary between stages", 0},
    {"bandwidth", 0, "RATE", "bytes per unit of time between two ranks, each way", 0},
    {"release", 0, "pair|op", "halves of a pair send at its end (default), or each at its own", 0},
    {"pair", 0, "X", "time of a pair / time of its halves (default 1)", 0},
    {"gradient", 0, "end|early", "a B sends at its end (default), or as an I and a W would", 0},
    {"sync", 0, "all|none", "optimizers wait for all ranks (default), or for none", 0},
    {"optimizer", 0, "T", "time of a rank's optimizer (default 0)", 0},
    {"meet", 0, "T", "from the last action to the optimizers (default 0)", 0},
    {"measured", 0, NULL, "run it on this host, too, with actions that sleep: times in ms", 0},
    {"steps", 0, "N", "steps to measure (default 3)", 0},
    {"tolerance", 0, "PERCENT", "how far the two may differ (default 3)", 0},
    {"chart", 0, NULL, "a line per rank, in the terminal", 0},
    {"width", 0, "N", "columns of the chart (default: the terminal's, else 100)", 0},
    {"svg", 0, "FILE", "a Gantt chart with slots and folds", 0},
    {"timeline", 0, "FILE", "Chrome trace events, for Perfetto; a unit of time is 1 ms", 0},
    {NULL, 0, NULL, NULL, 0},
};

const qe_command qe_command_simulate = {
    .name = "simulate",
    .arguments = "SCHEDULE",
    .summary = "what a schedule costs: times, bubbles, memory; pictures of it",
    .details =
        "SCHEDULE is a name that `qeffect schedule --help` explains, with the sizes below, or a CSV file as\n"
        "`qeffect check` takes it. auto is searched for under the times, rules and limit of the options.\n"
        "\n"
        "An action starts when its rank is free and its input has arrived. Two bubbles are told: the makespan bubble\n"
        "is what a step loses whose optimizer waits for all ranks, the stage bubble what it loses where no rank waits\n"
        "for another (the \"bubble rate\" of the zero-bubble papers). A microbatch keeps 1 on a whole rank.\n"
        "\n"
        "--measured runs the same schedule on this host, through plan, contracts, streams and transport, with actions\n"
        "that sleep, and compares. It sends the gradient of a B early, as real steps do.\n"
        "\n"
        "Exit status: 0 good, 1 a file is malformed, 2 options that do not fit, 3 the schedule cannot run or keeps\n"
        "more than --memory-limit, 4 prediction and measurement differ by more than the tolerance.\n"
        "\n"
        "Examples:\n"
        "  qeffect simulate zbh1 --ranks 4 --microbatches 8 --times 1,1.2,0.7,0.1 --chart\n"
        "  qeffect simulate zbv --ranks 4 --microbatches 8 --svg zbv.svg --timeline zbv.json\n"
        "  qeffect simulate 1f1b --ranks 4 --microbatches 8 --times 10,12,11 --measured\n",
    .options = OPTIONS,
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run_simulate,
};
