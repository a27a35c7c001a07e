/* command_check.c - `qeffect check`: the certificate of a schedule, or the counterexample. */
#include "cli/schedule_argument.h"

#include <string.h>
#include <jansson.h>

enum { TEXT_BYTES = 4096, LINE_WIDTH = 100 };

static void print_certificate(const char *argument, const qe_schedule *schedule, const qe_schedule_peak *peaks) {
    printf("%s: certified\n", argument);
    printf("%u ranks, %u stages, %u microbatches, %u actions\n", schedule->ranks, schedule->stages,
           schedule->microbatches, schedule->rank_begin[schedule->ranks]);
    printf("at most, counted in (stage, microbatch) pairs:\n");
    printf("%6s %10s %18s %12s\n", "rank", "actions", "live microbatches", "pending W");
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) {
        printf("%6u %10u %18u %12u\n", rank, schedule->rank_begin[rank + 1] - schedule->rank_begin[rank],
               peaks[rank].live, peaks[rank].weight);
    }
}

static uint32_t stages_on(const qe_schedule *schedule, uint32_t rank) {
    uint32_t stages = 0;
    for (uint32_t stage = 0; stage < schedule->stages; stage++) stages += schedule->stage_rank[stage] == rank;
    return stages;
}

/* In microbatches of a whole rank, as papers count it. */
static double activation_of(const qe_schedule *schedule, const qe_schedule_peak *peak, uint32_t rank) {
    uint32_t stages = stages_on(schedule, rank);
    return stages == 0 ? 0.0 : (double)peak->live / stages;
}

static int json_certificate(const char *argument, const qe_schedule *schedule, const qe_schedule_peak *peaks) {
    json_t *document = qe_schedule_argument_json(argument, schedule), *per_rank = json_array();
    double largest = 0.0;
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) {
        double activation = activation_of(schedule, &peaks[rank], rank);
        uint32_t actions = schedule->rank_begin[rank + 1] - schedule->rank_begin[rank];
        if (activation > largest) largest = activation;
        (void)json_array_append_new(
            per_rank, json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:f}", "rank", (int)rank, "stages",
                                (int)stages_on(schedule, rank), "actions", (int)actions, "peak_live_microbatches",
                                (int)peaks[rank].live, "peak_retained_forwards", (int)peaks[rank].activation,
                                "peak_pending_weights", (int)peaks[rank].weight, "peak_activation", activation));
    }
    (void)json_object_set_new(document, "certified", json_true());
    (void)json_object_set_new(document, "peak_activation", json_real(largest));
    (void)json_object_set_new(document, "per_rank", per_rank);
    return qe_cli_json(document, QE_EXIT_OK);
}

static int report_certificate(const qe_cli *cli, const char *argument, const qe_schedule *schedule) {
    qe_schedule_peak peaks[QE_SCHEDULE_RANKS_MAX];
    qe_schedule_peaks(schedule, peaks);
    if (cli->json) return json_certificate(argument, schedule, peaks);
    print_certificate(argument, schedule, peaks);
    return QE_EXIT_OK;
}

/* Long circles fill paragraphs: breaks lines at spaces. */
static void print_wrapped(const char *text) {
    while (strlen(text) > LINE_WIDTH) {
        int width = LINE_WIDTH;
        while (width > 0 && text[width] != ' ') width--;
        if (width == 0) break;
        printf("%.*s\n", width, text);
        text += width + 1;
    }
    printf("%s\n", text);
}

static json_t *json_action(const qe_schedule *schedule, uint32_t index) {
    const qe_action *action = &schedule->actions[index];
    char text[32];
    uint32_t rank = 0;
    (void)qe_action_text(action, text, sizeof text);
    while (schedule->rank_begin[rank + 1] <= index) rank++;
    json_t *place = json_pack("{s:s, s:i, s:i}", "action", text, "rank", (int)rank, "index",
                              (int)(index - schedule->rank_begin[rank]));
    if (action->row != 0) {
        (void)json_object_set_new(place, "row", json_integer(action->row));
        (void)json_object_set_new(place, "cell", json_integer(action->column));
    }
    return place;
}

