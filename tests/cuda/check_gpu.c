/* check_gpu.c - does a GPU run what was planned, and is it noticed where it does not?
 *
 *   check_gpu [--runs 100] [--steps 1000] [--seeds 60] [--only MODE] [--json]      MODE: eager, layer, action, step
 *
 * Teams of ranks on one GPU run on tables that leave out, from what is executed, one kind of edge at a time
 * (tests/cut_shim.h). Each kind must be trapped in every run, with and without random delays, with the state as it was
 * and the team able to go on; without contracts some delayed run must end with other bits; clean steps must never be
 * trapped. Edges inside of recordings are refused when the graph is recorded. Graphs with planted faults are refused.
 *
 * Exit status: 0 all of that holds, 1 it does not, 77 skipped because there is no GPU. */
#include "cut_check.h"

#include <time.h>

#include "backend/cuda/device.h"
#include "base/text.h"
#include "cuda/check_gpu.h"

enum {
    SKIPPED = 77,
    ROWS_MAX = 256,
    MODES = QE_CAPTURE_STEP + 1,
    RUNS_SHARE = 5,            /* other schedules, and repeated recordings: a fifth of the runs */
    GRAPH_DELAY_MAX_NS = 20000 /* before each op of a graph; drawn when it is recorded */
};

static const char *const mode_names[MODES] = {"eager", "layer", "action", "step"};

typedef struct row {
    cut_kind kind;
    const char *schedule;
    qe_capture capture;
    int recorded;            /* refused when graphs are recorded, else when the step runs */
    cut_tally calm, delayed;
    int tried, real;         /* without contracts: other bits */
    uint32_t real_runs;      /* in this run of delays, or in none of so many */
} row;

typedef struct clean {
    qe_capture capture;
    uint32_t steps, wrong;
    int same;
    uint64_t allocations; /* of device memory, while they ran */
    int64_t fell_bytes;   /* free memory of the GPU, whoever took it */
    /* medians, without delays: a step with contracts and order, one without either, and recording all graphs */
    double checked_ms, off_ms, record_ms;
} clean;

typedef struct check {
    uint32_t runs, steps, seeds;
    int json;
    const char *only;
    cut_reference reference;
    row rows[ROWS_MAX];
    uint32_t row_count;
    clean cleans[MODES];
    uint32_t clean_count; /* modes so far */
    planted planted[PLANTED_MAX];
    uint32_t planted_count;
    overwritten words[MODES];
    uint32_t words_count;
    double started;
} check;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void progress(const check *c, const char *schedule, const char *mode, const char *what) {
    fprintf(stderr, "%6.1f s  %-11s %-6s %s\n", seconds() - c->started, schedule, mode, what);
}

/* ---- teams on a GPU ---- */

static void slow_down(cut_stream *stream, uint64_t ns) {
    assert_int_equal(qe_cuda_delay(ns, stream->inner->stream), QE_OK);
}

/* Nothing waits yet: a kernel that is used for the first time may wait for everything that does. */
static void load_delay(const qe_device *device) {
    assert_int_equal(qe_cuda_delay(0, device->aside), QE_OK);
    assert_int_equal(cudaStreamSynchronize(device->aside), cudaSuccess);
}

static void opened(qe_device *device, const void *context) {
    qe_error error = {0};
    qe_cuda_options options = {.watch = context != NULL};
    qe_device *inner = cut_device_of(device)->inner;
    must(qe_cuda_configure(inner, &options, &error), &error, "configure");
    load_delay(inner);
}

/* Whole sixteens everywhere, as FP8 products ask. */
static const qe_model_config model = {.layers = 4, .hidden = 128, .heads = 2, .kv_heads = 1, .ffn = 192, .vocab = 256,
                                      .sequence = 64, .sequences = 1, .rope_theta = 10000.0f, .norm_epsilon = 1e-5f};

typedef struct way {
    const char *schedule;
    uint32_t ranks, chunks;
} way;

static void team_open(world *w, const way *on, qe_capture capture, int checked) {
    world_options options = {.schedule = on->schedule,
                             .ranks = on->ranks,
                             .chunks = on->chunks,
                             .capture = capture,
                             .contracts = checked ? QE_CONTRACTS_TRAP : QE_CONTRACTS_OFF,
                             .evaluates = 1,
                             .config = &model,
                             .backend = &cut.backend,
                             .comm = qe_cuda_comm(),
                             .ranks_create = qe_cuda_world_create,
                             .ranks_destroy = qe_cuda_world_destroy,
                             .opened = opened,
                             .opened_context = checked ? &options : NULL};
    cut_world_open(w, &options);
}

