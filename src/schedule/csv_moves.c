/* csv_moves.c - judges the communication in a file against its schedule. PyTorch takes such files as they are. Its
 * runtime posts every SEND and RECV of a rank on one communicator in the order of the row: a RECV completes when the
 * peer's SEND of the same result comes to the front of the peer's transfers, and not before; F, I and B wait for their
 * RECV, a SEND for its F, I or B. */
#include "schedule/csv.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

/* Results move forward (F) or backward (I, B). `at`: [lane][receives][stage * microbatches + microbatch], index of the
 * SEND or RECV of that stage and microbatch, or QE_NONE. */
typedef struct judge {
    const qe_schedule *schedule;
    const qe_csv_move *moves;
    uint32_t move_count;
    const char *path;
    qe_error *error_out;
    uint32_t *at[2][2];
    uint32_t *producer[2]; /* [stage * microbatches + microbatch]: index of the F, and of the I or B */
    int training;
} judge;

static int is_transfer(uint8_t kind) { return kind >= QE_CSV_SEND_F && kind <= QE_CSV_RECV_B; }
static int is_receive(uint8_t kind) { return kind == QE_CSV_RECV_F || kind == QE_CSV_RECV_B; }
static int lane_of(uint8_t kind) {
    return kind == QE_CSV_SEND_B || kind == QE_CSV_RECV_B || kind == QE_ACTION_I || kind == QE_ACTION_B;
}

static size_t pair_of(const judge *j, uint32_t stage, uint32_t microbatch) {
    return (size_t)stage * j->schedule->microbatches + microbatch;
}

/* "0SEND_F3 (row 1, cell 7)" */
static const char *words(const qe_action *action, char text[static 64]) {
    char number[16] = "";
    if (action->kind < QE_CSV_UNSHARD) (void)snprintf(number, sizeof number, "%u", action->microbatch);
    (void)snprintf(text, 64, "%u%s%s (row %u, cell %u)", (unsigned)action->stage, qe_csv_kind_word(action->kind),
                   number, action->row, action->column);
    return text;
}

static qe_status refuse(const judge *j, const qe_action *action, qe_rule rule, const char *reason,
                        const qe_action *other) {
    char it[64], that[64] = "";
    if (other != NULL) (void)words(other, that);
    (void)qe_error_set(j->error_out, QE_CONTRACT,
                       "correct the transfer, or leave all of them out: they follow from the order", "%s: %s %s%s",
                       qe_rule_id(rule), words(action, it), reason, that);
    (void)qe_error_place(j->error_out, j->path, action->row, action->column);
    return QE_CONTRACT;
}

/* The stage at the other end of a transfer; -1 or the number of stages beyond the ends of the pipeline. */
static int64_t peer_stage(const qe_action *move) {
    int up = move->kind == QE_CSV_SEND_F || move->kind == QE_CSV_RECV_B;
    return (int64_t)move->stage + (up ? 1 : -1);
}

static qe_status judge_place(const judge *j, const qe_csv_move *move) {
    const qe_schedule *s = j->schedule;
    const qe_action *action = &move->action;
    if (action->stage >= s->stages) return refuse(j, action, QE_RULE_SCHEDULE_PLACE, "is of a stage without F", NULL);
    if (action->microbatch >= s->microbatches) {
        return refuse(j, action, QE_RULE_SCHEDULE_PLACE, "is of a microbatch without F", NULL);
    }
    uint32_t home = qe_schedule_rank(s, action->stage, action->microbatch);
    if (!is_transfer(action->kind) && s->reversed > 0) {
        uint32_t other = qe_schedule_rank(s, s->stages - 1 - action->stage, action->microbatch);
        if (move->rank == other) return QE_OK;
    }
    if (home != move->rank) return refuse(j, action, QE_RULE_SCHEDULE_PLACE, "is not on its stage's rank", NULL);
    if (!is_transfer(action->kind)) return QE_OK;
    int64_t peer = peer_stage(action);
    if (peer < 0 || peer >= s->stages) {
        return refuse(j, action, QE_RULE_SCHEDULE_PLACE, "has no stage at the other end", NULL);
    }
    if (qe_schedule_rank(s, (uint32_t)peer, action->microbatch) == home) {
        return refuse(j, action, QE_RULE_SCHEDULE_PLACE, "is between two stages of one rank, which needs no transfer",
                      NULL);
    }
    if (lane_of(action->kind) == 1 && !j->training) {
        return refuse(j, action, QE_RULE_SCHEDULE_PLACE, "is of a gradient, and there is no I or B", NULL);
    }
    return QE_OK;
}

