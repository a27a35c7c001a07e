/* command_check.c - `qeffect check`: the certificate of a schedule under stated rules, or the counterexample. */
#include "base/seconds.h"
#include "cli/schedule_argument.h"
#include "cli/search_argument.h"
#include "qeffect/certificate.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <jansson.h>

enum {
    TEXT_BYTES = 4096,
    LINE_WIDTH = 100,
    RANKS_SHOWN = 64, /* lines of a table for people; JSON has all ranks */
};

static const char *const SENDS[] = {"single", "batched", NULL};
static const char *const COMMUNICATORS[] = {"edge", "one", NULL};
static const char *const RELEASES[] = {"pair", "op", NULL}; /* of simulate, too */
static const char *const FOLDS[] = {"step", "last-microbatch", NULL};
static const char *const FILLS[] = {"step", "first-microbatch", NULL};
static const char *const GRADIENTS[] = {"ascending", "any", NULL}, *const ORDERS[] = {"ascending", "own"};
static const char *const PARTS[] = {"run", "send", "receive"};
static const char *const WAITS[] = {"none", "row", "result", "pair", "send", "queue", "batch", "post", "buffer"};

/* What one check is about. `schedule` is empty where the rows are computed. */
typedef struct question {
    const char *argument;
    qe_schedule schedule;
    qe_schedule_request order;
    int streamed;
    qe_certificate_request request;
    double seconds;
} question;

/* ---- the question ---- */

static int read_word(const qe_cli *cli, const char *name, const char *const *words, uint8_t fallback,
                     uint8_t *value_out) {
    const char *value = qe_cli_value(cli, name);
    *value_out = fallback;
    if (value == NULL) return QE_EXIT_OK;
    for (uint8_t i = 0; words[i] != NULL; i++) {
        if (strcmp(value, words[i]) != 0) continue;
        *value_out = i;
        return QE_EXIT_OK;
    }
    return qe_cli_usage(cli, "--%s is %s or %s, found \"%s\"", name, words[0], words[1], value);
}

static int read_request(const qe_cli *cli, qe_certificate_request *request_out) {
    uint64_t capacity;
    qe_certificate_request request = {.find_capacity = qe_cli_has(cli, "buffers") != 0};
    int status = read_word(cli, "sends", SENDS, QE_SENDS_SINGLE, &request.transport.sends);
    if (status == QE_EXIT_OK) {
        status = read_word(cli, "communicators", COMMUNICATORS, QE_COMMUNICATORS_EDGE,
                           &request.transport.communicators);
    }
    if (status == QE_EXIT_OK) {
        status = read_word(cli, "release", RELEASES, QE_RELEASE_PAIR, &request.transport.release);
    }
    if (status == QE_EXIT_OK) status = read_word(cli, "fold", FOLDS, QE_FOLD_STEP, &request.fold);
    if (status == QE_EXIT_OK) status = read_word(cli, "fill", FILLS, QE_FILL_STEP, &request.fill);
    if (status == QE_EXIT_OK) status = read_word(cli, "gradients", GRADIENTS, QE_GRADIENTS_OWN, &request.gradients);
    if (status != QE_EXIT_OK) return status;
    if (qe_times_positive(cli, "memory-limit", &request.memory_limit) != 0) return QE_EXIT_USAGE;
    if (qe_cli_number(cli, "capacity", 0, QE_MICROBATCHES_MAX, 0, &capacity) != 0) return QE_EXIT_USAGE;
    request.transport.capacity = (uint32_t)capacity;
    *request_out = request;
    return QE_EXIT_OK;
}

/* Orders with a formula are computed while they are judged; everything else is loaded. */
static int open_question(qe_cli *cli, question *asked) {
    static const char *const searching[] = {"times", "stage-times", "weight-share", "stages", "metric", NULL};
    int status = read_request(cli, &asked->request);
    asked->argument = cli->arguments[0];
    if (status == QE_EXIT_OK && !qe_search_argument_is(asked->argument)) {
        status = qe_search_argument_alone(cli, searching);
    }
    asked->streamed = qe_schedule_streams(asked->argument) && !qe_cli_has(cli, "forward-only");
    if (status != QE_EXIT_OK) return status;
    if (asked->streamed) return qe_schedule_argument_sizes(cli, asked->argument, &asked->order);
    return qe_schedule_argument_load(cli, asked->argument, &asked->schedule);
}