/* Delays inside of graphs are recorded with them. */
static void graphs_delay(world *w, uint64_t max_ns) {
    for (int i = 0; i < CUT_DEVICES_MAX; i++) {
        if (cut.devices[i] == NULL) continue;
        cut.devices[i]->inner->delay_max_ns = max_ns;
        cut.devices[i]->inner->delay_state = (uint64_t)i + 1;
    }
    must(qe_team_recapture(w->team, &w->error), &w->error, "recapture");
}

/* ---- the checks ---- */

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Median milliseconds of steps, or of recording all graphs again. */
static double time_ms(const check *c, world *w, int records) {
    enum { SAMPLES = 21 };
    double samples[SAMPLES];
    cut_start(w, &c->reference);
    for (int i = 0; i < SAMPLES; i++) {
        double begin = seconds();
        if (records) must(qe_team_recapture(w->team, &w->error), &w->error, "recapture");
        else (void)world_step(w, 0);
        samples[i] = 1e3 * (seconds() - begin);
    }
    qsort(samples, SAMPLES, sizeof *samples, by_size);
    return samples[SAMPLES / 2];
}

static row *row_add(check *c, cut_kind kind, const char *schedule, qe_capture capture) {
    assert_true(c->row_count < ROWS_MAX);
    row *added = &c->rows[c->row_count++];
    *added = (row){.kind = kind, .schedule = schedule, .capture = capture,
                   .recorded = cut_is_recorded(kind, capture)};
    return added;
}

static cut_tally tally_of(check *c, world *w, const row *r, uint32_t runs, int delayed) {
    uint32_t recordings = r->capture == QE_CAPTURE_STEP && !delayed ? runs : (runs + RUNS_SHARE - 1) / RUNS_SHARE;
    if (!r->recorded) return cut_trap_runs(w, &c->reference, r->kind, runs, delayed);
    return cut_capture_runs(w, &c->reference, r->kind, recordings);
}

static int is_there(cut_kind kind, qe_capture capture) { return kind != CUT_LANE || capture == QE_CAPTURE_STEP; }

static void trap_all(check *c, world *w, const way *on, qe_capture capture, uint32_t runs) {
    uint32_t first = c->row_count;
    progress(c, on->schedule, mode_names[capture], "edges left out");
    for (int kind = CUT_ENTER; kind < CUT_KINDS; kind++) {
        if (!is_there((cut_kind)kind, capture)) continue;
        row *r = row_add(c, (cut_kind)kind, on->schedule, capture);
        r->calm = tally_of(c, w, r, runs, 0);
        if (r->calm.dropped == 0) c->row_count--; /* one rank sends nothing */
    }
    progress(c, on->schedule, mode_names[capture], "edges left out, with delays");
    if (capture != QE_CAPTURE_NONE) graphs_delay(w, GRAPH_DELAY_MAX_NS);
    for (uint32_t i = first; i < c->row_count; i++) c->rows[i].delayed = tally_of(c, w, &c->rows[i], runs, 1);
}

/* Calls for memory so far, of all ranks; *free_out: bytes that are left. */
static uint64_t allocations_of(int64_t *free_out) {
    uint64_t count = 0;
    for (int i = 0; i < CUT_DEVICES_MAX; i++) {
        if (cut.devices[i] == NULL) continue;
        const qe_cuda_memory memory = qe_cuda_memory_of(cut.devices[i]->inner);
        count += memory.allocations;
        *free_out = (int64_t)memory.free_bytes;
    }
    return count;
}

/* On the team that trap_all left: its graphs still hold delays, and its first steps are long over. */
static void stay_clean(check *c, world *w, const way *on, clean *result) {
    int64_t free_before = 0, free_after = 0;
    progress(c, on->schedule, mode_names[result->capture], "clean steps with delays");
    const uint64_t before = allocations_of(&free_before);
    result->steps = c->steps;
    result->wrong = cut_clean_run(w, &c->reference, c->steps, &result->same);
    result->allocations = allocations_of(&free_after) - before;
    result->fell_bytes = free_before - free_after;
}

static void find_real(check *c, const way *on, clean *result) {
    world w;
    qe_capture capture = result->capture;
    progress(c, on->schedule, mode_names[capture], "without contracts");
    team_open(&w, on, capture, 0);
    result->off_ms = time_ms(c, &w, 0);
    for (uint32_t i = 0; i < c->row_count; i++) {
        row *r = &c->rows[i];
        if (r->recorded || r->capture != capture || strcmp(r->schedule, on->schedule) != 0) continue;
        r->tried = 1;
        r->real = cut_is_real(&w, &c->reference, r->kind, c->seeds, &r->real_runs);
    }
    world_close(&w);
}