/* A SEND behind its F, I or B; a RECV before. */
static qe_status judge_order(const judge *j, const qe_csv_move *move) {
    const qe_action *action = &move->action;
    uint32_t computes = j->producer[lane_of(action->kind)][pair_of(j, action->stage, action->microbatch)];
    const qe_action *other = &j->schedule->actions[computes];
    if (is_receive(action->kind)) {
        if (move->before <= computes) return QE_OK;
        return refuse(j, action, QE_RULE_SCHEDULE_ORDER, "comes after what needs it, ", other);
    }
    if (move->before > computes) return QE_OK;
    return refuse(j, action, QE_RULE_SCHEDULE_ORDER, "comes before what it sends, ", other);
}

/* Each SEND and RECV once, and on its side of what it is for. */
static qe_status judge_each(const judge *j) {
    for (uint32_t i = 0; i < j->move_count; i++) {
        const qe_action *action = &j->moves[i].action;
        if (!is_transfer(action->kind)) continue;
        uint32_t *at = &j->at[lane_of(action->kind)][is_receive(action->kind)][pair_of(j, action->stage,
                                                                                      action->microbatch)];
        if (*at != QE_NONE) {
            return refuse(j, action, QE_RULE_SCHEDULE_DUPLICATE, "repeats ", &j->moves[*at].action);
        }
        *at = i;
        QE_TRY(judge_order(j, &j->moves[i]));
    }
    return QE_OK;
}

/* The action that needs a transfer has it at both ends. `stage` is the receiver. */
static qe_status judge_complete(const judge *j, int lane, uint32_t stage, uint32_t microbatch) {
    int64_t from = (int64_t)stage + (lane == 0 ? -1 : 1);
    if (from < 0 || from >= j->schedule->stages) return QE_OK;
    uint32_t sender = (uint32_t)from, rank = qe_schedule_rank(j->schedule, stage, microbatch);
    if (qe_schedule_rank(j->schedule, sender, microbatch) == rank) return QE_OK;
    for (int receives = 0; receives < 2; receives++) {
        uint32_t of = receives ? stage : sender;
        if (j->at[lane][receives][pair_of(j, of, microbatch)] != QE_NONE) continue;
        const qe_action *needs = &j->schedule->actions[j->producer[lane][pair_of(j, of, microbatch)]];
        return refuse(j, needs, QE_RULE_SCHEDULE_MISSING,
                      receives ? lane == 0 ? "has no RECV_F" : "has no RECV_B"
                               : lane == 0 ? "has no SEND_F" : "has no SEND_B", NULL);
    }
    return QE_OK;
}

static qe_status judge_all_there(const judge *j) {
    for (int lane = 0; lane < 1 + j->training; lane++) {
        for (uint32_t stage = 0; stage < j->schedule->stages; stage++) {
            for (uint32_t m = 0; m < j->schedule->microbatches; m++) QE_TRY(judge_complete(j, lane, stage, m));
        }
    }
    return QE_OK;
}

/* What stands first on every rank: of its actions, and of its transfers. */
typedef struct run {
    const judge *j;
    uint32_t *action;          /* [ranks]: index of the first that has not run */
    uint32_t *move, *move_end; /* [ranks]: index of the first transfer that is not over, and behind the last */
    uint8_t *over;             /* [moves] */
} run;

static const qe_action *front(const run *r, uint32_t rank) {
    return r->move[rank] == r->move_end[rank] ? NULL : &r->j->moves[r->move[rank]].action;
}

static uint32_t peer_rank(const run *r, const qe_action *move) {
    return qe_schedule_rank(r->j->schedule, (uint32_t)peer_stage(move), move->microbatch);
}