static qe_status judge(question *asked, qe_certificate *certificate_out, qe_counterexample *counterexample_out,
                       qe_error *error_out) {
    double begin = qe_seconds_now();
    qe_status status = asked->streamed
                           ? qe_schedule_certify_streamed(&asked->order, &asked->request, certificate_out,
                                                          counterexample_out, error_out)
                           : qe_schedule_certify(&asked->schedule, &asked->request, certificate_out,
                                                 counterexample_out, error_out);
    asked->seconds = qe_seconds_now() - begin;
    return status;
}

/* ---- the answer ---- */

/* The most this process ever had in memory; Linux counts in KiB. */
static json_int_t peak_memory_bytes(void) {
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? (json_int_t)usage.ru_maxrss * 1024 : 0;
}

static void print_rules(const qe_certificate_request *request) {
    const qe_transport *transport = &request->transport;
    printf("rules: %s sends, communicator %s, ", SENDS[transport->sends],
           transport->communicators == QE_COMMUNICATORS_ONE ? "one for all" : "per directed edge");
    if (transport->capacity == 0) printf("rendezvous");
    else printf("%u buffer%s per directed edge", transport->capacity, qe_cli_s(transport->capacity));
    printf("; release: %s; fold: %s; fill: %s", RELEASES[transport->release], FOLDS[request->fold],
           FILLS[request->fill]);
    if (request->memory_limit > 0.0) printf("; at most %g microbatches of a rank kept", request->memory_limit);
    printf("\n");
}

static void print_ranks(const qe_certificate *certificate) {
    printf("at most, counted in (stage, microbatch) pairs:\n");
    printf("%6s %10s %18s %12s %10s\n", "rank", "actions", "live microbatches", "pending W", "gradients");
    for (uint32_t rank = 0; rank < certificate->ranks && rank < RANKS_SHOWN; rank++) {
        const qe_certificate_rank *at = &certificate->rank[rank];
        printf("%6u %10u %18u %12u %10s\n", rank, at->actions, at->peak.live, at->peak.weight,
               ORDERS[at->gradient_order]);
    }
    if (certificate->ranks <= RANKS_SHOWN) return;
    printf("%6s (%u more; --json has them)\n", "", certificate->ranks - RANKS_SHOWN);
}

static void print_certificate(const question *asked, const qe_certificate *certificate) {
    char sizes[QE_CLI_SIZES_BYTES];
    printf("%s: certified\n", asked->argument);
    printf("%s, %llu actions%s\n",
           qe_cli_sizes(certificate->ranks, certificate->stages, certificate->microbatches, sizes),
           (unsigned long long)certificate->actions, certificate->streamed ? ", streamed" : "");
    print_rules(&asked->request);
    print_ranks(certificate);
    printf("peak activation %g microbatches of a rank; gradients in %s\n", certificate->peak_activation,
           certificate->gradient_order == QE_GRADIENTS_OWN ? "an order of their own" : "microbatch order");
    if (certificate->least_capacity > 0) {
        printf("%u buffer%s per directed edge %s\n", certificate->least_capacity,
               qe_cli_s(certificate->least_capacity), certificate->least_capacity == 1 ? "suffices" : "suffice");
    }
    printf("judged in %.3f s; peak memory %.1f MiB\n", asked->seconds, (double)peak_memory_bytes() / 1048576.0);
}

static json_t *json_rank(const qe_certificate_rank *at, uint32_t rank) {
    double activation = at->stages == 0 ? 0.0 : (double)at->peak.live / at->stages;
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:s}", "rank", (int)rank, "stages", (int)at->stages,
                     "actions", (int)at->actions, "peak_live_microbatches", (int)at->peak.live,
                     "peak_retained_forwards", (int)at->peak.activation, "peak_pending_weights", (int)at->peak.weight,
                     "peak_activation", activation, "gradient_order", ORDERS[at->gradient_order]);
}

