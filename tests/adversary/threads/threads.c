/* threads.c - right programs and missing edges with real threads: every program runs on streams of the host backend,
 * each effect a copy into or out of its object's memory. What is executed is told to an order (order.h) and to nobody
 * else; the same program is judged by a ledger and by sets of items (precedence.c). Under ThreadSanitizer there is one
 * more witness: a race that it reports must have been trapped by both, and a right program must be silent.
 *
 *   adversary_threads [PROGRAMS [MUTANTS [SEED]]]     mutants of each program */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "adversary/adversary.h"
#include "qeffect/host.h"
#include "qeffect/order.h"
#include "sanitized.h"

enum { DEFAULT_PROGRAMS = 60, DEFAULT_MUTANTS = 4, ITEMS_MAX = 320, CELL_BYTES = 8, WRONG_MAX = 20 };

/* ---- ThreadSanitizer ---- */

#if FINDS_RACES
enum { ITEM_NS = 10000, ATTEMPTS = 3 }; /* to submit one item takes less; it sees one order of many at a time */
static _Atomic uint64_t reports;

/* Every race is asked about, and none stops the process. */
__attribute__((visibility("default"))) const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "suppress_equal_stacks=0:suppress_equal_addresses=0"; }
/* What GCC's runtime calls for each report; 1: it is not to be printed. */
__attribute__((visibility("default"))) _Bool on_report(const void *report, _Bool suppressed)
    __asm__("_ZN6__tsan8OnReportEPKNS_10ReportDescEb");
_Bool on_report(const void *report, _Bool suppressed) {
    (void)report;
    (void)suppressed;
    atomic_fetch_add(&reports, 1);
    return 1;
}
static uint64_t races_reported(void) { return atomic_load(&reports); }
#else
enum { ITEM_NS = 2000, ATTEMPTS = 1 };
static uint64_t races_reported(void) { return 0; }
#endif

/* ---- memory ---- */

typedef struct memory {
    const step *s;
    uint64_t *borders[512]; /* of each object: where its effects begin and end */
    uint32_t border_count[512], base[512]; /* base: first cell */
    uint32_t cells;
    char *bytes, *scratch[QE_PROGRAM_STREAMS_MAX];
} memory;

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void add_borders(memory *m, uint32_t object) {
    uint32_t count = 0;
    uint64_t *borders = malloc(2 * QE_EFFECTS_MAX * (m->s->right.count + 1u) * sizeof *borders);
    MUST(borders != NULL);
    for (uint32_t i = 0; i < m->s->right.count; i++)
        for (uint32_t k = 0; k < m->s->right.entries[i].item.effect_count; k++) {
            const qe_effect *effect = &m->s->right.entries[i].effects[k];
            if (effect->object != object) continue;
            borders[count++] = effect->begin;
            borders[count++] = effect->end;
        }
    qsort(borders, count, sizeof *borders, by_value);
    for (uint32_t i = 0; i < count; i++)
        if (m->border_count[object] == 0 || borders[m->border_count[object] - 1] != borders[i])
            borders[m->border_count[object]++] = borders[i];
    m->borders[object] = borders;
    m->base[object] = m->cells;
    m->cells += m->border_count[object] + 1;
}

static void memory_open(memory *m, const step *s) {
    memset(m, 0, sizeof *m);
    m->s = s;
    MUST(s->program.object_count <= 512);
    for (uint32_t i = 0; i < s->program.object_count; i++) add_borders(m, i);
    m->bytes = calloc(m->cells, CELL_BYTES);
    MUST(m->bytes != NULL);
    for (uint32_t i = 0; i < s->program.stream_count; i++) {
        m->scratch[i] = calloc(m->cells, CELL_BYTES);
        MUST(m->scratch[i] != NULL);
    }
}

static void memory_close(memory *m) {
    for (uint32_t i = 0; i < m->s->program.object_count; i++) free(m->borders[i]);
    for (uint32_t i = 0; i < m->s->program.stream_count; i++) free(m->scratch[i]);
    free(m->bytes);
}

static uint32_t cell_of(const memory *m, uint32_t object, uint64_t at) {
    uint32_t i = 0;
    while (i < m->border_count[object] && m->borders[object][i] < at) i++;
    return m->base[object] + i;
}