/* The other end of a transfer. */
static uint32_t counterpart(const run *r, const qe_action *move) {
    size_t pair = pair_of(r->j, (uint32_t)peer_stage(move), move->microbatch);
    return r->j->at[lane_of(move->kind)][!is_receive(move->kind)][pair];
}

/* Index of the transfer that an action waits for, or QE_NONE. */
static uint32_t awaited(const run *r, const qe_action *action) {
    if (action->kind == QE_ACTION_W) return QE_NONE;
    uint32_t receive = r->j->at[lane_of(action->kind)][1][pair_of(r->j, action->stage, action->microbatch)];
    return receive == QE_NONE || r->over[receive] ? QE_NONE : receive;
}

/* A SEND's result is there, or it is a RECV. */
static int is_filled(const run *r, uint32_t rank, const qe_action *move) {
    size_t pair = pair_of(r->j, move->stage, move->microbatch);
    return is_receive(move->kind) || r->j->producer[lane_of(move->kind)][pair] < r->action[rank];
}

static void skip_over(run *r, uint32_t rank) {
    while (r->move[rank] < r->move_end[rank] &&
           (r->over[r->move[rank]] || !is_transfer(r->j->moves[r->move[rank]].action.kind))) {
        r->move[rank]++;
    }
}

/* Both ends in front, and the result there: the transfer is over. */
static int step_transfer(run *r, uint32_t rank) {
    const qe_action *move = front(r, rank);
    if (move == NULL) return 0;
    uint32_t peer = peer_rank(r, move), other = counterpart(r, move);
    if (r->move[peer] != other) return 0;
    if (!is_filled(r, rank, move) || !is_filled(r, peer, &r->j->moves[other].action)) return 0;
    r->over[r->move[rank]] = r->over[other] = 1;
    skip_over(r, rank);
    skip_over(r, peer);
    return 1;
}

static int step_rank(run *r, uint32_t rank) {
    int moved = 0;
    while (step_transfer(r, rank)) moved = 1;
    while (r->action[rank] < r->j->schedule->rank_begin[rank + 1] &&
           awaited(r, &r->j->schedule->actions[r->action[rank]]) == QE_NONE) {
        r->action[rank]++;
        moved = 1;
    }
    return moved;
}

/* Why the front transfer of a rank that stands still waits: its other end is not in front of the peer's. (A SEND in
 * front has its result: what its F, I or B needs stands before it, and is over.) Returns the peer. */
static uint32_t next_stuck(const run *r, uint32_t rank, char *text, size_t capacity) {
    const qe_action *move = front(r, rank);
    QE_ASSERT(move != NULL);
    uint32_t peer = peer_rank(r, move);
    const qe_action *other = &r->j->moves[counterpart(r, move)].action, *first = front(r, peer);
    char it[64], that[64], before[64];
    QE_ASSERT(first != NULL && first != other);
    (void)snprintf(text, capacity, "%s waits for %s, which stands behind %s", words(move, it), words(other, that),
                   words(first, before));
    return peer;
}

/* Whoever follows the ranks that wait comes back. */
static qe_status refuse_circle(const run *r, uint32_t rank) {
    char text[QE_ERROR_TEXT_BYTES], link[256];
    size_t length = 0;
    for (uint32_t i = 0; i < r->j->schedule->ranks; i++) rank = next_stuck(r, rank, link, sizeof link);
    const qe_action *place = front(r, rank);
    uint32_t first = rank;
    do {
        rank = next_stuck(r, rank, link, sizeof link);
        if (length >= sizeof text) continue;
        length += (size_t)snprintf(text + length, sizeof text - length, "%s%s", length == 0 ? "" : "; ", link);
    } while (rank != first);
    (void)qe_error_set(r->j->error_out, QE_CONTRACT,
                       "put the transfers between two ranks into the same order on both, or leave all of them out",
                       "%s: transfers wait for each other: %s", qe_rule_id(QE_RULE_SCHEDULE_CYCLE), text);
    (void)qe_error_place(r->j->error_out, r->j->path, place->row, place->column);
    return QE_CONTRACT;
}