static json_t *json_rules(const qe_certificate_request *request) {
    const qe_transport *transport = &request->transport;
    json_t *rules = json_pack("{s:s, s:s, s:i, s:s, s:s, s:s, s:s}", "sends", SENDS[transport->sends], "communicators",
                              COMMUNICATORS[transport->communicators], "capacity", (int)transport->capacity, "release",
                              RELEASES[transport->release], "fold", FOLDS[request->fold], "fill", FILLS[request->fill],
                              "gradients", GRADIENTS[request->gradients]);
    if (request->memory_limit > 0.0) {
        (void)json_object_set_new(rules, "memory_limit", json_real(request->memory_limit));
    }
    return rules;
}

static json_t *json_answer(const question *asked, uint32_t ranks, uint32_t stages, uint32_t microbatches,
                           uint64_t actions) {
    json_t *document =
        json_pack("{s:i, s:i, s:i, s:I}", "ranks", (int)ranks, "stages", (int)stages, "microbatches",
                  (int)microbatches, "actions", (json_int_t)actions);
    (void)json_object_set_new(document, "schedule", qe_cli_json_text(asked->argument));
    (void)json_object_set_new(document, "rules", json_rules(&asked->request));
    (void)json_object_set_new(document, "streamed", json_boolean(asked->streamed));
    (void)json_object_set_new(document, "check_s", json_real(asked->seconds));
    (void)json_object_set_new(document, "peak_memory_bytes", json_integer(peak_memory_bytes()));
    return document;
}