/* The bytes of an effect. Objects that are no buffers are one cell. */
static qe_range range_of(const memory *m, const qe_effect *effect) {
    int buffer = effect_is(effect, QE_OBJECT_BUFFER);
    uint32_t first = buffer ? cell_of(m, effect->object, effect->begin) : m->base[effect->object];
    uint32_t end = buffer ? cell_of(m, effect->object, effect->end) : first + 1;
    int write = effect_writes(effect);
    return (qe_range){.at = m->bytes + (size_t)first * CELL_BYTES, .bytes = (uint64_t)(end - first) * CELL_BYTES,
                      .read = (uint8_t)!write, .write = (uint8_t)write};
}

/* ---- running ---- */

typedef struct engine {
    qe_device *device;
    qe_stream *streams[QE_PROGRAM_STREAMS_MAX];
    qe_event *events[64];
    qe_order *order;
    uint32_t places[QE_PROGRAM_STREAMS_MAX], marks[64], waiter; /* `waiter`: the host, where it waits for an event */
    qe_op *ops;
    uint32_t op_count;
    uint64_t breaches;
    qe_op delays[QE_PROGRAM_STREAMS_MAX]; /* all work is given before any begins: nothing but edges orders it */
    uint64_t spans[QE_PROGRAM_STREAMS_MAX][2];
} engine;

static const qe_stream_ops *ops_of(void) { return qe_host_backend()->stream; }
static int is_host(const step *s, uint32_t stream) { return s->program.streams[stream].role == QE_STREAM_HOST; }

static void engine_open(engine *e, const step *s, dice *d) {
    memset(e, 0, sizeof *e);
    MUST(qe_host_backend()->open(&e->device, NULL) == QE_OK && qe_order_create(&e->order, NULL) == QE_OK);
    MUST(s->program.event_count <= 64);
    for (uint32_t i = 0; i < s->program.stream_count; i++) {
        const qe_stream_info *info = &s->program.streams[i];
        if (is_host(s, i)) continue;
        MUST(ops_of()->create(e->device, info->name, &e->streams[i], NULL) == QE_OK);
        MUST(qe_order_add_stream(e->order, info->name, info->role, &e->places[i], NULL) == QE_OK);
    }
    MUST(qe_order_add_stream(e->order, "waiter", QE_STREAM_COMPUTE, &e->waiter, NULL) == QE_OK);
    for (uint32_t i = 0; i < s->program.event_count; i++) {
        MUST(ops_of()->event_create(e->device, &e->events[i], NULL) == QE_OK);
        e->marks[i] = qe_order_add_event(e->order);
    }
    e->ops = calloc((size_t)QE_EFFECTS_MAX * (s->right.count + 8u), sizeof *e->ops);
    MUST(e->ops != NULL);
    for (uint32_t i = 0; i < s->program.stream_count; i++) {
        e->delays[i] = (qe_op){.kind = QE_OP_DELAY};
        e->delays[i].args.delay =
            (qe_args_delay){.duration_ns = s->right.count * ITEM_NS * (1ull + dice_below(d, ATTEMPTS)),
                            .span_ns = e->spans[i]};
    }
}

static void engine_close(engine *e, const step *s) {
    for (uint32_t i = 0; i < s->program.stream_count; i++)
        if (e->streams[i] != NULL) ops_of()->destroy(e->streams[i]);
    for (uint32_t i = 0; i < s->program.event_count; i++) ops_of()->event_destroy(e->events[i]);
    qe_order_destroy(e->order);
    qe_host_backend()->close(e->device);
    free(e->ops);
}

static void tell(engine *e, uint32_t on, const qe_range *range) {
    qe_breach told;
    qe_status status = qe_order_access(e->order, on, "copy", range, 1, &told);
    MUST(status == QE_OK || status == QE_CONTRACT);
    e->breaches += status == QE_CONTRACT;
}

static void run_effect(engine *e, const memory *m, const step *s, uint32_t stream, const qe_effect *effect) {
    qe_range range = range_of(m, effect);
    char *scratch = m->scratch[stream];
    if (range.bytes == 0) return;
    tell(e, is_host(s, stream) ? QE_NONE : e->places[stream], &range);
    qe_op *op = &e->ops[e->op_count++];
    *op = (qe_op){.kind = QE_OP_COPY};
    op->args.copy = range.write ? (qe_args_copy){.from = scratch, .to = range.at, .bytes = range.bytes}
                                : (qe_args_copy){.from = range.at, .to = scratch, .bytes = range.bytes};
    if (is_host(s, stream)) memcpy(op->args.copy.to, op->args.copy.from, range.bytes);
    else MUST(ops_of()->submit(e->streams[stream], op) == QE_OK);
}

