/* csv_write.c - writes PyTorch's CSV: compute-only, or with the communication that PyTorch itself would add
 * (_add_unshard_reshard, _add_reduce_grad, _add_send_recv), in the same places. */
#include "schedule/csv.h"
#include "schedule/order.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

/* PyTorch's max_active_stages: so many stages that compute next have their weights gathered. */
enum { GATHERED = 3 };

static size_t action_text(const qe_action *action, char *text, size_t capacity) {
    int length = action->kind >= QE_CSV_UNSHARD
                     ? snprintf(text, capacity, "%u%s", (unsigned)action->stage, qe_csv_kind_word(action->kind))
                     : snprintf(text, capacity, "%u%s%u", (unsigned)action->stage, qe_csv_kind_word(action->kind),
                                action->microbatch);
    return (size_t)length;
}

/* Actions of a cell: 1, or 2 for a pair. */
static uint32_t cell_count(const qe_action *action, uint32_t left) { return action->paired && left > 1 ? 2 : 1; }

static void cell_text(const qe_action *action, uint32_t count, char text[static QE_CSV_CELL_BYTES]) {
    if (count == 1) {
        (void)action_text(action, text, QE_CSV_CELL_BYTES);
        return;
    }
    size_t at = 1;
    text[0] = '(';
    at += action_text(&action[0], text + at, QE_CSV_CELL_BYTES - at);
    text[at++] = ';';
    at += action_text(&action[1], text + at, QE_CSV_CELL_BYTES - at);
    (void)snprintf(text + at, QE_CSV_CELL_BYTES - at, ")OVERLAP_F_B");
}

uint32_t qe_schedule_cell_text(const qe_schedule *schedule, uint32_t index, char *text, size_t capacity) {
    char cell[QE_CSV_CELL_BYTES];
    const qe_action *action = &schedule->actions[index];
    uint32_t count = 1;
    if (action->paired) { /* where its row ends takes a search */
        uint32_t rank = qe_schedule_action_rank(schedule, index);
        count = cell_count(action, schedule->rank_begin[rank + 1] - index);
    }
    cell_text(action, count, cell);
    (void)snprintf(text, capacity, "%s", cell);
    return count;
}

static void write_row(const qe_action *actions, uint32_t action_count, FILE *file) {
    for (uint32_t i = 0; i < action_count;) {
        char text[QE_CSV_CELL_BYTES];
        uint32_t count = cell_count(&actions[i], action_count - i);
        cell_text(&actions[i], count, text);
        if (i > 0) (void)fputc(',', file);
        (void)fputs(text, file);
        i += count;
    }
    (void)fputc('\n', file);
}

static qe_status flush(FILE *file, qe_error *error_out) {
    if (fflush(file) == 0 && !ferror(file)) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_IO, "check the space left on the disk", "cannot write the schedule: %s",
                        errno == 0 ? "write error" : strerror(errno));
}

qe_status qe_schedule_write_csv(const qe_schedule *schedule, FILE *file, qe_error *error_out) {
    errno = 0;
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) {
        uint32_t begin = schedule->rank_begin[rank];
        write_row(&schedule->actions[begin], schedule->rank_begin[rank + 1] - begin, file);
    }
    return flush(file, error_out);
}

/* A row that grows. */
typedef struct list {
    qe_action *actions;
    uint32_t count, capacity;
} list;

/* `before`: every row with what concerns its stages' weights; `next` of them are in `after`, which has the transfers,
 * too. `done`: [lane][stage * microbatches + microbatch]. */
typedef struct lowering {
    const qe_schedule *schedule;
    list *before, *after; /* [ranks] */
    uint32_t *next;       /* [ranks] */
    uint8_t *done[2];
    int out_of_memory;
} lowering;

/* What one row knows of its stages. */
typedef struct row_stages {
    uint32_t *first;     /* [stages]: index of its next action in the row, or QE_NONE */
    uint32_t *following; /* [actions of the row]: index of the stage's next one */
    uint32_t *gradients; /* [stages]: W and B to come */
    uint8_t *gathered;   /* [stages] */
    uint16_t *stage;     /* [stage_count]: the stages of the row, ascending */
    uint32_t stage_count;
} row_stages;

static void put(lowering *l, list *to, qe_action action) {
    if (to->count == to->capacity) {
        uint32_t capacity = to->capacity == 0 ? 64 : 2 * to->capacity;
        qe_action *actions = realloc(to->actions, capacity * sizeof *actions);
        if (actions == NULL) {
            l->out_of_memory = 1;
            return;
        }
        to->actions = actions;
        to->capacity = capacity;
    }
    to->actions[to->count++] = action;
}

static void put_of_stage(lowering *l, list *to, uint32_t stage, qe_csv_kind kind) {
    put(l, to, (qe_action){.stage = (uint16_t)stage, .kind = (uint8_t)kind});
}

