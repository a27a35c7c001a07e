/* command_schedule.c - `qeffect schedule`: writes a schedule as CSV or SVG. A file appears whole or not at all. */
#include "cli/schedule_argument.h"

#include <string.h>
#include <jansson.h>
#include "cli/output.h"
#include "cli/search_argument.h"
#include "qeffect/draw.h"

static const char *const FORMATS[] = {"compute_only", "compute_comms", "svg"};
static qe_cli_writer write_compute_only, write_compute_comms, write_svg;
static qe_cli_writer *const WRITERS[] = {write_compute_only, write_compute_comms, write_svg};
enum { FORMAT_COUNT = sizeof FORMATS / sizeof FORMATS[0] };

/* What is written. An order has no times of its own: without options F, I and W take one unit each on a whole rank. */
typedef struct written {
    qe_schedule schedule;
    qe_times times;
    const char *times_text; /* as they were given */
} written;

static qe_status write_compute_only(const void *opaque, FILE *file, qe_error *error_out) {
    return qe_schedule_write_csv(&((const written *)opaque)->schedule, file, error_out);
}

static qe_status write_compute_comms(const void *opaque, FILE *file, qe_error *error_out) {
    return qe_schedule_write_csv_comms(&((const written *)opaque)->schedule, file, error_out);
}

static qe_status write_svg(const void *opaque, FILE *file, qe_error *error_out) {
    const written *what = opaque;
    const qe_schedule *schedule = &what->schedule;
    qe_simulation_request request = {.schedule = schedule, .costs = what->times.costs,
                                     .cost_count = schedule->stages, .latency = what->times.hop};
    qe_simulation simulation = {0};
    char title[160], sizes[QE_CLI_SIZES_BYTES];
    (void)snprintf(title, sizeof title, "%s; %s%.60s",
                   qe_cli_sizes(schedule->ranks, schedule->stages, schedule->microbatches, sizes),
                   what->times_text == NULL ? "" : "times ",
                   what->times_text == NULL ? "F = I = W" : what->times_text);
    qe_drawing drawing = {.schedule = schedule, .simulation = &simulation, .title = title, .unit = "",
                          .unit_us = 1000.0};
    qe_status status = qe_simulation_run(&request, &simulation, error_out);
    if (status == QE_OK) status = qe_draw_svg(&drawing, file, error_out);
    qe_simulation_deinit(&simulation);
    return status;
}

/* NULL: it has printed that there is no such format. */
static qe_cli_writer *find_writer(const qe_cli *cli) {
    const char *format = qe_cli_value(cli, "format");
    for (size_t i = 0; i < FORMAT_COUNT; i++) {
        if (format == NULL || strcmp(format, FORMATS[i]) == 0) return WRITERS[i];
    }
    (void)qe_cli_usage(cli, "--format is \"%s\"; expected compute_only, compute_comms or svg", format);
    return NULL;
}

static json_t *json_orders(const qe_schedule *schedule) {
    json_t *orders = json_array();
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) {
        json_t *row = json_array();
        for (uint32_t i = schedule->rank_begin[rank]; i < schedule->rank_begin[rank + 1];) {
            char text[64];
            i += qe_schedule_cell_text(schedule, i, text, sizeof text);
            (void)json_array_append_new(row, json_string(text));
        }
        (void)json_array_append_new(orders, row);
    }
    return orders;
}

/* With a file its path stands for the orders, which may be millions of actions. */
static int json_report(const char *name, const char *path, const qe_schedule *schedule) {
    json_t *document = qe_schedule_argument_json(name, schedule);
    if (path == NULL) (void)json_object_set_new(document, "orders", json_orders(schedule));
    else (void)json_object_set_new(document, "output", qe_cli_json_text(path));
    return qe_cli_json(document, QE_EXIT_OK);
}

static int write_schedule(const qe_cli *cli, const char *name, qe_cli_writer *writer, const written *what) {
    const char *path = qe_cli_value(cli, "output");
    qe_error error = {0};
    if (path != NULL) {
        int status = qe_cli_write_file(cli, path, writer, what);
        if (status != QE_EXIT_OK) return status;
    }
    if (cli->json) return json_report(name, path, &what->schedule);
    if (path == NULL && writer(what, stdout, &error) != QE_OK) return qe_cli_error(cli, &error);
    return QE_EXIT_OK;
}

