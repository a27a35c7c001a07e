/* bench_contracts.c - what the ledger costs, measured on the programs that training submits, without the work. */
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/seconds.h"
#include "cli/bench.h"

enum {
    ITEMS_PER_BLOCK = 16, /* timed together: reading the clock costs about as much as a check */
    WARM_STEPS = 200,
    COLD_STEPS = 40,
    JUDGED_STEPS = 20,
    CLOCK_READS = 1000,
    FLUSH_BYTES = 8 << 20, /* more than the second cache of a core: what the kernels of a step leave of a ledger */
};

/* Room for one rank's samples, and what is made of them. */
typedef struct samples {
    double *blocks; /* [WARM_STEPS * blocks of a step] seconds per item */
    size_t block_count;
    double cold[COLD_STEPS], judged[JUDGED_STEPS];
    char *flush; /* [FLUSH_BYTES] */
    double clock_s; /* of one reading */
} samples;

static double clock_cost(void) {
    double values[CLOCK_READS];
    for (int i = 0; i < CLOCK_READS; i++) {
        double begin = qe_seconds_now();
        values[i] = qe_seconds_now() - begin;
    }
    return qe_bench_median(values, CLOCK_READS);
}

static qe_status refused(const qe_violations *violations, qe_error *error_out) {
    return qe_error_set(error_out, QE_CONTRACT, NULL, "the certified program breaks %s when it is issued",
                        violations->count > 0 ? qe_rule_id(violations->record[0].rule) : "a rule");
}

/* One step of a program through the certified way; block times where `s` has room for them. */
static qe_status issue_step(qe_ledger *ledger, uint32_t items, samples *s, qe_error *error_out) {
    qe_violations violations;
    qe_ledger_step_begin(ledger);
    for (uint32_t first = 0; first < items; first += ITEMS_PER_BLOCK) {
        uint32_t end = first + ITEMS_PER_BLOCK < items ? first + ITEMS_PER_BLOCK : items;
        double begin = s != NULL ? qe_seconds_now() : 0;
        for (uint32_t i = first; i < end; i++)
            if (qe_ledger_issue(ledger, i, &violations) != QE_OK) return refused(&violations, error_out);
        if (s == NULL) continue;
        double took = qe_seconds_now() - begin - s->clock_s;
        s->blocks[s->block_count++] = (took > 0 ? took : 0) / (double)(end - first);
    }
    if (qe_ledger_step_check(ledger, &violations) != QE_OK || qe_ledger_step_end(ledger, &violations) != QE_OK)
        return refused(&violations, error_out);
    return QE_OK;
}

/* The same step as if nothing were certified: every item is judged with vector clocks. */
static qe_status judge_step(qe_ledger *ledger, const qe_program *program, qe_error *error_out) {
    qe_violations violations;
    qe_ledger_step_begin(ledger);
    for (uint32_t i = 0; i < program->item_count; i++) {
        const qe_item *item = &program->items[i];
        const qe_effect *effects = item->effect_count > 0 ? &program->effects[item->first_effect] : NULL;
        if (qe_ledger_submit(ledger, item, effects, i, &violations) != QE_OK) return refused(&violations, error_out);
    }
    return qe_ledger_step_end(ledger, &violations) == QE_OK ? QE_OK : refused(&violations, error_out);
}

static void drive_out(char *flush) {
    for (size_t i = 0; i < FLUSH_BYTES; i += 64) flush[i]++;
    __asm__ volatile("" : : "r"(flush) : "memory");
}

static qe_status time_program(qe_ledger *ledger, const qe_program *program, samples *s, qe_error *error_out) {
    for (int step = 0; step < WARM_STEPS; step++) QE_TRY(issue_step(ledger, program->item_count, s, error_out));
    for (int step = 0; step < COLD_STEPS; step++) {
        drive_out(s->flush);
        double begin = qe_seconds_now();
        QE_TRY(issue_step(ledger, program->item_count, NULL, error_out));
        s->cold[step] = qe_seconds_now() - begin - s->clock_s;
    }
    for (int step = 0; step < JUDGED_STEPS; step++) {
        double begin = qe_seconds_now();
        QE_TRY(judge_step(ledger, program, error_out));
        s->judged[step] = qe_seconds_now() - begin - s->clock_s;
    }
    return QE_OK;
}

static void add_up(qe_bench_contracts *contracts, const qe_program *program, samples *s, double *block_sum) {
    double cold_s = qe_bench_median(s->cold, COLD_STEPS), judged_s = qe_bench_median(s->judged, JUDGED_STEPS);
    contracts->items_per_step += program->item_count;
    for (uint32_t i = 0; i < program->item_count; i++) contracts->ops_per_step += program->items[i].kind == QE_ITEM_OP;
    contracts->step_check_us += 1e6 * cold_s;
    contracts->judge_ns += 1e9 * judged_s;
    *block_sum += 1e9 * qe_bench_median(s->blocks, s->block_count) * (double)program->item_count;
}

static qe_status measure_rank(const qe_program *program, qe_bench_contracts *contracts, double *block_sum,
                              qe_error *error_out) {
    samples s = {.clock_s = clock_cost()};
    qe_ledger *ledger = NULL;
    qe_violations violations;
    size_t blocks = (program->item_count + ITEMS_PER_BLOCK - 1) / ITEMS_PER_BLOCK;
    s.blocks = calloc(blocks * WARM_STEPS, sizeof *s.blocks);
    s.flush = calloc(FLUSH_BYTES, 1);
    qe_status status = s.blocks != NULL && s.flush != NULL
                           ? qe_ledger_create(program, &ledger, error_out)
                           : qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to time the ledger");
    if (status == QE_OK) status = qe_ledger_certify(ledger, &violations, error_out);
    if (status == QE_OK) status = time_program(ledger, program, &s, error_out);
    if (status == QE_OK) add_up(contracts, program, &s, block_sum);
    if (ledger != NULL) qe_ledger_destroy(ledger);
    free(s.blocks);
    free(s.flush);
    return status;
}

qe_status qe_bench_contracts_measure(const qe_plan *plan, qe_bench_contracts *contracts_out, qe_error *error_out) {
    qe_bench_contracts contracts = {0};
    double block_sum = 0;
    for (uint32_t rank = 0; rank < plan->ranks; rank++)
        QE_TRY(measure_rank(&plan->rank[rank].program, &contracts, &block_sum, error_out));
    QE_ASSERT(contracts.items_per_step > 0);
    double items = (double)contracts.items_per_step;
    contracts.check_ns = block_sum / items; /* the ranks' medians, weighted by their items */
    contracts.check_cold_ns = 1e3 * contracts.step_check_us / items;
    contracts.judge_ns /= items;
    *contracts_out = contracts;
    return QE_OK;
}