static int ends_gradient(const qe_action *action) {
    return action->kind == QE_ACTION_W || action->kind == QE_ACTION_B;
}

static void survey(const qe_schedule *schedule, const qe_action *row, uint32_t count, row_stages *of) {
    for (uint32_t stage = 0; stage < schedule->stages; stage++) of->first[stage] = QE_NONE;
    memset(of->gradients, 0, schedule->stages * sizeof *of->gradients);
    memset(of->gathered, 0, schedule->stages);
    for (uint32_t i = count; i-- > 0;) {
        of->following[i] = of->first[row[i].stage];
        of->first[row[i].stage] = i;
        of->gradients[row[i].stage] += (uint32_t)ends_gradient(&row[i]);
    }
    of->stage_count = 0;
    for (uint32_t stage = 0; stage < schedule->stages; stage++) {
        if (of->first[stage] != QE_NONE) of->stage[of->stage_count++] = (uint16_t)stage;
    }
}

/* The stages that compute next, in order; a pair counts whole. Returns how many. */
static uint32_t next_stages(const row_stages *of, const qe_action *row, uint32_t chosen[static GATHERED + 1]) {
    uint32_t count = 0, last = QE_NONE;
    for (;;) {
        uint32_t best = QE_NONE;
        for (uint32_t i = 0; i < of->stage_count; i++) {
            uint32_t at = of->first[of->stage[i]];
            if (at != QE_NONE && (last == QE_NONE || at > last) && at < best) best = at;
        }
        if (best == QE_NONE) return count;
        if (count >= GATHERED && !(best == last + 1 && row[last].paired)) return count;
        chosen[count++] = row[best].stage;
        last = best;
    }
}

static int is_among(uint32_t stage, const uint32_t *stages, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        if (stages[i] == stage) return 1;
    }
    return 0;
}

static void put_gathers(lowering *l, list *to, row_stages *of, const qe_action *row) {
    uint32_t chosen[GATHERED + 1], count = next_stages(of, row, chosen);
    for (uint32_t i = 0; i < of->stage_count; i++) {
        uint32_t stage = of->stage[i];
        if (!of->gathered[stage] || is_among(stage, chosen, count)) continue;
        of->gathered[stage] = 0;
        put_of_stage(l, to, stage, QE_CSV_RESHARD);
    }
    for (uint32_t i = 0; i < count; i++) {
        if (of->gathered[chosen[i]]) continue;
        of->gathered[chosen[i]] = 1;
        put_of_stage(l, to, chosen[i], QE_CSV_UNSHARD);
    }
}

static void lower_weights(lowering *l, uint32_t rank, row_stages *of) {
    const qe_action *row = &l->schedule->actions[l->schedule->rank_begin[rank]];
    uint32_t row_count = l->schedule->rank_begin[rank + 1] - l->schedule->rank_begin[rank];
    list *to = &l->before[rank];
    survey(l->schedule, row, row_count, of);
    for (uint32_t i = 0; i < row_count;) {
        uint32_t count = cell_count(&row[i], row_count - i);
        put_gathers(l, to, of, row);
        for (uint32_t half = i; half < i + count; half++) {
            put(l, to, row[half]);
            of->first[row[half].stage] = of->following[half];
        }
        for (uint32_t half = i; half < i + count; half++) {
            if (!ends_gradient(&row[half]) || --of->gradients[row[half].stage] > 0) continue;
            put_of_stage(l, to, row[half].stage, QE_CSV_REDUCE_GRAD);
        }
        i += count;
    }
    for (uint32_t i = 0; i < of->stage_count; i++) {
        if (of->gathered[of->stage[i]]) put_of_stage(l, to, of->stage[i], QE_CSV_RESHARD);
    }
}

static qe_status lower_all_weights(lowering *l, qe_error *error_out) {
    const qe_schedule *s = l->schedule;
    uint32_t longest = 0;
    for (uint32_t rank = 0; rank < s->ranks; rank++) {
        uint32_t count = s->rank_begin[rank + 1] - s->rank_begin[rank];
        if (count > longest) longest = count;
    }
    row_stages of = {.first = malloc((2 * (size_t)s->stages + longest) * sizeof *of.first),
                     .stage = malloc(s->stages * sizeof *of.stage),
                     .gathered = malloc(s->stages)};
    if (of.first != NULL && of.stage != NULL && of.gathered != NULL) {
        of.gradients = of.first + s->stages;
        of.following = of.gradients + s->stages;
        for (uint32_t rank = 0; rank < s->ranks; rank++) lower_weights(l, rank, &of);
    } else {
        l->out_of_memory = 1;
    }
    free(of.first);
    free(of.stage);
    free(of.gathered);
    if (!l->out_of_memory) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to add communication to a schedule");
}

static int lane_of(const qe_action *action) { return action->kind != QE_ACTION_F; }
static int has_result(const qe_action *action) {
    return action->kind == QE_ACTION_F || action->kind == QE_ACTION_I || action->kind == QE_ACTION_B;
}

