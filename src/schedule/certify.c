/* certify.c - the judges in their order: rows, the run under a transport, what rows keep. Stored and streamed. */
#include "qeffect/certificate.h"

#include <stdlib.h>

#include "base/assert.h"
#include "schedule/order.h"
#include "schedule/retain.h"
#include "schedule/run.h"

void qe_certificate_deinit(qe_certificate *certificate) {
    free(certificate->rank);
    *certificate = (qe_certificate){0};
}

static qe_status judge_run(const qe_source *source, const qe_transport *transport,
                           qe_counterexample *counterexample_out, qe_error *error_out) {
    qe_run run;
    qe_status status = qe_run_all(&run, source, transport, error_out);
    if (status == QE_OK && qe_run_stuck(&run) > 0) status = qe_run_explain(&run, counterexample_out, error_out);
    qe_run_deinit(&run);
    return status;
}

/* Does it come to its end with so many buffers? */
static qe_status try_capacity(const qe_source *source, const qe_transport *transport, uint32_t capacity, int *ends_out,
                              qe_error *error_out) {
    qe_transport tried = *transport;
    qe_run run;
    tried.capacity = capacity;
    qe_status status = qe_run_all(&run, source, &tried, error_out);
    if (status == QE_OK) *ends_out = qe_run_stuck(&run) == 0;
    qe_run_deinit(&run);
    return status;
}

/* More buffers only ever help, so the least number that suffices is found by doubling and halving. With a buffer for
 * every message nothing waits for one, and what a certified schedule waits for otherwise comes. */
static qe_status find_capacity(const qe_source *source, const qe_transport *transport, uint32_t *capacity_out,
                               qe_error *error_out) {
    uint32_t low = 0, high = 1; /* low does not suffice, high may */
    for (int ends = 0; !ends;) {
        QE_TRY(try_capacity(source, transport, high, &ends, error_out));
        if (ends) break;
        QE_ASSERT(high <= INT32_MAX / 2);
        low = high;
        high *= 2;
    }
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        int ends = 0;
        QE_TRY(try_capacity(source, transport, middle, &ends, error_out));
        if (ends) high = middle;
        else low = middle;
    }
    *capacity_out = high;
    return QE_OK;
}

static qe_status certify(const qe_source *source, const qe_certificate_request *request, qe_certificate *certificate,
                         qe_counterexample *counterexample_out, qe_error *error_out) {
    *certificate = (qe_certificate){.ranks = source->ranks,
                                    .stages = source->stages,
                                    .microbatches = source->microbatches,
                                    .actions = source->actions,
                                    .streamed = source->schedule == NULL};
    QE_TRY(judge_run(source, &request->transport, counterexample_out, error_out));
    certificate->rank = calloc(source->ranks, sizeof *certificate->rank);
    if (certificate->rank == NULL) {
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to check a schedule");
    }
    QE_TRY(qe_retain_judge(source, request, certificate, counterexample_out, error_out));
    if (!request->find_capacity) return QE_OK;
    return find_capacity(source, &request->transport, &certificate->least_capacity, error_out);
}

/* Gives the verdict its text and hands over what the caller takes. */
static qe_status conclude(qe_status status, qe_counterexample *found, qe_counterexample *counterexample_out,
                          qe_error *error_out) {
    if (status == QE_CONTRACT) {
        char text[QE_ERROR_TEXT_BYTES];
        (void)qe_counterexample_text(found, text, sizeof text);
        (void)qe_error_set(error_out, QE_CONTRACT, "change one of the named actions", "%s", text);
    }
    if (status == QE_CONTRACT && counterexample_out != NULL) *counterexample_out = *found;
    else qe_counterexample_deinit(found);
    return status;
}

static qe_status check_request(const qe_certificate_request *request, qe_error *error_out) {
    int known = request->transport.sends <= QE_SENDS_BATCHED &&
                request->transport.communicators <= QE_COMMUNICATORS_ONE &&
                request->transport.release <= QE_RELEASE_OP && request->fold <= QE_FOLD_LAST_MICROBATCH &&
                request->fill <= QE_FILL_FIRST_MICROBATCH && request->gradients <= QE_GRADIENTS_OWN;
    if (!known)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL,
                            "a rule of the request is none that certificate.h names");
    if (request->memory_limit >= 0.0) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, "use 0 for none", "the memory limit is negative or not a number");
}

qe_status qe_schedule_check(const qe_schedule *schedule, qe_counterexample *counterexample_out, qe_error *error_out) {
    static const qe_transport usual = {QE_SENDS_SINGLE, QE_COMMUNICATORS_EDGE, QE_RELEASE_OP, 0};
    qe_counterexample found = {0};
    qe_status status = qe_schedule_check_rows(schedule, &found, error_out);
    if (status == QE_OK) {
        qe_source source = qe_source_stored(schedule);
        source.apart = 1;
        status = judge_run(&source, &usual, &found, error_out);
    }
    return conclude(status, &found, counterexample_out, error_out);
}

qe_status qe_schedule_certify(const qe_schedule *schedule, const qe_certificate_request *request,
                              qe_certificate *certificate_out, qe_counterexample *counterexample_out,
                              qe_error *error_out) {
    qe_counterexample found = {0};
    qe_certificate certificate = {0};
    QE_TRY(check_request(request, error_out));
    qe_status status = qe_schedule_check_rows(schedule, &found, error_out);
    if (status == QE_OK) {
        qe_source source = qe_source_stored(schedule);
        source.apart = request->transport.release == QE_RELEASE_OP;
        status = certify(&source, request, &certificate, &found, error_out);
    }
    if (status == QE_OK) *certificate_out = certificate;
    else qe_certificate_deinit(&certificate);
    return conclude(status, &found, counterexample_out, error_out);
}

int qe_schedule_streams(const char *name) {
    uint32_t actions_per_pair;
    return qe_source_formula(name, &actions_per_pair) != NULL;
}

static qe_status open_stream(const qe_schedule_request *order, qe_source *source_out, qe_error *error_out) {
    uint32_t actions_per_pair = 0;
    qe_source source = {.ranks = order->ranks, .stages = order->ranks, .microbatches = order->microbatches,
                        .order = order, .formula = qe_source_formula(order->name, &actions_per_pair)};
    if (source.formula == NULL || order->forward_only) {
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "generate it and certify what is stored",
                            "this order has no formula to stream it by");
    }
    QE_TRY(qe_schedule_request_check(order, error_out));
    source.row_count = actions_per_pair * order->microbatches;
    source.actions = (uint64_t)source.row_count * order->ranks;
    *source_out = source;
    return QE_OK;
}

qe_status qe_schedule_certify_streamed(const qe_schedule_request *order, const qe_certificate_request *request,
                                       qe_certificate *certificate_out, qe_counterexample *counterexample_out,
                                       qe_error *error_out) {
    qe_counterexample found = {0};
    qe_certificate certificate = {0};
    qe_source source;
    QE_TRY(check_request(request, error_out));
    QE_TRY(open_stream(order, &source, error_out));
    uint32_t *stage_rank = malloc(source.stages * sizeof *stage_rank);
    if (stage_rank == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to check a schedule");
    for (uint32_t stage = 0; stage < source.stages; stage++) stage_rank[stage] = stage; /* one chunk per rank */
    source.stage_rank = stage_rank;
    qe_status status = certify(&source, request, &certificate, &found, error_out);
    free(stage_rank);
    if (status == QE_OK) *certificate_out = certificate;
    else qe_certificate_deinit(&certificate);
    return conclude(status, &found, counterexample_out, error_out);
}