static void sync_one(engine *e, uint32_t stream) {
    if (e->streams[stream] == NULL) return;
    MUST(ops_of()->sync(e->streams[stream], NULL) == QE_OK && qe_order_sync(e->order, e->places[stream]) == QE_OK);
}

static void sync_event(engine *e, uint32_t event) {
    MUST(ops_of()->event_sync(e->events[event], NULL) == QE_OK);
    MUST(qe_order_wait(e->order, e->waiter, e->marks[event]) == QE_OK && qe_order_sync(e->order, e->waiter) == QE_OK);
}

static void run_item(engine *e, const memory *m, const step *s, const entry *given) {
    const qe_item *item = &given->item;
    switch ((qe_item_kind)item->kind) {
    case QE_ITEM_OP:
        for (uint32_t k = 0; k < item->effect_count; k++) run_effect(e, m, s, item->stream, &given->effects[k]);
        break;
    case QE_ITEM_RECORD:
        MUST(ops_of()->record(e->streams[item->stream], e->events[item->event]) == QE_OK);
        MUST(qe_order_record(e->order, e->places[item->stream], e->marks[item->event]) == QE_OK);
        break;
    case QE_ITEM_WAIT:
        if (is_host(s, item->stream)) {
            sync_event(e, item->event);
            break;
        }
        MUST(ops_of()->wait(e->streams[item->stream], e->events[item->event]) == QE_OK);
        MUST(qe_order_wait(e->order, e->places[item->stream], e->marks[item->event]) == QE_OK);
        break;
    case QE_ITEM_SYNC_EVENT: sync_event(e, item->event); break;
    case QE_ITEM_SYNC_STREAM: sync_one(e, item->stream); break;
    case QE_ITEM_SYNC_DEVICE:
        for (uint32_t i = 0; i < s->program.stream_count; i++) sync_one(e, i);
        break;
    default: MUST(0 && "an item of a step");
    }
}

typedef struct witness {
    uint64_t breaches, races; /* of the order; of ThreadSanitizer */
} witness;

static witness run_once(const memory *m, const step *s, const item_list *list, dice *d) {
    engine e;
    engine_open(&e, s, d);
    uint64_t before = races_reported();
    for (uint32_t i = 0; i < s->program.stream_count; i++)
        if (e.streams[i] != NULL) MUST(ops_of()->submit(e.streams[i], &e.delays[i]) == QE_OK);
    for (uint32_t i = 0; i < list->count; i++) run_item(&e, m, s, &list->entries[i]);
    for (uint32_t i = 0; i < s->program.stream_count; i++) sync_one(&e, i);
    witness seen = {e.breaches, races_reported() - before};
    engine_close(&e, s);
    return seen;
}

static witness run(const memory *m, const step *s, const item_list *list, dice *d) {
    witness all = {0};
    for (int i = 0; i < ATTEMPTS; i++) {
        witness seen = run_once(m, s, list, d);
        all.breaches += seen.breaches;
        all.races += seen.races;
    }
    return all;
}

/* ---- cases ---- */

static struct {
    uint32_t programs, mutants, silent, racing, trapped_ledger, trapped_order, seen, wrong;
    uint64_t reports;
} sum;

static void complain(const mutant *m, uint64_t seed, verdict due, verdict found, witness seen, const char *what) {
    char file[80];
    fprintf(stderr, "seed %llu: %s, fault: %s: %s\n  sets of items: %s, ledger: %s, order: %llu breaches, "
            "ThreadSanitizer: %llu races\n", (unsigned long long)seed, m->step->name, m->operator_name, what,
            due.rule ? qe_rule_id(due.rule) : "nothing", found.rule ? qe_rule_id(found.rule) : "nothing",
            (unsigned long long)seen.breaches, (unsigned long long)seen.races);
    snprintf(file, sizeof file, "adversary-threads-%llu.qet", (unsigned long long)seed);
    shrink_and_write(m, file);
    sum.wrong++;
}

/* The host has no queue of its own: it records nothing, and a graph's recording is no memory. */
static int can_run(const step *s, const item_list *list) {
    for (uint32_t i = 0; i < list->count; i++) {
        const qe_item *item = &list->entries[i].item;
        if (item->kind == QE_ITEM_RECORD && is_host(s, item->stream)) return 0;
        if (item->kind == QE_ITEM_SYNC_STREAM && is_host(s, item->stream)) return 0;
    }
    return 1;
}