/* Where the transfers of each rank begin and end. */
static void find_rows(run *r) {
    uint32_t next = 0;
    for (uint32_t rank = 0; rank < r->j->schedule->ranks; rank++) {
        r->action[rank] = r->j->schedule->rank_begin[rank];
        r->move[rank] = next;
        while (next < r->j->move_count && r->j->moves[next].rank == rank) next++;
        r->move_end[rank] = next;
        skip_over(r, rank);
    }
}

static qe_status judge_run(const judge *j) {
    uint32_t ranks = j->schedule->ranks;
    run r = {.j = j, .action = malloc((size_t)3 * ranks * sizeof *r.action), .over = calloc(j->move_count, 1)};
    qe_status status = QE_OK;
    if (r.action == NULL || r.over == NULL) {
        status = qe_error_set(j->error_out, QE_ERROR_MEMORY, NULL, "no memory to check a schedule");
    } else {
        r.move = r.action + ranks;
        r.move_end = r.move + ranks;
        find_rows(&r);
        for (int moved = 1; moved;) {
            moved = 0;
            for (uint32_t rank = 0; rank < ranks; rank++) moved |= step_rank(&r, rank);
        }
        for (uint32_t rank = 0; rank < ranks && status == QE_OK; rank++) {
            if (front(&r, rank) != NULL) status = refuse_circle(&r, rank);
        }
    }
    free(r.action);
    free(r.over);
    return status;
}

static qe_status judge_transfers(const judge *j) {
    QE_TRY(judge_each(j));
    QE_TRY(judge_all_there(j));
    return judge_run(j);
}

/* What a row says of the weights of its stages. */
typedef struct shards {
    int shards, reduces;              /* does the file say anything of it? */
    uint8_t *unsharded, *reduced;     /* [stages] */
    uint32_t *last_gradient;          /* [stages]: index of the row's last W or B, or QE_NONE */
} shards;

static qe_status judge_shard(const judge *j, shards *s, const qe_csv_move *move) {
    const qe_action *action = &move->action;
    if (action->kind == QE_CSV_UNSHARD) {
        if (s->unsharded[action->stage]++) {
            return refuse(j, action, QE_RULE_SCHEDULE_DUPLICATE, "gathers weights that are there", NULL);
        }
    } else if (action->kind == QE_CSV_RESHARD) {
        if (!s->unsharded[action->stage]) {
            return refuse(j, action, QE_RULE_SCHEDULE_ORDER, "drops weights that are not there", NULL);
        }
        s->unsharded[action->stage] = 0;
    } else if (action->kind == QE_CSV_REDUCE_GRAD) {
        uint32_t last = s->last_gradient[action->stage];
        if (s->reduced[action->stage]++) {
            return refuse(j, action, QE_RULE_SCHEDULE_DUPLICATE, "reduces gradients a second time", NULL);
        }
        if (last == QE_NONE || move->before > last) return QE_OK;
        return refuse(j, action, QE_RULE_SCHEDULE_ORDER, "comes before the last gradient of its stage, ",
                      &j->schedule->actions[last]);
    }
    return QE_OK;
}

static void begin_row(const judge *j, shards *s, uint32_t rank) {
    memset(s->unsharded, 0, j->schedule->stages);
    memset(s->reduced, 0, j->schedule->stages);
    for (uint32_t stage = 0; stage < j->schedule->stages; stage++) s->last_gradient[stage] = QE_NONE;
    for (uint32_t i = j->schedule->rank_begin[rank]; i < j->schedule->rank_begin[rank + 1]; i++) {
        const qe_action *action = &j->schedule->actions[i];
        if (action->kind == QE_ACTION_W || action->kind == QE_ACTION_B) s->last_gradient[action->stage] = i;
    }
}

