/* search_argument.c - `auto`: reads sizes, times, limit, placement and metric, searches, tells what came of it. */
#include "cli/search_argument.h"

#include <string.h>
#include "cli/schedule_argument.h"

static const char *const PLACEMENTS[] = {"any", "linear", "looped", "v", NULL};
static const char *const METRICS[] = {"makespan", "stage", NULL};

int qe_search_argument_is(const char *argument) { return strcmp(argument, "auto") == 0; }

int qe_search_argument_alone(const qe_cli *cli, const char *const *options) {
    for (; *options != NULL; options++) {
        if (qe_cli_has(cli, *options)) return qe_cli_usage(cli, "--%s is for auto alone", *options);
    }
    return QE_EXIT_OK;
}

int qe_search_argument_shape(const qe_cli *cli, qe_schedule *schedule_out) {
    qe_schedule_request request;
    qe_error error = {0};
    int status = qe_schedule_argument_sizes(cli, "sequential", &request);
    if (status != QE_EXIT_OK) return status;
    if (request.forward_only) {
        return qe_cli_usage(cli, "--forward-only is for named orders; an evaluation leaves nothing to search");
    }
    if (qe_schedule_generate(&request, schedule_out, &error) != QE_OK) return qe_schedule_argument_refuse(cli, &error);
    return QE_EXIT_OK;
}

/* Index of an option's word; the first where it is absent. -1: it has printed usage text. */
static int read_word(const qe_cli *cli, const char *name, const char *const *words) {
    const char *text = qe_cli_value(cli, name);
    char all[64] = "";
    for (int i = 0; words[i] != NULL; i++) {
        if (text == NULL || strcmp(text, words[i]) == 0) return i;
        size_t at = strlen(all);
        (void)snprintf(all + at, sizeof all - at, "%s%s", i == 0 ? "" : words[i + 1] == NULL ? " or " : ", ", words[i]);
    }
    qe_cli_usage(cli, "--%s is '%s'; expected %s", name, text, all);
    return -1;
}

/* For people: with --json the command's document says it. */
static void tell(const qe_cli *cli, const qe_search_request *request, const qe_search_result *found) {
    double gap = found->value > found->bound ? 100.0 * (found->value / found->bound - 1.0) : 0.0;
    if (cli->json) return;
    fprintf(stderr, "auto: %s, %s %.4f, at most %.2f%% above what is possible; keeps %.4g; %u orders tried\n",
            PLACEMENTS[found->placement], request->metric == QE_SEARCH_STAGE ? "longest span" : "makespan",
            found->value, gap, found->peak_kept, found->tried);
    if (found->named == NULL) fprintf(stderr, "auto: no named order keeps so little\n");
    else fprintf(stderr, "auto: the best named order is %s: %.4f\n", found->named, found->named_value);
}

int qe_search_argument_run(const qe_cli *cli, const qe_schedule *shape, const qe_simulation_request *times,
                           double memory_limit, qe_search_result *result_out) {
    int placement = read_word(cli, "stages", PLACEMENTS), metric = read_word(cli, "metric", METRICS);
    qe_error error = {0};
    if (placement < 0 || metric < 0) return QE_EXIT_USAGE;
    qe_search_request request = {.ranks = shape->ranks,
                                 .chunks = shape->stages / shape->ranks,
                                 .microbatches = shape->microbatches,
                                 .placement = (uint8_t)placement,
                                 .metric = (uint8_t)metric,
                                 .memory_limit = memory_limit,
                                 .times = *times};
    if (qe_schedule_search(&request, result_out, &error) != QE_OK) return qe_schedule_argument_refuse(cli, &error);
    tell(cli, &request, result_out);
    return QE_EXIT_OK;
}

int qe_search_argument_load(const qe_cli *cli, qe_schedule *schedule_out) {
    qe_schedule shape = {0};
    qe_times times = {0};
    qe_search_result result = {0};
    int status = qe_search_argument_shape(cli, &shape);
    if (status == QE_EXIT_OK) status = qe_times_read(cli, &shape, &times);
    if (status == QE_EXIT_OK) {
        qe_simulation_request request = {.costs = times.costs, .cost_count = shape.stages, .latency = times.hop};
        status = qe_search_argument_run(cli, &shape, &request, times.memory_limit, &result);
    }
    if (status == QE_EXIT_OK) {
        *schedule_out = result.schedule;
        result.schedule = (qe_schedule){0};
    }
    qe_search_result_deinit(&result);
    qe_times_deinit(&times);
    qe_schedule_deinit(&shape);
    return status;
}