static int is_wanted(const check *c, qe_capture capture) {
    return c->only == NULL || strcmp(c->only, mode_names[capture]) == 0;
}

/* gpipe has every kind of edge: only where forwards come first does a rank run ahead of what it sends. */
static void check_modes(check *c) {
    static const way all = {"gpipe", 2, 1};
    for (int capture = QE_CAPTURE_NONE; capture < MODES; capture++) {
        world w;
        if (!is_wanted(c, (qe_capture)capture)) continue;
        clean *result = &c->cleans[c->clean_count++];
        *result = (clean){.capture = (qe_capture)capture};
        team_open(&w, &all, (qe_capture)capture, 1);
        result->checked_ms = time_ms(c, &w, 0);
        if (capture != QE_CAPTURE_NONE) result->record_ms = time_ms(c, &w, 1);
        trap_all(c, &w, &all, (qe_capture)capture, c->runs);
        stay_clean(c, &w, &all, result);
        world_close(&w);
        find_real(c, &all, result);
    }
}

static void check_words(check *c) {
    for (int capture = QE_CAPTURE_LAYER; capture <= QE_CAPTURE_ACTION; capture++) {
        if (!is_wanted(c, (qe_capture)capture)) continue;
        progress(c, "1f1b", mode_names[capture], "witness words overwritten");
        c->words[c->words_count++] = words_overwritten((qe_capture)capture);
    }
}