/* One row; *next: index of its first move, behind its last afterwards. */
static qe_status judge_row(const judge *j, shards *s, uint32_t rank, uint32_t *next) {
    begin_row(j, s, rank);
    for (uint32_t i = j->schedule->rank_begin[rank]; i <= j->schedule->rank_begin[rank + 1]; i++) {
        while (*next < j->move_count && j->moves[*next].rank == rank && j->moves[*next].before <= i) {
            QE_TRY(judge_shard(j, s, &j->moves[(*next)++]));
        }
        if (i == j->schedule->rank_begin[rank + 1] || !s->shards) continue;
        const qe_action *action = &j->schedule->actions[i];
        if (s->unsharded[action->stage]) continue;
        return refuse(j, action, QE_RULE_SCHEDULE_ORDER, "runs without the weights of its stage: no UNSHARD", NULL);
    }
    for (uint32_t stage = 0; s->reduces && stage < j->schedule->stages; stage++) {
        uint32_t last = s->last_gradient[stage];
        if (last == QE_NONE || s->reduced[stage]) continue;
        return refuse(j, &j->schedule->actions[last], QE_RULE_SCHEDULE_MISSING,
                      "ends its stage's gradients, and no REDUCE_GRAD follows", NULL);
    }
    return QE_OK;
}

static qe_status judge_shards(const judge *j) {
    uint32_t stages = j->schedule->stages, next = 0;
    uint8_t *memory = malloc(stages * (2 + sizeof(uint32_t)));
    if (memory == NULL) return qe_error_set(j->error_out, QE_ERROR_MEMORY, NULL, "no memory to check a schedule");
    shards s = {.last_gradient = (void *)memory, .unsharded = memory + stages * sizeof(uint32_t)};
    s.reduced = s.unsharded + stages;
    for (uint32_t i = 0; i < j->move_count; i++) {
        uint8_t kind = j->moves[i].action.kind;
        if (kind == QE_CSV_UNSHARD || kind == QE_CSV_RESHARD) s.shards = 1;
        if (kind == QE_CSV_REDUCE_GRAD) s.reduces = 1;
    }
    qe_status status = QE_OK;
    for (uint32_t rank = 0; rank < j->schedule->ranks && status == QE_OK; rank++) {
        status = judge_row(j, &s, rank, &next);
    }
    free(memory);
    return status;
}

static void find_producers(judge *j) {
    for (uint32_t i = 0; i < j->schedule->rank_begin[j->schedule->ranks]; i++) {
        const qe_action *action = &j->schedule->actions[i];
        if (action->kind == QE_ACTION_W) continue;
        if (action->kind != QE_ACTION_F) j->training = 1;
        j->producer[lane_of(action->kind)][pair_of(j, action->stage, action->microbatch)] = i;
    }
}

/* Requires: the schedule is valid, so that every pair is there. */
static qe_status judge_moves(judge *j) {
    size_t pairs = (size_t)j->schedule->stages * j->schedule->microbatches;
    uint32_t *memory = malloc(6 * pairs * sizeof *memory);
    int transfers = 0;
    if (memory == NULL) return qe_error_set(j->error_out, QE_ERROR_MEMORY, NULL, "no memory to check a schedule");
    for (size_t i = 0; i < 6 * pairs; i++) memory[i] = QE_NONE;
    for (int lane = 0; lane < 2; lane++) {
        j->producer[lane] = memory + (4 + (size_t)lane) * pairs;
        for (int receives = 0; receives < 2; receives++) {
            j->at[lane][receives] = memory + (2 * (size_t)lane + (size_t)receives) * pairs;
        }
    }
    find_producers(j);
    qe_status status = QE_OK;
    for (uint32_t i = 0; i < j->move_count && status == QE_OK; i++) {
        transfers |= is_transfer(j->moves[i].action.kind);
        status = judge_place(j, &j->moves[i]);
    }
    if (status == QE_OK) status = judge_shards(j);
    if (status == QE_OK && transfers) status = judge_transfers(j);
    free(memory);
    return status;
}

qe_status qe_csv_moves_check(const qe_schedule *schedule, const qe_csv_move *moves, uint32_t move_count,
                             const char *path, qe_error *error_out) {
    if (move_count == 0) return QE_OK;
    qe_status verdict = qe_schedule_check(schedule, NULL, NULL);
    if (verdict == QE_CONTRACT) return QE_OK;
    if (verdict != QE_OK) return qe_error_set(error_out, verdict, NULL, "no memory to check a schedule");
    judge j = {
        .schedule = schedule, .moves = moves, .move_count = move_count, .path = path, .error_out = error_out};
    return judge_moves(&j);
}