static int run_schedule(qe_cli *cli) {
    static const char *const searching[] = {"memory-limit", "weight-share", NULL};
    const char *name = cli->arguments[0];
    written what = {.times_text = qe_cli_value(cli, "times")};
    qe_cli_writer *writer = find_writer(cli);
    if (writer == NULL) return QE_EXIT_USAGE;
    if (what.times_text == NULL) what.times_text = qe_cli_value(cli, "stage-times");
    int status = qe_cli_try_output(cli, "output");
    if (status != QE_EXIT_OK) return status;
    status = qe_search_argument_is(name) ? QE_EXIT_OK : qe_search_argument_alone(cli, searching);
    if (status == QE_EXIT_OK) status = qe_schedule_argument_load(cli, name, &what.schedule);
    if (status == QE_EXIT_OK) status = qe_schedule_argument_check(cli, name, &what.schedule);
    if (status == QE_EXIT_OK) status = qe_times_read(cli, &what.schedule, &what.times);
    if (status == QE_EXIT_OK) status = write_schedule(cli, name, writer, &what);
    qe_times_deinit(&what.times);
    qe_schedule_deinit(&what.schedule);
    return status;
}

static const qe_cli_option OPTIONS[] = {{"output", 'o', "FILE", "write here instead of standard output", 0},
                                        {"format", 0, "FORM", "compute_only, compute_comms with transfers, or svg", 0},
                                        QE_SCHEDULE_OPTIONS,
                                        QE_TIMES_OPTIONS,
                                        QE_SEARCH_OPTIONS,
                                        {NULL, 0, NULL, NULL, 0}};

const qe_command qe_command_schedule = {
    .name = "schedule",
    .arguments = "SCHEDULE",
    .summary = "write a pipeline schedule as CSV, or draw it",
    .details =
        "SCHEDULE is a CSV file, or one of\n"
        "  gpipe           all forwards, then all backwards\n"
        "  looped-bfs      all forwards chunk by chunk, then all backwards, the last microbatch first\n"
        "  1f1b            one forward, one backward in turn; keeps at most as many microbatches as ranks\n"
        "  interleaved     1f1b over several chunks per rank: smaller bubble, more messages\n"
        "  zbh1            backward split into input and weight gradient (I, W): a third of 1f1b's bubble\n"
        "  zbh2            twice the forwards of zbh1 ahead: only the start is idle, twice the memory\n"
        "  interleaved-zb  zbh1 over several chunks per rank\n"
        "  zbv             two chunks per rank laid out as a V: zbh2's bubble at 1f1b's memory\n"
        "  v-half          zbv's V at half of 1f1b's memory, with a bubble\n"
        "  v-min           the same at a third of it; slow where F, I and W differ\n"
        "  1f1b-v          1f1b on zbv's V: two thirds of 1f1b's memory, a little less bubble\n"
        "  dualpipe        two streams from both ends, each stage on two ranks: half the bubble, twice the weights\n"
        "  dualpipev       the same on zbv's V, each stage once\n"
        "  sequential      one microbatch at a time, the baseline\n"
        "  auto            the best one that is found for --times or --stage-times under --memory-limit\n"
        "\n"
        "Written is what PyTorch's pipelining reads and `qeffect check` and `qeffect train` take: one row per rank,\n"
        "one action per cell. --format compute_comms adds the transfers, UNSHARD, RESHARD and REDUCE_GRAD that\n"
        "PyTorch would add; with a CSV file for SCHEDULE, to that order. With --json the orders are listed without\n"
        "them. --format svg draws a Gantt chart, with the times given or equal ones; `qeffect simulate` tells what an\n"
        "order costs. A file is written whole or not at all.\n"
        "\n"
        "Examples:\n"
        "  qeffect schedule 1f1b --ranks 4 --microbatches 8\n"
        "  qeffect schedule interleaved --ranks 4 --chunks 2 --microbatches 8 -o orders.csv\n"
        "  qeffect schedule orders.csv --format compute_comms\n"
        "  qeffect schedule zbv --format svg -o zbv.svg\n"
        "  qeffect schedule auto --ranks 4 --microbatches 16 --times 1,1.2,0.7,0.1 --memory-limit 6 -o best.csv\n",
    .options = OPTIONS,
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run_schedule,
};