static void try_mutant(const memory *mem, const step *s, dice *d, uint64_t seed) {
    mutant m = {.step = s, .dice = d, .where = NOWHERE};
    const fault_operator *op = &order_operators[dice_below(d, order_operator_count)];
    item_list *list = &m.list;
    sequence_copy(list, &s->right);
    m.operator_name = op->name;
    m.kind = op->kind;
    if (op->traces_only || op->kind == FAULT_HOST || !op->plant(&m) || !can_run(s, list)) {
        mutant_free(&m);
        return;
    }
    verdict due = expected_of(&m), found = found_at(&m, MOMENT_ISSUE), said;
    witness seen = run(mem, s, list, d);
    int races = due.rule != QE_RULE_NONE && due.rule != QE_RULE_SYNC_EVENT;
    sum.mutants++;
    sum.racing += due.rule != QE_RULE_NONE;
    sum.trapped_ledger += found.rule != QE_RULE_NONE;
    sum.trapped_order += seen.breaches > 0;
    sum.seen += seen.races > 0;
    sum.reports += seen.races;
    uint32_t before = sum.wrong;
    if (!oracle_confirms(&m, due, &said)) complain(&m, seed, due, said, seen, "the oracle says otherwise");
    else if (!is_same(due, found)) complain(&m, seed, due, found, seen, "the ledger says otherwise");
    else if (races && seen.breaches == 0) complain(&m, seed, due, found, seen, "the order saw nothing");
    else if (due.rule == QE_RULE_NONE && seen.breaches > 0) complain(&m, seed, due, found, seen, "a false trap");
    else if (seen.races > 0 && found.rule == QE_RULE_NONE) complain(&m, seed, due, found, seen, "a race got through");
    tally_mutant(m.kind, MOMENT_DEVICE, due.rule, sum.wrong == before);
    mutant_free(&m);
}

static void run_case(uint64_t seed, uint32_t mutants) {
    dice d = {seed * 0x2545f4914f6cdd1du + 3};
    step s;
    memory m;
    for (;;) {
        if (dice_one_in(&d, 3)) generate_plan(&s, &d);
        else generate_small(&s, &d);
        if (!s.traces_only && s.right.count <= ITEMS_MAX) break;
        step_free(&s);
    }
    memory_open(&m, &s);
    witness seen = run(&m, &s, &s.right, &d);
    sum.programs++;
    sum.silent += seen.breaches == 0 && seen.races == 0;
    if (seen.breaches == 0 && seen.races == 0) tally_valid("programs on real threads", 1);
    if (seen.breaches > 0 || seen.races > 0) {
        fprintf(stderr, "seed %llu: %s is right, and %llu breaches, %llu races were seen\n", (unsigned long long)seed,
                s.name, (unsigned long long)seen.breaches, (unsigned long long)seen.races);
        tally_refused();
        sum.wrong++;
    }
    for (uint32_t i = 0; i < mutants; i++) try_mutant(&m, &s, &d, seed);
    memory_close(&m);
    step_free(&s);
}

int main(int argc, char **argv) {
    uint64_t programs = argc > 1 ? argument(argv[1]) : DEFAULT_PROGRAMS;
    uint64_t mutants = argc > 2 ? argument(argv[2]) : DEFAULT_MUTANTS, seed = argc > 3 ? argument(argv[3]) : 0;
    for (uint64_t i = 0; i < programs && sum.wrong < WRONG_MAX; i++) run_case(seed + i, (uint32_t)mutants);
    plans_free();
    printf("right programs on real threads: %u, silent: %u\n", sum.programs, sum.silent);
    printf("mutants: %u; an edge is missing in %u: the ledger trapped %u, the order of what was executed %u\n",
           sum.mutants, sum.racing, sum.trapped_ledger, sum.trapped_order);
    if (FINDS_RACES)
        printf("ThreadSanitizer saw races in %u mutants (%llu reports); all of them were trapped: %s\n", sum.seen,
               (unsigned long long)sum.reports, sum.wrong == 0 ? "yes" : "NO");
    printf("wrong: %u\n", sum.wrong);
    tally_keep();
    return sum.wrong > 0 || sum.mutants == 0;
}