static int json_counterexample(const char *argument, const qe_schedule *schedule, const qe_counterexample *facts,
                               const char *text) {
    json_t *document = qe_schedule_argument_json(argument, schedule), *cited = json_array();
    for (uint32_t i = 0; i < facts->action_count; i++) {
        (void)json_array_append_new(cited, json_action(schedule, facts->actions[i]));
    }
    json_t *breach = json_pack("{s:s, s:o, s:o, s:I, s:I}", "rule", qe_rule_id(facts->rule), "message",
                               qe_cli_json_text(text), "actions",
                               cited, "expected", (json_int_t)facts->expected, "found", (json_int_t)facts->found);
    if (facts->rule == QE_RULE_SCHEDULE_MISSING) {
        char missing[32];
        (void)qe_action_text(&facts->missing, missing, sizeof missing);
        (void)json_object_set_new(breach, "missing", qe_cli_json_text(missing));
    }
    (void)json_object_set_new(document, "certified", json_false());
    (void)json_object_set_new(document, "counterexample", breach);
    return qe_cli_json(document, QE_EXIT_CONTRACT);
}

static int report_counterexample(const qe_cli *cli, const char *argument, const qe_schedule *schedule,
                                 const qe_counterexample *facts) {
    char text[TEXT_BYTES];
    int length = qe_counterexample_text(facts, schedule, text, sizeof text);
    if (length >= TEXT_BYTES) memcpy(text + TEXT_BYTES - 4, "...", 4);
    if (cli->json) return json_counterexample(argument, schedule, facts, text);
    printf("%s: cannot run\n", argument);
    print_wrapped(text);
    return QE_EXIT_CONTRACT;
}

static int run_check(qe_cli *cli) {
    const char *argument = cli->arguments[0];
    qe_schedule schedule;
    qe_counterexample counterexample = {0};
    qe_error error = {0};
    int status = qe_schedule_argument_load(cli, argument, &schedule);
    if (status != QE_EXIT_OK) return status;
    qe_status verdict = qe_schedule_check(&schedule, &counterexample, &error);
    if (verdict == QE_OK) status = report_certificate(cli, argument, &schedule);
    else if (verdict == QE_CONTRACT) status = report_counterexample(cli, argument, &schedule, &counterexample);
    else status = qe_cli_error(cli, &error);
    qe_counterexample_deinit(&counterexample);
    qe_schedule_deinit(&schedule);
    return status;
}

static const qe_cli_option OPTIONS[] = {QE_SCHEDULE_OPTIONS, {NULL, 0, NULL, NULL, 0}};

const qe_command qe_command_check = {
    .name = "check",
    .arguments = "SCHEDULE",
    .summary = "certify a pipeline schedule, or print why it cannot run",
    .details =
        "SCHEDULE is a name that `qeffect schedule --help` explains, with the sizes below,\n"
        "or a CSV file as PyTorch's pipelining writes it with\n"
        "schedule._dump_csv(FILE), with communication or without: one row per rank, one action per cell, such as 2F0\n"
        "(forward of stage 2, microbatch 0), 2I0 (input gradient), 2W0 (weight gradient), 2B0 (both),\n"
        "(2F1;3B0)OVERLAP_F_B. Empty cells are bubbles.\n"
        "\n"
        "Certified means: every stage is on one rank, every action happens once, in an order that can run without\n"
        "deadlock. Otherwise the least that shows the fault is printed: for a deadlock the shortest circle of actions\n"
        "that wait for each other. With a file, --ranks and --chunks must agree with it, and --microbatches says how\n"
        "many are due.\n"
        "\n"
        "Exit status: 0 certified, 1 the file is malformed, 2 the sizes do not fit, 3 the schedule cannot run.\n"
        "\n"
        "Examples:\n"
        "  qeffect check 1f1b --ranks 8 --microbatches 32\n"
        "  qeffect check orders.csv --microbatches 16 --json\n",
    .options = OPTIONS,
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run_check,
};