static int json_certificate(const question *asked, const qe_certificate *certificate) {
    json_t *document = json_answer(asked, certificate->ranks, certificate->stages, certificate->microbatches,
                                   certificate->actions);
    json_t *per_rank = json_array();
    for (uint32_t rank = 0; rank < certificate->ranks; rank++) {
        (void)json_array_append_new(per_rank, json_rank(&certificate->rank[rank], rank));
    }
    (void)json_object_set_new(document, "certified", json_true());
    (void)json_object_set_new(document, "peak_activation", json_real(certificate->peak_activation));
    (void)json_object_set_new(document, "gradient_order", json_string(ORDERS[certificate->gradient_order]));
    if (certificate->least_capacity > 0) {
        (void)json_object_set_new(document, "least_capacity", json_integer(certificate->least_capacity));
    }
    (void)json_object_set_new(document, "per_rank", per_rank);
    return qe_cli_json(document, QE_EXIT_OK);
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

static json_t *json_cited(const qe_cited *cited, int in_cycle) {
    char text[32];
    (void)qe_action_text(&cited->action, text, sizeof text);
    json_t *place = json_pack("{s:s, s:i, s:i}", "action", text, "rank", (int)cited->rank, "index", (int)cited->index);
    if (cited->action.row != 0) {
        (void)json_object_set_new(place, "row", json_integer(cited->action.row));
        (void)json_object_set_new(place, "cell", json_integer(cited->action.column));
    }
    if (!in_cycle) return place;
    (void)json_object_set_new(place, "part", json_string(PARTS[cited->part]));
    (void)json_object_set_new(place, "waits", json_string(WAITS[cited->wait]));
    return place;
}

static json_t *json_breach(const qe_counterexample *facts, const char *text) {
    json_t *cited = json_array();
    for (uint32_t i = 0; i < facts->cited_count; i++) {
        (void)json_array_append_new(cited, json_cited(&facts->cited[i], facts->rule == QE_RULE_SCHEDULE_CYCLE));
    }
    json_t *breach = json_pack("{s:s, s:o, s:o, s:I, s:I}", "rule", qe_rule_id(facts->rule), "message",
                               qe_cli_json_text(text), "actions", cited, "expected", (json_int_t)facts->expected,
                               "found", (json_int_t)facts->found);
    if (facts->rule == QE_RULE_SCHEDULE_MISSING) {
        char missing[32];
        (void)qe_action_text(&facts->missing, missing, sizeof missing);
        (void)json_object_set_new(breach, "missing", qe_cli_json_text(missing));
    }
    return breach;
}

static int report_counterexample(const qe_cli *cli, const question *asked, const qe_counterexample *facts) {
    char text[TEXT_BYTES];
    int length = qe_counterexample_text(facts, text, sizeof text);
    if (length >= TEXT_BYTES) memcpy(text + TEXT_BYTES - 4, "...", 4);
    if (cli->json) {
        json_t *document = json_answer(asked, facts->ranks, facts->stages, facts->microbatches, facts->actions);
        (void)json_object_set_new(document, "certified", json_false());
        (void)json_object_set_new(document, "counterexample", json_breach(facts, text));
        return qe_cli_json(document, QE_EXIT_CONTRACT);
    }
    printf("%s: %s\n", asked->argument,
           facts->rule < QE_RULE_SCHEDULE_PLACE || facts->rule > QE_RULE_SCHEDULE_CYCLE ? "refused" : "cannot run");
    print_rules(&asked->request);
    print_wrapped(text);
    return QE_EXIT_CONTRACT;
}

static int run_check(qe_cli *cli) {
    question asked = {.argument = NULL};
    qe_certificate certificate = {0};
    qe_counterexample counterexample = {0};
    qe_error error = {0};
    int status = open_question(cli, &asked);
    if (status != QE_EXIT_OK) return status;
    qe_status verdict = judge(&asked, &certificate, &counterexample, &error);
    if (verdict == QE_CONTRACT) status = report_counterexample(cli, &asked, &counterexample);
    else if (verdict != QE_OK)
        status = asked.streamed ? qe_schedule_argument_refuse(cli, &error) : qe_cli_error(cli, &error);
    else if (cli->json) status = json_certificate(&asked, &certificate);
    else print_certificate(&asked, &certificate);
    qe_certificate_deinit(&certificate);
    qe_counterexample_deinit(&counterexample);
    qe_schedule_deinit(&asked.schedule);
    return status;
}

static const qe_cli_option OPTIONS[] = {
    QE_SCHEDULE_OPTIONS,
    QE_TIMES_OPTIONS,
    QE_SEARCH_OPTIONS,
    {"sends", 0, "WORD", "single (default) or batched: an action waits for the whole batch in front of it", 0},
    {"communicators", 0, "WORD", "edge (default): one per directed edge of two ranks; or one for all", 0},
    {"capacity", 0, "N", "buffers of a directed edge (default 0: rendezvous)", 0},
    {"release", 0, "WORD", "pair (default): overlapped actions start together; or op: one behind the other", 0},
    {"buffers", 0, NULL, "also find the least capacity that cannot deadlock", 0},
    {"fold", 0, "WORD", "scales fold behind the step (default) or the last-microbatch's backward", 0},
    {"fill", 0, "WORD", "caches are filled before the step (default) or by the first-microbatch", 0},
    {"gradients", 0, "WORD", "any order (default), or only ascending microbatches", 0},
    {NULL, 0, NULL, NULL, 0}};

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
        "Certified means, under the rules that the options state: every stage is on one rank, every action happens\n"
        "once, in an order that can run without deadlock; nothing uses a stage's scales behind their fold or its\n"
        "weight cache before its fill; no rank keeps more than --memory-limit; and the order of gradients is told.\n"
        "Otherwise the least that shows the fault is printed: for a deadlock the shortest circle of actions and\n"
        "messages that wait for each other. With a file, --ranks and --chunks must agree with it, and --microbatches\n"
        "says how many are due. gpipe, 1f1b and zbh1 are computed while they are judged and never stored, so that\n"
        "they may have hundreds of millions of actions.\n"
        "\n"
        "Exit status: 0 certified, 1 the file is malformed, 2 the sizes do not fit, 3 the schedule cannot run.\n"
        "\n"
        "Examples:\n"
        "  qeffect check 1f1b --ranks 8 --microbatches 32\n"
        "  qeffect check orders.csv --microbatches 16 --json\n"
        "  qeffect check 1f1b --ranks 4 --communicators one        (deadlock: two sends meet)\n"
        "  qeffect check 1f1b --ranks 4 --communicators one --sends batched\n",
    .options = OPTIONS,
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run_check,
};