static size_t pair_of(const qe_schedule *schedule, int64_t stage, uint32_t microbatch) {
    return (size_t)stage * schedule->microbatches + microbatch;
}

static int is_ready(const lowering *l, const qe_action *action) {
    int64_t source = (int64_t)action->stage + (lane_of(action) ? 1 : -1);
    if (!has_result(action) || source < 0 || source >= l->schedule->stages) return 1;
    return l->done[lane_of(action)][pair_of(l->schedule, source, action->microbatch)];
}

/* The SEND behind the action, and the RECV where its receiver's row ends now: so both ends have the same order. */
static void put_transfer(lowering *l, uint32_t rank, const qe_action *action) {
    int lane = lane_of(action);
    int64_t to = (int64_t)action->stage + (lane ? -1 : 1);
    if (!has_result(action)) return;
    l->done[lane][pair_of(l->schedule, action->stage, action->microbatch)] = 1;
    if (to < 0 || to >= l->schedule->stages) return;
    uint32_t receiver = qe_schedule_rank(l->schedule, (uint32_t)to, action->microbatch);
    if (receiver == rank) return;
    qe_action move = {.microbatch = action->microbatch,
                      .stage = action->stage,
                      .kind = lane ? QE_CSV_SEND_B : QE_CSV_SEND_F};
    put(l, &l->after[rank], move);
    move.stage = (uint16_t)to;
    move.kind = lane ? QE_CSV_RECV_B : QE_CSV_RECV_F;
    put(l, &l->after[receiver], move);
}

/* The next cell of a rank, if its inputs are under way. */
static int lower_cell(lowering *l, uint32_t rank) {
    const list *row = &l->before[rank];
    if (l->next[rank] == row->count) return 0;
    const qe_action *cell = &row->actions[l->next[rank]];
    uint32_t count = cell_count(cell, row->count - l->next[rank]);
    for (uint32_t i = 0; i < count; i++) {
        if (!is_ready(l, &cell[i])) return 0;
    }
    for (uint32_t i = 0; i < count; i++) put(l, &l->after[rank], cell[i]);
    for (uint32_t i = 0; i < count; i++) put_transfer(l, rank, &cell[i]);
    l->next[rank] += count;
    return 1;
}

static qe_status lower_transfers(lowering *l, qe_error *error_out) {
    for (int moved = 1; moved;) {
        moved = 0;
        for (uint32_t rank = 0; rank < l->schedule->ranks; rank++) moved |= lower_cell(l, rank);
    }
    if (l->out_of_memory) {
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to add communication to a schedule");
    }
    for (uint32_t rank = 0; rank < l->schedule->ranks; rank++) {
        if (l->next[rank] == l->before[rank].count) continue;
        char text[QE_CSV_CELL_BYTES];
        const qe_action *cell = &l->before[rank].actions[l->next[rank]];
        cell_text(cell, cell_count(cell, l->before[rank].count - l->next[rank]), text);
        return qe_error_set(error_out, QE_CONTRACT, "take the pair apart",
                            "the schedule stops where pairs send at their end: %s on rank %u never has its input",
                            text, rank);
    }
    return QE_OK;
}

static void close_lowering(lowering *l) {
    for (uint32_t rank = 0; l->before != NULL && rank < 2 * l->schedule->ranks; rank++) free(l->before[rank].actions);
    free(l->before);
    free(l->next);
    free(l->done[0]);
}

static qe_status open_lowering(const qe_schedule *schedule, lowering *l, qe_error *error_out) {
    size_t pairs = (size_t)schedule->stages * schedule->microbatches;
    *l = (lowering){.schedule = schedule};
    l->before = calloc(2 * (size_t)schedule->ranks, sizeof *l->before);
    l->next = calloc(schedule->ranks, sizeof *l->next);
    l->done[0] = calloc(2 * pairs, 1);
    if (l->before == NULL || l->next == NULL || l->done[0] == NULL) {
        close_lowering(l);
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to add communication to a schedule");
    }
    l->after = l->before + schedule->ranks;
    l->done[1] = l->done[0] + pairs;
    return QE_OK;
}

qe_status qe_schedule_write_csv_comms(const qe_schedule *schedule, FILE *file, qe_error *error_out) {
    lowering l;
    QE_TRY(qe_schedule_check(schedule, NULL, error_out));
    QE_TRY(open_lowering(schedule, &l, error_out));
    qe_status status = lower_all_weights(&l, error_out);
    if (status == QE_OK) status = lower_transfers(&l, error_out);
    errno = 0;
    for (uint32_t rank = 0; rank < schedule->ranks && status == QE_OK; rank++) {
        write_row(l.after[rank].actions, l.after[rank].count, file);
    }
    close_lowering(&l);
    return status == QE_OK ? flush(file, error_out) : status;
}