static void check_schedules(check *c) {
    static const way others[] = {{"1f1b", 2, 1}, {"zbh1", 2, 1}, {"interleaved", 1, 2}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        for (int capture = QE_CAPTURE_NONE; capture < MODES; capture += QE_CAPTURE_STEP) {
            world w;
            if (!is_wanted(c, (qe_capture)capture)) continue;
            team_open(&w, &others[i], (qe_capture)capture, 1);
            trap_all(c, &w, &others[i], (qe_capture)capture, (c->runs + RUNS_SHARE - 1) / RUNS_SHARE);
            world_close(&w);
        }
}

static void make_reference(check *c) {
    static const way plain = {"1f1b", 2, 1};
    world w;
    progress(c, plain.schedule, "eager", "reference");
    team_open(&w, &plain, QE_CAPTURE_NONE, 0);
    cut_reference_make(&w, c->runs + 2, c->steps, &c->reference);
    world_close(&w);
}

/* ---- verdicts ---- */

static int tally_holds(const cut_tally *t) {
    return t->runs > 0 && t->trapped == t->runs && t->unchanged == t->runs && t->went_on == t->runs;
}

static int row_holds(const row *r) { return tally_holds(&r->calm) && tally_holds(&r->delayed); }

static const char *verdict_of(const row *r) {
    if (r->recorded) return "refused";
    for (int rule = 0; rule < QE_RULE_COUNT; rule++)
        if (r->calm.rules[rule] > 0) return qe_rule_id((qe_rule)rule);
    return "-";
}

/* Was a kind of edge shown to matter anywhere? Asked of those that were tried. */
static int kind_is_real(const check *c, cut_kind kind) {
    int tried = 0;
    for (uint32_t i = 0; i < c->row_count; i++) {
        if (c->rows[i].kind != kind || !c->rows[i].tried) continue;
        tried = 1;
        if (c->rows[i].real) return 1;
    }
    return !tried;
}

static int words_hold(const overwritten *w) {
    return w->trapped == w->tried && w->state_kept == w->tried && w->went_on == w->tried;
}

static int all_holds(const check *c) {
    int holds = 1;
    for (uint32_t i = 0; i < c->row_count; i++) holds &= row_holds(&c->rows[i]);
    for (int kind = CUT_ENTER; kind < CUT_KINDS; kind++) holds &= kind_is_real(c, (cut_kind)kind);
    for (uint32_t i = 0; i < c->clean_count; i++)
        holds &= c->cleans[i].wrong == 0 && c->cleans[i].same && c->cleans[i].allocations == 0;
    for (uint32_t i = 0; i < c->words_count; i++) holds &= words_hold(&c->words[i]);
    for (uint32_t i = 0; i < c->planted_count; i++) holds &= c->planted[i].refused == c->planted[i].refusal_due;
    return holds;
}

/* ---- for people ---- */

static void print_fraction(uint32_t part, uint32_t whole) {
    char text[32];
    snprintf(text, sizeof text, "%u/%u", part, whole);
    printf(" %-9s", text);
}

static void print_row(const row *r) {
    printf("%-11s %-12s %-7s", cut_rows[r->kind].name, r->schedule, mode_names[r->capture]);
    print_fraction(r->calm.trapped, r->calm.runs);
    print_fraction(r->delayed.trapped, r->delayed.runs);
    printf(" %-11s", verdict_of(r));
    print_fraction(r->calm.unchanged + r->delayed.unchanged, r->calm.runs + r->delayed.runs);
    print_fraction(r->calm.went_on + r->delayed.went_on, r->calm.runs + r->delayed.runs);
    if (!r->tried) printf(" -\n");
    else if (r->real) printf(" yes, run %u\n", r->real_runs);
    else printf(" no, %u runs\n", r->real_runs);
}

static void print_words(const check *c) {
    for (uint32_t i = 0; i < c->row_count; i++) {
        const row *r = &c->rows[i];
        if (r->recorded && r->capture == QE_CAPTURE_STEP && strcmp(r->schedule, "gpipe") == 0)
            printf("  %-11s %s\n", cut_rows[r->kind].name, r->calm.words);
    }
}

static void print_clean(const clean *result) {
    const char *mode = mode_names[result->capture];
    printf("clean       %-7s %u steps with delays: %u refused or other losses, %s bits at the end\n", mode,
           result->steps, result->wrong, result->same ? "the same" : "OTHER");
    printf("memory      %-7s %llu allocations in these steps; free memory fell by %lld bytes\n", mode,
           (unsigned long long)result->allocations, (long long)result->fell_bytes);
    printf("cost        %-7s a step takes %.2f ms with contracts and order, %.2f ms without", mode, result->checked_ms,
           result->off_ms);
    if (result->capture != QE_CAPTURE_NONE) printf("; recording all graphs takes %.1f ms", result->record_ms);
    printf("\n");
}

static void print_text(const check *c) {
    printf("edge        schedule     mode    trapped   delayed   verdict     state     goes on   other bits without\n");
    for (uint32_t i = 0; i < c->row_count; i++) print_row(&c->rows[i]);
    printf("why recordings were refused:\n");
    print_words(c);
    for (uint32_t i = 0; i < c->clean_count; i++) print_clean(&c->cleans[i]);
    for (uint32_t i = 0; i < c->words_count; i++)
        printf("words       %-7s %u overwritten between launches: %u trapped, %u states kept, %u went on\n",
               mode_names[c->words[i].capture], c->words[i].tried, c->words[i].trapped, c->words[i].state_kept,
               c->words[i].went_on);
    for (uint32_t i = 0; i < c->planted_count; i++)
        printf("planted     %s: %s%s%s\n", c->planted[i].what, c->planted[i].refused ? "refused" : "accepted",
               c->planted[i].refused ? ": " : "", c->planted[i].words);
    printf("%s in %.0f s\n", all_holds(c) ? "all holds" : "NOT ALL HOLDS", seconds() - c->started);
}

/* ---- for programs ---- */

static void json_text(const char *text) {
    putchar('"');
    for (; *text != 0; text++) {
        if (*text == '"' || *text == '\\') putchar('\\');
        putchar((unsigned char)*text < ' ' ? ' ' : *text);
    }
    putchar('"');
}

static void json_tally(const char *name, const cut_tally *t) {
    printf(",\"%s\":{\"runs\":%u,\"trapped\":%u,\"state_kept\":%u,\"went_on\":%u}", name, t->runs, t->trapped,
           t->unchanged, t->went_on);
}

static void json_row(const row *r) {
    printf("{\"edge\":\"%s\",\"schedule\":\"%s\",\"mode\":\"%s\",\"verdict\":\"%s\"", cut_rows[r->kind].name,
           r->schedule, mode_names[r->capture], verdict_of(r));
    json_tally("calm", &r->calm);
    json_tally("delayed", &r->delayed);
    if (r->recorded) {
        printf(",\"message\":");
        json_text(r->calm.words);
    }
    if (r->tried)
        printf(",\"without_contracts\":{\"other_bits\":%s,\"runs\":%u}", r->real ? "true" : "false", r->real_runs);
    printf("}");
}

static void print_json(const check *c) {
    printf("{\"edges\":[");
    for (uint32_t i = 0; i < c->row_count; i++) {
        if (i > 0) printf(",\n");
        json_row(&c->rows[i]);
    }
    printf("],\n\"clean\":[");
    for (uint32_t i = 0; i < c->clean_count; i++)
        printf("%s{\"mode\":\"%s\",\"steps\":%u,\"wrong\":%u,\"same_state\":%s,\"allocations\":%llu,"
               "\"free_fell_bytes\":%lld,\"checked_ms\":%.3f,\"off_ms\":%.3f,\"record_ms\":%.3f}",
               i > 0 ? ",\n" : "", mode_names[c->cleans[i].capture], c->cleans[i].steps, c->cleans[i].wrong,
               c->cleans[i].same ? "true" : "false", (unsigned long long)c->cleans[i].allocations,
               (long long)c->cleans[i].fell_bytes, c->cleans[i].checked_ms, c->cleans[i].off_ms,
               c->cleans[i].record_ms);
    printf("],\n\"words\":[");
    for (uint32_t i = 0; i < c->words_count; i++)
        printf("%s{\"mode\":\"%s\",\"tried\":%u,\"trapped\":%u,\"state_kept\":%u,\"went_on\":%u}", i > 0 ? "," : "",
               mode_names[c->words[i].capture], c->words[i].tried, c->words[i].trapped, c->words[i].state_kept,
               c->words[i].went_on);
    printf("],\n\"planted\":[");
    for (uint32_t i = 0; i < c->planted_count; i++) {
        printf("%s{\"what\":\"%s\",\"refused\":%s,\"message\":", i > 0 ? "," : "", c->planted[i].what,
               c->planted[i].refused ? "true" : "false");
        json_text(c->planted[i].words);
        printf("}");
    }
    printf("],\n\"holds\":%s,\"seconds\":%.1f}\n", all_holds(c) ? "true" : "false", seconds() - c->started);
}

/* ---- the program ---- */

static int has_gpu(void) {
    qe_device *device = NULL;
    qe_error error = {0};
    qe_status status = qe_cuda_backend()->open(&device, &error);
    if (status == QE_OK) {
        fprintf(stderr, "device: %s\n", qe_cuda_backend()->identity(device));
        qe_cuda_backend()->close(device);
        return 0;
    }
    printf("%s: %s\n", status == QE_ERROR_UNSUPPORTED ? "skipped" : "failed", error.message);
    return status == QE_ERROR_UNSUPPORTED ? SKIPPED : EXIT_FAILURE;
}

static int is_mode(const char *name) {
    for (int i = 0; i < MODES; i++)
        if (strcmp(name, mode_names[i]) == 0) return 1;
    return 0;
}

static int number_read(const char *word, uint32_t *number_out) {
    uint64_t number;
    if (!qe_text_to_u64(word, &number) || number > UINT32_MAX) return 0;
    *number_out = (uint32_t)number;
    return 1;
}

static int parse(check *c, int count, char **words) {
    for (int i = 1; i < count; i++) {
        uint32_t *number = strcmp(words[i], "--runs") == 0    ? &c->runs
                           : strcmp(words[i], "--steps") == 0 ? &c->steps
                           : strcmp(words[i], "--seeds") == 0 ? &c->seeds
                                                              : NULL;
        if (strcmp(words[i], "--json") == 0) c->json = 1;
        else if (strcmp(words[i], "--only") == 0 && i + 1 < count) c->only = words[++i];
        else if (number == NULL || i + 1 == count || !number_read(words[++i], number)) return 0;
    }
    return c->runs > 0 && c->steps > 0 && (c->only == NULL || is_mode(c->only));
}

static int usage(FILE *to, int status) {
    fprintf(to, "usage: check_gpu [--runs N] [--steps N] [--seeds N] [--only MODE] [--json]\n"
                "MODE: eager, layer, action or step\n");
    return status;
}

int main(int argc, char **argv) {
    static check c = {.runs = 100, .steps = 1000, .seeds = 60};
    if (argc == 2 && strcmp(argv[1], "--help") == 0) return usage(stdout, EXIT_SUCCESS);
    if (!parse(&c, argc, argv)) return usage(stderr, 2);
    int status = has_gpu();
    if (status != 0) return status;
    c.started = seconds();
    cut_backend(qe_cuda_backend(), 0);
    cut.delay = slow_down;
    c.planted_count = planted_graphs(c.planted);
    make_reference(&c);
    check_modes(&c);
    check_schedules(&c);
    check_words(&c);
    if (c.json) print_json(&c);
    else print_text(&c);
    cut_reference_free(&c.reference);
    return all_holds(&c) ? EXIT_SUCCESS : EXIT_FAILURE;
}
